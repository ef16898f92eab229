"""The lock managers of the plugins that the config names, without pluggy where all of them are in the tree.

A cold command asks the in-tree plugins' own functions; as soon as the config names any other plugin, the façade is
asked instead. Both compute the same identity.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sotbus.comm.lock_manager import Factory
    from sotbus.errors import PluginError

IN_TREE = {"filesystem": "sotbus_filesystem.lock_manager", "nfs": "sotbus_nfs.lock_manager"}
"""In-tree plugins with a lock manager, and the module whose ``make`` answers it."""

WITHOUT = frozenset(["zmq"])
"""In-tree plugins that have none."""


def resolve(names: Sequence[str], report: Callable[[PluginError], None]) -> tuple[Factory, ...]:
    """What to ask, in order, for a mount's lock manager.

    *Errors*: :class:`PluginError` where a plugin that is not in the tree cannot be loaded.
    """
    if all(name in IN_TREE or name in WITHOUT for name in names):
        return tuple(__import__(IN_TREE[name], fromlist=["make"]).make for name in names if name not in WITHOUT)
    from sotbus.plugins import Plugins

    return (Plugins.load(names, report).lock_manager,)
