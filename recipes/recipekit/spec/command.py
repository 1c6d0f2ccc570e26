"""The command line of a recipe: its flags are the fields of `Recipe`."""

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

from .help_page import first_page, of_other_tasks, whole_page
from .other_names import advice, nearest
from .paths import run_folder
from .recipe import AXES, Recipe, check_recipe, kinds_of_field
from .refusal import Problem, Refusal, refuse
from .shadows import shadows
from .shipped import IS_WHEEL, recipes
from .task_specs import TASKS


@dataclass(frozen=True)
class Command:
    """Holds a recipe with its command line applied.

    `typed` names the fields that the user typed; nothing changes those.
    """

    recipe: Recipe
    name: str  # of the recipe's file, without .py
    folder: Path  # the recipe's file lies here
    typed: frozenset[str]
    # split, subset and revisions of the recipe's file, if another data set or model was typed
    unused: dict[str, str] = field(default_factory=dict)
    tiny: bool = False
    dry_run: bool = False
    show: str = ""  # "json": a dry run prints the resolved JSON
    show_row: bool = False
    device: str = ""  # a dry run says whether the states fit it
    world: int = 1
    rank: int = 0
    local_rank: int = 0
    local_ranks: int = 0  # of this host; 0: the launcher does not tell
    counted: int = 0  # steps of the recipe's epochs; 0: not known before the data are counted

    @property
    def revisions(self) -> dict[str, str]:
        """The revisions that the user asked for; a resume reads the commits of its first start
        instead.
        """
        return {
            "model_revision": self.recipe.model_revision,
            "dataset_revision": self.recipe.dataset_revision,
        }

    def fitted(self) -> tuple[Recipe, list[str]]:
        """Return the recipe with its warm-up, decay and ramp fitted to its steps, and a line for
        each change.

        A recipe with epochs has `counted` steps. Steps that the user typed replace the epochs of
        the recipe's file.
        """
        recipe, typed, lines = self.recipe, self.typed, list[str]()
        if type(recipe.epochs) not in (int, float) or recipe.epochs <= 0:
            return recipe.shortened(typed)
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
        recipe, more = recipe.shortened(typed)
        return recipe, lines + more

    @property
    def out(self) -> Path:
        """Return the run folder.

        Trials have folders of their own, apart from the run's. Raise `Refusal` as `run_folder`
        does.
        """
        return run_folder(
            str(self.recipe.out), f"runs/{self.name}{'_tiny' if self.tiny else ''}", self.dry_run
        )


def recipe_of(path: Path) -> Recipe:
    """Returns the `RECIPE` of a recipe's file; importing the file starts nothing.

    Raises `Refusal` if there is none.
    """
    if not path.is_file():
        rule = "is a folder" if path.is_dir() else "the file does not exist on this host"
        raise refuse(f"--recipe {path}", rule, _nearest_file(path) or "give a file of recipes/")
    if hidden := shadows(str(path.resolve().parent)):
        raise Refusal([Problem(*problem) for problem in hidden])
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        # not by an importer: its cache takes two files for the same if their sizes are equal and
        # both were written in one second
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except Refusal:
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
        raise refuse(
            f"--recipe {path}",
            f"cannot be imported: {type(error).__name__}: {error}",
            "correct the file",
        ) from None
    if hasattr(module, "RECIPE"):
        return one_recipe(module.RECIPE, path)
    other = next((name for name, value in vars(module).items() if isinstance(value, Recipe)), "")
    fix = f"rename {other} to RECIPE" if other else "give a file of recipes/"
    raise refuse(f"--recipe {path}", "sets no RECIPE = Recipe(...)", fix)


def one_recipe(value: Any, path: Path) -> Recipe:
    """Return the RECIPE of a recipe's file. Raise `Refusal` if it is no Recipe."""
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
    raise refuse(f"{path.name}: RECIPE", f"must be a Recipe, not {kind}", fix)


def _nearest_file(missing: Path) -> str:
    """Suggest the recipe's file that was probably meant by one that is not there; "" if none is
    near.
    """
    beside = {file.stem: file for file in sorted(missing.parent.glob("*.py"))}
    near = difflib.get_close_matches(missing.stem, recipes() | beside, 1)
    if not near:
        return ""
    name = near[0]
    meant = name if IS_WHEEL and name not in beside else os.path.relpath((recipes() | beside)[name])
    return f"did you mean {meant}?"


OF_DRY_RUNS = {  # flag -> why a real run has none
    "device": "a real run has the devices that it sees",
    "show": "a real run writes the resolved JSON into its run folder",
    "world": "a real run has the ranks its launcher starts",
}


def parse(recipe: Recipe, path: Path, argv: list[str] | None = None) -> Command:
    """Reads the command line into a `Command`; has no side effect.

    Raises `Refusal` (exit code 2) with every mistake.

    Flags are the plain fields of `Recipe`, with `-` or `_`. World size and rank are read from
    WORLD_SIZE, RANK and LOCAL_RANK, which every launcher sets; without them the job is one rank.
    The ranks of this host are LOCAL_WORLD_SIZE (torchrun, `python -m launch`) or LOCAL_SIZE
    (deepspeed).
    """
    recipe = one_recipe(recipe, path)
    parser = _parser_of(vars(recipe), path)
    words = sys.argv[1:] if argv is None else argv
    if page := _help_asked(words):
        _show_help(page, vars(recipe), path, parser)
    flags = [item.name for item in dataclasses.fields(recipe) if "help" in item.metadata]
    given = parser.read(words)

    world = _checked_world(parser, given)
    changes = {name: given[name] for name in flags if name in given}
    if "deepspeed_config" in given:
        changes["ds_config"] = given["deepspeed_config"]
    changed, unused = dataclasses.replace(
        recipe, **_switched_off(changes), **changes
    ).for_other_data(recipe, frozenset(changes))
    if parser.problems:
        raise Refusal(
            parser.problems + check_recipe(changed.shortened(frozenset(changes))[0]), exit_code=2
        )
    return Command(
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
    """Return the parser of a recipe's flags, in groups by subject; `values` are those of its
    fields.
    """
    parser = _Parser(path.name)
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
                item.metadata["help"],
                values[item.name],
                item.metadata.get("choices", ()),
            )
    parser.add_argument("--local_rank", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _checked_world(parser: "_Parser", given: dict[str, Any]) -> int:
    """Return the number of ranks, and note each flag that must not be combined with another."""
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if "device" in given and not given["device"].strip():
        parser.wrong(
            "--device ''",
            "must not be empty or blank",
            "name a device, for example --device H200. Check the variables of your shell",
        )
    for name in given.keys() & OF_DRY_RUNS if not given["dry_run"] else ():
        parser.wrong(f"--{name}", "requires --dry_run", OF_DRY_RUNS[name])
    if "world" in given:
        world = given["world"]
        if world < 1:
            parser.wrong(f"--world {world}", "must be at least 1", "use --world 1 or more")
    if {"steps", "epochs"} <= given.keys():
        where = f"--epochs {given['epochs']:g} with --steps {given['steps']}"
        parser.wrong(
            where,
            "cannot be combined: a run is limited by steps or by epochs",
            "use only one of them",
        )
    if "activation_checkpointing" in given and given.get("recompute_every", -1) >= 0:
        switch, every = given["activation_checkpointing"], given["recompute_every"]
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
    if given["dry_run"] and given["show_row"]:
        parser.wrong(
            "--show_row with --dry_run",
            "cannot be combined: each prints its own output and exits",
            "use only one of them",
        )
    return world


def _switched_off(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field to change in the recipe's file because a typed flag switches recomputation
    off, which two fields switch on.
    """
    if changes.get("activation_checkpointing") is False and "recompute_every" not in changes:
        return {"recompute_every": 0}
    if changes.get("recompute_every") == 0 and "activation_checkpointing" not in changes:
        return {"activation_checkpointing": False}
    return {}


def _help_asked(words: list[str]) -> str:
    """Return which page of the help a command line asks for: "first" or "all"; "" if none.

    Raise `Refusal` for other pages.
    """
    asked = [index for index, word in enumerate(words) if re.fullmatch(r"-h|--help(=.*)?", word)]
    if not asked:
        return ""
    page = words[asked[0]].partition("=")[2] or next(iter(words[asked[0] + 1 :]), "first")
    if page.startswith("-"):
        page = "first"
    if page not in ("first", "all"):
        raise Refusal(
            [
                Problem(
                    f"--help {shown(page)}", "the page does not exist", "use --help or --help all"
                )
            ],
            exit_code=2,
        )
    return page


def _show_help(page: str, values: Mapping[str, Any], path: Path, parser: "_Parser") -> NoReturn:
    """Print a page of the help, once for each host, and end."""
    task = values["task"] if values["task"] in tuple(TASKS) else Recipe.task
    adapted = values["adapt"] is not None
    hidden = of_other_tasks(task, adapted)
    groups = {
        title: [action for action in group._group_actions if action.dest not in hidden]
        for title, group in parser.titles.items()
    }
    if page == "all":
        text = whole_page(str(path), task, groups)
    else:
        degrees = [values[axis] for axis in AXES if type(values[axis]) is int]
        text = first_page(str(path), task, values["engine"], adapted, math.prod(degrees), groups)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, end="")
    raise SystemExit(0)


class _Parser(argparse.ArgumentParser):
    """Collects every mistake of a command line in `problems`, where argparse would end at the
    first.
    """

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
        default: Any,
        choices: tuple[str, ...] = (),
    ) -> None:
        """Adds a flag to the help's `group` that sets `name`.

        `read` returns only the flags that were typed.
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
                    f"--{name} {shown(text)}",
                    f"must be a {'whole ' if kind is int else ''}number",
                    f"use a number, for example --{name} {default}",
                )
                return None
            if choices and value not in choices:
                self.wrong(
                    f"--{name} {shown(text)}",
                    "is not known",
                    f"use --{name} {' or '.join(choices)}",
                )
                return None
            return value

        metavar = "|".join(choices) or {int: "N", float: "X", str: "TEXT"}[kind]
        # `nargs`: argparse would end at a flag without its value
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
        """Reads the words of a command line; returns {name: value} of every flag that is right."""
        spelled = {name.replace("_", "-"): name for name in self._option_string_actions}
        words: list[str] = []
        for word in argv:
            name, equals, value = word.partition("=")
            if re.match(r"-[\d.]", word) and words and words[-1] in self._option_string_actions:
                words[-1] += f"={word}"  # a negative number: argparse takes -1e-3 for a flag
            elif word.startswith("--"):
                words.append(
                    self._switch(spelled.get(name.replace("_", "-"), name), equals + value)
                )
            else:
                words.append(word)
        found, unknown = self.parse_known_args(words)
        for flag, *values in _with_values(unknown):
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
        """Return `flag` with its `=value`; --flag or --no-flag if a switch has =True or =False, as
        `wandb agent` writes them.
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
        raise Refusal(
            [
                *self.problems,
                Problem("command line", message, f"list the flags with: python {self.prog} --help"),
            ],
            exit_code=2,
        )

    def _meant(self, flag: str) -> str:
        name = flag.partition("=")[0].lstrip("-").replace("-", "_")
        if known := advice(name):
            return known
        spelled = {
            option.lstrip("-").replace("-", "_"): option for option in self._option_string_actions
        }
        near = nearest(name, spelled)
        return (
            f"did you mean {spelled[near]}?"
            if near
            else f"list the flags with: python {self.prog} --help"
        )


def shown(text: str) -> str:
    """Return a value as a message shows it: in quotes if it is blank, or has a character that does
    not print.
    """
    return text if text.strip() and text.isprintable() else repr(text)


def _with_values(words: list[str]) -> list[list[str]]:
    """Groups words: each flag with the words that follow it up to the next flag."""
    found: list[list[str]] = []
    for word in words:
        if found and not word.startswith("-") and found[-1][0].startswith("-"):
            found[-1].append(word)
        else:
            found.append([word])
    return found
