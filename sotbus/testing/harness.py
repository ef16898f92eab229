"""A harness for tests: a program of a given name, whose free prompt is ``> `` and nothing typed."""

from __future__ import annotations

import os
from collections.abc import Sequence

from sotbus.contracts import Screen


class FakeHarness:
    """One kind of session.

    :param name: its base name, and the program's.
    :param parkable: whether mail for a closed one may wait.
    """

    PROMPT = "> "

    def __init__(self, name: str = "fake", *, parkable: bool = True) -> None:
        self.name = name
        self.parkable = parkable

    def __repr__(self) -> str:
        return f"<FakeHarness {self.name}>"

    def runs_in(self, argv: Sequence[str]) -> bool:
        return bool(argv) and os.path.basename(argv[0]) == self.name

    def is_free_prompt(self, screen: Screen) -> bool:
        if not 0 <= screen.row < len(screen.lines):
            return False
        return screen.lines[screen.row].rstrip() == self.PROMPT.rstrip() and screen.column == len(self.PROMPT)
