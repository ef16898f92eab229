"""A minute of frames that nobody means, on both wires of one node, while a good client and a good link are served."""

from __future__ import annotations

import os
import random
import statistics
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import zmq
from hostile import dealer, garbage, random_message, random_request
from node_hub import ask_to_file, make_hub
from node_world import NodeWorld, Wire, until
from node_world import nodes as nodes
from sotbus_zmq import frames
from sotbus_zmq.frames import Kind
from sotbus_zmq.key_file import KeyPair
from zmq_ends import Node, reserved, serving, until_up

pytestmark = pytest.mark.lab

FUZZ_S = 60.0
WARM_UP_S = 20.0
AT_ONCE_S = 2.0
"""What two good messages take, most of the time."""

NEVER_S = 15.0
"""What they never take, though the machine may stand still for seconds."""

MORE_MEMORY = 16 << 20
"""What the node may have more after the minute than after its first third, in bytes."""


def on_the_socket(nodes: NodeWorld, over: threading.Event, seed: int) -> None:
    """Garbage on connections that come and go, until it is over."""
    chance = random.Random(seed)
    while not over.is_set():
        with suppress(OSError), Wire(str(nodes.socket)) as bad:  # the queue of those that wait to connect may be full
            bad.say(garbage(chance))


def on_a_link(hub: Node, near: Node, over: threading.Event, seed: int) -> None:
    """Frames of a peer that is trusted and hostile, until it is over; it greets again whenever it was cut off."""
    rng = random.Random(seed)
    with dealer(hub, near) as hostile:
        while not over.wait(0.002):
            with suppress(zmq.Again):
                hostile.send_multipart([frames.encode(Kind.HELLO)], zmq.NOBLOCK)
                for _ in range(rng.randrange(20)):
                    message = random_message(rng) if rng.random() < 0.2 else [random_request(rng)]
                    hostile.send_multipart(message, zmq.NOBLOCK)
            while hostile.poll(0):
                hostile.recv_multipart()


def test_a_minute_of_garbage_on_both_wires_harms_nobody(nodes: NodeWorld) -> None:
    good, bad = Node("ann", "good"), Node("ann", "bad")
    over = threading.Event()
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    with reserved() as address:
        peer = make_hub(nodes, address, [good, bad])
        nodes.join("a", "b")
        node = nodes.serve()
        hub = Node(peer.user, peer.host, KeyPair(peer.public_key, ""), address)
        proc = Path(f"/proc/{node.pid}")

        def memory() -> int:
            return int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

        async def serve_the_good(wire: Wire) -> int:
            """A message over the link and one over the socket, in turn; answers how many of each."""
            transport = good.to(peer)
            count = 0
            took: list[float] = []
            sizes: list[tuple[float, int]] = []
            async with serving(transport) as inbound:
                await until_up(inbound, peer.name)
                began = trio.current_time()
                while trio.current_time() < began + FUZZ_S:
                    asked_at = trio.current_time()
                    with trio.fail_after(NEVER_S):
                        assert await ask_to_file(transport, peer, "a", f"good {count}") == {"ok": True}
                        asked = {"from": "b", "to": "a", "text": f"own {count}"}
                        answer = await trio.to_thread.run_sync(wire.ask, "comm.file", asked)
                    assert answer == {"ok": True}
                    count += 1
                    took.append(trio.current_time() - asked_at)
                    sizes.append((trio.current_time() - began, memory()))
                    await trio.sleep(0.02)
                assert inbound.changes == [("up", peer.name)]
            assert statistics.median(took) < AT_ONCE_S
            early = [size for at, size in sizes if at < WARM_UP_S]
            late = [size for at, size in sizes if at > FUZZ_S - WARM_UP_S]
            assert min(late) < max(early) + MORE_MEMORY
            return count

        hostile: list[Callable[[], None]] = [
            lambda: on_the_socket(nodes, over, seed),
            lambda: on_a_link(hub, bad, over, seed),
        ]
        threads = [threading.Thread(target=one) for one in hostile]
        with nodes.wire() as wire:
            wire.greet()
            for thread in threads:
                thread.start()
            try:
                count = trio.run(serve_the_good, wire)
            finally:
                over.set()
                for thread in threads:
                    thread.join()
        assert count > 20

        def at_rest() -> dict[str, Any] | None:
            """The node's state once nobody else is its client; the garbage may leave many that wait to connect."""
            with suppress(BlockingIOError):
                status = nodes.state()
                return status if status["clients"] == 1 else None
            return None

        status = until(at_rest)
        states = {one["name"]: one for one in status["deliveries"]["zmq"]["transport"]["peers"]}
        assert status["malformed"] > 20
        assert status["inbound"]["malformed"] > 20
        assert states[bad.name]["malformed"] > 3
        assert states[good.name]["malformed"] == 0
        assert node.events("client failed") == node.events("delivery ended") == node.events("append failed") == []
        texts = [line["msg"] for line in nodes.lines("a")]
        for kind in ("good", "own"):
            assert [one for one in texts if one.startswith(f"{kind} ")] == [f"{kind} {at}" for at in range(count)]
        cut = status["malformed"], states[bad.name]["connects"]
        print(f"{count} good messages of each; {cut[0]} connections and {cut[1]} links were cut")
        assert node.end() == 0
