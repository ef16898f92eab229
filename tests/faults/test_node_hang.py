"""A node whose comm folder lies on a file system that stands still: who else is served meanwhile, and what is said."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from faults.faultfs import MountedFaultFS
from node_hub import ask_to_file, make_hub
from node_world import NodeWorld
from zmq_ends import Node, reserved, serving, until_up

from sotbus.comm.folder import Folder
from sotbus.peers import Peer

pytestmark = pytest.mark.faults

STANDS_STILL_S = 25
WHOLE_MINUTE_S = 60.0
AT_ONCE_S = 2.0
"""What a question takes, most of the time."""

SLACK_S = 8.0
"""What a machine may add that stands still for seconds; far less than what hangs."""

FILE_S = 10.0
"""How long a node works on one filing before it answers that its outcome is unknown."""


@pytest.fixture
def nodes(tmp_path: Path, faultfs: MountedFaultFS) -> Iterator[NodeWorld]:
    world = NodeWorld(tmp_path)
    world.home = faultfs.mount / "comm"
    world.folder = Folder(str(world.home))
    yield world
    world.close()


def test_an_inbox_whose_sync_stands_still_holds_up_no_other_mailbox_and_no_question(
    nodes: NodeWorld, faultfs: MountedFaultFS
) -> None:
    nodes.join("a", "b")
    node = nodes.serve()
    with nodes.wire() as stuck, nodes.wire() as free:
        free.greet()
        assert free.ask("comm.file", {"from": "a", "to": "b", "text": "before"}) == {"ok": True}
        faultfs.inject({"op": "fsync", "path": "*/inbox/b.jsonl", "sleep_s": STANDS_STILL_S, "times": 1})
        stuck.greet()
        begun = time.monotonic()
        stuck.ask_later("comm.file", {"from": "a", "to": "b", "text": "stands still"})
        answered_after_s: list[float] = []
        for number in range(10):
            asked = time.monotonic()
            assert free.ask("comm.file", {"from": "b", "to": "a", "text": str(number)}, number) == {"ok": True}
            assert free.ask("sotbus.status", {}, number)["ok"]
            answered_after_s.append(time.monotonic() - asked)
            time.sleep(0.2)
        assert statistics.median(answered_after_s) < AT_ONCE_S
        assert max(answered_after_s) < SLACK_S
        heard = stuck.hear()
        took = time.monotonic() - begun
    assert heard is not None
    assert heard["payload"]["code"] == "file_failed"
    assert heard["payload"]["outcome_unknown"] is True
    assert FILE_S <= took < STANDS_STILL_S
    assert node.process.poll() is None
    assert [line["msg"] for line in nodes.lines("a")] == [str(number) for number in range(10)]


@pytest.mark.lab  # for its length
def test_a_folder_that_stands_still_for_a_minute_holds_up_no_link_and_no_question(
    nodes: NodeWorld, faultfs: MountedFaultFS
) -> None:
    """Its whole file system hangs, as a hard mount does whose server is away."""
    end = Node("ann", "far")

    async def test(hub: Peer) -> None:
        transport = end.to(hub)
        async with serving(transport) as inbound, trio.open_nursery() as nursery:
            await until_up(inbound, hub.name)
            assert await ask_to_file(transport, hub, "a", "before") == {"ok": True}
            answers: dict[str, dict[str, object]] = {}
            took: list[float] = []
            answered_after_s: list[float] = []

            async def ask(text: str) -> None:
                begun = trio.current_time()
                answers[text] = await ask_to_file(transport, hub, "a", text)
                took.append(trio.current_time() - begun)

            os.kill(faultfs.pid, signal.SIGSTOP)
            try:
                over = trio.current_time() + WHOLE_MINUTE_S
                nursery.start_soon(ask, "stands still")
                await trio.sleep(1)
                nursery.start_soon(ask, "later")  # when what was seen of the folder is not recent any more
                with trio.CancelScope(deadline=over):
                    while True:
                        asked = trio.current_time()
                        with trio.fail_after(SLACK_S):
                            status = await trio.to_thread.run_sync(nodes.state)
                        assert status["links"][0]["up"]
                        answered_after_s.append(trio.current_time() - asked)
                        await trio.sleep(0.25)
            finally:
                os.kill(faultfs.pid, signal.SIGCONT)
            assert len(answered_after_s) > WHOLE_MINUTE_S / 3
            assert statistics.median(answered_after_s) < AT_ONCE_S
            assert inbound.changes == [("up", hub.name)]
            assert status["links"][0]["round_trip_s"] < SLACK_S
            assert set(answers) == {"stands still", "later"}, "nothing was said of a filing that stands still"
            assert all("error" in answer for answer in answers.values()), answers
            assert max(took) < FILE_S + SLACK_S

            async def filed_again() -> bool:
                return await ask_to_file(transport, hub, "a", "stands still") == {"ok": True}

            with trio.fail_after(20):
                while not await filed_again():
                    await trio.sleep(0.5)
        lines = [line["msg"] for line in nodes.lines("a")]
        assert lines == ["before", "stands still"]

    nodes.join("a")
    with reserved() as address:
        hub = make_hub(nodes, address, [end])
        nodes.serve()
        trio.run(test, hub)
