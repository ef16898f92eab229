"""sotbus and a program that is not ours share one comm folder at the same time.

Each sees the other's mail, locks, reclaims and cursors. The other program is ``foreign_comm.sh``, which knows nothing
of sotbus's code; ``test_foreign_alone.py`` shows that it keeps to the pages by itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tools
from world import ENTRY, MACHINE, World

FOREIGN = Path(__file__).with_name("foreign_comm.sh")
VECTORS = Path(__file__).parents[1] / "vectors"
TOOLS = {
    "bash": "bash",
    "jq": "jq",
    "flock": "util-linux",
    **dict.fromkeys(("link", "cksum", "mv", "sync", "truncate", "stat"), "coreutils"),
}

KINDS = ("sotbus", "foreign")
OTHER = {"sotbus": "foreign", "foreign": "sotbus"}
each_kind = pytest.mark.parametrize("kind", KINDS)

BUSY = "the inbox for @box is being written — nothing was read; run comm-poll.sh again\n"
FILED = "  filed -> @box\n"
NOTHING_NEW = "No new messages.\n"
ODD_TEXT = 'two\nlines, a tab\t, "quotes", a \\ and / and \u2028, \x01\x1f, ünï ☃ 😀 '
PATIENT = {"SOT_LOCK_WAIT_SECS": "60", "SOT_INBOX_LOCK_WAIT_SECS": "60", "SOT_INBOX_READ_WAIT_SECS": "60"}
"""Bounds for tests that ask what is written, and not how fast, on a machine that has other work."""

SEND_BY_HALVES = """
import os, runpy, sys

write = os.write

def half(fd, data):
    if bytes(data[:8]) != b'{"from":':
        return write(fd, data)
    os.write = write
    done = write(fd, data[: len(data) // 2])
    write(1, b"half\\n")
    sys.stdin.readline()
    return done

os.write = half
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""
"""sotbus, whose first write of a line is cut short by the system; it waits for a word before it writes the rest."""

HOLD_THE_REGISTRY = """
import os, sys
from sotbus.comm.box import Box
from sotbus.comm.folder import Folder
from sotbus.comm.registry_lock import RegistryLock

box = Box.here(os.environ)
box.mountinfo_path, box.machine_id = os.environ["TEST_MOUNTINFO"], os.environ["TEST_MACHINE_ID"]
with RegistryLock(Folder.of(os.environ), box).hold(10):
    print("held", flush=True)
    sys.stdin.readline()
"""

ALONE = """
mkdir -- "$CRITICAL" || echo "$$" >>"$CRITICAL.twice"
echo "$$" >>"$CRITICAL.entered"
sleep 0.05
rmdir -- "$CRITICAL"
"""
"""Run by both kinds while they hold the registry lock: notes whether another one is in there too."""

JOIN_ALONE = """
import os, runpy, subprocess, sys

rename = os.rename

def alone(source, target):
    if target.endswith("/registry.json"):
        subprocess.run(["sh", os.environ["ALONE"]], check=True)
    rename(source, target)

os.rename = alone
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


class Answer(NamedTuple):
    status: int
    out: str
    err: str


class Half(NamedTuple):
    """A send that has stopped with half of its line in the inbox."""

    process: subprocess.Popen[bytes]
    finish: Callable[[], Answer]


class Both:
    """The two programs in one world. Every process that it starts has ended when the test is over."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lock = world.home / ".registry.lock"
        self._started: list[subprocess.Popen[bytes]] = []

    def environ(self, extra: dict[str, str]) -> dict[str, str]:
        told = {"FOREIGN_MOUNTINFO": str(self.world.mountinfo), "FOREIGN_MACHINE_ID": MACHINE}
        return self.world.environ(told | extra)

    def words(self, kind: str, command: str, handle: str, *rest: str) -> Sequence[str]:
        """How this kind is told to ``join``, ``leave``, ``poll``, count ``unread`` or ``send`` as a handle."""
        if kind == "foreign":
            root = [str(self.world.project(handle))] if command == "join" else []
            return [command, handle, *root, *rest]
        return {
            "join": ["join", "--name", handle],
            "leave": ["leave", "--name", handle],
            "poll": ["poll"],
            "unread": ["unread", f"@{handle}"],
            "send": ["send", *(f"@{rest[0]}" if i == 0 else word for i, word in enumerate(rest))],
        }[command]

    def run(self, kind: str, command: str, handle: str, *rest: str, **env: str) -> Answer:
        words = self.words(kind, command, handle, *rest)
        if kind == "sotbus":
            ours = self.world.sotbus(handle, *words, env=env)
            return Answer(ours.returncode, ours.stdout, ours.stderr)
        done = subprocess.run(
            [str(FOREIGN), *words], env=self.environ(env), stdin=subprocess.DEVNULL, capture_output=True, timeout=120
        )
        return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())

    def ok(self, kind: str, command: str, handle: str, *rest: str, **env: str) -> str:
        answer = self.run(kind, command, handle, *rest, **env)
        assert (answer.status, answer.err) == (0, ""), answer
        return answer.out

    def start(self, argv: Sequence[str], session: str, **env: str) -> subprocess.Popen[bytes]:
        pin = {"SOT_COMM_SELF_FILE": str(self.world.home / "self" / f"pin-{session}.txt")}
        process = subprocess.Popen(
            argv,
            cwd=self.world.project(session),
            env=self.environ(pin | env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._started.append(process)
        return process

    def program(self, kind: str) -> list[str]:
        return [str(FOREIGN)] if kind == "foreign" else [sys.executable, str(ENTRY)]

    def begin(self, kind: str, command: str, handle: str, *rest: str, **env: str) -> subprocess.Popen[bytes]:
        """Like :meth:`run`, without waiting for the end."""
        return self.start([*self.program(kind), *self.words(kind, command, handle, *rest)], handle, **env)

    @contextmanager
    def half_written(self, kind: str, sender: str, text: str) -> Iterator[Half]:
        """A send to @box that has stopped with half of its line in the inbox."""
        if kind == "sotbus":
            words = self.words(kind, "send", sender, "box", text)
            process = self.start([sys.executable, "-c", SEND_BY_HALVES, str(ENTRY), *words], sender)
            assert process.stdout is not None
            assert process.stdout.readline() == b"half\n"
            yield Half(process, lambda: answer_of(process, b"\n"))
        else:
            process = self.begin(kind, "send", sender, "box", text, FOREIGN_HALF_STOP="1")
            until(lambda: is_stopped(process))
            assert self.torn("box")

            def finish() -> Answer:
                os.kill(process.pid, signal.SIGCONT)
                return answer_of(process)

            yield Half(process, finish)

    def torn(self, handle: str) -> bool:
        data = self.world.inbox(handle).read_bytes()
        return data != b"" and not data.endswith(b"\n")

    @contextmanager
    def holder(self, kind: str) -> Iterator[subprocess.Popen[bytes]]:
        """A process of this kind that holds the registry lock until it is killed."""
        held = ["lock-hold", "600"] if kind == "foreign" else []
        argv = [str(FOREIGN), *held] if held else [sys.executable, "-c", HOLD_THE_REGISTRY]
        process = self.start(argv, "holder")
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert self.lock.read_text().split(":")[4] == str(process.pid)
        yield process
        process.kill()
        process.communicate()

    def dead_holder(self, kind: str) -> str:
        """The record of a holder that was killed, whose lock is still there."""
        with self.holder(kind):
            record = self.lock.read_text()
        assert self.lock.read_text() == record
        return record.rstrip("\n")

    def marker(self, record: str) -> Path:
        return self.world.home / (".registry.lock.reclaim." + record.replace(":", "."))

    def registry(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.world.home / "registry.json").read_text())
        return loaded

    def lines(self, handle: str) -> list[dict[str, Any]]:
        """The whole lines of an inbox; each of them must be one JSON object."""
        whole, _, _ = self.world.inbox(handle).read_bytes().rpartition(b"\n")
        return [json.loads(line) for line in whole.split(b"\n")] if whole else []

    def cursor(self, handle: str) -> Path:
        return self.world.home / "read" / f"{handle}.cursor"

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def foreign() -> None:
    """What the foreign client needs."""
    for name, package in TOOLS.items():
        tools.require_tool(name, package)


@pytest.fixture
def both(world: World, foreign: None) -> Iterator[Both]:
    made = Both(world)
    try:
        yield made
    finally:
        made.close()


def answer_of(process: subprocess.Popen[bytes], stdin: bytes = b"") -> Answer:
    out, err = process.communicate(stdin, timeout=120)
    return Answer(process.returncode, out.decode(), err.decode())


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited 30 s"
        time.sleep(0.005)


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether it stands still at a SIGSTOP (proc_pid_stat(5))."""
    assert process.poll() is None
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


FLOCK_NUMBERS = {"x86_64": "73", "aarch64": "32"}
"""As proc_pid_syscall(5) shows a blocked call (syscalls(2))."""


def someone_waits(path: Path) -> bool:
    """Whether a process is blocked on a file's lock now: in flock(2), by its call and the descriptor's file.

    Not by proc_locks(5), which in a pid namespace shows no lock whose taker has ended, as flock(1) has.
    """
    number = FLOCK_NUMBERS.get(os.uname().machine)
    if number is None:
        tools.skip_or_fail(f"needs the number of flock(2) on {os.uname().machine}")
    inode = path.stat().st_ino
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            tasks = os.listdir(f"/proc/{process}/task")
        except OSError:
            continue  # it has just ended
        for task in tasks:
            place = Path(f"/proc/{process}/task/{task}")
            try:
                words = (place / "syscall").read_text().split()
                if words[0] == number and (place / "fd" / str(int(words[1], 16))).stat().st_ino == inode:
                    return True
            except (OSError, IndexError):
                continue  # another user's, or it has just ended
    return False


def as_shown(lines: list[dict[str, Any]]) -> str:
    """What a poll prints of these lines (control characters apart)."""
    return "".join(f"[{line['ts']}] [{line['from']}:{line['repo']}] {line['msg']}\n" for line in lines)


def hashed(data: bytes) -> str:
    """The cursor that a poll leaves after it has shown all of an inbox: its hash is cksum(1)'s."""
    *_, last, rest = data.split(b"\n")
    assert rest == b""
    done = subprocess.run(["cksum"], input=last.replace(b"\0", b""), capture_output=True, check=True)
    crc, length = done.stdout.split()
    total = data.count(b"\n")
    return f"{total} {crc.decode()}-{length.decode()}"


# --- mail ------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("S50")
@pytest.mark.parametrize("text", ["hello", ODD_TEXT.rstrip(), "@box -n --broadcast", "x" * 70_000], ids=lambda t: t[:5])
def test_both_write_the_same_bytes_for_the_same_message(both: Both, text: str) -> None:
    both.ok("sotbus", "join", "a")
    both.ok("foreign", "join", "box")
    for kind in KINDS:
        assert both.ok(kind, "send", "a", "box", text) == FILED
    ours, theirs, end = both.world.inbox("box").read_bytes().split(b"\n")
    assert end == b""
    expected = {"from": "a", "to": "box", "repo": "a", "msg": text, "ts": json.loads(ours)["ts"]}
    assert ours == json.dumps(expected, ensure_ascii=False, separators=(",", ":")).encode()
    stamp = re.compile(rb'"ts":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"}$')
    assert stamp.search(theirs)
    assert stamp.sub(b"", ours) == stamp.sub(b"", theirs)


SENDERS = 4
SENDS = {"sotbus": 25, "foreign": 8}
"""A foreign send takes many times the processor time of one of ours, most of it in its wait for the registry lock."""


def sends(both: Both, kind: str, sender: str) -> list[tuple[str, bool, Answer]]:
    """Many sends to @box, one after the other; a foreign one now and then pauses, or dies, in mid-line."""
    made = []
    for n in range(SENDS[kind]):
        text = f"{sender} {n} " + ODD_TEXT.replace("\x01\x1f", "") * (40 * (n % 4))
        dies = kind == "foreign" and n % 6 == 4
        env = {"FOREIGN_DIE_HALF": "1"} if dies else {"FOREIGN_HALF_SECS": "0.1"} if n % 6 == 2 else {}
        made.append((text, dies, both.run(kind, "send", sender, "box", text, **(PATIENT | env))))
    return made


def polls(both: Both, kind: str, done: threading.Event, **env: str) -> str:
    """Everything that polls of this kind show of @box, until after all is sent."""
    shown = ""
    while True:
        last = done.wait(2)
        answer = both.run(kind, "poll", "box", **env)
        if answer.status == 75:
            assert answer.out == BUSY
            continue
        assert (answer.status, answer.err) == (0, ""), answer
        if answer.out != NOTHING_NEW:
            shown += answer.out
        if last:
            return shown


@pytest.mark.spec("S5", "S55", "S56", "S103")
def test_writers_and_readers_of_both_kinds_at_once_lose_and_tear_nothing(both: Both) -> None:
    both.ok("sotbus", "join", "box")
    senders = [(kind, f"{kind}{n}") for kind in KINDS for n in range(SENDERS)]
    for kind, sender in senders:
        both.ok(kind, "join", sender)
    # The second reader has a cursor of its own: a folder that shares nothing but the inboxes.
    second = both.world.base / "second"
    (second / "read").mkdir(parents=True)
    (second / "inbox").symlink_to(both.world.home / "inbox")
    done = threading.Event()
    with ThreadPoolExecutor(len(senders) + 2) as pool:
        try:
            reading = [
                pool.submit(polls, both, "sotbus", done),
                pool.submit(polls, both, "foreign", done, SOT_COMM_HOME=str(second)),
            ]
            sending = [pool.submit(sends, both, kind, sender) for kind, sender in senders]
            sent = [one for future in sending for one in future.result()]
        finally:
            done.set()
        by_sotbus, by_foreign = (future.result() for future in reading)

    for _, dies, answer in sent:
        assert (answer.status, answer.out) == ((-signal.SIGKILL, "") if dies else (0, FILED)), answer
    lines = both.lines("box")
    found = [line["msg"] for line in lines]
    assert sorted(found) == sorted(text for text, dies, _ in sent if not dies)
    for _, sender in senders:
        own = [int(text.split()[1]) for text in found if text.startswith(f"{sender} ")]
        assert own == sorted(own), f"{sender}'s lines are out of order"
    # Each torn tail was cut, and told, by the next writer, whichever kind it was.
    told = sum("note: cut " in answer.err for _, _, answer in sent)
    assert told + both.torn("box") == sum(dies for _, dies, _ in sent)
    assert by_sotbus == as_shown(lines)
    assert by_foreign == by_sotbus
    for kind in KINDS:
        assert both.ok(kind, "unread", "box") == f"{len(lines)} 0\n"


@each_kind
@pytest.mark.spec("S55", "S56")
def test_a_tail_that_the_other_left_in_mid_line_is_cut_and_told(both: Both, kind: str) -> None:
    both.ok("sotbus", "join", "a")
    both.ok("sotbus", "join", "box")
    both.ok(kind, "send", "a", "box", "first")
    whole = both.world.inbox("box").read_bytes()
    with both.half_written(OTHER[kind], "a", "x" * 9000) as half:
        half.process.kill()
        half.process.communicate()
    torn = len(both.world.inbox("box").read_bytes()) - len(whole)
    assert torn > 4096
    assert both.ok(kind, "unread", "box") == "1 1\n"
    sent = both.run(kind, "send", "a", "box", "second")
    assert (sent.status, sent.out) == (0, FILED)
    assert sent.err == f"note: cut {torn} bytes of an unterminated line a dead writer left in @box's inbox\n"
    assert both.world.inbox("box").read_bytes().startswith(whole)
    assert [line["msg"] for line in both.lines("box")] == ["first", "second"]


@each_kind
@pytest.mark.spec("S55", "S73")
def test_a_poll_waits_for_the_line_that_the_other_is_writing_and_shows_it_whole(both: Both, kind: str) -> None:
    both.ok("sotbus", "join", "a")
    both.ok("sotbus", "join", "box")
    both.ok(kind, "send", "a", "box", "first")
    with both.half_written(OTHER[kind], "a", "ü" * 5000) as half:
        poll = both.begin(kind, "poll", "box", SOT_INBOX_READ_WAIT_SECS="60")
        until(lambda: someone_waits(both.world.home / "inbox" / "box.lock"))
        assert poll.poll() is None
        assert half.finish().out.endswith(FILED)
        shown = answer_of(poll)
    assert [line["msg"] for line in both.lines("box")] == ["first", "ü" * 5000]
    assert shown == (0, as_shown(both.lines("box")), "")
    assert both.cursor("box").read_text() == hashed(both.world.inbox("box").read_bytes())


@each_kind
@pytest.mark.spec("S55", "S72", "S73")
def test_a_reader_gives_up_at_its_bound_while_the_other_writes_and_leaves_the_cursor(both: Both, kind: str) -> None:
    both.ok("sotbus", "join", "a")
    both.ok("sotbus", "join", "box")
    both.ok(kind, "send", "a", "box", "first")
    both.ok(OTHER[kind], "poll", "box")
    before = (both.cursor("box").read_bytes(), both.cursor("box").stat().st_ino)
    with both.half_written(OTHER[kind], "a", "second") as half:
        began = time.monotonic()
        hint = "hint: run 'sotbus poll' again\n" if kind == "sotbus" else ""
        assert both.run(kind, "poll", "box", SOT_INBOX_READ_WAIT_SECS="0.3") == (75, BUSY, hint)
        assert time.monotonic() - began >= 0.3
        counted = both.run(kind, "unread", "box", SOT_INBOX_READ_WAIT_SECS="0.3")
        assert (counted.status, counted.out) == (75, "")
        assert (both.cursor("box").read_bytes(), both.cursor("box").stat().st_ino) == before
        assert both.torn("box")
        assert half.finish().out.endswith(FILED)
    assert both.ok(kind, "unread", "box") == "2 1\n"
    assert both.ok(kind, "poll", "box") == as_shown(both.lines("box")[1:])


@each_kind
@pytest.mark.spec("S58", "S59")
def test_a_send_gives_up_at_its_bound_while_the_other_writes_and_appends_nothing(both: Both, kind: str) -> None:
    both.ok("sotbus", "join", "a")
    both.ok("sotbus", "join", "box")
    with both.half_written(OTHER[kind], "a", "slow") as half:
        before = both.world.inbox("box").read_bytes()
        for bound, env in (("0.3", {"SOT_INBOX_LOCK_WAIT_SECS": "0.3"}), ("2", {})):
            began = time.monotonic()
            refused = both.run(kind, "send", "a", "box", "early", **env)
            assert time.monotonic() - began >= float(bound)
            reason = f"the inbox lock for @box was held for {bound}s — nothing was appended"
            assert refused == (1, "", f"FAILED -> @box: {reason}\n")
            assert both.world.inbox("box").read_bytes() == before
        late = both.begin(kind, "send", "a", "box", "late", SOT_INBOX_LOCK_WAIT_SECS="60")
        until(lambda: someone_waits(both.world.home / "inbox" / "box.lock"))
        assert half.finish().out.endswith(FILED)
    assert answer_of(late) == (0, FILED, "")
    assert [line["msg"] for line in both.lines("box")] == ["slow", "late"]


# --- the cursor ------------------------------------------------------------------------------------------------------


@pytest.mark.spec("S51", "S52", "S53", "S68", "S72")
def test_two_readers_of_one_inbox_go_on_exactly_where_the_other_stopped(both: Both) -> None:
    both.ok("sotbus", "join", "a")
    both.ok("sotbus", "join", "box")
    line = '{"from":"a","to":"%s","repo":"r","msg":"%s","ts":"2026-01-01T00:00:00Z"}'
    more = [
        ("", 0, ""),
        (line % ("box", "plain"), 1, "plain"),
        (line % ("box", "nul\0"), 0, "nul"),
        (line % ("", "broadcast"), 0, "broadcast"),
        ("no JSON", 0, ""),
        (line % ("box", "return") + "\r", 1, "return"),
        (line % ("other", "not mine"), 0, "not mine"),
    ]
    for turn, (raw, counts, text) in enumerate(more):
        reader, writer = KINDS[turn % 2], KINDS[turn // 2 % 2]
        before = both.world.inbox("box").read_bytes().count(b"\n")
        both.ok(writer, "send", "a", "box", f"turn {turn}")
        with both.world.inbox("box").open("ab") as file:
            file.write(raw.encode() + b"\n")
        for kind in KINDS:
            assert both.ok(kind, "unread", "box") == f"{before + 2} {1 + counts}\n"
        shown = both.ok(reader, "poll", "box")
        assert re.sub(r"^\[[^]]*\] \[[^]]*\] ", "", shown, flags=re.MULTILINE) == f"turn {turn}\n" + (
            text and f"{text}\n"
        )
        assert both.cursor("box").read_text() == hashed(both.world.inbox("box").read_bytes())
    for kind in KINDS:
        assert both.ok(kind, "poll", "box") == NOTHING_NEW


CURSORS: list[dict[str, Any]] = json.loads((VECTORS / "cursors.json").read_text())["cases"]


def answers_about(kind: str, case: dict[str, Any], base: Path) -> tuple[Answer, Answer, bytes | None]:
    """What this kind counts and polls in a folder with this inbox and this cursor, and the cursor after it."""
    base.mkdir()
    both = Both(World(base))
    home, handle, root = both.world.home, case["handle"], both.world.project(case["handle"])
    for folder in ("inbox", "read", "self"):
        (home / folder).mkdir(parents=True)
    (home / "self" / f"pin-{handle}.txt").write_text(f"{handle}\nrepo={root.name}\nroot={root}\n")
    (home / "registry.json").write_text("?")  # nothing to touch after a poll, which saves a third of the time
    both.world.inbox(handle).write_bytes(case["inbox"].encode())
    cursor = both.cursor(handle)
    if case["cursor"] is not None:
        cursor.write_bytes(case["cursor"].encode())
    counted = both.run(kind, "unread", handle)
    shown = both.run(kind, "poll", handle)
    return counted, shown, cursor.read_bytes() if cursor.exists() else None


@pytest.mark.parametrize("case", CURSORS, ids=lambda case: str(case["name"]))
@pytest.mark.spec("S68", "S69", "S70", "S71")
def test_both_give_one_answer_for_every_form_of_cursor(tmp_path: Path, foreign: None, case: dict[str, Any]) -> None:
    with ThreadPoolExecutor(len(KINDS)) as pool:
        ours, theirs = pool.map(lambda kind: answers_about(kind, case, tmp_path / kind), KINDS)
    assert ours == theirs
    counted, shown, cursor = ours
    note = f"note: the last line read from @{case['handle']}'s inbox was cut back; reading from the line before it\n"
    note = note if case["note"] else ""
    assert counted == (0, f"{case['total']} {case['unread']}\n", note)
    assert (shown.status, shown.err) == (0, note)
    if case["offset"] == case["total"]:
        assert shown.out == NOTHING_NEW
        assert cursor == (None if case["cursor"] is None else case["cursor"].encode())
    else:
        whole, newline, _ = case["inbox"].encode().rpartition(b"\n")
        assert cursor == hashed(whole + newline).encode()


# --- the registry ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("S5", "S94", "S95")
def test_each_lists_the_other_writes_to_it_and_sees_it_leave(both: Both) -> None:
    both.ok("foreign", "join", "theirs")
    joined = both.ok("sotbus", "join", "ours")
    assert joined.endswith("Others registered: theirs\n")
    listed = {row["handle"]: row for row in json.loads(both.world.sotbus("ours", "list", "--json").stdout)}
    assert set(listed) == {"ours", "theirs"}
    assert (listed["theirs"]["live"], listed["theirs"]["host"]) == (True, "vm")
    assert listed["theirs"]["root"] == str(both.world.project("theirs").resolve())
    assert (listed["ours"]["me"], listed["theirs"]["me"]) == (True, False)
    assert both.ok("sotbus", "send", "ours", "theirs", "to them") == "  filed -> @theirs\n"
    assert both.ok("foreign", "poll", "theirs").endswith("] [ours:ours] to them\n")
    assert both.ok("foreign", "send", "theirs", "ours", "to us") == "  filed -> @ours\n"
    assert both.ok("sotbus", "poll", "ours").endswith("] [theirs:theirs] to us\n")
    both.ok("foreign", "leave", "theirs")
    gone = "FAILED -> @{0}: no box knows that handle: {0}\n"
    assert both.run("sotbus", "send", "ours", "theirs", "x") == (1, "", gone.format("theirs"))
    both.ok("sotbus", "leave", "ours")
    assert both.run("foreign", "send", "theirs", "ours", "x") == (1, "", gone.format("ours"))
    assert both.registry()["agents"] == {}


@each_kind
@pytest.mark.spec("S16", "S17", "S22", "S103")
def test_a_join_a_touch_and_a_leave_keep_all_that_the_other_put_there(both: Both, kind: str) -> None:
    both.ok(OTHER[kind], "join", "kept")
    both.ok(kind, "join", "mine")
    document = both.registry()
    document["added"] = {"n": [1, 2.5, None, True], "ü": "☃"}
    document["agents"]["kept"] |= {"state": "working", "summary": "s", "more": {"deep": [{}, []]}}
    document["agents"]["mine"] |= {"stop_at": "2026-01-01T00:00:00Z", "last_seen": "2026-01-01T00:00:00Z"}
    document["agents"]["odd"] = 5
    (both.world.home / "registry.json").write_text(json.dumps(document, indent=2) + "\n")

    both.ok(kind, "poll", "mine")
    touched = both.registry()
    assert touched["agents"]["mine"]["last_seen"] > "2026-01-01T00:00:00Z"
    document["agents"]["mine"]["last_seen"] = touched["agents"]["mine"]["last_seen"]
    assert json.dumps(touched) == json.dumps(document)
    both.ok(kind, "join", "third")
    joined = both.registry()
    assert joined["agents"].pop("third")["status"] == "idle"
    assert json.dumps(joined) == json.dumps(document)
    both.ok(kind, "leave", "third")
    assert json.dumps(both.registry()) == json.dumps(document)
    both.ok(kind, "join", "mine")
    assert "stop_at" not in both.registry()["agents"]["mine"]
    assert both.registry()["agents"]["kept"] == document["agents"]["kept"]


@pytest.mark.spec("S22", "S37")
def test_a_hundred_registry_writes_of_both_at_once_lose_nothing(both: Both) -> None:
    both.ok("foreign", "join", "first")
    both.ok("sotbus", "join", "last")

    joins = {"sotbus": 24, "foreign": 10}

    def write(kind: str, name: str) -> list[Answer]:
        """Joins, and of every second one the leave."""
        made = []
        for n in range(joins[kind]):
            made.append(both.run(kind, "join", f"{name}-{n}", **PATIENT))
            if n % 2:
                made.append(both.run(kind, "leave", f"{name}-{n}", **PATIENT))
        return made

    writers = [(kind, f"{kind}{n}") for kind in KINDS for n in range(2)]
    with ThreadPoolExecutor(len(writers)) as pool:
        answers = [answer for made in pool.map(write, *zip(*writers, strict=True)) for answer in made]
    assert len(answers) >= 100
    assert {(answer.status, answer.err) for answer in answers} == {(0, "")}
    stays = {f"{name}-{n}" for kind, name in writers for n in range(0, joins[kind], 2)}
    assert set(both.registry()["agents"]) == {"first", "last"} | stays
    left = {path.name for path in both.world.home.iterdir() if ".reclaim." not in path.name}
    assert left == {"inbox", "read", "registry.json", "self"}


# --- the registry lock -----------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.spec("S36", "S39", "S44", "S47", "S48")
def test_a_join_names_the_other_that_holds_the_lock_and_writes_nothing(both: Both, kind: str) -> None:
    both.ok(OTHER[kind], "join", "there")
    before = (both.world.home / "registry.json").read_bytes()
    with both.holder(OTHER[kind]) as process:
        record = both.lock.read_text()
        name, _, _, _, pid, start = record.rstrip("\n").split(":")
        assert (name, pid) == ("vm", str(process.pid))
        os.kill(process.pid, signal.SIGSTOP)  # frozen is not dead
        began = time.monotonic()
        refused = both.run(kind, "join", "new", SOT_LOCK_WAIT_SECS="0.5")
        assert time.monotonic() - began >= 0.5
        assert both.lock.read_text() == record
    said = re.sub(r"\(\d+s old\)", "(<age> old)", refused.err)
    assert (refused.status, refused.out, said) == (
        1,
        "",
        f"FAILED: registry lock {both.lock} is held by vm pid {pid} start {start} (<age> old): it is running. "
        "If it is dead, run any comm command on vm.\n",
    )
    assert (both.world.home / "registry.json").read_bytes() == before
    assert not both.world.inbox("new").exists()


@each_kind
@pytest.mark.spec("S38", "S40")
def test_a_lock_that_the_other_died_with_is_reclaimed_at_the_first_failed_take(both: Both, kind: str) -> None:
    both.ok("sotbus", "join", "there")
    dead = both.dead_holder(OTHER[kind])
    began = time.monotonic()
    both.ok(kind, "join", "new", SOT_LOCK_WAIT_SECS="0")
    assert 1 <= time.monotonic() - began < 30
    assert set(both.registry()["agents"]) == {"there", "new"}
    assert both.marker(dead).read_text().split(":")[0] == "vm"
    assert not both.lock.exists()


@each_kind
@pytest.mark.spec("S40", "S42")
def test_a_reclaim_that_the_other_died_in_is_passed(both: Both, kind: str) -> None:
    both.ok("sotbus", "join", "there")
    for _ in range(10):
        dead = both.dead_holder(kind)
        reclaimer = both.begin(OTHER[kind], "join", "never")
        until(both.marker(dead).exists)
        reclaimer.kill()
        reclaimer.communicate()
        if both.lock.exists() and both.lock.read_text() == dead + "\n":
            break
        both.run(kind, "leave", "never")  # this process stood still for its whole settle: once more
    assert both.lock.read_text() == dead + "\n", "no reclaim was killed in its settle"
    second = both.marker(dead).read_text().rstrip("\n")
    assert second.split(":")[4] == str(reclaimer.pid)
    both.ok(kind, "join", "new")
    assert set(both.registry()["agents"]) == {"there", "new"}
    assert both.marker(second).exists()
    assert both.marker(dead).read_text() == second + "\n"
    assert not both.lock.exists()


def race(both: Both, dead_kind: str) -> None:
    """Two waiters of each kind on one dead holder, in a folder of their own."""
    both.ok("sotbus", "join", "there")
    base = both.world.base
    critical, alone, mv = base / "critical", base / "bin" / "alone", base / "bin" / "mv"
    alone.parent.mkdir()
    alone.write_text(ALONE)
    # The foreign client's one use of mv in a join is under the registry lock.
    mv.write_text(f'#!/bin/sh\nsh "$ALONE"\nexec {shutil.which("mv")} "$@"\n')
    mv.chmod(0o700)
    env = {
        "ALONE": str(alone),
        "CRITICAL": str(critical),
        "PATH": f"{mv.parent}:{os.environ['PATH']}",
        "SOT_LOCK_WAIT_SECS": "60",
    }
    program = {"foreign": both.program("foreign"), "sotbus": [sys.executable, "-c", JOIN_ALONE, str(ENTRY)]}
    dead = both.dead_holder(dead_kind)
    handles = [(kind, f"{kind}{n}") for n in range(2) for kind in KINDS]
    waiters = [both.start([*program[kind], *both.words(kind, "join", name)], name, **env) for kind, name in handles]
    answers = [answer_of(waiter) for waiter in waiters]
    assert [(answer.status, answer.err) for answer in answers] == [(0, "")] * 4
    assert set(both.registry()["agents"]) == {"there", *(name for _, name in handles)}
    assert both.marker(dead).read_text().split(":")[4] in {str(waiter.pid) for waiter in waiters}
    assert len(critical.with_suffix(".entered").read_text().split()) == 4
    assert not critical.with_suffix(".twice").exists(), "two were inside at once"
    assert not both.lock.exists()


@pytest.mark.spec("S36", "S40", "S41")
def test_waiters_of_both_kinds_on_a_dead_holder_are_never_two_at_once_inside(tmp_path: Path, foreign: None) -> None:
    folders = []
    for turn in range(5):
        (tmp_path / str(turn)).mkdir()
        folders.append(Both(World(tmp_path / str(turn))))
    try:
        with ThreadPoolExecutor(len(folders)) as pool:
            list(pool.map(race, folders, [KINDS[turn % 2] for turn in range(5)]))
    finally:
        for both in folders:
            both.close()
