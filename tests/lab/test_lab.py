"""The lab itself: what its boxes have of their own, what they share, and what each fault does."""

from __future__ import annotations

import errno
import signal
from pathlib import Path

import pytest
from lab import in_box, server
from lab.box import Box
from lab.job import Died, RemoteError, TooLate
from lab.lab import Lab
from lab.machine import LabError, memory_folder
from lab.node_box import wait_until
from lab.power import PowerBox

pytestmark = pytest.mark.lab

RECLAIM_S = 60
"""Within this a client reclaims its locks: it looks for its server after 3 s, 6 s, 12 s and so on."""


def nfs_line(box: Box, path: str) -> str:
    """The last mountinfo line of a path."""
    return [line for line in box.mountinfo().splitlines() if line.split()[4] == path][-1]


# ---- boxes


def test_each_box_is_a_machine_of_its_own(lab: Lab) -> None:
    seen = [lab.box(name).call(in_box.identity) for name in ("a", "b")]
    for fact in ("machine_id", "boot_id", "pid_namespace", "network_namespace"):
        assert seen[0][fact] != seen[1][fact], fact
    assert [facts["host"] for facts in seen] == ["a", "b"]
    assert [facts["machine_id"] for facts in seen] == [lab.box("a").machine_id, lab.box("b").machine_id]


def test_both_boxes_mount_one_export_with_locks_at_the_server(lab: Lab, shared: str) -> None:
    for name in ("a", "b"):
        line = nfs_line(lab.box(name), "/nfs")
        assert " - nfs4 10.99.0.1:/ " in line
        assert {"vers=4.2", "hard", "local_lock=none"} <= set(line.split()[-1].split(","))
    lab.box("a").call("open(path, 'w').write('hi')", path=f"{shared}/x")
    assert lab.box("b").call("open(path).read()", path=f"{shared}/x") == "hi"
    assert lab.server.call("open(path).read()", path=f"/srv/export{shared.removeprefix('/nfs')}/x") == "hi"


@pytest.mark.parametrize(("holder", "other"), [("a", "b"), ("b", "a")])
def test_a_lock_held_on_one_box_keeps_the_other_out(lab: Lab, shared: str, holder: str, other: str) -> None:
    path = f"{shared}/lock"
    held = lab.box(holder).start(in_box.hold_flock, path=path)
    assert held.note() == "held"
    assert not lab.box(other).call(in_box.try_flock, path=path)
    held.send("\n")
    held.result()
    assert lab.box(other).call(in_box.try_flock, path=path)


def test_what_a_box_writes_outside_the_export_is_its_own(lab: Lab) -> None:
    lab.box("a").call("open('/etc/only-a', 'w').close()")
    assert lab.box("a").call("os.path.exists('/etc/only-a')")
    assert not lab.box("b").call("os.path.exists('/etc/only-a')")
    assert not Path("/etc/only-a").exists()


# ---- calls


def test_a_call_raises_what_its_function_raised(lab: Lab) -> None:
    with pytest.raises(RemoteError, match=r"in_box.py") as raised:
        lab.box("a").call(in_box.try_flock, path="/missing/folder")
    assert (raised.value.kind, raised.value.errno) == ("FileNotFoundError", errno.ENOENT)
    with pytest.raises(RemoteError, match="no_such_function"):
        lab.box("a").call("in_box:no_such_function")


def test_a_call_that_is_too_late_is_killed(lab: Lab) -> None:
    job = lab.box("a").start("time.sleep(60)")
    with pytest.raises(TooLate, match=r"its end in 0.1 s"):
        job.result(timeout_s=0.1)
    assert job.wait() == -signal.SIGKILL
    with pytest.raises(Died, match="before it had a result"):
        job.result()


def test_a_command_gets_its_input_environment_and_folder(lab: Lab, shared: str) -> None:
    long = "x" * 20_000 + "\n"
    script = 'pwd; echo "$WORD"; cat; echo wrong >&2; exit 3'
    done = lab.box("a").run(["sh", "-c", script], env={"WORD": "hi"}, cwd=shared, input=long)
    assert (done.returncode, done.stdout, done.stderr) == (3, f"{shared}\nhi\n{long}", "wrong\n")
    with pytest.raises(RemoteError, match="FileNotFoundError"):
        lab.box("a").run(["no-such-command"])


def test_a_process_of_a_box_is_stopped_continued_and_killed_by_its_pid(lab: Lab) -> None:
    a = lab.box("a")
    job = a.spawn(["sh", "-c", "while :; do sleep 0.1; done"])
    for number, state in ((signal.SIGSTOP, "T"), (signal.SIGCONT, "S")):
        a.kill(job.pid, number)
        # A running shell may be caught between two sleeps, hence not only "S".
        assert (a.call(in_box.state, pid=job.pid) == "T") is (state == "T")
    a.kill(job.pid, signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    with pytest.raises(RemoteError, match="ProcessLookupError"):
        a.kill(job.pid)


def test_two_boxes_work_at_once(lab: Lab, shared: str) -> None:
    jobs = [lab.box(name).start(in_box.hold_flock, path=f"{shared}/{name}") for name in ("a", "b")]
    assert [job.note() for job in jobs] == ["held", "held"]
    for job in jobs:
        job.send("\n")
        job.result()


# ---- faults


def test_a_cut_box_hangs_alone_and_goes_on_when_mended(lab: Lab, shared: str) -> None:
    a, path = lab.box("a"), f"{shared}/x"
    a.call(in_box.write, path=path, text="before\n")
    lab.cut("a")
    hung = a.start(in_box.append_lines, path=path, count=1)
    assert a.call("1 + 1") == 2  # another call of the box is served
    lab.box("b").call(in_box.write, path=f"{shared}/y", text="b is not cut")
    with pytest.raises(TooLate):
        hung.note(timeout_s=0.5)
    lab.mend("a")
    assert hung.note(timeout_s=30) == 0
    assert lab.box("b").call("open(path).read()", path=path) == "before\nline 0\n"


def test_clients_hang_while_the_server_is_down_and_reclaim_their_locks(lab: Lab, shared: str) -> None:
    a, b, lock = lab.box("a"), lab.box("b"), f"{shared}/lock"
    held = a.start(in_box.hold_flock, path=lock)
    held.note()
    lab.stop_server()
    hung = [box.start("os.listdir(path)", path=shared) for box in (a, b)]
    with pytest.raises(TooLate):
        hung[1].note(timeout_s=0.5)
    lab.start_server(grace_s=2 * RECLAIM_S)
    assert [job.result() for job in hung] == [["lock"], ["lock"]]
    wait_until(lambda: lab.server.call(server.client_locks), "the lock is reclaimed", RECLAIM_S)
    assert not held.ended
    lab.end_grace()
    assert not b.call(in_box.try_flock, path=lock)


def test_a_rebooted_box_has_lost_its_processes_and_unsent_writes_but_not_its_identity(lab: Lab, shared: str) -> None:
    a, b, lock = lab.box("a"), lab.box("b"), f"{shared}/lock"
    before = a.call(in_box.identity)
    held = a.start(in_box.hold_flock, path=lock)
    held.note()
    unsent = a.start(in_box.write_unsynced, path=f"{shared}/unsent")
    unsent.note()
    lab.reboot("a")
    with pytest.raises(Died, match="its box went down"):
        held.result()
    after = a.call(in_box.identity)
    assert {key for key in before if before[key] != after[key]} == {"boot_id", "pid_namespace", "network_namespace"}
    assert "local_lock=none" in nfs_line(a, "/nfs")
    assert b.call(in_box.try_flock, path=lock)
    assert b.call("os.stat(path).st_size", path=f"{shared}/unsent") == 0


def test_after_a_test_its_cuts_mounts_and_processes_are_gone(lab: Lab, shared: str) -> None:
    b = lab.box("b")
    before = b.mountinfo()
    b.mount("/nfs", "tmpfs", "tmpfs")
    job = b.spawn(["sleep", "1000"])
    lab.cut("b")
    lab.tidy()
    assert job.exit == -signal.SIGKILL
    assert b.mountinfo() == before
    assert b.call("os.listdir(path)", path=shared, timeout_s=30) == []


# ---- mounts


def test_locks_on_version_3_without_a_lock_server_exclude_nobody_elsewhere(lab: Lab, shared: str) -> None:
    path = f"/nfs3{shared.removeprefix('/nfs')}/lock"
    for name in ("a", "b"):
        lab.box(name).mount_nfs3("/nfs3")
        line = nfs_line(lab.box(name), "/nfs3")
        assert " - nfs 10.99.0.1:/srv/export " in line
        assert {"vers=3", "nolock", "local_lock=all"} <= set(line.split()[-1].split(","))
    held = lab.box("a").start(in_box.hold_flock, path=path)
    held.note()
    assert not lab.box("a").call(in_box.try_flock, path=path)
    assert lab.box("b").call(in_box.try_flock, path=path)


def test_a_box_mounts_the_export_again_binds_and_stacks(lab: Lab, shared: str) -> None:
    a = lab.box("a")
    before = a.mountinfo()
    a.call(in_box.write, path=f"{shared}/x", text="hi")
    a.mount_nfs4("/nocto", "hard,nocto")
    a.mount("/bound", shared, "bind")
    a.mount("/nfs", "tmpfs", "tmpfs")
    assert "nocto" in nfs_line(a, "/nocto").split()[-1].split(",")
    assert nfs_line(a, "/bound").split(" - ")[1].startswith(f"nfs4 10.99.0.1:/{shared.removeprefix('/nfs/')} ")
    assert a.call("os.listdir('/nfs'), os.listdir('/bound')") == [[], ["x"]]
    a.mount_nfs4("/nfs")
    assert "nfs4" in nfs_line(a, "/nfs")
    assert a.call("open(path).read()", path=f"{shared}/x") == "hi"
    a.unmount_all()
    assert a.mountinfo() == before


# ---- the guest


def test_what_was_synced_is_there_after_the_plug_was_pulled(lab_tools: None, tmp_path: Path) -> None:
    with PowerBox(tmp_path / "disk") as power:
        first = power.box.call(in_box.identity)
        unsynced = power.box.start(in_box.write_unsynced, path="/disk/unsynced")
        unsynced.note()
        job = power.box.start(in_box.append_lines, path="/disk/log", count=100_000)
        for _ in range(20):
            job.note()
        power.pull_plug()
        with pytest.raises(Died):
            job.result()
        power.boot()
        second = power.box.call(in_box.identity)
        lines = power.box.call("open('/disk/log').read().splitlines()")
        assert lines[: len(job.notes)] == [f"line {number}" for number in job.notes]
        assert power.box.call("os.path.getsize('/disk/unsynced') if os.path.exists('/disk/unsynced') else 0") == 0
    assert first["machine_id"] == second["machine_id"]
    assert first["boot_id"] != second["boot_id"]


def test_a_guest_that_does_not_boot_says_why_and_is_gone(lab_tools: None, tmp_path: Path) -> None:
    broken = tmp_path / "disk"
    broken.write_bytes(bytes(1 << 20))
    power = PowerBox(broken)
    with pytest.raises(LabError, match=r"(?s)Invalid argument.*console.*Run .* as init"):
        power.boot()


def test_the_guests_memory_goes_where_there_is_room(tmp_path: Path) -> None:
    assert memory_folder(1, tmp_path) == "/dev/shm"
    assert memory_folder(1 << 30, tmp_path) == str(tmp_path)
