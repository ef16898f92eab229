"""The transport: requests and answers between nodes over ZeroMQ, each link encrypted and each peer known by its key."""

from __future__ import annotations

import os
from collections import Counter

import trio
import zmq

from sotbus.api import BadRequest, Inbound, NotSentError, OutcomeUnknownError, SotbusError
from sotbus_zmq import frames
from sotbus_zmq.dialler import keep_dialled
from sotbus_zmq.endpoint import Endpoint
from sotbus_zmq.frames import Reason
from sotbus_zmq.key_file import NEW, KeyPair, key_path, load
from sotbus_zmq.link import Link, Pending
from sotbus_zmq.listener import Listener
from sotbus_zmq.peer_book import PeerBook
from sotbus_zmq.peer_state import DOWN, PeerState
from sotbus_zmq.pump import end_context, new_context
from sotbus_zmq.serving import Serving
from sotbus_zmq.settings import Settings
from sotbus_zmq.statistics import TransportStatistics
from sotbus_zmq.zap import Zap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Self

    from sotbus.api import BoxFacts, Peer

MAX_IN_FLIGHT = 64
"""Requests to one peer that may wait at a time."""

BIND_AGAIN_S = 0.02
"""First pause before an address is tried that this node's own listener has just given up; it doubles up to 1 s."""


class ZmqTransport:
    """Links to a node's peers: it dials those with an address, and listens for the others where the settings say so.

    A peer that dials this node is asked over its own connection. Where both dial each other, both connections stand,
    either side answers on both, and asks on the older. Nothing is queued for a peer that is not connected, and nothing
    is sent before both sides have said hello.

    :param own_name: this node, ``<user>.<host>``.
    :param own_key: this node's key pair; None only where it has neither peers nor a listener.
    :param peers: the allow-list: who may connect, who is dialled, and the names that their keys stand for.
    :param max_in_flight: requests to one peer that may wait at a time; past that a request is busy.

    *Errors*: :class:`BadRequest` where the peers contradict each other or this node, and for a listener without a key
    or without anybody on its list.
    """

    def __init__(
        self,
        own_name: str,
        own_key: KeyPair | None,
        peers: Iterable[Peer] = (),
        settings: Settings | None = None,
        *,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        self.name = own_name
        self.settings = settings or Settings()
        self._key = own_key
        self._max_in_flight = max_in_flight
        self._serving: Serving | None = None
        self._listening: Endpoint | None = None
        self._refused: Counter[str] = Counter()
        self._book = PeerBook(own_name, max_in_flight)
        self._book.swap(self._judge(peers, own_key))
        self._check_listener()

    def __repr__(self) -> str:
        up = sorted(state.name for state in self._book if state.links)
        listening = f", listening on {self._listening}" if self._listening else ""
        return f"<ZmqTransport of {self.name}{listening}, up: {', '.join(up) or 'nobody'}>"

    @classmethod
    def of(cls, box: BoxFacts) -> Self:
        """The transport of a box, with the key file that its settings name.

        *Errors*: :class:`BadRequest`, for the key file too.
        """
        settings = box.settings if isinstance(box.settings, Settings) else Settings()
        return cls(f"{box.user}.{box.host}", _key_of(box, settings), box.peers, settings)

    def prepare(self, box: BoxFacts) -> Callable[[], None]:
        """Read the key file again and judge it and the box's peers; answers what takes them on, which cannot fail.

        The other settings stay as they were at the start. It reads a file, and may be called in a thread; what it
        answers is called in trio's.

        *Errors*: :class:`BadRequest`; nothing has changed then, nor is it to.
        """
        key = _key_of(box, self.settings)
        judged = self._judge(box.peers, key or self._key)
        return lambda: self._adopt(judged, key)

    @property
    def peers(self) -> tuple[Peer, ...]:
        return tuple(state.peer for state in self._book)

    def reaches(self, node: str) -> bool:
        """Whether that node is one of the peers. No I/O."""
        return self._book.find(node) is not None

    async def request(self, node: str, request: bytes, deadline_s: float) -> bytes:
        """One request, one answer.

        A request waits for a connection only where one is being made at this moment, for a second at most (see
        ``GRACE_S``); otherwise there is one, or it fails at once.

        :param deadline_s: seconds from now.

        *Errors*: :class:`NotSentError` where it was not handed to a link: unknown node, no connection and why, no time
        left, too large; :class:`BusyError`, with the code ``busy``, past a bound, here or at the peer.
        :class:`OutcomeUnknownError` once it was sent and no answer came in time, or the connection went down.
        *Cancellation*: the answer is dropped.
        """
        state = self._book.find(node)
        if state is None:
            raise NotSentError(f"no link leads to {node}: it is none of this node's {len(self._book)} peers")
        await trio.lowlevel.checkpoint_if_cancelled()
        deadline = trio.current_time() + deadline_s
        try:
            state.enter()
            try:
                answer = await self._ask(state, request, deadline)
            finally:
                state.in_flight -= 1
        except NotSentError:
            state.counts.not_sent += 1
            await trio.lowlevel.cancel_shielded_checkpoint()  # one that tries again at once lets others run
            raise
        except OutcomeUnknownError:
            state.counts.unknown += 1
            raise
        if answer is None:
            state.counts.unknown += 1
            raise OutcomeUnknownError(f"{node} has not answered within {deadline_s:g}s; the outcome is unknown")
        return answer

    async def _ask(self, state: PeerState, request: bytes, deadline: float) -> bytes | None:
        """The answer, or None where none came in time. *Errors*: NotSentError, OutcomeUnknownError."""
        if len(request) > frames.MAX_BODY_BYTES:
            raise NotSentError(f"the request has {len(request)} bytes, and a link carries {frames.MAX_BODY_BYTES}")
        if self._serving is None:
            raise NotSentError(f"{state.name} is not connected: this node's links are not served; nothing was sent")
        if deadline <= trio.current_time():
            raise NotSentError(f"there is no time left to ask {state.name}; nothing was sent")
        link, pending = await self._send(state, request, deadline)
        try:
            with trio.move_on_at(deadline):
                await pending.done.wait()
        finally:
            link.forget(pending)
        if pending.error is not None:
            raise pending.error
        return pending.answer

    async def _send(self, state: PeerState, request: bytes, deadline: float) -> tuple[Link, Pending]:
        """Hand a request to a link; to the other one, where the first has just ended. *Errors*: NotSentError."""
        while True:
            link = await state.link(deadline)
            try:
                return link, link.ask(request)
            except NotSentError:
                if link.up or not state.links:
                    raise

    async def serve(self, inbound: Inbound) -> None:
        """Keep the links, and hand what peers ask to ``inbound``, until cancelled. It may be called again after that.

        *Errors*: :class:`SotbusError` where the listener's address cannot be had; :class:`BadRequest` for a listener
        without a key or an allow-list.
        *Cancellation*: peers are told, requests that wait have an unknown outcome, answers that are being made are
        given up; it takes a fraction of a second whatever the peers do.
        """
        if self._serving is not None:
            raise RuntimeError(f"{self!r} serves already")
        self._check_listener()
        context = new_context()
        try:
            await self._serve(context, inbound)
        finally:
            self._serving = self._listening = None
            await end_context(context)

    async def _serve(self, context: zmq.Context[zmq.Socket[bytes]], inbound: Inbound) -> None:
        """The sockets, and the tasks that own them."""
        zap = Zap(context, lambda public: self._book.of_key(public) is not None, self._note_unknown_key)
        failure: SotbusError | None = None
        try:
            async with trio.open_nursery() as nursery:
                serving = Serving(
                    context, nursery, inbound, self.settings, self._key, self._max_in_flight, self._refused
                )
                try:
                    listener = self._bind(serving, self.settings.listen) if self.settings.listen else None
                except SotbusError as error:
                    failure = error  # raised below, by itself and not as one of a group
                else:
                    self._begin(serving, zap, listener)
            if failure is not None:
                raise failure
        finally:
            for state in self._book:
                state.turn(DOWN)
            zap.close()

    def _begin(self, serving: Serving, zap: Zap, listener: Listener | None) -> None:
        self._serving = serving
        serving.nursery.start_soon(zap.run)
        if listener is not None:
            serving.nursery.start_soon(self._listen, serving, listener)
        for state in self._book:
            self._start(state)

    def _bind(self, serving: Serving, where: Endpoint | str) -> Listener:
        """A listener, bound. *Errors*: SotbusError."""
        endpoint = Endpoint.to_listen(where) if isinstance(where, str) else where
        listener = Listener(serving, endpoint, self._book.of_key)
        self._listening = listener.where
        return listener

    async def _listen(self, serving: Serving, listener: Listener) -> None:
        """Run the listener; when its scope is cancelled, because this node has another key, begin again with that."""
        while True:
            with trio.CancelScope() as serving.listener_scope:
                if listener.key is serving.key:
                    await listener.run()
                else:
                    listener.close()  # another key came before it began
            listener = await self._bind_again(serving, listener.where)

    async def _bind_again(self, serving: Serving, where: Endpoint) -> Listener:
        """A listener on an address that the last one has just given up; it takes a moment until that is free."""
        wait_s = BIND_AGAIN_S
        while True:
            await trio.sleep(wait_s)
            try:
                return self._bind(serving, where)
            except SotbusError:
                self._listening = None
                wait_s = min(1.0, 2 * wait_s)

    def _start(self, state: PeerState) -> None:
        """Begin with a peer, if links are served at all."""
        serving = self._serving
        if serving is None:
            return
        state.turn(DOWN)
        if state.peer.address is not None:
            scope = serving.dial_scopes[state.peer.public_key] = trio.CancelScope()
            serving.nursery.start_soon(self._dial, serving, state, scope)

    async def _dial(self, serving: Serving, state: PeerState, scope: trio.CancelScope) -> None:
        with scope:
            await keep_dialled(serving, state)

    def _end(self, state: PeerState, kind: str, why: str, bye: Reason) -> None:
        """End a peer's links at once, and dial it no more."""
        for link in state.links:
            link.close(kind, why, bye)
        if self._serving is not None:
            scope = self._serving.dial_scopes.pop(state.peer.public_key, None)
            if scope is not None:
                scope.cancel()
            state.turn(DOWN)

    def update(self, peers: Iterable[Peer], key: KeyPair | None = None) -> None:
        """Take another list of peers, and another key, whole or not at all.

        New peers are dialled, those that are no longer there are cut off at once, the others keep their connections. A
        new key ends every connection, and all are made again with it. A list without anybody is taken too: a listener
        then refuses everybody, and a key that is not to be trusted any more is never kept for want of another.

        :param key: None leaves the one that there is.

        *Errors*: :class:`BadRequest`; nothing has changed then.
        """
        self._adopt(self._judge(peers, key or self._key), key)

    def _adopt(self, judged: tuple[Peer, ...], key: KeyPair | None) -> None:
        """Go by peers and a key that have been judged."""
        gone, new = self._book.swap(judged)
        for state in gone:
            self._end(state, "removed", "it was taken off this node's list", Reason.REMOVED)
        if key is not None and (self._key is None or key.public != self._key.public or key.secret != self._key.secret):
            self._key = key
            self._take_key(key, [state for state in self._book if state not in new])
        for state in new:
            self._start(state)

    def _take_key(self, key: KeyPair, known: list[PeerState]) -> None:
        """Begin again with everybody that was there before, under another key."""
        serving = self._serving
        if serving is None:
            return
        serving.key = key
        for state in known:
            self._end(state, "new key", "this node has a new key", Reason.STOPPING)
        serving.listener_scope.cancel()
        for state in known:
            self._start(state)

    def statistics(self) -> TransportStatistics:
        """The links as they are now; called from trio."""
        now = trio.current_time()
        return TransportStatistics(
            node=self.name,
            serving=self._serving is not None,
            listening=None if self._listening is None else str(self._listening),
            refused=dict(self._refused),
            peers=tuple(state.statistics(now) for state in self._book),
        )

    def _note_unknown_key(self) -> None:
        self._refused["unknown key"] += 1

    def _judge(self, peers: Iterable[Peer], key: KeyPair | None) -> tuple[Peer, ...]:
        judged = self._book.judge(peers, key)
        if judged and key is None:
            raise BadRequest("this node has peers and no key of its own", hint=NEW)
        return judged

    def _check_listener(self) -> None:
        """No listener without a key and somebody who may come (decisions, Security). *Errors*: BadRequest."""
        if self.settings.listen is None:
            return
        if self._key is None:
            raise BadRequest(f"the node cannot listen on {self.settings.listen}: it has no key of its own", hint=NEW)
        if not len(self._book):
            raise BadRequest(
                f"the node cannot listen on {self.settings.listen}: nobody is on its list of peers, so nobody may come",
                hint="name a peer with 'sotbus keys trust', or take listen out of [plugin.zmq]",
            )


def _key_of(box: BoxFacts, settings: Settings) -> KeyPair | None:
    """The key in the box's key file; None where there is none and none is needed. *Errors*: KeyFileError."""
    path = key_path(settings.key_file, box.config_folder, box.host)
    needed = bool(box.peers or settings.listen)
    return load(path) if needed or os.path.lexists(path) else None
