"""The contract suite of a harness: which processes are its sessions, and which screens are a free prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest

from sotbus.contracts import Harness, Screen
from sotbus.testing.io_watch import io_of

FOREIGN_COMMANDS: Sequence[Sequence[str]] = ([], [""], ["/bin/sh"], ["-bash"], ["/usr/sbin/sshd", "-D"])
"""Command lines that are no session of any harness; a process that is ending has an empty one."""

ODD_SCREENS = {
    "empty": Screen([], 0, 0, 0),
    "cursor below": Screen(["", ""], 7, 0, 80),
    "cursor above": Screen(["", ""], -1, -1, 80),
    "cursor right": Screen(["x"], 0, 900, 80),
    "control characters": Screen(["\x1b[31m\x00", "\ud800"], 0, 0, 80),
}
"""Screens on which nothing may be typed, whatever the harness."""


@dataclass(frozen=True)
class HarnessExamples:
    """What an author knows of a harness.

    :param commands: command lines of its sessions.
    :param other_commands: command lines that look alike and are none.
    :param free: screens with a free prompt.
    :param not_free: screens on which typing would disturb: an answer under way, a menu, a half-typed prompt.
    """

    commands: Sequence[Sequence[str]]
    other_commands: Sequence[Sequence[str]]
    free: Sequence[Screen]
    not_free: Sequence[Screen]


class HarnessContract:
    """Subclass it as ``class TestMine(HarnessContract)`` and give the fixtures ``harness`` and ``examples``."""

    @pytest.fixture
    def harness(self) -> Harness:
        """The harness under test."""
        pytest.fail(f"{type(self).__name__} must give the fixture `harness`: the harness to test")

    @pytest.fixture
    def examples(self) -> HarnessExamples:
        """Command lines and screens of it."""
        pytest.fail(f"{type(self).__name__} must give the fixture `examples`: a HarnessExamples")

    def test_it_has_the_members_of_a_harness(self, harness: Harness) -> None:
        assert isinstance(harness, Harness)

    def test_its_name_is_one_word_and_stays(self, harness: Harness) -> None:
        assert harness.name == harness.name
        assert harness.name.split() == [harness.name]
        assert "/" not in harness.name

    def test_it_says_whether_it_is_parkable(self, harness: Harness) -> None:
        assert isinstance(harness.parkable, bool)

    def test_it_knows_its_sessions_by_their_command_lines(self, harness: Harness, examples: HarnessExamples) -> None:
        assert examples.commands
        for argv in examples.commands:
            assert io_of(partial(harness.runs_in, argv)) == (True, []), argv

    def test_it_takes_no_other_process_for_one(self, harness: Harness, examples: HarnessExamples) -> None:
        for argv in [*FOREIGN_COMMANDS, *examples.other_commands]:
            assert io_of(partial(harness.runs_in, argv)) == (False, []), argv

    def test_it_knows_its_free_prompt(self, harness: Harness, examples: HarnessExamples) -> None:
        assert examples.free
        for screen in examples.free:
            assert io_of(partial(harness.is_free_prompt, screen)) == (True, []), screen

    def test_it_takes_no_other_screen_for_one(self, harness: Harness, examples: HarnessExamples) -> None:
        assert examples.not_free
        for screen in examples.not_free:
            assert io_of(partial(harness.is_free_prompt, screen)) == (False, []), screen

    @pytest.mark.parametrize("screen", ODD_SCREENS.values(), ids=ODD_SCREENS)
    def test_an_odd_screen_is_no_free_prompt(self, harness: Harness, screen: Screen) -> None:
        assert harness.is_free_prompt(screen) is False
