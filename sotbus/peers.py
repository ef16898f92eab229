"""The peers file: which nodes this one talks to, what each is to it, and the key that proves each.

    [peers."ann.labhost"]                 # the node's name, <user>.<host>, in quotes
    user = "ann"                          # which part of the name is the user; may be left out where there is one dot
    public_key = "..."                    # 40 characters
    role = "hub"                          # hub: the hub of ours; linked, guest: a box or guest of ours; peer: a peer
    address = "tcp://labhost:7710"        # absent: it dials us

``sotbus keys trust`` writes it (:mod:`sotbus.peers_edit`), and a person may edit it. It is a box's own file, also where
several boxes share a home. Source: decisions, One bus out of two systems and Addressing 7.
"""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass

from sotbus.config_schema import Problem, nearest, not_a_table, quoted, shown
from sotbus.errors import BadRequest, ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from sotbus.toml_lines import Path

TABLE = "peers"

HUB, LINKED, GUEST, PEER = "hub", "linked", "guest", "peer"
ROLES = (HUB, LINKED, GUEST, PEER)
"""What a peer may be to this node: its hub; a linked box of it; a guest of its folder; a peer."""

KEYS = ("user", "public_key", "role", "address")

KEY_CHARACTERS = 40
"""A CURVE key of 32 bytes in Z85 (ZeroMQ RFC 32)."""

Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"

WORD = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
"""Of these are the words of a node's name; dots stand between them (decisions, Addressing 7)."""

MAX_NAME = 255
"""Longest name of a node, as long as a host's full name may be (RFC 1035, 2.3.4)."""

MAX_PORT = 65535

OTHERS_WRITE = 0o022


@dataclass(frozen=True)
class Peer:
    """One node that this one talks to.

    :param user: and :param host: are kept apart; the name is never taken apart to find them.
    :param public_key: proves the node, 40 characters of Z85.
    :param role: what the node is to this one, one of ``ROLES``.
    :param address: ``tcp://HOST:PORT``, where it is dialled; None: it dials us.
    """

    user: str
    host: str
    public_key: str
    role: str = PEER
    address: str | None = None

    @property
    def name(self) -> str:
        """The node's name."""
        return f"{self.user}.{self.host}"

    def is_called(self, node: str) -> bool:
        """Whether a node's name is this one's: the user as it is, the host without case."""
        return node.startswith(f"{self.user}.") and node[len(self.user) + 1 :].lower() == self.host.lower()


def peers_file(config_folder: str, declared_host: str) -> str:
    """The peers file of one box."""
    return f"{config_folder}/{declared_host.replace('/', '_')}.peers.toml"


def name_of(node: str, user: str | None = None) -> tuple[str, str]:
    """User and host of a node's name.

    :param user: which part is the user; needed where the name has more than one dot.

    *Errors*: BadRequest with what was expected.
    """
    if not _is_dotted(node) or "." not in node or len(node) > MAX_NAME:
        raise BadRequest(f"{quoted(node)} is no node's name; expected USER.HOST, of A-Za-z0-9_- with dots between")
    if user is None:
        if node.count(".") > 1:
            raise BadRequest(
                f"{quoted(node)} has several dots, so it does not say where its user ends",
                hint="say which part is the user: --user, or the key user in the peers file",
            )
        user = node.partition(".")[0]
    if not _is_dotted(user) or not node.startswith(f"{user}."):
        raise BadRequest(f"the user of {quoted(node)} is {quoted(user)}; expected the beginning of the name, to a dot")
    return user, node[len(user) + 1 :]


def _is_dotted(text: str) -> bool:
    return all(word and not word.strip(WORD) for word in text.split("."))


def is_public_key(text: str) -> bool:
    """Whether a text is 40 characters of Z85 that stand for 32 bytes: five for each four (RFC 32)."""
    if len(text) != KEY_CHARACTERS or text.strip(Z85):
        return False
    for at in range(0, KEY_CHARACTERS, 5):
        number = 0
        for character in text[at : at + 5]:
            number = 85 * number + Z85.index(character)
        if number >= 1 << 32:
            return False
    return True


def is_address(text: str) -> bool:
    """Whether a text is ``tcp://HOST:PORT``, an IPv6 address in brackets."""
    scheme, _, rest = text.partition("://")
    host, _, port = rest.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    inner = host[1:-1] if bracketed else host
    good_host = 0 < len(inner) <= 253 and inner != "*" and bracketed == (":" in inner)
    if scheme != "tcp" or not good_host or set(inner) & set('/[]@,; \t\r\n\0"\\'):
        return False
    return port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= MAX_PORT


def read(path: str) -> tuple[Peer, ...]:
    """The peers of a file, in its order; none where there is no file.

    *Errors*: :class:`ConfigError` for the first thing that is wrong, with file and line: nothing of such a file counts.
    """
    text = text_of(path)
    peers, problems = judge(path, text) if text else ((), [])
    if problems:
        raise ConfigError(str(problems[0]))
    return peers


def text_of(path: str) -> str:
    """The file's text, ``""`` where there is none. *Errors*: ConfigError."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{path}: is not a regular file")
            if found.st_uid not in (os.geteuid(), 0) or found.st_mode & OTHERS_WRITE:
                raise ConfigError(
                    f"{path}: others may write it, and so say whom to trust",
                    hint=f"see what it says, then: chmod 600 {path}",
                )
            data = file.read()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8 at byte {error.start}") from None


def judge(path: str, text: str) -> tuple[tuple[Peer, ...], list[Problem]]:
    """The peers of a file's text, and everything that is wrong with it, by line; the peers count only if nothing is."""
    import tomli

    from sotbus.toml_lines import lines_of

    try:
        document = tomli.loads(text)
    except (tomli.TOMLDecodeError, RecursionError, ValueError) as error:
        line = getattr(error, "lineno", None)  # tomli has it from 2.2 on
        return (), [Problem(path, line if isinstance(line, int) else None, f"is not TOML: {error}")]
    lines = lines_of(text)
    problems: list[Problem] = []

    def wrong(at: Path, what: str) -> None:
        problems.append(Problem(path, lines.get(at), what))

    for key in document:
        if key != TABLE:
            wrong((key,), f'there is no table or key {quoted(key)} at the top; expected [{TABLE}."USER.HOST"] alone')
    tables = document.get(TABLE, {})
    if not isinstance(tables, dict):
        wrong((TABLE,), f'{TABLE} is {shown(tables)}; expected a table for each peer, [{TABLE}."USER.HOST"]')
        tables = {}
    peers = tuple(peer for name, table in tables.items() if (peer := _peer(name, table, wrong)) is not None)
    _judge_together(peers, wrong)
    problems.sort(key=lambda problem: math.inf if problem.line is None else problem.line)
    return peers, problems


def header(name: str) -> str:
    """The header of a peer's table."""
    return f'[{TABLE}."{name}"]' if _is_dotted(name) else f"[{TABLE}.{quoted(name)}]"


def _peer(name: str, table: Any, wrong: Callable[[Path, str], None]) -> Peer | None:
    """One table as a peer, or None where something in it is wrong."""
    at = (TABLE, name)
    if not isinstance(table, dict):
        wrong(at, not_a_table(header(name), table))
        return None
    if any(isinstance(value, dict) for value in table.values()) and "." not in name:
        wrong(at, f'{header(name)} has tables in it; put the whole name into quotes: [{TABLE}."{name}.HOST"]')
        return None
    good = True
    for key, value in table.items():
        if key not in KEYS:
            wrong((*at, key), f"{header(name)} has no key {quoted(key)}{nearest(key, KEYS)}")
            good = False
        elif not isinstance(value, str):
            said = "cannot be used (its value is not shown)" if key == "public_key" else f"is {shown(value)}"
            wrong((*at, key), f"{header(name)} {key} {said}; expected text in quotes")
            good = False
    if "public_key" not in table and good:
        wrong(at, f"{header(name)} lacks the key 'public_key', as 'sotbus keys show' prints it on that box")
        good = False
    return _made(name, table, wrong) if good else None


def _made(name: str, table: Mapping[str, str], wrong: Callable[[Path, str], None]) -> Peer | None:
    """A peer of texts, once each is right."""
    at = (TABLE, name)
    good = True
    user = host = ""
    try:
        user, host = name_of(name, table.get("user"))
    except BadRequest as error:
        more = '; add user = "..."' if "user" not in table and name.count(".") > 1 else ""
        wrong((*at, "user") if "user" in table else at, f"{header(name)}: {error}{more}")
        good = False
    key = table["public_key"]
    if not is_public_key(key):
        wrong((*at, "public_key"), f"{header(name)} public_key is no key (its value is not shown); {EXPECTED_KEY}")
        good = False
    role = table.get("role", PEER)
    if role not in ROLES:
        wrong((*at, "role"), f"{header(name)} role is {quoted(role)}; expected one of {', '.join(ROLES)}")
        good = False
    address = table.get("address")
    if address is not None and not is_address(address):
        wrong((*at, "address"), f"{header(name)} address is {quoted(address)}; expected {EXPECTED_ADDRESS}")
        good = False
    return Peer(user, host, key, role, address) if good else None


EXPECTED_KEY = "expected 40 characters of Z85, as 'sotbus keys show' prints them on that box"
EXPECTED_ADDRESS = "tcp://HOST:PORT, an IPv6 address in brackets; without the key it dials this box"


def _judge_together(peers: tuple[Peer, ...], wrong: Callable[[Path, str], None]) -> None:
    """What no peer says wrong by itself."""
    for place, peer in enumerate(peers):
        at = (TABLE, peer.name)
        for other in peers[:place]:
            if peer.is_called(other.name):
                wrong(at, f"{header(peer.name)} is {header(other.name)} too: hosts compare without case")
            elif peer.public_key == other.public_key:
                wrong((*at, "public_key"), f"{header(peer.name)} has the public key of {header(other.name)}")
            if peer.role == HUB == other.role:
                wrong((*at, "role"), f"{header(peer.name)} is a hub, and {header(other.name)} is one; there is one hub")
