"""What no client and no node sends: bytes for the page's wire and for a link, to see what they do to whom."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager

import zmq
from node_world import HELLO, request
from sotbus_zmq import frames
from sotbus_zmq.frames import Kind
from zmq_ends import Node


def garbage(chance: random.Random) -> bytes:
    """Bytes, frames cut anywhere, frames with a byte changed, frames of odd values."""
    whole = HELLO + request(1, "comm.file", {"from": "a", "to": "b", "text": "x" * chance.randrange(200)})
    kind = chance.randrange(5)
    if kind == 0:
        return chance.randbytes(chance.randrange(1, 3000))
    if kind == 1:
        return whole[: chance.randrange(len(whole))]
    if kind == 2:
        at = chance.randrange(len(whole))
        return whole[:at] + chance.randbytes(1) + whole[at + 1 :]
    odd: object = chance.choice([None, 5, [], {}, "x" * 70000, -1, 1e300, {"len": 10**9}, [[[]]], True])
    if kind == 3:
        return HELLO + request(
            chance.randrange(-5, 10**6), chance.choice(["comm.file", "agent.join", "sotbus.row"]), odd
        )
    keys = {
        key: chance.choice([odd, "b", ""]) for key in ("from", "to", "text", "broadcast", "handle", "sotbus", "pid")
    }
    return HELLO + request(2, chance.choice(["comm.file", "agent.join", "agent.send", "nothing"]), keys)


@contextmanager
def dealer(far: Node, near: Node, *, reads_ahead: int = 1000) -> Iterator[zmq.Socket[bytes]]:
    """A socket of an authenticated peer, to send what no node sends; it takes so many messages before it is read."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.linger = 0
        made.rcvhwm = reads_ahead
        made.curve_serverkey = far.key.public.encode()
        made.curve_publickey = near.key.public.encode()
        made.curve_secretkey = near.key.secret.encode()
        made.reconnect_ivl = 5
        made.connect(str(far.listens))
        yield made


def random_message(rng: random.Random) -> list[bytes]:
    """Frames that are right, nearly right, and not at all."""
    shape = rng.random()
    if shape < 0.3:
        return [frames.encode(Kind.HELLO)]
    if shape < 0.4:
        return [rng.randbytes(rng.choice([0, 1, 5, 30])) for _ in range(rng.randrange(2, 5))]
    if shape < 0.5:
        return [rng.randbytes(rng.choice([0, 1, 9, 10, 11, 300, 70000]))]
    data = bytearray(frames.encode(rng.choice(list(Kind)), rng.choice([0, 1, 2, 5, 2**64 - 1]), b""))
    if shape < 0.7:
        data += rng.randbytes(rng.randrange(300))
    if shape < 0.8:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return [bytes(data)]


def random_request(rng: random.Random) -> bytes:
    """A frame that a link takes for a request, whose body is one, nearly one, or none."""
    odd: object = rng.choice([None, 5, [], {}, "x" * 70000, -1, 1e300, [[[]]], True, "b", ""])
    payload = {key: rng.choice([odd, "b", "far"]) for key in ("from", "to", "text", "broadcast", "forwarded", "sotbus")}
    envelope = {"v": rng.choice([1, 1, 1, 2, odd]), "op": rng.choice(["comm.file", "comm.file", "hello", odd])}
    body = bytearray(json.dumps({**envelope, "payload": rng.choice([payload, payload, odd])}).encode())
    if rng.random() < 0.4:
        body[rng.randrange(len(body))] = rng.randrange(256)
    return frames.encode(Kind.REQUEST, rng.randrange(1, 100), bytes(body))
