"""The foreign client by itself: the vectors, and what it must get right before it can stand for another program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tools import require_tool

CLIENT = Path(__file__).with_name("foreign_comm.sh")
VECTORS = Path(__file__).parents[1] / "vectors"
TOOLS = ("bash", "jq", "flock", "link", "cksum", "sync", "truncate", "stat")
MACHINE = "0123456789abcdef0123456789abcdef"
# A mount that proves fresh reads, so that the reclaim tests do not depend on what the test folder lies on.
EXT4 = "21 1 254:2 / / rw,relatime shared:1 - ext4 /dev/vda2 rw\n"

PATIENT = {"SOT_LOCK_WAIT_SECS": "60"}
"""For those that wait for others, however slow the machine is."""

Done = subprocess.CompletedProcess[bytes]
Running = subprocess.Popen[bytes]


def cases(name: str) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads((VECTORS / f"{name}.json").read_text())["cases"]
    return loaded


@pytest.fixture(autouse=True)
def _tools() -> None:
    for tool in TOOLS:
        require_tool(tool, "see the script's head")


class Client:
    """One comm folder, used through the script; every process it starts is dead when the test is over."""

    def __init__(self, tmp: Path) -> None:
        self.home = tmp / "comm"
        self.mountinfo = tmp / "mountinfo"
        self.mountinfo.write_text(EXT4)
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp),
            "TMPDIR": str(tmp),
            "SOT_COMM_HOME": str(self.home),
            "SOT_SELF_HOST": "boxa",
            "FOREIGN_MACHINE_ID": MACHINE,
            "FOREIGN_MOUNTINFO": str(self.mountinfo),
        }
        self.started: list[Running] = []

    def start(self, *args: str, **env: str) -> Running:
        process = subprocess.Popen(
            [str(CLIENT), *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**self.env, **env},
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *args: str, **env: str) -> Done:
        return self.feed(b"", *args, **env)

    def feed(self, stdin: bytes, *args: str, **env: str) -> Done:
        return subprocess.run(
            [str(CLIENT), *args], input=stdin, capture_output=True, env={**self.env, **env}, timeout=60, check=False
        )

    def ok(self, *args: str, **env: str) -> str:
        done = self.run(*args, **env)
        assert done.returncode == 0, done
        return done.stdout.decode()

    def join(self, *handles: str) -> None:
        for handle in handles:
            root = self.home.parent / f"root-{handle}"
            root.mkdir(exist_ok=True)
            self.ok("join", handle, str(root))

    def inbox(self, handle: str) -> Path:
        return self.home / "inbox" / f"{handle}.jsonl"

    def cursor(self, handle: str) -> Path:
        return self.home / "read" / f"{handle}.cursor"

    def lines(self, handle: str) -> list[dict[str, Any]]:
        data = self.inbox(handle).read_bytes()
        assert data == b"" or data.endswith(b"\n")
        return [json.loads(line) for line in data.splitlines()]

    def registry(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.home / "registry.json").read_text())
        return loaded

    def dead_holder(self) -> str:
        """Leaves the registry lock held by a process that is gone; returns its record."""
        holder = self.start("lock-hold", "60")
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        record = (self.home / ".registry.lock").read_text()
        assert record.endswith("\n")
        assert record.split(":")[4] == str(holder.pid)
        holder.kill()
        holder.communicate()
        assert (self.home / ".registry.lock").read_text() == record
        return record.rstrip("\n")

    def stop_half(self, sender: str, to: str, text: str) -> Running:
        """A send that stands still with half of its line written, under the lock, until a SIGCONT."""
        process = self.start("send", sender, to, text, FOREIGN_HALF_STOP="1")
        stat = Path(f"/proc/{process.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        assert not self.inbox(to).read_bytes().endswith(b"\n")
        return process

    def send_behind(self, stopped: Running, sender: str, to: str, text: str) -> None:
        """A send that comes to the lock while another one holds it, and is filed once that has gone on and ended."""
        late = self.start("send", sender, to, text, SOT_INBOX_LOCK_WAIT_SECS="60")
        until(Path(f"/proc/{late.pid}/fd/9").exists)  # it has opened the lock file
        os.kill(stopped.pid, signal.SIGCONT)
        for process in (stopped, late):
            assert process.communicate(timeout=60) == (b"  filed -> @b\n", b"")
            assert process.returncode == 0

    def marker(self, record: str) -> Path:
        return self.home / (".registry.lock.reclaim." + record.replace(":", "."))

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    made = Client(tmp_path)
    try:
        yield made
    finally:
        made.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited 30 s"
        time.sleep(0.01)


# --- vectors -----------------------------------------------------------------


@pytest.mark.parametrize("case", cases("cursors"), ids=lambda case: case["name"])
def test_cursor_vectors(client: Client, case: dict[str, Any]) -> None:
    handle = case["handle"]
    client.ok("ensure")
    client.inbox(handle).write_bytes(case["inbox"].encode())
    if case["cursor"] is not None:
        client.cursor(handle).write_bytes(case["cursor"].encode())

    offset = client.run("offset", handle)
    assert (offset.returncode, offset.stdout) == (0, b"%d\n" % case["offset"])
    assert (b"was cut back; reading from the line before it" in offset.stderr) is case["note"]
    unread = client.run("unread", handle)
    assert (unread.returncode, unread.stdout) == (0, b"%d %d\n" % (case["total"], case["unread"]))

    poll = client.run("poll", handle)
    assert poll.returncode == 0
    if case["total"] == case["offset"]:
        assert poll.stdout == b"No new messages.\n"
        before = None if case["cursor"] is None else case["cursor"].encode()
        assert (client.cursor(handle).read_bytes() if client.cursor(handle).exists() else None) == before
    else:
        last = case["inbox"].encode().split(b"\n")[case["total"] - 1]
        hashed = client.feed(last, "hash").stdout.rstrip(b"\n")
        assert client.cursor(handle).read_bytes() == b"%d %s" % (case["total"], hashed)
        assert client.ok("unread", handle) == f"{case['total']} 0\n"


@pytest.mark.parametrize("case", cases("hashes"), ids=lambda case: case["line"][:12].encode().hex() or "empty")
def test_hash_vectors(client: Client, case: dict[str, Any]) -> None:
    for end in (b"", b"\n"):
        assert client.feed(case["line"].encode() + end, "hash").stdout.decode() == case["hash"] + "\n"


@pytest.mark.parametrize("case", cases("judge"), ids=lambda case: case["record"] or "empty")
def test_judge_vectors(client: Client, tmp_path: Path, case: dict[str, Any]) -> None:
    for pid, start in case["proc"].items():
        (tmp_path / "proc" / pid).mkdir(parents=True)
        fields = " ".join(["S", *["0"] * 18, str(start), "0"])
        (tmp_path / "proc" / pid / "stat").write_text(f"{pid} (a) b\n(c) {fields}\n")
    me = case["me"]
    own = ":".join([me["name"], me["machine"], me["boot"], me["pidns"], "1", me["start"]])
    answer = client.ok("judge", case["record"], FOREIGN_ME=own, FOREIGN_PROC=str(tmp_path / "proc"))
    assert answer.split(":")[0] == case["verdict"], answer


@pytest.mark.parametrize("case", cases("handles"), ids=lambda case: ascii(case["handle"]))
def test_handle_vectors(client: Client, case: dict[str, Any]) -> None:
    assert (client.run("handle", case["handle"]).returncode == 0) is case["valid"]


@pytest.mark.parametrize("case", cases("lock_identity"), ids=lambda case: case["name"])
def test_lock_identity_vectors(client: Client, case: dict[str, Any]) -> None:
    client.mountinfo.write_text(case["mountinfo"])
    answer = client.ok("mount", case["path"], FOREIGN_MACHINE_ID=case["machine_id"] or "")
    assert answer == f"{case['identity']} {'fresh' if case['proves_fresh_read'] else 'not fresh'}\n"


# --- mail --------------------------------------------------------------------


def test_round_trip(client: Client) -> None:
    client.join("a", "b")
    text = 'hello\nsecond line "q" \\ ☃'
    assert client.ok("send", "a", "b", text) == "  filed -> @b\n"
    raw = client.inbox("b").read_bytes()
    stamp = json.loads(raw)["ts"]
    assert raw.decode() == (
        '{"from":"a","to":"b","repo":"root-a","msg":"hello\\nsecond line \\"q\\" \\\\ ☃","ts":"' + stamp + '"}\n'
    )
    assert client.ok("unread", "b") == "1 1\n"
    assert client.ok("poll", "b") == f"[{stamp}] [a:root-a] {text}\n"
    assert client.ok("unread", "b") == "1 0\n"
    assert client.ok("poll", "b") == "No new messages.\n"
    assert client.ok("send", "b", "a", "back") == "  filed -> @a\n"
    assert client.ok("unread", "a") == "1 1\n"
    assert client.ok("poll", "nobody") == "No messages.\n"
    assert client.ok("unread", "nobody") == "0 0\n"


def test_everything_is_private(client: Client) -> None:
    client.join("a", "b")
    client.ok("send", "a", "b", "x")
    client.ok("poll", "b")
    found = [client.home, *client.home.rglob("*")]
    assert {client.inbox("b"), client.cursor("b"), client.home / "self"} <= set(found)
    for path in found:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert not [path for path in found if ".tmp" in path.name or ".new." in path.name]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (None, "no box knows that handle: b"),
        ({"host": "", "last_seen": "2999-01-01T00:00:00Z"}, "no box knows that handle: b"),
        ({"host": "x", "last_seen": "2020-01-01T00:00:00Z"}, "no live session holds @b"),
        ({"host": "x", "last_seen": "2999-01-01T00:00:00Z\n"}, "no live session holds @b"),
        ({"host": "x", "last_seen": 7}, "no live session holds @b"),
        ({"host": "x"}, "no live session holds @b"),
        ({"host": "x", "last_seen": "2999-01-01T00:00:00Z"}, None),
    ],
)
def test_liveness(client: Client, entry: dict[str, Any] | None, reason: str | None) -> None:
    client.join("a")
    agents = client.registry()["agents"] | ({} if entry is None else {"b": entry})
    (client.home / "registry.json").write_text(json.dumps({"protocol_version": 1, "agents": agents}))
    sent = client.run("send", "a", "b", "x")
    if reason is None:
        assert (sent.returncode, sent.stdout) == (0, b"  filed -> @b\n")
    else:
        assert (sent.returncode, sent.stdout, sent.stderr.decode()) == (1, b"", f"FAILED -> @b: {reason}\n")
        assert not client.inbox("b").exists()


def test_half_a_line_stays_under_the_lock(client: Client) -> None:
    client.join("a", "b")
    slow = client.stop_half("a", "b", "slow")
    held = client.run("send", "a", "b", "early", SOT_INBOX_LOCK_WAIT_SECS="0.2")
    assert held.returncode == 1
    assert held.stderr.decode() == ("FAILED -> @b: the inbox lock for @b was held for 0.2s — nothing was appended\n")
    busy = client.run("poll", "b", SOT_INBOX_READ_WAIT_SECS="0.1")
    assert (busy.returncode, busy.stdout.decode()) == (
        75,
        "the inbox for @b is being written — nothing was read; run comm-poll.sh again\n",
    )
    assert not client.cursor("b").exists()
    assert not client.inbox("b").read_bytes().endswith(b"\n")
    client.send_behind(slow, "a", "b", "late")
    assert [line["msg"] for line in client.lines("b")] == ["slow", "late"]


def test_the_tries_under_an_nfs4_manager_are_bounded_too(client: Client) -> None:
    client.join("a", "b")
    assert client.ok("record", "nfs4 filer.example:/e") == "recorded\n"
    slow = client.stop_half("a", "b", "slow")
    assert client.run("unread", "b", SOT_INBOX_READ_WAIT_SECS="0.1").returncode == 75
    client.send_behind(slow, "a", "b", "late")
    assert [line["msg"] for line in client.lines("b")] == ["slow", "late"]


def test_a_killed_writer_holds_no_lock_and_its_half_line_is_cut(client: Client) -> None:
    client.join("a", "b")
    client.ok("send", "a", "b", "first")
    whole = client.inbox("b").read_bytes()
    dead = client.run("send", "a", "b", "x" * 9000, FOREIGN_DIE_HALF="1")
    assert dead.returncode == -signal.SIGKILL
    torn = len(client.inbox("b").read_bytes()) - len(whole)
    assert torn > 4096
    assert client.ok("unread", "b") == "1 1\n"
    after = client.run("send", "a", "b", "second")
    assert (after.returncode, after.stdout) == (0, b"  filed -> @b\n")
    assert after.stderr.decode() == (
        f"note: cut {torn} bytes of an unterminated line a dead writer left in @b's inbox\n"
    )
    assert [line["msg"] for line in client.lines("b")] == ["first", "second"]
    # A killed process that was waiting under the lock leaves no child that holds it on.
    slow = client.start("send", "a", "b", "slow", FOREIGN_HALF_SECS="30")
    until(lambda: not client.inbox("b").read_bytes().endswith(b"\n"))
    slow.kill()
    assert client.ok("send", "a", "b", "third") == "  filed -> @b\n"
    assert [line["msg"] for line in client.lines("b")] == ["first", "second", "third"]


@pytest.mark.parametrize("tail", [b"no newline at all", b"\0" * 5000], ids=["text", "nul"])
def test_a_tail_without_any_newline_is_cut_to_nothing(client: Client, tail: bytes) -> None:
    client.join("a", "b")
    client.inbox("b").write_bytes(tail)
    client.ok("send", "a", "b", "only")
    assert [line["msg"] for line in client.lines("b")] == ["only"]


def test_twenty_sends_at_once_are_all_whole(client: Client) -> None:
    client.join("a", "b")
    bodies = [f"{n} " + "ü" * 3000 for n in range(20)]
    running = [client.start("send", "a", "b", body, SOT_INBOX_LOCK_WAIT_SECS="30") for body in bodies]
    for process in running:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, b"  filed -> @b\n"), err
    assert sorted(line["msg"] for line in client.lines("b")) == sorted(bodies)
    shown = client.ok("poll", "b")
    assert shown.count("\n") == 20
    assert all(body in shown for body in bodies)
    assert client.ok("unread", "b") == "20 0\n"


def test_only_strict_objects_are_shown(client: Client) -> None:
    client.join("a")
    good = [
        rb'{"msg":"tab \t, pair \ud83d\ude00, \\ud800 is text","n":[-0,1.5e+3,true,false,null,{}]}',
        b'  {"ts":"t","from":"f","repo":"r","message":"m"}\t\r',
        b'{"text":"","x":"\x7f"}',
        b'{"msg":"nul \0 dropped"}',
        b'{"msg":7,"from":7}',
    ]
    bad = [
        b'{"n":01}', b'{"n":.5}', b'{"n":1.}', b'{"n":+1}', b'{"n":nan}', b'{"n":Infinity}', b'{"n":-Infinity}',
        rb'{"msg":"\ud800"}', rb'{"msg":"\udc00\ud800"}', rb'{"msg":"\ud800\u0041"}', rb'{"msg":"\x"}',
        b'{"msg":"raw\ttab"}', b'{"msg":"\xff"}', b'{"msg":"\xed\xa0\x80"}', b'{"msg":"\xc0\x80"}', b'{"a":1,}',
        b"\xef\xbb\xbf{}", b"{} {}", b"{}x", b"[]", b"", b"7", b'"{}"', b"$", b'{"a":$}', b"{'a':1}", b'{"a":"b}',
    ]  # fmt: skip
    client.inbox("a").write_bytes(b"".join(line + b"\n" for pair in zip(good, bad[:5], strict=True) for line in pair))
    with client.inbox("a").open("ab") as inbox:
        inbox.writelines(line + b"\n" for line in bad[5:])
    assert client.ok("poll", "a") == (
        "[] [:] tab \t, pair 😀, \\ud800 is text\n[t] [f:r] m\n[] [:] \n[] [:] nul  dropped\n[] [7:] 7\n"
    )
    assert client.ok("unread", "a") == f"{len(good) + len(bad)} 0\n"


# --- the registry and its lock -----------------------------------------------


def test_registry_writes_change_only_their_own(client: Client) -> None:
    client.join("a", "b")
    known = client.registry()
    known["more"] = {"kept": [1, "ü"]}
    known["agents"]["a"] |= {"state": "working", "last_seen": "2020-01-01T00:00:00Z"}
    (client.home / "registry.json").write_text(json.dumps(known))
    client.ok("touch", "a")
    client.ok("touch", "absent")
    touched = client.registry()
    known["agents"]["a"]["last_seen"] = touched["agents"]["a"]["last_seen"]
    assert touched == known
    assert touched["agents"]["a"]["last_seen"] > "2020-01-01T00:00:00Z"
    client.join("a")
    entry = client.registry()["agents"]["a"]
    root = client.home.parent / "root-a"
    assert entry == {
        "host": "boxa",
        "workspace_id": "",
        "repo": "root-a",
        "root": str(root.resolve()),
        "expertise": [],
        "status": "idle",
        "joined": entry["joined"],
        "last_seen": entry["joined"],
    }
    client.ok("leave", "b")
    client.ok("leave", "b")
    assert list(client.registry()["agents"]) == ["a"]
    assert client.registry()["more"] == known["more"]
    assert client.inbox("b").exists()
    assert not (client.home / ".registry.lock").exists()


@pytest.mark.parametrize("text", ["", "{", "{} {}", '{"agents":5}', "[]"])
def test_an_unreadable_registry_is_left_as_it_is(client: Client, tmp_path: Path, text: str) -> None:
    client.ok("ensure")
    (client.home / "registry.json").write_text(text)
    joined = client.run("join", "a", str(tmp_path))
    assert joined.returncode == 1
    assert joined.stderr == b"FAILED: the registry could not be read or updated, so nothing was written\n"
    sent = client.run("send", "a", "b", "x")
    assert sent.returncode == 1
    assert sent.stderr == (
        b"FAILED -> @b: the registry could not be read, so @b could not be routed; nothing was sent\n"
    )
    assert (client.home / "registry.json").read_text() == text
    assert sorted(path.name for path in client.home.iterdir()) == ["inbox", "read", "registry.json", "self"]


def test_the_lock_is_held_and_released(client: Client) -> None:
    client.ok("ensure")
    holder = client.start("lock-hold", "600")
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    lock = client.home / ".registry.lock"
    name, machine, boot, _pidns, pid, start = lock.read_text().rstrip("\n").split(":")
    assert (name, machine, pid) == ("boxa", MACHINE, str(holder.pid))
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert start == Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]

    os.kill(holder.pid, signal.SIGSTOP)  # frozen is not dead
    refused = client.run("lock-take", "0.2")
    os.kill(holder.pid, signal.SIGCONT)
    assert refused.returncode == 1
    said = refused.stderr.decode()
    assert said.startswith(f"FAILED: registry lock {lock} is held by boxa pid {pid} start {start} (")
    assert said.endswith(" old): it is running. If it is dead, run any comm command on boxa.\n")

    waiter = client.start("lock-take", "60")
    holder.terminate()
    assert holder.wait(60) == 128 + signal.SIGTERM
    assert waiter.communicate(timeout=60) == (b"taken\n", b"")
    assert not lock.exists()


def test_the_name_in_a_record_is_mapped_by_characters(client: Client) -> None:
    holder = client.start("lock-hold", "30", SOT_SELF_HOST="Boîte a:b")
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    assert (client.home / ".registry.lock").read_text().startswith(f"Bo_te_a_b:{MACHINE}:")


def test_a_dead_holder_is_reclaimed_at_the_first_failed_take(client: Client) -> None:
    record = client.dead_holder()
    taken = client.run("lock-take", "0")
    assert (taken.returncode, taken.stdout) == (0, b"taken\n"), taken.stderr
    assert client.marker(record).exists()
    assert not (client.home / ".registry.lock").exists()


def test_waiters_on_a_dead_holder_never_hold_at_once(client: Client) -> None:
    record = client.dead_holder()
    lock = client.home / ".registry.lock"
    waiting = {str(process.pid): process for process in (client.start("lock-hold", "600", **PATIENT) for _ in range(3))}

    def holder() -> str:
        """The pid in the lock's record; ``""`` where there is no lock, or it is still the dead one's."""
        try:
            held = lock.read_text().rstrip("\n")
        except FileNotFoundError:
            return ""
        return "" if held == record else held.split(":")[4]

    while waiting:
        until(lambda: holder() in waiting)
        process = waiting.pop(holder())
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        # It holds it for as long as it wants, and nobody takes it from it.
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            assert holder() == str(process.pid)
            time.sleep(0.005)
        process.terminate()
        assert process.communicate() == (b"", b"")
    assert not lock.exists()


def test_a_dead_reclaimer_is_passed_and_a_loop_is_not(client: Client) -> None:
    first = client.dead_holder()
    (client.home / ".registry.lock").unlink()
    second = client.dead_holder()
    lock = client.home / ".registry.lock"
    lock.write_text(first + "\n")
    client.marker(first).write_text(second + "\n")
    client.marker(second).write_text(first + "\n")
    looped = client.run("lock-take", "2")
    assert looped.returncode == 1
    said = looped.stderr.decode()
    assert said.startswith(f"FAILED: registry lock {lock} still held (")
    assert f"{client.marker(second)} names {first}, which its reclaim chain already holds" in said
    assert said.endswith(f"If its holder is dead, remove {lock} by hand and retry.\n")
    assert lock.read_text() == first + "\n"
    client.marker(second).unlink()
    assert client.ok("lock-take", "5") == "taken\n"
    assert client.marker(second).exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("boxb:-:-:-:7:-\n", "it is on another machine. If it is dead, run any comm command on boxb. If its holder is"),
        ("boxb:m2:b2:n2:7:1\n", "it is on another machine. If it is dead, run any comm command on boxb.\n"),
        ("words\n", "its record names no holder (words). If its holder is dead, remove "),
        ("", "its record names no holder (empty). If its holder is dead, remove "),
        (None, "held by an older version that records no holder. If its holder is dead, remove "),
    ],
    ids=["no proof", "elsewhere", "words", "empty", "directory"],
)
def test_what_nobody_here_can_prove_dead_is_never_forced(client: Client, content: str | None, why: str) -> None:
    client.ok("ensure")
    lock = client.home / ".registry.lock"
    if content is None:
        lock.mkdir()
    else:
        lock.write_text(content)
    refused = client.run("lock-take", "0")
    assert refused.returncode == 1
    assert why in refused.stderr.decode()
    assert lock.exists()


def test_a_mount_that_proves_no_fresh_read_proves_no_death(client: Client) -> None:
    record = client.dead_holder()
    client.mountinfo.write_text(EXT4.replace("ext4", "overlay"))
    refused = client.run("lock-take", "0")
    assert refused.returncode == 1
    assert b"this box cannot prove a death" in refused.stderr
    assert (client.home / ".registry.lock").read_text().rstrip("\n") == record


def test_record_is_written_once_and_checked_when_asked(client: Client) -> None:
    client.join("a", "b")
    assert client.ok("record", f"local {MACHINE}") == "recorded\n"
    assert (client.home / "inbox-lock-manager").read_text() == f"local {MACHINE}\n{MACHINE}\n"
    assert client.ok("record", "none@other") == f"kept local {MACHINE}\n"
    assert client.ok("send", "a", "b", "x", FOREIGN_CHECK_RECORD="1") == "  filed -> @b\n"
    refused = client.run("send", "a", "b", "x", FOREIGN_CHECK_RECORD="1", FOREIGN_MACHINE_ID="other")
    assert refused.returncode == 1
    assert b"this box cannot take the inbox lock itself" in refused.stderr
    assert len(client.lines("b")) == 1
