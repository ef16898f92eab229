"""The registry lock: a file that names its holder, taken by a hard link, reclaimed only from a holder proved dead.

Sources: sot-comm v1, The registry lock; facts 3.2 to 3.8. The record and the proofs are in :mod:`sotbus.comm.holder`.
"""

from __future__ import annotations

import _thread
import os
import time

from sotbus.comm.delegations import open_undelegated
from sotbus.comm.folder import PRIVATE_FILE, close_quietly, remove_quietly, touch_folder, write_whole
from sotbus.comm.holder import DEAD, Holder, judge, own_record, parse
from sotbus.comm.identity import fresh_read_doubt
from sotbus.comm.processes import start_ticks
from sotbus.errors import RegistryLockFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    from sotbus.comm.box import Box
    from sotbus.comm.folder import Folder

RETRY_S = 0.05
"""Pause between two tries of a held lock (facts 3.6)."""

SETTLE_S = 1.0
"""How long a reclaimer waits between its marker and its second look (sot-comm v1, Reclaim)."""

_turn = _thread.allocate_lock()
"""One turn a process: its threads share one pid, so one record, and must not take each other for the holder."""

os.register_at_fork(after_in_child=lambda: _new_turn())


def _new_turn() -> None:
    global _turn
    _turn = _thread.allocate_lock()


WALKED = "its reclaim chain was still being walked at the deadline"


class Obstacle:
    """What stands in the way of the lock, for the message: who holds it, who blocks its reclaim, and why.

    ``remedy``: ``held`` (a holder is read), ``by_hand`` (nobody can prove or pass it), ``unread`` (no holder was read).
    """

    __slots__ = ("blocker", "holder", "remedy", "why")

    def __init__(self, remedy: str, why: str, holder: Holder | None = None, blocker: Holder | None = None) -> None:
        self.remedy = remedy
        self.why = why
        self.holder = holder
        self.blocker = blocker or holder


class GoneError(Exception):
    """The lock was seen gone, or was just removed: try again at once."""


class RegistryLock:
    """A folder's registry lock. :meth:`hold` takes it; nothing is kept between holds."""

    __slots__ = ("_me", "_mount_doubt", "box", "folder", "path", "settle_s")

    def __init__(self, folder: Folder, box: Box, settle_s: float = SETTLE_S) -> None:
        self.folder = folder
        self.box = box
        self.path = folder.registry_lock
        self.settle_s = settle_s
        self._mount_doubt: str | None = None
        self._me: Holder

    def __repr__(self) -> str:
        return f"<RegistryLock {self.path}>"

    def hold(self, bound_s: float) -> Lease:
        """Take the lock and answer a context manager that releases it.

        There is always one try, and one reclaim step after a first failed one, even with a bound of 0. The bound counts
        the wait for other threads of this process; a reclaim's settle may outlast it.

        *Errors*: :class:`RegistryLockFailed`, whose text names the holder and the recovery.
        *Cancellation*: an exception that arrives while waiting leaves no lock and no temp file behind.
        """
        deadline = time.monotonic() + bound_s
        turn = _turn
        if not turn.acquire(timeout=max(0.0, bound_s)):
            raise RegistryLockFailed(
                f"FAILED: registry lock {self.path} was not tried: another thread of this process held its turn past "
                "the bound"
            )
        try:
            self._mount_doubt = fresh_read_doubt(self.folder.root, self.box)
            self._me = own_record(self.box, fresh=self._mount_doubt is None)
            self._take_within(deadline)
        except BaseException:
            turn.release()
            raise
        return Lease(self.path, self._me, turn)

    def _take_within(self, deadline: float) -> None:
        """The wait loop of facts 3.6: take; past the deadline fail; else look, then again."""
        obstacle: Obstacle | None = None
        while True:
            try:
                if link_record(self.path, self.folder.root, self._me):
                    return
            except OSError as error:
                raise RegistryLockFailed(
                    f"FAILED: registry lock {self.path} cannot be taken: {error.strerror or error}"
                ) from error
            if obstacle is not None and time.monotonic() >= deadline:
                raise self._failure(obstacle)
            try:
                found = self._step(deadline)
                if obstacle is None or found.why != WALKED:
                    obstacle = found  # else what an earlier walk found to its end says more
            except GoneError:
                obstacle = Obstacle("unread", "it was released and taken again each time")
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._failure(obstacle)
            time.sleep(min(RETRY_S, left))

    def _step(self, deadline: float) -> Obstacle:
        """One look at a held lock, and its reclaim where its holder is proved dead.

        :raises GoneError: there is no lock now; try again at once.
        """
        holder = self._read_holder()
        if isinstance(holder, Obstacle):
            return holder
        if self._is_me(holder):  # we have our process's turn and not the lock: a release of ours failed
            return self._unlink(holder)
        chain = [holder]
        while True:
            latest = chain[-1]
            if len(chain) > 1 and self._is_me(latest):
                return self._remove(chain)
            if len(chain) > 1 and time.monotonic() > deadline:
                return Obstacle("held", WALKED, holder, latest)
            verdict, why = judge(latest, self._me, self._start_of)
            if verdict != DEAD:
                if len(chain) > 1:
                    described = f"{latest.name} pid {latest.pid}"
                    why = f"it is dead, but its reclaim by {described} did not finish: {why}"
                elif self._mount_doubt is not None:
                    why = self._mount_doubt
                return Obstacle("held", why, holder, latest)
            if len(chain) == 1 and self._read_holder() != holder:
                raise GoneError  # it was released, and its holder ended, between our look and the verdict
            if not latest.names_a_file:
                return Obstacle("by_hand", f"its record names no holder ({latest})")
            marker = self._marker(latest)
            try:
                if link_record(marker, self.folder.root, self._me):
                    return self._remove(chain)
            except OSError as error:
                return Obstacle("held", f"it is dead, but its reclaim marker cannot be made: {error.strerror}", holder)
            after = self._read_record(marker)
            if after is None:
                return Obstacle("held", f"it is dead, but its reclaim marker {marker} cannot be read", holder)
            if after in chain and not self._is_me(after):
                why = f"its reclaim marker {marker} names {after}, which its reclaim chain already holds"
                return Obstacle("by_hand", why + ", so no reclaim can pass it")
            chain.append(after)

    def _marker(self, record: Holder) -> str:
        """The marker that a reclaimer of this holder takes."""
        return f"{self.folder.root}/.registry.lock.reclaim.{record.leaf}"

    def _remove(self, chain: list[Holder]) -> Obstacle:
        """Settle, look again, and remove the lock if it still names one of the chain.

        :raises GoneError: it is gone.
        """
        time.sleep(self.settle_s)
        found = self._read_holder()
        if isinstance(found, Obstacle):
            return Obstacle("held", "its record changed during the reclaim", chain[0])
        if found not in chain:
            return Obstacle("held", "it was taken again during the reclaim", found)
        return self._unlink(chain[0])

    def _unlink(self, holder: Holder) -> Obstacle:
        """Remove the lock of a holder that is dead, or of our own. :raises GoneError: it is gone."""
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            return Obstacle("held", f"its lock cannot be removed: {error.strerror or error}", holder)
        raise GoneError

    def _read_holder(self) -> Holder | Obstacle:
        """The lock's record, fresh. :raises GoneError: there is no lock."""
        if os.path.isdir(self.path):
            return Obstacle("by_hand", "held by an older version that records no holder")
        try:
            touch_folder(self.folder.root)
            line = read_first_line(self.path)
        except FileNotFoundError:
            raise GoneError from None
        except OSError as error:
            return Obstacle("unread", f"its record cannot be read ({error.strerror})")
        record = parse(line)
        return record or Obstacle("by_hand", f"its record names no holder ({line or 'empty'})")

    def _read_record(self, path: str) -> Holder | None:
        """A marker's record, fresh, or None."""
        try:
            touch_folder(self.folder.root)
            return parse(read_first_line(path))
        except OSError:
            return None

    def _is_me(self, record: Holder) -> bool:
        return self._me.can_prove and record == self._me

    def _start_of(self, pid: int) -> str | None:
        return start_ticks(pid, self.box.proc)

    def _failure(self, obstacle: Obstacle) -> RegistryLockFailed:
        """The words of facts 3.8, which name the holder and the recovery."""
        path, why, holder = self.path, obstacle.why, obstacle.holder
        age = lock_age(path)
        if obstacle.remedy == "unread":
            text = f"registry lock {path} was not taken by the deadline: {why}. Retry."
        elif obstacle.remedy == "by_hand" or holder is None or obstacle.blocker is None:
            text = f"registry lock {path} still held ({age} old): {why}. "
            text += f"If its holder is dead, remove {path} by hand and retry."
        elif not os.path.lexists(path):
            text = (
                f"registry lock {path} was held by {holder.described} when last read ({why}); "
                "it may have been released since. Retry."
            )
        else:
            text = (
                f"registry lock {path} is held by {holder.described} ({age} old): {why}. "
                f"If it is dead, run any comm command on {obstacle.blocker.name}."
            )
            if not obstacle.blocker.provable:
                text += f" No box can prove its death: if you know that it is dead, remove {path} by hand and retry."
        return RegistryLockFailed(f"FAILED: {text}")


class Lease:
    """The held lock; :meth:`release`, or leaving the ``with`` block, removes it."""

    __slots__ = ("_turn", "path", "record")

    def __init__(self, path: str, record: Holder, turn: _thread.LockType) -> None:
        self.path = path
        self.record = record
        self._turn: _thread.LockType | None = turn

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Remove the lock file. One that is gone, or cannot be removed, is left to whoever finds it: we are done."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        try:
            os.unlink(self.path)
        except OSError:
            pass
        finally:
            turn.release()


def link_record(target: str, folder: str, record: Holder) -> bool:
    """Write a record into a temp file and hard-link it to ``target``; False where something is there already.

    A link that failed although the temp file has two names is a success whose answer was lost on the way (NFS).

    *Errors*: OSError for anything but "exists"; the temp file is removed in every case.
    """
    temp = f"{folder}/.registry.lock.tmp.{record.leaf}"
    try:
        os.unlink(temp)
    except FileNotFoundError:
        pass
    fd = open_undelegated(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    try:
        write_whole(fd, f"{record}\n".encode())
        os.fdatasync(fd)  # else a power loss leaves a lock that names nobody, which only a person may remove
        try:
            os.link(temp, target)
        except OSError as error:
            if _has_two_names(temp):
                return True
            if isinstance(error, FileExistsError):
                return False
            raise OSError(error.errno, f"cannot hard-link in {folder}: {error.strerror}") from error
        return True
    finally:
        close_quietly(fd)
        remove_quietly(temp)


def _has_two_names(temp: str) -> bool:
    """Whether a temp file is the lock too, read through a descriptor that is new: an old one's facts may be stale."""
    try:
        touch_folder(os.path.dirname(temp))
        fd = open_undelegated(temp, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.fstat(fd).st_nlink == 2
    finally:
        close_quietly(fd)


def read_first_line(path: str) -> str:
    """The first line of a lock file, opened by path. *Errors*: OSError."""
    fd = open_undelegated(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        data = os.read(fd, 4096)
    finally:
        os.close(fd)
    return data.split(b"\n", 1)[0].decode("utf-8", "replace")


def lock_age(path: str) -> str:
    """How old a lock is by its file's time, as ``<n>s``, or ``unknown``."""
    try:
        return f"{max(0, int(time.time() - os.lstat(path).st_mtime))}s"
    except OSError:
        return "unknown"
