"""The rows: which handles are held by a live process of this box, and who may declare one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from world import World

from sotbus.comm.processes import pid_namespace, start_ticks
from sotbus.errors import BadHandle, Refused
from sotbus.node.rows import Row, Rows
from sotbus.node.store import Store
from sotbus.node.store_file import StoreError

ME = os.getpid()


def start_of(pid: int) -> int:
    return int(start_ticks(pid) or 0)


class Session:
    """A process that lives until it is ended."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.pid = self.process.pid
        self.start = start_of(self.pid)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin:
            self.process.stdin.close()

    def entry(self, **more: Any) -> dict[str, Any]:
        """Its entry in the registry."""
        return {"host": "vm", "workspace_id": "", "pid": self.pid, "start": self.start} | more


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session()
    yield made
    made.end()


@pytest.fixture
def store(world: World) -> Iterator[Store]:
    made = Store(str(world.base / "state" / "node.db"))
    yield made
    made.close()


@pytest.fixture
def rows(world: World, store: Store) -> Rows:
    return Rows(world.box(), store)


def after_a_restart(world: World, store: Store, **box: Any) -> Rows:
    """The rows of the node that starts next, on a box with these marks."""
    here = world.box()
    for name, value in box.items():
        setattr(here, name, value)
    rows = Rows(here, store)
    rows.load()
    return rows


def refused(ask: Callable[..., object], *words: Any) -> str:
    with pytest.raises(Refused) as caught:
        ask(*words)
    return caught.value.code


def test_a_process_has_one_row(rows: Rows, session: Session) -> None:
    row = rows.give(session.pid, session.start)
    assert row.startswith("ws-")
    assert len(row) == 15
    assert rows.give(session.pid, session.start) == row
    assert rows.give(ME, start_of(ME)) != row
    assert len(rows) == 2


def test_a_row_ends_with_its_process(rows: Rows, session: Session) -> None:
    row = rows.give(session.pid, session.start)
    rows.declare(row, "h", {})
    assert rows.holder("h", {}) == row
    session.end()
    assert rows.holder("h", {}) == ""
    assert refused(rows.declare, row, "h", {}) == "unknown_workspace"
    rows.give(ME, start_of(ME))
    assert len(rows) == 1


@pytest.mark.parametrize(("pid", "start"), [(ME, 1), (0, 0), (-1, 5), (1 << 30, 5)], ids=range(4))
def test_a_process_that_does_not_run_here_gets_no_row(rows: Rows, pid: int, start: int) -> None:
    with pytest.raises(Refused, match=f"no process {pid} with start {start} runs on this box"):
        rows.give(pid, start)


@pytest.mark.spec("S90")
def test_a_handle_moves_with_its_latest_declaration(rows: Rows, session: Session) -> None:
    one, two = rows.give(session.pid, session.start), rows.give(ME, start_of(ME))
    rows.declare(one, "h", {})
    rows.declare(two, "h", {})
    assert rows.holder("h", {}) == two
    rows.declare(one, "g", {})
    assert (rows.holder("g", {}), rows.holder("h", {})) == (one, two)


@pytest.mark.spec("S91")
def test_the_empty_row_is_told_which_row_holds_a_handle(rows: Rows, session: Session) -> None:
    rows.ask("h", {})
    row = rows.give(session.pid, session.start)
    rows.declare(row, "h", {})
    with pytest.raises(Refused, match=f"@h is held by a row of this box \\({row}\\)") as caught:
        rows.ask("h", {})
    assert caught.value.code == "held_by_row"
    rows.ask("H", {})  # handles are told apart by case
    with pytest.raises(BadHandle, match=r'not a handle: "\.\./h"'):
        rows.ask("../h", {})


@pytest.mark.spec("S90", "S91")
def test_a_row_that_declared_outlives_its_node_though_its_entry_names_no_process(
    world: World, store: Store, rows: Rows, session: Session
) -> None:
    """As a 0.6.6 join writes the entry: without pid and start."""
    agents = {"h": {"host": "vm", "workspace_id": "ws-of-it"}}
    row = rows.give(session.pid, session.start)
    rows.declare(row, "h", agents)
    after = after_a_restart(world, store)
    assert after.held(agents) == {"h"}
    assert refused(after.ask, "h", agents) == "held_by_row"
    assert after.give(session.pid, session.start) == row
    after.declare(row, "k", agents)
    assert [one.handle for one in store.rows()] == ["k"]
    session.end()
    assert len(after_a_restart(world, store)) == 0


def test_a_row_that_has_no_handle_yet_or_no_more_outlives_its_node(
    world: World, store: Store, rows: Rows, session: Session
) -> None:
    one, two = rows.give(session.pid, session.start), rows.give(ME, start_of(ME))
    rows.declare(one, "h", {})
    rows.declare(two, "h", {})
    after = after_a_restart(world, store)
    assert after.holder("h", {}) == two
    after.declare(one, "g", {})
    assert {row.workspace_id: row.handle for row in store.rows()} == {one: "g", two: "h"}


@pytest.mark.parametrize("marks", [{"boot_id": "another"}, {"boot_id": None}], ids=["another boot", "no boot"])
def test_a_row_of_another_boot_is_dead_whatever_runs_under_its_numbers(
    marks: dict[str, Any], world: World, store: Store, rows: Rows
) -> None:
    rows.give(ME, start_of(ME))
    assert len(after_a_restart(world, store)) == 1
    assert len(after_a_restart(world, store, **marks)) == 0


def test_a_row_whose_boot_is_not_known_is_not_taken_up(world: World, store: Store) -> None:
    store.keep_rows([Row("ws-1", ME, start_of(ME), pid_namespace(ME) or "", "", "h")])
    assert len(after_a_restart(world, store, boot_id=None)) == 0


def test_a_row_of_another_pid_namespace_is_not_taken_up(world: World, store: Store) -> None:
    store.keep_rows([Row("ws-1", ME, start_of(ME), "1", world.box().boot_id or "", "h")])
    assert len(after_a_restart(world, store)) == 0


def test_a_dead_row_leaves_the_store_with_the_next_change(store: Store, rows: Rows, session: Session) -> None:
    rows.declare(rows.give(session.pid, session.start), "h", {})
    mine = rows.give(ME, start_of(ME))
    session.end()
    rows.declare(mine, "g", {})
    assert [row.workspace_id for row in store.rows()] == [mine]


def test_a_row_that_cannot_be_saved_is_refused_and_stays_as_it_was(
    world: World, store: Store, rows: Rows, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = rows.give(session.pid, session.start), rows.give(ME, start_of(ME))
    rows.declare(one, "h", {})
    before = store.rows()

    def full(_: object) -> None:
        raise StoreError("the node's store /s/node.db cannot be used: database or disk is full")

    monkeypatch.setattr(store, "keep_rows", full)
    with pytest.raises(
        Refused, match=r"could not be saved, and a node that ends loses it: .*/s/node\.db.* is full"
    ) as caught:
        rows.declare(two, "h", {})
    assert caught.value.code == "persist_failed"
    assert rows.holder("h", {}) == two  # until this node ends
    assert refused(rows.declare, two, "h", {}) == "persist_failed"
    assert refused(rows.give, ME, start_of(ME)) == "persist_failed"
    monkeypatch.undo()
    assert store.rows() == before
    rows.declare(two, "h", {})
    assert after_a_restart(world, store).holder("h", {}) == two


def test_a_declaration_that_changes_nothing_writes_nothing(
    store: Store, rows: Rows, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = rows.give(session.pid, session.start)
    rows.give(ME, start_of(ME))
    rows.declare(row, "h", {})
    kept: list[object] = []
    monkeypatch.setattr(store, "keep_rows", kept.append)
    rows.declare(row, "h", {})
    rows.give(session.pid, session.start)
    assert kept == []


def test_a_row_of_a_node_before_this_one_is_found_by_its_entry(rows: Rows, session: Session) -> None:
    agents = {"h": session.entry(workspace_id="ws-before"), "other": session.entry(workspace_id="ws-x", host="far")}
    assert rows.holder("h", agents) == "ws-before"
    assert refused(rows.ask, "h", agents) == "held_by_row"
    assert rows.holder("other", agents) == ""
    assert refused(rows.declare, "ws-x", "k", agents) == "unknown_workspace"
    rows.declare("ws-before", "k", agents)
    assert rows.holder("k", {}) == "ws-before"
    session.end()
    assert (rows.holder("h", agents), rows.holder("k", {})) == ("", "")


def test_a_handle_is_held_while_its_process_lives(rows: Rows, session: Session) -> None:
    here = pid_namespace(ME)
    agents: dict[str, Any] = {
        "plain": session.entry(),
        "here": session.entry(pidns=here),
        "cased": session.entry(host="VM"),
        "elsewhere": session.entry(host="far"),
        "container": session.entry(pidns="1"),
        "reused": session.entry(start=session.start - 1),
        "nobody": {"host": "vm"},
        "odd": session.entry(pid="x"),
        "null": None,
        "list": [],
    }
    assert rows.held(agents) == {"plain", "here", "cased"}
    session.end()
    assert rows.held(agents) == frozenset()


def test_a_declared_handle_is_held_once_the_registry_lists_it(rows: Rows, session: Session) -> None:
    row = rows.give(session.pid, session.start)
    rows.declare(row, "h", {})
    assert rows.held({}) == frozenset()
    assert rows.held({"h": {"host": "vm"}}) == {"h"}
    session.end()
    assert rows.held({"h": {"host": "vm"}}) == frozenset()
