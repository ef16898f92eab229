"""The ZeroMQ transport under the transports' contract: who dials makes no difference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from zmq_ends import Node, reserved

from sotbus.testing import Ends, TransportContract


class TestNearDials(TransportContract):
    @pytest.fixture
    def ends(self) -> Iterator[Ends]:
        with reserved() as address:
            near, far = Node("ann", "near"), Node("ann", "far", listens=address)
            yield Ends(near.to(far.peer()), far.to(near.peer()), near.name, far.name)


class TestFarDials(TransportContract):
    @pytest.fixture
    def ends(self) -> Iterator[Ends]:
        with reserved() as address:
            near, far = Node("ann", "near", listens=address), Node("ann", "far")
            yield Ends(near.to(far.peer()), far.to(near.peer()), near.name, far.name)


class TestBothDial(TransportContract):
    @pytest.fixture
    def ends(self) -> Iterator[Ends]:
        with reserved() as one, reserved() as other:
            near, far = Node("ann", "near", listens=one), Node("ann", "far", listens=other)
            yield Ends(near.to(far.peer()), far.to(near.peer()), near.name, far.name)
