"""What a transport knows of one peer: its connections, whether it is up, and why it is not."""

from __future__ import annotations

import trio

from sotbus.api import Inbound, NotSentError
from sotbus_zmq.link import ANSWERING_PER_REQUEST, Answering, BusyError, Link
from sotbus_zmq.monitor import Failure
from sotbus_zmq.statistics import Counts, PeerStatistics

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.api import Peer

DIALLED, ACCEPTED = "dialled", "accepted"

UP, CONNECTING, WAITING, DOWN = "up", "connecting", "waiting", "down"

OWN_ENDS = frozenset(["stopped", "removed", "new key"])
"""Kinds of ends that this node made in order, which are no failures."""

GRACE_S = 1.0
"""How long a request waits, at most, for a connection that is being made at this moment; and never for longer than half
its own time. A handshake on a network in order takes milliseconds; a node that has just started need not fail its first
sends, and one that dials into a void does not hold every sender for the whole of a dial."""


class PeerState:
    """One peer. There is one link a way at most, and requests take the one that is up for longer.

    :param max_in_flight: requests that may wait, for a connection or for an answer, at a time.
    """

    def __init__(self, peer: Peer, max_in_flight: int) -> None:
        self.peer = peer
        self.counts = Counts()
        self.answering = Answering(ANSWERING_PER_REQUEST * max_in_flight)
        self.in_flight = 0
        self.why = ""
        self.next_dial: float | None = None
        self._max_in_flight = max_in_flight
        self._links: dict[str, Link] = {}
        self._state = DOWN
        self._since: float | None = None
        self._changed = trio.Event()

    def __repr__(self) -> str:
        return f"<PeerState {self.peer.name} {self._state}>"

    @property
    def name(self) -> str:
        return self.peer.name

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that are up, the older first."""
        return tuple(self._links.values())

    def turn(self, state: str, next_dial: float | None = None) -> None:
        """What the dialling of this peer is about; a peer with a link is up whatever that is.

        :param next_dial: when it is dialled next, by trio's clock.
        """
        self.next_dial = next_dial
        self._set(UP if self._links else state)

    def _set(self, state: str) -> None:
        if state != self._state or self._since is None:
            self._state, self._since = state, trio.current_time()
        self._changed.set()
        self._changed = trio.Event()

    def attach(self, link: Link, inbound: Inbound) -> None:
        """A link is up; an older one of the same way is ended by the caller before."""
        self.counts.connects += 1
        self._links[link.way] = link
        self._set(UP)
        if len(self._links) == 1:
            inbound.up(self.name)

    def detach(self, link: Link, inbound: Inbound) -> None:
        """A link has ended."""
        if self._links.get(link.way) is not link:
            return
        del self._links[link.way]
        if link.kind not in OWN_ENDS:
            self.note(Failure(link.kind, link.why))
        if not self._links:
            self._set(DOWN)
            inbound.down(self.name)

    def note(self, failure: Failure) -> None:
        """A dial failed, or a link was lost."""
        self.counts.failures[failure.kind] += 1
        self.why = failure.words

    async def link(self, deadline: float) -> Link:
        """A link that is up; no checkpoint lies between its choice and the return.

        :param deadline: of the request, by trio's clock.

        *Errors*: NotSentError that says why there is none.
        """
        if not self._links and self._state == CONNECTING:
            now = trio.current_time()
            with trio.move_on_at(now + min(GRACE_S, (deadline - now) / 2)):
                while not self._links and self._state == CONNECTING:
                    await self._changed.wait()
        if not self._links:
            raise NotSentError(f"{self.name} is not connected: {self.reason()}; nothing was sent")
        return next(iter(self._links.values()))

    def enter(self) -> None:
        """Count one more request in flight. *Errors*: BusyError."""
        if self.in_flight >= self._max_in_flight:
            self.counts.busy += 1
            raise BusyError(f"{self.in_flight} requests to {self.name} wait for an answer already; nothing was sent")
        self.in_flight += 1

    def reason(self) -> str:
        """Why the peer is not up, in words."""
        address = self.peer.address
        if self._state == CONNECTING:
            text = f"{address} is being dialled"
        elif address is None:
            text = "it dials this node, and has not"
        else:
            text = f"it was dialled at {address}"
        if self.why:
            text += f"; {self.why}"
        if self._state == WAITING and self.next_dial is not None:
            text += f"; the next try is in {max(0.0, self.next_dial - trio.current_time()):.0f}s"
        return text

    def statistics(self, now: float) -> PeerStatistics:
        """The peer as it is at a time of trio's clock."""
        counts = self.counts
        return PeerStatistics(
            name=self.name,
            role=self.peer.role,
            state=self._state,
            since_s=now - self._since if self._since is not None else 0.0,
            why=self.why,
            next_dial_s=None if self.next_dial is None else max(0.0, self.next_dial - now),
            ways=tuple(self._links),
            round_trip_s=counts.round_trip_s,
            smoothed_s=counts.smoothed_s,
            in_flight=self.in_flight,
            answering=self.answering.now,
            asked=counts.asked,
            answered=counts.answered,
            unknown=counts.unknown,
            not_sent=counts.not_sent,
            busy=counts.busy,
            taken=counts.taken,
            refused=counts.refused,
            late=counts.late,
            malformed=counts.malformed,
            connects=counts.connects,
            bytes_out=counts.bytes_out,
            bytes_in=counts.bytes_in,
            failures=dict(counts.failures),
        )
