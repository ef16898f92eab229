"""A node of a :class:`~node_world.NodeWorld` as a hub: what it takes for linked boxes of a test to dial it and ask."""

from __future__ import annotations

import json
from collections.abc import Iterable

from node_world import NodeWorld
from sotbus_zmq.transport import ZmqTransport
from zmq_ends import Node

from sotbus import link_ops
from sotbus.contracts import Filing
from sotbus.link_delivery import COMM_FILE, request_of
from sotbus.peers import Peer

ANSWER_S = 20.0
"""Later than any node answers."""


def make_hub(nodes: NodeWorld, address: str, ends: Iterable[Node]) -> Peer:
    """Write the config, the key and the peers of a node that is yet to start; answers it as the ends' peer."""
    folder = nodes.config / "sotbus"
    folder.mkdir(parents=True)
    (folder / "vm.toml").write_text(
        f'plugins = ["filesystem", "nfs", "zmq"]\n[topology]\nhub = "vm"\n[plugin.zmq]\nlisten = "{address}"\n'
    )
    (folder / "vm.peers.toml").write_text(
        "".join(f'[peers."{end.name}"]\nrole = "linked"\npublic_key = "{end.key.public}"\n' for end in ends)
    )
    made = nodes.command("keys", "new")
    assert made.returncode == 0, made.stderr
    key = json.loads(nodes.command("keys", "show", "--json").stdout)
    return Peer(key["user"], "vm", key["public_key"], "hub", address)


async def ask_to_file(transport: ZmqTransport, hub: Peer, to: str, text: str) -> dict[str, object]:
    """What the hub answers to a linked box's message, whose ID is its text."""
    filing = Filing("far", to, "daemon", text, False, text, hub.name)
    request = link_ops.encode_request(COMM_FILE, request_of(filing, forwarded=True))
    return link_ops.decode_answer(await transport.request(hub.name, request, ANSWER_S))
