"""The comm folder: where each file lies, the modes that are made, and the tightening pass."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from world import World

from sotbus.comm import cursor, offset_hint
from sotbus.comm.folder import Folder
from sotbus.comm.inbox import Inbox
from sotbus.comm.lock_manager import inbox_lock_manager
from sotbus.comm.manager_record import establish
from sotbus.errors import FolderError

KNOWN_FILES = (
    "registry.json",
    "registry.json.tmp",
    "registry.json.new.12.34",
    ".registry.lock",
    ".registry.lock.tmp.vm.m.b.1.2.3",
    ".registry.lock.reclaim.vm.m.b.1.2.3",
    "inbox-lock-manager",
    ".inbox-lock-manager.m.1.2",
    "gh-device-auth.json",
    "inbox/a.jsonl",
    "inbox/a.lock",
    "read/a.cursor",
    "self/vm__row.txt",
    "state/mail-1.tick",
    "state/anything at all",
)
KNOWN_FOLDERS = ("inbox", "read", "self", "state", "probe", "probe/p-vm")
UNKNOWN_FILES = (
    "VERSION",
    "notes",
    "registry.json.bak",
    "xregistry.json",
    ".registry.lockx",
    "bin/comm-send.sh",
    "inbox/a.jsonl.bak",
    "inbox/a.txt",
    "read/a.lock",
    "self/a.json",
    "inbox/sub/a.jsonl",
    "state/sub/tick",
    "probe/file",
    "probe/p-vm/file",
    "other/a.jsonl",
)
UNKNOWN_FOLDERS = ("bin", "other", "inbox/sub", "state/sub", "probe/p-vm/sub", "ph")


@pytest.fixture
def umask_0() -> Iterator[None]:
    """An umask that closes nothing."""
    old = os.umask(0)
    yield
    os.umask(old)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder of the test's own."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def mode(path: Path | str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def modes(root: Path) -> dict[str, int]:
    """The mode of everything below a folder, and of itself."""
    return {str(path.relative_to(root)): mode(path) for path in (root, *root.rglob("*")) if not path.is_symlink()}


def loose(root: Path, files: tuple[str, ...] = KNOWN_FILES, folders: tuple[str, ...] = KNOWN_FOLDERS) -> Folder:
    """A folder as an old release left it: files 0644, folders 0755."""
    for name in ("", *folders):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(0o755)
    for name in files:
        (root / name).write_text("x")
        (root / name).chmod(0o644)
    return Folder(str(root))


@pytest.mark.spec("S6")
@pytest.mark.parametrize(
    ("path", "relative"),
    [
        (Folder("/c").bin, "bin"),
        (Folder("/c").registry, "registry.json"),
        (Folder("/c").registry_lock, ".registry.lock"),
        (Folder("/c").manager_record, "inbox-lock-manager"),
        (Folder("/c").inbox("n"), "inbox/n.jsonl"),
        (Folder("/c").inbox_lock("n"), "inbox/n.lock"),
        (Folder("/c").cursor("n"), "read/n.cursor"),
        (Folder("/c").selves, "self"),
        (Folder("/c").state, "state"),
    ],
)
def test_each_file_lies_where_the_page_says(path: str, relative: str) -> None:
    assert path == f"/c/{relative}"


@pytest.mark.spec("S6")
@pytest.mark.parametrize(
    ("environ", "configured", "root"),
    [
        ({}, None, "{home}/.sot-comm"),
        ({"SOT_COMM_HOME": ""}, None, "{home}/.sot-comm"),
        ({}, "/configured", "/configured"),
        ({"SOT_COMM_HOME": "/named"}, "/configured", "/named"),
        ({"SOT_COMM_HOME": "relative/x"}, None, "{cwd}/relative/x"),
    ],
)
def test_the_environment_names_the_folder_then_the_config_then_the_home(
    environ: dict[str, str], configured: str | None, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Folder.of(environ, configured).root == root.format(home=tmp_path / "home", cwd=tmp_path)


def test_without_a_home_the_folder_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FolderError, match="there is no home folder to put the comm folder in"):
        Folder.of({"HOME": ""})
    assert Folder.of({"HOME": "", "SOT_COMM_HOME": "/named"}).root == "/named"


def test_a_relative_folder_stays_where_it_was_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Folder("comm")
    monkeypatch.chdir("/")
    assert folder.root == str(tmp_path / "comm")


@pytest.mark.spec("S6", "S9")
@pytest.mark.usefixtures("umask_0")
def test_a_first_command_makes_four_private_folders_and_no_other(tmp_path: Path) -> None:
    Folder(str(tmp_path / "c")).ensure()
    assert modes(tmp_path / "c") == dict.fromkeys((".", "inbox", "self", "read"), 0o700)


@pytest.mark.usefixtures("umask_0")
def test_ensure_leaves_what_is_there_as_it_is(tmp_path: Path) -> None:
    folder = loose(tmp_path / "c")
    before = modes(tmp_path / "c")
    folder.ensure()
    folder.ensure()
    assert modes(tmp_path / "c") == before


def test_a_folder_that_cannot_be_made_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError) as caught:
        Folder(str(tmp_path / "file" / "c")).ensure()
    assert str(caught.value) == (
        f"FAILED: the comm folder {tmp_path}/file/c cannot be made (Not a directory); nothing was written"
    )


def test_a_file_in_the_place_of_a_layout_folder_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "inbox").write_text("mine")
    with pytest.raises(FolderError, match="File exists"):
        Folder(str(tmp_path / "c")).ensure()
    assert (tmp_path / "c" / "inbox").read_text() == "mine"


@pytest.mark.spec("S9")
@pytest.mark.usefixtures("umask_0")
def test_everything_that_is_written_is_private_even_under_umask_0(world: World) -> None:
    box = world.box()
    world.folder.ensure()
    registry = world.client("a").registry
    registry.create()
    establish(world.folder, box, replace=False)
    manager = inbox_lock_manager(world.folder.inboxes, box)
    assert manager is not None
    Inbox(world.folder, "b", manager).append(b"{}\n", 1)
    cursor.write(world.folder.cursor("b"), b"1 2-3")
    offset_hint.write(world.folder, "b", offset_hint.Hint(1, 1, 0, 3, "2-3"))
    seen: dict[str, int] = {}

    def while_locked(document: dict[str, object]) -> bool:
        seen.update(modes(world.home))
        return True

    registry.update(while_locked, 1)
    seen.update(modes(world.home))
    folders = (".", "inbox", "read", "self", "state")
    files = (
        ".registry.lock",
        "inbox-lock-manager",
        "inbox/b.jsonl",
        "inbox/b.lock",
        "read/b.cursor",
        "registry.json",
        "state/sotbus-offset-b",
    )
    assert seen == dict.fromkeys(folders, 0o700) | dict.fromkeys(files, 0o600)


@pytest.mark.spec("S9")
def test_the_pass_closes_every_entry_it_knows_and_no_other(tmp_path: Path) -> None:
    root = tmp_path / "c"
    folder = loose(root, KNOWN_FILES + UNKNOWN_FILES, KNOWN_FOLDERS + UNKNOWN_FOLDERS)
    assert folder.tighten() is None
    assert modes(root) == {
        **dict.fromkeys((".", *KNOWN_FOLDERS), 0o700),
        **dict.fromkeys(KNOWN_FILES, 0o600),
        **dict.fromkeys(UNKNOWN_FOLDERS, 0o755),
        **dict.fromkeys(UNKNOWN_FILES, 0o644),
    }


@pytest.mark.spec("S9")
@pytest.mark.parametrize(("before", "after"), [(0o640, 0o600), (0o466, 0o400), (0o777, 0o700), (0o602, 0o600)])
def test_the_pass_takes_group_and_other_bits_and_leaves_the_owners(before: int, after: int, tmp_path: Path) -> None:
    folder = loose(tmp_path / "c")
    (tmp_path / "c" / "registry.json").chmod(before)
    assert folder.tighten() is None
    assert mode(tmp_path / "c" / "registry.json") == after


def test_the_pass_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    loose(outside)
    root = tmp_path / "c"
    folder = loose(root, files=("read/a.cursor",), folders=("read", "probe"))
    (root / "registry.json").symlink_to(outside / "registry.json")
    (root / "inbox").symlink_to(outside / "inbox")
    (root / "read" / "b.cursor").symlink_to(outside / "read" / "a.cursor")
    (root / "probe" / "p").symlink_to(outside / "probe")
    before = modes(outside)
    assert folder.tighten() is None
    assert modes(outside) == before
    assert modes(root) == {".": 0o700, "read": 0o700, "read/a.cursor": 0o600, "probe": 0o700}


def test_a_link_to_the_folder_is_the_folder_it_names(tmp_path: Path) -> None:
    loose(tmp_path / "c")
    (tmp_path / "link").symlink_to(tmp_path / "c")
    assert Folder(str(tmp_path / "link")).tighten() is None
    assert mode(tmp_path / "c") == 0o700
    assert mode(tmp_path / "c" / "inbox" / "a.jsonl") == 0o600


def test_the_pass_does_not_walk_a_closed_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = loose(tmp_path / "c")
    (tmp_path / "c").chmod(0o700)

    def walked(path: str) -> None:
        raise AssertionError(f"{path} was walked")

    monkeypatch.setattr(os, "scandir", walked)
    assert folder.tighten() is None
    monkeypatch.undo()
    assert mode(tmp_path / "c" / "inbox" / "a.jsonl") == 0o644


@pytest.fixture
def chmods(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are chmodded, in order; nothing really is."""
    asked: list[str] = []
    monkeypatch.setattr(os, "chmod", lambda path, _mode: asked.append(path))
    return asked


@pytest.mark.spec("S9")
@pytest.mark.parametrize("where", ["/", "home", "home-by-link", "git-folder", "git-file", "git-dangling"])
def test_the_root_the_home_and_a_git_checkout_are_refused(where: str, tmp_path: Path, chmods: list[str]) -> None:
    root = tmp_path / "c"
    if where == "/":
        root = Path("/")
    elif where == "home":
        root = tmp_path / "home"
        root.joinpath("registry.json").write_text("")
    elif where == "home-by-link":
        root.symlink_to(tmp_path / "home")
    else:
        root.mkdir(mode=0o755)
        (root / "registry.json").touch(mode=0o644)
        if where == "git-folder":
            (root / ".git").mkdir()
        elif where == "git-file":
            (root / ".git").write_text("gitdir: elsewhere")
        else:
            (root / ".git").symlink_to(tmp_path / "nowhere")
    warning = Folder(str(root)).tighten()
    assert chmods == []
    assert warning == (
        f"warning: {os.path.realpath(root)} is a root, home or git folder; its permissions were left as they are"
    )


def test_the_layout_folders_are_made_in_a_git_checkout_too(tmp_path: Path) -> None:
    (tmp_path / "c" / ".git").mkdir(parents=True)
    (tmp_path / "c").chmod(0o755)
    folder = Folder(str(tmp_path / "c"))
    folder.ensure()
    assert folder.tighten() is not None
    assert (mode(folder.root), mode(folder.inboxes)) == (0o755, 0o700)


@pytest.mark.spec("S9")
def test_the_root_is_closed_last(tmp_path: Path, chmods: list[str]) -> None:
    root = tmp_path / "c"
    root.mkdir(mode=0o755)
    (root / "inbox").mkdir(mode=0o755)
    (root / "inbox" / "a.lock").touch(mode=0o644)
    Folder(str(root)).tighten()
    assert sorted(chmods[:-1]) == [str(root / "inbox"), str(root / "inbox" / "a.lock")]
    assert chmods[-1] == str(root)


def test_a_pass_interrupted_anywhere_is_made_good_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = len(KNOWN_FILES + KNOWN_FOLDERS) + 1
    real = os.chmod
    for allowed in range(entries):
        folder = loose(tmp_path / f"c{allowed}")
        left = [allowed]

        def chmod(path: str, mode: int, left: list[int] = left) -> None:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            real(path, mode)

        monkeypatch.setattr(os, "chmod", chmod)
        with pytest.raises(KeyboardInterrupt):
            folder.tighten()
        monkeypatch.setattr(os, "chmod", real)
        assert folder.tighten() is None
        assert all(not bits & 0o077 for bits in modes(tmp_path / f"c{allowed}").values())


@pytest.mark.parametrize("refusal", [None, PermissionError(1, "Operation not permitted")])
def test_what_stays_open_is_one_warning_that_names_one_entry(
    refusal: OSError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "c"
    folder = loose(root)
    stubborn = {str(root / "inbox" / "a.jsonl"), str(root / "registry.json")}
    real = os.chmod

    def chmod(path: str, mode: int) -> None:
        if path not in stubborn:
            real(path, mode)
        elif refusal is not None:
            raise refusal

    monkeypatch.setattr(os, "chmod", chmod)
    warning = folder.tighten()
    assert warning in {f"warning: {path} is still open to other users" for path in stubborn}
    still = {str(root / name) for name, bits in modes(root).items() if bits & 0o077}
    assert still == stubborn


def test_a_file_that_vanishes_meanwhile_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "c"
    folder = loose(root)
    real = os.chmod

    def chmod(path: str, mode: int) -> None:
        if path == str(root / "registry.json.tmp"):
            os.unlink(path)
        real(path, mode)

    monkeypatch.setattr(os, "chmod", chmod)
    assert folder.tighten() is None
    assert not (root / "registry.json.tmp").exists()
