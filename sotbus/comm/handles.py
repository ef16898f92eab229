"""Handles: the rule for a name, and the name derived from a project and a host (sot-comm v1, Handles; facts 10)."""

from __future__ import annotations

import os
from functools import lru_cache

from sotbus.errors import BadHandle, SotbusError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

HANDLE_BYTES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
MAX_BYTES = 64
FOLDER_BYTES = 20
HOST_BYTES = 12


def is_handle(text: str) -> bool:
    """1 to 64 bytes of ``A-Za-z0-9._-``, no ``..``, no leading ``-``."""
    if not text.isascii() or not 0 < len(text) <= MAX_BYTES:
        return False
    return not text.encode().translate(None, HANDLE_BYTES) and ".." not in text and text[0] != "-"


@lru_cache(maxsize=64)
def check(text: str) -> str:
    """The handle itself. :raises BadHandle: it is none; the text quotes it, the hint has the rule."""
    if is_handle(text):
        return text
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in quoted)
    raise BadHandle(f'not a handle: "{shown}"', hint="a handle is 1 to 64 of A-Za-z0-9._- with no .. and no leading -")


def component(text: str, max_bytes: int) -> str:
    """A folder or host name as part of a handle, clamped to ``max_bytes``; never empty."""
    dashed = bytes(byte if byte in HANDLE_BYTES else 0x2D for byte in os.fsencode(text)).decode("ascii")
    while "--" in dashed:
        dashed = dashed.replace("--", "-")
    dashed = dashed.removeprefix("-").removesuffix("-")
    return dashed[:max_bytes].removesuffix("-") or "x"


def short_hash(text: str) -> str:
    """The first six hex digits of the text's SHA-256."""
    import hashlib

    return hashlib.sha256(os.fsencode(text)).hexdigest()[:6]


def tiers(root: str, raw_host: str) -> tuple[str, str, str]:
    """The three names a project root may have, in the order they are tried.

    :param root: the canonical project root.
    :param raw_host: first label of the host name, case kept.
    """
    host = component(raw_host, HOST_BYTES)
    if host != raw_host:
        host += "-" + short_hash(raw_host)
    folder = component(os.path.basename(root), FOLDER_BYTES)
    parent = component(os.path.basename(os.path.dirname(root)), FOLDER_BYTES)
    return f"{folder}-{host}", f"{folder}-{parent}-{host}", f"{folder}-{short_hash(root)}-{host}"


def derive(root: str, raw_host: str, agents: dict[str, object]) -> str:
    """The first of the three names that nobody, or this very root, holds.

    *Errors*: :class:`SotbusError` where all three are another root's; a name must be given then.
    """
    for name in tiers(root, raw_host):
        if name not in agents or _root_of(agents[name]) == root:
            return name
    raise SotbusError(
        f"every name derived from {root} is held by another project; nothing was written",
        hint="choose one: sotbus join --name NAME",
    )


def beside(name: str, free: Callable[[str], bool]) -> str:
    """``name``, else ``name-2``, ``name-3``, ...: the first that is free (decisions, sot-comm 22)."""
    candidate, number = name, 1
    while not free(candidate):
        number += 1
        ending = f"-{number}"
        candidate = name[: MAX_BYTES - len(ending)] + ending
    return candidate


def _root_of(entry: object) -> object:
    return entry.get("root") if isinstance(entry, dict) else None
