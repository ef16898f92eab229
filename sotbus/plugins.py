"""The plugins that the config names, and no other; one typed method per hook, so that nobody else touches the relay.

Each implementation is called by itself, in the order of the config's list: one that raises is named, with its
distribution, and the others are asked all the same.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from importlib import metadata
from typing import Any

import pluggy

from sotbus import hookspecs
from sotbus.comm.identity import NONE, identity_of
from sotbus.comm.mounts import Mount
from sotbus.contracts import BoxFacts, Delivery, Harness, LockManager, Waker
from sotbus.errors import ConfigError, PluginError
from sotbus.guards import GuardedDelivery, GuardedHarness, GuardedLockManager, GuardedTransport, GuardedWaker, hint_of
from sotbus.typed_table import typed_table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.config import Config

GROUP = "sotbus"
"""The entry-point group."""

PAGE_IDENTITIES = ("local ", "nfs4 ", NONE)
"""How the page's own lock managers' identities begin."""


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
        self._callers: dict[tuple[str, str], pluggy.HookCaller] = {}

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

    @classmethod
    def configured(cls, config: Config, report: Report) -> Plugins:
        """Load what the config names, each with its own table as its own type.

        *Errors*: as :meth:`load`; :class:`ConfigError` for a table that its plugin's type does not take, or that
        belongs to a plugin without settings.
        """
        plugins = cls.load(config.plugins, report)
        types = plugins.settings_types()
        path = config.path or "the config"
        for name, kind in types.items():
            table = config.plugin_tables.get(name, {})
            plugins.settings[name] = typed_table(path, name, table, config.lines, kind)
        for name in config.plugin_tables:
            if name not in types:
                raise ConfigError(f"{path}: [plugin.{name}] belongs to a plugin that has no settings")
        return plugins

    def _add(self, name: str) -> None:
        installed = entry_points()
        offers = [point for point in installed if point.name == name]
        if not offers:
            known = sorted({point.name for point in installed})
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
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"plugin {name!r} ({_distribution(point)}) cannot be imported from {point.value}: {_cause(error)}"
            ) from error
        self.add(name, plugin, _distribution(point))

    def add(self, name: str, plugin: object, distribution: str = "no distribution") -> None:
        """Register a plugin object under a name. *Errors*: :class:`PluginError`, as :meth:`load`."""
        if any(one.name == name for one in self.loaded):
            raise PluginError(f"plugin {name!r} ({distribution}): the name is taken by another loaded plugin")
        self._callers.clear()
        try:
            hash(plugin)
            self._manager.register(plugin, name)
            self._manager.check_pending()
        except (TypeError, ValueError, pluggy.PluginValidationError) as error:
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

        A manager whose identity is not the page's own counts only where the page says ``none@`` of the mount, and may
        not claim one of the page's identities there.
        """
        page = identity_of(mount, machine_id)
        asked = {"mount": mount, "machine_id": machine_id}
        for one, manager in self._each("sotbus_lock_manager", lambda _: asked):
            guarded = GuardedLockManager(one.described, manager)
            try:
                identity = guarded.identity
            except PluginError as error:
                self._report(error)
                continue
            if identity == page:
                return guarded
            if page.startswith(f"{NONE}@") and identity.startswith(PAGE_IDENTITIES):
                self._report(
                    PluginError(f"{one.described}: its lock manager claims {identity!r}, but this is {page!r}")
                )
            elif page.startswith(f"{NONE}@"):
                return guarded
        return None

    def deliveries(self, box: BoxFacts) -> list[tuple[str, Delivery]]:
        """Every plugin's way to reach mailboxes, by plugin name, in the config's order."""
        from sotbus.link_delivery import LinkDelivery

        found: list[tuple[str, Delivery]] = []
        for one, made in self._each("sotbus_delivery", lambda name: {"box": self.facts_of(box, name)}):
            if isinstance(made, LinkDelivery):  # ours, over the plugin's own transport
                made.transport = GuardedTransport(one.described, made.transport, self._report)
                found.append((one.name, made))
            else:
                found.append((one.name, GuardedDelivery(one.described, made, self._report)))
        return found

    def wakers(self, box: BoxFacts) -> list[tuple[str, Waker]]:
        """Every plugin's way to tell an idle session, by plugin name, in the config's order."""
        found = self._each("sotbus_wake", lambda name: {"box": self.facts_of(box, name)})
        return [(one.name, GuardedWaker(one.described, made, self._report)) for one, made in found]

    def harnesses(self) -> list[tuple[str, Harness]]:
        """Every plugin's kind of session, by plugin name, in the config's order."""
        found = self._each("sotbus_harness", lambda _: {})
        return [(one.name, GuardedHarness(one.described, made, self._report)) for one, made in found]

    def facts_of(self, box: BoxFacts, name: str) -> BoxFacts:
        """The box as it is told to one plugin: with that plugin's settings."""
        return dataclasses.replace(box, settings=self.settings.get(name))

    def _each(self, hook: str, arguments: Callable[[str], dict[str, Any]]) -> Iterator[tuple[Loaded, Any]]:
        """Every plugin's own answer to a hook, in order, asked one by one; None is left out, a raise is reported."""
        for one in self.loaded:
            if hook not in one.hooks:
                continue
            try:
                answer = self._caller(hook, one.name)(**arguments(one.name))
            except Exception as error:
                self._report(PluginError(f"{one.described}: {hook} raised {_cause(error)}", hint=hint_of(error)))
                continue
            if isinstance(answer, list):  # a hook without firstresult answers a list of what is not None
                answer = answer[0] if answer else None
            if isinstance(answer, Coroutine):
                answer.close()
                self._report(PluginError(f"{one.described}: {hook} is async; a hook is a plain function"))
            elif answer is not None:
                yield one, answer

    def _caller(self, hook: str, name: str) -> pluggy.HookCaller:
        """What calls one plugin's implementation of a hook and no other's."""
        caller = self._callers.get((hook, name))
        if caller is None:
            others = [plugin for other, plugin in self._manager.list_name_plugin() if other != name]
            caller = self._callers[hook, name] = self._manager.subset_hook_caller(hook, others)
        return caller


def entry_points() -> list[metadata.EntryPoint]:
    """Every installed plugin's entry point, none imported.

    Of two copies of a distribution the first on the path counts, as it does for imports. One whose metadata cannot be
    read offers nothing: a broken plugin that nobody named has no effect.
    """
    found: dict[str, list[metadata.EntryPoint]] = {}
    for dist in metadata.distributions():
        try:
            name = dist.metadata["Name"]
            points = [point for point in dist.entry_points if point.group == GROUP]
        except Exception:
            continue
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), points)
    return [point for points in found.values() for point in points]


def _distribution(point: metadata.EntryPoint) -> str:
    dist = point.dist
    return f"{dist.metadata['Name']} {dist.version}" if dist is not None else "no distribution"


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
