"""Whether registry.json has changed, for whoever would otherwise read all of it again and again."""

from __future__ import annotations

import os
import time

from sotbus.comm.folder import open_regular, refresh_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.comm.client import Client

    Signature = tuple[int, int, int, int, int] | None

RACY_S = 0.1
"""A registry written less than this before it was looked at may be written again within one tick of its time stamp."""


class RegistryFile:
    """Whether registry.json is still the file that it was."""

    def __init__(self, client: Client) -> None:
        self._path = client.folder.registry
        self._known: Signature = None

    def changed(self) -> bool:
        """Whether it may have changed since this was last asked; it may have where that cannot be told.

        The file is opened, since an NFS client asks the server about it at an open (nfs(5)).
        """
        before, self._known = self._known, self._look()
        return self._known is None or self._known != before

    def forget(self) -> None:
        """Answer "changed" the next time."""
        self._known = None

    def _look(self) -> Signature:
        refresh_folder(os.path.dirname(self._path))
        try:
            fd = open_regular(self._path)
        except OSError:
            return None
        try:
            now = os.fstat(fd)
        finally:
            os.close(fd)
        if abs(time.time() - now.st_mtime) < RACY_S:
            return None
        return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns
