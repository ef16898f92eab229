"""``sotbus prune``: what goes, that every count and hash stays right, and that nobody at work meanwhile loses mail."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tools
from hypothesis import given, settings
from hypothesis import strategies as st
from world import ENTRY, MACHINE, World

from sotbus import message
from sotbus.cli import upkeep
from sotbus.comm import cursor, folder, offset_hint, prune_plan, pruning, reading
from sotbus.comm.client import Client
from sotbus.comm.inbox import Inbox, look
from sotbus.comm.lock_manager import FlockManager
from sotbus.comm.settings import Settings
from sotbus.errors import FolderError, InboxBusy

NOW = 1_800_000_000.0
DAY_S = 86_400
LOCAL = f"local {MACHINE}"
OLD = message.stamp(NOW - 2 * DAY_S)
FOREIGN = Path(__file__).parents[1] / "interop" / "foreign_comm.sh"
FOREIGN_TOOLS = {"bash": "bash", "jq": "jq", "flock": "util-linux", "cksum": "coreutils"}

NFS = "22 1 0:40 / / rw - nfs4 filer.example:/home rw,vers=4.2,local_lock=none\n"
OVERLAY = "22 1 0:40 / / rw - overlay overlay rw\n"


def line(text: str, ts: str = OLD, to: str = "a-vm") -> bytes:
    return message.encode("z-vm", to, "z", text, ts)


def lines(count: int, what: str = "m", ts: str = OLD) -> list[bytes]:
    return [line(f"{what}{n}", ts) for n in range(count)]


class Mailbox:
    """@a-vm's mail: laid as a test says, read as a poll does, pruned by a client whose clock is told."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.client = world.client("a", now=NOW)
        self.client.ensure()
        self.inbox = world.inbox("a-vm")
        self.cursor = Path(world.folder.cursor("a-vm"))

    def lay(self, shown: Sequence[bytes], unread: Sequence[bytes] = (), tail: bytes = b"") -> bytes:
        """An inbox whose first lines a poll has shown; answers its bytes."""
        data = b"".join([*shown, *unread]) + tail
        self.inbox.write_bytes(data)
        self.inbox.chmod(0o600)
        self.cursor.write_bytes(cursor.written_form(len(shown), shown[-1][:-1] if shown else b""))
        return data

    def prune(self) -> prune_plan.Plan:
        return pruning.prune(self.client, "a-vm")

    def poll(self) -> list[str]:
        """The texts that a poll shows now."""
        seen = reading.look_at(self.client, "a-vm", self.world.notes.append)
        reading.advance(self.client, "a-vm", seen)
        return texts(seen.lines)

    def append(self, data: bytes) -> None:
        Inbox(self.world.folder, "a-vm", FlockManager(LOCAL)).append(data, 5)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.inbox.parent.iterdir())


def texts(found: Sequence[bytes]) -> list[str]:
    values = (message.parse(one) for one in found)
    return [value["msg"] for value in values if value is not None]


@pytest.fixture
def mailbox(world: World) -> Mailbox:
    return Mailbox(world)


# What goes and what stays


def test_every_shown_line_but_the_last_becomes_a_bare_newline(mailbox: Mailbox) -> None:
    shown, unread = lines(4), lines(2, "new")
    before = mailbox.lay(shown, unread, b'{"torn":')
    text = mailbox.cursor.read_bytes()
    plan = mailbox.prune()
    assert mailbox.inbox.read_bytes() == b"\n\n\n" + shown[3] + b"".join(unread) + b'{"torn":'
    assert (plan.done, plan.lines, plan.shown, plan.pruned, plan.size) == (True, 6, 4, 3, len(before))
    assert plan.freed == len(before) - mailbox.inbox.stat().st_size
    assert mailbox.cursor.read_bytes() == text
    assert mailbox.inbox.stat().st_mode & 0o777 == 0o600
    assert mailbox.names() == ["a-vm.jsonl", "a-vm.lock"]
    assert mailbox.poll() == ["new0", "new1"]


def test_lines_of_the_last_day_and_lines_whose_time_cannot_be_told_stay(mailbox: Mailbox) -> None:
    goes = line("goes", message.stamp(NOW - DAY_S - 1))
    stays = [
        line("a day old to the second", message.stamp(NOW - DAY_S)),
        line("ahead", message.stamp(NOW + 999)),
        line("no stamp", "yesterday"),
        line("no calendar", "2020-13-45T00:00:00Z"),
        b'{"msg":"no ts"}\n',
        b"no json\n",
        b"[1]\n",
    ]
    last = line("last")
    mailbox.lay([goes, *stays, goes, last])
    plan = mailbox.prune()
    assert mailbox.inbox.read_bytes() == b"\n" + b"".join(stays) + b"\n" + last
    assert (plan.pruned, plan.recent, plan.undated) == (2, 2, 5)


def test_a_second_prune_finds_nothing_and_writes_nothing(mailbox: Mailbox) -> None:
    mailbox.lay(lines(3), lines(1, "new"))
    assert mailbox.prune().done
    before = mailbox.inbox.stat()
    plan = mailbox.prune()
    assert (plan.done, plan.freed, plan.lines) == (False, 0, 4)
    after = mailbox.inbox.stat()
    assert (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns)


@pytest.mark.parametrize(
    ("text", "kept_from"),
    [
        ("", 0),
        ("oops", 0),
        ("0", 0),
        ("9 1-1", 0),  # past the end: everything is new
        ("3", 2),  # a bare count
        ("3 1-1", 1),  # its line was cut back: a reader steps back one
        ("6 1-1", 4),  # one past the end
    ],
)
def test_what_goes_is_what_a_poll_by_that_cursor_would_not_show(mailbox: Mailbox, text: str, kept_from: int) -> None:
    all_lines = lines(5)
    mailbox.lay(all_lines)
    mailbox.cursor.write_text(text)
    expected = look(str(mailbox.inbox), cursor.Cursor.parse(text))
    mailbox.prune()
    assert mailbox.inbox.read_bytes() == b"\n" * kept_from + b"".join(all_lines[kept_from:])
    found = look(str(mailbox.inbox), cursor.Cursor.parse(text))
    assert (found.offset, found.total, found.lines) == (expected.offset, expected.total, expected.lines)


def test_an_inbox_read_by_time_is_left_alone_until_a_poll_has_counted_it(mailbox: Mailbox) -> None:
    data = mailbox.lay(lines(3))
    mailbox.cursor.write_text(OLD)
    plan = mailbox.prune()
    assert plan.skipped.startswith("its cursor is a time")
    assert (mailbox.inbox.read_bytes(), mailbox.cursor.read_text()) == (data, OLD)
    mailbox.append(line("later", message.stamp(NOW - 1)))
    assert mailbox.poll() == ["later"]
    assert mailbox.prune().pruned == 3


def test_an_inbox_that_is_a_link_is_left_alone(mailbox: Mailbox, tmp_path: Path) -> None:
    mailbox.lay(lines(3))
    mailbox.inbox.rename(tmp_path / "elsewhere")
    mailbox.inbox.symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in mailbox.prune().skipped
    assert mailbox.inbox.is_symlink()


@settings(deadline=None, max_examples=200)
@given(
    choices=st.lists(st.sampled_from([line("old"), line("now", message.stamp(NOW)), b"\n", b"junk\n"]), max_size=14),
    count=st.integers(0, 14),
    block=st.sampled_from([1, 7, 1 << 20]),
    tail=st.sampled_from([b"", b"torn"]),
)
def test_counts_and_hashes_are_right_for_every_cursor_that_there_may_be(
    tmp_path_factory: pytest.TempPathFactory, choices: list[bytes], count: int, block: int, tail: bytes
) -> None:
    """The cursor itself, and the ones that a poll in flight may still write: all from it up to the end."""
    mailbox = Mailbox(World(tmp_path_factory.mktemp("prune")))
    count = min(count, len(choices))
    mailbox.lay(choices[:count], choices[count:], tail)
    text = mailbox.cursor.read_text()
    later = [cursor.written_form(n, choices[n - 1][:-1]).decode() for n in range(max(count, 1), len(choices) + 1)]
    path = str(mailbox.inbox)
    before = [look(path, cursor.Cursor.parse(one)) for one in (text, *later)]
    with pytest.MonkeyPatch.context() as patch:
        for module in (pruning, prune_plan):
            patch.setattr(module, "FORWARD_BLOCK_BYTES", block)
        plan = mailbox.prune()
    after = [look(path, cursor.Cursor.parse(one)) for one in (text, *later)]
    facts = [(one.offset, one.total, one.lines, one.cut_back, one.last) for one in before]
    assert [(one.offset, one.total, one.lines, one.cut_back, one.last) for one in after] == facts
    data = mailbox.inbox.read_bytes()
    assert data.endswith(tail)
    assert len(data) == len(b"".join(choices) + tail) - plan.freed
    kept = [one for one in choices if one.strip() and one != line("old")]
    assert [one + b"\n" for one in data.split(b"\n") if one + b"\n" in kept] == kept


# Where a prune may not be


@pytest.mark.parametrize(
    ("mounts", "machine", "why"),
    [
        (NFS, MACHINE, "under nfs4 filer.example:/home, where another box may go on opening a replaced file for 30 s"),
        (OVERLAY, MACHINE, f"under none@{MACHINE}, a mount whose locks are not known to exclude every writer"),
        (OVERLAY, None, "this hub has no machine id"),
    ],
)
def test_only_a_local_lock_manager_lets_an_inbox_be_replaced(
    world: World, mounts: str, machine: str | None, why: str
) -> None:
    mailbox = Mailbox(world)
    data = mailbox.lay(lines(3))
    world.mountinfo.write_text(mounts)
    client = world.client("a", now=NOW, box=world.box(machine=machine))
    for work in (pruning.survey, pruning.prune):
        with pytest.raises(FolderError) as refused:
            work(client, "a-vm")
        assert str(refused.value).startswith("FAILED: ")
        assert why in str(refused.value)
        assert str(refused.value).endswith("; nothing was pruned")
    assert mailbox.inbox.read_bytes() == data
    assert mailbox.names() == ["a-vm.jsonl"]
    assert not Path(world.folder.manager_record).exists()


def test_a_folder_whose_record_names_another_manager_is_refused(mailbox: Mailbox) -> None:
    data = mailbox.lay(lines(3))
    Path(mailbox.world.folder.manager_record).write_text("local other\nother\n")
    with pytest.raises(FolderError, match="written by machine other"):
        mailbox.prune()
    assert mailbox.inbox.read_bytes() == data


def test_an_inbox_lock_that_is_held_is_waited_for_and_then_told(mailbox: Mailbox) -> None:
    data = mailbox.lay(lines(3))
    mailbox.client.settings = Settings(inbox_lock_wait_s=0.05, inbox_read_wait_s=5)
    with open(mailbox.world.folder.inbox_lock("a-vm"), "w+") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with pytest.raises(InboxBusy, match="being written — nothing was pruned") as busy:
            mailbox.prune()
        assert busy.value.exit_status == 75
        fcntl.flock(lock, fcntl.LOCK_EX)
        mailbox.client.settings = Settings(inbox_read_wait_s=0.05)
        with pytest.raises(InboxBusy):
            pruning.survey(mailbox.client, "a-vm")
    assert mailbox.inbox.read_bytes() == data
    assert mailbox.names() == ["a-vm.jsonl", "a-vm.lock"]


# Failures


class FailingError(OSError):
    """The disk's answer."""

    def __init__(self, code: int) -> None:
        super().__init__(code, os.strerror(code))


def failing(work: Callable[..., Any], calls_before: int, code: int = errno.EIO) -> Callable[..., Any]:
    """A system call that fails once, after it has worked so often."""
    left = [calls_before]

    def call(*args: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise FailingError(code)
        return work(*args, **more)

    return call


@pytest.mark.parametrize(
    ("name", "calls_before", "code"),
    [
        ("write", 0, errno.ENOSPC),
        ("write", 1, errno.ENOSPC),  # under the lock, what was filed meanwhile
        ("fsync", 0, errno.EIO),
        ("fsync", 1, errno.EIO),  # under the lock
        ("fsync", 2, errno.EIO),  # the folder's, after the rename
        ("link", 0, errno.EPERM),
        ("rename", 0, errno.EIO),
    ],
)
def test_a_disk_that_is_full_or_fails_leaves_the_inbox_as_it_was_and_no_temp_file(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch, name: str, calls_before: int, code: int
) -> None:
    data = mailbox.lay(lines(3), lines(1, "new"), b"torn, so that something is left to copy under the lock")
    mailbox.client.writer_gate.manager()  # the record is there by now
    inode = mailbox.inbox.stat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing(getattr(os, name), calls_before, code))
        with pytest.raises(FolderError) as failed:
            mailbox.prune()
    why = os.strerror(code)
    assert str(failed.value) == f"FAILED: the inbox of @a-vm could not be pruned ({why}); it is what it was before"
    assert (mailbox.inbox.read_bytes(), mailbox.inbox.stat().st_ino) == (data, inode)
    assert mailbox.names() == ["a-vm.jsonl", "a-vm.lock"]
    mailbox.append(line("later"))
    assert mailbox.poll() == ["new0", "later"]
    assert mailbox.prune().done


def test_an_interrupt_takes_the_temp_file_along(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    data = mailbox.lay(lines(3))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pruning, "sync_folder", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mailbox.prune()
    assert mailbox.inbox.read_bytes() == data
    assert mailbox.names() == ["a-vm.jsonl", "a-vm.lock"]


def test_what_a_killed_prune_left_is_swept_and_a_living_ones_temp_file_is_not(mailbox: Mailbox) -> None:
    mailbox.lay(lines(1))
    inbox = mailbox.inbox
    for name in ("a-vm.jsonl.prune.1.2", "a-vm.jsonl.prune.1.2.old", "a-vm.jsonl.prune.3.4"):
        (inbox.parent / name).write_bytes(b"x")
    others = ["a-vm.jsonl.prune.1.2.jsonl", "a-vm.jsonl.prune.1.2.lock", "a-vm.jsonl.prune.x.2", "b-vm.jsonl.prune.1.2"]
    for name in others:
        (inbox.parent / name).write_bytes(b"x")
    with open(inbox.parent / "a-vm.jsonl.prune.3.4") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        assert not mailbox.prune().done
    assert mailbox.names() == sorted(["a-vm.jsonl", "a-vm.lock", "a-vm.jsonl.prune.3.4", *others])


# Others at work


def at_the_lock(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
    """Have something happen once while a prune holds the inbox's lock, just before its rename is synced."""
    sync = folder.sync_folder

    def hooked(path: str) -> None:
        monkeypatch.setattr(pruning, "sync_folder", sync)
        meanwhile()
        sync(path)

    monkeypatch.setattr(pruning, "sync_folder", hooked)


def before_the_lock(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """Have something happen once after a prune has written its temp file and before it takes the inbox's lock."""
    locked = pruning._locked

    def hooked(client: Client, handle: str) -> Any:
        monkeypatch.setattr(pruning, "_locked", locked)
        meanwhile()
        return locked(client, handle)

    monkeypatch.setattr(pruning, "_locked", hooked)


def test_a_line_filed_between_the_copy_and_the_lock_is_in_the_new_inbox(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = lines(3)
    mailbox.lay(shown, lines(1, "new"), b"torn")
    before_the_lock(monkeypatch, lambda: mailbox.append(line("meanwhile")))
    assert mailbox.prune().done
    assert mailbox.inbox.read_bytes() == b"\n\n" + shown[2] + line("new0") + line("meanwhile")
    assert mailbox.poll() == ["new0", "meanwhile"]


def test_a_poll_that_looked_before_the_rename_and_moves_the_cursor_after_it_loses_and_repeats_nothing(
    mailbox: Mailbox,
) -> None:
    mailbox.lay(lines(4), lines(3, "new"))
    seen = reading.look_at(mailbox.client, "a-vm", mailbox.world.notes.append)
    assert mailbox.prune().pruned == 3
    mailbox.append(line("after"))
    assert texts(seen.lines) == ["new0", "new1", "new2"]
    reading.advance(mailbox.client, "a-vm", seen)
    assert mailbox.poll() == ["after"]
    assert mailbox.poll() == []
    assert mailbox.prune().pruned == 4
    assert mailbox.poll() == []


def test_a_slower_poll_that_sets_the_cursor_back_shows_again_only_what_another_poll_showed(mailbox: Mailbox) -> None:
    """As other clients may: ours leaves a cursor alone that went further."""
    mailbox.lay(lines(2), lines(3, "new"))
    slow = reading.look_at(mailbox.client, "a-vm", mailbox.world.notes.append)
    mailbox.append(line("late"))
    assert mailbox.poll() == ["new0", "new1", "new2", "late"]
    mailbox.append(line("unread"))
    assert mailbox.prune().pruned == 5
    mailbox.cursor.write_bytes(cursor.written_form(slow.total, slow.last))
    assert mailbox.poll() == ["late", "unread"]
    assert mailbox.poll() == []


def test_a_cursor_that_goes_back_before_the_lock_makes_the_plan_anew(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = lines(4)
    mailbox.lay(shown)
    before_the_lock(monkeypatch, lambda: mailbox.cursor.write_bytes(cursor.written_form(2, shown[1][:-1])))
    assert mailbox.prune().pruned == 1
    assert mailbox.inbox.read_bytes() == b"\n" + b"".join(shown[1:])
    assert mailbox.names() == ["a-vm.jsonl", "a-vm.lock"]


def test_two_prunes_at_once_are_as_good_as_one(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = lines(4)
    mailbox.lay(shown, lines(1, "new"))
    plans: list[prune_plan.Plan] = []
    before_the_lock(monkeypatch, lambda: plans.append(mailbox.prune()))
    plans.append(mailbox.prune())
    assert [plan.done for plan in plans] == [True, False]
    assert mailbox.inbox.read_bytes() == b"\n" * 3 + shown[3] + line("new0")
    assert mailbox.names() == ["a-vm.jsonl", "a-vm.lock"]


def test_the_hint_of_a_large_inbox_goes_with_it_and_an_old_one_misleads_nobody(mailbox: Mailbox) -> None:
    mailbox.lay([], [line("x" * 900 + str(n)) for n in range(100)])
    assert len(mailbox.poll()) == 100
    hint = Path(offset_hint.path_of(mailbox.world.folder, "a-vm"))
    old = hint.read_bytes()
    assert mailbox.prune().pruned == 99
    assert not hint.exists()
    hint.write_bytes(old)
    mailbox.append(line("new"))
    assert mailbox.poll() == ["new"]


class Others:
    """Other processes on the comm folder, all of which have ended when the test is over."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, session: str, *words: str) -> subprocess.Popen[bytes]:
        """A ``sotbus`` command of a session."""
        return self._start(session, [sys.executable, str(ENTRY), *words])

    def foreign(self, *words: str) -> subprocess.Popen[bytes]:
        for name, package in FOREIGN_TOOLS.items():
            tools.require_tool(name, package)
        return self._start("foreign", [str(FOREIGN), *words])

    def _start(self, session: str, argv: list[str]) -> subprocess.Popen[bytes]:
        told = {"FOREIGN_MOUNTINFO": str(self.world.mountinfo), "FOREIGN_MACHINE_ID": MACHINE}
        told |= {"SOT_COMM_SELF_FILE": str(self.world.home / "self" / f"pin-{session}.txt")}
        told |= dict.fromkeys(("SOT_LOCK_WAIT_SECS", "SOT_INBOX_LOCK_WAIT_SECS", "SOT_INBOX_READ_WAIT_SECS"), "60")
        process = subprocess.Popen(
            argv,
            cwd=self.world.project(session),
            env=self.world.environ(told),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def until_one_waits_at(self, path: str) -> None:
        """Until a process is blocked on a file's lock, as the kernel says (proc_locks(5))."""
        inode = f":{os.stat(path).st_ino} "
        end = time.monotonic() + 30
        while not any("->" in one and inode in one for one in Path("/proc/locks").read_text().splitlines()):
            assert time.monotonic() < end, "nobody came to the lock within 30 s"
            time.sleep(0.005)

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def others(world: World) -> Iterator[Others]:
    made = Others(world)
    yield made
    made.close()


def answer(process: subprocess.Popen[bytes], before: bytes = b"") -> str:
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    return (before + out).decode()


def as_polled(*found: bytes) -> str:
    values = (json.loads(one) for one in found)
    return "".join(f"[{value['ts']}] [z-vm:z] {value['msg']}\n" for value in values)


def joined(world: World) -> Mailbox:
    """@a-vm and @b-vm in the registry, with an account of @a-vm's mail."""
    for name in "ab":
        assert world.sotbus(name, "join").returncode == 0
    return Mailbox(world)


def poller(others: Others, kind: str) -> subprocess.Popen[bytes]:
    return others.foreign("poll", "a-vm") if kind == "foreign" else others.start("a", "poll")


@pytest.mark.parametrize("kind", ["sotbus", "foreign"])
def test_a_poll_of_another_process_is_in_flight_over_the_rename(world: World, others: Others, kind: str) -> None:
    """It has read its batch and shows it; the pipe is full, so it has not come to its cursor when the rename comes."""
    mailbox = joined(world)
    shown, unread = lines(5), [line("y" * 40_000 + str(n)) for n in range(40)]
    mailbox.lay(shown, unread)
    text = mailbox.cursor.read_bytes()
    process = poller(others, kind)
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)
    assert mailbox.prune().pruned == 4
    mailbox.append(line("after"))
    assert mailbox.cursor.read_bytes() == text
    assert answer(process, first) == as_polled(*unread)
    assert mailbox.cursor.read_bytes() == cursor.written_form(45, unread[-1][:-1])
    assert answer(poller(others, kind)) == as_polled(line("after"))
    assert answer(poller(others, kind)) == "No new messages.\n"


@pytest.mark.parametrize("kind", ["sotbus", "foreign"])
def test_a_poll_that_waits_for_the_lock_meanwhile_reads_the_new_inbox(
    world: World, others: Others, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    mailbox = joined(world)
    mailbox.lay(lines(5), lines(2, "new"))
    started: list[subprocess.Popen[bytes]] = []

    def meanwhile() -> None:
        started.append(poller(others, kind))
        others.until_one_waits_at(world.folder.inbox_lock("a-vm"))

    at_the_lock(monkeypatch, meanwhile)
    assert mailbox.prune().pruned == 4
    assert answer(started[0]) == as_polled(line("new0"), line("new1"))
    assert answer(poller(others, kind)) == "No new messages.\n"


@pytest.mark.parametrize("kind", ["sotbus", "foreign"])
def test_a_sender_that_waits_for_the_lock_meanwhile_files_into_the_new_inbox(
    world: World, others: Others, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    mailbox = joined(world)
    shown = lines(3)
    mailbox.lay(shown, lines(1, "new"))
    started: list[subprocess.Popen[bytes]] = []

    def meanwhile() -> None:
        if kind == "foreign":
            started.append(others.foreign("send", "b-vm", "a-vm", "waited"))
        else:
            started.append(others.start("b", "send", "@a-vm", "waited"))
        others.until_one_waits_at(world.folder.inbox_lock("a-vm"))

    at_the_lock(monkeypatch, meanwhile)
    assert mailbox.prune().done
    assert answer(started[0]) == "  filed -> @a-vm\n"
    assert mailbox.inbox.read_bytes().startswith(b"\n\n" + shown[2] + line("new0"))
    assert mailbox.poll() == ["new0", "waited"]


def test_both_kinds_of_reader_go_on_where_they_were_after_prunes_between_their_polls(
    world: World, others: Others
) -> None:
    mailbox = joined(world)
    mailbox.lay(lines(3))
    for turn in range(2):
        for kind in ("foreign", "sotbus"):
            mailbox.append(line(f"{kind} {turn}"))
            assert mailbox.prune().done
            assert answer(poller(others, kind)) == as_polled(line(f"{kind} {turn}"))
            assert answer(others.foreign("unread", "a-vm")).split()[1] == "0"


# The command


def test_the_command_says_what_would_go_and_does_it_only_when_told(world: World) -> None:
    mailbox = joined(world)
    shown, today = lines(3, ts="2020-01-01T00:00:00Z"), line("today", message.stamp())
    data = mailbox.lay([*shown, today, b"junk\n", shown[0]], [today])
    world.inbox("b-vm").write_bytes(b"")
    files = {path: path.read_bytes() for path in world.home.rglob("*") if path.is_file()}
    size, goes = len(data), sum(len(one) - 1 for one in shown)
    stays = "(1 read line of the last 24 h, 1 read line without a readable time stay)"
    done = world.sotbus("a", "prune")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"  @a-vm: 7 lines, {size} bytes; {goes} bytes of 3 read lines would go {stays}\n"
        "Nothing was changed; --yes does it.\n"
    )
    row = json.loads(world.sotbus("a", "prune", "@a-vm", "--json").stdout)[0]
    assert row == {
        "handle": "a-vm", "done": False, "lines": 7, "shown_lines": 6, "pruned_lines": 3, "recent_lines": 1,
        "undated_lines": 1, "bytes": size, "freed_bytes": goes, "skipped": None,
    }  # fmt: skip
    now = {path: path.read_bytes() for path in world.home.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert now == {path: data for path, data in files.items() if path.suffix != ".lock"}
    done = world.sotbus("a", "prune", "--all", "--yes")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"  @a-vm: 7 lines, {size} bytes; {goes} bytes of 3 read lines went {stays}\n"
        "  @b-vm: 0 lines, 0 bytes; nothing to prune\n"
    )
    assert mailbox.inbox.read_bytes() == b"\n\n\n" + today + b"junk\n" + shown[0] + today
    done = world.sotbus("a", "prune", "--yes")
    assert done.stdout == f"  @a-vm: 7 lines, {size - goes} bytes; nothing to prune {stays}\n"


def test_the_command_refuses_once_where_no_inbox_may_be_replaced(world: World) -> None:
    joined(world)
    world.mountinfo.write_text(NFS)
    done = world.sotbus("a", "prune", "--all")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("FAILED: the inboxes are under nfs4 filer.example:/home, ")
    assert done.stderr.count("\n") == 1


def test_an_inbox_that_is_held_does_not_keep_the_others_from_it(world: World) -> None:
    mailbox = joined(world)
    mailbox.lay(lines(3, ts="2020-01-01T00:00:00Z"))
    with open(world.folder.inbox_lock("a-vm"), "w+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = world.sotbus("a", "prune", "--all", "--json", env={"SOT_INBOX_READ_WAIT_SECS": "0"})
    assert done.returncode == 75
    busy, free = json.loads(done.stdout)
    assert busy["handle"] == "a-vm"
    assert busy["error"].startswith("the inbox for @a-vm is being written")
    assert (free["handle"], free["bytes"]) == ("b-vm", 0)


def test_wrong_words_are_usage_and_a_handle_that_is_nobodys_is_said(world: World) -> None:
    joined(world)
    assert world.sotbus("a", "prune", "@a-vm", "--all").returncode == 2
    done = world.sotbus("a", "prune", "@nosuch")
    assert (done.returncode, done.stderr) == (1, "no such handle: nosuch\nhint: sotbus list\n")
    assert world.sotbus("c", "prune").stderr.startswith("Not joined")


def test_a_box_without_a_comm_folder_has_nothing_to_prune(world: World) -> None:
    done = world.sotbus("a", "prune", "--all")
    assert (done.returncode, done.stdout, done.stderr) == (0, "There are no inboxes.\n", "")
    assert not world.home.exists()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_long_work_says_how_far_it_is_on_one_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, other = pty.openpty()
    clock = Clock()
    with os.fdopen(other, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        progress = upkeep.Progress(clock)
        progress("a-vm", 1, 100)  # too early to be worth a line
        clock.now = 1.0
        progress("a-vm", 50, 100)
        progress("a-vm", 51, 100)  # too soon after the one before
        clock.now = 2.0
        progress("a-vm", 9, 10)
        progress.clear()
        progress.clear()
    written = b"\r@a-vm: 50% of 100 bytes\r@a-vm: 90% of 10 bytes \r" + b" " * 22 + b"\r"
    seen = b""
    with suppress(OSError):  # EIO ends a terminal whose other side is closed
        while part := os.read(terminal, 1000):  # which hands over what it has, not all of it at once
            seen += part
    assert seen == written
    os.close(terminal)


def test_work_says_nothing_where_standard_error_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    clock = Clock()
    progress = upkeep.Progress(clock)
    clock.now = 9.0
    progress("a-vm", 1, 2)
    progress.clear()
    assert stderr.getvalue() == ""


def test_a_prune_of_many_blocks_tells_how_far_it_is(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [line("x" * 500, ts) for ts in (OLD, message.stamp(NOW)) for _ in range(20)]
    mailbox.lay(shown, shown)
    for module in (pruning, prune_plan):
        monkeypatch.setattr(module, "FORWARD_BLOCK_BYTES", 1000)
    told: list[tuple[str, int, int]] = []
    pruning.prune(mailbox.client, "a-vm", lambda *one: told.append(one))
    assert len(told) > 30
    total = sum(map(len, shown)) * 2
    assert all(handle == "a-vm" and 0 < done <= total == all_ for handle, done, all_ in told)
