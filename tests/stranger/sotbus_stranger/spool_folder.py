"""The files of a spool: each node writes in its own folder only, and reads its peers'.

    <spool>/<node>/beat                     touched by the node while it serves
    <spool>/<node>/to-<peer>/<id>.request   removed by its writer once it wants no answer any more
    <spool>/<node>/to-<peer>/<id>.answer    removed by its writer once the request is gone; empty and named
                                            ``<id>.taken`` from when the request is read, so that none is acted on twice

A peer is who owns its folder: whoever sets a spool up makes each node's folder, owned by that node's user, in a spool
folder that only its owner may write. Nothing that another user could have put there is read. Times are compared only
with each other, as the file system of the spool stamps them.
"""

from __future__ import annotations

import os
import re
import stat

MAX_BYTES = 64 << 20
"""The largest request or answer that is read."""

_REQUEST = re.compile(r"([0-9a-f]{32})\.request")
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class SpoolFolder:
    """One node's view of a spool. Everything here blocks: call it in a thread."""

    def __init__(self, folder: str, node: str) -> None:
        self.folder = folder
        self.node = node

    def _path(self, writer: str, reader: str, name: str = "") -> str:
        return os.path.join(self.folder, writer, f"to-{reader}", name)

    def beat(self) -> None:
        """Say that this node serves."""
        os.makedirs(os.path.join(self.folder, self.node), mode=0o755, exist_ok=True)
        path = os.path.join(self.folder, self.node, "beat")
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        os.utime(path)

    def stop(self) -> None:
        """Say that this node serves no more."""
        _remove(os.path.join(self.folder, self.node, "beat"))

    def serves(self, peer: str, within_s: float) -> bool:
        """Whether a peer's beat is at most this much older than now, by the spool's own clock."""
        if not self.is_genuine(peer):
            return False
        try:
            beat = os.stat(os.path.join(self.folder, peer, "beat"), follow_symlinks=False).st_mtime
            return self._now() - beat <= within_s
        except OSError:
            return False

    def _now(self) -> float:
        """The time by the file system of the spool."""
        path = os.path.join(self.folder, self.node, "clock")
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        os.utime(path)
        return os.stat(path).st_mtime

    def is_genuine(self, peer: str) -> bool:
        """Whether nobody but a peer itself can have written what is in its folder."""
        try:
            spool = os.stat(self.folder)
            own = os.stat(os.path.join(self.folder, peer), follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISDIR(own.st_mode) and not (spool.st_mode | own.st_mode) & _OTHERS_MAY_WRITE

    def put(self, peer: str, name: str, content: bytes) -> None:
        """Write a file for a peer: it is whole under its name, or not there."""
        os.makedirs(self._path(self.node, peer), mode=0o755, exist_ok=True)
        path = self._path(self.node, peer, name)
        try:
            with open(f"{path}.part", "wb", opener=_readable) as file:
                file.write(content)
            os.rename(f"{path}.part", path)
        except BaseException:
            _remove(f"{path}.part")
            raise

    def remove(self, peer: str, name: str) -> None:
        """Remove a file of this node's own, if it is there."""
        _remove(self._path(self.node, peer, name))

    def get(self, peer: str, name: str) -> bytes | None:
        """What a peer wrote for this node under a name; None where that is not there, or not the peer's."""
        if not self.is_genuine(peer):
            return None
        try:
            fd = os.open(self._path(peer, self.node, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        with open(fd, "rb") as file:
            there = os.fstat(fd)
            owner = os.stat(os.path.join(self.folder, peer)).st_uid
            if not stat.S_ISREG(there.st_mode) or there.st_uid != owner or there.st_size > MAX_BYTES:
                return None
            return file.read()

    def take(self, peer: str) -> list[tuple[str, bytes]]:
        """A peer's new requests, each by its id, marked as taken before they are handed out."""
        requests = []
        standing = self._requests(peer) if self.is_genuine(peer) else set()
        handled = self._own(peer)
        for one in sorted(standing - handled.keys()):
            content = self.get(peer, f"{one}.request")
            if content is not None:
                self.put(peer, f"{one}.taken", b"")
                requests.append((one, content))
        for gone in handled.keys() - standing:
            for name in handled[gone]:
                self.remove(peer, name)
        return requests

    def _requests(self, peer: str) -> set[str]:
        """The ids of a peer's requests to this node that stand."""
        return {found[1] for name in _names(self._path(peer, self.node)) if (found := _REQUEST.fullmatch(name))}

    def _own(self, peer: str) -> dict[str, list[str]]:
        """What this node wrote in answer to a peer, by request id."""
        files: dict[str, list[str]] = {}
        for name in _names(self._path(self.node, peer)):
            one, _, kind = name.partition(".")
            if kind in ("taken", "answer"):
                files.setdefault(one, []).append(name)
        return files

    def answer(self, peer: str, one: str, content: bytes) -> None:
        """Answer a request, if its writer still wants that."""
        if os.path.exists(self._path(peer, self.node, f"{one}.request")):
            self.put(peer, f"{one}.answer", content)


def _readable(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
