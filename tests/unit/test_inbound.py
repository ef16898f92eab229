"""What a node answers to other nodes, and a guest's way to its hub: over the fake transport, on a real folder."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from node_world import NodeWorld, nodes
from world import EXT4, World

from sotbus import message
from sotbus.comm import manager_record
from sotbus.comm.client import Client
from sotbus.comm.topology import Topology
from sotbus.contracts import Filing
from sotbus.link_delivery import LinkDelivery
from sotbus.link_ops import decode_answer, decode_request, encode_answer, encode_request
from sotbus.node import setup
from sotbus.node.filer import Filer
from sotbus.node.folder_view import FolderView
from sotbus.node.inbound import MAX_IN_FLIGHT, NodeInbound
from sotbus.node.links import Links
from sotbus.peers import Peer
from sotbus.testing import FakeInbound, FakeTransport

__all__ = ["nodes"]

NFS3 = "nfs filer.example:/export rw,vers=3,local_lock=none"
OTHER_NFS = f"nfs4 filer.example:/export\n{'f' * 32}\n"
MESSAGE = {"from": "a", "to": "b", "text": "t", "broadcast": False}


class Place:
    """A node's filer, its inbound side, what it appended, and the node ``far`` that it may be linked to."""

    def __init__(self, client: Client, roles: dict[str, str]) -> None:
        self.client = client
        self.transport, self.far_end = FakeTransport.pair("near", "u.far")
        peers = [Peer("u", node.removeprefix("u."), "", role) for node, role in roles.items()]
        self.links = Links([LinkDelivery(self.transport)], peers)
        self.filer = Filer(FolderView(client, trio.CapacityLimiter(4)), self._append, self.links, self._before)
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.inbound = NodeInbound(self.filer, self.links, lambda event, **fields: self.told.append((event, fields)))
        self.appended: list[Filing] = []
        self.gate: trio.Event | None = None

    async def _append(self, filing: Filing, manager: object, bound_s: float) -> None:
        await trio.lowlevel.checkpoint()
        if self.gate is not None:
            await self.gate.wait()
        self.appended.append(filing)

    async def _before(self, filing: Filing) -> bool:
        await trio.lowlevel.checkpoint()
        return False

    async def ask(self, peer: str, request: bytes | dict[str, Any], op: str = "comm.file") -> dict[str, Any]:
        data = request if isinstance(request, bytes) else encode_request(op, request)
        return decode_answer(await self.inbound.answer(peer, data))


def client_of(world: World, *, hub: str | None = None) -> Client:
    """The client of a node's folder that lists @b."""
    plain = world.client("node")
    plain.ensure()
    entry = {"host": "vm", "root": "/x", "last_seen": message.stamp()}

    def change(document: dict[str, Any]) -> bool:
        document["agents"]["b"] = entry
        return True

    plain.registry.update(change, 1.0)
    topology = Topology(hub)
    return Client(world.folder, plain.box, {}, plain.settings, notify=world.notes.append, topology=topology)


def run(test: Callable[[], Awaitable[None]]) -> None:
    trio.run(test)


def test_each_node_has_what_its_role_allows(world: World) -> None:
    async def test() -> None:
        client = client_of(world)
        setup.claim_record(client)
        roles = {"u.hub": "hub", "u.linked": "linked", "u.guest": "guest", "u.peer": "peer"}
        place = Place(client, roles)
        for node in ("u.hub", "u.linked", "u.guest"):
            assert await place.ask(node, MESSAGE) == {"ok": True}, node
        stranger = await place.ask("u.stranger", MESSAGE)
        assert (stranger["code"], stranger["error"]) == ("peer_rejected", "this node does not know u.stranger")
        assert (await place.ask("u.peer", MESSAGE))["code"] == "op_denied"
        assert len(place.appended) == 3
        assert place.appended[0] == Filing("a", "b", "daemon", "t")
        assert place.inbound.counts == {"requests": 5, "malformed": 0, "refused": 2, "busy": 0}
        place.links.replace([])
        assert (await place.ask("u.hub", MESSAGE))["code"] == "peer_rejected", "the peers as they are now"

    run(test)


def test_an_unknown_op_is_answered_as_such_and_a_stranger_learns_nothing(world: World) -> None:
    async def test() -> None:
        place = Place(client_of(world), {"u.linked": "linked", "u.peer": "peer"})
        for node in ("u.linked", "u.peer"):
            assert await place.ask(node, {}, "x") == {"error": "unknown op: x", "code": "unknown_op"}
        assert (await place.ask("u.stranger", {}, "x"))["code"] == "peer_rejected"

    run(test)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"v":1,"op":7,"payload":{}}',
        b'{"v":2,"op":"comm.file","payload":{}}',
        b'{"v":1,"op":"comm.file","payload":null}',
        b'{"v":1,"op":"comm.file","payload":{"from":"\\udfff"}}',
        b"[" * 100_000,
        b" " * ((1 << 20) + 1),
    ],
    ids=range(10),
)
def test_a_malformed_request_is_answered_counted_and_told(world: World, data: bytes) -> None:
    async def test() -> None:
        place = Place(client_of(world), {"u.linked": "linked"})
        answer = await place.ask("u.linked", data)
        assert answer["code"] == "bad_request"
        assert answer["error"].startswith("this is no request of a link: ")
        assert place.inbound.counts["malformed"] == 1
        ((event, fields),) = place.told
        assert (event, fields["peer"]) == ("malformed request", "u.linked")

    run(test)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"to": 7}, "bad_handle"),
        ({"to": "../b"}, "bad_handle"),
        ({"text": None}, "bad_request"),
        ({"from": []}, "bad_request"),
        ({"broadcast": "no"}, "bad_request"),
        ({"forwarded": 1}, "bad_request"),
        ({"sotbus": {"id": 7}}, "bad_request"),
        ({"to": "nobody"}, "not_here"),
    ],
)
def test_a_wrong_message_is_refused_with_its_code(world: World, wrong: dict[str, Any], code: str) -> None:
    async def test() -> None:
        client = client_of(world)
        setup.claim_record(client)
        place = Place(client, {"u.linked": "linked"})
        assert (await place.ask("u.linked", MESSAGE | wrong))["code"] == code
        assert place.appended == []

    run(test)


def test_a_node_with_too_much_under_way_is_busy_and_the_others_are_not(world: World) -> None:
    async def test() -> None:
        client = client_of(world)
        setup.claim_record(client)
        place = Place(client, {"u.one": "linked", "u.two": "linked"})
        place.gate = trio.Event()
        answers: list[dict[str, Any]] = []

        async def ask(node: str) -> None:
            answers.append(await place.ask(node, MESSAGE))

        async with trio.open_nursery() as nursery:
            for _ in range(MAX_IN_FLIGHT):
                nursery.start_soon(ask, "u.one")
            nursery.start_soon(ask, "u.two")
            await trio.testing.wait_all_tasks_blocked(0.05)
            busy = await place.ask("u.one", MESSAGE)
            assert busy["code"] == "busy"
            assert place.inbound.under_way == MAX_IN_FLIGHT + 1
            place.gate.set()
        assert answers == [{"ok": True}] * (MAX_IN_FLIGHT + 1)
        assert (place.inbound.counts["busy"], place.inbound.under_way) == (1, 0)
        assert await place.ask("u.one", MESSAGE) == {"ok": True}

    run(test)


def test_a_node_that_ends_takes_nothing_new(world: World) -> None:
    async def test() -> None:
        client = client_of(world)
        setup.claim_record(client)
        place = Place(client, {"u.one": "linked"})
        place.inbound.draining = True
        assert (await place.ask("u.one", MESSAGE))["code"] == "busy"
        assert (place.appended, place.inbound.under_way) == ([], 0)

    run(test)


def test_a_link_is_up_from_when_it_came_to_when_it_went(world: World) -> None:
    async def test() -> None:
        place = Place(client_of(world), {"u.one": "linked"})
        place.inbound.up("u.one")
        assert set(place.links.up) == {"u.one"}
        place.inbound.down("u.one")
        place.inbound.down("u.one")  # twice is no fault
        assert place.links.up == {}
        assert [event for event, _ in place.told] == ["link up", "link down", "link down"]
        assert all(fields["role"] == "linked" for _, fields in place.told)

    run(test)


# ---- a guest


@pytest.mark.spec("S64", "S67")
@pytest.mark.parametrize("record", [None, OTHER_NFS], ids=["no record", "the hub's record"])
def test_a_guest_never_writes_the_record_and_forwards_once_what_it_cannot_file(
    world: World, record: str | None
) -> None:
    async def test() -> None:
        client = client_of(world, hub="far")
        world.mountinfo.write_text(EXT4 + f"22 21 0:50 / {world.home} rw,relatime - {NFS3}\n")
        path = Path(world.folder.manager_record)
        if record is not None:
            path.write_text(record)
        setup.claim_record(client)

        def stands() -> bool:
            return manager_record.read(world.folder) is None if record is None else path.read_text() == record

        assert stands(), "never written at the start"
        place = Place(client, {"u.far": "hub", "u.box": "guest"})
        verbatim = {"error": "no live session holds @q", "code": "no_live_session"}

        async def answer(_peer: str, request: bytes) -> bytes:
            await trio.lowlevel.checkpoint()
            return encode_answer({"ok": True} if decode_request(request)[1]["to"] != "q" else verbatim)

        far = FakeInbound(answer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(place.far_end.serve, far)
            await trio.testing.wait_all_tasks_blocked()

            async def file(to: str, forwarded: bool = False) -> dict[str, Any]:
                filing = Filing("a", to, "daemon", "t")
                return await place.filer.answer(filing, forwarded=forwarded, origin=None, bound_s=5.0)

            assert await file("b") == {"ok": True}
            assert await file("unlisted here") != {"ok": True}
            assert await file("unlisted") == {"ok": True}, "a guest does not look at its own registry"
            assert await file("q") == verbatim
            again = await file("b", forwarded=True)
            assert again["code"] == "file_failed"
            assert "not its folder's hub (vm)" in again["error"]
            assert (await place.ask("u.box", MESSAGE | {"forwarded": True}))["code"] == "file_failed"
            nursery.cancel_scope.cancel()
        asked = [decode_request(request)[1] for _, request in far.requests]
        assert [(one["to"], one["forwarded"]) for one in asked] == [("b", True), ("unlisted", True), ("q", True)]
        assert place.appended == []
        assert stands(), "never written by a filing"
        assert (await place.ask("u.box", MESSAGE))["code"] == "file_failed", "the hub cannot be reached any more"

    run(test)


@pytest.mark.spec("S67")
def test_a_guests_node_leaves_the_record_alone_and_names_the_way_to_the_hub(nodes: NodeWorld) -> None:
    nodes.join("a", "far")
    nodes.refuse_appends()
    config = nodes.config / "sotbus" / "vm.toml"
    config.parent.mkdir(parents=True)
    config.write_text('[topology]\nhub = "labhost"\n')
    node = nodes.serve()
    assert not os.path.exists(nodes.folder.manager_record)
    with nodes.wire() as wire:
        answer = wire.greet().ask("comm.file", MESSAGE | {"to": "far"})
    assert answer["code"] == "file_failed"
    assert "has no link to it" in answer["error"]
    assert "sotbus keys trust" in answer["hint"]
    assert not os.path.exists(nodes.folder.manager_record)
    assert nodes.lines("far") == []
    assert node.end() == 0
