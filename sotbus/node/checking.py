"""``sotbus serve --check``: whether a node could start, part by part. Nothing is made, and nothing listens."""

from __future__ import annotations

import fcntl
import os
import socket
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from sotbus.comm import manager_record
from sotbus.comm.lock_manager import inbox_lock_manager
from sotbus.comm.runtime_folder import check_private_folder, check_socket_path
from sotbus.comm.topology import GUEST
from sotbus.errors import SotbusError
from sotbus.node import schema
from sotbus.node.sockets import lock_path, read_running
from sotbus.node.store_file import StoreError
from sotbus.peers import HUB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sotbus.comm.client import Client
    from sotbus.node.setup import Setup
    from sotbus.node.sockets import RunningNode

FAULT, WARNING = "FAULT", "WARNING"
"""A start would be refused; it would go ahead, and some mail would not."""

TCP = "tcp://"


class Line(NamedTuple):
    """What was judged, what is said of it, how bad that is (``""``: it is well), and what to do."""

    name: str
    said: str
    level: str = ""
    hint: str = ""


def checks(setup: Setup) -> Iterator[Line]:
    """Each part, in the order in which a start needs it."""
    client = setup.make_client()
    yield Line("node", setup.name)
    yield Line("config", setup.config.path or "none: defaults")
    yield from _plugins(setup)
    yield Line("folder", client.folder.root + ("" if os.path.isdir(client.folder.root) else " (will be made)"))
    yield _record(client)
    running, line = _socket(setup)
    yield line
    if running is None:
        yield from _listeners(setup)
    yield _state(setup)
    yield from _peers(setup, client)


def _plugins(setup: Setup) -> Iterator[Line]:
    names = [name for name, _ in setup.plugins.deliveries(setup.facts())]
    loaded = ", ".join(one.name for one in setup.plugins.loaded) or "none"
    yield Line("plugins", f"{loaded}; mail by {', '.join(names)}" if names else loaded)
    for trouble in setup.troubles:
        yield Line("plugins", str(trouble), FAULT, trouble.hint)


def _record(client: Client) -> Line:
    folder, box = client.folder, client.box
    manager = inbox_lock_manager(folder.inboxes, box)
    if manager is None:
        return Line("record", "to be made: the folder is not there yet")
    try:
        record = manager_record.read(folder)
    except OSError as error:
        return Line("record", f"{folder.manager_record} cannot be read: {error.strerror or error}", FAULT)
    if manager_record.allows(record, manager.identity):
        return Line("record", f"names this box's lock manager, {manager.identity}")
    if client.topology.role(manager.identity, box.declared_host) == GUEST:
        return Line("record", f"another box's; this one ({manager.identity}) hands its mail to the hub")
    if record is None or record.writer == box.machine_id:
        return Line("record", f"to be written: {manager.identity}")
    return Line("record", manager_record.refusal(folder, box, manager.identity, record), FAULT)


def _socket(setup: Setup) -> tuple[RunningNode | None, Line]:
    """The node that serves the socket now, if one does, and what is said of the socket."""
    try:
        check_socket_path(setup.socket)
        if os.path.isdir(os.path.dirname(setup.socket)):
            check_private_folder(os.path.dirname(setup.socket))
    except SotbusError as error:
        return None, Line("socket", str(error), FAULT, error.hint)
    running = running_node(setup.socket)
    if running is not None:
        return running, Line("socket", f"{setup.socket}: a node serves it now ({running})")
    if _answers(setup.socket):
        hint = "stop that one first, or name another socket: node.socket in the config"
        return None, Line("socket", f"another program listens on {setup.socket}", FAULT, hint)
    return None, Line("socket", setup.socket)


def running_node(path: str) -> RunningNode | None:
    """The node that serves a socket now. What one that was killed left there is not taken for it."""
    return read_running(lock_path(path)) if _answers(path) and _is_held(lock_path(path)) else None


def _is_held(path: str) -> bool:
    """Whether a node holds its lock file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _answers(path: str) -> bool:
    """Whether a process listens on a socket; nothing is sent."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:  # its backlog is full
            return True
        except OSError:
            return False
    return True


def _listeners(setup: Setup) -> Iterator[Line]:
    """Whether the addresses can be had that plugins are to listen on: a TCP address in a setting called ``listen``."""
    for name, settings in setup.plugins.settings.items():
        listen = getattr(settings, "listen", None)
        if not isinstance(listen, str) or not listen.startswith(TCP):
            continue
        trouble = _unbindable(listen)
        if trouble:
            hint = f"see which program has the port (ss -ltnp), or give [plugin.{name}] listen another one"
            said = f"the node cannot listen on {listen} now, and will try again and again: {trouble}"
            yield Line("listen", said, WARNING, hint)
        else:
            yield Line("listen", listen)


def _unbindable(listen: str) -> str:
    """Why ``tcp://ADDRESS:PORT`` cannot be bound, or ``""``. It is bound as a listener would, and given up unheard."""
    host, _, port = listen.removeprefix(TCP).rpartition(":")
    host = "0.0.0.0" if host == "*" else host.strip("[]")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection's TIME_WAIT is in no one's way
            probe.bind(where)
    except ValueError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _state(setup: Setup) -> Line:
    folder = os.path.dirname(setup.store)
    try:
        there = os.stat(folder)
    except FileNotFoundError:
        return Line("state", f"{folder} (will be made)")
    except OSError as error:
        return Line("state", f"{folder}: {error.strerror}", FAULT)
    if there.st_mode & 0o077 or there.st_uid != os.geteuid():
        return Line("state", f"{folder} is open to other users; run: chmod 700 {folder}", FAULT)
    try:
        _judge_store(setup.store)
    except SotbusError as error:
        return Line("state", str(error), FAULT, error.hint)
    return Line("state", folder)


def _judge_store(path: str) -> None:
    """The store by the schema's own check, read-only; nothing is said of one that is not there.

    Without a write-ahead log nobody has it open, and it is read as a file that does not change: SQLite would make that
    log to read it (SQLite, WAL, Read-Only Databases).

    *Errors*: StoreError, as a start has it.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NOFOLLOW))  # before SQLite opens it: fcntl(2) locks go with any close
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"the node's store {path} cannot be opened: {error.strerror or error}") from error
    still = "" if os.path.exists(path + "-wal") else "&immutable=1"
    with schema.sqlite_errors(path):
        database = sqlite3.connect(f"file:{quote(os.fsencode(path))}?mode=ro{still}", uri=True, timeout=1)
        with closing(database):
            schema.check(database, path, len(schema.MIGRATIONS), whole=True)


def _peers(setup: Setup, client: Client) -> Iterator[Line]:
    links = ", ".join(f"{peer.name} ({peer.role})" for peer in setup.peers)
    yield Line("peers", f"{links or 'none'} (in {setup.peers_path})")
    why = "" if any(peer.role == HUB for peer in setup.peers) else _needs_hub(client)
    if why:
        hub = client.topology.hub or "HUB"
        hint = (
            f"sotbus keys trust USER.{hub} KEY --role hub --address tcp://{hub}:PORT; 'sotbus keys show' there has KEY"
        )
        yield Line("peers", f"none of them is the hub, and {why}", WARNING, hint)


def _needs_hub(client: Client) -> str:
    """What fails where this node has no link to a hub, or ``""`` where it needs none."""
    folder, box, topology = client.folder, client.box, client.topology
    manager = inbox_lock_manager(folder.inboxes, box)
    if manager is None:
        return ""  # what this box is, its folder's mount will say
    if topology.is_linked(manager.identity, box.declared_host):
        return "mail for sessions that this box does not list does not reach the topology's hub"
    try:
        own = manager_record.allows(manager_record.read(folder), manager.identity)
    except OSError:
        own = False
    if own or topology.role(manager.identity, box.declared_host) != GUEST:
        return ""
    return "this box is a guest: every send that its node is handed is FAILED"
