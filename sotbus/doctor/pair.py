"""Two paired runs of ``sotbus doctor --peer``: they go through the same steps, and each knows both sides' results."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sotbus.comm.flock import LockTimeoutError
from sotbus.comm.folder import Folder, make_folder
from sotbus.doctor.peer_board import PEER_FILES, Board, Party, Run, Stopped
from sotbus.doctor.place import Place
from sotbus.doctor.probe import ProbeError
from sotbus.errors import SotbusError

if TYPE_CHECKING:
    from sotbus.comm.lock_manager import LockManager

FIRST, SECOND = 0, 1
"""The two roles. The first is the run with the lower id."""

ANSWER_S = 15.0
"""How long one side waits for one word of the other: its work takes milliseconds, its processor may be busy."""

STEP_S = 60.0
"""How long a step may take in all."""

RESULT_S = 10.0
"""How much longer than its own step one side waits for the result of the other's."""

DONE = "is done with this step"
"""The last word of a step, with its result."""

GIVEN_UP = "the other side gave it up"
"""The error of a side whose other side failed first."""

LOOK_MIN_S = 0.004
LOOK_MAX_S = 0.06
"""Pause between two looks for a word of the other, shorter at first."""


class Gone(Exception):
    """The other run has ended, or says nothing more; the text says which."""


class NotProved(Exception):
    """A step showed nothing, neither good nor bad; ``remedy`` says how it may."""

    def __init__(self, text: str, remedy: str) -> None:
        super().__init__(text)
        self.remedy = remedy


class _Cut(Exception):
    """The other side has given up the step that this one is in the middle of."""


class Pair:
    """This run's side. ``role`` says which of the two it is, ``parties`` are both, the first one first.

    ``folder`` is a small comm folder of the two's own, in ``inbox/`` and so on its mount. What is proved, is proved in
    it: the messages make each side list ``inbox/``, which freshens the names there and nowhere else.
    """

    def __init__(self, place: Place, board: Board, run: Run, mine: Party, other: Party) -> None:
        self.place = place
        self.board = board
        self.run = run
        self.mine = mine
        self.other = other
        self.role = FIRST if mine.id < other.id else SECOND
        self.parties = (mine, other) if self.role == FIRST else (other, mine)
        self.folder = Folder(f"{board.folder}/{PEER_FILES}{self.parties[FIRST].id}-{self.parties[SECOND].id}")
        self._at = 0
        self._step = ""
        self._deadline = 0.0
        self._early: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"<Pair of {self.mine.host} with {self.other.host}, at {self._step or 'the start'}>"

    @property
    def labels(self) -> tuple[str, str]:
        """What the two are called: their hosts, with the machine's id where those are equal."""
        first, second = self.parties
        if first.host != second.host:
            return first.host, second.host
        return f"{first.host} ({first.machine[:8] or first.pid})", f"{second.host} ({second.machine[:8] or second.pid})"

    @property
    def lock_manager(self) -> LockManager:
        """This side's. Both have said that they have one."""
        manager = self.place.lock_manager
        assert manager is not None
        return manager

    def pause(self, seconds: float) -> None:
        """Wait. *Errors*: :class:`Stopped`."""
        self.board.pulse.pause(seconds)

    def step(self, name: str, work: Callable[[Pair], dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Do this side's half and exchange the results; answers both, the first one's first.

        A half that failed has only ``error``, its reason.

        *Errors*: :class:`Gone`, OSError where the folder itself fails, :class:`Stopped`.
        """
        self._step, self._early = name, None
        self._deadline = time.monotonic() + STEP_S
        try:
            mine = work(self)
        except (Stopped, Gone):
            raise
        except _Cut:
            mine = {"error": GIVEN_UP}
        except LockTimeoutError:
            mine = {"error": "the lock was not free, though nobody was to hold it"}
        except (ProbeError, SotbusError) as error:
            mine = {"error": str(error)}
        except OSError as error:
            mine = {"error": f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")}
        except Exception as error:  # a lock manager is a plugin's
            mine = {"error": f"{type(error).__name__}: {error}"}
        self.say(DONE, **mine)
        self._deadline += RESULT_S
        theirs = self._early if self._early is not None else self._result()
        return (mine, theirs) if self.role == FIRST else (theirs, mine)

    def _result(self) -> dict[str, Any]:
        try:
            return self.hear(DONE, STEP_S + RESULT_S)
        except ProbeError as error:
            raise Gone(str(error)) from error

    def say(self, word: str, **data: Any) -> None:
        """Say that this side ``word`` in the present step, with what belongs to it. *Errors*: OSError."""
        self.board.post("step", step=self._step, word=word, seen=len(self.run.messages), data=data)

    def hear(self, word: str, within_s: float = ANSWER_S) -> dict[str, Any]:
        """Wait until the other side says that it ``word``; answers what belongs to it.

        *Errors*: :class:`ProbeError` where it does not come in time, :class:`Gone`, OSError, :class:`Stopped`.
        """
        began = time.monotonic()
        deadline = min(began + within_s, self._deadline)
        pause = LOOK_MIN_S
        while True:
            self.board.look(self.run)
            while self._at < len(self.run.messages):
                message = self.run.messages[self._at]
                self._at += 1
                self.board.forget(int(message.get("seen", 0)))
                if message.get("step") != self._step:
                    continue  # from before the steps, or of one that was given up
                if message.get("word") == word:
                    return dict(message["data"])
                if message.get("word") == DONE:
                    self._early = dict(message["data"])
                    raise _Cut
            if self.run.gone:
                raise Gone(f"the run on {self.other.host} has ended")
            if time.monotonic() >= deadline:
                raise ProbeError(f"{self.other.host} did not say within {time.monotonic() - began:.0f}s that it {word}")
            self.board.pulse.pause(pause)
            pause = min(pause * 1.5, LOOK_MAX_S)

    def begin(self) -> None:
        """The first makes the folder, and the second looks for nothing in it before.

        *Errors*: :class:`Gone`, OSError, :class:`Stopped`.
        """
        self._step, self._deadline = "start", time.monotonic() + STEP_S
        if self.role == FIRST:
            make_folder(self.folder.root)
            make_folder(self.folder.inboxes)
            self.say("has made the folder")
            return
        try:
            self.hear("has made the folder", STEP_S)
        except ProbeError as error:
            raise Gone(str(error)) from error

    def meet(self) -> None:
        """Both begin what follows at about the same time. *Errors*: as :meth:`hear`."""
        self.say("is ready")
        self.hear("is ready")

    def part(self) -> None:
        """The end: neither removes its files before the other has read them. A run that has gone has read them all.

        *Errors*: OSError, :class:`Stopped`.
        """
        self._step, self._deadline = "end", time.monotonic() + ANSWER_S
        try:
            self.meet()
        except (Gone, ProbeError, _Cut):
            return
