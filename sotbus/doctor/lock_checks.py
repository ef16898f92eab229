"""Checks of the locks: the inboxes' lock manager and its record, and the registry lock with its holder."""

from __future__ import annotations

import os
import shlex

from sotbus.comm import manager_record
from sotbus.comm.holder import ALIVE, DEAD, Holder, judge, own_record, parse
from sotbus.comm.identity import NONE, fresh_read_doubt
from sotbus.comm.processes import start_ticks
from sotbus.comm.registry_lock import read_first_line
from sotbus.comm.topology import GUEST
from sotbus.doctor import node_checks
from sotbus.doctor.check import NotJudged, Verdict, fault, sound
from sotbus.doctor.place import Place

LONG_S = 60
"""A registry write takes milliseconds and no command waits longer than 10 s for one, so a lock this old is stuck."""

MEND_CONFIG = "mend the config first, which may name the folder's hub (see config)"
MEND_MOUNT = "see first that this box's lock manager can be told (see lock-manager): its role depends on that"
"""The remedies where a box's role is not known."""

LOOKS = 3
"""How often a lock that changes hands is looked at again."""


def lock_manager(place: Place) -> Verdict:
    """This box has a lock manager for the inboxes (sot-comm v1, The lock manager)."""
    manager = place.lock_manager
    if manager is None:
        return fault(
            f"the mount of {place.folder.inboxes} cannot be told, so its inbox lock is unknown",
            f"see that {place.box.mountinfo_path} can be read and the folder is there",
        )
    if manager.identity == NONE:
        return fault(
            "without a machine id this box's lock manager is 'none', under which nothing may be filed",
            "run: sotbus init (it puts a machine id into the config file, or says what to put there)",
        )
    if manager.identity.startswith(NONE):
        return sound(f"{manager.identity}: excludes the processes of this machine and no others")
    return sound(manager.identity)


def record(place: Place) -> Verdict:
    """``inbox-lock-manager`` is there and can be read."""
    path = place.folder.manager_record
    if os.path.isdir(path):
        return fault(
            f"{path} is a folder, so no mail can be filed", _mend(place, f"remove it: rmdir {shlex.quote(path)}")
        )
    try:
        found = manager_record.read(place.folder)
    except OSError as error:
        return fault(
            f"{path} cannot be read: {error.strerror or error}", _mend(place, f"look at it: ls -l {shlex.quote(path)}")
        )
    if found is None:
        return fault(
            f"{path} is missing, so it is not known whose lock the inboxes are under{place.role_described}",
            _mend(place),
        )
    if not found.manager:
        return fault(
            f"{path} names no lock manager{place.role_described}", _mend(place, f"remove it: rm {shlex.quote(path)}")
        )
    return sound(f"{found.manager}, written by {_writer(found)}{place.role_described}")


def record_manager(place: Place) -> Verdict:
    """The record's lock manager is this box's own, so that it may file mail itself, hub or guest (facts 4.1).

    A guest's mail may go by its node to the folder's hub instead, while that link is up.
    """
    own, machine = place.identity, place.box.machine_id
    if own is None or own == NONE:
        raise NotJudged("this box has no lock manager to compare (see lock-manager)")
    try:
        found = manager_record.read(place.folder)
    except OSError as error:
        raise NotJudged("the record cannot be read (see record)") from error
    if found is None or not found.manager:
        raise NotJudged("there is no record (see record)")
    if manager_record.allows(found, own):
        return sound(f"the record names this box's lock manager{place.role_described}")
    differs = (
        f"the record names {found.manager}, written by {_writer(found)}, and this box's lock manager is {own}, "
        f"so it files nothing itself{place.role_described}"
    )
    if place.config_problem is not None:
        return fault(differs, MEND_CONFIG)
    if place.role == GUEST:
        way, verdict = node_checks.way_to_hub(place)
        if way:
            return sound(
                f"the record names {found.manager}, so this box files nothing itself; its mail goes {way}"
                f"{place.role_described}"
            )
        remedy = manager_record.guest_remedy(place.folder, found, place.topology)
        return fault(differs, f"{remedy}; or have this box's node hand its mail on: {verdict.remedy}")
    if machine and found.writer == machine:
        return fault(
            f"the record names {found.manager}, this machine's lock manager before a remount; now it is {own}"
            f"{place.role_described}",
            _mend(place),
        )
    anew = _mend(place, f"stop every daemon on it, rm {shlex.quote(place.folder.manager_record)}")
    if place.topology.configured:
        return fault(differs, anew)
    return fault(differs, f"if the folder is this box's: {anew}; else mount it as that machine does")


def _mend(place: Place, first: str = "") -> str:
    """What to run for the record, and on which box, after ``first`` is done there.

    *Errors*: :class:`NotJudged` where the folder cannot be told.
    """
    if place.config_problem is not None:
        return MEND_CONFIG
    if place.identity is None and place.role == GUEST:
        return MEND_MOUNT
    return manager_record.mend(place.topology, place.role, first)


def _writer(found: manager_record.ManagerRecord) -> str:
    return f"machine {found.writer}" if found.writer else "an unknown machine"


def registry_lock(place: Place) -> Verdict:
    """The registry lock is free, or a file that names its holder; an older version's is a folder."""
    path = place.folder.registry_lock
    if os.path.isdir(path):
        return fault(
            f"{path} is a folder: an older version, which records no holder, took it",
            f"once no older client runs: rmdir {shlex.quote(path)}",
        )
    try:
        line = read_first_line(path)
    except FileNotFoundError:
        return sound("free")
    except OSError as error:
        return fault(f"{path} cannot be read: {error.strerror or error}", f"look at it: ls -l {shlex.quote(path)}")
    holder = parse(line)
    if holder is None:
        return fault(
            f"{path} names no holder ({line or 'empty'})",
            f"once no client runs on any box of this folder: rm {shlex.quote(path)}",
        )
    age_s = _age_s(place)
    return sound(f"held by {holder.described}" + (f" ({age_s}s old)" if age_s is not None else ""))


def registry_lock_holder(place: Place) -> Verdict:
    """The lock's holder, if there is one, is not proved dead (facts 3.4)."""
    holder, verdict, why = _judged(place)
    if verdict == DEAD:
        return fault(
            f"held by {holder.described}, and {why}",
            "any command that writes the registry takes it back: sotbus join",
        )
    return sound(f"{holder.name} pid {holder.pid}: {why}")


def registry_lock_age(place: Place) -> Verdict:
    """No holder that may be alive has had the lock for long."""
    holder, verdict, why = _judged(place)
    if verdict == DEAD:
        raise NotJudged("its holder is dead (see registry-lock-holder)")
    age_s = _age_s(place)
    if age_s is None:
        raise NotJudged("the lock is free")
    if age_s <= LONG_S:
        return sound(f"{age_s}s old")
    remedy = f"if it hangs, end it: kill {holder.pid}"
    if verdict != ALIVE:
        remedy = f"if it is dead, run any comm command on {holder.name}: sotbus join"
        if not holder.provable:
            remedy = "no box can prove its death"
        remedy += f"; once you know that it is dead: rm {shlex.quote(place.folder.registry_lock)}"
    return fault(f"held by {holder.described} for {age_s}s: {why}", remedy)


def _judged(place: Place) -> tuple[Holder, str, str]:
    """The lock's holder, the verdict and its reason. *Errors*: :class:`NotJudged` where no holder can be read.

    A dead holder is looked at again: it may have released the lock and ended between the look and the verdict.
    """
    folder, box = place.folder, place.box
    me = own_record(box, fresh=fresh_read_doubt(folder.root, box) is None)
    for _ in range(LOOKS):
        holder = _holder(place)
        verdict, why = judge(holder, me, lambda pid: start_ticks(pid, box.proc))
        if verdict != DEAD or _holder(place) == holder:
            return holder, verdict, why
    raise NotJudged("the lock changes hands while it is looked at")


def _holder(place: Place) -> Holder:
    """*Errors*: :class:`NotJudged`: the lock is free, or names nobody."""
    try:
        holder = parse(read_first_line(place.folder.registry_lock))
    except FileNotFoundError as error:
        raise NotJudged("the lock is free") from error
    except OSError as error:
        raise NotJudged("no holder can be read (see registry-lock)") from error
    if holder is None:
        raise NotJudged("no holder can be read (see registry-lock)")
    return holder


def _age_s(place: Place) -> int | None:
    """Seconds since the lock was taken, by its file's time and this box's clock; None where it is gone."""
    try:
        return max(0, int(place.clock() - os.lstat(place.folder.registry_lock).st_mtime))
    except OSError:
        return None
