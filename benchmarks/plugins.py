"""What the façade costs: a hook call through it, beside pluggy's own relay and the plugins' functions called by hand.

The façade calls each plugin by itself and guards what it answers, so that one that raises is named and the others go
on; that is what is paid for. A hook is called when a folder is first used and at the start, never for a message.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

import pluggy

from benchmarks.harness import paired, ratio, verdict
from sotbus import hookspecs
from sotbus.api import BoxFacts, WakeOutcome, hookimpl
from sotbus.plugins import Plugins

PLUGINS = 4
CALLS = 50
"""Calls in one timed round: one alone is too short for the clock."""

ROUNDS = 200
BOX = BoxFacts("vm", "u", "0" * 32, "/comm")


class Bell:
    """A waker of which nobody asks anything."""

    def facts(self, environ: Mapping[str, str]) -> dict[str, str]:
        return dict(environ)

    async def wake(self, recipient: Mapping[str, str], unread: int) -> WakeOutcome:
        return WakeOutcome.WOKEN if recipient and unread else WakeOutcome.REFUSED


class Plugin:
    """A plugin that answers at once."""

    def __init__(self) -> None:
        self.bell = Bell()

    @hookimpl
    def sotbus_wake(self, box: BoxFacts) -> Bell | None:
        return self.bell if box.host else None


def facade(base: Path) -> bool:
    """One hook of four plugins that all answer, no I/O."""
    del base
    own = [Plugin() for _ in range(PLUGINS)]
    plugins = Plugins(print)
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for number, plugin in enumerate(own):
        plugins.add(f"plugin-{number}", plugin, "benchmark 1.0")
        manager.register(plugin)

    def through() -> None:
        for _ in range(CALLS):
            plugins.wakers(BOX)

    def relay() -> None:
        for _ in range(CALLS):
            manager.hook.sotbus_wake(box=BOX)

    def by_hand() -> None:
        for _ in range(CALLS):
            for one in own:
                one.sotbus_wake(BOX)

    ours, relays = paired(through, relay, ROUNDS)
    _, bare = paired(through, by_hand, ROUNDS)
    print(
        f"sotbus_wake of {PLUGINS} plugins: façade {us(ours)}, {us(ours, PLUGINS)} a plugin; "
        f"pluggy's relay {us(relays)}; by hand {us(bare)}"
    )
    return verdict("façade / pluggy's relay", ratio(ours, relays), 25.0)


def us(rounds: list[float], plugins: int = 1) -> str:
    """Median of a call in microseconds. :param rounds: seconds of so many calls each."""
    return f"{statistics.median(rounds) / CALLS / plugins * 1e6:.2f} µs"
