"""A cold ``sotbus send`` beside a cold interpreter; a durable send in one process beside the bare system calls."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import ms, paired, ratio, verdict
from benchmarks.place import client
from sotbus.comm import membership
from sotbus.comm.sending import Outbox

COLD_ROUNDS = 30
WARM_ROUNDS = 1500
TEXT = "x" * 200


def cold(base: Path) -> bool:
    """The whole process, fsyncs and registry touch included, with a config file that says something."""
    membership.join(client(base, "alpha"))
    beta = membership.join(client(base, "beta"))
    config = base / "config.toml"
    config.write_text("")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SOT", "PYTHON"))} | {
        "SOT_COMM_HOME": str(base / "comm"),
        "SOT_COMM_SELF_FILE": str(base / "comm" / "self" / "pin-alpha.txt"),
        "SOTBUS_CONFIG": str(config),
    }
    bin_folder = Path(sys.executable).parent

    def run(*words: str) -> None:
        subprocess.run(words, check=True, env=environ, cwd=base / "alpha", stdout=subprocess.DEVNULL)

    def python() -> None:
        run(str(bin_folder / "python"), "-c", "pass")

    def send() -> None:
        run(str(bin_folder / "sotbus"), "send", "@" + beta.handle, TEXT)

    met = True
    for label, text in (("no settings", ""), ("with settings", "[message]\nmax_bytes = 300000\n")):
        config.write_text(text)
        sends, bare = paired(send, python, COLD_ROUNDS)
        print(f"cold send ({label}): {ms(sends)}; python -c pass: {ms(bare)}")
        met = verdict("cold send / python -c pass", ratio(sends, bare), 4.0) and met
    return met


def durable(base: Path) -> bool:
    """Verified sender, live recipient, lock, append, sync; beside open, flock, write, fdatasync, close."""
    sender = client(base, "gamma")
    membership.join(sender)
    to = membership.join(client(base, "delta")).handle
    outbox = Outbox(sender)
    line = b"x" * 280 + b"\n"
    bare_path = str(base / "bare.jsonl")

    def bare() -> None:
        fd = os.open(bare_path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, line)
        os.fdatasync(fd)
        os.close(fd)

    def send() -> None:
        outbox.send(to, TEXT)

    def whole() -> None:
        Outbox(sender).send(to, TEXT)

    sends, bares = paired(send, bare, WARM_ROUNDS)
    print(f"durable send: {ms(sends)}; bare loop: {ms(bares)}")
    met = verdict("durable send / bare loop", ratio(sends, bares), 1.25)
    wholes, bares = paired(whole, bare, WARM_ROUNDS // 5)
    print(
        f"the same with the sender verified again each time: {ms(wholes)}, {ratio(wholes, bares):.2f} x the bare loop"
    )
    return met
