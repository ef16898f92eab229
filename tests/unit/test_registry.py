"""registry.json: outcomes of a read, the one writer path, and how a registry comes to be."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from world import World

from sotbus.comm import registry as module
from sotbus.comm import registry_json
from sotbus.comm.registry import Registry, entry_of, text_of
from sotbus.comm.sending import touch
from sotbus.errors import RegistryUnreadable, RegistryWriteFailed

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

GOOD = b'{"protocol_version": 1, "agents": {"a": {"last_seen": "2026-05-29T18:00:00Z"}}}\n'
NOT_READ = "FAILED: the registry could not be read or updated, so nothing was written"
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def registry(world: World) -> Registry:
    """A registry with one entry."""
    world.folder.ensure()
    Path(world.folder.registry).write_bytes(GOOD)
    return Registry(world.folder, world.box(), settle_s=0.01)


def path_of(registry: Registry) -> Path:
    return Path(registry.folder.registry)


def facts(path: Path) -> tuple[int, int, bytes | str]:
    """What a file is: inode, mode, and its bytes (a link's target; nothing for a folder)."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return found.st_ino, found.st_mode, os.readlink(path)
    return found.st_ino, found.st_mode, path.read_bytes() if stat.S_ISREG(found.st_mode) else b""


def leaves(registry: Registry) -> set[str]:
    """The names in the comm folder."""
    return set(os.listdir(registry.folder.root))


def set_summary(document: dict[str, Any]) -> bool:
    document["agents"]["a"]["summary"] = "new"
    return True


# ---- read


@pytest.mark.spec("S12", "S13")
@pytest.mark.parametrize(
    "data",
    [
        b'{"agents": {}}',
        b'\n\t {"agents": {}} \r\n\n',
        b'{"agents": null, "agents": {}}',
        '{"agents": {"é": null, "b": 5}, "x": "☃"}'.encode(),
    ],
)
def test_one_document_with_an_object_of_agents_is_a_registry(data: bytes, registry: Registry) -> None:
    path_of(registry).write_bytes(data)
    assert registry.agents() == json.loads(data)["agents"]


@pytest.mark.spec("S26")
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"not json", "it is not JSON"),
        (b'{"agents": {}', "it is not JSON"),
        (b'{"agents": {}} {"agents": {}}', "it is not JSON"),
        (b'{"agents": {}}\n{"agents": {}}\n', "it is not JSON"),
        (b'{"agents": {}},', "it is not JSON"),
        (b" \n", "it is not JSON"),
        (b"\0\0\0\0", "it is not JSON"),
        (b'\xef\xbb\xbf{"agents": {}}', "it is not JSON"),
        (b'{"agents": {"a": "\xff"}}', "it is not JSON"),
        (b'{"agents": {"a": "\xed\xa0\x80"}}', "it is not JSON"),
        (b'{"agents": {"a": NaN}}', "NaN is not JSON"),
        (b'{"agents": {}, "x": [-Infinity]}', "-Infinity is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"[]", "it is not a JSON object"),
        (b'"agents"', "it is not a JSON object"),
        (b"{}", "its agents are not an object"),
        (b'{"agents": null}', "its agents are not an object"),
        (b'{"agents": 5}', "its agents are not an object"),
        (b'{"agents": []}', "its agents are not an object"),
        (b'{"agents": "{}"}', "its agents are not an object"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_anything_else_is_unreadable_and_stays_as_it_is(data: bytes, why: str, registry: Registry) -> None:
    path = path_of(registry)
    path.write_bytes(data)
    before = facts(path)
    with pytest.raises(RegistryUnreadable, match=re.escape(f"{path}: {why}")):
        registry.read()
    with pytest.raises(RegistryWriteFailed) as caught:
        registry.update(set_summary, 0)
    assert str(caught.value) == NOT_READ
    assert facts(path) == before
    assert f"move {path} aside by hand" in caught.value.hint


class Reads:
    """Stands in for the reader of a file: each outcome in turn, the last for ever. Notes pauses and folder opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *outcomes: bytes | int) -> None:
        self.outcomes = list(outcomes)
        self.log: list[str | float] = []
        monkeypatch.setattr(module, "read_file", self._read)
        monkeypatch.setattr(module, "touch_folder", lambda _path: self.log.append("folder"))
        monkeypatch.setattr(module, "refresh_folder", lambda _path: self.log.append("folder"))
        monkeypatch.setattr(time, "sleep", self.log.append)

    def _read(self, path: str) -> bytes:
        self.log.append("read")
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, int):
            raise OSError(outcome, os.strerror(outcome))
        return outcome


@pytest.mark.spec("S25")
@pytest.mark.parametrize("first", [b"", errno.ESTALE, errno.EIO, errno.EACCES])
def test_one_failed_try_opens_the_folder_and_reads_again(
    first: bytes | int, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch, first, GOOD)
    assert list(registry.agents()) == ["a"]
    assert reads.log == ["folder", "read", 0.0, "folder", "read"]


@pytest.mark.spec("S25")
def test_a_read_that_succeeds_at_the_last_try_is_good(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    Reads(monkeypatch, errno.ESTALE, b"", errno.ENOENT, GOOD)
    assert list(registry.agents()) == ["a"]


@pytest.mark.spec("S25", "S26")
@pytest.mark.parametrize(
    ("outcomes", "why"),
    [
        ((errno.ESTALE,), "Stale file handle"),
        ((b"",), "it is empty"),
        ((errno.ESTALE, errno.ENOENT), "No such file or directory"),
        ((b"", errno.ENOENT, b""), "it is empty"),
    ],
)
def test_three_more_tries_in_200_ms_and_then_it_is_unreadable(
    outcomes: tuple[bytes | int, ...], why: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch, *outcomes)
    with pytest.raises(RegistryUnreadable) as caught:
        registry.read()
    assert str(caught.value) == f"{path_of(registry)} cannot be read: {why}"
    assert reads.log == ["folder", "read", 0.0, "folder", "read", 0.1, "folder", "read", 0.1, "folder", "read"]


@pytest.mark.spec("S25", "S26")
def test_a_registry_that_stays_stale_is_told_after_pauses_of_200_ms(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: str) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    pauses: list[float] = []
    sleep = time.sleep

    def noted(for_s: float) -> None:
        pauses.append(for_s)
        sleep(for_s)

    monkeypatch.setattr(module, "read_file", stale)
    monkeypatch.setattr(time, "sleep", noted)
    took = []
    for _ in range(3):  # the best of three: other work on the machine is not ours
        pauses.clear()
        start = time.monotonic()
        with pytest.raises(RegistryUnreadable, match="cannot be read"):
            registry.read()
        took.append(time.monotonic() - start)
        assert sum(pauses) == pytest.approx(0.2)
    assert 0.2 <= min(took) < 2


@pytest.mark.spec("S26")
def test_only_the_first_open_can_say_that_there_is_no_registry(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    path_of(registry).unlink(missing_ok=True)
    reads = Reads(monkeypatch, errno.ENOENT)
    with pytest.raises(RegistryUnreadable, match="is missing"):
        registry.read()
    assert reads.log.count("read") == 1


def test_a_registry_whose_name_is_gone_while_it_is_being_written_is_read_again(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client replaces a file that its box has open in two steps, and between them the name is nobody's."""
    path = path_of(registry)
    data = path.read_bytes()
    path.unlink()
    Path(registry.folder.registry_lock).write_text("vm:m:b:1:2:3\n")
    pauses: list[float] = []

    def sleep(for_s: float) -> None:
        pauses.append(for_s)
        if len(pauses) == 2:
            path.write_bytes(data)

    monkeypatch.setattr(time, "sleep", sleep)
    assert list(registry.agents()) == ["a"]
    path.unlink()
    pauses.clear()
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(RegistryUnreadable, match="is missing"):
        registry.read()
    assert sum(pauses) == pytest.approx(0.2)


@pytest.mark.parametrize("left", [b"", b"{", b"[]", b'{"agents": 5}', None])
def test_what_a_killed_writer_left_makes_no_registry_unless_it_is_a_whole_one(
    left: bytes | None, registry: Registry
) -> None:
    path = path_of(registry)
    path.unlink()
    if left is not None:
        Path(f"{path}.tmp").write_bytes(left)
    registry.create()
    assert registry.agents() == {}


def test_a_whole_document_that_a_killed_writer_was_about_to_rename_becomes_the_registry(registry: Registry) -> None:
    """Between the two steps of an NFS client's rename only the new document is there."""
    path = path_of(registry)
    path.rename(f"{path}.tmp")
    registry.create()
    assert list(registry.agents()) == ["a"]
    assert registry.update(set_summary, 0)
    assert list(registry.agents()) == ["a"]


def test_a_good_read_that_does_not_parse_is_not_tried_again(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch, b"{", GOOD)
    with pytest.raises(RegistryUnreadable, match="not JSON"):
        registry.read()
    assert reads.log == ["folder", "read"]


def test_the_bytes_before_a_read_error_are_discarded(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.read
    calls: list[int] = []

    def read(fd: int, size: int) -> bytes:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, 10) if len(calls) == 1 else real(fd, size)

    monkeypatch.setattr(os, "read", read)
    assert registry.read() == json.loads(GOOD)


def test_a_folder_that_cannot_be_opened_is_a_failed_try(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    Reads(monkeypatch, errno.ESTALE, GOOD)
    refused = iter([True, False])

    def touch_folder(path: str) -> None:
        if next(refused):
            raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(module, "touch_folder", touch_folder)
    assert list(registry.agents()) == ["a"]


@pytest.mark.spec("S26")
@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, os.mkfifo], ids=["empty", "folder", "fifo"])
def test_an_empty_file_a_folder_or_a_fifo_is_unreadable_and_never_absent(
    make: Callable[[Path], None], registry: Registry
) -> None:
    path = path_of(registry)
    path.unlink()
    make(path)
    before = facts(path)
    with pytest.raises(RegistryUnreadable, match="cannot be read"):
        registry.read()
    assert facts(path) == before


def test_an_entry_is_an_object_and_a_field_is_a_string() -> None:
    agents: dict[str, Any] = {"null": None, "five": 5, "list": [], "good": {"host": "vm", "n": 5}}
    assert "null" in agents
    assert [entry_of(agents, name) for name in ("null", "five", "list", "none")] == [None] * 4
    assert [text_of(entry_of(agents, "good"), field) for field in ("host", "n", "none")] == ["vm", "", ""]
    assert text_of(None, "host") == ""


# ---- what a write keeps


digits = st.integers(0, 10**30).map(str)
numbers = st.builds(
    lambda sign, whole, rest: sign + whole + rest if rest or whole != "0" else whole,
    st.sampled_from(["", "-"]),
    digits,
    st.one_of(
        st.just(""),
        st.builds("{}{}".format, digits.map(".{}".format), st.sampled_from(["", "0", "e5", "E+400", "e-007"])),
        st.sampled_from(["e0", "E9999", "e-30"]),
    ),
)
strings = st.one_of(
    st.text(st.characters(exclude_categories=[]), max_size=8).map(json.dumps),
    st.text(max_size=8).map(lambda text: json.dumps(text, ensure_ascii=False)),
)
values = st.recursive(
    st.one_of(numbers, strings, st.sampled_from(["null", "true", "false"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda items: "[" + ", ".join(items) + "]"),
        st.lists(st.tuples(strings, inner), max_size=4, unique_by=lambda pair: json.loads(pair[0])).map(
            lambda pairs: "{" + ",".join(f"{key} :{value}" for key, value in pairs) + "}"
        ),
    ),
    max_leaves=12,
)
fields = st.lists(st.tuples(strings, values), max_size=4, unique_by=lambda pair: json.loads(pair[0]))


def meaning(data: bytes) -> object:
    """A document with its order of keys and its numbers' digits."""
    return json.loads(data, parse_int=lambda text: ("number", text), parse_float=lambda text: ("number", text),
                      object_pairs_hook=lambda pairs: ("object", pairs))  # fmt: skip


def document_of(top: list[tuple[str, str]], entry: list[tuple[str, str]]) -> bytes:
    """A registry with these fields of its own, and one entry ``mine`` with these; keys and values are JSON text."""
    inner = "{" + ", ".join(f"{key}: {value}" for key, value in entry) + "}"
    outer = [(key, value) for key, value in top if json.loads(key) != "agents"]
    outer.insert(len(outer) // 2, ('"agents"', '{"other": 1.50, "mine": ' + inner + "}"))
    return ("{" + ", ".join(f"{key}: {value}" for key, value in outer) + "}").encode("utf-8", "surrogatepass")


@pytest.mark.spec("S17", "S22")
@settings(max_examples=60, deadline=None)
@given(fields, fields)
@example([('"big"', "123456789012345678901234567890"), ('"f"', "1.10")], [('"e"', "1E+2"), ('"z"', "-0.0")])
@example([('"huge"', "1" * 5000), ('"over"', "1e999")], [('"last_seen"', "0"), ('"\\ud800"', '"\\udfff"')])
def test_what_is_read_is_written_back_digit_for_digit(top: list[tuple[str, str]], entry: list[tuple[str, str]]) -> None:
    data = document_of(top, entry)
    once = registry_json.dump(registry_json.parse(data))
    assert meaning(once) == meaning(data)
    assert registry_json.dump(registry_json.parse(once)) == once
    assert once.endswith(b"}\n")


def test_a_negative_zero_keeps_its_sign() -> None:
    data = b'{"agents": {}, "x": -0}'
    assert meaning(registry_json.dump(registry_json.parse(data))) == meaning(data)


@pytest.mark.spec("S17")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields, fields)
def test_a_write_changes_only_its_own_field(
    registry: Registry, top: list[tuple[str, str]], entry: list[tuple[str, str]]
) -> None:
    entry = [(key, value) for key, value in entry if json.loads(key) != "last_seen"]
    entry.insert(len(entry) // 2, ('"last_seen"', '"then"'))
    data = document_of(top, entry)
    plain = registry_json.dump(registry_json.parse(data))
    path_of(registry).write_bytes(data)

    def change(document: dict[str, Any]) -> bool:
        document["agents"]["mine"]["last_seen"] = "now\u2028"
        return True

    assert registry.update(change, 1) is True
    changed = [
        (a, b) for a, b in zip(plain.split(b"\n"), path_of(registry).read_bytes().split(b"\n"), strict=True) if a != b
    ]
    assert [(a.strip(), b.strip()) for a, b in changed] in (
        [(b'"last_seen": "then"' + end, '"last_seen": "now\u2028"'.encode() + end)] for end in (b"", b",")
    )


def test_a_written_registry_is_two_space_json_with_a_newline(registry: Registry) -> None:
    registry.update(set_summary, 1)
    text = path_of(registry).read_text()
    assert text == json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n"
    assert text.startswith('{\n  "protocol_version": 1,\n  "agents": {\n    "a": {\n')


@pytest.mark.spec("S17", "S19", "S45")
def test_a_touch_changes_last_seen_and_nothing_else(world: World, registry: Registry) -> None:
    entry = {"host": "vm", "future": [1, {"x": None}], "last_seen": "2026-05-29T18:00:00Z", "root": "/é"}
    document = {"agents": {"z": None, "a": entry, "b": {"last_seen": "2026-05-29T18:00:00Z"}}, "protocol_version": 1}
    path_of(registry).write_text(json.dumps(document))
    touch(world.client("a", now=1780077840), "a")
    entry["last_seen"] = "2026-05-29T18:04:00Z"
    assert list(json.loads(path_of(registry).read_text()).items()) == list(document.items())
    assert list(json.loads(path_of(registry).read_text())["agents"]["a"]) == list(entry)


@pytest.mark.parametrize("handle", ["absent", "null", "text"])
def test_a_touch_of_no_entry_makes_none_and_is_silent(handle: str, world: World, registry: Registry) -> None:
    path_of(registry).write_text('{"agents": {"null": null, "text": "x"}}')
    before = facts(path_of(registry))
    touch(world.client("a"), handle)
    assert facts(path_of(registry)) == before
    assert world.notes == []


# ---- the steps of a write


@pytest.mark.spec("S9", "S22")
def test_a_write_is_under_the_lock_synced_and_then_renamed(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    real_fsync, real_rename, real_read = os.fsync, os.rename, module.read_file
    lock, path = Path(registry.folder.registry_lock), path_of(registry)
    temp = path.with_name("registry.json.tmp")

    def read(name: str) -> bytes:
        log.append(f"read {os.path.basename(name)} {lock.exists()}")
        return real_read(name)

    def fsync(fd: int) -> None:
        assert os.fstat(fd).st_ino == temp.stat().st_ino
        assert json.loads(temp.read_bytes())["agents"]["a"]["summary"] == "new"
        assert stat.S_IMODE(temp.stat().st_mode) == 0o600
        log.append(f"fsync {lock.exists()}")
        real_fsync(fd)

    def rename(source: str, target: str) -> None:
        log.append(f"rename {source == str(temp)} {target == str(path)} {lock.exists()}")
        real_rename(source, target)

    monkeypatch.setattr(module, "read_file", read)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    assert registry.update(set_summary, 1) is True
    assert log == ["read registry.json True", "fsync True", "rename True True True"]
    assert leaves(registry) == {"inbox", "self", "read", "registry.json"}


class Failing:
    """Makes one system call fail; what the writer is to say of it."""

    def __init__(self, call: str, error: BaseException, said: str) -> None:
        self.call = call
        self.error = error
        self.said = said

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: object) -> None:
            raise self.error

        def write_part(fd: int, data: memoryview) -> int:
            if len(data) < 20:
                raise self.error
            return real_write(fd, data[:10])

        real_write = os.write
        if self.call == "write":  # the lock's record is written too, and it fits
            first: list[int] = []

            def write(fd: int, data: memoryview | bytes) -> int:
                if not first:
                    first.append(fd)
                    return real_write(fd, data)
                return write_part(fd, memoryview(data))

            monkeypatch.setattr(os, "write", write)
        else:
            monkeypatch.setattr(os, self.call, fail)


@pytest.mark.spec("S22", "S23")
@pytest.mark.parametrize(
    "failing",
    [
        Failing("fsync", OSError(errno.EIO, "Input/output error"), "flushed (Input/output error)"),
        Failing("fsync", OSError(errno.EDQUOT, "Disk quota exceeded"), "flushed (Disk quota exceeded)"),
        Failing("rename", OSError(errno.EXDEV, "Cross-device link"), "renamed into place (Cross-device link)"),
        Failing("write", OSError(errno.ENOSPC, "No space left on device"), "flushed (No space left on device)"),
    ],
    ids=lambda failing: f"{failing.call}-{failing.error.errno}",
)  # fmt: skip
def test_a_failed_step_says_so_and_leaves_bytes_and_inode(
    failing: Failing, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = facts(path_of(registry))
    failing.apply(monkeypatch)
    with pytest.raises(RegistryWriteFailed) as caught:
        registry.update(set_summary, 1)
    monkeypatch.undo()
    assert str(caught.value) == f"FAILED: the registry update could not be {failing.said}, so nothing was written"
    assert facts(path_of(registry)) == before
    assert leaves(registry) == {"inbox", "self", "read", "registry.json"}
    assert registry.update(set_summary, 0) is True


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_an_interrupt_passes_through_and_leaves_nothing(
    call: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = facts(path_of(registry))
    Failing(call, KeyboardInterrupt(), "").apply(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        registry.update(set_summary, 1)
    assert facts(path_of(registry)) == before
    assert leaves(registry) == {"inbox", "self", "read", "registry.json"}


@pytest.mark.spec("S23")
def test_a_folder_in_the_temp_files_place_fails_the_write(registry: Registry) -> None:
    Path(registry.folder.registry + ".tmp").mkdir()
    before = facts(path_of(registry))
    with pytest.raises(RegistryWriteFailed, match=r"^FAILED: the registry .*, so nothing was written$"):
        registry.update(set_summary, 1)
    assert facts(path_of(registry)) == before


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_dead_writers_temp_file_is_replaced_and_never_written_through(kind: str, registry: Registry) -> None:
    temp, other = Path(registry.folder.registry + ".tmp"), Path(registry.folder.root, "inbox", "other")
    other.write_text("not yours")
    if kind == "link":
        temp.symlink_to(other)
    else:
        temp.write_text("{ half")
    assert registry.update(set_summary, 1) is True
    assert other.read_text() == "not yours"
    assert stat.S_ISREG(path_of(registry).lstat().st_mode)
    assert registry.agents()["a"]["summary"] == "new"


@pytest.mark.spec("S23")
def test_a_missing_registry_is_not_made_by_a_write(registry: Registry) -> None:
    path_of(registry).unlink()
    with pytest.raises(RegistryWriteFailed) as caught:
        registry.update(set_summary, 0)
    assert str(caught.value) == NOT_READ
    assert leaves(registry) == {"inbox", "self", "read"}


def test_a_decision_to_change_nothing_writes_nothing(registry: Registry) -> None:
    before = facts(path_of(registry))
    assert registry.update(lambda _document: False, 0) is False
    assert facts(path_of(registry)) == before
    assert leaves(registry) == {"inbox", "self", "read", "registry.json"}


def test_an_exception_of_the_decision_passes_through_and_writes_nothing(registry: Registry) -> None:
    before = facts(path_of(registry))

    def change(document: dict[str, Any]) -> bool:
        document.clear()
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        registry.update(change, 0)
    assert facts(path_of(registry)) == before
    assert leaves(registry) == {"inbox", "self", "read", "registry.json"}


def test_a_change_that_leaves_no_registry_is_not_written(registry: Registry) -> None:
    before = facts(path_of(registry))

    def change(document: dict[str, Any]) -> bool:
        document["agents"] = None
        return True

    with pytest.raises(RegistryWriteFailed, match="so nothing was written"):
        registry.update(change, 0)
    assert facts(path_of(registry)) == before
    assert leaves(registry) == {"inbox", "self", "read", "registry.json"}


@pytest.mark.spec("S21", "S22")
def test_no_write_of_another_process_or_thread_is_lost(world: World, registry: Registry) -> None:
    def add(who: str) -> None:
        own = Registry(world.folder, world.box(), settle_s=0.01)
        for number in range(5):

            def change(document: dict[str, Any], key: str = f"{who}{number}") -> bool:
                document["agents"][key] = {}
                return True

            own.update(change, 30)

    processes = [FORK.Process(target=add, args=(f"p{n}-",)) for n in range(3)]
    threads = [threading.Thread(target=add, args=(f"t{n}-",)) for n in range(2)]
    try:
        for process in processes:
            process.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0] * 3
    assert set(registry.agents()) == {"a"} | {f"{who}-{n}" for who in ("p0", "p1", "p2", "t0", "t1") for n in range(5)}


# ---- creation


@pytest.fixture
def none_yet(registry: Registry) -> Registry:
    """A folder without a registry."""
    path_of(registry).unlink()
    return registry


@pytest.mark.spec("S11", "S24", "S108")
def test_a_new_registry_is_the_skeleton(none_yet: Registry) -> None:
    none_yet.create()
    assert path_of(none_yet).read_bytes() == b'{"protocol_version": 1, "agents": {}}\n'
    assert stat.S_IMODE(path_of(none_yet).stat().st_mode) == 0o600
    assert path_of(none_yet).stat().st_nlink == 1
    assert leaves(none_yet) == {"inbox", "self", "read", "registry.json"}


@pytest.mark.spec("S6", "S24")
def test_the_skeleton_is_synced_and_then_linked(none_yet: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
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
    none_yet.create()
    temp = log[0].removeprefix("fsync ")
    assert re.fullmatch(rf"registry\.json\.new\.{os.getpid()}\.\d+", temp)
    assert log == [f"fsync {temp}", f"link {temp}", f"fsync {os.path.basename(none_yet.folder.root)}"]


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def _garbage(path: Path) -> None:
    path.write_text("{ half")


@pytest.mark.spec("S24")
@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, _dangling, _garbage, os.mkfifo])
def test_whatever_is_there_is_never_replaced_truncated_or_repaired(
    make: Callable[[Path], None], none_yet: Registry
) -> None:
    make(path_of(none_yet))
    before = facts(path_of(none_yet))
    none_yet.create()
    assert facts(path_of(none_yet)) == before
    assert leaves(none_yet) == {"inbox", "self", "read", "registry.json"}
    assert not Path(none_yet.folder.root, "nowhere").exists()


@pytest.mark.spec("S24")
@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, _dangling, _garbage])
def test_whatever_appears_before_the_link_is_never_replaced(
    make: Callable[[Path], None], none_yet: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_link = os.link
    made: list[tuple[int, int, bytes | str]] = []

    def link(source: str, target: str) -> None:
        make(Path(target))
        made.append(facts(Path(target)))
        real_link(source, target)

    monkeypatch.setattr(os, "link", link)
    none_yet.create()
    assert made == [facts(path_of(none_yet))]
    assert leaves(none_yet) == {"inbox", "self", "read", "registry.json"}


@pytest.mark.spec("S24")
@pytest.mark.parametrize(
    ("call", "error"),
    [("fsync", OSError(errno.EIO, "Input/output error")), ("link", OSError(errno.EPERM, "Operation not permitted"))],
)
def test_a_skeleton_that_fails_is_not_published(
    call: str, error: OSError, none_yet: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    Failing(call, error, "").apply(monkeypatch)
    with pytest.raises(RegistryWriteFailed) as caught:
        none_yet.create()
    assert str(caught.value) == f"FAILED: the registry could not be created ({error.strerror}), so nothing was written"
    assert leaves(none_yet) == {"inbox", "self", "read"}


def test_a_folder_sync_that_fails_is_not_answered_nothing_was_written(
    none_yet: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RegistryWriteFailed) as caught:
        none_yet.create()
    assert str(caught.value) == (
        "FAILED: the registry was created, but its folder could not be synced (Input/output error); "
        "run the command again"
    )
    assert none_yet.agents() == {}


@pytest.mark.spec("S24")
def test_of_20_processes_exactly_one_creates_the_registry(world: World, none_yet: Registry) -> None:
    start = FORK.Barrier(20)
    linked = FORK.Value("i", 0)
    real_link, real_lexists = os.link, os.path.lexists

    def create() -> None:
        def link(source: str, target: str) -> None:
            real_link(source, target)
            with linked.get_lock():
                linked.value += 1

        def lexists(path: str) -> bool:
            os.path.lexists = real_lexists
            start.wait(60)
            return False

        # This process is the child: each has looked before any of them links.
        os.link = link  # type: ignore[assignment]
        os.path.lexists = lexists  # type: ignore[assignment]
        Registry(world.folder, world.box()).create()

    processes = [FORK.Process(target=create) for _ in range(20)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0] * 20
    assert linked.value == 1
    assert none_yet.agents() == {}
    assert leaves(none_yet) == {"inbox", "self", "read", "registry.json"}
