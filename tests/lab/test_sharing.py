"""Two boxes that share a home send into one inbox and read it: nothing is lost, torn, shown twice or seen late."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from lab import in_box_sharing
from lab.in_box_sharing import Scenario, Seen, ask, on_server, session, tell, three
from lab.job import Job
from lab.lab import Lab

pytestmark = pytest.mark.lab

WRITERS, SENDS = 4, 500
"""Writers on each box, and how many lines each files."""

ALTERNATIONS = 100
"""How often the next line must be the other box's, for the test of the traffic to prove anything; usual are 1,000."""

MUTANT_WRITERS, MUTANT_SENDS = 2, 60
"""Enough: a mutant spoils a quarter of the lines, or more."""

CURSOR_MOVES = 150


def start_senders(lab: Lab, shared: str, writers: int, sends: int, mutant: str = "") -> dict[str, Job]:
    """Senders a0, b0, a1, ... on their boxes, ready and then let go together."""
    jobs = {
        f"{box}{number}": lab.box(box).start(
            in_box_sharing.send_many, shared=shared, name=f"{box}{number}", to="reader", count=sends, mutant=mutant
        )
        for number in range(writers)
        for box in ("a", "b")
    }
    for job in jobs.values():
        assert job.note() == "ready"
    for job in jobs.values():
        job.send("go\n")
    return jobs


def check(lab: Lab, shared: str, senders: dict[str, int], *shown: str) -> dict[str, Any]:
    """What is wrong with the reader's inbox, and with what was shown of it, as the server's disk has them."""
    shown_files = [on_server(f"{shared}/shown-{name}") for name in shown]
    path = on_server(f"{shared}/comm/inbox/reader.jsonl")
    found = lab.server.call(in_box_sharing.check_inbox, path=path, to="reader", senders=senders, shown=shown_files)
    assert isinstance(found, dict)
    return found


def alternations(order: str) -> int:
    return sum(one != other for one, other in itertools.pairwise(order))


def test_every_line_of_two_boxes_is_filed_and_shown_once_whole_and_in_order(lab: Lab, shared: str) -> None:
    a, b = lab.box("a"), lab.box("b")
    poller = a.start(in_box_sharing.poll_until_told, shared=shared, name="reader")
    assert poller.note() == "ready"
    follower = b.start(in_box_sharing.follow_until_told, shared=shared, name="watcher", of="reader")
    assert follower.note() == "ready"

    begun = time.monotonic()
    senders = start_senders(lab, shared, WRITERS, SENDS)
    sent = {name: job.result(timeout_s=300) for name, job in senders.items()}
    took_s = time.monotonic() - begun
    read = []
    for reader in (poller, follower):
        reader.send("the last read\n")
        read.append(reader.result())

    assert not [fault for one in sent.values() for fault in one["faults"]]
    found = check(lab, shared, dict.fromkeys(senders, SENDS), "reader", "watcher")
    assert not found["faults"]
    order, all_ran = found["order"], found["order"][: len(found["order"]) // 2]
    longest_run = max(len(list(run)) for _, run in itertools.groupby(order))
    print(
        f"\n{len(order)} lines in {took_s:.1f} s, {len(order) / took_s:.0f}/s; box a's share of the first half "
        f"{all_ran.count('a') / len(all_ran):.0%}; {alternations(order)} alternations, longest run {longest_run} lines"
    )
    for box in ("a", "b"):
        own = [one for name, one in sent.items() if name.startswith(box)]
        print(
            f"box {box}: longest wait for one line {max(one['longest_s'] for one in own):.2f} s, "
            f"{sum(one['held'] for one in own)} sends answered that the lock was held"
        )
    print(f"poller on a {read[0]}, follower on b {read[1]}")
    assert alternations(order) >= ALTERNATIONS
    assert all(one["with_news"] > 10 for one in read), "the readers read nothing while the writers wrote"


@pytest.mark.parametrize("mutant", ["open_before_lock", "no_inbox_lock"])
def test_a_mutant_of_the_append_loses_or_tears_lines(lab: Lab, shared: str, mutant: str) -> None:
    reader = session(lab.box("a"), shared, "reader")
    ask(reader, "join")
    senders = start_senders(lab, shared, MUTANT_WRITERS, MUTANT_SENDS, mutant)
    faults = [fault for job in senders.values() for fault in job.result()["faults"]]
    faults += check(lab, shared, dict.fromkeys(senders, MUTANT_SENDS))["faults"]
    print(f"\n{mutant}: {len(faults)} faults told, the first: {faults[:1]}")
    assert faults


def seen_of_a_new_inbox(lab: Lab, shared: str) -> Seen:
    """B counts the mail of an inbox that is not there; A makes it and sends there."""
    a, b, mutant = three(lab, shared, "new")
    ask(b, "join")
    assert ask(b, "unread", "new") == [0, 0]
    ask(a, "join")
    sender = session(lab.box("a"), shared, "sender")
    ask(sender, "join")
    ask(sender, "send", "new", "hello")
    return ask(mutant, "unread", "new"), ask(b, "unread", "new"), [1, 1]


def seen_of_a_new_record(lab: Lab, shared: str) -> Seen:
    """B asks for the record of the lock manager where there is none; A's first send makes it."""
    a, b, mutant = three(lab, shared, "sender")
    ask(a, "join")
    assert ask(b, "record") is None
    ask(a, "send", "sender", "a note to myself")
    return ask(mutant, "record"), ask(b, "record"), "nfs4 10.99.0.1:/"


def seen_of_a_moved_cursor(lab: Lab, shared: str) -> Seen:
    """B counts A's mail by its cursor, which somebody on B keeps open; A polls."""
    a, b, mutant = three(lab, shared, "reader")
    ask(a, "join")
    ask(b, "join")
    ask(b, "send", "reader", "one")
    assert ask(a, "poll", "reader") == ["one"]
    ask(b, "send", "reader", "two")
    assert ask(b, "unread", "reader") == [2, 1]
    ask(b, "keep_open", "read/reader.cursor")
    assert ask(a, "poll", "reader") == ["two"]
    return ask(mutant, "unread", "reader"), ask(b, "unread", "reader"), [2, 0]


@pytest.mark.parametrize("scenario", [seen_of_a_new_inbox, seen_of_a_new_record, seen_of_a_moved_cursor])
def test_what_one_box_has_just_made_the_other_sees_at_once(lab: Lab, shared: str, scenario: Scenario) -> None:
    by_the_mutant, by_b, expected = scenario(lab, shared)
    assert by_the_mutant != expected, "it would have been seen without opening the folder first, too"
    assert by_b == expected


def test_a_cursor_that_moves_is_never_read_as_none(lab: Lab, shared: str) -> None:
    a, b = lab.box("a"), lab.box("b")
    path = f"{shared}/reader.cursor"
    writer = a.start(in_box_sharing.move_cursor, path=path, count=CURSOR_MOVES)
    assert writer.note() == "ready"
    readers = {box.name: box.start(in_box_sharing.read_cursor_until_told, path=path) for box in (a, b)}
    for reader in readers.values():
        assert reader.note() == "ready"
    writer.send("go\n")
    writer.result()
    for reader in readers.values():
        reader.send("enough\n")
    read = {name: reader.result() for name, reader in readers.items()}
    print(f"\n{CURSOR_MOVES} moves, read {read}")
    assert not [back for one in read.values() for back in one["back"]]
    assert all(one["last"] > 1 for one in read.values()), "the readers read nothing while the cursor moved"


def test_the_inbox_lock_of_a_killed_holder_is_free_at_once(lab: Lab, shared: str) -> None:
    a = session(lab.box("a"), shared, "killed")
    b = session(lab.box("b"), shared, "b0", SOT_INBOX_LOCK_WAIT_SECS="30")
    reader = session(lab.box("b"), shared, "reader")
    for one in (reader, a, b):
        ask(one, "join")
    assert tell(a, "send_half", "reader", "never whole").note() == "half"
    sending = tell(b, "send", "reader", in_box_sharing.text_of("b0", 0))
    time.sleep(0.5)
    assert len(sending.notes) == 2, "it was filed while the other box held the lock"

    killed = time.monotonic()
    a.kill()
    said = sending.note()
    took_s = time.monotonic() - killed
    print(f"\nfiled {took_s:.3f} s after the kill")
    assert "answer" in said, said
    assert took_s < lab.lease_s, "it was freed when a lease ended"
    assert "of an unterminated line a dead writer left" in said["printed"]
    assert not check(lab, shared, {"b0": 1})["faults"]
