"""What this process knows of its machine: host names, machine id, boot, pid namespace. Read once, never guessed."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from sotbus.comm.mounts import Mount

UNKNOWN = "-"
"""How a lock record writes a field that cannot be read; it never equals anything (sot-comm v1, The registry lock)."""

UNINITIALIZED = "uninitialized"
"""What systemd writes before a machine has an id (machine-id(5)); every such machine would have the same."""

MAX_LEAF_BYTES = 255
"""Longest name of one directory entry (Linux ``NAME_MAX``)."""


MAX_HOST_BYTES = 110
"""A declared host also stands in the names of a lock record's temp file and marker, with some 140 bytes around it."""


def first_line(path: str) -> str | None:
    """The first line of a small text file, stripped, or None where it cannot be read or is empty."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().strip() or None
    except OSError:
        return None


class Box:
    """One machine as its own processes see it.

    :param declared_host: ``$SOT_SELF_HOST`` verbatim, else the first label of the host name in lower case.
    :param raw_host: first label of the host name with its case kept; handles are derived from it.
    :param machine_id: first line of /etc/machine-id, else the configured one, else None.
    :param boot_id: the kernel's boot id, or None.
    :param mountinfo_path: where the mounts are listed (proc_pid_mountinfo(5)).
    :param proc: the proc file system's mount point.

    ``lock_managers`` are asked in order for a mount's lock manager; None means the page's own rules.
    """

    __slots__ = ("boot_id", "declared_host", "lock_managers", "machine_id", "mountinfo_path", "proc", "raw_host")

    def __init__(
        self,
        declared_host: str,
        raw_host: str,
        machine_id: str | None,
        boot_id: str | None,
        mountinfo_path: str = "/proc/self/mountinfo",
        proc: str = "/proc",
    ) -> None:
        self.declared_host = declared_host
        self.raw_host = raw_host
        self.machine_id = machine_id
        self.boot_id = boot_id
        self.mountinfo_path = mountinfo_path
        self.proc = proc
        self.lock_managers: Sequence[Callable[[Mount | None, str | None], Any]] | None = None

    def __repr__(self) -> str:
        return f"<Box {self.declared_host} machine={self.machine_id or UNKNOWN}>"

    @classmethod
    def here(cls, environ: Mapping[str, str], configured_machine_id: str | None = None) -> Box:
        """Read this machine. Never raises: what cannot be read is None.

        The machine id is /etc/machine-id's; the configured one only stands in where there is none (decisions,
        sot-comm 2). ``$SOT_SELF_HOST`` and, for tests of other programs, ``$SOT_COMM_TEST_HOST`` are honoured.
        """
        node = environ.get("SOT_COMM_TEST_HOST") or os.uname().nodename
        raw = node.split(".", 1)[0]
        declared = environ.get("SOT_SELF_HOST") or raw.strip().lower()
        machine = first_line("/etc/machine-id") if sys.platform == "linux" else None
        if machine == UNINITIALIZED:
            machine = None
        boot = first_line("/proc/sys/kernel/random/boot_id") if sys.platform == "linux" else None
        return cls(declared, raw, machine or configured_machine_id, boot)

    def mountinfo(self) -> str | None:
        """The text of mountinfo now (a remount changes it), or None where there is none to read."""
        try:
            with open(self.mountinfo_path, encoding="utf-8", errors="surrogateescape") as file:
                return file.read()
        except OSError:
            return None


def host_problem(host: str) -> str | None:
    """Why a declared host cannot name a self file, or None when it can (facts 9)."""
    if not host:
        return "the host name is empty"
    if "/" in host or "\\" in host:
        return f"the host name {host!r} contains a slash"
    if any(ord(c) < 0x20 or ord(c) == 0x7F for c in host):
        return f"the host name {host!r} contains a control character"
    if len(os.fsencode(host)) > MAX_HOST_BYTES:
        return f"the host name is {len(os.fsencode(host))} bytes long"
    return None
