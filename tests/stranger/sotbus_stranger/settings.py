"""The table ``[plugin.stranger]``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The spool folder that this box and its peers see, the peers' hosts, and how often it is looked at, in seconds."""

    folder: str = ""
    peers: tuple[str, ...] = ()
    look_every_s: float = 0.02

    def __post_init__(self) -> None:
        if self.look_every_s <= 0:
            raise ValueError(f"look_every_s is {self.look_every_s:g}; expected more than 0")
        for peer in self.peers:
            if not peer or peer.startswith(".") or "/" in peer:
                raise ValueError(f"peers has {peer!r}, which is no host's name")
