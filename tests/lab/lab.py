"""A real NFSv4.2 server and real NFS clients on one machine: one guest kernel, each box a machine of its own in it.

    def test_two_boxes_share_a_file(lab: Lab, shared: str) -> None:          # fixtures of tests/lab/conftest.py
        a, b = lab.box("a"), lab.box("b")                                    # `Box`; `lab.server` is one too
        a.call(in_box.write, path=f"{shared}/x", text="hi")                  # a function of tests/lab/in_box.py
        assert b.call("open(path).read()", path=f"{shared}/x") == "hi"       # a snippet
        assert b.run(["cat", f"{shared}/x"]).stdout == "hi"                  # a command
        job = a.start(in_box.append_many, path=f"{shared}/y", count=1000)    # goes on while the test does
        acknowledged = job.note()                                            # what it yields
        lab.cut("a"), lab.mend("a"), lab.stop_server(), lab.start_server(), lab.restart_server(), lab.reboot("a")

Boxes have each their own network (10.99.0.11, .12, ... on a bridge joined to nothing outside), host name, machine id,
boot id, pids, scratch copy of the host's root folder, NFS client, and mount of the export at /nfs: vers=4.2, hard,
local_lock=none, lease 10 s. The export is an ext4, at /srv/export in the box ``server``. What a box writes outside /nfs
only that box sees; what the host writes, all boxes can read. One clock for all. One CPU, so that races interleave
coarsely: a test of a race needs many rounds, and must show that the sides alternated.

`PowerBox` (power.py) is a guest without NFS whose plug can be pulled.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from lab import server
from lab.box import Box
from lab.machine import Machine, Message, make_disk

NETWORK = "10.99.0."
FIRST_HOST = 11
EXPORT_BYTES = 512 << 20
MODULES = ["overlay", "nfsd", "nfsv4", "nfsv3", "veth", "bridge", "sch_netem"]
PRELOAD = ["sotbus.comm.client", "sotbus_nfs.hooks", "world"]
"""Imported once in the guest, before the drivers are forked from there."""


class Lab:
    """A guest with an NFS server, and boxes that mount its export.

    ``names`` are the boxes' and must not be words of ip(8); ``options`` are those of the mount at /nfs, ``lease_s`` is
    the server's lease and grace time.
    """

    def __init__(
        self, names: Sequence[str] = ("a", "b"), *, options: str = "hard", lease_s: int = 10, memory_mib: int = 1024
    ) -> None:
        self.options, self.lease_s, self.memory_mib = options, lease_s, memory_mib
        self.server = Box("server", uuid.uuid4().hex)
        self.boxes = {name: Box(name, uuid.uuid4().hex) for name in names}
        self.addresses = {name: f"{NETWORK}{FIRST_HOST + i}" for i, name in enumerate(names)}
        self._folders = itertools.count(1)
        self._cut: set[str] = set()
        self._slow: set[str] = set()
        self._serving = True
        self._machine: Machine | None = None
        self._owned = contextlib.ExitStack()

    def box(self, name: str) -> Box:
        return self.boxes[name]

    def new_folder(self) -> str:
        """A new empty folder of the export, as the boxes see it. Its name was never looked up before."""
        name = f"folder-{next(self._folders)}"
        self.server.call("os.mkdir(path), os.chmod(path, 0o1777)", path=f"{server.EXPORT}/{name}")
        return f"/nfs/{name}"

    # ---- faults

    def cut(self, name: str) -> None:
        """Pull the network cable of a box."""
        self._cut.add(name)
        self.server.call(server.set_link, box=name, state="down")

    def mend(self, name: str) -> None:
        """Put the cable in again. A client finds its server again within seconds, not at once."""
        self.server.call(server.set_link, box=name, state="up")
        self._cut.discard(name)

    def delay(self, name: str, delay_ms: int, jitter_ms: int = 0) -> None:
        """Have whatever a box is sent, and what it sends, take so long; 0 for a good cable again."""
        for box, cable in ((self.server, name), (self.box(name), "eth0")):
            box.call(server.set_delay, cable=cable, delay_ms=delay_ms, jitter_ms=jitter_ms)
        (self._slow.add if delay_ms else self._slow.discard)(name)

    def stop_server(self) -> None:
        """nfsd ends; whatever clients ask hangs until it is started again."""
        self._serving = False
        self.server.call(server.stop_nfsd)

    def start_server(self, grace_s: int | None = None) -> None:
        """nfsd starts as after a reboot: clients reclaim their locks in the grace time (as long as the lease)."""
        self.server.call(server.start_nfsd, grace_s=grace_s)
        self._serving = True

    def end_grace(self) -> None:
        """Spare the wait for the grace time's end: whoever has not reclaimed its locks by now has lost them."""
        self.server.call(server.end_grace)

    def restart_server(self) -> None:
        self.stop_server()
        self.start_server()

    def reboot(self, name: str, timeout_s: float = 60) -> None:
        """A box loses power and boots: every process of it dies, its NFS client sends nothing more, its locks stay with
        the server until the new client shows itself. The same machine id, host name, address and disk; a new boot id.
        """
        box = self.boxes[name]
        self.server.call(server.remove_link, box=name)
        self._cut.discard(name)
        self._slow.discard(name)
        box.end()
        self._make(name)
        box.wait_until_up(timeout_s)

    def tidy(self) -> None:
        """After a test: cables in, server up, no call or command left running, only the first mounts."""
        for name in sorted(self._cut):
            self.mend(name)
        for name in sorted(self._slow):
            self.delay(name, 0)
        if not self._serving:
            self.start_server()
        for box in (self.server, *self.boxes.values()):
            box.end_jobs()
            box.unmount_all()

    # ---- begin and end

    def boot(self, timeout_s: float = 120) -> None:
        """Boot the guest and make its boxes.

        *Errors*: `LabError` with the end of the console's log; then all that was started has ended.
        """
        with contextlib.ExitStack() as on_error:
            folder = on_error.enter_context(tempfile.TemporaryDirectory(prefix="sotbus-lab-"))
            disk = Path(folder, "disk")
            make_disk(disk, EXPORT_BYTES)
            machine = self._machine = Machine(disk, self.memory_mib, self._heard, self._lost)
            on_error.callback(machine.kill)
            with machine.booting():
                machine.boot(MODULES, PRELOAD, timeout_s)
                addresses = list(self.addresses.values())
                self.server.make(machine, "server", lease_s=self.lease_s, addresses=addresses)
                self.server.wait_until_up(timeout_s)
                for name in self.boxes:
                    self._make(name)
                for box in self.boxes.values():
                    box.wait_until_up(timeout_s)
            self._owned = on_error.pop_all()

    def stop(self) -> None:
        """End every process of the guest, and remove its folder and disk."""
        self._owned.close()

    def _make(self, name: str) -> None:
        assert self._machine is not None
        self.boxes[name].make(self._machine, "client", address=self.addresses[name], options=self.options)

    def _heard(self, message: Message) -> None:
        name = message["from"]
        (self.server if name == "server" else self.boxes[str(name)]).heard(message)

    def _lost(self) -> None:
        for box in (self.server, *self.boxes.values()):
            box.lost()

    def __enter__(self) -> Self:
        self.boot()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
