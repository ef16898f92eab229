"""The line: one message as one JSON object on one physical line (sot-comm v1, The inbox; facts 5 and 6).

Built by :func:`encode`; read by :func:`parse`, which answers what a reader shows, and by
:func:`counts`, which says whether it is unread mail.
"""

from __future__ import annotations

import json
import time
from functools import lru_cache
from json.encoder import encode_basestring

from sotbus.errors import BadRequest, TooLarge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_TEXT_BYTES = 256 * 1024
"""Default bound on a message's text, in bytes of UTF-8 (decisions, sot-comm 7)."""

STAMP = "%Y-%m-%dT%H:%M:%SZ"
"""UTC to the second, on the wire and on disk."""


_DIGITS_AS_0 = bytes(0x30 if 0x30 <= byte <= 0x39 else byte for byte in range(256))


def stamp(now_s: float | None = None) -> str:
    """A time as a stamp; the present one by default. :param now_s: seconds since the epoch."""
    return _stamp_of(int(time.time() if now_s is None else now_s // 1))


@lru_cache(maxsize=8)
def _stamp_of(second: int) -> str:
    return time.strftime(STAMP, time.gmtime(second))


def is_stamp(text: str) -> bool:
    """Whether text has the shape ``YYYY-MM-DDTHH:MM:SSZ`` in ASCII digits; the calendar is not asked (facts 2.7)."""
    return len(text) == 20 and text.isascii() and text.encode().translate(_DIGITS_AS_0) == b"0000-00-00T00:00:00Z"


def check_text(text: str, max_bytes: int = MAX_TEXT_BYTES) -> None:
    """Refuse a text that cannot be a message.

    *Errors*: :class:`BadRequest` for an empty text and for lone surrogates (text that is not Unicode),
    :class:`TooLarge` naming both numbers. Nothing is ever replaced or cut.
    """
    if not text:
        raise BadRequest("the text is empty; nothing was sent")
    try:
        size = len(text) if text.isascii() else len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise BadRequest(f"the text is not valid Unicode at character {error.start + 1}; nothing was sent") from error
    if size > max_bytes:
        raise too_large(size, max_bytes)


def too_large(size: int, max_bytes: int, *, at_least: bool = False) -> TooLarge:
    """The refusal of a text over the bound."""
    more = "more than " if at_least else ""
    return TooLarge(f"too_large: the text has {more}{size} bytes and the limit is {max_bytes}; nothing was sent")


@lru_cache(maxsize=64)
def _head(sender: str, to: str, repo: str) -> str:
    """The line up to its text: the same for every message between two sessions."""
    quoted = encode_basestring
    return f'{{"from":{quoted(sender)},"to":{quoted(to)},"repo":{quoted(repo)},"msg":'


def encode(sender: str, to: str, repo: str, text: str, ts: str) -> bytes:
    """The five keys in the page's order, compact, raw UTF-8, and a newline.

    :param to: the recipient's handle, or ``""`` for a broadcast copy.
    """
    line = f'{_head(sender, to, repo)}{encode_basestring(text)},"ts":{encode_basestring(ts)}}}\n'
    return line.encode("utf-8")


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def _integer(text: str) -> int | float:
    """An integer, or a float where it is too long for Python's own bound on digits."""
    return int(text) if len(text) < 4000 else float(text)


_decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_integer)


def parse(line: bytes) -> dict[str, Any] | None:
    """A stored line (without its newline) as the object it is; None where it is never shown.

    Strict (decisions, sot-comm 17): UTF-8, one document, no NaN or Infinity, no lone surrogate. NUL bytes are dropped
    first, as a reader that shows such a line does.
    """
    if b"\0" in line:
        line = line.replace(b"\0", b"")
    try:
        value = _decoder.decode(line.decode("utf-8"))
        if not isinstance(value, dict):
            return None
        if b"\\u" in line:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        return None
    return value


def counts(line: bytes, handle: str) -> bool:
    """Whether a stored line is unread mail for a handle: directed to it and not by it; one with a NUL never is."""
    if b"\0" in line:
        return False
    value = parse(line)
    return value is not None and value.get("to") == handle and value.get("from") != handle


def text_of(value: dict[str, Any]) -> Any:
    """The text that a reader shows: the first of ``msg``, ``message``, ``text`` that is neither null nor false."""
    for key in ("msg", "message", "text"):
        found = value.get(key)
        if found is not None and found is not False:
            return found
    return ""


def unicode_of(text: str) -> str:
    """A file name's text as Unicode: bytes that are no UTF-8 become U+FFFD, since a line is always UTF-8."""
    if text.isascii():
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        return text.encode("utf-8", "replace").decode("utf-8")


def shown(text: str, *, newlines: bool = False) -> str:
    """Text for a terminal: control characters, and lone surrogates, as visible escapes (decisions, sot-comm 5).

    :param newlines: keep newline and tab as they are, as in a message's text.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if newlines else ""
    return "".join(
        _escape(c) if (c < " " or "\x7f" <= c <= "\x9f" or "\ud800" <= c <= "\udfff") and c not in kept else c
        for c in text
    )


def _escape(c: str) -> str:
    return f"\\x{ord(c):02x}" if c < "\u0100" else f"\\u{ord(c):04x}"
