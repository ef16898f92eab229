"""SIGKILL between each pair of system calls of what the bus does, and what the next process then finds.

Each test lays a comm folder, runs one operation in a child that is killed at its n-th call, looks at what is there,
lets another process do it again, and looks again; n = 1, 2, 3 ... until the operation gets to its end.  What must hold
is in the ``check_...`` functions.  A row is printed for each operation, and a table at the end (``make faults``).

The folder lies in memory where it can: a killed process loses nothing that it has handed to the kernel, so it makes no
difference what is on the disk.
"""

from __future__ import annotations

import calendar
import gc
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from faults.killpoints import KillPoint, answer, kill_at_each_call
from world import MACHINE, World

from sotbus import message
from sotbus.cli.main import main
from sotbus.comm import cursor, manager_record, membership, offset_hint, reading, registry_json, sending
from sotbus.comm.client import Client
from sotbus.comm.holder import DEAD, judge, own_record, parse
from sotbus.comm.inbox import Inbox, look
from sotbus.comm.lock_manager import FlockManager
from sotbus.comm.processes import ancestry, start_ticks
from sotbus.comm.registry import Registry
from sotbus.comm.registry_lock import RegistryLock, link_record
from sotbus.comm.session import Session
from sotbus.comm.topology import Topology
from sotbus.errors import NotJoined

pytestmark = pytest.mark.faults

# What an operation imports when it runs; done here, so that no kill falls into an import.
for _lazy in ("argparse", "difflib", "hashlib", "random", "shutil", "threading", "tomllib", "uuid"):
    importlib.import_module(_lazy)
for _lazy in ("config", "cli.membership", "cli.options", "cli.poll", "cli.send", "cli.terminal"):
    importlib.import_module(f"sotbus.{_lazy}")
time.localtime()

NOW = 1_800_000_000.0
"""The clock of the clients here, in seconds since the epoch."""

LOCAL = f"local {MACHINE}"
RECORD = f"{LOCAL}\n{MACHINE}\n".encode()
"""The lock manager's record as it is written by the machine of these tests."""

SETTLE_S = 0.001
BOUND_S = 5.0
"""Longer than any wait that is right here; a lock that a dead process blocks is waited for so long, then told."""

TORN = b'{"from":"z-vm","to":"b-vm","repo":"z","msg":"to'
Document = dict[str, Any]


class Row:
    """One operation: how many kills it was dealt, and after how many of them every check held."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.points = 0
        self.survived = 0

    def __str__(self) -> str:
        return f"{self.operation:<56} | {self.points:>11} | {self.survived:>8}"


ROWS: list[Row] = []


def survive(
    name: str,
    operation: Callable[[], object],
    *,
    prepare: Callable[[], None],
    check: Callable[[KillPoint], None],
    calls: Sequence[str],
) -> None:
    """Kill the operation at each call, count, and print the row.

    :param calls: calls that the operation must make, in this order; a test that kills nothing shows nothing.
    """
    row = Row(name)
    ROWS.append(row)

    def counted(point: KillPoint) -> None:
        row.points += point.killed
        check(point)
        row.survived += point.killed

    try:
        points = kill_at_each_call(operation, prepare=prepare, check=counted)
    finally:
        print(f"\n{row}", end=" ", flush=True)
    made = [point.call.removesuffix("at") for point in points]
    rest = iter(made)
    assert all(call in rest for call in calls), f"{calls} are not, in this order, in {made}"


def by_another_process(*work: Callable[[], object]) -> str:
    """Run something to its end in a forked child, which is dead and waited for after that.

    Answers what the work answered, as text: one line for each part of it.
    """
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        text, status = "", 1
        try:
            gc.disable()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            text, status = "\n".join(str(part()) for part in work), 0
        except BaseException:
            text = traceback.format_exc()
        finally:
            os.write(send, text.encode())
            os._exit(status)
    os.close(send)
    try:
        with open(receive, encoding="utf-8") as file:
            text = file.read()
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"the next process failed ({status}):\n{text}"
    return text


# What is laid before an operation


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """The operation's name in the table: the test's parameters have it."""
    return str(request.node.callspec.id)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    memory = "/dev/shm"
    if not os.access(memory, os.W_OK):
        yield World(tmp_path)
        return
    with tempfile.TemporaryDirectory(prefix="sotbus-kill-", dir=memory) as base:
        yield World(Path(base))


def client_of(world: World, name: str, *, pinned: bool = True) -> Client:
    """A client whose session is known before the kills begin.

    :param pinned: false for a session outside a row, which writes the shared self file too.
    """
    client = world.client(name, now=NOW)
    client.registry.lock.settle_s = SETTLE_S
    if not pinned:
        client.environ = {}
        client._session = session_of_this_process(client)
    assert client.session.own_path.endswith(f"pin-{name}.txt") is pinned
    return client


def session_of_this_process(client: Client) -> Session:
    """The session of a terminal whose leader is this process, wherever the tests run: a leader may be out of sight."""
    pid = os.getpid()
    start = start_ticks(pid)
    assert start is not None
    base = f"{client.folder.selves}/{client.box.declared_host}__"
    own = f"{base}sotbus-leader-{pid}-{start}-00000000.txt"
    return Session(own, f"{base}nopane.txt", "", (pid, start), "", ancestry(pid), client.box)


def lay(world: World, files: Mapping[str, bytes]) -> None:
    """A comm folder with these files and no others."""
    nothing_there(world)
    for folder in ("", "inbox", "self", "read"):
        (world.home / folder).mkdir(0o700)
    for name, data in files.items():
        (world.home / name).write_bytes(data)
        (world.home / name).chmod(0o600)


def nothing_there(world: World) -> None:
    shutil.rmtree(world.home, ignore_errors=True)


def registry_of(world: World, now: float = NOW) -> bytes:
    """A registry with @a-vm, @b-vm and @c-vm, and with what only a later release would understand."""
    seen = message.stamp(now - 60)
    address = f'"repo": "x", "expertise": [], "status": "idle", "joined": "{seen}", "last_seen": "{seen}"'
    return f"""{{
  "protocol_version": 1,
  "later": {{"load": 1.50, "serial": 12345678901234567890123, "none": null}},
  "agents": {{
    "a-vm": {{"host": "vm", "workspace_id": "", "root": "{world.project("a")}", {address}}},
    "b-vm": {{"host": "vm", "workspace_id": "ws-1", "root": "/b", {address}, "later": [{{"deep": [0.10, "☃"]}}]}},
    "c-vm": {{"host": "elsewhere", "workspace_id": "ws-2", "root": "/c", {address}, "state": "working", "done": true}}
  }}
}}
""".encode()


def self_file_of(world: World) -> bytes:
    return f"a-vm\nrepo=a\nroot={world.project('a')}\n".encode()


def self_files_of(world: World, client: Client) -> dict[str, bytes]:
    """The self files that a join of the session @a-vm writes, by their paths: the page's three lines."""
    nothing_there(world)
    by_another_process(lambda: membership.join(client))
    paths = [path for path in (client.session.own_path, client.session.shared_path) if path]
    files = {path: Path(path).read_bytes() for path in paths}
    assert all(data.startswith(self_file_of(world)) for data in files.values())
    return files


def line_to(to: str, text: str) -> bytes:
    return message.encode("z-vm", to, "z", text, message.stamp(NOW))


def document(data: bytes) -> Document:
    """A registry's document, numbers digit for digit."""
    value: Document = json.loads(data, parse_int=str, parse_float=str)
    return value


def changed(before: Document, handle: str, **fields: str) -> Document:
    """A document in which only these fields of one entry are others."""
    agents: Document = before["agents"]
    return {**before, "agents": {**agents, handle: {**agents[handle], **fields}}}


def set_summary(registry: Registry, handle: str, text: str) -> bool:
    def change(value: Document) -> bool:
        value["agents"][handle]["summary"] = text
        return True

    return registry.update(change, BOUND_S)


# What must hold after a kill, and after the next process has done its work

KNOWN_NAMES = re.compile(
    r"registry\.json(\.tmp|\.new\.\d+\.\d+)?|\.registry\.lock(\.(tmp|reclaim)\.[\w.-]+)?"
    r"|inbox-lock-manager|\.inbox-lock-manager\.[\w.-]+|inbox/[\w-]+\.(jsonl|lock)|self/[\w-]+\.txt(\.tmp\.\w+)?"
    r"|read/[\w-]+\.cursor(\.tmp\.\d+\.\d+)?|state/sotbus-offset-[\w-]+"
)


def check_what_lies_about(world: World) -> None:
    """Nothing is open to others, and no name is there that another client of the folder could take for data."""
    for folder, _, names in os.walk(world.home):
        assert os.stat(folder).st_mode & 0o077 == 0, folder
        for name in names:
            path = Path(folder, name)
            assert path.stat().st_mode & 0o077 == 0, path
            assert KNOWN_NAMES.fullmatch(str(path.relative_to(world.home))), path


def check_registry(world: World, *allowed: Document) -> Document:
    """The registry is whole, and one of these to the last digit."""
    found = document((world.home / "registry.json").read_bytes())
    assert found in allowed
    return found


def check_lock_is_whole(world: World) -> None:
    """There is no registry lock, or it names its holder, who can be proved dead now."""
    try:
        text = Path(world.folder.registry_lock).read_text()
    except FileNotFoundError:
        return
    record = parse(text.removesuffix("\n"))
    assert record is not None, text
    assert text == f"{record}\n"
    assert judge(record, own_record(world.box(), fresh=True))[0] == DEAD


def check_lock_is_free(world: World) -> None:
    assert not os.path.lexists(world.folder.registry_lock)


def check_stamp(world: World, printed: bytes) -> None:
    """A command that has not answered yet has not written to the registry; later it changes its own stamp alone."""
    found = document((world.home / "registry.json").read_bytes())
    stamp, others = found["agents"]["a-vm"]["last_seen"], found["agents"]["b-vm"]["last_seen"]
    assert message.is_stamp(stamp)
    assert printed or stamp == others
    then = calendar.timegm(time.strptime(others, message.STAMP)) + 60
    assert changed(found, "a-vm", last_seen=others) == document(registry_of(world, then))


def lines_of(world: World, handle: str) -> tuple[list[bytes], bytes]:
    """The newline-terminated lines of an inbox, and what lies behind the last one; each of the lines parses."""
    path = world.inbox(handle)
    *lines, tail = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for line in lines:
        assert isinstance(json.loads(line), dict), line
    return lines, tail


def texts(lines: Sequence[bytes]) -> list[str]:
    return [json.loads(line)["msg"] for line in lines]


def check_inbox(world: World, handle: str, before: list[str], killed: str, filed: bool, *after: str) -> bytes:
    """The lines of before and after are all there, and the killed sender's: always if answered, at most once if not.

    A reader without a cursor sees these lines and nothing else. Answers the tail behind them.
    """
    lines, tail = lines_of(world, handle)
    allowed = [[*before, killed, *after]]
    if not filed:
        allowed.append([*before, *after])
    assert texts(lines) in allowed
    assert look(str(world.inbox(handle)), cursor.read("")).lines == lines
    return tail


def check_cursor(world: World, handle: str, at_most: int) -> int:
    """The cursor is whole and counts no line that was not shown, or is not there. Answers its count."""
    path = Path(world.folder.cursor(handle))
    if not path.exists():
        return 0
    count = int(path.read_bytes().split(b" ")[0])
    lines, _ = lines_of(world, handle)
    assert count <= min(at_most, len(lines))
    assert path.read_bytes() == cursor.written_form(count, lines[count - 1])
    return count


def check_self_files(content: Mapping[str, bytes]) -> list[bool]:
    """Each self file of the session is whole or absent. Answers which are there."""
    for path, data in content.items():
        assert not os.path.exists(path) or Path(path).read_bytes() == data, path
    return [os.path.exists(path) for path in content]


# 1. An append


@pytest.mark.spec("S55", "S56", "S57")
@pytest.mark.parametrize(
    ("before", "tail", "cut"),
    [
        pytest.param(["one", "two"], b"", [], id="append"),
        pytest.param(["one"], TORN, ["ftruncate"], id="append behind a torn tail"),
        pytest.param([], TORN, ["ftruncate"], id="append behind nothing but a torn tail"),
        pytest.param([], None, [], id="append that makes the inbox"),
    ],
)
def test_a_line_that_was_filed_outlives_a_kill_and_a_torn_tail_does_not(
    world: World, name: str, before: list[str], tail: bytes | None, cut: list[str]
) -> None:
    inbox = Inbox(world.folder, "b-vm", FlockManager(LOCAL))
    old = b"".join(line_to("b-vm", text) for text in before)

    def prepare() -> None:
        lay(world, {} if tail is None else {"inbox/b-vm.jsonl": old + tail})

    def operation() -> str:
        inbox.append(line_to("b-vm", "killed"), BOUND_S)
        return "filed"

    def check(point: KillPoint) -> None:
        filed = point.answered == "filed"
        torn = check_inbox(world, "b-vm", before, "killed", filed)
        assert torn in (b"", tail)
        cut: list[int] = []
        inbox.on_cut = cut.append
        said = by_another_process(
            lambda: inbox.append(line_to("b-vm", "again"), BOUND_S),
            lambda: cut,
        )
        assert said == f"None\n{[len(torn)] if torn else []}"
        assert check_inbox(world, "b-vm", before, "killed", filed, "again") == b""
        check_what_lies_about(world)

    calls = ["flock", "open", *cut, "write", "fdatasync", "answer"]
    survive(name, operation, prepare=prepare, check=check, calls=calls)


def test_a_send_keeps_its_word_wherever_it_is_killed(world: World) -> None:
    """The first send on a fresh box, which makes the lock manager's record and the inbox."""
    client = client_of(world, "a")
    record = Path(world.folder.manager_record)
    old = document(registry_of(world))

    def prepare() -> None:
        lay(world, {"registry.json": registry_of(world), "self/pin-a.txt": self_file_of(world)})

    def send(text: str) -> str:
        sending.Outbox(client).send("b-vm", text)
        return "filed"

    def check(point: KillPoint) -> None:
        filed = point.answered == "filed"
        check_inbox(world, "b-vm", [], "killed", filed)
        assert not record.exists() or record.read_bytes() == RECORD
        by_another_process(lambda: send("again"))
        assert check_inbox(world, "b-vm", [], "killed", filed, "again") == b""
        assert record.read_bytes() == RECORD
        check_registry(world, old)
        check_what_lies_about(world)

    calls = ["write", "fsync", "link", "flock", "write", "fdatasync", "answer"]
    survive("first send of all", lambda: send("killed"), prepare=prepare, check=check, calls=calls)


def test_a_broadcast_keeps_its_word_to_each_handle(world: World) -> None:
    client = client_of(world, "a")
    files = {
        "registry.json": registry_of(world),
        "self/pin-a.txt": self_file_of(world),
        "inbox-lock-manager": RECORD,
        "inbox/b-vm.jsonl": line_to("b-vm", "one"),
    }

    def broadcast(text: str) -> None:
        for to, error in sending.Outbox(client).broadcast(text):
            assert error is None
            answer(to)

    def check(point: KillPoint) -> None:
        filed = (point.answered or "").split()
        check_inbox(world, "b-vm", ["one"], "killed", "b-vm" in filed)
        check_inbox(world, "c-vm", [], "killed", "c-vm" in filed)
        by_another_process(lambda: broadcast("again"))
        assert check_inbox(world, "b-vm", ["one"], "killed", "b-vm" in filed, "again") == b""
        assert check_inbox(world, "c-vm", [], "killed", "c-vm" in filed, "again") == b""
        check_what_lies_about(world)

    calls = ["write", "fdatasync", "answer", "write", "fdatasync", "answer"]
    survive(
        "broadcast to two handles",
        lambda: broadcast("killed"),
        prepare=lambda: lay(world, files),
        check=check,
        calls=calls,
    )


# 2. A registry write


@pytest.mark.spec("S17", "S22")
def test_the_registry_is_the_old_one_or_the_new_one(world: World) -> None:
    registry = client_of(world, "a").registry
    old = document(registry_of(world))
    new = changed(old, "a-vm", summary="killed")

    def prepare() -> None:
        lay(world, {"registry.json": registry_of(world)})

    def operation() -> str:
        return str(set_summary(registry, "a-vm", "killed"))

    def check(point: KillPoint) -> None:
        found = check_registry(world, old, new)
        assert point.answered is None or found == new
        check_lock_is_whole(world)
        by_another_process(lambda: set_summary(registry, "b-vm", "again"))
        check_registry(world, changed(found, "b-vm", summary="again"))
        assert not (world.home / "registry.json.tmp").exists()
        check_lock_is_free(world)
        check_what_lies_about(world)

    calls = ["link", "read", "open", "write", "fsync", "rename", "unlink", "answer"]
    survive("registry write", operation, prepare=prepare, check=check, calls=calls)


# 3. A creation


@pytest.mark.spec("S24")
def test_a_comm_folder_is_made_from_whatever_a_dead_maker_left(world: World) -> None:
    client = client_of(world, "a")
    registry = world.home / "registry.json"

    def create() -> str:
        client.ensure()
        return "made"

    def add(value: Document) -> bool:
        value["agents"]["new-vm"] = None
        return True

    def check(point: KillPoint) -> None:
        made = [folder.is_dir() for folder in (world.home, *(world.home / name for name in ("inbox", "self", "read")))]
        if registry.exists():
            assert registry.read_bytes() == registry_json.SKELETON
        assert point.answered is None or (all(made) and registry.exists())
        by_another_process(create)
        assert registry.read_bytes() == registry_json.SKELETON
        by_another_process(lambda: client.registry.update(add, BOUND_S), create)
        check_registry(world, document(b'{"protocol_version": 1, "agents": {"new-vm": null}}'))
        check_lock_is_free(world)
        check_what_lies_about(world)
        assert sorted(path.name for path in world.home.iterdir() if path.is_dir()) == ["inbox", "read", "self"]

    calls = ["mkdir", "mkdir", "mkdir", "mkdir", "open", "write", "fsync", "link", "unlink", "fsync", "answer"]
    survive("folder and registry", create, prepare=lambda: nothing_there(world), check=check, calls=calls)


@pytest.mark.spec("S62", "S66")
@pytest.mark.parametrize(
    ("old", "put"),
    [
        pytest.param(None, "link", id="lock manager's record"),
        pytest.param(f"none@{MACHINE}\n{MACHINE}\n".encode(), "rename", id="lock manager's record after a remount"),
    ],
)
def test_the_lock_managers_record_is_whole_or_the_old_one(world: World, name: str, old: bytes | None, put: str) -> None:
    record = Path(world.folder.manager_record)
    box = world.box()

    def establish() -> str:
        return manager_record.establish(world.folder, box, replace=True)

    done = manager_record.CREATED if old is None else manager_record.REPLACED

    def prepare() -> None:
        lay(world, {} if old is None else {record.name: old})

    def check(point: KillPoint) -> None:
        found = record.read_bytes() if record.exists() else None
        assert found in (old, RECORD)
        assert point.answered is None or (point.answered, found) == (done, RECORD)
        assert by_another_process(establish) == (manager_record.CURRENT if found == RECORD else done)
        assert record.read_bytes() == RECORD
        assert manager_record.writer_manager(world.folder, box, Topology("far")).identity == LOCAL
        check_what_lies_about(world)

    survive(name, establish, prepare=prepare, check=check, calls=["write", "fsync", put, "answer"])


# 4. The registry lock, and 5. its reclaim from a dead holder


def take_and_release(lock: RegistryLock) -> str:
    with lock.hold(BOUND_S):
        answer("held")
    return "released"


@pytest.mark.spec("S35", "S36", "S37", "S38")
def test_a_lock_whose_holder_was_killed_is_the_next_ones(world: World) -> None:
    lock = client_of(world, "a").registry.lock
    states: set[bool] = set()

    def check(point: KillPoint) -> None:
        check_lock_is_whole(world)
        states.add(os.path.lexists(lock.path))
        assert point.answered != "held\nreleased" or not os.path.lexists(lock.path)
        by_another_process(lambda: take_and_release(lock))
        check_lock_is_free(world)
        with lock.hold(0):  # at once, past whatever lies about
            pass
        check_what_lies_about(world)

    calls = ["open", "write", "link", "unlink", "answer", "unlink", "answer"]
    survive(
        "registry lock, taken and released",
        lambda: take_and_release(lock),
        prepare=lambda: lay(world, {}),
        check=check,
        calls=calls,
    )
    assert states == {True, False}


@pytest.mark.spec("S38", "S40", "S42")
@pytest.mark.parametrize(
    "reclaimers",
    [
        pytest.param(0, id="reclaim from a dead holder, and a write"),
        pytest.param(1, id="reclaim from a dead holder and a dead reclaimer"),
    ],
)
def test_a_dead_holders_lock_is_reclaimed_though_its_reclaimer_dies_too(
    world: World, name: str, reclaimers: int
) -> None:
    """The killed process finds a lock of a dead one, and the next process then finds what the two of them left."""
    registry = client_of(world, "a").registry
    old = document(registry_of(world))
    new = changed(old, "a-vm", summary="killed")

    def prepare() -> None:
        lay(world, {"registry.json": registry_of(world)})
        by_another_process(lambda: registry.lock.hold(BOUND_S))  # never released
        if reclaimers:
            by_another_process(mark)

    def mark() -> None:
        """What a reclaimer has done when it dies in its settle."""
        dead = Path(registry.lock.path).read_text().strip().replace(":", ".")
        root = world.folder.root
        assert link_record(f"{root}/.registry.lock.reclaim.{dead}", root, own_record(world.box(), fresh=True))

    def operation() -> str:
        return str(set_summary(registry, "a-vm", "killed"))

    def check(point: KillPoint) -> None:
        found = check_registry(world, old, new)
        assert point.answered is None or found == new
        check_lock_is_whole(world)
        by_another_process(lambda: set_summary(registry, "b-vm", "again"))
        check_registry(world, changed(found, "b-vm", summary="again"))
        check_lock_is_free(world)
        with registry.lock.hold(0):
            pass
        check_what_lies_about(world)

    calls = ["link", "link", "clock_nanosleep", "unlink", "link", "write", "fsync", "rename", "unlink", "answer"]
    survive(name, operation, prepare=prepare, check=check, calls=calls)


# 6. A poll


def poll(client: Client, show: Callable[[str], object]) -> None:
    """What the command does: look, show, and only then move the cursor."""
    seen = reading.look_at(client, "a-vm", pytest.fail)
    show(" ".join(texts(seen.lines)))
    reading.advance(client, "a-vm", seen)


def check_poll(world: World, client: Client, counted: int, shown: list[str]) -> None:
    """After a killed poll that had shown this: one more is filed, and two more polls; no line is shown zero times.

    :param counted: how many lines the cursor counted before the killed poll.
    """
    before = texts(lines_of(world, "a-vm")[0])
    at = check_cursor(world, "a-vm", counted + len(shown))
    inbox = Inbox(world.folder, "a-vm", FlockManager(LOCAL))

    def again() -> str:
        said: list[str] = []
        poll(client, said.append)
        return " ".join(said)

    said = by_another_process(
        lambda: inbox.append(line_to("a-vm", "last"), BOUND_S),
        again,
        again,
        lambda: set_summary(client.registry, "a-vm", "again"),
    )
    more, nothing_more = (line.split() for line in said.split("\n")[1:3])
    assert more == [*before[at:], "last"]
    assert set(before[counted:]) <= {*shown, *more}
    assert nothing_more == []
    assert check_cursor(world, "a-vm", len(before) + 1) == len(before) + 1
    check_lock_is_free(world)
    check_what_lies_about(world)


def mailbox(world: World, counted: int, now: float = NOW) -> dict[str, bytes]:
    """The folder of a session that has four lines, and has been shown some of them."""
    lines = [line_to("a-vm", text) for text in ("one", "two", "three", "four")]
    shown = cursor.written_form(counted, lines[counted - 1].removesuffix(b"\n"))
    return {
        "registry.json": registry_of(world, now),
        "self/pin-a.txt": self_file_of(world),
        "inbox-lock-manager": RECORD,
        "inbox/a-vm.jsonl": b"".join(lines),
        **({"read/a-vm.cursor": shown} if counted else {}),
    }


@pytest.mark.spec("S68", "S72")
def test_a_killed_poll_has_moved_no_cursor_past_what_it_showed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first poll of all, of an inbox that is long enough for an offset hint to the next poll."""
    monkeypatch.setattr(offset_hint, "WORTH_BYTES", 1)
    client = client_of(world, "a")

    def check(point: KillPoint) -> None:
        check_poll(world, client, 0, (point.answered or "").split())

    survive(
        "first poll, of a long inbox",
        lambda: poll(client, answer),
        prepare=lambda: lay(world, mailbox(world, 0)),
        check=check,
        calls=["flock", "answer", "write", "rename", "mkdir", "open", "write"],
    )


# 1. and 6. as commands: everything from the arguments to the exit status


@pytest.fixture
def session(world: World, monkeypatch: pytest.MonkeyPatch) -> Client:
    """This process has the environment and the directory of the session @a-vm, which is looked up here and now."""
    environ = world.environ({"SOT_COMM_SELF_FILE": str(world.home / "self" / "pin-a.txt")})
    for name in set(os.environ) - set(environ):
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(world.project("a"))
    client = client_of(world, "a")
    client.clock = time.time
    monkeypatch.setattr("sotbus.comm.client.session_here", lambda *_: client.session)
    return client


def survive_command(
    world: World,
    words: list[str],
    *,
    prepare: Callable[[], None],
    check: Callable[[bytes, bool], None],
    calls: Sequence[str],
) -> None:
    """:func:`survive` for a command; its check is told what was printed, and whether the command got to its end."""
    box, printed = world.box(), world.base / "printed"
    with open(printed, "a", encoding="utf-8") as stdout, open(os.devnull, "a", encoding="utf-8") as stderr:

        def clean() -> None:
            os.truncate(printed, 0)
            prepare()

        def operation() -> None:
            sys.stdout, sys.stderr = stdout, stderr
            assert main(words, box) == 0

        survive(
            f"sotbus {words[0]}",
            operation,
            prepare=clean,
            check=lambda point: check(printed.read_bytes(), not point.killed),
            calls=calls,
        )


@pytest.mark.spec("S17", "S72")
def test_a_killed_poll_command_has_moved_no_cursor_past_what_it_printed(world: World, session: Client) -> None:
    def prepare() -> None:
        lay(world, mailbox(world, 2, time.time()))

    def check(printed: bytes, done: bool) -> None:
        shown = texts(printed.splitlines())
        assert shown == ["three", "four"][: len(shown)]
        assert not done or len(shown) == 2
        check_lock_is_whole(world)
        check_stamp(world, printed)
        check_poll(world, session, 2, shown)

    calls = ["flock", "write", "rename", "link", "write", "fsync", "rename", "unlink"]
    survive_command(world, ["poll", "--json"], prepare=prepare, check=check, calls=calls)


@pytest.mark.spec("S17", "S94", "S95")
def test_a_killed_send_command_has_filed_what_it_printed(world: World, session: Client) -> None:
    def prepare() -> None:
        files = {"registry.json": registry_of(world, time.time()), "self/pin-a.txt": self_file_of(world)}
        lay(world, files | {"inbox/b-vm.jsonl": line_to("b-vm", "one") + TORN})

    def check(printed: bytes, done: bool) -> None:
        filed = printed == b"  filed -> @b-vm\n"
        assert filed or (not printed and not done)
        check_stamp(world, printed)
        assert check_inbox(world, "b-vm", ["one"], "killed", filed) in (b"", TORN)
        check_lock_is_whole(world)
        by_another_process(
            lambda: sending.Outbox(session).send("b-vm", "again"),
            lambda: set_summary(session.registry, "a-vm", "again"),
        )
        assert check_inbox(world, "b-vm", ["one"], "killed", filed, "again") == b""
        check_lock_is_free(world)
        check_what_lies_about(world)

    calls = ["link", "flock", "ftruncate", "write", "fdatasync", "write", "link", "fsync", "rename", "unlink"]
    survive_command(world, ["send", "@b-vm", "killed"], prepare=prepare, check=check, calls=calls)


# 7. A join and a leave


def others_of(value: Document) -> Document:
    """All of a registry but the entry of @a-vm."""
    return {**value, "agents": {name: entry for name, entry in value["agents"].items() if name != "a-vm"}}


def check_entry(world: World, value: Document, old: Document | None) -> bool:
    """The entry of @a-vm is the old one, or whole and this session's. Answers whether it is the new one."""
    entry = value["agents"].get("a-vm")
    if entry is None or (old is not None and entry == old["agents"].get("a-vm")):
        assert entry is not None or old is None or "a-vm" not in old["agents"]
        return False
    now = message.stamp(NOW)
    fields = {"host": "vm", "workspace_id": "", "repo": "a", "root": str(world.project("a")), "expertise": ["x"]}
    assert {name: entry.get(name) for name in fields} == fields
    assert (entry["status"], entry["joined"], entry["last_seen"]) == ("idle", now, now)
    assert len(entry["instance"]) == 36
    return True


@pytest.mark.spec("S16", "S76")
@pytest.mark.parametrize(
    ("pinned", "there"),
    [
        pytest.param(False, False, id="join, where there is nothing"),
        pytest.param(True, True, id="join again, with unread mail"),
    ],
)
def test_a_killed_join_is_made_whole_by_the_next(world: World, name: str, pinned: bool, there: bool) -> None:
    """The next join of the session takes the same handle; other entries, mail and cursor are as they were."""
    client = client_of(world, "a", pinned=pinned)
    registry, inbox, read = (world.home / path for path in ("registry.json", "inbox/a-vm.jsonl", "read/a-vm.cursor"))
    files = mailbox(world, 2) if there else {}
    old = document(files["registry.json"]) if there else None
    others = others_of(old or document(registry_json.SKELETON))
    self_files = self_files_of(world, client)

    def prepare() -> None:
        if there:
            lay(world, files)
        else:
            nothing_there(world)

    def join() -> str:
        return membership.join(client, expertise=["x"]).handle

    def check(point: KillPoint) -> None:
        written = False
        if there or registry.exists():
            found = document(registry.read_bytes())
            assert others_of(found) == others
            written = check_entry(world, found, old)
        files_there = check_self_files(self_files)
        assert there or written or not any(files_there)  # no self file names a handle that is not taken
        assert not there or inbox.read_bytes() == files["inbox/a-vm.jsonl"]
        assert point.answered is None or (point.answered == "a-vm" and written and all(files_there) and inbox.exists())
        check_lock_is_whole(world)
        assert by_another_process(join) == "a-vm"
        found = document(registry.read_bytes())
        assert others_of(found) == others
        assert check_entry(world, found, old)
        assert all(check_self_files(self_files))
        assert inbox.read_bytes() == files.get("inbox/a-vm.jsonl", b"")
        assert (read.read_bytes() if there else None) == files.get("read/a-vm.cursor")
        assert texts(reading.look_at(client, "a-vm", pytest.fail).lines) == (["three", "four"] if there else [])
        check_lock_is_free(world)
        check_what_lies_about(world)

    calls = ["link", "write", "fsync", "rename", "unlink", "write", "rename", "open", "fsync", "answer"]
    survive(name, join, prepare=prepare, check=check, calls=calls)


@pytest.mark.spec("S9")
def test_a_folder_that_a_killed_join_was_closing_is_closed_by_the_next(world: World) -> None:
    """What an older release left open to others. The root is closed last, or the next join would not look inside."""
    client = client_of(world, "a")
    files = mailbox(world, 2)
    kept = {name: data for name, data in files.items() if name != "registry.json"}

    def prepare() -> None:
        lay(world, files)
        for folder, _, names in os.walk(world.home):
            os.chmod(folder, 0o755)
            for name in names:
                os.chmod(os.path.join(folder, name), 0o644)

    def check(point: KillPoint) -> None:
        if point.answered is not None:
            assert point.answered == "None"
            check_what_lies_about(world)
        assert by_another_process(lambda: membership.join(client).handle) == "a-vm"
        check_what_lies_about(world)
        assert {name: (world.home / name).read_bytes() for name in kept} == kept
        check_lock_is_free(world)

    survive(
        "closing of an open folder",
        lambda: str(world.folder.tighten()),
        prepare=prepare,
        check=check,
        calls=[*["chmod"] * 9, "answer"],
    )


def test_a_killed_leave_is_finished_by_the_next_and_takes_no_mail(world: World) -> None:
    """A session outside a row, which has two self files."""
    client = client_of(world, "a", pinned=False)
    self_files = self_files_of(world, client)
    assert len(self_files) == 2
    files = mailbox(world, 2)
    del files["self/pin-a.txt"]
    files |= {f"self/{os.path.basename(path)}": data for path, data in self_files.items()}
    old = document(files["registry.json"])

    def leave() -> str:
        try:
            handle, _ = membership.leave(client)
        except NotJoined:
            return "not joined"
        return handle

    def check(point: KillPoint) -> None:
        found = check_registry(world, old, others_of(old))
        files_there = check_self_files(self_files)
        assert all(files_there) or found != old  # a listed session still knows who it is
        assert point.answered is None or (point.answered == "a-vm" and found != old and not any(files_there))
        check_lock_is_whole(world)
        by_another_process(leave, lambda: set_summary(client.registry, "b-vm", "again"))
        check_registry(world, changed(others_of(old), "b-vm", summary="again"))
        assert not check_self_files(self_files)[0]
        with pytest.raises(NotJoined):  # whatever is left of the shared file, which other sessions have too
            client.identity()
        for kept in ("inbox/a-vm.jsonl", "read/a-vm.cursor"):
            assert (world.home / kept).read_bytes() == files[kept]
        check_lock_is_free(world)
        check_what_lies_about(world)

    calls = ["link", "write", "fsync", "rename", "unlink", "unlink", "unlink", "answer"]
    survive("leave", leave, prepare=lambda: lay(world, files), check=check, calls=calls)


def test_every_operation_survived_every_kill() -> None:
    """The table; run the whole module to see it all."""
    points, survived = sum(row.points for row in ROWS), sum(row.survived for row in ROWS)
    head = f"{'operation':<56} | kill points | survived"
    rule = "-" * len(head)
    total = f"total: {points} kill points x {len(ROWS)} operations, each point looked at twice; survived: {survived}"
    print("\n", *(head, rule, *ROWS, rule, total), sep="\n")
    assert survived == points
    assert points >= 30
