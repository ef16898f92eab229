"""The completion scripts in the shells that they are for: what each offers where the cursor stands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable

import pytest
from tools import require_tool
from world import ENTRY, World

from sotbus.cli import completion
from sotbus.cli.completion import OPTIONS
from sotbus.cli.main import COMM_COMMANDS, COMM_HELP, COMMANDS

TOP = {**{name: line for name, (_, line) in COMMANDS.items()}, "comm": COMM_HELP}
"""What may stand first, each with its line of help."""

FILE = "a file's name.toml"

Complete = Callable[..., dict[str, str]]
"""Words of a line, the cursor in the last: what is offered there, each with its description or nothing."""

BASH = """
{script}
COMP_WORDS=({words}); COMP_CWORD={last}; _sotbus
printf '%s\\n' "${{COMPREPLY[@]}}"
"""

ZSH = """
compdef() {{ }}
compset() {{ }}
_describe() {{ print -rl -- "${{(@P)2}}" }}
compadd() {{
    local prefix=""
    if [[ "$1" == -P ]]; then prefix=$2; shift 2; fi
    shift
    print -rl -- "$prefix${{^@}}"
}}
_files() {{ print -rl -- *(N) }}
{script}
words=({words}); CURRENT={last}
_sotbus
"""
"""The system's helpers are only there while the line editor completes, so each is one that prints what it is given."""


class Shell:
    """A world with ``sotbus`` in the PATH, one joined session @b-vm, and a folder with one file in it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cwd = world.base / "cwd"
        self.cwd.mkdir()
        (self.cwd / FILE).touch()
        commands = world.base / "bin"
        commands.mkdir()
        wrapper = commands / "sotbus"
        wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} {ENTRY} "$@"\n')
        wrapper.chmod(0o755)
        self.env = world.environ({"PATH": f"{commands}:{os.environ['PATH']}", "ZDOTDIR": str(world.base)})
        assert world.sotbus("b", "join").returncode == 0

    def script(self, shell: str) -> str:
        return self.world.run("completion", shell, cwd=self.cwd).stdout

    def ask(self, *command: str) -> list[str]:
        """What a shell prints. Nothing may go to standard error: there a shell says what it could not run."""
        done = subprocess.run(
            command, cwd=self.cwd, env=self.env, capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stderr == ""
        return done.stdout.splitlines()


def bash(shell: Shell) -> Complete:
    program, script = require_tool("bash", "bash"), shell.script("bash")

    def complete(*words: str) -> dict[str, str]:
        ask = BASH.format(script=script, words=shlex.join(words), last=len(words) - 1)
        return {name: "" for name in shell.ask(program, "--norc", "-c", ask) if name}

    return complete


def zsh(shell: Shell) -> Complete:
    program, script = require_tool("zsh", "zsh"), shell.script("zsh")

    def complete(*words: str) -> dict[str, str]:
        offered = {}
        for line in shell.ask(program, "-f", "-c", ZSH.format(script=script, words=shlex.join(words), last=len(words))):
            name, _, described = line.partition(":")
            assert not re.search(r"(?<!\\):", described), "a colon that is not escaped"
            offered[name] = re.sub(r"\\(.)", r"\1", described)
        return {name: described for name, described in offered.items() if name.startswith(words[-1])}

    return complete


def fish(shell: Shell) -> Complete:
    program, file = require_tool("fish", "fish"), shell.cwd.parent / "sotbus.fish"
    file.write_text(shell.script("fish"))

    def complete(*words: str) -> dict[str, str]:
        ask = f"source {shlex.quote(str(file))}; complete -C {shlex.quote(' '.join(words))}"
        offered = (line.partition("\t") for line in shell.ask(program, "-c", ask))
        return {name: described for name, _, described in offered}

    return complete


@pytest.fixture(params=[bash, zsh, fish], ids=lambda made: made.__name__)
def complete(world: World, request: pytest.FixtureRequest) -> Complete:
    made: Complete = request.param(Shell(world))
    return made


def test_an_empty_line_is_offered_every_command_and_nothing_else(complete: Complete) -> None:
    assert sorted(complete("sotbus", "")) == sorted(TOP)
    assert sorted(complete("sotbus", "se")) == ["send", "serve"]


@pytest.mark.parametrize("made", [zsh, fish])
def test_each_command_is_described_by_its_line_of_help(world: World, made: Callable[[Shell], Complete]) -> None:
    assert made(Shell(world))("sotbus", "") == TOP


def test_comm_is_offered_its_own_commands_and_nothing_else(complete: Complete) -> None:
    assert sorted(complete("sotbus", "comm", "")) == sorted(COMM_COMMANDS)
    assert "--expertise" in complete("sotbus", "comm", "join", "--e")


@pytest.mark.parametrize("before", [["--config", "F"], ["--config", "F", "--config", "F"]])
def test_a_config_file_before_the_command_is_passed_over(complete: Complete, before: list[str]) -> None:
    assert sorted(complete("sotbus", *before, "")) == sorted(TOP)
    assert list(complete("sotbus", *before, "join", "--e")) == ["--expertise"]
    assert sorted(complete("sotbus", *before, "comm", *before, "")) == sorted(COMM_COMMANDS)


def test_a_config_file_after_an_equals_sign_is_passed_over(complete: Complete, request: pytest.FixtureRequest) -> None:
    words = ["--config", "=", "F"] if "bash" in request.node.name else ["--config=F"]  # as each shell splits the line
    assert sorted(complete("sotbus", *words, "")) == sorted(TOP)
    assert list(complete("sotbus", *words, "join", "--e")) == ["--expertise"]


def test_options_before_the_command_are_offered_after_a_dash(complete: Complete) -> None:
    assert sorted(complete("sotbus", "--")) == sorted(completion.LEADING.split())


@pytest.mark.parametrize(
    "words", [["--config"], ["list", "--config"], ["config", "--config"], ["serve", "--log"], ["config", "check"]]
)
def test_file_names_are_offered_where_a_file_is_to_be_named(complete: Complete, words: list[str]) -> None:
    offered = [name.replace("\\", "") for name in complete("sotbus", *words, "")]
    assert offered == [FILE]


def test_file_names_are_not_offered_elsewhere(complete: Complete) -> None:
    for words in (["list"], ["config"], ["config", "show"], ["send", "check"]):
        assert FILE not in {name.replace("\\", "") for name in complete("sotbus", *words, "")}, words


@pytest.mark.parametrize("command", sorted(OPTIONS))
def test_each_command_is_offered_its_own_options(complete: Complete, command: str) -> None:
    offered = {word for sign in ("--", "-", "") for word in complete("sotbus", command, sign)}
    assert set(OPTIONS[command].split()) <= offered <= {*OPTIONS[command].split(), "--config", "@b-vm"}


def test_handles_are_offered_to_commands_that_take_one(complete: Complete) -> None:
    for command in ("send", "unread", "log", "watch", "prune"):
        assert list(complete("sotbus", command, "@")) == ["@b-vm"]
    assert "@b-vm" not in complete("sotbus", "list", "@")


@pytest.mark.parametrize("made", [zsh, fish])
def test_a_line_of_help_is_shown_as_it_is_whatever_it_has_in_it(
    world: World, monkeypatch: pytest.MonkeyPatch, made: Callable[[Shell], Complete]
) -> None:
    nasty = "it's: a \\ and \\' `id` $(id) (id) $HOME \"x\" {a,b} * #"
    monkeypatch.setitem(COMMANDS, "join", ("membership", nasty))
    shell = Shell(world)
    monkeypatch.setattr(shell, "script", lambda name: {"zsh": completion._zsh, "fish": completion._fish}[name]())
    assert made(shell)("sotbus", "") == {**TOP, "join": nasty}
