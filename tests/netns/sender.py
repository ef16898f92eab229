"""One long-lived client of a node's socket: many messages, several in flight, and one printed line for each answer.

    python sender.py SOCKET HOST SENDER THREADS PAUSE_S

It takes orders from standard input until that ends. An order is a line ``{"id", "to"}``; the message's text is its ID.
An answer is a line ``{"id", "to", "outcome", "why", "took_s"}``, whose outcome is one of ``OUTCOMES``. Each thread
rests ``PAUSE_S`` after an answer. Nothing is sent twice.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from queue import SimpleQueue
from typing import Any

from sotbus.comm.daemon import Daemon, NoDaemonError

FILED, KNOWN, UNKNOWN = "filed", "failed known", "failed unknown"
OUTCOMES = (FILED, KNOWN, UNKNOWN)
"""On disk; FAILED and not filed; FAILED and perhaps filed."""


def send(daemon: Daemon, sender: str, order: dict[str, str]) -> dict[str, Any]:
    """One message and what came of it."""
    began = time.monotonic()
    try:
        answer = daemon.file(sender, order["to"], order["id"], message_id=order["id"])
    except NoDaemonError as error:
        outcome, why = KNOWN, str(error)
    else:
        outcome = FILED if answer.ok else UNKNOWN if answer.outcome_unknown else KNOWN
        why = answer.error or ""
    return {**order, "outcome": outcome, "why": why, "took_s": time.monotonic() - began}


def work(daemon: Daemon, sender: str, orders: SimpleQueue[str], turn: threading.Lock, pause_s: float) -> None:
    """Send whatever is next until an empty order comes; one thread of several."""
    while order := orders.get():
        said = json.dumps(send(daemon, sender, json.loads(order)))
        with turn:
            print(said, flush=True)
        time.sleep(pause_s)


def main(words: list[str]) -> None:
    socket, host, sender, threads, pause_s = words
    orders: SimpleQueue[str] = SimpleQueue()
    turn = threading.Lock()
    daemon = Daemon(socket, host, name=sender)
    workers = [
        threading.Thread(target=work, args=(daemon, sender, orders, turn, float(pause_s))) for _ in range(int(threads))
    ]
    for worker in workers:
        worker.start()
    for order in sys.stdin:
        orders.put(order)
    for _ in workers:
        orders.put("")
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main(sys.argv[1:])
