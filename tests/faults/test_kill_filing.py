"""SIGKILL of a node between any two system calls of a filing with a message ID: it is filed once (decisions).

The operation is what a node does: open the store, settle what a crash left open, take three filings of which two share
a batch, append them, and answer each. Whatever it was killed at, the next process opens the store, settles it, and is
asked for the same three again.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sqlite3
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from faults.killpoints import KillPoint, answer, kill_at_each_call
from world import MACHINE, World

from sotbus import message
from sotbus.comm.lock_manager import FlockManager
from sotbus.comm.settings import Settings
from sotbus.comm.topology import NO_TOPOLOGY
from sotbus.comm.writer_gate import WriterGate
from sotbus.contracts import Filing
from sotbus.node.filing_queue import body_hash, line_of
from sotbus.node.settling import Settled, line_hash, settle_open
from sotbus.node.store import FILED, NOT_FILED, Intent, Store
from sotbus.node.writers import Writers

pytestmark = pytest.mark.faults

OLD = message.encode("z-vm", "b-vm", "z", "old", "2026-05-29T18:04:00Z")
TORN = b'{"from":"z-vm","to":"b-vm","repo":"z","msg":"to'
BOUND_S = 20.0

FILINGS = {text: Filing("a-vm", "b-vm", "a", text, message_id=f"id of {text}") for text in ("one", "two", "three")}
"""By their texts."""


class Gate(WriterGate):
    """Answers this folder's lock manager: what it asks of the system is killed in other tests."""

    __slots__ = ()

    def manager(self) -> FlockManager:
        return FlockManager(f"local {MACHINE}")


class Node:
    """One life of a node: the store is opened, what is open is settled, and then filings are taken."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.gate = Gate(world.folder, world.box(), NO_TOPOLOGY)
        self.store = Store(store_of(world))
        self.settled: Settled = settle_open(self.store, world.folder, self.gate.manager, BOUND_S)
        assert self.settled.left == {}

    def file(self, *batches: tuple[str, ...], told: Callable[[str], object] = str) -> None:
        """File these texts, those of each batch at once; ``told`` gets each text when it is answered."""
        trio.run(self._file, batches, told)

    async def _file(self, batches: tuple[tuple[str, ...], ...], told: Callable[[str], object]) -> None:
        async def one(text: str) -> None:
            await writers.file(FILINGS[text], BOUND_S)
            told(text)

        async with trio.open_nursery() as nursery:
            writers = Writers(
                self.world.folder, self.gate, self.store, trio.CapacityLimiter(4), Settings(inbox_lock_wait_s=BOUND_S)
            )
            await nursery.start(writers.run)
            for batch in batches:
                async with trio.open_nursery() as callers:
                    for text in batch:
                        callers.start_soon(one, text)
            nursery.cancel_scope.cancel()


def store_of(world: World) -> str:
    return str(world.base / "state" / "node.db")


def a_life(world: World) -> None:
    """The operation."""
    node = Node(world)
    node.file(("one",), ("two", "three"), told=answer)
    node.store.close()


def in_a_child(work: Callable[[], object]) -> str:
    """Run something in a process of its own, which is dead and waited for after that; its answer as text."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        text, status = "", 1
        try:
            gc.disable()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            text, status = str(work()), 0
        except BaseException:
            text = traceback.format_exc()
        finally:
            os.write(send, text.encode())
            os._exit(status)
    os.close(send)
    try:
        with open(receive, encoding="utf-8") as file:
            text = file.read()
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"the next process failed ({status}):\n{text}"
    return text


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    memory = "/dev/shm"
    if not os.access(memory, os.W_OK):
        yield World(tmp_path)
        return
    with tempfile.TemporaryDirectory(prefix="sotbus-kill-", dir=memory) as base:
        yield World(Path(base))


def lay(world: World, inbox: bytes | None, store: Path | None) -> None:
    """A comm folder with this inbox, and a state folder with a copy of this store."""
    for folder in (world.home, Path(store_of(world)).parent):
        shutil.rmtree(folder, ignore_errors=True)
    world.folder.ensure()
    if inbox is not None:
        world.inbox("b-vm").write_bytes(inbox)
    if store is not None:
        shutil.copytree(store, Path(store_of(world)).parent)


def texts_of(world: World) -> list[str]:
    """The texts of the newline-terminated lines in the inbox."""
    path = world.inbox("b-vm")
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line)["msg"] for line in lines]


def check(world: World, old: list[str], point: KillPoint) -> None:
    """What was answered is there; settling tells what stands; and asked for again, everything is there once."""
    answered = (point.answered or "").split()
    stand = texts_of(world)
    assert stand[: len(old)] == old
    new = stand[len(old) :]
    assert set(answered) <= set(new) <= set(FILINGS)
    assert len(new) == len(set(new))

    def next_life() -> str:
        node = Node(world)
        assert texts_of(world) == stand, "settling changes no line"
        assert node.store.open_intents() == []
        known = node.store.known(one.message_id or "" for one in FILINGS.values())
        states = {message_id.removeprefix("id of "): one.state for message_id, one in known.items()}
        assert {text for text, state in states.items() if state == FILED} == set(new)
        assert {text for text, state in states.items() if state == NOT_FILED}.isdisjoint(new)
        told: list[str] = []
        node.file(("three", "two", "one"), ("one", "two", "three"), told=told.append)
        assert sorted(told) == sorted([*FILINGS, *FILINGS])
        node.store.close()
        return "done"

    assert in_a_child(next_life) == "done"
    after = texts_of(world)
    assert after[: len(stand)] == stand
    assert sorted(after) == sorted([*old, *FILINGS])
    assert world.inbox("b-vm").read_bytes().endswith(b"\n")


def survive(
    name: str, operation: Callable[[], object], prepare: Callable[[], None], check: Callable[[KillPoint], None]
) -> list[str]:
    """Kill the operation at each of its calls and print how often that was; answers the calls."""
    points = kill_at_each_call(operation, prepare=prepare, check=check, limit=3000)
    killed = sum(point.killed for point in points)
    print(f"\n{name:<56} | {killed:>11} | {killed:>8}", end=" ", flush=True)
    return [point.call.removesuffix("at") for point in points]


def in_order(calls: list[str], made: list[str]) -> bool:
    rest = iter(made)
    return all(call in rest for call in calls)


OF_A_BATCH = {"flock", "open", "ftruncate", "fdatasync", "write", "answer"}
"""Lock, open the inbox, cut the torn tail, commit the intents, append, sync, answer."""


def test_a_filing_with_an_id_is_filed_once_wherever_the_node_was_killed(world: World) -> None:
    template = world.base / "template"

    def make_store() -> None:
        lay(world, None, None)
        Store(store_of(world)).close()

    in_a_child(make_store)
    shutil.copytree(Path(store_of(world)).parent, template)
    made = survive(
        "filings with message IDs, behind a torn tail",
        lambda: a_life(world),
        prepare=lambda: lay(world, OLD + TORN, template),
        check=lambda point: check(world, ["old"], point),
    )
    assert set(made) >= OF_A_BATCH  # in no order that could be asked: the node's threads run differently in each life


def test_a_node_that_was_killed_while_it_made_its_store_makes_it_at_the_next_start(world: World) -> None:
    def first_start() -> None:
        Node(world).store.close()
        answer("started")

    made = survive(
        "first start of a node",
        first_start,
        prepare=lambda: lay(world, OLD, None),
        check=lambda point: check(world, ["old"], point) if not point.answered else None,
    )
    assert in_order(["mkdir", "fsync", "flock", "fsync", "fdatasync", "answer"], made)


def test_a_node_that_is_killed_while_it_settles_settles_at_the_next_start(world: World) -> None:
    """Of three open intents one stands where it was to be, one has been moved, and one is torn off."""
    lines = {text: line_of(one, "2026-05-29T18:04:00Z") for text, one in FILINGS.items()}
    moved = OLD + b"\n" + lines["two"] + lines["one"]
    template = world.base / "template"

    def leave_open() -> None:
        lay(world, None, None)
        store = Store(store_of(world))
        places = {"one": len(OLD) + 1 + len(lines["two"]), "two": 9000, "three": len(moved)}
        store.intend(
            [
                Intent(
                    FILINGS[text].message_id or "",
                    world.folder.root,
                    "b-vm",
                    body_hash(FILINGS[text]),
                    offset,
                    len(lines[text]),
                    line_hash(lines[text]),
                )
                for text, offset in places.items()
            ]
        )
        store.close()

    in_a_child(leave_open)
    shutil.copytree(Path(store_of(world)).parent, template)

    def settle() -> None:
        node = Node(world)
        answer(f"{node.settled.filed} {node.settled.not_filed}")
        node.store.close()

    def check_settled(point: KillPoint) -> None:
        assert point.answered in (None, "2 1")
        data = world.inbox("b-vm").read_bytes()
        assert data in (moved, moved + lines["three"][:-1])
        with sqlite3.connect(f"file:{store_of(world)}?mode=ro", uri=True) as database:
            states = dict(database.execute("SELECT message_id, state FROM filings").fetchall())
        database.close()
        assert states.get("id of one") in (0, FILED)
        assert states.get("id of three") in (0, NOT_FILED)

        def next_life() -> str:
            node = Node(world)
            node.file(("three", "two", "one"))
            node.store.close()
            return "done"

        assert in_a_child(next_life) == "done"
        assert world.inbox("b-vm").read_bytes()[: len(moved)] == moved
        assert [json.loads(line)["msg"] for line in world.inbox("b-vm").read_bytes().splitlines() if line] == [
            *("old", "two", "one"),
            "three",
        ]

    made = survive(
        "settling of what a killed node left open",
        settle,
        prepare=lambda: lay(world, moved + lines["three"][:-1], template),
        check=check_settled,
    )
    assert in_order(["flock", "ftruncate", "pwrite64", "pwrite64", "fdatasync", "fdatasync", "answer"], made)
