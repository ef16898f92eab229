"""The parts of the ZeroMQ plugin that need no socket: frames, waits, addresses, settings, a link's own clockwork."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import trio
import trio.testing
import zmq
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from sotbus_zmq import dialler, frames, monitor
from sotbus_zmq.backoff import Backoff
from sotbus_zmq.endpoint import Endpoint
from sotbus_zmq.frames import Frame, Kind, MalformedError, OtherVersionError, Reason
from sotbus_zmq.key_file import KeyPair
from sotbus_zmq.link import Answering, BusyError, Link
from sotbus_zmq.monitor import Event
from sotbus_zmq.peer_book import PeerBook
from sotbus_zmq.peer_state import PeerState
from sotbus_zmq.pump import BATCH, Pump
from sotbus_zmq.serving import Serving
from sotbus_zmq.settings import Settings
from sotbus_zmq.statistics import Counts
from sotbus_zmq.tcp import Newcomers, Tcp

from sotbus.api import BadRequest, NotSentError, OutcomeUnknownError
from sotbus.errors import ConfigError
from sotbus.peers import Peer
from sotbus.testing import FakeInbound
from sotbus.typed_table import typed_table

# Frames


def test_a_frame_has_its_bytes_where_the_page_says() -> None:
    assert frames.encode(Kind.REQUEST, 0x0102030405060708, b"body") == b"\x01\x03\x01\x02\x03\x04\x05\x06\x07\x08body"
    assert [(kind.name, kind.value) for kind in Kind] == [
        ("HELLO", 1), ("WELCOME", 2), ("REQUEST", 3), ("ANSWER", 4), ("REFUSED", 5), ("LOST", 6), ("PING", 7),
        ("PONG", 8), ("BYE", 9),
    ]  # fmt: skip


@examples(deadline=None)
@given(st.sampled_from(Kind), st.integers(0, 2**64 - 1), st.binary(max_size=100))
def test_a_frame_is_read_as_it_was_written(kind: Kind, number: int, body: bytes) -> None:
    if kind not in frames.BODIES:
        body = b""
    assert frames.decode(frames.encode(kind, number, body)) == Frame(kind, number, body)


@examples(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_a_frame_or_malformed(data: bytes) -> None:
    try:
        frame = frames.decode(data)
    except MalformedError:
        return
    assert frames.encode(*frame)[1:] == data[1:]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", MalformedError),
        (b"\x01\x03" + b"\0" * 7, MalformedError),
        (b"\x01\x00" + b"\0" * 8, MalformedError),
        (b"\x01\x0a" + b"\0" * 8, MalformedError),
        (b"\x01\x07" + b"\0" * 8 + b"x", MalformedError),
        (b"\x02\x01" + b"\0" * 8, OtherVersionError),
        (b"\x00\x03" + b"\0" * 8, OtherVersionError),
        (bytes(frames.MAX_FRAME_BYTES + 1), MalformedError),
    ],
)
def test_what_is_no_frame_is_said(data: bytes, error: type[MalformedError]) -> None:
    with pytest.raises(error) as caught:
        frames.decode(data)
    assert type(caught.value) is error


def test_a_goodbye_is_understood_in_any_version() -> None:
    assert frames.decode(b"\x07\x09" + (4).to_bytes(8, "big") + b"more") == Frame(Kind.BYE, Reason.VERSION, b"more")
    assert "speaks another version" in frames.reason_words(Reason.VERSION)
    assert frames.reason_words(99) == "its reason 99 is not known here"
    assert all(reason.words for reason in Reason)


# Waits


def test_waits_double_up_to_the_longest() -> None:
    backoff = Backoff(1.0, 30.0, 60.0)
    assert [backoff.wait_s() for _ in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]


def test_waits_start_over_after_a_connection_that_was_good() -> None:
    backoff = Backoff(1.0, 30.0, 60.0)
    assert [backoff.wait_s() for _ in range(4)] == [1, 2, 4, 8]
    assert backoff.wait_s(59.9) == 16
    assert backoff.wait_s(60.0) == 1
    assert backoff.wait_s(0.0) == 2


class Dials:
    """Stands in for dialling: how long each connection lasts, None for one that fails; when each was made."""

    def __init__(self, lasts: Sequence[float | None]) -> None:
        self.lasts = lasts
        self.at: list[float] = []

    async def __call__(self, serving: Serving, state: PeerState) -> float | None:
        self.at.append(trio.current_time())
        if len(self.at) > len(self.lasts):
            await trio.sleep_forever()
        lasted = self.lasts[len(self.at) - 1]
        await trio.sleep(lasted or 0)
        return lasted


async def test_a_peer_is_dialled_again_after_1_s_doubling_to_30_s_and_from_the_start_after_60_s_of_connection(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    dials = Dials([None, None, None, None, None, None, None, 59.0, 60.0, None])
    monkeypatch.setattr(dialler, "_dial", dials)
    serving = Serving(None, nursery, FakeInbound(), Settings(), KeyPair("", ""), 1, {})  # type: ignore[arg-type]
    state = PeerState(Peer("bob", "far", "0" * 40, "peer", "tcp://far:1"), 1)
    began = trio.current_time()
    with trio.move_on_after(1000):
        await dialler.keep_dialled(serving, state)
    waits = [later - earlier for earlier, later in zip([began, *dials.at], dials.at, strict=False)]
    assert waits == pytest.approx([0, 1, 2, 4, 8, 16, 30, 30, 59 + 30, 60 + 1, 2])


# Addresses


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://labhost:7710", "labhost", 7710),
        ("tcp://10.0.0.1:1", "10.0.0.1", 1),
        ("tcp://[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
    ],
)
def test_an_address_to_dial(text: str, host: str, port: int) -> None:
    endpoint = Endpoint.to_dial(text)
    assert (endpoint.host, endpoint.port, str(endpoint)) == (host, port, text)
    assert endpoint.is_v6 == (":" in host)


@pytest.mark.parametrize("text", ["", "x", "udp://a:1", "tcp://a", "tcp://a:0", "tcp://*:1", "tcp://:1", "tcp://a:65536",
                                  "tcp://::1:1", "tcp://[a]:1", "tcp://a/b:1", "tcp://a:1:2", "tcp://a:٣"])  # fmt: skip
def test_what_cannot_be_dialled(text: str) -> None:
    with pytest.raises(ValueError, match="tcp://HOST:PORT"):
        Endpoint.to_dial(text)


@pytest.mark.parametrize("text", ["tcp://0.0.0.0:7710", "tcp://*:7710", "tcp://127.0.0.1:0", "tcp://[::]:7710"])
def test_an_address_to_listen_on(text: str) -> None:
    assert str(Endpoint.to_listen(text)) == text


@pytest.mark.parametrize("text", ["tcp://labhost:7710", "tcp://eth0:1", "tcp://1.2.3.4", "ipc:///tmp/x", "inproc://x"])
def test_what_cannot_be_listened_on(text: str) -> None:
    with pytest.raises(ValueError, match="tcp://"):
        Endpoint.to_listen(text)


# Settings


def settings(**table: object) -> Settings:
    return typed_table("f", "zmq", table, {}, Settings)


def test_settings_have_the_defaults_of_the_page() -> None:
    assert settings() == Settings(None, None, 2.0, 6.0, 1.0, 30.0, 60.0)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"listen": "tcp://labhost:7710"}, "listen is 'tcp://labhost:7710'; expected tcp://ADDRESS:PORT"),
        ({"listen": "*:7710"}, "listen is '*:7710'; expected tcp://HOST:PORT"),
        ({"listen": 7710}, "listen is 7710; expected text in quotes"),
        ({"key_file": "node.key"}, "key_file is 'node.key'; expected an absolute path"),
        ({"heartbeat_s": 0}, "heartbeat_s is 0; expected more than 0"),
        ({"heartbeat_s": 6.0}, "dead_after_s is 6; expected more than heartbeat_s"),
        ({"heartbeat_s": 7.0}, "dead_after_s is 6; expected at least heartbeat_s, 7"),
        ({"reconnect_min_s": -1}, "reconnect_min_s is -1; expected more than 0"),
        ({"reconnect_min_s": 31}, "reconnect_max_s is 30; expected at least reconnect_min_s, 31"),
        ({"good_after_s": -1}, "good_after_s is -1; expected 0 or more"),
        ({"listn": "x"}, "has no key 'listn'; did you mean 'listen'?"),
    ],
)
def test_a_setting_that_cannot_be_is_said(table: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(**table)
    assert said in str(caught.value)


# What a monitor's event means


@pytest.mark.parametrize(
    ("event", "connected", "kind"),
    [
        (Event(zmq.EVENT_CLOSED, 17), False, "nobody listens"),
        (Event(zmq.EVENT_CLOSED, 17), True, None),
        (Event(zmq.EVENT_CONNECTED, 17), False, None),
        (Event(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 11), True, "no answer"),
        (Event(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 32), True, "wrong server key"),
        (Event(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 104), True, "wrong server key"),
        (Event(zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400), True, "not on its list"),
        (Event(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, 0x11000002), True, "not a CURVE link"),
        (Event(zmq.EVENT_DISCONNECTED, 17), True, "closed"),
    ],
)
def test_a_dials_failure_has_a_kind(event: Event, connected: bool, kind: str | None) -> None:
    failure = monitor.dial_failure(event, connected=connected)
    assert (failure.kind if failure else None) == kind


# The TCP sockets under a listener


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection; the first was accepted."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as far:
        near, _ = server.accept()
        far.settimeout(5)
        with near:
            yield near, far


Pair = tuple[socket.socket, socket.socket]


def test_a_connection_is_hung_up_and_its_descriptor_stays(pair: Pair) -> None:
    near, far = pair
    tcp = Tcp.accepted(near.fileno(), near.getsockname()[1])
    assert tcp is not None
    tcp.hang_up()
    assert far.recv(1) == b""
    os.fstat(near.fileno())
    tcp.hang_up()


def test_what_has_come_into_a_descriptors_place_is_let_alone(pair: Pair, tmp_path: Path) -> None:
    near, _ = pair
    fd = near.fileno()
    tcp = Tcp.accepted(fd, near.getsockname()[1])
    assert tcp is not None
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as other:
        later, _ = server.accept()
        with later:
            later.settimeout(5)
            os.dup2(other.fileno(), fd)
            tcp.hang_up()
            other.send(b"x")
            assert later.recv(1) == b"x"
    for flags, path in ((os.O_RDWR | os.O_CREAT, str(tmp_path / "file")),):
        file = os.open(path, flags)
        os.dup2(file, fd)
        os.close(file)
        tcp.hang_up()
        os.write(fd, b"x")
    assert Tcp.accepted(fd, 1) is None


def test_only_a_listeners_own_connections_count(pair: Pair) -> None:
    near, _ = pair
    assert Tcp.accepted(near.fileno(), near.getsockname()[1] + 1) is None
    assert Tcp.accepted(-1, 1) is None
    one, other = socket.socketpair()
    with one, other:
        assert Tcp.accepted(one.fileno(), 0) is None


async def test_newcomers_are_ended_when_their_time_is_over_unless_they_have_said_hello(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[tuple[int, float]] = []
    began = trio.current_time()

    def hang_up(tcp: Tcp) -> None:
        ended.append((tcp.fd, trio.current_time() - began))

    monkeypatch.setattr(Tcp, "hang_up", hang_up)
    newcomers = Newcomers(10.0, lambda tcp: tcp.fd == 2)
    nursery.start_soon(newcomers.run)
    for fd in (1, 2, 3):
        newcomers.note(Tcp(fd, fd))
        await trio.sleep(1)
    await trio.sleep(20)
    newcomers.note(Tcp(4, 4))
    await trio.sleep(20)
    assert [fd for fd, _ in ended] == [1, 3, 4]
    assert [at for _, at in ended] == pytest.approx([10, 12, 33])
    assert (len(newcomers), newcomers.ended) == (0, 3)


# The allow-list


ONE, TWO, THREE = ("1" * 40, "2" * 40, "3" * 40)


@pytest.mark.parametrize(
    ("peers", "said"),
    [
        ([Peer("a", "x", ONE), Peer("a", "X", TWO)], "the peer a.X is listed twice"),
        ([Peer("a", "x", ONE), Peer("b", "y", ONE)], "the peers a.x and b.y have one public key"),
        ([Peer("ann", "NEAR", ONE)], "the peer ann.NEAR is this node itself"),
        ([Peer("a", "x", THREE)], "the public key of the peer a.x is this node's own"),
        ([Peer("a", "x", "short")], "the public key of the peer a.x is not 40 characters of Z85"),
        ([Peer("a", "x", ONE, "peer", "x:1")], "the address of the peer a.x is 'x:1'; expected tcp://HOST:PORT"),
    ],
)
def test_peers_that_contradict_each_other_are_refused_and_nothing_changes(peers: list[Peer], said: str) -> None:
    book = PeerBook("ann.near", 1)
    book.swap(book.judge([Peer("old", "one", TWO)], None))
    with pytest.raises(BadRequest) as caught:
        book.judge(peers, KeyPair(THREE, "secret"))
    assert said in str(caught.value)
    assert book.find("old.one")
    assert book.of_key(TWO)


def test_a_swap_keeps_who_is_the_same_and_tells_who_is_gone_and_new() -> None:
    book = PeerBook("ann.near", 1)
    same, moved, gone = Peer("a", "same", ONE), Peer("a", "moved", TWO), Peer("a", "gone", THREE)
    book.swap((same, moved, gone))
    kept = book.find("a.same")
    assert kept is not None
    out, new = book.swap((Peer("a", "same", ONE, "hub"), Peer("a", "moved", TWO, "peer", "tcp://x:1")))
    assert [state.name for state in out] == ["a.moved", "a.gone"]
    assert [state.name for state in new] == ["a.moved"]
    assert book.find("a.same") is kept
    assert kept.peer.role == "hub"
    assert book.find("a.gone") is None
    assert book.of_key(THREE) is None


# A link by itself, by a clock of its own


class Wire:
    """What a link sends, and how the connection takes it."""

    def __init__(self) -> None:
        self.sent: list[Frame] = []
        self.error: zmq.ZMQError | None = None

    def __call__(self, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(frames.decode(data))

    def kinds(self) -> list[str]:
        return [frame.kind.name for frame in self.sent]


@pytest.fixture
def wire() -> Wire:
    return Wire()


Ended = list[tuple[str, Reason | None]]


@pytest.fixture
def ended() -> Ended:
    return []


@pytest.fixture
def inbound() -> FakeInbound:
    return FakeInbound()


@pytest.fixture
async def link(wire: Wire, ended: Ended, inbound: FakeInbound, nursery: trio.Nursery) -> Link:
    def note(link: Link) -> None:
        ended.append((link.kind, link.bye))

    return Link("bob.far", "dialled", wire, inbound, nursery, Counts(), Answering(2), note)


async def test_a_link_asks_for_signs_of_life_and_hears_them(
    autojump_clock: trio.testing.MockClock, link: Link, wire: Wire, nursery: trio.Nursery
) -> None:
    nursery.start_soon(link.beat, 2.0, 6.0)
    for _ in range(10):
        await trio.sleep(2.0)
        await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(0.5)
        link.receive(frames.encode(Kind.PONG, wire.sent[-1].number))
    assert wire.kinds() == ["PING"] * 10
    assert link.up
    assert link._counts.round_trip_s == pytest.approx(0.5, abs=0.01)
    assert link._counts.smoothed_s == pytest.approx(0.5, abs=0.01)
    assert link._pings == {}


async def test_a_peer_that_is_heard_is_asked_only_now_and_then_for_the_round_trip(
    autojump_clock: trio.testing.MockClock, link: Link, wire: Wire, nursery: trio.Nursery
) -> None:
    nursery.start_soon(link.beat, 2.0, 6.0)
    for _ in range(41):
        await trio.sleep(1.0)
        link.receive(frames.encode(Kind.PONG, 999))
    assert wire.kinds() == ["PING"] * 4
    assert link.up


async def test_of_two_ends_one_asks_at_a_time(
    autojump_clock: trio.testing.MockClock, inbound: FakeInbound, nursery: trio.Nursery
) -> None:
    ends: list[Link] = []
    pings: list[int] = []

    def to(other: int) -> Callable[[bytes], None]:
        def send(data: bytes) -> None:
            if frames.decode(data).kind is Kind.PING:
                pings.append(other)
            ends[other].receive(data)

        return send

    ends.extend(
        Link("p", "dialled", to(other), inbound, nursery, Counts(), Answering(2), lambda _: None) for other in (1, 0)
    )
    for end in ends:
        nursery.start_soon(end.beat, 2.0, 6.0)
    await trio.sleep(100.5)
    assert 45 <= len(pings) <= 60
    assert all(end.up and end._counts.round_trip_s is not None for end in ends)


async def test_a_silent_peer_is_given_up_after_the_bound(
    autojump_clock: trio.testing.MockClock, link: Link, wire: Wire, ended: Ended
) -> None:
    pending = link.ask(b"x")
    began = trio.current_time()
    await link.beat(2.0, 6.0)
    assert trio.current_time() - began == pytest.approx(6.0)
    assert wire.kinds() == ["REQUEST", "PING", "PING"]
    assert ended == [("silent", Reason.SILENT)]
    assert isinstance(pending.error, OutcomeUnknownError)


async def test_any_frame_is_a_sign_of_life(autojump_clock: trio.testing.MockClock, link: Link) -> None:
    async def talk() -> None:
        for _ in range(5):
            await trio.sleep(5.0)
            link.receive(frames.encode(Kind.PING, 1))

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk)
        await link.beat(2.0, 6.0)
    assert trio.current_time() - began == pytest.approx(25.0 + 6.0)


async def test_time_that_this_process_did_not_run_is_not_the_peers_silence(
    mock_clock: trio.testing.MockClock, link: Link, wire: Wire, nursery: trio.Nursery
) -> None:
    nursery.start_soon(link.beat, 2.0, 6.0)
    await trio.testing.wait_all_tasks_blocked()
    mock_clock.jump(3600.0)
    await trio.testing.wait_all_tasks_blocked()
    assert link.up
    assert wire.kinds() == ["PING"]
    mock_clock.jump(2.0)
    await trio.testing.wait_all_tasks_blocked()
    mock_clock.jump(2.0)
    await trio.testing.wait_all_tasks_blocked()
    assert link.up
    mock_clock.jump(2.0)
    await trio.testing.wait_all_tasks_blocked()
    assert not link.up


@pytest.mark.parametrize(("error", "raised"), [(zmq.Again(), BusyError), (zmq.ZMQError(113), NotSentError)])
async def test_what_the_connection_does_not_take_was_not_sent(
    link: Link, wire: Wire, error: zmq.ZMQError, raised: type[NotSentError]
) -> None:
    wire.error = error
    with pytest.raises(raised, match="nothing was sent") as caught:
        link.ask(b"x")
    assert type(caught.value) is raised
    assert link.up  # until the connection's owner ends it
    assert link._pending == {}
    assert link._counts.asked == 0


async def test_a_peer_that_does_not_read_its_answers_is_given_up(link: Link, wire: Wire, ended: Ended) -> None:
    wire.error = zmq.Again()
    link.receive(frames.encode(Kind.PING, 1))
    assert ended == [("not reading", Reason.SILENT)]


async def test_what_a_bounded_reading_leaves_is_the_readers() -> None:
    heard: list[bytes] = []
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://pair")
        other.connect("inproc://pair")
        pump = Pump(one, lambda parts: heard.append(parts[0].bytes))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pump.run)
            await trio.testing.wait_all_tasks_blocked()
            for number in range(3 * BATCH):
                other.send(b"%d" % number)
            pump.drain(2)
            assert len(heard) == 2 * BATCH
            with trio.fail_after(10):
                while len(heard) < 3 * BATCH:
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert heard == [b"%d" % number for number in range(3 * BATCH)]


MALFORMED = {
    "no frame": b"rubbish",
    "a hello": frames.encode(Kind.HELLO),
    "a welcome": frames.encode(Kind.WELCOME),
    "an answer to nothing": frames.encode(Kind.ANSWER, 7, b"x"),
    "a refusal of nothing": frames.encode(Kind.REFUSED, 1),
    "another version": b"\x02" + frames.encode(Kind.PING)[1:],
}


@pytest.mark.parametrize("what", MALFORMED)
async def test_what_a_peer_may_not_send_ends_the_link_and_is_counted(link: Link, ended: Ended, what: str) -> None:
    link.receive(MALFORMED[what])
    assert ended == [("malformed", Reason.MALFORMED)]
    assert link._counts.malformed == 1


async def test_a_late_answer_is_dropped_and_counted(link: Link, ended: Ended) -> None:
    pending = link.ask(b"x")
    link.forget(pending)
    link.receive(frames.encode(Kind.ANSWER, pending.number, b"late"))
    assert pending.answer is None
    assert (link._counts.late, link._counts.answered, ended) == (1, 0, [])


async def test_an_answer_counts_once(link: Link) -> None:
    pending = link.ask(b"x")
    link.receive(frames.encode(Kind.ANSWER, pending.number, b"first"))
    link.receive(frames.encode(Kind.ANSWER, pending.number, b"second"))
    assert pending.answer == b"first"
    assert link._counts.late == 1


async def test_a_goodbye_ends_the_link_with_the_peers_reason(link: Link, ended: Ended) -> None:
    link.receive(frames.encode(Kind.BYE, Reason.REMOVED))
    assert ended == [("bye", None)]
    assert link.why == "it said goodbye: its list no longer has this node's key"
    link.close("again", "once more")
    assert len(ended) == 1


async def test_an_answer_that_is_ready_after_the_end_goes_nowhere(
    link: Link, wire: Wire, inbound: FakeInbound, nursery: trio.Nursery
) -> None:
    late = trio.Event()

    async def answer(_peer: str, request: bytes) -> bytes:
        await late.wait()
        return request

    inbound._answer = answer
    link.receive(frames.encode(Kind.REQUEST, 1, b"x"))
    await trio.testing.wait_all_tasks_blocked()
    link.close("closed", "it closed the connection")
    late.set()
    await trio.testing.wait_all_tasks_blocked()
    assert wire.sent == []
    assert link._answering.now == 0


def test_reprs_say_what_a_thing_is(tmp_path: Path) -> None:
    make: list[Callable[[], object]] = [
        lambda: Backoff(1, 2, 3),
        lambda: Endpoint("::1", 5),
        lambda: PeerBook("a.b", 1),
    ]
    assert [repr(one()) for one in make] == [
        "<Backoff, next 1s>",
        "<Endpoint tcp://[::1]:5>",
        "<PeerBook of a.b: nobody>",
    ]
