"""What a link delivery makes of answers, of silence, and of too many requests at a time, on the fake transport."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from sotbus import link_ops
from sotbus.contracts import Destination, Filing, NotSentError, OutcomeUnknownError
from sotbus.errors import BadRequest, Busy, FilingFailed, Refused
from sotbus.link_delivery import LinkDelivery, filing_again, request_of
from sotbus.link_ops import MAX_BYTES, VERSION, decode_request, encode_answer, encode_request
from sotbus.testing import FakeInbound, FakeTransport

OK = encode_answer({"ok": True})
FILING = Filing("a", "b", "proj", "text é", node="far")

Answer = Callable[[str, bytes], Awaitable[bytes]]


def always(answer: bytes) -> Answer:
    async def answered(_peer: str, _request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return answer

    return answered


class Link:
    """A delivery, the fake transport under it, and the far node."""

    def __init__(self, answer: Answer, limit: int) -> None:
        self.transport, self.far_end = FakeTransport.pair()
        self.delivery = LinkDelivery(self.transport, max_in_flight=limit)
        self.far = FakeInbound(answer)

    def count(self, name: str) -> object:
        return self.delivery.statistics()[name]


@asynccontextmanager
async def link(answer: Answer | bytes = OK, limit: int = 64) -> AsyncIterator[Link]:
    made = Link(always(answer) if isinstance(answer, bytes) else answer, limit)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.far_end.serve, made.far)
        await trio.testing.wait_all_tasks_blocked()
        yield made
        nursery.cancel_scope.cancel()


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Under a clock that jumps: no test waits."""
    trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0.05))


def test_a_message_is_asked_for_in_an_envelope_with_version_and_op() -> None:
    async def test() -> None:
        async with link() as made:
            receipt = await made.delivery.deliver(FILING, 5.0)
            assert (receipt.outcome, receipt.where) == ("delivered", "far")
            (peer, request), *more = made.far.requests
            assert (peer, more) == ("near", [])
            assert request.startswith(b'{"v":1,"op":"comm.file","payload":{"from":"a","to":"b","text":"text \xc3\xa9"')
            assert decode_request(request)[1] == request_of(FILING)
            assert made.count("asked") == made.count("answered") == 1
            assert made.count("in_flight") == {}
            assert set(made.delivery.statistics()["round_trip_s"]) == {"far"}

    run(test)


def test_it_reaches_what_its_transport_reaches() -> None:
    delivery = LinkDelivery(FakeTransport.pair()[0])
    assert delivery.reaches(Destination("far", "b"))
    assert not delivery.reaches(Destination("elsewhere", "b"))
    assert not delivery.reaches(Destination("near", "b"))


def test_a_request_says_what_a_filing_says() -> None:
    plain = request_of(Filing("a", "b", "proj", "t"))
    assert plain == {"from": "a", "to": "b", "text": "t", "broadcast": False}
    whole = Filing("a", "b", "proj", "t", True, "m1", "far")
    assert request_of(whole, forwarded=True) == {
        **plain,
        "broadcast": True,
        "forwarded": True,
        "sotbus": {"id": "m1"},
    }
    assert filing_again(request_of(whole), "far") == Filing("a", "b", "daemon", "t", True, "m1", "far")


def test_past_the_limit_a_sender_is_told_busy_at_once_and_nothing_is_sent() -> None:
    async def test() -> None:
        gate = trio.Event()

        async def wait(_peer: str, _request: bytes) -> bytes:
            await gate.wait()
            return OK

        async with link(wait, limit=3) as made, trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(made.delivery.deliver, FILING, 100.0)
            await made.far.until(lambda far: len(far.requests) == 3)
            began = trio.current_time()
            for _ in range(2):
                with pytest.raises(Busy, match="nothing was sent"):
                    await made.delivery.deliver(FILING, 100.0)
            assert trio.current_time() == began
            assert made.count("in_flight") == {"far": 3}
            assert (len(made.far.requests), made.count("busy")) == (3, 2)
            gate.set()
            await trio.testing.wait_all_tasks_blocked()
            await made.delivery.deliver(FILING, 100.0)  # there is room again
            assert made.count("in_flight") == {}

    run(test)


@pytest.mark.parametrize("end", ["lost request", "lost answer", "no answer"])
def test_no_answer_in_the_bound_is_an_unknown_outcome(end: str) -> None:
    async def test() -> None:
        async def never(_peer: str, _request: bytes) -> bytes:
            await trio.sleep_forever()
            raise AssertionError

        async with link(never if end == "no answer" else OK, limit=1) as made:
            made.transport.lose_requests = int(end == "lost request")
            made.transport.lose_answers = int(end == "lost answer")
            began = trio.current_time()
            with pytest.raises(OutcomeUnknownError):
                await made.delivery.deliver(FILING, 5.0)
            assert trio.current_time() - began == pytest.approx(5.0, abs=0.1)
            assert made.count("unknown") == 1
            assert made.count("in_flight") == {}
            assert len(made.far.requests) == (0 if end == "lost request" else 1), "nothing is tried twice"

    run(test)


def test_a_transport_that_keeps_no_deadline_is_held_to_it() -> None:
    class Hung:
        def reaches(self, node: str) -> bool:
            return True

        async def request(self, node: str, request: bytes, deadline_s: float) -> bytes:
            await trio.sleep_forever()
            raise AssertionError

        async def serve(self, inbound: object) -> None:
            await trio.sleep_forever()

    async def test() -> None:
        delivery = LinkDelivery(Hung())
        with pytest.raises(OutcomeUnknownError, match="far did not answer within 5s"):
            await delivery.deliver(FILING, 5.0)
        assert delivery.statistics()["unknown"] == 1
        assert delivery.statistics()["in_flight"] == {}

    run(test)


def test_a_transport_that_lets_its_own_timeout_out_is_one_that_did_not_answer() -> None:
    class Timed:
        def reaches(self, node: str) -> bool:
            return True

        async def request(self, node: str, request: bytes, deadline_s: float) -> bytes:
            with trio.fail_after(1.0):
                await trio.sleep_forever()
            raise AssertionError

        async def serve(self, inbound: object) -> None:
            await trio.sleep_forever()

    async def test() -> None:
        delivery = LinkDelivery(Timed())
        with pytest.raises(OutcomeUnknownError):
            await delivery.deliver(FILING, 5.0)
        assert (delivery.statistics()["unknown"], delivery.statistics()["in_flight"]) == (1, {})

    run(test)


def test_a_late_answer_is_dropped_and_is_nobody_elses() -> None:
    async def test() -> None:
        async def slow(_peer: str, request: bytes) -> bytes:
            text = decode_request(request)[1]["text"]
            await trio.sleep(7.0 if text == "late" else 4.0)
            return encode_answer({"error": text, "code": "file_failed"})

        async with link(slow) as made:
            with pytest.raises(OutcomeUnknownError):
                await made.delivery.deliver(Filing("a", "b", "p", "late", node="far"), 5.0)
            with pytest.raises(Refused, match=r"\Anext\Z"):  # the late one comes in the middle of this
                await made.delivery.deliver(Filing("a", "b", "p", "next", node="far"), 5.0)
            assert (made.count("answered"), made.count("unknown")) == (1, 1)

    run(test)


def test_a_node_that_cannot_be_reached_is_a_message_that_was_not_sent() -> None:
    async def test() -> None:
        delivery = LinkDelivery(FakeTransport.pair()[0])  # the far end does not serve
        with pytest.raises(NotSentError):
            await delivery.deliver(FILING, 5.0)
        with pytest.raises(NotSentError):
            await delivery.deliver(Filing("a", "b", "p", "t", node="elsewhere"), 5.0)
        assert delivery.statistics()["not_sent"] == 2
        assert delivery.statistics()["in_flight"] == {}

    run(test)


def test_a_cancelled_sender_leaves_no_request_in_flight() -> None:
    async def test() -> None:
        async def never(_peer: str, _request: bytes) -> bytes:
            await trio.sleep_forever()
            raise AssertionError

        async with link(never, limit=1) as made:
            for _ in range(3):
                with trio.move_on_after(1.0) as scope:
                    await made.delivery.deliver(FILING, 5.0)
                assert scope.cancelled_caught
            assert made.count("in_flight") == {}
            assert made.count("busy") == 0

    run(test)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"x",
        b"[]",
        b"{}",
        b'{"v":1}',
        b'{"v":1,"payload":[]}',
        b'{"v":2,"payload":{"ok":true}}',
        b'{"v":1,"payload":{"ok":NaN}}',
        b'{"v":1,"payload":{"ok":"\\ud800"}}',
        b'\xff{"v":1,"payload":{"ok":true}}',
        b"[" * 100_000,
        b'{"v":1,"payload":{"ok":true}}' + b" " * MAX_BYTES,
    ],
    ids=range(12),
)
def test_an_answer_that_is_none_leaves_the_outcome_unknown_and_is_counted(answer: bytes) -> None:
    async def test() -> None:
        async with link(answer) as made:
            with pytest.raises(OutcomeUnknownError, match="far answered what is no answer"):
                await made.delivery.deliver(FILING, 5.0)
            assert (made.count("malformed"), made.count("answered")) == (1, 0)

    run(test)


@pytest.mark.parametrize(
    ("payload", "error", "code", "unknown"),
    [
        ({"error": "gone", "code": "no_live_session"}, Refused, "no_live_session", False),
        ({"error": "half", "code": "file_failed", "outcome_unknown": True}, Refused, "file_failed", True),
        ({"ok": True, "error": "no", "code": "not_here"}, Refused, "not_here", False),
        ({"error": "gone"}, FilingFailed, "file_failed", False),
        ({"error": 7, "code": "x"}, FilingFailed, "file_failed", False),
        ({"ok": False}, FilingFailed, "file_failed", True),
        ({"ok": 1}, FilingFailed, "file_failed", True),
        ({}, FilingFailed, "file_failed", True),
    ],
)
def test_a_refusal_is_the_nodes_own(
    payload: dict[str, object], error: type[Exception], code: str, unknown: bool
) -> None:
    async def test() -> None:
        async with link(encode_answer(payload)) as made:
            with pytest.raises((Refused, FilingFailed)) as caught:
                await made.delivery.deliver(FILING, 5.0)
            assert isinstance(caught.value, error)
            assert isinstance(caught.value, Refused | FilingFailed)
            assert (caught.value.code, caught.value.outcome_unknown) == (code, unknown)
            if error is Refused:
                assert str(caught.value) == payload["error"]
            else:
                assert "far answered neither ok nor a refusal" in str(caught.value)

    run(test)


def test_what_cannot_be_sent_is_not() -> None:
    async def test() -> None:
        async with link() as made:
            for text in ("x" * (MAX_BYTES + 1), "\ud800"):
                with pytest.raises(BadRequest):
                    await made.delivery.deliver(Filing("a", "b", "p", text, node="far"), 5.0)
            assert made.far.requests == []
            assert made.count("asked") == 0

    run(test)


def test_a_request_of_exactly_the_bound_is_carried() -> None:
    room = MAX_BYTES - len(encode_request("op", {"x": ""}))
    request = encode_request("op", {"x": "y" * room})
    assert len(request) == MAX_BYTES
    assert decode_request(request)[0] == "op"
    with pytest.raises(BadRequest, match=f"it has {MAX_BYTES + 1} bytes"):
        encode_request("op", {"x": "y" * (room + 1)})


def test_a_request_of_another_version_is_told_so() -> None:
    with pytest.raises(BadRequest, match=f"version 9, and this node speaks version {VERSION}"):
        decode_request(b'{"v":9,"op":"comm.file","payload":{}}')
    with pytest.raises(BadRequest, match="no op"):
        decode_request(b'{"v":1,"op":7,"payload":{}}')
    with pytest.raises(BadRequest):
        link_ops.encode_answer({"x": float("nan")})


def test_serving_hands_over_what_the_transport_brings() -> None:
    async def test() -> None:
        near, far = FakeTransport.pair()
        inbound = FakeInbound()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(LinkDelivery(near).serve, inbound)
            await trio.testing.wait_all_tasks_blocked()
            assert await far.request("near", b"hello", 5.0) == b"hello"
            nursery.cancel_scope.cancel()
        assert inbound.requests == [("far", b"hello")]

    run(test)
