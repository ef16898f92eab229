"""The check of this box's node: that it runs where one is needed, and reaches its hub."""

from __future__ import annotations

import shlex

from sotbus.comm import manager_record
from sotbus.comm.topology import ENDPOINT
from sotbus.doctor.check import NotJudged, Verdict, counted, fault, sound
from sotbus.doctor.place import Place
from sotbus.peers import HUB

NONE_NEEDED = "no node runs here; none is needed"
SERVE = "run: sotbus serve"
AGAIN = "see what it last logged, end it, then run: sotbus serve"


def node(place: Place) -> Verdict:
    """This box's node runs, and its link to its hub is up, where this box needs that to send or to be reached.

    A stopped node is no fault without a topology, nor in a shared home whose boxes are linked to nobody: each files
    its mail itself there.
    """
    view = place.node
    if view.silent:
        return fault(view.silent, AGAIN)
    if not place.topology.configured:
        if view.absent:
            return sound(NONE_NEEDED)
        return sound(_running(place))
    if view.strange:
        raise NotJudged(f"a daemon answers here, and tells no state: {view.strange}")
    if place.topology.names(place.box.declared_host):
        return _hubs(place)
    if view.hub is None and files_itself(place) and not _is_linked(place) and not _trusts(place, HUB):
        if view.absent:
            return sound(f"{NONE_NEEDED}: this box files its mail itself")
        return sound(f"{_running(place)}; it has no hub, and needs none: this box files its mail itself")
    return way_to_hub(place)[1]


def _hubs(place: Place) -> Verdict:
    """The topology's hub: other boxes' nodes hand it mail, where it listens for any or has any as its peers."""
    view = place.node
    if view.absent:
        if _listens(place) or _trusts(place):
            return fault(f"this box is the hub, and other boxes cannot reach it: {view.absent}", SERVE)
        return sound(f"{NONE_NEEDED}: no other box is linked to this one")
    if not view.serves(place.folder.root):
        return _elsewhere(place)
    if view.links and not view.holds_links:
        where = place.config_path or "the config"
        return fault(
            f"runs (pid {view.pid}), and no plugin of its config holds links, so no other box reaches it",
            f'add "zmq" to plugins in {where}, and start the node again',
        )
    if view.deaf and _listens(place):
        return fault(
            f"runs (pid {view.pid}), and {', '.join(view.deaf)} does not listen, so no box that dials reaches it",
            "run: sotbus serve --check; the node's event 'delivery ended' says why",
        )
    return sound(_running(place))


def way_to_hub(place: Place) -> tuple[str, Verdict]:
    """How this box's mail gets to its hub, as the end of "its mail goes ...", ``""`` where it does not; the verdict.

    *Errors*: :class:`NotJudged` where the config or the comm folder cannot be used.
    """
    view, topology = place.node, place.topology
    if view.absent:
        relay = place.relay if topology.relayed else view
        if not relay.absent and not relay.silent:
            way = f"to the daemon at ${ENDPOINT}"
            return way, sound(f"no node runs here; mail for other boxes goes {way}")
        why = view.absent if relay is view else f"{view.absent}; ${ENDPOINT}: {relay.absent or relay.silent}"
        return "", fault(f"no node answers here, and mail for {topology.hub_name} goes by it: {why}", SERVE)
    if view.silent:
        return "", fault(view.silent, AGAIN)
    if view.strange:
        return "", fault(f"a daemon answers here, and tells no state: {view.strange}", "see that it reaches the hub")
    if not view.serves(place.folder.root):
        return "", _elsewhere(place)
    link = view.hub
    if link is None:
        return "", fault(
            f"runs (pid {view.pid}), and none of its peers is its hub, so no mail gets to {topology.hub_name}",
            ("run: " if _trusts(place, HUB) else _trust_first(topology.hub or "HOST")) + f"kill -HUP {view.pid}",
        )
    if link.up:
        return f"by this box's node to {link.node}", sound(f"runs, link to {link.node} up")
    down = f"runs (pid {view.pid}), link to {link.node} down"
    if not view.holds_links:
        where = place.config_path or "the config"
        return "", fault(
            f"{down}: no plugin that the config names holds links",
            f'add "zmq" to plugins in {where}, then start the node again: sotbus serve',
        )
    return "", fault(
        f"{down}: {link.why or 'it does not say why'}",
        f"see that the node of {link.node} runs and trusts this one (there: sotbus node), and that its address and key "
        "in this box's peers file are right (here: sotbus keys show)",
    )


def _trust_first(host: str) -> str:
    """What makes the hub a peer, before the node reads its peers again."""
    return (
        f"run: sotbus keys trust USER.{host} 'KEY' --role hub --address tcp://{host}:PORT (as sotbus keys show "
        "prints it there), then: "
    )


def files_itself(place: Place) -> bool:
    """Whether this box's lock manager is the record's, so that it needs nobody to file mail in the comm folder."""
    try:
        return manager_record.allows(manager_record.read(place.folder), place.identity)
    except OSError:
        return False


def _is_linked(place: Place) -> bool:
    return place.topology.is_linked(place.identity, place.box.declared_host)


def _listens(place: Place) -> bool:
    """Whether a plugin that the config names has an address to listen on."""
    tables = place.config.plugin_tables
    return any(tables[name].get("listen") for name in place.config.plugins if name in tables)


def _trusts(place: Place, role: str = "") -> bool:
    """Whether the peers file names a node of this role, or any. *Errors*: ConfigError, the file cannot be used."""
    return any(peer.role == role or not role for peer in place.peers)


def _elsewhere(place: Place) -> Verdict:
    view = place.node
    root, other = shlex.quote(place.folder.root), shlex.quote(view.comm_folder)
    return fault(
        f"runs (pid {view.pid}), but for another comm folder, {view.comm_folder}",
        f"if that is the right one: SOT_COMM_HOME={other} sotbus doctor; else end it, then run: "
        f"SOT_COMM_HOME={root} sotbus serve",
    )


def _running(place: Place) -> str:
    view = place.node
    if view.strange:
        return f"a daemon answers here, and tells no state: {view.strange}"
    elsewhere = place.named_folder is not None and not view.serves(place.named_folder.root)
    what = f"runs for another comm folder, {view.comm_folder}" if elsewhere else "runs"
    up = sum(link.up for link in view.links)
    return f"{what}, {up} of {counted(len(view.links), 'link')} up" if view.links else f"{what}, no links"
