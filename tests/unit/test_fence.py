"""The append under a lock that can be lost unawares: the order of its steps, and what it says after an error."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from world import World

from sotbus.comm import flock
from sotbus.comm.inbox import Inbox
from sotbus.comm.lock_manager import FlockManager
from sotbus.errors import FilingFailed, InboxLockHeld

OLD = b'{"old":1}\n'
LINE = b'{"new":1}\n'


@pytest.fixture
def inbox(world: World) -> Inbox:
    """An inbox with one line on a mount whose locks are leases; flock(2) works on this disk all the same."""
    world.folder.ensure()
    world.inbox("h").write_bytes(OLD)
    return Inbox(world.folder, "h", FlockManager("nfs4 filer.example:/home"))


class Calls:
    """What the append asks of the system, in order, by file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, inbox: Inbox) -> None:
        self.log: list[str] = []
        self.data_fd = -1
        self.fail: dict[str, OSError] = {}
        names = {inbox.path: "data", inbox.lock_path: "lock"}
        real = {name: getattr(os, name) for name in ("open", "lseek", "write", "fdatasync", "ftruncate", "close")}
        real_flock = fcntl.flock
        files: dict[int, str] = {}

        def opened(path: str, flags: int, mode: int = 0o777) -> int:
            fd: int = real["open"](path, flags, mode)
            if path in names:
                files[fd] = names[path]
                self.log.append(f"open {names[path]}")
                if path == inbox.path:
                    self.data_fd = fd
            return fd

        def passing(name: str) -> Callable[..., object]:
            def call(fd: int, *more: object) -> object:
                if fd in files:
                    self.log.append(f"{name} {files[fd]}")
                    if name == "close":
                        del files[fd]
                    elif name in self.fail:
                        raise self.fail[name]
                return real[name](fd, *more)

            return call

        def locked(fd: int, operation: int) -> None:
            if fd in files:
                what = "unlock" if operation == fcntl.LOCK_UN else "lock" if operation & fcntl.LOCK_NB else "wait for"
                self.log.append(f"{what} {files[fd]}")
            real_flock(fd, operation)

        monkeypatch.setattr(os, "open", opened)
        for name in real:
            if name != "open":
                monkeypatch.setattr(os, name, passing(name))
        monkeypatch.setattr(fcntl, "flock", locked)


@pytest.mark.spec("S57")
def test_the_steps_are_lock_open_fence_length_write_sync_unfence_close_release(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """decisions, sot-comm 16: the length is read only after the fence, and the lock goes last."""
    calls = Calls(monkeypatch, inbox)
    inbox.append(LINE, 0.0)
    monkeypatch.undo()
    assert calls.log == [
        "open lock",
        "lock lock",
        "open data",
        "lock data",
        "fdatasync data",
        "lseek data",
        "write data",
        "fdatasync data",
        "unlock data",
        "close data",
        "unlock lock",
        "close lock",
    ]
    assert Path(inbox.path).read_bytes() == OLD + LINE


def test_a_local_disk_needs_no_fence(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.folder.ensure()
    inbox = Inbox(world.folder, "h", FlockManager("local m"))
    calls = Calls(monkeypatch, inbox)
    inbox.append(LINE, 0.0)
    monkeypatch.undo()
    assert "lock data" not in calls.log
    assert "unlock data" not in calls.log


@pytest.mark.parametrize("step", ["write", "fdatasync"])
def test_after_an_error_that_may_be_a_lost_lease_the_outcome_is_unknown_and_the_cut_goes_by_the_descriptor(
    step: str, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, inbox)
    calls.fail[step] = OSError(errno.EIO, os.strerror(errno.EIO))
    monkeypatch.setattr(os, "truncate", lambda *_: pytest.fail("a truncation by path cuts other boxes' lines"))
    with pytest.raises(
        FilingFailed, match="its lock may have been lost meanwhile, so the outcome is unknown"
    ) as caught:
        inbox.append(LINE, 0.0)
    monkeypatch.undo()
    assert caught.value.outcome_unknown
    assert calls.log.count("ftruncate data") == 1
    assert Path(inbox.path).read_bytes() == OLD


def test_where_the_lost_lock_forbids_the_cut_too_the_file_is_left_alone(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured on NFS v4.2: EIO from the sync, then EBADF from ftruncate(2)."""
    calls = Calls(monkeypatch, inbox)
    calls.fail = {"fdatasync": OSError(errno.EIO, "lost"), "ftruncate": OSError(errno.EBADF, "Bad file descriptor")}
    with pytest.raises(FilingFailed, match="so the outcome is unknown") as caught:
        inbox.append(LINE, 0.0)
    monkeypatch.undo()
    assert caught.value.outcome_unknown
    assert Path(inbox.path).read_bytes() == OLD + LINE
    assert calls.log[-3:] == ["close data", "unlock lock", "close lock"]


@pytest.mark.parametrize("refused", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_server_that_has_no_room_knows_the_lock_so_the_outcome_is_known(
    refused: int, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, inbox)
    calls.fail["fdatasync"] = OSError(refused, os.strerror(refused))
    with pytest.raises(FilingFailed, match=os.strerror(refused)) as caught:
        inbox.append(LINE, 0.0)
    monkeypatch.undo()
    assert not caught.value.outcome_unknown
    assert Path(inbox.path).read_bytes() == OLD


def test_a_fence_that_another_holds_is_waited_for_within_the_same_bound_and_nothing_is_written(inbox: Inbox) -> None:
    """A cut box, or a child that it forked, may hold the data file's lock after it lost the other one."""
    with open(inbox.path, "r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InboxLockHeld, match=r"the inbox lock for @h was held for 0\.05s — nothing was appended"):
            inbox.append(LINE, 0.05)
    assert Path(inbox.path).read_bytes() == OLD
    with flock.acquire(inbox.lock_path, exclusive=True, bound_s=0.0, polling=True):
        pass
    inbox.append(LINE, 0.05)
    assert Path(inbox.path).read_bytes() == OLD + LINE


def test_a_child_forked_under_the_fence_does_not_keep_it(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fdatasync
    kept: list[int] = []

    def sync(fd: int) -> None:
        kept.append(os.dup(fd))  # as a child that another thread forks has it
        real(fd)

    monkeypatch.setattr(os, "fdatasync", sync)
    inbox.append(LINE, 0.0)
    inbox.append(LINE, 0.0)
    for fd in kept:
        os.close(fd)
    assert Path(inbox.path).read_bytes() == OLD + LINE + LINE


def test_an_interrupt_under_a_lease_is_an_interrupt_and_cuts_the_line_back(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fdatasync", sync)
    with pytest.raises(KeyboardInterrupt):
        inbox.append(LINE, 0.0)
    assert Path(inbox.path).read_bytes() == OLD
