"""How long to wait before the next dial."""

from __future__ import annotations


class Backoff:
    """Waits that double from ``min_s`` to ``max_s``, and start over after a connection that lasted ``good_after_s``.

    Knows no clock: it is told how long a connection lasted.
    """

    __slots__ = ("_good_after_s", "_max_s", "_min_s", "_next_s")

    def __init__(self, min_s: float, max_s: float, good_after_s: float) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._good_after_s = good_after_s
        self._next_s = min_s

    def __repr__(self) -> str:
        return f"<Backoff, next {self._next_s:g}s>"

    def wait_s(self, connected_s: float | None = None) -> float:
        """The wait before the next dial, in seconds.

        :param connected_s: how long the connection lasted that has just ended; None where there was none.
        """
        if connected_s is not None and connected_s >= self._good_after_s:
            self._next_s = self._min_s
        wait_s = self._next_s
        self._next_s = min(self._max_s, 2 * wait_s)
        return wait_s
