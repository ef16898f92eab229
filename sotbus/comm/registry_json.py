"""registry.json as text: parsed strictly, written as every other writer writes it (two-space JSON and a newline).

What sotbus does not know comes back out as it was read: key order, unknown fields, and numbers digit for digit.
"""

from __future__ import annotations

import json
from functools import lru_cache
from json.encoder import encode_basestring

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
    return int(text) if len(text) < 19 and text != "-0" else Number(text)


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
    """The document as bytes: two-space JSON, UTF-8, a newline at the end. *Errors*: ValueError, RecursionError."""
    parts: list[str] = []
    _write(document, "\n", parts.append)
    parts.append("\n")
    text = "".join(parts)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:  # lone surrogates, which have no UTF-8: they stay the escapes they were
        return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in text).encode("utf-8")


_PLAIN = frozenset([str, int, bool, type(None)])
"""Types of a flat object's values (or an empty list), as most entries are: the C encoder writes those well."""


@lru_cache(maxsize=8)
def _flat(separator: str) -> json.JSONEncoder:
    """An encoder for a flat object whose members stand apart by ``separator``, a comma and a new line."""
    return json.JSONEncoder(ensure_ascii=False, separators=(separator, ": "))


def _write(value: Any, newline: str, out: Any) -> None:
    """One value; ``newline`` is a line feed and the indentation of the line that the value begins on."""
    if isinstance(value, str):
        out(encode_basestring(value))
    elif value is None:
        out("null")
    elif value is True:
        out("true")
    elif value is False:
        out("false")
    elif isinstance(value, Number):
        out(value.text)
    elif isinstance(value, dict) and value and all(type(item) in _PLAIN or item == [] for item in value.values()):
        inner = newline + "  "
        out("{" + inner + _flat("," + inner).encode(value)[1:-1] + newline + "}")
    elif isinstance(value, dict):
        inner = newline + "  "
        before = "{" + inner
        for key, item in value.items():
            out(before + encode_basestring(key) + ": ")
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
