"""What a service manager is told, as a stand-in for systemd's socket hears it."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sotbus.node import sd_notify
from sotbus.node.sd_notify import Notifier


@pytest.fixture
def base() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="sotbus-"))
    yield path
    shutil.rmtree(path)


class Manager:
    """The stand-in: the socket that ``NOTIFY_SOCKET`` names."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + name[1:] if name.startswith("@") else name)
        self.socket.settimeout(10)

    def heard(self) -> list[str]:
        return self.socket.recv(4096).decode().split("\n")


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, base: Path) -> Iterator[Manager]:
    manager = Manager(f"{base}/notify" if request.param == "path" else f"@sotbus-test-{os.getpid()}")
    yield manager
    manager.socket.close()


def test_each_state_is_one_datagram(manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.name})
    assert notifier.is_watched
    for told, heard in (
        (notifier.ready(), ["READY=1"]),
        (notifier.ready("2 links up"), ["READY=1", "STATUS=2 links up"]),
        (notifier.status("3 links up \u2603"), ["STATUS=3 links up \u2603"]),
        (notifier.watchdog(), ["WATCHDOG=1"]),
        (notifier.stopping("draining"), ["STOPPING=1", "STATUS=draining"]),
        (notifier.stopping(), ["STOPPING=1"]),
    ):
        assert told
        assert manager.heard() == heard
    assert (notifier.sent, notifier.failed) == (6, 0)


def test_a_reload_carries_the_clock_at_its_beginning(manager: Manager) -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert Notifier({"NOTIFY_SOCKET": manager.name}).reloading()
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    reloading, clock = manager.heard()
    name, _, microseconds = clock.partition("=")
    assert (reloading, name) == ("RELOADING=1", "MONOTONIC_USEC")
    assert before <= int(microseconds) <= after


def test_a_status_is_one_line_that_assigns_nothing_else(manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.name})
    assert notifier.status("a\nMAINPID=1\x1b[2J\ud800")
    assert manager.heard() == ["STATUS=a\\x0aMAINPID=1\\x1b[2J\\ud800"]
    assert notifier.ready("x" * 9000)
    assert manager.heard() == ["READY=1", "STATUS=" + "x" * 500]
    assert not notifier.status("")
    assert notifier.sent == 2


@pytest.mark.parametrize("name", ["", "vsock:2:1", "relative"])
def test_without_a_socket_nothing_is_sent(name: str) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": name} if name else {})
    assert not notifier.is_watched
    assert not any(
        [notifier.ready(), notifier.status("x"), notifier.reloading(), notifier.stopping(), notifier.watchdog()]
    )
    assert (notifier.sent, notifier.failed) == (0, 0)


def test_a_manager_that_is_not_there_harms_nobody(base: Path) -> None:
    for name in (f"{base}/none", "/" + "x" * 200, f"@sotbus-none-{os.getpid()}"):
        notifier = Notifier({"NOTIFY_SOCKET": name})
        assert not notifier.ready()
        assert notifier.failed == 1


def test_a_manager_that_reads_nothing_is_waited_for_only_where_it_matters(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sd_notify, "SEND_WAIT_S", 3)
    manager = Manager(f"{base}/notify")
    notifier = Notifier({"NOTIFY_SOCKET": manager.name})
    while notifier.watchdog():
        pass
    began = time.monotonic()
    assert not notifier.status("x")
    assert time.monotonic() - began < 2.5
    assert not notifier.ready()
    assert 3 <= time.monotonic() - began < 15
    manager.socket.close()


@pytest.mark.parametrize(
    ("environ", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({"WATCHDOG_USEC": "\u0665"}, None),
        ({"WATCHDOG_USEC": "9" * 30}, None),
    ],
)
def test_the_watchdogs_interval_is_this_processes_own(environ: dict[str, str], watchdog_s: float | None) -> None:
    assert Notifier(environ).watchdog_s == watchdog_s


def test_repr_names_the_socket_and_the_counts(base: Path) -> None:
    assert repr(Notifier({})) == "<Notifier nobody: 0 sent, 0 failed>"
    assert repr(Notifier({"NOTIFY_SOCKET": "@x"})) == "<Notifier @x: 0 sent, 0 failed>"
