"""A transport over a spool folder that two boxes see: requests and answers are files, looked for at an interval."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple
from uuid import uuid4

import trio

from sotbus.api import Inbound, NotSentError, OutcomeUnknownError
from sotbus_stranger.settings import Settings
from sotbus_stranger.spool_folder import MAX_BYTES, SpoolFolder

Args = TypeVarTuple("Args")
Answer = TypeVar("Answer")

SILENT_S = 5.0
"""How old a peer's beat may be: a box that is slow to list a folder still beats more often."""


class Spool:
    """Serves one node and reaches its peers.

    :param node: the node that this box serves.
    :param settings: the folder, the peers and the interval.
    """

    def __init__(self, node: str, settings: Settings) -> None:
        self.node = node
        self.peers = frozenset(settings.peers) - {node}
        self._every_s = settings.look_every_s
        self._folder = SpoolFolder(settings.folder, node)
        self._threads = trio.CapacityLimiter(16)
        self._up: set[str] = set()

    def __repr__(self) -> str:
        return f"<Spool {self._folder.folder} of {self.node}, up: {', '.join(sorted(self._up)) or 'nobody'}>"

    def reaches(self, node: str) -> bool:
        return node in self.peers

    async def request(self, node: str, request: bytes, deadline_s: float) -> bytes:
        """Write a request and look for its answer.

        *Errors*: NotSentError for a node that is no peer or does not serve, for a request that is too large, and where
        the spool cannot be written; OutcomeUnknownError at the deadline. *Cancellation*: the request is taken back.
        """
        if node not in self.peers:
            raise NotSentError(f"the spool reaches {', '.join(sorted(self.peers)) or 'nobody'}, not {node}")
        if len(request) > MAX_BYTES:
            raise NotSentError(f"the request has {len(request)} bytes, and a spool takes {MAX_BYTES}")
        one = uuid4().hex
        sent = False
        with trio.move_on_after(max(0.0, deadline_s)):
            if not await self._in_thread(self._folder.serves, node, SILENT_S):
                raise NotSentError(f"{node} does not serve the spool {self._folder.folder}")
            sent = True
            try:
                return await self._exchange(node, one, request)
            finally:
                with trio.CancelScope(shield=True):
                    await self._in_thread(self._folder.remove, node, f"{one}.request")
        late = OutcomeUnknownError if sent else NotSentError
        raise late(f"{node} has not answered within {deadline_s:g}s")

    async def _exchange(self, node: str, one: str, request: bytes) -> bytes:
        """Write the request, and look for its answer until there is one."""
        try:
            await self._in_thread(self._folder.put, node, f"{one}.request", request)
        except OSError as error:
            raise NotSentError(f"the spool cannot be written: {error}") from error
        while True:
            answer = await self._in_thread(self._folder.get, node, f"{one}.answer")
            if answer is not None:
                return answer
            await trio.sleep(self._every_s)

    async def serve(self, inbound: Inbound) -> None:
        """Look at each peer's folder until cancelled; requests are answered side by side."""
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    await self._in_thread(self._folder.beat)
                    for peer in sorted(self.peers):
                        await self._look(peer, inbound, nursery)
                    await trio.sleep(self._every_s)
        finally:
            self._up.clear()
            with trio.CancelScope(shield=True):
                await self._in_thread(self._folder.stop)

    async def _look(self, peer: str, inbound: Inbound, nursery: trio.Nursery) -> None:
        """Notice whether a peer came or went, and take its requests."""
        serves = await self._in_thread(self._folder.serves, peer, SILENT_S)
        if serves and peer not in self._up:
            self._up.add(peer)
            inbound.up(peer)
        elif not serves and peer in self._up:
            self._up.discard(peer)
            inbound.down(peer)
        for one, request in await self._in_thread(self._folder.take, peer):
            nursery.start_soon(self._answer, inbound, peer, one, request)

    async def _answer(self, inbound: Inbound, peer: str, one: str, request: bytes) -> None:
        answer = await inbound.answer(peer, request)
        await self._in_thread(self._folder.answer, peer, one, answer)

    async def _in_thread(self, call: Callable[[*Args], Answer], *args: *Args) -> Answer:
        return await trio.to_thread.run_sync(call, *args, limiter=self._threads)
