"""What may import what, and what a cold send may import at all."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from world import ENTRY, World

import sotbus

PACKAGE = Path(sotbus.__file__).parent
IN_TREE = ("plugins/filesystem", "plugins/nfs")

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


LAYERS = (
    ("errors", "message"),
    ("config", "config_schema", "toml_lines", "typed_table"),
    ("comm",),
    ("contracts", "link_ops", "peers", "peers_edit"),
    ("hookspecs", "folder_delivery", "guards", "link_delivery"),
    ("api",),
    ("plugins",),
    ("lock_managers",),
    ("assembly",),
    ("bus_values", "mount_limits", "mailwatch", "program"),
    ("bus_work",),
    ("bus",),
    ("node",),
    ("doctor", "testing"),
    ("cli", "__main__", "__init__"),
)
"""What lies below what, lowest first. A module imports its own layer and those below."""


def layer_of(name: str) -> int:
    for at, names in enumerate(LAYERS):
        if name in names:
            return at
    raise AssertionError(f"sotbus.{name} has no layer; give it one in LAYERS")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = layer_of(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    for name in imports(path):
        parts = name.split(".")
        below = PACKAGE / parts[1] if len(parts) > 1 else PACKAGE
        if parts[0] == "sotbus" and len(parts) > 1 and (below.is_dir() or below.with_suffix(".py").exists()):
            assert layer_of(parts[1]) <= own, f"{path.name} imports {name}"


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
        env=env | {"PYTHONPATH": os.pathsep.join(str(PACKAGE.parent / path) for path in (".", *IN_TREE))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "  filed -> @b-vm\n"
    loaded = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "sotbus.comm.sending" in loaded
    assert loaded & SLOW == set()
