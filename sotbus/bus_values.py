"""What the Python API hands out: a message, an agent, a receipt. Plain values, made from a stored line or an entry."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sotbus import message
from sotbus.comm.liveness import age_s, is_live
from sotbus.comm.registry import entry_of, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Receipt:
    """The answer to a send: the line is on disk, in the mailbox of ``to`` (a handle), under the time ``ts`` (UTC)."""

    to: str
    ts: str


@dataclass(frozen=True)
class Message:
    """One message as its reader is shown it. Fields that the line does not have are empty.

    ``sender`` and ``to`` are handles without the ``@``; ``to`` is empty in a copy of a broadcast. ``ts`` is the
    sender's clock, UTC to the second. ``unread`` says whether it counts as unread mail: directed to this handle, and
    not by it. ``raw`` is the whole stored object, with whatever else its writer put there.
    """

    sender: str
    to: str
    repo: str
    text: str
    ts: str
    unread: bool
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Agent:
    """One registry entry. ``age_s`` is how many seconds ago it was last seen, negative where its clock is ahead.

    ``age_s`` is None where the entry has no usable time. ``state`` is the declared one (``working``, ``blocked``,
    ``idle``, ``done``), ``idle`` where none is.
    """

    handle: str
    host: str
    repo: str
    root: str
    live: bool
    age_s: int | None
    state: str
    summary: str
    expertise: tuple[str, ...]


def message_of(line: bytes, handle: str) -> Message | None:
    """A stored line as its reader is shown it; None where it is not shown."""
    value = message.parse(line)
    if value is None:
        return None
    sender, to, repo, ts = (_plain(value.get(key)) for key in ("from", "to", "repo", "ts"))
    return Message(sender, to, repo, _plain(message.text_of(value)), ts, message.counts(line, handle), value)


def agent_of(handle: str, agents: Mapping[str, Any], now_s: float) -> Agent:
    """A registry entry as of ``now_s`` (seconds since the epoch); one that is no object has nothing but its handle."""
    entry = entry_of(agents, handle)
    last_seen = entry.get("last_seen") if entry else None
    expertise = entry.get("expertise") if entry else None
    words = expertise if isinstance(expertise, list) else []
    return Agent(
        handle,
        text_of(entry, "host"),
        text_of(entry, "repo"),
        text_of(entry, "root"),
        is_live(last_seen, now_s),
        age_s(last_seen, now_s),
        text_of(entry, "state") or "idle",
        text_of(entry, "summary"),
        tuple(word for word in words if isinstance(word, str)),
    )


def _plain(value: object) -> str:
    """A field as text: a string as it is, nothing for null, anything else as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return ""
