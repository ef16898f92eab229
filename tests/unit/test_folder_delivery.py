"""The ready-made delivery into a comm folder: what is on disk when it answers, its errors, its bounds, cancellation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import trio
import trio.testing
from world import MACHINE, World

from sotbus import message
from sotbus.api import Delivery, Destination, Filing, FlockManager, FolderDelivery, Inbound, Receipt
from sotbus.comm import flock
from sotbus.comm.folder import Folder
from sotbus.errors import BadHandle, BadRequest, FilingFailed, InboxLockHeld, PluginError, SotbusError, TooLarge

NODE = "u.vm"
MANAGER = FlockManager(f"local {MACHINE}")
FILING = Filing("alpha", "beta", "repo", "hello")

HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(fd, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
"""Holds a lock until its standard input is closed."""


def delivery(folder: Folder, limiter: trio.CapacityLimiter | None = None, **more: Any) -> FolderDelivery:
    return FolderDelivery(folder, NODE, more.pop("manager", lambda: MANAGER), limiter, **more)


@contextmanager
def held_elsewhere(folder: Folder, handle: str) -> Iterator[Callable[[], None]]:
    """Another process holds an inbox's lock; gives the call that makes it let go."""
    folder.ensure()
    with subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDER, folder.inbox_lock(handle)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None

        def let_go() -> None:
            assert other.stdin is not None
            other.stdin.close()
            other.wait(30)

        try:
            assert other.stdout.readline() == b"held\n"
            yield let_go
        finally:
            let_go()


def is_free(folder: Folder, handle: str) -> bool:
    """Whether nobody holds the inbox lock, and nobody waits for it."""
    flock.acquire(folder.inbox_lock(handle), exclusive=True, bound_s=0, polling=True).release()
    waiting = [thread for thread in threading.enumerate() if thread.name == "sotbus-flock"]
    for thread in waiting:
        thread.join(10)  # one that has been given up is on its way out
    return not any(thread.is_alive() for thread in waiting)


def texts(folder: Folder, handle: str = "beta") -> list[str]:
    """The texts in an inbox, every line of which is whole."""
    path = Path(folder.inbox(handle))
    if not path.exists():
        return []
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line)["msg"] for line in data.splitlines()]


# ---- what is filed


async def test_the_pages_line_is_on_disk_when_it_answers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        real(fd)
        synced.append(Path(world.folder.inbox("beta")).read_bytes())

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    before = message.stamp()
    receipt = await delivery(world.folder).deliver(FILING, 5)
    stood = Path(world.folder.inbox("beta")).read_bytes()
    assert receipt == Receipt("delivered", world.folder.inbox("beta"))
    assert synced == [stood]
    line = message.parse(stood[:-1])
    assert line is not None
    assert before <= line["ts"] <= message.stamp()
    assert stood == message.encode("alpha", "beta", "repo", "hello", line["ts"])


async def test_a_first_line_syncs_the_inbox_folder_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    await delivery(world.folder).deliver(FILING, 5)
    assert synced == [os.path.realpath(world.folder.inboxes)]


async def test_a_broadcast_copy_has_an_empty_to(world: World) -> None:
    await delivery(world.folder).deliver(Filing("alpha", "beta", "repo", "to all", broadcast=True), 5)
    line = message.parse(Path(world.folder.inbox("beta")).read_bytes()[:-1])
    assert line is not None
    assert (line["to"], line["msg"]) == ("", "to all")


async def test_a_torn_tail_is_cut_before_the_line(world: World) -> None:
    world.folder.ensure()
    Path(world.folder.inbox("beta")).write_bytes(b'{"msg":"whole"}\n{"msg":"to')
    await delivery(world.folder).deliver(FILING, 5)
    assert texts(world.folder) == ["whole", "hello"]


async def test_many_at_once_are_all_filed_whole(world: World) -> None:
    made = delivery(world.folder)
    async with trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(made.deliver, Filing("alpha", "beta", "repo", f"{number} " + "x" * 9000), 30)
    assert sorted(int(text.split()[0]) for text in texts(world.folder)) == list(range(40))


async def test_the_manager_is_asked_at_each_append(world: World) -> None:
    asked: list[str] = []

    def manager() -> FlockManager:
        asked.append(threading.current_thread().name)
        return MANAGER

    made = delivery(world.folder, manager=manager)
    assert asked == []
    await made.deliver(FILING, 5)
    await made.deliver(FILING, 5)
    assert len(asked) == 2
    assert threading.main_thread().name not in asked


# ---- reaches, serve


def test_it_reaches_the_handles_of_its_node_without_a_system_call(world: World) -> None:
    made = delivery(world.folder)
    asked = [Destination(NODE, "beta"), Destination(NODE, "beta", live=False), Destination("u.other", "beta")]
    asked += [Destination(NODE, name) for name in ("", "a b", "../x", "-x", "x" * 65)]
    touched: list[str] = []

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__module__", None) in ("posix", "io", "_io", "fcntl", "_socket"):
            touched.append(called.__name__)

    sys.setprofile(note)
    try:
        answers = [made.reaches(destination) for destination in asked]
    finally:
        sys.setprofile(None)
    assert answers == [True, True, False, False, False, False, False, False]
    assert touched == []
    assert not world.home.exists()


async def test_serve_has_nothing_to_hand_over_and_ends(world: World, nothing: Inbound) -> None:
    with trio.testing.assert_checkpoints():
        await delivery(world.folder).serve(nothing)


@pytest.fixture
def nothing() -> Inbound:
    """An inbound that nothing may be handed to."""

    class Nothing:
        async def answer(self, peer: str, request: bytes) -> bytes:
            raise AssertionError

        def up(self, peer: str) -> None:
            raise AssertionError

        def down(self, peer: str) -> None:
            raise AssertionError

    return Nothing()


def test_it_is_a_delivery_and_says_of_which_folder(world: World) -> None:
    made = delivery(world.folder)
    assert isinstance(made, Delivery)
    assert repr(made) == f"<FolderDelivery {world.home} of {NODE}>"


# ---- errors


@pytest.mark.parametrize(
    ("filing", "kind", "said"),
    [
        (Filing("a", "../x", "r", "t"), BadHandle, "../x"),
        (Filing("a", "", "r", "t"), BadHandle, "not a handle"),
        (Filing("a", "b", "r", ""), BadRequest, "empty"),
        (Filing("a", "b", "r", "x\ud800"), BadRequest, "character 2"),
        (Filing("a", "b", "r", "\u00e9" * 51), TooLarge, "102 bytes and the limit is 100"),
    ],
    ids=["folder", "empty handle", "empty text", "surrogate", "too large"],
)
async def test_what_can_never_be_filed_is_refused_and_nothing_is_made(
    world: World, filing: Filing, kind: type[SotbusError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        await delivery(world.folder, max_text_bytes=100).deliver(filing, 5)
    assert not world.home.exists()


async def test_what_the_system_refuses_is_a_failed_filing(world: World) -> None:
    world.folder.ensure()
    os.mkdir(world.folder.inbox("beta"))
    with pytest.raises(FilingFailed, match="the append failed: Is a directory") as raised:
        await delivery(world.folder).deliver(FILING, 5)
    assert not raised.value.outcome_unknown
    assert is_free(world.folder, "beta")


async def test_a_manager_that_may_not_append_here_passes_its_error_through(world: World) -> None:
    refusal = PluginError("plugin 'spool' (spool-dist 1.0): identity raised RuntimeError: boom")

    def manager() -> FlockManager:
        raise refusal

    with pytest.raises(PluginError) as raised:
        await delivery(world.folder, manager=manager).deliver(FILING, 5)
    assert raised.value is refusal
    assert texts(world.folder) == []


# ---- the deadline


async def test_a_lock_that_is_held_past_the_deadline_fails_the_filing(world: World) -> None:
    with held_elsewhere(world.folder, "beta"):
        began = time.monotonic()
        with pytest.raises(InboxLockHeld):
            await delivery(world.folder).deliver(FILING, 0.2)
        assert 0.2 <= time.monotonic() - began < 5
    assert texts(world.folder) == []


async def test_a_lock_that_comes_free_before_the_deadline_is_waited_for(world: World) -> None:
    with held_elsewhere(world.folder, "beta") as let_go:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(delivery(world.folder).deliver, FILING, 60)
            await trio.to_thread.run_sync(lambda: until_waited_for(world.folder, "beta"))
            let_go()
    assert texts(world.folder) == ["hello"]


async def test_the_deadline_holds_while_no_thread_is_free(world: World, autojump_clock: trio.testing.MockClock) -> None:
    limiter = trio.CapacityLimiter(1)
    limiter.acquire_on_behalf_of_nowait("somebody")
    with trio.fail_after(30), pytest.raises(SotbusError):
        await delivery(world.folder, limiter).deliver(FILING, 5)
    assert trio.current_time() == pytest.approx(5, abs=0.5)
    assert texts(world.folder) == []
    assert limiter.borrowed_tokens == 1


# ---- cancellation


def until_waited_for(folder: Folder, handle: str) -> None:
    """Return once somebody waits in the kernel's queue for an inbox's lock (proc_locks(5))."""
    inode = os.stat(folder.inbox_lock(handle)).st_ino
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for line in Path("/proc/locks").read_text().splitlines():
            if "->" in line and f":{inode} " in line:
                return
    raise AssertionError("nobody waits for the lock")


@pytest.mark.parametrize("count", [1, 6], ids=["one", "several"])
async def test_cancelled_while_another_process_holds_the_lock_leaves_whole_lines_and_a_free_lock(
    world: World, count: int
) -> None:
    made = delivery(world.folder)
    answered: list[str] = []

    async def deliver(number: int) -> None:
        await made.deliver(Filing("alpha", "beta", "repo", f"{number}"), 60)
        answered.append(f"{number}")

    with held_elsewhere(world.folder, "beta") as let_go:
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(deliver, number)
            await trio.to_thread.run_sync(lambda: until_waited_for(world.folder, "beta"))
            nursery.cancel_scope.cancel()
            let_go()
    filed = texts(world.folder)
    assert len(filed) == len(set(filed))
    assert set(answered) <= set(filed) <= {f"{number}" for number in range(count)}
    assert is_free(world.folder, "beta")
    await made.deliver(FILING, 5)
    assert texts(world.folder) == [*filed, "hello"]


async def test_cancelled_before_a_thread_is_free_files_nothing(world: World) -> None:
    limiter = trio.CapacityLimiter(1)
    limiter.acquire_on_behalf_of_nowait("somebody")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(delivery(world.folder, limiter).deliver, FILING, 60)
        await trio.testing.wait_all_tasks_blocked()
        assert limiter.statistics().tasks_waiting == 1
        nursery.cancel_scope.cancel()
    assert not world.home.exists()
    assert limiter.statistics().tasks_waiting == 0


async def test_cancelled_before_it_begins_files_nothing(world: World) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await delivery(world.folder).deliver(FILING, 60)
    assert scope.cancelled_caught
    assert not world.home.exists()


# ---- the limiter


async def test_a_folder_whose_threads_all_wait_does_not_stall_another(world: World) -> None:
    other = Folder(str(world.base / "other"))
    stuck = delivery(world.folder, trio.CapacityLimiter(1))
    with held_elsewhere(world.folder, "beta") as let_go:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stuck.deliver, FILING, 60)
            nursery.start_soon(stuck.deliver, FILING, 60)
            await trio.to_thread.run_sync(lambda: until_waited_for(world.folder, "beta"))
            assert texts(other) == []
            with trio.fail_after(30):
                await delivery(other).deliver(FILING, 5)
            assert texts(other) == ["hello"]
            assert texts(world.folder) == []
            let_go()
    assert texts(world.folder) == ["hello", "hello"]


async def test_no_more_threads_than_the_limiter_has_wait_on_a_folder(world: World) -> None:
    limiter = trio.CapacityLimiter(2)
    begun = threading.Semaphore(0)
    go = threading.Event()

    def manager() -> FlockManager:
        begun.release()
        assert go.wait(30)
        return MANAGER

    made = delivery(world.folder, limiter, manager=manager)
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(made.deliver, FILING, 60)
        await trio.to_thread.run_sync(lambda: (begun.acquire(timeout=30), begun.acquire(timeout=30)))
        await trio.testing.wait_all_tasks_blocked()
        seen = limiter.statistics()
        assert (seen.borrowed_tokens, seen.tasks_waiting) == (2, 3)
        assert not begun.acquire(blocking=False)
        go.set()
    assert len(texts(world.folder)) == 5


async def test_each_delivery_has_a_limiter_of_its_own_by_default(world: World) -> None:
    one, two = delivery(world.folder), delivery(Folder(str(world.base / "two")))
    assert one._limiter is not two._limiter
