"""Checks of the inboxes and the read cursors."""

from __future__ import annotations

import os
import shlex
import time

from sotbus.comm.cursor import Cursor
from sotbus.comm.flock import LockTimeoutError
from sotbus.comm.folder import open_regular
from sotbus.comm.inbox import SCAN_BLOCK_BYTES, end_of_last_line
from sotbus.doctor.check import NotJudged, Verdict, counted, fault, size, some, sound
from sotbus.doctor.place import Place

SECOND_LOOK_S = 0.2
"""Where this box may not take the inbox lock, a torn tail is looked at again after this long: an append takes less."""


def inbox_sizes(place: Place) -> Verdict:
    """How much mail there is: information."""
    sizes: list[tuple[int, str]] = []
    for handle in place.handles_in("inbox", ".jsonl"):
        try:
            sizes.append((os.stat(place.folder.inbox(handle)).st_size, handle))
        except FileNotFoundError:
            continue
    total = sum(number for number, _ in sizes)
    text = f"{counted(len(sizes), 'inbox', 'inboxes')}, {size(total)}"
    largest = [f"@{handle} {size(number)}" for number, handle in sorted(sizes, reverse=True)[:3] if number]
    return sound(f"{text}; largest: {', '.join(largest)}" if largest else text)


def torn_tail(place: Place) -> Verdict:
    """Every inbox ends with a newline: what comes after the last one is a line whose writer died in the middle."""
    torn: list[tuple[str, int]] = []
    busy: list[str] = []
    for handle in place.handles_in("inbox", ".jsonl"):
        try:
            tail = _tail_bytes(place.folder.inbox(handle))
            if tail:
                tail = _settled_tail_bytes(place, handle, tail)
        except LockTimeoutError:
            busy.append(f"@{handle}")
            continue
        except OSError as error:
            path = place.folder.inbox(handle)
            return fault(f"{path} cannot be read: {error.strerror or error}", f"look at it: ls -l {shlex.quote(path)}")
        if tail:
            torn.append((handle, tail))
    if torn:
        texts = [f"{counted(tail, 'byte')} at the end of @{handle}" for handle, tail in torn]
        return fault(
            f"unterminated: {some(texts)}",
            f"no filed message is lost, and the next one cuts it off: sotbus send @{torn[0][0]} TEXT",
        )
    return sound(f"none; being written now: {some(busy)}" if busy else "none")


def _settled_tail_bytes(place: Place, handle: str, tail: int) -> int:
    """A torn tail looked at again with no writer at work.

    *Errors*: :class:`LockTimeoutError` where one is: the shared lock is tried and not waited for; OSError.
    """
    path, lock_path = place.folder.inbox(handle), place.folder.inbox_lock(handle)
    manager = place.lock_manager
    if manager is not None and os.path.exists(lock_path):  # to take a lock that is not there would make its file
        try:
            with manager.hold(lock_path, False, 0):
                return _tail_bytes(path)
        except OSError:
            pass  # no lock to be had on this mount: look again instead
    time.sleep(SECOND_LOOK_S)
    again = _tail_bytes(path)
    if again and again != tail:
        raise LockTimeoutError
    return again


def _tail_bytes(path: str) -> int:
    """How many bytes come after the last newline. *Errors*: OSError."""
    fd = open_regular(path)
    try:
        length = os.fstat(fd).st_size
        return length - end_of_last_line(fd, length)
    finally:
        os.close(fd)


def cursor_text(place: Place) -> Verdict:
    """Every cursor is a count or a stamp (decisions, sot-comm 3)."""
    unreadable: list[tuple[str, str]] = []
    garbage: list[str] = []
    handles = place.handles_in("read", ".cursor")
    for handle in handles:
        try:
            found = _read_cursor(place.folder.cursor(handle))
        except FileNotFoundError:
            continue
        except OSError as error:
            unreadable.append((handle, error.strerror or str(error)))
            continue
        if found.count is None and not found.stamp:
            garbage.append(handle)
    if unreadable:
        paths = shlex.join(place.folder.cursor(handle) for handle, _ in unreadable)
        texts = [f"@{handle} ({why})" for handle, why in unreadable]
        return fault(f"cannot be read: {some(texts)}", f"remove it: rm {paths}; all mail then shows once more")
    if garbage:
        return fault(
            f"neither a count nor a stamp: {some(['@' + handle for handle in garbage])}",
            "the session's next poll shows all its mail again and writes a right one: sotbus poll",
        )
    return sound(counted(len(handles), "cursor"))


def cursor_end(place: Place) -> Verdict:
    """No cursor counts more lines than its inbox has; one more is an append that was cut back after it was read."""
    past: list[str] = []
    handles = place.handles_in("read", ".cursor")
    for handle in handles:
        try:
            found = _read_cursor(place.folder.cursor(handle))
        except OSError:
            continue  # cursor-text names it
        if not found.count:
            continue
        lines = _lines(place.folder.inbox(handle))
        if found.count > lines + (1 if found.hash else 0):
            past.append(f"@{handle} counts {found.count} of {counted(lines, 'line')}")
    if past:
        return fault(
            f"past the end: {some(past)}",
            "the session's next poll shows all its mail again and writes a right one: sotbus poll",
        )
    return sound("none is past the end")


def _read_cursor(path: str) -> Cursor:
    """*Errors*: OSError, which :func:`sotbus.comm.cursor.read` takes for an empty cursor."""
    fd = open_regular(path)
    try:
        return Cursor.parse(os.read(fd, 1 << 16).decode("utf-8", "replace"))
    finally:
        os.close(fd)


def _lines(path: str) -> int:
    """How many newline-terminated lines an inbox has, read a block at a time; an absent one has none.

    *Errors*: :class:`NotJudged`.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise NotJudged(f"{path} cannot be read (see torn-tail)") from error
    try:
        count = 0
        while block := os.read(fd, SCAN_BLOCK_BYTES):
            count += block.count(b"\n")
        return count
    finally:
        os.close(fd)
