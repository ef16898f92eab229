"""A node from its start to its end, as a process: who may start one, how it is told things, and how it ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import sqlite3
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from node_world import FILE, HELLO, NodeWorld, nodes, request, until

import sotbus
from sotbus.cli.node import lines_of

__all__ = ["nodes"]

ONE_PEER = '[peers."ann.box1"]\nrole = "linked"\npublic_key = "%s"\n'
KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
"""A CURVE key of the ZeroMQ Z85 specification's kind."""

OTHER_KEY = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"


PATIENT = {"SOT_INBOX_LOCK_WAIT_SECS": "60"}
"""For a node whose filings wait for a lock that a test holds, however slow the machine is."""


@contextmanager
def held(path: str) -> Iterator[None]:
    """An inbox lock, held by this process: a filing waits for it."""
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def until_under_way(nodes: NodeWorld) -> None:
    """Wait until the node has taken a filing, and has begun to wait for the inbox lock that a test holds."""
    until(lambda: nodes.state()["requests"].get("comm.file"))
    time.sleep(0.3)
    assert not nodes.state()["filings"]


def peers_file(nodes: NodeWorld) -> Path:
    path = nodes.config / "sotbus" / "vm.peers.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# ---- the start


def test_a_node_tells_its_manager_and_its_log_that_it_is_ready(nodes: NodeWorld) -> None:
    node = nodes.begin()
    ready = node.until_said("READY=1")
    assert f"serves {nodes.home}" in ready
    started = until(lambda: node.events("started"))[0]
    assert started["socket"] == str(nodes.socket)
    assert started["node"].endswith(".vm")
    assert stat.S_IMODE(nodes.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(nodes.socket.parent.stat().st_mode) == 0o700


def test_a_second_node_names_the_first_and_leaves_it_alone(nodes: NodeWorld) -> None:
    first = nodes.serve()
    second = nodes.command("serve")
    assert second.returncode == 1
    assert f"pid {first.pid}" in second.stderr
    assert f"kill {first.pid}" in second.stderr
    assert nodes.state()["pid"] == first.pid


def test_a_second_node_of_the_folder_on_another_socket_names_the_first(nodes: NodeWorld) -> None:
    first = nodes.serve()
    other = nodes.runtime / "other"
    other.mkdir(mode=0o700)
    config = nodes.config / "sotbus" / "vm.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(f'[node]\nsocket = "{other}/x.sock"\nstate = "{nodes.base}/elsewhere"\n')
    second = nodes.command("serve")
    assert second.returncode == 1
    assert f"pid {first.pid}" in second.stderr
    assert str(nodes.home) in second.stderr


def test_a_node_whose_place_a_killed_one_left_starts(nodes: NodeWorld) -> None:
    assert nodes.serve().end(signal.SIGKILL) == -signal.SIGKILL
    assert nodes.socket.exists()
    again = nodes.serve()
    assert nodes.state()["pid"] == again.pid


# ---- the end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_node_that_is_told_to_end_says_so_and_takes_its_socket_along(nodes: NodeWorld, number: int) -> None:
    node = nodes.serve()
    with nodes.wire() as wire:
        wire.greet()
        assert node.end(number) == 0
        assert wire.hear() is None
    node_said = node.events("stopped")
    assert len(node_said) == 1
    assert not nodes.socket.exists()


def test_stopping_is_told_before_what_is_under_way_is_done(nodes: NodeWorld) -> None:
    nodes.join("far")
    node = nodes.serve(env=PATIENT)
    with nodes.wire() as wire, nodes.wire() as other:
        other.greet()
        wire.greet()
        with held(nodes.folder.inbox_lock("far")):
            wire.say(FILE)
            until_under_way(nodes)
            node.tell(signal.SIGTERM)
            node.until_said("STOPPING=1")
            refused = other.ask("comm.file", {"from": "a", "to": "far", "text": "too late"})
            assert refused["code"] == "busy", "nothing new is taken"
            time.sleep(0.5)
            assert node.process.poll() is None
        heard = wire.hear()
        assert heard is not None
        assert heard["payload"] == {"ok": True}
    assert node.wait() == 0
    assert [line["msg"] for line in nodes.lines("far")] == ["/slash msg"]


def test_a_drain_is_bounded(nodes: NodeWorld) -> None:
    nodes.join("far")
    node = nodes.serve(env=PATIENT)
    with nodes.wire() as wire, held(nodes.folder.inbox_lock("far")):
        wire.say(HELLO + FILE)
        until_under_way(nodes)
        began = time.monotonic()
        assert node.end() == 0
        assert 4 < time.monotonic() - began < 20
    assert nodes.lines("far") == []


# ---- a reload


def test_hup_goes_by_the_new_peers_or_keeps_the_old(nodes: NodeWorld) -> None:
    path = peers_file(nodes)
    path.write_text(ONE_PEER % KEY)
    node = nodes.serve()

    def reload(event: str) -> list[str]:
        before = len(node.events(event))
        node.tell(signal.SIGHUP)
        assert "MONOTONIC_USEC=" in node.until_said("RELOADING=1")
        node.until_said("READY=1")
        until(lambda: len(node.events(event)) == before + 1)
        return [link["node"] for link in nodes.state()["links"]]

    assert [link["node"] for link in nodes.state()["links"]] == ["ann.box1"]
    path.write_text((ONE_PEER % KEY) + (ONE_PEER % KEY).replace("ann.box1", "bob.box2").replace("linked", "emperor"))
    assert reload("not reloaded") == ["ann.box1"], "whole or not at all"
    assert "emperor" in node.events("not reloaded")[0]["error"]
    path.write_text("[peers\n")
    assert reload("not reloaded") == ["ann.box1"]
    path.write_text((ONE_PEER % KEY).replace("ann.box1", "bob.box2"))
    assert reload("reloaded") == ["bob.box2"]
    path.unlink()
    assert reload("reloaded") == []
    assert node.process.poll() is None


# ---- for people


def test_check_says_what_a_start_would_find_and_makes_nothing(nodes: NodeWorld) -> None:
    checked = nodes.command("serve", "--check")
    assert (checked.returncode, checked.stderr) == (0, "")
    said = dict(line.split(maxsplit=1) for line in checked.stdout.splitlines())
    assert list(said) == ["node", "config", "plugins", "folder", "record", "socket", "state", "peers"]
    assert said["folder"] == f"{nodes.home} (will be made)"
    assert said["socket"] == str(nodes.socket)
    assert not nodes.home.exists()
    assert not nodes.socket.parent.exists()
    first = nodes.serve()
    assert f"pid {first.pid}" in nodes.command("serve", "--check").stdout


def test_check_names_each_fault(nodes: NodeWorld) -> None:
    nodes.join("a")
    Path(nodes.folder.manager_record).write_text(f"nfs4 filer.example:/export\n{'f' * 32}\n")
    nodes.socket.parent.mkdir()
    nodes.socket.parent.chmod(0o755)
    state = nodes.base / "state" / "sotbus"
    state.mkdir(parents=True)
    state.chmod(0o750)
    checked = nodes.command("serve", "--check")
    assert checked.returncode == 1
    faults = [line.split()[0] for line in checked.stdout.splitlines() if "FAULT" in line]
    assert faults == ["record", "socket", "state"]
    assert f"chmod 700 {state}" in checked.stdout
    assert f"hint: chmod 700 {nodes.socket.parent}\n" in checked.stdout
    assert checked.stderr == ""


@pytest.mark.parametrize("text", ["%s/own/n.sock", "unix:%s/own/n.sock"])
def test_a_node_serves_where_its_clients_look_for_it(nodes: NodeWorld, text: str) -> None:
    env = {"SOT_SOCKET": text % nodes.runtime}
    path = str(nodes.runtime / "own" / "n.sock")
    node = nodes.serve(env=env)
    assert until(lambda: node.events("started"))[0]["socket"] == path
    assert json.loads(nodes.command("node", "--json", env=env).stdout)["pid"] == node.pid
    assert f"{path}: a node serves it now" in nodes.command("serve", "--check", env=env).stdout
    assert nodes.command("node").returncode == 1


def test_a_variable_that_names_no_socket_is_refused(nodes: NodeWorld) -> None:
    refused = nodes.command("serve", "--check", env={"SOT_SOCKET": "ssh:far"})
    assert refused.returncode == 1
    assert "$SOT_SOCKET" in refused.stderr
    assert "hint: unset SOT_SOCKET" in refused.stderr


def test_check_takes_no_killed_node_for_one_that_runs(nodes: NodeWorld) -> None:
    node = nodes.serve()
    node.end(signal.SIGKILL)
    checked = nodes.command("serve", "--check")
    assert checked.returncode == 0
    assert f"socket     {nodes.socket}\n" in checked.stdout


def test_check_names_another_program_on_the_socket(nodes: NodeWorld) -> None:
    nodes.socket.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(nodes.socket))
        other.listen()
        checked = nodes.command("serve", "--check")
    assert checked.returncode == 1
    assert f"FAULT: another program listens on {nodes.socket}" in checked.stdout


def spoil_version(store: Path) -> None:
    with contextlib.closing(sqlite3.connect(store)) as database:
        database.execute("PRAGMA user_version = 99")


def spoil_owner(store: Path) -> None:
    with contextlib.closing(sqlite3.connect(store)) as database:
        database.execute("PRAGMA application_id = 7")


def spoil_pages(store: Path) -> None:
    data = bytearray(store.read_bytes())
    data[4096:8192] = b"\xff" * 4096
    store.write_bytes(data)


def spoil_all(store: Path) -> None:
    store.write_bytes(b"no database at all, by any reading" * 100)


def spoil_place(store: Path) -> None:
    store.rename(store.with_name("elsewhere.db"))
    store.symlink_to(store.with_name("elsewhere.db"))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_version, "is of version 99"),
        (spoil_owner, "is another program's database"),
        (spoil_pages, "is damaged"),
        (spoil_all, "is damaged"),
        (spoil_place, "cannot be opened"),
    ],
)
def test_check_names_a_store_that_a_start_refuses(nodes: NodeWorld, spoil: Callable[[Path], None], said: str) -> None:
    assert nodes.serve().end() == 0
    state = nodes.base / "state" / "sotbus"
    before = sorted(os.listdir(state))
    assert nodes.command("serve", "--check").returncode == 0
    assert sorted(os.listdir(state)) == before
    spoil(state / "node.db")
    before = sorted(os.listdir(state))
    checked = nodes.command("serve", "--check")
    assert checked.returncode == 1
    [fault] = [line for line in checked.stdout.splitlines() if "FAULT" in line]
    assert fault.startswith("state ")
    assert said in fault
    assert sorted(os.listdir(state)) == before
    node = nodes.begin()
    assert node.wait() == 1
    assert said in node.text()


def with_topology(nodes: NodeWorld, more: str = "") -> None:
    config = nodes.config / "sotbus" / "vm.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(f'[topology]\nhub = "far"\n{more}')


def warnings(checked: subprocess.CompletedProcess[str]) -> list[str]:
    assert checked.returncode == 0, checked.stdout
    return [line for line in checked.stdout.splitlines() if "WARNING" in line]


def test_check_warns_a_box_of_a_topology_that_trusts_no_hub(nodes: NodeWorld) -> None:
    nodes.join("a")
    assert warnings(nodes.command("serve", "--check")) == []
    with_topology(nodes)
    [warning] = warnings(nodes.command("serve", "--check"))
    assert "does not list does not reach the topology's hub" in warning
    nodes.refuse_appends()
    checked = nodes.command("serve", "--check")
    [warning] = warnings(checked)
    assert "this box is a guest" in warning
    assert "hint: sotbus keys trust USER.far KEY --role hub" in checked.stdout
    peers_file(nodes).write_text((ONE_PEER % KEY).replace("linked", "hub"))
    assert warnings(nodes.command("serve", "--check")) == []


def test_check_says_which_address_cannot_be_had_and_says_the_hint_of_a_plugin(nodes: NodeWorld) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        config = nodes.config / "sotbus" / "vm.toml"
        config.parent.mkdir(parents=True)
        config.write_text(f'plugins = ["filesystem", "nfs", "zmq"]\n[plugin.zmq]\nlisten = "{where}"\n')
        assert nodes.command("keys", "new").returncode == 0
        nobody = nodes.command("serve", "--check")
        assert nobody.returncode == 1
        assert "mail by" not in nobody.stdout
        assert "hint: name a peer with 'sotbus keys trust'" in nobody.stdout
        node = nodes.begin()
        assert node.wait() == 1
        assert "hint: name a peer with 'sotbus keys trust'" in node.text()
        peers_file(nodes).write_text(ONE_PEER % KEY)
        taken = nodes.command("serve", "--check")
        assert (taken.returncode, taken.stderr) == (0, "")  # the node starts, and serves the sessions of its box
        said = f"the node cannot listen on {where} now, and will try again and again: Address already in use"
        assert f"listen     WARNING: {said}\n" in taken.stdout
        node = nodes.serve()
        until(lambda: nodes.state()["restarts"].get("zmq"))
        shown = nodes.command("node").stdout
        assert re.search(r"^delivery +zmq: not listening, ended and was started again \d+ times; ", shown, re.MULTILINE)
        assert node.end() == 0
    free = nodes.command("serve", "--check")
    assert (free.returncode, free.stderr) == (0, "")
    assert f"listen     {where}\n" in free.stdout
    node = nodes.serve()
    until(lambda: nodes.state()["deliveries"]["zmq"]["transport"]["listening"])
    assert f"delivery  zmq: listening on {where}\n" in nodes.command("node").stdout
    assert "listen " not in nodes.command("serve", "--check").stdout  # it is this node that has it
    trusted = nodes.command("keys", "trust", "bob.box2", OTHER_KEY)
    assert f"next        kill -HUP {node.pid} " in trusted.stdout
    assert node.end() == 0
    assert "next" not in nodes.command("keys", "trust", "bob.box2", "--remove").stdout


def test_check_refuses_a_broken_peers_file(nodes: NodeWorld) -> None:
    peers_file(nodes).write_text((ONE_PEER % KEY).replace("linked", "emperor"))
    checked = nodes.command("serve", "--check")
    assert checked.returncode != 0
    assert "emperor" in checked.stderr


PLUGIN = """
import sotbus.api

class Broken:
    def reaches(self, destination):
        raise ValueError("reaches")
    async def deliver(self, filing, deadline_s):
        raise ValueError("deliver")
    async def serve(self, inbound):
        raise ValueError("serve")

@sotbus.api.hookimpl
def sotbus_delivery(box):
    %s
"""


def broken_plugin(nodes: NodeWorld, body: str) -> dict[str, str]:
    """Install a plugin whose delivery does this, and name it in the config; the environment in which it is found."""
    site = nodes.base / "site"
    info = site / "broken-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sotbus]\nbroken = broken_delivery\n")
    (site / "broken_delivery.py").write_text(PLUGIN % body)
    config = nodes.config / "sotbus" / "vm.toml"
    config.parent.mkdir(parents=True)
    config.write_text('plugins = ["filesystem", "nfs", "broken"]\n')
    return {"PYTHONPATH": str(site)}


def test_check_names_a_plugin_that_cannot_make_its_delivery(nodes: NodeWorld) -> None:
    checked = nodes.command("serve", "--check", env=broken_plugin(nodes, 'raise ValueError("no key")'))
    assert checked.returncode == 1
    fault = next(line for line in checked.stdout.splitlines() if "FAULT" in line)
    assert fault.startswith("plugins")
    assert "broken" in fault
    assert "no key" in fault


def test_a_failing_plugin_takes_no_node_down(nodes: NodeWorld) -> None:
    env = broken_plugin(nodes, "return Broken()")
    nodes.join("a", "far")
    node = nodes.serve(env=env)
    until(lambda: node.events("delivery ended"))
    with nodes.wire() as wire:
        wire.greet()
        assert wire.ask("comm.file", {"from": "a", "to": "far", "text": "t"}) == {"ok": True}
        assert wire.ask("comm.file", {"from": "a", "to": "nobody", "text": "t"})["code"] == "not_here"
    until(lambda: nodes.state()["restarts"].get("broken"))
    assert node.events("delivery ended")[0]["plugin"] == "broken"
    assert node.end() == 0


def test_the_nodes_screen(nodes: NodeWorld) -> None:
    peers_file(nodes).write_text(ONE_PEER % KEY)
    none = nodes.command("node")
    assert none.returncode == 1
    assert none.stdout == ""
    assert "no node answers" in none.stderr
    assert "sotbus serve" in none.stderr
    nodes.join("a", "far")
    node = nodes.serve()
    until(lambda: nodes.state()["rows"] == ["a", "far"])
    with nodes.wire() as wire:
        wire.greet().ask("comm.file", {"from": "a", "to": "far", "text": "not to be shown"})
    shown = nodes.command("node")
    assert shown.returncode == 0, shown.stderr
    lines = {line.split()[0]: line for line in shown.stdout.splitlines()}
    assert f"pid {node.pid}" in lines["node"]
    assert str(nodes.home) in lines["folder"]
    assert "@a, @far" in lines["rows"]
    assert re.search(r"1 filed; (1\.0|0\.[5-9])/min over the last minute", lines["filings"])  # it is less and less
    assert "ann.box1 (linked, dials in): down" in lines["link"]
    whole = nodes.command("node", "--json")
    status = json.loads(whole.stdout)
    assert status["pid"] == node.pid
    assert status["links"][0] | {"up": False} == status["links"][0]
    assert status["mailboxes"]["lines"] == 1
    for text in (shown.stdout, whole.stdout, node.text()):
        assert "not to be shown" not in text
        assert KEY not in text


def test_the_screen_says_what_was_turned_away(nodes: NodeWorld) -> None:
    nodes.serve()
    status = nodes.state()
    plain = "\n".join(lines_of(status))
    assert "malformed" not in plain
    assert "delivery " not in plain
    peer = {"name": "ann.box1", "malformed": 3}
    transport = {"listening": "tcp://10.0.0.1:7710", "refused": {"unknown key": 2}, "peers": [peer]}
    status["deliveries"] = {"zmq": {"malformed": 4, "transport": transport}, "odd": {"transport": "?"}}
    status["restarts"] = {"zmq": 5}
    status["malformed"] = 6
    status["inbound"] |= {"malformed": 7, "requests": 8}
    lines = {line.split()[0]: line for line in lines_of(status)}
    assert lines["delivery"] == (
        "delivery  zmq: listening on tcp://10.0.0.1:7710; ended and was started again 5 times; "
        "refused handshakes: 2 unknown key; 3 malformed from ann.box1, 4 malformed"
    )
    assert lines["socket"].endswith(" clients, 6 malformed")
    assert lines["inbound"] == "inbound   7 malformed, 0 refused of 8 requests of peers"


def test_the_page_has_every_field_of_the_nodes_state_and_no_other(nodes: NodeWorld) -> None:
    nodes.serve()
    page = (Path(sotbus.__file__).parents[1] / "docs" / "operations.md").read_text()
    table = page.partition("`sotbus node --json` prints")[2].partition("\nWho may do what")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(nodes.state())


# ---- a session that may not append hands over


@pytest.mark.spec("S64", "S95")
def test_what_a_session_may_not_append_is_handed_to_the_node(nodes: NodeWorld) -> None:
    nodes.join("a", "far")
    nodes.serve()
    here = nodes.sotbus("a", "send", "@far", "here")
    assert (here.returncode, here.stdout) == (0, "  filed -> @far\n")
    other = nodes.base / "mountinfo of the session"
    other.write_text(nodes.mountinfo.read_text())
    nodes.mountinfo, told = other, nodes.mountinfo
    nodes.refuse_appends()
    there = nodes.sotbus("a", "send", "@far", "there")
    assert (there.returncode, there.stdout, there.stderr) == (0, "filed -> @far\n", "")
    dead = nodes.sotbus("a", "send", "@nobody", "there")
    assert dead.returncode == 1
    assert dead.stderr.startswith("FAILED -> @nobody: no box knows that handle: nobody")
    nodes.mountinfo = told
    assert [(line["msg"], line["repo"]) for line in nodes.lines("far")] == [("here", "a"), ("there", "daemon")]
    assert nodes.state()["filings"] == {"filed": 1, "not_here": 1}


@pytest.mark.spec("S97", "S98")
def test_a_daemon_that_never_answers_is_failed_after_five_seconds(nodes: NodeWorld) -> None:
    nodes.join("a", "far")
    nodes.client("a").writer_gate.manager()  # the record, as a first filing makes it
    nodes.refuse_appends()
    nodes.socket.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
        deaf.bind(str(nodes.socket))
        nodes.socket.chmod(0o600)
        deaf.listen()
        began = time.monotonic()
        sent = nodes.sotbus("a", "send", "@far", "x")
        took_s = time.monotonic() - began
    assert (sent.returncode, sent.stdout) == (1, "")
    assert sent.stderr.startswith(f"FAILED -> @far: the daemon did not answer at unix:{nodes.socket}")
    assert "outcome is unknown" in sent.stderr
    assert 5 <= took_s < 15
    assert nodes.lines("far") == []


@pytest.mark.spec("S63")
def test_without_a_node_the_refusal_stands(nodes: NodeWorld) -> None:
    nodes.join("a", "far")
    nodes.client("a").writer_gate.manager()
    nodes.refuse_appends()
    sent = nodes.sotbus("a", "send", "@far", "x")
    assert sent.returncode == 1
    assert "cannot take the inbox lock itself, and no daemon is reachable" in sent.stderr


# ---- message IDs


def test_a_message_id_is_filed_once_and_holds_its_first_text(nodes: NodeWorld) -> None:
    nodes.join("a", "far")
    alone = nodes.sotbus("a", "send", "--id", "m1", "@far", "once")
    assert alone.returncode == 1
    assert "a message ID needs this box's node" in alone.stderr
    nodes.serve()

    def send(text: str) -> tuple[int, str, str]:
        done = nodes.sotbus("a", "send", "--id", "m1", "@far", text)
        return done.returncode, done.stdout, done.stderr

    assert [send("once") for _ in range(3)] == [(0, "filed -> @far\n", "")] * 3
    status, out, errors = send("another text")
    assert (status, out) == (1, "")
    assert errors.startswith("FAILED -> @far: ")
    assert "m1" in errors
    assert [line["msg"] for line in nodes.lines("far")] == ["once"]


def test_a_message_id_outlives_the_nodes_death(nodes: NodeWorld) -> None:
    nodes.join("a", "far")
    payload = {"from": "a", "to": "far", "text": "once", "sotbus": {"id": "m2"}}
    for turn in range(3):
        node = nodes.serve()
        with nodes.wire() as wire:
            wire.greet()
            assert wire.ask("comm.file", payload) == {"ok": True}, turn
            other = wire.ask("comm.file", payload | {"text": "another"})
            assert "error" in other
        assert node.end(signal.SIGKILL) == -signal.SIGKILL
    assert [line["msg"] for line in nodes.lines("far")] == ["once"]


def test_a_node_killed_in_the_middle_of_a_filing_leaves_one_line_after_the_retry(nodes: NodeWorld) -> None:
    nodes.join("a", "far")
    payload = {"from": "a", "to": "far", "text": "once", "sotbus": {"id": "m3"}}
    node = nodes.serve(env=PATIENT)
    with nodes.wire() as wire, held(nodes.folder.inbox_lock("far")):
        wire.greet().say(request(1, "comm.file", payload))
        until_under_way(nodes)
        node.end(signal.SIGKILL)
        assert wire.hear() is None
    nodes.serve()
    with nodes.wire() as wire:
        assert wire.greet().ask("comm.file", payload) == {"ok": True}
        assert wire.ask("comm.file", payload, 2) == {"ok": True}
    assert [line["msg"] for line in nodes.lines("far")] == ["once"]


def test_the_same_id_at_the_same_time_is_filed_once(nodes: NodeWorld) -> None:
    nodes.join("a", "far")
    nodes.serve()
    payload = {"from": "a", "to": "far", "text": "once", "sotbus": {"id": "m4"}}
    answers: list[object] = []

    def send() -> None:
        with nodes.wire() as wire:
            answers.append(wire.greet().ask("comm.file", payload))

    senders = [threading.Thread(target=send) for _ in range(8)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert answers == [{"ok": True}] * 8
    assert [line["msg"] for line in nodes.lines("far")] == ["once"]


def test_the_nodes_own_files_are_private(nodes: NodeWorld) -> None:
    nodes.serve()
    folders = [nodes.base / "state" / "sotbus", nodes.runtime / "sotbus"]
    for folder in folders:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for name in os.listdir(folder):
            assert stat.S_IMODE((folder / name).lstat().st_mode) & 0o077 == 0, name
