"""The line: what is written, what is shown, what counts; and the stamp that says who is live."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sotbus import message
from sotbus.comm.liveness import LIVE_S, age_s, is_live
from sotbus.errors import BadRequest, TooLarge
from sotbus.message import check_text, counts, encode, is_stamp, parse, stamp, text_of

NOW_S = 1_780_077_840
NOW = "2026-05-29T18:04:00Z"

TEXTS = {
    "line separator": "a\u2028b",
    "paragraph separator": "a\u2029b",
    "next line": "a\u0085b",
    "vertical tab": "a\vb",
    "form feed": "a\fb",
    "CR LF": "a\r\nb\r\n",
    "NUL": "a\0b\0",
    "family emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "only newline": "\n",
    "only blank": " ",
    "quotes and backslashes": '"\\" \\n \\u0000 {"to":""}',
    "escape": "\x1b[31mred\x7f",
    "byte order mark": "\ufeffa\ufffe\uffff",
    "combining": "e\u0301\u00e9",
    "last code point": "\U0010ffff",
    "long": "☃" * 50_000,
}


# ---- what is written


@pytest.mark.spec("S49", "S50")
def test_a_line_is_five_keys_in_the_pages_order_and_a_newline() -> None:
    line = encode("projA-vm", "projB-vm", "projA", 'hello\nsecond line "q" ☃', NOW)
    assert line.decode() == (
        '{"from":"projA-vm","to":"projB-vm","repo":"projA","msg":"hello\\nsecond line \\"q\\" ☃",'
        '"ts":"2026-05-29T18:04:00Z"}\n'
    )


@pytest.mark.spec("S52")
def test_a_broadcast_copy_is_to_nobody() -> None:
    line = encode("a", "", "r", "x", NOW)
    assert line.startswith(b'{"from":"a","to":"","repo"')
    assert not counts(line[:-1], "b")


@pytest.mark.spec("S49")
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_comes_back_byte_for_byte_in_one_physical_line(text: str) -> None:
    check_text(text)
    line = encode("a", "b", text[:9], text, NOW)
    assert line.count(b"\n") == 1
    assert b"\0" not in line
    value = parse(line[:-1])
    assert value is not None
    assert value == {"from": "a", "to": "b", "repo": text[:9], "msg": text, "ts": NOW}
    assert value["msg"].encode() == text.encode()
    assert counts(line[:-1], "b")


@pytest.mark.spec("S49")
@settings(max_examples=100, deadline=None)
@given(st.text(min_size=1))
def test_any_unicode_text_comes_back(text: str) -> None:
    line = encode("a", "b", "r", text, NOW)
    assert line.index(b"\n") == len(line) - 1
    assert parse(line[:-1]) == {"from": "a", "to": "b", "repo": "r", "msg": text, "ts": NOW}
    assert json.loads(line)["msg"] == text


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(BadRequest, match="the text is empty; nothing was sent"):
        check_text("")


@pytest.mark.parametrize(("text", "at"), [("\ud800", 1), ("ab\udcff", 3), ("\udc00\ud800", 1)])
def test_a_lone_surrogate_is_refused_and_never_replaced(text: str, at: int) -> None:
    with pytest.raises(BadRequest, match=f"not valid Unicode at character {at}; nothing was sent"):
        check_text(text)
    with pytest.raises(UnicodeEncodeError):
        encode("a", "b", "r", text, NOW)


@pytest.mark.parametrize(("text", "size"), [("x" * 11, 11), ("☃" * 4, 12)])
def test_a_text_over_the_bound_is_refused_with_both_numbers(text: str, size: int) -> None:
    with pytest.raises(TooLarge) as caught:
        check_text(text, 10)
    assert str(caught.value) == f"too_large: the text has {size} bytes and the limit is 10; nothing was sent"
    assert caught.value.code == "too_large"


def test_a_text_at_the_bound_is_a_message() -> None:
    assert message.MAX_TEXT_BYTES == 256 * 1024
    check_text("☃" * 3 + "x", 10)
    check_text("x" * message.MAX_TEXT_BYTES)
    with pytest.raises(TooLarge):
        check_text("x" * (message.MAX_TEXT_BYTES + 1))


# ---- what is shown


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b" ",
        b"text",
        b"[]",
        b'"text"',
        b"5",
        b"null",
        b"true",
        b'{"msg":"a"} {"msg":"b"}',
        b'{"msg":"a"}{"msg":"b"}',
        b'{"msg":"a"',
        b'{"msg":"a"},',
        b"{'msg':'a'}",
        b'{"msg":"a",}',
        b'{"msg":"tab\there"}',
        b'\xef\xbb\xbf{"msg":"a"}',
        b'{"msg":"\xff"}',
        b'{"msg":"\xed\xa0\x80"}',
        b'{"msg":NaN}',
        b'{"msg":"a","x":[Infinity]}',
        b'{"msg":"a","x":{"y":-Infinity}}',
        b'{"msg":"\\ud800"}',
        b'{"msg":"a","x":["\\udfff"]}',
        b'{"msg":"a","\\ud800":1}',
        b'{"msg":"\\ud800\\u0041"}',
        b"[" * 100_000,
        b'{"x":' * 100_000,
    ],
    ids=lambda line: repr(line)[:40],
)
def test_what_is_no_strict_json_object_is_neither_shown_nor_counted(line: bytes) -> None:
    assert parse(line) is None
    assert not counts(line, "b")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b"{}", {}),
        (b' \t{"to":"b"} \r', {"to": "b"}),
        (b'{"to":"x","to":"b"}', {"to": "b"}),
        (b'{"msg":"\\ud83d\\ude00"}', {"msg": "\U0001f600"}),
        (b'{"msg":"\\\\ud800"}', {"msg": "\\ud800"}),
        (b'{"msg":"a\0b"}', {"msg": "ab"}),
        (b'{"msg":"\\u0000"}', {"msg": "\0"}),
        (b'{"x":1e999}', {"x": float("inf")}),
        (b'{"x":' + b"9" * 18 + b"}", {"x": 10**18 - 1}),
        ('{"é":"\u2028"}'.encode(), {"é": "\u2028"}),
    ],
)
def test_any_json_object_is_shown(line: bytes, value: dict[str, object]) -> None:
    assert parse(line) == value


def test_a_number_of_any_length_is_no_failure() -> None:
    value = parse(b'{"to":"b","x":' + b"1" * 100_000 + b"}")
    assert value is not None
    assert value["to"] == "b"


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.binary(max_size=40), st.text('{}[]":,\\ud8 0a\0', max_size=40).map(str.encode)))
@example(b'{"a":"\\u')
def test_any_bytes_at_all_are_a_line_without_an_exception(line: bytes) -> None:
    value = parse(line)
    assert value is None or isinstance(value, dict)
    assert counts(line, "b") in (False, True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"msg": "a", "message": "b", "text": "c"}, "a"),
        ({"message": "b", "text": "c"}, "b"),
        ({"text": "c"}, "c"),
        ({"msg": None, "message": False, "text": "c"}, "c"),
        ({"msg": "", "text": "c"}, ""),
        ({"msg": 0, "text": "c"}, 0),
        ({"msg": [], "text": "c"}, []),
        ({"msg": None}, ""),
        ({}, ""),
    ],
)
def test_the_text_is_the_first_that_is_neither_null_nor_false(value: dict[str, object], text: object) -> None:
    assert text_of(value) == text


@pytest.mark.parametrize(
    ("text", "newlines", "shown"),
    [
        ("plain ☃", False, "plain ☃"),
        ("a\x1b[31m\x7f\x9b\0", True, "a\\x1b[31m\\x7f\\x9b\\x00"),
        ("a\nb\tc\r", True, "a\nb\tc\\x0d"),
        ("a\nb\tc", False, "a\\x0ab\\x09c"),
        ("\u2028\u200d", True, "\u2028\u200d"),
        ("a\udcffb", True, "a\\udcffb"),
    ],
)
def test_control_characters_are_made_visible(text: str, newlines: bool, shown: str) -> None:
    assert message.shown(text, newlines=newlines) == shown


def test_a_file_name_that_is_no_utf_8_is_shown_with_replacements() -> None:
    assert message.unicode_of("caf\udce9 ☃") == "caf\ufffd ☃"


# ---- what counts


@pytest.mark.spec("S51", "S52", "S53")
@pytest.mark.parametrize(
    ("line", "unread"),
    [
        ('{"from":"a","to":"b","msg":"x"}', True),
        ('{"to":"b"}', True),
        ('{"from":null,"to":"b"}', True),
        ('{"from":5,"to":"b"}', True),
        ('{"from":["b"],"to":"b"}', True),
        ('{"from":"","to":"b"}', True),
        ('{"from":"B","to":"b"}', True),
        ('{"from":"b","to":"b"}', False),
        ('{"from":"a","to":""}', False),
        ('{"from":"a"}', False),
        ('{"from":"a","to":null}', False),
        ('{"from":"a","to":["b"]}', False),
        ('{"from":"a","to":{"b":"b"}}', False),
        ('{"from":"a","to":5}', False),
        ('{"from":"a","to":"c"}', False),
        ('{"from":"a","to":"B"}', False),
        ('{"from":"a","to":"b "}', False),
        ('{"to":"c","to":"b"}', True),
        ('{"to":"b","to":"c"}', False),
        ('{"from":"b","to":"b","from":"a"}', True),
        ('{"from":"a","to":"b","from":"b"}', False),
        (' {"to":"b"}\t\r', True),
        ('{"to":"b"}\0', False),
        ('{"to":"b","msg":"\0"}', False),
        ('{"to":"b","msg":"\\u0000"}', True),
        ('{"to":"\\u0062"}', True),
        ('{"to":"b"}{"to":"b"}', False),
        ('["b"]', False),
        ('"b"', False),
        ("", False),
    ],
)
def test_who_counts(line: str, unread: bool) -> None:
    assert counts(line.encode(), "b") is unread


def test_a_line_that_a_daemon_filed_counts_like_any_other() -> None:
    assert counts(encode("a", "b", "daemon", "x", NOW)[:-1], "b")


# ---- the stamp, and who is live


@pytest.mark.spec("S18")
@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (NOW, True),
        ("0000-00-00T00:00:00Z", True),
        ("2026-13-45T99:99:99Z", True),
        ("2026-05-29T18:04:00z", False),
        ("2026-05-29 18:04:00Z", False),
        ("2026-05-29T18:04:00", False),
        ("2026-05-29T18:04:00ZZ", False),
        ("2026-05-29T18:04:00Z\n", False),
        ("26-05-29T18:04:00.0Z", False),
        ("2026/05/29T18:04:00Z", False),
        ("2026-05-29T18-04-00Z", False),
        ("２026-05-29T18:04:00Z", False),
        ("²026-05-29T18:04:00Z", False),
        ("+026-05-29T18:04:00Z", False),
        ("-026-05-29T18:04:00Z", False),
        ("", False),
        ("x" * 20, False),
    ],
)
def test_a_stamp_is_a_shape_of_ascii_digits(text: str, shape: bool) -> None:
    assert is_stamp(text) is shape


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 19), st.sampled_from(string.printable))
def test_one_wrong_character_makes_it_no_stamp(at: int, character: str) -> None:
    text = NOW[:at] + character + NOW[at + 1 :]
    assert is_stamp(text) is (character.isdigit() if NOW[at].isdigit() else character == NOW[at])


def test_a_time_is_stamped_in_utc_to_the_second() -> None:
    assert stamp(NOW_S) == stamp(NOW_S + 0.999) == NOW
    assert stamp(0) == "1970-01-01T00:00:00Z"
    assert is_stamp(stamp())


@pytest.mark.spec("S18", "S20")
@pytest.mark.parametrize(
    ("age", "live"),
    [
        *((0, True), (1, True), (599, True), (600, False), (601, False), (3600, False)),
        *((-1, True), (-3600, True), (-(10**9), True)),
    ],
)
def test_a_handle_is_live_under_600_seconds_by_the_readers_clock(age: int, live: bool) -> None:
    assert LIVE_S == 600
    assert is_live(NOW, NOW_S + age) is live
    assert age_s(NOW, NOW_S + age) == age


@pytest.mark.spec("S18", "S20")
def test_a_fraction_of_a_second_of_the_clock_makes_nobody_older() -> None:
    assert is_live(NOW, NOW_S + 599.999) is True
    assert is_live(NOW, NOW_S + 600.001) is False


@pytest.mark.spec("S18")
@pytest.mark.parametrize("last_seen", [None, 5, "", "yesterday", [NOW], {"at": NOW}, True, NOW + " ", NOW[:-1] + "z"])
def test_what_is_no_stamp_is_not_live(last_seen: object) -> None:
    assert is_live(last_seen, NOW_S) is False
    assert age_s(last_seen, NOW_S) is None


@pytest.mark.spec("S18")
def test_a_stamp_off_the_calendar_is_compared_as_text() -> None:
    assert is_live("2026-13-45T99:99:99Z", NOW_S) is True
    assert is_live("2026-05-29T17:99:99Z", NOW_S) is True
    assert is_live("2026-00-00T00:00:00Z", NOW_S) is False
    assert age_s("2026-13-45T99:99:99Z", NOW_S) is None
