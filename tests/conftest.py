"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest
from world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A comm folder of its own, on a machine whose mounts are told."""
    return World(tmp_path)
