"""The boxes of a module, and what they take."""

from __future__ import annotations

import pytest
from tools import require_root, require_tool

TOOLS = {"ip": "iproute2", "nft": "nftables", "nsenter": "util-linux", "unshare": "util-linux"}


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip (or fail) where boxes cannot have networks of their own."""
    require_root("a network namespace and its cables")
    for name, package in TOOLS.items():
        require_tool(name, package)
