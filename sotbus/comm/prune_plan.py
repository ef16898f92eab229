"""What a prune takes out of an inbox: each shown line but the last, if it is old enough (decisions, sot-comm 12)."""

from __future__ import annotations

import os

from sotbus import message
from sotbus.comm.history import FORWARD_BLOCK_BYTES, read_block
from sotbus.comm.liveness import age_s
from sotbus.errors import FolderError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from sotbus.comm.client import Client
    from sotbus.comm.history import History

    Progress = Callable[[str, int, int], object]
    """Told a handle, and how many of how many bytes of its inbox are done."""

KEPT_S = 86_400
"""Lines filed in the last 24 h stay: a node settles its open filings by them (decisions, Filing once)."""


class Plan:
    """What a prune of one inbox does. Sizes are in bytes.

    ``lines`` counts all lines and ``shown`` those that a poll has shown; ``pruned`` of these go, ``recent`` stay for
    their age and ``undated`` because their time cannot be told. ``freed`` is what ``size`` becomes smaller by.
    ``skipped`` says why this inbox is left alone, or is ``""``; ``done`` that the inbox was replaced.
    """

    __slots__ = (
        "done", "freed", "handle", "last_start", "lines", "pieces", "pruned", "recent", "shown", "size", "skipped",
        "undated",
    )  # fmt: skip

    def __init__(self, handle: str) -> None:
        self.handle = handle
        self.lines = self.shown = self.pruned = self.recent = self.undated = 0
        self.size = self.freed = 0
        self.skipped = ""
        self.done = False
        self.last_start = 0
        self.pieces: list[tuple[int, int, int]] = []
        """The new inbox: so many newlines, then these bytes of the old one, again and again."""

    def __repr__(self) -> str:
        return f"<Plan @{self.handle}: {self.pruned} of {self.lines} lines, {self.freed} of {self.size} bytes>"


def plan_of(client: Client, history: History, progress: Progress | None) -> Plan:
    """Judge each shown line of an open inbox. *Errors*: FolderError."""
    plan = Plan(history.handle)
    oldest = message.stamp(client.clock() - KEPT_S)
    blanks = position = told = 0
    pieces = plan.pieces
    try:
        plan.size = os.fstat(history.fd).st_size
        plan.lines = _newlines(history.fd, 0, history.end)
        if os.path.islink(client.folder.inbox(history.handle)):
            plan.skipped = "the inbox is a symbolic link, which a rename would replace"
        elif history.cursor.stamp:
            plan.skipped = (
                "its cursor is a time, by which other readers count no blank lines; one poll makes it a count"
            )
        if plan.skipped:
            return plan
        for line in history.forwards(0, history.new_from):
            end = position + len(line) + 1
            plan.shown += 1
            if end == history.new_from:
                plan.last_start = position
            if not line or (end != history.new_from and _goes(plan, line, oldest)):
                blanks += 1
                plan.freed += len(line)
            elif pieces and not blanks:
                pieces[-1] = (pieces[-1][0], pieces[-1][1], end)
            else:
                pieces.append((blanks, position, end))
                blanks = 0
            position = end
            if progress is not None and position - told >= FORWARD_BLOCK_BYTES:
                told = position
                progress(history.handle, position, history.end)
        pieces.append((blanks, history.new_from, history.end))
    except OSError as error:
        raise FolderError(
            f"FAILED: the inbox of @{history.handle} cannot be read ({error.strerror or error}); nothing was pruned"
        ) from error
    return plan


def _goes(plan: Plan, line: bytes, oldest: str) -> bool:
    """Whether a shown line is old enough; one whose time cannot be told stays."""
    value = message.parse(line)
    ts = value.get("ts") if value is not None else None
    if not isinstance(ts, str) or age_s(ts) is None:
        plan.undated += 1
    elif ts >= oldest:
        plan.recent += 1
    else:
        plan.pruned += 1
        return True
    return False


def _newlines(fd: int, start: int, end: int) -> int:
    count = 0
    while start < end:
        block = read_block(fd, min(FORWARD_BLOCK_BYTES, end - start), start)
        count += block.count(b"\n")
        start += len(block)
    return count
