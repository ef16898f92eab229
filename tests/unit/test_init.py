"""``sotbus init``: which file it writes on a box alone and on boxes with one home, and the record by the box's role."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from world import EXT4, MACHINE, World

from sotbus import config
from sotbus.cli.init import MARK, _with_machine_id, template

OTHER = "f" * 32
LOCAL = f"local {MACHINE}"
NFS = "nfs4 filer.example:/export"
NFS4_MOUNT = "nfs4 filer.example:/export rw,vers=4.2,local_lock=none"
NFS3_MOUNT = "nfs filer.example:/export rw,vers=3,local_lock=none"
RUN = "run: sotbus init (or start its node)"


class Home:
    """A home that several boxes mount, each with its declared host, its machine id, and its mounts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.config = world.base / ".config" / "sotbus"
        self.record = Path(world.folder.manager_record)

    def write(self, name: str, text: str) -> Path:
        self.config.mkdir(parents=True, exist_ok=True)
        path = self.config / name
        path.write_text(text)
        return path

    def mount(self, what: str) -> None:
        self.world.mountinfo.write_text(EXT4 + f"22 21 0:50 / {self.world.home} rw,relatime - {what}\n")

    def init(self, host: str = "vm", machine: str = MACHINE, **env: str) -> subprocess.CompletedProcess[str]:
        told = {"SOT_SELF_HOST": host, "TEST_MACHINE_ID": machine, **env}
        return self.world.run("init", cwd=self.world.base, env=told)

    def files(self) -> dict[str, str]:
        """The config folder."""
        return {path.name: path.read_text() for path in self.config.iterdir()} if self.config.is_dir() else {}

    def loaded(self, name: str) -> config.Config:
        return config.load(str(self.config / name))


@pytest.fixture
def home(world: World) -> Home:
    return Home(world)


def made_id(done: subprocess.CompletedProcess[str]) -> str:
    """The machine id that init says it made."""
    said = re.search(
        r"^machine  this machine has no /etc/machine-id; ([0-9a-f]{32}) was made", done.stdout, re.MULTILINE
    )
    assert said, done.stdout
    return said[1]


# The config file


def test_the_first_box_of_a_home_writes_the_file_of_its_host(home: Home) -> None:
    done = home.init()
    assert (done.returncode, done.stderr) == (0, "")
    assert home.files() == {"vm.toml": template("single-box.toml")}
    assert (home.config / "vm.toml").stat().st_mode & 0o777 == 0o600
    assert f"config   {home.config}/vm.toml (written)\n" in done.stdout


def test_two_boxes_of_one_home_never_write_each_others_files(home: Home) -> None:
    ids = {}
    for host in ("one", "two"):
        before = home.files()
        done = home.init(host, machine="")
        assert done.returncode == (
            0 if host == "one" else 1
        )  # no topology: the second box finds the first one's record
        assert {name: home.files()[name] for name in before} == before
        assert set(home.files()) - set(before) == {f"{host}.toml"}
        ids[host] = made_id(done)
        assert home.loaded(f"{host}.toml").machine_id == ids[host]
    assert ids["one"] != ids["two"]
    before = home.files()
    for host in ("one", "two"):
        assert "(kept)" in home.init(host, machine="").stdout
    assert home.files() == before


def test_a_common_file_is_kept_and_used_and_no_other_is_written(home: Home) -> None:
    home.write("config.toml", '[topology]\nhub = "vm"\n')
    home.write("far.toml", "")
    before = home.files()
    done = home.init()
    assert (done.returncode, done.stderr) == (0, "")
    assert f"config   {home.config}/config.toml (kept)\n" in done.stdout
    assert f"record   {home.record} (created; this box is the folder's hub)\n" in done.stdout
    assert home.files() == before


def test_a_machine_id_never_goes_into_the_common_file_but_into_a_copy_for_this_host(home: Home) -> None:
    home.write("config.toml", template("shared-home.toml").replace('"hub-host"', '"one"'))
    before = home.files()
    made = {host: made_id(home.init(host, machine="")) for host in ("one", "two")}
    assert home.files()["config.toml"] == before["config.toml"]
    assert set(home.files()) == {"config.toml", "one.toml", "two.toml"}
    for host, machine in made.items():
        loaded = home.loaded(f"{host}.toml")
        assert (loaded.machine_id, loaded.hub) == (machine, "one")
        changed = zip(before["config.toml"].splitlines(), home.files()[f"{host}.toml"].splitlines(), strict=True)
        assert [(old, new) for old, new in changed if old != new] == [
            ('# machine_id = "0123456789abcdef0123456789abcdef"', f'machine_id = "{machine}"')
        ]
    assert home.record.read_text() == f"local {made['one']}\n{made['one']}\n"


def test_the_copy_is_said_to_go_before_the_common_file_and_is_read_from_then_on(home: Home) -> None:
    common = home.write("config.toml", "[message]\nmax_bytes = 5\n")
    done = home.init(machine="")
    own = home.config / "vm.toml"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        f"config   {common} (kept)\n"
        f"config   {own} (written: a copy of {common}, which it goes before; this box reads that one no longer)\n"
        f"machine  this machine has no /etc/machine-id; {made_id(done)} was made and put into {own}\n"
    )
    assert home.loaded("vm.toml").max_text_bytes == 5
    shown = home.world.run("config", "path", cwd=home.world.base)
    assert shown.stdout == f"{own}\n"
    again = home.init(machine="")
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.startswith(f"config   {own} (kept)\nfolder ")


def test_a_common_file_that_takes_no_added_line_is_copied_by_the_person(home: Home) -> None:
    common = home.write("config.toml", "box = {}\n")
    done = home.init(machine="")
    assert set(home.files()) == {"config.toml"}
    assert re.sub("[0-9a-f]{32}", "ID", done.stderr).startswith(
        f"hint: this machine has no machine id, so no mail can be filed here; other boxes may read {common} too, so "
        f'put this into {home.config}/vm.toml, and let this box read that one:\n[box]\nmachine_id = "ID"\n'
    )
    assert done.returncode == 1
    assert not home.record.exists()


@pytest.mark.parametrize("name", ["config.toml", "far.toml"])
@pytest.mark.parametrize("there", [True, False])
def test_a_named_file_of_the_home_that_is_not_this_hosts_gets_no_id(name: str, there: bool, home: Home) -> None:
    path = home.write(name, "") if there else home.config / name
    done = home.init(machine="", SOTBUS_CONFIG=str(path))
    assert home.files() == {name: "" if there else template("single-box.toml")}
    assert f"put this into {home.config}/vm.toml, and let this box read that one:" in done.stderr
    assert "machine  " not in done.stdout


@pytest.mark.parametrize("there", [True, False])
def test_a_named_file_elsewhere_is_this_boxs_own(there: bool, home: Home) -> None:
    path = home.world.base / "mine.toml"
    if there:
        path.touch()
    done = home.init(machine="", SOTBUS_CONFIG=str(path))
    assert home.files() == {}
    if there:
        assert f"put this into {path}:" in done.stderr
        assert path.read_text() == ""
    else:
        assert config.load(str(path)).machine_id == made_id(done)


def test_a_host_file_without_an_id_is_kept_and_the_id_proposed(home: Home) -> None:
    own = home.write("vm.toml", "[message]\n")
    home.write("config.toml", "")
    done = home.init(machine="")
    assert home.files() == {"vm.toml": "[message]\n", "config.toml": ""}
    assert f"so no mail can be filed here; put this into {own}:\n[box]\nmachine_id = " in done.stderr


def test_a_host_whose_own_file_is_the_common_one_gets_no_id(home: Home) -> None:
    done = home.init("config", machine="")
    assert (done.returncode, home.files()) == (1, {})
    assert done.stderr == (
        f"FAILED: this machine has no machine id, and the file of a host of this name, {home.config}/config.toml, is "
        "other boxes' too\nhint: set SOT_SELF_HOST to another name\n"
    )
    assert home.init("config").returncode == 0


@pytest.mark.parametrize("host", ["a/b", "a\\b", "a\tb"])
def test_a_host_that_cannot_name_a_file_writes_none(host: str, home: Home) -> None:
    home.write("a_b.toml", "")
    done = home.init(host, machine="")
    assert (done.returncode, home.files()) == (1, {"a_b.toml": ""})
    assert "so it cannot name a file\nhint: set SOT_SELF_HOST to a plain host name\n" in done.stderr
    assert not home.world.home.exists()


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("", "\n[box]\nmachine_id = ID\n"),
        ("[box]", "[box]\nmachine_id = ID"),
        ("[box] # b\r\n[comm]\r\n", "[box] # b\nmachine_id = ID\r\n[comm]\r\n"),
        ('x = """\n[box]\n"""\n', 'x = """\n[box]\n"""\n\n[box]\nmachine_id = ID\n'),
        (f'[comm]\n# machine_id = "{OTHER}"\n', f'[comm]\n# machine_id = "{OTHER}"\n\n[box]\nmachine_id = ID\n'),
        (f'[box]\n#machine_id="{OTHER}" # x\n[comm]\n', "[box]\nmachine_id = ID # x\n[comm]\n"),
        ("[comm]\nlock_wait_s = 1", "[comm]\nlock_wait_s = 1\n[box]\nmachine_id = ID\n"),
        ("box = {}\n", None),
    ],
)
def test_a_machine_id_is_added_and_nothing_else_is_changed(text: str, changed: str | None) -> None:
    made = _with_machine_id(text, MACHINE)
    assert made == (changed and changed.replace("ID", f'"{MACHINE}"'))


# The record


def test_a_box_alone_makes_the_record_and_names_no_role(home: Home) -> None:
    assert f"record   {home.record} (created)\n" in home.init().stdout
    assert f"record   {home.record} (current)\n" in home.init().stdout
    assert home.record.read_text() == f"{LOCAL}\n{MACHINE}\n"


@pytest.mark.parametrize(
    ("text", "mount", "manager", "role"),
    [
        ('hub = "VM"', NFS4_MOUNT, NFS, "this box is the folder's hub"),
        (
            'hub = "far"',
            "ext4 /dev/vdb rw",
            LOCAL,
            "this box is the hub of its own folder, while far is the topology's",
        ),
        (
            'hub = "far"\nfolder = "own"',
            "overlay overlay rw",
            f"none@{MACHINE}",
            "this box is the hub of its own folder, while far is the topology's",
        ),
    ],
)
def test_a_hub_makes_and_renews_the_record(text: str, mount: str, manager: str, role: str, home: Home) -> None:
    home.write("vm.toml", f"[topology]\n{text}\n")
    home.mount(mount)
    for before, did in ((None, "created"), (None, "current"), (f"nfs4 before:/\n{MACHINE}\n", "replaced")):
        if before is not None:
            home.record.write_text(before)
        done = home.init()
        assert (done.returncode, done.stderr) == (0, "")
        assert f"record   {home.record} ({did}; {role})\n" in done.stdout
        assert home.record.read_text() == f"{manager}\n{MACHINE}\n"


def test_a_hub_is_refused_under_another_machines_record(home: Home) -> None:
    home.write("vm.toml", '[topology]\nhub = "vm"\n')
    home.mount(NFS3_MOUNT)
    assert home.init().returncode == 0
    home.record.write_text(f"{NFS}\n{OTHER}\n")
    done = home.init()
    assert done.returncode == 1
    assert done.stderr == (
        f"FAILED: the inbox lock record names {NFS}, written by machine {OTHER}, a different lock manager from this "
        f"hub's none@{MACHINE}: stop every daemon on this comm folder, delete {home.record}, then start the hub\n"
    )
    assert home.record.read_text() == f"{NFS}\n{OTHER}\n"


def test_a_guest_makes_no_record_and_says_what_to_run_on_the_hub(home: Home) -> None:
    home.write("config.toml", '[topology]\nhub = "far"\n')
    home.mount(NFS4_MOUNT)
    done = home.init()
    assert done.returncode == 0
    assert f"record   {home.record} (left to far)\n" in done.stdout
    assert done.stderr == (
        f"hint: this box is a guest of far, and there is no inbox lock record at {home.record}; on far: {RUN}\n"
    )
    assert not home.record.exists()


def test_a_guest_of_an_address_makes_no_record_either(home: Home) -> None:
    home.mount(NFS4_MOUNT)
    done = home.init(SOT_RELAY_ENDPOINT="ssh:hub")
    assert done.returncode == 0
    assert f"record   {home.record} (left to the hub at $SOT_RELAY_ENDPOINT)\n" in done.stdout
    assert not home.record.exists()


@pytest.mark.parametrize("record", [f"{NFS}\n{OTHER}\n", f"{NFS}\n{MACHINE}\n", f"{LOCAL}\n{MACHINE}\n", ""])
@pytest.mark.parametrize("mount", [NFS4_MOUNT, NFS3_MOUNT])
def test_a_guest_leaves_a_record_alone_and_says_whether_it_may_append(record: str, mount: str, home: Home) -> None:
    home.write("config.toml", '[topology]\nhub = "far"\n')
    home.mount(mount)
    home.world.folder.ensure()
    home.record.write_text(record)
    before = home.record.stat()
    done = home.init()
    assert done.returncode == 0
    may = record.startswith(NFS) and mount == NFS4_MOUNT
    assert f"(left to far{'; this box may append under it' if may else ''})\n" in done.stdout
    assert done.stderr.startswith("hint: this box is a guest of far, and ") is not may
    after = home.record.stat()
    assert (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns)


def test_a_guest_that_cannot_read_the_record_says_so(home: Home) -> None:
    home.write("config.toml", '[topology]\nhub = "far"\n')
    home.mount(NFS4_MOUNT)
    home.world.folder.ensure()
    home.record.mkdir()
    done = home.init()
    assert (done.returncode, done.stderr) == (
        0,
        f"hint: {home.record} cannot be read: it is not a regular file; on far: look at it; then {RUN}\n",
    )
    assert home.record.is_dir()


# A hub and a guest with one home


def test_a_hub_and_a_guest_of_one_home_file_to_each_other(home: Home) -> None:
    home.write("config.toml", '[topology]\nhub = "hub-host"\n')
    home.mount(NFS4_MOUNT)
    world = home.world

    def command(host: str, machine: str, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return world.sotbus(
            name,
            *words,
            env={"SOT_SELF_HOST": host, "SOT_COMM_TEST_HOST": host, "TEST_MACHINE_ID": machine},
        )

    for host, machine, name in (("hub-host", MACHINE, "a"), ("guest-host", OTHER, "b")):
        assert command(host, machine, name, "join").returncode == 0
    done = command("guest-host", OTHER, "b", "send", "@a-hub-host", "early")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "FAILED -> @a-hub-host: this box cannot take the inbox lock itself, and no daemon is reachable to file it\n"
        f"hint: this box is a guest of hub-host, and there is no inbox lock record at {home.record}; "
        f"on hub-host: {RUN}\n"
    )
    done = command("hub-host", MACHINE, "a", "send", "@b-guest-host", "early")
    assert (done.returncode, done.stderr.splitlines()[1]) == (
        1,
        f"hint: no inbox lock record at {home.record}, and this box is the folder's hub; {RUN}",
    )
    assert not home.record.exists()
    assert home.init("hub-host").returncode == 0
    assert command("guest-host", OTHER, "b", "send", "@a-hub-host", "one").stdout == "  filed -> @a-hub-host\n"
    assert command("hub-host", MACHINE, "a", "send", "@b-guest-host", "two").stdout == "  filed -> @b-guest-host\n"
    home.mount(NFS3_MOUNT)
    done = command("guest-host", OTHER, "b", "send", "@a-hub-host", "three")
    assert (done.returncode, done.stderr.splitlines()[1]) == (
        1,
        f"hint: this box is a guest of hub-host, and the inbox lock record names {NFS} and this box's lock manager is "
        f"none@{OTHER}; mount filer.example:/export here as hub-host does (NFS v4 with local_lock=none), or send from "
        "hub-host",
    )
    assert len(world.inbox("a-hub-host").read_text().splitlines()) == 1


def test_a_guest_keeps_the_wrappers_that_its_hub_wrote(home: Home) -> None:
    home.write("config.toml", '[topology]\nhub = "far"\n')
    home.mount(NFS4_MOUNT)
    send = Path(home.world.folder.bin) / "comm-send.sh"
    assert home.init().returncode == 0
    assert MARK in send.read_text()
    send.write_text(f"#!/bin/sh\n{MARK}\nexec /elsewhere/python -m sotbus comm send\n")
    os.unlink(home.world.folder.bin + "/comm-poll.sh")
    assert home.init().returncode == 0
    assert "/elsewhere/python" in send.read_text()
    assert os.path.exists(home.world.folder.bin + "/comm-poll.sh")
    assert home.init("far").returncode == 0
    assert "/elsewhere/python" not in send.read_text()
    assert not [name for name in os.listdir(home.world.folder.bin) if ".tmp." in name]
