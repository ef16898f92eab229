"""The roles of a box towards its comm folder: the folder's hub, a guest of another box's folder, or a linked box.

Sources: sot-comm v1, The lock manager; facts 4.1; decisions, One bus out of two systems and sot-comm 1.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

HUB = "hub"
"""Owns the comm folder and writes its lock record."""

GUEST = "guest"
"""Works in a folder that another box owns, and never writes its record."""

OWN_DISK = "local "
"""What the lock manager's identity begins with where the folder is on this machine's own disk."""

ENDPOINT = "SOT_RELAY_ENDPOINT"
"""The variable with the hub's address; a box that has one is part of a topology, named or not (facts 11)."""


class Topology:
    """Whose comm folder it is, as config and environment say. A box's role also depends on the mount, so it is asked
    afresh at each filing.

    :param hub: the declared host of the box that owns the topology's comm folder, or None where none is named.
    :param own_folder: whether this box owns its comm folder whatever its mount (a container's overlay, say).
    :param relayed: whether the hub's address is given (``$SOT_RELAY_ENDPOINT``).
    """

    __slots__ = ("hub", "own_folder", "relayed")

    def __init__(self, hub: str | None = None, own_folder: bool = False, relayed: bool = False) -> None:
        self.hub = hub or None
        self.own_folder = own_folder
        self.relayed = relayed

    def __repr__(self) -> str:
        words = [self.hub_name] if self.configured else ["none"]
        return f"<Topology {' '.join(words + ['own folder'] * self.own_folder)}>"

    @classmethod
    def of(cls, environ: Mapping[str, str], hub: str | None = None, own_folder: bool = False) -> Topology:
        """The topology of the config's values and this environment."""
        return cls(hub, own_folder, bool(environ.get(ENDPOINT)))

    @property
    def configured(self) -> bool:
        """Whether there is one at all. Where there is none, a command stands in for the hub (decisions, sot-comm 1)."""
        return self.hub is not None or self.relayed

    @property
    def hub_name(self) -> str:
        """The topology's hub as a message names it."""
        return self.hub or f"the hub at ${ENDPOINT}"

    def names(self, declared_host: str) -> bool:
        """Whether this host is the topology's hub; hosts compare without case (decisions, Addressing 7)."""
        return self.hub is not None and self.hub.lower() == declared_host.lower()

    def role(self, identity: str | None, declared_host: str) -> str:
        """``HUB`` or ``GUEST``: the first rule of facts 4.1.

        :param identity: of this box's lock manager for the folder's inboxes, as the mount gives it now; None where it
            cannot be told.
        """
        on_own_disk = identity is not None and identity.startswith(OWN_DISK)
        if not self.configured or self.own_folder or on_own_disk or self.names(declared_host):
            return HUB
        return GUEST

    def is_linked(self, identity: str | None, declared_host: str) -> bool:
        """Whether this box is a linked box: the hub of its own folder, and another one is the topology's hub."""
        return self.configured and not self.names(declared_host) and self.role(identity, declared_host) == HUB

    def described(self, identity: str | None, declared_host: str) -> str:
        """The role for a person, a clause without its full stop; ``""`` where no topology is configured."""
        if not self.configured:
            return ""
        if self.role(identity, declared_host) == GUEST:
            if identity is None:
                return f"this box counts as a guest of {self.hub_name}, because its mount cannot be told"
            return f"this box is a guest of {self.hub_name}"
        if self.is_linked(identity, declared_host):
            return f"this box is the hub of its own folder, while {self.hub_name} is the topology's"
        return "this box is the folder's hub"


NO_TOPOLOGY = Topology()
"""One box for itself."""
