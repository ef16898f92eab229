"""The plugins' page says what the code has, and its examples run and keep their contracts."""

from __future__ import annotations

import inspect
import json
import os
import re
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli

from sotbus import api, contracts, hookspecs
from sotbus.api import BoxFacts, Delivery, Destination, Harness, LockManager, Mount, Screen, Waker
from sotbus.errors import ConfigError, PluginError
from sotbus.plugins import Plugins
from sotbus.testing import (
    DeliveryContract,
    HarnessContract,
    HarnessExamples,
    LockManagerContract,
    Mailbox,
    WakerContract,
)
from sotbus.typed_table import typed_table

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
PROTOCOLS = ("LockManager", "Delivery", "Inbound", "Transport", "Waker", "Harness")


def hooks() -> dict[str, list[str]]:
    """Every hook and its arguments."""
    found = {name: one for name, one in vars(hookspecs).items() if hasattr(one, f"{hookspecs.PROJECT}_spec")}
    return {name: list(inspect.signature(one).parameters) for name, one in found.items()}


def members(protocol: str) -> list[str]:
    """A Protocol's members as its section lists them."""
    found = []
    for name, one in vars(getattr(contracts, protocol)).items():
        if name.startswith("_"):
            continue
        if isinstance(one, property):
            found.append(name)
        else:
            found.append(f"{name}({', '.join(list(inspect.signature(one).parameters)[1:])})")
    return found


def sections(page: str) -> dict[str, str]:
    """The text under each third-level heading, by heading."""
    parts = re.split(r"^(###? .*)$", page, flags=re.MULTILINE)
    return {
        heading.removeprefix("### "): text
        for heading, text in zip(parts[1::2], parts[2::2], strict=True)
        if heading.startswith("### ")
    }


def listed(section: str) -> list[str]:
    """What the section has a line for."""
    return re.findall(r"^- `([^`]+)`:", section, flags=re.MULTILINE)


def code(section: str, language: str = "python") -> str:
    """The section's example."""
    [found] = re.findall(rf"^```{language}\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    return str(found)


def problems(page: str) -> list[str]:
    """Where the page's hooks are not those that there are."""
    found = []
    documented = {heading: text for heading, text in sections(page).items() if heading.startswith("sotbus_")}
    signatures = {f"{name}({', '.join(arguments)})": arguments for name, arguments in hooks().items()}
    found += [f"not documented: {heading}" for heading in signatures.keys() - documented.keys()]
    found += [f"no such hook: {heading}" for heading in documented.keys() - signatures.keys()]
    for heading in signatures.keys() & documented.keys():
        if listed(documented[heading]) != signatures[heading]:
            found.append(f"arguments of {heading}: {listed(documented[heading])}")
        if "```python" not in documented[heading]:
            found.append(f"no example: {heading}")
    return found


def test_every_hook_is_documented_by_its_signature_with_its_arguments_and_an_example() -> None:
    assert problems(PAGE) == []


@pytest.mark.parametrize(
    ("text", "instead", "problem"),
    [
        ("### sotbus_harness()", "#### sotbus_harness()", "not documented: sotbus_harness()"),
        ("### sotbus_wake(box)", "### sotbus_wake(facts)", "no such hook: sotbus_wake(facts)"),
        ("- `machine_id`:", "The machine:", "arguments of sotbus_lock_manager(mount, machine_id): ['mount']"),
        ("- `mount`:", "- `where`:", "arguments of sotbus_lock_manager(mount, machine_id): ['where', 'machine_id']"),
    ],
)
def test_a_page_that_says_otherwise_is_found_out(text: str, instead: str, problem: str) -> None:
    assert PAGE.count(text) == 1
    assert problem in problems(PAGE.replace(text, instead))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_is_documented_with_its_members(protocol: str) -> None:
    assert listed(sections(PAGE)[protocol]) == members(protocol)


def test_every_name_of_the_api_is_on_the_page() -> None:
    words = set(re.findall(r"\w+", PAGE))
    assert [name for name in api.__all__ if name not in words] == []


def example(hook: str) -> types.ModuleType:
    """The example of a hook, as the module that an author would have."""
    [section] = [text for heading, text in sections(PAGE).items() if heading.startswith(f"{hook}(")]
    module = types.ModuleType(f"example_of_{hook}")
    exec(compile(code(section), f"docs/plugins.md, {hook}", "exec", dont_inherit=True), module.__dict__)
    return module


def asked(hook: str, folder: Path) -> tuple[Plugins, BoxFacts]:
    """The example loaded as a plugin, and a box to ask it for."""

    def report(error: PluginError) -> None:
        raise error

    plugins = Plugins(report)
    plugins.add("example", example(hook))
    assert plugins.loaded[0].hooks == (hook,)
    return plugins, BoxFacts("vm", "user", "0123456789abcdef0123456789abcdef", str(folder))


def test_the_example_of_settings_reads_its_own_table(tmp_path: Path) -> None:
    kind = asked("sotbus_settings", tmp_path)[0].settings_types()["example"]
    table: Any = tomli.loads(code(sections(PAGE)["sotbus_settings()"], "toml"))
    settings: Any = typed_table("box.toml", "example", table["plugin"]["example"], {}, kind)
    assert (settings.folder, settings.every_s) == ("/srv/drop", 1.0)
    with pytest.raises(ConfigError, match="expected more than 0"):
        typed_table("box.toml", "example", {"folder": "/", "every_s": 0}, {}, kind)


def test_the_example_of_a_lock_manager_is_asked_for_its_kind_of_mount_alone(tmp_path: Path) -> None:
    plugins, box = asked("sotbus_lock_manager", tmp_path)
    ceph, fuse = (Mount("/", kind, "mon:/", ("rw",), ("rw",)) for kind in ("ceph", "fuse.sshfs"))
    manager = plugins.lock_manager(ceph, box.machine_id)
    assert manager is not None
    assert manager.identity == "ceph mon:/"
    assert plugins.lock_manager(fuse, box.machine_id) is None
    assert plugins.lock_manager(None, box.machine_id) is None


class TestTheExampleOfALockManager(LockManagerContract):
    @pytest.fixture
    def manager(self) -> LockManager:
        made: LockManager = example("sotbus_lock_manager").sotbus_lock_manager(Mount("/", "ceph", "mon:/", (), ()))
        return made


class TestTheExampleOfADelivery(DeliveryContract):
    @pytest.fixture
    def delivery(self, tmp_path: Path) -> Delivery:
        plugins, box = asked("sotbus_delivery", tmp_path)
        [(name, delivery)] = plugins.deliveries(box)
        assert name == "example"
        return delivery

    @pytest.fixture
    def mailbox(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mailbox:
        folder = tmp_path / "drop" / "reader"
        filed: list[str] = []
        rename = os.rename

        def noted(source: str, target: str) -> None:
            rename(source, target)
            filed.append(target)

        monkeypatch.setattr(os, "rename", noted)

        def read_back() -> list[dict[str, str]]:
            """Every file that is not under way, oldest first: two may have one time, for a disk's clock is coarse."""
            files = [path for path in folder.glob("*") if path.suffix != ".part"]
            return [json.loads(path.read_text()) for path in sorted(files, key=lambda path: filed.index(str(path)))]

        @contextmanager
        def blocked() -> Iterator[None]:
            """The folder of all mailboxes is a file."""
            (tmp_path / "drop").write_text("")
            yield
            (tmp_path / "drop").unlink()

        return Mailbox(Destination("drop", "reader"), read_back, blocked)


class TestTheExampleOfAWaker(WakerContract):
    @pytest.fixture
    def waker(self, tmp_path: Path) -> Waker:
        plugins, box = asked("sotbus_wake", tmp_path)
        [(_, waker)] = plugins.wakers(box)
        return waker

    @pytest.fixture
    def environ(self) -> Iterator[dict[str, str]]:
        terminal, tty = os.openpty()
        yield {"SSH_TTY": os.ttyname(tty)}
        os.close(terminal)
        os.close(tty)


class TestTheExampleOfAHarness(HarnessContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        [(_, harness)] = asked("sotbus_harness", tmp_path)[0].harnesses()
        return harness

    @pytest.fixture
    def examples(self) -> HarnessExamples:
        return HarnessExamples(
            commands=[["tide"], ["/opt/bin/tide", "--low"]],
            other_commands=[["tides"], ["vim", "tide"]],
            free=[Screen(["", "tide> "], 1, 6, 80)],
            not_free=[Screen(["tide> half a line"], 0, 17, 80), Screen(["thinking"], 0, 0, 80)],
        )
