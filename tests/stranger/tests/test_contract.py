"""The plugin's parts under the contracts of sotbus."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sotbus_stranger.bell import VARIABLE, Bell
from sotbus_stranger.lock_manager import OfdLockManager
from sotbus_stranger.settings import Settings
from sotbus_stranger.spool import Spool

from sotbus.api import LockManager, Waker
from sotbus.testing import Ends, LockManagerContract, TransportContract, WakerContract


class TestOfdLockManager(LockManagerContract):
    @pytest.fixture
    def manager(self) -> LockManager:
        return OfdLockManager("0123456789abcdef0123456789abcdef")


class TestSpool(TransportContract):
    @pytest.fixture
    def ends(self, tmp_path: Path) -> Ends:
        folder = str(tmp_path)
        return Ends(Spool("near", Settings(folder, ("far",))), Spool("far", Settings(folder, ("near",))), "near", "far")


class TestBell(WakerContract):
    @pytest.fixture
    def waker(self) -> Waker:
        return Bell()

    @pytest.fixture
    def environ(self, tmp_path: Path) -> Iterator[dict[str, str]]:
        pipe = str(tmp_path / "bell")
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        yield {VARIABLE: pipe}
        os.close(reader)

    @pytest.fixture
    def foreign_environ(self) -> dict[str, str]:
        return {VARIABLE: "not/a/path/from/the/root"}
