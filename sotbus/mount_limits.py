"""Worker threads for blocking work, limited per mount, so that a mount that hangs stalls nothing but itself."""

from __future__ import annotations

import math
import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

from sotbus.errors import MountHung

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

THREADS_PER_MOUNT = 16
"""How many threads may wait for one mount at a time. They wait more than they work, but each costs a stack."""

DISK_S = 5.0
"""What the system calls of one piece of work may take beside its waits for locks, on a busy disk, in seconds."""

_limiters: trio.lowlevel.RunVar[dict[int, trio.CapacityLimiter]] = trio.lowlevel.RunVar("sotbus mount limiters")

FREE, BUSY, ENDED, REVOKED = "free", "busy", "ended", "revoked"
"""What became of a piece of work: not begun, in its thread, done, or called off before it began."""


def key_of(path: str) -> int:
    """The file system (``st_dev``) that a path lies on, or will once it is made.

    *Errors*: OSError where no folder above it can be looked at either.
    """
    here = os.path.realpath(path)
    while True:
        try:
            return os.stat(here).st_dev
        except FileNotFoundError:
            if here == os.path.dirname(here):
                raise
            here = os.path.dirname(here)


async def limiter_of(path: str) -> trio.CapacityLimiter:
    """The limiter of the mount that a path lies on, one for all that this trio run does there.

    The look itself may hang, so it has a thread that counts against nobody.

    *Errors*: OSError.
    *Cancellation*: leaves the look to itself.
    """
    alone = trio.CapacityLimiter(1)
    key = await trio.to_thread.run_sync(key_of, path, abandon_on_cancel=True, limiter=alone)
    try:
        limiters = _limiters.get()
    except LookupError:
        limiters = {}
        _limiters.set(limiters)
    return limiters.setdefault(key, trio.CapacityLimiter(THREADS_PER_MOUNT))


class Worker:
    """Does blocking work in a thread, one piece at a time, so that what it works with is never shared by threads.

    :param limiter: of the mount that the work is on.
    :param grace_s: how long a cancelled call waits for work that has begun, in seconds.
    :param bound_s: how long work that has begun is waited for at all, in seconds; None: to its end.
    """

    def __init__(self, limiter: trio.CapacityLimiter, grace_s: float, bound_s: float | None = None) -> None:
        self._limiter = limiter
        self._grace_s = grace_s
        self._bound_s = math.inf if bound_s is None else bound_s
        self._turn = trio.Semaphore(1, max_value=1)
        self._stuck = False

    def __repr__(self) -> str:
        return (
            f"<Worker {'free' if self._turn.value else 'busy'}, {self._limiter.borrowed_tokens:g} threads on its mount>"
        )

    async def run(self, work: Callable[[], T]) -> T:
        """The work's answer, or its exception.

        *Errors*: :class:`MountHung` where it has not ended ``bound_s`` after it began: it is left to its thread.
        Whoever else calls meanwhile hears so within ``bound_s`` too, and their work does not begin.
        *Cancellation*: work that has not begun never begins. Work that has begun runs to its end, and its answer is
        returned all the same, as the cancellation meets the caller's next checkpoint. Only where the end does not come
        within ``grace_s`` (a mount that hangs) is Cancelled raised and the work left to its thread; the next call waits
        until that ends. A KeyboardInterrupt waits in the same way, and is always raised.
        """
        await self._take_turn()
        job = _Job(work, self._give_on)
        with self._patience() as patience:
            try:
                return await trio.to_thread.run_sync(job.run, abandon_on_cancel=True, limiter=self._limiter)
            except (trio.Cancelled, KeyboardInterrupt) as stop:
                if job.revoked():
                    raise
                if patience is None or trio.current_time() < patience.deadline:
                    with trio.move_on_after(self._grace_s, shield=True):
                        await job.over.wait()
                if job.state != ENDED or isinstance(stop, KeyboardInterrupt):
                    raise
                return job.answer()
            finally:
                self._stuck = job.leave()
        raise self._hung(begun=job.state != REVOKED)

    def _patience(self) -> AbstractContextManager[trio.CancelScope | None]:
        """The bound as a scope; none where there is no bound, since a scope costs a tenth of a thread."""
        return nullcontext() if self._bound_s == math.inf else trio.move_on_after(self._bound_s)

    async def _take_turn(self) -> None:
        """Wait for the work before, unless that hangs. *Errors*: MountHung."""
        try:
            self._turn.acquire_nowait()
            return  # the thread that follows is a checkpoint
        except trio.WouldBlock:
            pass
        while True:
            with trio.move_on_after(self._bound_s):
                await self._turn.acquire()
                return
            if self._stuck:
                raise self._hung(begun=False)

    def _give_on(self) -> None:
        self._stuck = False
        self._turn.release()

    def _hung(self, *, begun: bool) -> MountHung:
        what = "the outcome is unknown" if begun else "nothing was begun"
        return MountHung(f"the file system did not answer within {self._bound_s:g}s; {what}", outcome_unknown=begun)


class _Job(Generic[T]):
    """One piece of work between its caller's task and its thread; whoever is the last to leave gives the turn on."""

    def __init__(self, work: Callable[[], T], release: Callable[[], object]) -> None:
        self._work = work
        self._release = release
        self._lock = threading.Lock()
        self._left = False
        self._watched = False
        self._token = trio.lowlevel.current_trio_token()
        self.state = FREE
        self.over = trio.Event()
        self._value: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> T:
        """In the thread: do the work, unless it was called off."""
        with self._lock:
            if self.state == REVOKED:
                raise RuntimeError("called off")  # nobody waits for this answer any more
            self.state = BUSY
        try:
            value = self._work()
            self._value.append(value)
            return value
        except BaseException as error:
            self._error = error
            raise
        finally:
            with self._lock:
                self.state = ENDED
                told = self._watched
            if told:
                self._tell()

    def _tell(self) -> None:
        try:
            self._token.run_sync_soon(self._ended)
        except trio.RunFinishedError:
            return  # the whole run is over, and nobody waits

    def _ended(self) -> None:
        self.over.set()
        if self._left:
            self._release()

    def revoked(self) -> bool:
        """Call the work off where it has not begun; else have the thread say when it ends."""
        with self._lock:
            if self.state == FREE:
                self.state = REVOKED
                return True
            self._watched = True
            if self.state == ENDED:
                self.over.set()
            return False

    def answer(self) -> T:
        """The work's answer, or its exception, once it has ended."""
        if self._error is not None:
            raise self._error
        return self._value[0]

    def leave(self) -> bool:
        """In the task, last of all: give the turn on, unless the thread still works; answers whether it does."""
        if self.state == BUSY and not self.over.is_set():
            self._left = True
        else:
            self._error = None  # its traceback holds this job
            self._release()
        return self._left
