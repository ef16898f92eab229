"""``inbox-lock-manager``: the record of whose lock the folder's inboxes are under, and who may therefore append.

Sources: sot-comm v1, The lock manager; facts 4.1; decisions, sot-comm 1.
"""

from __future__ import annotations

import os

from sotbus.comm.folder import remove_quietly, touch_folder
from sotbus.comm.identity import NFS4, NONE
from sotbus.comm.lock_manager import inbox_lock_manager
from sotbus.comm.registry import read_file, write_synced
from sotbus.comm.topology import GUEST, HUB, NO_TOPOLOGY, OWN_DISK
from sotbus.errors import CannotAppend, FilingFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.comm.box import Box
    from sotbus.comm.folder import Folder
    from sotbus.comm.lock_manager import LockManager
    from sotbus.comm.topology import Topology

CREATED = "created"
CURRENT = "current"
REPLACED = "replaced"
LEFT = "left"
"""What :func:`establish` did; ``LEFT``: nothing, because this box is a guest and the record is the hub's."""

APPEND = "append"
FORWARD = "forward"
REFUSE = "refuse"
"""Where a filing goes (:func:`route`)."""


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


def role_of(folder: Folder, box: Box, topology: Topology) -> str:
    """This box's role in the folder now, ``HUB`` or ``GUEST``; a remount changes it."""
    return topology.role(own_identity(folder, box), box.declared_host)


def establish(folder: Folder, box: Box, *, replace: bool, topology: Topology = NO_TOPOLOGY) -> str:
    """The rule at a node's start: a hub creates the record, keeps the current one, or replaces one of this machine's
    own; a guest writes none.

    Answers ``created``, ``current``, ``replaced`` or ``left``.

    :param replace: whether a stale record of this machine's own may be replaced (a hub's start, ``sotbus init``).

    *Durability*: the record is synced before it is linked or renamed into place.
    *Errors*: :class:`FilingFailed` with the page's recovery where the record is another machine's, or cannot be made.
    """
    own = own_identity(folder, box)
    if topology.role(own, box.declared_host) == GUEST:
        return LEFT
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


def route(record: ManagerRecord | None, own: str | None, role: str, *, forwarded: bool = False) -> str:
    """Where one filing goes, chosen once: ``APPEND`` here, ``FORWARD`` to the folder's hub, or ``REFUSE``.

    :param forwarded: whether it came from another node already; what is forwarded once is not forwarded again.
    """
    if allows(record, own):
        return APPEND
    return FORWARD if role == GUEST and not forwarded else REFUSE


def refusal(folder: Folder, box: Box, own: str | None, record: ManagerRecord | None, role: str = HUB) -> str:
    """Why a filing is refused that :func:`route` refuses, and how that is mended (facts 4.1)."""
    path = folder.manager_record
    if role == GUEST:
        return f"a forwarded frame reached a daemon that is not its folder's hub ({box.declared_host})"
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


def mend(topology: Topology, role: str, first: str = "") -> str:
    """What to run for a record that is missing or stale, and where: only the folder's hub writes it.

    :param first: what to do before that.
    """
    steps = (f"{first}; then " if first else "") + "run: sotbus init"
    if topology.configured:
        steps += " (or start its node)"
    return f"on {topology.hub_name}: {steps}" if role == GUEST else steps


def guest_remedy(folder: Folder, record: ManagerRecord | None, topology: Topology) -> str:
    """What makes a guest one that may append under this record, or how its mail gets there without that."""
    hub = topology.hub_name
    if record is None:
        return mend(topology, GUEST)
    manager = record.manager
    if not manager:
        return mend(topology, GUEST, f"delete {folder.manager_record}")
    if manager.startswith(OWN_DISK):
        return f"send from {hub}, if the folder is on its own disk; else see what sotbus doctor says there"
    if manager.startswith(NFS4):
        export = manager.removeprefix(NFS4)
        return f"mount {export} here as {hub} does (NFS v4 with local_lock=none), or send from {hub}"
    if manager.startswith(NONE):
        both = f"mount the folder as NFS v4 with local_lock=none on {hub} and here"
        return f"{mend(topology, GUEST, both)}; or send from {hub}"
    return f"mount the folder here as {hub} does, with the same plugins, or send from {hub}"


def guest_reason(folder: Folder, own: str | None, record: ManagerRecord | None, topology: Topology) -> str:
    """Why a guest with this identity does not append under this record, and what to do; it is never its to write."""
    if own is None:
        hub = topology.hub_name
        return f"this box counts as a guest of {hub}, because the mount of {folder.inboxes} cannot be told"
    if record is None:
        why = f"there is no inbox lock record at {folder.manager_record}"
    else:
        why = f"the inbox lock record names {record.manager or 'nothing'} and this box's lock manager is {own}"
    return f"this box is a guest of {topology.hub_name}, and {why}; {guest_remedy(folder, record, topology)}"


def writer_manager(folder: Folder, box: Box, topology: Topology) -> LockManager:
    """The lock manager under which this process may append to the folder's inboxes.

    Where there is no record and no topology, it is made first, as the hub would (decisions, sot-comm 1).

    *Errors*: :class:`FilingFailed` with the page's words for a command line that may not; the hint says why and how it
    is mended.
    """
    manager = inbox_lock_manager(folder.inboxes, box)
    own = manager.identity if manager is not None else None
    role = topology.role(own, box.declared_host)
    try:
        record = read(folder)
    except OSError as error:
        reason = f"the inbox lock record at {folder.manager_record} cannot be read: {error.strerror or error}"
    else:
        where = route(record, own, role)
        if manager is not None and where == APPEND:
            return manager
        if where == FORWARD:  # what a node would do; a command has nobody to hand it to
            reason = guest_reason(folder, own, record, topology)
        elif record is None and manager is not None and own != NONE and not topology.configured:
            try:
                establish(folder, box, replace=False)
                return manager
            except FilingFailed as error:
                reason = str(error)
        else:
            reason = _hubs_reason(folder, box, own, record, topology)
    raise CannotAppend("this box cannot take the inbox lock itself, and no daemon is reachable to file it", hint=reason)


def _hubs_reason(folder: Folder, box: Box, own: str | None, record: ManagerRecord | None, topology: Topology) -> str:
    """Why a command on the folder's hub does not append, and what to run."""
    if record is None and own not in (None, NONE):
        described = topology.described(own, box.declared_host)
        return f"no inbox lock record at {folder.manager_record}, and {described}; {mend(topology, HUB)}"
    reason = refusal(folder, box, own, record)
    if own == NONE:
        return reason + "; or run: sotbus init, which can put one into the config"
    if own is not None and record is not None and box.machine_id and record.writer == box.machine_id:
        return reason + "; or run: sotbus init"
    return reason


def reads_under_lock(folder: Folder, box: Box) -> LockManager | None:
    """The lock manager under whose shared lock this process reads, or None where it reads without one.

    *Errors*: OSError where the record cannot be read.
    """
    manager = inbox_lock_manager(folder.inboxes, box)
    record = read(folder)
    if manager is None or manager.identity == NONE or (record is not None and not allows(record, manager.identity)):
        return None
    return manager
