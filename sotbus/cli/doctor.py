"""``sotbus doctor``: one screen that says whether this box can do its job, and for each fault the remedy."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from sotbus import config as configuration
from sotbus.cli import options, terminal
from sotbus.cli.watchdog import watchdog
from sotbus.comm.box import Box
from sotbus.comm.folder import Folder
from sotbus.comm.topology import Topology
from sotbus.doctor import checkup, peer, probe
from sotbus.doctor.box_checks import loadable
from sotbus.doctor.check import FAULT, OK, SKIPPED, Check, counted
from sotbus.doctor.place import Place
from sotbus.errors import EX_FAILED, ConfigError, FolderError, PluginError, SotbusError, UsageError
from sotbus.lock_managers import resolve

COLOURS = {OK: terminal.GREEN, SKIPPED: terminal.DIM, FAULT: terminal.RED}


def run_doctor(words: list[str], box: Box | None) -> int:
    made = options.parser(
        "doctor",
        "Say whether this box can do its job, and for each fault the remedy. Reads only: nothing is changed, and no "
        "lock is waited for. With --probe, processes also prove that the lock excludes here, on files of their own; "
        "with --peer, run on two boxes at once that share the folder, that it excludes between them.",
        "  sotbus doctor\n"
        "  sotbus doctor --probe\n"
        "  sotbus doctor --probe --peer     on both boxes, the second within a minute\n"
        "  sotbus doctor --json | jq '.[] | select(.status == \"fault\")'\n\n"
        "exit status: 0 no fault, 1 a fault",
    )
    made.add_argument("--json", action="store_true", help="print one JSON array of {name, status, text, remedy}")
    made.add_argument("--probe", action="store_true", help="prove the lock with real processes; takes about 2 s")
    made.add_argument("--peer", action="store_true", help="prove it with another box, too; implies --probe")
    made.add_argument(
        "--wait", type=_seconds, metavar="SECONDS", help=f"how long --peer waits for the other box ({peer.WAIT_S:g})"
    )
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    if given.wait is not None and not given.peer:
        raise UsageError("sotbus doctor: --wait is how long --peer waits, so it needs --peer")
    place = place_here(box)
    watchdog.stop()  # each check and each proof has a bound of its own, and waits for the other box are long
    checks = list(checkup.run(place))
    verdict = ""
    progress = _Progress()
    try:
        if given.probe or given.peer:
            checks += probe.run(place, progress.say)
        if given.peer:
            wait_s = peer.WAIT_S if given.wait is None else given.wait
            answer = peer.run(place, checks, progress.say, progress.tell, wait_s)
            checks += answer.checks
            verdict = answer.verdict
    finally:
        progress.clear()
    if given.json:
        terminal.out(json.dumps([asdict(check) for check in checks], ensure_ascii=True))
        if verdict:
            terminal.err(terminal.shown(verdict))
    else:
        _print(place, checks)
        if verdict:
            terminal.out(terminal.colour(terminal.shown(verdict), terminal.BOLD))
    return EX_FAILED if any(check.status == FAULT for check in checks) else 0


def _seconds(text: str) -> float:
    """A number of seconds above 0. *Errors*: ArgumentTypeError, whose words the parser prints."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0, such as 60 or 0.5")
    return value


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
        topology=Topology.of(environ, config.hub, config.own_folder),
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
    """One line on standard error that is written over, where that is a terminal; elsewhere only what is told."""

    def __init__(self) -> None:
        self._shown = sys.stderr is not None and sys.stderr.isatty()

    def say(self, text: str) -> None:
        self._write(f"\r\x1b[Kprobing: {text} ...")

    def tell(self, text: str) -> None:
        """A line that stays, on a terminal or not."""
        self.clear()
        terminal.err(f"sotbus doctor: {terminal.shown(text)}")

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
