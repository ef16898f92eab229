"""Ends a command whose file system does not answer, at a bound, and says so.

A hard mount whose server is gone holds a call for as long as the server is away, and nothing but a fatal signal ends
that call (nfs(5), hard; signal(7)): the thread that made it cannot give up by itself. So a second thread waits beside
it. Past the bound it says what was waited for and ends the process, which takes the call along.
"""

from __future__ import annotations

import _thread
import os
import sys
import time

from sotbus.comm.settings import MOUNT_WAIT_S
from sotbus.errors import EX_FAILED
from sotbus.message import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.comm.settings import Settings

NEVER = float("inf")


class Watchdog:
    """The bound of one command. It counts from the last sign of progress: a line of the answer, input that came."""

    __slots__ = ("_bound_s", "_deadline", "_folder", "_lock_wait", "_outcome", "_prefix", "_stopped")

    def __init__(self) -> None:
        self._deadline = NEVER
        self._bound_s = MOUNT_WAIT_S
        self._stopped: _thread.LockType | None = None

    def __repr__(self) -> str:
        return f"<Watchdog of {self._bound_s:g}s{'' if self._stopped else ', asleep'}>"

    def start(self, lock_wait: str) -> None:
        """Watch from now on. Where no thread is to be had the command goes on without a bound.

        :param lock_wait: the setting with the longest wait for a lock that belongs to the command, in seconds.
        """
        self._lock_wait = lock_wait
        self._bound_s = MOUNT_WAIT_S
        self._folder = ""
        self.expect("what was under way may have been done")
        stopped = _thread.allocate_lock()
        stopped.acquire()
        try:
            _thread.start_new_thread(self._watch, (stopped,))
        except RuntimeError:
            return
        self._stopped = stopped
        self.progress()

    def stop(self) -> None:
        """The command is over."""
        stopped, self._stopped = self._stopped, None
        self._deadline = NEVER
        if stopped is not None:
            stopped.release()

    def bound(self, settings: Settings, folder: str) -> None:
        """Wait as long as the settings say, and name the comm folder."""
        if self._stopped is not None:
            wait_s: float = getattr(settings, self._lock_wait)
            self._bound_s, self._folder = wait_s + settings.touch_wait_s + settings.mount_wait_s, folder
            self.progress()

    def expect(self, outcome: str, prefix: str = "FAILED: ") -> None:
        """What the line says if the work that is begun now does not end: how it begins, and what became of the work."""
        self._outcome, self._prefix = outcome, prefix
        self.progress()

    def progress(self) -> None:
        """Something was done: the bound counts from now."""
        if self._stopped is not None:
            self._deadline = time.monotonic() + self._bound_s

    def pause(self) -> None:
        """What comes now waits for a person or another program (a pager, standard input), until :meth:`progress`."""
        self._deadline = NEVER

    def _watch(self, stopped: _thread.LockType) -> None:
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                self._end()
            if stopped.acquire(timeout=min(left, self._bound_s)):
                return

    def _end(self) -> None:
        """Say what was waited for, and end the process with whatever it hangs in."""
        try:
            if sys.stdout is not None:
                sys.stdout.buffer.flush()  # answers that were given already
        except (OSError, ValueError, RuntimeError):
            pass
        whose = f"the file system of {shown(self._folder)}" if self._folder else "a file system"
        text = (
            f"{self._prefix}{whose} did not answer within {self._bound_s:g}s; {self._outcome}\n"
            "hint: its mount hangs: see whether the server is up and the network reaches it\n"
        )
        try:
            os.write(2, text.encode("utf-8", "backslashreplace"))
        except OSError:
            pass
        os._exit(EX_FAILED)


watchdog = Watchdog()
"""This process's: it runs one command at a time."""
