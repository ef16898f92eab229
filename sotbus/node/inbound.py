"""What other nodes ask of this one over links, whatever carries them: the counterpart of a link delivery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from sotbus import link_ops
from sotbus.errors import BadRequest, Busy, Refused, SotbusError
from sotbus.link_delivery import COMM_FILE
from sotbus.node.links import PEER
from sotbus.node.refusal import refusal_payload
from sotbus.node.wire import FILE_S, filing_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sotbus.node.filer import Filer
    from sotbus.node.links import Links

MAX_IN_FLIGHT = 64
"""Requests of one node that are worked on at a time; past that it is told ``busy``."""


class NodeInbound:
    """Answers authenticated nodes. A node that is not in the peers file is refused, whoever authenticated it.

    :param tell: takes an event and its fields, for the log.

    While ``draining`` new requests are refused.
    """

    def __init__(self, filer: Filer, links: Links, tell: Callable[..., object]) -> None:
        self._filer = filer
        self._links = links
        self._tell = tell
        self._in_flight: dict[str, int] = {}
        self.draining = False
        self.counts = {"requests": 0, "malformed": 0, "refused": 0, "busy": 0}

    def __repr__(self) -> str:
        return f"<NodeInbound {self.counts}>"

    @property
    def under_way(self) -> int:
        """Requests that are worked on."""
        return sum(self._in_flight.values())

    async def answer(self, peer: str, request: bytes) -> bytes:
        """The answer to a node's request; whatever is wrong with it is an answer too.

        *Cancellation*: what it asked for may be done.
        """
        self.counts["requests"] += 1
        count = self._in_flight.get(peer, 0)
        self._in_flight[peer] = count + 1
        try:
            if self.draining:
                raise Busy("this node is ending and takes nothing new; nothing was done")
            if count >= MAX_IN_FLIGHT:
                self.counts["busy"] += 1
                raise Busy(f"this node works on {count} requests of {peer} already; nothing was done")
            payload = await self._do(peer, request)
        except SotbusError as error:
            payload = refusal_payload(error)
        finally:
            self._in_flight[peer] -= 1
            if not self._in_flight[peer]:
                del self._in_flight[peer]
        return link_ops.encode_answer(payload)

    async def _do(self, peer: str, request: bytes) -> dict[str, Any]:
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            op, payload = link_ops.decode_request(request)
        except BadRequest as error:
            self.counts["malformed"] += 1
            self._tell("malformed request", peer=peer, error=str(error))
            raise BadRequest(f"this is no request of a link: {error}") from error
        role = self._links.role(peer)
        if not role:
            self.counts["refused"] += 1
            raise Refused(f"this node does not know {peer}", "peer_rejected")
        self._links.taken[peer].note()
        if op != COMM_FILE:
            raise Refused(f"unknown op: {op[:100]}", "unknown_op")
        if role == PEER:
            self.counts["refused"] += 1
            raise Refused("comm.file is for a hub and its boxes; a peer does not use it", "op_denied")
        filing, forwarded = filing_of(payload)
        return await self._filer.answer(filing, forwarded=forwarded, origin=peer, bound_s=FILE_S)

    def up(self, peer: str) -> None:
        """A node's link came up."""
        self._links.up[peer] = trio.current_time()
        self._tell("link up", peer=peer, role=self._links.role(peer))

    def down(self, peer: str) -> None:
        """A node's link went down."""
        since = self._links.up.pop(peer, None)
        up_s = trio.current_time() - since if since is not None else 0.0
        self._tell("link down", peer=peer, role=self._links.role(peer), up_s=round(up_s, 1))
