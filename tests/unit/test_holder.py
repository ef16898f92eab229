"""The lock record, and the proof that its holder is dead."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import MACHINE, World

from sotbus.comm.box import Box
from sotbus.comm.holder import ALIVE, DEAD, UNPROVABLE, Holder, judge, own_record, parse, valid_pid
from sotbus.comm.processes import start_ticks

ME = Holder("vm", "m1", "b1", "n1", "100", "1000")


def nobody(pid: int) -> str | None:
    """No process runs."""
    return None


def one(pid: int) -> str | None:
    """Process 5 runs since tick 1."""
    return "1" if pid == 5 else None


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def own_namespace() -> str:
    return os.readlink("/proc/self/ns/pid").removeprefix("pid:[").removesuffix("]")


@pytest.mark.spec("S29")
def test_this_processes_record_names_host_machine_boot_namespace_pid_and_start(world: World) -> None:
    stat = Path("/proc/self/stat").read_text()
    start = stat[stat.rindex(")") + 1 :].split()[19]
    record = str(own_record(world.box(), fresh=True))
    assert record == f"vm:{MACHINE}:{boot_id()}:{own_namespace()}:{os.getpid()}:{start}"


@pytest.mark.spec("S31")
@pytest.mark.parametrize(
    ("host", "name"),
    [("vm", "vm"), ("Box-A.example_1", "Box-A.example_1"), ("a b:c/d\n", "a_b_c_d_"), ("boîte", "bo_te"), ("", "-")],
)
def test_the_hosts_other_characters_are_underscores_in_the_record(host: str, name: str, world: World) -> None:
    record = own_record(world.box(host), fresh=True)
    assert record.name == name
    assert record.names_a_file


@pytest.mark.spec("S31")
def test_what_this_box_cannot_read_is_a_dash(world: World) -> None:
    box = Box("vm", "vm", None, None)
    record = own_record(box, fresh=True)
    assert (record.machine, record.boot) == ("-", "-")
    assert record.start == start_ticks(os.getpid())


@pytest.mark.spec("S32")
def test_where_no_read_is_proved_fresh_the_four_proof_fields_are_dashes(world: World) -> None:
    record = own_record(world.box(), fresh=False)
    assert str(record) == f"vm:-:-:-:{os.getpid()}:-"
    assert not record.can_prove
    assert not record.provable


@pytest.mark.spec("S31")
@pytest.mark.parametrize("stat", [None, "1 (python) S 0", "", "999999 (python) S " + "0 " * 40])
def test_a_proc_that_is_not_this_processes_own_proves_nothing(stat: str | None, tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    if stat is not None:
        (tmp_path / "self" / "stat").write_text(stat)
    box = Box("vm", "vm", MACHINE, boot_id(), proc=str(tmp_path))
    assert str(own_record(box, fresh=True)) == f"vm:-:-:-:{os.getpid()}:-"


@pytest.mark.spec("S29")
def test_the_start_is_counted_after_the_last_bracket_of_the_stat_line(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    after = " ".join(str(field) for field in range(3, 60))
    (tmp_path / "7" / "stat").write_text(f"7 (a) b 9) ) {after}\n")
    assert start_ticks(7, str(tmp_path)) == "22"


@pytest.mark.spec("S29", "S34")
def test_a_record_is_six_fields_and_a_file_name_has_dots_for_colons() -> None:
    record = parse("vm:m-1:b_1:n1:42:7")
    assert record is not None
    assert str(record) == "vm:m-1:b_1:n1:42:7"
    assert record.leaf == "vm.m-1.b_1.n1.42.7"
    assert record.described == "vm pid 42 start 7"


@pytest.mark.parametrize(
    "line",
    ["", "x", "vm", "a:b:c:d:1", "a:b:c:d:1:2:3", "a:b:c:d::2", "a:b:c:d:-1:2", "a:b:c:d:١:2", ":::::", "a:b:c:d:1 :2"],
)
def test_any_other_line_names_no_holder(line: str) -> None:
    assert parse(line) is None


def test_other_fields_may_be_empty() -> None:
    assert str(parse("::::1:")) == "::::1:"


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        *[("1", True), ("4294967295", True)],
        *[(text, False) for text in ("4294967296", "0", "007", "1" * 30, "", "-1", "٣", "1a")],
    ],
)
def test_a_pid_is_decimal_without_a_leading_zero_and_fits_32_bits(text: str, valid: bool) -> None:
    assert (text != "" and valid_pid(text)) is valid


@pytest.mark.spec("S38", "S39")
@pytest.mark.parametrize("pid", ["0", "007", "4294967296", "9" * 30])
@pytest.mark.parametrize("boot", ["b1", "b2"])
def test_a_pid_that_is_none_is_never_proved_dead(pid: str, boot: str) -> None:
    verdict, why = judge(Holder("vm", "m1", boot, "n1", pid, "1"), ME, nobody)
    assert (verdict, why) == (UNPROVABLE, f"its pid {pid} is not one")


@pytest.mark.spec("S39")
def test_a_process_whose_entry_cannot_be_read_is_not_proved_dead() -> None:
    def unreadable(pid: int) -> str | None:
        raise PermissionError(13, "Permission denied")

    assert judge(Holder("vm", "m1", "b1", "n1", "5", "1"), ME, unreadable) == (
        UNPROVABLE,
        "its /proc entry cannot be read",
    )


@pytest.mark.spec("S38")
def test_in_the_same_boot_and_namespace_machine_and_name_are_not_compared() -> None:
    assert judge(Holder("zz", "ffff", "b1", "n1", "5", "1"), ME, one) == (ALIVE, "it is running")
    assert judge(Holder("zz", "ffff", "b1", "n1", "5", "1"), ME, nobody) == (DEAD, "it has exited")


FIELDS = ("-", "", "x", "y")
MINE = ("xxxx", "-x--", "x-xx", "x---", "xx-x")
"""Name, machine, boot and namespace (with the start) of the one who judges."""


def expected(record: Holder, me: Holder, running: str | None) -> str:
    """The table of verdicts, row by row; ``running`` is the start of the record's pid here, or None."""

    def same(a: str, b: str) -> bool:
        return a == b and a not in ("-", "")

    if all(field in ("-", "") for field in (me.machine, me.boot, me.pidns, me.start)):
        return UNPROVABLE
    if same(record.boot, me.boot) and same(record.pidns, me.pidns):
        if running is None:
            return DEAD
        return DEAD if record.start not in ("-", "") and record.start != running else ALIVE
    rebooted = record.boot not in ("-", "") and me.boot not in ("-", "") and record.boot != me.boot
    if rebooted and same(record.machine, me.machine) and same(record.name, me.name):
        return DEAD
    return UNPROVABLE


@pytest.mark.spec("S31", "S38", "S39")
def test_every_combination_of_fields_has_the_verdict_of_the_table() -> None:
    checked = 0
    for name, machine, boot, pidns in itertools.product(FIELDS, repeat=4):
        for start, running in itertools.product(("-", "x", "y"), ("x", None)):
            record = Holder(name, machine, boot, pidns, "5", start)
            for mine in MINE:
                me = Holder(mine[0], mine[1], mine[2], mine[3], "1", mine[3])
                assert judge(record, me, {5: running}.get)[0] == expected(record, me, running), (record, me)
                checked += 1
    assert checked == 4**4 * 6 * 5


@pytest.mark.spec("S39", "S48")
@pytest.mark.parametrize(
    ("record", "provable"),
    [
        ("vm:m:b:n:5:1", True),
        ("vm:m:b:-:5:1", True),
        ("-:-:b:n:5:-", True),
        ("vm:-:b:-:5:1", False),
        ("-:m:b:-:5:1", False),
        ("vm:m:-:n:5:1", False),
        ("vm:-:-:-:5:-", False),
        ("vm:m:b:n:007:1", False),
        ("vm::::5:", False),
    ],
)
def test_some_box_can_prove_a_death_where_the_fields_for_it_are_known(record: str, provable: bool) -> None:
    holder = parse(record)
    assert holder is not None
    assert holder.provable is provable


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_a_record_with_a_slash_or_a_nul_names_no_file(text: str) -> None:
    holder = Holder(text, "m", "b", "n", "1", "2")
    if "/" in text or "\0" in text:
        assert not holder.names_a_file
    if holder.names_a_file:
        assert os.path.basename(holder.leaf) == holder.leaf
        assert holder.leaf.isascii()
