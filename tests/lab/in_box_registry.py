"""Calls for boxes that change one registry: at will, each its own entries, or in turn; and what a check found wrong."""

from __future__ import annotations

import errno
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest.mock import patch

from lab.in_box_mutants import MUTANTS
from lab.in_box_sharing import Notes, client_of, told

from sotbus.comm import registry, sending
from sotbus.comm.folder import close_quietly
from sotbus.comm.membership import join, leave
from sotbus.comm.registry import Registry
from sotbus.errors import RegistryLockFailed, SotbusError

TURN_PAUSE_S = 0.01
"""One tick of the guest's clock."""

SHOWN_FAULTS = 10


def count_read_errors() -> Counter[str]:
    """From now on, what each single read of the registry's file meets: "reads", "empty", and names of errnos."""
    met: Counter[str] = Counter()
    read_file = registry.read_file

    def counted(path: str) -> bytes:
        met["reads"] += 1
        try:
            data = read_file(path)
        except OSError as error:
            met[errno.errorcode.get(error.errno or 0, "?")] += 1
            raise
        met["empty"] += not data
        return data

    patch.object(registry, "read_file", counted).start()
    return met


class Changer:
    """Joins, touches, counts and leaves with handles of its own, and knows what the registry must hold of them."""

    def __init__(self, shared: str, name: str) -> None:
        self.name = name
        self.clients = {f"{name}-{i}": client_of(shared, f"{name}-{i}") for i in range(3)}
        self.client = next(iter(self.clients.values()))
        self.client.ensure()
        self.model: dict[str, int] = {}
        self.serial, self.held, self.longest_s = 0, 0, 0.0
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []
        self._highest: dict[str, object] = {}
        self._random = random.Random(name)

    def change(self) -> None:
        """One change; a lock that was not free in time ("nothing was written") is counted. Then look at the whole."""
        handle = self._random.choice(list(self.clients))
        word = self._random.choice(["join", "touch", "count", "leave"])
        if word == "leave" and handle not in self.model:
            word = "join"
        begun = time.monotonic()
        try:
            getattr(self, f"_{word}")(handle)
            self.done[word] += 1
        except RegistryLockFailed:
            self.held += 1
        except SotbusError as error:
            self.faults.append(f"{self.name}: {word}: {error!r}")
        self.longest_s = max(self.longest_s, time.monotonic() - begun)
        self.look(word)

    def look(self, word: str) -> None:
        try:
            document = self.client.registry.read()
        except SotbusError as error:
            self.faults.append(f"{self.name}: after {word}: {error!r}")
            return
        found = changes_of(document, self.name)
        if found != self.model:
            self.faults.append(f"{self.name}: after {word} there is {found} and not {self.model}")
            self.model = found
        self.faults += [f"{self.name} saw {went}" for went in went_back(document, self._highest)]

    def _join(self, handle: str) -> None:
        join(self.clients[handle], name=handle, expertise=[str(self.serial + 1)])
        self.serial += 1
        self.model[handle] = self.serial

    def _leave(self, handle: str) -> None:
        leave(self.clients[handle])
        self.model.pop(handle, None)

    def _touch(self, handle: str) -> None:
        sending.touch(self.clients[handle], handle)

    def _count(self, handle: str) -> None:
        def change(document: dict[str, Any]) -> bool:
            document[f"count-{self.name}"] = self.serial + 1
            return True

        self.client.registry.update(change, self.client.settings.lock_wait_s)
        self.serial += 1
        self.model[f"count-{self.name}"] = self.serial


def changes_of(document: Mapping[str, Any], name: str) -> dict[str, int]:
    """What a registry holds of one `Changer`: the number of the last change of each of its handles and of its count."""
    agents = {handle: entry for handle, entry in document["agents"].items() if handle.startswith(f"{name}-")}
    counts = {key: value for key, value in document.items() if key == f"count-{name}"}
    return {handle: int(entry["expertise"][0]) for handle, entry in agents.items()} | counts


def went_back(document: Mapping[str, Any], highest: dict[str, Any]) -> list[str]:
    """Which counts are lower than this reader has seen them before, as in a read that is not fresh."""
    counts = {key: value for key, value in document.items() if key.startswith("count-")}
    faults = [f"{key} at {value} after {highest[key]}" for key, value in counts.items() if value < highest.get(key, 0)]
    highest.update(counts)
    return faults


def change_for(shared: str, name: str, duration_s: float, mutant: str = "") -> Notes:
    """Note "ready", wait for a line, and change the registry for so long."""
    MUTANTS[mutant]()
    met = count_read_errors()
    changer = Changer(shared, name)
    yield "ready"
    sys.stdin.readline()
    deadline = time.monotonic() + duration_s
    while time.monotonic() < deadline:
        changer.change()
    return {
        "model": changer.model,
        "done": changer.done,
        "held": changer.held,
        "longest_s": changer.longest_s,
        "met": met,
        "faults": changer.faults[:SHOWN_FAULTS],
    }


def read_changes(shared: str, of: Iterable[str]) -> dict[str, dict[str, int]]:
    """`changes_of` each of these, by a fresh read of this box."""
    document = client_of(shared, "reader").registry.read()
    return {name: changes_of(document, name) for name in of}


def read_until_told(shared: str, name: str) -> Notes:
    """Read the registry again and again; every read must be good, and none older than the one before."""
    met = count_read_errors()
    client = client_of(shared, name)
    yield "ready"
    highest: dict[str, Any] = {}
    faults: list[str] = []
    while not told():
        try:
            faults += [f"{name} saw {went}" for went in went_back(client.registry.read(), highest)]
        except SotbusError as error:
            faults.append(f"{name}: {error!r}")
    return {"met": met, "faults": faults[:SHOWN_FAULTS]}


def watch_file_until_told(path: str) -> Notes:
    """On the server, without the package: every look at the file finds a whole document, or no file."""
    yield "ready"
    looks, missing, faults = 0, 0, []
    while not told():
        looks += 1
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            missing += 1
            continue
        try:
            assert isinstance(json.loads(data)["agents"], dict)
        except (ValueError, LookupError, AssertionError):
            faults.append(f"the file holds {data[:100]!r}, {len(data)} bytes")
    return {"looks": looks, "missing": missing, "faults": faults[:SHOWN_FAULTS]}


class OutOfTurn(Exception):
    """A read, or the document under the lock, was not the last one that was written."""


def take_turns(shared: str, first: int, turns: int, give_up_s: float, mutant: str = "") -> Notes:
    """Wait until the registry's ``turn`` is mine (``first``, and every other one after), and put the next one there.

    Keeps a descriptor of the file that its last turn replaced, so that the old inode lives on and could be read.
    """
    MUTANTS[mutant]()
    met = count_read_errors()
    client = client_of(shared, f"turns-{first}")
    client.ensure()
    yield "ready"
    sys.stdin.readline()
    longest_s, kept, faults = 0.0, -1, list[str]()
    for number in range(first, turns, 2):
        begun = time.monotonic()
        try:
            wait_for_turn(client.registry, number, give_up_s)
            old, kept = kept, os.open(client.folder.registry, os.O_RDONLY)
            close_quietly(old)
            client.registry.update(next_turn(number), client.settings.lock_wait_s)
        except (SotbusError, OutOfTurn) as error:
            faults.append(f"turn {number}: {error!r}")
            break
        longest_s = max(longest_s, time.monotonic() - begun)
    return {"longest_s": longest_s, "met": met, "faults": faults}


def wait_for_turn(registry: Registry, number: int, give_up_s: float) -> None:
    """Read until it is this turn; until then each read must find the value that this box has written.

    *Errors*: OutOfTurn, also when that takes longer than ``give_up_s`` seconds.
    """
    deadline = time.monotonic() + give_up_s
    while (turn := registry.read().get("turn", 0)) != number:
        if turn != max(0, number - 1):
            raise OutOfTurn(f"turn {turn} was read")
        if time.monotonic() > deadline:
            raise OutOfTurn(f"turn {turn} is still read after {give_up_s:g} s")
        time.sleep(TURN_PAUSE_S)


def next_turn(number: int) -> Callable[[dict[str, Any]], bool]:
    """The change that ends this turn."""

    def change(document: dict[str, Any]) -> bool:
        if document.get("turn", 0) != number:
            raise OutOfTurn(f"turn {document.get('turn', 0)} was read under the lock")
        document["turn"] = number + 1
        return True

    return change
