"""The hooks of the ``filesystem`` plugin."""

from __future__ import annotations

from sotbus.api import FlockManager, Mount, hookimpl
from sotbus_filesystem import lock_manager


@hookimpl
def sotbus_lock_manager(mount: Mount | None, machine_id: str | None) -> FlockManager | None:
    """``local <machine-id>`` for a file system on a disk of this machine."""
    return lock_manager.make(mount, machine_id)
