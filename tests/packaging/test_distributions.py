"""The wheel and the sdist: built, installed into a fresh environment elsewhere, and used from there.

Nothing is downloaded but hatchling, where it is not installed: the environment sees this one's copies of the declared
dependencies, and nothing else of it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from tools import require_module, skip_or_fail

import sotbus

ROOT = Path(__file__).parents[2]
PLUGINS = {path.name for path in (ROOT / "plugins").glob("*/sotbus_*")}

IMPORT_ALL = """
import importlib, pkgutil, sotbus
for found in pkgutil.walk_packages(sotbus.__path__, "sotbus."):
    if not found.name.endswith(".__main__") and not found.name.startswith("sotbus.testing"):
        importlib.import_module(found.name)
"""

TYPED = """
from sotbus.api import FlockManager, Receipt
from sotbus_filesystem.lock_manager import make

reveal_type(make(None, "x"))
reveal_type(Receipt("delivered", "/x").where)
wrong: int = FlockManager("x").identity
"""


def run(*words: object, env: Mapping[str, str], cwd: Path) -> str:
    """A command that must succeed; its standard output."""
    done = subprocess.run(
        [str(word) for word in words], env=env, cwd=cwd, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which this interpreter finds pip and hatchling."""
    require_module("pip", "ensurepip")
    environ = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_ROOT_USER_ACTION="ignore")
    if importlib.util.find_spec("hatchling") is None:
        folder = tmp_path_factory.mktemp("hatchling")
        getting = ("install", "--quiet", "--retries=0", "--timeout=20", "--target")
        got = subprocess.run(
            [sys.executable, "-m", "pip", *getting, str(folder), "hatchling>=1.24"],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        if got.returncode != 0:
            skip_or_fail("needs hatchling, which is not installed and cannot be downloaded")
        environ["PYTHONPATH"] = str(folder)
    return environ


@pytest.fixture(scope="module")
def built(builder: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``sdist``, the ``wheel`` of the tree, and ``rewheel``, the wheel that pip makes of the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    for target in ("sdist", "wheel"):
        run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, env=builder, cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    again = tmp_path_factory.mktemp("again")
    wheeling = ("wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "-w", again, sdist)
    run(sys.executable, "-m", "pip", *wheeling, env=builder, cwd=folder)
    (rewheel,) = again.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel, "rewheel": rewheel}


def names_of(wheel: Path) -> set[str]:
    """The files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def dependencies(name: str, found: dict[str, metadata.Distribution]) -> None:
    """Add the distributions that one needs, and what those need, by the declared requirements."""
    for text in metadata.requires(name) or ():
        needed = Requirement(text)
        if needed.name in found or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        found[needed.name] = metadata.distribution(needed.name)
        dependencies(needed.name, found)


class Installed:
    """A virtual environment elsewhere with sotbus in it, and a home folder."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.venv = base / "venv"
        self.python = self.venv / "bin" / "python"
        self.home = base / "home"

    def install(self, wheel: Path, builder: Mapping[str, str]) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", self.venv, env=builder, cwd=self.base)
        installing = ("install", "--quiet", "--no-deps", "--no-index", wheel)
        run(sys.executable, "-m", "pip", "--python", self.python, *installing, env=builder, cwd=self.base)
        self.home.mkdir()
        linked = self.base / "dependencies"
        linked.mkdir()
        needed: dict[str, metadata.Distribution] = {}
        dependencies("sotbus", needed)
        for dist in needed.values():
            for top in {path.parts[0] for path in dist.files or ()} - {"..", "__pycache__"}:
                (linked / top).symlink_to(Path(str(dist.locate_file(top))))
        (site,) = self.venv.glob("lib/python*/site-packages")
        (site / "dependencies.pth").write_text(f"{linked}\n")

    def environ(self, session: str = "") -> dict[str, str]:
        pin = {"SOT_COMM_SELF_FILE": str(self.home / ".sot-comm" / "self" / f"pin-{session}.txt")} if session else {}
        path = f"{self.venv / 'bin'}:{os.defpath}"
        return {"HOME": str(self.home), "PATH": path, "SOT_SELF_HOST": "vm", "SOT_COMM_TEST_HOST": "vm", **pin}

    def sotbus(self, *words: str, session: str = "") -> str:
        """The installed command, in a project of its own for each session."""
        return self.run(self.venv / "bin" / "sotbus", *words, session=session)

    def run(self, *words: object, session: str = "") -> str:
        project = self.base / (session or "nobody")
        project.mkdir(exist_ok=True)
        return run(*words, env=self.environ(session), cwd=project)


@pytest.fixture(scope="module", params=["wheel", "rewheel"], ids=["wheel", "sdist"])
def installed(
    request: pytest.FixtureRequest,
    built: dict[str, Path],
    builder: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Installed:
    made = Installed(tmp_path_factory.mktemp(request.param))
    made.install(built[request.param], builder)
    return made


# ---- what is in them


def test_the_wheel_has_every_module_and_the_types_and_no_tests(built: dict[str, Path]) -> None:
    names = names_of(built["wheel"])
    assert {name.split("/")[0] for name in names} == {"sotbus", *PLUGINS, f"sotbus-{sotbus.__version__}.dist-info"}
    for package in (ROOT / "sotbus", *(ROOT / "plugins").glob("*/sotbus_*")):
        ours = {path.relative_to(package.parent).as_posix() for path in package.rglob("*.py")}
        assert ours | {f"{package.name}/py.typed"} <= names
    assert [name for name in names if re.search(r"(^|/)(tests?|conftest\.py|test_[^/]*|__pycache__)(/|$)", name)] == []


def test_the_wheel_has_every_file_of_conf(built: dict[str, Path]) -> None:
    ours = {f"sotbus/conf/{path.name}" for path in (ROOT / "conf").iterdir()}
    assert ours
    assert {name for name in names_of(built["wheel"]) if name.startswith("sotbus/conf/")} == ours


def test_the_sdist_makes_the_same_wheel(built: dict[str, Path]) -> None:
    assert names_of(built["rewheel"]) == names_of(built["wheel"])


def test_the_sdist_has_what_the_makefile_runs(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for top in ("tests", "benchmarks", "demo", "docs", "conf", "plugins", "sotbus"):
        assert any(name.startswith(f"{top}/") for name in names), top
    assert {"Makefile", "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "tests/conftest.py"} <= names


# ---- used from elsewhere


def test_the_command_and_the_module_say_the_version(installed: Installed) -> None:
    assert installed.sotbus("--version") == f"sotbus {sotbus.__version__}\n"
    assert installed.run(installed.python, "-m", "sotbus", "--version") == installed.sotbus("--version")


def test_the_declared_dependencies_are_all_that_its_modules_need(installed: Installed) -> None:
    where = installed.run(installed.python, "-c", "import sotbus; print(sotbus.__file__)").strip()
    assert Path(where).is_relative_to(installed.venv)
    installed.run(installed.python, "-W", "error", "-c", IMPORT_ALL)


def test_init_finds_its_template_and_mail_goes_from_one_session_to_another(installed: Installed) -> None:
    installed.sotbus("init")
    config = installed.home / ".config" / "sotbus" / "vm.toml"
    theirs, ours = config.read_text(), (ROOT / "conf" / "single-box.toml").read_text()
    blank = re.compile(r'^#? ?machine_id = "[0-9a-f]{32}"', re.MULTILINE)
    assert blank.sub("machine_id", theirs) == blank.sub("machine_id", ours)
    installed.sotbus("join", session="alpha")
    installed.sotbus("join", session="beta")
    assert installed.sotbus("send", "@beta-vm", "hello from afar", session="alpha") == "  filed -> @beta-vm\n"
    assert "hello from afar" in installed.sotbus("poll", session="beta")
    wrapper = installed.home / ".sot-comm" / "bin" / "comm-list.sh"
    assert "@alpha-vm" in installed.run(wrapper, session="beta")


def test_its_own_plugins_are_found_by_their_entry_points(installed: Installed) -> None:
    rows: list[dict[str, Any]] = json.loads(installed.sotbus("plugins", "--all", "--json"))
    assert {row["module"].split(".")[0] for row in rows} == PLUGINS
    assert {(row["distribution"], row["version"]) for row in rows} == {("sotbus", sotbus.__version__)}
    names = json.dumps([row["name"] for row in rows])
    program = f"from sotbus.plugins import Plugins; print(len(Plugins.load({names}, print).loaded))"
    assert installed.run(installed.python, "-c", program) == f"{len(rows)}\n"


@pytest.mark.parametrize("installed", ["wheel"], indirect=True)
def test_a_type_checker_sees_its_types(installed: Installed) -> None:
    require_module("mypy", "mypy")
    program = installed.base / "typed.py"
    program.write_text(TYPED)
    strict = ("--strict", "--config-file", os.devnull, "--python-executable", str(installed.python))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *strict, "--cache-dir", str(installed.base / "mypy"), str(program)],
        cwd=installed.base,
        env=installed.environ(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    said = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert 'note: Revealed type is "sotbus.comm.lock_manager.FlockManager | None"' in said, done.stdout
    assert 'note: Revealed type is "str"' in [line.replace("builtins.", "") for line in said]
    errors = [line for line in said if line.startswith("error: ")]
    assert errors == [
        'error: Incompatible types in assignment (expression has type "str", variable has type "int")  [assignment]'
    ]
