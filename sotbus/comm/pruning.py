"""Prune: what has been read long ago leaves an inbox, and every count and hash stays right (decisions, sot-comm 12).

A shown line becomes a bare newline, which is counted and never shown, so that lines keep their numbers. The last shown
line stays, because the cursor hashes it, and so does everything behind it. No cursor is written.

The new inbox is written and synced beside the old one without the inbox's lock: shown lines never change. Under the
lock come only what was filed meanwhile, and the rename; senders wait for no more than that.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import ExitStack

from sotbus.comm import cursor as cursors
from sotbus.comm import manager_record, offset_hint
from sotbus.comm.flock import LockTimeoutError
from sotbus.comm.folder import (
    PRIVATE_FILE,
    close_quietly,
    open_regular,
    remove_quietly,
    sync_folder,
    write_whole,
)
from sotbus.comm.history import FORWARD_BLOCK_BYTES, History, open_history, read_block
from sotbus.comm.identity import NFS4, NONE
from sotbus.comm.prune_plan import Plan, plan_of
from sotbus.errors import FolderError, InboxBusy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sotbus.comm.client import Client
    from sotbus.comm.prune_plan import Progress

TRIES = 3
"""How often a prune begins again because another prune, or a cursor that went back, came in between."""

UNDER_LOCAL_ONLY = "prune rewrites an inbox only under a local lock manager (its lock file excludes every writer)"


class ChangedError(Exception):
    """The inbox or its cursor is not what the plan was made from."""


def check_manager(client: Client) -> None:
    """Refuse where an inbox may not be replaced under its writers.

    *Errors*: :class:`FolderError` saying why; nothing was made or changed.
    """
    own = manager_record.own_identity(client.folder, client.box)
    if own is None or own == NONE:
        why = manager_record.refusal(client.folder, client.box, own, None)
        raise FolderError(f"FAILED: {why}; nothing was pruned")
    if own.startswith(NFS4):
        raise FolderError(
            f"FAILED: the inboxes are under {own}, where another box may go on opening a replaced file for 30 s, and a "
            f"line appended there would be lost; {UNDER_LOCAL_ONLY}; nothing was pruned"
        )
    if not own.startswith("local "):
        raise FolderError(
            f"FAILED: the inboxes are under {own}, a mount whose locks are not known to exclude every writer; "
            f"{UNDER_LOCAL_ONLY}; nothing was pruned"
        )
    try:
        record = manager_record.read(client.folder)
    except OSError as error:
        raise FolderError(
            f"FAILED: the inbox lock record at {client.folder.manager_record} cannot be read "
            f"({error.strerror or error}); nothing was pruned"
        ) from error
    if record is not None and not manager_record.allows(record, own):
        why = manager_record.refusal(client.folder, client.box, own, record)
        raise FolderError(f"FAILED: {why}; nothing was pruned")


def survey(client: Client, handle: str, progress: Progress | None = None) -> Plan:
    """What a prune would do now; nothing is written.

    *Errors*: :class:`InboxBusy` where the inbox is held past ``settings.inbox_read_wait_s`` seconds;
    :class:`FolderError`.
    """
    check_manager(client)
    history = open_history(client, handle)
    if history is None:
        return Plan(handle)
    with history:
        return plan_of(client, history, progress)


def prune(client: Client, handle: str, progress: Progress | None = None) -> Plan:
    """Prune an inbox; answers what was done. If nothing would change, nothing is written.

    Waits at most ``settings.inbox_lock_wait_s`` seconds for the inbox's lock.

    *Durability*: the new inbox is synced before it is renamed over the old one, and the folder after, both before the
    lock is released. A power loss at any moment leaves the one or the other.
    *Errors*: :class:`InboxBusy`; :class:`FolderError`, also where the disk is full or fails: the inbox is byte for byte
    what it was, and the temp file is removed, but for a folder that can neither be synced nor take the old inbox back,
    which the text says.
    *Cancellation*: an exception that arrives meanwhile (KeyboardInterrupt) leaves the inbox as it was, or pruned.
    """
    check_manager(client)
    _sweep(client, handle)
    for _ in range(TRIES):
        history = open_history(client, handle)
        if history is None:
            return Plan(handle)
        with history:
            plan = plan_of(client, history, progress)
            if plan.skipped or not plan.freed:
                return plan
            try:
                _carry_out(client, plan, history, progress)
            except ChangedError:
                continue
            return plan
    raise FolderError(
        f"FAILED: the inbox of @{handle}, or its cursor, was changed by others {TRIES} times meanwhile; "
        "nothing was pruned",
        hint="run it again",
    )


def _carry_out(client: Client, plan: Plan, history: History, progress: Progress | None) -> None:
    """Write the new inbox beside the old one, sync it, and put it in place under the lock.

    *Errors*: ChangedError, InboxBusy, FolderError; the temp file is removed.
    """
    path = client.folder.inbox(plan.handle)
    temp = f"{path}.prune.{os.getpid()}.{int.from_bytes(os.urandom(4), 'big')}"
    try:
        fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # says to a sweep that its maker lives
            _write(fd, plan, history, progress)
            os.fsync(fd)
            with _locked(client, plan.handle):
                _replace(client, plan, history, fd, temp)
        finally:
            remove_quietly(temp)
            close_quietly(fd)
    except OSError as error:
        raise FolderError(
            f"FAILED: the inbox of @{plan.handle} could not be pruned ({error.strerror or error}); "
            "it is what it was before"
        ) from error


def _write(fd: int, plan: Plan, history: History, progress: Progress | None) -> None:
    """The plan's pieces, a block at a time. *Errors*: OSError."""
    buffer = bytearray()
    for blanks, start, end in plan.pieces:
        buffer += b"\n" * blanks
        while start < end:
            block = read_block(history.fd, min(FORWARD_BLOCK_BYTES, end - start), start)
            buffer += block
            start += len(block)
            if len(buffer) >= FORWARD_BLOCK_BYTES:
                write_whole(fd, bytes(buffer))
                buffer.clear()
                if progress is not None:
                    progress(plan.handle, start, history.end)
    write_whole(fd, bytes(buffer))


def _replace(client: Client, plan: Plan, history: History, fd: int, temp: str) -> None:
    """The steps under the lock: check that the plan holds, copy what was filed since, sync, rename, sync the folder.

    The old inbox keeps a second name until the folder is synced, so that it can be put back.

    *Errors*: ChangedError; OSError: the old inbox is in place; FolderError where it could not be put back.
    """
    folder = client.folder
    path = folder.inbox(plan.handle)
    size = _check(client, plan, history, path, fd)
    if size > history.end:  # filed since, and a torn tail, which is the next writer's to cut
        at = history.end
        while at < size:
            block = read_block(history.fd, min(FORWARD_BLOCK_BYTES, size - at), at)
            write_whole(fd, block)
            at += len(block)
        os.fsync(fd)
    remove_quietly(offset_hint.path_of(folder, plan.handle))
    old = temp + ".old"
    os.link(path, old)
    try:
        os.rename(temp, path)
        sync_folder(folder.inboxes)
    except BaseException as error:
        _put_back(plan.handle, old, path, folder.inboxes, error)
        raise
    finally:
        remove_quietly(old)
    plan.done = True


def _put_back(handle: str, old: str, path: str, folder: str, error: BaseException) -> None:
    """Give the old inbox its name again; where it has it still, the rename does nothing (rename(2)).

    *Errors*: FolderError where it cannot be put back.
    """
    try:
        os.rename(old, path)
    except OSError:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise FolderError(
            f"FAILED: the inbox of @{handle} is pruned, but its folder could not be synced ({why}), nor the old inbox "
            "be put back; a power loss may bring the old one back"
        ) from error
    try:
        sync_folder(folder)
    except OSError:
        return  # the error that led here is told


def _check(client: Client, plan: Plan, history: History, path: str, fd: int) -> int:
    """Whether the inbox is still the file that was read, and its cursor no further back. Answers the inbox's size.

    A cursor that went on shows more, so that every line that goes has been shown by it too.

    *Errors*: ChangedError, OSError.
    """
    now = os.lstat(path)
    if (now.st_dev, now.st_ino) != _inode_of(history.fd) or now.st_size < history.end:
        raise ChangedError
    cursor = cursors.read(client.folder.cursor(plan.handle))
    if cursor != history.cursor and not (cursor.hash and plan.shown <= (cursor.count or 0)):
        raise ChangedError
    last = min(FORWARD_BLOCK_BYTES, history.end - plan.last_start)
    if os.pread(fd, last, os.fstat(fd).st_size - last) != os.pread(history.fd, last, history.end - last):
        raise ChangedError
    return now.st_size


def _locked(client: Client, handle: str) -> AbstractContextManager[object]:
    """The inbox's exclusive lock, which whoever appends takes. *Errors*: InboxBusy, FolderError, OSError."""
    manager = client.writer_gate.manager()
    if not manager.identity.startswith("local "):
        raise FolderError(f"FAILED: the inboxes are under {manager.identity} by now; nothing was pruned")
    held = ExitStack()
    try:
        held.enter_context(manager.hold(client.folder.inbox_lock(handle), True, client.settings.inbox_lock_wait_s))
    except LockTimeoutError:
        raise InboxBusy(f"the inbox for @{handle} is being written — nothing was pruned; run it again") from None
    return held


def _sweep(client: Client, handle: str) -> None:
    """Remove what a prune of this inbox left that was killed. *Errors*: InboxBusy, FolderError."""
    try:
        if not _left_over(client, handle):
            return
        with _locked(client, handle):
            for path in _left_over(client, handle):
                try:
                    fd = open_regular(path)
                except FileNotFoundError:
                    continue
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_quietly(path)
                except OSError as error:
                    if error.errno not in (errno.EAGAIN, errno.EACCES):
                        raise
                finally:
                    close_quietly(fd)
    except OSError as error:
        raise FolderError(
            f"FAILED: what a killed prune left of @{handle}'s inbox cannot be removed ({error.strerror or error}); "
            "nothing was pruned"
        ) from error


def _left_over(client: Client, handle: str) -> list[str]:
    """Temp files and second names of this inbox, ``<inbox>.prune.<pid>.<n>`` and the same with ``.old``."""
    start = f"{handle}.jsonl.prune."
    found = []
    for name in os.listdir(client.folder.inboxes):
        words = name.removeprefix(start).removesuffix(".old").split(".") if name.startswith(start) else []
        if len(words) == 2 and all(word.isascii() and word.isdigit() for word in words):
            found.append(f"{client.folder.inboxes}/{name}")
    return found


def _inode_of(fd: int) -> tuple[int, int]:
    there = os.fstat(fd)
    return there.st_dev, there.st_ino
