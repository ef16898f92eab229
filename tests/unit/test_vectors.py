"""Every case of the vectors that concern the comm folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sotbus import message
from sotbus.comm import handles
from sotbus.comm.cursor import Cursor, cksum
from sotbus.comm.holder import Holder, judge, parse
from sotbus.comm.identity import identity_of
from sotbus.comm.inbox import look
from sotbus.comm.mounts import mount_of, stale_read_reason
from sotbus.errors import BadHandle, SotbusError

VECTORS = Path(__file__).parents[1] / "vectors"


def cases(name: str) -> list[Any]:
    found: list[Any] = json.loads((VECTORS / f"{name}.json").read_text())["cases"]
    assert found
    return found


def test_each_vector_file_is_used_or_belongs_to_a_later_part() -> None:
    used = {"cursors", "derived", "handles", "hashes", "judge", "lock_identity"}
    assert {path.stem for path in VECTORS.glob("*.json")} == used | {"addresses", "labels"}


@pytest.mark.spec("S80")
@pytest.mark.parametrize("case", cases("handles"), ids=lambda case: repr(case["handle"])[:30])
def test_handle(case: dict[str, Any]) -> None:
    assert handles.is_handle(case["handle"]) is case["valid"]
    if case["valid"]:
        assert handles.check(case["handle"]) == case["handle"]
    else:
        with pytest.raises(BadHandle, match="not a handle"):
            handles.check(case["handle"])


@pytest.mark.spec("S81", "S82", "S83")
@pytest.mark.parametrize("case", cases("derived"), ids=lambda case: f"{case['root']}-{case['host']}")
def test_derived_handle(case: dict[str, Any]) -> None:
    if case["handle"] is None:
        with pytest.raises(SotbusError, match="held by another project"):
            handles.derive(case["root"], case["host"], case["agents"])
    else:
        derived = handles.derive(case["root"], case["host"], case["agents"])
        assert derived == case["handle"]
        assert handles.is_handle(derived)


@pytest.mark.spec("S68")
@pytest.mark.parametrize("case", cases("hashes"), ids=lambda case: repr(case["line"])[:30])
def test_hash(case: dict[str, Any]) -> None:
    assert cksum(case["line"].encode()) == case["hash"]


@pytest.mark.spec("S31", "S38", "S39")
@pytest.mark.parametrize("case", cases("judge"), ids=lambda case: f"{case['record'] or 'empty'}-{case['me']['boot']}")
def test_judge(case: dict[str, Any]) -> None:
    me = Holder(
        case["me"]["name"], case["me"]["machine"], case["me"]["boot"], case["me"]["pidns"], "1", case["me"]["start"]
    )
    starts = {int(pid): str(start) for pid, start in case["proc"].items()}
    verdict, reason = judge(parse(case["record"]), me, starts.get)
    assert verdict == case["verdict"]
    assert reason


@pytest.mark.spec("S32", "S61")
@pytest.mark.parametrize("case", cases("lock_identity"), ids=lambda case: str(case["name"]))
def test_lock_identity(case: dict[str, Any]) -> None:
    mount = mount_of(case["path"], case["mountinfo"])
    assert identity_of(mount, case["machine_id"]) == case["identity"]
    assert (stale_read_reason(mount) is None) is case["proves_fresh_read"]


@pytest.mark.spec("S53", "S55", "S68", "S69", "S70", "S71")
@pytest.mark.parametrize("case", cases("cursors"), ids=lambda case: str(case["name"]))
def test_cursor(case: dict[str, Any], tmp_path: Path) -> None:
    inbox = tmp_path / "a.jsonl"
    inbox.write_bytes(case["inbox"].encode())
    seen = look(str(inbox), Cursor.parse(case["cursor"] or ""))
    assert (seen.offset, seen.cut_back, seen.total) == (case["offset"], case["note"], case["total"])
    assert sum(message.counts(line, case["handle"]) for line in seen.lines) == case["unread"]
    whole = case["inbox"].encode().split(b"\n")[:-1]
    assert seen.lines == whole[seen.offset :]
    if whole:
        assert seen.last == whole[-1]
