"""The mean of what happens: what it comes to, and how it forgets."""

from __future__ import annotations

import math

import pytest

from sotbus.node.rate import SPAN_S, Rate


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_steady_flow_is_its_rate() -> None:
    clock = Clock()
    rate = Rate(clock)
    assert rate.per_s() == 0
    for _ in range(10 * int(SPAN_S) * 5):
        clock.now += 0.2
        rate.note()
    assert rate.per_s() == pytest.approx(5.0, rel=0.01)


def test_a_burst_counts_for_a_minute_and_is_forgotten() -> None:
    clock = Clock()
    rate = Rate(clock)
    rate.note(60)
    assert rate.per_s() == pytest.approx(1.0)
    clock.now += SPAN_S
    assert rate.per_s() == pytest.approx(math.exp(-1))
    clock.now += 20 * SPAN_S
    assert rate.per_s() < 1e-8
