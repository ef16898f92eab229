"""The ready-made delivery over a link: the ops between nodes, over any :class:`~sotbus.contracts.Transport`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import trio

from sotbus import link_ops
from sotbus.contracts import (
    BoxFacts,
    Destination,
    Filing,
    Inbound,
    NotSentError,
    OutcomeUnknownError,
    Receipt,
    Transport,
)
from sotbus.errors import BadRequest, Busy, FilingFailed, Refused

MAX_IN_FLIGHT = 64
"""Requests that may wait for one peer's answer at a time; past that a sender is told ``busy`` at once."""

COMM_FILE = "comm.file"
"""The page's op, and the one that files mail between hub, guest and linked box."""


class LinkDelivery:
    """Asks a node, over a transport, to file a message; and hands what nodes ask to this one.

    Nothing is queued and nothing is tried twice: a request has one answer, or it is FAILED. A node that answers twice,
    or late, is not heard.

    :param transport: carries a request and its answer; it authenticates the peer.
    :param max_in_flight: requests to one peer at a time.
    """

    def __init__(self, transport: Transport, *, max_in_flight: int = MAX_IN_FLIGHT) -> None:
        self.transport = transport
        self._max_in_flight = max_in_flight
        self._in_flight: dict[str, int] = {}
        self._counts = {"asked": 0, "answered": 0, "not_sent": 0, "unknown": 0, "busy": 0, "malformed": 0}
        self._round_trip_s: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<LinkDelivery over {self.transport!r}: {sum(self._in_flight.values())} in flight>"

    def statistics(self) -> dict[str, Any]:
        """Counts since the start, requests in flight and the last round trip by peer, in seconds."""
        ask = getattr(self.transport, "statistics", None)
        return {
            **self._counts,
            "transport": ask() if callable(ask) else {},
            "in_flight": {peer: count for peer, count in self._in_flight.items() if count},
            "round_trip_s": dict(self._round_trip_s),
        }

    def reaches(self, destination: Destination) -> bool:
        """Whether the destination's node is one of the transport's. No I/O."""
        return self.transport.reaches(destination.node)

    def prepare(self, box: BoxFacts) -> Callable[[], None] | None:
        """Judge what the box says of its peers now, and answer what takes it; None where the transport cannot change.

        *Errors*: SotbusError where it may not be taken; nothing has changed then.
        """
        prepare: Callable[[BoxFacts], Callable[[], None]] | None = getattr(self.transport, "prepare", None)
        return prepare(box) if prepare is not None else None

    async def deliver(self, filing: Filing, deadline_s: float) -> Receipt:
        """Have the filing's node file it.

        *Durability*: as the node answers: ``ok`` means on its disk.
        *Errors*: the node's refusal in its own words and under its code; Busy; :class:`NotSentError` (not filed);
        :class:`OutcomeUnknownError` where no answer came in time.
        *Cancellation*: a late answer is dropped; the message may be filed.
        """
        answer = await self.ask(filing.node, COMM_FILE, request_of(filing), deadline_s)
        raise_refusal(answer, filing.node)
        return Receipt("delivered", filing.node)

    async def ask(self, node: str, op: str, payload: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """One request, one answer's payload, which may be a refusal.

        *Errors*: BadRequest (it cannot be sent, or the answer is no answer), Busy, :class:`NotSentError`,
        :class:`OutcomeUnknownError`.
        """
        request = link_ops.encode_request(op, payload)
        if self._in_flight.get(node, 0) >= self._max_in_flight:
            self._counts["busy"] += 1
            raise Busy(f"{self._max_in_flight} requests to {node} wait for an answer already; nothing was sent")
        self._in_flight[node] = self._in_flight.get(node, 0) + 1
        self._counts["asked"] += 1
        began = time.monotonic()
        data: bytes | None = None
        try:
            with trio.move_on_after(deadline_s):  # whatever the transport makes of its deadline
                data = await self.transport.request(node, request, deadline_s)
            if data is None:
                raise OutcomeUnknownError(f"{node} did not answer within {deadline_s:g}s; the outcome is unknown")
        except trio.TooSlowError:  # its own, which no transport should let out
            self._counts["unknown"] += 1
            raise OutcomeUnknownError(f"{node} did not answer within {deadline_s:g}s; the outcome is unknown") from None
        except NotSentError:
            self._counts["not_sent"] += 1
            raise
        except OutcomeUnknownError:
            self._counts["unknown"] += 1
            raise
        finally:
            self._in_flight[node] -= 1
            if not self._in_flight[node]:
                del self._in_flight[node]
        self._round_trip_s[node] = time.monotonic() - began
        try:
            answer = link_ops.decode_answer(data)
        except BadRequest as error:
            self._counts["malformed"] += 1
            raise OutcomeUnknownError(f"{node} answered what is no answer ({error}); the outcome is unknown") from error
        self._counts["answered"] += 1
        return answer

    async def serve(self, inbound: Inbound) -> None:
        """Hand what nodes ask to this one, until cancelled."""
        await self.transport.serve(inbound)


def request_of(filing: Filing, *, forwarded: bool = False) -> dict[str, Any]:
    """A filing as the payload of ``comm.file`` (facts 11), with its message ID where it has one."""
    payload: dict[str, Any] = {
        "from": filing.sender,
        "to": filing.to,
        "text": filing.text,
        "broadcast": filing.broadcast,
    }
    if forwarded:
        payload["forwarded"] = True
    if filing.message_id is not None:
        payload["sotbus"] = {"id": filing.message_id}
    return payload


def filing_again(payload: dict[str, Any], node: str) -> Filing:
    """The filing of a :func:`request_of`, for a delivery that is not a link."""
    more = payload.get("sotbus") or {}
    return Filing(payload["from"], payload["to"], "daemon", payload["text"], payload["broadcast"], more.get("id"), node)


def raise_refusal(answer: dict[str, Any], node: str) -> None:
    """Raise what an answer refuses; an ``error`` decides, whatever else it says (facts 8.2).

    *Errors*: :class:`Refused`, with the words and the code of the answer; FilingFailed where it says neither.
    """
    text, code = answer.get("error"), answer.get("code")
    if "error" not in answer:
        if answer.get("ok") is True:
            return
        raise FilingFailed(f"{node} answered neither ok nor a refusal: {str(answer)[:200]}", outcome_unknown=True)
    if not isinstance(text, str) or not isinstance(code, str):
        raise FilingFailed(f"{node} answered neither ok nor a refusal: {str(answer)[:200]}")
    raise Refused(text, code, outcome_unknown=answer.get("outcome_unknown") is True)
