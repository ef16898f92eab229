"""Calls for boxes between which something fails: sessions that send, join, and stop at an exact place of either.

A call that is to stop notes the place and waits for a line of its standard input. What it stops at is a function that
the append or the registry calls, wrapped in this call's own process; nothing of the product knows of it.
"""

from __future__ import annotations

import importlib
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, NotRequired, TypedDict

import trio
from lab.driver import note

from sotbus import open_bus
from sotbus.assembly import assemble
from sotbus.cli.main import COMMANDS, main
from sotbus.cli.watchdog import watchdog
from sotbus.comm import membership
from sotbus.comm.box import Box
from sotbus.comm.client import Client
from sotbus.comm.lock_manager import FlockManager
from sotbus.comm.reading import look_at
from sotbus.comm.sending import Outbox, touch
from sotbus.config import Config
from sotbus.errors import FilingFailed, SotbusError
from sotbus.message import parse

LOCKED = "locked"
FENCED = "fenced"
TO_WRITE = "to write"
HALF = "half written"
HALF_THERE = "half written, and on the server"
WRITTEN = "written"
SYNCED = "synced"
"""Places of an append, in their order; ``HALF`` is in this box's memory alone, and so is ``WRITTEN``."""

TO_RENAME = "to rename"
TO_RELEASE = "to release"
"""Places of a registry write: the new text is synced, and not yet in place; it is in place, and the lock is held."""

NO_FENCE = "no fence"
CUT_BY_PATH = "cut by path"
"""Mutants of the append: without the second flock; with truncate(2) on the inbox's path for ftruncate(2)."""

DONE = "done"
FAILED = "FAILED"
FIRST_OWN_FD = 4
"""Descriptors below are the standard streams and the driver's."""


class Answer(TypedDict):
    """What an operation answered. ``text`` is what it was about: a message's text, a handle."""

    text: str
    said: str
    unknown: bool
    kind: str
    reason: str
    seconds: float
    to: NotRequired[str]


def answer(text: str, work: Callable[[], object]) -> Answer:
    """Do it; a SotbusError is an answer too."""
    begun = time.monotonic()
    said, unknown, kind, reason = DONE, False, "", ""
    try:
        work()
    except SotbusError as error:
        said, kind, reason = FAILED, type(error).__name__, str(error)
        unknown = isinstance(error, FilingFailed) and error.outcome_unknown
    seconds = time.monotonic() - begun
    return {"text": text, "said": said, "unknown": unknown, "kind": kind, "reason": reason, "seconds": seconds}


def unknown(text: str, to: str) -> Answer:
    """The answer of a sender that gave none: its line is there at most once."""
    nothing: Answer = {"text": text, "said": FAILED, "unknown": True, "kind": "", "reason": "no answer", "seconds": 0}
    return {**nothing, "to": to}


def environ_of(home: str, name: str, **waits: str) -> dict[str, str]:
    """The variables of a session that is pinned to a project of its own on this box; this process goes there."""
    project = f"/root/projects/{name}"
    os.makedirs(project, exist_ok=True)
    os.chdir(project)
    return {"SOT_COMM_HOME": home, "SOT_COMM_SELF_FILE": f"{home}/self/pin-{name}.txt", "PWD": project, **waits}


def client_of(home: str, name: str, **waits: str) -> Client:
    """A session's client, put together as a command's is."""
    environ = environ_of(home, name, **waits)
    client = assemble(Box.here(environ), environ, Config(), print, Client)
    assert client.project.root == environ["PWD"]  # read now, while that is the working directory
    return client


def contradictions(content: str, answers: Sequence[Answer], standing: str = "") -> list[str]:
    """What in an inbox's bytes is not as the answers say; they are all that was ever sent there.

    :param content: the bytes, as `contents` gives them.
    :param standing: bytes that stood before the last answers came, and must stand.
    """
    found = []
    if not content.startswith(standing):
        found.append(f"{standing!r} does not stand")
    if "\0" in content:
        found.append(f"{content.count(chr(0))} NUL bytes")
    *lines, torn = content.split("\n")
    if torn:
        found.append(f"the torn line {torn!r}")
    stored: Counter[str] = Counter()
    for line in lines:
        value = parse(line.encode("latin-1"))
        if value is None:
            found.append(f"{line!r} is no message")
        else:
            stored[value["msg"]] += 1
    for one in answers:
        count = stored.pop(one["text"], 0)
        most, least = (1, 1) if one["said"] == DONE else (int(one["unknown"]), 0)
        if not least <= count <= most:
            found.append(f"{one['text']!r} was answered {one['said']} ({one['reason']}) and is there {count} times")
    return found + [f"{text!r} was never sent" for text in stored]


# ---- sessions that go on


def join(home: str, names: Sequence[str], wait_s: float = 10) -> list[Answer]:
    """Join under each of the names."""
    waits = {"SOT_LOCK_WAIT_SECS": f"{wait_s:g}"}
    clients = {name: client_of(home, name, **waits) for name in names}
    return [answer(name, partial(membership.join, client, name=name)) for name, client in clients.items()]


def join_each(homes: Sequence[str], name: str, wait_s: float) -> list[Answer]:
    """Join each of the folders under one name."""
    return [one for home in homes for one in join(home, [name], wait_s)]


def send(home: str, name: str, to: Sequence[str], texts: Sequence[str], wait_s: float = 2) -> list[Answer]:
    """Send each of the texts to each of the recipients; a text that is sent ends with the recipient's handle."""
    outbox = Outbox(client_of(home, name, SOT_INBOX_LOCK_WAIT_SECS=f"{wait_s:g}"))
    answers: list[Answer] = []
    for handle in to:
        for text in texts:
            whole = f"{text} {handle}"
            answers.append({**answer(whole, partial(outbox.send, handle, whole)), "to": handle})
    return answers


def read(home: str, name: str, of: str) -> int:
    """Look at the registry and at an inbox, as a poll does; answers how many lines that has."""
    client = client_of(home, name)
    client.registry.agents()
    return look_at(client, of, client.notify).total


def contents(folder: str, ending: str) -> dict[str, str]:
    """Every file of that ending, one character a byte, by its name without the ending. For the server."""
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(ending):
            with open(f"{folder}/{name}", "rb") as file:
                found[name.removesuffix(ending)] = file.read().decode("latin-1")
    return found


# ---- sessions that stop at a place


def reach(place: str) -> None:
    """Stop here. A command's bound does not run meanwhile: how long that is depends on the other processes."""
    watchdog.pause()
    note(place)
    sys.stdin.readline()
    watchdog.progress()


def is_inbox(fd: int) -> bool:
    return fd >= FIRST_OWN_FD and os.readlink(f"/proc/self/fd/{fd}").endswith(".jsonl")


def stop_append_at(places: Sequence[str]) -> None:
    """Stop this process's appends at each of the places, once."""
    write, fdatasync, hold, fence = os.write, os.fdatasync, FlockManager.hold, FlockManager.fence
    left = list(places)
    wrote: list[bool] = []

    def at(place: str) -> bool:
        if place not in left:
            return False
        left.remove(place)
        reach(place)
        return True

    def held(self: FlockManager, path: str, exclusive: bool, bound_s: float) -> object:
        lock = hold(self, path, exclusive, bound_s)
        at(LOCKED)
        return lock

    def fenced(self: FlockManager, fd: int, bound_s: float) -> bool:
        leased = fence(self, fd, bound_s)
        at(FENCED)
        return leased

    def written(fd: int, data: bytes) -> int:
        if not is_inbox(fd):
            return write(fd, data)
        at(TO_WRITE)
        half = HALF in left or HALF_THERE in left
        done = write(fd, data[: len(data) // 2] if half else data)
        if HALF_THERE in left:
            fdatasync(fd)
        wrote.append(True)
        at(HALF) or at(HALF_THERE) or at(WRITTEN)
        return done

    def synced(fd: int) -> None:
        fdatasync(fd)
        if wrote:  # the one before the write tells of what earlier writers lost
            at(SYNCED)

    replace(FlockManager, hold=held, fence=fenced)
    replace(os, write=written, fdatasync=synced)


def stop_registry_at(place: str) -> None:
    """Stop this process's first registry write at the place."""
    rename, unlink = os.rename, os.unlink
    left = [place]

    def at(there: str) -> None:
        if there in left:
            left.clear()
            reach(there)

    def renamed(source: str, target: str) -> None:
        if target.endswith("/registry.json"):
            at(TO_RENAME)
        rename(source, target)

    def unlinked(path: str) -> None:
        if path.endswith("/.registry.lock"):
            at(TO_RELEASE)
        unlink(path)

    replace(os, rename=renamed, unlink=unlinked)


def mutate(mutant: str) -> None:
    """Have this process append as a mutant does."""
    if mutant == NO_FENCE:
        replace(FlockManager, fence=lambda *_: False)
    elif mutant == CUT_BY_PATH:
        replace(os, ftruncate=lambda fd, length: os.truncate(os.readlink(f"/proc/self/fd/{fd}"), length))
    else:
        assert not mutant


def replace(owner: object, **functions: Callable[..., object]) -> None:
    for name, function in functions.items():
        setattr(owner, name, function)


def send_stopping(home: str, name: str, to: str, text: str, places: Sequence[str], mutant: str = "") -> Answer:
    """Send, with a stop at each of the places."""
    outbox = Outbox(client_of(home, name))
    mutate(mutant)
    stop_append_at(places)
    whole = f"{text} {to}"
    return {**answer(whole, lambda: outbox.send(to, whole)), "to": to}


def command_stopping(
    home: str, name: str, words: Sequence[str], places: Sequence[str], waits: Mapping[str, str]
) -> int:
    """A session's command in this process, with a stop at each of the places of its append; its exit status."""
    os.environ.update(environ_of(home, name, **waits))
    stop_append_at(places)
    return main(words)


def command_when_told(words: Sequence[str], environ: Mapping[str, str], cwd: str) -> Generator[str, None, int]:
    """Note "ready", wait for a line, and run a command in this process; its exit status.

    Its module is imported before: of several that start cold on one processor, one may be at its bound by then.
    """
    os.environ.update(environ)
    os.chdir(cwd)
    importlib.import_module(f"sotbus.cli.{COMMANDS[words[0]][0]}")
    yield "ready"
    sys.stdin.readline()
    return main(words)


def join_stopping(home: str, name: str, place: str) -> Answer:
    """Join, with a stop at the place of the registry write."""
    client = client_of(home, name)
    client.ensure()
    stop_registry_at(place)
    return answer(name, lambda: membership.join(client, name=name))


# ---- sessions under load


def told() -> bool:
    """Whether the host has sent a line."""
    return bool(select.select([0], [], [], 0)[0])


def send_until_told(home: str, name: str, to: Sequence[str]) -> Generator[int, None, list[Answer]]:
    """Send to each in turn until a line comes; notes how many were filed so far, and returns the answers."""
    outbox = Outbox(client_of(home, name))
    answers: list[Answer] = []
    filed = 0
    while not told():
        handle = to[len(answers) % len(to)]
        text = f"{len(answers)} of {name}"
        answers.append({**answer(text, partial(outbox.send, handle, text)), "to": handle})
        if answers[-1]["said"] == DONE:
            filed += 1
            yield filed
    return answers


def register_until_told(home: str, name: str) -> Generator[int, None, list[Answer]]:
    """Join, be touched and, every second time, leave, until a line comes; notes how many joined so far.

    Returns the answers, in order: of the joins about the handle, of the leaves about it with a minus before.
    """
    answers: list[Answer] = []
    joined = 0
    while not told():
        handle = f"{name}-{joined}"
        client = client_of(home, handle)
        answers.append(answer(handle, partial(membership.join, client, name=handle)))
        if answers[-1]["said"] == DONE:
            joined += 1
            touch(client, handle)
            if joined % 2:
                answers.append(answer(f"-{handle}", partial(membership.leave, client)))
            yield joined
    return answers


# ---- programs


def two_buses(far: str, near: str, patience_s: float) -> None:
    """A program with buses in two folders, one of them on the mount; for what it notes see `Buses`."""
    os.environ["SOT_INBOX_LOCK_WAIT_SECS"] = "0.5"
    trio.run(Buses(far, near, patience_s).run)


class Buses:
    """Sends into the far folder, while the mount hangs, and meanwhile serves the near one.

    Notes "open" and waits for a line: the mount hangs now. One bus sends with a deadline and is then left with one; one
    sends without any. Notes the figures when the first has ended, and at last the answer to the second.
    """

    def __init__(self, far: str, near: str, patience_s: float) -> None:
        self.far, self.near, self.patience_s = far, near, patience_s
        self.figures: dict[str, Any] = {}
        self.hangs = trio.Event()
        self.impatient_over = trio.Event()

    async def run(self) -> None:
        async with open_bus("near", comm_home=self.near) as near, trio.open_nursery() as nursery:
            await nursery.start(self.send_impatiently)
            await nursery.start(self.send_patiently)
            note("open")
            await trio.to_thread.run_sync(sys.stdin.readline)
            self.hangs.set()
            turns_s: list[float] = []
            while not self.impatient_over.is_set():
                begun = trio.current_time()
                await near.send("@near", f"number {len(turns_s)}")
                async with near.poll() as news:
                    assert [message.text for message in news] == [f"number {len(turns_s)}"]
                turns_s.append(round(trio.current_time() - begun, 3))
                await trio.sleep(0.02)
            self.figures["patient_has_ended"] = "patient" in self.figures
            note({**self.figures, "turns_s": turns_s})
        note(self.figures["patient"])

    async def send_impatiently(self, task_status: trio.TaskStatus[None]) -> None:
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(open_bus("impatient", comm_home=self.far))
            task_status.started()
            await self.hangs.wait()
            begun = trio.current_time()
            with trio.move_on_after(self.patience_s) as sending:
                await bus.send("@bob", "impatient to bob")
            sent = trio.current_time()
            with trio.move_on_after(self.patience_s) as leaving:
                await stack.aclose()
            left = trio.current_time()
        self.figures.update(sending_s=sent - begun, sending_cancelled=sending.cancelled_caught)
        self.figures.update(leaving_s=left - sent, leaving_cancelled=leaving.cancelled_caught)
        self.impatient_over.set()

    async def send_patiently(self, task_status: trio.TaskStatus[None]) -> None:
        async with open_bus("patient", comm_home=self.far) as bus:
            task_status.started()
            await self.hangs.wait()
            begun = trio.current_time()
            said = DONE
            try:
                await bus.send("@bob", "patient to bob")
            except SotbusError as error:
                said = str(error)
            self.figures["patient"] = {"said": said, "seconds": trio.current_time() - begun}
