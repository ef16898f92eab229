"""The self file: a session's handle between commands, three lines (sot-comm v1, The self file; facts 9)."""

from __future__ import annotations

import os

from sotbus.comm.folder import PRIVATE_FILE, open_regular, remove_quietly, write_whole
from sotbus.comm.handles import is_handle
from sotbus.errors import FolderError

NOPANE = "__nopane.txt"
"""How the file that every session outside a row shares ends."""


TEMP_BYTES = len(".tmp.") + 6
"""What a temp file's name adds to a self file's."""


class SelfFile:
    """What a self file names: a handle, for a process in ``root``."""

    __slots__ = ("handle", "repo", "root")

    def __init__(self, handle: str, repo: str, root: str) -> None:
        self.handle = handle
        self.repo = repo
        self.root = root

    def __repr__(self) -> str:
        return f"<SelfFile @{self.handle} root={self.root}>"


def read(path: str) -> SelfFile | None:
    """The file, read once and whole; None where it names nobody: absent, no ``root=`` line, no handle.

    *Errors*: :class:`FolderError` where it is there and cannot be read, which is not the same as nobody.
    """
    lines = _lines(path)
    if len(lines) < 3 or not lines[2].startswith("root=") or not lines[1].startswith("repo="):
        return None
    handle, repo, root = lines[0], lines[1][5:], lines[2][5:]
    return SelfFile(handle, repo, root) if root and is_handle(handle) else None


def legacy(path: str) -> tuple[str, str]:
    """Handle and repo of an old file that has no root, for the conflict guard; ``""`` for what is not there."""
    lines = _lines(path)
    return lines[0].strip(), lines[1][5:] if len(lines) > 1 and lines[1].startswith("repo=") else ""


def _lines(path: str) -> list[str]:
    """The file's lines, read once; one empty line where there is none. At most 64 KiB are looked at.

    *Errors*: :class:`FolderError`.
    """
    try:
        fd = open_regular(path)
        try:
            return os.fsdecode(os.read(fd, 1 << 16)).split("\n")
        finally:
            os.close(fd)
    except (FileNotFoundError, NotADirectoryError):
        return [""]
    except OSError as error:
        raise FolderError(
            f"FAILED: the self file {path} cannot be read ({error.strerror or error}), so this session is not known; "
            "nothing was written"
        ) from error


def write(path: str, identity: SelfFile) -> None:
    """Put a self file in place by a rename, so that no reader mixes two versions.

    *Durability*: not synced; after a power loss a session joins again.
    *Errors*: OSError; the old file stands then.
    """
    temp = f"{path}.tmp.{os.urandom(3).hex()}"
    text = f"{identity.handle}\nrepo={identity.repo}\nroot={identity.root}\n"
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    try:
        try:
            write_whole(fd, os.fsencode(text))
        finally:
            os.close(fd)
        os.rename(temp, path)
    except BaseException:
        remove_quietly(temp)
        raise


def row_leaf(row: str) -> str:
    """A row id as part of a file name: bytes outside ``A-Za-z0-9._-`` are ``_``; an empty one is ``nopane``."""
    allowed = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
    return bytes(byte if byte in allowed else 0x5F for byte in os.fsencode(row)).decode("ascii") or "nopane"


def row_of(path: str, host: str) -> str:
    """The row that a pinned file's name names, or ``""`` (none, or a private file's name)."""
    leaf = os.path.basename(path)
    if not leaf.endswith(".txt") or "__" not in leaf:
        return ""
    stem = leaf[:-4]
    own, mark, rest = stem.partition(host + "__")
    row = rest if mark and not own else stem.split("__", 1)[1]
    return "" if row == "nopane" else row
