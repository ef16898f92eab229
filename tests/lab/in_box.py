"""Calls for boxes that any lab test may use; a test file with calls of its own has them in a module beside this one."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_FOREVER_S = 3600


def try_flock(path: str) -> bool:
    """Whether an exclusive flock(2) on a path was free; it is released again."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def hold_flock(path: str) -> Iterator[str]:
    """Hold an exclusive flock(2) until a line is sent; notes "held"."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield "held"
    sys.stdin.readline()
    os.close(fd)


def append_lines(path: str, count: int) -> Iterator[int]:
    """Append numbered lines with an fsync(2) each; notes the number of each once it is synced."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number in range(count):
        os.write(fd, b"line %d\n" % number)
        os.fsync(fd)
        yield number
    os.close(fd)


def write(path: str, text: str) -> None:
    """A file's whole text, synced."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_unsynced(path: str) -> Iterator[str]:
    """Write 1 MB that only the page cache holds, note "written", and keep the file open."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    os.write(fd, b"x" * 1_000_000)
    yield "written"
    time.sleep(_FOREVER_S)
    os.close(fd)


def identity() -> dict[str, str]:
    """What tells this box from another, and this boot from the one before."""
    return {
        "host": os.uname().nodename,
        "machine_id": Path("/etc/machine-id").read_text().strip(),
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
        "network_namespace": os.readlink("/proc/self/ns/net"),
    }


def state(pid: int) -> str:
    """A process's state letter; proc_pid_stat(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
