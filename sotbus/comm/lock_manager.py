"""How this box excludes other writers of a folder: a lock manager, chosen by the mount (sot-comm v1, The lock manager).

A lock manager has an ``identity``, says whether a freshly opened file is fresh (``proves_fresh_read``) and whether a
lost lease cannot let two writers in (``fences_data``), and has ``hold(path, exclusive, bound_s)``, a context manager,
and ``fence(fd, bound_s)``, which ties a data file to the lock.
"""

from __future__ import annotations

import os
import sys

from sotbus.comm import flock
from sotbus.comm.identity import NFS4, NONE, identity_of
from sotbus.comm.mounts import mount_of, stale_read_reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from typing import Protocol

    from sotbus.comm.box import Box
    from sotbus.comm.mounts import Mount

    class LockManager(Protocol):
        """The contract, as :mod:`sotbus.contracts` documents it for plugin authors."""

        @property
        def identity(self) -> str: ...
        @property
        def proves_fresh_read(self) -> bool: ...
        @property
        def fences_data(self) -> bool: ...
        def hold(self, path: str, exclusive: bool, bound_s: float) -> AbstractContextManager[object]: ...
        def fence(self, fd: int, bound_s: float) -> bool: ...

    Factory = Callable[[Mount | None, str | None], LockManager | None]


RECOVER_LOST_LOCKS = "/sys/module/nfs/parameters/recover_lost_locks"
"""The NFS client's parameter: Y makes it write on after a lease was lost, as if the lock had been held all along."""


class FlockManager:
    """flock(2) under an identity of the page: waited for in the kernel's queue, or tried again and again on NFS.

    :param fences_data: false where a lost lease can let two writers in although the data file is fenced.

    ``leased`` says that the lock ends with a lease, unawares, when its holder is cut off from the server.
    """

    __slots__ = ("fences_data", "identity", "leased", "polling", "proves_fresh_read")

    def __init__(self, identity: str, *, proves_fresh_read: bool = True, fences_data: bool = True) -> None:
        self.identity = identity
        self.polling = self.leased = identity.startswith(NFS4)
        self.proves_fresh_read = proves_fresh_read
        self.fences_data = fences_data

    def __repr__(self) -> str:
        return f"<FlockManager {self.identity}>"

    def hold(self, path: str, exclusive: bool, bound_s: float) -> flock.FileLock:
        """Take the lock file's lock within ``bound_s`` seconds; there is always one try.

        *Errors*: :class:`sotbus.comm.flock.LockTimeoutError` past the bound; OSError.
        """
        return flock.acquire(path, exclusive=exclusive, bound_s=bound_s, polling=self.polling)

    def fence(self, fd: int, bound_s: float) -> bool:
        """Under a lease, flock the data file too: a write through ``fd`` then fails once the lease was lost.

        *Errors*: :class:`sotbus.comm.flock.LockTimeoutError` past ``bound_s`` seconds; OSError.
        """
        if self.leased:
            flock.fence(fd, bound_s)
        return self.leased


def recovers_lost_locks(path: str = RECOVER_LOST_LOCKS) -> bool:
    """Whether this kernel's NFS client takes lost locks again by itself, which undoes the fence (decisions 16)."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(1) in ("Y", "1")
    except OSError:
        return False  # no NFS client is loaded, and its default is no


def page_lock_manager(mount: Mount | None, machine_id: str | None) -> FlockManager:
    """The manager that the page names for a mount, whichever it is."""
    identity = identity_of(mount, machine_id)
    return FlockManager(
        identity,
        proves_fresh_read=stale_read_reason(mount) is None,
        fences_data=not (identity.startswith(NFS4) and recovers_lost_locks()),
    )


def choose(mount: Mount | None, machine_id: str | None, factories: Sequence[Factory]) -> LockManager:
    """The first factory's that knows the mount, else ``none@<machine-id>``, this one machine's own lock."""
    for factory in factories:
        manager = factory(mount, machine_id)
        if manager is not None:
            return manager
    fresh = stale_read_reason(mount) is None
    return FlockManager(f"{NONE}@{machine_id}" if machine_id else NONE, proves_fresh_read=fresh)


def inbox_lock_manager(inbox_folder: str, box: Box) -> LockManager | None:
    """This box's lock manager for an inbox folder that exists; None where it cannot be told.

    Asked afresh at each call: a remount changes it. macOS and Windows have no mountinfo and are always ``none@``.
    """
    if sys.platform != "linux":
        return choose(None, box.machine_id, ())
    try:
        path = os.path.realpath(inbox_folder, strict=True)
    except OSError:
        return None
    text = box.mountinfo()
    if text is None:
        return None
    factories = (page_lock_manager,) if box.lock_managers is None else box.lock_managers
    return choose(mount_of(path, text), box.machine_id, factories)
