"""``sotbus doctor --probe`` proves a lock that excludes, and finds one that does not."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.faultfs import MountedFaultFS
from world import World

from sotbus.comm import manager_record
from sotbus.doctor import probe
from sotbus.doctor.check import FAULT, OK, SKIPPED, Check
from sotbus.doctor.place import Place

pytestmark = pytest.mark.faults

PROBES = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from world import World
from sotbus.doctor import probe
from sotbus.doctor.place import Place
world = World(Path(sys.argv[2]))
place = Place(world.folder, world.box(), plugins=lambda: "none")
real = probe.Probe.start
def start(self):
    real(self)
    print(*[worker.process.pid for worker in self.workers], flush=True)
    sys.stdin.readline()
probe.Probe.start = start
probe.run(place, lambda text: None)
"""


def made(world: World) -> Place:
    """A comm folder with its record, to be probed."""
    world.folder.ensure()
    box = world.box()
    manager_record.establish(world.folder, box, replace=True)
    return Place(world.folder, box, plugins=lambda: "none")


def probed(place: Place) -> dict[str, Check]:
    said: list[str] = []
    return {check.name: check for check in probe.run(place, said.append)}


def test_a_local_disk_is_proved_in_a_few_seconds_and_nothing_is_left_behind(world: World) -> None:
    place = made(world)
    started = time.monotonic()
    said: list[str] = []
    checks = probe.run(place, said.append)
    assert time.monotonic() - started < 30
    assert [check.name for check in checks] == [name for name, _, _ in probe.PROBES]
    assert [(check.name, check.text) for check in checks if check.status != OK] == []
    assert said == ["processes start", *(doing for _, doing, _ in probe.PROBES)]
    assert os.listdir(world.folder.inboxes) == []


def test_a_mount_that_grants_every_flock_fails_with_the_count(faultfs_granting: MountedFaultFS, tmp_path: Path) -> None:
    world = World(tmp_path, faultfs_granting.mount / "comm")
    checks = probed(made(world))
    assert checks["probe-exclusion"].status == FAULT
    assert checks["probe-exclusion"].text.startswith("the lock does not exclude: of ")
    assert "exclusive holds by 4 processes" in checks["probe-exclusion"].text
    assert checks["probe-readers"].status == FAULT
    assert checks["probe-death"].status == FAULT
    assert os.listdir(world.folder.inboxes) == []


def test_a_mount_with_the_kernels_own_flock_passes(faultfs: MountedFaultFS, tmp_path: Path) -> None:
    checks = probed(made(World(tmp_path, faultfs.mount / "comm")))
    assert [(check.name, check.text) for check in checks.values() if check.status != OK] == []


def test_processes_that_hardly_met_at_the_lock_have_proved_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "ROUNDS", 1)
    check = probed(made(world))["probe-exclusion"]
    assert check.status == FAULT
    assert check.text.startswith("nothing is proved: the processes hardly met at the lock (4 exclusive holds")


def test_a_line_that_is_found_half_written_under_the_lock_is_a_fault(world: World) -> None:
    place = made(world)
    with probe.Probe(place) as contest:
        contest.start()
        Path(contest.lines).write_bytes(b"torn by a writer that nobody excludes")
        verdict = contest.append()
    assert verdict.status == FAULT
    assert "1 were found half written" in verdict.text


def test_a_process_of_the_probe_that_dies_is_said_and_the_other_proofs_are_tried(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: probe.Probe) -> None:
        real(self)
        os.kill(self.workers[1].process.pid, signal.SIGKILL)
        self.workers[1].process.wait()

    real = probe.Probe.start
    monkeypatch.setattr(probe.Probe, "start", start)
    checks = probed(made(world))
    assert checks["probe-exclusion"].status == FAULT
    assert "has ended" in checks["probe-exclusion"].text
    assert checks["probe-death"].status == OK
    assert os.listdir(world.folder.inboxes) == []


def test_a_folder_that_is_not_there_is_not_probed_and_not_made(world: World) -> None:
    checks = probed(Place(world.folder, world.box(), plugins=lambda: "none"))
    assert {check.status for check in checks.values()} == {SKIPPED}
    assert not world.home.exists()


def test_the_processes_end_with_a_probe_that_is_killed(world: World) -> None:
    made(world)
    tests = str(Path(__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", PROBES, tests, str(world.base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        watched = [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(watched) == probe.PROCESSES
    for descriptor in watched:
        try:
            assert ended(descriptor)
        finally:
            os.close(descriptor)


def ended(pidfd: int) -> bool:
    """Whether a process ends within ten seconds (pidfd_open(2): readable at its end)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(10_000))


@pytest.mark.parametrize(
    ("spans", "count"),
    [
        ([], 0),
        ([(1, 2), (2, 3), (3, 4)], 0),
        ([(3, 4), (1, 2)], 0),
        ([(1, 3), (2, 4)], 1),
        ([(1, 10), (2, 3), (4, 5), (11, 12)], 2),
        ([(1, 3), (1, 3)], 1),
    ],
)
def test_overlaps_are_counted(spans: list[tuple[int, int]], count: int) -> None:
    assert probe.overlapping(spans) == count
