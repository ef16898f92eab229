"""The registry lock: take, release, wait, and the reclaim from a holder that is proved dead."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from tools import require_root, require_tool, skip_or_fail
from world import EXT4, MACHINE, World

from sotbus.comm.holder import Holder, own_record
from sotbus.comm.processes import start_ticks
from sotbus.comm.registry_lock import RegistryLock, link_record
from sotbus.comm.settings import Settings
from sotbus.errors import RegistryLockFailed

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

FORK = multiprocessing.get_context("fork")
TESTS = str(Path(__file__).parents[1])
SETTLE_S = 0.02


@contextmanager
def running(*processes: BaseProcess) -> Iterator[None]:
    """Start the processes; each is ended and reaped after."""
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


class Folder:
    """A comm folder with its lock, seen from this process."""

    def __init__(self, world: World) -> None:
        world.folder.ensure()
        self.world = world
        self.lock = RegistryLock(world.folder, world.box(), SETTLE_S)
        self.path = Path(world.folder.registry_lock)
        self.me = own_record(world.box(), fresh=True)

    def leaves(self) -> set[str]:
        return set(os.listdir(self.world.home)) - {"inbox", "self", "read"}

    def hold_as(self, record: Holder | str, path: Path | None = None) -> None:
        (path or self.path).write_text(f"{record}\n")

    def marker(self, record: Holder) -> Path:
        return self.world.home / f".registry.lock.reclaim.{record.leaf}"

    def record(self, of: int, /, **changed: str) -> Holder:
        """The record of a process of this machine, with some fields told otherwise."""
        fields = {
            "name": "vm",
            "machine": MACHINE,
            "boot": self.me.boot,
            "pidns": self.me.pidns,
            "pid": str(of),
            "start": start_ticks(of) or "1",
            **changed,
        }
        return Holder(**fields)

    def dead(self, start: int = 1) -> Holder:
        """The record of a process that is gone: this one's pid, another start."""
        return self.record(os.getpid(), start=str(start))

    def failure(self, bound_s: float = 0) -> str:
        """The words of a take that fails; the lock, and everything else, is as it was."""
        before = self.path.lstat(), self.leaves()
        with pytest.raises(RegistryLockFailed) as caught:
            self.lock.hold(bound_s)
        assert (self.path.lstat().st_ino, self.leaves()) == (before[0].st_ino, before[1])
        return str(caught.value)


@pytest.fixture
def folder(world: World) -> Folder:
    return Folder(world)


@pytest.fixture
def other(folder: Folder) -> Iterator[Holder]:
    """The record of another process that is running."""
    process = subprocess.Popen(["sleep", "300"])
    try:
        yield folder.record(process.pid)
    finally:
        process.kill()
        process.wait()


class Clock:
    """A clock that only sleeping moves; notes each sleep and can do something in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []
        self.meanwhile = meanwhile
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self._sleep)

    def _sleep(self, for_s: float) -> None:
        self.sleeps.append(round(for_s, 6))
        self.now += for_s
        self.meanwhile()


def held(folder: Folder, holder: Holder, why: str, blocker: Holder | None = None, more: str = "") -> str:
    """A pattern of the words of a held lock."""
    return (
        re.escape(
            f"FAILED: registry lock {folder.path} is held by {holder.name} pid {holder.pid} start {holder.start} ("
        )
        + r"\d+s"
        + re.escape(f" old): {why}. If it is dead, run any comm command on {(blocker or holder).name}.{more}")
    )


def by_hand(folder: Folder, why: str) -> str:
    """A pattern of the words of a lock that only a person can remove."""
    return (
        re.escape(f"FAILED: registry lock {folder.path} still held (")
        + r"\d+s"
        + re.escape(f" old): {why}. If its holder is dead, remove {folder.path} by hand and retry.")
    )


BY_HAND_CLAUSE = " No box can prove its death: if you know that it is dead, remove {} by hand and retry."


# ---- take and release


@pytest.mark.spec("S29", "S35", "S37")
def test_a_held_lock_is_one_line_with_its_holder_and_release_removes_it(folder: Folder) -> None:
    with folder.lock.hold(0) as lease:
        assert folder.path.read_text() == f"{folder.me}\n"
        assert folder.path.stat().st_mode & 0o777 == 0o600
        assert folder.leaves() == {".registry.lock"}
        assert lease.record == folder.me
    assert folder.leaves() == set()


@pytest.mark.spec("S34", "S35", "S36")
def test_the_record_is_whole_in_a_temp_file_before_it_is_linked(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str, str]] = []
    real = os.link

    def link(source: str, target: str) -> None:
        seen.append((source, target, Path(source).read_text()))
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    with folder.lock.hold(0):
        pass
    temp = folder.world.home / f".registry.lock.tmp.{str(folder.me).replace(':', '.')}"
    assert seen == [(str(temp), str(folder.path), f"{folder.me}\n")]


def test_a_temp_file_of_an_earlier_take_is_replaced(folder: Folder) -> None:
    other = folder.world.home / "inbox" / "other"
    other.write_text("not yours")
    (folder.world.home / f".registry.lock.tmp.{folder.me.leaf}").symlink_to(other)
    with folder.lock.hold(0):
        assert folder.path.read_text() == f"{folder.me}\n"
    assert other.read_text() == "not yours"
    assert folder.leaves() == set()


@pytest.mark.spec("S36")
def test_a_take_replaces_nothing_that_is_there(folder: Folder, other: Holder) -> None:
    folder.hold_as(other)
    before = folder.path.stat()
    folder.failure()
    after = folder.path.stat()
    assert (after.st_ino, after.st_mtime_ns, folder.path.read_text()) == (
        before.st_ino,
        before.st_mtime_ns,
        f"{other}\n",
    )


@pytest.mark.spec("S35")
def test_a_link_whose_answer_was_lost_is_a_take(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(source: str, target: str) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link)
    with folder.lock.hold(0):
        assert folder.leaves() == {".registry.lock"}
    assert folder.leaves() == set()


def test_a_link_that_cannot_be_made_fails_at_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def link(source: str, target: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(RegistryLockFailed) as caught:
        folder.lock.hold(10)
    assert str(caught.value) == (
        f"FAILED: registry lock {folder.path} cannot be taken: "
        f"cannot hard-link in {folder.world.home}: Operation not permitted"
    )
    assert clock.sleeps == []
    assert folder.leaves() == set()


def test_a_disk_that_is_full_fails_the_take_and_leaves_nothing(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(RegistryLockFailed, match="cannot be taken: No space left on device"):
        folder.lock.hold(0)
    assert folder.leaves() == set()


@pytest.mark.spec("S37")
def test_an_exception_in_the_block_releases(folder: Folder) -> None:
    with pytest.raises(LookupError), folder.lock.hold(0):
        raise LookupError
    assert folder.leaves() == set()
    with folder.lock.hold(0):
        pass


def test_a_lease_releases_once(folder: Folder) -> None:
    lease = folder.lock.hold(0)
    lease.release()
    with folder.lock.hold(0):
        lease.release()
        assert folder.path.exists()


# ---- waiting


@pytest.mark.spec("S44", "S45")
def test_the_bounds_are_the_pages_and_the_environments() -> None:
    assert (Settings().lock_wait_s, Settings().touch_wait_s) == (10, 1)
    assert Settings.of({"SOT_LOCK_WAIT_SECS": "0.2"}).lock_wait_s == 0.2
    assert Settings.of({"SOT_LOCK_WAIT_SECS": "soon"}).lock_wait_s == 10
    assert Settings.of({"SOT_LOCK_WAIT_SECS": "5"}).touch_wait_s == 1


@pytest.mark.spec("S39", "S47", "S48")
def test_a_running_holder_is_named_with_the_recovery(folder: Folder, other: Holder) -> None:
    folder.hold_as(other)
    assert re.fullmatch(held(folder, other, "it is running"), folder.failure())


@pytest.mark.spec("S47")
def test_the_age_is_the_lock_files(folder: Folder, other: Holder) -> None:
    folder.hold_as(other)
    os.utime(folder.path, (0, time.time() - 90.5))
    assert re.search(r"\((90|91|92)s old\)", folder.failure())
    os.utime(folder.path, (0, time.time() + 1000))
    assert "(0s old)" in folder.failure()


@pytest.mark.spec("S46")
def test_a_bound_of_0_is_one_try_without_a_sleep(
    folder: Folder, other: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.hold_as(other)
    clock = Clock(monkeypatch)
    folder.failure(0)
    assert clock.sleeps == []


@pytest.mark.spec("S44")
@pytest.mark.parametrize(("bound_s", "sleeps"), [(0.2, [0.05] * 4), (0.12, [0.05, 0.05, 0.02]), (1, [0.05] * 20)])
def test_a_held_lock_is_tried_every_50_ms_until_the_bound(
    bound_s: float, sleeps: list[float], folder: Folder, other: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.hold_as(other)
    clock = Clock(monkeypatch)
    folder.failure(bound_s)
    assert sum(clock.sleeps) == pytest.approx(bound_s)
    assert [pause for pause in clock.sleeps if pause > 1e-6] == sleeps


@pytest.mark.spec("S44")
def test_a_lock_that_is_released_within_the_bound_is_taken(
    folder: Folder, other: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.hold_as(other)
    clock = Clock(monkeypatch)
    clock.meanwhile = lambda: folder.path.unlink() if len(clock.sleeps) == 3 else None
    with folder.lock.hold(10) as lease:
        assert lease.record == folder.me
        assert folder.path.read_text() == f"{folder.me}\n"
    assert clock.sleeps == [0.05] * 3


def test_a_lock_that_is_gone_at_the_deadline_was_held_when_last_read(
    folder: Folder, other: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.hold_as(other)
    real = os.path.lexists

    def lexists(path: str) -> bool:
        folder.path.unlink(missing_ok=True)
        return real(path)

    monkeypatch.setattr(os.path, "lexists", lexists)
    with pytest.raises(RegistryLockFailed) as caught:
        folder.lock.hold(0)
    assert str(caught.value) == (
        f"FAILED: registry lock {folder.path} was held by {other.described} when last read (it is running); "
        "it may have been released since. Retry."
    )


def test_a_lock_that_is_gone_at_each_look_ends_at_the_bound(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def link(source: str, target: str) -> None:
        tries.append(target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(RegistryLockFailed) as caught:
        folder.lock.hold(0)
    assert str(caught.value) == (
        f"FAILED: registry lock {folder.path} was not taken by the deadline: "
        "it was released and taken again each time. Retry."
    )
    assert len(tries) == 2


def test_an_interrupt_while_waiting_leaves_nothing_and_frees_the_turn(
    folder: Folder, other: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.hold_as(other)

    def sleep(for_s: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", sleep)
        with pytest.raises(KeyboardInterrupt):
            folder.lock.hold(10)
    assert folder.leaves() == {".registry.lock"}
    folder.path.unlink()
    with folder.lock.hold(0):
        pass


def test_threads_of_one_process_take_turns(folder: Folder) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        own = RegistryLock(folder.world.folder, folder.world.box(), SETTLE_S)
        for _ in range(10):
            with own.hold(60):
                inside.append(number)
                most.append(len(inside))
                time.sleep(0.0005)
                inside.remove(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1] * 60
    assert folder.leaves() == set()


@pytest.mark.parametrize("bound_s", [0, 0.05])
def test_a_thread_waits_for_its_turn_within_the_bound(bound_s: float, folder: Folder) -> None:
    said: list[str] = []

    def work() -> None:
        try:
            folder.lock.hold(bound_s).release()
        except RegistryLockFailed as error:
            said.append(str(error))

    with folder.lock.hold(0):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
        assert folder.path.exists()
    assert said == [
        f"FAILED: registry lock {folder.path} was not tried: "
        "another thread of this process held its turn past the bound"
    ]


def test_a_child_of_the_holder_does_not_hold_the_lock(folder: Folder) -> None:
    answer = FORK.SimpleQueue()

    def child() -> None:
        try:
            folder.lock.hold(0)
        except RegistryLockFailed as error:
            answer.put(str(error))
        else:
            answer.put("taken")

    process = FORK.Process(target=child)
    with folder.lock.hold(0), running(process):
        process.join(30)
        assert re.fullmatch(held(folder, folder.me, "it is running"), answer.get())
        assert folder.path.exists()


# ---- reclaim


@pytest.mark.spec("S38", "S40")
@pytest.mark.parametrize("how", ["exited", "other start", "rebooted"])
def test_a_dead_holders_lock_is_reclaimed_even_with_a_bound_of_0(
    how: str, folder: Folder, other: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "exited":
        gone = subprocess.Popen(["true"])
        record = folder.record(gone.pid)
        gone.wait()
    elif how == "other start":
        record = folder.record(int(other.pid), start=str(int(other.start) + 1))
    else:
        record = folder.record(int(other.pid), boot="an-earlier-boot")
    folder.hold_as(record)
    clock = Clock(monkeypatch)
    with folder.lock.hold(0) as lease:
        assert folder.path.read_text() == f"{lease.record}\n" == f"{folder.me}\n"
    assert clock.sleeps == [SETTLE_S]
    assert folder.leaves() == {folder.marker(record).name}
    assert folder.marker(record).read_text() == f"{folder.me}\n"
    assert folder.marker(record).name == ".registry.lock.reclaim." + str(record).replace(":", ".")


@pytest.mark.spec("S40")
def test_the_settle_is_a_second(world: World) -> None:
    assert RegistryLock(world.folder, world.box()).settle_s == 1


@pytest.mark.spec("S38", "S39", "S47", "S48")
@pytest.mark.parametrize(
    ("changed", "why", "clause"),
    [
        ({"name": "far", "machine": "f" * 32, "boot": "another"}, "it is on another machine", False),
        ({"name": "far", "boot": "another"}, "it is on another machine", False),
        ({"machine": "f" * 32, "boot": "another"}, "it is on another machine", False),
        ({"machine": "-", "boot": "another"}, "it is on another machine", False),
        ({"pidns": "4"}, "it is in another pid namespace", False),
        ({"pidns": "-"}, "it is in another pid namespace", False),
        ({"machine": "-", "boot": "-", "pidns": "-", "start": "-"}, "it is on another machine", True),
        ({"machine": "-", "boot": "x", "pidns": "-", "start": "9"}, "it is on another machine", True),
        ({"boot": "-"}, "it is in another pid namespace", True),
        ({"pid": "007"}, "its pid 007 is not one", True),
        ({"pid": "9" * 30}, f"its pid {'9' * 30} is not one", True),
    ],
)
def test_a_holder_that_nobody_here_proves_dead_is_never_forced(
    changed: dict[str, str], why: str, clause: bool, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    record = folder.record(gone.pid, **changed)
    folder.hold_as(record)
    os.utime(folder.path, (0, 0))
    Clock(monkeypatch)
    more = BY_HAND_CLAUSE.format(folder.path) if clause else ""
    assert re.fullmatch(held(folder, record, why, more=more), folder.failure(5))


@pytest.mark.spec("S32", "S39")
@pytest.mark.parametrize(
    ("mount", "doubt"),
    [
        ("fuse.sshfs x rw", "the comm home's filesystem (fuse.sshfs) does not prove a fresh read"),
        ("overlay overlay rw", "the comm home's filesystem (overlay) does not prove a fresh read"),
        ("nfs4 s:/e rw,vers=4.2,nocto", "the comm home is mounted nocto, so no read of it is proved fresh"),
        ("nfs s:/e rw,vers=3", ""),
        ("nfs4 s:/e rw,vers=4.2,local_lock=flock", ""),
        ("tmpfs tmpfs rw", ""),
        ("xfs /dev/vdb rw", ""),
    ],
)  # fmt: skip
def test_only_a_mount_that_proves_fresh_reads_lets_this_box_prove_a_death(
    mount: str, doubt: str, folder: Folder
) -> None:
    folder.world.mountinfo.write_text(EXT4 + f"22 21 0:50 / {folder.world.home} rw,relatime - {mount}\n")
    dead = folder.dead()
    folder.hold_as(dead)
    if doubt:
        assert re.fullmatch(held(folder, dead, doubt), folder.failure())
    else:
        with folder.lock.hold(0) as lease:
            assert lease.record == folder.me


@pytest.mark.spec("S32")
def test_on_a_mount_without_fresh_reads_the_lock_is_taken_without_proof_fields(folder: Folder) -> None:
    folder.world.mountinfo.write_text(EXT4.replace("ext4", "fuse.sshfs"))
    with folder.lock.hold(0):
        assert folder.path.read_text() == f"vm:-:-:-:{os.getpid()}:-\n"


@pytest.mark.spec("S39")
def test_a_frozen_holder_is_never_forced(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = FORK.Event()

    def hold() -> None:
        folder.lock.hold(10)
        taken.set()
        signal.pause()

    process = FORK.Process(target=hold)
    with running(process):
        assert taken.wait(30)
        pid = process.pid or 0
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        os.utime(folder.path, (0, 0))
        with monkeypatch.context() as patch:
            Clock(patch)
            assert re.fullmatch(held(folder, folder.record(pid), "it is running"), folder.failure(60))


HOLDER = """
import os, sys
from pathlib import Path
from world import World
from sotbus.comm.registry_lock import RegistryLock
world = World.__new__(World)
world.mountinfo = Path({mountinfo!r})
from sotbus.comm.folder import Folder
RegistryLock(Folder({home!r}), world.box()).hold(0)
print(Path({home!r}, ".registry.lock").read_text(), end="", flush=True)
os._exit(0)
"""


@pytest.mark.spec("S38", "S39", "S47")
@pytest.mark.parametrize("own_proc", [True, False])
def test_a_holder_that_died_in_another_pid_namespace_is_never_forced(own_proc: bool, folder: Folder) -> None:
    unshare = require_tool("unshare", "util-linux")
    require_root("to make a pid namespace")
    code = textwrap.dedent(HOLDER).format(mountinfo=str(folder.world.mountinfo), home=str(folder.world.home))
    done = subprocess.run(
        [unshare, "--pid", "--fork", *(["--mount-proc"] if own_proc else []), sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([TESTS, str(Path(TESTS).parent)])},
        timeout=60,
        check=False,
    )
    if "unshare failed" in done.stderr:
        skip_or_fail(done.stderr)
    assert done.returncode == 0, done.stderr
    name, machine, boot, pidns, pid, start = done.stdout.strip().split(":")
    record = Holder(name, machine, boot, pidns, pid, start)
    assert folder.path.read_text().strip() == str(record)
    if own_proc:
        assert (machine, boot) == (MACHINE, folder.me.boot)
        assert pidns not in ("-", folder.me.pidns)
        assert re.fullmatch(held(folder, record, "it is in another pid namespace"), folder.failure())
    else:
        assert (machine, boot, pidns, start) == ("-", "-", "-", "-")
        clause = BY_HAND_CLAUSE.format(folder.path)
        assert re.fullmatch(held(folder, record, "it is on another machine", more=clause), folder.failure())


@pytest.mark.spec("S40")
def test_a_lock_that_is_taken_again_during_the_settle_is_left(
    folder: Folder, other: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = folder.dead()
    folder.hold_as(dead)

    def taken_again() -> None:
        folder.path.unlink()
        folder.hold_as(other)

    Clock(monkeypatch, taken_again)
    with pytest.raises(RegistryLockFailed) as caught:
        folder.lock.hold(0)
    assert re.fullmatch(held(folder, other, "it was taken again during the reclaim"), str(caught.value))
    assert folder.path.read_text() == f"{other}\n"


@pytest.mark.spec("S40")
def test_a_lock_that_is_gone_after_the_settle_is_taken(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.hold_as(folder.dead())
    Clock(monkeypatch, lambda: folder.path.unlink(missing_ok=True))
    with folder.lock.hold(0) as lease:
        assert lease.record == folder.me


def test_a_lock_that_is_garbage_after_the_settle_is_left(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = folder.dead()
    folder.hold_as(dead)
    Clock(monkeypatch, lambda: folder.hold_as("garbage"))
    with pytest.raises(RegistryLockFailed) as caught:
        folder.lock.hold(0)
    assert re.fullmatch(held(folder, dead, "its record changed during the reclaim"), str(caught.value))
    assert folder.path.read_text() == "garbage\n"


@pytest.mark.spec("S40", "S41", "S47")
def test_only_the_markers_creator_acts(folder: Folder, other: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    dead, reclaimer = folder.dead(), folder.record(int(other.pid), name="vm-too")
    folder.hold_as(dead)
    folder.hold_as(reclaimer, folder.marker(dead))
    clock = Clock(monkeypatch)
    why = f"it is dead, but its reclaim by vm-too pid {other.pid} did not finish: it is running"
    assert re.fullmatch(held(folder, dead, why, blocker=reclaimer), folder.failure())
    assert clock.sleeps == []


@pytest.mark.spec("S48")
def test_a_reclaimer_that_nobody_can_prove_dead_brings_the_by_hand_clause(folder: Folder) -> None:
    dead, reclaimer = folder.dead(), Holder("far", "-", "-", "-", "5", "-")
    folder.hold_as(dead)
    folder.hold_as(reclaimer, folder.marker(dead))
    why = "it is dead, but its reclaim by far pid 5 did not finish: it is on another machine"
    more = BY_HAND_CLAUSE.format(folder.path)
    assert re.fullmatch(held(folder, dead, why, blocker=reclaimer, more=more), folder.failure(0.5))


@pytest.mark.spec("S42")
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_reclaimer_that_died_too_is_passed_by_its_own_marker(length: int, folder: Folder) -> None:
    records = [folder.dead(start) for start in range(1, length + 2)]
    folder.hold_as(records[0])
    for record, reclaimer in pairwise(records):
        folder.hold_as(reclaimer, folder.marker(record))
    with folder.lock.hold(5) as lease:
        assert lease.record == folder.me
    assert folder.marker(records[-1]).read_text() == f"{folder.me}\n"
    assert folder.leaves() == {folder.marker(record).name for record in records}


def test_a_lock_that_names_a_passed_reclaimer_after_the_settle_is_removed(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = folder.dead(1), folder.dead(2)
    folder.hold_as(first)
    folder.hold_as(second, folder.marker(first))
    Clock(monkeypatch, lambda: folder.hold_as(second))
    with folder.lock.hold(5) as lease:
        assert lease.record == folder.me


@pytest.mark.spec("S41")
def test_a_marker_that_this_process_made_earlier_lets_it_finish(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = folder.dead()
    folder.hold_as(dead)
    folder.hold_as(folder.me, folder.marker(dead))
    clock = Clock(monkeypatch)
    with folder.lock.hold(0) as lease:
        assert lease.record == folder.me
    assert clock.sleeps == [SETTLE_S]


@pytest.mark.spec("S43")
@pytest.mark.parametrize("loop", [(1,), (1, 2), (1, 2, 3, 2)])
def test_a_marker_that_names_a_record_already_passed_ends_the_walk(loop: tuple[int, ...], folder: Folder) -> None:
    walk = [folder.dead(start) for start in loop]
    if len(set(loop)) == len(loop):
        walk.append(walk[0])
    folder.hold_as(walk[0])
    for record, reclaimer in pairwise(walk):
        folder.hold_as(reclaimer, folder.marker(record))
    why = (
        f"its reclaim marker {folder.marker(walk[-2])} names {walk[-1]}, which its reclaim chain already holds, "
        "so no reclaim can pass it"
    )
    assert re.fullmatch(by_hand(folder, why), folder.failure(0.05))


def test_a_chain_is_walked_no_longer_than_the_bound(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = folder.dead(1), folder.dead(2)
    folder.hold_as(first)
    folder.hold_as(second, folder.marker(first))
    clock = Clock(monkeypatch)
    real = os.link

    def slow_link(source: str, target: str) -> None:
        clock.now += 10
        real(source, target)

    monkeypatch.setattr(os, "link", slow_link)
    why = "its reclaim chain was still being walked at the deadline"
    assert re.fullmatch(held(folder, first, why, blocker=second), folder.failure(5))


def test_a_marker_that_cannot_be_made_leaves_the_lock(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = folder.dead()
    folder.hold_as(dead)
    real = os.link

    def link(source: str, target: str) -> None:
        if ".reclaim." in target:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    assert "it is dead, but its reclaim marker cannot be made" in folder.failure()


@pytest.mark.parametrize("how", ["empty", "garbage", "folder"])
def test_a_marker_that_names_nobody_leaves_the_lock(how: str, folder: Folder) -> None:
    dead = folder.dead()
    folder.hold_as(dead)
    if how == "folder":
        folder.marker(dead).mkdir()
    else:
        folder.marker(dead).write_text("garbage\n" if how == "garbage" else "")
    why = f"it is dead, but its reclaim marker {folder.marker(dead)} cannot be read"
    assert re.fullmatch(held(folder, dead, why), folder.failure())


# ---- a stale lock of this very process


def test_a_stale_lock_of_this_process_is_taken(folder: Folder) -> None:
    folder.hold_as(folder.me)
    with folder.lock.hold(0) as lease:
        assert lease.record == folder.me
    assert not folder.path.exists()


def test_a_release_that_failed_is_made_good_by_the_next_take(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = folder.lock.hold(0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", _refuse)
        lease.release()
    assert folder.path.exists()
    for _ in range(2):
        with folder.lock.hold(0):
            assert folder.path.read_text() == f"{folder.me}\n"
        assert not folder.path.exists()


def _refuse(path: str) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.spec("S40", "S42")
def test_a_process_that_reclaimed_its_own_lock_and_died_later_is_reclaimed(folder: Folder) -> None:
    def work() -> None:
        lease = folder.lock.hold(10)
        unlink, os.unlink = os.unlink, _refuse  # type: ignore[assignment]  # this process is the child
        lease.release()
        os.unlink = unlink
        folder.lock.hold(10)
        os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(target=work)
    with running(process):
        process.join(30)
        assert process.exitcode == -signal.SIGKILL
    assert folder.path.exists()
    with folder.lock.hold(0) as lease:
        assert lease.record == folder.me


# ---- what is no record


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "pid").write_text("1")


@pytest.mark.spec("S43")
def test_a_lock_that_is_a_folder_is_removed_by_hand(folder: Folder) -> None:
    _folder(folder.path)
    assert re.fullmatch(by_hand(folder, "held by an older version that records no holder"), folder.failure())
    assert (folder.path / "pid").read_text() == "1"


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"", "empty"),
        (b"\n", "empty"),
        (b"\nvm:m:b:n:1:2\n", "empty"),
        (b"garbage\n", "garbage"),
        (b"a:b:c:d:5\n", "a:b:c:d:5"),
        (b"a:b:c:d:e:f\n", "a:b:c:d:e:f"),
        (b"\xff\xfe", "\ufffd\ufffd"),
    ],
)
def test_a_lock_that_names_no_holder_is_removed_by_hand(data: bytes, shown: str, folder: Folder) -> None:
    folder.path.write_bytes(data)
    assert re.fullmatch(by_hand(folder, f"its record names no holder ({shown})"), folder.failure())
    assert folder.path.read_bytes() == data


def test_a_fifo_in_the_locks_place_is_not_waited_for(folder: Folder) -> None:
    os.mkfifo(folder.path)
    assert re.fullmatch(by_hand(folder, "its record names no holder (empty)"), folder.failure())


def test_a_link_in_the_locks_place_is_not_followed(folder: Folder) -> None:
    outside = folder.world.base / "outside"
    folder.hold_as(folder.dead(), outside)
    folder.path.symlink_to(outside)
    assert folder.failure() == (
        f"FAILED: registry lock {folder.path} was not taken by the deadline: "
        "its record cannot be read (Too many levels of symbolic links). Retry."
    )
    assert outside.exists()


@pytest.mark.parametrize("field", ["name", "machine", "start"])
@pytest.mark.parametrize("evil", ["../../evil", "/etc/x", "..", "a\0b"])
def test_a_record_never_makes_a_path_out_of_the_folder(field: str, evil: str, folder: Folder) -> None:
    record = folder.record(os.getpid(), **{"start": "1", field: evil})
    folder.hold_as(record)
    made: list[str] = []
    before = sorted(str(path) for path in folder.world.base.rglob("*"))
    real = os.link

    def link(source: str, target: str) -> None:
        made.append(target)
        real(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", link)
        if evil == "..":  # no slash: a file name like any other
            folder.lock.hold(0).release()
        else:
            assert re.fullmatch(by_hand(folder, f"its record names no holder ({record})"), folder.failure())
            assert sorted(str(path) for path in folder.world.base.rglob("*")) == before
    assert {os.path.dirname(path) for path in made} == {str(folder.world.home)}


def test_a_link_of_a_record_is_false_where_something_is(folder: Folder) -> None:
    target = str(folder.world.home / "x")
    assert link_record(target, str(folder.world.home), folder.me) is True
    assert link_record(target, str(folder.world.home), folder.dead()) is False
    assert Path(target).read_text() == f"{folder.me}\n"
    assert folder.leaves() == {"x"}


# ---- the race


@pytest.mark.spec("S36", "S40", "S41")
def test_in_20_rounds_of_3_waiters_on_a_killed_holder_one_at_a_time_is_inside(folder: Folder) -> None:
    inside, log = folder.world.base / "inside", folder.world.base / "log"
    log.touch()

    def die_holding() -> None:
        folder.lock.hold(30)
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_and_enter(start: threading.Barrier) -> None:
        start.wait(60)
        with folder.lock.hold(30):
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
            time.sleep(0.003)
            with open(log, "ab", buffering=0) as file:
                file.write(b"entered\n")
            os.unlink(inside)

    for number in range(1, 21):
        holder = FORK.Process(target=die_holding)
        with running(holder):
            holder.join(30)
        assert holder.exitcode == -signal.SIGKILL
        assert folder.path.exists()
        start = FORK.Barrier(3)
        waiters = [FORK.Process(target=wait_and_enter, args=(start,)) for _ in range(3)]
        with running(*waiters):
            for waiter in waiters:
                waiter.join(60)
        assert [waiter.exitcode for waiter in waiters] == [0] * 3
        assert log.read_bytes() == b"entered\n" * 3 * number
        assert not folder.path.exists()
