"""Run every benchmark in a temporary folder on the disk; exit 1 where a target is missed."""

from __future__ import annotations

import compileall
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import sotbus
from benchmarks import bus, node, plugins, reading, registry, sending, shared_home

BENCHMARKS = (
    *(sending.cold, sending.durable, reading.polls, registry.big),
    *(bus.sends, bus.shown, plugins.facade, shared_home.sends),
    *(node.link, node.many, node.idle),
)


def name_of(benchmark: Callable[[Path], bool]) -> str:
    return f"{benchmark.__module__}.{benchmark.__name__}".removeprefix("benchmarks.")


def main(wanted: list[str]) -> int:
    """Run those whose names are given, as ``node.link`` or ``node``; all where none is."""
    chosen = [one for one in BENCHMARKS if not wanted or {name_of(one), name_of(one).partition(".")[0]} & set(wanted)]
    if not chosen:
        names = ", ".join(map(name_of, BENCHMARKS))
        print(f"there is no such benchmark; there are {names}", file=sys.stderr)
        return 2
    compileall.compile_dir(os.path.dirname(sotbus.__file__), quiet=1)
    missed = 0
    for benchmark in chosen:
        print(f"\n{name_of(benchmark)}")
        with tempfile.TemporaryDirectory(prefix="sotbus-bench-") as base:
            missed += not benchmark(Path(base))
    print(f"\n{missed} target(s) missed" if missed else "\nall targets met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
