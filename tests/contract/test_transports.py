"""The fake transport under its contract, by itself and behind its guard."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from sotbus.api import OutcomeUnknownError
from sotbus.guards import GuardedTransport
from sotbus.testing import Ends, FakeInbound, FakeTransport, TransportContract


class TestFake(TransportContract):
    @pytest.fixture
    def ends(self) -> Ends:
        return Ends(*FakeTransport.pair("near", "far"), "near", "far")


class TestGuarded(TransportContract):
    @pytest.fixture
    def ends(self) -> Ends:
        near, far = (GuardedTransport(f"plugin {end.name!r}", end, print) for end in FakeTransport.pair("a", "b"))
        return Ends(near, far, "a", "b")


@pytest.fixture
async def pair(nursery: trio.Nursery) -> tuple[FakeTransport, FakeTransport, FakeInbound]:
    """Two ends that serve, and what the far one hands requests to."""
    near, far = FakeTransport.pair()
    inbound = FakeInbound()
    nursery.start_soon(near.serve, FakeInbound())
    nursery.start_soon(far.serve, inbound)
    await trio.testing.wait_all_tasks_blocked()
    return near, far, inbound


Pair = tuple[FakeTransport, FakeTransport, FakeInbound]


async def test_a_request_that_the_fake_loses_is_not_seen(pair: Pair, autojump_clock: object) -> None:
    near, _, inbound = pair
    near.lose_requests = 1
    with pytest.raises(OutcomeUnknownError):
        await near.request("far", b"one", 5.0)
    assert inbound.requests == []
    assert await near.request("far", b"two", 5.0) == b"two"


async def test_a_request_whose_answer_the_fake_loses_is_seen(pair: Pair, autojump_clock: object) -> None:
    near, _, inbound = pair
    near.lose_answers = 1
    with pytest.raises(OutcomeUnknownError):
        await near.request("far", b"one", 5.0)
    assert inbound.requests == [("near", b"one")]
    assert await near.request("far", b"two", 5.0) == b"two"


async def test_the_fake_delays_a_request_by_the_clock(pair: Pair, autojump_clock: object) -> None:
    near, _, inbound = pair
    near.delay_s = 3.0
    began = trio.current_time()
    assert await near.request("far", b"one", 5.0) == b"one"
    assert trio.current_time() - began == pytest.approx(3.0)
    with pytest.raises(OutcomeUnknownError):
        await near.request("far", b"two", 2.0)
    assert inbound.requests == [("near", b"one")]
