"""A box from the host: calls and commands in it, its processes, its mounts."""

from __future__ import annotations

import itertools
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lab.job import DEFAULT_TIMEOUT_S, Died, Job
from lab.machine import LabError, Machine, Message


class Box:
    """One box of a lab, or the one box of a `PowerBox`."""

    def __init__(self, name: str, machine_id: str) -> None:
        self.name, self.machine_id = name, machine_id
        self._machine: Machine | None = None
        self._how: dict[str, object] = {}
        self._mounted: list[str] = []
        self._jobs: dict[int, Job] = {}
        self._numbers = itertools.count(1)
        self._state = threading.Condition()
        self._up, self._down, self._trouble = False, True, ""

    def __repr__(self) -> str:
        return f"<box {self.name}>"

    # ---- used by the lab

    def make(self, machine: Machine, kind: str, **how: object) -> None:
        """Ask the guest for it; `wait_until_up` afterwards."""
        self._machine, self._how = machine, how
        self._mounted.clear()
        self._up, self._down, self._trouble = False, False, ""
        machine.send({"make": self.name, "kind": kind, "how": {"machine_id": self.machine_id, **how}})

    def wait_until_up(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        with self._state:
            if not self._state.wait_for(lambda: self._up or self._down, timeout_s):
                raise LabError(f"box {self.name} is not up after {timeout_s:.0f} s")
        if self._down:
            raise LabError(f"box {self.name} could not be made: {self._trouble or 'its driver told no reason'}")

    def end(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """SIGKILL to all of its processes, and wait for that."""
        self._the_machine.send({"end": self.name})
        with self._state:
            if not self._state.wait_for(lambda: self._down, timeout_s):
                raise LabError(f"box {self.name} has not ended after {timeout_s:.0f} s")

    def heard(self, message: Message) -> None:
        """A message of this box; in the machine's thread."""
        match message:
            case {"down": _}:
                self.lost()
            case {"body": {"up": True}}:
                with self._state:
                    self._up = True
                    self._state.notify_all()
            case {"body": {"id": int(number)} as body}:
                if number in self._jobs:
                    self._jobs[number].heard(body)
            case {"body": {"error": {"traceback": str(text)}}}:
                self._trouble = text

    def lost(self) -> None:
        """All that ran in it is gone."""
        with self._state:
            self._down = True
            self._state.notify_all()
        for job in list(self._jobs.values()):
            if not job.ended:
                job.lose()

    @property
    def _the_machine(self) -> Machine:
        if self._machine is None or self._down:
            raise LabError(f"box {self.name} is down\n{self._trouble}".rstrip())
        return self._machine

    # ---- used by tests

    def start(self, target: str | Callable[..., object], /, **arguments: object) -> Job:
        """Begin a call, in a process of its own; `Job.note` and `Job.result` collect what it says.

        ``target`` is a function of a module of this folder (the function, or ``"module:name"``), called with
        ``arguments`` (JSON values) by keyword; what it yields are notes, what it returns is the result. Or it is a
        snippet: an expression, whose value is the result, or statements that leave ``result``.
        """
        if not isinstance(target, str):
            if not target.__module__.startswith("lab."):
                raise ValueError(f"{target.__qualname__} is of {target.__module__}: a box imports modules of tests/lab")
            target = f"{target.__module__}:{target.__qualname__}"
        return self._begin(f"{self.name}: {target}", {"op": "call", "target": target, "arguments": arguments})

    def call(
        self, target: str | Callable[..., object], /, *, timeout_s: float = DEFAULT_TIMEOUT_S, **arguments: object
    ) -> Any:
        """`start`, and wait for the result. *Errors*: as `Job.result`."""
        return self.start(target, **arguments).result(timeout_s)

    def spawn(self, argv: Sequence[object], env: Mapping[str, str] | None = None, cwd: object = "/") -> Job:
        """Begin a command; ``env`` adds to the box's clean environment."""
        words = [str(word) for word in argv]
        order: Message = {"op": "run", "argv": words, "env": dict(env or {}), "cwd": str(cwd)}
        return self._begin(f"{self.name}: {' '.join(words)}", order)

    def run(
        self,
        argv: Sequence[object],
        env: Mapping[str, str] | None = None,
        cwd: object = "/",
        input: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, with what it wrote. *Errors*: as `Job.completed`; no exit status is one."""
        job = self.spawn(argv, env, cwd)
        job.send(input)
        job.close_input()
        return job.completed(timeout_s)

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """A signal to a process of the box by its pid there. *Errors*: `RemoteError` (errno 3: there is none)."""
        self._begin(f"{self.name}: kill {pid}", {"op": "kill", "pid": pid, "signal": int(number)}).result()

    def mountinfo(self) -> str:
        """proc_pid_mountinfo(5) as the box's processes see it."""
        return str(self.call("open('/proc/self/mountinfo').read()"))

    def mount(self, path: str, source: str, kind: str, options: str = "") -> None:
        """mount(2) in the box at a folder, made where it is missing; ``kind`` "bind" binds. `unmount_all` undoes it."""
        self._mount("lab.mounts:mount_at", path, source=source, kind=kind, options=options)

    def mount_nfs4(self, path: str, options: str = "hard") -> None:
        """The export once more, by NFSv4.2; a mount with the options of another shares its caches."""
        self._mount("lab.mounts:mount_nfs4", path, address=self._how["address"], options=options)

    def mount_nfs3(self, path: str, options: str = "hard") -> None:
        """The export by NFSv3 with ``nolock``, which mountinfo shows as ``local_lock=all``."""
        self._mount("lab.mounts:mount_nfs3", path, options=options)

    def unmount(self, path: str) -> None:
        """Take away what `mount` and the others put at a path last."""
        self.call("lab.mounts:unmount_at", path=path)
        self._mounted.reverse()
        self._mounted.remove(path)
        self._mounted.reverse()

    def unmount_all(self) -> None:
        """All that `mount` and the others mounted, the last first."""
        for path in self._mounted[::-1]:
            self.unmount(path)

    def _mount(self, function: str, path: str, **arguments: object) -> None:
        self.start(function, path=path, **arguments).result()
        self._mounted.append(path)

    def boot_id(self) -> str:
        return str(self.call("open('/proc/sys/kernel/random/boot_id').read().strip()"))

    def end_jobs(self) -> None:
        """SIGKILL to every call and command that still runs, and wait for their end."""
        running = [job for job in self._jobs.values() if not job.ended]
        for job in running:
            job.kill()
        for job in running:
            job.wait()
        self._jobs.clear()

    def _begin(self, title: str, order: Message) -> Job:
        machine, number = self._the_machine, next(self._numbers)

        def send(body: Message) -> None:
            machine.send({"to": self.name, "body": {"id": number, **body}})

        job = self._jobs[number] = Job(title, send)
        send(order)
        return job


__all__ = ["Box", "Died"]
