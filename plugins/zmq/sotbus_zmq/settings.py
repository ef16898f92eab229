"""The table ``[plugin.zmq]``."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sotbus_zmq.endpoint import Endpoint


@dataclass(frozen=True)
class Settings:
    """How this box's node listens and how it keeps its links.

    :param listen: ``tcp://ADDRESS:PORT`` of the listener, ADDRESS of this box, ``*`` for all; None: no listener at all.
    :param key_file: this node's key pair; None: ``<host>.key`` in the config folder.
    :param heartbeat_s: how long a peer may be silent before it is asked for a sign of life, in seconds.
    :param dead_after_s: how long a peer may be silent before its connection is given up, in seconds.
    :param reconnect_min_s: wait before the first dial after a connection was lost, in seconds; it doubles each time.
    :param reconnect_max_s: the longest such wait.
    :param good_after_s: a connection that lasted this long starts the waits over, in seconds.
    """

    listen: str | None = None
    key_file: str | None = None
    heartbeat_s: float = 2.0
    dead_after_s: float = 6.0
    reconnect_min_s: float = 1.0
    reconnect_max_s: float = 30.0
    good_after_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "reconnect_min_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name):g}; expected more than 0")
        for name, least in (("dead_after_s", "heartbeat_s"), ("reconnect_max_s", "reconnect_min_s")):
            if getattr(self, name) < getattr(self, least):
                raise ValueError(
                    f"{name} is {getattr(self, name):g}; expected at least {least}, {getattr(self, least):g}"
                )
        if self.dead_after_s == self.heartbeat_s:
            raise ValueError(f"dead_after_s is {self.dead_after_s:g}; expected more than heartbeat_s")
        if self.good_after_s < 0:
            raise ValueError(f"good_after_s is {self.good_after_s:g}; expected 0 or more")
        if self.key_file is not None and not os.path.isabs(os.path.expanduser(self.key_file)):
            raise ValueError(f'key_file is {self.key_file!r}; expected an absolute path, or one that begins with "~"')
        if self.listen is not None:
            try:
                Endpoint.to_listen(self.listen)
            except ValueError as error:
                raise ValueError(f"listen is {self.listen!r}; expected {error}") from None
