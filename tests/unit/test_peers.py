"""The peers file: what may stand in it, what is said of what may not, and what is kept when it is changed."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.utils import z85

from sotbus import peers, peers_edit
from sotbus.errors import BadRequest, ConfigError
from sotbus.peers import GUEST, HUB, PEER, Peer

ONE = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
TWO = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
"""The two example keys of ZeroMQ's own manual (zmq_curve(7))."""

FILE = f"""\
# who this box talks to
[peers."ann.labhost"]
public_key = "{ONE}"   # from her letter
role = "hub"
address = "tcp://labhost:7710"

# the laptop
[peers."bob.smith.box2"]
user = "bob.smith"
public_key = "{TWO}"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sotbus" / "vm.peers.toml"


def written(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def test_the_file_is_the_hosts_own_also_where_boxes_share_a_home() -> None:
    assert peers.peers_file("/home/u/.config/sotbus", "vm") == "/home/u/.config/sotbus/vm.peers.toml"
    assert peers.peers_file("/c", "a/b") == "/c/a_b.peers.toml"


def test_peers_are_read_in_the_files_order(path: Path) -> None:
    assert peers.read(written(path, FILE)) == (
        Peer("ann", "labhost", ONE, HUB, "tcp://labhost:7710"),
        Peer("bob.smith", "box2", TWO, PEER, None),
    )


@pytest.mark.parametrize("text", ["", "# nobody yet\n", "[peers]\n"])
def test_a_file_without_peers_and_no_file_are_no_peers(path: Path, text: str) -> None:
    assert peers.read(str(path)) == ()
    assert peers.read(written(path, text)) == ()


def test_a_name_is_compared_whole_with_the_host_without_case() -> None:
    peer = Peer("Ann.Smith", "Lab-Host", ONE)
    assert peer.name == "Ann.Smith.Lab-Host"
    assert peer.is_called("Ann.Smith.lab-HOST")
    for other in ("ann.Smith.Lab-Host", "Ann.Smith.Lab-Host2", "Ann.Smith", "Ann.Smith.", "Smith.Lab-Host", ""):
        assert not peer.is_called(other), other


@pytest.mark.parametrize(
    ("name", "user", "parts"),
    [
        ("ann.labhost", None, ("ann", "labhost")),
        ("ann.labhost", "ann", ("ann", "labhost")),
        ("ann.smith.labhost", "ann.smith", ("ann.smith", "labhost")),
        ("ann.lab.example", "ann", ("ann", "lab.example")),
        ("u_1.h-2", None, ("u_1", "h-2")),
    ],
)
def test_a_name_has_a_user_and_a_host(name: str, user: str | None, parts: tuple[str, str]) -> None:
    assert peers.name_of(name, user) == parts


@pytest.mark.parametrize(
    ("name", "user", "said"),
    [
        ("ann.lab.example", None, "'ann.lab.example' has several dots, so it does not say where its user ends"),
        ("ann.lab.example", "lab", "the user of 'ann.lab.example' is 'lab'; expected the beginning of the name"),
        ("ann.labhost", "an", "is 'an'; expected the beginning of the name, to a dot"),
        ("ann.labhost", "ann.labhost", "is 'ann.labhost'; expected the beginning"),
        ("ann.labhost", "", "is ''; expected the beginning"),
        ("labhost", None, "'labhost' is no node's name; expected USER.HOST, of A-Za-z0-9_- with dots between"),
        ("ann@labhost", None, "no node's name"),
        ("ann..labhost", "ann", "no node's name"),
        (".labhost", None, "no node's name"),
        ("ann.", None, "no node's name"),
        ("änn.labhost", None, "no node's name"),
        ("ann.lab host", None, "no node's name"),
        ("a." + "h" * 254, None, "no node's name"),
    ],
)
def test_a_name_that_is_none_is_refused_and_never_taken_apart_by_guessing(
    name: str, user: str | None, said: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        peers.name_of(name, user)
    assert said in str(caught.value)


def test_a_key_is_five_characters_for_each_four_bytes() -> None:
    assert peers.is_public_key(ONE)
    assert peers.is_public_key("0" * 40)
    for wrong in ("", ONE[:-1], ONE + "0", ONE[:-1] + "~", ONE[:-1] + "é", "#" * 40):
        assert not peers.is_public_key(wrong), wrong


@settings(deadline=None)
@given(st.binary(min_size=32, max_size=32))
def test_whatever_libzmq_encodes_is_a_key(key: bytes) -> None:
    assert peers.is_public_key(z85.encode(key).decode("ascii"))


@settings(deadline=None)
@given(st.text(alphabet=peers.Z85, min_size=5, max_size=5))
def test_five_characters_are_a_key_part_exactly_when_they_fit_four_bytes(part: str) -> None:
    number = 0
    for character in part:
        number = 85 * number + peers.Z85.index(character)
    assert peers.is_public_key(part + "0" * 35) == (number <= 0xFFFFFFFF)


GOOD_ADDRESSES = ["tcp://labhost:7710", "tcp://10.0.0.1:1", "tcp://[fe80::1]:65535", "tcp://lab.example:07710"]
BAD_ADDRESSES = [
    "", "labhost:7710", "tcp://labhost", "tcp://:7710", "tcp://*:7710", "tcp://labhost:0", "tcp://labhost:65536",
    "tcp://labhost:x", "tcp://labhost:٧", "tcp://fe80::1:7710", "tcp://[labhost]:7710", "tcp://a b:1", "udp://a:1",
    "tcp://a@b:1", 'tcp://a"b:1', "tcp://a/b:1", "tcp://a\n:1", "tcp://a:1,tcp://b:2", "tcp://a:777777",
]  # fmt: skip


@pytest.mark.parametrize("address", GOOD_ADDRESSES)
def test_an_address_that_can_be_dialled(address: str) -> None:
    assert peers.is_address(address)


@pytest.mark.parametrize("address", BAD_ADDRESSES)
def test_an_address_that_cannot_be_dialled(address: str) -> None:
    assert not peers.is_address(address)


WRONG = [
    ("[pers]\n", 1, "there is no table or key 'pers' at the top; expected [peers.\"USER.HOST\"] alone"),
    ("peers = 3\n", 1, 'peers is 3; expected a table for each peer, [peers."USER.HOST"]'),
    ("\n[peers.ann.labhost]\npublic_key = 'x'\n", 2, '[peers."ann"] has tables in it; put the whole name into quotes'),
    ('[peers]\n"ann.labhost" = 3\n', 2, '[peers."ann.labhost"] is a table, not a single value'),
    ('[peers."ann.labhost"]\nrole = "hub"\n', 1, "lacks the key 'public_key', as 'sotbus keys show' prints it"),
    (f'[peers."ann.labhost"]\npublickey = "{ONE}"\n', 2, "has no key 'publickey'; did you mean 'public_key'?"),
    ('[peers."ann.labhost"]\npublic_key = 7\n', 2, "public_key cannot be used (its value is not shown); expected text"),
    ('[peers."ann.labhost"]\npublic_key = "short"\n', 2, "public_key is no key (its value is not shown); expected 40"),
    (f'[peers."ann.labhost"]\npublic_key = "{ONE}"\nrole = "boss"\n', 3, "role is 'boss'; expected one of hub, linked"),
    (f'[peers."ann.labhost"]\npublic_key = "{ONE}"\nrole = true\n', 3, "role is True; expected text in quotes"),
    (
        f'[peers."ann.labhost"]\npublic_key = "{ONE}"\naddress = "lab"\n',
        3,
        "address is 'lab'; expected tcp://HOST:PORT",
    ),
    (f'[peers."ann.a.b"]\npublic_key = "{ONE}"\n', 1, 'does not say where its user ends; add user = "..."'),
    (f'[peers."ann.a.b"]\nuser = "bob"\npublic_key = "{ONE}"\n', 2, "the user of 'ann.a.b' is 'bob'"),
    (f'[peers."ann"]\npublic_key = "{ONE}"\n', 1, "'ann' is no node's name; expected USER.HOST"),
    (f'[peers.x."y z"]\npublic_key = "{ONE}"\n', 1, "has tables in it; put the whole name into quotes"),
    (
        f'[peers."ann.box"]\npublic_key = "{ONE}"\n[peers."ann.BOX"]\npublic_key = "{TWO}"\n',
        3,
        '[peers."ann.BOX"] is [peers."ann.box"] too: hosts compare without case',
    ),
    (
        f'[peers."ann.box"]\npublic_key = "{ONE}"\n[peers."bob.box"]\npublic_key = "{ONE}"\n',
        4,
        '[peers."bob.box"] has the public key of [peers."ann.box"]',
    ),
    (
        f'[peers."a.b"]\npublic_key = "{ONE}"\nrole="hub"\n[peers."c.d"]\npublic_key = "{TWO}"\nrole="hub"\n',
        6,
        '[peers."c.d"] is a hub, and [peers."a.b"] is one; there is one hub',
    ),
    ('[peers."ann.labhost"\n', 1, "is not TOML: "),
]


@pytest.mark.parametrize(("text", "line", "said"), WRONG, ids=[said[:40] for _, _, said in WRONG])
def test_what_is_wrong_is_said_with_file_and_line_and_nothing_of_the_file_counts(
    path: Path, text: str, line: int, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        peers.read(written(path, text))
    where, _, what = str(caught.value).partition(": ")
    assert said in what
    assert where == (f"{path}:{line}" if "TOML" not in said else where)
    assert where.startswith(str(path))


def test_every_problem_is_told_by_line(path: Path) -> None:
    text = f'[peers."a.b"]\nrole = "x"\npublic_key = "{ONE}"\nfoo = 1\n[other]\n'
    _, problems = peers.judge("f", text)
    assert [problem.line for problem in problems] == [4, 5]
    text = text.replace("foo = 1\n", "").replace("[other]\n", "")
    assert [str(problem) for problem in peers.judge("f", text)[1]] == [
        "f:2: [peers.\"a.b\"] role is 'x'; expected one of hub, linked, guest, peer"
    ]


def test_a_wrong_key_is_not_repeated_in_the_error(path: Path) -> None:
    secret = "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"
    for value in (f'"{secret}!"', f'["{secret}"]'):
        with pytest.raises(ConfigError) as caught:
            peers.read(written(path, f'[peers."ann.labhost"]\npublic_key = {value}\n'))
        assert secret not in str(caught.value)


def test_a_file_that_is_no_utf8_is_refused_with_its_line(path: Path) -> None:
    written(path, "")
    path.write_bytes(b"# one\n\xff\n")
    with pytest.raises(ConfigError, match=r"vm\.peers\.toml:2: is not UTF-8 at byte 6"):
        peers.read(str(path))


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_refused(path: Path, mode: int) -> None:
    written(path, FILE)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="others may write it, and so say whom to trust"):
        peers.read(str(path))
    path.chmod(0o644)
    assert len(peers.read(str(path))) == 2


def test_a_folder_in_the_files_place_is_an_error_and_not_no_peers(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"cannot be read|not a regular file"):
        peers.read(str(path))


PEERS = (
    Peer("ann", "labhost", ONE, HUB, "tcp://labhost:7710"),
    Peer("bob.smith", "box2.example", TWO, GUEST),
)


def test_what_is_written_is_read_again_with_mode_0600_in_a_folder_of_0700(path: Path) -> None:
    before = os.umask(0)
    try:
        peers_edit.write(str(path), PEERS)
    finally:
        os.umask(before)
    assert peers.read(str(path)) == PEERS
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == [path.name]


def test_what_could_not_be_read_is_not_written(path: Path) -> None:
    written(path, FILE)
    with pytest.raises(ConfigError, match="has the public key of"):
        peers_edit.write(str(path), (*PEERS, Peer("x", "y", ONE)))
    with pytest.raises(ConfigError):
        peers_edit.write(str(path), (Peer('a"', "b", ONE),))
    assert path.read_text() == FILE


def test_a_new_peer_is_put_at_the_end_and_the_rest_stays_as_it_is(path: Path) -> None:
    third = "0" * 40
    assert peers_edit.put(written(path, FILE), Peer("c", "box3", third)) is None
    assert path.read_text() == FILE + f'\n[peers."c.box3"]\nuser = "c"\npublic_key = "{third}"\nrole = "peer"\n'


def test_a_changed_peer_takes_the_place_of_the_old_one_and_comments_stay(path: Path) -> None:
    new = Peer("ann", "LabHost", "0" * 40, PEER)
    assert peers_edit.put(written(path, FILE), new) == PEERS[0]
    assert peers.read(str(path))[0] == new
    text = path.read_text()
    assert text.startswith('# who this box talks to\n[peers."ann.LabHost"]\n')
    assert "\n# the laptop\n[peers." in text
    assert ONE not in text


@pytest.mark.parametrize("name", ["ann.labhost", "ann.LABHOST"])
def test_a_removed_peer_is_gone_and_comments_stay(path: Path, name: str) -> None:
    assert peers_edit.remove(written(path, FILE), name) == PEERS[0]
    assert [peer.name for peer in peers.read(str(path))] == ["bob.smith.box2"]
    assert path.read_text().startswith("# who this box talks to\n")
    assert peers_edit.remove(str(path), "ann.labhost") is None


INLINE = f'peers."ann.labhost" = {{ public_key = "{ONE}" }}\npeers."bob.box" = {{ public_key = "{TWO}" }}\n'
DOTTED = f'[peers]\n"ann.labhost".public_key = "{ONE}"\n"bob.box".public_key = "{TWO}"\n"ann.labhost".role = "hub"\n'


@pytest.mark.parametrize("text", [INLINE, DOTTED, FILE.rstrip("\n").replace("bob.smith.box2", "bob.smith.box")])
def test_a_file_in_any_form_of_toml_is_changed_to_what_was_wanted(path: Path, text: str) -> None:
    other = peers.read(written(path, text))[1]
    new = Peer("ann", "labhost", "0" * 40, HUB, "tcp://[::1]:1")
    peers_edit.put(str(path), new)
    assert set(peers.read(str(path))) == {new, other}
    third = Peer("c", "box3", "1" * 40)
    peers_edit.put(str(path), third)
    assert set(peers.read(str(path))) == {new, other, third}
    peers_edit.remove(str(path), "ann.labhost")
    assert set(peers.read(str(path))) == {other, third}


def test_a_file_that_is_wrong_is_not_changed(path: Path) -> None:
    written(path, f"{FILE}[other]\n")
    with pytest.raises(ConfigError, match="there is no table or key 'other'"):
        peers_edit.put(str(path), Peer("c", "box3", "0" * 40))
    assert path.read_text() == f"{FILE}[other]\n"


def test_a_link_to_the_file_stays_a_link(path: Path, tmp_path: Path) -> None:
    kept = tmp_path / "dotfiles"
    kept.mkdir()
    (kept / "peers.toml").write_text(FILE)
    path.parent.mkdir()
    path.symlink_to(kept / "peers.toml")
    peers_edit.remove(str(path), "ann.labhost")
    assert path.is_symlink()
    assert len(peers.read(str(path))) == 1


def test_a_disk_that_fails_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(path, FILE)

    def fsync(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ConfigError, match=r"cannot be written: Input/output error; nothing was changed"):
        peers_edit.put(str(path), Peer("c", "box3", "0" * 40))
    assert path.read_text() == FILE
    assert sorted(os.listdir(path.parent)) == [path.name, f"{path.name}.lock"]


def test_two_that_change_the_file_at_once_both_get_their_peer_in(path: Path) -> None:
    def add(number: int) -> None:
        peers_edit.put(str(path), Peer("u", f"box{number}", f"{number:040}"))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {peer.host for peer in peers.read(str(path))} == {f"box{number}" for number in range(12)}


def test_a_change_waits_for_another_one_no_longer_than_its_bound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(path, FILE)
    monkeypatch.setattr(peers_edit, "LOCK_WAIT_S", 0.05)
    with (
        peers_edit._locked(str(path)),
        pytest.raises(ConfigError, match=r"another process has been changing it for 0\.05s"),
    ):
        peers_edit.remove(str(path), "ann.labhost")
    assert path.read_text() == FILE
