"""Boxes of a bus, each in a network namespace of its own, joined by a switch: real nodes, real TCP, one kernel.

A namespace lives as long as the process that holds it, and that one as long as its standard input is open: nothing is
left behind, even where the test run is killed. What a kernel shares between namespaces and machines do not (machine id,
mounts) is told to each box's processes (:mod:`netns.told_box`). ip-netns(8), veth(4), nft(8).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sotbus.comm.daemon import Daemon, NoDaemonError

ENTRY = Path(__file__).with_name("told_box.py")

PORT = 7710
"""Where the hub listens, in its own namespace."""

OWN_DISK = "21 1 254:2 / / rw,relatime shared:1 - ext4 /dev/vda2 rw\n"
"""mountinfo of a box whose every path is on its own disk (proc_pid_mountinfo(5))."""

START_S = 20.0
"""How long a node may take to start, and a link to come up, on a busy machine."""

QUICK_LINKS = "heartbeat_s = 0.5\ndead_after_s = 1.5\nreconnect_min_s = 0.1\nreconnect_max_s = 0.5\n"
"""A link's times, shorter than the defaults so that a cut is noticed and mended within seconds."""


def shared_mount(comm: Path) -> str:
    """mountinfo of a guest: the hub exports its comm folder, and the guest has mounted it."""
    return f"{OWN_DISK}22 21 0:40 / {comm} rw,relatime shared:2 - nfs4 hub:/comm rw,vers=4.2,local_lock=none\n"


def wait_until(true: Callable[[], object], what: str, bound_s: float = START_S) -> None:
    """Look until it is so. *Errors*: AssertionError that says what did not come."""
    deadline = time.monotonic() + bound_s
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {bound_s:g} s"
        time.sleep(0.02)


def end(process: subprocess.Popen[Any], number: int = signal.SIGKILL, bound_s: float = 10.0) -> None:
    """Signal a process of ours and wait for its end; one that does not heed the signal is killed."""
    if process.poll() is None:
        process.send_signal(number)
    try:
        process.wait(bound_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


class Namespace:
    """A network namespace, held by a process that only waits for the end of its input."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--", "sh", "-c", "echo up; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n", "no network namespace could be made"
        self.run("ip", "link", "set", "lo", "up")

    def __repr__(self) -> str:
        return f"<Namespace of {self.pid}>"

    @property
    def pid(self) -> int:
        return self._holder.pid

    def words(self, *words: str) -> list[str]:
        """A command in the namespace; nsenter(1) becomes it, so the pid is the command's own."""
        return ["nsenter", "--target", str(self.pid), "--net", "--", *words]

    def run(self, *words: str) -> str:
        """A command of the administrator, which must succeed."""
        done = subprocess.run(self.words(*words), capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    def close(self) -> None:
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.stdout.close()
        self._holder.wait(10)


class Box:
    """One box: a namespace, homes, a node, and the commands of its sessions.

    :param number: of its address in the network, and of its machine id.
    :param comm: its comm folder, and :param home: its home; the hub's where it is a guest of the hub's folder.
    :param mountinfo: what its kernel says of its mounts.
    """

    def __init__(self, base: Path, name: str, number: int, comm: Path, home: Path, mountinfo: str) -> None:
        self.name, self.comm, self.home = name, comm, home
        self.base = base / name
        self.address = f"10.77.0.{number}"
        self.node: subprocess.Popen[bytes] | None = None
        self.net = Namespace()
        for folder in ("run", "state", "projects"):
            (self.base / folder).mkdir(mode=0o700, parents=True)
        self.config = home / ".config" / "sotbus"
        self.config.mkdir(parents=True, exist_ok=True)
        (self.base / "mountinfo").write_text(mountinfo)
        self.socket = self.base / "run" / "sotbus" / "sotbus.sock"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SOT", "CLAUDE", "TMUX", "XDG", "COV"))}
        clean.pop("PWD", None)
        self.environ = clean | {
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home / ".config"),
            "XDG_RUNTIME_DIR": str(self.base / "run"),
            "XDG_STATE_HOME": str(self.base / "state"),
            "SOT_COMM_HOME": str(comm),
            "SOT_SELF_HOST": name,
            "SOT_COMM_TEST_HOST": name,
            "TEST_MOUNTINFO": str(self.base / "mountinfo"),
            "TEST_MACHINE_ID": f"{number:032x}",
            "TERM": "dumb",
        }

    def __repr__(self) -> str:
        return f"<Box {self.name}>"

    def project(self, session: str) -> Path:
        folder = self.base / "projects" / session
        folder.mkdir(exist_ok=True)
        return folder

    def sotbus(self, session: str, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of one session of this box, in its project."""
        return subprocess.run(
            self.net.words(sys.executable, "-P", str(ENTRY), *words),
            cwd=self.project(session),
            env=self.environ | {"SOT_COMM_SELF_FILE": str(self.comm / "self" / f"{self.name}-{session}.txt")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def did(self, session: str, *words: str) -> str:
        """The output of a command that must succeed."""
        done = self.sotbus(session, *words)
        assert done.returncode == 0, (self, words, done)
        return done.stdout

    def join(self, handle: str) -> None:
        """A session that lives as long as this process; the one that a join finds may be out of sight of a node."""
        self.did(handle, "join", "--name", handle, "--pid", str(os.getpid()))

    # ---- its node

    def start_node(self, *, wait: bool = True) -> None:
        """Start it, and wait until it answers."""
        assert self.node is None, f"{self} has a node already"
        with open(self.base / "node.log", "ab") as log:
            self.node = subprocess.Popen(
                self.net.words(sys.executable, "-P", str(ENTRY), "serve"),
                cwd=self.base,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        if wait:
            self.wait_for_node()

    def wait_for_node(self) -> None:
        wait_until(lambda: self._runs() and self.status(), f"the node of {self.name}, see {self.base}/node.log")

    def _runs(self) -> bool:
        assert self.node is not None
        assert self.node.poll() is None, self.log()
        return True

    def end_node(self, number: int = signal.SIGTERM) -> None:
        node, self.node = self.node, None
        if node is not None:
            if number == signal.SIGTERM:
                node.send_signal(signal.SIGCONT)
            end(node, number)

    def signal_node(self, number: int) -> None:
        assert self.node is not None
        self.node.send_signal(number)

    def status(self) -> dict[str, Any]:
        """What the node says of itself; empty where none answers."""
        try:
            answer = Daemon(str(self.socket), self.name).ask("sotbus.status", {}, 5.0)
        except NoDaemonError:
            return {}
        return dict(answer.payload.get("status", {})) if answer.ok else {}

    def is_linked(self) -> bool:
        """Whether every link of its node is up."""
        links = self.status().get("links", [])
        return bool(links) and all(link["up"] for link in links)

    def has_lost_a_link(self) -> bool:
        """Whether its node answers, and a link of it is down."""
        return any(not link["up"] for link in self.status().get("links", []))

    def log(self) -> str:
        return (self.base / "node.log").read_text()

    # ---- its mail

    def lines(self, handle: str) -> list[dict[str, Any]]:
        """The lines of a mailbox that is on this box's disk; each must be whole."""
        path = self.comm / "inbox" / f"{handle}.jsonl"
        data = path.read_bytes() if path.exists() else b""
        assert data.endswith(b"\n") or not data, f"{path} has a torn line"
        return [json.loads(line) for line in data.splitlines()]

    def texts(self, handle: str) -> Counter[str]:
        """How often each text is in a mailbox of this box."""
        return Counter(line["msg"] for line in self.lines(handle))

    def close(self) -> None:
        try:
            self.end_node()
        finally:
            self.net.close()


class Boxes:
    """A hub, boxes linked to it, and guests of its folder; each guest and linked box dials the hub.

    :param base: an empty folder.
    :param settings: of the links, lines for ``[plugin.zmq]``; the defaults where there are none.
    """

    HUB = "hub"

    def __init__(
        self, base: Path, linked: Iterable[str] = (), guests: Iterable[str] = (), *, settings: str = ""
    ) -> None:
        self._settings = settings
        self._stack = ExitStack()
        try:
            self._build(base, tuple(linked), tuple(guests))
        except BaseException:
            self._stack.close()
            raise

    def _build(self, base: Path, linked: tuple[str, ...], guests: tuple[str, ...]) -> None:
        self.switch = Namespace()
        self._stack.callback(self.switch.close)
        self.switch.run("ip", "link", "add", "switch", "type", "bridge")
        self.switch.run("ip", "link", "set", "switch", "up")
        self._boxes: dict[str, Box] = {}
        home = base / "home"
        for number, name in enumerate((self.HUB, *linked, *guests), 1):
            own = name in linked
            own_home = base / name / "home" if own else home
            mounts = shared_mount(home / "comm") if name in guests else OWN_DISK
            box = Box(base, name, number, own_home / "comm", own_home, mounts)
            self._stack.callback(box.close)
            self._boxes[name] = box
            self._plug_in(box)
            listen = f'listen = "tcp://{box.address}:{PORT}"\n' if name == self.HUB else ""
            (box.config / f"{name}.toml").write_text(
                f'plugins = ["filesystem", "nfs", "zmq"]\n[topology]\nhub = "{self.HUB}"\n'
                f"[plugin.zmq]\n{listen}{self._settings}"
            )
        keys = {box.name: json.loads(_new_key(box)) for box in self}
        hub, of_hub = self[self.HUB], keys[self.HUB]
        for box in self:
            if box is not hub:
                role = "linked" if box.name in linked else "guest"
                own_key = keys[box.name]
                hub.did("admin", "keys", "trust", own_key["node"], own_key["public_key"], "--role", role)
                address = f"tcp://{hub.address}:{PORT}"
                trusted = ("keys", "trust", of_hub["node"], of_hub["public_key"])
                box.did("admin", *trusted, "--role", "hub", "--address", address)
        self.user = str(of_hub["user"])
        for box in self:
            box.start_node(wait=False)
        for box in self:
            box.wait_for_node()
        self.wait_until_linked()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[Box]:
        return iter(self._boxes.values())

    def __getitem__(self, name: str) -> Box:
        return self._boxes[name]

    def __repr__(self) -> str:
        return f"<Boxes {', '.join(self._boxes)}>"

    def _plug_in(self, box: Box) -> None:
        """A cable between a box and the switch. Its end at the switch is called as the box."""
        end_of_box = ("type", "veth", "peer", "name", "eth0", "netns", str(box.net.pid))
        self.switch.run("ip", "link", "add", "name", box.name, *end_of_box)
        self.switch.run("ip", "link", "set", "dev", box.name, "master", "switch", "up")
        box.net.run("ip", "address", "add", f"{box.address}/24", "dev", "eth0")
        box.net.run("ip", "link", "set", "eth0", "up")

    def unplug(self, box: Box) -> None:
        """Take the cable's end at the switch down: packets are lost, and neither end is told."""
        self.switch.run("ip", "link", "set", "dev", box.name, "down")

    def plug(self, box: Box) -> None:
        self.switch.run("ip", "link", "set", "dev", box.name, "up")

    def wait_until_linked(self) -> None:
        for box in self:
            wait_until(box.is_linked, f"every link of {box.name}")


def _new_key(box: Box) -> str:
    box.did("admin", "keys", "new")
    return box.did("admin", "keys", "show", "--json")
