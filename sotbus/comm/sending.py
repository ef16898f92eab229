"""Send: one line into one recipient's inbox, and a truthful answer (sot-comm v1, The inbox; facts 8.2)."""

from __future__ import annotations

from sotbus import message
from sotbus.comm import handles
from sotbus.comm.inbox import Inbox
from sotbus.comm.liveness import is_live
from sotbus.comm.registry import entry_of, text_of
from sotbus.errors import (
    CannotAppend,
    NeedsNode,
    NoLiveSession,
    NotHere,
    NotJoined,
    RegistryUnreadable,
    SotbusError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from sotbus.comm.client import Client
    from sotbus.comm.self_file import SelfFile


class Outbox:
    """A sender that has been verified once: its identity, and the registry as it was read for that.

    *Errors* of the constructor: :class:`NotJoined` (and GateRefused) with the page's words; nothing was sent.
    """

    __slots__ = ("_inboxes", "_repo", "agents", "client", "sender")

    def __init__(self, client: Client) -> None:
        self.client = client
        self._inboxes: dict[str, Inbox] = {}
        try:
            self.agents: dict[str, Any] = client.registry.agents()
        except RegistryUnreadable as error:
            who = client.identity({})
            raise NotJoined(
                f"the registry could not be read, so identity @{who.handle} is unverified; nothing was sent",
                hint=error.hint,
            ) from error
        self.sender: SelfFile = client.identity(self.agents, adopt=True)
        self._repo = message.unicode_of(self.sender.repo)
        me = self.sender.handle
        if me not in self.agents:
            raise NotJoined(
                f"your identity @{me} has no registry row; "
                f"reclaim it with {client.folder.bin}/comm-join.sh --name {me}",
                hint=f"sotbus join --name {me}",
            )

    def __repr__(self) -> str:
        return f"<Outbox of @{self.sender.handle}>"

    def send(self, to: str, text: str, *, broadcast: bool = False, message_id: str | None = None) -> bool:
        """File one line; returning at all means ``filed``: here (True), or by a daemon that it was handed to (False).

        What this process may not append itself, or this folder does not list, is handed to this box's daemon, else to
        the hub's (``$SOT_RELAY_ENDPOINT``): one route, chosen once (sot-comm v1, The wire; facts 4.1).

        :param to: the recipient's handle.
        :param broadcast: file a broadcast copy, whose ``to`` is empty.
        :param message_id: file it once, however often it is asked; only a node keeps message IDs, so one is needed.

        *Durability*: when this returns the line is on disk.
        *Errors*: any :class:`SotbusError`: not filed, and its text is the reason, unless ``outcome_unknown``.
        """
        client = self.client
        handles.check(to)
        message.check_text(text, client.settings.max_text_bytes)
        entry = entry_of(self.agents, to)
        if message_id is not None:
            self._hand_over(to, text, broadcast, message_id, NeedsNode("a message ID needs this box's node"))
            return False
        if not text_of(entry, "host"):
            if broadcast:
                raise NotHere(f"no such handle: {to}")
            self._hand_over(to, text, broadcast, None, NotHere(f"no box knows that handle: {to}"))
            return False
        assert entry is not None
        clock_s = client.clock()
        if not is_live(entry.get("last_seen"), clock_s):
            raise NoLiveSession(
                f"no live session holds @{to}",
                hint=f"@{to} was last seen at {message.shown(text_of(entry, 'last_seen') or 'no time')}; a session is "
                "live for ten minutes after its last command, and while a node watches it",
            )
        try:
            inbox = self._inbox(to)
        except CannotAppend as error:
            self._hand_over(to, text, broadcast, None, error)
            return False
        now = message.stamp(clock_s)
        line = message.encode(self.sender.handle, "" if broadcast else to, self._repo, text, now)
        inbox.append(line, client.settings.inbox_lock_wait_s)
        return True

    def _hand_over(self, to: str, text: str, broadcast: bool, message_id: str | None, alone: SotbusError) -> None:
        """Have a daemon file it. *Errors*: its own words; ``alone`` where no daemon can be reached."""
        from sotbus.comm.daemon import Daemon, NoDaemonError

        client, sender = self.client, self.sender.handle
        host, environ = client.box.declared_host, client.environ
        try:
            daemon: Daemon | None = Daemon.own(environ, host, name=sender, configured=client.settings.node_socket)
            assert daemon is not None
            answer = daemon.file(sender, to, text, broadcast=broadcast, message_id=message_id)
        except NoDaemonError as none:
            try:
                daemon = Daemon.relay(environ, host, name=sender)
                if daemon is None:
                    raise alone from none
                answer = daemon.file(sender, to, text, broadcast=broadcast, message_id=message_id)
            except NoDaemonError as none_there:
                raise alone from none_there
        answer.check()

    def _inbox(self, to: str) -> Inbox:
        """The recipient's inbox, under the lock manager that holds at this moment. *Errors*: FilingFailed."""
        manager = self.client.writer_gate.manager()
        inbox = self._inboxes.get(to)
        if inbox is None or inbox.manager is not manager:

            def on_cut(cut: int) -> None:
                self.client.notify(f"note: cut {cut} bytes of an unterminated line a dead writer left in @{to}'s inbox")

            inbox = self._inboxes[to] = Inbox(self.client.folder, to, manager, on_cut)
        return inbox

    def others(self) -> list[str]:
        """Every handle but the sender's own: whom a broadcast goes to."""
        return [to for to in self.agents if to != self.sender.handle]

    def broadcast(self, text: str) -> Iterator[tuple[str, SotbusError | None]]:
        """File a copy for every other handle; yields each handle and why it was not filed, or None."""
        for to in self.others():
            try:
                self.send(to, text, broadcast=True)
            except SotbusError as error:
                yield to, error
            else:
                yield to, None


def touch(client: Client, handle: str, agents: Mapping[str, Any] | None = None) -> None:
    """Stamp ``last_seen`` of a handle that is listed: best effort, silent, bounded (sot-comm v1, Bounds).

    Skipped where the stamp of this very second stands already: the write would change nothing.

    :param agents: the registry's entries, where the caller has read them just now.
    """
    now = message.stamp(client.clock())

    def change(document: dict[str, Any]) -> bool:
        entry = document["agents"].get(handle)
        if not isinstance(entry, dict) or entry.get("last_seen") == now:
            return False
        entry["last_seen"] = now
        return True

    try:
        entry = entry_of(client.registry.agents() if agents is None else agents, handle)
        if entry is not None and entry.get("last_seen") != now:
            client.registry.update(change, client.settings.touch_wait_s)
    except (SotbusError, OSError):
        return
