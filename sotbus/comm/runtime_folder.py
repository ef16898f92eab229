"""Where a user's sockets lie on one box, how private that place must be, and who is at a socket's other end.

Sources: decisions, "A shared home shares files that must not be shared" and Security; facts 11, Endpoints; unix(7).
"""

from __future__ import annotations

import os
import stat
import sys

from sotbus.errors import FolderError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Protocol

    class HasOptions(Protocol):
        """A socket of any kind: :mod:`_socket`'s, :mod:`socket`'s or trio's."""

        def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


SOCKET = "sotbus.sock"
"""The socket of the page's wire."""

RUN_USER = "/run/user"
"""Where pam_systemd(8) makes each user's runtime folder."""

TMP = "/tmp"
"""Where the folder goes on a box without runtime folders."""

PRIVATE = 0o700
OTHERS = 0o077

MAX_SOCKET_PATH_BYTES = 107
"""``sun_path`` has 108 bytes, and the NUL after the path is one of them (unix(7))."""

UCRED_BYTES = 12
"""``struct ucred``: pid, uid, gid, 32 bits each (unix(7), SO_PEERCRED)."""


class Peer:
    """The process at a socket's other end, as the kernel recorded it at ``connect`` (or at ``listen``).

    ``pid`` is 0 where it is in a pid namespace that cannot be seen from here.
    """

    __slots__ = ("gid", "pid", "uid")

    def __init__(self, pid: int, uid: int, gid: int) -> None:
        self.pid = pid
        self.uid = uid
        self.gid = gid

    def __repr__(self) -> str:
        return f"<Peer pid {self.pid} uid {self.uid}>"

    @property
    def is_this_user(self) -> bool:
        """Whether it runs as this process's user. Root is another user like any other."""
        return self.uid == os.geteuid()


def runtime_folder(environ: Mapping[str, str]) -> str:
    """The folder of this user's sockets: ``$XDG_RUNTIME_DIR/sotbus``, else below ``/run/user``, else below ``/tmp``.

    A ``$XDG_RUNTIME_DIR`` that is relative, not there, or another user's (``sudo`` hands it on) is passed over.
    """
    uid = os.geteuid()
    for parent in (environ.get("XDG_RUNTIME_DIR", ""), f"{RUN_USER}/{uid}"):
        if os.path.isabs(parent) and _is_own_folder(parent, uid):
            return os.path.join(parent, "sotbus")
    return f"{TMP}/sotbus-{uid}"


def socket_path(environ: Mapping[str, str]) -> str:
    """Where this user's node listens on this box unless it was told otherwise."""
    return os.path.join(runtime_folder(environ), SOCKET)


def make_private_folder(path: str) -> None:
    """Make a folder for sockets, 0700, where there is none; one that is there must be private.

    *Errors*: :class:`FolderError`, as :func:`check_private_folder`, or with the system's reason.
    """
    try:
        os.mkdir(path, PRIVATE)
        os.chmod(path, PRIVATE)  # whatever the umask left of it
    except FileExistsError:
        pass
    except OSError as error:
        raise FolderError(
            f"the folder for sockets {path} cannot be made ({error.strerror})",
            hint="set XDG_RUNTIME_DIR to a folder of your own on this box's disk, or node.socket in the config",
        ) from error
    check_private_folder(path)


def check_private_folder(path: str) -> None:
    """Refuse a folder that others could put a socket into. *Errors*: :class:`FolderError`; the hint says what to do."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise FolderError(f"the folder for sockets {path} cannot be looked at ({error.strerror})") from error
    if stat.S_ISLNK(found.st_mode):
        raise FolderError(f"the folder for sockets {path} is a symbolic link", hint="name the folder itself")
    if not stat.S_ISDIR(found.st_mode):
        raise FolderError(f"the folder for sockets {path} is not a folder", hint=f"move it out of the way: {path}")
    if found.st_uid != os.geteuid():
        raise FolderError(
            f"the folder for sockets {path} belongs to uid {found.st_uid}, not to this user (uid {os.geteuid()})",
            hint="set XDG_RUNTIME_DIR to a folder of your own, or have that one removed",
        )
    if found.st_mode & OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        raise FolderError(
            f"the folder for sockets {path} is open to other users (mode {mode:04o})", hint=f"chmod 700 {path}"
        )


def check_socket_path(path: str) -> None:
    """Refuse a path that no socket can have. *Errors*: :class:`FolderError` naming both lengths."""
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise FolderError(
            f"the path of the socket {path} has {size} bytes and the system takes {MAX_SOCKET_PATH_BYTES}",
            hint="name a shorter one: node.socket in the config, or XDG_RUNTIME_DIR",
        )
    if not os.path.isabs(path) or path.endswith("/") or "\0" in path:
        raise FolderError(f"{path!r} is not the absolute path of a socket")


def peer_of(sock: HasOptions) -> Peer:
    """Who is at the other end of a connected Unix socket.

    *Errors*: :class:`FolderError` on a system that does not tell (only Linux has ``SO_PEERCRED``); OSError.
    """
    import _socket

    option = getattr(_socket, "SO_PEERCRED", None)
    if option is None:
        raise FolderError(f"{sys.platform} does not say which user is at the other end of a socket")
    data = sock.getsockopt(_socket.SOL_SOCKET, option, UCRED_BYTES)
    pid, uid, gid = (int.from_bytes(data[at : at + 4], sys.byteorder) for at in (0, 4, 8))
    return Peer(pid, uid, gid)


def _is_own_folder(path: str, uid: int) -> bool:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid
