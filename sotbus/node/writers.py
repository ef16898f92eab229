"""The writers of a comm folder's mailboxes: one for each handle, made when it is needed, dropped when it is idle."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import trio

from sotbus.contracts import Receipt
from sotbus.errors import FilingFailed
from sotbus.folder_delivery import DELIVERED
from sotbus.node.deadlines import Deadlines
from sotbus.node.filing_queue import body_hash
from sotbus.node.group_commit import STILL_OPEN
from sotbus.node.mailbox_writer import MailboxWriter, WriterStatistics
from sotbus.node.store import NOT_FILED, OPEN
from sotbus.node.store_file import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sotbus.comm.folder import Folder
    from sotbus.comm.settings import Settings
    from sotbus.comm.writer_gate import WriterGate
    from sotbus.contracts import Filing
    from sotbus.node.filing_queue import Limits
    from sotbus.node.store import Store

IDLE_KEPT = 64
"""Idle writers that are kept, the last ones used; each is a few kilobytes."""

STORE_THREADS = 4
"""Threads that may ask the store at a time: it lies on another disk than the folder, maybe."""


class Writers:
    """Files into the mailboxes of one comm folder. ``await nursery.start(writers.run)`` first.

    The parameters are :class:`~sotbus.node.mailbox_writer.MailboxWriter`'s.
    """

    def __init__(
        self,
        folder: Folder,
        gate: WriterGate,
        store: Store,
        limiter: trio.CapacityLimiter,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.time,
        limits: Limits | None = None,
        known_as: str | None = None,
        on_cut: Callable[[str, int], object] | None = None,
        on_fault: Callable[[str, Exception], object] | None = None,
    ) -> None:
        self.folder = folder
        self._gate = gate
        self._store = store
        self._limiter = limiter
        self._settings = settings
        self._clock = clock
        self._limits = limits
        self._known_as = known_as or folder.root
        self._on_cut, self._on_fault = on_cut, on_fault
        self._nursery: trio.Nursery | None = None
        self._writers: OrderedDict[str, MailboxWriter] = OrderedDict()
        self._deadlines = Deadlines()
        self._dropped = WriterStatistics()
        self._store_limiter = trio.CapacityLimiter(STORE_THREADS)

    def __repr__(self) -> str:
        idle = sum(writer.idle for writer in self._writers.values())
        return f"<Writers of {self.folder.root}: {len(self._writers) - idle} busy, {idle} idle>"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write until cancelled.

        *Cancellation*: what waits is answered FAILED; a batch that has begun is waited for a second, and its filings
        are answered FAILED, outcome unknown, where it does not end.
        """
        async with trio.open_nursery() as nursery:
            await nursery.start(self._deadlines.run)
            self._nursery = nursery
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None
                with trio.CancelScope(shield=True):
                    async with trio.open_nursery() as ending:
                        for writer in self._writers.values():
                            ending.start_soon(writer.stop)

    async def file(self, filing: Filing, deadline_s: float) -> Receipt:
        """File one message in the mailbox ``filing.to``; see :meth:`MailboxWriter.file`."""
        if self._nursery is None:
            raise FilingFailed("the node does not write now — nothing was appended")
        writer = self._writer(filing.to, self._nursery)
        try:
            return await writer.file(filing, deadline_s)
        finally:
            self._drop_idle(writer)

    async def first_answer(self, filing: Filing) -> Receipt | None:
        """The answer to a repeat of a filing that is on disk; None for any other.

        For a caller that would refuse it by now, as its recipient has gone.

        *Errors*: FilingFailed, outcome unknown, where nobody can say now whether it was filed.
        """
        message_id = filing.message_id
        if message_id is None:
            return None
        try:
            known = await trio.to_thread.run_sync(
                self._store.answer_of, message_id, abandon_on_cancel=True, limiter=self._store_limiter
            )
        except StoreError as error:
            raise FilingFailed(f"{error}; the outcome is unknown", outcome_unknown=True) from error
        mine = (self._known_as, filing.to, body_hash(filing))
        if known is None or known.state == NOT_FILED or (known.folder, known.mailbox, known.body_hash) != mine:
            return None
        if known.state == OPEN:
            raise FilingFailed(STILL_OPEN, outcome_unknown=True)
        return Receipt(DELIVERED, self.folder.inbox(filing.to))

    def statistics(self) -> tuple[WriterStatistics, dict[str, WriterStatistics]]:
        """All mailboxes together since the start, and each that has a writer now, by handle."""
        each = {handle: writer.statistics() for handle, writer in self._writers.items()}
        total = WriterStatistics()
        for one in (self._dropped, *each.values()):
            total.add(one)
        return total, each

    def _writer(self, handle: str, nursery: trio.Nursery) -> MailboxWriter:
        writer = self._writers.get(handle)
        if writer is None:
            writer = MailboxWriter(
                self.folder,
                handle,
                self._gate,
                self._store,
                self._limiter,
                self._settings,
                nursery,
                self._deadlines,
                clock=self._clock,
                limits=self._limits,
                known_as=self._known_as,
                on_cut=self._on_cut,
                on_fault=self._on_fault,
                on_idle=self._drop_idle,
            )
            self._writers[handle] = writer
        return writer

    def _drop_idle(self, writer: MailboxWriter) -> None:
        """Keep the last ones used of those that are idle."""
        if self._writers.get(writer.handle) is writer:
            self._writers.move_to_end(writer.handle)
        if len(self._writers) <= IDLE_KEPT:
            return
        idle = [one for one in self._writers.values() if one.idle]
        for one in idle[: max(0, len(idle) - IDLE_KEPT)]:
            self._dropped.add(one.statistics())
            del self._writers[one.handle]
