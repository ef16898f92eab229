"""Bounds and limits of one client, with the environment's say (facts 14)."""

from __future__ import annotations

from sotbus.message import MAX_TEXT_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

LOCK_WAIT_S = 10.0
"""Registry lock: a join, a leave, a spawn, a work-state declaration (``SOT_LOCK_WAIT_SECS``)."""

TOUCH_WAIT_S = 1.0
"""Registry lock: the best-effort ``last_seen`` touch of a send or a poll."""

INBOX_LOCK_WAIT_S = 2.0
"""Inbox lock of an append (``SOT_INBOX_LOCK_WAIT_SECS``)."""

INBOX_READ_WAIT_S = 3.0
"""Shared inbox lock of a reader (``SOT_INBOX_READ_WAIT_SECS``)."""

MOUNT_WAIT_S = 10.0
"""What a command's calls into the folder's file system may take, beside its waits for locks, before the mount counts as
hung: more than a busy disk needs, less than a person waits for."""

WAIT_VARIABLES = {
    "lock_wait_s": "SOT_LOCK_WAIT_SECS",
    "inbox_lock_wait_s": "SOT_INBOX_LOCK_WAIT_SECS",
    "inbox_read_wait_s": "SOT_INBOX_READ_WAIT_SECS",
}
"""Each wait, and the variable that goes before the config file (facts 14)."""


class Settings:
    """Waits are in seconds, ``max_text_bytes`` in bytes of UTF-8; ``node_socket`` is the configured one, or None."""

    __slots__ = (
        "inbox_lock_wait_s",
        "inbox_read_wait_s",
        "lock_wait_s",
        "max_text_bytes",
        "mount_wait_s",
        "node_socket",
        "touch_wait_s",
    )

    def __init__(
        self,
        *,
        lock_wait_s: float = LOCK_WAIT_S,
        touch_wait_s: float = TOUCH_WAIT_S,
        inbox_lock_wait_s: float = INBOX_LOCK_WAIT_S,
        inbox_read_wait_s: float = INBOX_READ_WAIT_S,
        mount_wait_s: float = MOUNT_WAIT_S,
        node_socket: str | None = None,
        max_text_bytes: int = MAX_TEXT_BYTES,
    ) -> None:
        self.lock_wait_s = lock_wait_s
        self.touch_wait_s = touch_wait_s
        self.inbox_lock_wait_s = inbox_lock_wait_s
        self.inbox_read_wait_s = inbox_read_wait_s
        self.mount_wait_s = mount_wait_s
        self.node_socket = node_socket
        self.max_text_bytes = max_text_bytes

    def __repr__(self) -> str:
        return "<Settings " + " ".join(f"{name}={getattr(self, name)}" for name in self.__slots__) + ">"

    @classmethod
    def of(
        cls,
        environ: Mapping[str, str],
        max_text_bytes: int = MAX_TEXT_BYTES,
        *,
        lock_wait_s: float | None = None,
        inbox_lock_wait_s: float | None = None,
        inbox_read_wait_s: float | None = None,
        mount_wait_s: float | None = None,
        node_socket: str | None = None,
    ) -> Settings:
        """The environment's waits, else those given (the config file's), else the defaults.

        A variable whose text is no number of seconds says nothing (facts 14).
        """
        return cls(
            lock_wait_s=_wait(environ, "lock_wait_s", lock_wait_s, LOCK_WAIT_S),
            inbox_lock_wait_s=_wait(environ, "inbox_lock_wait_s", inbox_lock_wait_s, INBOX_LOCK_WAIT_S),
            inbox_read_wait_s=_wait(environ, "inbox_read_wait_s", inbox_read_wait_s, INBOX_READ_WAIT_S),
            mount_wait_s=MOUNT_WAIT_S if mount_wait_s is None else mount_wait_s,
            node_socket=node_socket,
            max_text_bytes=max_text_bytes,
        )


def _wait(environ: Mapping[str, str], name: str, given: float | None, default: float) -> float:
    wait = seconds(environ.get(WAIT_VARIABLES[name], ""))
    if wait is not None:
        return wait
    return default if given is None else given


def seconds(text: str) -> float | None:
    """A wait from the environment: digits, with a fraction where one is given, at most a day; None for another text."""
    whole, _, fraction = text.strip().partition(".")
    if (
        not whole.isascii()
        or not whole.isdigit()
        or len(whole) > 5
        or (fraction and not (fraction.isascii() and fraction.isdigit()))
    ):
        return None
    return min(float(f"{whole}.{fraction or 0}"), 86400.0)
