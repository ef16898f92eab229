"""Group commit: the filings that wait for one mailbox share one lock hold, one store commit and one sync.

Each is answered for itself, after the sync. A mailbox has one writer, which has one thread at a time; a batch is what
waits at the moment when that thread has the inbox lock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import trio

from sotbus import message
from sotbus.contracts import Receipt
from sotbus.errors import Busy, FilingFailed
from sotbus.folder_delivery import DELIVERED
from sotbus.node.deadlines import Wait
from sotbus.node.filing_queue import FilingQueue, Limits, WaitingFiling
from sotbus.node.group_commit import Mailbox, Round, conflict

if TYPE_CHECKING:
    from collections.abc import Callable

    from sotbus.comm.folder import Folder
    from sotbus.comm.settings import Settings
    from sotbus.comm.writer_gate import WriterGate
    from sotbus.contracts import Filing
    from sotbus.node.deadlines import Deadlines
    from sotbus.node.store import Store

GRACE_S = 1.0
"""How long a writer that is stopped waits for its thread, in seconds, before it leaves it to itself."""


@dataclass
class WriterStatistics:
    """Of one mailbox, or of all, since the start. ``depth`` filings and ``queued_bytes`` wait now.

    ``batches`` had ``lines``, the ``largest_batch`` so many, and took ``syncs`` of the inbox (and the store's commits:
    :class:`sotbus.node.store.StoreStatistics`). ``failed`` counts the filings that were answered an error by a batch,
    ``busy`` those that found the queue full. ``longest_wait_s`` is the longest wait for a turn, in seconds.
    """

    depth: int = 0
    queued_bytes: int = 0
    batches: int = 0
    lines: int = 0
    largest_batch: int = 0
    syncs: int = 0
    failed: int = 0
    busy: int = 0
    longest_wait_s: float = 0.0

    def add(self, other: WriterStatistics) -> None:
        """Take another mailbox's into these."""
        for one in fields(self):
            mine, more = getattr(self, one.name), getattr(other, one.name)
            longest = one.name in ("largest_batch", "longest_wait_s")
            setattr(self, one.name, max(mine, more) if longest else mine + more)


class MailboxWriter:
    """Files into one mailbox, for as many callers as there are.

    :param gate: answers whether this process may append and under which lock manager; asked before each batch.
    :param store: the node's; asked only for filings that have a message ID.
    :param limiter: of the mount that the folder is on, so that one that hangs stalls nothing but itself.
    :param nursery: where the writer waits for a thread while all of its mount's are taken.
    :param deadlines: watches the callers' deadlines.
    :param clock: seconds since the epoch, for the stamps in the lines.
    :param known_as: the folder's path in the store, where that is not its own.
    :param on_cut: told how many bytes of a dead writer's torn tail were cut.
    :param on_fault: told of an error that nobody foresaw. The filings that met it are answered FAILED.
    :param on_idle: told when nothing waits any more.

    What is told this way must not raise: it is told in a callback of trio's.
    """

    def __init__(
        self,
        folder: Folder,
        handle: str,
        gate: WriterGate,
        store: Store,
        limiter: trio.CapacityLimiter,
        settings: Settings,
        nursery: trio.Nursery,
        deadlines: Deadlines,
        *,
        clock: Callable[[], float] = time.time,
        limits: Limits | None = None,
        known_as: str | None = None,
        on_cut: Callable[[str, int], object] | None = None,
        on_fault: Callable[[str, Exception], object] | None = None,
        on_idle: Callable[[MailboxWriter], object] | None = None,
    ) -> None:
        self._mailbox = Mailbox(folder, handle, gate, store, settings, limits or Limits(), known_as or folder.root)
        self._limiter = limiter
        self._nursery = nursery
        self._deadlines = deadlines
        self._clock = clock
        self._on_cut, self._on_fault, self._on_idle = on_cut, on_fault, on_idle
        self._queue = FilingQueue()
        self._counts = WriterStatistics()
        self._turn: Round | None = None
        self._thread_is_awaited = False
        self._stopping = False
        self._last_turn_over = trio.Event()

    def __repr__(self) -> str:
        return f"<MailboxWriter @{self._mailbox.handle}: {len(self._queue)} wait, {self._counts.lines} lines filed>"

    @property
    def idle(self) -> bool:
        """Whether no thread works, and none is waited for."""
        return self._turn is None and not self._thread_is_awaited

    @property
    def handle(self) -> str:
        """The mailbox's."""
        return self._mailbox.handle

    def statistics(self) -> WriterStatistics:
        """Counts for the person who looks at the node."""
        now = WriterStatistics(depth=len(self._queue), queued_bytes=self._queue.bytes)
        now.add(self._counts)
        return now

    async def file(self, filing: Filing, deadline_s: float) -> Receipt:
        """File one message; what was called first stands first in the inbox.

        A message ID that was filed before is not filed again: it gets the first answer. One whose filing is under way
        waits for its end, and gets the same answer.

        :param deadline_s: seconds from now.

        *Durability*: when this returns the line is on disk.
        *Errors*: BadRequest; :class:`Busy` where too much waits already; :class:`Conflict` for a message ID of another
        message; FilingFailed: this call has not filed it, unless ``outcome_unknown``. Past the deadline that is set
        where the line may be written already, or still be for another caller with the same ID. An earlier call may have
        filed it all the same, if its own outcome was unknown.
        *Cancellation*: a filing that waits is taken out; one whose batch has begun may be filed.
        """
        wait = Wait(trio.current_time() + deadline_s)
        waiting = self._join(filing, deadline_s) or self._enter(filing, deadline_s)
        waiting.waits.append(wait)
        withdrawn = False
        try:
            if not waiting.done:
                await self._deadlines.wait(wait)
        finally:
            waiting.waits.remove(wait)
            if not waiting.done and not waiting.waits:
                withdrawn = self._queue.remove(waiting)
                if withdrawn:
                    self._forget(waiting)
        if waiting.done:
            waiting.answer()
            return Receipt(DELIVERED, self._mailbox.folder.inbox(self.handle))
        if withdrawn:
            raise FilingFailed(
                f"the turn for @{self.handle} did not come within {deadline_s:g}s — nothing was appended"
            )
        raise FilingFailed(
            f"the append for @{self.handle} did not end within {deadline_s:g}s, so the outcome is unknown",
            outcome_unknown=True,
        )

    def _join(self, filing: Filing, deadline_s: float) -> WaitingFiling | None:
        """The filing with the same message ID that is under way, if one is. *Errors*: Conflict."""
        flights: dict[str, WaitingFiling] = self._mailbox.store.flights
        if filing.message_id is None or filing.message_id not in flights:
            return None
        there = flights[filing.message_id]
        asked = WaitingFiling(filing, self._mailbox.place, message.stamp(self._clock()), time.monotonic() + deadline_s)
        if (there.place, there.body_hash) != (asked.place, asked.body_hash):
            raise conflict(asked)
        there.deadline = max(there.deadline, asked.deadline)
        return there

    def _enter(self, filing: Filing, deadline_s: float) -> WaitingFiling:
        """Put a new filing into the queue, and see to it that the writer runs. *Errors*: BadRequest, Busy."""
        limits = self._mailbox.limits
        if len(self._queue) >= limits.queue_filings or self._queue.bytes >= limits.queue_bytes:
            self._counts.busy += 1
            raise Busy(f"{len(self._queue)} filings wait for @{self.handle} already; nothing was filed")
        waiting = WaitingFiling(
            filing, self._mailbox.place, message.stamp(self._clock()), time.monotonic() + deadline_s
        )
        self._queue.put(waiting)
        if waiting.message_id is not None:
            self._mailbox.store.flights[waiting.message_id] = waiting
        if self.idle:
            self._begin()
        return waiting

    def _forget(self, waiting: WaitingFiling) -> None:
        if waiting.message_id is not None:
            self._mailbox.store.flights.pop(waiting.message_id, None)

    def _begin(self) -> None:
        """Have a thread take the next turn. No task: each costs a lone filing as much as a tenth of its sync."""
        turn = Round(self._mailbox, self._queue)
        try:
            self._limiter.acquire_on_behalf_of_nowait(turn)
        except trio.WouldBlock:
            self._thread_is_awaited = True
            self._nursery.start_soon(self._begin_later, turn, name=f"mailbox writer of @{self.handle}")
        else:
            self._start(turn)

    async def _begin_later(self, turn: Round) -> None:
        """The same, once one of the mount's threads is free."""
        try:
            await self._limiter.acquire_on_behalf_of(turn)
        finally:
            self._thread_is_awaited = False
        self._start(turn)

    def _start(self, turn: Round) -> None:
        token = trio.lowlevel.current_trio_token()

        def over(_: object) -> None:
            try:
                token.run_sync_soon(self._end, turn)
            except trio.RunFinishedError:
                return  # the whole run is over, and nobody waits

        self._turn = turn
        try:
            trio.lowlevel.start_thread_soon(turn.run, over)
        except RuntimeError as error:  # the process may have no more threads
            self._limiter.release_on_behalf_of(turn)
            self._turn = None
            self._refuse_waiting(f"no thread could be started ({error}) — nothing was appended")

    def _end(self, turn: Round) -> None:
        """In the trio thread, after a turn: its answers, and the next turn where anything waits."""
        self._limiter.release_on_behalf_of(turn)
        if turn is not self._turn:
            return  # it hung when the writer was stopped, and has its answers
        self._turn = None
        self._publish(turn)
        if self._stopping:
            self._last_turn_over.set()
        elif len(self._queue):
            self._begin()
        elif self._on_idle is not None:
            self._on_idle(self)

    async def stop(self) -> None:
        """Answer what waits FAILED, and what is in a turn by its end, or after ``GRACE_S`` as unknown. The last call.

        *Cancellation*: none; it takes ``GRACE_S`` at most.
        """
        self._stopping = True
        self._refuse_waiting("the node is stopping — nothing was appended")
        if self._turn is not None:
            with trio.move_on_after(GRACE_S, shield=True):
                await self._last_turn_over.wait()
        turn, self._turn = self._turn, None
        if turn is not None:
            self._publish(turn)
        self._refuse_waiting("the node is stopping — nothing was appended")  # what the turn has put back

    def _refuse_waiting(self, why: str) -> None:
        for waiting in self._queue.all():
            if self._queue.remove(waiting):
                waiting.error = FilingFailed(why)
                self._forget(waiting)
                waiting.finish()

    def _publish(self, turn: Round) -> None:
        """Answer, in order, and count."""
        for waiting in turn.end():
            self._forget(waiting)
            self._counts.failed += waiting.error is not None
            waiting.finish()
        counts = self._counts
        counts.batches += turn.lines > 0
        counts.lines += turn.lines
        counts.largest_batch = max(counts.largest_batch, turn.lines)
        counts.syncs += turn.syncs
        counts.longest_wait_s = max(counts.longest_wait_s, turn.longest_wait_s)
        if turn.cut_bytes and self._on_cut is not None:
            self._on_cut(self.handle, turn.cut_bytes)
        if turn.fault is not None and self._on_fault is not None:
            self._on_fault(self.handle, turn.fault)
