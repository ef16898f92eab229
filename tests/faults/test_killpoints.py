"""The kill-point harness itself: where it kills, what it counts, and that it leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import killpoints
from faults.killpoints import KillPoint, answer, kill_at_each_call
from tools import require_tool


def children() -> set[str]:
    found: set[str] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            found.update(Path(f"/proc/self/task/{task}/children").read_text().split())
        except OSError:
            continue  # the thread has just ended
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    gc.disable()  # what another test left to the collector is not to be closed in the middle of this one
    processes, descriptors = children(), set(os.listdir("/proc/self/fd"))
    yield
    after = children(), set(os.listdir("/proc/self/fd"))
    gc.enable()
    assert after == (processes, descriptors)


def nothing(*_: object) -> None:
    pass


def plain(points: list[KillPoint]) -> list[str]:
    """Names of the calls, the same on each architecture (some have openat, mkdirat ... only)."""
    return [point.call.removesuffix("at") for point in points]


def file_by_rename(folder: Path) -> str:
    fd = os.open(folder / "temp", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(fd, b"whole")
    os.fsync(fd)
    os.close(fd)
    os.rename(folder / "temp", folder / "final")
    return "filed"


FILE_BY_RENAME = ["open", "write", "fsync", "close", "rename", "answer"]


def run(folder: Path, operation: Callable[[], object]) -> tuple[list[KillPoint], list[dict[str, str]]]:
    """Kill the operation at each call; the points, and what was in the folder at each."""
    states: list[dict[str, str]] = []

    def prepare() -> None:
        for path in folder.iterdir():
            path.rmdir() if path.is_dir() else path.unlink()

    def check(_: KillPoint) -> None:
        states.append({path.name: "" if path.is_dir() else path.read_text() for path in folder.iterdir()})

    return kill_at_each_call(operation, prepare=prepare, check=check), states


def test_each_state_between_two_calls_is_seen(tmp_path: Path) -> None:
    points, states = run(tmp_path, lambda: file_by_rename(tmp_path))
    assert plain(points) == [*FILE_BY_RENAME, "end"]
    assert states == [
        {},  # killed at open
        {"temp": ""},  # at write
        {"temp": "whole"},  # at fsync
        {"temp": "whole"},  # at close
        {"temp": "whole"},  # at rename
        {"final": "whole"},  # at the answer
        {"final": "whole"},
    ]
    assert [point.n for point in points] == [1, 2, 3, 4, 5, 6, 7]
    assert [point.status for point in points] == [-signal.SIGKILL] * 6 + [0]
    assert [point.answered for point in points] == [None] * 6 + ["filed"]


def test_the_call_at_whose_entry_the_kill_arrives_is_not_executed(tmp_path: Path) -> None:
    for _ in range(50):  # it never is, not just mostly
        points, states = run(tmp_path, lambda: os.mkdir(tmp_path / "made"))
        assert plain(points) == ["mkdir", "end"]
        assert states == [{}, {"made": ""}]


def test_an_answer_may_be_given_before_the_end(tmp_path: Path) -> None:
    def operation() -> None:
        os.mkdir(tmp_path / "made")
        answer("made")
        os.rmdir(tmp_path / "made")
        answer("gone")

    points, _ = run(tmp_path, operation)
    assert [(point.call.removesuffix("at"), point.answered) for point in points][1:] == [
        ("answer", None),
        (points[2].call.removesuffix("at"), "made"),  # rmdir, or unlinkat
        ("answer", "made"),
        ("end", "made\ngone"),
    ]
    answer("no operation is running: ignored")


def test_memory_and_python_itself_do_not_count() -> None:
    points = kill_at_each_call(lambda: len([bytes(1 << 20) for _ in range(50)]), prepare=nothing, check=nothing)
    assert points == [KillPoint(1, "end", None, 0)]


def test_calls_of_other_threads_count(tmp_path: Path) -> None:
    def operation() -> None:
        thread = threading.Thread(target=file_by_rename, args=(tmp_path,))
        thread.start()
        thread.join()

    points, states = run(tmp_path, operation)
    assert plain(points) == [*FILE_BY_RENAME[:-1], "end"]
    assert states[0] == {}
    assert {"temp": "whole"} in states
    assert states[-1] == {"final": "whole"}


def runs(pid: str) -> bool:
    """Whether a process is neither gone nor a zombie; proc_pid_stat(5)."""
    try:
        return ") Z " not in Path("/proc", pid, "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it may go while it is looked at
        return False


def test_a_process_started_by_the_operation_dies_with_it(tmp_path: Path) -> None:
    def operation() -> None:
        with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as process:
            (tmp_path / "pid").write_text(str(process.pid))
            assert process.stdout is not None
            assert process.stdout.read(1)  # it runs
            process.communicate(b"\n")

    def check(point: KillPoint) -> None:
        if (tmp_path / "pid").exists() and (pid := (tmp_path / "pid").read_text()):
            deadline = time.monotonic() + 10
            while runs(pid):
                assert time.monotonic() < deadline

    def prepare() -> None:
        (tmp_path / "pid").unlink(missing_ok=True)

    points = kill_at_each_call(operation, prepare=prepare, check=check)
    assert points[-1].call == "end"
    assert "pipe2" in plain(points)


def test_signals_reach_the_operation() -> None:
    def operation() -> str:
        got: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
        signal.raise_signal(signal.SIGUSR1)
        return str(got == [signal.SIGUSR1])

    assert kill_at_each_call(operation, prepare=nothing, check=nothing)[-1].answered == "True"


def test_an_operation_that_fails_is_told_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"run 2 of the operation failed with status 1:(.|\n)*FileNotFoundError"):
        run(tmp_path, lambda: os.rmdir(tmp_path / "none"))


def test_an_operation_that_dies_is_told() -> None:
    with pytest.raises(AssertionError, match=r"run 1 .* failed with status -15"):
        kill_at_each_call(lambda: signal.raise_signal(signal.SIGTERM), prepare=nothing, check=nothing)


def test_an_operation_that_hangs_is_ended_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killpoints, "HANG_SECONDS", 1)
    with pytest.raises(AssertionError, match=r"run 2 .* hung for 1 s"):
        kill_at_each_call(lambda: time.sleep(60), prepare=nothing, check=nothing)


def test_a_stopped_child_does_not_outlive_an_interrupted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(killpoints, "_entered", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kill_at_each_call(lambda: time.sleep(60), prepare=nothing, check=nothing)


def test_a_child_that_cannot_be_traced_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killpoints, "_TRACEME", 0x7FFF)
    with pytest.raises(AssertionError, match="ptrace request 0x7fff"):
        kill_at_each_call(nothing, prepare=nothing, check=nothing)


def test_too_many_calls_are_told(tmp_path: Path) -> None:
    def prepare() -> None:
        for name in os.listdir(tmp_path):
            (tmp_path / name).unlink()

    assert len(kill_at_each_call(lambda: file_by_rename(tmp_path), prepare=prepare, check=nothing, limit=6)) == 7
    with pytest.raises(AssertionError, match="did not complete within 5 calls"):
        kill_at_each_call(lambda: file_by_rename(tmp_path), prepare=prepare, check=nothing, limit=5)


def test_a_check_that_fails_says_at_which_point(tmp_path: Path) -> None:
    def check(point: KillPoint) -> None:
        assert point.call != "fsync"

    def prepare() -> None:
        (tmp_path / "temp").unlink(missing_ok=True)

    with pytest.raises(AssertionError) as caught:
        kill_at_each_call(lambda: file_by_rename(tmp_path), prepare=prepare, check=check)
    assert caught.value.__notes__ == ["at kill point    3 fsync            no answer"]


def many_calls(folder: Path) -> None:
    (folder / "a").write_text("text")
    with open(folder / "a", "rb+", buffering=0) as file:
        file.truncate(2)
        os.fdatasync(file.fileno())
    os.chmod(folder / "a", 0o600)
    os.link(folder / "a", folder / "b")
    os.unlink(folder / "a")
    with os.scandir(folder) as entries:
        assert [entry.name for entry in entries] == ["b"]
    (folder / "b").unlink()


def test_strace_sees_the_same_calls(tmp_path: Path) -> None:
    """Another tracer agrees about the calls, their names and their order."""
    require_tool("strace", "strace")
    points, _ = run(tmp_path, lambda: many_calls(tmp_path))

    program = """if True:
        import pathlib, sys
        from faults.test_killpoints import many_calls
        folder = pathlib.Path(sys.argv[1])
        many_calls(folder)
        pathlib.Path("/begin").exists()
        many_calls(folder)
        pathlib.Path("/end").exists()
    """
    log = tmp_path.with_name("strace.log")
    strace = ["strace", "-e", "trace=%file,%desc", "-o", str(log)]
    path = os.pathsep.join(sys.path)
    subprocess.run([*strace, sys.executable, "-c", program, tmp_path], env={"PYTHONPATH": path}, check=True, timeout=60)
    lines = log.read_text().splitlines()
    begin, end = (next(i for i, line in enumerate(lines) if f'"/{mark}"' in line) for mark in ("begin", "end"))
    names = [line.partition("(")[0] for line in lines[begin + 1 : end]]
    assert [point.call for point in points] == [*(name for name in names if name not in ("mmap", "munmap")), "end"]
