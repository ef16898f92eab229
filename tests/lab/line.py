"""Lines over descriptors, for a loop of one thread: whole lines in, lines out without ever blocking the loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from selectors import EVENT_READ, EVENT_WRITE, BaseSelector
from typing import NoReturn

READ_BYTES = 65536


def loop(selector: BaseSelector) -> NoReturn:
    """Do for ever what each ready descriptor was registered with."""
    while True:
        for key, _ in selector.select():
            if selector.get_map().get(key.fd) == key:  # else an earlier one of this round has closed it
                key.data()


class Incoming:
    """Calls ``arrived`` with what each read brought and ``ended`` at the end of file; both run in the loop."""

    def __init__(
        self, selector: BaseSelector, fd: int, arrived: Callable[[bytes], None], ended: Callable[[], None]
    ) -> None:
        self.selector, self.fd, self.open = selector, fd, True
        self._arrived, self._ended = arrived, ended
        os.set_blocking(fd, False)
        selector.register(fd, EVENT_READ, self.read)

    def read(self) -> bool:
        """One read; False when there was nothing to read now."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""  # a terminal line that was hung up reads as EIO
        if data:
            self._arrived(data)
            return True
        self.open = False
        self.selector.unregister(self.fd)
        os.close(self.fd)
        self._ended()
        return False

    def drain(self) -> None:
        """Read what is there now."""
        while self.open and self.read():
            pass


class Lines:
    """Cuts what arrives into lines; the newline is not part of one."""

    def __init__(self, each: Callable[[bytes], None]) -> None:
        self._each, self._rest = each, b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._each(line)


class Outgoing:
    """Bytes for a pipe that may be full: what does not fit waits here, without bound, and goes when there is room.

    A reader that is gone makes every further byte vanish: whoever waits for its answer is told by the end of that side.
    """

    def __init__(self, selector: BaseSelector, fd: int) -> None:
        self.selector, self.fd = selector, fd
        self._waiting, self._closing, self._closed = bytearray(), False, False
        os.set_blocking(fd, False)

    def send(self, data: bytes) -> None:
        if self._closing:
            return
        if not self._waiting and data:
            self.selector.register(self.fd, EVENT_WRITE, self.write)
        self._waiting += data

    def write(self) -> None:
        try:
            del self._waiting[: os.write(self.fd, self._waiting)]
        except BlockingIOError:
            return
        except OSError:
            self._waiting.clear()
            self._closing = True
        if not self._waiting:
            self.selector.unregister(self.fd)
            if self._closing:
                self._close()

    def close(self) -> None:
        """Close when all of it is written."""
        self._closing = True
        if not self._waiting:
            self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self.fd)
