"""Checks of the comm folder: that it is there and private, and what it lies on."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator

from sotbus.comm.box import first_line
from sotbus.comm.folder import MADE_FOLDERS, OTHERS, ROOT_PREFIXES, Folder
from sotbus.comm.mounts import stale_read_reason
from sotbus.doctor.check import NotJudged, Verdict, counted, fault, size, some, sound
from sotbus.doctor.place import PROBE_FILES, Place

SPACE_BYTES = 1 << 20
"""Below this much free space an append of one large message may fail (the default bound of a text is 256 KiB)."""

RECOVER_LOST_LOCKS = "/sys/module/nfs/parameters/recover_lost_locks"
"""With ``Y`` the NFS client takes a lost lock back unasked, which undoes the fence (decisions, sot-comm 16)."""

COMMAND_PATHS = 8
"""A remedy names each path up to this many, then the folders that they lie in."""

LEFT_BEHIND = (*ROOT_PREFIXES, "registry.json.tmp")
"""How temp files and reclaim markers in the root begin."""


def folder(place: Place) -> Verdict:
    """The comm folder is there and this user may work in it."""
    if place.named_folder is None:
        return fault(place.folder_problem, "set HOME, or name the comm folder with SOT_COMM_HOME")
    root = place.named_folder.root
    if not os.path.lexists(root):
        return fault(f"there is no comm folder at {root}: this box has never joined", "run: sotbus init")
    if not os.path.isdir(root):
        return fault(f"{root} is no folder", f"move it aside: mv {shlex.quote(root)} {shlex.quote(root + '.old')}")
    return _usable(root) or sound(root)


def folder_parts(place: Place) -> Verdict:
    """``inbox``, ``self`` and ``read`` are folders that this user may work in."""
    for name in MADE_FOLDERS:
        path = f"{place.folder.root}/{name}"
        if not os.path.lexists(path):
            return fault(f"{path} is missing", "run: sotbus init")
        if not os.path.isdir(path):
            return fault(f"{path} is no folder", f"move it aside, then run: sotbus init ({shlex.quote(path)})")
        problem = _usable(path)
        if problem is not None:
            return problem
    return sound(", ".join(f"{name}/" for name in MADE_FOLDERS))


def _usable(path: str) -> Verdict | None:
    if os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return None
    return fault(
        f"this user (uid {os.geteuid()}) may not read and write {path}",
        f"as its owner or root: chown -R {os.geteuid()} {shlex.quote(path)} && chmod u+rwx {shlex.quote(path)}",
    )


def permissions(place: Place) -> Verdict:
    """No entry that the protocol knows is open to other users (sot-comm v1, Layout)."""
    root = place.folder.root
    loose = list(_loose(root))
    if not loose:
        return sound("no known entry is open to other users")
    texts = [f"{os.path.relpath(path, root)} is {mode:04o}" for path, mode in loose]
    return fault(f"open to other users: {some(texts)}", f"run: {_tightening(root, [path for path, _ in loose])}")


def _tightening(root: str, paths: list[str]) -> str:
    """The command that closes these paths; for many of them, with the folders that they lie in."""
    if len(paths) <= COMMAND_PATHS:
        return f"chmod go-rwx {shlex.join(paths)}"
    above = [path for path in paths if os.path.dirname(path) == root or path == root]
    parts = sorted({os.path.dirname(path) for path in paths if path not in above})
    first = f"chmod go-rwx {shlex.join(above)} && " if above else ""
    return f"{first}chmod -R go-rwx {shlex.join(parts)}" if parts else first.removesuffix(" && ")


def _loose(root: str) -> Iterator[tuple[str, int]]:
    """The root and the known entries below it that have a group or other bit, with their modes."""
    for path in (root, *Folder._known_entries(root)):
        try:
            mode = stat.S_IMODE(os.lstat(path).st_mode)
        except FileNotFoundError:
            continue
        if mode & OTHERS:
            yield path, mode


def mount(place: Place) -> Verdict:
    """What the folder lies on can be written, and says what a fresh read is (facts 3.5)."""
    found = place.mount
    what = f"{found.fstype} {found.source} on {found.point}"
    if "ro" in found.options or "ro" in found.super_options:
        return fault(f"{what} is mounted read-only", f"as root: mount -o remount,rw {shlex.quote(found.point)}")
    doubt = stale_read_reason(found)
    if doubt and "nocto" in (*found.options, *found.super_options):
        return fault(f"{what}: {doubt}", "mount it without nocto")
    return sound(f"{what}; {doubt + ', so no lock holder is proved dead' if doubt else 'a fresh read is proved'}")


def nfs_recovery(place: Place) -> Verdict:
    """The NFS client does not take lost locks back, which would undo the fence (decisions, sot-comm 16)."""
    if not place.mount.fstype.startswith("nfs"):
        raise NotJudged("the folder is not on NFS")
    if first_line(RECOVER_LOST_LOCKS) == "Y":
        return fault(
            "nfs.recover_lost_locks=Y: a box cut off while it held a lock can write over lines filed since",
            f"as root: echo N > {RECOVER_LOST_LOCKS}, and take the option out of the boot and module settings",
        )
    return sound("lost locks are not taken back")


def space(place: Place) -> Verdict:
    """There is room for a message, in bytes and in files."""
    try:
        free = os.statvfs(place.folder.root)
    except OSError as error:
        raise NotJudged(f"the free space cannot be told: {error.strerror or error}") from error
    room = free.f_bavail * free.f_frsize
    if free.f_blocks and room < SPACE_BYTES:
        return fault(f"{size(room)} are free under {place.folder.root}", "make room on that file system")
    if free.f_files and not free.f_favail:
        return fault(f"no more files can be made under {place.folder.root}", "make room (inodes) on that file system")
    return sound(f"{size(room)} free")


def leftovers(place: Place) -> Verdict:
    """Temp files and reclaim markers of processes that were killed: information, nothing is wrong with them."""
    names = place.names_in("")
    found = [name for name in names if name.startswith(LEFT_BEHIND)]
    for part, mark in (("self", ".tmp."), ("inbox", PROBE_FILES)):
        try:
            found += [f"{part}/{name}" for name in place.names_in(part) if mark in name]
        except NotJudged:
            continue  # a missing part is folder-parts' fault
    if not found:
        return sound("no temp files or reclaim markers")
    return sound(
        f"{counted(len(found), 'temp file or reclaim marker', 'temp files and reclaim markers')}: {some(found)}"
    )
