"""Run every benchmark in a temporary folder on the disk; exit 1 where a target is missed."""

from __future__ import annotations

import compileall
import os
import sys
import tempfile
from pathlib import Path

import sotbus
from benchmarks import bus, node, plugins, reading, registry, sending, shared_home

BENCHMARKS = (
    *(sending.cold, sending.durable, reading.polls, registry.big),
    *(bus.sends, bus.shown, plugins.facade, shared_home.sends),
    *(node.link, node.many, node.idle),
)


def main() -> int:
    compileall.compile_dir(os.path.dirname(sotbus.__file__), quiet=1)
    missed = 0
    for benchmark in BENCHMARKS:
        print(f"\n{benchmark.__module__}.{benchmark.__name__}")
        with tempfile.TemporaryDirectory(prefix="sotbus-bench-") as base:
            missed += not benchmark(Path(base))
    print(f"\n{missed} target(s) missed" if missed else "\nall targets met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
