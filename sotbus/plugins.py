"""The plugins that the config names, and no other; one typed method per hook, so that nobody else touches the relay.

Each implementation is called by itself, in the order of the config's list: one that raises is named, with its
distribution, and the others are asked all the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any

import pluggy

from sotbus import hookspecs
from sotbus.comm.identity import NONE, identity_of
from sotbus.comm.mounts import Mount
from sotbus.contracts import BoxFacts, Delivery, Harness, LockManager, Waker
from sotbus.errors import PluginError
from sotbus.guards import GuardedDelivery, GuardedHarness, GuardedLockManager, GuardedWaker

GROUP = "sotbus"
"""The entry-point group."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """One loaded plugin: its name, where it comes from, and the hooks that it implements."""

    name: str
    distribution: str
    version: str
    module: str
    hooks: tuple[str, ...]

    @property
    def described(self) -> str:
        """The plugin and its distribution, as errors name it."""
        return f"plugin {self.name!r} ({self.distribution} {self.version})"


Report = Callable[[PluginError], None]


class Plugins:
    """The loaded plugins of one process.

    :param report: takes the error of a plugin that raised where the others go on; the error names the plugin.
    :param settings: typed tables by plugin name, handed to that plugin as ``box.settings``.
    """

    def __init__(self, report: Report, settings: Mapping[str, object] | None = None) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._report = report
        self.settings = dict(settings or {})
        self.loaded: list[Loaded] = []

    def __repr__(self) -> str:
        return f"<Plugins {', '.join(one.name for one in self.loaded) or 'none'}>"

    @classmethod
    def load(cls, names: Iterable[str], report: Report) -> Plugins:
        """Load the named plugins from their entry points.

        *Errors*: :class:`PluginError` naming plugin, distribution and cause: nobody offers the name, two distributions
        do, it raises at import, it has a hook that there is none of, or a hook's argument that there is none of.
        """
        plugins = cls(report)
        for name in names:
            plugins._add(name)
        return plugins

    def _add(self, name: str) -> None:
        offers = [point for point in metadata.entry_points(group=GROUP) if point.name == name]
        if not offers:
            known = sorted({point.name for point in metadata.entry_points(group=GROUP)})
            raise PluginError(
                f"plugin {name!r} is not installed; there are: {', '.join(known) or 'none'}",
                hint="install its distribution, or take it out of the config's plugins",
            )
        if len({_distribution(point) for point in offers}) > 1:
            both = " and ".join(sorted(_distribution(point) for point in offers))
            raise PluginError(f"plugin {name!r} is offered by {both}", hint="uninstall one of them")
        point = offers[0]
        try:
            plugin = point.load()
        except Exception as error:
            raise PluginError(
                f"plugin {name!r} ({_distribution(point)}) cannot be imported from {point.value}: {_cause(error)}"
            ) from error
        self.add(name, plugin, _distribution(point))

    def add(self, name: str, plugin: object, distribution: str = "no distribution") -> None:
        """Register a plugin object under a name. *Errors*: :class:`PluginError`, as :meth:`load`."""
        if any(one.name == name for one in self.loaded):
            raise PluginError(f"plugin {name!r} ({distribution}): the name is taken by another loaded plugin")
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()
        except (ValueError, pluggy.PluginValidationError) as error:
            if self._manager.get_plugin(name) is plugin:
                self._manager.unregister(name=name)
            raise PluginError(f"plugin {name!r} ({distribution}) does not fit: {_cause(error)}") from error
        hooks = tuple(sorted(caller.name for caller in self._manager.get_hookcallers(plugin) or []))
        title, _, version = distribution.partition(" ")
        module = getattr(plugin, "__name__", type(plugin).__name__)
        self.loaded.append(Loaded(name, title, version, module, hooks))

    def settings_types(self) -> dict[str, type]:
        """The type of each plugin's own TOML table, by plugin name."""
        found = {}
        for one, kind in self._each("sotbus_settings", lambda _: {}):
            if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
                self._report(PluginError(f"{one.described}: sotbus_settings answered {kind!r}, which is no dataclass"))
            else:
                found[one.name] = kind
        return found

    def lock_manager(self, mount: Mount | None, machine_id: str | None) -> LockManager | None:
        """The first plugin's that knows the mount, or None.

        A plugin whose identity is not the page's own is asked only where the page says ``none`` of the mount.
        """
        page = identity_of(mount, machine_id)
        asked = {"mount": mount, "machine_id": machine_id}
        for one, manager in self._each("sotbus_lock_manager", lambda _: asked):
            guarded = GuardedLockManager(one.described, manager)
            identity = guarded.identity
            if "\n" in identity or not identity:
                self._report(PluginError(f"{one.described}: its lock manager's identity {identity!r} is not one line"))
            elif identity == page or page.startswith(NONE):
                return guarded
        return None

    def deliveries(self, box: BoxFacts) -> list[tuple[str, Delivery]]:
        """Every plugin's way to reach mailboxes, by plugin name, in the config's order."""
        found = self._each("sotbus_delivery", lambda name: {"box": self._facts(box, name)})
        return [(one.name, GuardedDelivery(one.described, made, self._report)) for one, made in found]

    def wakers(self, box: BoxFacts) -> list[tuple[str, Waker]]:
        """Every plugin's way to tell an idle session, by plugin name, in the config's order."""
        found = self._each("sotbus_wake", lambda name: {"box": self._facts(box, name)})
        return [(one.name, GuardedWaker(one.described, made, self._report)) for one, made in found]

    def harnesses(self) -> list[tuple[str, Harness]]:
        """Every plugin's kind of session, by plugin name, in the config's order."""
        found = self._each("sotbus_harness", lambda _: {})
        return [(one.name, GuardedHarness(one.described, made, self._report)) for one, made in found]

    def _facts(self, box: BoxFacts, name: str) -> BoxFacts:
        return dataclasses.replace(box, settings=self.settings.get(name))

    def _each(self, hook: str, arguments: Callable[[str], dict[str, Any]]) -> list[tuple[Loaded, Any]]:
        """Every plugin's own answer to a hook, in order; None is left out, and one that raises is reported."""
        answers = []
        every = self._manager.get_plugins()
        for one in self.loaded:
            if hook not in one.hooks:
                continue
            plugin = self._manager.get_plugin(one.name)
            caller = self._manager.subset_hook_caller(hook, every - {plugin})
            try:
                answer = caller(**arguments(one.name))
            except Exception as error:
                self._report(PluginError(f"{one.described}: {hook} raised {_cause(error)}"))
                continue
            if isinstance(answer, list):  # a hook without firstresult answers a list of what is not None
                answer = answer[0] if answer else None
            if answer is not None:
                answers.append((one, answer))
        return answers


def _distribution(point: metadata.EntryPoint) -> str:
    dist = point.dist
    return f"{dist.metadata['Name']} {dist.version}" if dist is not None else "no distribution"


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
