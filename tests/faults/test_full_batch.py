"""Batches on a disk that is really full: what is answered, what is on disk then, and that readers skip nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from world import MACHINE, World

from sotbus.comm import cursor
from sotbus.comm.batch import Batch
from sotbus.comm.cursor import Cursor
from sotbus.comm.inbox import Inbox, look
from sotbus.comm.lock_manager import FlockManager
from sotbus.errors import FilingFailed

pytestmark = pytest.mark.faults

LINE_BYTES = 3500
LINES = [b"%d%s\n" % (at, b"x" * (LINE_BYTES - 2)) for at in range(5)]


@pytest.fixture(params=["small_tmpfs", "small_ext4"])
def mount(request: pytest.FixtureRequest) -> Path:
    mount: Path = request.getfixturevalue(request.param)
    return mount


def fill(mount: Path, leave: int) -> None:
    """Fill a file system, and then give so many bytes back."""
    fd = os.open(mount / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for size in (1 << 16, 1 << 12):
            while True:
                try:
                    os.write(fd, bytes(size))
                    os.fsync(fd)  # gives back what was only reserved
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    break
        os.ftruncate(fd, os.fstat(fd).st_size - leave)
        os.fsync(fd)
    finally:
        os.close(fd)


def append(inbox: Inbox, lines: list[bytes]) -> None:
    inbox.append(Batch(lambda _: lines), 0)


@pytest.mark.parametrize("leave", [0, 4096, 8192, 12288])
@pytest.mark.parametrize("before", [b"", b"old\n", b"o" * 4094 + b"\n"], ids=["new", "old", "a full page but a byte"])
def test_a_batch_that_does_not_fit_is_failed_and_leaves_bare_newlines_as_far_as_there_is_room(
    before: bytes, leave: int, mount: Path, tmp_path: Path
) -> None:
    world = World(tmp_path, home=mount / "comm")
    world.folder.ensure()
    inbox = Inbox(world.folder, "b", FlockManager(f"local {MACHINE}"))
    path = Path(inbox.path)
    path.write_bytes(before)
    Path(inbox.lock_path).touch()
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    fill(mount, leave)
    with pytest.raises(FilingFailed) as caught:
        append(inbox, LINES)
    assert (str(caught.value), caught.value.outcome_unknown) == ("the append failed: No space left on device", False)
    left = path.read_bytes()
    blanks = len(left) - len(before)
    assert left == before + b"\n" * blanks
    assert 0 <= blanks <= 4
    seen = look(inbox.path, Cursor.parse(cursor.written_form(before.count(b"\n") + 2, LINES[1][:-1]).decode()))
    (mount / "filler").unlink()
    append(inbox, LINES)
    assert path.read_bytes() == left + b"".join(LINES)
    if blanks >= 2:  # a reader that had counted two of the lines goes on with the ones that were filed
        assert (seen.cut_back, seen.lines) == (True, [b""] * (blanks - 1))
        cursor_text = cursor.written_form(seen.total, seen.last).decode()
        assert look(inbox.path, Cursor.parse(cursor_text)).lines == [line[:-1] for line in LINES]
