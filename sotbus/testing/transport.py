"""A transport for tests: two ends in one process, joined by memory channels, which lose and delay when told to."""

from __future__ import annotations

import math
from typing import NamedTuple

import trio

from sotbus.contracts import Inbound, NotSentError, OutcomeUnknownError


class Letter(NamedTuple):
    """A request on its way, and where its answer goes."""

    peer: str
    request: bytes
    answers: trio.MemorySendChannel[bytes]


class FakeTransport:
    """One end of a pair, made by :meth:`pair`.

    ``lose_requests`` and ``lose_answers`` count what is lost next on the way from this end and to it; ``delay_s`` is
    waited before a request arrives at the other end.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lose_requests = 0
        self.lose_answers = 0
        self.delay_s = 0.0
        self._far: FakeTransport | None = None
        self._inbound: Inbound | None = None
        self._send, self._receive = trio.open_memory_channel[Letter](math.inf)

    @classmethod
    def pair(cls, near: str = "near", far: str = "far") -> tuple[FakeTransport, FakeTransport]:
        """Two ends that reach each other, named as the nodes that they serve."""
        one, other = cls(near), cls(far)
        one._far, other._far = other, one
        return one, other

    def __repr__(self) -> str:
        return f"<FakeTransport {self.name}, {'serving' if self._inbound else 'not serving'}>"

    def reaches(self, node: str) -> bool:
        return self._far is not None and node == self._far.name

    async def request(self, node: str, request: bytes, deadline_s: float) -> bytes:
        """One request, one answer.

        *Errors*: NotSentError for an unknown node and for an end that does not serve; OutcomeUnknownError at the
        deadline. *Cancellation*: the answer is dropped.
        """
        await trio.lowlevel.checkpoint()
        far = self._far
        if far is None or node != far.name:
            raise NotSentError(f"the fake transport of {self.name} does not reach {node}")
        if far._inbound is None:
            raise NotSentError(f"{node} does not serve")
        send, receive = trio.open_memory_channel[bytes](1)
        with trio.move_on_after(max(0.0, deadline_s)):
            await trio.sleep(self.delay_s)
            if self.lose_requests:
                self.lose_requests -= 1
            else:
                far._send.send_nowait(Letter(self.name, request, send))
            answer = await receive.receive()
            if not self.lose_answers:
                return answer
            self.lose_answers -= 1
            await trio.sleep_forever()
        receive.close()
        raise OutcomeUnknownError(f"no answer from {node} within {deadline_s:g}s")

    async def serve(self, inbound: Inbound) -> None:
        """Answer the other end until cancelled; what it asks meanwhile is answered side by side."""
        far = self._far
        self._inbound = inbound
        try:
            if far is not None and far._inbound is not None:
                inbound.up(far.name)
                far._inbound.up(self.name)
            async with trio.open_nursery() as nursery:
                async for letter in self._receive.clone():
                    nursery.start_soon(self._answer, inbound, letter)
        finally:
            self._inbound = None
            if far is not None and far._inbound is not None:
                far._inbound.down(self.name)

    async def _answer(self, inbound: Inbound, letter: Letter) -> None:
        answer = await inbound.answer(letter.peer, letter.request)
        try:
            letter.answers.send_nowait(answer)
        except trio.BrokenResourceError:
            pass  # its asker has given up
