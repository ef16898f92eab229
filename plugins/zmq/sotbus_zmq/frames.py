"""What goes over a connection: one message part a frame, a header of ten bytes before the body.

    byte 0      version of this protocol, 1
    byte 1      kind
    bytes 2-9   number, big-endian: of a request and its answer; of a ping and its pong; of a BYE its reason; else 0
    then        the body: of a request or an answer; else none

The dialler's first frame is HELLO and the listener's is WELCOME; until then nothing else is sent. After that either
side may ask: a REQUEST is answered by one ANSWER, by REFUSED (too much is under way; nobody has seen it) or by LOST
(there will be no answer). PING is answered by PONG. BYE, the last frame, says why its sender ends the connection.
Version, HELLO and BYE keep their places in every version, so that two versions can say that they do not fit.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

VERSION = 1

MAX_BODY_BYTES = (1 << 20) + (64 << 10)
"""Longest body: the page's longest frame, and room for what an op's envelope adds to it."""

_HEADER = struct.Struct("!BBQ")

MAX_FRAME_BYTES = _HEADER.size + MAX_BODY_BYTES


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    WELCOME = 2
    REQUEST = 3
    ANSWER = 4
    REFUSED = 5
    LOST = 6
    PING = 7
    PONG = 8
    BYE = 9


_KINDS = frozenset(Kind)

BODIES = frozenset([Kind.REQUEST, Kind.ANSWER])
"""The kinds that have a body; a BYE of another version may have one too."""


class Reason(IntEnum):
    """Why a connection is ended, the number of a BYE."""

    STOPPING = 1
    REPLACED = 2
    REMOVED = 3
    VERSION = 4
    MALFORMED = 5
    SILENT = 6

    @property
    def words(self) -> str:
        """What the one who hears it is told."""
        return _WORDS[self]


_WORDS = {
    Reason.STOPPING: "it stops",
    Reason.REPLACED: "a newer connection has taken its place",
    Reason.REMOVED: "its list no longer has this node's key",
    Reason.VERSION: f"it speaks another version of the link's protocol than {VERSION}",
    Reason.MALFORMED: "it could not read what this node sent",
    Reason.SILENT: "it heard nothing from this node",
}


class Frame(NamedTuple):
    """One frame, read."""

    kind: Kind
    number: int
    body: bytes


class MalformedError(Exception):
    """Bytes that are no frame; the text says why, and repeats none of them."""


class OtherVersionError(MalformedError):
    """A frame of another version of the protocol."""


def encode(kind: Kind, number: int = 0, body: bytes = b"") -> bytes:
    """A frame's bytes."""
    return _HEADER.pack(VERSION, kind, number) + body


def decode(data: bytes) -> Frame:
    """Read a frame. *Errors*: MalformedError, OtherVersionError."""
    if len(data) < _HEADER.size:
        raise MalformedError(f"a frame of {len(data)} bytes, fewer than its header has")
    if len(data) > MAX_FRAME_BYTES:
        raise MalformedError(f"a frame of {len(data)} bytes, more than {MAX_FRAME_BYTES}")
    version, kind, number = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if kind == Kind.BYE:
        return Frame(Kind.BYE, number, body)
    if version != VERSION:
        raise OtherVersionError(f"a frame of version {version}")
    if kind not in _KINDS:
        raise MalformedError(f"a frame of the unknown kind {kind}")
    if body and kind not in BODIES:
        raise MalformedError(f"a {Kind(kind).name} with a body")
    return Frame(Kind(kind), number, body)


def reason_words(number: int) -> str:
    """Why the peer ended the connection, in words."""
    try:
        return Reason(number).words
    except ValueError:
        return f"its reason {number} is not known here"
