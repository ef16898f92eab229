"""registry.json as text: parsed strictly, written as every other writer writes it (two-space JSON and a newline).

What sotbus does not know comes back out as it was read: key order, unknown fields, and numbers digit for digit.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring, encode_basestring_ascii

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SKELETON = b'{"protocol_version": 1, "agents": {}}\n'
"""A new registry (facts 2.1)."""

PROTOCOL_VERSION = 1


class NotARegistryError(ValueError):
    """The text is not one JSON document with an object ``agents``; the message says which."""


class Number(float):
    """A fraction or a huge integer that keeps the text it was read from."""

    text: str

    def __new__(cls, text: str) -> Number:
        number = super().__new__(cls, text)
        number.text = text
        return number


def _integer(text: str) -> int | Number:
    return int(text) if len(text) < 19 else Number(text)


def _constant(text: str) -> object:
    raise NotARegistryError(f"{text} is not JSON")


_decoder = json.JSONDecoder(parse_float=Number, parse_int=_integer, parse_constant=_constant)


def parse(data: bytes) -> dict[str, Any]:
    """The document. :raises NotARegistryError: not UTF-8, not JSON, several documents, or ``agents`` is no object."""
    try:
        document = _decoder.decode(data.decode("utf-8"))
    except NotARegistryError:
        raise
    except (ValueError, RecursionError) as error:
        raise NotARegistryError(f"it is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise NotARegistryError("it is not a JSON object")
    if not isinstance(document.get("agents"), dict):
        raise NotARegistryError("its agents are not an object")
    return document


def dump(document: dict[str, Any]) -> bytes:
    """The document as bytes: two-space JSON, UTF-8, a newline at the end."""
    parts: list[str] = []
    _write(document, "\n", parts.append)
    parts.append("\n")
    return "".join(parts).encode("utf-8")


def _write(value: Any, newline: str, out: Any) -> None:
    """One value; ``newline`` is a line feed and the indentation of the line that the value begins on."""
    if isinstance(value, str):
        out(_string(value))
    elif value is None:
        out("null")
    elif value is True:
        out("true")
    elif value is False:
        out("false")
    elif isinstance(value, Number):
        out(value.text)
    elif isinstance(value, dict):
        inner = newline + "  "
        before = "{" + inner
        for key, item in value.items():
            out(before + _string(key) + ": ")
            _write(item, inner, out)
            before = "," + inner
        out(newline + "}" if value else "{}")
    elif isinstance(value, list):
        inner = newline + "  "
        before = "[" + inner
        for item in value:
            out(before)
            _write(item, inner, out)
            before = "," + inner
        out(newline + "]" if value else "[]")
    else:
        out(json.dumps(value))


def _string(text: str) -> str:
    """A JSON string in UTF-8; a lone surrogate, which has no UTF-8, stays the escape it was."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return str(encode_basestring_ascii(text))
    return str(encode_basestring(text))
