"""Mail between a hub, boxes linked to it and guests of its folder, by the command line: each answer is the page's."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from netns.boxes import Box, Boxes

pytestmark = pytest.mark.lab

SESSIONS = {"hub": "h1", "lin": "l1", "lab": "l2", "gst": "g1", "gue": "g2"}
"""Which session each box has: the hub, two linked boxes, two guests of the hub's folder."""

GUESTS = {"gst", "gue"}
IN_HUBS_FOLDER = {"hub", "gst", "gue"}

OFFER_S = 3.0
"""How long each linked box has for an offer: the lock wait of 2 s, and 1 s (sot-comm v1, The wire)."""

PATIENT_LINKS = "dead_after_s = 30.0\n"
"""A node that is stopped for a while keeps its links, so that it is asked and does not answer."""

TRIES = 3
"""Of what must be quick: a machine may stand still for seconds now and then."""

SLACK_S = 4.0
"""What three commands that start at one time may add on a busy machine."""

UNKNOWN_HINT = "hint: the outcome is unknown: the daemon may have done it all the same\n"

Done = tuple[int, str, str]
"""Exit status, standard output, standard error."""


@pytest.fixture(scope="module")
def boxes(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxes]:
    base = tmp_path_factory.mktemp("mail")
    with Boxes(base, linked=("lin", "lab"), guests=("gst", "gue"), settings=PATIENT_LINKS) as boxes:
        for name, handle in SESSIONS.items():
            boxes[name].join(handle)
        yield boxes


@pytest.fixture(autouse=True)
def linked(boxes: Boxes) -> None:
    """Each test begins with every link up."""
    boxes.wait_until_linked()


def send(box: Box, to: str, text: str = "hello") -> Done:
    """A send of the box's session."""
    done: subprocess.CompletedProcess[str] = box.sotbus(SESSIONS[box.name], "send", f"@{to}", text)
    return done.returncode, done.stdout, done.stderr


def file(box: Box, to: str) -> float:
    """A send that must be filed; how long it took, in seconds."""
    began = time.monotonic()
    assert send(box, to) == (0, f"filed -> @{to}\n", "")
    return time.monotonic() - began


def send_at_once(boxes: Boxes, to: dict[str, str]) -> tuple[dict[str, Done], float]:
    """A send of each of these boxes at one time; what each answered, and how long they took together, in seconds."""
    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        done = dict(zip(to, pool.map(lambda name: send(boxes[name], to[name]), to), strict=True))
    return done, time.monotonic() - began


@contextmanager
def stopped(box: Box) -> Iterator[None]:
    """The box's node does not run for a while (SIGSTOP)."""
    box.signal_node(signal.SIGSTOP)
    try:
        yield
    finally:
        box.signal_node(signal.SIGCONT)


@contextmanager
def ended(box: Box) -> Iterator[None]:
    """The box has no node for a while."""
    box.end_node()
    try:
        yield
    finally:
        box.start_node()


def stale(box: Box, handle: str) -> None:
    """List a handle whose session is gone and was last seen long ago."""
    path = box.comm / "registry.json"
    document = json.loads(path.read_text())
    document["agents"][handle] = {"host": box.name, "last_seen": "2020-01-01T00:00:00Z", "status": "idle"}
    fresh = path.with_name("registry.json.test")
    fresh.write_text(json.dumps(document))
    fresh.replace(path)


@pytest.mark.parametrize("name", SESSIONS)
def test_mail_of_a_box_reaches_every_session(boxes: Boxes, name: str) -> None:
    """Two spaces are before the answer where the session appended the line itself, ``daemon`` where a node did."""
    sender = SESSIONS[name]
    reached = IN_HUBS_FOLDER if name == "hub" else {name} - GUESTS
    for other, handle in SESSIONS.items():
        answer = f"  filed -> @{handle}\n" if other in reached else f"filed -> @{handle}\n"
        assert send(boxes[name], handle, f"to {handle}") == (0, answer, "")
    for other, handle in SESSIONS.items():
        lines = boxes[other].did(handle, "poll").splitlines()
        repo = sender if other in reached else "daemon"
        assert [line.partition("] ")[2] for line in lines] == [f"[{sender}:{repo}] to {handle}"]


def test_a_guest_hands_everything_to_its_hub(boxes: Boxes) -> None:
    guest, hub = boxes["gst"], boxes["hub"]
    before, asked = guest.status()["filings"], hub.status()["inbound"]["requests"]
    assert send(guest, "g2") == (0, "filed -> @g2\n", "")
    after = guest.status()["filings"]
    assert after.get("filed elsewhere", 0) == before.get("filed elsewhere", 0) + 1
    assert after.get("filed", 0) == 0
    assert hub.status()["inbound"]["requests"] == asked + 1


@pytest.mark.parametrize("name", SESSIONS)
def test_a_handle_that_nobody_knows(boxes: Boxes, name: str) -> None:
    failed = "FAILED -> @nosuch: no box knows that handle: nosuch\n"
    assert send(boxes[name], "nosuch") == (1, "", failed)


def test_a_box_that_lists_the_handle_but_refuses(boxes: Boxes) -> None:
    stale(boxes["lab"], "gone")
    failed = "FAILED -> @gone: no live session holds @gone\n"
    for name in ("hub", "lin", "gst"):
        assert send(boxes[name], "gone") == (1, "", failed)
    assert boxes["lab"].lines("gone") == []


def test_a_box_that_does_not_answer(boxes: Boxes) -> None:
    """Its silence is told within the bound, and only where no other box files or refuses."""
    stale(boxes["lin"], "left")
    said = "root.lab did not answer: root.lab did not answer within 3s; the outcome is unknown"
    silent = {
        "hub": (1, "", f"FAILED -> @l2: {said}\n{UNKNOWN_HINT}"),
        "lin": (1, "", f"FAILED -> @l2: {said}\n{UNKNOWN_HINT}"),
        "gst": (1, "", f"FAILED -> @nosuch: {said}\n{UNKNOWN_HINT}"),
    }
    with stopped(boxes["lab"]):
        filed_after_s = [file(boxes["gst"], "l1") for _ in range(TRIES)]
        for _ in range(TRIES):  # a sender that has not heard within 5 s says so itself, in its own words
            answers, took_s = send_at_once(boxes, {"hub": "l2", "lin": "l2", "gst": "nosuch"})
            assert took_s >= OFFER_S
            if answers == silent and took_s < OFFER_S + SLACK_S:
                break
        refused = send(boxes["gue"], "left")
    assert answers == silent
    assert took_s < OFFER_S + SLACK_S
    assert min(filed_after_s) < OFFER_S
    assert refused == (1, "", "FAILED -> @left: no live session holds @left\n")


def test_a_box_that_should_hold_a_link_and_holds_none(boxes: Boxes) -> None:
    failed = "FAILED -> @l2: no box knows that handle: l2 (no link is up to root.lab)\n"
    with ended(boxes["lab"]):
        answers, _ = send_at_once(boxes, {"hub": "l2", "lin": "l2", "gst": "l2"})
    assert answers == dict.fromkeys(answers, (1, "", failed))


def test_without_the_hub_linked_boxes_file_their_own_and_guests_nothing(boxes: Boxes) -> None:
    with ended(boxes["hub"]):
        assert send(boxes["lin"], "l1") == (0, "  filed -> @l1\n", "")
        for name in ("lin", "gst"):
            status, out, err = send(boxes[name], "h1")
            assert (status, out) == (1, "")
            assert err.startswith("FAILED -> @h1: the hub did not answer at root.hub: ")
            assert "unknown" not in err
