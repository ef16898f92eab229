"""What this box's node says of itself when it is asked over its socket, or why it says nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sotbus.peers import HUB

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sotbus.comm.daemon import Answer

ASK_S = 2.0
"""How long a node may take to tell its state, in seconds: it answers from memory, in milliseconds."""

STATUS = "sotbus.status"


@dataclass(frozen=True)
class Link:
    """One link of a node, by the other node's name; ``why`` says what it is down for, ``""`` where nobody knows."""

    node: str
    role: str
    up: bool
    why: str = ""


@dataclass(frozen=True)
class NodeView:
    """A node as it was just now. One of the four says something:

    :param status: what ``sotbus node --json`` shows.
    :param absent: why there is none to ask: nothing was sent.
    :param silent: what came instead of an answer from one that is there.
    :param strange: what a daemon answered that tells no state: one of another program, or a node that is ending.
    """

    status: Mapping[str, Any] | None = None
    absent: str = ""
    silent: str = ""
    strange: str = ""

    @property
    def pid(self) -> object:
        return self._told("pid", int) or "?"

    @property
    def comm_folder(self) -> str:
        """The folder that it serves; ``""`` where it does not say."""
        return str(self._told("comm_folder", str) or "")

    @property
    def holds_links(self) -> bool:
        """Whether a plugin of its config can hold links."""
        return bool(self._told("deliveries", dict))

    @property
    def links(self) -> list[Link]:
        """Its links, whatever else a node of another version tells of them."""
        return [
            Link(str(one.get("node")), str(one.get("role")), one.get("up") is True, str(one.get("why") or ""))
            for one in self._told("links", list) or ()
            if isinstance(one, dict)
        ]

    @property
    def hub(self) -> Link | None:
        """Its link to its hub; a node has one hub at most (:mod:`sotbus.peers`)."""
        return next((link for link in self.links if link.role == HUB), None)

    @property
    def deaf(self) -> list[str]:
        """Its deliveries that ended, were started again, and listen nowhere now."""
        deliveries, restarts = self._told("deliveries", dict) or {}, self._told("restarts", dict) or {}
        transports = {name: told.get("transport") for name, told in deliveries.items() if isinstance(told, dict)}
        return [
            name
            for name, transport in transports.items()
            if restarts.get(name) and isinstance(transport, dict) and not transport.get("listening")
        ]

    def serves(self, root: str) -> bool:
        """Whether its comm folder is this one; one that does not say is taken at its word."""
        return not self.comm_folder or os.path.realpath(self.comm_folder) == os.path.realpath(root)

    def _told(self, key: str, kind: type) -> Any:
        value = (self.status or {}).get(key)
        return value if isinstance(value, kind) else None


def look(environ: Mapping[str, str], host: str, configured: str | None) -> NodeView:
    """Ask this box's node, where the commands would (:meth:`Daemon.own`), for at most ``ASK_S``. Never raises for it.

    :param configured: the socket that the config names, or None.
    """
    from sotbus.comm.daemon import Daemon, NoDaemonError

    try:
        answer = Daemon.own(environ, host, configured=configured).ask(STATUS, {}, ASK_S)
    except NoDaemonError as error:
        return NodeView(absent=str(error))
    return _view(answer)


def look_at_relay(environ: Mapping[str, str], host: str) -> NodeView:
    """The same of the daemon at ``$SOT_RELAY_ENDPOINT``, which commands hand mail to where this box has none."""
    from sotbus.comm.daemon import RELAY_ENDPOINT, Daemon, NoDaemonError

    try:
        daemon = Daemon.relay(environ, host)
        if daemon is None:
            return NodeView(absent=f"${RELAY_ENDPOINT} is not set")
        return _view(daemon.ask(STATUS, {}, ASK_S))
    except NoDaemonError as error:
        return NodeView(absent=str(error))


def _view(answer: Answer) -> NodeView:
    status = answer.payload.get("status")
    if answer.ok and isinstance(status, dict):
        return NodeView(status=status)
    if answer.payload:  # words of the daemon's own, though no state
        return NodeView(strange=answer.error or "it has no state to show")
    return NodeView(silent=answer.error or "it said nothing")
