"""``sotbus completion``: a completion script for the shell, made from the table of commands.

Handles come from a file that others write, so no script lets the shell evaluate them, and ``completion handles`` prints
only what is one.
"""

from __future__ import annotations

from sotbus.cli import options, terminal
from sotbus.cli.main import COMM_COMMANDS, COMMANDS, open_client
from sotbus.comm.handles import is_handle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.comm.box import Box

OPTIONS = {
    "join": "--name --expertise --repin --pid --help",
    "leave": "--name --help",
    "send": "--broadcast --id --help",
    "poll": "--raw --json --help",
    "unread": "--json --help",
    "list": "--json --help",
    "whoami": "--json --help",
    "init": "--help",
    "status": "working blocked idle done --json --help",
    "log": "-n --all --raw --json --help",
    "watch": "--unread --raw --json --help",
    "prune": "--all --yes --json --help",
    "doctor": "--json --probe --peer --wait --help",
    "serve": "--check --log --log-level --help",
    "node": "--json --help",
    "keys": "new show trust --replace --address --role --user --remove --json --help",
    "plugins": "--json --all --help",
    "config": "check show path --config --all --json --help",
    "completion": "bash zsh fish --help",
}
"""Words that complete each command; a test holds them against the parsers."""

BASH = """\
# bash completion for sotbus:  eval "$(sotbus completion bash)"
_sotbus() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" at=1 sign="" name
    COMPREPLY=()
    if [[ "${{COMP_WORDS[1]}}" == comm ]]; then at=2; fi
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W "{commands} comm" -- "$word"))
        return
    fi
    if (( COMP_CWORD == 2 && at == 2 )); then
        COMPREPLY=($(compgen -W "{comm_commands}" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[at]}}" in
    send|unread|log|watch|prune)
        if [[ "$word" == @* ]]; then sign=@; word="${{word#@}}"; fi
        if [[ -n "$sign" || "$before" == @ ]]; then
            while IFS= read -r name; do
                if [[ "$name" == "$word"* ]]; then COMPREPLY+=("$sign$name"); fi
            done < <(sotbus completion handles 2>/dev/null)
            return
        fi ;;
    esac
    case "${{COMP_WORDS[at]}}" in
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
    if (( CURRENT == 2 )); then
        names=({described})
        _describe command names
        return
    fi
    if (( CURRENT == 3 && at == 3 )); then
        compadd -- {comm_commands}
        return
    fi
    case "${{words[at]}}" in
    send|unread|log|watch|prune)
        if [[ "${{words[CURRENT]}}" == @* ]]; then
            names=("${{(@f)$(sotbus completion handles 2>/dev/null)}}")
            compadd -P @ -- "${{names[@]}}"
            return
        fi ;;
    esac
    case "${{words[at]}}" in
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
    made.add_argument("shell", choices=("bash", "zsh", "fish", "handles"), help="'handles' is what the scripts ask")
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    if given.shell == "handles":
        for handle in open_client(box).registry.agents():
            if is_handle(handle):
                terminal.out(handle)
        return 0
    terminal.out({"bash": _bash, "zsh": _zsh, "fish": _fish}[given.shell]())
    return 0


def _bash() -> str:
    cases = "\n".join(f'    {name}) COMPREPLY=($(compgen -W "{text}" -- "$word")) ;;' for name, text in OPTIONS.items())
    return BASH.format(commands=" ".join(COMMANDS), comm_commands=" ".join(COMM_COMMANDS), cases=cases)


def _zsh() -> str:
    described = " ".join(f"'{name}:{line}'" for name, (_, line) in COMMANDS.items())
    cases = "\n".join(f"    {name}) compadd -- {text} ;;" for name, text in OPTIONS.items())
    described += " 'comm:the sot-comm commands under their own name'"
    return ZSH.format(described=described, comm_commands=" ".join(COMM_COMMANDS), cases=cases)


def _fish() -> str:
    lines = ["# fish completion for sotbus:  sotbus completion fish | source", "complete -c sotbus -f"]
    for name, (_, line) in COMMANDS.items():
        lines.append(f"complete -c sotbus -n __fish_use_subcommand -a {name} -d '{line}'")
    lines.append(f"complete -c sotbus -n __fish_use_subcommand -a comm -d '{', '.join(COMM_COMMANDS)}'")
    for name, text in OPTIONS.items():
        seen = f"'__fish_seen_subcommand_from {name}'"
        for word in text.split():
            flag = f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}" if word[0] == "-" else f"-a {word}"
            lines.append(f"complete -c sotbus -n {seen} {flag}")
    lines.append(
        "complete -c sotbus -n '__fish_seen_subcommand_from send unread log watch prune' "
        "-a '(sotbus completion handles | sed s/^/@/)'"
    )
    return "\n".join(lines)
