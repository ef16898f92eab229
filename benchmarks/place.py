"""A comm folder on this machine's disk for a benchmark, with an inbox record that lets this process append."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sotbus import message
from sotbus.comm.box import Box
from sotbus.comm.client import Client
from sotbus.comm.folder import Folder
from sotbus.comm.project import project_of
from sotbus.comm.registry_json import dump
from sotbus.comm.settings import Settings

MACHINE = "0" * 32


def box() -> Box:
    """This machine; one without a machine id gets one here."""
    here = Box.here(os.environ)
    here.machine_id = here.machine_id or MACHINE
    return here


def client(base: Path, name: str) -> Client:
    """A client in this process that acts for a session pinned to the project ``name``."""
    project = base / name
    project.mkdir(exist_ok=True)
    environ = {"SOT_COMM_SELF_FILE": str(base / "comm" / "self" / f"pin-{name}.txt")}
    made = Client(Folder(str(base / "comm")), box(), environ, Settings(), notify=print)
    made._project = project_of(str(project))
    return made


def registry_of(path: Path, count: int) -> None:
    """Add ``count`` live handles to a registry, each with the fields of a real entry."""
    from sotbus.comm.registry_json import parse

    document = parse(path.read_bytes())
    now = message.stamp(time.time())
    for number in range(count):
        document["agents"][f"worker-{number:05d}"] = {
            "host": "vm",
            "workspace_id": "",
            "repo": "worker",
            "root": f"/home/u/project/{number}",
            "expertise": ["files", "tests"],
            "status": "idle",
            "joined": now,
            "last_seen": now,
            "state": "working",
            "summary": "a line about what this session does",
            "status_at": now,
        }
    path.write_bytes(dump(document))
