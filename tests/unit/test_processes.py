"""Processes as /proc shows them, and the session that follows from them: key, gate, and whose handle is taken.

Most tests lay out a /proc of their own, so that they say the same wherever the suite runs (under an agent harness too).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from world import MACHINE, World

from sotbus.comm import membership, processes
from sotbus.comm.box import Box
from sotbus.comm.client import Client
from sotbus.comm.project import project_of
from sotbus.comm.registry import Registry
from sotbus.comm.session import Session
from sotbus.comm.settings import Settings
from sotbus.errors import GateRefused, NotJoined, SlotTaken

FIRST_NAMESPACE = "pid:[4026531836]"
OTHER_NAMESPACE = "pid:[4026532000]"
LEADER = 500
CLAUDE_CLI = "/x/node_modules/@anthropic-ai/claude-code/cli.js"
CODEX_CLI = "/x/node_modules/@openai/codex/bin/codex.js"
SESSION_ID = "6f9619ff-8b86-4d01-b42d-00cf4fc964ff"


class Proc:
    """A /proc folder: processes by pid, and this process among them with a parent that the test chooses."""

    def __init__(self, base: Path) -> None:
        self.root = base / "proc"
        self.add(1, 0, "init")
        self.add(LEADER, 1, "bash", start=5000)
        self.below(LEADER)

    def add(
        self, pid: int, parent: int, *argv: str, start: int = 0, comm: str = "x", namespace: str = "", tty: int = 0
    ) -> int:
        folder = self.root / str(pid)
        (folder / "ns").mkdir(parents=True, exist_ok=True)
        fields = ["S", str(parent), "0", "0", str(tty), *["0"] * 14, str(start or pid * 10), *["0"] * 30]
        (folder / "stat").write_text(f"{pid} ({comm}) {' '.join(fields)}\n")
        (folder / "cmdline").write_bytes(b"".join(os.fsencode(word) + b"\0" for word in argv))
        link = folder / "ns" / "pid"
        link.unlink(missing_ok=True)
        link.symlink_to(namespace or FIRST_NAMESPACE)
        return pid

    def below(self, parent: int, namespace: str = "", tty: int = 0) -> None:
        """Make this process the child of ``parent``."""
        self.add(os.getpid(), parent, "python", "sotbus", namespace=namespace, tty=tty)

    def chain(self, *commands: list[str], above: int = LEADER, first: int = 1000) -> int:
        """Processes from the outermost command to the innermost, each the child of the one before; this one last."""
        for number, argv in enumerate(commands):
            above = self.add(first + number, above, *argv)
        self.below(above)
        return above

    def end(self, pid: int) -> None:
        (self.root / str(pid) / "stat").unlink()

    def ancestry(self) -> processes.Ancestry:
        return processes.ancestry(os.getpid(), str(self.root))


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    """A /proc in which this process runs below a shell that leads its session."""
    monkeypatch.setattr(os, "getsid", lambda _: LEADER)
    return Proc(tmp_path)


def client_in(
    world: World, proc: Proc, environ: Mapping[str, str] | None = None, *, project: str = "proj", pin: str = ""
) -> Client:
    """A client of the session that this process is in, as ``proc`` shows it now."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    box = Box("vm", "vm", MACHINE, boot, str(world.mountinfo), str(proc.root))
    pinned = {"SOT_COMM_SELF_FILE": str(world.home / "self" / pin)} if pin else {}
    client = Client(
        world.folder,
        box,
        {**pinned, **(environ or {})},
        Settings(),
        notify=world.notes.append,
        registry=Registry(world.folder, box, settle_s=0.05),
    )
    client._project = project_of(str(world.project(project)))
    assert isinstance(client.session, Session)
    return client


def entries(world: World) -> dict[str, Any]:
    agents: dict[str, Any] = json.loads((world.home / "registry.json").read_text())["agents"]
    return agents


def files(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder with its bytes, None for a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# --- which program is a harness


@pytest.mark.parametrize(
    ("argv", "harness"),
    [
        (["claude"], "claude"),
        (["/usr/local/bin/claude", "--resume"], "claude"),
        (["codex", "exec", "do it"], "codex"),
        (["opencode"], "opencode"),
        (["hermes"], "hermes"),
        (["pi"], "pi"),
        (["antigravity"], "antigravity"),
        (["node", CLAUDE_CLI], "claude"),
        (["/usr/bin/node", "--no-warnings", "--max-old-space-size=4096", CLAUDE_CLI, "-p", "hello"], "claude"),
        (["node", CODEX_CLI], "codex"),
        (["node", "/usr/local/bin/codex"], "codex"),
        (["bun", "/x/node_modules/opencode-ai/bin/run.mjs"], "opencode"),
        (["python3.11", "/x/bin/hermes"], "hermes"),
        (["python3", "-m", "hermes"], "hermes"),
        ([], ""),
        (["bash"], ""),
        (["bash", "claude"], ""),
        (["vim", CLAUDE_CLI], ""),
        (["claude-monitor"], ""),
        (["node"], ""),
        (["node", "-e", "claude", "claude"], ""),
        (["python3", "-c", "claude"], ""),
        (["python3", "train.py", "claude"], ""),
        (["node", "/home/u/codex/server.js"], ""),
        (["node", "/x/node_modules/claude-code-tools/index.js"], ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_command_line_is_a_harness_by_its_own_name_or_by_the_script_an_interpreter_runs(
    argv: list[str], harness: str
) -> None:
    assert processes.harness_name(argv) == harness


@pytest.mark.parametrize(
    ("argv", "harness"),
    [
        (["node", "--require", "/x/hook.js", CLAUDE_CLI], "claude"),
        (["python3", "-W", "error", "-m", "hermes"], "hermes"),
        (["bun", "run", "/x/node_modules/opencode-ai/bin/run.mjs"], "opencode"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_what_stands_before_the_script_does_not_hide_a_harness(argv: list[str], harness: str) -> None:
    assert processes.harness_name(argv) == harness


# --- stat, start ticks, life


def test_the_fields_of_a_process_are_those_after_the_last_parenthesis_of_its_name(proc: Proc) -> None:
    proc.add(700, 42, "x", start=777, comm="a) S 9 (b")
    process = processes.read_process(700, str(proc.root))
    assert process is not None
    assert (process.parent, process.start) == (42, "777")


def test_start_ticks_tell_a_process_that_is_gone_from_one_that_cannot_be_read(proc: Proc) -> None:
    assert processes.start_ticks(700, str(proc.root)) is None
    (proc.root / "700" / "stat").mkdir(parents=True)
    with pytest.raises(OSError):
        processes.start_ticks(700, str(proc.root))
    proc.add(701, 1, "x")
    (proc.root / "701" / "stat").write_text("701 (x) S 1 2\n")
    with pytest.raises(OSError, match="no start time"):
        processes.start_ticks(701, str(proc.root))


@pytest.mark.parametrize(
    ("pid", "start", "alive"),
    [
        (LEADER, 5000, True),
        (LEADER, "5000", True),
        (LEADER, 5001, False),
        (LEADER, None, False),
        (499, 5000, False),
        (str(LEADER), 5000, False),
        (True, 10, False),
        (0, 0, False),
        (-1, 5000, False),
        (None, None, False),
    ],
)
def test_a_recorded_process_is_alive_only_with_its_pid_and_its_start(
    proc: Proc, pid: object, start: object, alive: bool
) -> None:
    assert processes.is_alive(pid, start, str(proc.root)) is alive


def test_a_process_that_cannot_be_read_is_not_called_alive(proc: Proc) -> None:
    (proc.root / "700" / "stat").mkdir(parents=True)
    assert not processes.is_alive(700, 7000, str(proc.root))


def test_a_real_child_is_alive_until_it_has_been_reaped_and_never_again() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        start = processes.start_ticks(child.pid)
        assert start is not None
        assert processes.is_alive(child.pid, int(start))
        child.communicate(b"", timeout=30)
    assert not processes.is_alive(child.pid, int(start))


def test_a_process_that_has_ended_and_was_not_reaped_is_not_alive() -> None:
    with subprocess.Popen(["true"]) as child:
        start = processes.start_ticks(child.pid)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not processes.is_alive(child.pid, start)


# --- ancestors


def test_ancestors_are_listed_nearest_first_without_the_process_itself(proc: Proc) -> None:
    proc.chain(["claude"], ["bash"])
    found = proc.ancestry()
    assert [one.pid for one in found.chain] == [1001, 1000, LEADER, 1]
    assert (found.readable, found.complete) == (True, True)


def test_the_ancestors_of_a_real_process_are_this_one_and_its_own() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        found = processes.ancestry(child.pid)
        child.communicate(b"", timeout=30)
    assert found.chain[0].pid == os.getpid()
    assert found.chain[1].pid == os.getppid()
    assert found.readable


def test_in_a_pid_namespace_of_its_own_the_ancestors_are_readable_and_not_complete(proc: Proc) -> None:
    proc.below(LEADER, OTHER_NAMESPACE)
    found = proc.ancestry()
    assert (found.readable, found.complete) == (True, False)


@pytest.mark.parametrize(("count", "readable"), [(64, True), (65, False)])
def test_more_than_64_ancestors_are_not_readable(proc: Proc, count: int, readable: bool) -> None:
    top = proc.add(2000, 0, "bash")
    proc.chain(*[["bash"]] * (count - 1), above=top, first=3000)
    found = proc.ancestry()
    assert (found.readable, found.complete) == (readable, readable)
    assert len(found.chain) == 64


@pytest.mark.parametrize("broken", ["gone", "unreadable", "garbled"])
def test_an_ancestor_that_cannot_be_read_makes_the_ancestors_unreadable(proc: Proc, broken: str) -> None:
    proc.chain(["bash"], ["bash"])
    proc.end(1000)
    if broken == "unreadable":
        (proc.root / "1000" / "stat").mkdir()
    elif broken == "garbled":
        (proc.root / "1000" / "stat").write_text("1000 (x) S x y\n")
    found = proc.ancestry()
    assert (found.readable, found.complete) == (False, False)
    assert [one.pid for one in found.chain] == [1001]


@pytest.mark.parametrize(
    ("commands", "layers"),
    [
        ([], []),
        ([["bash"]], []),
        ([["claude"]], [1000]),
        ([["claude"], ["bash"], ["sh"]], [1000]),
        ([["node", CLAUDE_CLI], ["claude"]], [1001]),
        ([["node", CODEX_CLI], ["codex"], ["bash"]], [1001]),
        ([["claude"], ["codex"]], [1001, 1000]),
        ([["claude"], ["bash"], ["claude"]], [1002, 1000]),
        ([["node", CODEX_CLI], ["codex"], ["bash"], ["node", CODEX_CLI], ["codex"]], [1004, 1001]),
        ([["claude"], ["bash"], ["node", CODEX_CLI], ["codex"], ["bash"]], [1003, 1000]),
    ],
    ids=lambda value: "/".join(word[-1].rsplit("/", 1)[-1] if isinstance(word, list) else str(word) for word in value),
)
def test_a_harness_and_the_native_child_of_its_wrapper_are_one_layer(
    proc: Proc, commands: list[list[str]], layers: list[int]
) -> None:
    proc.chain(*commands)
    assert [one.pid for one in proc.ancestry().layers()] == layers


@pytest.mark.parametrize(
    ("commands", "layers"),
    [
        ([["claude"], ["claude"]], [1001, 1000]),
        ([["codex"], ["node", CODEX_CLI], ["codex"]], [1002, 1000]),
        ([["node", CODEX_CLI], ["codex"], ["node", CODEX_CLI], ["codex"]], [1003, 1001]),
    ],
    ids=["claude below claude", "wrapped codex below codex", "wrapped codex below wrapped codex"],
)
def test_a_harness_that_starts_its_own_kind_with_no_shell_between_is_two_layers(
    proc: Proc, commands: list[list[str]], layers: list[int]
) -> None:
    proc.chain(*commands)
    assert [one.pid for one in proc.ancestry().layers()] == layers


# --- the key of a session


def key_of(client: Client) -> str:
    """The own self file's name, without the part that tells one session's projects apart."""
    return re.sub(r"(?<=sotbus-)(.+)-[0-9a-f]{8}\.txt$", r"\1", Path(client.session.own_path).name)


@pytest.mark.spec("S74")
def test_the_key_is_the_pin_then_the_row_then_the_harness_then_the_pane_then_the_leader(
    world: World, proc: Proc
) -> None:
    environ = {"SOT_WORKSPACE_ID": "ws-1", "TMUX": "/tmp/s,400,0", "TMUX_PANE": "%7"}
    proc.add(400, 1, "tmux", start=4000)
    proc.add(LEADER, 400, "bash", start=5000)
    proc.chain(["claude"], ["bash"])
    assert key_of(client_in(world, proc, environ, pin="mine.txt")) == "mine.txt"
    assert key_of(client_in(world, proc, environ)) == "vm__ws-1.txt"
    del environ["SOT_WORKSPACE_ID"]
    assert key_of(client_in(world, proc, environ)) == "vm__sotbus-claude-1000-10000"
    proc.below(LEADER)
    assert key_of(client_in(world, proc, environ)) == "vm__sotbus-tmux-400-4000-7"
    assert key_of(client_in(world, proc)) == f"vm__sotbus-leader-{LEADER}-5000"


@pytest.mark.spec("S75")
def test_where_nothing_tells_sessions_apart_the_shared_file_is_the_own_one(
    world: World, proc: Proc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getsid", lambda _: 0)
    session = client_in(world, proc).session
    assert Path(session.own_path).name == "vm__nopane.txt"
    assert session.shared_path in (None, session.own_path)
    assert session.process[0] == 0
    assert not session.guarded


@pytest.mark.parametrize(
    "environ",
    [
        {"TMUX": "/tmp/s", "TMUX_PANE": "%7"},
        {"TMUX": "/tmp/s,x,0", "TMUX_PANE": "%7"},
        {"TMUX": "/tmp/s,499,0", "TMUX_PANE": "%7"},
        {"TMUX": "/tmp/s,399,0", "TMUX_PANE": "%7"},
        {"TMUX": "/tmp/s,400,0", "TMUX_PANE": ""},
        {"TMUX": "/tmp/s,400,0", "TMUX_PANE": "7"},
        {"TMUX": "/tmp/s,400,0", "TMUX_PANE": "%../x"},
        {"TMUX_PANE": "%7"},
    ],
    ids=str,
)
def test_a_tmux_environment_that_names_no_server_above_and_no_pane_is_not_a_key(
    world: World, proc: Proc, environ: dict[str, str]
) -> None:
    proc.add(399, 1, "tmux")
    proc.add(400, 1, "tmux")
    proc.add(LEADER, 400, "bash", start=5000)
    assert key_of(client_in(world, proc, environ)) == f"vm__sotbus-leader-{LEADER}-5000"


@pytest.mark.parametrize(("inner", "key"), [(0, "tmux-400-4000-7"), (1, "tmux-400-4000-7"), (2, "leader-500-5000")])
def test_a_terminal_opened_inside_a_pane_is_not_the_pane(world: World, proc: Proc, inner: int, key: str) -> None:
    proc.add(400, 1, "tmux", start=4000)
    proc.add(399, 400, "bash", tty=1)
    proc.add(LEADER, 399, "bash", start=5000, tty=inner)
    proc.below(LEADER, tty=inner)
    assert key_of(client_in(world, proc, {"TMUX": "/tmp/s,400,0", "TMUX_PANE": "%7"})) == f"vm__sotbus-{key}"


def test_an_inherited_claude_session_id_is_a_key_only_where_no_harness_can_be_seen(world: World, proc: Proc) -> None:
    environ = {"CLAUDE_CODE_SESSION_ID": "a/b c"}
    assert key_of(client_in(world, proc, environ)) == f"vm__sotbus-leader-{LEADER}-5000"
    proc.below(LEADER, OTHER_NAMESPACE)
    assert key_of(client_in(world, proc, environ)) == "vm__sotbus-claude-a_b_c"
    proc.add(1000, LEADER, "codex")
    proc.below(1000, OTHER_NAMESPACE)
    assert key_of(client_in(world, proc, environ)) == "vm__sotbus-codex-1000-10000"


def test_the_harness_is_recorded_and_lends_its_conversation_id_only_when_it_is_claude(world: World, proc: Proc) -> None:
    environ = {"CLAUDE_CODE_SESSION_ID": SESSION_ID}
    proc.chain(["claude"])
    claude = membership.join(client_in(world, proc, environ)).handle
    proc.chain(["claude"], ["bash"], ["codex"])
    codex = membership.join(client_in(world, proc, environ)).handle
    found = entries(world)
    assert (claude, codex) == ("proj-vm", "proj-vm-2")
    assert [found[name]["harness"] for name in (claude, codex)] == ["claude", "codex"]
    assert [found[name]["pid"] for name in (claude, codex)] == [1000, 1002]
    assert [found[name]["start"] for name in (claude, codex)] == [10000, 10020]
    assert found[claude]["instance"] == SESSION_ID
    assert found[codex]["instance"] != SESSION_ID


def test_a_session_keeps_its_instance_when_it_joins_again_and_a_new_session_gets_another(
    world: World, proc: Proc
) -> None:
    proc.chain(["codex"])
    membership.join(client_in(world, proc))
    first = entries(world)["proj-vm"]["instance"]
    membership.join(client_in(world, proc))
    assert entries(world)["proj-vm"]["instance"] == first
    proc.end(1000)
    proc.chain(["codex"], first=1500)
    assert membership.join(client_in(world, proc)).handle == "proj-vm"
    assert entries(world)["proj-vm"]["instance"] != first


# --- two sessions of one folder


@pytest.mark.spec("S82")
def test_of_two_harnesses_in_one_folder_the_second_takes_a_number_and_each_keeps_its_own(
    world: World, proc: Proc
) -> None:
    handles: list[str] = []
    proc.add(1000, LEADER, "claude")
    proc.add(1500, LEADER, "claude")
    proc.add(1600, LEADER, "codex")
    for parent in (1000, 1500, 1600, 1000, 1500, 1600):
        proc.below(parent)
        handles.append(membership.join(client_in(world, proc)).handle)
    assert handles == ["proj-vm", "proj-vm-2", "proj-vm-3"] * 2
    for parent, handle in ((1000, "proj-vm"), (1500, "proj-vm-2"), (1600, "proj-vm-3")):
        proc.below(parent)
        assert client_in(world, proc).identity().handle == handle


def test_the_second_of_two_sessions_is_told_which_handle_was_left_to_the_first(world: World, proc: Proc) -> None:
    proc.add(1000, LEADER, "claude")
    proc.below(1000)
    assert membership.join(client_in(world, proc)).beside == ""
    proc.below(LEADER)
    assert membership.join(client_in(world, proc)).beside == "proj-vm"


def test_a_number_that_another_project_holds_is_passed_over(world: World, proc: Proc) -> None:
    proc.add(1000, LEADER, "claude")
    proc.below(1000)
    membership.join(client_in(world, proc))
    proc.below(LEADER)
    membership.join(client_in(world, proc, project="other"), name="proj-vm-2")
    assert membership.join(client_in(world, proc)).handle == "proj-vm-3"


def test_the_handle_of_a_session_that_ended_is_free_again(world: World, proc: Proc) -> None:
    proc.add(1000, LEADER, "claude")
    proc.add(1500, LEADER, "claude")
    for parent in (1000, 1500):
        proc.below(parent)
        membership.join(client_in(world, proc))
    proc.end(1000)
    proc.below(LEADER)
    assert membership.join(client_in(world, proc)).handle == "proj-vm"


def test_a_pid_that_another_process_has_by_now_does_not_hold_a_handle(world: World, proc: Proc) -> None:
    proc.chain(["claude"])
    membership.join(client_in(world, proc))
    proc.add(1000, LEADER, "claude", start=10001)
    proc.below(LEADER)
    assert membership.join(client_in(world, proc)).handle == "proj-vm"


def test_a_handle_of_another_host_or_with_no_process_recorded_is_not_left_to_it(world: World, proc: Proc) -> None:
    proc.chain(["claude"])
    client = client_in(world, proc)
    membership.join(client)
    entry = entries(world)["proj-vm"]
    proc.below(LEADER)
    for change in ({"host": "elsewhere"}, {"pid": None}, {"start": None}):
        document = {"protocol_version": 1, "agents": {"proj-vm": {**entry, **change}}}
        (world.home / "registry.json").write_text(json.dumps(document))
        assert membership.join(client_in(world, proc)).handle == "proj-vm"


@pytest.mark.parametrize(("last_seen", "handle"), [("", "proj-vm-2"), ("2026-05-28T20:26:40Z", "proj-vm")])
def test_a_holder_in_another_pid_namespace_is_judged_by_its_stamp(
    world: World, proc: Proc, last_seen: str, handle: str
) -> None:
    proc.chain(["claude"])
    membership.join(client_in(world, proc))
    entry = entries(world)["proj-vm"]
    entry["last_seen"] = last_seen or entry["last_seen"]
    document = {"protocol_version": 1, "agents": {"proj-vm": entry}}
    (world.home / "registry.json").write_text(json.dumps(document))
    proc.end(1000)
    proc.below(LEADER, OTHER_NAMESPACE)
    assert membership.join(client_in(world, proc)).handle == handle


def test_the_name_of_a_live_session_is_refused_with_nothing_written_unless_repinned(world: World, proc: Proc) -> None:
    proc.chain(["claude"])
    membership.join(client_in(world, proc), name="alice")
    before = files(world.home)
    proc.below(LEADER)
    with pytest.raises(SlotTaken, match="@alice is held by another live session") as caught:
        membership.join(client_in(world, proc), name="alice")
    assert caught.value.exit_status == 3
    assert "--repin" in caught.value.hint
    assert files(world.home) == before
    assert membership.join(client_in(world, proc), name="alice", repin=True).handle == "alice"
    assert entries(world)["alice"]["pid"] == LEADER


def test_a_session_whose_handle_was_repinned_to_another_no_longer_acts_as_it(world: World, proc: Proc) -> None:
    proc.chain(["claude"])
    membership.join(client_in(world, proc), name="alice")
    proc.below(LEADER)
    membership.join(client_in(world, proc), name="alice", repin=True)
    proc.below(1000)
    with pytest.raises(NotJoined):
        client_in(world, proc).identity()


def test_a_session_whose_handle_was_repinned_to_another_does_not_remove_it_at_its_leave(
    world: World, proc: Proc
) -> None:
    proc.chain(["claude"])
    membership.join(client_in(world, proc), name="alice")
    proc.below(LEADER)
    membership.join(client_in(world, proc), name="alice", repin=True)
    entry = entries(world)["alice"]
    proc.below(1000)
    try:
        membership.leave(client_in(world, proc))
    except NotJoined:
        pass
    assert entries(world) == {"alice": entry}


def test_a_session_that_joined_with_another_pid_keeps_its_handle_when_it_joins_again(world: World, proc: Proc) -> None:
    proc.add(900, 1, "editor")
    assert membership.join(client_in(world, proc), pid=900).handle == "proj-vm"
    assert entries(world)["proj-vm"]["pid"] == 900
    assert membership.join(client_in(world, proc)).handle == "proj-vm"


def test_one_pin_is_one_session_whichever_process_joins_with_it(world: World, proc: Proc) -> None:
    assert membership.join(client_in(world, proc, pin="vm__ws-1.txt")).handle == "proj-vm"
    proc.chain(["claude"])
    assert membership.join(client_in(world, proc, pin="vm__ws-1.txt")).handle == "proj-vm"


def test_one_row_is_one_session_whichever_process_joins_with_it(world: World, proc: Proc) -> None:
    assert membership.join(client_in(world, proc, {"SOT_WORKSPACE_ID": "ws-1"})).handle == "proj-vm"
    proc.chain(["claude"])
    assert membership.join(client_in(world, proc, {"SOT_WORKSPACE_ID": "ws-1"})).handle == "proj-vm"


def test_a_pin_does_not_take_back_a_handle_that_a_live_session_has_taken_since(world: World, proc: Proc) -> None:
    proc.chain(["claude"], first=1000)
    assert membership.join(client_in(world, proc, pin="one.txt")).handle == "proj-vm"
    proc.end(1000)
    proc.chain(["claude"], first=1500)
    assert membership.join(client_in(world, proc, pin="two.txt")).handle == "proj-vm"
    proc.chain(["claude"], first=1600)
    assert membership.join(client_in(world, proc, pin="one.txt")).handle == "proj-vm-2"


def test_two_pins_below_one_process_are_two_sessions(world: World, proc: Proc) -> None:
    assert membership.join(client_in(world, proc, pin="one.txt")).handle == "proj-vm"
    assert membership.join(client_in(world, proc, pin="two.txt")).handle == "proj-vm-2"


def test_a_session_that_works_in_two_projects_has_a_handle_in_each_and_keeps_both(world: World, proc: Proc) -> None:
    proc.chain(["claude"])
    for project in ("proj", "other", "proj", "other"):
        assert membership.join(client_in(world, proc, project=project)).handle == f"{project}-vm"
    for project in ("proj", "other"):
        assert client_in(world, proc, project=project).identity().handle == f"{project}-vm"


# --- the shared file of sessions outside a row


def put_nopane(world: World, handle: str, project: str = "proj") -> None:
    """The shared file and the entry of another client, which records no process."""
    root = world.project(project)
    world.folder.ensure()
    entry = {"host": "vm", "root": str(root), "status": "idle"}
    (world.home / "registry.json").write_text(json.dumps({"protocol_version": 1, "agents": {handle: entry}}))
    (world.home / "self" / "vm__nopane.txt").write_text(f"{handle}\nrepo={project}\nroot={root}\n")


@pytest.mark.spec("S75")
def test_the_shared_file_holds_the_last_joined_session_for_other_clients(world: World, proc: Proc) -> None:
    proc.add(1000, LEADER, "claude")
    for parent, handle in ((1000, "proj-vm"), (LEADER, "proj-vm-2"), (1000, "proj-vm")):
        proc.below(parent)
        membership.join(client_in(world, proc))
        shared = (world.home / "self" / "vm__nopane.txt").read_text()
        assert shared == f"{handle}\nrepo=proj\nroot={world.project('proj')}\n"


@pytest.mark.spec("S75")
def test_a_pin_or_a_row_never_writes_the_shared_file(world: World, proc: Proc) -> None:
    membership.join(client_in(world, proc, pin="mine.txt"), name="pinned")
    membership.join(client_in(world, proc, {"SOT_WORKSPACE_ID": "ws-1"}), name="row")
    assert sorted(path.name for path in (world.home / "self").iterdir()) == ["mine.txt", "vm__ws-1.txt"]


@pytest.mark.spec("S75", "S77")
def test_a_shared_file_that_another_client_wrote_names_this_session_in_its_root_only(world: World, proc: Proc) -> None:
    put_nopane(world, "foreign")
    assert client_in(world, proc).identity().handle == "foreign"
    with pytest.raises(NotJoined):
        client_in(world, proc, project="other").identity()


def test_the_shared_file_is_not_taken_while_another_live_session_holds_its_handle(world: World, proc: Proc) -> None:
    proc.chain(["claude"])
    membership.join(client_in(world, proc))
    proc.below(LEADER)
    with pytest.raises(NotJoined):
        client_in(world, proc).identity()
    proc.end(1000)
    assert client_in(world, proc).identity().handle == "proj-vm"


@pytest.mark.spec("S26")
def test_the_shared_file_is_not_taken_while_nobody_can_tell_who_holds_its_handle(world: World, proc: Proc) -> None:
    proc.chain(["claude"])
    membership.join(client_in(world, proc))
    (world.home / "registry.json").write_text("broken")
    proc.below(LEADER)
    with pytest.raises(NotJoined):
        client_in(world, proc).identity()


def test_a_session_that_takes_up_a_dead_sessions_handle_with_a_poll_is_its_only_holder(
    world: World, proc: Proc
) -> None:
    proc.chain(["claude"])
    membership.join(client_in(world, proc))
    proc.end(1000)
    proc.add(1500, LEADER, "codex")
    proc.below(LEADER)
    assert client_in(world, proc).identity(adopt=True).handle == "proj-vm"
    assert entries(world)["proj-vm"]["pid"] == LEADER
    proc.below(1500)
    with pytest.raises(NotJoined):
        client_in(world, proc).identity(adopt=True)


def test_a_shared_file_never_names_a_pin_or_a_row(world: World, proc: Proc) -> None:
    put_nopane(world, "foreign")
    for client in (client_in(world, proc, pin="mine.txt"), client_in(world, proc, {"SOT_WORKSPACE_ID": "ws-1"})):
        with pytest.raises(NotJoined):
            client.identity()


def test_a_leave_removes_the_shared_file_only_where_it_names_the_handle_that_leaves(world: World, proc: Proc) -> None:
    proc.add(1000, LEADER, "claude")
    for parent in (1000, LEADER):
        proc.below(parent)
        membership.join(client_in(world, proc))
    shared = world.home / "self" / "vm__nopane.txt"
    proc.below(1000)
    assert membership.leave(client_in(world, proc)) == ("proj-vm", "removed")
    assert shared.read_text().startswith("proj-vm-2\n")
    proc.below(LEADER)
    assert membership.leave(client_in(world, proc)) == ("proj-vm-2", "removed")
    assert list((world.home / "self").iterdir()) == []


# --- the agent gate


GATED = [
    pytest.param({"pin": "vm__ws-1.txt"}, id="pin"),
    pytest.param({"environ": {"SOT_WORKSPACE_ID": "ws-1"}}, id="row"),
]


@pytest.mark.parametrize("where", GATED)
def test_one_harness_may_act_with_the_pin_or_row_it_was_given(world: World, proc: Proc, where: dict[str, Any]) -> None:
    proc.chain(["claude"], ["bash"])
    membership.join(client_in(world, proc, **where))
    proc.chain(["claude"], ["sh"], ["make"])
    assert client_in(world, proc, **where).identity().handle == "proj-vm"


@pytest.mark.parametrize("where", GATED)
def test_a_harness_below_the_one_that_joined_is_refused_its_pin_or_row(
    world: World, proc: Proc, where: dict[str, Any]
) -> None:
    proc.chain(["claude"], ["bash"])
    membership.join(client_in(world, proc, **where))
    before = files(world.home)
    proc.chain(["claude"], ["bash"], ["codex"], ["bash"])
    nested = client_in(world, proc, **where)
    for act in (nested.identity, lambda: membership.join(nested), lambda: membership.join(nested, name="x")):
        with pytest.raises(GateRefused, match=r"another agent \(codex, pid 1002\).*nothing was written") as caught:
            act()
        assert caught.value.exit_status == 1
        assert "SOT_COMM_SELF_FILE" in caught.value.hint
    assert files(world.home) == before


@pytest.mark.parametrize("where", GATED)
def test_a_harness_below_another_that_never_joined_is_refused_too(
    world: World, proc: Proc, where: dict[str, Any]
) -> None:
    proc.chain(["claude"], ["bash"], ["codex"])
    with pytest.raises(GateRefused):
        membership.join(client_in(world, proc, **where))
    assert not world.home.exists()


@pytest.mark.parametrize("where", GATED)
def test_a_harness_below_its_own_kind_with_no_shell_between_is_refused(
    world: World, proc: Proc, where: dict[str, Any]
) -> None:
    proc.chain(["claude"])
    membership.join(client_in(world, proc, **where))
    proc.chain(["claude"], ["claude"])
    with pytest.raises(GateRefused):
        client_in(world, proc, **where).identity()


def test_the_gate_counts_from_the_process_that_joined_and_not_from_the_top(world: World, proc: Proc) -> None:
    proc.chain(["bash"])
    membership.join(client_in(world, proc, pin="vm__ws-1.txt"), pid=1000)
    proc.add(900, 1, "claude")
    proc.add(1000, 900, "bash")
    proc.add(1001, 1000, "codex")
    proc.below(1001)
    assert client_in(world, proc, pin="vm__ws-1.txt").identity().handle == "proj-vm"


@pytest.mark.parametrize("where", GATED)
def test_a_pin_or_row_is_refused_where_an_ancestor_cannot_be_read(
    world: World, proc: Proc, where: dict[str, Any]
) -> None:
    membership.join(client_in(world, proc, **where))
    proc.chain(["bash"], ["bash"])
    proc.end(1000)
    with pytest.raises(GateRefused, match="cannot all be read"):
        client_in(world, proc, **where).identity()


def test_without_a_pin_or_a_row_a_nested_harness_is_a_session_of_its_own(world: World, proc: Proc) -> None:
    proc.chain(["claude"], ["bash"])
    membership.join(client_in(world, proc))
    proc.chain(["claude"], ["bash"], ["codex"])
    with pytest.raises(NotJoined) as caught:
        client_in(world, proc).identity()
    assert type(caught.value) is NotJoined
    assert membership.join(client_in(world, proc)).handle == "proj-vm-2"
