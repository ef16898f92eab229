"""A plugin's objects behind guards: whatever else they raise becomes a :class:`PluginError` that names the plugin.

The errors of the contract pass through as they are. A question that must not fail (``reaches``) is answered no, and
reported, so that one broken plugin never takes a send or a node down.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from sotbus.comm.flock import LockTimeoutError
from sotbus.contracts import (
    BoxFacts,
    Delivery,
    Destination,
    Filing,
    Harness,
    Inbound,
    LockManager,
    Receipt,
    Screen,
    Transport,
    WakeOutcome,
    Waker,
)
from sotbus.errors import PluginError, SotbusError

Report = Callable[[PluginError], None]


def hint_of(error: BaseException) -> str:
    """The remedy that an error of ours has; ``""`` for any other error."""
    return error.hint if isinstance(error, SotbusError) else ""


class _Guard:
    """The plugin's description, as errors name it."""

    def __init__(self, plugin: str, report: Report | None = None) -> None:
        self.plugin = plugin
        self._report = report

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.plugin}>"

    @contextmanager
    def _naming(self, method: str, *own: type[Exception]) -> Iterator[None]:
        """Rename what a method raises, but for the contract's own errors and cancellation."""
        try:
            yield
        except Exception as error:
            if isinstance(error, (SotbusError, *own)):
                raise
            raise self._error(method, error) from error

    def _error(self, method: str, error: Exception) -> PluginError:
        return PluginError(f"{self.plugin}: {method} raised {type(error).__name__}: {error}", hint=hint_of(error))

    def _no(self, method: str, error: Exception) -> bool:
        """Report a question that raised; its answer is no."""
        if self._report is not None:
            self._report(self._error(method, error))
        return False


class GuardedLockManager(_Guard):
    """A plugin's :class:`LockManager`."""

    def __init__(self, plugin: str, inner: LockManager) -> None:
        super().__init__(plugin)
        self._inner = inner

    @property
    def identity(self) -> str:
        with self._naming("identity"):
            identity = self._inner.identity
        if not isinstance(identity, str) or identity.splitlines() != [identity]:
            raise PluginError(f"{self.plugin}: its lock manager's identity {identity!r} is not one line of text")
        return identity

    @property
    def proves_fresh_read(self) -> bool:
        with self._naming("proves_fresh_read"):
            return bool(self._inner.proves_fresh_read)

    @property
    def fences_data(self) -> bool:
        with self._naming("fences_data"):
            return bool(self._inner.fences_data)

    def fence(self, fd: int, bound_s: float) -> bool:
        with self._naming("fence", LockTimeoutError, OSError):
            return bool(self._inner.fence(fd, bound_s))

    @contextmanager
    def _held(self, path: str, exclusive: bool, bound_s: float) -> Iterator[object]:
        with self._naming("hold", LockTimeoutError, OSError):
            lock: AbstractContextManager[object] = self._inner.hold(path, exclusive, bound_s)
            held = lock.__enter__()
        try:
            yield held
        finally:
            with self._naming("the end of hold", OSError):
                lock.__exit__(None, None, None)

    def hold(self, path: str, exclusive: bool, bound_s: float) -> AbstractContextManager[object]:
        return self._held(path, exclusive, bound_s)


class GuardedDelivery(_Guard):
    """A plugin's :class:`Delivery`."""

    def __init__(self, plugin: str, inner: Delivery, report: Report) -> None:
        super().__init__(plugin, report)
        self._inner = inner

    def reaches(self, destination: Destination) -> bool:
        try:
            return bool(self._inner.reaches(destination))
        except Exception as error:
            return self._no("reaches", error)

    async def deliver(self, filing: Filing, deadline_s: float) -> Receipt:
        with self._naming("deliver"):
            receipt = await self._inner.deliver(filing, deadline_s)
        if not isinstance(receipt, Receipt):
            raise PluginError(f"{self.plugin}: deliver answered {receipt!r}, which is no Receipt")
        return receipt

    async def serve(self, inbound: Inbound) -> None:
        with self._naming("serve"):
            await self._inner.serve(inbound)


class GuardedTransport(_Guard):
    """A plugin's :class:`Transport`."""

    def __init__(self, plugin: str, inner: Transport, report: Report) -> None:
        super().__init__(plugin, report)
        self._inner = inner

    def reaches(self, node: str) -> bool:
        try:
            return bool(self._inner.reaches(node))
        except Exception as error:
            return self._no("reaches", error)

    def statistics(self) -> dict[str, object]:
        """What the plugin's own tells of itself, where it tells anything, for the person who looks at the node."""
        ask = getattr(self._inner, "statistics", None)
        try:
            found = ask() if callable(ask) else {}
            if dataclasses.is_dataclass(found) and not isinstance(found, type):
                found = dataclasses.asdict(found)
        except Exception as error:
            self._no("statistics", error)
            found = {}
        return found if isinstance(found, dict) else {}

    def prepare(self, box: BoxFacts) -> Callable[[], None]:
        """Where the plugin's has it: take what the box says now, while it runs."""
        prepare = getattr(self._inner, "prepare", None)
        if prepare is None:
            return _nothing
        with self._naming("prepare"):
            commit: Callable[[], None] = prepare(box)
        return commit

    async def request(self, node: str, request: bytes, deadline_s: float) -> bytes:
        with self._naming("request"):
            answer = await self._inner.request(node, request, deadline_s)
        if not isinstance(answer, bytes):
            raise PluginError(f"{self.plugin}: request answered {answer!r}, which is not bytes")
        return answer

    async def serve(self, inbound: Inbound) -> None:
        with self._naming("serve"):
            await self._inner.serve(inbound)


def _nothing() -> None:
    """A transport that goes by what it was told when it was made."""


class GuardedWaker(_Guard):
    """A plugin's :class:`Waker`."""

    def __init__(self, plugin: str, inner: Waker, report: Report) -> None:
        super().__init__(plugin, report)
        self._inner = inner

    def facts(self, environ: Mapping[str, str]) -> dict[str, str]:
        try:
            return dict(self._inner.facts(environ))
        except Exception as error:
            self._no("facts", error)
            return {}

    async def wake(self, recipient: Mapping[str, str], unread: int) -> WakeOutcome:
        with self._naming("wake"):
            return WakeOutcome(await self._inner.wake(recipient, unread))


class GuardedHarness(_Guard):
    """A plugin's :class:`Harness`. One whose name or parkability cannot be told is nameless and not parkable."""

    def __init__(self, plugin: str, inner: Harness, report: Report) -> None:
        super().__init__(plugin, report)
        self._inner = inner

    @property
    def name(self) -> str:
        try:
            return str(self._inner.name)
        except Exception as error:
            self._no("name", error)
            return ""

    @property
    def parkable(self) -> bool:
        try:
            return bool(self._inner.parkable)
        except Exception as error:
            return self._no("parkable", error)

    def runs_in(self, argv: Sequence[str]) -> bool:
        try:
            return bool(self._inner.runs_in(argv))
        except Exception as error:
            return self._no("runs_in", error)

    def is_free_prompt(self, screen: Screen) -> bool:
        try:
            return bool(self._inner.is_free_prompt(screen))
        except Exception as error:
            return self._no("is_free_prompt", error)
