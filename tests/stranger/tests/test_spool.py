"""What a spool keeps beside the contract: between processes, and against others who write there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from sotbus_stranger.bell import VARIABLE, Bell
from sotbus_stranger.settings import Settings
from sotbus_stranger.spool import Spool
from sotbus_stranger.spool_folder import SpoolFolder

from sotbus.api import NotSentError, WakeOutcome
from sotbus.testing import FakeInbound

OTHER_BOX = """
import sys, trio
from sotbus_stranger.settings import Settings
from sotbus_stranger.spool import Spool

class Inbound:
    async def answer(self, peer, request):
        return peer.encode() + b" asked " + request
    def up(self, peer): print("up", peer, flush=True)
    def down(self, peer): print("down", peer, flush=True)

trio.run(Spool("far", Settings(sys.argv[1], ("near",))).serve, Inbound())
"""


@pytest.fixture
def near(tmp_path: Path) -> Spool:
    return Spool("near", Settings(str(tmp_path), ("far",)))


@pytest.mark.trio
async def test_two_processes_that_see_one_folder_ask_and_answer(near: Spool, tmp_path: Path) -> None:
    inbound = FakeInbound()
    command = [sys.executable, "-c", OTHER_BOX, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        try:
            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(near.serve, inbound)
                    await inbound.until(lambda one: "far" in one.peers)
                    assert await near.request("far", b"\0hello", 20.0) == b"near asked \0hello"
                    nursery.cancel_scope.cancel()
            assert other.stdout.readline() == "up near\n"
            assert other.stdout.readline() == "down near\n"
        finally:
            other.kill()


@pytest.mark.trio
async def test_no_file_is_left_of_a_request(near: Spool, tmp_path: Path) -> None:
    far = Spool("far", Settings(str(tmp_path), ("near",)))
    inbound = FakeInbound()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(far.serve, inbound)
        nursery.start_soon(near.serve, FakeInbound())
        await inbound.until(lambda one: "near" in one.peers)
        await near.request("far", b"hello", 20.0)
        with trio.fail_after(20):
            while any((tmp_path / "far" / "to-near").iterdir()):
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert list((tmp_path / "near" / "to-far").iterdir()) == []


@pytest.fixture
def spool(tmp_path: Path) -> tuple[SpoolFolder, SpoolFolder]:
    """The folder as near and as far see it, with one request from near to far."""
    near, far = SpoolFolder(str(tmp_path), "near"), SpoolFolder(str(tmp_path), "far")
    near.beat()
    near.put("far", f"{1:032x}.request", b"hello")
    return near, far


def test_a_request_is_taken_once_also_by_one_who_starts_again(spool: tuple[SpoolFolder, SpoolFolder]) -> None:
    near, far = spool
    assert far.take("near") == [(f"{1:032x}", b"hello")]
    assert far.take("near") == []
    assert SpoolFolder(near.folder, "far").take("near") == []


def _open_to_others(folder: Path) -> None:
    (folder / "near").chmod(0o777)


def _spool_open_to_others(folder: Path) -> None:
    folder.chmod(0o777)


def _linked(folder: Path) -> None:
    (folder / "near").rename(folder / "elsewhere")
    (folder / "near").symlink_to(folder / "elsewhere")


def _linked_request(folder: Path) -> None:
    request = folder / "near" / "to-far" / f"{1:032x}.request"
    request.rename(folder / "stolen")
    request.symlink_to(folder / "stolen")


def _not_an_id(folder: Path) -> None:
    request = folder / "near" / "to-far" / f"{1:032x}.request"
    request.rename(request.with_name("..request"))


@pytest.mark.parametrize(
    "forge", [_open_to_others, _spool_open_to_others, _linked, _linked_request, _not_an_id], ids=lambda f: f.__name__
)
def test_what_another_could_have_written_is_not_taken(
    spool: tuple[SpoolFolder, SpoolFolder], tmp_path: Path, forge: Callable[[Path], None]
) -> None:
    forge(tmp_path)
    assert spool[1].take("near") == []


@pytest.mark.trio
async def test_a_spool_that_cannot_be_written_sends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    near = Spool("near", Settings(str(tmp_path / "file"), ("far",)))
    with pytest.raises(NotSentError):
        await near.request("far", b"hello", 5.0)


@pytest.mark.trio
async def test_a_bell_says_who_has_mail_and_is_refused_where_nobody_listens(tmp_path: Path) -> None:
    pipe = str(tmp_path / "bell")
    os.mkfifo(pipe)
    recipient = {**Bell().facts({VARIABLE: pipe}), "handle": "reader"}
    assert await Bell().wake(recipient, 1) is WakeOutcome.REFUSED
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        assert await Bell().wake(recipient, 3) is WakeOutcome.WOKEN
        assert reader.readline() == "3 unread for @reader\n"
    os.unlink(pipe)
    assert await Bell().wake(recipient, 1) is WakeOutcome.REFUSED
