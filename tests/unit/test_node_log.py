"""The node's log: one event a line, no texts, nothing that a terminal obeys, and nobody who waits for a disk."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sotbus.errors import FilingFailed, FolderError
from sotbus.node import log as log_module
from sotbus.node.log import NAMES, EventLog, Sink

NOW = 1767323045.6789
STAMP = "2026-01-02T03:04:05.678Z"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node.log"


Opened = Callable[..., EventLog]


@pytest.fixture
def opened(path: Path) -> Iterator[Opened]:
    """Opens a log in the file; each is closed in the end."""
    logs: list[EventLog] = []

    def open_log(**more: Any) -> EventLog:
        logs.append(EventLog(Sink(str(path)), clock=lambda: NOW, **more))
        return logs[-1]

    yield open_log
    for one in logs:
        one.close(10)
    assert not [thread for thread in threading.enumerate() if thread.name == "sotbus-log"]


def lines(log: EventLog, path: Path) -> list[dict[str, Any]]:
    log.close(10)
    return [json.loads(line) for line in path.read_text("ascii").splitlines()]


def test_an_event_is_one_json_line_in_the_order_that_it_was_said(opened: Opened, path: Path) -> None:
    log = opened()
    log.info("link up", node="ann.lab", took_s=0.25, attempt=3)
    log.warning("filing failed", handle="b-vm", outcome_unknown=True)
    log.close(10)
    assert path.read_text() == (
        f'{{"ts":"{STAMP}","level":"info","event":"link up","node":"ann.lab","took_s":0.25,"attempt":3}}\n'
        f'{{"ts":"{STAMP}","level":"warning","event":"filing failed","handle":"b-vm","outcome_unknown":true}}\n'
    )
    assert log.statistics() == {"written": 2, "dropped": 0, "failed": 0, "queued": 0}


def test_levels_below_the_threshold_are_not_written(opened: Opened, path: Path) -> None:
    log = opened()
    for say in (log.debug, log.info, log.warning, log.error):
        say("default")
    log.set_level("error")
    for say in (log.debug, log.info, log.warning, log.error):
        say("raised")
    log.set_level("nonsense")
    log.warning("still raised")
    log.set_level("debug")
    log.debug("lowered")
    assert [(line["level"], line["event"]) for line in lines(log, path)] == [
        ("info", "default"),
        ("warning", "default"),
        ("error", "default"),
        ("error", "raised"),
        ("debug", "lowered"),
    ]
    with pytest.raises(KeyError):
        EventLog(Sink(fd=1), level="nonsense")


BODY = "the secret is swordfish"


@pytest.mark.parametrize("level", ["debug", "info"])
@pytest.mark.parametrize("name", ["text", "msg", "message", "body", "payload", "content", "data", "to", "line"])
def test_there_is_no_field_for_what_a_message_says(opened: Opened, path: Path, name: str, level: str) -> None:
    log = opened(level=level)
    fields: Any = {name: BODY, "handle": "b-vm"}
    log.error("filed", **fields)
    assert lines(log, path) == [{"ts": STAMP, "level": "error", "event": "filed", "handle": "b-vm", "not_logged": name}]


def test_values_that_are_not_plain_show_only_their_type(opened: Opened, path: Path) -> None:
    log = opened()
    fields: Any = {"error": {"text": BODY}, "path": Path(BODY), "state": BODY.encode(), "reason": [BODY]}
    log.info("odd", **fields)
    (line,) = lines(log, path)
    assert BODY not in repr(line)
    assert (line["error"], line["path"], line["state"], line["reason"]) == (
        "<dict>", f"<{type(Path()).__name__}>", "<bytes>", "<list>"
    )  # fmt: skip


def test_long_texts_and_numbers_are_bounded_and_every_line_is_json(opened: Opened, path: Path) -> None:
    log = opened()
    fields: Any = {
        "error": "x" * 9999,
        "count": 10**9999,
        "peers": -(10**9999),
        "queued": -(2**63),
        "took_s": float("nan"),
        "wait_s": float("-inf"),
        "retry_s": 1 / 3,
        "up_s": 1e300,
        "since": None,
        "n" * 9999: 1,
    }
    log.info("e" * 9999, **fields)
    (line,) = lines(log, path)
    assert line["event"] == "e" * 80
    assert line["error"] == "x" * 500 + "... (9999 characters)"
    assert (line["count"], line["peers"], line["queued"]) == ("2**33216", "-2**33216", -(2**63))
    assert (line["took_s"], line["wait_s"], line["retry_s"], line["up_s"]) == ("nan", "-inf", 0.333333, 1e300)
    assert (line["since"], line["not_logged"]) == (None, "n" * 40)
    assert path.stat().st_size < 1100


NASTY = "a\nb\r\x1b[2J\x7f\x9b\u2028\u202e\ud800\U0001f600"


def test_json_lines_are_ascii_without_control_characters(opened: Opened, path: Path) -> None:
    log = opened()
    log.info(NASTY, error=NASTY)
    log.close(10)
    data = path.read_bytes()
    assert data.count(b"\n") == 1
    assert all(0x20 <= byte < 0x7F for byte in data[:-1])
    line = json.loads(data)
    assert (line["event"], line["error"]) == (NASTY, NASTY)


def test_a_person_gets_a_readable_line(opened: Opened, path: Path) -> None:
    log = opened(human=True)
    log.info("link up", node="ann.lab", took_s=0.25, outcome_unknown=False, since="", error='a "b\\c" d', reason="a=b")
    log.warning(NASTY, error=NASTY, hint="b\u00fcro")
    log.close(10)
    assert path.read_text("utf-8") == (
        f"{STAMP} info    link up node=ann.lab took_s=0.25 outcome_unknown=false since="
        '"" error="a \\"b\\\\c\\" d" reason="a=b"\n'
        f"{STAMP} warning a\\nb\\r\\x1b[2J\\x7f\\x9b\\u2028\\u202e\\ud800\U0001f600 "
        "error=a\\nb\\r\\x1b[2J\\x7f\\x9b\\u2028\\u202e\\ud800\U0001f600 hint=b\u00fcro\n"
    )


@settings(deadline=None, max_examples=60)
@given(
    st.text(max_size=30),
    st.dictionaries(
        st.sampled_from(sorted(NAMES)) | st.text(max_size=5),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30) | st.binary(max_size=3),
        max_size=4,
    ),
    st.booleans(),
)
def test_any_event_with_any_fields_is_one_whole_line(event: str, fields: Any, human: bool) -> None:
    reader, writer = os.pipe()
    log = EventLog(Sink(fd=writer), human=human)
    log.error(event, **{name: value for name, value in fields.items() if name not in ("self", "event")})
    log.close(10)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    assert data.endswith(b"\n")
    text = data.decode("utf-8")[:-1]
    assert text.isprintable()
    if not human:
        assert json.loads(text)["event"] == event


# Errors


def test_an_error_is_logged_with_its_type_its_place_and_a_text_that_sotbus_or_the_system_wrote(
    opened: Opened, path: Path
) -> None:
    log = opened()
    for error in (
        FilingFailed("the lock was held", hint="wait"),
        FileNotFoundError(2, "No such file", "/x"),
        ValueError(BODY),
    ):
        try:
            raise error
        except Exception as caught:
            log.exception("filing failed", caught, handle="b-vm")
    log.exception("never raised", KeyError(BODY))
    with pytest.raises(ValueError) as deep:
        json.loads("{")
    log.exception("raised deep inside", deep.value)
    first, second, third, fourth, fifth = lines(log, path)
    assert (first["error"], first["hint"], "hint" in second) == ("the lock was held", "wait", False)
    assert second["error"] == "[Errno 2] No such file: '/x'"
    assert (third["error_type"], "error" in third, BODY in repr(third)) == ("ValueError", False, False)
    assert {line["where"].partition(":")[0] for line in (first, second, third)} == {"test_node_log.py"}
    assert (first["level"], first["handle"], fourth["where"]) == ("error", "b-vm", "")
    assert fifth["where"].startswith("decoder.py:")


def test_each_error_of_a_group_has_a_line_of_its_own_and_there_are_not_too_many(opened: Opened, path: Path) -> None:
    log = opened()
    inner = ExceptionGroup("inner", [OSError(5, "b"), FilingFailed("c")])
    log.exception("three", ExceptionGroup("outer", [OSError(5, "a"), inner]))
    log.exception("many", BaseExceptionGroup("many", [KeyboardInterrupt() for _ in range(50)]))
    found = lines(log, path)
    assert [line["error"] for line in found[:3]] == ["[Errno 5] a", "[Errno 5] b", "c"]
    assert [line["event"] for line in found[3:]] == ["many"] * 10


class Hostile(OSError):
    def __str__(self) -> str:
        raise RuntimeError


def test_nothing_that_is_logged_can_raise(opened: Opened, path: Path) -> None:
    class Text(str):
        __slots__ = ()

        def __str__(self) -> str:
            raise RuntimeError

    log = opened()
    log.info("bad value", error=Text("x"))
    log.exception("bad error", Hostile())
    event: Any = object()
    log.info(event)
    log._clock = lambda: float("nan")
    log.info("bad clock")
    found = lines(log, path)
    assert [line["event"] for line in found] == ["unloggable", "bad error", "unloggable", "unloggable"]
    assert [line["error_type"] for line in found] == ["RuntimeError", "Hostile", "TypeError", "ValueError"]
    assert found[1]["error"] == "<Hostile>"


# A sink that is slow, full or gone


def test_a_sink_that_takes_nothing_holds_nobody_up_and_what_is_lost_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_module, "MAX_QUEUED", 100)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    while True:
        try:
            os.write(writer, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(writer, True)
    log = EventLog(Sink(fd=writer))
    log.info("first")
    while log.statistics()["queued"]:
        time.sleep(0.001)
    began = time.monotonic()
    for at in range(150):
        log.info("event", count=at)
    assert time.monotonic() - began < 2
    log.close(0.1)  # gives up
    assert time.monotonic() - began < 4
    assert log.statistics() == {"written": 0, "dropped": 50, "failed": 0, "queued": 100}
    log.info("after the end")
    assert log.dropped == 51

    def finish() -> None:
        log.close(10)
        os.close(writer)

    last = threading.Thread(target=finish)
    last.start()
    with os.fdopen(reader, "rb") as file:
        found = [json.loads(line) for line in file.read().lstrip(b"x").splitlines()]
    last.join()
    assert [line["event"] for line in found] == ["first", *["event"] * 100, "log lines dropped"]
    assert [line.get("count") for line in found] == [None, *range(100), 51]


def test_a_pipe_that_is_set_to_non_blocking_loses_nothing() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    log = EventLog(Sink(fd=writer))
    for at in range(3000):
        log.info("event", count=at)
    with os.fdopen(reader, "rb") as file:
        found = [json.loads(file.readline())["count"] for _ in range(3000)]
    assert found == list(range(3000))
    log.close(10)
    os.close(writer)


def test_a_write_that_fails_is_counted_and_the_next_line_is_whole(
    opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, turns = os.write, iter([5, None])

    def full(fd: int, data: memoryview) -> int:
        turn = next(turns, 0)
        if turn is None:
            raise OSError(28, "No space left on device")
        return real(fd, data[:turn] if turn else data)

    log = opened()
    monkeypatch.setattr(os, "write", full)
    log.info("lost")
    while not log.failed:
        time.sleep(0.001)
    log.info("kept")
    log.close(10)
    torn, whole = path.read_text().splitlines()
    assert torn == '{"ts"'
    assert json.loads(whole)["event"] == "kept"
    assert log.statistics() == {"written": 1, "dropped": 0, "failed": 1, "queued": 0}


def test_a_closed_descriptor_harms_nobody() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    os.close(reader)
    log = EventLog(Sink(fd=writer))
    log.info("nowhere")
    log.close(10)
    assert log.failed == 1
    assert not Sink(fd=writer).is_terminal


# The file


def test_a_log_file_is_private_and_appended_to(path: Path, opened: Opened) -> None:
    opened().close(10)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text('{"event":"before"}\n')
    log = opened()
    log.info("after")
    assert [line["event"] for line in lines(log, path)] == ["before", "after"]


def test_after_a_rotation_the_file_of_that_name_goes_on(opened: Opened, path: Path, tmp_path: Path) -> None:
    log = opened()
    log.info("old")
    while not log.written:
        time.sleep(0.001)
    path.rename(tmp_path / "node.log.1")
    log.info("still old")
    while log.written < 2:
        time.sleep(0.001)
    log.reopen()
    log.info("new")
    assert [line["event"] for line in lines(log, path)] == ["new"]
    assert [json.loads(line)["event"] for line in (tmp_path / "node.log.1").read_text().splitlines()] == [
        "old",
        "still old",
    ]


def test_a_rotation_into_nothing_goes_on_in_the_old_file(opened: Opened, path: Path) -> None:
    folder = path.parent / "sub"
    folder.mkdir()
    log = EventLog(Sink(str(folder / "a.log")))
    folder.rename(path.parent / "moved")
    log.reopen()
    log.info("kept")
    log.close(10)
    assert log.statistics() == {"written": 1, "dropped": 0, "failed": 1, "queued": 0}
    assert json.loads((path.parent / "moved" / "a.log").read_text())["event"] == "kept"


def test_a_log_file_that_cannot_be_opened_stops_the_start_with_its_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, why in (("none/x", "No such file or directory"), ("", "Is a directory"), ("fifo", "No such device")):
        bad = os.path.join(tmp_path, name)
        with pytest.raises(FolderError, match=f"the log file {bad} cannot be opened \\({why}"):
            Sink(bad)


def test_where_a_person_looks_on_lines_are_readable_by_default() -> None:
    for is_terminal in (True, False):
        reader, writer = os.openpty() if is_terminal else os.pipe()
        with EventLog(Sink(fd=writer)) as log:
            log.info("hello")
        data = os.read(reader, 1000)
        assert data.startswith(b"20" if is_terminal else b'{"ts":"20')
        os.close(reader)
        os.close(writer)


def test_events_of_many_threads_are_whole_and_each_once(opened: Opened, path: Path) -> None:
    log = opened()

    def work(at: int) -> None:
        for count in range(200):
            log.info("event", attempt=at, count=count, error="x" * 400)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = lines(log, path)
    assert sorted((line["attempt"], line["count"]) for line in found) == [(a, c) for a in range(4) for c in range(200)]


def test_repr_names_the_sink_and_the_counts(opened: Opened, path: Path) -> None:
    assert repr(opened()) == f"<EventLog to <Sink {path}>: 0 written, 0 dropped, 0 failed>"
    assert repr(Sink()) == "<Sink 2>"
