"""What may stand in the configuration file: each key with its reader, and the judgement of a whole document.

Imported only where a file says something; a command without settings does without it.
"""

from __future__ import annotations

import math
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from sotbus.toml_lines import Path

    Lines = Mapping[Path, int | None]

MAX_WAIT_S = 86400
"""A day: what is waited for longer is not waited for."""

MAX_SHOWN = 60
"""Characters of a wrong value that a message repeats."""

MAX_HOST_BYTES = 110
"""The longest host name that a box may declare (:func:`sotbus.comm.box.host_problem`)."""

OWN = "own"
"""The one thing that a config may say of whose the comm folder is; otherwise the mount decides."""

NAME_BYTES = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
"""A plugin's name is 1 to 64 of these: it also stands in table headers and messages."""

SECRET_PARTS = ("secret", "password", "passwd", "passphrase", "token", "credential", "private")
SECRET_ENDINGS = ("key", "_pw")
"""Keys whose values are never printed; ``key_file`` names a file, so it is."""


class Problem:
    """One thing that is wrong with a file.

    :param line: counted from 1, or None where it cannot be told.
    """

    __slots__ = ("file", "line", "text")

    def __init__(self, file: str, line: int | None, text: str) -> None:
        self.file = file
        self.line = line
        self.text = text

    def __str__(self) -> str:
        return f"{self.file}: {self.text}" if self.line is None else f"{self.file}:{self.line}: {self.text}"

    def __repr__(self) -> str:
        return f"<Problem {self}>"


def _plugins(value: Any) -> tuple[str, ...]:
    expected = 'a list of plugin names in quotes, each once, such as ["filesystem"]'
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(expected)
    for at, name in enumerate(value):
        if not 0 < len(name) <= 64 or name.strip(NAME_BYTES):
            raise ValueError(f"{expected}; {name[:MAX_SHOWN]!r} is not 1 to 64 of A-Za-z0-9._-")
        if name in value[:at]:
            raise ValueError(f"{expected}; {name!r} stands there twice")
    return tuple(value)


def _host(value: Any) -> str:
    if (
        isinstance(value, str)
        and 0 < len(value.encode("utf-8")) <= MAX_HOST_BYTES
        and not any(c in "/\\\x7f" or ord(c) < 0x20 for c in value)
    ):
        return value
    raise ValueError(
        f"a box's host name in quotes, 1 to {MAX_HOST_BYTES} bytes without slashes and control characters, as "
        "'sotbus config show' on that box gives it in box.host"
    )


def _own_folder(value: Any) -> bool:
    if value == OWN:
        return True
    raise ValueError(f'"{OWN}" (this box owns its comm folder whatever its mount), or no such key: the mount decides')


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


def _seconds(value: Any) -> float:
    if type(value) in (int, float) and 0 < value <= MAX_WAIT_S:
        return float(value)
    raise ValueError(f"a number of seconds above 0, at most {MAX_WAIT_S}")


def _bytes(value: Any) -> int:
    if type(value) is int and 0 < value <= 2**30:
        return value
    raise ValueError("a whole number of bytes from 1 to 1073741824")


TOP = ""
"""The table of the keys that stand above the first header."""

PLUGIN = "plugin"
"""The table of the plugins' own tables, ``[plugin.NAME]``."""

KEYS: Mapping[str, Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    TOP: {"plugins": ("plugins", _plugins)},
    "topology": {"hub": ("hub", _host), "folder": ("own_folder", _own_folder)},
    "box": {"machine_id": ("machine_id", _machine_id)},
    "comm": {
        "home": ("comm_home", _folder),
        "lock_wait_s": ("lock_wait_s", _seconds),
        "inbox_lock_wait_s": ("inbox_lock_wait_s", _seconds),
        "inbox_read_wait_s": ("inbox_read_wait_s", _seconds),
        "mount_wait_s": ("mount_wait_s", _seconds),
    },
    "message": {"max_bytes": ("max_text_bytes", _bytes)},
    "node": {"state": ("node_state", _folder), "socket": ("node_socket", _folder)},
}
"""Table, key: the setting, and its reader, which answers the value or raises ValueError with what was expected."""


def judge(
    file: str, document: Mapping[str, Any], line_of: Callable[[Path], int | None], plugins: tuple[str, ...]
) -> tuple[dict[str, Any], list[Problem]]:
    """A parsed document as settings by their names in Config, and everything that is wrong with it, by line.

    :param line_of: the line of a table or key, asked only for what is wrong.
    :param plugins: the plugins that are loaded where the document does not say.
    """
    values: dict[str, Any] = {}
    problems: list[Problem] = []

    def wrong(path: Path, text: str) -> None:
        problems.append(Problem(file, line_of(path), text))

    def take(table: str, key: str, value: Any, path: Path) -> None:
        name, read = KEYS[table][key]
        try:
            values[name] = read(value)
        except ValueError as error:
            where = f"[{table}] {key}" if table else key
            wrong(path, f"{where} is {shown(value)}; expected {error}")

    for table, keys in document.items():
        if table in KEYS[TOP]:
            take(TOP, table, keys, (table,))
        elif table == PLUGIN:
            continue
        elif table not in KEYS or table == TOP:
            known = [*KEYS[TOP], *(name for name in KEYS if name), PLUGIN]
            wrong((table,), f"there is no table or key {quoted(table)} at the top{_instead(table, TOP, known)}")
        elif not isinstance(keys, dict):
            wrong((table,), not_a_table(f"[{table}]", keys))
        else:
            for key, value in keys.items():
                if key in KEYS[table]:
                    take(table, key, value, (table, key))
                else:
                    instead = _instead(key, table, KEYS[table])
                    wrong((table, key), f"[{table}] has no key {quoted(key)}{instead}")
    if PLUGIN in document:
        readable = "plugins" in values or "plugins" not in document
        _judge_plugin_tables(document[PLUGIN], values.get("plugins", plugins) if readable else None, wrong)
        values["plugin_tables"] = document[PLUGIN]
    problems.sort(key=lambda problem: math.inf if problem.line is None else problem.line)
    return values, problems


def _judge_plugin_tables(
    tables: object, plugins: tuple[str, ...] | None, wrong: Callable[[tuple[str, ...], str], None]
) -> None:
    """The tables' names; their inside is the plugins'.

    :param plugins: the names that may stand, or None where those cannot be told, so that one mistake is said once.
    """
    if not isinstance(tables, dict):
        wrong((PLUGIN,), f"plugin is {shown(tables)}; expected a table for each plugin, [plugin.NAME]")
        return
    for name, table in tables.items():
        header = plugin_header(name)
        if not isinstance(table, dict):
            wrong((PLUGIN, name), not_a_table(header, table))
        elif plugins is not None and name not in plugins:
            wrong(
                (PLUGIN, name),
                f"{header} is of no use: the list plugins does not name {quoted(name)}{nearest(name, plugins)}",
            )


def plugin_header(name: str) -> str:
    """The header of a plugin's table as it is written in the file."""
    bare = name and not name.strip(NAME_BYTES.replace(".", ""))
    return f"[plugin.{name}]" if bare else f"[plugin.{quoted(name)}]"


def not_a_table(header: str, value: object) -> str:
    """What is wrong where a table was expected."""
    return f"{header} is a table, not a {'list' if isinstance(value, list) else 'single value'}"


def is_secret(key: object) -> bool:
    """Whether a key's value must not be printed, by its name."""
    word = str(key).lower()
    return any(part in word for part in SECRET_PARTS) or word.endswith(SECRET_ENDINGS)


def shown(value: Any, *, inside: bool = True) -> str:
    """A value as a message repeats it, cut where it is long.

    :param inside: whether a list's elements are shown.
    """
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        if not inside or not value:
            return "a list" if value else "[]"
        return _cut(f"[{', '.join(shown(one, inside=False) for one in value[:MAX_SHOWN])}]")
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, (bool, int, float)):
        try:
            return _cut(repr(value))
        except ValueError:  # more digits than Python prints (sys.set_int_max_str_digits)
            return "a number of thousands of digits"
    return str(value)


def quoted(text: str) -> str:
    """A text in quotes, cut where it is long."""
    return repr(text) if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]!r}..."


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest known one, or all of them."""
    from difflib import get_close_matches

    words = sorted(known)
    close = get_close_matches(word[:MAX_SHOWN], words, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are: {', '.join(words)}" if words else "; there are none"


def _instead(key: str, table: str, known: Iterable[str]) -> str:
    """Where an unknown key belongs, if another table has it; else the nearest known one."""
    for other, keys in KEYS.items():
        if key in keys and other != table:
            return f"; it belongs to [{other}]" if other else "; it belongs at the top, above the first table"
    return nearest(key, known)
