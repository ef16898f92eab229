"""On which line of a TOML text each table and key stands. The parser tells values only, and a message wants the line.

The scanner reads keys by TOML's rules (https://toml.io, Keys and Table) and passes over values. It is given text that
the parser has accepted already, so it judges nothing: where it loses its way it answers what it has found until then.
"""

from __future__ import annotations

import re

import tomli

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    Path = tuple[str | int, ...]
    """Where a value stands: keys from the top, and a position (from 0) for each list on the way."""

MAX_DEPTH = 64
"""How deep lists and inline tables are followed; no setting lies that deep."""

_KEY = re.compile(r"""[ \t]*(?:([A-Za-z0-9_-]+)|("(?:[^"\\\n]|\\.)*")|'([^'\n]*)')[ \t]*""")
_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_STRING = re.compile(
    r'''"""(?:\\.|[^\\])*?"""(?:"{0,2})|\'\'\'.*?\'\'\'(?:'{0,2})|"(?:[^"\\\n]|\\.)*"|'[^'\n]*\'''', re.DOTALL
)
_BARE = re.compile(r"[^,\]}#\n]+")


class _LostError(Exception):
    """The text is not what the scanner takes it for."""


def lines_of(text: str) -> Mapping[Path, int]:
    """The line, counted from 1, of each table, key and list element that the scanner finds. Never raises.

    A table's line is where its own header stands, or else the first key or header that makes it.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    try:
        scanner.document()
    except (_LostError, RecursionError):
        pass
    return scanner.lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.lines: dict[Path, int] = {}
        self._lists: dict[Path, int] = {}
        """Each ``[[list]]``, and the position of its last element."""
        self._at = 0
        self._line = 1

    def document(self) -> None:
        """All statements: headers, and keys with values. *Errors*: _LostError, RecursionError."""
        table: Path = ()
        while True:
            self._skip(_BLANK)
            if self._at == len(self.text):
                return
            if self._next("[["):
                table = self._element(self._keys())
                self._expect("]]")
            elif self._next("["):
                table = self._inside(self._keys())
                self.lines[table] = self._line  # also where a header further up made the table in passing
                self._expect("]")
            else:
                self._pair(table, 0)

    def _pair(self, table: Path, depth: int) -> None:
        line = self._line
        path = table
        for key in self._keys():
            path += (key,)
            self.lines.setdefault(path, line)
        self._expect("=")
        self._skip(_BLANK)
        self._value(path, depth)

    def _value(self, path: Path, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _LostError
        if self._next("["):
            self._list(path, depth + 1)
        elif self._next("{"):
            self._skip(_BLANK)
            while not self._next("}"):
                self._pair(path, depth + 1)
                self._separator("}")
        elif self.text.startswith(('"', "'"), self._at):
            self._skip(_STRING)
        else:
            self._skip(_BARE)

    def _list(self, path: Path, depth: int) -> None:
        position = 0
        self._skip(_BLANK)
        while not self._next("]"):
            self._note((*path, position))
            self._value((*path, position), depth)
            self._separator("]")
            position += 1

    def _separator(self, end: str) -> None:
        """A comma with the blanks around it; before the end there may be none."""
        self._skip(_BLANK)
        if not self._next(",") and not self.text.startswith(end, self._at):
            raise _LostError
        self._skip(_BLANK)

    def _keys(self) -> list[str]:
        """A key, dotted or not, each part without its quotes."""
        keys = []
        while True:
            found = _KEY.match(self.text, self._at)
            if found is None:
                raise _LostError
            self._at = found.end()
            bare, basic, literal = found.groups()
            keys.append(_unquoted(basic) if basic is not None else bare if bare is not None else literal)
            if not self._next("."):
                return keys

    def _inside(self, keys: list[str]) -> Path:
        """A header's path; a list of tables on the way means its last element."""
        path: Path = ()
        for key in keys:
            path += (key,)
            self._note(path)
            if path in self._lists:
                path += (self._lists[path],)
        return path

    def _element(self, keys: list[str]) -> Path:
        """The path of one more element of a list of tables."""
        of = (*self._inside(keys[:-1]), keys[-1])
        self._lists[of] = self._lists.get(of, -1) + 1
        self._note(of)
        path = (*of, self._lists[of])
        self._note(path)
        return path

    def _note(self, path: Path) -> None:
        self.lines.setdefault(path, self._line)

    def _next(self, text: str) -> bool:
        """Step over a text without newlines where it comes next."""
        if self.text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._next(text):
            raise _LostError

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self.text, self._at)
        if found is None:
            raise _LostError
        self._line += self.text.count("\n", self._at, found.end())
        self._at = found.end()


def _unquoted(basic: str) -> str:
    """The text of a basic string. *Errors*: _LostError."""
    if "\\" not in basic:
        return basic[1:-1]
    try:
        text: str = tomli.loads(f"key = {basic}")["key"]
    except ValueError as error:
        raise _LostError from error
    return text
