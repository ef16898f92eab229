"""The TCP sockets under a listener's connections, which libzmq keeps to itself: how one of them is ended.

A ROUTER has no call that ends one connection (zeromq/libzmq#2877), and its descriptors are not ours to close. Shutting
a socket down from beside is what a peer could do too: libzmq sees the end and closes it.
"""

from __future__ import annotations

import os
import socket as sockets
import stat
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import trio
import zmq

MOST_NEWCOMERS = 4096
"""New connections that are watched; in a flood the oldest are left to TCP's own keep-alive."""


class Tcp(NamedTuple):
    """One socket: libzmq's descriptor, and the socket's inode, which tells it from a later one in the same place."""

    fd: int
    inode: int

    @classmethod
    def under(cls, frame: zmq.Frame) -> Tcp | None:
        """The socket that a message came over, or None where it has ended meanwhile."""
        try:
            fd = int(frame.get(zmq.SRCFD))
            with _copy(fd) as copy:
                if _without_zone(copy.getpeername()[0]) != _without_zone(str(frame.get("Peer-Address"))):
                    return None
                return cls(fd, os.fstat(copy.fileno()).st_ino)
        except (OSError, zmq.ZMQError):
            return None

    @classmethod
    def accepted(cls, fd: int, port: int) -> Tcp | None:
        """The socket of a descriptor that a listener on a port accepted, or None where it has ended meanwhile."""
        try:
            with _copy(fd) as copy:
                return cls(fd, os.fstat(copy.fileno()).st_ino) if copy.getsockname()[1] == port else None
        except OSError:
            return None

    def hang_up(self) -> None:
        """Shut the socket down, if it still is there. The copy holds it, so the one that is looked at is the one."""
        try:
            with _copy(self.fd) as copy:
                if os.fstat(copy.fileno()).st_ino == self.inode:
                    copy.shutdown(sockets.SHUT_RDWR)
        except OSError:
            pass  # it has ended


def _copy(fd: int) -> sockets.socket:
    """A socket object over a copy of a descriptor. *Errors*: OSError where it is none of TCP."""
    copy = os.dup(fd)
    try:
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):
            raise OSError("not a socket")
        made = sockets.socket(fileno=copy)
    except BaseException:
        os.close(copy)
        raise
    if made.family not in (sockets.AF_INET, sockets.AF_INET6) or made.type != sockets.SOCK_STREAM:
        made.close()
        raise OSError("not a TCP socket")
    return made


def _without_zone(address: str) -> str:
    """An address without the interface that a link-local one may name (RFC 4007)."""
    return address.partition("%")[0]


class Newcomers:
    """Connections that were accepted and have not said hello: they get a time for it and are ended.

    :param greeting_s: the time, in seconds.
    :param greeted: whether a link stands over a socket.
    """

    def __init__(self, greeting_s: float, greeted: Callable[[Tcp], bool]) -> None:
        self._greeting_s = greeting_s
        self._greeted = greeted
        self._waiting: deque[tuple[float, Tcp]] = deque(maxlen=MOST_NEWCOMERS)
        self._came = trio.Event()
        self.ended = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def note(self, tcp: Tcp) -> None:
        """A connection was accepted."""
        self._waiting.append((trio.current_time() + self._greeting_s, tcp))
        self._came.set()

    async def run(self) -> None:
        """End those whose time is over, until cancelled."""
        while True:
            await self._came.wait()
            self._came = trio.Event()
            while self._waiting:
                deadline, tcp = self._waiting[0]
                if deadline > trio.current_time():
                    await trio.sleep_until(deadline)
                    continue  # in a flood another one is the oldest by now
                self._waiting.popleft()
                if not self._greeted(tcp):
                    self.ended += 1
                    tcp.hang_up()
