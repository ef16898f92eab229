"""The doctor finds each seeded fault by its name, says nothing else, and changes nothing."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from world import MACHINE, World

from sotbus.cli.doctor import place_here
from sotbus.comm.box import Box
from sotbus.comm.cursor import cksum
from sotbus.comm.folder import Folder
from sotbus.comm.holder import own_record
from sotbus.comm.registry_lock import RegistryLock
from sotbus.comm.topology import NO_TOPOLOGY, Topology
from sotbus.config import Config
from sotbus.doctor import checkup, folder_checks, peer, probe
from sotbus.doctor.box_checks import loadable
from sotbus.doctor.check import FAULT, OK, SKIPPED, Check, sound
from sotbus.doctor.place import Place
from sotbus.errors import ConfigError, PluginError
from sotbus.message import stamp

DOCS = Path(__file__).parents[2] / "docs" / "doctor.md"
OTHER_MACHINE = "f" * 32
COMMAND = """
import os, sys
from sotbus.cli import terminal
from sotbus.cli.doctor import run_doctor
from sotbus.comm.box import Box
box = Box.here(os.environ)
box.mountinfo_path = os.environ["TEST_MOUNTINFO"]
box.machine_id = os.environ["TEST_MACHINE_ID"]
status = run_doctor(sys.argv[1:], box)
terminal.flush()
sys.exit(status)
"""
HOLDS_AND_DIES = """
import os, sys
from sotbus.comm.box import Box
from sotbus.comm.folder import Folder
from sotbus.comm.registry_lock import RegistryLock
boot = open("/proc/sys/kernel/random/boot_id").read().strip()
RegistryLock(Folder(sys.argv[1]), Box("vm", "vm", sys.argv[2], boot, sys.argv[3])).hold(5)
os._exit(0)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comm folder in which two sessions have worked."""
    base = tmp_path_factory.mktemp("made")
    world = World(base)
    for name, *words in (
        ("a", "join"),
        ("b", "join"),
        ("a", "send", "@b-vm", "one"),
        ("b", "poll"),
        ("a", "send", "@b-vm", "two"),
        ("b", "send", "@a-vm", "three"),
    ):
        done = world.sotbus(name, *words)
        assert done.returncode == 0, done.stderr
    return world.home


@pytest.fixture
def seeded(made: Path, world: World) -> World:
    """A sound folder of the test's own, to be spoiled."""
    shutil.copytree(made, world.home)
    return world


def without_a_node(world: World) -> dict[str, str]:
    """An environment in whose runtime folder nothing listens, whatever runs on this machine."""
    return world.environ({"XDG_RUNTIME_DIR": str(world.base), "XDG_CONFIG_HOME": str(world.base / "config")})


def place_of(world: World, *, box: Box | None = None, ahead_s: float = 0, topology: Topology = NO_TOPOLOGY) -> Place:
    return Place(
        world.folder,
        box or world.box(),
        plugins=lambda: "none",
        topology=topology,
        environ=without_a_node(world),
        clock=lambda: time.time() + ahead_s,
    )


def checks_of(place: Place) -> dict[str, Check]:
    return {check.name: check for check in checkup.run(place)}


def faults_of(place: Place) -> dict[str, Check]:
    return {name: check for name, check in checks_of(place).items() if check.status == FAULT}


def edit_registry(world: World, change: Callable[[dict[str, object]], object]) -> None:
    path = Path(world.folder.registry)
    document = json.loads(path.read_text())
    change(document["agents"])
    path.write_text(json.dumps(document))


def write(path: str | Path, text: str) -> None:
    Path(path).write_text(text)
    os.chmod(path, 0o600)


def lock_by(world: World, record: str, age_s: int) -> None:
    write(world.folder.registry_lock, record + "\n")
    then = time.time() - age_s
    os.utime(world.folder.registry_lock, (then, then))


def run_command(world: World, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *words],
        env=without_a_node(world) | (env or {}),
        cwd=world.base,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def snapshot(root: Path) -> dict[str, tuple[int, int, int, int, bytes]]:
    """Everything about each entry that a command could change, access times left out."""
    found = {}
    for path in sorted([root, *root.rglob("*")]):
        info = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (info.st_ino, info.st_mode, info.st_mtime_ns, info.st_ctime_ns, data)
    return found


def test_a_sound_folder_has_no_fault_and_every_check_in_its_order(seeded: World) -> None:
    checks = checks_of(place_of(seeded))
    assert list(checks) == [name for name, _ in checkup.CHECKS]
    assert {name: check.text for name, check in checks.items() if check.status == FAULT} == {}
    skipped = {name for name, check in checks.items() if check.status == SKIPPED}
    assert skipped == {"nfs-recovery", "registry-lock-holder", "registry-lock-age"}
    assert all((check.remedy != "") == (check.status == FAULT) for check in checks.values())


def torn(world: World) -> None:
    with open(world.inbox("b-vm"), "ab") as file:
        file.write(b'{"from":"a-vm","to"')


def registry_folder(world: World) -> None:
    os.unlink(world.folder.registry)
    os.mkdir(world.folder.registry, 0o700)


def record_folder(world: World) -> None:
    os.unlink(world.folder.manager_record)
    os.mkdir(world.folder.manager_record, 0o700)


def stamps_ahead(world: World) -> None:
    edit_registry(world, lambda agents: agents["b-vm"].update(last_seen=stamp(time.time() + 3600)))  # type: ignore[attr-defined]


SEEDS: dict[str, tuple[Callable[[World], object], str, str]] = {
    "torn tail": (torn, "torn-tail", "19 bytes at the end of @b-vm"),
    "a whole inbox that is one torn line": (
        lambda world: write(world.inbox("new"), "x" * 5000),
        "torn-tail",
        "5000 bytes at the end of @new",
    ),
    "empty registry": (lambda world: write(world.folder.registry, ""), "registry-empty", "is empty"),
    "registry that is not JSON": (lambda world: write(world.folder.registry, "{"), "registry-json", "not JSON"),
    "registry of two documents": (
        lambda world: write(world.folder.registry, '{"agents": {}}\n{"agents": {}}\n'),
        "registry-json",
        "not JSON",
    ),
    "registry whose agents are no object": (
        lambda world: write(world.folder.registry, '{"agents": []}'),
        "registry-json",
        "agents are not an object",
    ),
    "registry missing": (lambda world: os.unlink(world.folder.registry), "registry", "is missing"),
    "registry a folder": (registry_folder, "registry", "no regular file"),
    "entry that is no object": (
        lambda world: edit_registry(world, lambda agents: agents.update(c=None)),
        "registry-entries",
        "@c",
    ),
    "entry under what is no handle": (
        lambda world: edit_registry(world, lambda agents: agents.update({"../x": {}})),
        "registry-entries",
        "'../x'",
    ),
    "loose file": (lambda world: os.chmod(world.inbox("b-vm"), 0o644), "permissions", "inbox/b-vm.jsonl is 0644"),
    "loose folder": (lambda world: os.chmod(world.home, 0o750), "permissions", ". is 0750"),
    "record of another manager": (
        lambda world: write(world.folder.manager_record, f"nfs4 srv:/x\n{OTHER_MACHINE}\n"),
        "record-manager",
        f"nfs4 srv:/x, written by machine {OTHER_MACHINE}",
    ),
    "record of an unknown machine": (
        lambda world: write(world.folder.manager_record, "nfs4 srv:/x"),
        "record-manager",
        "an unknown machine",
    ),
    "stale record of this machine": (
        lambda world: write(world.folder.manager_record, f"nfs4 srv:/x\n{MACHINE}\n"),
        "record-manager",
        "before a remount",
    ),
    "record missing": (lambda world: os.unlink(world.folder.manager_record), "record", "is missing"),
    "record a folder": (record_folder, "record", "is a folder"),
    "record empty": (lambda world: write(world.folder.manager_record, ""), "record", "names no lock manager"),
    "lock a folder": (lambda world: os.mkdir(world.folder.registry_lock), "registry-lock", "an older version"),
    "lock that names no holder": (
        lambda world: write(world.folder.registry_lock, "hello\n"),
        "registry-lock",
        "names no holder (hello)",
    ),
    "lock held for an hour by another machine": (
        lambda world: lock_by(world, f"far:{OTHER_MACHINE}:boot:4026531836:77:5", 3600),
        "registry-lock-age",
        "far pid 77 start 5 for 3600s: it is on another machine",
    ),
    "lock held for an hour by a process that runs": (
        lambda world: lock_by(world, str(own_record(world.box(), fresh=True)), 3600),
        "registry-lock-age",
        "it is running",
    ),
    "lock of a machine that has rebooted": (
        lambda world: lock_by(world, f"vm:{MACHINE}:earlier:4026531836:77:5", 3600),
        "registry-lock-holder",
        "has rebooted since",
    ),
    "cursor that is garbage": (
        lambda world: write(world.folder.cursor("b-vm"), "twelve"),
        "cursor-text",
        "neither a count nor a stamp: @b-vm",
    ),
    "cursor that is empty": (lambda world: write(world.folder.cursor("b-vm"), ""), "cursor-text", "@b-vm"),
    "cursor that is a folder": (
        lambda world: os.mkdir(world.folder.cursor("c"), 0o700),
        "cursor-text",
        "@c (it is not a regular file)",
    ),
    "cursor past the end": (
        lambda world: write(world.folder.cursor("b-vm"), "7 1-1"),
        "cursor-end",
        "@b-vm counts 7 of 2 lines",
    ),
    "cursor of an inbox that is gone": (
        lambda world: write(world.folder.cursor("gone"), "1"),
        "cursor-end",
        "@gone counts 1 of 0 lines",
    ),
    "self file without a root": (
        lambda world: write(world.home / "self" / "vm__row1.txt", "a-vm\nrepo=a\n"),
        "self-files",
        "no usable root= line, so it names nobody (it says 'a-vm')",
    ),
    "self file that cannot be read": (
        lambda world: os.mkdir(world.home / "self" / "vm__row1.txt", 0o700),
        "self-files",
        "cannot be read",
    ),
    "self file of an unknown handle": (
        lambda world: write(world.home / "self" / "vm__row1.txt", "nobody\nrepo=a\nroot=/a\n"),
        "self-handles",
        "@nobody of vm__row1.txt",
    ),
    "stamp an hour ahead": (stamps_ahead, "clock-skew", "last_seen of @b-vm (host vm) is 3"),
    "part missing": (lambda world: shutil.rmtree(world.home / "read"), "folder-parts", "read is missing"),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seeded_fault_is_found_by_its_name_and_nothing_else(seeded: World, seed: str) -> None:
    spoil, name, text = SEEDS[seed]
    spoil(seeded)
    found = faults_of(place_of(seeded))
    assert list(found) == [name], found
    assert text in found[name].text
    assert found[name].remedy


@pytest.mark.parametrize("seed", ["loose file", "loose folder", "record missing", "registry missing", "empty registry"])
def test_the_remedys_command_mends_it(seeded: World, seed: str) -> None:
    spoil, name, _ = SEEDS[seed]
    spoil(seeded)
    remedy = faults_of(place_of(seeded))[name].remedy
    command = remedy.removeprefix("run: ").split(";")[0]
    entry = Path(__file__).parents[1] / "sotbus_command.py"
    script = f'sotbus() {{ "{sys.executable}" "{entry}" "$@"; }}\n{command}'
    done = subprocess.run(["sh", "-c", script], env=seeded.environ(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert name not in faults_of(place_of(seeded))


def test_many_loose_entries_are_closed_by_one_command(seeded: World) -> None:
    paths = [seeded.home, seeded.home / "registry.json"]
    for number in range(12):
        paths.append(seeded.inbox(f"h{number}"))
        paths[-1].touch()
    for path in paths:
        os.chmod(path, 0o755)
    remedy = faults_of(place_of(seeded))["permissions"].remedy
    assert len(remedy) < 500
    subprocess.run(["sh", "-c", remedy.removeprefix("run: ")], check=True)
    assert faults_of(place_of(seeded)) == {}


def test_a_lock_whose_holder_is_dead_is_found(seeded: World) -> None:
    subprocess.run(
        [sys.executable, "-c", HOLDS_AND_DIES, str(seeded.home), MACHINE, str(seeded.mountinfo)], check=True, timeout=60
    )
    found = faults_of(place_of(seeded))
    assert list(found) == ["registry-lock-holder"]
    assert "it has exited" in found["registry-lock-holder"].text


def test_a_lock_that_is_held_just_now_is_no_fault_and_is_said(seeded: World) -> None:
    box = seeded.box()
    with RegistryLock(seeded.folder, box).hold(5):
        checks = checks_of(place_of(seeded))
    assert checks["registry-lock"].text.startswith(f"held by vm pid {os.getpid()} ")
    assert (checks["registry-lock-holder"].status, checks["registry-lock-age"].status) == (OK, OK)


def test_a_young_lock_of_another_machine_is_no_fault(seeded: World) -> None:
    lock_by(seeded, f"far:{OTHER_MACHINE}:boot:4026531836:77:5", 3)
    assert faults_of(place_of(seeded)) == {}


def test_a_lock_of_which_no_box_can_prove_anything_names_the_way_out(seeded: World) -> None:
    lock_by(seeded, "far:-:-:-:77:-", 3600)
    remedy = faults_of(place_of(seeded))["registry-lock-age"].remedy
    assert remedy.startswith("no box can prove its death")
    assert f"rm {seeded.folder.registry_lock}" in remedy


def test_a_clock_an_hour_behind_the_stamps_is_found_with_the_handle_and_the_seconds(seeded: World) -> None:
    found = faults_of(place_of(seeded, ahead_s=-3600))
    assert list(found) == ["clock-skew"]
    assert re.search(r"@b-vm \(host vm\) is 3[4-6]\d\ds ahead of this box's clock", found["clock-skew"].text)


def test_a_writer_whose_clock_was_ahead_of_the_files_is_found_after_the_fact(seeded: World) -> None:
    hour_ago = time.time() - 7200
    edit_registry(seeded, lambda agents: agents["a-vm"].update(last_seen=stamp(hour_ago + 3600)))  # type: ignore[attr-defined]
    edit_registry(seeded, lambda agents: agents.pop("b-vm"))
    edit_registry(seeded, lambda agents: agents["a-vm"].update(joined=stamp(hour_ago)))  # type: ignore[attr-defined]
    os.utime(seeded.folder.registry, (hour_ago, hour_ago))
    text = faults_of(place_of(seeded))["clock-skew"].text
    assert re.search(r"last_seen of @a-vm \(host vm\) is 3(599|600)s ahead of the registry file's own time", text)


def test_a_torn_tail_that_a_writer_is_just_writing_is_no_fault(seeded: World) -> None:
    torn(seeded)
    with open(seeded.folder.inbox_lock("b-vm"), "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        started = time.monotonic()
        checks = checks_of(place_of(seeded))
        assert time.monotonic() - started < 2.5
    assert checks["torn-tail"].status == OK
    assert checks["torn-tail"].text == "none; being written now: @b-vm"


def test_a_cursor_one_past_the_end_with_a_hash_is_an_append_that_was_cut_back(seeded: World) -> None:
    write(seeded.folder.cursor("b-vm"), f"3 {cksum(b'gone')}")
    assert faults_of(place_of(seeded)) == {}


def test_a_timestamp_cursor_is_sound(seeded: World) -> None:
    write(seeded.folder.cursor("b-vm"), "2026-01-01T00:00:00Z")
    assert faults_of(place_of(seeded)) == {}


def test_the_files_of_sessions_that_have_ended_are_no_fault(seeded: World) -> None:
    for name in ("vm__sotbus-leader-999999-5-0011aabb.txt", "vm__sotbus-tmux-999999-5-3-0011aabb.txt"):
        write(seeded.home / "self" / name, "nobody\nrepo=a\nroot=/a\n")
    write(seeded.home / "self" / "vm__nopane.txt", "nobody\nrepo=a\nroot=/a\n")
    write(seeded.home / "self" / "far__row.txt", "nobody\nrepo=a\nroot=/a\n")
    check = checks_of(place_of(seeded))["self-handles"]
    assert (check.status, check.text) == (OK, "every handle is listed; 2 files of ended sessions")


def test_leftover_temp_files_and_markers_are_named_and_no_fault(seeded: World) -> None:
    for name in (".registry.lock.tmp.x", ".registry.lock.reclaim.y", "registry.json.tmp", "self/pin-a.txt.tmp.abc"):
        write(seeded.home / name, "")
    write(seeded.home / "inbox" / ".sotbus-probe-vm-1.lock", "")
    checks = checks_of(place_of(seeded))
    assert checks["leftovers"].status == OK
    assert checks["leftovers"].text.startswith("5 temp files and reclaim markers: .registry.lock.reclaim.y")
    assert not [check for check in checks.values() if check.status == FAULT]


def test_a_run_changes_nothing_not_even_on_a_spoiled_folder(seeded: World) -> None:
    for spoil in (torn, stamps_ahead, record_folder):
        spoil(seeded)
    os.chmod(seeded.inbox("a-vm"), 0o644)
    write(seeded.inbox("new"), "torn and without a lock file")
    before = snapshot(seeded.base)
    assert set(faults_of(place_of(seeded))) == {"torn-tail", "clock-skew", "record", "permissions"}
    assert snapshot(seeded.base) == before


def test_a_box_that_never_joined_is_told_to_and_nothing_is_made(world: World) -> None:
    checks = checks_of(place_of(world))
    assert [name for name, check in checks.items() if check.status == FAULT] == ["folder"]
    assert checks["folder"].remedy == "run: sotbus init"
    assert not world.home.exists()


def test_without_a_machine_id_both_the_id_and_the_lock_manager_are_faults(seeded: World) -> None:
    found = faults_of(place_of(seeded, box=seeded.box(machine=None)))
    assert list(found) == ["machine-id", "lock-manager"]


def test_a_host_name_that_cannot_name_a_file_is_a_fault(seeded: World) -> None:
    found = faults_of(place_of(seeded, box=seeded.box(host="a/b")))
    assert list(found) == ["host-name"]
    assert found["host-name"].remedy == "set SOT_SELF_HOST to a plain host name"


def test_mounts_that_cannot_be_told_leave_the_lock_manager_unknown(seeded: World) -> None:
    seeded.mountinfo.unlink()
    found = faults_of(place_of(seeded))
    assert list(found) == ["lock-manager"]


@pytest.mark.parametrize(
    ("line", "name", "text"),
    [
        ("21 1 0:2 / / ro,relatime - ext4 /dev/vda2 rw", "mount", "read-only"),
        ("21 1 0:2 / / rw,nocto - nfs4 srv:/x rw,vers=4.2,local_lock=none", "mount", "nocto"),
    ],
)
def test_a_mount_that_hinders_is_a_fault(seeded: World, line: str, name: str, text: str) -> None:
    seeded.mountinfo.write_text(line + "\n")
    assert text in faults_of(place_of(seeded))[name].text


def test_an_nfs_client_that_takes_lost_locks_back_is_named(
    seeded: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded.mountinfo.write_text("21 1 0:2 / / rw - nfs4 srv:/x rw,vers=4.2,local_lock=none\n")
    write(seeded.folder.manager_record, f"nfs4 srv:/x\n{OTHER_MACHINE}\n")
    parameter = tmp_path / "recover_lost_locks"
    monkeypatch.setattr(folder_checks, "RECOVER_LOST_LOCKS", str(parameter))
    parameter.write_text("N\n")
    assert faults_of(place_of(seeded)) == {}
    parameter.write_text("Y\n")
    assert list(faults_of(place_of(seeded))) == ["nfs-recovery"]


NFS4 = "21 1 0:2 / / rw - nfs4 srv:/x rw,vers=4.2,local_lock=none\n"
NFS3 = "21 1 0:2 / / rw - nfs srv:/x rw,vers=3,local_lock=none\n"
RUN = "run: sotbus init (or start its node)"
BY_NODE = "or have this box's node hand its mail on: run: sotbus serve"
ROLES = {
    "the hub": (NFS4, Topology("VM"), "this box is the folder's hub", RUN),
    "a linked box": (
        None,
        Topology("far"),
        "this box is the hub of its own folder, while far is the topology's",
        RUN,
    ),
    "a box whose folder is its own": (
        NFS3,
        Topology("far", own_folder=True),
        "this box is the hub of its own folder, while far is the topology's",
        RUN,
    ),
    "a guest": (NFS4, Topology("far"), "this box is a guest of far", f"on far: {RUN}"),
    "a guest of an address": (
        NFS3,
        Topology(relayed=True),
        "this box is a guest of the hub at $SOT_RELAY_ENDPOINT",
        f"on the hub at $SOT_RELAY_ENDPOINT: {RUN}",
    ),
}
"""What the boxes of a topology are: mount, topology, how the role is called, and what is to be run for the record."""


@pytest.mark.parametrize("role", ROLES)
def test_a_missing_record_is_made_as_the_role_says(seeded: World, role: str) -> None:
    mount, topology, described, remedy = ROLES[role]
    if mount is not None:
        seeded.mountinfo.write_text(mount)
    path = Path(seeded.folder.manager_record)
    path.unlink()
    check = faults_of(place_of(seeded, topology=topology))["record"]
    assert check.text == f"{path} is missing, so it is not known whose lock the inboxes are under; {described}"
    assert check.remedy == remedy
    path.touch(0o600)
    check = faults_of(place_of(seeded, topology=topology))["record"]
    assert check.text == f"{path} names no lock manager; {described}"
    on = remedy.removesuffix(RUN)
    assert check.remedy == f"{on}remove it: rm {path}; then {RUN}"
    path.unlink()
    path.mkdir(0o700)
    assert faults_of(place_of(seeded, topology=topology))["record"].remedy == f"{on}remove it: rmdir {path}; then {RUN}"


@pytest.mark.parametrize("role", ROLES)
def test_a_sound_record_names_the_role_and_is_no_fault(seeded: World, role: str) -> None:
    mount, topology, described, _ = ROLES[role]
    own = f"local {MACHINE}" if mount is None else {NFS4: "nfs4 srv:/x", NFS3: f"none@{MACHINE}"}[mount]
    if mount is not None:
        seeded.mountinfo.write_text(mount)
    write(seeded.folder.manager_record, f"{own}\n{OTHER_MACHINE}\n")
    checks = checks_of(place_of(seeded, topology=topology))
    faults = [name for name, check in checks.items() if check.status == FAULT]
    assert faults == (["node"] if "hub of its own folder" in described else [])
    assert checks["record"].text == f"{own}, written by machine {OTHER_MACHINE}; {described}"
    assert checks["record-manager"].text == f"the record names this box's lock manager; {described}"


def test_without_a_topology_no_role_is_named(seeded: World) -> None:
    checks = checks_of(place_of(seeded))
    assert checks["record"].text == f"local {MACHINE}, written by machine {MACHINE}"
    assert checks["record-manager"].text == "the record names this box's lock manager"


def differing(world: World, record: str, topology: Topology) -> Check:
    """The fault of a folder whose record names another lock manager than this box's, beside its node's where it
    needs one: none runs."""
    write(world.folder.manager_record, record)
    found = faults_of(place_of(world, topology=topology))
    needs_node = topology.configured and not topology.names("vm")
    assert list(found) == (["record-manager", "node"] if needs_node else ["record-manager"])
    return found["record-manager"]


def test_a_guest_whose_manager_differs_is_told_how_to_mount_or_whence_to_send(seeded: World) -> None:
    seeded.mountinfo.write_text(NFS3)
    check = differing(seeded, f"nfs4 srv:/x\n{OTHER_MACHINE}\n", Topology("far"))
    assert check.text == (
        f"the record names nfs4 srv:/x, written by machine {OTHER_MACHINE}, and this box's lock manager is "
        f"none@{MACHINE}, so it files nothing itself; this box is a guest of far"
    )
    assert check.remedy == f"mount srv:/x here as far does (NFS v4 with local_lock=none), or send from far; {BY_NODE}"


def test_a_guest_is_never_told_to_write_a_record_that_its_own_machine_once_wrote(seeded: World) -> None:
    seeded.mountinfo.write_text(NFS4)
    check = differing(seeded, f"local {MACHINE}\n{MACHINE}\n", Topology("far"))
    assert "this box is a guest of far" in check.text
    assert check.remedy == (
        f"send from far, if the folder is on its own disk; else see what sotbus doctor says there; {BY_NODE}"
    )


@pytest.mark.parametrize("topology", [Topology("vm"), Topology("far")])
def test_a_hub_is_told_to_renew_its_record_or_to_begin_another(seeded: World, topology: Topology) -> None:
    check = differing(seeded, f"nfs4 srv:/x\n{MACHINE}\n", topology)
    assert "this machine's lock manager before a remount" in check.text
    assert topology.described(f"local {MACHINE}", "vm") in check.text
    assert check.remedy == RUN
    check = differing(seeded, f"nfs4 srv:/x\n{OTHER_MACHINE}\n", topology)
    assert check.remedy == f"stop every daemon on it, rm {seeded.folder.manager_record}; then {RUN}"


def test_a_box_alone_under_another_machines_record_is_told_both_ways_out(seeded: World) -> None:
    check = differing(seeded, f"nfs4 srv:/x\n{OTHER_MACHINE}\n", NO_TOPOLOGY)
    assert check.remedy == (
        f"if the folder is this box's: stop every daemon on it, rm {seeded.folder.manager_record}; then "
        "run: sotbus init; else mount it as that machine does"
    )


def test_where_the_role_is_not_known_that_is_what_is_to_be_mended_first(seeded: World) -> None:
    path = Path(seeded.folder.manager_record)
    path.unlink()
    place = Place(seeded.folder, seeded.box(), plugins=lambda: "none", config_problem=ConfigError("x"))
    assert faults_of(place)["record"].remedy == ("mend the config first, which may name the folder's hub (see config)")
    write(path, f"nfs4 srv:/x\n{OTHER_MACHINE}\n")
    place = Place(seeded.folder, seeded.box(), plugins=lambda: "none", config_problem=ConfigError("x"))
    assert faults_of(place)["record-manager"].remedy == (
        "mend the config first, which may name the folder's hub (see config)"
    )
    path.unlink()
    seeded.mountinfo.unlink()
    found = faults_of(place_of(seeded, topology=Topology("far")))
    assert "counts as a guest of far, because its mount cannot be told" in found["record"].text
    assert found["record"].remedy == (
        "see first that this box's lock manager can be told (see lock-manager): its role depends on that"
    )
    assert faults_of(place_of(seeded, topology=Topology("vm")))["record"].remedy == RUN


def test_the_doctor_takes_the_topology_from_config_and_environment(
    seeded: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = seeded.base / "c.toml"
    path.write_text('[topology]\nhub = "far"\nfolder = "own"\n')
    for name, value in {"SOT_COMM_HOME": str(seeded.home), "SOTBUS_CONFIG": str(path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SOT_RELAY_ENDPOINT", raising=False)
    topology = place_here(seeded.box()).topology
    assert (topology.hub, topology.own_folder, topology.relayed) == ("far", True, False)
    path.write_text("")
    monkeypatch.setenv("SOT_RELAY_ENDPOINT", "ssh:hub")
    topology = place_here(seeded.box()).topology
    assert (topology.hub, topology.own_folder, topology.relayed) == (None, False, True)


def test_a_check_that_raises_is_a_fault_of_its_name_and_the_rest_goes_on(seeded: World) -> None:
    def raises(place: Place) -> Check:
        raise RuntimeError("boom")

    checks = list(checkup.run(place_of(seeded), [("broken", raises), ("after", lambda _: sound("fine"))]))  # type: ignore[list-item]
    assert (checks[0].name, checks[0].status) == ("broken", FAULT)
    assert "RuntimeError: boom" in checks[0].text
    assert checks[1] == Check("after", OK, "fine")


def test_a_check_that_hangs_is_a_fault_of_its_name_and_the_rest_is_skipped(seeded: World) -> None:
    let_go = threading.Event()

    def hangs(place: Place) -> object:
        let_go.wait(30)
        return sound("late")

    checks = list(checkup.run(place_of(seeded), [("hangs", hangs), ("after", lambda _: sound("fine"))], bound_s=0.05))  # type: ignore[list-item]
    let_go.set()
    assert [(check.name, check.status) for check in checks] == [("hangs", FAULT), ("after", SKIPPED)]


def test_what_the_plugins_judge_raises_is_the_fault_of_the_plugins(seeded: World) -> None:
    def judge() -> str:
        raise PluginError("plugin 'x' cannot be imported", hint="install it")

    found = faults_of(Place(seeded.folder, seeded.box(), plugins=judge))
    assert (found["plugins"].text, found["plugins"].remedy) == ("plugin 'x' cannot be imported", "install it")


def test_the_configs_plugins_are_judged_by_loading_them() -> None:
    config = Config()
    assert loadable(config) == "can be loaded: filesystem, nfs"
    config.plugin_tables = {"nfs": {"x": 1}}
    with pytest.raises(ConfigError, match=r"\[plugin.nfs\] belongs to a plugin that has no settings"):
        loadable(config)
    config.plugins, config.plugin_tables = (), {}
    assert loadable(config) == "the config names none"
    config.plugins = ("no-such-plugin",)
    with pytest.raises(PluginError, match="no-such-plugin"):
        loadable(config)


@pytest.fixture
def bare_environment(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    for name in [*os.environ]:
        if name.startswith(("SOT", "XDG")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(world.base))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(world.base))
    return world


def test_a_config_that_cannot_be_used_is_a_fault_and_no_folder_is_guessed(
    bare_environment: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[comm]\nhom = 1\n")
    monkeypatch.setenv("SOTBUS_CONFIG", str(config))
    found = faults_of(place_here(bare_environment.box()))
    assert list(found) == ["config", "folder"]
    assert "hom" in found["config"].text
    assert "see config" in found["folder"].text


def test_a_config_that_cannot_be_used_hides_nothing_of_a_folder_that_is_named(
    bare_environment: World, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made, bare_environment.home)
    monkeypatch.setenv("SOTBUS_CONFIG", "/nonexistent/c.toml")
    monkeypatch.setenv("SOT_COMM_HOME", str(bare_environment.home))
    assert list(faults_of(place_here(bare_environment.box()))) == ["config"]


def test_no_home_is_a_fault_of_the_folder(bare_environment: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    found = faults_of(place_here(bare_environment.box()))
    assert "set HOME" in found["folder"].remedy


def test_the_command_is_exit_0_on_a_sound_box_and_its_json_has_every_check(seeded: World) -> None:
    done = run_command(seeded, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == [name for name, _ in checkup.CHECKS]
    assert all(list(row) == ["name", "status", "text", "remedy"] for row in rows)
    assert {row["status"] for row in rows} == {"ok", "skipped"}


def test_the_command_is_exit_1_on_a_fault_and_shows_it_last_with_its_remedy_and_a_sum(seeded: World) -> None:
    torn(seeded)
    edit_registry(seeded, lambda agents: agents.update({"\x1b[2J": {}}))
    done = run_command(seeded)
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"{seeded.home} on vm"
    assert [line.split()[:2] for line in lines[-5:-1:2]] == [["fault", "registry-entries"], ["fault", "torn-tail"]]
    assert lines[-2].split()[0] == "->"
    assert lines[-1] == "2 faults in 26 checks, 3 skipped"
    columns = {line.index(line.split()[1]) for line in lines[1:-1] if not line.split()[0].startswith("->")}
    assert len(columns) == 1
    assert "\x1b" not in done.stdout


def test_on_a_terminal_the_status_has_its_colour(seeded: World) -> None:
    torn(seeded)
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND],
        env=seeded.environ({"TERM": "xterm"}),
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
    )
    os.close(secondary)
    shown = b""
    try:
        while block := os.read(primary, 4096):
            shown += block
    except OSError:  # how a terminal whose other side is closed ends (pty(7))
        pass
    finally:
        os.close(primary)
        process.wait(30)
    assert b"\x1b[31mfault  \x1b[0m  torn-tail" in shown
    assert b"\x1b[32mok     \x1b[0m  config" in shown


def test_the_page_documents_every_name_and_no_other() -> None:
    documented = re.findall(r"^\| `([a-z-]+)` \|", DOCS.read_text(), flags=re.MULTILINE)
    probes = [name for name, _, _ in probe.PROBES]
    assert documented == [*(name for name, _ in checkup.CHECKS), *probes, *peer.NAMES]


def test_a_folder_in_the_way_of_the_comm_folder_is_named(tmp_path: Path, world: World) -> None:
    write(world.home, "a file")
    found = faults_of(Place(Folder(str(world.home)), world.box(), plugins=lambda: "none"))
    assert list(found) == ["folder"]
    assert "is no folder" in found["folder"].text
