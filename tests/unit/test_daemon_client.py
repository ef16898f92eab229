"""The synchronous client of a daemon's socket: what it sends, and what it makes of every kind of answer and silence."""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import FakeDaemon, Script, answering

from sotbus.comm import daemon, runtime_folder
from sotbus.comm.daemon import Answer, Daemon, NoDaemonError
from sotbus.comm.frame_lines import MAX_FRAME_BYTES
from sotbus.comm.runtime_folder import Peer
from sotbus.errors import BadRequest, Refused, TooLarge

HELLO = (
    b'{"v":1,"id":0,"kind":"req","op":"hello","payload":{"client_id":"sot-comm","last_seen_revision":0,"protocol":3,'
    b'"app_version":"comm","host":"vm","os_user":"uid:%d","role":"cli","name":"projA-vm"}}\n' % os.geteuid()
)
FILE = (
    b'{"v":1,"id":1,"kind":"req","op":"comm.file",'
    b'"payload":{"from":"projA-vm","to":"far","text":"/slash msg","broadcast":false}}\n'
)
"""The request of facts 11, as it was seen on the wire."""

WELCOME = b'{"v":1,"id":0,"kind":"res","op":"hello","payload":{"session_id":"s","protocol":3}}\n'
LONG = "x" * 900_000
"""A text that no socket's buffer holds whole."""

SHORT_S = 0.3
"""The wait of the tests in which no answer comes."""

PATIENT_S = 30.0
"""The wait of the tests in which an answer comes, however slow the machine is."""

HEARD_S = 1.5
"""The wait of the tests in which something else must come before it is over."""

UNKNOWN = "the outcome is unknown: the daemon may have done it all the same"


def res(payload: str, number: str = "1", kind: str = '"res"') -> bytes:
    return f'{{"v":1,"id":{number},"kind":{kind},"op":"comm.file","payload":{payload}}}\n'.encode()


OK = WELCOME + res('{"ok":true}')


def a_byte_at_a_time(data: bytes) -> Script:
    def script(fake: FakeDaemon, conn: socket.socket) -> None:
        fake.read(conn)
        for at in range(len(data)):
            conn.sendall(data[at : at + 1])
        conn.recv(1)

    return script


def silent(fake: FakeDaemon, conn: socket.socket) -> None:
    """Read everything and say nothing."""
    fake.read(conn)
    fake.over.wait(10)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder private to this user, with a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="sotbus-"))
    yield path
    shutil.rmtree(path)


class Start:
    """Starts a daemon with a script, ``last``, and answers its client."""

    last: FakeDaemon

    def __init__(self, folder: Path) -> None:
        self.path = folder / "sotbus.sock"

    def __call__(self, script: Script) -> Daemon:
        self.last = FakeDaemon(self.path, script)
        return Daemon(str(self.path), "vm", name="projA-vm")


@pytest.fixture
def fake(folder: Path) -> Iterator[Start]:
    start = Start(folder)
    yield start
    start.last.close()


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    gc.disable()  # what another test left to the collector is not to be closed in the middle of this one
    before = os.listdir("/proc/self/fd")
    yield
    after = os.listdir("/proc/self/fd")
    gc.enable()
    assert len(after) == len(before)


def got(fake: Start) -> bytes:
    """What the only connection sent."""
    (data,) = fake.last.got
    return data


def filed(client: Daemon, text: str = "/slash msg", **more: Any) -> Answer:
    return client.file("projA-vm", "far", text, **({"timeout_s": PATIENT_S} | more))


def shown(answer: Answer) -> tuple[str | None, str, bool, str]:
    return answer.error, answer.code, answer.outcome_unknown, answer.hint


# What is sent


@pytest.mark.spec("S84")
def test_a_hello_and_the_facts_pages_request_go_out_back_to_back(fake: Start) -> None:
    answer = filed(fake(answering(OK)))
    assert shown(answer) == (None, "", False, "")
    assert answer.ok
    answer.check()
    assert got(fake) == HELLO + FILE


def test_text_goes_out_as_it_is_and_a_message_id_in_one_key_more(fake: Start) -> None:
    client = fake(answering(OK))
    assert filed(client, 'q"\u2603\n\x1b', broadcast=True, message_id="m-1").ok
    assert got(fake).split(b"\n")[1] == (
        b'{"v":1,"id":1,"kind":"req","op":"comm.file","payload":{"from":"projA-vm","to":"far",'
        b'"text":"q\\"\xe2\x98\x83\\n\\u001b","broadcast":true,"sotbus":{"id":"m-1"}}}'
    )


def test_an_agents_session_says_so_and_a_nameless_one_has_an_empty_name(folder: Path, fake: Start) -> None:
    fake(answering(OK))
    environ = {"SOT_SOCKET": str(folder / "sotbus.sock"), "SOT_WORKSPACE": "1"}
    assert Daemon.own(environ, "Box\udcff").join("", "h-vm").ok
    hello, join, _ = got(fake).split(b"\n")
    assert hello.endswith(b'"host":"Box\xef\xbf\xbd","os_user":"uid:%d","role":"agent","name":""}}' % os.geteuid())
    assert join == (b'{"v":1,"id":1,"kind":"req","op":"agent.join","payload":{"workspace_id":"","handle":"h-vm"}}')


def test_any_op_can_be_asked_and_its_answer_read(fake: Start) -> None:
    answer = fake(answering(WELCOME + res('{"ok":true,"links":[1]}'))).ask("sotbus.status", {"deep": True})
    assert (answer.ok, answer.payload) == (True, {"ok": True, "links": [1]})
    assert b'"op":"sotbus.status","payload":{"deep":true}}\n' in got(fake)


# Answers

BLOB = b'{"v":1,"kind":"evt","op":"screen","payload":{"blob":{"len":8}}}\n' + b'{"\n\n\xff\0\n1'
"""An event with raw bytes after it."""

FILED = {
    "at once": answering(OK),
    "a byte at a time": a_byte_at_a_time(WELCOME + BLOB + res('{"ok":true}')),
    "without a hello's answer": answering(res('{"ok":true}')),
    "before the hello's answer": answering(res('{"ok":true}') + WELCOME),
    "after events and others' answers": answering(
        WELCOME
        + BLOB
        + res('{"error":"not yours"}', "2")
        + res('{"error":"no id"}', "null")
        + res('{"error":"true is not 1"}', "true")
        + res('{"error":"an event"}', "1", '"evt"')
        + b'{"later":1}\n'
        + res('{"ok":true}')
    ),
    "with more than ok": answering(WELCOME + res('{"ok":true,"code":"x"}')),
    "although the hello was a mismatch": answering(
        res('{"error":"protocol 2 here","code":"protocol_mismatch"}', "0") + res('{"ok":true}')
    ),
}


@pytest.mark.parametrize("how", FILED)
@pytest.mark.spec("S88", "S96")
def test_ok_is_filed_however_it_comes(fake: Start, how: str) -> None:
    assert shown(filed(fake(FILED[how]))) == (None, "", False, "")


def test_ok_is_filed_also_when_it_comes_late_or_the_connection_ends_with_it(fake: Start) -> None:
    def script(fake: FakeDaemon, conn: socket.socket) -> None:
        fake.read(conn)
        conn.sendall(OK[:-9])
        time.sleep(0.3)
        conn.sendall(OK[-9:])

    assert filed(fake(script)).ok


REFUSED: dict[str, tuple[str, tuple[str | None, str, bool, str]]] = {
    "the daemon's own words": (
        '{"error":"no live session holds @far","code":"no_live_session"}',
        ("no live session holds @far", "no_live_session", False, ""),
    ),
    "an older daemon": ('{"error":"unknown op: comm.file"}', ("unknown op: comm.file", "", False, "")),
    "an error beside ok": ('{"ok":true,"error":"x","code":"y"}', ("x", "y", False, "")),
    "an empty error": ('{"error":"","code":"y"}', ("", "y", False, "")),
    "an error that is no text": ('{"error":{"a":1},"code":7}', ('{"a": 1}', "", False, "")),
    "an error of null": ('{"ok":true,"error":null}', ("null", "", False, "")),
    "a node that cannot know": (
        '{"error":"e","code":"file_failed","outcome_unknown":true}',
        ("e", "file_failed", True, UNKNOWN),
    ),
    "a node with a hint": ('{"error":"e","code":"busy","hint":"try again"}', ("e", "busy", False, "try again")),
    "neither": ('{"fine":1}', ('the daemon answered neither ok nor a refusal: {"fine": 1}', "", True, UNKNOWN)),
    "ok that is not true": ('{"ok":1}', ('the daemon answered neither ok nor a refusal: {"ok": 1}', "", True, UNKNOWN)),
    "no payload": ("null", ("the daemon answered neither ok nor a refusal", "", True, UNKNOWN)),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.spec("S88", "S89", "S96")
def test_an_error_decides_by_being_there_and_is_said_in_its_own_words(fake: Start, what: str) -> None:
    payload, expected = REFUSED[what]
    answer = filed(fake(answering(WELCOME + res(payload))))
    assert shown(answer) == expected
    assert not answer.ok
    with pytest.raises(Refused) as caught:
        answer.check()
    assert (str(caught.value), caught.value.code) == (expected[0], expected[1] or "file_failed")
    assert (caught.value.outcome_unknown, caught.value.hint) == expected[2:]


# A refused hello


@pytest.mark.spec("S84")
def test_a_refused_hello_is_the_answer_at_once(fake: Start) -> None:
    began = time.monotonic()
    refusal = res('{"error":"wrong user","code":"forbidden"}', "0")
    assert shown(filed(fake(answering(refusal)))) == ("hello refused: wrong user", "forbidden", False, "")
    assert time.monotonic() - began < PATIENT_S / 2


MISMATCH = res('{"error":"protocol 2 here","code":"protocol_mismatch"}', "0")


def test_a_protocol_mismatch_waits_for_the_answer_that_an_older_daemon_gives(fake: Start) -> None:
    def script(fake: FakeDaemon, conn: socket.socket) -> None:
        fake.read(conn, 1)
        conn.sendall(MISMATCH)
        time.sleep(0.2)
        fake.read(conn)
        conn.sendall(res('{"error":"unknown op: comm.file"}'))

    assert filed(fake(script)).error == "unknown op: comm.file"


def test_a_protocol_mismatch_is_the_answer_where_no_other_comes(fake: Start) -> None:
    def closing(fake: FakeDaemon, conn: socket.socket) -> None:
        fake.read(conn)
        conn.sendall(MISMATCH)

    expected = ("hello refused: protocol 2 here", "protocol_mismatch", True, UNKNOWN)
    assert shown(filed(fake(closing))) == expected


def test_after_a_protocol_mismatch_nothing_was_done_unless_all_was_written(fake: Start) -> None:
    def script(fake: FakeDaemon, conn: socket.socket) -> None:
        fake.read(conn, 1)
        conn.sendall(MISMATCH)
        fake.over.wait(10)

    expected = ("hello refused: protocol 2 here", "protocol_mismatch", False, "")
    assert shown(filed(fake(script), LONG, timeout_s=HEARD_S)) == expected


def test_a_protocol_mismatch_is_the_answer_where_the_wait_ends(fake: Start) -> None:
    answer = filed(fake(answering(MISMATCH)), timeout_s=HEARD_S)
    assert shown(answer) == ("hello refused: protocol 2 here", "protocol_mismatch", True, UNKNOWN)


# No answer


@pytest.mark.spec("S97")
def test_no_answer_in_time_is_failed_and_the_outcome_unknown(fake: Start) -> None:
    assert daemon.ANSWER_WAIT_S == 5
    client = fake(silent)
    began = time.monotonic()
    answer = filed(client, timeout_s=SHORT_S)
    assert SHORT_S <= time.monotonic() - began < SHORT_S + 4
    assert shown(answer) == (f"the daemon did not answer at {client.endpoint}", "", True, UNKNOWN)
    assert client.endpoint == f"unix:{client.path}"


def test_a_daemon_that_only_talks_ends_with_the_wait(fake: Start) -> None:
    def script(fake: FakeDaemon, conn: socket.socket) -> None:
        fake.read(conn)
        while not fake.over.is_set():
            conn.sendall(BLOB)
            time.sleep(0.01)

    client = fake(script)
    began = time.monotonic()
    answer = filed(client, timeout_s=SHORT_S)
    assert time.monotonic() - began < SHORT_S + 4
    assert shown(answer) == (f"the daemon did not answer at {client.endpoint}", "", True, UNKNOWN)


@pytest.mark.parametrize("written", [b"", WELCOME, OK[:-1]], ids=["nothing", "a hello's answer", "half an answer"])
def test_a_connection_that_ends_before_the_answer_leaves_the_outcome_unknown(fake: Start, written: bytes) -> None:
    def script(fake: FakeDaemon, conn: socket.socket) -> None:
        fake.read(conn)
        conn.sendall(written)

    client = fake(script)
    answer = filed(client)
    expected = f"the daemon did not answer at {client.endpoint}: it closed the connection"
    assert shown(answer) == (expected, "", True, UNKNOWN)


@pytest.mark.parametrize("how", ["closes", "reads nothing"])
def test_a_request_that_was_not_written_whole_was_not_done(fake: Start, how: str) -> None:
    def script(fake: FakeDaemon, conn: socket.socket) -> None:
        conn.recv(10)
        if how == "reads nothing":
            fake.over.wait(10)

    client = fake(script)
    answer = filed(client, LONG, timeout_s=20 if how == "closes" else SHORT_S)
    why = ": it closed the connection" if how == "closes" else ""
    assert shown(answer) == (f"the daemon did not answer at {client.endpoint}{why}", "", False, "")


def test_a_refusal_is_read_although_the_daemon_took_only_part_of_the_request(fake: Start) -> None:
    def script(fake: FakeDaemon, conn: socket.socket) -> None:
        fake.read(conn, 1)
        conn.sendall(res('{"error":"wrong user","code":"forbidden"}', "0"))

    assert shown(filed(fake(script), LONG)) == ("hello refused: wrong user", "forbidden", False, "")


def test_a_refusal_is_read_although_the_connection_has_ended_before_anything_was_written(
    fake: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(fake: FakeDaemon, conn: socket.socket) -> None:
        conn.sendall(res('{"error":"too many clients","code":"busy"}', "0"))

    def late(sock: runtime_folder.HasOptions) -> Peer:
        assert fake.last.closed.wait(10)
        return runtime_folder.peer_of(sock)

    client = fake(script)
    monkeypatch.setattr(daemon, "peer_of", late)
    assert shown(filed(client)) == ("hello refused: too many clients", "busy", False, "")


def test_neither_end_waits_for_the_other_to_read(fake: Start) -> None:
    def script(fake: FakeDaemon, conn: socket.socket) -> None:
        conn.sendall(b'{"v":1,"kind":"evt","op":"e","payload":{"blob":{"len":4000000}}}\n' + b"\n" * 4_000_000)
        fake.read(conn)
        conn.sendall(OK)
        conn.recv(1)

    assert filed(fake(script), LONG).ok
    assert len(got(fake)) > len(LONG)


GARBAGE = {
    "text": (b"HTTP/1.1 400 Bad Request\r\n", "a line that is no JSON object"),
    "bytes": (bytes(range(11, 256)) + b"\n", "a line that is no JSON object"),
    "an array": (b"[]\n", "a line that is no JSON object"),
    "a deep one": (b"[" * 100_000 + b"\n", "a line that is no JSON object"),
    "an endless line": (b"x" * (MAX_FRAME_BYTES + 1), "a frame of more than 1048576 bytes"),
    "a blob below 0": (b'{"kind":"evt","payload":{"blob":{"len":-1}}}\n', "blob.len is not a number of bytes"),
    "an absurd blob": (b'{"kind":"evt","payload":{"blob":{"len":1e9}}}\n', "blob.len is not a number of bytes"),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_what_is_no_answer_ends_the_wait_at_once(fake: Start, what: str) -> None:
    data, why = GARBAGE[what]
    client = fake(answering(WELCOME + data + res('{"ok":true}')))
    answer = filed(client)
    assert answer.error is not None
    assert answer.error.startswith(f"the daemon did not answer at {client.endpoint}: it sent what is no answer: {why}")
    assert (answer.outcome_unknown, answer.hint) == (True, UNKNOWN)


def test_an_answer_of_one_mebibyte_is_read(fake: Start) -> None:
    frame = res('{"ok":true,"more":"%s"}')
    data = frame.replace(b"%s", b"x" * (MAX_FRAME_BYTES - len(frame) + 3))
    assert len(data) == MAX_FRAME_BYTES + 1
    assert filed(fake(answering(data))).ok


# Nobody there


def refusal_of(client: Daemon) -> NoDaemonError:
    with pytest.raises(NoDaemonError) as caught:
        filed(client)
    return caught.value


def test_where_there_is_no_socket_there_is_no_daemon(folder: Path) -> None:
    for path in (folder / "sotbus.sock", folder / "none" / "sotbus.sock"):
        error = refusal_of(Daemon(str(path), "vm"))
        assert str(error) == f"no daemon is at unix:{path} (No such file or directory)"
        assert (error.code, error.hint) == ("unavailable", "start one: sotbus serve")


def test_a_dead_daemons_socket_and_a_plain_file_are_no_daemon(folder: Path) -> None:
    path = folder / "sotbus.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    for _ in range(2):
        assert str(refusal_of(Daemon(str(path), "vm"))) == f"no daemon is at unix:{path} (Connection refused)"
        path.unlink()
        path.write_text("")


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_socket_in_a_folder_that_others_may_enter_is_not_asked(folder: Path, fake: Start, mode: int) -> None:
    client = fake(answering(OK))
    folder.chmod(mode)
    error = refusal_of(client)
    assert f"the folder for sockets {folder} is open to other users (mode 0{mode:o})" in str(error)
    assert error.hint == f"chmod 700 {folder}"
    assert fake.last.got == []


def test_a_private_folder_is_found_behind_a_symbolic_link(folder: Path, fake: Start) -> None:
    fake(answering(OK))
    link = Path(tempfile.mkdtemp(prefix="sotbus-"))
    try:
        (link / "to").symlink_to(folder)
        assert filed(Daemon(str(link / "to" / "sotbus.sock"), "vm")).ok
    finally:
        shutil.rmtree(link)


def test_another_users_daemon_is_not_asked(fake: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    client = fake(silent)
    monkeypatch.setattr(daemon, "peer_of", lambda _: Peer(1, os.geteuid() + 1, 1))
    assert str(refusal_of(client)) == f"the daemon at {client.endpoint} is another user's (uid {os.geteuid() + 1})"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a process of another user")
def test_a_socket_on_which_another_user_listens_is_not_asked(folder: Path) -> None:
    code = (
        "import os,socket,sys; s=socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); os.seteuid(65534); s.listen();"
        "print(flush=True); sys.stdin.read()"
    )
    path = str(folder / "sotbus.sock")
    other = subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with other:
        assert other.stdout is not None
        other.stdout.readline()
        assert str(refusal_of(Daemon(path, "vm"))) == f"the daemon at unix:{path} is another user's (uid 65534)"


def test_a_daemon_that_accepts_no_connection_is_waited_for_and_nothing_was_sent(folder: Path) -> None:
    path = str(folder / "sotbus.sock")
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as first:
        busy.bind(path)
        busy.listen(0)
        first.connect(path)
        client = Daemon(path, "vm")
        began = time.monotonic()
        answer = filed(client, timeout_s=SHORT_S)
        assert SHORT_S <= time.monotonic() - began < SHORT_S + 4
        assert shown(answer) == (f"the daemon did not answer at unix:{path}: it accepts no connection", "", False, "")


def test_a_daemon_that_accepts_only_late_is_asked_all_the_same(folder: Path) -> None:
    path = str(folder / "sotbus.sock")
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as first:
        busy.bind(path)
        busy.listen(0)
        first.connect(path)

        def accept() -> None:
            time.sleep(0.2)
            busy.accept()[0].close()
            conn, _ = busy.accept()
            with conn:
                conn.recv(65536)
                conn.sendall(OK)
                conn.recv(1)

        thread = threading.Thread(target=accept)
        thread.start()
        assert filed(Daemon(path, "vm")).ok
        thread.join(10)


# What is not sent


def test_what_cannot_be_a_frame_is_refused_before_anybody_is_asked(fake: Start) -> None:
    client = fake(silent)
    with pytest.raises(BadRequest, match="nothing was sent"):
        filed(client, "a\ud800")
    with pytest.raises(TooLarge, match="the request has 1048577 bytes and a frame 1048576; nothing was sent"):
        filed(client, "x" * (MAX_FRAME_BYTES + 1 - len(FILE) + len("/slash msg")))
    assert fake.last.got == []


def test_the_longest_request_is_sent(fake: Start) -> None:
    assert filed(fake(answering(OK)), "x" * (MAX_FRAME_BYTES - len(FILE) + len("/slash msg"))).ok
    assert len(got(fake)) == len(HELLO) + MAX_FRAME_BYTES


def test_an_interrupt_closes_the_connection(fake: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    client = fake(silent)

    def interrupted(payload: object) -> int:
        raise KeyboardInterrupt

    fake.last._script = answering(WELCOME)
    monkeypatch.setattr(daemon, "blob_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        filed(client)


# Endpoints


def test_an_endpoint_is_a_path_with_or_without_its_kind() -> None:
    for endpoint in ("unix:/run/x/s.sock", "/run/x/s.sock"):
        client = Daemon(endpoint, "vm")
        assert (client.path, client.endpoint) == ("/run/x/s.sock", "unix:/run/x/s.sock")


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        ("ssh:lab", "ssh endpoints are not spoken by sotbus: ssh:lab"),
        ("ssh:ann@lab/far", "ssh endpoints are not spoken by sotbus: ssh:ann@lab/far"),
        ("pipe:\\\\.\\pipe\\x", "pipe endpoints are not spoken by sotbus: pipe:\\\\.\\pipe\\x"),
        ("tcp://1.2.3.4:5", "'tcp://1.2.3.4:5' is not an endpoint"),
        ("relative.sock", "'relative.sock' is not an endpoint"),
        ("unix:relative.sock", "'unix:relative.sock' is not an endpoint"),
        ("", "'' is not an endpoint"),
        ("ssh", "'ssh' is not an endpoint"),
    ],
)
def test_other_endpoints_are_refused_by_name(endpoint: str, text: str) -> None:
    with pytest.raises(NoDaemonError) as caught:
        Daemon(endpoint, "vm")
    assert str(caught.value) == text
    assert "unix:/path" in caught.value.hint


def test_the_own_daemon_is_the_variables_else_the_configs_else_the_runtime_folders(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"SOT_SOCKET": "unix:/v/s.sock", "XDG_RUNTIME_DIR": str(folder), "SOT_RELAY_ENDPOINT": "/hub.sock"}
    assert Daemon.own(environ, "vm", configured="/c/s.sock").path == "/v/s.sock"
    del environ["SOT_SOCKET"]
    assert Daemon.own(environ, "vm", configured="/c/s.sock").path == "/c/s.sock"
    assert Daemon.own(environ, "vm").path == f"{folder}/sotbus/sotbus.sock"
    monkeypatch.setattr(runtime_folder, "RUN_USER", str(folder / "none"))
    assert Daemon.own({}, "vm").path == f"/tmp/sotbus-{os.geteuid()}/sotbus.sock"


def test_the_hubs_daemon_is_the_variables_and_never_the_own_one(fake: Start) -> None:
    fake(answering(OK))
    environ = {"SOT_SOCKET": str(fake.path), "SOT_WORKSPACE": "1"}
    assert Daemon.relay(environ, "vm") is None
    environ["SOT_RELAY_ENDPOINT"] = "ssh:hub"
    with pytest.raises(NoDaemonError):
        Daemon.relay(environ, "vm")
    environ["SOT_RELAY_ENDPOINT"] = f"unix:{fake.path}"
    relay = Daemon.relay(environ, "vm", name="h-vm")
    assert relay is not None
    assert filed(relay).ok
    assert b'"role":"agent","name":"h-vm"}}' in got(fake)


def test_no_repr_holds_a_text(fake: Start) -> None:
    client = fake(answering(WELCOME + res('{"error":"e","code":"c","outcome_unknown":true}')))
    assert repr(client) == f"<Daemon {client.endpoint}>"
    assert repr(filed(client)) == "<Answer c: e, outcome unknown>"
    assert repr(Answer()) == "<Answer ok>"


def test_a_cold_command_loads_no_more_for_it_than_it_needs() -> None:
    code = "import sys; import sotbus.comm.daemon; print('\\n'.join(sys.modules))"
    root = str(Path(daemon.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert {"_socket", "select", "sotbus.comm.runtime_folder"} <= loaded
    slow = {"socket", "selectors", "dataclasses", "typing", "threading", "subprocess", "logging", "trio", "struct"}
    assert loaded & slow == set()
    assert {name for name in loaded if name.startswith("sotbus.")} == {
        "sotbus.comm", "sotbus.comm.daemon", "sotbus.errors", "sotbus.message",
        "sotbus.comm.frame_lines", "sotbus.comm.runtime_folder"
    }  # fmt: skip


def test_the_hello_is_json_with_the_facts_pages_keys() -> None:
    assert list(json.loads(HELLO)["payload"]) == [
        "client_id", "last_seen_revision", "protocol", "app_version", "host", "os_user", "role", "name"
    ]  # fmt: skip
