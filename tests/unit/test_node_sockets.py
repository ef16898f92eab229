"""A node's place on its box: the runtime folder, the locks that keep a second node away, and its private sockets."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import re
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from tools import skip_or_fail

import sotbus
from sotbus.comm import runtime_folder
from sotbus.comm.runtime_folder import Peer, check_socket_path, make_private_folder, peer_of, socket_path
from sotbus.errors import FolderError
from sotbus.node import sockets
from sotbus.node.sockets import (
    NodeLock,
    NodeRunsError,
    RunningNode,
    folder_lock_paths,
    lock_path,
    open_unix_listener,
    read_running,
)
from sotbus.node.unix_stream import UnixStream

UID = os.geteuid()
STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"

as_root = pytest.mark.skipif(UID != 0, reason="only root can act as another user")


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a path short enough for sockets, in which every runtime folder lies."""
    path = Path(tempfile.mkdtemp(prefix="sotbus-"))
    monkeypatch.setattr(runtime_folder, "RUN_USER", str(path / "user"))
    monkeypatch.setattr(runtime_folder, "TMP", str(path / "tmp"))
    (path / "tmp").mkdir()
    yield path
    shutil.rmtree(path)


class Place:
    """A box with a runtime folder and comm folders, and nodes that want a place on it."""

    def __init__(self, base: Path) -> None:
        self.runtime = base / "sotbus"
        self.socket = self.runtime / "sotbus.sock"
        self.comm = base / "comm"
        self.comm.mkdir()

    def take(self, *, socket: Path | None = None, comm: Path | None = None) -> NodeLock:
        return NodeLock.take(str(socket or self.socket), str(comm or self.comm), str(self.runtime), "vm")

    def locks(self) -> list[str]:
        return sorted(path.name for path in self.runtime.glob("*.lock"))


@pytest.fixture
def place(base: Path) -> Place:
    return Place(base)


# The runtime folder


def test_the_runtime_folder_is_the_variables_else_the_users_else_a_temporary_one(base: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(base)}
    assert runtime_folder.runtime_folder(environ) == f"{base}/sotbus"
    assert socket_path(environ) == f"{base}/sotbus/sotbus.sock"
    assert runtime_folder.runtime_folder({}) == f"{base}/tmp/sotbus-{UID}"
    (base / "user" / str(UID)).mkdir(parents=True)
    assert runtime_folder.runtime_folder({}) == f"{base}/user/{UID}/sotbus"
    assert runtime_folder.runtime_folder(environ) == f"{base}/sotbus"


def test_a_variable_that_names_no_folder_of_ones_own_is_passed_over(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base / "file").touch()
    (base / "relative").mkdir()
    monkeypatch.chdir(base)
    for bad in ("", "relative", str(base / "none"), str(base / "file"), f"{base}\0x"):
        assert runtime_folder.runtime_folder({"XDG_RUNTIME_DIR": bad}) == f"{base}/tmp/sotbus-{UID}", bad
    monkeypatch.setattr(os, "geteuid", lambda: UID + 1)  # as under sudo, which keeps the variable
    assert runtime_folder.runtime_folder({"XDG_RUNTIME_DIR": str(base)}) == f"{base}/tmp/sotbus-{UID + 1}"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_a_folder_for_sockets_is_made_private_whatever_the_umask(base: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_private_folder(str(base / "new"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((base / "new").stat().st_mode) == 0o700
    make_private_folder(str(base / "new"))


def problem(path: Path) -> FolderError:
    with pytest.raises(FolderError) as caught:
        make_private_folder(str(path))
    return caught.value


def test_a_folder_that_is_not_private_is_refused_and_left_as_it_is(base: Path) -> None:
    for mode in (0o755, 0o710, 0o702):
        (base / "loose").mkdir(exist_ok=True)
        (base / "loose").chmod(mode)
        error = problem(base / "loose")
        assert str(error) == f"the folder for sockets {base}/loose is open to other users (mode 0{mode:o})"
        assert error.hint == f"chmod 700 {base}/loose"
        assert stat.S_IMODE((base / "loose").stat().st_mode) == mode


def test_a_link_a_file_and_what_cannot_be_made_are_refused(base: Path) -> None:
    (base / "there").mkdir(mode=0o700)
    (base / "link").symlink_to("there")
    (base / "dangling").symlink_to("nowhere")
    (base / "file").touch()
    assert str(problem(base / "link")) == f"the folder for sockets {base}/link is a symbolic link"
    assert str(problem(base / "dangling")) == f"the folder for sockets {base}/dangling is a symbolic link"
    assert not (base / "nowhere").exists()
    assert str(problem(base / "file")) == f"the folder for sockets {base}/file is not a folder"
    error = problem(base / "none" / "new")
    assert str(error) == f"the folder for sockets {base}/none/new cannot be made (No such file or directory)"
    assert "XDG_RUNTIME_DIR" in error.hint


def test_another_users_folder_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "theirs").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: UID + 1)
    assert str(problem(base / "theirs")) == (
        f"the folder for sockets {base}/theirs belongs to uid {UID}, not to this user (uid {UID + 1})"
    )


def test_a_path_too_long_for_a_socket_is_refused_with_both_lengths() -> None:
    check_socket_path("/" + "x" * 106)
    check_socket_path("/" + "\u00fc" * 53)
    for path in ("/" + "x" * 107, "/" + "\u00fc" * 53 + "x"):
        with pytest.raises(FolderError, match="has 108 bytes and the system takes 107"):
            check_socket_path(path)
    for path in ("relative.sock", "", "/folder/", "/nul\0"):
        with pytest.raises(FolderError, match="is not the absolute path of a socket"):
            check_socket_path(path)


class Credentials:
    """A socket whose other end is told."""

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option, size) == (socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return struct.pack("=iII", 7, 4_000_000_000, 9)


def test_a_peer_is_this_user_or_another_one_and_root_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = peer_of(Credentials())
    assert (peer.pid, peer.uid, peer.gid) == (7, 4_000_000_000, 9)
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_000)
    assert peer.is_this_user
    assert not Peer(7, 0, 0).is_this_user
    assert not Peer(7, 9, 4_000_000_000).is_this_user


# A second node


def running(error: NodeRunsError) -> RunningNode:
    assert error.node is not None
    return error.node


def test_a_second_node_on_the_same_socket_is_refused_and_names_the_first(place: Place, base: Path) -> None:
    first = place.take()
    (base / "other").mkdir()
    with pytest.raises(NodeRunsError) as caught:
        place.take(comm=base / "other")
    error = caught.value
    assert re.fullmatch(
        f"a node serves the socket {place.socket} already: "
        f"pid {os.getpid()} on vm, comm folder {place.comm}, socket {place.socket}, since {STAMP}",
        str(error),
    )
    assert (error.code, error.exit_status) == ("conflict", 1)
    assert error.hint == f"stop that one first: kill {os.getpid()}"
    assert running(error) == first.node
    first.release()
    place.take(comm=base / "other").release()


def test_a_second_node_on_the_same_comm_folder_is_refused_though_its_socket_is_another(
    place: Place, base: Path
) -> None:
    first = place.take()
    (base / "elsewhere").mkdir(mode=0o700)
    (base / "link").symlink_to("comm")
    other = base / "elsewhere" / "mine.sock"
    for comm in (place.comm, base / "link", base / "elsewhere" / ".." / "comm"):
        with pytest.raises(NodeRunsError) as caught:
            place.take(socket=other, comm=comm)
        assert str(caught.value).startswith(f"a node serves the comm folder {comm} already: pid {os.getpid()} on vm, ")
        assert running(caught.value).socket == str(place.socket)
    assert list(other.parent.iterdir()) == []  # what it had taken before it was refused is given up
    first.release()
    place.take(socket=other).release()


def test_a_comm_folder_that_was_replaced_under_a_node_is_still_its_place(place: Place, base: Path) -> None:
    first = place.take()
    place.comm.rename(base / "moved")
    place.comm.mkdir()
    (base / "link").symlink_to("comm")
    for comm in (base / "link", base / "moved"):
        with pytest.raises(NodeRunsError, match="a node serves the comm folder"):
            place.take(socket=place.runtime / "b.sock", comm=comm)
    first.release()


def test_a_killed_nodes_longer_record_is_written_over_whole(place: Place) -> None:
    place.runtime.mkdir(mode=0o700)
    Path(lock_path(str(place.socket))).write_text("x" * 9999)
    lock = place.take()
    assert running_at(place) == lock.node
    lock.release()


def test_a_lock_file_that_is_removed_before_it_is_locked_is_not_the_one_that_is_held(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, paths = fcntl.flock, iter([lock_path(str(place.socket))])

    def late(fd: int, operation: int) -> None:
        for path in paths:
            os.unlink(path)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = place.take()
    with pytest.raises(NodeRunsError):
        place.take()
    lock.release()


def test_a_lock_file_that_is_removed_again_and_again_is_given_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lock_path(str(place.socket))
    gc.collect()  # what another test left to the collector is not to be closed in the middle of this one
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(fcntl, "flock", lambda _fd, _operation: os.unlink(path))
    with pytest.raises(FolderError, match=f"{path} cannot be locked \\(it is removed again and again\\)"):
        place.take()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_process_runs_that_can_be_seen() -> None:
    assert [sockets._runs(pid) for pid in (os.getpid(), 1, 0, -1, 2**22 + 1, 2**70)] == [
        True, True, False, False, False, False
    ]  # fmt: skip


@as_root
def test_a_comm_folder_behind_a_bind_mount_is_the_same(place: Place, base: Path) -> None:
    (base / "bound").mkdir()
    done = subprocess.run(["mount", "--bind", str(place.comm), str(base / "bound")], capture_output=True, check=False)
    if done.returncode != 0:
        skip_or_fail("this box lets nobody mount")
    try:
        first = place.take()
        with pytest.raises(NodeRunsError, match=f"a node serves the comm folder {base}/bound already"):
            place.take(socket=place.runtime / "b.sock", comm=base / "bound")
        first.release()
    finally:
        subprocess.run(["umount", str(base / "bound")], check=True)


def test_two_nodes_with_a_socket_and_a_comm_folder_each_do_not_disturb_each_other(place: Place, base: Path) -> None:
    (base / "other").mkdir()
    with_two = [place.take(), place.take(socket=place.runtime / "b.sock", comm=base / "other")]
    assert len(place.locks()) == 6
    for lock in with_two:
        lock.release()


def test_a_release_leaves_nothing_and_can_be_repeated(place: Place) -> None:
    lock = place.take()
    assert place.locks() == sorted(
        ["sotbus.lock", *(os.path.basename(path) for path in folder_lock_paths(str(place.runtime), str(place.comm)))]
    )
    for path in place.runtime.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lock.release()
    lock.release()
    assert list(place.runtime.iterdir()) == []
    assert repr(lock) == f"<NodeLock {place.socket}, released>"


NODE = """
import sys, trio
from sotbus.node.sockets import NodeLock, open_unix_listener
async def main():
    lock = NodeLock.take(*sys.argv[1:4], "vm")
    listener = await open_unix_listener(sys.argv[1])
    print(lock.node.since, flush=True)
    sys.stdin.read()
trio.run(main)
"""


@contextmanager
def node_elsewhere(place: Place) -> Iterator[subprocess.Popen[str]]:
    """A node in a process of its own, killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", NODE, str(place.socket), str(place.comm), str(place.runtime)],
        env=os.environ | {"PYTHONPATH": str(Path(sotbus.__file__).parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert re.fullmatch(STAMP + "\n", process.stdout.readline())
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_a_killed_nodes_locks_and_socket_are_taken_over_and_a_live_ones_never(place: Place) -> None:
    with node_elsewhere(place) as other:
        with pytest.raises(NodeRunsError) as caught:
            place.take()
        assert running(caught.value).pid == other.pid
        with pytest.raises(NodeRunsError, match=f"a process listens on {place.socket} already: pid {other.pid}, uid"):
            await open_unix_listener(str(place.socket))
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert place.socket.is_socket()
        assert len(place.locks()) == 3
    lock = place.take()
    async with await open_unix_listener(str(place.socket)):
        assert running_at(place) == lock.node
    lock.release()
    assert list(place.runtime.iterdir()) == []


def running_at(place: Place) -> RunningNode | None:
    return read_running(lock_path(str(place.socket)))


def test_a_node_that_is_just_starting_is_waited_for_until_it_has_a_name(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file still names a node that was killed: that name is not given out while it may change."""
    monkeypatch.setattr(sockets, "NAMED_WITHIN_S", 20)
    with node_elsewhere(place) as dead:
        pass
    path = lock_path(str(place.socket))
    stale = Path(path).read_bytes()
    first = place.take()
    live = Path(path).read_bytes()
    Path(path).write_bytes(stale)
    later = threading.Timer(0.1, Path(path).write_bytes, [live])
    later.start()
    with pytest.raises(NodeRunsError) as caught:
        place.take()
    later.join()
    assert running(caught.value) == first.node
    assert json.loads(stale)["pid"] == dead.pid
    first.release()


def test_a_node_without_a_name_is_refused_to_in_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "NAMED_WITHIN_S", 0.05)
    lock = place.take()
    path = lock_path(str(place.socket))
    for data in (b"", b"{", b"[]", b'{"pid":[]}', b"\xff"):
        Path(path).write_bytes(data)
        with pytest.raises(NodeRunsError) as caught:
            place.take()
        assert str(caught.value) == (
            f"another node is about to serve the socket {place.socket}, or to end; it holds {path}"
        )
        assert caught.value.node is None
    Path(path).write_text(
        '{"pid":-1,"host":"\x1b","comm_home":"c","socket":"s","since":"t"}'.replace("\x1b", "\\u001b")
    )
    with pytest.raises(NodeRunsError, match=r"pid -1 on \\x1b, comm folder c, socket s, since t"):
        place.take()
    lock.release()


def test_of_nodes_that_start_at_once_while_others_end_never_two_have_the_place(place: Place) -> None:
    inside, most, refused = [0], [0], [0]
    turn = threading.Lock()

    def work() -> None:
        for _ in range(150):
            try:
                lock = place.take()
            except NodeRunsError:
                refused[0] += 1
                continue
            with turn:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            with turn:
                inside[0] -= 1
            lock.release()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sockets, "NAMED_WITHIN_S", 0)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1]
    assert refused[0] > 0
    assert list(place.runtime.iterdir()) == []


def test_what_cannot_be_locked_is_said(place: Place, base: Path) -> None:
    place.runtime.mkdir(mode=0o700)
    path = lock_path(str(place.socket))
    os.symlink(base / "elsewhere", path)
    with pytest.raises(FolderError, match=f"the lock file {path} cannot be locked"):
        place.take()
    assert not (base / "elsewhere").exists()
    os.unlink(path)
    os.mkfifo(path)
    with pytest.raises(FolderError, match=f"the lock file {path} cannot be locked \\(it is not a regular file\\)"):
        place.take()
    os.unlink(path)
    with pytest.raises(FolderError, match=f"the comm folder {base}/none cannot be looked at"):
        place.take(comm=base / "none")
    assert place.locks() == []


def test_the_lock_lies_beside_the_socket_under_its_name() -> None:
    assert lock_path("/x/sotbus.sock") == "/x/sotbus.lock"
    assert lock_path("/x/other") == "/x/other.lock"


# The listener


async def echo(stream: UnixStream) -> None:
    async for data in stream:
        await stream.send_all(data)


@pytest.fixture
def path(base: Path) -> Path:
    (base / "run").mkdir(mode=0o700)
    return base / "run" / "sotbus.sock"


async def test_a_listener_serves_this_user_on_a_private_socket_and_takes_its_name_away_at_the_end(path: Path) -> None:
    async with trio.open_nursery() as nursery:
        listener = await open_unix_listener(str(path))
        await nursery.start(trio.serve_listeners, echo, [listener])
        assert stat.S_ISSOCK(path.lstat().st_mode)
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        for _ in range(3):
            async with await trio.open_unix_socket(str(path)) as client:
                await client.send_all(b"x")
                assert await client.receive_some() == b"x"
                peer = peer_of(client.socket)
                assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), UID, os.getegid())
                assert repr(peer) == f"<Peer pid {os.getpid()} uid {UID}>"
        assert repr(listener) == f"<UnixListener {path}: 3 accepted, 0 refused>"
        nursery.cancel_scope.cancel()
    assert not path.exists()


async def test_the_end_leaves_another_sockets_name_alone(path: Path) -> None:
    listener = await open_unix_listener(str(path))
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        await listener.aclose()
        assert path.is_socket()


async def test_another_user_is_cut_off_and_counted_and_the_next_one_is_served(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[Peer] = []
    users = iter([UID + 1, 0 if UID else 1, UID])

    def peer(sock: object) -> Peer:
        return Peer(7, next(users), 7)

    monkeypatch.setattr(sockets, "peer_of", peer)
    async with await open_unix_listener(str(path), on_refused=refused.append) as listener:
        clients = [await trio.open_unix_socket(str(path)) for _ in range(3)]
        async with await listener.accept() as served:
            await served.send_all(b"x")
            assert [await client.receive_some(1) for client in clients] == [b"", b"", b"x"]
        assert [peer.uid for peer in refused] == [UID + 1, 0 if UID else 1]
        assert (listener.accepted, listener.refused) == (1, 2)
        for client in clients:
            await client.aclose()


@as_root
async def test_a_process_of_another_user_that_gets_through_the_folder_is_cut_off(base: Path, path: Path) -> None:
    refused: list[Peer] = []
    code = (
        "import os,socket,sys; os.setgid(65534); os.setuid(65534); s=socket.socket(socket.AF_UNIX);"
        "s.connect(sys.argv[1]); s.settimeout(10); sys.exit(s.recv(1) != b'')"
    )
    async with trio.open_nursery() as nursery:
        listener = await open_unix_listener(str(path), on_refused=refused.append)
        await nursery.start(trio.serve_listeners, echo, [listener])
        for opened in (base, path.parent):
            opened.chmod(0o711)
        path.chmod(0o666)
        process = await trio.run_process([sys.executable, "-S", "-c", code, str(path)], cwd="/", check=False)
        assert process.returncode == 0
        assert [peer.uid for peer in refused] == [65534]
        nursery.cancel_scope.cancel()


async def test_a_socket_that_nobody_listens_on_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        async with await open_unix_listener(str(path)), await trio.open_unix_socket(str(path)):
            pass


async def test_a_socket_that_somebody_listens_on_is_never_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as live, socket.socket(socket.AF_UNIX) as first:
        live.bind(str(path))
        live.listen(0)
        inode = path.stat().st_ino
        with pytest.raises(NodeRunsError, match=f"already: pid {os.getpid()}, uid {UID}"):
            await open_unix_listener(str(path))
        live.accept()[0].close()
        first.connect(str(path))
        with pytest.raises(NodeRunsError, match="and accepts nothing"):
            await open_unix_listener(str(path))
        assert path.stat().st_ino == inode


async def test_what_is_no_socket_is_never_removed(path: Path, base: Path) -> None:
    path.write_text("keep")
    with pytest.raises(FolderError, match="is not a socket"):
        await open_unix_listener(str(path))
    assert path.read_text() == "keep"
    path.unlink()
    path.symlink_to(base / "elsewhere")
    with pytest.raises(FolderError, match="is not a socket"):
        await open_unix_listener(str(path))
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(str(path))
        with pytest.raises(FolderError, match="cannot be opened"):
            await open_unix_listener(str(path))
        assert path.is_socket()


async def test_a_listener_needs_a_private_folder_and_a_short_path(base: Path, path: Path) -> None:
    with pytest.raises(FolderError, match="and the system takes 107"):
        await open_unix_listener(str(base / ("x" * 100)))
    path.parent.chmod(0o750)
    with pytest.raises(FolderError, match="is open to other users"):
        await open_unix_listener(str(path))
    with pytest.raises(FolderError, match="cannot be looked at"):
        await open_unix_listener(str(base / "none" / "s.sock"))
    assert not path.exists()


async def test_a_listener_that_cannot_be_opened_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", failing)
    gc.collect()  # what another test left to the collector is not to be closed in the middle of this one
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FolderError, match=f"the socket {path} cannot be opened \\(Operation not permitted\\)"):
        await open_unix_listener(str(path))
    assert not path.exists()
    assert len(os.listdir("/proc/self/fd")) == len(before)
