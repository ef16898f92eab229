"""Many processes write to one inbox at once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from world import World

from sotbus import message
from sotbus.comm.membership import join
from sotbus.comm.sending import Outbox
from sotbus.comm.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

FORK = multiprocessing.get_context("fork")
PROCESSES, SENDS = 8, 250
BOUND_S = 300.0
"""How long a writer waits for its turn: the machine of the tests may be slow."""


def all_at_once(work: Callable[[int], None]) -> None:
    """Do ``work`` in eight processes that begin together."""
    start = FORK.Barrier(PROCESSES)

    def run(number: int) -> None:
        start.wait(60)
        work(number)

    processes = [FORK.Process(target=run, args=(number,)) for number in range(PROCESSES)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(BOUND_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert [process.exitcode for process in processes] == [0] * PROCESSES


def text_of(process: int, number: int, size: int) -> str:
    """A text that says who sent it, and of which every part tells it from any other."""
    mark = f"{process}.{number};"
    return (mark * (size // len(mark) + 1))[:size]


def check(path: Path, size: int, senders: list[str]) -> None:
    """Exactly the lines that were sent are there: whole, each once, and each sender's in its order."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    lines = data.split(b"\n")[:-1]
    assert len(lines) == PROCESSES * SENDS
    sent: dict[str, list[str]] = {sender: [] for sender in senders}
    for line in lines:
        value = message.parse(line)
        assert value is not None
        sent[value["from"]].append(value["msg"])
    for process, sender in enumerate(senders):
        assert sent[sender] == [text_of(process, number, size) for number in range(SENDS)]


@pytest.mark.spec("S49", "S56", "S57", "S63")
@pytest.mark.parametrize("size", [200, 64 * 1024])
def test_eight_processes_that_send_250_times_file_2000_whole_lines(size: int, world: World) -> None:
    names = ["b", *(f"p{process}" for process in range(PROCESSES))]
    for name in names:
        join(world.client(name), name=name, pid=os.getpid())
    settings = Settings(inbox_lock_wait_s=BOUND_S)

    def send(process: int) -> None:
        outbox = Outbox(world.client(f"p{process}", settings=settings))
        for number in range(SENDS):
            outbox.send("b", text_of(process, number, size))

    all_at_once(send)
    check(world.inbox("b"), size, names[1:])
    assert world.notes == []
