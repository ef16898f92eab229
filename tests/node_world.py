"""A world with a node: a process of its own on a machine that the test tells, clients that write bytes, and its state.

Run as a script it is the ``sotbus`` command whose every box, the node's own too, is that machine's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from world import World

from sotbus.comm import membership
from sotbus.comm.processes import start_ticks
from sotbus.comm.registry import Registry

SCRIPT = Path(__file__)

WAIT_S = 20.0
"""For what must come; a test that waits this long fails."""

HELLO = (
    b'{"v":1,"id":0,"kind":"req","op":"hello","payload":{"client_id":"sot-comm","last_seen_revision":0,"protocol":3,'
    b'"app_version":"comm","host":"vm","os_user":"uid:%d","role":"cli","name":"projA-vm"}}\n' % os.geteuid()
)
"""The hello that every client sends (facts 11)."""

FILE = (
    b'{"v":1,"id":1,"kind":"req","op":"comm.file",'
    b'"payload":{"from":"projA-vm","to":"far","text":"/slash msg","broadcast":false}}\n'
)
"""The request of facts 11, as it was seen on the wire."""


def until(condition: Callable[[], Any], wait_s: float = WAIT_S) -> Any:
    """What ``condition`` answers once it is true. *Errors*: AssertionError where it does not become so in time."""
    deadline = time.monotonic() + wait_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {wait_s:g}s"
        time.sleep(0.02)


def request(number: int, op: str, payload: Any) -> bytes:
    """A request's frame."""
    return json.dumps({"v": 1, "id": number, "kind": "req", "op": op, "payload": payload}).encode() + b"\n"


class Wire:
    """One connection to a node's socket, byte for byte."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(WAIT_S)
        try:
            self.sock.connect(path)
        except OSError:
            self.sock.close()
            raise
        self._file = self.sock.makefile("rb")

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.sock.close()

    def say(self, data: bytes) -> None:
        self.sock.sendall(data)

    def hear(self) -> dict[str, Any] | None:
        """The next frame; None at the connection's end."""
        try:
            line = self._file.readline()
        except ConnectionResetError:
            return None
        return json.loads(line) if line else None

    def greet(self) -> Wire:
        """Say hello, and hear that it was taken."""
        self.say(HELLO)
        heard = self.hear()
        assert heard is not None
        assert "error" not in heard["payload"], heard
        return self

    def ask_later(self, op: str, payload: Any, number: int = 1) -> None:
        """A request whose answer is heard later."""
        self.say(request(number, op, payload))

    def ask(self, op: str, payload: Any, number: int = 1) -> Any:
        """The payload that answers a request."""
        self.say(request(number, op, payload))
        heard = self.hear()
        assert heard is not None
        assert (heard["id"], heard["kind"], heard["op"]) == (number, "res", op)
        return heard["payload"]


class NodeProcess:
    """A ``sotbus serve``. ``said`` are its sd_notify datagrams."""

    def __init__(self, box: NodeWorld, words: tuple[str, ...], env: Mapping[str, str]) -> None:
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        name = box.runtime / f"notify-{time.monotonic_ns()}"
        self._notify.bind(str(name))
        self._notify.setblocking(False)
        self.said: list[str] = []
        self.log = box.runtime / f"log-{time.monotonic_ns()}"
        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), "serve", *words],
                env={**box.environ(env), "NOTIFY_SOCKET": str(name)},
                cwd=box.base,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )
        self.pid = self.process.pid

    def until_said(self, word: str) -> str:
        """The first datagram, of those not asked for yet, that has this line."""

        def heard() -> str:
            with contextlib.suppress(BlockingIOError):
                while True:
                    self.said.append(self._notify.recv(4096).decode())
            for at, datagram in enumerate(self.said):
                if word in datagram.split("\n"):
                    del self.said[: at + 1]
                    return datagram
            assert self.process.poll() is None, self.text()
            return ""

        return str(until(heard))

    def text(self) -> str:
        """What it wrote to standard error so far."""
        return self.log.read_text(encoding="utf-8")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its events of one name, so far."""
        lines = self.text().splitlines(keepends=True)  # the last one may be in the middle of being written
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
        return [one for one in found if one["event"] == name]

    def tell(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it, and its exit status."""
        if self.process.poll() is None:
            self.tell(number)
        return self.process.wait(WAIT_S)

    def wait(self) -> int:
        """Its exit status, once it has ended by itself."""
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        self._notify.close()


class NodeWorld(World):
    """A :class:`World` with places for a node, whose runtime folder has a short name: a socket's path is bounded."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.runtime = Path(tempfile.mkdtemp(prefix="sn-"))
        self.socket = self.runtime / "sotbus" / "sotbus.sock"
        self.config = base / "config"
        self.nodes: list[NodeProcess] = []

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        shutil.rmtree(self.runtime, ignore_errors=True)

    def environ(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        places = {
            "XDG_RUNTIME_DIR": self.runtime,
            "XDG_STATE_HOME": self.base / "state",
            "XDG_CONFIG_HOME": self.config,
        }
        return super().environ({name: str(path) for name, path in places.items()} | dict(extra or {}))

    def serve(self, *words: str, env: Mapping[str, str] | None = None) -> NodeProcess:
        """A node, once it is ready."""
        node = self.begin(*words, env=env)
        node.until_said("READY=1")
        return node

    def begin(self, *words: str, env: Mapping[str, str] | None = None) -> NodeProcess:
        """A node that starts."""
        node = NodeProcess(self, words, env or {})
        self.nodes.append(node)
        return node

    def command(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """A command on the node's own machine."""
        return subprocess.run(
            [sys.executable, str(SCRIPT), *words],
            cwd=self.base,
            env=self.environ(env),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def wire(self) -> Wire:
        return Wire(str(self.socket))

    def join(self, *names: str) -> None:
        """Sessions that join, each of its own project, and live as long as this process.

        The session leader that a join records may be out of sight: of another pid namespace.
        """
        for name in names:
            membership.join(self.client(name), name=name)
            self.amend(name, pid=os.getpid(), start=int(start_ticks(os.getpid()) or 0))

    def state(self) -> dict[str, Any]:
        """What ``sotbus node --json`` says."""
        with self.wire() as wire:
            answer = wire.greet().ask("sotbus.status", {})
        assert answer["ok"] is True
        status: dict[str, Any] = answer["status"]
        return status

    def lines(self, handle: str) -> list[dict[str, Any]]:
        """What is in a mailbox."""
        path = self.inbox(handle)
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def registry(self) -> dict[str, Any]:
        """The registry's document."""
        document: dict[str, Any] = json.loads(Path(self.folder.registry).read_text())
        return document

    def amend(self, handle: str, **more: Any) -> None:
        """Change an entry of the registry, as a command would: under the lock, for a node writes it too."""

        def change(document: dict[str, Any]) -> bool:
            document["agents"].setdefault(handle, {}).update(more)
            return True

        assert Registry(self.folder, self.box()).update(change, WAIT_S)

    def refuse_appends(self) -> None:
        """Mount the folder as NFS v3, for whoever reads the mounts from now on, while the record stays as it is."""
        nfs = "nfs filer.example:/export rw,vers=3,local_lock=none"
        self.mountinfo.write_text(self.mountinfo.read_text() + f"22 21 0:50 / {self.home} rw,relatime - {nfs}\n")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[NodeWorld]:
    """A world of its own with places for nodes; whatever runs at the end is ended."""
    box = NodeWorld(tmp_path)
    try:
        yield box
    finally:
        box.close()


def _main() -> int:
    from sotbus.cli.main import main
    from sotbus.comm.box import Box

    real = Box.here

    def here(environ: Mapping[str, str], configured_machine_id: str | None = None) -> Box:
        box = real(environ, configured_machine_id)
        box.mountinfo_path = os.environ["TEST_MOUNTINFO"]
        box.machine_id = os.environ.get("TEST_MACHINE_ID") or None
        return box

    Box.here = here  # type: ignore[method-assign]
    return main()


if __name__ == "__main__":
    sys.exit(_main())
