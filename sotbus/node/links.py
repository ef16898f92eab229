"""The nodes that this one is linked to: which of them is the hub, which are linked boxes, and asking them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import trio

from sotbus.contracts import Destination, NotSentError, OutcomeUnknownError
from sotbus.errors import SotbusError
from sotbus.link_delivery import COMM_FILE, LinkDelivery, filing_again
from sotbus.node.rate import Rate
from sotbus.node.refusal import refusal_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sotbus.contracts import Delivery
    from sotbus.peers import Peer

HUB, LINKED, GUEST, PEER = "hub", "linked", "guest", "peer"
"""What a node is to this one."""

ANSWERED, NOT_ASKED, SILENT = "answered", "not asked", "silent"
"""What came of asking a node: its answer; nothing, because there is no link; none in time."""


class Asked:
    """What one node said to an offer: ``outcome`` as above, ``answer`` its payload, ``why`` what went wrong."""

    __slots__ = ("answer", "node", "outcome", "why")

    def __init__(self, node: str, outcome: str, answer: dict[str, Any] | None = None, why: str = "") -> None:
        self.node = node
        self.outcome = outcome
        self.answer = answer or {}
        self.why = why

    def __repr__(self) -> str:
        return f"<Asked {self.node}: {self.outcome}>"


class AsksBack(Protocol):
    """A client of the socket that answers requests (decisions, sot-comm 23)."""

    async def ask(self, op: str, payload: dict[str, Any], bound_s: float) -> dict[str, Any]: ...


class Links:
    """The peers of a node, and the deliveries that reach them, in the order of the config's plugin list.

    ``clients`` are boxes of another release that dialled into the socket, by the name in their hello; ``up`` says since
    when a link is up; ``asked`` and ``taken`` how often a peer is asked, and asks.
    """

    def __init__(self, deliveries: Sequence[Delivery], peers: Iterable[Peer]) -> None:
        self.deliveries = list(deliveries)
        self.clients: dict[str, AsksBack] = {}
        self.peers: dict[str, Peer] = {}
        self.up: dict[str, float] = {}
        self.asked: dict[str, Rate] = {}
        self.taken: dict[str, Rate] = {}
        self.replace(peers)

    def __repr__(self) -> str:
        return f"<Links to {', '.join(self.peers) or 'nobody'}>"

    def replace(self, peers: Iterable[Peer]) -> None:
        """Go by this list of peers from now on."""
        self.peers = {peer.name: peer for peer in peers}
        self.asked = {name: self.asked.get(name) or Rate() for name in self.peers}
        self.taken = {name: self.taken.get(name) or Rate() for name in self.peers}

    def role(self, node: str) -> str:
        """What a node is to this one; ``""`` for a stranger."""
        peer = self.peers.get(node)
        return peer.role if peer is not None else ""

    def hub(self) -> str | None:
        """The hub's node, where this one has a link to it."""
        return next((name for name, peer in self.peers.items() if peer.role == HUB), None)

    def linked(self) -> list[str]:
        """The linked boxes: nodes of the peers file, and boxes that dialled into the socket for offers."""
        listed = (name for name, peer in self.peers.items() if peer.role == LINKED)
        return list(dict.fromkeys([*listed, *self.clients]))  # one that is both is asked once

    async def file(self, node: str, payload: dict[str, Any], bound_s: float) -> dict[str, Any]:
        """Have a node file a message; its answer verbatim.

        *Errors*: NotSentError, OutcomeUnknownError, Busy, BadRequest.
        *Cancellation*: the message may be filed.
        """
        if node in self.asked:
            self.asked[node].note()
        client = self.clients.get(node)
        if client is not None:
            return await client.ask(COMM_FILE, payload, bound_s)
        for delivery in self.deliveries:
            if not delivery.reaches(Destination(node, payload["to"])):
                continue
            if isinstance(delivery, LinkDelivery):
                return await delivery.ask(node, COMM_FILE, payload, bound_s)
            try:
                await delivery.deliver(filing_again(payload, node), bound_s)
            except (NotSentError, OutcomeUnknownError):
                raise
            except SotbusError as error:
                return refusal_payload(error)
            return {"ok": True}
        raise NotSentError(f"no link of this node reaches {node}; nothing was sent")

    async def offer(
        self, nodes: Sequence[str], payload: dict[str, Any], bound_s: float, wins: Callable[[Asked], bool]
    ) -> list[Asked]:
        """Ask every node at once, each within ``bound_s`` seconds; all their answers, or those up to the one that wins.

        *Cancellation*: the message may be filed by any of them.
        """
        answers: list[Asked] = []

        async def ask(node: str) -> None:
            asked = await self._ask(node, payload, bound_s)
            answers.append(asked)
            if wins(asked):
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(ask, node)
        return answers

    async def _ask(self, node: str, payload: dict[str, Any], bound_s: float) -> Asked:
        try:
            return Asked(node, ANSWERED, await self.file(node, payload, bound_s))
        except NotSentError as error:
            return Asked(node, NOT_ASKED, why=str(error))
        except OutcomeUnknownError as error:
            return Asked(node, SILENT, why=str(error))
        except SotbusError as error:  # busy: as good as that box's own refusal
            return Asked(node, ANSWERED, refusal_payload(error))
