"""Who may connect: the handler that libzmq asks about each key (ZAP, ZeroMQ RFC 27), in the transport's own context.

A domain is set and enforced on the listener (zmq_setsockopt(3), ZMQ_ZAP_ENFORCE_DOMAIN), so that without this handler
nobody gets in. The user id of a connection is its key, proved by the handshake; the peer's name is looked up by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85

from sotbus_zmq.pump import Parts, Pump

ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"sotbus"
VERSION = b"1.0"

_REQUEST_PARTS = 9
"""Routing id, delimiter, version, request id, domain, address, identity, mechanism, and one credential: the key."""


class Zap:
    """Answers libzmq's questions from a list of keys that is looked at for each.

    :param allows: whether a public key, in Z85, is on the list now.
    :param refused: called for each key that was not.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], allows: Callable[[str], bool], refused: Callable[[], None]
    ) -> None:
        self._allows = allows
        self._refused = refused
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._pump = Pump(self._socket, self._answer)
        self._socket.bind(ADDRESS)

    def close(self) -> None:
        self._socket.close()

    async def run(self) -> None:
        """Answer until cancelled."""
        await self._pump.run()

    def _answer(self, parts: Parts) -> None:
        frames = [part.bytes for part in parts]
        if len(frames) < _REQUEST_PARTS - 1:
            return
        asker, delimiter, version, number, domain, _, _, mechanism, *credentials = frames
        key = _key(credentials) if (version, domain, mechanism) == (VERSION, DOMAIN, b"CURVE") else ""
        if key and self._allows(key):
            status: tuple[Any, ...] = (b"200", b"OK", key.encode("ascii"))
        else:
            self._refused()
            status = (b"400", b"this key is not on the list", b"")
        try:
            self._pump.send(asker, delimiter, VERSION, number, *status, b"")
        except zmq.ZMQError:
            pass  # the connection that was asked about has ended


def _key(credentials: list[bytes]) -> str:
    """The key of a CURVE client in Z85, or ``""``."""
    if len(credentials) != 1 or len(credentials[0]) != 32:
        return ""
    return z85.encode(credentials[0]).decode("ascii")
