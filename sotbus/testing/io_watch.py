"""Whether a call does I/O: the system's own functions that it calls are noted by a profiler."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

IO_MODULES = frozenset(["_io", "_posixsubprocess", "_socket", "_ssl", "fcntl", "io", "mmap", "nt", "posix", "select"])
"""The built-in modules whose functions and methods reach files, sockets and processes."""

HARMLESS = frozenset(["fspath", "getpid", "_path_normpath", "_path_splitroot_ex", "_path_splitroot"])
"""Functions of those modules that only compute."""


def io_of(call: Callable[[], object]) -> tuple[object, list[str]]:
    """What a call answers, and the names of the I/O functions that it called in this thread."""
    seen: list[str] = []

    def note(_frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call":
            return
        owner = getattr(function, "__self__", None)
        module = getattr(function, "__module__", None) or type(owner).__module__
        if module in IO_MODULES and function.__name__ not in HARMLESS:
            seen.append(f"{module}.{function.__name__}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        answer = call()
    finally:
        sys.setprofile(before)
    return answer, seen
