"""A link or a node fails in the middle of many sends: what was said of each message is true, and a retry files it.

Half of the messages go from a linked box to the hub's folder, half through the hub to another linked box's.
"""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from netns.boxes import QUICK_LINKS, Box, Boxes, wait_until
from netns.sender import FILED, KNOWN, UNKNOWN
from netns.sending import THREADS, Sending, judge, on_disk, once_and_more, row, table

pytestmark = pytest.mark.lab

SENDS = 2000
BEFORE = 100
"""Messages that are answered before a fault begins."""

RESTARTS = 20

PAUSE_S = 0.02
"""How long each of a client's threads rests after an answer, so that a fault of seconds ends before the sends do."""

BRIEF_S = 0.005
"""The same while the link is down and each answer comes at once, so that a node has time to start."""

CUT_S = 2.5
"""How long a cut lasts at least: longer than a link may be silent, so that both ends notice it."""

UP_S = 60.0
"""How long it may take until enough is filed over a link that comes up."""

TRIES = 5
"""Until something is asked in the second in which a link is cut and nobody has noticed it; and rounds of retries."""

LOSS = """
table ip lab {
    chain in {
        type filter hook input priority 0;
        iif "eth0" numgen random mod 100 < 20 counter drop
    }
    chain out {
        type filter hook output priority 0;
        oif "eth0" numgen random mod 100 < 20 counter drop
    }
}
"""
"""A fifth of all packets is lost, each way (nft(8))."""

MUTE = """
table ip lab {
    chain out {
        type filter hook output priority 0;
        oif "eth0" tcp sport 7710 drop
    }
}
"""
"""Nothing that a listener says gets out; what it is told still gets in."""

UNDO = "delete table ip lab"

LOSSY = "a fifth of all packets lost"


@pytest.fixture(scope="module")
def boxes(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxes]:
    base = tmp_path_factory.mktemp("faults")
    with Boxes(base, linked=("lin", "lab"), settings=QUICK_LINKS) as boxes:
        boxes["hub"].join("h1")
        boxes["lin"].join("l1")
        boxes["lab"].join("l2")
        yield boxes


@pytest.fixture(scope="module")
def rows(pytestconfig: pytest.Config) -> Iterator[list[list[object]]]:
    """The rows of the module's faults, printed after its last test."""
    found: list[list[object]] = []
    yield found
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{table(found)}")


def mailboxes(boxes: Boxes) -> dict[str, Box]:
    return {"h1": boxes["hub"], "l2": boxes["lab"]}


def orders_of(prefix: str, count: int) -> list[tuple[str, str]]:
    """Message IDs, each of its own, and whom each message goes to."""
    return [(f"{prefix}-{number:05}", ("h1", "l2")[number % 2]) for number in range(count)]


class Run:
    """One run of a fault: the boxes, the client, and the messages that it has not been given yet."""

    def __init__(self, boxes: Boxes, sending: Sending, orders: list[tuple[str, str]]) -> None:
        self.boxes, self.sending = boxes, sending
        self._orders = orders

    def give(self, count: int = SENDS) -> None:
        """Have the client send so many more."""
        self.sending.give(self._orders[:count])
        del self._orders[:count]


def cut(boxes: Boxes) -> None:
    """Wait while the link of the linked box is cut, until that box has noticed it."""
    time.sleep(CUT_S)
    wait_until(boxes["lin"].has_lost_a_link, "the loss of the link")


def link_down(boxes: Boxes) -> None:
    boxes.unplug(boxes["lin"])
    cut(boxes)
    boxes.plug(boxes["lin"])


def loss(boxes: Boxes) -> None:
    net = boxes["hub"].net
    net.run("nft", LOSS)
    time.sleep(CUT_S)
    lost = [int(count) for count in re.findall(r"counter packets (\d+)", net.run("nft", "list ruleset"))]
    net.run("nft", UNDO)
    assert all(lost), lost


def hub_stopped(boxes: Boxes) -> None:
    boxes["hub"].signal_node(signal.SIGSTOP)
    cut(boxes)
    boxes["hub"].signal_node(signal.SIGCONT)


def killed(name: str) -> Callable[[Boxes], None]:
    def fault(boxes: Boxes) -> None:
        boxes[name].end_node(signal.SIGKILL)
        boxes[name].start_node()

    return fault


def once(fault: Callable[[Boxes], None]) -> Callable[[Run], None]:
    """A fault in the middle of all the messages."""

    def break_it(run: Run) -> None:
        run.give()
        fault(run.boxes)

    return break_it


def restarts(run: Run) -> None:
    """The hub and the far box, in turns, are killed amid a part of the messages, each time later, and start again."""
    part = (SENDS - BEFORE) // RESTARTS
    for number in range(RESTARTS):
        box = run.boxes[("hub", "lab")[number % 2]]
        answered = len(run.sending.answers)
        run.give(part)
        run.sending.wait_for(answered + 1 + part * number // RESTARTS)
        box.end_node(signal.SIGKILL)
        box.start_node()
        wait_until(box.is_linked, f"every link of {box.name}")


FAULTS: dict[str, Callable[[Run], None]] = {
    "link down and up": once(link_down),
    LOSSY: once(loss),
    "hub stopped and continued": once(hub_stopped),
    "hub killed": once(killed("hub")),
    "sender's node killed": once(killed("lin")),
    "far box killed": once(killed("lab")),
    f"{RESTARTS} restarts": restarts,
}
"""Each fault; it is mended when it returns."""


def unfiled(answers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return [(one["id"], one["to"]) for one in answers if one["outcome"] != FILED]


def retry(boxes: Boxes, failed: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Send what failed under the same message IDs until it is filed, some rounds at most; answers what is not."""
    for _ in range(TRIES):
        boxes.wait_until_linked()
        with Sending(boxes["lin"], "l1") as sending:
            sending.give(failed)
            failed = unfiled(sending.finish())
        if not failed:
            break
    return failed


@pytest.mark.parametrize("fault", FAULTS)
def test_every_answer_is_true_and_a_retry_files_the_rest(boxes: Boxes, rows: list[list[object]], fault: str) -> None:
    prefix = fault.replace(" ", "-").replace("'", "")
    orders = orders_of(prefix, SENDS)
    with Sending(boxes["lin"], "l1", PAUSE_S) as sending:
        run = Run(boxes, sending, list(orders))
        run.give(BEFORE)
        sending.wait_for(BEFORE)
        FAULTS[fault](run)
        run.give()
        answers = sending.finish()
    boxes.wait_until_linked()
    found = on_disk(mailboxes(boxes), prefix)
    failed = unfiled(answers)
    left = retry(boxes, failed)
    then = on_disk(mailboxes(boxes), prefix)
    rows.append([*row(fault, answers, found), len(failed), len(failed) - len(left), *once_and_more(then)])
    judge(answers, found)
    assert left == []
    assert then == dict.fromkeys((name for name, _ in orders), 1)
    if fault != LOSSY:  # TCP may mend that in time
        assert failed, "the fault was not felt"


def test_the_first_sends_over_a_link_that_comes_up_are_answered(boxes: Boxes) -> None:
    boxes["hub"].end_node()
    wait_until(boxes["lin"].has_lost_a_link, "the loss of the link")
    with Sending(boxes["lin"], "l1", BRIEF_S) as sending:
        orders = iter([(name, "h1") for name, _ in orders_of("up", 100 * SENDS)])
        sending.give(itertools.islice(orders, THREADS))
        sending.wait_for(THREADS)
        boxes["hub"].start_node(wait=False)
        deadline = time.monotonic() + UP_S
        while sum(one["outcome"] == FILED for one in list(sending.answers)) < BEFORE:
            assert time.monotonic() < deadline, sending
            if sending.unanswered < 8 * THREADS:  # there is always one more to send at once
                sending.give(itertools.islice(orders, 8 * THREADS))
            time.sleep(BRIEF_S)
        answers = sending.finish()
    boxes["hub"].wait_for_node()
    boxes.wait_until_linked()
    judge(answers, on_disk(mailboxes(boxes), "up-"))
    assert [one["outcome"] for one in answers[:THREADS]] == [KNOWN] * THREADS


def test_a_message_whose_answer_was_lost_is_filed_once(boxes: Boxes) -> None:
    hub = boxes["hub"]
    unknown = ""
    with Sending(boxes["lin"], "l1") as sending:
        for number, (name, _) in enumerate(orders_of("lost", TRIES), 1):
            hub.net.run("nft", MUTE)
            sending.give([(name, "h1")])
            sending.wait_for(number)
            if sending.answers[-1]["outcome"] == UNKNOWN:  # else the link was given up before it was asked
                unknown = name
                wait_until(lambda: on_disk(mailboxes(boxes), "lost-"), "the line of a message whose answer was lost")
            hub.net.run("nft", UNDO)
            boxes.wait_until_linked()
            if unknown:
                break
        assert on_disk(mailboxes(boxes), "lost-") == {unknown: 1}
        sending.give([(unknown, "h1")])
        assert sending.finish()[-1]["outcome"] == FILED
    assert on_disk(mailboxes(boxes), "lost-") == {unknown: 1}
