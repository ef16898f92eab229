"""The answer that a sender keeps: how long, and what ends it."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from world import EXT4, MACHINE, World

from sotbus.comm import writer_gate
from sotbus.comm.box import Box
from sotbus.comm.folder import Folder
from sotbus.comm.lock_manager import FlockManager
from sotbus.comm.manager_record import writer_manager
from sotbus.comm.topology import NO_TOPOLOGY, Topology
from sotbus.comm.writer_gate import WriterGate
from sotbus.errors import FilingFailed

OTHER = "f" * 32
LOCAL = f"local {MACHINE}"
NFS = "nfs4 filer.example:/export"


@pytest.fixture
def here(world: World) -> World:
    world.folder.ensure()
    return world


def record(world: World) -> Path:
    return Path(world.folder.manager_record)


def another_record(world: World, text: str) -> None:
    """Another record in the place of the one there is; one of the same size may have the same times."""
    new = record(world).with_name("new-record")
    new.write_text(text)
    new.rename(record(world))


def mount(world: World, what: str) -> None:
    """Mount the comm folder as something else: ``fstype source super-options``."""
    world.mountinfo.write_text(EXT4 + f"22 21 0:50 / {world.home} rw,relatime - {what}\n")


def test_a_kept_answer_is_not_asked_again_within_its_moment_and_is_after_it(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    gate = WriterGate(here.folder, here.box(), NO_TOPOLOGY)
    gate.manager()  # makes the record
    gate.manager()
    record(here).write_text(f"local {OTHER}\n{OTHER}\n")
    now += writer_gate.RECENT_S * 0.9
    assert gate.manager().identity == LOCAL
    now += writer_gate.RECENT_S * 0.2
    with pytest.raises(FilingFailed):
        gate.manager()


@pytest.mark.spec("S63", "S66")
def test_a_kept_answer_ends_with_another_record(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_gate, "RECENT_S", 0)
    gate = WriterGate(here.folder, here.box(), NO_TOPOLOGY)
    assert gate.manager().identity == gate.manager().identity == LOCAL
    another_record(here, f"local {OTHER}\n{OTHER}\n")
    with pytest.raises(FilingFailed):
        gate.manager()
    record(here).unlink()
    assert gate.manager().identity == LOCAL
    assert record(here).read_text() == f"{LOCAL}\n{MACHINE}\n"


def test_a_kept_answer_ends_with_another_folder_in_the_inboxes_place(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_gate, "RECENT_S", 0)
    gate = WriterGate(here.folder, here.box(), NO_TOPOLOGY)
    gate.manager()
    kept = gate.manager()
    assert gate.manager() is kept
    os.rename(here.folder.inboxes, here.folder.inboxes + ".aside")
    os.mkdir(here.folder.inboxes)
    assert gate.manager() is not kept


def test_one_thread_asks_at_a_time(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_gate, "RECENT_S", 0)
    gate = WriterGate(here.folder, here.box(), NO_TOPOLOGY)
    asking: list[int] = []
    most: list[int] = []
    real = writer_manager

    def asked(folder_: Folder, box: Box, topology: Topology) -> FlockManager:
        asking.append(1)
        identity = real(folder_, box, topology).identity
        most.append(len(asking))
        asking.pop()
        return FlockManager(identity)

    monkeypatch.setattr(writer_gate, "writer_manager", asked)
    monkeypatch.setattr(WriterGate, "_mounts_changed", lambda _: True)  # so that every thread asks afresh
    with ThreadPoolExecutor(8) as pool:
        found = [answer.result() for answer in [pool.submit(gate.manager) for _ in range(200)]]
    assert {manager.identity for manager in found} == {LOCAL}
    assert max(most) == 1


def test_a_kept_answer_asks_for_nothing_while_all_is_the_same(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_gate, "RECENT_S", 0)
    gate = WriterGate(here.folder, here.box(), NO_TOPOLOGY)
    gate.manager()
    gate.manager()

    def asked(*args: object, **more: object) -> str:
        raise AssertionError("asked again")

    monkeypatch.setattr(writer_gate, "writer_manager", asked)
    assert gate.manager().identity == LOCAL
    monkeypatch.undo()


@pytest.mark.spec("S63")
def test_an_answer_on_nfs_is_kept_for_its_moment_and_no_longer(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    mount(here, "nfs4 filer.example:/export rw,vers=4.2,local_lock=none")
    gate = WriterGate(here.folder, here.box(), NO_TOPOLOGY)
    assert gate.manager().identity == gate.manager().identity == NFS
    mount(here, "nfs4 other.example:/export rw,vers=4.2,local_lock=none")
    now += writer_gate.RECENT_S * 0.9
    assert gate.manager().identity == NFS
    now += writer_gate.RECENT_S * 0.2
    with pytest.raises(FilingFailed):
        gate.manager()


def test_on_nfs_the_record_is_read_again_and_the_mounts_are_not(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_gate, "RECENT_S", 0)
    mount(here, "nfs4 filer.example:/export rw,vers=4.2,local_lock=none")
    gate = WriterGate(here.folder, here.box(), NO_TOPOLOGY)
    record(here).write_text(f"{NFS}\n{OTHER}\n")
    kept = gate.manager()
    monkeypatch.setattr(Box, "mountinfo", lambda _: pytest.fail("the mounts are as they were"))
    assert gate.manager() is kept
    monkeypatch.undo()
    monkeypatch.setattr(writer_gate, "RECENT_S", 0)
    another_record(here, f"nfs4 other.example:/export\n{OTHER}\n")
    with pytest.raises(FilingFailed):
        gate.manager()


@pytest.mark.spec("S63", "S65")
def test_a_remount_changes_the_role_of_a_gate_that_is_in_use(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_gate, "RECENT_S", 0)
    monkeypatch.setattr(WriterGate, "_mounts_changed", lambda _: True)  # as the kernel says after each mount
    mount(here, "nfs4 filer.example:/export rw,vers=4.2,local_lock=none")
    record(here).write_text(f"{NFS}\n{OTHER}\n")
    gate = WriterGate(here.folder, here.box(), Topology("far"))
    assert gate.manager().identity == NFS
    mount(here, "nfs filer.example:/export rw,vers=3,local_lock=none")
    with pytest.raises(FilingFailed) as caught:
        gate.manager()
    assert caught.value.hint.startswith("this box is a guest of far, and the inbox lock record names nfs4 ")
    record(here).unlink()
    mount(here, "ext4 /dev/vdb rw")
    with pytest.raises(FilingFailed) as caught:
        gate.manager()
    assert "this box is the hub of its own folder" in caught.value.hint
    assert not record(here).exists()
