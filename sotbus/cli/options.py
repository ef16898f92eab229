"""The argument parser that commands other than ``send`` share."""

from __future__ import annotations

import argparse
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def parser(command: str, description: str, examples: str, *, usage_status: int = 2) -> argparse.ArgumentParser:
    """A parser for one command, with examples below its options and no abbreviated options.

    :param usage_status: exit status of a usage error (facts 14: 2 for join, 1 for leave).
    """

    class Parser(argparse.ArgumentParser):
        def error(self, text: str) -> None:  # type: ignore[override]
            self.print_usage(sys.stderr)
            self.exit(usage_status, f"{self.prog}: {text}\n")

    return Parser(
        prog=f"sotbus {command}",
        description=description,
        epilog="examples:\n" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parse(made: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace | int:
    """The arguments, or the exit status where help or a usage error ended the command."""
    try:
        given = made.parse_args(list(words))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    for name, value in vars(given).items():
        if value == []:  # argparse of some versions drops the "--" of "--name=--"
            setattr(given, name, "--")
    return given
