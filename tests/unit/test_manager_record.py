"""``inbox-lock-manager``: who writes it, who keeps it, and who may append under it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
from pathlib import Path

import pytest
from world import EXT4, MACHINE, World

from sotbus.comm import manager_record
from sotbus.comm.box import Box
from sotbus.comm.folder import Folder as CommFolder
from sotbus.comm.manager_record import (
    APPEND,
    CREATED,
    CURRENT,
    FORWARD,
    LEFT,
    REFUSE,
    REPLACED,
    ManagerRecord,
    allows,
    establish,
    reads_under_lock,
    refusal,
    role_of,
    route,
    writer_manager,
)
from sotbus.comm.topology import GUEST, HUB, NO_TOPOLOGY, Topology
from sotbus.errors import FilingFailed

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

FORK = multiprocessing.get_context("fork")
OTHER = "f" * 32
LOCAL = f"local {MACHINE}"
NFS = "nfs4 filer.example:/export"
NFS4_MOUNT = "nfs4 filer.example:/export rw,vers=4.2,local_lock=none"
NFS3_MOUNT = "nfs filer.example:/export rw,vers=3,local_lock=none"
HERE_NONE = f"none@{MACHINE}"
CANNOT = "this box cannot take the inbox lock itself, and no daemon is reachable to file it"


class Folder:
    """A comm folder on a mount that the test tells, and its record."""

    def __init__(self, world: World) -> None:
        world.folder.ensure()
        self.world = world
        self.folder = world.folder
        self.path = Path(world.folder.manager_record)

    def mount(self, what: str) -> None:
        """Mount the comm folder as something else: ``fstype source super-options``."""
        self.world.mountinfo.write_text(EXT4 + f"22 21 0:50 / {self.world.home} rw,relatime - {what}\n")

    def facts(self) -> tuple[int, ...] | None:
        """What the record is, but for the time it was read."""
        if not self.path.exists():
            return None
        now = self.path.lstat()
        return now.st_ino, now.st_mode, now.st_size, now.st_mtime_ns, now.st_ctime_ns

    def leaves(self) -> set[str]:
        return set(os.listdir(self.world.home)) - {"inbox", "self", "read"}

    def refusal(self, box: Box, *, replace: bool = True) -> str:
        """The words of a hub that may not use the record, which stays as it is."""
        before = self.facts()
        with pytest.raises(FilingFailed) as caught:
            establish(self.folder, box, replace=replace)
        assert self.facts() == before
        assert self.leaves() <= {self.path.name}
        return str(caught.value)


@pytest.fixture
def folder(world: World) -> Folder:
    return Folder(world)


def foreign(folder: Folder, record: str, writer: str, own: str) -> str:
    return (
        f"the inbox lock record names {record}, written by {writer}, a different lock manager from this hub's {own}: "
        f"stop every daemon on this comm folder, delete {folder.path}, then start the hub"
    )


# ---- the hub's rule


@pytest.mark.spec("S61", "S62", "S66")
@pytest.mark.parametrize(
    ("mount", "manager"),
    [
        ("ext4 /dev/vdb rw", LOCAL),
        ("nfs4 filer.example:/export rw,vers=4.2,local_lock=none", NFS),
        ("nfs4 filer.example:/export rw,vers=4.2,local_lock=all", f"none@{MACHINE}"),
        ("nfs filer.example:/export rw,vers=3,local_lock=none", f"none@{MACHINE}"),
        ("fuse.sshfs u@far:/ rw", f"none@{MACHINE}"),
        ("overlay overlay rw", f"none@{MACHINE}"),
        ("tmpfs tmpfs rw", f"none@{MACHINE}"),
    ],
)
def test_a_hub_records_its_manager_and_its_machine(mount: str, manager: str, folder: Folder) -> None:
    folder.mount(mount)
    assert establish(folder.folder, folder.world.box(), replace=True) == CREATED
    assert folder.path.read_text() == f"{manager}\n{MACHINE}\n"
    assert folder.path.stat().st_mode & 0o777 == 0o600
    assert folder.leaves() == {"inbox-lock-manager"}
    assert writer_manager(folder.folder, folder.world.box(), Topology("vm")).identity == manager


@pytest.mark.spec("S6", "S66")
def test_a_record_is_synced_and_then_linked(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(fd: int) -> None:
        log.append("fsync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real_fsync(fd)

    def link(source: str, target: str) -> None:
        log.append("link " + os.path.basename(source))
        real_link(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    establish(folder.folder, folder.world.box(), replace=True)
    temp = log[0].removeprefix("fsync ")
    assert re.fullmatch(rf"\.inbox-lock-manager\.{MACHINE}\.{os.getpid()}\.\d+", temp)
    assert log == [f"fsync {temp}", f"link {temp}"]


@pytest.mark.spec("S66")
@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("rest", [f"\n{MACHINE}\n", f"\n{OTHER}\n", "\n", "", "\n\nmore\n"])
def test_a_record_that_names_this_manager_is_kept_whoever_wrote_it(rest: str, replace: bool, folder: Folder) -> None:
    folder.path.write_text(LOCAL + rest)
    before = folder.facts()
    assert establish(folder.folder, folder.world.box(), replace=replace) == CURRENT
    assert folder.facts() == before


@pytest.mark.spec("S66")
def test_a_hub_replaces_what_its_own_machine_wrote_before_a_remount(folder: Folder) -> None:
    folder.path.write_text(f"{NFS}\n{MACHINE}\n")
    before = folder.path.stat().st_ino
    assert establish(folder.folder, folder.world.box(), replace=True) == REPLACED
    assert folder.path.read_text() == f"{LOCAL}\n{MACHINE}\n"
    assert folder.path.stat().st_ino != before
    assert folder.leaves() == {"inbox-lock-manager"}


@pytest.mark.spec("S66")
def test_a_command_does_not_replace_what_its_machine_wrote_and_says_who_does(folder: Folder) -> None:
    folder.path.write_text(f"{NFS}\n{MACHINE}\n")
    assert folder.refusal(folder.world.box(), replace=False) == (
        f"this hub's inbox lock is now {LOCAL} but its record says {NFS}: "
        "restart this daemon to re-record it after the remount"
    )


@pytest.mark.spec("S66")
@pytest.mark.parametrize(
    ("writer", "said"),
    [
        (f"\n{OTHER}\n", f"machine {OTHER}"),
        ("\n\n", "an unknown machine"),
        ("\n", "an unknown machine"),
        ("", "an unknown machine"),
    ],
)
@pytest.mark.parametrize("manager", [f"local {OTHER}", NFS, LOCAL + " ", LOCAL + "\r", LOCAL.upper(), "none"])
def test_another_machines_record_is_refused_with_the_recovery(
    manager: str, writer: str, said: str, folder: Folder
) -> None:
    folder.path.write_bytes((manager + writer).encode())
    assert folder.refusal(folder.world.box()) == foreign(folder, manager, said, LOCAL)


@pytest.mark.spec("S66")
def test_an_empty_record_is_an_unknown_machines(folder: Folder) -> None:
    folder.path.touch()
    assert folder.refusal(folder.world.box()) == foreign(folder, "", "an unknown machine", LOCAL)


@pytest.mark.spec("S63", "S66")
@pytest.mark.parametrize("record", [None, f"none\n{MACHINE}\n", "none\n\n", f"{LOCAL}\n{MACHINE}\n"])
@pytest.mark.parametrize("machine", [None, ""])
def test_a_machine_without_an_id_writes_no_record_and_never_appends(
    machine: str | None, record: str | None, folder: Folder
) -> None:
    if record is not None:
        folder.path.write_text(record)
    box = folder.world.box(machine=machine)
    assert folder.refusal(box) == (
        f"this hub has no machine id, so it cannot own the inbox lock record at {folder.path}: "
        "give this machine a machine id (/etc/machine-id on Linux), then restart the daemon"
    )
    assert folder.path.exists() is (record is not None)
    with pytest.raises(FilingFailed):
        writer_manager(folder.folder, box, NO_TOPOLOGY)
    assert folder.path.exists() is (record is not None)


def test_where_the_mounts_cannot_be_told_nothing_is_recorded(folder: Folder) -> None:
    folder.world.mountinfo.unlink()
    assert folder.refusal(folder.world.box()) == (
        f"the mount of {folder.folder.inboxes} cannot be told, so its inbox lock is unknown"
    )
    assert not folder.path.exists()


@pytest.mark.spec("S66")
def test_a_folder_in_the_records_place_is_refused(folder: Folder) -> None:
    folder.path.mkdir()
    assert folder.refusal(folder.world.box()) == (
        f"the inbox lock record at {folder.path} cannot be used: it is not a regular file"
    )
    assert folder.path.is_dir()


def test_a_dangling_link_in_the_records_place_is_not_written_through(folder: Folder) -> None:
    folder.path.symlink_to("nowhere")
    with pytest.raises(FilingFailed, match="File exists"):
        establish(folder.folder, folder.world.box(), replace=True)
    assert folder.path.is_symlink()
    assert folder.leaves() == {"inbox-lock-manager"}


@pytest.mark.parametrize(("call", "number"), [("fsync", errno.EIO), ("link", errno.EPERM)])
def test_a_record_that_cannot_be_made_leaves_nothing(
    call: str, number: int, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    assert folder.refusal(folder.world.box()) == (
        f"the inbox lock record at {folder.path} cannot be used: {os.strerror(number)}"
    )
    assert folder.leaves() == set()


def test_a_record_that_cannot_be_replaced_leaves_no_temp_file(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.path.write_text(f"{NFS}\n{MACHINE}\n")

    def rename(source: str, target: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "rename", rename)
    folder.refusal(folder.world.box())


@pytest.mark.spec("S66")
@pytest.mark.parametrize("machine", [MACHINE, OTHER])
def test_a_record_that_appears_before_the_link_is_decided_on(
    machine: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def link(source: str, target: str) -> None:
        folder.path.write_text(f"local {machine}\n{machine}\n")
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    if machine == MACHINE:
        assert establish(folder.folder, folder.world.box(), replace=True) == CURRENT
    else:
        with pytest.raises(FilingFailed) as caught:
            establish(folder.folder, folder.world.box(), replace=True)
        assert str(caught.value) == foreign(folder, f"local {OTHER}", f"machine {OTHER}", LOCAL)
    assert folder.path.read_text() == f"local {machine}\n{machine}\n"
    assert folder.leaves() == {"inbox-lock-manager"}


@pytest.mark.spec("S66")
@pytest.mark.parametrize("machines", [1, 2])
def test_of_20_processes_exactly_one_creates_the_record(machines: int, folder: Folder) -> None:
    start = FORK.Barrier(20)
    answers = FORK.SimpleQueue()
    real_read = manager_record.read

    def work(number: int) -> None:
        asked: list[ManagerRecord | None] = []

        def read(folder: CommFolder) -> ManagerRecord | None:
            record = real_read(folder)
            if not asked:  # each has seen that there is none before any of them links
                asked.append(record)
                start.wait(60)
            return record

        manager_record.read = read
        machine = (MACHINE, OTHER)[number % machines]
        try:
            answers.put((machine, establish(folder.folder, folder.world.box(machine=machine), replace=True)))
        except FilingFailed as error:
            answers.put((machine, str(error)))

    processes = [FORK.Process(target=work, args=(number,)) for number in range(20)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert [process.exitcode for process in processes] == [0] * 20
    got = [answers.get() for _ in processes]
    manager, writer = folder.path.read_text().splitlines()
    assert manager == f"local {writer}"
    assert got.count((writer, CREATED)) == 1
    assert got.count((writer, CURRENT)) == 20 // machines - 1
    for machine, answer in got:
        if machine != writer:
            assert answer == foreign(folder, manager, f"machine {writer}", f"local {machine}")
    assert folder.leaves() == {"inbox-lock-manager"}


# ---- who may append


@pytest.mark.spec("S63")
@pytest.mark.parametrize(
    ("manager", "own", "may"),
    [
        (LOCAL, LOCAL, True),
        (f"none@{MACHINE}", f"none@{MACHINE}", True),
        (NFS, NFS, True),
        ("none", "none", False),
        ("", "", False),
        (LOCAL, None, False),
        (LOCAL, f"local {OTHER}", False),
        (LOCAL + " ", LOCAL, False),
        (NFS + "/", NFS, False),
    ],
)
def test_a_process_appends_only_under_its_own_manager_and_never_under_none(
    manager: str, own: str | None, may: bool
) -> None:
    assert allows(ManagerRecord(manager, MACHINE), own) is may
    assert allows(None, own) is False


@pytest.mark.spec("S62", "S63")
def test_a_reader_of_the_record_takes_only_line_1(folder: Folder) -> None:
    folder.path.write_text(f"{LOCAL}\n{OTHER}\nand more\n")
    assert writer_manager(folder.folder, folder.world.box(), Topology("vm")).identity == LOCAL


@pytest.mark.spec("S61", "S66")
def test_a_command_on_a_fresh_folder_stands_in_for_the_hub(folder: Folder) -> None:
    assert writer_manager(folder.folder, folder.world.box(), NO_TOPOLOGY).identity == LOCAL
    assert folder.path.read_text() == f"{LOCAL}\n{MACHINE}\n"


@pytest.mark.spec("S63", "S66")
def test_the_second_box_of_one_folder_is_refused_with_the_recovery(folder: Folder) -> None:
    writer_manager(folder.folder, folder.world.box(), NO_TOPOLOGY)
    with pytest.raises(FilingFailed) as caught:
        writer_manager(folder.folder, folder.world.box("far", OTHER), NO_TOPOLOGY)
    assert str(caught.value) == CANNOT
    assert caught.value.hint == foreign(folder, LOCAL, f"machine {MACHINE}", f"local {OTHER}")
    assert folder.path.read_text() == f"{LOCAL}\n{MACHINE}\n"


@pytest.mark.spec("S63", "S66")
def test_a_stand_in_does_not_replace_its_machines_record_after_a_remount(folder: Folder) -> None:
    writer_manager(folder.folder, folder.world.box(), NO_TOPOLOGY)
    folder.mount("nfs4 filer.example:/export rw,vers=4.2,local_lock=none")
    with pytest.raises(FilingFailed) as caught:
        writer_manager(folder.folder, folder.world.box(), NO_TOPOLOGY)
    assert str(caught.value) == CANNOT
    assert caught.value.hint == (
        f"this hub's inbox lock is now {NFS} but its record says {LOCAL}: "
        "restart this daemon to re-record it after the remount; or run: sotbus init"
    )


@pytest.mark.spec("S63")
def test_a_box_without_a_machine_id_is_told_how_to_get_one(folder: Folder) -> None:
    with pytest.raises(FilingFailed) as caught:
        writer_manager(folder.folder, folder.world.box(machine=None), NO_TOPOLOGY)
    assert str(caught.value) == CANNOT
    assert caught.value.hint == (
        f"this hub has no machine id, so it cannot own the inbox lock record at {folder.path}: "
        "give this machine a machine id (/etc/machine-id on Linux), then restart the daemon; "
        "or run: sotbus init, which can put one into the config"
    )


def test_a_record_that_cannot_be_read_is_a_refusal_with_the_reason(folder: Folder) -> None:
    folder.path.mkdir()
    with pytest.raises(FilingFailed) as caught:
        writer_manager(folder.folder, folder.world.box(), NO_TOPOLOGY)
    assert str(caught.value) == CANNOT
    assert caught.value.hint == f"the inbox lock record at {folder.path} cannot be read: it is not a regular file"


def test_a_stand_in_that_loses_the_race_to_another_machine_says_so(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def link(source: str, target: str) -> None:
        folder.path.write_text(f"local {OTHER}\n{OTHER}\n")
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(FilingFailed) as caught:
        writer_manager(folder.folder, folder.world.box(), NO_TOPOLOGY)
    assert caught.value.hint == foreign(folder, f"local {OTHER}", f"machine {OTHER}", LOCAL)


@pytest.mark.spec("S73")
def test_a_box_that_appends_itself_reads_under_the_lock_and_no_other(folder: Folder) -> None:
    box = folder.world.box()
    assert reads_under_lock(folder.folder, folder.world.box(machine=None)) is None
    establish(folder.folder, box, replace=True)
    manager = reads_under_lock(folder.folder, box)
    assert manager is not None
    assert manager.identity == LOCAL
    assert reads_under_lock(folder.folder, folder.world.box(machine=OTHER)) is None
    assert reads_under_lock(folder.folder, folder.world.box(machine=None)) is None
    folder.path.unlink()
    folder.path.mkdir()
    with pytest.raises(OSError, match="not a regular file"):
        reads_under_lock(folder.folder, box)


# ---- a box in a topology


def hint(folder: Folder, topology: Topology, *, box: Box | None = None) -> str:
    """Why a command may not append, which changes nothing; the answer itself is the page's words."""
    before = folder.facts()
    with pytest.raises(FilingFailed) as caught:
        writer_manager(folder.folder, box or folder.world.box(), topology)
    assert str(caught.value) == CANNOT
    assert (folder.facts(), folder.leaves() - {folder.path.name}) == (before, set())
    return caught.value.hint


@pytest.mark.parametrize("record", [None, f"{NFS}\n{OTHER}\n", f"local {MACHINE}\n{MACHINE}\n", "", "none\n\n"])
@pytest.mark.parametrize("machine", [MACHINE, None])
@pytest.mark.parametrize("mount", [NFS4_MOUNT, NFS3_MOUNT, "overlay overlay rw"])
@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("topology", [Topology("far"), Topology(relayed=True)])
def test_a_guest_never_writes_the_record(
    topology: Topology, replace: bool, mount: str, machine: str | None, record: str | None, folder: Folder
) -> None:
    folder.mount(mount)
    if record is not None:
        folder.path.write_text(record)
    before = folder.facts()
    box = folder.world.box(machine=machine)
    assert establish(folder.folder, box, replace=replace, topology=topology) == LEFT
    if record is None or not (record.startswith(NFS) and mount == NFS4_MOUNT):
        hint(folder, topology, box=box)
    assert folder.facts() == before
    assert folder.leaves() <= {folder.path.name}


@pytest.mark.spec("S65", "S66")
@pytest.mark.parametrize("topology", [Topology("VM"), Topology("far", own_folder=True)])
@pytest.mark.parametrize(
    ("mount", "manager"), [(NFS4_MOUNT, NFS), (NFS3_MOUNT, HERE_NONE), ("ext4 /dev/vdb rw", LOCAL)]
)
def test_a_hub_by_topology_makes_renews_and_uses_the_record_on_any_mount(
    mount: str, manager: str, topology: Topology, folder: Folder
) -> None:
    folder.mount(mount)
    box = folder.world.box()
    assert establish(folder.folder, box, replace=True, topology=topology) == CREATED
    assert establish(folder.folder, box, replace=True, topology=topology) == CURRENT
    assert writer_manager(folder.folder, box, topology).identity == manager
    folder.path.write_text(f"nfs4 before:/\n{MACHINE}\n")
    assert establish(folder.folder, box, replace=True, topology=topology) == REPLACED
    assert folder.path.read_text() == f"{manager}\n{MACHINE}\n"


@pytest.mark.spec("S65", "S66")
def test_a_linked_box_makes_the_record_of_the_folder_on_its_own_disk(folder: Folder) -> None:
    box, topology = folder.world.box(), Topology("far")
    assert establish(folder.folder, box, replace=True, topology=topology) == CREATED
    assert writer_manager(folder.folder, box, topology).identity == LOCAL


@pytest.mark.spec("S66")
def test_a_box_that_owns_its_folder_on_nfs_is_refused_under_another_machines_record(folder: Folder) -> None:
    folder.mount(NFS3_MOUNT)
    folder.path.write_text(f"{NFS}\n{OTHER}\n")
    box, topology = folder.world.box(), Topology("far", own_folder=True)
    said = foreign(folder, NFS, f"machine {OTHER}", HERE_NONE)
    with pytest.raises(FilingFailed) as caught:
        establish(folder.folder, box, replace=True, topology=topology)
    assert str(caught.value) == said
    assert hint(folder, topology) == said


@pytest.mark.spec("S63")
def test_a_guest_whose_manager_the_record_names_appends_itself(folder: Folder) -> None:
    folder.mount(NFS4_MOUNT)
    folder.path.write_text(f"{NFS}\n{OTHER}\n")
    assert writer_manager(folder.folder, folder.world.box(), Topology("far")).identity == NFS
    assert writer_manager(folder.folder, folder.world.box(machine=None), Topology("far")).identity == NFS


@pytest.mark.spec("S63")
@pytest.mark.parametrize(
    ("topology", "who"),
    [
        (Topology("vm"), "this box is the folder's hub"),
        (Topology("far"), "this box is the hub of its own folder, while far is the topology's"),
        (
            Topology(relayed=True),
            "this box is the hub of its own folder, while the hub at $SOT_RELAY_ENDPOINT is the topology's",
        ),
    ],
)
def test_a_command_of_a_topology_makes_no_record_and_says_what_does(
    topology: Topology, who: str, folder: Folder
) -> None:
    assert hint(folder, topology) == (
        f"no inbox lock record at {folder.path}, and {who}; run: sotbus init (or start its node)"
    )
    assert folder.leaves() == set()


@pytest.mark.spec("S63")
def test_a_guest_without_a_record_is_told_what_the_hub_has_to_run(folder: Folder) -> None:
    folder.mount(NFS4_MOUNT)
    assert hint(folder, Topology("far")) == (
        f"this box is a guest of far, and there is no inbox lock record at {folder.path}; "
        "on far: run: sotbus init (or start its node)"
    )


@pytest.mark.spec("S63")
@pytest.mark.parametrize(
    ("record", "remedy"),
    [
        (NFS, "mount filer.example:/export here as far does (NFS v4 with local_lock=none), or send from far"),
        (
            f"none@{OTHER}",
            "on far: mount the folder as NFS v4 with local_lock=none on far and here; then run: sotbus init "
            "(or start its node); or send from far",
        ),
        (
            f"local {OTHER}",
            "send from far, if the folder is on its own disk; else see what sotbus doctor says there",
        ),
        ("ceph mon:/", "mount the folder here as far does, with the same plugins, or send from far"),
    ],
)
def test_a_guest_under_another_manager_is_told_both_and_what_to_do(record: str, remedy: str, folder: Folder) -> None:
    folder.mount(NFS3_MOUNT)
    folder.path.write_text(f"{record}\n{OTHER}\n")
    assert hint(folder, Topology("far")) == (
        f"this box is a guest of far, and the inbox lock record names {record} and this box's lock manager is "
        f"{HERE_NONE}; {remedy}"
    )


def test_a_guest_under_a_record_that_names_nothing_is_told_so(folder: Folder) -> None:
    folder.mount(NFS3_MOUNT)
    folder.path.touch()
    assert hint(folder, Topology("far")) == (
        f"this box is a guest of far, and the inbox lock record names nothing and this box's lock manager is "
        f"{HERE_NONE}; on far: delete {folder.path}; then run: sotbus init (or start its node)"
    )


def test_a_box_whose_mount_cannot_be_told_counts_as_a_guest_and_says_so(folder: Folder) -> None:
    folder.world.mountinfo.unlink()
    assert hint(folder, Topology("far")) == (
        f"this box counts as a guest of far, because the mount of {folder.folder.inboxes} cannot be told"
    )


@pytest.mark.spec("S66")
def test_a_hub_whose_folder_was_remounted_is_told_to_renew_its_record(folder: Folder) -> None:
    folder.path.write_text(f"{NFS}\n{MACHINE}\n")
    assert hint(folder, Topology("vm")) == (
        f"this hub's inbox lock is now {LOCAL} but its record says {NFS}: "
        "restart this daemon to re-record it after the remount; or run: sotbus init"
    )


def test_a_remount_changes_the_role_at_the_next_filing(folder: Folder) -> None:
    box, topology = folder.world.box(), Topology("far")
    folder.mount(NFS3_MOUNT)
    assert role_of(folder.folder, box, topology) == GUEST
    assert hint(folder, topology).startswith("this box is a guest of far, and there is no inbox lock record")
    folder.mount("ext4 /dev/vdb rw")
    assert role_of(folder.folder, box, topology) == HUB
    assert "this box is the hub of its own folder" in hint(folder, topology)
    assert establish(folder.folder, box, replace=True, topology=topology) == CREATED
    assert writer_manager(folder.folder, box, topology).identity == LOCAL
    folder.mount(NFS4_MOUNT)
    assert role_of(folder.folder, box, topology) == GUEST
    assert "names local" in hint(folder, topology)
    assert establish(folder.folder, box, replace=True, topology=topology) == LEFT


# ---- the route of one filing


@pytest.mark.spec("S63", "S66")
@pytest.mark.parametrize("role", [HUB, GUEST])
@pytest.mark.parametrize("forwarded", [False, True])
@pytest.mark.parametrize(
    ("record", "own", "may"),
    [
        (NFS, NFS, True),
        (LOCAL, LOCAL, True),
        (HERE_NONE, HERE_NONE, True),
        ("none", "none", False),
        ("", "", False),
        (NFS, HERE_NONE, False),
        (NFS, None, False),
        (None, NFS, False),
    ],
)
def test_what_may_be_appended_is_and_a_guest_forwards_the_rest_once(
    record: str | None, own: str | None, may: bool, forwarded: bool, role: str
) -> None:
    kept = None if record is None else ManagerRecord(record, OTHER)
    otherwise = FORWARD if role == GUEST and not forwarded else REFUSE
    assert route(kept, own, role, forwarded=forwarded) == (APPEND if may else otherwise)
    if not forwarded:
        assert route(kept, own, role) == route(kept, own, role, forwarded=False)


@pytest.mark.spec("S66")
def test_each_refusal_of_a_filing_has_the_pages_words(folder: Folder) -> None:
    box = folder.world.box()
    theirs = ManagerRecord(NFS, OTHER)
    ours = ManagerRecord(NFS, MACHINE)
    assert refusal(folder.folder, box, LOCAL, theirs, GUEST) == (
        "a forwarded frame reached a daemon that is not its folder's hub (vm)"
    )
    assert refusal(folder.folder, box, LOCAL, None) == (
        f"no inbox lock record at {folder.path}: restart this daemon to write it"
    )
    assert refusal(folder.folder, box, LOCAL, theirs) == foreign(folder, NFS, f"machine {OTHER}", LOCAL)
    assert refusal(folder.folder, box, LOCAL, ours) == (
        f"this hub's inbox lock is now {LOCAL} but its record says {NFS}: "
        "restart this daemon to re-record it after the remount"
    )
    assert refusal(folder.folder, box, "none", None) == (
        f"this hub has no machine id, so it cannot own the inbox lock record at {folder.path}: "
        "give this machine a machine id (/etc/machine-id on Linux), then restart the daemon"
    )
