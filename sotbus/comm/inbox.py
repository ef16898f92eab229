"""One recipient's inbox: the append, and the look at it that every reader takes.

Sources: sot-comm v1, The inbox; facts 5 (append), 6 and 7 (reading).
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack

from sotbus.comm import flock
from sotbus.comm.cursor import Cursor, cksum
from sotbus.comm.delegations import open_undelegated
from sotbus.comm.folder import PRIVATE_FILE, close_quietly, open_regular, sync_folder, write_whole
from sotbus.errors import FilingFailed, InboxBusy, InboxLockHeld

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import Protocol

    from sotbus.comm.folder import Folder
    from sotbus.comm.lock_manager import LockManager
    from sotbus.comm.offset_hint import Hint

    class Work(Protocol):
        """What is done in place of writing one line, when the inbox is locked, open, fenced and ends with a newline.

        It may raise any SotbusError, or OSError, which becomes a FilingFailed.
        """

        def under_lock(self, inbox: Inbox, fd: int, length: int, leased: bool) -> None: ...


TAIL_BLOCK_BYTES = 4096
"""How much is read at a time when the last newline before a torn tail is looked for."""

APPEND_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT

NO_ROOM_ERRNOS = frozenset([errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
"""Refusals of a server that still knows the writer's lock: after any other one under a lease, the lock may be gone."""

SCAN_BLOCK_BYTES = 1 << 20
"""How much is read at a time when lines are counted from the start."""


class Inbox:
    """A handle's inbox and its lock, under a lock manager.

    :param on_cut: told, once the lock is released, how many bytes of a dead writer's torn tail an append cut first,
        also where that append failed.
    """

    __slots__ = ("_lends", "folder", "handle", "lock_path", "manager", "on_cut", "path")

    def __init__(
        self, folder: Folder, handle: str, manager: LockManager, on_cut: Callable[[int], object] = int
    ) -> None:
        self.folder = folder
        self.handle = handle
        self.path = folder.inbox(handle)
        self.lock_path = folder.inbox_lock(handle)
        self.manager = manager
        self.on_cut = on_cut
        self._lends = not manager.identity.startswith("local ")

    def __repr__(self) -> str:
        return f"<Inbox @{self.handle} in {self.folder.root}>"

    def append(self, line: bytes | Work, bound_s: float) -> None:
        """File one line (with its newline), or do other work where that would be written (:mod:`sotbus.comm.batch`).

        :param bound_s: how long to wait for the inbox lock, in seconds.

        *Durability*: when this returns, the line is whole on disk (fdatasync; for a first line the folder too).
        *Errors*: :class:`InboxLockHeld` past the bound; :class:`FilingFailed` for anything the system refuses: the file
        is cut back to its length before the line, and ``outcome_unknown`` is set where that failed too, and where the
        lock may have been lost meanwhile (a lease that ended while this box was cut off): others may have written
        since, so that the file is touched only through the descriptor that the lock fences.
        *Cancellation*: an exception that arrives meanwhile (KeyboardInterrupt) cuts the line back too.
        """
        try:
            lock = self.manager.hold(self.lock_path, True, bound_s)
            lock.__enter__()  # a manager may take the lock here or in hold; both belong to this try
        except flock.LockTimeoutError:
            raise self._held(bound_s) from None
        except OSError as error:
            raise FilingFailed(f"the append failed: {error.strerror or error}") from error
        cut: list[int] = []
        try:
            self._append_locked(line, cut, bound_s)
        except flock.LockTimeoutError:
            raise self._held(bound_s) from None
        finally:
            try:
                lock.__exit__(None, None, None)
            except Exception:
                # The answer is settled by now: filed, or the error on its way. A lock that would not be released shows
                # at its next hold.
                pass
            if cut:
                self.on_cut(cut[0])

    def _held(self, bound_s: float) -> InboxLockHeld:
        return InboxLockHeld(f"the inbox lock for @{self.handle} was held for {bound_s:g}s — nothing was appended")

    def _append_locked(self, line: bytes | Work, cut: list[int], bound_s: float) -> None:
        """The steps between lock and release: open, fence, cut a torn tail, write whole, sync, close."""
        try:
            fd = (open_undelegated if self._lends else os.open)(self.path, APPEND_FLAGS, PRIVATE_FILE)
        except OSError as error:
            raise FilingFailed(f"the append failed: {error.strerror or error}") from error
        leased = False
        try:
            leased = self.manager.fence(fd, bound_s)
            if leased:
                forget_lost_write(fd)
            length = os.lseek(fd, 0, os.SEEK_END)
            kept = end_of_last_line(fd, length)
            if kept != length:
                os.ftruncate(fd, kept)
                cut.append(length - kept)
            if isinstance(line, bytes):
                self.write(fd, kept, line, leased)
            else:
                line.under_lock(self, fd, kept, leased)
        except OSError as error:
            raise FilingFailed(f"the append failed: {error.strerror or error}") from error
        finally:
            if leased:
                flock.unfence(fd)
            close_quietly(fd)

    def write(self, fd: int, length: int, data: bytes, leased: bool, blanks: int = 0) -> None:
        """Write at the end and sync, a new file's folder too, or put the length back. Only under the lock.

        :param length: where the file ends.
        :param blanks: how many bare newlines stay where it fails: the lines of ``data`` less one.
        """
        try:
            if length == 0:  # before the line, so that any line that stands has a synced name
                sync_folder(self.folder.inboxes)
            write_whole(fd, data)
            os.fdatasync(fd)
        except BaseException as error:
            lost = error if leased and isinstance(error, OSError) and error.errno not in NO_ROOM_ERRNOS else None
            try:
                if blanks and lost is None:
                    from sotbus.comm.batch import take_back

                    take_back(fd, length, blanks)
                else:
                    os.ftruncate(fd, length)
            except OSError as cut:
                why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
                raise FilingFailed(
                    f"the append failed: {why}; cutting it back failed too ({cut.strerror}), so the outcome is unknown",
                    outcome_unknown=True,
                ) from error
            if lost is not None:
                raise FilingFailed(
                    f"the append failed: {lost.strerror or lost}; its lock may have been lost meanwhile, so the "
                    "outcome is unknown",
                    outcome_unknown=True,
                ) from error
            raise

    def locked_for_reading(self, bound_s: float) -> AbstractContextManager[object]:
        """The shared lock that a reader on a box that appends itself counts and reads under.

        *Errors*: :class:`InboxBusy` past the bound (in seconds); OSError for any other lock fault.
        """
        held = ExitStack()
        try:
            held.enter_context(self.manager.hold(self.lock_path, False, bound_s))
            return held
        except flock.LockTimeoutError:
            raise InboxBusy(
                f"the inbox for @{self.handle} is being written — nothing was read; run comm-poll.sh again"
            ) from None


def forget_lost_write(fd: int) -> None:
    """Have the kernel tell of a write that an earlier process of this box lost, which has nothing to do with ours.

    It tells an error of a file once, to whoever syncs next (fsync(2)): a writer that was killed while its box was cut
    off did not hear it.
    """
    try:
        os.fdatasync(fd)
    except OSError:
        return


def end_of_last_line(fd: int, length: int) -> int:
    """Where the last newline-terminated line ends: ``length``, or less where a tail is torn.

    *Errors*: OSError, also where the file turns out shorter than ``length``: nothing is cut on a guess.
    """
    if length == 0 or os.pread(fd, 1, length - 1) == b"\n":
        return length
    end = length
    while end > 0:
        start = max(0, end - TAIL_BLOCK_BYTES)
        block = _pread_whole(fd, end - start, start)
        if len(block) != end - start:
            raise OSError(errno.EIO, "the inbox became shorter while its lock was held")
        at = block.rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


class Look:
    """One look at an inbox: what there is, what was shown before, and the lines after that.

    ``total`` counts newline-terminated lines, ``offset`` those shown already, ``lines`` are the ones after it without
    their newlines, ``last`` is the last one of all. ``cut_back`` says that the cursor's last line is not the one it
    hashed; ``cursor`` is that cursor. ``end`` is the byte after the last line, ``last_start`` where that line
    begins, in the file with this ``inode``.
    """

    __slots__ = ("cursor", "cut_back", "end", "inode", "last", "last_start", "lines", "offset", "total")

    def __init__(self, offset: int, start: int, data: bytes, cut_back: bool, before: bytes = b"") -> None:
        whole = data[: data.rfind(b"\n") + 1]
        self.lines = whole[:-1].split(b"\n") if whole else []
        self.offset = offset
        self.total = offset + len(self.lines)
        self.cut_back = cut_back
        self.cursor: Cursor | None = None
        self.inode = 0
        self.end = start + len(whole)
        self.last = self.lines[-1] if self.lines else before
        self.last_start = self.end - len(self.last) - 1

    def __repr__(self) -> str:
        return f"<Look {self.offset} of {self.total} shown>"


def look(path: str, cursor: Cursor, hint: Hint | None = None) -> Look:
    """Count and read an inbox once, from one descriptor. An absent file has no lines.

    :param hint: where a counted line ended at an earlier poll; checked by that line's hash before use, so a wrong one
        costs a count from the start and nothing else.

    *Errors*: OSError where the file is there and cannot be read.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return Look(0, 0, b"", cut_back=cursor.count == 1 and bool(cursor.hash))
    try:
        seen = _look_by_stamp(fd, cursor.stamp) if cursor.stamp else _look_by_count(fd, cursor, hint)
        seen.inode = os.fstat(fd).st_ino
        return seen
    finally:
        os.close(fd)


def _look_by_count(fd: int, cursor: Cursor, hint: Hint | None) -> Look:
    """The counted forms of facts 7's table."""
    count = cursor.count or 0
    if count == 0:
        return Look(0, 0, _read_from(fd, 0), cut_back=False)
    if hint is not None and cursor.hash and hint.count <= count and hint.holds(fd):
        found = _find_line(fd, count, hint.count, hint.start, hint.end)
        if found is not None and cksum(found[2]) == cursor.hash:
            return Look(count, found[1], _read_from(fd, found[1]), cut_back=False, before=found[2])
    found = _find_line(fd, count, 0, 0, 0)
    if found is None:
        whole = Look(0, 0, _read_from(fd, 0), cut_back=False)
        if count == whole.total + 1 and cursor.hash:
            return Look(whole.total, whole.end, b"", cut_back=True, before=whole.last)
        return whole
    start, end, line = found
    if cursor.hash and cksum(line) != cursor.hash:
        return Look(count - 1, start, _read_from(fd, start), cut_back=True)
    return Look(count, end, _read_from(fd, end), cut_back=False, before=line)


def _find_line(fd: int, wanted: int, count: int, start: int, end: int) -> tuple[int, int, bytes] | None:
    """Line number ``wanted`` (from 1), from a known place: line ``count`` spans ``start`` to ``end``.

    Answers its first byte, the byte after its newline, and its bytes; None where there are fewer lines.
    """
    while count < wanted:
        block = os.pread(fd, SCAN_BLOCK_BYTES, end)
        newlines = block.count(b"\n")
        if newlines == 0:
            step = _one_line(fd, end)
            if step is None:
                return None
            start, end, count = end, step, count + 1
        elif count + newlines < wanted:
            end, count = end + block.rfind(b"\n") + 1, count + newlines
        else:
            at = -1
            for _ in range(wanted - count):
                start, at = end + at + 1, block.find(b"\n", at + 1)
            end, count = end + at + 1, wanted
    return start, end, _pread_whole(fd, end - 1 - start, start)


def _one_line(fd: int, at: int) -> int | None:
    """The end of a line longer than a block, or None where it is torn or there is none."""
    while block := os.pread(fd, SCAN_BLOCK_BYTES, at):
        newline = block.find(b"\n")
        if newline >= 0:
            return at + newline + 1
        at += len(block)
    return None


def _look_by_stamp(fd: int, stamp: str) -> Look:
    """The old timestamp form: the lines before the first one whose string ``ts`` sorts later, blank lines counted."""
    from sotbus import message

    data = _read_from(fd, 0)
    start, offset = 0, 0
    while (newline := data.find(b"\n", start)) >= 0:
        value = message.parse(data[start:newline])
        ts = value.get("ts") if value is not None else None
        if isinstance(ts, str) and ts > stamp:
            break
        start, offset = newline + 1, offset + 1
    before = data[data.rfind(b"\n", 0, start - 1) + 1 : start - 1] if start else b""
    return Look(offset, start, data[start:], cut_back=False, before=before)


def _read_from(fd: int, at: int) -> bytes:
    """Everything from a byte on."""
    parts = []
    while block := os.pread(fd, SCAN_BLOCK_BYTES, at):
        parts.append(block)
        at += len(block)
    return b"".join(parts)


def _pread_whole(fd: int, size: int, at: int) -> bytes:
    """``size`` bytes from a byte on, or fewer where the file is cut meanwhile."""
    parts = []
    while size > 0 and (block := os.pread(fd, size, at)):
        parts.append(block)
        size -= len(block)
        at += len(block)
    return b"".join(parts)
