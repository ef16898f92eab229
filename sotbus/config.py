"""The configuration file: where it is found, and TOML into typed settings.

Every error names file, line, table, key, and what was expected. A file that says nothing (comments and bare headers, as
``sotbus init`` writes it) is read without a TOML parser, because every command reads it first. What may stand in a file
is :mod:`sotbus.config_schema`'s; a plugin's own table is read by :func:`sotbus.typed_table.typed_table`.
"""

from __future__ import annotations

import os

from sotbus.errors import ConfigError
from sotbus.message import MAX_TEXT_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from sotbus.config_schema import Lines, Problem

DEFAULT_PLUGINS = ("filesystem", "nfs")
"""Folders on this box's own disk, and on an NFS v4 mount."""

OPTION, VARIABLE, HOST_FILE, COMMON_FILE = "--config", "$SOTBUS_CONFIG", "file of this host", "common file"
"""How a file is found, in this order."""

COMMON_LEAF = "config.toml"
"""The name of the common file, which every box with this home reads that has no file of its own."""

TABLES = ("topology", "box", "comm", "message", "node")
"""The tables that a file may have, but for the plugins' own."""

_HEADERS = tuple(f"[{table}]".encode() for table in TABLES)

_TEXT = bytes([0x09, 0x0A, *range(0x20, 0x7F), *range(0x80, 0x100)])
"""The bytes that may stand in a TOML comment, and newline."""


class Config:
    """Typed settings of one box; every one has a default.

    :param path: the file that was read, or None for defaults alone.
    :param plugins: the plugins to load, in order.
    :param plugin_tables: ``[plugin.NAME]`` by name, as it stands in the file; the plugin judges what is in it.
    :param hub: the declared host of the box that owns the topology's comm folder, or None where none is named.
    :param own_folder: whether this box owns its comm folder whatever its mount; else the mount decides.
    :param machine_id: stands in where the machine has no /etc/machine-id.
    :param comm_home: the comm folder, below ``$SOT_COMM_HOME``.
    :param lock_wait_s: seconds for the registry lock; this and the next two are None where the file says nothing, and
        the environment goes before them (:meth:`sotbus.comm.settings.Settings.of`).
    :param inbox_lock_wait_s: seconds for the inbox lock of an append.
    :param inbox_read_wait_s: seconds for the shared inbox lock of a reader.
    :param mount_wait_s: seconds that a command's calls into a file system may take, or None where nothing is said.
    :param node_state: the folder of the node's store, or None for the usual place.
    :param node_socket: the node's socket, below ``$SOT_SOCKET``, or None for the usual place.
    :param max_text_bytes: the largest message text, in bytes of UTF-8.
    """

    __slots__ = (
        "_document",
        "_lines",
        "_text",
        "comm_home",
        "hub",
        "inbox_lock_wait_s",
        "inbox_read_wait_s",
        "lock_wait_s",
        "machine_id",
        "max_text_bytes",
        "mount_wait_s",
        "node_socket",
        "node_state",
        "own_folder",
        "path",
        "plugin_tables",
        "plugins",
    )

    def __init__(self) -> None:
        self.path: str | None = None
        self.plugins: tuple[str, ...] = DEFAULT_PLUGINS
        self.plugin_tables: Mapping[str, Mapping[str, object]] = {}
        self.hub: str | None = None
        self.own_folder = False
        self.machine_id: str | None = None
        self.comm_home: str | None = None
        self.lock_wait_s: float | None = None
        self.inbox_lock_wait_s: float | None = None
        self.inbox_read_wait_s: float | None = None
        self.mount_wait_s: float | None = None
        self.node_state: str | None = None
        self.node_socket: str | None = None
        self.max_text_bytes: int = MAX_TEXT_BYTES
        self._text = ""
        self._document: Mapping[str, object] = {}
        self._lines: Lines | None = None

    def __repr__(self) -> str:
        return f"<Config {self.path or 'defaults'}>"

    @property
    def lines(self) -> Lines:
        """Every table and key that the file gives, by its path, and its line, or None where that cannot be told.

        Looked for when first asked: a command whose file is sound does without.
        """
        if self._lines is None:
            from sotbus.toml_lines import lines_of

            lines: dict[tuple[str | int, ...], int | None] = {**lines_of(self._text)}
            for table, keys in self._document.items():
                lines.setdefault((table,), None)
                for key in keys if isinstance(keys, dict) else ():
                    lines.setdefault((table, key), None)
            self._lines = lines
        return self._lines


def config_folder(environ: Mapping[str, str]) -> str:
    """``$XDG_CONFIG_HOME/sotbus``, by default ``~/.config/sotbus``; a relative variable is ignored (XDG base dirs)."""
    base = environ.get("XDG_CONFIG_HOME", "")
    return (base if os.path.isabs(base) else os.path.expanduser("~/.config")) + "/sotbus"


def is_there(path: str) -> bool:
    """Whether a file is there. *Errors*: ConfigError where that cannot be told; settings are not ignored silently."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(f"{path}: cannot be looked at: {error.strerror or error}") from error
    return True


def host_file(environ: Mapping[str, str], declared_host: str) -> str:
    """The file that is one box's alone, also where several boxes mount one home."""
    return f"{config_folder(environ)}/{declared_host.replace('/', '_')}.toml"


def candidates(
    environ: Mapping[str, str], declared_host: str, option: str | None = None
) -> tuple[tuple[str, str | None], ...]:
    """Every way to a file, in order, and the file's path; None for a way that names none."""
    folder = config_folder(environ)
    at_home = os.path.isabs(folder)
    return (
        (OPTION, option or None),
        (VARIABLE, environ.get("SOTBUS_CONFIG") or None),
        (HOST_FILE, host_file(environ, declared_host) if at_home else None),
        (COMMON_FILE, f"{folder}/{COMMON_LEAF}" if at_home else None),
    )


def found(environ: Mapping[str, str], declared_host: str, option: str | None = None) -> tuple[str, str] | None:
    """How the file to read is found, and its path: the first that is named, or that is there. None for defaults alone.

    A file that is named need not be there: reading it is an error then. *Errors*: ConfigError.
    """
    for way, path in candidates(environ, declared_host, option):
        if path is not None and (way in (OPTION, VARIABLE) or is_there(path)):
            return way, path
    return None


def find(environ: Mapping[str, str], declared_host: str, option: str | None = None) -> str | None:
    """The path of the file to read, as :func:`found` tells it; None for defaults alone. *Errors*: ConfigError."""
    first = found(environ, declared_host, option)
    return first[1] if first else None


def load(path: str | None) -> Config:
    """Read a file, or the defaults for None. *Errors*: :class:`ConfigError` for the first thing that is wrong."""
    config, problems = read(path)
    if problems:
        raise ConfigError(str(problems[0]))
    return config


def read(path: str | None) -> tuple[Config, list[Problem]]:
    """A file's settings, or the defaults and everything that is wrong with the file's text, by line.

    *Errors*: :class:`ConfigError` where the file cannot be read at all.
    """
    config = Config()
    config.path = path
    if path is None:
        return config, []
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    return (config, []) if says_nothing(data) else (config, _take(config, path, data))


def says_nothing(data: bytes) -> bool:
    """Whether a file is sound TOML without a key: blank lines, comments, and headers of known tables, each once."""
    data = data.replace(b"\r\n", b"\n")
    headers = list(_HEADERS)
    for line in data.split(b"\n"):
        text = line.strip(b" \t")
        if text in headers:
            headers.remove(text)
        elif text and not text.startswith(b"#"):
            return False
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return not data.translate(None, _TEXT)


def _take(config: Config, path: str, data: bytes) -> list[Problem]:
    """Put what a file says into the settings; answers what is wrong with it."""
    import tomli

    from sotbus.config_schema import Problem, judge

    try:
        text = data.decode("utf-8")
        document = tomli.loads(text)
    except UnicodeDecodeError as error:
        return [Problem(path, data.count(b"\n", 0, error.start) + 1, f"is not UTF-8 at byte {error.start}")]
    except (tomli.TOMLDecodeError, RecursionError, ValueError) as error:
        line = getattr(error, "lineno", None)  # tomli has it from 2.2 on
        return [Problem(path, line if isinstance(line, int) else None, f"is not TOML: {error}")]
    config._text, config._document = text, document
    values, problems = judge(path, document, lambda at: config.lines.get(at), DEFAULT_PLUGINS)
    if not problems:
        for name, value in values.items():
            setattr(config, name, value)
    return problems
