"""``sotbus init``: make this box ready once, and say everything that was done (decisions, sot-comm 2 and 14)."""

from __future__ import annotations

import os
import shlex
import sys

import sotbus
from sotbus import config as configuration
from sotbus.cli import options, terminal
from sotbus.cli.main import open_client
from sotbus.comm import manager_record
from sotbus.comm.box import first_line
from sotbus.comm.folder import open_regular, remove_quietly, write_whole
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


def run_init(words: list[str], box: Box | None) -> int:
    made = options.parser(
        "init",
        "Make this box ready: a commented config file of its own, the comm folder with its lock record, and wrappers "
        "(comm-send.sh and its siblings) in the folder's bin/. A machine without /etc/machine-id gets an id in the "
        "config file. What is there already is kept; running it again is safe.",
        "  sotbus init",
    )
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    client = open_client(box, new_config=True)
    found = configuration.find(os.environ, client.box.declared_host)
    _write_config(found or configuration.host_file(os.environ, client.box.declared_host), client)
    client.ensure()
    terminal.out(f"folder   {client.folder.root}")
    if warning := client.folder.tighten():
        terminal.err(terminal.shown(warning))
    status = 0
    if client.stand_in:
        try:
            done = manager_record.establish(client.folder, client.box, replace=True)
            terminal.out(f"record   {client.folder.manager_record} ({done})")
        except FilingFailed as error:
            status = terminal.tell(error, "FAILED: ")
    else:
        terminal.out("record   left to the hub: SOT_RELAY_ENDPOINT names one")
    _write_wrappers(client)
    return status


def _write_config(path: str, client: Client) -> None:
    """The config file where there is none, with a new machine id where this machine has none at all."""
    new_id = None if client.box.machine_id else os.urandom(16).hex()
    if os.path.lexists(path):
        terminal.out(f"config   {path} (kept)")
        if new_id:
            terminal.err(
                f"hint: this machine has no machine id, so no mail can be filed here; put this into {path}:\n"
                f'[box]\nmachine_id = "{new_id}"'
            )
        return
    text = template("single-box.toml")
    if new_id:
        commented = '# machine_id = "0123456789abcdef0123456789abcdef"'
        text = text.replace(commented, f'machine_id = "{new_id}"')
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), 0o700, exist_ok=True)
        _write_file(path, text, 0o600, replace=False)
    except OSError as error:
        raise ConfigError(f"FAILED: {path} cannot be written: {error.strerror or error}") from error
    terminal.out(f"config   {path} (written)")
    if new_id:
        client.box.machine_id = new_id
        terminal.out(f"machine  this machine has no /etc/machine-id; {new_id} was made and put into {path}")


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
    """``bin/comm-*.sh`` and ``VERSION``, unless another product's are there."""
    folder = client.folder
    theirs = _other_product(folder.bin, folder.root + "/VERSION")
    if theirs:
        terminal.out(f"wrappers left alone: {theirs} is another product's")
        return
    command = f"{shlex.quote(sys.executable)} -P -m sotbus comm"
    try:
        os.makedirs(folder.bin, 0o755, exist_ok=True)
        for name in WRAPPED:
            text = f'#!/bin/sh\n{MARK}\nexec {command} {name} "$@"\n'
            _write_file(f"{folder.bin}/comm-{name}.sh", text, 0o755)
        _write_file(folder.root + "/VERSION", f"{STAMP}{sotbus.__version__}\n", 0o644)
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
    temp = f"{path}.tmp.{os.getpid()}"
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
