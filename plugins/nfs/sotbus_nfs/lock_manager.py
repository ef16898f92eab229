"""flock(2) on NFS v4, which the client turns into the server's lock: tried every 15 to 25 ms, never waited for."""

from __future__ import annotations

from sotbus.api import FlockManager, identity_of, stale_read_reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.api import Mount


def make(mount: Mount | None, machine_id: str | None) -> FlockManager | None:
    """The lock manager of an NFS v4 mount with ``local_lock=none``, or None for any other."""
    identity = identity_of(mount, machine_id)
    if not identity.startswith("nfs4 "):
        return None
    return FlockManager(identity, proves_fresh_read=stale_read_reason(mount) is None, fences_data=False)
