"""What a node answers to ``comm.file``: the order of the verdicts, and who is asked (facts 11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio
from world import World

from sotbus import message
from sotbus.comm.lock_manager import FlockManager
from sotbus.contracts import Filing, NotSentError, OutcomeUnknownError
from sotbus.errors import Busy, FilingFailed, InboxLockHeld, SotbusError
from sotbus.link_delivery import LinkDelivery
from sotbus.link_ops import decode_request, encode_answer
from sotbus.node.filer import Filer
from sotbus.node.folder_view import MISSING, UNREADABLE, Seen
from sotbus.node.links import Links
from sotbus.peers import Peer

MANAGER = FlockManager("local m")
OK = {"ok": True}


class View:
    """A folder as a test tells it. ``later`` is what a look after the first one sees."""

    def __init__(self, world: World, agents: dict[str, Any], **more: Any) -> None:
        self.client = world.client("node")
        self.agents = agents
        self.manager: FlockManager | None = more.get("manager", MANAGER)
        self.refusal: str = more.get("refusal", "")
        self.guest: bool = more.get("guest", False)
        self.trouble: str = more.get("trouble", "")
        self.later: dict[str, Any] | None = None
        self.looks = 0
        self.hangs = False
        self.fresh = False
        """Whether each look is the asker's own, and not one that was under way."""

    def recent(self) -> Seen | None:
        return None

    async def look(self, *, since: float | None = None) -> Seen:
        if self.hangs:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        self.looks += 1
        agents = self.agents if since is None or self.later is None else self.later
        at = trio.current_time() if since is not None or self.fresh else trio.current_time() - 0.01
        return Seen(self.manager, self.refusal, self.guest, agents, self.trouble, at)


class Boxes:
    """A transport to other boxes, each of which answers as a test says: a payload, an error, or never (None)."""

    def __init__(self, answers: dict[str, dict[str, Any] | Exception | None]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, dict[str, Any], float]] = []

    def reaches(self, node: str) -> bool:
        return node in self.answers

    async def request(self, node: str, request: bytes, deadline_s: float) -> bytes:
        op, payload = decode_request(request)
        self.asked.append((node, op, payload, deadline_s))
        answer = self.answers[node]
        if answer is None:
            await trio.sleep_forever()
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        await trio.lowlevel.checkpoint()
        return encode_answer(answer)

    async def serve(self, inbound: object) -> None:
        await trio.sleep_forever()


def entry(**more: object) -> dict[str, object]:
    return {"host": "vm", "last_seen": message.stamp(), "root": "/x"} | more


class Bench:
    """A filer, what it appended, and the boxes it may ask."""

    def __init__(self, view: View, boxes: Boxes | None = None, roles: dict[str, str] | None = None) -> None:
        self.view = view
        self.boxes = boxes or Boxes({})
        self.appended: list[tuple[Filing, object]] = []
        self.append_error: Exception | None = None
        peers = [Peer("u", node.removeprefix("u."), "", role) for node, role in (roles or {}).items()]
        self.known: set[str] = set()
        self.store_hangs = False
        links = Links([LinkDelivery(self.boxes)], peers)
        self.failures: list[tuple[str, str]] = []
        self.filer = Filer(view, self._append, links, self._filed_before, self._note)  # type: ignore[arg-type]

    async def _append(self, filing: Filing, manager: object, bound_s: float) -> None:
        await trio.lowlevel.checkpoint()
        assert bound_s > 0
        if self.append_error is not None:
            raise self.append_error
        self.appended.append((filing, manager))

    def _note(self, filing: Filing, error: SotbusError) -> None:
        self.failures.append((filing.to, error.code))

    async def _filed_before(self, filing: Filing) -> bool:
        await (trio.sleep_forever() if self.store_hangs else trio.lowlevel.checkpoint())
        return filing.message_id in self.known

    async def ask(
        self,
        to: str = "b",
        text: str = "t",
        *,
        forwarded: bool = False,
        origin: str | None = None,
        message_id: str | None = None,
    ) -> Any:
        filing = Filing("a", to, "daemon", text, message_id=message_id)
        return await self.filer.answer(filing, forwarded=forwarded, origin=origin, bound_s=5.0)


@pytest.fixture
def listed(world: World) -> View:
    return View(world, {"b": entry(), "stale": entry(last_seen="2020-01-01T00:00:00Z"), "null": None, "odd": {}})


# ---- this folder's


async def test_a_folder_that_cannot_be_looked_at_is_answered_within_the_bound(
    listed: View, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench(listed)
    listed.hangs = True
    began = trio.current_time()
    answer = await bench.ask()
    assert trio.current_time() - began == pytest.approx(5.0)
    assert answer["code"] == "file_failed"
    assert answer["error"] == f"the comm folder {listed.client.folder.root} did not answer in time; nothing was filed"
    assert bench.appended == []


@pytest.mark.spec("S85", "S88")
async def test_a_listed_live_handle_is_appended_here_and_answered_ok(listed: View) -> None:
    bench = Bench(listed)
    assert await bench.ask() == OK
    [(filing, manager)] = bench.appended
    assert (filing.to, filing.text, manager) == ("b", "t", MANAGER)


@pytest.mark.spec("S88")
@pytest.mark.parametrize("to", ["", "-b", "a/b", "a..b", "b" * 65, "b ", "@b", "ü"])
async def test_what_is_no_handle_is_refused_before_anything_is_looked_at(listed: View, to: str) -> None:
    bench = Bench(listed)
    assert await bench.ask(to) == {"error": f'not a handle: "{to}"', "code": "bad_handle"}
    assert listed.looks == 0


@pytest.mark.spec("S88")
@pytest.mark.parametrize("to", ["nobody", "null", "odd"])
async def test_a_handle_that_nobody_lists_is_not_here(listed: View, to: str) -> None:
    assert await Bench(listed).ask(to) == {"error": f"no box knows that handle: {to}", "code": "not_here"}


@pytest.mark.spec("S88")
async def test_a_listed_handle_that_is_not_live_has_no_live_session(listed: View) -> None:
    bench = Bench(listed)
    assert await bench.ask("stale") == {"error": "no live session holds @stale", "code": "no_live_session"}
    assert bench.appended == []


@pytest.mark.spec("S88")
async def test_an_append_that_fails_is_file_failed_in_its_own_words(listed: View) -> None:
    bench = Bench(listed)
    bench.append_error = InboxLockHeld("the inbox lock for @b was held for 2s — nothing was appended")
    words = "the inbox lock for @b was held for 2s — nothing was appended"
    assert await bench.ask() == {"error": words, "code": "file_failed"}
    bench.append_error = FilingFailed("the append failed: Input/output error", outcome_unknown=True)
    assert (await bench.ask())["outcome_unknown"] is True


async def test_a_missing_registry_lists_nobody_and_an_unreadable_one_is_a_failure(world: World) -> None:
    """facts 2.3 and 11: the two are told apart."""
    missing, unreadable = View(world, {}, trouble=MISSING), View(world, {}, trouble=UNREADABLE)
    assert (await Bench(missing).ask())["code"] == "not_here"
    assert await Bench(unreadable).ask() == {
        "error": "the registry could not be read, so @b is unverified; nothing was filed",
        "code": "file_failed",
    }


@pytest.mark.parametrize(
    ("text", "code"), [("", "bad_request"), ("x" * 300_000, "too_large"), ("\ud800", "bad_request")]
)
async def test_a_text_that_cannot_be_a_message_is_refused(listed: View, text: str, code: str) -> None:
    bench = Bench(listed)
    assert (await bench.ask(text=text))["code"] == code
    assert bench.appended == []


async def test_a_refusal_that_an_older_look_would_give_is_made_sure_of(listed: View) -> None:
    """A session that joined a moment ago is found, although the folder was looked at just before."""
    listed.later = listed.agents | {"new": entry()}
    bench = Bench(listed)
    assert await bench.ask("new") == OK
    assert listed.looks == 2


# ---- the hub and its record


@pytest.mark.spec("S66")
async def test_a_hub_whose_record_names_another_manager_refuses_every_filing_with_the_recovery(world: World) -> None:
    words = (
        "the inbox lock record names local x, written by machine y, a different lock manager from this hub's local m"
    )
    bench = Bench(View(world, {"b": entry()}, manager=None, refusal=words), Boxes({"u.far": OK}), {"u.far": "linked"})
    for to in ("b", "nobody"):
        for forwarded in (False, True):
            answer = await bench.ask(to, forwarded=forwarded)
            assert answer == {"error": words, "code": "file_failed"}  # before "unknown handle" (facts 11)
    assert bench.appended == []
    assert bench.boxes.asked == []


# ---- a guest


@pytest.mark.spec("S67", "S86")
async def test_a_guest_hands_what_it_may_not_append_to_the_hub_once_and_answers_in_its_words(world: World) -> None:
    refused = {"error": "no live session holds @b", "code": "no_live_session"}
    for answer in (OK, refused):
        view = View(world, {}, manager=None, refusal="x", guest=True)
        bench = Bench(view, Boxes({"u.hub": answer}), {"u.hub": "hub"})
        assert await bench.ask() == answer
        [(node, op, payload, _)] = bench.boxes.asked
        assert (node, op) == ("u.hub", "comm.file")
        assert payload == {"from": "a", "to": "b", "text": "t", "broadcast": False, "forwarded": True}
        assert bench.appended == []


@pytest.mark.spec("S67")
async def test_a_guest_never_hands_on_what_was_handed_to_it(world: World) -> None:
    bench = Bench(View(world, {}, manager=None, refusal="x", guest=True), Boxes({"u.hub": OK}), {"u.hub": "hub"})
    words = "a forwarded frame reached a daemon that is not its folder's hub (vm)"
    assert await bench.ask(forwarded=True) == {"error": words, "code": "file_failed"}
    assert bench.boxes.asked == []


@pytest.mark.parametrize(
    ("error", "unknown"),
    [(NotSentError("no link is up"), False), (OutcomeUnknownError("no answer came"), True), (None, True)],
)
async def test_a_hub_that_does_not_answer_is_file_failed(
    world: World, error: Exception | None, unknown: bool, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench(View(world, {}, manager=None, refusal="x", guest=True), Boxes({"u.hub": error}), {"u.hub": "hub"})
    began = trio.current_time()
    answer = await bench.ask()
    assert answer["error"].startswith("the hub did not answer at u.hub: ")
    assert (answer["code"], answer.get("outcome_unknown", False)) == ("file_failed", unknown)
    assert trio.current_time() - began <= 5.0


async def test_a_guest_without_a_link_says_so(world: World) -> None:
    answer = await Bench(View(world, {}, manager=None, refusal="x", guest=True)).ask()
    assert answer["code"] == "file_failed"
    assert "has no link to it" in answer["error"]
    assert "sotbus keys trust" in answer["hint"]


async def test_a_guest_that_may_append_asks_the_hub_only_for_what_the_folder_does_not_list(listed: View) -> None:
    listed.guest = True
    bench = Bench(listed, Boxes({"u.hub": OK}), {"u.hub": "hub"})
    assert await bench.ask("b") == OK
    assert bench.boxes.asked == []
    assert await bench.ask("far") == OK
    assert [payload["to"] for _, _, payload, _ in bench.boxes.asked] == ["far"]


# ---- a linked box


async def test_a_linked_box_sends_what_it_does_not_list_to_its_hub_once(listed: View) -> None:
    bench = Bench(listed, Boxes({"u.hub": OK}), {"u.hub": "hub"})
    assert await bench.ask("far") == OK
    assert len(bench.boxes.asked) == 1
    unknown = {"error": "no box knows that handle: far", "code": "not_here"}
    assert await bench.ask("far", forwarded=True, origin="u.hub") == unknown  # an offer: from its own registry only
    assert await bench.ask("b", forwarded=True, origin="u.hub") == OK
    assert len(bench.boxes.asked) == 1


# ---- the hub's offer


def refusal(code: str, text: str = "words") -> dict[str, Any]:
    return {"error": text, "code": code}


UNKNOWN = refusal("not_here", "no box knows that handle: far")
STALE = refusal("no_live_session", "no live session holds @far")
SILENT = None
DOWN = NotSentError("no link is up")


def offered(view: View, *answers: dict[str, Any] | Exception | None) -> Bench:
    boxes = Boxes({f"u.n{at}": answer for at, answer in enumerate(answers)})
    return Bench(view, boxes, dict.fromkeys(boxes.answers, "linked"))


@pytest.mark.spec("S86", "S87")
@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([OK], OK),
        ([UNKNOWN, OK], OK),
        ([STALE, SILENT, OK], OK),  # the first ok wins, whatever else is said
        ([SILENT, STALE, UNKNOWN], STALE),  # else the listing box's own refusal
        (
            [UNKNOWN, refusal("file_failed", "the append failed: disk full")],
            refusal("file_failed", "the append failed: disk full"),
        ),
        ([UNKNOWN, UNKNOWN], UNKNOWN),
    ],
)
async def test_the_answer_to_an_offer_is_chosen_in_the_pages_order(
    listed: View,
    answers: Sequence[dict[str, Any] | None],
    expected: dict[str, Any],
    autojump_clock: trio.testing.MockClock,
) -> None:
    bench = offered(listed, *answers)
    assert await bench.ask("far") == expected
    assert sorted(node for node, *_ in bench.boxes.asked) == sorted(bench.boxes.answers)
    assert all(payload["forwarded"] is True for _, _, payload, _ in bench.boxes.asked)


@pytest.mark.spec("S86", "S87")
async def test_a_box_that_does_not_answer_an_offer_is_named_after_the_lock_wait_plus_a_second(
    listed: View, autojump_clock: trio.testing.MockClock
) -> None:
    bench = offered(listed, UNKNOWN, SILENT)
    began = trio.current_time()
    answer = await bench.ask("far")
    assert trio.current_time() - began == pytest.approx(2.0 + 1.0)
    assert answer["error"].startswith("u.n1 did not answer: ")
    assert (answer["code"], answer["outcome_unknown"]) == ("file_failed", True)
    assert {deadline for *_, deadline in bench.boxes.asked} == {3.0}


@pytest.mark.spec("S87")
async def test_boxes_that_should_hold_a_link_and_hold_none_are_named(listed: View) -> None:
    answer = await offered(listed, DOWN, UNKNOWN, DOWN).ask("far")
    words = "no box knows that handle: far (no link is up to u.n0, u.n2)"
    assert answer == {"error": words, "code": "not_here"}


@pytest.mark.spec("S86")
async def test_an_offer_goes_to_every_linked_box_at_once_and_not_to_the_one_that_asks(
    listed: View, autojump_clock: trio.testing.MockClock
) -> None:
    bench = offered(listed, OK, SILENT, SILENT)
    began = trio.current_time()
    assert await bench.ask("far", forwarded=True, origin="u.n1") == OK
    assert trio.current_time() == began  # nobody waited for the silent one
    assert sorted(node for node, *_ in bench.boxes.asked) == ["u.n0", "u.n2"]


async def test_a_box_that_is_busy_is_no_box_without_a_link(listed: View) -> None:
    bench = offered(listed, Busy("64 requests wait"), UNKNOWN)
    answer = await bench.ask("far")
    assert (answer["code"], answer["error"]) == ("busy", "64 requests wait")


async def test_an_answer_that_is_no_answer_is_not_taken_for_filed(listed: View) -> None:
    answer = await offered(listed, {"fine": True}).ask("far")
    assert answer["code"] == "file_failed"
    assert "neither ok nor a refusal" in answer["error"]


async def test_a_repeat_of_what_is_filed_is_answered_ok_although_its_recipient_has_gone(listed: View) -> None:
    bench = Bench(listed, Boxes({"u.hub": OK}), {"u.hub": "hub"})
    bench.known.add("m1")
    for to in ("stale", "nobody"):
        assert await bench.ask(to, message_id="m1") == OK
    assert bench.appended == []
    assert bench.boxes.asked == []
    assert (await bench.ask("stale", message_id="m2"))["code"] == "no_live_session"


async def test_a_repeat_after_a_quiet_time_is_answered_ok_too(
    listed: View, autojump_clock: trio.testing.MockClock
) -> None:
    """When the folder is looked at anew for it."""
    listed.fresh = True
    bench = Bench(listed, Boxes({"u.hub": OK}), {"u.hub": "hub"})
    bench.known.add("m1")
    for to in ("stale", "nobody"):
        await trio.sleep(60)
        assert await bench.ask(to, message_id="m1") == OK
    assert bench.appended == []
    assert bench.boxes.asked == []


async def test_a_store_that_hangs_leaves_the_outcome_unknown_within_the_bound(
    listed: View, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench(listed)
    bench.store_hangs = True
    began = trio.current_time()
    answer = await bench.ask("stale", message_id="m1")
    assert (answer["code"], answer["outcome_unknown"]) == ("file_failed", True)
    assert trio.current_time() - began == 5.0


async def test_a_filing_that_fails_is_told_of_and_one_that_is_refused_is_not(listed: View) -> None:
    bench = Bench(listed)
    bench.append_error = FilingFailed("the disk is full — nothing was appended")
    await bench.ask()
    await bench.ask("stale")
    await bench.ask("no handle")
    assert bench.failures == [("b", "file_failed")]


async def test_outcomes_are_counted(listed: View) -> None:
    bench = offered(listed, OK)
    for to in ("b", "stale", "far", "-"):
        await bench.ask(to)
    assert bench.filer.counts == {"filed": 1, "no_live_session": 1, "filed elsewhere": 1, "bad_handle": 1}
