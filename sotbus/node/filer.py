"""What a node does with a message that it is asked to file: append it here, hand it on, offer it, or refuse it.

The order of the verdicts is facts 11's (comm.file). A linked box sends what its registry does not list to its hub,
once; a guest hands on what it may not append, once; the topology's hub offers what its registry does not list to every
linked box. A request that was handed on (``forwarded``) is never handed on again by a guest or a linked box.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from sotbus import message
from sotbus.comm import handles
from sotbus.comm.liveness import is_live
from sotbus.comm.registry import entry_of, text_of
from sotbus.contracts import NotSentError, OutcomeUnknownError
from sotbus.errors import (
    BadHandle,
    BadRequest,
    FilingFailed,
    NoLiveSession,
    NotHere,
    SotbusError,
)
from sotbus.link_delivery import raise_refusal, request_of
from sotbus.node.folder_view import MISSING, UNREADABLE
from sotbus.node.links import ANSWERED, NOT_ASKED, SILENT
from sotbus.node.rate import Rate
from sotbus.node.refusal import refusal_payload

if TYPE_CHECKING:
    from collections.abc import Callable

    from sotbus.contracts import Filing
    from sotbus.node.folder_view import FolderView, Seen
    from sotbus.node.links import Asked, Links

FORWARD_MORE_S = 5.0
"""How much longer than the wait for the inbox lock a request that is handed to the hub may take (facts 11)."""

OFFER_MORE_S = 1.0
"""How much longer than the wait for the inbox lock each linked box has for an offer (sot-comm v1, The wire)."""

OK: dict[str, Any] = {"ok": True}


class Filer:
    """Files for everyone who asks this node: its sessions over the socket, other nodes over links.

    :param view: the comm folder.
    :param append: files a message in a mailbox of this folder; answers after the sync. Its arguments are the filing,
        the lock manager, and the seconds it may take.
    :param links: the nodes to hand on to.
    :param on_failure: told of a filing that failed for no fault of the asker's; it must not raise.
    :param filed_before: whether a filing with a message ID is the repeat of one that is on this folder's disk.
    """

    def __init__(
        self,
        view: FolderView,
        append: Callable[..., Any],
        links: Links,
        filed_before: Callable[[Filing], Any],
        on_failure: Callable[[Filing, SotbusError], object] = lambda _filing, _error: None,
    ) -> None:
        self.view = view
        self.links = links
        self._append = append
        self._filed_before = filed_before
        self._on_failure = on_failure
        self.counts: dict[str, int] = {}
        self.rate = Rate()

    def __repr__(self) -> str:
        return f"<Filer of {self.view.client.folder.root}: {self.counts}>"

    async def answer(self, filing: Filing, *, forwarded: bool, origin: str | None, bound_s: float) -> dict[str, Any]:
        """The payload that answers a ``comm.file``: ``{ok: true}``, or ``{error, code}``.

        :param origin: the node that asks, None for a session of this box.
        :param bound_s: seconds until the asker gives up.

        *Durability*: ``ok`` means that the line is on the disk of whoever filed it.
        *Cancellation*: the message may be filed.
        """
        try:
            where = await self.file(filing, forwarded=forwarded, origin=origin, bound_s=bound_s)
        except SotbusError as error:
            self._count(error.code)
            if error.code == FilingFailed.code:  # not for what the asker did wrong
                self._on_failure(filing, error)
            return refusal_payload(error)
        self._count("filed" if where == "here" else "filed elsewhere")
        return dict(OK)

    def _count(self, outcome: str) -> None:
        self.counts[outcome] = self.counts.get(outcome, 0) + 1
        self.rate.note()

    async def file(self, filing: Filing, *, forwarded: bool, origin: str | None, bound_s: float) -> str:
        """File it; answers ``here``, or the node that filed it. *Errors*: any SotbusError with a code of the wire."""
        asked_at = trio.current_time()
        deadline = asked_at + bound_s
        if not handles.is_handle(filing.to):
            raise BadHandle(f'not a handle: "{filing.to}"')
        message.check_text(filing.text, self.view.client.settings.max_text_bytes)
        _check_unicode(filing)
        seen = self.view.recent() or await self._look(None, deadline)
        if not self._is_here(seen, filing):
            if filing.message_id is not None and await self._was_filed(filing, deadline):
                return "here"  # the first answer holds, whoever has gone since
            if seen.at < asked_at:
                seen = await self._look(asked_at, deadline)  # what would be refused or handed on is made sure of
        return await self._route(seen, filing, forwarded, origin, deadline)

    def _is_here(self, seen: Seen, filing: Filing) -> bool:
        """Whether the line goes into a mailbox of this folder, as far as a look says."""
        entry = entry_of(seen.agents, filing.to)
        listed = entry is not None and text_of(entry, "host") != ""
        return seen.manager is not None and listed and is_live((entry or {}).get("last_seen"), self.view.client.clock())

    async def _was_filed(self, filing: Filing, deadline: float) -> bool:
        with trio.move_on_at(deadline):
            return bool(await self._filed_before(filing))
        raise FilingFailed(f"the node's store did not answer in time for @{filing.to}", outcome_unknown=True)

    async def _look(self, since: float | None, deadline: float) -> Seen:
        root = self.view.client.folder.root
        try:
            with trio.move_on_at(deadline):
                return await self.view.look(since=since)
            raise FilingFailed(f"the comm folder {root} did not answer in time; nothing was filed")
        except OSError as error:
            raise FilingFailed(f"the comm folder {root} cannot be looked at: {error.strerror or error}") from error

    async def _route(self, seen: Seen, filing: Filing, forwarded: bool, origin: str | None, deadline: float) -> str:
        if seen.manager is None:
            if not seen.guest:
                raise FilingFailed(seen.refusal)
            if forwarded:
                host = self.view.client.box.declared_host
                raise FilingFailed(f"a forwarded frame reached a daemon that is not its folder's hub ({host})")
            return await self._to_hub(filing, deadline)
        if seen.trouble == UNREADABLE:
            raise FilingFailed(f"the registry could not be read, so @{filing.to} is unverified; nothing was filed")
        entry = None if seen.trouble == MISSING else entry_of(seen.agents, filing.to)
        if not text_of(entry, "host"):
            return await self._elsewhere(filing, forwarded, origin, deadline)
        assert entry is not None
        if not is_live(entry.get("last_seen"), self.view.client.clock()):
            raise NoLiveSession(f"no live session holds @{filing.to}")
        await self._append(filing, seen.manager, max(0.0, deadline - trio.current_time()))
        return "here"

    async def _elsewhere(self, filing: Filing, forwarded: bool, origin: str | None, deadline: float) -> str:
        """A handle that this folder does not list: the hub's, or a linked box's, or nobody's."""
        hub = self.links.hub()
        if hub is not None:
            if forwarded or origin == hub:
                raise NotHere(f"no box knows that handle: {filing.to}")
            return await self._to_hub(filing, deadline)
        return await self._offer(filing, origin)

    async def _to_hub(self, filing: Filing, deadline: float) -> str:
        """Hand it to the hub, once; its answer verbatim."""
        hub = self.links.hub()
        if hub is None:
            raise FilingFailed(
                "this box is not its folder's hub and has no link to it, so nothing was filed",
                hint="sotbus keys trust <user>.<hub's host> KEY --role hub --address tcp://...",
            )
        wait_s = self.view.client.settings.inbox_lock_wait_s + FORWARD_MORE_S
        bound_s = min(wait_s, max(0.0, deadline - trio.current_time()))
        try:
            answer = await self.links.file(hub, request_of(filing, forwarded=True), bound_s)
        except NotSentError as error:
            raise FilingFailed(f"the hub did not answer at {hub}: {error}") from error
        except OutcomeUnknownError as error:
            raise FilingFailed(f"the hub did not answer at {hub}: {error}", outcome_unknown=True) from error
        raise_refusal(answer, "the hub")
        return hub

    async def _offer(self, filing: Filing, origin: str | None) -> str:
        """Offer it to every linked box but the one that asks; the page's order of answers."""
        unknown = f"no box knows that handle: {filing.to}"
        nodes = [node for node in self.links.linked() if node != origin]
        if not nodes:
            raise NotHere(unknown)
        bound_s = self.view.client.settings.inbox_lock_wait_s + OFFER_MORE_S
        answers = await self.links.offer(nodes, request_of(filing, forwarded=True), bound_s, _is_ok)
        for asked in answers:
            if _is_ok(asked):
                return asked.node
        for asked in answers:
            if asked.outcome == ANSWERED and asked.answer.get("code") != "not_here":
                raise_refusal(asked.answer, asked.node)
        for asked in answers:
            if asked.outcome == SILENT:
                raise FilingFailed(f"{asked.node} did not answer: {asked.why}", outcome_unknown=True)
        absent = sorted(asked.node for asked in answers if asked.outcome == NOT_ASKED)
        if absent:
            unknown += f" (no link is up to {', '.join(absent)})"
        raise NotHere(unknown)


def _is_ok(asked: Asked) -> bool:
    return asked.outcome == ANSWERED and "error" not in asked.answer and asked.answer.get("ok") is True


def _check_unicode(filing: Filing) -> None:
    for name in (filing.sender, filing.repo):
        if message.unicode_of(name) != name:
            raise BadRequest(f"{name!r} is not valid Unicode; nothing was filed")
