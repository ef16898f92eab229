"""``sotbus config``: judge the file's text, show every setting and where it comes from, say which file is read."""

from __future__ import annotations

import json
import os
import re

from sotbus import config as configuration
from sotbus import config_schema as schema
from sotbus.cli import options, terminal
from sotbus.comm import settings as bounds
from sotbus.comm.box import Box as ThisBox
from sotbus.comm.folder import Folder
from sotbus.comm.topology import ENDPOINT, Topology
from sotbus.errors import EX_FAILED, ConfigError, FolderError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator, Mapping
    from typing import Any

    from sotbus.comm.box import Box
    from sotbus.config import Config

HIDDEN = "(not shown)"
"""Stands for the value of a key that holds a secret, by its name."""

_PASSWORD = re.compile(r"(://[^/@:\s]*):[^/@\s]*@")
"""The password of a URL (RFC 3986, 3.2.1)."""

VARIABLES = {
    "session.self_file": "SOT_COMM_SELF_FILE",
    "session.row": "SOT_WORKSPACE_ID",
    "session.name": "SOT_COMM_NAME",
    "session.expertise": "SOT_COMM_EXPERTISE",
    "session.id": "CLAUDE_CODE_SESSION_ID",
    "hub.endpoint": ENDPOINT,
}
"""Settings that only the environment gives: a session's own, and the hub's address (facts 14)."""

FILE, ENVIRONMENT, MACHINE, DEFAULT = "file", "environment", "machine", "default"


class Row:
    """One setting as ``config show`` prints it.

    :param source: ``file``, ``environment``, ``machine`` (the system itself) or ``default``.
    :param where: ``FILE:LINE``, the variable's name, what of the machine was read, or ``""``.
    :param note: what else there is to know, such as a source that was passed over; or ``""``.
    """

    __slots__ = ("line", "note", "setting", "source", "value", "where")

    def __init__(
        self, setting: str, value: object, source: str, where: str = "", *, line: int | None = None, note: str = ""
    ) -> None:
        self.setting = setting
        self.value = value
        self.source = source
        self.where = where
        self.line = line
        self.note = note

    def as_json(self) -> dict[str, object]:
        """The row as one object; file and line, or variable, are null where they do not apply."""
        return {
            "setting": self.setting,
            "value": self.value,
            "source": self.source,
            "file": self.where if self.source == FILE else None,
            "line": self.line,
            "variable": self.where if self.source == ENVIRONMENT else None,
            "note": self.note or None,
        }

    def origin(self) -> str:
        """Where the value comes from, as a person reads it."""
        if self.source == FILE:
            return self.where if self.line is None else f"{self.where}:{self.line}"
        if self.source == ENVIRONMENT:
            return f"environment variable {self.where}"
        return self.where if self.source == MACHINE else DEFAULT


def run_config(words: list[str], box: Box | None) -> int:
    made = _parser()
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    if given.action is None:
        made.print_usage(__import__("sys").stderr)
        return 2
    here = box or ThisBox.here(os.environ)
    run = {"check": _check, "show": _show, "path": _path}[given.action]
    return run(given, here)


def _parser() -> ArgumentParser:
    made = options.parser(
        "config",
        "The config file: whether it is sound, what it and the environment come to, and which file is read.",
        "  sotbus config check                    everything that is wrong with the file's text, each with its line\n"
        "  sotbus config check conf/*.toml        the same of files that are not in use yet\n"
        "  sotbus config show                     every setting, its value, and where that comes from\n"
        "  sotbus config show --json | jq .config\n"
        "  sotbus config path --all               where a file is looked for, in order\n\n"
        "exit status: 0 done, 1 the file cannot be used, 2 usage",
    )
    made.add_argument("--config", metavar="FILE", help="the config file, instead of the one that is found")
    actions = made.add_subparsers(dest="action", metavar="{check,show,path}")
    check = actions.add_parser("check", help="judge the text of the file; the files that it names are not looked at")
    check.add_argument("file", nargs="*", default=(), help="files to judge, instead of the one that is read")
    show = actions.add_parser("show", help="every setting, its value and its source; values of secrets are not shown")
    path = actions.add_parser("path", help="the file that is read")
    path.add_argument("--all", action="store_true", help="every place where a file is looked for, in order")
    for one, form in ((check, "one array"), (show, "one object"), (path, "one array")):
        one.add_argument("--json", action="store_true", help=f"print {form}")
    return made


def _check(given: Namespace, here: Box) -> int:
    """All problems of each file on standard error, ``FILE: ok`` for a sound one."""
    files = given.file or [configuration.find(os.environ, here.declared_host, given.config)]
    answers: list[dict[str, object]] = []
    sound = True
    for file in files:
        if file is None:
            if not given.json:
                terminal.out("no config file: ok, the defaults for one box apply")
            continue
        try:
            _, problems = configuration.read(file)
        except ConfigError as error:
            problems = [schema.Problem(file, None, str(error).removeprefix(f"{file}: "))]
        sound = sound and not problems
        told = [{"line": problem.line, "text": problem.text} for problem in problems]
        answers.append({"file": file, "ok": not problems, "problems": told})
        if given.json:
            continue
        for problem in problems:
            terminal.err(terminal.shown(str(problem)))
        if not problems:
            terminal.out(f"{terminal.shown(file)}: ok")
    if given.json:
        terminal.out(json.dumps(answers))
    return 0 if sound else EX_FAILED


def _show(given: Namespace, here: Box) -> int:
    """Every setting. *Errors*: ConfigError for a file that cannot be used."""
    first = configuration.found(os.environ, here.declared_host, given.config)
    config = configuration.load(first[1] if first else None)
    rows = [*_file_rows(config, here, os.environ), *_environment_rows(here, os.environ)]
    if given.json:
        head = {"config": config.path, "found_by": first[0] if first else None}
        terminal.out(json.dumps(head | {"settings": [row.as_json() for row in rows]}))
        return 0
    terminal.out(f"config file: {terminal.shown(first[1])} ({first[0]})" if first else "config file: none")
    cells = [(row.setting, _as_text(row.value), row.origin(), row.note) for row in rows]
    lines = [tuple(terminal.shown(cell) for cell in line) for line in cells]
    widths = [max(len(line[at]) for line in lines) for at in range(2)]
    for name, value, origin, note in lines:
        terminal.out(f"{name.ljust(widths[0])}  {value.ljust(widths[1])}  {origin}{f'; {note}' if note else ''}")
    return 0


def _file_rows(config: Config, here: Box, environ: Mapping[str, str]) -> Iterator[Row]:
    """The keys that a file may give, in the file's order."""
    yield _of_file(config, "plugins", ("plugins",), list(config.plugins))
    yield _hub(config, here)
    yield _of_file(config, "topology.folder", ("topology", "folder"), schema.OWN if config.own_folder else None)
    yield _machine_id(config, here)
    yield _comm_home(config, environ)
    for name, default in (
        ("lock_wait_s", bounds.LOCK_WAIT_S),
        ("inbox_lock_wait_s", bounds.INBOX_LOCK_WAIT_S),
        ("inbox_read_wait_s", bounds.INBOX_READ_WAIT_S),
    ):
        in_file = getattr(config, name)
        row = _of_file(config, f"comm.{name}", ("comm", name), default if in_file is None else in_file)
        variable = bounds.WAIT_VARIABLES[name]
        text = environ.get(variable, "")
        wait = bounds.seconds(text)
        if wait is not None:
            row = _over(row, wait, variable)
        elif text:
            row.note = f"{variable} is {schema.quoted(text)}, which is no number of seconds, so it is passed over"
        yield row
    mount_wait_s = bounds.MOUNT_WAIT_S if config.mount_wait_s is None else config.mount_wait_s
    yield _of_file(config, "comm.mount_wait_s", ("comm", "mount_wait_s"), mount_wait_s)
    yield _of_file(config, "message.max_bytes", ("message", "max_bytes"), config.max_text_bytes)
    yield _node_state(config, here, environ)
    yield _node_socket(config, here, environ)
    for plugin, table in config.plugin_tables.items():
        yield from _plugin_rows(config, (schema.PLUGIN, plugin), table)


def _of_file(config: Config, setting: str, path: tuple[str, ...], value: object) -> Row:
    """A setting with the file's value, or the default where the file has none."""
    if path in config.lines:
        return Row(setting, value, FILE, config.path or "", line=config.lines[path])
    return Row(setting, value, DEFAULT)


def _over(row: Row, value: object, variable: str) -> Row:
    """The row with an environment variable's value, which goes before the file's."""
    note = f"goes before {row.origin()}" if row.source == FILE else ""
    return Row(row.setting, value, ENVIRONMENT, variable, note=note)


def _hub(config: Config, here: Box) -> Row:
    """The topology's hub, and whether that is this box: a name that is spelt otherwise makes it another one."""
    row = _of_file(config, "topology.hub", ("topology", "hub"), config.hub)
    if config.hub is not None:
        row.note = "this box" if Topology(config.hub).names(here.declared_host) else "another box"
    return row


def _machine_id(config: Config, here: Box) -> Row:
    row = _of_file(config, "box.machine_id", ("box", "machine_id"), config.machine_id)
    if here.machine_id is not None:
        note = f"{row.origin()} only stands in where there is none" if row.source == FILE else ""
        return Row(row.setting, here.machine_id, MACHINE, "/etc/machine-id", note=note)
    if config.machine_id is None:
        row.note = "this machine has none, so it can file no mail; 'sotbus init' says what to do"
    return row


def _comm_home(config: Config, environ: Mapping[str, str]) -> Row:
    try:
        root: str | None = Folder.of(environ, config.comm_home).root
        note = ""
    except FolderError as error:
        root, note = None, str(error).removeprefix("FAILED: ")
    row = _of_file(config, "comm.home", ("comm", "home"), root)
    if environ.get("SOT_COMM_HOME"):
        return _over(row, root, "SOT_COMM_HOME")
    row.note = note
    return row


def _node_state(config: Config, here: Box, environ: Mapping[str, str]) -> Row:
    """The folder that a node would use, also where that is the default."""
    from sotbus.node.store_file import state_folder

    row = _of_file(config, "node.state", ("node", "state"), None)
    try:
        row.value = state_folder(environ, config.node_state, here.mountinfo())
    except ConfigError as error:
        row.note = str(error)
    return row


def _node_socket(config: Config, here: Box, environ: Mapping[str, str]) -> Row:
    """The socket that a node would serve, and commands would look for it at."""
    from sotbus.comm.daemon import SOCKET, Daemon, NoDaemonError

    row = _of_file(config, "node.socket", ("node", "socket"), None)
    if environ.get(SOCKET):
        row = _over(row, None, SOCKET)
    try:
        row.value = Daemon.own(environ, here.declared_host, configured=config.node_socket).path
    except NoDaemonError as error:
        row.note = f"{error}; {row.note}" if row.note else str(error)
    return row


def _plugin_rows(config: Config, path: tuple[str, ...], table: Mapping[str, Any]) -> Iterator[Row]:
    """A plugin's raw table, tables inside it flattened; what may be a secret is not shown."""
    for key, value in table.items():
        inner = (*path, key)
        if isinstance(value, dict) and value and not schema.is_secret(key):
            yield from _plugin_rows(config, inner, value)
        else:
            yield Row(".".join(inner), _plain(key, value), FILE, config.path or "", line=config.lines.get(inner))


def _plain(key: str, value: Any) -> object:
    """A raw TOML value without secrets, as JSON can have it: dates and times as text."""
    if schema.is_secret(key):
        return HIDDEN
    if isinstance(value, dict):
        return {name: _plain(name, one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain("", one) for one in value]
    if isinstance(value, str):
        return _PASSWORD.sub(r"\1:***@", value)
    if isinstance(value, bool) or (isinstance(value, (int, float)) and abs(value) < 2**63):
        return value
    return schema.shown(value)


def _environment_rows(here: Box, environ: Mapping[str, str]) -> Iterator[Row]:
    """What only the environment, or else the machine, gives."""
    if environ.get("SOT_SELF_HOST"):
        yield Row("box.host", here.declared_host, ENVIRONMENT, "SOT_SELF_HOST")
    else:
        yield Row("box.host", here.declared_host, MACHINE, "the host name")
    for setting, variable in VARIABLES.items():
        text = environ.get(variable)
        yield Row(setting, _plain("", text), ENVIRONMENT, variable) if text else Row(setting, None, DEFAULT)


def _as_text(value: object) -> str:
    """A value as the table shows it."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value, ensure_ascii=False)


def _path(given: Namespace, here: Box) -> int:
    """The file that is read; with ``--all`` every candidate. *Errors*: ConfigError."""
    environ = os.environ
    first = configuration.found(environ, here.declared_host, given.config)
    missing = first is not None and not configuration.is_there(first[1])
    rows = [
        {"way": way, "file": file, "state": _state(file, (way, file) == first, missing)}
        for way, file in configuration.candidates(environ, here.declared_host, given.config)
        if given.all or (way, file) == first
    ]
    if given.json:
        terminal.out(json.dumps(rows))
    elif given.all:
        for row in rows:
            terminal.out(f"{row['way']:<18}{row['state']:<11}{terminal.shown(row['file'] or '-')}")
    elif first is not None:
        terminal.out(first[1])
    if first is None:
        terminal.err("note: no config file is there; the defaults for one box apply")
    elif missing:
        terminal.err(f"{terminal.shown(first[1])}: is not there")
    return EX_FAILED if missing else 0


def _state(file: str | None, is_first: bool, missing: bool) -> str:
    """``read``; ``missing`` where it is named, so that commands fail; ``there`` behind another; ``absent``; ``-``."""
    if file is None:
        return "-"
    if is_first:
        return "missing" if missing else "read"
    try:
        return "there" if configuration.is_there(file) else "absent"
    except ConfigError:
        return "unknown"
