"""Durable sends on one NFS v4 mount, from one box and from two at once, beside a bare loop with both locks.

The boxes are those of the tests' lab: a guest kernel with a real NFS server and two real clients (tests/lab). It has
one CPU, so that two boxes share what one alone has. A system call costs some 40 µs there, a hundred times what it costs
elsewhere; the requests to the server, which on a real network make most of the time, are therefore counted too.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import uniform
from typing import Any

from benchmarks.harness import ms, verdict

TESTS = Path(__file__).resolve().parents[1] / "tests"
TOOLS = ("linux.uml", "modprobe", "mkfs.ext4", "ip")

PAIRS_S = 6.0
ROUNDS = 12
ROUND_S = 0.6
BOUND_S = 2.0
"""How long one send waits for the locks; the default of ``[comm] inbox_lock_wait_s``."""

TRY_S = (0.015, 0.025)
TEXT = "x" * 200
LINE = b"x" * 280 + b"\n"
TARGET = 1.3
READER = "reader"


def sends(_: Path) -> bool:
    """Sends to one inbox through ``Outbox.send``; skipped where no guest can be booted."""
    sys.path.append(str(TESTS))
    try:
        from lab.lab import Lab
        from lab.machine import LabError, tool

        try:
            for name in TOOLS:
                tool(name)
        except LabError as error:
            print(f"  skipped: {error}; the guest kernel needs user-mode-linux, kmod, e2fsprogs and iproute2")
            return True
        with Lab() as lab:
            return _measured(lab)
    finally:
        sys.path.remove(str(TESTS))


def _measured(lab: Any) -> bool:
    shared = lab.new_folder()
    lab.box("a").call("benchmarks.shared_home:join_as", shared=shared, name=READER)
    jobs = [lab.box(name).start("benchmarks.shared_home:work", shared=shared, name=name) for name in ("a", "b")]
    for job in jobs:
        assert job.note() == "ready"

    def run(what: str, seconds: float, boxes: int) -> list[dict[str, Any]]:
        for job in jobs[:boxes]:
            job.send(json.dumps([what, seconds]) + "\n")
        return [job.note() for job in jobs[:boxes]]

    run("pairs", 1, 1)  # uncounted
    one = run("pairs", PAIRS_S, 1)[0]
    print(f"one box: send {ms(one['send_s'])}; bare loop with both locks {ms(one['bare_s'])}")
    ratio = statistics.median(one["send_s"]) / statistics.median(one["bare_s"])
    met = verdict("durable send / bare loop, one box", ratio, TARGET)
    counted = {what: run(what, ROUND_S, 1)[0] for what in ("send", "bare")}
    asked = {what: side["requests"] / side["count"] for what, side in counted.items()}
    print(f"  requests to the server for one: {asked['send']:.1f}, bare {asked['bare']:.1f}")

    rounds = [{what: run(what, ROUND_S, 2) for what in ("send", "bare")} for _ in range(ROUNDS + 1)][1:]
    rates = {what: statistics.median(_rate(one[what]) for one in rounds) for what in ("send", "bare")}
    print(f"two boxes at once: {rates['send']:.0f} sends/s; bare loop with both locks: {rates['bare']:.0f}/s")
    met = verdict("durable send / bare loop, two boxes", rates["bare"] / rates["send"], TARGET) and met
    for what in ("send", "bare"):
        sides = [side for one in rounds for side in one[what]]
        counts = [[side["count"] for side in one[what]] for one in rounds]
        share = sum(a for a, _ in counts) / sum(a + b for a, b in counts)
        least = min(min(pair) / sum(pair) for pair in counts)
        print(
            f"  {what}: box a's share {share:.0%}, the smaller share of a round of {ROUND_S:g} s at least {least:.0%}, "
            f"longest wait {max(side['longest_s'] for side in sides):.2f} s, "
            f"{sum(side['failed'] for side in sides)} of {sum(map(sum, counts))} failed at the bound of {BOUND_S:g} s"
        )
    return met


def _rate(sides: list[dict[str, Any]]) -> float:
    return float(sum(side["count"] / side["took_s"] for side in sides))


# ---- in a box


def join_as(shared: str, name: str) -> None:
    """Take a handle there."""
    from lab.in_box_sharing import client_of

    from sotbus.comm.membership import join

    join(client_of(shared, name), name=name)


def work(shared: str, name: str) -> Iterator[object]:
    """A joined session; for each line ``[what, seconds]`` it does that for so long and notes how it went."""
    from lab.in_box_sharing import client_of

    from sotbus.comm.sending import Outbox
    from sotbus.errors import InboxLockHeld

    join_as(shared, name)
    outbox = Outbox(client_of(shared, name))
    assert outbox.client.settings.inbox_lock_wait_s == BOUND_S
    path = outbox.client.folder.inbox("bare")

    def send() -> bool:
        try:
            outbox.send(READER, TEXT)
        except InboxLockHeld:
            return False
        return True

    def once_bare() -> bool:
        return bare(path)

    yield "ready"
    for line in sys.stdin:
        what, seconds = json.loads(line)
        if what == "pairs":
            yield in_turn(send, once_bare, seconds)
        else:
            yield again_and_again(send if what == "send" else once_bare, seconds)


def in_turn(send: Callable[[], bool], once_bare: Callable[[], bool], seconds: float) -> dict[str, list[float]]:
    """One after the other for so long; the wall time of each, in seconds."""
    took: dict[str, list[float]] = {"send_s": [], "bare_s": []}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, once in (("send_s", send), ("bare_s", once_bare)):
            begun = time.perf_counter()
            assert once()
            took[name].append(time.perf_counter() - begun)
    return took


def again_and_again(once: Callable[[], bool], seconds: float) -> dict[str, float]:
    """For so long: how often it was done, how often it failed, the longest of all, the time, and requests sent."""
    count, failed, longest_s, requests = 0, 0, 0.0, nfs_requests()
    begun = now = time.perf_counter()
    while now < begun + seconds:
        if once():
            count += 1
        else:
            failed += 1
        before, now = now, time.perf_counter()
        longest_s = max(longest_s, now - before)
    requests = nfs_requests() - requests
    return {"count": count, "failed": failed, "longest_s": longest_s, "took_s": now - begun, "requests": requests}


def nfs_requests() -> int:
    """How many requests this box's NFS mounts have sent (the per-op statistics of proc_pid_mountstats(5))."""
    total = 0
    for line in Path("/proc/self/mountstats").read_text().splitlines():
        name, colon, counts = line.strip().partition(": ")
        if colon and name.isupper() and counts.split()[0].isdigit():
            total += int(counts.split()[0])
    return total


def bare(path: str) -> bool:
    """Open and flock the lock file, open and flock the inbox; write, sync, close; release.

    False where a lock was not free within the bound.
    """
    deadline = time.monotonic() + BOUND_S
    lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not _lock(lock, deadline):
            return False
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if not _lock(fd, deadline):
                return False
            os.write(fd, LINE)
            os.fdatasync(fd)
        finally:
            os.close(fd)
    finally:
        os.close(lock)
    return True


def _lock(fd: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(uniform(*TRY_S))
        else:
            return True
