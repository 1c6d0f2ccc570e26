"""A recipe is data: one frozen dataclass, and the command line made from its fields."""

import argparse
import dataclasses
import difflib
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .refusal import Problem, Refusal, refuse


def _say(help: str, default: Any, **more: Any) -> Any:
    """A field with its help text, shown by `--help`."""
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class Recipe:
    """One training run. Every plain field (number, string, switch) is a command-line flag of the same name."""

    model: str = _say("hub id or local folder of a causal language model", "")
    dataset: str = _say(
        "hub id, local files (a path, a glob, or several by comma), addresses of JSONL or Parquet files, builtin, or a mixture: NAME=DATASET@WEIGHT; ...",
        "builtin",
    )
    subset: str = _say("configuration name of a hub dataset", "")
    split: str = _say("split of the dataset", "train")
    text_field: str = _say("column that holds a document", "text")
    bad_rows: str = _say("a row or file that cannot be read: stop the run, or skip and count it", "stop", choices=("stop", "skip"))
    retry_s: float = _say("seconds for which a server that does not answer well is asked again for data", 600.0)
    token_cache: str = _say("folder that keeps tokens; auto: beside the cache of datasets, of local data only; off: none", "auto")
    messages_field: str = _say("column that holds a chat, for task sft", "messages")
    task: str = _say("pretrain: loss on every token; sft: chats, loss on the answers only", "pretrain", choices=("pretrain", "sft"))
    tokenizer: str = _say("hub id or folder of the tokenizer; bytes: the byte-level one made in code; empty: the model's own", "")
    init: str = _say("pretrained: the model's published weights; random: drawn from (seed, parameter name)", "pretrained", choices=("pretrained", "random"))
    attention: str = _say("attention implementation of transformers", "sdpa", choices=("sdpa", "eager", "flash_attention_2"))
    activation_checkpointing: bool = _say("recompute activations in the backward pass instead of keeping them", False)
    checkpoint_every: int = _say("with activation_checkpointing: recompute every N-th layer", 1)

    ds_config: str | dict = "zero2.json"  # memory strategy; on the command line --deepspeed_config
    tp: int = _say("tensor parallel degree", 1)
    pp: int = _say("pipeline parallel degree", 1)
    sp: int = _say("sequence parallel degree: each rank holds 1 / sp of every row, and of the attention heads; for long rows", 1)
    ep: int = _say("expert parallel degree: each data-parallel rank holds 1 / ep of the experts of a layer, and the tokens travel", 1)
    pipeline_schedule: str = _say("order of the micro-batches when pp > 1", "1f1b", choices=("1f1b", "dualpipev"))
    pp_plan: dict | None = None  # module name -> "first", "split" or "last", for a model that publishes no pipeline plan

    seq_len: int = _say("tokens of a row", 1024)
    micro_batch: int = _say("rows of one forward pass on one data-parallel rank", 1)
    global_batch: int = _say("rows of one optimizer step, all ranks together", 8)

    steps: int = _say("optimizer steps of the whole schedule", 1000)
    lr: float = _say("peak learning rate", 3e-4)
    min_lr: float = _say("learning rate at the end of a cosine or linear schedule", 0.0)
    warmup_steps: int = _say("steps of linear warm-up", 0)
    schedule: str = _say("learning rate after the warm-up", "cosine", choices=("cosine", "linear", "constant"))
    weight_decay: float = _say("AdamW weight decay of matrices; vectors (norms, biases) are not decayed", 0.1)
    beta1: float = _say("AdamW beta1", 0.9)
    beta2: float = _say("AdamW beta2", 0.95)
    eps: float = _say("AdamW eps", 1e-8)
    gradient_clipping: float = _say("largest gradient norm; 0 switches clipping off", 1.0)

    eval_every: int = _say("steps between evaluations on held-out documents; 0: none", 0)
    eval_rows: int = _say("held-out rows of an evaluation", 64)
    save_every: int = _say("steps between checkpoints; 0: only at the end", 0)
    keep: int = _say("checkpoints to keep; 0: all", 2)
    save_in_background: bool = _say("go on training while a checkpoint is written; takes a copy of the states in host memory", False)
    stop_at: int = _say("save and end at this step, the schedule unchanged; 0: run to the end", 0)
    export: bool = _say("write Hugging Face safetensors to OUT/hf when the run is complete", True)
    merge: bool = _say("LoRA only: export merged weights instead of the adapter", False)
    seed: int = _say("seed of the initial weights, the data order and dropout", 0)
    out: str = _say("run folder; default runs/<recipe>", "")
    resume: str = _say("auto: go on with the run in OUT; never: start anew; or a run or step folder", "auto")
    wandb: bool = _say("record the run in Weights & Biases (offline when not logged in)", True)
    project: str = _say("Weights & Biases project", "deepspeed-recipes")
    grace: float = _say("seconds a rank may take to reach a step boundary once told to stop", 25.0)

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
    world: int = 1
    rank: int = 0
    local_rank: int = 0


def recipe_of(path: Path) -> Recipe:
    """The `RECIPE` of a recipe's file, which starts nothing when it is imported. Raises `Refusal` if there is none."""
    if not path.is_file():
        raise refuse(f"--recipe {path}", "no such file on this host", "give a file of recipes/")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise refuse(f"--recipe {path}", "is no Python file", "give a file of recipes/")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError, TypeError, NameError, AttributeError, ValueError, LookupError, OSError) as error:
        raise refuse(f"--recipe {path}", f"cannot be imported: {type(error).__name__}: {error}", "mend the file") from None
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise refuse(f"--recipe {path}", "sets no RECIPE = Recipe(...)", "give a file of recipes/")
    return recipe


def parse(recipe: Recipe, path: Path, argv: list[str] | None = None) -> Command:
    """Reads the command line into a `Command`. Raises `Refusal` (exit code 2) for a wrong one; has no side effect.

    Flags are the plain fields of `Recipe`, with `-` or `_`. World size and rank are read from WORLD_SIZE, RANK and
    LOCAL_RANK, which every launcher sets; without them the job is one rank.
    """
    parser = _Parser(prog=path.name, description=None, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flags = {}
    for item in dataclasses.fields(recipe):
        if "help" not in item.metadata:
            continue
        flags[item.name] = item
        names = ["--" + item.name] + (["--" + item.name.replace("_", "-")] if "_" in item.name else [])
        default = getattr(recipe, item.name)
        about = f"{item.metadata['help']} (here: {default!r})"
        if item.type is bool:
            parser.add_argument(*names, help=about, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS)
        else:
            parser.add_argument(*names, help=about, type=_kind(item), choices=item.metadata.get("choices"), default=argparse.SUPPRESS)
    parser.add_argument("--deepspeed_config", "--deepspeed-config", metavar="FILE.json", default=argparse.SUPPRESS, help="memory strategy")
    parser.add_argument("--tiny", action="store_true", help="shrink the model, rows and batch; built-in text; no network")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="print layout, batch, JSON and memory, then exit")
    parser.add_argument("--world", type=int, default=argparse.SUPPRESS, help="with --dry_run: number of ranks to plan for")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    given = vars(parser.parse_args(argv))

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if "world" in given:
        if not given["dry_run"]:
            raise _usage("--world", "goes with --dry_run only", "a real run has the ranks its launcher starts")
        world = given["world"]
        if world < 1:
            raise _usage(f"--world {world}", "a job has at least 1 rank", "write --world 1 or more")
    changes = {name: given[name] for name in flags if name in given}
    typed = set(changes)
    if "deepspeed_config" in given:
        changes["ds_config"] = given["deepspeed_config"]
        typed.add("ds_config")
    return Command(
        recipe=dataclasses.replace(recipe, **changes),
        name=path.stem,
        folder=path.resolve().parent,
        typed=frozenset(typed),
        tiny=given["tiny"],
        dry_run=given["dry_run"],
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
    if recipe.stop_at > recipe.steps:
        problems.append(
            Problem(f"stop_at = {recipe.stop_at}", f"lies after the last step, {recipe.steps}", f"use --stop_at {recipe.steps} or less, or a larger --steps")
        )
    if recipe.min_lr > recipe.lr:
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


def _usage(where: str, rule: str, fix: str) -> Refusal:
    return Refusal([Problem(where, rule, fix)], exit_code=2)


class _Parser(argparse.ArgumentParser):
    """argparse, whose errors are refusals (so that one rank prints them), with the nearest flag named."""

    def error(self, message: str) -> Any:
        known = [name for action in self._actions for name in action.option_strings]
        wrong = [word.split("=")[0] for word in message.split() if word.startswith("-")]
        near = _nearest(wrong[-1], known) if wrong and "unrecognized" in message else None
        fix = f"did you mean {near}?" if near else f"python {self.prog} --help lists the flags"
        raise _usage("command line", message, fix)

    def print_help(self, file: Any = None) -> None:
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            print(self.format_help(), file=file or sys.stdout)


def _nearest(typed: str, flags: list[str]) -> str | None:
    """The flag that was probably meant; of two that are about as near, the one that begins alike. None if none is near."""

    def likeness(flag: str) -> float:
        matcher = difflib.SequenceMatcher(None, flag, typed)
        return matcher.ratio() + matcher.get_matching_blocks()[0].size / 20

    return max(difflib.get_close_matches(typed, flags, 5), key=likeness, default=None)
