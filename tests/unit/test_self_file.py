"""The self file: its three lines, where it lies, which row it names, and the conflict guard of pins and rows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from world import World

from sotbus.comm import membership, self_file
from sotbus.comm.box import Box
from sotbus.comm.client import Client
from sotbus.comm.project import project_of
from sotbus.comm.self_file import SelfFile
from sotbus.comm.settings import Settings
from sotbus.errors import BadRequest, FolderError, NotJoined, SlotTaken


def client_of(
    world: World, environ: Mapping[str, str], *, project: str = "proj", host: str = "vm", box: Box | None = None
) -> Client:
    """A client in this process with just this environment."""
    client = Client(world.folder, box or world.box(host), environ, Settings(), notify=world.notes.append)
    client._project = project_of(str(world.project(project)))
    return client


def pinned(world: World, leaf: str, **more: str) -> dict[str, str]:
    return {"SOT_COMM_SELF_FILE": str(world.home / "self" / leaf), **more}


def entries(world: World) -> dict[str, Any]:
    agents: dict[str, Any] = json.loads((world.home / "registry.json").read_text())["agents"]
    return agents


def files(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder with its bytes, None for a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def put(world: World, leaf: str, text: str) -> Path:
    path = world.home / "self" / leaf
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# --- the three lines


@pytest.mark.spec("S76")
def test_a_join_writes_three_lines_and_no_more(world: World) -> None:
    membership.join(client_of(world, pinned(world, "mine.txt")), name="alice")
    expected = f"alice\nrepo=proj\nroot={world.project('proj')}\n"
    assert (world.home / "self" / "mine.txt").read_bytes() == expected.encode()


@pytest.mark.spec("S76")
def test_the_repo_is_the_folder_as_it_was_written_and_the_root_is_resolved(world: World) -> None:
    link = world.base / "a link"
    link.symlink_to(world.project("proj"))
    client = client_of(world, pinned(world, "mine.txt"))
    client._project = project_of(str(link))
    membership.join(client, name="alice")
    assert (world.home / "self" / "mine.txt").read_text() == f"alice\nrepo=a link\nroot={world.project('proj')}\n"


@pytest.mark.parametrize("name", [b"b\xf6x", b"two\nlines", b"tab\there"], ids=repr)
def test_a_project_whose_name_no_self_file_can_carry_is_refused_with_nothing_written(world: World, name: bytes) -> None:
    folder = os.fsdecode(os.fsencode(world.base) + b"/" + name)
    os.mkdir(folder)
    client = client_of(world, pinned(world, "mine.txt"))
    client._project = project_of(folder)
    with pytest.raises(BadRequest, match="nothing was written"):
        membership.join(client, name="alice")
    assert not world.home.exists()


@pytest.mark.spec("S9")
def test_a_self_file_is_private_and_its_temp_file_is_gone(world: World) -> None:
    before = os.umask(0)
    try:
        membership.join(client_of(world, {"SOT_WORKSPACE_ID": "ws-1"}))
    finally:
        os.umask(before)
    assert [(path.name, path.stat().st_mode & 0o777) for path in (world.home / "self").iterdir()] == [
        ("vm__ws-1.txt", 0o600)
    ]


def test_a_self_file_is_replaced_by_a_rename_and_never_written_in_place(world: World) -> None:
    client = client_of(world, pinned(world, "mine.txt"))
    membership.join(client, name="alice")
    with (world.home / "self" / "mine.txt").open() as old:
        membership.join(client, name="a-much-longer-name")
        assert old.read().startswith("alice\n")


def test_a_write_that_fails_leaves_the_old_file_and_no_temp_file(tmp_path: Path) -> None:
    path = tmp_path / "self.txt"
    path.mkdir()
    with pytest.raises(OSError):
        self_file.write(str(path), SelfFile("alice", "proj", "/proj"))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.spec("S76", "S78")
@pytest.mark.parametrize(
    ("text", "handle"),
    [
        ("alice\nrepo=p\nroot=/p\n", "alice"),
        ("alice\nrepo=p\nroot=/p", "alice"),
        ("alice\nrepo=\nroot=/p\n", "alice"),
        ("alice\nrepo=p\nroot=/p\nmore=x\n", "alice"),
        ("", None),
        ("alice", None),
        ("alice\n", None),
        ("alice\nrepo=p\n", None),
        ("alice\nrepo=p\nroot=", None),
        ("alice\nrepo=p\nroot\n", None),
        ("alice\nrepo=p\nROOT=/p\n", None),
        ("alice\nrepo=p\n\nroot=/p\n", None),
        ("alice\nroot=/p\nrepo=p\n", None),
        ("alice\nroot=/p\n", None),
        ("\nrepo=p\nroot=/p\n", None),
        ("a b\nrepo=p\nroot=/p\n", None),
        ("../x\nrepo=p\nroot=/p\n", None),
        ("alice\r\nrepo=p\r\nroot=/p\r\n", None),
    ],
    ids=repr,
)
def test_a_file_names_a_handle_only_with_all_three_lines(tmp_path: Path, text: str, handle: str | None) -> None:
    path = tmp_path / "self.txt"
    path.write_bytes(text.encode())
    found = self_file.read(str(path))
    assert (found.handle if found else None) == handle
    if found:
        assert found.root == "/p"


def test_what_is_no_readable_file_is_told_from_none_and_does_not_block(tmp_path: Path) -> None:
    assert self_file.read(str(tmp_path / "absent")) is None
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(FolderError, match="cannot be read"):
            self_file.read(str(path))


# --- whom it names


@pytest.mark.spec("S77")
def test_a_pinned_file_of_another_root_is_not_used_and_a_note_says_so(world: World) -> None:
    membership.join(client_of(world, pinned(world, "mine.txt")), name="alice")
    with pytest.raises(NotJoined):
        client_of(world, pinned(world, "mine.txt"), project="other").identity()
    assert len(world.notes) == 1
    assert world.notes[0].startswith("note: ")
    assert f"@alice for {world.project('proj')}" in world.notes[0]


@pytest.mark.spec("S78")
@pytest.mark.parametrize("leaf", ["mine.txt", "vm__ws-1.txt", "vm__nopane.txt"])
def test_a_file_without_a_root_line_names_nobody_even_where_the_registry_knows_the_handle(
    world: World, leaf: str
) -> None:
    membership.join(client_of(world, pinned(world, leaf)), name="alice")
    put(world, leaf, "alice\nrepo=proj\n")
    with pytest.raises(NotJoined):
        client_of(world, pinned(world, leaf)).identity()


@pytest.mark.spec("S77")
def test_a_project_below_the_root_of_a_self_file_is_another_project(world: World) -> None:
    membership.join(client_of(world, pinned(world, "mine.txt")), name="alice")
    (world.project("proj/inner") / ".git").mkdir()
    (world.project("proj/inner") / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    with pytest.raises(NotJoined):
        client_of(world, pinned(world, "mine.txt"), project="proj/inner").identity()


# --- which row


@pytest.mark.spec("S74", "S75")
@pytest.mark.parametrize(
    ("row", "leaf"),
    [
        ("ws-1", "ws-1"),
        ("ws 1/x", "ws_1_x"),
        ("A.b_c-9", "A.b_c-9"),
        ("é", "__"),
        ("a\nb", "a_b"),
        ("..", ".."),
        ("", "nopane"),
    ],
    ids=repr,
)
def test_the_bytes_of_a_row_that_no_file_name_should_have_are_written_as_underscores(row: str, leaf: str) -> None:
    assert self_file.row_leaf(row) == leaf


@pytest.mark.spec("S74", "S75")
def test_a_row_has_its_own_file_and_its_whole_id_in_the_registry(world: World) -> None:
    membership.join(client_of(world, {"SOT_WORKSPACE_ID": "ws 1/x"}))
    assert [path.name for path in (world.home / "self").iterdir()] == ["vm__ws_1_x.txt"]
    assert entries(world)["proj-vm"]["workspace_id"] == "ws 1/x"


@pytest.mark.parametrize(
    ("leaf", "row"),
    [
        ("vm__ws-1.txt", "ws-1"),
        ("vm__a__b.txt", "a__b"),
        ("far__ws-1.txt", "ws-1"),
        ("far__a__b.txt", "a__b"),
        ("vmx__ws-1.txt", "ws-1"),
        ("vm__nopane.txt", ""),
        ("far__nopane.txt", ""),
        ("mine.txt", ""),
        ("vm__ws-1", ""),
        ("vm_ws-1.txt", ""),
    ],
)
def test_the_name_of_a_pinned_file_names_its_row(leaf: str, row: str) -> None:
    assert self_file.row_of(f"/some__where/{leaf}", "vm") == row


def test_a_host_with_the_mark_in_its_own_name_still_finds_its_rows() -> None:
    assert self_file.row_of("/x/a__b__ws-1.txt", "a__b") == "ws-1"


@pytest.mark.spec("S74")
@pytest.mark.parametrize(("leaf", "row"), [("vm__ws-1.txt", "ws-1"), ("mine.txt", ""), ("vm__nopane.txt", "")])
def test_the_ambient_row_never_overrides_a_pin(world: World, leaf: str, row: str) -> None:
    client = client_of(world, pinned(world, leaf, SOT_WORKSPACE_ID="ws-9"))
    membership.join(client)
    assert entries(world)["proj-vm"]["workspace_id"] == row
    assert [path.name for path in (world.home / "self").iterdir()] == [leaf]


def test_a_relative_pin_is_taken_from_the_working_directory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world.project("proj"))
    membership.join(client_of(world, {"SOT_COMM_SELF_FILE": "self.txt"}), name="alice")
    assert (world.project("proj") / "self.txt").read_text().startswith("alice\n")


# --- the conflict guard


GUARDED = [
    pytest.param({"SOT_COMM_SELF_FILE": "{self}/vm__ws-1.txt"}, id="pinned row"),
    pytest.param({"SOT_COMM_SELF_FILE": "{self}/mine.txt"}, id="private pin"),
    pytest.param({"SOT_WORKSPACE_ID": "ws-1"}, id="row"),
]


def filled(world: World, environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value.replace("{self}", str(world.home / "self")) for name, value in environ.items()}


@pytest.mark.spec("S79")
@pytest.mark.parametrize("environ", GUARDED)
@pytest.mark.parametrize("name", [None, "bob"])
def test_a_slot_of_another_project_is_refused_with_nothing_written(
    world: World, environ: dict[str, str], name: str | None
) -> None:
    environ = filled(world, environ)
    membership.join(client_of(world, environ), name="alice")
    before = files(world.home)
    with pytest.raises(SlotTaken, match=r"@alice for another project .*nothing was written") as caught:
        membership.join(client_of(world, environ, project="other"), name=name)
    assert caught.value.exit_status == 3
    assert "--repin" in caught.value.hint
    assert files(world.home) == before


@pytest.mark.spec("S79")
@pytest.mark.parametrize("environ", GUARDED)
def test_a_slot_of_another_project_is_taken_when_asked_to(world: World, environ: dict[str, str]) -> None:
    environ = filled(world, environ)
    membership.join(client_of(world, environ), name="alice")
    client = client_of(world, environ, project="other")
    assert membership.join(client, repin=True).handle == "other-vm"
    assert client.identity().handle == "other-vm"
    with pytest.raises(NotJoined):
        client_of(world, environ).identity()


@pytest.mark.spec("S79")
def test_an_old_file_without_a_root_is_judged_by_its_repo(world: World) -> None:
    put(world, "vm__ws-1.txt", "alice\nrepo=elsewhere\n")
    before = files(world.home)
    with pytest.raises(SlotTaken, match="@alice for another project"):
        membership.join(client_of(world, {"SOT_WORKSPACE_ID": "ws-1"}))
    assert files(world.home) == before
    put(world, "vm__ws-1.txt", "alice\nrepo=proj\n")
    assert membership.join(client_of(world, {"SOT_WORKSPACE_ID": "ws-1"})).handle == "proj-vm"


@pytest.mark.spec("S75")
def test_the_shared_slot_goes_to_whoever_joined_last(world: World) -> None:
    environ = pinned(world, "vm__nopane.txt")
    membership.join(client_of(world, environ), name="alice")
    membership.join(client_of(world, environ, project="other"), name="bob")
    assert (world.home / "self" / "vm__nopane.txt").read_text().startswith("bob\nrepo=other\n")


def test_a_join_exits_3_for_a_slot_of_another_project(world: World) -> None:
    row = {"SOT_WORKSPACE_ID": "ws-1"}
    assert world.run("join", cwd=world.project("proj"), env=row).returncode == 0
    before = files(world.home)
    done = world.run("join", cwd=world.project("other"), env=row)
    assert (done.returncode, done.stdout) == (3, "")
    assert "nothing was written\nhint: " in done.stderr
    assert files(world.home) == before


# --- hosts that cannot name a file


@pytest.mark.parametrize(
    "host",
    ["", "a/b", "a\\b", "../x", "a\nb", "a\x01b", "a\x7fb", "h" * 300, "é" * 130],
    ids=["empty", "slash", "backslash", "parent", "newline", "control", "delete", "300 bytes", "130 letters"],
)
@pytest.mark.parametrize(
    "environ",
    [{}, {"SOT_WORKSPACE_ID": "ws-1"}, {"SOT_COMM_SELF_FILE": "{self}/mine.txt"}],
    ids=["no row", "row", "pin"],
)
def test_a_host_that_cannot_name_a_file_is_refused_before_anything_is_made(
    world: World, host: str, environ: dict[str, str]
) -> None:
    client = client_of(world, filled(world, environ), host=host)
    with pytest.raises(FolderError, match=r"^FAILED: the host name .*nothing was written$") as caught:
        membership.join(client)
    assert caught.value.exit_status == 1
    assert not world.home.exists()


@pytest.mark.parametrize("host", ["a/b", "a\nb", "h" * 300], ids=["slash", "newline", "300 bytes"])
def test_every_command_refuses_a_host_that_cannot_name_a_file_and_makes_nothing(world: World, host: str) -> None:
    done = world.run("join", cwd=world.project("proj"), env={"SOT_SELF_HOST": host})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("FAILED: the host name ")
    assert not world.home.exists()


@pytest.mark.parametrize(
    ("host", "environ"),
    [("h" * 240, {}), ("vm", {"SOT_WORKSPACE_ID": "w" * 250}), ("h" * 200, {"SOT_WORKSPACE_ID": "w" * 60})],
    ids=["long host", "long row", "both"],
)
def test_a_self_file_whose_name_would_be_too_long_is_refused_before_anything_is_made(
    world: World, host: str, environ: dict[str, str]
) -> None:
    with pytest.raises(FolderError, match=r"(too|bytes) long.*nothing was written"):
        membership.join(client_of(world, environ, host=host))
    assert not world.home.exists()


def test_the_longest_host_name_of_linux_names_a_file(world: World) -> None:
    client = client_of(world, {"SOT_WORKSPACE_ID": "ws-1"}, box=Box("h" * 64, "vm", None, None, str(world.mountinfo)))
    membership.join(client)
    assert client.identity().handle == "proj-vm"
