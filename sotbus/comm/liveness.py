"""Liveness is one fact, ``last_seen``: live is a stamp under 600 s old (sot-comm v1, registry.json; facts 2.7)."""

from __future__ import annotations

import time
from functools import lru_cache

from sotbus.message import is_stamp, stamp

LIVE_S = 600
"""A handle is live while its stamp is younger than this, in seconds."""


def is_live(last_seen: object, now_s: float | None = None) -> bool:
    """Against this reader's clock. A stamp in the future is live; what has not a stamp's shape is not.

    :param now_s: seconds since the epoch; the present by default.
    """
    return isinstance(last_seen, str) and _is_live(last_seen, int(time.time() if now_s is None else now_s))


@lru_cache(maxsize=64)
def _is_live(last_seen: str, now_s: int) -> bool:
    return is_stamp(last_seen) and last_seen > stamp(now_s - LIVE_S)


def age_s(text: object, now_s: float | None = None) -> int | None:
    """How many whole seconds ago a stamp was, negative where it is ahead; None where it is no calendar time."""
    if not isinstance(text, str) or not is_stamp(text):
        return None
    from datetime import UTC, datetime

    try:
        then = datetime(
            int(text[:4]), int(text[5:7]), int(text[8:10]), int(text[11:13]), int(text[14:16]), int(text[17:19]),
            tzinfo=UTC,
        )  # fmt: skip
    except ValueError:
        return None
    now = time.time() if now_s is None else now_s
    return int(now) - int(then.timestamp())
