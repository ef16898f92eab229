"""A bounded flock(2) on a lock file that is opened read-write and never removed.

flock is taken rather than fcntl locks because it is what every other client of the folder takes: on a local disk the
two do not exclude each other, and on NFS they are one kind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time

from sotbus.comm.delegations import open_lock
from sotbus.comm.folder import close_quietly

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

TRY_MIN_S = 0.015
TRY_MAX_S = 0.025
"""Pause between two tries where a lock is polled: 15 to 25 ms (sot-comm v1, The inbox)."""

HELD_ERRNOS = frozenset([errno.EAGAIN, errno.EACCES])
"""How flock(2) with LOCK_NB says "held"."""


class LockTimeoutError(Exception):
    """The lock was held past the bound."""


class FileLock:
    """A lock file's flock, held from construction by :func:`acquire` until :meth:`release`.

    Use as a context manager. ``release`` unlocks explicitly: a child forked meanwhile shares the open file, so that a
    mere close would leave it locked.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Unlock and close. Closing unlocks too, so a failing unlock is no error of its own."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)
        except OSError:
            pass
        close_quietly(fd)


def acquire(path: str, *, exclusive: bool, bound_s: float, polling: bool) -> FileLock:
    """Take the lock within ``bound_s`` seconds; there is always one try.

    :param polling: try every 15 to 25 ms (NFS, where a blocked waiter can sleep long past an unlock that another
        client's cut delays); else wait in the kernel's own queue.

    *Errors*: :class:`LockTimeoutError` past the bound; OSError where the file cannot be opened or locked.
    *Cancellation*: an exception that arrives while waiting (KeyboardInterrupt) gives the lock up.
    """
    fd = open_lock(path) if polling else os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        if _try(fd, kind):
            return FileLock(fd)
        if bound_s <= 0:
            raise LockTimeoutError
        deadline = time.monotonic() + bound_s
        if polling:
            _poll(fd, kind, deadline)
            return FileLock(fd)
    except BaseException:
        os.close(fd)
        raise
    _block(fd, kind, deadline)
    return FileLock(fd)


def fence(fd: int, bound_s: float) -> None:
    """flock an open data file, exclusively, by non-blocking tries within ``bound_s`` seconds; there is always one.

    The NFS client then sends its writes under that lock: once the lease that held it has ended, they fail with EIO and
    touch nothing (decisions, sot-comm 16). Undone by :func:`unfence`.

    *Errors*: :class:`LockTimeoutError` past the bound; OSError.
    """
    if not _try(fd, fcntl.LOCK_EX):
        _poll(fd, fcntl.LOCK_EX, time.monotonic() + bound_s)


def unfence(fd: int) -> None:
    """Unlock a data file before it is closed: a child forked meanwhile shares it, and would leave it locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError:
        return


def _try(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD_ERRNOS:
            return False
        raise
    return True


def _poll(fd: int, kind: int, deadline: float) -> None:
    """Try at jittered intervals until the deadline."""
    from random import uniform

    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise LockTimeoutError
        time.sleep(min(uniform(TRY_MIN_S, TRY_MAX_S), left))
        if _try(fd, kind):
            return


def _block(fd: int, kind: int, deadline: float) -> None:
    """Wait in the kernel's queue, in a thread of its own, since flock(2) has no time-out.

    A thread that gets the lock after its caller gave up drops it at once; until then the descriptor is the thread's.
    """
    import threading

    turn = threading.Lock()
    done = threading.Event()
    outcome: list[OSError | None] = []
    abandoned: list[bool] = []

    def wait() -> None:
        failure: OSError | None = None
        try:
            fcntl.flock(fd, kind)
        except OSError as error:
            failure = error
        with turn:
            if abandoned:
                os.close(fd)
            outcome.append(failure)
        done.set()

    try:
        threading.Thread(target=wait, name="sotbus-flock", daemon=True).start()
        done.wait(max(0.0, deadline - time.monotonic()))
    except RuntimeError as error:  # no thread could be started, so the descriptor is still ours
        os.close(fd)
        raise OSError(errno.EAGAIN, f"the lock is held, and no thread can wait for it: {error}") from error
    except BaseException:
        with turn:
            if outcome:
                os.close(fd)
            else:
                abandoned.append(True)
        raise
    with turn:
        if not outcome:
            abandoned.append(True)
            raise LockTimeoutError
    if outcome[0] is not None:
        os.close(fd)
        raise outcome[0]
