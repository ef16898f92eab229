"""A box that is cut from the NFS server in the middle of its work: what it says, and what it does to others' lines.

One cut serves all of these tests (`aftermath`), for each costs a lease. Box a has many processes, each of which writes
an inbox or a registry of its own and is stopped at another place. A is cut; b is refused, waits, and files two lines in
each inbox after the lease; a's link comes back, and each of its processes goes on. A test looks at one place.

No box borrows a file of the others: the server takes delegations back from a cut box only when its lease ends.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from lab import in_box_faults
from lab.in_box_faults import (
    CUT_BY_PATH,
    DONE,
    FAILED,
    FENCED,
    HALF,
    HALF_THERE,
    LOCKED,
    NO_FENCE,
    SYNCED,
    TO_RELEASE,
    TO_RENAME,
    TO_WRITE,
    WRITTEN,
    Answer,
    contradictions,
    unknown,
)
from lab.job import Job
from lab.lab import Lab
from lab.server import EXPORT

from sotbus.comm.settings import MOUNT_WAIT_S, TOUCH_WAIT_S

pytestmark = pytest.mark.lab

WHILE_CUT = "it goes on while it is cut"
AFTERWARDS = "it goes on when the link is back"
KILLED = "it is killed while it is cut"
KILLED_LATE = "it is killed when others have its lock"
KILLED_SYNCING = "it is killed in its fdatasync"
WATCHDOG = "its watchdog ends it in its fdatasync"

OWN = "own to"
LEASE_S = 20
"""Longer than the lab's usual one: every inbox is refused once within it, on a slow machine too."""

REFUSED_S = 0.1
SLACK_S = 10
"""What a machine that stands still for seconds may add to that, and still be well below the lease."""

BACK_S = 300
"""Within this a cut box is heard again: TCP sends the less often, the longer the cut was."""

COMMAND_WAITS = {"SOT_INBOX_LOCK_WAIT_SECS": "3"}
STATES = """
folder = "/proc/fs/nfsd/clients"
result = [line for client in os.listdir(folder) for line in open(f"{folder}/{client}/states")]
"""


@dataclass(frozen=True)
class Case:
    """Where a process of a's is stopped, and what becomes of it."""

    place: str
    then: str
    mutant: str = ""

    def __str__(self) -> str:
        return f"{self.place}, {self.then}" + (f", {self.mutant}" if self.mutant else "")

    @property
    def places(self) -> list[str]:
        """The stops. What must not be on the server before the cut is written just before it."""
        return [TO_WRITE, self.place] if self.place in (HALF, WRITTEN) else [self.place]


BEFORE = [Case(place, then) for place in (LOCKED, FENCED) for then in (WHILE_CUT, AFTERWARDS)]
DURING = [Case(place, then) for place in (HALF, HALF_THERE, WRITTEN) for then in (WHILE_CUT, AFTERWARDS)]
AFTER = [Case(SYNCED, then) for then in (WHILE_CUT, AFTERWARDS)]
MUTANTS = [Case(WRITTEN, then, mutant) for mutant in (NO_FENCE, CUT_BY_PATH) for then in (WHILE_CUT, AFTERWARDS)]
DEAD = [
    Case(FENCED, KILLED),
    Case(HALF_THERE, KILLED),
    Case(WRITTEN, KILLED),
    Case(WRITTEN, KILLED_LATE),
    Case(WRITTEN, KILLED_SYNCING),
    Case(WRITTEN, WATCHDOG),
]
APPENDS = BEFORE + DURING + AFTER + MUTANTS + DEAD
"""Every case."""

REGISTRY = [Case(place, then) for place in (TO_RENAME, TO_RELEASE) for then in (WHILE_CUT, AFTERWARDS)]
REGISTRY_DEAD = Case(TO_RENAME, KILLED)


@dataclass
class Append:
    """What was seen of one inbox. `standing` is what it held after b's answers, `content` after a's, `end` at last."""

    to: str
    job: Job
    refused: Answer
    others: list[Answer]
    ended_while_cut: bool
    standing: str
    content: str
    again: list[Answer]
    end: str

    @property
    def own(self) -> Answer:
        found: Answer = self.job.result()
        return found

    @property
    def own_at_most_once(self) -> Answer:
        """The answer of a sender that gave none."""
        return unknown(f"{OWN} {self.to}", self.to)


@dataclass
class RegistryWrite:
    """What was seen of one registry: b's join while a held the lock, a's own, the joins after it, who is in it."""

    job: Job
    refused: Answer
    ended_while_cut: bool
    later: list[Answer]
    text: str


class Cut:
    """The scenario, step by step."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.a, self.b = lab, lab.box("a"), lab.box("b")
        self.home = lab.new_folder()
        self.inboxes = {case: f"inbox-{number}" for number, case in enumerate(APPENDS)}
        self.homes = {case: lab.new_folder() for case in [*REGISTRY, REGISTRY_DEAD]}
        self.jobs: dict[Case, Job] = {}

    def run(self) -> tuple[dict[Case, Append], dict[Case, RegistryWrite]]:
        homes = list(self.homes.values())
        self.b.call(in_box_faults.join, home=self.home, names=["bob", *self.inboxes.values()])
        self.a.call(in_box_faults.join, home=self.home, names=["alice"])
        first = self.send("bob", "first to")
        self.stop_all()

        self.lab.cut("a")
        self.assert_unwritten()
        self.let_go(WHILE_CUT, KILLED_SYNCING, WATCHDOG)
        self.kill(KILLED)
        refused = self.send("bob", "refused to", wait_s=REFUSED_S)
        filed = [*self.send("bob", "one to", wait_s=2 * LEASE_S), *self.send("bob", "two to")]
        not_joined = self.b.call(in_box_faults.join_each, homes=homes, name="bob", wait_s=REFUSED_S)
        self.kill(KILLED_LATE, KILLED_SYNCING)
        self.wait_for_watchdog()
        standing = self.contents()
        ended = {case for case, job in self.jobs.items() if job.ended}

        self.lab.mend("a")
        for case, job in self.jobs.items():
            if case.then != AFTERWARDS:
                job.wait(BACK_S)
        self.let_go(AFTERWARDS)
        for job in self.jobs.values():
            job.wait(BACK_S)
        content = self.contents()
        again = [*self.send("alice", "again to"), *self.send("alice", "and again to")]
        end = self.contents()
        later = self.a.call(in_box_faults.join, home=self.homes[REGISTRY_DEAD], names=["anna"])
        joined = self.b.call(in_box_faults.join_each, homes=homes, name="bob", wait_s=5)

        def of(answers: Sequence[Answer], to: str) -> list[Answer]:
            return [one for one in answers if one["to"] == to]

        appends = {
            case: Append(
                to=to,
                job=self.jobs[case],
                refused=of(refused, to)[0],
                others=of([*first, *refused, *filed], to),
                ended_while_cut=case in ended,
                standing=standing[to],
                content=content[to],
                again=of(again, to),
                end=end[to],
            )
            for case, to in self.inboxes.items()
        }
        writes = {
            case: RegistryWrite(
                job=self.jobs[case],
                refused=not_joined[number],
                ended_while_cut=case in ended,
                later=[*(later if case == REGISTRY_DEAD else []), joined[number]],
                text=self.lab.server.call("open(path).read()", path=on_server(f"{home}/registry.json")),
            )
            for number, (case, home) in enumerate(self.homes.items())
        }
        return appends, writes

    def stop_all(self) -> None:
        """Each process of a's at its place; those with lines that are nowhere else get there last, all at once."""
        for case, home in self.homes.items():
            self.jobs[case] = self.a.start(in_box_faults.join_stopping, home=home, name="alice", place=case.place)
        for case, to in self.inboxes.items():
            who = {"home": self.home, "name": "alice", "places": case.places}
            if case.then == WATCHDOG:
                words = ["send", f"@{to}", OWN, to]
                job = self.a.start(in_box_faults.command_stopping, words=words, waits=COMMAND_WAITS, **who)
            else:
                job = self.a.start(in_box_faults.send_stopping, to=to, text=OWN, mutant=case.mutant, **who)
            self.jobs[case] = job
        for case, job in self.jobs.items():
            assert job.note() == case.places[0]
        two = [case for case in self.jobs if len(case.places) == 2]
        for case in two:
            self.jobs[case].send("\n")
        for case in two:
            assert self.jobs[case].note() == case.places[1]

    def assert_unwritten(self) -> None:
        """What is to be in a's memory alone is not on the server: else this would show nothing."""
        for case, content in zip(self.inboxes, self.contents().values(), strict=True):
            assert ('"from":"alice"' in content) == (case.place in (HALF_THERE, SYNCED)), case

    def let_go(self, *then: str) -> None:
        for case, job in self.jobs.items():
            if case.then in then:
                job.send("\n")

    def kill(self, *then: str) -> None:
        for case, job in self.jobs.items():
            if case.then in then:
                job.kill()

    def wait_for_watchdog(self) -> None:
        (command,) = (job for case, job in self.jobs.items() if case.then == WATCHDOG)
        deadline = time.monotonic() + 60
        while b"did not answer" not in command.err:
            assert time.monotonic() < deadline, command.err
            time.sleep(0.05)

    def send(self, name: str, text: str, wait_s: float = 2) -> list[Answer]:
        """From b, or from alice on a, to every inbox."""
        box = self.a if name == "alice" else self.b
        to = list(self.inboxes.values())
        answers: list[Answer] = box.call(
            in_box_faults.send, home=self.home, name=name, to=to, texts=[text], wait_s=wait_s, timeout_s=wait_s + 120
        )
        return answers

    def contents(self) -> dict[str, str]:
        """Every inbox as the server has it, in the order of the cases."""
        found = self.lab.server.call(in_box_faults.contents, folder=on_server(f"{self.home}/inbox"), ending=".jsonl")
        return {to: found[to] for to in self.inboxes.values()}


def on_server(path: str) -> str:
    return EXPORT + path.removeprefix("/nfs")


Aftermath = tuple[dict[Case, Append], dict[Case, RegistryWrite]]


@pytest.fixture(scope="module")
def aftermath(lab_tools: None) -> Aftermath:
    """What was seen, of every case, in a lab of its own."""
    with Lab(lease_s=LEASE_S) as own:
        return Cut(own).run()


@pytest.fixture
def seen(aftermath: Aftermath, case: Case) -> Append:
    return aftermath[0][case]


@pytest.fixture
def write(aftermath: Aftermath, case: Case) -> RegistryWrite:
    return aftermath[1][case]


def each(*cases: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=str)


@each(*BEFORE, *DURING, *AFTER, *DEAD)
def test_another_box_waits_its_bound_and_after_the_lease_files_two_lines(seen: Append) -> None:
    assert seen.refused["kind"] == "InboxLockHeld"
    assert seen.refused["reason"].endswith(f"was held for {REFUSED_S:g}s — nothing was appended")
    assert seen.refused["seconds"] < REFUSED_S + SLACK_S
    assert [one["said"] for one in seen.others] == [DONE, FAILED, DONE, DONE]
    assert contradictions(seen.standing, [*seen.others, seen.own_at_most_once]) == []


@each(*BEFORE, *DURING, *AFTER)
def test_what_others_filed_stands_and_the_answer_is_true(seen: Append) -> None:
    assert contradictions(seen.content, [*seen.others, seen.own], seen.standing) == []


@each(*(case for case in BEFORE if case.place == LOCKED))
def test_a_box_that_had_not_opened_the_inbox_files_its_line_after_the_others(seen: Append) -> None:
    """It has lost the lock file's lock and knows nothing of it; the one on the inbox itself keeps its append apart."""
    assert seen.own["said"] == DONE
    assert seen.content.startswith(seen.standing)
    assert seen.content.count(seen.own["text"], len(seen.standing)) == 1


@each(*(case for case in BEFORE if case.place == FENCED))
def test_a_box_that_had_written_nothing_says_failed_and_nothing_of_it_is_there(seen: Append) -> None:
    assert (seen.own["said"], seen.own["unknown"]) == (FAILED, False)
    assert seen.own["reason"] == "the append failed: Input/output error"
    assert seen.content == seen.standing


@each(*DURING)
def test_a_box_cut_in_its_write_says_failed_with_the_outcome_unknown(seen: Append) -> None:
    assert (seen.own["said"], seen.own["unknown"]) == (FAILED, True)
    assert "Input/output error" in seen.own["reason"]
    assert "the outcome is unknown" in seen.own["reason"]
    assert seen.content == seen.standing


@each(*AFTER)
def test_a_box_cut_after_its_sync_says_filed_and_its_line_stands_first(seen: Append) -> None:
    assert seen.own["said"] == DONE
    assert seen.content == seen.standing
    assert json.loads(seen.content.splitlines()[1])["msg"] == seen.own["text"]


@each(*DEAD)
def test_what_others_filed_stands_after_a_writers_death(seen: Append) -> None:
    """The kernel waits for the dead process's unwritten page, or for its unlock, before it lets go of the two locks: so
    the page still goes out under the lost lock, and is refused."""
    assert seen.job.exit == (1 if b"did not answer" in seen.job.err else -signal.SIGKILL)
    assert contradictions(seen.content, [*seen.others, seen.own_at_most_once], seen.standing) == []
    assert seen.content == seen.standing


@each(*DEAD)
def test_a_writer_that_dies_while_it_is_cut_is_not_gone_before_the_link_is_back(seen: Append) -> None:
    """Whoever waits for a command that its watchdog ends here waits on, but has read its answer."""
    assert not seen.ended_while_cut


@each(Case(WRITTEN, WATCHDOG))
def test_a_command_that_hangs_in_its_sync_says_at_its_bound_that_the_outcome_is_unknown(seen: Append) -> None:
    bound_s = float(COMMAND_WAITS["SOT_INBOX_LOCK_WAIT_SECS"]) + TOUCH_WAIT_S + MOUNT_WAIT_S
    said = seen.job.err.decode()
    assert re.fullmatch(
        rf"FAILED -> @{seen.to}: the file system of \S+ did not answer within {bound_s:g}s; the outcome is unknown\n"
        r"hint: .*\n",
        said,
    )


@each(*BEFORE, *DURING, *AFTER, *DEAD)
def test_the_box_works_again_when_the_link_is_back(seen: Append) -> None:
    """Its first send too: the error of an earlier write, which the kernel tells whoever syncs next, is not its own."""
    assert [one["said"] for one in seen.again] == [DONE, DONE]
    assert contradictions(seen.end, [*seen.others, seen.own_at_most_once, *seen.again], seen.content) == []


@each(*MUTANTS)
def test_a_mutant_is_found(seen: Append) -> None:
    found = contradictions(seen.content, [*seen.others, seen.own], seen.standing)
    assert any("does not stand" in one for one in found), found
    assert any("was answered done () and is there 0 times" in one for one in found), found


@each(*REGISTRY, REGISTRY_DEAD)
def test_another_box_is_told_who_holds_the_registry_lock(write: RegistryWrite) -> None:
    assert write.refused["kind"] == "RegistryLockFailed"
    assert f"is held by a pid {write.job.pid} " in write.refused["reason"]
    assert "it is on another machine. If it is dead, run any comm command on a." in write.refused["reason"]
    assert write.refused["seconds"] < REFUSED_S + SLACK_S


@each(*REGISTRY)
def test_both_changes_of_the_registry_stand(write: RegistryWrite) -> None:
    assert write.job.result()["said"] == DONE
    assert [one["said"] for one in write.later] == [DONE]
    assert list(json.loads(write.text)["agents"]) == ["alice", "bob"]


@each(REGISTRY_DEAD)
def test_a_registry_lock_of_a_dead_process_is_reclaimed_on_its_own_box(write: RegistryWrite) -> None:
    assert write.ended_while_cut
    assert write.job.exit == -signal.SIGKILL
    assert [one["said"] for one in write.later] == [DONE, DONE]
    assert list(json.loads(write.text)["agents"]) == ["anna", "bob"]


def test_no_box_borrows_what_it_reads_or_writes_so_a_cut_one_holds_up_nobody(lab: Lab, shared: str) -> None:
    """A delegation is taken back from a cut box only when its lease ends; meanwhile nobody else can open the file."""
    a, b = lab.box("a"), lab.box("b")
    b.call(in_box_faults.join, home=shared, names=["bob", "carol"])
    a.call(in_box_faults.join, home=shared, names=["alice"])
    answers = a.call(in_box_faults.send, home=shared, name="alice", to=["carol"], texts=["own to"])
    a.call(in_box_faults.read, home=shared, name="alice", of="carol")
    folder = shared.removeprefix("/nfs/")
    lent = [line for line in lab.server.call(STATES) if "type: deleg" in line and folder in line]
    assert lent == []
    lab.cut("a")
    answers += b.call(in_box_faults.send, home=shared, name="bob", to=["carol"], texts=["one to"])
    b.call(in_box_faults.join, home=shared, names=["dora"])
    assert answers[-1]["seconds"] < 8
    lab.mend("a")
    content = lab.server.call(in_box_faults.contents, folder=on_server(f"{shared}/inbox"), ending=".jsonl")
    assert [one["said"] for one in answers] == [DONE, DONE]
    assert contradictions(content["carol"], answers) == []
