"""Deadlines of many who wait for something else: one task watches them all, where a cancel scope each would cost more.

Nearly every wait ends long before its deadline. So a deadline costs a set's ``add`` and ``discard``, and all that stand
are looked at when the earliest that was known has passed.
"""

from __future__ import annotations

import math

import trio

COARSE_S = 0.01
"""How much later than its deadline a wait may end, so that many deadlines close together are one look."""


class Wait:
    """One wait: ``over`` is set when what it is for has come, or its deadline has passed.

    :param deadline: by trio's clock.
    """

    __slots__ = ("deadline", "over")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.over = trio.Event()

    def __repr__(self) -> str:
        return f"<Wait until {self.deadline:.3f}{', over' if self.over.is_set() else ''}>"


class Deadlines:
    """The waits that stand. ``await nursery.start(deadlines.run)`` first."""

    def __init__(self) -> None:
        self._waits: set[Wait] = set()
        self._next = math.inf
        self._asleep: trio.CancelScope | None = None

    def __repr__(self) -> str:
        return f"<Deadlines of {len(self._waits)} waits>"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled."""
        try:
            task_status.started()
            while True:
                with trio.CancelScope(deadline=self._next) as self._asleep:
                    await trio.sleep_forever()
                now = trio.current_time()
                for wait in self._waits:
                    if wait.deadline <= now:
                        wait.over.set()
                earliest = min((one.deadline for one in self._waits if one.deadline > now), default=math.inf)
                self._next = max(earliest, now + COARSE_S)
        finally:
            self._asleep = None

    async def wait(self, wait: Wait) -> None:
        """Until it is over, whichever way. *Cancellation*: it stands no more."""
        self._waits.add(wait)
        if wait.deadline < self._next:
            self._next = wait.deadline
            if self._asleep is not None:
                self._asleep.deadline = wait.deadline
        try:
            await wait.over.wait()
        finally:
            self._waits.discard(wait)
