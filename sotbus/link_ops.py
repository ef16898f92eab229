"""What goes over a link between two nodes: a request that names its op, and its answer, as JSON.

Versioned, so that a node of another version is told so instead of being misread. Between hub, guest and linked box the
one op is the page's ``comm.file`` (decisions, What a link carries); ``hello`` names a node's version and its ops.
"""

from __future__ import annotations

import json
from typing import Any

from sotbus.errors import BadRequest

VERSION = 1
"""Of the envelope and the ops in it."""

MAX_BYTES = 1 << 20
"""Longest request or answer, as on the page's wire (facts 11)."""


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_DECODER = json.JSONDecoder(parse_constant=_no_constant)
"""Made once: json.dumps and json.loads make one for each call that asks for anything but the defaults."""


def encode_request(op: str, payload: dict[str, Any]) -> bytes:
    """A request's bytes. *Errors*: BadRequest where it is longer than ``MAX_BYTES``."""
    return _encode({"v": VERSION, "op": op, "payload": payload})


def encode_answer(payload: dict[str, Any]) -> bytes:
    """An answer's bytes. *Errors*: BadRequest where it is longer than ``MAX_BYTES``."""
    return _encode({"v": VERSION, "payload": payload})


def _encode(document: dict[str, Any]) -> bytes:
    try:
        data = _ENCODER.encode(document).encode("utf-8")
    except (UnicodeEncodeError, ValueError) as error:
        raise BadRequest(f"it is not valid Unicode or JSON: {error}") from error
    if len(data) > MAX_BYTES:
        raise BadRequest(f"it has {len(data)} bytes and a link carries at most {MAX_BYTES}")
    return data


def decode_request(data: bytes) -> tuple[str, dict[str, Any]]:
    """Op and payload. *Errors*: :class:`BadRequest` for anything that is not a request of this version."""
    document = _decode(data)
    op = document.get("op")
    if not isinstance(op, str):
        raise BadRequest("it names no op")
    return op, document["payload"]


def decode_answer(data: bytes) -> dict[str, Any]:
    """The answer's payload. *Errors*: :class:`BadRequest`."""
    payload: dict[str, Any] = _decode(data)["payload"]
    return payload


def _decode(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise BadRequest(f"it has {len(data)} bytes and a link carries at most {MAX_BYTES}")
    try:
        text = data.decode("utf-8")
        document = _DECODER.decode(text)
        if "\\u" in text:  # an escaped lone surrogate is no text
            json.dumps(document, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"it is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadRequest("it is not a JSON object")
    if document.get("v") != VERSION:
        raise BadRequest(f"it is of version {document.get('v')!r}, and this node speaks version {VERSION}")
    if not isinstance(document.get("payload"), dict):
        raise BadRequest("it has no payload")
    return document
