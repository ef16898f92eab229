"""One task that watches many deadlines: whose wait ends when, and what is left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from sotbus.node.deadlines import Deadlines, Wait


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[Deadlines, trio.Nursery]]:
    deadlines = Deadlines()
    async with trio.open_nursery() as nursery:
        await nursery.start(deadlines.run)
        yield deadlines, nursery
        nursery.cancel_scope.cancel()


async def test_each_wait_ends_at_its_own_deadline_in_whatever_order_they_came(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ended: list[tuple[float, float]] = []
    async with watched() as (deadlines, _):
        began = trio.current_time()

        async def wait(seconds: float) -> None:
            await deadlines.wait(Wait(began + seconds))
            ended.append((seconds, round(trio.current_time() - began, 6)))

        async with trio.open_nursery() as waiters:
            for seconds in (5, 1, 9, 1, 0, -1, 3):
                waiters.start_soon(wait, seconds)
            await trio.sleep(2)
            waiters.start_soon(wait, 2.5)
        assert sorted(ended) == [(-1, 0), (0, 0), (1, 1), (1, 1), (2.5, 2.5), (3, 3), (5, 5), (9, 9)]
        assert repr(deadlines) == "<Deadlines of 0 waits>"


async def test_what_comes_before_the_deadline_ends_the_wait_and_nothing_is_left_of_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with watched() as (deadlines, nursery):
        wait = Wait(trio.current_time() + 10)
        nursery.start_soon(deadlines.wait, wait)
        await trio.sleep(1)
        assert repr(deadlines) == "<Deadlines of 1 waits>"
        wait.over.set()
        await trio.sleep(0)
        await trio.sleep(0)
        assert repr(deadlines) == "<Deadlines of 0 waits>"
        other = Wait(trio.current_time() + 20)  # the task still sleeps until the first one's deadline
        with trio.fail_after(20.5):
            await deadlines.wait(other)
        assert trio.current_time() >= other.deadline


async def test_a_wait_that_is_cancelled_is_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    async with watched() as (deadlines, _):
        with trio.move_on_after(1):
            await deadlines.wait(Wait(trio.current_time() + 10))
        assert repr(deadlines) == "<Deadlines of 0 waits>"


@pytest.mark.parametrize("late", [False, True])
async def test_a_wait_that_stands_when_the_watch_begins_is_watched(
    autojump_clock: trio.testing.MockClock, late: bool
) -> None:
    deadlines = Deadlines()
    async with trio.open_nursery() as nursery:
        began = trio.current_time()

        async def wait() -> None:
            await deadlines.wait(Wait(began + 3))
            nursery.cancel_scope.cancel()

        nursery.start_soon(wait)
        await trio.sleep(4 if late else 1)
        nursery.start_soon(deadlines.run)
    assert trio.current_time() - began == (4 if late else 3)
