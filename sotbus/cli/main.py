"""The entry point: which command, in which module. Nothing else is imported before that is known."""

from __future__ import annotations

import os
import sys

from sotbus.errors import EX_FAILED, EX_USAGE, SotbusError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from sotbus.comm.box import Box
    from sotbus.comm.client import Client

COMMANDS = {
    "join": ("membership", "take a handle, so that mail can reach this session"),
    "leave": ("membership", "give the handle back"),
    "send": ("send", "file a message in another session's mailbox"),
    "poll": ("poll", "show new messages and move the cursor past them"),
    "unread": ("poll", "count messages without reading them"),
    "list": ("listing", "who is there, live or not, and what they do"),
    "whoami": ("listing", "which handle this session has, and where its files are"),
    "init": ("init", "write a config file, the wrappers in bin/, and a machine id where there is none"),
    "completion": ("completion", "print a completion script for bash, zsh or fish"),
}
"""Command: the module in this package that has ``run_<command>``, and one line of help."""

COMM_COMMANDS = ("join", "leave", "send", "poll", "unread", "list", "whoami", "init")
"""Commands that ``sotbus comm`` has too, the same ones."""


def usage() -> str:
    """The text of ``sotbus --help``."""
    lines = [
        "usage: sotbus COMMAND [ARGUMENT ...]",
        "",
        "A durable message bus for the sessions on this machine: 'filed' means that the message is on disk.",
        "",
        "commands:",
        *(f"  {name:<11} {line}" for name, (_, line) in COMMANDS.items()),
        "  comm        the sot-comm commands under their own name: sotbus comm send ...",
        "",
        "examples:",
        "  sotbus join                     take a handle named after this project and host",
        "  sotbus list                     see who is there",
        "  sotbus send @api-vm 'done'      write to a session",
        "  sotbus poll                     read your mail",
        "",
        "'sotbus COMMAND --help' says more. 'sotbus --version' prints the version.",
        "exit status: 0 done, 1 refused or FAILED, 2 usage, 3 a join was refused a slot, 75 try again",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, box: Box | None = None) -> int:
    """Run one command; answers the exit status.

    :param argv: the arguments, without the program's name; the process's own by default.
    :param box: this machine, where it is not to be read (tests that lay a folder on an unusual mount).
    """
    os.umask(0o077)
    words = list(sys.argv[1:] if argv is None else argv)
    commands: Sequence[str] = tuple(COMMANDS)
    if words[:1] == ["comm"]:
        words, commands = words[1:], COMM_COMMANDS
    name = words[0] if words else "--help"
    try:
        if name in ("--help", "-h", "help"):
            return _say(usage(), 0 if words else EX_USAGE)
        if name in ("--version", "-V"):
            import sotbus

            return _say(f"sotbus {sotbus.__version__}", 0)
        if name not in commands:
            return _unknown(name, commands)
        return _run(name, words[1:], box)
    except (SotbusError, OSError) as error:
        return _failed(name, error)
    except KeyboardInterrupt:
        return 130


def _run(name: str, words: list[str], box: Box | None) -> int:
    """Import the command's module and call it."""
    module = COMMANDS[name][0]
    loaded = __import__(f"sotbus.cli.{module}", fromlist=["run"])
    status: int = getattr(loaded, f"run_{name}")(words, box)
    if sys.stdout is not None:
        sys.stdout.flush()
    return status


def _say(text: str, status: int) -> int:
    from sotbus.cli import terminal

    terminal.out(text)
    terminal.flush()
    return status


def _failed(name: str, error: SotbusError | OSError) -> int:
    """Say what ended the command; answers the exit status. A closed pipe is nobody's mistake."""
    from sotbus.cli import terminal

    if isinstance(error, SotbusError):
        return terminal.tell(error)
    if not isinstance(error, BrokenPipeError):
        terminal.err(f"sotbus {name}: {error}")
    terminal.silence()
    return EX_FAILED


def _unknown(name: str, commands: Sequence[str]) -> int:
    from difflib import get_close_matches

    close = get_close_matches(name, commands, n=1)
    hint = f"did you mean '{close[0]}'?" if close else "'sotbus --help' lists the commands"
    from sotbus.cli import terminal

    terminal.err(f"sotbus: there is no command {name!r}; {hint}")
    return EX_USAGE


def open_client(box: Box | None = None, *, new_config: bool = False) -> Client:
    """The client that a command works with: config, machine, folder and bounds, as the environment says.

    :param new_config: whether the file that ``$SOTBUS_CONFIG`` names may be missing, because it is to be written.

    *Errors*: ConfigError, FolderError.
    """
    from sotbus import config as configuration
    from sotbus.cli import terminal
    from sotbus.comm.box import Box as ThisBox
    from sotbus.comm.client import Client as CommClient
    from sotbus.comm.folder import Folder
    from sotbus.comm.settings import Settings

    environ = os.environ
    here = box or ThisBox.here(environ)
    path = configuration.find(environ, here.declared_host)
    config = configuration.load(None if new_config and path is not None and not os.path.lexists(path) else path)
    if here.machine_id is None:
        here.machine_id = config.machine_id
    return CommClient(
        Folder.of(environ, config.comm_home),
        here,
        environ,
        Settings.of(environ, config.max_text_bytes),
        notify=lambda line: terminal.err(terminal.shown(line)),
        stand_in=not environ.get("SOT_RELAY_ENDPOINT"),
    )
