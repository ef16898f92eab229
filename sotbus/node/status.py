"""A node's state for the person who looks at it: ``sotbus node``."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sotbus.node.node import Node
    from sotbus.node.rate import Rate

LINK = "link"
"""The role of a box of another release that dialled in, as its hello says it (decisions, sot-comm 23)."""

DIALLED, DIALS_IN, DIALS_SOCKET = "is dialled", "dials in", "dials in over the socket"
"""How a link comes about."""


def status_of(node: Node) -> dict[str, Any]:
    """Links and their state, round trips, filings by outcome, queue depths. No I/O, no message text, no key."""
    client = node.filer.view.client
    now = trio.current_time()
    total, each = node.writers.statistics()
    return {
        "node": node.setup.name,
        "pid": os.getpid(),
        "up_s": round(now - node.started_at, 1),
        "tasks": trio.lowlevel.current_statistics().tasks_living,
        "comm_folder": client.folder.root,
        "record": node.record,
        "socket": node.setup.socket,
        "clients": len(node.wire.connections),
        "requests": dict(node.wire.requests),
        "malformed": node.wire.malformed,
        "notices": node.ops.notices,
        "rows": sorted(node.heartbeat.held),
        "filings": dict(node.filer.counts),
        "filings_per_s": round(node.filer.rate.per_s(), 3),
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
    """Each peer: what it is to this node, whether its link is up and since when, or why not, its round trip, its rates.

    The round trip is what the transport measured last, or the last request's; None before both. The boxes that dialled
    in over the socket follow, by the name in their hello; nobody measures their round trip.
    """
    now = trio.current_time()
    trips: dict[str, float] = {}
    why: dict[str, str] = {}
    for _, delivery in node.deliveries:
        statistics = _statistics(delivery)
        trips.update(statistics.get("round_trip_s", {}))
        for peer_name, peer in _peers(statistics):
            why[peer_name] = str(peer.get("why") or "")
            if isinstance(peer.get("round_trip_s"), float):
                trips[peer_name] = peer["round_trip_s"]
    found = []
    for name, one in sorted(node.links.peers.items()):
        since = node.links.up.get(name)
        found.append(
            {
                "node": name,
                "role": one.role,
                "way": DIALLED if one.address else DIALS_IN,
                "address": one.address,
                "up": since is not None,
                "up_s": round(now - since, 1) if since is not None else None,
                "why": why.get(name, "") if since is None else "",
                "round_trip_s": round(trips[name], 6) if name in trips else None,
                "asked_per_s": round(node.links.asked[name].per_s(), 3),
                "taken_per_s": round(node.links.taken[name].per_s(), 3),
            }
        )
    for name, client in sorted(node.links.clients.items()):
        found.append(
            {
                "node": name,
                "role": LINK,
                "way": DIALS_SOCKET,
                "address": "",
                "up": True,
                "up_s": round(now - node.connected.get(client, now), 1),
                "why": "",
                "round_trip_s": None,
                "asked_per_s": _per_s(node.links.asked, name),
                "taken_per_s": _per_s(node.links.taken, name),
            }
        )
    return found


def _per_s(rates: Mapping[str, Rate], name: str) -> float:
    """A box's rate; 0 where it has not been asked, or has not asked, since it dialled in."""
    return round(rates[name].per_s(), 3) if name in rates else 0.0


def _peers(statistics: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a transport tells of its peers, by name; a plugin may tell anything, or nothing."""
    transport = statistics.get("transport")
    peers = transport.get("peers") if isinstance(transport, dict) else None
    for peer in peers if isinstance(peers, (list, tuple)) else ():
        if isinstance(peer, dict) and isinstance(peer.get("name"), str):
            yield peer["name"], peer


def _statistics(delivery: object) -> dict[str, Any]:
    ask = getattr(delivery, "statistics", None)
    found = ask() if callable(ask) else {}
    return found if isinstance(found, dict) else {}
