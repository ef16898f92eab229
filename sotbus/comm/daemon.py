"""The synchronous client of a daemon's socket: one request on the page's wire, and one truthful answer to it.

Sources: sot-comm v1, The wire; facts 8.2 (answer handling) and 11 (wire, hello, endpoints).

A connection carries one request. The hello and the request go out back to back; what comes back is read until the
request's answer, its refusal, the end of the connection, or the end of the wait. Nothing is tried twice.
"""

from __future__ import annotations

import _socket
import errno
import json
import os
import select
import time

from sotbus import message
from sotbus.comm.frame_lines import MAX_FRAME_BYTES, FrameLines, LineError, blob_bytes
from sotbus.comm.runtime_folder import check_private_folder, check_socket_path, peer_of, socket_path
from sotbus.errors import BadRequest, NeedsNode, Refused, SotbusError, TooLarge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

ANSWER_WAIT_S = 5.0
"""How long a sender waits for the answer: none by then is FAILED (sot-comm v1, The wire)."""


PROTOCOL = 3
"""The version that a hello names (facts 11)."""

PROTOCOL_MISMATCH = "protocol_mismatch"
"""The one code of a refused hello that does not decide: older daemons answer the request all the same (facts 11)."""

HELLO_ID = 0
REQUEST_ID = 1

SOCKET = "SOT_SOCKET"
RELAY_ENDPOINT = "SOT_RELAY_ENDPOINT"

READ_BYTES = 1 << 16

CONNECT_PAUSE_S = 0.01
"""Pause between two tries to connect to a daemon that has not accepted the connections it has; poll(2) cannot wait for
that on a Unix socket (connect(2), EAGAIN)."""

UNKNOWN = "the outcome is unknown: the daemon may have done it all the same"


class NoDaemonError(NeedsNode):
    """There is no daemon to ask: nothing was sent, and nothing can have been done. The text says why."""


class Answer:
    """What a request came to.

    ``error`` is None where it was done, else the reason: the daemon's own words where it gave any. ``code`` is the
    daemon's, or ``""``. ``outcome_unknown`` says that it may have been done although the answer is an error.
    """

    __slots__ = ("code", "error", "hint", "outcome_unknown", "payload")

    def __init__(
        self,
        error: str | None = None,
        code: str = "",
        *,
        outcome_unknown: bool = False,
        hint: str = "",
        payload: Mapping[str, Any] | None = None,
    ) -> None:
        self.error = error
        self.code = code
        self.outcome_unknown = outcome_unknown
        self.hint = hint or (UNKNOWN if outcome_unknown else "")
        self.payload: Mapping[str, Any] = payload or {}

    def __repr__(self) -> str:
        if self.error is None:
            return "<Answer ok>"
        return f"<Answer {self.code or 'error'}: {self.error}{', outcome unknown' if self.outcome_unknown else ''}>"

    @property
    def ok(self) -> bool:
        return self.error is None

    def check(self) -> None:
        """Return where it was done. *Errors*: :class:`Refused` with the reason, its code and the hint."""
        if self.error is not None:
            refused = Refused(self.error, self.code or "file_failed", outcome_unknown=self.outcome_unknown)
            refused.hint = self.hint
            raise refused


class Daemon:
    """A daemon by its endpoint. Holds no descriptor; each request is a connection of its own.

    :param endpoint: ``unix:/path``, or a bare absolute path.
    :param host: this box's declared host, for the hello.
    :param name: the handle that asks, ``""`` for none.
    :param agent: whether an agent's session asks, and not a person's.

    *Errors* of the constructor: :class:`NoDaemonError` for an endpoint of another kind.
    """

    __slots__ = ("_hello", "endpoint", "path")

    def __init__(self, endpoint: str, host: str, *, name: str = "", agent: bool = False) -> None:
        self.path = path_of(endpoint)
        self.endpoint = f"unix:{self.path}"
        hello = {
            "client_id": "sot-comm",
            "last_seen_revision": 0,
            "protocol": PROTOCOL,
            "app_version": "comm",
            "host": message.unicode_of(host),
            "os_user": f"uid:{os.geteuid()}",
            "role": "agent" if agent else "cli",
            "name": name,
        }
        self._hello = _encode(HELLO_ID, "hello", hello)

    def __repr__(self) -> str:
        return f"<Daemon {self.endpoint}>"

    @classmethod
    def own(cls, environ: Mapping[str, str], host: str, *, name: str = "", configured: str | None = None) -> Daemon:
        """This box's: ``$SOT_SOCKET``, else the configured socket, else the runtime folder's. It need not run.

        *Errors*: :class:`NoDaemonError` where ``$SOT_SOCKET`` names no socket.
        """
        endpoint = environ.get(SOCKET) or configured or socket_path(environ)
        return cls(endpoint, host, name=name, agent=bool(environ.get("SOT_WORKSPACE")))

    @classmethod
    def relay(cls, environ: Mapping[str, str], host: str, *, name: str = "") -> Daemon | None:
        """The hub's, by ``$SOT_RELAY_ENDPOINT``; None where that is not set. Never the own daemon in its place.

        *Errors*: :class:`NoDaemonError` for an endpoint that is not spoken here.
        """
        endpoint = environ.get(RELAY_ENDPOINT)
        return cls(endpoint, host, name=name, agent=bool(environ.get("SOT_WORKSPACE"))) if endpoint else None

    def file(
        self,
        sender: str,
        to: str,
        text: str,
        *,
        broadcast: bool = False,
        message_id: str | None = None,
        timeout_s: float = ANSWER_WAIT_S,
    ) -> Answer:
        """Have one message filed (``comm.file``).

        :param broadcast: a broadcast copy, whose ``to`` is empty in the line.
        :param message_id: files the message once, however often it is asked; an older daemon ignores it.

        *Durability*: an ``ok`` means that the line is on disk.
        *Errors*: as :meth:`ask`.
        """
        payload: dict[str, Any] = {"from": sender, "to": to, "text": text, "broadcast": broadcast}
        if message_id is not None:
            payload["sotbus"] = {"id": message_id}
        return self.ask("comm.file", payload, timeout_s)

    def join(self, workspace_id: str, handle: str, *, timeout_s: float = ANSWER_WAIT_S) -> Answer:
        """Declare a row's handle, or, with an empty ``workspace_id``, ask whether a row holds it (``agent.join``).

        *Errors*: as :meth:`ask`.
        """
        return self.ask("agent.join", {"workspace_id": workspace_id, "handle": handle}, timeout_s)

    def ask(self, op: str, payload: Mapping[str, Any], timeout_s: float = ANSWER_WAIT_S) -> Answer:
        """One request and its answer, within ``timeout_s`` seconds, the connecting included.

        *Errors*: :class:`NoDaemonError` where none listens at the endpoint, or where that is not private to this user;
        BadRequest (text that is not Unicode) and TooLarge. Nothing was sent then. Everything later is an answer.
        *Cancellation*: an exception that arrives while waiting (KeyboardInterrupt) closes the connection; the request
        may be done all the same.
        """
        request = _encode(REQUEST_ID, op, payload)
        if len(request) > MAX_FRAME_BYTES:
            raise TooLarge(
                f"too_large: the request has {len(request)} bytes and a frame {MAX_FRAME_BYTES}; nothing was sent"
            )
        deadline = time.monotonic() + timeout_s
        sock = self._connect(deadline)
        if sock is None:
            return self._unanswered(None, "it accepts no connection", unknown=False)
        try:
            return self._exchange(sock, self._hello + request, deadline)
        finally:
            sock.close()

    def _connect(self, deadline: float) -> _socket.socket | None:
        """A connection to a daemon of this user, or None where it accepted none in time. *Errors*: NoDaemonError."""
        try:
            folder = os.path.realpath(os.path.dirname(self.path))
            path = os.path.join(folder, os.path.basename(self.path))
            os.stat(path)
            check_private_folder(folder)
            check_socket_path(path)
            sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                if not _connected(sock, path, deadline):
                    sock.close()
                    return None
                peer = peer_of(sock)
                if not peer.is_this_user:
                    raise NoDaemonError(f"the daemon at {self.endpoint} is another user's (uid {peer.uid})")
            except BaseException:
                sock.close()
                raise
        except NoDaemonError:
            raise
        except SotbusError as error:
            raise NoDaemonError(f"no daemon is asked at {self.endpoint}: {error}", hint=error.hint) from error
        except OSError as error:
            why = error.strerror or str(error)
            raise NoDaemonError(f"no daemon is at {self.endpoint} ({why})", hint="start one: sotbus serve") from error
        return sock

    def _exchange(self, sock: _socket.socket, out: bytes, deadline: float) -> Answer:
        """Write and read at the same time, so that neither end can wait for the other to read."""
        unsent = memoryview(out)
        writable = True
        lines = FrameLines()
        refused: Mapping[str, Any] | None = None
        poll = select.poll()
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return self._unanswered(refused, unknown=not unsent)
            poll.register(sock.fileno(), select.POLLIN | (select.POLLOUT if unsent and writable else 0))
            poll.poll(left * 1000 + 1)
            if unsent and writable:
                try:
                    unsent = unsent[sock.send(unsent) :]
                except BlockingIOError:
                    pass
                except OSError:  # closed; what it wrote before that can still be read
                    writable = False
            try:
                data = sock.recv(READ_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                return self._unanswered(refused, "it closed the connection", unknown=not unsent)
            lines.feed(data)
            try:
                while (line := lines.next()) is not None:
                    frame = message.parse(line)
                    if frame is None:
                        raise LineError("a line that is no JSON object")
                    payload = frame.get("payload")
                    lines.skip(blob_bytes(payload))
                    asked = frame.get("id") if frame.get("kind") == "res" else None
                    if type(asked) is int and asked == REQUEST_ID:
                        return _judged(payload)
                    if type(asked) is int and asked == HELLO_ID and isinstance(payload, dict) and "error" in payload:
                        if payload.get("code") != PROTOCOL_MISMATCH:
                            return _hello_refused(payload, unknown=False)
                        refused = payload
            except LineError as error:
                return self._unanswered(refused, f"it sent what is no answer: {error}", unknown=not unsent)

    def _unanswered(self, refused: Mapping[str, Any] | None, why: str = "", *, unknown: bool) -> Answer:
        """No answer came to the request. :param unknown: whether all of it was written, so that it may be done."""
        if refused is not None:
            return _hello_refused(refused, unknown=unknown)
        text = f"the daemon did not answer at {self.endpoint}"
        return Answer(f"{text}: {why}" if why else text, outcome_unknown=unknown)


def path_of(endpoint: str) -> str:
    """The path of an endpoint's socket (facts 11, Endpoints).

    *Errors*: :class:`NoDaemonError`: an endpoint over ssh, whose far end is a command of another product, or a pipe.
    """
    path = endpoint.removeprefix("unix:")
    if os.path.isabs(path):
        return path
    kind, colon, _ = endpoint.partition(":")
    what = message.shown(endpoint)[:200]
    if colon and kind in ("ssh", "pipe"):
        raise NoDaemonError(
            f"{kind} endpoints are not spoken by sotbus: {what}",
            hint="run this box's node (sotbus serve) with a link to that one, or name its socket: unix:/path",
        )
    raise NoDaemonError(f"{what!r} is not an endpoint", hint="write unix:/path, with the whole path")


def _encode(number: int, op: str, payload: Mapping[str, Any]) -> bytes:
    """A request's frame, compact and in the facts page's key order. *Errors*: BadRequest."""
    frame = {"v": 1, "id": number, "kind": "req", "op": op, "payload": payload}
    try:
        return json.dumps(frame, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8") + b"\n"
    except ValueError as error:  # a lone surrogate, NaN
        raise BadRequest("the request is not valid Unicode or JSON; nothing was sent") from error


def _connected(sock: _socket.socket, path: str, deadline: float) -> bool:
    """Connect; whether it was accepted by the deadline. *Errors*: OSError."""
    while True:
        try:
            sock.connect(path)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
        else:
            return True
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(CONNECT_PAUSE_S, left))


def _judged(payload: object) -> Answer:
    """The request's answer: ``error`` decides by being there, whatever else is said (facts 8.2)."""
    if not isinstance(payload, dict):
        return Answer("the daemon answered neither ok nor a refusal", outcome_unknown=True)
    if "error" in payload:
        code, hint = payload.get("code"), payload.get("hint")
        return Answer(
            _words(payload),
            code if isinstance(code, str) else "",
            outcome_unknown=payload.get("outcome_unknown") is True,
            hint=hint if isinstance(hint, str) else "",
            payload=payload,
        )
    if payload.get("ok") is not True:
        shown = json.dumps(payload, ensure_ascii=False)[:200]
        return Answer(f"the daemon answered neither ok nor a refusal: {shown}", outcome_unknown=True, payload=payload)
    return Answer(payload=payload)


def _hello_refused(payload: Mapping[str, Any], *, unknown: bool) -> Answer:
    code = payload.get("code")
    text = f"hello refused: {_words(payload)}"
    return Answer(text, code if isinstance(code, str) else "", outcome_unknown=unknown, payload=payload)


def _words(payload: Mapping[str, Any]) -> str:
    error = payload["error"]
    return error if isinstance(error, str) else json.dumps(error, ensure_ascii=False)
