"""A comm folder as its node knows it: who may append, and who is listed, asked of the disk in a worker thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import trio

from sotbus.comm.identity import NONE
from sotbus.comm.lock_manager import inbox_lock_manager
from sotbus.comm.manager_record import allows, read, refusal
from sotbus.comm.registry_file import RegistryFile
from sotbus.comm.topology import GUEST
from sotbus.errors import RegistryUnreadable

if TYPE_CHECKING:
    from sotbus.comm.client import Client
    from sotbus.comm.lock_manager import LockManager

RECENT_S = 0.05
"""How long what was seen is used without a look, in seconds: less than the wait for the inbox lock that follows. What
would refuse a message is looked at afresh all the same."""

MISSING, UNREADABLE = "missing", "unreadable"
"""Why there are no entries."""


class Seen:
    """One look at the folder.

    :param manager: to append under, or None; ``refusal`` then says why.
    :param guest: whether this box is a guest of the folder.
    :param agents: the registry's entries; where there are none to be had, ``trouble`` is ``MISSING`` or ``UNREADABLE``.
    :param at: when it was taken, by the monotonic clock.
    """

    __slots__ = ("agents", "at", "guest", "manager", "refusal", "trouble")

    def __init__(
        self, manager: LockManager | None, refused: str, guest: bool, agents: dict[str, Any], trouble: str, at: float
    ) -> None:
        self.manager = manager
        self.refusal = refused
        self.guest = guest
        self.agents = agents
        self.trouble = trouble
        self.at = at


class FolderView:
    """Looks at a folder on behalf of all that ask at one time, so that many requests cost one look.

    :param client: the node's; no other thread uses it meanwhile.
    :param limiter: of the folder's mount.
    """

    def __init__(self, client: Client, limiter: trio.CapacityLimiter) -> None:
        self.client = client
        self._limiter = limiter
        self._registry = RegistryFile(client)
        self._agents: dict[str, Any] = {}
        self._trouble = MISSING
        self._seen: Seen | None = None
        self._turn = trio.Semaphore(1, max_value=1)

    def __repr__(self) -> str:
        return f"<FolderView of {self.client.folder.root}>"

    def recent(self) -> Seen | None:
        """What was seen within ``RECENT_S``; None where that is longer ago. No I/O."""
        seen = self._seen
        return seen if seen is not None and seen.at >= trio.current_time() - RECENT_S else None

    async def look(self, *, since: float | None = None) -> Seen:
        """What is so at this moment, or was within ``RECENT_S``.

        :param since: a monotonic time that the look must not be older than.

        *Errors*: OSError where the folder cannot be looked at at all.
        *Cancellation*: a look that has begun is left to its thread; the next one waits for it.
        """
        oldest = trio.current_time() - RECENT_S if since is None else since
        if self._seen is not None and self._seen.at >= oldest:
            return self._seen
        await self._turn.acquire()
        if self._seen is not None and self._seen.at >= oldest:
            self._turn.release()
            return self._seen
        at = trio.current_time()
        token = trio.lowlevel.current_trio_token()

        def work() -> Seen:
            try:
                return self._look(at)
            finally:
                try:
                    token.run_sync_soon(self._turn.release)
                except trio.RunFinishedError:
                    pass

        began = revoked = False
        deciding = threading.Lock()

        def run() -> Seen:
            nonlocal began
            with deciding:
                if revoked:
                    raise RuntimeError("called off")  # nobody waits for this look any more
                began = True
            return work()

        try:
            self._seen = await trio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=self._limiter)
        except BaseException:
            with deciding:
                revoked = not began
            if revoked:
                self._turn.release()
            raise
        return self._seen

    def _look(self, at: float) -> Seen:
        """In a thread."""
        client = self.client
        folder, box, topology = client.folder, client.box, client.topology
        manager = inbox_lock_manager(folder.inboxes, box)
        own = manager.identity if manager is not None else None
        record = read(folder)
        may = manager is not None and allows(record, own)
        role = topology.role(own, box.declared_host)
        refused = "" if may else refusal(folder, box, own, record, role)
        if self._registry.changed() or self._trouble:
            try:
                self._agents, self._trouble = client.registry.agents(), ""
            except RegistryUnreadable as error:
                self._registry.forget()
                missing = str(error).endswith("is missing")
                self._agents, self._trouble = {}, MISSING if missing else UNREADABLE
        return Seen(manager if may and own != NONE else None, refused, role == GUEST, self._agents, self._trouble, at)
