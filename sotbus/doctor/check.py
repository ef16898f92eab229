"""What one check found: a stable name, a status, a sentence, and for a fault the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OK = "ok"
FAULT = "fault"
SKIPPED = "skipped"

LISTED = 5
"""How many offenders a text names before it says how many more there are."""


@dataclass(frozen=True)
class Verdict:
    """What a check says, before its name is put to it; ``remedy`` is one sentence, ``""`` where nothing is wrong."""

    status: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """One line of the doctor's answer. ``name`` is stable and for programs, ``status`` is ok, fault or skipped."""

    name: str
    status: str
    text: str
    remedy: str = ""

    @classmethod
    def of(cls, name: str, verdict: Verdict) -> Check:
        return cls(name, verdict.status, verdict.text, verdict.remedy)


class NotJudged(Exception):
    """There is nothing to judge here, or another check's fault is in the way; the text says which."""


def sound(text: str) -> Verdict:
    return Verdict(OK, text)


def fault(text: str, remedy: str) -> Verdict:
    return Verdict(FAULT, text, remedy)


def some(items: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = len(items) - LISTED
    return ", ".join(items[:LISTED]) + (f" and {more} more" if more > 0 else "")


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 inbox``, ``2 inboxes``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def size(number: float) -> str:
    """A number of bytes for a person."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "bytes" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
