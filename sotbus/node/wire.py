"""The page's wire as a node speaks it: one client's connection on ``sotbus.sock``, from its hello to its end.

Sources: sot-comm v1, The wire; facts 11; decisions, sot-comm 18, 19 and 23.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

import sotbus
from sotbus import message
from sotbus.contracts import Filing, OutcomeUnknownError
from sotbus.errors import BadRequest, Busy, Refused, SotbusError
from sotbus.node.frames import Decoder, Frame, FrameError, encode
from sotbus.node.refusal import refusal_payload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from sotbus.node.filer import Filer

    Op = Callable[[Mapping[str, Any], "Connection"], Awaitable[dict[str, Any]]]

PROTOCOL = 3
"""The wire's protocol number in a hello and in its answer."""

READ_BYTES = 1 << 16

MAX_IN_FLIGHT = 16
"""Requests of one connection that are worked on at a time; the next is read when one of them is answered."""

HELLO_S = 10.0
"""How long a connection may take to say hello."""

FILE_S = 10.0
"""How long one filing may take, whatever its client waits: a forward has the lock wait and 5 s more."""

MAX_ID_CHARACTERS = 200

DAEMON = "daemon"
"""The ``repo`` of a line that a daemon files for another sender (sot-comm v1, The inbox)."""


async def _enter(room: trio.Semaphore | trio.Lock) -> None:
    """Acquire, and let no other task run first where that can be done at once.

    Others still get their turn: a reader comes to a checkpoint after ``MAX_IN_FLIGHT`` frames or at its next read, and
    an answer is the last step of its task.
    """
    try:
        room.acquire_nowait()
    except trio.WouldBlock:
        await room.acquire()


class Connection:
    """One client: frames in, frames out. What it said in its hello is in ``hello``.

    :param stream: the socket.
    :param ops: what it may ask for.
    """

    def __init__(self, stream: trio.abc.Stream, wire: Wire) -> None:
        self.hello: Mapping[str, Any] = {}
        self._stream = stream
        self._wire = wire
        self._writing = trio.Lock()
        self._room = trio.Semaphore(MAX_IN_FLIGHT)
        self._asked: dict[int, tuple[trio.Event, list[dict[str, Any]]]] = {}
        self._next_id = 0

    def __repr__(self) -> str:
        return f"<Connection of {self.hello.get('name') or self.hello.get('client_id') or 'nobody yet'}>"

    async def run(self) -> None:
        """Serve until the client goes, breaks the framing, or the node is ended."""
        decoder = Decoder()
        try:
            async with trio.open_nursery() as nursery:
                with trio.move_on_after(HELLO_S) as patience:
                    async for frame in self._frames(decoder):
                        if not self.hello:
                            if not await self._greet(frame):
                                return
                            patience.deadline = float("inf")
                        elif frame.kind == "res":
                            self._answered(frame)
                        elif frame.kind == "req":
                            await _enter(self._room)
                            nursery.start_soon(self._answer, frame)
        finally:
            self._wire.left(self)

    async def _frames(self, decoder: Decoder) -> Any:
        while True:
            try:
                data = await self._stream.receive_some(READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            if not data:
                return
            try:
                frames, wrong = decoder.feed(bytes(data)), ""
            except FrameError as error:
                frames, wrong = error.frames, str(error)
            for frame in frames:
                yield frame
            if wrong:
                self._wire.malformed += 1
                await self._say(encode(0, "evt", "error", {"error": wrong, "code": "bad_frame"}))
                return

    async def _greet(self, frame: Frame) -> bool:
        """The hello's answer; False where it is refused, and the refusal is the answer."""
        if frame.kind != "req" or frame.op != "hello":
            refusal = ("the first request of a connection is a hello", "hello_required")
        elif frame.payload.get("protocol") != PROTOCOL:
            refusal = (f"this node speaks protocol {PROTOCOL}, and the hello another", "protocol_mismatch")
        else:
            self.hello = frame.payload
            await self._say(frame.answer(self._wire.hello_answer()))
            self._wire.joined(self)
            return True
        await self._say(frame.refuse(*refusal))
        return False

    async def _answer(self, frame: Frame) -> None:
        self._wire.under_way += 1
        try:
            payload = await self._wire.answer(frame.op, frame.payload, self)
            try:
                data = frame.answer(payload)
            except FrameError as error:
                data = frame.refuse(str(error), "too_large")
            await self._say(data)
        finally:
            self._wire.under_way -= 1
            self._room.release()

    async def _say(self, data: bytes) -> None:
        """Write one frame whole; a client that has gone hears nothing."""
        await _enter(self._writing)
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        finally:
            self._writing.release()

    async def ask(self, op: str, payload: dict[str, Any], bound_s: float) -> dict[str, Any]:
        """Ask the client itself: a box of another release that dialled in for offers (decisions, sot-comm 23).

        *Errors*: NotSentError, OutcomeUnknownError.
        """
        self._next_id += 1
        number, answered, answer = self._next_id, trio.Event(), list[dict[str, Any]]()
        self._asked[number] = (answered, answer)
        try:
            with trio.fail_after(bound_s):
                await self._say(encode(number, "req", op, payload))
                await answered.wait()
        except trio.TooSlowError:
            raise OutcomeUnknownError(f"{self.name} did not answer within {bound_s:g}s") from None
        finally:
            del self._asked[number]
        if not answer:
            raise OutcomeUnknownError(f"{self.name} went away before it answered")
        return answer[0]

    def _answered(self, frame: Frame) -> None:
        waiting = self._asked.get(frame.id)
        if waiting is not None:  # else it is late, and nobody waits
            waiting[1].append(dict(frame.payload))
            waiting[0].set()

    def gone(self) -> None:
        """The client is gone: whoever waits for its answer hears so."""
        for answered, _ in self._asked.values():
            answered.set()

    @property
    def name(self) -> str:
        """The client as it calls itself."""
        name = self.hello.get("name")
        return name if isinstance(name, str) and name else "a client"

    @property
    def is_link(self) -> bool:
        """Whether it is another box's daemon that takes offers over this connection."""
        return self.hello.get("role") == "link"


class Wire:
    """What the node does for the clients of its socket: the ops, and the hello.

    :param filer: files mail.
    :param host: this box's declared host.
    :param ops: further ops by name.

    ``under_way`` counts requests whose answer is not written yet; while ``draining`` new ones are refused.
    """

    def __init__(self, filer: Filer, host: str, ops: Mapping[str, Op]) -> None:
        self.filer = filer
        self.malformed = 0
        self.draining = False
        self.under_way = 0
        self.requests: dict[str, int] = {}
        self.connections: set[Connection] = set()
        self._host = host
        self._ops: dict[str, Op] = {"comm.file": self._file, **ops}

    def __repr__(self) -> str:
        return f"<Wire of {self._host}: {len(self.connections)} clients>"

    def hello_answer(self) -> dict[str, Any]:
        """decisions, sot-comm 19."""
        return {
            "session_id": f"sotbus-{self._host}",
            "revision": 0,
            "snapshot_pending": False,
            "host": self._host,
            "protocol": PROTOCOL,
            "app_version": f"sotbus {sotbus.__version__}",
        }

    def joined(self, connection: Connection) -> None:
        """A connection said hello."""
        self.connections.add(connection)
        if connection.is_link:
            self.filer.links.clients[connection.name] = connection

    def left(self, connection: Connection) -> None:
        """A connection has ended."""
        self.connections.discard(connection)
        connection.gone()
        clients = self.filer.links.clients
        if clients.get(connection.name) is connection:
            del clients[connection.name]

    async def answer(self, op: str, payload: Mapping[str, Any], connection: Connection) -> dict[str, Any]:
        """The payload that answers a request; an error is an answer too.

        *Cancellation*: what was asked for may be done.
        """
        known = op if op in self._ops else "unknown"
        self.requests[known] = self.requests.get(known, 0) + 1
        do = self._ops.get(op)
        if do is None:
            return {"error": f"unknown op: {message.shown(op)[:100]}", "code": "unknown_op"}
        try:
            if self.draining:
                raise Busy("this node is ending and takes nothing new; nothing was done")
            return await do(payload, connection)
        except SotbusError as error:
            return refusal_payload(error)

    async def _file(self, payload: Mapping[str, Any], connection: Connection) -> dict[str, Any]:
        filing, forwarded = filing_of(payload)
        origin = connection.name if connection.is_link else None
        return await self.filer.answer(filing, forwarded=forwarded, origin=origin, bound_s=FILE_S)


def filing_of(payload: Mapping[str, Any]) -> tuple[Filing, bool]:
    """A ``comm.file`` request as a filing, and whether it was handed on already. *Errors*: BadRequest, Refused."""
    to = payload.get("to")
    if not isinstance(to, str):
        raise Refused(f'not a handle: "{to}"', "bad_handle")
    sender, text = payload.get("from"), payload.get("text")
    broadcast, forwarded = payload.get("broadcast", False), payload.get("forwarded", False)
    if not isinstance(sender, str) or not isinstance(text, str):
        raise BadRequest("comm.file needs from, to and text, each a string; nothing was filed")
    if not isinstance(broadcast, bool) or not isinstance(forwarded, bool):
        raise BadRequest("broadcast and forwarded are true or false; nothing was filed")
    more = payload.get("sotbus")
    message_id = more.get("id") if isinstance(more, dict) else None
    if message_id is not None and not (isinstance(message_id, str) and 0 < len(message_id) <= MAX_ID_CHARACTERS):
        raise BadRequest(f"a message ID is 1 to {MAX_ID_CHARACTERS} characters of text; nothing was filed")
    return Filing(sender, to, DAEMON, text, broadcast, message_id), forwarded
