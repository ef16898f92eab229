"""``sotbus keys`` and the key file: made once, shown without its secret, refused where others could have had it."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from sotbus_zmq import key_file
from sotbus_zmq.key_file import KeyFileError, KeyPair

from sotbus import peers
from sotbus.cli import keys
from sotbus.comm.box import Box
from sotbus.errors import SotbusError
from sotbus.peers import GUEST, HUB, PEER, Peer

ONE = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
TWO = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
HYPHEN = "-" + ONE[1:]

Out = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config folder of this test, not there yet."""
    for name in [name for name in os.environ if name.startswith(("SOT", "XDG"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(keys, "_user", lambda: "ann")
    return tmp_path / "sotbus"


def run(*words: str, host: str = "vm") -> int:
    """One command; an error is its exit status."""
    try:
        return keys.run_keys(list(words), Box(host, host, "0" * 32, None))
    except SotbusError as error:
        print(f"{type(error).__name__}: {error} | {error.hint}", file=sys.stderr)
        return error.exit_status


def secret_of(path: Path) -> str:
    found = re.search(r'^secret = "(.{40})"$', path.read_text(), re.MULTILINE)
    assert found
    return found[1]


def test_new_makes_a_pair_that_fits_in_a_file_for_its_owner_alone(folder: Path, capsys: Out) -> None:
    before = os.umask(0)
    try:
        assert run("new") == 0
    finally:
        os.umask(before)
    path = folder / "vm.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.listdir(folder) == ["vm.key"]
    pair = key_file.load(str(path))
    assert zmq.curve_public(pair.secret.encode()).decode() == pair.public
    said = capsys.readouterr()
    assert pair.public in said.out
    assert pair.secret not in said.out + said.err


def test_each_host_of_a_shared_home_has_its_own_key(folder: Path) -> None:
    assert run("new", host="a") == run("new", host="b") == 0
    assert key_file.load(str(folder / "a.key")).public != key_file.load(str(folder / "b.key")).public


def test_new_never_overwrites_a_key(folder: Path, capsys: Out) -> None:
    assert run("new") == 0
    before = (folder / "vm.key").read_bytes()
    capsys.readouterr()
    assert run("new") == 1
    assert "already, and nothing was changed" in capsys.readouterr().err
    assert (folder / "vm.key").read_bytes() == before
    (folder / "vm.key").unlink()
    (folder / "vm.key").symlink_to(folder / "nowhere")
    assert run("new") == 1
    assert os.listdir(folder) == ["vm.key"]


def test_replace_keeps_the_old_key_aside_and_says_where(folder: Path, capsys: Out) -> None:
    run("new")
    before = (folder / "vm.key").read_bytes()
    capsys.readouterr()
    assert run("new", "--replace") == 0
    [aside] = [path for path in folder.iterdir() if path.name != "vm.key"]
    assert re.fullmatch(r"vm\.key\.\d{8}T\d{6}Z\.[0-9a-f]{4}\.old", aside.name)
    assert str(aside) in capsys.readouterr().out
    assert aside.read_bytes() == before
    assert stat.S_IMODE(aside.stat().st_mode) == 0o600
    assert (folder / "vm.key").read_bytes() != before


def test_replace_makes_the_first_key_too(folder: Path) -> None:
    assert run("new", "--replace") == 0
    assert os.listdir(folder) == ["vm.key"]


@pytest.mark.parametrize("replace", [False, True])
def test_a_disk_that_fails_leaves_the_key_that_was_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out, replace: bool
) -> None:
    if replace:
        run("new")
    before = {path.name: path.read_bytes() for path in folder.iterdir()} if replace else {}

    def fsync(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    assert run("new", *["--replace"] * replace) == 1
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_key_goes_where_the_config_says(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    (folder / "vm.toml").write_text(
        f'plugins = ["filesystem", "zmq"]\n[plugin.zmq]\nkey_file = "{tmp_path}/other/node.key"\n'
    )
    assert run("new") == 0
    assert key_file.load(f"{tmp_path}/other/node.key")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert key_file.key_path("~/node.key", "/c", "vm") == f"{tmp_path}/node.key"


def test_a_config_that_cannot_be_used_is_said_before_anything_is_made(folder: Path, capsys: Out) -> None:
    folder.mkdir()
    (folder / "vm.toml").write_text('plugins = ["zmq"]\n[plugin.zmq]\nkey_file = "node.key"\n')
    assert run("new") == 1
    assert "[plugin.zmq] key_file is 'node.key'; expected an absolute path" in capsys.readouterr().err
    assert os.listdir(folder) == ["vm.toml"]


def test_no_repr_and_no_text_of_a_pair_has_its_secret() -> None:
    pair = KeyPair.new()
    for text in (repr(pair), str(pair), f"{pair}", repr([pair]), repr({"key": pair})):
        assert pair.public in text
        assert pair.secret not in text


def _readable(path: Path) -> None:
    path.chmod(0o640)


def _readable_by_others(path: Path) -> None:
    path.chmod(0o604)


def _linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _folder_open_to_others(path: Path) -> None:
    path.parent.chmod(0o777)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _gone(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    path.write_text(path.read_text()[:-10])


def _unquoted(path: Path) -> None:
    path.write_text(path.read_text().replace('"', ""))


def _twice(path: Path) -> None:
    path.write_text(path.read_text() * 2)


def _more(path: Path) -> None:
    path.write_text(path.read_text() + "third = 3\n")


def _huge(path: Path) -> None:
    path.write_text(path.read_text() + "#" * 5000)


def _bytes(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\xff\n")


REFUSED = [
    (_readable, "has mode 0640, so others may have read it"),
    (_readable_by_others, "has mode 0604"),
    (_linked, "is a symlink, so it is not used"),
    (_folder_open_to_others, "may be written by others, so the key is not used"),
    (_fifo, "is not a regular file"),
    (_gone, "there is no key file"),
    (_cut, "is not one: expected public"),
    (_unquoted, "is not one"),
    (_twice, "is not one"),
    (_more, "is not one"),
    (_huge, "is not one"),
    (_bytes, "is not one"),
]


@pytest.mark.parametrize(("spoil", "said"), REFUSED, ids=[spoil.__name__ for spoil, _ in REFUSED])
def test_a_key_file_that_may_not_be_used_is_refused_without_a_word_of_it(
    folder: Path, capsys: Out, spoil: object, said: str
) -> None:
    run("new")
    secret = secret_of(folder / "vm.key")
    capsys.readouterr()
    assert callable(spoil)
    spoil(folder / "vm.key")
    with pytest.raises(KeyFileError) as caught:
        key_file.load(str(folder / "vm.key"))
    assert said in str(caught.value)
    assert caught.value.__cause__ is None
    assert run("show") == 1
    output = capsys.readouterr()
    assert secret not in output.out + output.err + str(caught.value) + caught.value.hint
    assert secret[:8] not in output.err


def test_a_key_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("new")
    own = os.geteuid()
    os.chown(folder / "vm.key", 12345, -1) if own == 0 else monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(KeyFileError, match=r"belongs to user|may be written by others"):
        key_file.load(str(folder / "vm.key"))


def test_a_key_that_is_looser_is_not_mended_by_replace_alone(folder: Path) -> None:
    run("new")
    (folder / "vm.key").chmod(0o644)
    assert run("new", "--replace") == 0
    assert key_file.load(str(folder / "vm.key"))


def test_show_says_what_to_run_on_the_other_box_and_that_runs(folder: Path, capsys: Out) -> None:
    run("new")
    capsys.readouterr()
    assert run("show") == 0
    said = capsys.readouterr()
    public = key_file.load(str(folder / "vm.key")).public
    assert re.search(r"^node +ann\.vm$", said.out, re.MULTILINE)
    assert f"\npublic key  {public}\n" in said.out
    assert f"\nfingerprint {key_file.fingerprint(public)}\n" in said.out
    assert 'links need "zmq" in the list plugins' in said.err
    [line] = [line.strip() for line in said.out.splitlines() if line.startswith("  sotbus keys trust")]
    words = shlex.split(line)
    assert words == ["sotbus", "keys", "trust", "ann.vm", public]
    assert run(*words[2:], host="other") == 0
    assert peers.read(str(folder / "other.peers.toml")) == (Peer("ann", "vm", public),)


def test_the_shown_command_goes_through_a_shell_whatever_the_key_has() -> None:
    for at in range(0, len(peers.Z85), 40):
        key = peers.Z85[at : at + 40]
        done = subprocess.run(
            ["sh", "-c", shlex.join(["printf", "%s", key])], capture_output=True, text=True, check=True
        )
        assert done.stdout == key


def test_show_names_the_address_that_others_dial(folder: Path, capsys: Out) -> None:
    run("new")
    for listen, address in [
        ("tcp://0.0.0.0:7710", "tcp://vm:7710"),
        ("tcp://*:7711", "tcp://vm:7711"),
        ("tcp://10.0.0.1:7712", "tcp://10.0.0.1:7712"),
    ]:
        (folder / "vm.toml").write_text(f'plugins = ["zmq"]\n[plugin.zmq]\nlisten = "{listen}"\n')
        capsys.readouterr()
        assert run("show") == 0
        said = capsys.readouterr()
        assert f" --address {shlex.quote(address)}\n" in said.out
        assert said.err == ""


def test_show_names_the_user_where_the_name_has_several_dots(folder: Path, capsys: Out) -> None:
    run("new", host="vm.lab")
    assert " --user ann\n" in capsys.readouterr().out


NFS = "21 1 254:2 / / rw - ext4 /dev/vda2 rw\n22 21 0:50 / %s rw - nfs filer:/export rw,vers=3\n"


@pytest.mark.parametrize(
    ("topology", "on_nfs", "role"),
    [
        ('hub = "VM"', True, "hub"),
        ('hub = "far"', False, "linked"),
        ('hub = "far"\nfolder = "own"', True, "linked"),
        ('hub = "far"', True, "guest"),
    ],
)
def test_show_names_what_this_box_is_to_the_other(
    folder: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch, topology: str, on_nfs: bool, role: str
) -> None:
    run("new")
    home = folder.parent / "comm"  # not there yet
    monkeypatch.setenv("SOT_COMM_HOME", str(home))
    (folder / "vm.toml").write_text(f'plugins = ["zmq"]\n[topology]\n{topology}\n')
    mounts = folder.parent / "mountinfo"
    mounts.write_text(NFS % (home if on_nfs else "/elsewhere"))
    capsys.readouterr()
    assert keys.run_keys(["show"], Box("vm", "vm", "0" * 32, None, str(mounts))) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  sotbus keys trust")]
    assert run(*shlex.split(line)[2:], host="other") == 0
    assert peers.read(str(folder / "other.peers.toml"))[0].role == role


def test_show_json_has_everything_but_the_secret(folder: Path, capsys: Out) -> None:
    run("new")
    run("trust", "bob.box2", TWO, "--role", "guest")
    capsys.readouterr()
    assert run("show", "--json") == 0
    text = capsys.readouterr().out
    assert secret_of(folder / "vm.key") not in text
    told = json.loads(text)
    public = key_file.load(str(folder / "vm.key")).public
    assert told == {
        "node": "ann.vm",
        "user": "ann",
        "host": "vm",
        "public_key": public,
        "fingerprint": key_file.fingerprint(public),
        "key_file": str(folder / "vm.key"),
        "peers_file": str(folder / "vm.peers.toml"),
        "listen": None,
        "trust": ["sotbus", "keys", "trust", "ann.vm", public],
        "peers": [
            {"node": "bob.box2", "user": "bob", "host": "box2", "role": "guest", "address": None, "public_key": TWO}
        ],
    }


def test_a_fingerprint_differs_where_keys_do_and_reads_in_groups() -> None:
    assert re.fullmatch(r"([0-9a-f]{4} ){7}[0-9a-f]{4}", key_file.fingerprint(ONE))
    assert key_file.fingerprint(ONE) != key_file.fingerprint(TWO)


def trusted(folder: Path) -> tuple[Peer, ...]:
    return peers.read(str(folder / "vm.peers.toml"))


def test_trust_puts_a_peer_into_this_hosts_file(folder: Path, capsys: Out) -> None:
    assert run("trust", "bob.box2", ONE) == 0
    assert trusted(folder) == (Peer("bob", "box2", ONE, PEER, None),)
    said = capsys.readouterr().out
    assert "trusted     bob.box2 (peer; it dials this box)" in said
    assert f"fingerprint {key_file.fingerprint(ONE)}" in said


def test_trust_takes_a_role_and_an_address_and_later_changes_only_what_is_named(folder: Path) -> None:
    assert run("trust", "bob.box2", ONE, "--role", "hub", "--address", "tcp://box2:7710") == 0
    assert trusted(folder) == (Peer("bob", "box2", ONE, HUB, "tcp://box2:7710"),)
    assert run("trust", "bob.BOX2", ONE, "--role", "guest") == 0
    assert trusted(folder) == (Peer("bob", "BOX2", ONE, GUEST, "tcp://box2:7710"),)
    assert run("trust", "bob.box2", ONE, "--address", "") == 0
    assert trusted(folder) == (Peer("bob", "box2", ONE, GUEST, None),)


def test_a_key_that_begins_with_a_hyphen_is_no_option(folder: Path) -> None:
    assert run("trust", "bob.box2", HYPHEN) == 0
    assert trusted(folder)[0].public_key == HYPHEN


def test_another_key_for_a_trusted_name_needs_replace(folder: Path, capsys: Out) -> None:
    run("trust", "bob.box2", ONE)
    capsys.readouterr()
    assert run("trust", "bob.box2", TWO) == 1
    said = capsys.readouterr().err
    assert "bob.box2 is trusted already, with another key" in said
    assert key_file.fingerprint(ONE) in said
    assert trusted(folder)[0].public_key == ONE
    assert run("trust", "bob.box2", TWO, "--replace") == 0
    assert trusted(folder)[0].public_key == TWO


def test_a_name_with_several_dots_needs_its_user_once(folder: Path, capsys: Out) -> None:
    assert run("trust", "bob.smith.box2", ONE) == 1
    assert "say which part is the user: --user" in capsys.readouterr().err
    assert run("trust", "bob.smith.box2", ONE, "--user", "bob.smith") == 0
    assert run("trust", "bob.smith.box2", ONE, "--role", "guest") == 0
    assert trusted(folder) == (Peer("bob.smith", "box2", ONE, GUEST, None),)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bob.box2", "short"), "that is no public key; expected 40 characters of Z85"),
        (("bob.box2", "#" * 40), "that is no public key"),
        (("bob", ONE), "'bob' is no node's name; expected USER.HOST"),
        (("bob.box2", ONE, "--address", "box2:7710"), "the address 'box2:7710' is none; expected tcp://HOST:PORT"),
        (("ann.vm", ONE), "ann.vm is this node itself"),
        (("ann.VM", ONE), "ann.VM is this node itself"),
        (("carl.box9", TWO), "eve.box3 has that public key already"),
        (("carl.box9", ONE, "--role", "hub"), "there is one hub"),
    ],
)
def test_what_may_not_be_trusted_is_refused_and_nothing_changes(
    folder: Path, capsys: Out, words: tuple[str, ...], said: str
) -> None:
    run("trust", "eve.box3", TWO, "--role", "hub")
    before = (folder / "vm.peers.toml").read_bytes()
    capsys.readouterr()
    assert run("trust", *words) == 1
    assert said in capsys.readouterr().err
    assert (folder / "vm.peers.toml").read_bytes() == before


def test_this_nodes_own_key_is_nobody_elses(folder: Path, capsys: Out) -> None:
    run("new")
    assert run("trust", "bob.box2", key_file.load(str(folder / "vm.key")).public) == 1
    assert "that is this node's own public key, not bob.box2's" in capsys.readouterr().err


def test_remove_takes_a_peer_off_the_list(folder: Path, capsys: Out) -> None:
    run("trust", "bob.box2", ONE)
    run("trust", "eve.box3", TWO)
    capsys.readouterr()
    assert run("trust", "bob.BOX2", "--remove") == 0
    assert "removed     bob.box2" in capsys.readouterr().out
    assert [peer.name for peer in trusted(folder)] == ["eve.box3"]
    assert run("trust", "bob.box2", "--remove") == 1
    assert "bob.box2 is not in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("trust",),
        ("trust", "bob.box2"),
        ("trust", "bob.box2", ONE, "--remove"),
        ("trust", "bob.box2", "--remove", "--role", "hub"),
        ("trust", "bob.box2", ONE, "--role", "boss"),
        ("show", "--jso"),
        ("make",),
    ],
)
def test_a_wrong_command_line_is_usage_and_changes_nothing(folder: Path, words: tuple[str, ...]) -> None:
    assert run(*words) == 2
    assert not folder.exists()


@pytest.mark.parametrize("words", [(), ("new",), ("show",), ("trust",)])
def test_help_is_help(words: tuple[str, ...], capsys: Out) -> None:
    assert run(*words, "--help") == 0
    assert capsys.readouterr().out.startswith("usage: sotbus keys")


def test_only_new_loads_zeromq_and_nothing_loads_trio(folder: Path, tmp_path: Path) -> None:
    run("new", host="made")
    code = """
import sys
from sotbus.cli import keys
from sotbus.comm.box import Box
keys._user = lambda: "ann"
status = keys.run_keys(sys.argv[2:], Box(sys.argv[1], sys.argv[1], None, None))
print("loaded", *sorted({"zmq", "trio", "pluggy"} & set(sys.modules)))
sys.exit(status)
"""
    for words, loaded in [
        (("made", "show"), "loaded"),
        (("made", "trust", "bob.box2", ONE), "loaded"),
        (("fresh", "new"), "loaded zmq"),
    ]:
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == loaded, words
