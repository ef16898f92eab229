"""A passthrough FUSE file system that fails on request.

    python faultfs.py BACKING MOUNTPOINT CONTROL [--grant-every-flock | --forward-flock] [--while-stdin]

The process stays in the foreground until it is unmounted or gets SIGTERM. CONTROL is a JSON list of faults, read again
on every operation (replace it by a rename); no file means no faults::

    [{"op": "write", "path": "*/x.jsonl", "errno": "EIO", "after": 0, "times": 1}]

=========  ============================================================================================================
op         open create read write fsync truncate rename link unlink opendir flush getattr flock
path       a glob over the path inside the mount, "/" first, where * also matches "/"; either name of a rename or link
errno      the error that the call gets; the backing file system is not asked
short      read and write only: so many bytes are transferred, and that count is the answer
sleep_s    a delay before anything else
applied    with errno, not for open, create and opendir: the backing operation is done, and the error comes all the same
grant      flock only: answered with success, though nothing is locked
after      so many matching calls are let through first
times      how often the fault fires (absent: always)
id         names the fault: its counts stay as long as the id stays in CONTROL (default: position and content)
=========  ============================================================================================================

A call goes down the list. A fault without errno, short and grant only delays or counts, and the search goes on; the
first other fault that fires decides, and those behind it do not see the call. Every firing is appended to CONTROL.fired
as one JSON line (id, op, path) before the call is answered.

What the kernel and libfuse make of it:

* The mount is direct_io without attribute caching: every read(2) and write(2) arrives (a large one in pieces of
  up to 1 MiB, which count one by one), and a short count reaches the caller. In return MAP_SHARED fails with ENODEV.
* open(2) of a file that exists arrives as ``open`` (with O_TRUNC inside it), of a new one as ``create``. fsync(2) and
  fdatasync(2) arrive as ``fsync``, of a directory too; each close(2) as ``flush``. Every look-up of a name is a
  ``getattr``, stat(2) or not.
* The kernel tries open, create, rename, link, unlink and stat a second time by itself when the first answer is ESTALE.
  It takes "times": 2 for an application to see it once. read, write, fsync, truncate and flush are not tried again.
* ENOSYS makes the kernel stop asking for that operation as long as the mount lives, and of fsync and flush it makes a
  success: use EOPNOTSUPP or EPERM.
* flock(2) is by default the business of the kernel, which never asks: ``flock`` faults need --forward-flock, which
  locks the backing file (the lock of a file closed without LOCK_UN goes a moment after close(2) returns, and a process
  killed while it waits for a lock ends only when it gets it). --grant-every-flock locks nothing and says yes to
  everyone.
* Two hard links to one file have the same st_ino but are two files to the kernel: its own flock(2) on one does not
  exclude the other (--forward-flock does).
* An open file that was replaced or removed can still be read, written, synced and truncated, but fstat(2) gets ESTALE,
  which an open(path) of Python's can meet too, when another process replaces the file at that moment. It is the price
  of a rename that replaces in one step: libfuse's other way leaves a moment without the name.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import fnmatch
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MOUNT_TIMEOUT_S = 10.0
END_TIMEOUT_S = 5.0

OPS = frozenset(
    {
        "open",
        "create",
        "read",
        "write",
        "fsync",
        "truncate",
        "rename",
        "link",
        "unlink",
        "opendir",
        "flush",
        "getattr",
        "flock",
    }
)
_TYPES: Mapping[str, tuple[type, ...]] = {
    "op": (str,),
    "path": (str,),
    "errno": (str,),
    "short": (int,),
    "sleep_s": (int, float),
    "applied": (bool,),
    "grant": (bool,),
    "after": (int,),
    "times": (int,),
    "id": (str,),
}


@dataclass(frozen=True)
class Fault:
    """One entry of the control file."""

    op: str
    path: str = "*"
    errno: str | None = None
    short: int | None = None
    sleep_s: float = 0.0
    applied: bool = False
    grant: bool = False
    after: int = 0
    times: int | None = None
    id: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if not isinstance(value, _TYPES[field.name]) or (
                isinstance(value, bool) and bool not in _TYPES[field.name]
            ):
                raise ValueError(f"{field.name}: {value!r} is of the wrong type")
            if isinstance(value, (int, float)) and value < 0:
                raise ValueError(f"{field.name}: {value!r} is negative")
        if self.op not in OPS:
            raise ValueError(f"op: {self.op!r} is not one of {', '.join(sorted(OPS))}")
        if self.errno is not None and not isinstance(getattr(errno, self.errno, None), int):
            raise ValueError(f"errno: {self.errno!r} is no error's name")
        if self.short is not None and self.op not in ("read", "write"):
            raise ValueError("short: only for read and write")
        if self.grant and self.op != "flock":
            raise ValueError("grant: only for flock")
        if self.applied and (self.errno is None or self.op in ("open", "create", "opendir")):
            raise ValueError("applied: only with errno, and not for open, create and opendir")
        if (self.errno is not None) + (self.short is not None) + self.grant > 1:
            raise ValueError("errno, short and grant exclude each other")

    @property
    def decides(self) -> bool:
        return self.errno is not None or self.short is not None or self.grant

    def matches(self, op: str, paths: tuple[str, ...]) -> bool:
        return op == self.op and any(fnmatch.fnmatchcase(path, self.path) for path in paths)


def parse_faults(text: str | bytes) -> list[Fault]:
    """The faults of a control file; ValueError for one that is not understood."""
    entries = json.loads(text)
    faults = []
    for index, entry in enumerate(entries if isinstance(entries, list) else [entries]):
        if not isinstance(entry, dict) or "op" not in entry or not entry.keys() <= _TYPES.keys():
            raise ValueError(f"not a fault: {entry!r}")
        faults.append(Fault(**{"id": f"{index}:{json.dumps(entry, sort_keys=True)}", **entry}))
    return faults


class Control:
    """The control file, how often each of its faults saw a call and fired, and the log of the firings."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._log = os.open(path + ".fired", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lock = threading.Lock()
        self._seen: dict[str, int] = {}
        self._fired: dict[str, int] = {}

    def _read(self) -> list[Fault]:
        try:
            with open(self._path, "rb") as file:
                return parse_faults(file.read())
        except FileNotFoundError:
            return []

    def fault(self, op: str, *paths: str) -> Fault | None:
        """Count the call, sleep as it is told, and return the fault that decides about it."""
        sleep_s = 0.0
        decision = None
        with self._lock:
            faults = self._read()
            known = {fault.id for fault in faults}
            self._seen = {key: count for key, count in self._seen.items() if key in known}
            self._fired = {key: count for key, count in self._fired.items() if key in known}
            for fault in faults:
                fired = self._fired.get(fault.id, 0)
                if not fault.matches(op, paths) or (fault.times is not None and fired >= fault.times):
                    continue
                self._seen[fault.id] = self._seen.get(fault.id, 0) + 1
                if self._seen[fault.id] <= fault.after:
                    continue
                self._fired[fault.id] = fired + 1
                sleep_s += fault.sleep_s
                line = json.dumps({"id": fault.id, "op": op, "path": " ".join(paths)}) + "\n"
                os.write(self._log, line.encode())
                if fault.decides:
                    decision = fault
                    break
        if sleep_s:
            time.sleep(sleep_s)
        return decision


def _under(fault: Fault | None, work: Callable[[], T]) -> T:
    """Do *work*, unless *fault* is an error; that is raised instead of it or, if so wished, after it."""
    if fault is None or fault.errno is None:
        return work()
    if fault.applied:
        work()
    number = getattr(errno, fault.errno)
    raise OSError(number, os.strerror(number))


class FaultFS:
    """The operations, in the shape in which mfusepy calls them; a file handle is a descriptor of the backing file."""

    use_ns = True  # mfusepy: times are nanoseconds

    def __init__(self, backing: str, control: Control) -> None:
        self._backing = backing
        self._control = control
        self._names: dict[int, str] = {}

    def _real(self, path: str) -> str:
        return self._backing + path

    def _name(self, path: str | None, fh: int | None) -> str:
        """The path of a call; libfuse has none for an open file that was removed, which keeps its last name here."""
        if path is not None:
            return path
        return self._names.get(fh, "") if fh is not None else ""

    def _run(self, work: Callable[[], T], op: str, *paths: str) -> T:
        return _under(self._control.fault(op, *paths), work)

    # Names

    def getattr(self, path: str | None, fh: int | None = None) -> dict[str, int]:
        def work() -> dict[str, int]:
            found = os.fstat(fh) if fh is not None else os.lstat(self._real(path or "/"))
            names = ("st_mode", "st_ino", "st_dev", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")
            times = {f"st_{kind}time": getattr(found, f"st_{kind}time_ns") for kind in "amc"}
            return {name: getattr(found, name) for name in names} | times

        return self._run(work, "getattr", self._name(path, fh))

    def rename(self, old: str, new: str) -> int:
        self._run(lambda: os.rename(self._real(old), self._real(new)), "rename", old, new)
        return 0

    def link(self, target: str, source: str) -> int:
        self._run(lambda: os.link(self._real(source), self._real(target)), "link", source, target)
        return 0

    def unlink(self, path: str) -> int:
        self._run(lambda: os.unlink(self._real(path)), "unlink", path)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._real(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._real(path))
        return 0

    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self._real(target))
        return 0

    def readlink(self, path: str) -> str:
        return os.readlink(self._real(path))

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._real(path), mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        os.lchown(self._real(path), uid, gid)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._real(path), ns=times or (time.time_ns(), time.time_ns()), follow_symlinks=False)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._real(path))
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

    # Directories

    def opendir(self, path: str) -> int:
        fd = self._run(lambda: os.open(self._real(path), os.O_RDONLY | os.O_DIRECTORY), "opendir", path)
        self._names[fd] = path
        return fd

    def readdir(self, path: str | None, fh: int) -> list[tuple[str, dict[str, int], int]]:
        entries = []
        for name in (".", "..", *os.listdir(fh)):
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                found = os.stat(name, dir_fd=fh, follow_symlinks=False)
                entries.append((name, {"st_mode": found.st_mode, "st_ino": found.st_ino}, 0))
        return entries

    def fsyncdir(self, path: str | None, datasync: int, fh: int) -> int:
        return self.fsync(path, datasync, fh)

    def releasedir(self, path: str | None, fh: int) -> int:
        return self.release(path, fh)

    # Files

    def open(self, path: str, flags: int) -> int:
        fd = self._run(lambda: os.open(self._real(path), flags), "open", path)
        self._names[fd] = path
        return fd

    def create(self, path: str, mode: int, flags: int) -> int:
        fd = self._run(lambda: os.open(self._real(path), flags | os.O_CREAT, mode), "create", path)
        self._names[fd] = path
        return fd

    def read(self, path: str | None, size: int, offset: int, fh: int) -> bytes:
        return self._transfer("read", path, fh, size, lambda count: os.pread(fh, count, offset))

    def write(self, path: str | None, data: bytes, offset: int, fh: int) -> int:
        return self._transfer("write", path, fh, len(data), lambda count: os.pwrite(fh, data[:count], offset))

    def _transfer(self, op: str, path: str | None, fh: int, size: int, move: Callable[[int], T]) -> T:
        fault = self._control.fault(op, self._name(path, fh))
        count = size if fault is None or fault.short is None else min(size, fault.short)
        return _under(fault, lambda: move(count))

    def truncate(self, path: str | None, length: int, fh: int | None = None) -> int:
        target = fh if fh is not None else self._real(path or "/")
        self._run(lambda: os.truncate(target, length), "truncate", self._name(path, fh))
        return 0

    def fsync(self, path: str | None, datasync: int, fh: int) -> int:
        self._run(lambda: (os.fdatasync if datasync else os.fsync)(fh), "fsync", self._name(path, fh))
        return 0

    def flush(self, path: str | None, fh: int) -> int:
        self._run(lambda: os.close(os.dup(fh)), "flush", self._name(path, fh))
        return 0

    def release(self, path: str | None, fh: int) -> int:
        self._names.pop(fh, None)
        os.close(fh)
        return 0


class ForwardingFaultFS(FaultFS):
    """Locks the backing file, whose descriptor belongs to one open(2) of the mount, as its lock does."""

    def flock(self, path: str | None, fh: int, operation: int) -> int:
        fault = self._control.fault("flock", self._name(path, fh))
        if fault is None or not fault.grant:
            _under(fault, lambda: fcntl.flock(fh, operation))
        return 0


class GrantingFaultFS(FaultFS):
    """Says yes to every flock(2) and locks nothing, like a file system that only pretends to lock."""

    def flock(self, path: str | None, fh: int, operation: int) -> int:
        _under(self._control.fault("flock", self._name(path, fh)), lambda: None)
        return 0


def _truncate(fuse: Any, path: bytes | None, length: int, info: Any) -> int:
    """truncate with the file handle of an ftruncate(2), which mfusepy drops with libfuse 3."""
    result: int = fuse.ftruncate(path, length, info)
    return result


def _rename(fuse: Any, old: bytes, new: bytes, flags: int) -> int:
    """rename without the flags of renameat2(2), which mfusepy would drop in silence."""
    return -errno.EINVAL if flags else int(fuse.rename_fuse_2(old, new))


def _end_with_stdin() -> None:
    """Unmount once standard input ends: with the process that holds its other end, however that went."""
    while os.read(0, 4096):
        pass
    # libfuse waits in the main thread, and it is the one that the signal has to wake.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="A passthrough FUSE file system that fails on request.")
    parser.add_argument("backing", type=os.path.abspath)
    parser.add_argument("mountpoint", type=os.path.abspath)
    parser.add_argument("control", type=os.path.abspath)
    locking = parser.add_mutually_exclusive_group()
    locking.add_argument("--grant-every-flock", action="store_const", const=GrantingFaultFS, dest="kind")
    locking.add_argument("--forward-flock", action="store_const", const=ForwardingFaultFS, dest="kind")
    parser.add_argument("--while-stdin", action="store_true", help="unmount when standard input ends")
    options = parser.parse_args(arguments)

    os.environ["FUSE_LIBRARY_NAME"] = "fuse3"  # else it takes libfuse 2 where that is installed too
    mfusepy: Any = importlib.import_module("mfusepy")  # untyped; and what needs no mount can do without it
    fuse: Any = type("FaultFuse", (mfusepy.FUSE,), {"truncate_fuse_3": _truncate, "rename_fuse_3": _rename})
    threads: dict[str, int] = {}
    if (mfusepy.fuse_version_major, mfusepy.fuse_version_minor) >= (3, 12):
        threads["max_threads"] = 64  # of 10, some sleeping or waiting for a lock would soon leave none
    os.umask(0)  # the kernel has applied that of the caller
    if options.while_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    fuse(
        (options.kind or FaultFS)(options.backing, Control(options.control)),
        options.mountpoint,
        foreground=True,
        fsname="faultfs",
        direct_io=True,
        use_ino=True,
        hard_remove=True,
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
        **threads,
    )


# The test's side: it starts this file as a process of its own.


def is_mounted(path: Path) -> bool:
    """Whether the kernel lists *path* as a mount point, even one whose file system no longer answers."""
    wanted = os.fsencode(path).replace(b"\\", b"\\134").replace(b" ", b"\\040")
    with open("/proc/self/mountinfo", "rb") as file:
        return any(line.split()[4] == wanted for line in file)


@dataclass(frozen=True)
class Firing:
    """One time that a fault fired; the path is within the mount (two, with a space between, for a rename or link)."""

    id: str
    op: str
    path: str


class MountedFaultFS:
    """A mounted faultfs.py: what is in *backing*, seen through *mount* and through the faults injected."""

    def __init__(self, base: Path, *options: str) -> None:
        self.backing = base / "backing"
        self.mount = base / "mount"
        self._control = base / "control.json"
        self._options = options
        self._faults: list[dict[str, object]] = []
        self._ids = itertools.count(1)
        self._stderr = base / "stderr"
        for directory in (self.backing, self.mount):
            directory.mkdir(parents=True)
        command = [sys.executable, __file__, str(self.backing), str(self.mount), str(self._control)]
        with open(self._stderr, "wb") as stderr:
            # Apart from the terminal: a Ctrl-C ends the tests, whose teardown then ends this. Standard input: if the
            # tests are killed, it unmounts by itself.
            self._process = subprocess.Popen(
                [*command, "--while-stdin", *options], stdin=subprocess.PIPE, stderr=stderr, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_mounted(self) -> None:
        deadline = time.monotonic() + MOUNT_TIMEOUT_S
        while not os.path.ismount(self.mount):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"faultfs did not mount: {self._stderr.read_text(errors='replace')}")
            time.sleep(0.01)

    def inject(self, *faults: Mapping[str, object]) -> list[str]:
        """Add *faults* (see faultfs.py) behind those in force, from the next operation on; returns their ids."""
        new = [{"id": f"fault-{next(self._ids)}", **fault} for fault in faults]
        for fault in parse_faults(json.dumps(new)):
            if fault.op == "flock" and not self._options:
                raise ValueError("a flock fault needs a mount made with --forward-flock or --grant-every-flock")
        self._set([*self._faults, *new])
        return [str(fault["id"]) for fault in new]

    def clear(self) -> None:
        """No faults from the next operation on; what has fired stays counted."""
        self._set([])

    def _set(self, faults: list[dict[str, object]]) -> None:
        temporary = self._control.with_suffix(".tmp")
        temporary.write_text(json.dumps(faults))
        temporary.replace(self._control)
        self._faults = faults

    def firings(self) -> list[Firing]:
        """Every firing of a fault since the mount, in order."""
        log = Path(f"{self._control}.fired")
        return [Firing(**json.loads(line)) for line in log.read_text().splitlines()]

    def fired(self, op_or_id: str | None = None) -> int:
        """How often faults have fired: all, those of an operation, or the one with an id that inject returned."""
        return sum(op_or_id in (None, firing.op, firing.id) for firing in self.firings())

    def close(self) -> None:
        """Unmount, and end the process."""
        try:
            for option in ("-u", "-uz"):
                if is_mounted(self.mount):
                    subprocess.run(["fusermount3", option, str(self.mount)], check=False, capture_output=True)
        finally:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        assert not is_mounted(self.mount), f"{self.mount} is still mounted"


if __name__ == "__main__":
    main(sys.argv[1:])
