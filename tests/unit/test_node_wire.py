"""The page's wire as a node speaks it, to clients that send the page's own bytes (facts 11)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_world import FILE, HELLO, NodeProcess, NodeWorld, Wire, nodes, request, until

from sotbus.comm.processes import start_ticks

__all__ = ["nodes"]

MIB = 1 << 20
SENT = {"from": "projA-vm", "to": "far", "repo": "daemon", "msg": "/slash msg"}
LATER = {"from": "a", "to": "far", "text": "later"}


@pytest.fixture
def node(nodes: NodeWorld) -> NodeProcess:
    """A node of a folder with two sessions."""
    return served(nodes, "15")


def served(nodes: NodeWorld, inbox_lock_wait_s: str) -> NodeProcess:
    """A node of a folder with two sessions; it waits for a box's answer 1 s longer than for an inbox's lock."""
    nodes.join("a", "far")
    return nodes.serve(env={"SOT_INBOX_LOCK_WAIT_SECS": inbox_lock_wait_s})


@pytest.fixture
def session() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is ended, as a session's does."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def filed(nodes: NodeWorld, handle: str = "far") -> list[dict[str, Any]]:
    """A mailbox's lines without their times."""
    return [{name: value for name, value in line.items() if name != "ts"} for line in nodes.lines(handle)]


# ---- hello


@pytest.mark.spec("S54", "S84", "S85", "S88")
@pytest.mark.parametrize("size", [0, 1, 7], ids=["back to back", "a byte at a time", "seven at a time"])
def test_the_pages_bytes_file_a_message(nodes: NodeWorld, node: NodeProcess, size: int) -> None:
    both = HELLO + FILE
    with nodes.wire() as wire:
        for at in range(0, len(both), size or len(both)):
            wire.say(both[at : at + (size or len(both))])
        greeting, answer = wire.hear(), wire.hear()
    assert greeting is not None
    assert answer == {"v": 1, "id": 1, "kind": "res", "op": "comm.file", "payload": {"ok": True}}
    assert {name: greeting[name] for name in ("v", "id", "kind", "op")} == {
        "v": 1,
        "id": 0,
        "kind": "res",
        "op": "hello",
    }
    said = greeting["payload"]
    assert (said["session_id"], said["host"], said["protocol"], said["revision"]) == ("sotbus-vm", "vm", 3, 0)
    assert said["snapshot_pending"] is False
    assert filed(nodes) == [SENT]
    line = nodes.inbox("far").read_bytes()
    assert line.startswith(b'{"from":"projA-vm","to":"far","repo":"daemon","msg":"/slash msg","ts":"')


@pytest.mark.spec("S84")
@pytest.mark.parametrize(
    ("first", "code"),
    [
        (HELLO.replace(b'"protocol":3', b'"protocol":2'), "protocol_mismatch"),
        (HELLO.replace(b'"protocol":3,', b""), "protocol_mismatch"),
        (b"", "hello_required"),
    ],
    ids=["another protocol", "no protocol", "no hello"],
)
def test_a_refused_hello_is_the_answer(nodes: NodeWorld, node: NodeProcess, first: bytes, code: str) -> None:
    with nodes.wire() as wire:
        wire.say(first + FILE)
        refused = wire.hear()
        assert refused is not None
        assert refused["payload"]["code"] == code
        assert refused["payload"]["error"]
        assert wire.hear() is None
    assert nodes.lines("far") == []


# ---- comm.file


@pytest.mark.spec("S88")
def test_the_answer_names_what_was_wrong(nodes: NodeWorld, node: NodeProcess) -> None:
    nodes.amend("gone", host="vm", last_seen="2020-01-01T00:00:00Z")
    with nodes.wire() as wire:
        wire.greet()

        def ask(**more: object) -> tuple[str, str]:
            answer = wire.ask("comm.file", {"from": "a", "to": "far", "text": "t"} | more)
            return answer["code"], answer["error"]

        assert ask(to="nobody") == ("not_here", "no box knows that handle: nobody")
        assert ask(to="gone") == ("no_live_session", "no live session holds @gone")
        assert ask(to="../x") == ("bad_handle", 'not a handle: "../x"')
        assert ask(to=7) == ("bad_handle", 'not a handle: "7"')
        for wrong in ({"text": 7}, {"from": None}, {"broadcast": 1}, {"forwarded": "no"}, {"sotbus": {"id": ""}}):
            assert ask(**wrong)[0] == "bad_request", wrong
        assert ask(sotbus={"id": "x" * 201})[0] == "bad_request"
        record = Path(nodes.folder.manager_record)
        record.rename(record.with_name("away"))
        record.mkdir()
        time.sleep(0.3)  # what the node saw before holds for less
        assert ask()[0] == "file_failed"
        assert wire.ask("agent.join", {"workspace_id": "", "handle": "far"})["code"] == "file_failed"
        record.rmdir()
        record.with_name("away").rename(record)
        assert wire.ask("comm.file", LATER) == {"ok": True}
    assert [line["msg"] for line in nodes.lines("far")] == ["later"]
    counts = nodes.state()["filings"]
    assert (counts["not_here"], counts["no_live_session"], counts["filed"]) == (1, 1, 1)


def test_a_copy_of_a_broadcast_names_no_recipient(nodes: NodeWorld, node: NodeProcess) -> None:
    with nodes.wire() as wire:
        copy = {"from": "a", "to": "far", "text": "all", "broadcast": True}
        assert wire.greet().ask("comm.file", copy) == {"ok": True}
    assert filed(nodes) == [{"from": "a", "to": "", "repo": "daemon", "msg": "all"}]


def test_requests_of_one_connection_are_each_answered_by_their_number(nodes: NodeWorld, node: NodeProcess) -> None:
    count = 50
    with nodes.wire() as wire:
        wire.greet()
        wire.say(b"".join(request(n, "comm.file", LATER | {"text": f"m{n}"}) for n in range(1, count + 1)))
        answers = [wire.hear() for _ in range(count)]
    assert sorted(answer["id"] for answer in answers if answer) == list(range(1, count + 1))
    assert all(answer and answer["payload"] == {"ok": True} for answer in answers)
    assert sorted(line["msg"] for line in nodes.lines("far")) == sorted(f"m{n}" for n in range(1, count + 1))


# ---- boxes that dialled in for offers


class Box:
    """Another release's box, linked over the socket; it answers an offer as a test says, or not (None)."""

    def __init__(self, nodes: NodeWorld, name: str) -> None:
        self.name = name
        self.wire = nodes.wire()
        self.wire.say(HELLO.replace(b'"role":"cli"', b'"role":"link"').replace(b"projA-vm", name.encode()))
        heard = self.wire.hear()
        assert heard is not None
        assert "error" not in heard["payload"]

    def answer(self, payload: dict[str, Any] | None) -> Any:
        """Take the next offer, answer it, and return what was offered."""
        offer = self.wire.hear()
        assert offer is not None
        assert (offer["kind"], offer["op"]) == ("req", "comm.file")
        if payload is not None:
            answer = {"v": 1, "id": offer["id"], "kind": "res", "op": "comm.file", "payload": payload}
            self.wire.say(json.dumps(answer).encode() + b"\n")
        return offer["payload"]


NOT_HERE = {"error": "no box knows that handle: x", "code": "not_here"}
DEAD = {"error": "no live session holds @x", "code": "no_live_session"}
OK = {"ok": True}


@pytest.mark.spec("S86", "S87")
@pytest.mark.parametrize(
    ("one", "two", "code"),
    [
        (NOT_HERE, OK, ""),
        (DEAD, OK, ""),
        (None, OK, ""),
        (NOT_HERE, DEAD, "no_live_session"),
        (None, DEAD, "no_live_session"),
        (None, NOT_HERE, "file_failed"),
        (NOT_HERE, NOT_HERE, "not_here"),
    ],
)
def test_a_handle_that_the_folder_does_not_list_is_offered_to_every_box(
    nodes: NodeWorld, one: dict[str, Any] | None, two: dict[str, Any] | None, code: str
) -> None:
    decided = None not in (one, two) or two == OK
    served(nodes, "15" if decided else "1")
    boxes = [Box(nodes, "sotd-one"), Box(nodes, "sotd-two")]
    with nodes.wire() as wire:
        wire.greet()
        began = time.monotonic()
        wire.say(request(5, "comm.file", {"from": "a", "to": "x", "text": "t"}))
        offered = [box.answer(payload) for box, payload in zip(boxes, (one, two), strict=True)]
        heard = wire.hear()
        took_s = time.monotonic() - began
    assert offered == [{"from": "a", "to": "x", "text": "t", "broadcast": False, "forwarded": True}] * 2
    assert heard is not None
    assert heard["payload"].get("code", "") == code
    assert ("ok" in heard["payload"]) == (not code)
    if decided:
        assert took_s < 10, "an answer that decides is not held up"
    else:
        assert 1.8 < took_s < 15, "a box that is silent has the lock wait plus 1 s"
    if code == "file_failed":
        assert "sotd-one did not answer" in heard["payload"]["error"]
        assert heard["payload"]["outcome_unknown"] is True
    for box in boxes:
        box.wire.__exit__()
    with nodes.wire() as wire:  # they are gone, and asked no more
        assert until(lambda: nodes.state()["clients"] == 1)
        assert wire.greet().ask("comm.file", {"from": "a", "to": "x", "text": "t"})["code"] == "not_here"


def test_an_offer_does_not_go_back_to_the_box_that_asks(nodes: NodeWorld, node: NodeProcess) -> None:
    box = Box(nodes, "sotd-one")
    assert box.wire.ask("comm.file", {"from": "a", "to": "x", "text": "t"}, 9)["code"] == "not_here"
    box.wire.__exit__()


def test_a_box_that_goes_away_in_the_middle_of_an_offer_is_one_that_did_not_answer(
    nodes: NodeWorld, node: NodeProcess
) -> None:
    box = Box(nodes, "sotd-one")
    with nodes.wire() as wire:
        wire.greet().say(request(5, "comm.file", {"from": "a", "to": "x", "text": "t"}))
        box.answer(None)
        box.wire.__exit__()
        began = time.monotonic()
        heard = wire.hear()
    assert heard is not None
    assert heard["payload"]["code"] == "file_failed"
    assert "went away" in heard["payload"]["error"]
    assert time.monotonic() - began < 10, "its end is noticed at once"


# ---- the other ops


@pytest.mark.spec("S89")
def test_an_op_that_the_node_does_not_know_is_answered_as_such(nodes: NodeWorld, node: NodeProcess) -> None:
    with nodes.wire() as wire:
        wire.greet()
        for op in ("x", "comm.unread", ""):
            assert wire.ask(op, {}) == {"error": f"unknown op: {op}", "code": "unknown_op"}
        assert wire.ask("comm.file", LATER) == {"ok": True}
    assert nodes.state()["requests"]["unknown"] == 3


@pytest.mark.spec("S90", "S91")
def test_a_row_declares_its_handle_and_the_empty_row_asks_who_holds_it(
    nodes: NodeWorld, node: NodeProcess, session: subprocess.Popen[bytes]
) -> None:
    with nodes.wire() as wire:
        wire.greet()

        def join(workspace_id: object, handle: object) -> str:
            answer = wire.ask("agent.join", {"workspace_id": workspace_id, "handle": handle})
            return "ok" if answer == {"ok": True} else str(answer["code"])

        given = wire.ask("sotbus.row", {"pid": session.pid, "start": int(start_ticks(session.pid) or 0)})
        row = given["workspace_id"]
        assert row.startswith("ws-")
        assert join("", "mine") == "ok"
        assert join(row, "mine") == "ok"
        assert join("", "mine") == "held_by_row"
        assert join(row, "other") == "ok"  # a row's handle is the last that it declared
        assert (join("", "mine"), join("", "other")) == ("ok", "held_by_row")
        assert join("ws-none", "mine") == "unknown_workspace"
        assert join("", "far") == "ok"  # held, and by no row
        assert (join(row, "a/b"), join("", "-")) == ("bad_handle", "bad_handle")
        assert (join(7, "mine"), join(row, None)) == ("bad_request", "bad_request")
        again = wire.ask("sotbus.row", {"pid": session.pid, "start": int(start_ticks(session.pid) or 0)})
        assert again["workspace_id"] == row
        session.kill()
        session.wait()
        assert join("", "other") == "ok", "a row ends with its process"
        assert join(row, "other") == "unknown_workspace"
        for wrong in ({"pid": os.getpid(), "start": 1}, {"pid": "1", "start": 1}, {"pid": True, "start": 1}, {}):
            assert wire.ask("sotbus.row", wrong)["code"] == "bad_request", wrong


@pytest.mark.spec("S19", "S90", "S91")
def test_a_row_of_a_0_6_6_session_is_stamped_and_known_by_the_node_that_starts_next(
    nodes: NodeWorld, node: NodeProcess, session: subprocess.Popen[bytes]
) -> None:
    """Its entry has no pid and no start: what the node was told by ``agent.join`` is all that says who it is."""
    with nodes.wire() as wire:
        wire.greet()
        row = wire.ask("sotbus.row", {"pid": session.pid, "start": int(start_ticks(session.pid) or 0)})["workspace_id"]
        nodes.amend("old", host="vm", workspace_id=row, last_seen="2020-01-01T00:00:00Z")
        assert wire.ask("agent.join", {"workspace_id": row, "handle": "old"}) == {"ok": True}
    node.tell(9)
    node.wait()
    nodes.amend("old", last_seen="2020-01-01T00:00:00Z")
    nodes.serve()
    until(lambda: nodes.registry()["agents"]["old"]["last_seen"] != "2020-01-01T00:00:00Z")
    with nodes.wire() as wire:
        wire.greet()
        assert wire.ask("agent.join", {"workspace_id": "", "handle": "old"})["code"] == "held_by_row"
        assert wire.ask("agent.join", {"workspace_id": row, "handle": "old"}) == {"ok": True}
    until(lambda: "old" in nodes.state()["rows"])


def test_a_box_that_dialled_in_over_the_socket_is_shown_among_the_links(nodes: NodeWorld, node: NodeProcess) -> None:
    assert nodes.state()["links"] == []
    with nodes.wire() as plain:
        plain.greet()
        box = Box(nodes, "sotd-one")
        (link,) = nodes.state()["links"]
        assert link.pop("up_s") >= 0
        assert link == {
            "node": "sotd-one",
            "role": "link",
            "way": "dials in over the socket",
            "address": "",
            "up": True,
            "why": "",
            "round_trip_s": None,
            "asked_per_s": 0.0,
            "taken_per_s": 0.0,
        }
        until(lambda: nodes.state()["links"][0]["up_s"] > 0.1)
        shown = nodes.command("node")
        assert "sotd-one (link, dials in): up for " in shown.stdout, shown.stderr
        box.wire.__exit__()
        until(lambda: nodes.state()["links"] == [])


@pytest.mark.spec("S92", "S93")
def test_a_notification_is_taken_and_one_for_a_handle_is_refused(nodes: NodeWorld, node: NodeProcess) -> None:
    with nodes.wire() as wire:
        wire.greet()
        assert wire.ask("agent.send", {"text": "done"}) == {"ok": True}
        for to in ({"to": "far"}, {"handle": "far"}, {"target": "@far"}, {"mailbox": "far"}):
            answer = wire.ask("agent.send", {"text": "done"} | to)
            assert answer["code"] == "mail_requires_comm_file"
    assert nodes.lines("far") == []
    assert nodes.state()["notices"] == 1
    (notice,) = until(lambda: node.events("notice"))
    assert notice["client"] == "projA-vm"
    assert "done" not in node.text()


# ---- what breaks the framing


@pytest.mark.parametrize(
    "bad",
    [
        b"x" * (MIB + 2),
        b"no json\n",
        b"[]\n",
        b'{"v":1,"id":"1","kind":"req","op":"x","payload":{}}\n',
        b'{"v":1,"id":1,"kind":"req","op":"x","payload":{"blob":{"len":-1}}}\n',
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
    ],
    ids=["over-long", "no JSON", "no object", "no number", "blob", "no UTF-8", "deep"],
)
def test_a_bad_frame_ends_its_connection_and_nobody_elses(nodes: NodeWorld, node: NodeProcess, bad: bytes) -> None:
    with nodes.wire() as other, nodes.wire() as wire:
        other.greet()
        wire.greet().say(request(3, "comm.file", LATER))
        try:
            wire.say(bad)
        except (BrokenPipeError, ConnectionResetError):
            pass
        heard = [wire.hear() for _ in range(2)]
        assert wire.hear() is None
        kinds = {frame["kind"]: frame["payload"] for frame in heard if frame}
        assert kinds["res"] == {"ok": True}, "what came whole before it is answered"
        assert kinds["evt"]["code"] == "bad_frame"
        assert kinds["evt"]["error"]
        assert other.ask("comm.file", LATER) == {"ok": True}
        assert other.ask("sotbus.status", {})["status"]["malformed"] == 1
    assert len(nodes.lines("far")) == 2


def test_a_frame_of_one_mib_is_one(nodes: NodeWorld, node: NodeProcess) -> None:
    with nodes.wire() as wire:
        empty = len(request(1, "nothing", {"x": ""})) - 1
        assert wire.greet().ask("nothing", {"x": "y" * (MIB - empty)})["code"] == "unknown_op"


def test_raw_bytes_after_a_frame_are_passed_over(nodes: NodeWorld, node: NodeProcess) -> None:
    with nodes.wire() as wire:
        wire.greet().say(request(1, "x", {"blob": {"len": 5}}) + b"\n{}\n\n" + request(2, "comm.file", LATER))
        heard = [wire.hear(), wire.hear()]
    assert {frame["id"]: frame["payload"].get("code") for frame in heard if frame} == {1: "unknown_op", 2: None}


def test_a_client_that_goes_before_its_answer_leaves_its_message_filed(nodes: NodeWorld, node: NodeProcess) -> None:
    with nodes.wire() as wire:
        wire.say(HELLO + FILE)
    until(lambda: len(nodes.lines("far")) == 1)
    assert filed(nodes) == [SENT]
    assert node.process.poll() is None


def test_a_client_that_never_reads_holds_up_nobody(nodes: NodeWorld, node: NodeProcess) -> None:
    with Wire(str(nodes.socket)) as deaf, nodes.wire() as other:
        deaf.greet()
        deaf.sock.settimeout(0.5)
        flood = request(1, "y" * 50, {}) * 1000
        sent = 0
        try:
            while sent < 1000:
                deaf.sock.sendall(flood)
                sent += 1
        except TimeoutError:
            pass
        assert sent < 1000, "the node stops reading it: no more than some requests are worked on"
        assert other.greet().ask("comm.file", LATER) == {"ok": True}
