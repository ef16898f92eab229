"""The doctor says whether this box's node does what the box needs of it, and is silent where it needs none."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from node_world import NodeProcess, NodeWorld, nodes, until
from world import MACHINE, World
from zmq_ends import reserved

from sotbus.comm.topology import NO_TOPOLOGY, Topology
from sotbus.doctor import checkup, node_view
from sotbus.doctor.check import FAULT, OK, SKIPPED, Check
from sotbus.doctor.node_view import NodeView
from sotbus.doctor.place import Place
from sotbus.errors import ConfigError

__all__ = ["nodes"]

OTHER_MACHINE = "f" * 32
NFS3 = "nfs filer.example:/export rw,vers=3,local_lock=none"
HUBS = f"local {OTHER_MACHINE}\n{OTHER_MACHINE}\n"
"""The record of a hub that has the folder on its own disk."""

LINKED = Topology("hub")
NOT_ANSWERED = NodeView(absent="no daemon is at unix:/x (No such file or directory)")


def told(**more: Any) -> NodeView:
    """A node that told its state."""
    return NodeView(status={"pid": 77, "deliveries": {"zmq": {}}, "links": [], **more})


def link(role: str = "hub", *, up: bool = True, why: str = "") -> dict[str, Any]:
    return {"node": f"root.{role}", "role": role, "up": up, "why": why}


@pytest.fixture
def own(world: World) -> World:
    """A comm folder on this box's own disk, whose record names its lock manager."""
    assert world.sotbus("a", "join").returncode == 0
    assert world.sotbus("a", "send", "@a-vm", "x").returncode == 0
    return world


@pytest.fixture
def mounted(own: World) -> World:
    """The same folder, mounted as NFS v3: the box may not file mail in it, and its record is another box's."""
    own.mountinfo.write_text(f"{own.mountinfo.read_text()}22 21 0:50 / {own.home} rw,relatime - {NFS3}\n")
    Path(own.folder.manager_record).write_text(HUBS)
    return own


def place_of(world: World, topology: Topology, view: NodeView | None = None, **more: Any) -> Place:
    """The folder as this box sees it, and its node; where none is given, it is asked, and none is there."""
    places = {"XDG_RUNTIME_DIR": str(world.base), "XDG_CONFIG_HOME": str(world.base / "config")}
    environ = world.environ(places | more.pop("env", {}))
    place = Place(world.folder, world.box(), plugins=lambda: "none", topology=topology, environ=environ, **more)
    if view is not None:
        place.__dict__["node"] = view
    return place


def checked(place: Place, name: str = "node") -> Check:
    judge = dict(checkup.CHECKS)[name]
    return checkup.examine(name, judge, place)


def write_peers(world: World, role: str) -> None:
    folder = world.base / "config" / "sotbus"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vm.peers.toml").write_text(f'[peers."root.{role}"]\nrole = "{role}"\npublic_key = "{"0" * 40}"\n')


def write_config(world: World, text: str) -> str:
    path = world.base / "c.toml"
    path.write_text(text)
    return str(path)


# ---- without a topology


def test_without_a_topology_no_node_is_needed(own: World) -> None:
    check = checked(place_of(own, NO_TOPOLOGY))
    assert (check.status, check.text) == (OK, "no node runs here; none is needed")


def test_without_a_topology_a_node_is_shown_as_it_is(own: World) -> None:
    peers = [link("linked"), link("peer", up=False)]
    for view, text in (
        (told(), "runs, no links"),
        (told(links=peers), "runs, 1 of 2 links up"),
        (told(comm_folder=str(own.home)), "runs, no links"),
        (told(comm_folder="/other"), "runs for another comm folder, /other, no links"),
        (NodeView(strange="unknown op"), "a daemon answers here, and tells no state: unknown op"),
    ):
        check = checked(place_of(own, NO_TOPOLOGY, view))
        assert (check.status, check.text) == (OK, text)


@pytest.mark.parametrize("topology", [NO_TOPOLOGY, LINKED, Topology("vm")], ids=repr)
def test_a_node_that_is_there_and_says_nothing_is_a_fault_everywhere(own: World, topology: Topology) -> None:
    check = checked(place_of(own, topology, NodeView(silent="the daemon did not answer at unix:/x")))
    assert (check.status, check.text) == (FAULT, "the daemon did not answer at unix:/x")
    assert check.remedy.endswith("sotbus serve")


# ---- a box with a folder of its own


def test_a_linked_box_without_a_node_is_told_to_start_one(own: World) -> None:
    check = checked(place_of(own, LINKED))
    assert check.status == FAULT
    assert check.text.startswith("no node answers here, and mail for hub goes by it: no daemon is at unix:")
    assert check.remedy == "run: sotbus serve"


def test_a_linked_boxs_node_needs_a_peer_that_is_its_hub(own: World) -> None:
    check = checked(place_of(own, LINKED, told(links=[link("peer"), link("linked")])))
    assert check.status == FAULT
    assert check.text == "runs (pid 77), and none of its peers is its hub, so no mail gets to hub"
    assert check.remedy.startswith("run: sotbus keys trust USER.hub 'KEY' --role hub --address tcp://hub:PORT")
    assert check.remedy.endswith("then: kill -HUP 77")


def test_a_hub_that_is_trusted_since_the_node_read_its_peers_needs_only_a_reload(own: World) -> None:
    write_peers(own, "hub")
    check = checked(place_of(own, LINKED, told()))
    assert (check.status, check.remedy) == (FAULT, "run: kill -HUP 77")


def test_a_link_to_the_hub_that_is_up_is_named(own: World) -> None:
    check = checked(place_of(own, LINKED, told(links=[link("peer", up=False), link()])))
    assert (check.status, check.text) == (OK, "runs, link to root.hub up")


def test_a_link_to_the_hub_that_is_down_is_a_fault_with_its_why(own: World) -> None:
    down = told(links=[link("peer"), link(up=False, why="nobody answers at tcp://hub:7710")])
    check = checked(place_of(own, LINKED, down))
    assert check.status == FAULT
    assert check.text == "runs (pid 77), link to root.hub down: nobody answers at tcp://hub:7710"
    assert "there: sotbus node" in check.remedy
    check = checked(place_of(own, LINKED, told(links=[link(up=False)])))
    assert check.text == "runs (pid 77), link to root.hub down: it does not say why"


def test_a_node_without_a_plugin_for_links_is_told_which(own: World) -> None:
    check = checked(place_of(own, LINKED, told(links=[link(up=False)], deliveries={})))
    assert check.text.endswith("link to root.hub down: no plugin that the config names holds links")
    assert check.remedy.startswith('add "zmq" to plugins in the config')


@pytest.mark.parametrize("topology", [LINKED, Topology("vm")], ids=repr)
def test_in_a_topology_a_node_of_another_folder_is_a_fault(own: World, topology: Topology) -> None:
    check = checked(place_of(own, topology, told(links=[link()], comm_folder="/other")))
    assert (check.status, check.text) == (FAULT, "runs (pid 77), but for another comm folder, /other")
    assert f"SOT_COMM_HOME={own.home} sotbus serve" in check.remedy


def test_a_folder_of_two_names_is_one(own: World) -> None:
    (own.base / "alias").symlink_to(own.home)
    check = checked(place_of(own, LINKED, told(links=[link()], comm_folder=str(own.base / "alias"))))
    assert check.status == OK


def test_another_programs_daemon_is_not_judged(own: World) -> None:
    check = checked(place_of(own, LINKED, NodeView(strange="unknown op: sotbus.status")))
    assert (check.status, check.text) == (
        SKIPPED,
        "a daemon answers here, and tells no state: unknown op: sotbus.status",
    )


def test_a_state_of_another_shape_is_no_failure_of_the_check(own: World) -> None:
    for status in ({}, {"links": 5, "pid": "x", "deliveries": []}, {"links": [5, {}], "comm_folder": 5}):
        check = checked(place_of(own, LINKED, NodeView(status=status)))
        assert (check.status, check.text.split(",")[0]) == (FAULT, "runs (pid ?)")


# ---- the hub


def test_a_hub_that_is_linked_to_nobody_needs_no_node(own: World) -> None:
    check = checked(place_of(own, Topology("VM")))
    assert check.status == OK
    assert check.text == "no node runs here; none is needed: no other box is linked to this one"
    silent = 'plugins = ["zmq"]\n[plugin.zmq]\nheartbeat_s = 1.0\n'
    assert checked(place_of(own, Topology("vm"), config_path=write_config(own, silent))) == check


def test_a_hub_that_other_boxes_dial_needs_its_node(own: World) -> None:
    listens = 'plugins = ["zmq"]\n[plugin.zmq]\nlisten = "tcp://*:7710"\n'
    check = checked(place_of(own, Topology("vm"), config_path=write_config(own, listens)))
    assert (check.status, check.remedy) == (FAULT, "run: sotbus serve")
    assert check.text.startswith("this box is the hub, and other boxes cannot reach it: no daemon is at unix:")


def test_a_hub_that_has_peers_needs_its_node(own: World) -> None:
    write_peers(own, "linked")
    check = checked(place_of(own, Topology("vm")))
    assert (check.status, check.remedy) == (FAULT, "run: sotbus serve")


def test_a_hubs_links_that_are_down_are_counted_and_no_fault(own: World) -> None:
    links = [link("linked"), link("guest", up=False)]
    check = checked(place_of(own, Topology("vm"), told(links=links)))
    assert (check.status, check.text) == (OK, "runs, 1 of 2 links up")


def test_a_hub_whose_node_no_box_can_reach_is_a_fault(own: World) -> None:
    listens = write_config(own, 'plugins = ["zmq"]\n[plugin.zmq]\nlisten = "tcp://*:7710"\n')
    deaf = {"deliveries": {"zmq": {"transport": {"listening": None}}}, "links": [link("linked", up=False)]}
    heard = deaf | {"deliveries": {"zmq": {"transport": {"listening": "tcp://0.0.0.0:7710"}}}}
    hub = Topology("vm")
    for status, verdict in (
        (deaf | {"restarts": {"zmq": 2}}, FAULT),
        (deaf | {"restarts": {}}, OK),  # it is about to
        (heard | {"restarts": {"zmq": 2}}, OK),
        (deaf | {"deliveries": {}}, FAULT),
    ):
        check = checked(place_of(own, hub, NodeView(status={"pid": 77, **status}), config_path=listens))
        assert check.status == verdict, check.text
        assert ("reaches it" in check.text) == (verdict == FAULT)


# ---- a guest


def test_a_guest_that_files_itself_needs_no_node(mounted: World) -> None:
    Path(mounted.folder.manager_record).write_text(f"none@{MACHINE}\n{OTHER_MACHINE}\n")
    check = checked(place_of(mounted, LINKED))
    assert check.status == OK
    assert check.text == "no node runs here; none is needed: this box files its mail itself"
    check = checked(place_of(mounted, LINKED, told()))
    assert check.status == OK
    assert check.text == "runs, no links; it has no hub, and needs none: this box files its mail itself"


def test_a_guest_that_files_itself_and_has_a_hub_as_its_peer_needs_that_link(mounted: World) -> None:
    Path(mounted.folder.manager_record).write_text(f"none@{MACHINE}\n{OTHER_MACHINE}\n")
    down = told(links=[link(up=False, why="refused")])
    assert checked(place_of(mounted, LINKED, down)).status == FAULT
    write_peers(mounted, "peer")
    assert checked(place_of(mounted, LINKED)).status == OK
    write_peers(mounted, "hub")
    assert checked(place_of(mounted, LINKED)).status == FAULT


def test_a_guest_whose_node_reaches_the_hub_has_no_fault(mounted: World) -> None:
    place = place_of(mounted, LINKED, told(links=[link()]))
    assert [check.name for check in checkup.run(place) if check.status == FAULT] == []
    assert checked(place, "record-manager").text == (
        f"the record names local {OTHER_MACHINE}, so this box files nothing itself; its mail goes by this box's "
        "node to root.hub; this box is a guest of hub"
    )


@pytest.mark.parametrize(
    ("view", "remedy"),
    [
        (NOT_ANSWERED, "run: sotbus serve"),
        (NodeView(silent="it hangs"), "see what it last logged, end it, then run: sotbus serve"),
        (NodeView(strange="unknown op"), "see that it reaches the hub"),
        (told(), "run: sotbus keys trust USER.hub"),
        (told(links=[link("peer")]), "run: sotbus keys trust USER.hub"),
        (told(links=[link(up=False)]), "see that the node of root.hub runs"),
        (told(links=[link()], comm_folder="/other"), "if that is the right one: SOT_COMM_HOME=/other sotbus doctor"),
    ],
)
def test_a_guest_whose_node_does_not_reach_the_hub_is_told_what_would(
    mounted: World, view: NodeView, remedy: str
) -> None:
    check = checked(place_of(mounted, LINKED, view), "record-manager")
    assert check.status == FAULT
    assert check.text.endswith("so it files nothing itself; this box is a guest of hub")
    assert check.remedy.startswith("send from hub, if the folder is on its own disk")
    assert f"; or have this box's node hand its mail on: {remedy}" in check.remedy


def test_the_hubs_own_record_is_not_made_good_by_a_link(own: World) -> None:
    Path(own.folder.manager_record).write_text(HUBS)
    for topology in (NO_TOPOLOGY, LINKED, Topology("vm")):
        assert checked(place_of(own, topology, told(links=[link()])), "record-manager").status == FAULT


# ---- what it goes by


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A folder with a short name: a socket's path is bounded (unix(7))."""
    with tempfile.TemporaryDirectory(prefix="sn-") as name:
        yield Path(name)


@contextmanager
def daemon(path: Path, answer: bytes | None) -> Iterator[None]:
    """A daemon at a socket that gives each request one answer, or none."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    kept: list[socket.socket] = []

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            kept.append(connection)
            if stopped.is_set():
                return
            if answer is not None:
                connection.recv(1 << 16)
                connection.sendall(answer)

    stopped = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(str(path))
            thread.join()
            for connection in kept:
                connection.close()


REFUSES = b'{"v":1,"id":1,"kind":"res","op":"sotbus.status","payload":{"error":"unknown op","code":"bad_request"}}\n'


def test_the_daemon_at_the_hubs_address_is_as_good_for_sending(mounted: World, runtime: Path) -> None:
    path = runtime / "relay" / "s.sock"
    relayed = Topology(relayed=True)
    with daemon(path, REFUSES):
        place = place_of(mounted, relayed, env={"SOT_RELAY_ENDPOINT": f"unix:{path}"})
        check = checked(place)
        assert (check.status, checked(place, "record-manager").status) == (OK, OK)
        assert check.text == "no node runs here; mail for other boxes goes to the daemon at $SOT_RELAY_ENDPOINT"
        assert "its mail goes to the daemon at $SOT_RELAY_ENDPOINT" in checked(place, "record-manager").text
    check = checked(place_of(mounted, relayed, env={"SOT_RELAY_ENDPOINT": f"unix:{path}"}))
    assert (check.status, check.remedy) == (FAULT, "run: sotbus serve")
    assert f"; $SOT_RELAY_ENDPOINT: no daemon is at unix:{path}" in check.text
    check = checked(place_of(mounted, relayed, env={"SOT_RELAY_ENDPOINT": "ssh:hub"}))
    assert "ssh endpoints are not spoken" in check.text


def test_a_daemon_that_accepts_and_says_nothing_is_waited_for_within_the_bound(
    own: World, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_view, "ASK_S", 0.2)
    path = runtime / "quiet" / "s.sock"
    with daemon(path, None):
        began = time.monotonic()
        check = checked(place_of(own, NO_TOPOLOGY, env={"SOT_SOCKET": str(path)}))
        assert time.monotonic() - began < node_view.ASK_S + 4.5  # of an ask without a bound: 5
    assert (check.status, check.text) == (FAULT, f"the daemon did not answer at unix:{path}")


def test_the_socket_that_the_config_names_is_asked_and_the_variables_goes_before(own: World, runtime: Path) -> None:
    path = runtime / "other" / "s.sock"
    config = write_config(own, f'[node]\nsocket = "{path}"\n')
    with daemon(path, REFUSES):
        assert "unknown op" in checked(place_of(own, NO_TOPOLOGY, config_path=config)).text
        place = place_of(own, NO_TOPOLOGY, config_path=config, env={"SOT_SOCKET": str(path) + ".not"})
        assert checked(place).text == "no node runs here; none is needed"


def test_it_is_asked_once_a_run(mounted: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def look(*words: object) -> NodeView:
        asked.append(words)
        return NOT_ANSWERED

    monkeypatch.setattr(node_view, "look", look)
    found = {check.name for check in checkup.run(place_of(mounted, LINKED)) if check.status == FAULT}
    assert (found, len(asked)) == ({"record-manager", "node"}, 1)


def test_where_config_or_folder_cannot_be_used_it_is_not_judged(own: World, tmp_path: Path) -> None:
    check = checked(place_of(own, NO_TOPOLOGY, config_problem=ConfigError("x")))
    assert (check.status, check.text.endswith("(see config)")) == (SKIPPED, True)
    nowhere = World(tmp_path, tmp_path / "none")
    check = checked(place_of(nowhere, LINKED))
    assert (check.status, check.text.endswith("(see folder)")) == (SKIPPED, True)


def test_a_peers_file_that_cannot_be_used_is_the_nodes_fault(own: World) -> None:
    write_peers(own, "strange")
    check = checked(place_of(own, Topology("vm")))
    assert check.status == FAULT
    assert "vm.peers.toml" in check.text


# ---- real nodes


def doctor(box: NodeWorld, env: dict[str, str] | None = None) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit status and checks of the command."""
    done = box.command("doctor", "--json", env=env)
    assert done.stderr == ""
    return done.returncode, {row["name"]: row for row in json.loads(done.stdout)}


@pytest.fixture
def joined(nodes: NodeWorld) -> NodeWorld:
    nodes.join("a-vm")
    assert nodes.command("init").returncode == 0
    return nodes


def test_a_box_alone_is_sound_with_its_node_and_without(joined: NodeWorld) -> None:
    status, checks = doctor(joined)
    assert (status, checks["node"]["text"]) == (0, "no node runs here; none is needed")
    node = joined.serve()
    status, checks = doctor(joined)
    assert (status, checks["node"]["status"], checks["node"]["text"]) == (0, OK, "runs, no links")
    assert node.end() == 0
    status, checks = doctor(joined)
    assert (status, checks["node"]["text"]) == (0, "no node runs here; none is needed")


def test_a_node_that_stands_still_is_a_fault(joined: NodeWorld) -> None:
    node = joined.serve()
    node.tell(signal.SIGSTOP)
    try:
        status, checks = doctor(joined)
    finally:
        node.tell(signal.SIGCONT)
    assert (status, checks["node"]["status"]) == (1, FAULT)
    assert "the daemon did not answer at unix:" in checks["node"]["text"]


class Guest:
    """A hub's folder, and a guest that mounts it and may not file mail in it: the two are to be linked."""

    def __init__(self, hub: NodeWorld, box: NodeWorld, address: str) -> None:
        self.hub, self.box = hub, box
        self.hub_env = {"SOT_SELF_HOST": "hub", "SOT_COMM_TEST_HOST": "hub", "TEST_MACHINE_ID": OTHER_MACHINE}
        box.home, box.folder = hub.home, hub.folder
        box.mountinfo.write_text(f"{box.mountinfo.read_text()}22 21 0:50 / {hub.home} rw,relatime - {NFS3}\n")
        top = 'plugins = ["filesystem", "nfs", "zmq"]\n[topology]\nhub = "hub"\n'
        quick = "reconnect_min_s = 0.05\nreconnect_max_s = 0.2\n"
        self._write(hub, "hub", f'{top}[plugin.zmq]\nlisten = "{address}"\n{quick}')
        self._write(box, "vm", f"{top}[plugin.zmq]\n{quick}")
        self.name, hubs_key = self._key(hub, self.hub_env)
        guest, guests_key = self._key(box, {})
        assert hub.command("init", env=self.hub_env).returncode == 0
        self._run(hub, self.hub_env, "keys", "trust", guest, guests_key, "--role", "guest")
        self.trust = ("keys", "trust", self.name, hubs_key, "--role", "hub", "--address", address)

    @staticmethod
    def _write(box: NodeWorld, host: str, text: str) -> None:
        (box.config / "sotbus").mkdir(parents=True)
        (box.config / "sotbus" / f"{host}.toml").write_text(text)

    @staticmethod
    def _run(box: NodeWorld, env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
        done = box.command(*words, env=env)
        assert done.returncode == 0, done.stderr
        return done

    def _key(self, box: NodeWorld, env: dict[str, str]) -> tuple[str, str]:
        self._run(box, env, "keys", "new")
        key = json.loads(self._run(box, env, "keys", "show", "--json").stdout)
        return key["node"], key["public_key"]

    def serve_hub(self) -> NodeProcess:
        return self.hub.serve(env=self.hub_env)

    def until_link(self, *, up: bool) -> None:
        until(lambda: [one["up"] for one in self.box.state()["links"]] == [up])


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Guest]:
    for name in ("hub", "box"):
        (tmp_path / name).mkdir()
    worlds = [NodeWorld(tmp_path / name) for name in ("hub", "box")]
    try:
        with reserved() as address:
            yield Guest(worlds[0], worlds[1], address)
    finally:
        for world in worlds:
            world.close()


def test_a_guest_of_a_real_hub_is_told_each_step_until_its_mail_goes(guest: Guest) -> None:
    def faults() -> dict[str, str]:
        status, checks = doctor(guest.box)
        found = {name: row["text"] for name, row in checks.items() if row["status"] == FAULT}
        assert status == (1 if found else 0)
        return found

    status, checks = doctor(guest.hub, guest.hub_env)
    assert (status, checks["node"]["remedy"]) == (1, "run: sotbus serve")
    hub = guest.serve_hub()
    status, checks = doctor(guest.hub, guest.hub_env)
    assert (status, checks["node"]["text"]) == (0, "runs, 0 of 1 link up")

    assert set(found := faults()) == {"record-manager", "node"}
    assert found["node"].startswith("no node answers here")
    node = guest.box.serve()
    assert set(found := faults()) == {"record-manager", "node"}
    assert found["node"].startswith(f"runs (pid {node.pid}), and none of its peers is its hub")
    guest._run(guest.box, {}, *guest.trust)
    os.kill(node.pid, signal.SIGHUP)
    until(lambda: guest.box.state()["links"])
    guest.until_link(up=True)

    status, checks = doctor(guest.box)
    assert status == 0, checks
    assert checks["node"]["text"] == f"runs, link to {guest.name} up"
    assert f"its mail goes by this box's node to {guest.name}" in checks["record-manager"]["text"]
    status, checks = doctor(guest.hub, guest.hub_env)
    assert (status, checks["node"]["text"]) == (0, "runs, 1 of 1 link up")

    assert hub.end() == 0
    guest.until_link(up=False)
    why = until(lambda: guest.box.state()["links"][0]["why"])
    assert why
    assert set(found := faults()) == {"record-manager", "node"}
    assert found["node"].startswith(f"runs (pid {node.pid}), link to {guest.name} down: ")
    assert "it does not say why" not in found["node"]
