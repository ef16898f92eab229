"""The commands as a person meets them: real processes, their words, streams and exit statuses."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from world import ENTRY, World

from sotbus.cli import send
from sotbus.cli.completion import OPTIONS
from sotbus.cli.main import COMM_COMMANDS, COMMANDS
from sotbus.comm.sending import Outbox
from sotbus.errors import FilingFailed

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
TEXTS = [
    "plain",
    "two\nlines",
    "\n",
    "line\u2028paragraph\u2029next\u0085vt\x0bff\x0ccrlf\r\nend",
    "nul\0inside",
    "family 👩‍👩‍👧‍👦 and ☃",
    ' "quotes" \\backslash\\ ',
    "-x --broadcast @b",
    "\t\ufeffbom",
]


@pytest.fixture
def two(world: World) -> World:
    """Two sessions, @a-vm and @b-vm, each in a project of its own."""
    assert world.sotbus("a", "join").returncode == 0
    assert world.sotbus("b", "join").returncode == 0
    return world


def files(world: World) -> dict[str, bytes]:
    """Every file of the comm folder and its bytes."""
    return {str(path): path.read_bytes() for path in sorted(world.home.rglob("*")) if path.is_file()}


@pytest.mark.spec("S50", "S51", "S94", "S95")
def test_a_send_prints_one_indented_line_and_files_the_pages_line(two: World) -> None:
    done = two.sotbus("a", "send", "@b-vm", "hello", "there")
    assert (done.returncode, done.stdout, done.stderr) == (0, "  filed -> @b-vm\n", "")
    line = two.inbox("b-vm").read_bytes()
    pattern = rb'\{"from":"a-vm","to":"b-vm","repo":"a","msg":"hello there","ts":"' + STAMP.encode() + rb'"\}\n'
    assert re.fullmatch(pattern, line)


@pytest.mark.spec("S49", "S50")
@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_a_text_comes_back_byte_for_byte(two: World, text: str) -> None:
    assert two.sotbus("a", "send", "@b-vm", "-", stdin=text.encode()).returncode == 0
    assert two.inbox("b-vm").read_bytes().count(b"\n") == 1
    done = two.sotbus("b", "poll", "--json")
    assert json.loads(done.stdout)["msg"] == text


@pytest.mark.spec("S96", "S98")
@pytest.mark.parametrize(
    ("words", "stdin", "said"),
    [
        (["@b-vm", "-"], b"", "FAILED -> @b-vm: the text is empty; nothing was sent"),
        (["@b-vm", ""], b"", "FAILED -> @b-vm: the text is empty; nothing was sent"),
        (["@b-vm", "-"], b"bad \xff", "FAILED -> @b-vm: standard input is not UTF-8 at byte 5; nothing was sent"),
        (["@nosuch", "x"], b"", "FAILED -> @nosuch: no box knows that handle: nosuch"),
        (["@nosuch@n1", "x"], b"", 'FAILED -> @nosuch@n1: not a handle: "nosuch@n1"'),
        (["@", "x"], b"", 'FAILED -> @: not a handle: ""'),
        (["@a@n1@n2", "x"], b"", 'FAILED -> @a@n1@n2: not a handle: "a@n1@n2"'),
        (["@a ", "x"], b"", 'FAILED -> @a : not a handle: "a "'),
        (["@../../etc/x", "x"], b"", 'FAILED -> @../../etc/x: not a handle: "../../etc/x"'),
        (["nosuch", "x"], b"", "no target; use @name or --broadcast"),
        (["a@nonode", "x"], b"", "no target; use @name or --broadcast"),
        (["@b-vm"], b"", "usage: sotbus send @handle TEXT ..."),
        ([], b"", "usage: sotbus send @handle TEXT ..."),
        (["--broadcast"], b"", "usage: sotbus send @handle TEXT ..."),
    ],
)
def test_a_refused_send_is_exit_1_and_makes_no_file(two: World, words: list[str], stdin: bytes, said: str) -> None:
    before = files(two)
    done = two.sotbus("a", "send", *words, stdin=stdin)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[0] == said
    after = files(two)
    for path in (str(two.folder.registry),):  # only the sender's last_seen may move
        before.pop(path), after.pop(path)
    assert after == before


def test_a_text_over_the_limit_is_refused_with_both_numbers_and_one_at_the_limit_is_filed(two: World) -> None:
    limit = 256 * 1024
    done = two.sotbus("a", "send", "@b-vm", "-", stdin=b"x" * (limit + 1))
    assert done.returncode == 1
    assert str(limit + 1) in done.stderr
    assert str(limit) in done.stderr
    assert two.inbox("b-vm").read_bytes() == b""
    assert two.sotbus("a", "send", "@b-vm", "-", stdin=b"x" * limit).returncode == 0


def test_the_limit_comes_from_the_config(two: World, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[message]\nmax_bytes = 5\n")
    done = two.sotbus("a", "send", "@b-vm", "123456", env={"SOTBUS_CONFIG": str(config)})
    assert done.stderr == "FAILED -> @b-vm: too_large: the text has 6 bytes and the limit is 5; nothing was sent\n"


def test_an_argument_that_is_no_unicode_is_refused(two: World) -> None:
    done = two.sotbus("a", "send", "@b-vm", os.fsdecode(b"\xff"))
    assert done.returncode == 1
    assert "not valid Unicode at character 1" in done.stderr


@pytest.mark.parametrize("words", [["-x", "--broadcast", "@b-vm"], ["--", "@b-vm", "-h"]])
def test_everything_after_the_target_is_text(two: World, words: list[str]) -> None:
    assert two.sotbus("a", "send", "@b-vm", *words).returncode == 0
    line = json.loads(two.inbox("b-vm").read_bytes())
    assert line["msg"] == " ".join(word for word in words if word != "--")


@pytest.mark.spec("S18", "S19")
def test_a_stale_handle_is_told_at_once_and_one_just_under_600_s_is_live(two: World) -> None:
    registry = json.loads(Path(two.folder.registry).read_text())
    registry["agents"]["b-vm"]["last_seen"] = "2026-01-01T00:00:00Z"
    Path(two.folder.registry).write_text(json.dumps(registry))
    done = two.sotbus("a", "send", "@b-vm", "hello")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "FAILED -> @b-vm: no live session holds @b-vm"
    assert two.inbox("b-vm").read_bytes() == b""
    assert two.sotbus("b", "poll").returncode == 0  # a command of b's own makes it live again
    assert two.sotbus("a", "send", "@b-vm", "hello").returncode == 0


def test_a_send_of_a_session_that_has_not_joined_says_what_to_do(world: World) -> None:
    done = world.sotbus("a", "send", "@b-vm", "x")
    assert done.returncode == 1
    assert done.stderr == "FAILED -> @b-vm: Not joined — run comm-join.sh first.\nhint: sotbus join\n"


def test_a_send_whose_own_row_is_gone_or_anothers_is_refused_with_the_remedy(two: World) -> None:
    registry = json.loads(Path(two.folder.registry).read_text())
    registry["agents"]["a-vm"]["root"] = "/elsewhere"
    Path(two.folder.registry).write_text(json.dumps(registry))
    done = two.sotbus("a", "send", "@b-vm", "x")
    assert "your sot-comm identity '@a-vm' is registered to a DIFFERENT project's root ('/elsewhere')" in done.stderr
    del registry["agents"]["a-vm"]
    Path(two.folder.registry).write_text(json.dumps(registry))
    done = two.sotbus("a", "send", "@b-vm", "x")
    assert (
        f"your identity @a-vm has no registry row; reclaim it with {two.home}/bin/comm-join.sh --name a-vm"
        in done.stderr
    )


@pytest.mark.spec("S26", "S27")
def test_an_unreadable_registry_fails_each_command_in_its_own_words_and_is_left_as_it_is(two: World) -> None:
    registry = Path(two.folder.registry)
    registry.write_bytes(b"")
    said = {
        ("send", "@b-vm", "x"): "FAILED -> @b-vm: the registry could not be read, so identity @a-vm is unverified; "
        "nothing was sent",
        ("send", "--broadcast", "x"): "FAILED -> --broadcast: the registry could not be read; nothing was sent",
        ("list",): "FAILED: the registry could not be read; nothing was listed",
        ("leave",): "FAILED: the registry could not be read; nothing was removed",
        ("join", "--name", "c"): "FAILED: the registry could not be read or updated, so nothing was written",
    }
    for words, text in said.items():
        done = two.sotbus("a", *words)
        assert (done.returncode, done.stderr.splitlines()[0]) == (1, text)
    assert registry.read_bytes() == b""


@pytest.mark.spec("S28")
def test_a_registry_moved_aside_is_made_anew_and_a_join_takes_the_handle_again(two: World) -> None:
    os.rename(two.folder.registry, two.folder.registry + ".aside")
    assert two.sotbus("b", "list").stdout.splitlines()[1:] == ["  (none)"]
    assert json.loads(Path(two.folder.registry).read_text()) == {"protocol_version": 1, "agents": {}}
    assert "Joined sot-comm as @a-vm" in two.sotbus("a", "join").stdout


@pytest.mark.spec("S52")
def test_a_broadcast_files_a_copy_with_an_empty_to_that_is_shown_and_never_counted(two: World) -> None:
    two.sotbus("c", "join")
    done = two.sotbus("a", "send", "--broadcast", "all", "hands")
    assert done.stdout == "  filed -> @b-vm\n  filed -> @c-vm\nBroadcast to 2 agent(s).\n"
    assert json.loads(two.inbox("b-vm").read_bytes())["to"] == ""
    assert two.sotbus("b", "unread").stdout == "1 0\n"
    assert "all hands" in two.sotbus("b", "poll").stdout


def test_a_broadcast_that_fails_for_one_says_so_and_is_exit_1(two: World) -> None:
    registry = json.loads(Path(two.folder.registry).read_text())
    registry["agents"]["old"] = {"host": "vm", "root": "/x", "last_seen": "2026-01-01T00:00:00Z"}
    registry["agents"]["none"] = {"root": "/x"}
    Path(two.folder.registry).write_text(json.dumps(registry))
    done = two.sotbus("a", "send", "--broadcast", "x")
    assert done.returncode == 1
    assert done.stdout == "  filed -> @b-vm\nBroadcast to 1 of 3 agent(s).\n"
    assert done.stderr == (
        "FAILED -> @old: no live session holds @old\n"
        "hint: @old was last seen at 2026-01-01T00:00:00Z; a session is live for ten minutes after its last command, "
        "and while a node watches it\n"
        "FAILED -> @none: no such handle: none\n"
    )


def test_a_broadcast_says_one_hint_for_all_that_fail_for_one_reason(
    two: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    two.sotbus("c", "join")

    def refuse(outbox: Outbox, to: str, text: str, **how: object) -> bool:
        raise FilingFailed("no room", hint="free \x1b some")

    monkeypatch.setattr(Outbox, "send", refuse)
    assert send._broadcast(Outbox(two.client("a")), "x") == 1
    shown = capfd.readouterr()
    assert shown.err == "FAILED -> @b-vm: no room\nhint: free \\x1b some\nFAILED -> @c-vm: no room\n"
    assert shown.out == "Broadcast to 0 of 2 agent(s).\n"


@pytest.mark.parametrize(
    "words",
    [["--id", "m1", "--broadcast", "x"], ["--broadcast", "--id", "m1", "x"], ["--id", "m1", "--broadcast"]],
)
def test_a_message_id_and_a_broadcast_are_refused_together(two: World, words: list[str]) -> None:
    before = files(two)
    done = two.sotbus("a", "send", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "sotbus send: --id and --broadcast do not go together: an ID is one message's to one handle, and a broadcast "
        "is a copy for each; nothing was sent\n"
        "hint: leave out --id, or send to each handle: sotbus send --id ID @handle TEXT\n"
    )
    assert files(two) == before


def test_an_id_after_the_text_of_a_broadcast_began_is_text(two: World) -> None:
    assert two.sotbus("a", "send", "--broadcast", "see", "--id", "m1").returncode == 0
    assert json.loads(two.inbox("b-vm").read_bytes())["msg"] == "see --id m1"


def test_a_message_id_without_a_node_says_how_to_get_one(two: World) -> None:
    done = two.sotbus("a", "send", "--id", "m1", "@b-vm", "x")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "FAILED -> @b-vm: a message ID needs this box's node\n"
        "hint: start the node with 'sotbus serve' and send again, or leave out --id\n"
    )


def test_a_send_without_a_target_says_what_a_target_is(two: World) -> None:
    said = "send takes @ and a handle, as 'sotbus list' shows them, and no other address"
    for words, hint in {
        ("hi",): f"for the session @hi write @hi; {said}",
        ("a@node", "x"): said,
        ("two words",): said,
        ("-x",): "sotbus send --help",
    }.items():
        assert two.sotbus("a", "send", *words).stderr == f"no target; use @name or --broadcast\nhint: {hint}\n"


@pytest.mark.parametrize("command", ["poll", "unread", "log"])
def test_a_reader_of_an_inbox_that_is_being_written_is_told_to_run_it_again(two: World, command: str) -> None:
    busy = "the inbox for @b-vm is being written — nothing was read; run comm-poll.sh again\n"
    hint = f"hint: run 'sotbus {command}' again\n"
    with open(two.folder.inbox_lock("b-vm"), "w+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = two.sotbus("b", command, env={"SOT_INBOX_READ_WAIT_SECS": "0"})
    wanted = (75, busy, hint) if command == "poll" else (75, "", busy + hint)
    assert (done.returncode, done.stdout, done.stderr) == wanted
    assert hint not in two.sotbus("b", command).stderr


@pytest.mark.spec("S53")
def test_mail_to_oneself_is_filed_and_shown_and_never_counted(two: World) -> None:
    assert two.sotbus("a", "send", "@a-vm", "note").stdout == "  filed -> @a-vm\n"
    assert two.sotbus("a", "unread").stdout == "1 0\n"
    assert "note" in two.sotbus("a", "poll").stdout


def test_a_send_repairs_a_torn_inbox_and_reports_the_cut_once(two: World) -> None:
    two.sotbus("a", "send", "@b-vm", "first")
    with two.inbox("b-vm").open("ab") as file:
        file.write(b'{"id":"x","msg":"ab')
    done = two.sotbus("a", "send", "@b-vm", "second")
    assert done.stdout == "  filed -> @b-vm\n"
    assert done.stderr == "note: cut 19 bytes of an unterminated line a dead writer left in @b-vm's inbox\n"
    assert [json.loads(line)["msg"] for line in two.inbox("b-vm").read_bytes().splitlines()] == ["first", "second"]
    assert two.sotbus("a", "send", "@b-vm", "third").stderr == ""


def test_a_poll_shows_each_message_once_in_order(two: World) -> None:
    for word in ("one", "two"):
        two.sotbus("a", "send", "@b-vm", word)
    done = two.sotbus("b", "poll")
    assert re.fullmatch(rf"\[{STAMP}\] \[a-vm:a\] one\n\[{STAMP}\] \[a-vm:a\] two\n", done.stdout)
    assert two.sotbus("b", "poll").stdout == "No new messages.\n"


@pytest.mark.spec("S72")
def test_a_reader_that_cannot_show_leaves_the_cursor_and_the_next_poll_shows_again(two: World) -> None:
    two.sotbus("a", "send", "@b-vm", "kept")
    with open("/dev/full", "wb") as full:
        died = subprocess.run(
            [sys.executable, str(ENTRY), "poll"],
            cwd=two.project("b"),
            env=two.environ({"SOT_COMM_SELF_FILE": str(two.home / "self" / "pin-b.txt")}),
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert died.returncode == 1
    assert b"No space left on device" in died.stderr
    assert not (two.home / "read" / "b-vm.cursor").exists()
    assert "kept" in two.sotbus("b", "poll").stdout


def test_a_poll_makes_control_characters_visible_and_raw_leaves_them(two: World) -> None:
    two.sotbus("a", "send", "@b-vm", "-", stdin="red \x1b[31m bell\x07 c1\x9b\ttab\nnext".encode())
    cursor = two.home / "read" / "b-vm.cursor"
    assert two.sotbus("b", "poll").stdout.endswith("red \\x1b[31m bell\\x07 c1\\x9b\ttab\nnext\n")
    cursor.unlink()
    assert two.sotbus("b", "poll", "--raw").stdout.endswith("red \x1b[31m bell\x07 c1\x9b\ttab\nnext\n")
    cursor.unlink()
    assert "\\u001b[31m bell\\u0007 c1\\u009b" in two.sotbus("b", "poll", "--json").stdout


def test_what_is_no_message_is_passed_over_and_still_moves_the_cursor(two: World) -> None:
    two.inbox("b-vm").write_bytes(b'\n[]\n"x"\nnot json\n{"msg":"only msg"}\n{"text":{"a":1}}\n{"message":7}\n{}\n')
    done = two.sotbus("b", "poll")
    assert done.stdout == '[] [:] only msg\n[] [:] {\n  "a": 1\n}\n[] [:] 7\n[] [:] \n'
    assert (two.home / "read" / "b-vm.cursor").read_bytes().startswith(b"8 ")


def test_a_poll_without_an_inbox_says_no_messages(two: World) -> None:
    two.inbox("b-vm").unlink()
    done = two.sotbus("b", "poll")
    assert (done.returncode, done.stdout) == (0, "No messages.\n")


def test_a_poll_of_a_session_that_has_not_joined_is_exit_1(world: World) -> None:
    done = world.sotbus("b", "poll")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Not joined — run comm-join.sh first.\n")


@pytest.mark.spec("S102")
def test_unread_prints_total_and_unread_and_moves_nothing(two: World) -> None:
    two.sotbus("a", "send", "@b-vm", "x")
    assert two.sotbus("b", "unread").stdout == "1 1\n"
    assert two.sotbus("a", "unread", "b-vm").stdout == "1 1\n"
    assert json.loads(two.sotbus("b", "unread", "--json").stdout) == {"handle": "b-vm", "total": 1, "unread": 1}
    two.sotbus("b", "poll")
    assert two.sotbus("b", "unread").stdout == "1 0\n"


def test_unread_of_what_is_no_handle_prints_nothing(two: World) -> None:
    done = two.sotbus("b", "unread", "../x")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith('not a handle: "../x"\n')


def test_a_list_shows_who_where_live_or_stale_and_the_work_state(two: World) -> None:
    registry = json.loads(Path(two.folder.registry).read_text())
    registry["agents"]["b-vm"] |= {"state": "working", "summary": "the docs", "status_at": "2026-01-01T00:00:00Z"}
    registry["agents"]["b-vm"] |= {"last_seen": "2026-01-01T00:00:00Z", "expertise": ["rust", "\x1b[2J"]}
    Path(two.folder.registry).write_text(json.dumps(registry))
    lines = two.sotbus("a", "list").stdout.splitlines()
    assert lines[0] == f"sot-comm agents  ({two.folder.registry}):"
    assert re.fullmatch(r"  @a-vm               vm         a              live +\[\]  <- me", lines[1])
    assert re.fullmatch(r"  @b-vm               vm         b              stale \d+s +\[rust/\\x1b\[2J\]", lines[3])
    assert re.fullmatch(r"    \[working\] the docs · \d+d ago", lines[4])
    rows = {row["handle"]: row for row in json.loads(two.sotbus("a", "list", "--json").stdout)}
    assert (rows["a-vm"]["live"], rows["a-vm"]["me"], rows["b-vm"]["live"]) == (True, True, False)


@pytest.mark.spec("S20")
def test_a_stamp_ahead_of_this_clock_is_live_and_marked(two: World) -> None:
    registry = json.loads(Path(two.folder.registry).read_text())
    registry["agents"]["b-vm"]["last_seen"] = "2999-01-01T00:00:00Z"
    Path(two.folder.registry).write_text(json.dumps(registry))
    assert re.search(r"@b-vm .* live ahead \d+s", two.sotbus("a", "list").stdout)
    assert two.sotbus("a", "send", "@b-vm", "x").returncode == 0


def test_hostile_entries_neither_break_the_list_nor_reach_the_terminal(two: World) -> None:
    registry = json.loads(Path(two.folder.registry).read_text())
    hostile = {"host": ["x"], "repo": 7, "root": None, "last_seen": 5, "expertise": "x", "state": {}, "status_at": []}
    registry["agents"] |= {"\x1b]0;title\x07": hostile, "../../x": None, "n": 5, "a\nb": {"host": "\x9b31m"}}
    Path(two.folder.registry).write_text(json.dumps(registry))
    done = two.sotbus("a", "list")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "\x9b" not in done.stdout
    assert len(done.stdout.splitlines()) == 1 + 2 * 6
    assert two.sotbus("a", "list", "--json").returncode == 0


def test_colour_is_for_terminals_and_no_color_is_honoured(two: World) -> None:
    def on_terminal(**extra: str) -> bytes:
        leader, follower = pty.openpty()
        env = two.environ({"SOT_COMM_SELF_FILE": str(two.home / "self" / "pin-a.txt"), "TERM": "xterm", **extra})
        subprocess.run([sys.executable, str(ENTRY), "list"], cwd=two.project("a"), env=env, stdout=follower, check=True)
        os.close(follower)
        shown = b""
        with suppress(OSError):  # EIO ends a terminal whose other side is closed
            while part := os.read(leader, 65536):
                shown += part
        os.close(leader)
        return shown

    assert b"\x1b[32m" in on_terminal()
    assert b"\x1b" not in on_terminal(NO_COLOR="1")
    assert "\x1b" not in two.sotbus("a", "list", env={"TERM": "xterm"}).stdout


def test_whoami_says_handle_folder_and_unread_and_is_exit_1_where_not_joined(two: World) -> None:
    two.sotbus("a", "send", "@b-vm", "x")
    facts = json.loads(two.sotbus("b", "whoami", "--json").stdout)
    assert (facts["handle"], facts["unread"], facts["live"]) == ("b-vm", 1, True)
    assert facts["comm_home"] == str(two.home)
    assert re.search(r"^handle: +b-vm$", two.sotbus("b", "whoami").stdout, re.MULTILINE)
    nobody = two.sotbus("z", "whoami")
    assert nobody.returncode == 1
    assert nobody.stderr.startswith("Not joined")


@pytest.mark.spec("S5")
def test_comm_is_the_same_commands_and_nothing_else(two: World) -> None:
    assert two.sotbus("a", "comm", "send", "@b-vm", "x").stdout == "  filed -> @b-vm\n"
    assert two.sotbus("b", "comm", "unread").stdout == "1 1\n"
    assert two.sotbus("b", "comm", "completion").returncode == 2


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_each_command_has_help_with_examples(world: World, command: str) -> None:
    done = world.run(command, "--help", cwd=world.base)
    assert (done.returncode, done.stderr) == (0, "")
    assert "examples:" in done.stdout
    assert f"sotbus {command}" in done.stdout
    assert not world.home.exists()


def test_an_unknown_command_is_exit_2_and_names_the_nearest(world: World) -> None:
    done = world.run("sned", cwd=world.base)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "sotbus: there is no command 'sned'; did you mean 'send'?\n"


def listed(help_text: str) -> list[str]:
    """The commands that a help text lists."""
    block = help_text.partition("commands:\n")[2].partition("\n\n")[0]
    return [line.split()[0] for line in block.splitlines()]


def test_the_help_of_comm_lists_what_comm_takes_and_the_help_of_all_lists_all(world: World) -> None:
    for words in (["comm", "--help"], ["comm", "help"], ["help", "comm"]):
        done = world.run(*words, cwd=world.base)
        assert (done.returncode, done.stderr) == (0, "")
        assert listed(done.stdout) == list(COMM_COMMANDS)
        assert done.stdout.startswith("usage: sotbus comm ")
    for words in (["--help"], ["help"], ["help", "help"]):
        done = world.run(*words, cwd=world.base)
        assert (done.returncode, done.stderr) == (0, "")
        assert listed(done.stdout) == [*COMMANDS, "comm"]


@pytest.mark.parametrize(
    "words",
    [
        ["help", "send"],
        ["help", "send", "@b-vm", "x"],
        ["help", "comm", "send"],
        ["comm", "help", "send"],
        ["--config", "F", "help", "send"],
        ["help", "--config", "F", "send"],
    ],
)
def test_help_of_a_command_is_its_own_help_and_runs_nothing(two: World, words: list[str]) -> None:
    done = two.sotbus("a", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == two.sotbus("a", "send", "--help").stdout
    assert two.inbox("b-vm").read_bytes() == b""


def test_help_of_no_command_and_a_command_that_comm_has_not_are_exit_2(world: World) -> None:
    for words, said in {
        ("help", "sned"): "sotbus: there is no command 'sned'; did you mean 'send'?\n",
        ("comm", "doctor"): "sotbus comm: there is no command 'doctor'; it is 'sotbus doctor'\n",
        ("comm", "help", "zzz"): "sotbus comm: there is no command 'zzz'; 'sotbus comm --help' lists the commands\n",
    }.items():
        done = world.run(*words, cwd=world.base)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize("given", ["x", "0", "-1", "nan", "inf", ""])
def test_a_wait_of_the_doctor_that_is_no_number_of_seconds_is_said_in_plain_words(world: World, given: str) -> None:
    done = world.run("doctor", "--peer", f"--wait={given}", cwd=world.base)
    assert (done.returncode, done.stdout) == (2, "")
    said = f"sotbus doctor: argument --wait: {given!r} is no number of seconds above 0, such as 60 or 0.5"
    assert done.stderr.splitlines()[-1] == said


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_every_command_and_each_option_exists(world: World, shell: str) -> None:
    script = world.run("completion", shell, cwd=world.base).stdout
    assert set(OPTIONS) == set(COMMANDS)
    for name, words in OPTIONS.items():
        help_text = world.run(name, "--help", cwd=world.base).stdout if shell == "bash" else ""
        assert name in script
        for word in words.split():
            assert shell != "bash" or word in help_text


def test_the_bash_completion_completes_commands_options_and_handles(two: World) -> None:
    script = two.run("completion", "bash", cwd=two.base).stdout
    wrapper = two.base / "sotbus"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} {ENTRY} "$@"\n')
    wrapper.chmod(0o755)

    def complete(*words: str) -> list[str]:
        listed = " ".join(f"'{word}'" for word in words)
        ask = (
            f'{script}\nCOMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _sotbus; printf "%s\\n" "${{COMPREPLY[@]}}"'
        )
        env = two.environ({"PATH": f"{two.base}:{os.environ['PATH']}"})
        done = subprocess.run(["bash", "-c", ask], env=env, capture_output=True, text=True, check=True, cwd=two.base)
        assert done.stderr == ""
        return done.stdout.split()

    assert complete("sotbus", "se") == ["send", "serve"]
    assert complete("sotbus", "join", "--e") == ["--expertise"]
    assert complete("sotbus", "send", "@b") == ["@b-vm"]
    assert complete("sotbus", "comm", "po") == ["poll"]


def test_a_broken_config_is_named_with_table_key_and_what_was_expected(two: World, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    for text, said in {
        "[messages]\n": "1: there is no table or key 'messages' at the top; did you mean 'message'?",
        "[message]\nmax_byte = 5\n": "2: [message] has no key 'max_byte'; did you mean 'max_bytes'?",
        '[message]\nmax_bytes = "5"\n': "2: [message] max_bytes is '5'; expected a whole number of bytes",
        "[message]\nmax_bytes = true\n": "2: [message] max_bytes is True; expected a whole number of bytes",
        "box = 1\n": "1: [box] is a table, not a single value",
        '[box]\nmachine_id = "x"\n': "2: [box] machine_id is 'x'; expected 32 lower-case hex digits",
        '[comm]\nhome = "here"\n': "2: [comm] home is 'here'; expected an absolute path",
        "[message\n": "1: is not TOML: ",
    }.items():
        config.write_text(text)
        done = two.sotbus("a", "list", env={"SOTBUS_CONFIG": str(config)})
        assert done.returncode == 1
        assert done.stderr.startswith(f"{config}:{said}"), done.stderr
    done = two.sotbus("a", "list", env={"SOTBUS_CONFIG": str(tmp_path / "none.toml")})
    assert done.stderr == f"{tmp_path}/none.toml: cannot be read: No such file or directory\n"


def test_a_closed_pipe_ends_a_command_without_a_traceback(two: World) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, str(ENTRY), "list"],
        cwd=two.base,
        env=two.environ(),
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.spec("S94")
def test_a_filed_message_is_exit_0_even_where_nobody_can_read_the_answer(two: World) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, str(ENTRY), "send", "@b-vm", "x"],
        cwd=two.project("a"),
        env=two.environ({"SOT_COMM_SELF_FILE": str(two.home / "self" / "pin-a.txt")}),
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    assert two.inbox("b-vm").read_bytes().count(b"\n") == 1


def test_a_closed_standard_input_is_a_failed_send(two: World) -> None:
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} {ENTRY} send @b-vm - <&-"],
        cwd=two.project("a"),
        env=two.environ({"SOT_COMM_SELF_FILE": str(two.home / "self" / "pin-a.txt")}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "FAILED -> @b-vm: standard input cannot be read (Bad file descriptor); nothing was sent\n"
