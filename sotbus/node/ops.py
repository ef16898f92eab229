"""What a node does for a client of its socket besides filing mail: the page's ``agent.*`` ops, and sotbus's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import trio

import sotbus
from sotbus.comm.handles import is_handle
from sotbus.errors import BadRequest, FolderError, MountHung, Refused
from sotbus.node.status import status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sotbus.node.node import Node
    from sotbus.node.wire import Connection, Op

T = TypeVar("T")

ANSWER_S = 4.5
"""How long the op of a row may take, in seconds: its client waits 5 s, and a node that ends waits as long for it."""

ADDRESSEE = frozenset({"to", "handle"})
"""Keys of a notice that are there for an addressee: whatever stands under one makes it mail."""

NAMING = frozenset({"recipient", "mailbox"})
"""Keys of a notice whose value is an addressee where it has the form of a handle; others may name a window."""

WORDS = frozenset({"text", "msg", "message", "title", "body", "summary"})
"""Keys of a notice for what people read: it may begin with ``@`` as it likes."""


class NodeOps:
    """The ops of one node. ``notices`` counts the notifications that were taken."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._saving = trio.CapacityLimiter(1)
        self.notices = 0

    def __repr__(self) -> str:
        return f"<NodeOps, {self.notices} notices>"

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

        *Durability*: a declaration is synced before it is answered ok.
        *Errors*: BadHandle; Refused: ``unknown_workspace``, ``held_by_row``, ``persist_failed`` (facts 11);
        FolderError; MountHung after ``ANSWER_S``.
        *Cancellation*: the handle may be declared.
        """
        workspace_id, handle = payload.get("workspace_id"), payload.get("handle")
        if not isinstance(workspace_id, str) or not isinstance(handle, str):
            raise BadRequest("agent.join needs workspace_id and handle, each a string")
        begun = trio.current_time()
        try:
            with trio.fail_after(ANSWER_S):
                seen = await self._node.filer.view.look(since=begun)
        except OSError as error:
            raise FolderError(f"the comm folder cannot be looked at: {error.strerror or error}") from error
        except trio.TooSlowError:
            raise MountHung(
                f"the comm folder did not answer within {ANSWER_S:g}s; nothing was declared",
                hint="look at the folder's mount; the same agent.join may be sent again",
            ) from None
        rows = self._node.rows
        if not workspace_id:
            rows.ask(handle, seen.agents)
        else:
            await self._save(lambda: rows.declare(workspace_id, handle, seen.agents), begun + ANSWER_S)
        return {"ok": True}

    async def _save(self, change: Callable[[], T], deadline: float) -> T:
        """A change of the rows, in a thread. *Errors*: as of the change; MountHung, outcome unknown."""
        try:
            with trio.fail_at(deadline):
                return await trio.to_thread.run_sync(change, abandon_on_cancel=True, limiter=self._saving)
        except trio.TooSlowError:
            raise MountHung(
                f"the node's store was not written within {ANSWER_S:g}s; the outcome is unknown",
                hint="look at the disk of the state folder; the same request may be sent again",
                outcome_unknown=True,
            ) from None

    async def send(self, payload: Mapping[str, Any], connection: Connection) -> dict[str, Any]:
        """``agent.send``: a notification for people's pages, never mail (decisions, sot-comm 18).

        It is told in the log, without its text, counted in the node's state, and kept nowhere.

        *Errors*: Refused: ``mail_requires_comm_file`` for one that names a handle.
        """
        await trio.lowlevel.checkpoint()
        if names_handle(payload):
            raise Refused("agent.send carries no mail: a message for a handle is comm.file", "mail_requires_comm_file")
        self.notices += 1
        self._node.log.info("notice", client=connection.name)
        return {"ok": True}

    async def row(self, payload: Mapping[str, Any], _: Connection) -> dict[str, Any]:
        """The workspace id for a session of this box that joins: the node watches its process from then on.

        *Durability*: the row is synced before it is answered.
        *Errors*: BadRequest; Refused where no such process runs here, and under ``persist_failed``; MountHung after
        ``ANSWER_S``.
        *Cancellation*: the process may have its row; the same request answers it.
        """
        deadline = trio.current_time() + ANSWER_S
        pid, start = payload.get("pid"), payload.get("start")
        if type(pid) is not int or type(start) is not int:
            raise BadRequest("sotbus.row needs pid and start, each a whole number")
        given = await self._save(lambda: self._node.rows.give(pid, start), deadline)
        return {"ok": True, "workspace_id": given}

    async def status(self, _: Mapping[str, Any], __: Connection) -> dict[str, Any]:
        """What ``sotbus node`` shows."""
        await trio.lowlevel.checkpoint()
        return {"ok": True, "version": sotbus.__version__, "status": status_of(self._node)}


def names_handle(payload: Mapping[str, Any]) -> bool:
    """Whether a notice names a handle, which makes it mail (sot-comm v1, The wire).

    The page names no key for it. So it does by anything under ``to`` or ``handle``; by a handle under another key that
    is usual for an addressee; and by ``@`` and a handle under any key but those for people's words, however deep.
    """
    if any(payload.get(key) for key in ADDRESSEE):
        return True
    found: list[tuple[str, Any]] = list(payload.items())
    while found:
        key, value = found.pop()
        if key in WORDS:
            continue
        if isinstance(value, dict):
            found.extend(value.items())
        elif isinstance(value, list):
            found.extend((key, one) for one in value)
        elif isinstance(value, str) and (key in NAMING or value.startswith("@")) and is_handle(value.removeprefix("@")):
            return True
    return False
