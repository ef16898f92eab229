"""Full disks, read-only folders and disks that fail: what is answered, what is on disk then, and that it passes.

Every fault meets both kinds of session: a client in this process, which lives through all of it, and the ``sotbus``
command. A :class:`Bus` keeps account of the answers, and :meth:`Bus.check` holds the inbox against them: what was
answered ``filed`` is there once and in order, what was answered FAILED is not there.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import pytest
from faults.faultfs import MountedFaultFS
from tools import require_module, require_tool
from world import MACHINE, World

from sotbus import message
from sotbus.comm import membership, reading, sending
from sotbus.comm.registry import Registry
from sotbus.comm.settings import Settings
from sotbus.errors import RegistryUnreadable, SotbusError

pytestmark = pytest.mark.faults

INBOX = "*/inbox/b-vm.jsonl"
INBOX_LOCK = "*/inbox/b-vm.lock"
CURSOR = "*/read/b-vm.cursor"
CURSOR_TMP = "*/read/b-vm.cursor.tmp.*"
REGISTRY = "*/registry.json"
REGISTRY_TMP = "*/registry.json.tmp"
LOCK = "*/.registry.lock"
LOCK_TMP = "*/.registry.lock.tmp.*"

EIO = "Input/output error"
ENOSPC = "No space left on device"
EROFS = "Read-only file system"
ESTALE = "Stale file handle"

FIRST = "filed before the fault"
TWELVE_KB = "x" * 12_000

Faults = list[dict[str, object]]


class Answer(NamedTuple):
    """What a session got: exit status, standard output, and standard error less its hints."""

    status: int
    out: str
    err: str

    @property
    def texts(self) -> list[str]:
        """The texts of the messages that a poll showed."""
        return re.findall(r"^\[\S+\] \[\S+:\S+\] (.*)$", self.out, re.MULTILINE)


class Session(ABC):
    """Somebody who sends, polls, joins and leaves, and can be called with the words of a command."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name

    @abstractmethod
    def __call__(self, *words: str) -> Answer: ...


class ThroughCommand(Session):
    """Each call is a process of its own."""

    def __call__(self, *words: str, **env: str) -> Answer:
        done = self.world.sotbus(self.name, *words, env=env)
        assert "Traceback" not in done.stderr, done.stderr
        err = "".join(line for line in done.stderr.splitlines(keepends=True) if not line.startswith("hint: "))
        return Answer(done.returncode, done.stdout, err)


class ThroughApi(Session):
    """One client for all calls, which answers in the command's words. Only a SotbusError is an answer."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.client = world.client(name, settings=Settings(lock_wait_s=1))

    def __call__(self, *words: str) -> Answer:
        out: list[str] = []
        err = self.world.notes
        err.clear()
        status = 0
        calls: dict[str, Callable[..., None]] = {
            "send": self._send,
            "poll": self._poll,
            "join": self._join,
            "leave": self._leave,
        }
        try:
            calls[words[0]](out, *words[1:])
        except SotbusError as error:
            status = error.exit_status
            err.append(f"FAILED -> {words[1]}: {error}" if words[0] == "send" else str(error))
        return Answer(status, "".join(f"{line}\n" for line in out), "".join(f"{line}\n" for line in err))

    def _send(self, out: list[str], target: str, text: str) -> None:
        outbox = sending.Outbox(self.client)
        try:
            outbox.send(target.removeprefix("@"), text)
        finally:
            sending.touch(self.client, outbox.sender.handle)
        out.append(f"  filed -> {target}")

    def _poll(self, out: list[str]) -> None:
        handle = self.client.identity().handle
        seen = reading.look_at(self.client, handle, out.append)
        mail = filter(None, map(message.parse, seen.lines))
        out.extend(f"[{one['ts']}] [{one['from']}:{one['repo']}] {message.text_of(one)}" for one in mail)
        reading.advance(self.client, handle, seen)
        sending.touch(self.client, handle)

    def _join(self, out: list[str], *name: str) -> None:
        out.append(membership.join(self.client, name=name[1] if name else None).handle)

    def _leave(self, out: list[str]) -> None:
        out.append(" ".join(membership.leave(self.client)))


class Bus:
    """@a-vm and @b-vm in one comm folder, one message between them, and an account of what was answered since.

    :param home: the comm folder as the sessions see it.
    :param disk: the same folder behind the faults.
    """

    def __init__(self, base: Path, home: Path, disk: Path | None = None) -> None:
        self.disk = disk or home
        behind = World(base, home=self.disk)
        for name in "ba":
            client = behind.client(name)
            client.environ = {**client.environ, "SOT_COMM_SELF_FILE": str(home / "self" / f"pin-{name}.txt")}
            membership.join(client)
        sending.Outbox(client).send("b-vm", FIRST)
        self.world = World(base, home=home)
        self.api = {name: ThroughApi(self.world, name) for name in "ab"}
        self.command = {name: ThroughCommand(self.world, name) for name in "ab"}
        self.filed = [FIRST]
        self.failed: list[str] = []
        self.unknown: list[str] = []
        self._numbers = itertools.count(1)

    def both(self, name: str) -> tuple[Session, Session]:
        return self.api[name], self.command[name]

    @property
    def lock(self) -> Path:
        return self.world.home / ".registry.lock"

    @property
    def inbox(self) -> Path:
        return self.disk / "inbox" / "b-vm.jsonl"

    def send(self, session: Session, body: str = "text") -> Answer:
        """@a-vm sends @b-vm a text that is sent only once, and the answer goes into the account."""
        text = f"{next(self._numbers)} {body}"
        answer = session("send", "@b-vm", text)
        if answer.status == 0:
            assert answer.out == "  filed -> @b-vm\n"
            self.filed.append(text)
        else:
            assert answer.out == ""
            (self.unknown if "outcome is unknown" in answer.err else self.failed).append(text)
        return answer

    def check(self) -> None:
        """The inbox is whole lines, the filed ones once and in order, and besides them at most the unknown ones."""
        data = self.inbox.read_bytes()
        assert data.endswith(b"\n")
        texts = [json.loads(line)["msg"] for line in data[:-1].split(b"\n")]
        assert [text for text in texts if text not in self.unknown] == self.filed
        assert all(texts.count(text) <= 1 for text in self.unknown)

    def look(self) -> dict[str, tuple[bytes, int]]:
        """Every file of the folder on the disk, with its bytes and inode."""
        return {
            str(path.relative_to(self.disk)): (path.read_bytes(), path.stat().st_ino)
            for path in self.disk.rglob("*")
            if path.is_file()
        }

    def changed(self, before: Mapping[str, tuple[bytes, int]]) -> set[str]:
        """The files that were made, removed, replaced or written since."""
        after = self.look()
        return {name for name in {*before, *after} if before.get(name) != after.get(name)}

    def recovers(self) -> None:
        """All is well again: the clients that met the fault send, read and join, and nothing is left of it."""
        assert self.send(self.api["a"], "after the fault") == (0, "  filed -> @b-vm\n", "")
        answer = self.api["b"]("poll")
        assert (answer.status, answer.err, answer.texts[-1]) == (0, "", self.filed[-1])
        assert self.api["a"]("join") == (0, "a-vm\n", "")
        self.check()
        made = {"inbox-lock-manager", "registry.json", "inbox/a-vm.jsonl", "self/pin-a.txt", "self/pin-b.txt"}
        made |= {"inbox/b-vm.jsonl", "inbox/b-vm.lock", "read/b-vm.cursor"}
        assert set(self.look()) == made, "something is left behind"


def failed(reason: str) -> str:
    """Standard error of a send that was answered FAILED."""
    return f"FAILED -> @b-vm: {reason}\n"


def cursor_not_written(why: str) -> str:
    return f"the cursor of @b-vm could not be written ({why}); these messages will show again\n"


# The disk is full


class FullDisk:
    """A small file system with a comm folder, and a file that fills the rest of it."""

    def __init__(self, mount: Path) -> None:
        self.mount = mount
        self.filler = mount / "filler"

    def fill(self, leave: int) -> None:
        """Write until nothing more goes in, then give ``leave`` bytes back."""
        with open(self.filler, "ab", buffering=0) as file:
            while self._write_all_there_is(file):
                os.fsync(file.fileno())  # gives back what was only reserved, and what was removed not long ago
            file.truncate(file.tell() - leave)
            os.fsync(file.fileno())

    def _write_all_there_is(self, file: FileIO) -> int:
        """Write to the end of the room, in ever smaller pieces; how many bytes that was."""
        before = file.tell()
        for size in (1 << 16, 1 << 12, 1 << 10):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        return file.tell() - before

    def free(self) -> None:
        self.filler.unlink()


@pytest.fixture(params=["small_tmpfs", "small_ext4"])
def full_disk(request: pytest.FixtureRequest) -> FullDisk:
    return FullDisk(request.getfixturevalue(request.param))


@pytest.fixture
def full_tmpfs(small_tmpfs: Path) -> FullDisk:
    """Of the two the one whose room is counted in pages: a file takes at least one, a name none."""
    return FullDisk(small_tmpfs)


@pytest.mark.spec("S57", "S95")
def test_scenario_2_a_send_on_a_full_disk_is_failed_and_filed_by_the_same_process_once_there_is_room(
    full_disk: FullDisk, tmp_path: Path
) -> None:
    bus = Bus(tmp_path, full_disk.mount / "comm")
    full_disk.fill(leave=4096)
    before = bus.look()
    for session in bus.both("a"):
        assert bus.send(session, TWELVE_KB) == (1, "", failed(f"the append failed: {ENOSPC}"))
        assert bus.changed(before) <= {"registry.json"}, "the inbox is not what it was"
    full_disk.free()
    for session in bus.both("a"):
        assert bus.send(session, TWELVE_KB).status == 0
    bus.recovers()


@pytest.mark.spec("S22", "S23")
@pytest.mark.parametrize("words", [("join",), ("join", "--name", "new"), ("leave",)], ids=" ".join)
def test_a_registry_that_cannot_be_written_on_a_full_disk_stays_as_it_was(
    full_tmpfs: FullDisk, tmp_path: Path, words: tuple[str, ...]
) -> None:
    bus = Bus(tmp_path, full_tmpfs.mount / "comm")
    full_tmpfs.fill(leave=4096)  # the lock's page
    before = bus.look()
    text = f"FAILED: the registry update could not be flushed ({ENOSPC}), so nothing was written\n"
    for session in bus.both("a"):
        assert session(*words) == (1, "", text)
        assert bus.changed(before) == set()
    full_tmpfs.free()
    bus.recovers()


@pytest.mark.spec("S23", "S35", "S36")
def test_a_registry_lock_that_cannot_be_taken_on_a_full_disk_is_failed_and_none_is_left(
    full_disk: FullDisk, tmp_path: Path
) -> None:
    bus = Bus(tmp_path, full_disk.mount / "comm")
    full_disk.fill(leave=0)
    before = bus.look()
    for session in bus.both("a"):
        for command in ("join", "leave"):
            answer = session(command)
            assert answer == (1, "", f"FAILED: registry lock {bus.lock} cannot be taken: {ENOSPC}\n")
            assert bus.changed(before) == set()
    full_disk.free()
    bus.recovers()


@pytest.mark.spec("S72")
def test_a_poll_on_a_full_disk_shows_the_mail_says_that_the_cursor_was_not_written_and_shows_it_again(
    full_disk: FullDisk, tmp_path: Path
) -> None:
    bus = Bus(tmp_path, full_disk.mount / "comm")
    full_disk.fill(leave=0)
    before = bus.look()
    for session in bus.both("b"):
        answer = session("poll")
        assert (answer.status, answer.texts, answer.err) == (1, [FIRST], cursor_not_written(ENOSPC))
        assert bus.changed(before) == set()
    full_disk.free()
    assert bus.command["b"]("poll").texts == [FIRST]
    assert bus.api["b"]("poll").texts == []
    bus.recovers()


@pytest.mark.spec("S72")
def test_a_cursor_that_stands_is_kept_whole_when_the_disk_is_full(full_disk: FullDisk, tmp_path: Path) -> None:
    bus = Bus(tmp_path, full_disk.mount / "comm")
    assert bus.command["b"]("poll").texts == [FIRST]
    assert bus.send(bus.api["a"]).status == 0
    full_disk.fill(leave=0)
    before = bus.look()
    for session in bus.both("b"):
        answer = session("poll")
        assert (answer.status, answer.texts, answer.err) == (1, bus.filed[1:], cursor_not_written(ENOSPC))
        assert bus.changed(before) == set()
    full_disk.free()
    assert bus.api["b"]("poll").texts == bus.filed[1:]
    bus.recovers()


@pytest.mark.spec("S24")
def test_a_first_command_on_a_full_disk_leaves_no_registry_and_the_next_one_makes_it(
    full_tmpfs: FullDisk, tmp_path: Path
) -> None:
    world = World(tmp_path, home=full_tmpfs.mount / "comm")
    full_tmpfs.fill(leave=0)
    text = f"FAILED: the registry could not be created ({ENOSPC}), so nothing was written\n"
    sessions = ThroughApi(world, "a"), ThroughCommand(world, "b")
    for session in sessions:
        assert session("join") == (1, "", text)
        assert [path for path in world.home.rglob("*") if path.is_file()] == []
    full_tmpfs.free()
    for session in sessions:
        assert session("join").status == 0
    assert set(Registry(world.folder, world.box()).agents()) == {"a-vm", "b-vm"}


@pytest.mark.spec("S63")
def test_a_first_send_on_a_full_disk_makes_no_half_record_of_the_lock_manager(
    full_tmpfs: FullDisk, tmp_path: Path
) -> None:
    bus = Bus(tmp_path, full_tmpfs.mount / "comm")
    (bus.disk / "inbox-lock-manager").unlink()
    full_tmpfs.fill(leave=0)
    before = bus.look()
    for session in bus.both("a"):
        answer = bus.send(session)
        text = "this box cannot take the inbox lock itself, and no daemon is reachable to file it"
        assert answer == (1, "", failed(text))
        assert bus.changed(before) == set()
    full_tmpfs.free()
    bus.recovers()
    assert (bus.disk / "inbox-lock-manager").read_text() == f"local {MACHINE}\n{MACHINE}\n"


# The folder is read-only


@pytest.fixture
def remount(small_tmpfs: Path) -> Callable[[str], None]:
    """Remount the small tmpfs "ro" or "rw": for root, permissions would change nothing."""
    mount = require_tool("mount", "mount")

    def to(option: str) -> None:
        subprocess.run([mount, "-o", f"remount,{option}", str(small_tmpfs)], check=True, capture_output=True)

    return to


@pytest.mark.spec("S23", "S57", "S95")
def test_commands_that_write_say_failed_in_a_read_only_folder_and_are_good_again_after_it(
    small_tmpfs: Path, remount: Callable[[str], None], tmp_path: Path
) -> None:
    bus = Bus(tmp_path, small_tmpfs / "comm")
    before = bus.look()
    remount("ro")
    no_lock = f"FAILED: registry lock {bus.lock} cannot be taken: {EROFS}\n"
    for session in bus.both("a"):
        assert bus.send(session) == (1, "", failed(f"the append failed: {EROFS}"))
        assert session("join") == (1, "", no_lock)
        assert session("leave") == (1, "", no_lock)
    answer = bus.command["a"]("send", "--broadcast", "to all")
    assert answer == (1, "Broadcast to 0 of 1 agent(s).\n", failed(f"the append failed: {EROFS}"))
    remount("rw")
    assert bus.changed(before) == set()
    bus.recovers()


@pytest.mark.spec("S72", "S73")
def test_a_poll_of_a_read_only_folder_shows_the_mail_and_says_what_it_could_not_do(
    small_tmpfs: Path, remount: Callable[[str], None], tmp_path: Path
) -> None:
    bus = Bus(tmp_path, small_tmpfs / "comm")
    before = bus.look()
    remount("ro")
    for session in bus.both("b"):
        answer = session("poll")
        assert answer.out.startswith(
            f"WARNING: the inbox lock for @b-vm failed (30: {EROFS}) — reading without it; "
            "a line may show twice, none is lost\n"
        )
        assert (answer.status, answer.texts, answer.err) == (1, [FIRST], cursor_not_written(EROFS))
    remount("rw")
    assert bus.changed(before) == set()
    assert bus.api["b"]("poll").texts == [FIRST]
    bus.recovers()


def test_commands_that_read_still_answer_in_a_read_only_folder(
    small_tmpfs: Path, remount: Callable[[str], None], tmp_path: Path
) -> None:
    bus = Bus(tmp_path, small_tmpfs / "comm")
    remount("ro")
    session = bus.command["b"]
    answer = session("unread")
    assert (answer.status, answer.out) == (0, "1 1\n")
    assert answer.err.startswith(f"WARNING: the inbox lock for @b-vm failed (30: {EROFS})")
    answer = session("list")
    assert (answer.status, answer.err) == (0, "")
    listed = re.findall(r"^  (@\S+) .* live .*?(<- me)?$", answer.out, re.MULTILINE)
    assert sorted(listed) == [
        ("@a-vm", ""),
        ("@b-vm", "<- me"),
    ]
    answer = session("whoami", "--json")
    assert answer.status == 0
    facts = json.loads(answer.out)
    assert (facts["handle"], facts["live"], facts["unread"]) == ("b-vm", True, 1)


@pytest.mark.spec("S23")
def test_a_comm_folder_that_cannot_be_made_is_named_by_every_command(
    small_tmpfs: Path, remount: Callable[[str], None], tmp_path: Path
) -> None:
    world = World(tmp_path, home=small_tmpfs / "comm")
    remount("ro")
    text = f"FAILED: the comm folder {world.home} cannot be made ({EROFS}); nothing was written\n"
    for session in (ThroughApi(world, "a"), ThroughCommand(world, "a")):
        assert session("join") == (1, "", text)
    answer = ThroughCommand(world, "a")("send", "@b-vm", "text")
    assert answer == (1, "", failed(text.removeprefix("FAILED: ").rstrip("\n")))
    assert list(small_tmpfs.iterdir()) == []


# The disk fails


@pytest.fixture(scope="module")
def shared_faultfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MountedFaultFS]:
    """One mount for the tests below, each of which has a comm folder of its own on it: a mount takes a while."""
    needs = "needs /dev/fuse, fuse3 and mfusepy"
    require_tool("/dev/fuse", "the fuse module of the kernel", needs)
    require_tool("fusermount3", "fuse3", needs)
    require_module("mfusepy", "mfusepy", needs)
    mounted = MountedFaultFS(tmp_path_factory.mktemp("disk") / "faultfs")
    try:
        mounted.wait_until_mounted()
        yield mounted
    finally:
        mounted.close()


class FaultyBus(Bus):
    """A bus whose folder lies on a file system that fails on request."""

    def __init__(self, base: Path, faultfs: MountedFaultFS, name: str) -> None:
        super().__init__(base, faultfs.mount / name, faultfs.backing / name)
        self.faultfs = faultfs

    def inject(self, *faults: dict[str, object]) -> None:
        """These faults and no others, from now on."""
        self.faultfs.clear()
        self._ids = self.faultfs.inject(*faults)

    def cleared(self) -> None:
        """No faults from now on; each of the last ones has met somebody."""
        self.faultfs.clear()
        assert all(self.faultfs.fired(fault) for fault in self._ids), "a fault met nobody"


_folders = itertools.count(1)


@pytest.fixture
def bus(shared_faultfs: MountedFaultFS, tmp_path: Path) -> Iterator[FaultyBus]:
    yield FaultyBus(tmp_path, shared_faultfs, f"comm-{next(_folders)}")
    shared_faultfs.clear()


def always(op: str, path: str, errno: str = "EIO") -> dict[str, object]:
    return {"op": op, "path": path, "errno": errno}


# The append


@pytest.mark.spec("S57", "S94", "S95")
@pytest.mark.parametrize(
    ("why", "faults"),
    [
        (EIO, [always("write", INBOX)]),
        (ENOSPC, [{"op": "write", "path": INBOX, "short": 20, "times": 1}, always("write", INBOX, "ENOSPC")]),
        (EIO, [always("fsync", INBOX)]),
        (EIO, [{"op": "write", "path": INBOX, "errno": "EIO", "applied": True}]),
        (EIO, [{"op": "fsync", "path": INBOX, "errno": "EIO", "applied": True}]),
        ("Disk quota exceeded", [always("write", INBOX, "EDQUOT")]),
        (EIO, [always("open", INBOX)]),
        (ESTALE, [always("open", INBOX, "ESTALE")]),
        (EIO, [always("read", INBOX)]),
        ("the inbox became shorter while its lock was held", [{"op": "read", "path": INBOX, "short": 0}]),
        (EIO, [always("open", INBOX_LOCK)]),
        (ESTALE, [always("open", INBOX_LOCK, "ESTALE")]),
    ],
    ids=[
        "write",
        "short-write-then-full",
        "fsync",
        "write-applied",
        "fsync-applied",
        "quota",
        "open",
        "stale-open",
        "read",
        "no-bytes-read",
        "lock",
        "stale-lock",
    ],
)
def test_an_append_that_fails_is_failed_and_the_inbox_is_byte_for_byte_what_it_was(
    bus: FaultyBus, why: str, faults: Faults
) -> None:
    before = bus.look()
    for session in bus.both("a"):
        bus.inject(*faults)
        assert bus.send(session) == (1, "", failed(f"the append failed: {why}"))
        bus.cleared()
        assert bus.changed(before) <= {"registry.json"}
    bus.recovers()


@pytest.mark.spec("S57")
def test_a_first_line_whose_folder_cannot_be_synced_is_cut_back(bus: FaultyBus) -> None:
    bus.inbox.write_bytes(b"")
    bus.filed.clear()
    for session in bus.both("a"):
        bus.inject(always("fsync", "*/inbox"))
        assert bus.send(session) == (1, "", failed(f"the append failed: {EIO}"))
        bus.cleared()
        assert bus.inbox.read_bytes() == b""
    bus.recovers()


@pytest.mark.spec("S57", "S95")
def test_an_append_that_cannot_be_cut_back_says_that_its_outcome_is_unknown_and_harms_nothing_else(
    bus: FaultyBus,
) -> None:
    before = bus.look()
    good = bus.inbox.read_bytes()
    for session in bus.both("a"):
        bus.inject(always("fsync", INBOX), always("truncate", INBOX))
        answer = bus.send(session)
        text = f"the append failed: {EIO}; cutting it back failed too ({EIO}), so the outcome is unknown"
        assert answer == (1, "", failed(text))
        bus.cleared()
        assert bus.changed(before) <= {"registry.json", "inbox/b-vm.jsonl"}
        assert bus.inbox.read_bytes().startswith(good)
        bus.check()
    assert len(bus.unknown) == 2
    bus.recovers()


@pytest.mark.spec("S57")
def test_half_a_line_that_could_not_be_cut_back_is_cut_by_the_next_send(bus: FaultyBus) -> None:
    half = {"op": "write", "path": INBOX, "short": 20, "times": 1}
    for session in bus.both("a"):
        whole = bus.inbox.read_bytes()
        bus.inject(half, always("write", INBOX), always("truncate", INBOX))
        assert "outcome is unknown" in bus.send(session).err
        bus.cleared()
        assert bus.inbox.read_bytes().startswith(whole)
        assert len(bus.inbox.read_bytes()) == len(whole) + 20
        note = "note: cut 20 bytes of an unterminated line a dead writer left in @b-vm's inbox\n"
        assert bus.send(session) == (0, "  filed -> @b-vm\n", note)
        assert bus.inbox.read_bytes().startswith(whole)
        bus.check()
    bus.recovers()


@pytest.mark.spec("S56", "S57")
def test_scenario_1_a_torn_tail_stays_while_it_cannot_be_cut_and_is_cut_and_told_of_once_when_it_can(
    bus: FaultyBus,
) -> None:
    whole, half = bus.inbox.read_bytes(), b'{"id":"x","msg":"ab'
    bus.inbox.write_bytes(whole + half)
    bus.inject(always("truncate", INBOX))
    for session in bus.both("a"):
        assert bus.send(session) == (1, "", failed(f"the append failed: {EIO}"))
        assert bus.inbox.read_bytes() == whole + half
    bus.cleared()
    note = f"note: cut {len(half)} bytes of an unterminated line a dead writer left in @b-vm's inbox\n"
    assert bus.send(bus.api["a"]) == (0, "  filed -> @b-vm\n", note)
    assert bus.inbox.read_bytes().startswith(whole)
    assert bus.inbox.read_bytes().count(b"\n") == 2
    bus.recovers()


@pytest.mark.spec("S57", "S95")
@pytest.mark.parametrize("path", [INBOX, INBOX_LOCK], ids=["inbox", "lock"])
def test_a_close_that_fails_after_the_sync_is_answered_by_what_is_on_disk(bus: FaultyBus, path: str) -> None:
    for session in bus.both("a"):
        bus.inject(always("flush", path))
        answer = bus.send(session)
        bus.cleared()
        assert answer.status == 0 or answer.err.startswith("FAILED -> @b-vm: ")
        bus.check()
    bus.recovers()


@pytest.mark.spec("S73")
def test_a_poll_shows_the_mail_although_the_close_of_the_lock_fails(bus: FaultyBus) -> None:
    for session in bus.both("b"):
        bus.inject(always("flush", INBOX_LOCK))
        answer = session("poll")
        bus.cleared()
        assert (answer.status, answer.texts) == (0, bus.filed[-1:])
        assert bus.send(bus.api["a"]).status == 0


@pytest.mark.spec("S57")
def test_writes_that_go_in_a_few_bytes_at_a_time_make_a_whole_line(bus: FaultyBus) -> None:
    for session in bus.both("a"):
        bus.inject({"op": "write", "path": INBOX, "short": 11})
        assert bus.send(session, TWELVE_KB[:300]).status == 0
        bus.cleared()
    bus.recovers()


@pytest.mark.spec("S73", "S95")
def test_a_lock_manager_that_fails_makes_an_append_failed_and_a_poll_warn(
    faultfs_factory: Callable[..., MountedFaultFS], tmp_path: Path
) -> None:
    bus = FaultyBus(tmp_path, faultfs_factory("--forward-flock"), "comm")
    before = bus.look()
    bus.inject(always("flock", INBOX_LOCK, "ENOLCK"))
    why = "No locks available"
    for session in bus.both("a"):
        assert bus.send(session) == (1, "", failed(f"the append failed: {why}"))
        assert bus.changed(before) <= {"registry.json"}
    answer = bus.command["b"]("poll")
    assert answer.out.startswith(f"WARNING: the inbox lock for @b-vm failed (37: {why}) — reading without it;")
    assert (answer.status, answer.texts, answer.err) == (0, [FIRST], "")
    bus.cleared()
    bus.recovers()


@pytest.mark.spec("S63")
@pytest.mark.parametrize(
    "fault", [always("read", "*/inbox-lock-manager"), always("opendir", "/comm-*[0-9]")], ids=["record", "folder"]
)
def test_a_lock_manager_record_that_cannot_be_read_is_not_taken_for_absent(
    bus: FaultyBus, fault: dict[str, object]
) -> None:
    before = bus.look()
    bus.inject(fault)
    text = "this box cannot take the inbox lock itself, and no daemon is reachable to file it"
    for session in bus.both("a"):
        assert bus.send(session) == (1, "", failed(text))
        assert bus.changed(before) <= {"registry.json"}
    bus.cleared()
    bus.recovers()


# Reading the registry

TRANSIENT = {
    "stale-open": [{"op": "open", "path": REGISTRY, "errno": "ESTALE", "times": 2}],  # the kernel tries again itself
    "read": [{"op": "read", "path": REGISTRY, "errno": "EIO", "times": 1}],
    "no-bytes": [{"op": "read", "path": REGISTRY, "short": 0, "times": 1}],
    "read-after-some-bytes": [
        {"op": "read", "path": REGISTRY, "short": 30, "times": 1},
        {"op": "read", "path": REGISTRY, "errno": "EIO", "times": 1},
    ],
    "gone-at-a-later-try": [
        {"op": "read", "path": REGISTRY, "errno": "EIO", "times": 1},
        {"op": "open", "path": REGISTRY, "errno": "ENOENT", "after": 1, "times": 1},
    ],
    "three-times": [{"op": "read", "path": REGISTRY, "errno": "EIO", "times": 3}],
}

LASTING = {
    "stale-open": [always("open", REGISTRY, "ESTALE")],
    "open": [always("open", REGISTRY)],
    "read": [always("read", REGISTRY)],
    "no-bytes": [{"op": "read", "path": REGISTRY, "short": 0}],
}


@pytest.mark.spec("S25")
@pytest.mark.parametrize("faults", TRANSIENT.values(), ids=TRANSIENT)
def test_scenario_8_a_registry_read_that_fails_and_is_then_good_is_good(bus: FaultyBus, faults: Faults) -> None:
    for session in bus.both("a"):
        bus.inject(*faults)
        assert bus.send(session) == (0, "  filed -> @b-vm\n", "")
        bus.cleared()
    bus.check()


UNVERIFIED = "the registry could not be read, so identity @a-vm is unverified; nothing was sent"


@pytest.mark.spec("S25", "S26")
@pytest.mark.parametrize("faults", LASTING.values(), ids=LASTING)
def test_scenario_8_a_registry_that_stays_unreadable_is_never_absent_and_nothing_is_written(
    bus: FaultyBus, faults: Faults
) -> None:
    before = bus.look()
    bus.inject(*faults)
    for session in bus.both("a"):
        assert bus.send(session) == (1, "", failed(UNVERIFIED))
    assert bus.changed(before) == set()
    bus.cleared()
    bus.recovers()


@pytest.mark.spec("S23", "S26")
def test_every_command_says_failed_of_a_registry_that_stays_unreadable_and_nothing_is_written(bus: FaultyBus) -> None:
    before = bus.look()
    bus.inject(always("open", REGISTRY, "ESTALE"))
    no_handle = "FAILED: the registry could not be read, so no handle was derived; nothing was written\n"
    no_leave = "FAILED: the registry could not be read; nothing was removed\n"
    for session in bus.both("a"):
        assert session("join") == (1, "", no_handle)
        assert session("leave") == (1, "", no_leave)
    no_update = "FAILED: the registry could not be read or updated, so nothing was written\n"
    assert bus.api["a"]("join", "--name", "new") == (1, "", no_update)
    assert bus.api["a"]("send", "@nobody", "text") == (1, "", f"FAILED -> @nobody: {UNVERIFIED}\n")
    command = bus.command["a"]
    nothing = "FAILED -> --broadcast: the registry could not be read; nothing was sent\n"
    assert command("send", "--broadcast", "text") == (1, "", nothing)
    assert command("list") == (1, "", "FAILED: the registry could not be read; nothing was listed\n")
    assert bus.changed(before) == set()
    bus.cleared()
    bus.recovers()


@pytest.mark.spec("S25")
@pytest.mark.parametrize("faults", LASTING.values(), ids=LASTING)
def test_scenario_8_the_tries_of_an_unreadable_registry_end_after_pauses_of_200_ms(
    bus: FaultyBus, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus.inject(*faults)
    pauses: list[float] = []
    sleep, own = time.sleep, threading.get_ident()

    def noted(for_s: float) -> None:
        if threading.get_ident() == own:
            pauses.append(for_s)
        sleep(for_s)

    monkeypatch.setattr(time, "sleep", noted)
    took: list[float] = []
    while len(took) < 5 and not (took and min(took) < 2):  # a machine that is busy makes it longer, never shorter
        pauses.clear()
        start = time.monotonic()
        with pytest.raises(RegistryUnreadable):
            bus.api["a"].client.registry.agents()
        took.append(time.monotonic() - start)
        assert sum(pauses) == pytest.approx(0.2)
    assert 0.2 <= min(took) < 2
    bus.cleared()


@pytest.mark.spec("S26", "S72")
def test_an_unreadable_registry_keeps_nobody_from_reading_mail(bus: FaultyBus) -> None:
    bus.inject(always("open", REGISTRY, "ESTALE"))
    assert bus.command["b"]("unread") == (0, "1 1\n", "")
    answer = bus.command["b"]("whoami")
    assert answer.status == 0
    assert "note: " in answer.err
    assert "cannot be read" in answer.err
    answer = bus.command["b"]("poll")
    assert (answer.status, answer.texts, answer.err) == (0, [FIRST], "")
    bus.cleared()
    bus.recovers()


# Writing the registry


def not_taken(why: str) -> str:
    return f"FAILED: registry lock {{lock}} cannot be taken: {why}\n"


def not_linked(why: str) -> str:
    return not_taken(f"cannot hard-link in {{home}}: {why}")


def not_updated(step: str, why: str) -> str:
    return f"FAILED: the registry update could not be {step} ({why}), so nothing was written\n"


WRITE_FAULTS: dict[str, tuple[str, dict[str, object]]] = {
    "rename": (not_updated("renamed into place", EIO), always("rename", REGISTRY)),
    "stale-rename": (not_updated("renamed into place", ESTALE), always("rename", REGISTRY, "ESTALE")),
    "create": (not_updated("flushed", EIO), always("create", REGISTRY_TMP)),
    "write": (not_updated("flushed", ENOSPC), always("write", REGISTRY_TMP, "ENOSPC")),
    "fsync": (not_updated("flushed", EIO), always("fsync", REGISTRY_TMP)),
    "close": (not_updated("flushed", EIO), always("flush", REGISTRY_TMP)),
    "folder": (
        "FAILED: the registry could not be read or updated, so nothing was written\n",
        always("opendir", "/comm-*[0-9]"),
    ),
    "lock-link": (not_linked(EIO), always("link", LOCK)),
    "stale-lock-link": (not_linked(ESTALE), always("link", LOCK, "ESTALE")),
    "no-hard-links": (not_linked("Operation not permitted"), always("link", LOCK, "EPERM")),
    "lock-create": (not_taken(EIO), always("create", LOCK_TMP)),
    "lock-write": (not_taken(ENOSPC), always("write", LOCK_TMP, "ENOSPC")),
}


@pytest.mark.spec("S22", "S23", "S35")
@pytest.mark.parametrize(("text", "fault"), WRITE_FAULTS.values(), ids=WRITE_FAULTS)
def test_a_registry_write_that_fails_at_any_step_is_failed_and_bytes_and_inode_stay(
    bus: FaultyBus, text: str, fault: dict[str, object]
) -> None:
    before = bus.look()
    words = text.format(lock=bus.lock, home=bus.world.home)
    bus.inject(fault)
    for session, command in ((bus.api["a"], "join"), (bus.api["a"], "leave"), (bus.command["a"], "join")):
        assert session(command) == (1, "", words)
        assert bus.changed(before) == set()
    bus.cleared()
    bus.recovers()


@pytest.mark.spec("S22", "S23")
def test_a_rename_that_was_made_although_its_answer_says_otherwise_is_not_told_as_nothing_written(
    bus: FaultyBus,
) -> None:
    for session, name in zip(bus.both("a"), ("one", "two"), strict=True):
        bus.inject({"op": "rename", "path": REGISTRY, "errno": "EIO", "applied": True, "times": 1})
        answer = session("join", "--name", name)
        bus.cleared()
        assert name in json.loads((bus.disk / "registry.json").read_bytes())["agents"]
        assert "nothing was written" not in answer.err


@pytest.mark.spec("S45", "S95")
@pytest.mark.parametrize(
    "fault",
    [always("rename", REGISTRY), always("fsync", REGISTRY_TMP), always("link", LOCK)],
    ids=["rename", "fsync", "link"],
)
def test_a_send_whose_last_seen_cannot_be_written_is_filed_in_silence(bus: FaultyBus, fault: dict[str, object]) -> None:
    registry = bus.look()["registry.json"]
    document = json.loads(registry[0])
    document["agents"]["a-vm"]["last_seen"] = "2026-01-01T00:00:00Z"  # so that there is something to write
    (bus.disk / "registry.json").write_text(json.dumps(document))
    registry = bus.look()["registry.json"]
    bus.inject(fault)
    for session in bus.both("a"):
        assert bus.send(session) == (0, "  filed -> @b-vm\n", "")
        assert bus.look()["registry.json"] == registry
    bus.cleared()
    bus.recovers()


@pytest.mark.spec("S35", "S36", "S37")
@pytest.mark.parametrize("errno", ["EEXIST", "EIO", "ESTALE"])
def test_a_link_that_was_made_although_its_answer_says_otherwise_is_believed(bus: FaultyBus, errno: str) -> None:
    for session, name in zip(bus.both("a"), ("one", "two"), strict=True):
        bus.inject({"op": "link", "path": LOCK, "errno": errno, "applied": True, "times": 1})
        answer = session("join", "--name", name)
        assert (answer.status, answer.err) == (0, "")
        bus.cleared()
        assert name in json.loads((bus.disk / "registry.json").read_bytes())["agents"]
        assert not bus.lock.exists()
    assert not [name for name in bus.look() if name.startswith(".") or ".tmp" in name], "something is left behind"
    assert bus.api["a"]("join", "--name", "a-vm").status == 0
    bus.check()


@pytest.mark.spec("S24")
def test_a_new_folder_is_laid_although_the_answers_to_its_links_are_lost(
    shared_faultfs: MountedFaultFS, tmp_path: Path
) -> None:
    home = f"comm-{next(_folders)}"
    world = World(tmp_path, home=shared_faultfs.mount / home)
    a, b = ThroughApi(world, "a"), ThroughCommand(world, "b")
    shared_faultfs.inject({"op": "link", "errno": "EIO", "applied": True})
    try:
        assert a("join") == (0, "a-vm\n", "")
        assert b("join").status == 0
        assert a("send", "@b-vm", "text") == (0, "  filed -> @b-vm\n", "")
        assert b("send", "@a-vm", "text") == (0, "  filed -> @a-vm\n", "")
    finally:
        shared_faultfs.clear()
    left = {path.name for path in (shared_faultfs.backing / home).iterdir()}
    assert left == {"inbox", "inbox-lock-manager", "read", "registry.json", "self"}


def names_of(lock: Path) -> str:
    """The pid that a registry lock names."""
    return lock.read_text().split(":")[4]


@pytest.mark.spec("S37")
def test_a_lock_that_a_process_could_not_remove_is_recovered_by_its_next_command(bus: FaultyBus) -> None:
    bus.inject({"op": "unlink", "path": LOCK, "errno": "EIO", "times": 1})
    assert bus.api["a"]("join") == (0, "a-vm\n", "")
    bus.cleared()
    assert names_of(bus.disk / ".registry.lock") == str(os.getpid())
    blocked = bus.command["b"]("join", SOT_LOCK_WAIT_SECS="0")
    assert blocked.status == 1
    assert f"is held by vm pid {os.getpid()} start " in blocked.err
    assert bus.api["a"]("join") == (0, "a-vm\n", "")
    assert not (bus.disk / ".registry.lock").exists()
    assert bus.command["b"]("join", SOT_LOCK_WAIT_SECS="0").status == 0
    bus.check()


@pytest.mark.spec("S37", "S38", "S40")
def test_a_lock_that_a_dead_process_could_not_remove_is_recovered_by_the_next_process(bus: FaultyBus) -> None:
    for nexts in (bus.api["b"], bus.command["b"]):
        bus.inject({"op": "unlink", "path": LOCK, "errno": "EIO", "times": 1})
        assert bus.command["a"]("join").status == 0
        bus.cleared()
        assert (bus.disk / ".registry.lock").exists()
        assert nexts("join").status == 0
        assert not (bus.disk / ".registry.lock").exists()
    bus.check()


@pytest.mark.spec("S35", "S37")
@pytest.mark.parametrize("op", ["unlink", "flush"])
def test_a_take_whose_temp_file_cannot_be_tidied_away_leaves_no_lock_behind(bus: FaultyBus, op: str) -> None:
    for session in bus.both("a"):
        bus.inject({"op": op, "path": LOCK_TMP, "errno": "EIO", "times": 1})
        answer = session("join")
        bus.cleared()
        assert answer.status == 0 or answer.err.startswith(f"FAILED: registry lock {bus.lock} cannot be taken: ")
        assert not (bus.disk / ".registry.lock").exists()
    assert bus.command["b"]("join", SOT_LOCK_WAIT_SECS="0").status == 0
    bus.check()


@pytest.mark.parametrize("step", ["self/pin-a.txt", "inbox/a-vm.jsonl"])
def test_a_join_that_fails_after_its_entry_was_written_says_so_and_is_mended_by_another(
    bus: FaultyBus, step: str
) -> None:
    (bus.disk / "inbox" / "a-vm.jsonl").unlink()
    own = bus.look()["self/pin-a.txt"]
    for session in bus.both("a"):
        bus.inject(always("create", f"*/{step}*"))
        text = (
            f"FAILED: @a-vm is in the registry, but {bus.world.home / step} could not be written ({EIO}); "
            "join again when that is mended\n"
        )
        assert session("join") == (1, "", text)
        bus.cleared()
        if step.startswith("self"):
            assert bus.look()["self/pin-a.txt"] == own
    bus.api["a"]("join")
    bus.recovers()


def test_a_self_file_that_cannot_be_read_is_not_taken_for_absent(bus: FaultyBus) -> None:
    before = bus.look()
    bus.inject(always("read", "*/self/pin-a.txt"))
    assert bus.command["a"]("leave").status == 1, "the session is joined, and was told that there is nothing to do"
    assert bus.api["a"]("leave").status == 1
    bus.cleared()
    assert bus.changed(before) == set()
    bus.recovers()


# Reading mail


@pytest.mark.spec("S72")
@pytest.mark.parametrize(
    ("op", "errno", "why"),
    [("read", "EIO", EIO), ("open", "EIO", EIO), ("open", "ESTALE", ESTALE)],
)
def test_mail_that_cannot_be_read_is_an_error_and_is_there_when_it_can(
    bus: FaultyBus, op: str, errno: str, why: str
) -> None:
    assert bus.api["b"]("poll").texts == [FIRST]
    assert bus.send(bus.api["a"]).status == 0
    before = bus.look()
    bus.inject(always(op, INBOX, errno))
    for session in bus.both("b"):
        assert session("poll") == (1, "", f"the inbox of @b-vm cannot be read: {why}\n")
    answer = bus.command["b"]("unread")
    assert answer == (1, "", f"the inbox of @b-vm cannot be read: {why}\n")
    bus.cleared()
    assert bus.changed(before) <= {"registry.json"}
    assert bus.api["b"]("poll").texts == bus.filed[1:]
    bus.recovers()


def test_an_inbox_of_which_cannot_be_told_whether_it_is_there_is_not_called_empty(bus: FaultyBus) -> None:
    before = bus.look()
    bus.inject(always("getattr", INBOX))
    for session in bus.both("b"):
        answer = session("poll")
        assert (answer.status, answer.out) == (1, "")
        assert EIO in answer.err
        assert bus.changed(before) == set()
    bus.cleared()
    assert bus.api["b"]("poll").texts == [FIRST]
    bus.recovers()


@pytest.mark.spec("S73")
def test_a_poll_whose_lock_cannot_be_opened_warns_in_the_pages_words_and_shows_the_mail(bus: FaultyBus) -> None:
    warning = (
        f"WARNING: the inbox lock for @b-vm failed (5: {EIO}) — reading without it; "
        "a line may show twice, none is lost\n"
    )
    for session in bus.both("b"):
        bus.inject(always("open", INBOX_LOCK))
        answer = session("poll")
        bus.cleared()
        assert answer.out.startswith(warning)
        assert (answer.status, answer.texts, answer.err) == (0, bus.filed[-1:], "")
        assert session("poll").texts == []
        assert bus.send(bus.api["a"]).status == 0
    bus.recovers()


@pytest.mark.spec("S72")
@pytest.mark.parametrize("op", ["create", "write", "flush", "rename"])
def test_a_cursor_that_cannot_be_written_stays_and_the_mail_shows_again(bus: FaultyBus, op: str) -> None:
    assert bus.api["b"]("poll").texts == [FIRST]
    assert bus.send(bus.api["a"]).status == 0
    before = bus.look()
    bus.inject(always(op, CURSOR_TMP))
    for session in bus.both("b"):
        answer = session("poll")
        assert (answer.status, answer.texts, answer.err) == (1, bus.filed[1:], cursor_not_written(EIO))
        assert bus.changed(before) == set()
    bus.cleared()
    assert bus.api["b"]("poll").texts == bus.filed[1:]
    bus.recovers()


@pytest.mark.spec("S72")
def test_a_cursor_that_cannot_be_read_shows_mail_twice_and_loses_none(bus: FaultyBus) -> None:
    assert bus.api["b"]("poll").texts == [FIRST]
    for session in bus.both("b"):
        bus.inject(always("read", CURSOR))
        answer = session("poll")
        bus.cleared()
        assert (answer.status, answer.texts, answer.err) == (0, bus.filed, "")
        assert session("poll").texts == []
        assert bus.send(bus.api["a"]).status == 0
    bus.recovers()


@pytest.mark.spec("S55", "S72")
@pytest.mark.parametrize("short", [1, 40])
def test_an_inbox_that_is_read_in_pieces_is_read_whole(bus: FaultyBus, short: int) -> None:
    assert bus.api["b"]("poll").texts == [FIRST]
    for body in ("one", "two"):
        assert bus.send(bus.api["a"], body).status == 0
    cursor = bus.look()["read/b-vm.cursor"]
    bus.inject({"op": "read", "path": INBOX, "short": short})
    for session in bus.both("b"):
        answer = session("poll")
        assert (answer.status, answer.texts, answer.err) == (0, bus.filed[1:], "")
        (bus.disk / "read" / "b-vm.cursor").write_bytes(cursor[0])
    bus.cleared()
    bus.recovers()


@pytest.mark.spec("S72")
@pytest.mark.parametrize("polled", [False, True], ids=["first", "later"])
def test_an_inbox_that_reads_as_empty_for_once_moves_no_cursor(bus: FaultyBus, polled: bool) -> None:
    if polled:
        assert bus.api["b"]("poll").texts == [FIRST]
        assert bus.send(bus.api["a"]).status == 0
    before = bus.look()
    bus.inject({"op": "read", "path": INBOX, "short": 0})
    for session in bus.both("b"):
        assert session("poll").texts == []
        assert bus.changed(before) <= {"registry.json"}
    bus.cleared()
    assert bus.api["b"]("poll").texts == bus.filed[-1:]
    bus.recovers()
