"""``sotbus doctor``: one screen that says whether this box can do its job, and for each fault the remedy."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from sotbus import config as configuration
from sotbus.cli import options, terminal
from sotbus.comm.box import Box
from sotbus.comm.folder import Folder
from sotbus.doctor import checkup, probe
from sotbus.doctor.box_checks import loadable
from sotbus.doctor.check import FAULT, OK, SKIPPED, Check, counted
from sotbus.doctor.place import Place
from sotbus.errors import EX_FAILED, ConfigError, FolderError, PluginError, SotbusError
from sotbus.lock_managers import resolve

COLOURS = {OK: terminal.GREEN, SKIPPED: terminal.DIM, FAULT: terminal.RED}


def run_doctor(words: list[str], box: Box | None) -> int:
    made = options.parser(
        "doctor",
        "Say whether this box can do its job, and for each fault the remedy. Reads only: nothing is changed, and no "
        "lock is waited for. With --probe, processes also prove that the lock excludes here, on files of their own.",
        "  sotbus doctor\n"
        "  sotbus doctor --probe\n"
        "  sotbus doctor --json | jq '.[] | select(.status == \"fault\")'\n\n"
        "exit status: 0 no fault, 1 a fault",
    )
    made.add_argument("--json", action="store_true", help="print one JSON array of {name, status, text, remedy}")
    made.add_argument("--probe", action="store_true", help="prove the lock with real processes; takes about 2 s")
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    place = place_here(box)
    checks = list(checkup.run(place))
    if given.probe:
        progress = _Progress()
        try:
            checks += probe.run(place, progress.say)
        finally:
            progress.clear()
    if given.json:
        terminal.out(json.dumps([asdict(check) for check in checks], ensure_ascii=True))
    else:
        _print(place, checks)
    return EX_FAILED if any(check.status == FAULT for check in checks) else 0


def place_here(box: Box | None = None) -> Place:
    """What is to be examined, as the environment and the config say. Never raises: what stands in the way is kept.

    :param box: this machine, where it is not to be read.
    """
    environ = os.environ
    here = box or Box.here(environ)
    config, path, problem = configuration.Config(), None, None
    try:
        path = configuration.find(environ, here.declared_host)
        config = configuration.load(path)
    except ConfigError as error:
        problem = error
    if here.machine_id is None:
        here.machine_id = config.machine_id
    try:
        here.lock_managers = resolve(config.plugins, _reported_by_the_check)
    except (SotbusError, ImportError):
        here.lock_managers = ()  # the page's own rules then; the check of the plugins says what is wrong
    folder, why = None, ""
    if problem is not None and not environ.get("SOT_COMM_HOME"):
        why = "the config that may name the comm folder cannot be used (see config)"
    else:
        try:
            folder = Folder.of(environ, config.comm_home)
        except FolderError as error:
            why = str(error).removeprefix("FAILED: ")
    return Place(
        folder,
        here,
        config_path=path,
        config_problem=problem,
        folder_problem=why,
        plugin_names=config.plugins,
        plugins=lambda: loadable(config),
        stand_in=not environ.get("SOT_RELAY_ENDPOINT"),
    )


def _reported_by_the_check(error: PluginError) -> None:
    """Lock managers are asked again and again; the check of the plugins says once what one of them raised."""


def _print(place: Place, checks: Sequence[Check]) -> None:
    """What is sound, then what is at fault with its remedy, then one line that sums it up."""
    where = place.named_folder.root if place.named_folder is not None else "no comm folder"
    terminal.out(terminal.colour(terminal.shown(f"{where} on {place.box.declared_host}"), terminal.BOLD))
    width = max(len(check.name) for check in checks)
    for check in sorted(checks, key=lambda check: check.status == FAULT):
        status = terminal.colour(check.status.ljust(len(SKIPPED)), COLOURS[check.status])
        terminal.out(f"  {status}  {check.name:<{width}}  {terminal.shown(check.text)}")
        if check.remedy:
            terminal.out(f"  {'':<{len(SKIPPED)}}  {'':<{width}}  -> {terminal.shown(check.remedy)}")
    faults, skipped = (sum(check.status == status for check in checks) for status in (FAULT, SKIPPED))
    summary = counted(faults, "fault") if faults else "no fault"
    summary = terminal.colour(summary, terminal.RED if faults else terminal.GREEN)
    terminal.out(f"{summary} in {counted(len(checks) - skipped, 'check')}, {skipped} skipped")


class _Progress:
    """One line on standard error that is written over, where that is a terminal; nothing elsewhere."""

    def __init__(self) -> None:
        self._shown = sys.stderr is not None and sys.stderr.isatty()

    def say(self, text: str) -> None:
        self._write(f"\r\x1b[Kprobing: {text} ...")

    def clear(self) -> None:
        self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        if not self._shown:
            return
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):
            self._shown = False
