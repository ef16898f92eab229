"""``sotbus doctor --peer``: prove with a run on another box that two boxes may share this folder.

Both run at the same time and find each other in the folder (:mod:`.rendezvous`). They go through the same steps
(:mod:`.pair`), exchange the results of each, and so come to the same verdict. What it proves, it proves for the two
boxes and their mounts of now.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sotbus.doctor import peer_files, peer_locks, peer_mounts
from sotbus.doctor.check import FAULT, OK, SKIPPED, Check, NotJudged, Verdict, fault, sound
from sotbus.doctor.pair import GIVEN_UP, Gone, NotProved, Pair
from sotbus.doctor.peer_board import Board, Party, Pulse, Stopped
from sotbus.doctor.place import Place
from sotbus.doctor.rendezvous import Alone, Meeting

WAIT_S = 60.0
"""How long to wait for the other box, unless told otherwise."""

HANG_S = 45.0
"""No piece of work takes longer than this; one that does hangs on a mount that does not answer."""

CLEAN_S = 15.0
"""How long a run that is called off may take to end its work and remove its files."""

Results = tuple[dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class Step:
    """What both boxes do together: each its half (``work``), and the judgement of both halves' results."""

    name: str
    doing: str
    work: Callable[[Pair], dict[str, Any]]
    judge: Callable[[Results, Sequence[str], str], Verdict]
    locks: bool = True


STEPS: Sequence[Step] = (
    Step("peer-exclusion", "both contend for the lock", peer_locks.exclusion, peer_locks.judge_exclusion),
    Step("peer-append", "both append under it", peer_files.append, peer_files.judge_append),
    Step("peer-rename", "each renames, the other reads", peer_files.rename, peer_files.judge_rename, locks=False),
    Step("peer-death", "a holder is killed", peer_locks.death, peer_locks.judge_death),
)

FACTS: Sequence[tuple[str, Callable[[Sequence[Party], Sequence[str]], Verdict]]] = (
    ("peer-names", peer_mounts.names),
    ("peer-own-checks", peer_mounts.own_checks),
    ("peer-lock-manager", peer_mounts.lock_managers),
)

FOUND = "peer-found"
NAMES: Sequence[str] = (FOUND, *(name for name, _ in FACTS), *(step.name for step in STEPS))
"""Every check, in the order of the answer. The names are for programs and do not change."""

REASONS = {
    "peer-names": "they go by one name",
    "peer-own-checks": "one of them is unfit by its own checks",
    "peer-lock-manager": "they do not go by one lock manager",
    "peer-exclusion": "the lock does not do its work between them",
    "peer-append": "lines that both append do not all stand",
    "peer-rename": "what one renames is not there for the other at once",
    "peer-death": "the lock of a killed process is not free for the other",
}
"""What a fault of each check that was proved means, for the verdict."""


@dataclass(frozen=True)
class Finding:
    """A verdict, and whether it was proved; a fault that was not leaves the question open."""

    verdict: Verdict
    proved: bool = True


@dataclass(frozen=True)
class Answer:
    """Every check, and the one sentence that they come to."""

    checks: list[Check]
    verdict: str


def run(
    place: Place,
    own: Sequence[Check],
    say: Callable[[str], None],
    tell: Callable[[str], None],
    wait_s: float = WAIT_S,
    hang_s: float = HANG_S,
) -> Answer:
    """Find the other box and go through every step with it. Takes about 15 s once it is there; each wait is bounded.

    The work is done in a thread of its own, because a call to a mount whose server is gone does not come back.

    :param own: what this box's own checks found.
    :param say: told what is being done, for a line of progress. Called in that thread, as ``tell`` is.
    :param tell: told what a person must know meanwhile: what to run on the other box.
    :param wait_s: how long to wait for the other box, in seconds.
    :param hang_s: how long one piece of work may take, in seconds.

    *Cancellation*: an exception that arrives meanwhile (KeyboardInterrupt) ends the work and removes the files; the
    other box's run then ends by itself.
    """
    search = _Search(place, own, say, tell, wait_s)
    done: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            for finding in search.findings():
                done.put(finding)
        except Stopped:
            pass
        except Exception as error:
            done.put(_broken(error))
        finally:
            done.put(None)

    thread = threading.Thread(target=work, name="sotbus-doctor-peer", daemon=True)
    findings: list[Finding] = []
    try:
        thread.start()
        while (finding := _next(done, search.pulse, hang_s)) is not None:
            findings.append(finding)
    finally:
        hangs = search.pulse.stopped
        search.pulse.stop()
        if not hangs:
            thread.join(CLEAN_S)
    del findings[len(NAMES) :]  # what failed after the last check says nothing of the two boxes
    last = NAMES[len(findings) - 1] if findings else FOUND
    findings += [Finding(Verdict(SKIPPED, f"not tried, because {last} was not done"), False)] * (
        len(NAMES) - len(findings)
    )
    checks = [Check.of(name, finding.verdict) for name, finding in zip(NAMES, findings, strict=True)]
    return Answer(checks, verdict(dict(zip(NAMES, findings, strict=True)), search.labels))


def _next(done: queue.SimpleQueue[Finding | None], pulse: Pulse, hang_s: float) -> Finding | None:
    """The next finding, None at the end. A thread that hangs has one last finding, and is then stopped."""
    while True:
        try:
            return done.get(timeout=0.5)
        except queue.Empty:
            pass
        if pulse.stopped:
            return None
        if time.monotonic() - pulse.at >= hang_s:
            pulse.stop()
            return _open(
                f"it did not go on for {hang_s:g}s: the file system may not answer. Files of this run may be left in "
                "inbox/; the next one on this box removes them",
                "see that the server of the mount can be reached, then run it again on both boxes",
            )


class _Search:
    """One run's work, for the thread that does it; ``labels`` are the two boxes' names once they have met."""

    def __init__(
        self,
        place: Place,
        own: Sequence[Check],
        say: Callable[[str], None],
        tell: Callable[[str], None],
        wait_s: float,
    ) -> None:
        self.place = place
        self.own = own
        self.say = say
        self.tell = tell
        self.wait_s = wait_s
        self.pulse = Pulse()
        self.labels: tuple[str, str] | None = None

    def __repr__(self) -> str:
        return f"<_Search of {self.place!r}, found {self.labels}>"

    def findings(self) -> Iterator[Finding]:
        """One for each of :data:`NAMES`, in that order; fewer where the work failed. *Errors*: :class:`Stopped`."""
        try:
            folder = self.place.folder
        except NotJudged as reason:
            yield from [Finding(Verdict(SKIPPED, str(reason)), False)] * len(NAMES)
            return
        with Board(folder.inboxes, self.place.box.declared_host, self.pulse) as board:
            mine = peer_mounts.party_here(self.place, board.id, self.own)
            self.tell(
                f"waiting up to {self.wait_s:g}s for the other box; run on it now, on this same comm folder: "
                "sotbus doctor --probe --peer"
            )
            self.say("the other box is awaited")
            try:
                run = Meeting(board, mine, self.tell).meet(self.wait_s)
            except Alone as alone:
                yield _open(str(alone), alone.remedy)
                return
            except OSError as error:
                yield _failed(error)
                return
            other = run.party
            assert other is not None
            pair = Pair(self.place, board, run, mine, other)
            self.labels = pair.labels
            self.tell(f"found {other.host}; the proof takes about 15 s")
            yield Finding(sound(" and ".join(map(_described, pair.labels, pair.parties))))
            for _, judge in FACTS:
                yield _judged(partial(judge, pair.parties, pair.labels))
            yield from self._steps(pair)

    def _steps(self, pair: Pair) -> Iterator[Finding]:
        remedy = peer_mounts.mounting(pair.parties, pair.labels)
        lockless = [label for label, party in zip(pair.labels, pair.parties, strict=True) if not party.lock_manager]
        try:
            pair.begin()
        except Gone as gone:
            yield _gone(gone)
            return
        except OSError as error:
            yield _failed(error)
            return
        for step in STEPS:
            if step.locks and lockless:
                yield Finding(Verdict(SKIPPED, f"{lockless[0]} has no lock manager (see peer-lock-manager)"), False)
                continue
            self.say(step.doing)
            try:
                results = pair.step(step.name, step.work)
            except Gone as gone:
                yield _gone(gone)
                return
            except OSError as error:
                yield _failed(error)
                return
            yield _both(step, results, pair.labels, remedy)
        pair.part()


def _both(step: Step, results: Results, labels: Sequence[str], remedy: str) -> Finding:
    """What a step's two halves come to."""
    failed = [(result["error"], label) for label, result in zip(labels, results, strict=True) if "error" in result]
    if failed:
        error, label = min(failed, key=lambda one: one[0] == GIVEN_UP)
        return _open(
            f"the proof was not finished: on {label}, {error}",
            "see that files in inbox/ can be made and locked on both boxes, then run it again on both boxes",
        )
    return _judged(partial(step.judge, results, labels, remedy))


def _judged(judge: Callable[[], Verdict]) -> Finding:
    try:
        return Finding(judge())
    except NotProved as open_:
        return _open(str(open_), open_.remedy)
    except Exception as error:
        return _broken(error)


def verdict(findings: Mapping[str, Finding], labels: tuple[str, str] | None) -> str:
    """What it all comes to, in one sentence that a person can act on.

    :param labels: the two boxes, None where there were not two.
    """
    if labels is None:
        missing = findings[FOUND].verdict
        return f"verdict: nothing is proved: {missing.text}" + (f"; {missing.remedy}" if missing.remedy else "")
    both = " and ".join(labels)
    refuted = [name for name, finding in findings.items() if finding.proved and finding.verdict.status == FAULT]
    if refuted:
        reasons = ", ".join(REASONS[name] for name in refuted)
        return f"verdict: do NOT let {both} share this folder: {reasons}; {findings[refuted[0]].verdict.remedy}"
    undecided = [(name, finding.verdict) for name, finding in findings.items() if finding.verdict.status != OK]
    if undecided:
        name, missing = next((one for one in undecided if one[1].status == FAULT), undecided[0])
        return f"verdict: it is not proved that {both} may share this folder: see {name}; {missing.remedy}"
    return (
        f"verdict: {both} may share this folder: the lock excludes between them, and each sees at once what the other "
        "appends or renames"
    )


def _described(label: str, party: Party) -> str:
    return f"{label} (pid {party.pid}, machine {party.machine or 'unknown'}, sotbus {party.version})"


def _failed(error: OSError) -> Finding:
    text = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    return _open(
        f"the proof was not finished: {text}", "see that files in inbox/ can be made, then run it again on both boxes"
    )


def _broken(error: Exception) -> Finding:
    return _open(
        f"the check itself failed: {type(error).__name__}: {error}",
        "run it again on both boxes; if it stays so, report it with this line",
    )


def _gone(gone: Gone) -> Finding:
    return _open(f"the proof was not finished: {gone}", "see what it says there, then run it again on both boxes")


def _open(text: str, remedy: str) -> Finding:
    return Finding(fault(text, remedy), proved=False)
