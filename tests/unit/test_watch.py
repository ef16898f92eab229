"""The watch on a mailbox, by inotify and by looking; and the command that follows one."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from world import ENTRY, World

from sotbus import mailwatch
from sotbus.cli.watch import follow
from sotbus.comm.membership import join
from sotbus.comm.sending import Outbox
from sotbus.errors import SotbusError
from sotbus.mailwatch import MailWatch
from sotbus.mount_limits import Worker

NFS = "21 1 0:50 / / rw,relatime shared:1 - nfs4 server:/export rw,vers=4.2,local_lock=none\n"
OVERLAY = "21 1 0:50 / / rw,relatime shared:1 - overlay overlay rw\n"


@pytest.fixture
def inbox(world: World) -> Path:
    """An empty inbox of @b."""
    world.folder.ensure()
    world.inbox("b").touch()
    return world.inbox("b")


def watch_of(world: World) -> MailWatch:
    return MailWatch(world.folder, "b", world.box(), Worker(trio.CapacityLimiter(1), 5))


def append(path: Path, data: bytes = b"x\n") -> None:
    with path.open("ab") as file:
        file.write(data)


def open_files() -> list[str]:
    """What this process has open that a watch may open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in found if "inotify" in name or "/inbox/" in name]


class Waiting:
    """A wait in a task of its own."""

    def __init__(self, watch: MailWatch, nursery: trio.Nursery) -> None:
        self.over = trio.Event()
        self._watch = watch
        nursery.start_soon(self._wait)

    async def _wait(self) -> None:
        await self._watch.wait()
        self.over.set()

    async def woken(self) -> None:
        """Wait until it is over; the test's clock may stand still, so the machine's bounds this."""
        deadline = time.monotonic() + 20
        while not self.over.is_set():
            assert time.monotonic() < deadline, "nothing woke the wait"
            await trio.testing.wait_all_tasks_blocked(0.001)

    async def settled(self) -> bool:
        """Whether it is over by the time that all has come to rest, looks in their thread included."""
        while True:
            await trio.testing.wait_all_tasks_blocked()
            if self._watch._worker._turn.value:
                return self.over.is_set()
            await trio.to_thread.run_sync(int)


@contextmanager
def started(watch: MailWatch) -> Iterator[MailWatch]:
    try:
        yield watch
    finally:
        watch.close()


async def test_an_append_and_a_rename_into_place_wake_and_another_mailbox_does_not(
    world: World, inbox: Path, mock_clock: trio.testing.MockClock
) -> None:
    with started(watch_of(world)) as watch:
        await watch.wait()
        async with trio.open_nursery() as nursery:
            waiting = Waiting(watch, nursery)
            append(world.inbox("c"))
            append(Path(world.folder.inbox_lock("b")))
            assert not await waiting.settled()
            append(inbox)
            await waiting.woken()
            replaced = Waiting(watch, nursery)
            assert not await replaced.settled()
            new = inbox.with_suffix(".new")
            new.write_bytes(b"\nx\n")
            assert not await replaced.settled()
            new.rename(inbox)
            await replaced.woken()
            again = Waiting(watch, nursery)
            append(inbox)
            await again.woken()
        assert "inotify" in repr(watch)


async def test_what_is_filed_between_two_waits_is_not_slept_through(
    world: World, inbox: Path, mock_clock: trio.testing.MockClock
) -> None:
    with started(watch_of(world)) as watch:
        await watch.wait()
        append(inbox)
        async with trio.open_nursery() as nursery:
            await Waiting(watch, nursery).woken()


async def test_an_inbox_that_is_made_later_wakes(world: World, mock_clock: trio.testing.MockClock) -> None:
    world.folder.ensure()
    with started(watch_of(world)) as watch:
        await watch.wait()
        async with trio.open_nursery() as nursery:
            waiting = Waiting(watch, nursery)
            append(world.inbox("b"))
            await waiting.woken()


async def test_a_folder_that_is_made_later_is_found_by_a_look(world: World, mock_clock: trio.testing.MockClock) -> None:
    with started(watch_of(world)) as watch:
        await watch.wait()
        async with trio.open_nursery() as nursery:
            waiting = Waiting(watch, nursery)
            assert not await waiting.settled()
            world.folder.ensure()
            append(world.inbox("b"))
            assert not await waiting.settled()
            mock_clock.jump(mailwatch.POLL_S)
            await waiting.woken()
            by_event = Waiting(watch, nursery)
            append(world.inbox("b"))
            await by_event.woken()


@pytest.mark.parametrize("how", ["moved", "removed"])
async def test_a_folder_that_is_replaced_is_watched_anew(
    world: World, inbox: Path, mock_clock: trio.testing.MockClock, how: str
) -> None:
    with started(watch_of(world)) as watch:
        await watch.wait()
        if how == "moved":
            inbox.parent.rename(world.home / "old")
        else:
            inbox.unlink()
            inbox.parent.rmdir()
        async with trio.open_nursery() as nursery:
            await Waiting(watch, nursery).woken()
            waiting = Waiting(watch, nursery)
            world.folder.ensure()
            append(inbox)
            for _ in range(3):
                if await waiting.settled():
                    break
                mock_clock.jump(mailwatch.POLL_S)
            await waiting.woken()
            by_event = Waiting(watch, nursery)
            append(inbox)
            await by_event.woken()


@pytest.mark.parametrize(
    ("mountinfo", "every_s"),
    [(NFS, mailwatch.NETWORK_POLL_S), (OVERLAY, mailwatch.POLL_S), ("", mailwatch.POLL_S)],
    ids=["nfs", "overlay", "unknown"],
)
async def test_where_inotify_is_not_believed_time_alone_wakes(
    world: World, inbox: Path, mock_clock: trio.testing.MockClock, mountinfo: str, every_s: float
) -> None:
    world.mountinfo.write_text(mountinfo)
    before = open_files()
    with started(watch_of(world)) as watch:
        await watch.wait()
        async with trio.open_nursery() as nursery:
            waiting = Waiting(watch, nursery)
            append(inbox)
            mock_clock.jump(every_s * 0.9)
            assert not await waiting.settled()
            mock_clock.jump(every_s * 0.2)
            await waiting.woken()
            quiet = Waiting(watch, nursery)
            mock_clock.jump(every_s)
            assert not await quiet.settled()
            append(inbox)
            mock_clock.jump(every_s)
            await quiet.woken()
        assert "a look every" in repr(watch)
        assert open_files() == before


async def test_a_link_to_an_inbox_elsewhere_is_looked_at(
    world: World, inbox: Path, tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    inbox.unlink()
    (tmp_path / "elsewhere").touch()
    inbox.symlink_to(tmp_path / "elsewhere")
    with started(watch_of(world)) as watch:
        await watch.wait()
        async with trio.open_nursery() as nursery:
            waiting = Waiting(watch, nursery)
            append(inbox)
            mock_clock.jump(mailwatch.POLL_S)
            await waiting.woken()


async def test_a_lost_event_is_made_good_by_the_slow_look(
    world: World, inbox: Path, mock_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MailWatch._drain
    monkeypatch.setattr(MailWatch, "_drain", lambda self: real(self) and False)
    with started(watch_of(world)) as watch:
        await watch.wait()
        async with trio.open_nursery() as nursery:
            waiting = Waiting(watch, nursery)
            append(inbox)
            assert not await waiting.settled()
            mock_clock.jump(mailwatch.SLOW_POLL_S)
            await waiting.woken()


async def test_where_no_descriptor_is_left_for_inotify_it_is_looked_at(
    world: World, inbox: Path, mock_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailwatch, "_inotify", lambda: None)
    with started(watch_of(world)) as watch:
        await watch.wait()
        async with trio.open_nursery() as nursery:
            waiting = Waiting(watch, nursery)
            append(inbox)
            mock_clock.jump(mailwatch.POLL_S)
            await waiting.woken()


async def test_close_ends_a_wait_and_leaves_no_descriptor(world: World, inbox: Path) -> None:
    before = open_files()
    watch = watch_of(world)
    await watch.wait()
    assert len(open_files()) == len(before) + 1
    async with trio.open_nursery() as nursery:

        async def wait() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await watch.wait()

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        watch.close()
    with pytest.raises(trio.ClosedResourceError):
        await watch.wait()
    assert open_files() == before


class Followed:
    """``follow`` in a nursery, and what it has shown."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch, unread: bool = False) -> None:
        self.texts: list[str] = []
        self.ready = trio.Event()
        self.client = world.client("b")
        self._run = partial(follow, self.client, "b", self._show, unread=unread)
        waits: list[None] = []
        real = MailWatch.wait

        async def wait(watch: MailWatch) -> None:
            waits.append(None)
            if len(waits) == 2:  # the first returns at once, then the inbox is read
                self.ready.set()
            await real(watch)

        monkeypatch.setattr(MailWatch, "wait", wait)

    def _show(self, line: bytes) -> None:
        if line:
            self.texts.append(json.loads(line)["msg"])
            self.came.set()

    async def run(self, until: Callable[[list[str]], bool], begin: Callable[[], object]) -> None:
        """Follow until what was shown is enough; ``begin`` is called in a thread when the follower is there."""
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                self.came = trio.Event()
                nursery.start_soon(self._run)
                await self.ready.wait()
                await trio.to_thread.run_sync(begin)
                while not until(self.texts):
                    await self.came.wait()
                    self.came = trio.Event()
                nursery.cancel_scope.cancel()


@pytest.fixture
def sender(world: World) -> Outbox:
    """@a, that has filed "old" for @b, whose cursor is before it."""
    join(world.client("b"), name="b")
    join(world.client("a"), name="a")
    outbox = Outbox(world.client("a"))
    outbox.send("b", "old")
    return outbox


async def test_lines_are_followed_from_now_on_and_the_cursor_stays(
    world: World, sender: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_files()
    followed = Followed(world, monkeypatch)

    def file() -> None:
        for number in range(100):
            sender.send("b", str(number))

    await followed.run(lambda texts: len(texts) >= 100, file)
    assert followed.texts == [str(number) for number in range(100)]
    assert not (world.home / "read" / "b.cursor").exists()
    assert open_files() == before


async def test_unread_ones_come_first_where_they_are_asked_for(
    world: World, sender: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(world, monkeypatch, unread=True)
    await followed.run(lambda texts: texts[-1:] == ["new"], partial(sender.send, "b", "new"))
    assert followed.texts == ["old", "new"]


async def test_a_line_in_the_place_of_one_that_was_cut_back_is_shown(
    world: World, sender: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(world, monkeypatch)

    def file() -> None:
        with (
            os.fdopen(os.open(world.folder.inbox_lock("b"), os.O_RDWR), "r+b") as lock,
            world.inbox("b").open("r+b") as file,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)
            file.truncate(0)
            file.write(b'{"msg":"another"}\n')

    await followed.run(bool, file)
    assert followed.texts == ["another"]


async def test_a_follower_goes_on_in_an_inbox_that_was_replaced(
    world: World, sender: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(world, monkeypatch)

    def file() -> None:
        sender.send("b", "one")
        inbox = world.inbox("b")
        pruned = inbox.with_suffix(".new")
        lines = inbox.read_bytes().splitlines(keepends=True)
        pruned.write_bytes(b"\n" * (len(lines) - 1) + lines[-1])
        pruned.rename(inbox)
        sender.send("b", "two")

    await followed.run(lambda texts: "two" in texts, file)
    assert followed.texts == ["one", "two"]


async def test_a_follower_waits_for_an_inbox_that_is_being_written(
    world: World, sender: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(world, monkeypatch)
    said = threading.Event()
    followed.client.settings.inbox_read_wait_s = 0.05
    followed.client.notify = lambda _: said.set()

    def file() -> None:
        fd = os.open(world.folder.inbox_lock("b"), os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            append(world.inbox("b"), b'{"msg":"under lock"}\n')
            assert said.wait(30)
            assert followed.texts == []
        finally:
            os.close(fd)

    await followed.run(bool, file)
    assert followed.texts == ["under lock"]


async def test_an_inbox_that_cannot_be_read_ends_the_following_with_its_reason(world: World, sender: Outbox) -> None:
    world.inbox("b").unlink()
    world.inbox("b").mkdir()
    with pytest.raises(SotbusError, match="cannot be read"):
        await follow(world.client("b"), "b", print)


@contextmanager
def command(world: World, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """``sotbus watch`` as a process of @b's session."""
    pin = {"SOT_COMM_SELF_FILE": str(world.home / "self" / "pin-b.txt")}
    process = subprocess.Popen(
        [sys.executable, str(ENTRY), "watch", *words],
        cwd=world.project("b"),
        env=world.environ(pin),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def said(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def test_the_command_prints_as_poll_does_and_ends_quietly_when_it_is_interrupted(world: World, sender: Outbox) -> None:
    with command(world, "--unread") as process:
        assert re.fullmatch(rb"\[\S+Z\] \[a:a\] old\n", said(process))
        sender.send("b", "esc\x1b[2J")
        assert said(process).endswith(b"] esc\\x1b[2J\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert not (world.home / "read" / "b.cursor").exists()


def test_the_command_prints_json_and_another_sessions_mail_and_text_as_it_is(world: World, sender: Outbox) -> None:
    with command(world, "--unread", "--json", "@b") as process:
        assert json.loads(said(process))["msg"] == "old"
    sender.send("a", "\x1b[1m")
    with command(world, "--unread", "--raw", "@a") as process:
        assert said(process).endswith(b"] \x1b[1m\n")


def test_the_command_ends_when_nobody_reads_it_any_more(world: World, sender: Outbox) -> None:
    with command(world, "--unread") as process:
        said(process)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(30) == 1
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_the_command_refuses_a_handle_that_nobody_knows(world: World, sender: Outbox) -> None:
    done = world.sotbus("b", "watch", "@nobody")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("no such handle: nobody\n")
