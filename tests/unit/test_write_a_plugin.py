"""The walk of docs/write-a-plugin.md, from an empty folder to a passing contract suite."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from installed import install, run

from sotbus import testing

PAGE = (Path(__file__).parents[2] / "docs" / "write-a-plugin.md").read_text()
FILE = re.compile(r"^### `([^`]+)`\n(?:(?!^#).)*?^```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)

LOADED = """
import json
from sotbus.api import BoxFacts
from sotbus.plugins import Plugins

reports = []
plugins = Plugins.load(["filesystem", "flag"], reports.append)
wakers = plugins.wakers(BoxFacts("vm", "user", None, "/comm"))
print(json.dumps([plugins.loaded[1].described, plugins.loaded[1].hooks, [name for name, _ in wakers], len(reports)]))
"""


def written(folder: Path) -> list[str]:
    """The page's files, in a folder."""
    files = FILE.findall(PAGE)
    for name, text in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return [name for name, _ in files]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The author's folder."""
    folder = tmp_path_factory.mktemp("author") / "sotbus-flag"
    folder.mkdir()
    written(folder)
    return folder


@pytest.fixture(scope="module")
def target(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the author's distribution is installed."""
    folder = tmp_path_factory.mktemp("installed")
    install(source, folder)
    return folder


def test_the_page_has_as_many_files_as_it_says(tmp_path: Path) -> None:
    assert written(tmp_path) == [
        "pyproject.toml",
        "sotbus_flag/__init__.py",
        "tests/test_contract.py",
        "tests/test_flag.py",
    ]
    assert "Four files:" in PAGE
    assert PAGE.count("```") == 2 * 4


def test_the_plugin_is_loaded_by_the_name_that_the_page_gives_it(target: Path, tmp_path: Path) -> None:
    assert 'plugins = ["filesystem", "flag"]' in PAGE
    done = run(target, "-c", LOADED, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["plugin 'flag' (sotbus-flag 0.1)", ["sotbus_wake"], ["flag"], 0]


def test_the_contract_suite_and_its_own_tests_pass(target: Path, source: Path) -> None:
    done = run(target, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", cwd=source)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b11 passed in", done.stdout), done.stdout


def test_a_plugin_that_breaks_its_contract_fails_the_suite(source: Path, tmp_path: Path) -> None:
    sound = (source / "sotbus_flag" / "__init__.py").read_text()
    text = 'return {"mail_flag": path} if os.path.isabs(path) else {}'
    assert text in sound
    (tmp_path / "sotbus_flag").mkdir()
    (tmp_path / "sotbus_flag" / "__init__.py").write_text(sound.replace(text, 'return {"mail_flag": path}'))
    done = run(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_contract.py", cwd=source)
    assert done.returncode == 1, done.stdout
    assert "test_it_keeps_nothing_of_a_session_that_it_cannot_tell" in done.stdout


def test_the_page_names_every_suite_and_fake() -> None:
    assert [name for name in testing.__all__ if name not in re.findall(r"\w+", PAGE)] == ["Hold"]
