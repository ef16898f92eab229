"""What two boxes prove of the lock: that it excludes between them, lets readers share it, and goes on when one dies."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from random import uniform
from typing import TYPE_CHECKING, Any

from sotbus.comm.flock import LockTimeoutError
from sotbus.comm.folder import PRIVATE_FILE
from sotbus.doctor.check import Verdict, fault, sound
from sotbus.doctor.pair import FIRST, SECOND, NotProved, Pair
from sotbus.doctor.probe import GRACE_S, Worker

if TYPE_CHECKING:
    from sotbus.comm.lock_manager import LockManager

TRY_S = 0.5
"""How long a side that must not get the lock asks for it."""

FREE_S = 10.0
"""Within this long a side that must get the lock has it."""

RELEASE_S = 0.3
"""How long a holder lets the other side wait before it releases, so that the wait is a real one."""

CONTEND_S = 2.0
HOLD_S = 0.001
"""How long a contender keeps the lock: long enough that the other one wants it meanwhile."""

PAUSE_S = 0.003
"""At most this long a contender stays away after a hold, so that the other has its turn."""

MIN_WAITS = 10
"""With fewer holds that had to wait, the boxes hardly met at the lock, and nothing is proved."""

ROUNDS = 3
"""How often they contend, at most, until they have met so often."""

START_S = 30.0
"""How long the process that is to be killed may take to start: a cold Python on a busy box takes seconds."""

MAIL = "mail"
"""The handle of the inbox that the two append to, and whose lock they take, in the folder of their own."""

AGAIN = "run it again on both boxes when they are less busy: sotbus doctor --probe --peer"


class Marked:
    """A lock manager that finds out by itself whether it excludes.

    Inside each exclusive hold a marker file is made, exclusively, and removed. One that is there already is another
    holder's: an overlap. Of two that make a file with O_CREAT and O_EXCL one wins, on NFS too (open(2)).
    ``holds``, ``waited`` (how many were refused at first) and ``overlaps`` count this side's exclusive holds.
    """

    def __init__(self, manager: LockManager, marker: str) -> None:
        self._manager = manager
        self._marker = marker
        self.identity = manager.identity
        self.proves_fresh_read = manager.proves_fresh_read
        self.fences_data = manager.fences_data
        self.holds = self.waited = self.overlaps = 0

    def __repr__(self) -> str:
        return f"<Marked {self.identity}: {self.holds} holds, {self.overlaps} overlaps>"

    @property
    def counts(self) -> dict[str, int]:
        return {"holds": self.holds, "waited": self.waited, "overlaps": self.overlaps}

    def fence(self, fd: int, bound_s: float) -> bool:
        """The manager's own. *Errors*: LockTimeoutError, OSError."""
        return self._manager.fence(fd, bound_s)

    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        """The manager's own hold, marked where it is exclusive. *Errors*: LockTimeoutError, OSError."""
        with ExitStack() as held:
            if not exclusive:
                held.enter_context(self._manager.hold(path, False, bound_s))
                yield
                return
            try:
                held.enter_context(self._manager.hold(path, True, 0))
            except LockTimeoutError:
                self.waited += 1
                held.enter_context(self._manager.hold(path, True, bound_s))
            self.holds += 1
            held.enter_context(self._mark())
            yield

    @contextmanager
    def _mark(self) -> Iterator[None]:
        try:
            os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE_FILE))
        except FileExistsError:
            self.overlaps += 1
            yield
            return
        try:
            yield
        finally:
            os.unlink(self._marker)


def exclusion(pair: Pair) -> dict[str, Any]:
    """Each side in turn holds the lock while the other asks for it; then both contend."""
    seen: dict[str, Any] = {}
    for holder in (FIRST, SECOND):
        if pair.role == holder:
            _be_asked(pair)
        else:
            seen = _ask(pair)
    return {**seen, **_contend(pair)}


def _be_asked(pair: Pair) -> None:
    """The holder's part."""
    with pair.lock_manager.hold(_lock(pair), True, FREE_S):
        pair.say("holds the lock")
        pair.hear("has tried to get it")
        pair.pause(RELEASE_S)
    pair.hear("has waited for it", FREE_S + GRACE_S)
    with pair.lock_manager.hold(_lock(pair), False, FREE_S):
        pair.say("holds the lock for reading")
        pair.hear("has tried to get it", FREE_S + GRACE_S)


def _ask(pair: Pair) -> dict[str, Any]:
    """The other's part: which of its tries got the lock. ``beside`` and ``writer`` must not, the rest must."""
    pair.hear("holds the lock")
    beside = _gets(pair, exclusive=True, bound_s=TRY_S)
    reader_beside = _gets(pair, exclusive=False, bound_s=TRY_S)
    pair.say("has tried to get it")
    freed = _gets(pair, exclusive=True, bound_s=FREE_S)
    pair.say("has waited for it")
    pair.hear("holds the lock for reading")
    shared = _gets(pair, exclusive=False, bound_s=FREE_S)
    writer = _gets(pair, exclusive=True, bound_s=TRY_S)
    pair.say("has tried to get it")
    return {"beside": beside, "reader_beside": reader_beside, "freed": freed, "shared": shared, "writer": writer}


def _contend(pair: Pair) -> dict[str, int]:
    """Both take and leave the lock, until they have met at it often enough."""
    lock = Marked(pair.lock_manager, marker(pair))
    for _ in range(ROUNDS):
        pair.meet()
        until = time.monotonic() + CONTEND_S
        while time.monotonic() < until:
            pair.pause(uniform(0, PAUSE_S))
            with lock.hold(_lock(pair), True, FREE_S):
                time.sleep(HOLD_S)
        pair.say("has contended for the lock", **lock.counts)
        other = pair.hear("has contended for the lock")
        if lock.overlaps + other["overlaps"] or lock.waited + other["waited"] >= MIN_WAITS:
            break
    return lock.counts


def judge_exclusion(results: Sequence[dict[str, Any]], labels: Sequence[str], remedy: str) -> Verdict:
    """*Errors*: :class:`NotProved` where the two hardly met at the lock."""
    wrong = []
    for role, result in enumerate(results):
        asker, holder = labels[role], labels[1 - role]
        if result["beside"]:
            wrong.append(f"{asker} got the lock while {holder} held it")
        elif result["reader_beside"]:
            wrong.append(f"{asker} got it for reading while {holder} held it for writing")
        elif result["writer"]:
            wrong.append(f"{asker} got it for writing while {holder} held it for reading")
        if not result["freed"]:
            wrong.append(f"{asker} did not get it within {FREE_S:g}s, though {holder} had released it")
        if not result["shared"]:
            wrong.append(f"{asker} did not get it for reading beside {holder}, which read")
    holds, waited, overlaps = (sum(result[count] for result in results) for count in ("holds", "waited", "overlaps"))
    if overlaps:
        wrong.append(f"of {holds} holds by both {overlaps} began while the other box was in one")
    if wrong:
        return fault(f"the lock does not do its work between them: {', '.join(wrong)}", remedy)
    if waited < MIN_WAITS or not all(result["holds"] for result in results):
        raise NotProved(
            f"nothing is proved: the boxes hardly met at the lock ({holds} holds, {waited} of them waited for)", AGAIN
        )
    return sound(
        f"each was kept out while the other held it, and got it after; two could read, and none write beside them; of "
        f"{holds} holds by both, {waited} of them waited for, no two overlapped"
    )


def death(pair: Pair) -> dict[str, Any]:
    """On each side in turn a process that holds the lock is killed while the other side waits for the lock."""
    worker = Worker()
    try:
        box, names = pair.place.box, pair.place.plugin_names
        worker.order(
            "open",
            inboxes=pair.place.folder.inboxes,
            lock=_lock(pair),
            machine_id=box.machine_id,
            mountinfo=box.mountinfo_path,
            plugins=None if names is None else list(names),
        )
        seen: dict[str, Any] = {}
        for holder in (FIRST, SECOND):
            if pair.role == holder:
                worker.answer(START_S)
                held = worker.ask("hold", FREE_S + GRACE_S, exclusive=True, seconds=FREE_S)["held"]
                pair.say("has a process that holds the lock", held=held)
                pair.hear("has tried to get it")
                pair.pause(RELEASE_S)
                worker.kill()
                pair.hear("has waited for it", FREE_S + GRACE_S)
            else:
                held = pair.hear("has a process that holds the lock", START_S + FREE_S)["held"]
                beside = _gets(pair, exclusive=True, bound_s=0)
                pair.say("has tried to get it")
                freed = _gets(pair, exclusive=True, bound_s=FREE_S)
                seen = {"held": held, "beside": beside, "freed": freed}
                pair.say("has waited for it")
        return seen
    finally:
        worker.end()


def judge_death(results: Sequence[dict[str, Any]], labels: Sequence[str], remedy: str) -> Verdict:
    """*Errors*: :class:`NotProved` where the lock was not that process's alone that was killed."""
    del remedy
    for role, result in enumerate(results):
        heir, holder = labels[role], labels[1 - role]
        if not result["held"]:
            raise NotProved(
                f"nothing is proved: the process on {holder} did not get the lock that it was to be killed with", AGAIN
            )
        if result["beside"]:
            raise NotProved(
                f"nothing is proved: {heir} got the lock while a process on {holder} held it", "see peer-exclusion"
            )
        if not result["freed"]:
            return fault(
                f"{FREE_S:g}s after its holder on {holder} was killed, {heir} had not got the lock",
                "look for a server that waits for the lease to end; until then a dead sender blocks a mailbox",
            )
    return sound(f"each got the lock that a process of the other held when it was killed, within {FREE_S:g}s")


def marker(pair: Pair) -> str:
    """The file that is there while a marked hold is."""
    return f"{pair.folder.inboxes}/mark"


def _lock(pair: Pair) -> str:
    return pair.folder.inbox_lock(MAIL)


def _gets(pair: Pair, *, exclusive: bool, bound_s: float) -> bool:
    """Whether this side gets the lock in time; it leaves it at once. *Errors*: OSError."""
    try:
        with pair.lock_manager.hold(_lock(pair), exclusive, bound_s):
            return True
    except LockTimeoutError:
        return False
