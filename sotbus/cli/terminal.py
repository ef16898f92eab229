"""Printing: which stream, colour only where it is wanted, and text that was written to the end or not at all."""

from __future__ import annotations

import errno
import os
import sys
from functools import lru_cache

from sotbus.cli.watchdog import watchdog
from sotbus.message import shown as shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

    from sotbus.errors import SotbusError

GREEN, YELLOW, RED, DIM, BOLD = "32", "33", "31", "2", "1"


def out(text: str) -> None:
    """A line of the answer, on standard output; a file name that is no UTF-8 goes out as the bytes that it is.

    *Errors*: OSError, BrokenPipeError included.
    """
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        data = text.encode("utf-8", "backslashreplace")
    watchdog.pause()
    _stdout().buffer.write(data + b"\n")
    watchdog.progress()


def flush() -> None:
    """Hand everything to the system. *Errors*: OSError: what was to be shown was not."""
    watchdog.pause()
    _stdout().buffer.flush()
    watchdog.progress()


def _stdout() -> TextIO:
    """Standard output. *Errors*: OSError where the process was started without one."""
    if sys.stdout is None:
        raise OSError(errno.EBADF, "standard output is closed")
    return sys.stdout


def silence() -> None:
    """Point standard output elsewhere, so that the interpreter's last flush does not fail again."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.close(devnull)


def err(text: str) -> None:
    """A line for the person, on standard error; one that cannot be written is lost."""
    try:
        flush()
    except (OSError, ValueError):
        pass
    if sys.stderr is None:
        return
    watchdog.pause()
    try:
        sys.stderr.buffer.write((text + "\n").encode("utf-8", "backslashreplace"))
        sys.stderr.buffer.flush()
    except (OSError, ValueError):
        return
    finally:
        watchdog.progress()


def tell(error: SotbusError, prefix: str = "") -> int:
    """An error and its hint on standard error; answers the exit status."""
    err(prefix + shown(str(error).removeprefix("FAILED: ") if prefix else str(error)))
    if error.hint:
        err(f"hint: {shown(error.hint)}")
    return error.exit_status


@lru_cache(maxsize=1)
def _coloured() -> bool:
    """Whether standard output is a terminal that shows colour, and NO_COLOR is not set (no-color.org)."""
    return (
        sys.stdout is not None
        and sys.stdout.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )


def colour(text: str, code: str) -> str:
    """The text in a colour, where colour is shown."""
    return f"\x1b[{code}m{text}\x1b[0m" if _coloured() else text
