"""A ZeroMQ socket under trio: one task reads it, whoever has to sends, and no wake-up is lost.

The socket's descriptor (``ZMQ_FD``) says that something happened, once, and not that there is a message: it is readable
only while commands of the I/O thread wait, and any call on the socket takes them (zmq_getsockopt(3), ZMQ_FD and
ZMQ_EVENTS). So the reader reads until there is nothing more before it waits, and after a send the sender looks at
ZMQ_EVENTS itself and wakes the reader. All of it happens in trio's thread; libzmq's sockets belong to one thread at a
time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import trio
import zmq

BATCH = 64
"""Messages that are read before other tasks get their turn."""

POLLIN = int(zmq.POLLIN)
"""As a plain number: an enumeration's ``&`` costs as much as the call whose answer it judges."""

Parts = list[zmq.Frame]


class Pump:
    """Reads one socket and hands each message on.

    :param socket: closed by its owner, after :meth:`run` has ended.
    :param handle: takes one message; what it raises ends the pump.
    """

    def __init__(self, socket: zmq.Socket[bytes], handle: Callable[[Parts], None]) -> None:
        self.socket = socket
        self._handle = handle
        self._fd: int = socket.FD
        self._waiting: trio.CancelScope | None = None
        self._reading = 0

    def __repr__(self) -> str:
        return f"<Pump of {self.socket!r}>"

    def send(self, *parts: bytes) -> None:
        """Hand one message to the socket, now or not at all.

        *Errors*: ``zmq.Again`` where there is no connection, or its queue is full; ``zmq.ZMQError`` with EHOSTUNREACH
        where a ROUTER has no such connection.
        """
        try:
            self._events()  # a connection that has ended meanwhile is taken out of the socket here
            self.socket.send_multipart(parts, zmq.NOBLOCK)
        finally:
            if self._events() & POLLIN:
                self._poke()

    def _poke(self) -> None:
        """Have the reader look at the socket; one that does not wait is about to look anyway."""
        if self._waiting is not None and not self._reading:
            self._waiting.cancel()

    async def run(self) -> None:
        """Read until cancelled. *Cancellation*: between two messages."""
        while True:
            with trio.CancelScope() as self._waiting:  # for many waits: one costs more than the rest of a message
                while True:
                    if self._drain():
                        await trio.lowlevel.checkpoint()
                    else:
                        await trio.lowlevel.wait_readable(self._fd)

    def _events(self) -> int:
        """ZMQ_EVENTS, by which libzmq also takes what its I/O thread had to say."""
        return int(self.socket.getsockopt(zmq.EVENTS))

    def drain(self, batches: float = math.inf) -> None:
        """Read what is there now, though another task reads the socket too. A handler may be called within one.

        :param batches: of BATCH messages, for a socket that others go on filling; no more than these are read.
        """
        while self._drain():
            batches -= 1
            if batches <= 0:
                self._poke()  # the rest is the reader's, whose wake-up may have been taken here
                return

    def _drain(self) -> bool:
        """Read what is there, a batch at most; whether there may be more."""
        self._reading += 1
        try:
            for _ in range(BATCH):
                if not self._events() & POLLIN:  # asked first, for an exception costs more than a message
                    return False
                try:
                    parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    return False
                self._handle(parts)
            return True
        finally:
            self._reading -= 1


MAX_SOCKETS = 16384
"""A peer that is dialled takes three of libzmq's sockets, and its own bound of 1023 is for a context without peers."""


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context of its own, with one I/O thread: what is inproc in it is nobody else's."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


LINGER_MS = 100
"""How long a socket that is closed in order goes on handing over what was sent before (ZMQ_LINGER): the last answers
and the BYE. More than a connection in order needs, and the most that a dead one can hold up the end of the process."""

TERM_S = 2.0
"""How long the end of a context is waited for; it takes LINGER_MS at most unless libzmq has a fault."""


async def end_context(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """End a context whose sockets are closed. Never waits longer than TERM_S, and not in trio's thread."""
    with trio.CancelScope(shield=True), trio.move_on_after(TERM_S):
        await trio.to_thread.run_sync(context.term, abandon_on_cancel=True)


_numbers = iter(range(1 << 62))


def monitor_of(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """A socket's own events, as a socket to read (zmq_socket_monitor(3)).

    Its name is used once: one made of the descriptor, as pyzmq's own is, comes back while the old one is still there.
    It queues without a bound, for libzmq's I/O thread waits where it cannot hand an event over.
    """
    name = f"inproc://monitor-{os.getpid()}-{next(_numbers)}"
    socket.monitor(name, events)
    reader: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    try:
        reader.linger = 0
        reader.rcvhwm = 0
        reader.connect(name)
    except BaseException:
        reader.close()
        raise
    return reader
