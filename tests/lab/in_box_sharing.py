"""Calls for boxes that share a comm folder: sessions that write and read there, and what a check found wrong.

They use the package as its commands do. A check that fails answers what it saw, as a list of faults, so that a test can
also ask for faults: from a mutant (in_box_mutants.py).
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any
from unittest.mock import patch

from lab.box import Box as LabBox
from lab.driver import note
from lab.in_box_mutants import MUTANTS
from lab.job import Job
from lab.lab import Lab
from lab.server import EXPORT

from sotbus import message
from sotbus.assembly import assemble
from sotbus.comm import cursor, folder, holder, inbox, manager_record, reading, registry_lock
from sotbus.comm.box import Box
from sotbus.comm.client import Client
from sotbus.comm.history import open_history
from sotbus.comm.membership import join
from sotbus.comm.sending import Outbox
from sotbus.config import Config
from sotbus.errors import InboxBusy, InboxLockHeld, SotbusError

Notes = Generator[object, None, Any]
"""A call that notes as it goes and answers at its end."""

Seen = tuple[object, object, object]
"""What box B saw of a change that box A had just made: a mutant, then the package as it is; and what it should see."""

Scenario = Callable[[Lab, str], Seen]

POLL_PAUSE_S = 0.1
CURSOR_PAUSE_S = 0.02
"""Between two moves of a cursor: a read that meets several of them in a row is not what is tested."""

SHOWN_FAULTS = 10


def client_of(
    shared: str, name: str, environ: Mapping[str, str] | None = None, notify: Callable[[str], None] = print
) -> Client:
    """A client of this box, put together as a command's is, for a session that is pinned to a project of its own."""
    project = f"{shared}/projects/{name}"
    os.makedirs(project, exist_ok=True)
    os.chdir(project)
    pin = {"SOT_COMM_HOME": f"{shared}/comm", "SOT_COMM_SELF_FILE": f"{shared}/comm/self/pin-{name}.txt"}
    given = {**pin, "PWD": project, **(environ or {})}
    client = assemble(Box.here(given), given, Config(), notify, Client)
    assert client.project.root == project
    return client


def told() -> bool:
    """Whether the host has sent a line, or closed the input."""
    return bool(select.select([0], [], [], 0)[0])


# ---- a dialogue: one session, one command a line


def session(box: LabBox, shared: str, name: str, mutant: str = "", **environ: str) -> Job:
    """On the host: a session on a box, ready for `ask`. ``environ`` goes with its commands."""
    job = box.start(serve, shared=shared, name=name, environ=environ, mutant=mutant)
    assert job.note() == "ready"
    return job


def three(lab: Lab, shared: str, name: str) -> tuple[Job, Job, Job]:
    """On the host, for a `Scenario`: a session on A, one on B, and a mutant's on B that opens no folder first."""
    on_a, on_b = session(lab.box("a"), shared, name), session(lab.box("b"), shared, "watcher")
    return on_a, on_b, session(lab.box("b"), shared, "mutant", "no_folder_open")


def ask(session: Job, word: str, *arguments: object) -> Any:
    """On the host: a method of `Session`, done there; its answer. *Errors*: AssertionError with a refusal's text."""
    said = tell(session, word, *arguments).note()
    assert "answer" in said, said
    return said["answer"]


def refused(session: Job, word: str, *arguments: object) -> Any:
    """On the host: as `ask` for what must be refused; the note with the refusal's text and time."""
    said = tell(session, word, *arguments).note()
    assert "refused" in said, said
    return said


def tell(session: Job, word: str, *arguments: object) -> Job:
    """On the host: as `ask`, but the answer, or the refusal, is the session's next note."""
    session.send(json.dumps([word, *arguments]) + "\n")
    return session


def on_server(path: str) -> str:
    """A path below /nfs as the server has it."""
    return path.replace("/nfs", EXPORT, 1)


def serve(shared: str, name: str, environ: Mapping[str, str], mutant: str = "") -> Generator[object, None, None]:
    """Be a session that does what it is asked; notes each answer or refusal, its seconds, and what was printed."""
    MUTANTS[mutant]()
    printed: list[str] = []
    session = Session(client_of(shared, name, environ, printed.append), name)
    yield "ready"
    for line in sys.stdin:
        word, *arguments = json.loads(line)
        begun = time.monotonic()
        try:
            said = {"answer": getattr(session, word)(*arguments)}
        except SotbusError as error:
            said = {"refused": type(error).__name__, "text": str(error)}
        yield {**said, "took_s": time.monotonic() - begun, "printed": "\n".join(printed)}
        printed.clear()


class Session:
    """What a test asks of a session; arguments and answers are JSON."""

    def __init__(self, client: Client, name: str) -> None:
        self.client, self.name = client, name
        self._kept: list[object] = []

    def join(self) -> str:
        return join(self.client, name=self.name).handle

    def send(self, to: str, text: str) -> None:
        Outbox(self.client).send(to, text)

    def send_half(self, to: str, text: str) -> None:
        """A send that stops for good, under its locks, when half of the line is on the server."""

        def half(fd: int, data: bytes) -> None:
            os.write(fd, data[: len(data) // 2])
            os.fsync(fd)
            note("half")
            sys.stdin.readline()

        with patch.object(inbox, "write_whole", half):
            self.send(to, text)

    def poll(self, handle: str) -> list[str]:
        """The texts that a poll shows; the cursor moves."""
        seen = reading.look_at(self.client, handle, print)
        reading.advance(self.client, handle, seen)
        return [message.text_of(value) for line in seen.lines if (value := message.parse(line))]

    def unread(self, handle: str) -> list[int]:
        seen = reading.look_at(self.client, handle, print)
        return [seen.total, reading.unread(seen, handle)]

    def make_folder(self) -> None:
        """A comm folder without a registry."""
        self.client.folder.ensure()

    def make_registry(self) -> None:
        self.client.ensure()

    def handles(self) -> list[str]:
        return sorted(self.client.registry.agents())

    def count(self) -> int:
        """One more in the registry's counter; the new value."""
        found: list[int] = []

        def change(document: dict[str, Any]) -> bool:
            document["counter"] = document.get("counter", 0) + 1
            found.append(document["counter"])
            return True

        self.client.registry.update(change, self.client.settings.lock_wait_s)
        return found[0]

    def counter(self) -> int:
        return int(self.client.registry.read().get("counter", 0))

    def keep_open(self, name: str) -> None:
        """Keep a descriptor of a file of the folder as it is now, so that its inode lives on when it is replaced."""
        self._kept.append(os.open(f"{self.client.folder.root}/{name}", os.O_RDONLY))

    def record(self) -> str | None:
        """The lock manager that the record names, None where there is no record."""
        record = manager_record.read(self.client.folder)
        return record.manager if record else None

    def take_registry_lock(self) -> str:
        """Take it and never release it; the record in it."""
        self._kept.append(self.client.registry.lock.hold(0))
        return registry_lock.read_first_line(self.client.folder.registry_lock)

    def verdict(self, record: str) -> list[str]:
        """What this process can prove of a lock's holder, and why."""
        mine = holder.own_record(self.client.box, fresh=True)
        return list(holder.judge(holder.parse(record), mine))


# ---- traffic into one inbox


def text_of(sender: str, number: int) -> str:
    """The text of a sender's message of this number: of many lengths, and like no other."""
    return f"{sender} {number} " + "x" * (number * 37 % 200)


def send_many(shared: str, name: str, to: str, count: int, mutant: str = "") -> Notes:
    """Join, note "ready", wait for a line, and send messages 0 to ``count`` - 1.

    A send that waited in vain for the lock ("nothing was appended") is tried again, and counted; after any other
    refusal no more are sent.
    """
    MUTANTS[mutant]()
    client = client_of(shared, name)
    join(client, name=name)
    outbox = Outbox(client)
    yield "ready"
    sys.stdin.readline()
    held, longest_s, faults = 0, 0.0, []
    started = time.monotonic()
    for number in range(count):
        begun = time.monotonic()
        while True:
            try:
                outbox.send(to, text_of(name, number))
                break
            except InboxLockHeld:
                held += 1
            except SotbusError as error:
                faults.append(f"{name}: FAILED -> {number}: {error}")
                break
        if faults:
            break
        longest_s = max(longest_s, time.monotonic() - begun)
    return {"held": held, "longest_s": longest_s, "took_s": time.monotonic() - started, "faults": faults}


def poll_until_told(shared: str, name: str) -> Notes:
    """Poll as the handle itself until a line comes, and once more then; what was shown is left in ``shown-<name>``."""
    client = client_of(shared, name)

    def poll() -> list[bytes]:
        seen = reading.look_at(client, name, print)
        reading.advance(client, name, seen)
        return seen.lines

    join(client, name=name)
    return (yield from _read_until_told(poll, f"{shared}/shown-{name}"))


def follow_until_told(shared: str, name: str, of: str) -> Notes:
    """Read another handle's inbox from where the last read ended, until a line comes; and count it each time."""
    client = client_of(shared, name)
    counts = [[0, 0]]
    at = 0

    def follow() -> list[bytes]:
        nonlocal at
        seen = reading.look_at(client, of, print)
        counts.append([max(counts[-1][0], seen.total), max(counts[-1][1], seen.offset)])
        assert counts[-1] == [seen.total, seen.offset], f"total or cursor went back from {counts[-2]} to {seen}"
        history = open_history(client, of)
        assert history is not None
        with history:
            new = list(history.forwards(at, history.end))
            at = history.end
        return new

    join(client, name=name)
    return (yield from _read_until_told(follow, f"{shared}/shown-{name}"))


def _read_until_told(read: Callable[[], list[bytes]], path: str) -> Notes:
    yield "ready"
    reads, busy, with_news, last = 0, 0, 0, False
    with open(path, "wb") as shown:
        while not last:
            last = told()
            try:
                lines = read()
            except InboxBusy:
                busy, last = busy + 1, False
                continue
            shown.writelines(line + b"\n" for line in lines)
            reads, with_news = reads + 1, with_news + bool(lines)
            time.sleep(POLL_PAUSE_S)
    return {"reads": reads, "busy": busy, "with_news": with_news}


def check_inbox(path: str, to: str, senders: Mapping[str, int], shown: Iterable[str] = ()) -> dict[str, Any]:
    """What is wrong with an inbox that these senders (name: how many) have filled, and with what readers were shown.

    ``order`` has a letter a line, the first one of its sender's name.
    """
    with open(path, "rb") as file:
        data = file.read()
    faults, order = [], []
    if b"\0" in data:
        faults.append(f"there are {data.count(0)} NUL bytes")
    *lines, tail = data.split(b"\n")
    if tail:
        faults.append(f"the last line is torn: {tail!r}")
    filed = dict.fromkeys(senders, 0)
    for at, line in enumerate(lines):
        value = message.parse(line) or {}
        sender = value.get("from")
        if sender not in filed or line + b"\n" != message.encode(
            sender, to, sender, text_of(sender, filed[sender]), value.get("ts", "")
        ):
            expected = f"message {filed[sender]} of {sender}" if sender in filed else "a sender's"
            faults.append(f"line {at} is not {expected}: {line[:100]!r}")
        if sender in filed:
            filed[sender] += 1
            order.append(sender[0])
    faults += [f"{name}: {filed[name]} of {count} lines" for name, count in senders.items() if filed[name] != count]
    for other in shown:
        with open(other, "rb") as file:
            if file.read() != data:
                faults.append(f"{os.path.basename(other)} is not what the inbox holds")
    return {"faults": faults[:SHOWN_FAULTS], "order": "".join(order), "bytes": len(data)}


def move_cursor(path: str, count: int) -> Notes:
    """Write a cursor once, note "ready", wait for a line, and write it on to ``count``."""
    cursor.write(path, cursor.written_form(1, b""))
    yield "ready"
    sys.stdin.readline()
    for number in range(2, count + 1):
        time.sleep(CURSOR_PAUSE_S)
        cursor.write(path, cursor.written_form(number, b""))


def read_cursor_until_told(path: str) -> Notes:
    """Read it as every look at an inbox does; answers how many reads there were, and each one that was none or older.

    Of those, the count that was read before and this one.
    """
    yield "ready"
    reads, last, back = 0, 0, []
    while not told():
        folder.refresh_folder(os.path.dirname(path))
        count = cursor.read(path).count or 0
        if count < last:
            back.append([last, count])
        reads, last = reads + 1, max(last, count)
    return {"reads": reads, "last": last, "back": back[:SHOWN_FAULTS]}
