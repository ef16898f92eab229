"""Notices that a mailbox grew: inotify(7) where every writer is this kernel's, a look at short intervals elsewhere.

inotify tells what processes of this machine do, so it is believed on a local disk and on tmpfs only. On NFS another
machine's append makes no event, and an overlay or a FUSE file system may hide who writes. Where it is believed the file
is still looked at now and then, in case an event is lost.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from typing import TYPE_CHECKING

import trio

from sotbus.comm.folder import open_regular, refresh_folder
from sotbus.comm.mounts import LOCAL_FILE_SYSTEMS, mount_of

if TYPE_CHECKING:
    from sotbus.comm.box import Box
    from sotbus.comm.folder import Folder
    from sotbus.mount_limits import Worker

POLL_S = 0.2
"""Interval of looks where inotify is not believed. A look is an open and a close."""

NETWORK_POLL_S = 1.0
"""The same on NFS, where each look is a request to the server."""

SLOW_POLL_S = 10.0
"""Interval of looks beside inotify."""

NETWORK_FILE_SYSTEMS = frozenset(["nfs", "nfs4"])
TRUSTED_FILE_SYSTEMS = LOCAL_FILE_SYSTEMS | {"tmpfs"}

IN_MODIFY, IN_MOVED_TO, IN_CREATE, IN_MOVE_SELF, IN_Q_OVERFLOW, IN_IGNORED = 0x2, 0x80, 0x100, 0x800, 0x4000, 0x8000
IN_ONLYDIR = 0x1000000
_EVENT = struct.Struct("iIII")
"""wd, mask, cookie, and the length of the name that follows (inotify(7))."""

READ_BYTES = 1 << 16

Signature = tuple[int, int, int, int] | None


class MailWatch:
    """One handle's inbox, watched. :meth:`wait` returns when it may have grown since the wait before.

    The inbox may be absent, may be made later, and may be replaced by a rename; so may its folder.

    :param worker: does the looks, which may block.
    :param poll_s: interval of looks where inotify is not believed, in seconds; by the mount where it is None.
    """

    def __init__(self, folder: Folder, handle: str, box: Box, worker: Worker, poll_s: float | None = None) -> None:
        self.path = folder.inbox(handle)
        self._folder = folder.inboxes
        self._name = os.fsencode(os.path.basename(self.path))
        self._box = box
        self._worker = worker
        self._poll_s = poll_s
        self._every_s = POLL_S
        self._fd = -1
        self._wd = -1
        self._seen: Signature = None
        self._next_look: float | None = None
        self.closed = False

    def __repr__(self) -> str:
        how = "closed" if self.closed else "inotify" if self._wd >= 0 else f"a look every {self._every_s:g} s"
        return f"<MailWatch {self.path} by {how}>"

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    async def wait(self) -> None:
        """Return at once the first time, later when the inbox may have grown since this last returned.

        It may return for nothing; it never sleeps through a line that was filed after it last returned.

        *Errors*: :class:`trio.ClosedResourceError` once the watch is closed.
        *Cancellation*: changes nothing.
        """
        if self._next_look is None:
            self._note(await self._worker.run(self._arm))
            return
        while not self.closed:
            if await self._told():
                return
            before = self._seen
            self._note(await self._worker.run(self._arm))
            if self._seen != before:
                return
        raise trio.ClosedResourceError("this watch is closed")

    async def _told(self) -> bool:
        """Wait for an event about the inbox (True), or until it is time for a look (False)."""
        assert self._next_look is not None
        with trio.move_on_at(self._next_look):
            while self._wd >= 0:
                await trio.lowlevel.wait_readable(self._fd)
                if self._drain():
                    return True
            await trio.sleep_until(self._next_look)
        return False

    def _note(self, seen: Signature) -> None:
        self._seen = seen
        self._next_look = trio.current_time() + (SLOW_POLL_S if self._wd >= 0 else self._every_s)

    def close(self) -> None:
        """Close the descriptor; a wait that is under way ends with ClosedResourceError."""
        fd, self._fd, self._wd, self.closed = self._fd, -1, -1, True
        if fd >= 0:
            trio.lowlevel.notify_closing(fd)
            os.close(fd)

    def _arm(self) -> Signature:
        """In a thread: have inotify watch the folder that has the inbox's name now, and look at the inbox.

        In this order nothing that comes after the look is missed.
        """
        trusted, self._every_s = self._means()
        if not trusted or not self._add_watch():
            self._wd = -1
        return self._look()

    def _means(self) -> tuple[bool, float]:
        """Whether inotify is believed on the inbox's mount, and the interval of looks if it is not."""
        text = self._box.mountinfo()
        mount = mount_of(os.path.realpath(self._folder), text) if text else None
        fstype = mount.fstype if mount else ""
        every_s = self._poll_s or (NETWORK_POLL_S if fstype in NETWORK_FILE_SYSTEMS else POLL_S)
        return fstype in TRUSTED_FILE_SYSTEMS and not os.path.islink(self.path), every_s

    def _add_watch(self) -> bool:
        """Watch the folder; the same one again is no change. False where there is none, or no watch to be had."""
        if self.closed:
            return False
        calls = _inotify()
        if calls is None:
            return False
        if self._fd < 0:
            self._fd = calls.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            return False
        mask = IN_MODIFY | IN_MOVED_TO | IN_CREATE | IN_MOVE_SELF | IN_ONLYDIR
        wd = int(calls.inotify_add_watch(self._fd, os.fsencode(self._folder), mask))
        if self._wd not in (-1, wd):
            calls.inotify_rm_watch(self._fd, self._wd)
        self._wd = wd
        return wd >= 0

    def _drain(self) -> bool:
        """Read what inotify has to say; whether any of it can be about the inbox."""
        about = False
        while True:
            try:
                data = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                return about
            at = 0
            while at < len(data):
                wd, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size
                name = data[at : at + length].rstrip(b"\0")
                at += length
                if mask & IN_Q_OVERFLOW or (wd == self._wd and name == self._name):
                    about = True
                elif wd == self._wd and mask & (IN_IGNORED | IN_MOVE_SELF):  # another folder may have the name
                    about, self._wd, self._next_look = True, -1, trio.current_time()

    def _look(self) -> Signature:
        """What would change if the inbox grew. Opened, since an NFS client asks the server at an open (nfs(5))."""
        refresh_folder(self._folder)
        try:
            fd = open_regular(self.path)
        except OSError:
            return None
        try:
            there = os.fstat(fd)
        finally:
            os.close(fd)
        return there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns


@functools.cache
def _inotify() -> ctypes.CDLL | None:
    """The C library, where it has inotify."""
    try:
        calls = ctypes.CDLL(None, use_errno=True)
        calls.inotify_init1.argtypes = [ctypes.c_int]
        calls.inotify_add_watch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]
        calls.inotify_rm_watch.argtypes = [ctypes.c_int, ctypes.c_int]
    except (OSError, AttributeError):
        return None
    return calls
