"""``sotbus log``: an inbox's history from its end, the cursor untouched, and no more read than is shown."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import World

from sotbus import message
from sotbus.comm import cursor, history, offset_hint, reading
from sotbus.comm.history import open_history
from sotbus.comm.inbox import look

STAMP = "2026-01-01T00:00:00Z"


def line(text: str, to: str = "a-vm", sender: str = "z-vm") -> bytes:
    return message.encode(sender, to, "z", text, STAMP)


@pytest.fixture
def inbox(world: World) -> Path:
    """The inbox of @a-vm, who has joined."""
    assert world.sotbus("a", "join").returncode == 0
    return world.inbox("a-vm")


def files(world: World) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(world.home.rglob("*")) if path.is_file()}


def shown(*texts: str, mark: str = " ") -> str:
    return "".join(f"{mark} [{STAMP}] [z-vm:z] {text}\n" for text in texts)


def test_the_last_twenty_messages_are_shown_newest_last_and_nothing_is_written(world: World, inbox: Path) -> None:
    inbox.write_bytes(b"".join(line(f"m{n}") for n in range(30)))
    assert world.sotbus("a", "poll").returncode == 0
    before = files(world)
    done = world.sotbus("a", "log")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == shown(*(f"m{n}" for n in range(10, 30)))
    assert world.sotbus("a", "log", "-n", "2").stdout == shown("m28", "m29")
    assert world.sotbus("a", "log", "--all").stdout == shown(*(f"m{n}" for n in range(30)))
    assert world.sotbus("a", "log", "-n", "100").stdout == shown(*(f"m{n}" for n in range(30)))
    assert files(world) == before


def test_unread_mail_and_what_is_merely_new_are_marked_apart(world: World, inbox: Path) -> None:
    inbox.write_bytes(line("old"))
    assert world.sotbus("a", "poll").returncode == 0
    with open(inbox, "ab") as file:
        file.write(
            line("mail") + line("broadcast", to="") + line("mine", sender="a-vm") + b"\nno json\n" + line("more")
        )
    expected = shown("old") + shown("mail", mark="*") + shown("broadcast", mark="+")
    expected += f"+ [{STAMP}] [a-vm:z] mine\n" + shown("more", mark="*")
    assert world.sotbus("a", "log").stdout == expected
    assert world.sotbus("a", "log", "--all").stdout == expected
    assert world.sotbus("a", "unread").stdout.split()[1] == str(expected.count("*"))


def test_json_carries_the_stored_object_beside_the_marks(world: World, inbox: Path) -> None:
    inbox.write_bytes(line("read"))
    assert world.sotbus("a", "poll").returncode == 0
    odd = b'{"from": "z-vm", "to":"a-vm","later":[1.50],"msg":"nul \0 and \xc2\x9b","ts":"x"}'
    with open(inbox, "ab") as file:
        file.write(odd + b"\n" + line("broadcast", to=""))
    first, second, third = (json.loads(one) for one in world.sotbus("a", "log", "--json").stdout.splitlines())
    assert (first["unread"], first["new"], first["message"]) == (False, False, json.loads(line("read")))
    assert (second["unread"], second["new"]) == (False, True)  # a line with a NUL is shown and never counted
    assert second["message"] == {"from": "z-vm", "to": "a-vm", "later": [1.5], "msg": "nul  and \x9b", "ts": "x"}
    assert (third["unread"], third["new"], third["message"]["msg"]) == (False, True, "broadcast")


def test_control_characters_are_made_visible_unless_raw(world: World, inbox: Path) -> None:
    inbox.write_bytes(line("\x1b[31mred\nnext"))
    assert world.sotbus("a", "log").stdout == f"* [{STAMP}] [z-vm:z] \\x1b[31mred\nnext\n"
    assert world.sotbus("a", "log", "--raw").stdout == f"* [{STAMP}] [z-vm:z] \x1b[31mred\nnext\n"


def test_another_handles_history_is_read_by_its_own_cursor(world: World, inbox: Path) -> None:
    inbox.write_bytes(line("one"))
    assert world.sotbus("a", "poll").returncode == 0
    with open(inbox, "ab") as file:
        file.write(line("two"))
    done = world.sotbus("b", "log", "@a-vm")  # which has not even joined
    assert (done.returncode, done.stdout) == (0, shown("one") + shown("two", mark="*"))


def test_what_is_not_there_is_said(world: World, inbox: Path) -> None:
    done = world.sotbus("a", "log")
    assert (done.returncode, done.stdout) == (0, "No messages.\n")
    assert world.sotbus("a", "log", "--json").stdout == ""
    done = world.sotbus("a", "log", "@nosuch")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "no such handle: nosuch\nhint: sotbus list\n")
    done = world.sotbus("b", "log")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Not joined")
    for words in (["-n", "0"], ["-n", "x"], ["-n", "3", "--all"], ["--raw", "--json"]):
        assert world.sotbus("a", "log", *words).returncode == 2


def test_a_torn_tail_is_not_a_message(world: World, inbox: Path) -> None:
    inbox.write_bytes(line("whole") + line("torn")[:-1])
    assert world.sotbus("a", "log").stdout == shown("whole", mark="*")


def test_an_inbox_that_is_being_written_is_exit_75(world: World, inbox: Path) -> None:
    inbox.write_bytes(line("one"))
    with open(world.folder.inbox_lock("a-vm"), "w+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = world.sotbus("a", "log", env={"SOT_INBOX_READ_WAIT_SECS": "0"})
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr.startswith("the inbox for @a-vm is being written")


def test_the_end_of_a_large_inbox_costs_no_more_than_that_of_a_small_one(
    world: World, inbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(inbox, "wb") as file:
        file.write(line("x" * 2000) * 10_000)
    client = world.client("a")
    reading.advance(client, "a-vm", reading.look_at(client, "a-vm", world.notes.append))
    with open(inbox, "ab") as file:
        file.write(line("new"))
    pread, sizes = os.pread, []

    def counted(fd: int, size: int, at: int) -> bytes:
        data = pread(fd, size, at)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    found = open_history(client, "a-vm")
    assert found is not None
    with found:
        marks = [
            start >= found.new_from for start, _ in (next(last) for last in [found.backwards()] for _ in range(21))
        ]
    assert marks == [True] + [False] * 20
    assert sum(sizes) < 300_000 < 20_000_000 < inbox.stat().st_size


# What the functions below `log` do, for any bytes at all

PIECES = st.sampled_from([b"", b"x", b"yy" * 9, b"\0", line("m")[:-1], b"\r"])
INBOXES = st.builds(
    lambda lines, tail: b"".join(one + b"\n" for one in lines) + tail, st.lists(PIECES, max_size=12), PIECES
)
CURSORS = st.one_of(
    st.integers(0, 14).map(str),
    st.tuples(st.integers(0, 14), st.sampled_from([b"", b"x", b"yy" * 9, line("m")[:-1]])).map(
        lambda pair: cursor.written_form(*pair).decode()
    ),
    st.sampled_from(["", "oops", STAMP, "2025-01-01T00:00:00Z", "99999999999999999999", "2 "]),
)


@settings(deadline=None, max_examples=400)
@given(data=INBOXES, text=CURSORS, block=st.sampled_from([1, 3, 64]), hinted=st.integers(0, 12))
def test_the_history_is_what_a_poll_would_see(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, text: str, block: int, hinted: int
) -> None:
    world = World(tmp_path_factory.mktemp("log"))
    client = world.client("a")
    client.ensure()
    world.inbox("a-vm").write_bytes(data)
    Path(world.folder.cursor("a-vm")).write_text(text)
    lines = data.split(b"\n")[:-1]
    if 0 < hinted <= len(lines):
        start = sum(len(one) + 1 for one in lines[: hinted - 1])
        inode, last = world.inbox("a-vm").stat().st_ino, lines[hinted - 1]
        hint = offset_hint.Hint(inode, hinted, start, start + len(last) + 1, cursor.cksum(last))
        offset_hint.write(world.folder, "a-vm", hint)
    seen = look(str(world.inbox("a-vm")), cursor.Cursor.parse(text))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "FORWARD_BLOCK_BYTES", block)
        patch.setattr(history, "BACKWARD_BLOCK_BYTES", block)
        found = open_history(client, "a-vm")
        assert found is not None
        with found:
            backwards = list(found.backwards())[::-1]
            assert [one for _, one in backwards] == list(found.forwards(0, found.end)) == lines
            assert [start for start, _ in backwards] == [
                sum(len(one) + 1 for one in lines[:n]) for n in range(len(lines))
            ]
            assert list(found.forwards(found.new_from, found.end)) == seen.lines
            assert len(list(found.forwards(0, found.new_from))) == seen.offset
