"""``sotbus status``: what a session declares about itself, and that it declares nothing else."""

from __future__ import annotations

import calendar
import json
import time
from pathlib import Path
from typing import Any

import pytest
from world import World

from sotbus import message
from sotbus.comm import work_state
from sotbus.comm.processes import Ancestry
from sotbus.comm.settings import Settings
from sotbus.errors import BadRequest, GateRefused, NotJoined, RegistryLockFailed, RegistryWriteFailed, TooLarge

NOW = 1_800_000_000.0


@pytest.fixture
def joined(world: World) -> World:
    """@a-vm and @b-vm, the first with a day-old stamp and what other programs keep in its entry."""
    assert world.sotbus("a", "join").returncode == 0
    assert world.sotbus("b", "join").returncode == 0
    document = registry(world)
    document["later"] = {"load": 1.50}
    document["agents"]["a-vm"].update(
        last_seen="2026-01-01T00:00:00Z", done=True, note="theirs", question={"deep": [0.10]}, stop_at="x"
    )
    Path(world.folder.registry).write_text(json.dumps(document, indent=2) + "\n")
    return world


def registry(world: World) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(world.folder.registry).read_text(), parse_float=str)
    return document


def test_a_status_changes_its_own_fields_and_the_stamp_and_nothing_else(joined: World) -> None:
    before = registry(joined)
    done = joined.sotbus("a", "status", "working", "moving the parser")
    assert (done.returncode, done.stdout, done.stderr) == (0, "@a-vm [working] moving the parser\n", "")
    after = registry(joined)
    entry = after["agents"]["a-vm"]
    assert (entry.pop("state"), entry.pop("summary")) == ("working", "moving the parser")
    stamped = entry.pop("status_at")
    assert message.is_stamp(stamped)
    assert abs(time.time() - calendar.timegm(time.strptime(stamped, message.STAMP))) < 60
    assert entry.pop("last_seen") == stamped
    before["agents"]["a-vm"].pop("last_seen")
    assert after == before


@pytest.mark.parametrize("state", work_state.STATES)
def test_each_state_is_written_as_it_is_named_and_listed(joined: World, state: str) -> None:
    assert joined.sotbus("a", "status", state, "why", "so").returncode == 0
    assert registry(joined)["agents"]["a-vm"]["state"] == state
    assert f"    [{state}] why so · just now\n" in joined.sotbus("b", "list").stdout


def test_a_status_without_a_summary_clears_the_one_of_the_state_before(joined: World) -> None:
    assert joined.sotbus("a", "status", "working", "on it").returncode == 0
    done = joined.sotbus("a", "status", "idle", "--json")
    said = json.loads(done.stdout)
    assert said == {"handle": "a-vm", "state": "idle", "summary": "", "status_at": said["status_at"]}
    assert registry(joined)["agents"]["a-vm"]["summary"] == ""
    assert "    [idle] · just now\n" in joined.sotbus("b", "list").stdout


def test_a_wrong_state_is_a_usage_error_that_names_the_four(joined: World) -> None:
    before = Path(joined.folder.registry).read_bytes()
    done = joined.sotbus("a", "status", "busy", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert all(state in done.stderr for state in ("busy", *work_state.STATES))
    assert joined.sotbus("a", "status").returncode == 2
    assert Path(joined.folder.registry).read_bytes() == before


def test_a_session_that_has_not_joined_declares_nothing_and_makes_nothing(world: World) -> None:
    done = world.sotbus("a", "status", "working", "x")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Not joined — run comm-join.sh first.\n")
    assert not world.home.exists()


@pytest.mark.parametrize(
    "text", ["two\nlines", "\x1b[31mred", "nul\0", "c1\x9b", "sep\u2028", "cr\r", "lone \ud800"], ids=ascii
)
def test_a_summary_that_is_not_one_plain_line_is_refused_and_nothing_is_written(joined: World, text: str) -> None:
    before = Path(joined.folder.registry).read_bytes()
    with pytest.raises(BadRequest, match=r"^the summary has .* at character \d+; nothing was written$"):
        work_state.declare(joined.client("a"), "working", text)
    assert Path(joined.folder.registry).read_bytes() == before


def test_a_summary_may_have_500_characters_and_no_more(joined: World) -> None:
    client = joined.client("a")
    assert work_state.declare(client, "working", " " + "☃" * 500 + " ")["summary"] == "☃" * 500
    with pytest.raises(TooLarge, match="501 characters and the limit is 500"):
        work_state.declare(client, "working", "x" * 501)


def test_a_state_that_is_none_of_the_four_is_refused_by_the_function_too(joined: World) -> None:
    with pytest.raises(BadRequest, match="working, blocked, idle, done"):
        work_state.declare(joined.client("a"), "busy")


def test_an_agent_that_merely_inherited_the_identity_declares_nothing(joined: World) -> None:
    before = Path(joined.folder.registry).read_bytes()
    client = joined.client("a")
    client.session.ancestry = Ancestry([], readable=False, complete=False)
    with pytest.raises(GateRefused):
        work_state.declare(client, "working")
    assert Path(joined.folder.registry).read_bytes() == before


@pytest.mark.spec("S44")
def test_a_registry_lock_that_is_held_is_waited_for_by_its_own_bound_and_its_holder_named(joined: World) -> None:
    before = Path(joined.folder.registry).read_bytes()
    waiting = joined.client("a", settings=Settings(lock_wait_s=0.1, touch_wait_s=60))
    began = time.monotonic()
    with joined.client("b").registry.lock.hold(1), pytest.raises(RegistryLockFailed) as refused:
        work_state.declare(waiting, "working")
    assert time.monotonic() - began < 30
    assert str(refused.value).startswith(f"FAILED: registry lock {joined.folder.registry_lock} ")
    assert Path(joined.folder.registry).read_bytes() == before


def test_a_registry_that_cannot_be_read_is_a_failed_that_writes_nothing(joined: World) -> None:
    Path(joined.folder.registry).write_text("{")
    with pytest.raises(RegistryWriteFailed) as failed:
        work_state.declare(joined.client("a"), "working")
    assert str(failed.value) == "FAILED: the registry could not be read or updated, so nothing was written"
    assert Path(joined.folder.registry).read_text() == "{"


def test_a_handle_that_has_no_row_gets_none_by_a_status(joined: World) -> None:
    assert joined.sotbus("b", "leave", "--name", "a-vm").returncode == 0
    with pytest.raises(NotJoined, match="@a-vm has no registry row; nothing was written"):
        work_state.declare(joined.client("a"), "working")
    assert "a-vm" not in registry(joined)["agents"]


def test_a_handle_that_another_project_took_between_the_look_and_the_lock_is_left_alone(
    joined: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = joined.client("a")
    mine = client.identity()
    document = registry(joined)
    document["agents"]["a-vm"]["root"] = "/elsewhere"
    Path(joined.folder.registry).write_text(json.dumps(document))
    monkeypatch.setattr(client, "identity", lambda **_: mine)
    with pytest.raises(NotJoined, match="taken by another session"):
        work_state.declare(client, "working")
    assert "state" not in registry(joined)["agents"]["a-vm"]
