"""The ops of a row and of a window, under a clock that a test moves: their bounds, and what makes a notice mail."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
from world import World

from sotbus.comm.processes import start_ticks
from sotbus.errors import MountHung, Refused
from sotbus.node.node import DRAIN_S, Node
from sotbus.node.ops import ANSWER_S, NodeOps, names_handle
from sotbus.node.refusal import refusal_payload
from sotbus.node.rows import Row, Rows
from sotbus.node.store import Store
from sotbus.node.wire import Connection

CLIENT_S = 5.0
"""How long a client waits for an answer (sot-comm v1, The wire)."""

CLIENT = cast("Connection", SimpleNamespace(name="sotd-window"))
ME = {"pid": os.getpid(), "start": int(start_ticks(os.getpid()) or 0)}


class SlowStore(Store):
    """A store on a disk that takes its time: until ``open`` is set."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.open = threading.Event()
        self.open.set()
        self.begun = threading.Event()
        self.waits = False

    def keep_rows(self, rows: Iterable[Row]) -> None:
        self.waits = True
        self.begun.set()
        opened = self.open.wait(30)
        self.waits = False
        assert opened
        super().keep_rows(rows)


class Ops:
    """The ops of a node that is a folder's view, rows and a log."""

    def __init__(self, world: World) -> None:
        self.store = SlowStore(str(world.base / "state" / "node.db"))
        self.rows = Rows(world.box(), self.store)
        self.told: list[tuple[str, dict[str, object]]] = []
        self.clock = trio.testing.MockClock()
        self.look_s = 0.0
        self.ops: NodeOps
        view = SimpleNamespace(look=self._look)
        log = SimpleNamespace(info=lambda event, **fields: self.told.append((event, fields)))
        self._node = cast("Node", SimpleNamespace(filer=SimpleNamespace(view=view), rows=self.rows, log=log))

    async def _look(self, *, since: float) -> Any:
        await trio.sleep(self.look_s)
        return SimpleNamespace(agents={})

    async def ask(self, op: str, **payload: object) -> dict[str, Any]:
        """The answer; the clock stands still."""
        try:
            return await self.ops.table()[op](payload, CLIENT)
        except (MountHung, Refused) as error:
            return refusal_payload(error)

    async def ask_late(self, op: str, **payload: object) -> dict[str, Any]:
        """The answer, which comes when the bound has passed and not before."""
        answers: list[dict[str, Any]] = []

        async def ask() -> None:
            answers.append(await self.ask(op, **payload))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            for step_s in (3.0, ANSWER_S - 3.01):
                await trio.testing.wait_all_tasks_blocked(0.05)
                self.clock.jump(step_s)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert answers == []
            self.clock.jump(0.02)
            await trio.testing.wait_all_tasks_blocked(0.05)
            nursery.cancel_scope.cancel()
        assert answers, "not within its bound"
        return answers[0]

    async def row(self) -> str:
        return str((await self.ask("sotbus.row", **ME))["workspace_id"])

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            self.ops = NodeOps(self._node)
            await test()

        trio.run(whole, clock=self.clock)


@pytest.fixture
def ops(world: World) -> Iterator[Ops]:
    made = Ops(world)
    yield made
    made.store.open.set()
    made.store.close()


def test_a_row_is_answered_before_its_client_gives_up_and_a_drain_ends() -> None:
    assert min(CLIENT_S, DRAIN_S) >= ANSWER_S + 0.5


@pytest.mark.parametrize("row", ["ws-1", ""])
def test_a_join_of_a_folder_that_hangs_is_failed_in_time_and_declares_nothing(row: str, ops: Ops) -> None:
    async def test() -> None:
        ops.look_s = float("inf")
        answer = await ops.ask_late("agent.join", workspace_id=row, handle="h")
        assert answer["code"] == "timeout"
        assert answer["error"] == "the comm folder did not answer within 4.5s; nothing was declared"
        assert "outcome_unknown" not in answer
        assert "mount" in answer["hint"]

    ops.run(test)


def test_a_join_whose_save_hangs_is_of_unknown_outcome_and_holds_up_no_question(ops: Ops) -> None:
    async def test() -> None:
        row = await ops.row()
        ops.store.open.clear()
        ops.store.begun.clear()
        answer = await ops.ask_late("agent.join", workspace_id=row, handle="h")
        assert (answer["code"], answer["outcome_unknown"]) == ("timeout", True)
        assert ops.store.begun.wait(30)
        assert ops.rows.holder("h", {}) == row, "memory has it, whatever becomes of the save"
        assert (await ops.ask("agent.join", workspace_id="", handle="h"))["code"] == "held_by_row"
        assert await ops.ask("agent.join", workspace_id="", handle="free") == {"ok": True}
        assert ops.store.waits
        answer = await ops.ask_late("agent.join", workspace_id=row, handle="g")
        assert answer["outcome_unknown"] is True
        ops.store.open.set()
        assert await ops.ask("agent.join", workspace_id=row, handle="k") == {"ok": True}
        assert [one.handle for one in ops.store.rows()] == ["k"]

    ops.run(test)


def test_a_row_whose_save_hangs_is_failed_in_time(ops: Ops) -> None:
    async def test() -> None:
        ops.store.open.clear()
        answer = await ops.ask_late("sotbus.row", **ME)
        assert (answer["code"], answer["outcome_unknown"]) == ("timeout", True)
        ops.store.open.set()
        assert await ops.row() == ops.store.rows()[0].workspace_id

    ops.run(test)


def test_the_time_of_the_look_counts_against_that_of_the_save(ops: Ops) -> None:
    async def test() -> None:
        row = await ops.row()
        ops.store.open.clear()
        ops.look_s = 2.9
        answer = await ops.ask_late("agent.join", workspace_id=row, handle="h")
        assert answer["outcome_unknown"] is True

    ops.run(test)


@pytest.mark.spec("S92")
def test_a_notice_is_told_without_its_text_and_counted(ops: Ops) -> None:
    async def test() -> None:
        for _ in range(2):
            assert await ops.ask("agent.send", text="private words", kind="info") == {"ok": True}
        assert (await ops.ask("agent.send", text="private words", to="h"))["code"] == "mail_requires_comm_file"
        assert ops.told == [("notice", {"client": "sotd-window"})] * 2
        assert ops.ops.notices == 2

    ops.run(test)


@pytest.mark.spec("S93")
@pytest.mark.parametrize(
    "notice",
    [
        {"to": "far"},
        {"handle": "far"},
        {"to": ["far"]},
        {"to": {"handle": "far"}},
        {"to": "../far"},
        {"target": "@proj-vm"},
        {"recipient": "proj-vm"},
        {"targets": ["x", "@proj-vm"]},
        {"whom": {"deep": [{"er": "@proj-vm"}]}},
    ],
    ids=str,
)
def test_a_notice_that_names_a_handle_is_mail(notice: dict[str, Any]) -> None:
    assert names_handle({"text": "done"} | notice)


@pytest.mark.spec("S92")
@pytest.mark.parametrize(
    "notice",
    [
        {},
        {"to": ""},
        {"handle": None},
        {"kind": "info", "level": 3},
        {"recipient": "two words"},
        {"name": "window1", "target": "proj-vm", "agent": "claude"},
        {"title": "@proj-vm"},
        {"text": ["@proj-vm", {"x": "@proj-vm"}]},
        {"icon": "@two words"},
        {"icon": "@"},
    ],
    ids=str,
)
def test_a_notice_that_names_none_is_none(notice: dict[str, Any]) -> None:
    assert not names_handle({"text": "@proj-vm"} | notice)


def test_a_very_deep_notice_is_looked_through() -> None:
    deep: Any = "@proj-vm"
    for _ in range(50_000):
        deep = [deep]
    assert names_handle({"x": deep})
    while isinstance(deep, list):  # taken apart by hand: to free it whole would be as deep
        deep = deep[0]
