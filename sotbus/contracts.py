"""What a plugin's objects promise: the Protocols behind the hooks, and the values that cross them.

Import these names from :mod:`sotbus.api`. The contract suites in :mod:`sotbus.testing` hold an implementation to what
is written here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

from sotbus.errors import SotbusError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.peers import Peer


@dataclass(frozen=True)
class BoxFacts:
    """The box that asks: its declared host, the user's name, its machine id (None where it has none), its comm folder.

    ``settings`` is the plugin's own table as the type that its ``sotbus_settings`` names, None where it names none.
    ``peers`` are the nodes that this box talks to (:class:`sotbus.peers.Peer`), and ``config_folder`` is where this
    user's config files and keys lie.
    """

    host: str
    user: str
    machine_id: str | None
    comm_home: str
    settings: object = None
    peers: tuple[Peer, ...] = ()
    config_folder: str = ""


@dataclass(frozen=True)
class Destination:
    """Where a message goes: the node that owns the mailbox, the mailbox's key, whether its session is live."""

    node: str
    mailbox: str
    live: bool = True


@dataclass(frozen=True)
class Filing:
    """One message to be filed. ``to`` is the recipient's key, ``broadcast`` asks for a copy with an empty ``to``.

    ``node`` is the destination's, for a delivery that reaches several.
    """

    sender: str
    to: str
    repo: str
    text: str
    broadcast: bool = False
    message_id: str | None = None
    node: str = ""


@dataclass(frozen=True)
class Receipt:
    """A filing that is on disk: ``outcome`` is ``delivered`` or ``queued``, ``where`` names the mailbox's place."""

    outcome: str
    where: str


class WakeOutcome(Enum):
    """What a wake came to: ``WOKEN`` (told), ``HELD`` (busy, ask again), ``REFUSED`` (cannot be told this way)."""

    WOKEN = "woken"
    HELD = "held"
    REFUSED = "refused"


@dataclass(frozen=True)
class Screen:
    """A session's terminal as a harness judges it: its lines, the cursor's row and column from 0, its width."""

    lines: Sequence[str]
    row: int
    column: int
    width: int
    dim: frozenset[tuple[int, int]] = field(default_factory=frozenset)


class NotSentError(SotbusError):
    """A transport did not send the request: the peer has not seen it, and it may be sent again."""

    code = "unavailable"


class OutcomeUnknownError(SotbusError):
    """A transport sent the request and got no answer in time: the peer may have acted on it."""

    code = "timeout"


@runtime_checkable
class LockManager(Protocol):
    """How to exclude other writers of a folder on one kind of mount. Synchronous and thread-safe; imports no trio."""

    @property
    def identity(self) -> str:
        """One line that is equal for writers that exclude each other and for no others."""

    @property
    def proves_fresh_read(self) -> bool:
        """Whether a file opened by path after the folder was opened is as its last writer left it."""

    @property
    def fences_data(self) -> bool:
        """Whether a holder that lost the lock unawares can no longer write through a descriptor that :meth:`fence` had.

        True also where a lock cannot be lost unawares: on a local disk it ends with its process.
        """

    def hold(self, path: str, exclusive: bool, bound_s: float) -> AbstractContextManager[object]:
        """Hold the lock of a lock file, which is made where it is not there, never removed, and opened read-write.

        :param exclusive: for a writer; else shared with other readers.
        :param bound_s: seconds to wait; there is always one try.

        *Errors*: :class:`LockTimeoutError` past the bound, when the context is made or entered; OSError.
        *Cancellation*: an exception that arrives while waiting leaves nothing locked; the lock dies with its process.
        """

    def fence(self, fd: int, bound_s: float) -> bool:
        """Tie an open data file to the lock, so that a write to it fails once the lock was lost unawares.

        Called under an exclusive hold, after the file was opened and before its length is read; the file is closed
        before the hold ends, which unties it. Answers whether the lock can be lost at all (a lease that ends while its
        holder is cut off); a manager whose lock cannot does nothing.

        :param bound_s: seconds to wait; there is always one try.

        *Errors*: :class:`LockTimeoutError` past the bound; OSError. Nothing was written then.
        """


@runtime_checkable
class Delivery(Protocol):
    """A way for mail to reach a mailbox."""

    def reaches(self, destination: Destination) -> bool:
        """Whether that folder or node is this delivery's. No I/O."""

    async def deliver(self, filing: Filing, deadline_s: float) -> Receipt:
        """File one message; returning means that it is on disk there.

        :param deadline_s: seconds from now by which the answer is wanted.

        *Errors*: any :class:`SotbusError`: not filed, unless it says that the outcome is unknown.
        *Cancellation*: leaves nothing half done; a filing that has begun may still be filed.
        """

    async def serve(self, inbound: Inbound) -> None:
        """Take what comes in from elsewhere until cancelled; one that only sends may return at once."""


@runtime_checkable
class Inbound(Protocol):
    """What a serving transport hands requests to; given by the node."""

    async def answer(self, peer: str, request: bytes) -> bytes:
        """The answer to an authenticated peer's request."""

    def up(self, peer: str) -> None:
        """A peer's connection came up."""

    def down(self, peer: str) -> None:
        """A peer's connection went down."""


@runtime_checkable
class Transport(Protocol):
    """Carries a request to a node and its answer back. It authenticates the peer and knows nothing of mail."""

    def reaches(self, node: str) -> bool:
        """Whether that node is one of this transport's. No I/O."""

    async def request(self, node: str, request: bytes, deadline_s: float) -> bytes:
        """One request, one answer.

        *Errors*: :class:`NotSentError` where the peer has not seen it; :class:`OutcomeUnknownError` where it may have.
        *Cancellation*: a late answer is dropped.
        """

    async def serve(self, inbound: Inbound) -> None:
        """Answer peers until cancelled, one after another or side by side. It may be called again after that."""


@runtime_checkable
class Waker(Protocol):
    """How an idle session is told that it has mail."""

    def facts(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What to keep at join so that the session can be woken later; empty where this waker is not for it."""

    async def wake(self, recipient: Mapping[str, str], unread: int) -> WakeOutcome:
        """Tell a session; REFUSED for a recipient without facts of this waker.

        :param recipient: what :meth:`facts` kept, and ``handle``.
        """


@runtime_checkable
class Harness(Protocol):
    """One kind of session: a program that people run agents in."""

    @property
    def name(self) -> str:
        """Its base name, as a registry entry's ``harness`` says it."""

    @property
    def parkable(self) -> bool:
        """Whether a closed conversation of it can be taken up again, so that mail for it may wait."""

    def runs_in(self, argv: Sequence[str]) -> bool:
        """Whether a process with this command line is one."""

    def is_free_prompt(self, screen: Screen) -> bool:
        """Whether text typed now would be read as a new prompt and disturb nothing."""
