"""One authenticated connection to a peer: requests both ways, their answers, and whether the peer is still there.

A link knows no socket: it is given a function that hands one frame to the connection, and is told what came over it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

import trio
import zmq

from sotbus.api import Inbound, NotSentError, OutcomeUnknownError
from sotbus_zmq import frames
from sotbus_zmq.frames import Frame, Kind, MalformedError, Reason
from sotbus_zmq.statistics import Counts

log = logging.getLogger("sotbus.zmq")

ANSWERING_PER_REQUEST = 4
"""Requests of a peer that are answered at a time, as a multiple of what it may have in flight: those it gave up waiting
for are still under way here. Past that they are refused."""

MEASURE_EVERY = 5
"""Heartbeats after which a round trip is measured again, also while the peer gives signs of life unasked."""


class BusyError(NotSentError):
    """As much is under way with the peer as may be; nothing was sent, or the peer has not looked at it."""

    code = "busy"


class Pending:
    """A request that waits for its answer: ``done`` is set when there is an answer or there will be none."""

    __slots__ = ("answer", "done", "error", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.done = trio.Event()
        self.answer: bytes | None = None
        self.error: NotSentError | OutcomeUnknownError | None = None


class Answering:
    """How many requests of one peer are being answered, over all its connections: those of one that ended go on."""

    __slots__ = ("most", "now")

    def __init__(self, most: int) -> None:
        self.now = 0
        self.most = most


class Link:
    """A connection over which both sides have said hello.

    :param peer: the node's name, as its key proves it.
    :param way: ``dialled`` or ``accepted``.
    :param send: hands a frame to the connection, or raises: ``zmq.Again`` where its queue is full, another
        ``zmq.ZMQError`` where it has ended; who gave it closes the link, as soon as what the peer said last was read.
    :param inbound: what requests are handed to.
    :param nursery: answers are made in it; those under way when the link ends go on.
    :param counts: the peer's.
    :param answering: the peer's.
    :param closed: called once, when the link has ended; ``kind`` and ``why`` say why, ``bye`` what to tell the peer.
    """

    def __init__(
        self,
        peer: str,
        way: str,
        send: Callable[[bytes], None],
        inbound: Inbound,
        nursery: trio.Nursery,
        counts: Counts,
        answering: Answering,
        closed: Callable[[Link], None],
    ) -> None:
        self.peer = peer
        self.way = way
        self.ended = trio.Event()
        self.kind = ""
        self.why = ""
        self.bye: Reason | None = None
        """What to say to the peer, None where it is not to be told or cannot be."""
        self.since = self._heard = trio.current_time()
        self._send = send
        self._inbound = inbound
        self._nursery = nursery
        self._counts = counts
        self._answering = answering
        self._closed = closed
        self._pending: dict[int, Pending] = {}
        self._pings: dict[int, float] = {}
        self._number = 0

    def __repr__(self) -> str:
        state = self.why if self.ended.is_set() else f"up, {len(self._pending)} in flight"
        return f"<Link {self.way} with {self.peer}: {state}>"

    @property
    def up(self) -> bool:
        return not self.ended.is_set()

    def ask(self, body: bytes) -> Pending:
        """Send a request; the answer comes to what is returned, which is to be given to :meth:`forget` in any case.

        *Errors*: NotSentError, BusyError where the connection's queue is full.
        """
        self._number += 1
        pending = Pending(self._number)
        self._pending[pending.number] = pending
        try:
            self._put(Kind.REQUEST, pending.number, body)
        except zmq.Again:
            self.forget(pending)
            raise BusyError(f"the connection to {self.peer} takes nothing more just now; nothing was sent") from None
        except zmq.ZMQError:
            self.forget(pending)
            raise NotSentError(f"the connection to {self.peer} has ended; nothing was sent") from None
        self._counts.asked += 1
        return pending

    def forget(self, pending: Pending) -> None:
        """Nobody waits for this answer any more."""
        self._pending.pop(pending.number, None)

    def receive(self, data: bytes) -> None:
        """Take what came over the connection. Never raises: what is no frame ends the link."""
        self._heard = trio.current_time()
        self._counts.bytes_in += len(data)
        try:
            self._take(frames.decode(data))
        except MalformedError as error:
            self.malformed(str(error))

    def malformed(self, what: str) -> None:
        """The peer sent what it may not send."""
        self._counts.malformed += 1
        self.close("malformed", f"it sent {what}", Reason.MALFORMED)

    def _take(self, frame: Frame) -> None:
        if frame.kind is Kind.ANSWER:
            self._settle(frame.number, answer=frame.body)
        elif frame.kind is Kind.REQUEST:
            self._answer_or_refuse(frame)
        elif frame.kind is Kind.PING:
            self._try_put(Kind.PONG, frame.number)
        elif frame.kind is Kind.PONG:
            sent = self._pings.pop(frame.number, None)
            if sent is not None:
                self._counts.note_round_trip(self._heard - sent)
        elif frame.kind is Kind.REFUSED:
            busy = BusyError(f"{self.peer} has as much under way as may be; it has not looked at the request")
            self._settle(frame.number, error=busy)
        elif frame.kind is Kind.LOST:
            lost = OutcomeUnknownError(f"{self.peer} took the request and has no answer to it; the outcome is unknown")
            self._settle(frame.number, error=lost)
        elif frame.kind is Kind.BYE:
            self.close("bye", f"it said goodbye: {frames.reason_words(frame.number)}")
        else:
            self._unexpected(frame)

    def _unexpected(self, frame: Frame) -> NoReturn:
        raise MalformedError(f"a {frame.kind.name} in the middle of a connection")

    def _settle(
        self, number: int, *, answer: bytes | None = None, error: NotSentError | OutcomeUnknownError | None = None
    ) -> None:
        pending = self._pending.pop(number, None)
        if pending is None:
            if not 0 < number <= self._number:
                raise MalformedError("an answer to what was never asked")
            self._counts.late += 1
            return
        if answer is not None:
            self._counts.answered += 1
        pending.answer, pending.error = answer, error
        pending.done.set()

    def _answer_or_refuse(self, frame: Frame) -> None:
        if self._answering.now >= self._answering.most:
            self._counts.refused += 1
            self._try_put(Kind.REFUSED, frame.number)
            return
        self._counts.taken += 1
        self._answering.now += 1
        self._nursery.start_soon(self._answer, frame.number, frame.body)

    async def _answer(self, number: int, request: bytes) -> None:
        """Have a request answered, and send the answer while the connection stands."""
        try:
            answer = await self._inbound.answer(self.peer, request)
        except Exception as error:
            # One request that cannot be answered must not end the links to all peers; its text may quote the request.
            log.error("a request of %s was not answered: %s", self.peer, type(error).__name__)
            log.debug("a request of %s was not answered", self.peer, exc_info=error)
            self._try_put(Kind.LOST, number)
            return
        finally:
            self._answering.now -= 1
        if len(answer) > frames.MAX_BODY_BYTES:
            log.error("an answer to %s has %d bytes and is not sent", self.peer, len(answer))
            self._try_put(Kind.LOST, number)
        else:
            self._try_put(Kind.ANSWER, number, answer)

    def _put(self, kind: Kind, number: int, body: bytes = b"") -> None:
        data = frames.encode(kind, number, body)
        self._send(data)
        self._counts.bytes_out += len(data)

    def _try_put(self, kind: Kind, number: int, body: bytes = b"") -> None:
        """Send what the peer waits for; if the connection does not take it, the link ends.

        A full queue is that of a peer that asks and does not read: it is not waited for, or it could hold up others.
        """
        if not self.up:
            return
        try:
            self._put(kind, number, body)
        except zmq.Again:
            self.close("not reading", "it does not read what it is sent", Reason.SILENT)
        except zmq.ZMQError:
            pass  # the connection's owner ends the link

    def probe(self) -> None:
        """Send a ping, which also shows whether the connection still is in the socket."""
        self._number += 1
        self._pings[self._number] = trio.current_time()
        self._try_put(Kind.PING, self._number)

    async def beat(self, heartbeat_s: float, dead_after_s: float) -> None:
        """Ask for a sign of life whenever none came for ``heartbeat_s`` seconds, until the link ends; and end it when
        none came for ``dead_after_s``.

        A ping of the peer is one too, so that of two ends one asks. Each asks now and then all the same, to know the
        round trip. Time that this process did not run (it was stopped, its machine slept) is not counted as the peer's
        silence.
        """
        pinged = trio.current_time()
        while self.up:
            measure_at = pinged + MEASURE_EVERY * heartbeat_s
            ping_at = max(pinged + heartbeat_s, min(self._heard + heartbeat_s, measure_at))
            due = min(ping_at, self._heard + dead_after_s)
            with trio.move_on_at(due):
                await self.ended.wait()
                return
            now = trio.current_time()
            if now - due > heartbeat_s:
                self._heard = now
            if now >= self._heard + dead_after_s:
                self.close("silent", f"nothing was heard from it for {dead_after_s:g}s", Reason.SILENT)
            elif now >= self._heard + heartbeat_s or now >= measure_at:
                self._pings = {number: at for number, at in self._pings.items() if at > now - dead_after_s}
                self.probe()
                pinged = now

    def close(self, kind: str, why: str, bye: Reason | None = None) -> None:
        """End the link: requests that wait have an unknown outcome. Does nothing the second time.

        :param kind: as the statistics count it.
        :param why: in words, about the peer as "it".
        :param bye: what to tell the peer.
        """
        if self.ended.is_set():
            return
        self.kind, self.why, self.bye = kind, why, bye
        self.ended.set()
        for pending in self._pending.values():
            pending.error = OutcomeUnknownError(
                f"the connection to {self.peer} ended before the answer came ({why}); the outcome is unknown"
            )
            pending.done.set()
        self._pending.clear()
        self._closed(self)
