"""Work-state: what a session says it is doing, kept in its registry entry (sot-comm v1, registry.json; facts 8.5)."""

from __future__ import annotations

from sotbus import message
from sotbus.comm.registry import entry_of, text_of
from sotbus.errors import BadRequest, NotJoined, TooLarge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sotbus.comm.client import Client

STATES = ("working", "blocked", "idle", "done")
"""The states that a session may declare; ``done`` turns ``idle`` once a person has looked (facts 2.2, clear unread)."""

MAX_SUMMARY_CHARACTERS = 500
"""A summary is one line of a list, not a message."""


def check_summary(text: str) -> str:
    """A summary as it is kept: one line, without the blanks around it.

    *Errors*: :class:`BadRequest` for a control character, a line or paragraph separator, and text that is not Unicode;
    :class:`TooLarge` over :data:`MAX_SUMMARY_CHARACTERS`. Nothing is replaced or cut.
    """
    for at, c in enumerate(text, 1):
        if c < " " or "\x7f" <= c <= "\x9f" or c in "\u2028\u2029" or "\ud800" <= c <= "\udfff":
            what = "a line break" if c in "\n\r\x0b\x0c\x85\u2028\u2029" else "a control character"
            what = "no Unicode" if "\ud800" <= c <= "\udfff" else what
            raise BadRequest(
                f"the summary has {what} at character {at}; nothing was written",
                hint="a summary is one line of plain text",
            )
    text = text.strip()
    if len(text) > MAX_SUMMARY_CHARACTERS:
        raise TooLarge(
            f"the summary has {len(text)} characters and the limit is {MAX_SUMMARY_CHARACTERS}; nothing was written",
            hint="what is longer belongs in a message: sotbus send",
        )
    return text


def declare(client: Client, state: str, summary: str = "") -> dict[str, str]:
    """Write this session's work-state; answers its handle and the fields as they now stand.

    Writes ``state``, ``summary``, ``status_at`` and, as any command does, ``last_seen`` of this session's own entry, in
    one registry write; every other field, the daemon's ``done`` mark included, stays as it is.

    :param state: one of :data:`STATES`.
    :param summary: what stands behind the state in ``list``; an empty one clears the old one, which was about another
        state.

    Waits at most ``settings.lock_wait_s`` seconds for the registry lock.

    *Durability*: on disk when this returns, as every registry write.
    *Errors*: :class:`BadRequest`, :class:`TooLarge`; :class:`NotJoined` (and GateRefused), also where the entry is gone
    or another session's by now; :class:`sotbus.errors.RegistryWriteFailed`. Nothing was written, whichever it is.
    """
    if state not in STATES:
        raise BadRequest(f"{state!r} is not a work-state; it is one of {', '.join(STATES)}; nothing was written")
    text = check_summary(summary)
    me = client.identity(adopt=True)
    now = message.stamp(client.clock())
    fields = {"state": state, "summary": text, "status_at": now}

    def change(document: dict[str, Any]) -> bool:
        entry = entry_of(document["agents"], me.handle)
        if entry is None:
            raise NotJoined(
                f"your identity @{me.handle} has no registry row; nothing was written",
                hint=f"sotbus join --name {me.handle}",
            )
        if text_of(entry, "root") not in ("", me.root) or client.session.taken_by_another(entry):
            raise NotJoined(
                f"@{me.handle} has been taken by another session; nothing was written",
                hint="take another handle: sotbus join",
            )
        entry.update(fields, last_seen=now)
        return True

    client.registry.update(change, client.settings.lock_wait_s)
    return {"handle": me.handle, **fields}
