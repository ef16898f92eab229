"""flock(2) on NFS v4, which the client turns into the server's lock: tried every 15 to 25 ms, never waited for.

The server takes the lock back when a client was cut off for longer than its lease, and the client does not know. So the
data file is locked too, on the descriptor that it is written through: the client sends those writes under that lock,
and they fail with EIO once it is lost (decisions, sot-comm 16; measured, see docs/topologies.md).
"""

from __future__ import annotations

from sotbus.api import FlockManager, identity_of, recovers_lost_locks, stale_read_reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.api import Mount


def make(mount: Mount | None, machine_id: str | None) -> FlockManager | None:
    """The lock manager of an NFS v4 mount with ``local_lock=none``, or None for any other."""
    identity = identity_of(mount, machine_id)
    if not identity.startswith("nfs4 "):
        return None
    fresh = stale_read_reason(mount) is None
    return FlockManager(identity, proves_fresh_read=fresh, fences_data=not recovers_lost_locks())
