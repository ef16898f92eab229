"""Mounts in a box: calls for it, and how the guest fails the NFS requests of a box that was killed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from lab.rpc import MOUNT_PORT
from lab.server import EXPORT, SERVER_ADDRESS
from lab.syscalls import MNT_DETACH, MNT_FORCE, bind, mount, unmount


def mount_at(path: str, source: str, kind: str, options: str = "") -> None:
    """mount(2) at a folder, which is made where it is missing. ``kind`` is a file system's, or "bind"."""
    os.makedirs(path, exist_ok=True)
    if kind == "bind":
        bind(source, path)
    else:
        mount(source, path, kind, options)


def mount_nfs4(path: str, address: str, options: str) -> None:
    """The export by NFSv4.2, from the box with this address. Options are those of nfs(5)."""
    own = f"vers=4.2,addr={SERVER_ADDRESS},clientaddr={address}"
    mount_at(path, f"{SERVER_ADDRESS}:/", "nfs4", f"{own},{options}")


def mount_nfs3(path: str, options: str) -> None:
    """The export by NFSv3 with ``nolock``: every lock is the box's own, ``local_lock=all`` in mountinfo."""
    where = f"addr={SERVER_ADDRESS},port=2049,mountaddr={SERVER_ADDRESS},mountport={MOUNT_PORT}"
    how = "vers=3,mountvers=3,proto=tcp,mountproto=tcp,nolock"
    mount_at(path, f"{SERVER_ADDRESS}:{EXPORT}", "nfs", f"{how},{where},{options}")


def unmount_at(path: str) -> None:
    """Take the uppermost mount at a path away; one in use goes from its path at once, and wholly with its last user."""
    unmount(path, MNT_DETACH)


def fail_nfs_requests() -> None:
    """Make every request of this mount namespace's NFS mounts fail with EIO that is on its way now; umount2(2).

    A machine that loses power sends nothing more. A killed process, though, writes what it had written to the page
    cache, and on a hard mount whose cable is gone it would wait for that for ever.
    """
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - nfs" in line:
            with contextlib.suppress(OSError):  # EBUSY: it is in use; its requests were failed all the same
                unmount(line.split()[4], MNT_FORCE)
