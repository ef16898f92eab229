"""The comm folder: where each file of the protocol lies, with which permissions, and the tightening pass.

Sources: sot-comm v1, Layout; facts 1.
"""

from __future__ import annotations

import errno
import os
import stat

from sotbus.comm.delegations import open_undelegated
from sotbus.errors import FolderError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
OTHERS = 0o077

MADE_FOLDERS = ("inbox", "self", "read")
"""What a first command makes; ``state`` and ``probe`` are made by whoever needs them."""

ROOT_FILES = ("inbox-lock-manager", "gh-device-auth.json", "registry.json", "registry.json.tmp", ".registry.lock")
ROOT_PREFIXES = (".inbox-lock-manager.", "registry.json.new.", ".registry.lock.tmp.", ".registry.lock.reclaim.")
FOLDER_ENDINGS = {"inbox": (".jsonl", ".lock"), "read": (".cursor",), "self": (".txt",), "state": ("",), "probe": ()}
"""The entries that the tightening pass knows by name; anything else keeps its mode."""


class Folder:
    """A comm folder by its absolute path. Holds no descriptor and caches nothing."""

    __slots__ = ("root",)

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)

    def __repr__(self) -> str:
        return f"<Folder {self.root}>"

    @classmethod
    def of(cls, environ: Mapping[str, str], configured: str | None = None) -> Folder:
        """``$SOT_COMM_HOME``, else the configured folder, else ``~/.sot-comm``; a relative one from here.

        *Errors*: :class:`FolderError` where none of these says anything.
        """
        named = environ.get("SOT_COMM_HOME") or configured
        if named:
            return cls(named)
        usual = os.path.expanduser("~/.sot-comm")
        if not os.path.isabs(usual) or environ.get("HOME") == "":
            raise FolderError(
                "FAILED: there is no home folder to put the comm folder in, so nothing was written",
                hint="set HOME, or name the comm folder with SOT_COMM_HOME",
            )
        return cls(usual)

    @property
    def bin(self) -> str:
        return self.root + "/bin"

    @property
    def registry(self) -> str:
        return self.root + "/registry.json"

    @property
    def registry_lock(self) -> str:
        return self.root + "/.registry.lock"

    @property
    def manager_record(self) -> str:
        return self.root + "/inbox-lock-manager"

    @property
    def inboxes(self) -> str:
        return self.root + "/inbox"

    @property
    def cursors(self) -> str:
        return self.root + "/read"

    @property
    def selves(self) -> str:
        return self.root + "/self"

    @property
    def state(self) -> str:
        return self.root + "/state"

    def inbox(self, handle: str) -> str:
        return f"{self.root}/inbox/{handle}.jsonl"

    def inbox_lock(self, handle: str) -> str:
        return f"{self.root}/inbox/{handle}.lock"

    def cursor(self, handle: str) -> str:
        return f"{self.root}/read/{handle}.cursor"

    def ensure(self) -> None:
        """Make the root, ``inbox``, ``self`` and ``read``, 0700, where they are not there.

        *Errors*: :class:`FolderError` naming the path and the system's reason.
        """
        try:
            os.makedirs(self.root, PRIVATE_FOLDER, exist_ok=True)
            for name in MADE_FOLDERS:
                path = f"{self.root}/{name}"
                if not os.path.isdir(path):
                    make_folder(path)
        except OSError as error:
            raise FolderError(
                f"FAILED: the comm folder {self.root} cannot be made ({error.strerror or error}); nothing was written",
                hint="name another folder with SOT_COMM_HOME or comm.home in the config",
            ) from error

    def tighten(self) -> str | None:
        """Take the group and other bits off every entry known by name; answers one warning, or None.

        Refused for ``/``, the home folder and a git checkout. A root that is closed already is not walked. The root is
        closed last, so that an interrupted pass is repeated. Judged by looking again, not by chmod's answers.
        """
        root = os.path.realpath(self.root)
        if root in ("/", os.path.realpath(os.path.expanduser("~"))) or os.path.lexists(root + "/.git"):
            return f"warning: {root} is a root, home or git folder; its permissions were left as they are"
        try:
            if not _is_open(root):
                return None
        except OSError as error:
            return f"warning: {root} cannot be looked at ({error.strerror}); its permissions were left as they are"
        for path in self._known_entries(root):
            _close(path)
        _close(root)
        still = next((path for path in (*self._known_entries(root), root) if _open_now(path)), None)
        return f"warning: {still} is still open to other users" if still else None

    @staticmethod
    def _known_entries(root: str) -> Iterator[str]:
        """Known files and folders below the root, one level deep; links are never followed."""
        for entry in _entries(root):
            if entry.is_dir(follow_symlinks=False):
                endings = FOLDER_ENDINGS.get(entry.name)
                if endings is None:
                    continue
                yield entry.path
                for inner in _entries(entry.path):
                    if entry.name == "probe":
                        if inner.is_dir(follow_symlinks=False):
                            yield inner.path
                    elif inner.is_file(follow_symlinks=False) and inner.name.endswith(endings):
                        yield inner.path
            elif entry.is_file(follow_symlinks=False) and (
                entry.name in ROOT_FILES or entry.name.startswith(ROOT_PREFIXES)
            ):
                yield entry.path


def make_folder(path: str) -> None:
    """Make one folder, 0700 whatever the umask; one that another process made meanwhile is as good."""
    try:
        os.mkdir(path, PRIVATE_FOLDER)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def open_regular(path: str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and nothing that could block or lie: a FIFO, a device.

    *Errors*: OSError.
    """
    fd = open_undelegated(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def touch_folder(path: str) -> None:
    """Open and close a folder, which makes an NFS client ask the server about its names again.

    *Errors*: OSError where it cannot be opened.
    """
    os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY))


def refresh_folder(path: str) -> None:
    """:func:`touch_folder` before a read that must be fresh: what is wrong with the folder, the read itself will say.

    Without it a name that another box made may be missing for 30 s, and a file that it replaced may be read as it was
    before (measured on NFS v4.2; docs/topologies.md). On a local disk it costs an open and a close.
    """
    try:
        touch_folder(path)
    except OSError:
        return


def sync_folder(path: str) -> None:
    """fsync a folder, so that a name just made in it survives a power loss (fsync(2), NOTES).

    *Errors*: OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(fd: int, data: bytes) -> None:
    """write(2) until all of ``data`` is written. *Errors*: OSError; part of it may be written then."""
    written = os.write(fd, data)
    if written == len(data):
        return
    view = memoryview(data)[written:]
    while view:
        view = view[os.write(fd, view) :]


def remove_quietly(path: str) -> None:
    """Unlink a file of our own that may not be there."""
    try:
        os.unlink(path)
    except OSError:
        return


def close_quietly(fd: int) -> None:
    """Close a descriptor whose work is done and, where it matters, synced: a late error has nothing left to say."""
    try:
        os.close(fd)
    except OSError:
        return


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []


def _is_open(path: str) -> bool:
    return bool(stat.S_IMODE(os.lstat(path).st_mode) & OTHERS)


def _open_now(path: str) -> bool:
    try:
        return _is_open(path)
    except OSError:
        return False


def _close(path: str) -> None:
    """Take the group and other bits off; what could not be closed shows when it is looked at again."""
    try:
        mode = stat.S_IMODE(os.lstat(path).st_mode)
        if mode & OTHERS:
            os.chmod(path, mode & ~OTHERS)
    except OSError:
        return
