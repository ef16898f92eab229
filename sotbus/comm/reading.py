"""Reading: what a poll shows and what counts as unread (sot-comm v1, The inbox; facts 6, 7 and 8.1)."""

from __future__ import annotations

import os
from contextlib import nullcontext

from sotbus import message
from sotbus.comm import cursor, offset_hint
from sotbus.comm.folder import refresh_folder
from sotbus.comm.inbox import Inbox, Look, look
from sotbus.comm.manager_record import reads_under_lock
from sotbus.errors import SotbusError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from sotbus.comm.client import Client


def look_at(client: Client, handle: str, warn: Callable[[str], None]) -> Look:
    """Count and read an inbox once, under the shared lock where this box appends itself.

    :param warn: takes the warning that a lock fault (not a held lock) made this read go without the lock.

    *Errors*: :class:`InboxBusy` where the lock is held past its bound; nothing was read.
    """
    folder = client.folder
    refresh_folder(folder.inboxes)
    there = os.path.lexists(folder.inbox(handle))
    lock: AbstractContextManager[object] = nullcontext()
    try:
        manager = reads_under_lock(folder, client.box) if there else None
        if manager is not None:
            lock = Inbox(folder, handle, manager).locked_for_reading(client.settings.inbox_read_wait_s)
    except OSError as error:
        warn(
            f"WARNING: the inbox lock for @{handle} failed ({error.errno}: {error.strerror}) — reading without it; "
            "a line may show twice, none is lost"
        )
    with lock:
        try:
            refresh_folder(folder.cursors)
            before = cursor.read(folder.cursor(handle))
            seen = look(folder.inbox(handle), before, offset_hint.read(folder, handle))
        except OSError as error:
            raise SotbusError(f"the inbox of @{handle} cannot be read: {error.strerror or error}") from error
    seen.cursor = before
    if seen.cut_back:
        client.notify(f"note: the last line read from @{handle}'s inbox was cut back; reading from the line before it")
    return seen


def advance(client: Client, handle: str, seen: Look) -> None:
    """Move the cursor past what a look read. Only a poll calls this, and only after it has shown the lines.

    The count and the hash are those of the bytes that were read; nothing is read again. An empty batch writes nothing,
    and neither does one that another poll of this handle, at the same time, has read past.

    *Errors*: :class:`SotbusError` where the cursor cannot be written: the lines show again at the next poll.
    """
    if not seen.lines:
        return
    path = client.folder.cursor(handle)
    refresh_folder(client.folder.cursors)
    now = cursor.read(path)
    if now != seen.cursor and now.hash and (now.count or 0) > seen.total:
        return  # another poll of this handle read further meanwhile
    try:
        cursor.write(path, cursor.written_form(seen.total, seen.last))
    except OSError as error:
        raise SotbusError(
            f"the cursor of @{handle} could not be written ({error.strerror or error}); these messages will show again"
        ) from error
    if seen.end >= offset_hint.WORTH_BYTES:
        hint = offset_hint.Hint(seen.inode, seen.total, seen.last_start, seen.end, cursor.cksum(seen.last))
        offset_hint.write(client.folder, handle, hint)


def unread(seen: Look, handle: str) -> int:
    """How many of a look's lines are unread mail for the handle."""
    return sum(message.counts(line, handle) for line in seen.lines)
