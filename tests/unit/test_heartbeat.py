"""The stamps of the rows that a node watches: for whom, when, with how many writes, and what a failure leads to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from node_world import NodeWorld, nodes, until
from world import World

from sotbus import message
from sotbus.comm.processes import start_ticks
from sotbus.comm.registry import Registry
from sotbus.errors import RegistryWriteFailed
from sotbus.node.heartbeat import LOOK_S, STAMP_S, Heartbeat
from sotbus.node.rows import Rows
from sotbus.node.store import Store

__all__ = ["nodes"]

BEGAN = 1_700_000_000.0
OLD = "2020-01-01T00:00:00Z"


def entry_of(pid: int, **more: Any) -> dict[str, Any]:
    """The entry of a session of this box that is a process."""
    return {"host": "vm", "root": "/x", "last_seen": OLD, "pid": pid, "start": int(start_ticks(pid) or 0)} | more


@pytest.fixture
def session() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


class Counted(Registry):
    """A registry that counts what a heartbeat writes; ``before`` runs before each try, and may raise."""

    def __init__(self, world: World) -> None:
        super().__init__(world.folder, world.box(), settle_s=0.05)
        self.tries = 0
        self.writes = 0
        self.before: Callable[[], object] = lambda: None

    def update(self, change: Callable[[dict[str, Any]], bool], bound_s: float) -> bool:
        self.tries += 1
        self.before()
        wrote = super().update(change, bound_s)
        self.writes += wrote
        return wrote


class Watched:
    """A heartbeat under a clock that a test moves, its registry, and what it told."""

    def __init__(self, world: World, agents: dict[str, Any]) -> None:
        self.client = world.client("node", now=BEGAN)
        self.client.ensure()
        self.registry = self.client.registry = Counted(world)
        self.clock = trio.testing.MockClock()
        self.told: list[str] = []
        self.heartbeat: Heartbeat
        self._began = self.clock.current_time()
        self._world = world
        self.client.clock = lambda: BEGAN + self.clock.current_time() - self._began
        self._store = Store(str(world.base / "state" / "node.db"))
        self._others = Registry(world.folder, world.box(), settle_s=0.05)
        self.amend(**agents)

    @property
    def writes(self) -> int:
        return self.registry.writes

    def amend(self, **entries: dict[str, Any] | None) -> None:
        """Another client's write; None takes an entry away."""

        def change(document: dict[str, Any]) -> bool:
            document["agents"].update(entries)
            document["agents"] = {name: entry for name, entry in document["agents"].items() if entry is not None}
            return True

        self._others.update(change, 1.0)

    def stamps(self) -> dict[str, str]:
        return {name: entry["last_seen"] for name, entry in self.registry.agents().items()}

    def now(self) -> str:
        return message.stamp(self.client.clock())

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            def tell(event: str, **fields: object) -> None:
                self.told.append(event)

            rows = Rows(self._world.box(), self._store)
            self.heartbeat = Heartbeat(self.client, rows, trio.CapacityLimiter(4), tell)
            await test()

        try:
            trio.run(whole, clock=self.clock)
        finally:
            self._store.close()


def test_the_first_look_stamps_every_live_row_in_one_write_and_no_dead_one(
    world: World, session: subprocess.Popen[bytes]
) -> None:
    dead = entry_of(session.pid)
    dead["start"] -= 1
    watched = Watched(
        world,
        {
            "one": entry_of(os.getpid(), extra="kept"),
            "two": entry_of(session.pid),
            "dead": dead,
            "far": entry_of(os.getpid(), host="far"),
            "old": {"host": "vm", "last_seen": OLD},
        },
    )

    async def test() -> None:
        await watched.heartbeat.look()
        now = watched.now()
        assert watched.stamps() == {"one": now, "two": now, "dead": OLD, "far": OLD, "old": OLD}
        assert watched.writes == 1
        assert watched.heartbeat.held == {"one", "two"}
        assert watched.registry.agents()["one"]["extra"] == "kept"

    watched.run(test)


@pytest.mark.spec("S19")
def test_a_stamp_is_due_after_a_minute_and_not_before(world: World) -> None:
    watched = Watched(world, {"one": entry_of(os.getpid())})

    async def test() -> None:
        await watched.heartbeat.look()
        first = watched.now()
        for _ in range(29):
            watched.clock.jump(LOOK_S)
            await watched.heartbeat.look()
        assert (watched.writes, watched.stamps()["one"]) == (1, first)
        watched.clock.jump(STAMP_S - 29 * LOOK_S)
        await watched.heartbeat.look()
        assert (watched.writes, watched.stamps()["one"]) == (2, watched.now())
        assert watched.now() != first

    watched.run(test)


def test_a_changed_set_is_stamped_at_once(world: World, session: subprocess.Popen[bytes]) -> None:
    watched = Watched(world, {"one": entry_of(os.getpid())})

    async def test() -> None:
        await watched.heartbeat.look()
        first = watched.now()
        watched.clock.jump(LOOK_S)
        watched.amend(two=entry_of(session.pid))
        await watched.heartbeat.look()
        came = watched.now()
        assert watched.stamps() == {"one": came, "two": came}
        assert came != first
        watched.clock.jump(LOOK_S)
        session.kill()
        session.wait()
        await watched.heartbeat.look()
        assert watched.stamps() == {"one": watched.now(), "two": came}
        assert watched.writes == 3
        assert watched.heartbeat.held == {"one"}

    watched.run(test)


def test_nobody_to_stamp_is_no_write(world: World) -> None:
    watched = Watched(world, {"old": {"host": "vm", "last_seen": OLD}})

    async def test() -> None:
        for _ in range(3):
            await watched.heartbeat.look()
            watched.clock.jump(STAMP_S)
        assert watched.writes == 0
        assert watched.stamps() == {"old": OLD}

    watched.run(test)


def test_a_stamp_of_this_very_second_is_not_written_again(world: World) -> None:
    watched = Watched(world, {"one": entry_of(os.getpid(), last_seen=message.stamp(BEGAN))})

    async def test() -> None:
        await watched.heartbeat.look()
        assert (watched.writes, watched.heartbeat.passes) == (0, 1)

    watched.run(test)


def test_a_row_that_leaves_between_the_look_and_the_write_stays_away(world: World) -> None:
    watched = Watched(world, {"one": entry_of(os.getpid()), "two": entry_of(os.getpid())})
    watched.registry.before = lambda: watched.amend(two=None)

    async def test() -> None:
        await watched.heartbeat.look()
        assert watched.stamps() == {"one": watched.now()}

    watched.run(test)


def test_a_registry_that_cannot_be_written_is_told_once_and_tried_again(world: World) -> None:
    watched = Watched(world, {"one": entry_of(os.getpid())})

    def fail() -> None:
        raise RegistryWriteFailed("FAILED: the disk is full")

    async def test() -> None:
        watched.registry.before = fail
        for _ in range(3):
            await watched.heartbeat.look()
            watched.clock.jump(LOOK_S)
        assert (watched.told, watched.registry.tries) == (["heartbeat failed"], 3)
        assert watched.heartbeat.held == frozenset()
        watched.registry.before = lambda: None
        await watched.heartbeat.look()
        assert watched.stamps() == {"one": watched.now()}
        watched.registry.before = fail
        watched.clock.jump(STAMP_S)
        await watched.heartbeat.look()
        assert watched.told == ["heartbeat failed"] * 2, "another streak is told again"

    watched.run(test)


def test_a_registry_that_cannot_be_read_stamps_nobody_and_is_read_again(world: World) -> None:
    watched = Watched(world, {"one": entry_of(os.getpid())})
    path = Path(world.folder.registry)
    good = path.read_text()

    async def test() -> None:
        path.write_text("{")
        for _ in range(2):
            await watched.heartbeat.look()
        assert (watched.told, watched.writes) == (["heartbeat failed"], 0)
        assert path.read_text() == "{"
        path.write_text(good)
        await watched.heartbeat.look()
        assert watched.stamps() == {"one": watched.now()}

    watched.run(test)


def test_a_running_node_keeps_its_sessions_live(nodes: NodeWorld, session: subprocess.Popen[bytes]) -> None:
    nodes.join("a")
    nodes.amend("a", last_seen=OLD)
    nodes.amend("dead", **entry_of(session.pid, start=1))
    node = nodes.serve()
    until(lambda: nodes.registry()["agents"]["a"]["last_seen"] != OLD)
    nodes.amend("new", **entry_of(session.pid))
    until(lambda: nodes.registry()["agents"]["new"]["last_seen"] != OLD)
    assert nodes.registry()["agents"]["dead"]["last_seen"] == OLD
    until(lambda: nodes.state()["rows"] == ["a", "new"])
    session.kill()
    session.wait()
    until(lambda: nodes.state()["rows"] == ["a"])
    assert node.end() == 0
