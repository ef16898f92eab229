"""The export mounted in other ways: what each mount is taken for, and what a session there may do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from lab.box import Box
from lab.in_box_sharing import ask, refused, session
from lab.job import Job
from lab.lab import Lab
from lab.server import EXPORT, SERVER_ADDRESS

from sotbus.comm.lock_manager import RECOVER_LOST_LOCKS

pytestmark = pytest.mark.lab

MANAGER = f"nfs4 {SERVER_ADDRESS}:/"
NOT_HERE = "this box cannot take the inbox lock itself, and no daemon is reachable to file it"
ATTEMPTS = 3
COMMAND_S = 120
"""A cold command takes seconds in the guest; ``doctor --peer`` some 30 s, on a busy machine a multiple."""

MEET_S = 300
"""How long ``doctor --peer`` waits for the other box, whose start and probe of its own lock are in that time."""

UNDECIDED = ("nothing is proved", "the proof was not finished", "it did not go on for", "not tried, because")
"""Of these one is in the text of a check that a busy box left open."""

FACTS = """
from sotbus.comm.box import Box
from sotbus.comm.holder import own_record
from sotbus.comm.identity import fresh_read_doubt
from sotbus.comm.lock_manager import inbox_lock_manager

os.makedirs(path, exist_ok=True)
box = Box.here({})
manager = inbox_lock_manager(path, box)
doubt = fresh_read_doubt(path, box)
result = {
    "identity": manager.identity,
    "fresh": manager.proves_fresh_read,
    "fences": manager.fences_data,
    "doubt": doubt or "",
    "record": str(own_record(box, fresh=doubt is None)),
}
"""


def at(mount: str, shared: str) -> str:
    """The folder below another mount of the export."""
    return shared.replace("/nfs", mount, 1)


def nfs3(box: Box) -> str:
    box.mount_nfs3("/nfs3")
    return "/nfs3"


def nocto(box: Box) -> str:
    box.mount_nfs4("/nocto", "hard,nocto")
    return "/nocto"


def bound(box: Box) -> str:
    box.mount("/bound", "/nfs", "bind")
    return "/bound"


def over_another(box: Box) -> str:
    box.mount("/over", "tmpfs", "tmpfs")
    box.mount_nfs4("/over")
    return "/over"


def under_another(box: Box) -> str:
    box.mount_nfs4("/under")
    box.mount("/under", "tmpfs", "tmpfs")
    return "/under"


def over_nfs3(box: Box) -> str:
    box.mount_nfs3("/mixed")
    box.mount_nfs4("/mixed")
    return "/mixed"


def under_nfs3(box: Box) -> str:
    box.mount_nfs4("/mixed")
    box.mount_nfs3("/mixed")
    return "/mixed"


MOUNTS: dict[Callable[[Box], str], tuple[str, bool]] = {
    nfs3: ("none@", True),
    nocto: (MANAGER, False),
    bound: (MANAGER, True),
    over_another: (MANAGER, True),
    under_another: ("none@", True),
    over_nfs3: (MANAGER, True),
    under_nfs3: ("none@", True),
}
"""Each way to mount, the identity that it gives, ``none@`` with the box's machine id, and whether reads are fresh."""


@pytest.mark.parametrize("mount", MOUNTS, ids=lambda mount: mount.__name__)
def test_the_lock_manager_is_that_of_the_uppermost_mount(lab: Lab, shared: str, mount: Callable[[Box], str]) -> None:
    a = lab.box("a")
    identity, fresh = MOUNTS[mount]
    facts = a.call(FACTS, path=at(mount(a), shared))
    assert facts["identity"] == (identity + a.machine_id if identity == "none@" else identity)
    assert facts["fresh"] == fresh
    assert facts["fences"]
    proof = facts["record"].split(":")
    assert ("-" in proof) == (not fresh)
    assert proof[1] == (a.machine_id if fresh else "-")


def joined(box: Box, shared: str, name: str, **environ: str) -> Job:
    made = session(box, shared, name, **environ)
    assert ask(made, "join") == name
    return made


@pytest.mark.parametrize("mount", [bound, over_another, over_nfs3, nocto], ids=lambda mount: mount.__name__)
def test_both_mounts_of_one_export_file_into_one_inbox(lab: Lab, shared: str, mount: Callable[[Box], str]) -> None:
    a = lab.box("a")
    there = joined(a, at(mount(a), shared), "there")
    usual, other = joined(a, shared, "usual"), joined(lab.box("b"), shared, "other")
    for sender in (there, usual, other):
        ask(sender, "send", "usual", "hello")
    assert ask(there, "record") == ask(other, "record") == MANAGER
    assert ask(usual, "poll", "usual") == ["hello"] * 3


def sotbus(box: Box, shared: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A real command, in the project and for the session of ``session(box, shared, "me")``."""
    project, home = f"{shared}/projects/me", f"{shared}/comm"
    pin = {"SOT_COMM_HOME": home, "SOT_COMM_SELF_FILE": f"{home}/self/pin-me.txt", "PWD": project}
    return box.run([sys.executable, "-m", "sotbus", *words], {**pin, **environ}, project, timeout_s=COMMAND_S)


def test_a_guest_whose_locks_are_its_own_files_nothing_and_is_told_what_to_mount(lab: Lab, shared: str) -> None:
    a, b = lab.box("a"), lab.box("b")
    reader = joined(b, shared, "reader")
    ask(reader, "send", "reader", "a note to myself")
    there = at(nfs3(a), shared)
    joined(a, there, "me")
    a.call("open(path, 'w').write(text)", path="/guest.toml", text='[topology]\nhub = "b"\n')
    done = sotbus(a, there, "send", "@reader", "hello", SOTBUS_CONFIG="/guest.toml")
    assert done.returncode == 1
    failed, hint = [line for line in done.stderr.splitlines() if line.startswith(("FAILED", "hint"))]
    assert failed == f"FAILED -> @reader: {NOT_HERE}"
    assert f"this box's lock manager is none@{a.machine_id}" in hint
    assert f"mount {SERVER_ADDRESS}:/ here as b does (NFS v4 with local_lock=none), or send from b" in hint
    assert ask(reader, "poll", "reader") == ["a note to myself"]


def test_of_two_lock_managers_without_a_topology_the_second_is_refused_with_the_recovery(lab: Lab, shared: str) -> None:
    a, b = lab.box("a"), lab.box("b")
    there = at(nfs3(a), shared)
    first = joined(a, there, "first")
    ask(first, "send", "first", "mine")
    assert ask(first, "record") == f"none@{a.machine_id}"
    joined(b, shared, "me")
    done = sotbus(b, shared, "send", "@first", "hello")
    assert done.returncode == 1
    assert f"FAILED -> @first: {NOT_HERE}\n" in done.stderr
    record = f"{shared}/comm/inbox-lock-manager"
    assert f"names none@{a.machine_id}, written by machine {a.machine_id}" in done.stderr
    assert f"this hub's {MANAGER}: stop every daemon on this comm folder, delete {record}, then start the hub" in (
        done.stderr
    )
    assert ask(first, "poll", "first") == ["mine"]


def test_on_a_nocto_mount_no_holder_of_the_registry_lock_is_proved_dead(lab: Lab, shared: str) -> None:
    a = lab.box("a")
    there = at(nocto(a), shared)
    holder = joined(a, there, "holder")
    name, machine, boot, pidns, pid, start = ask(holder, "take_registry_lock").split(":")
    assert (name, machine, boot, pidns, start) == ("a", "-", "-", "-", "-")
    assert int(pid) == holder.pid
    holder.kill()
    holder.wait()
    for path in (there, shared):
        waiter = session(a, path, "waiter", SOT_LOCK_WAIT_SECS="1")
        said = refused(waiter, "join")
        assert said["refused"] == "RegistryLockFailed"
        assert f"held by a pid {pid}" in said["text"]
        assert ("nocto" in said["text"]) == (path == there)
        assert "remove" in said["text"]
        assert "by hand" in said["text"]


# ---- sotbus doctor


Said = dict[str, tuple[int, dict[str, dict[str, str]], str]]
"""Of each box the exit status, the checks by name, and what was said beside them."""


def doctor_peer(lab: Lab, shared: str, *names: str) -> Said:
    """Run it on both boxes, and again where a box was too busy for a proof, as the check advises.

    The second begins when the first one waits for it: the guest's one CPU is then its own for that probe.

    :param names: the checks that must come to something; every one where none is named.
    """
    for _ in range(ATTEMPTS):
        said = _doctor_peer(lab, shared)
        texts = [checks[name]["text"] for _, checks, _ in said.values() for name in names or checks]
        if not any(word in text for text in texts for word in UNDECIDED):
            break
    return said


def _doctor_peer(lab: Lab, shared: str) -> Said:
    command = [sys.executable, "-m", "sotbus", "doctor", "--probe", "--peer", "--json", "--wait", str(MEET_S)]
    jobs = {}
    for name in ("a", "b"):
        job = jobs[name] = lab.box(name).spawn(command, {"SOT_COMM_HOME": f"{shared}/comm"})
        end = time.monotonic() + MEET_S
        while b"waiting up to" not in job.err and not job.ended and time.monotonic() < end:
            time.sleep(0.1)
    said = {}
    for name, job in jobs.items():
        done = job.completed(timeout_s=MEET_S + 2 * COMMAND_S)
        checks = {check["name"]: check for check in json.loads(done.stdout)}
        said[name] = done.returncode, checks, done.stderr
        faults = {check["name"]: check["text"] for check in checks.values() if check["status"] == "fault"}
        print(f"\nbox {name}: exit {done.returncode}, faults {faults}\n{done.stderr}")
    return said


def init(box: Box, shared: str) -> None:
    done = box.run([sys.executable, "-m", "sotbus", "init"], {"SOT_COMM_HOME": f"{shared}/comm"}, timeout_s=COMMAND_S)
    assert done.returncode == 0, done.stderr


def test_doctor_proves_that_two_boxes_with_the_servers_locks_may_share_the_folder(lab: Lab, shared: str) -> None:
    init(lab.box("a"), shared)
    for status, checks, stderr in doctor_peer(lab, shared).values():
        assert not [check for check in checks.values() if check["status"] == "fault"]
        assert status == 0
        assert {check["status"] for name, check in checks.items() if name.startswith("peer-")} == {"ok"}
        assert "verdict: a and b may share this folder" in stderr or "verdict: b and a may share" in stderr


def test_doctor_says_that_two_boxes_whose_locks_are_their_own_may_not(lab: Lab, shared: str) -> None:
    for name in ("a", "b"):
        nfs3(lab.box(name))
    there = at("/nfs3", shared)
    init(lab.box("a"), there)
    for status, checks, stderr in doctor_peer(lab, there, "peer-own-checks", "peer-exclusion").values():
        assert status == 1
        faults = {name for name, check in checks.items() if check["status"] == "fault"}
        assert {"peer-lock-manager", "peer-exclusion"} <= faults
        for name in ("a", "b"):
            wanted = f"on {name} mount {SERVER_ADDRESS}:{EXPORT} on /nfs3 with vers=4.2,local_lock=none"
            assert wanted in checks["peer-lock-manager"]["remedy"]
            assert wanted in stderr
        assert "verdict: do NOT let" in stderr


@contextmanager
def lost_locks_recovered(box: Box) -> Iterator[None]:
    """The NFS client's parameter, which is the whole kernel's."""
    write = "open(path, 'w').write(value)"
    box.call(write, path=RECOVER_LOST_LOCKS, value="Y")
    try:
        yield
    finally:
        box.call(write, path=RECOVER_LOST_LOCKS, value="N")


def test_where_the_kernel_takes_lost_locks_again_nothing_counts_as_fenced_and_doctor_names_it(
    lab: Lab, shared: str
) -> None:
    a = lab.box("a")
    init(a, shared)
    with lost_locks_recovered(a):
        facts = a.call(FACTS, path=shared)
        done = a.run(
            [sys.executable, "-m", "sotbus", "doctor", "--json"],
            {"SOT_COMM_HOME": f"{shared}/comm"},
            timeout_s=COMMAND_S,
        )
    assert facts["identity"] == MANAGER
    assert not facts["fences"]
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == 1
    assert checks["nfs-recovery"]["status"] == "fault"
    assert f"echo N > {RECOVER_LOST_LOCKS}" in checks["nfs-recovery"]["remedy"]
    assert a.call(FACTS, path=shared)["fences"]
