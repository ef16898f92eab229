"""The process that stays outside a box with namespaces of its own, waits for the box's first process, and ends it."""

from __future__ import annotations

import os
import signal
import time

from lab.mounts import fail_nfs_requests

END = signal.SIGTERM
_WAKES = (signal.SIGCHLD, END)
_AGAIN_S = 0.02


def keep(first: int) -> None:
    """Until the box's first process has ended: by itself, or, after `END`, by SIGKILL, which all of the box gets."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKES)
    while not _ended(first):
        if signal.sigwait(_WAKES) == END:
            os.kill(first, signal.SIGKILL)
            while not _ended(first):
                fail_nfs_requests()
                time.sleep(_AGAIN_S)
            return


def _ended(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] == pid
