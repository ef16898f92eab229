"""What the doctor examines: one comm folder as one box sees it, read once a run and never written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sotbus import config as configuration
from sotbus.comm import registry_json
from sotbus.comm.box import Box
from sotbus.comm.folder import Folder
from sotbus.comm.handles import is_handle
from sotbus.comm.lock_manager import inbox_lock_manager
from sotbus.comm.mounts import Mount, mount_of
from sotbus.comm.registry import Registry, read_file
from sotbus.comm.topology import NO_TOPOLOGY, Topology
from sotbus.doctor.check import NotJudged
from sotbus.errors import RegistryUnreadable, SotbusError

if TYPE_CHECKING:
    from sotbus.comm.lock_manager import LockManager
    from sotbus.config import Config
    from sotbus.doctor.node_view import NodeView
    from sotbus.peers import Peer

PROBE_FILES = ".sotbus-probe-"
"""How the names of the probe's own files in ``inbox/`` begin; they are nobody's mail."""


class Place:
    """One comm folder, the box that looks at it, and what stood in the way of finding either.

    :param folder: None where it cannot be told which folder it is; ``folder_problem`` then says why.
    :param config_path: the config file that was found, or None for none.
    :param config_problem: why that file cannot be used.
    :param plugin_names: the plugins that the config names, or None for the page's own lock managers.
    :param plugins: judges the configured plugins: answers a sentence, or raises the SotbusError that is the fault.
    :param topology: whose comm folder it is; without one this box stands in for the folder's hub.
    :param environ: names the node's socket and the folder of the peers file; by default this process's environment.
    :param clock: seconds since the epoch.
    """

    def __init__(
        self,
        folder: Folder | None,
        box: Box,
        *,
        config_path: str | None = None,
        config_problem: SotbusError | None = None,
        folder_problem: str = "",
        plugin_names: Sequence[str] | None = None,
        plugins: Callable[[], str],
        topology: Topology = NO_TOPOLOGY,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.named_folder = folder
        self.box = box
        self.config_path = config_path
        self.config_problem = config_problem
        self.folder_problem = folder_problem
        self.plugin_names = plugin_names
        self.plugins = plugins
        self.topology = topology
        self.environ = os.environ if environ is None else environ
        self.clock = clock

    def __repr__(self) -> str:
        return f"<Place {self.named_folder} on {self.box.declared_host}>"

    @cached_property
    def folder(self) -> Folder:
        """The comm folder, where it is one. *Errors*: :class:`NotJudged`."""
        if self.named_folder is None:
            raise NotJudged("which folder to look at is not known (see folder)")
        if not os.path.isdir(self.named_folder.root):
            raise NotJudged("there is no comm folder (see folder)")
        return self.named_folder

    @cached_property
    def mount(self) -> Mount:
        """The mount of the inboxes. *Errors*: :class:`NotJudged` where it cannot be told."""
        text = self.box.mountinfo()
        found = mount_of(os.path.realpath(self.folder.inboxes), text) if text else None
        if found is None:
            raise NotJudged(f"the mount of {self.folder.inboxes} cannot be told from {self.box.mountinfo_path}")
        return found

    @cached_property
    def lock_manager(self) -> LockManager | None:
        """This box's lock manager for the inboxes, None where it cannot be told. *Errors*: :class:`NotJudged`."""
        return inbox_lock_manager(self.folder.inboxes, self.box)

    @property
    def identity(self) -> str | None:
        """The identity of that lock manager, None where it cannot be told. *Errors*: :class:`NotJudged`."""
        return self.lock_manager.identity if self.lock_manager is not None else None

    @property
    def role(self) -> str:
        """This box's role in the folder, ``HUB`` or ``GUEST``. *Errors*: :class:`NotJudged`."""
        return self.topology.role(self.identity, self.box.declared_host)

    @property
    def role_described(self) -> str:
        """The role as the end of a sentence; ``""`` where no topology is configured. *Errors*: :class:`NotJudged`."""
        described = self.topology.described(self.identity, self.box.declared_host)
        return described and f"; {described}"

    @cached_property
    def config(self) -> Config:
        """The config file's settings. *Errors*: :class:`NotJudged` where they cannot be used, ConfigError."""
        if self.config_problem is not None:
            raise NotJudged("the config, which may name a topology and the node's socket, cannot be used (see config)")
        return configuration.load(self.config_path)

    @cached_property
    def node(self) -> NodeView:
        """This box's node, asked once a run, for two seconds at most. *Errors*: as :attr:`config`."""
        from sotbus.doctor.node_view import look

        return look(self.environ, self.box.declared_host, self.config.node_socket)

    @cached_property
    def relay(self) -> NodeView:
        """The daemon at the hub's address (``$SOT_RELAY_ENDPOINT``), asked as :attr:`node` is."""
        from sotbus.doctor.node_view import look_at_relay

        return look_at_relay(self.environ, self.box.declared_host)

    @cached_property
    def peers(self) -> Sequence[Peer]:
        """The nodes that this box's peers file names; none without a file. *Errors*: ConfigError."""
        from sotbus.peers import peers_file, read

        return read(peers_file(configuration.config_folder(self.environ), self.box.declared_host))

    @cached_property
    def registry_text(self) -> bytes:
        """The registry's bytes, ``b""`` for an empty one that stays so. *Errors*: :class:`NotJudged`."""
        try:
            if os.path.isfile(self.folder.registry):
                Registry(self.folder, self.box).read()  # its tries: one that is empty for a moment is not called empty
        except RegistryUnreadable:
            pass  # which of its reasons it is, the bytes say
        try:
            return read_file(self.folder.registry)
        except OSError as error:
            raise NotJudged("the registry cannot be read (see registry)") from error

    @cached_property
    def agents(self) -> dict[str, Any]:
        """The registry's entries. *Errors*: :class:`NotJudged` where there are none to be had."""
        try:
            agents: dict[str, Any] = registry_json.parse(self.registry_text)["agents"]
        except registry_json.NotARegistryError as error:
            raise NotJudged("the registry cannot be read (see registry-empty, registry-json)") from error
        return agents

    def handles_in(self, name: str, ending: str) -> list[str]:
        """The handles that have a file in a part of the folder: ``inbox`` and ``.jsonl``, ``read`` and ``.cursor``."""
        handles = [leaf.removesuffix(ending) for leaf in self.names_in(name) if leaf.endswith(ending)]
        return [handle for handle in handles if is_handle(handle) and not handle.startswith(PROBE_FILES)]

    def names_in(self, name: str) -> list[str]:
        """The sorted names in a part of the folder. *Errors*: :class:`NotJudged` where it cannot be listed."""
        try:
            return sorted(os.listdir(f"{self.folder.root}/{name}"))
        except OSError as error:
            raise NotJudged(f"{name}/ cannot be listed (see folder-parts)") from error
