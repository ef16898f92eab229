"""A registry of 10,000 handles: list, join, and the touch that follows a send's answer."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import ms, timed
from benchmarks.place import client, registry_of
from sotbus.comm import membership
from sotbus.comm.liveness import is_live
from sotbus.comm.registry_lock import RegistryLock
from sotbus.comm.sending import Outbox, touch

HANDLES = 10_000
ROUNDS = 9

SLACK_S = 1.0
"""What a touch may take over its lock bound: reading and writing the registry, on a noisy machine."""


def big(base: Path) -> bool:
    me = client(base, "big")
    handle = membership.join(me).handle
    registry_of(Path(me.folder.registry), HANDLES)
    size = Path(me.folder.registry).stat().st_size
    print(f"registry of {HANDLES:,} handles ({size / 1e6:.1f} MB)")

    def listing() -> None:
        agents = me.registry.agents()
        assert sum(is_live(entry["last_seen"]) for entry in agents.values()) > 0

    def touched() -> None:
        me.clock = lambda: time.time() + next(ticks)
        touch(me, handle)

    ticks = iter(range(1, 10_000))
    print(f"  read all entries: {ms([timed(listing) for _ in range(ROUNDS)])}")
    print(f"  sotbus list, a whole process: {ms([timed(lambda: command(base, 'list')) for _ in range(3)])}")
    print(f"  join: {ms([timed(lambda: membership.join(me)) for _ in range(ROUNDS)])}")
    print(f"  touch: {ms([timed(touched) for _ in range(ROUNDS)])}")
    me.clock = time.time
    send = timed(lambda: Outbox(me).send("worker-00001", "hello"))
    print(f"  send, answered before its touch: {send * 1e3:.1f} ms")
    with RegistryLock(me.folder, me.box).hold(5):
        held = subprocess.run(
            [sys.executable, "-m", "benchmarks.registry", str(base)], capture_output=True, text=True, check=True
        ).stdout
    answered, done = (float(word) for word in held.split())
    met = answered < 1.0 and done - answered < me.settings.touch_wait_s + SLACK_S
    print(
        f"  with the lock held by another: answered after {answered * 1e3:.0f} ms, the touch gave up "
        f"{(done - answered) * 1e3:.0f} ms later (bound {me.settings.touch_wait_s:g} s): {'met' if met else 'MISSED'}"
    )
    return met


def command(base: Path, *words: str) -> None:
    """A whole ``sotbus`` process in the benchmark's folder."""
    environ = {"SOT_COMM_HOME": str(base / "comm"), "HOME": str(base), "PATH": "/usr/bin:/bin"}
    subprocess.run(
        [sys.executable, "-m", "sotbus", *words], env=environ, check=True, stdout=subprocess.DEVNULL, cwd=base
    )


def while_held(base: Path) -> None:
    """Send and touch while another process holds the registry lock; prints when each was done, in seconds."""
    me = client(base, "big")
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        outbox = Outbox(me)
        outbox.send("worker-00002", "hello")
    answered = time.perf_counter() - start
    me.clock = lambda: time.time() + 5000
    touch(me, outbox.sender.handle)
    print(answered, time.perf_counter() - start)


if __name__ == "__main__":
    while_held(Path(sys.argv[1]))
