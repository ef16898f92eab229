"""One process of ``sotbus doctor --probe``: takes orders as JSON lines on standard input and answers each with one.

It ends when standard input does, so it never outlives the probe.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from random import uniform
from typing import TYPE_CHECKING, Any

from sotbus.comm.box import Box
from sotbus.comm.flock import LockTimeoutError
from sotbus.comm.folder import PRIVATE_FILE, write_whole
from sotbus.comm.inbox import APPEND_FLAGS, end_of_last_line
from sotbus.comm.lock_manager import inbox_lock_manager
from sotbus.errors import SotbusError
from sotbus.lock_managers import resolve

if TYPE_CHECKING:
    from sotbus.comm.lock_manager import LockManager

HOLD_S = 0.0002
"""How long a contender keeps the lock: long enough that another process wants it meanwhile."""

PAUSE_S = 0.0003
"""At most this long a contender stays away after a hold, so that the others have their turn."""


class Worker:
    """Carries out the orders, with the lock manager that the box has for the folder's inboxes."""

    def __init__(self) -> None:
        self._held = ExitStack()
        self._lock = ""
        self._manager: LockManager

    def open(
        self, inboxes: str, lock: str, machine_id: str | None, mountinfo: str, plugins: list[str] | None
    ) -> dict[str, Any]:
        """Find the lock manager, as a command does. Answers its ``identity``.

        :param plugins: the plugins to ask for it, or None for the page's own rules.
        """
        box = Box("probe", "probe", machine_id, None, mountinfo)
        if plugins is not None:
            box.lock_managers = resolve(plugins, _fail)
        manager = inbox_lock_manager(inboxes, box)
        if manager is None:
            raise OSError(f"the lock manager of {inboxes} cannot be told")
        self._lock, self._manager = lock, manager
        return {"identity": manager.identity}

    def _take(self, exclusive: bool, bound_s: float) -> ExitStack:
        """The lock; the answer's ``close`` releases it. *Errors*: LockTimeoutError, OSError."""
        with ExitStack() as stack:
            stack.enter_context(self._manager.hold(self._lock, exclusive, bound_s))
            return stack.pop_all()

    def contend(self, rounds: int, seconds: float) -> dict[str, Any]:
        """Take the exclusive lock again and again.

        Answers ``spans``, the monotonic nanoseconds at which each hold began and ended, both taken inside it, and
        ``waited``, how many of them were refused at first. CLOCK_MONOTONIC is one clock for all processes of a machine
        (clock_gettime(2)).
        """
        deadline = time.monotonic() + seconds
        spans: list[tuple[int, int]] = []
        waited = 0
        while len(spans) < rounds and (left := deadline - time.monotonic()) > 0:
            try:
                held = self._take(True, 0)
            except LockTimeoutError:
                waited += 1
                try:
                    held = self._take(True, left)
                except LockTimeoutError:
                    break
            with held:
                entered = time.monotonic_ns()
                time.sleep(HOLD_S)
                spans.append((entered, time.monotonic_ns()))
            time.sleep(uniform(0, PAUSE_S))
        return {"spans": spans, "waited": waited}

    def append(self, path: str, mark: str, lines: int, seconds: float) -> dict[str, Any]:
        """Append ``<mark> <n>`` lines as an inbox's are: lock, open, cut a torn tail, write, sync, close, unlock.

        Answers ``written``, how many, and ``cut``, how many torn tails there were: another process was writing then.
        """
        deadline = time.monotonic() + seconds
        written = cut = 0
        while written < lines and (left := deadline - time.monotonic()) > 0:
            try:
                held = self._take(True, left)
            except LockTimeoutError:
                break
            with held:
                fd = os.open(path, APPEND_FLAGS, PRIVATE_FILE)
                try:
                    length = os.fstat(fd).st_size
                    kept = end_of_last_line(fd, length)
                    if kept != length:
                        os.ftruncate(fd, kept)
                        cut += 1
                    write_whole(fd, f"{mark} {written}\n".encode())
                    os.fdatasync(fd)
                    written += 1
                finally:
                    os.close(fd)
        return {"written": written, "cut": cut}

    def hold(self, exclusive: bool, seconds: float) -> dict[str, Any]:
        """Take the lock within ``seconds`` and keep it until told to release it. Answers ``held``."""
        try:
            self._held.push(self._take(exclusive, seconds))
        except LockTimeoutError:
            return {"held": False}
        return {"held": True}

    def release(self) -> dict[str, Any]:
        """Release what :meth:`hold` took."""
        self._held.close()
        return {}


def _fail(error: SotbusError) -> None:
    raise error


def main() -> None:
    worker = Worker()
    orders: Mapping[str, Callable[..., dict[str, Any]]] = {
        "open": worker.open,
        "contend": worker.contend,
        "append": worker.append,
        "hold": worker.hold,
        "release": worker.release,
    }
    for line in sys.stdin:
        order = json.loads(line)
        number = order.pop("number")
        try:
            answer = orders[order.pop("do")](**order)
        except (OSError, SotbusError) as error:
            answer = {"error": getattr(error, "strerror", None) or str(error)}
        print(json.dumps({"number": number, **answer}), flush=True)


if __name__ == "__main__":
    main()
