"""The role of a box towards its comm folder: hub, guest or linked box, by topology, mount and config."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import MACHINE, World

from sotbus import config_schema
from sotbus.api import BoxFacts, FolderDelivery
from sotbus.comm import box as this_box
from sotbus.comm.box import host_problem
from sotbus.comm.topology import GUEST, HUB, NO_TOPOLOGY, Topology
from sotbus.errors import FilingFailed

LOCAL = f"local {MACHINE}"
NFS = "nfs4 filer.example:/export"
NONE_AT = f"none@{MACHINE}"
IDENTITIES = (LOCAL, NFS, NONE_AT, "none", "ceph mon:/", "", None)
ON_A_DISK = (LOCAL, "local x")


# Which role


@pytest.mark.spec("S65")
@pytest.mark.parametrize("identity", IDENTITIES)
@pytest.mark.parametrize("own_folder", [False, True])
def test_without_a_topology_every_box_is_the_hub_whatever_its_mount(identity: str | None, own_folder: bool) -> None:
    alone = Topology(None, own_folder)
    assert alone.role(identity, "vm") == HUB
    assert not alone.configured
    assert not alone.is_linked(identity, "vm")
    assert alone.described(identity, "vm") == ""


@pytest.mark.spec("S65")
@pytest.mark.parametrize("identity", IDENTITIES)
@pytest.mark.parametrize("host", ["vm", "VM", "Vm"])
@pytest.mark.parametrize("named", ["vm", "VM"])
def test_the_box_that_the_topology_names_is_the_hub_whatever_its_mount_and_its_case(
    named: str, host: str, identity: str | None
) -> None:
    topology = Topology(named)
    assert topology.role(identity, host) == HUB
    assert not topology.is_linked(identity, host)
    assert topology.described(identity, host) == "this box is the folder's hub"


@pytest.mark.spec("S65")
@pytest.mark.parametrize("topology", [Topology("far"), Topology(relayed=True), Topology("far", relayed=True)])
@pytest.mark.parametrize("identity", ON_A_DISK)
def test_a_box_whose_folder_is_on_its_own_disk_is_its_hub_and_a_linked_box(topology: Topology, identity: str) -> None:
    assert topology.role(identity, "vm") == HUB
    assert topology.is_linked(identity, "vm")


@pytest.mark.spec("S65")
@pytest.mark.parametrize("topology", [Topology("far"), Topology(relayed=True), Topology("far", relayed=True)])
@pytest.mark.parametrize(
    "identity", [NFS, NONE_AT, "none", "ceph mon:/", "", None, "local", f"Local {MACHINE}", f" local {MACHINE}"]
)
def test_any_other_box_is_a_guest(topology: Topology, identity: str | None) -> None:
    assert topology.role(identity, "vm") == GUEST
    assert not topology.is_linked(identity, "vm")


@pytest.mark.parametrize("identity", IDENTITIES)
def test_a_box_that_says_that_the_folder_is_its_own_is_its_hub_on_any_mount(identity: str | None) -> None:
    topology = Topology("far", own_folder=True)
    assert topology.role(identity, "vm") == HUB
    assert topology.is_linked(identity, "vm")
    assert not topology.is_linked(identity, "far")


@pytest.mark.parametrize(
    ("named", "host"),
    [("vm.example", "vm"), ("vm", "vm.example"), ("vm", "vm2"), ("vm", ""), ("vm ", "vm"), ("vm", "v")],
)
def test_another_name_is_another_box(named: str, host: str) -> None:
    assert not Topology(named).names(host)
    assert Topology(named).role(NFS, host) == GUEST


def test_an_empty_hub_is_no_hub_and_an_empty_host_is_nobodys_hub() -> None:
    assert not Topology("").configured
    assert Topology("", relayed=True).role(NFS, "") == GUEST


# Where it comes from


@pytest.mark.parametrize(
    ("environ", "hub", "configured"),
    [
        ({}, None, False),
        ({"SOT_RELAY_ENDPOINT": ""}, None, False),
        ({"SOT_RELAY_ENDPOINT": "ssh:hub"}, None, True),
        ({}, "far", True),
        ({"SOT_RELAY_ENDPOINT": "ssh:hub"}, "far", True),
    ],
)
@pytest.mark.parametrize("own_folder", [False, True])
def test_a_named_hub_or_an_endpoint_is_a_topology(
    environ: dict[str, str], hub: str | None, configured: bool, own_folder: bool
) -> None:
    topology = Topology.of(environ, hub, own_folder)
    assert (topology.hub, topology.own_folder, topology.configured) == (hub, own_folder, configured)


def test_no_topology_is_one_box_for_itself() -> None:
    assert (NO_TOPOLOGY.hub, NO_TOPOLOGY.own_folder, NO_TOPOLOGY.relayed) == (None, False, False)


# What is said


@pytest.mark.parametrize(
    ("topology", "identity", "said"),
    [
        (Topology("far"), NFS, "this box is a guest of far"),
        (Topology("far", relayed=True), NFS, "this box is a guest of far"),
        (Topology(relayed=True), NFS, "this box is a guest of the hub at $SOT_RELAY_ENDPOINT"),
        (Topology("far"), None, "this box counts as a guest of far, because its mount cannot be told"),
        (Topology("far"), LOCAL, "this box is the hub of its own folder, while far is the topology's"),
        (Topology("far", True), None, "this box is the hub of its own folder, while far is the topology's"),
    ],
)
def test_the_role_is_said_with_the_hubs_name(topology: Topology, identity: str | None, said: str) -> None:
    assert topology.described(identity, "vm") == said


@pytest.mark.parametrize(
    ("topology", "said"),
    [
        (NO_TOPOLOGY, "<Topology none>"),
        (Topology("far"), "<Topology far>"),
        (Topology("far", True), "<Topology far own folder>"),
        (Topology(None, True, True), "<Topology the hub at $SOT_RELAY_ENDPOINT own folder>"),
    ],
)
def test_a_topology_shows_what_it_is(topology: Topology, said: str) -> None:
    assert repr(topology) == said


# The hub's name in the config is a host's name


HOSTS = st.one_of(
    st.text(max_size=5),
    st.text("ab/\\\x00\x1f\x20\x7f\x80é", max_size=4),
    st.integers(107, 113).map(lambda size: "x" * size),
    st.integers(53, 57).map(lambda size: "é" * size),
)


@settings(deadline=None)
@given(host=HOSTS)
def test_the_config_takes_as_hub_what_a_box_may_be_called_and_nothing_else(host: str) -> None:
    _, read = config_schema.KEYS["topology"]["hub"]
    if host_problem(host) is None:
        assert read(host) == host
    else:
        with pytest.raises(ValueError, match="a box's host name in quotes, 1 to 110 bytes without slashes"):
            read(host)


def test_the_longest_host_name_is_one_number() -> None:
    assert config_schema.MAX_HOST_BYTES == this_box.MAX_HOST_BYTES


# Who is handed it


@pytest.mark.parametrize(
    ("more", "made"), [((), True), ((NO_TOPOLOGY,), True), ((Topology("vm"),), False), ((Topology("far"),), False)]
)
def test_a_ready_made_delivery_stands_in_for_the_hub_only_where_no_topology_is_given(
    more: tuple[Topology, ...], made: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_box.Box, "here", lambda *_: world.box())
    world.folder.ensure()
    delivery = FolderDelivery.of(BoxFacts("vm", "u", MACHINE, world.folder.root), "local ", *more)
    assert delivery is not None
    if made:
        assert delivery._manager().identity == LOCAL
    else:
        with pytest.raises(FilingFailed):
            delivery._manager()
    assert os.path.exists(world.folder.manager_record) is made


# What it costs


def test_the_module_imports_nothing_at_run_time() -> None:
    code = (
        "import sys; import sotbus.comm; before = set(sys.modules); import sotbus.comm.topology; "
        "print(sorted(set(sys.modules) - before - {'__future__'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['sotbus.comm.topology']\n"
