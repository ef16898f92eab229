"""The node's store: one SQLite database on a disk of this box, opened by the node alone (decisions, State).

It keeps the message IDs of filings: of each, what is about to be written where (the intent), and what came of it. So a
request that is repeated is filed once (decisions, Filing once). And it keeps the rows, with the handles they declared.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sotbus.errors import SotbusError
from sotbus.node.rows import Row
from sotbus.node.schema import MIGRATIONS, open_database, sqlite_errors, transaction
from sotbus.node.store_file import StoreError, lock_store, make_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

FILE = "node.db"
"""The database's name in the state folder."""

OPEN, FILED, NOT_FILED = 0, 1, 2
"""What is known of a message ID's filing. ``OPEN``: its line may stand or not, and its inbox must be looked at."""

KEPT_S = 86_400.0
"""Message IDs are kept for 24 h (decisions, Filing once)."""

EXPIRED_AT_ONCE = 2000
"""Rows that one transaction removes, so that a filing never waits long for it."""

ASKED_AT_ONCE = 500
"""IDs in one query; SQLite before 3.32 takes at most 999 parameters."""

_COLUMNS = "message_id, folder, mailbox, body_hash, offset, size, line_hash, state"
_ROW_COLUMNS = "workspace_id, pid, start, pidns, boot, handle"


class Conflict(SotbusError):
    """A message ID came again with another text or for another mailbox; nothing was filed."""

    code = "conflict"


@dataclass(frozen=True)
class Intent:
    """A line that is about to be written, or was: its message ID, the folder and the mailbox (a handle) it goes to.

    ``body_hash`` is of what a repeat must not change; ``offset`` and ``size`` (bytes, the newline included) and
    ``line_hash`` (SHA-256) are the line's in the inbox.
    """

    message_id: str
    folder: str
    mailbox: str
    body_hash: bytes
    offset: int
    size: int
    line_hash: bytes
    state: int = OPEN


@dataclass(frozen=True)
class StoreStatistics:
    """Commits since the start, intents in them, and results that wait for the next one."""

    commits: int
    intents: int
    unwritten_results: int


@dataclass
class _Ticket:
    """Intents that wait for a commit, and how it went."""

    intents: Sequence[Intent]
    done: bool = False
    error: StoreError | None = None


@dataclass
class _Group:
    """What the next commit takes."""

    tickets: list[_Ticket] = field(default_factory=list)
    results: dict[str, int] = field(default_factory=dict)


class Store:
    """The open store. Thread-safe; its methods may block on the state folder's disk, unless they say otherwise.

    :param path: the database; its folder is made, 0700, where it is not there.
    :param clock: seconds since the epoch.
    :param migrations: the schema's versions.

    ``flights`` is for the writers of this node's mailboxes: the filings with a message ID that are under way, by it.
    Only the trio thread touches it.

    *Durability*: an intent is synced when :meth:`intend` returns. A result is written with the next intent, or by
    :meth:`flush` or :meth:`close`: one that a crash takes leaves its intent open, which the next start settles by
    looking at the inbox, so a result need not be on disk before its answer is given.
    *Errors*: of the constructor: :class:`StoreHeld` naming the process that has the store open; :class:`StoreError`,
    also for a schema that is newer than this program, another program's file, a damaged file, and a folder that is open
    to other users. Nothing is ever repaired or moved aside.
    """

    def __init__(
        self,
        path: str,
        *,
        clock: Callable[[], float] = time.time,
        migrations: Sequence[Sequence[str]] = MIGRATIONS,
    ) -> None:
        self.path = os.path.abspath(path)
        self.clock = clock
        self.flights: dict[str, Any] = {}
        self._mutex = threading.Lock()  # of the fields; never held while the disk is waited for
        self._turn = threading.Lock()  # of the connection that writes
        self._reading = threading.Lock()  # of the one that reads, which need not wait for a commit's sync
        self._next = _Group()
        self._under_way: dict[str, int] = {}
        self._commits = self._intents = 0
        make_folder(os.path.dirname(self.path))
        self._lock_fd = lock_store(self.path)
        try:
            self._writer, self._reader = open_database(self.path, migrations)
        except BaseException:
            os.close(self._lock_fd)
            raise

    def __repr__(self) -> str:
        return f"<Store {self.path}, {self._commits} commits>"

    def statistics(self) -> StoreStatistics:
        """Counts for the person who looks at the node. No I/O."""
        with self._mutex:
            return StoreStatistics(self._commits, self._intents, len(self._next.results))

    # ---- message IDs

    def answer_of(self, message_id: str) -> Intent | None:
        """What is known of a message ID, None where it is new. *Errors*: StoreError."""
        return self.known([message_id]).get(message_id)

    def known(self, message_ids: Iterable[str]) -> dict[str, Intent]:
        """What is known of these message IDs; new ones are left out. *Errors*: StoreError."""
        asked = list(message_ids)
        found: dict[str, Intent] = {}
        for at in range(0, len(asked), ASKED_AT_ONCE):
            some = asked[at : at + ASKED_AT_ONCE]
            marks = ",".join("?" * len(some))
            for intent in self._query(f"message_id IN ({marks})", some):
                found[intent.message_id] = intent
        return found

    def open_intents(self, folder: str | None = None, mailbox: str | None = None) -> list[Intent]:
        """The intents whose outcome is not known: of all folders, of one, or of one mailbox. *Errors*: StoreError."""
        where = "state = 0 AND folder = ifnull(?, folder) AND mailbox = ifnull(?, mailbox) ORDER BY rowid"
        return [intent for intent in self._query(where, [folder, mailbox]) if intent.state == OPEN]

    def intend(self, intents: Sequence[Intent]) -> None:
        """Commit what is about to be written, in one transaction; threads that come meanwhile share the next one.

        An ID that is known already is intended anew: only one that is not filed may be.

        *Durability*: synced when this returns.
        *Errors*: StoreError: nothing may be written under these IDs.
        """
        ticket = _Ticket(intents)
        with self._mutex:
            self._next.tickets.append(ticket)
        with self._turn:
            if not ticket.done:
                self._commit()
        if ticket.error is not None:
            raise ticket.error

    def settle(self, results: Mapping[str, bool]) -> None:
        """Note whether each of these intents was filed. No I/O; see *Durability* above."""
        states = {message_id: FILED if filed else NOT_FILED for message_id, filed in results.items()}
        with self._mutex:
            self._next.results.update(states)

    def flush(self) -> None:
        """Write the results that wait, if any do. *Errors*: StoreError; they go on waiting."""
        with self._turn:
            error = self._commit() if self._next.results else None
        if error is not None:
            raise error

    def expire(self) -> int:
        """Forget the message IDs that are older than 24 h; answers how many. *Errors*: StoreError."""
        before = self.clock() - KEPT_S
        removed = 0
        while True:
            with self._turn, sqlite_errors(self.path):
                count = self._writer.execute(
                    "DELETE FROM filings WHERE rowid IN (SELECT rowid FROM filings WHERE at < ? ORDER BY at LIMIT ?)",
                    (before, EXPIRED_AT_ONCE),
                ).rowcount
            removed += count
            if count < EXPIRED_AT_ONCE:
                return removed

    # ---- rows

    def rows(self) -> tuple[Row, ...]:
        """The rows as they were kept last, in that order. *Errors*: StoreError."""
        with self._reading, sqlite_errors(self.path):
            found = self._reader.execute(f"SELECT {_ROW_COLUMNS} FROM rows ORDER BY rowid").fetchall()
        return tuple(Row(*columns) for columns in found)

    def keep_rows(self, rows: Iterable[Row]) -> None:
        """Keep these rows and no others, in one transaction.

        *Durability*: synced when this returns.
        *Errors*: StoreError: what was kept before is kept.
        """
        with self._turn, sqlite_errors(self.path), transaction(self._writer):
            self._writer.execute("DELETE FROM rows")
            self._writer.executemany(
                f"INSERT INTO rows ({_ROW_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",
                [(row.workspace_id, row.pid, row.start, row.pidns, row.boot, row.handle) for row in rows],
            )

    def close(self) -> None:
        """Write what waits, and let the next process open the store. Closing again does nothing.

        *Errors*: StoreError where the last results could not be written; the store is closed all the same.
        """
        with self._turn, self._reading:
            if self._lock_fd < 0:
                return
            try:
                error = self._commit() if self._next.results else None
                with sqlite_errors(self.path):
                    self._reader.close()
                    self._writer.close()
            finally:
                fd, self._lock_fd = self._lock_fd, -1
                os.close(fd)
        if error is not None:
            raise error

    # ---- inside

    def _query(self, where: str, values: Sequence[object]) -> list[Intent]:
        """Rows, with the results that are not written yet: told apart before, since they may be written meanwhile."""
        with self._mutex:
            results = {**self._under_way, **self._next.results}
        with self._reading, sqlite_errors(self.path):
            rows = self._reader.execute(f"SELECT {_COLUMNS} FROM filings WHERE {where}", values).fetchall()
        return [Intent(*(*row[:-1], results.get(row[0], row[-1]))) for row in rows]

    def _commit(self) -> StoreError | None:
        """One transaction for all that waits; its error is its tickets' too. Under the turn."""
        with self._mutex:
            group, self._next = self._next, _Group()
            self._under_way = group.results
        intents = [intent for ticket in group.tickets for intent in ticket.intents]
        error: StoreError | None = StoreError(f"a commit to the node's store {self.path} was broken off")
        try:
            with sqlite_errors(self.path), transaction(self._writer):
                self._write(group.results, intents)
            error = None
        except StoreError as caught:
            error = caught
        finally:
            with self._mutex:
                self._under_way = {}
                if error is not None:
                    self._next.results = {**group.results, **self._next.results}
                else:
                    self._commits += 1
                    self._intents += len(intents)
            for ticket in group.tickets:
                ticket.done, ticket.error = True, error
        return error

    def _write(self, results: Mapping[str, int], intents: Sequence[Intent]) -> None:
        """Results first: an ID that is intended anew is open again."""
        now = self.clock()
        self._writer.executemany(
            "UPDATE filings SET state = ? WHERE message_id = ?", [(state, key) for key, state in results.items()]
        )
        self._writer.executemany(
            f"INSERT OR REPLACE INTO filings ({_COLUMNS}, at) VALUES (?, ?, ?, ?, ?, ?, ?, {OPEN}, ?)",
            [
                (one.message_id, one.folder, one.mailbox, one.body_hash, one.offset, one.size, one.line_hash, now)
                for one in intents
            ],
        )
