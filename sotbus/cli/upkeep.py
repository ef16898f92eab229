"""``sotbus status``, ``sotbus log`` and ``sotbus prune``: what a session keeps in order about itself and its mail."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from sotbus import message
from sotbus.cli import messages, options, terminal
from sotbus.cli.main import open_client
from sotbus.comm import handles, pruning, work_state
from sotbus.comm.history import open_history
from sotbus.errors import EX_FAILED, InboxBusy, SotbusError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from sotbus.comm.box import Box
    from sotbus.comm.client import Client
    from sotbus.comm.history import History
    from sotbus.comm.prune_plan import Plan

LOG_LINES = 20

PROGRESS_AFTER_S = 0.5
"""Work that takes less says nothing of how far it is."""

PROGRESS_EVERY_S = 0.1


def run_status(words: list[str], box: Box | None) -> int:
    """Declare this session's work-state."""
    made = options.parser(
        "status",
        "Say what this session is doing; 'sotbus list' shows it. The words of SUMMARY are joined by one space: one "
        f"line of at most {work_state.MAX_SUMMARY_CHARACTERS} characters. Without a summary the old one is cleared.",
        "  sotbus status working 'moving the parser to its own crate'\n"
        "  sotbus status blocked 'which database? see my mail'\n"
        "  sotbus status idle\n\n"
        "exit status: 0 written, 1 FAILED, refused or not joined, 2 usage",
    )
    made.add_argument("state", choices=work_state.STATES, help="one of the four")
    made.add_argument("summary", nargs="*", default=(), metavar="SUMMARY", help="what stands behind it in the list")
    made.add_argument("--json", action="store_true", help="print the new state as one JSON object")
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    said = work_state.declare(open_client(box), given.state, " ".join(given.summary))
    if given.json:
        terminal.out(json.dumps(said, ensure_ascii=True))
    else:
        summary = f" {terminal.shown(said['summary'])}" if said["summary"] else ""
        terminal.out(f"@{said['handle']} [{said['state']}]{summary}")
    return 0


def run_log(words: list[str], box: Box | None) -> int:
    """Show an inbox's history; the cursor stays where it is."""
    made = options.parser(
        "log",
        "Show messages that an inbox has had, newest last, without moving the cursor. '*' marks unread mail, '+' what "
        "the next poll shows too but nobody counts as unread: broadcasts, and mail that is not from somebody else to "
        "this handle.",
        f"  sotbus log                 the last {LOG_LINES} messages of this session\n"
        "  sotbus log -n 5 @api-vm    the last five of another handle\n"
        '  sotbus log --all --json    every one, as {"unread": ..., "new": ..., "message": {...}}\n\n'
        "exit status: 0 shown, 1 not joined or no such handle, 75 the inbox is being written: run it again",
    )
    much = made.add_mutually_exclusive_group()
    much.add_argument("-n", type=_number, default=LOG_LINES, metavar="N", help=f"how many ({LOG_LINES})")
    much.add_argument("--all", action="store_true", help="everything that is still there")
    made.add_argument("handle", nargs="?", help="whose inbox; this session's by default")
    form = made.add_mutually_exclusive_group()
    form.add_argument("--raw", action="store_true", help="print text as it is stored, control characters included")
    form.add_argument("--json", action="store_true", help="print each message as one JSON object")
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    client = open_client(box)
    handle = _handle(client, given.handle)
    try:
        history = open_history(client, handle, terminal.err)
    except InboxBusy as busy:
        return terminal.tell(busy)
    number = 0
    if history is not None:
        with history:
            for new, line, value in _all(history) if given.all else _last(history, given.n):
                number += 1
                _show(handle, new, line, value, given)
    if number == 0 and not given.json:
        terminal.out("No messages.")
    return 0


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of messages; it is 1 or more")
    return int(text)


def _handle(client: Client, given: str | None) -> str:
    """The handle that was named, or this session's. *Errors*: NotJoined, NotHere, BadHandle, RegistryUnreadable."""
    if given is None:
        return client.identity().handle
    return messages.known(client, handles.check(given.removeprefix("@")))


def _all(history: History) -> Iterator[tuple[bool, bytes, dict[str, Any]]]:
    """Every message: whether it is new to a poll, its line, its value."""
    for new, start, end in ((False, 0, history.new_from), (True, history.new_from, history.end)):
        for line in history.forwards(start, end):
            value = message.parse(line)
            if value is not None:
                yield new, line, value


def _last(history: History, wanted: int) -> Iterator[tuple[bool, bytes, dict[str, Any]]]:
    """The last ``wanted`` messages, oldest first."""
    found: list[tuple[bool, bytes, dict[str, Any]]] = []
    for start, line in history.backwards():
        value = message.parse(line) if line else None
        if value is not None:
            found.append((start >= history.new_from, line, value))
            if len(found) == wanted:
                break
    yield from reversed(found)


def _show(handle: str, new: bool, line: bytes, value: dict[str, Any], given: argparse.Namespace) -> None:
    unread = new and message.counts(line, handle)
    if given.json:
        flags = f'"unread": {json.dumps(unread)}, "new": {json.dumps(new)}'
        terminal.out(f'{{{flags}, "message": {messages.as_json(line)}}}')
        return
    mark = terminal.colour("*", terminal.YELLOW) if unread else "+" if new else " "
    terminal.out(f"{mark} {messages.as_text(value, given.raw)}")


def run_prune(words: list[str], box: Box | None) -> int:
    """Say what a prune would take away, or take it away."""
    made = options.parser(
        "prune",
        "Make inboxes smaller: messages that have been read and are older than a day become empty lines. Without --yes "
        "it only says what would go. What is unread stays, and so do the last message read, messages without a "
        "readable time, and every cursor. Only where the comm folder is on this box's own disk.",
        "  sotbus prune                  what would go of this session's inbox\n"
        "  sotbus prune --all            what would go of every inbox\n"
        "  sotbus prune --all --yes      do it\n\n"
        "exit status: 0 done or nothing to do, 1 FAILED or refused, 75 an inbox is being written: run it again",
    )
    whose = made.add_mutually_exclusive_group()
    whose.add_argument("handle", nargs="?", help="whose inbox; this session's by default")
    whose.add_argument("--all", action="store_true", help="every inbox of the comm folder")
    made.add_argument("--yes", action="store_true", help="do it")
    made.add_argument("--json", action="store_true", help="print one JSON array, an object an inbox")
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    client = open_client(box)
    names = _inboxes(client) if given.all else [_handle(client, given.handle)]
    if names:
        pruning.check_manager(client)
    elif not given.json:
        terminal.out("There are no inboxes.")
    progress = Progress()
    one: Callable[[Client, str, Progress], Plan] = pruning.prune if given.yes else pruning.survey
    statuses: set[int] = set()
    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            plan = one(client, name, progress)
        except SotbusError as error:
            progress.clear()
            statuses.add(terminal.tell(error))
            rows.append({"handle": name, "error": str(error)})
            continue
        progress.clear()
        rows.append(_row(plan))
        if not given.json:
            terminal.out(_sentence(plan))
    if given.json:
        terminal.out(json.dumps(rows, ensure_ascii=True))
    elif not given.yes and any(row.get("freed_bytes") for row in rows):
        terminal.out("Nothing was changed; --yes does it.")
    return EX_FAILED if EX_FAILED in statuses else max(statuses, default=0)


def _inboxes(client: Client) -> list[str]:
    """The handles that have an inbox. *Errors*: OSError where the folder cannot be listed."""
    try:
        files = os.listdir(client.folder.inboxes)
    except FileNotFoundError:
        return []
    names = (name.removesuffix(".jsonl") for name in files if name.endswith(".jsonl"))
    return sorted(name for name in names if handles.is_handle(name))


def _row(plan: Plan) -> dict[str, Any]:
    """One inbox as ``--json`` prints it; ``pruned_lines`` and ``freed_bytes`` went, or would go unless ``done``."""
    return {
        "handle": plan.handle,
        "done": plan.done,
        "lines": plan.lines,
        "shown_lines": plan.shown,
        "pruned_lines": plan.pruned,
        "recent_lines": plan.recent,
        "undated_lines": plan.undated,
        "bytes": plan.size,
        "freed_bytes": plan.freed,
        "skipped": plan.skipped or None,
    }


def _sentence(plan: Plan) -> str:
    head = f"  @{plan.handle}: {_count(plan.lines, 'line')}, {_count(plan.size, 'byte')}; "
    if plan.skipped:
        return f"{head}left alone: {plan.skipped}"
    stays = []
    if plan.recent:
        stays.append(f"{_count(plan.recent, 'read line')} of the last 24 h")
    if plan.undated:
        stays.append(f"{_count(plan.undated, 'read line')} without a readable time")
    tail = f" ({', '.join(stays)} stay)" if stays else ""
    if not plan.freed:
        return f"{head}nothing to prune{tail}"
    went = "went" if plan.done else "would go"
    return f"{head}{_count(plan.freed, 'byte')} of {_count(plan.pruned, 'read line')} {went}{tail}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


class Progress:
    """How far long work is, in one line on standard error that is written over, where that is a terminal."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wanted = sys.stderr is not None and sys.stderr.isatty()
        self._next = clock() + PROGRESS_AFTER_S
        self._width = 0

    def __call__(self, handle: str, done: int, total: int) -> None:
        """Say that ``done`` of ``total`` bytes of a handle's inbox are done, but not too often."""
        if not self._wanted or self._clock() < self._next:
            return
        self._next = self._clock() + PROGRESS_EVERY_S
        self._write(f"@{handle}: {done * 100 // max(total, 1)}% of {total} bytes")

    def clear(self) -> None:
        """Take the line away."""
        if self._width:
            self._write("")

    def _write(self, text: str) -> None:
        padded = text.ljust(self._width)
        self._width = len(text)
        try:
            sys.stderr.write(f"\r{padded}" if text else f"\r{padded}\r")
            sys.stderr.flush()
        except (OSError, ValueError):
            self._wanted = False
