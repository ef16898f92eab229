"""The contract suite of a lock manager: real processes, real threads, and where they held the lock in time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import F_GETFL, fcntl
from itertools import pairwise
from pathlib import Path

import pytest

from sotbus.comm.flock import LockTimeoutError
from sotbus.contracts import LockManager
from sotbus.testing.forks import Fork, Line

LONG_S = 30.0
"""A bound that only a lock which is never got reaches, in seconds."""

ROUNDS = 25
"""How often each of two holders takes the lock at least; each goes on until the other has too."""

INSIDE_S = 0.001
"""How long each of those holds it: long beside what taking it costs, so that a lock that does not exclude overlaps."""

LOOKS, LOOK_EVERY_S = 20, 0.01
"""How often, and at what interval in seconds, a lock that must be free is looked at."""

Interval = tuple[int, int]
"""From when to when a lock was held, in nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share."""


class LockManagerContract:
    """Subclass it as ``class TestMine(LockManagerContract)`` and give the fixture ``manager``.

    Override ``lock_path`` to lock a file on the kind of mount that the manager is for, and :meth:`manager_elsewhere`
    where a manager cannot be taken along by a fork. ``late_s`` and ``dead_holder_s`` are what a slow machine needs.
    """

    late_s = 2.0
    """How much later than its bound a wait may end, in seconds."""

    dead_holder_s = 10.0
    """How long the lock of a killed holder may stay taken, in seconds."""

    @pytest.fixture
    def manager(self) -> LockManager:
        """The lock manager under test."""
        pytest.fail(f"{type(self).__name__} must give the fixture `manager`: the lock manager to test")

    @pytest.fixture
    def lock_path(self, tmp_path: Path) -> str:
        """A lock file that is not there yet, in a folder that is."""
        return str(tmp_path / "contract.lock")

    def manager_elsewhere(self, manager: LockManager) -> LockManager:
        """The manager as another process has it, called in a fork of the test's own; by default the same object."""
        return manager

    # what it says of itself

    def test_it_has_the_members_of_a_lock_manager(self, manager: LockManager) -> None:
        assert isinstance(manager, LockManager)

    def test_its_identity_is_one_line_of_text(self, manager: LockManager) -> None:
        identity = manager.identity
        assert isinstance(identity, str)
        assert identity.splitlines() == [identity]
        assert identity.strip() == identity

    def test_its_identity_is_the_same_each_time_and_in_every_process(self, manager: LockManager) -> None:
        with Fork(lambda line: line.say(self.manager_elsewhere(manager).identity)) as other:
            assert manager.identity == manager.identity == other.hear()

    def test_it_says_of_fresh_reads_and_of_fencing_yes_or_no(self, manager: LockManager) -> None:
        assert isinstance(manager.proves_fresh_read, bool)
        assert isinstance(manager.fences_data, bool)

    def test_it_fences_an_open_file_under_a_hold_and_lets_it_go_when_the_file_is_closed(
        self, manager: LockManager, lock_path: str
    ) -> None:
        answers = []
        for _ in range(2):
            with manager.hold(lock_path, True, 0.0):
                fd = os.open(lock_path + ".data", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
                try:
                    answers.append(manager.fence(fd, 0.0))
                    os.write(fd, b"line\n")
                    os.fsync(fd)
                finally:
                    os.close(fd)
        assert answers in ([True, True], [False, False])
        with open(lock_path + ".data", "rb") as file:
            assert file.read() == b"line\nline\n"

    def test_its_module_imports_no_trio(self, manager: LockManager) -> None:
        module = type(manager).__module__
        code = f"import sys, {module}; print('trio' in sys.modules)"
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("False\n", "")

    # the lock file

    def test_the_lock_file_is_made_where_it_is_not_there(self, manager: LockManager, lock_path: str) -> None:
        with manager.hold(lock_path, True, 0.0):
            assert os.path.isfile(lock_path)

    def test_the_lock_file_is_never_removed_or_replaced(self, manager: LockManager, lock_path: str) -> None:
        with manager.hold(lock_path, True, 0.0):
            first = os.stat(lock_path)
        for exclusive in (True, False):
            with manager.hold(lock_path, exclusive, 0.0):
                pass
            assert os.path.samestat(os.stat(lock_path), first)

    @pytest.mark.parametrize("exclusive", [True, False], ids=["exclusive", "shared"])
    def test_the_lock_file_is_opened_read_write(self, manager: LockManager, lock_path: str, exclusive: bool) -> None:
        with manager.hold(lock_path, exclusive, 0.0):
            modes = [fcntl(fd, F_GETFL) & os.O_ACCMODE for fd in _descriptors_of(lock_path)]
        assert modes, "no descriptor of the lock file is open while the lock is held"
        assert set(modes) == {os.O_RDWR}

    def test_a_lock_file_whose_folder_is_not_there_is_an_oserror(self, manager: LockManager, lock_path: str) -> None:
        nowhere = os.path.join(os.path.dirname(lock_path), "no-such-folder", "contract.lock")
        with pytest.raises(OSError):
            _is_free(manager, nowhere, True)

    # who excludes whom

    @pytest.mark.parametrize(
        ("theirs", "ours", "free"),
        [(True, True, False), (True, False, False), (False, True, False), (False, False, True)],
        ids=["writer-writer", "writer-reader", "reader-writer", "reader-reader"],
    )
    def test_only_readers_hold_the_lock_together(
        self, manager: LockManager, lock_path: str, theirs: bool, ours: bool, free: bool
    ) -> None:
        with self._held(manager, lock_path, theirs):
            assert _is_free(manager, lock_path, ours) is free

    def test_the_lock_of_another_file_is_another_lock(self, manager: LockManager, lock_path: str) -> None:
        with self._held(manager, lock_path, True):
            assert _is_free(manager, f"{lock_path}.other", True)

    def test_two_processes_never_hold_it_at_once(self, manager: LockManager, lock_path: str) -> None:
        def work(line: Line) -> None:
            holds = _holds(self.manager_elsewhere(manager), lock_path)
            line.say("ready")
            line.hear()
            intervals = [next(holds) for _ in range(ROUNDS)]
            line.say("enough")
            while not line.has_more():
                intervals.append(next(holds))
            line.say(intervals)

        with Fork(work) as one, Fork(work) as other:
            both = (one, other)
            for word, answer in (("ready", "go"), ("enough", "stop")):
                for process in both:
                    assert process.hear(2 * LONG_S) == word
                for process in both:
                    process.say(answer)
            _assert_apart([process.hear(2 * LONG_S) for process in both])

    def test_two_threads_never_hold_it_at_once(self, manager: LockManager, lock_path: str) -> None:
        intervals: list[list[Interval]] = [[], []]
        deadline = time.monotonic() + 2 * LONG_S

        def work(own: list[Interval]) -> None:
            holds = _holds(manager, lock_path)
            while min(map(len, intervals)) < ROUNDS and time.monotonic() < deadline:
                own.append(next(holds))

        threads = [threading.Thread(target=work, args=(own,), daemon=True) for own in intervals]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * LONG_S)
        _assert_apart(intervals)

    # how long it waits

    def test_a_free_lock_is_taken_with_a_bound_of_nothing(self, manager: LockManager, lock_path: str) -> None:
        assert _is_free(manager, lock_path, True)
        assert _is_free(manager, lock_path, False)

    @pytest.mark.parametrize("bound_s", [0.0, 0.3])
    @pytest.mark.parametrize("exclusive", [True, False], ids=["exclusive", "shared"])
    def test_a_held_lock_is_waited_for_to_the_bound(
        self, manager: LockManager, lock_path: str, exclusive: bool, bound_s: float
    ) -> None:
        with self._held(manager, lock_path, True):
            began = time.monotonic()
            assert not _is_free(manager, lock_path, exclusive, bound_s)
            took = time.monotonic() - began
        assert bound_s - 0.01 <= took <= bound_s + self.late_s

    def test_a_lock_that_is_released_in_time_is_got(self, manager: LockManager, lock_path: str) -> None:
        def work(line: Line) -> None:
            line.hear()
            line.say("asking")
            with self.manager_elsewhere(manager).hold(lock_path, True, LONG_S):
                line.say("got it")

        with Fork(work) as other:
            with manager.hold(lock_path, True, 0.0):
                other.say("ask")
                assert other.hear() == "asking"
                other.until_asleep()
            assert other.hear() == "got it"

    # how it ends

    def test_it_is_released_when_its_block_ends(self, manager: LockManager, lock_path: str) -> None:
        with self._held(manager, lock_path, True) as other:
            other.say("release")
            assert other.hear() == "released"
            assert _is_free(manager, lock_path, True)

    def test_it_is_released_when_its_block_raises(self, manager: LockManager, lock_path: str) -> None:
        def work(line: Line) -> None:
            line.say(_is_free(self.manager_elsewhere(manager), lock_path, True))

        with pytest.raises(ZeroDivisionError), manager.hold(lock_path, True, 0.0):
            raise ZeroDivisionError
        with Fork(work) as other:
            assert other.hear() is True

    def test_it_dies_with_a_holder_that_is_killed(self, manager: LockManager, lock_path: str) -> None:
        with self._held(manager, lock_path, True) as other:
            other.kill()
            assert _is_free(manager, lock_path, True, self.dead_holder_s)

    def test_a_waiter_that_is_killed_leaves_nothing_locked(self, manager: LockManager, lock_path: str) -> None:
        def work(line: Line) -> None:
            line.say("asking")
            with self.manager_elsewhere(manager).hold(lock_path, True, LONG_S):
                line.hear()

        with self._held(manager, lock_path, True) as holder, Fork(work) as waiter:
            assert waiter.hear() == "asking"
            waiter.until_asleep()
            waiter.kill()
            holder.say("release")
            assert holder.hear() == "released"
            assert _is_free(manager, lock_path, True, self.dead_holder_s)

    def test_an_exception_while_waiting_leaves_nothing_locked(self, manager: LockManager, lock_path: str) -> None:
        def work(line: Line) -> None:
            own = self.manager_elsewhere(manager)
            line.say("asking")
            try:
                with own.hold(lock_path, True, LONG_S):
                    line.say("got it")
            except KeyboardInterrupt:
                line.say("interrupted")
            line.hear()

        with self._held(manager, lock_path, True) as holder, Fork(work) as waiter:
            assert waiter.hear() == "asking"
            waiter.until_asleep()
            waiter.interrupt()
            assert waiter.hear() == "interrupted"
            holder.say("release")
            assert holder.hear() == "released"
            for _ in range(LOOKS):  # a wait that goes on in secret may come by the lock only now
                assert _is_free(manager, lock_path, True, self.late_s)
                time.sleep(LOOK_EVERY_S)

    @contextmanager
    def _held(self, manager: LockManager, path: str, exclusive: bool) -> Iterator[Fork]:
        """Another process holds the lock until it is told something; it answers "released" then, and stays."""

        def work(line: Line) -> None:
            with self.manager_elsewhere(manager).hold(path, exclusive, LONG_S):
                line.say("held")
                line.hear(4 * LONG_S)
            line.say("released")
            line.hear(4 * LONG_S)

        with Fork(work) as other:
            assert other.hear() == "held"
            yield other


def _is_free(manager: LockManager, path: str, exclusive: bool, bound_s: float = 0.0) -> bool:
    """Whether the lock is got within the bound; it is released again."""
    try:
        with manager.hold(path, exclusive, bound_s):
            return True
    except LockTimeoutError:
        return False


def _holds(manager: LockManager, path: str) -> Iterator[Interval]:
    """Hold the lock again and again; when each hold was."""
    while True:
        with manager.hold(path, True, LONG_S):
            began = time.monotonic_ns()
            time.sleep(INSIDE_S)
            ended = time.monotonic_ns()
        yield began, ended
        time.sleep(INSIDE_S)  # a fair chance for one that tries at intervals


def _assert_apart(holders: list[list[Interval]]) -> None:
    """Each held the lock often enough, while the other did, and no hold begins before the one before it has ended."""
    assert all(len(intervals) >= ROUNDS for intervals in holders), "a holder raised, or never got the lock"
    in_order = sorted(tuple(interval) for intervals in holders for interval in intervals)
    overlaps = [(one, later) for one, later in pairwise(in_order) if later[0] < one[1]]
    assert overlaps == []


def _descriptors_of(path: str) -> list[int]:
    """This process's open descriptors of a file."""
    there = os.stat(path)
    return [fd for fd in map(int, os.listdir("/dev/fd")) if _is_open_on(fd, there)]


def _is_open_on(fd: int, there: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), there)
    except OSError:
        return False  # the descriptor of the listing itself
