"""A plugin's source folder as an installed distribution that a subprocess sees beside what this environment has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
_OFFLINE = ("--no-index", "--no-build-isolation", "--no-deps", "--no-compile")


def install(source: Path, target: Path) -> None:
    """Build a folder with a pyproject.toml and install it into a target folder, without a network."""
    command = [*_PIP, *_OFFLINE, "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def run(target: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``python`` with these words where the target's distributions are installed.

    What lies in ``cwd`` is not importable (``-P``), so that an author's source never stands in for what is installed.
    """
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "SOT", "COV"))}
    environ = clean | {"PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-P", *words]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=120, check=False)
