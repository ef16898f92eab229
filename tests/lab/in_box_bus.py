"""Calls for a box that has a node: its files, what is on its disk, and one long-lived client with many messages."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from lab.driver import note
from netns.sender import send

from sotbus.comm.daemon import Daemon, NoDaemonError

NOTE_EVERY = 50
"""Answers between two notes."""


def furnish(base: str, config: str) -> None:
    """The folders of a box's node, and its config."""
    for part in ("config/sotbus", "run", "state", "projects"):
        os.makedirs(f"{base}/{part}", mode=0o700)
    Path(f"{base}/config/sotbus/config.toml").write_text(config)


def status(socket: str, host: str) -> dict[str, Any]:
    """What a node says of itself; empty where none answers."""
    try:
        answer = Daemon(socket, host).ask("sotbus.status", {}, 5.0)
    except NoDaemonError:
        return {}
    return dict(answer.payload.get("status", {})) if answer.ok else {}


def texts(comm: str, handle: str) -> dict[str, int]:
    """How often each text is in a mailbox; each line must be whole."""
    path = Path(comm, "inbox", f"{handle}.jsonl")
    data = path.read_bytes() if path.exists() else b""
    assert data.endswith(b"\n") or not data, f"{path} has a torn line"
    return Counter(json.loads(line)["msg"] for line in data.splitlines())


def send_many(socket: str, host: str, sender: str, orders: list[tuple[str, str]], threads: int) -> list[dict[str, Any]]:
    """Send messages through the box's node, so many in flight; what came of each, as :mod:`netns.sender` has it.

    :param orders: message ID, which is the text too, and handle of each.

    Notes how many are answered, now and then.
    """
    waiting: SimpleQueue[tuple[str, str]] = SimpleQueue()
    for order in orders:
        waiting.put(order)
    daemon = Daemon(socket, host, name=sender)
    answers: list[dict[str, Any]] = []
    turn = threading.Lock()

    def work() -> None:
        while True:
            try:
                name, to = waiting.get_nowait()
            except Empty:
                return
            answer = send(daemon, sender, {"id": name, "to": to})
            with turn:
                answers.append(answer)
                if len(answers) % NOTE_EVERY == 0:
                    note(len(answers))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return answers
