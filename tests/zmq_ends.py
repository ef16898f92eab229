"""Transports for tests: real CURVE sockets over loopback, keys of their own, ports that nobody else gets."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

import trio
from sotbus_zmq.key_file import KeyPair
from sotbus_zmq.settings import Settings
from sotbus_zmq.transport import ZmqTransport

from sotbus.peers import Peer
from sotbus.testing import FakeInbound

QUICK = Settings(heartbeat_s=0.25, dead_after_s=2.0, reconnect_min_s=0.02, reconnect_max_s=0.2, good_after_s=60.0)
"""Bounds that a test can wait for, and a busy machine keeps."""

PATIENT = Settings(reconnect_min_s=0.02, reconnect_max_s=0.2)
"""The usual heartbeats; only the waits between dials are short."""

PATIENT_S = 30.0
"""What only a fault takes."""


@dataclass
class Node:
    """A node of a test: its name, its keys, where it listens or None."""

    user: str
    host: str
    key: KeyPair = field(default_factory=KeyPair.new)
    listens: str | None = None

    @property
    def name(self) -> str:
        return f"{self.user}.{self.host}"

    def peer(self, role: str = "peer", address: str | None = None) -> Peer:
        """This node as another one's peers file has it; dialled where it listens, unless another address is given."""
        return Peer(self.user, self.host, self.key.public, role, address or self.listens)

    def to(self, *peers: Peer, settings: Settings = PATIENT, **more: int) -> ZmqTransport:
        """This node's transport to these peers."""
        return ZmqTransport(self.name, self.key, peers, replace(settings, listen=self.listens), **more)


@contextmanager
def reserved(family: int = socket.AF_INET) -> Iterator[str]:
    """A loopback address that stays this test's: the port is bound, not listened on, so that a listener may have it
    (socket(7), SO_REUSEADDR) and no other process is given it."""
    host, shown = ("127.0.0.1", "127.0.0.1") if family == socket.AF_INET else ("::1", "[::1]")
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield f"tcp://{shown}:{holder.getsockname()[1]}"


@asynccontextmanager
async def serving(transport: ZmqTransport, inbound: FakeInbound | None = None) -> AsyncIterator[FakeInbound]:
    """A transport serves meanwhile; its end is bounded."""
    inbound = inbound or FakeInbound()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(transport.serve, inbound)
        await eventually(lambda: transport.statistics().serving)
        try:
            yield inbound
        finally:
            nursery.cancel_scope.cancel()


async def until_up(inbound: FakeInbound, *peers: str) -> None:
    """Wait until these peers are up."""
    with trio.fail_after(PATIENT_S):
        await inbound.until(lambda one: set(peers) <= one.peers)


async def until_down(inbound: FakeInbound, peer: str) -> None:
    """Wait until a peer is down."""
    with trio.fail_after(PATIENT_S):
        await inbound.until(lambda one: peer not in one.peers)


async def eventually(condition: object, seconds: float = PATIENT_S) -> None:
    """Wait until a condition without an event of its own holds."""
    assert callable(condition)
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.005)


OTHER = """
import sys, trio
from sotbus_zmq.key_file import KeyPair
from sotbus_zmq.settings import Settings
from sotbus_zmq.transport import ZmqTransport
from sotbus.peers import Peer

own, public, secret, listen, user, host, key, address, heartbeat_s, dead_after_s = sys.argv[1:]
peer = Peer(user, host, key, "peer", address or None)
settings = Settings(listen=listen or None, heartbeat_s=float(heartbeat_s), dead_after_s=float(dead_after_s),
                    reconnect_min_s=0.05, reconnect_max_s=0.2)

class Inbound:
    async def answer(self, peer, request):
        return peer.encode() + b" asked " + request
    def up(self, peer): print("up", peer, flush=True)
    def down(self, peer): print("down", peer, flush=True)

trio.run(ZmqTransport(own, KeyPair(public, secret), [peer], settings).serve, Inbound())
"""


@contextmanager
def process(node: Node, peer: Peer, settings: Settings = PATIENT) -> Iterator[subprocess.Popen[str]]:
    """A node in a process of its own, with one peer; it is killed in the end."""
    words = [node.name, node.key.public, node.key.secret, node.listens or "", peer.user, peer.host, peer.public_key]
    words += [peer.address or "", str(settings.heartbeat_s), str(settings.dead_after_s)]
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with other:
        try:
            yield other
        finally:
            other.kill()


class Proxy:
    """A TCP relay between a dialler and a listener, which can cut, stall and refuse.

    Its own address stays the same; ``connects`` counts what it took.
    """

    def __init__(self, address: str, target: str) -> None:
        self.address = address
        self.connects = 0
        self.refuses = False
        self._target = target
        self._streams: set[trio.SocketStream] = set()
        self._go = trio.Event()
        self._go.set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Relay until cancelled."""
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        listeners = await trio.open_tcp_listeners(int(port), host=host)
        await trio.serve_listeners(self._relay, listeners, task_status=task_status)  # type: ignore[arg-type]

    def cut(self) -> None:
        """End every connection with a reset, as a router does that has lost them."""
        for stream in tuple(self._streams):
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.socket.close()
        self._streams.clear()

    def stall(self) -> None:
        """Pass nothing on any more, and say nothing: a cable is out."""
        self._go = trio.Event()

    def go(self) -> None:
        """Pass everything on again."""
        self._go.set()

    async def _relay(self, near: trio.SocketStream) -> None:
        self.connects += 1
        host, _, port = self._target.removeprefix("tcp://").rpartition(":")
        if self.refuses:
            await near.aclose()
            return
        try:
            far = await trio.open_tcp_stream(host, int(port))
        except OSError:
            await near.aclose()
            return
        self._streams |= {near, far}
        async with near, far, trio.open_nursery() as nursery:
            nursery.start_soon(self._pass, near, far, nursery.cancel_scope)
            nursery.start_soon(self._pass, far, near, nursery.cancel_scope)
        self._streams -= {near, far}

    async def _pass(self, source: trio.SocketStream, sink: trio.SocketStream, scope: trio.CancelScope) -> None:
        try:
            async for data in source:
                await self._go.wait()
                await sink.send_all(data)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        await self._go.wait()
        scope.cancel()


@asynccontextmanager
async def proxied(target: str) -> AsyncIterator[Proxy]:
    """A relay in front of an address."""
    with reserved() as address:
        async with trio.open_nursery() as nursery:
            proxy = Proxy(address, target)
            await nursery.start(proxy.run)
            try:
                yield proxy
            finally:
                proxy.go()
                nursery.cancel_scope.cancel()
