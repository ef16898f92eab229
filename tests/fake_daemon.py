"""A daemon's socket as a test tells it: each connection is dealt with by a script."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

Script = Callable[["FakeDaemon", socket.socket], None]


class FakeDaemon:
    """Listens in a thread and lets a script deal with each connection; ``got`` is what the connections sent."""

    def __init__(self, path: Path, script: Script) -> None:
        self.path = path
        self.got: list[bytes] = []
        self.over = threading.Event()
        self.closed = threading.Event()
        self._script = script
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, name="fake-daemon")
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                conn, _ = self._socket.accept()
            except OSError:
                return
            with conn:
                conn.settimeout(10)
                self.got.append(b"")
                try:
                    self._script(self, conn)
                except OSError:
                    pass
            self.closed.set()

    def read(self, conn: socket.socket, lines: int = 2) -> None:
        """Read until that many lines have come."""
        while self.got[-1].count(b"\n") < lines and (data := conn.recv(65536)):
            self.got[-1] += data

    def close(self) -> None:
        self.over.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)
        assert not self._thread.is_alive()


def answering(data: bytes) -> Script:
    """Read both requests, write this, and wait for the client to go."""

    def script(fake: FakeDaemon, conn: socket.socket) -> None:
        fake.read(conn)
        conn.sendall(data)
        conn.recv(1)

    return script
