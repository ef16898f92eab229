"""The read cursor: how many inbox lines its reader has been shown (sot-comm v1, The inbox; decisions, sot-comm 3)."""

from __future__ import annotations

import errno
import os
import time
import zlib

from sotbus import message
from sotbus.comm.folder import PRIVATE_FILE, open_regular, refresh_folder, remove_quietly, write_whole

READ_PAUSES_S = (0.0, 0.0, 0.0, 0.02, 0.04, 0.04, 0.1, 0.1)
"""Pauses before each try of a read."""

MAX_DIGITS = 18
"""A count of more digits is past the end of any inbox."""

_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
_POSIX_START = 0xFFFFFFFF
"""zlib starts from the complement of what it is given, so this starts cksum's register at 0."""


def cksum(line: bytes) -> str:
    """POSIX cksum(1) of a line (given without its newline) less its NUL bytes, as ``<crc>-<length>``.

    cksum's CRC-32 takes each byte's high bit first, zlib's its low bit first: over bytes mirrored bit by bit zlib's is
    cksum's mirrored, which keeps this in C.
    """
    data = line.replace(b"\0", b"")
    length = len(data)
    tail = length.to_bytes((length.bit_length() + 7) // 8, "little")
    crc = zlib.crc32((data + tail).translate(_REVERSED), _POSIX_START)
    return f"{int(f'{crc:032b}'[::-1], 2)}-{length}"


class Cursor:
    """A cursor's text, taken apart. Exactly one of ``count`` and ``stamp`` says something; neither means 0.

    ``count`` is None for a text that is no count; ``hash`` is ``""`` where there is none.
    """

    __slots__ = ("count", "hash", "stamp")

    def __init__(self, count: int | None, hash_: str, stamp: str) -> None:
        self.count = count
        self.hash = hash_
        self.stamp = stamp

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cursor) and (self.count, self.hash, self.stamp) == (
            other.count,
            other.hash,
            other.stamp,
        )

    def __hash__(self) -> int:
        return hash((self.count, self.hash, self.stamp))

    def __repr__(self) -> str:
        return f"<Cursor {self.stamp or self.count} {self.hash}>"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Any text at all; what is neither a count nor a stamp counts as 0: mail may show twice, never be lost."""
        text = text.rstrip("\n")
        word, _, rest = text.partition(" ")
        if word.isascii() and word.isdigit():
            digits = word.lstrip("0")
            return cls(int(digits or "0") if len(digits) <= MAX_DIGITS else 10**MAX_DIGITS, rest, "")
        if message.is_stamp(text):
            return cls(None, "", text)
        return cls(None, "", "")


def read(path: str) -> Cursor:
    """The cursor file's cursor; one that is absent or cannot be read is empty. At most 64 KiB are looked at.

    A read that fails while the file is being replaced is tried again, for 0.3 s: on NFS the file that was opened may be
    gone, and the name is missing for a moment where another process of the writer's box has the old file open.
    """
    data = b""
    for pause in READ_PAUSES_S:
        if pause:
            time.sleep(pause)
        try:
            fd = open_regular(path)
            try:
                data = os.read(fd, 1 << 16)
            finally:
                os.close(fd)
            break
        except FileNotFoundError:
            if not _is_being_replaced(path):
                break
        except OSError as error:
            if error.errno != errno.ESTALE:
                break
            refresh_folder(os.path.dirname(path))
    return Cursor.parse(data.decode("utf-8", "replace"))


def _is_being_replaced(path: str) -> bool:
    """Whether a cursor that could not be opened has been written meanwhile, or is about to be renamed into place."""
    folder, leaf = os.path.split(path)
    try:
        return any(name == leaf or name.startswith(f"{leaf}.tmp.") for name in os.listdir(folder))
    except OSError:
        return False


def written_form(count: int, last_line: bytes) -> bytes:
    """A cursor as it is written: ``<count> <crc>-<len>``, or ``0``; no newline."""
    return f"{count} {cksum(last_line)}".encode() if count else b"0"


def write(path: str, data: bytes) -> None:
    """Put a cursor in place by a rename, so that no reader sees half of one.

    *Durability*: not synced. After a power loss an older cursor may be back: mail shows twice, none is lost.
    *Errors*: OSError; the old cursor stands then.
    """
    temp = f"{path}.tmp.{os.getpid()}.{int.from_bytes(os.urandom(4), 'big')}"
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    try:
        try:
            write_whole(fd, data)
        finally:
            os.close(fd)
        os.rename(temp, path)
    except BaseException:
        remove_quietly(temp)
        raise
