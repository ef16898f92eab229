"""The wire's lines, cut out of a byte stream: what client and node read alike (facts 11)."""

from __future__ import annotations

MAX_FRAME_BYTES = 1 << 20
"""Longest frame, 1 MiB (facts 11). Whether the line feed counts is not said there: what comes in may have it on top,
what goes out may not, so that each end is understood by one that reads it the other way."""

MAX_BLOB_BYTES = 1 << 26
"""Longest run of raw bytes after a frame that is still skipped, 64 MiB; the page sets no bound."""


class LineError(ValueError):
    """What came is no frame; the text says why, and nothing after it can be read either."""


class FrameLines:
    """A byte stream cut into the wire's lines, with the raw bytes that follow some of them left out. No I/O.

    Give what came to :meth:`feed`, then take lines with :meth:`next` until it answers None. After each line say how
    many raw bytes follow it, with :meth:`skip`.
    """

    __slots__ = ("_buffer", "_searched", "_skip", "max_bytes")

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()
        self._searched = 0
        self._skip = 0

    def __repr__(self) -> str:
        return f"<FrameLines {len(self._buffer)} bytes held, {self._skip} to skip>"

    @property
    def unfinished(self) -> bool:
        """Whether a line or its raw bytes have come in part."""
        return bool(self._buffer or self._skip)

    def feed(self, data: bytes) -> None:
        """Take what came, in pieces of any size; no more than one piece and one line is ever held."""
        passed = min(self._skip, len(data))
        self._skip -= passed
        self._buffer += memoryview(data)[passed:]

    def next(self) -> bytes | None:
        """The next whole line without its line feed, or None. *Errors*: :class:`LineError` for one that is too long."""
        end = self._buffer.find(b"\n", self._searched)
        if (len(self._buffer) if end < 0 else end) > self.max_bytes:
            raise LineError(f"a frame of more than {self.max_bytes} bytes")
        if end < 0:
            self._searched = len(self._buffer)
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line

    def skip(self, count: int) -> None:
        """Leave out the next ``count`` bytes, come or still to come."""
        here = min(count, len(self._buffer))
        del self._buffer[:here]
        self._skip = count - here


def blob_bytes(payload: object) -> int:
    """How many raw bytes follow a frame with this payload. *Errors*: :class:`LineError` for a length that is none."""
    blob = payload.get("blob") if isinstance(payload, dict) else None
    if not isinstance(blob, dict) or "len" not in blob:
        return 0
    size = blob["len"]
    if type(size) is not int or not 0 <= size <= MAX_BLOB_BYTES:
        raise LineError(f"blob.len is not a number of bytes from 0 to {MAX_BLOB_BYTES}")
    return size
