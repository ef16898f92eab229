"""The deliveries of this tree, and the fake, under their contract."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from sotbus.api import Delivery, Destination, Filing, FilingFailed, FlockManager, FolderDelivery, NotHere, SotbusError
from sotbus.comm.folder import Folder
from sotbus.guards import GuardedDelivery
from sotbus.testing import DeliveryContract, FakeDelivery, FakeInbound, Mailbox

FILING = Filing("sender", "reader", "/project", "hello")


class TestFolder(DeliveryContract):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Folder:
        return Folder(str(tmp_path / "comm"))

    @pytest.fixture
    def delivery(self, folder: Folder) -> Delivery:
        manager = FlockManager("none@0123456789abcdef0123456789abcdef")
        return FolderDelivery(folder, "vm", lambda: manager)

    @pytest.fixture
    def mailbox(self, folder: Folder) -> Mailbox:
        def read_back() -> list[dict[str, str]]:
            """Every line as it stands on disk."""
            if not os.path.exists(folder.inbox("reader")):
                return []
            *lines, end = Path(folder.inbox("reader")).read_bytes().split(b"\n")
            assert end == b"", "the last line has no end"
            return [json.loads(line) for line in lines]

        @contextmanager
        def blocked() -> Iterator[None]:
            folder.ensure()
            with FlockManager("none@another").hold(folder.inbox_lock("reader"), True, 0.0):
                yield

        return Mailbox(Destination("vm", "reader"), read_back, blocked)


def fake_mailbox(fake: FakeDelivery) -> Mailbox:
    return Mailbox(Destination("vm", "reader"), lambda: fake.mailboxes.get("reader", []), fake.blocked)


class TestFake(DeliveryContract):
    @pytest.fixture
    def delivery(self) -> FakeDelivery:
        return FakeDelivery("vm")

    @pytest.fixture
    def mailbox(self, delivery: FakeDelivery) -> Mailbox:
        return fake_mailbox(delivery)


class TestGuarded(DeliveryContract):
    @pytest.fixture
    def fake(self) -> FakeDelivery:
        return FakeDelivery("vm", outcome="queued")

    @pytest.fixture
    def delivery(self, fake: FakeDelivery) -> Delivery:
        return GuardedDelivery("plugin 'fake'", fake, print)

    @pytest.fixture
    def mailbox(self, fake: FakeDelivery) -> Mailbox:
        return fake_mailbox(fake)


async def test_the_fake_raises_what_it_is_told_to_once_and_files_nothing_then() -> None:
    fake = FakeDelivery()
    fake.fail(NotHere("no box knows that handle: reader"))
    with pytest.raises(NotHere):
        await fake.deliver(FILING, 1.0)
    assert fake.mailboxes == {}
    assert (await fake.deliver(FILING, 1.0)).where == "fake:fake/reader"


async def test_the_fake_waits_its_delay_and_fails_past_its_deadline(autojump_clock: object) -> None:
    fake = FakeDelivery(delay_s=10.0)
    with pytest.raises(FilingFailed, match="within 5s"):
        await fake.deliver(FILING, 5.0)
    assert (await fake.deliver(FILING, 15.0)).outcome == "delivered"


async def test_what_arrives_at_the_fake_is_answered_by_whom_it_serves() -> None:
    fake, inbound = FakeDelivery(), FakeInbound()
    with pytest.raises(SotbusError, match="nobody serves"):
        await fake.arrive("peer", b"hello")
    async with trio.open_nursery() as serving:
        serving.start_soon(fake.serve, inbound)
        await trio.testing.wait_all_tasks_blocked()
        assert await fake.arrive("peer", b"hello") == b"hello"
        serving.cancel_scope.cancel()
    assert inbound.requests == [("peer", b"hello")]
    assert fake.inbound is None
