"""Who holds a lock: the record ``name:machine:boot:pidns:pid:start`` and the proof that its process is dead.

Sources: sot-comm v1, The registry lock; facts 3.1 (record) and 3.4 (verdicts); decisions, sot-comm 4 (pids).
"""

from __future__ import annotations

import os

from sotbus.comm.box import UNKNOWN
from sotbus.comm.processes import pid_namespace, start_ticks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from sotbus.comm.box import Box

ALIVE = "alive"
DEAD = "dead"
UNPROVABLE = "unprovable"

NAME_BYTES = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


class Holder:
    """A lock record. A field that could not be read is ``-`` (or empty) and equals nothing."""

    __slots__ = ("boot", "machine", "name", "pid", "pidns", "start")

    def __init__(self, name: str, machine: str, boot: str, pidns: str, pid: str, start: str) -> None:
        self.name = name
        self.machine = machine
        self.boot = boot
        self.pidns = pidns
        self.pid = pid
        self.start = start

    def __str__(self) -> str:
        return f"{self.name}:{self.machine}:{self.boot}:{self.pidns}:{self.pid}:{self.start}"

    def __repr__(self) -> str:
        return f"<Holder {self}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Holder) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def leaf(self) -> str:
        """The record as part of a file name: ``:`` is written ``.``."""
        return str(self).replace(":", ".")

    @property
    def names_a_file(self) -> bool:
        """Whether the record can be part of a file name: a record read from disk is anybody's text."""
        return all(c in NAME_BYTES or c == ":" for c in str(self))

    @property
    def can_prove(self) -> bool:
        """Whether a process with this record of its own can prove any death."""
        return any(known(field) for field in (self.machine, self.boot, self.pidns, self.start))

    @property
    def provable(self) -> bool:
        """Whether some box could ever prove this holder dead; else the lock is removed by hand."""
        if not known(self.boot) or not valid_pid(self.pid):
            return False
        return known(self.pidns) or (known(self.machine) and known(self.name))

    @property
    def described(self) -> str:
        return f"{self.name} pid {self.pid} start {self.start}"


def known(field: str) -> bool:
    """Whether a record's field says anything."""
    return field not in ("", UNKNOWN)


def valid_pid(text: str) -> bool:
    """Decimal, no leading zero, fits 32 bits (decisions, sot-comm 4)."""
    return text.isascii() and text.isdigit() and text[0] != "0" and len(text) <= 10 and int(text) < 2**32


def parse(line: str) -> Holder | None:
    """A record from a lock file's first line: six fields and a pid of digits. None where it names no holder."""
    fields = line.split(":")
    if len(fields) != 6 or not fields[4].isascii() or not fields[4].isdigit():
        return None
    return Holder(*fields)


def own_record(box: Box, *, fresh: bool) -> Holder:
    """This process's record. The pid is the caller's, so take it in the process that will hold the lock.

    The four proof fields are ``-`` where ``fresh`` is false (the mount proves no fresh read) or where /proc is not this
    process's own.
    """
    name = "".join(c if c in NAME_BYTES else "_" for c in box.declared_host) or UNKNOWN
    pid = os.getpid()
    start = _own_start(pid, box.proc) if fresh else None
    if start is None:
        return Holder(name, UNKNOWN, UNKNOWN, UNKNOWN, str(pid), UNKNOWN)
    pidns = pid_namespace(pid, box.proc)
    return Holder(name, box.machine_id or UNKNOWN, box.boot_id or UNKNOWN, pidns or UNKNOWN, str(pid), start)


def _own_start(pid: int, proc: str) -> str | None:
    """This process's start tick, or None where /proc/self is not this process (a foreign or absent /proc)."""
    try:
        with open(f"{proc}/self/stat", "rb") as file:
            data = file.read()
        if data.split(b" ", 1)[0] != str(pid).encode():
            return None
        return start_ticks(pid, proc)
    except OSError:
        return None


def judge(record: Holder | None, me: Holder, start_of: Callable[[int], str | None] = start_ticks) -> tuple[str, str]:
    """Is this holder provably dead? Answers a verdict and its reason; the first matching rule wins (facts 3.4).

    :param start_of: start tick of a pid here, None where there is no such process; OSError where it cannot be read.
    """
    if record is None:
        return UNPROVABLE, "its record names no holder"
    if not me.can_prove:
        return UNPROVABLE, "this box cannot prove a death"
    same_boot = known(record.boot) and record.boot == me.boot
    if same_boot and known(record.pidns) and record.pidns == me.pidns:
        return _judge_here(record, start_of)
    same_machine = known(record.machine) and record.machine == me.machine
    same_name = known(record.name) and record.name == me.name
    if same_machine and same_name and known(record.boot) and known(me.boot) and not same_boot:
        if not valid_pid(record.pid):
            return UNPROVABLE, f"its pid {record.pid} is not one"
        return DEAD, "its machine has rebooted since"
    if not same_machine or not same_name:
        return UNPROVABLE, "it is on another machine"
    return UNPROVABLE, "it is in another pid namespace"


def _judge_here(record: Holder, start_of: Callable[[int], str | None]) -> tuple[str, str]:
    """The verdict on a holder of this boot and pid namespace, by its pid."""
    if not valid_pid(record.pid):
        return UNPROVABLE, f"its pid {record.pid} is not one"
    try:
        start = start_of(int(record.pid))
    except OSError:
        return UNPROVABLE, "its /proc entry cannot be read"
    if start is None:
        return DEAD, "it has exited"
    if known(record.start) and start != record.start:
        return DEAD, "its pid now names another process"
    return ALIVE, "it is running"
