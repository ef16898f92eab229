"""A connection of a Unix socket under trio: what waits, what does not, and what is said at its end."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from sotbus.comm.runtime_folder import peer_of
from sotbus.node.unix_stream import UnixStream

MANY = 1 << 20
"""More than a socket's buffer takes."""


@pytest.fixture
def ends() -> Iterator[tuple[UnixStream, UnixStream]]:
    near, far = socket.socketpair()
    with near, far:
        yield UnixStream(near, peer_of(near)), UnixStream(far, peer_of(far))


async def test_bytes_go_both_ways_and_an_end_is_heard(ends: tuple[UnixStream, UnixStream]) -> None:
    near, far = ends
    await near.send_all(b"there")
    assert await far.receive_some(3) == b"the"
    assert await far.receive_some() == b"re"
    await far.send_all(b"back")
    assert await near.receive_some(100) == b"back"
    await far.aclose()
    assert await near.receive_some() == b""
    with pytest.raises(trio.BrokenResourceError):
        await near.send_all(b"x")
    await near.aclose()


async def test_what_the_kernel_takes_at_once_lets_nobody_run(ends: tuple[UnixStream, UnixStream]) -> None:
    with trio.testing.assert_no_checkpoints():
        await ends[0].send_all(b"an answer\n")


async def test_more_than_fits_waits_for_the_reader_and_comes_whole(ends: tuple[UnixStream, UnixStream]) -> None:
    near, far = ends
    data = bytes(range(256)) * (MANY // 256)

    async def send() -> None:
        await near.send_all(data)
        await near.aclose()

    heard = b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        while more := await far.receive_some():
            heard += more
    assert heard == data


async def test_a_close_is_heard_by_whoever_waits_and_by_whoever_comes_later(
    ends: tuple[UnixStream, UnixStream],
) -> None:
    near, _ = ends
    heard: list[str] = []

    async def wait(what: str) -> None:
        with pytest.raises(trio.ClosedResourceError):
            await (near.receive_some() if what == "read" else near.send_all(b"x" * 2 * MANY))
        heard.append(what)

    async with trio.open_nursery() as nursery:
        for what in ("read", "write"):
            nursery.start_soon(wait, what)
        await trio.testing.wait_all_tasks_blocked()
        await near.aclose()
    assert sorted(heard) == ["read", "write"]
    for what in ("read", "write"):
        await wait(what)
    with pytest.raises(trio.ClosedResourceError):
        await near.wait_send_all_might_not_block()
    await near.aclose()


async def test_a_close_in_the_moment_when_something_has_come_is_a_close() -> None:
    for _ in range(20):  # who runs first is random
        near, far = (UnixStream(one, peer_of(one)) for one in socket.socketpair())
        heard: list[object] = []

        async def read(stream: UnixStream, heard: list[object]) -> None:
            try:
                heard.append(await stream.receive_some())
            except trio.ClosedResourceError:
                heard.append("closed")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, near, heard)
            await trio.testing.wait_all_tasks_blocked()
            await far.send_all(b"x")
            nursery.start_soon(near.aclose)
        await far.aclose()
        assert heard in ([b"x"], ["closed"])


async def test_a_wait_that_is_cancelled_takes_nothing(ends: tuple[UnixStream, UnixStream]) -> None:
    near, far = ends
    with trio.move_on_after(0):
        await near.receive_some()
    await far.send_all(b"still there")
    assert await near.receive_some() == b"still there"


async def test_a_connection_that_was_reset_is_broken(ends: tuple[UnixStream, UnixStream]) -> None:
    near, far = ends
    await near.send_all(b"unread")
    await far.aclose()  # with bytes that nobody read: unix(7)
    with pytest.raises(trio.BrokenResourceError):
        await near.receive_some()
