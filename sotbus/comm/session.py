"""Which session this process belongs to: the key of its own self file, and the process that a join records.

Two sessions of one box and one folder must never take each other's handle, whether or not a launcher pinned anything
(decisions, sot-comm 13 and 22). So the key is the pin, else the row, else the nearest agent harness, else the tmux
pane, else the terminal's session leader.
"""

from __future__ import annotations

import os
from zlib import crc32

from sotbus.comm.box import MAX_LEAF_BYTES, host_problem
from sotbus.comm.liveness import is_live
from sotbus.comm.processes import Ancestry, ancestry, is_alive, pid_namespace, start_ticks
from sotbus.comm.self_file import NOPANE, TEMP_BYTES, row_leaf, row_of
from sotbus.errors import FolderError, GateRefused
from sotbus.message import unicode_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from sotbus.comm.box import Box
    from sotbus.comm.folder import Folder
    from sotbus.comm.processes import Process

REPIN_HINT = "unset SOT_COMM_SELF_FILE and SOT_WORKSPACE_ID, then: sotbus join"


class Session:
    """This process's session.

    :param own_path: the self file that is this session's alone.
    :param shared_path: the box's ``nopane`` file, written for other clients; None for a pin or a row.
    :param row: the workspace id its registry entry gets, or ``""``.
    :param process: pid and start tick that a join records; ``(0, "")`` where none is known.

    ``slot`` names the session's self file in its registry entry, so that the entry says whose it is.
    :param harness: the name of the nearest harness among the ancestors, or ``""``.
    """

    __slots__ = ("ancestry", "box", "harness", "own_path", "pidns", "process", "row", "shared_path")

    def __init__(
        self,
        own_path: str,
        shared_path: str | None,
        row: str,
        process: tuple[int, str],
        harness: str,
        ancestors: Ancestry,
        box: Box,
    ) -> None:
        self.own_path = own_path
        self.shared_path = shared_path if shared_path != own_path else None
        self.row = row
        self.harness = harness
        self.ancestry = ancestors
        self.box = box
        self.pidns = pid_namespace(os.getpid(), box.proc) or ""
        self.process = process

    def __repr__(self) -> str:
        return f"<Session {os.path.basename(self.own_path)} process={self.process}>"

    @property
    def slot(self) -> str:
        """The self file's name; for a private file with its folder's inode, the same through every mount of it."""
        leaf = os.path.basename(self.own_path)
        if not leaf.startswith(self.box.declared_host + "__"):
            try:
                leaf += f"-{os.stat(os.path.dirname(self.own_path)).st_ino}"
            except OSError:
                pass  # the folder is not there yet, so neither is anything that names this slot
        return unicode_of(leaf)

    @property
    def guarded(self) -> bool:
        """Whether the environment gave the slot (a pin, a row): the conflict guard and the agent gate hold there."""
        return self.shared_path is None and not self.own_path.endswith(NOPANE)

    def entry_fields(self) -> dict[str, Any]:
        """What a registry entry says of the session: its slot and its process.

        ``pidns`` is the pid namespace in which the pid means anything.
        """
        fields: dict[str, Any] = {"slot": self.slot}
        if self.process[0]:
            fields |= {"pid": self.process[0], "start": int(self.process[1])}
            if self.pidns:
                fields["pidns"] = self.pidns
        return fields

    def recorded_by(self, entry: Mapping[str, Any] | None) -> bool:
        """Whether a registry entry is this very session's."""
        if entry is None:
            return False
        slot = entry.get("slot")
        if isinstance(slot, str) and slot:
            return slot == self.slot
        return self.process[0] > 0 and same_process(entry, self.process)

    def taken_by_another(self, entry: Mapping[str, Any] | None) -> bool:
        """Whether another session of this box, alive as far as can be told, holds a registry entry.

        A process in another pid namespace cannot be looked at from here, so there the entry's own liveness decides.
        """
        if entry is None or entry.get("host") != self.box.declared_host or self.recorded_by(entry):
            return False
        pidns = entry.get("pidns")
        if isinstance(pidns, str) and pidns and self.pidns and pidns != self.pidns:
            return is_live(entry.get("last_seen"))
        return is_alive(entry.get("pid"), entry.get("start"), self.box.proc)

    def check_gate(self, entry: Mapping[str, Any] | None) -> None:
        """Refuse a pin or a row that a nested agent merely inherited (facts 12).

        At most one harness may lie between this process and the one that joined, that one included; where no joined
        process is among the ancestors, between this process and the top of its tree.

        *Errors*: :class:`GateRefused`.
        """
        if not self.guarded:
            return
        if not self.ancestry.readable:
            raise GateRefused(
                "this process's ancestors cannot all be read, so it may not act with a pinned identity; "
                "nothing was written",
                hint=REPIN_HINT,
            )
        chain = self.ancestry.chain
        joined = next((one for one in chain if entry is not None and same_process(entry, (one.pid, one.start))), None)
        below = chain[: chain.index(joined) + 1] if joined is not None else chain
        layers = Ancestry(below, readable=True, complete=True).layers()
        if len(layers) > 1:
            raise GateRefused(
                f"another agent ({layers[0].harness}, pid {layers[0].pid}) runs between this process and the session "
                "that this identity was given to, so it may not act as it; nothing was written",
                hint=REPIN_HINT,
            )

    def check_names(self) -> None:
        """Refuse a self file whose name no file system takes, before anything is written. *Errors*: FolderError."""
        if len(os.fsencode(os.path.basename(self.own_path))) + TEMP_BYTES > MAX_LEAF_BYTES:
            raise FolderError(
                f"FAILED: the self file's name is too long ({self.own_path}); nothing was written",
                hint="use a shorter SOT_SELF_HOST, SOT_WORKSPACE_ID or SOT_COMM_SELF_FILE",
            )


def same_process(entry: Mapping[str, Any], process: tuple[int, str]) -> bool:
    """Whether a registry entry records this process, by pid and start tick."""
    return (entry.get("pid"), str(entry.get("start"))) == process


def session_here(folder: Folder, box: Box, environ: Mapping[str, str], root: str) -> Session:
    """This process's session, by the environment and its ancestors.

    :param root: the project root; it is part of the own file's name, so that a terminal that moves between two projects
        keeps the handle it has in each.

    *Errors*: :class:`FolderError` where the declared host cannot name a file; nothing was made.
    """
    problem = host_problem(box.declared_host)
    pin = environ.get("SOT_COMM_SELF_FILE")
    if problem:
        raise FolderError(
            f"FAILED: {problem}, so it cannot name a self file; nothing was written",
            hint="set SOT_SELF_HOST to a plain host name",
        )
    ancestors = ancestry(os.getpid(), box.proc)
    layers = ancestors.layers()
    harness = layers[0] if layers else None
    process = (harness.pid, harness.start) if harness else leader(box.proc)
    name = harness.harness if harness else ""
    row = environ.get("SOT_WORKSPACE_ID", "")
    if pin:
        pin = os.path.abspath(pin)
        return Session(pin, None, row_of(pin, box.declared_host), process, name, ancestors, box)
    base = f"{folder.selves}/{box.declared_host}__"
    if row:
        return Session(f"{base}{row_leaf(row)}.txt", None, row, process, name, ancestors, box)
    key = _key(environ, ancestors, process, box.proc)
    own = f"{base}sotbus-{key}-{crc32(os.fsencode(root)):08x}.txt" if key else base + NOPANE[2:]
    return Session(own, base + NOPANE[2:], "", process, name, ancestors, box)


def leader(proc: str = "/proc") -> tuple[int, str]:
    """Pid and start tick of the session leader (setsid(2)), or ``(0, "")`` where it cannot be seen."""
    pid = os.getsid(0)
    try:
        start = start_ticks(pid, proc) if pid > 0 else None
    except OSError:
        start = None
    return (pid, start) if start else (0, "")


def _key(environ: Mapping[str, str], ancestors: Ancestry, process: tuple[int, str], proc: str) -> str:
    """The part of the own self file's name that tells sessions outside a row apart; ``""`` where nothing does."""
    layers = ancestors.layers()
    if layers:
        return f"{layers[0].harness}-{layers[0].pid}-{layers[0].start}"
    inherited = environ.get("CLAUDE_CODE_SESSION_ID")
    if inherited and not ancestors.complete:
        return "claude-" + row_leaf(inherited)[:64]
    server = _tmux_server(environ, ancestors)
    if server is not None:
        return f"tmux-{server.pid}-{server.start}-{environ['TMUX_PANE'][1:]}"
    if process[0]:
        return f"leader-{process[0]}-{process[1]}"
    sid, terminal = os.getsid(0), _terminal()
    if sid > 0:
        return f"sid-{sid}-{terminal}"
    return f"ns-{pid_namespace(os.getpid(), proc) or 0}-{terminal}" if terminal else ""


def _tmux_server(environ: Mapping[str, str], ancestors: Ancestry) -> Process | None:
    """The tmux server whose pane this process works in; None in a terminal that only inherited a pane's variables.

    The pane's own process is the server's child; another terminal opened from it has another controlling terminal.
    """
    words = environ.get("TMUX", "").split(",")
    pane = environ.get("TMUX_PANE", "")
    if len(words) < 2 or not (pane.startswith("%") and pane[1:].isascii() and pane[1:].isdigit()):
        return None
    chain = ancestors.chain
    for at, process in enumerate(chain):
        if str(process.pid) == words[1] and at > 0:
            terminals = {one.terminal for one in chain[:at] if one.terminal} | {ancestors.terminal} - {0}
            return process if len(terminals) <= 1 else None
    return None


def _terminal() -> int:
    """The device number of the terminal on a standard stream, 0 where there is none."""
    for fd in (0, 1, 2):
        try:
            if os.isatty(fd):
                return os.fstat(fd).st_rdev
        except OSError:
            continue
    return 0
