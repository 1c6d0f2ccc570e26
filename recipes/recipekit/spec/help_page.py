"""The pages of `--help` and `--help all`: the flags of one task.

Also the format of the help of subcommands.
"""

import argparse
import shutil
from collections.abc import Mapping, Sequence

from .task_specs import TASKS, own_fields

# The flags of the first page. Between these groups come the columns of the task and what chooses
# the layout.
DATA = ("tiny", "dry_run", "model", "dataset")
BATCH = ("seq_len", "micro_batch", "global_batch", "steps", "epochs", "lr")
OUTPUTS = ("eval_every", "save_every", "out", "wandb")
LARGEST_HOST = 8  # ranks
WIDTH = 120  # columns, at most


def first_page(
    file: str,
    task: str,
    engine: str,
    adapted: bool,
    ranks: int,
    groups: Mapping[str, Sequence[argparse.Action]],
) -> str:
    """Return an example and the flags that the recipe's task uses most; `groups` are all its flags
    by subject.
    """
    facts = TASKS[task]
    layout = ("deepspeed_config",) if engine == "deepspeed" else ("engine", "precision")
    adapter = ("merge",) if adapted else ()
    names = (*DATA, *facts.columns, *facts.first, *BATCH, *layout, *OUTPUTS, *adapter)
    actions = {action.dest: action for group in groups.values() for action in group}
    shown = [actions[name] for name in names if name in actions]

    starter = "torchrun --nproc_per_node" if engine != "deepspeed" else "deepspeed --num_gpus"
    start = (
        f"{starter} {max(2, ranks)}"
        if ranks <= LARGEST_HOST
        else "python -m launch --hostfile HOSTS"
    )
    examples = {
        f"{start} {file} --dataset {facts.example}": "",
        f"python {file} --dry_run --world {max(2, ranks)}": (
            "# print layout and memory, train nothing"
        ),
        f"python {file} --tiny": "# train a small model on built-in data",
    }
    lines = [
        *(f"    {command}  {about}".rstrip() for command, about in examples.items()),
        "",
        f"{task}: {facts.about}. The most used flags (- and _ are equivalent):",
        "",
        _flags(shown),
        f"{len(actions) - len(shown)} more flags, by subject: python {file} --help all",
        "To resume a stopped run, repeat its command.",
    ]
    return "\n".join(lines) + "\n"


def whole_page(file: str, task: str, groups: Mapping[str, Sequence[argparse.Action]]) -> str:
    """Return all flags of the recipe's task, by subject."""
    lines = [f"{task}: {TASKS[task].about}. All flags by subject (- and _ are equivalent):", ""]
    for title, actions in groups.items():
        lines += [f"{title}:", _flags(actions)]
    return "\n".join([*lines, f"The most used flags: python {file} --help"]) + "\n"


def of_other_tasks(task: str, adapted: bool) -> set[str]:
    """Return the flags that a recipe of this task cannot use."""
    others = {name for name, tasks in own_fields().items() if task not in tasks}
    return (
        others
        | (TASKS[task].lacks.keys() & {"tp", "pp", "sp", "ep"})
        | (set() if adapted else {"merge"})
    )


def _flags(actions: Sequence[argparse.Action]) -> str:
    formatter = _Formatter("")
    formatter.start_section(None)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()


class CommandFormatter(argparse.RawDescriptionHelpFormatter):
    """One line for each flag of a subcommand where it fits, with one of its two spellings."""

    def __init__(self, prog: str) -> None:
        super().__init__(
            prog, max_help_position=28, width=min(WIDTH, shutil.get_terminal_size().columns)
        )

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        spellings = {
            option.strip("-").replace("-", "_"): option
            for option in reversed(action.option_strings)
        }
        value = (
            ""
            if action.nargs == 0
            else " " + self._format_args(action, self._get_default_metavar_for_optional(action))
        )
        return ", ".join(reversed(spellings.values())) + value


class _Formatter(argparse.HelpFormatter):
    """Shows one spelling of each flag: `--[no-]wandb`."""

    def __init__(self, prog: str) -> None:
        super().__init__(
            prog, max_help_position=26, width=min(WIDTH, shutil.get_terminal_size().columns)
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Keep `(default: VALUE)` on one line."""
        lines = super()._split_lines(text.replace("(default: ", "(default:\0"), width)
        return [line.replace("\0", " ") for line in lines]

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.dest}"
        return " ".join(
            [", ".join(action.option_strings), *([str(action.metavar)] if action.metavar else [])]
        )
