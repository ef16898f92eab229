"""Who may append, asked before each filing, with the answer kept for as long as it must be the same."""

from __future__ import annotations

import _thread
import os
import select
import time

from sotbus.comm.manager_record import allows, read, writer_manager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.comm.box import Box
    from sotbus.comm.folder import Folder
    from sotbus.comm.lock_manager import LockManager
    from sotbus.comm.topology import Topology

RECENT_S = 0.2
"""How long an answer is simply kept, in seconds: a tenth of the wait for the inbox lock, up to two seconds, that may
follow the question in any case."""


class WriterGate:
    """:func:`~sotbus.comm.manager_record.writer_manager`, asked before each filing, and its answer kept while it holds.

    An answer is kept for ``RECENT_S``. A local disk's is kept longer, until something changes: a remount, which marks
    an open mountinfo at once (proc_pid_mountinfo(5)), another record, or another folder in the inboxes' place.
    Elsewhere the record is read again then; where the mounts cannot be watched, everything is asked afresh.

    Thread-safe: one thread asks at a time.
    """

    __slots__ = (
        "_answer",
        "_asked_at",
        "_facts",
        "_local",
        "_poll",
        "_record",
        "_turn",
        "_watched",
        "box",
        "folder",
        "topology",
    )

    def __init__(self, folder: Folder, box: Box, topology: Topology) -> None:
        self.folder = folder
        self.box = box
        self.topology = topology
        self._record = folder.manager_record
        self._answer: LockManager | None = None
        self._asked_at = 0.0
        self._turn = _thread.allocate_lock()
        self._facts: tuple[int, ...] | None = None
        self._local = False
        self._watched: int | None = None
        self._poll: select.poll | None = None

    def __repr__(self) -> str:
        return f"<WriterGate {self._answer.identity if self._answer else 'not asked'}>"

    def __del__(self) -> None:
        if self._watched is not None:
            os.close(self._watched)

    def manager(self) -> LockManager:
        """The lock manager to append under. *Errors*: :class:`FilingFailed`, as :func:`writer_manager`."""
        with self._turn:
            return self._ask()

    def _ask(self) -> LockManager:
        now = time.monotonic()
        if self._answer is not None:
            if now < self._asked_at + RECENT_S:
                return self._answer
            if not self._mounts_changed() and self._stands(self._answer):
                self._asked_at = now
                return self._answer
        self._answer = None
        self._asked_at = now
        self._watch()
        before = self._look()
        answer = writer_manager(self.folder, self.box, self.topology)
        self._answer, self._facts = answer, before if before == self._look() else None
        self._local = answer.identity.startswith("local ")
        return answer

    def _stands(self, answer: LockManager) -> bool:
        """Whether an answer still holds on the same mounts: on a local disk by the record's facts, elsewhere by reading
        it, since another box's change does not show in them at once."""
        if self._local:
            return self._facts is not None and self._facts == self._look()
        try:
            inboxes = os.stat(self.folder.inboxes)
            if self._facts is None or self._facts[:2] != (inboxes.st_dev, inboxes.st_ino):
                return False
            return allows(read(self.folder), answer.identity)
        except OSError:
            return False

    def _look(self) -> tuple[int, ...] | None:
        """What the answer rests on besides the mounts, or None where it cannot be told."""
        try:
            inboxes = os.stat(self.folder.inboxes)
            record = os.stat(self._record)
        except OSError:
            return None
        return inboxes.st_dev, inboxes.st_ino, record.st_dev, record.st_ino, record.st_ctime_ns, record.st_size

    def _mounts_changed(self) -> bool:
        return self._poll is None or bool(self._poll.poll(0))

    def _watch(self) -> None:
        """Watch the mounts from now on, through a new descriptor: an old one may hold a mark."""
        if self._watched is not None:
            os.close(self._watched)
        self._watched = self._poll = None
        try:
            self._watched = os.open(self.box.mountinfo_path, os.O_RDONLY)
        except OSError:
            return
        self._poll = select.poll()
        self._poll.register(self._watched, select.POLLERR | select.POLLPRI)
