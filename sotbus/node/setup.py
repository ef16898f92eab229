"""Everything that a node needs to know before it serves, read and judged; ``sotbus serve --check`` stops here."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sotbus import config as configuration
from sotbus.assembly import assemble
from sotbus.comm import manager_record
from sotbus.comm.box import Box, host_problem
from sotbus.comm.client import Client
from sotbus.comm.daemon import SOCKET, Daemon, NoDaemonError
from sotbus.comm.runtime_folder import runtime_folder
from sotbus.contracts import BoxFacts
from sotbus.errors import ConfigError, FolderError
from sotbus.node.store_file import state_folder
from sotbus.peers import Peer, peers_file
from sotbus.peers import read as read_peers
from sotbus.plugins import Plugins

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sotbus.config import Config
    from sotbus.errors import PluginError

DATABASE = "node.db"


@dataclass(frozen=True)
class Setup:
    """One node's box, folder, plugins, peers and places.

    :param user: of the operating system; the node's name is ``<user>.<host>``.
    :param make_client: makes a client of the comm folder for one thread.
    :param troubles: takes the error of each plugin that raised where the others go on.
    """

    environ: Mapping[str, str]
    config: Config
    box: Box
    user: str
    make_client: Callable[[], Client]
    plugins: Plugins
    peers: tuple[Peer, ...]
    peers_path: str
    runtime: str
    socket: str
    store: str
    troubles: list[PluginError]

    @property
    def name(self) -> str:
        """The node's name."""
        return f"{self.user}.{self.box.declared_host}"

    def facts(self, peers: tuple[Peer, ...] | None = None) -> BoxFacts:
        """The box as a plugin's hooks are told of it."""
        return BoxFacts(
            self.box.declared_host,
            self.user,
            self.box.machine_id,
            self.make_client().folder.root,
            peers=self.peers if peers is None else peers,
            config_folder=configuration.config_folder(self.environ),
        )

    def read_peers(self) -> tuple[Peer, ...]:
        """The peers file as it is now. *Errors*: ConfigError."""
        return read_peers(self.peers_path)


def read(environ: Mapping[str, str], option: str | None, troubles: list[PluginError]) -> Setup:
    """Read a node's setup.

    :param option: the config file that a person named, or None.
    :param troubles: takes the error of a plugin that raised where the others go on.

    *Errors*: ConfigError, PluginError, FolderError: the node cannot start.
    """
    box = Box.here(environ)
    problem = host_problem(box.declared_host)
    if problem:
        raise FolderError(f"{problem}, so it cannot name a node", hint="set SOT_SELF_HOST to a plain host name")
    config = configuration.load(configuration.find(environ, box.declared_host, option))
    plugins = Plugins.configured(config, troubles.append)
    make = partial(_client, environ, config)
    client = make()
    peers_path = peers_file(configuration.config_folder(environ), box.declared_host)
    state = state_folder(environ, config.node_state, box.mountinfo())
    return Setup(
        environ,
        config,
        client.box,
        pwd.getpwuid(os.geteuid()).pw_name,
        make,
        plugins,
        read_peers(peers_path),
        peers_path,
        runtime_folder(environ),
        _socket(environ, config, box.declared_host),
        os.path.join(state, DATABASE),
        troubles,
    )


def _socket(environ: Mapping[str, str], config: Config, host: str) -> str:
    """Where the node listens: where its clients look for it. *Errors*: ConfigError for ``$SOT_SOCKET`` that is none."""
    try:
        return Daemon.own(environ, host, configured=config.node_socket).path
    except NoDaemonError as error:
        raise ConfigError(
            f"the node cannot listen where ${SOCKET} says: {error}", hint=f"unset {SOCKET}, or name a path in it"
        ) from error


def _client(environ: Mapping[str, str], config: Config) -> Client:
    return assemble(Box.here(environ), environ, config, lambda _: None, Client)


def claim_record(client: Client) -> str:
    """The lock record by the rules of facts 4.1, at a node's start; answers what was done, for a person.

    *Errors*: :class:`FilingFailed` where this box is the folder's hub and may not use the record: it serves all the
    same, and refuses every filing with these words.
    """
    return manager_record.establish(client.folder, client.box, replace=True, topology=client.topology)
