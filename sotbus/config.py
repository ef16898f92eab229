"""The configuration file: TOML into typed settings. Every error names file, table, key, and what was expected.

A file that says nothing (blank lines and comments, as ``sotbus init`` writes it) is read without a TOML parser, because
every command reads it first.
"""

from __future__ import annotations

import os

from sotbus.errors import ConfigError
from sotbus.message import MAX_TEXT_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


class Config:
    """Typed settings of one box; every one has a default.

    :param path: the file that was read, or None for defaults alone.
    :param machine_id: stands in where the machine has no /etc/machine-id.
    :param comm_home: the comm folder, below ``$SOT_COMM_HOME``.
    :param max_text_bytes: the largest message text, in bytes of UTF-8.
    """

    __slots__ = ("comm_home", "machine_id", "max_text_bytes", "path")

    def __init__(self) -> None:
        self.path: str | None = None
        self.machine_id: str | None = None
        self.comm_home: str | None = None
        self.max_text_bytes: int = MAX_TEXT_BYTES

    def __repr__(self) -> str:
        return f"<Config {self.path or 'defaults'}>"


def _machine_id(value: Any) -> str:
    if isinstance(value, str) and len(value) == 32 and all(c in "0123456789abcdef" for c in value):
        return value
    raise ValueError("32 lower-case hex digits in quotes")


def _folder(value: Any) -> str:
    if isinstance(value, str) and value and "\0" not in value:
        path = os.path.expanduser(value)
        if os.path.isabs(path):
            return path
    raise ValueError('an absolute path (or one that begins with "~") in quotes')


def _positive(value: Any) -> int:
    if type(value) is int and 0 < value <= 2**30:
        return value
    raise ValueError("a whole number of bytes from 1 to 1073741824")


KEYS: Mapping[str, Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    "box": {"machine_id": ("machine_id", _machine_id)},
    "comm": {"home": ("comm_home", _folder)},
    "message": {"max_bytes": ("max_text_bytes", _positive)},
}
"""Table, key: the setting, and its reader, which answers the value or raises ValueError with what was expected."""


def config_folder(environ: Mapping[str, str]) -> str:
    """``$XDG_CONFIG_HOME/sotbus``, by default ``~/.config/sotbus``; a relative variable is ignored (XDG base dirs)."""
    base = environ.get("XDG_CONFIG_HOME", "")
    return (base if os.path.isabs(base) else os.path.expanduser("~/.config")) + "/sotbus"


def _is_there(path: str) -> bool:
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


def find(environ: Mapping[str, str], declared_host: str) -> str | None:
    """``$SOTBUS_CONFIG``, else the host's own file, else the common ``config.toml``; None where there is none."""
    named = environ.get("SOTBUS_CONFIG")
    if named:
        return named
    folder = config_folder(environ)
    if not os.path.isabs(folder):
        return None
    return next(
        (path for path in (host_file(environ, declared_host), f"{folder}/config.toml") if _is_there(path)), None
    )


def load(path: str | None) -> Config:
    """Read a file, or the defaults for None. *Errors*: :class:`ConfigError`."""
    config = Config()
    config.path = path
    if path is None:
        return config
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if all(not line.strip() or line.lstrip().startswith(b"#") for line in data.split(b"\n")):
        return config
    for table, keys in _parse(path, data).items():
        if table not in KEYS:
            raise ConfigError(f"{path}: there is no table or key {table!r} at the top{_nearest(table, KEYS)}")
        if not isinstance(keys, dict):
            raise ConfigError(f"{path}: [{table}] is a table, not a single value")
        for key, value in keys.items():
            if key not in KEYS[table]:
                raise ConfigError(f"{path}: [{table}] has no key {key!r}{_nearest(key, KEYS[table])}")
            name, read = KEYS[table][key]
            try:
                setattr(config, name, read(value))
            except ValueError as error:
                raise ConfigError(f"{path}: [{table}] {key} is {value!r}; expected {error}") from None
    return config


def _parse(path: str, data: bytes) -> dict[str, Any]:
    import tomli

    try:
        return tomli.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 at byte {error.start}") from error
    except (tomli.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error


def _nearest(word: str, known: Mapping[str, object]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are: {', '.join(sorted(known))}"
