"""What two boxes prove of files: that an append under the lock and a rename by one of them are seen by the other."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from random import uniform
from typing import Any

from sotbus.comm.folder import close_quietly, open_regular, touch_folder
from sotbus.comm.inbox import Inbox
from sotbus.comm.registry import write_synced
from sotbus.doctor.check import Verdict, fault, sound
from sotbus.doctor.pair import FIRST, SECOND, NotProved, Pair
from sotbus.doctor.peer_locks import AGAIN, FREE_S, MAIL, Marked, marker

SEEN_LINES = 5
"""How many lines each side appends for the other to see at once."""

LINES = 100
"""How many lines each side appends in a round, both at the same time."""

APPEND_S = 8.0
"""How long a round may take on a slow mount: fewer lines then."""

PAUSE_S = 0.006
"""At most this long a writer stays away after a line, so that the other has its turn."""

MIN_TURNS = 10
"""With fewer changes from one writer's lines to the other's, they did not append at the same time."""

ROUNDS = 3
"""How often both append at the same time, at most, until they have taken turns so often."""

RENAMES = 20
"""How often each side renames a file over the one that the other has read."""

TURNS = 2 * RENAMES
NAMES = 3
"""How many names each side asks for before the other makes them."""

STALE_TRIES = 3
"""A file that cannot be opened for ESTALE is tried again, as the registry is (sot-comm v1, registry.json)."""

LINE_END = f" {'.' * 90}\n".encode()
"""Makes a line as long as a short message's, so that a torn one shows."""

SEEN_LATE = "mount it on both boxes without nocto; if that does not help, with lookupcache=none (nfs(5))"


def append(pair: Pair) -> dict[str, Any]:
    """Each side appends as a sender does, and the other reads at once; then both append at the same time."""
    cuts: list[int] = []
    lock = Marked(pair.lock_manager, marker(pair))
    inbox = Inbox(pair.folder, MAIL, lock, cuts.append)
    late = 0
    expected = b""
    for number in range(SEEN_LINES):
        for writer in (FIRST, SECOND):
            expected += _line(writer, number)
            if pair.role == writer:
                inbox.append(_line(writer, number), FREE_S)
                pair.say("has appended a line")
                pair.hear("has read it")
            else:
                pair.hear("has appended a line")
                late += _lines(pair, inbox) != expected
                pair.say("has read it")
    written = 0
    for _ in range(ROUNDS):
        written += _append_many(pair, inbox, SEEN_LINES + written)
        pair.say("has appended its lines", written=written)
        other = pair.hear("has appended its lines", APPEND_S + FREE_S)
        lines = _lines(pair, inbox)[len(expected) :]
        numbers = (written, other["written"]) if pair.role == FIRST else (other["written"], written)
        found = {**counted_lines(lines, numbers), "overlaps": lock.overlaps, "cut": len(cuts)}
        pair.say("has counted the lines", **found)
        theirs = pair.hear("has counted the lines")
        if _is_wrong(found) or _is_wrong(theirs) or min(found["turns"], theirs["turns"]) >= MIN_TURNS:
            break
    return {"late": late, "written": written, **found}


def _append_many(pair: Pair, inbox: Inbox, number: int) -> int:
    """Append lines, numbered from ``number`` on; answers how many."""
    pair.meet()
    until = time.monotonic() + APPEND_S
    written = 0
    while written < LINES and time.monotonic() < until:
        inbox.append(_line(pair.role, number + written), FREE_S)
        written += 1
        pair.pause(uniform(0, PAUSE_S))
    return written


def _lines(pair: Pair, inbox: Inbox) -> bytes:
    """The file as a reader has it: the folder opened, the shared lock, the file opened anew. *Errors*: OSError."""
    with inbox.locked_for_reading(FREE_S):
        return _read(pair, inbox.path)


def _line(writer: int, number: int) -> bytes:
    return f"{writer} {number}".encode() + LINE_END


def counted_lines(text: bytes, written: Sequence[int]) -> dict[str, int]:
    """Compare what both appended at the same time with what is there.

    :param written: how many lines each side appended, the first of them numbered ``SEEN_LINES``.

    Answers ``lost`` lines, ``strange`` ones (torn, doubled, or nobody's), ``nuls`` and ``turns``, how often a line of
    one side is followed by one of the other.
    """
    expected = {_line(writer, SEEN_LINES + number) for writer in (FIRST, SECOND) for number in range(written[writer])}
    found = text.splitlines(keepends=True)
    whole = [line for line in found if line in expected]
    return {
        "lost": len(expected - set(whole)),
        "strange": len(found) - len(set(whole)),
        "nuls": text.count(b"\0"),
        "turns": sum(one[:1] != next_one[:1] for one, next_one in pairwise(whole)),
    }


def _is_wrong(found: dict[str, Any]) -> bool:
    return any(found[count] for count in ("lost", "strange", "nuls", "overlaps", "cut"))


def judge_append(results: Sequence[dict[str, Any]], labels: Sequence[str], remedy: str) -> Verdict:
    """*Errors*: :class:`NotProved` where the two did not append at the same time."""
    late = [f"{label} {result['late']}" for label, result in zip(labels, results, strict=True) if result["late"]]
    written = sum(result["written"] for result in results)
    counts = {count: max(result[count] for result in results) for count in ("lost", "strange", "nuls")}
    overlaps, cut = (sum(result[count] for result in results) for count in ("overlaps", "cut"))
    wrong = [
        text
        for number, text in (
            (counts["lost"], f"{counts['lost']} were lost"),
            (counts["strange"], f"{counts['strange']} were torn or doubled"),
            (counts["nuls"], f"{counts['nuls']} NUL bytes stand between them"),
            (cut, f"{cut} were found half written"),
            (overlaps, f"{overlaps} were appended while the other box appended"),
        )
        if number
    ]
    if wrong:
        return fault(f"of {written} lines that both appended under the lock, {', '.join(wrong)}", remedy)
    if late:
        return fault(
            f"a line that one box had appended was not there for the other at once: of {SEEN_LINES}, {', '.join(late)}",
            SEEN_LATE,
        )
    turns = min(result["turns"] for result in results)
    if turns < MIN_TURNS:
        raise NotProved(
            f"nothing is proved: the boxes hardly appended at the same time ({written} lines, {turns} turns)", AGAIN
        )
    return sound(
        f"each saw the other's line at once; of {written} lines by both in {turns} turns each is there once, whole"
    )


def rename(pair: Pair) -> dict[str, Any]:
    """In turn each side renames a file over the one that both have read; then makes names the other has asked for.

    Whoever is to rename keeps the old file open, and in every other turn both do: only where the old file lives on can
    a stale look-up go unnoticed. Where it does not, it is ESTALE, which the system or one more try puts right.
    """
    path = f"{pair.folder.inboxes}/text"
    late = 0
    kept = -1
    try:
        for turn in range(TURNS):
            text = f"text {turn}\n".encode()
            renames = pair.role == turn % 2
            if renames:
                _replace(path, text)
            else:
                pair.hear("has renamed a file over the old one")
            before, kept = kept, _found(pair, path)
            close_quietly(before)
            late += kept < 0 or _read_whole(kept) != text
            if renames:
                if turn % 4 > 1:
                    close_quietly(kept)
                    kept = -1
                pair.say("has renamed a file over the old one")
    finally:
        close_quietly(kept)
    return {"late": late, "missing": _made_after_asked(pair)}


def _made_after_asked(pair: Pair) -> int:
    """How many names were missing, or not as they were made, just after the other side made them."""
    missing = 0
    for number in range(NAMES):
        for maker in (FIRST, SECOND):
            path, text = f"{pair.folder.inboxes}/name-{maker}-{number}", f"name {number}\n".encode()
            if pair.role == maker:
                pair.hear("has asked for a name")
                temp = path + ".tmp"
                write_synced(temp, text)
                os.link(temp, path)
                pair.say("has made it")
            else:
                os.path.lexists(path)
                pair.say("has asked for a name")
                pair.hear("has made it")
                fd = _found(pair, path)
                missing += fd < 0 or _read_whole(fd) != text
                close_quietly(fd)
    return missing


def judge_rename(results: Sequence[dict[str, Any]], labels: Sequence[str], remedy: str) -> Verdict:
    del remedy  # the lock has no part in it
    wrong = []
    for label, result in zip(labels, results, strict=True):
        if result["late"]:
            wrong.append(f"{label} read an old text, or none, after {result['late']} of {TURNS} renames")
        if result["missing"]:
            wrong.append(f"{label} did not find {result['missing']} of {NAMES} names that it had asked for before")
    if wrong:
        return fault(f"what one box renames is not there for the other at once: {', '.join(wrong)}", SEEN_LATE)
    return sound(
        f"each saw {RENAMES} files that the other had renamed over those it had read, and {NAMES} names that it had "
        "asked for before, at once"
    )


def _replace(path: str, text: bytes) -> None:
    """*Durability*: synced before it is renamed into place. *Errors*: OSError."""
    temp = path + ".tmp"
    write_synced(temp, text)
    os.rename(temp, path)


def _read(pair: Pair, path: str) -> bytes:
    """The file at a path, fresh. *Errors*: OSError."""
    fd = _open(pair, path)
    try:
        return _read_whole(fd)
    finally:
        os.close(fd)


def _found(pair: Pair, path: str) -> int:
    """A descriptor of the file at a path, -1 where a name that is there leads nowhere. *Errors*: any other OSError."""
    try:
        return _open(pair, path)
    except OSError as error:
        if error.errno not in (errno.ESTALE, errno.ENOENT):
            raise
        return -1


def _open(pair: Pair, path: str) -> int:
    """Open the file at a path after the folder, as every reader does. *Errors*: OSError."""
    for _ in range(STALE_TRIES - 1):
        touch_folder(pair.folder.inboxes)
        try:
            return open_regular(path)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    touch_folder(pair.folder.inboxes)
    return open_regular(path)


def _read_whole(fd: int) -> bytes:
    parts = []
    while part := os.read(fd, 1 << 20):
        parts.append(part)
    return b"".join(parts)
