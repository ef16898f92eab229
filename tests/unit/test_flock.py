"""The bounded flock(2) of an inbox: how it is opened, waited for, given up and released."""

from __future__ import annotations

import errno
import fcntl
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sotbus.comm.flock import LockTimeoutError, acquire

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "a.lock")


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    """Every descriptor and waiting thread of a test is gone after it."""
    gc.disable()  # what another test left to the collector is not to be closed in the middle of this one
    before = set(os.listdir("/proc/self/fd"))
    yield
    for thread in waiters():
        thread.join(10)
    after = set(os.listdir("/proc/self/fd"))
    gc.enable()
    assert not waiters()
    assert len(after) == len(before)


def waiters() -> list[threading.Thread]:
    """The threads that wait in the kernel's queue."""
    return [thread for thread in threading.enumerate() if thread.name == "sotbus-flock"]


class Kernel:
    """Notes the operations of each flock call; some of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **failing: int) -> None:
        self.calls: list[str] = []
        self.failing = failing
        self.real = fcntl.flock
        monkeypatch.setattr(fcntl, "flock", self._flock)

    def _flock(self, fd: int, operation: int) -> None:
        name = {fcntl.LOCK_EX: "EX", fcntl.LOCK_SH: "SH", fcntl.LOCK_UN: "UN"}[operation & ~fcntl.LOCK_NB]
        name += "_NB" if operation & fcntl.LOCK_NB else ""
        self.calls.append(name)
        if name in self.failing:
            raise OSError(self.failing[name], os.strerror(self.failing[name]))
        self.real(fd, operation)


@pytest.mark.spec("S56", "S73")
@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("polling", [True, False])
def test_the_lock_file_is_opened_read_write_whatever_the_lock(path: str, exclusive: bool, polling: bool) -> None:
    with acquire(path, exclusive=exclusive, bound_s=0, polling=polling) as lock:
        assert fcntl.fcntl(lock.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        assert os.path.samestat(os.fstat(lock.fd), os.stat(path))


@pytest.mark.spec("S9")
def test_the_lock_file_is_private_and_never_removed(path: str) -> None:
    old = os.umask(0)
    try:
        acquire(path, exclusive=True, bound_s=0, polling=False).release()
    finally:
        os.umask(old)
    before = os.stat(path)
    assert before.st_mode & 0o777 == 0o600
    acquire(path, exclusive=True, bound_s=0, polling=True).release()
    assert os.stat(path).st_ino == before.st_ino


@pytest.mark.spec("S56", "S73")
def test_readers_share_and_a_writer_excludes(path: str) -> None:
    with (
        acquire(path, exclusive=False, bound_s=0, polling=False),
        acquire(path, exclusive=False, bound_s=0, polling=False),
        pytest.raises(LockTimeoutError),
    ):
        acquire(path, exclusive=True, bound_s=0, polling=True)
    with acquire(path, exclusive=True, bound_s=0, polling=False), pytest.raises(LockTimeoutError):
        acquire(path, exclusive=False, bound_s=0, polling=True)


@pytest.mark.spec("S58")
@pytest.mark.parametrize("polling", [True, False])
def test_there_is_one_try_with_a_bound_of_0(path: str, polling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    acquire(path, exclusive=True, bound_s=0, polling=polling).release()
    assert kernel.calls == ["EX_NB", "UN"]


@pytest.mark.spec("S58")
def test_an_nfs4_lock_is_tried_every_15_to_25_ms_until_the_bound(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    pauses: list[float] = []

    def sleep(for_s: float) -> None:
        pauses.append(for_s)
        now[0] += for_s

    with acquire(path, exclusive=True, bound_s=0, polling=True):
        kernel = Kernel(monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: now[0])
            patch.setattr(time, "sleep", sleep)
            with pytest.raises(LockTimeoutError):
                acquire(path, exclusive=False, bound_s=2, polling=True)
        assert set(kernel.calls) == {"SH_NB"}
        assert len(kernel.calls) == len(pauses) + 1
    assert sum(pauses) == pytest.approx(2)
    assert all(0.015 <= pause <= 0.025 for pause in pauses[:-1])
    assert len(set(pauses)) > len(pauses) // 2, "the pauses are jittered"


@pytest.mark.spec("S58")
def test_any_other_lock_is_waited_for_in_the_kernels_queue(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    lock = acquire(path, exclusive=True, bound_s=0, polling=False)
    real = threading.Event.wait

    def wait(event: threading.Event, timeout: float | None = None) -> bool:
        if waiters():  # only now is the lock let go, so that the wait is a wait
            lock.release()
        return real(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", wait)
    with acquire(path, exclusive=True, bound_s=30, polling=False):
        pass
    assert kernel.calls[:2] == ["EX_NB", "EX_NB"]
    assert sorted(kernel.calls[2:]) == ["EX", "UN", "UN"]


@pytest.mark.spec("S58")
@pytest.mark.parametrize("polling", [True, False])
def test_the_wait_ends_at_the_bound(path: str, polling: bool) -> None:
    with acquire(path, exclusive=True, bound_s=0, polling=False):
        start = time.monotonic()
        with pytest.raises(LockTimeoutError):
            acquire(path, exclusive=True, bound_s=0.1, polling=polling)
        assert time.monotonic() - start >= 0.1


def test_a_waiter_that_gets_the_lock_after_its_caller_gave_up_drops_it(path: str) -> None:
    with acquire(path, exclusive=True, bound_s=0, polling=False):
        with pytest.raises(LockTimeoutError):
            acquire(path, exclusive=True, bound_s=0.02, polling=False)
        assert len(waiters()) == 1
    acquire(path, exclusive=True, bound_s=30, polling=False).release()


@pytest.mark.parametrize("polling", [True, False])
def test_an_interrupt_while_waiting_gives_the_lock_up(
    path: str, polling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = threading.Event.wait

    def interrupt(for_s: float) -> None:
        raise KeyboardInterrupt

    def interrupt_if_bounded(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout is None:  # the wait for a thread to have started
            return real(event)
        raise KeyboardInterrupt

    with acquire(path, exclusive=True, bound_s=0, polling=False), monkeypatch.context() as patch:
        patch.setattr(time, "sleep", interrupt)
        patch.setattr(threading.Event, "wait", interrupt_if_bounded)
        with pytest.raises(KeyboardInterrupt):
            acquire(path, exclusive=True, bound_s=30, polling=polling)
    acquire(path, exclusive=True, bound_s=30, polling=False).release()


@pytest.mark.parametrize(("operation", "polling"), [("EX_NB", True), ("EX_NB", False), ("EX", False)])
def test_a_lock_that_the_system_refuses_is_its_error(
    path: str, operation: str, polling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with acquire(path, exclusive=True, bound_s=0, polling=False):
        Kernel(monkeypatch, **{operation: errno.ENOLCK})
        with pytest.raises(OSError, match="No locks available"):
            acquire(path, exclusive=True, bound_s=30, polling=polling)
        monkeypatch.undo()


@pytest.mark.parametrize("held", [errno.EAGAIN, errno.EACCES])
def test_both_ways_to_say_held_are_held(path: str, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Kernel(monkeypatch, EX_NB=held)
    with pytest.raises(LockTimeoutError):
        acquire(path, exclusive=True, bound_s=0, polling=True)


def test_an_unlock_that_fails_closes_all_the_same(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = acquire(path, exclusive=True, bound_s=0, polling=False)
    with monkeypatch.context() as patch:
        Kernel(patch, UN=errno.EIO)
        lock.release()
    lock.release()
    acquire(path, exclusive=True, bound_s=0, polling=False).release()


def test_a_lock_file_that_cannot_be_opened_is_the_systems_error(tmp_path: Path) -> None:
    (tmp_path / "folder.lock").mkdir()
    with pytest.raises(IsADirectoryError):
        acquire(str(tmp_path / "folder.lock"), exclusive=True, bound_s=0, polling=False)


@pytest.mark.spec("S56")
def test_a_process_excludes_another_and_a_killed_one_lets_go(path: str) -> None:
    held = FORK.Event()

    def hold() -> None:
        lock = acquire(path, exclusive=True, bound_s=10, polling=False)
        held.set()
        signal.pause()
        lock.release()

    process = FORK.Process(target=hold)
    process.start()
    try:
        assert held.wait(30)
        with pytest.raises(LockTimeoutError):
            acquire(path, exclusive=False, bound_s=0, polling=True)
    finally:
        process.kill()
        process.join()
        process.close()
    acquire(path, exclusive=True, bound_s=30, polling=False).release()


def test_a_release_unlocks_though_a_child_has_the_descriptor(path: str) -> None:
    lock = acquire(path, exclusive=True, bound_s=0, polling=False)
    process = FORK.Process(target=signal.pause)
    process.start()
    try:
        lock.release()
        acquire(path, exclusive=True, bound_s=0, polling=False).release()
    finally:
        process.kill()
        process.join()
        process.close()
