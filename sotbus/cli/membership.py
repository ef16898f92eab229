"""``sotbus join`` and ``sotbus leave`` (facts 8.4 and 8.6)."""

from __future__ import annotations

import os

from sotbus.cli import options, terminal
from sotbus.cli.main import open_client
from sotbus.comm import handles, membership
from sotbus.comm.runtime_folder import socket_path
from sotbus.errors import NeedsNode, NotJoined, SotbusError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.comm.box import Box
    from sotbus.comm.client import Client
    from sotbus.comm.daemon import Daemon

NODE_WAIT_S = 2.0
"""How long a join waits for this box's node, in seconds; it goes on without it then."""


def run_join(words: list[str], box: Box | None) -> int:
    made = options.parser(
        "join",
        "Take a handle, so that mail can reach this session. Without --name it is named after the project folder and "
        "the host; a second session in the same folder gets -2, -3, ... of that name.",
        "  sotbus join\n"
        "  sotbus join --name reviewer --expertise 'rust, databases'\n\n"
        "exit status: 0 joined, 1 FAILED, 2 usage, 3 the slot or the handle is another session's (see --repin)",
    )
    made.add_argument("--name", help="the handle, word for word: 1 to 64 of A-Za-z0-9._-")
    made.add_argument("--expertise", metavar="LIST", help="what this session knows, separated by commas")
    made.add_argument("--repin", action="store_true", help="take the slot or handle even if it is another session's")
    made.add_argument("--pid", type=int, help="the process whose life is the session's, instead of the one found")
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    client = open_client(box)
    listed = given.expertise if given.expertise is not None else client.environ.get("SOT_COMM_EXPERTISE", "")
    expertise = [word for part in listed.split(",") if (word := part.strip())]
    joined = membership.join(
        client,
        name=given.name,
        expertise=expertise,
        repin=given.repin,
        pid=given.pid,
        watch=lambda process: _watch(client, process),
    )
    _declare(client, joined.handle)
    if joined.beside:
        terminal.err(f"note: @{joined.beside} is held by another session in this folder; this one is @{joined.handle}")
    terminal.out(f"Joined sot-comm as @{joined.handle}  ({terminal.shown(joined.repo)} on {client.box.declared_host}).")
    terminal.out(f"  inbox: {joined.inbox}")
    terminal.out(f"Others registered: {terminal.shown(', '.join(joined.others)) or 'none'}")
    return 0


def _node(client: Client) -> Daemon | None:
    """This box's daemon, where there is a socket to ask it on."""
    path = client.environ.get("SOT_SOCKET") or client.settings.node_socket
    if not path and not os.path.exists(path := socket_path(client.environ)):
        return None  # the usual case, without the import
    from sotbus.comm.daemon import Daemon, NoDaemonError

    try:
        return Daemon.own(client.environ, client.box.declared_host, configured=client.settings.node_socket)
    except NoDaemonError:
        return None


def _watch(client: Client, process: tuple[int, str]) -> str:
    """Have the node watch a process, whose handle is live while it lives; ``""`` where no node of ours answers."""
    node = _node(client)
    if node is None:
        return ""
    try:
        answer = node.ask("sotbus.row", {"pid": process[0], "start": int(process[1])}, NODE_WAIT_S)
    except SotbusError:
        return ""
    row = answer.payload.get("workspace_id") if answer.ok else ""
    return row if isinstance(row, str) else ""


def _declare(client: Client, handle: str) -> None:
    """Tell the daemon which handle the row has (``agent.join``); a failure is a warning only (facts 8.4)."""
    row = client.session.row
    node = _node(client) if row else None
    if node is None:
        return
    try:
        node.join(row, handle, timeout_s=NODE_WAIT_S).check()
    except NeedsNode:
        return
    except SotbusError as error:
        terminal.err(
            f"warning: the daemon of this box does not know @{handle} as its row's: {terminal.shown(str(error))}"
        )


def run_leave(words: list[str], box: Box | None) -> int:
    made = options.parser(
        "leave",
        "Give this session's handle back. The inbox and the cursor stay, so nothing unread is lost.",
        "  sotbus leave\n  sotbus leave --name old-vm     remove another handle's row",
        usage_status=1,
    )
    made.add_argument("--name", help="another handle; only its registry row is removed")
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    client = open_client(box)
    if given.name is None:
        try:
            client.identity(check=False)
        except NotJoined as error:
            if not str(error).startswith("Not joined"):
                raise
            terminal.out("Not joined — nothing to do.")
            return 0
    name = handles.check(given.name.removeprefix("@")) if given.name is not None else None
    client.ensure()
    handle, found = membership.leave(client, name)
    if given.name is None:
        if found == membership.ANOTHERS:
            terminal.out(f"Left sot-comm (@{handle} is another session's by now; its row was left alone).")
        else:
            terminal.out(f"Left sot-comm (@{handle} removed).")
    elif found == membership.ABSENT:
        terminal.out(f"@{handle} not in registry — nothing to do.")
    else:
        terminal.out(f"Removed @{handle} from the registry (row only; comm-despawn.sh does full teardown).")
    return 0
