"""The map from each statement of the spec to the tests that show it. Fails on a hole.

A test names statements with ``@pytest.mark.spec("S1", ...)``; ``reasons.tsv`` says why a statement has no test, or, in
its column ``part``, which part of a statement that has tests they do not show.
"""

from __future__ import annotations

import contextlib
import csv
import io
import sys
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COVERED = ("S",)
"""First letters of the statements that must be mapped by now; X, addressing and resolution, comes with its own part."""


def problem_of(name: str, tests: Collection[str], part: str | None) -> str | None:
    """What is wrong with a statement's tests and reason.

    :param part: what its reason is for: ``""`` for all of it, else the part that its tests do not show; None where it
        has no reason.
    """
    if not tests and part is None:
        return f"{name}: has neither test nor reason"
    if tests and part == "":
        return f"{name}: has both tests and a reason for none; name the part that they do not show, in column part"
    if not tests and part:
        return f"{name}: has a reason for a part ({part}) and no test of the rest"
    return None


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
    reasons = {row["id"]: (row["part"] or "", row["reason"]) for row in rows("reasons.tsv")}
    problems = [f"{name}: there is no such statement" for name in {*collector.tests, *reasons} - set(sentences)]
    for name, text in sentences.items():
        if not name.startswith(COVERED):
            continue
        tests = sorted(collector.tests.get(name, ()))
        print(f"{name}: {text[:90]}")
        for test in tests:
            print(f"    {test}")
        part, reason = reasons.get(name, (None, ""))
        if part is not None:
            print(f"    no test{f' of: {part}' if part else ''}: {reason}")
        problem = problem_of(name, tests, part)
        if problem:
            problems.append(problem)
    shown = sum(name in collector.tests for name in sentences if name.startswith(COVERED))
    halves = sum(bool(part) for part, _ in reasons.values())
    total = sum(name.startswith(COVERED) for name in sentences)
    print(
        f"{total} statements: {shown} shown by tests ({halves} of them in part, with a reason for the rest), "
        f"{len(reasons) - halves} with a reason for none, {len(problems)} problems"
    )
    for problem in sorted(problems):
        print(f"spec-map: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
