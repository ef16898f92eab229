"""``sotbus init``: make this box ready once, and say everything that was done (decisions, sot-comm 2 and 14)."""

from __future__ import annotations

import os
import re
import shlex
import sys

import sotbus
from sotbus import config as configuration
from sotbus.cli import options, terminal
from sotbus.cli.main import open_client
from sotbus.comm import manager_record
from sotbus.comm.box import first_line, host_problem
from sotbus.comm.folder import open_regular, remove_quietly, write_whole
from sotbus.comm.topology import GUEST
from sotbus.errors import ConfigError, FilingFailed, FolderError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.comm.box import Box
    from sotbus.comm.client import Client

WRAPPED = ("join", "leave", "send", "poll", "unread", "list")
"""Commands that get a ``comm-<command>.sh`` in the comm folder's ``bin/``."""

MARK = "# Written by sotbus init."
STAMP = "sotbus "
"""How our wrappers and our VERSION are known again."""

_COMMENTED_ID = re.compile(r'^#[ \t]*machine_id[ \t]*=[ \t]*"[0-9a-f]{32}"', re.MULTILINE)
_BOX_HEADER = re.compile(r"^[ \t]*\[[ \t]*box[ \t]*\][^\r\n]*", re.MULTILINE)
"""Where a config file may take a machine id: in place of the commented example, or after the table's header."""


def run_init(words: list[str], box: Box | None) -> int:
    made = options.parser(
        "init",
        "Make this box ready: a commented config file of its own, the comm folder with its lock record, and wrappers "
        "(comm-send.sh and its siblings) in the folder's bin/. A machine without /etc/machine-id gets an id in the "
        "config file of this host. Where the config names another box as the folder's hub, the record is left to that "
        "one. What is there already is kept; running it again is safe.",
        "  sotbus init",
    )
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    client = open_client(box, new_config=True)
    problem = host_problem(client.box.declared_host)
    if problem:
        raise FolderError(f"{problem}, so it cannot name a file", hint="set SOT_SELF_HOST to a plain host name")
    _write_config(client)
    client.ensure()
    terminal.out(f"folder   {client.folder.root}")
    if warning := client.folder.tighten():
        terminal.err(terminal.shown(warning))
    status = _write_record(client)
    _write_wrappers(client)
    return status


def _write_record(client: Client) -> int:
    """The lock record as this box's role has it; answers the exit status.

    The folder's hub makes or renews it. A guest leaves it alone, and is told what its hub has to do, if anything.
    """
    folder, box, topology = client.folder, client.box, client.topology
    try:
        done = manager_record.establish(folder, box, replace=True, topology=topology)
    except FilingFailed as error:
        return terminal.tell(error, "FAILED: ")
    own = manager_record.own_identity(folder, box)
    if done != manager_record.LEFT:
        role = topology.described(own, box.declared_host)
        terminal.out(f"record   {folder.manager_record} ({done}{'; ' if role else ''}{role})")
        return 0
    hint = ""
    try:
        record = manager_record.read(folder)
    except OSError as error:
        remedy = manager_record.mend(topology, GUEST, "look at it")
        hint = f"{folder.manager_record} cannot be read: {error.strerror or error}; {remedy}"
    else:
        if not manager_record.allows(record, own):
            hint = manager_record.guest_reason(folder, own, record, topology)
    may = "" if hint else "; this box may append under it"
    terminal.out(f"record   {folder.manager_record} (left to {topology.hub_name}{may})")
    if hint:
        terminal.err(f"hint: {terminal.shown(hint)}")
    return 0


def _write_config(client: Client) -> None:
    """The config file where there is none, with a new machine id where this machine has none at all.

    A file that other boxes with this home may read too is kept as it is: an id goes into the file of this host alone
    (decisions, A shared home).
    """
    own = configuration.host_file(os.environ, client.box.declared_host)
    path = configuration.find(os.environ, client.box.declared_host) or own
    new_id = None if client.box.machine_id else os.urandom(16).hex()
    if new_id and os.path.basename(own) == configuration.COMMON_LEAF:
        raise ConfigError(
            f"FAILED: this machine has no machine id, and the file of a host of this name, {own}, is other boxes' too",
            hint="set SOT_SELF_HOST to another name",
        )
    for_path = None if _may_be_shared(path, own) else new_id
    if os.path.lexists(path):
        terminal.out(f"config   {path} (kept)")
        if for_path:
            _propose(for_path, f"put this into {path}")
    else:
        text = template("single-box.toml")
        _write_new(path, (_with_machine_id(text, for_path) or text) if for_path else text)
        terminal.out(f"config   {path} (written)")
        if for_path:
            _take_id(client, for_path, path)
    if new_id and not for_path:
        _write_own(client, new_id, path, own)


def _may_be_shared(path: str, own: str) -> bool:
    """Whether other boxes with this home may read a file too: any in the config folder but the file of this host."""
    folder, leaf = os.path.split(os.path.abspath(path))
    return leaf != os.path.basename(own) and os.path.realpath(folder) == os.path.realpath(os.path.dirname(own))


def _write_own(client: Client, new_id: str, path: str, own: str) -> None:
    """The file of this host, a copy of the shared one with a new machine id in it, where it will be read."""
    with open(path, encoding="utf-8", newline="") as file:
        text = _with_machine_id(file.read(), new_id)
    if text is None or os.environ.get("SOTBUS_CONFIG") or os.path.lexists(own):
        _propose(new_id, f"other boxes may read {path} too, so put this into {own}, and let this box read that one")
        return
    _write_new(own, text)
    terminal.out(f"config   {own} (written: a copy of {path}, which it goes before; this box reads that one no longer)")
    _take_id(client, new_id, own)


def _with_machine_id(text: str, new_id: str) -> str | None:
    """A config file's text with a machine id added and nothing else changed; None where no added line does that."""
    import tomli

    wanted = tomli.loads(text)
    wanted.setdefault("box", {})["machine_id"] = new_id
    line = f'machine_id = "{new_id}"'
    for changed in (
        _COMMENTED_ID.sub(line, text, count=1),
        _BOX_HEADER.sub(lambda header: f"{header[0]}\n{line}", text, count=1),
        f"{text}\n[box]\n{line}\n",
    ):
        try:
            if tomli.loads(changed) == wanted:
                return changed
        except tomli.TOMLDecodeError:
            continue
    return None


def _propose(new_id: str, what: str) -> None:
    """Ask the person to put an id into a file that is not init's to change."""
    terminal.err(
        f'hint: this machine has no machine id, so no mail can be filed here; {what}:\n[box]\nmachine_id = "{new_id}"'
    )


def _take_id(client: Client, new_id: str, path: str) -> None:
    """Go on with an id that has just been written, and say so."""
    client.box.machine_id = new_id
    terminal.out(f"machine  this machine has no /etc/machine-id; {new_id} was made and put into {path}")


def _write_new(path: str, text: str) -> None:
    """A config file that is not there yet. *Errors*: ConfigError."""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), 0o700, exist_ok=True)
        _write_file(path, text, 0o600, replace=False)
    except OSError as error:
        raise ConfigError(f"FAILED: {path} cannot be written: {error.strerror or error}") from error


def template(name: str) -> str:
    """A file of ``conf/``: the installed copy, else the source tree's. *Errors*: FolderError where there is neither."""
    package = os.path.dirname(os.path.abspath(sotbus.__file__))
    for folder in (f"{package}/conf", f"{os.path.dirname(package)}/conf"):
        try:
            with open(f"{folder}/{name}", encoding="utf-8") as file:
                return file.read()
        except FileNotFoundError:
            continue
    raise FolderError(f"FAILED: conf/{name} is missing from this installation of sotbus")


def _write_wrappers(client: Client) -> None:
    """``bin/comm-*.sh`` and ``VERSION``, unless another product's are there; a guest keeps those that its hub wrote."""
    folder = client.folder
    guest = manager_record.role_of(folder, client.box, client.topology) == GUEST
    theirs = _other_product(folder.bin, folder.root + "/VERSION")
    if theirs:
        terminal.out(f"wrappers left alone: {theirs} is another product's")
        return
    command = f"{shlex.quote(sys.executable)} -P -m sotbus comm"
    files = {
        f"{folder.bin}/comm-{name}.sh": (f'#!/bin/sh\n{MARK}\nexec {command} {name} "$@"\n', 0o755) for name in WRAPPED
    }
    files[f"{folder.root}/VERSION"] = (f"{STAMP}{sotbus.__version__}\n", 0o644)
    try:
        os.makedirs(folder.bin, 0o755, exist_ok=True)
        for path, (text, mode) in files.items():
            if not (guest and os.path.lexists(path)):
                _write_file(path, text, mode)
    except OSError as error:
        raise FolderError(f"FAILED: the wrappers in {folder.bin} cannot be written: {error.strerror}") from error
    terminal.out(f"wrappers {folder.bin}/comm-{{{','.join(WRAPPED)}}}.sh")


def _other_product(folder: str, version: str) -> str:
    """The first wrapper or VERSION that is not ours, or ``""``."""
    stamp = first_line(version)
    if stamp is not None and not stamp.startswith(STAMP):
        return version
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return ""
    for name in names:
        if name.startswith("comm-"):
            try:
                fd = open_regular(f"{folder}/{name}")
                try:
                    ours = MARK.encode() in os.read(fd, 4096)
                finally:
                    os.close(fd)
            except OSError:
                ours = False
            if not ours:
                return f"{folder}/{name}"
    return ""


def _write_file(path: str, text: str, mode: int, *, replace: bool = True) -> None:
    """A small file put in place whole, by a rename, or by a link that replaces nothing.

    *Errors*: OSError; an old file stands then.
    """
    temp = f"{path}.tmp.{os.getpid()}.{os.urandom(4).hex()}"  # other boxes have the same pids
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        try:
            os.fchmod(fd, mode)
            write_whole(fd, text.encode("utf-8"))
            os.fsync(fd)
        finally:
            os.close(fd)
        if replace:
            os.rename(temp, path)
        else:
            os.link(temp, path)
            os.unlink(temp)
    except BaseException:
        remove_quietly(temp)
        raise
