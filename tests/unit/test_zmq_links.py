"""Links as their users meet them: what is said when there is none, what a cut does, and that nothing is silent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
import trio
import zmq
from hostile import dealer
from sotbus_zmq import frames, peer_state
from sotbus_zmq.endpoint import Endpoint
from sotbus_zmq.frames import Kind, Reason
from sotbus_zmq.key_file import KeyPair
from sotbus_zmq.link import Link
from sotbus_zmq.pump import Pump
from sotbus_zmq.serving import Serving
from sotbus_zmq.settings import Settings
from sotbus_zmq.tcp import Newcomers, Tcp
from sotbus_zmq.transport import ZmqTransport
from tools import skip_or_fail
from zmq_ends import (
    PATIENT,
    PATIENT_S,
    QUICK,
    Node,
    Proxy,
    eventually,
    process,
    proxied,
    reserved,
    serving,
    until_down,
    until_up,
)

from sotbus.api import BadRequest, NotSentError, OutcomeUnknownError, SotbusError
from sotbus.testing import FakeInbound

SLACK_S = 10.0
"""What a busy machine may add to a bound."""

PATIENT_TRIES = 3000
"""As many, a hundredth of a second apart, as only a fault takes."""


@pytest.fixture
def far() -> object:
    with reserved() as address:
        yield Node("bob", "far", listens=address)


@pytest.fixture
def near() -> Node:
    return Node("ann", "near")


async def refused(transport: ZmqTransport, node: str, seconds: float = 5.0) -> str:
    """What a request that is not sent is told."""
    with pytest.raises(NotSentError) as caught:
        await transport.request(node, b"x", seconds)
    return str(caught.value)


async def dialled(transport: ZmqTransport) -> None:
    """Wait until one dial has failed."""
    await eventually(lambda: transport.statistics().peers[0].failures)


def has_come_to(number: int, link: Link, inbound: FakeInbound) -> bool:
    """Whether so many requests were heard, or the link has ended."""
    return len(inbound.requests) >= number or not link.up


def has_lost_one_since(transport: ZmqTransport, connects: int) -> bool:
    """Whether one of the only peer's two connections has ended; another may have been made in its place already."""
    peer = transport.statistics().peers[0]
    return len(peer.ways) == 1 or peer.connects > connects


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """New connections get a fraction of a second."""
    monkeypatch.setattr("sotbus_zmq.serving.GREETING_S", 0.3)
    monkeypatch.setattr("sotbus_zmq.dialler.GREETING_S", 0.3)
    monkeypatch.setattr("sotbus_zmq.listener.HELLO_S", 0.6)


def dawdle(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not to be waited for takes half a minute: a dial that gets no answer, and a connection being made."""
    monkeypatch.setattr("sotbus_zmq.serving.GREETING_S", PATIENT_S)
    monkeypatch.setattr("sotbus_zmq.dialler.GREETING_S", PATIENT_S)
    monkeypatch.setattr("sotbus_zmq.peer_state.GRACE_S", PATIENT_S)


async def until_told(transport: ZmqTransport, node: str, *words: str) -> None:
    """Wait until a request is told one of these reasons; a dial before may have met the peer in its start or end."""
    said = ""
    for _ in range(PATIENT_TRIES):
        said = await refused(transport, node, 0.2)
        if any(one in said for one in words):
            return
        await trio.sleep(0.01)
    pytest.fail(f"it is told: {said}")


# What is said where there is no link (scenarios 15 and 16)


async def test_nobody_listens(near: Node, far: Node) -> None:
    transport = near.to(far.peer())
    async with serving(transport):
        await dialled(transport)
        said = await refused(transport, far.name)
    assert "bob.far is not connected: " in said
    assert f"{far.listens}" in said
    assert "nobody listens there, or it cannot be reached" in said
    assert said.endswith("; nothing was sent")


async def test_a_name_that_cannot_be_resolved(near: Node, far: Node) -> None:
    transport = near.to(far.peer(address="tcp://no-such-host.invalid:7710"))
    async with serving(transport):
        await dialled(transport)
        assert "the name no-such-host.invalid cannot be resolved" in await refused(transport, far.name)


async def test_a_wrong_server_key_fails_and_names_the_handshake(
    near: Node, far: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    dawdle(monkeypatch)
    wrong = replace(far.peer(), public_key=KeyPair.new().public)
    transport = near.to(wrong)
    server = far.to(near.peer())
    async with serving(server), serving(transport):
        began = time.monotonic()
        await dialled(transport)
        said = await refused(transport, far.name)
        assert time.monotonic() - began < SLACK_S
        assert transport.statistics().peers[0].failures["wrong server key"] >= 1
        await eventually(lambda: server.statistics().refused.get("another server's key", 0) >= 1)
    assert "the handshake failed: it ended the connection, most likely because its key is not the one" in said


async def test_a_key_that_is_not_on_the_list_is_refused_and_told_so(near: Node, far: Node) -> None:
    transport = near.to(far.peer())
    server = far.to(Node("eve", "other").peer())
    inbound = FakeInbound()
    async with serving(server, inbound), serving(transport):
        await dialled(transport)
        said = await refused(transport, far.name)
        assert transport.statistics().peers[0].failures["not on its list"] >= 1
        assert server.statistics().refused["unknown key"] >= 1
    assert "the handshake failed: this node's key is not on its list of peers" in said
    assert inbound.changes == []
    assert inbound.requests == []


@asynccontextmanager
async def tcp_server(handler: object) -> AsyncIterator[str]:
    """Something else that listens on TCP."""
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, handler, 0, host="127.0.0.1"))  # type: ignore[arg-type]
        yield f"tcp://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def test_what_listens_is_no_node(near: Node, far: Node) -> None:
    async def null_server(stream: trio.SocketStream) -> None:
        await stream.send_all(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + b"\0" * 48)
        await trio.sleep(5)

    async with tcp_server(null_server) as address:
        transport = near.to(far.peer(address=address))
        async with serving(transport):
            await dialled(transport)
            assert "what listens there is no sotbus node, or not encrypted" in await refused(transport, far.name)


async def test_what_listens_never_answers(near: Node, far: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)

    async def silent(stream: trio.SocketStream) -> None:
        await trio.sleep(30)

    async with tcp_server(silent) as address:
        transport = near.to(far.peer(address=address))
        async with serving(transport):
            await dialled(transport)
            await until_told(transport, far.name, "it took the connection and did not answer in time")


async def test_a_peer_that_never_dialled(near: Node, far: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    dawdle(monkeypatch)
    transport = far.to(near.peer())
    async with serving(transport):
        began = time.monotonic()
        said = await refused(transport, near.name, 2 * PATIENT_S)
        assert time.monotonic() - began < SLACK_S
    assert said == "ann.near is not connected: it dials this node, and has not; nothing was sent"


async def test_nobody_is_asked_while_nothing_is_served(near: Node, far: Node) -> None:
    said = await refused(near.to(far.peer()), far.name)
    assert said == "bob.far is not connected: this node's links are not served; nothing was sent"


async def test_one_that_tries_again_at_once_lets_others_run(near: Node, far: Node) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    transport = near.to(far.peer())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        for _ in range(50):
            await refused(transport, far.name)
        nursery.cancel_scope.cancel()
    assert turns > 20


async def test_a_request_to_a_stranger_or_without_time_or_too_large_is_not_sent(near: Node, far: Node) -> None:
    transport = near.to(far.peer())
    inbound = FakeInbound()
    async with serving(far.to(near.peer()), inbound), serving(transport) as own:
        await until_up(own, far.name)
        assert "no link leads to eve.far" in await refused(transport, "eve.far")
        for seconds in (0.0, -1.0):
            assert "there is no time left to ask bob.far" in await refused(transport, far.name, seconds)
        with pytest.raises(NotSentError, match=r"the request has 1114113 bytes, and a link carries 1114112"):
            await transport.request(far.name, bytes(frames.MAX_BODY_BYTES + 1), 5.0)
        largest = os.urandom(frames.MAX_BODY_BYTES)
        assert await transport.request(far.name, largest, PATIENT_S) == largest
    assert len(inbound.requests) == 1


async def test_hosts_compare_without_case_and_users_do_not(near: Node, far: Node) -> None:
    transport = near.to(far.peer())
    assert transport.reaches("bob.FAR")
    assert not transport.reaches("Bob.far")
    assert not transport.reaches("bob.far2")
    async with serving(far.to(near.peer())), serving(transport) as own:
        await until_up(own, far.name)
        assert await transport.request("bob.Far", b"x", PATIENT_S) == b"x"


async def test_a_plain_client_is_refused_and_others_are_served(near: Node, far: Node) -> None:
    server, transport = far.to(near.peer()), near.to(far.peer())
    inbound = FakeInbound()
    async with serving(server, inbound), serving(transport) as own:
        await until_up(own, far.name)
        with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.linger = 0
            plain.connect(str(far.listens))
            plain.send(frames.encode(Kind.HELLO))
            plain.send(frames.encode(Kind.REQUEST, 1, b"let me in"))
            # Both ends see that they do not fit; if the client is quicker, the listener sees only that it went.
            refusals = {"not a CURVE client", "broken off"}
            await eventually(lambda: refusals & server.statistics().refused.keys())
            assert await transport.request(far.name, b"x", PATIENT_S) == b"x"
            assert not plain.poll(0)
    assert inbound.requests == [(near.name, b"x")]


def test_a_listener_without_an_allow_list_or_a_key_does_not_start(far: Node, near: Node) -> None:
    listens = Settings(listen=far.listens)
    with pytest.raises(BadRequest, match="nobody is on its list of peers, so nobody may come") as caught:
        ZmqTransport(far.name, far.key, (), listens)
    assert "sotbus keys trust" in caught.value.hint
    with pytest.raises(BadRequest, match="it has no key of its own") as caught:
        ZmqTransport(far.name, None, (), listens)
    assert "sotbus keys new" in caught.value.hint
    with pytest.raises(BadRequest, match="this node has peers and no key of its own"):
        ZmqTransport(far.name, None, (near.peer(),), Settings())


async def test_without_a_zap_handler_nobody_gets_in(near: Node, far: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr("sotbus_zmq.zap.ADDRESS", "inproc://elsewhere")
    transport = near.to(far.peer())
    async with serving(far.to(near.peer())) as inbound, serving(transport):
        await dialled(transport)
        await refused(transport, far.name)
    assert inbound.changes == []


async def test_an_address_that_another_has_is_said(near: Node, far: Node) -> None:
    async with serving(far.to(near.peer())):
        with pytest.raises(SotbusError, match=r"the node cannot listen on tcp://127.0.0.1:\d+: Address already in use"):
            await far.to(near.peer()).serve(FakeInbound())


async def test_one_transport_serves_once_at_a_time(near: Node, far: Node) -> None:
    transport = near.to(far.peer())
    async with serving(transport):
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match="serves already"):
            await transport.serve(FakeInbound())


@pytest.mark.parametrize("fault", ["wrong server key", "not on the list", "no route"])
def test_a_process_whose_handshake_fails_exits_at_once(near: Node, far: Node, fault: str) -> None:
    """Scenario 15: the process is told to end while its dials fail, and ends."""
    code = """
import sys, trio, time
from zmq_ends import *
from sotbus_zmq import pump
from sotbus_zmq.key_file import KeyPair
pump.TERM_S = PATIENT_S
far = Node("bob", "far", KeyPair(*sys.argv[1:3]), sys.argv[3])
near = Node("ann", "near")
fault = sys.argv[4]
async def main():
    peer = far.peer()
    if fault == "wrong server key":
        peer = Node("bob", "far", listens=far.listens).peer()
    server = far.to(near.peer() if fault == "wrong server key" else Node("eve", "other").peer())
    transport = near.to(peer)
    async with trio.open_nursery() as nursery:
        if fault != "no route":
            nursery.start_soon(server.serve, FakeInbound())
        nursery.start_soon(transport.serve, FakeInbound())
        await eventually(lambda: transport.statistics().peers[0].failures)
        try:
            await transport.request("bob.far", b"x", PATIENT_S)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        began = time.monotonic()
        nursery.cancel_scope.cancel()
    print(time.monotonic() - began, flush=True)
trio.run(main)
"""
    words = [far.key.public, far.key.secret, str(far.listens), fault]
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    with subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True, env=environ) as one:
        try:
            assert one.stdout is not None
            said = one.stdout.readline()
            assert float(one.stdout.readline()) < SLACK_S
            assert one.wait(PATIENT_S) == 0
        finally:
            one.kill()
    assert said.startswith("NotSentError bob.far is not connected: ")
    assert ("the handshake failed" in said) == (fault != "no route")


# A link that is up (scenario 13), goes down, and comes back


class AskAtOnce(FakeInbound):
    """Asks a peer the moment it is up, and notes what came of it."""

    def __init__(self, nursery: trio.Nursery) -> None:
        super().__init__()
        self.nursery = nursery
        self.transport: ZmqTransport
        self.outcomes: list[str] = []

    def up(self, peer: str) -> None:
        super().up(peer)
        self.nursery.start_soon(self.ask, peer)

    async def ask(self, peer: str) -> None:
        try:
            assert await self.transport.request(peer, b"at once", PATIENT_S) == b"at once"
            self.outcomes.append("answered")
        except (NotSentError, OutcomeUnknownError) as error:
            self.outcomes.append(type(error).__name__)


async def test_the_first_request_over_a_new_link_has_an_outcome_both_ways(near: Node, far: Node) -> None:
    rounds = 40
    async with trio.open_nursery() as nursery:
        one, other = AskAtOnce(nursery), AskAtOnce(nursery)
        other.transport = far.to(near.peer())
        async with serving(other.transport, other):
            for number in range(rounds):
                one.transport = near.to(far.peer())
                async with serving(one.transport, one):
                    await eventually(lambda so_far=number: len(one.outcomes) > so_far < len(other.outcomes))
                await until_down(other, near.name)
    assert one.outcomes == other.outcomes == ["answered"] * rounds


async def test_a_request_waits_for_a_connection_that_is_being_made(
    near: Node, far: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    dawdle(monkeypatch)
    transport = near.to(far.peer())
    async with serving(far.to(near.peer())), serving(transport):
        await trio.testing.wait_all_tasks_blocked()
        assert await transport.request(far.name, b"x", PATIENT_S) == b"x"


async def test_a_request_does_not_wait_for_a_whole_dial_into_a_void(
    near: Node, far: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    grace_s = peer_state.GRACE_S
    dawdle(monkeypatch)
    monkeypatch.setattr(peer_state, "GRACE_S", grace_s)

    async def silent(stream: trio.SocketStream) -> None:
        await trio.sleep(2 * PATIENT_S)

    async with tcp_server(silent) as address:
        transport = near.to(far.peer(address=address))
        async with serving(transport):
            await eventually(lambda: transport.statistics().peers[0].state == "connecting")
            for seconds, at_most in ((30.0, 1.0), (0.4, 0.2)):
                began = time.monotonic()
                assert f"{address} is being dialled" in await refused(transport, far.name, seconds)
                assert at_most - 0.05 < time.monotonic() - began < at_most + SLACK_S


@pytest.fixture
async def line(
    near: Node, far: Node
) -> AsyncIterator[tuple[ZmqTransport, ZmqTransport, FakeInbound, FakeInbound, Proxy]]:
    """Two ends with a relay between them: near dials far through it."""
    slow = FakeInbound(_slow)
    async with proxied(str(far.listens)) as proxy:
        one = near.to(far.peer(address=proxy.address), settings=QUICK)
        other = far.to(near.peer(), settings=QUICK)
        async with serving(other, slow), serving(one, FakeInbound(_slow)) as own:
            await until_up(own, far.name)
            await until_up(slow, near.name)
            yield one, other, own, slow, proxy


Line = tuple[ZmqTransport, ZmqTransport, FakeInbound, FakeInbound, Proxy]


async def _slow(_peer: str, request: bytes) -> bytes:
    if request == b"slow":
        await trio.sleep_forever()
    return request


async def unknown(transport: ZmqTransport, node: str, seconds: float = PATIENT_S) -> str:
    """What a request that was sent and got no answer is told."""
    with pytest.raises(OutcomeUnknownError) as caught:
        await transport.request(node, b"slow", seconds)
    return str(caught.value)


async def test_a_connection_that_breaks_leaves_its_requests_unknown_at_once(line: Line, near: Node, far: Node) -> None:
    one, other, own, slow, proxy = line
    said: list[str] = []

    async def ask(transport: ZmqTransport, node: str) -> None:
        said.append(await unknown(transport, node))

    began = time.monotonic()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, one, far.name)
        nursery.start_soon(ask, other, near.name)
        await slow.until(lambda inbound: bool(inbound.requests))
        await own.until(lambda inbound: bool(inbound.requests))
        proxy.cut()
    assert time.monotonic() - began < QUICK.dead_after_s + SLACK_S
    assert len(said) == 2
    assert all("ended before the answer came" in text and text.endswith("the outcome is unknown") for text in said)
    await until_up(own, far.name)
    await until_up(slow, near.name)
    assert await one.request(far.name, b"again", PATIENT_S) == b"again"
    assert await other.request(near.name, b"again", PATIENT_S) == b"again"
    assert own.changes == [("up", far.name), ("down", far.name), ("up", far.name)]


async def test_a_line_that_goes_silent_is_seen_within_the_bound(line: Line, near: Node, far: Node) -> None:
    one, _, own, slow, proxy = line
    began = time.monotonic()
    proxy.stall()
    assert "nothing was heard from it for 2s" in await unknown(one, far.name)
    assert QUICK.dead_after_s - 1 <= time.monotonic() - began < QUICK.dead_after_s + SLACK_S
    await until_down(own, far.name)
    await until_down(slow, near.name)
    assert time.monotonic() - began < QUICK.dead_after_s + QUICK.heartbeat_s + SLACK_S
    proxy.go()
    await until_up(own, far.name)
    assert await one.request(far.name, b"again", PATIENT_S) == b"again"


async def test_a_listener_that_comes_back_is_found_again(near: Node, far: Node) -> None:
    transport = near.to(far.peer())
    async with serving(transport) as own:
        for number in range(3):
            async with serving(far.to(near.peer())):
                await until_up(own, far.name)
                assert await transport.request(far.name, b"%d" % number, PATIENT_S) == b"%d" % number
            await until_down(own, far.name)
            await until_told(transport, far.name, "it said goodbye: it stops", "nobody listens")
    assert transport.statistics().peers[0].connects == 3


def lines(other: subprocess.Popen[str], number: int) -> list[str]:
    assert other.stdout is not None
    return [other.stdout.readline().strip() for _ in range(number)]


@pytest.mark.parametrize("dials", ["near", "far"])
async def test_a_stopped_process_is_noticed_within_the_bound_and_taken_back(dials: str) -> None:
    """SIGSTOP: its TCP connection stands and says nothing."""
    with reserved() as address:
        one = Node("ann", "near", listens=None if dials == "near" else address)
        other = Node("bob", "far", listens=address if dials == "near" else None)
        transport = one.to(other.peer(), settings=QUICK)
        with process(other, one.peer(), QUICK) as far:
            async with serving(transport) as own:
                await until_up(own, other.name)
                assert await transport.request(other.name, b"x", PATIENT_S) == b"ann.near asked x"
                os.kill(far.pid, signal.SIGSTOP)
                try:
                    began = time.monotonic()
                    assert "nothing was heard from it" in await unknown(transport, other.name)
                    await until_down(own, other.name)
                    assert time.monotonic() - began < QUICK.dead_after_s + QUICK.heartbeat_s + SLACK_S
                finally:
                    os.kill(far.pid, signal.SIGCONT)
                await until_up(own, other.name)
                assert await transport.request(other.name, b"y", PATIENT_S) == b"ann.near asked y"


@pytest.mark.parametrize("dials", ["near", "far"])
async def test_a_killed_process_is_noticed_at_once(dials: str) -> None:
    settings = Settings(heartbeat_s=PATIENT_S, dead_after_s=2 * PATIENT_S)
    with reserved() as address:
        one = Node("ann", "near", listens=None if dials == "near" else address)
        other = Node("bob", "far", listens=address if dials == "near" else None)
        with process(other, one.peer(), settings) as far:
            async with serving(one.to(other.peer(), settings=settings)) as own:
                await until_up(own, other.name)
                began = time.monotonic()
                far.kill()
                await until_down(own, other.name)
                assert time.monotonic() - began < SLACK_S


def test_a_process_ends_though_its_peer_is_stopped_and_its_queue_is_full() -> None:
    code = """
import sys, trio, time, os, signal
from zmq_ends import *
from sotbus_zmq import pump
pump.TERM_S = PATIENT_S
async def main():
    with reserved() as address:
        far, near = Node("bob", "far", listens=address), Node("ann", "near")
        with process(far, near.peer()) as other:
            transport = near.to(far.peer(), settings=Settings())
            async with serving(transport) as own:
                await until_up(own, far.name)
                os.kill(other.pid, signal.SIGSTOP)
                async def ask():
                    try:
                        await transport.request(far.name, bytes(1 << 20), 30)
                    except Exception:
                        pass
                async with trio.open_nursery() as nursery:
                    for _ in range(64):
                        nursery.start_soon(ask)
                    await trio.sleep(0.5)
                    began = time.monotonic()
                    nursery.cancel_scope.cancel()
    print("served", time.monotonic() - began, flush=True)
trio.run(main)
print("ended", flush=True)
"""
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=2 * PATIENT_S, check=True, env=environ
    )
    words = done.stdout.split()
    assert float(words[1]) < SLACK_S
    assert words[2] == "ended"


# One connection a peer and a way


async def test_two_that_dial_each_other_keep_both_connections_and_each_answers() -> None:
    with reserved() as first, reserved() as second:
        near, far = Node("ann", "near", listens=first), Node("bob", "far", listens=second)
        one, other = near.to(far.peer()), far.to(near.peer())
        async with serving(one) as own, serving(other) as theirs:
            await eventually(lambda: {len(t.statistics().peers[0].ways) for t in (one, other)} == {2})
            for number in range(5):
                request = b"%d" % number
                assert await one.request(far.name, request, PATIENT_S) == request
                assert await other.request(near.name, request, PATIENT_S) == request
            assert own.changes == [("up", far.name)]
            assert theirs.changes == [("up", near.name)]
        assert own.changes == [("up", far.name), ("down", far.name)]


async def test_a_newer_connection_of_a_peer_takes_the_place_of_the_older(near: Node, far: Node) -> None:
    """A node that was started again before its old connection was seen to be dead, or a key in two places."""
    server = far.to(near.peer())
    async with (
        serving(server) as theirs,
        serving(near.to(far.peer(), settings=replace(PATIENT, reconnect_min_s=60.0, reconnect_max_s=60.0))) as old,
    ):
        await until_up(old, far.name)
        async with serving(near.to(far.peer())) as new:
            await until_up(new, far.name)
            await until_down(old, far.name)
            assert await server.request(near.name, b"whom", PATIENT_S) == b"whom"
            assert new.requests == [(far.name, b"whom")]
            assert theirs.changes == [("up", near.name), ("down", near.name), ("up", near.name)]
            peer = server.statistics().peers[0]
            assert (peer.connects, peer.failures) == (2, {"replaced": 1})


async def test_a_request_goes_over_the_other_connection_where_one_has_just_ended() -> None:
    with reserved() as first, reserved() as second:
        near, far = Node("ann", "near", listens=first), Node("bob", "far", listens=second)
        async with proxied(second) as proxy:
            one, other = near.to(far.peer(address=proxy.address)), far.to(near.peer())
            async with serving(one) as own, serving(other):
                await eventually(lambda: {len(t.statistics().peers[0].ways) for t in (one, other)} == {2})
                for _ in range(10):
                    made = one.statistics().peers[0].connects
                    proxy.cut()
                    await eventually(partial(has_lost_one_since, one, made))
                    assert await one.request(far.name, b"x", PATIENT_S) == b"x"
                    await eventually(lambda: len(one.statistics().peers[0].ways) == 2)
                assert own.changes == [("up", far.name)]


async def test_a_request_that_the_first_of_two_links_does_not_take_goes_over_the_other(near: Node, far: Node) -> None:
    transport = near.to(far.peer())
    [state] = transport._book
    inbound = FakeInbound()
    sent: list[bytes] = []

    def broken(_data: bytes) -> None:
        state.links[0].close("closed", "the connection has ended")
        raise zmq.ZMQError(107)

    async with trio.open_nursery() as nursery:
        for way, send in (("dialled", broken), ("accepted", sent.append)):
            link = Link(
                far.name,
                way,
                send,
                inbound,
                nursery,
                state.counts,
                state.answering,
                lambda one: state.detach(one, inbound),
            )
            state.attach(link, inbound)
        link, pending = await transport._send(state, b"x", trio.current_time() + 5)
        assert (link.way, sent) == ("accepted", [frames.encode(Kind.REQUEST, pending.number, b"x")])
        link._send = broken
        with pytest.raises(NotSentError, match="has ended; nothing was sent"):
            await transport._send(state, b"x", trio.current_time() + 5)


def ask_on_and_on(link: Link) -> None:
    """Ask until it cannot be sent. Nothing of this process but libzmq's own thread runs meanwhile."""
    for _ in range(PATIENT_TRIES):
        link.ask(b"z")
        time.sleep(0.01)


async def test_a_request_to_a_connection_that_has_just_ended_is_not_sent(line: Line, far: Node) -> None:
    one, *_, proxy = line
    [state] = one._book
    [link] = state.links
    proxy.cut()
    with pytest.raises(NotSentError, match="has ended; nothing was sent"):
        ask_on_and_on(link)
    assert not state.links


async def test_what_a_peer_says_last_is_heard_though_its_end_is_seen_at_the_same_time(near: Node, far: Node) -> None:
    client = near.to(far.peer())
    async with serving(client) as own:
        for number in range(8):
            with zmq.Context() as context:
                last = context.socket(zmq.ROUTER)
                last.curve_server = True
                last.curve_publickey = far.key.public.encode()
                last.curve_secretkey = far.key.secret.encode()
                last.bind(str(far.listens))
                await eventually(lambda socket=last: socket.poll(0))
                route, _ = last.recv_multipart()
                last.send_multipart([route, frames.encode(Kind.WELCOME)])
                await until_up(own, far.name)
                last.send_multipart([route, frames.encode(Kind.BYE, Reason.STOPPING)])
                last.close(linger=1000)
                time.sleep(0.2)
            await until_down(own, far.name)
            assert client.statistics().peers[0].failures["bye"] == number + 1


async def test_what_a_dialler_says_last_is_heard_though_its_connection_takes_no_more(near: Node, far: Node) -> None:
    listener = far.to(near.peer())
    [state] = listener._book
    async with serving(listener) as own:
        with dealer(far, near) as last:
            last.linger = 1000
            last.send(frames.encode(Kind.HELLO))
            await until_up(own, near.name)
            [link] = state.links
            pending = link.ask(b"x")
            assert last.recv() == frames.encode(Kind.WELCOME)
            assert last.recv() == frames.encode(Kind.REQUEST, pending.number, b"x")
            last.send(frames.encode(Kind.PING, 1))  # whose answer is not taken any more, either
            last.send(frames.encode(Kind.ANSWER, pending.number, b"y"))
            last.send(frames.encode(Kind.BYE, Reason.STOPPING))

        with pytest.raises(NotSentError, match="has ended; nothing was sent"):
            ask_on_and_on(link)
        assert (pending.answer, link.kind) == (b"y", "bye")


async def test_a_connection_that_reads_nothing_is_hung_up(
    near: Node, far: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung_up = trio.Event()
    real = Tcp.hang_up

    def hang_up(tcp: Tcp) -> None:
        real(tcp)
        hung_up.set()

    monkeypatch.setattr(Tcp, "hang_up", hang_up)
    monkeypatch.setattr(Newcomers, "note", lambda *_: None)  # which would hang it up later
    listener = far.to(near.peer(), max_in_flight=1)
    [state] = listener._book
    async with serving(listener) as own:
        with dealer(far, near, reads_ahead=1) as deaf:
            deaf.send(frames.encode(Kind.HELLO))
            await until_up(own, near.name)
            [link] = state.links
            sent = 0
            with trio.fail_after(PATIENT_S):
                while link.up:
                    sent += 1
                    deaf.send(frames.encode(Kind.REQUEST, sent, bytes(1 << 16)), zmq.NOBLOCK)
                    await own.until(partial(has_come_to, sent, link))
                assert link.kind == "not reading"
                await hung_up.wait()


async def test_a_welcome_after_a_goodbye_makes_no_link(near: Node, far: Node) -> None:
    client = near.to(far.peer())
    async with serving(client) as own:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as odd:
            odd.linger = 0
            odd.curve_server = True
            odd.curve_publickey = far.key.public.encode()
            odd.curve_secretkey = far.key.secret.encode()
            odd.bind(str(far.listens))
            with trio.fail_after(PATIENT_S):
                while not odd.poll(0):
                    await trio.sleep(0.005)
            route, _ = odd.recv_multipart()
            for frame in (frames.encode(Kind.BYE, Reason.STOPPING), frames.encode(Kind.WELCOME)):
                odd.send_multipart([route, frame])
            time.sleep(0.2)  # both are read in one go
            await eventually(lambda: client.statistics().peers[0].failures.get("bye"))
        assert own.changes == []


@pytest.mark.parametrize("dials", ["tcp://localhost", "tcp://[::1]"])
async def test_a_peer_is_dialled_by_name_and_over_ipv6(dials: str) -> None:
    family = socket.AF_INET6 if "::1" in dials else socket.AF_INET
    if family == socket.AF_INET6 and not has_ipv6():
        skip_or_fail("needs IPv6 on the loopback")
    with reserved(family) as address:
        near, far = Node("ann", "near"), Node("bob", "far", listens=address)
        transport = near.to(far.peer(address=f"{dials}:{address.rpartition(':')[2]}"))
        async with serving(far.to(near.peer())) as theirs, serving(transport) as own:
            await until_up(own, far.name)
            assert await transport.request(far.name, b"x", PATIENT_S) == b"x"
            assert theirs.requests == [(near.name, b"x")]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_a_link_that_no_socket_is_left_for_fails_and_ends_nothing(
    near: Node, far: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Serving.socket

    def socket_of(serving: Serving, kind: int) -> zmq.Socket[bytes]:
        if full:
            raise zmq.ZMQError(24)
        return made(serving, kind)

    full = True
    monkeypatch.setattr(Serving, "socket", socket_of)
    transport = near.to(far.peer())
    async with serving(transport) as own:
        await dialled(transport)
        assert "this node cannot open another socket: Too many open files" in await refused(transport, far.name)
        full = False
        async with serving(far.to(near.peer())):
            await until_up(own, far.name)


async def test_a_connection_that_ends_before_the_hello_fails_and_ends_nothing(
    near: Node, far: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Pump.send

    def send(pump: Pump, *parts: bytes) -> None:
        if parts == (frames.encode(Kind.HELLO),) and broken:
            raise zmq.Again
        made(pump, *parts)

    hurry(monkeypatch)
    monkeypatch.setattr(Pump, "send", send)
    broken = True
    transport = near.to(far.peer())
    async with serving(far.to(near.peer())), serving(transport) as own:
        await dialled(transport)
        broken = False
        await until_up(own, far.name)


async def test_an_address_that_libzmq_does_not_take_fails_and_ends_nothing(
    near: Node, far: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def addresses(_endpoint: Endpoint) -> list[Endpoint]:
        return [Endpoint("no address", 1)]

    monkeypatch.setattr("sotbus_zmq.dialler._addresses", addresses)
    transport = near.to(far.peer())
    async with serving(transport):
        await dialled(transport)
        assert "tcp://no address:1 cannot be dialled from here: " in await refused(transport, far.name)


# Bounds


async def test_past_the_bound_in_flight_a_request_is_busy(near: Node, far: Node) -> None:
    transport = near.to(far.peer(), max_in_flight=3)
    slow = FakeInbound(_slow)
    async with serving(far.to(near.peer()), slow), serving(transport) as own:
        await until_up(own, far.name)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(unknown, transport, far.name, 3.0)
            await slow.until(lambda one: len(one.requests) == 3)
            with pytest.raises(NotSentError, match=r"3 requests to bob\.far wait for an answer already") as caught:
                await transport.request(far.name, b"x", PATIENT_S)
            assert caught.value.code == "busy"
        assert [link._pending for state in transport._book for link in state.links] == [{}]
    assert transport.statistics().peers[0].busy == 1
    assert len(slow.requests) == 3


async def test_a_peer_that_asks_on_and_on_is_told_to_wait(near: Node, far: Node) -> None:
    """What it gave up waiting for is still under way there."""
    transport, server = near.to(far.peer(), max_in_flight=64), far.to(near.peer(), max_in_flight=2)
    slow = FakeInbound(_slow)
    async with serving(server, slow), serving(transport) as own:
        await until_up(own, far.name)
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(unknown, transport, far.name)
            await slow.until(lambda one: len(one.requests) == 8)
            with pytest.raises(NotSentError, match=r"bob\.far has as much under way as may be") as caught:
                await transport.request(far.name, b"x", PATIENT_S)
            assert caught.value.code == "busy"
            nursery.cancel_scope.cancel()
        assert server.statistics().peers[0].refused == 1
        assert server.statistics().peers[0].answering == 8
        assert len(slow.requests) == 8


async def test_an_answer_that_cannot_be_made_is_told_and_ends_nothing(
    near: Node, far: Node, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(_peer: str, request: bytes) -> bytes:
        if request == b"too large":
            return bytes(frames.MAX_BODY_BYTES + 1)
        if request.startswith(b"raise"):
            raise ValueError(f"cannot be answered: {request!r}")
        return request

    transport = near.to(far.peer())
    async with serving(far.to(near.peer()), FakeInbound(answer)), serving(transport) as own:
        await until_up(own, far.name)
        for request in (b"raise the secret", b"too large"):
            began = time.monotonic()
            with pytest.raises(OutcomeUnknownError, match="took the request and has no answer to it"):
                await transport.request(far.name, request, PATIENT_S)
            assert time.monotonic() - began < SLACK_S
        assert await transport.request(far.name, b"x", PATIENT_S) == b"x"
        assert len(own.changes) == 1
    assert [record.levelname for record in caplog.records if record.levelno >= 30] == ["ERROR", "ERROR"]
    assert "ValueError" in caplog.messages[0]
    assert "secret" not in "".join(caplog.messages)


# What is told


async def test_statistics_and_reprs_are_for_the_person_who_debugs_at_night(line: Line, near: Node, far: Node) -> None:
    one, other, _, _, proxy = line
    await one.request(far.name, b"12345", PATIENT_S)
    await other.request(near.name, b"123", PATIENT_S)
    await eventually(lambda: one.statistics().peers[0].smoothed_s is not None)
    told = one.statistics()
    assert (told.node, told.serving, told.listening) == (near.name, True, None)
    assert other.statistics().listening == far.listens
    peer = told.peers[0]
    assert (peer.name, peer.role, peer.state, peer.ways) == (far.name, "peer", "up", ("dialled",))
    assert (peer.asked, peer.answered, peer.taken, peer.unknown, peer.not_sent) == (1, 1, 1, 0, 0)
    assert peer.round_trip_s is not None
    assert 0 < peer.round_trip_s < PATIENT_S
    assert peer.bytes_out >= 2 * 10 + 5 + 3
    assert repr(one) == "<ZmqTransport of ann.near, up: bob.far>"
    assert "listening on" in repr(other)
    for secret in (near.key.secret, far.key.secret):
        assert secret not in repr(told) + repr(other.statistics()) + repr(one) + repr(one._book)
    proxy.refuses = True
    proxy.cut()
    await eventually(lambda: one.statistics().peers[0].state == "waiting")
    peer = one.statistics().peers[0]
    assert peer.next_dial_s is not None
    assert peer.why
    assert peer.since_s < PATIENT_S
