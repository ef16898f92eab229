"""The ready-made delivery into a comm folder: what ``filesystem`` returns, and any lock manager's plugin may."""

from __future__ import annotations

import os

import trio

from sotbus import message
from sotbus.comm import handles
from sotbus.comm.inbox import Inbox
from sotbus.contracts import Destination, Filing, Inbound, LockManager, Receipt

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from sotbus.comm.folder import Folder

DELIVERED = "delivered"


class FolderDelivery:
    """Files into the mailboxes of one comm folder, in a worker thread.

    :param folder: the comm folder.
    :param node: the node whose mailboxes these are.
    :param manager: answers the lock manager to append under at that moment; raises where this process may not append.
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

    def reaches(self, destination: Destination) -> bool:
        """Whether the destination is a handle of this folder's node."""
        return destination.node == self.node and handles.is_handle(destination.mailbox)

    async def deliver(self, filing: Filing, deadline_s: float) -> Receipt:
        """Append the line; the answer comes after the sync.

        *Errors*: BadHandle, BadRequest, TooLarge, FilingFailed: not filed, unless its ``outcome_unknown`` is set.
        *Cancellation*: an append that has begun runs to its end in its thread; its outcome is not told then.
        """
        handles.check(filing.to)
        message.check_text(filing.text, self._max_text_bytes)
        await trio.to_thread.run_sync(self._append, filing, deadline_s, limiter=self._limiter)
        return Receipt(DELIVERED, self.folder.inbox(filing.to))

    def _append(self, filing: Filing, bound_s: float) -> None:
        to = "" if filing.broadcast else filing.to
        line = message.encode(filing.sender, to, filing.repo, filing.text, message.stamp())
        if not os.path.isdir(self.folder.inboxes):
            self.folder.ensure()
        Inbox(self.folder, filing.to, self._manager()).append(line, bound_s)

    async def serve(self, inbound: Inbound) -> None:
        """Nothing comes in through a folder, whose readers poll; so ``inbound`` is handed nothing."""
        del inbound
        await trio.lowlevel.checkpoint()
