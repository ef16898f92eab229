"""Everything that a plugin may import from sotbus, and nothing that it may not.

A lock manager is made by commands that must start fast, so a name is imported when it is first asked for: a plugin that
takes only :class:`FlockManager` and :class:`Mount` from here loads neither pluggy nor trio.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.comm.flock import LockTimeoutError
    from sotbus.comm.folder import Folder
    from sotbus.comm.handles import is_handle
    from sotbus.comm.identity import identity_of
    from sotbus.comm.lock_manager import FlockManager, recovers_lost_locks
    from sotbus.comm.mounts import LOCAL_FILE_SYSTEMS, Mount, stale_read_reason
    from sotbus.contracts import (
        BoxFacts,
        Delivery,
        Destination,
        Filing,
        Harness,
        Inbound,
        LockManager,
        NotSentError,
        OutcomeUnknownError,
        Receipt,
        Screen,
        Transport,
        WakeOutcome,
        Waker,
    )
    from sotbus.errors import BadHandle, BadRequest, FilingFailed, NoLiveSession, NotHere, SotbusError, TooLarge
    from sotbus.folder_delivery import FolderDelivery
    from sotbus.hookspecs import hookimpl
    from sotbus.link_delivery import LinkDelivery
    from sotbus.peers import Peer

_FROM = {
    "sotbus.comm.flock": ("LockTimeoutError",),
    "sotbus.comm.identity": ("identity_of",),
    "sotbus.comm.lock_manager": ("FlockManager", "recovers_lost_locks"),
    "sotbus.comm.mounts": ("LOCAL_FILE_SYSTEMS", "Mount", "stale_read_reason"),
    "sotbus.contracts": (
        "BoxFacts",
        "Delivery",
        "Destination",
        "Filing",
        "Harness",
        "Inbound",
        "LockManager",
        "NotSentError",
        "OutcomeUnknownError",
        "Receipt",
        "Screen",
        "Transport",
        "WakeOutcome",
        "Waker",
    ),
    "sotbus.comm.folder": ("Folder",),
    "sotbus.comm.handles": ("is_handle",),
    "sotbus.errors": ("BadHandle", "BadRequest", "FilingFailed", "NoLiveSession", "NotHere", "SotbusError", "TooLarge"),
    "sotbus.folder_delivery": ("FolderDelivery",),
    "sotbus.hookspecs": ("hookimpl",),
    "sotbus.link_delivery": ("LinkDelivery",),
    "sotbus.peers": ("Peer",),
}
_HOME = {name: module for module, names in _FROM.items() for name in names}

__all__ = [
    "LOCAL_FILE_SYSTEMS",
    "BadHandle",
    "BadRequest",
    "BoxFacts",
    "Delivery",
    "Destination",
    "Filing",
    "FilingFailed",
    "FlockManager",
    "Folder",
    "FolderDelivery",
    "Harness",
    "Inbound",
    "LinkDelivery",
    "LockManager",
    "LockTimeoutError",
    "Mount",
    "NoLiveSession",
    "NotHere",
    "NotSentError",
    "OutcomeUnknownError",
    "Peer",
    "Receipt",
    "Screen",
    "SotbusError",
    "TooLarge",
    "Transport",
    "WakeOutcome",
    "Waker",
    "hookimpl",
    "identity_of",
    "is_handle",
    "recovers_lost_locks",
    "stale_read_reason",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"sotbus.api has no {name!r}")
    found: object = getattr(__import__(home, fromlist=[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
