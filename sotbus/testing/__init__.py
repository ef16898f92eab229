"""For plugin authors: contract suites that hold an implementation to its Protocol, and a fake of each Protocol.

A suite is a class of pytest tests; subclass it under a name that pytest collects and give its fixtures::

    from sotbus.testing import LockManagerContract

    class TestMine(LockManagerContract):
        @pytest.fixture
        def manager(self):
            return MyLockManager()

Suites need pytest and, but for lock managers and harnesses, pytest-trio (``pip install sotbus[test]``). Fakes need
neither: a name is imported when it is first asked for. ``docs/write-a-plugin.md`` walks from an empty folder to a
passing suite.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.testing.delivery import FakeDelivery
    from sotbus.testing.delivery_contract import DeliveryContract, Mailbox
    from sotbus.testing.harness import FakeHarness
    from sotbus.testing.harness_contract import HarnessContract, HarnessExamples
    from sotbus.testing.inbound import FakeInbound
    from sotbus.testing.lock_manager import FakeLockManager, Hold
    from sotbus.testing.lock_manager_contract import LockManagerContract
    from sotbus.testing.transport import FakeTransport
    from sotbus.testing.transport_contract import Ends, TransportContract
    from sotbus.testing.waker import FakeWaker
    from sotbus.testing.waker_contract import WakerContract

_SUITE = "_contract"
_FROM = {
    "delivery": ("FakeDelivery",),
    "delivery_contract": ("DeliveryContract", "Mailbox"),
    "harness": ("FakeHarness",),
    "harness_contract": ("HarnessContract", "HarnessExamples"),
    "inbound": ("FakeInbound",),
    "lock_manager": ("FakeLockManager", "Hold"),
    "lock_manager_contract": ("LockManagerContract",),
    "transport": ("FakeTransport",),
    "transport_contract": ("Ends", "TransportContract"),
    "waker": ("FakeWaker",),
    "waker_contract": ("WakerContract",),
}
_HOME = {name: f"{__name__}.{module}" for module, names in _FROM.items() for name in names}

__all__ = [
    "DeliveryContract",
    "Ends",
    "FakeDelivery",
    "FakeHarness",
    "FakeInbound",
    "FakeLockManager",
    "FakeTransport",
    "FakeWaker",
    "HarnessContract",
    "HarnessExamples",
    "Hold",
    "LockManagerContract",
    "Mailbox",
    "TransportContract",
    "WakerContract",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"sotbus.testing has no {name!r}")
    if home.endswith(_SUITE) and home not in sys.modules:
        import pytest

        pytest.register_assert_rewrite(home)  # a failing suite shows the values, as an author's own tests do
    found: object = getattr(__import__(home, fromlist=[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
