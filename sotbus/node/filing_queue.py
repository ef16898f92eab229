"""Filings that wait for their mailbox: each with its line, its deadline and its answer; and the queue they wait in."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import TYPE_CHECKING

from sotbus import message
from sotbus.errors import BadRequest, SotbusError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sotbus.contracts import Filing
    from sotbus.node.deadlines import Wait

QUEUED, TAKEN, ANSWERED = "queued", "taken", "answered"
"""Where a filing is: it can be taken out again; it is in a batch, so that its line may stand; it is done with."""

MAX_ID_BYTES = 200
"""Longest message ID, in bytes of UTF-8: a UUID has 36, and every ID stands in its line and a day in the store."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one mailbox's queue, past which a filing is refused as busy, and of one batch."""

    queue_filings: int = 1024
    queue_bytes: int = 32 << 20
    batch_lines: int = 256
    batch_bytes: int = 4 << 20


def check_message_id(message_id: str) -> None:
    """Refuse what cannot be a message ID. *Errors*: BadRequest."""
    if not message_id.isprintable() or not 0 < len(message_id.encode("utf-8", "replace")) <= MAX_ID_BYTES:
        raise BadRequest(
            f"the message ID {message_id[:MAX_ID_BYTES]!r} is not 1 to {MAX_ID_BYTES} bytes of printable text; "
            "nothing was filed"
        )


def line_of(filing: Filing, ts: str) -> bytes:
    """A filing's line; one with a message ID carries it in one more key (decisions, sot-comm 11).

    *Errors*: BadRequest where a part is no Unicode or the ID is none.
    """
    try:
        line = message.encode(filing.sender, "" if filing.broadcast else filing.to, filing.repo, filing.text, ts)
    except UnicodeEncodeError as error:
        raise BadRequest(f"sender, repo or text is not valid Unicode: {error.reason}; nothing was filed") from error
    if filing.message_id is None:
        return line
    check_message_id(filing.message_id)
    return line.removesuffix(b"}\n") + f',"sotbus":{{"id":{encode_basestring(filing.message_id)}}}}}\n'.encode()


def body_hash(filing: Filing) -> bytes:
    """What a repeat under the same message ID must not change: who says what, and whether to all."""
    text = f"{len(filing.sender)} {filing.sender} {filing.broadcast} {filing.text}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class WaitingFiling:
    """A filing from its call to its answer. Several callers wait for one, where they gave the same message ID.

    ``place`` is its folder and mailbox, ``deadline`` the latest one of its callers, by ``time.monotonic``. ``error`` is
    its answer once it is ``done``: None is filed. ``state`` changes under the queue's lock only, ``waits`` and ``done``
    in the trio thread.
    """

    __slots__ = (
        "asked_at", "body_hash", "deadline", "done", "error", "line", "message_id", "place", "state", "waits",
    )  # fmt: skip

    def __init__(self, filing: Filing, place: tuple[str, str], ts: str, deadline: float) -> None:
        self.line = line_of(filing, ts)
        self.message_id = filing.message_id
        self.body_hash = body_hash(filing) if filing.message_id is not None else b""
        self.place = place
        self.asked_at = time.monotonic()
        self.deadline = deadline
        self.waits: list[Wait] = []
        self.state = QUEUED
        self.error: SotbusError | None = None
        self.done = False

    def __repr__(self) -> str:
        return f"<WaitingFiling {self.message_id or 'without ID'} for @{self.place[1]}, {self.state}>"

    def finish(self) -> None:
        """It has its answer: tell its callers."""
        self.done = True
        for wait in self.waits:
            wait.over.set()

    def answer(self) -> None:
        """Return where it is filed. *Errors*: the SotbusError that it ended with, an object for each caller."""
        if self.error is not None:
            raise another(self.error)


def another(error: SotbusError) -> SotbusError:
    """An equal error, made without its class's own constructor, whose arguments nobody knows here."""
    kind = type(error)
    made = kind.__new__(kind)
    made.args = error.args
    made.__dict__.update(error.__dict__)
    return made


class FilingQueue:
    """What waits for one mailbox, in the order in which it came. Thread-safe; ``lock`` is never held for long."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.bytes = 0
        self._waiting: deque[WaitingFiling] = deque()

    def __repr__(self) -> str:
        return f"<FilingQueue of {len(self)} filings, {self.bytes} bytes>"

    def __len__(self) -> int:
        return len(self._waiting)

    def all(self) -> list[WaitingFiling]:
        """What waits now."""
        with self.lock:
            return list(self._waiting)

    def put(self, waiting: WaitingFiling) -> None:
        """Let it wait behind all others."""
        with self.lock:
            self._waiting.append(waiting)
            self.bytes += len(waiting.line)

    def put_back(self, several: Iterable[WaitingFiling]) -> None:
        """Let those that were taken wait again, before all others."""
        with self.lock:
            for waiting in reversed(list(several)):
                waiting.state = QUEUED
                self._waiting.appendleft(waiting)
                self.bytes += len(waiting.line)

    def remove(self, waiting: WaitingFiling) -> bool:
        """Take one out for good; False where it does not wait any more, so that its line may be written."""
        with self.lock:
            if waiting.state != QUEUED:
                return False
            waiting.state = ANSWERED
            self._waiting.remove(waiting)
            self.bytes -= len(waiting.line)
            return True

    def take(self, limits: Limits, now: float) -> tuple[list[WaitingFiling], list[WaitingFiling]]:
        """Take the next batch; answers it, and apart those whose deadline has passed. At least one, if any waits."""
        batch: list[WaitingFiling] = []
        late: list[WaitingFiling] = []
        size = 0
        with self.lock:
            while self._waiting and len(batch) < limits.batch_lines:
                waiting = self._waiting[0]
                if batch and size + len(waiting.line) > limits.batch_bytes:
                    break
                self._waiting.popleft()
                self.bytes -= len(waiting.line)
                waiting.state = TAKEN
                if waiting.deadline <= now:
                    late.append(waiting)
                else:
                    batch.append(waiting)
                    size += len(waiting.line)
        return batch, late
