"""The map from each statement of the spec to the tests that show it. Fails on a hole.

A test names statements with ``@pytest.mark.spec("S1", ...)``; ``reasons.tsv`` says why a statement has no test.
"""

from __future__ import annotations

import contextlib
import csv
import io
import sys
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COVERED = ("S",)
"""First letters of the statements that must be mapped by now; X, addressing and resolution, comes with its own part."""


class Collector:
    """A pytest plugin that notes which tests name which statement."""

    def __init__(self) -> None:
        self.tests: dict[str, set[str]] = defaultdict(set)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in item.iter_markers("spec"):
                for statement in mark.args:
                    self.tests[statement].add(item.nodeid.split("[")[0])


def rows(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def main() -> int:
    collector = Collector()
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet):
        status = pytest.main(["--collect-only", "-q", str(HERE.parent)], plugins=[collector])
    if status != 0:
        print(quiet.getvalue(), file=sys.stderr)
        return 1
    sentences = {row["id"]: row["text"] for row in rows("sentences.tsv")}
    reasons = {row["id"]: row["reason"] for row in rows("reasons.tsv")}
    problems = [f"{name}: there is no such statement" for name in {*collector.tests, *reasons} - set(sentences)]
    for name, text in sentences.items():
        if not name.startswith(COVERED):
            continue
        tests = sorted(collector.tests.get(name, ()))
        print(f"{name}: {text[:90]}")
        for test in tests:
            print(f"    {test}")
        if name in reasons:
            print(f"    no test: {reasons[name]}")
        if bool(tests) == (name in reasons):
            problems.append(f"{name}: has {'both tests and a reason for none' if tests else 'neither test nor reason'}")
    shown = sum(name in collector.tests for name in sentences if name.startswith(COVERED))
    total = sum(name.startswith(COVERED) for name in sentences)
    print(
        f"{total} statements: {shown} shown by tests, {len(reasons)} with a reason for none, {len(problems)} problems"
    )
    for problem in sorted(problems):
        print(f"spec-map: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
