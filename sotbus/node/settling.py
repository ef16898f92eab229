"""What became of filings whose end nobody saw: their inbox is looked at, and says (decisions, Filing once).

An intent is open where the process died between its commit and its result, and where a filing failed in such a way that
its line may stand. Its line is looked for where it was to be written first, then by its message ID over the whole file,
since a prune moves lines to lower offsets.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sotbus import message
from sotbus.comm.batch import write_where_told
from sotbus.comm.inbox import SCAN_BLOCK_BYTES, Inbox
from sotbus.errors import SotbusError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sotbus.comm.folder import Folder
    from sotbus.comm.lock_manager import LockManager
    from sotbus.node.store import Intent, Store

ID_KEY = b'"sotbus"'
"""The key of a line that has its message ID (decisions, sot-comm 11)."""


@dataclass(frozen=True)
class Settled:
    """How many open intents turned out to be filed, how many not; ``left`` are those that could not be settled.

    ``left`` has a reason for each mailbox.
    """

    filed: int
    not_filed: int
    left: dict[str, SotbusError]


def message_id_of(line: bytes) -> str | None:
    """The message ID that a stored line carries: ``{..., "sotbus": {"id": ...}}``."""
    if ID_KEY not in line:
        return None
    value = message.parse(line)
    more = value.get("sotbus") if value is not None else None
    found = more.get("id") if isinstance(more, dict) else None
    return found if isinstance(found, str) else None


def line_hash(line: bytes) -> bytes:
    """What an intent keeps of its line (with its newline)."""
    return hashlib.sha256(line).digest()


class Search:
    """Looks for the lines of open intents in their inbox, under the append's lock: ``inbox.append(search, bound_s)``.

    ``found`` has the message IDs whose line stands.

    *Durability*: a line that was found is on disk when the append returns. It is written once more where it stands,
    byte for byte, and then synced: after a sync that failed, Linux takes what was not written for clean, and the next
    sync would say nothing of it (fsync(2), ERRORS).
    *Errors*: as of an append; the intents stay open.
    """

    def __init__(self, intents: Sequence[Intent]) -> None:
        self._intents = intents
        self.found: set[str] = set()

    def __repr__(self) -> str:
        return f"<Search for {len(self._intents)} lines, {len(self.found)} found>"

    def under_lock(self, inbox: Inbox, fd: int, length: int, leased: bool) -> None:
        """Look, and sync what is there; called by the append."""
        del inbox, leased
        lines: dict[str, tuple[int, bytes]] = {}
        for intent in self._intents:
            line = os.pread(fd, intent.size, intent.offset) if intent.offset + intent.size <= length else b""
            if len(line) == intent.size and line_hash(line) == intent.line_hash:
                lines[intent.message_id] = intent.offset, line
        missing = {intent.message_id for intent in self._intents} - lines.keys()
        if missing:
            for offset, line in lines_of(fd):
                found = message_id_of(line)
                if found in missing:
                    lines[found] = offset, line
        if lines:
            write_where_told(fd)
            for offset, line in lines.values():
                while line:
                    done = os.pwrite(fd, line, offset)
                    offset, line = offset + done, line[done:]
            os.fdatasync(fd)
        self.found = set(lines)


def lines_of(fd: int) -> Iterator[tuple[int, bytes]]:
    """Each whole line of a file, with its newline, and where it begins; a block at a time."""
    offset, rest = 0, b""
    while block := os.pread(fd, SCAN_BLOCK_BYTES, offset + len(rest)):
        pieces = (rest + block).split(b"\n")
        rest = pieces.pop()
        for piece in pieces:
            yield offset, piece + b"\n"
            offset += len(piece) + 1


def settle(store: Store, inbox: Inbox, intents: Sequence[Intent], bound_s: float) -> set[str]:
    """Settle open intents of one inbox, and note it in the store; answers the message IDs whose line is on disk.

    :param bound_s: seconds to wait for the inbox lock.

    *Errors*: :class:`FilingFailed`: they stay open.
    """
    search = Search(intents)
    inbox.append(search, bound_s)
    store.settle({intent.message_id: intent.message_id in search.found for intent in intents})
    return search.found


def settle_open(
    store: Store, folder: Folder, manager: Callable[[], LockManager], bound_s: float, known_as: str | None = None
) -> Settled:
    """Settle every open intent of a comm folder: at a node's start, before it answers anybody.

    :param manager: answers the lock manager to append under, as :meth:`WriterGate.manager`.
    :param bound_s: seconds to wait for each inbox's lock.
    :param known_as: the folder's path in the store, where that is not its own.

    A mailbox whose inbox cannot be looked at now is left. Its intents stay open, and each is settled when its message
    ID comes again: until then that is answered FAILED, outcome unknown.

    *Durability*: the results are synced.
    *Errors*: StoreError.
    """
    mailboxes: dict[str, list[Intent]] = {}
    for intent in store.open_intents(known_as or folder.root):
        mailboxes.setdefault(intent.mailbox, []).append(intent)
    filed = not_filed = 0
    left: dict[str, SotbusError] = {}
    for mailbox, intents in mailboxes.items():
        try:
            found = settle(store, Inbox(folder, mailbox, manager()), intents, bound_s)
        except SotbusError as error:
            left[mailbox] = error
            continue
        filed += len(found)
        not_filed += len(intents) - len(found)
    store.flush()
    return Settled(filed, not_filed, left)
