"""The fake waker and the fake harness under their contracts, by themselves and behind their guards."""

from __future__ import annotations

import pytest

from sotbus.api import Harness, Screen, WakeOutcome, Waker
from sotbus.guards import GuardedHarness, GuardedWaker
from sotbus.testing import FakeHarness, FakeWaker, HarnessContract, HarnessExamples, WakerContract


class TestFakeWaker(WakerContract):
    @pytest.fixture
    def waker(self) -> Waker:
        return FakeWaker()

    @pytest.fixture
    def environ(self) -> dict[str, str]:
        return {"FAKE_SESSION": "7", "PATH": "/bin"}

    @pytest.fixture
    def foreign_environ(self) -> dict[str, str]:
        return {"PATH": "/bin"}


class TestGuardedWaker(TestFakeWaker):
    @pytest.fixture
    def waker(self) -> Waker:
        return GuardedWaker("plugin 'fake'", FakeWaker(), print)


class TestFakeHarness(HarnessContract):
    @pytest.fixture
    def harness(self) -> Harness:
        return FakeHarness()

    @pytest.fixture
    def examples(self) -> HarnessExamples:
        return HarnessExamples(
            commands=[["fake"], ["/usr/bin/fake", "--resume", "7"]],
            other_commands=[["fakery"], ["/bin/cat", "fake"]],
            free=[Screen(["welcome", "> "], 1, 2, 80), Screen([">"], 0, 2, 80)],
            not_free=[Screen(["> typed"], 0, 7, 80), Screen(["> ", "working"], 1, 0, 80)],
        )


class TestGuardedHarness(TestFakeHarness):
    @pytest.fixture
    def harness(self) -> Harness:
        return GuardedHarness("plugin 'fake'", FakeHarness(), print)


async def test_the_fake_waker_notes_whom_it_woke_and_answers_what_it_is_told_to() -> None:
    waker = FakeWaker()
    recipient = {**waker.facts({"FAKE_SESSION": "7"}), "handle": "a"}
    waker.answer(WakeOutcome.HELD, OSError("no terminal"))
    assert await waker.wake(recipient, 1) is WakeOutcome.HELD
    with pytest.raises(OSError, match="no terminal"):
        await waker.wake(recipient, 1)
    assert await waker.wake(recipient, 2) is WakeOutcome.WOKEN
    assert waker.woken == [("7", 2)]
