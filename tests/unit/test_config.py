"""The config file: how it is found, what may stand in it, what each mistake is called, and what the commands say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st
from world import ENTRY, World

from sotbus import config
from sotbus.cli.config import run_config
from sotbus.cli.main import main
from sotbus.comm.folder import Folder
from sotbus.comm.runtime_folder import socket_path
from sotbus.comm.settings import Settings
from sotbus.config import Config
from sotbus.errors import ConfigError
from sotbus.toml_lines import lines_of
from sotbus.typed_table import judge_table, typed_table

CONF = Path(config.__file__).parents[1] / "conf"
ID = "0123456789abcdef0123456789abcdef"
A_HOST = (
    "a box's host name in quotes, 1 to 110 bytes without slashes and control characters, "
    "as 'sotbus config show' on that box gives it in box.host"
)
OWN_OR_NONE = '"own" (this box owns its comm folder whatever its mount), or no such key: the mount decides'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "c.toml"


def read(file: Path, text: str) -> Config:
    file.write_text(text)
    return config.load(str(file))


def problems(file: Path, text: str) -> list[str]:
    """Everything that is wrong with a text, without the file's name: ``LINE: text``."""
    file.write_text(text)
    _, found = config.read(str(file))
    return [str(problem).removeprefix(f"{file}:") for problem in found]


# What may stand there


def test_every_key_is_read_with_its_type(file: Path) -> None:
    made = read(
        file,
        f'plugins = ["zmq", "filesystem"]\n[box]\nmachine_id = "{ID}"\n[comm]\nhome = "/srv/comm"\nlock_wait_s = 5\n'
        "inbox_lock_wait_s = 0.5\ninbox_read_wait_s = 86400\nmount_wait_s = 7\n[message]\nmax_bytes = 1\n"
        '[plugin.zmq]\nendpoint = "tcp://x"\nmore = {a = [1]}\n[topology]\nhub = "Far-1.example"\nfolder = "own"\n',
    )
    assert (made.hub, made.own_folder) == ("Far-1.example", True)
    assert (made.plugins, made.machine_id, made.comm_home) == (("zmq", "filesystem"), ID, "/srv/comm")
    assert (made.lock_wait_s, made.inbox_lock_wait_s, made.inbox_read_wait_s) == (5.0, 0.5, 86400.0)
    assert made.mount_wait_s == 7.0
    assert isinstance(made.lock_wait_s, float)
    assert made.max_text_bytes == 1
    assert made.plugin_tables == {"zmq": {"endpoint": "tcp://x", "more": {"a": [1]}}}
    assert made.lines[("plugin", "zmq", "endpoint")] == 13


def test_without_a_file_each_setting_has_its_default() -> None:
    made = config.load(None)
    assert (made.path, made.plugins, made.plugin_tables, made.lines) == (None, ("filesystem", "nfs"), {}, {})
    assert (made.machine_id, made.comm_home, made.max_text_bytes) == (None, None, 256 * 1024)
    assert (made.hub, made.own_folder) == (None, False)
    assert (made.lock_wait_s, made.inbox_lock_wait_s, made.inbox_read_wait_s) == (None, None, None)


def test_a_folder_may_begin_with_a_tilde(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert read(file, '[comm]\nhome = "~/mail"\n').comm_home == "/home/me/mail"


def test_an_empty_plugin_list_means_no_plugin(file: Path) -> None:
    assert read(file, "plugins = []\n").plugins == ()


def test_a_plugins_table_may_stand_for_the_default_plugin(file: Path) -> None:
    assert read(file, "[plugin.filesystem]\nx = 1\n").plugin_tables == {"filesystem": {"x": 1}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[messages]\n", "1: there is no table or key 'messages' at the top; did you mean 'message'?"),
        (
            "\n\nqqq = 1\n",
            "3: there is no table or key 'qqq' at the top; "
            "there are: box, comm, message, node, plugin, plugins, topology",
        ),
        (
            '"" = 1\n',
            "1: there is no table or key '' at the top; there are: box, comm, message, node, plugin, plugins, topology",
        ),
        ("max_bytes = 5\n", "1: there is no table or key 'max_bytes' at the top; it belongs to [message]"),
        ("[message]\nmax_byte = 5\n", "2: [message] has no key 'max_byte'; did you mean 'max_bytes'?"),
        ("[message]\n\n'a\tb' = 5\n", "3: [message] has no key 'a\\tb'; there are: max_bytes"),
        ("[message]\nhome = 5\n", "2: [message] has no key 'home'; it belongs to [comm]"),
        ("[comm]\nplugins = []\n", "2: [comm] has no key 'plugins'; it belongs at the top, above the first table"),
        (
            '[message]\nmax_bytes = "5"\n',
            "2: [message] max_bytes is '5'; expected a whole number of bytes from 1 to 1073741824",
        ),
        (
            "message = { max_bytes = true }\n",
            "1: [message] max_bytes is True; expected a whole number of bytes from 1 to 1073741824",
        ),
        (
            "message.max_bytes = 0\n",
            "1: [message] max_bytes is 0; expected a whole number of bytes from 1 to 1073741824",
        ),
        (
            "[message]\nmax_bytes = {}\n",
            "2: [message] max_bytes is a table; expected a whole number of bytes from 1 to 1073741824",
        ),
        (
            "[message]\nmax_bytes = 0x" + "f" * 5000 + "\n",
            "2: [message] max_bytes is a number of thousands of digits; "
            "expected a whole number of bytes from 1 to 1073741824",
        ),
        ("[topolgy]\n", "1: there is no table or key 'topolgy' at the top; did you mean 'topology'?"),
        ("[box]\nhub = 'a'\n", "2: [box] has no key 'hub'; it belongs to [topology]"),
        ("[topology]\nhome = 'a'\n", "2: [topology] has no key 'home'; it belongs to [comm]"),
        ("topology = 'hub'\n", "1: [topology] is a table, not a single value"),
        ("[topology]\n\nhub = ''\n", f"3: [topology] hub is ''; expected {A_HOST}"),
        ("[topology]\nhub = 5\n", f"2: [topology] hub is 5; expected {A_HOST}"),
        ("[topology]\nhub = ['a']\n", f"2: [topology] hub is ['a']; expected {A_HOST}"),
        ("[topology]\nhub = 'a/b'\n", f"2: [topology] hub is 'a/b'; expected {A_HOST}"),
        ("[topology]\nhub = 'a\\b'\n", f"2: [topology] hub is 'a\\\\b'; expected {A_HOST}"),
        ('[topology]\nhub = "a\\n"\n', f"2: [topology] hub is 'a\\n'; expected {A_HOST}"),
        ("[topology]\nfolder = 'mount'\n", f"2: [topology] folder is 'mount'; expected {OWN_OR_NONE}"),
        ("[topology]\nfolder = 'OWN'\n", f"2: [topology] folder is 'OWN'; expected {OWN_OR_NONE}"),
        ("[topology]\nfolder = ''\n", f"2: [topology] folder is ''; expected {OWN_OR_NONE}"),
        ("[topology]\nfolder = true\n", f"2: [topology] folder is True; expected {OWN_OR_NONE}"),
        ("[topology]\nfolder = ['own']\n", f"2: [topology] folder is ['own']; expected {OWN_OR_NONE}"),
        ("box = 1\n", "1: [box] is a table, not a single value"),
        ("\n[[box]]\n", "2: [box] is a table, not a list"),
        ('[box]\nmachine_id = "x"\n', "2: [box] machine_id is 'x'; expected 32 lower-case hex digits in quotes"),
        (
            '[comm]\nhome = "here"\n',
            "2: [comm] home is 'here'; expected an absolute path (or one that begins with \"~\") in quotes",
        ),
        (
            '[comm]\nhome = "/\\u0000"\n',
            "2: [comm] home is '/\\x00'; expected an absolute path (or one that begins with \"~\") in quotes",
        ),
        (
            "[comm]\nlock_wait_s = 0\n",
            "2: [comm] lock_wait_s is 0; expected a number of seconds above 0, at most 86400",
        ),
        (
            "[comm]\ninbox_lock_wait_s = nan\n",
            "2: [comm] inbox_lock_wait_s is nan; expected a number of seconds above 0, at most 86400",
        ),
        (
            "[comm]\ninbox_read_wait_s = 86400.5\n",
            "2: [comm] inbox_read_wait_s is 86400.5; expected a number of seconds above 0, at most 86400",
        ),
        (
            "[comm]\nlock_wait_s = 2020-01-01\n",
            "2: [comm] lock_wait_s is 2020-01-01; expected a number of seconds above 0, at most 86400",
        ),
        (
            'plugins = "zmq"\n',
            "1: plugins is 'zmq'; expected a list of plugin names in quotes, each once, such as [\"filesystem\"]",
        ),
        (
            'plugins = ["zmq", 5, {}, []]\n',
            "1: plugins is ['zmq', 5, a table, []]; "
            'expected a list of plugin names in quotes, each once, such as ["filesystem"]',
        ),
        (
            'plugins = ["zmq", "zmq"]\n',
            "1: plugins is ['zmq', 'zmq']; expected a list of plugin names in quotes, each once, "
            "such as [\"filesystem\"]; 'zmq' stands there twice",
        ),
        (
            'plugins = ["a b"]\n',
            "1: plugins is ['a b']; expected a list of plugin names in quotes, each once, "
            "such as [\"filesystem\"]; 'a b' is not 1 to 64 of A-Za-z0-9._-",
        ),
        ("plugin = 5\n", "1: plugin is 5; expected a table for each plugin, [plugin.NAME]"),
        ("[plugin]\nzmq = 5\n", "2: [plugin.zmq] is a table, not a single value"),
        (
            "[plugin.filesytem]\n",
            "1: [plugin.filesytem] is of no use: the list plugins does not name 'filesytem'; "
            "did you mean 'filesystem'?",
        ),
        (
            'plugins = []\n[plugin."a.b"]\n',
            "2: [plugin.'a.b'] is of no use: the list plugins does not name 'a.b'; there are none",
        ),
    ],
)
def test_each_mistake_names_line_table_key_and_what_was_expected(file: Path, text: str, said: str) -> None:
    assert problems(file, text) == [said]
    with pytest.raises(ConfigError) as raised:
        config.load(str(file))
    assert str(raised.value) == f"{file}:{said}"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"[message\n", r":1: is not TOML: .*'\]'"),
        (b"\n\nx = \n", r":3: is not TOML: Invalid value"),
        (b"x = 1\nx = 2\n", r":2: is not TOML: Cannot overwrite a value"),
        (b"x = " + b"9" * 5000, r": is not TOML: Exceeds the limit"),
        (b"x = " + b"[" * 5000, r": is not TOML: "),
        (b"# a\n# \xff\n", r":2: is not UTF-8 at byte 6"),
        (b"# bell \x07\n", r":1: is not TOML: Found invalid character"),
        (b"# cr \r\n#\r", r":2: is not TOML: Found invalid character"),
    ],
)
def test_what_is_no_toml_is_said_with_its_line(file: Path, data: bytes, said: str) -> None:
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=re.escape(str(file)) + said):
        config.load(str(file))


def test_a_file_that_cannot_be_read_is_an_error_whoever_named_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        config.load(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        config.load(str(tmp_path / "none"))


def test_all_problems_are_found_in_the_order_of_their_lines(file: Path) -> None:
    text = 'box.machine_id = 1\nplugins = 5\n[message]\nmax_bytes = "x"\n[plugin.a]\n[comm]\nhom = 1\nlock_wait_s = 0\n'
    assert [said.split(":")[0] for said in problems(file, text)] == ["1", "2", "4", "7", "8"]


def test_a_long_value_is_cut_in_a_message(file: Path) -> None:
    (said,) = problems(file, f'[box]\nmachine_id = "{"x" * 10**6}"\n')
    assert len(said) < 200
    (said,) = problems(file, f"plugins = [{'1,' * 10**4}]\n")
    assert len(said) < 250


# Conf


@pytest.mark.parametrize("path", sorted(CONF.glob("*.toml")), ids=lambda path: path.name)
def test_every_file_of_conf_loads(path: Path) -> None:
    assert config.load(str(path)).path == str(path)
    assert config.read(str(path))[1] == []


def uncommented(path: Path) -> str:
    """The file with every commented key, ``# key = value``, as a key."""
    return re.sub(r"^# ([a-z_]+ = .+)$", r"\1", path.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("path", sorted(CONF.glob("*.toml")), ids=lambda path: path.name)
def test_every_commented_key_of_conf_is_sound(path: Path, file: Path) -> None:
    assert problems(file, uncommented(path)) == []


@pytest.mark.parametrize(("name", "without"), [("single-box.toml", {"topology"}), ("shared-home.toml", set())])
def test_a_file_of_conf_has_every_key_and_shows_the_defaults(name: str, without: set[str], file: Path) -> None:
    from sotbus.config_schema import KEYS

    made = read(file, uncommented(CONF / name))
    assert set(KEYS) - {""} == set(config.TABLES)
    stand = {path for path in made.lines if (len(path) == 2 or path == ("plugins",)) and isinstance(path[-1], str)}
    wanted = {(table, key) if table else (key,) for table, keys in KEYS.items() for key in keys if table not in without}
    assert stand == wanted
    default = Config()
    assert (made.plugins, made.max_text_bytes, made.machine_id) == (default.plugins, default.max_text_bytes, ID)
    waits = ("lock_wait_s", "inbox_lock_wait_s", "inbox_read_wait_s")
    assert [getattr(made, name) for name in waits] == [getattr(Settings(), name) for name in waits]
    assert Folder.of({}, made.comm_home).root == Folder.of({}).root


def test_the_file_for_a_shared_home_says_whose_the_folder_is_and_nothing_that_is_one_boxs() -> None:
    made = config.load(str(CONF / "shared-home.toml"))
    told = {path for path in made.lines if len(path) == 2}
    assert told == {("topology", "hub")}
    assert (made.hub, made.own_folder, made.machine_id) == ("hub-host", False, None)
    text = (CONF / "shared-home.toml").read_text()
    for words in (
        "local_lock=none",
        "sotbus init",
        "sotbus doctor --probe --peer",
        "inbox-lock-manager",
        "<host>.toml",
    ):
        assert words in text


def test_the_single_box_file_is_read_without_a_toml_parser(file: Path) -> None:
    code = (
        "import sys\nfrom sotbus import config\nconfig.load(sys.argv[1])\n"
        "slow = {'tomli', 'typing', 'dataclasses', 'difflib', 'sotbus.config_schema', 'sotbus.toml_lines'}\n"
        "print(sorted(slow & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(CONF / "single-box.toml")],
        env={"PYTHONPATH": str(CONF.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_a_sound_file_is_read_without_looking_for_lines(file: Path) -> None:
    file.write_text("[message]\nmax_bytes = 5\n")
    code = "import sys\nfrom sotbus import config\nconfig.load(sys.argv[1])\nprint('sotbus.toml_lines' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("data", "nothing"),
    [
        (b"", True),
        (b"\xef\xbb\xbf", False),
        (b" # x \xc3\xa9\r\n\t[box] \n[comm]", True),
        (b"[box]\n[box]\n", False),
        (b"[bax]\n", False),
        (b"# \xc3\n", False),
        (b"# \x07\n", False),
        (b"#\r#\n", False),
        (b"\x0c\n", False),
        (b"[message]\nx=1", False),
    ],
)
def test_a_file_says_nothing_only_if_it_is_sound_and_has_no_key(data: bytes, nothing: bool) -> None:
    assert config.says_nothing(data) is nothing


# Any text


BITS = [
    *("[", "]", "[[", "]]", "{", "}", "=", ".", ",", "\n", "\r\n", " ", "\t", "#", '"', "'", '"""', "'''", "\\", "\0"),
    *(
        "topology",
        "hub",
        "folder",
        '"own"',
        "box",
        "comm",
        "message",
        "plugin",
        "plugins",
        "filesystem",
        "machine_id",
        "home",
        "lock_wait_s",
        "max_bytes",
    ),
    *(
        "1",
        "-0",
        "1e9",
        "0x" + "f" * 5000,
        "nan",
        "inf",
        "true",
        "false",
        "2020-01-01",
        "07:32:00",
        '"/x"',
        '"\\u00e9"',
    ),
    *("\ud7ff", "é", "\u2028", "x = 1", "[box]\n", "[comm]\n", "[plugin.filesystem]\n", 'plugins = ["filesystem"]\n'),
]
KEYS = st.sampled_from(
    ["box", "comm", "message", "plugin", "plugins", "home", "max_bytes", '"a b"', "'q'", '"\\u0041"']
)
DOTTED = st.lists(KEYS, min_size=1, max_size=3).map(" . ".join)
SCALARS = st.sampled_from(
    ["1", "1.5", "true", '"text # ]"', "'}'", '"""\na"b\n"""', "'''x\n'''", "1979-05-27 07:32:00"]
)


def _nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    lists = st.lists(inner, max_size=3).map(lambda parts: "[\n" + ", # one\n".join(parts) + " ]")
    tables = st.lists(st.tuples(DOTTED, inner), max_size=3).map(
        lambda pairs: f"{{{', '.join(f'{key} = {value}' for key, value in pairs)}}}"
    )
    return lists | tables


VALUES = st.recursive(SCALARS, _nested, max_leaves=4)
STATEMENTS = st.one_of(
    st.tuples(DOTTED, VALUES).map(lambda pair: f"{pair[0]} = {pair[1]}"),
    DOTTED.map(lambda key: f"[{key}]"),
    DOTTED.map(lambda key: f"[[ {key} ]] # a list"),
    st.just("# nothing"),
)
DOCUMENTS = st.lists(STATEMENTS, max_size=6).map(lambda lines: "\n".join(lines) + "\n")
ANY = st.one_of(
    DOCUMENTS.map(str.encode),
    st.lists(st.sampled_from(BITS), max_size=40).map(lambda bits: "".join(bits).encode()),
    st.text(max_size=80).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.binary(max_size=80),
)


@settings(max_examples=1000, deadline=None)
@given(data=ANY)
def test_any_file_is_settings_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(data)
    said = ""
    try:
        made = config.load(str(path))
    except ConfigError as error:
        said = str(error)
    else:
        assert isinstance(made, Config)
        assert run_config(["--config", str(path), "show", "--json"], None) == 0
    assert not said or (said.startswith(f"{path}:") and said.isprintable())


NOTHING = [
    b"#",
    b"# x",
    b" ",
    b"\t",
    b"\n",
    b"\n",
    b"\r",
    b"\xc3",
    b"\xa9",
    b"\x0b",
    b"\n[box]\n",
    b"[comm]",
    b"[comm ]",
    b"[plugin]",
]


@settings(max_examples=300, deadline=None)
@given(data=ANY | st.lists(st.sampled_from(NOTHING), max_size=12).map(b"".join))
def test_what_is_taken_for_nothing_is_sound_toml_with_nothing_in_it(data: bytes) -> None:
    if config.says_nothing(data):
        document = tomli.loads(data.decode())
        assert set(document) <= set(config.TABLES)
        assert not any(document.values())


# Lines


def paths(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The path of everything in a parsed document but the document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return ([path] if path else []) + [found for key, one in inner for found in paths(one, (*path, key))]


@settings(max_examples=500, deadline=None)
@given(text=DOCUMENTS)
def test_the_scanner_finds_a_line_for_everything_that_the_parser_finds(text: str) -> None:
    try:
        document = tomli.loads(text)
    except ValueError:
        return
    lines = lines_of(text)
    assert set(paths(document)) == set(lines)
    rows = text.split("\n")
    for path, line in lines.items():
        if isinstance(path[-1], str):
            assert path[-1] in rows[line - 1].replace("\\u0041", "A")


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60) | st.lists(st.sampled_from(BITS), max_size=30).map("".join))
def test_the_scanner_never_raises_and_answers_lines_of_the_text(text: str) -> None:
    assert all(1 <= line <= text.count("\n") + 1 for line in lines_of(text).values())


def test_the_scanner_reads_keys_of_every_form() -> None:
    text = (
        "a.b = 1\r\n"  # 1
        '"quo\\"ted".\'lit\' = """\n'  # 2
        'text ""\\"""""\n'  # 3
        "# c = 1\n"  # 4
        "[t] # [u]\n"  # 5
        "k = [ # ]\n"  # 6
        "  1, '#', {x = 2},\n"  # 7
        "]\n"  # 8
        "d = {e.f = ']', g = {}}\n"  # 9
        "[[l]]\n"  # 10
        "m = 1979-05-27 07:32:00\n"  # 11
        "[[l]]\n"  # 12
        "m = 2\n"  # 13
        "[l.n]\n"  # 14
        "o = '''\n'''\n"  # 15
    )
    assert tomli.loads(text)
    assert lines_of(text) == {
        ("a",): 1, ("a", "b"): 1, ('quo"ted',): 2, ('quo"ted', "lit"): 2, ("t",): 5, ("t", "k"): 6, ("t", "k", 0): 7,
        ("t", "k", 1): 7, ("t", "k", 2): 7, ("t", "k", 2, "x"): 7, ("t", "d"): 9, ("t", "d", "e"): 9,
        ("t", "d", "e", "f"): 9, ("t", "d", "g"): 9, ("l",): 10, ("l", 0): 10, ("l", 0, "m"): 11, ("l", 1): 12,
        ("l", 1, "m"): 13, ("l", 1, "n"): 14, ("l", 1, "n", "o"): 15,
    }  # fmt: skip


def test_a_tables_own_header_is_its_line_also_after_a_table_inside_it() -> None:
    assert lines_of("[t.u]\n[t]\n")[("t",)] == 2
    assert lines_of("[t.u]\n")[("t",)] == 1


def test_where_the_scanner_is_lost_the_message_has_no_line(file: Path) -> None:
    deep = "x = " + "[" * 100 + "]" * 100 + "\n[message]\nmax_bytes = 'x'\n"
    assert problems(file, deep) == [
        "1: there is no table or key 'x' at the top; there are: box, comm, message, node, plugin, plugins, topology",
        " [message] max_bytes is 'x'; expected a whole number of bytes from 1 to 1073741824",
    ]


# A plugin's own table


@dataclass(frozen=True)
class Own:
    endpoint: str
    port: int = 7000
    wait_s: float = 1.5
    quiet: bool = False
    peers: list[str] = field(default_factory=list)
    tags: tuple[str, ...] = ()
    api_key: str | None = None
    limit: int | float | None = None

    def __post_init__(self) -> None:
        if self.port == 666:
            raise ValueError("port 666 is taken")


def own(file: Path, text: str) -> Own:
    made = read(file, f'plugins = ["zmq"]\n[plugin.zmq]\n{text}')
    return typed_table(str(file), "zmq", made.plugin_tables["zmq"], made.lines, Own)


def test_a_plugins_table_is_read_into_its_type(file: Path) -> None:
    assert own(file, 'endpoint = "e"\n') == Own("e")
    text = (
        'endpoint = "e"\nport = 1\nwait_s = 2\nquiet = true\npeers = ["p"]\ntags = ["t"]\napi_key = "k"\nlimit = 2.5\n'
    )
    made = own(file, text)
    assert made == Own("e", 1, 2.0, True, ["p"], ("t",), "k", 2.5)
    assert isinstance(made.wait_s, float)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "2: [plugin.zmq] lacks the key 'endpoint'; expected text in quotes"),
        ("endpoint = 'e'\nprot = 1\n", "4: [plugin.zmq] has no key 'prot'; did you mean 'port'?"),
        ("endpoint = 5\n", "3: [plugin.zmq] endpoint is 5; expected text in quotes"),
        ("endpoint = 'e'\nport = true\n", "4: [plugin.zmq] port is True; expected a whole number"),
        ("endpoint = 'e'\nport = 1.0\n", "4: [plugin.zmq] port is 1.0; expected a whole number"),
        ("endpoint = 'e'\nwait_s = inf\n", "4: [plugin.zmq] wait_s is inf; expected a number"),
        (
            "endpoint = 'e'\nwait_s = 0x" + "f" * 4000 + "\n",
            "4: [plugin.zmq] wait_s is a number of thousands of digits; expected a number",
        ),
        ("endpoint = 'e'\nquiet = 1\n", "4: [plugin.zmq] quiet is 1; expected true or false"),
        ("endpoint = 'e'\npeers = 'p'\n", "4: [plugin.zmq] peers is 'p'; expected a list of texts in quotes"),
        ("endpoint = 'e'\npeers = [1]\n", "4: [plugin.zmq] peers is [1]; expected a list of texts in quotes"),
        ("endpoint = 'e'\nlimit = 'x'\n", "4: [plugin.zmq] limit is 'x'; expected a whole number or a number"),
        ("endpoint = 'e'\nport = 666\n", "2: [plugin.zmq] port 666 is taken"),
    ],
)
def test_each_mistake_in_a_plugins_table_is_named_as_well(file: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        own(file, text)
    assert str(raised.value) == f"{file}:{said}"


def test_a_secret_of_the_wrong_type_is_not_repeated(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"api_key cannot be used \(its value is not shown\)") as raised:
        own(file, "endpoint = 'e'\napi_key = 4711\n")
    assert "4711" not in str(raised.value)


def test_all_problems_of_a_plugins_table_are_found(file: Path) -> None:
    made = read(file, 'plugins = ["zmq"]\n[plugin.zmq]\nquiet = 1\nport = "x"\nnone = 1\n')
    own, found = judge_table(str(file), "zmq", made.plugin_tables["zmq"], made.lines, Own)
    assert own is None
    assert [problem.line for problem in found] == [2, 3, 4, 5]


def test_a_type_that_no_table_can_fill_is_the_plugin_authors_error(file: Path) -> None:
    @dataclass(frozen=True)
    class Odd:
        x: dict[str, int] = field(default_factory=dict)

    with pytest.raises(TypeError, match=r"Odd\.x is dict\[str, int\]; a plugin's setting is str, int"):
        typed_table("f", "zmq", {}, {}, Odd)
    with pytest.raises(TypeError, match="int is not a dataclass"):
        typed_table("f", "zmq", {}, {}, int)


# Which file


def test_the_first_file_that_is_named_or_there_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "x" / "sotbus"
    folder.mkdir(parents=True)
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "x")}
    assert config.found(environ, "vm") is None
    (folder / "config.toml").touch()
    assert config.found(environ, "vm") == ("common file", str(folder / "config.toml"))
    (folder / "vm.toml").touch()
    assert config.found(environ, "vm") == ("file of this host", str(folder / "vm.toml"))
    environ["SOTBUS_CONFIG"] = "named.toml"
    assert config.found(environ, "vm") == ("$SOTBUS_CONFIG", "named.toml")
    assert config.found(environ, "vm", "given.toml") == ("--config", "given.toml")
    assert config.find(environ | {"SOTBUS_CONFIG": ""}, "vm") == str(folder / "vm.toml")


def test_a_file_that_cannot_be_looked_at_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "sotbus").mkdir()
    with pytest.raises(ConfigError, match="cannot be looked at: File name too long"):
        config.find({"XDG_CONFIG_HOME": str(tmp_path)}, "x" * 300)


def write(world: World, name: str, text: str) -> str:
    path = world.base / name
    path.write_text(text)
    return str(path)


def test_config_is_taken_before_and_after_the_command_and_the_nearest_counts(world: World) -> None:
    one = write(world, "one.toml", "[message]\nmax_bytes = 1\n")
    two = write(world, "two.toml", "[message]\nmax_bytes = 2\n")
    for words, limit in {
        ("--config", one, "send", "@x", "abc"): 1,
        (f"--config={one}", "comm", "send", "@x", "abc"): 1,
        ("comm", "--config", one, "send", "@x", "abc"): 1,
        ("send", "--config", one, "@x", "abc"): 1,
        ("--config", one, "send", "--config", two, "@x", "abc"): 2,
    }.items():
        done = world.sotbus("a", *words, env={"SOTBUS_CONFIG": "/nowhere"})
        assert f"has 3 bytes and the limit is {limit}" in done.stderr
    broken = write(world, "broken.toml", "x = 1\n")
    for words_ in (
        ["--config", broken, "list"],
        ["list", "--config", broken],
        ["list", "--json", f"--config={broken}"],
    ):
        done = world.run(*words_, cwd=world.base)
        assert (done.returncode, done.stderr[: len(broken) + 3]) == (1, f"{broken}:1:")


def test_what_follows_the_target_of_a_send_is_text(world: World) -> None:
    assert world.sotbus("a", "join").returncode == 0
    assert world.sotbus("a", "send", "@a-vm", "--config", "x.toml").returncode == 0
    assert json.loads(world.inbox("a-vm").read_bytes())["msg"] == "--config x.toml"


def test_a_config_option_without_a_file_is_a_usage_error(world: World) -> None:
    for words in (["--config"], ["list", "--config"], ["--config=", "list"], ["send", "--config", ""]):
        done = world.run(*words, cwd=world.base)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "sotbus: --config needs a FILE\n")


def test_the_option_of_one_run_does_not_last(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOT_COMM_HOME", str(world.home))
    monkeypatch.delenv("SOTBUS_CONFIG", raising=False)
    path = write(world, "c.toml", "")
    for before in (None, "/before"):
        if before:
            monkeypatch.setenv("SOTBUS_CONFIG", before)
        assert main(["list", "--config", path], world.box()) == 0
        assert os.environ.get("SOTBUS_CONFIG") == before


def test_init_writes_the_file_that_the_option_names(world: World) -> None:
    path = world.base / "new.toml"
    assert world.run("--config", str(path), "init", cwd=world.base, env={"TEST_MACHINE_ID": ""}).returncode == 0
    assert re.search(r'^machine_id = "[0-9a-f]{32}"$', path.read_text(), re.MULTILINE)
    assert config.load(str(path)).machine_id


# Waits


def test_the_environments_waits_go_before_the_files_and_those_before_the_defaults() -> None:
    environ = {"SOT_LOCK_WAIT_SECS": "7", "SOT_INBOX_LOCK_WAIT_SECS": "soon"}
    made = Settings.of(environ, lock_wait_s=5, inbox_lock_wait_s=6)
    assert (made.lock_wait_s, made.inbox_lock_wait_s, made.inbox_read_wait_s) == (7, 6, 3)


HOLD = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True); input()"
"""Holds a lock until its standard input ends."""


def test_a_wait_of_the_file_is_the_one_that_a_send_waits(world: World) -> None:
    assert world.sotbus("a", "join").returncode == 0
    path = write(world, "c.toml", "[comm]\ninbox_lock_wait_s = 0.25\n")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(world.home / "inbox" / "a-vm.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        done = world.sotbus("a", "--config", path, "send", "@a-vm", "x")
        assert (done.returncode, "was held for 0.25s" in done.stderr) == (1, True), done.stderr
    finally:
        holder.communicate(b"\n")


# The commands


def test_check_prints_ok_or_every_problem(world: World) -> None:
    sound = write(world, "sound.toml", "[message]\nmax_bytes = 5\n")
    broken = write(world, "broken.toml", "x = 1\n[box]\ny = 2\n")
    done = world.run("config", "check", "--config", sound, cwd=world.base)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{sound}: ok\n", "")
    done = world.run("--config", broken, "config", "check", cwd=world.base)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"{broken}:1: there is no table or key 'x' at the top; "
        "there are: box, comm, message, node, plugin, plugins, topology\n"
        f"{broken}:3: [box] has no key 'y'; there are: machine_id\n"
    )
    done = world.run("config", "check", "--json", broken, sound, "none.toml", cwd=world.base)
    answer = json.loads(done.stdout)
    assert (done.returncode, [one["ok"] for one in answer]) == (1, [False, True, False])
    assert [one["line"] for one in answer[0]["problems"]] == [1, 3]
    assert answer[2]["problems"] == [{"line": None, "text": "cannot be read: No such file or directory"}]


def test_check_judges_the_text_and_not_the_files_that_it_names(world: World) -> None:
    path = write(world, "c.toml", '[comm]\nhome = "/nowhere/at/all"\n')
    assert world.run("config", "check", path, cwd=world.base).returncode == 0
    assert not world.home.exists()


def test_check_without_any_file_is_ok(world: World) -> None:
    done = world.run("config", "check", cwd=world.base)
    assert (done.returncode, done.stdout) == (0, "no config file: ok, the defaults for one box apply\n")


def shown(world: World, text: str | None, **env: str) -> dict[str, dict[str, Any]]:
    """What ``config show --json`` says, by setting."""
    words = ["--config", write(world, "c.toml", text)] if text is not None else []
    done = world.run(*words, "config", "show", "--json", cwd=world.base, env={"SOT_COMM_HOME": "", **env})
    assert (done.returncode, done.stderr) == (0, "")
    return {row["setting"]: row for row in json.loads(done.stdout)["settings"]}


def test_show_names_file_and_line_of_what_the_file_says(world: World) -> None:
    text = (
        'plugins = ["filesystem"]\n[comm]\nhome = "/srv"\nlock_wait_s = 4\ninbox_lock_wait_s = 5\n'
        f'inbox_read_wait_s = 6\n[message]\nmax_bytes = 7\n[box]\nmachine_id = "{ID}"\n[plugin.filesystem]\na.b = [1]\n'
        '[topology]\nhub = "far"\nfolder = "own"\n'
    )
    rows = shown(world, text, TEST_MACHINE_ID="")
    told = {name: (row["value"], row["line"]) for name, row in rows.items() if row["source"] == "file"}
    assert told == {
        "plugins": (["filesystem"], 1),
        "comm.home": ("/srv", 3),
        "comm.lock_wait_s": (4, 4),
        "comm.inbox_lock_wait_s": (5, 5),
        "comm.inbox_read_wait_s": (6, 6),
        "message.max_bytes": (7, 8),
        "box.machine_id": (ID, 10),
        "plugin.filesystem.a.b": ([1], 12),
        "topology.hub": ("far", 14),
        "topology.folder": ("own", 15),
    }
    assert all(rows[name]["file"] == f"{world.base}/c.toml" for name in told)


def test_show_names_the_variable_of_what_the_environment_says(world: World) -> None:
    given = {
        "SOT_COMM_HOME": "/env/comm", "SOT_LOCK_WAIT_SECS": "1.5", "SOT_INBOX_LOCK_WAIT_SECS": "2",
        "SOT_INBOX_READ_WAIT_SECS": "9", "SOT_SELF_HOST": "declared", "SOT_COMM_SELF_FILE": "/env/pin.txt",
        "SOT_WORKSPACE_ID": "row-1", "SOT_COMM_NAME": "me", "SOT_COMM_EXPERTISE": "rust, sql",
        "SOT_RELAY_ENDPOINT": "ssh:hub", "CLAUDE_CODE_SESSION_ID": "4f0c", "SOT_SOCKET": "/env/node.sock",
    }  # fmt: skip
    rows = shown(world, "[comm]\nlock_wait_s = 4\n", **given)
    told = {row["variable"]: row["value"] for row in rows.values() if row["source"] == "environment"}
    waits = {"SOT_LOCK_WAIT_SECS": 1.5, "SOT_INBOX_LOCK_WAIT_SECS": 2, "SOT_INBOX_READ_WAIT_SECS": 9}
    assert told == given | waits
    assert rows["comm.lock_wait_s"]["note"] == f"goes before {world.base}/c.toml:2"


def test_show_says_default_and_machine_for_the_rest(world: World) -> None:
    rows = shown(world, None, SOT_SELF_HOST="", SOT_LOCK_WAIT_SECS="soon")
    machine = {name: row["value"] for name, row in rows.items() if row["source"] == "machine"}
    assert machine == {"box.machine_id": ID, "box.host": "vm"}
    defaults = {name: row["value"] for name, row in rows.items() if row["source"] == "default"}
    assert {name: value for name, value in defaults.items() if value is not None} == {
        "plugins": ["filesystem", "nfs"],
        "comm.home": f"{world.base}/.sot-comm",
        "comm.lock_wait_s": 10,
        "comm.inbox_lock_wait_s": 2,
        "comm.inbox_read_wait_s": 3,
        "comm.mount_wait_s": 10,
        "message.max_bytes": 262144,
        "node.state": f"{world.base}/.local/state/sotbus",
        "node.socket": socket_path({}),
    }
    assert set(rows) == set(machine) | set(defaults)
    note = "SOT_LOCK_WAIT_SECS is 'soon', which is no number of seconds, so it is passed over"
    assert rows["comm.lock_wait_s"]["note"] == note


def test_show_says_where_the_node_is_and_which_of_its_sources_counts(world: World) -> None:
    text = '[node]\nstate = "/srv/state"\nsocket = "/srv/node.sock"\n'
    rows = shown(world, text)
    for name, value, line in (("node.state", "/srv/state", 2), ("node.socket", "/srv/node.sock", 3)):
        assert (rows[name]["value"], rows[name]["source"], rows[name]["line"]) == (value, "file", line)
    row = shown(world, text, SOT_SOCKET="unix:/env/node.sock")["node.socket"]
    assert (row["value"], row["variable"]) == ("/env/node.sock", "SOT_SOCKET")
    assert row["note"] == f"goes before {world.base}/c.toml:3"
    row = shown(world, text, SOT_SOCKET="ssh:hub")["node.socket"]
    assert (row["value"], row["variable"]) == (None, "SOT_SOCKET")
    assert row["note"] == f"ssh endpoints are not spoken by sotbus: ssh:hub; goes before {world.base}/c.toml:3"
    row = shown(world, None, XDG_STATE_HOME="/srv/xdg")["node.state"]
    assert (row["value"], row["source"]) == ("/srv/xdg/sotbus", "default")


@pytest.mark.parametrize("path", sorted(CONF.glob("*.toml")), ids=lambda path: path.name)
def test_the_steps_of_a_file_of_conf_trust_peers_before_they_serve(path: Path) -> None:
    head = path.read_text().partition("\n\n")[0].partition("A line that is commented out")[0]
    serve = re.search(r"sotbus serve\b", head)
    if serve is not None:
        assert 0 < head.rindex("sotbus keys trust") < serve.start()


@pytest.mark.parametrize(
    ("hub", "note"), [("vm", "this box"), ("VM", "this box"), ("vm.example", "another box"), ("far", "another box")]
)
def test_show_says_whether_the_hub_is_this_box(world: World, hub: str, note: str) -> None:
    row = shown(world, f'[topology]\nhub = "{hub}"\n')["topology.hub"]
    assert (row["value"], row["source"], row["line"], row["note"]) == (hub, "file", 2, note)


def test_show_without_a_topology_has_its_keys_without_values(world: World) -> None:
    rows = shown(world, "[topology]\n")
    for name in ("topology.hub", "topology.folder"):
        assert (rows[name]["value"], rows[name]["source"], rows[name]["note"]) == (None, "default", None)


def test_show_never_shows_a_secret(world: World) -> None:
    text = (
        '[plugin.filesystem]\ntoken = "s3cret"\nApi_Key = ["s3cret"]\nkey_file = "/k"\nurl = "tcp://me:s3cret@h/x"\n'
        'password = {x = "s3cret"}\nlist = [{secret = "s3cret", plain = "p"}]\n'
    )
    path = write(world, "c.toml", text)
    done = world.run("config", "show", "--config", path, cwd=world.base)
    assert "s3cret" not in done.stdout
    rows = shown(world, text)
    assert "s3cret" not in json.dumps(rows)
    assert rows["plugin.filesystem.key_file"]["value"] == "/k"
    assert rows["plugin.filesystem.url"]["value"] == "tcp://me:***@h/x"


def test_show_prints_a_line_a_setting_with_its_source(world: World) -> None:
    path = write(world, "c.toml", "[message]\nmax_bytes = 7\n")
    done = world.run("config", "show", cwd=world.base, env={"SOTBUS_CONFIG": path, "SOT_LOCK_WAIT_SECS": "5"})
    lines = done.stdout.splitlines()
    assert lines[0] == f"config file: {path} ($SOTBUS_CONFIG)"
    assert re.search(rf"^message\.max_bytes +7 +{re.escape(path)}:2$", done.stdout, re.MULTILINE)
    assert re.search(r"^comm\.lock_wait_s +5 +environment variable SOT_LOCK_WAIT_SECS$", done.stdout, re.MULTILINE)
    names = re.escape(json.dumps(config.DEFAULT_PLUGINS))
    assert re.search(rf"^plugins +{names} +default$", done.stdout, re.MULTILINE)
    assert re.search(r"^session\.name +- +default$", done.stdout, re.MULTILINE)


def test_show_of_a_broken_file_stops_at_the_first_problem(world: World) -> None:
    path = write(world, "c.toml", "x = 1\ny = 2\n")
    done = world.run("config", "show", "--config", path, cwd=world.base)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


def test_path_prints_the_file_that_is_read_and_all_prints_every_candidate(world: World) -> None:
    folder = world.base / ".config" / "sotbus"
    done = world.run("config", "path", cwd=world.base)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "note: no config file is there; the defaults for one box apply\n"
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    assert world.run("config", "path", cwd=world.base).stdout == f"{folder}/config.toml\n"
    done = world.run("config", "path", "--all", cwd=world.base, env={"SOTBUS_CONFIG": "/nowhere.toml"})
    assert done.stdout.splitlines() == [
        "--config          -          -",
        "$SOTBUS_CONFIG    missing    /nowhere.toml",
        f"file of this host absent     {folder}/vm.toml",
        f"common file       there      {folder}/config.toml",
    ]
    assert (done.returncode, done.stderr) == (1, "/nowhere.toml: is not there\n")
    given = write(world, "c.toml", "")
    done = world.run("config", "path", "--all", "--json", "--config", given, cwd=world.base)
    assert json.loads(done.stdout)[0] == {"way": "--config", "file": given, "state": "read"}


def test_an_unknown_action_and_none_are_usage_errors(world: World) -> None:
    for words in (["config"], ["config", "chekc"], ["config", "show", "--all"]):
        done = world.run(*words, cwd=world.base)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("usage: sotbus config")


def test_help_names_the_actions_and_the_option(world: World) -> None:
    done = subprocess.run(
        [sys.executable, str(ENTRY), "config", "--help"],
        env=world.environ(),
        capture_output=True,
        text=True,
        check=True,
    )
    for word in ("check", "show", "path", "--config FILE", "examples:", "exit status:"):
        assert word in done.stdout
    assert "--config FILE" in world.run("--help", cwd=world.base).stdout


def test_the_page_has_every_key_and_every_variable() -> None:
    from sotbus.cli.config import VARIABLES
    from sotbus.comm.settings import WAIT_VARIABLES
    from sotbus.config_schema import KEYS

    page = (CONF.parent / "docs" / "config.md").read_text()
    for table, keys in KEYS.items():
        for key in keys:
            assert f"| `[{table}] {key}` |" in page or (not table and f"| `{key}` |" in page)
    for name in (
        *VARIABLES,
        *VARIABLES.values(),
        *WAIT_VARIABLES.values(),
        "SOT_COMM_HOME",
        "SOT_SELF_HOST",
        "SOT_SOCKET",
    ):
        assert f"`{name}`" in page
