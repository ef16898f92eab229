"""A node's place on its box: the locks that keep a second node away, and its private Unix sockets.

Sources: decisions, "A shared home shares files that must not be shared" and Security; facts 11; flock(2), unix(7).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import stat
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import trio

from sotbus import message
from sotbus.comm.folder import close_quietly, remove_quietly
from sotbus.comm.runtime_folder import Peer, check_private_folder, check_socket_path, make_private_folder, peer_of
from sotbus.errors import FolderError, SotbusError
from sotbus.node.unix_stream import UnixStream

if TYPE_CHECKING:
    from collections.abc import Callable

BACKLOG = 1024
"""Connections that may wait to be accepted; a client that finds it full is told so at once (connect(2), EAGAIN)."""

PRIVATE_FILE = 0o600

NAMED_WITHIN_S = 0.5
"""How long a refused node waits for the name of the one that just took a lock: until then the file may still name an
earlier node, which was killed."""

NAMED_PAUSE_S = 0.02

LOCK_TRIES = 100
"""How often a lock file is opened anew that was removed between its opening and its locking: each time a node ended."""


@dataclass(frozen=True)
class RunningNode:
    """What a node says of itself in the lock files that it holds; ``since`` is a stamp, ``pid`` as it sees itself."""

    pid: int
    host: str
    comm_home: str
    socket: str
    since: str

    def __str__(self) -> str:
        shown = (message.shown(text) for text in (self.host, self.comm_home, self.socket, self.since))
        return "pid {} on {}, comm folder {}, socket {}, since {}".format(self.pid, *shown)


class NodeRunsError(SotbusError):
    """A node of this user serves this socket or this comm folder on this box already; the text names it.

    ``node`` is None where it has not said yet who it is.
    """

    code = "conflict"

    def __init__(self, text: str, node: RunningNode | None = None, *, hint: str = "") -> None:
        super().__init__(text, hint=hint)
        self.node = node


class NodeLock:
    """One node's claim on its socket and its comm folder, held until :meth:`release` or the end of its process.

    It is a flock on ``sotbus.lock`` beside the socket, and on one file for the comm folder in the runtime folder, by
    its path and by its inode, so that neither a symbolic link nor a bind mount hides that it is the same. It excludes
    nodes of this user whose runtime folder is the same one; boxes that mount one comm folder each have their own.
    """

    def __init__(self, node: RunningNode, held: dict[str, int]) -> None:
        self.node = node
        self._held = held

    def __repr__(self) -> str:
        return f"<NodeLock {self.node.socket}{'' if self._held else ', released'}>"

    @classmethod
    def take(cls, socket_path: str, comm_home: str, runtime_folder: str, host: str) -> NodeLock:
        """Claim a socket and a comm folder, all or nothing. Makes both private folders where they are not there.

        :param comm_home: the comm folder, which is there.
        :param runtime_folder: this user's folder for sockets on this box, with the comm folders' locks.

        *Errors*: :class:`NodeRunsError` naming the node that has one of them; FolderError.
        """
        check_socket_path(socket_path)
        node = RunningNode(os.getpid(), host, os.path.realpath(comm_home), socket_path, message.stamp())
        claim = cls(node, {})
        try:
            for folder in (os.path.dirname(socket_path), runtime_folder):
                make_private_folder(folder)
            claim._hold(lock_path(socket_path), f"the socket {socket_path}")
            for path in folder_lock_paths(runtime_folder, comm_home):
                claim._hold(path, f"the comm folder {comm_home}")
        except BaseException:
            claim.release()
            raise
        return claim

    def release(self) -> None:
        """Give the claim up; the files go with it. Again, nothing happens."""
        while self._held:
            path, fd = self._held.popitem()
            remove_quietly(path)  # while it is still locked, so that it is no later node's
            close_quietly(fd)

    def _hold(self, path: str, what: str) -> None:
        try:
            fd = _locked(path)
        except OSError as error:
            raise FolderError(f"the lock file {path} cannot be locked ({error.strerror})") from error
        if fd is None:
            raise _refusal(path, what)
        self._held[path] = fd
        data = json.dumps(asdict(self.node)).encode()
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, data, 0)
        except OSError as error:
            raise FolderError(f"the lock file {path} cannot be written ({error.strerror})") from error


def lock_path(socket_path: str) -> str:
    """The lock file beside a socket."""
    return socket_path.removesuffix(".sock") + ".lock"


def folder_lock_paths(runtime_folder: str, comm_home: str) -> list[str]:
    """The lock files for a comm folder: by its real path, and by its device and inode.

    *Errors*: FolderError where it cannot be looked at.
    """
    real = os.path.realpath(comm_home)
    try:
        found = os.stat(real)
    except OSError as error:
        raise FolderError(f"the comm folder {comm_home} cannot be looked at ({error.strerror})") from error
    keys = (os.fsencode(real), b"%d:%d" % (found.st_dev, found.st_ino))
    return [os.path.join(runtime_folder, f"folder-{hashlib.sha256(key).hexdigest()[:16]}.lock") for key in keys]


def read_running(path: str) -> RunningNode | None:
    """Who holds a lock file, as it says; None where it says nothing (yet)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        value = json.loads(os.pread(fd, 1 << 16, 0))
        return RunningNode(int(value["pid"]), *(str(value[name]) for name in ("host", "comm_home", "socket", "since")))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    finally:
        os.close(fd)


class UnixListener(trio.abc.Listener[UnixStream]):
    """A private Unix socket that accepts connections of this user and of no other, root included.

    ``accepted`` and ``refused`` count since it was opened.

    :param on_refused: told of each connection that was closed because another user had made it.
    """

    def __init__(
        self,
        sock: trio.socket.SocketType,
        path: str,
        inode: tuple[int, int],
        on_refused: Callable[[Peer], object] | None = None,
    ) -> None:
        self.path = path
        self.accepted = 0
        self.refused = 0
        self._socket = sock
        self._inode = inode
        self._on_refused = on_refused

    def __repr__(self) -> str:
        return f"<UnixListener {self.path}: {self.accepted} accepted, {self.refused} refused>"

    async def accept(self) -> UnixStream:
        """The next connection of this user; its ``peer`` says which process made it.

        *Errors*: OSError, as accept(2): the shortages among them pass (``trio.serve_listeners`` waits then).
        *Cancellation*: no connection is lost; it waits for the next accept.
        """
        while True:
            sock, _ = await self._socket.accept()
            try:
                peer = peer_of(sock)
            except OSError:  # gone again
                sock.close()
                continue
            if peer.is_this_user:
                self.accepted += 1
                return UnixStream(socket.socket(fileno=sock.detach()), peer)
            sock.close()
            self.refused += 1
            if self._on_refused is not None:
                self._on_refused(peer)

    async def aclose(self) -> None:
        """Stop listening, and remove the socket's name unless it is another socket's by now."""
        self._socket.close()
        try:
            if _inode_of(self.path) == self._inode:
                os.unlink(self.path)
        except OSError:
            pass
        await trio.lowlevel.checkpoint()


async def open_unix_listener(
    path: str, *, on_refused: Callable[[Peer], object] | None = None, backlog: int = BACKLOG
) -> UnixListener:
    """Listen on a new socket, 0600, in a folder that is private to this user. Open it under a :class:`NodeLock`.

    A socket that nobody listens on is replaced. One that somebody listens on never is, nor is anything else.

    *Errors*: :class:`NodeRunsError` naming the process that listens there; FolderError.
    """
    await trio.lowlevel.checkpoint()
    check_socket_path(path)
    check_private_folder(os.path.dirname(path))
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound = False
    try:
        _clear(path)
        await sock.bind(path)
        bound = True
        os.chmod(path, PRIVATE_FILE)  # nobody can connect before it listens
        sock.listen(backlog)
        return UnixListener(sock, path, _inode_of(path), on_refused)
    except BaseException as error:
        sock.close()
        if bound:
            remove_quietly(path)
        if isinstance(error, OSError):
            raise FolderError(f"the socket {path} cannot be opened ({error.strerror or error})") from error
        raise


def _locked(path: str) -> int | None:
    """A descriptor of the lock file that stands at ``path``, locked; None where it is held. *Errors*: OSError."""
    for _ in range(LOCK_TRIES):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, PRIVATE_FILE)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _inode_of(path) == (found.st_dev, found.st_ino):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except FileNotFoundError:  # its last holder removed it meanwhile
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise OSError(errno.EAGAIN, "it is removed again and again")


def _refusal(path: str, what: str) -> NodeRunsError:
    """What to say of a lock that is held. Waits ``NAMED_WITHIN_S`` where the file names no process that runs here."""
    deadline = time.monotonic() + NAMED_WITHIN_S
    while True:
        node = read_running(path)
        if (node is not None and _runs(node.pid)) or time.monotonic() >= deadline:
            break
        time.sleep(NAMED_PAUSE_S)
    if node is None:
        return NodeRunsError(f"another node is about to serve {what}, or to end; it holds {path}", hint="try again")
    return NodeRunsError(f"a node serves {what} already: {node}", node, hint=f"stop that one first: kill {node.pid}")


def _runs(pid: int) -> bool:
    """Whether there is such a process, as far as can be seen from here."""
    if pid <= 0:  # a group, or everybody (kill(2))
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _clear(path: str) -> None:
    """Remove a socket that nobody listens on. *Errors*: NodeRunsError, FolderError, OSError."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise FolderError(f"{path} is in the socket's place and is not a socket", hint=f"move it away: {path}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except FileNotFoundError:
            return
        except BlockingIOError:  # its backlog is full
            raise NodeRunsError(f"a process listens on {path} already, and accepts nothing") from None
        peer = peer_of(probe)
    raise NodeRunsError(
        f"a process listens on {path} already: pid {peer.pid}, uid {peer.uid}",
        hint="stop that one first, or name another socket: node.socket in the config",
    )


def _inode_of(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino
