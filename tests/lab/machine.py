"""One guest kernel (user-mode-linux) from the host: boot, the line to its pid 1, the end of all its processes.

The guest runs as ordinary processes with the host's root folder read-only below its own, so that the same interpreter,
packages and sources are there. Its memory is a file without a name, in /dev/shm where that has room for all of it, else
in the machine's temporary folder: UML takes TMPDIR, TMP or TEMP if set, else /dev/shm, else /tmp, and dies of SIGBUS
when the place is full. The file system must allow executable mappings.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GUEST = Path(__file__).with_name("guest.py")
ADMIN_FOLDERS = ("/usr/sbin", "/sbin")
SHARED_MEMORY = "/dev/shm"
LINE_ROOM_BYTES = 2000
"""How much may be on its way to the guest unread: its serial line stalls for good when 4096 bytes wait in it."""
_CONSOLE_END_BYTES = 3000
_QUICK_BOOT = ("initcall_blacklist=raid6_select_algo", "pty.legacy_count=0")
"""Without these the kernel measures RAID routines and makes 512 old terminals, which is a quarter of its boot."""
_END_S = 30
_END_POLL_S = 0.005

Message = dict[str, Any]


class LabError(Exception):
    """The lab itself failed: no boot, a guest that is gone, a bound that passed."""


class Machine:
    """A guest, for one boot. ``heard`` gets each message but the line's own, in a thread of this object.

    ``lost`` is called in that thread, once, when the guest is gone.
    """

    def __init__(self, disk: Path, memory_mib: int, heard: Callable[[Message], None], lost: Callable[[], None]) -> None:
        self.disk, self.memory_mib = disk, memory_mib
        self._heard, self._lost = heard, lost
        self._hello = threading.Event()
        self._sending, self._room, self._acked = threading.Lock(), LINE_ROOM_BYTES, threading.Condition()
        self._owned = contextlib.ExitStack()
        self.gone = False

    @contextlib.contextmanager
    def booting(self) -> Iterator[None]:
        """While a guest and its boxes come up: an error ends it, and a `LabError` gets the end of its console's log."""
        try:
            yield
        except LabError as error:
            log = self.console()
            self.kill()
            raise LabError(f"{error}\n\nThe end of the guest's console:\n{log}") from error
        except BaseException:
            self.kill()
            raise

    def boot(self, modules: list[str], preload: list[str], timeout_s: float) -> None:
        """Start the kernel and wait until its pid 1 speaks. *Errors*: `LabError`; `booting` cleans up."""
        kernel = tool("linux.uml")
        self.folder = Path(tempfile.mkdtemp(prefix="sotbus-lab-"))
        self._owned.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self._socket, theirs = socket.socketpair()
        self._owned.callback(self._socket.close)
        words = [
            f"mem={self.memory_mib}M",
            *_QUICK_BOOT,
            *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"uml_dir={self.folder}"),
            *(f"ubd0={self.disk}", "con=null", "con0=null,fd:1", "ssl=null", f"ssl0=fd:{theirs.fileno()}"),
            *(f"init={sys.executable}", "--", "-BPu", str(GUEST)),
        ]
        if any(" " in word for word in words):
            raise LabError(f"a guest's command line cannot hold a path with a space: {words}")
        with theirs, open(self.folder / "console", "wb") as console:
            self._kernel = subprocess.Popen(
                [kernel, *words],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={"PATH": os.environ["PATH"], "TMPDIR": memory_folder(self.memory_mib, self.folder)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        threads = [threading.Thread(target=job, daemon=True) for job in (self._listen, self._watch)]
        self._owned.callback(self._end_processes, threads)
        for thread in threads:
            thread.start()
        if not self._hello.wait(timeout_s):
            raise LabError(f"the guest did not start in {timeout_s:.0f} s")
        folder = Path(kernel).resolve().parents[1] / "lib/uml/modules"
        how = {"environ": guest_environ(), "modules_folder": str(folder), "modules": modules, "preload": preload}
        self.send({"boot": how})

    def console(self) -> str:
        """The end of what the guest's kernel has written, and of what pid 1 did before it died."""
        try:
            return (self.folder / "console").read_bytes()[-_CONSOLE_END_BYTES:].decode(errors="replace")
        except OSError as error:
            return f"(not to be read: {error})"

    def send(self, message: Mapping[str, object], timeout_s: float = 60) -> None:
        """*Errors*: `LabError` when the guest is gone, or reads nothing for that long."""
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            while data:
                with self._acked:
                    if not self._acked.wait_for(lambda: self._room > 0 or self.gone, timeout_s):
                        raise LabError(f"the guest has read nothing for {timeout_s:.0f} s")
                    if self.gone:
                        raise LabError(f"the guest is gone; the end of its console:\n{self.console()}")
                    part, data = data[: self._room], data[self._room :]
                    self._room -= len(part)
                with contextlib.suppress(OSError):  # it has just gone: the next round says so
                    self._socket.sendall(part)

    def _listen(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    message = json.loads(line)
                    if "ack" in message:
                        with self._acked:
                            self._room += message["ack"]
                            self._acked.notify_all()
                    elif "hello" in message:
                        self._hello.set()
                    else:
                        self._heard(message)
        except (OSError, ValueError):
            pass  # cut off in the middle of a line: that is the end
        finally:
            with self._acked:
                self.gone = True
                self._acked.notify_all()
            self._hello.set()
            self._lost()

    def _watch(self) -> None:
        self._kernel.wait()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # its helper processes may hold the other side
        except OSError:
            pass

    def kill(self) -> None:
        """SIGKILL to the kernel and its helper processes (a group of their own): a pulled plug. Removes its folder.

        Returns when none of them runs. May be called again, and after a boot that failed.

        *Durability*: what the guest has written to its disk is in the disk's file, as far as the host's own page cache
        holds it; what only the guest's page cache held is lost.
        """
        self._owned.close()

    def _end_processes(self, threads: list[threading.Thread]) -> None:
        group = self._kernel.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        end = time.monotonic() + _END_S
        while _runs(group):
            if time.monotonic() > end:
                raise LabError(f"processes of the guest's group {group} do not end")
            time.sleep(_END_POLL_S)
        for thread in reversed(threads):
            thread.join()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass  # where this process is pid 1 it has inherited the kernel's helpers


def _runs(group: int) -> bool:
    """Whether a process of a group is neither gone nor a zombie; proc_pid_stat(5)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(its_group) == group and state not in "ZX":
            return True
    return False


def tool(name: str) -> str:
    """The path of a command, also where only the administrator's PATH has it. *Errors*: `LabError`."""
    found = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", os.defpath), *ADMIN_FOLDERS)))
    if found is None:
        raise LabError(f"{name} is not installed")
    return found


def make_disk(path: Path, size_bytes: int) -> None:
    """A sparse file with an empty ext4."""
    with open(path, "wb") as file:
        file.truncate(size_bytes)
    subprocess.run([tool("mkfs.ext4"), "-q", str(path)], check=True, stdin=subprocess.DEVNULL)


def memory_folder(memory_mib: int, otherwise: Path) -> str:
    """Where the guest's memory goes: /dev/shm, or ``otherwise`` where that is noexec or has too little free for all."""
    try:
        room = os.statvfs(SHARED_MEMORY)
    except OSError:
        return str(otherwise)
    fits = room.f_bavail * room.f_frsize > memory_mib << 20 and not room.f_flag & os.ST_NOEXEC
    return SHARED_MEMORY if fits else str(otherwise)


def guest_environ() -> dict[str, str]:
    """The environment of everything in the guest: nothing of ours but the way to the interpreter and the sources."""
    sources = [ROOT, *sorted(folder for folder in (ROOT / "plugins").iterdir() if folder.is_dir()), ROOT / "tests"]
    return {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"], *ADMIN_FOLDERS)),
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(map(str, sources)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
