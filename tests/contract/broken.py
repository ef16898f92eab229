"""Implementations that each break one promise, and the test that must find it; run by test_suites_can_fail.py."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import trio

from sotbus.api import (
    Destination,
    Filing,
    FlockManager,
    Inbound,
    LockTimeoutError,
    NotSentError,
    OutcomeUnknownError,
    Receipt,
    Screen,
    WakeOutcome,
)
from sotbus.errors import BadHandle
from sotbus.testing import (
    DeliveryContract,
    Ends,
    FakeDelivery,
    FakeHarness,
    FakeTransport,
    FakeWaker,
    HarnessContract,
    HarnessExamples,
    LockManagerContract,
    Mailbox,
    TransportContract,
    WakerContract,
)
from sotbus.testing.transport import Letter

FLOCK = FlockManager("broken")

BROKEN: dict[str, list[tuple[Callable[[], Any], str]]] = {
    "Lock": [],
    "Delivery": [],
    "Link": [],
    "Waker": [],
    "Kind": [],
}
"""What each suite is run on: something broken, and the test that must fail."""


def found_by(suite: str, *tests: str) -> Callable[[type], type]:
    """Marks a broken implementation with the tests that must fail on it."""

    def mark(kind: type) -> type:
        BROKEN[suite] += [(kind, test) for test in tests]
        return kind

    return mark


class Flock:
    """A sound lock manager, but for what a subclass breaks."""

    proves_fresh_read = True
    fences_data = True

    @property
    def identity(self) -> str:
        return "broken"

    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        with FLOCK.hold(path, exclusive, bound_s):
            yield

    def fence(self, fd: int, bound_s: float) -> bool:
        return False


@found_by("Lock", "test_two_processes_never_hold_it_at_once", "test_two_threads_never_hold_it_at_once")
class LocksNothing(Flock):
    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        yield


@found_by("Lock", "test_two_threads_never_hold_it_at_once")
class LocksPerProcess(Flock):
    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        with open(path, "a+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            yield


@found_by("Lock", "test_only_readers_hold_the_lock_together[reader-reader]")
class ExcludesReaders(Flock):
    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        with FLOCK.hold(path, True, bound_s):
            yield


@found_by("Lock", "test_only_readers_hold_the_lock_together[writer-writer]")
class LetsWritersRead(Flock):
    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        with FLOCK.hold(path, False, bound_s):
            yield


@found_by("Lock", "test_the_lock_of_another_file_is_another_lock")
class OneLockForAll(Flock):
    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        with FLOCK.hold(os.path.join(os.path.dirname(path), "one"), exclusive, bound_s):
            yield


@found_by("Lock", "test_the_lock_file_is_opened_read_write[shared]")
class OpensForReading(Flock):
    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        fd = os.open(path, os.O_RDONLY | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            yield
        finally:
            os.close(fd)


@found_by("Lock", "test_the_lock_file_is_never_removed_or_replaced")
class RemovesTheFile(Flock):
    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        with FLOCK.hold(path, exclusive, bound_s):
            yield
            os.rename(path, f"{path}.old")


@found_by("Lock", "test_it_dies_with_a_holder_that_is_killed")
class LocksByAFile(Flock):
    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        try:
            os.mkdir(f"{path}.taken")
        except FileExistsError:
            raise LockTimeoutError from None
        try:
            yield
        finally:
            os.rmdir(f"{path}.taken")


@found_by("Lock", "test_it_is_released_when_its_block_raises")
class KeepsItOnAnError(Flock):
    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        lock = FLOCK.hold(path, exclusive, bound_s)
        yield
        lock.release()


@found_by("Lock", "test_a_held_lock_is_waited_for_to_the_bound[exclusive-0.3]")
class GivesUpAtOnce(Flock):
    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        with FLOCK.hold(path, exclusive, 0.0):
            yield


@found_by("Lock", "test_a_held_lock_is_waited_for_to_the_bound[shared-0.0]")
class RaisesAnotherError(Flock):
    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        try:
            lock = FLOCK.hold(path, exclusive, bound_s)
        except LockTimeoutError as error:
            raise TimeoutError from error
        with lock:
            yield


@found_by("Lock", "test_a_held_lock_is_waited_for_to_the_bound[exclusive-0.0]")
class WaitsTooLong(Flock):
    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        with FLOCK.hold(path, exclusive, bound_s + 1.0):
            yield


@found_by("Lock", "test_a_free_lock_is_taken_with_a_bound_of_nothing")
class TriesOnlyWithTime(Flock):
    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        if bound_s <= 0:
            raise LockTimeoutError
        yield


@found_by("Lock", "test_an_exception_while_waiting_leaves_nothing_locked")
class ForgetsItsWaiter(Flock):
    """A thread waits for the lock, and keeps it though nobody waits for the thread any more."""

    @contextmanager
    def hold(self, path: str, exclusive: bool, bound_s: float) -> Iterator[None]:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if bound_s < 10:
                raise LockTimeoutError from None
            thread = threading.Thread(target=fcntl.flock, args=(fd, fcntl.LOCK_EX), daemon=True)
            thread.start()
            thread.join(bound_s)
        yield
        os.close(fd)


@found_by("Lock", "test_its_identity_is_the_same_each_time_and_in_every_process")
class NamedByProcess(Flock):
    @property
    def identity(self) -> str:
        return f"broken {os.getpid()}"


@found_by("Lock", "test_its_identity_is_one_line_of_text")
class NamedByTwoLines(Flock):
    @property
    def identity(self) -> str:
        return "two\nlines"


@found_by("Lock", "test_its_module_imports_no_trio")
class InAModuleWithTrio(Flock):
    __module__ = "sotbus.testing.inbound"


class _Lock(LockManagerContract):
    late_s = 0.5
    dead_holder_s = 0.3
    kind: Callable[[], Any]

    @pytest.fixture
    def manager(self) -> Any:
        return type(self).kind()


@found_by("Delivery", "test_it_says_without_io_whether_it_reaches_a_mailbox")
class LooksWhetherItReaches(FakeDelivery):
    def reaches(self, destination: Destination) -> bool:
        return os.path.isdir("/") and super().reaches(destination)


@found_by("Delivery", "test_a_message_is_there_when_its_receipt_is", "test_a_cancelled_filing_is_whole_or_not_there")
class AnswersBeforeItFiles(FakeDelivery):
    async def deliver(self, filing: Filing, deadline_s: float) -> Receipt:
        await trio.lowlevel.checkpoint()
        return Receipt("delivered", "nowhere")


@found_by("Delivery", "test_messages_side_by_side_are_each_filed_once")
class FilesTheSameTwice(FakeDelivery):
    async def deliver(self, filing: Filing, deadline_s: float) -> Receipt:
        await super().deliver(filing, deadline_s)
        return await super().deliver(filing, deadline_s)


@found_by("Delivery", "test_a_recipient_that_is_no_handle_is_refused['-a']")
class TakesEveryName(FakeDelivery):
    async def deliver(self, filing: Filing, deadline_s: float) -> Receipt:
        try:
            return await super().deliver(filing, deadline_s)
        except BadHandle:
            return Receipt("delivered", "somewhere")


@found_by("Delivery", "test_a_copy_of_a_broadcast_names_no_recipient")
class NamesEachRecipient(FakeDelivery):
    async def deliver(self, filing: Filing, deadline_s: float) -> Receipt:
        receipt = await super().deliver(filing, deadline_s)
        self.mailboxes[filing.to][-1]["to"] = filing.to
        return receipt


@found_by("Delivery", "test_what_cannot_be_filed_by_the_deadline_is_an_error")
class KnowsNoDeadline(FakeDelivery):
    async def deliver(self, filing: Filing, deadline_s: float) -> Receipt:
        return await super().deliver(filing, 1000.0)


@found_by("Delivery", "test_a_cancelled_filing_is_whole_or_not_there")
class FilesByHalves(FakeDelivery):
    async def deliver(self, filing: Filing, deadline_s: float) -> Receipt:
        receipt = await super().deliver(filing, deadline_s)
        line = self.mailboxes[filing.to][-1]
        line["msg"] = filing.text[:2]
        await trio.sleep(0.1)
        line["msg"] = filing.text
        return receipt


class _Delivery(DeliveryContract):
    late_s = 0.2
    kind: Callable[[], Any]

    @pytest.fixture
    def delivery(self) -> Any:
        return type(self).kind()

    @pytest.fixture
    def mailbox(self, delivery: FakeDelivery) -> Mailbox:
        return Mailbox(Destination("fake", "reader"), lambda: delivery.mailboxes.get("reader", []), delivery.blocked)


@found_by("Link", "test_a_request_to_an_unknown_node_is_not_sent", "test_it_says_without_io_whether_it_reaches_a_node")
class ReachesEverybody(FakeTransport):
    def reaches(self, node: str) -> bool:
        return True

    async def request(self, node: str, request: bytes, deadline_s: float) -> bytes:
        return await super().request("far" if self.name == "near" else "near", request, deadline_s)


@found_by("Link", "test_a_request_that_gets_no_answer_has_an_unknown_outcome_at_the_deadline")
class SaysNotSent(FakeTransport):
    async def request(self, node: str, request: bytes, deadline_s: float) -> bytes:
        try:
            return await super().request(node, request, deadline_s)
        except OutcomeUnknownError as error:
            raise NotSentError("not sent") from error


@found_by("Link", "test_an_answer_past_the_deadline_is_dropped")
class WaitsForEver(FakeTransport):
    async def request(self, node: str, request: bytes, deadline_s: float) -> bytes:
        return await super().request(node, request, 1000.0)


@found_by("Link", "test_bytes_go_over_and_come_back_as_they_are[1 MiB]")
class CutsLongRequests(FakeTransport):
    async def request(self, node: str, request: bytes, deadline_s: float) -> bytes:
        return await super().request(node, request[:65536], deadline_s)


@found_by("Link", "test_requests_side_by_side_each_get_their_own_answer")
class MixesAnswersUp(FakeTransport):
    last = b""

    async def request(self, node: str, request: bytes, deadline_s: float) -> bytes:
        answer = await super().request(node, request, deadline_s)
        before, self.last = self.last, answer
        return before or answer


@found_by("Link", "test_the_answer_to_a_cancelled_request_is_dropped", "test_an_answer_past_the_deadline_is_dropped")
class TakesTheNextAnswer(FakeTransport):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.answers = trio.open_memory_channel[bytes](100)

    async def request(self, node: str, request: bytes, deadline_s: float) -> bytes:
        assert self._far is not None
        self._far._send.send_nowait(Letter(self.name, request, self.answers[0]))
        with trio.move_on_after(deadline_s):
            return await self.answers[1].receive()
        raise OutcomeUnknownError("no answer")


@found_by("Link", "test_a_request_that_was_not_sent_is_never_seen")
class SendsAllTheSame(FakeTransport):
    async def request(self, node: str, request: bytes, deadline_s: float) -> bytes:
        try:
            return await super().request(node, request, deadline_s)
        except NotSentError:
            assert self._far is not None
            self._far._send.send_nowait(Letter(self.name, request, trio.open_memory_channel[bytes](1)[0]))
            raise


@found_by("Link", "test_a_request_is_answered_by_the_other_end")
class BelievesAnyName(FakeTransport):
    async def serve(self, inbound: Inbound) -> None:
        class Renamed:
            def up(self, peer: str) -> None:
                inbound.up(peer)

            def down(self, peer: str) -> None:
                inbound.down(peer)

            async def answer(self, peer: str, request: bytes) -> bytes:
                return await inbound.answer("root", request)

        await super().serve(Renamed())


@found_by("Link", "test_a_peer_is_up_while_it_serves_and_down_after")
class MissesDowns(FakeTransport):
    async def serve(self, inbound: Inbound) -> None:
        class Deaf:
            def up(self, peer: str) -> None:
                inbound.up(peer)

            def down(self, peer: str) -> None:
                pass

            async def answer(self, peer: str, request: bytes) -> bytes:
                return await inbound.answer(peer, request)

        await super().serve(Deaf())


@found_by("Link", "test_serving_ends_when_cancelled_and_may_begin_again")
class ServesOnce(FakeTransport):
    served = False

    async def serve(self, inbound: Inbound) -> None:
        if not self.served:
            self.served = True
            await super().serve(inbound)


class _Link(TransportContract):
    late_s = 0.5
    quick_s = 0.2
    link_s = 1.0
    kind: Any

    @pytest.fixture
    def ends(self) -> Ends:
        near, far = self.kind.pair("near", "far")
        return Ends(near, far, "near", "far")


@found_by("Waker", "test_it_keeps_nothing_of_a_session_that_it_cannot_tell")
class KeepsOfEverybody(FakeWaker):
    def facts(self, environ: Mapping[str, str]) -> dict[str, str]:
        return {self.FACT: environ.get(self.variable, "")}


@found_by("Waker", "test_its_facts_rest_on_the_environment_that_it_is_given")
class KeepsTheTime(FakeWaker):
    def facts(self, environ: Mapping[str, str]) -> dict[str, str]:
        return super().facts(environ) and {self.FACT: str(trio.current_time())}


@found_by("Waker", "test_a_session_that_has_facts_of_another_waker_is_refused")
class NeedsItsFacts(FakeWaker):
    async def wake(self, recipient: Mapping[str, str], unread: int) -> WakeOutcome:
        self.woken.append((recipient[self.FACT], unread))
        return await super().wake(recipient, unread)


@found_by("Waker", "test_wakes_side_by_side_each_have_an_outcome")
class OneAtATime(FakeWaker):
    busy = False

    async def wake(self, recipient: Mapping[str, str], unread: int) -> WakeOutcome:
        assert not self.busy
        self.busy = True
        outcome = await super().wake(recipient, unread)
        self.busy = False
        return outcome


@found_by("Waker", "test_a_wake_that_is_cancelled_spoils_none_after_it")
class StaysBusy(OneAtATime):
    pass


class _Waker(WakerContract):
    kind: Callable[[], Any]

    @pytest.fixture
    def waker(self) -> Any:
        return type(self).kind()

    @pytest.fixture
    def environ(self) -> dict[str, str]:
        return {"FAKE_SESSION": "7"}


@found_by("Kind", "test_it_takes_no_other_process_for_one")
class TakesEveryProcess(FakeHarness):
    def runs_in(self, argv: Sequence[str]) -> bool:
        return True


@found_by("Kind", "test_it_knows_its_sessions_by_their_command_lines")
class LooksForItsProgram(FakeHarness):
    def runs_in(self, argv: Sequence[str]) -> bool:
        return os.path.exists("/") and super().runs_in(argv)


@found_by("Kind", "test_an_odd_screen_is_no_free_prompt[cursor below]")
class TrustsTheCursor(FakeHarness):
    def is_free_prompt(self, screen: Screen) -> bool:
        return screen.lines[screen.row] == self.PROMPT


@found_by("Kind", "test_it_takes_no_other_screen_for_one")
class TypesAnywhere(FakeHarness):
    def is_free_prompt(self, screen: Screen) -> bool:
        return True


class _Kind(HarnessContract):
    kind: Callable[[], Any]

    @pytest.fixture
    def harness(self) -> Any:
        return type(self).kind()

    @pytest.fixture
    def examples(self) -> HarnessExamples:
        busy = Screen(["> typed"], 0, 7, 80)
        return HarnessExamples([["/bin/fake"]], [["fakes"]], [Screen(["> "], 0, 2, 80)], [busy])


_SUITES = {"Lock": _Lock, "Delivery": _Delivery, "Link": _Link, "Waker": _Waker, "Kind": _Kind}
NODES = []
"""What pytest is to run, every one of which must fail."""
for _suite, _pairs in BROKEN.items():
    for _kind, _test in _pairs:
        _name = f"Test{_kind.__name__}"
        globals()[_name] = type(_name, (_SUITES[_suite],), {"kind": _kind, "__module__": __name__})
        NODES.append(f"{_name}::{_test}")
