"""The peers by key and by name: the allow-list, and what is known of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sotbus.api import BadRequest
from sotbus_zmq.endpoint import Endpoint
from sotbus_zmq.key_file import KeyPair, is_key
from sotbus_zmq.peer_state import PeerState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.api import Peer


class PeerBook:
    """The peers of one node.

    :param own_name: the node's own name.
    :param max_in_flight: of each peer.
    """

    def __init__(self, own_name: str, max_in_flight: int) -> None:
        self._own_name = own_name
        self._max_in_flight = max_in_flight
        self._by_key: dict[str, PeerState] = {}
        self._by_name: dict[str, list[PeerState]] = {}

    def __repr__(self) -> str:
        return f"<PeerBook of {self._own_name}: {', '.join(state.name for state in self) or 'nobody'}>"

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[PeerState]:
        return iter(self._by_key.values())

    def find(self, node: str) -> PeerState | None:
        """The peer with this name; host parts compare without case (decisions, Addressing 7). No I/O."""
        return next((state for state in self._by_name.get(node.lower(), ()) if state.peer.is_called(node)), None)

    def of_key(self, public_key: str) -> PeerState | None:
        """The peer that a key proves, or None: it is not on the list."""
        return self._by_key.get(public_key)

    def judge(self, peers: Iterable[Peer], own_key: KeyPair | None) -> tuple[Peer, ...]:
        """The peers, once nothing is wrong with them. *Errors*: BadRequest for the first thing that is."""
        judged = tuple(peers)
        keys: dict[str, str] = {}
        for at, peer in enumerate(judged):
            if any(peer.is_called(other.name) for other in judged[:at]):
                raise BadRequest(f"the peer {peer.name} is listed twice")
            if peer.is_called(self._own_name):
                raise BadRequest(f"the peer {peer.name} is this node itself")
            if not is_key(peer.public_key):
                raise BadRequest(f"the public key of the peer {peer.name} is not 40 characters of Z85")
            if own_key is not None and peer.public_key == own_key.public:
                raise BadRequest(f"the public key of the peer {peer.name} is this node's own")
            if peer.public_key in keys:
                raise BadRequest(f"the peers {keys[peer.public_key]} and {peer.name} have one public key")
            keys[peer.public_key] = peer.name
            if peer.address is not None:
                try:
                    Endpoint.to_dial(peer.address)
                except ValueError as error:
                    raise BadRequest(
                        f"the address of the peer {peer.name} is {peer.address!r}; expected {error}"
                    ) from None
        return judged

    def swap(self, peers: tuple[Peer, ...]) -> tuple[list[PeerState], list[PeerState]]:
        """Take another list, whole; answers who has gone and who is new.

        A peer stays where name, key and address are the same; another key or address makes it a new one.

        :param peers: as :meth:`judge` answered them.
        """
        before = self._by_key
        after: dict[str, PeerState] = {}
        new: list[PeerState] = []
        for peer in peers:
            state = before.get(peer.public_key)
            if state is not None and (state.name, state.peer.address) == (peer.name, peer.address):
                state.peer = peer
            else:
                state = PeerState(peer, self._max_in_flight)
                new.append(state)
            after[peer.public_key] = state
        gone = [state for key, state in before.items() if after.get(key) is not state]
        self._by_key = after
        self._by_name = {}
        for state in after.values():
            self._by_name.setdefault(state.name.lower(), []).append(state)
        return gone, new
