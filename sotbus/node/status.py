"""A node's state for the person who looks at it: ``sotbus node``."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from sotbus.node.node import Node


def status_of(node: Node) -> dict[str, Any]:
    """Links and their state, round trips, filings by outcome, queue depths. No I/O, no message text, no key."""
    client = node.filer.view.client
    now = trio.current_time()
    total, each = node.writers.statistics()
    return {
        "node": node.setup.name,
        "pid": os.getpid(),
        "up_s": round(now - node.started_at, 1),
        "comm_folder": client.folder.root,
        "record": node.record,
        "socket": node.setup.socket,
        "clients": len(node.wire.connections),
        "requests": dict(node.wire.requests),
        "malformed": node.wire.malformed,
        "rows": sorted(node.heartbeat.held),
        "filings": dict(node.filer.counts),
        "mailboxes": asdict(total),
        "mailbox": {handle: asdict(one) for handle, one in each.items() if one.depth},
        "store": asdict(node.store.statistics()),
        "links": links_of(node),
        "inbound": dict(node.inbound.counts),
        "deliveries": {name: _statistics(delivery) for name, delivery in node.deliveries},
        "restarts": dict(node.restarts),
        "log": node.log.statistics(),
    }


def links_of(node: Node) -> list[dict[str, Any]]:
    """Each peer: what it is to this node, whether its link is up, since when, and its last round trip."""
    now = trio.current_time()
    trips: dict[str, float] = {}
    for _, delivery in node.deliveries:
        trips.update(_statistics(delivery).get("round_trip_s", {}))
    found = []
    for name, peer in sorted(node.links.peers.items()):
        since = node.links.up.get(name)
        found.append(
            {
                "node": name,
                "role": peer.role,
                "address": peer.address,
                "up": since is not None,
                "up_s": round(now - since, 1) if since is not None else None,
                "round_trip_s": round(trips[name], 6) if name in trips else None,
            }
        )
    return found


def _statistics(delivery: object) -> dict[str, Any]:
    ask = getattr(delivery, "statistics", None)
    found = ask() if callable(ask) else {}
    return found if isinstance(found, dict) else {}
