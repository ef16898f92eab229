"""The ready-made delivery into a comm folder: what ``filesystem`` and ``nfs`` return, and any plugin may."""

from __future__ import annotations

import os
import time

import trio

from sotbus import message
from sotbus.comm import handles
from sotbus.comm.box import Box
from sotbus.comm.folder import Folder
from sotbus.comm.inbox import Inbox
from sotbus.comm.lock_manager import inbox_lock_manager
from sotbus.comm.topology import NO_TOPOLOGY, Topology
from sotbus.comm.writer_gate import WriterGate
from sotbus.contracts import BoxFacts, Destination, Filing, Inbound, LockManager, Receipt
from sotbus.errors import BadRequest, FilingFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

DELIVERED = "delivered"


class FolderDelivery:
    """Files into the mailboxes of one comm folder, in a worker thread.

    :param folder: the comm folder.
    :param node: the node whose mailboxes these are.
    :param manager: answers the lock manager to append under at that moment; raises where this process may not append.
        Asked by several threads at once.
    :param limiter: bounds the threads that wait on this folder's mount; one of its own by default.
    """

    def __init__(
        self,
        folder: Folder,
        node: str,
        manager: Callable[[], LockManager],
        limiter: trio.CapacityLimiter | None = None,
        max_text_bytes: int = message.MAX_TEXT_BYTES,
    ) -> None:
        self.folder = folder
        self.node = node
        self._manager = manager
        self._limiter = limiter or trio.CapacityLimiter(8)
        self._max_text_bytes = max_text_bytes

    def __repr__(self) -> str:
        return f"<FolderDelivery {self.folder.root} of {self.node}>"

    @classmethod
    def of(cls, facts: BoxFacts, kind: str, topology: Topology = NO_TOPOLOGY) -> FolderDelivery | None:
        """The delivery into this box's comm folder, where its lock manager's identity begins with ``kind``.

        None for a folder on another kind of mount, and for one that is not made yet.

        :param topology: whose comm folder it is; without one this box stands in for the folder's hub.
        """
        box = Box.here(os.environ, facts.machine_id)
        folder = Folder(facts.comm_home)
        manager = inbox_lock_manager(folder.inboxes, box)
        if manager is None or not manager.identity.startswith(kind):
            return None
        gate = WriterGate(folder, box, topology)
        return cls(folder, f"{facts.user}.{facts.host}", gate.manager)

    def reaches(self, destination: Destination) -> bool:
        """Whether the destination is a handle of this folder's node."""
        return destination.node == self.node and handles.is_handle(destination.mailbox)

    async def deliver(self, filing: Filing, deadline_s: float) -> Receipt:
        """Append the line; the answer comes after the sync.

        *Errors*: BadHandle, BadRequest, TooLarge, FilingFailed: not filed, unless its ``outcome_unknown`` is set.
        *Cancellation*: an append that has begun runs to its end in its thread, and its answer is returned all the same.
        """
        handles.check(filing.to)
        for name in (filing.sender, filing.repo):
            if message.unicode_of(name) != name:
                raise BadRequest(f"{name!r} is not valid Unicode; nothing was sent")
        message.check_text(filing.text, self._max_text_bytes)
        deadline = time.monotonic() + deadline_s
        with trio.move_on_after(max(0.0, deadline_s)):  # ends the wait for a thread; one that runs is waited for
            await trio.to_thread.run_sync(self._append, filing, deadline, limiter=self._limiter)
            return Receipt(DELIVERED, self.folder.inbox(filing.to))
        raise FilingFailed(
            f"no thread of {self.folder.root} was free within {deadline_s:g}s to append for @{filing.to} — "
            "nothing was appended"
        )

    def _append(self, filing: Filing, deadline: float) -> None:
        to = "" if filing.broadcast else filing.to
        line = message.encode(filing.sender, to, filing.repo, filing.text, message.stamp())
        if not os.path.isdir(self.folder.inboxes):
            self.folder.ensure()
        Inbox(self.folder, filing.to, self._manager()).append(line, max(0.0, deadline - time.monotonic()))

    async def serve(self, inbound: Inbound) -> None:
        """Nothing comes in through a folder, whose readers poll; so ``inbound`` is handed nothing."""
        del inbound
        await trio.lowlevel.checkpoint()
