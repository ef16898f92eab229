"""A waker for tests: it notes whom it woke, and answers what it is told to."""

from __future__ import annotations

from collections.abc import Mapping

import trio

from sotbus.contracts import WakeOutcome


class FakeWaker:
    """Wakes sessions whose environment has a variable.

    :param variable: the environment variable that names the session; it is kept at join as ``fake_session``.

    ``woken`` has (session, unread) for each wake.
    """

    FACT = "fake_session"

    def __init__(self, variable: str = "FAKE_SESSION") -> None:
        self.variable = variable
        self.woken: list[tuple[str, int]] = []
        self._outcomes: list[WakeOutcome | Exception] = []

    def __repr__(self) -> str:
        return f"<FakeWaker by {self.variable}: {len(self.woken)} woken>"

    def answer(self, *outcomes: WakeOutcome | Exception) -> None:
        """What the next calls of ``wake`` come to, one a call; an exception is raised."""
        self._outcomes += outcomes

    def facts(self, environ: Mapping[str, str]) -> dict[str, str]:
        session = environ.get(self.variable)
        return {self.FACT: session} if session else {}

    async def wake(self, recipient: Mapping[str, str], unread: int) -> WakeOutcome:
        """WOKEN, or the next outcome given to :meth:`answer`; REFUSED for a session without its fact."""
        await trio.lowlevel.checkpoint()
        session = recipient.get(self.FACT)
        if not session:
            return WakeOutcome.REFUSED
        outcome = self._outcomes.pop(0) if self._outcomes else WakeOutcome.WOKEN
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is WakeOutcome.WOKEN:
            self.woken.append((session, unread))
        return outcome
