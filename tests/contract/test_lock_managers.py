"""The lock managers of this tree, and the fake, under their contract."""

from __future__ import annotations

from pathlib import Path

import pytest
from sotbus_filesystem.lock_manager import make as make_filesystem
from sotbus_nfs.lock_manager import make as make_nfs

from sotbus.api import FlockManager, LockManager, LockTimeoutError, Mount
from sotbus.comm.lock_manager import choose
from sotbus.guards import GuardedLockManager
from sotbus.testing import FakeLockManager, Hold, LockManagerContract

MACHINE = "0123456789abcdef0123456789abcdef"
EXT4 = Mount("/", "ext4", "/dev/vda2", ("rw",), ("rw",))
NFS4 = Mount("/home", "nfs4", "filer:/home", ("rw",), ("rw", "vers=4.2", "local_lock=none"))
OVERLAY = Mount("/", "overlay", "overlay", ("rw",), ("rw",))


def made(manager: FlockManager | None) -> FlockManager:
    assert manager is not None
    return manager


class TestFilesystem(LockManagerContract):
    @pytest.fixture
    def manager(self) -> LockManager:
        return made(make_filesystem(EXT4, MACHINE))


class TestNfs(LockManagerContract):
    """The manager's own half; that the server's lock excludes is shown where there is a server."""

    @pytest.fixture
    def manager(self) -> LockManager:
        return made(make_nfs(NFS4, MACHINE))


class TestNone(LockManagerContract):
    @pytest.fixture
    def manager(self) -> LockManager:
        return choose(OVERLAY, MACHINE, ())


class TestFake(LockManagerContract):
    @pytest.fixture
    def manager(self) -> LockManager:
        return FakeLockManager()


class TestGuarded(LockManagerContract):
    @pytest.fixture
    def manager(self) -> LockManager:
        return GuardedLockManager("plugin 'fake'", FakeLockManager())


def test_the_fake_notes_each_hold_and_the_ones_that_last(tmp_path: Path) -> None:
    fake = FakeLockManager()
    path = str(tmp_path / "a.lock")
    with fake.hold(path, False, 1.5):
        assert fake.held == fake.holds == [Hold(path, False, 1.5)]
    assert fake.held == []


def test_the_fake_raises_what_it_is_told_to_once(tmp_path: Path) -> None:
    fake = FakeLockManager()
    fake.fail(LockTimeoutError())
    with pytest.raises(LockTimeoutError), fake.hold(f"{tmp_path}/a.lock", True, 1.0):
        pass
    with fake.hold(f"{tmp_path}/a.lock", True, 1.0):
        pass


def test_the_fake_is_held_by_another_when_told_to(tmp_path: Path) -> None:
    fake = FakeLockManager()
    with (
        fake.held_by_another(f"{tmp_path}/a.lock"),
        pytest.raises(LockTimeoutError),
        fake.hold(f"{tmp_path}/a.lock", False, 0.0),
    ):
        pass
