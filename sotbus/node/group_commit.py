"""One turn of a mailbox's thread: lock, choose, commit the intents, write, sync, and an answer for each filing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sotbus.comm.batch import Batch
from sotbus.comm.inbox import Inbox
from sotbus.errors import FilingFailed, SotbusError
from sotbus.node.filing_queue import ANSWERED, TAKEN
from sotbus.node.settling import line_hash, settle
from sotbus.node.store import FILED, NOT_FILED, OPEN, Conflict, Intent
from sotbus.node.store_file import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sotbus.comm.folder import Folder
    from sotbus.comm.settings import Settings
    from sotbus.comm.writer_gate import WriterGate
    from sotbus.node.filing_queue import FilingQueue, Limits, WaitingFiling
    from sotbus.node.store import Store

STILL_OPEN = "an earlier filing with this message ID may stand and could not be looked for, so the outcome is unknown"


@dataclass(frozen=True)
class Mailbox:
    """What a turn works with: an inbox of a comm folder, who may append to it, the node's store, waits and bounds."""

    folder: Folder
    handle: str
    gate: WriterGate
    store: Store
    settings: Settings
    limits: Limits
    known_as: str
    """The folder's path in the store."""

    @property
    def place(self) -> tuple[str, str]:
        """How the store names it."""
        return self.known_as, self.handle


class Round:
    """One turn. :meth:`run` is for a worker thread; what it came to is read by the trio thread after that.

    ``answered`` are the filings that have their answer, in order. ``lines`` counts what was written, ``syncs`` the
    inbox's own syncs, ``cut_bytes`` what a dead writer had left; ``fault`` is an error that nobody foresaw.
    """

    def __init__(self, mailbox: Mailbox, queue: FilingQueue) -> None:
        self._mailbox = mailbox
        self._queue = queue
        self._taken: list[WaitingFiling] = []
        self._written: list[WaitingFiling] = []
        self._open: list[tuple[WaitingFiling, Intent]] = []
        self._known: dict[WaitingFiling, Intent | None] = {}
        self.answered: list[WaitingFiling] = []
        self.lines = self.syncs = self.cut_bytes = 0
        self.longest_wait_s = 0.0
        self.fault: Exception | None = None

    def __repr__(self) -> str:
        return f"<Round for @{self._mailbox.handle}: {self.lines} lines, {len(self.answered)} answered>"

    def run(self) -> None:
        """File what waits. Raises nothing: each filing that was taken has its answer after this, or waits again."""
        first = self._queue.all()
        if not first:
            return
        try:
            self._run(first)
        except Exception as error:
            self.fault = error
            why = f"the append failed: {type(error).__name__}: {error}; the outcome is unknown"
            for waiting in self._taken:
                self._answer(waiting, FilingFailed(why, outcome_unknown=True))
            for waiting in first if not self._taken else ():
                self._answer_queued(waiting, FilingFailed(f"the append failed: {type(error).__name__}: {error}"))

    def end(self) -> list[WaitingFiling]:
        """For the trio thread: what has its answer, in order. Where it waits for the run no more, all that it took."""
        for waiting in list(self._taken):
            self._answer(
                waiting,
                FilingFailed(
                    "the node stopped while the line was written; the outcome is unknown", outcome_unknown=True
                ),
            )
        with self._queue.lock:
            return list(self.answered)

    def _run(self, first: Sequence[WaitingFiling]) -> None:
        box = self._mailbox
        first = self._without_repeats(first)
        if not first:
            return
        batch = Batch(self._choose)
        inbox: Inbox | None = None
        try:
            inbox = Inbox(box.folder, box.handle, box.gate.manager(), self._note_cut)
            inbox.append(batch, box.settings.inbox_lock_wait_s)
        except SotbusError as error:
            self._failed(error, first)
        else:
            self.lines = len(batch.lines)
            box.store.settle({one.message_id: True for one in self._written if one.message_id is not None})
            for waiting in self._written:
                self._answer(waiting, None)
        self.syncs += batch.syncs
        if self._open and inbox is not None:
            self._settle(inbox)

    def _note_cut(self, count: int) -> None:
        self.cut_bytes += count

    def _without_repeats(self, first: Sequence[WaitingFiling]) -> list[WaitingFiling]:
        """Answer what was filed before, which needs no lock; what is left. Where the store fails, it fails again."""
        try:
            self._look_up(first)
        except StoreError:
            return list(first)
        left = []
        for one in first:
            before = self._known.get(one)
            if before is None or before.state != FILED:
                left.append(one)
            else:
                self._answer_queued(one, None if self._is_same(one, before) else conflict(one))
        return left

    def _look_up(self, several: Sequence[WaitingFiling]) -> None:
        """Ask the store about each one's message ID, once: while it waits here, nobody else files under it.

        *Errors*: StoreError.
        """
        named = {one: one.message_id for one in several if one.message_id is not None and one not in self._known}
        if named:
            known = self._mailbox.store.known(named.values())
            self._known.update((one, known.get(message_id)) for one, message_id in named.items())

    def _is_same(self, one: WaitingFiling, before: Intent) -> bool:
        """Whether an intent is of the same message for the same mailbox."""
        return (before.folder, before.mailbox, before.body_hash) == (*self._mailbox.place, one.body_hash)

    def _choose(self, offset: int) -> list[bytes]:
        """Under the inbox lock: the lines of this batch, their intents committed."""
        box = self._mailbox
        now = time.monotonic()
        self._taken, late = self._queue.take(box.limits, now)
        self.longest_wait_s = max((now - one.asked_at for one in (*self._taken, *late)), default=0.0)
        for waiting in late:
            self._answer(waiting, FilingFailed(f"its turn for @{box.handle} came too late — nothing was appended"))
        written: list[WaitingFiling] = self._taken
        sure: set[WaitingFiling] = set()
        try:
            self._look_up(self._taken)
            written, intents = self._sort(offset)
            sure.update(written)
            if intents:
                box.store.intend(intents)
        except StoreError as error:
            self._open.clear()
            for one in self._taken:
                if one.message_id is not None:  # it may have been filed before, unless the store has said no
                    self._answer(one, FilingFailed(f"{error} — nothing was appended", outcome_unknown=one not in sure))
            written = [one for one in self._taken if one.message_id is None]
        self._written = written
        return [waiting.line for waiting in written]

    def _sort(self, offset: int) -> tuple[list[WaitingFiling], list[Intent]]:
        """What is to be written, with the intents of those that have message IDs; the others are answered or open."""
        written: list[WaitingFiling] = []
        intents: list[Intent] = []
        for one in self._taken:
            before = self._known.get(one)
            if before is not None and before.state != NOT_FILED:
                if not self._is_same(one, before):
                    self._answer(one, conflict(one))
                elif before.state == OPEN:
                    self._open.append((one, before))
                else:
                    self._answer(one, None)
                continue
            if one.message_id is not None:
                size, hashed = len(one.line), line_hash(one.line)
                intents.append(Intent(one.message_id, *self._mailbox.place, one.body_hash, offset, size, hashed))
            written.append(one)
            offset += len(one.line)
        return written, intents

    def _failed(self, error: SotbusError, first: Sequence[WaitingFiling]) -> None:
        """The append raised: nothing is filed, unless its outcome is unknown, which leaves the intents open."""
        if not self._taken:
            for waiting in first:
                self._answer_queued(waiting, error)
            return
        if not getattr(error, "outcome_unknown", False):
            results = {one.message_id: False for one in self._written if one.message_id is not None}
            self._mailbox.store.settle(results)
        for waiting in self._written:
            self._answer(waiting, error)

    def _settle(self, inbox: Inbox) -> None:
        """Message IDs whose earlier filing may stand: the inbox says. What is not there is filed in the next turn."""
        intents = [intent for _, intent in self._open]
        try:
            found = settle(self._mailbox.store, inbox, intents, self._mailbox.settings.inbox_lock_wait_s)
        except SotbusError as error:
            for waiting, _ in self._open:
                self._answer(waiting, FilingFailed(f"{STILL_OPEN}: {error}", outcome_unknown=True))
            return
        for waiting, intent in self._open:
            if intent.message_id in found:
                self._answer(waiting, None)
        self._queue.put_back(one for one, intent in self._open if intent.message_id not in found)

    def _answer_queued(self, waiting: WaitingFiling, error: SotbusError | None) -> None:
        """Answer one that was not taken, unless it has gone meanwhile."""
        if self._queue.remove(waiting):
            with self._queue.lock:
                self._note(waiting, error)

    def _answer(self, waiting: WaitingFiling, error: SotbusError | None) -> None:
        """Answer one that was taken, unless it has its answer."""
        with self._queue.lock:
            if waiting.state == TAKEN:
                waiting.state = ANSWERED
                self._note(waiting, error)

    def _note(self, waiting: WaitingFiling, error: SotbusError | None) -> None:
        if error is not None:
            error.__traceback__ = error.__cause__ = error.__context__ = None  # they hold this round, which holds it
        waiting.error = error
        self.answered.append(waiting)


def conflict(waiting: WaitingFiling) -> Conflict:
    """The refusal of a message ID that is another message's."""
    return Conflict(
        f"the message ID {waiting.message_id} is that of another message (another sender, text or mailbox); "
        "nothing was filed"
    )
