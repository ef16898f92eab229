"""A message ID at a real node: its first answer holds, whoever has gone and however the folder is named."""

from __future__ import annotations

import signal

from node_world import NodeWorld
from node_world import nodes as nodes

from sotbus.comm import membership


def test_a_repeat_is_answered_ok_after_its_recipient_has_left(nodes: NodeWorld) -> None:
    nodes.join("a", "far")
    payload = {"from": "a", "to": "far", "text": "once", "sotbus": {"id": "m1"}}
    node = nodes.serve()
    with nodes.wire() as wire:
        assert wire.greet().ask("comm.file", payload) == {"ok": True}
    membership.leave(nodes.client("far"), "far")
    for turn in range(2):
        with nodes.wire() as wire:
            wire.greet()
            for number in range(3):
                assert wire.ask("comm.file", payload, number) == {"ok": True}, (turn, number)
            other = wire.ask("comm.file", payload | {"text": "another"}, 9)
            assert other["code"] in ("not_here", "conflict")  # by what was seen of the folder a moment ago, or now
        assert node.end(signal.SIGKILL) == -signal.SIGKILL
        node = nodes.serve()
    assert [line["msg"] for line in nodes.lines("far")] == ["once"]


def test_a_repeat_is_known_when_the_folder_is_named_by_a_link(nodes: NodeWorld) -> None:
    nodes.join("a", "far")
    by_link = nodes.base / "by-link"
    by_link.symlink_to(nodes.home)
    payload = {"from": "a", "to": "far", "text": "once", "sotbus": {"id": "m1"}}
    for name in (by_link, nodes.home):
        node = nodes.serve(env={"SOT_COMM_HOME": str(name)})
        with nodes.wire() as wire:
            assert wire.greet().ask("comm.file", payload) == {"ok": True}
        assert node.end() == 0
    assert [line["msg"] for line in nodes.lines("far")] == ["once"]
