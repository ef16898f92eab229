"""What a serving transport or delivery hands requests to, in a test."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

Answer = Callable[[str, bytes], Awaitable[bytes]]


async def echo(_peer: str, request: bytes) -> bytes:
    """The request itself."""
    await trio.lowlevel.checkpoint()
    return request


class FakeInbound:
    """Notes what it is handed, in order, and answers by a function of peer and request; by default the request itself.

    ``requests`` are (peer, request); ``changes`` are ("up" or "down", peer); ``peers`` are those that are up now.
    """

    def __init__(self, answer: Answer = echo) -> None:
        self.requests: list[tuple[str, bytes]] = []
        self.changes: list[tuple[str, str]] = []
        self.peers: set[str] = set()
        self._answer = answer
        self._changed = trio.Event()

    def __repr__(self) -> str:
        return f"<FakeInbound: {len(self.requests)} requests, up: {', '.join(sorted(self.peers)) or 'nobody'}>"

    async def answer(self, peer: str, request: bytes) -> bytes:
        self.requests.append((peer, request))
        self._note()
        return await self._answer(peer, request)

    def up(self, peer: str) -> None:
        self.changes.append(("up", peer))
        self.peers.add(peer)
        self._note()

    def down(self, peer: str) -> None:
        self.changes.append(("down", peer))
        self.peers.discard(peer)
        self._note()

    def _note(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, condition: Callable[[FakeInbound], bool]) -> None:
        """Wait for a condition on what was handed over; it is looked at after each change."""
        while not condition(self):
            await self._changed.wait()
