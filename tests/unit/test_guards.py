"""A plugin's object that raises: the error names the plugin, or the answer is no and the error is told; what the
contract itself allows, and cancellation, passes through as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import pytest
import trio
import trio.testing

from sotbus.api import (
    BoxFacts,
    Delivery,
    Destination,
    Filing,
    FilingFailed,
    Harness,
    Inbound,
    LockManager,
    LockTimeoutError,
    NoLiveSession,
    NotSentError,
    OutcomeUnknownError,
    Receipt,
    Screen,
    Transport,
    WakeOutcome,
    Waker,
    hookimpl,
)
from sotbus.errors import PluginError
from sotbus.guards import GuardedDelivery, GuardedHarness, GuardedLockManager, GuardedTransport, GuardedWaker
from sotbus.plugins import Plugins

WHO = "plugin 'spool' (spool-dist 1.0)"
FILING = Filing("a", "b", "r", "hello")
THERE = Destination("u.vm", "b")
SCREEN = Screen(["> "], 0, 2, 80)
BOX = BoxFacts("vm", "u", None, "/comm")


class NoInbound:
    """An inbound that nothing may be handed to."""

    async def answer(self, peer: str, request: bytes) -> bytes:
        raise AssertionError

    def up(self, peer: str) -> None:
        raise AssertionError

    def down(self, peer: str) -> None:
        raise AssertionError


class Raising:
    """An object of every contract, whose every attribute and method raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @property
    def identity(self) -> str:
        raise self.error

    @property
    def proves_fresh_read(self) -> bool:
        raise self.error

    @property
    def fences_data(self) -> bool:
        raise self.error

    def hold(self, path: str, exclusive: bool, bound_s: float) -> AbstractContextManager[object]:
        raise self.error

    def fence(self, fd: int, bound_s: float) -> bool:
        raise self.error

    async def deliver(self, filing: Filing, deadline_s: float) -> Receipt:
        raise self.error

    async def request(self, node: str, request: bytes, deadline_s: float) -> bytes:
        raise self.error

    async def serve(self, inbound: Inbound) -> None:
        raise self.error

    def reaches(self, destination: object) -> bool:
        raise self.error

    def facts(self, environ: Mapping[str, str]) -> dict[str, str]:
        raise self.error

    async def wake(self, recipient: Mapping[str, str], unread: int) -> WakeOutcome:
        raise self.error

    @property
    def name(self) -> str:
        raise self.error

    @property
    def parkable(self) -> bool:
        raise self.error

    def runs_in(self, argv: Sequence[str]) -> bool:
        raise self.error

    def is_free_prompt(self, screen: Screen) -> bool:
        raise self.error


class Answering:
    """An object whose asynchronous methods answer what a test says, and whose ``identity`` is that too."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    async def deliver(self, filing: Filing, deadline_s: float) -> Any:
        return self.answer

    async def request(self, node: str, request: bytes, deadline_s: float) -> Any:
        return self.answer

    async def wake(self, recipient: Mapping[str, str], unread: int) -> Any:
        return self.answer

    async def serve(self, inbound: Inbound) -> None:
        return None

    def reaches(self, destination: object) -> bool:
        return True

    def facts(self, environ: Mapping[str, str]) -> dict[str, str]:
        return {}


def hold(manager: LockManager) -> None:
    with manager.hold("/comm/inbox/b.lock", True, 0):
        raise AssertionError("the lock was not to be had")


async def use(method: Callable[..., Any], *arguments: object) -> object:
    return await method(*arguments)


def guarded(contract: type, inner: Any, told: list[PluginError]) -> Any:
    """The guard of a contract around an object."""
    if contract is LockManager:
        return GuardedLockManager(WHO, inner)
    makers: dict[type, Any] = {
        Delivery: GuardedDelivery,
        Transport: GuardedTransport,
        Waker: GuardedWaker,
        Harness: GuardedHarness,
    }
    return makers[contract](WHO, inner, told.append)


NAMED: dict[tuple[type, str], Callable[[Any], Any]] = {
    (LockManager, "identity"): lambda it: it.identity,
    (LockManager, "proves_fresh_read"): lambda it: it.proves_fresh_read,
    (LockManager, "fences_data"): lambda it: it.fences_data,
    (LockManager, "hold"): hold,
    (LockManager, "fence"): lambda it: it.fence(0, 0.0),
    (Delivery, "deliver"): lambda it: trio.run(use, it.deliver, FILING, 1),
    (Delivery, "serve"): lambda it: trio.run(use, it.serve, NoInbound()),
    (Transport, "request"): lambda it: trio.run(use, it.request, "u.vm", b"q", 1),
    (Transport, "serve"): lambda it: trio.run(use, it.serve, NoInbound()),
    (Waker, "wake"): lambda it: trio.run(use, it.wake, {"handle": "b"}, 1),
}
"""What has to be done or has failed: the caller is given the error."""

ANSWERED: dict[tuple[type, str], tuple[Callable[[Any], Any], object]] = {
    (Delivery, "reaches"): (lambda it: it.reaches(THERE), False),
    (Transport, "reaches"): (lambda it: it.reaches("u.vm"), False),
    (Waker, "facts"): (lambda it: it.facts({}), {}),
    (Harness, "name"): (lambda it: it.name, ""),
    (Harness, "parkable"): (lambda it: it.parkable, False),
    (Harness, "runs_in"): (lambda it: it.runs_in(["claude"]), False),
    (Harness, "is_free_prompt"): (lambda it: it.is_free_prompt(SCREEN), False),
}
"""Questions that must not fail: the answer when the plugin has none."""


def test_every_member_of_every_contract_is_guarded_here() -> None:
    contracts = (LockManager, Delivery, Transport, Waker, Harness)
    members = {(one, name) for one in contracts for name in vars(one) if not name.startswith("_")}
    assert members == set(NAMED) | set(ANSWERED)


@pytest.mark.parametrize(("contract", "member"), NAMED, ids=lambda part: getattr(part, "__name__", part))
def test_what_a_member_raises_is_an_error_that_names_the_plugin(contract: type, member: str) -> None:
    cause = RuntimeError("boom")
    with pytest.raises(PluginError) as raised:
        NAMED[contract, member](guarded(contract, Raising(cause), []))
    assert str(raised.value) == f"{WHO}: {member} raised RuntimeError: boom"
    assert raised.value.__cause__ is cause


@pytest.mark.parametrize(("contract", "member"), ANSWERED, ids=lambda part: getattr(part, "__name__", part))
def test_a_question_that_raises_is_answered_no_and_told(contract: type, member: str) -> None:
    ask, no = ANSWERED[contract, member]
    told: list[PluginError] = []
    assert ask(guarded(contract, Raising(RuntimeError("boom")), told)) == no
    assert [str(error) for error in told] == [f"{WHO}: {member} raised RuntimeError: boom"]


@pytest.mark.parametrize(("contract", "member"), NAMED, ids=lambda part: getattr(part, "__name__", part))
@pytest.mark.parametrize(
    "error",
    [
        NotSentError("no peer"),
        OutcomeUnknownError("no answer"),
        NoLiveSession("nobody"),
        FilingFailed("half", hint="look", outcome_unknown=True),
    ],
    ids=lambda error: type(error).__name__,
)
def test_our_own_errors_pass_through_unchanged(contract: type, member: str, error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        NAMED[contract, member](guarded(contract, Raising(error), []))
    assert raised.value is error


@pytest.mark.parametrize("error", [LockTimeoutError(), OSError(5, "EIO"), FileNotFoundError(2, "gone")], ids=repr)
def test_what_the_contract_of_hold_allows_passes_through_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        hold(guarded(LockManager, Raising(error), []))
    assert raised.value is error


@pytest.mark.parametrize("member", ["identity", "proves_fresh_read", "fences_data"])
def test_an_attribute_is_not_allowed_what_hold_is(member: str) -> None:
    with pytest.raises(PluginError, match=f"{member} raised OSError"):
        NAMED[LockManager, member](guarded(LockManager, Raising(OSError(5, "EIO")), []))


@pytest.mark.parametrize(("contract", "member"), [*NAMED, *ANSWERED], ids=lambda part: getattr(part, "__name__", part))
def test_an_interrupt_is_the_callers(contract: type, member: str) -> None:
    told: list[PluginError] = []
    asked = NAMED.get((contract, member)) or ANSWERED[contract, member][0]
    with pytest.raises(KeyboardInterrupt):
        asked(guarded(contract, Raising(KeyboardInterrupt()), told))
    assert told == []


# ---- cancellation


class Waiting:
    """An object whose asynchronous methods wait for ever, and say that they were cancelled."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def _wait(self) -> NoReturn:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            self.cancelled += 1
            raise

    async def deliver(self, filing: Filing, deadline_s: float) -> Receipt:
        await self._wait()

    async def request(self, node: str, request: bytes, deadline_s: float) -> bytes:
        await self._wait()

    async def serve(self, inbound: Inbound) -> None:
        await self._wait()

    async def wake(self, recipient: Mapping[str, str], unread: int) -> WakeOutcome:
        await self._wait()


@pytest.mark.parametrize(
    ("contract", "member", "arguments"),
    [
        (Delivery, "deliver", (FILING, 9)),
        (Delivery, "serve", (NoInbound(),)),
        (Transport, "request", ("u.vm", b"q", 9)),
        (Transport, "serve", (NoInbound(),)),
        (Waker, "wake", ({}, 1)),
    ],
    ids=["deliver", "serve", "request", "serve-transport", "wake"],
)
async def test_cancellation_reaches_the_plugin_and_passes_through(
    contract: type, member: str, arguments: tuple[object, ...], autojump_clock: trio.testing.MockClock
) -> None:
    inner = Waiting()
    told: list[PluginError] = []
    with trio.move_on_after(5) as scope:
        await getattr(guarded(contract, inner, told), member)(*arguments)
    assert scope.cancelled_caught
    assert (inner.cancelled, told) == (1, [])


# ---- answers of the wrong kind


@pytest.mark.parametrize("answer", [None, True, "delivered", ("delivered", "/x")], ids=repr)
async def test_a_delivery_that_answers_no_receipt_is_an_error_that_names_it(answer: object) -> None:
    with pytest.raises(PluginError) as raised:
        await guarded(Delivery, Answering(answer), []).deliver(FILING, 1)
    assert str(raised.value).startswith(f"{WHO}: deliver ")


@pytest.mark.parametrize("answer", [None, 5, "text", [1, 2], {"a": 1}], ids=repr)
async def test_a_transport_that_answers_no_bytes_is_an_error_that_names_it(answer: object) -> None:
    with pytest.raises(PluginError) as raised:
        await guarded(Transport, Answering(answer), []).request("u.vm", b"q", 1)
    assert str(raised.value).startswith(f"{WHO}: request ")


@pytest.mark.parametrize("answer", [None, True, "asleep"], ids=repr)
async def test_a_waker_that_answers_no_outcome_is_an_error_that_names_it(answer: object) -> None:
    with pytest.raises(PluginError) as raised:
        await guarded(Waker, Answering(answer), []).wake({}, 1)
    assert str(raised.value).startswith(f"{WHO}: wake ")


async def test_a_right_answer_passes_through() -> None:
    receipt = Receipt("delivered", "/comm/inbox/b.jsonl")
    assert await guarded(Delivery, Answering(receipt), []).deliver(FILING, 1) is receipt
    assert await guarded(Transport, Answering(b"answer"), []).request("u.vm", b"q", 1) == b"answer"
    assert await guarded(Waker, Answering(WakeOutcome.HELD), []).wake({}, 1) is WakeOutcome.HELD


# ---- holding


class Locks:
    """A lock manager that notes what becomes of its lock, and may raise when it is given back."""

    identity = "stranger"
    proves_fresh_read = True
    fences_data = True

    def __init__(self, at_end: Exception | None = None) -> None:
        self.at_end = at_end
        self.log: list[object] = []

    def hold(self, path: str, exclusive: bool, bound_s: float) -> AbstractContextManager[object]:
        self.log.append((path, exclusive, bound_s))
        return self._held()

    def fence(self, fd: int, bound_s: float) -> bool:
        self.log.append((fd, bound_s))
        return True

    @contextmanager
    def _held(self) -> Iterator[str]:
        self.log.append("taken")
        try:
            yield "lock"
        finally:
            self.log.append("given back")
            if self.at_end:
                raise self.at_end


def test_a_hold_takes_the_plugins_lock_and_gives_it_back() -> None:
    locks = Locks()
    with guarded(LockManager, locks, []).hold("/x.lock", False, 2.5) as held:
        assert held == "lock"
        assert locks.log == [("/x.lock", False, 2.5), "taken"]
    assert locks.log[2:] == ["given back"]


@pytest.mark.parametrize("error", [RuntimeError("ours"), OSError(28, "full"), KeyboardInterrupt()], ids=repr)
def test_what_is_raised_under_the_lock_is_not_the_plugins_and_the_lock_is_given_back(error: BaseException) -> None:
    locks = Locks()
    with pytest.raises(type(error)) as raised, guarded(LockManager, locks, []).hold("/x.lock", True, 0):
        raise error
    assert raised.value is error
    assert locks.log[-1] == "given back"


def test_a_lock_that_raises_when_it_is_given_back_is_named() -> None:
    with (
        pytest.raises(PluginError) as raised,
        guarded(LockManager, Locks(RuntimeError("boom")), []).hold("/x.lock", True, 0),
    ):
        pass
    assert str(raised.value) == f"{WHO}: the end of hold raised RuntimeError: boom"


# ---- the others go on


class Offering:
    """A plugin that offers one object for every kind of thing."""

    def __init__(self, thing: object) -> None:
        self.thing = thing

    @hookimpl
    def sotbus_delivery(self, box: BoxFacts) -> object:
        return self.thing

    @hookimpl
    def sotbus_wake(self, box: BoxFacts) -> object:
        return self.thing

    @hookimpl
    def sotbus_harness(self) -> object:
        return self.thing


class Claude:
    name = "claude"
    parkable = True

    def runs_in(self, argv: Sequence[str]) -> bool:
        return argv[0] == "claude"

    def is_free_prompt(self, screen: Screen) -> bool:
        return True


def three(sound: object) -> tuple[Plugins, list[PluginError]]:
    """A sound plugin, one whose every method raises, a sound one; and what is told."""
    told: list[PluginError] = []
    plugins = Plugins(told.append)
    for name, thing in (("first", sound), ("broken", Raising(RuntimeError("boom"))), ("last", sound)):
        plugins.add(name, Offering(thing), f"{name}-dist 1.0")
    return plugins, told


async def test_beside_a_broken_delivery_the_others_deliver_in_the_configs_order() -> None:
    plugins, told = three(Answering(Receipt("delivered", "/x")))
    deliveries = plugins.deliveries(BOX)
    assert [name for name, _ in deliveries] == ["first", "broken", "last"]
    reaching = [(name, one) for name, one in deliveries if one.reaches(THERE)]
    assert [name for name, _ in reaching] == ["first", "last"]
    assert [str(error) for error in told] == [
        "plugin 'broken' (broken-dist 1.0): reaches raised RuntimeError: boom",
    ]
    for _, one in reaching:
        assert (await one.deliver(FILING, 1)).where == "/x"
    with pytest.raises(PluginError, match=r"plugin 'broken' \(broken-dist 1\.0\): deliver raised RuntimeError: boom"):
        await deliveries[1][1].deliver(FILING, 1)


async def test_beside_a_broken_waker_the_others_wake() -> None:
    plugins, told = three(Answering(WakeOutcome.WOKEN))
    wakers = dict(plugins.wakers(BOX))
    assert [one.facts({}) for one in wakers.values()] == [{}, {}, {}]
    assert await wakers["first"].wake({}, 1) is await wakers["last"].wake({}, 1) is WakeOutcome.WOKEN
    with pytest.raises(PluginError, match=r"plugin 'broken' \(broken-dist 1\.0\): wake raised RuntimeError: boom"):
        await wakers["broken"].wake({}, 1)
    assert len(told) == 1


def test_beside_a_broken_harness_the_others_are_known() -> None:
    plugins, told = three(Claude())
    harnesses = plugins.harnesses()
    assert [one.name for _, one in harnesses] == ["claude", "", "claude"]
    assert [name for name, one in harnesses if one.runs_in(["claude"])] == ["first", "last"]
    assert [name for name, one in harnesses if one.is_free_prompt(SCREEN)] == ["first", "last"]
    assert [name for name, one in harnesses if one.parkable] == ["first", "last"]
    assert all(str(error).startswith("plugin 'broken' (broken-dist 1.0): ") for error in told)
    assert len(told) == 4


def test_a_guard_says_whose_it_is() -> None:
    assert repr(guarded(Delivery, Raising(RuntimeError()), [])) == f"<GuardedDelivery of {WHO}>"
