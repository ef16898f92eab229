"""The lock manager's identity: which writers one file lock on the inbox folder excludes (sot-comm v1, The inbox)."""

from __future__ import annotations

import os

from sotbus.comm.mounts import LOCAL_FILE_SYSTEMS, mount_of, stale_read_reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.comm.box import Box
    from sotbus.comm.mounts import Mount

NONE = "none"
"""The identity of a machine without a machine id; it never matches anything, itself included."""

NFS4 = "nfs4 "
"""What the identity of an NFS v4 mount begins with; its locks are tried, not waited for (sot-comm v1, The inbox)."""


def identity_of(mount: Mount | None, machine_id: str | None) -> str:
    """``nfs4 <server>:<export>``, ``local <machine-id>``, ``none@<machine-id>``, or ``none`` (no machine id)."""
    if mount is not None:
        options = mount.super_options
        if (
            mount.fstype == "nfs4"
            and mount.source
            and any(option.startswith("vers=4.") for option in options)
            and "local_lock=none" in options
        ):
            return NFS4 + mount.source
        if mount.fstype in LOCAL_FILE_SYSTEMS and machine_id:
            return f"local {machine_id}"
    return f"none@{machine_id}" if machine_id else "none"


def fresh_read_doubt(folder: str, box: Box) -> str | None:
    """Why reads of the comm folder are not proved fresh on its mount, or None where they are."""
    text = box.mountinfo()
    return stale_read_reason(mount_of(os.path.realpath(folder), text) if text else None)
