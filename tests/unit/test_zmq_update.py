"""Another list of peers, another key, while links stand (SIGHUP): whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from sotbus_zmq.key_file import KeyPair, create
from sotbus_zmq.listener import Listener
from sotbus_zmq.serving import Serving
from sotbus_zmq.settings import Settings
from sotbus_zmq.transport import ZmqTransport
from sotbus_zmq.zap import Zap
from zmq_ends import PATIENT, Node, eventually, reserved, serving, until_down, until_up

from sotbus.api import BadRequest, BoxFacts, NotSentError, OutcomeUnknownError
from sotbus.peers import HUB, Peer
from sotbus.testing import FakeInbound


@pytest.fixture
def hub() -> Iterator[Node]:
    with reserved() as address:
        yield Node("ann", "hub", listens=address)


@pytest.fixture
def one() -> Node:
    return Node("bob", "one")


@pytest.fixture
def two() -> Node:
    return Node("eve", "two")


async def test_a_new_peer_may_come_at_once_and_the_others_notice_nothing(hub: Node, one: Node, two: Node) -> None:
    server = hub.to(one.peer())
    async with serving(server) as inbound, serving(one.to(hub.peer())), serving(two.to(hub.peer())) as new:
        await until_up(inbound, one.name)
        assert not server.reaches(two.name)
        server.update([one.peer(HUB), two.peer()])
        assert server.reaches(two.name)
        await until_up(inbound, two.name)
        await until_up(new, hub.name)
        assert await server.request(two.name, b"x", 5.0) == b"x"
        assert inbound.changes == [("up", one.name), ("up", two.name)]
        assert server.peers[0].role == HUB


async def test_a_new_peer_with_an_address_is_dialled(hub: Node, one: Node, two: Node) -> None:
    with reserved() as address:
        two.listens = address
        server = hub.to(one.peer())
        async with serving(server) as inbound, serving(two.to(hub.peer(address=hub.listens))):
            server.update([one.peer(), two.peer()])
            await until_up(inbound, two.name)
            await eventually(lambda: "dialled" in server.statistics().peers[1].ways)


async def test_a_removed_peer_is_cut_off_at_once_told_why_and_does_not_come_back(
    hub: Node, one: Node, two: Node
) -> None:
    async def never(_peer: str, _request: bytes) -> bytes:
        await trio.sleep_forever()

    server, client = hub.to(one.peer(), two.peer()), one.to(hub.peer())
    async with serving(server) as inbound, serving(client, FakeInbound(never)) as own, serving(two.to(hub.peer())):
        await until_up(inbound, one.name, two.name)
        await until_up(own, hub.name)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(OutcomeUnknownError, match="it was taken off this node's list"):
                    await server.request(one.name, b"x", 30.0)

            nursery.start_soon(ask)
            await own.until(lambda asked: bool(asked.requests))
            server.update([two.peer()])
            assert one.name not in inbound.peers
            assert not server.reaches(one.name)
        await until_down(own, hub.name)
        await eventually(lambda: client.statistics().peers[0].failures.get("not on its list", 0) >= 2)
        assert client.statistics().peers[0].failures["bye"] == 1
        assert server.statistics().refused["unknown key"] >= 2
        with pytest.raises(NotSentError, match="this node's key is not on its list"):
            await client.request(hub.name, b"x", 5.0)
        assert inbound.changes[-1] == ("down", one.name)
        assert await server.request(two.name, b"x", 5.0) == b"x"


async def test_a_peer_that_was_dialled_and_is_removed_is_dialled_no_more(hub: Node, one: Node) -> None:
    client = one.to(hub.peer())
    async with serving(hub.to(one.peer())) as theirs, serving(client) as own:
        await until_up(own, hub.name)
        client.update([])
        assert own.changes == [("up", hub.name), ("down", hub.name)]
        await until_down(theirs, one.name)
        connects = len(theirs.changes)
        await trio.sleep(0.3)
        assert len(theirs.changes) == connects
        client.update([hub.peer()])
        await until_up(own, hub.name)


async def test_an_empty_list_is_taken_and_nobody_may_come(hub: Node, one: Node) -> None:
    """The last key may be the one that is not to be trusted any more."""
    server, client = hub.to(one.peer()), one.to(hub.peer())
    async with serving(server) as inbound, serving(client):
        await until_up(inbound, one.name)
        server.update([])
        await eventually(lambda: client.statistics().peers[0].failures.get("not on its list", 0) >= 1)
        assert inbound.peers == set()
    with pytest.raises(BadRequest, match="nobody is on its list"):
        await server.serve(FakeInbound())


async def test_a_peer_with_another_key_is_another_peer(hub: Node, one: Node) -> None:
    server, client = hub.to(one.peer()), one.to(hub.peer())
    newer = replace(one, key=KeyPair.new())
    async with serving(server) as inbound, serving(client) as own:
        await until_up(inbound, one.name)
        server.update([newer.peer()])
        await until_down(own, hub.name)
        async with serving(newer.to(hub.peer())) as new:
            await until_up(new, hub.name)
            assert await server.request(one.name, b"x", 5.0) == b"x"
            assert new.requests == [(hub.name, b"x")]


async def test_a_list_that_is_wrong_changes_nothing(hub: Node, one: Node, two: Node) -> None:
    server = hub.to(one.peer())
    async with serving(server) as inbound, serving(one.to(hub.peer())):
        await until_up(inbound, one.name)
        newer = KeyPair.new()
        for wrong in (
            [two.peer(), replace(two, user="x").peer()],
            [two.peer(), Peer("ann", "hub", "0" * 40)],
            [two.peer(), replace(one, key=newer).peer()],
        ):
            with pytest.raises(BadRequest):
                server.update(wrong, newer)
        assert server.peers == (one.peer(),)
        assert await server.request(one.name, b"x", 5.0) == b"x"
        assert inbound.changes == [("up", one.name)]


async def test_a_new_key_of_a_listener_takes_the_place_of_the_old_on_the_same_address(
    hub: Node, one: Node, two: Node
) -> None:
    server, client = hub.to(one.peer()), one.to(hub.peer())
    async with serving(server) as inbound, serving(client) as own:
        await until_up(inbound, one.name)
        await until_up(own, hub.name)
        newer = replace(hub, key=KeyPair.new())
        server.update([one.peer(), two.peer()], newer.key)
        await until_down(own, hub.name)
        await eventually(lambda: client.statistics().peers[0].failures.get("wrong server key", 0) >= 1)
        assert server.statistics().listening == hub.listens
        client.update([newer.peer()])
        await until_up(own, hub.name)
        assert await server.request(one.name, b"x", 5.0) == b"x"
        async with serving(two.to(newer.peer())) as late:
            await until_up(late, hub.name)


async def test_a_new_key_that_comes_before_the_listener_has_begun_is_taken(
    hub: Node, one: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = hub.to(one.peer())
    newer = replace(hub, key=KeyPair.new())
    begin = server._begin

    def begin_and_update(serving: Serving, zap: Zap, listener: Listener | None) -> None:
        begin(serving, zap, listener)
        server.update([one.peer()], newer.key)

    monkeypatch.setattr(server, "_begin", begin_and_update)
    async with serving(server), serving(one.to(newer.peer())) as own:
        await until_up(own, hub.name)


async def test_a_new_key_of_a_dialler_is_shown_to_everybody(hub: Node, one: Node) -> None:
    server, client = hub.to(one.peer()), one.to(hub.peer())
    async with serving(server) as inbound, serving(client) as own:
        await until_up(own, hub.name)
        newer = replace(one, key=KeyPair.new())
        client.update([hub.peer()], newer.key)
        await until_down(own, hub.name)
        await eventually(lambda: client.statistics().peers[0].failures.get("not on its list", 0) >= 1)
        server.update([newer.peer()])
        await until_up(own, hub.name)
        await until_up(inbound, one.name)


async def test_the_same_key_again_ends_nothing(hub: Node, one: Node) -> None:
    client = one.to(hub.peer())
    async with serving(hub.to(one.peer())), serving(client) as own:
        await until_up(own, hub.name)
        client.update([hub.peer()], KeyPair(one.key.public, one.key.secret))
        assert await client.request(hub.name, b"x", 5.0) == b"x"
        assert own.changes == [("up", hub.name)]


async def test_a_list_may_change_while_nothing_is_served(hub: Node, one: Node) -> None:
    client = one.to()
    client.update([hub.peer()])
    async with serving(hub.to(one.peer())), serving(client) as own:
        await until_up(own, hub.name)


async def test_a_node_without_key_and_peers_waits_for_both(hub: Node, one: Node) -> None:
    client = ZmqTransport(one.name, None, (), PATIENT)
    inbound = FakeInbound()
    async with serving(hub.to(one.peer())), trio.open_nursery() as nursery:
        nursery.start_soon(client.serve, inbound)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(BadRequest, match="no key of its own"):
            client.update([hub.peer()])
        client.update([hub.peer()], one.key)
        await until_up(inbound, hub.name)
        assert await client.request(hub.name, b"x", 5.0) == b"x"
        nursery.cancel_scope.cancel()


def facts(folder: Path, peers: tuple[Peer, ...] = (), settings: object = None) -> BoxFacts:
    return BoxFacts("one", "bob", None, "/comm", settings, peers, str(folder))


async def test_a_reload_reads_the_key_file_again_and_takes_nothing_on_before_all_is_judged(
    hub: Node, one: Node, tmp_path: Path
) -> None:
    folder = tmp_path / "sotbus"
    box = facts(folder, (hub.peer(),), PATIENT)
    with pytest.raises(BadRequest, match="there is no key file"):
        ZmqTransport.of(box)
    create(f"{folder}/one.key", lambda: one.key)
    client = ZmqTransport.of(box)
    assert client.name == one.name
    server = hub.to(one.peer())
    async with serving(server), serving(client) as own:
        await until_up(own, hub.name)
        newer = KeyPair.new()
        create(f"{folder}/one.key", lambda: newer, replace=True)
        (folder / "one.key").chmod(0o644)
        with pytest.raises(BadRequest, match="others may have read it"):
            client.prepare(box)
        assert own.changes == [("up", hub.name)]
        (folder / "one.key").chmod(0o600)
        take_on = client.prepare(box)
        assert await client.request(hub.name, b"x", 5.0) == b"x"
        server.update([replace(one, key=newer).peer()])
        take_on()
        await until_down(own, hub.name)
        await until_up(own, hub.name)


def test_a_box_without_peers_needs_no_key_and_has_no_listener(tmp_path: Path) -> None:
    client = ZmqTransport.of(facts(tmp_path))
    assert client.peers == ()
    assert client.settings == Settings()
    with pytest.raises(BadRequest, match="there is no key file"):
        ZmqTransport.of(facts(tmp_path, (), Settings(listen="tcp://127.0.0.1:0")))
