"""``inbox-lock-manager``: the record of whose lock the folder's inboxes are under, and who may therefore append.

Sources: sot-comm v1, The lock manager; facts 4.1; decisions, sot-comm 1.
"""

from __future__ import annotations

import os

from sotbus.comm.folder import remove_quietly, touch_folder
from sotbus.comm.identity import NONE
from sotbus.comm.lock_manager import inbox_lock_manager
from sotbus.comm.registry import read_file, write_synced
from sotbus.errors import FilingFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.comm.box import Box
    from sotbus.comm.folder import Folder
    from sotbus.comm.lock_manager import LockManager

CREATED = "created"
CURRENT = "current"
REPLACED = "replaced"


class ManagerRecord:
    """Line 1 is the lock manager, line 2 the machine that wrote it; an empty writer is an unknown one."""

    __slots__ = ("manager", "writer")

    def __init__(self, manager: str, writer: str) -> None:
        self.manager = manager
        self.writer = writer

    def __repr__(self) -> str:
        return f"<ManagerRecord {self.manager} by {self.writer or 'an unknown machine'}>"


def read(folder: Folder) -> ManagerRecord | None:
    """The record, fresh; None where there is none. *Errors*: OSError where it is there and cannot be read."""
    try:
        touch_folder(folder.root)
        data = read_file(folder.manager_record)
    except FileNotFoundError:
        return None
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    return ManagerRecord(lines[0], lines[1] if len(lines) > 1 else "")


def allows(record: ManagerRecord | None, own: str | None) -> bool:
    """Whether a process whose lock manager is ``own`` may append: line 1 byte for byte, and never bare ``none``."""
    return record is not None and own not in (None, "", NONE) and record.manager == own


def own_identity(folder: Folder, box: Box) -> str | None:
    """The identity of this box's lock manager for the folder's inboxes, None where it cannot be told."""
    manager = inbox_lock_manager(folder.inboxes, box)
    return manager.identity if manager is not None else None


def establish(folder: Folder, box: Box, *, replace: bool) -> str:
    """The hub's rule at its start: create the record, keep the current one, or replace one of this machine's own.

    Answers ``created``, ``current`` or ``replaced``.

    :param replace: whether a stale record of this machine's own may be replaced (a hub's start, ``sotbus init``).

    *Durability*: the record is synced before it is linked or renamed into place.
    *Errors*: :class:`FilingFailed` with the page's recovery where the record is another machine's, or cannot be made.
    """
    own = own_identity(folder, box)
    try:
        record = read(folder)
        if record is None and own not in (None, NONE):
            record = _create(folder, box, f"{own}\n{box.machine_id or ''}\n".encode("utf-8", "surrogateescape"))
            if record is None:
                return CREATED
        if allows(record, own):
            return CURRENT
        if replace and record is not None and own not in (None, NONE) and record.writer == (box.machine_id or "-"):
            temp = _temp(folder, box)
            write_synced(temp, f"{own}\n{box.machine_id or ''}\n".encode("utf-8", "surrogateescape"))
            try:
                os.rename(temp, folder.manager_record)
            finally:
                remove_quietly(temp)
            return REPLACED
    except OSError as error:
        raise FilingFailed(
            f"the inbox lock record at {folder.manager_record} cannot be used: {error.strerror or error}"
        ) from error
    raise FilingFailed(refusal(folder, box, own, record))


def _create(folder: Folder, box: Box, data: bytes) -> ManagerRecord | None:
    """Link a synced record into place; None when ours is in place, else the record that another process made first.

    *Errors*: OSError, the link's own where no record can be read after it.
    """
    temp = _temp(folder, box)
    write_synced(temp, data)
    try:
        os.link(temp, folder.manager_record)
    except OSError:
        record = read(folder)
        if record is None:
            raise
        return record
    finally:
        remove_quietly(temp)
    return None


def _temp(folder: Folder, box: Box) -> str:
    number = int.from_bytes(os.urandom(4), "big")
    return f"{folder.root}/.inbox-lock-manager.{box.machine_id or NONE}.{os.getpid()}.{number}"


def refusal(folder: Folder, box: Box, own: str | None, record: ManagerRecord | None) -> str:
    """Why a hub with this identity cannot append under this record, and how that is mended (facts 4.1)."""
    path = folder.manager_record
    if own is None:
        return f"the mount of {folder.inboxes} cannot be told, so its inbox lock is unknown"
    if own == NONE:
        return (
            f"this hub has no machine id, so it cannot own the inbox lock record at {path}: "
            "give this machine a machine id (/etc/machine-id on Linux), then restart the daemon"
        )
    if record is None:
        return f"no inbox lock record at {path}: restart this daemon to write it"
    if box.machine_id and record.writer == box.machine_id:
        return (
            f"this hub's inbox lock is now {own} but its record says {record.manager}: "
            "restart this daemon to re-record it after the remount"
        )
    writer = f"machine {record.writer}" if record.writer else "an unknown machine"
    return (
        f"the inbox lock record names {record.manager}, written by {writer}, a different lock manager from this hub's "
        f"{own}: stop every daemon on this comm folder, delete {path}, then start the hub"
    )


def writer_manager(folder: Folder, box: Box, *, stand_in: bool) -> LockManager:
    """The lock manager under which this process may append to the folder's inboxes.

    :param stand_in: make the record where there is none, as the hub would (decisions, sot-comm 1).

    *Errors*: :class:`FilingFailed` with the page's words for a command line that may not; the hint says why and how it
    is mended.
    """
    manager = inbox_lock_manager(folder.inboxes, box)
    own = manager.identity if manager is not None else None
    try:
        record = read(folder)
    except OSError as error:
        reason = f"the inbox lock record at {folder.manager_record} cannot be read: {error.strerror or error}"
    else:
        if manager is not None and allows(record, own):
            return manager
        reason = refusal(folder, box, own, record)
        if record is None and stand_in and manager is not None and own != NONE:
            try:
                establish(folder, box, replace=False)
                return manager
            except FilingFailed as error:
                reason = str(error)
        elif record is not None and box.machine_id and record.writer == box.machine_id:
            reason += "; or run: sotbus init"
        elif own == NONE:
            reason += "; or run: sotbus init, which can put one into the config"
    raise FilingFailed("this box cannot take the inbox lock itself, and no daemon is reachable to file it", hint=reason)


def reads_under_lock(folder: Folder, box: Box) -> LockManager | None:
    """The lock manager under whose shared lock this process reads, or None where it reads without one.

    *Errors*: OSError where the record cannot be read.
    """
    manager = inbox_lock_manager(folder.inboxes, box)
    record = read(folder)
    if manager is None or manager.identity == NONE or (record is not None and not allows(record, manager.identity)):
        return None
    return manager
