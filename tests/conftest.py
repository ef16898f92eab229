"""Fixtures that every test may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from world import World


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """Every test begins with the umask that most people have; a command run in this process sets its own."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A comm folder of its own, on a machine whose mounts are told."""
    return World(tmp_path)
