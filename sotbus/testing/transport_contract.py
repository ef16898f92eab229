"""The contract suite of a transport: two ends of one, and what is asked of either."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

import pytest
import trio

from sotbus.contracts import NotSentError, OutcomeUnknownError, Transport
from sotbus.testing.inbound import Answer, FakeInbound
from sotbus.testing.io_watch import io_of

PATIENT_S = 30.0
"""A deadline that only a fault reaches, in seconds."""

ENDS_S = 5.0
"""How long an end that is told to stop may go on, in seconds."""

MIB = 1 << 20

REQUESTS = {
    "empty": b"",
    "newline": b"\n",
    "every byte": bytes(range(256)),
    "64 KiB": bytes(range(256)) * 256,
    "1 MiB": bytes(range(255, -1, -1)) * (MIB // 256),
}


@dataclass(frozen=True)
class Ends:
    """Two ends of a transport that reach each other, each with the name of the node that it serves."""

    near: Transport
    far: Transport
    near_name: str
    far_name: str


class TransportContract:
    """Subclass it as ``class TestMine(TransportContract)`` and give the fixture ``ends``.

    Nothing is served when a test begins; a test serves the ends itself, and may serve one again.
    """

    late_s = 2.0
    """How much later than its deadline an answer may come, in seconds."""

    quick_s = 0.5
    """The deadline of what gets no answer, in seconds."""

    link_s = 10.0
    """How long a connection may take to come up, and to be seen to be down, in seconds."""

    @pytest.fixture
    def ends(self) -> Ends:
        """The two ends under test."""
        pytest.fail(f"{type(self).__name__} must give the fixture `ends`: an Ends, the two ends to test")

    @pytest.mark.trio
    async def test_it_has_the_members_of_a_transport(self, ends: Ends) -> None:
        assert isinstance(ends.near, Transport)
        assert isinstance(ends.far, Transport)

    @pytest.mark.trio
    async def test_it_says_without_io_whether_it_reaches_a_node(self, ends: Ends) -> None:
        assert io_of(lambda: ends.near.reaches(ends.far_name)) == (True, [])
        assert io_of(lambda: ends.far.reaches(ends.near_name)) == (True, [])
        assert io_of(lambda: ends.near.reaches("no-such-node.contract")) == (False, [])

    @pytest.mark.trio
    async def test_a_request_is_answered_by_the_other_end(self, ends: Ends) -> None:
        async def answer(peer: str, request: bytes) -> bytes:
            return b"for " + peer.encode() + b": " + request[::-1]

        async with _served(ends, self.link_s, FakeInbound(answer)) as (_, far):
            assert await self._ask(ends.near, ends.far_name, b"abc") == b"for " + ends.near_name.encode() + b": cba"
            assert far.requests == [(ends.near_name, b"abc")]

    @pytest.mark.trio
    async def test_each_end_may_ask_the_other(self, ends: Ends) -> None:
        async with _served(ends, self.link_s) as (near, far):
            assert await self._ask(ends.far, ends.near_name, b"from far") == b"from far"
            assert await self._ask(ends.near, ends.far_name, b"from near") == b"from near"
            assert near.requests == [(ends.far_name, b"from far")]
            assert far.requests == [(ends.near_name, b"from near")]

    @pytest.mark.trio
    @pytest.mark.parametrize("size", REQUESTS)
    async def test_bytes_go_over_and_come_back_as_they_are(self, ends: Ends, size: str) -> None:
        async with _served(ends, self.link_s):
            answer = await self._ask(ends.near, ends.far_name, REQUESTS[size])
            assert type(answer) is bytes
            assert answer == REQUESTS[size]

    @pytest.mark.trio
    async def test_requests_side_by_side_each_get_their_own_answer(self, ends: Ends) -> None:
        async def answer(_peer: str, request: bytes) -> bytes:
            await trio.sleep(int(request) % 3 * 0.01)
            return b"answer " + request

        answers: dict[int, bytes] = {}

        async def ask(number: int) -> None:
            answers[number] = await self._ask(ends.near, ends.far_name, b"%d" % number)

        async with _served(ends, self.link_s, FakeInbound(answer)) as (_, far):
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(ask, number)
            assert answers == {number: b"answer %d" % number for number in range(20)}
            assert len(far.requests) == 20

    @pytest.mark.trio
    async def test_a_request_to_an_unknown_node_is_not_sent(self, ends: Ends) -> None:
        async with _served(ends, self.link_s):
            with pytest.raises(NotSentError):
                await self._ask(ends.near, "no-such-node.contract", b"hello", self.quick_s)

    @pytest.mark.trio
    async def test_a_request_that_gets_no_answer_has_an_unknown_outcome_at_the_deadline(self, ends: Ends) -> None:
        async with _served(ends, self.link_s, FakeInbound(_never)) as (_, far):
            with pytest.raises(OutcomeUnknownError):
                await self._ask(ends.near, ends.far_name, b"hello", self.quick_s)
            assert far.requests == [(ends.near_name, b"hello")]

    @pytest.mark.trio
    async def test_a_request_that_was_not_sent_is_never_seen(self, ends: Ends) -> None:
        sent = True
        async with _serving(ends.near, FakeInbound()):
            try:
                await self._ask(ends.near, ends.far_name, b"to nobody", self.quick_s)
            except NotSentError:
                sent = False
            except OutcomeUnknownError:
                pass
            else:
                pytest.fail("an end that does not serve has answered")
            far = FakeInbound()
            async with _serving(ends.far, far):
                await _within(self.link_s, far, lambda: ends.near_name in far.peers)
                assert await self._ask(ends.near, ends.far_name, b"to somebody") == b"to somebody"
                seen = [request for _, request in far.requests]
                assert seen.count(b"to nobody") <= sent

    @pytest.mark.trio
    async def test_the_answer_to_a_cancelled_request_is_dropped(self, ends: Ends) -> None:
        late = trio.Event()
        asking = trio.CancelScope()

        async def ask() -> None:
            with asking:
                await self._ask(ends.near, ends.far_name, b"slow")

        async with _served(ends, self.link_s, FakeInbound(_after(late))) as (_, far):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await _within(self.link_s, far, lambda: bool(far.requests))
                asking.cancel()
                nursery.cancel_scope.deadline = trio.current_time() + self.late_s
            assert asking.cancelled_caught
            late.set()
            assert await self._ask(ends.near, ends.far_name, b"next") == b"next"

    @pytest.mark.trio
    async def test_an_answer_past_the_deadline_is_dropped(self, ends: Ends) -> None:
        late = trio.Event()
        async with _served(ends, self.link_s, FakeInbound(_after(late))):
            with pytest.raises(OutcomeUnknownError):
                await self._ask(ends.near, ends.far_name, b"slow", self.quick_s)
            late.set()
            assert await self._ask(ends.near, ends.far_name, b"next") == b"next"

    @pytest.mark.trio
    async def test_a_peer_is_up_while_it_serves_and_down_after(self, ends: Ends) -> None:
        far = FakeInbound()
        async with _serving(ends.far, far):
            async with _serving(ends.near, FakeInbound()):
                await _within(self.link_s, far, lambda: bool(far.changes))
            await _within(self.link_s, far, lambda: not far.peers)
        assert far.changes[0] == ("up", ends.near_name)
        assert far.changes[-1] == ("down", ends.near_name)
        assert all(one[0] != other[0] for one, other in pairwise(far.changes))

    @pytest.mark.trio
    async def test_serving_ends_when_cancelled_and_may_begin_again(self, ends: Ends) -> None:
        for number in range(3):
            with trio.fail_after(2 * self.link_s + self.late_s):
                async with _served(ends, self.link_s):
                    request = b"round %d" % number
                    assert await self._ask(ends.near, ends.far_name, request) == request

    @pytest.mark.trio
    async def test_serving_ends_when_cancelled_in_the_middle_of_an_answer(self, ends: Ends) -> None:
        async def ask() -> None:
            with pytest.raises((NotSentError, OutcomeUnknownError)):
                await self._ask(ends.near, ends.far_name, b"hello", self.quick_s)

        near, far = FakeInbound(), FakeInbound(_never)
        async with _serving(ends.near, near), trio.open_nursery() as nursery, _serving(ends.far, far):
            await _within(self.link_s, near, lambda: bool(near.peers))
            await _within(self.link_s, far, lambda: bool(far.peers))
            nursery.start_soon(ask)
            await _within(self.link_s, far, lambda: bool(far.requests))

    async def _ask(self, end: Transport, node: str, request: bytes, deadline_s: float = PATIENT_S) -> bytes:
        """One request; an end that has no outcome long after its deadline fails the test."""
        with trio.fail_after(deadline_s + self.late_s):
            return await end.request(node, request, deadline_s)


@asynccontextmanager
async def _serving(transport: Transport, inbound: FakeInbound) -> AsyncIterator[None]:
    """One end serves meanwhile; it neither ends before nor goes on after."""
    scope, ended = trio.CancelScope(), trio.Event()

    async def serve() -> None:
        with scope:
            await transport.serve(inbound)
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        try:
            yield
            assert not ended.is_set(), "serve returned though nobody cancelled it"
        finally:
            scope.cancel()
        with trio.fail_after(ENDS_S):
            await ended.wait()


@asynccontextmanager
async def _served(
    ends: Ends, link_s: float, far: FakeInbound | None = None
) -> AsyncIterator[tuple[FakeInbound, FakeInbound]]:
    """Both ends serve and see each other; what they hand requests to."""
    near, far = FakeInbound(), far or FakeInbound()
    async with _serving(ends.near, near), _serving(ends.far, far):
        await _within(link_s, near, lambda: ends.far_name in near.peers)
        await _within(link_s, far, lambda: ends.near_name in far.peers)
        yield near, far


async def _within(seconds: float, inbound: FakeInbound, condition: Callable[[], bool]) -> None:
    """Wait for a condition on what an end was handed."""
    with trio.fail_after(seconds):
        await inbound.until(lambda _: condition())


async def _never(_peer: str, _request: bytes) -> bytes:
    """An answer that does not come."""
    await trio.sleep_forever()


def _after(event: trio.Event) -> Answer:
    """Answers the request itself; ``b"slow"`` only after an event."""

    async def answer(_peer: str, request: bytes) -> bytes:
        if request == b"slow":
            await event.wait()
        return request

    return answer
