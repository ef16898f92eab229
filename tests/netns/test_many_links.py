"""One hub with many links and many clients: an hour's worth of reconnects, and what it costs the hub that stays."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import trio
from node_hub import ask_to_file, make_hub
from node_world import NodeProcess, NodeWorld, Wire, until
from node_world import nodes as nodes
from zmq_ends import Node, reserved, serving, until_up

pytestmark = pytest.mark.lab

LINKS = 50
CLIENTS = 200

RECONNECTS = 120
"""Of each link: as often as one comes and goes in an hour that waits the longest wait, 30 s, each time."""

WARM_UP = 60
"""Reconnects of each link until the hub has what it keeps."""

MORE_MEMORY = 6 << 20
"""What the hub may have more after the other sixty, in bytes: 2 KiB for each link that came and went."""


GOODBYE = "it said goodbye: it stops"
"""It has a tenth of a second to go out, and not every one of fifty ends on a busy machine gets to it."""


class Hub:
    """The hub's process from outside, while nobody uses it."""

    def __init__(self, nodes: NodeWorld, process: NodeProcess) -> None:
        self._nodes = nodes
        until(lambda: nodes.state()["clients"] == 1)
        self._proc = Path(f"/proc/{process.pid}")
        self.tasks, self.files = self._tasks(), self._files()

    def until_at_rest(self) -> None:
        """Until it has no more tasks and open files than it had."""
        until(lambda: self._tasks() <= self.tasks and self._files() <= self.files)

    def memory(self) -> int:
        """Resident bytes (proc_pid_statm(5))."""
        return int((self._proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def _tasks(self) -> int:
        return int(self._nodes.state()["tasks"])

    def _files(self) -> int:
        return len(list((self._proc / "fd").iterdir()))


def clients(nodes: NodeWorld) -> None:
    """So many clients at once, each with a connection and a message of its own."""
    answers: list[object] = []

    def client(number: int) -> None:
        with Wire(str(nodes.socket)) as wire:
            answers.append(wire.greet().ask("comm.file", {"from": "a", "to": "a", "text": f"client {number}"}))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [{"ok": True}] * CLIENTS


def test_an_hour_of_reconnects_and_two_hundred_clients_leave_nothing_behind(nodes: NodeWorld) -> None:
    ends = [Node("ann", f"box{number}") for number in range(LINKS)]
    with reserved() as address:
        peer = make_hub(nodes, address, ends)
        nodes.join("a")
        node = nodes.serve()

        async def come_and_go(end: Node, times: range) -> None:
            for number in times:
                transport = end.to(peer)
                async with serving(transport) as inbound:
                    await until_up(inbound, peer.name)
                    answer = await ask_to_file(transport, peer, "a", f"{end.name}, {number}")
                    assert answer == {"ok": True}

        async def all_links(times: range) -> None:
            async with trio.open_nursery() as nursery:
                for end in ends:
                    nursery.start_soon(come_and_go, end, times)

        clients(nodes)
        hub = Hub(nodes, node)
        trio.run(all_links, range(WARM_UP))
        hub.until_at_rest()
        before = hub.memory()
        trio.run(all_links, range(WARM_UP, RECONNECTS))
        clients(nodes)
        hub.until_at_rest()
        after = hub.memory()
        links = nodes.state()["links"]
        assert {GOODBYE} <= {link["why"] for link in links} <= {GOODBYE, "the connection has ended"}
        assert all(link["taken_per_s"] > 0 for link in links)
        assert any(link["round_trip_s"] for link in links)  # one that goes soon may not have been asked
        print(f"\n{LINKS} links, {RECONNECTS} reconnects of each: {before / 2**20:.1f}, then {after / 2**20:.1f} MiB")
        assert after < before + MORE_MEMORY
        texts = [line["msg"] for line in nodes.lines("a")]
        assert len(texts) == LINKS * RECONNECTS + 2 * CLIENTS
        assert len(set(texts)) == LINKS * RECONNECTS + CLIENTS
