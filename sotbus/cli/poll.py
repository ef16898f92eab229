"""``sotbus poll`` and ``sotbus unread`` (sot-comm v1, The inbox; facts 8.1 and 8.3)."""

from __future__ import annotations

import json

from sotbus import message
from sotbus.cli import messages, options, terminal
from sotbus.cli.main import open_client
from sotbus.comm import handles, reading
from sotbus.comm.sending import touch
from sotbus.errors import InboxBusy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.comm.box import Box


def run_poll(words: list[str], box: Box | None) -> int:
    """Show what is new, then move the cursor: never the other way round."""
    made = options.parser(
        "poll",
        "Show new messages, oldest first, and move the cursor past them once they are shown.",
        "  sotbus poll                show new mail\n"
        "  sotbus poll --json | jq    one JSON object a message\n\n"
        "exit status: 0 done (also with no mail), 1 not joined, 75 the inbox is being written: run it again",
    )
    form = made.add_mutually_exclusive_group()
    form.add_argument("--raw", action="store_true", help="print text as it is stored, control characters included")
    form.add_argument("--json", action="store_true", help="print each message as one JSON object")
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    client = open_client(box)
    handle = client.identity(adopt=True).handle
    client.folder.ensure()
    if not messages.is_there(client.folder.inbox(handle)):
        if not given.json:
            terminal.out("No messages.")
        terminal.flush()
        touch(client, handle)
        return 0
    try:
        seen = reading.look_at(client, handle, terminal.err if given.json else terminal.out)
    except InboxBusy as busy:
        (terminal.err if given.json else terminal.out)(str(busy))
        return busy.exit_status
    number = 0
    for line in seen.lines:
        value = message.parse(line)
        if value is not None:
            number += 1
            terminal.out(messages.as_json(line) if given.json else messages.as_text(value, given.raw))
    if number == 0 and not given.json:
        terminal.out("No new messages.")
    terminal.flush()
    reading.advance(client, handle, seen)
    touch(client, handle)
    return 0


def run_unread(words: list[str], box: Box | None) -> int:
    """Print ``<total> <unread>``; the cursor stays. A count that cannot be made prints nothing."""
    made = options.parser(
        "unread",
        "Count a handle's messages without reading them: how many lines its inbox has, and how many are unread mail.",
        "  sotbus unread              '12 3': twelve lines, three of them unread mail for this session\n"
        "  sotbus unread @api-vm      the same for another handle\n\n"
        "exit status: 0 counted, 1 not countable, 75 the inbox is being written: run it again",
    )
    made.add_argument("handle", nargs="?", help="whose mail; this session's by default")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    client = open_client(box)
    if given.handle is None:
        handle = client.identity().handle
    else:
        handle = messages.known(client, handles.check(given.handle.removeprefix("@")))
    try:
        seen = reading.look_at(client, handle, terminal.err)
    except InboxBusy as busy:
        return terminal.tell(busy)
    count = reading.unread(seen, handle)
    if given.json:
        terminal.out(json.dumps({"handle": handle, "total": seen.total, "unread": count}))
    else:
        terminal.out(f"{seen.total} {count}")
    return 0
