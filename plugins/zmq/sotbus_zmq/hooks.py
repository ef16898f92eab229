"""The hooks of the ``zmq`` plugin. ZeroMQ itself is loaded where a link is made, not where a command asks for hooks."""

from __future__ import annotations

from sotbus.api import BoxFacts, Delivery, hookimpl
from sotbus_zmq.settings import Settings


@hookimpl
def sotbus_settings() -> type:
    return Settings


@hookimpl
def sotbus_delivery(box: BoxFacts) -> Delivery:
    """Delivery to the box's peers, over links.

    *Errors*: BadRequest for a key file that may not be used, for peers that contradict each other, and for a listener
    without a key or without a peer.
    """
    from sotbus.api import LinkDelivery
    from sotbus_zmq.transport import ZmqTransport

    return LinkDelivery(ZmqTransport.of(box))
