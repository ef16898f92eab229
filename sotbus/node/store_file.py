"""Where the node's store lies, with which permissions, and the lock of the one process that has it open."""

from __future__ import annotations

import fcntl
import os
import stat
from typing import TYPE_CHECKING

from sotbus.comm.folder import OTHERS, PRIVATE_FILE, PRIVATE_FOLDER, sync_folder
from sotbus.comm.mounts import mount_of
from sotbus.comm.processes import start_ticks
from sotbus.errors import ConfigError, SotbusError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sotbus.comm.mounts import Mount

NETWORK_FILE_SYSTEMS = frozenset(
    [
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda", "9p", "ceph", "lustre", "gpfs", "beegfs"),
        *("ocfs2", "gfs2", "pvfs2", "orangefs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph-fuse", "fuse.s3fs"),
        *("fuse.rclone", "fuse.davfs", "fuse.gcsfuse", "fuse.juicefs", "fuse.curlftpfs", "fuse.mfs"),
    ]
)
"""File systems of other machines, or shared with them: SQLite's write-ahead log works within one machine only (SQLite,
WAL, 1), and a second box with the same home must not take this box's store for its own."""


class StoreError(SotbusError):
    """The store cannot be opened, read or written; the text names its file and what to do."""

    code = "internal"


class StoreHeld(StoreError):
    """Another process has the store open; the text names it."""


def state_folder(environ: Mapping[str, str], configured: str | None, mountinfo: str | None) -> str:
    """The node's state folder (decisions, State): the configured one, else ``$XDG_STATE_HOME/sotbus`` on its own disk.

    :param configured: ``node.state`` of the config; a person has named it, so it is taken as it is.
    :param mountinfo: proc_pid_mountinfo(5), None where it cannot be read: nothing speaks against a folder then.

    *Errors*: :class:`ConfigError` that names ``node.state``.
    """
    if configured:
        return os.path.abspath(os.path.expanduser(configured))
    base = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):  # a relative one is ignored (XDG base directories)
        home = environ.get("HOME") or os.path.expanduser("~")
        base = os.path.join(home, ".local", "state")
    if not os.path.isabs(base):
        raise ConfigError(
            "there is no home folder to keep the node's state in; name a folder on this box's own disk with state in "
            "the table [node] of the config (node.state)"
        )
    path = os.path.join(base, "sotbus")
    mount = network_mount(path, mountinfo)
    if mount is not None:
        raise ConfigError(
            f"the node's state folder {path} would lie on a network mount ({mount.fstype} {mount.source} on "
            f"{mount.point}); name a folder on this box's own disk with state in the table [node] of the config "
            "(node.state); not a temporary one, since mail that waits lies there"
        )
    return path


def network_mount(path: str, mountinfo: str | None) -> Mount | None:
    """The network mount that a path lies on, or will once it is made; None for any other mount."""
    mount = mount_of(os.path.realpath(path), mountinfo) if mountinfo is not None else None
    return mount if mount is not None and mount.fstype in NETWORK_FILE_SYSTEMS else None


def make_folder(path: str) -> None:
    """The state folder, 0700. *Errors*: StoreError, also for one that is open to others, which is left as it is."""
    try:
        if not os.path.isdir(path):
            os.makedirs(path, PRIVATE_FOLDER, exist_ok=True)
            sync_folder(os.path.dirname(path))
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        raise StoreError(f"the state folder {path} cannot be made or used: {error.strerror or error}") from error
    if mode & OTHERS:
        raise StoreError(f"the state folder {path} is open to other users (mode {mode:04o}); run chmod 700 {path}")


def make_private(path: str) -> bool:
    """Make the database's file, 0600, or close one that is open to others; answers whether it was made.

    To be called before SQLite opens the file: closing another descriptor of it would drop SQLite's locks (fcntl(2)).

    *Errors*: OSError.
    """
    made = not os.path.lexists(path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE_FILE)
    try:
        if os.fstat(fd).st_mode & OTHERS:
            os.fchmod(fd, PRIVATE_FILE)
    finally:
        os.close(fd)
    if made:
        sync_folder(os.path.dirname(path))
    return made


def lock_store(path: str) -> int:
    """Lock the store for this process, and write into the lock file which one that is. The lock ends with the process.

    Answers the lock's descriptor. *Errors*: StoreHeld, StoreError.
    """
    lock = path + ".lock"
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE_FILE)
    except OSError as error:
        raise StoreError(f"the lock {lock} of the node's store cannot be opened: {error.strerror or error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        pid = os.getpid()
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {pid}, start {start_ticks(pid)}, on {os.uname().nodename}\n".encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(fd, 200, 0).decode("utf-8", "replace").strip() or "a process that has not said who it is yet"
        os.close(fd)
        raise StoreHeld(f"the node's store {path} is open in another process already: {holder}") from error
    except OSError as error:
        os.close(fd)
        raise StoreError(f"the lock {lock} of the node's store cannot be taken: {error.strerror or error}") from error
    return fd
