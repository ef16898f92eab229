"""``sotbus send``: one result line per recipient, ``filed`` or ``FAILED`` (sot-comm v1, The wire; facts 8.2)."""

from __future__ import annotations

import os

from sotbus import message
from sotbus.cli import terminal
from sotbus.cli.main import open_client
from sotbus.cli.watchdog import watchdog
from sotbus.comm.handles import is_handle
from sotbus.comm.sending import Outbox, touch
from sotbus.errors import EX_FAILED, BadRequest, NeedsNode, RegistryUnreadable, SotbusError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.comm.box import Box

USAGE = """\
usage: sotbus send @handle TEXT ...
       sotbus send --broadcast TEXT ...
       sotbus send --id ID @handle TEXT ...

File a message in another session's mailbox. The words of TEXT are joined by one space; '-' alone reads the text from
standard input, byte for byte. Prints one line per recipient: 'filed -> @handle' once the line is safe on disk, or
'FAILED -> @handle: reason' (on standard error). Nothing is queued and nothing is tried twice.

  --id ID       file it once, however often it is sent under this ID; needs this box's node; not with --broadcast
  --broadcast   a copy to every other handle; a broadcast copy is shown but never counted as unread
  -h, --help    this text

examples:
  sotbus send @api-vm 'the schema is in docs/schema.md'
  git diff | sotbus send @review-vm -
  sotbus send --broadcast 'rebooting in five minutes'

exit status: 0 filed (every one), 1 FAILED or refused, 2 --id with --broadcast"""

UNKNOWN = "the outcome is unknown"
"""What a send says of a line whose file system does not answer."""

READ_BYTES = 1 << 16

COUNT_AT_MOST = 1 << 26
"""How far an endless standard input is counted before the refusal says "more than"."""


def run_send(words: list[str], box: Box | None) -> int:
    """Send. Option words count only before the target: what follows it is text."""
    broadcast, target, literal = False, "", False
    message_id: str | None = None
    rest = list(words)
    while rest and not literal:
        word = rest[0]
        if word in ("-h", "--help") and not target and not broadcast:
            terminal.out(USAGE)
            return 0
        if word == "--broadcast" and not target and not broadcast:
            broadcast = True
        elif word.startswith("@") and not target:
            if broadcast:
                terminal.err("give a target or --broadcast, not both; a text that begins with @ goes after --")
                return EX_FAILED
            target = word
        elif word == "--id" and not target and len(rest) > 1:
            rest.pop(0)
            message_id = rest[0]
        elif word == "--":
            literal = True
        else:
            break
        rest.pop(0)
    if broadcast and message_id is not None:
        return terminal.tell(
            UsageError(
                "sotbus send: --id and --broadcast do not go together: an ID is one message's to one handle, and a "
                "broadcast is a copy for each; nothing was sent",
                hint="leave out --id, or send to each handle: sotbus send --id ID @handle TEXT",
            )
        )
    if not rest:
        terminal.err(USAGE)
        return EX_FAILED
    if not target and not broadcast:
        return _no_target(rest[0])
    try:
        return _send(broadcast, target, rest if literal or rest != ["-"] else None, message_id, box)
    except (SotbusError, OSError) as error:
        return _refused("--broadcast" if broadcast else target, error)
    except KeyboardInterrupt:
        return _refused(
            "--broadcast" if broadcast else target, SotbusError("interrupted before the answer; the outcome is unknown")
        )


def _send(broadcast: bool, target: str, words: list[str] | None, message_id: str | None, box: Box | None) -> int:
    """Verify the sender, file, answer, and only then touch. *Errors*: SotbusError, OSError: nothing was filed."""
    to = "--broadcast" if broadcast else terminal.shown(target)
    watchdog.expect("nothing was sent", f"FAILED -> {to}: ")
    client = open_client(box)
    text = _from_stdin(client.settings.max_text_bytes) if words is None else " ".join(words)
    message.check_text(text, client.settings.max_text_bytes)
    client.ensure()
    try:
        outbox = Outbox(client)
    except SotbusError as error:
        if broadcast and isinstance(error.__cause__, RegistryUnreadable):
            raise RegistryUnreadable("the registry could not be read; nothing was sent", hint=error.hint) from error
        raise
    status = _broadcast(outbox, text) if broadcast else _directed(outbox, target[1:], text, message_id)
    watchdog.expect("every answer above stands")
    touch(client, outbox.sender.handle, outbox.agents)
    return status


def _refused(to: str, error: SotbusError | OSError) -> int:
    """The FAILED line of a send that nothing was filed of; answers the exit status."""
    if not isinstance(error, SotbusError):
        error = SotbusError(f"{error.strerror or error}; nothing was sent")
    elif isinstance(error, NeedsNode) and not error.hint:
        error.hint = "start the node with 'sotbus serve' and send again, or leave out --id"
    terminal.tell(error, f"FAILED -> {terminal.shown(to)}: ")
    return EX_FAILED


def _directed(outbox: Outbox, to: str, text: str, message_id: str | None) -> int:
    watchdog.expect(UNKNOWN, f"FAILED -> @{terminal.shown(to)}: ")
    here = outbox.send(to, text, message_id=message_id)
    _answer(f"  filed -> @{to}" if here else f"filed -> @{to}")
    return 0


def _broadcast(outbox: Outbox, text: str) -> int:
    filed = asked = 0
    hints = {""}
    for to in outbox.others():
        asked += 1
        watchdog.expect(UNKNOWN, f"FAILED -> @{terminal.shown(to)}: ")
        try:
            here = outbox.send(to, text, broadcast=True)
        except SotbusError as error:
            terminal.err(f"FAILED -> @{terminal.shown(to)}: {terminal.shown(str(error))}")
            if error.hint not in hints:
                hints.add(error.hint)
                terminal.err(f"hint: {terminal.shown(error.hint)}")
        else:
            filed += 1
            _answer(f"  filed -> @{to}" if here else f"filed -> @{to}")
    of_all = f"{filed}" if filed == asked else f"{filed} of {asked}"
    _answer(f"Broadcast to {of_all} agent(s).")
    return 0 if filed == asked else EX_FAILED


def _answer(line: str) -> None:
    """A line of the answer, at once. Where nobody can read it any more the exit status still tells the truth."""
    try:
        terminal.out(line)
        terminal.flush()
    except OSError:
        terminal.silence()


def _no_target(word: str) -> int:
    """Text without a target. A first word that could be one is told apart: a handle without its ``@``."""
    terminal.err("no target; use @name or --broadcast")
    if word.startswith(("-", "@")) or not word:
        terminal.err("hint: sotbus send --help")
    else:
        first = f"for the session @{word} write @{word}; " if is_handle(word) else ""
        terminal.err(f"hint: {first}send takes @ and a handle, as 'sotbus list' shows them, and no other address")
    return EX_FAILED


def _from_stdin(max_bytes: int) -> str:
    """Standard input, byte for byte.

    *Errors*: BadRequest for bytes that are not UTF-8; TooLarge, before more than the bound is kept in memory.
    """
    parts: list[bytes] = []
    size = 0
    while part := _read_stdin():
        size += len(part)
        if size <= max_bytes:
            parts.append(part)
        elif size > COUNT_AT_MOST:
            raise message.too_large(COUNT_AT_MOST, max_bytes, at_least=True)
    if size > max_bytes:
        raise message.too_large(size, max_bytes)
    try:
        return b"".join(parts).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"standard input is not UTF-8 at byte {error.start + 1}; nothing was sent") from error


def _read_stdin() -> bytes:
    watchdog.pause()
    try:
        return os.read(0, READ_BYTES)
    except OSError as error:
        raise BadRequest(f"standard input cannot be read ({error.strerror}); nothing was sent") from error
    finally:
        watchdog.progress()
