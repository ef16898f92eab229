"""``sotbus watch``: a mailbox followed live, without a trace."""

from __future__ import annotations

import os
import select
import stat
import sys
from functools import partial
from typing import TYPE_CHECKING

import trio

from sotbus import message
from sotbus.bus_work import Follower
from sotbus.cli import messages, options, terminal
from sotbus.cli.main import open_client
from sotbus.comm import handles
from sotbus.errors import InboxBusy
from sotbus.mailwatch import MailWatch
from sotbus.mount_limits import DISK_S, Worker, limiter_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sotbus.comm.box import Box
    from sotbus.comm.client import Client

READER_CHECK_S = 1.0
"""How often a pipe is asked whether somebody still reads it, while there is nothing to print."""

BUSY_PAUSE_S = 0.2
"""Pause before an inbox is read again whose lock was held past its bound."""


def run_watch(words: list[str], box: Box | None) -> int:
    """Print what comes, as a poll would, until it is interrupted."""
    made = options.parser(
        "watch",
        "Follow a mailbox live: print each message as it is filed. Nothing is changed by it: the cursor stays where it "
        "is, so the next poll shows the same messages, and a session is not kept live.",
        "  sotbus watch               this session's mail from now on\n"
        "  sotbus watch --unread      the messages that a poll would show, then those that come\n"
        "  sotbus watch @api-vm       another session's\n"
        "  sotbus watch --json | jq --unbuffered .msg\n\n"
        "exit status: 130 interrupted (Ctrl-C), 1 not joined, no such handle, or nobody reads the output any more",
    )
    made.add_argument("handle", nargs="?", help="whose mail; this session's by default")
    made.add_argument("--unread", action="store_true", help="begin with what the next poll would show")
    form = made.add_mutually_exclusive_group()
    form.add_argument("--raw", action="store_true", help="print text as it is stored, control characters included")
    form.add_argument("--json", action="store_true", help="print each message as one JSON object")
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    client = open_client(box)
    if given.handle is None:
        handle = client.identity().handle
    else:
        handle = messages.known(client, handles.check(given.handle.removeprefix("@")))
    trio.run(partial(_print, client, handle, unread=given.unread, raw=given.raw, as_json=given.json))
    return 0


async def _print(client: Client, handle: str, *, unread: bool, raw: bool, as_json: bool) -> None:
    """*Errors*: as :func:`follow`'s; OSError where nothing can be printed."""

    def show(line: bytes) -> None:
        value = message.parse(line)
        if value is not None:
            terminal.out(messages.as_json(line) if as_json else messages.as_text(value, raw))
            terminal.flush()

    await follow(client, handle, show, unread=unread, idle=_check_reader)


async def follow(
    client: Client,
    handle: str,
    show: Callable[[bytes], None],
    *,
    unread: bool = False,
    idle: Callable[[], None] = lambda: None,
) -> None:
    """Hand each stored line to ``show`` as it is filed; never returns.

    :param unread: begin with the lines after the cursor; else with those that are filed from now on.
    :param idle: called about every second while nothing comes.

    *Errors*: SotbusError where the inbox cannot be read; whatever ``show`` and ``idle`` raise.
    *Cancellation*: leaves nothing behind.
    """
    worker = Worker(await limiter_of(client.folder.root), client.settings.inbox_read_wait_s + DISK_S)
    follower = Follower(client, handle, unread=unread)
    watch = MailWatch(client.folder, handle, client.box, worker)
    try:
        while True:
            with trio.move_on_after(READER_CHECK_S) as pause:
                await watch.wait()
            if pause.cancelled_caught:
                idle()
                continue
            for line in await _read(worker, follower):
                show(line)
    finally:
        watch.close()


async def _read(worker: Worker, follower: Follower) -> list[bytes]:
    """The new lines, however long the inbox is being written."""
    said = False
    while True:
        try:
            return await worker.run(follower.lines)
        except InboxBusy:
            if not said:
                follower.client.notify(f"note: the inbox of @{follower.handle} is being written; waiting for its lock")
            said = True
            await trio.sleep(BUSY_PAUSE_S)


def _check_reader() -> None:
    """Notice that nobody reads the pipe any more before there is something to print. *Errors*: BrokenPipeError."""
    try:
        fd = sys.stdout.fileno()
        piped = stat.S_ISFIFO(os.fstat(fd).st_mode)
    except (OSError, ValueError, AttributeError):
        return
    if piped:
        asked = select.poll()
        asked.register(fd, 0)
        if any(event & select.POLLERR for _, event in asked.poll(0)):
            raise BrokenPipeError
