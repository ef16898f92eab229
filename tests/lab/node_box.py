"""A node on a box of the lab, and the commands of its sessions: a hub, a guest by a real NFS mount, a linked box."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from lab import in_box_bus
from lab.box import Box
from lab.job import Job
from lab.server import SERVER_ADDRESS

PORT = 7710
ADDRESS = f"tcp://{SERVER_ADDRESS}:{PORT}"
QUICK_LINKS = "heartbeat_s = 0.5\ndead_after_s = 2.0\nreconnect_min_s = 0.1\nreconnect_max_s = 0.5\n"
"""A link's times, shorter than the defaults so that a cut is noticed and mended within seconds."""

START_S = 60.0
"""How long a node may take to start in the guest, and a link to come up."""


class NodeBox:
    """One box of a bus, whose hub is the lab's server.

    :param role: ``hub``, ``linked`` or ``guest``.
    :param comm: the comm folder as this box sees it.
    """

    def __init__(self, box: Box, role: str, comm: str) -> None:
        self.box, self.role, self.comm = box, role, comm
        self.base = f"/run/bus-{comm.strip('/').replace('/', '-')}"
        self.socket = f"{self.base}/run/sotbus/sotbus.sock"
        self._node: Job | None = None
        self._env = {
            "SOT_COMM_HOME": comm,
            "XDG_CONFIG_HOME": f"{self.base}/config",
            "XDG_RUNTIME_DIR": f"{self.base}/run",
            "XDG_STATE_HOME": f"{self.base}/state",
        }
        listen = f'listen = "{ADDRESS}"\n' if role == "hub" else ""
        box.call(
            in_box_bus.furnish,
            base=self.base,
            config='plugins = ["filesystem", "nfs", "zmq"]\n[topology]\nhub = "server"\n'
            f"[plugin.zmq]\n{listen}{QUICK_LINKS}",
        )
        self.did("admin", "keys", "new")
        self.key: dict[str, str] = json.loads(self.did("admin", "keys", "show", "--json"))

    def __repr__(self) -> str:
        return f"<NodeBox {self.box.name}, {self.role}>"

    # ---- its sessions

    def sotbus(self, session: str, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of one session of this box."""
        pin = {"SOT_COMM_SELF_FILE": f"{self.comm}/self/{self.box.name}-{session}.txt"}
        return self.box.run([sys.executable, "-m", "sotbus", *words], self._env | pin, f"{self.base}/projects")

    def did(self, session: str, *words: str) -> str:
        """The output of a command that must succeed."""
        done = self.sotbus(session, *words)
        assert done.returncode == 0, (self, words, done)
        return done.stdout

    def join(self, handle: str) -> None:
        self.did(handle, "join", "--name", handle)

    def texts(self, handle: str) -> dict[str, int]:
        """How often each text is in a mailbox that this box sees."""
        found: dict[str, int] = self.box.call(in_box_bus.texts, comm=self.comm, handle=handle)
        return found

    def send_many(self, sender: str, orders: list[tuple[str, str]], threads: int = 8) -> Job:
        """Begin to send messages through the node (:func:`lab.in_box_bus.send_many`)."""
        return self.box.start(
            in_box_bus.send_many,
            socket=self.socket,
            host=self.box.name,
            sender=sender,
            orders=orders,
            threads=threads,
        )

    # ---- its node

    def trust(self, other: NodeBox) -> None:
        """Write another box's key into this one's peers."""
        where = ("--address", ADDRESS) if other.role == "hub" else ()
        self.did("admin", "keys", "trust", other.key["node"], other.key["public_key"], "--role", other.role, *where)

    def start(self) -> None:
        """Start its node; :meth:`wait_until_linked` afterwards."""
        self._node = self.box.spawn([sys.executable, "-m", "sotbus", "serve"], self._env, self.base)

    def end(self) -> None:
        """SIGKILL."""
        if self._node is not None:
            self._node.kill()
            self._node.wait()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.box.call(in_box_bus.status, socket=self.socket, host=self.box.name)
        return found

    def links(self) -> list[bool]:
        """Of each link whether it is up; none where the node does not answer."""
        assert self._node is not None
        assert not self._node.ended, self._node.err.decode()
        return [bool(link["up"]) for link in self.status().get("links", [])]

    def wait_until_linked(self) -> None:
        """Until its node answers and every link of it is up."""
        wait_until(lambda: (links := self.links()) and all(links), f"every link of {self.box.name}")

    def wait_until_cut(self) -> None:
        """Until its node says that a link is down."""
        wait_until(lambda: False in self.links(), f"a dead link of {self.box.name}")


def wait_until(true: Callable[[], object], what: str, bound_s: float = START_S) -> None:
    """Look until it is so. *Errors*: AssertionError that says what did not come."""
    deadline = time.monotonic() + bound_s
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {bound_s:g} s"
        time.sleep(0.1)
