"""The contract suite of a waker: what it keeps at join, and what a wake comes to."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
import trio

from sotbus.contracts import WakeOutcome, Waker

HANDLE = "contract-session"
PATIENT_S = 20.0
"""How long a wake may take, in seconds: long, since only a fault reaches it."""


class WakerContract:
    """Subclass it as ``class TestMine(WakerContract)`` and give the fixtures ``waker`` and ``environ``.

    Override ``foreign_environ`` where an empty environment is not enough to be none of this waker's.
    """

    @pytest.fixture
    def waker(self) -> Waker:
        """The waker under test."""
        pytest.fail(f"{type(self).__name__} must give the fixture `waker`: the waker to test")

    @pytest.fixture
    def environ(self) -> dict[str, str]:
        """The environment of a session that is there, idle, and can be told this way."""
        pytest.fail(f"{type(self).__name__} must give the fixture `environ`: of an idle session that it can tell")

    @pytest.fixture
    def foreign_environ(self) -> dict[str, str]:
        """The environment of a session that cannot be told this way."""
        return {}

    @pytest.mark.trio
    async def test_it_has_the_members_of_a_waker(self, waker: Waker) -> None:
        assert isinstance(waker, Waker)

    @pytest.mark.trio
    async def test_it_keeps_facts_of_a_session_that_it_can_tell(self, waker: Waker, environ: dict[str, str]) -> None:
        facts = waker.facts(environ)
        assert facts
        assert all(isinstance(key, str) and isinstance(value, str) for key, value in facts.items())

    @pytest.mark.trio
    async def test_its_facts_leave_the_handle_to_the_core(self, waker: Waker, environ: dict[str, str]) -> None:
        assert "handle" not in waker.facts(environ)

    @pytest.mark.trio
    async def test_it_keeps_nothing_of_a_session_that_it_cannot_tell(
        self, waker: Waker, foreign_environ: dict[str, str]
    ) -> None:
        assert waker.facts(foreign_environ) == {}

    @pytest.mark.trio
    async def test_its_facts_rest_on_the_environment_that_it_is_given(
        self, waker: Waker, environ: dict[str, str]
    ) -> None:
        before = dict(environ)
        assert waker.facts(environ) == waker.facts(dict(before))
        assert environ == before

    @pytest.mark.trio
    async def test_an_idle_session_is_woken_by_the_facts_kept_at_its_join(
        self, waker: Waker, environ: dict[str, str]
    ) -> None:
        assert await _wake(waker, _kept(waker, environ), 1) is WakeOutcome.WOKEN

    @pytest.mark.trio
    async def test_a_session_that_has_facts_of_another_waker_is_refused(self, waker: Waker) -> None:
        assert await _wake(waker, {"handle": HANDLE, "of another waker": "1"}, 1) is WakeOutcome.REFUSED

    @pytest.mark.trio
    async def test_wakes_side_by_side_each_have_an_outcome(self, waker: Waker, environ: dict[str, str]) -> None:
        outcomes: list[WakeOutcome] = []
        recipient = _kept(waker, environ)

        async def wake(unread: int) -> None:
            outcomes.append(await _wake(waker, recipient, unread))

        async with trio.open_nursery() as nursery:
            for unread in range(1, 6):
                nursery.start_soon(wake, unread)
        assert len(outcomes) == 5
        assert all(isinstance(outcome, WakeOutcome) for outcome in outcomes)

    @pytest.mark.trio
    async def test_a_wake_that_is_cancelled_spoils_none_after_it(self, waker: Waker, environ: dict[str, str]) -> None:
        recipient = _kept(waker, environ)
        with trio.CancelScope() as scope:
            scope.cancel()
            await waker.wake(recipient, 1)
        assert await _wake(waker, recipient, 2) in {WakeOutcome.WOKEN, WakeOutcome.HELD}


def _kept(waker: Waker, environ: dict[str, str]) -> dict[str, str]:
    """A recipient as the registry keeps it: the facts as JSON, and the handle."""
    facts: dict[str, str] = json.loads(json.dumps(waker.facts(environ)))
    return {**facts, "handle": HANDLE}


async def _wake(waker: Waker, recipient: Mapping[str, str], unread: int) -> WakeOutcome:
    with trio.fail_after(PATIENT_S):
        return await waker.wake(recipient, unread)
