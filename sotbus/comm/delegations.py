"""Opening a file on NFS v4 without borrowing it.

An NFS v4 server may lend a file to the client that opens it (a delegation, RFC 8881, 10.4), and takes it back before
another client may write, rename or remove it. A client that is cut off cannot give it back, so everybody else waits for
the end of its lease: 90 s on most servers, past every bound of ours (measured: docs/topologies.md). A client that
opens with O_DIRECT asks for no delegation; the descriptor is an ordinary one afterwards.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time

MOUNTINFO = "/proc/self/mountinfo"

RECENT_S = 1.0
"""How long it is remembered that a folder is on NFS v4: a mount over it changes what is borrowed, and nothing else."""

RECENT_FOLDERS = 64

_recent: dict[str, float] = {}
"""Until when a folder counts as on NFS v4. Of a local disk nothing is kept: a stat(2) there costs a microsecond."""

_lending: dict[int, bool] = {}
"""By device number, whether the file system is NFS v4."""


def open_undelegated(path: str, flags: int, mode: int = 0o777) -> int:
    """open(2); on NFS v4 the server lends nothing to this client. *Errors*: OSError, as open(2)."""
    if not _lends(path):
        return os.open(path, flags, mode)
    try:
        fd = os.open(path, flags & ~os.O_APPEND | os.O_DIRECT, mode)  # NFS refuses the two together
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, mode)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & (os.O_APPEND | os.O_NONBLOCK))
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_lock(path: str) -> int:
    """A lock file on NFS v4, made where it is not there; nothing is ever read from it or written. *Errors*: OSError."""
    flags = os.O_RDWR | os.O_CREAT
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o600)


def _lends(path: str) -> bool:
    """Whether a file's folder is on NFS v4. Only a file system without a disk has a device number without a major."""
    folder = path[: path.rfind("/")]
    kept_until = _recent.get(folder)
    if kept_until is not None and time.monotonic() < kept_until:
        return True
    try:
        device = os.stat(folder).st_dev
    except OSError:
        return False  # the open says what is wrong
    if not os.major(device) and device not in _lending:
        _look()
    lends = not os.major(device) and _lending.setdefault(device, False)
    if lends:
        if len(_recent) >= RECENT_FOLDERS:
            _recent.clear()
        _recent[folder] = time.monotonic() + RECENT_S
    return lends


def _look() -> None:
    """Read which devices are NFS v4 (proc_pid_mountinfo(5))."""
    try:
        with open(MOUNTINFO, "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return
    for line in lines:
        left, _, right = line.partition(b" - ")
        fields = left.split(b" ")
        major, _, minor = fields[2].partition(b":") if len(fields) > 2 else (b"", b"", b"")
        if major.isdigit() and minor.isdigit():
            _lending[os.makedev(int(major), int(minor))] = right.startswith(b"nfs4 ")
