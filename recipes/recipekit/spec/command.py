"""The command line of a recipe. Its flags are the fields of `Recipe`."""

import argparse
import dataclasses
import difflib
import math
import os
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from .errors import ConfigError, Problem, config_error
from .foreign_flags import foreign_flag_advice, nearest_name
from .help_page import first_help_page, flags_of_other_tasks, full_help_page
from .paths import run_folder
from .recipe import AXES, Recipe, check_budget, check_recipe, kinds_of_field
from .shadows import shadows
from .shipped import IS_WHEEL, recipes
from .task_specs import TASKS


@dataclass(frozen=True)
class RunCommand:
    """A recipe with its command line applied.

    `typed` contains the names of the fields that the user typed. Their values are never changed.
    """

    recipe: Recipe
    name: str  # file name of the recipe, without .py
    folder: Path  # folder of the recipe's file
    typed: frozenset[str]
    # Split, subset and revisions from the recipe's file that do not apply because the user typed a
    # different dataset or model.
    unused: dict[str, str] = field(default_factory=dict)
    tiny: bool = False
    dry_run: bool = False
    show: str = ""  # "json": a dry run prints the resolved JSON
    show_row: bool = False
    device: str = ""  # a dry run checks that the training states fit on this device
    world: int = 1
    rank: int = 0
    local_rank: int = 0
    local_ranks: int = 0  # ranks on this host; 0: the launcher does not set it
    counted: int = 0  # steps in the recipe's epochs; 0: unknown until the data are counted

    @property
    def revisions(self) -> dict[str, str]:
        """Return the revisions that the user requested.

        A resumed run instead reads the commits that its first start recorded.
        """
        return {
            "model_revision": self.recipe.model_revision,
            "dataset_revision": self.recipe.dataset_revision,
        }

    def fitted(self) -> tuple[Recipe, list[str]]:
        """Return the recipe with its schedule fitted to its steps, and one line per change.

        The fitted fields are warm-up, decay and ramp. A recipe with epochs has `counted` steps.
        Steps that the user typed replace the epochs in the recipe's file.
        """
        recipe, typed, lines = self.recipe, self.typed, list[str]()
        if type(recipe.epochs) not in (int, float) or recipe.epochs <= 0:
            return recipe.fit_to_steps(typed)
        other_data = self.tiny and "dataset" not in typed
        if "epochs" not in typed and ("steps" in typed or other_data):
            why = "--tiny uses built-in data" if other_data else f"--steps {recipe.steps} is typed"
            lines = [
                f"epochs: {recipe.epochs:g} of the recipe left out, because {why}. The run has"
                f" {recipe.steps} steps"
            ]
            recipe = dataclasses.replace(recipe, epochs=0.0)
        else:
            recipe, typed = dataclasses.replace(recipe, steps=self.counted), typed | {"steps"}
        recipe, more = recipe.fit_to_steps(typed)
        return recipe, lines + more

    @property
    def out(self) -> Path:
        """Return the run folder.

        A --tiny run has its own default folder. Raise the same `ConfigError` as `run_folder`.
        """
        return run_folder(
            str(self.recipe.out), f"runs/{self.name}{'_tiny' if self.tiny else ''}", self.dry_run
        )


def recipe_of(path: Path) -> Recipe:
    """Return the `RECIPE` of a recipe's file. The import does not start a run.

    Raise `ConfigError` if the file is missing, cannot be imported or sets no RECIPE.
    """
    if not path.is_file():
        rule = "is a folder" if path.is_dir() else "the file does not exist on this host"
        raise config_error(
            f"--recipe {path}", rule, _nearest_file(path) or "give a file of recipes/"
        )
    if hidden := shadows(str(path.resolve().parent)):
        raise ConfigError([Problem(*problem) for problem in hidden])
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        # Do not use an importer, because its cache treats two files as identical if they have equal
        # sizes and were written in the same second.
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except ConfigError:
        raise
    except (
        SyntaxError,
        ImportError,
        TypeError,
        NameError,
        AttributeError,
        ValueError,
        LookupError,
        OSError,
    ) as error:
        raise config_error(
            f"--recipe {path}",
            f"cannot be imported: {type(error).__name__}: {error}",
            "correct the file",
        ) from None
    if hasattr(module, "RECIPE"):
        return one_recipe(module.RECIPE, path)
    other = next((name for name, value in vars(module).items() if isinstance(value, Recipe)), "")
    fix = f"rename {other} to RECIPE" if other else "give a file of recipes/"
    raise config_error(f"--recipe {path}", "sets no RECIPE = Recipe(...)", fix)


def one_recipe(value: object, path: Path) -> Recipe:
    """Return `value`, the RECIPE of a recipe's file. Raise `ConfigError` if it is not a Recipe."""
    if isinstance(value, Recipe):
        return value
    kind, fix = type(value).__name__, "write RECIPE = Recipe(...)"
    if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], Recipe):
        fix = "remove the comma after Recipe(...)"
    elif isinstance(value, tuple | list) and any(isinstance(one, Recipe) for one in value):
        fix = "keep one Recipe(...) in a file"
    elif value is Recipe:
        kind, fix = "the class Recipe", "write RECIPE = Recipe(...), with the fields in parentheses"
    elif isinstance(value, dict):
        fix = "write RECIPE = Recipe(**RECIPE), or Recipe(NAME=VALUE, ...)"
    raise config_error(f"{path.name}: RECIPE", f"must be a Recipe, not {kind}", fix)


def _nearest_file(missing: Path) -> str:
    """Return a suggestion for the intended recipe file, or "" if no file name is close."""
    beside = {file.stem: file for file in sorted(missing.parent.glob("*.py"))}
    near = difflib.get_close_matches(missing.stem, recipes() | beside, 1)
    if not near:
        return ""
    name = near[0]
    meant = name if IS_WHEEL and name not in beside else os.path.relpath((recipes() | beside)[name])
    return f"did you mean {meant}?"


DRY_RUN_FLAGS = {  # flag -> why it does not apply to a real run
    "device": "a real run has the devices that it sees",
    "show": "a real run writes the resolved JSON into its run folder",
    "world": "a real run has the ranks its launcher starts",
}


def parse(recipe: Recipe, path: Path, argv: list[str] | None = None) -> RunCommand:
    """Parse the command line into a `RunCommand`, without side effects.

    Flags are the plain fields of `Recipe`, written with `-` or `_`. World size and rank come from
    WORLD_SIZE, RANK and LOCAL_RANK, which every launcher sets; without these variables the job has
    one rank. The number of ranks on this host comes from LOCAL_WORLD_SIZE (torchrun, `python -m
    launch`) or LOCAL_SIZE (deepspeed).

    Raise `ConfigError` (exit code 2) that lists every mistake.
    """
    recipe = one_recipe(recipe, path)
    parser = _parser_of(vars(recipe), path)
    words = sys.argv[1:] if argv is None else argv
    if page := _requested_help_page(words):
        _show_help(page, vars(recipe), path, parser)
    flags = [item.name for item in dataclasses.fields(recipe) if "help" in item.metadata]
    given = parser.read(words)

    world = _checked_world(parser, given)
    changes = {name: given[name] for name in flags if name in given}
    if "deepspeed_config" in given:
        changes["ds_config"] = given["deepspeed_config"]
    changed, unused = dataclasses.replace(
        recipe, **_disabled_by_recompute(changes), **changes
    ).for_other_data(recipe, frozenset(changes))
    budget = (changed.activation_budget, changed.recompute, changed.compile)
    if parser.problems or ("activation_budget" in changes and check_budget(*budget)):
        raise ConfigError(
            parser.problems + check_recipe(changed.fit_to_steps(frozenset(changes))[0]), exit_code=2
        )
    return RunCommand(
        recipe=changed,
        name=path.stem,
        folder=path.resolve().parent,
        typed=frozenset(changes),
        unused=unused,
        tiny=given["tiny"],
        dry_run=given["dry_run"],
        show=given.get("show", ""),
        show_row=given["show_row"],
        device=given.get("device", ""),
        world=world,
        rank=int(os.environ.get("RANK") or 0),
        local_rank=int(os.environ.get("LOCAL_RANK") or given.get("local_rank", 0)),
        local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 0),
    )


def _parser_of(values: Mapping[str, Any], path: Path) -> "_Parser":
    """Return the parser for a recipe's flags, grouped by subject. `values` are the field values."""
    parser = _Parser(path.name)
    task_help = TASKS[values["task"]].flag_help if values["task"] in tuple(TASKS) else {}
    trial = parser.group("try it")
    trial.add_argument(
        "--help",
        "-h",
        metavar="[all]",
        help="Show the most used flags. --help all shows all flags by subject.",
    )
    trial.add_argument(
        "--tiny",
        action="store_true",
        help=(
            "Run a small trial: shrink the model, rows and batch, and use built-in data without"
            " network."
        ),
    )
    trial.add_argument(
        "--dry_run",
        action="store_true",
        help="Check all inputs, print layout, batch and memory, then exit.",
    )
    trial.add_argument(
        "--show_row",
        action="store_true",
        help="Print the first row of the data, mark the part with a loss, then exit.",
    )
    parser.flag(
        "try it", "show", str, "With --dry_run: print the resolved DeepSpeed JSON.", "", ("json",)
    )
    parser.flag("try it", "world", int, "With --dry_run: number of ranks to plan for.", 1)
    parser.flag(
        "try it",
        "device",
        str,
        "With --dry_run: check that the states fit on this device, for example A100-40GB. If not"
        " given, the local GPU.",
        "",
    )
    group = ""
    for item in dataclasses.fields(Recipe):
        group = item.metadata.get("group", group)
        if item.name == "ds_config":
            name = (
                values["ds_config"]
                if isinstance(values["ds_config"], str)
                else "written in the recipe"
            )
            parser.flag(
                "layout",
                "deepspeed_config",
                str,
                "DeepSpeed JSON file with the memory strategy: a path, or the name of a file next"
                " to the recipe or in ds_configs/.",
                name,
            )
        if "help" in item.metadata:
            parser.flag(
                group,
                item.name,
                kinds_of_field(item)[0],
                task_help.get(item.name, item.metadata["help"]),
                values[item.name],
                item.metadata.get("choices", ()),
            )
    parser.add_argument("--local_rank", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _checked_world(parser: "_Parser", values: dict[str, Any]) -> int:
    """Return the number of ranks, and record a problem for each invalid flag combination."""
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if "device" in values and not values["device"].strip():
        parser.wrong(
            "--device ''",
            "must not be empty or blank",
            "name a device, for example --device H200. Check the variables of your shell",
        )
    for name in values.keys() & DRY_RUN_FLAGS if not values["dry_run"] else ():
        parser.wrong(f"--{name}", "requires --dry_run", DRY_RUN_FLAGS[name])
    if "world" in values:
        world = values["world"]
        if world < 1:
            parser.wrong(f"--world {world}", "must be at least 1", "use --world 1 or more")
    if {"steps", "epochs"} <= values.keys():
        where = f"--epochs {values['epochs']:g} with --steps {values['steps']}"
        parser.wrong(
            where,
            "cannot be combined: a run is limited by steps or by epochs",
            "use only one of them",
        )
    if "activation_checkpointing" in values and values.get("recompute_every", -1) >= 0:
        switch, every = values["activation_checkpointing"], values["recompute_every"]
        if switch != (every > 0):
            where = (
                f"--{'' if switch else 'no-'}activation_checkpointing with --recompute_every"
                f" {every}"
            )
            parser.wrong(
                where,
                "contradict each other: one switches recomputation on, the other switches it off",
                "leave one of them out",
            )
    if values["dry_run"] and values["show_row"]:
        parser.wrong(
            "--show_row with --dry_run",
            "cannot be combined: each prints its own output and exits",
            "use only one of them",
        )
    return world


def _disabled_by_recompute(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe field to override if a typed flag disables recomputation.

    Either of two fields can enable recomputation, so the field that was not typed must be disabled
    as well.
    """
    if changes.get("activation_checkpointing") is False and "recompute_every" not in changes:
        return {"recompute_every": 0}
    if changes.get("recompute_every") == 0 and "activation_checkpointing" not in changes:
        return {"activation_checkpointing": False}
    return {}


def _requested_help_page(args: list[str]) -> str:
    """Return the help page that the command line requests: "first", "all" or "".

    Raise `ConfigError` for any other page.
    """
    asked = [index for index, word in enumerate(args) if re.fullmatch(r"-h|--help(=.*)?", word)]
    if not asked:
        return ""
    page = args[asked[0]].partition("=")[2] or next(iter(args[asked[0] + 1 :]), "first")
    if page.startswith("-"):
        page = "first"
    if page not in ("first", "all"):
        raise ConfigError(
            [
                Problem(
                    f"--help {quote_value(page)}",
                    "the page does not exist",
                    "use --help or --help all",
                )
            ],
            exit_code=2,
        )
    return page


def _show_help(page: str, values: Mapping[str, Any], path: Path, parser: "_Parser") -> NoReturn:
    """Print a help page, once per host, and exit."""
    task = values["task"] if values["task"] in tuple(TASKS) else Recipe.task
    adapted = values["adapt"] is not None
    hidden = flags_of_other_tasks(task, adapted)
    groups = {
        title: [action for action in group._group_actions if action.dest not in hidden]
        for title, group in parser.titles.items()
    }
    if page == "all":
        text = full_help_page(str(path), task, groups)
    else:
        degrees = [values[axis] for axis in AXES if type(values[axis]) is int]
        text = first_help_page(
            str(path), task, values["engine"], adapted, math.prod(degrees), groups
        )
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, end="")
    raise SystemExit(0)


class _Parser(argparse.ArgumentParser):
    """Argument parser that collects all mistakes in `problems` instead of exiting at the first."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, allow_abbrev=False, add_help=False)
        self.problems: list[Problem] = []
        self.titles: dict[str, argparse._ArgumentGroup] = {}

    def group(self, title: str) -> "argparse._ArgumentGroup":
        if title not in self.titles:
            self.titles[title] = self.add_argument_group(title)
        return self.titles[title]

    def flag(
        self,
        group: str,
        name: str,
        kind: type,
        about: str,
        default: object,
        choices: tuple[str, ...] = (),
    ) -> None:
        """Add a flag for the field `name` to the help group `group`.

        `read` returns only the flags that the user typed.
        """
        about += f" (default: {default})" if default != "" else ""
        if kind is bool:
            self.group(group).add_argument(
                f"--{name}",
                help=about,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
            )
            return

        def read(text: str) -> Any:
            try:
                value = kind(text)
            except ValueError:
                self.wrong(
                    f"--{name} {quote_value(text)}",
                    f"must be a {'whole ' if kind is int else ''}number",
                    f"use a number, for example --{name} {default}",
                )
                return None
            if choices and value not in choices:
                self.wrong(
                    f"--{name} {quote_value(text)}",
                    "is not known",
                    f"use --{name} {' or '.join(choices)}",
                )
                return None
            return value

        metavar = "|".join(choices) or {int: "N", float: "X", str: "TEXT"}[kind]
        # `nargs` lets parsing continue after a flag whose value is missing, where argparse would
        # exit.
        self.group(group).add_argument(
            f"--{name}",
            metavar=metavar,
            help=about,
            type=read,
            nargs="?",
            const=self,
            default=argparse.SUPPRESS,
        )

    def read(self, argv: list[str]) -> dict[str, Any]:
        """Parse the arguments and return {name: value} for every valid flag."""
        spelled = {name.replace("_", "-"): name for name in self._option_string_actions}
        words: list[str] = []
        for word in argv:
            name, equals, value = word.partition("=")
            if re.match(r"-[\d.]", word) and words and words[-1] in self._option_string_actions:
                words[-1] += f"={word}"  # argparse reads a negative number as a flag
            elif word.startswith("--"):
                words.append(
                    self._switch(spelled.get(name.replace("_", "-"), name), equals + value)
                )
            else:
                words.append(word)
        found, unknown = self.parse_known_args(words)
        for flag, *values in _group_flag_values(unknown):
            if flag.startswith("-"):
                self.wrong(
                    " ".join([flag, *values]), "is not a flag of this command", self._meant(flag)
                )
            else:
                self.wrong(
                    flag,
                    "is not a flag",
                    "write --NAME VALUE: a flag begins with --, and its value follows it",
                )
        for name in [name for name, value in vars(found).items() if value is self]:
            self.wrong(f"--{name}", "requires a value", f"write --{name} VALUE")
        return {
            name: value
            for name, value in vars(found).items()
            if value is not None and value is not self
        }

    def _switch(self, flag: str, value: str) -> str:
        """Return `flag` with its `=value`, or --flag or --no-flag if it is a switch.

        `wandb agent` writes switches as =True and =False.
        """
        switch = isinstance(
            self._option_string_actions.get(flag), argparse.BooleanOptionalAction
        ) and not flag.startswith("--no-")
        if not switch or value.lower() not in ("=true", "=false"):
            return flag + value
        return flag if value.lower() == "=true" else f"--no-{flag[2:]}"

    def wrong(self, where: str, rule: str, fix: str) -> None:
        self.problems.append(Problem(where, rule, fix))

    def error(self, message: str) -> Any:
        raise ConfigError(
            [
                *self.problems,
                Problem("command line", message, f"list the flags with: python {self.prog} --help"),
            ],
            exit_code=2,
        )

    def _meant(self, flag: str) -> str:
        name = flag.partition("=")[0].lstrip("-").replace("-", "_")
        if known := foreign_flag_advice(name):
            return known
        spelled = {
            option.lstrip("-").replace("-", "_"): option for option in self._option_string_actions
        }
        near = nearest_name(name, spelled)
        return (
            f"did you mean {spelled[near]}?"
            if near
            else f"list the flags with: python {self.prog} --help"
        )


def quote_value(text: str) -> str:
    """Return a value as messages show it: quoted if blank or with unprintable characters."""
    return text if text.strip() and text.isprintable() else repr(text)


def _group_flag_values(args: list[str]) -> list[list[str]]:
    """Group each flag with the arguments that follow it, up to the next flag."""
    found: list[list[str]] = []
    for word in args:
        if found and not word.startswith("-") and found[-1][0].startswith("-"):
            found[-1].append(word)
        else:
            found.append([word])
    return found
