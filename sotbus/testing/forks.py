"""Another process for a test: a fork of this one that runs one function and talks over a pipe."""

from __future__ import annotations

import json
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

ANSWER_S = 30.0
"""How long a word from the other process is waited for, in seconds: long, since only a fault reaches it."""

LOOKS = 5
"""How often a process must be seen asleep: a thread that starts another sleeps for a moment too."""


class Line:
    """One end of a line between two processes: values go over as JSON, one a line."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._pending = b""

    def say(self, value: object) -> None:
        os.write(self._write_fd, json.dumps(value).encode() + b"\n")

    def hear(self, within_s: float = ANSWER_S) -> Any:
        """The next value. *Errors*: TimeoutError; EOFError where the other process is gone."""
        deadline = time.monotonic() + within_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._read_fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the other process said nothing for {within_s:g}s")
            more = os.read(self._read_fd, 65536)
            if not more:
                raise EOFError("the other process is gone")
            self._pending += more
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def has_more(self) -> bool:
        """Whether a value, or the other's end, is there to be heard."""
        return b"\n" in self._pending or bool(select.select([self._read_fd], [], [], 0)[0])

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self._write_fd)


class Fork(Line):
    """A child that runs ``work`` with its end of the line, from entry until exit of this context, which kills it."""

    def __init__(self, work: Callable[[Line], object]) -> None:
        to_child = os.pipe()
        to_parent = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork beside threads; the child takes no lock of theirs and ends by _exit
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(to_child[1])
                os.close(to_parent[0])
                signal.signal(signal.SIGINT, signal.default_int_handler)
                line = Line(to_child[0], to_parent[1])
                try:
                    work(line)
                    status = 0
                except BaseException as error:
                    line.say({"raised": f"{type(error).__name__}: {error}"})
            finally:
                os._exit(status)
        os.close(to_child[0])
        os.close(to_parent[1])
        super().__init__(to_parent[0], to_child[1])
        self._waited = False

    def __enter__(self) -> Fork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.close()

    def kill(self) -> None:
        """End the child by SIGKILL and wait for its end."""
        if not self._waited:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._waited = True

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the child's main thread."""
        os.kill(self.pid, signal.SIGINT)

    def until_asleep(self) -> None:
        """Wait until the child's main thread sleeps in the kernel, at several looks in a row.

        Where /proc does not tell, return at once.
        """
        looks = 0
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            try:
                with open(f"/proc/{self.pid}/stat") as file:
                    state = file.read().rpartition(")")[2].split()[0]
            except OSError:
                return
            looks = looks + 1 if state in "SD" else 0
            if looks == LOOKS:
                return
            time.sleep(0.001)
        raise TimeoutError("the other process never waited")
