"""An inbox as a file to go back in: where what no poll has shown begins, and its lines from either end, block by block.

:func:`sotbus.comm.inbox.look` reads all that is new at once, which is what a poll needs. Here nothing is read that is
not asked for, so that the last lines of a large inbox cost no more than those of a small one.
"""

from __future__ import annotations

import errno
import os

from sotbus.comm import cursor as cursors
from sotbus.comm import offset_hint
from sotbus.comm.folder import close_quietly, open_regular, refresh_folder
from sotbus.comm.inbox import Inbox, end_of_last_line, look
from sotbus.comm.manager_record import reads_under_lock
from sotbus.errors import FolderError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sotbus.comm.client import Client
    from sotbus.comm.cursor import Cursor
    from sotbus.comm.offset_hint import Hint

FORWARD_BLOCK_BYTES = 1 << 20
BACKWARD_BLOCK_BYTES = 1 << 16
"""How much is read at a time from the start, and from the end: a few screens of lines are in one block there."""


class History:
    """An open inbox. Its lines up to ``end`` are for good: a writer only appends, and cuts only what has no newline.

    ``new_from`` is the byte after the last line that a poll has shown by ``cursor``; both are line ends.

    Use as a context manager; the descriptor ``fd`` keeps its inode from being another file's meanwhile.
    """

    __slots__ = ("cursor", "end", "fd", "handle", "new_from")

    def __init__(self, handle: str, fd: int, cursor: Cursor, new_from: int, end: int) -> None:
        self.handle = handle
        self.fd = fd
        self.cursor = cursor
        self.new_from = new_from
        self.end = end

    def __repr__(self) -> str:
        return f"<History of @{self.handle}: {self.new_from} of {self.end} bytes shown>"

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close_quietly(fd)

    def forwards(self, start: int, end: int) -> Iterator[bytes]:
        """The lines between two line ends, first one first, without their newlines. *Errors*: OSError."""
        parts: list[bytes] = []
        while start < end:
            block = read_block(self.fd, min(FORWARD_BLOCK_BYTES, end - start), start)
            start += len(block)
            first, *more = block.split(b"\n")
            parts.append(first)
            if more:
                yield b"".join(parts)
                yield from more[:-1]
                parts = [more[-1]]

    def backwards(self) -> Iterator[tuple[int, bytes]]:
        """All lines, last one first, each with the byte that it begins at. *Errors*: OSError."""
        if self.end == 0:
            return
        at = self.end - 1
        parts: list[bytes] = []
        while at > 0:
            start = max(0, at - BACKWARD_BLOCK_BYTES)
            block = b""
            while len(block) < at - start:
                block += read_block(self.fd, at - start - len(block), start + len(block))
            first, *more = block.split(b"\n")
            if more:
                begin = at - len(more[-1])
                yield begin, b"".join([more[-1], *reversed(parts)])
                for line in reversed(more[:-1]):
                    begin -= len(line) + 1
                    yield begin, line
                parts = []
            parts.append(first)
            at = start
        yield 0, b"".join(reversed(parts))


def open_history(client: Client, handle: str, warn: Callable[[str], None] | None = None) -> History | None:
    """Open an inbox and find its place by the cursor, under the shared lock where this box appends itself.

    Answers None where there is no inbox. The lock is released again: nothing before ``end`` changes any more.

    :param warn: takes the warning that a lock fault made this go without the lock; None where that is an error.

    *Errors*: :class:`sotbus.errors.InboxBusy` where the lock is held past ``settings.inbox_read_wait_s`` seconds;
    :class:`FolderError` where the inbox cannot be read.
    """
    folder = client.folder
    path = folder.inbox(handle)
    refresh_folder(folder.inboxes)
    if not os.path.lexists(path):
        return None
    lock = None
    try:
        manager = reads_under_lock(folder, client.box)
        if manager is not None:
            lock = Inbox(folder, handle, manager).locked_for_reading(client.settings.inbox_read_wait_s)
    except OSError as error:
        if warn is None:
            raise FolderError(f"the inbox lock for @{handle} failed: {error.strerror or error}") from error
        warn(
            f"WARNING: the inbox lock for @{handle} failed ({error.errno}: {error.strerror}) — reading without it; "
            "a line may show twice, none is lost"
        )
    try:
        refresh_folder(folder.cursors)
        cursor = cursors.read(folder.cursor(handle))
        fd = open_regular(path)
        try:
            end = end_of_last_line(fd, os.fstat(fd).st_size)
            return History(handle, fd, cursor, _new_from(fd, path, cursor, offset_hint.read(folder, handle)), end)
        except BaseException:
            os.close(fd)
            raise
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FolderError(f"the inbox of @{handle} cannot be read: {error.strerror or error}") from error
    finally:
        if lock is not None:
            lock.__exit__(None, None, None)


def _new_from(fd: int, path: str, cursor: Cursor, hint: Hint | None) -> int:
    """Where the lines begin that :func:`sotbus.comm.inbox.look` would answer, by the same table (facts 7)."""
    if cursor.stamp:
        seen = look(path, cursor)
        return seen.end - sum(len(line) + 1 for line in seen.lines)
    count = cursor.count or 0
    if count == 0:
        return 0
    if hint is not None and cursor.hash and hint.count <= count and hint.holds(fd):
        reached, end = _count(fd, count, hint.count, hint.end)
        if reached == count and _hash_before(fd, end)[1] == cursor.hash:
            return end
    reached, end = _count(fd, count, 0, 0)
    if reached < count:
        return end if reached == count - 1 and cursor.hash else 0
    start, hash_ = _hash_before(fd, end)
    return start if cursor.hash and hash_ != cursor.hash else end


def _count(fd: int, wanted: int, count: int, end: int) -> tuple[int, int]:
    """Count lines up to ``wanted`` from the end of line number ``count``: how many, and where they end."""
    at = end
    while count < wanted and (block := os.pread(fd, FORWARD_BLOCK_BYTES, at)):
        newlines = block.count(b"\n")
        if count + newlines >= wanted:
            newline = -1
            for _ in range(wanted - count):
                newline = block.find(b"\n", newline + 1)
            return wanted, at + newline + 1
        if newlines:
            count, end = count + newlines, at + block.rfind(b"\n") + 1
        at += len(block)
    return count, end


def _hash_before(fd: int, end: int) -> tuple[int, str]:
    """The first byte and the cursor's hash of the line that ends at ``end``."""
    start = end_of_last_line(fd, end - 1)
    line = b""
    while len(line) < end - 1 - start:
        line += read_block(fd, end - 1 - start - len(line), start + len(line))
    return start, cursors.cksum(line)


def read_block(fd: int, size: int, at: int) -> bytes:
    """Up to ``size`` bytes that must be there. *Errors*: OSError, also where the file has become shorter."""
    block = os.pread(fd, size, at)
    if not block:
        raise OSError(errno.EIO, "the inbox became shorter meanwhile")
    return block
