"""The node: one daemon of one user on one box. It puts the parts together, keeps them running, and ends them.

One failing client, link or plugin never takes it down: a connection's error ends that connection, a delivery's
``serve`` that ends is started again after 1 s doubling to 30 s. SIGTERM and SIGINT drain: nothing new is taken, what is
under way is answered, within ``DRAIN_S``. SIGHUP reads the peers file again, whole or not at all.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import trio

import sotbus
from sotbus.comm.writer_gate import WriterGate
from sotbus.errors import ConfigError, FilingFailed, SotbusError
from sotbus.link_delivery import LinkDelivery
from sotbus.mount_limits import limiter_of
from sotbus.node import setup as setups
from sotbus.node.filer import Filer
from sotbus.node.folder_view import FolderView
from sotbus.node.heartbeat import Heartbeat
from sotbus.node.inbound import NodeInbound
from sotbus.node.links import Links
from sotbus.node.ops import NodeOps
from sotbus.node.rows import Rows
from sotbus.node.settling import settle_open
from sotbus.node.sockets import NodeLock, open_unix_listener
from sotbus.node.store import Store
from sotbus.node.wire import Connection, Wire
from sotbus.node.writers import Writers

if TYPE_CHECKING:
    from collections.abc import Callable

    from sotbus.contracts import Delivery, Filing, LockManager
    from sotbus.node.log import EventLog
    from sotbus.node.sd_notify import Notifier
    from sotbus.node.setup import Setup
    from sotbus.node.sockets import UnixListener
    from sotbus.node.unix_stream import UnixStream

DRAIN_S = 5.0
"""How long a node that is told to end waits for what is under way."""

RESTART_MIN_S, RESTART_MAX_S = 1.0, 30.0
"""Waits before a delivery's ``serve`` that ended is started again."""

STEADY_S = 60.0
"""A ``serve`` that ran this long begins again with the shortest wait."""

EXPIRE_S = 3600.0
"""How often message IDs of more than a day ago are forgotten."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Node:
    """One run of the node.

    :param setup: what was read and judged before.
    :param log: takes its events.
    :param notifier: the way to the service manager.
    """

    def __init__(self, setup: Setup, log: EventLog, notifier: Notifier) -> None:
        self.setup = setup
        self.log = log
        self.notifier = notifier
        self.started_at = 0.0
        self.deliveries: list[tuple[str, Delivery]] = []
        self.restarts: dict[str, int] = {}
        self.links = Links([], setup.peers)
        self.record = ""
        self.writers: Writers
        self.filer: Filer
        self.wire: Wire
        self.ops: NodeOps
        self.connected: dict[object, float] = {}
        self.inbound: NodeInbound
        self.heartbeat: Heartbeat
        self.rows: Rows
        self.store: Store

    def __repr__(self) -> str:
        return f"<Node {self.setup.name} on {self.setup.socket}>"

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until a signal ends it, or until cancelled. ``task_status`` is told the socket once it listens.

        *Errors*: NodeRunsError (another node serves this socket or folder), FolderError, StoreError, ConfigError: it
        did not start.
        """
        setup = self.setup
        client = setup.make_client()
        await trio.to_thread.run_sync(client.ensure)
        lock = NodeLock.take(setup.socket, client.folder.root, setup.runtime, setup.box.declared_host)
        try:
            with trio.open_signal_receiver(*SIGNALS) as signals:
                self.store = await trio.to_thread.run_sync(Store, setup.store)
                try:
                    await self._serve(signals, task_status)
                finally:
                    with trio.CancelScope(shield=True):
                        await trio.to_thread.run_sync(self.store.close)
        finally:
            lock.release()

    async def _serve(self, signals: Any, task_status: trio.TaskStatus[str]) -> None:
        setup = self.setup
        self.rows = Rows(setup.box, self.store)
        limiter = await limiter_of(setup.make_client().folder.root)
        await trio.to_thread.run_sync(self._begin, limiter=limiter)
        before = len(setup.troubles)
        self.deliveries = setup.plugins.deliveries(setup.facts())
        if len(setup.troubles) > before:  # a node that was told to hold links does not go without them
            raise setup.troubles[before]
        self.links.deliveries = [delivery for _, delivery in self.deliveries]
        async with trio.open_nursery() as background:
            gate = WriterGate(*self._folder_and_box(), topology=setup.make_client().topology)
            client = setup.make_client()
            self.writers = Writers(
                client.folder,
                gate,
                self.store,
                limiter,
                client.settings,
                known_as=self._known_as,
                on_cut=lambda handle, cut: self.log.warning("torn tail cut", handle=handle, size_bytes=cut),
                on_fault=lambda handle, error: self.log.exception("append failed", error, handle=handle),
            )
            await background.start(self.writers.run)
            view = FolderView(client, limiter)
            self.filer = Filer(view, self._append, self.links, self._filed_before, self._note_failure)
            self.inbound = NodeInbound(self.filer, self.links, self.log.info)
            self.heartbeat = Heartbeat(setup.make_client(), self.rows, limiter, self.log.warning)
            self.ops = NodeOps(self)
            self.wire = Wire(self.filer, setup.box.declared_host, self.ops.table())
            listener = await open_unix_listener(
                setup.socket, on_refused=lambda peer: self.log.warning("client refused", uid=peer.uid, pid=peer.pid)
            )
            background.start_soon(self._forget_old_ids)
            background.start_soon(self._sign_of_life)
            background.start_soon(self.heartbeat.run)
            for name, delivery in self.deliveries:
                background.start_soon(self._keep_serving, name, delivery)
            self.started_at = trio.current_time()
            self.log.info("started", node=setup.name, socket=setup.socket, version=sotbus.__version__)
            self.notifier.ready(f"{setup.name} serves {client.folder.root}")
            task_status.started(setup.socket)
            async with trio.open_nursery() as front:
                accepting = trio.CancelScope()
                try:
                    front.start_soon(self._accept, listener, front, accepting)
                    await self._until_told(signals)
                finally:
                    self.notifier.stopping("draining")
                    self.log.info("draining", count=len(self.wire.connections))
                    self.wire.draining = self.inbound.draining = True
                    accepting.cancel()  # before the listener closes, which would end its task with an error
                    with trio.move_on_after(DRAIN_S, shield=True):
                        await listener.aclose()
                        while self.wire.under_way or self.inbound.under_way:
                            await trio.sleep(0.02)
                    front.cancel_scope.cancel()
            background.cancel_scope.cancel()
        self.log.info("stopped", node=setup.name, up_s=round(trio.current_time() - self.started_at, 1))

    def _folder_and_box(self) -> tuple[Any, Any]:
        client = self.setup.make_client()
        return client.folder, client.box

    def _begin(self) -> None:
        """In a thread: the rows, the record by the rules, and the intents that a node before this one left open."""
        self.rows.load()
        client = self.setup.make_client()
        self._known_as = os.path.realpath(client.folder.root)  # whichever way the folder is named, today or tomorrow
        try:
            self.record = setups.claim_record(client)
        except FilingFailed as error:
            self.record = f"refused: {error}"
            self.log.warning("record refused", error=str(error), path=client.folder.manager_record)
        gate = WriterGate(client.folder, client.box, topology=client.topology)
        bound_s = client.settings.inbox_lock_wait_s
        settled = settle_open(self.store, client.folder, gate.manager, bound_s, self._known_as)
        if settled.filed or settled.not_filed or settled.left:
            self.log.info("settled", count=settled.filed + settled.not_filed)
        for handle, trouble in settled.left.items():
            self.log.warning("not settled", handle=handle, error=str(trouble))

    async def _append(self, filing: Filing, manager: LockManager, bound_s: float) -> None:
        del manager  # the writer asks for it again when its turn comes
        await self.writers.file(filing, bound_s)

    async def _filed_before(self, filing: Filing) -> bool:
        return await self.writers.first_answer(filing) is not None

    def _note_failure(self, filing: Filing, error: SotbusError) -> None:
        self.log.warning("filing failed", handle=filing.to, code=error.code, error=str(error))

    async def _accept(self, listener: UnixListener, clients: trio.Nursery, scope: trio.CancelScope) -> None:
        """Take connections until the scope is cancelled; they outlive it in the nursery ``clients``."""
        with scope:
            await trio.serve_listeners(self._client, [listener], handler_nursery=clients)

    async def _client(self, stream: UnixStream) -> None:
        """One connection; whatever goes wrong with it ends it and nothing else."""
        connection = Connection(stream, self.wire)
        self.connected[connection] = trio.current_time()
        try:
            async with stream:
                await connection.run()
        except Exception as error:
            self.log.exception("client failed", error, client=connection.name)
        finally:
            del self.connected[connection]

    async def _keep_serving(self, name: str, delivery: Delivery) -> None:
        """A delivery's serve, started again when it ends."""
        wait_s = RESTART_MIN_S
        while True:
            began = trio.current_time()
            try:
                await delivery.serve(self.inbound)
            except Exception as error:
                self.log.exception("delivery ended", error, plugin=name, retry_s=wait_s)
            else:
                if trio.current_time() - began < RESTART_MIN_S:
                    return  # one that only sends may return at once
                self.log.info("delivery ended", plugin=name, retry_s=wait_s)
            if trio.current_time() - began >= STEADY_S:
                wait_s = RESTART_MIN_S
            await trio.sleep(wait_s)
            self.restarts[name] = self.restarts.get(name, 0) + 1
            wait_s = min(wait_s * 2, RESTART_MAX_S)

    async def _until_told(self, signals: Any) -> None:
        async for number in signals:
            name = signal.Signals(number).name
            self.log.info("signal", signal=name)
            if number != signal.SIGHUP:
                return
            await self.reload()

    async def reload(self) -> None:
        """Read the peers file again and go by it, whole or not at all. Never raises."""
        self.notifier.reloading()
        try:
            peers = await trio.to_thread.run_sync(self.setup.read_peers)
            facts = self.setup.facts(peers)
            updates: list[Callable[[], None]] = []
            for name, delivery in self.deliveries:
                if isinstance(delivery, LinkDelivery):
                    update = delivery.prepare(self.setup.plugins.facts_of(facts, name))
                    if update is not None:
                        updates.append(update)
            for update in updates:
                update()
            self.links.replace(peers)
        except (ConfigError, SotbusError, OSError) as error:
            self.log.error("not reloaded", error=str(error), config=self.setup.peers_path)
        except Exception as error:
            self.log.exception("not reloaded", error, config=self.setup.peers_path)
        else:
            self.log.info("reloaded", peers=len(peers), config=self.setup.peers_path)
        self.log.reopen()
        self.notifier.ready()

    async def _forget_old_ids(self) -> None:
        while True:
            await trio.sleep(EXPIRE_S)
            try:
                await trio.to_thread.run_sync(self.store.expire)
            except SotbusError as error:
                self.log.warning("message IDs kept", error=str(error))

    async def _sign_of_life(self) -> None:
        watchdog_s = self.notifier.watchdog_s
        if watchdog_s is None:
            return
        while True:
            self.notifier.watchdog()
            await trio.sleep(watchdog_s / 2)
