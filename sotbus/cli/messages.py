"""How messages, and whose they are, look on a terminal: what ``poll``, ``log`` and ``watch`` share."""

from __future__ import annotations

import json
import os

from sotbus import message
from sotbus.comm.folder import refresh_folder
from sotbus.errors import NotHere

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sotbus.comm.client import Client


def is_there(path: str) -> bool:
    """Whether an inbox is there at all. *Errors*: OSError where that cannot be told: it is not called empty then."""
    refresh_folder(os.path.dirname(path))
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def known(client: Client, handle: str) -> str:
    """The handle, where it is listed or has an inbox. *Errors*: NotHere, RegistryUnreadable."""
    if not is_there(client.folder.inbox(handle)) and handle not in client.registry.agents():
        raise NotHere(f"no such handle: {handle}", hint="sotbus list")
    return handle


def as_json(line: bytes) -> str:
    """The stored line as it is, less NUL bytes; DEL and C1 controls escaped, so that it is safe on a terminal too."""
    text = line.replace(b"\0", b"").decode("utf-8").strip(" \t\r")
    if text.isprintable():
        return text
    return "".join(f"\\u{ord(c):04x}" if "\x7f" <= c <= "\x9f" else max(c, " ") for c in text)


def as_text(value: dict[str, Any], raw: bool) -> str:
    """``[ts] [from:repo] text``; fields that are missing are empty."""
    text = _plain(message.text_of(value))
    head = [_plain(value.get(field, "")) for field in ("ts", "from", "repo")]
    if not raw:
        text = message.shown(text, newlines=True)
        head = [message.shown(field) for field in head]
    return f"[{head[0]}] [{head[1]}:{head[2]}] {text}"


def _plain(value: Any) -> str:
    """A field as text: strings and numbers as they are, nothing for null, anything else as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    indent = 2 if isinstance(value, (dict, list)) else None
    try:
        return json.dumps(value, ensure_ascii=False, indent=indent)
    except RecursionError:
        return "(a value nested too deep to print; see poll --json)"
