"""How often something happens now: a mean that forgets, so that it needs no task, no window and no list of times."""

from __future__ import annotations

import math
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SPAN_S = 60.0
"""What was so long ago weighs 1/e of what is now (as a load average does: proc_loadavg(5))."""


class Rate:
    """Events per second over about the last minute.

    :param clock: seconds, monotonic.
    """

    __slots__ = ("_at", "_clock", "_value")

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._value = 0.0

    def __repr__(self) -> str:
        return f"<Rate {self.per_s():.3f} a second>"

    def note(self, count: int = 1) -> None:
        """So many have just happened."""
        self._value = self.per_s() + count / SPAN_S
        self._at = self._clock()

    def per_s(self) -> float:
        """The mean as of now."""
        return self._value * math.exp((self._at - self._clock()) / SPAN_S)
