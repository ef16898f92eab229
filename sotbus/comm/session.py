"""Which session this process belongs to: the key of its own self file, and the process that a join records.

Two sessions of one box and one folder must never take each other's handle, whether or not a launcher pinned anything
(decisions, sot-comm 13 and 22). So the key is the pin, else the row, else the nearest agent harness, else the tmux
pane, else the terminal's session leader.
"""

from __future__ import annotations

import os
from zlib import crc32

from sotbus.comm.box import host_problem
from sotbus.comm.processes import ancestry, is_alive, start_ticks
from sotbus.comm.self_file import NOPANE, SelfFile, row_leaf, row_of
from sotbus.comm.self_file import read as read_self
from sotbus.errors import FolderError, GateRefused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from sotbus.comm.box import Box
    from sotbus.comm.folder import Folder
    from sotbus.comm.processes import Ancestry
    from sotbus.comm.project import Project


class Session:
    """This process's session.

    :param own_path: the self file that is this session's alone.
    :param shared_path: the box's ``nopane`` file, written for other clients; None for a pin or a row.
    :param row: the workspace id its registry entry gets, or ``""``.
    :param pid: the process that a join records, with ``start``, its start tick; 0 where none is known.
    :param harness: the name of the nearest harness among the ancestors, or ``""``.
    """

    __slots__ = ("ancestry", "harness", "own_path", "pid", "pinned", "row", "shared_path", "start")

    def __init__(
        self,
        own_path: str,
        shared_path: str | None,
        row: str,
        pinned: bool,
        process: tuple[int, str],
        harness: str,
        ancestors: Ancestry,
    ) -> None:
        self.own_path = own_path
        self.shared_path = shared_path
        self.row = row
        self.pinned = pinned
        self.pid, self.start = process
        self.harness = harness
        self.ancestry = ancestors

    def __repr__(self) -> str:
        return f"<Session {os.path.basename(self.own_path)} pid={self.pid}>"

    @property
    def guarded(self) -> bool:
        """Whether the environment gave the slot (a pin, a row): the conflict guard and the agent gate hold there."""
        return self.shared_path is None and not self.own_path.endswith(NOPANE)

    def recorded_by(self, entry: Mapping[str, Any] | None) -> bool:
        """Whether a registry entry records this very session's process."""
        return entry is not None and self.pid > 0 and same_process(entry, (self.pid, self.start))

    def taken_by_another(self, entry: Mapping[str, Any] | None, box: Box) -> bool:
        """Whether another session of this box, alive now, holds a registry entry."""
        return (
            entry is not None
            and entry.get("host") == box.declared_host
            and not self.recorded_by(entry)
            and is_alive(entry.get("pid"), entry.get("start"), box.proc)
        )

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
                hint="unset SOT_COMM_SELF_FILE and SOT_WORKSPACE_ID, then: sotbus join",
            )
        chain = self.ancestry.chain
        joined = next((one for one in chain if entry is not None and same_process(entry, (one.pid, one.start))), None)
        below = chain[: chain.index(joined) + 1] if joined is not None else chain
        layers = type(self.ancestry)(below, True, True).layers()
        if len(layers) > 1:
            raise GateRefused(
                f"another agent ({layers[0].harness}, pid {layers[0].pid}) runs between this process and the session "
                "that this identity was given to, so it may not act as it; nothing was written",
                hint="unset SOT_COMM_SELF_FILE and SOT_WORKSPACE_ID, then: sotbus join",
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
    if problem and not pin:
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
        return Session(pin, None, row_of(pin, box.declared_host), True, process, name, ancestors)
    base = f"{folder.selves}/{box.declared_host}__"
    if row:
        return Session(f"{base}{row_leaf(row)}.txt", None, row, False, process, name, ancestors)
    key = _key(environ, ancestors, process, box.proc)
    own = f"{base}sotbus-{key}-{crc32(os.fsencode(root)):08x}.txt" if key else base + NOPANE[2:]
    return Session(own, base + NOPANE[2:], "", False, process, name, ancestors)


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
        return "claude-" + row_leaf(inherited)
    tmux = environ.get("TMUX", "").split(",")
    pane = environ.get("TMUX_PANE", "").removeprefix("%")
    if len(tmux) > 1 and tmux[1].isdigit() and pane.isdigit():
        try:
            started = start_ticks(tmux[1], proc)
        except OSError:
            started = None
        if started:
            return f"tmux-{tmux[1]}-{started}-{pane}"
    return f"leader-{process[0]}-{process[1]}" if process[0] else ""


def identify(
    session: Session, project: Project, box: Box, entry_of: Callable[[str], Mapping[str, Any] | None]
) -> tuple[SelfFile | None, str]:
    """The handle this session acts as in this project, and a note for standard error (``""`` for none).

    Its own file first; the shared one only where it names this root and no other live session of the box holds that
    handle.

    :param entry_of: a handle's registry entry, asked only for the shared file.
    """
    note = ""
    own = read_self(session.own_path)
    if own is not None:
        if own.root == project.root:
            return own, ""
        note = f"note: {session.own_path} names @{own.handle} for {own.root}, not for this project; it was not used"
    if session.shared_path is not None and session.shared_path != session.own_path:
        shared = read_self(session.shared_path)
        if (
            shared is not None
            and shared.root == project.root
            and not session.taken_by_another(entry_of(shared.handle), box)
        ):
            return shared, ""
    return None, note
