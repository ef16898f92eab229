"""``sotbus plugins``: which plugins the config loads, from where, and which hooks they have."""

from __future__ import annotations

import json
import os

from sotbus import config as configuration
from sotbus.cli import options, terminal
from sotbus.comm.box import Box as ThisBox
from sotbus.errors import EX_FAILED, ConfigError, PluginError, SotbusError
from sotbus.plugins import Plugins, entry_points

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from sotbus.comm.box import Box

NOT_LOADED = "not loaded"
BROKEN = "cannot be loaded"


class Row:
    """One plugin as it is printed.

    :param hooks: the hooks that it implements, or None where it was not imported.
    :param error: why it cannot be loaded, or None.
    """

    __slots__ = ("distribution", "error", "hooks", "module", "name", "version")

    def __init__(
        self,
        name: str,
        distribution: str = "",
        version: str = "",
        module: str = "",
        hooks: Sequence[str] | None = None,
        error: PluginError | None = None,
    ) -> None:
        self.name = name
        self.distribution = distribution
        self.version = version
        self.module = module
        self.hooks = hooks
        self.error = error

    def as_json(self) -> dict[str, object]:
        """The row as one object; what is not known is null."""
        return {
            "name": self.name,
            "loaded": self.hooks is not None,
            "distribution": self.distribution or None,
            "version": self.version or None,
            "module": self.module or None,
            "hooks": None if self.hooks is None else list(self.hooks),
            "error": str(self.error) if self.error else None,
        }

    def cells(self) -> tuple[str, str, str, str]:
        """The row as a person reads it: name, distribution and version, module, hooks or what became of it."""
        origin = f"{self.distribution} {self.version}".strip() or "-"
        state = BROKEN if self.error else NOT_LOADED
        if self.hooks is not None:
            state = ", ".join(self.hooks) or "no hooks"
        return self.name, origin, self.module or "-", state


def run_plugins(words: list[str], box: Box | None) -> int:
    made = options.parser(
        "plugins",
        "The plugins that the config names, in its order: distribution and version, module, and the hooks that each "
        "implements. One that cannot be loaded is an error that names it; the others are shown all the same.",
        "  sotbus plugins\n"
        "  sotbus plugins --all                             also what is installed and not named\n"
        "  sotbus plugins --json | jq -r '.[].distribution'\n\n"
        "exit status: 0 done, 1 a plugin cannot be loaded, 2 usage",
    )
    made.add_argument("--json", action="store_true", help="print one JSON array")
    made.add_argument("--all", action="store_true", help="also the installed plugins that the config does not name")
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    here = box or ThisBox.here(os.environ)
    config = configuration.load(configuration.find(os.environ, here.declared_host))
    rows, errors = _named(config)
    if given.all:
        rows += [row for row in _installed() if row.name not in config.plugins]
    if given.json:
        terminal.out(json.dumps([row.as_json() for row in rows], ensure_ascii=True))
    else:
        terminal.out(f"plugins of {terminal.shown(config.path or 'the defaults')}:")
        _table(rows)
    for error in errors:
        terminal.tell(error)
    return EX_FAILED if errors else 0


def _named(config: configuration.Config) -> tuple[list[Row], list[SotbusError]]:
    """A row for each plugin of the config, and what is wrong with them, each one's own fault before a common one."""
    rows: list[Row] = []
    errors: list[SotbusError] = []
    for name in config.plugins:
        try:
            (one,) = Plugins.load([name], errors.append).loaded
        except PluginError as error:
            errors.append(error)
            offers = [row for row in _installed() if row.name == name]
            found = offers[0] if len(offers) == 1 else Row(name)
            found.error = error
            rows.append(found)
        else:
            rows.append(Row(name, one.distribution, one.version, one.module, one.hooks))
    if not errors:
        try:
            Plugins.configured(config, errors.append)
        except (ConfigError, PluginError) as error:
            errors.append(error)
    return rows, errors


def _installed() -> list[Row]:
    """Every plugin that a distribution offers, by name, without importing any."""
    rows = []
    for point in entry_points():
        name, version = (point.dist.name, point.dist.version) if point.dist else ("", "")
        rows.append(Row(point.name, name, version, point.value))
    return sorted(rows, key=lambda row: row.name)


def _table(rows: Sequence[Row]) -> None:
    """Columns as wide as their widest value."""
    if not rows:
        terminal.out("  (none)")
        return
    lines = [[terminal.shown(cell) for cell in row.cells()] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    for row, (*cells, state) in zip(rows, lines, strict=True):
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        padded[0] = terminal.colour(padded[0], terminal.BOLD)
        if row.hooks is None:
            state = terminal.colour(state, terminal.RED if row.error else terminal.DIM)
        terminal.out(f"  {'  '.join([*padded, state])}")
