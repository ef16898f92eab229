"""Join and leave: what becomes of the registry, the inbox and the cursor, and what is refused with nothing written."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from world import World

from sotbus.cli.main import main
from sotbus.comm import handles, membership, self_file
from sotbus.errors import BadHandle, FolderError, NotJoined, RegistryLockFailed, RegistryWriteFailed, SotbusError

NOW = 1_780_000_000.0
STAMP = "2026-05-28T20:26:40Z"
PAGE_FIELDS = ("host", "workspace_id", "repo", "root", "expertise", "status", "joined", "last_seen")
OWN_FIELDS = {"harness", "instance", "label", "pid", "pidns", "slot", "start"}

HANDLES = json.loads((Path(__file__).parents[1] / "vectors" / "handles.json").read_text())["cases"]
INVALID_NAMES = [case["handle"] for case in HANDLES if not case["valid"]]
SCENARIO_NAMES = ["nosuch@n1", "a@nonode", "a@", "@n1", "a@n1@n2", "a ", "bad/../x", "x" * 6700, "a\x1b[31m"]


class Answer:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status = status
        self.out = out
        self.err = err

    def __repr__(self) -> str:
        return f"<Answer {self.status} out={self.out!r} err={self.err!r}>"


Command = Callable[..., Answer]


@pytest.fixture
def sotbus(
    world: World, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Iterator[Command]:
    """Runs a command line in this process, as the session that is pinned to a project."""

    def run(*words: str, project: str = "proj", env: dict[str, str] | None = None) -> Answer:
        pin = {"SOT_COMM_SELF_FILE": str(world.home / "self" / f"pin-{project}.txt")}
        with monkeypatch.context() as patch:
            for name in list(os.environ):
                patch.delenv(name)
            for name, value in world.environ({**pin, **(env or {})}).items():
                patch.setenv(name, value)
            patch.chdir(world.project(project))
            capfdbinary.readouterr()
            status = main(list(words), world.box())
        out, err = capfdbinary.readouterr()
        return Answer(status, out.decode("utf-8", "surrogateescape"), err.decode("utf-8", "surrogateescape"))

    before = os.umask(0o077)
    yield run
    os.umask(before)


def document(world: World) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((world.home / "registry.json").read_text())
    return found


def entries(world: World) -> dict[str, Any]:
    found: dict[str, Any] = document(world)["agents"]
    return found


def put_registry(world: World, text: str | bytes) -> Path:
    world.folder.ensure()
    path = world.home / "registry.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def put_entries(world: World, agents: dict[str, Any], **top: Any) -> Path:
    return put_registry(world, json.dumps({"protocol_version": 1, **top, "agents": agents}))


def foreign(world: World, project: str = "other", **more: Any) -> dict[str, Any]:
    """An entry as another client writes it, with a project of its own."""
    return {
        "host": "far",
        "workspace_id": "",
        "repo": project,
        "root": str(world.project(project)),
        "expertise": [],
        "status": "idle",
        "joined": STAMP,
        "last_seen": STAMP,
        **more,
    }


def files(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Every path below a folder with its inode and bytes, None for a folder."""
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    }


# --- what a join writes


@pytest.mark.spec("S11", "S12", "S13", "S16")
def test_a_join_writes_exactly_the_fields_of_the_page_and_those_of_sotbus(world: World) -> None:
    client = world.client("proj", now=NOW)
    joined = membership.join(client, expertise=["files", "nfs"])
    assert (joined.handle, joined.repo, joined.others, joined.beside) == ("proj-vm", "proj", [], "")
    entry = entries(world)["proj-vm"]
    assert {name: entry[name] for name in PAGE_FIELDS} == {
        "host": "vm",
        "workspace_id": "",
        "repo": "proj",
        "root": str(world.project("proj")),
        "expertise": ["files", "nfs"],
        "status": "idle",
        "joined": STAMP,
        "last_seen": STAMP,
    }
    assert set(entry) - set(PAGE_FIELDS) <= OWN_FIELDS
    assert tuple(entry)[: len(PAGE_FIELDS)] == PAGE_FIELDS


@pytest.mark.spec("S16")
def test_a_join_replaces_the_whole_entry(world: World) -> None:
    old = foreign(
        world, "proj", state="working", summary="busy", status_at=STAMP, stop_at=STAMP, floor={}, nonce="1-2-3", mine=1
    )
    put_entries(world, {"proj-vm": {**old, "status": "spawning"}})
    membership.join(world.client("proj", now=NOW + 1))
    entry = entries(world)["proj-vm"]
    assert set(entry) <= {*PAGE_FIELDS, *OWN_FIELDS}
    assert (entry["status"], entry["host"], entry["joined"]) == ("idle", "vm", "2026-05-28T20:26:41Z")


@pytest.mark.spec("S16")
def test_a_second_join_stamps_joined_anew(world: World) -> None:
    membership.join(world.client("proj", now=NOW))
    membership.join(world.client("proj", now=NOW + 60))
    entry = entries(world)["proj-vm"]
    assert entry["joined"] == entry["last_seen"] == "2026-05-28T20:27:40Z"


@pytest.mark.spec("S17")
def test_unknown_fields_of_other_entries_and_of_the_file_outlive_a_join_and_a_leave(world: World) -> None:
    other = foreign(world, floor={"q": [1, None]}, x="é\u2028\ud83d\ude00", n=12345678901234567890)
    text = json.dumps({"protocol_version": 1, "agents": {"other": other, "odd": None}, "later": {"a": True}, "f": 0})
    put_registry(world, text.replace('"f": 0', '"f": 1.50'))
    before = document(world)
    membership.join(world.client("proj"))
    after = document(world)
    del after["agents"]["proj-vm"]
    assert after == before
    assert b'"f": 1.50' in (world.home / "registry.json").read_bytes()
    membership.leave(world.client("proj"))
    assert document(world) == before


@pytest.mark.spec("S9")
def test_a_join_makes_an_inbox_that_is_private_whatever_the_umask(world: World) -> None:
    before = os.umask(0)
    try:
        joined = membership.join(world.client("proj"))
    finally:
        os.umask(before)
    inbox = world.inbox("proj-vm")
    assert joined.inbox == str(inbox)
    assert (inbox.read_bytes(), inbox.stat().st_mode & 0o777) == (b"", 0o600)


@pytest.mark.spec("S6")
def test_a_join_never_truncates_an_inbox_and_leaves_the_cursor(world: World) -> None:
    world.folder.ensure()
    world.inbox("proj-vm").write_bytes(b"one\ntwo\npart")
    cursor = world.home / "read" / "proj-vm.cursor"
    cursor.write_bytes(b"1 x")
    membership.join(world.client("proj"))
    assert world.inbox("proj-vm").read_bytes() == b"one\ntwo\npart"
    assert cursor.read_bytes() == b"1 x"


def test_a_join_says_who_else_is_registered_in_order(world: World) -> None:
    put_entries(world, {"zed": foreign(world), "bob": foreign(world), "odd": None})
    assert membership.join(world.client("proj")).others == ["bob", "odd", "zed"]


def test_a_join_prints_three_lines(world: World, sotbus: Command) -> None:
    done = sotbus("join")
    assert (done.status, done.err) == (0, "")
    assert done.out == (
        "Joined sot-comm as @proj-vm  (proj on vm).\n"
        f"  inbox: {world.inbox('proj-vm')}\n"
        "Others registered: none\n"
    )  # fmt: skip
    assert sotbus("join", project="zoo").out.splitlines()[2] == "Others registered: proj-vm"


@pytest.mark.parametrize(
    ("given", "expertise"),
    [("a, ,b", ["a", "b"]), ("", []), (",", []), (" rust ,data bases,", ["rust", "data bases"]), ("é", ["é"])],
)
def test_expertise_is_split_at_commas_and_blanks_are_dropped(
    world: World, sotbus: Command, given: str, expertise: list[str]
) -> None:
    assert sotbus("join", "--expertise", given).status == 0
    assert entries(world)["proj-vm"]["expertise"] == expertise


def test_expertise_comes_from_the_environment_where_none_is_given(world: World, sotbus: Command) -> None:
    sotbus("join", env={"SOT_COMM_EXPERTISE": "a,b"})
    assert entries(world)["proj-vm"]["expertise"] == ["a", "b"]


def test_a_pid_that_is_given_is_recorded_with_its_start_and_one_that_runs_nowhere_is_refused(world: World) -> None:
    membership.join(world.client("proj"), pid=os.getppid())
    assert entries(world)["proj-vm"]["pid"] == os.getppid()
    before = files(world.home)
    with pytest.raises(FolderError, match="there is no process"):
        membership.join(world.client("other"), pid=2**22 + 1)
    assert files(world.home) == before


# --- which handle


@pytest.mark.spec("S81")
def test_a_name_comes_before_the_environments_before_the_self_files_before_the_derived(world: World) -> None:
    client = world.client("proj")
    assert membership.join(client).handle == "proj-vm"
    client = world.client("proj")
    client.environ = {**client.environ, "SOT_COMM_NAME": "env"}
    assert membership.join(client).handle == "env"
    assert membership.join(client, name="given").handle == "given"
    assert membership.join(world.client("proj")).handle == "given"


def test_a_name_is_taken_word_for_word(world: World) -> None:
    name = "A.b_c-" + "x" * 58
    assert membership.join(world.client("proj"), name=name).handle == name
    assert list(entries(world)) == [name]
    assert world.inbox(name).exists()


@pytest.mark.spec("S82")
def test_a_derived_name_that_another_projects_root_holds_is_qualified(world: World) -> None:
    put_entries(world, {"proj-vm": foreign(world)})
    assert membership.join(world.client("proj")).handle == "proj-projects-vm"
    assert entries(world)["proj-vm"] == foreign(world)


def test_a_derived_name_that_is_qualified_because_another_holds_it_live_is_said_loudly(world: World) -> None:
    put_entries(world, {"proj-vm": foreign(world)})
    membership.join(world.client("proj", now=NOW))
    assert len(world.notes) == 1
    assert world.notes[0].startswith("WARNING")


@pytest.mark.spec("S82")
def test_where_other_projects_hold_every_derived_name_nothing_is_written(world: World, sotbus: Command) -> None:
    first = handles.tiers(str(world.project("proj")), "vm")
    put_entries(world, {name: foreign(world) for name in first})
    before = files(world.home)
    done = sotbus("join")
    assert (done.status, done.out) == (1, "")
    assert "is held by another project; nothing was written\nhint: choose one: sotbus join --name NAME\n" in done.err
    assert files(world.home) == before


def test_a_name_that_was_live_for_another_project_is_taken_with_a_loud_warning(world: World) -> None:
    put_entries(world, {"bob": foreign(world)})
    assert membership.join(world.client("proj", now=NOW + 599), name="bob").handle == "bob"
    assert len(world.notes) == 1
    assert world.notes[0].startswith("WARNING: @bob was live until now")


def test_a_name_that_nobody_live_holds_is_taken_in_silence(world: World) -> None:
    put_entries(world, {"bob": foreign(world), "mine": foreign(world, "proj")})
    membership.join(world.client("proj", now=NOW + 600), name="bob")
    membership.join(world.client("proj", now=NOW), name="mine")
    assert world.notes == []


# --- another protocol


@pytest.mark.spec("S108")
@pytest.mark.parametrize("version", [2, 0, "1", None, True, 1.5])
def test_another_protocol_version_warns_loudly_and_joins_and_stays(world: World, version: object) -> None:
    put_entries(world, {}, protocol_version=version)
    assert membership.join(world.client("proj")).handle == "proj-vm"
    assert len(world.notes) == 1
    assert world.notes[0].startswith(f"WARNING: registry protocol v{version} != client v1")
    assert document(world)["protocol_version"] == version


@pytest.mark.spec("S108")
def test_a_new_registry_has_the_protocol_version_and_no_warning(world: World, sotbus: Command) -> None:
    assert sotbus("join").err == ""
    assert document(world)["protocol_version"] == 1
    put_entries(world, {}, protocol_version=2)
    done = sotbus("join")
    assert (done.status, done.err.startswith("WARNING: registry protocol v2 != client v1")) == (0, True)


# --- a registry that cannot be read

UNREADABLE = {
    "empty": b"",
    "no JSON": b"{",
    "no agents": b'{"protocol_version": 1}\n',
    "agents null": b'{"protocol_version": 1, "agents": null}\n',
    "two documents": b'{"protocol_version": 1, "agents": {}}\n{"protocol_version": 1, "agents": {}}\n',
    "NaN": b'{"protocol_version": 1, "agents": {}, "x": NaN}\n',
}


@pytest.mark.spec("S23", "S24", "S26")
@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_registry_fails_join_and_leave_and_nothing_is_written(
    world: World, sotbus: Command, text: bytes
) -> None:
    sotbus("join")
    put_registry(world, text)
    before = files(world.home)
    for words, said in (
        (["join"], "FAILED: the registry could not be read, so no handle was derived; nothing was written"),
        (["join", "--name", "x"], "FAILED: the registry could not be read or updated, so nothing was written"),
        (["leave"], "FAILED: the registry could not be read; nothing was removed"),
        (["leave", "--name", "x"], "FAILED: the registry could not be read; nothing was removed"),
    ):
        done = sotbus(*words)
        assert (done.status, done.out) == (1, ""), done
        assert done.err.splitlines()[0] == said
        assert all(line.startswith("hint: ") for line in done.err.splitlines()[1:])
    assert files(world.home) == before


@pytest.mark.spec("S24")
def test_a_folder_in_the_registrys_place_is_left_alone(world: World) -> None:
    world.folder.ensure()
    (world.home / "registry.json").mkdir()
    with pytest.raises(RegistryWriteFailed, match="so no handle was derived; nothing was written"):
        membership.join(world.client("proj"))
    assert (world.home / "registry.json").is_dir()
    assert list((world.home / "self").iterdir()) == list((world.home / "inbox").iterdir()) == []


@pytest.mark.spec("S27", "S28")
def test_a_registry_moved_aside_by_hand_is_made_anew_and_each_session_takes_its_handle_again(world: World) -> None:
    for project in ("one", "two"):
        membership.join(world.client(project), name=project)
    put_registry(world, "broken").rename(world.home / "aside")
    for project in ("one", "two"):
        assert membership.join(world.client(project)).handle == project
    assert set(entries(world)) == {"one", "two"}


@pytest.mark.spec("S44")
def test_a_join_or_leave_that_cannot_take_the_registry_lock_writes_nothing(world: World) -> None:
    membership.join(world.client("proj"))
    (world.home / ".registry.lock").write_text("far:-:-:-:1:-\n")
    before = files(world.home)
    for act in (membership.join, membership.leave):
        client = world.client("proj")
        client.settings.lock_wait_s = 0
        with pytest.raises(RegistryLockFailed, match=r"^FAILED: registry lock .* held"):
            act(client)
    assert files(world.home) == before


# --- a step that fails after the registry


def test_a_self_file_that_cannot_be_written_is_named_and_the_entry_is_said_to_stand(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, identity: self_file.SelfFile) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(self_file, "write", full)
    with pytest.raises(FolderError, match=r"FAILED: @proj-vm is in the registry, but .*pin-proj.txt could not be"):
        membership.join(world.client("proj"))
    assert list(entries(world)) == ["proj-vm"]
    assert list((world.home / "self").iterdir()) == []


def test_a_folder_in_the_self_files_place_is_told_and_nothing_is_written(world: World) -> None:
    (world.home / "self" / "pin-proj.txt").mkdir(parents=True)
    with pytest.raises(FolderError, match=r"pin-proj.txt cannot be read \(it is not a regular file\)"):
        membership.join(world.client("proj"))
    assert not (world.home / "registry.json").exists()


# --- leave


def test_a_leave_deletes_its_own_entry_and_self_file_and_keeps_inbox_and_cursor(world: World, sotbus: Command) -> None:
    sotbus("join")
    sotbus("join", project="zoo")
    world.inbox("proj-vm").write_bytes(b"one\n")
    cursor = world.home / "read" / "proj-vm.cursor"
    cursor.write_bytes(b"1 x")
    kept = entries(world)["zoo-vm"]
    done = sotbus("leave")
    assert (done.status, done.out, done.err) == (0, "Left sot-comm (@proj-vm removed).\n", "")
    assert entries(world) == {"zoo-vm": kept}
    assert [path.name for path in (world.home / "self").iterdir()] == ["pin-zoo.txt"]
    assert (world.inbox("proj-vm").read_bytes(), cursor.read_bytes()) == (b"one\n", b"1 x")


def test_a_leave_of_a_session_that_has_not_joined_does_nothing_and_is_no_failure(world: World, sotbus: Command) -> None:
    done = sotbus("leave")
    assert (done.status, done.out, done.err) == (0, "Not joined — nothing to do.\n", "")
    assert not world.home.exists()
    with pytest.raises(NotJoined):
        membership.leave(world.client("proj"))


def test_a_second_leave_does_nothing(world: World, sotbus: Command) -> None:
    sotbus("join")
    sotbus("leave")
    before = files(world.home)
    assert sotbus("leave").out == "Not joined — nothing to do.\n"
    assert files(world.home) == before


def test_a_leave_with_a_name_removes_that_row_only_and_no_self_file(world: World, sotbus: Command) -> None:
    sotbus("join")
    sotbus("join", project="zoo")
    done = sotbus("leave", "--name", "zoo-vm")
    said = "Removed @zoo-vm from the registry (row only; comm-despawn.sh does full teardown).\n"
    assert (done.status, done.out, done.err) == (0, said, "")
    assert list(entries(world)) == ["proj-vm"]
    assert sorted(path.name for path in (world.home / "self").iterdir()) == ["pin-proj.txt", "pin-zoo.txt"]
    assert world.inbox("zoo-vm").exists()
    before = files(world.home)
    done = sotbus("leave", "--name", "zoo-vm")
    assert (done.status, done.out) == (0, "@zoo-vm not in registry — nothing to do.\n")
    assert files(world.home) == before


def test_a_leave_does_not_delete_a_handle_that_another_project_has_taken_since(world: World, sotbus: Command) -> None:
    sotbus("join")
    put_entries(world, {"proj-vm": foreign(world)})
    done = sotbus("leave")
    said = "Left sot-comm (@proj-vm is another session's by now; its row was left alone).\n"
    assert (done.status, done.out, done.err) == (0, said, "")
    assert entries(world) == {"proj-vm": foreign(world)}
    assert not (world.home / "self" / "pin-proj.txt").exists()


def test_a_leave_of_a_handle_that_is_listed_no_more_still_removes_the_self_file(world: World, sotbus: Command) -> None:
    sotbus("join")
    put_entries(world, {})
    assert sotbus("leave").status == 0
    assert list((world.home / "self").iterdir()) == []


def test_after_a_leave_the_handle_may_be_taken_again_with_the_mail_that_was_left(world: World) -> None:
    membership.join(world.client("proj"))
    world.inbox("proj-vm").write_bytes(b"one\n")
    membership.leave(world.client("proj"))
    assert membership.join(world.client("proj")).handle == "proj-vm"
    assert world.inbox("proj-vm").read_bytes() == b"one\n"


# --- names and options that are refused

refused_names = pytest.mark.parametrize(
    "name", [name for name in [*INVALID_NAMES, *SCENARIO_NAMES] if name], ids=lambda name: repr(name)[:30]
)


@pytest.mark.spec("S80")
@refused_names
def test_a_join_with_a_name_that_is_no_handle_is_refused_and_makes_no_file(
    world: World, sotbus: Command, name: str
) -> None:
    asked = [sotbus("join", env={"SOT_COMM_NAME": name})]
    if name != "--":
        asked.append(sotbus("join", f"--name={name}"))
    for done in asked:
        assert (done.status, done.out) == (1, ""), done
        assert done.err.startswith('not a handle: "'), done
        assert "\x1b" not in done.err
    assert not world.home.exists()


@pytest.mark.spec("S80")
def test_a_join_with_a_name_that_is_not_utf8_is_refused_and_makes_no_file(world: World, sotbus: Command) -> None:
    done = sotbus("join", "--name", os.fsdecode(b"a\xff"))
    assert (done.status, done.err.splitlines()[0]) == (1, 'not a handle: "a\\udcff"')
    assert not world.home.exists()


@pytest.mark.spec("S80")
@pytest.mark.parametrize(
    "name",
    [
        "",
        "--",
    ],
)
def test_a_join_with_a_name_that_an_option_parser_may_lose_is_refused_and_makes_no_file(
    world: World, sotbus: Command, name: str
) -> None:
    done = sotbus("join", f"--name={name}")
    assert (done.status, done.out) == (1, "")
    assert not world.home.exists()


@pytest.mark.spec("S80")
@pytest.mark.parametrize("name", ["", "a/b", "../x", "a@n1"])
def test_a_leave_with_a_name_that_is_no_handle_is_refused_and_writes_nothing(
    world: World, sotbus: Command, name: str
) -> None:
    sotbus("join")
    before = files(world.home)
    done = sotbus("leave", f"--name={name}")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith('not a handle: "')
    assert files(world.home) == before


@pytest.mark.spec("S80")
def test_a_leave_with_a_name_that_is_no_handle_makes_no_file(world: World, sotbus: Command) -> None:
    assert sotbus("leave", "--name", "a/b").status == 1
    assert not world.home.exists()


@pytest.mark.spec("S80")
def test_a_name_that_is_no_handle_is_refused_in_the_library_too(world: World) -> None:
    with pytest.raises(BadHandle) as caught:
        membership.join(world.client("proj"), name="a/b")
    assert isinstance(caught.value, SotbusError)
    assert caught.value.code == "bad_handle"
    with pytest.raises(BadHandle):
        membership.leave(world.client("proj"), "a/b")
    assert not world.home.exists()


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["join", "--nosuch"], 2),
        (["join", "-x"], 2),
        (["join", "--nam", "x"], 2),
        (["join", "--name"], 2),
        (["join", "stray"], 2),
        (["join", "--pid", "x"], 2),
        (["comm", "join", "--nosuch"], 2),
        (["leave", "--nosuch"], 1),
        (["leave", "stray"], 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_an_unknown_option_is_refused_with_its_own_exit_status_and_makes_no_file(
    world: World, sotbus: Command, words: list[str], status: int
) -> None:
    done = sotbus(*words)
    assert (done.status, done.out) == (status, "")
    assert done.err.startswith("usage: ")
    assert not world.home.exists()


def test_comm_join_is_the_same_command(world: World, sotbus: Command) -> None:
    assert sotbus("comm", "join", "--name", "alice").out.startswith("Joined sot-comm as @alice  (")
    assert sotbus("comm", "leave").out == "Left sot-comm (@alice removed).\n"
