"""The node's log: events with fields, one JSON object a line, or one readable line where a person looks on.

What a message says is never logged. That is by construction: an event takes only the fields of :class:`Fields`, and
none of them is for a text that somebody sent.
"""

from __future__ import annotations

import json
import math
import os
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, TypedDict, Unpack

from sotbus.errors import FolderError, SotbusError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

MAX_TEXT = 500
"""Characters of one field's text."""

MAX_EVENT = 80
"""Characters of an event's name, which is a few words of the code's own."""

MAX_QUEUED = 4096
"""Lines that wait for a file or terminal that takes none; past that, lines are dropped and counted."""

MAX_CAUSES = 10
"""Errors of one exception group that are logged each on a line of its own."""

CLOSE_WAIT_S = 1.0

STDERR = 2
LINE_FEED = 0x0A


class Fields(TypedDict, total=False):
    """Everything that an event may say. A field that is not here is dropped, and the line says so."""

    # who
    node: str
    peer: str
    host: str
    user: str
    handle: str
    row: str
    client: str
    pid: int
    uid: int
    role: str
    plugin: str
    transport: str
    key_fingerprint: str
    # what
    op: str
    code: str
    outcome: str
    outcome_unknown: bool
    message_id: str
    state: str
    kind: str
    version: str
    signal: str
    task: str
    # where
    address: str
    folder: str
    mailbox: str
    path: str
    socket: str
    config: str
    manager: str
    # why
    error: str
    error_type: str
    where: str
    reason: str
    hint: str
    errno: int
    # how much
    count: int
    size_bytes: int
    offset_bytes: int
    frames: int
    batch: int
    syncs: int
    queued: int
    in_flight: int
    attempt: int
    restarts: int
    handles: int
    peers: int
    took_s: float
    wait_s: float
    retry_s: float
    up_s: float
    round_trip_s: float
    since: str


NAMES = frozenset(Fields.__annotations__)


class Sink:
    """Where lines go: a descriptor, or a file that is opened again by its name after a rotation.

    *Errors* of the constructor: :class:`FolderError` where the file cannot be opened.
    """

    def __init__(self, path: str | None = None, fd: int = STDERR) -> None:
        self._path = path
        self._torn = False
        if path is None:
            self._fd = fd
            return
        try:
            self._fd = _opened(path)
        except OSError as error:
            raise FolderError(
                f"the log file {path} cannot be opened ({error.strerror})", hint="name another file"
            ) from error

    def __repr__(self) -> str:
        return f"<Sink {self._path or self._fd}>"

    @property
    def is_terminal(self) -> bool:
        try:
            return os.isatty(self._fd)
        except OSError:
            return False

    def write(self, data: bytes) -> None:
        """Whole lines. *Errors*: OSError; part of a line may stand then, and the next one begins on a new line."""
        view = memoryview(b"\n" + data if self._torn else data)
        while view:
            try:
                written = os.write(self._fd, view)
            except BlockingIOError:  # a terminal or pipe that somebody else made non-blocking
                select.select([], [self._fd], [])
                continue
            self._torn = view[written - 1] != LINE_FEED
            view = view[written:]

    def reopen(self) -> None:
        """Go on in the file that has the name now. *Errors*: OSError; the old one goes on then."""
        if self._path is not None:
            fd = _opened(self._path)
            os.close(self._fd)
            self._fd, self._torn = fd, False

    def close(self) -> None:
        if self._path is not None:
            os.close(self._fd)


class EventLog:
    """Takes events from any thread and writes them in a thread of its own, so that no caller waits for a disk.

    No method but the constructor raises. An event that cannot be kept is counted: ``dropped`` (the queue was full),
    ``failed`` (the write failed, of some of the lines perhaps only).

    *Durability*: none. What is queued when the process is killed is lost.

    :param level: the lowest level that is written: ``debug``, ``info``, ``warning``, ``error``.
    :param human: readable lines in place of JSON; by default where the sink is a terminal.
    :param clock: seconds since the epoch.
    """

    def __init__(
        self,
        sink: Sink | None = None,
        *,
        level: str = "info",
        human: bool | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._sink = sink or Sink()
        self._threshold = LEVELS[level]
        self._form = _human_line if (self._sink.is_terminal if human is None else human) else _json_line
        self._clock = clock
        self._lines: deque[bytes] = deque()
        self._wake = threading.Condition()
        self._closing = self._reopening = False
        self._unsaid = 0
        self.written = self.dropped = self.failed = 0
        self._thread = threading.Thread(target=self._work, name="sotbus-log", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<EventLog to {self._sink!r}: {self.written} written, {self.dropped} dropped, {self.failed} failed>"

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def statistics(self) -> dict[str, int]:
        return {"written": self.written, "dropped": self.dropped, "failed": self.failed, "queued": len(self._lines)}

    def set_level(self, level: str) -> None:
        """Write events of this level and above from now on; a level that is none changes nothing."""
        self._threshold = LEVELS.get(level, self._threshold)

    def debug(self, event: str, **fields: Unpack[Fields]) -> None:
        self._take("debug", event, fields)

    def info(self, event: str, **fields: Unpack[Fields]) -> None:
        self._take("info", event, fields)

    def warning(self, event: str, **fields: Unpack[Fields]) -> None:
        self._take("warning", event, fields)

    def error(self, event: str, **fields: Unpack[Fields]) -> None:
        self._take("error", event, fields)

    def exception(self, event: str, error: BaseException, /, **fields: Unpack[Fields]) -> None:
        """An event for an error, or for each one in a group: its type, where it was raised, and its text.

        The text of an error that sotbus or the system did not make may repeat what somebody sent: it is left out.
        """
        for cause in _causes(error):
            more = fields.copy()
            more["error_type"], more["where"] = type(cause).__name__, _where(cause)
            if isinstance(cause, (SotbusError, OSError)):
                more["error"] = _text_of(cause)
            if isinstance(cause, SotbusError) and cause.hint:
                more["hint"] = cause.hint
            self._take("error", event, more)

    def reopen(self) -> None:
        """Go on in a file of the same name, before the next line: after a rotation."""
        with self._wake:
            self._reopening = True

    def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Write what is queued, within ``wait_s`` seconds; what comes later is dropped. Again, nothing happens."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(wait_s)

    def _take(self, level: str, event: str, fields: Mapping[str, object]) -> None:
        if LEVELS[level] < self._threshold:
            return
        try:
            line = self._form(self._clock(), level, event[:MAX_EVENT], _allowed(fields))
        except Exception as error:  # a clock, or a value, that is broken: that there was an event still shows
            line = _json_line(time.time(), level, "unloggable", {"error_type": type(error).__name__})
        with self._wake:
            if self._closing or len(self._lines) >= MAX_QUEUED:
                self.dropped += 1
                self._unsaid += 1
                return
            self._lines.append(line)
            self._wake.notify()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._lines and not self._closing:
                    self._wake.wait()
                lines = list(self._lines)
                self._lines.clear()
                reopening, self._reopening = self._reopening, False
                unsaid, self._unsaid = self._unsaid, 0
                closing = self._closing
            if unsaid:
                lines.append(self._form(time.time(), "warning", "log lines dropped", {"count": unsaid}))
            try:
                if reopening:
                    self._sink.reopen()
            except OSError:
                self.failed += 1
            try:
                if lines:
                    self._sink.write(b"".join(lines))
            except OSError:
                self.failed += len(lines)
            else:
                self.written += len(lines)
            if closing:
                self._sink.close()
                return


def _opened(path: str) -> int:
    """The log file for appending, 0600 where it is new; a FIFO is not waited for. *Errors*: OSError."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY | os.O_NONBLOCK, 0o600)


def _allowed(fields: Mapping[str, object]) -> dict[str, object]:
    """The fields that an event may have, each bounded; names that are not among them are named."""
    allowed = {name: _value(value) for name, value in fields.items() if name in NAMES}
    if len(allowed) < len(fields):
        allowed["not_logged"] = ",".join(name[:40] for name in fields if name not in NAMES)[:MAX_TEXT]
    return allowed


def _value(value: object) -> object:
    """A value as it may stand in a line. What is no plain value shows as its type: its text could be anything."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else f"{'-' if value < 0 else ''}2**{value.bit_length()}"
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return str(value) if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}... ({len(value)} characters)"
    return f"<{type(value).__name__}>"


def _stamp(now_s: float) -> str:
    """UTC with milliseconds, so that events are in order to the eye."""
    whole = math.floor(now_s)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{int((now_s - whole) * 1000):03d}Z"


def _json_line(now_s: float, level: str, event: str, fields: Mapping[str, object]) -> bytes:
    document = {"ts": _stamp(now_s), "level": level, "event": event, **fields}
    text = json.dumps(document, ensure_ascii=True, separators=(",", ":"))
    return text.encode("ascii") + b"\n"


def _human_line(now_s: float, level: str, event: str, fields: Mapping[str, object]) -> bytes:
    words = [_stamp(now_s), level.ljust(7), _printable(event)]
    words += [f"{name}={_word(value)}" for name, value in fields.items()]
    return " ".join(words).encode("utf-8") + b"\n"


def _word(value: object) -> str:
    """A value as one word: in quotes where it has blanks, quotes, or nothing."""
    if not isinstance(value, str):
        return json.dumps(value)
    shown = _printable(value)
    if not shown or any(c in shown for c in ' "='):
        return '"' + shown.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return shown


def _printable(text: str) -> str:
    """Text with everything escaped that a terminal would obey or hide: controls, surrogates, marks of direction."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _causes(error: BaseException) -> list[BaseException]:
    """The errors of a group, however deep, at most ``MAX_CAUSES``; an error that is none is itself."""

    def leaves(outer: BaseException) -> Iterator[BaseException]:
        if isinstance(outer, BaseExceptionGroup):
            for inner in outer.exceptions:
                yield from leaves(inner)
        else:
            yield outer

    return [cause for _, cause in zip(range(MAX_CAUSES), leaves(error), strict=False)]


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__}>"


def _where(error: BaseException) -> str:
    """File and line that raised it; ``""`` for one that was never raised."""
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
