"""The node's store: who may open it, its schema's versions, message IDs and what became of them; and the settling."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from world import EXT4, MACHINE, World

from sotbus import message
from sotbus.comm.inbox import Inbox
from sotbus.comm.lock_manager import FlockManager
from sotbus.errors import ConfigError, FilingFailed
from sotbus.node.rows import Row
from sotbus.node.schema import APPLICATION_ID, MIGRATIONS
from sotbus.node.settling import Search, line_hash, message_id_of, settle_open
from sotbus.node.store import FILED, KEPT_S, NOT_FILED, OPEN, Intent, Store
from sotbus.node.store_file import StoreError, StoreHeld, network_mount, state_folder

MANAGER = FlockManager(f"local {MACHINE}")
NOW = 1_800_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "node.db"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(path: Path, clock: Clock) -> Iterator[Store]:
    store = Store(str(path), clock=clock)
    yield store
    store.close()


def intent(
    message_id: str, mailbox: str = "b", *, folder: str = "/comm", offset: int = 0, line: bytes = b"x\n"
) -> Intent:
    return Intent(message_id, folder, mailbox, b"body", offset, len(line), line_hash(line))


def again(store: Store, clock: Clock | None = None) -> Store:
    """The store as the next process finds it."""
    store.close()
    return Store(store.path, clock=clock or store.clock)


def after_a_crash(store: Store) -> dict[str, int]:
    """What another process would find if this one died now: everything that was committed, and nothing else."""
    with sqlite3.connect(store.path) as database:
        rows = database.execute("SELECT message_id, state FROM filings").fetchall()
    database.close()
    return dict(rows)


# ---- opening


def test_the_store_is_private_with_all_its_files(store: Store, path: Path) -> None:
    store.intend([intent("1")])
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes == dict.fromkeys(("node.db", "node.db-wal", "node.db-shm", "node.db.lock"), 0o600)


def test_a_file_that_is_open_to_others_is_closed(path: Path) -> None:
    path.parent.mkdir(0o700)
    path.touch(0o644)
    Store(str(path)).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_state_folder_that_is_open_to_others_is_refused_and_left_as_it_is(path: Path) -> None:
    path.parent.mkdir(0o755)
    with pytest.raises(StoreError, match=rf"is open to other users \(mode 0755\); run chmod 700 {path.parent}"):
        Store(str(path))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
    assert list(path.parent.iterdir()) == []


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"the state folder .*file/state cannot be made or used: Not a directory"):
        Store(str(tmp_path / "file" / "state" / "node.db"))


def test_a_link_in_the_stores_place_is_not_followed(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir(0o700)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="cannot be opened"):
        Store(str(path))
    assert not (tmp_path / "elsewhere").exists()


def test_a_second_opener_is_refused_and_the_first_is_named(store: Store, path: Path) -> None:
    store.intend([intent("1")])
    with pytest.raises(StoreHeld, match=rf"is open in another process already: pid {os.getpid()}, start \d+, on "):
        Store(str(path))
    code = f"from sotbus.node.store import Store\nStore({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"is open in another process already: pid {os.getpid()}, start" in done.stderr
    store.intend([intent("2")])  # the refused ones have taken nothing from the first


def test_the_lock_ends_with_its_process(path: Path) -> None:
    code = (
        "import os, signal\nfrom sotbus.node.store import Intent, Store\n"
        f"Store({str(path)!r}).intend([Intent('1', '/comm', 'b', b'', 0, 2, b'')])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    store = Store(str(path))
    assert [one.message_id for one in store.open_intents()] == ["1"]
    store.close()


def test_a_store_that_could_not_be_opened_is_not_left_locked(path: Path) -> None:
    path.parent.mkdir(0o700)
    path.write_bytes(b"no database, but as long as the header of one" * 10)
    for _ in range(2):
        with pytest.raises(StoreError, match="is damaged"):
            Store(str(path))


def test_a_closed_store_can_be_closed_again_and_not_used(store: Store) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreError, match=r"the node's store .*node\.db cannot be used"):
        store.intend([intent("1")])
    with pytest.raises(StoreError, match="cannot be used"):
        store.answer_of("1")


# ---- what is in the file


def test_a_new_file_has_the_newest_version_and_our_mark(store: Store, path: Path) -> None:
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
        assert database.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    database.close()


def test_commits_are_synced(store: Store) -> None:
    assert store._writer.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


MORE = (("ALTER TABLE filings ADD COLUMN thread TEXT",), ("CREATE TABLE labels (label TEXT)",))


def test_an_older_file_is_migrated_and_keeps_what_it_has(store: Store, path: Path) -> None:
    store.intend([intent("1")])
    store.close()
    newer = Store(str(path), migrations=(*MIGRATIONS, *MORE))
    assert newer.answer_of("1") == intent("1")
    assert newer._reader.execute("SELECT count(*) FROM labels").fetchone() == (0,)
    assert newer._reader.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 2,)
    newer.close()


def test_a_migration_that_fails_changes_nothing(store: Store, path: Path) -> None:
    store.intend([intent("1")])
    store.close()
    with pytest.raises(StoreError, match="cannot be used: near"):
        Store(str(path), migrations=(*MIGRATIONS, *MORE, ("NONSENSE",)))
    before = Store(str(path))
    assert before.answer_of("1") == intent("1")
    columns = [row[1] for row in before._reader.execute("PRAGMA table_info (filings)")]
    assert "thread" not in columns
    before.close()


def test_a_newer_file_is_refused_and_left_as_it_is(store: Store, path: Path) -> None:
    store.close()
    Store(str(path), migrations=(*MIGRATIONS, *MORE)).close()
    before = path.read_bytes()
    with pytest.raises(
        StoreError, match=r"is of version 4, and this sotbus knows versions up to 2; run the newer sotbus"
    ):
        Store(str(path))
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [0, 1])
def test_another_programs_database_is_refused_and_left_as_it_is(version: int, path: Path) -> None:
    path.parent.mkdir(0o700)
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE filings (name TEXT)")
        database.execute(f"PRAGMA user_version = {version}")
    database.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"is another program's database; name another folder with node\.state"):
        Store(str(path))
    assert path.read_bytes() == before


@pytest.mark.parametrize("at", [0, 4096, 8192], ids=["the header", "the table", "an index"])
def test_a_damaged_file_is_told_and_left_for_a_person(at: int, store: Store, path: Path) -> None:
    store.intend([intent(str(number)) for number in range(200)])
    store.close()
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"\xa5" * 2048)
    before = path.read_bytes()
    text = r"is damaged \(.*\); stop the node, move it and .*node\.db-wal aside by hand.*forgotten"
    with pytest.raises(StoreError, match=text):
        Store(str(path))
    assert path.read_bytes() == before


def test_a_start_that_was_killed_before_the_schema_was_there_begins_anew(path: Path) -> None:
    path.parent.mkdir(0o700)
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA journal_mode = WAL")
    database.close()
    store = Store(str(path))
    store.intend([intent("1")])
    store.close()


# ---- message IDs


def test_an_id_is_new_then_open_then_filed(store: Store) -> None:
    assert store.answer_of("1") is None
    store.intend([intent("1", offset=7)])
    assert store.answer_of("1") == intent("1", offset=7)
    assert store.open_intents() == [intent("1", offset=7)]
    store.settle({"1": True})
    found = store.answer_of("1")
    assert found is not None
    assert found.state == FILED
    assert store.open_intents() == []


@pytest.mark.parametrize("filed", [True, False])
def test_a_result_outlives_the_store(filed: bool, store: Store, clock: Clock) -> None:
    store.intend([intent("1")])
    store.settle({"1": filed})
    after = again(store)
    found = after.answer_of("1")
    assert found is not None
    assert found.state == (FILED if filed else NOT_FILED)
    assert after.open_intents() == []
    after.close()


def test_an_intent_is_on_disk_at_once_and_a_result_with_the_next_commit(store: Store) -> None:
    store.intend([intent("1")])
    assert after_a_crash(store) == {"1": OPEN}
    store.settle({"1": True})
    assert after_a_crash(store) == {"1": OPEN}
    assert store.statistics().unwritten_results == 1
    store.intend([intent("2")])
    assert after_a_crash(store) == {"1": FILED, "2": OPEN}
    store.settle({"2": False})
    store.flush()
    assert after_a_crash(store) == {"1": FILED, "2": NOT_FILED}
    assert store.statistics() == type(store.statistics())(commits=3, intents=2, unwritten_results=0)
    store.flush()
    assert store.statistics().commits == 3


def test_an_id_that_was_not_filed_is_intended_anew_and_open_again(store: Store) -> None:
    store.intend([intent("1", offset=1)])
    store.settle({"1": False})
    store.intend([intent("1", offset=5, line=b"longer\n")])
    assert store.answer_of("1") == intent("1", offset=5, line=b"longer\n")
    assert after_a_crash(store) == {"1": OPEN}


def test_a_batch_of_intents_is_one_commit_with_one_sync(store: Store) -> None:
    before = store.statistics().commits
    store.intend([intent(str(number)) for number in range(300)])
    assert store.statistics().commits == before + 1
    assert len(store.known(map(str, range(1200)))) == 300


def test_open_intents_are_told_by_folder_and_mailbox_in_their_order(store: Store) -> None:
    places = [("3", "b", "/one"), ("1", "c", "/one"), ("2", "b", "/two"), ("4", "b", "/one")]
    store.intend([intent(key, mailbox, folder=folder) for key, mailbox, folder in places])
    assert [one.message_id for one in store.open_intents("/one", "b")] == ["3", "4"]
    assert [one.message_id for one in store.open_intents("/one")] == ["3", "1", "4"]
    assert [one.message_id for one in store.open_intents()] == ["3", "1", "2", "4"]


@pytest.mark.parametrize("text", ["ü☃", "o'brien; --", '"', "a b", "\x7f"])
def test_ids_are_text_byte_for_byte(text: str, store: Store) -> None:
    store.intend([intent(text), intent("x")])
    assert set(store.known([text, text.upper() + "?"])) == {text}


def test_ids_are_kept_for_24_h_whatever_became_of_them(store: Store, clock: Clock) -> None:
    store.intend([intent("filed"), intent("open"), intent("not filed")])
    store.settle({"filed": True, "not filed": False})
    clock.now += KEPT_S
    store.intend([intent("young")])
    assert store.expire() == 0
    clock.now += 1
    assert store.expire() == 3
    assert set(store.known(["filed", "open", "not filed", "young"])) == {"young"}
    assert store.expire() == 0


def test_a_repeat_that_is_filed_is_young_again(store: Store, clock: Clock) -> None:
    store.intend([intent("1")])
    store.settle({"1": False})
    clock.now += KEPT_S
    store.intend([intent("1")])
    clock.now += 1
    assert store.expire() == 0


def test_many_ids_expire_in_several_transactions(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sotbus.node.store.EXPIRED_AT_ONCE", 7)
    store.intend([intent(str(number)) for number in range(20)])
    clock.now += KEPT_S + 1
    assert store.expire() == 20
    assert store.expire() == 0


def test_a_full_disk_is_told_and_nothing_is_intended(store: Store) -> None:
    store.intend([intent("1")])
    pages = store._writer.execute("PRAGMA page_count").fetchone()[0]
    store._writer.execute(f"PRAGMA max_page_count = {pages}")
    store.settle({"1": True})
    with pytest.raises(StoreError, match=r"the node's store .*node\.db cannot be used: database or disk is full"):
        store.intend([intent(str(number), folder="/" + "x" * 500) for number in range(100)])
    found = store.known(map(str, range(100)))
    assert {key: one.state for key, one in found.items()} == {"1": FILED}
    assert store.statistics().unwritten_results == 1
    store._writer.execute("PRAGMA max_page_count = 1000000")
    store.intend([intent("2")])
    assert after_a_crash(store) == {"1": FILED, "2": OPEN}


# ---- rows


ROWS = (
    Row("ws-1", 5, 2**40, "4026531836", "boot", "h"),
    Row("ws-2", 6, 7, "", "", ""),
)


def test_rows_are_on_disk_at_once_each_time_instead_of_those_before(store: Store, path: Path) -> None:
    assert store.rows() == ()
    store.keep_rows(ROWS)
    with sqlite3.connect(path) as database:  # as another process would find it if this one died now
        assert [Row(*row) for row in database.execute("SELECT * FROM rows")] == list(ROWS)
    database.close()
    store.keep_rows([ROWS[1]])
    assert store.rows() == (ROWS[1],)
    after = again(store)
    assert after.rows() == (ROWS[1],)
    after.close()


def test_rows_that_cannot_be_kept_leave_those_before(store: Store) -> None:
    store.keep_rows(ROWS)
    pages = store._writer.execute("PRAGMA page_count").fetchone()[0]
    store._writer.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match=r"the node's store .*node\.db cannot be used: database or disk is full"):
        store.keep_rows([Row(f"ws-{number}", 5, 7, "", "", "h" * 64) for number in range(200)])
    assert store.rows() == ROWS
    with pytest.raises(StoreError, match="is damaged"):  # one id twice
        store.keep_rows([ROWS[0], ROWS[0]])
    assert store.rows() == ROWS


def test_a_store_of_version_1_is_brought_up_to_date_in_its_place(path: Path) -> None:
    old = Store(str(path), migrations=MIGRATIONS[:1])
    old.intend([intent("1")])
    old.close()
    store = Store(str(path))
    assert (store.rows(), store.answer_of("1")) == ((), intent("1"))
    store.keep_rows(ROWS)
    after = again(store)
    assert after.rows() == ROWS
    after.close()


# ---- several threads


def test_intents_of_several_threads_share_a_commit(store: Store) -> None:
    """Nine threads come while a commit waits for the disk; the next one is theirs together."""
    threads = [threading.Thread(target=store.intend, args=[[intent(str(number))]]) for number in range(9)]
    with store._turn:
        for thread in threads:
            thread.start()
        until(lambda: len(store._next.tickets) == 9)
    for thread in threads:
        thread.join(30)
    assert store.statistics().commits == 1
    assert len(store.open_intents()) == 9


def test_a_commit_that_fails_fails_each_of_those_who_share_it(store: Store) -> None:
    failed: list[StoreError] = []

    def intend(number: int) -> None:
        try:
            store.intend([intent(str(number), folder=5)])  # type: ignore[arg-type]
        except StoreError as error:
            failed.append(error)

    store._writer.execute("DROP TABLE filings")
    threads = [threading.Thread(target=intend, args=[number]) for number in range(4)]
    with store._turn:
        for thread in threads:
            thread.start()
        until(lambda: len(store._next.tickets) == 4)
    for thread in threads:
        thread.join(30)
    assert len(failed) == 4


def test_a_commit_that_is_broken_off_is_no_commit_for_those_who_wait(store: Store) -> None:
    """A text that SQLite cannot take is an error of another kind; whoever shares the commit must not count on it."""
    ends: list[str] = []

    def intend(text: str) -> None:
        try:
            store.intend([intent(text)])
        except Exception as error:
            ends.append(type(error).__name__)

    threads = [threading.Thread(target=intend, args=[text]) for text in ("good", "\ud800")]
    with store._turn:
        for thread in threads:
            thread.start()
        until(lambda: len(store._next.tickets) == 2)
    for thread in threads:
        thread.join(30)
    assert sorted(ends) in (["StoreError", "UnicodeEncodeError"], ["StoreError", "StoreError"])
    assert store.known(["good"]) == {}


def test_a_question_does_not_wait_for_a_commit(store: Store) -> None:
    store.intend([intent("1")])
    with store._turn:
        assert store.answer_of("1") == intent("1")


def test_a_result_is_seen_while_it_is_being_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.intend([intent("1")])
    store.settle({"1": True})
    real, states = store._write, []

    def write(*args: object) -> None:
        found = store.answer_of("1")
        states.append(found.state if found else None)
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "_write", write)
    store.flush()
    assert states == [FILED]


def until(what: Callable[[], bool]) -> None:
    """Wait for another thread, at most 30 s."""
    pause = threading.Event()
    for _ in range(3000):
        if what():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come about")


# ---- the state folder


NFS = EXT4 + "30 21 0:40 / {} rw - nfs4 filer:/home rw,vers=4.2\n"


def test_the_state_folder_is_below_xdg_state_home_else_below_home(tmp_path: Path) -> None:
    assert state_folder({"XDG_STATE_HOME": "/s", "HOME": "/h"}, None, EXT4) == "/s/sotbus"
    assert state_folder({"HOME": "/h"}, None, EXT4) == "/h/.local/state/sotbus"
    assert state_folder({"XDG_STATE_HOME": "relative", "HOME": "/h"}, None, None) == "/h/.local/state/sotbus"
    assert state_folder({"XDG_STATE_HOME": "", "HOME": "/h"}, "", EXT4) == "/h/.local/state/sotbus"


@pytest.mark.parametrize("environ", [{"XDG_STATE_HOME": "/far/state"}, {"HOME": "/far"}])
def test_a_state_folder_on_a_network_mount_is_refused_with_the_setting_to_name_another(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"on a network mount \(nfs4 filer:/home on /far\); name .* \(node\.state\)"):
        state_folder(environ, None, NFS.format("/far"))


def test_a_configured_state_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert state_folder({"HOME": "/far"}, "/var/lib/sotbus", NFS.format("/far")) == "/var/lib/sotbus"
    assert state_folder({"HOME": "/far"}, "/far/state", NFS.format("/far")) == "/far/state"
    assert network_mount("/far/state", NFS.format("/far")) is not None


def test_a_link_into_a_network_mount_lies_on_it(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "far")
    mountinfo = NFS.format(os.path.realpath(tmp_path / "far"))
    with pytest.raises(ConfigError, match=r"node\.state"):
        state_folder({"XDG_STATE_HOME": str(tmp_path / "state")}, None, mountinfo)


def test_where_there_is_no_home_the_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(ConfigError, match=r"no home folder .* \(node\.state\)"):
        state_folder({}, None, EXT4)


@pytest.mark.parametrize(
    ("fstype", "network"),
    [("ext4", False), ("tmpfs", False), ("overlay", False), ("fuse.lxcfs", False), ("cifs", True), ("9p", True),
     ("fuse.sshfs", True), ("ceph", True), ("nfs", True)],
)  # fmt: skip
def test_which_mounts_are_network_mounts(fstype: str, network: bool) -> None:
    mountinfo = EXT4 + f"30 21 0:40 / /far rw - {fstype} source rw\n"
    assert (network_mount("/far/x", mountinfo) is not None) == network
    assert network_mount("/near/x", mountinfo) is None


# ---- settling


def line(message_id: str | None, text: str = "hello", to: str = "b") -> bytes:
    plain = message.encode("a", to, "r", text, message.stamp(NOW))
    return plain if message_id is None else plain[:-2] + b',"sotbus":{"id":"%s"}}\n' % message_id.encode()


def the_intent(world: World, data: bytes, offset: int, mailbox: str = "b") -> Intent:
    message_id = message_id_of(data)
    assert message_id is not None
    return intent(message_id, mailbox, folder=world.folder.root, offset=offset, line=data)


def settle(store: Store, world: World, manager: FlockManager = MANAGER) -> tuple[int, int, dict[str, str]]:
    world.folder.ensure()
    done = settle_open(store, world.folder, lambda: manager, 0.05)
    return done.filed, done.not_filed, {mailbox: str(error) for mailbox, error in done.left.items()}


def states(store: Store) -> dict[str, int]:
    return after_a_crash(store)


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        (line("7"), "7"),
        (line(None), None),
        (line(None, text='"sotbus":{"id":"7"}'), None),
        (b'{"sotbus":{"id":7}}\n', None),
        (b'{"sotbus":"7"}\n', None),
        (b'{"sotbus":[{"id":"7"}]}\n', None),
        (b'{"sotbus":{"id":"7"}\n', None),
        (b'{"sotbus":{"id":"\\u2603"}}\n', "\u2603"),
        (b"\n", None),
    ],
)
def test_the_message_id_of_a_line(stored: bytes, found: str | None) -> None:
    assert message_id_of(stored) == found


def test_a_line_that_stands_where_it_was_to_be_written_was_filed(store: Store, world: World) -> None:
    world.folder.ensure()
    world.inbox("b").write_bytes(line(None) + line("1") + line("2"))
    first = len(line(None))
    store.intend([the_intent(world, line("1"), first), the_intent(world, line("2"), first + len(line("1")))])
    assert settle(store, world) == (2, 0, {})
    assert states(store) == {"1": FILED, "2": FILED}


def test_a_line_that_stands_nowhere_was_not_filed(store: Store, world: World) -> None:
    world.folder.ensure()
    world.inbox("b").write_bytes(line(None) + b"\n\n")
    store.intend([the_intent(world, line("1"), len(line(None))), the_intent(world, line("2"), 9000)])
    assert settle(store, world) == (0, 2, {})
    assert states(store) == {"1": NOT_FILED, "2": NOT_FILED}
    assert world.inbox("b").read_bytes() == line(None) + b"\n\n"


@pytest.mark.parametrize("pruned", [b"\n", b"\n" * 30 + line(None)], ids=["moved down", "moved up"])
def test_a_line_that_was_moved_is_found_by_its_id_over_the_whole_file(
    pruned: bytes, store: Store, world: World
) -> None:
    """A prune moves offsets down, also to before where the line was to be written; other lines stand there then."""
    world.folder.ensure()
    others = [line("other", text="x" * size) for size in (1, 300)]
    world.inbox("b").write_bytes(pruned + line("1") + others[0] + others[1])
    store.intend([the_intent(world, line("1"), 2 * len(line(None)))])
    assert settle(store, world) == (1, 0, {})


def test_other_bytes_where_the_line_was_to_be_are_not_the_line(store: Store, world: World) -> None:
    world.folder.ensure()
    other = line("2", text="world")
    assert len(other) == len(line("1"))
    world.inbox("b").write_bytes(other)
    store.intend([the_intent(world, line("1"), 0)])
    assert settle(store, world) == (0, 1, {})


def test_a_line_without_its_newline_is_torn_and_was_not_filed(store: Store, world: World) -> None:
    world.folder.ensure()
    world.inbox("b").write_bytes(line(None) + line("1")[:-1])
    store.intend([the_intent(world, line("1"), len(line(None)))])
    assert settle(store, world) == (0, 1, {})
    assert world.inbox("b").read_bytes() == line(None)


def test_a_line_that_is_found_is_written_again_in_place_and_synced_before_it_counts(
    store: Store, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a sync that failed another sync of the same pages says nothing."""
    world.folder.ensure()
    data = line(None) + line("1") + line("2") + line("3")
    world.inbox("b").write_bytes(data)
    first = len(line(None))
    store.intend([the_intent(world, line("1"), first), the_intent(world, line("3"), 5)])
    calls: list[object] = []
    real_pwrite = os.pwrite

    def pwrite(fd: int, some: bytes, offset: int) -> int:
        calls.append((some[:9], offset))
        return real_pwrite(fd, some[:9], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fdatasync", lambda _: calls.append((after_a_crash(store), world.inbox("b").read_bytes())))
    found = settle(store, world)
    monkeypatch.undo()
    assert found == (2, 0, {})
    at = [first, first + len(line("1")) + len(line("2"))]
    pieces = [(line("1")[o : o + 9], at[0] + o) for o in range(0, len(line("1")), 9)]
    pieces += [(line("3")[o : o + 9], at[1] + o) for o in range(0, len(line("3")), 9)]
    assert calls == [*pieces, ({"1": OPEN, "3": OPEN}, data)]
    assert states(store) == {"1": FILED, "3": FILED}


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_a_disk_that_fails_leaves_the_intents_open(
    call: str, store: Store, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.folder.ensure()
    world.inbox("b").write_bytes(line("1"))
    store.intend([the_intent(world, line("1"), 0)])

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    assert settle(store, world) == (0, 0, {"b": "the append failed: Input/output error"})
    monkeypatch.undo()
    assert states(store) == {"1": OPEN}
    assert world.inbox("b").read_bytes() == line("1")
    assert settle(store, world) == (1, 0, {})


def test_a_mailbox_that_cannot_be_looked_at_keeps_no_other_from_being_settled(store: Store, world: World) -> None:
    world.folder.ensure()
    for mailbox in "abc":
        world.inbox(mailbox).write_bytes(line("1" + mailbox))
        store.intend([the_intent(world, line("1" + mailbox), 0, mailbox)])
    with MANAGER.hold(world.folder.inbox_lock("b"), True, 0):
        assert settle(store, world) == (
            2,
            0,
            {"b": "the inbox lock for @b was held for 0.05s — nothing was appended"},
        )
    assert states(store) == {"1a": FILED, "1b": OPEN, "1c": FILED}


def test_where_this_process_may_not_append_the_intents_stay_open(store: Store, world: World) -> None:
    store.intend([the_intent(world, line("1"), 0)])

    def refused() -> FlockManager:
        raise FilingFailed("the record names another machine")

    done = settle_open(store, world.folder, refused, 0)
    assert {mailbox: str(error) for mailbox, error in done.left.items()} == {"b": "the record names another machine"}
    assert states(store) == {"1": OPEN}


def test_another_folders_intents_are_left_to_it(store: Store, world: World) -> None:
    store.intend([intent("1", folder="/elsewhere")])
    assert settle(store, world) == (0, 0, {})
    assert states(store) == {"1": OPEN}


def test_an_inbox_that_is_not_there_has_no_lines(store: Store, world: World) -> None:
    store.intend([the_intent(world, line("1"), 0)])
    assert settle(store, world) == (0, 1, {})


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_a_search_reads_in_blocks_of_any_size(block: int, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sotbus.node.settling.SCAN_BLOCK_BYTES", block)
    world.folder.ensure()
    world.inbox("b").write_bytes(b"\n" + line("1") + line(None) + b"\n" + line("2") + line("3"))
    wanted = [the_intent(world, line(key), 10_000) for key in ("1", "3", "4")]
    search = Search(wanted)
    Inbox(world.folder, "b", MANAGER).append(search, 0)
    assert search.found == {"1", "3"}
