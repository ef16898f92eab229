"""``sotbus completion``: a completion script for the shell, made from the table of commands.

Handles come from a file that others write, so no script lets the shell evaluate them, and ``completion handles`` prints
only what is one.
"""

from __future__ import annotations

from sotbus.cli import options, terminal
from sotbus.cli.main import COMM_COMMANDS, COMM_HELP, COMMANDS, open_client
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

LEADING = "--config --help --version"
"""Options before the command."""

BASH = """\
# bash completion for sotbus:  eval "$(sotbus completion bash)"
_sotbus_files() {{
    local name
    compopt -o filenames 2>/dev/null
    while IFS= read -r name; do COMPREPLY+=("$name"); done < <(compgen -f -- "$1")
}}
_sotbus() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" at=1 comm="" sign="" name i
    COMPREPLY=()
    if [[ "$word" == = ]]; then word=""; elif [[ "$before" == = ]]; then before="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
    case "$before" in
    --config|--log) _sotbus_files "$word"; return ;;
    esac
    while (( at < COMP_CWORD )); do
        case "${{COMP_WORDS[at]}}" in
        --config) if [[ "${{COMP_WORDS[at+1]}}" == = ]]; then (( at += 3 )); else (( at += 2 )); fi ;;
        comm) if [[ -n "$comm" ]]; then break; fi; comm=1; (( at += 1 )) ;;
        *) break ;;
        esac
    done
    if (( at >= COMP_CWORD )); then
        if [[ "$word" == -* ]]; then COMPREPLY=($(compgen -W "{leading}" -- "$word"))
        elif [[ -n "$comm" ]]; then COMPREPLY=($(compgen -W "{comm_commands}" -- "$word"))
        else COMPREPLY=($(compgen -W "{commands} comm" -- "$word"))
        fi
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
    config)
        for (( i = at + 1; i < COMP_CWORD; i++ )); do
            if [[ "${{COMP_WORDS[i]}}" == check && "$word" != -* ]]; then _sotbus_files "$word"; return; fi
        done ;;
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
    local at=2 comm=""
    case "${{words[CURRENT-1]}}" in
    --config|--log) _files; return ;;
    esac
    case "${{words[CURRENT]}}" in
    --config=*|--log=*) compset -P '*='; _files; return ;;
    esac
    while (( at < CURRENT )); do
        case "${{words[at]}}" in
        --config) (( at += 2 )) ;;
        --config=*) (( at += 1 )) ;;
        comm) if [[ -n "$comm" ]]; then break; fi; comm=1; (( at += 1 )) ;;
        *) break ;;
        esac
    done
    if (( at >= CURRENT )); then
        if [[ "${{words[CURRENT]}}" == -* ]]; then
            compadd -- {leading}
        elif [[ -n "$comm" ]]; then
            compadd -- {comm_commands}
        else
            names=({described})
            _describe command names
        fi
        return
    fi
    case "${{words[at]}}" in
    send|unread|log|watch|prune)
        if [[ "${{words[CURRENT]}}" == @* ]]; then
            names=("${{(@f)$(sotbus completion handles 2>/dev/null)}}")
            compadd -P @ -- "${{names[@]}}"
            return
        fi ;;
    config)
        if [[ "${{words[CURRENT]}}" != -* ]] && (( ${{words[(i)check]}} < CURRENT )); then
            _files
            return
        fi ;;
    esac
    case "${{words[at]}}" in
{cases}
    esac
}}
compdef _sotbus sotbus"""

FISH = """\
# fish completion for sotbus:  sotbus completion fish | source
function __sotbus_command --description 'The command on the line so far; comm before its own one; else nothing'
    set -l skip 1
    set -l found
    for word in (commandline -opc)
        if test $skip = 1
            set skip 0
            continue
        end
        switch "$word"
            case --config
                set skip 1
            case '--config=*'
            case comm
                if set -q found[1]
                    return
                end
                set found comm
            case '*'
                printf '%s\\n' "$word"
                return
        end
    end
    printf '%s\\n' "$found"
end
function __sotbus_on --description 'Whether the command is one of these'
    contains -- (__sotbus_command) $argv
end
function __sotbus_given --description 'Whether one of these words is on the line so far'
    for word in $argv
        if contains -- $word (commandline -opc)
            return 0
        end
    end
    return 1
end
complete -c sotbus -f
complete -c sotbus -l config -r -F
complete -c sotbus -n '__sotbus_on ""' -l help
complete -c sotbus -n '__sotbus_on ""' -l version
complete -c sotbus -n '__sotbus_on serve' -l log -r -F
complete -c sotbus -n '__sotbus_on config; and __sotbus_given check' -F
complete -c sotbus -n '__sotbus_on send unread log watch prune' \\
    -a '(sotbus completion handles 2>/dev/null | sed s/^/@/)'"""

TAKES_A_FILE = ("--config", "--log")
"""Options that the fish script names with what they take."""


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
    return BASH.format(leading=LEADING, commands=" ".join(COMMANDS), comm_commands=" ".join(COMM_COMMANDS), cases=cases)


def _zsh() -> str:
    described = " ".join(_zsh_quoted(f"{name}:{_escaped(line, ':')}") for name, line in _described())
    cases = "\n".join(f"    {name}) compadd -- {text} ;;" for name, text in OPTIONS.items())
    return ZSH.format(leading=LEADING, described=described, comm_commands=" ".join(COMM_COMMANDS), cases=cases)


def _fish() -> str:
    lines = [FISH]
    offered = [('""', name, line) for name, line in _described()]
    offered += [("comm", name, COMMANDS[name][1]) for name in COMM_COMMANDS]
    lines += [
        f"complete -c sotbus -n '__sotbus_on {on}' -a {name} -d {_fish_quoted(line)}" for on, name, line in offered
    ]
    for name, text in OPTIONS.items():
        on = f"complete -c sotbus -n '__sotbus_on {name}"
        words = text.split()
        for word in words:
            if word not in TAKES_A_FILE and word.startswith("-"):
                lines.append(f"{on}' -l {word[2:]}" if word.startswith("--") else f"{on}' -s {word[1:]}")
        if plain := " ".join(word for word in words if not word.startswith("-")):
            lines.append(f"{on}; and not __sotbus_given {plain}' -a '{plain}'")
    return "\n".join(lines)


def _described() -> list[tuple[str, str]]:
    """What may stand first on the line, each with its line of help."""
    return [*((name, line) for name, (_, line) in COMMANDS.items()), ("comm", COMM_HELP)]


def _escaped(text: str, special: str) -> str:
    """The text with a backslash before each backslash and each character of ``special``."""
    return "".join("\\" + character if character in "\\" + special else character for character in text)


def _zsh_quoted(text: str) -> str:
    """One word of zsh: nothing is special between single quotes but the quote (zshmisc(1), QUOTING).

    A description of ``_describe`` loses one level of backslashes (zshcompsys(1)), so it is escaped before.
    """
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    """One word of fish: between single quotes the backslash escapes itself and the quote (fish-language(1), Quotes)."""
    return "'" + _escaped(text, "'") + "'"
