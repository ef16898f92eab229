"""A folder as its node looks at it: who shares a look, and what a caller that goes away leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from world import World

from sotbus.comm import membership
from sotbus.node.folder_view import RECENT_S, FolderView


@pytest.fixture
def view(world: World) -> FolderView:
    membership.join(world.client("a"), name="a")
    return FolderView(world.client("node"), trio.CapacityLimiter(4))


def slow(view: FolderView, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event, list[float]]:
    """Each look says that it has begun, and waits to go on; and what they were asked."""
    begun, go_on, looks = threading.Event(), threading.Event(), list[float]()
    real = view._look

    def look(at: float) -> Any:
        looks.append(at)
        begun.set()
        assert go_on.wait(20)
        return real(at)

    monkeypatch.setattr(view, "_look", look)
    return begun, go_on, looks


async def test_many_who_ask_at_once_share_a_look_and_it_is_used_for_a_while(
    view: FolderView, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, looks = slow(view, monkeypatch)
    assert view.recent() is None
    seen: list[object] = []

    async def ask() -> None:
        seen.append(await view.look())

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(ask)
        await trio.to_thread.run_sync(begun.wait, 20)
        go_on.set()
    assert len(looks) <= 2, "a slow machine may take longer than the look is good for"
    again = await view.look()
    assert "a" in again.agents
    assert view.recent() in (again, None)
    await trio.sleep(RECENT_S * 1.5)
    assert view.recent() is None


async def test_a_caller_that_goes_away_while_a_look_hangs_leaves_the_next_one_its_turn(
    view: FolderView, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, looks = slow(view, monkeypatch)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(view.look)
        await trio.to_thread.run_sync(begun.wait, 20)
        nursery.cancel_scope.cancel()
    with trio.move_on_after(0.05) as impatient:
        await view.look()
    assert impatient.cancelled_caught, "the look before still has the turn"
    go_on.set()
    with trio.fail_after(20):
        assert "a" in (await view.look()).agents
    assert len(looks) == 2


async def test_a_look_that_is_called_off_before_it_begins_gives_its_turn_back_once(
    view: FolderView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread was given the work and has not run yet when its caller is cancelled."""
    late: list[Callable[[], object]] = []

    async def run_sync(work: Callable[[], object], **_: object) -> None:
        late.append(work)
        await trio.sleep_forever()

    with monkeypatch.context() as patch, trio.move_on_after(0.01):
        patch.setattr(trio.to_thread, "run_sync", run_sync)
        await view.look()
    with pytest.raises(RuntimeError, match="called off"):
        await trio.to_thread.run_sync(late[0])
    await trio.testing.wait_all_tasks_blocked()
    assert view._turn.value == 1
    assert "a" in (await view.look()).agents
