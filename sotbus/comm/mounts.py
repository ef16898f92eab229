"""The mount that a path lies on, read from mountinfo (proc_pid_mountinfo(5))."""

from __future__ import annotations

LOCAL_FILE_SYSTEMS = frozenset(["ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs"])
"""File systems on a disk of this machine, whose lock every process of the machine shares (facts 4)."""

FRESH_FILE_SYSTEMS = LOCAL_FILE_SYSTEMS | {"tmpfs", "nfs", "nfs4"}
"""File systems whose freshly opened file is fresh (facts 3.5); overlay and FUSE prove nothing."""


class Mount:
    """One line of mountinfo. ``options`` are the mount's own, ``super_options`` the file system's."""

    __slots__ = ("fstype", "options", "point", "source", "super_options")

    def __init__(
        self, point: str, fstype: str, source: str, options: tuple[str, ...], super_options: tuple[str, ...]
    ) -> None:
        self.point = point
        self.fstype = fstype
        self.source = source
        self.options = options
        self.super_options = super_options

    def __repr__(self) -> str:
        return f"<Mount {self.fstype} {self.source} on {self.point}>"


def unescape(field: str) -> str:
    """Decode the ``\\ooo`` octal escapes of a mountinfo field; only three octal digits make one."""
    if "\\" not in field:
        return field
    head, *parts = field.split("\\")
    out = [head]
    for part in parts:
        digits = part[:3]
        if len(digits) == 3 and all(c in "01234567" for c in digits) and int(digits, 8) < 256:
            out.append(chr(int(digits, 8)) + part[3:])
        else:
            out.append("\\" + part)
    return "".join(out)


def parse_line(line: str) -> Mount | None:
    """One mountinfo line, or None where it has not the fields of one."""
    left, dash, right = line.partition(" - ")
    fields, tail = left.split(" "), right.split(" ")
    if not dash or len(fields) < 6 or len(tail) < 3:
        return None
    return Mount(
        unescape(fields[4]),
        unescape(tail[0]),
        unescape(tail[1]),
        tuple(fields[5].split(",")),
        tuple(tail[2].strip().split(",")),
    )


def mount_of(path: str, mountinfo: str) -> Mount | None:
    """The mount that the canonical ``path`` lies on: most components win, and of equals the later line (facts 4)."""
    best: Mount | None = None
    depth = -1
    for line in mountinfo.split("\n"):
        mount = parse_line(line)
        if mount is None:
            continue
        prefix = mount.point.rstrip("/")
        if path != mount.point and not path.startswith(prefix + "/"):
            continue
        components = prefix.count("/")
        if components >= depth:
            best, depth = mount, components
    return best


def stale_read_reason(mount: Mount | None) -> str | None:
    """Why a read on this mount is not proved fresh, or None where it is (facts 3.5)."""
    fstype = mount.fstype if mount else "unknown"
    if mount is None or fstype not in FRESH_FILE_SYSTEMS:
        return f"the comm home's filesystem ({fstype}) does not prove a fresh read"
    if "nocto" in mount.options or "nocto" in mount.super_options:
        return "the comm home is mounted nocto, so no read of it is proved fresh"
    return None
