"""A hint to the next poll: where in the inbox the cursor's line ended. It spares a count from the start, no more.

Kept in ``state/`` of the comm folder, beside the other per-session scratch. It is used only where the very bytes that
it points at still hash as they did, and where the line found from it hashes as the cursor says.
"""

from __future__ import annotations

import os

from sotbus.comm.cursor import cksum
from sotbus.comm.folder import PRIVATE_FILE, make_folder, open_regular

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.comm.folder import Folder

WORTH_BYTES = 64 * 1024
"""Inboxes shorter than this are counted from the start faster than a hint is written."""


class Hint:
    """Line number ``count`` of the file with this inode spans the bytes ``start`` to ``end`` and hashes to ``hash``."""

    __slots__ = ("count", "end", "hash", "inode", "start")

    def __init__(self, inode: int, count: int, start: int, end: int, hash_: str) -> None:
        self.inode = inode
        self.count = count
        self.start = start
        self.end = end
        self.hash = hash_

    def __repr__(self) -> str:
        return f"<Hint line {self.count} at {self.start}-{self.end}>"

    def holds(self, fd: int) -> bool:
        """Whether the open inbox still has that very line there."""
        now = os.fstat(fd)
        if now.st_ino != self.inode or self.count < 1 or not 0 <= self.start < self.end <= now.st_size:
            return False
        before = 1 if self.start else 0
        data = os.pread(fd, self.end - self.start + before, self.start - before)
        line = data[before:-1]
        framed = data.endswith(b"\n") and (not before or data.startswith(b"\n"))
        return framed and len(data) == self.end - self.start + before and b"\n" not in line and cksum(line) == self.hash


def path_of(folder: Folder, handle: str) -> str:
    return f"{folder.state}/sotbus-offset-{handle}"


def read(folder: Folder, handle: str) -> Hint | None:
    """The hint kept for a handle; anything unreadable or malformed is none."""
    try:
        fd = open_regular(path_of(folder, handle))
        try:
            words = os.read(fd, 200).decode("ascii").split(" ")
        finally:
            os.close(fd)
        inode, count, start, end = (int(word) for word in words[:4])
        return Hint(inode, count, start, end, words[4])
    except (OSError, ValueError, IndexError):
        return None


def write(folder: Folder, handle: str, hint: Hint) -> None:
    """Keep a hint. Best effort: a failure costs the next poll a count and is no error."""
    path = path_of(folder, handle)
    text = f"{hint.inode} {hint.count} {hint.start} {hint.end} {hint.hash}"
    try:
        if not os.path.isdir(folder.state):
            make_folder(folder.state)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(path, flags, PRIVATE_FILE)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    except OSError:
        return
