"""What a transport tells of itself: plain values, times in seconds. Nothing in them is secret."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

SMOOTHING = 1 / 8
"""Weight of the newest round trip in the smoothed one (RFC 6298, alpha)."""


@dataclass(frozen=True)
class PeerStatistics:
    """One peer as it is now, and counts since the transport was made.

    :param state: ``up``; ``connecting``; ``waiting`` (for the next dial); ``down`` (it dials us, or nothing is served).
    :param since_s: for how long it has been so.
    :param why: why it is not up, or was lost last; ``""`` where nothing ever went wrong.
    :param next_dial_s: seconds until the next dial, None where none is planned.
    :param ways: ``dialled`` and ``accepted``: the connections that stand.
    :param round_trip_s: of the last ping, None before the first pong; ``smoothed_s`` is the running mean.
    :param asked: requests that were sent to it; ``answered`` of them, ``unknown`` without an answer.
    :param not_sent: requests that were never handed over, ``busy`` ones among them.
    :param taken: requests of the peer that were handed on; ``refused`` of it because too much was under way.
    :param late: answers that nobody waited for any more.
    :param failures: lost connections and failed dials by kind.
    """

    name: str
    role: str
    state: str
    since_s: float
    why: str
    next_dial_s: float | None
    ways: tuple[str, ...]
    round_trip_s: float | None
    smoothed_s: float | None
    in_flight: int
    answering: int
    asked: int
    answered: int
    unknown: int
    not_sent: int
    busy: int
    taken: int
    refused: int
    late: int
    malformed: int
    connects: int
    bytes_out: int
    bytes_in: int
    failures: Mapping[str, int]


@dataclass(frozen=True)
class TransportStatistics:
    """A transport as it is now.

    :param listening: where it listens, with the port that it got; None where it does not.
    :param refused: connections that never became a link, by kind.
    """

    node: str
    serving: bool
    listening: str | None
    refused: Mapping[str, int]
    peers: tuple[PeerStatistics, ...]


@dataclass
class Counts:
    """One peer's running counts."""

    asked: int = 0
    answered: int = 0
    unknown: int = 0
    not_sent: int = 0
    busy: int = 0
    taken: int = 0
    refused: int = 0
    late: int = 0
    malformed: int = 0
    connects: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    round_trip_s: float | None = None
    smoothed_s: float | None = None

    def note_round_trip(self, seconds: float) -> None:
        """A pong came, so long after its ping."""
        self.round_trip_s = seconds
        before = self.smoothed_s
        self.smoothed_s = seconds if before is None else before + SMOOTHING * (seconds - before)
