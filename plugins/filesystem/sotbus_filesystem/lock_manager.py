"""flock(2) on a local file system: every process of the machine shares the kernel's own lock."""

from __future__ import annotations

from sotbus.api import FlockManager, identity_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.api import Mount


def make(mount: Mount | None, machine_id: str | None) -> FlockManager | None:
    """The lock manager of a local file system, or None for any other mount and for a machine without an id."""
    identity = identity_of(mount, machine_id)
    return FlockManager(identity) if identity.startswith("local ") else None
