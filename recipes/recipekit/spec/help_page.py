"""The pages that `--help` and `--help all` print: the flags of one task.

The module also formats the help of subcommands.
"""

import argparse
import re
import shutil
from collections.abc import Mapping, Sequence

from .task_specs import TASKS, task_fields

# Flags on the first page. The task's columns and the layout flags are inserted between these
# groups.
DATA_FLAGS = ("tiny", "dry_run", "model", "dataset")
BATCH_FLAGS = ("seq_len", "micro_batch", "global_batch", "steps", "epochs", "lr")
OUTPUT_FLAGS = ("eval_every", "save_every", "out", "wandb")
MAX_EXAMPLE_RANKS = 8  # ranks
WIDTH = 120  # maximum number of columns


def first_help_page(
    file: str,
    task: str,
    engine: str,
    adapted: bool,
    ranks: int,
    groups: Mapping[str, Sequence[argparse.Action]],
) -> str:
    """Return an example and the most commonly used flags of the recipe's task.

    `groups` contains all of the recipe's flags by subject.
    """
    facts = TASKS[task]
    layout = ("deepspeed_config",) if engine == "deepspeed" else ("engine", "precision")
    adapter = ("merge",) if adapted else ()
    names = (
        *DATA_FLAGS,
        *facts.columns,
        *facts.first_help_flags,
        *BATCH_FLAGS,
        *layout,
        *OUTPUT_FLAGS,
        *adapter,
    )
    actions = {action.dest: action for group in groups.values() for action in group}
    shown = [actions[name] for name in names if name in actions]

    starter = "torchrun --nproc_per_node" if engine != "deepspeed" else "deepspeed --num_gpus"
    start = (
        f"{starter} {max(2, ranks)}"
        if ranks <= MAX_EXAMPLE_RANKS
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


def full_help_page(file: str, task: str, groups: Mapping[str, Sequence[argparse.Action]]) -> str:
    """Return all flags of the recipe's task, grouped by subject."""
    lines = [f"{task}: {TASKS[task].about}. All flags by subject (- and _ are equivalent):", ""]
    for title, actions in groups.items():
        lines += [f"{title}:", _flags(actions)]
    return "\n".join([*lines, f"The most used flags: python {file} --help"]) + "\n"


def flags_of_other_tasks(task: str, adapted: bool) -> set[str]:
    """Return the flags that a recipe for this task cannot use."""
    others = {name for name, tasks in task_fields().items() if task not in tasks}
    return (
        others
        | (TASKS[task].unsupported.keys() & {"tp", "pp", "sp", "ep"})
        | (set() if adapted else {"merge"})
    )


def _flags(actions: Sequence[argparse.Action]) -> str:
    formatter = _Formatter("")
    formatter.start_section(None)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()


class CommandFormatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter for subcommands: one spelling and, where possible, one line per flag."""

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
    """Help formatter that shows one spelling of each flag, for example `--[no-]wandb`."""

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
        text = " ".join(
            [", ".join(action.option_strings), *([str(action.metavar)] if action.metavar else [])]
        )
        return _break_choices(text, self._width - self._current_indent)


def _break_choices(text: str, width: int) -> str:
    """Break a flag with its choices, `--flag a|b|c`, into lines of at most `width` columns."""
    lines = [""]
    for part in re.split(r"(?<=[|])", text):
        if len(lines[-1]) + len(part) > width and lines[-1]:
            lines.append(" " * 6)
        lines[-1] += part
    return "\n".join(lines)
