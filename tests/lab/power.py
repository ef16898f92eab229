"""A guest without NFS whose plug can be pulled: what was synced to its disk is there at the next boot.

with PowerBox(tmp_path / "disk") as power:
    job = power.box.start(in_box.append_lines, path="/disk/log", count=100_000)
    acknowledged = [job.note() for _ in range(20)]
    power.pull_plug()
    power.boot()
    lines = power.box.call("open('/disk/log').read().splitlines()")
"""

from __future__ import annotations

import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from lab.box import Box
from lab.machine import Machine, Message, make_disk

PRELOAD = ["sotbus.comm.client"]
DISK_BYTES = 64 << 20


class PowerBox:
    """One box, ``power``, alone in a guest, with the ext4 of a disk file at /disk; a missing file is made.

    The machine id stays over boots; the kernel gives each boot its boot id.

    *Durability*: `pull_plug` kills the guest's kernel with all that its page cache held. What it had synced, or written
    back by itself, stands in the host's file: a disk whose cache loses nothing that reached it. A disk that loses
    what it has not flushed is not shown.
    """

    def __init__(self, disk: Path, *, memory_mib: int = 256) -> None:
        self.disk, self.memory_mib = disk, memory_mib
        self.box = Box("power", uuid.uuid4().hex)
        self._machine: Machine | None = None

    def boot(self, timeout_s: float = 60) -> None:
        """*Errors*: `LabError` with the end of the console's log; then all that was started has ended."""
        if not self.disk.exists():
            make_disk(self.disk, DISK_BYTES)
        machine = Machine(self.disk, self.memory_mib, self._heard, self.box.lost)
        with machine.booting():
            machine.boot(["overlay"], PRELOAD, timeout_s)
            self.box.make(machine, "disk")
            self.box.wait_until_up(timeout_s)
        self._machine = machine

    def pull_plug(self) -> None:
        """SIGKILL to all of the guest; what calls had told by then stays in their `Job.notes`. Off already: nothing."""
        if self._machine is not None:
            self._machine.kill()
            self._machine = None

    def _heard(self, message: Message) -> None:
        self.box.heard(message)

    def __enter__(self) -> Self:
        self.boot()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pull_plug()
