"""Sessions as they are: shells on terminals of their own, tmux panes, agent harnesses that run each command apart.

Every command here is a process of its own. The shells are started as orphans, so that whatever runs this suite (an
agent harness, too) is none of their ancestors.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from tools import require_tool, skip_or_fail
from world import ENTRY, World

from sotbus.comm.processes import ancestry

BOUND_S = 60
SESSION_ID = "6f9619ff-8b86-4d01-b42d-00cf4fc964ff"

HARNESS_LOOP = r"""
printf 'ready %d\n' $$
while IFS= read -r line; do
  [ "$line" = quit ] && exit 0
  setsid --wait bash -c "$line"
done
"""
"""What stands in for a harness: each line that it reads runs in a session of its own."""


class Result:
    """What a command answered."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status = status
        self.out = out
        self.err = err

    def __repr__(self) -> str:
        return f"<Result {self.status} out={self.out!r} err={self.err!r}>"


class Place(Protocol):
    """Where commands are run: a terminal or a pane."""

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> Result: ...

    def ends(self) -> None: ...


def command_line(words: Sequence[str], base: Path, env: Mapping[str, str] | None = None) -> str:
    """A sotbus command for a shell, its two outputs in files at ``base``."""
    settings = "".join(f"{name}={shlex.quote(value)} " for name, value in (env or {}).items())
    command = shlex.join([sys.executable, str(ENTRY), *words])
    return f"{settings}{command} </dev/null >{shlex.quote(f'{base}.out')} 2>{shlex.quote(f'{base}.err')}"


def outcome(status: int, base: Path) -> Result:
    return Result(status, Path(f"{base}.out").read_text(), Path(f"{base}.err").read_text())


class Process:
    """A process that is no child of ours, held by a descriptor so that its pid can never mean another."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def wait_ended(self) -> None:
        """Until it runs no more; it may be a zombie still."""
        assert select.select([self._fd], [], [], BOUND_S)[0], f"process {self.pid} does not end"

    def wait_gone(self) -> None:
        """Until it has ended and has been reaped, by us where it became our child."""
        self.wait_ended()
        until = time.monotonic() + BOUND_S
        while os.path.exists(f"/proc/{self.pid}"):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)
            assert time.monotonic() < until, f"nobody reaps process {self.pid}"
            select.select([], [], [], 0.002)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        self.wait_ended()
        os.close(self._fd)


class Terminal:
    """An interactive shell that leads a session on a pseudo-terminal of its own, in one folder."""

    def __init__(self, world: World, cwd: Path, env: Mapping[str, str] | None = None) -> None:
        bash, setsid = require_tool("bash", "bash"), require_tool("setsid", "util-linux")
        self._scratch = Path(tempfile.mkdtemp(prefix="terminal-", dir=world.base))
        self._number = 0
        self._read = b""
        self.processes: list[Process] = []
        self._master, slave = pty.openpty()
        self._open = True
        modes = termios.tcgetattr(slave)
        modes[1] &= ~termios.OPOST
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        subprocess.run(
            [setsid, "--fork", "--ctty", bash, "--noprofile", "--norc", "--noediting", "-i"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env=world.environ({"PS1": "", "PS2": "", **(env or {})}),
            check=True,
            timeout=BOUND_S,
        )
        os.close(slave)
        self._type("printf 'ready %d\\n' $$")
        self.shell = self._started()

    def _type(self, line: str) -> None:
        os.write(self._master, line.encode() + b"\n")

    def _answer(self, word: str) -> int:
        """The number that follows a word which a line on the terminal begins with."""
        until = time.monotonic() + BOUND_S
        while True:
            found = re.search(rb"(?:^|\n)" + word.encode() + rb" (\d+)\r?\n", self._read)
            if found:
                self._read = self._read[found.end() - 1 :]
                return int(found[1])
            readable, _, _ = select.select([self._master], [], [], max(0.0, until - time.monotonic()))
            assert readable, f"no answer on the terminal, only {self._read!r}"
            self._read += os.read(self._master, 1 << 16)

    def _started(self) -> Process:
        process = Process(self._answer("ready"))
        self.processes.append(process)
        return process

    def begin(self, *words: str, env: Mapping[str, str] | None = None) -> Callable[[], Result]:
        """Start a command; what is answered waits for its end."""
        self._number += 1
        number, base = self._number, self._scratch / str(self._number)
        self._type(f"{command_line(words, base, env)}; printf 'done{number} %d\\n' $?")
        return lambda: outcome(self._answer(f"done{number}"), base)

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> Result:
        return self.begin(*words, env=env)()

    def export(self, name: str, value: str) -> None:
        self._type(f"export {name}={shlex.quote(value)}")

    def enter(self, argv0: str, script: str = "harness", *, direct: bool = False) -> Process:
        """Run a harness in the foreground; further commands are its.

        :param argv0: what it calls itself. :param script: the path of the script that it runs, below a scratch folder.
        :param direct: below a harness, with no shell between the two.
        """
        path = self._scratch / script
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HARNESS_LOOP)
        line = f"exec -a {shlex.quote(argv0)} bash {shlex.quote(str(path))}"
        self._type(line if direct else f"({line}); true")
        return self._started()

    def quit(self) -> None:
        """End the innermost harness by its own command."""
        self._type("quit")
        self.processes[-1].wait_ended()

    def hang_up(self) -> None:
        """Close the terminal as a window is closed: the shell gets its SIGHUP and ends."""
        self._open = False
        os.close(self._master)

    def ends(self) -> None:
        self.hang_up()
        self.shell.wait_gone()

    def close(self) -> None:
        if self._open:
            self.hang_up()
        for process in reversed(self.processes):
            process.kill()


Open = Callable[..., Terminal]


@pytest.fixture
def terminal(world: World) -> Iterator[Open]:
    """Opens terminals in a project's folder; all are closed at the end."""
    opened: list[Terminal] = []

    def open_one(project: str = "proj", env: Mapping[str, str] | None = None) -> Terminal:
        opened.append(Terminal(world, world.project(project), env))
        for process in ancestry(opened[-1].shell.pid).chain:
            if process.harness:
                skip_or_fail(f"an orphan's ancestor {process.pid} is an agent harness here, so all is one session")
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


class Pane:
    """A tmux pane with a shell in it."""

    def __init__(self, tmux: Tmux, target: str) -> None:
        self._tmux = tmux
        self.id = target
        self._number = 0
        self.shell = Process(int(tmux.ask("display-message", "-p", "-t", target, "#{pane_pid}")))

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> Result:
        self._number += 1
        base = self._tmux.scratch / f"{self.id[1:]}-{self._number}"
        line = f"{command_line(words, base, env)}; echo $? >{base}.rc; {self._tmux.program} wait-for -S {base.name}"
        self._tmux.ask("send-keys", "-l", "-t", self.id, line)
        self._tmux.ask("send-keys", "-t", self.id, "Enter")
        self._tmux.ask("wait-for", base.name)
        return outcome(int(Path(f"{base}.rc").read_text()), base)

    def ends(self) -> None:
        self._tmux.ask("kill-pane", "-t", self.id)
        self.shell.wait_gone()


class Tmux:
    """A tmux server of our own."""

    def __init__(self, world: World, program: str) -> None:
        self.program = program
        self.scratch = Path(tempfile.mkdtemp(prefix="sotbus-tmux-"))
        self._socket = f"sotbus-{uuid.uuid4().hex[:12]}"
        self._environ = world.environ({"TMUX_TMPDIR": str(self.scratch), "HISTFILE": "", "PS1": "$ "})
        self._shell = shlex.join([require_tool("bash", "bash"), "--noprofile", "--norc"])
        self._world = world
        self._server: Process | None = None

    @property
    def server(self) -> int:
        """The server's pid."""
        assert self._server is not None
        return self._server.pid

    def ask(self, *words: str) -> str:
        command = [self.program, "-L", self._socket, "-f", "/dev/null", *words]
        done = subprocess.run(command, env=self._environ, capture_output=True, text=True, timeout=BOUND_S, check=True)
        return done.stdout.strip()

    def pane(self, project: str = "proj") -> Pane:
        """A new pane in a project's folder, in the one window of the server."""
        where = ["-c", str(self._world.project(project)), "-P", "-F", "#{pane_id}", self._shell]
        if self._server is None:
            found = self.ask("new-session", "-d", "-x", "220", "-y", "50", *where)
            self._server = Process(int(self.ask("display-message", "-p", "#{pid}")))
        else:
            found = self.ask("split-window", "-d", *where)
        return Pane(self, found)

    def close(self) -> None:
        if self._server is not None:
            self.ask("kill-server")
            self._server.wait_ended()
        shutil.rmtree(self.scratch)


@pytest.fixture
def tmux(world: World) -> Iterator[Tmux]:
    server = Tmux(world, require_tool("tmux", "tmux"))
    yield server
    server.close()


def entries(world: World) -> dict[str, Any]:
    agents: dict[str, Any] = json.loads((world.home / "registry.json").read_text())["agents"]
    return agents


def files(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder with its bytes, None for a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def cursors(world: World) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in (world.home / "read").glob("*.cursor")}


def join(place: Place, *words: str, env: Mapping[str, str] | None = None) -> str:
    """Join; the handle that it printed."""
    done = place.run("join", *words, env=env)
    found = re.match(r"Joined sot-comm as @(\S+)  \(", done.out)
    assert done.status == 0, done
    assert found, done
    return found[1]


def texts(place: Place) -> list[str]:
    """Poll; the messages' texts, or none."""
    done = place.run("poll", "--json")
    assert done.status == 0, done
    return [json.loads(line)["msg"] for line in done.out.splitlines()]


def whoami(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(place.run("whoami", "--json").out)
    return found


def check_that_mail_stays_apart(world: World, first: Place, second: Place) -> None:
    """Two sessions that have not joined yet, in one folder: handles, mail and cursors never mix."""
    assert join(first) == "proj-vm"
    before = second.run("poll")
    assert (before.status, before.out) == (1, ""), before
    assert before.err.startswith("Not joined"), before
    joined = second.run("join")
    assert joined.status == 0, joined
    assert joined.out.startswith("Joined sot-comm as @proj-vm-2  ("), joined
    assert "@proj-vm is held by another session in this folder" in joined.err, joined
    assert first.run("send", "@proj-vm-2", "to the second").out == "  filed -> @proj-vm-2\n"
    assert second.run("send", "@proj-vm", "to the first").out == "  filed -> @proj-vm\n"
    assert texts(second) == ["to the second"]
    assert set(cursors(world)) == {"proj-vm-2"}
    seen_by_second = cursors(world)["proj-vm-2"]
    assert texts(first) == ["to the first"]
    assert cursors(world)["proj-vm-2"] == seen_by_second
    assert join(first) == "proj-vm"
    assert join(second) == "proj-vm-2"
    assert texts(first) == texts(second) == []


# --- terminals


@pytest.mark.spec("S82")
def test_two_terminals_in_one_folder_never_share_a_handle_or_mail(world: World, terminal: Open) -> None:
    check_that_mail_stays_apart(world, terminal(), terminal())


@pytest.mark.spec("S13")
def test_the_shell_that_leads_a_terminal_is_the_process_whose_life_is_the_sessions(
    world: World, terminal: Open
) -> None:
    one = terminal()
    join(one)
    entry = entries(world)["proj-vm"]
    assert entry["pid"] == one.shell.pid
    assert entry["workspace_id"] == ""


def test_two_terminals_that_name_themselves_keep_their_names_and_their_mail(world: World, terminal: Open) -> None:
    alice, bob = terminal(), terminal()
    assert join(alice, "--name", "alice") == "alice"
    assert join(bob, "--name", "bob") == "bob"
    alice.run("send", "@bob", "hello")
    assert texts(alice) == []
    assert texts(bob) == ["hello"]
    assert [join(alice), join(bob)] == ["alice", "bob"]
    assert whoami(alice)["handle"] == "alice"
    assert set(entries(world)) == {"alice", "bob"}


def test_a_terminal_without_a_name_takes_the_plain_handle_beside_one_that_has_a_name(
    world: World, terminal: Open
) -> None:
    named, plain = terminal(), terminal()
    join(named, "--name", "alice")
    done = plain.run("join")
    assert done.out.startswith("Joined sot-comm as @proj-vm  ("), done
    assert "held by another" not in done.err
    assert done.out.splitlines()[2] == "Others registered: alice"


def test_the_name_of_another_live_terminal_is_exit_3_with_nothing_written_unless_repinned(
    world: World, terminal: Open
) -> None:
    alice, other, third = terminal(), terminal(), terminal("elsewhere")
    join(alice, "--name", "alice")
    join(other)
    before = files(world.home)
    for place in (other, third):
        done = place.run("join", "--name", "alice")
        assert (done.status, done.out) == (3, ""), done
        assert "@alice is held by another live session of this box" in done.err
        assert "--repin" in done.err
        assert files(world.home) == before
    assert join(other, "--name", "alice", "--repin") == "alice"
    assert entries(world)["alice"]["pid"] == other.shell.pid


def test_after_a_repin_only_the_new_holder_reads_the_mail(world: World, terminal: Open) -> None:
    old, new = terminal(), terminal()
    join(old, "--name", "alice")
    join(new, "--name", "alice", "--repin")
    new.run("send", "@alice", "x")
    before = cursors(world)
    old.run("poll")
    assert cursors(world) == before


def test_when_the_first_terminal_ends_a_newcomer_takes_the_plain_handle_and_the_second_keeps_its_own(
    world: World, terminal: Open
) -> None:
    first, second = terminal(), terminal()
    join(first)
    assert join(second) == "proj-vm-2"
    second.run("send", "@proj-vm", "left behind")
    first.ends()
    newcomer = terminal()
    done = newcomer.run("join")
    assert done.out.startswith("Joined sot-comm as @proj-vm  ("), done
    assert "held by another" not in done.err
    assert join(second) == "proj-vm-2"
    assert texts(second) == []
    assert texts(newcomer) == ["left behind"]


def test_three_terminals_in_one_folder_are_three_sessions(world: World, terminal: Open) -> None:
    places = [terminal() for _ in range(3)]
    handles = ["proj-vm", "proj-vm-2", "proj-vm-3"]
    assert [join(place) for place in places] == handles
    for sender, place in enumerate(places):
        assert place.run("send", "--broadcast", f"{sender}").out.endswith("Broadcast to 2 agent(s).\n")
    polls = [place.begin("poll", "--json") for place in places]
    got = [[json.loads(line)["msg"] for line in poll().out.splitlines()] for poll in polls]
    assert got == [["1", "2"], ["0", "2"], ["0", "1"]]


@pytest.mark.spec("S83")
def test_terminals_in_two_folders_have_the_handles_of_their_folders(world: World, terminal: Open) -> None:
    one, two = terminal("one"), terminal("two")
    for place, handle in ((one, "one-vm"), (two, "two-vm"), (one, "one-vm")):
        done = place.run("join")
        assert done.out.startswith(f"Joined sot-comm as @{handle}  ("), done
        assert "note" not in done.err
    two.run("send", "@one-vm", "hi")
    assert (texts(two), texts(one)) == ([], ["hi"])


def test_joins_at_the_same_moment_from_four_terminals_give_four_handles(world: World, terminal: Open) -> None:
    places = [terminal() for _ in range(4)]
    begun = [place.begin("join") for place in places]
    done = [one() for one in begun]
    assert [one.status for one in done] == [0] * 4, done
    assert set(entries(world)) == {"proj-vm", "proj-vm-2", "proj-vm-3", "proj-vm-4"}
    asked = [place.begin("whoami", "--json") for place in places]
    assert {json.loads(one().out)["handle"] for one in asked} == set(entries(world))


def test_a_leave_gives_back_one_terminals_handle_and_leaves_the_other_alone(world: World, terminal: Open) -> None:
    first, second = terminal(), terminal()
    join(first)
    join(second)
    kept = entries(world)["proj-vm-2"]
    assert first.run("leave").out == "Left sot-comm (@proj-vm removed).\n"
    assert entries(world) == {"proj-vm-2": kept}
    assert first.run("leave").out == "Not joined — nothing to do.\n"
    assert whoami(second)["handle"] == "proj-vm-2"


# --- tmux


@pytest.mark.spec("S82")
def test_two_tmux_panes_of_one_folder_never_share_a_handle_or_mail(world: World, tmux: Tmux) -> None:
    check_that_mail_stays_apart(world, tmux.pane(), tmux.pane())


def test_when_a_tmux_pane_ends_a_newcomer_takes_its_handle_again(world: World, tmux: Tmux) -> None:
    first, second = tmux.pane(), tmux.pane()
    assert [join(first), join(second)] == ["proj-vm", "proj-vm-2"]
    assert whoami(first)["self_file"] != whoami(second)["self_file"]
    first.ends()
    assert join(tmux.pane()) == "proj-vm"
    assert join(second) == "proj-vm-2"


def test_a_pane_and_a_terminal_that_inherited_its_variables_are_two_sessions(
    world: World, tmux: Tmux, terminal: Open
) -> None:
    pane = tmux.pane()
    inherited = {"TMUX": f"/x,{tmux.server},0", "TMUX_PANE": pane.id}
    assert [join(pane), join(terminal(env=inherited))] == ["proj-vm", "proj-vm-2"]


# --- harnesses

CLAUDE_WRAPPER = ("node", "x/node_modules/@anthropic-ai/claude-code/cli.js")
CODEX_WRAPPER = ("node", "x/node_modules/@openai/codex/bin/codex.js")


@pytest.mark.parametrize(
    ("argv0", "script", "harness"),
    [("claude", "harness", "claude"), ("codex", "harness", "codex"), (*CLAUDE_WRAPPER, "claude")],
    ids=["claude", "codex", "node running claude"],
)
def test_a_harness_that_runs_each_command_in_a_session_of_its_own_is_one_session(
    world: World, terminal: Open, argv0: str, script: str, harness: str
) -> None:
    place = terminal()
    process = place.enter(argv0, script)
    assert join(place) == "proj-vm"
    entry = entries(world)["proj-vm"]
    assert (entry["harness"], entry["pid"]) == (harness, process.pid)
    assert place.run("send", "@proj-vm", "to myself").status == 0
    assert texts(place) == ["to myself"]
    assert join(place) == "proj-vm"
    assert set(entries(world)) == {"proj-vm"}
    place.quit()
    assert join(place) == "proj-vm"
    assert "harness" not in entries(world)["proj-vm"]


def test_a_wrapper_and_its_native_child_are_the_same_session_as_the_child(world: World, terminal: Open) -> None:
    place = terminal()
    place.enter(*CODEX_WRAPPER)
    native = place.enter("codex", direct=True)
    assert join(place) == "proj-vm"
    assert entries(world)["proj-vm"]["pid"] == native.pid


@pytest.mark.spec("S82")
def test_two_harnesses_in_one_folder_never_share_a_handle_or_mail(world: World, terminal: Open) -> None:
    first, second = terminal(), terminal()
    first.enter("claude")
    second.enter("claude")
    check_that_mail_stays_apart(world, first, second)


def test_a_codex_below_a_claude_is_a_session_of_its_own_although_it_inherits_its_session_id(
    world: World, terminal: Open
) -> None:
    place = terminal(env={"CLAUDE_CODE_SESSION_ID": SESSION_ID})
    place.enter("claude")
    assert join(place) == "proj-vm"
    assert entries(world)["proj-vm"]["instance"] == SESSION_ID
    place.enter("codex")
    assert whoami(place)["handle"] is None
    assert join(place) == "proj-vm-2"
    codex = entries(world)["proj-vm-2"]
    assert (codex["harness"], codex["instance"] == SESSION_ID) == ("codex", False)
    place.run("send", "@proj-vm", "from below")
    assert texts(place) == []
    place.quit()
    assert whoami(place)["handle"] == "proj-vm"
    assert texts(place) == ["from below"]


@pytest.mark.parametrize("given", ["pin", "row"])
def test_a_nested_harness_may_not_act_with_an_inherited_pin_or_row_and_may_look(
    world: World, terminal: Open, given: str
) -> None:
    pin = {"SOT_COMM_SELF_FILE": str(world.home / "self" / "vm__ws-1.txt")}
    place = terminal(env=pin if given == "pin" else {"SOT_WORKSPACE_ID": "ws-1"})
    place.enter("claude")
    assert join(place) == "proj-vm"
    assert place.run("send", "@proj-vm", "unread").status == 0
    before = files(world.home)
    place.enter("codex")
    for words in (["send", "@proj-vm", "x"], ["poll"], ["join"]):
        done = place.run(*words)
        assert (done.status, done.out) == (1, ""), done
        assert "another agent (codex, pid " in done.err, done
        assert files(world.home) == before
    listed = place.run("list")
    assert listed.status == 0, listed
    assert "@proj-vm " in listed.out
    assert "<- me" not in listed.out
    assert str(world.home) in place.run("whoami").out
    assert files(world.home) == before
    place.quit()
    assert texts(place) == ["unread"]


def test_a_harness_that_its_own_kind_starts_with_no_shell_between_may_not_act_with_its_pin(
    world: World, terminal: Open
) -> None:
    place = terminal(env={"SOT_COMM_SELF_FILE": str(world.home / "self" / "vm__ws-1.txt")})
    place.enter("claude")
    join(place)
    place.enter("claude", direct=True)
    assert place.run("poll").status == 1


def test_a_shell_that_a_harness_left_behind_with_its_pin_keeps_the_pinned_identity(
    world: World, terminal: Open
) -> None:
    place = terminal()
    place.export("SOT_COMM_SELF_FILE", str(world.home / "self" / "mine.txt"))
    place.enter("claude")
    join(place, "--name", "mine")
    place.quit()
    assert whoami(place)["handle"] == "mine"
