"""What the parts of a transport share while it serves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import trio
import zmq

from sotbus.api import Inbound
from sotbus_zmq import frames
from sotbus_zmq.key_file import KeyPair
from sotbus_zmq.link import ANSWERING_PER_REQUEST
from sotbus_zmq.pump import LINGER_MS
from sotbus_zmq.settings import Settings

CURVE_OVERHEAD_BYTES = 64
"""More than an encrypted message is longer than its plain text: 33 bytes (ZeroMQ RFC 26, MESSAGE)."""

RECEIVE_QUEUE = 64
"""Messages of one connection that libzmq reads ahead. Past that it leaves them to TCP, whose sender then waits."""

SPARE_QUEUE = 64
"""Room in a connection's queue beside requests and answers: pings, pongs, refusals."""

NO_RECONNECT_MS = 24 * 3600 * 1000
"""libzmq's own wait before it connects again (ZMQ_RECONNECT_IVL): never in the life of a socket, which is closed as
soon as its connection has ended. -1 would say that too, and lose what was received and not read yet: the socket's end
of the pipe is then terminated without delay (libzmq 4.3.5, session_base_t::reconnect and pipe_t::terminate)."""

GREETING_S = 5.0
"""How long a new connection may take for the handshake and the hello, and a dial to be taken, in seconds."""


@dataclass
class Serving:
    """One run of ``serve``.

    :param nursery: answers and what belongs to accepted connections run in it.
    :param key: this node's own, None while there is nobody to talk to; another one is put here when it changes.
    :param refused: connections that never became a link, by kind.
    """

    context: zmq.Context[zmq.Socket[bytes]]
    nursery: trio.Nursery
    inbound: Inbound
    settings: Settings
    key: KeyPair | None
    max_in_flight: int
    refused: Counter[str]
    listener_scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    dial_scopes: dict[str, trio.CancelScope] = field(default_factory=dict)

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        """A socket for links: bounded queues and messages, no reconnecting of its own, a short end.

        zmq_setsockopt(3) has each option.
        """
        assert self.key is not None
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, self.max_in_flight * (1 + ANSWERING_PER_REQUEST) + SPARE_QUEUE)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, frames.MAX_FRAME_BYTES + CURVE_OVERHEAD_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(GREETING_S * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL, NO_RECONNECT_MS)
        socket.curve_publickey = self.key.public.encode("ascii")
        socket.curve_secretkey = self.key.secret.encode("ascii")
        return socket
