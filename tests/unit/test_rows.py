"""The rows: which handles are held by a live process of this box, and who may declare one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from world import World

from sotbus.comm.processes import pid_namespace, start_ticks
from sotbus.errors import BadHandle, Refused
from sotbus.node.rows import Rows

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
def rows(world: World) -> Rows:
    return Rows(world.box())


def refused(rows: Rows, *words: Any) -> str:
    with pytest.raises(Refused) as caught:
        rows.declare(*words)
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
    assert refused(rows, row, "h", {}) == "unknown_workspace"
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
    rows.declare("", "h", {})
    row = rows.give(session.pid, session.start)
    rows.declare(row, "h", {})
    with pytest.raises(Refused, match=f"@h is held by a row of this box \\({row}\\)") as caught:
        rows.declare("", "h", {})
    assert caught.value.code == "held_by_row"
    rows.declare("", "H", {})  # handles are told apart by case
    with pytest.raises(BadHandle, match=r'not a handle: "\.\./h"'):
        rows.declare("", "../h", {})


def test_a_row_of_a_node_before_this_one_is_found_by_its_entry(rows: Rows, session: Session) -> None:
    agents = {"h": session.entry(workspace_id="ws-before"), "other": session.entry(workspace_id="ws-x", host="far")}
    assert rows.holder("h", agents) == "ws-before"
    assert refused(rows, "", "h", agents) == "held_by_row"
    assert rows.holder("other", agents) == ""
    assert refused(rows, "ws-x", "k", agents) == "unknown_workspace"
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
