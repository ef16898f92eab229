"""What a node does for a client of its socket besides filing mail: the page's ``agent.*`` ops, and sotbus's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

import sotbus
from sotbus.errors import BadRequest, FolderError, Refused
from sotbus.node.status import status_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sotbus.node.node import Node
    from sotbus.node.wire import Connection, Op


class NodeOps:
    """The ops of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.notices = 0

    def table(self) -> dict[str, Op]:
        """Each op by its name on the wire."""
        return {
            "agent.join": self.join,
            "agent.send": self.send,
            "sotbus.row": self.row,
            "sotbus.status": self.status,
        }

    async def join(self, payload: Mapping[str, Any], _: Connection) -> dict[str, Any]:
        """``agent.join {workspace_id, handle}``: a row's session declares its handle; or a question whether it is free.

        *Errors*: BadHandle; Refused: ``unknown_workspace``, ``held_by_row`` (facts 11); FolderError.
        """
        workspace_id, handle = payload.get("workspace_id"), payload.get("handle")
        if not isinstance(workspace_id, str) or not isinstance(handle, str):
            raise BadRequest("agent.join needs workspace_id and handle, each a string")
        try:
            seen = await self._node.filer.view.look(since=trio.current_time())
        except OSError as error:
            raise FolderError(f"the comm folder cannot be looked at: {error.strerror or error}") from error
        self._node.rows.declare(workspace_id, handle, seen.agents)
        return {"ok": True}

    async def send(self, payload: Mapping[str, Any], _: Connection) -> dict[str, Any]:
        """``agent.send``: a notification for people's pages, kept nowhere (decisions, sot-comm 18); never mail.

        *Errors*: Refused: ``mail_requires_comm_file`` for one that names a handle.
        """
        await trio.lowlevel.checkpoint()
        if any(payload.get(key) for key in ("to", "handle")):
            raise Refused("agent.send carries no mail: a message for a handle is comm.file", "mail_requires_comm_file")
        self.notices += 1
        return {"ok": True}

    async def row(self, payload: Mapping[str, Any], _: Connection) -> dict[str, Any]:
        """The workspace id for a session of this box that joins: the node watches its process from then on.

        *Errors*: BadRequest; Refused where no such process runs here.
        """
        await trio.lowlevel.checkpoint()
        pid, start = payload.get("pid"), payload.get("start")
        if type(pid) is not int or type(start) is not int:
            raise BadRequest("sotbus.row needs pid and start, each a whole number")
        return {"ok": True, "workspace_id": self._node.rows.give(pid, start)}

    async def status(self, _: Mapping[str, Any], __: Connection) -> dict[str, Any]:
        """What ``sotbus node`` shows."""
        await trio.lowlevel.checkpoint()
        return {"ok": True, "version": sotbus.__version__, "status": status_of(self._node)}
