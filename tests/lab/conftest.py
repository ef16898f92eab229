"""The lab, booted once a run, and what each test needs of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lab.lab import Lab
from tools import require_tool

TOOLS = {"linux.uml": "user-mode-linux", "modprobe": "kmod", "mkfs.ext4": "e2fsprogs", "ip": "iproute2"}


@pytest.fixture(scope="session")
def lab_tools() -> None:
    """Skip (or fail) where a guest cannot be booted."""
    for name, package in TOOLS.items():
        require_tool(name, package)


@pytest.fixture(scope="session")
def booted_lab(lab_tools: None) -> Iterator[Lab]:
    """One guest for the whole run; tests take `lab`."""
    with Lab() as lab:
        yield lab


@pytest.fixture
def lab(booted_lab: Lab) -> Iterator[Lab]:
    """The run's lab; after the test cables are in, the server serves, and nothing of the test's runs or is mounted."""
    yield booted_lab
    booted_lab.tidy()


@pytest.fixture
def shared(lab: Lab) -> str:
    """A new empty folder on the export, as the boxes see it (``/nfs/...``)."""
    return lab.new_folder()
