"""The Python API: ``async with sotbus.open_bus() as bus`` (trio).

    async with sotbus.open_bus(name="worker") as bus:
        await bus.send("@api-vm", "ready")
        async for message in bus.messages():
            print(message.sender, message.text)

Whatever can block (a lock, a disk, a mount) runs in worker threads under a limiter per mount; at most three threads a
bus: one that sends, one that reads, one that keeps the handle live. ``docs/python-api.md`` says the same at length.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio

from sotbus.bus_values import Agent, Message, Receipt, agent_of
from sotbus.bus_work import Keeper, Reader, Sender
from sotbus.comm import membership
from sotbus.comm.sending import touch
from sotbus.errors import BadRequest, FolderError, InboxBusy, MountHung, NeedsNode, SotbusError
from sotbus.mailwatch import MailWatch
from sotbus.mount_limits import DISK_S, Worker, limiter_of
from sotbus.program import client_maker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from sotbus.comm.client import Client

    Filings = list[tuple[str, SotbusError | None]]
    Agents = list[Agent]

__all__ = ["Agent", "Bus", "Mail", "Message", "Receipt", "open_bus", "open_bus_over"]

TOUCH_EVERY_S = 5.0
"""Least time between two stamps of ``last_seen``. Each is a write of the whole registry, and a handle is live 600 s."""

HEARTBEAT_S = 120.0
"""How often an idle bus stamps its handle: well within the 600 s for which a stamp keeps it live."""

BUSY_PAUSE_S = 0.2
"""Pause before an inbox is read again whose lock was held past its bound; a release makes no event to wait for."""

log = logging.getLogger("sotbus.bus")


def open_bus(
    name: str | None = None,
    *,
    comm_home: str | None = None,
    config: str | None = None,
    project: str | None = None,
    expertise: Sequence[str] = (),
    notify: Callable[[str], None] = log.warning,
) -> AbstractAsyncContextManager[Bus]:
    """A bus for the block of an ``async with``.

    :param name: join as this handle, as a session of this program's own; without it, act as the session that this
        program runs in, which has to be joined (``sotbus join``).
    :param comm_home: the comm folder; else ``$SOT_COMM_HOME``, the config's, or ``~/.sot-comm``.
    :param config: the configuration file; else ``$SOTBUS_CONFIG`` or the usual places.
    :param project: a folder in the project to act for; else the working directory's.
    :param expertise: what a join says that this program knows.
    :param notify: takes notes and warnings for the person; may be called in any thread.

    The handle is live for as long as the block runs, and for ten minutes more. Leaving the block does not give it back,
    so mail that comes after is there for the next run; ``sotbus leave --name`` does.

    *Errors*: ConfigError, PluginError, FolderError, BadHandle; NotJoined without a name; SlotTaken where another live
    process of this box has the name; the registry's (RegistryUnreadable, RegistryWriteFailed).
    """
    make = client_maker(name=name, comm_home=comm_home, config=config, project=project, notify=notify)
    return open_bus_over(make, join=name, expertise=expertise)


@asynccontextmanager
async def open_bus_over(
    make: Callable[[], Client], *, join: str | None = None, expertise: Sequence[str] = ()
) -> AsyncIterator[Bus]:
    """:func:`open_bus` with clients from elsewhere, each of which is one thread's at a time.

    :param make: makes a client of one and the same session; called in a worker thread, several times.
    :param join: take this handle first.
    """
    alone = trio.CapacityLimiter(1)
    clients = await trio.to_thread.run_sync(lambda: [make() for _ in range(3)], abandon_on_cancel=True, limiter=alone)
    sending, reading, keeping = clients
    folder, settings = sending.folder, sending.settings
    try:
        limiter = await limiter_of(folder.root)
    except OSError as error:
        raise FolderError(f"the comm folder {folder.root} cannot be looked at: {error.strerror or error}") from error
    entering_s = settings.lock_wait_s + settings.touch_wait_s
    worker = Worker(limiter, entering_s + DISK_S, entering_s + settings.mount_wait_s)
    handle = await worker.run(partial(_enter, sending, join, expertise))
    bus = Bus(handle, limiter, sending, reading, keeping)
    scope = trio.CancelScope()
    # Not a nursery: that would wrap every exception of the caller's block into a group.
    trio.lowlevel.spawn_system_task(bus._keep_live, scope, name=f"keeps @{handle} live")
    try:
        yield bus
        await bus._last_touch()
    finally:
        scope.cancel()
        bus._close()


def _enter(client: Client, join: str | None, expertise: Sequence[str]) -> str:
    """In a thread: the folder, the handle, the first stamp."""
    client.ensure()
    if join is not None:
        return membership.join(client, name=join, expertise=expertise).handle
    agents = client.registry.agents()
    handle = client.identity(agents, adopt=True).handle
    touch(client, handle, agents)
    return handle


class Bus:
    """An open bus; :func:`open_bus` makes it. ``handle`` is this program's, without the ``@``.

    Any task of the trio run may call it. Sends wait for each other, and so do reads.

    *Errors* of every method: :class:`BadRequest` once the block is left; :class:`MountHung` where the folder's file
    system does not answer within the wait for its lock and ``comm.mount_wait_s`` (10 s).
    """

    def __init__(
        self, handle: str, limiter: trio.CapacityLimiter, sending: Client, reading: Client, keeping: Client
    ) -> None:
        settings = sending.settings
        self.handle = handle
        self._sender = Sender(sending, handle)
        self._reading = reading
        self._keeper = Keeper(keeping, handle)

        def worker(wait_s: float) -> Worker:
            return Worker(limiter, wait_s + DISK_S, wait_s + settings.mount_wait_s)

        self._send_worker = worker(settings.inbox_lock_wait_s)
        self._read_worker = worker(settings.inbox_read_wait_s)
        self._keep_worker = worker(settings.touch_wait_s)
        self._poll_turn = trio.Lock()
        self._used = trio.Event()
        self._mail: weakref.WeakSet[Mail] = weakref.WeakSet()
        self._open = True

    def __repr__(self) -> str:
        state = "" if self._open else " (closed)"
        return f"<Bus @{self.handle} in {self._reading.folder.root}{state}>"

    async def send(self, to: str, text: str) -> Receipt:
        """File a message in a session's mailbox.

        :param to: ``@`` and the recipient's handle.

        *Durability*: when this returns, the line is on disk.
        *Errors*: BadRequest, TooLarge, BadHandle; NotHere, NoLiveSession; NotJoined where the handle is no longer this
        session's; InboxLockHeld past ``inbox_lock_wait_s`` (2 s); FilingFailed; NeedsNode for an address (no ``@``). In
        each case nothing was filed, unless a FilingFailed says ``outcome_unknown``.
        *Cancellation*: a send that has not begun files nothing. One that has begun is filed or fails whole in its
        thread, and this returns its answer; only where none comes in time (the lock's bound and 5 s: the mount hangs)
        is Cancelled raised. A send that raises Cancelled may thus have been filed, and is never half filed.
        """
        self._check_open()
        if not to.startswith("@"):
            raise NeedsNode(
                f"{to!r} is an address, and addresses need this box's node; nothing was sent",
                hint=f"for the session of that handle write '@{to}'",
            )
        try:
            return await self._send_worker.run(partial(self._sender.send, to[1:], text))
        finally:
            self._used.set()

    async def broadcast(self, text: str) -> Filings:
        """File a copy for every other handle; answers each handle, and why it got none or None.

        *Errors*: BadRequest, TooLarge, NotJoined: nothing was filed for anybody.
        *Cancellation*: between two recipients; who has got a copy is not told then.
        """
        self._check_open()
        filings: Filings = []
        try:
            for to in await self._send_worker.run(partial(self._sender.others, text)):
                try:
                    await self._send_worker.run(partial(self._sender.send, to, text, broadcast=True))
                except SotbusError as error:
                    filings.append((to, error))
                else:
                    filings.append((to, None))
        finally:
            self._used.set()
        return filings

    @asynccontextmanager
    async def poll(self) -> AsyncIterator[Sequence[Message]]:
        """New messages, oldest first, for the block of an ``async with``; does not wait for any.

        The cursor moves past all of them when the block is left in the usual way. A block that raises, or is cancelled,
        leaves it where it is, and the messages come again: each message is handled at least once.

        *Errors*: InboxBusy past ``inbox_read_wait_s`` (3 s): poll again; NotJoined; SotbusError where the inbox cannot
        be read or, at the end of the block, the cursor cannot be written.
        *Cancellation*: the cursor stands.
        """
        self._check_open()
        async with self._poll_turn:
            reader = Reader(self._reading, self.handle)
            try:
                seen, messages = await self._read_worker.run(reader.look)
                yield messages
                await self._read_worker.run(partial(reader.advance, seen))
            finally:
                self._used.set()

    def messages(self) -> Mail:
        """The messages that are new and those that come, one by one, without end: ``async for m in bus.messages()``.

        The cursor moves past a message when the next one is asked for. So a program that dies, raises or breaks out of
        the loop while it handles a message gets that one again, and only that one: each is handled at least once. Where
        the inbox is being written for longer than a read waits, it waits on.

        *Errors* of an iteration: NotJoined where the handle is no longer this session's; SotbusError where the inbox
        cannot be read or the cursor cannot be written. The iteration may be taken up again.
        *Cancellation*: the cursor stands before the message that is being handled, or the next one.
        """
        self._check_open()
        reader = Reader(self._reading, self.handle)
        watch = MailWatch(self._reading.folder, self.handle, self._reading.box, self._read_worker)
        mail = Mail(reader, self._read_worker, watch, self._used_now)
        self._mail.add(mail)
        return mail

    async def list(self) -> Agents:
        """Everybody in the registry, this handle included, in the registry's order.

        *Errors*: RegistryUnreadable.
        *Cancellation*: changes nothing.
        """
        self._check_open()
        registry, clock = self._reading.registry, self._reading.clock

        def entries() -> Agents:
            agents = registry.agents()
            now = clock()
            return [agent_of(handle, agents, now) for handle in agents]

        return await self._read_worker.run(entries)

    def _check_open(self) -> None:
        if not self._open:
            raise BadRequest("this bus is closed: its 'async with' block was left")

    def _used_now(self) -> None:
        self._used.set()

    def _close(self) -> None:
        self._open = False
        for mail in self._mail:
            mail.close()

    async def _last_touch(self) -> None:
        """The stamp of what was done since the last one, so that a program of one send is seen too."""
        if self._used.is_set():
            self._used = trio.Event()
            try:
                await self._keep_worker.run(self._keeper.touch)
            except MountHung:
                return  # the stamp is best effort

    async def _keep_live(self, scope: trio.CancelScope) -> None:
        """Stamp ``last_seen`` after the bus was used, and now and then when it was not; never in the way of an answer.

        A system task: nothing may leave it.
        """
        with scope:
            while True:
                with trio.move_on_after(HEARTBEAT_S):
                    await self._used.wait()
                self._used = trio.Event()
                try:
                    await self._keep_worker.run(self._keeper.touch)
                except Exception:
                    log.exception("@%s could not be kept live", self.handle)
                await trio.sleep(TOUCH_EVERY_S)


class Mail:
    """The asynchronous iterator of :meth:`Bus.messages`; for one task at a time. It ends when its bus is closed."""

    def __init__(self, reader: Reader, worker: Worker, watch: MailWatch, used: Callable[[], None]) -> None:
        self._reader = reader
        self._worker = worker
        self._watch = watch
        self._used = used

    def __repr__(self) -> str:
        return f"<Mail of @{self._reader.handle}, {len(self._reader.queue)} read ahead>"

    def __aiter__(self) -> Mail:
        return self

    async def __anext__(self) -> Message:
        reader, busy = self._reader, False
        while not self._watch.closed:
            try:
                await self._worker.run(reader.step)
            except InboxBusy as error:
                if not busy:
                    reader.client.notify(f"note: {error}")
                busy = True
                await trio.sleep(BUSY_PAUSE_S)
                continue
            if reader.queue:
                reader.shown = reader.queue.popleft()
                self._used()
                return reader.shown.message
            try:
                await self._watch.wait()
            except trio.ClosedResourceError:
                break
        raise StopAsyncIteration

    def close(self) -> None:
        """End the iteration; the message that is being handled comes again at the next one."""
        self._watch.close()
