"""A lock that belongs to an open file description (fcntl(2), "Open file description locks"): Linux, any file system."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sotbus.api import LockTimeoutError

TRY_EVERY_S = 0.005
"""Pause between two tries."""


class OfdLockManager:
    """Excludes the writers of one machine.

    flock(2) and these locks do not see each other, so the identity is not one of flock's.
    """

    proves_fresh_read = True
    """One kernel holds the page cache of all its writers."""

    fences_data = True
    """The lock cannot be lost while its process lives."""

    def __init__(self, machine_id: str) -> None:
        self.identity = f"ofd@{machine_id}"

    def __repr__(self) -> str:
        return f"<OfdLockManager {self.identity}>"

    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        """Hold the lock. *Errors*: LockTimeoutError past the bound, OSError. *Cancellation*: closing gives it up."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + bound_s
            while not _take(fd, fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LockTimeoutError(f"{path} was held for {bound_s:g}s")
                time.sleep(min(TRY_EVERY_S, left))
            yield
        finally:
            try:
                _take(fd, fcntl.F_UNLCK)  # a child forked meanwhile shares the description, which a close leaves locked
            finally:
                os.close(fd)

    def fence(self, fd: int, bound_s: float) -> bool:
        """This machine's lock cannot be lost while its process lives, so there is nothing to do."""
        return False


def _take(fd: int, kind: int) -> bool:
    """Set the whole file's lock, or False where another holds it."""
    flock = struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, flock)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
