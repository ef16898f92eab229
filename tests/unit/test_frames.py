"""The page's wire as a codec: the same frames however the bytes are cut up, and a FrameError for everything else."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sotbus.node.frames import MAX_BLOB_BYTES, MAX_DEPTH, MAX_FRAME_BYTES, Decoder, Frame, FrameError, encode

FACTS = (
    b'{"v":1,"id":1,"kind":"req","op":"comm.file",'
    b'"payload":{"from":"projA-vm","to":"far","text":"/slash msg","broadcast":false}}\n'
)
"""The request of facts 11, as it was seen on the wire."""


def line(payload: str = "{}", **changes: str) -> bytes:
    """A frame as text, with parts of it changed; a part that is changed to nothing is left out."""
    parts = {"v": "1", "id": "7", "kind": '"req"', "op": '"x"', "payload": payload} | changes
    return ("{" + ",".join(f'"{name}":{value}' for name, value in parts.items() if value) + "}\n").encode()


def with_a(value: str) -> bytes:
    """A frame whose payload has the member ``a``."""
    return line('{"a":' + value + "}")


def with_blob(length: int | str) -> bytes:
    """A frame that promises raw bytes."""
    return line('{"blob":{"len":' + str(length) + "}}")


def of_size(size: int) -> bytes:
    """A frame of exactly this many bytes, its line feed not counted."""
    empty = line('{"text":""}')
    return line(json.dumps({"text": "x" * (size + 1 - len(empty))}, separators=(",", ":")))


class Outcome:
    """What a decoder made of some bytes: the frames, and what was wrong at last."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.frames: list[Frame] = []
        self.wrong = ""
        decoder = Decoder()
        for piece in pieces:
            try:
                self.frames += decoder.feed(piece)
            except FrameError as error:
                self.frames += error.frames
                self.wrong = str(error)
                break
        self.unfinished = decoder.unfinished and not self.wrong

    def __repr__(self) -> str:
        return f"{self.frames} {[frame.payload for frame in self.frames]} {self.wrong!r} {self.unfinished}"

    def __eq__(self, other: object) -> bool:
        return repr(self) == repr(other)


def bytewise(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def cut(data: bytes, marks: list[int]) -> list[bytes]:
    edges = [0, *sorted(mark % (len(data) + 1) for mark in marks), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def only(data: bytes) -> Frame:
    (frame,) = Decoder().feed(data)
    return frame


def test_the_request_of_the_facts_page_is_read_and_written_byte_for_byte() -> None:
    frame = only(FACTS)
    payload = {"from": "projA-vm", "to": "far", "text": "/slash msg", "broadcast": False}
    assert (frame.id, frame.kind, frame.op, frame.payload) == (1, "req", "comm.file", payload)
    assert encode(1, "req", "comm.file", payload) == FACTS


def test_an_answer_has_the_requests_id_and_op_and_the_keys_in_order() -> None:
    frame = only(FACTS)
    assert frame.answer({"ok": True}) == b'{"v":1,"id":1,"kind":"res","op":"comm.file","payload":{"ok":true}}\n'
    refused = frame.refuse("no box knows \u2603\ud800", "not_here", hint="look")
    assert refused == (
        b'{"v":1,"id":1,"kind":"res","op":"comm.file",'
        b'"payload":{"error":"no box knows \xe2\x98\x83?","code":"not_here","hint":"look"}}\n'
    )


# Any frames, cut up anyhow

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=3,
)
PAYLOADS = st.dictionaries(TEXTS.filter(lambda name: name != "blob"), VALUES, max_size=2)


@st.composite
def frames_on_the_wire(draw: st.DrawFn) -> tuple[list[tuple[Any, ...]], bytes]:
    """Frames, and bytes of them that a JSON writer of another kind may make, raw bytes after some."""
    frames, data = [], b""
    for _ in range(draw(st.integers(0, 3))):
        payload = draw(PAYLOADS)
        blob = draw(st.none() | st.binary(max_size=30))
        if blob is not None:
            payload["blob"] = {"len": len(blob)}
        number, kind, op = draw(st.integers(0, 2**64 - 1)), draw(st.sampled_from(["req", "res", "evt"])), draw(TEXTS)
        members: list[tuple[str, Any]] = [
            ("v", 1), ("id", number), ("kind", kind), ("op", op), ("payload", payload), ("later", draw(VALUES))
        ]  # fmt: skip
        text = json.dumps(
            dict(draw(st.permutations(members))),
            ensure_ascii=draw(st.booleans()),
            separators=draw(st.sampled_from([(",", ":"), (", ", ": "), ("\t,\r", " :  ")])),
        )
        data += text.encode() + draw(st.sampled_from([b"\n", b"\r\n", b" \n"])) + (blob or b"")
        frames.append((number, kind, op, payload))
    return frames, data


@settings(deadline=None, max_examples=100)
@given(frames_on_the_wire(), st.lists(st.integers(0, 10_000), max_size=6))
def test_any_frames_are_read_the_same_whole_cut_anywhere_and_a_byte_at_a_time(
    wire: tuple[list[tuple[Any, ...]], bytes], marks: list[int]
) -> None:
    frames, data = wire
    whole = Outcome([data])
    assert [(frame.id, frame.kind, frame.op, frame.payload) for frame in whole.frames] == frames
    assert (whole.wrong, whole.unfinished) == ("", False)
    assert Outcome(bytewise(data)) == Outcome(cut(data, marks)) == whole


NEARLY = st.tuples(frames_on_the_wire(), st.integers(0, 400), st.integers(0, 3), st.binary(max_size=4)).map(
    lambda made: made[0][1][: made[1]] + made[3] + made[0][1][made[1] + made[2] :]
)
"""Frames with a few bytes taken out and a few others put in."""

SCRAPS = st.lists(
    st.sampled_from(
        [*map(bytes, zip(b'{}[]",: \n1-\xff', strict=True)), b"e9", b"NaN", b"\\ud800", FACTS, FACTS[:-1], with_blob(2)]
    ),
    max_size=12,
).map(b"".join)


@settings(deadline=None, max_examples=200)
@given(st.one_of(NEARLY, SCRAPS, st.binary(max_size=60)), st.lists(st.integers(0, 10_000), max_size=6))
def test_any_bytes_at_all_are_frames_or_a_frame_error_at_the_same_place(data: bytes, marks: list[int]) -> None:
    whole = Outcome([data])
    assert Outcome(bytewise(data)) == Outcome(cut(data, marks)) == whole


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**64 - 1), st.sampled_from(["req", "res", "evt"]), TEXTS, PAYLOADS)
def test_what_is_encoded_is_read_back(number: int, kind: str, op: str, payload: dict[str, Any]) -> None:
    data = encode(number, kind, op, payload)
    assert data.count(b"\n") == 1
    assert only(data) == Frame(number, kind, op, payload)


# The bound


def test_a_frame_of_one_mebibyte_is_read_with_its_line_feed_on_top_and_one_byte_more_is_not() -> None:
    assert MAX_FRAME_BYTES == 1_048_576
    for size in (MAX_FRAME_BYTES - 1, MAX_FRAME_BYTES):
        data = of_size(size)
        assert len(data) == size + 1
        assert Outcome(cut(data, [1, size // 2, size])).frames == [only(data)]
    over = of_size(MAX_FRAME_BYTES + 1)
    for pieces in ([over], [over[:-1], over[-1:]], cut(over, [9])):
        assert Outcome(pieces).wrong == "frame 1 of this connection: a frame of more than 1048576 bytes"


def test_a_frame_of_one_mebibyte_is_written_with_its_line_feed_within_it() -> None:
    most = len(of_size(MAX_FRAME_BYTES - 1)) - len(encode(7, "req", "x", {"text": ""}))
    assert len(encode(7, "req", "x", {"text": "x" * most})) == MAX_FRAME_BYTES
    with pytest.raises(FrameError, match="a frame of 1048577 bytes; the wire takes 1048576"):
        encode(7, "req", "x", {"text": "x" * (most + 1)})


def test_a_line_that_never_ends_is_refused_once_it_is_too_long_and_not_kept_after_that() -> None:
    decoder = Decoder(max_bytes=100)
    assert decoder.feed(b"{" * 100) == []
    assert decoder.unfinished
    with pytest.raises(FrameError, match="more than 100 bytes"):
        decoder.feed(b"{")


# What is no frame

MANY = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)

BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"\n", "not JSON"),
    "no object": (b"[1]\n", "not a JSON object"),
    "two documents": (FACTS[:-1] + b"{}\n", "not JSON"),
    "cut short": (FACTS[:20] + b"\n", "not JSON"),
    "not UTF-8": (line('{"text":"\0"}').replace(b"\0", b"\xff"), "not UTF-8 at byte"),
    "a surrogate in UTF-8": (line('{"text":"\0"}').replace(b"\0", b"\xed\xa0\x80"), "not UTF-8 at byte"),
    "a byte order mark": (b"\xef\xbb\xbf" + FACTS, "not JSON"),
    "a raw control character": (line('{"text":"\t"}'), "not JSON"),
    "a lone surrogate": (line('{"text":"\\ud800"}'), "a lone surrogate"),
    "a lone surrogate as a key": (line('{"\\udfff":1}'), "a lone surrogate"),
    "a lone surrogate in the op": (line(op='"\\ud83d"'), "a lone surrogate"),
    "NaN": (with_a("NaN"), "NaN is not JSON"),
    "Infinity": (with_a("[-Infinity]"), "-Infinity is not JSON"),
    "a number past the floats": (with_a("1e999"), "a number is too large"),
    "a number past Python's digits": (with_a("9" * 5000), "a number is too long"),
    "a key twice": (line('{"a":1,"a":1}'), "one key twice"),
    "an id twice": (line(payload='{},"id":8'), "one key twice"),
    "deep": (with_a(MANY), f"more than {MAX_DEPTH}"),
    "very deep": (with_a("[" * 100_000 + "]" * 100_000), f"more than {MAX_DEPTH}"),
    "another version": (line(v="2"), "v is not 1"),
    "no version": (line(v=""), "v is not 1"),
    "a version that is true": (line(v="true"), "v is not 1"),
    "a version that is a fraction": (line(v="1.0"), "v is not 1"),
    "no id": (line(id=""), "id is not"),
    "an id that is text": (line(id='"1"'), "id is not"),
    "an id that is true": (line(id="true"), "id is not"),
    "an id below 0": (line(id="-1"), "id is not"),
    "an id past 64 bits": (line(id=str(2**64)), "id is not"),
    "an answer without id": (line(id="null", kind='"res"'), "id is not"),
    "no kind": (line(kind=""), "kind is not"),
    "another kind": (line(kind='"REQ"'), "kind is not"),
    "a kind that is a list": (line(kind='["req"]'), "kind is not"),
    "no op": (line(op=""), "op is not a string"),
    "an op that is a number": (line(op="1"), "op is not a string"),
    "a payload that is a list": (line("[]"), "payload is not an object"),
    "a payload that is text": (line('"x"'), "payload is not an object"),
    "a payload that is false": (line("false"), "payload is not an object"),
    "a blob below 0": (with_blob("-1"), "blob.len is not"),
    "a blob of a fraction": (with_blob("1.0"), "blob.len is not"),
    "a blob of true": (with_blob("true"), "blob.len is not"),
    "a blob of null": (with_blob("null"), "blob.len is not"),
    "an absurd blob": (with_blob(MAX_BLOB_BYTES + 1), "blob.len is not"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_frame_is_a_frame_error_after_the_frames_before_it(name: str) -> None:
    bad, expected = BAD[name]
    for pieces in ([FACTS + bad + FACTS], cut(FACTS + bad + FACTS, [len(FACTS), len(FACTS) + len(bad) // 2])):
        outcome = Outcome(pieces)
        assert outcome.frames == [only(FACTS)]
        assert outcome.wrong.startswith("frame 2 of this connection: ")
        assert expected in outcome.wrong


GOOD = {
    "no payload": (line(""), {}),
    "a payload of null": (line("null"), {}),
    "a pair of surrogates": (line('{"a":"\\ud83d\\ude00"}'), {"a": "\U0001f600"}),
    "as deep as may be": (with_a(MANY[1:-1]), {"a": json.loads(MANY[1:-1])}),
    "as deep as may be, beside brackets": (
        line('{"a":' + MANY[1:-1] + ',"b":"[[["}'),
        {"a": json.loads(MANY[1:-1]), "b": "[[["},
    ),
    "wide": (with_a("[" + ",".join(["[]"] * 500) + "]"), {"a": [[]] * 500}),
    "a text of brackets": (line(json.dumps({"a": "[{" * 9999})), {"a": "[{" * 9999}),
    "a blob that is not there": (line('{"blob":null}'), {"blob": None}),
    "a blob without a length": (line('{"blob":{"name":"x"}}'), {"blob": {"name": "x"}}),
    "an escaped NUL": (line('{"a":"\\u0000"}'), {"a": "\0"}),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_only_looks_odd_is_a_frame(name: str) -> None:
    data, payload = GOOD[name]
    assert only(data).payload == payload


def test_an_event_needs_no_id() -> None:
    for data in (line(id="", kind='"evt"'), line(id="null", kind='"evt"')):
        assert only(data).id == 0


def test_after_a_frame_error_nothing_is_read_any_more() -> None:
    decoder = Decoder()
    with pytest.raises(FrameError):
        decoder.feed(b"oops\n" + FACTS)
    for _ in range(2):
        with pytest.raises(FrameError, match="frame 1 of this connection: not JSON") as caught:
            decoder.feed(FACTS)
        assert caught.value.frames == []
    assert "broken" in repr(decoder)


def test_no_error_and_no_repr_repeats_what_came() -> None:
    secret = "swordfish"
    frame = only(line('{"text":"swordfish"}'))
    assert secret not in repr(frame)
    decoder = Decoder()
    decoder.feed(line('{"text":"swordfish"}') + b'{"text":"swordfish')
    assert secret not in repr(decoder)
    for bad in (b'"swordfish"\n', b'{"swordfish":1,"swordfish":2}\n', b"swordfish\n", line(kind='"swordfish"')):
        assert secret not in Outcome([bad]).wrong != ""
    with pytest.raises(FrameError) as caught:
        encode(1, "res", "x", {"a": "swordfish\ud800"})
    assert secret not in str(caught.value)


# Raw bytes


def test_raw_bytes_are_passed_over_whatever_they_hold() -> None:
    blob = FACTS + b"\n\n\xff"
    data = with_blob(len(blob)) + blob + with_blob(0) + FACTS
    for pieces in ([data], bytewise(data), cut(data, [40, 60, 80, 100])):
        outcome = Outcome(pieces)
        assert [frame.op for frame in outcome.frames] == ["x", "x", "comm.file"]
        assert (outcome.wrong, outcome.unfinished) == ("", False)


def test_the_largest_blob_is_never_held() -> None:
    decoder = Decoder()
    assert len(decoder.feed(with_blob(MAX_BLOB_BYTES) + b"x")) == 1
    piece, left = b"\n" * (1 << 20), MAX_BLOB_BYTES - 1
    while left > len(piece):
        assert decoder.feed(piece) == []
        left -= len(piece)
        assert decoder.unfinished
        assert " 0 bytes held" in repr(decoder)
    assert decoder.feed(b"\n" * left + FACTS) == [only(FACTS)]
    assert not decoder.unfinished


# What cannot be sent


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"a": "\ud800"}, "valid Unicode"),
        ({"a": float("nan")}, "valid Unicode or JSON"),
        ({"blob": {"len": 3}}, "raw bytes"),
        ({"blob": {"len": -3}}, "blob.len"),
    ],
)
def test_what_cannot_be_a_frame_is_not_sent(payload: dict[str, Any], expected: str) -> None:
    with pytest.raises(FrameError, match=expected):
        encode(1, "res", "x", payload)


def test_a_payload_too_deep_for_the_stack_is_not_sent() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(FrameError, match="cannot be sent"):
        encode(1, "res", "x", {"a": deep})
