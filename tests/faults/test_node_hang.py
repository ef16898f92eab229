"""A node whose comm folder lies on a file system that stands still: who else is served meanwhile, and what is said."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.faultfs import MountedFaultFS
from node_world import NodeWorld

from sotbus.comm.folder import Folder

pytestmark = pytest.mark.faults

STANDS_STILL_S = 15
AT_ONCE_S = 2.0
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
        longest = 0.0
        for number in range(10):
            asked = time.monotonic()
            assert free.ask("comm.file", {"from": "b", "to": "a", "text": str(number)}, number) == {"ok": True}
            assert free.ask("sotbus.status", {}, number)["ok"]
            longest = max(longest, time.monotonic() - asked)
            time.sleep(0.2)
        assert longest < AT_ONCE_S
        heard = stuck.hear()
        took = time.monotonic() - begun
    assert heard is not None
    assert heard["payload"]["code"] == "file_failed"
    assert heard["payload"]["outcome_unknown"] is True
    assert FILE_S <= took < STANDS_STILL_S
    assert node.process.poll() is None
    assert [line["msg"] for line in nodes.lines("a")] == [str(number) for number in range(10)]
