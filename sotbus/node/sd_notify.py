"""What a service tells its manager: READY, STATUS, RELOADING, STOPPING and WATCHDOG (sd_notify(3)).

One datagram each, to the socket that ``$NOTIFY_SOCKET`` names. Without one nothing is sent. Nothing here raises: a
manager that cannot be told changes nothing about the mail.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from sotbus import message

if TYPE_CHECKING:
    from collections.abc import Mapping

SEND_WAIT_S = 1.0
"""How long a manager that is behind in reading is waited for with what it must know: READY, RELOADING, STOPPING."""

MAX_STATUS = 500
"""Characters of a status line."""


class Notifier:
    """The way to this process's service manager.

    ``sent`` and ``failed`` count datagrams.

    :param environ: ``NOTIFY_SOCKET`` (a path, or ``@`` and an abstract name), ``WATCHDOG_USEC``, ``WATCHDOG_PID``.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        name = environ.get("NOTIFY_SOCKET", "")
        self._name = name if name.startswith(("/", "@")) else ""
        self.watchdog_s = _watchdog_s(environ)
        self.sent = 0
        self.failed = 0

    def __repr__(self) -> str:
        return f"<Notifier {self._name or 'nobody'}: {self.sent} sent, {self.failed} failed>"

    @property
    def is_watched(self) -> bool:
        """Whether somebody listens at all."""
        return bool(self._name)

    def ready(self, status: str = "") -> bool:
        """The start, or a reload, is done. Answers, as all of these, whether the manager was told."""
        return self._send(["READY=1", *_status(status)], SEND_WAIT_S)

    def status(self, status: str) -> bool:
        """One line for ``systemctl status``; not waited for."""
        return self._send(_status(status), 0)

    def reloading(self) -> bool:
        """A reload begins; :meth:`ready` ends it (``Type=notify-reload`` asks for the clock)."""
        return self._send(["RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}"], SEND_WAIT_S)

    def stopping(self, status: str = "") -> bool:
        """The end begins."""
        return self._send(["STOPPING=1", *_status(status)], SEND_WAIT_S)

    def watchdog(self) -> bool:
        """A sign of life; not waited for. Due every half of ``watchdog_s``, where that is not None."""
        return self._send(["WATCHDOG=1"], 0)

    def _send(self, lines: list[str], wait_s: float) -> bool:
        if not self._name or not lines:
            return False
        address = "\0" + self._name[1:] if self._name.startswith("@") else self._name
        data = "\n".join(lines).encode("utf-8", "replace")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(wait_s)
                sock.connect(address)
                sock.send(data)
        except OSError:
            self.failed += 1
            return False
        self.sent += 1
        return True


def _status(text: str) -> list[str]:
    """A status line; a line feed in it would be the end of it and the beginning of another assignment."""
    return [f"STATUS={message.shown(text)[:MAX_STATUS]}"] if text else []


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    """Seconds after which a silent service is killed; None where it is not watched (sd_watchdog_enabled(3))."""
    text, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) == 0:
        return None
    if pid and pid != str(os.getpid()):
        return None
    return int(text) / 1e6
