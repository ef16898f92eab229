"""The page's wire as a codec: bytes to frames and back, without any I/O (facts 11, Framing).

A frame is one JSON object on a line, ``{v, id, kind, op, payload}``; a payload with ``blob.len`` is followed by that
many raw bytes, which no op of a node reads, so they are passed over. JSON is strict (decisions, sot-comm 17).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from sotbus.comm.frame_lines import MAX_BLOB_BYTES, MAX_FRAME_BYTES, FrameLines, LineError, blob_bytes
from sotbus.errors import BadRequest

__all__ = ["MAX_BLOB_BYTES", "MAX_DEPTH", "MAX_FRAME_BYTES", "Decoder", "Frame", "FrameError", "encode"]

VERSION = 1

KINDS = frozenset(["req", "res", "evt"])

MAX_ID = 2**64 - 1
"""Frame IDs are whole numbers from 0."""

MAX_DEPTH = 32
"""Objects and lists within each other, the frame included: more than any op needs, less than any stack lacks."""


class FrameError(BadRequest):
    """What came is no frame, or what is to go out cannot be one; a connection that sent it is closed.

    ``frames`` are those that the same piece held before it; they are as good as any. The text never repeats what came.
    """

    def __init__(self, text: str, frames: list[Frame] | None = None) -> None:
        super().__init__(text)
        self.frames: list[Frame] = frames or []


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. ``kind`` is ``req``, ``res`` or ``evt``; an event without an ``id`` has 0."""

    id: int
    kind: str
    op: str
    payload: dict[str, Any] = field(repr=False)

    def answer(self, payload: dict[str, Any]) -> bytes:
        """The bytes that answer this request. *Errors*: as :func:`encode`."""
        return encode(self.id, "res", self.op, payload)

    def refuse(self, error: str, code: str, **more: object) -> bytes:
        """The bytes that refuse this request; a text with lone surrogates is sent with ``?`` in their place.

        *Errors*: as :func:`encode`.
        """
        return self.answer({"error": error.encode("utf-8", "replace").decode("utf-8"), "code": code, **more})


class Decoder:
    """Frames from a connection's bytes, however they are cut up. One for each connection."""

    __slots__ = ("_lines", "_wrong", "frames")

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._lines = FrameLines(max_bytes)
        self._wrong = ""
        self.frames = 0

    def __repr__(self) -> str:
        return f"<Decoder {self.frames} frames, {self._lines!r}{', broken' if self._wrong else ''}>"

    @property
    def unfinished(self) -> bool:
        """Whether part of a frame, or of the raw bytes after one, has come and the rest has not."""
        return self._lines.unfinished

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are whole with this piece, in order.

        *Errors*: :class:`FrameError`, and again for whatever is fed after it; no other.
        """
        if self._wrong:
            raise FrameError(self._wrong)
        found: list[Frame] = []
        self._lines.feed(data)
        try:
            while (line := self._lines.next()) is not None:
                frame = _frame(line)
                self._lines.skip(blob_bytes(frame.payload))
                found.append(frame)
                self.frames += 1
        except LineError as error:
            self._wrong = f"frame {self.frames + 1} of this connection: {error}"
            raise FrameError(self._wrong, found) from None
        return found


def encode(number: int, kind: str, op: str, payload: dict[str, Any]) -> bytes:
    """A frame's bytes: compact, raw UTF-8, keys in the facts page's order, a line feed at the end.

    *Errors*: :class:`FrameError` for a frame over the bound (its line feed included), text that is not Unicode, NaN,
    and a payload that promises raw bytes.
    """
    frame = {"v": VERSION, "id": number, "kind": kind, "op": op, "payload": payload}
    try:
        if blob_bytes(payload):
            raise LineError("it promises raw bytes, which are never sent")
        data = _encoder.encode(frame).encode("utf-8")
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, LineError) else "it is not valid Unicode or JSON"
        raise FrameError(f"the payload of {op} cannot be sent: {why}") from error
    if len(data) >= MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(data) + 1} bytes; the wire takes {MAX_FRAME_BYTES}")
    return data + b"\n"


def _frame(line: bytes) -> Frame:
    """A line as a frame. *Errors*: :class:`LineError`."""
    value = _parse(line)
    if not isinstance(value, dict):
        raise LineError("not a JSON object")
    version, number, kind = value.get("v"), value.get("id"), value.get("kind")
    op, payload = value.get("op"), value.get("payload")
    if type(version) is not int or version != VERSION:
        raise LineError(f"v is not {VERSION}")
    if not isinstance(kind, str) or kind not in KINDS:
        raise LineError("kind is not req, res or evt")
    if number is None and kind == "evt":
        number = 0
    if type(number) is not int or not 0 <= number <= MAX_ID:
        raise LineError("id is not a whole number from 0 of at most 64 bits")
    if not isinstance(op, str):
        raise LineError("op is not a string")
    if payload is None:
        payload = {}
    if not isinstance(payload, dict):
        raise LineError("payload is not an object")
    return Frame(number, kind, op, payload)


def _parse(line: bytes) -> Any:
    """Strict JSON. *Errors*: :class:`LineError`, whose text repeats nothing of the line."""
    try:
        value = _decoder.decode(line.decode("utf-8"))
    except LineError:
        raise
    except json.JSONDecodeError as error:
        raise LineError(f"not JSON: {error.msg} at character {error.pos}") from None
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8 at byte {error.start}") from None
    except ValueError:  # a number of more digits than Python reads
        raise LineError("not JSON: a number is too long") from None
    except RecursionError:
        raise LineError(_TOO_DEEP) from None
    if line.count(b"{") + line.count(b"[") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise LineError(_TOO_DEEP)
    if b"\\u" in line:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise LineError("not Unicode: a lone surrogate") from None
    return value


_TOO_DEEP = f"more than {MAX_DEPTH} objects and lists within each other"


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether objects and lists lie within each other more than ``depth`` times. Takes no stack."""
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise LineError("an object has one key twice")
    return value


def _fraction(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise LineError("a number is too large")
    return number


def _constant(text: str) -> Any:
    raise LineError(f"{text} is not JSON")


_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_float=_fraction, parse_constant=_constant)
