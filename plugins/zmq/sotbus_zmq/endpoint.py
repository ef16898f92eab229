"""A TCP address as the config and the peers file write it: ``tcp://HOST:PORT``, an IPv6 address in brackets."""

from __future__ import annotations

import ipaddress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

MAX_PORT = 65535


class Endpoint:
    """Where to listen or to dial.

    ``host`` is a name, or an address without brackets; ``port`` is 0 where a listener takes any free one.
    """

    __slots__ = ("host", "port")

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port

    def __repr__(self) -> str:
        return f"<Endpoint {self}>"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @classmethod
    def to_dial(cls, text: str) -> Self:
        """A peer's address. *Errors*: ValueError with what was expected."""
        host, port = _split(text)
        if host in ("*", "") or port == 0:
            raise ValueError("tcp://HOST:PORT, a name or an address and a port from 1 to 65535")
        return cls(host, port)

    @classmethod
    def to_listen(cls, text: str) -> Self:
        """This box's own address, never a name: which address a name stands for may change. *Errors*: ValueError."""
        host, port = _split(text)
        if host != "*" and _version(host) is None:
            raise ValueError("tcp://ADDRESS:PORT, an address of this box (0.0.0.0 or * for all) and a port")
        return cls(host, port)

    @property
    def is_v6(self) -> bool:
        """Whether the host is an IPv6 address."""
        return _version(self.host) == 6


def _split(text: str) -> tuple[str, int]:
    """Host and port. *Errors*: ValueError with what was expected."""
    scheme, _, rest = text.partition("://")
    host, colon, port = rest.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    good_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= MAX_PORT
    good_host = 0 < len(host) <= 253 and bracketed == (":" in host) and not set(host) & set("/[]@,; \t\r\n\0")
    if scheme != "tcp" or not colon or not good_port or not good_host or (bracketed and _version(host) != 6):
        raise ValueError("tcp://HOST:PORT, an IPv6 address in brackets")
    return host, int(port)


def _version(host: str) -> int | None:
    """4 or 6 for an address, None for a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).version
    except ValueError:
        return None
