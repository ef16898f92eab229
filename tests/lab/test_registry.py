"""Two boxes that share a home change one registry: it is never torn or lost, read fresh, its lock never forced."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from lab import in_box_registry
from lab.in_box_sharing import Scenario, Seen, ask, on_server, refused, session, tell, three
from lab.job import Job
from lab.lab import Lab

pytestmark = pytest.mark.lab

DURATION_S = 60
CHANGERS = 2
"""Processes on each box that change the registry, each with three sessions."""

MUTANT_DURATION_S = 3
ROUNDS = 1000
"""Turns in which one box reads the other's value and writes the next."""

GIVE_UP_S = 15.0
"""How long a box waits for its turn: half of what a stale read would last, and much more than a slow change."""

MUTANT_ROUNDS = 100
MUTANTS = {"no_folder_open": ("is still read after", 3.0), "no_second_read": ("RegistryUnreadable", GIVE_UP_S)}
"""Of each mutant of the read its fault, and how long it waits for its turn: one that is to fault in another way waits
as long as the package does."""

MUTANT_TRIES = 3
"""How often a mutant works, at most, until it is found: the machine may stand still for as long as it works."""

SETTLE_S = 1.0
"""How long a reclaimer waits before it removes a dead holder's lock (sot-comm v1, Reclaim)."""

WAIT_S = 1
"""The bound of a join that shall fail, as SOT_LOCK_WAIT_SECS."""

SLACK_S = 15.0
"""What a machine that is slow, or stands still for seconds, may add to a bound."""


def change_for(lab: Lab, shared: str, duration_s: float, mutant: str = "") -> dict[str, Any]:
    """Changers on both boxes for so long; by name, what each did and found."""
    jobs = {
        f"{box}{number}": lab.box(box).start(
            in_box_registry.change_for, shared=shared, name=f"{box}{number}", duration_s=duration_s, mutant=mutant
        )
        for number in range(CHANGERS)
        for box in ("a", "b")
    }
    for job in jobs.values():
        assert job.note() == "ready"
    for job in jobs.values():
        job.send("go\n")
    return {name: job.result(timeout_s=duration_s + 60) for name, job in jobs.items()}


def faults_of(results: Iterable[dict[str, Any]]) -> list[str]:
    return [fault for one in results for fault in one["faults"]]


def met_by(results: Iterable[dict[str, Any]]) -> Counter[str]:
    """What all reads of the registry's file met: how many there were, how many found it empty, and errors by name."""
    met: Counter[str] = Counter()
    for one in results:
        met.update(one["met"])
    return met


def described(met: Counter[str]) -> str:
    errors = {name: count for name, count in met.items() if name not in ("reads", "empty")}
    return f"{met['reads']} reads of the file, {met['empty']} empty, errors met: {errors or 'none came'}"


def test_a_minute_of_changes_from_both_boxes_loses_and_tears_nothing(lab: Lab, shared: str) -> None:
    ask(session(lab.box("a"), shared, "maker"), "make_registry")
    readers = [lab.box(box).start(in_box_registry.read_until_told, shared=shared, name=f"r{box}") for box in ("a", "b")]
    path = on_server(f"{shared}/comm/registry.json")
    watcher = lab.server.start(in_box_registry.watch_file_until_told, path=path)
    for job in (*readers, watcher):
        assert job.note() == "ready"

    changed = change_for(lab, shared, DURATION_S)
    for job in (*readers, watcher):
        job.send("enough\n")
    read = [job.result() for job in readers]
    watched = watcher.result()

    done: Counter[str] = Counter()
    for one in changed.values():
        done.update(one["done"])
    print(
        f"\n{sum(done.values())} changes in {DURATION_S} s: {dict(done)}; longest "
        f"{max(one['longest_s'] for one in changed.values()):.2f} s; "
        f"{sum(one['held'] for one in changed.values())} times the lock was not free within its bound"
    )
    print(f"changers: {described(met_by(changed.values()))}")
    print(f"readers: {described(met_by(read))}")
    print(f"the server saw the file {watched['looks']} times, and no file {watched['missing']} times more")
    assert not faults_of([*changed.values(), *read, watched])
    assert {"join", "touch", "count", "leave"} == done.keys()
    for box in (lab.box("a"), lab.box("b")):
        models = {name: one["model"] for name, one in changed.items()}
        assert box.call(in_box_registry.read_changes, shared=shared, of=list(changed)) == models


def test_without_the_registry_lock_changes_are_lost(lab: Lab) -> None:
    for _ in range(MUTANT_TRIES):
        faults = faults_of(change_for(lab, lab.new_folder(), MUTANT_DURATION_S, "no_registry_lock").values())
        print(f"\n{len(faults)} faults told, the first: {faults[:1]}")
        if faults:
            break
    assert faults


def take_turns(lab: Lab, shared: str, rounds: int, give_up_s: float, mutant: str = "") -> list[dict[str, Any]]:
    """Both boxes in turn, the old files kept open; what each of them met and found."""
    boxes = (lab.box("a"), lab.box("b"))
    ask(session(boxes[0], shared, "maker"), "make_registry")
    jobs = [
        box.start(
            in_box_registry.take_turns, shared=shared, first=first, turns=rounds, give_up_s=give_up_s, mutant=mutant
        )
        for first, box in enumerate(boxes)
    ]
    for job in jobs:
        assert job.note() == "ready"
    for job in jobs:
        job.send("go\n")
    return [job.result(timeout_s=300) for job in jobs]


def test_a_thousand_rounds_in_turn_read_the_last_value_each_time(lab: Lab, shared: str) -> None:
    begun = time.monotonic()
    turns = take_turns(lab, shared, ROUNDS, GIVE_UP_S)
    took_s = time.monotonic() - begun
    print(
        f"\n{ROUNDS} rounds in {took_s:.1f} s, {took_s / ROUNDS * 1000:.0f} ms each, the longest "
        f"{max(one['longest_s'] for one in turns):.2f} s; {described(met_by(turns))}"
    )
    assert not faults_of(turns)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_the_read_is_not_fresh_or_not_good(lab: Lab, mutant: str) -> None:
    fault, give_up_s = MUTANTS[mutant]
    for _ in range(MUTANT_TRIES):
        faults = faults_of(take_turns(lab, lab.new_folder(), MUTANT_ROUNDS, give_up_s, mutant))
        print(f"\n{mutant}: {faults}")
        if fault in " ".join(faults):
            break
    assert fault in " ".join(faults)


def seen_of_a_new_entry(lab: Lab, shared: str) -> Seen:
    """B lists the handles, both keep the registry open; A takes a handle."""
    a, b, mutant = three(lab, shared, "new")
    ask(b, "join")
    assert ask(b, "handles") == ["watcher"]
    for one in (a, b):
        ask(one, "keep_open", "registry.json")
    ask(a, "join")
    return ask(mutant, "handles"), ask(b, "handles"), ["new", "watcher"]


def seen_of_a_change(lab: Lab, shared: str, *keepers: str) -> Seen:
    """B reads a value, and the keepers keep the registry open; A changes the value."""
    a, b, mutant = three(lab, shared, "changer")
    ask(a, "make_registry")
    assert ask(a, "count") == 1
    assert ask(b, "counter") == 1
    for keeper in keepers:
        ask({"a": a, "b": b}[keeper], "keep_open", "registry.json")
    assert ask(a, "count") == 2
    return tell(mutant, "counter").note().get("answer"), ask(b, "counter"), 2


def seen_over_an_old_descriptor_of_a(lab: Lab, shared: str) -> Seen:
    return seen_of_a_change(lab, shared, "a")


def seen_over_an_old_descriptor_of_b(lab: Lab, shared: str) -> Seen:
    return seen_of_a_change(lab, shared, "b")


def seen_of_a_new_registry(lab: Lab, shared: str) -> Seen:
    """B reads the registry where there is none; A makes it."""
    a, b, mutant = three(lab, shared, "maker")
    ask(a, "make_folder")
    assert "is missing" in refused(b, "handles")["text"]
    ask(a, "make_registry")
    return tell(mutant, "handles").note().get("answer"), ask(b, "handles"), []


@pytest.mark.parametrize(
    "scenario",
    [
        seen_of_a_new_entry,
        seen_over_an_old_descriptor_of_a,
        seen_over_an_old_descriptor_of_b,
        seen_of_a_new_registry,
    ],
)
def test_what_one_box_has_just_changed_the_other_reads_at_once(lab: Lab, shared: str, scenario: Scenario) -> None:
    by_the_mutant, by_b, expected = scenario(lab, shared)
    assert by_the_mutant != expected, "it would have been read without opening the folder first, too"
    assert by_b == expected


def hold_on_a(lab: Lab, shared: str) -> tuple[Job, str]:
    """A process of A that holds the registry lock, and the lock's record."""
    holder = session(lab.box("a"), shared, "holder")
    ask(holder, "join")
    return holder, ask(holder, "take_registry_lock")


def lock_of(lab: Lab, shared: str) -> object:
    """The lock file on the server: its inode and its text; None where there is none."""
    path = on_server(f"{shared}/comm/.registry.lock")
    return lab.server.call("(os.stat(path).st_ino, open(path).read()) if os.path.exists(path) else None", path=path)


def is_refused_by_name(said: dict[str, Any], shared: str, record: str, why: str) -> None:
    """The words of a join that found the lock held (facts 3.8), within its bound."""
    name, *_, pid, start = record.split(":")
    lock = re.escape(f"{shared}/comm/.registry.lock")
    assert re.fullmatch(
        rf"FAILED: registry lock {lock} is held by {name} pid {pid} start {start} \(\d+s old\): {why}\. "
        rf"If it is dead, run any comm command on {name}\.",
        said["text"],
    ), said
    assert said["refused"] == "RegistryLockFailed"
    assert WAIT_S <= said["took_s"] < WAIT_S + SLACK_S


def taken_by_b(lab: Lab, shared: str, record: str, mutant: str = "") -> bool:
    """Whether B's join takes A's lock; else it was refused by the name of the holder, and the lock stands."""
    before = lock_of(lab, shared)
    b = session(lab.box("b"), shared, "b", mutant, SOT_LOCK_WAIT_SECS=str(WAIT_S))
    said = tell(b, "join").note()
    if "answer" in said:
        return True
    is_refused_by_name(said, shared, record, "it is on another machine")
    assert lock_of(lab, shared) == before
    return False


def test_the_registry_lock_of_a_killed_process_is_reclaimed_on_its_own_box_alone(lab: Lab, shared: str) -> None:
    holder, record = hold_on_a(lab, shared)
    before = lock_of(lab, shared)
    a = session(lab.box("a"), shared, "reclaimer", SOT_LOCK_WAIT_SECS=str(WAIT_S))
    is_refused_by_name(refused(a, "join"), shared, record, "it is running")
    assert lock_of(lab, shared) == before

    holder.kill()
    holder.wait()
    assert not taken_by_b(lab, shared, record)
    said = tell(a, "join").note()
    assert said.get("answer") == "reclaimer", said
    assert SETTLE_S <= said["took_s"] < SETTLE_S + SLACK_S
    assert taken_by_b(lab, shared, record)
    assert ask(a, "handles") == ["b", "holder", "reclaimer"]
    print(f"\nreclaimed on its own box in {said['took_s']:.2f} s")


def test_a_box_that_believes_in_the_death_of_a_foreign_process_takes_its_lock(lab: Lab, shared: str) -> None:
    _, record = hold_on_a(lab, shared)
    assert taken_by_b(lab, shared, record, "foreign_death_believed")


def test_a_lock_from_before_a_reboot_is_proved_dead_by_the_rebooted_box_alone(lab: Lab, shared: str) -> None:
    _, record = hold_on_a(lab, shared)
    boot = lab.box("a").boot_id()
    assert boot in record
    lab.reboot("a")
    assert lab.box("a").boot_id() != boot

    assert not taken_by_b(lab, shared, record)
    a = session(lab.box("a"), shared, "reclaimer")
    assert ask(a, "verdict", record) == ["dead", "its machine has rebooted since"]
    ask(a, "join")
    assert taken_by_b(lab, shared, record)
    assert ask(a, "handles") == ["b", "holder", "reclaimer"]
