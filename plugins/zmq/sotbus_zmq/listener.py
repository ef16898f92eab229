"""Listens for peers that dial this node: one ROUTER for all of them, a link for each."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import trio
import zmq

from sotbus.api import SotbusError
from sotbus_zmq import frames, monitor, zap
from sotbus_zmq.endpoint import Endpoint
from sotbus_zmq.frames import Kind, MalformedError, OtherVersionError, Reason
from sotbus_zmq.link import Link
from sotbus_zmq.peer_state import ACCEPTED, PeerState
from sotbus_zmq.pump import Parts, Pump, monitor_of
from sotbus_zmq.serving import GREETING_S, Serving
from sotbus_zmq.tcp import Newcomers, Tcp

BYE_S = 0.05
"""How long a peer that is sent away has to hear why, in seconds: what it sends meanwhile is dropped."""

REMEMBERED = 1024
"""Connections that were sent away last; what they sent before they heard it is nothing new."""

LATER = 1 / 8
"""How much later than its dialler a listener asks for a sign of life, as a part of what is left of the peer's time: so
that the two do not ask at once all the time."""

KEEPALIVE_S = 30
"""TCP asks a silent connection whether it is still there (tcp(7)). Links have their own heartbeats; this is for the
connections that never become one."""

HELLO_S = 2 * GREETING_S
"""How long an accepted connection may take to say hello, its handshake included, in seconds."""


class Accepted(NamedTuple):
    """A link and its TCP socket."""

    link: Link
    state: PeerState
    tcp: Tcp | None


class Listener:
    """Bound from its making on.

    ``key`` is this node's, as it was then.

    :param peer_of: the peer that a public key belongs to now, or None.

    *Errors*: :class:`SotbusError` where the address cannot be had.
    """

    def __init__(self, serving: Serving, where: Endpoint, peer_of: Callable[[str], PeerState | None]) -> None:
        self.key = serving.key
        self._serving = serving
        self._peer_of = peer_of
        self._accepted: dict[bytes, Accepted] = {}
        self._sent_away: deque[bytes] = deque(maxlen=REMEMBERED)
        self._gone: set[bytes] = set()
        self._hearing = False
        self._stopping = False
        self._newcomers = Newcomers(HELLO_S, self._stands)
        self._socket = serving.socket(zmq.ROUTER)
        self._events: zmq.Socket[bytes] | None = None
        try:
            self._set_up(where)
        except BaseException:
            self.close()
            raise
        self._pump = Pump(self._socket, self._message)

    def __repr__(self) -> str:
        return f"<Listener on {self.where}, {len(self._accepted)} links>"

    def _set_up(self, where: Endpoint) -> None:
        socket = self._socket
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a connection that has ended fails
        socket.setsockopt(zmq.IPV6, int(where.is_v6))
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
        socket.curve_server = True
        socket.setsockopt(zmq.ZAP_DOMAIN, zap.DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._events = monitor_of(socket, monitor.OF_LISTENER)
        try:
            socket.bind(str(where))
        except zmq.ZMQError as error:
            raise SotbusError(
                f"the node cannot listen on {where}: {os.strerror(error.errno or 0)}",
                hint="see which program has the port (ss -ltnp), or give [plugin.zmq] listen another one",
            ) from None
        bound = bytes(socket.getsockopt(zmq.LAST_ENDPOINT))
        self.where = Endpoint.to_listen(bound.rstrip(b"\0").decode("ascii"))

    def close(self) -> None:
        """Give the address up; the last answers still go out, for LINGER_MS at most."""
        if self._events is not None:
            self._socket.disable_monitor()
            self._events.close()
        self._socket.close()

    async def run(self) -> None:
        """Take peers until cancelled. *Cancellation*: each is told, and the address is given up."""
        assert self._events is not None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pump.run)
                nursery.start_soon(Pump(self._events, self._event).run)
                nursery.start_soon(self._newcomers.run)
        finally:
            self._stopping = True
            for one in tuple(self._accepted.values()):
                one.link.close("stopped", "this node stops", Reason.STOPPING)
            self.close()

    def _event(self, parts: Parts) -> None:
        event = monitor.read(parts)
        kind = monitor.refusal(event)
        if kind is not None:
            self._serving.refused[kind] += 1
        if event.event == zmq.EVENT_ACCEPTED:
            tcp = Tcp.accepted(event.value, self.where.port)
            if tcp is not None:
                self._newcomers.note(tcp)
        elif event.event == zmq.EVENT_DISCONNECTED:
            self._serving.nursery.start_soon(self._look_after, event.value)

    def _stands(self, tcp: Tcp) -> bool:
        """Whether there is a link over a socket; or may be, where a link's socket could not be told."""
        return any(one.tcp in (tcp, None) for one in self._accepted.values())

    async def _look_after(self, fd: int) -> None:
        """A descriptor was closed: ask the link over it, if there was one, for a sign of life.

        The event comes a moment before the connection leaves the socket, and the descriptor may be another's by now.
        """
        await trio.sleep(BYE_S)
        for one in tuple(self._accepted.values()):
            if one.tcp is not None and one.tcp.fd == fd and not self._stopping:
                one.link.probe()

    def _message(self, parts: Parts) -> None:
        route = parts[0].bytes
        one = self._accepted.get(route)
        if one is not None and len(parts) == 2:
            one.link.receive(parts[1].bytes)
        elif one is not None:
            one.link.malformed(f"a message of {len(parts) - 1} parts")
        elif route not in self._sent_away:
            self._greet(route, parts[1:])

    def _greet(self, route: bytes, parts: Parts) -> None:
        """Take the first message of a connection: a hello, or it is sent away."""
        if not parts:
            return
        tcp = Tcp.under(parts[0])
        state = self._peer_of(_key_of(parts[0]))
        if state is None:  # taken off the list between the handshake and now
            self._send_away(route, tcp, Reason.REMOVED)
            return
        try:
            if len(parts) != 1:
                raise MalformedError(f"a message of {len(parts)} parts")
            frame = frames.decode(parts[0].bytes)
            if frame.kind is not Kind.HELLO:
                raise MalformedError(f"a {frame.kind.name} before its hello")
        except OtherVersionError:
            state.note(monitor.Failure("other version", Reason.VERSION.words))
            self._send_away(route, tcp, Reason.VERSION)
        except MalformedError as error:
            state.counts.malformed += 1
            state.note(monitor.Failure("malformed", f"it sent {error}"))
            self._send_away(route, tcp, Reason.MALFORMED)
        else:
            self._take(route, tcp, state)

    def _take(self, route: bytes, tcp: Tcp | None, state: PeerState) -> None:
        """A peer has said hello: it is welcome, and its older connection, if there is one, goes."""
        for older in state.links:
            if older.way == ACCEPTED:
                older.close("replaced", "a newer connection of it has taken its place", Reason.REPLACED)
        try:
            self._pump.send(route, frames.encode(Kind.WELCOME))
        except zmq.ZMQError:
            return  # it has gone again
        serving = self._serving
        link = Link(
            state.name,
            ACCEPTED,
            partial(self._send, route),
            serving.inbound,
            serving.nursery,
            state.counts,
            state.answering,
            partial(self._ended, route),
        )
        self._accepted[route] = Accepted(link, state, tcp)
        heartbeat_s, dead_after_s = serving.settings.heartbeat_s, serving.settings.dead_after_s
        serving.nursery.start_soon(link.beat, heartbeat_s + LATER * (dead_after_s - heartbeat_s), dead_after_s)
        state.attach(link, serving.inbound)

    def _send(self, route: bytes, data: bytes) -> None:
        """Hand a frame to a connection. One that takes none is heard out, and its link closed if it has ended.

        *Errors*: as :meth:`Pump.send`.
        """
        try:
            self._pump.send(route, data)
        except zmq.ZMQError as error:
            if not isinstance(error, zmq.Again):  # which a connection with a full queue says also when it has ended
                self._gone.add(route)
            self._hear_out()
            raise

    def _hear_out(self) -> None:
        """Read what peers said before their connections ended; what is answered meanwhile may find more of those.

        The socket reads its connections in turn, so that others, whatever they send, cannot put this off for long.
        """
        if self._hearing:
            return
        self._hearing = True
        try:
            self._pump.drain(1 + 2 * len(self._accepted))
        finally:
            self._hearing = False
            gone, self._gone = self._gone, set()
            for route in gone & self._accepted.keys():
                self._accepted[route].link.close("closed", "the connection has ended")

    def _ended(self, route: bytes, link: Link) -> None:
        one = self._accepted.pop(route)
        self._send_away(route, one.tcp, link.bye)
        one.state.detach(link, self._serving.inbound)

    def _send_away(self, route: bytes, tcp: Tcp | None, why: Reason | None) -> None:
        """Hear no more of a connection, say why, and end it."""
        self._sent_away.append(route)
        if why is not None:
            try:
                self._pump.send(route, frames.encode(Kind.BYE, why))
            except zmq.Again:
                pass  # it does not read
            except zmq.ZMQError:
                return  # it has ended already
        if tcp is not None and not self._stopping:
            self._serving.nursery.start_soon(_hang_up_soon, tcp)


async def _hang_up_soon(tcp: Tcp) -> None:
    await trio.sleep(BYE_S)
    tcp.hang_up()


def _key_of(frame: zmq.Frame) -> str:
    """The key that the handshake proved, as the ZAP handler named it, or ``""``."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
