"""registry.json: who is reachable, and since when. One read, one writer path (sot-comm v1, registry.json)."""

from __future__ import annotations

import errno
import os
import time

from sotbus.comm import registry_json
from sotbus.comm.folder import (
    PRIVATE_FILE,
    open_regular,
    refresh_folder,
    remove_quietly,
    sync_folder,
    touch_folder,
    write_whole,
)
from sotbus.comm.registry_lock import RegistryLock
from sotbus.errors import RegistryUnreadable, RegistryWriteFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from sotbus.comm.box import Box
    from sotbus.comm.folder import Folder

READ_PAUSES_S = (0.0, 0.1, 0.1)
"""Pauses before the further tries of a read that failed: up to 3 in about 200 ms (facts 2.3)."""


class Registry:
    """A comm folder's registry. Holds no copy: each read is a read of the file."""

    __slots__ = ("box", "folder", "lock")

    def __init__(self, folder: Folder, box: Box, *, settle_s: float | None = None) -> None:
        self.folder = folder
        self.box = box
        self.lock = RegistryLock(folder, box) if settle_s is None else RegistryLock(folder, box, settle_s)

    def __repr__(self) -> str:
        return f"<Registry {self.folder.registry}>"

    def create(self) -> None:
        """Link a synced skeleton into place where there is no registry; nothing is ever replaced or repaired.

        *Durability*: the skeleton is synced before it is linked, the folder after.
        *Errors*: :class:`RegistryWriteFailed`; a file, or a folder, that is there already is none.
        """
        path = self.folder.registry
        if not self._is_missing() or self._finish_cut_off_write():
            return
        temp = f"{path}.new.{os.getpid()}.{int.from_bytes(os.urandom(4), 'big')}"
        try:
            write_synced(temp, registry_json.SKELETON)
            try:
                os.link(temp, path)
            except OSError:
                if self._is_missing():
                    raise
            finally:
                remove_quietly(temp)
        except OSError as error:
            raise RegistryWriteFailed(
                f"FAILED: the registry could not be created ({error.strerror or error}), so nothing was written"
            ) from error
        try:
            sync_folder(self.folder.root)
        except OSError as error:
            raise RegistryWriteFailed(
                f"FAILED: the registry was created, but its folder could not be synced ({error.strerror or error}); "
                "run the command again"
            ) from error

    def _finish_cut_off_write(self) -> bool:
        """Link a whole document into place that its killed writer was about to rename; whether there is a registry now.

        The one writer that leaves no registry behind is an NFS client's, killed between the two steps of a rename (see
        below). Its document was synced, and a live writer's rename over it changes nothing.
        """
        try:
            registry_json.parse(read_file(self.folder.registry + ".tmp"))
            os.link(self.folder.registry + ".tmp", self.folder.registry)
        except FileExistsError:
            return True
        except (OSError, registry_json.NotARegistryError):
            return False
        return True

    def _is_missing(self) -> bool:
        """Whether there is no registry; the server is asked, not a remembered name, and not in the middle of a write.

        An NFS client replaces a file that another process of its box has open in two steps, and the name is missing
        between them: the old file becomes ``.nfs...``, then the new one is renamed. That is under the registry lock.
        """
        for pause in (0.0, *READ_PAUSES_S):
            if pause:
                time.sleep(pause)
            written = self._is_there(self.folder.registry_lock)
            if self._is_there(self.folder.registry):
                return False
            if not written and not self._is_there(self.folder.registry_lock):
                return True
        return True

    def _is_there(self, path: str) -> bool:
        """Whether a name is there; the folder is opened for each one, or one answer is older than the other."""
        refresh_folder(self.folder.root)
        return os.path.lexists(path)

    def read(self) -> dict[str, Any]:
        """The whole document, fresh.

        *Errors*: :class:`RegistryUnreadable` for a missing file too; the text says why, for a log or ``doctor``.
        """
        data = self._bytes()
        if data is None:
            raise RegistryUnreadable(f"{self.folder.registry} is missing")
        try:
            return registry_json.parse(data)
        except registry_json.NotARegistryError as error:
            raise RegistryUnreadable(
                f"{self.folder.registry}: {error}",
                hint=f"move {self.folder.registry} aside by hand; the next command makes an empty one",
            ) from error

    def agents(self) -> dict[str, Any]:
        """The entries by handle, fresh. A value is whatever the file holds, so ask :func:`entry_of`."""
        agents: dict[str, Any] = self.read()["agents"]
        return agents

    def _bytes(self) -> bytes | None:
        """The file's bytes; None where there is no file. A good read is never tried again."""
        path = self.folder.registry
        refresh_folder(self.folder.root)
        try:
            data = read_file(path)
            if data:
                return data
        except FileNotFoundError:
            if self._is_missing():
                return None
        except OSError:
            data = b""
        reason = "it is empty"
        for pause in READ_PAUSES_S:
            time.sleep(pause)
            try:
                touch_folder(self.folder.root)
                data = read_file(path)
            except OSError as error:
                reason = error.strerror or errno.errorcode.get(error.errno or 0, "an error")
                continue
            if data:
                return data
            reason = "it is empty"
        raise RegistryUnreadable(
            f"{path} cannot be read: {reason}",
            hint=f"if it stays so, move {path} aside by hand; the next command makes an empty one",
        )

    def update(self, change: Callable[[dict[str, Any]], bool], bound_s: float) -> bool:
        """Read, decide and write under the registry lock; ``change`` edits the document and says whether it did.

        Answers whether anything was written. :param bound_s: how long to wait for the lock, in seconds.

        *Durability*: the new text is synced before it is renamed over the old one.
        *Errors*: :class:`RegistryWriteFailed` (and its RegistryLockFailed): nothing was written, bytes and inode are
        what they were. An exception of ``change`` passes through, and nothing was written.
        """
        with self.lock.hold(bound_s):
            try:
                touch_folder(self.folder.root)  # without it no read proves what another box wrote
                document = self.read()
            except (OSError, RegistryUnreadable) as error:
                raise RegistryWriteFailed(
                    "FAILED: the registry could not be read or updated, so nothing was written",
                    hint=getattr(error, "hint", ""),
                ) from error
            if not change(document):
                return False
            self._replace(document)
            return True

    def _replace(self, document: dict[str, Any]) -> None:
        """Write, sync and rename; any failure removes the temp file."""
        temp = self.folder.registry + ".tmp"
        step = "flushed"
        try:
            data = registry_json.dump(document)
            registry_json.parse(data)
            write_synced(temp, data)
            step = "renamed into place"
            rename_believing(temp, self.folder.registry)
        except (OSError, ValueError, RecursionError) as error:
            remove_quietly(temp)
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise RegistryWriteFailed(
                f"FAILED: the registry update could not be {step} ({why}), so nothing was written"
            ) from error
        except BaseException:
            remove_quietly(temp)
            raise


def entry_of(agents: Mapping[str, Any], handle: str) -> dict[str, Any] | None:
    """A handle's entry where it is an object; a key whose value is anything else is no entry to read from."""
    entry = agents.get(handle)
    return entry if isinstance(entry, dict) else None


def text_of(entry: Mapping[str, Any] | None, field: str) -> str:
    """A field of an entry where it is a string, else ``""``."""
    value = entry.get(field) if entry else None
    return value if isinstance(value, str) else ""


def rename_believing(temp: str, path: str) -> None:
    """Rename, and believe the result rather than an error that was lost on the way (a retransmitted answer on NFS).

    *Errors*: OSError where ``path`` is not the renamed file.
    """
    inode = os.lstat(temp).st_ino
    try:
        os.rename(temp, path)
    except OSError:
        refresh_folder(os.path.dirname(path))
        if os.path.lexists(temp) or os.lstat(path).st_ino != inode:
            raise


def read_file(path: str) -> bytes:
    """A file's bytes through a new descriptor. *Errors*: OSError."""
    fd = open_regular(path)
    try:
        parts = []
        while part := os.read(fd, 1 << 20):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def write_synced(path: str, data: bytes) -> None:
    """Make ``path`` hold ``data``, synced, 0600, and never through a link that lies there.

    *Errors*: OSError; the file is removed then.
    """
    remove_quietly(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    try:
        try:
            write_whole(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        remove_quietly(path)
        raise
