"""A stranger's plugin, built and installed as anybody's is: found by its entry point, and held to the contracts."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from pathlib import Path

import pytest
from installed import install, run

STRANGER = Path(__file__).parents[1] / "stranger"

LOADED = """
import json
from sotbus.api import BoxFacts, Mount
from sotbus.plugins import Plugins

reports = []
plugins = Plugins.load(["stranger", "filesystem"], reports.append)
[stranger, _] = plugins.loaded
machine = "0123456789abcdef0123456789abcdef"
mounts = {
    "tmpfs": Mount("/", "tmpfs", "tmpfs", ("rw",), ("rw",)),
    "fuse": Mount("/", "fuse.sshfs", "user@host:", ("rw",), ("rw",)),
    "nfs3": Mount("/", "nfs", "filer:/home", ("rw",), ("rw", "vers=3")),
    "ext4": Mount("/", "ext4", "/dev/vda2", ("rw",), ("rw",)),
    "nfs4": Mount("/", "nfs4", "filer:/home", ("rw",), ("rw", "vers=4.2", "local_lock=none")),
}
managers = {kind: plugins.lock_manager(mount, machine) for kind, mount in mounts.items()}
managers["no machine id"] = plugins.lock_manager(mounts["tmpfs"], None)
box = BoxFacts("vm", "user", machine, "/comm")
print(json.dumps({
    "described": stranger.described,
    "module": stranger.module,
    "hooks": stranger.hooks,
    "settings": {name: kind.__qualname__ for name, kind in plugins.settings_types().items()},
    "managers": {kind: manager and manager.identity for kind, manager in managers.items()},
    "wakers": [name for name, _ in plugins.wakers(box)],
    "reports": [str(report) for report in reports],
}))
"""

BYSTANDER = """
import sys
from sotbus.plugins import Plugins
Plugins.load(["filesystem"], print)
print(any(name.startswith("sotbus_stranger") for name in sys.modules))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the stranger's own tree."""
    copy = tmp_path_factory.mktemp("stranger") / "sotbus-stranger"
    shutil.copytree(STRANGER, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def target(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stranger's distribution is installed."""
    target = tmp_path_factory.mktemp("installed")
    install(source, target)
    return target


def test_it_imports_nothing_of_sotbus_but_what_is_public() -> None:
    found: dict[str, str] = {}
    for path in STRANGER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.module, path
                names = [node.module]
            found |= {name: path.name for name in names if name.split(".")[0] == "sotbus"}
    assert found.keys() == {"sotbus.api", "sotbus.testing"}


def test_its_package_without_its_tests_imports_sotbus_api_alone() -> None:
    for path in (STRANGER / "sotbus_stranger").glob("*.py"):
        assert "sotbus.testing" not in path.read_text(), path


def test_it_is_found_by_its_entry_point_and_asked_only_where_the_page_has_no_name(target: Path, tmp_path: Path) -> None:
    done = run(target, "-c", LOADED, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    machine = "0123456789abcdef0123456789abcdef"
    assert json.loads(done.stdout) == {
        "described": "plugin 'stranger' (sotbus-stranger 0.3)",
        "module": "sotbus_stranger.hooks",
        "hooks": ["sotbus_lock_manager", "sotbus_settings", "sotbus_wake"],
        "settings": {"stranger": "Settings"},
        "managers": {
            "tmpfs": f"ofd@{machine}",
            "fuse": f"ofd@{machine}",
            "nfs3": f"ofd@{machine}",
            "ext4": f"local {machine}",
            "nfs4": None,
            "no machine id": None,
        },
        "wakers": ["stranger"],
        "reports": [],
    }


def test_it_is_not_imported_where_the_config_does_not_name_it(target: Path, tmp_path: Path) -> None:
    assert run(target, "-c", BYSTANDER, cwd=tmp_path).stdout == "False\n"


def test_it_passes_its_own_tests_and_the_contracts(target: Path, source: Path) -> None:
    done = run(target, "-m", "pytest", "-q", cwd=source)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


def test_nothing_of_it_is_on_the_path_of_these_tests() -> None:
    assert not any(name.startswith("sotbus_stranger") for name in sys.modules)
