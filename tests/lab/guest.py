"""Pid 1 of the guest kernel: it makes the boxes, and relays lines between the host and each box's driver.

The host speaks over the first serial line, JSON lines both ways:

    {"boot": {...}}                   once, at first: environment, modules, what to import before the drivers are forked
    {"make": name, "kind": ..., "how": {...}}     make a box after a `Blueprint`
    {"end": name}                     kill all of a box
    {"to": name, "body": {...}}       a command for that box's driver
    {"ack": bytes}                    from here: so many were read, so that the host never fills the line's buffer
    {"from": name, "body": {...}}     from here: an answer of a driver
    {"from": name, "down": reason}    from here: the box has ended, or could not be made

The end of the line (the host's process is gone) powers the guest off.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import tty
from pathlib import Path
from selectors import DefaultSelector
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab import keeper
from lab.blueprint import KINDS, Blueprint
from lab.driver import Children, Driver, told
from lab.line import Incoming, Lines, Outgoing, loop
from lab.syscalls import mount

SERIAL_LINE = "/dev/ttyS0"
MODULES = "/run/modules"
WRITEBACK = ("/proc/sys/vm/dirty_writeback_centisecs", "/proc/sys/vm/dirty_expire_centisecs")
"""How often, and from which age on, the kernel writes back by itself: what nobody synced is to be lost for sure."""
_HOUR_CS = 360_000


class Guest:
    """The loop, and the boxes by name: the way to the driver of each, and the process outside."""

    def __init__(self) -> None:
        self.drivers: dict[str, Outgoing] = {}
        self.keepers: dict[str, int] = {}
        self.selector = DefaultSelector()
        self.line = os.open(SERIAL_LINE, os.O_RDWR | os.O_NOCTTY)
        tty.setraw(self.line)
        self._lines = Lines(self._heard)
        # A description of its own to read from: the one to write to must block.
        Incoming(self.selector, os.open(SERIAL_LINE, os.O_RDONLY | os.O_NOCTTY), self._arrived, power_off)
        self.children = Children(self.selector, lambda _pid, _status: None)

    def serve(self) -> NoReturn:
        self.say({"hello": True})
        loop(self.selector)

    def say(self, message: dict[str, object]) -> None:
        self._write(json.dumps(message).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.line, data) :]

    def _arrived(self, data: bytes) -> None:
        self.say({"ack": len(data)})
        self._lines.feed(data)

    def _heard(self, line: bytes) -> None:
        match json.loads(line):
            case {"to": str(name), "body": body}:
                if name in self.drivers:
                    self.drivers[name].send(json.dumps(body).encode() + b"\n")
            case {"make": str(name), "kind": str(kind), "how": how}:
                self._make(name, KINDS[kind](name, **how))
            case {"end": str(name)}:
                with contextlib.suppress(KeyError, ProcessLookupError):
                    os.kill(self.keepers[name], keeper.END)
            case {"boot": boot}:
                self._boot(**boot)

    def _boot(self, environ: dict[str, str], modules_folder: str, modules: list[str], preload: list[str]) -> None:
        os.environ.clear()
        os.environ.update(environ)
        sys.path[:0] = environ["PYTHONPATH"].split(os.pathsep)
        for name in WRITEBACK:
            Path(name).write_text(str(_HOUR_CS))
        Path(MODULES, "lib").mkdir(parents=True)
        Path(MODULES, "lib/modules").symlink_to(modules_folder)
        subprocess.run(["modprobe", "-d", MODULES, "-a", *modules], check=True)
        for module in preload:
            importlib.import_module(module)

    def _make(self, name: str, blueprint: Blueprint) -> None:
        commands, answers, pid, connected = [os.pipe() for _ in range(4)]
        process = os.fork()
        if process == 0:
            _be_box(blueprint, commands[0], answers[1], pid[1], connected[0])
        for fd in (commands[0], answers[1], pid[1], connected[0]):
            os.close(fd)
        self.keepers[name] = process
        first = int(os.read(pid[0], 32) or b"0")
        os.close(pid[0])
        if first:
            try:
                blueprint.connect(first)
                os.write(connected[1], b"1")
            except RuntimeError as error:
                self.say({"from": name, "body": told(error)})
        os.close(connected[1])
        self.drivers[name] = Outgoing(self.selector, commands[1])
        prefix = b'{"from":%s,"body":' % json.dumps(name).encode()

        def down() -> None:
            del self.keepers[name]
            self.drivers.pop(name).close()
            self.say({"from": name, "down": True})

        Incoming(self.selector, answers[0], Lines(lambda line: self._write(prefix + line + b"}\n")).feed, down)


def _be_box(blueprint: Blueprint, commands: int, answers: int, pid: int, connected: int) -> NoReturn:
    """Be the first process of a box, or, where it has namespaces of its own, the one outside that waits for that."""
    try:
        signal.set_wakeup_fd(-1)
        _close_all_but(commands, answers, pid, connected)
        if blueprint.own_namespaces:
            blueprint.enter()
            first = os.fork()
            if first:
                os.write(pid, b"%d" % first)
                _close_all_but()
                keeper.keep(first)
                os._exit(0)
        else:
            os.write(pid, b"%d" % os.getpid())
        os.close(pid)
        if os.read(connected, 1):
            os.close(connected)
            blueprint.furnish()
            Driver(commands, answers).serve()
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(answers, json.dumps(told(error)).encode() + b"\n")
    finally:
        os._exit(1)


def _close_all_but(*fds: int) -> None:
    start = 3
    for fd in sorted(fds):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, 65536)


def power_off() -> NoReturn:
    """End the guest at once, with nothing written that was not."""
    Path("/proc/sysrq-trigger").write_text("o")
    while True:
        time.sleep(60)


def main() -> NoReturn:
    os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
    for source, target in (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/run")):
        mount(source, target, source)
    while os.open("/dev/null", os.O_RDWR) < 2:  # the standard streams, where the console gave none
        pass
    try:
        Guest().serve()
    except BaseException:
        traceback.print_exc()  # on the console
    finally:
        power_off()


if __name__ == "__main__":
    main()
