"""A small world for tests: a comm folder, machines whose mounts are told, clients in this process, sessions outside it.

The mounts are injected, so that tests say the same on a disk, on tmpfs and in a container's overlay.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from sotbus.comm.box import Box
from sotbus.comm.client import Client
from sotbus.comm.folder import Folder
from sotbus.comm.project import project_of
from sotbus.comm.registry import Registry
from sotbus.comm.settings import Settings

MACHINE = "0123456789abcdef0123456789abcdef"
EXT4 = "21 1 254:2 / / rw,relatime shared:1 - ext4 /dev/vda2 rw\n"
"""mountinfo of a machine whose every path is on its own disk."""

ENTRY = Path(__file__).with_name("sotbus_command.py")


class World:
    """One comm folder under ``base`` and whoever works with it."""

    def __init__(self, base: Path, home: Path | None = None) -> None:
        self.base = base
        self.home = home or base / "comm"
        self.folder = Folder(str(self.home))
        self.mountinfo = base / "mountinfo"
        self.mountinfo.write_text(EXT4)
        self.notes: list[str] = []

    def box(self, host: str = "vm", machine: str | None = MACHINE) -> Box:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Box(host, host, machine, boot, str(self.mountinfo))

    def project(self, name: str) -> Path:
        path = self.base / "projects" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def client(self, name: str, *, settings: Settings | None = None, box: Box | None = None, now: float = 0) -> Client:
        """A client in this process that acts for a session of its own, pinned to the project ``name``."""
        environ = {"SOT_COMM_SELF_FILE": str(self.home / "self" / f"pin-{name}.txt"), "PWD": str(self.project(name))}
        here = box or self.box()
        registry = Registry(self.folder, here, settle_s=0.05)
        client = Client(
            self.folder,
            here,
            environ,
            settings or Settings(),
            notify=self.notes.append,
            clock=(lambda: now) if now else time.time,
            registry=registry,
        )
        client._project = project_of(str(self.project(name)))
        return client

    def environ(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a session outside this process: nothing of ours but what the test says."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SOT", "CLAUDE", "TMUX", "XDG", "COV"))}
        clean.update(
            HOME=str(self.base),
            SOT_COMM_HOME=str(self.home),
            SOT_SELF_HOST="vm",
            SOT_COMM_TEST_HOST="vm",
            TEST_MOUNTINFO=str(self.mountinfo),
            TEST_MACHINE_ID=MACHINE,
            TERM="dumb",
        )
        clean.pop("PWD", None)
        return clean | dict(extra or {})

    def run(
        self,
        *words: str,
        cwd: str | Path,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        session: str = "",
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """One command as a process of its own.

        :param session: pin a self file of this name, as a launcher does; else the process's own session decides.
        """
        pin = {"SOT_COMM_SELF_FILE": str(self.home / "self" / f"pin-{session}.txt")} if session else {}
        done = subprocess.run(
            [sys.executable, str(ENTRY), *words],
            cwd=cwd,
            env=self.environ({**pin, **(env or {})}),
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
        return subprocess.CompletedProcess(
            done.args,
            done.returncode,
            done.stdout.decode("utf-8", "surrogateescape"),
            done.stderr.decode("utf-8", "surrogateescape"),
        )

    def sotbus(self, name: str, *words: str, **more: object) -> subprocess.CompletedProcess[str]:
        """A command of the session that is pinned to the project ``name``, run in that project."""
        return self.run(*words, cwd=self.project(name), session=name, **more)  # type: ignore[arg-type]

    def inbox(self, handle: str) -> Path:
        return self.home / "inbox" / f"{handle}.jsonl"
