"""The kernel's NFS server in the guest. `Server` runs in the box ``server``; the functions below it are calls for it.

The kernel asks user space who may mount what (rpc.mountd answers elsewhere); here the answers are written beforehand,
into the channels of nfsd(7)'s caches. nfsd forgets them when it stops, so that each start writes them again.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from lab import rpc
from lab.syscalls import mount

SERVER_ADDRESS = "10.99.0.1"
BRIDGE = "br0"
_BRIDGE_HARDWARE = "02:00:0a:63:00:01"
EXPORT = "/srv/export"
DOMAIN = "boxes"
NFSD = Path("/proc/fs/nfsd")
_CHANNELS = Path("/proc/net/rpc")
_STATE = Path("/run/server.json")
_NEVER = 2**31 - 1
_EXPORT_FLAGS = 0x2000 | 0x0400  # NFSEXP_FSID, NFSEXP_NOSUBTREECHECK: read-write, sync, root is not squashed
_NOBODY = 65534
_THREADS = 8


def ip(*lines: str) -> None:
    """ip(8), each line one command of it."""
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(["ip", "-batch", "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip: {done.stderr}{text}")


@dataclass(frozen=True)
class Server:
    """nfsd with one export. ``addresses`` are the boxes that may mount it."""

    lease_s: int
    addresses: list[str]

    def set_up(self, disk: str) -> None:
        # A bridge without an address of its own takes its ports' lowest, a new one when ports change: half a minute of
        # silence for each box that knows the old one.
        ip(
            "link set lo up",
            f"link add {BRIDGE} address {_BRIDGE_HARDWARE} type bridge",
            f"addr add {SERVER_ADDRESS}/24 dev {BRIDGE}",
            f"link set {BRIDGE} up",
        )
        os.makedirs("/var/lib/nfs/v4recovery", exist_ok=True)
        os.makedirs(EXPORT, exist_ok=True)
        mount(disk, EXPORT, "ext4")
        os.chmod(EXPORT, 0o1777)
        mount("nfsd", str(NFSD), "nfsd")
        _serve_rpc()
        _STATE.write_text(json.dumps(asdict(self)))
        self.start()
        end_grace()

    def start(self, grace_s: int | None = None) -> None:
        (NFSD / "nfsv4leasetime").write_text(str(self.lease_s))
        (NFSD / "nfsv4gracetime").write_text(str(grace_s or self.lease_s))
        (NFSD / "versions").write_text("+3 +4 +4.1 +4.2\n")
        (NFSD / "portlist").write_text("tcp 2049\n")
        (NFSD / "threads").write_text(str(_THREADS))
        # lockd's own grace time of 50 s would hold up version 4's locks too; nobody locks through it.
        Path("/proc/fs/lockd/nlm_end_grace").write_text("Y")
        for address in self.addresses:
            _tell("auth.unix.ip", f"nfsd {address} {_NEVER} {DOMAIN}")
        _tell("nfsd.export", f"{DOMAIN} {EXPORT} {_NEVER} {_EXPORT_FLAGS} {_NOBODY} {_NOBODY} 0")
        _tell("nfsd.fh", f"{DOMAIN} 1 \\x00000000 {_NEVER} {EXPORT}")


def _serve_rpc() -> None:
    """Start the services of rpc.py; returns when nfsd may ask them."""
    ready, listening = os.pipe()
    if os.fork() == 0:
        try:
            rpc.serve(SERVER_ADDRESS, DOMAIN, EXPORT, listening)
        finally:
            os._exit(1)
    os.close(listening)
    os.read(ready, 1)
    os.close(ready)


def _tell(cache: str, line: str) -> None:
    (_CHANNELS / cache / "channel").write_text(f"{line}\n")


def start_nfsd(grace_s: int | None = None) -> None:
    Server(**json.loads(_STATE.read_text())).start(grace_s)


def stop_nfsd() -> None:
    (NFSD / "threads").write_text("0")


def end_grace() -> None:
    """nfsd(7): the grace time ends now; whoever has not reclaimed a lock has lost it."""
    (NFSD / "v4_end_grace").write_text("Y")


def client_locks() -> int:
    """How many locks clients hold; proc_locks(5) shows each as the server's own POSIX lock."""
    return sum(" POSIX " in line for line in Path("/proc/locks").read_text().splitlines())


def remove_link(box: str) -> None:
    """Take a box's cable away for good; with one end goes the other."""
    ip(f"link del dev {box}")


def set_link(box: str, state: str) -> None:
    """Pull a box's cable ("down"), or put it in ("up")."""
    ip(f"link set dev {box} {state}")


def set_delay(cable: str, delay_ms: int, jitter_ms: int) -> None:
    """Have what leaves by a cable wait; tc-netem(8). The end of it that the caller has: a box's port, or ``eth0``."""
    how = ["replace", "dev", cable, "root", "netem", "delay", f"{delay_ms}ms", f"{jitter_ms}ms", "limit", "10000"]
    words = how if delay_ms else ["del", "dev", cable, "root"]
    subprocess.run(["tc", "qdisc", *words], check=True, capture_output=True)
