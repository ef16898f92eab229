"""The mounts that the fault tests build on do what they say."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults.faultfs import MountedFaultFS, is_mounted
from tools import require_module, require_root, require_tool, skip_or_fail

HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("refused", flush=True)
else:
    print("held", flush=True)
    sys.stdin.readline()
    fcntl.flock(fd, fcntl.LOCK_UN)
    print("released", flush=True)
"""

STARTER = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from faults.faultfs import MountedFaultFS
mounted = MountedFaultFS(Path(sys.argv[2]))
mounted.wait_until_mounted()
print(mounted.pid, flush=True)
os._exit(0)
"""


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDWR | os.O_APPEND | os.O_CREAT) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def fails(name: str) -> Iterator[None]:
    with pytest.raises(OSError) as caught:
        yield
    assert caught.value.errno == getattr(errno, name), caught.value


@contextlib.contextmanager
def another_process_locks(path: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Another process tries to lock *path*: whether it "held" or was "refused", and a call that makes it release."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def release() -> None:
            stdin.write("\n")
            stdin.flush()
            assert stdout.readline() == "released\n"

        try:
            yield stdout.readline().strip(), release
        finally:
            process.kill()


def hold(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


# Passing through


def test_what_is_appended_is_in_the_backing_file(faultfs: MountedFaultFS) -> None:
    with opened(faultfs.mount / "x.jsonl") as fd:
        assert os.write(fd, b"one\n") == 4
        assert os.lseek(fd, 0, os.SEEK_END) == 4
        assert os.pread(fd, 1, 3) == b"\n"
        assert os.write(fd, b"two\n") == 4
        os.fdatasync(fd)
        os.ftruncate(fd, 4)
        assert os.fstat(fd).st_size == 4
    assert (faultfs.backing / "x.jsonl").read_bytes() == b"one\n"
    assert (faultfs.backing / "x.jsonl").stat().st_mode & 0o7777 == 0o600
    assert faultfs.firings() == []


def test_attributes_are_not_cached(faultfs: MountedFaultFS) -> None:
    with pytest.raises(FileNotFoundError):
        (faultfs.mount / "x").stat()
    (faultfs.backing / "x").write_bytes(b"1")
    assert (faultfs.mount / "x").stat().st_size == 1
    with opened(faultfs.mount / "x") as fd:
        with (faultfs.backing / "x").open("ab") as behind:
            behind.write(b"2")
        assert os.fstat(fd).st_size == 2
        assert os.lseek(fd, 0, os.SEEK_END) == 2


def test_every_read_and_every_lookup_arrives(faultfs: MountedFaultFS) -> None:
    (faultfs.mount / "x").write_text("1")
    faultfs.inject({"op": "read"}, {"op": "getattr", "path": "/x"})
    with opened(faultfs.mount / "x", os.O_RDONLY) as fd:
        assert faultfs.fired("getattr") >= 1
        for times in (1, 2):
            assert os.pread(fd, 1, 0) == b"1"
            assert faultfs.fired("read") == times


def test_directories_and_links_are_those_behind_the_mount(faultfs: MountedFaultFS) -> None:
    (faultfs.mount / "d").mkdir()
    (faultfs.mount / "d" / "x").write_text("1")
    (faultfs.mount / "d" / "s").symlink_to("x")
    assert sorted(os.listdir(faultfs.mount / "d")) == ["s", "x"]
    assert (faultfs.mount / "d" / "s").read_text() == "1"
    assert (faultfs.mount / "d" / "x").stat().st_ino == (faultfs.backing / "d" / "x").stat().st_ino
    (faultfs.mount / "d" / "s").unlink()
    (faultfs.mount / "d" / "x").unlink()
    (faultfs.mount / "d").rmdir()
    assert os.listdir(faultfs.backing) == []


def test_link_makes_a_second_name_once(faultfs: MountedFaultFS) -> None:
    (faultfs.mount / "x").write_text("1")
    os.link(faultfs.mount / "x", faultfs.mount / "lock")
    assert (faultfs.mount / "x").stat().st_nlink == 2
    assert (faultfs.mount / "x").samefile(faultfs.mount / "lock")
    with fails("EEXIST"):
        os.link(faultfs.mount / "x", faultfs.mount / "lock")


def test_rename_replaces_a_file_that_is_open(faultfs: MountedFaultFS) -> None:
    (faultfs.mount / "registry.json").write_text("old")
    (faultfs.mount / "tmp").write_text("new")
    with opened(faultfs.mount / "registry.json") as fd:
        os.rename(faultfs.mount / "tmp", faultfs.mount / "registry.json")
        assert os.listdir(faultfs.mount) == ["registry.json"]
        assert (faultfs.mount / "registry.json").read_text() == "new"
        assert os.pread(fd, 10, 0) == b"old"
        assert os.write(fd, b"er") == 2
        os.fsync(fd)
        os.ftruncate(fd, 4)
        assert os.lseek(fd, 0, os.SEEK_END) == 4
        with fails("ESTALE"):  # the known limit
            os.fstat(fd)
    assert (faultfs.backing / "registry.json").read_text() == "new"


def test_rename_flags_are_refused_and_not_dropped(faultfs: MountedFaultFS) -> None:
    (faultfs.mount / "x").write_text("1")
    (faultfs.mount / "y").write_text("2")
    libc = ctypes.CDLL(None, use_errno=True)
    noreplace = 1
    names = [os.fsencode(faultfs.mount / name) for name in "xy"]
    assert libc.renameat2(-100, names[0], -100, names[1], noreplace) == -1
    assert ctypes.get_errno() in (errno.EINVAL, errno.EEXIST)
    assert libc.renameat2(-100, names[0], -100, os.fsencode(faultfs.mount / "z"), noreplace) == -1
    assert ctypes.get_errno() == errno.EINVAL
    assert sorted(os.listdir(faultfs.backing)) == ["x", "y"]


# Faults


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("open", lambda mount, _: os.open(mount / "x", os.O_RDWR | os.O_CREAT)),
        ("create", lambda mount, _: os.open(mount / "new", os.O_RDWR | os.O_CREAT)),
        ("read", lambda _, fd: os.read(fd, 1)),
        ("write", lambda _, fd: os.write(fd, b"more")),
        ("fsync", lambda _, fd: os.fsync(fd)),
        ("fsync", lambda _, fd: os.fdatasync(fd)),
        ("truncate", lambda _, fd: os.ftruncate(fd, 1)),
        ("truncate", lambda mount, _: os.truncate(mount / "x", 1)),
        ("rename", lambda mount, _: os.rename(mount / "x", mount / "y")),
        ("link", lambda mount, _: os.link(mount / "x", mount / "y")),
        ("unlink", lambda mount, _: os.unlink(mount / "x")),
        ("opendir", lambda mount, _: os.listdir(mount)),
        ("flush", lambda _, fd: os.close(os.dup(fd))),
        ("getattr", lambda mount, _: os.stat(mount / "x")),
    ],
)
def test_every_operation_can_fail(faultfs: MountedFaultFS, op: str, call: Callable[[Path, int], object]) -> None:
    (faultfs.mount / "x").write_bytes(b"as it was")
    with opened(faultfs.mount / "x") as fd:
        (fault,) = faultfs.inject({"op": op, "errno": "EIO"})
        with fails("EIO"):
            call(faultfs.mount, fd)
        assert faultfs.fired(op) == faultfs.fired(fault) >= 1
        faultfs.clear()
    assert os.listdir(faultfs.backing) == ["x"]
    assert (faultfs.backing / "x").read_bytes() == b"as it was"


def test_a_directory_is_synced_as_fsync(faultfs: MountedFaultFS) -> None:
    with opened(faultfs.mount, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)
        faultfs.inject({"op": "fsync", "path": "/", "errno": "EIO", "times": 1})
        with fails("EIO"):
            os.fsync(fd)


def test_a_short_write_answers_what_it_wrote(faultfs: MountedFaultFS) -> None:
    with opened(faultfs.mount / "x.jsonl") as fd:
        faultfs.inject({"op": "write", "short": 7, "times": 1})
        assert os.write(fd, b"0123456789") == 7
        assert (faultfs.backing / "x.jsonl").read_bytes() == b"0123456"
        assert os.write(fd, b"789") == 3
    assert (faultfs.backing / "x.jsonl").read_bytes() == b"0123456789"


def test_a_short_read(faultfs: MountedFaultFS) -> None:
    (faultfs.backing / "x").write_bytes(b"0123456789")
    with opened(faultfs.mount / "x") as fd:
        faultfs.inject({"op": "read", "short": 3, "times": 1})
        assert os.read(fd, 10) == b"012"
        assert os.read(fd, 10) == b"3456789"


def test_after_and_times(faultfs: MountedFaultFS) -> None:
    with opened(faultfs.mount / "x") as fd:
        faultfs.inject({"op": "write", "errno": "ENOSPC", "after": 1, "times": 2})
        assert os.write(fd, b"1") == 1
        for _ in range(2):
            with fails("ENOSPC"):
                os.write(fd, b"lost")
        assert os.write(fd, b"2") == 1
    assert faultfs.fired("write") == 2
    assert (faultfs.backing / "x").read_bytes() == b"12"


def test_faults_of_one_operation_follow_each_other(faultfs: MountedFaultFS) -> None:
    with opened(faultfs.mount / "x") as fd:
        probe, first, second = faultfs.inject(
            {"op": "write"},
            {"op": "write", "short": 1, "times": 1},
            {"op": "write", "errno": "ENOSPC", "times": 1},
        )
        assert os.write(fd, b"ab") == 1
        (third,) = faultfs.inject({"op": "write", "errno": "EDQUOT"})  # leaves the counts of the others alone
        with fails("ENOSPC"):
            os.write(fd, b"b")
        with fails("EDQUOT"):
            os.write(fd, b"b")
        faultfs.clear()
        assert os.write(fd, b"b") == 1
    assert [faultfs.fired(fault) for fault in (probe, first, second, third)] == [3, 1, 1, 1]
    assert [firing.path for firing in faultfs.firings()] == ["/x"] * 6


def test_a_path_chooses_the_file(faultfs: MountedFaultFS) -> None:
    (faultfs.mount / "inbox").mkdir()
    faultfs.inject({"op": "write", "path": "*/x.jsonl", "errno": "EIO"})
    faultfs.inject({"op": "rename", "path": "/registry.json", "errno": "EIO"})
    with opened(faultfs.mount / "inbox" / "x.jsonl") as fd, opened(faultfs.mount / "inbox" / "y.jsonl") as other:
        with fails("EIO"):
            os.write(fd, b"1")
        assert os.write(other, b"1") == 1
    with fails("EIO"):  # the new name of a rename counts as much as the old one
        os.rename(faultfs.mount / "inbox" / "y.jsonl", faultfs.mount / "registry.json")
    os.rename(faultfs.mount / "inbox" / "y.jsonl", faultfs.mount / "inbox" / "z.jsonl")


def test_an_error_after_the_work_was_done(faultfs: MountedFaultFS) -> None:
    (faultfs.mount / "x").write_text("1")
    faultfs.inject({"op": "link", "errno": "EIO", "applied": True, "times": 1})
    with fails("EIO"):
        os.link(faultfs.mount / "x", faultfs.mount / "lock")
    assert (faultfs.mount / "x").stat().st_nlink == 2


def test_a_stale_file_once_and_then_good(faultfs: MountedFaultFS) -> None:
    with opened(faultfs.mount / "x") as fd:
        faultfs.inject({"op": "fsync", "errno": "ESTALE", "times": 1})
        with fails("ESTALE"):
            os.fdatasync(fd)
        os.fdatasync(fd)


def test_a_stale_open_is_seen_once_when_it_happens_twice(faultfs: MountedFaultFS) -> None:
    (faultfs.mount / "x").touch()
    (hidden,) = faultfs.inject({"op": "open", "errno": "ESTALE", "times": 1})
    with opened(faultfs.mount / "x"):  # the kernel looks the name up again and tries once more
        assert faultfs.fired(hidden) == 1
    (seen,) = faultfs.inject({"op": "open", "errno": "ESTALE", "times": 2})
    with fails("ESTALE"), opened(faultfs.mount / "x"):
        pass
    with opened(faultfs.mount / "x"):
        assert faultfs.fired(seen) == 2


def test_a_delay(faultfs: MountedFaultFS) -> None:
    with opened(faultfs.mount / "x") as fd:
        faultfs.inject({"op": "fsync", "sleep_s": 0.05, "times": 1})
        before = os.times().elapsed
        os.fsync(fd)
        assert os.times().elapsed - before >= 0.04  # the clock of times(2) ticks in hundredths
        assert faultfs.fired("fsync") == 1


@pytest.mark.parametrize(
    "fault",
    [
        {"op": "scribble"},
        {"op": "write", "errno": "ENOSUCH"},
        {"op": "write", "errno": 5},
        {"op": "write", "short": True},
        {"op": "write", "short": 1, "errno": "EIO"},
        {"op": "fsync", "short": 1},
        {"op": "write", "times": -1},
        {"op": "write", "grant": True},
        {"op": "open", "errno": "EIO", "applied": True},
        {"op": "write", "error": "EIO"},
        {"errno": "EIO"},
        {"op": "flock", "errno": "ENOLCK"},  # on this mount nothing would ever ask
    ],
)
def test_a_fault_that_cannot_be_is_refused(faultfs: MountedFaultFS, fault: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        faultfs.inject(fault)
    (faultfs.mount / "x").write_text("1")
    assert faultfs.firings() == []


# Locks


def test_flock_excludes(faultfs: MountedFaultFS) -> None:
    (faultfs.mount / "x.lock").touch()
    with opened(faultfs.mount / "x.lock") as fd:
        with another_process_locks(faultfs.mount / "x.lock") as (answer, release):
            assert answer == "held"
            with fails("EAGAIN"):
                hold(fd)
            release()
            hold(fd)
        with another_process_locks(faultfs.mount / "x.lock") as (answer, _):
            assert answer == "refused"


def test_a_mount_that_grants_every_flock_excludes_no_one(faultfs_granting: MountedFaultFS) -> None:
    lock = faultfs_granting.mount / "x.lock"
    lock.touch()
    faultfs_granting.inject({"op": "flock"})
    with (
        opened(lock) as fd,
        another_process_locks(lock) as (one, release_one),
        another_process_locks(lock) as (two, release_two),
    ):
        assert (one, two) == ("held", "held")
        hold(fd)
        assert faultfs_granting.fired("flock") == 3
        release_one()
        release_two()


def test_a_forwarded_flock_excludes_fails_and_is_granted(faultfs_factory: Callable[..., MountedFaultFS]) -> None:
    faultfs = faultfs_factory("--forward-flock")
    lock = faultfs.mount / "x.lock"
    lock.touch()
    with opened(lock) as fd, another_process_locks(lock) as (answer, release):
        assert answer == "held"
        with fails("EAGAIN"):
            hold(fd)
        faultfs.inject({"op": "flock", "errno": "ENOLCK", "times": 1}, {"op": "flock", "grant": True, "times": 1})
        with fails("ENOLCK"):
            hold(fd)
        hold(fd)  # granted by the fault, and held twice
        with fails("EAGAIN"):
            hold(fd)
        release()
        hold(fd)


# Beginning and end


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_closing_leaves_no_mount_and_no_process(faultfs: MountedFaultFS) -> None:
    assert is_mounted(faultfs.mount)
    (faultfs.mount / "x").write_text("1")
    faultfs.close()
    assert not is_mounted(faultfs.mount)
    assert not process_exists(faultfs.pid)
    assert (faultfs.backing / "x").read_text() == "1"


def test_closing_while_a_file_is_open(faultfs: MountedFaultFS) -> None:
    fd = os.open(faultfs.mount / "x", os.O_RDWR | os.O_CREAT)
    faultfs.close()
    assert not is_mounted(faultfs.mount)
    assert not process_exists(faultfs.pid)
    with contextlib.suppress(OSError):
        os.close(fd)


def test_closing_after_the_process_was_killed(faultfs: MountedFaultFS) -> None:
    os.kill(faultfs.pid, signal.SIGKILL)
    os.waitid(os.P_PID, faultfs.pid, os.WEXITED | os.WNOWAIT)
    assert is_mounted(faultfs.mount)
    with fails("ENOTCONN"):
        os.listdir(faultfs.mount)
    faultfs.close()
    assert not is_mounted(faultfs.mount)


@pytest.mark.usefixtures("faultfs_factory")
def test_it_unmounts_itself_when_the_process_that_started_it_is_gone(tmp_path: Path) -> None:
    base = tmp_path / "left behind"
    left = subprocess.run(
        [sys.executable, "-c", STARTER, str(Path(__file__).parent.parent), str(base)],
        stdout=subprocess.PIPE,
        check=True,
    )
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        pidfd = os.pidfd_open(int(left.stdout))
        try:
            ended, _, _ = select.select([pidfd], [], [], 10.0)
        finally:
            os.close(pidfd)
        assert ended
    assert not is_mounted(base / "mount")


def test_a_mount_that_fails_says_why(tmp_path: Path, faultfs_factory: Callable[..., MountedFaultFS]) -> None:
    with pytest.raises(RuntimeError, match="--no-such-option"):
        faultfs_factory("--no-such-option")


@pytest.mark.parametrize("name", ["small_tmpfs", "small_ext4"])
def test_a_small_file_system_is_soon_full(request: pytest.FixtureRequest, name: str) -> None:
    path: Path = request.getfixturevalue(name)
    assert is_mounted(path)
    written = 0
    with opened(path / "x") as fd, fails("ENOSPC"):
        while written < 8 << 20:
            written += os.write(fd, b"x" * 4096)
    assert 512 << 10 <= written <= 4 << 20
    assert (path / "x").stat().st_size == written


# What is missing


@pytest.mark.parametrize(
    "need",
    [
        lambda: require_tool("no-such-command", "no-such-package"),
        lambda: require_tool("/dev/no-such-device", "no-such-package"),
        lambda: require_module("no_such_module", "no-such-package"),
        lambda: skip_or_fail("needs no-such-package"),
    ],
)
def test_a_missing_tool_skips_or_fails(need: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOTBUS_NO_SKIP", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-package"):
        need()
    monkeypatch.setenv("SOTBUS_NO_SKIP", "1")
    with pytest.raises(pytest.fail.Exception, match="no-such-package"):
        need()


def test_what_is_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOTBUS_NO_SKIP", "1")
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    assert require_tool(os.path.basename(sys.executable), "python3") == sys.executable
    assert require_tool("/dev/null", "the kernel") == "/dev/null"
    require_module("json", "python3")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    require_root("nothing")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(pytest.fail.Exception, match="needs root: nothing"):
        require_root("nothing")
