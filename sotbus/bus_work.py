"""What a bus does in its worker threads: the sender, the reader, the follower. All of it synchronous.

Each has a client of its own, which no other thread uses meanwhile.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any

from sotbus import message
from sotbus.bus_values import Message, Receipt, message_of
from sotbus.comm import cursor, reading
from sotbus.comm.cursor import Cursor
from sotbus.comm.folder import refresh_folder
from sotbus.comm.inbox import Inbox, Look, look
from sotbus.comm.manager_record import reads_under_lock
from sotbus.comm.offset_hint import Hint
from sotbus.comm.registry_file import RegistryFile
from sotbus.comm.sending import Outbox, touch
from sotbus.errors import FilingFailed, NotJoined, RegistryUnreadable, SotbusError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sotbus.comm.client import Client


class Sender:
    """Files lines for one handle, through one outbox for as long as the registry is the one it was verified against."""

    def __init__(self, client: Client, handle: str) -> None:
        self.client = client
        self.handle = handle
        self._registry = RegistryFile(client)
        self._outbox: Outbox | None = None
        self._clock = client.clock

    def send(self, to: str, text: str, *, broadcast: bool = False) -> Receipt:
        """File one line; see :meth:`Outbox.send`. *Errors*: also :class:`NotJoined`."""
        outbox = self._verified()
        now = self._clock()
        self.client.clock = lambda: now  # the stamp in the line is the receipt's
        try:
            outbox.send(to, text, broadcast=broadcast)
        except OSError as error:  # of what comes before the append, whose own errors are told already
            raise FilingFailed(f"the append failed: {error.strerror or error}") from error
        return Receipt(to, message.stamp(now))

    def others(self, text: str) -> list[str]:
        """Every other handle, for a broadcast of a text that can be sent. *Errors*: as :meth:`send`'s."""
        message.check_text(text, self.client.settings.max_text_bytes)
        return [to for to in self._verified().agents if to != self.handle]

    def _verified(self) -> Outbox:
        """The outbox, its sender verified. *Errors*: :class:`NotJoined`."""
        if self._registry.changed() or self._outbox is None:
            self._outbox = None
            outbox = Outbox(self.client)
            check_same(outbox.sender.handle, self.handle)
            self._outbox = outbox
        return self._outbox


def check_same(now: str, handle: str) -> None:
    """Refuse to go on where the session has another handle by now. *Errors*: :class:`NotJoined`."""
    if now != handle:
        raise NotJoined(f"this session is @{now} now, and no longer @{handle}", hint="open the bus again")


class Keeper:
    """Stamps the handle's ``last_seen`` while the handle is still this session's."""

    def __init__(self, client: Client, handle: str) -> None:
        self.client = client
        self.handle = handle

    def touch(self) -> None:
        """Best effort, silent, bounded by ``touch_wait_s``."""
        try:
            agents = self.client.registry.agents()
            if self.client.identity(agents).handle == self.handle:
                touch(self.client, self.handle, agents)
        except (SotbusError, OSError):
            return


class Part:
    """A message that is to be shown, and the look that moves the cursor past it once it was."""

    def __init__(self, message: Message, seen: Look) -> None:
        self.message = message
        self.seen = seen


class Reader:
    """Reads one handle's inbox by its cursor: whole looks for a poll, message by message for an iterator.

    ``queue`` holds what was read and not handed out; ``shown`` is what was handed out, until the cursor is past it.
    """

    def __init__(self, client: Client, handle: str) -> None:
        self.client = client
        self.handle = handle
        self.queue: deque[Part] = deque()
        self.shown: Part | None = None
        self._registry = RegistryFile(client)

    def look(self) -> tuple[Look, list[Message]]:
        """What is new. *Errors*: NotJoined, InboxBusy, SotbusError; the cursor stands."""
        self._verify()
        seen = reading.look_at(self.client, self.handle, self.client.notify)
        return seen, [shown for line in seen.lines if (shown := message_of(line, self.handle)) is not None]

    def advance(self, seen: Look) -> None:
        """Move the cursor past a look. *Errors*: SotbusError: it will show again."""
        reading.advance(self.client, self.handle, seen)

    def step(self) -> None:
        """Move the cursor past what was shown, and see to it that the queue holds what is new, if anything is.

        *Errors*: as :meth:`look` and :meth:`advance`; the next step begins where this one failed.
        """
        if self.shown is not None:
            self.advance(self.shown.seen)
            self.shown = None
        if not self.queue:
            self._verify()
            seen = reading.look_at(self.client, self.handle, self.client.notify)
            found = list(parts(seen, self.handle))
            if not found:
                self.advance(seen)  # lines that nobody is ever shown
            self.queue.extend(found)

    def _verify(self) -> None:
        """That the handle is still this session's, asked again when the registry has changed. *Errors*: NotJoined."""
        if not self._registry.changed():
            return
        try:
            agents: dict[str, Any] = self.client.registry.agents()
        except RegistryUnreadable:
            agents = {}
        try:
            check_same(self.client.identity(agents).handle, self.handle)
        except SotbusError:
            self._registry.forget()
            raise


def parts(seen: Look, handle: str) -> Iterator[Part]:
    """A look taken apart into its messages. Lines that are not shown go with the message before them, or the first."""
    shown: Message | None = None
    group: list[bytes] = []
    offset, start, before = seen.offset, seen.end - sum(len(line) + 1 for line in seen.lines), b""
    standing = seen.cursor

    def part(last: Message) -> Part:
        nonlocal offset, start, before, standing
        data = b"".join(line + b"\n" for line in group)
        piece = Look(offset, start, data, cut_back=False, before=before)
        piece.cursor = standing
        offset, start, before = piece.total, piece.end, piece.last
        standing = Cursor(piece.total, cursor.cksum(piece.last), "")
        return Part(last, piece)

    for line in seen.lines:
        found = message_of(line, handle)
        if found is not None:
            if shown is not None:
                yield part(shown)
                group.clear()
            shown = found
        group.append(line)
    if shown is not None:
        yield part(shown)


class Follower:
    """Reads an inbox from a place of its own, which is kept in memory: the cursor on disk is neither used nor moved.

    It begins after what the inbox holds at its first look, or after the cursor.

    :param unread: begin at the cursor.
    """

    def __init__(self, client: Client, handle: str, *, unread: bool = False) -> None:
        self.client = client
        self.handle = handle
        self._unread = unread
        self._place: Cursor | None = None
        self._hint: Hint | None = None

    def __repr__(self) -> str:
        return f"<Follower of @{self.handle} at {self._place}>"

    def lines(self) -> list[bytes]:
        """The lines that are new since the last call, as they are stored, without their newlines.

        *Errors*: :class:`InboxBusy` where the lock is held past its bound; :class:`SotbusError`. The place stays.
        """
        if self._place is None:
            seen = reading.look_at(self.client, self.handle, self.client.notify)
            found = seen.lines if self._unread else []
        else:
            seen = self._look(self._place)
            found = seen.lines
        if self._place is None or seen.lines or seen.cut_back or seen.total != self._place.count:
            self._place = Cursor(seen.total, cursor.cksum(seen.last) if seen.total else "", "")
            self._hint = self._hint_of(seen)
        return found

    def _look(self, place: Cursor) -> Look:
        """One look from a place, under the shared lock where this box appends itself. *Errors*: see :meth:`lines`."""
        folder, settings = self.client.folder, self.client.settings
        path = folder.inbox(self.handle)
        lock = None
        refresh_folder(folder.inboxes)
        try:
            manager = reads_under_lock(folder, self.client.box) if os.path.lexists(path) else None
            if manager is not None:
                lock = Inbox(folder, self.handle, manager).locked_for_reading(settings.inbox_read_wait_s)
        except OSError as error:
            self.client.notify(f"note: the inbox lock for @{self.handle} failed ({error.strerror}); reading without it")
        try:
            return look(path, place, self._hint)
        except OSError as error:
            raise SotbusError(f"the inbox of @{self.handle} cannot be read: {error.strerror or error}") from error
        finally:
            if lock is not None:
                lock.__exit__(None, None, None)

    def _hint_of(self, seen: Look) -> Hint | None:
        """Where the last line was seen, so that the next look need not count from the start."""
        try:
            inode = os.stat(self.client.folder.inbox(self.handle)).st_ino
        except OSError:
            return None
        return Hint(inode, seen.total, seen.last_start, seen.end, cursor.cksum(seen.last)) if seen.total else None
