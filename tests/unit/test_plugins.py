"""Plugins that cannot load, plugins that raise in a hook, and what ``sotbus plugins`` says of them.

Scenario 17: a plugin of the config that raises at import, has an unknown hook, a wrong argument or a taken name is an
error that names plugin, distribution and cause; a broken one that nobody named has no effect. The plugins here are
distributions as an installer leaves them (a module and a ``.dist-info``), seen by a process of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from world import EXT4, MACHINE, World

from sotbus.api import BoxFacts, FlockManager, hookimpl
from sotbus.comm.mounts import Mount, mount_of
from sotbus.errors import PluginError
from sotbus.plugins import Plugins

LOADER = """
import json, sys
from sotbus.errors import SotbusError
from sotbus.plugins import Plugins

answers = []
for names in json.load(sys.stdin):
    try:
        answers.append([one.name for one in Plugins.load(names, print).loaded])
    except SotbusError as error:
        answers.append({"kind": type(error).__name__, "text": str(error), "hint": error.hint})
print(json.dumps(answers))
"""
"""Loads lists of plugins as a start does; prints for each the names, or the error that stopped it."""

SOUND = """
from sotbus.api import hookimpl

@hookimpl
def sotbus_wake(box):
    return None

@hookimpl
def sotbus_harness():
    return None
"""

MISSPELT = "from sotbus.api import hookimpl\n@hookimpl\ndef sotbus_delivary(box):\n    return None\n"
MISTAKEN = "from sotbus.api import hookimpl\n@hookimpl\ndef sotbus_delivery(box, colour):\n    return None\n"

BROKEN = {
    "raises": ("raise RuntimeError('the spool is not there')", "", "RuntimeError: the spool is not there"),
    "needs": ("import no_such_module", "", "ModuleNotFoundError: No module named 'no_such_module'"),
    "unparsed": ("def (", "", "SyntaxError: "),
    "objectless": ("", ":plugin", "AttributeError: "),
    "moduleless": ("", ".hooks", "ModuleNotFoundError: "),
    "misspelt": (MISSPELT, "", "unknown hook 'sotbus_delivary'"),
    "mistaken": (MISTAKEN, "", "colour"),
    "exits": ("raise SystemExit('usage: exits FILE')", "", "SystemExit: usage: exits FILE"),
}
"""Plugin: its module's text, what its entry point has behind the module's name, and the cause that is told."""


class Site:
    """A folder on ``sys.path`` with distributions in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def add(
        self, distribution: str, points: Mapping[str, str], modules: Mapping[str, str], version: str = "1.0"
    ) -> None:
        """Lay a distribution out. :param points: entry points of the group ``sotbus``, name to value."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        listed = "".join(f"{name} = {value}\n" for name, value in points.items())
        (info / "entry_points.txt").write_text(f"[console_scripts]\nother = other:main\n\n[sotbus]\n{listed}")
        for name, text in modules.items():
            (self.folder / f"{name}.py").write_text(text)

    def load(self, world: World, *lists: list[str]) -> list[Any]:
        """What comes of loading each list of names, all in one process."""
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", LOADER],
            input=json.dumps(lists),
            env=world.environ({"PYTHONPATH": str(self.folder)}),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        answers: list[Any] = json.loads(done.stdout)
        return answers

    def plugins(self, world: World, names: Iterable[str], *words: str) -> subprocess.CompletedProcess[str]:
        """``sotbus plugins`` under a config that names some."""
        config = world.base / "config.toml"
        config.write_text(f"plugins = {json.dumps(list(names))}\n")
        env = {"PYTHONPATH": str(self.folder), "SOTBUS_CONFIG": str(config)}
        return world.run("plugins", *words, cwd=world.base, env=env)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A site with one sound plugin, ``spool``."""
    made = Site(tmp_path / "site")
    made.add("spool-transport", {"spool": "spool_hooks"}, {"spool_hooks": SOUND})
    return made


@pytest.fixture
def broken(site: Site) -> Site:
    """A site that has each of the broken plugins too, from a distribution of its own."""
    for name, (text, rest, _) in BROKEN.items():
        site.add(f"{name}-dist", {name: f"{name}_hooks{rest}"}, {f"{name}_hooks": text})
    return site


# ---- scenario 17


def test_a_start_is_stopped_by_an_error_that_names_plugin_distribution_and_cause(world: World, broken: Site) -> None:
    lists = [["spool", name, "filesystem"] for name in BROKEN]
    for name, answer in zip(BROKEN, broken.load(world, *lists), strict=True):
        assert answer["kind"] == "PluginError", name
        assert answer["text"].startswith(f"plugin {name!r} ({name}-dist 1.0)"), answer
        assert BROKEN[name][2] in answer["text"], answer


def test_the_command_names_every_broken_plugin_and_shows_the_others(world: World, broken: Site) -> None:
    done = broken.plugins(world, ["spool", *BROKEN, "filesystem"])
    assert done.returncode == 1
    told = done.stderr.splitlines()
    for name, (_, _, cause) in BROKEN.items():
        (line,) = [line for line in told if line.startswith(f"plugin {name!r} ({name}-dist 1.0)")]
        assert cause in line
    assert "Traceback" not in done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == ["spool", *BROKEN, "filesystem"]
    assert rows[0] == ["spool", "spool-transport", "1.0", "spool_hooks", "sotbus_harness,", "sotbus_wake"]
    assert all(" ".join(row[-3:]) == "cannot be loaded" for row in rows[1:-1])
    assert rows[-1][-1] == "sotbus_lock_manager"


def test_broken_plugins_that_nobody_named_have_no_effect(world: World, broken: Site) -> None:
    assert broken.load(world, ["filesystem", "spool"]) == [["filesystem", "spool"]]
    done = broken.plugins(world, ["filesystem", "spool"])
    assert (done.returncode, done.stderr) == (0, "")
    assert not any(name in done.stdout for name in BROKEN)


@pytest.mark.parametrize("junk", [b"[sotbus]\nno equals sign\n", b"[sotbus]\nx = \xff\n"], ids=["line", "bytes"])
def test_a_distribution_whose_entry_points_cannot_be_read_has_no_effect(world: World, site: Site, junk: bytes) -> None:
    site.add("junk", {}, {})
    (site.folder / "junk-1.0.dist-info" / "entry_points.txt").write_bytes(junk)
    assert site.load(world, ["spool"]) == [["spool"]]
    done = site.plugins(world, ["spool"], "--all")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_distribution_without_metadata_offers_nothing_and_has_no_effect(world: World, site: Site) -> None:
    site.add("torn", {"torn": "torn_hooks", "spool": "torn_hooks"}, {"torn_hooks": SOUND})
    (site.folder / "torn-1.0.dist-info" / "METADATA").unlink()
    sound, torn = site.load(world, ["spool"], ["torn"])
    assert sound == ["spool"]
    assert torn["text"].startswith("plugin 'torn' is not installed; ")


def test_a_name_that_two_distributions_offer_is_refused_naming_both(world: World, site: Site) -> None:
    site.add("rival", {"spool": "rival_hooks", "filesystem": "rival_hooks"}, {"rival_hooks": SOUND})
    both, in_tree, other = site.load(world, ["spool"], ["filesystem"], ["nfs"])
    assert both["text"] == "plugin 'spool' is offered by rival 1.0 and spool-transport 1.0"
    assert re.fullmatch(r"plugin 'filesystem' is offered by rival 1.0 and sotbus \S+", in_tree["text"])
    assert both["hint"]
    assert other == ["nfs"]
    done = site.plugins(world, ["nfs", "spool"])
    assert done.returncode == 1
    assert "plugin 'spool' is offered by rival 1.0 and spool-transport 1.0\nhint: " in done.stderr


def test_of_two_copies_of_a_distribution_the_first_on_the_path_is_taken(world: World, site: Site) -> None:
    older = Site(site.folder.with_name("older"))
    older.add("Spool_Transport", {"spool": "spool_hooks"}, {"spool_hooks": "raise AssertionError"}, "0.9")
    path = f"{site.folder}:{older.folder}"
    config = world.base / "config.toml"
    config.write_text('plugins = ["spool"]\n')
    env = {"PYTHONPATH": path, "SOTBUS_CONFIG": str(config)}
    done = world.run("plugins", "--all", "--json", cwd=world.base, env=env)
    assert done.returncode == 0, done.stderr
    assert [row["version"] for row in json.loads(done.stdout) if row["name"] == "spool"] == ["1.0"]


def test_a_name_that_stands_twice_is_refused(world: World, site: Site) -> None:
    (answer,) = site.load(world, ["spool", "filesystem", "spool"])
    assert answer["text"] == "plugin 'spool' (spool-transport 1.0): the name is taken by another loaded plugin"
    done = site.plugins(world, ["spool", "spool"])
    assert done.returncode == 1
    assert "config.toml:1: plugins is " in done.stderr
    assert "'spool' stands there twice" in done.stderr


def test_one_module_under_two_names_is_refused(world: World, site: Site) -> None:
    site.add("again", {"again": "spool_hooks"}, {})
    (answer,) = site.load(world, ["spool", "again"])
    assert answer["text"].startswith("plugin 'again' (again 1.0) does not fit: ")
    done = site.plugins(world, ["spool", "again"])
    assert done.returncode == 1
    assert "plugin 'again' (again 1.0) does not fit: " in done.stderr


def test_a_plugin_that_is_not_installed_is_named_with_those_that_are(world: World, site: Site) -> None:
    done = site.plugins(world, ["filesystem", "spol"])
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "plugin 'spol' is not installed; there are: filesystem, nfs, spool, zmq",
        "hint: install its distribution, or take it out of the config's plugins",
    ]


def test_a_command_that_needs_the_folder_is_stopped_by_it_too(world: World, broken: Site) -> None:
    (world.base / "config.toml").write_text('plugins = ["filesystem", "raises"]\n')
    env = {"PYTHONPATH": str(broken.folder), "SOTBUS_CONFIG": str(world.base / "config.toml")}
    done = world.run("join", cwd=world.project("a"), session="a", env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("plugin 'raises' (raises-dist 1.0) cannot be imported from raises_hooks: ")
    assert not world.home.exists()


# ---- sotbus plugins


def test_the_command_lists_what_the_config_loads_in_its_order(world: World, site: Site) -> None:
    done = site.plugins(world, ["spool", "filesystem"], "--json")
    assert (done.returncode, done.stderr) == (0, "")
    spool, filesystem = json.loads(done.stdout)
    assert spool == {
        "name": "spool",
        "loaded": True,
        "distribution": "spool-transport",
        "version": "1.0",
        "module": "spool_hooks",
        "hooks": ["sotbus_harness", "sotbus_wake"],
        "error": None,
    }
    assert (filesystem["distribution"], filesystem["module"]) == ("sotbus", "sotbus_filesystem.hooks")


def test_all_adds_what_is_installed_and_not_named_without_importing_it(world: World, broken: Site) -> None:
    done = broken.plugins(world, ["filesystem"], "--all")
    assert (done.returncode, done.stderr) == (0, "")
    first, *others = [line.split() for line in done.stdout.splitlines()[1:]]
    assert first[0] == "filesystem"
    assert sorted(row[0] for row in others) == sorted(["nfs", "spool", "zmq", *BROKEN])
    assert all(row[-2:] == ["not", "loaded"] for row in others)
    rows = json.loads(broken.plugins(world, ["filesystem"], "--all", "--json").stdout)
    assert [row["hooks"] for row in rows if not row["loaded"]] == [None] * len(others)


def test_a_broken_plugin_is_in_the_json_with_its_error(world: World, broken: Site) -> None:
    done = broken.plugins(world, ["raises", "spool"], "--json")
    assert done.returncode == 1
    raises, spool = json.loads(done.stdout)
    assert (raises["loaded"], raises["distribution"], raises["module"]) == (False, "raises-dist", "raises_hooks")
    assert "the spool is not there" in raises["error"]
    assert spool["loaded"]


def test_a_config_without_plugins_lists_none(world: World, site: Site) -> None:
    done = site.plugins(world, [])
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["  (none)"])


# ---- a hook that raises

BOX = BoxFacts("vm", "u", MACHINE, "/comm")
DISK = mount_of("/x", EXT4)


@dataclass(frozen=True)
class Table:
    """A plugin's settings."""

    depth: int = 1


class Waker:
    def facts(self, environ: Mapping[str, str]) -> dict[str, str]:
        return {}


class Sound:
    """A plugin whose every hook answers. ``asked`` has the boxes that its hooks were given."""

    def __init__(self) -> None:
        self.asked: list[BoxFacts] = []

    @hookimpl
    def sotbus_settings(self) -> type:
        return Table

    @hookimpl
    def sotbus_lock_manager(self, mount: Mount | None, machine_id: str | None) -> FlockManager:
        return FlockManager(f"local {machine_id}")

    @hookimpl
    def sotbus_delivery(self, box: BoxFacts) -> object:
        self.asked.append(box)
        return object()

    @hookimpl
    def sotbus_wake(self, box: BoxFacts) -> object:
        self.asked.append(box)
        return Waker()

    @hookimpl
    def sotbus_harness(self) -> object:
        return object()


class Raising:
    """A plugin whose every hook raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @hookimpl
    def sotbus_settings(self) -> type:
        raise self.error

    @hookimpl
    def sotbus_lock_manager(self, mount: Mount | None, machine_id: str | None) -> None:
        raise self.error

    @hookimpl
    def sotbus_delivery(self, box: BoxFacts) -> None:
        raise self.error

    @hookimpl
    def sotbus_wake(self, box: BoxFacts) -> None:
        raise self.error

    @hookimpl
    def sotbus_harness(self) -> None:
        raise self.error


class Silent:
    """A plugin whose hook has nothing to answer."""

    @hookimpl
    def sotbus_wake(self, box: BoxFacts) -> None:
        return None


def three(middle: object) -> tuple[Plugins, list[PluginError]]:
    """A sound plugin, another one, a sound one; and what is reported."""
    told: list[PluginError] = []
    plugins = Plugins(told.append)
    plugins.add("first", Sound(), "first-dist 1.0")
    plugins.add("middle", middle, "middle-dist 2.0")
    plugins.add("last", Sound(), "last-dist 1.0")
    return plugins, told


FAN_OUT = {
    "sotbus_settings": lambda plugins: list(plugins.settings_types()),
    "sotbus_delivery": lambda plugins: [name for name, _ in plugins.deliveries(BOX)],
    "sotbus_wake": lambda plugins: [name for name, _ in plugins.wakers(BOX)],
    "sotbus_harness": lambda plugins: [name for name, _ in plugins.harnesses()],
}


@pytest.mark.parametrize("hook", FAN_OUT)
def test_a_hook_that_raises_is_told_and_the_others_answers_are_there_in_order(hook: str) -> None:
    plugins, told = three(Raising(RuntimeError("boom")))
    assert FAN_OUT[hook](plugins) == ["first", "last"]
    assert [str(error) for error in told] == [
        f"plugin 'middle' (middle-dist 2.0): {hook} raised RuntimeError: boom",
    ]


def test_a_lock_manager_hook_that_raises_is_told_and_the_next_plugin_is_asked() -> None:
    told: list[PluginError] = []
    plugins = Plugins(told.append)
    plugins.add("broken", Raising(RuntimeError("boom")), "broken-dist 2.0")
    plugins.add("sound", Sound(), "sound-dist 1.0")
    manager = plugins.lock_manager(DISK, MACHINE)
    assert manager is not None
    assert manager.identity == f"local {MACHINE}"
    assert [str(error) for error in told] == [
        "plugin 'broken' (broken-dist 2.0): sotbus_lock_manager raised RuntimeError: boom"
    ]


@pytest.mark.parametrize("hook", FAN_OUT)
def test_an_interrupt_in_a_hook_is_the_callers(hook: str) -> None:
    plugins, told = three(Raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        FAN_OUT[hook](plugins)
    assert told == []


def test_a_hook_that_answers_nothing_is_left_out_silently() -> None:
    plugins, told = three(Silent())
    assert [name for name, _ in plugins.wakers(BOX)] == ["first", "last"]
    assert told == []


def test_settings_of_another_kind_than_a_dataclass_are_told_and_left_out() -> None:
    class Odd:
        @hookimpl
        def sotbus_settings(self) -> object:
            return {"depth": int}

    plugins, told = three(Odd())
    assert plugins.settings_types() == {"first": Table, "last": Table}
    (error,) = told
    assert str(error).startswith("plugin 'middle' (middle-dist 2.0): sotbus_settings answered {")


def test_each_plugin_is_given_its_own_settings_and_nobody_elses() -> None:
    told: list[PluginError] = []
    plugins = Plugins(told.append, {"one": Table(1), "two": Table(2)})
    sounds = {name: Sound() for name in ("one", "two", "three")}
    for name, sound in sounds.items():
        plugins.add(name, sound)
    plugins.deliveries(BOX)
    plugins.wakers(BOX)
    for name, settings in (("one", Table(1)), ("two", Table(2)), ("three", None)):
        assert [box.settings for box in sounds[name].asked] == [settings] * 2
        assert {box.comm_home for box in sounds[name].asked} == {"/comm"}


@pytest.mark.parametrize("text", [MISSPELT, MISTAKEN], ids=["hook", "argument"])
def test_a_plugin_that_did_not_fit_leaves_nothing_behind(text: str) -> None:
    plugins, told = three(Silent())
    module = type(sys)("misfit")
    exec(text, module.__dict__)
    with pytest.raises(PluginError, match=r"plugin 'misfit' \(misfit-dist 1\.0\) does not fit: "):
        plugins.add("misfit", module, "misfit-dist 1.0")
    assert [one.name for one in plugins.loaded] == ["first", "middle", "last"]
    assert len(plugins.deliveries(BOX)) == 2
    plugins.add("misfit", Sound(), "misfit-dist 1.1")
    assert [name for name, _ in plugins.wakers(BOX)] == ["first", "last", "misfit"]
    assert told == []
