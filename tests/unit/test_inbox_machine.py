"""An inbox under all that happens to it: nothing is lost, the order is kept, nothing counts that must not."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from world import MACHINE, World

from sotbus import message
from sotbus.comm import offset_hint
from sotbus.comm.cursor import cksum
from sotbus.comm.inbox import Inbox
from sotbus.comm.lock_manager import FlockManager
from sotbus.comm.reading import advance, look_at, unread
from sotbus.errors import FilingFailed

GARBAGE = (b"", b"not json", b"[1]", b'"text"', b'{"a":1} {"b":2}', b'{"msg":"\xff"}', b"\0")
NOT_COUNTED = ("broadcast", "elsewhere", "own", "no to")


class Line:
    """One line of the model: its bytes (without the newline), and whether it is mail that a reader must count."""

    def __init__(self, data: bytes, counted: bool) -> None:
        self.data = data
        self.counted = counted


class InboxMachine(RuleBasedStateMachine):
    """One writer, one reader, and what others do to their files. The model is a list of lines and a position in it."""

    @initialize(scan_block=st.sampled_from([1 << 20, 7, 64]))
    def begin(self, scan_block: int) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="inbox-machine-"))
        self.world = World(self.base)
        self.world.folder.ensure()
        self.client = self.world.client("b")
        self.inbox = Inbox(self.world.folder, "b", FlockManager(f"local {MACHINE}"))
        self.path = Path(self.world.folder.inbox("b"))
        self.cursor = Path(self.world.folder.cursor("b"))
        self.patches = [
            mock.patch("sotbus.comm.inbox.SCAN_BLOCK_BYTES", scan_block),
            mock.patch.object(offset_hint, "WORTH_BYTES", 0),
        ]
        for patch in self.patches:
            patch.start()
        self.lines: list[Line] = []
        self.torn = b""
        self.position = 0
        """How many lines the reader has been shown, or will not be shown any more."""
        self.ahead = False
        """The reader counted one line more, which was cut back."""
        self.unsaid = False
        """The cut back has not been told yet."""
        self.number = 0
        self.filed: list[bytes] = []
        self.shown: list[bytes] = []
        self.failed: set[bytes] = set()

    def teardown(self) -> None:
        if not hasattr(self, "base"):
            return
        try:
            self.poll()
            assert set(self.filed) <= set(self.shown)
            first = {line: at for at, line in reversed(list(enumerate(self.shown)))}
            places = [first[line] for line in self.filed]
            assert places == sorted(places)
            assert set(self.shown) - set(self.filed) <= self.failed | set(GARBAGE)
        finally:
            for patch in self.patches:
                patch.stop()
            shutil.rmtree(self.base)

    def next_line(self, kind: str, size: int) -> Line:
        """A line that no other is equal to, stamped a second after the one before it."""
        self.number += 1
        ts = message.stamp(1_780_000_000 + self.number)
        sender, to = ("b" if kind == "own" else "a"), {"broadcast": "", "elsewhere": "c"}.get(kind, "b")
        data = message.encode(sender, to, "r", f"{self.number} " + "☃" * size, ts)[:-1]
        if kind == "no to":
            value = json.loads(data)
            del value["to"]
            data = json.dumps(value).encode()
        return Line(data, kind == "mail")

    @rule(kind=st.sampled_from(["mail", "mail", *NOT_COUNTED]), size=st.sampled_from([0, 1, 3000]))
    def append(self, kind: str, size: int) -> None:
        line = self.next_line(kind, size)
        cuts: list[int] = []
        self.inbox.on_cut = cuts.append
        self.inbox.append(line.data + b"\n", 1)
        assert cuts == ([len(self.torn)] if self.torn else [])
        self.torn = b""
        self._filed(line)
        self.filed.append(line.data)

    @rule(data=st.sampled_from(GARBAGE))
    def another_program_writes_garbage(self, data: bytes) -> None:
        self.inbox.append(data + b"\n", 1)
        self.torn = b""
        self._filed(Line(data, counted=False))

    def _filed(self, line: Line) -> None:
        self.lines.append(line)
        if self.ahead:  # it stands where the line was that the reader counted, and is none the reader was shown
            self.ahead = False
            self.unsaid = True

    @rule(data=st.sampled_from([b'{"from":"a","to":"b","msg":"ha', b"\0" * 5000, b"x" * 4096, b"\0"]))
    def a_writer_dies(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)
        self.torn += data

    @rule(reader_is_quick=st.booleans(), size=st.sampled_from([0, 2000]))
    def an_append_fails(self, reader_is_quick: bool, size: int) -> None:
        """The line stands for a moment, in which a reader without the lock may count it."""
        line = self.next_line("mail", size)
        self.failed.add(line.data)

        def fdatasync(fd: int) -> None:
            if reader_is_quick:
                self._poll_without_lock(line)
            raise OSError(errno.EIO, "Input/output error")

        with mock.patch.object(os, "fdatasync", fdatasync), pytest.raises(FilingFailed) as caught:
            self.inbox.append(line.data + b"\n", 1)
        assert not caught.value.outcome_unknown
        self.torn = b""

    def _poll_without_lock(self, line: Line) -> None:
        self.torn = b""
        self._filed(line)
        with mock.patch("sotbus.comm.reading.reads_under_lock", return_value=None):
            self.poll()
        self.lines.pop()
        self.position -= 1
        self.ahead = True

    @rule()
    def poll(self) -> None:
        self.world.notes.clear()
        told: list[str] = []
        seen = look_at(self.client, "b", told.append)
        if self.ahead:
            assert (seen.offset, seen.lines, seen.cut_back) == (len(self.lines), [], True)
        else:
            assert seen.offset == self.position
            assert seen.lines == [line.data for line in self.lines[self.position :]]
            assert seen.cut_back is self.unsaid
            assert unread(seen, "b") == sum(line.counted for line in self.lines[self.position :])
        assert seen.total == len(self.lines)
        assert told == []
        assert len(self.world.notes) == seen.cut_back
        self.shown += seen.lines
        before = self.cursor.read_bytes() if self.cursor.exists() else None
        advance(self.client, "b", seen)
        if seen.lines:
            last = self.lines[-1].data
            assert self.cursor.read_bytes() == f"{len(self.lines)} {cksum(last)}".encode()
            self.position = len(self.lines)
            self.unsaid = False
        else:
            assert before == (self.cursor.read_bytes() if self.cursor.exists() else None)

    @rule()
    def a_poll_dies_after_its_look(self) -> None:
        seen = look_at(self.client, "b", self.world.notes.append)
        assert seen.total == len(self.lines)

    @precondition(lambda self: not self.ahead and not self.unsaid)
    @rule(
        form=st.sampled_from(["bare", "empty hash", "zeros", "hashed", "stamp", "0", "garbage", "past the end", "none"])
    )
    def an_old_client_writes_the_cursor(self, form: str) -> None:
        """A client of another version says where this reader is, as well as its form can, or spoils the file."""
        at = self.position
        last = self.lines[at - 1].data if at else b""
        text = {
            "bare": f"{at}",
            "empty hash": f"{at} ",
            "zeros": f"000{at}",
            "hashed": f"{at} {cksum(last)}\n",
            "0": "0",
            "garbage": "oops",
            "past the end": f"{10**9} {cksum(last)}",
        }.get(form)
        if form in ("0", "garbage", "past the end", "none"):
            self.position = 0
        if form == "stamp":
            value = message.parse(last)
            if value is None or "ts" not in value:
                return
            text = str(value["ts"])
            while self.position < len(self.lines) and message.parse(self.lines[self.position].data) is None:
                self.shown.append(self.lines[self.position].data)
                self.position += 1  # what is no mail does not end the lines that were stamped earlier
        if text is None:
            self.cursor.unlink(missing_ok=True)
        else:
            self.cursor.write_text(text)

    @precondition(lambda self: not self.ahead and not self.unsaid)
    @rule()
    def prune(self) -> None:
        """Each shown line but the last becomes a bare newline, in a file of its own that is renamed into place."""
        for line in self.lines[: max(0, self.position - 1)]:
            line.data, line.counted = b"", False
        temp = self.path.with_suffix(".new")
        temp.write_bytes(b"".join(line.data + b"\n" for line in self.lines) + self.torn)
        temp.rename(self.path)

    @invariant()
    def the_file_is_the_model(self) -> None:
        if hasattr(self, "base") and self.path.exists():
            assert self.path.read_bytes() == b"".join(line.data + b"\n" for line in self.lines) + self.torn


@pytest.mark.spec("S51", "S52", "S53", "S55", "S57", "S68", "S69", "S70", "S71", "S72")
def test_nothing_is_lost_nor_changes_its_order_nor_counts_that_must_not() -> None:
    bounds = settings(max_examples=40, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(InboxMachine, settings=bounds)
