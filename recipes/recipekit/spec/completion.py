"""Tab completion for `recipekit` in bash and zsh: a script that contains this version's names."""

from dataclasses import fields

from .recipe import Recipe
from .shipped import recipes, strategies

SCRIPT = """\
_recipekit() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words files=
    local IFS=$'\\n'
    if [ "$COMP_CWORD" -eq 1 ]; then
        words=$'{commands}\\n--help\\n--completion'
    elif [ "$before" = --completion ]; then
        words=$'bash\\nzsh'
    else
        case ${COMP_WORDS[1]} in
            cp) words=$'{names}' files=yes ;;
            lint) words=$'{strategies}\\n{lint}' files=yes ;;
            run) words=$'{flags}' files=yes ;;
            doctor | convert | sample) files=yes ;;
        esac
        if [ "$before" = --recipe ]; then words=$'{recipes}'; fi
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    if [ -n "$files" ]; then
        compopt -o filenames 2> /dev/null
        COMPREPLY+=($(compgen -f -- "$word"))
    fi
}
complete -F _recipekit recipekit
"""
# These lines let zsh run bash completion functions.
ZSH = "autoload -Uz compinit bashcompinit\ncompinit\nbashcompinit\n"
LINT = ("--recipe", "--world", "--json-only", "--filled-by", "--fix")


def script(shell: str, commands: tuple[str, ...]) -> str:
    """Return a shell's completion script, to be put into its start-up file or passed to `eval`."""
    flags = [f"--{field.name}" for field in fields(Recipe) if "help" in field.metadata]
    names = {
        "commands": commands,
        "names": (*recipes(), *strategies()),
        "strategies": strategies(),
        "recipes": recipes(),
        "lint": LINT,
        "flags": ("--help", "--tiny", "--dry_run", "--deepspeed_config", *flags),
    }
    text = SCRIPT
    for name, words in names.items():
        text = text.replace(f"{{{name}}}", "\\n".join(words))
    return ZSH + text if shell == "zsh" else text
