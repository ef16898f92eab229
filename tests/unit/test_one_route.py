"""A send that is refused: it is kept nowhere, and nobody else is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon, answering
from node_world import NodeWorld, nodes

__all__ = ["nodes"]

NO = b'{"v":1,"id":1,"kind":"res","op":"comm.file","payload":{"error":"not today","code":"file_failed"}}\n'
YES = b'{"v":1,"id":1,"kind":"res","op":"comm.file","payload":{"ok":true}}\n'
HELLO = b'{"v":1,"id":0,"kind":"res","op":"hello","payload":{"protocol":3}}\n'


@contextmanager
def daemon_at(path: Path, answer: bytes) -> Iterator[FakeDaemon]:
    """A daemon that answers every request alike."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fake = FakeDaemon(path, answering(HELLO + answer))
    path.chmod(0o600)
    try:
        yield fake
    finally:
        fake.close()


def filings(fake: FakeDaemon) -> int:
    """How many filings it was asked for."""
    return sum(b'"op":"comm.file"' in got for got in fake.got)


@pytest.mark.spec("S98")
def test_a_send_that_the_daemon_refuses_is_asked_once_and_the_hub_not_at_all(nodes: NodeWorld) -> None:
    nodes.join("a", "far")
    nodes.client("a").writer_gate.manager()  # the record, as a first filing makes it
    nodes.refuse_appends()
    hub = nodes.runtime / "hub" / "hub.sock"
    with daemon_at(nodes.socket, NO) as own, daemon_at(hub, YES) as relay:
        sent = nodes.sotbus("a", "send", "@far", "x", env={"SOT_RELAY_ENDPOINT": f"unix:{hub}"})
    assert (sent.returncode, sent.stdout) == (1, "")
    assert sent.stderr.startswith("FAILED -> @far: not today\n")
    assert (filings(own), filings(relay)) == (1, 0)
    assert nodes.lines("far") == []


@pytest.mark.spec("S98")
@pytest.mark.parametrize("served", [False, True], ids=["no node", "a node"])
def test_a_send_to_one_who_is_away_is_not_filed_once_they_are_back(nodes: NodeWorld, served: bool) -> None:
    nodes.join("a", "far")
    nodes.amend("far", last_seen="2026-01-01T00:00:00Z", pid=0, start=0)
    by_node = ("--id", "m1") if served else ()  # the node alone keeps message IDs
    if served:
        nodes.serve()
    sent = nodes.sotbus("a", "send", *by_node, "@far", "x")
    assert (sent.returncode, sent.stdout) == (1, "")
    assert sent.stderr.startswith("FAILED -> @far: no live session holds @far")
    nodes.join("far")
    assert nodes.sotbus("far", "poll").stdout == "No new messages.\n"
    assert nodes.sotbus("a", "send", "@far", "y").returncode == 0  # as it is live again
    assert [line["msg"] for line in nodes.lines("far")] == ["y"]
