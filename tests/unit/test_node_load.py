"""A node under what it must not mind: frames of nobody's making, many clients at once, a mailbox that stands still."""

from __future__ import annotations

import random
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import garbage
from node_world import NodeProcess, NodeWorld, Wire, request, until
from node_world import nodes as nodes

from sotbus.comm import flock

CLIENTS = 200
AT_ONCE_S = 8.0
"""What a filing that nothing holds up may take on a busy machine."""

MORE_MEMORY = 24 << 20
"""What a node may have more after the fuzzing than before, in bytes."""


@pytest.fixture
def node(nodes: NodeWorld) -> NodeProcess:
    nodes.join("a", "b")
    return nodes.serve()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def fuzz(nodes: NodeWorld, node: NodeProcess, for_s: float, seed: int) -> None:
    """Send garbage on a hundred connections and more that come and go, while a good client is served."""
    chance = random.Random(seed)
    end, count = time.monotonic() + for_s, 0
    with Wire(str(nodes.socket)) as good:
        good.greet()
        while time.monotonic() < end or count < 100:
            for _ in range(20):
                count += 1
                with Wire(str(nodes.socket)) as bad:
                    try:
                        bad.say(garbage(chance))
                    except OSError:
                        continue  # it was cut off in the middle
            begun = time.monotonic()
            assert good.ask("comm.file", {"from": "a", "to": "b", "text": str(count)}) == {"ok": True}
            assert time.monotonic() - begun < AT_ONCE_S


@pytest.mark.parametrize("for_s", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_garbage_on_the_wire_ends_its_own_connections_and_costs_nothing(
    nodes: NodeWorld, node: NodeProcess, for_s: float
) -> None:
    fuzz(nodes, node, 1, 0)
    before, files = resident_bytes(node.pid), len(list(Path(f"/proc/{node.pid}/fd").iterdir()))
    fuzz(nodes, node, for_s, 1)
    until(lambda: len(list(Path(f"/proc/{node.pid}/fd").iterdir())) <= files)
    assert resident_bytes(node.pid) < before + MORE_MEMORY
    assert node.process.poll() is None
    assert node.events("client failed") == []


def test_two_hundred_clients_at_once_are_each_answered_and_filed_once(nodes: NodeWorld, node: NodeProcess) -> None:
    answers: dict[int, object] = {}

    def client(number: int) -> None:
        with Wire(str(nodes.socket)) as wire:
            answers[number] = wire.greet().ask("comm.file", {"from": "a", "to": "b", "text": f"number {number}"})

    together(client)
    assert answers == {number: {"ok": True} for number in range(CLIENTS)}
    lines = nodes.inbox("b").read_text().splitlines()
    assert len(lines) == CLIENTS
    assert all(sum(f'"number {number}"' in line for line in lines) == 1 for number in range(CLIENTS))
    with Wire(str(nodes.socket)) as wire:
        mail = wire.greet().ask("sotbus.status", {})["status"]["mailboxes"]
    assert mail["lines"] == CLIENTS
    assert mail["syncs"] < CLIENTS


def together(work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_a_mailbox_that_stands_still_holds_up_no_other_and_no_question(nodes: NodeWorld) -> None:
    """Another process holds one inbox's lock; what waits for it is answered at its bound, and nobody else waits."""
    nodes.join("a", "b")
    nodes.serve(env={"SOT_INBOX_LOCK_WAIT_SECS": "6"})  # longer than a busy machine needs for all the others
    with (
        flock.acquire(nodes.folder.inbox_lock("b"), exclusive=True, bound_s=0, polling=False),
        Wire(str(nodes.socket)) as stuck,
        Wire(str(nodes.socket)) as free,
    ):
        stuck.greet().say(request(1, "comm.file", {"from": "a", "to": "b", "text": "waits"}))
        free.greet()
        for number in range(20):
            assert free.ask("comm.file", {"from": "b", "to": "a", "text": str(number)}, number) == {"ok": True}
            assert free.ask("sotbus.status", {}, number)["ok"]
        assert not select.select([stuck.sock], [], [], 0)[0], "the others were answered while it still waited"
        heard = stuck.hear()
    assert heard is not None
    assert heard["payload"]["code"] == "file_failed"
    assert "the inbox lock for @b was held" in heard["payload"]["error"] or "did not come" in heard["payload"]["error"]
    assert not nodes.inbox("b").read_text()
