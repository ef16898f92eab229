"""Nodes for a benchmark: each is ``sotbus serve`` in a process of its own, with a home, a comm folder and keys."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.brokers import LOOPBACK, free_port
from sotbus import message

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sotbus.comm.client import Client

SOTBUS = (sys.executable, "-P", "-m", "sotbus")
START_S = 20.0
"""How long a node may take to start, or to come to a state that is waited for, on a busy machine."""

HELLO = {
    "client_id": "bench",
    "last_seen_revision": 0,
    "protocol": 3,
    "app_version": "bench",
    "role": "cli",
    "name": "",
}
USER = pwd.getpwuid(os.geteuid()).pw_name


class NodePlace:
    """One node's home below ``base``; :meth:`running` runs it."""

    def __init__(self, base: Path, host: str) -> None:
        self.host, self.base = host, base / host
        self.comm = self.base / "comm"
        self.config = self.base / "conf" / "sotbus"
        self.socket = str(self.base / "run" / "sotbus" / "sotbus.sock")
        for folder in (self.base / "run", self.config):
            folder.mkdir(parents=True, mode=0o700)
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(("SOT", "XDG"))} | {
            "HOME": str(self.base),
            "XDG_RUNTIME_DIR": str(self.base / "run"),
            "XDG_STATE_HOME": str(self.base / "state"),
            "XDG_CONFIG_HOME": str(self.base / "conf"),
            "SOT_COMM_HOME": str(self.comm),
            "SOT_SELF_HOST": host,
        }

    @property
    def name(self) -> str:
        """The node's name."""
        return f"{USER}.{self.host}"

    def sotbus(self, *words: str) -> str:
        """What a command prints. *Errors*: CalledProcessError."""
        run = subprocess.run((*SOTBUS, *words), env=self.environ, cwd=self.base, check=True, stdout=subprocess.PIPE)
        return run.stdout.decode()

    def configure(self, hub: str, listen: str | None = None) -> str:
        """Write the config and make the key pair; answers the public key."""
        lines = ['plugins = ["filesystem", "zmq"]', "[topology]", f'hub = "{hub}"']
        if listen is not None:
            lines += ["[plugin.zmq]", f'listen = "{listen}"']
        (self.config / f"{self.host}.toml").write_text("\n".join(lines) + "\n")
        self.sotbus("keys", "new")
        return str(json.loads(self.sotbus("keys", "show", "--json"))["public_key"])

    def trust(self, host: str, key: str, role: str, address: str | None = None) -> None:
        """Add a peer to the peers file."""
        lines = [f'[peers."{USER}.{host}"]', f'user = "{USER}"', f'public_key = "{key}"', f'role = "{role}"']
        if address is not None:
            lines.append(f'address = "{address}"')
        path = self.config / f"{self.host}.peers.toml"
        path.touch(mode=0o600)
        with path.open("a") as file:
            file.write("\n".join(lines) + "\n")

    def client(self, name: str) -> Client:
        """A client of this node's comm folder in this process, for a session pinned to the project ``name``."""
        from sotbus.assembly import assemble
        from sotbus.comm.box import Box
        from sotbus.comm.client import Client
        from sotbus.comm.project import project_of
        from sotbus.config import find, load

        project = self.base / name
        project.mkdir()
        environ = self.environ | {"SOT_COMM_SELF_FILE": str(self.comm / "self" / f"pin-{name}.txt")}
        box = Box.here(environ)
        made = assemble(box, environ, load(find(environ, box.declared_host, None)), lambda _: None, Client)
        made._project = project_of(str(project))
        return made

    @contextmanager
    def running(self, links: int = 0) -> Iterator[int]:
        """The node serves meanwhile, with ``links`` of its links up; answers its pid. SIGTERM ends it."""
        with (self.base / "node.log").open("ab") as log:
            process = subprocess.Popen((*SOTBUS, "serve"), env=self.environ, cwd=self.base, stderr=log)
        try:
            self.until_up(process, links)
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def until_up(self, process: subprocess.Popen[bytes], links: int) -> None:
        """Wait until it answers and so many links are up. *Errors*: RuntimeError with its log where it does not."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if sum(link["up"] for link in self.status()["links"]) >= links:
                    return
            except OSError:
                pass  # it does not listen yet
            time.sleep(0.1)
        raise RuntimeError(f"the node {self.name} did not come up: {(self.base / 'node.log').read_text()[-2000:]}")

    def connect(self) -> socket.socket:
        """A connection that has said hello and was answered."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(START_S)
            sock.connect(self.socket)
            ask(sock, "hello", HELLO)
        except BaseException:
            sock.close()
            raise
        return sock

    def status(self) -> dict[str, Any]:
        """What ``sotbus node`` shows."""
        with self.connect() as sock:
            status: dict[str, Any] = ask(sock, "sotbus.status", {})["status"]
            return status

    def syncs(self) -> tuple[int, int]:
        """Lines that it wrote, and the syncs for them: of its inboxes, and one for each commit of its store."""
        status = self.status()
        return status["mailboxes"]["lines"], status["mailboxes"]["syncs"] + status["store"]["commits"]


def request(op: str, payload: dict[str, Any]) -> bytes:
    """A request's frame."""
    frame = {"v": 1, "id": 1, "kind": "req", "op": op, "payload": payload}
    return json.dumps(frame, separators=(",", ":")).encode() + b"\n"


def filing(to: str, text: str, message_id: str | None = None) -> bytes:
    """A ``comm.file`` of one message; with an ID it is filed once."""
    payload: dict[str, Any] = {"from": "bench", "to": to, "text": text, "broadcast": False}
    if message_id is not None:
        payload["sotbus"] = {"id": message_id}
    return request("comm.file", payload)


def ask(sock: socket.socket, op: str, payload: dict[str, Any]) -> dict[str, Any]:
    """One request and its answer's payload."""
    return exchange(sock, request(op, payload))


def exchange(sock: socket.socket, frame: bytes) -> dict[str, Any]:
    """One frame and its answer's payload, on a connection where nothing else is asked. *Errors*: OSError."""
    sock.sendall(frame)
    data = b""
    while not data.endswith(b"\n"):
        more = sock.recv(1 << 16)
        if not more:
            raise ConnectionError("the node closed the connection")
        data += more
    payload: dict[str, Any] = json.loads(data)["payload"]
    return payload


def free_address() -> str:
    """A loopback address that nobody listens on at this moment."""
    return f"tcp://{LOOPBACK}:{free_port()}"


def copies(path: Path, handle: str, count: int) -> None:
    """Add live copies of a handle's registry entry, its process included, under other handles."""
    from sotbus.comm.registry_json import dump, parse

    document = parse(path.read_bytes())
    now = message.stamp(time.time())
    for number in range(count):
        document["agents"][f"worker-{number:05d}"] = document["agents"][handle] | {"last_seen": now, "joined": now}
    path.write_bytes(dump(document))
