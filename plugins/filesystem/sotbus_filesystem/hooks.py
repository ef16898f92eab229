"""The hooks of the ``filesystem`` plugin."""

from __future__ import annotations

from sotbus.api import BoxFacts, Delivery, FlockManager, FolderDelivery, Mount, hookimpl
from sotbus_filesystem import lock_manager


@hookimpl
def sotbus_lock_manager(mount: Mount | None, machine_id: str | None) -> FlockManager | None:
    """``local <machine-id>`` for a file system on a disk of this machine."""
    return lock_manager.make(mount, machine_id)


@hookimpl
def sotbus_delivery(box: BoxFacts) -> Delivery | None:
    """Delivery into this box's comm folder, where it lies on such a mount."""
    return FolderDelivery.of(box, "local ")
