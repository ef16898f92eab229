"""The hooks of the ``stranger`` plugin."""

from __future__ import annotations

from sotbus.api import BoxFacts, LockManager, Mount, Waker, hookimpl
from sotbus_stranger.bell import Bell
from sotbus_stranger.lock_manager import OfdLockManager
from sotbus_stranger.settings import Settings


@hookimpl
def sotbus_settings() -> type:
    return Settings


@hookimpl
def sotbus_lock_manager(mount: Mount | None, machine_id: str | None) -> LockManager | None:
    """Any mount of a machine with an id; sotbus takes it only where the protocol has no name for the mount."""
    return OfdLockManager(machine_id) if mount is not None and machine_id else None


@hookimpl
def sotbus_wake(box: BoxFacts) -> Waker:
    return Bell()
