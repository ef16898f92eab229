"""``sotbus keys``: this node's key pair, and the peers that it trusts. Secrets are written to the key file alone."""

from __future__ import annotations

import json
import os
import pwd
import shlex

from sotbus import config as configuration
from sotbus import peers, peers_edit
from sotbus.cli import options, terminal
from sotbus.comm.box import Box as ThisBox
from sotbus.comm.folder import Folder
from sotbus.comm.identity import identity_of
from sotbus.comm.mounts import mount_of
from sotbus.comm.topology import Topology
from sotbus.errors import EX_USAGE, BadRequest, FolderError
from sotbus.peers import Peer
from sotbus.typed_table import typed_table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from sotbus_zmq.settings import Settings

    from sotbus.comm.box import Box
    from sotbus.config import Config

PLUGIN = "zmq"

_KEY = "key:"
"""Stands before a key that begins with a hyphen, which a parser would take for an option."""


class Here:
    """This box's node, and where its files are.

    *Errors*: ConfigError where the config, or the plugin's table in it, cannot be used.
    """

    def __init__(self, box: Box) -> None:
        from sotbus_zmq.key_file import key_path
        from sotbus_zmq.settings import Settings

        path = configuration.find(os.environ, box.declared_host)
        config = configuration.load(path)
        table = config.plugin_tables.get(PLUGIN, {})
        self.settings: Settings = typed_table(path or "the config", PLUGIN, table, config.lines, Settings)
        self.config: Config = config
        self.box = box
        self.user = _user()
        self.host = box.declared_host
        folder = configuration.config_folder(os.environ)
        self.key_file = key_path(self.settings.key_file, folder, self.host)
        self.peers_file = peers.peers_file(folder, self.host)

    @property
    def name(self) -> str:
        return f"{self.user}.{self.host}"

    def trust_words(self, public_key: str) -> list[str]:
        """The command that makes another box trust this node."""
        words = ["sotbus", "keys", "trust", self.name, public_key]
        if self.name.count(".") > 1:
            words += ["--user", self.user]
        role = self.role()
        if role is not None:
            words += ["--role", role]
        if self.settings.listen:
            words += ["--address", self._address(self.settings.listen)]
        return words

    def role(self) -> str | None:
        """What this box is to the others of its topology; None where none is configured, or its folder has no place.

        It depends on the folder's mount, which is told of a folder that is still to be made too.
        """
        config, box = self.config, self.box
        topology = Topology.of(os.environ, config.hub, config.own_folder)
        if not topology.configured:
            return None
        if topology.names(self.host):
            return peers.HUB
        try:
            inboxes = os.path.realpath(Folder.of(os.environ, config.comm_home).inboxes)
        except FolderError:
            return None
        mounts = box.mountinfo()
        identity = identity_of(mount_of(inboxes, mounts), box.machine_id or config.machine_id) if mounts else None
        return peers.LINKED if topology.is_linked(identity, self.host) else peers.GUEST

    def _address(self, listen: str) -> str:
        """Where others dial this box: the address that it listens on, or its host name where it listens on all."""
        for every in ("tcp://0.0.0.0:", "tcp://*:", "tcp://[::]:"):
            if listen.startswith(every):
                return f"tcp://{self.host}:{listen.removeprefix(every)}"
        return listen


def _user() -> str:
    """The user that this process acts for, by name where there is one."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def run_keys(words: list[str], box: Box | None) -> int:
    made = _parser()
    given = options.parse(made, [_KEY + word if _looks_like_an_option(word) else word for word in words])
    if isinstance(given, int):
        return given
    if given.action is None:
        made.print_usage(__import__("sys").stderr)
        return EX_USAGE
    run = {"new": _new, "show": _show, "trust": _trust}[given.action]
    return run(given, Here(box or ThisBox.here(os.environ)))


def _looks_like_an_option(word: str) -> bool:
    return word.startswith("-") and peers.is_public_key(word)


def _parser() -> ArgumentParser:
    made = options.parser(
        "keys",
        "The key pair that proves this node to others over a network, and the nodes that this one trusts. A link needs "
        "both sides: each trusts the other's public key. The key file and the peers file are this host's own, also "
        "where several boxes share a home.",
        "  sotbus keys new                            make this node's key pair; --replace keeps the old one aside\n"
        "  sotbus keys show                           its public key, and what to run on the other box\n"
        "  sotbus keys show --json | jq -r .public_key\n"
        "  sotbus keys trust bob.box2 'KEY'           a peer that dials this box\n"
        "  sotbus keys trust ann.labhost 'KEY' --role hub --address tcp://labhost:7710\n"
        "  sotbus keys trust a.b.box3 'KEY' --user a.b    which part of the name is the user\n"
        "  sotbus keys trust bob.box2 --remove        trust it no more\n\n"
        "A node that runs takes changes on when it reloads (SIGHUP).\n\n"
        "exit status: 0 done, 1 refused, 2 usage",
    )
    actions = made.add_subparsers(dest="action", metavar="{new,show,trust}")
    new = actions.add_parser("new", allow_abbrev=False, help="make the key pair; only the public key is printed")
    new.add_argument("--replace", action="store_true", help="in place of the one there is, which is kept aside")
    show = actions.add_parser(
        "show", allow_abbrev=False, help="the public key, its fingerprint, and what to run on the other box"
    )
    show.add_argument("--json", action="store_true", help="print one object")
    trust = actions.add_parser("trust", allow_abbrev=False, help="trust a node's public key, or no more")
    trust.add_argument("name", metavar="NAME", help="the node's name, USER.HOST, as 'sotbus keys show' prints it there")
    trust.add_argument("key", metavar="PUBLIC_KEY", nargs="?", help="its public key, in single quotes")
    trust.add_argument("--address", metavar="A", help="tcp://HOST:PORT where it is dialled; '' takes it away")
    trust.add_argument("--role", choices=peers.ROLES, help="what it is to this box (peer); hub: the hub of this one")
    trust.add_argument("--user", metavar="U", help="the user in NAME, where NAME has more than one dot")
    trust.add_argument("--replace", action="store_true", help="take another key for a name that is trusted already")
    trust.add_argument("--remove", action="store_true", help="take the node off the list")
    return made


def _new(given: Namespace, here: Here) -> int:
    """Make a key pair. *Errors*: KeyFileError."""
    from sotbus_zmq.key_file import KeyPair, create

    aside = create(here.key_file, KeyPair.new, replace=given.replace)
    if aside is not None:
        terminal.out(f"old key     {terminal.shown(aside)} (kept; every peer must be given the new public key)")
    return _show(given, here)


def _show(given: Namespace, here: Here) -> int:
    """Print what others need. *Errors*: KeyFileError, ConfigError."""
    from sotbus_zmq.key_file import fingerprint, load

    public = load(here.key_file).public
    trusted = peers.read(here.peers_file)
    words = here.trust_words(public)
    if getattr(given, "json", False):
        told = {
            "node": here.name,
            "user": here.user,
            "host": here.host,
            "public_key": public,
            "fingerprint": fingerprint(public),
            "key_file": here.key_file,
            "peers_file": here.peers_file,
            "listen": here.settings.listen,
            "trust": words,
            "peers": [_as_json(peer) for peer in trusted],
        }
        terminal.out(json.dumps(told, ensure_ascii=True))
        return 0
    rows = [
        ("node", here.name),
        ("public key", public),
        ("fingerprint", fingerprint(public)),
        ("key file", here.key_file),
        ("peers file", f"{here.peers_file} ({len(trusted) or 'no'} peer{'' if len(trusted) == 1 else 's'})"),
    ]
    for title, value in rows:
        terminal.out(f"{title:<11} {terminal.shown(value)}")
    terminal.out("on the other box, if it is to trust this one:")
    terminal.out(f"  {terminal.shown(shlex.join(words))}")
    _hint(here)
    return 0


def _hint(here: Here) -> None:
    """What else a link needs that is not there."""
    if PLUGIN not in here.config.plugins:
        terminal.err(f'hint: links need "{PLUGIN}" in the list plugins of {here.config.path or "a config file"}')
    try:
        peers.name_of(here.name, here.user)
    except BadRequest as error:
        terminal.err(f"hint: {terminal.shown(str(error))}; set SOT_SELF_HOST to a plain host name")


def _as_json(peer: Peer) -> dict[str, str | None]:
    return {
        "node": peer.name,
        "user": peer.user,
        "host": peer.host,
        "role": peer.role,
        "address": peer.address,
        "public_key": peer.public_key,
    }


def _trust(given: Namespace, here: Here) -> int:
    """Change the peers file. *Errors*: BadRequest, ConfigError."""
    if given.remove:
        if given.key or given.address or given.role or given.replace:
            return _usage("--remove takes the name alone")
        old = peers_edit.remove(here.peers_file, given.name)
        if old is None:
            raise BadRequest(f"{given.name} is not in {here.peers_file}; nothing was changed")
        terminal.out(f"removed     {old.name}")
        return _done(here)
    if given.key is None:
        return _usage("a PUBLIC_KEY is needed, or --remove")
    old, peer = _wanted(given, here)
    peers_edit.put(here.peers_file, peer)
    terminal.out(f"trusted     {peer.name} ({_described(peer)})")
    if old is not None and old.public_key != peer.public_key:
        terminal.out(f"old key     {_fingerprint(old)}")
    terminal.out(f"fingerprint {_fingerprint(peer)}")
    return _done(here)


def _wanted(given: Namespace, here: Here) -> tuple[Peer | None, Peer]:
    """The peer that is there with this name, and the one that is to be. *Errors*: BadRequest, ConfigError."""
    key = given.key.removeprefix(_KEY)
    if not peers.is_public_key(key):
        raise BadRequest(f"that is no public key; {peers.EXPECTED_KEY}", hint="put it into single quotes")
    if given.address and not peers.is_address(given.address):
        raise BadRequest(f"the address {given.address!r} is none; expected {peers.EXPECTED_ADDRESS}")
    trusted = peers.read(here.peers_file)
    old = next((peer for peer in trusted if peer.is_called(given.name)), None)
    user, host = peers.name_of(given.name, given.user or (old.user if old else None))
    peer = Peer(
        user,
        host,
        key,
        given.role or (old.role if old else peers.PEER),
        (old.address if old else None) if given.address is None else (given.address or None),
    )
    if peer.is_called(here.name):
        raise BadRequest(f"{given.name} is this node itself; nothing was changed")
    if key == _own_public(here):
        raise BadRequest(f"that is this node's own public key, not {given.name}'s; nothing was changed")
    holder = next((other for other in trusted if other.public_key == key and other is not old), None)
    if holder is not None:
        raise BadRequest(f"{holder.name} has that public key already; nothing was changed")
    if old is not None and old.public_key != key and not given.replace:
        raise BadRequest(
            f"{old.name} is trusted already, with another key (fingerprint {_fingerprint(old)}); nothing was changed",
            hint="ask its owner whether the key is new; --replace takes it",
        )
    return old, peer


def _own_public(here: Here) -> str | None:
    """This node's public key, None where it has no key that can be used."""
    from sotbus_zmq.key_file import KeyFileError, load

    try:
        return load(here.key_file).public
    except KeyFileError:
        return None


def _described(peer: Peer) -> str:
    way = f"dialled at {peer.address}" if peer.address else "it dials this box"
    return f"{peer.role}; {way}"


def _fingerprint(peer: Peer) -> str:
    from sotbus_zmq.key_file import fingerprint

    return fingerprint(peer.public_key)


def _done(here: Here) -> int:
    """Say where that stands, and how a node that runs takes it on."""
    terminal.out(f"peers file  {terminal.shown(here.peers_file)}")
    pid = _node_pid(here)
    if pid is not None:
        terminal.out(f"next        kill -HUP {pid}    (this box's node then goes by it; see it with: sotbus node)")
    return 0


def _node_pid(here: Here) -> int | None:
    """The process of this box's node, where one runs."""
    from sotbus.comm.daemon import Daemon, NoDaemonError

    try:
        socket = Daemon.own(os.environ, here.host, configured=here.config.node_socket).path
    except NoDaemonError:
        return None
    if not os.path.exists(socket):
        return None  # the usual case on a box without a node, without the import
    from sotbus.node.checking import running_node

    running = running_node(socket)
    return running.pid if running is not None else None


def _usage(text: str) -> int:
    terminal.err(f"sotbus keys trust: {text}")
    return EX_USAGE
