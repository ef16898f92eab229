"""What a test does when something that it needs is not there: skip, or fail when nothing may be skipped."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import NoReturn

import pytest

_ADMIN_DIRS = ("/usr/local/sbin", "/usr/sbin", "/sbin")


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test for *reason*; with SOTBUS_NO_SKIP=1 in the environment, fail it instead."""
    if os.environ.get("SOTBUS_NO_SKIP") == "1":
        pytest.fail(f"{reason} (SOTBUS_NO_SKIP=1: a missing tool is a failure)", pytrace=False)
    pytest.skip(reason)


def require_tool(name: str, package: str, reason: str | None = None) -> str:
    """The path of the command or device *name*, which *package* brings; where it is missing, skip or fail.

    A *name* with a slash is a path that must be readable and writable (``/dev/fuse``), any other a command, looked
    up in PATH and in the directories of the administrator's commands.
    """
    if "/" in name:
        found = name if os.access(name, os.R_OK | os.W_OK) else None
    else:
        found = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", os.defpath), *_ADMIN_DIRS)))
    if found is None:
        skip_or_fail(reason or f"needs {name} ({package})")
    return found


def require_module(name: str, package: str, reason: str | None = None) -> None:
    """Skip or fail unless the Python module *name*, which *package* brings, can be imported."""
    if importlib.util.find_spec(name) is None:
        skip_or_fail(reason or f"needs the Python module {name} ({package})")


def require_root(purpose: str) -> None:
    """Skip or fail unless the tests run as root, which *purpose* takes."""
    if os.geteuid() != 0:
        skip_or_fail(f"needs root: {purpose}")
