"""Stamps ``last_seen`` of the rows that this node watches: every minute, and at once when the set of them changes.

One registry write for all of them, best effort (facts 2.7): a pass that fails is told once and tried again at the next.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import trio

from sotbus import message
from sotbus.comm.registry import entry_of
from sotbus.comm.registry_file import RegistryFile
from sotbus.errors import SotbusError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sotbus.comm.client import Client
    from sotbus.node.rows import Rows

LOOK_S, LOOK_MAX_S = 2.0, 10.0
"""How often the rows are looked at: as often as that, and less often where there are very many."""

LOOK_SHARE = 1 / 300
"""The most of a core that the looks may take."""

STAMP_S = 60.0
"""How long after the last stamp the next one is due."""

LOCK_S = 1.0
"""How long a pass waits for the registry lock (facts 3.7: the liveness stamp)."""


class Heartbeat:
    """The liveness of one box's rows in one comm folder.

    :param client: used by this task's thread alone.
    :param limiter: of the folder's mount.
    :param tell: takes an event and its fields, for the log.
    """

    def __init__(self, client: Client, rows: Rows, limiter: trio.CapacityLimiter, tell: Callable[..., object]) -> None:
        self._client = client
        self._rows = rows
        self._limiter = limiter
        self._tell = tell
        self._registry = RegistryFile(client)
        self._agents: dict[str, Any] = {}
        self._stamped: frozenset[str] = frozenset()
        self._stamped_at = -STAMP_S
        self._failed = False
        self._look_took_s = 0.0
        self.passes = 0

    def __repr__(self) -> str:
        return f"<Heartbeat of {len(self._stamped)} handles, {self.passes} passes>"

    @property
    def held(self) -> frozenset[str]:
        """The handles of the last pass."""
        return self._stamped

    async def run(self) -> None:
        """Until cancelled. A look or a pass that hangs in its mount holds up nothing but this."""
        while True:
            await self.look()
            await trio.sleep(min(LOOK_MAX_S, max(LOOK_S, self._look_took_s / LOOK_SHARE)))

    async def look(self) -> None:
        """One look, and a pass where one is due."""
        began = trio.current_time()
        try:
            held = await trio.to_thread.run_sync(self._held, abandon_on_cancel=True, limiter=self._limiter)
            due = began >= self._stamped_at + STAMP_S
            if held == self._stamped and not due:
                return
            if held:
                await trio.to_thread.run_sync(self._stamp, held, abandon_on_cancel=True, limiter=self._limiter)
        except (SotbusError, OSError) as error:
            if not self._failed:
                self._tell("heartbeat failed", error=str(error))
            self._failed = True
            return
        self._failed = False
        self._stamped, self._stamped_at = held, began
        self.passes += 1

    def _held(self) -> frozenset[str]:
        began = time.thread_time()
        try:
            return self._look()
        finally:
            self._look_took_s = time.thread_time() - began

    def _look(self) -> frozenset[str]:
        if self._registry.changed():
            try:
                self._agents = self._client.registry.agents()
            except SotbusError:
                self._registry.forget()
                raise
        return self._rows.held(self._agents)

    def _stamp(self, held: frozenset[str]) -> None:
        now = message.stamp(self._client.clock())

        def change(document: dict[str, Any]) -> bool:
            changed = False
            for handle in held:
                entry = entry_of(document["agents"], handle)
                if entry is not None and entry.get("last_seen") != now:
                    entry["last_seen"] = now
                    changed = True
            return changed

        self._client.registry.update(change, LOCK_S)
