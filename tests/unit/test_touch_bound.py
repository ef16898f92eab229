"""How long the touch of a send and of a poll waits for the registry lock that another holds."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from world import World

STALE = "2026-01-01T00:00:00Z"
"""A stamp that a touch would replace."""


@pytest.mark.spec("S45", "S95")
@pytest.mark.parametrize(
    ("words", "said"),
    [(("send", "@b-vm", "x"), "  filed -> @b-vm\n"), (("poll",), "No new messages.\n")],
    ids=["send", "poll"],
)
def test_a_touch_waits_one_second_for_a_held_registry_lock_and_gives_up_in_silence(
    world: World, words: tuple[str, ...], said: str
) -> None:
    for name in ("a", "b"):
        assert world.sotbus(name, "join").returncode == 0
    registry = Path(world.folder.registry)
    document = json.loads(registry.read_text())
    document["agents"]["a-vm"]["last_seen"] = STALE
    registry.write_text(json.dumps(document))
    with world.client("b").registry.lock.hold(1):
        began = time.monotonic()
        done = world.sotbus("a", *words, env={"SOT_LOCK_WAIT_SECS": "40"})
        took_s = time.monotonic() - began
        held = json.loads(registry.read_text())["agents"]["a-vm"]["last_seen"]
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
    assert 1 <= took_s < 30, f"{took_s:.1f}s, and neither at once nor after a join's 40 s"
    assert held == STALE
