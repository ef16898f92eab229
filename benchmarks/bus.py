"""``await bus.send`` beside the synchronous send; and how long after its filing a followed line is shown."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import trio

from benchmarks.harness import ms, ratio, timed, verdict
from benchmarks.place import client
from sotbus.bus import open_bus_over
from sotbus.cli.watch import follow
from sotbus.comm import membership
from sotbus.comm.client import Client
from sotbus.comm.sending import Outbox

SENDS = 1000
LINES = 200
TEXT = "x" * 200
SHOWN_WITHIN_S = 0.050


def sends(base: Path) -> bool:
    """A durable send through the Python API, touches and all, and the same with the outbox alone, in turn."""
    membership.join(client(base, "alpha"))
    to = membership.join(client(base, "beta")).handle
    outbox = Outbox(client(base, "alpha"))
    awaited: list[float] = []
    plain: list[float] = []

    async def both() -> None:
        async with open_bus_over(partial(client, base, "alpha")) as bus:
            for _ in range(SENDS):
                plain.append(timed(partial(outbox.send, to, TEXT)))
                start = time.perf_counter()
                await bus.send("@" + to, TEXT)
                awaited.append(time.perf_counter() - start)

    trio.run(both)
    print(f"await bus.send: {ms(awaited)}; Outbox.send: {ms(plain)}")
    return verdict("await bus.send / Outbox.send", ratio(awaited, plain), 2.5)


def shown(base: Path) -> bool:
    """From the answer of a send to the line's being handed to the printer, both in this process."""
    membership.join(client(base, "gamma"))
    reader = client(base, "delta")
    to = membership.join(reader).handle
    waits = trio.run(_waits, client(base, "gamma"), reader, to)
    worst = max(waits)
    met = worst <= SHOWN_WITHIN_S
    print(f"a line is shown after its filing: {ms(waits)}")
    print(f"  worst: {worst * 1e3:.1f} ms (target: at most {SHOWN_WITHIN_S * 1e3:g} ms) {'met' if met else 'MISSED'}")
    return met


async def _waits(sender: Client, reader: Client, to: str) -> list[float]:
    """Seconds from each filing to its showing."""
    outbox = Outbox(sender)
    filed: list[float] = []
    seen: list[float] = []

    def file(text: str) -> None:
        outbox.send(to, text)
        filed.append(time.perf_counter())

    def show(_: bytes) -> None:
        seen.append(time.perf_counter())
        arrived.set()

    async with trio.open_nursery() as nursery:
        arrived = trio.Event()
        nursery.start_soon(partial(follow, reader, to, show, unread=True))
        for number in range(LINES):
            arrived = trio.Event()
            await trio.to_thread.run_sync(file, f"line {number}")
            await arrived.wait()
        nursery.cancel_scope.cancel()
    return [max(0.0, there - here) for here, there in zip(filed, seen, strict=True)]
