"""The contract suite of a delivery: what is answered with a receipt is there, and nothing is there by half."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import trio

from sotbus.contracts import Delivery, Destination, Filing, Receipt
from sotbus.errors import SotbusError
from sotbus.testing.inbound import FakeInbound
from sotbus.testing.io_watch import io_of

PATIENT_S = 20.0
"""A deadline that only a fault reaches, in seconds."""

QUICK_S = 0.3
"""The deadline of what cannot be filed in time, in seconds."""

BAD_HANDLES = ("", "-a", "a b", "a/b", "..", "x" * 65, "a\nb", "é")
"""Names that break the handle rule (sot-comm v1, Handles)."""

TEXTS = (
    "plain",
    "two\nlines",
    'tab\tquote"back\\slash',
    "ünïcødé \N{SNOWMAN} \N{GRINNING FACE}",
    "\x7f\x01",
    "x" * 10_000,
)


@dataclass(frozen=True)
class Mailbox:
    """A mailbox that a delivery under test reaches.

    :param destination: where it is.
    :param read_back: answers its messages, oldest first, as mappings with the keys ``from``, ``to`` and ``msg``; it
        raises where what is stored is not whole.
    :param blocked: a context in which nothing can be filed there: its lock is held, its folder is a file, its peer is
        silent.
    """

    destination: Destination
    read_back: Callable[[], Sequence[Mapping[str, Any]]]
    blocked: Callable[[], AbstractContextManager[object]]

    def texts(self) -> list[str]:
        """The text of each message."""
        return [message["msg"] for message in self.read_back()]


class DeliveryContract:
    """Subclass it as ``class TestMine(DeliveryContract)`` and give the fixtures ``delivery`` and ``mailbox``."""

    late_s = 2.0
    """How much later than its deadline an answer may come, in seconds."""

    @pytest.fixture
    def delivery(self) -> Delivery:
        """The delivery under test."""
        pytest.fail(f"{type(self).__name__} must give the fixture `delivery`: the delivery to test")

    @pytest.fixture
    def mailbox(self) -> Mailbox:
        """An empty mailbox that it reaches."""
        pytest.fail(f"{type(self).__name__} must give the fixture `mailbox`: an empty Mailbox that it reaches")

    @pytest.mark.trio
    async def test_it_has_the_members_of_a_delivery(self, delivery: Delivery) -> None:
        assert isinstance(delivery, Delivery)

    @pytest.mark.trio
    async def test_it_says_without_io_whether_it_reaches_a_mailbox(self, delivery: Delivery, mailbox: Mailbox) -> None:
        elsewhere = replace(mailbox.destination, node="no-such-node.contract")
        assert io_of(lambda: delivery.reaches(mailbox.destination)) == (True, [])
        assert io_of(lambda: delivery.reaches(elsewhere)) == (False, [])

    @pytest.mark.trio
    async def test_a_receipt_says_what_became_of_a_message_and_where(
        self, delivery: Delivery, mailbox: Mailbox
    ) -> None:
        receipt = await _deliver(delivery, _filing(mailbox))
        assert isinstance(receipt, Receipt)
        assert receipt.outcome in {"delivered", "queued"}
        assert receipt.where

    @pytest.mark.trio
    async def test_a_message_is_there_when_its_receipt_is(self, delivery: Delivery, mailbox: Mailbox) -> None:
        for count, text in enumerate(TEXTS, 1):
            await _deliver(delivery, _filing(mailbox, text))
            assert mailbox.texts() == list(TEXTS[:count])

    @pytest.mark.trio
    async def test_a_message_names_its_sender_and_its_recipient(self, delivery: Delivery, mailbox: Mailbox) -> None:
        await _deliver(delivery, _filing(mailbox))
        [message] = mailbox.read_back()
        assert (message["from"], message["to"]) == ("contract-sender", mailbox.destination.mailbox)

    @pytest.mark.trio
    async def test_a_copy_of_a_broadcast_names_no_recipient(self, delivery: Delivery, mailbox: Mailbox) -> None:
        await _deliver(delivery, replace(_filing(mailbox), broadcast=True))
        [message] = mailbox.read_back()
        assert message["to"] == ""

    @pytest.mark.trio
    async def test_messages_side_by_side_are_each_filed_once(self, delivery: Delivery, mailbox: Mailbox) -> None:
        texts = [f"message {number}" for number in range(20)]
        async with trio.open_nursery() as nursery:
            for text in texts:
                nursery.start_soon(_deliver, delivery, _filing(mailbox, text))
        assert sorted(mailbox.texts()) == sorted(texts)

    @pytest.mark.trio
    @pytest.mark.parametrize("handle", BAD_HANDLES, ids=lambda handle: ascii(handle[:8]))
    async def test_a_recipient_that_is_no_handle_is_refused(
        self, delivery: Delivery, mailbox: Mailbox, handle: str
    ) -> None:
        with pytest.raises(SotbusError):
            await _deliver(delivery, replace(_filing(mailbox), to=handle))
        assert mailbox.texts() == []

    @pytest.mark.trio
    async def test_what_cannot_be_filed_by_the_deadline_is_an_error(self, delivery: Delivery, mailbox: Mailbox) -> None:
        with mailbox.blocked(), trio.fail_after(QUICK_S + self.late_s), pytest.raises(SotbusError):
            await delivery.deliver(_filing(mailbox, "too late"), QUICK_S)
        await _deliver(delivery, _filing(mailbox, "in time"))
        assert mailbox.texts() == ["in time"]

    @pytest.mark.trio
    async def test_a_cancelled_filing_is_whole_or_not_there(self, delivery: Delivery, mailbox: Mailbox) -> None:
        filed, asked = [], []
        for number in range(20):
            text = f"cancelled {number} " + "x" * 2000
            asked.append(text)
            with trio.CancelScope(deadline=trio.current_time() + number * 0.0002):
                await _deliver(delivery, _filing(mailbox, text))
                filed.append(text)
        await _deliver(delivery, _filing(mailbox, "last"))
        texts = mailbox.texts()
        assert texts[-1] == "last"
        assert len(set(texts)) == len(texts)
        assert set(filed) <= set(texts[:-1]) <= set(asked)

    @pytest.mark.trio
    async def test_serving_ends_by_itself_or_when_cancelled(self, delivery: Delivery, mailbox: Mailbox) -> None:
        with trio.fail_after(QUICK_S + self.late_s), trio.move_on_after(QUICK_S):
            await delivery.serve(FakeInbound())
        await _deliver(delivery, _filing(mailbox, "after"))
        assert mailbox.texts() == ["after"]


def _filing(mailbox: Mailbox, text: str = "hello") -> Filing:
    return Filing("contract-sender", mailbox.destination.mailbox, "/contract/project", text)


async def _deliver(delivery: Delivery, filing: Filing) -> Receipt:
    """One filing; a delivery that has no outcome at its deadline fails the test."""
    with trio.fail_after(2 * PATIENT_S):
        return await delivery.deliver(filing, PATIENT_S)
