"""A delivery for tests: mailboxes in memory, which fail, wait or are blocked when told to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from sotbus.comm import handles
from sotbus.contracts import Destination, Filing, Inbound, Receipt
from sotbus.errors import FilingFailed, SotbusError

DELIVERED, QUEUED = "delivered", "queued"


class FakeDelivery:
    """Reaches every mailbox of one node.

    :param node: the node whose mailboxes these are.
    :param outcome: what a receipt says, ``delivered`` or ``queued``.

    ``mailboxes`` has the messages filed, by mailbox, each with the keys of a line but its stamp; ``delay_s`` is waited
    before a filing.
    """

    def __init__(self, node: str = "fake", *, outcome: str = DELIVERED, delay_s: float = 0.0) -> None:
        self.node = node
        self.outcome = outcome
        self.delay_s = delay_s
        self.mailboxes: dict[str, list[dict[str, str]]] = {}
        self.inbound: Inbound | None = None
        self._failures: list[Exception] = []
        self._gate = trio.Event()
        self._gate.set()

    def __repr__(self) -> str:
        return f"<FakeDelivery {self.node}: {sum(map(len, self.mailboxes.values()))} filed>"

    def fail(self, *errors: Exception) -> None:
        """Raise these, one a call, in the next calls of ``deliver``: a SotbusError, or what a bug raises."""
        self._failures += errors

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Meanwhile nothing can be filed: ``deliver`` waits to its deadline."""
        self._gate = trio.Event()
        try:
            yield
        finally:
            self._gate.set()

    def reaches(self, destination: Destination) -> bool:
        return destination.node == self.node

    async def deliver(self, filing: Filing, deadline_s: float) -> Receipt:
        """File one message in memory.

        *Errors*: BadHandle; FilingFailed at the deadline; the next one given to :meth:`fail`. Nothing is filed then.
        *Cancellation*: nothing is filed.
        """
        handles.check(filing.to)
        with trio.move_on_after(max(0.0, deadline_s)) as scope:
            await self._gate.wait()
            await trio.sleep(self.delay_s)
        if scope.cancelled_caught:
            raise FilingFailed(f"the fake delivery had no answer within {deadline_s:g}s; nothing was filed")
        if self._failures:
            raise self._failures.pop(0)
        to = "" if filing.broadcast else filing.to
        message = {"from": filing.sender, "to": to, "repo": filing.repo, "msg": filing.text}
        self.mailboxes.setdefault(filing.to, []).append(message)
        return Receipt(self.outcome, f"fake:{self.node}/{filing.to}")

    async def arrive(self, peer: str, request: bytes) -> bytes:
        """A peer's request comes in from elsewhere. *Errors*: SotbusError where nobody serves."""
        if self.inbound is None:
            raise SotbusError(f"nobody serves the fake delivery of {self.node}")
        return await self.inbound.answer(peer, request)

    async def serve(self, inbound: Inbound) -> None:
        """Hand what :meth:`arrive` brings to ``inbound`` until cancelled."""
        self.inbound = inbound
        try:
            await trio.sleep_forever()
        finally:
            self.inbound = None
