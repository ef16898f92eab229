"""Dials one peer again and again: a fresh socket for each try, and the link while it stands."""

from __future__ import annotations

import errno
import socket as sockets

import trio
import zmq

from sotbus_zmq import frames, monitor
from sotbus_zmq.backoff import Backoff
from sotbus_zmq.endpoint import Endpoint
from sotbus_zmq.frames import Kind, MalformedError, OtherVersionError, Reason
from sotbus_zmq.link import Link
from sotbus_zmq.monitor import Failure
from sotbus_zmq.peer_state import CONNECTING, DIALLED, WAITING, PeerState
from sotbus_zmq.pump import Parts, Pump, monitor_of
from sotbus_zmq.serving import GREETING_S, Serving

MAX_ADDRESSES = 4
"""Addresses of one name that are tried in one dial."""


async def keep_dialled(serving: Serving, state: PeerState) -> None:
    """Keep a link to a peer, until cancelled."""
    settings = serving.settings
    backoff = Backoff(settings.reconnect_min_s, settings.reconnect_max_s, settings.good_after_s)
    while True:
        state.turn(CONNECTING)
        lasted_s = await _dial(serving, state)
        wait_s = backoff.wait_s(lasted_s)
        state.turn(WAITING, trio.current_time() + wait_s)
        await trio.sleep(wait_s)


async def _dial(serving: Serving, state: PeerState) -> float | None:
    """Try the peer's addresses in turn; answers how long the link stood, in seconds, or None where there was none."""
    assert state.peer.address is not None
    endpoint = Endpoint.to_dial(state.peer.address)
    failure: Failure | None = None
    for one in await _addresses(endpoint):
        connection = Connection(serving, state, one)
        lasted_s = await connection.run()
        if lasted_s is not None:
            return lasted_s
        if failure is None or connection.reached:
            failure = connection.failure
    state.note(failure or Failure("no address", f"the name {endpoint.host} cannot be resolved"))
    return None


async def _addresses(endpoint: Endpoint) -> list[Endpoint]:
    """Where a name leads to; none where that cannot be told in time.

    libzmq would look it up in its I/O thread, and all its connections would wait for that (zeromq/libzmq#3243).
    """
    found: list[Endpoint] = []
    with trio.move_on_after(GREETING_S):
        try:
            answers = await trio.socket.getaddrinfo(endpoint.host, endpoint.port, type=sockets.SOCK_STREAM)
        except (OSError, UnicodeError):
            return []
        for _, _, _, _, where in answers:
            one = Endpoint(str(where[0]), endpoint.port)
            if all(one.host != other.host for other in found):
                found.append(one)
    return found[:MAX_ADDRESSES]


class Connection:
    """One try: a DEALER that connects once, says hello, and carries the link.

    ``reached`` says whether anything took the connection, ``failure`` why there is no link.
    """

    def __init__(self, serving: Serving, state: PeerState, where: Endpoint) -> None:
        self.reached = False
        self.failure: Failure | None = None
        self._serving = serving
        self._state = state
        self._where = where
        self._settled = trio.Event()
        self._link: Link | None = None
        self._pump: Pump
        self._events: Pump

    def __repr__(self) -> str:
        return f"<Connection to {self._state.name} at {self._where}>"

    async def run(self) -> float | None:
        """Connect, and keep the link until it ends; answers how long it stood, in seconds, or None for no link.

        *Cancellation*: the peer is told, and the socket is closed.
        """
        try:
            socket = self._serving.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            self._fail(_no_socket(error))
            return None
        try:
            self._set_up(socket)
            events = monitor_of(socket, monitor.OF_DIALLER)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            self._fail(_no_socket(error))
            return None
        self._events = Pump(events, self._event)
        try:
            socket.connect(str(self._where))
            await self._run()
        except zmq.ZMQError as error:  # of connect: an address of a kind that this machine does not have
            self._fail(Failure("no address", f"{self._where} cannot be dialled from here: {error.strerror}"))
        finally:
            if self._link is not None:
                self._link.close("stopped", "this node ends the connection", Reason.STOPPING)
            self._say_bye()
            socket.disable_monitor()
            events.close()
            socket.close(linger=None if self._bye is not None else 0)
        return trio.current_time() - self._link.since if self._link else None

    def _set_up(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(GREETING_S * 1000))
        socket.setsockopt(zmq.IPV6, int(self._where.is_v6))
        socket.curve_serverkey = self._state.peer.public_key.encode("ascii")
        self._pump = Pump(socket, self._message)

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pump.run)
            nursery.start_soon(self._events.run)
            with trio.move_on_after(GREETING_S):
                await self._settled.wait()
            if self._link is not None:
                await self._link.beat(self._serving.settings.heartbeat_s, self._serving.settings.dead_after_s)
            elif self.failure is None:
                self._fail(monitor.NO_ANSWER if self.reached else monitor.NOBODY)
            nursery.cancel_scope.cancel()

    @property
    def _bye(self) -> Reason | None:
        return None if self._link is None else self._link.bye

    def _say_bye(self) -> None:
        if self._bye is not None:
            try:
                self._pump.send(frames.encode(Kind.BYE, self._bye))
            except zmq.ZMQError:
                pass  # it has gone

    def _fail(self, failure: Failure) -> None:
        """There will be no link; the first reason counts."""
        if self.failure is None and self._link is None:
            self.failure = failure
            self._settled.set()

    def _event(self, parts: Parts) -> None:
        event = monitor.read(parts)
        if event.event == zmq.EVENT_CONNECTED:
            self.reached = True
        elif event.event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._hello()
        failure = monitor.dial_failure(event, connected=self.reached)
        if failure is not None:
            self._pump.drain()  # what it said before its end
            if self._link is not None:
                self._link.close(failure.kind, failure.words)
            self._fail(failure)

    def _hello(self) -> None:
        try:
            self._pump.send(frames.encode(Kind.HELLO))
        except zmq.ZMQError:
            pass  # it has ended again, and its event is on the way

    def _send(self, data: bytes) -> None:
        """Hand a frame to the connection.

        A DEALER takes what is sent after its connection has ended, too; so its events are looked at before.

        *Errors*: ``zmq.ZMQError`` where it has ended, ``zmq.Again`` where its queue is full.
        """
        self._events.drain()
        if self._link is None or not self._link.up:
            raise zmq.ZMQError(errno.ENOTCONN)
        self._pump.send(data)

    def _message(self, parts: Parts) -> None:
        if self._link is None:
            if self.failure is None:  # else the connection is being ended
                self._greeted(parts)
        elif len(parts) != 1:
            self._link.malformed(f"a message of {len(parts)} parts")
        elif self._link.up:
            self._link.receive(parts[0].bytes)

    def _greeted(self, parts: Parts) -> None:
        """Take the answer to the hello."""
        try:
            if len(parts) != 1:
                raise MalformedError(f"a message of {len(parts)} parts")
            frame = frames.decode(parts[0].bytes)
            if frame.kind is Kind.BYE:
                self._fail(Failure("bye", f"it said goodbye: {frames.reason_words(frame.number)}"))
                return
            if frame.kind is not Kind.WELCOME:
                raise MalformedError(f"a {frame.kind.name} before its welcome")
        except OtherVersionError:
            self._fail(Failure("other version", Reason.VERSION.words))
        except MalformedError as error:
            self._state.counts.malformed += 1
            self._fail(Failure("malformed", f"it sent {error}"))
        else:
            self._up()

    def _up(self) -> None:
        serving, state = self._serving, self._state
        self._link = Link(
            state.name,
            DIALLED,
            self._send,
            serving.inbound,
            serving.nursery,
            state.counts,
            state.answering,
            lambda link: state.detach(link, serving.inbound),
        )
        state.attach(self._link, serving.inbound)
        self._settled.set()


def _no_socket(error: zmq.ZMQError) -> Failure:
    """One link that cannot be had must not end the others: descriptors may be free again at the next try."""
    return Failure("no socket", f"this node cannot open another socket: {error.strerror}")
