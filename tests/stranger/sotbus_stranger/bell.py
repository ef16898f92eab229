"""A session that reads a named pipe is told there: one line a wake."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping

import trio

from sotbus.api import WakeOutcome

VARIABLE = "STRANGER_BELL"
"""The environment variable in which a session names its pipe."""

FACT = "stranger_bell"


class Bell:
    """Rings the pipe that a session named at its join."""

    def facts(self, environ: Mapping[str, str]) -> dict[str, str]:
        pipe = environ.get(VARIABLE, "")
        return {FACT: pipe} if os.path.isabs(pipe) else {}

    async def wake(self, recipient: Mapping[str, str], unread: int) -> WakeOutcome:
        """HELD where the pipe is full; REFUSED where there is none, or nobody reads it."""
        pipe = recipient.get(FACT)
        if not pipe:
            return WakeOutcome.REFUSED
        return await trio.to_thread.run_sync(_ring, pipe, f"{unread} unread for @{recipient.get('handle', '')}\n")


def _ring(pipe: str, line: str) -> WakeOutcome:
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # ENXIO: nobody reads it
        return WakeOutcome.REFUSED
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return WakeOutcome.REFUSED
        os.write(fd, line.encode())  # whole or not at all, being shorter than PIPE_BUF (pipe(7))
    except OSError as error:
        return WakeOutcome.HELD if error.errno == errno.EAGAIN else WakeOutcome.REFUSED
    finally:
        os.close(fd)
    return WakeOutcome.WOKEN
