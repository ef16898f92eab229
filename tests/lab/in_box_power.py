"""Calls for a box whose plug is pulled: sessions that go on until then, and what a check found wrong at the next boot.

Each note is an acknowledgement: it is given when the package has answered, so that what it names must be there later.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from world import World

from sotbus import message
from sotbus.comm import cursor, manager_record, reading
from sotbus.comm.box import Box
from sotbus.comm.client import Client
from sotbus.comm.membership import join, leave
from sotbus.comm.sending import Outbox
from sotbus.errors import InboxBusy, InboxLockHeld, SotbusError

T = TypeVar("T")

BASE = Path("/disk/world")
READER, ASKER = "reader", "s0"
"""Who polls, and who is answered."""

POLL_PAUSE_S = 0.02
SHOWN_FAULTS = 10


def no_sync() -> None:
    """The mutant: what is written stays in the page cache."""
    for name in ("fsync", "fdatasync"):
        patch.object(os, name, lambda _: None).start()


MUTANTS: Mapping[str, Callable[[], None]] = {"": lambda: None, "no_sync": no_sync}


def client_of(name: str) -> Client:
    """A client of this box, by its real mounts, for a session that is pinned to a project of its own."""
    BASE.mkdir(exist_ok=True)
    return World(BASE).client(name, box=Box.here({}))


def text_of(sender: str, number: int, serial: int) -> str:
    """The text of a sender's message of this round and serial number: of many lengths, and like no other."""
    return f"{sender} {number} {serial} " + "x" * (serial * 37 % 200)


def until_free(work: Callable[[], T]) -> T:
    """Do it, and again where the inbox was held past the bound: the lock is not fair, and nothing was done then."""
    while True:
        try:
            return work()
        except (InboxBusy, InboxLockHeld):
            pass


# ---- until the plug is pulled


def take_handles(names: Sequence[str], mutant: str = "") -> None:
    """Join with each of these; the calls that follow act for the same sessions."""
    MUTANTS[mutant]()
    for name in names:
        join(client_of(name), name=name)


def send_on(name: str, to: str, number: int, mutant: str = "") -> Iterator[object]:
    """Note "ready", wait for a line; then send, and note each serial number that was filed."""
    MUTANTS[mutant]()
    outbox = Outbox(client_of(name))
    yield "ready"
    sys.stdin.readline()
    for serial in itertools.count():
        until_free(partial(outbox.send, to, text_of(name, number, serial)))
        yield serial


def join_on(number: int, count: int, mutant: str = "") -> Iterator[object]:
    """Note "ready", wait for a line; then join with ``count`` handles, note each with its serial number, and be idle.

    Every other handle is given back and taken again before its note: its inbox is there already then, and a join has
    nothing but the entry to make.
    """
    MUTANTS[mutant]()
    yield "ready"
    sys.stdin.readline()
    for serial in range(count):
        handle = f"new-{number}-{serial}"
        client = client_of(handle)
        if serial % 2:
            join(client, name=handle)
            leave(client)
        join(client, name=handle, expertise=[str(serial)])
        yield [handle, serial]
    sys.stdin.readline()


def poll_on(number: int, mutant: str = "") -> Iterator[object]:
    """As the reader, note "ready", wait for a line; then poll, and answer each batch.

    A batch is noted as its offset, its end and its hash, and counts as shown when the host has sent a line for it: only
    then the cursor moves. The answer that is filed next makes the cursor durable too, since ext4 commits in order.
    """
    MUTANTS[mutant]()
    client = client_of(READER)
    outbox = Outbox(client)
    yield "ready"
    sys.stdin.readline()
    for serial in itertools.count():
        while not (seen := until_free(partial(reading.look_at, client, READER, print))).lines:
            time.sleep(POLL_PAUSE_S)
        yield {"shown": [seen.offset, seen.total, hash_of(seen.lines)]}
        sys.stdin.readline()
        reading.advance(client, READER, seen)
        until_free(partial(outbox.send, ASKER, text_of(READER, number, serial)))
        yield serial
        time.sleep(POLL_PAUSE_S)


def hash_of(lines: Sequence[bytes]) -> int:
    return zlib.crc32(b"\n".join(lines))


def hold_registry_lock() -> Iterator[str]:
    """Take the registry lock, sync another file of the disk, as a send of any session does, and note "held"."""
    client = client_of("holder")
    client.ensure()
    client.registry.lock.hold(0)
    with open(BASE / "other", "w", encoding="utf-8") as file:
        file.write("synced")
        file.flush()
        os.fsync(file.fileno())
    yield "held"
    sys.stdin.readline()


# ---- at the next boot


def check(
    filed: Mapping[str, Mapping[str, Mapping[str, int]]], joined: Mapping[str, int], shown: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """What is wrong with what the power loss left; nothing is changed.

    :param filed: for each inbox, for each sender, for each round how many lines were answered ``filed``.
    :param joined: the serial number of each acknowledged handle.
    :param shown: batches of the reader's, the last ones, in order: offset, end, hash.
    """
    client = client_of("nobody")
    faults: list[str] = []
    found: dict[str, Any] = {"faults": faults, "lines": 0, "more": 0, "torn": 0, "again": 0}
    if filed:
        record = manager_record.read(client.folder)
        if str(record and record.manager) != f"local {client.box.machine_id}":
            faults.append(f"the record is {record!r}")
    lines_of = {to: _check_inbox(client, to, senders, found) for to, senders in filed.items()}
    _check_registry(client, joined, found)  # after the inboxes: a loss there has a fault for each join
    _check_cursor(client, lines_of.get(READER, []), shown, found)
    return {**found, "count": len(faults), "faults": faults[:SHOWN_FAULTS]}


def _check_registry(client: Client, joined: Mapping[str, int], found: dict[str, Any]) -> None:
    """It parses, and each acknowledged entry is in it."""
    try:
        agents = client.registry.agents() if joined else {}
    except SotbusError as error:
        found["faults"].append(f"the registry: {error}")
        return
    for handle, serial in joined.items():
        entry = agents.get(handle)
        if entry is None or entry["expertise"] != [str(serial)]:
            found["faults"].append(f"@{handle} joined as {serial}, and its entry is {json.dumps(entry)}")


def _check_inbox(
    client: Client, to: str, senders: Mapping[str, Mapping[str, int]], found: dict[str, Any]
) -> list[bytes]:
    """Each sender's lines are whole, each once, in order, without a gap, and at least as many as were acknowledged.

    Answers the lines. A torn tail is no fault: the next append cuts it off.
    """
    try:
        data = Path(client.folder.inbox(to)).read_bytes()
    except FileNotFoundError:
        data = b""
    *lines, tail = data.split(b"\n")
    found["torn"] += bool(tail)
    there: dict[tuple[str, int], int] = {}
    last_round: dict[str, int] = {}
    for at, line in enumerate(lines):
        value = message.parse(line) or {}
        sender = str(value.get("from"))
        words = message.text_of(value).split(" ")
        number = int(words[1]) if len(words) == 4 and words[1].isdigit() else -1
        serial = there.get((sender, number), 0)
        whole = message.encode(sender, to, sender, text_of(sender, number, serial), str(value.get("ts")))
        if sender not in senders or number < last_round.get(sender, 0) or line + b"\n" != whole:
            found["faults"].append(f"@{to} line {at} is not {sender}'s {serial} of round {number}: {line[:100]!r}")
            continue
        last_round[sender] = number
        there[sender, number] = serial + 1
    for sender, rounds in senders.items():
        for round_, count in rounds.items():
            has = there.pop((sender, int(round_)), 0)
            found["more"] += max(0, has - count)
            if has < count:
                found["faults"].append(f"@{to}: {has} lines of round {round_} by {sender}, and {count} were filed")
    found["faults"] += [f"@{to}: lines of {key}, who sent none" for key in there]
    found["lines"] += len(lines)
    return lines


def _check_cursor(client: Client, lines: list[bytes], shown: Sequence[Sequence[int]], found: dict[str, Any]) -> None:
    """The cursor stands at an end of the last batch, and the next poll shows all the lines after it, and no other."""
    faults = found["faults"]
    for offset, end, crc in shown:
        if end > len(lines) or hash_of(lines[offset:end]) != crc:
            faults.append(f"lines {offset} to {end} were shown, and are not those of the {len(lines)} in the file")
    count = cursor.read(client.folder.cursor(READER)).count or 0
    if count > len(lines):
        faults.append(f"the cursor counts {count} of {len(lines)} lines")
    if count not in (shown[-1][:2] if shown else [0]):
        faults.append(f"the cursor stands at {count}, and the last batches shown are {list(shown)[-3:]}")
    if shown:
        found["again"] = shown[-1][1] - count
    seen = reading.look_at(client, READER, print)
    if seen.offset != count or seen.lines != lines[count:]:
        faults.append(f"the next poll shows {len(seen.lines)} lines from {seen.offset}, the cursor stands at {count}")
