"""``sotbus serve``: run this box's node, or say whether it could run."""

from __future__ import annotations

import os

from sotbus.cli import options, terminal
from sotbus.errors import EX_FAILED, SotbusError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.comm.box import Box
    from sotbus.errors import PluginError
    from sotbus.node.setup import Setup


GC_OBJECTS = 20_000
"""New objects between two looks of Python's garbage collector at the young ones (gc, set_threshold).

The default, 700, is reached every few filings, and took a fifth of the node's time under load; what a filing leaves
behind is freed without it.
"""


def run_serve(words: list[str], box: Box | None) -> int:
    """Serve until a signal ends it. *Errors*: SotbusError: it did not start."""
    del box  # a node is of the machine that it runs on
    made = options.parser(
        "serve",
        "Run this box's node: it answers on a private socket, files mail that a session may not file itself, keeps the "
        "sessions of this box live, and holds the links to other boxes. One a user, box and comm folder.",
        "  sotbus serve            in the foreground; events go to standard error, one a line\n"
        "  sotbus serve --check    say whether it could start, and with what, and end\n\n"
        "signals: TERM and INT end it, once what is under way is answered; HUP reads the peers file again",
    )
    made.add_argument("--check", action="store_true", help="judge config, plugins, keys, folder and socket, and end")
    made.add_argument("--log", metavar="FILE", help="append events to this file instead of standard error")
    made.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="the least that is logged"
    )
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    from sotbus.node.setup import read

    troubles: list[PluginError] = []
    setup = read(os.environ, None, troubles)
    if given.check:
        return _check(setup)
    for trouble in troubles:
        terminal.tell(trouble, "warning: ")
    return _serve(setup, given.log, given.log_level)


def _serve(setup: Setup, path: str | None, level: str) -> int:
    import gc

    import trio

    from sotbus.node.log import EventLog, Sink
    from sotbus.node.node import Node
    from sotbus.node.sd_notify import Notifier

    with EventLog(Sink(path) if path else None, level=level) as log:
        node = Node(setup, log, Notifier(os.environ))
        gc.freeze()  # the program itself is not looked at again
        gc.set_threshold(GC_OBJECTS)
        try:
            trio.run(node.run)
        except BaseExceptionGroup as group:
            refused, others = group.split(SotbusError)
            if others is not None:
                log.exception("ended by an error", others)
            if refused is not None:
                for error in _leaves(refused):
                    terminal.tell(error)
            return EX_FAILED
    return 0


def _leaves(group: BaseException) -> list[SotbusError]:
    if isinstance(group, BaseExceptionGroup):
        return [leaf for one in group.exceptions for leaf in _leaves(one)]
    return [group] if isinstance(group, SotbusError) else []


def _check(setup: Setup) -> int:
    """Every part that a start would need, a line each; nothing is written and nothing listens."""
    from sotbus.node.checking import FAULT, checks

    status = 0
    for line in checks(setup):
        if line.level == FAULT:
            status = EX_FAILED
        level = f"{line.level}: " if line.level else ""
        terminal.out(f"{line.name:<10} {level}{terminal.shown(line.said)}")
        if line.hint:
            terminal.out(f"{'':<10} hint: {terminal.shown(line.hint)}")
    terminal.flush()
    return status
