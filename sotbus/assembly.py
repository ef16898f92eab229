"""A client put together from its config, machine, folder and bounds: one way for the commands and for programs."""

from __future__ import annotations

from sotbus import config as configuration
from sotbus.comm.client import Client
from sotbus.comm.folder import Folder
from sotbus.comm.settings import Settings
from sotbus.comm.topology import Topology
from sotbus.lock_managers import resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeVar

    from sotbus.comm.box import Box

    AnyClient = TypeVar("AnyClient", bound=Client)


def assemble(
    box: Box,
    environ: Mapping[str, str],
    config: configuration.Config,
    notify: Callable[[str], None],
    kind: Callable[..., AnyClient],
) -> AnyClient:
    """A client of this kind, as config and environment say.

    :param box: this machine; the config's machine id and the named plugins' lock managers are put into it.
    :param notify: takes a line for the person, the error of a plugin that raised among them.
    :param kind: makes the client from the arguments of :class:`Client`.

    *Errors*: FolderError, PluginError.
    """
    if box.machine_id is None:
        box.machine_id = config.machine_id
    box.lock_managers = resolve(config.plugins, lambda error: notify(str(error)))
    settings = Settings.of(
        environ,
        config.max_text_bytes,
        lock_wait_s=config.lock_wait_s,
        inbox_lock_wait_s=config.inbox_lock_wait_s,
        inbox_read_wait_s=config.inbox_read_wait_s,
        mount_wait_s=config.mount_wait_s,
        node_socket=config.node_socket,
    )
    folder = Folder.of(environ, config.comm_home)
    topology = Topology.of(environ, config.hub, config.own_folder)
    return kind(folder, box, environ, settings=settings, notify=notify, topology=topology)
