"""mount(2), umount2(2) and unshare(2), which Python 3.11 does not have; each raises OSError with the target's name."""

from __future__ import annotations

import ctypes
import os

MS_BIND = 0x1000
MNT_FORCE, MNT_DETACH = 1, 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def mount(source: str, target: str, kind: str = "", options: str = "", flags: int = 0) -> None:
    """mount(2); unlike mount(8) it starts no helper program, so an NFS mount needs ``addr=`` in its options."""
    words = [word.encode() for word in (source, target, kind)]
    _check(_libc.mount(*words, ctypes.c_ulong(flags), options.encode()), f"{target} ({kind or 'bind'} {options})")


def bind(source: str, target: str) -> None:
    mount(source, target, flags=MS_BIND)


def unmount(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    _check(_libc.umount2(target.encode(), flags), target)


def unshare(flags: int) -> None:
    """unshare(2). After CLONE_NEWPID the next child is pid 1 of the new namespace."""
    _check(_libc.unshare(flags), f"unshare {flags:#x}")
