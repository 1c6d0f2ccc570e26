"""A recipe is data: one frozen dataclass, and the command line made from its fields."""

import argparse
import dataclasses
import difflib
import math
import os
import re
import shutil
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .refusal import Problem, Refusal, refuse


def _say(help: str, default: Any, **more: Any) -> Any:
    """A field with its help text, shown by `--help` under its `group`, which the fields after it share."""
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class Recipe:
    """One training run. Every plain field (number, string, switch) is a command-line flag of the same name."""

    model: str = _say("hub id or local folder of a causal language model", "", group="model")
    dataset: str = _say(
        "hub id, local files (a path, a glob, or several by comma), addresses of JSONL or Parquet files, builtin, or a mixture: NAME=DATASET@WEIGHT; ...",
        "builtin",
        group="data",
    )
    subset: str = _say("configuration name of a hub dataset", "")
    split: str = _say("split of the dataset", "train")
    text_field: str = _say("column that holds a document", "text")
    bad_rows: str = _say("a row or file that cannot be read: stop the run, or skip and count it", "stop", choices=("stop", "skip"))
    retry_s: float = _say("seconds for which a server that does not answer well is asked again for data", 600.0)
    token_cache: str = _say("folder that keeps tokens; auto: beside the cache of datasets, of local data only; off: none", "auto")
    messages_field: str = _say("column that holds a chat, for task sft", "messages")
    task: str = _say("pretrain: loss on every token; sft: chats, loss on the answers only", "pretrain", choices=("pretrain", "sft"))
    tokenizer: str = _say("hub id or folder of the tokenizer; bytes: the byte-level one made in code; empty: the model's own", "", group="model")
    init: str = _say("pretrained: the model's published weights; random: drawn from (seed, parameter name)", "pretrained", choices=("pretrained", "random"))
    attention: str = _say("attention implementation of transformers", "sdpa", choices=("sdpa", "eager", "flash_attention_2"))
    activation_checkpointing: bool = _say("recompute activations in the backward pass instead of keeping them", False)
    checkpoint_every: int = _say("with activation_checkpointing: recompute every N-th layer", 1)

    ds_config: str | dict = "zero2.json"  # memory strategy; on the command line --deepspeed_config
    tp: int = _say("tensor parallel degree", 1, group="layout")
    pp: int = _say("pipeline parallel degree", 1)
    sp: int = _say("sequence parallel degree: each rank holds 1 / sp of every row, and of the attention heads; for long rows", 1)
    ep: int = _say("expert parallel degree: each data-parallel rank holds 1 / ep of the experts of a layer, and the tokens travel", 1)
    pipeline_schedule: str = _say("order of the micro-batches when pp > 1", "1f1b", choices=("1f1b", "dualpipev"))
    pp_plan: dict | None = None  # module name -> "first", "split" or "last", for a model that publishes no pipeline plan

    seq_len: int = _say("tokens of a row", 1024, group="batch")
    micro_batch: int = _say("rows of one forward pass on one data-parallel rank", 1)
    global_batch: int = _say("rows of one optimizer step, all ranks together", 8)

    steps: int = _say("optimizer steps of the whole schedule", 1000, group="schedule and optimizer")
    lr: float = _say("peak learning rate", 3e-4)
    min_lr: float = _say("learning rate at the end of a cosine or linear schedule", 0.0)
    warmup_steps: int = _say("steps of linear warm-up", 0)
    schedule: str = _say("learning rate after the warm-up", "cosine", choices=("cosine", "linear", "constant"))
    weight_decay: float = _say("AdamW weight decay of matrices; vectors (norms, biases) are not decayed", 0.1)
    beta1: float = _say("AdamW beta1", 0.9)
    beta2: float = _say("AdamW beta2", 0.95)
    eps: float = _say("AdamW eps", 1e-8)
    gradient_clipping: float = _say("largest gradient norm; 0 switches clipping off", 1.0)

    eval_every: int = _say("steps between evaluations on held-out documents; 0: none", 0, group="evaluation, checkpoints, export")
    eval_rows: int = _say("held-out rows of an evaluation", 64)
    save_every: int = _say("steps between checkpoints; 0: only at the end", 0)
    keep: int = _say("checkpoints to keep; 0: all", 2)
    deterministic: bool = _say("the same bits each time on the same GPUs, for some speed; see recipes/README.md", False)
    save_in_background: bool = _say("go on training while a checkpoint is written; takes a copy of the states in host memory", False)
    stop_at: int = _say("save and end at this step, the schedule unchanged; 0: run to the end", 0)
    export: bool = _say("write Hugging Face safetensors to OUT/hf when the run is complete", True)
    merge: bool = _say("LoRA only: export merged weights instead of the adapter", False)
    seed: int = _say("seed of the initial weights, the data order and dropout", 0, group="run")
    out: str = _say("run folder; default runs/<recipe>, with --tiny runs/<recipe>_tiny", "")
    resume: str = _say("auto: go on with the run in OUT; never: start anew; or a run or step folder", "auto")
    wandb: bool = _say("record the run in Weights & Biases (offline when not logged in)", True, group="tracking")
    project: str = _say("Weights & Biases project", "deepspeed-recipes")
    grace: float = _say("seconds a rank may take to reach a step boundary once told to stop", 25.0, group="run")

    adapt: Callable[[Any], Any] | None = None  # model -> model, for example LoRA; called before DeepSpeed sees the model


@dataclass(frozen=True)
class Command:
    """A recipe with its command line applied. `typed` names the fields that the user typed; they are never changed."""

    recipe: Recipe
    name: str  # of the recipe's file, without .py
    folder: Path  # the recipe's file lies here
    typed: frozenset[str]
    tiny: bool = False
    dry_run: bool = False
    device: str = ""  # of which a dry run tells whether the states fit
    world: int = 1
    rank: int = 0
    local_rank: int = 0

    @property
    def out(self) -> Path:
        """The run folder. A trial has one of its own, so that it never stands in the way of the run."""
        return Path(self.recipe.out or f"runs/{self.name}{'_tiny' if self.tiny else ''}")


def recipe_of(path: Path) -> Recipe:
    """The `RECIPE` of a recipe's file, which starts nothing when it is imported. Raises `Refusal` if there is none."""
    if not path.is_file():
        raise refuse(f"--recipe {path}", "no such file on this host", "give a file of recipes/")
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        # not by an importer, whose cache takes a file of the same size for the same one if it was written in the same second
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except (SyntaxError, ImportError, TypeError, NameError, AttributeError, ValueError, LookupError, OSError) as error:
        raise refuse(f"--recipe {path}", f"cannot be imported: {type(error).__name__}: {error}", "mend the file") from None
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise refuse(f"--recipe {path}", "sets no RECIPE = Recipe(...)", "give a file of recipes/")
    return recipe


def parse(recipe: Recipe, path: Path, argv: list[str] | None = None) -> Command:
    """Reads the command line into a `Command`; has no side effect. Raises `Refusal` (exit code 2) with every mistake.

    Flags are the plain fields of `Recipe`, with `-` or `_`. World size and rank are read from WORLD_SIZE, RANK and
    LOCAL_RANK, which every launcher sets; without them the job is one rank.
    """
    parser = _Parser(path.name)
    trial = parser.group("try it")
    trial.add_argument("--tiny", action="store_true", help="shrink the model, rows and batch; built-in text; no network")
    trial.add_argument("--dry_run", action="store_true", help="print layout, batch, JSON and memory, then exit")
    parser.flag("try it", "world", int, "with --dry_run: number of ranks to plan for", 1)
    parser.flag("try it", "device", str, "with --dry_run: does it fit this device? H200, A100-40GB, ...; default: the one here", "")
    group, flags = "", []
    for item in dataclasses.fields(recipe):
        group = item.metadata.get("group", group)
        if item.name == "ds_config":
            name = recipe.ds_config if isinstance(recipe.ds_config, str) else "written in the recipe"
            parser.flag("layout", "deepspeed_config", str, "memory strategy: a JSON, looked up as typed, beside the recipe, in ds_configs/", name)
        if "help" in item.metadata:
            flags.append(item.name)
            parser.flag(group, item.name, _kind(item), item.metadata["help"], getattr(recipe, item.name), item.metadata.get("choices", ()))
    parser.add_argument("--local_rank", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    given = parser.read(sys.argv[1:] if argv is None else argv)

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if "device" in given and not given["dry_run"]:
        parser.wrong("--device", "goes with --dry_run only", "a real run has the devices that it sees")
    if "world" in given:
        if not given["dry_run"]:
            parser.wrong("--world", "goes with --dry_run only", "a real run has the ranks its launcher starts")
        world = given["world"]
        if world < 1:
            parser.wrong(f"--world {world}", "a job has at least 1 rank", "write --world 1 or more")
    changes = {name: given[name] for name in flags if name in given}
    if "deepspeed_config" in given:
        changes["ds_config"] = given["deepspeed_config"]
    changed = dataclasses.replace(recipe, **changes)
    if parser.problems:
        lowered = {"warmup_steps": 0} if "steps" in changes and "warmup_steps" not in changes else {}  # as the plan does
        raise Refusal(parser.problems + check_recipe(dataclasses.replace(changed, **lowered)), exit_code=2)
    return Command(
        recipe=changed,
        name=path.stem,
        folder=path.resolve().parent,
        typed=frozenset(changes),
        tiny=given["tiny"],
        dry_run=given["dry_run"],
        device=given.get("device", ""),
        world=world,
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK") or given.get("local_rank", 0)),
    )


def check_recipe(recipe: Recipe) -> list[Problem]:
    """Every value of the recipe that no layout could make right."""
    problems = _wrong_kinds(recipe)
    told = {problem.where.partition(" = ")[0] for problem in problems}
    recipe = dataclasses.replace(recipe, **{name: Recipe.__dataclass_fields__[name].default for name in told})  # what follows compares numbers
    if not recipe.model and "model" not in told:
        problems.append(Problem("model = ''", "a recipe names its model", "use --model ORG/NAME or --model FOLDER"))
    for name in ("seq_len", "micro_batch", "global_batch", "steps", "eval_rows", "checkpoint_every"):
        if (value := getattr(recipe, name)) < 1:
            problems.append(Problem(f"{name} = {value}", "must be at least 1", f"use --{name} 1 or more"))
    for name in ("warmup_steps", "eval_every", "save_every", "keep", "stop_at", "weight_decay", "gradient_clipping", "min_lr", "seed"):
        if (value := getattr(recipe, name)) < 0:
            problems.append(Problem(f"{name} = {value}", "must not be negative", f"use --{name} 0 or more"))
    for name in ("lr", "eps", "grace", "retry_s"):
        if (value := getattr(recipe, name)) <= 0:
            problems.append(Problem(f"{name} = {value}", "must be a positive number", f"for example --{name} {Recipe.__dataclass_fields__[name].default}"))
    for name in ("beta1", "beta2"):
        if not 0 <= (value := getattr(recipe, name)) < 1:
            problems.append(Problem(f"{name} = {value}", "must lie in [0, 1)", f"for example --{name} {Recipe.__dataclass_fields__[name].default}"))
    if recipe.warmup_steps >= recipe.steps > 0 and recipe.warmup_steps > 0:
        rule = f"the warm-up must be shorter than the schedule of {recipe.steps} steps"
        problems.append(Problem(f"warmup_steps = {recipe.warmup_steps}", rule, f"use --warmup_steps {recipe.steps // 10} or a larger --steps"))
    if recipe.stop_at > recipe.steps > 0:
        problems.append(
            Problem(f"stop_at = {recipe.stop_at}", f"lies after the last step, {recipe.steps}", f"use --stop_at {recipe.steps} or less, or a larger --steps")
        )
    if recipe.min_lr > recipe.lr > 0:
        problems.append(Problem(f"min_lr = {recipe.min_lr}", f"is larger than lr = {recipe.lr}", f"use --min_lr {recipe.lr / 10} or less"))
    if recipe.min_lr and recipe.schedule == "constant":
        problems.append(Problem(f"min_lr = {recipe.min_lr}", "a constant schedule never reaches it", "use --schedule cosine or leave min_lr out"))
    if recipe.attention == "flash_attention_2" and recipe.micro_batch > 1 and recipe.sp == 1:
        # transformers 5.22.2 looks for documents in position_ids only where there is one row (_is_packed_sequence)
        rule = "FlashAttention keeps the documents of a row apart only if the row is alone; packed documents would see each other"
        problems.append(Problem(f"micro_batch = {recipe.micro_batch} with attention = flash_attention_2", rule, "use --micro_batch 1, or --attention sdpa"))
    if recipe.pp > 1 and recipe.adapt is not None:
        problems.append(Problem(f"pp = {recipe.pp}", "an adapter goes round the whole model, of which a stage has a part", "use --pp 1"))
    if recipe.checkpoint_every > 1 and not recipe.activation_checkpointing:
        problems.append(
            Problem(f"checkpoint_every = {recipe.checkpoint_every}", "nothing is recomputed without activation_checkpointing", "add --activation_checkpointing")
        )
    if recipe.merge and recipe.adapt is None:
        problems.append(Problem("merge = True", "this recipe trains no adapter, there is nothing to merge", "leave --merge out"))
    return problems


def _wrong_kinds(recipe: Recipe) -> list[Problem]:
    """Fields of another type than declared, numbers that are not finite, words that are not among the choices."""
    problems = []
    for item in dataclasses.fields(recipe):
        if "help" not in item.metadata:
            continue
        value, kind, choices = getattr(recipe, item.name), _kind(item), item.metadata.get("choices")
        where = f"{item.name} = {value!r}"
        if type(value) is not kind and not (kind is float and type(value) is int):
            problems.append(Problem(where, f"must be of type {kind.__name__}, not {type(value).__name__}", f"for example {item.name}={item.default!r}"))
        elif kind is float and not math.isfinite(value):
            problems.append(Problem(where, "is not a finite number", f"for example --{item.name} {item.default}"))
        elif choices and value not in choices:
            problems.append(Problem(where, "is not known", f"use --{item.name} {' or '.join(choices)}"))
    return problems


def _kind(item: dataclasses.Field[Any]) -> type:
    assert isinstance(item.type, type)
    return item.type


# What people type who come from elsewhere, and what it is called here.
ELSEWHERE = {
    "dp": "leave it out: data parallelism takes the ranks that are left by --tp, --pp, --sp and --ep",
    "batch_size": "use --global_batch (rows of a step) or --micro_batch (rows of a forward pass)",
    **dict.fromkeys(("bs", "per_device_train_batch_size"), "use --micro_batch"),
    "gradient_accumulation_steps": "use --global_batch: a step has global_batch / (micro_batch x data-parallel ranks) micro-batches",
    "learning_rate": "use --lr",
    "max_steps": "use --steps",
    **dict.fromkeys(("epochs", "num_train_epochs"), "use --steps: a run is as long as its optimizer steps"),
    "output_dir": "use --out",
    **dict.fromkeys(("max_length", "max_seq_length"), "use --seq_len"),
    **dict.fromkeys(("bf16", "fp16"), "the JSON sets the precision: --deepspeed_config FILE.json"),
    **dict.fromkeys(("stage", "zero", "zero_stage"), "the JSON sets the ZeRO stage: --deepspeed_config zero3.json"),
    **dict.fromkeys(
        ("gpus", "nodes", "num_gpus", "num_nodes", "nproc_per_node", "hostfile", "master_port"), "is the launcher's: write it before the recipe's file"
    ),
}


class _Help(argparse.HelpFormatter):
    """One spelling of each flag: `--[no-]wandb`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=min(120, shutil.get_terminal_size().columns))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.dest}"
        return " ".join([", ".join(action.option_strings), *([str(action.metavar)] if action.metavar else [])])


class _Parser(argparse.ArgumentParser):
    """argparse that collects every mistake of a command line in `problems`, instead of ending at the first."""

    def __init__(self, prog: str) -> None:
        about = "Every flag is a number of the recipe and may be written with - or _; in brackets is what the recipe's file says."
        super().__init__(prog, f"python {prog} [--FLAG VALUE ...]", about, allow_abbrev=False, formatter_class=_Help)
        self.problems: list[Problem] = []
        self._titles: dict[str, argparse._ArgumentGroup] = {}

    def group(self, title: str) -> "argparse._ArgumentGroup":
        if title not in self._titles:
            self._titles[title] = self.add_argument_group(title)
        return self._titles[title]

    def flag(self, group: str, name: str, kind: type, about: str, default: Any, choices: tuple[str, ...] = ()) -> None:
        """A flag of the `group` that sets `name`; left out, it is not among what `read` returns."""
        about += f" (here: {default})" if default != "" else ""
        if kind is bool:
            self.group(group).add_argument(f"--{name}", help=about, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS)
            return

        def read(text: str) -> Any:
            try:
                value = kind(text)
            except ValueError:
                self.wrong(f"--{name} {text}", f"is no {'whole ' if kind is int else ''}number", f"for example --{name} {default}")
                return None
            if choices and value not in choices:
                self.wrong(f"--{name} {text}", "is not known", f"use --{name} {' or '.join(choices)}")
                return None
            return value

        metavar = "|".join(choices) or {int: "N", float: "X", str: "TEXT"}[kind]
        # `nargs`: argparse would end at a flag without its value
        self.group(group).add_argument(f"--{name}", metavar=metavar, help=about, type=read, nargs="?", const=self, default=argparse.SUPPRESS)

    def read(self, argv: list[str]) -> dict[str, Any]:
        """name -> value of every flag that is right."""
        spelled = {name.replace("_", "-"): name for name in self._option_string_actions}
        words: list[str] = []
        for word in argv:
            name, equals, value = word.partition("=")
            if re.match(r"-[\d.]", word) and words and words[-1] in self._option_string_actions:
                words[-1] += f"={word}"  # a negative number, which argparse takes for a flag when it is written 1e-3
            else:
                words.append(spelled.get(name.replace("_", "-"), name) + equals + value if word.startswith("--") else word)
        found, unknown = self.parse_known_args(words)
        for flag, *values in _with_values(unknown):
            if flag.startswith("-"):
                self.wrong(" ".join([flag, *values]), "is no flag of a recipe", self._meant(flag))
            else:
                self.wrong(flag, "is no flag", "flags begin with --, and a value follows its flag")
        for name in [name for name, value in vars(found).items() if value is self]:
            self.wrong(f"--{name}", "needs a value", f"write --{name} VALUE")
        return {name: value for name, value in vars(found).items() if value is not None and value is not self}

    def wrong(self, where: str, rule: str, fix: str) -> None:
        self.problems.append(Problem(where, rule, fix))

    def error(self, message: str) -> Any:
        raise Refusal([*self.problems, Problem("command line", message, f"python {self.prog} --help lists the flags")], exit_code=2)

    def print_help(self, file: Any = None) -> None:
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            print(self.format_help(), end="", file=file or sys.stdout)

    def _meant(self, flag: str) -> str:
        name = flag.partition("=")[0].lstrip("-").replace("-", "_")
        if name in ELSEWHERE:
            return ELSEWHERE[name]
        near = _nearest(f"--{name}", list(self._option_string_actions))
        return f"did you mean {near}?" if near else f"python {self.prog} --help lists the flags"


def _with_values(words: list[str]) -> list[list[str]]:
    """The words that are no flags, each behind the flag before it."""
    found: list[list[str]] = []
    for word in words:
        if found and not word.startswith("-") and found[-1][0].startswith("-"):
            found[-1].append(word)
        else:
            found.append([word])
    return found


def _nearest(typed: str, flags: list[str]) -> str | None:
    """The flag that was probably meant; of two that are about as near, the one that begins alike. None if none is near."""

    def likeness(flag: str) -> float:
        matcher = difflib.SequenceMatcher(None, flag, typed)
        return matcher.ratio() + matcher.get_matching_blocks()[0].size / 20

    return max(difflib.get_close_matches(typed, flags, 5), key=likeness, default=None)
