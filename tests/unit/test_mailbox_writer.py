"""Group commit: what shares a batch, who is answered what and when, message IDs, deadlines, and a mount that hangs."""

from __future__ import annotations

import errno
import gc
import json
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from world import MACHINE, World

from sotbus.comm import flock
from sotbus.comm.lock_manager import FlockManager
from sotbus.comm.settings import Settings
from sotbus.comm.topology import NO_TOPOLOGY
from sotbus.comm.writer_gate import WriterGate
from sotbus.contracts import Filing, Receipt
from sotbus.errors import BadRequest, Busy, FilingFailed, InboxLockHeld, SotbusError
from sotbus.node.filing_queue import FilingQueue, Limits, WaitingFiling, another, body_hash, line_of
from sotbus.node.group_commit import Round
from sotbus.node.mailbox_writer import MailboxWriter
from sotbus.node.settling import line_hash, message_id_of
from sotbus.node.store import FILED, NOT_FILED, OPEN, Conflict, Intent, Store
from sotbus.node.store_file import StoreError
from sotbus.node.writers import IDLE_KEPT, Writers

LONG_S = 30.0
"""A deadline that no test reaches."""


def filing(text: str = "hello", message_id: str | None = None, to: str = "b", **more: Any) -> Filing:
    return Filing("a-vm", to, "repo", text, message_id=message_id, **more)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(str(tmp_path / "state" / "node.db"))
    yield store
    store.close()


class Gate(WriterGate):
    """Answers a lock manager at once, or raises what it is told to."""

    __slots__ = ("answer",)

    def __init__(self, world: World, identity: str = f"local {MACHINE}") -> None:
        super().__init__(world.folder, world.box(), NO_TOPOLOGY)
        self.answer: FlockManager | Exception = FlockManager(identity)

    def manager(self) -> FlockManager:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Node:
    """The writers of one comm folder, and what they said beside their answers."""

    def __init__(self, world: World, store: Store, **more: Any) -> None:
        world.folder.ensure()
        self.world = world
        self.store = store
        self.gate: Gate = more.pop("gate", None) or Gate(world)
        self.cuts: list[tuple[str, int]] = []
        self.faults: list[tuple[str, str]] = []
        self.limiter = more.pop("limiter", None) or trio.CapacityLimiter(16)
        self.writers = Writers(
            world.folder,
            self.gate,
            store,
            self.limiter,
            more.pop("settings", Settings(inbox_lock_wait_s=LONG_S)),
            on_cut=lambda handle, count: self.cuts.append((handle, count)),
            on_fault=lambda handle, error: self.faults.append((handle, repr(error))),
            **more,
        )

    async def file(self, one: Filing, deadline_s: float = LONG_S) -> Receipt:
        return await self.writers.file(one, deadline_s)

    def texts(self, handle: str = "b") -> list[str]:
        """The texts in an inbox, every line of which is whole; ``""`` for a bare newline."""
        path = self.world.inbox(handle)
        data = path.read_bytes() if path.exists() else b""
        assert data == b"" or data.endswith(b"\n")
        return [json.loads(line)["msg"] if line else "" for line in data.split(b"\n")[:-1]]

    def states(self, *ids: str) -> list[int | None]:
        known = self.store.known(ids)
        return [known[one].state if one in known else None for one in ids]


@asynccontextmanager
async def node_of(world: World, store: Store, **more: Any) -> AsyncIterator[Node]:
    """A node whose writers run."""
    node = Node(world, store, **more)
    async with trio.open_nursery() as nursery:
        await nursery.start(node.writers.run)
        yield node
        nursery.cancel_scope.cancel()


class Ask:
    """A filing in a task of its own, and how it ended: its receipt, or its error."""

    def __init__(self, nursery: trio.Nursery, node: Node, one: Filing, deadline_s: float = LONG_S) -> None:
        self.scope = trio.CancelScope()
        self.over = trio.Event()
        self._result: Receipt | SotbusError | None = None
        nursery.start_soon(self._run, node, one, deadline_s)

    async def _run(self, node: Node, one: Filing, deadline_s: float) -> None:
        with self.scope:
            try:
                self._result = await node.file(one, deadline_s)
            except SotbusError as error:
                self._result = error
        self.over.set()

    async def end(self) -> Receipt | SotbusError | None:
        """Its end; None where it was cancelled."""
        with trio.fail_after(20):
            await self.over.wait()
        return self._result


@contextmanager
def held(world: World, handle: str = "b") -> Iterator[Callable[[], None]]:
    """The inbox lock is another's; gives the call that makes it let go."""
    lock = flock.acquire(world.folder.inbox_lock(handle), exclusive=True, bound_s=0, polling=True)
    try:
        yield lock.release
    finally:
        lock.release()


class Gatekeeper:
    """Stops a system call on the way to the disk until it is told to go on, as a mount that hangs does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str, path: Path) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.calls = 0
        real = getattr(os, call)

        def stopped(fd: int, *more: Any) -> Any:
            if os.path.realpath(f"/proc/self/fd/{fd}") == os.path.realpath(path):
                self.calls += 1
                self.reached.set()
                assert self.go_on.wait(60)
            return real(fd, *more)

        monkeypatch.setattr(os, call, stopped)

    async def until_reached(self) -> None:
        with trio.fail_after(20):
            await trio.to_thread.run_sync(self.reached.wait, 20)
        assert self.reached.is_set()


async def settled() -> None:
    """Let the tasks run until each waits for something outside."""
    await trio.testing.wait_all_tasks_blocked(0.02)


# ---- the line


def test_a_line_without_an_id_is_the_pages() -> None:
    assert line_of(filing(), "2026-05-29T18:04:00Z") == (
        b'{"from":"a-vm","to":"b","repo":"repo","msg":"hello","ts":"2026-05-29T18:04:00Z"}\n'
    )
    assert b'"to":"",' in line_of(filing(broadcast=True), "t")


@pytest.mark.parametrize("message_id", ["7", 'a "b" \\c', "\u2603", "x" * 200])
def test_an_id_stands_in_one_more_key_after_the_others(message_id: str) -> None:
    line = line_of(filing(message_id=message_id), "t")
    plain = line_of(filing(), "t")
    assert line.startswith(plain[:-2] + b',"sotbus":{"id":')
    assert line.endswith(b"}}\n")
    assert json.loads(line) == {**json.loads(plain), "sotbus": {"id": message_id}}
    assert message_id_of(line) == message_id


@pytest.mark.parametrize("message_id", ["", "x" * 201, "\u2603" * 67, "a\nb", "a\x00", "\ud800"])
async def test_what_is_no_message_id_is_refused(message_id: str, world: World, store: Store) -> None:
    async with node_of(world, store) as node:
        with pytest.raises(BadRequest, match="is not 1 to 200 bytes of printable text; nothing was filed"):
            await node.file(filing(message_id=message_id))
        assert node.texts() == []


async def test_a_text_that_is_no_unicode_is_refused_and_stops_nobody(world: World, store: Store) -> None:
    async with node_of(world, store) as node:
        with pytest.raises(BadRequest, match="not valid Unicode"):
            await node.file(filing("\ud800"))
        await node.file(filing("fine"))
        assert node.texts() == ["fine"]


# ---- batches


async def test_a_filing_is_on_disk_when_it_is_answered(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        real(fd)
        synced.append(world.inbox("b").read_bytes())

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    async with node_of(world, store, clock=lambda: 0.0) as node:
        receipt = await node.file(filing())
        assert receipt == Receipt("delivered", world.folder.inbox("b"))
        assert synced == [world.inbox("b").read_bytes()] == [line_of(filing(), "1970-01-01T00:00:00Z")]


async def test_those_who_wait_share_one_lock_hold_one_commit_and_one_sync_in_their_order(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{at}" for at in range(20)]
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        await node.file(filing("first"))
        syncs: list[int] = []
        real = os.fdatasync

        def fdatasync(fd: int) -> None:
            syncs.append(fd)
            real(fd)

        monkeypatch.setattr(os, "fdatasync", fdatasync)
        with held(world) as let_go:
            asks = []
            for text in texts:
                asks.append(Ask(nursery, node, filing(text, f"id {text}")))
                await settled()
            commits = store.statistics().commits
            let_go()
            assert {await ask.end() for ask in asks} == {Receipt("delivered", world.folder.inbox("b"))}
        assert node.texts() == ["first", *texts]
        assert len(syncs) == 1
        assert store.statistics().commits == commits + 1
        total, each = node.writers.statistics()
        assert each == {"b": total}
        assert (total.batches, total.lines, total.largest_batch, total.syncs) == (2, 21, 20, 3)
        assert (total.depth, total.queued_bytes, total.failed, total.busy) == (0, 0, 0, 0)
        assert total.longest_wait_s > 0.02


async def test_nobody_is_answered_before_the_sync(world: World, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        await node.file(filing("first"))
        disk = Gatekeeper(monkeypatch, "fdatasync", world.inbox("b"))
        with held(world) as let_go:
            asks = [Ask(nursery, node, filing("x", "id 1")), Ask(nursery, node, filing("y"))]
            await settled()
            let_go()
            await disk.until_reached()
        await settled()
        assert sorted(node.texts()) == ["first", "x", "y"]
        assert not any(ask.over.is_set() for ask in asks)
        assert node.states("id 1") == [OPEN]
        disk.go_on.set()
        for ask in asks:
            assert isinstance(await ask.end(), Receipt)
        assert node.states("id 1") == [FILED]


async def test_what_comes_while_the_lock_is_waited_for_is_in_the_batch(world: World, store: Store) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        with held(world) as let_go:
            first = Ask(nursery, node, filing("first"))
            await settled()
            late = Ask(nursery, node, filing("late"))
            await settled()
            let_go()
            await first.end()
            await late.end()
        assert node.writers.statistics()[0].batches == 1


async def test_filings_without_ids_ask_nothing_of_the_store(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "known", None)
    monkeypatch.setattr(store, "intend", None)
    async with node_of(world, store) as node:
        await node.file(filing())
        assert node.texts() == ["hello"]
        assert node.faults == []


@pytest.mark.parametrize(
    ("limits", "largest", "batches"),
    [(Limits(batch_lines=4), 4, 3), (Limits(batch_bytes=250), 3, 4), (Limits(batch_bytes=1), 1, 10)],
    ids=["lines", "bytes", "a line is always in"],
)
async def test_a_batch_is_bounded_in_lines_and_bytes(
    limits: Limits, largest: int, batches: int, world: World, store: Store
) -> None:
    async with node_of(world, store, limits=limits) as node, trio.open_nursery() as nursery:
        with held(world) as let_go:
            asks = []
            for at in range(10):
                asks.append(Ask(nursery, node, filing(str(at))))
                await settled()
            let_go()
            for ask in asks:
                await ask.end()
        assert node.texts() == [str(at) for at in range(10)]
        total, _ = node.writers.statistics()
        assert (total.largest_batch, total.batches) == (largest, batches)


@pytest.mark.parametrize("limits", [Limits(queue_filings=2), Limits(queue_bytes=100)], ids=["filings", "bytes"])
async def test_past_its_bound_a_queue_is_busy(limits: Limits, world: World, store: Store) -> None:
    async with node_of(world, store, limits=limits) as node, trio.open_nursery() as nursery:
        with held(world) as let_go:
            asks = [Ask(nursery, node, filing("x")) for _ in range(2)]
            await settled()
            assert node.writers.statistics()[1]["b"].depth == 2
            with pytest.raises(Busy, match="2 filings wait for @b already; nothing was filed"):
                await node.file(filing("y", "an id"))
            assert store.flights == {}
            let_go()
            for ask in asks:
                await ask.end()
        await node.file(filing("y", "an id"))
        assert node.texts() == ["x", "x", "y"]
        assert node.writers.statistics()[0].busy == 1


async def test_a_torn_tail_that_is_cut_is_told(world: World, store: Store) -> None:
    async with node_of(world, store) as node:
        world.inbox("b").write_bytes(b'{"msg":"whole"}\ntorn')
        await node.file(filing())
        assert node.texts() == ["whole", "hello"]
        assert node.cuts == [("b", 4)]


# ---- a batch that fails


async def test_a_batch_that_fails_is_answered_failed_to_each_and_leaves_what_the_decisions_say(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        await node.file(filing("first"))
        with held(world) as let_go:
            asks = [Ask(nursery, node, filing(str(at), f"id {at}")) for at in range(3)]
            await settled()
            with monkeypatch.context() as patch:
                patch.setattr(os, "fdatasync", refuse(errno.EIO))
                let_go()
                errors = [await ask.end() for ask in asks]
        for error in errors:
            assert isinstance(error, FilingFailed)
            assert (str(error), error.outcome_unknown) == ("the append failed: Input/output error", False)
        assert len(set(map(id, errors))) == 3
        assert node.texts() == ["first", "", ""]
        assert node.states("id 0", "id 1", "id 2") == [NOT_FILED] * 3
        for at in range(3):
            await node.file(filing(str(at), f"id {at}"))
        assert node.texts() == ["first", "", "", "0", "1", "2"]
        assert node.states("id 0", "id 1", "id 2") == [FILED] * 3
        assert node.writers.statistics()[0].failed == 3


def refuse(number: int) -> Callable[..., Any]:
    def call(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


async def test_an_outcome_that_is_unknown_is_told_by_a_repeat_that_finds_the_line(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_of(world, store) as node:
        await node.file(filing("first"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", refuse(errno.EIO))
            patch.setattr(os, "ftruncate", refuse(errno.EIO))
            with pytest.raises(FilingFailed) as caught:
                await node.file(filing("x", "id"))
            assert caught.value.outcome_unknown
            assert node.states("id") == [OPEN]
            with pytest.raises(FilingFailed, match="an earlier filing with this message ID may stand") as caught:
                await node.file(filing("x", "id"))
            assert caught.value.outcome_unknown
        assert isinstance(await node.file(filing("x", "id")), Receipt)
        assert node.texts() == ["first", "x"]
        assert node.states("id") == [FILED]


async def test_an_outcome_that_is_unknown_is_told_by_a_repeat_that_does_not_find_the_line_and_files_it(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_of(world, store, gate=Gate(world, "nfs4 filer:/home")) as node:
        await node.file(filing("first"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", refuse(errno.EIO))  # as a lost lease has it; the cut goes well
            with pytest.raises(FilingFailed, match="its lock may have been lost") as caught:
                await node.file(filing("x", "id"))
        assert caught.value.outcome_unknown
        assert node.states("id") == [OPEN]
        await node.file(filing("x", "id"))
        assert node.texts() == ["first", "x"]


async def test_a_gate_that_refuses_is_the_answer(world: World, store: Store) -> None:
    async with node_of(world, store) as node:
        node.gate.answer = FilingFailed("the record names another machine", hint="mend it")
        with pytest.raises(FilingFailed, match=r"^the record names another machine$") as caught:
            await node.file(filing("x", "id"))
        assert (caught.value.hint, caught.value.outcome_unknown) == ("mend it", False)
        assert not world.inbox("b").exists()
        assert node.states("id") == [None]
        node.gate.answer = Gate(world).answer
        await node.file(filing("x", "id"))
        assert node.texts() == ["x"]


async def test_a_lock_that_is_held_past_its_bound_is_the_pages_answer(world: World, store: Store) -> None:
    async with node_of(world, store, settings=Settings(inbox_lock_wait_s=0.05)) as node:
        with held(world), pytest.raises(InboxLockHeld) as caught:
            await node.file(filing("x", "id"))
        assert str(caught.value) == "the inbox lock for @b was held for 0.05s — nothing was appended"
        assert not caught.value.outcome_unknown
        await node.file(filing("x", "id"))
        assert node.texts() == ["x"]


async def test_one_that_came_later_waits_for_the_lock_as_long_as_the_others_did(world: World, store: Store) -> None:
    async with node_of(world, store, settings=Settings(inbox_lock_wait_s=2)) as node, trio.open_nursery() as nursery:
        with held(world) as let_go:
            first = Ask(nursery, node, filing("first"))
            await trio.sleep(1)
            later = Ask(nursery, node, filing("later"))
            assert isinstance(await first.end(), InboxLockHeld)
            assert not later.over.is_set()
            let_go()
        assert isinstance(await later.end(), Receipt)
        assert node.texts() == ["later"]


async def test_an_error_that_nobody_foresaw_is_answered_and_told_and_the_next_filing_goes_well(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_of(world, store) as node:
        node.gate.answer = RuntimeError("a bug")
        with pytest.raises(FilingFailed, match=r"^the append failed: RuntimeError: a bug$") as caught:
            await node.file(filing())
        assert not caught.value.outcome_unknown
        node.gate.answer = Gate(world).answer
        with monkeypatch.context() as patch:

            def write_whole(fd: int, data: bytes) -> None:
                raise KeyError("a bug")

            patch.setattr("sotbus.comm.inbox.write_whole", write_whole)
            with pytest.raises(FilingFailed, match="KeyError: 'a bug'; the outcome is unknown") as caught:
                await node.file(filing())
        assert caught.value.outcome_unknown
        assert node.faults == [("b", "RuntimeError('a bug')"), ("b", "KeyError('a bug')")]
        await node.file(filing())
        assert node.texts() == ["hello"]


async def test_where_the_store_fails_those_without_an_id_are_filed_all_the_same(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        for call in ("known", "intend"):
            with held(world) as let_go, monkeypatch.context() as patch:

                def fail(*_: object) -> None:
                    raise StoreError("the node's store cannot be used: disk I/O error")

                patch.setattr(store, call, fail)
                plain = Ask(nursery, node, filing("plain"))
                named = Ask(nursery, node, filing("named", "id"))
                await settled()
                let_go()
                assert isinstance(await plain.end(), Receipt)
                error = await named.end()
            assert isinstance(error, FilingFailed)
            assert str(error) == "the node's store cannot be used: disk I/O error — nothing was appended"
            assert error.outcome_unknown == (call == "known"), "an earlier call may have filed it"
        assert node.texts() == ["plain", "plain"]
        await node.file(filing("named", "id"))
        assert node.texts() == ["plain", "plain", "named"]


# ---- message IDs


async def test_a_repeat_gets_the_first_answer_and_is_not_filed_again(world: World, store: Store) -> None:
    async with node_of(world, store) as node:
        first = await node.file(filing("x", "id"))
        assert await node.file(filing("x", "id")) == first
        assert node.texts() == ["x"]
        commits = store.statistics().commits
        await node.file(filing("x", "id"))
        assert store.statistics().commits == commits


async def test_a_repeat_of_what_was_filed_needs_no_lock(world: World, store: Store) -> None:
    async with node_of(world, store, settings=Settings(inbox_lock_wait_s=0.1)) as node, trio.open_nursery() as nursery:
        first = await node.file(filing("x", "id"))
        with held(world):
            assert await node.file(filing("x", "id")) == first
            with pytest.raises(Conflict):
                await node.file(filing("y", "id"))
            repeat = Ask(nursery, node, filing("x", "id"))
            other = Ask(nursery, node, filing("z"))
            assert await repeat.end() == first
            assert isinstance(await other.end(), InboxLockHeld)
        assert node.texts() == ["x"]


async def test_a_repeat_that_comes_while_the_lock_is_waited_for_gets_the_first_answer(
    world: World, store: Store
) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        await node.file(filing("x", "id"))
        with held(world) as let_go:
            other = Ask(nursery, node, filing("z", "id 2"))
            await settled()
            repeats = [Ask(nursery, node, filing(text, "id")) for text in ("x", "y")]
            await settled()
            let_go()
            assert isinstance(await other.end(), Receipt)
            ends = [await repeat.end() for repeat in repeats]
        assert {type(end) for end in ends} <= {Receipt, Conflict}
        assert node.texts() == ["x", "z"]


async def test_an_id_that_went_to_another_mailbox_while_the_lock_was_waited_for_is_not_filed_twice(
    world: World, store: Store
) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        with held(world) as let_go:
            other = Ask(nursery, node, filing("other"))
            late = Ask(nursery, node, filing("x", "id"), 0.1)
            assert isinstance(await late.end(), FilingFailed)
            await node.file(filing("x", "id", to="c"))
            again = Ask(nursery, node, filing("x", "id"))
            await settled()
            let_go()
            assert isinstance(await again.end(), Conflict)
            await other.end()
        assert (node.texts("b"), node.texts("c")) == (["other"], ["x"])


async def test_a_repeat_after_a_restart_gets_the_first_answer(world: World, store: Store, tmp_path: Path) -> None:
    async with node_of(world, store) as node:
        await node.file(filing("x", "id"))
    store.close()
    after = Store(store.path)
    async with node_of(world, after) as node:
        await node.file(filing("x", "id"))
        assert node.texts() == ["x"]
    after.close()


OTHERS = [
    pytest.param(filing("other", "id"), id="another text"),
    pytest.param(filing("x", "id", to="c"), id="another mailbox"),
    pytest.param(filing("x", "id", broadcast=True), id="a broadcast"),
    pytest.param(Filing("z-vm", "b", "repo", "x", message_id="id"), id="another sender"),
]


@pytest.mark.parametrize("other", OTHERS)
async def test_the_id_of_another_message_is_a_conflict(other: Filing, world: World, store: Store) -> None:
    async with node_of(world, store) as node:
        await node.file(filing("x", "id"))
        with pytest.raises(Conflict, match="the message ID id is that of another message") as caught:
            await node.file(other)
        assert caught.value.code == "conflict"
        assert (node.texts("b"), node.texts("c")) == (["x"], [])


@pytest.mark.parametrize("other", OTHERS)
async def test_the_id_of_another_message_that_is_under_way_is_a_conflict(
    other: Filing, world: World, store: Store
) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        with held(world) as let_go:
            first = Ask(nursery, node, filing("x", "id"))
            await settled()
            with pytest.raises(Conflict):
                await node.file(other)
            let_go()
            assert isinstance(await first.end(), Receipt)
        assert (node.texts("b"), node.texts("c")) == (["x"], [])


async def test_an_id_that_was_not_filed_may_go_to_another_mailbox(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cached send keeps its message ID when it resolves again (decisions, Addressing 15)."""
    async with node_of(world, store) as node:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", refuse(errno.EIO))
            with pytest.raises(FilingFailed):
                await node.file(filing("x", "id"))
        await node.file(filing("x", "id", to="c"))
        assert (node.texts("b"), node.texts("c")) == ([], ["x"])


async def test_a_repeat_while_the_first_is_under_way_waits_for_its_end_and_gets_its_answer(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        disk = Gatekeeper(monkeypatch, "fdatasync", world.inbox("b"))
        first = Ask(nursery, node, filing("x", "id"))
        await disk.until_reached()
        second = Ask(nursery, node, filing("x", "id"))
        await settled()
        assert not second.over.is_set()
        disk.go_on.set()
        assert isinstance(await first.end(), Receipt)
        assert isinstance(await second.end(), Receipt)
        assert node.texts() == ["x"]
        assert disk.calls == 1
        assert store.flights == {}


async def test_a_repeat_while_the_first_is_under_way_gets_its_error(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_of(world, store, settings=Settings(inbox_lock_wait_s=0.2)) as node, trio.open_nursery() as nursery:
        with held(world):
            asks = [Ask(nursery, node, filing("x", "id")) for _ in range(3)]
            errors = [await ask.end() for ask in asks]
        assert {type(error) for error in errors} == {InboxLockHeld}
        assert len(set(map(id, errors))) == 3


async def test_one_of_two_who_wait_for_an_id_may_give_up(world: World, store: Store) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        with held(world) as let_go:
            first = Ask(nursery, node, filing("x", "id"))
            second = Ask(nursery, node, filing("x", "id"))
            await settled()
            first.scope.cancel()
            await first.end()
            third = Ask(nursery, node, filing("x", "id"), 0.05)
            error = await third.end()
            assert isinstance(error, FilingFailed)
            assert error.outcome_unknown, "it may still be filed for the other one"
            let_go()
            assert isinstance(await second.end(), Receipt)
        assert node.texts() == ["x"]


async def test_the_first_answer_is_told_without_filing_anything(world: World, store: Store) -> None:
    async with node_of(world, store) as node:
        assert await node.writers.first_answer(filing("x", "id")) is None
        assert await node.writers.first_answer(filing("x")) is None
        receipt = await node.file(filing("x", "id"))
        assert await node.writers.first_answer(filing("x", "id")) == receipt
        assert await node.writers.first_answer(filing("other", "id")) is None
        assert await node.writers.first_answer(filing("x", "id", to="c")) is None
        assert node.texts() == ["x"]


async def test_the_first_answer_of_a_filing_that_may_stand_is_unknown(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_of(world, store) as node:
        with monkeypatch.context() as patch:
            patch.setattr(store, "settle", lambda _: None)  # as a process that is killed after the sync
            await node.file(filing("x", "id"))
        assert node.states("id") == [OPEN]
        with pytest.raises(FilingFailed, match="the outcome is unknown") as caught:
            await node.writers.first_answer(filing("x", "id"))
        assert caught.value.outcome_unknown
        assert await node.writers.first_answer(filing("other", "id")) is None

        def broken(_: object) -> None:
            raise StoreError("node.db cannot be read")

        monkeypatch.setattr(store, "known", broken)
        with pytest.raises(FilingFailed, match=r"node\.db cannot be read; the outcome is unknown") as caught:
            await node.writers.first_answer(filing("x", "id"))
        assert caught.value.outcome_unknown


async def test_an_intent_that_a_crash_left_open_is_settled_when_its_id_comes_again(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the settling at the start could not look at the inbox: of two, one stands and one does not."""
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        with held(world) as let_go:
            asks = [Ask(nursery, node, filing(str(at), f"id {at}")) for at in range(2)]
            await settled()
            with monkeypatch.context() as patch:
                patch.setattr(store, "settle", lambda _: None)  # as a process that is killed after the sync
                let_go()
                for ask in asks:
                    await ask.end()
        assert node.states("id 0", "id 1") == [OPEN, OPEN]
        stands = node.texts()[0]
        gone = "1" if stands == "0" else "0"
        world.inbox("b").write_bytes(world.inbox("b").read_bytes().splitlines(keepends=True)[0])
        with held(world) as let_go:
            asks = [Ask(nursery, node, filing(at, f"id {at}")) for at in (stands, gone, "new")]
            await settled()
            let_go()
            assert {type(await ask.end()) for ask in asks} == {Receipt}
        assert sorted(node.texts()) == sorted([stands, gone, "new"])
        assert node.states("id 0", "id 1") == [FILED, FILED]


async def test_an_intent_says_where_its_line_stands(world: World, store: Store) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        world.inbox("b").write_bytes(b'{"msg":"first"}\ntorn')
        with held(world) as let_go:
            ids = ["id 0", None, "id 2", None, "id \u2603"]
            asks = [Ask(nursery, node, filing("x" * len(one or ""), one)) for one in ids]
            await settled()
            let_go()
            for ask in asks:
                await ask.end()
        data = world.inbox("b").read_bytes()
        intents = store.known([one for one in ids if one is not None])
        assert len(intents) == 3
        for one in intents.values():
            stands = data[one.offset : one.offset + one.size]
            assert (stands.count(b"\n"), stands[-1:], message_id_of(stands)) == (1, b"\n", one.message_id)
            assert line_hash(stands) == one.line_hash
            assert (one.folder, one.mailbox) == (world.folder.root, "b")


async def test_where_the_store_fails_an_open_intent_is_left_open(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        open_one = line_of(filing("x", "open"), "t")
        store.intend(
            [
                Intent(
                    "open",
                    world.folder.root,
                    "b",
                    body_hash(filing("x", "open")),
                    0,
                    len(open_one),
                    line_hash(open_one),
                )
            ]
        )
        with held(world) as let_go, monkeypatch.context() as patch:
            asks = [Ask(nursery, node, filing("x", one)) for one in ("open", "new")]
            await settled()

            def intend(intents: object) -> None:
                raise StoreError("the disk is full")

            patch.setattr(store, "intend", intend)
            let_go()
            for ask in asks:
                assert "the disk is full" in str(await ask.end())
        await settled()
        assert node.texts() == []
        assert node.states("open", "new") == [OPEN, None]
        assert store.flights == {}
        for one in ("open", "new"):
            await node.file(filing("x", one))
        assert node.texts() == ["x", "x"]


# ---- deadlines and cancellation


async def test_the_latest_deadline_of_those_who_wait_for_one_id_counts(world: World, store: Store) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        with held(world) as let_go:
            first = Ask(nursery, node, filing("x", "id"), 1.5)
            await settled()
            second = Ask(nursery, node, filing("x", "id"))
            error = await first.end()
            assert isinstance(error, FilingFailed)
            assert error.outcome_unknown
            let_go()
            assert isinstance(await second.end(), Receipt)
        assert node.texts() == ["x"]


def test_what_is_put_back_waits_before_all_others_in_its_order() -> None:
    queue = FilingQueue()
    for text in "abcd":
        queue.put(WaitingFiling(filing(text), ("/comm", "b"), "t", 9.0))
    size = queue.bytes
    batch, _ = queue.take(Limits(batch_lines=2), 0.0)
    queue.put_back(batch)
    assert queue.bytes == size
    again, _ = queue.take(Limits(), 0.0)
    assert [json.loads(one.line)["msg"] for one in again] == list("abcd")
    assert queue.bytes == 0


async def test_a_filing_whose_deadline_passes_in_the_queue_is_known_not_to_be_filed(world: World, store: Store) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        with held(world) as let_go:
            other = Ask(nursery, node, filing("other"))
            with pytest.raises(FilingFailed) as caught:
                await node.file(filing("late", "id"), 0.1)
            assert str(caught.value) == "the turn for @b did not come within 0.1s — nothing was appended"
            assert not caught.value.outcome_unknown
            assert store.flights == {}
            let_go()
            await other.end()
        assert node.texts() == ["other"]
        assert node.states("id") == [None]


def test_a_filing_whose_deadline_has_passed_is_taken_out_when_its_batch_is_made() -> None:
    """Also where its caller has not come to take it out itself."""
    queue = FilingQueue()
    for text, deadline in (("late", 1.0), ("in time", 3.0), ("late too", 2.0)):
        queue.put(WaitingFiling(filing(text), ("/comm", "b"), "t", deadline))
    batch, late = queue.take(Limits(), 2.0)
    assert [json.loads(one.line)["msg"] for one in batch] == ["in time"]
    assert [json.loads(one.line)["msg"] for one in late] == ["late", "late too"]
    assert (len(queue), queue.bytes) == (0, 0)


async def test_the_batch_leaves_out_what_is_late_and_answers_it(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FilingQueue.take
    monkeypatch.setattr(FilingQueue, "take", lambda queue, limits, now: real(queue, limits, now + 100))
    async with node_of(world, store) as node:
        with pytest.raises(FilingFailed, match="its turn for @b came too late — nothing was appended") as caught:
            await node.file(filing("late", "id"), 50)
        assert not caught.value.outcome_unknown
        assert node.texts() == []
        assert store.flights == {}


async def test_a_thread_that_hangs_past_the_deadline_is_an_unknown_outcome_at_the_deadline(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        disk = Gatekeeper(monkeypatch, "fdatasync", world.inbox("b"))
        began = time.monotonic()
        hangs = Ask(nursery, node, filing("hangs", "id"), 2)
        await disk.until_reached()
        queued = Ask(nursery, node, filing("queued", "id 2"), 0.1)
        error = await queued.end()
        assert isinstance(error, FilingFailed)
        assert not error.outcome_unknown, "its batch has not begun"
        error = await hangs.end()
        assert isinstance(error, FilingFailed)
        assert error.outcome_unknown
        assert str(error) == "the append for @b did not end within 2s, so the outcome is unknown"
        assert time.monotonic() - began < 15
        with pytest.raises(FilingFailed, match="did not end within") as caught:
            await node.file(filing("hangs", "id"), 0.05)
        assert caught.value.outcome_unknown
        disk.go_on.set()
        assert isinstance(await node.file(filing("hangs", "id")), Receipt)
        assert node.texts() == ["hangs"]


async def test_a_caller_that_is_cancelled_while_it_waits_is_taken_out(world: World, store: Store) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        with held(world) as let_go:
            asks = [Ask(nursery, node, filing(str(at), f"id {at}")) for at in range(3)]
            await settled()
            asks[1].scope.cancel()
            await asks[1].end()
            assert set(store.flights) == {"id 0", "id 2"}
            assert node.writers.statistics()[1]["b"].depth == 2
            let_go()
            for at in (0, 2):
                await asks[at].end()
        assert sorted(node.texts()) == ["0", "2"]


async def test_a_caller_that_is_cancelled_while_its_batch_runs_leaves_the_others_and_its_result(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        disk = Gatekeeper(monkeypatch, "fdatasync", world.inbox("b"))
        with held(world) as let_go:
            gone = Ask(nursery, node, filing("gone", "id 0"))
            stays = Ask(nursery, node, filing("stays", "id 1"))
            await settled()
            let_go()
            await disk.until_reached()
        gone.scope.cancel()
        await gone.end()
        disk.go_on.set()
        assert isinstance(await stays.end(), Receipt)
        assert sorted(node.texts()) == ["gone", "stays"]
        assert node.states("id 0", "id 1") == [FILED, FILED]
        assert store.flights == {}


async def test_a_mailbox_that_hangs_stalls_no_other_one(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        disk = Gatekeeper(monkeypatch, "fdatasync", world.inbox("b"))
        hangs = Ask(nursery, node, filing("x", "id"))
        await disk.until_reached()
        for at in range(20):
            with trio.fail_after(5):
                await node.file(filing("y", f"id {at}", to="c"))
        assert not hangs.over.is_set()
        disk.go_on.set()
        await hangs.end()


async def test_a_folder_that_hangs_stalls_no_other_folder(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every thread of its mount hangs, and more filings wait for one; another folder's mount has its own."""
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    far, near = World(tmp_path / "far"), World(tmp_path / "near")
    async with (
        node_of(far, store, limiter=trio.CapacityLimiter(2)) as slow,
        node_of(near, store) as quick,
        trio.open_nursery() as nursery,
    ):
        keepers = [Gatekeeper(monkeypatch, "fdatasync", far.inbox(handle)) for handle in "bcd"]
        asks = [Ask(nursery, slow, filing("x", f"id {to}", to=to)) for to in "bcd"]
        with trio.fail_after(20):
            while sum(keeper.reached.is_set() for keeper in keepers) < 2:
                await trio.sleep(0.01)
        for at in range(20):
            with trio.fail_after(5):
                await quick.file(filing("y", f"near {at}"))
        with pytest.raises(FilingFailed, match="nothing was appended") as caught:
            await slow.file(filing("z", to="e"), 0.1)
        assert not caught.value.outcome_unknown
        for keeper in keepers:
            keeper.go_on.set()
        for ask in asks:
            assert isinstance(await ask.end(), Receipt)


async def test_where_no_thread_can_be_started_that_is_the_answer_and_the_next_filing_goes_well(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async with node_of(world, store) as node:
        with monkeypatch.context() as patch, trio.fail_after(5):
            patch.setattr(trio.lowlevel, "start_thread_soon", none_left)
            with pytest.raises(FilingFailed, match="no thread could be started") as caught:
                await node.file(filing("x", "id"))
        assert not caught.value.outcome_unknown
        assert (node.limiter.borrowed_tokens, store.flights) == (0, {})
        await node.file(filing("x", "id"))
        assert node.texts() == ["x"]
        assert node.limiter.borrowed_tokens == 0


# ---- the end, and what is kept


async def test_when_the_node_stops_a_batch_that_runs_is_waited_for_and_what_waits_is_answered(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(world, store)
    async with trio.open_nursery() as callers:
        async with trio.open_nursery() as nursery:
            await nursery.start(node.writers.run)
            disk = Gatekeeper(monkeypatch, "fdatasync", world.inbox("b"))
            runs = Ask(callers, node, filing("runs", "id 0"))
            await disk.until_reached()
            waits = Ask(callers, node, filing("waits", "id 1"))
            await settled()
            nursery.cancel_scope.cancel()
            trio.lowlevel.current_trio_token().run_sync_soon(disk.go_on.set)
        assert isinstance(await runs.end(), Receipt)
        error = await waits.end()
    assert isinstance(error, FilingFailed)
    assert (str(error), error.outcome_unknown) == ("the node is stopping — nothing was appended", False)
    assert store.flights == {}
    with pytest.raises(FilingFailed, match="the node does not write now — nothing was appended"):
        await node.file(filing())
    assert node.texts() == ["runs"]


async def test_when_the_node_stops_a_batch_that_hangs_is_left_and_its_outcome_is_unknown(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sotbus.node.mailbox_writer.GRACE_S", 0.1)
    node = Node(world, store)
    async with trio.open_nursery() as callers:
        async with trio.open_nursery() as nursery:
            await nursery.start(node.writers.run)
            disk = Gatekeeper(monkeypatch, "fdatasync", world.inbox("b"))
            hangs = Ask(callers, node, filing("hangs", "id"))
            await disk.until_reached()
            nursery.cancel_scope.cancel()
        error = await hangs.end()
    assert isinstance(error, FilingFailed)
    assert (str(error), error.outcome_unknown) == (
        "the node stopped while the line was written; the outcome is unknown",
        True,
    )
    assert node.states("id") == [OPEN]
    disk.go_on.set()
    with trio.fail_after(20):
        while node.states("id") != [FILED]:
            await trio.sleep(0.01)


@pytest.mark.parametrize("time", range(8))  # who runs first when a nursery is cancelled is random
async def test_when_the_node_stops_while_no_thread_is_free_what_waits_is_answered(
    world: World, store: Store, time: int
) -> None:
    limiter = trio.CapacityLimiter(1)
    node = Node(world, store, limiter=limiter)
    limiter.acquire_on_behalf_of_nowait("a mount that hangs")
    async with trio.open_nursery() as callers:
        async with trio.open_nursery() as nursery:
            await nursery.start(node.writers.run)
            waits = Ask(callers, node, filing("waits", "id"))
            await settled()
            nursery.cancel_scope.cancel()
        error = await waits.end()
    assert isinstance(error, FilingFailed)
    assert (str(error), error.outcome_unknown) == ("the node is stopping — nothing was appended", False)
    assert store.flights == {}
    assert limiter.borrowed_tokens == 1


async def test_when_the_node_stops_while_an_earlier_outcome_is_looked_for_the_caller_is_answered(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(world, store)
    reached, go_on = threading.Event(), threading.Event()
    real = Round._settle

    def stopped(turn: Round, inbox: Any) -> None:
        reached.set()
        assert go_on.wait(20)
        real(turn, inbox)

    real_stop = MailboxWriter.stop

    async def stopping(writer: MailboxWriter) -> None:
        trio.lowlevel.current_trio_token().run_sync_soon(go_on.set)  # once it waits for the turn
        await real_stop(writer)

    async with trio.open_nursery() as callers:
        async with trio.open_nursery() as nursery:
            await nursery.start(node.writers.run)
            await node.file(filing("first"))
            with monkeypatch.context() as patch:
                patch.setattr(os, "fdatasync", refuse(errno.EIO))
                patch.setattr(os, "ftruncate", refuse(errno.EIO))
                with pytest.raises(FilingFailed):
                    await node.file(filing("x", "id"))
            world.inbox("b").write_bytes(world.inbox("b").read_bytes().splitlines(keepends=True)[0])
            monkeypatch.setattr(Round, "_settle", stopped)
            again = Ask(callers, node, filing("x", "id"))
            await trio.to_thread.run_sync(reached.wait, 20)
            monkeypatch.setattr(MailboxWriter, "stop", stopping)
            nursery.cancel_scope.cancel()
        error = await again.end()
    assert isinstance(error, FilingFailed)
    assert store.flights == {}
    assert node.texts() == ["first"]


async def test_idle_writers_are_dropped_and_their_counts_are_kept(world: World, store: Store) -> None:
    async with node_of(world, store) as node:
        for at in range(IDLE_KEPT + 40):
            await node.file(filing(to=f"h{at}"))
        total, each = node.writers.statistics()
        assert list(each) == [f"h{at}" for at in range(40, IDLE_KEPT + 40)]
        assert (total.lines, total.batches) == (IDLE_KEPT + 40, IDLE_KEPT + 40)
        for at in range(IDLE_KEPT + 40):
            with pytest.raises(BadRequest):
                await node.file(filing("\ud800", to=f"no{at}"))
        assert len(node.writers.statistics()[1]) == IDLE_KEPT


async def test_a_busy_writer_is_never_dropped(world: World, store: Store) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        with held(world) as let_go:
            waits = Ask(nursery, node, filing("x", "id"))
            await settled()
            for at in range(IDLE_KEPT + 5):
                await node.file(filing(to=f"h{at}"))
            assert "b" in node.writers.statistics()[1]
            let_go()
            await waits.end()
        await node.file(filing("x", "id"))
        assert node.texts() == ["x"]


async def test_a_failed_batch_leaves_nothing_in_memory(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error's traceback holds the frames that hold the error: only the collector would ever free that."""
    rounds: list[weakref.ref[Round]] = []
    real = Round.run

    def run(self: Round) -> None:
        rounds.append(weakref.ref(self))
        real(self)

    monkeypatch.setattr(Round, "run", run)
    async with node_of(world, store) as node:
        gc.collect()
        gc.disable()
        try:
            with monkeypatch.context() as patch:
                patch.setattr(os, "fdatasync", refuse(errno.EIO))
                for at in range(3):
                    with pytest.raises(FilingFailed):
                        await node.file(filing("x", f"id {at}"))
            await node.file(filing("y"))
            await settled()
            assert [one() is None for one in rounds[:3]] == [True] * 3
        finally:
            gc.enable()


async def test_the_repr_says_what_waits(world: World, store: Store) -> None:
    async with node_of(world, store) as node, trio.open_nursery() as nursery:
        with held(world) as let_go:
            ask = Ask(nursery, node, filing("x", "id"))
            await settled()
            assert repr(node.writers) == f"<Writers of {world.folder.root}: 1 busy, 0 idle>"
            assert repr(node.writers._writers["b"]) == "<MailboxWriter @b: 1 wait, 0 lines filed>"
            assert repr(store.flights["id"]) == "<WaitingFiling id for @b, queued>"
            let_go()
            await ask.end()


def test_an_error_is_raised_anew_for_each_caller_whatever_its_constructor_takes() -> None:
    class Odd(SotbusError):
        def __init__(self, one: int, *, two: int) -> None:
            super().__init__(f"{one} and {two}", hint="none")
            self.two = two

    first = Odd(1, two=2)
    made = another(first)
    assert made is not first
    assert (type(made), str(made), made.hint) == (Odd, "1 and 2", "none")
    assert made.__dict__ == first.__dict__


# ---- many callers


async def test_64_callers_share_their_syncs_and_commits(world: World, store: Store) -> None:
    left = list(range(1000))
    async with node_of(world, store) as node:

        async def caller() -> None:
            while left:
                number = left.pop()
                await node.file(filing(str(number), f"id {number}"))

        async with trio.open_nursery() as nursery:
            for _ in range(64):
                nursery.start_soon(caller)
        total, _ = node.writers.statistics()
        assert sorted(map(int, node.texts())) == list(range(1000))
        # How the asks fall into batches is the scheduler's: some 50 on a quiet machine, 3000 without batches.
        assert (total.syncs + store.statistics().commits) * 4 <= 1000
        assert set(node.states(*(f"id {number}" for number in range(1000)))) == {FILED}
