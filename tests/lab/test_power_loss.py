"""The plug is pulled in the middle of sends, joins and polls: whatever was acknowledged is there at the next boot."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lab import in_box_power
from lab.in_box_power import ASKER, READER
from lab.job import Died, Job, TooLate
from lab.power import PowerBox

pytestmark = pytest.mark.lab

ROUNDS, SLOW_ROUNDS = 10, 100
WORK_S = (0.3, 1.3)
"""When the plug is pulled: at a moment between these, after the work has begun; later where little was done."""

SENDERS = {"s0": READER, "s1": READER}
ENOUGH_LINES, ENOUGH_BATCHES = 15, 2
"""What a round with sends and polls acknowledges at least, however slow the machine is."""

ENOUGH_S = 180
"""How long that may take."""

MUTANT_ROUNDS = 3
"""Within how many rounds a mutant must be found; usual is one."""

JOINER = "joiner"
QUIET = 2
"""Of three rounds, the one without sends and polls."""

QUIET_JOINS, MANY = 4, 100_000
"""An even number: the last join is one whose inbox is there already."""

BATCHES_KEPT = 50


class Told:
    """What the host was told over all rounds, which is what must be there."""

    def __init__(self) -> None:
        self.filed: dict[str, dict[str, dict[str, int]]] = {}
        self.joined: dict[str, int] = {}
        self.shown: list[list[int]] = []

    def hear(self, number: int, jobs: dict[str, Job]) -> None:
        """Take in a round's notes, but the poller's batches."""
        for name, to in {**SENDERS, READER: ASKER}.items():
            serials = [note for note in jobs[name].notes if isinstance(note, int)]
            assert serials == list(range(len(serials)))
            self.filed.setdefault(to, {}).setdefault(name, {})[str(number)] = len(serials)
        self.joined |= dict(jobs[JOINER].notes[1:])

    def lines(self) -> int:
        return sum(count for senders in self.filed.values() for rounds in senders.values() for count in rounds.values())


def work_until_the_plug_is_pulled(power: PowerBox, told: Told, number: int, seconds: float, mutant: str) -> None:
    """All at once; every third time a few joins alone, then nothing, so that no other's sync is behind the last one."""
    quiet = number % 3 == QUIET
    box, how = power.box, {"number": number, "mutant": mutant}
    box.call(in_box_power.take_handles, names=[READER, *SENDERS], mutant=mutant)
    jobs = {
        READER: box.start(in_box_power.poll_on, **how),
        JOINER: box.start(in_box_power.join_on, count=QUIET_JOINS if quiet else MANY, **how),
        **{name: box.start(in_box_power.send_on, name=name, to=to, **how) for name, to in SENDERS.items()},
    }
    for job in jobs.values():
        assert job.note() == "ready"
    begun, shown_before = time.monotonic(), len(told.shown)
    end = begun + seconds
    for name, job in jobs.items():
        if name == JOINER or not quiet:
            job.send("go\n")
    poller = jobs[READER]

    def next_batch(bound_s: float) -> bool:
        """Whether the poller's next note was a batch, which then counts as shown."""
        match poller.note(bound_s):
            case {"shown": list(batch)}:
                told.shown.append(batch)
                return True
        return False

    def enough() -> bool:
        """Whether this round has said as much as `check_rounds` wants, also on a machine that is slow today."""
        if quiet:
            return len(jobs[JOINER].notes) > QUIET_JOINS
        filed = [sum(isinstance(note, int) for note in jobs[name].notes) for name in (*SENDERS, READER)]
        batches = len(told.shown) - shown_before
        return (
            len(jobs[JOINER].notes) > 2
            and all(filed[: len(SENDERS)])
            and sum(filed) >= ENOUGH_LINES
            and batches >= ENOUGH_BATCHES
        )

    while (left := end - time.monotonic()) > 0 or not enough():
        with suppress(TooLate):
            if next_batch(min(max(left, 0.1), 0.5)):
                poller.send("shown\n")
        assert not [job.result() for job in jobs.values() if job.ended]
        assert time.monotonic() - begun < ENOUGH_S, jobs
    power.pull_plug()
    with suppress(Died):
        while True:  # what had come by then and was not read
            next_batch(0)
    for job in jobs.values():
        with pytest.raises(Died, match="its box went down"):
            job.result(0)
    told.hear(number, jobs)


def rounds(disk: Path, count: int, mutant: str = "") -> tuple[Told, dict[str, Any]]:
    """Pull the plug so often, or until something is wrong; what was told, and what the last check found."""
    told, begun, again = Told(), time.monotonic(), []
    chance = random.Random(count)
    more = torn = 0
    with PowerBox(disk) as power:
        for number in range(count):
            work_until_the_plug_is_pulled(power, told, number, chance.uniform(*WORK_S), mutant)
            power.boot()
            shown = told.shown[-BATCHES_KEPT:]
            found: dict[str, Any] = power.box.call(
                in_box_power.check, filed=told.filed, joined=told.joined, shown=shown
            )
            again.append(found["again"])
            more, torn = found["more"], torn + found["torn"]
            if found["faults"]:
                break
    print(
        f"\n{number + 1} power losses in {time.monotonic() - begun:.0f} s: {told.lines()} lines acknowledged, {more} "
        f"more found, {torn} torn tails; {len(told.joined)} joins acknowledged; {len(told.shown)} batches shown, lines "
        f"shown again after each: {again}; {found['count']} faults {found['faults']}"
    )
    return told, found


def check_rounds(disk: Path, count: int) -> None:
    told, found = rounds(disk, count)
    assert not found["faults"]
    assert told.lines() > 10 * count
    assert len(told.joined) >= 2 * count
    assert len(told.shown) > count


def test_what_was_acknowledged_is_there_after_a_power_loss(lab_tools: None, tmp_path: Path) -> None:
    check_rounds(tmp_path / "disk", ROUNDS)


@pytest.mark.slow
def test_what_was_acknowledged_is_there_after_a_hundred_power_losses(lab_tools: None, tmp_path: Path) -> None:
    check_rounds(tmp_path / "disk", SLOW_ROUNDS)


def test_without_syncs_a_power_loss_takes_acknowledged_lines(lab_tools: None, tmp_path: Path) -> None:
    _, found = rounds(tmp_path / "disk", MUTANT_ROUNDS, "no_sync")
    assert [fault for fault in found["faults"] if fault.startswith(f"@{READER}: ") and fault.endswith("were filed")]


def test_the_registry_lock_of_a_box_that_lost_power_is_taken_over_at_the_next_boot(
    lab_tools: None, tmp_path: Path
) -> None:
    with PowerBox(tmp_path / "disk") as power:
        assert power.box.start(in_box_power.hold_registry_lock).note() == "held"
        power.pull_plug()
        power.boot()
        power.box.call(in_box_power.take_handles, names=["after"])
        found = power.box.call(in_box_power.check, filed={}, joined={}, shown=[])
        assert not found["faults"]
