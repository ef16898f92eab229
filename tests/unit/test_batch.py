"""Many lines under one lock hold: the steps, and what a batch that fails leaves to readers who take no lock."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from world import MACHINE, World

from sotbus.comm import cursor, flock
from sotbus.comm.batch import Batch
from sotbus.comm.cursor import Cursor
from sotbus.comm.inbox import Inbox, look
from sotbus.comm.lock_manager import FlockManager
from sotbus.errors import FilingFailed, InboxLockHeld

LOCAL = f"local {MACHINE}"
OLD = b'{"old":1}\n'
LINES = [b"one\n", b"two\n", b"three\n"]


def inbox_of(world: World, identity: str = LOCAL) -> Inbox:
    world.folder.ensure()
    return Inbox(world.folder, "b", FlockManager(identity))


@pytest.fixture
def inbox(world: World) -> Inbox:
    """The inbox of ``b`` on a local disk, with one line."""
    inbox = inbox_of(world)
    path_of(inbox).write_bytes(OLD)
    return inbox


def path_of(inbox: Inbox) -> Path:
    return Path(inbox.path)


def batch_of(lines: Sequence[bytes], told: list[int] | None = None) -> Batch:
    """A batch of these lines, which notes the offset that it was told."""

    def choose(offset: int) -> Sequence[bytes]:
        if told is not None:
            told.append(offset)
        return lines

    return Batch(choose)


class Calls:
    """The system calls that change a file: each is noted, may fail, and has a reader look before and after it."""

    NAMES = ("write", "pwrite", "ftruncate", "fdatasync", "fsync")

    def __init__(self, instant: Callable[[], object] = int) -> None:
        self.log: list[str] = []
        self._instant = instant
        self._fail: dict[str, Iterator[int | None]] = {}
        self._real = {name: getattr(os, name) for name in self.NAMES}

    def let_fail(self, name: str, *outcomes: int | None) -> Calls:
        """The first calls end so: an error number raises it, zero or less is a short write of so many bytes, None goes
        well. The last outcome stays.
        """
        self._fail[name] = itertools.chain(outcomes, itertools.repeat(outcomes[-1]))
        return self

    def _call(self, name: str, fd: int, *more: object) -> object:
        self._instant()
        self.log.append(name)
        try:
            outcome = next(self._fail[name]) if name in self._fail else None
            if outcome is not None and outcome > 0:
                raise OSError(outcome, os.strerror(outcome))
            if name in ("fdatasync", "fsync"):
                return None  # a disk that is not asked answers sooner
            if outcome is not None:
                data = more[0]
                assert isinstance(data, bytes | memoryview)
                more = (data[:-outcome], *more[1:])
            return self._real[name](fd, *more)
        finally:
            self._instant()

    @contextmanager
    def patched(self) -> Iterator[Calls]:
        with pytest.MonkeyPatch.context() as patch:
            for name in self.NAMES:
                patch.setattr(os, name, lambda fd, *more, _name=name: self._call(_name, fd, *more))
            yield self


# ---- the steps


def test_a_batch_has_one_lock_one_write_and_one_sync(inbox: Inbox) -> None:
    batch = batch_of(LINES)
    with Calls().patched() as calls:
        inbox.append(batch, 0)
    assert calls.log == ["write", "fdatasync"]
    assert path_of(inbox).read_bytes() == OLD + b"".join(LINES)
    assert (batch.lines, batch.syncs) == (LINES, 1)


def test_the_lines_are_chosen_under_the_lock_after_the_cut_and_before_the_write(inbox: Inbox) -> None:
    path_of(inbox).write_bytes(OLD + b"torn")
    seen: list[object] = []

    def choose(offset: int) -> list[bytes]:
        with pytest.raises(flock.LockTimeoutError):
            flock.acquire(inbox.lock_path, exclusive=True, bound_s=0, polling=True)
        seen.extend([offset, path_of(inbox).read_bytes()])
        return LINES

    cut: list[int] = []
    inbox.on_cut = cut.append
    inbox.append(Batch(choose), 0)
    assert seen == [len(OLD), OLD]
    assert cut == [4]
    assert path_of(inbox).read_bytes() == OLD + b"".join(LINES)


def test_the_first_batch_of_all_syncs_the_folder_before_it_is_written(world: World) -> None:
    inbox = inbox_of(world)
    batch = batch_of(LINES)
    with Calls().patched() as calls:
        inbox.append(batch, 0)
    assert calls.log == ["fsync", "write", "fdatasync"]
    assert batch.syncs == 2


def test_a_batch_of_nothing_writes_and_syncs_nothing(inbox: Inbox) -> None:
    batch = batch_of([])
    with Calls().patched() as calls:
        inbox.append(batch, 0)
    assert calls.log == []
    assert batch.syncs == 0


def test_a_choice_that_raises_writes_nothing_and_lets_the_lock_go(inbox: Inbox) -> None:
    def choose(offset: int) -> list[bytes]:
        raise FilingFailed("the store is full")

    with Calls().patched() as calls, pytest.raises(FilingFailed, match="the store is full"):
        inbox.append(Batch(choose), 0)
    assert calls.log == []
    inbox.append(OLD, 0)
    assert path_of(inbox).read_bytes() == OLD * 2


def test_nothing_is_chosen_where_the_lock_is_held_past_the_bound(inbox: Inbox) -> None:
    told: list[int] = []
    with (
        flock.acquire(inbox.lock_path, exclusive=False, bound_s=0, polling=True),
        pytest.raises(InboxLockHeld, match=r"held for 0\.02s — nothing was appended"),
    ):
        inbox.append(batch_of(LINES, told), 0.02)
    assert told == []


@pytest.mark.parametrize("size", [1, 3, 4096])
def test_short_writes_of_a_batch_are_continued(size: int, inbox: Inbox) -> None:
    with Calls().let_fail("write", -size).patched():
        inbox.append(batch_of(LINES), 0)
    assert path_of(inbox).read_bytes() == OLD + b"".join(LINES)


def test_thousands_of_lines_are_one_batch(inbox: Inbox) -> None:
    lines = [b"%d\n" % number for number in range(5000)]
    with Calls().patched() as calls:
        inbox.append(batch_of(lines), 0)
    assert calls.log == ["write", "fdatasync"]
    assert path_of(inbox).read_bytes() == OLD + b"".join(lines)


# ---- a batch that fails


@pytest.mark.parametrize("k", range(1, 6))
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_sync_that_fails_leaves_a_bare_newline_for_each_line_but_one(k: int, number: int, inbox: Inbox) -> None:
    lines = [b"line %d\n" % at for at in range(k)]
    with Calls().let_fail("fdatasync", number).patched(), pytest.raises(FilingFailed) as caught:
        inbox.append(batch_of(lines), 0)
    assert str(caught.value) == f"the append failed: {os.strerror(number)}"
    assert not caught.value.outcome_unknown
    assert path_of(inbox).read_bytes() == OLD + b"\n" * (k - 1)
    inbox.append(LINES[0], 0)
    assert path_of(inbox).read_bytes() == OLD + b"\n" * (k - 1) + LINES[0]


def test_what_is_left_is_synced_as_far_as_the_disk_lets_it(inbox: Inbox) -> None:
    with Calls().let_fail("fdatasync", errno.EIO, None).patched() as calls, pytest.raises(FilingFailed):
        inbox.append(batch_of(LINES), 0)
    assert calls.log == ["write", "fdatasync", "ftruncate", "pwrite", "fdatasync"]


@pytest.mark.parametrize("written", range(5))
def test_no_more_room_is_asked_for_than_the_batch_had(written: int, inbox: Inbox) -> None:
    """Newlines beyond what was written would not fit on a full disk either, and nobody has counted a line there."""
    lines = [b"a\n", b"b\n", b"c\n", b"d\n", b"e\n"]
    calls = Calls().let_fail("write", -written, errno.ENOSPC) if written else Calls().let_fail("write", errno.ENOSPC)
    with calls.patched(), pytest.raises(FilingFailed) as caught:
        inbox.append(batch_of(lines), 0)
    assert not caught.value.outcome_unknown
    assert path_of(inbox).read_bytes() == OLD + b"\n" * min(written, 4)


@pytest.mark.parametrize("cuts", [(errno.EIO,), (None, errno.EIO)], ids=["the first cut", "the second cut"])
def test_a_batch_that_cannot_be_taken_back_is_an_unknown_outcome(cuts: tuple[int | None, ...], inbox: Inbox) -> None:
    calls = Calls().let_fail("fdatasync", errno.EIO).let_fail("ftruncate", *cuts).let_fail("pwrite", errno.ENOSPC)
    with calls.patched(), pytest.raises(FilingFailed, match="cutting it back failed too") as caught:
        inbox.append(batch_of(LINES), 0)
    assert caught.value.outcome_unknown
    assert str(caught.value).endswith("so the outcome is unknown")


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_newlines_that_cannot_be_written_are_given_up_and_the_outcome_is_known(done: int, inbox: Inbox) -> None:
    lines = [b"a\n", b"b\n", b"c\n", b"d\n", b"e\n"]  # four of these bytes hold two whole lines
    calls = Calls().let_fail("fdatasync", errno.EIO)
    calls.let_fail("pwrite", *([-done] if done else []), errno.ENOSPC)
    with calls.patched(), pytest.raises(FilingFailed) as caught:
        inbox.append(batch_of(lines), 0)
    assert not caught.value.outcome_unknown
    assert path_of(inbox).read_bytes() == OLD + b"\n" * done


NFS4 = "nfs4 filer.example:/home"


@pytest.mark.parametrize("step", ["write", "fdatasync"])
def test_after_a_fence_error_only_a_cut_is_tried_and_the_outcome_is_unknown(step: str, world: World) -> None:
    inbox = inbox_of(world, NFS4)
    path_of(inbox).write_bytes(OLD)
    with (
        Calls().let_fail(step, errno.EIO).patched() as calls,
        pytest.raises(FilingFailed, match="may have been lost") as e,
    ):
        inbox.append(batch_of(LINES), 0)
    assert e.value.outcome_unknown
    assert calls.log[calls.log.index("write") :] == (
        ["write", "ftruncate"] if step == "write" else ["write", step, "ftruncate"]
    )
    assert path_of(inbox).read_bytes() == OLD


def test_a_server_without_room_knows_the_lock_so_that_the_newlines_are_written(world: World) -> None:
    inbox = inbox_of(world, NFS4)
    path_of(inbox).write_bytes(OLD)
    with Calls().let_fail("fdatasync", errno.EDQUOT).patched(), pytest.raises(FilingFailed) as caught:
        inbox.append(batch_of(LINES), 0)
    assert not caught.value.outcome_unknown
    assert path_of(inbox).read_bytes() == OLD + b"\n\n"


def test_an_interrupt_takes_a_batch_back_and_passes_through(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fdatasync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        inbox.append(batch_of(LINES), 0)
    monkeypatch.undo()
    assert path_of(inbox).read_bytes() == OLD + b"\n\n"


def test_a_file_opened_for_appending_is_written_where_told_only_without_its_flag(tmp_path: Path) -> None:
    """Why the flag is taken off: pwrite(2), BUGS."""
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        os.write(fd, b"12345")
        os.pwrite(fd, b"x", 0)
        assert os.pread(fd, 9, 0) == b"12345x"
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_APPEND)
        os.pwrite(fd, b"x", 0)
        assert os.pread(fd, 9, 0) == b"x2345x"
    finally:
        os.close(fd)


# ---- a reader that takes no lock


class Readers:
    """Every reader that polled at any of the moments so far, or did not: its cursor, and which later lines it showed.

    At each moment each of them may poll or not, so that all combinations are there.
    """

    def __init__(self, path: str, cursors: Sequence[bytes]) -> None:
        self._path = path
        self.later: frozenset[bytes] = frozenset()
        self.states = {(text, frozenset[bytes]()) for text in cursors}
        self._seen: dict[tuple[bytes, bytes], tuple[bytes, list[bytes]]] = {}

    def may_poll(self) -> None:
        self.states = self.states | self._polled()

    def must_poll(self) -> None:
        self.states = self._polled()

    def _polled(self) -> set[tuple[bytes, frozenset[bytes]]]:
        data = Path(self._path).read_bytes() if os.path.exists(self._path) else b""
        polled = set()
        for text, shown in self.states:
            if (data, text) not in self._seen:
                self._seen[data, text] = self._poll(text)
            text, lines = self._seen[data, text]
            polled.add((text, shown | self.later.intersection(lines)))
        return polled

    def _poll(self, text: bytes) -> tuple[bytes, list[bytes]]:
        """One poll by a cursor: the cursor after it, and the lines that it showed."""
        seen = look(self._path, Cursor.parse(text.decode()))
        after = cursor.written_form(seen.total, seen.last) if seen.lines else text
        return after, [line + b"\n" for line in seen.lines]

    def skipped(self) -> list[bytes]:
        """The cursors of readers who would have missed some of the later lines, if all polled now."""
        return [text for text, shown in self._polled() if shown != self.later]


def cursors_of(lines: Sequence[bytes]) -> list[bytes]:
    """A cursor at each place of an inbox."""
    return [cursor.written_form(at, lines[at - 1].removesuffix(b"\n") if at else b"") for at in range(len(lines) + 1)]


def fail(
    inbox: Inbox, before: Sequence[bytes], k: int, calls: Callable[[Callable[[], object]], Calls]
) -> tuple[Readers, FilingFailed]:
    """A batch of k lines, of three bytes each, fails behind others, and readers look meanwhile."""
    path_of(inbox).write_bytes(b"".join(before))
    readers = Readers(inbox.path, cursors_of(before))
    with calls(readers.may_poll).patched(), pytest.raises(FilingFailed) as caught:
        inbox.append(batch_of([b"b%d\n" % at for at in range(k)]), 0)
    return readers, caught.value


def who_skips(inbox: Inbox, readers: Readers, more: int) -> list[str]:
    """File up to so many lines after the failure, one by one and together, and say which reader misses any of them.

    Readers may poll at any moment meanwhile, and again the inbox begins as the failure left it.
    """
    left, states = path_of(inbox).read_bytes(), readers.states
    lines = [b"later %d\n" % at for at in range(more)]
    ways = [[[line] for line in lines], *([lines[:count]] for count in range(2, more + 1))]
    missed = []
    for way in ways:
        path_of(inbox).write_bytes(left)
        readers.states, readers.later = states, frozenset()
        for some in way:
            readers.later |= frozenset(some)
            with Calls(readers.may_poll).patched():
                inbox.append(batch_of(some), 0)
            missed += [f"{text!r} of {sorted(readers.later)}" for text in readers.skipped()]
    return missed


FAILURES = ["write", "write, no cut", "fdatasync", "fdatasync, no cut"]


@pytest.mark.parametrize("before", [[], [b"x\n"], [b"x\n", b"\n", b"y\n"]], ids=["new", "one line", "three lines"])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("k", range(1, 6))
def test_a_reader_without_the_lock_skips_nothing_that_is_filed_later(
    k: int, failure: str, before: list[bytes], world: World
) -> None:
    """Readers poll, or do not, before and after every system call of the batch, of its clean-up, and of what follows.

    The write fails after each number of bytes. Where the cut fails, what is whole of the batch stands.
    """
    inbox = inbox_of(world)
    size = 3 * k
    for written in range(size) if failure.startswith("write") else [size]:

        def calls(instant: Callable[[], object], written: int = written) -> Calls:
            made = Calls(instant)
            if written < size:
                made.let_fail("write", *([-written] if written else []), errno.ENOSPC)
            else:
                made.let_fail("fdatasync", errno.EIO)
            return made.let_fail("ftruncate", errno.EIO) if failure.endswith("no cut") else made

        readers, error = fail(inbox, before, k, calls)
        assert error.outcome_unknown == failure.endswith("no cut")
        assert who_skips(inbox, readers, k + 2) == [], f"after {written} bytes"


@pytest.mark.parametrize("k", range(2, 6))
def test_where_the_disk_lets_no_newline_be_written_a_reader_that_looks_again_in_time_skips_nothing(
    k: int, world: World
) -> None:
    inbox = inbox_of(world)
    for done, cut in itertools.product(range(k - 1), [None, errno.EIO]):

        def calls(instant: Callable[[], object], done: int = done, cut: int | None = cut) -> Calls:
            made = Calls(instant).let_fail("fdatasync", errno.EIO).let_fail("ftruncate", None, cut)
            return made.let_fail("pwrite", *([-done] if done else []), errno.ENOSPC)

        readers, error = fail(inbox, [b"x\n"], k, calls)
        assert error.outcome_unknown == (cut is not None)
        readers.must_poll()
        assert who_skips(inbox, readers, k + 2) == [], f"after {done} newlines"


@pytest.mark.parametrize("k", range(2, 6))
def test_the_newlines_are_what_keeps_a_reader_from_skipping(k: int, world: World) -> None:
    """The test above can fail: cut to its length before, as one line is, a batch does have readers who skip."""
    inbox = inbox_of(world)

    def calls(instant: Callable[[], object]) -> Calls:
        return Calls(instant).let_fail("fdatasync", errno.EIO).let_fail("pwrite", errno.ENOSPC)

    readers, _ = fail(inbox, [b"x\n"], k, calls)
    assert who_skips(inbox, readers, k) != []
