"""The rows: the sessions of this box that this node watches, by the process that their join recorded.

A handle is held while its process lives. The registry entries of this host say who that is (``pid``, ``start``,
``pidns``), so that a node that starts later finds every session that joined before it, and rewrites none (decisions, A
row's workspace_id). A row that declared its handle by ``agent.join`` is found the same way.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sotbus.comm import handles
from sotbus.comm.processes import is_alive, pid_namespace
from sotbus.comm.registry import entry_of, text_of
from sotbus.errors import BadHandle, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sotbus.comm.box import Box

ROW_PREFIX = "ws-"
"""How the workspace id of a session that a node watches begins (decisions, One bus out of two systems)."""


class Row:
    """One row: its id, its process, and the handle that it declared, or ``""``."""

    __slots__ = ("handle", "pid", "start", "workspace_id")

    def __init__(self, workspace_id: str, pid: int, start: int) -> None:
        self.workspace_id = workspace_id
        self.pid = pid
        self.start = start
        self.handle = ""

    def __repr__(self) -> str:
        return f"<Row {self.workspace_id} pid {self.pid} @{self.handle}>"


class Rows:
    """The rows of one box. The node's task alone changes them; :meth:`held` may be asked in any thread."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._pidns = pid_namespace(os.getpid(), box.proc) or ""
        self._rows: dict[str, Row] = {}

    def __repr__(self) -> str:
        return f"<Rows {', '.join(self._rows) or 'none'}>"

    def __len__(self) -> int:
        return len(self._rows)

    def give(self, pid: int, start: int) -> str:
        """The workspace id of the row of a process, a new one where it has none.

        *Errors*: :class:`Refused` where no such process lives here.
        """
        if not is_alive(pid, start, self._box.proc):
            raise Refused(f"no process {pid} with start {start} runs on this box", "bad_request")
        for row in [row for row in self._rows.values() if not self._runs(row)]:
            del self._rows[row.workspace_id]
        for row in self._rows.values():
            if (row.pid, row.start) == (pid, start):
                return row.workspace_id
        workspace_id = f"{ROW_PREFIX}{os.urandom(6).hex()}"
        self._rows[workspace_id] = Row(workspace_id, pid, start)
        return workspace_id

    def declare(self, workspace_id: str, handle: str, agents: Mapping[str, Any]) -> None:
        """``agent.join``: a row's session declares its handle; without a workspace id, a question whether it is free.

        A handle moves with its latest declaration: one row has it at a time.

        :param agents: the registry's entries.

        *Errors*: BadHandle; :class:`Refused` under ``unknown_workspace`` and ``held_by_row`` (facts 11).
        """
        if not handles.is_handle(handle):
            raise BadHandle(f'not a handle: "{handle}"')
        if not workspace_id:
            holder = self.holder(handle, agents)
            if holder:
                raise Refused(f"@{handle} is held by a row of this box ({holder})", "held_by_row")
            return
        row = self._rows.get(workspace_id) or self._adopt(workspace_id, agents)
        if row is None or not self._runs(row):
            raise Refused(f"no such workspace: {workspace_id}", "unknown_workspace")
        for other in self._rows.values():
            if other.handle == handle:
                other.handle = ""
        row.handle = handle

    def holder(self, handle: str, agents: Mapping[str, Any]) -> str:
        """The workspace id of the live row that holds a handle, or ``""``."""
        for row in self._rows.values():
            if row.handle == handle and self._runs(row):
                return row.workspace_id
        entry = entry_of(agents, handle)
        row_id = text_of(entry, "workspace_id")
        return row_id if entry is not None and row_id and self._lives(entry) else ""

    def _adopt(self, workspace_id: str, agents: Mapping[str, Any]) -> Row | None:
        """A row that a node before this one gave, or another program, found by its entry; None where none says it."""
        for handle in agents:
            entry = entry_of(agents, handle)
            if entry is not None and text_of(entry, "workspace_id") == workspace_id and self._lives(entry):
                row = self._rows[workspace_id] = Row(workspace_id, entry["pid"], entry["start"])
                row.handle = handle
                return row
        return None

    def held(self, agents: Mapping[str, Any]) -> frozenset[str]:
        """The handles whose sessions live on this box: of its entries with a live process, and of its rows."""
        rows = list(self._rows.values())
        found = {row.handle for row in rows if row.handle in agents and self._runs(row)}
        found.update(handle for handle in agents if self._lives(entry_of(agents, handle)))
        return frozenset(found)

    def _runs(self, row: Row) -> bool:
        return is_alive(row.pid, row.start, self._box.proc)

    def _lives(self, entry: Mapping[str, Any] | None) -> bool:
        """Whether an entry is of this host and its process lives, as far as that can be told from here."""
        if entry is None or text_of(entry, "host").lower() != self._box.declared_host.lower():
            return False
        pidns = entry.get("pidns")
        if isinstance(pidns, str) and pidns and pidns != self._pidns:
            return False
        return is_alive(entry.get("pid"), entry.get("start"), self._box.proc)
