"""A plugin's own table, ``[plugin.NAME]``, as an instance of the plugin's settings type.

Imported only where a plugin has settings: dataclasses and typing are slow to import.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sotbus.config_schema import PLUGIN, Problem, is_secret, nearest, plugin_header, quoted, shown
from sotbus.errors import ConfigError

if typing.TYPE_CHECKING:
    from sotbus.config_schema import Lines

Made = TypeVar("Made")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_whole(value: object) -> bool:
    return type(value) is int


def _is_number(value: object) -> bool:
    """A finite number that a float can hold; TOML has ``inf`` and ``nan``, which no setting means."""
    if type(value) is int:
        return abs(value) < 2**1023
    return type(value) is float and math.isfinite(value)


def _is_truth(value: object) -> bool:
    return isinstance(value, bool)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_KINDS: Mapping[object, tuple[str, Callable[[object], bool], Callable[[Any], object]]] = {
    str: ("text in quotes", _is_text, str),
    int: ("a whole number", _is_whole, int),
    float: ("a number", _is_number, float),
    bool: ("true or false", _is_truth, bool),
    list[str]: ("a list of texts in quotes", _is_texts, list),
    tuple[str, ...]: ("a list of texts in quotes", _is_texts, tuple),
}
"""A field's type: what is expected, whether a value is that, and the value as the field has it."""


def typed_table(path: str, name: str, table: Mapping[str, object], lines: Lines, cls: type[Made]) -> Made:
    """A plugin's table as its settings.

    :param path: the configuration file, for messages.
    :param name: the plugin's name.
    :param table: the raw table, ``config.plugin_tables[name]``; empty for a plugin without one.
    :param lines: ``config.lines``.
    :param cls: a frozen dataclass; each field is ``str``, ``int``, ``float``, ``bool``, ``list[str]``,
        ``tuple[str, ...]``, or one of these ``| None``. A field without a default must be in the table. Its
        ``__post_init__`` may raise ValueError with what is wrong.

    *Errors*: :class:`ConfigError` for the first thing that is wrong; :class:`TypeError` where ``cls`` is no such type,
    which is the plugin author's mistake.
    """
    made, problems = judge_table(path, name, table, lines, cls)
    if made is None:
        raise ConfigError(str(problems[0]))
    return made


def judge_table(
    path: str, name: str, table: Mapping[str, object], lines: Lines, cls: type[Made]
) -> tuple[Made | None, list[Problem]]:
    """A plugin's table as its settings, or None and everything that is wrong with it, by line.

    The parameters are those of :func:`typed_table`. *Errors*: :class:`TypeError` for a ``cls`` of another kind.
    """
    fields = _fields(cls)
    header = plugin_header(name)
    problems: list[Problem] = []
    values: dict[str, object] = {}

    def wrong(text: str, *key: str) -> None:
        problems.append(Problem(path, lines.get((PLUGIN, name, *key)), f"{header} {text}"))

    for key, value in table.items():
        if key not in fields:
            wrong(f"has no key {quoted(key)}{nearest(key, fields)}", key)
            continue
        kinds, _ = fields[key]
        fitting = next((kind for kind in kinds if _KINDS[kind][1](value)), None)
        if fitting is None:
            expected = " or ".join(_KINDS[kind][0] for kind in kinds)
            is_wrong = "cannot be used (its value is not shown)" if is_secret(key) else f"is {shown(value)}"
            wrong(f"{key} {is_wrong}; expected {expected}", key)
        else:
            values[key] = _KINDS[fitting][2](value)
    for key, (kinds, required) in fields.items():
        if required and key not in table:
            wrong(f"lacks the key {key!r}; expected {' or '.join(_KINDS[kind][0] for kind in kinds)}")
    if not problems:
        try:
            return cls(**values), []
        except ValueError as error:
            wrong(str(error))
    problems.sort(key=lambda problem: math.inf if problem.line is None else problem.line)
    return None, problems


def _fields(cls: type[Any]) -> dict[str, tuple[tuple[object, ...], bool]]:
    """Each field: the kinds it takes, and whether it must be given. *Errors*: TypeError."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__qualname__} is not a dataclass, so it cannot be a plugin's settings")
    hints = typing.get_type_hints(cls)
    answer: dict[str, tuple[tuple[object, ...], bool]] = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        hint = hints[field.name]
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = tuple(kind for kind in (typing.get_args(hint) if union else (hint,)) if kind is not types.NoneType)
        if not kinds or any(kind not in _KINDS for kind in kinds):
            raise TypeError(
                f"{cls.__qualname__}.{field.name} is {hint}; a plugin's setting is str, int, float, bool, list[str], "
                "tuple[str, ...], or one of these | None"
            )
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        answer[field.name] = (kinds, required)
    return answer
