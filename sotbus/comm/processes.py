"""Processes as /proc shows them: start ticks, parents, and the agent harnesses among a process's ancestors."""

from __future__ import annotations

import os

HARNESSES = ("claude", "codex", "opencode", "hermes", "pi", "antigravity")
"""Base names of agent harnesses (decisions, sot-comm 13)."""

INTERPRETERS = ("node", "python", "bun")
"""Programs that run a harness written for them; counted once with a native child of theirs."""

INLINE_CODE = ("-c", "-e", "--eval", "-p", "--print")
"""Options after which an interpreter runs text and no script."""

STAT_BYTES = 4096
"""More than a process's stat line can have: 52 numbers and a name of 64 bytes (proc_pid_stat(5))."""

DEAD_STATES = ("Z", "X")
"""A zombie runs nothing any more (proc_pid_stat(5), field 3)."""

VALUE_OPTIONS = ("-r", "--require", "--import", "--loader", "--experimental-loader", "-C", "--conditions", "-W", "-X")
"""Options of node and python that take the next word."""

SUBCOMMANDS = ("run", "x")
"""Words of bun that stand before the script."""

MAX_ANCESTORS = 64
"""A longer chain is refused as unreadable (facts 12)."""

INITIAL_PID_NAMESPACE = "4026531836"
"""Inode of the machine's first pid namespace (Linux ``PROC_PID_INIT_INO``)."""


class Process:
    """A process: pid, parent's pid, start in clock ticks since boot (proc_pid_stat(5) field 22), harness or "".

    ``terminal`` is the device number of its controlling terminal, 0 for none. ``wrapper`` says that an interpreter runs
    the harness, which may then run a native child of its own.
    """

    __slots__ = ("harness", "parent", "pid", "start", "terminal", "wrapper")

    def __init__(
        self, pid: int, parent: int, start: str, harness: str, terminal: int = 0, *, wrapper: bool = False
    ) -> None:
        self.pid = pid
        self.parent = parent
        self.start = start
        self.harness = harness
        self.terminal = terminal
        self.wrapper = wrapper

    def __repr__(self) -> str:
        return f"<Process {self.pid} start={self.start}{' ' + self.harness if self.harness else ''}>"


def stat_fields(pid: int | str, proc: str = "/proc") -> list[str] | None:
    """The fields of /proc/<pid>/stat after the command's last ``)``, or None where there is no such process.

    :raises OSError: the entry exists and cannot be read.
    """
    try:
        fd = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.read(fd, STAT_BYTES)
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return data[data.rfind(b")") + 1 :].decode("ascii", "replace").split()


def start_ticks(pid: int | str, proc: str = "/proc") -> str | None:
    """When a process started, in clock ticks since boot, as digits; None where there is no such process.

    :raises OSError: the entry exists and cannot be read, or holds no start.
    """
    fields = stat_fields(pid, proc)
    if fields is None:
        return None
    if len(fields) < 20 or not fields[19].isascii() or not fields[19].isdigit():
        raise OSError(f"/proc/{pid}/stat holds no start time")
    return fields[19]


def pid_namespace(pid: int | str, proc: str = "/proc") -> str | None:
    """The digits of ``pid:[...]``, the inode of the process's pid namespace (pid_namespaces(7))."""
    try:
        link = os.readlink(f"{proc}/{pid}/ns/pid")
    except OSError:
        return None
    digits = link[5:-1] if link.startswith("pid:[") and link.endswith("]") else ""
    return digits if digits.isascii() and digits.isdigit() else None


def is_alive(pid: object, start: object, proc: str = "/proc") -> bool:
    """Whether the process that a registry entry records (pid, start tick) runs here. False where it cannot be told."""
    if type(pid) is not int or pid <= 0 or start is None:
        return False
    try:
        fields = stat_fields(pid, proc)
    except OSError:
        return False
    return fields is not None and len(fields) > 19 and fields[19] == str(start) and fields[0] not in DEAD_STATES


def harness_name(argv: list[str]) -> str:
    """The harness a command line is, itself or through an interpreter, or ""."""
    if not argv:
        return ""
    name = os.path.basename(argv[0]).lower()
    if name in HARNESSES:
        return name
    if name.rstrip("0123456789.") not in INTERPRETERS:
        return ""
    words = iter(argv[1:])
    for word in words:
        if word in INLINE_CODE:
            return ""
        if word in VALUE_OPTIONS:
            next(words, "")
        elif not word.startswith("-") and word not in SUBCOMMANDS:
            return _script_harness(word)
    return ""


def _script_harness(script: str) -> str:
    """The harness a script belongs to: by its own name, or by the package folder it lies in."""
    name = os.path.basename(script).lower()
    for ending in (".js", ".mjs", ".cjs", ".py", ".ts"):
        name = name.removesuffix(ending)
    if name in HARNESSES:
        return name
    parts = script.lower().split("/")
    for package, harness in (("claude-code", "claude"), ("codex", "codex"), ("opencode-ai", "opencode")):
        if package in parts and "node_modules" in parts:
            return harness
    return ""


def read_process(pid: int, proc: str = "/proc") -> Process | None:
    """A process now, or None where it is gone. :raises OSError: it exists and cannot be read."""
    fields = stat_fields(pid, proc)
    if fields is None or len(fields) < 20:
        return None
    try:
        with open(f"{proc}/{pid}/cmdline", "rb") as file:
            raw = file.read(4096)
    except (FileNotFoundError, ProcessLookupError):
        return None
    argv = [os.fsdecode(word) for word in raw.split(b"\0") if word]
    name = harness_name(argv)
    wrapper = bool(name) and os.path.basename(argv[0]).lower() not in HARNESSES
    return Process(pid, int(fields[1]), fields[19], name, int(fields[4]), wrapper=wrapper)


class Ancestry:
    """A process's ancestors, nearest first, itself left out.

    ``complete`` is false where an ancestor could not be read, where there are too many, or where the walk ended at the
    top of a pid namespace that is not the machine's first, so that a harness outside of it cannot be seen.
    ``readable`` is false only in the first two cases. ``terminal`` is the process's own controlling terminal.
    """

    __slots__ = ("chain", "complete", "readable", "terminal")

    def __init__(self, chain: list[Process], readable: bool, complete: bool, terminal: int = 0) -> None:
        self.chain = chain
        self.readable = readable
        self.complete = complete
        self.terminal = terminal

    def layers(self) -> list[Process]:
        """Harnesses, nearest first. A native child and the wrapper that runs it, of one name, are one: the child."""
        found: list[Process] = []
        previous: Process | None = None
        for process in self.chain:
            wraps = process.wrapper and previous is not None and not previous.wrapper
            if process.harness and not (wraps and previous is not None and previous.harness == process.harness):
                found.append(process)
            previous = process
        return found


def ancestry(pid: int, proc: str = "/proc") -> Ancestry:
    """Walk from a process's parent to the top of its tree. Never raises."""
    chain: list[Process] = []
    try:
        fields = stat_fields(pid, proc)
        if fields is None:
            return Ancestry(chain, readable=False, complete=False)
        parent, terminal = int(fields[1]), int(fields[4])
        while parent > 0:
            if len(chain) >= MAX_ANCESTORS:
                return Ancestry(chain, readable=False, complete=False)
            process = read_process(parent, proc)
            if process is None:
                return Ancestry(chain, readable=False, complete=False)
            chain.append(process)
            parent = process.parent
    except (OSError, ValueError):
        return Ancestry(chain, readable=False, complete=False)
    return Ancestry(chain, True, pid_namespace(pid, proc) == INITIAL_PID_NAMESPACE, terminal)
