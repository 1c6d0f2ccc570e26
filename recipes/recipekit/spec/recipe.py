"""A recipe is data: one frozen dataclass, and the command line made from its fields."""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, get_args

from .arguments import wrong_names, wrong_objects
from .phases import Ramp, check_ramp, check_rates, cut, ramp_of, shorter
from .refusal import Problem, Refusal
from .task_specs import PACKED, TASKS, Facts, Plans


def _say(help: str, default: Any, **more: Any) -> Any:
    """A field with its help text, shown by `--help` under its `group`, which the fields after it
    share.
    """
    return field(default=default, metadata={"help": help, **more})


ENGINES = ("deepspeed", "ddp", "fsdp2")
# Fields whose empty value is documented: none, the default folder, or the model's own.
# fields about a repository
OWN = {"dataset": ("split", "subset", "dataset_revision"), "model": ("model_revision",)}
EMPTY_HAS_A_MEANING = (
    "subset",
    "model_revision",
    "dataset_revision",
    "prompt_field",
    "tokenizer",
    "batch_ramp",
    "out",
)
MAY_BE_ZERO = (
    *(
        "warmup_steps",
        "decay_steps",
        "eval_every",
        "save_every",
        "keep",
        "keep_every",
        "stop_at",
        "weight_decay",
    ),
    *("gradient_clipping", "min_lr", "seed", "num_labels", "epochs", "recompute_every"),
)  # numbers that must not be negative
FLAGS = {"ds_config": "deepspeed_config"}  # fields whose flag has another name
PATHS = ("dataset", "ds_config", "model", "out", "resume", "token_cache", "tokenizer")
LONGEST_NAME = 255  # bytes in the name of a file
LARGEST = (1 << 63) - 1  # of whole numbers: torch, numpy and pyarrow keep them in 64 bits
MOST_RANKS = 1 << 16  # of a degree: the search for numbers of ranks that fit takes as many trials


@dataclass(frozen=True)
class Recipe:
    """One training run.

    Every plain field (number, string, switch) is a command-line flag of the same name.
    """

    def __new__(cls, *values: Any, **fields: Any) -> "Recipe":
        """Raise `Refusal` for values without a name, and for names that are no fields."""
        if problems := wrong_names(values, fields, cls.__dataclass_fields__):
            raise Refusal(problems)
        return super().__new__(cls)

    model: str = _say("Model to train: a Hub id or a local folder.", "", group="model")
    model_revision: str = _say(
        "Branch, tag or commit of the model and its tokenizer on the Hub. If empty, main is used.",
        "",
    )
    dataset: str = _say(
        "Training data: Hub id, local files (path, glob or comma-separated list), URLs of JSONL or"
        " Parquet files, or builtin. For a mixture, write NAME=DATASET@WEIGHT;"
        " NAME=DATASET@WEIGHT.",
        "builtin",
        group="data",
    )
    subset: str = _say(
        "Subset (configuration) of the dataset, as its dataset card lists it. If empty, the default"
        " subset is used.",
        "",
    )
    split: str = _say("Split of the dataset. A local file counts as the split train.", "train")
    dataset_revision: str = _say(
        "Branch, tag or commit of the dataset on the Hub. If empty, main is used.", ""
    )
    text_field: str = _say("Column that contains the text of each document.", "text")
    bad_rows: str = _say(
        "Action on an unreadable row or file. stop: save and end the run. skip: skip it and"
        " count it.",
        "stop",
        choices=("stop", "skip"),
    )
    retry_s: float = _say(
        "Seconds to keep retrying a failing data server before the run stops.", 600.0
    )
    token_cache: str = _say(
        "Folder that caches tokenised data. auto: local data only, next to the datasets cache. off:"
        " no cache.",
        "auto",
    )
    messages_field: str = _say("Column that contains the messages of each chat.", "messages")
    prompt_field: str = _say(
        "Column that contains the prompt of each pair, as text or messages. If empty, both answers"
        " begin with the prompt.",
        "prompt",
    )
    chosen_field: str = _say(
        "Column that contains the preferred answer of each pair, as text or messages.", "chosen"
    )
    rejected_field: str = _say(
        "Column that contains the rejected answer of each pair, as text or messages.", "rejected"
    )
    image_field: str = _say(
        "Column that contains the image, as an encoded file (PNG, JPEG, ...) or as rows of pixels.",
        "image",
    )
    label_field: str = _say(
        "Column that contains the class of the image, as an integer from 0.", "label"
    )
    mask_rate: float = _say(
        "Fraction of tokens to mask, between 0 and 1. Masked tokens are sampled again in each"
        " epoch.",
        0.15,
    )
    whole_words: bool = _say("Mask whole words: either all tokens of a word or none.", False)
    augment: str = _say(
        "Augmentation of training images. crop: random crop and random mirroring. none: center"
        " crop.",
        "crop",
        choices=("crop", "none"),
    )
    threads: int = _say(
        "Threads on each rank that decode and augment images. The number does not change the data.",
        2,
    )
    task: str = _say(
        " ".join(("Training task.", *(f"{name}: {facts.about}." for name, facts in TASKS.items()))),
        "pretrain",
        choices=tuple(TASKS),
    )
    tokenizer: str = _say(
        "Tokenizer: a Hub id, a folder, or bytes (the built-in byte-level tokenizer). If empty, the"
        " model's own tokenizer is used.",
        "",
        group="model",
    )
    init: str = _say(
        "Initial weights. pretrained: the published weights. random: sampled from the seed and each"
        " parameter's name.",
        "pretrained",
        choices=("pretrained", "random"),
    )
    num_labels: int = _say(
        "Number of classes. 0 keeps the model's number. A missing head, or one of another size, is"
        " randomly initialised.",
        0,
    )
    attention: str = _say(
        "Attention implementation. varlen: separates packed documents without a mask. auto: varlen"
        " if it is exact for the model, otherwise sdpa; the log gives the reason. sdpa, eager and"
        " flash_attention_2 are implemented in transformers.",
        "auto",
        choices=("auto", "varlen", "sdpa", "eager", "flash_attention_2"),
    )
    loss: str = _say(
        "Cross-entropy implementation. chunked: computes the logits in chunks, to save memory."
        " whole: full logits. auto: chunked if exact, otherwise whole.",
        "auto",
        choices=("auto", "chunked", "whole"),
    )
    compile: str = _say(
        "Use torch.compile for the loss and the layers. If whole layers cannot be compiled, only"
        " their norms and rotary embeddings are. auto: on if the GPU supports it.",
        "auto",
        choices=("auto", "on", "off"),
    )
    beta: float = _say(
        "DPO beta. A larger value keeps the model closer to the reference model.", 0.1
    )
    activation_checkpointing: bool = _say(
        "Recompute the activations of every layer in the backward pass, to save memory. The same as"
        " --recompute_every 1.",
        False,
    )
    recompute_every: int = _say(
        "Recompute the activations of every N-th layer in the backward pass, to save memory. 1"
        " recomputes every layer, 0 none.",
        0,
    )

    ds_config: str | dict = "zero2.json"  # memory strategy; on the command line --deepspeed_config
    engine: str = _say(
        "Training engine: DeepSpeed, or PyTorch's DDP or FSDP2. DDP and FSDP2 read no JSON.",
        "deepspeed",
        choices=ENGINES,
        group="layout",
    )
    precision: str = _say(
        "Compute precision of ddp and fsdp2. Weights stay fp32. Use fp16 for GPUs without bf16.",
        "bf16",
        choices=("bf16", "fp32", "fp16"),
    )
    tp: int = _say(
        "Tensor-parallel degree: ranks over which the weights of each layer are split. 1"
        " disables it.",
        1,
    )
    pp: int = _say(
        "Pipeline-parallel degree: ranks over which the sequence of layers is split. 1"
        " disables it.",
        1,
    )
    sp: int = _say(
        "Sequence-parallel degree, for long rows. Each rank holds 1/sp of each row and of the"
        " attention heads. 1 disables it.",
        1,
    )
    ep: int = _say(
        "Expert-parallel degree. Each data-parallel rank holds 1/ep of the experts of a layer. 1"
        " disables it.",
        1,
    )
    pipeline_schedule: str = _say(
        "Order of the micro-batches in the pipeline. Used only if pp > 1.",
        "1f1b",
        choices=("1f1b", "dualpipev"),
    )
    # for a model that publishes no plans, or others: see tasks.facts.Plans
    pp_plan: dict | None = None  # module name -> "first", "split" or "last"
    tp_plan: dict | None = None  # module name -> a tensor-parallel style of transformers
    tp_local: dict | None = None  # class of a module -> names of its attributes that tp divides
    no_decay: tuple = ()  # names of parameters that do not decay, besides vectors
    # name of parameters -> factor of their learning rate; `*` stands for any characters
    lr_scale: dict | None = None
    # names of weights that Muon takes for its matrices, in place of all in the layers
    matrices: tuple = ()

    seq_len: int = _say("Tokens per row (maximum sequence length).", 1024, group="batch")
    micro_batch: int = _say("Rows per forward pass on each data-parallel rank.", 1)
    global_batch: int = _say("Rows per optimizer step, summed over all ranks.", 8)
    batch_ramp: str = _say(
        "Global batches of later steps, as STEP:ROWS. For example, 501:512, 2001:1024 sets 512 rows"
        " from step 501 and 1024 from step 2001.",
        "",
    )

    steps: int = _say(
        "Total number of optimizer steps in the schedule.", 1000, group="schedule and optimizer"
    )
    epochs: float = _say(
        "Number of passes over local data. Sets the run length instead of --steps. 0 uses --steps.",
        0.0,
    )
    lr: float = _say("Peak learning rate.", 3e-4)
    min_lr: float = _say("Final learning rate of the cosine, linear and wsd schedules.", 0.0)
    warmup_steps: int = _say("Number of linear warm-up steps. 0 disables warm-up.", 0)
    schedule: str = _say(
        "Learning rate schedule after the warm-up. wsd: constant until the last --decay_steps"
        " steps, so that you can extend the run.",
        "cosine",
        choices=("cosine", "linear", "constant", "wsd"),
    )
    decay_steps: int = _say(
        "Number of final steps in which the wsd schedule lowers the learning rate, usually a tenth"
        " of --steps. Other schedules require 0.",
        0,
    )
    layer_decay: float = _say(
        "Layer-wise learning rate decay: lr of a layer = lr * layer_decay^(1 + number of layers"
        " above it). 1 disables it.",
        1.0,
    )
    weight_decay: float = _say(
        "AdamW weight decay of matrices. Vectors (norms, biases) are not decayed. 0 disables it.",
        0.1,
    )
    beta1: float = _say("AdamW beta1: decay rate of the mean of gradients.", 0.9)
    beta2: float = _say("AdamW beta2: decay rate of the mean of squared gradients.", 0.95)
    eps: float = _say("AdamW epsilon, added to the denominator.", 1e-8)
    gradient_clipping: float = _say(
        "Maximum gradient norm. Larger gradients are scaled down to it. 0 disables clipping.", 1.0
    )

    eval_every: int = _say(
        "Steps between evaluations on held-out rows. 0 disables evaluation. The metric step_s"
        " excludes evaluations.",
        0,
        group="evaluation, checkpoints, export",
    )
    eval_rows: int = _say("Number of held-out rows in each evaluation.", 64)
    save_every: int = _say(
        "Steps between checkpoints. 0 saves only at the end. The metric step_s excludes saves.", 0
    )
    keep: int = _say("Number of most recent checkpoints to keep. 0 keeps all.", 2)
    keep_every: int = _say(
        "Also save a checkpoint at every N-th step and never remove it. 0 disables this.", 0
    )
    keep_best: bool = _say(
        "Also keep the checkpoint with the lowest eval_loss. Only steps with an evaluation count.",
        False,
    )
    deterministic: bool = _say(
        "Make results bit-identical on the same GPUs, at some cost in speed. See"
        " recipes/CHECKPOINTS.md.",
        False,
    )
    save_in_background: bool = _say(
        "Continue training while a checkpoint is written. This needs host memory for a copy of the"
        " training states.",
        False,
    )
    stop_at: int = _say(
        "Save a checkpoint and stop at this step. The schedule does not change. 0 runs to the end.",
        0,
    )
    export: bool = _say("Write Hugging Face safetensors to OUT/hf when the run is complete.", True)
    merge: bool = _say(
        "Export the model with the LoRA adapter merged into its weights, instead of the adapter. A"
        " finished run exports to OUT/hf_merged.",
        False,
    )
    seed: int = _say("Random seed for initial weights, data order and dropout.", 0, group="run")
    out: str = _say(
        "Run folder. It may contain $VAR, {job_id} and {wandb_run_id}. If empty, runs/<recipe>, or"
        " runs/<recipe>_tiny with --tiny.",
        "",
    )
    resume: str = _say(
        "Checkpoint to resume from: a run or step folder. auto: the run in OUT, if there is one."
        " never: start from scratch.",
        "auto",
    )
    wandb: bool = _say(
        "Log the run to Weights & Biases. If you are not logged in, the run is recorded offline.",
        True,
        group="tracking",
    )
    project: str = _say("Name of the Weights & Biases project.", "deepspeed-recipes")
    wandb_artifact: bool = _say(
        "Upload OUT/hf to Weights & Biases as an artifact when the run is complete.", False
    )
    grace: str | float = _say(
        "Seconds in which each rank must reach the end of its step after a stop request. "
        "auto: three times the slowest step, but at least 25 and at most the scheduler's limit.",
        "auto",
        group="run",
    )

    # model -> model, for example LoRA; called before DeepSpeed sees the model
    adapt: Callable[[Any], Any] | None = None

    @property
    def labels(self) -> int:
        """How many outputs the head has; 0: as many as the model's config.json says."""
        return self.facts.labels or self.num_labels

    @property
    def recompute(self) -> int:
        """Return N if every N-th layer is recomputed in the backward pass, 0 if no layer is."""
        return self.recompute_every or int(self.activation_checkpointing)

    def saves_at(self, step: int) -> bool:
        """Return True if a checkpoint is due at a step; one is also saved where a run ends."""
        return any(number and step % number == 0 for number in (self.save_every, self.keep_every))

    @property
    def most_checkpoints(self) -> int:
        """How many checkpoints a run has at a time, at most: a new one is complete before an old
        one is removed.
        """
        if not (self.stop_at or self.steps):  # the start counts them
            return self.keep or 1
        before = (self.stop_at or self.steps) - 1  # steps that may be saved in addition to the last
        numbers = [number for number in (self.save_every, self.keep_every) if number]
        saves = 1 + sum(before // number for number in numbers)
        saves -= before // math.lcm(*numbers) if len(numbers) == 2 else 0
        kept = (
            self.keep
            + 1
            + self.keep_best
            + ((before + 1) // self.keep_every if self.keep_every else 0)
        )
        return min(saves, kept) if self.keep else saves

    @property
    def ramp(self) -> Ramp:
        """How many rows each step has."""
        return ramp_of(self.global_batch, self.batch_ramp)

    def shortened(self, typed: frozenset[str]) -> tuple["Recipe", list[str]]:
        """Fits warm-up, decay and ramp, where the user has not typed them, to the `--steps` of a
        trial; returns a line for each, too.
        """
        if "steps" not in typed or self.steps < 1 or check_kinds(vars(self)):
            return self, []
        fitted: dict[str, Any] = shorter(
            self.schedule, self.steps, self.warmup_steps, self.decay_steps, typed
        )
        lines = [
            f"{name}: {getattr(self, name)} of the recipe lowered to {number} for {self.steps}"
            " steps"
            for name, number in fitted.items()
        ]
        warmup = fitted.get("warmup_steps", self.warmup_steps)
        if warmup > self.steps / 4 and "warmup_steps" not in typed:
            lines.append(
                f"warmup_steps: {warmup} of the recipe are {warmup / self.steps:.0%} of"
                f" {self.steps} steps. Shorten with --warmup_steps {self.steps // 10}"
            )
        if (
            "batch_ramp" not in typed
            and (left := cut(self.batch_ramp, self.steps)) != self.batch_ramp
        ):
            fitted["batch_ramp"] = left
            lines.append(
                f"batch_ramp: {self.batch_ramp} of the recipe cut off after {self.steps} steps"
            )
        return dataclasses.replace(self, **fitted), lines

    def for_other_data(
        self, file: "Recipe", typed: frozenset[str]
    ) -> tuple["Recipe", dict[str, str]]:
        """Take the default split, subset and revision, unless typed, for a typed data set or model
        that is not the `file`'s.

        Return the recipe and the values of the recipe's file that do not apply.
        """
        others = [
            field
            for field in OWN
            if field in typed and getattr(self, field) != getattr(file, field)
        ]
        names = [name for field in others for name in OWN[field] if name not in typed]
        defaults = {name: _default_of(name) for name in names}
        changed = {
            name: default for name, default in defaults.items() if getattr(file, name) != default
        }
        return dataclasses.replace(self, **changed), {name: getattr(file, name) for name in changed}

    @property
    def plans(self) -> Plans:
        """What the recipe says of its model's modules."""
        cut = self.pp_plan or {}, self.tp_plan or {}, self.tp_local or {}
        return Plans(
            *cut,
            self.no_decay,
            lr_scale=self.lr_scale or {},
            layer_decay=self.layer_decay,
            matrices=self.matrices,
        )

    @property
    def facts(self) -> Facts:
        """The facts of its task; where it names none, which `check_recipe` refuses, those of the
        default.
        """
        return TASKS[self.task if self.task in tuple(TASKS) else Recipe.task]


def check_recipe(recipe: Recipe) -> list[Problem]:
    """Refuses every value of the recipe that no layout could make right."""
    problems = check_kinds(vars(recipe)) + check_values(vars(recipe))

    # What follows compares numbers, so a field that is refused already has its default there.
    refused = {problem.where.partition(" = ")[0] for problem in problems}
    recipe = dataclasses.replace(
        recipe, **{name: _default_of(name) for name in refused & Recipe.__dataclass_fields__.keys()}
    )
    values, facts, adapted = vars(recipe), recipe.facts, recipe.adapt is not None
    return [
        *problems,
        *_check_row(recipe.seq_len, facts),
        *_check_counts(values),
        *_check_grace(recipe.grace),
        *_check_ranges(values),
        *_check_steps(values),
        *check_rates(
            recipe.schedule,
            recipe.steps,
            recipe.warmup_steps,
            recipe.decay_steps,
            recipe.lr,
            recipe.min_lr,
        ),
        *check_ramp(recipe.batch_ramp, recipe.steps),
        *(_check_packed(values) if facts.rows == PACKED else []),
        *check_lacks(facts, {axis: values[axis] for axis in AXES}, adapted),
        *_check_adapted_stages(recipe.pp, adapted),
        *_check_rates(recipe.lr_scale or {}, recipe.layer_decay, adapted),
        *_check_exports(values),
    ]


def _default_of(name: str) -> Any:
    """Return the default of a field."""
    return Recipe.__dataclass_fields__[name].default


def _check_row(seq_len: int, facts: Facts) -> list[Problem]:
    """Refuse a row without a target."""
    if seq_len != 1 or "seq_len" not in facts.reads or facts.masked:
        return []
    rule = (
        "a row of one token has no target, because each token is predicted from the tokens"
        " before it"
    )
    return [Problem("seq_len = 1", rule, "use --seq_len 2 or more")]


def _check_counts(values: Mapping[str, Any]) -> list[Problem]:
    """Refuse counts that are too small."""
    problems = []
    for name in ("seq_len", "micro_batch", "global_batch", "steps", "eval_rows", "threads"):
        value, from_epochs = values[name], name == "steps" and values["epochs"]
        if value < 1 and not from_epochs:
            problems.append(
                Problem(f"{name} = {value}", "must be at least 1", f"use --{name} 1 or more")
            )
    for name in MAY_BE_ZERO:
        value = values[name]
        if value < 0:
            problems.append(
                Problem(f"{name} = {value}", "must not be negative", f"use --{name} 0 or more")
            )
    return problems


def _check_grace(grace: str | float) -> list[Problem]:
    """Refuse a grace that is no time."""
    try:
        seconds_of(grace)
    except ValueError:
        return [
            Problem(
                f"grace = {grace}",
                "must be auto or a positive number of seconds",
                "use --grace auto, or a number such as --grace 120",
            )
        ]
    return []


def _check_ranges(values: Mapping[str, Any]) -> list[Problem]:
    """Refuse rates and fractions out of their range."""
    problems = []
    for name in ("lr", "eps", "retry_s", "beta"):
        value = values[name]
        if value <= 0:
            fix = f"use a positive number, for example --{name} {_default_of(name)}"
            problems.append(Problem(f"{name} = {value}", "must be a positive number", fix))
    for name in ("beta1", "beta2"):
        value = values[name]
        if not 0 <= value < 1:
            rule = "must be at least 0 and less than 1"
            fix = f"use a number in this range, for example --{name} {_default_of(name)}"
            problems.append(Problem(f"{name} = {value}", rule, fix))
    mask_rate = values["mask_rate"]
    if not 0 < mask_rate < 1:
        fix = f"use a fraction, for example --mask_rate {Recipe.mask_rate}"
        problems.append(Problem(f"mask_rate = {mask_rate}", "must be between 0 and 1", fix))
    return problems


def _check_steps(values: Mapping[str, Any]) -> list[Problem]:
    """Refuse a stop after the last step, and the choice of a best step without evaluations."""
    problems = []
    stop_at, steps = values["stop_at"], values["steps"]
    if stop_at > steps > 0:
        rule = f"is after the last step, {steps}"
        fix = f"use --stop_at {steps} or less, or a larger --steps"
        problems.append(Problem(f"stop_at = {stop_at}", rule, fix))
    if values["keep_best"] and not values["eval_every"]:
        rule = "requires evaluations, which give an eval_loss"
        fix = "use --eval_every N with the steps between evaluations, or --no-keep_best"
        problems.append(Problem("keep_best = True with eval_every = 0", rule, fix))
    return problems


def _check_packed(values: Mapping[str, Any]) -> list[Problem]:
    """Refuse several rows of packed documents where FlashAttention would not separate them."""
    attention, micro_batch, sp = values["attention"], values["micro_batch"], values["sp"]
    if attention != "flash_attention_2" or micro_batch <= 1 or sp != 1:
        return []
    # transformers 5.22.2 looks for documents in position_ids only where there is one row
    # (_is_packed_sequence)
    rule = "FlashAttention separates packed documents only if the micro-batch has one row"
    where = f"micro_batch = {micro_batch} with attention = flash_attention_2"
    return [Problem(where, rule, "use --micro_batch 1, or --attention sdpa")]


def _check_adapted_stages(pp: int, adapted: bool) -> list[Problem]:
    """Refuse an adapter under pipeline parallelism."""
    if pp <= 1 or not adapted:
        return []
    rule = "an adapter wraps the whole model, and a pipeline stage holds only part of it"
    return [Problem(f"pp = {pp}", rule, "use --pp 1")]


def _check_exports(values: Mapping[str, Any]) -> list[Problem]:
    """Refuse uploads and merges of an export that the run does not make."""
    problems = []
    for needed in ("wandb", "export") if values["wandb_artifact"] else ():
        if not values[needed]:
            where = f"wandb_artifact = True with {needed} = False"
            rule = "wandb_artifact uploads the export to W&B, so it requires --export and --wandb"
            problems.append(Problem(where, rule, f"use --{needed}, or --no-wandb_artifact"))
    if values["merge"] and values["adapt"] is None:
        rule = "requires a recipe that trains an adapter"
        problems.append(Problem("merge = True", rule, "omit --merge"))
    return problems


def check_values(values: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each value of a recipe that is empty, blank or too large to plan with.

    Libraries read an empty path as the current folder. The usual cause is a variable of the shell
    that is not set.
    """
    found = []
    for name, value in values.items():
        flag = FLAGS.get(name, name)
        if (
            isinstance(value, str)
            and not value.strip()
            and not (value == "" and name in EMPTY_HAS_A_MEANING)
        ):
            examples = {
                "model": "ORG/NAME or a folder",
                "dataset": "ORG/NAME, a file, a folder or builtin",
            }
            fix = (
                f"use --{flag} with {examples.get(name, 'a value')}. Check the variables of your"
                " shell"
            )
            found.append(Problem(f"{flag} = {value!r}", "must not be empty or blank", fix))
        if (
            isinstance(value, str)
            and name in PATHS
            and (long := max(re.split("[/,;]", value), key=len))
            and len(os.fsencode(long)) > LONGEST_NAME
        ):
            rule = (
                f"has a file name of {len(os.fsencode(long))} bytes, but file systems allow at most"
                f" {LONGEST_NAME}"
            )
            found.append(
                Problem(f"{flag} = {value[:30]}...", rule, f"use a shorter path for --{flag}")
            )
        most = MOST_RANKS if name in AXES else LARGEST
        if type(value) is int and abs(value) > most:
            fix = f"for example --{flag} {_default_of(name)}"
            found.append(Problem(f"{flag} = {value}", f"must be at most {most}", fix))
    return found


def _check_rates(scales: dict[str, Any], layer_decay: float, adapted: bool) -> list[Problem]:
    """Refuses factors of learning rates that are none, and those of layers where an adapter is
    trained.
    """
    found = [
        Problem(
            f"lr_scale of {name!r} = {factor!r}",
            "must be a positive number",
            f"use for example lr_scale={{{name!r}: 0.5}} in the recipe",
        )
        for name, factor in scales.items()
        if type(factor) not in (int, float) or not 0 < factor < math.inf
    ]
    where = f"layer_decay = {layer_decay}"
    if layer_decay != 1 and adapted:
        found.append(
            Problem(
                where,
                "cannot be combined with an adapter: it scales the learning rates of the model's"
                " own layers",
                "leave it out",
            )
        )
    if not 0 < layer_decay <= 1:
        found.append(
            Problem(
                where,
                "must be above 0 and at most 1",
                "use a number in this range, for example --layer_decay 0.75",
            )
        )
    return found


AXES = ("tp", "pp", "sp", "ep")


def check_lacks(facts: Facts, degrees: Mapping[str, int], adapted: bool = False) -> list[Problem]:
    """Refuses the parallel degrees, and the adapter, that a task does not have."""
    found = [
        Problem(f"{axis} = {degree}", facts.lacks[axis], f"use --{axis} 1")
        for axis, degree in degrees.items()
        if degree > 1 and axis in facts.lacks
    ]
    return found + (
        [Problem("adapt", facts.lacks["adapt"], "remove adapt from the recipe")]
        if adapted and "adapt" in facts.lacks
        else []
    )


def check_kinds(values: dict[str, Any]) -> list[Problem]:
    """Refuses fields of another type than declared, numbers that are not finite, words that are not
    among the choices; `values`: vars(recipe).
    """
    problems = wrong_objects(values)
    for item in dataclasses.fields(Recipe):
        if "help" not in item.metadata:
            continue
        value, kinds, choices = (
            values[item.name],
            kinds_of_field(item),
            item.metadata.get("choices"),
        )
        where = f"{item.name} = {value!r}"
        if type(value) not in kinds and not (float in kinds and type(value) is int):
            names = " or ".join(kind.__name__ for kind in kinds)
            problems.append(
                Problem(
                    where,
                    f"must be of type {names}, not {type(value).__name__}",
                    f"for example {item.name}={item.default!r}",
                )
            )
        elif isinstance(value, float) and not math.isfinite(value):
            problems.append(
                Problem(
                    where, "must be a finite number", f"for example --{item.name} {item.default}"
                )
            )
        elif choices and value not in choices:
            problems.append(
                Problem(where, "is not known", f"use --{item.name} {' or '.join(choices)}")
            )
    return problems


def kinds_of_field(item: dataclasses.Field[Any]) -> tuple[type, ...]:
    """Return the types that a field of a recipe takes; its flag is read as the first one."""
    if isinstance(item.type, UnionType):
        return get_args(item.type)
    assert isinstance(item.type, type)
    return (item.type,)


def seconds_of(grace: str | float) -> float | None:
    """Return `--grace` in seconds, None for auto. Raises `ValueError` for other texts and
    numbers.
    """
    if grace == "auto":
        return None
    if not 0 < float(grace) < math.inf:
        raise ValueError(grace)
    return float(grace)
