"""What may import what, and what a cold send may import at all."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from world import ENTRY, World

import sotbus

PACKAGE = Path(sotbus.__file__).parent
SLOW = {
    "argparse", "asyncio", "dataclasses", "datetime", "difflib", "hashlib", "importlib.metadata", "inspect", "logging",
    "pathlib", "pluggy", "random", "shutil", "socket", "subprocess", "tempfile", "threading", "tomli", "tomllib",
    "trio", "typing", "uuid", "zmq",
}  # fmt: skip
"""Modules that the hot path does not need; see docs/adr/0002-cold-start.md."""


def imports(path: Path) -> set[str]:
    """Every module that a file imports outside of type checking."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", sorted((PACKAGE / "comm").glob("*.py")), ids=lambda path: path.stem)
def test_comm_imports_the_standard_library_and_what_lies_below_it(path: Path) -> None:
    for name in imports(path):
        top = name.split(".")[0]
        if top == "sotbus":
            assert name.split(".")[1:2] in (["comm"], ["errors"], ["message"], []), f"{path.name} imports {name}"
        else:
            assert top in sys.stdlib_module_names, f"{path.name} imports {name}"


@pytest.mark.parametrize("name", ["errors.py", "message.py", "config.py"])
def test_the_base_imports_nothing_above_it(name: str) -> None:
    allowed = {"sotbus.errors", "sotbus.message"}
    ours = {found for found in imports(PACKAGE / name) if found.startswith("sotbus")}
    assert all(any(found == base or found.startswith(base + ".") for base in allowed) for found in ours)


def test_only_the_command_line_imports_the_command_line() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "cli" and path.name != "__main__.py":
            assert not any(name.startswith("sotbus.cli") for name in imports(path)), path


def test_a_cold_send_imports_nothing_that_it_does_not_need(world: World) -> None:
    world.sotbus("a", "join")
    world.sotbus("b", "join")
    env = world.environ({"SOT_COMM_SELF_FILE": str(world.home / "self" / "pin-a.txt")})
    done = subprocess.run(
        [sys.executable, "-S", "-X", "importtime", str(ENTRY), "send", "@b-vm", "x"],
        cwd=world.project("a"),
        env=env | {"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "  filed -> @b-vm\n"
    loaded = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "sotbus.comm.sending" in loaded
    assert loaded & SLOW == set()
