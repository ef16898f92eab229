"""The one process of a box that the host talks to: it starts calls and commands, and relays what they say.

Each call runs in a **forked child**, in a session of its own: a call that hangs in the kernel on a dead mount holds up
nothing else, has a pid that can be killed or stopped, has fcntl(2) locks of its own, and leaves nothing behind in the
next call. The driver itself touches no mount. It is a loop of one thread, so that fork(2) is safe.

In a box the driver is pid 1 of the pid namespace and so reaps orphans; when it ends, the kernel kills the whole box.

A child's descriptor 3 takes its lines for the host (`note`, `result`, `error`), each one JSON object.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import inspect
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from selectors import DefaultSelector
from typing import NoReturn

from lab.line import Incoming, Lines, Outgoing, loop

CONTROL_FD = 3
_FREE_FD = 16  # a child's pipes are moved here before they take 0 to 3, so that none is overwritten on the way
_PAST_EVERY_FD = 65536
_TARGET = re.compile(r"[\w.]+:[\w.]+")


class Children:
    """SIGCHLD as a readable descriptor, and the children that have ended since."""

    def __init__(self, selector: DefaultSelector, ended: Callable[[int, int], None]) -> None:
        self._ended = ended
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        Incoming(selector, reading, lambda _: self.reap(), lambda: None)

    def reap(self) -> None:
        """Tell each child that has ended, with its exit status (minus the signal where one killed it)."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._ended(pid, os.waitstatus_to_exitcode(status))


class Job:
    """A running child, and the pipes to and from it."""

    def __init__(self, number: int, pid: int, stdin: Outgoing) -> None:
        self.number, self.pid, self.stdin = number, pid, stdin
        self.pipes: list[Incoming] = []

    def signal(self, number: int) -> None:
        """Send a signal to all of its process group, or to the child alone where it has not yet made that."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            os.kill(self.pid, number)


class Driver:
    """Serves one box until its commands end."""

    def __init__(self, commands: int, answers: int) -> None:
        self.selector = DefaultSelector()
        self.jobs: dict[int, Job] = {}
        self._answers = answers
        self._children = Children(self.selector, self._ended)
        Incoming(self.selector, commands, Lines(self._command).feed, self._over)

    def serve(self) -> NoReturn:
        self.answer({"up": True})
        loop(self.selector)

    def answer(self, message: Mapping[str, object]) -> None:
        self._write(json.dumps(message).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        while data:  # may block: pid 1 of the guest always reads
            data = data[os.write(self._answers, data) :]

    def _over(self) -> NoReturn:
        os._exit(0)

    def _command(self, line: bytes) -> None:
        command = json.loads(line)
        number = command["id"]
        match command["op"]:
            case "call":
                try:
                    function = _function(command["target"])
                except Exception as error:
                    self.answer({"id": number, **told(error)})
                    self.answer({"id": number, "exit": 1})
                else:
                    self._start(number, lambda: _call(function, command["arguments"]))
            case "run":
                self._start(number, lambda: _exec(command["argv"], command["env"], command["cwd"]))
            case "input":
                if number in self.jobs:
                    self.jobs[number].stdin.send(command["data"].encode("latin-1"))
            case "close":
                if number in self.jobs:
                    self.jobs[number].stdin.close()
            case "signal":
                if number in self.jobs:
                    self.jobs[number].signal(command["signal"])
            case "kill":
                try:
                    os.kill(command["pid"], command["signal"])
                    self.answer({"id": number, "result": None})
                except OSError as error:
                    self.answer({"id": number, **told(error)})
                self.answer({"id": number, "exit": 0})

    def _start(self, number: int, work: Callable[[], None]) -> None:
        (stdin, feed), *from_child = [os.pipe() for _ in range(4)]  # standard streams, then the lines for the host
        childs = [stdin, *(writing for _, writing in from_child)]
        pid = os.fork()
        if pid == 0:
            _be_child(childs, work)
        for fd in childs:
            os.close(fd)
        job = self.jobs[number] = Job(number, pid, Outgoing(self.selector, feed))
        self.answer({"id": number, "pid": pid})
        relays = (self._relay(number, "out"), self._relay(number, "err"), Lines(self._said(number)).feed)
        for (reading, _), relay in zip(from_child, relays, strict=True):
            job.pipes.append(Incoming(self.selector, reading, relay, lambda: None))

    def _relay(self, number: int, stream: str) -> Callable[[bytes], None]:
        return lambda data: self.answer({"id": number, stream: data.decode("latin-1")})

    def _said(self, number: int) -> Callable[[bytes], None]:
        return lambda line: self._write(b'{"id":%d,%s\n' % (number, line.removeprefix(b"{")))

    def _ended(self, pid: int, status: int) -> None:
        """A child ended: tell its exit after all that it said. Its own children may go on writing; that is relayed."""
        for job in self.jobs.values():
            if job.pid == pid:
                del self.jobs[job.number]
                for pipe in job.pipes:
                    pipe.drain()
                job.stdin.close()
                self.answer({"id": job.number, "exit": status})
                return


def _be_child(fds: list[int], work: Callable[[], None]) -> NoReturn:
    """Be the child that does ``work``: a session of its own, the four pipes as descriptors 0 to 3, no others."""
    status = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for target, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE_FD) for fd in fds]):
            os.dup2(fd, target, inheritable=target != CONTROL_FD)
        os.closerange(CONTROL_FD + 1, _PAST_EVERY_FD)
        sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
        work()
        status = 0
    except BaseException as error:
        tell(told(error))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)


def tell(message: Mapping[str, object]) -> None:
    """One line for the host, written before this returns. In a call only."""
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(CONTROL_FD, data) :]


def note(value: object) -> None:
    """Give the host a JSON value while the call goes on; a call that is a generator yields it instead."""
    tell({"note": value})


def told(error: BaseException) -> dict[str, object]:
    """An exception as the host's `RemoteError` needs it."""
    number = error.errno if isinstance(error, OSError) else None
    text = "".join(traceback.format_exception(error))
    return {"error": {"kind": type(error).__name__, "text": str(error), "errno": number, "traceback": text}}


def _function(target: str) -> Callable[..., object]:
    """The function that ``module:name`` names, or one that runs the snippet which ``target`` is.

    A module without a dot is one of this folder. It is imported here, in the driver, once.
    """
    if not _TARGET.fullmatch(target):
        return functools.partial(_snippet, target)
    module, name = target.split(":")
    found: object = importlib.import_module(module if "." in module else f"lab.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{target} is not callable")
    return found


def _snippet(source: str, **arguments: object) -> object:
    """The value of an expression; of statements, what they leave in the name ``result``."""
    names: dict[str, object] = {"fcntl": fcntl, "os": os, "time": time, "note": note, **arguments}
    try:
        code = compile(source, "<snippet>", "eval")
    except SyntaxError:
        exec(compile(source, "<snippet>", "exec"), names)
        return names.get("result")
    value: object = eval(code, names)
    return value


def _call(function: Callable[..., object], arguments: Mapping[str, object]) -> None:
    result = function(**arguments)
    if inspect.isgenerator(result):
        while True:
            try:
                note(next(result))
            except StopIteration as end:
                result = end.value
                break
    tell({"result": result})


def _exec(argv: list[str], environ: Mapping[str, str], cwd: str) -> NoReturn:
    os.chdir(cwd)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvpe(argv[0], argv, os.environ | environ)
