"""Nodes on machines of their own: a hub that exports its home, guests that mount it, a linked box with a slow link."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from lab import server
from lab.in_box_bus import NOTE_EVERY
from lab.lab import Lab
from lab.node_box import NodeBox
from netns.sender import FILED, UNKNOWN
from netns.sending import ANSWER_S, SLACK_S, judge, once_and_more, row, table

pytestmark = pytest.mark.lab

EACH = 200
"""Messages of each guest."""

SENDS = 2000
RETRIES = 3
SLOW_MS, JITTER_MS = 150, 100
"""Each way of a link that is slow, and still good: answers come within the bound."""

TOO_SLOW_MS = 6000
"""Each way of a link on which no answer comes within the bound."""


@pytest.fixture
def bus(lab: Lab) -> Iterator[list[NodeBox]]:
    """A list for a test's boxes; their nodes are ended after it."""
    boxes: list[NodeBox] = []
    yield boxes
    for box in boxes:
        box.end()


def start(bus: list[NodeBox]) -> None:
    """The first is the hub; it and each other trust one another."""
    hub, *others = bus
    for other in others:
        hub.trust(other)
        other.trust(hub)
    for box in bus:
        box.start()
    for box in bus:
        box.wait_until_linked()


def orders_of(prefix: str, count: int, to: str) -> list[tuple[str, str]]:
    return [(f"{prefix}-{number:05}", to) for number in range(count)]


def send_again(box: NodeBox, sender: str, answers: Sequence[Mapping[str, Any]]) -> int:
    """Send what was not filed once more, under its message ID, until all is; how many that were at first.

    A link dies of a machine that stands still for a while, so one round more need not do.
    """
    failed = [(one["id"], one["to"]) for one in answers if one["outcome"] != FILED]
    count = len(failed)
    for _ in range(RETRIES):
        if not failed:
            break
        box.wait_until_linked()
        answers = box.send_many(sender, failed).result(300)
        failed = [(one["id"], one["to"]) for one in answers if one["outcome"] != FILED]
    assert not failed, answers
    return count


def test_guests_by_a_real_mount_send_through_their_nodes(lab: Lab, bus: list[NodeBox], shared: str) -> None:
    hub = NodeBox(lab.server, "hub", f"{shared.replace('/nfs', server.EXPORT)}/comm")
    guests = [NodeBox(lab.box(name), "guest", f"{shared}/comm") for name in ("a", "b")]
    bus += [hub, *guests]
    first, second = guests
    hub.join("h")
    first.join("ga")
    second.join("gb")
    refused = first.sotbus("ga", "send", "@h", "no node yet")
    assert refused.returncode == 1
    assert "FAILED -> @h" in refused.stderr
    start(bus)
    record = lab.server.call("open(path).read()", path=f"{hub.comm}/inbox-lock-manager")
    assert record.startswith("local "), record
    for box, sender, to in ((first, "ga", "h"), (first, "ga", "gb"), (hub, "h", "ga"), (second, "gb", "ga")):
        assert box.did(sender, "send", f"@{to}", f"{sender} to {to}").strip() == f"filed -> @{to}"
    assert "ga to gb" in second.did("gb", "poll")
    heard = first.did("ga", "poll")
    assert heard.index("h to ga") < heard.index("gb to ga")

    orders = {"ga": orders_of("from-a", EACH, "h"), "gb": orders_of("from-b", EACH, "h")}
    jobs = [box.send_many(sender, orders[sender]) for box, sender in ((first, "ga"), (second, "gb"))]
    answers = [job.result(300) for job in jobs]
    found = hub.texts("h")
    assert found.pop("ga to h") == 1
    judge([*answers[0], *answers[1]], found)
    send_again(first, "ga", answers[0])
    send_again(second, "gb", answers[1])
    then = hub.texts("h")
    assert then.pop("ga to h") == 1
    assert then == {name: 1 for name, _ in (*orders["ga"], *orders["gb"])}
    assert lab.server.call("open(path).read()", path=f"{hub.comm}/inbox-lock-manager") == record


def test_a_slow_link_and_one_that_is_too_slow(lab: Lab, bus: list[NodeBox], pytestconfig: pytest.Config) -> None:
    hub = NodeBox(lab.server, "hub", f"{lab.new_folder().replace('/nfs', server.EXPORT)}/comm")
    lab.box("a").mount("/own", "own", "tmpfs")
    linked = NodeBox(lab.box("a"), "linked", "/own/comm")
    bus += [hub, linked]
    hub.join("h")
    linked.join("l")
    start(bus)
    sending = linked.send_many("l", orders_of("delay", SENDS, "h"))
    try:
        sending.note()
        lab.delay("a", SLOW_MS, JITTER_MS)
        slow = sending.notes[-1] + 2 * NOTE_EVERY  # the first of them may have been answered before
        while sending.note() < slow:
            pass
        lab.delay("a", TOO_SLOW_MS)
        linked.wait_until_cut()
    finally:
        lab.delay("a", 0)
    answers = sending.result(300)
    linked.wait_until_linked()
    found = {text: count for text, count in hub.texts("h").items() if text.startswith("delay-")}
    judge(answers, found)
    assert [one for one in answers if one["took_s"] > ANSWER_S + SLACK_S] == []
    retried = send_again(linked, "l", answers)
    assert retried, "the fault was not felt"
    then = hub.texts("h")
    assert then == {f"delay-{number:05}": 1 for number in range(SENDS)}
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        line = [*row("delay in the guest", answers, found), retried, retried, *once_and_more(then)]
        print(f"\n{table([line])}")
    assert any(one["outcome"] == UNKNOWN for one in answers)
