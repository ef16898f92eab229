"""What a socket's events mean, in words (zmq_socket_monitor(3))."""

from __future__ import annotations

import errno
import struct
from typing import NamedTuple

import zmq

_EVENT = struct.Struct("=HI")

HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
OF_DIALLER = (
    zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILURES
)
OF_LISTENER = zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILURES


class Event(NamedTuple):
    """One event: which, and its number (a descriptor, an errno, a status, by event)."""

    event: int
    value: int


class Failure(NamedTuple):
    """A kind of failure, as the statistics count it, and its words."""

    kind: str
    words: str


NOBODY = Failure("nobody listens", "nobody listens there, or it cannot be reached")
NO_ANSWER = Failure("no answer", "it took the connection and did not answer in time")
WRONG_KEY = Failure(
    "wrong server key",
    "the handshake failed: it ended the connection, most likely because its key is not the one in the peers file",
)
NOT_ON_LIST = Failure("not on its list", "the handshake failed: this node's key is not on its list of peers")
NOT_CURVE = Failure("not a CURVE link", "the handshake failed: what listens there is no sotbus node, or not encrypted")
CLOSED = Failure("closed", "it closed the connection")


def read(parts: list[zmq.Frame]) -> Event:
    """An event as the monitor's socket gives it."""
    return Event(*_EVENT.unpack(parts[0].bytes))


def dial_failure(event: Event, *, connected: bool) -> Failure | None:
    """Why a dial failed, or None for an event that is no failure.

    :param connected: whether the TCP connection stood before.
    """
    if event.event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return NOT_ON_LIST
    if event.event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return NOT_CURVE
    if event.event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:  # the value is the errno: EAGAIN when its time ran out
        return NO_ANSWER if event.value == errno.EAGAIN else WRONG_KEY
    if event.event == zmq.EVENT_CLOSED and not connected:
        return NOBODY
    if event.event == zmq.EVENT_DISCONNECTED:
        return CLOSED
    return None


def refusal(event: Event) -> str | None:
    """The kind of a refused connection, as a listener counts it; None for what is none.

    A key that is not on the list is counted by the one who keeps the list.
    """
    if event.event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return "broken off"
    if event.event == zmq.EVENT_ACCEPT_FAILED:
        return "not accepted"
    if event.event != zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return None
    if event.value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "not a CURVE client"
    if event.value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "another server's key"
    return "not ZMTP"
