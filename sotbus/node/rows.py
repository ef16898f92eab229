"""The rows: the sessions of this box that this node watches, by the process that their join recorded.

A handle is held while its process lives. The registry entries of this host say who that is (``pid``, ``start``,
``pidns``), so that a node that starts later finds every session that joined before it, and rewrites none (decisions, A
row's workspace_id). A row that declared its handle by ``agent.join`` is kept in the node's store too, since a 0.6.6
session's entry does not say which process it is.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sotbus.comm import handles
from sotbus.comm.processes import is_alive, pid_namespace
from sotbus.comm.registry import entry_of, text_of
from sotbus.errors import BadHandle, Refused
from sotbus.node.store_file import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sotbus.comm.box import Box
    from sotbus.node.store import Store

ROW_PREFIX = "ws-"
"""How the workspace id of a session that a node watches begins (decisions, One bus out of two systems)."""


@dataclass(frozen=True)
class Row:
    """One row: its id, its process (``pid``, ``start`` in clock ticks since the boot, ``pidns``, ``boot``), its handle.

    ``handle`` is the one that it declared last and no other row since, or ``""``.
    """

    workspace_id: str
    pid: int
    start: int
    pidns: str
    boot: str
    handle: str = ""


def _check(handle: str) -> None:
    if not handles.is_handle(handle):
        raise BadHandle(f'not a handle: "{handle}"')


def _without(row: Row, handle: str) -> Row:
    return replace(row, handle="") if row.handle == handle else row


class Rows:
    """The rows of one box. Any thread may ask; whoever changes them waits for the one before and for the disk.

    :param store: keeps them for the next node of this box.

    *Durability*: a row and its handle are synced before :meth:`give` and :meth:`declare` return.
    """

    def __init__(self, box: Box, store: Store) -> None:
        self._box = box
        self._store = store
        self._pidns = pid_namespace(os.getpid(), box.proc) or ""
        self._boot = box.boot_id or ""
        self._turn = threading.Lock()
        self._rows: dict[str, Row] = {}  # replaced whole, never changed
        self._kept: tuple[Row, ...] = ()

    def __repr__(self) -> str:
        return f"<Rows {', '.join(self._rows) or 'none'}>"

    def __len__(self) -> int:
        return len(self._rows)

    def load(self) -> None:
        """Take up the rows that the node before this one kept and whose process lives.

        A row of another boot is dead; one of another pid namespace cannot be watched from here.

        *Errors*: StoreError.
        """
        with self._turn:
            self._kept = self._store.rows()
            here = (row for row in self._kept if row.boot == self._boot != "" and row.pidns == self._pidns)
            self._rows = {row.workspace_id: row for row in here if self._runs(row)}

    def give(self, pid: int, start: int) -> str:
        """The workspace id of the row of a process, a new one where it has none.

        *Errors*: :class:`Refused` where no such process lives here, and under ``persist_failed``.
        """
        if not is_alive(pid, start, self._box.proc):
            raise Refused(f"no process {pid} with start {start} runs on this box", "bad_request")
        with self._turn:
            rows = [row for row in self._rows.values() if self._runs(row)]
            for row in rows:
                if (row.pid, row.start) == (pid, start):
                    self._keep(rows)  # which it may not have been
                    return row.workspace_id
            row = self._new(f"{ROW_PREFIX}{os.urandom(6).hex()}", pid, start)
            self._keep([*rows, row])
            return row.workspace_id

    def declare(self, workspace_id: str, handle: str, agents: Mapping[str, Any]) -> None:
        """``agent.join``: a row's session declares its handle.

        A handle moves with its latest declaration: one row has it at a time.

        :param agents: the registry's entries.

        *Errors*: BadHandle; :class:`Refused` under ``unknown_workspace`` and ``persist_failed`` (facts 11): it holds
        for this node's life, and is saved when it comes again.
        """
        _check(handle)
        with self._turn:
            row = self._rows.get(workspace_id) or self._adopted(workspace_id, agents)
            if row is None or not self._runs(row):
                raise Refused(f"no such workspace: {workspace_id}", "unknown_workspace")
            left = {other.workspace_id: _without(other, handle) for other in self._rows.values()}
            self._keep((left | {workspace_id: replace(row, handle=handle)}).values())

    def ask(self, handle: str, agents: Mapping[str, Any]) -> None:
        """``agent.join`` of the empty row: a question whether a handle is free. Waits for no change, and no disk.

        *Errors*: BadHandle; :class:`Refused` under ``held_by_row``.
        """
        _check(handle)
        holder = self.holder(handle, agents)
        if holder:
            raise Refused(f"@{handle} is held by a row of this box ({holder})", "held_by_row")

    def holder(self, handle: str, agents: Mapping[str, Any]) -> str:
        """The workspace id of the live row that holds a handle, or ``""``."""
        for row in self._rows.values():
            if row.handle == handle and self._runs(row):
                return row.workspace_id
        entry = entry_of(agents, handle)
        row_id = text_of(entry, "workspace_id")
        return row_id if entry is not None and row_id and self._lives(entry) else ""

    def _adopted(self, workspace_id: str, agents: Mapping[str, Any]) -> Row | None:
        """A row that another program gave, found by its entry; None where none says it."""
        for handle in agents:
            entry = entry_of(agents, handle)
            if entry is not None and text_of(entry, "workspace_id") == workspace_id and self._lives(entry):
                return self._new(workspace_id, entry["pid"], int(entry["start"]))
        return None

    def _new(self, workspace_id: str, pid: int, start: int) -> Row:
        return Row(workspace_id, pid, start, self._pidns, self._boot)

    def _keep(self, rows: Iterable[Row]) -> None:
        """Under the turn: go by these rows, the dead ones left out, and save them.

        *Errors*: Refused under ``persist_failed``: memory has them, and the next change saves them (facts 11).
        """
        alive = tuple(row for row in rows if self._runs(row))
        self._rows = {row.workspace_id: row for row in alive}
        if alive != self._kept:
            try:
                self._store.keep_rows(alive)
            except StoreError as error:
                raise Refused(
                    f"the row could not be saved, and a node that ends loses it: {error}", "persist_failed"
                ) from error
            self._kept = alive

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
