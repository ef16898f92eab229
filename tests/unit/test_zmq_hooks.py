"""The ``zmq`` plugin as the node loads it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sotbus_zmq import hooks, key_file
from sotbus_zmq.key_file import KeyPair
from sotbus_zmq.settings import Settings
from sotbus_zmq.transport import ZmqTransport
from zmq_ends import Node, reserved

from sotbus.api import BoxFacts, Destination, LinkDelivery
from sotbus.errors import PluginError
from sotbus.plugins import Plugins


@pytest.fixture
def hub() -> Iterator[Node]:
    with reserved() as address:
        yield Node("ann", "hub", listens=address)


def facts(folder: Path, hub: Node) -> BoxFacts:
    return BoxFacts("one", "bob", None, "/comm", peers=(hub.peer(),), config_folder=str(folder))


def loaded(errors: list[PluginError], settings: Settings | None = None) -> Plugins:
    plugins = Plugins(errors.append, {"zmq": settings or Settings()})
    plugins.add("zmq", hooks)
    return plugins


def test_the_plugin_has_settings_and_a_delivery_and_no_lock_manager() -> None:
    plugins = loaded([])
    assert plugins.loaded[0].hooks == ("sotbus_delivery", "sotbus_settings")
    assert plugins.settings_types() == {"zmq": Settings}


def test_its_delivery_reaches_the_boxs_peers_over_a_link(hub: Node, tmp_path: Path) -> None:
    key_file.create(f"{tmp_path}/one.key", KeyPair.new)
    errors: list[PluginError] = []
    [(name, delivery)] = loaded(errors).deliveries(facts(tmp_path, hub))
    assert errors == []
    assert name == "zmq"
    assert delivery.reaches(Destination("ann.hub", "web"))
    assert delivery.reaches(Destination("ann.HUB", "web"))
    assert not delivery.reaches(Destination("ann.other", "web"))
    made = hooks.sotbus_delivery(facts(tmp_path, hub))
    assert isinstance(made, LinkDelivery)
    assert isinstance(made.transport, ZmqTransport)
    assert made.transport.name == "bob.one"


def test_a_key_that_may_not_be_used_is_reported_with_the_plugins_name(hub: Node, tmp_path: Path) -> None:
    key_file.create(f"{tmp_path}/one.key", KeyPair.new)
    (tmp_path / "one.key").chmod(0o644)
    errors: list[PluginError] = []
    assert loaded(errors).deliveries(facts(tmp_path, hub)) == []
    assert "plugin 'zmq'" in str(errors[0])
    assert "others may have read it" in str(errors[0])


def test_the_key_file_of_the_settings_is_taken(hub: Node, tmp_path: Path) -> None:
    key_file.create(f"{tmp_path}/elsewhere/k", KeyPair.new)
    errors: list[PluginError] = []
    settings = Settings(key_file=f"{tmp_path}/elsewhere/k")
    assert len(loaded(errors, settings).deliveries(facts(tmp_path, hub))) == 1
    assert errors == []


def test_the_hooks_load_neither_zeromq_nor_trio() -> None:
    code = "import sys, sotbus_zmq.hooks as h; h.sotbus_settings(); print(sorted({'zmq', 'trio'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
