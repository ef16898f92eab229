"""A prune that is killed between any two of its system calls, or whose disk is full or fails: no mail is lost by it."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tools
from faults.faultfs import MountedFaultFS
from faults.killpoints import KillPoint, kill_at_each_call
from world import MACHINE, World

from sotbus import message
from sotbus.comm import cursor, offset_hint, pruning, reading
from sotbus.comm.client import Client
from sotbus.comm.inbox import Inbox, Look
from sotbus.comm.lock_manager import FlockManager
from sotbus.comm.writer_gate import WriterGate
from sotbus.errors import FolderError

pytestmark = pytest.mark.faults

importlib.import_module("datetime")  # which a prune imports when it runs: no kill is to fall into an import

NOW = 1_800_000_000.0
LOCAL = f"local {MACHINE}"
FOREIGN = Path(__file__).parents[1] / "interop" / "foreign_comm.sh"
FOREIGN_TOOLS = {"bash": "bash", "jq": "jq", "flock": "util-linux", "cksum": "coreutils"}

KNOWN_NAMES = re.compile(
    r"registry\.json|inbox-lock-manager|inbox/a-vm\.(jsonl(\.prune\.\d+\.\d+(\.old)?)?|lock)|read/a-vm\.cursor"
    r"|state/sotbus-offset-a-vm"
)


def line(text: str, age_s: float = 2 * 86_400) -> bytes:
    return message.encode("z-vm", "a-vm", "z", text, message.stamp(NOW - age_s))


SHOWN = [line("goes"), line("stays for a day", 60), b"\n", line("goes too"), line("the last that was shown")]
UNREAD = [line("new"), line("newer", 1)]
TORN = b'{"from":"z-vm","to":"a-vm","msg":"to'
BEFORE = b"".join([*SHOWN, *UNREAD]) + TORN
AFTER = b"\n" + SHOWN[1] + b"\n\n" + SHOWN[4] + b"".join(UNREAD) + TORN
CURSOR = cursor.written_form(len(SHOWN), SHOWN[-1][:-1])


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    memory = "/dev/shm"
    if not os.access(memory, os.W_OK):
        yield World(tmp_path)
        return
    with tempfile.TemporaryDirectory(prefix="sotbus-kill-", dir=memory) as base:
        yield World(Path(base))


def lay(world: World, client: Client, data: bytes = BEFORE, text: bytes = CURSOR) -> None:
    """A comm folder with this inbox and cursor, and with the hint that a poll of a large inbox leaves."""
    shutil.rmtree(world.home, ignore_errors=True)
    client.ensure()
    files = {world.inbox("a-vm"): data, Path(world.folder.cursor("a-vm")): text}
    files[Path(world.folder.manager_record)] = f"{LOCAL}\n{MACHINE}\n".encode()
    for path, content in files.items():
        path.write_bytes(content)
        path.chmod(0o600)
    last = SHOWN[-1][:-1]
    end = len(b"".join(SHOWN))
    inode = world.inbox("a-vm").stat().st_ino
    hint = offset_hint.Hint(inode, len(SHOWN), end - len(last) - 1, end, cursor.cksum(last))
    offset_hint.write(world.folder, "a-vm", hint)


def texts(lines: list[bytes]) -> list[str]:
    values = (message.parse(one) for one in lines)
    return [value["msg"] for value in values if value is not None]


def poll(client: Client) -> list[str]:
    seen = reading.look_at(client, "a-vm", lambda text: pytest.fail(text))
    reading.advance(client, "a-vm", seen)
    return texts(seen.lines)


def foreign_poll(world: World, home: Path) -> str:
    """What another program's poll of a copy of the comm folder shows."""
    for name, package in FOREIGN_TOOLS.items():
        tools.require_tool(name, package)
    told = {"SOT_COMM_HOME": str(home), "FOREIGN_MOUNTINFO": str(world.mountinfo), "FOREIGN_MACHINE_ID": MACHINE}
    done = subprocess.run(
        [str(FOREIGN), "poll", "a-vm"],
        env=world.environ(told),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode()


def check_what_lies_about(world: World) -> None:
    """Nothing is open to others, and no name is there that another client of the folder could take for data."""
    for folder, _, names in os.walk(world.home):
        assert os.stat(folder).st_mode & 0o077 == 0, folder
        for name in names:
            path = Path(folder, name)
            assert path.stat().st_mode & 0o077 == 0, path
            assert KNOWN_NAMES.fullmatch(str(path.relative_to(world.home))), path


def left_over(world: World) -> list[str]:
    return [path.name for path in world.inbox("a-vm").parent.iterdir() if ".prune." in path.name]


@pytest.mark.parametrize(
    "in_flight", [pytest.param(False, id="prune"), pytest.param(True, id="prune, with a poll in flight")]
)
def test_a_prune_that_is_killed_loses_and_repeats_nothing(
    world: World, request: pytest.FixtureRequest, in_flight: bool
) -> None:
    client = world.client("a", now=NOW)
    inbox = world.inbox("a-vm")
    flying: list[Look] = []
    states: set[bytes] = set()
    swept: set[int] = set()

    def prepare() -> None:
        lay(world, client)
        # A new gate each time, so that each run makes the same calls.
        client.writer_gate = WriterGate(world.folder, client.box, client.topology)
        flying[:] = [reading.look_at(client, "a-vm", lambda text: pytest.fail(text))]

    def operation() -> str:
        return str(pruning.prune(client, "a-vm").done)

    def check(point: KillPoint) -> None:
        found = inbox.read_bytes()
        assert found in (BEFORE, AFTER)
        assert point.answered in (None, "True")
        assert point.answered is None or found == AFTER
        assert Path(world.folder.cursor("a-vm")).read_bytes() == CURSOR
        check_what_lies_about(world)
        if found not in states:
            states.add(found)
            copy = world.base / f"copy-{len(states)}"
            shutil.copytree(world.home, copy)
            shown = foreign_poll(world, copy).splitlines()
            assert [one.split("] ", 2)[2] for one in shown] == texts(UNREAD)
            assert foreign_poll(world, copy) == "No new messages.\n"
        if in_flight:
            assert texts(flying[0].lines) == texts(UNREAD)
            reading.advance(client, "a-vm", flying[0])
        else:
            assert poll(client) == texts(UNREAD)
        assert poll(client) == []
        Inbox(world.folder, "a-vm", FlockManager(LOCAL)).append(line("later"), 5)
        swept.add(len(left_over(world)))
        again = pruning.prune(client, "a-vm")
        assert again.done
        assert left_over(world) == []
        assert poll(client) == ["later"]
        kept = b"\n" + SHOWN[1] + b"\n" * 4 + UNREAD[1]
        assert inbox.read_bytes() == kept + line("later")
        assert Path(world.folder.inbox_lock("a-vm")).exists()
        check_what_lies_about(world)

    points = kill_at_each_call(operation, prepare=prepare, check=check)
    print(f"\n{request.node.callspec.id:<56} | {len(points) - 1:>11} | {len(points) - 1:>8}", end=" ")
    made = [point.call.removesuffix("at") for point in points]
    rest = iter(made)
    calls = ["flock", "open", "flock", "write", "fsync", "flock", "write", "fsync", "link", "rename", "fsync", "unlink"]
    assert all(call in rest for call in [*calls, "answer"]), made
    assert states == {BEFORE, AFTER}
    assert swept == {0, 1, 2}


@pytest.mark.parametrize(
    "fault",
    [
        {"op": "create", "path": "*.prune.*", "errno": "ENOSPC"},
        {"op": "write", "path": "*.prune.*", "errno": "ENOSPC"},
        {"op": "write", "path": "*.prune.*", "errno": "EIO", "after": 1},
        {"op": "fsync", "path": "*.prune.*", "errno": "EIO"},
        {"op": "fsync", "path": "*/inbox", "errno": "EIO"},
        {"op": "link", "path": "*.prune.*", "errno": "EPERM"},
        {"op": "rename", "path": "*.prune.*", "errno": "EIO"},
        {"op": "read", "path": "*/inbox/a-vm.jsonl", "errno": "EIO"},
    ],
    ids=lambda fault: " ".join(str(value) for value in fault.values()),
)
def test_a_disk_that_fails_is_a_failed_and_leaves_the_inbox_byte_for_byte(
    faultfs: MountedFaultFS, tmp_path: Path, fault: dict[str, object]
) -> None:
    world = World(tmp_path, home=faultfs.mount / "comm")
    client = world.client("a", now=NOW)
    lay(world, client)
    faultfs.inject({**fault, "times": 1})
    with pytest.raises(FolderError, match=r"Input/output error|No space left|Operation not permitted"):
        pruning.prune(client, "a-vm")
    assert faultfs.fired() == 1
    faultfs.clear()
    assert world.inbox("a-vm").read_bytes() == BEFORE
    assert left_over(world) == []
    assert pruning.prune(client, "a-vm").done
    assert world.inbox("a-vm").read_bytes() == AFTER


def test_a_short_write_is_written_on(faultfs: MountedFaultFS, tmp_path: Path) -> None:
    world = World(tmp_path, home=faultfs.mount / "comm")
    client = world.client("a", now=NOW)
    lay(world, client)
    faultfs.inject({"op": "write", "path": "*.prune.*", "short": 3})
    assert pruning.prune(client, "a-vm").done
    assert faultfs.fired() > 100
    faultfs.clear()
    assert world.inbox("a-vm").read_bytes() == AFTER


@pytest.mark.parametrize("disk", ["small_tmpfs", "small_ext4"])
def test_a_disk_that_is_really_full_keeps_the_inbox_and_goes_on_once_there_is_room(
    request: pytest.FixtureRequest, tmp_path: Path, disk: str
) -> None:
    path: Path = request.getfixturevalue(disk)
    world = World(tmp_path, home=path / "comm")
    client = world.client("a", now=NOW)
    shown = [line("goes"), line("x" * 200_000, 60), SHOWN[4]]
    before = b"".join([*shown, *UNREAD])
    lay(world, client, before, cursor.written_form(3, SHOWN[4][:-1]))
    filler = path / "filler"
    room = os.statvfs(path)
    with open(filler, "wb") as file:
        file.write(b"\0" * (room.f_bfree * room.f_bsize - 100_000))
    with pytest.raises(FolderError, match=r"No space left on device\); it is what it was before$"):
        pruning.prune(client, "a-vm")
    assert world.inbox("a-vm").read_bytes() == before
    assert left_over(world) == []
    filler.unlink()
    assert pruning.prune(client, "a-vm").pruned == 1
    assert poll(client) == texts(UNREAD)
