"""The NFS server restarts, or stays away: what is said of the mail that was under way, and what ends, and when."""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from lab import in_box_faults, server
from lab.in_box_faults import DONE, FAILED, Answer, contradictions, unknown
from lab.job import Job
from lab.lab import Lab

from sotbus.comm.settings import MOUNT_WAIT_S, TOUCH_WAIT_S
from sotbus.mount_limits import DISK_S

pytestmark = pytest.mark.lab

EACH_SENDS = 20
"""How many lines each writer files before the restart, and twice as many after those."""

EACH_JOINS = 4
"""The same of joins."""

WAIT_S = 0.5
"""Every wait for a lock, of the commands that hang."""

WITHIN_S = WAIT_S + TOUCH_WAIT_S + MOUNT_WAIT_S
"""When such a command ends (sotbus.cli.watchdog)."""

SLACK_S = 15.0
"""How much later than its bound something may end, on a machine that is slow or stands still for seconds."""

BACK_S = 300.0
"""Within this a client has found its server again: it asks the less often, the longer the server was away."""

PATIENCE_S = 1.0
"""The deadline that a program gives its send, and its leave."""

GRACE_S = WAIT_S + DISK_S
"""How much longer a cancelled send waits for the answer of work that has begun (sotbus.mount_limits)."""

AT_ONCE_S = 3.0
"""More than a send and a poll on a disk usually take, and less than anything that waits for the mount."""

WAITS = dict.fromkeys(("SOT_INBOX_LOCK_WAIT_SECS", "SOT_INBOX_READ_WAIT_SECS", "SOT_LOCK_WAIT_SECS"), f"{WAIT_S:g}")

HANGING = {"send": ["@bob", "hanging to bob"], "poll": [], "join": ["--name", "ada"], "list": []}
LATER = {"send": ["@bob", "later to bob"], "poll": [], "join": ["--name", "adam"], "list": []}
"""Commands and their words: while the server is away, and when it is back."""


def contents(lab: Lab, home: str) -> dict[str, str]:
    """Every inbox as the server has it."""
    folder = f"{home.replace('/nfs', server.EXPORT)}/inbox"
    found: dict[str, str] = lab.server.call(in_box_faults.contents, folder=folder, ending=".jsonl")
    return found


def registry(lab: Lab, home: str) -> list[str]:
    """The handles in the registry as the server has it."""
    text = lab.server.call("open(path).read()", path=f"{home.replace('/nfs', server.EXPORT)}/registry.json")
    return list(json.loads(text)["agents"])


def said(answers: Sequence[Answer]) -> list[str]:
    return [one["said"] for one in answers]


def count(job: Job, at_least: int) -> int:
    """Wait until a job has noted a number of that size."""
    while (number := int(job.note())) < at_least:
        pass
    return number


def test_every_answer_is_true_when_the_server_restarts_under_load(lab: Lab, shared: str) -> None:
    a, b = lab.box("a"), lab.box("b")
    recipients = ["carol", "carl"]
    assert said(b.call(in_box_faults.join, home=shared, names=["bert", "bob", *recipients])) == [DONE] * 4
    assert said(a.call(in_box_faults.join, home=shared, names=["alice", "adam"])) == [DONE] * 2
    writers = {
        name: box.start(in_box_faults.send_until_told, home=shared, name=name, to=recipients)
        for box, name in ((a, "alice"), (a, "adam"), (b, "bert"), (b, "bob"))
    }
    joiners = {
        name: box.start(in_box_faults.register_until_told, home=shared, name=name)
        for box, name in ((a, "ada"), (b, "bea"))
    }
    before = {name: count(job, EACH_SENDS) for name, job in writers.items()}
    joined = {name: count(job, EACH_JOINS) for name, job in joiners.items()}
    lab.restart_server()
    for name, job in writers.items():
        count(job, before[name] + 2 * EACH_SENDS)
    for name, job in joiners.items():
        count(job, joined[name] + 2 * EACH_JOINS)
    for job in (*writers.values(), *joiners.values()):
        job.send("\n")
    answers = [one for job in writers.values() for one in job.result()]
    changes = [one for job in joiners.values() for one in job.result()]

    found = contents(lab, shared)
    for to in recipients:
        assert contradictions(found[to], [one for one in answers if one["to"] == to]) == []
    listed = ["bert", "bob", *recipients, "alice", "adam"]
    for one in changes:
        if one["said"] == DONE:
            handle = one["text"]
            listed.remove(handle[1:]) if handle.startswith("-") else listed.append(handle)
    assert sorted(registry(lab, shared)) == sorted(listed)


@dataclass
class Ended:
    """A command that hung. ``seconds`` is the most that it took."""

    seconds: float
    status: int
    out: str
    err: str


@dataclass
class Hang:
    """What was seen while the server was away, and after; ``content`` is bob's inbox at last."""

    commands: dict[str, Ended]
    buses: dict[str, Any]
    patient: dict[str, Any]
    later: dict[str, Ended]
    content: str
    agents: list[str]


@pytest.fixture(scope="module")
def hang(booted_lab: Lab) -> Hang:
    """Box a works in a folder whose server goes away, by commands and as a program; then the server is back."""
    lab, a, b = booted_lab, booted_lab.box("a"), booted_lab.box("b")
    home = lab.new_folder()
    environ = {"SOT_COMM_HOME": home, "SOT_COMM_SELF_FILE": f"{home}/self/pin-alice.txt", **WAITS}

    def sotbus(name: str, words: Sequence[str]) -> Job:
        return a.spawn([sys.executable, "-m", "sotbus", name, *words], env=environ, cwd="/root")

    def ended(job: Job, begun: float) -> Ended:
        done = job.completed(120)
        return Ended(time.monotonic() - begun, done.returncode, done.stdout, done.stderr)

    try:
        assert said(b.call(in_box_faults.join, home=home, names=["bob"])) == [DONE]
        assert sotbus("join", ["--name", "alice"]).completed().returncode == 0
        assert said(b.call(in_box_faults.send, home=home, name="bob", to=["alice"], texts=["mail to"])) == [DONE]
        program = a.start(in_box_faults.two_buses, far=home, near="/root/near", patience_s=PATIENCE_S)
        assert program.note() == "open"
        jobs = {
            name: a.start(in_box_faults.command_when_told, words=[name, *words], environ=environ, cwd="/root")
            for name, words in HANGING.items()
        }
        for job in jobs.values():
            assert job.note() == "ready"

        lab.stop_server()
        program.send("\n")
        begun = time.monotonic()
        for job in jobs.values():
            job.send("\n")
        commands = {name: ended(job, begun) for name, job in jobs.items()}
        buses = program.note(120)

        lab.start_server()
        lab.server.call(server.end_grace)
        patient = program.note(120)
        a.call("os.listdir(path)", path=home, timeout_s=BACK_S)
        program.result()
        later = {name: ended(sotbus(name, words), time.monotonic()) for name, words in LATER.items()}
        return Hang(commands, buses, patient, later, contents(lab, home)["bob"], registry(lab, home))
    finally:
        lab.tidy()


@pytest.mark.parametrize("name", HANGING)
def test_a_command_on_a_mount_that_hangs_ends_at_its_bound_and_says_so(hang: Hang, name: str) -> None:
    command = hang.commands[name]
    assert (command.status, command.out) == (1, "")
    whose, outcome = ("FAILED -> @bob: ", "nothing was sent") if name == "send" else ("FAILED: ", ".*")
    assert re.fullmatch(
        rf"{whose}the file system of /nfs/\S+ did not answer within {WITHIN_S:g}s; {outcome}\n"
        r"hint: its mount hangs: see whether the server is up and the network reaches it\n",
        command.err,
    )
    assert WITHIN_S <= command.seconds < WITHIN_S + SLACK_S


def test_what_was_said_to_have_failed_is_not_there_when_the_server_is_back(hang: Hang) -> None:
    texts = {"impatient to bob": FAILED, "patient to bob": FAILED, "hanging to bob": FAILED, "later to bob": DONE}
    answers = [unknown(text, "bob") for text in texts]
    for one in answers:
        one["said"], one["unknown"] = texts[one["text"]], "patient" in one["text"]
    assert contradictions(hang.content, answers) == []
    assert hang.agents == ["bob", "alice", "impatient", "patient", "adam"]


def test_every_command_works_when_the_server_is_back(hang: Hang) -> None:
    """And the mail that the poll which hung did not show is shown."""
    assert [command.status for command in hang.later.values()] == [0] * len(LATER)
    assert hang.later["send"].out == "  filed -> @bob\n"
    assert hang.later["poll"].out.endswith("[bob:bob] mail to alice\n")
    assert hang.later["join"].out.startswith("Joined sot-comm as @adam ")
    assert hang.later["list"].out.count(" live ") == len(hang.agents)


def test_a_programs_other_folder_is_served_at_once_while_a_mount_hangs(hang: Hang) -> None:
    turns = hang.buses["turns_s"]
    assert statistics.median(turns) < AT_ONCE_S
    assert max(turns) < PATIENCE_S + GRACE_S, "one waited as long as the shortest wait for the mount"


def test_a_programs_deadline_ends_a_send_and_a_leave_on_a_mount_that_hangs(hang: Hang) -> None:
    assert hang.buses["sending_cancelled"]
    assert PATIENCE_S + GRACE_S <= hang.buses["sending_s"] < PATIENCE_S + GRACE_S + SLACK_S
    assert hang.buses["leaving_s"] < PATIENCE_S + TOUCH_WAIT_S + DISK_S + SLACK_S


def test_a_programs_send_without_a_deadline_of_its_own_ends_at_the_bound_of_the_bus(hang: Hang) -> None:
    bound_s = WAIT_S + MOUNT_WAIT_S
    assert hang.patient["said"] == f"the file system did not answer within {bound_s:g}s; the outcome is unknown"
    assert bound_s <= hang.patient["seconds"] < bound_s + SLACK_S
