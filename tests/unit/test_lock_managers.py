"""Which lock manager a mount gets: the same without pluggy and with it; a stranger's only where the page has none."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sotbus_nfs import lock_manager as nfs_lock_manager
from world import EXT4, MACHINE

import sotbus
from sotbus import lock_managers
from sotbus.api import FlockManager, hookimpl
from sotbus.comm.lock_manager import choose, page_lock_manager, recovers_lost_locks
from sotbus.comm.mounts import Mount, mount_of
from sotbus.errors import PluginError
from sotbus.plugins import Plugins

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.comm.lock_manager import Factory

ROOT = Path(sotbus.__file__).parents[1]
IN_TREE = sorted((ROOT / "plugins").glob("*/sotbus_*"))
CASES: list[dict[str, Any]] = json.loads((ROOT / "tests" / "vectors" / "lock_identity.json").read_text())["cases"]
LIBRARIES = {"sotbus_zmq": ("trio", "zmq")}
"""What an in-tree plugin needs besides the standard library."""

NAMES = [("filesystem", "nfs"), ("nfs", "filesystem"), ("filesystem",), ("nfs",)]
STRANGER = "spool 10.0.0.7"
DISK = mount_of("/x", EXT4)
SHARE = mount_of("/", "21 1 0:50 / / rw - fuse.sshfs me@filer:/ rw\n")
"""A mount of which the page says ``none@``."""


def each_case(test: Any) -> Any:
    return pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["name"]))(test)


def fail(error: PluginError) -> None:
    raise error


def chosen(case: dict[str, Any], factories: Sequence[Factory]) -> tuple[str, bool, bool]:
    """What a case's mount gets: identity, proves_fresh_read, fences_data."""
    manager = choose(mount_of(case["path"], case["mountinfo"]), case["machine_id"], factories)
    return manager.identity, manager.proves_fresh_read, manager.fences_data


# ---- the cold path and the façade


@cache
def facade(names: tuple[str, ...]) -> Plugins:
    return Plugins.load(names, fail)


@each_case
@pytest.mark.parametrize("names", NAMES, ids="+".join)
def test_the_cold_path_and_the_facade_choose_the_same(case: dict[str, Any], names: tuple[str, ...]) -> None:
    cold = lock_managers.resolve(names, fail)
    assert len(cold) == len(names)
    assert chosen(case, cold) == chosen(case, [facade(names).lock_manager])


@each_case
@pytest.mark.parametrize("names", NAMES[:2], ids="+".join)
def test_the_in_tree_plugins_together_choose_what_the_page_says(case: dict[str, Any], names: tuple[str, ...]) -> None:
    identity, fresh, fences = chosen(case, lock_managers.resolve(names, fail))
    assert (identity, fresh) == (case["identity"], case["proves_fresh_read"])
    assert fences
    assert (identity, fresh, fences) == chosen(case, [page_lock_manager])


@pytest.mark.parametrize(("text", "undone"), [("Y\n", True), ("1\n", True), ("N\n", False), (None, False)])
def test_a_client_that_takes_lost_locks_again_by_itself_undoes_the_fence(
    text: str | None, undone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """decisions, sot-comm 16; the parameter of the kernel's NFS client, which may not be loaded."""
    parameter = tmp_path / "recover_lost_locks"
    if text is not None:
        parameter.write_text(text)
    monkeypatch.setattr(recovers_lost_locks, "__defaults__", (str(parameter),))
    nfs, disk = (Mount("/", fstype, "f:/x", ("rw",), ("vers=4.2", "local_lock=none")) for fstype in ("nfs4", "ext4"))
    for make in (nfs_lock_manager.make, page_lock_manager):
        manager = make(nfs, "m")
        assert manager is not None
        assert manager.fences_data is not undone
    assert page_lock_manager(disk, "m").fences_data


@each_case
@pytest.mark.parametrize("names", NAMES[2:], ids="+".join)
def test_a_mount_of_a_plugin_that_is_not_named_is_one_machines_own(case: dict[str, Any], names: tuple[str]) -> None:
    own = {"filesystem": "local ", "nfs": "nfs4 "}[names[0]]
    identity, _, _ = chosen(case, lock_managers.resolve(names, fail))
    if case["identity"].startswith(own):
        assert identity == case["identity"]
    else:
        assert identity == (f"none@{case['machine_id']}" if case["machine_id"] else "none")


# ---- strangers


class Stranger:
    """A plugin whose lock manager is for every mount."""

    def __init__(self, identity: object = STRANGER) -> None:
        self.manager = Locks(identity)

    @hookimpl
    def sotbus_lock_manager(self, mount: Mount | None, machine_id: str | None) -> object:
        return self.manager


class Locks:
    """A lock manager under any identity; one that is an error is raised."""

    proves_fresh_read = True
    fences_data = True

    def __init__(self, identity: object) -> None:
        self._identity = identity

    @property
    def identity(self) -> Any:
        if isinstance(self._identity, Exception):
            raise self._identity
        return self._identity

    def hold(self, path: str, exclusive: bool, bound_s: float) -> AbstractContextManager[object]:
        return nullcontext()

    def fence(self, fd: int, bound_s: float) -> bool:
        return False


@each_case
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_a_strangers_lock_manager_counts_only_where_the_page_says_none_at(case: dict[str, Any], first: bool) -> None:
    plugins = Plugins(fail)
    if first:
        plugins.add("spool", Stranger())
    for name in ("filesystem", "nfs"):
        module = __import__(f"sotbus_{name}.hooks", fromlist=["hooks"])
        plugins.add(name, module)
    if not first:
        plugins.add("spool", Stranger())
    identity, _, _ = chosen(case, [plugins.lock_manager])
    assert identity == (STRANGER if case["identity"].startswith("none@") else case["identity"])


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A stranger's distribution on ``sys.path``; the plugin's name."""
    info = tmp_path / "spool_lock-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spool-lock\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sotbus]\nspool = spool_lock_hooks\n")
    (tmp_path / "spool_lock_hooks.py").write_text(
        "from sotbus.api import FlockManager, hookimpl\n"
        "@hookimpl\n"
        "def sotbus_lock_manager(mount, machine_id):\n"
        f"    return FlockManager({STRANGER!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "spool"
    sys.modules.pop("spool_lock_hooks", None)


@each_case
def test_a_config_that_names_a_stranger_too_asks_all_through_the_facade(case: dict[str, Any], spool: str) -> None:
    factories = lock_managers.resolve(("filesystem", spool, "nfs"), fail)
    assert len(factories) == 1
    identity, fresh, fences = chosen(case, factories)
    if case["identity"].startswith("none@"):
        assert identity == STRANGER
    else:
        assert (identity, fresh, fences) == chosen(case, [page_lock_manager])


def test_a_stranger_that_is_not_installed_is_an_error() -> None:
    with pytest.raises(PluginError, match="plugin 'spool' is not installed"):
        lock_managers.resolve(("filesystem", "spool"), fail)


BAD_IDENTITIES = [
    pytest.param("two\nlines", id="two lines"),
    pytest.param("", id="empty"),
    pytest.param(None, id="none"),
    pytest.param(b"spool", id="bytes"),
    pytest.param(RuntimeError("boom"), id="raises"),
]


@pytest.mark.parametrize("bad", BAD_IDENTITIES)
@pytest.mark.parametrize(("mount", "right"), [(DISK, f"local {MACHINE}"), (SHARE, STRANGER)], ids=["disk", "share"])
def test_a_lock_manager_without_a_one_line_identity_is_told_and_the_next_is_asked(
    bad: object, mount: Mount, right: str
) -> None:
    told: list[PluginError] = []
    plugins = Plugins(told.append)
    plugins.add("odd", Stranger(bad), "odd-dist 1.0")
    plugins.add("good", Stranger(right), "good-dist 1.0")
    manager = plugins.lock_manager(mount, MACHINE)
    assert manager is not None
    assert manager.identity == right
    (error,) = told
    assert str(error).startswith("plugin 'odd' (odd-dist 1.0): ")
    assert "identity" in str(error)


def test_a_strangers_lock_manager_is_guarded() -> None:
    plugins = Plugins(fail)
    plugins.add("odd", Stranger(), "odd-dist 1.0")
    assert repr(plugins.lock_manager(SHARE, MACHINE)) == "<GuardedLockManager of plugin 'odd' (odd-dist 1.0)>"


def test_a_plugin_may_take_the_pages_own_identity_with_a_lock_of_its_own() -> None:
    plugins = Plugins(fail)
    plugins.add("odd", Stranger(f"local {MACHINE}"), "odd-dist 1.0")
    manager = plugins.lock_manager(DISK, MACHINE)
    assert manager is not None
    assert not isinstance(manager, FlockManager)


# ---- what the in-tree plugins import


def modules() -> list[Path]:
    found = [path for package in IN_TREE for path in sorted(package.rglob("*.py"))]
    assert {"sotbus_filesystem", "sotbus_nfs"} <= {path.parent.name for path in found}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_an_in_tree_plugin_imports_only_the_api_and_its_own_package(path: Path) -> None:
    own = path.relative_to(ROOT / "plugins").parts[1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.level == 0 else [own]
            if node.module == "sotbus":
                names = [f"sotbus.{alias.name}" for alias in node.names]
        else:
            assert not (isinstance(node, ast.Name) and node.id == "__import__")
            continue
        for name in names:
            top = name.split(".")[0]
            library = top in sys.stdlib_module_names or top in LIBRARIES.get(own, ())
            assert name == "sotbus.api" or top == own or (top != "sotbus" and library), name


@pytest.mark.parametrize(
    "package", [path for path in IN_TREE if (path / "lock_manager.py").exists()], ids=lambda path: str(path.name)
)
def test_a_plugins_lock_manager_loads_neither_pluggy_nor_trio_nor_typing(package: Path) -> None:
    loaded = loaded_by(f"import {package.name}.lock_manager as it; assert it.make(None, None) is None")
    assert "sotbus.comm.lock_manager" in loaded
    assert loaded.isdisjoint({"pluggy", "trio", "typing", "dataclasses", "importlib.metadata", "threading", "random"})


def test_the_cold_path_loads_neither_pluggy_nor_trio_nor_typing() -> None:
    loaded = loaded_by(
        "from sotbus import lock_managers as it; assert len(it.resolve(('filesystem', 'nfs'), print)) == 2"
    )
    assert {"sotbus_filesystem.lock_manager", "sotbus_nfs.lock_manager"} <= loaded
    assert loaded.isdisjoint({"pluggy", "trio", "typing", "dataclasses", "importlib.metadata", "sotbus.plugins"})


def loaded_by(program: str) -> set[str]:
    """The modules that a program imports in an interpreter of its own, without site-packages."""
    path = os.pathsep.join([str(ROOT), *(str(package.parent) for package in IN_TREE)])
    done = subprocess.run(
        [sys.executable, "-S", "-X", "importtime", "-c", program],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
