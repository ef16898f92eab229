"""The entry point: which command, in which module. Nothing else is imported before that is known."""

from __future__ import annotations

import os
import sys

from sotbus.cli.watchdog import watchdog
from sotbus.errors import EX_FAILED, EX_TRY_AGAIN, EX_USAGE, SotbusError, UsageError

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
    "status": ("upkeep", "say what this session is doing: working, blocked, idle or done"),
    "log": ("upkeep", "show past messages; the cursor stays"),
    "watch": ("watch", "show messages as they are filed; the cursor stays"),
    "prune": ("upkeep", "make room in mailboxes: a dry run first"),
    "doctor": ("doctor", "say whether this box can do its job, and for each fault the remedy"),
    "serve": ("serve", "run this box's node: links to other boxes, and mail for sessions that may not file it"),
    "node": ("node", "what this box's node does: links, filings, queues"),
    "keys": ("keys", "this box's key, and the nodes that it trusts"),
    "plugins": ("plugins", "which plugins are loaded, from where, with which hooks"),
    "config": ("config", "check the config file, or show every setting and where it comes from"),
    "completion": ("completion", "print a completion script for bash, zsh or fish"),
}
"""Command: the module in this package that has ``run_<command>``, and one line of help."""

COMM_COMMANDS = ("join", "leave", "send", "poll", "unread", "list", "whoami", "init", "status", "log", "watch", "prune")
"""Commands that ``sotbus comm`` has too, the same ones."""

COMM_HELP = "the sot-comm commands under their own name"

UNBOUNDED = ("watch", "serve")
"""Commands that go on for ever."""

LOCK_WAITS = {"send": "inbox_lock_wait_s", "poll": "inbox_read_wait_s", "unread": "inbox_read_wait_s"}
"""The longest wait for a lock that belongs to a command; of every other one it is the registry's."""

READERS = ("poll", "unread", "log")
"""Commands whose exit 75 says in the page's words, which name another program, that the inbox is being written."""

TEXT_COMMANDS = ("send",)
"""Commands whose words are text from the first one that is no option: ``--config`` counts only before it."""


def usage(program: str = "sotbus", commands: Sequence[str] = tuple(COMMANDS)) -> str:
    """The text of ``sotbus --help``, and of ``sotbus comm --help``."""
    lines = [
        f"usage: {program} [--config FILE] COMMAND [ARGUMENT ...]",
        "",
        "A durable message bus for the sessions on this machine: 'filed' means that the message is on disk.",
        "",
        "commands:",
        *(f"  {name:<11} {COMMANDS[name][1]}" for name in commands),
        *((f"  comm        {COMM_HELP}: sotbus comm send ...",) if program == "sotbus" else ()),
        "",
        "options:",
        "  --config FILE   read this config file; it may stand before or after the command",
        "",
        "examples:",
        f"  {program + ' join':<30}  take a handle named after this project and host",
        f"  {program + ' list':<30}  see who is there",
        f"""  {program + " send @api-vm 'done'":<30}  write to a session""",
        f"  {program + ' poll':<30}  read your mail",
        "",
        f"'{program} help COMMAND' or '{program} COMMAND --help' says more. 'sotbus --version' prints the version.",
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
    program, commands = "sotbus", tuple(COMMANDS)
    name = ""
    try:
        words, file = _take_config(words, leading=True)
        words = _take_help(words)
        if words[:1] == ["comm"]:
            words, nearer = _take_config(words[1:], leading=True)
            words = _take_help(words)
            program, commands, file = "sotbus comm", COMM_COMMANDS, nearer or file
        name = words[0] if words else "--help"
        if name in ("--help", "-h", "help"):
            return _say(usage(program, commands), 0 if words else EX_USAGE)
        if name in ("--version", "-V"):
            import sotbus

            return _say(f"sotbus {sotbus.__version__}", 0)
        if name not in commands:
            return _unknown(name, program, commands)
        words, nearer = _take_config(words[1:], leading=name in TEXT_COMMANDS)
        status = _run(name, words, box, nearer or file)
        return _again(name) if status == EX_TRY_AGAIN and name in READERS else status
    except (SotbusError, OSError) as error:
        return _failed(name, error)
    except KeyboardInterrupt:
        return 130


def _take_config(words: list[str], *, leading: bool) -> tuple[list[str], str | None]:
    """The words without ``--config FILE``, and the file; of several the last.

    :param leading: look no further than the first word that is something else; else as far as a ``--``.

    *Errors*: UsageError.
    """
    file: str | None = None
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--config" or word.startswith("--config="):
            file = next(rest, "") if word == "--config" else word.partition("=")[2]
            if not file:
                raise UsageError("sotbus: --config needs a FILE")
        else:
            kept.append(word)
            if leading or word == "--":
                break
    return kept + list(rest), file


def _take_help(words: list[str]) -> list[str]:
    """``help COMMAND`` as ``COMMAND --help``, ``help comm COMMAND`` too. Further words are dropped: none may be run."""
    if words[:1] != ["help"]:
        return words
    asked, _ = _take_config(words[1:], leading=True)
    return [*asked[: 2 if asked[:1] == ["comm"] else 1], "--help"]


def _run(name: str, words: list[str], box: Box | None, file: str | None) -> int:
    """Call the command, under a bound on what its file system takes.

    :param file: the config file that ``--config`` names.
    """
    if name not in UNBOUNDED:
        watchdog.start(LOCK_WAITS.get(name, "lock_wait_s"))
    try:
        return _call(name, words, box, file)
    finally:
        watchdog.stop()


def _call(name: str, words: list[str], box: Box | None, file: str | None) -> int:
    """Import the command's module and call it.

    The config file of ``--config`` goes before ``$SOTBUS_CONFIG``, and into its place for as long as the command runs,
    so that whatever looks for the file, here or in a process started from here, finds it.
    """
    loaded = __import__(f"sotbus.cli.{COMMANDS[name][0]}", fromlist=["run"])
    run = getattr(loaded, f"run_{name}")
    if file is None:
        status: int = run(words, box)
    elif name == "config":  # tells the option and the variable apart, so it is given the option
        status = run(["--config", file, *words], box)
    else:
        before = os.environ.get("SOTBUS_CONFIG")
        os.environ["SOTBUS_CONFIG"] = os.path.abspath(file)
        try:
            status = run(words, box)
        finally:
            if before is None:
                del os.environ["SOTBUS_CONFIG"]
            else:
                os.environ["SOTBUS_CONFIG"] = before
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


def _again(name: str) -> int:
    """What to do about an inbox that is being written, on standard error; answers the exit status."""
    from sotbus.cli import terminal

    terminal.err(f"hint: run 'sotbus {name}' again")
    return EX_TRY_AGAIN


def _unknown(name: str, program: str, commands: Sequence[str]) -> int:
    from difflib import get_close_matches

    from sotbus.cli import terminal

    close = get_close_matches(name, commands, n=1)
    if name in COMMANDS:
        hint = f"it is 'sotbus {name}'"
    else:
        hint = f"did you mean '{close[0]}'?" if close else f"'{program} --help' lists the commands"
    terminal.err(f"{program}: there is no command {name!r}; {hint}")
    return EX_USAGE


def open_client(box: Box | None = None, *, new_config: bool = False) -> Client:
    """The client that a command works with: config, machine, folder and bounds, as the environment says.

    The file is the one that ``--config`` names, else found (:func:`sotbus.config.found`).

    :param new_config: whether a file that is named may be missing, because it is to be written.

    *Errors*: ConfigError, FolderError, PluginError.
    """
    from sotbus import config as configuration
    from sotbus.assembly import assemble
    from sotbus.cli import terminal
    from sotbus.comm.box import Box as ThisBox
    from sotbus.comm.client import Client as CommClient

    here = box or ThisBox.here(os.environ)
    path = configuration.find(os.environ, here.declared_host)
    config = configuration.load(None if new_config and path is not None and not os.path.lexists(path) else path)
    client = assemble(here, os.environ, config, lambda line: terminal.err(terminal.shown(line)), CommClient)
    watchdog.bound(client.settings, client.folder.root)
    return client
