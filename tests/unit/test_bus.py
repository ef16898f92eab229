"""The Python API: buses of several sessions in this process, with other processes in their way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from world import World

import sotbus
from sotbus import bus as bus_module
from sotbus import errors, message, mount_limits, program
from sotbus.bus import Bus, open_bus_over
from sotbus.comm import membership, self_file
from sotbus.comm.box import Box
from sotbus.comm.registry import Registry
from sotbus.comm.sending import Outbox
from sotbus.comm.settings import Settings
from sotbus.mount_limits import Worker

SNIPPET = Path(__file__).parents[2] / "docs" / "python-api.md"
HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(fd, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
"""A process that holds a lock file's flock until its standard input ends."""


def bus_of(world: World, name: str, **settings: float) -> AbstractAsyncContextManager[Bus]:
    """A bus of a session of its own, joined under its project's name."""
    given = Settings(**settings)  # type: ignore[arg-type]
    return open_bus_over(partial(world.client, name, settings=given), join=name)


@asynccontextmanager
async def two_buses(world: World, **settings: float) -> AsyncIterator[tuple[Bus, Bus]]:
    async with bus_of(world, "a", **settings) as a, bus_of(world, "b", **settings) as b:
        yield a, b


@contextmanager
def held(path: str) -> Iterator[Callable[[], None]]:
    """Another process holds a lock; the value lets go of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process.stdin.close
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a send is at work in its thread."""
    event = threading.Event()
    real = Outbox.send

    def send(self: Outbox, to: str, text: str, *, broadcast: bool = False) -> None:
        event.set()
        real(self, to, text, broadcast=broadcast)

    monkeypatch.setattr(Outbox, "send", send)
    return event


def texts(world: World, handle: str) -> list[str]:
    """Every text in an inbox, each line a whole one."""
    data = world.inbox(handle).read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line)["msg"] for line in data.splitlines()]


def edit_registry(world: World, handle: str, **fields: object) -> None:
    """Change an entry as another client would: under the lock, for a bus writes it too."""

    def change(document: dict[str, Any]) -> bool:
        document["agents"][handle].update(fields)
        return True

    assert Registry(world.folder, world.box()).update(change, 30)


def last_seen(world: World, handle: str) -> str:
    text: str = json.loads(Path(world.folder.registry).read_text())["agents"][handle]["last_seen"]
    return text


async def polled(bus: Bus) -> list[str]:
    async with bus.poll() as messages:
        return [one.text for one in messages]


async def test_two_buses_send_to_each_other_and_know_who_is_there(world: World) -> None:
    async with two_buses(world) as (a, b):
        receipt = await a.send("@b", "hello\nthere ☃")
        async with b.poll() as messages:
            (got,) = messages
        assert (got.sender, got.to, got.repo, got.text, got.unread) == ("a", "b", "a", "hello\nthere ☃", True)
        assert (receipt.to, receipt.ts) == ("b", got.ts)
        assert got.raw["msg"] == got.text
        await b.send("@" + got.sender, "back")
        assert await polled(a) == ["back"]
        assert await polled(a) == []
        agents = {agent.handle: agent for agent in await a.list()}
        assert set(agents) == {"a", "b"}
        assert agents["b"].live
        assert agents["b"].root == str(world.project("b"))
        assert agents["b"].age_s is not None
        assert 0 <= agents["b"].age_s < 60
        assert agents["b"].state == "idle"
    assert world.notes == []


async def test_a_poll_block_that_raises_or_is_cancelled_leaves_the_messages_unread(world: World) -> None:
    async with two_buses(world) as (a, b):
        await a.send("@b", "one")
        with pytest.raises(ZeroDivisionError):
            async with b.poll():
                raise ZeroDivisionError
        with trio.CancelScope() as scope:
            async with b.poll() as messages:
                assert len(messages) == 1
                scope.cancel()
                await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        assert await polled(b) == ["one"]
        assert await polled(b) == []


async def test_five_hundred_messages_arrive_once_and_in_order(world: World) -> None:
    async with two_buses(world) as (a, b), trio.open_nursery() as nursery:

        async def flood() -> None:
            for number in range(500):
                await a.send("@b", str(number))

        nursery.start_soon(flood)
        got: list[str] = []
        async for one in b.messages():
            got.append(one.text)
            if len(got) == 500:
                break
        assert got == [str(number) for number in range(500)]
        assert await polled(b) == ["499"]  # it was handed out, and nobody asked for the next
        assert await polled(b) == []


async def test_a_restart_between_messages_shows_only_the_unfinished_one_again(world: World) -> None:
    async with two_buses(world) as (a, b):
        for text in ("one", "two", "three"):
            await a.send("@b", text)
        mail = b.messages()
        assert (await anext(mail)).text == "one"
        assert (await anext(mail)).text == "two"
    async with bus_of(world, "b") as b:
        assert await polled(b) == ["two", "three"]


async def test_lines_that_are_no_messages_are_passed_over_and_those_of_a_broadcast_are_not_unread(
    world: World,
) -> None:
    async with two_buses(world) as (a, b):
        with world.inbox("b").open("ab") as file:
            file.write(b"\nno json\n")
        assert await a.broadcast("to all") == [("b", None)]
        with world.inbox("b").open("ab") as file:
            file.write(b'[]\n\n{"from": 7, "text": {"k": [1]}}\n\n')
        mail = b.messages()
        first, second = await anext(mail), await anext(mail)
        assert (first.text, first.to, first.unread) == ("to all", "", False)
        assert (second.sender, second.text, second.to, second.ts) == ("7", '{"k": [1]}', "", "")
        with trio.CancelScope() as scope:
            scope.cancel()
            await anext(mail)
        assert await polled(b) == ['{"k": [1]}']
        total = world.inbox("b").read_bytes().count(b"\n")
        assert (world.home / "read" / "b.cursor").read_text().startswith(f"{total} ")


async def test_messages_of_before_and_after_come_as_they_are_filed_and_the_iteration_ends_with_the_bus(
    world: World,
) -> None:
    got: list[str] = []
    came = trio.Event()

    async def read(a: Bus, b: Bus) -> None:
        async for one in b.messages():
            got.append(one.text)
            if one.text == "before":
                await a.send("@b", "after")
            else:
                came.set()

    async with bus_of(world, "a") as a, trio.open_nursery() as nursery, bus_of(world, "b") as b:
        await a.send("@b", "before")
        nursery.start_soon(read, a, b)
        await came.wait()
        await trio.testing.wait_all_tasks_blocked()
    assert got == ["before", "after"]
    with pytest.raises(errors.BadRequest, match="closed"):
        await b.send("@a", "x")
    assert "closed" in repr(b)


@pytest.mark.parametrize(
    ("to", "text", "error"),
    [
        ("b", "x", errors.NeedsNode),
        ("@nobody", "x", errors.NotHere),
        ("@../x", "x", errors.BadHandle),
        ("@b", "", errors.BadRequest),
        ("@b", "\ud800", errors.BadRequest),
        ("@b", "x" * (message.MAX_TEXT_BYTES + 1), errors.TooLarge),
    ],
)
async def test_a_send_that_cannot_be_right_is_refused(world: World, to: str, text: str, error: type[Exception]) -> None:
    async with two_buses(world) as (a, _):
        with pytest.raises(error):
            await a.send(to, text)
    assert texts(world, "b") == []


async def test_the_registry_is_read_again_when_it_has_changed(world: World) -> None:
    async with two_buses(world) as (a, _):
        await a.send("@b", "one")
        membership.join(world.client("c"), name="c")
        await a.send("@c", "new here")
        edit_registry(world, "c", last_seen="2020-01-01T00:00:00Z")
        with pytest.raises(errors.NoLiveSession):
            await a.send("@c", "gone")
        assert [handle for handle, error in await a.broadcast("all") if error is None] == ["b"]


async def test_a_handle_that_another_session_has_taken_is_acted_for_no_more(world: World) -> None:
    async with two_buses(world) as (a, b):
        await b.send("@a", "mail")
        edit_registry(world, "a", slot="somebody-else", pid=1, start=int(_start_of(1)))
        with pytest.raises(errors.NotJoined, match="taken by another session"):
            await a.send("@b", "x")
        with pytest.raises(errors.NotJoined):
            await polled(a)
        with pytest.raises(errors.NotJoined):
            await anext(a.messages())
        edit_registry(world, "a", last_seen="2020-01-01T00:00:00Z")
        await a._keep_worker.run(a._keeper.touch)
        assert last_seen(world, "a") == "2020-01-01T00:00:00Z"
    assert texts(world, "b") == []


def _start_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


async def test_a_send_cancelled_while_the_lock_is_held_ends_whole_and_tells_its_answer(
    world: World, begun: threading.Event
) -> None:
    async with two_buses(world, inbox_lock_wait_s=20) as (a, b):
        with held(world.folder.inbox_lock("b")) as let_go:
            answers: list[str] = []

            async def send() -> None:
                with scope:
                    answers.append((await a.send("@b", "held up")).to)

            scope = trio.CancelScope()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                await trio.to_thread.run_sync(begun.wait)
                scope.cancel()
                await trio.testing.wait_all_tasks_blocked()
                assert answers == []
                let_go()
        assert answers == ["b"]
        assert texts(world, "b") == ["held up"]
        await a.send("@b", "next")
        assert await polled(b) == ["held up", "next"]


async def test_a_send_cancelled_before_its_turn_files_nothing(world: World, begun: threading.Event) -> None:
    async with two_buses(world, inbox_lock_wait_s=20) as (a, _):
        with held(world.folder.inbox_lock("b")) as let_go:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(a.send, "@b", "first")
                await trio.to_thread.run_sync(begun.wait)
                with trio.CancelScope() as scope:
                    nursery.start_soon(_cancel_when_blocked, scope)
                    await a.send("@b", "second")
                assert scope.cancelled_caught
                let_go()
        assert texts(world, "b") == ["first"]


async def _cancel_when_blocked(scope: trio.CancelScope) -> None:
    await trio.testing.wait_all_tasks_blocked()
    scope.cancel()


async def test_a_lock_that_is_held_past_its_bound_is_told_and_nothing_is_filed(world: World) -> None:
    async with two_buses(world, inbox_lock_wait_s=0.05) as (a, _):
        with held(world.folder.inbox_lock("b")):
            with pytest.raises(errors.InboxLockHeld):
                await a.send("@b", "x")
            (filing,) = await a.broadcast("y")
            assert isinstance(filing[1], errors.InboxLockHeld)
    assert texts(world, "b") == []


async def test_an_iteration_waits_on_where_the_inbox_is_being_written_for_long(world: World) -> None:
    async with bus_of(world, "a") as a, bus_of(world, "b", inbox_read_wait_s=0.05) as b:
        await a.send("@b", "one")
        said = threading.Event()
        b._reading.notify = lambda _: said.set()
        with held(world.folder.inbox_lock("b")) as let_go:
            with pytest.raises(errors.InboxBusy):
                await polled(b)
            async with trio.open_nursery() as nursery:
                got: list[str] = []

                async def read() -> None:
                    got.append((await anext(b.messages())).text)

                nursery.start_soon(read)
                await trio.to_thread.run_sync(said.wait)
                let_go()
        assert got == ["one"]


@pytest.mark.parametrize("apart", [True, False], ids=["two mounts", "one mount"])
async def test_a_mount_that_hangs_stalls_only_those_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: threading.Event, apart: bool
) -> None:
    worlds = []
    for name in ("hangs", "works"):
        (tmp_path / name).mkdir()
        worlds.append(World(tmp_path / name))
    hangs, works = worlds
    monkeypatch.setattr(mount_limits, "THREADS_PER_MOUNT", 1)
    monkeypatch.setattr(mount_limits, "key_of", lambda path: 7 if apart and path == hangs.folder.root else 8)
    async with bus_of(works, "c") as c, bus_of(hangs, "a", inbox_lock_wait_s=20) as a:
        membership.join(hangs.client("b"), name="b")
        membership.join(works.client("d"), name="d")
        with held(hangs.folder.inbox_lock("b")) as let_go:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(a.send, "@b", "held up")
                await trio.to_thread.run_sync(begun.wait)
                if apart:
                    await c.send("@d", "at once")
                    assert texts(hangs, "b") == []
                else:
                    nursery.start_soon(c.send, "@d", "later")
                    await trio.testing.wait_all_tasks_blocked()
                    assert texts(works, "d") == []
                let_go()
        assert len(texts(works, "d")) == 1
        assert texts(hangs, "b") == ["held up"]


async def test_work_that_hangs_past_its_bound_is_told_of_and_so_are_those_behind_it(
    mock_clock: trio.testing.MockClock,
) -> None:
    """A hard mount whose server is away: nobody's task waits for ever, and the next one is served when it is back."""
    worker = Worker(trio.CapacityLimiter(2), grace_s=60, bound_s=0.1)
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go_on.wait(60)

    async def told(unknown: bool) -> None:
        with pytest.raises(errors.MountHung, match=r"did not answer within 0\.1s") as caught:
            await worker.run(hang)
        assert caught.value.outcome_unknown is unknown

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(told, True)
            await trio.to_thread.run_sync(begun.wait)
            mock_clock.jump(0.11)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(told, False)
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(0.11)
    finally:
        go_on.set()
    assert await worker.run(lambda: "served") == "served"


async def test_a_long_queue_is_not_taken_for_a_mount_that_hangs(mock_clock: trio.testing.MockClock) -> None:
    worker = Worker(trio.CapacityLimiter(2), grace_s=60, bound_s=0.2)
    done: list[int] = []

    async def ask(number: int) -> None:
        await worker.run(lambda: trio.from_thread.run_sync(mock_clock.jump, 0.1))
        done.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(ask, number)
    assert len(done) == 40


async def test_work_that_hangs_past_the_grace_is_left_to_its_thread_and_the_next_waits_for_it() -> None:
    worker = Worker(trio.CapacityLimiter(2), grace_s=0.02)
    begun, go = threading.Event(), threading.Event()
    done: list[str] = []

    def hang() -> None:
        begun.set()
        go.wait(60)
        done.append("hung")

    try:
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                nursery.start_soon(_cancel_when_set, begun, scope)
                await worker.run(hang)
            assert scope.cancelled_caught
            nursery.start_soon(worker.run, partial(done.append, "next"))
            await trio.testing.wait_all_tasks_blocked()
            assert done == []
            assert "busy" in repr(worker)
            go.set()
    finally:
        go.set()
    assert done == ["hung", "next"]
    assert "free" in repr(worker)


async def _cancel_when_set(event: threading.Event, scope: trio.CancelScope) -> None:
    await trio.to_thread.run_sync(event.wait)
    scope.cancel()


async def test_work_that_was_cancelled_in_its_thread_still_raises_its_error_and_gives_the_turn_on() -> None:
    worker = Worker(trio.CapacityLimiter(1), grace_s=60)
    begun, go = threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        go.wait(60)
        raise errors.NotHere("no")

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(_cancel_when_set, begun, scope)
            nursery.start_soon(_set_when_cancelled, scope, go)
            with pytest.raises(errors.NotHere):
                await worker.run(fail)
        assert not scope.cancelled_caught
    assert await worker.run(lambda: 5) == 5


async def _set_when_cancelled(scope: trio.CancelScope, event: threading.Event) -> None:
    while not scope.cancel_called:
        await trio.testing.wait_all_tasks_blocked()
    event.set()


def test_an_interrupt_waits_for_the_work_in_its_thread_and_gives_the_turn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    done: list[str] = []
    real = mount_limits._Job.revoked

    def revoked(job: mount_limits._Job[None]) -> bool:
        answer = real(job)
        go.set()
        return answer

    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        go.wait(60)
        done.append("ended")

    async def main() -> None:
        worker = Worker(trio.CapacityLimiter(1), grace_s=60)
        with pytest.raises(KeyboardInterrupt):
            await worker.run(interrupted)
        assert done == ["ended"]
        assert await worker.run(lambda: 5) == 5

    monkeypatch.setattr(mount_limits._Job, "revoked", revoked)
    trio.run(main)


async def test_a_mount_is_told_by_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    assert mount_limits.key_of(str(tmp_path / "not" / "yet")) == tmp_path.stat().st_dev
    assert await mount_limits.limiter_of(str(tmp_path)) is await mount_limits.limiter_of(str(tmp_path / "x"))


async def test_the_last_use_is_stamped_when_the_block_is_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_module, "TOUCH_EVERY_S", 1e9)
    async with two_buses(world) as (a, _):
        edit_registry(world, "a", last_seen="2020-01-01T00:00:00Z")
        await a.send("@b", "x")
    assert last_seen(world, "a") != "2020-01-01T00:00:00Z"


async def test_an_idle_bus_keeps_its_handle_live(world: World, mock_clock: trio.testing.MockClock) -> None:
    async with bus_of(world, "a"):
        await trio.testing.wait_all_tasks_blocked()
        edit_registry(world, "a", last_seen="2020-01-01T00:00:00Z")
        mock_clock.jump(bus_module.HEARTBEAT_S + 1)
        for _ in range(2000):
            await trio.testing.wait_all_tasks_blocked(0.01)
            if last_seen(world, "a") != "2020-01-01T00:00:00Z":
                break
        assert last_seen(world, "a") != "2020-01-01T00:00:00Z"


async def test_an_exception_of_the_block_comes_out_as_it_is(world: World) -> None:
    with pytest.raises(ZeroDivisionError):
        async with bus_of(world, "a"):
            raise ZeroDivisionError


async def test_a_session_that_has_not_joined_is_told_so(world: World) -> None:
    with pytest.raises(errors.NotJoined):
        async with open_bus_over(partial(world.client, "nobody")):
            pytest.fail("opened")
    with pytest.raises(errors.BadHandle):
        sotbus.open_bus("../x", comm_home=str(world.home))


@pytest.fixture
def here(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """This process on the world's machine, in its folder, in a project of its own, with no settings of a person's."""
    monkeypatch.setattr(Box, "here", lambda _: world.box())
    for name in list(os.environ):
        if name.startswith(("SOT", "XDG")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(world.base))
    monkeypatch.setenv("SOT_COMM_HOME", str(world.home))
    monkeypatch.chdir(world.project("p"))
    return world


async def test_a_program_under_a_name_of_its_own_leaves_the_sessions_handle_alone(here: World) -> None:
    here.sotbus("p", "join", "--name", "session")
    before = (here.home / "self" / "pin-p.txt").read_bytes()
    async with sotbus.open_bus("work_er", expertise=["x"]) as bus:
        assert bus.handle == "work_er"
        entry = json.loads(Path(here.folder.registry).read_text())["agents"]["work_er"]
        assert (entry["pid"], entry["workspace_id"], entry["expertise"]) == (os.getpid(), "", ["x"])
        await bus.send("@session", "hello")
    assert (here.home / "self" / "pin-p.txt").read_bytes() == before
    assert not (here.home / "self" / "vm__nopane.txt").exists()
    assert texts(here, "session") == ["hello"]


async def test_a_name_that_a_live_process_has_is_refused_and_a_dead_ones_is_taken_over(here: World) -> None:
    async with sotbus.open_bus("worker"):
        entry = json.loads(Path(here.folder.registry).read_text())["agents"]["worker"]
    slot = entry["slot"].replace(str(os.getpid()), "1")  # as process 1 would have written it
    edit_registry(here, "worker", slot=slot, pid=1, start=int(_start_of(1)))
    with pytest.raises(errors.SlotTaken):
        async with sotbus.open_bus("worker"):
            pytest.fail("opened")
    edit_registry(here, "worker", start=int(_start_of(1)) + 1)
    async with sotbus.open_bus("worker") as bus:
        await bus.send("@worker", "to myself")
        assert await polled(bus) == ["to myself"]


def test_a_programs_self_file_names_no_row_whatever_its_handle() -> None:
    leaves = {program.self_leaf("vm", name) for name in ("a__b", "a_b", "a.b")}
    assert len(leaves) == 3
    assert {self_file.row_of(leaf, "vm") for leaf in leaves} == {""}


async def test_the_arguments_name_folder_config_and_project(here: World, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[message]\nmax_bytes = 5\n")
    other = tmp_path / "other"
    async with sotbus.open_bus(
        "worker", comm_home=str(other), config=str(config), project=str(here.project("q"))
    ) as bus:
        (agent,) = await bus.list()
        assert agent.root == str(here.project("q"))
        with pytest.raises(errors.TooLarge):
            await bus.send("@worker", "123456")
    assert (other / "inbox" / "worker.jsonl").exists()
    assert not here.home.exists()


@pytest.mark.parametrize("page", [SNIPPET, SNIPPET.parents[1] / "README.md"], ids=lambda page: str(page.name))
def test_the_documents_example_runs_as_it_stands(page: Path, here: World, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert code is not None
    exec(compile(code[1], str(page), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"filed for shouter at \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", printed[0])
    assert printed[1:] == ["shouter says HELLO"]


def test_the_package_imports_nothing_until_a_name_is_used() -> None:
    code = (
        "import sys, sotbus; before = {m for m in sys.modules if m.startswith(('sotbus', 'trio'))}; "
        "sotbus.open_bus; print(sorted(before), 'trio' in sys.modules, 'Bus' in dir(sotbus))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['sotbus'] True True\n"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sotbus.nothing
