"""What two boxes say of themselves: under which names they go, what each found at home, how each mounts the folder."""

from __future__ import annotations

import os
from collections.abc import Sequence

import sotbus
from sotbus.comm.box import first_line
from sotbus.comm.holder import own_record
from sotbus.comm.identity import NFS4, NONE
from sotbus.comm.mounts import LOCAL_FILE_SYSTEMS, Mount
from sotbus.doctor.check import FAULT, Check, NotJudged, Verdict, fault, sound
from sotbus.doctor.pair import NotProved
from sotbus.doctor.peer_board import FORM, Party
from sotbus.doctor.place import Place

UNIQUIFIERS = ("/sys/fs/nfs/net/nfs_client/identifier", "/sys/module/nfs/parameters/nfs4_unique_id")
"""What an NFS client adds to its host name, so that a server can tell it from others of that name; usually nothing."""

BEARING = ("mount", "nfs-recovery", "probe-exclusion", "probe-readers", "probe-append", "probe-death")
"""A box's own checks whose fault makes it unfit to share the folder, whatever the two of them prove."""

UNDECIDED = ("the proof was not finished", "nothing is proved")
"""How the probe's faults begin that say nothing against the lock: a busy box."""

NFS_OPTIONS = "vers=4.2,local_lock=none"


def party_here(place: Place, run_id: str, own: Sequence[Check]) -> Party:
    """This side. *Errors*: :class:`NotJudged` where there is no comm folder.

    :param own: what this box's own checks found.
    """
    box = place.box
    manager = place.lock_manager
    try:
        mount = place.mount
    except NotJudged:
        mount = Mount("", "", "", (), ())
    return Party(
        id=run_id,
        form=FORM,
        version=sotbus.__version__,
        host=box.declared_host,
        machine=box.machine_id or "",
        boot=box.boot_id or "",
        pid=os.getpid(),
        record=str(own_record(box, fresh=True)),
        lock_manager=manager.identity if manager is not None else "",
        fstype=mount.fstype,
        source=mount.source,
        point=mount.point,
        options=",".join(mount.super_options),
        client=" ".join([os.uname().nodename, *(first_line(path) or "" for path in UNIQUIFIERS)]),
        faults=[
            [check.name, check.text, check.remedy] for check in own if check.status == FAULT and check.name in BEARING
        ],
    )


def names(parties: Sequence[Party], labels: Sequence[str]) -> Verdict:
    """Host, machine id and NFS client's name tell the two boxes apart."""
    first, second = parties
    if first.machine and first.machine == second.machine:
        return fault(
            f"both boxes have the machine id {first.machine}, so each takes the other's locks for its own "
            "of an earlier boot",
            f"give {labels[1]} one of its own, as root: rm /etc/machine-id && systemd-machine-id-setup",
        )
    if first.host == second.host:
        return fault(
            f"both boxes go by the host name {first.host}, so their sessions would share self files",
            "give one of them another host name, or set SOT_SELF_HOST there",
        )
    if first.boot != second.boot and first.client == second.client and NFS4.strip() in (first.fstype, second.fstype):
        return fault(
            f"both boxes' NFS clients go by one name ({first.client.split()[0]}), so the server takes one for the "
            "other after a restart and drops its locks",
            "give one of them another host name, or set nfs.nfs4_unique_id there, and mount again",
        )
    kernel = (
        "; both run on one kernel, so this says nothing of two kernels"
        if first.boot and first.boot == second.boot
        else ""
    )
    return sound(f"{labels[0]} is machine {first.machine or '-'}, {labels[1]} is {second.machine or '-'}{kernel}")


def own_checks(parties: Sequence[Party], labels: Sequence[str]) -> Verdict:
    """Neither box has a fault of its own that bears on sharing the folder.

    *Errors*: :class:`NotProved` where the worst that was found is a proof that came to nothing.
    """
    found = [
        (f"on {label} {name} is at fault ({text})", f"on {label}: {remedy}", text.startswith(UNDECIDED))
        for party, label in zip(parties, labels, strict=True)
        for name, text, remedy in party.faults
    ]
    found.sort(key=lambda one: one[2])
    if not found:
        return sound(f"none of {', '.join(BEARING)} is at fault on either box")
    texts = "; ".join(text for text, _, _ in found)
    _, remedy, undecided = found[0]
    if undecided:
        raise NotProved(texts, remedy)
    return fault(texts, remedy)


def lock_managers(parties: Sequence[Party], labels: Sequence[str]) -> Verdict:
    """Both have one lock manager for ``inbox/`` (sot-comm v1, The lock manager)."""
    first, second = parties
    if first.lock_manager == second.lock_manager and first.lock_manager not in ("", NONE):
        return sound(f"{first.lock_manager} on both")
    both = (
        f"{label} has {party.lock_manager or 'none that it can tell'} ({_mounted(party)})"
        for party, label in zip(parties, labels, strict=True)
    )
    return fault(f"they do not go by one lock manager: {', '.join(both)}", mounting(parties, labels))


def mounting(parties: Sequence[Party], labels: Sequence[str]) -> str:
    """What to mount how, so that the lock of the one may exclude the other."""
    first, second = parties
    if first.lock_manager == second.lock_manager and first.lock_manager not in ("", NONE):
        return f"let one box alone file into this folder, until the locks of {first.lock_manager} work"
    steps = []
    for party, label in zip(parties, labels, strict=True):
        if party.lock_manager.startswith(NFS4):
            continue
        if party.fstype in ("nfs", "nfs4"):
            steps.append(f"on {label} mount {party.source} on {party.point} with {NFS_OPTIONS}")
        elif party.fstype in LOCAL_FILE_SYSTEMS:
            steps.append(f"on {label}, whose own disk it is on, mount the export as the other box does, and use that")
        else:
            steps.append(
                f"on {label} put the folder on an NFS mount with {NFS_OPTIONS}, not on {party.fstype or 'this'}"
            )
    return "; ".join(steps) or (
        f"name server and export alike on both: on {labels[1]} mount {first.source} as {labels[0]} does"
    )


def _mounted(party: Party) -> str:
    return f"{party.fstype} {party.source} on {party.point}" if party.fstype else "a mount that cannot be told"
