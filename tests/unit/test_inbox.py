"""The inbox: the steps of an append and what each failure leaves, and one look at what is there."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from tools import require_tool
from world import MACHINE, World

from sotbus import message
from sotbus.comm import cursor, flock, inbox, offset_hint
from sotbus.comm.cursor import Cursor, cksum
from sotbus.comm.inbox import Inbox, Look, end_of_last_line, look
from sotbus.comm.lock_manager import FlockManager
from sotbus.comm.offset_hint import Hint
from sotbus.comm.settings import Settings
from sotbus.errors import EX_TRY_AGAIN, FilingFailed, InboxBusy, InboxLockHeld

LOCAL = f"local {MACHINE}"
NFS4 = "nfs4 filer.example:/export"
LINE = b'{"from":"a","to":"b","repo":"r","msg":"hello","ts":"2026-05-29T18:04:00Z"}\n'


@pytest.fixture
def box(world: World) -> Inbox:
    """The inbox of ``b``, which is not there yet."""
    world.folder.ensure()
    return Inbox(world.folder, "b", FlockManager(LOCAL))


def path_of(box: Inbox) -> Path:
    return Path(box.folder.inbox(box.handle))


def refuse(number: int) -> Callable[..., int]:
    """A system call that fails."""

    def call(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def append(box: Inbox, line: bytes = LINE, bound_s: float = 0) -> int:
    """Append; answers how many bytes were told to be cut before."""
    cuts: list[int] = []
    box.on_cut = cuts.append
    box.append(line, bound_s)
    assert len(cuts) < 2
    return sum(cuts)


def is_free(box: Inbox) -> bool:
    """Whether nobody holds the inbox lock."""
    flock.acquire(box.folder.inbox_lock(box.handle), exclusive=True, bound_s=0, polling=True).release()
    return True


# ---- append


class Calls:
    """Notes the system calls of an append by what they are called on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.names: dict[int, str] = {}
        self.flags: dict[str, int] = {}
        self._real_open = os.open
        monkeypatch.setattr(os, "open", self._open)
        for module, name in ((os, "write"), (os, "fdatasync"), (os, "fsync"), (os, "ftruncate"), (os, "close")):
            self._note(monkeypatch, module, name)
        real_flock = fcntl.flock

        def lock(fd: int, operation: int) -> None:
            self.log.append(f"{'unlock' if operation == fcntl.LOCK_UN else 'lock'} {self.names[fd]}")
            real_flock(fd, operation)

        monkeypatch.setattr(fcntl, "flock", lock)

    def _open(self, path: str, flags: int, mode: int = 0o777) -> int:
        fd = self._real_open(path, flags, mode)
        self.names[fd] = os.path.basename(path)
        self.flags[self.names[fd]] = flags
        self.log.append(f"open {self.names[fd]}")
        return fd

    def _note(self, monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> None:
        real = getattr(os, name)

        def call(fd: int, *rest: object) -> object:
            self.log.append(f"{name} {self.names[fd]}")
            return real(fd, *rest)

        monkeypatch.setattr(module, name, call)


@pytest.mark.spec("S56", "S57")
def test_an_append_locks_opens_writes_syncs_closes_and_unlocks(box: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    box.append(LINE, 0)
    calls = Calls(monkeypatch)
    box.append(LINE, 0)
    assert calls.log == [
        *("open b.lock", "lock b.lock"),
        *("open b.jsonl", "write b.jsonl", "fdatasync b.jsonl", "close b.jsonl"),
        *("unlock b.lock", "close b.lock"),
    ]
    assert calls.flags["b.lock"] & os.O_ACCMODE == os.O_RDWR
    assert calls.flags["b.jsonl"] & (os.O_ACCMODE | os.O_APPEND | os.O_TRUNC) == os.O_RDWR | os.O_APPEND


@pytest.mark.spec("S9", "S56", "S57")
def test_a_torn_tail_is_cut_before_and_a_first_line_syncs_the_folder(
    box: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    path_of(box).write_bytes(b"torn")
    calls = Calls(monkeypatch)
    assert append(box) == 4
    assert calls.log == [
        *("open b.lock", "lock b.lock"),
        *("open b.jsonl", "ftruncate b.jsonl", "open inbox", "fsync inbox", "close inbox"),
        *("write b.jsonl", "fdatasync b.jsonl", "close b.jsonl"),
        *("unlock b.lock", "close b.lock"),
    ]


TAILS = [1, 2, 4094, 4095, 4096, 4097, 4098, 8190, 8191, 8192, 8193, 8194, 12287, 12288, 12289, 20000]


@pytest.mark.spec("S55", "S56")
@pytest.mark.parametrize("fill", [b"x", b"\0"], ids=["text", "nul"])
@pytest.mark.parametrize("size", TAILS)
@pytest.mark.parametrize("kept", [0, 1, 75, 4096, 8191])
def test_a_tail_without_its_newline_is_cut_whatever_its_size(kept: int, size: int, fill: bytes, box: Inbox) -> None:
    before = b"k" * (kept - 1) + b"\n" if kept else b""
    path_of(box).write_bytes(before + fill * size)
    assert append(box) == size
    assert path_of(box).read_bytes() == before + LINE


@pytest.mark.spec("S56")
@pytest.mark.parametrize("before", [b"", b"\n", b"\n\n", LINE, b"x" * 4095 + b"\n", b"x" * 4096 + b"\n", b"\xff\0\n"])
def test_whole_lines_are_never_cut_whatever_they_hold(before: bytes, box: Inbox) -> None:
    path_of(box).write_bytes(before)
    assert append(box) == 0
    assert path_of(box).read_bytes() == before + LINE


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60), st.integers(1, 8))
def test_the_end_of_the_last_line_is_the_byte_after_its_newline(data: bytes, block: int) -> None:
    fd = os.memfd_create("inbox")
    try:
        os.write(fd, data)
        with mock.patch.object(inbox, "TAIL_BLOCK_BYTES", block):
            assert end_of_last_line(fd, len(data)) == data.rfind(b"\n") + 1
    finally:
        os.close(fd)


def test_nothing_is_cut_on_a_guess_where_the_file_became_shorter() -> None:
    fd = os.memfd_create("inbox")
    try:
        os.write(fd, b"line\n")
        with pytest.raises(OSError, match="became shorter"):
            end_of_last_line(fd, 9)
    finally:
        os.close(fd)


@pytest.mark.spec("S57")
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_short_writes_are_continued(size: int, box: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:size]))
    box.append(LINE, 0)
    box.append(LINE, 0)
    assert path_of(box).read_bytes() == LINE * 2


@pytest.mark.spec("S49", "S57")
@pytest.mark.parametrize("size", [64 * 1024, (1 << 20) - 2, 1 << 20, 3_000_000])
def test_a_long_line_is_filed_whole_and_looked_at_whole(size: int, box: Inbox) -> None:
    long = b"y" * size + b"\n"
    for line in (LINE, long, LINE):
        box.append(line, 0)
    assert path_of(box).read_bytes() == LINE + long + LINE
    for shown in range(4):
        seen = look(str(path_of(box)), Cursor.parse(str(shown)))
        assert (seen.offset, seen.total) == (shown, 3)
        assert [len(line) + 1 for line in seen.lines] == [len(LINE), len(long), len(LINE)][shown:]


BEFORE = [b"", LINE, LINE + b"torn", b"\0" * 5000]


@pytest.mark.spec("S57")
@pytest.mark.parametrize("written", [0, 1, 30, len(LINE) - 1])
@pytest.mark.parametrize("before", BEFORE, ids=["new", "line", "torn", "nul"])
def test_a_disk_that_fills_in_the_middle_of_a_line_leaves_the_length(
    before: bytes, written: int, box: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    path_of(box).write_bytes(before)
    real = os.write
    left = [written]

    def write(fd: int, data: memoryview) -> int:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        took = real(fd, data[: left[0]])
        left[0] -= took
        return took

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(FilingFailed) as caught:
            box.append(LINE, 0)
    assert str(caught.value) == "the append failed: No space left on device"
    assert caught.value.outcome_unknown is False
    kept = before[: before.rfind(b"\n") + 1]
    assert path_of(box).read_bytes() == kept
    assert is_free(box)
    assert append(box) == 0
    assert path_of(box).read_bytes() == kept + LINE


@pytest.mark.spec("S57")
@pytest.mark.parametrize(
    ("call", "number", "before"),
    [
        ("fdatasync", errno.EIO, LINE),
        ("fdatasync", errno.EDQUOT, b""),
        ("fsync", errno.EIO, b""),
        ("fdatasync", errno.EIO, LINE + b"torn"),
    ],
)
def test_a_sync_that_fails_takes_the_line_back(
    call: str, number: int, before: bytes, box: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    path_of(box).write_bytes(before)
    monkeypatch.setattr(os, call, refuse(number))
    with pytest.raises(FilingFailed) as caught:
        box.append(LINE, 0)
    assert str(caught.value) == f"the append failed: {os.strerror(number)}"
    assert caught.value.outcome_unknown is False
    assert path_of(box).read_bytes() == before[: before.rfind(b"\n") + 1]
    assert is_free(box)


@pytest.mark.spec("S57")
def test_a_line_that_cannot_be_taken_back_is_an_unknown_outcome(box: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    path_of(box).write_bytes(LINE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refuse(errno.EIO))
        patch.setattr(os, "ftruncate", refuse(errno.EROFS))
        with pytest.raises(FilingFailed) as caught:
            box.append(LINE, 0)
    assert caught.value.outcome_unknown is True
    assert str(caught.value) == (
        "the append failed: Input/output error; cutting it back failed too (Read-only file system), "
        "so the outcome is unknown"
    )
    assert is_free(box)
    assert path_of(box).read_bytes() == LINE * 2


def test_a_torn_tail_that_cannot_be_cut_files_nothing(box: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    path_of(box).write_bytes(LINE + b"torn")
    monkeypatch.setattr(os, "ftruncate", refuse(errno.EIO))
    with pytest.raises(FilingFailed) as caught:
        box.append(LINE, 0)
    assert caught.value.outcome_unknown is False
    assert path_of(box).read_bytes() == LINE + b"torn"


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_an_interrupt_takes_the_line_back_and_passes_through(
    call: str, box: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    path_of(box).write_bytes(LINE)
    real = os.write

    def interrupt(fd: int, data: bytes = b"") -> int:
        if data:
            real(fd, data[:9])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, call, interrupt)
        with pytest.raises(KeyboardInterrupt):
            box.append(LINE, 0)
    assert path_of(box).read_bytes() == LINE
    assert is_free(box)


@pytest.mark.parametrize("name", ["b.jsonl", "b.lock"])
def test_a_close_that_fails_after_the_sync_takes_nothing_back(
    name: str, box: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(box)
    real = os.close
    inode = Path(box.folder.inboxes, name).stat().st_ino

    def close(fd: int) -> None:
        ours = os.fstat(fd).st_ino == inode
        real(fd)
        if ours:
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        append(box)
    assert path_of(box).read_bytes() == LINE * 2
    assert is_free(box)


@pytest.mark.spec("S56", "S57")
def test_a_cut_is_told_also_where_the_append_fails(box: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    path_of(box).write_bytes(LINE + b"torn")
    monkeypatch.setattr(os, "fdatasync", refuse(errno.EIO))
    cuts: list[int] = []
    box.on_cut = cuts.append
    with pytest.raises(FilingFailed):
        box.append(LINE, 0)
    assert cuts == [4]


@pytest.mark.parametrize("name", ["b.jsonl", "b.lock"])
def test_a_folder_in_a_files_place_is_a_filing_that_failed(name: str, box: Inbox) -> None:
    Path(box.folder.inboxes, name).mkdir()
    with pytest.raises(FilingFailed) as caught:
        box.append(LINE, 0)
    assert str(caught.value) == "the append failed: Is a directory"
    assert caught.value.outcome_unknown is False


def test_a_missing_folder_is_a_filing_that_failed(box: Inbox) -> None:
    Path(box.folder.inboxes).rmdir()
    with pytest.raises(FilingFailed, match=r"^the append failed: No such file or directory$"):
        box.append(LINE, 0)


def test_the_bytes_of_another_program_are_looked_for_on_the_descriptor(
    box: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    path_of(box).write_bytes(LINE)

    real = os.stat

    def stat(path: str, **more: bool) -> os.stat_result:
        assert path != box.path
        return real(path, **more)

    monkeypatch.setattr(os, "stat", stat)
    box.append(LINE, 0)
    monkeypatch.undo()
    assert path_of(box).read_bytes() == LINE * 2


# ---- the lock's bound


@pytest.mark.spec("S58", "S59")
@pytest.mark.parametrize(
    ("environ", "said"),
    [({}, "2s"), ({"SOT_INBOX_LOCK_WAIT_SECS": "0.25"}, "0.25s"), ({"SOT_INBOX_LOCK_WAIT_SECS": "x"}, "2s")],
)
def test_past_the_bound_nothing_is_appended(
    environ: dict[str, str], said: str, world: World, box: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound_s = Settings.of(environ).inbox_lock_wait_s
    now = [100.0]

    def sleep(for_s: float) -> None:
        now[0] += for_s

    with (
        flock.acquire(world.folder.inbox_lock("b"), exclusive=False, bound_s=0, polling=False),
        monkeypatch.context() as patch,
    ):
        patch.setattr(time, "monotonic", lambda: now[0])
        patch.setattr(time, "sleep", sleep)
        with pytest.raises(InboxLockHeld) as caught:
            Inbox(world.folder, "b", FlockManager(NFS4)).append(LINE, bound_s)
    assert str(caught.value) == f"the inbox lock for @b was held for {said} — nothing was appended"
    assert now[0] == pytest.approx(100 + bound_s)
    assert not path_of(box).exists()


@pytest.mark.spec("S58", "S59")
def test_a_local_lock_is_waited_for_no_longer_either(world: World, box: Inbox) -> None:
    path_of(box).write_bytes(LINE + b"torn")
    with flock.acquire(world.folder.inbox_lock("b"), exclusive=True, bound_s=0, polling=False):
        with pytest.raises(InboxLockHeld) as caught:
            box.append(LINE, 0.05)
        assert str(caught.value) == "the inbox lock for @b was held for 0.05s — nothing was appended"
    assert path_of(box).read_bytes() == LINE + b"torn"


@pytest.mark.spec("S58")
@pytest.mark.parametrize(
    ("identity", "polling"), [(NFS4, True), (LOCAL, False), (f"none@{MACHINE}", False), ("nfs4x", False)]
)
def test_only_an_nfs4_manager_is_polled(identity: str, polling: bool, world: World) -> None:
    assert FlockManager(identity).polling is polling


@pytest.mark.spec("S73")
def test_readers_share_the_lock_and_a_held_one_is_try_again(world: World, box: Inbox) -> None:
    assert Settings().inbox_read_wait_s == 3
    assert Settings.of({"SOT_INBOX_READ_WAIT_SECS": "7"}).inbox_read_wait_s == 7
    with box.locked_for_reading(0), box.locked_for_reading(0), pytest.raises(InboxLockHeld):
        box.append(LINE, 0)
    with flock.acquire(world.folder.inbox_lock("b"), exclusive=True, bound_s=0, polling=False):
        with pytest.raises(InboxBusy) as caught:
            box.locked_for_reading(0.02)
        assert str(caught.value) == ("the inbox for @b is being written — nothing was read; run comm-poll.sh again")
        assert caught.value.exit_status == EX_TRY_AGAIN == 75


# ---- look


@pytest.mark.spec("S68")
@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300))
@example(b"")
@example(b"\0a\0")
def test_the_hash_is_the_posix_cksum_without_nul_bytes(line: bytes) -> None:
    data = line.replace(b"\0", b"")
    crc = 0
    size = len(data)
    length = bytearray()
    while size:
        length.append(size & 0xFF)
        size >>= 8
    for byte in data + length:
        crc ^= byte << 24
        for _ in range(8):
            crc = (crc << 1) ^ (0x04C11DB7 if crc & 0x80000000 else 0)
        crc &= 0xFFFFFFFF
    assert cksum(line) == f"{crc ^ 0xFFFFFFFF}-{len(data)}"


@pytest.mark.spec("S68")
def test_the_hash_is_what_the_cksum_command_says() -> None:
    command = require_tool("cksum", "coreutils")
    for line in (b"", LINE[:-1], b"\xff" * 1000, "é☃\r".encode()):
        done = subprocess.run([command], input=line, capture_output=True, check=True)
        crc, size = done.stdout.split()[:2]
        assert cksum(line) == f"{crc.decode()}-{size.decode()}"


class Expected(NamedTuple):
    """What a look at an inbox must find."""

    offset: int
    cut_back: bool
    total: int
    lines: list[bytes]


def expected(data: bytes | None, text: str) -> Expected:
    """The table of cursor forms, by splitting the whole file."""
    whole = (data or b"").split(b"\n")[:-1]
    total = len(whole)
    offset, note = 0, False
    text = text.rstrip("\n")
    word, _, hash_ = text.partition(" ")
    if word and set(word) <= set("0123456789"):
        count = int(word)
        if count > total:
            if count == total + 1 and hash_:
                offset, note = total, True
        elif count > 0 and hash_ and hash_ != cksum(whole[count - 1]):
            offset, note = count - 1, True
        else:
            offset = count
    elif message.is_stamp(text):
        for line in whole:
            value = message.parse(line)
            ts = value.get("ts") if value is not None else None
            if isinstance(ts, str) and ts > text:
                break
            offset += 1
    return Expected(offset, note, total, whole[offset:])


def found(seen: Look) -> Expected:
    return Expected(seen.offset, seen.cut_back, seen.total, seen.lines)


STAMPS = [f"2026-05-29T18:00:0{n}Z" for n in range(5)]
lines = st.lists(
    st.one_of(
        st.sampled_from([b"", b"x", b"xx", b"x" * 20, b"\0", b"[]"]),
        st.sampled_from(STAMPS).map(lambda ts: f'{{"ts":"{ts}"}}'.encode()),
        st.sampled_from([b'{"ts":5}', b'{"ts":null}', b'{"ts":"zzz"}']),
    ),
    max_size=12,
)


@st.composite
def inboxes(draw: st.DrawFn) -> tuple[bytes, str]:
    """An inbox's bytes and a cursor's text, which is often nearly right."""
    drawn = draw(lines)
    data = b"".join(line + b"\n" for line in drawn) + draw(st.sampled_from([b"", b"t", b"torn" * 5, b"\0\0"]))
    count = draw(st.integers(0, len(drawn) + 2))
    right = cksum(drawn[count - 1]) if 0 < count <= len(drawn) else cksum(b"x")
    text = draw(
        st.sampled_from(
            [
                *(f"{count}", f"{count} {right}", f"{count} 1-1", f"{count} ", f"{count}  {right}"),
                *(f"00{count} {right}\n", f"{count}\t{right}", f" {count}", f"+{count}"),
                *("9" * 30, "9" * 30 + f" {right}", "", "oops", "~", "0", f"0 {right}"),
                *(*STAMPS, STAMPS[0] + " ", "2026-13-45T99:99:99Z"),
            ]
        )
    )
    return data, text


@pytest.mark.spec("S55", "S68", "S69", "S70", "S71")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=inboxes(), block=st.integers(1, 9))
def test_a_look_finds_what_splitting_the_whole_file_finds(case: tuple[bytes, str], block: int, tmp_path: Path) -> None:
    data, text = case
    path = tmp_path / "b.jsonl"
    path.write_bytes(data)
    with mock.patch.object(inbox, "SCAN_BLOCK_BYTES", block):
        seen = look(str(path), Cursor.parse(text))
    assert found(seen) == expected(data, text)
    whole = data.split(b"\n")[:-1]
    if whole:
        assert seen.last == whole[-1]
        assert data[seen.last_start : seen.end] == whole[-1] + b"\n"
    assert seen.end == data.rfind(b"\n") + 1


@pytest.mark.spec("S70")
@pytest.mark.parametrize("text", ["", "0", "1", "1 ", "1 2-3", "2 2-3", STAMPS[0], "oops"])
def test_an_absent_inbox_has_no_lines(text: str, tmp_path: Path) -> None:
    assert found(look(str(tmp_path / "none"), Cursor.parse(text))) == expected(None, text)


def test_an_inbox_that_cannot_be_read_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not a regular file"):
        look(str(tmp_path), Cursor.parse("1"))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        look(str(tmp_path / "fifo"), Cursor.parse("1"))


def spans(data: bytes) -> list[tuple[int, int]]:
    """Where each whole line begins, and the byte after its newline."""
    ends = [at + 1 for at, byte in enumerate(data) if byte == 0x0A]
    return list(zip([0, *ends], ends, strict=False))


KINDS = ["right", "stale inode", "wrong hash", "beyond", "replaced", "shifted", "garbage"]


@pytest.mark.spec("S68", "S69", "S70", "S71")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drawn=st.lists(st.sampled_from([b"", b"x", b"xx", b"y" * 20]), min_size=1, max_size=9),
    torn=st.sampled_from([b"", b"x"]),
    at=st.integers(0, 8),
    further=st.integers(-1, 4),
    hashed=st.sampled_from(["right", "wrong", "none"]),
    block=st.integers(1, 9),
    shift=st.sampled_from([-3, -1, 1, 2, 40]),
)
def test_a_hint_never_changes_what_a_look_finds(
    kind: str,
    drawn: list[bytes],
    torn: bytes,
    at: int,
    further: int,
    hashed: str,
    block: int,
    shift: int,
    tmp_path: Path,
) -> None:
    data = b"".join(line + b"\n" for line in drawn) + torn
    path = tmp_path / "b.jsonl"
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    number = at % len(drawn) + 1
    start, end = spans(data)[number - 1]
    hint = Hint(path.stat().st_ino, number, start, end, cksum(drawn[number - 1]))
    count = max(0, number + (-1 if kind == "beyond" else further))
    right = cksum(drawn[count - 1]) if 0 < count <= len(drawn) else "1-1"
    text = {"right": f"{count} {right}", "wrong": f"{count} 2-2", "none": str(count)}[hashed]
    if kind == "stale inode":
        hint.inode += 1
    elif kind == "wrong hash":
        hint.hash = "1-1"
    elif kind == "replaced":
        path.rename(tmp_path / "old")
        data = b"new\n" + data
        path.write_bytes(data)
    elif kind == "shifted":
        hint.start, hint.end = start + shift, end + shift
        # Its place is another line's; were that one the same byte for byte, no look at it could tell the two apart.
        assume(data[hint.start : hint.end] != data[start:end])
    elif kind == "garbage":
        hint.start, hint.end, hint.count = -shift, shift * 1000, 10**17
    with mock.patch.object(inbox, "SCAN_BLOCK_BYTES", block):
        assert found(look(str(path), Cursor.parse(text), hint)) == expected(data, text)


@pytest.mark.parametrize(
    ("inode", "place", "hash_"),
    [
        *((1, (9, 12), "xx"), (0, (9, 12), "y"), (0, (10, 12), "x")),
        *((0, (9, 11), "x"), (0, (8, 12), "xx"), (0, (9, 15), "xx")),
    ],
)
def test_a_wrong_hint_is_not_used_even_where_all_lines_are_alike(
    inode: int, place: tuple[int, int], hash_: str, tmp_path: Path
) -> None:
    path = tmp_path / "b.jsonl"
    path.write_bytes(b"xx\n" * 6)
    text = f"3 {cksum(b'xx')}"
    hint = Hint(path.stat().st_ino + inode, 2, *place, cksum(hash_.encode()))
    assert found(look(str(path), Cursor.parse(text), hint)) == expected(b"xx\n" * 6, text)


@pytest.mark.parametrize("end", [len(LINE) + 1, 10**17, 10**30])
def test_a_hint_with_a_huge_place_is_a_wrong_hint(end: int, world: World, box: Inbox) -> None:
    box.append(LINE, 0)
    Path(world.folder.state).mkdir()
    Path(offset_hint.path_of(world.folder, "b")).write_text(f"{path_of(box).stat().st_ino} 1 0 {end} 1-1")
    hint = offset_hint.read(world.folder, "b")
    text = f"1 {cksum(LINE[:-1])}"
    assert found(look(str(path_of(box)), Cursor.parse(text), hint)) == expected(LINE, text)


def test_a_right_hint_spares_the_count_from_the_start(box: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"".join(f"line {number}\n".encode() for number in range(1000))
    path_of(box).write_bytes(data + b"new\n")
    start, end = spans(data)[-1]
    hint = Hint(path_of(box).stat().st_ino, 1000, start, end, cksum(data[start : end - 1]))
    read: list[int] = []
    real = os.pread

    def pread(fd: int, size: int, at: int) -> bytes:
        read.append(at)
        return real(fd, size, at)

    monkeypatch.setattr(os, "pread", pread)
    seen = look(str(path_of(box)), Cursor.parse(f"1000 {hint.hash}"), hint)
    assert (seen.lines, seen.total) == ([b"new"], 1001)
    assert min(read) >= start - 1


def test_a_hint_is_kept_beside_the_other_scratch_and_read_back(world: World) -> None:
    world.folder.ensure()
    assert offset_hint.read(world.folder, "b") is None
    offset_hint.write(world.folder, "b", Hint(7, 3, 10, 20, "1-2"))
    kept = offset_hint.read(world.folder, "b")
    assert kept is not None
    assert (kept.inode, kept.count, kept.start, kept.end, kept.hash) == (7, 3, 10, 20, "1-2")
    assert offset_hint.path_of(world.folder, "b") == f"{world.folder.state}/sotbus-offset-b"


@pytest.mark.parametrize("text", ["", "1 2 3 4", "a b c d e", "1 2 3", "\xff 1 2 3 x", "1.5 1 2 3 x"])
def test_a_malformed_hint_is_none(text: str, world: World) -> None:
    Path(world.folder.state).mkdir(parents=True)
    Path(offset_hint.path_of(world.folder, "b")).write_bytes(text.encode("latin-1"))
    assert offset_hint.read(world.folder, "b") is None


def test_a_hint_that_cannot_be_written_is_no_error(world: World) -> None:
    world.folder.ensure()
    Path(world.folder.state).write_text("a file")
    offset_hint.write(world.folder, "b", Hint(1, 1, 0, 1, "1-1"))
    assert offset_hint.read(world.folder, "b") is None


# ---- the cursor file


@pytest.mark.spec("S68")
def test_a_cursor_is_written_as_count_and_hash_without_a_newline(world: World) -> None:
    world.folder.ensure()
    path = world.folder.cursor("b")
    cursor.write(path, cursor.written_form(3, b"a"))
    assert Path(path).read_bytes() == b"3 1220704766-1"
    cursor.write(path, cursor.written_form(0, b""))
    assert Path(path).read_bytes() == b"0"
    assert os.listdir(os.path.dirname(path)) == ["b.cursor"]


@pytest.mark.parametrize("call", ["write", "rename"])
def test_a_cursor_that_cannot_be_written_stands(call: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.folder.ensure()
    path = world.folder.cursor("b")
    cursor.write(path, b"3 1-1")
    monkeypatch.setattr(os, call, refuse(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        cursor.write(path, b"4 1-1")
    assert Path(path).read_bytes() == b"3 1-1"
    assert os.listdir(os.path.dirname(path)) == ["b.cursor"]


def test_an_absent_or_unreadable_cursor_is_0(world: World) -> None:
    world.folder.ensure()
    assert cursor.read(world.folder.cursor("b")).count is None
    Path(world.folder.cursor("b")).mkdir()
    assert cursor.read(world.folder.cursor("b")).count is None
