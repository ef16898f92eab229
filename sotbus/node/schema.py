"""The store's SQLite database: its schema by versions, and how it is opened, checked and brought up to date.

In WAL mode a commit costs one sync; docs/adr/0009-sqlite-store.md has the figures of the other modes.
"""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sotbus.node.store_file import StoreError, make_private

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

APPLICATION_ID = 0x534F5442
"""``SOTB`` in the file's header (SQLite, PRAGMA application_id): another program's database is not taken for ours."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE filings ("
        " message_id TEXT NOT NULL UNIQUE, folder TEXT NOT NULL, mailbox TEXT NOT NULL, body_hash BLOB NOT NULL,"
        " offset INTEGER NOT NULL, size INTEGER NOT NULL, line_hash BLOB NOT NULL,"
        " state INTEGER NOT NULL, at REAL NOT NULL)",
        "CREATE INDEX filings_at ON filings (at)",
        "CREATE INDEX filings_open ON filings (folder, mailbox) WHERE state = 0",
    ),
    (
        "CREATE TABLE rows ("
        " workspace_id TEXT NOT NULL UNIQUE, pid INTEGER NOT NULL, start INTEGER NOT NULL,"
        " pidns TEXT NOT NULL, boot TEXT NOT NULL, handle TEXT NOT NULL)",
    ),
)
"""What makes each version of the schema from the one before; the first makes version 1. Only ever added to."""


def open_database(path: str, migrations: Sequence[Sequence[str]]) -> tuple[sqlite3.Connection, sqlite3.Connection]:
    """A connection that writes and one that reads, the schema brought up to date; a new file is made 0600.

    *Durability*: each commit is synced (``synchronous=FULL``).
    *Errors*: StoreError for a schema newer than ``migrations``, another program's file, a damaged one, and whatever the
    system refuses; nothing was changed.
    """
    try:
        made = make_private(path)
    except OSError as error:
        raise StoreError(f"the node's store {path} cannot be opened: {error.strerror or error}") from error
    with sqlite_errors(path):
        writer = _connect(path)
        try:
            check(writer, path, len(migrations), whole=not made)
            writer.execute("PRAGMA journal_mode = WAL")
            writer.execute("PRAGMA synchronous = FULL")
            _migrate(writer, migrations)
            reader = _connect(path)
            reader.execute("PRAGMA query_only = ON")
        except BaseException:
            writer.close()
            raise
    return writer, reader


def _connect(path: str) -> sqlite3.Connection:
    """A connection in autocommit mode, for one thread at a time. The store's own lock keeps other processes out."""
    return sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)


def _pragma(database: sqlite3.Connection, name: str) -> int:
    return int(database.execute(f"PRAGMA {name}").fetchone()[0])


def check(database: sqlite3.Connection, path: str, newest: int, *, whole: bool) -> None:
    """Refuse a file that is another program's, of a newer version, or damaged. *Errors*: StoreError, sqlite3.Error."""
    version = _pragma(database, "user_version")
    empty = version == 0 and not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not empty and _pragma(database, "application_id") != APPLICATION_ID:
        raise StoreError(
            f"{path} is another program's database; name another folder with node.state in the config, or move it away"
        )
    if version > newest:
        raise StoreError(
            f"the node's store {path} is of version {version}, and this sotbus knows versions up to {newest}; run the "
            "newer sotbus that wrote it, or move it aside by hand: what it remembers is lost then"
        )
    found = database.execute("PRAGMA quick_check(1)").fetchone()[0] if whole else "ok"
    if found != "ok":
        raise sqlite3.DatabaseError(" ".join(found.split()))


def _migrate(database: sqlite3.Connection, migrations: Sequence[Sequence[str]]) -> None:
    """From the file's version to the newest, in one transaction. *Errors*: sqlite3.Error; nothing has changed."""
    version = _pragma(database, "user_version")
    if version == len(migrations):
        return
    with transaction(database):
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        for statements in migrations[version:]:
            for statement in statements:
                database.execute(statement)
        database.execute(f"PRAGMA user_version = {len(migrations)}")


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """BEGIN IMMEDIATE, then COMMIT, or ROLLBACK where anything is raised."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    finally:
        if database.in_transaction:
            database.execute("ROLLBACK")


@contextmanager
def sqlite_errors(path: str) -> Iterator[None]:
    """SQLite's errors as StoreErrors that name the store."""
    try:
        yield
    except (sqlite3.OperationalError, sqlite3.ProgrammingError) as error:
        raise StoreError(f"the node's store {path} cannot be used: {error}") from error
    except sqlite3.Error as error:
        raise StoreError(
            f"the node's store {path} is damaged ({error}); stop the node, move it and {path}-wal aside by hand, and "
            "start the node again: the message IDs of the last 24 h are forgotten then, so that a message that is "
            "repeated with its ID may be filed twice"
        ) from error
