"""A lock manager for tests: it really excludes, notes each hold, and fails when told to."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sotbus.api import FlockManager


@dataclass(frozen=True)
class Hold:
    """One call of ``hold``, as it was asked for."""

    path: str
    exclusive: bool
    bound_s: float


class FakeLockManager:
    """Excludes by flock(2) under an identity of the test's choice, on whatever file system the test runs.

    ``holds`` has every call of ``hold``, ``held`` the ones that hold the lock now, ``fenced`` the
    inode of each file that was fenced.
    """

    def __init__(
        self, identity: str = "fake lock manager", *, proves_fresh_read: bool = True, fences_data: bool = True
    ) -> None:
        self.identity = identity
        self.proves_fresh_read = proves_fresh_read
        self.fences_data = fences_data
        self.holds: list[Hold] = []
        self.held: list[Hold] = []
        self.fenced: list[int] = []
        self._flock = FlockManager(identity)
        self._turn = threading.Lock()
        self._failures: list[Exception] = []

    def __repr__(self) -> str:
        return f"<FakeLockManager {self.identity}: {len(self.holds)} holds, {len(self.held)} held>"

    def fail(self, *errors: Exception) -> None:
        """Raise these, one a call, in the next calls of ``hold``: LockTimeoutError, OSError, or what a bug raises."""
        with self._turn:
            self._failures += errors

    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        """Hold the lock. *Errors*: LockTimeoutError past the bound; OSError; the next one given to :meth:`fail`."""
        call = Hold(path, exclusive, bound_s)
        with self._turn:
            self.holds.append(call)
            failure = self._failures.pop(0) if self._failures else None
        if failure is not None:
            raise failure
        with self._flock.hold(path, exclusive, bound_s):
            with self._turn:
                self.held.append(call)
            try:
                yield
            finally:
                with self._turn:
                    self.held.remove(call)

    def fence(self, fd: int, bound_s: float) -> bool:
        """Note the descriptor's file in ``fenced``; a lock of one machine cannot be lost. *Errors*: OSError."""
        del bound_s
        self.fenced.append(os.fstat(fd).st_ino)
        return False

    @contextmanager
    def held_by_another(self, path: str, exclusive: bool = True) -> Iterator[None]:
        """Meanwhile somebody else holds the lock: what asks for it waits to its bound."""
        with self._flock.hold(path, exclusive, 0.0):
            yield
