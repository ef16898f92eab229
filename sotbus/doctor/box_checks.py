"""Checks of the box itself: its config, its plugins, its name, its machine id."""

from __future__ import annotations

from sotbus.comm.box import host_problem
from sotbus.doctor.check import Verdict, fault, some, sound
from sotbus.doctor.place import Place
from sotbus.errors import PluginError
from sotbus.plugins import Plugins

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.config import Config


def config(place: Place) -> Verdict:
    """The config file can be used, or there is none, which is as good."""
    problem = place.config_problem
    if problem is not None:
        return fault(str(problem), problem.hint or "see all that is wrong with it: sotbus config check")
    if place.config_path is None:
        return sound("there is no config file, so every setting has its default")
    return sound(f"{place.config_path} can be used")


def plugins(place: Place) -> Verdict:
    """What the configured plugins' own judge says. *Errors*: its SotbusError is the fault."""
    return sound(place.plugins())


def loadable(config: Config) -> str:
    """Judge the plugins that a config names by loading them, each with its own table; says which there are.

    *Errors*: :class:`PluginError`, naming the plugin and the cause, also for one that raises where the rest goes on;
    :class:`ConfigError` for a table that its plugin does not take.
    """
    reported: list[PluginError] = []
    Plugins.configured(config, reported.append)
    if reported:
        raise reported[0]
    return f"can be loaded: {some(config.plugins)}" if config.plugins else "the config names none"


def host_name(place: Place) -> Verdict:
    """The declared host can name files."""
    problem = host_problem(place.box.declared_host)
    if problem:
        return fault(f"{problem}, so it cannot name a self file", "set SOT_SELF_HOST to a plain host name")
    return sound(place.box.declared_host)


def machine_id(place: Place) -> Verdict:
    """The machine has an id, from /etc/machine-id or the config (decisions, sot-comm 2)."""
    if place.box.machine_id is None:
        return fault(
            "this machine has no machine id, so no mail can be filed here",
            "run: sotbus init (it puts an id into the config file, or says what to put there)",
        )
    return sound(place.box.machine_id)
