"""A poll of one new message in an inbox that was polled before: long beside short."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.harness import ms, ratio, timed, verdict
from benchmarks.place import client
from sotbus import message
from sotbus.comm import membership, reading
from sotbus.comm.client import Client
from sotbus.comm.sending import Outbox

SHORT, LONG = 1_000, 1_000_000
ROUNDS = 60


def polls(base: Path) -> bool:
    readers: dict[int, tuple[Client, str]] = {}
    for lines in (SHORT, LONG):
        reader = client(base, f"reader{lines}")
        handle = membership.join(reader).handle
        line = message.encode("alpha", handle, "alpha", "x" * 60, message.stamp())
        with open(reader.folder.inbox(handle), "wb") as file:
            file.writelines(line * 1000 for _ in range(lines // 1000))
        first = timed(partial(poll, reader, handle))
        print(f"first poll of {lines:,} lines, all of them new: {first * 1e3:.0f} ms")
        readers[lines] = (reader, handle)
    sender = client(base, "writer")
    membership.join(sender)
    outbox = Outbox(sender)

    def one_new(lines: int) -> float:
        reader, handle = readers[lines]
        outbox.send(handle, "one new message")
        return timed(lambda: poll(reader, handle))

    long, short = [], []
    for _ in range(ROUNDS):
        long.append(one_new(LONG))
        short.append(one_new(SHORT))
    print(f"poll of one new message: {LONG:,} lines {ms(long)}; {SHORT:,} lines {ms(short)}")
    return verdict("long / short", ratio(long, short), 2.0)


def poll(reader: Client, handle: str) -> None:
    """What ``sotbus poll`` does but for printing."""
    seen = reading.look_at(reader, handle, print)
    shown = [message.parse(line) for line in seen.lines]
    assert shown
    reading.advance(reader, handle, seen)
