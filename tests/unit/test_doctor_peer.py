"""``sotbus doctor --peer``: two boxes prove on one folder whether they may share it, and say what stands against it."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from world import ENTRY, World

from sotbus.api import FlockManager
from sotbus.cli.doctor import run_doctor
from sotbus.comm import manager_record
from sotbus.comm.box import Box
from sotbus.comm.holder import Holder, own_record
from sotbus.doctor import pair as pair_module
from sotbus.doctor import peer, peer_files, peer_locks, peer_mounts, rendezvous
from sotbus.doctor.check import FAULT, OK, SKIPPED, Check, Verdict
from sotbus.doctor.pair import NotProved, Pair
from sotbus.doctor.peer import Answer
from sotbus.doctor.peer_board import FORM, PEER_FILES, Board, Party, Pulse, Stopped
from sotbus.doctor.place import Place
from sotbus.errors import UsageError

DOCS = Path(__file__).parents[2] / "docs" / "doctor.md"
NFS4 = "21 1 0:2 / / rw,relatime - nfs4 srv:/x rw,vers=4.2,local_lock=none\n"
A, B, C = "a" * 32, "b" * 32, "c" * 32
BOXES = {"box-a": A, "box-b": B}
DEAD_PROCESS = "999999999"
"""A pid that no process has (Linux PID_MAX_LIMIT is 2**22)."""


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proofs in little time: shorter tries and fewer rounds than a real run has, and the same bounds."""
    for module, name, value in (
        (peer_locks, "TRY_S", 0.05),
        (peer_locks, "RELEASE_S", 0.05),
        (peer_locks, "CONTEND_S", 0.5),
        (peer_files, "LINES", 40),
        (peer_files, "RENAMES", 4),
        (peer_files, "TURNS", 8),
        (rendezvous, "LOOK_S", 0.02),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def shared(world: World) -> World:
    """A comm folder on what each box takes for the same NFS mount."""
    world.mountinfo.write_text(NFS4)
    world.folder.ensure()
    return world


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Only these of the steps."""
    monkeypatch.setattr(peer, "STEPS", [step for step in peer.STEPS if step.name in names])
    monkeypatch.setattr(peer, "NAMES", [name for name in peer.NAMES if name in names or name in FIRST_NAMES])


FIRST_NAMES = (peer.FOUND, *(name for name, _ in peer.FACTS))


def place_of(world: World, host: str, machine: str | None, manager: object = None) -> Place:
    place = Place(world.folder, world.box(host, machine), plugins=lambda: "none")
    if manager is not None:
        place.__dict__["lock_manager"] = manager
    return place


def nobody(text: str) -> None:
    """Is told what is being done, and does not mind."""


class Runs:
    """Runs in threads of this process, each a box's own; ``told`` is what each said to its person."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.told: dict[str, list[str]] = {}
        self._threads: list[threading.Thread] = []

    def start(self, name: str, place: Place, own: Sequence[Check] = (), **more: float) -> None:
        told = self.told.setdefault(name, [])

        def work() -> None:
            self.answers[name] = peer.run(place, own, nobody, told.append, **{"wait_s": 20.0, **more})

        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def end(self) -> dict[str, Answer]:
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive()
        return self.answers


def both(world: World, managers: Mapping[str, object] | None = None, own: Mapping[str, Sequence[Check]] = {}) -> Answer:
    """The answer of two boxes that run at the same time, the same one on both, with nothing left behind."""
    runs = Runs()
    for host, machine in BOXES.items():
        runs.start(host, place_of(world, host, machine, (managers or {}).get(host)), own.get(host, ()))
    answers = runs.end()
    assert answers["box-a"] == answers["box-b"]
    assert os.listdir(world.folder.inboxes) == []
    return answers["box-a"]


def by_name(answer: Answer) -> dict[str, Check]:
    return {check.name: check for check in answer.checks}


def faults(answer: Answer) -> list[str]:
    return [check.name for check in answer.checks if check.status == FAULT]


class Granting(FlockManager):
    """A lock that excludes nobody, as a mount that grants every flock gives."""

    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:  # type: ignore[override]
        yield

    def fence(self, fd: int, bound_s: float) -> bool:
        return False


class Apart(FlockManager):
    """A lock of this box's own, as ``local_lock=flock`` gives: it excludes its own processes and no others."""

    def hold(self, path: str, exclusive: bool, bound_s: float) -> Any:
        return super().hold(f"{path}.{id(self)}", exclusive, bound_s)

    def fence(self, fd: int, bound_s: float) -> bool:
        return False


class Unshared(FlockManager):
    """A lock that knows no readers."""

    def hold(self, path: str, exclusive: bool, bound_s: float) -> Any:
        return super().hold(path, True, bound_s)


class Failing(FlockManager):
    """A lock that the system refuses."""

    error: Exception = OSError(errno.EIO, os.strerror(errno.EIO))

    def hold(self, path: str, exclusive: bool, bound_s: float) -> Any:
        raise self.error


class Buggy(Failing):
    """A plugin's lock that raises what no contract allows."""

    error = RuntimeError("boom")


def test_two_boxes_whose_lock_excludes_may_share_the_folder(shared: World) -> None:
    answer = both(shared)
    assert [check.name for check in answer.checks] == list(peer.NAMES)
    assert [(check.name, check.text) for check in answer.checks if check.status != OK] == []
    found = by_name(answer)
    assert "box-a (pid " in found["peer-found"].text
    assert f"machine {B}" in found["peer-found"].text
    assert found["peer-lock-manager"].text == "nfs4 srv:/x on both"
    holds, waited = map(int, re.findall(r"of (\d+) holds by both, (\d+)", found["peer-exclusion"].text)[0])
    assert holds > waited >= peer_locks.MIN_WAITS
    assert re.search(r"of \d+ lines by both in \d+ turns each is there once", found["peer-append"].text)
    assert re.fullmatch(
        r"verdict: box-[ab] and box-[ab] may share this folder: the lock excludes between them, and .*", answer.verdict
    )


@pytest.mark.parametrize("kind", [Granting, Apart])
def test_a_lock_that_does_not_exclude_is_found_by_the_holds_and_by_the_lines(
    shared: World, kind: type[FlockManager]
) -> None:
    answer = both(shared, {host: kind("nfs4 srv:/x") for host in BOXES})
    found = by_name(answer)
    assert faults(answer) == ["peer-exclusion", "peer-append", "peer-death"]
    assert "box-a got the lock while box-b held it" in found["peer-exclusion"].text
    assert "box-b got the lock while box-a held it" in found["peer-exclusion"].text
    assert re.search(
        r"of \d+ holds by both [1-9]\d* began while the other box was in one", found["peer-exclusion"].text
    )
    assert re.search(r"[1-9]\d* were appended while the other box appended", found["peer-append"].text)
    assert "may share" not in answer.verdict
    assert answer.verdict.startswith("verdict: do NOT let box-")
    assert answer.verdict.endswith(found["peer-exclusion"].remedy)
    assert "the lock does not do its work between them, lines that both append do not all stand;" in answer.verdict


def test_a_lock_that_is_kept_from_a_second_reader_is_a_fault(shared: World, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "peer-exclusion")
    monkeypatch.setattr(peer_locks, "FREE_S", 0.5)
    answer = both(shared, {host: Unshared("nfs4 srv:/x") for host in BOXES})
    assert faults(answer) == ["peer-exclusion"]
    text = by_name(answer)["peer-exclusion"].text
    assert "box-a did not get it for reading beside box-b, which read" in text
    assert "while" not in text


def test_boxes_that_hardly_met_at_the_lock_have_proved_nothing(shared: World, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "peer-exclusion")
    monkeypatch.setattr(peer_locks, "MIN_WAITS", 1_000_000)
    monkeypatch.setattr(peer_locks, "CONTEND_S", 0.05)
    answer = both(shared)
    check = by_name(answer)["peer-exclusion"]
    assert check.status == FAULT
    assert check.text.startswith("nothing is proved: the boxes hardly met at the lock (")
    assert re.match(
        r"verdict: it is not proved that box-\w and box-\w may share this folder: see peer-exc", answer.verdict
    )
    assert answer.verdict.endswith(peer_locks.AGAIN)


def test_boxes_that_hardly_met_contend_again(shared: World, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "peer-exclusion")
    rounds: list[str] = []
    meet = Pair.meet

    def counted(self: Pair) -> None:
        rounds.append(self.mine.host)
        meet(self)

    monkeypatch.setattr(Pair, "meet", counted)
    monkeypatch.setattr(peer_locks, "MIN_WAITS", 1_000_000)
    monkeypatch.setattr(peer_locks, "CONTEND_S", 0.02)
    both(shared)
    assert rounds.count("box-a") == peer_locks.ROUNDS + 1  # and once to part


def test_boxes_that_did_not_take_turns_append_again_and_have_then_proved_nothing(
    shared: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "peer-append")
    monkeypatch.setattr(peer_files, "MIN_TURNS", 1_000_000)
    monkeypatch.setattr(peer_files, "LINES", 3)
    text = by_name(both(shared))["peer-append"].text
    assert re.fullmatch(
        rf"nothing is proved: the boxes hardly appended at the same time \({peer_files.ROUNDS * 6} lines, \d+ turns\)",
        text,
    )


def test_two_lock_managers_are_named_with_what_to_mount_though_the_lock_excludes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "peer-exclusion")
    world.folder.ensure()
    answer = both(world)
    check = by_name(answer)["peer-lock-manager"]
    assert faults(answer) == ["peer-lock-manager"]
    assert f"box-a has local {A} (ext4 /dev/vda2 on /)" in check.text
    assert f"box-b has local {B}" in check.text
    assert "do NOT" in answer.verdict
    assert "they do not go by one lock manager; on box-" in answer.verdict


def test_a_fault_of_one_boxs_own_that_bears_on_it_is_named_on_both(
    shared: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "peer-rename")
    own = [Check("nfs-recovery", FAULT, "it recovers", "echo N"), Check("clock-skew", FAULT, "late", "ntp")]
    answer = both(shared, own={"box-b": [*own, Check("mount", OK, "fine")]})
    check = by_name(answer)["peer-own-checks"]
    assert (check.text, check.remedy) == ("on box-b nfs-recovery is at fault (it recovers)", "on box-b: echo N")
    assert answer.verdict.endswith("share this folder: one of them is unfit by its own checks; on box-b: echo N")


@pytest.mark.parametrize("text", ["the proof was not finished: too busy", "nothing is proved: they hardly met"])
def test_a_proof_of_a_boxs_own_that_came_to_nothing_says_nothing_against_sharing(
    shared: World, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    only(monkeypatch, "peer-rename")
    undecided = Check("probe-append", FAULT, text, "run it again")
    answer = both(shared, own={"box-b": [undecided]})
    assert faults(answer) == ["peer-own-checks"]
    assert re.fullmatch(
        r"verdict: it is not proved that \S+ and \S+ may share .*: see peer-own-checks; on box-b: run it again",
        answer.verdict,
    )
    worse = Check("probe-exclusion", FAULT, "the lock does not exclude", "mend it")
    answer = both(shared, own={"box-b": [undecided], "box-a": [worse]})
    assert by_name(answer)["peer-own-checks"].text.startswith("on box-a probe-exclusion is at fault (the lock does not")
    assert "do NOT" in answer.verdict
    assert answer.verdict.endswith("on box-a: mend it")


def test_nobody_comes_and_it_is_said_within_the_wait_and_before_it_what_to_run(shared: World) -> None:
    runs = Runs()
    began = time.monotonic()
    runs.start("box-a", place_of(shared, "box-a", A), wait_s=0.3)
    answer = runs.end()["box-a"]
    assert 0.3 <= time.monotonic() - began < 10
    assert [check.status for check in answer.checks] == [FAULT] + [SKIPPED] * (len(peer.NAMES) - 1)
    assert answer.checks[0].text == "no other box came within 0.3s"
    assert "sotbus doctor --probe --peer" in answer.checks[0].remedy
    assert str(shared.home) in answer.checks[0].remedy
    assert answer.verdict.startswith("verdict: nothing is proved: no other box came within 0.3s; run it on the other")
    assert len(runs.told["box-a"]) == 1
    assert runs.told["box-a"][0].startswith("waiting up to 0.3s for the other box; run on it now")
    assert os.listdir(shared.folder.inboxes) == []


def test_two_runs_on_one_box_are_no_pair_and_each_says_so(shared: World) -> None:
    runs = Runs()
    for name in ("one", "two"):
        runs.start(name, place_of(shared, "box-a", A), wait_s=1.5)
    for name, answer in runs.end().items():
        assert answer.checks[0].status == FAULT
        assert answer.checks[0].text.startswith("the other run is on this same box (box-a pid ")
        assert answer.checks[0].remedy.startswith("run it on the other box")
        assert any("on this same box" in text for text in runs.told[name])
    assert os.listdir(shared.folder.inboxes) == []


def test_a_third_run_breaks_no_pair_and_is_told_who_has_paired(shared: World, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "peer-exclusion")
    runs = Runs()
    for host, machine in {**BOXES, "box-c": C}.items():
        runs.start(host, place_of(shared, host, machine), wait_s=5.0)
    answers = runs.end()
    alone = [host for host, answer in answers.items() if faults(answer)]
    assert len(alone) == 1, answers
    paired = sorted({"box-a", "box-b", "box-c"} - set(alone))
    assert faults(answers[alone[0]]) == [peer.FOUND]
    assert answers[alone[0]].checks[0].text.endswith(f"these are paired with one another: {', '.join(paired)}")
    assert answers[paired[0]] == answers[paired[1]]
    assert "may share" in answers[paired[0]].verdict
    assert os.listdir(shared.folder.inboxes) == []


def party(shared: World, host: str, machine: str, board: Board, **more: Any) -> Party:
    return replace(peer_mounts.party_here(place_of(shared, host, machine), board.id, ()), **more)


def left_by(shared: World, host: str, machine: str, *words: dict[str, Any], **more: Any) -> Board:
    """The files of a run that has ended without removing them."""
    board = Board(shared.folder.inboxes, host, Pulse())
    board.post("hello", **asdict(party(shared, host, machine, board, **more)))
    for word in words:
        board.post(**word)
    return board


def test_what_dead_runs_left_pairs_with_nobody_and_stays(shared: World, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "peer-rename")
    first = left_by(shared, "box-b", B, {"kind": "ask", "to": "0" * 16}, {"kind": "accept", "to": "1" * 16})
    left_by(shared, "box-c", C, {"kind": "pair", "to": first.id})
    left_by(shared, "box-d", "d" * 32)
    for name, text in (("0", "not JSON"), ("1", "[]"), ("2", '{"kind": "hello"}'), ("3", '{"kind": "hello", "id": 3}')):
        (shared.home / "inbox" / f"{PEER_FILES}x-1-{name * 16}.0").write_text(text)
    before = sorted(os.listdir(shared.folder.inboxes))
    runs = Runs()
    for host, machine in BOXES.items():
        runs.start(host, place_of(shared, host, machine))
    answers = runs.end()
    assert faults(answers["box-a"]) == faults(answers["box-b"]) == []
    assert sorted(os.listdir(shared.folder.inboxes)) == before


def test_a_run_that_left_files_on_another_box_is_named_where_nobody_comes(shared: World) -> None:
    left_by(shared, "box-b", B, pid=77)
    runs = Runs()
    runs.start("box-a", place_of(shared, "box-a", A), wait_s=0.2)
    assert runs.end()["box-a"].checks[0].text == (
        "no other box came within 0.2s; these left files and do not answer: box-b pid 77"
    )


def test_what_a_dead_run_of_this_box_left_is_removed_and_its_pairs_folder_too(shared: World) -> None:
    own = own_record(shared.box("box-a", A), fresh=True)
    dead = str(Holder(own.name, own.machine, own.boot, own.pidns, DEAD_PROCESS, own.start))
    board = left_by(shared, "box-a", A, {"kind": "ask", "to": "0" * 16}, record=dead, pid=int(DEAD_PROCESS))
    folder = shared.home / "inbox" / f"{PEER_FILES}{'0' * 16}-{board.id}"
    (folder / "inbox").mkdir(parents=True)
    (folder / "inbox" / "mail.lock").touch()
    runs = Runs()
    runs.start("box-a", place_of(shared, "box-a", A), wait_s=0.2)
    assert runs.end()["box-a"].checks[0].text == "no other box came within 0.2s"
    assert os.listdir(shared.folder.inboxes) == []


def test_a_run_whose_probe_speaks_another_form_is_no_partner_and_named(shared: World) -> None:
    left_by(shared, "box-b", B, form=FORM + 1, version="9.9")
    runs = Runs()
    runs.start("box-a", place_of(shared, "box-a", A), wait_s=0.2)
    check = runs.end()["box-a"].checks[0]
    assert check.text.startswith("box-b runs sotbus 9.9, whose probe speaks another form than this box's")
    assert check.remedy.startswith("install one version of sotbus on both boxes")


def test_a_run_that_asked_and_then_says_nothing_more_is_let_go_for_another(
    shared: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "peer-rename")
    monkeypatch.setattr(rendezvous, "PROMISE_S", 0.3)
    runs = Runs()
    runs.start("box-a", place_of(shared, "box-a", A))
    mine = hello_of(shared, "box-a")
    silent = asking(shared, mine[-16:])
    wait_for(lambda: [name for name in os.listdir(shared.folder.inboxes) if name == f"{mine}.1"])
    accepted = json.loads((shared.home / "inbox" / f"{mine}.1").read_text())
    assert accepted == {"kind": "accept", "to": silent.id}
    runs.start("box-b", place_of(shared, "box-b", B))
    answers = runs.end()
    assert faults(answers["box-a"]) == faults(answers["box-b"]) == []


def asking(shared: World, to: str, partner: str = "", **more: Any) -> Board:
    """A run on another box, of the lowest id there is, that asks one of the others, and may have a partner already."""
    board = Board(shared.folder.inboxes, "box-c", Pulse())
    board.id = "0" * 16
    board.stem = f"{PEER_FILES}box-c-1-{board.id}"
    board.post("hello", **asdict(party(shared, "box-c", C, board, **more)))
    if partner:
        board.post("pair", to=partner)
    board.post("ask", to=to)
    return board


def hello_of(shared: World, host: str) -> str:
    """The stem of a box's run, as soon as it is there."""
    start = f"{PEER_FILES}{host}-"
    hello = wait_for(
        lambda: [name for name in os.listdir(shared.folder.inboxes) if name.startswith(start) and name.endswith(".0")]
    )
    return hello[0].removesuffix(".0")


@pytest.mark.parametrize("kind", ["taken", "of another form"])
def test_a_run_that_is_taken_or_of_another_form_is_not_accepted_though_it_asked(shared: World, kind: str) -> None:
    runs = Runs()
    runs.start("box-a", place_of(shared, "box-a", A), wait_s=1.0)
    mine = hello_of(shared, "box-a")
    if kind == "taken":
        asking(shared, mine[-16:], partner="f" * 16)
    else:
        asking(shared, mine[-16:], form=FORM + 1)
    reader = Board(shared.folder.inboxes, "x", Pulse())
    kinds: set[str] = set()
    while not runs.answers:
        reader.look()
        kinds |= {message["kind"] for stem, run in reader.runs.items() if stem == mine for message in run.messages}
        time.sleep(0.01)
    runs.end()
    assert kinds == {"hello"}


def test_a_run_that_came_and_went_is_not_said_to_have_left_files(shared: World) -> None:
    board = left_by(shared, "box-b", B)
    runs = Runs()
    runs.start("box-a", place_of(shared, "box-a", A), wait_s=3.0)
    hello_of(shared, "box-a")
    time.sleep(0.2)
    board.sweep(board.id)
    assert runs.end()["box-a"].checks[0].text == "no other box came within 3s"


def test_a_hello_without_an_id_has_nobodys_files_removed(shared: World) -> None:
    own = own_record(shared.box("box-a", A), fresh=True)
    dead = str(Holder(own.name, own.machine, own.boot, own.pidns, DEAD_PROCESS, own.start))
    board = Board(shared.folder.inboxes, "box-a", Pulse())
    hello = asdict(party(shared, "box-a", A, board, record=dead, id=""))
    path = shared.home / "inbox" / f"{PEER_FILES}box-a-1-.0"
    path.write_text(json.dumps({"kind": "hello", **hello}))
    runs = Runs()
    runs.start("box-a", place_of(shared, "box-a", A), wait_s=0.2)
    runs.end()
    assert os.listdir(shared.folder.inboxes) == [path.name]


def test_the_words_of_two_runs_do_not_pile_up(shared: World, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "peer-rename")
    monkeypatch.setattr(peer_files, "TURNS", 40)
    most: list[int] = []
    look = Board.look

    def counted(self: Board, only: Any = None) -> None:
        look(self, only)
        most.append(len(os.listdir(self.folder)))

    monkeypatch.setattr(Board, "look", counted)
    both(shared)
    assert len(most) > 40
    assert max(most) < 20


def wait_for(look: Callable[[], list[str]]) -> list[str]:
    """What a look finds, as soon as it finds something."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if found := look():
            return found
        time.sleep(0.01)
    raise AssertionError("it did not come")


def test_a_partner_that_is_killed_ends_the_run_at_the_steps_bound(
    shared: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ANSWER_S", 0.3), ("STEP_S", 0.6), ("RESULT_S", 0.2)):
        monkeypatch.setattr(pair_module, name, value)
    runs = Runs()
    runs.start("box-a", place_of(shared, "box-a", A))
    board = Board(shared.folder.inboxes, "box-b", Pulse())
    rendezvous.Meeting(board, party(shared, "box-b", B, board), nobody).meet(20)
    began = time.monotonic()
    answer = runs.end()["box-a"]
    assert time.monotonic() - began < 5
    last = [check for check in answer.checks if check.status == FAULT]
    assert [check.name for check in last] == ["peer-exclusion"]
    assert re.fullmatch(r"the proof was not finished: box-b did not say within \ds that it .*", last[0].text)
    assert [check.text for check in answer.checks[-3:]] == ["not tried, because peer-exclusion was not done"] * 3
    assert "it is not proved" in answer.verdict
    assert [name for name in os.listdir(shared.folder.inboxes) if "box-b" not in name] == []


@pytest.mark.parametrize(("kind", "said"), [(Failing, "Input/output error"), (Buggy, "RuntimeError: boom")])
def test_a_half_that_fails_on_one_box_is_named_on_both_and_the_other_steps_go_on(
    shared: World, kind: type[FlockManager], said: str
) -> None:
    answer = both(shared, {"box-b": kind("nfs4 srv:/x")})
    found = by_name(answer)
    assert faults(answer) == ["peer-exclusion", "peer-append", "peer-death"]
    assert found["peer-exclusion"].text == f"the proof was not finished: on box-b, {said}"
    assert re.match(rf"the proof was not finished: on box-b, (the append failed: )?{said}", found["peer-append"].text)
    assert found["peer-rename"].status == OK
    assert "it is not proved" in answer.verdict


def test_a_box_without_a_lock_manager_is_named_and_what_needs_no_lock_is_proved(
    shared: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {host: place_of(shared, host, machine) for host, machine in BOXES.items()}
    places["box-b"].box.mountinfo_path = "/nonexistent"
    runs = Runs()
    for host, place in places.items():
        runs.start(host, place)
    answer = runs.end()["box-a"]
    found = by_name(answer)
    assert faults(answer) == ["peer-lock-manager"]
    assert "box-b has none that it can tell (a mount that cannot be told)" in found["peer-lock-manager"].text
    assert found["peer-append"] == Check("peer-append", SKIPPED, "box-b has no lock manager (see peer-lock-manager)")
    assert found["peer-rename"].status == OK


class Stale:
    """A box that goes on reading what it read first at a path, ``times`` times over, as a stale look-up does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: str, leaf: str, times: int) -> None:
        self._open = peer_files._open
        self._host, self._leaf, self._left = host, leaf, times
        self._text = b""
        monkeypatch.setattr(peer_files, "_open", self)

    def __call__(self, pair: Pair, path: str) -> int:
        fd = self._open(pair, path)
        if pair.mine.host == self._host and os.path.basename(path) == self._leaf and self._left:
            if self._text:
                self._left -= 1
                os.close(fd)
                fd = os.memfd_create("old")
                os.write(fd, self._text)
            else:
                self._text = os.read(fd, 1 << 16)
            os.lseek(fd, 0, os.SEEK_SET)
        return fd


def test_a_box_that_reads_an_old_text_after_a_rename_is_named(shared: World, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "peer-rename")
    Stale(monkeypatch, "box-b", "text", 3)
    answer = both(shared)
    assert by_name(answer)["peer-rename"].text == (
        "what one box renames is not there for the other at once: box-b read an old text, or none, after 3 of 8 renames"
    )
    assert by_name(answer)["peer-rename"].remedy.startswith("mount it on both boxes without nocto")
    assert "do NOT" in answer.verdict


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_a_name_that_was_asked_for_before_and_leads_nowhere_is_a_fault(
    shared: World, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def opened(path: str, flags: int = os.O_RDONLY) -> int:
        if "/name-" in path:
            raise OSError(number, os.strerror(number))
        return os.open(path, flags)

    only(monkeypatch, "peer-rename")
    monkeypatch.setattr(peer_files, "open_regular", opened)
    text = by_name(both(shared))["peer-rename"].text
    assert "box-a did not find 3 of 3 names that it had asked for before" in text
    assert "box-b did not find 3 of 3 names" in text


def test_a_file_that_is_stale_once_is_opened_again(shared: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[int, str]] = set()

    def opened(path: str, flags: int = os.O_RDONLY) -> int:
        if (threading.get_ident(), path) not in seen:
            seen.add((threading.get_ident(), path))
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return os.open(path, flags)

    only(monkeypatch, "peer-rename")
    monkeypatch.setattr(peer_files, "open_regular", opened)
    assert faults(both(shared)) == []
    assert seen


def test_a_line_that_the_other_box_does_not_see_at_once_is_a_fault(
    shared: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "peer-append")
    Stale(monkeypatch, "box-b", "mail.jsonl", 2)
    answer = both(shared)
    assert by_name(answer)["peer-append"].text == (
        "a line that one box had appended was not there for the other at once: of 5, box-b 2"
    )


def test_the_names_that_a_side_asks_for_are_asked_for_before_they_are_made(
    shared: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []
    lexists = os.path.lexists

    def looked(path: str) -> bool:
        there = lexists(path)
        if "/name-" in path:
            asked.append((os.path.basename(path), there))
        return there

    only(monkeypatch, "peer-rename")
    monkeypatch.setattr(os.path, "lexists", looked)
    both(shared)
    assert sorted(asked) == [(f"name-{side}-{number}", False) for side in (0, 1) for number in range(3)]


def test_a_mount_that_hangs_is_a_fault_within_the_bound_and_the_rest_is_skipped(shared: World) -> None:
    let_go = threading.Event()

    class Hanging(FlockManager):
        def hold(self, path: str, exclusive: bool, bound_s: float) -> Any:
            let_go.wait(30)
            return super().hold(path, exclusive, bound_s)

    runs = Runs()
    runs.start("box-b", place_of(shared, "box-b", B))
    began = time.monotonic()
    answer = peer.run(place_of(shared, "box-a", A, Hanging("nfs4 srv:/x")), [], nobody, nobody, 20, hang_s=1)
    assert time.monotonic() - began < 10
    let_go.set()
    other = runs.end()["box-b"]
    assert faults(answer) == ["peer-exclusion"]
    assert by_name(answer)["peer-exclusion"].text.startswith("it did not go on for 1s: the file system may not answer")
    assert by_name(answer)["peer-death"].status == SKIPPED
    assert "it is not proved" in answer.verdict
    assert by_name(other)["peer-exclusion"].text == "the proof was not finished: the run on box-a has ended"
    wait_for(lambda: [] if os.listdir(shared.folder.inboxes) else ["clean"])


def test_a_judge_that_fails_by_a_bug_is_its_own_fault(shared: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(*given: object) -> Verdict:
        raise RuntimeError("boom")

    only(monkeypatch, "peer-rename", "peer-append")
    monkeypatch.setattr(peer, "STEPS", [replace(peer.STEPS[0], judge=judge), peer.STEPS[1]])
    answer = both(shared)
    assert faults(answer) == ["peer-append"]
    assert by_name(answer)["peer-append"].text == "the check itself failed: RuntimeError: boom"
    assert "it is not proved" in answer.verdict


def test_a_search_that_fails_by_a_bug_says_so_and_skips_the_rest(
    shared: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet(*given: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(rendezvous.Meeting, "meet", meet)
    answer = peer.run(place_of(shared, "box-a", A), [], nobody, nobody, 1)
    assert answer.checks[0].text == "the check itself failed: RuntimeError: boom"
    assert answer.checks[-1] == Check("peer-death", SKIPPED, "not tried, because peer-found was not done")
    assert os.listdir(shared.folder.inboxes) == []


def test_a_folder_that_cannot_be_written_is_a_fault_of_the_search(
    shared: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Board, kind: str, **what: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Board, "post", refused)
    answer = peer.run(place_of(shared, "box-a", A), [], nobody, nobody, 1)
    assert answer.checks[0].text == "the proof was not finished: Read-only file system"
    assert answer.verdict.startswith("verdict: nothing is proved: ")


def test_where_there_is_no_folder_nothing_is_tried_and_nothing_made(world: World) -> None:
    answer = peer.run(place_of(world, "box-a", A), [], nobody, nobody, 1)
    assert {check.status for check in answer.checks} == {SKIPPED}
    assert answer.verdict == "verdict: nothing is proved: there is no comm folder (see folder)"
    assert not world.home.exists()


@pytest.fixture
def parties(shared: World) -> tuple[Party, Party]:
    first, second = (
        party(shared, host, machine, Board(shared.folder.inboxes, host, Pulse())) for host, machine in BOXES.items()
    )
    return first, second


LABELS = ("box-a", "box-b")


def test_boxes_that_go_by_one_name_are_told_what_to_change(parties: tuple[Party, Party]) -> None:
    first, second = (replace(one, boot=boot) for one, boot in zip(parties, ("1", "2"), strict=True))
    clients = (replace(first, client="pc  "), replace(second, client="pc  x"))
    assert peer_mounts.names(clients, LABELS).status == OK
    machine = peer_mounts.names((first, replace(second, machine=first.machine)), LABELS)
    assert f"both boxes have the machine id {A}" in machine.text
    assert machine.remedy.startswith("give box-b one of its own, as root: rm /etc/machine-id")
    host = peer_mounts.names((first, replace(second, host="box-a")), LABELS)
    assert "both boxes go by the host name box-a" in host.text
    client = peer_mounts.names((replace(first, client="pc  "), replace(second, client="pc  ")), LABELS)
    assert client.text.startswith("both boxes' NFS clients go by one name (pc)")
    on_disk = [replace(one, client="pc  ", fstype="ext4") for one in (first, second)]
    assert peer_mounts.names(on_disk, LABELS).status == OK


def test_two_that_run_on_one_kernel_are_told_that_it_says_nothing_of_two(parties: tuple[Party, Party]) -> None:
    text = peer_mounts.names(parties, LABELS).text
    assert text == f"box-a is machine {A}, box-b is {B}; both run on one kernel, so this says nothing of two kernels"
    assert "kernel" not in peer_mounts.names((parties[0], replace(parties[1], boot="other")), LABELS).text


def test_two_boxes_of_one_host_name_are_told_apart_by_their_machines(shared: World) -> None:
    runs = Runs()
    for machine in (A, B):
        runs.start(machine, place_of(shared, "box", machine))
    answer = runs.end()[A]
    assert faults(answer) == ["peer-names"]
    assert "box (aaaaaaaa)" in answer.verdict
    assert "box (bbbbbbbb)" in answer.verdict


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (
            {"fstype": "nfs4", "source": "srv:/x", "point": "/home", "lock_manager": f"none@{B}"},
            "on box-b mount srv:/x on /home with vers=4.2,local_lock=none",
        ),
        (
            {"fstype": "nfs", "source": "srv:/x", "point": "/home", "lock_manager": f"none@{B}"},
            "on box-b mount srv:/x on /home with vers=4.2,local_lock=none",
        ),
        (
            {"fstype": "xfs", "source": "/dev/sda1", "lock_manager": f"local {B}"},
            "on box-b, whose own disk it is on, mount the export as the other box does, and use that",
        ),
        (
            {"fstype": "fuse.sshfs", "source": "s:", "lock_manager": f"none@{B}"},
            "on box-b put the folder on an NFS mount with vers=4.2,local_lock=none, not on fuse.sshfs",
        ),
        (
            {"source": "10.0.0.1:/x", "lock_manager": "nfs4 10.0.0.1:/x"},
            "name server and export alike on both: on box-b mount srv:/x as box-a does",
        ),
        ({}, "let one box alone file into this folder, until the locks of nfs4 srv:/x work"),
    ],
)
def test_the_remedy_says_what_to_mount_how(parties: tuple[Party, Party], change: dict[str, str], remedy: str) -> None:
    two = (parties[0], replace(parties[1], **change))  # type: ignore[arg-type]
    assert peer_mounts.mounting(two, LABELS) == remedy
    verdict = peer_mounts.lock_managers(two, LABELS)
    assert verdict == (Verdict(FAULT, verdict.text, remedy) if change else Verdict(OK, "nfs4 srv:/x on both"))


def test_a_box_without_a_machine_id_shares_a_lock_manager_with_nobody(parties: tuple[Party, Party]) -> None:
    two = [replace(one, lock_manager="none") for one in parties]
    assert peer_mounts.lock_managers(two, LABELS).status == FAULT


GOOD_HOLD = {"beside": False, "reader_beside": False, "freed": True, "shared": True, "writer": False}
GOOD_COUNTS = {"holds": 50, "waited": 20, "overlaps": 0}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"beside": True}, "box-b got the lock while box-a held it"),
        ({"reader_beside": True}, "box-b got it for reading while box-a held it for writing"),
        ({"writer": True}, "box-b got it for writing while box-a held it for reading"),
        ({"freed": False}, "box-b did not get it within 10s, though box-a had released it"),
        ({"shared": False}, "box-b did not get it for reading beside box-a, which read"),
        ({"overlaps": 1}, "of 100 holds by both 1 began while the other box was in one"),
    ],
)
def test_each_way_in_which_a_lock_fails_is_a_fault(change: dict[str, Any], text: str) -> None:
    good = {**GOOD_HOLD, **GOOD_COUNTS}
    assert peer_locks.judge_exclusion([good, good], LABELS, "mend it").status == OK
    verdict = peer_locks.judge_exclusion([good, {**good, **change}], LABELS, "mend it")
    assert verdict == Verdict(FAULT, f"the lock does not do its work between them: {text}", "mend it")


@pytest.mark.parametrize("change", [{"waited": 4}, {"holds": 0}])
def test_too_few_meetings_at_the_lock_prove_nothing(change: dict[str, int]) -> None:
    few = {**GOOD_HOLD, **GOOD_COUNTS, "waited": 5}
    with pytest.raises(NotProved, match="hardly met at the lock"):
        peer_locks.judge_exclusion([few, {**few, **change}], LABELS, "")


def test_a_killed_holders_lock_that_stays_held_is_a_fault() -> None:
    good = {"held": True, "beside": False, "freed": True}
    assert peer_locks.judge_death([good, good], LABELS, "").status == OK
    verdict = peer_locks.judge_death([{**good, "freed": False}, good], LABELS, "")
    assert verdict.text == "10s after its holder on box-b was killed, box-a had not got the lock"
    with pytest.raises(NotProved, match="the process on box-a did not get the lock"):
        peer_locks.judge_death([good, {**good, "held": False}], LABELS, "")
    with pytest.raises(NotProved, match="box-b got the lock while a process on box-a held it"):
        peer_locks.judge_death([good, {**good, "beside": True}], LABELS, "")


def line(side: int, number: int) -> bytes:
    return peer_files._line(side, peer_files.SEEN_LINES + number)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        (line(0, 0) + line(1, 0) + line(0, 1) + line(1, 1), {}),
        (line(0, 0) + line(0, 1) + line(1, 0) + line(1, 1), {"turns": 1}),
        (line(0, 0) + line(1, 0) + line(1, 1), {"lost": 1, "turns": 1}),
        (line(0, 0) + line(1, 0) + line(0, 1) + line(1, 1) + line(1, 1), {"strange": 1}),
        (line(0, 0) + line(1, 0) + line(0, 1) + line(1, 1)[:50], {"lost": 1, "strange": 1, "turns": 2}),
        (
            line(0, 0) + line(1, 0) + line(0, 1) + b"\0" * 7 + line(1, 1),
            {"lost": 1, "strange": 1, "nuls": 7, "turns": 2},
        ),
    ],
)
def test_lines_are_counted(text: bytes, counts: dict[str, int]) -> None:
    assert peer_files.counted_lines(text, (2, 2)) == {"lost": 0, "strange": 0, "nuls": 0, "turns": 3, **counts}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lost": 2}, "of 80 lines that both appended under the lock, 2 were lost"),
        ({"strange": 1}, "of 80 lines that both appended under the lock, 1 were torn or doubled"),
        ({"nuls": 9}, "of 80 lines that both appended under the lock, 9 NUL bytes stand between them"),
        ({"cut": 1}, "of 80 lines that both appended under the lock, 1 were found half written"),
        (
            {"overlaps": 1},
            "of 80 lines that both appended under the lock, 1 were appended while the other box appended",
        ),
    ],
)
def test_each_way_in_which_appends_fail_is_a_fault(change: dict[str, int], text: str) -> None:
    good = {"late": 0, "written": 40, "lost": 0, "strange": 0, "nuls": 0, "cut": 0, "overlaps": 0, "turns": 10}
    assert peer_files.judge_append([good, good], LABELS, "mend it").status == OK
    assert peer_files.judge_append([good, {**good, **change}], LABELS, "mend it") == Verdict(FAULT, text, "mend it")
    with pytest.raises(NotProved, match="hardly appended at the same time"):
        peer_files.judge_append([good, {**good, "turns": 9}], LABELS, "")


def test_a_message_is_read_once_it_is_whole_and_in_its_order(shared: World) -> None:
    writer, reader = (Board(shared.folder.inboxes, host, Pulse()) for host in BOXES)
    writer.post("hello", n=0)
    reader.look()
    [run] = reader.runs.values()
    second = f"{shared.folder.inboxes}/{writer.stem}.1"
    writer.post("word", n=1)
    writer.post("word", n=2)
    os.rename(second, second + ".tmp")
    reader.look()
    assert [message["n"] for message in run.messages] == [0]
    os.rename(second + ".tmp", second)
    reader.look()
    assert [message["n"] for message in run.messages] == [0, 1, 2]
    writer.sweep(writer.id)
    reader.look()
    assert run.gone
    assert os.listdir(shared.folder.inboxes) == []


def test_words_that_the_other_has_read_are_removed_and_those_of_the_meeting_stay(shared: World) -> None:
    board = Board(shared.folder.inboxes, "box-a", Pulse())
    board.post("hello")
    board.post("pair", to="x")
    board.keep()
    for _ in range(4):
        board.post("step")
    board.forget(4)
    assert sorted(name.rpartition(".")[2] for name in os.listdir(shared.folder.inboxes)) == ["0", "1", "4", "5"]
    board.forget(99)
    assert sorted(name.rpartition(".")[2] for name in os.listdir(shared.folder.inboxes)) == ["0", "1"]


def test_a_search_that_waits_changes_the_folder_so_that_no_client_lists_it_from_its_cache(shared: World) -> None:
    board = Board(shared.folder.inboxes, "box-a", Pulse())
    board.look()
    before = os.stat(shared.folder.inboxes).st_mtime_ns

    def changed() -> list[str]:
        board.look()
        return ["changed"] if os.stat(shared.folder.inboxes).st_mtime_ns > before else []

    wait_for(changed)
    assert os.listdir(shared.folder.inboxes) == []


def test_a_pulse_that_is_stopped_ends_the_next_pause() -> None:
    pulse = Pulse()
    pulse.pause(0.01)
    pulse.stop()
    with pytest.raises(Stopped):
        pulse.pause(60)


@pytest.fixture
def joined(shared: World) -> World:
    """A comm folder in which the doctor finds no fault, on either box."""
    done = shared.sotbus("a", "join", env=box_environ("box-a"))
    assert done.returncode == 0, done.stderr
    manager_record.establish(shared.folder, shared.box("box-a", A), replace=True)
    return shared


def box_environ(host: str) -> dict[str, str]:
    return {"SOT_SELF_HOST": host, "SOT_COMM_TEST_HOST": host, "TEST_MACHINE_ID": BOXES[host]}


@contextmanager
def started(world: World, host: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """The doctor of a box as a process of its own, which is ended after the test."""
    with subprocess.Popen(
        [sys.executable, str(ENTRY), "doctor", *words],
        cwd=world.base,
        env=world.environ(box_environ(host)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def peer_files_in(world: World) -> list[str]:
    return [name for name in os.listdir(world.folder.inboxes) if name.startswith(PEER_FILES)]


def test_the_command_on_two_boxes_says_the_same_and_ends_with_the_verdict(joined: World) -> None:
    with started(joined, "box-a", "--probe", "--peer") as a, started(joined, "box-b", "--peer", "--json") as b:
        shown, told = a.communicate(timeout=120)
        listed, told_too = b.communicate(timeout=120)
    rows = json.loads(listed)
    assert [row["name"] for row in rows][-len(peer.NAMES) :] == list(peer.NAMES)
    assert [row["name"] for row in rows][-len(peer.NAMES) - 1] == "probe-clock"
    assert [(row["name"], row["text"]) for row in rows if row["status"] == FAULT] == []
    assert (a.returncode, b.returncode) == (0, 0)
    lines = shown.decode().splitlines()
    for row in rows[-len(peer.NAMES) :]:
        assert any(re.fullmatch(rf"  ok +{row['name']} +{re.escape(row['text'])}", line) for line in lines)
    assert re.fullmatch(r"verdict: box-[ab] and box-[ab] may share this folder: .*", lines[-1])
    assert len(told.decode().splitlines()) == 2
    assert told_too.decode().splitlines()[-1] == lines[-1]
    for text, other in ((told, "box-b"), (told_too, "box-a")):
        waiting, found = text.decode().splitlines()[:2]
        assert waiting.startswith("sotbus doctor: waiting up to 60s for the other box; run on it now")
        assert found.startswith(f"sotbus doctor: found {other}")
    assert peer_files_in(joined) == []


def test_the_command_alone_is_exit_1_and_says_what_to_do(joined: World) -> None:
    with started(joined, "box-a", "--peer", "--wait", "0.2") as process:
        shown, told = process.communicate(timeout=120)
    assert process.returncode == 1
    lines = shown.decode().splitlines()
    assert lines[-1].startswith("verdict: nothing is proved: no other box came within 0.2s; run it on the other box")
    assert lines[-2].startswith("1 fault in ")
    assert told.decode().splitlines() == [
        "sotbus doctor: waiting up to 0.2s for the other box; run on it now, on this same comm folder: "
        "sotbus doctor --probe --peer"
    ]


def test_ctrl_c_while_it_waits_leaves_no_file(joined: World) -> None:
    with started(joined, "box-a", "--peer") as process:
        wait_for(lambda: peer_files_in(joined))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert peer_files_in(joined) == []


def test_ctrl_c_in_the_middle_ends_both_runs_and_leaves_no_file_and_no_process(joined: World) -> None:
    with started(joined, "box-a", "--peer") as a, started(joined, "box-b", "--peer") as b:
        for process in (a, b):
            assert process.stderr is not None
            told = [process.stderr.readline() for _ in range(2)]
            assert told[1].startswith(b"sotbus doctor: found box-")
        a.send_signal(signal.SIGINT)
        a.communicate(timeout=60)
        shown, _ = b.communicate(timeout=120)
    assert (a.returncode, b.returncode) == (130, 1)
    text = shown.decode()
    assert re.search(r"fault +peer-exclusion +the proof was not finished: the run on box-a has ended", text)
    assert text.splitlines()[-1].startswith("verdict: it is not proved that box-")
    assert peer_files_in(joined) == []
    assert working_on(joined) == []


def working_on(world: World) -> list[str]:
    """The pids of processes of the probe that work in this world."""
    found = []
    for entry in os.scandir("/proc"):
        try:
            environ = Path(entry.path, "environ").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if f"SOT_COMM_HOME={world.home}\0".encode() in environ:
            found.append(entry.name)
    return found


@pytest.mark.parametrize("words", [["--wait", "3"], ["--peer", "--wait", "0"], ["--peer", "--wait", "x"]])
def test_a_wait_that_makes_no_sense_is_a_usage_error(world: World, words: list[str]) -> None:
    done = world.run("doctor", *words, cwd=world.base)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--wait" in done.stderr
    assert not world.home.exists()


def test_without_peer_nobody_is_waited_for(joined: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "run", None)
    monkeypatch.setenv("SOT_COMM_HOME", str(joined.home))
    box = Box("box-a", "box-a", A, None, str(joined.mountinfo))
    with pytest.raises(UsageError, match="--wait"):
        run_doctor(["--wait", "3"], box)
    assert run_doctor(["--json"], box) == 0


def test_the_page_documents_every_name_of_the_peers_checks() -> None:
    documented = re.findall(r"^\| `(peer-[a-z-]+)` \|", DOCS.read_text(), flags=re.MULTILINE)
    assert documented == list(peer.NAMES)
