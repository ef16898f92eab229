"""What makes one box: its namespaces, its cable, its root folder, its identity, its mounts. In the guest.

A box's root folder is an overlay: below it the host's own root folder, read-only; above it a tmpfs that outlives a
reboot of the box, as a disk would. ``/run`` and ``/dev/shm`` are new at each boot.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from lab import syscalls
from lab.mounts import mount_at, mount_nfs4
from lab.server import BRIDGE, Server, ip
from lab.syscalls import bind, mount

DISK = "/dev/ubda"


@dataclass(frozen=True)
class Blueprint:
    """One box; all of it plain values, for it comes as JSON."""

    name: str
    machine_id: str

    @property
    def own_namespaces(self) -> bool:
        return False

    def enter(self) -> None:
        """In the process that keeps the box, where it has namespaces of its own: make them."""

    def connect(self, pid: int) -> None:
        """In pid 1 of the guest: its cable. ``pid`` is the box's first process."""

    def furnish(self) -> None:
        """In the box's first process: its root folder."""
        root = f"/run/{self.name}/root"
        upper, work = f"/run/{self.name}/upper", f"/run/{self.name}/work"
        for folder in (root, upper, work):
            os.makedirs(folder, exist_ok=True)
        mount("overlay", root, "overlay", f"lowerdir=/,upperdir={upper},workdir={work}")
        mount("proc", f"{root}/proc", "proc")
        mount("sysfs", f"{root}/sys", "sysfs")
        mount("tmpfs", f"{root}/run", "tmpfs", "mode=755")
        bind("/dev", f"{root}/dev")
        os.chroot(root)
        os.chdir("/")
        for folder, kind, options in (("shm", "tmpfs", "mode=1777"), ("pts", "devpts", "newinstance,ptmxmode=666")):
            os.makedirs(f"/dev/{folder}", exist_ok=True)
            mount(kind, f"/dev/{folder}", kind, options)
        Path("/etc/mtab").unlink(missing_ok=True)
        Path("/etc/mtab").symlink_to("/proc/self/mounts")
        Path("/etc/hostname").write_text(f"{self.name}\n")
        Path("/etc/machine-id").unlink(missing_ok=True)
        Path("/etc/machine-id").write_text(f"{self.machine_id}\n")
        socket.sethostname(self.name)


@dataclass(frozen=True)
class ServerBox(Blueprint):
    """The guest's own namespaces, nfsd in its kernel, the export at /srv/export."""

    lease_s: int
    addresses: list[str]

    def furnish(self) -> None:
        super().furnish()
        Server(self.lease_s, self.addresses).set_up(DISK)


@dataclass(frozen=True)
class DiskBox(Blueprint):
    """Alone in the guest's own namespaces, the disk at /disk."""

    def furnish(self) -> None:
        super().furnish()
        mount_at("/disk", DISK, "ext4")


@dataclass(frozen=True)
class ClientBox(Blueprint):
    """A machine of its own by every namespace, which mounts the export at /nfs."""

    address: str
    options: str

    @property
    def own_namespaces(self) -> bool:
        return True

    def enter(self) -> None:
        syscalls.unshare(
            syscalls.CLONE_NEWUTS
            | syscalls.CLONE_NEWNS
            | syscalls.CLONE_NEWNET
            | syscalls.CLONE_NEWIPC
            | syscalls.CLONE_NEWPID
        )

    def connect(self, pid: int) -> None:
        octets = "".join(f":{int(octet):02x}" for octet in self.address.split("."))
        hardware = f"02:00{octets}"  # the same at each boot, as a card's would be
        ip(
            f"link add name {self.name} type veth peer name eth0 address {hardware} netns {pid}",
            f"link set dev {self.name} master {BRIDGE} up",
        )

    def furnish(self) -> None:
        super().furnish()
        Path("/run/boot_id").write_text(Path("/proc/sys/kernel/random/uuid").read_text())
        bind("/run/boot_id", "/proc/sys/kernel/random/boot_id")
        ip("link set lo up", "link set dev eth0 up", f"addr add {self.address}/24 dev eth0")
        mount_nfs4("/nfs", self.address, self.options)


KINDS = {"server": ServerBox, "disk": DiskBox, "client": ClientBox}
