"""``sotbus serve --check``: whether a node could start, part by part. Nothing is made, and nothing listens."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sotbus.comm import manager_record
from sotbus.comm.lock_manager import inbox_lock_manager
from sotbus.comm.runtime_folder import check_private_folder, check_socket_path
from sotbus.comm.topology import GUEST
from sotbus.errors import SotbusError
from sotbus.node.sockets import lock_path, read_running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sotbus.comm.client import Client
    from sotbus.node.setup import Setup

Line = tuple[str, bool, str]
"""What was judged, whether it is a fault, and what is said of it."""


def checks(setup: Setup) -> Iterator[Line]:
    """Each part, in the order in which a start needs it."""
    client = setup.make_client()
    yield "node", False, setup.name
    yield "config", False, setup.config.path or "none: defaults"
    yield from _plugins(setup)
    yield "folder", False, client.folder.root + ("" if os.path.isdir(client.folder.root) else " (will be made)")
    yield _record(client)
    yield _socket(setup)
    yield _state(setup)
    links = ", ".join(f"{peer.name} ({peer.role})" for peer in setup.peers)
    yield "peers", False, f"{links or 'none'} (in {setup.peers_path})"


def _plugins(setup: Setup) -> Iterator[Line]:
    names = [name for name, _ in setup.plugins.deliveries(setup.facts())]
    yield "plugins", False, ", ".join(one.name for one in setup.plugins.loaded) + f"; mail by {', '.join(names)}"
    for trouble in setup.troubles:
        yield "plugins", True, str(trouble)


def _record(client: Client) -> Line:
    folder, box = client.folder, client.box
    manager = inbox_lock_manager(folder.inboxes, box)
    if manager is None:
        return "record", False, "to be made: the folder is not there yet"
    try:
        record = manager_record.read(folder)
    except OSError as error:
        return "record", True, f"{folder.manager_record} cannot be read: {error.strerror or error}"
    if manager_record.allows(record, manager.identity):
        return "record", False, f"names this box's lock manager, {manager.identity}"
    if client.topology.role(manager.identity, box.declared_host) == GUEST:
        return "record", False, f"another box's; this one ({manager.identity}) hands its mail to the hub"
    if record is None or record.writer == box.machine_id:
        return "record", False, f"to be written: {manager.identity}"
    return "record", True, manager_record.refusal(folder, box, manager.identity, record)


def _socket(setup: Setup) -> Line:
    try:
        check_socket_path(setup.socket)
        if os.path.isdir(os.path.dirname(setup.socket)):
            check_private_folder(os.path.dirname(setup.socket))
    except SotbusError as error:
        return "socket", True, str(error)
    running = read_running(lock_path(setup.socket)) if os.path.exists(setup.socket) else None
    if running is not None:
        return "socket", False, f"{setup.socket}: a node serves it now ({running})"
    return "socket", False, setup.socket


def _state(setup: Setup) -> Line:
    folder = os.path.dirname(setup.store)
    try:
        there = os.stat(folder)
    except FileNotFoundError:
        return "state", False, f"{folder} (will be made)"
    except OSError as error:
        return "state", True, f"{folder}: {error.strerror}"
    if there.st_mode & 0o077 or there.st_uid != os.geteuid():
        return "state", True, f"{folder} is open to other users; run: chmod 700 {folder}"
    return "state", False, folder
