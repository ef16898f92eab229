"""``sotbus doctor --probe``: prove with real processes that the inbox lock excludes on this folder's mount.

It looks for overlaps: each process notes when a hold of the lock began and ended, inside the hold, and no two of those
intervals may overlap. Files of the probe's own in ``inbox/`` are used and removed; no real inbox or lock is touched.
What it proves, it proves for the processes of this box.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import sotbus
from sotbus.comm.folder import remove_quietly
from sotbus.comm.handles import component
from sotbus.doctor.check import SKIPPED, Check, NotJudged, Verdict, fault, sound
from sotbus.doctor.place import PROBE_FILES, Place
from sotbus.doctor.registry_checks import SKEW_S

PROCESSES = 4
ROUNDS = 500
"""Holds by each process, at most: some hundreds or thousands together."""

CONTEND_S = 0.8
LINES = 50
"""Lines that each process appends, at most."""

APPEND_S = 0.6
START_S = 30.0
"""How long the processes may take to start, on a busy box."""

GRACE_S = 3.0
"""How much longer than its own bound an answer may take before its process is given up."""

DEATH_S = 2.0
"""Within this long a killed holder's lock is free."""

MIN_WAITS = 10
"""With fewer holds that had to wait, the processes hardly met at the lock, and nothing is proved."""

NO_LOCK = (
    "do not let two sessions send into this folder: put it on a local disk or an NFS v4 mount (comm.home, or "
    "SOT_COMM_HOME), or mend the mount's locking"
)


class ProbeError(Exception):
    """A process of the probe did not answer, or could not do as told; the text says what happened."""


class Worker:
    """One process of the probe. :meth:`end` ends it, by its pid."""

    def __init__(self) -> None:
        package = os.path.dirname(os.path.dirname(os.path.abspath(sotbus.__file__)))
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "sotbus.doctor.probe_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": path},
        )
        self._text = b""
        self._number = 0

    def __repr__(self) -> str:
        return f"<Worker {self.process.pid}>"

    def order(self, do: str, **what: Any) -> None:
        """Tell it what to do; :meth:`answer` has the outcome. *Errors*: :class:`ProbeError`."""
        assert self.process.stdin is not None
        self._number += 1
        try:
            self.process.stdin.write(json.dumps({"number": self._number, "do": do, **what}).encode() + b"\n")
        except OSError as error:
            raise ProbeError(f"process {self.process.pid} of the probe has ended") from error

    def answer(self, within_s: float) -> dict[str, Any]:
        """The outcome of the last order. *Errors*: :class:`ProbeError` where there is none in time, or a failure."""
        deadline = time.monotonic() + within_s
        while True:
            answer: dict[str, Any] = json.loads(self._line(deadline, within_s))
            if answer["number"] == self._number:  # else that of an order whose proof was given up
                break
        if "error" in answer:
            raise ProbeError(f"a lock or a file of the probe failed: {answer['error']}")
        return answer

    def _line(self, deadline: float, within_s: float) -> bytes:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while b"\n" not in self._text:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise ProbeError(f"process {self.process.pid} of the probe did not answer within {within_s:g}s")
            block = os.read(fd, 1 << 16)
            if not block:
                raise ProbeError(f"process {self.process.pid} of the probe ended with status {self.process.wait()}")
            self._text += block
        line, _, self._text = self._text.partition(b"\n")
        return line

    def ask(self, do: str, within_s: float = GRACE_S, **what: Any) -> dict[str, Any]:
        """An order and its answer."""
        self.order(do, **what)
        return self.answer(within_s)

    def kill(self) -> None:
        """SIGKILL, and wait for its end: then the kernel has closed what it held. *Errors*: :class:`ProbeError`."""
        self.process.kill()
        try:
            self.process.wait(DEATH_S)
        except subprocess.TimeoutExpired as error:
            raise ProbeError(f"process {self.process.pid} of the probe survived SIGKILL (a mount hangs)") from error

    def end(self) -> None:
        """End it. One that hangs in the kernel is left behind; it ends when its call does."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.kill()
        try:
            self.process.wait(DEATH_S)
        except subprocess.TimeoutExpired:
            return


class Probe:
    """The processes and the files of one probe. Use as a context manager.

    ``lock`` is the probe's lock file, ``lines`` the file that it appends to.
    """

    def __init__(self, place: Place) -> None:
        name = f"{PROBE_FILES}{component(place.box.declared_host, 64)}-{os.getpid()}"
        self.place = place
        self.lock = f"{place.folder.inboxes}/{name}.lock"
        self.lines = f"{place.folder.inboxes}/{name}.lines"
        self.workers: list[Worker] = []

    def __repr__(self) -> str:
        return f"<Probe {self.lock} with {len(self.workers)} processes>"

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *ended_by: object) -> None:
        """End every process by its pid and remove the files, whatever happened."""
        for worker in self.workers:
            worker.end()
        remove_quietly(self.lines)
        remove_quietly(self.lock)

    def start(self) -> None:
        """Start the processes and wait until each is ready. *Errors*: :class:`ProbeError`, OSError."""
        for _ in range(PROCESSES):
            self.workers.append(Worker())
        box, names = self.place.box, self.place.plugin_names
        for worker in self.workers:
            worker.order(
                "open",
                inboxes=self.place.folder.inboxes,
                lock=self.lock,
                machine_id=box.machine_id,
                mountinfo=box.mountinfo_path,
                plugins=None if names is None else list(names),
            )
        for worker in self.workers:
            worker.answer(START_S)

    def _all(self, do: str, within_s: float, orders: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same order to every process at once, and their answers."""
        for worker, what in zip(self.workers, orders, strict=True):
            worker.order(do, **what)
        return [worker.answer(within_s) for worker in self.workers]

    def exclusion(self) -> Verdict:
        """No two exclusive holds overlap, and the processes did meet at the lock."""
        answers = self._all("contend", CONTEND_S + GRACE_S, [{"rounds": ROUNDS, "seconds": CONTEND_S}] * PROCESSES)
        spans = [(entered, left) for answer in answers for entered, left in answer["spans"]]
        waited = sum(answer["waited"] for answer in answers)
        overlaps = overlapping(spans)
        said = f"{len(spans)} exclusive holds by {PROCESSES} processes"
        if overlaps:
            return fault(f"the lock does not exclude: of {said}, {overlaps} began before another had ended", NO_LOCK)
        if waited < MIN_WAITS:
            return fault(
                f"nothing is proved: the processes hardly met at the lock ({said}, {waited} of them waited for)",
                "run it again when the box is less busy: sotbus doctor --probe",
            )
        return sound(f"{said}, {waited} of them waited for: no two overlapped")

    def readers(self) -> Verdict:
        """Two readers hold the shared lock together, and a writer is kept out meanwhile."""
        one, two, writer = self.workers[:3]
        try:
            for reader in (one, two):
                if not self._hold(reader, exclusive=False, seconds=1.0):
                    return fault("the shared lock does not admit two readers at once", NO_LOCK)
            if self._hold(writer, exclusive=True, seconds=0):
                return fault("the exclusive lock was granted while two readers held the shared one", NO_LOCK)
        finally:
            for worker in (one, two, writer):
                worker.ask("release")
        return sound("two readers at once, and no writer beside them")

    def append(self) -> Verdict:
        """No line is lost, torn or doubled that several processes append under the lock."""
        orders = [{"path": self.lines, "mark": f"p{n}", "lines": LINES, "seconds": APPEND_S} for n in range(PROCESSES)]
        answers = self._all("append", APPEND_S + GRACE_S, orders)
        expected = {f"p{n} {line}".encode() for n in range(PROCESSES) for line in range(answers[n]["written"])}
        with open(self.lines, "rb") as file:
            found = file.read().splitlines()
        lost, strange = len(expected - set(found)), len(found) - len(expected & set(found))
        cut = sum(answer["cut"] for answer in answers)
        if lost or strange or cut:
            return fault(
                f"of {len(expected)} lines appended under the lock by {PROCESSES} processes, {lost} were lost, "
                f"{strange} were torn or doubled, and {cut} were found half written",
                NO_LOCK,
            )
        if sum(answer["written"] > 0 for answer in answers) < 2:
            return fault(
                f"nothing is proved: {len(expected)} lines were appended, and not by two processes",
                "run it again when the box is less busy: sotbus doctor --probe",
            )
        return sound(f"{len(expected)} lines by {PROCESSES} processes, each there once")

    def death(self) -> Verdict:
        """The lock of a holder that is killed goes to the next one soon."""
        holder, heir = self.workers[-1], self.workers[0]
        if not self._hold(holder, exclusive=True, seconds=1.0):
            return fault("the lock was not free, though nobody held it", NO_LOCK)
        if self._hold(heir, exclusive=True, seconds=0):
            heir.ask("release")
            return fault("the lock was granted to a second process while the first held it", NO_LOCK)
        killed = time.monotonic()
        holder.kill()
        if not self._hold(heir, exclusive=True, seconds=DEATH_S):
            return fault(
                f"the lock of a killed process was still held {DEATH_S:g}s later",
                "look for a server that waits for the lease to end; until then a dead sender blocks a mailbox",
            )
        freed = time.monotonic() - killed
        heir.ask("release")
        return sound(f"free {freed * 1000:.0f} ms after its holder was killed")

    def clock(self) -> Verdict:
        """The file system goes by the same clock as this box: a file just written has the present time."""
        now = time.time()
        ahead = self._written_at() - now
        if abs(ahead) > SKEW_S:
            whose = "behind" if ahead > 0 else "ahead of"
            return fault(
                f"this box's clock is {abs(int(ahead))}s {whose} the file system's", "run: timedatectl set-ntp true"
            )
        return sound(f"within {SKEW_S}s of the file system's")

    def _written_at(self) -> float:
        fd = os.open(self.lines, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, b"\n")
            os.fsync(fd)
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)

    def _hold(self, worker: Worker, *, exclusive: bool, seconds: float) -> bool:
        return bool(worker.ask("hold", seconds + GRACE_S, exclusive=exclusive, seconds=seconds)["held"])


def overlapping(spans: Sequence[tuple[int, int]]) -> int:
    """How many of the intervals begin before one that began earlier has ended."""
    count, latest = 0, 0
    for entered, left in sorted(spans):
        if entered < latest:
            count += 1
        latest = max(latest, left)
    return count


PROBES: Sequence[tuple[str, str, Callable[[Probe], Verdict]]] = (
    ("probe-exclusion", "processes contend for the lock", Probe.exclusion),
    ("probe-readers", "readers share it", Probe.readers),
    ("probe-append", "processes append under it", Probe.append),
    ("probe-death", "a holder is killed", Probe.death),
    ("probe-clock", "a file is written", Probe.clock),
)
"""Name, what is said meanwhile, and the proof, in the order of the answer."""


def run(place: Place, say: Callable[[str], None]) -> list[Check]:
    """Every proof. Takes about two seconds; each of its waits is bounded.

    :param say: told what is being done, for a line of progress.

    *Cancellation*: an exception that arrives meanwhile (KeyboardInterrupt) ends the processes and removes the files.
    """
    names = [name for name, _, _ in PROBES]
    try:
        if place.lock_manager is None:
            raise NotJudged("this box's lock manager is not known (see lock-manager)")
        probe = Probe(place)
    except NotJudged as reason:
        return [Check(name, SKIPPED, str(reason)) for name in names]
    checks: list[Check] = []
    with probe:
        say("processes start")
        try:
            probe.start()
        except (ProbeError, OSError) as error:
            return [
                Check.of(names[0], _broken(error)),
                *(Check(name, SKIPPED, "the probe's processes did not start") for name in names[1:]),
            ]
        for name, doing, judge in PROBES:
            say(doing)
            try:
                checks.append(Check.of(name, judge(probe)))
            except (ProbeError, OSError) as error:
                checks.append(Check.of(name, _broken(error)))
    return checks


def _broken(error: ProbeError | OSError) -> Verdict:
    return fault(f"the proof was not finished: {error}", "see that files in inbox/ can be made, then run it again")
