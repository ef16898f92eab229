"""What the benchmarks share: paired runs, medians, and how a figure is printed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence


def timed(work: Callable[[], object]) -> float:
    """One call's wall time in seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def paired(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """Wall times of two things done in turn, after one uncounted round of each, so that both see the same weather."""
    first()
    second()
    pairs = [(timed(first), timed(second)) for _ in range(rounds)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def ms(seconds: Sequence[float]) -> str:
    """Median and worst in milliseconds."""
    return f"median {statistics.median(seconds) * 1e3:.3f} ms, worst {max(seconds) * 1e3:.3f} ms"


def ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Median over median."""
    return statistics.median(first) / statistics.median(second)


def verdict(name: str, value: float, most: float) -> bool:
    """Print a ratio beside its target; answers whether it is met."""
    met = value <= most
    print(f"  {name}: {value:.2f} x (target: at most {most:g} x) {'met' if met else 'MISSED'}")
    return met
