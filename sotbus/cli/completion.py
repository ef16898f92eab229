"""``sotbus completion``: a completion script for the shell, made from the table of commands."""

from __future__ import annotations

from sotbus.cli import options, terminal
from sotbus.cli.main import COMM_COMMANDS, COMMANDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.comm.box import Box

OPTIONS = {
    "join": "--name --expertise --repin --pid --help",
    "leave": "--name --help",
    "send": "--broadcast --help",
    "poll": "--raw --json --help",
    "unread": "--json --help",
    "list": "--json --help",
    "whoami": "--json --help",
    "init": "--help",
    "completion": "bash zsh fish --help",
}
"""Words that complete each command; a test holds them against the parsers."""

HANDLES = 'sotbus list --json 2>/dev/null | grep -o \'"handle": "[^"]*"\' | cut -d\'"\' -f4'
"""A shell pipeline that prints the handles, one a line."""

BASH = """\
# bash completion for sotbus:  eval "$(sotbus completion bash)"
_sotbus() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" at=1
    [[ "${{COMP_WORDS[1]}}" == comm ]] && at=2
    if (( COMP_CWORD <= at )) && [[ "$COMP_CWORD" == "$at" ]]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[at]}}" in
    send|unread)
        if [[ "$word" == @* ]]; then
            COMPREPLY=($(compgen -P @ -W "$({handles})" -- "${{word#@}}"))
            return
        fi ;;&
{cases}
    esac
}}
complete -F _sotbus sotbus"""

ZSH = """\
# zsh completion for sotbus:  eval "$(sotbus completion zsh)"
_sotbus() {{
    local -a names
    local at=2
    [[ "${{words[2]}}" == comm ]] && at=3
    if (( CURRENT == at )); then
        names=({described})
        _describe command names
        return
    fi
    case "${{words[at]}}" in
    send|unread)
        if [[ "${{words[CURRENT]}}" == @* ]]; then
            compadd -P @ -- ${{(f)"$({handles})"}}
            return
        fi ;|
{cases}
    esac
}}
compdef _sotbus sotbus"""


def run_completion(words: list[str], box: Box | None) -> int:
    made = options.parser(
        "completion",
        "Print a completion script for a shell.",
        '  eval "$(sotbus completion bash)"        in ~/.bashrc\n'
        '  eval "$(sotbus completion zsh)"         in ~/.zshrc\n'
        "  sotbus completion fish | source         in ~/.config/fish/config.fish",
    )
    made.add_argument("shell", choices=("bash", "zsh", "fish"))
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    terminal.out({"bash": _bash, "zsh": _zsh, "fish": _fish}[given.shell]())
    return 0


def _bash() -> str:
    cases = "\n".join(f'    {name}) COMPREPLY=($(compgen -W "{text}" -- "$word")) ;;' for name, text in OPTIONS.items())
    return BASH.format(commands=" ".join((*COMMANDS, "comm")), handles=HANDLES, cases=cases)


def _zsh() -> str:
    described = " ".join(f"'{name}:{line}'" for name, (_, line) in COMMANDS.items())
    cases = "\n".join(f"    {name}) compadd -- {text} ;;" for name, text in OPTIONS.items())
    return ZSH.format(described=described + " 'comm:the sot-comm commands'", handles=HANDLES, cases=cases)


def _fish() -> str:
    lines = ["# fish completion for sotbus:  sotbus completion fish | source", "complete -c sotbus -f"]
    for name, (_, line) in COMMANDS.items():
        lines.append(f"complete -c sotbus -n __fish_use_subcommand -a {name} -d '{line}'")
    lines.append(f"complete -c sotbus -n __fish_use_subcommand -a comm -d '{', '.join(COMM_COMMANDS)}'")
    for name, text in OPTIONS.items():
        seen = f"'__fish_seen_subcommand_from {name}'"
        for word in text.split():
            flag = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c sotbus -n {seen} {flag}")
    lines.append(
        f"complete -c sotbus -n '__fish_seen_subcommand_from send unread' -a '({HANDLES} | string replace -r \"^\" @)'"
    )
    return "\n".join(lines)
