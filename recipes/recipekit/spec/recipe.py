"""The `Recipe` dataclass, whose fields also define the command-line flags, and its checks."""

import dataclasses
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, get_args

from .arguments import wrong_names, wrong_objects
from .errors import ConfigError, Problem
from .schedules import (
    LeaveOut,
    Ramp,
    check_leave_out,
    check_ramp,
    check_rates,
    fit_warmup_and_decay,
    leave_out_of,
    ramp_of,
    truncate_ramp,
)
from .task_specs import PACKED, TASKS, Plans, TaskSpec


def _flag_field(help: str, default: object, **more: object) -> Any:
    """Return a dataclass field that carries its flag's help text.

    `--help` lists the flag under its `group`. A field without `group` belongs to the same group as
    the preceding field.
    """
    return field(default=default, metadata={"help": help, **more})


# choice of `attention` -> name in torch's registry of the kernels that replace FlashAttention 2
FLASH_KERNELS = {"flash3": "FA3", "flash4": "FA4"}
ENGINES = ("deepspeed", "ddp", "fsdp2")
# Fields that describe the repository of a dataset or model.
REPOSITORY_FIELDS = {
    "dataset": ("split", "subset", "dataset_revision"),
    "model": ("model_revision",),
}
# Fields that document a meaning for the empty value: no value, the default folder, or the model's
# default.
MAY_BE_EMPTY = (
    "subset",
    "model_revision",
    "dataset_revision",
    "prompt_field",
    "tokenizer",
    "batch_ramp",
    "leave_out",
    "out",
    "on_alert",
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
    *("gradient_clipping", "min_lr", "seed", "num_labels", "epochs", "recompute_every", "hang_s"),
    "audit_every",
)  # numbers that must not be negative
MAY_REWIND = ("on_spike", "on_nonfinite")  # fields that may ask for rewinds
FLAGS = {"ds_config": "deepspeed_config"}  # fields whose flag has a different name
PATHS = ("dataset", "ds_config", "model", "out", "resume", "token_cache", "tokenizer")
MAX_NAME_LENGTH = 255  # maximum bytes in a file name
MAX_INT = (1 << 63) - 1  # largest integer, because torch, numpy and pyarrow store 64 bits
MAX_RANKS = 1 << 16  # largest parallel degree; the search for valid world sizes ends here


@dataclass(frozen=True)
class Recipe:
    """Configuration of one training run.

    Every plain field (number, string, switch) is a command-line flag of the same name.
    """

    def __new__(cls, *values: object, **fields: object) -> "Recipe":
        """Raise `ConfigError` for positional values and for unknown field names."""
        if problems := wrong_names(values, fields, cls.__dataclass_fields__):
            raise ConfigError(problems)
        return super().__new__(cls)

    model: str = _flag_field("Model to train: a Hub id or a local folder.", "", group="model")
    model_revision: str = _flag_field(
        "Branch, tag or commit of the model and its tokenizer on the Hub. If empty, main is used.",
        "",
    )
    dataset: str = _flag_field(
        "Training data: Hub id, local files (path, glob or comma-separated list), URLs of JSONL or"
        " Parquet files, or builtin. For a mixture, write NAME=DATASET@WEIGHT;"
        " NAME=DATASET@WEIGHT.",
        "builtin",
        group="data",
    )
    subset: str = _flag_field(
        "Subset (configuration) of the dataset, as its dataset card lists it. If empty, the default"
        " subset is used.",
        "",
    )
    split: str = _flag_field(
        "Split of the dataset. A local file counts as the split train.", "train"
    )
    dataset_revision: str = _flag_field(
        "Branch, tag or commit of the dataset on the Hub. If empty, main is used.", ""
    )
    text_field: str = _flag_field("Column that contains the text of each document.", "text")
    bad_rows: str = _flag_field(
        "Action on an unreadable row or file. stop: save and end the run. skip: skip it and"
        " count it.",
        "stop",
        choices=("stop", "skip"),
    )
    retry_s: float = _flag_field(
        "Seconds to keep retrying a failing data server before the run stops.", 600.0
    )
    token_cache: str = _flag_field(
        "Folder that caches tokenised data. auto: local data only, next to the datasets cache. off:"
        " no cache.",
        "auto",
    )
    messages_field: str = _flag_field("Column that contains the messages of each chat.", "messages")
    prompt_field: str = _flag_field(
        "Column that contains the prompt of each pair, as text or messages. If empty, both answers"
        " begin with the prompt.",
        "prompt",
    )
    chosen_field: str = _flag_field(
        "Column that contains the preferred answer of each pair, as text or messages.", "chosen"
    )
    rejected_field: str = _flag_field(
        "Column that contains the rejected answer of each pair, as text or messages.", "rejected"
    )
    image_field: str = _flag_field(
        "Column that contains the image, as an encoded file (PNG, JPEG, ...) or as rows of pixels.",
        "image",
    )
    label_field: str = _flag_field(
        "Column that contains the class of the image, as an integer from 0.", "label"
    )
    mask_rate: float = _flag_field(
        "Fraction of tokens to mask, between 0 and 1. Masked tokens are sampled again in each"
        " epoch.",
        0.15,
    )
    whole_words: bool = _flag_field("Mask whole words: either all tokens of a word or none.", False)
    augment: str = _flag_field(
        "Augmentation of training images. crop: random crop and random mirroring. none: center"
        " crop.",
        "crop",
        choices=("crop", "none"),
    )
    threads: int = _flag_field(
        "Threads on each rank that decode and augment images. The number does not change the data.",
        2,
    )
    task: str = _flag_field(
        " ".join(("Training task.", *(f"{name}: {facts.about}." for name, facts in TASKS.items()))),
        "pretrain",
        choices=tuple(TASKS),
    )
    tokenizer: str = _flag_field(
        "Tokenizer: a Hub id, a folder, or bytes (the built-in byte-level tokenizer). If empty, the"
        " model's own tokenizer is used.",
        "",
        group="model",
    )
    init: str = _flag_field(
        "Initial weights. pretrained: the published weights. random: sampled from the seed and each"
        " parameter's name.",
        "pretrained",
        choices=("pretrained", "random"),
    )
    num_labels: int = _flag_field(
        "Number of classes. 0 keeps the model's number. A missing head, or one of another size, is"
        " randomly initialised.",
        0,
    )
    attention: str = _flag_field(
        "Attention implementation. varlen: separates packed documents without a mask. auto: varlen"
        " if it is exact for the model, otherwise sdpa; the log gives the reason. sdpa, eager and"
        " flash_attention_2 are implemented in transformers. flash3 and flash4: varlen with the"
        " kernels of FlashAttention 3 or 4, which must be installed.",
        "auto",
        choices=("auto", "varlen", *FLASH_KERNELS, "sdpa", "eager", "flash_attention_2"),
    )
    loss: str = _flag_field(
        "Cross-entropy implementation. chunked: computes the logits in chunks, to save memory."
        " whole: full logits. auto: chunked if exact, otherwise whole.",
        "auto",
        choices=("auto", "chunked", "whole"),
    )
    compile: str = _flag_field(
        "Use torch.compile for the loss and the layers. If whole layers cannot be compiled, only"
        " their norms and rotary embeddings are. auto: on if the GPU supports it.",
        "auto",
        choices=("auto", "on", "off"),
    )
    beta: float = _flag_field(
        "DPO beta. A larger value keeps the model closer to the reference model.", 0.1
    )
    activation_checkpointing: bool = _flag_field(
        "Recompute the activations of every layer in the backward pass, to save memory. The same as"
        " --recompute_every 1.",
        False,
    )
    recompute_every: int = _flag_field(
        "Recompute the activations of every N-th layer in the backward pass, to save memory. 1"
        " recomputes every layer, 0 none.",
        0,
    )
    activation_budget: float = _flag_field(
        "Fraction of the activations that a compiled layer keeps for the backward pass, from 0 to"
        " 1. The compiler recomputes the others, the cheapest first. 1 keeps all that is faster to"
        " keep.",
        1.0,
    )

    ds_config: str | dict = "zero2.json"  # memory strategy; on the command line --deepspeed_config
    engine: str = _flag_field(
        "Training engine: DeepSpeed, or PyTorch's DDP or FSDP2. DDP and FSDP2 read no JSON.",
        "deepspeed",
        choices=ENGINES,
        group="layout",
    )
    precision: str = _flag_field(
        "Compute precision of ddp and fsdp2. Weights stay fp32. Use fp16 for GPUs without bf16.",
        "bf16",
        choices=("bf16", "fp32", "fp16"),
    )
    tp: int = _flag_field(
        "Tensor-parallel degree: ranks over which the weights of each layer are split. 1"
        " disables it.",
        1,
    )
    pp: int = _flag_field(
        "Pipeline-parallel degree: ranks over which the sequence of layers is split. 1"
        " disables it.",
        1,
    )
    sp: int = _flag_field(
        "Sequence-parallel degree, for long rows. Each rank holds 1/sp of each row and of the"
        " attention heads. 1 disables it.",
        1,
    )
    ep: int = _flag_field(
        "Expert-parallel degree. Each data-parallel rank holds 1/ep of the experts of a layer. 1"
        " disables it.",
        1,
    )
    pipeline_schedule: str = _flag_field(
        "Order of the micro-batches in the pipeline. Used only if pp > 1.",
        "1f1b",
        choices=("1f1b", "dualpipev"),
    )
    # Plans for a model that publishes none, or to replace the published plans. See
    # `task_specs.Plans`.
    pp_plan: dict | None = None  # module name -> "first", "split" or "last"
    tp_plan: dict | None = None  # module name -> a tensor-parallel style of transformers
    tp_local: dict | None = None  # class of a module -> its attributes that are divided by tp
    no_decay: tuple = ()  # names of parameters without weight decay, in addition to vectors
    # Parameter name -> learning-rate factor. `*` matches any characters.
    lr_scale: dict | None = None
    # Names of the weights that Muon treats as matrices. If empty, all matrices in the layers.
    matrices: tuple = ()

    seq_len: int = _flag_field("Tokens per row (maximum sequence length).", 1024, group="batch")
    micro_batch: int = _flag_field("Rows per forward pass on each data-parallel rank.", 1)
    global_batch: int = _flag_field("Rows per optimizer step, summed over all ranks.", 8)
    batch_ramp: str = _flag_field(
        "Global batches of later steps, as STEP:ROWS. For example, 501:512, 2001:1024 sets 512 rows"
        " from step 501 and 1024 from step 2001.",
        "",
    )
    leave_out: str = _flag_field(
        "Global batches that the data stream passes over, as STEP:BATCHES. For example, 41:25"
        " leaves out 25 batches before step 41 takes its own. Separate several with commas.",
        "",
    )

    steps: int = _flag_field(
        "Total number of optimizer steps in the schedule.", 1000, group="schedule and optimizer"
    )
    epochs: float = _flag_field(
        "Number of passes over local data. Sets the run length instead of --steps. 0 uses --steps.",
        0.0,
    )
    lr: float = _flag_field("Peak learning rate.", 3e-4)
    min_lr: float = _flag_field("Final learning rate of the cosine, linear and wsd schedules.", 0.0)
    warmup_steps: int = _flag_field("Number of linear warm-up steps. 0 disables warm-up.", 0)
    schedule: str = _flag_field(
        "Learning rate schedule after the warm-up. wsd: constant until the last --decay_steps"
        " steps, so that you can extend the run.",
        "cosine",
        choices=("cosine", "linear", "constant", "wsd"),
    )
    decay_steps: int = _flag_field(
        "Number of final steps in which the wsd schedule lowers the learning rate, usually a tenth"
        " of --steps. Other schedules require 0.",
        0,
    )
    layer_decay: float = _flag_field(
        "Layer-wise learning rate decay: lr of a layer = lr * layer_decay^(1 + number of layers"
        " above it). 1 disables it.",
        1.0,
    )
    weight_decay: float = _flag_field(
        "AdamW weight decay of matrices. Vectors (norms, biases) are not decayed. 0 disables it.",
        0.1,
    )
    beta1: float = _flag_field("AdamW beta1: decay rate of the mean of gradients.", 0.9)
    beta2: float = _flag_field("AdamW beta2: decay rate of the mean of squared gradients.", 0.95)
    eps: float = _flag_field("AdamW epsilon, added to the denominator.", 1e-8)
    gradient_clipping: float = _flag_field(
        "Maximum gradient norm. Larger gradients are scaled down to it. 0 disables clipping.", 1.0
    )

    eval_every: int = _flag_field(
        "Steps between evaluations on held-out rows. 0 disables evaluation. The metric step_s"
        " excludes evaluations.",
        0,
        group="evaluation, checkpoints, export",
    )
    eval_rows: int = _flag_field("Number of held-out rows in each evaluation.", 64)
    save_every: int = _flag_field(
        "Steps between checkpoints. 0 saves only at the end. The metric step_s excludes saves.", 0
    )
    keep: int = _flag_field("Number of most recent checkpoints to keep. 0 keeps all.", 2)
    keep_every: int = _flag_field(
        "Also save a checkpoint at every N-th step and never remove it. 0 disables this.", 0
    )
    keep_best: bool = _flag_field(
        "Also keep the checkpoint with the lowest eval_loss. Only steps with an evaluation count.",
        False,
    )
    deterministic: bool = _flag_field(
        "Make results bit-identical on the same GPUs, at some cost in speed. See"
        " recipes/CHECKPOINTS.md.",
        False,
    )
    save_in_background: bool = _flag_field(
        "Continue training while a checkpoint is written. This needs host memory for a copy of the"
        " training states.",
        False,
    )
    stop_at: int = _flag_field(
        "Save a checkpoint and stop at this step. The schedule does not change. 0 runs to the end.",
        0,
    )
    export: bool = _flag_field(
        "Write Hugging Face safetensors to OUT/hf when the run is complete.", True
    )
    merge: bool = _flag_field(
        "Export the model with the LoRA adapter merged into its weights, instead of the adapter. A"
        " finished run exports to OUT/hf_merged.",
        False,
    )
    seed: int = _flag_field(
        "Random seed for initial weights, data order and dropout.", 0, group="run"
    )
    out: str = _flag_field(
        "Run folder. It may contain $VAR, {job_id} and {wandb_run_id}. If empty, runs/<recipe>, or"
        " runs/<recipe>_tiny with --tiny.",
        "",
    )
    resume: str = _flag_field(
        "Checkpoint to resume from: a run or step folder. auto: the run in OUT, if there is one."
        " never: start from scratch.",
        "auto",
    )
    wandb: bool = _flag_field(
        "Log the run to Weights & Biases. If you are not logged in, the run is recorded offline.",
        True,
        group="tracking",
    )
    project: str = _flag_field("Name of the Weights & Biases project.", "deepspeed-recipes")
    wandb_artifact: bool = _flag_field(
        "Upload OUT/hf to Weights & Biases as an artifact when the run is complete.", False
    )
    grace: str | float = _flag_field(
        "Seconds in which each rank must reach the end of its step after a stop request. "
        "auto: three times the slowest step, but at least 25 and at most the scheduler's limit.",
        "auto",
        group="run",
    )

    watch: bool = _flag_field(
        "Watch for loss spikes, divergence, lost throughput and hangs, and write OUT/alerts.jsonl.",
        True,
        group="watch",
    )
    on_spike: str = _flag_field(
        "Action on a spike of the loss or the gradient norm, two steps in a row. alert: report it."
        " skip: also pass over each step whose gradient norm stands out. stop: end the run, without"
        " saving the step. rewind: go back to a checkpoint before the spike, and leave out the"
        " batches from there to 50 steps after it.",
        "alert",
        choices=("alert", "skip", "stop", "rewind"),
    )
    on_nonfinite: str = _flag_field(
        "Action if a loss or gradient is not finite, also when the step is computed again."
        " stop: end the run. skip: pass over the step; after 20 in a row, end the run. rewind: as"
        " for --on_spike.",
        "stop",
        choices=("stop", "skip", "rewind"),
    )
    audit_every: int = _flag_field(
        "Steps between two searches for silent corruption: the replicas compare their weights and"
        " what they compute, and each rank its states. 0: none.",
        500,
    )
    hang_s: float = _flag_field(
        "Seconds without a finished step after which the job ends, to be started again."
        " Evaluations, saves, compiles and --retry_s do not count. 0 never ends it.",
        600.0,
    )
    on_alert: str = _flag_field(
        "Command to run for each alert. It gets the alert as JSON on its standard input.",
        "",
    )

    # Function that maps a model to a model, for example to add LoRA. It is called before DeepSpeed
    # receives the model.
    adapt: Callable[[Any], Any] | None = None

    @property
    def rewinds_on(self) -> list[str]:
        """Return the fields that ask for rewinds."""
        return [flag for flag in MAY_REWIND if getattr(self, flag) == "rewind"]

    @property
    def labels(self) -> int:
        """Return the number of outputs of the head, or 0 if the model's config.json decides."""
        return self.task_spec.labels or self.num_labels

    @property
    def recompute(self) -> int:
        """Return N if every N-th layer is recomputed in the backward pass, or 0 if no layer is."""
        return self.recompute_every or int(self.activation_checkpointing)

    def saves_at(self, step: int) -> bool:
        """Return True if a checkpoint is due at `step`.

        This method does not count the checkpoint that a run also saves at its end.
        """
        return any(number and step % number == 0 for number in (self.save_every, self.keep_every))

    @property
    def max_checkpoints(self) -> int:
        """Return the maximum number of checkpoints that exist at the same time.

        A new checkpoint is completed before an old one is removed.
        """
        if not (self.stop_at or self.steps):  # a recipe with epochs counts its steps at the start
            return self.keep or 1
        before = (self.stop_at or self.steps) - 1  # steps that may be saved before the last
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
        """Return the ramp that sets the number of rows per step."""
        return ramp_of(self.global_batch, self.batch_ramp)

    @property
    def left_out(self) -> LeaveOut:
        """Return the global batches that the user leaves out."""
        return leave_out_of(self.leave_out)

    def fit_to_steps(self, typed: frozenset[str]) -> tuple["Recipe", list[str]]:
        """Fit warm-up, decay and ramp to `--steps`. Return the recipe and one line per change.

        If `steps` was not typed, the recipe is unchanged. Fields that the user typed are never
        changed.
        """
        if "steps" not in typed or self.steps < 1 or check_kinds(vars(self)):
            return self, []
        fitted: dict[str, Any] = fit_warmup_and_decay(
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
        for name in ("batch_ramp", "leave_out"):
            if name in typed:
                continue
            table = getattr(self, name)
            if (left := truncate_ramp(table, self.steps)) != table:
                fitted[name] = left
                lines.append(f"{name}: {table} of the recipe cut off after {self.steps} steps")
        return dataclasses.replace(self, **fitted), lines

    def for_other_data(
        self, file: "Recipe", typed: frozenset[str]
    ) -> tuple["Recipe", dict[str, str]]:
        """Reset split, subset and revision to defaults if a different dataset or model was typed.

        `file` is the recipe as written in its file. Fields that the user typed keep their values.
        Return the new recipe, and the file's values that no longer apply.
        """
        others = [
            field
            for field in REPOSITORY_FIELDS
            if field in typed and getattr(self, field) != getattr(file, field)
        ]
        names = [name for field in others for name in REPOSITORY_FIELDS[field] if name not in typed]
        defaults = {name: _default_of(name) for name in names}
        changed = {
            name: default for name, default in defaults.items() if getattr(file, name) != default
        }
        return dataclasses.replace(self, **changed), {name: getattr(file, name) for name in changed}

    @property
    def plans(self) -> Plans:
        """Return the recipe's plans for the model's modules and parameters."""
        cut = self.pp_plan or {}, self.tp_plan or {}, self.tp_local or {}
        return Plans(
            *cut,
            self.no_decay,
            lr_scale=self.lr_scale or {},
            layer_decay=self.layer_decay,
            matrices=self.matrices,
        )

    @property
    def task_spec(self) -> TaskSpec:
        """Return the spec of the recipe's task, or the default task's spec if the name is unknown.

        `check_recipe` reports an unknown name.
        """
        return TASKS[self.task if self.task in tuple(TASKS) else Recipe.task]


def check_recipe(recipe: Recipe) -> list[Problem]:
    """Return a problem for each value that is wrong in every layout."""
    problems = check_kinds(vars(recipe)) + check_values(vars(recipe))

    # The checks below compare numbers, so a field that already has a problem is reset to its
    # default first.
    refused = {problem.where.partition(" = ")[0] for problem in problems}
    recipe = dataclasses.replace(
        recipe, **{name: _default_of(name) for name in refused & Recipe.__dataclass_fields__.keys()}
    )
    values, facts, adapted = vars(recipe), recipe.task_spec, recipe.adapt is not None
    return [
        *problems,
        *_check_row_length(recipe.seq_len, facts),
        *_check_counts(values),
        *_check_grace(recipe.grace),
        *_check_ranges(values),
        *check_budget(recipe.activation_budget, recipe.recompute, recipe.compile),
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
        *check_leave_out(recipe.leave_out, recipe.steps),
        *(_check_packed(values) if facts.rows == PACKED else []),
        *check_unsupported(facts, {axis: values[axis] for axis in AXES}, adapted),
        *_check_adapted_stages(recipe.pp, adapted),
        *_check_rates(recipe.lr_scale or {}, recipe.layer_decay, adapted),
        *_check_exports(values),
        *_check_alerts(values),
    ]


def _default_of(name: str) -> Any:
    """Return the default of a field."""
    return Recipe.__dataclass_fields__[name].default


def _check_row_length(seq_len: int, task_spec: TaskSpec) -> list[Problem]:
    """Return a problem if a row is too short to contain a target."""
    if seq_len != 1 or "seq_len" not in task_spec.reads or task_spec.labels_in_place:
        return []
    rule = (
        "a row of one token has no target, because each token is predicted from the tokens"
        " before it"
    )
    return [Problem("seq_len = 1", rule, "use --seq_len 2 or more")]


def _check_counts(values: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each count that is too small."""
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
    """Return a problem if `grace` is neither auto nor a positive number of seconds."""
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
    """Return a problem for each rate or fraction that is out of range."""
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


def check_budget(budget: float, recompute: int, compile: str) -> list[Problem]:
    """Return a problem for an activation budget that is out of range or has no effect."""
    where = f"activation_budget = {budget}"
    if not 0 <= budget <= 1:
        fix = "use a fraction, for example --activation_budget 0.5"
        return [Problem(where, "must be at least 0 and at most 1", fix)]
    found = []
    if budget < 1 and recompute:
        rule = "cannot be combined, because a recomputed layer keeps only its input"
        fix = "add --recompute_every 0, or leave --activation_budget out"
        found.append(Problem(f"{where} with recompute_every = {recompute}", rule, fix))
    if budget < 1 and compile == "off":
        rule = "requires compiled layers, because the compiler selects the activations to keep"
        fix = "use --compile on, or --recompute_every N instead of the budget"
        found.append(Problem(f"{where} with compile = off", rule, fix))
    return found


def _check_steps(values: Mapping[str, Any]) -> list[Problem]:
    """Return problems for a stop after the last step and for `keep_best` without evaluations."""
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
    """Return a problem if FlashAttention would not separate the documents in packed rows."""
    attention, micro_batch, sp = values["attention"], values["micro_batch"], values["sp"]
    if attention != "flash_attention_2" or micro_batch <= 1 or sp != 1:
        return []
    # transformers 5.22.2 detects documents from position_ids only if the batch has a single row
    # (_is_packed_sequence).
    rule = "FlashAttention separates packed documents only if the micro-batch has one row"
    where = f"micro_batch = {micro_batch} with attention = flash_attention_2"
    return [Problem(where, rule, "use --micro_batch 1, or --attention sdpa")]


def _check_adapted_stages(pp: int, adapted: bool) -> list[Problem]:
    """Return a problem if an adapter is combined with pipeline parallelism."""
    if pp <= 1 or not adapted:
        return []
    rule = "an adapter wraps the whole model, and a pipeline stage holds only part of it"
    return [Problem(f"pp = {pp}", rule, "use --pp 1")]


def _check_exports(values: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each upload or merge of an export that the run does not write."""
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


def _check_alerts(values: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for a command that cannot be run, and for actions without a watch."""
    problems = []
    if not values["watch"]:
        for name in ("on_spike", "on_nonfinite", "audit_every", "hang_s", "on_alert"):
            if values[name] != _default_of(name):
                where = f"{name} = {values[name]} with watch = False"
                rule = "requires the watch, which raises the alerts"
                problems.append(Problem(where, rule, f"use --watch, or leave out --{name}"))
    problems += _check_rewinds(values)
    where = f"on_alert = {values['on_alert']}"
    try:
        words = shlex.split(values["on_alert"])
    except ValueError:
        rule = "has a quotation mark that is not closed"
        return [*problems, Problem(where, rule, "close it, or write a script and name it")]
    if words and shutil.which(words[0]) is None:
        rule = f"is not a command of this machine: {words[0]} is not found, or may not be run"
        problems.append(Problem(where, rule, "use the path of a program that may be run"))
    return problems


def _check_rewinds(values: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each flag whose rewinds would find no checkpoint before the fault."""
    problems = []
    for flag in MAY_REWIND:
        where = f"{flag} = rewind"
        if values[flag] != "rewind":
            continue
        if not values["save_every"] and not values["keep_every"]:
            rule = "requires checkpoints to go back to"
            problems.append(Problem(f"{where} with save_every = 0", rule, "use --save_every N"))
        elif flag == "on_spike" and values["keep"] == 1 and not values["keep_every"]:
            rule = "the only checkpoint that is kept may be from the middle of a spike"
            fix = "use --keep 2 or more, or --keep 0"
            problems.append(Problem(f"{where} with keep = 1", rule, fix))
    return problems


def check_values(values: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each recipe value that is empty, blank or too large.

    Libraries interpret an empty path as the current folder. The usual cause is an unset shell
    variable.
    """
    found = []
    for name, value in values.items():
        flag = FLAGS.get(name, name)
        if (
            isinstance(value, str)
            and not value.strip()
            and not (value == "" and name in MAY_BE_EMPTY)
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
            and len(os.fsencode(long)) > MAX_NAME_LENGTH
        ):
            rule = (
                f"has a file name of {len(os.fsencode(long))} bytes, but file systems allow at most"
                f" {MAX_NAME_LENGTH}"
            )
            found.append(
                Problem(f"{flag} = {value[:30]}...", rule, f"use a shorter path for --{flag}")
            )
        most = MAX_RANKS if name in AXES else MAX_INT
        if type(value) is int and abs(value) > most:
            fix = f"for example --{flag} {_default_of(name)}"
            found.append(Problem(f"{flag} = {value}", f"must be at most {most}", fix))
    return found


def _check_rates(scales: dict[str, Any], layer_decay: float, adapted: bool) -> list[Problem]:
    """Return problems for invalid learning-rate factors and for `layer_decay` with an adapter."""
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


def check_unsupported(
    task_spec: TaskSpec, degrees: Mapping[str, int], adapted: bool = False
) -> list[Problem]:
    """Return a problem for each unsupported degree, and for an adapter if it is unsupported."""
    found = [
        Problem(f"{axis} = {degree}", task_spec.unsupported[axis], f"use --{axis} 1")
        for axis, degree in degrees.items()
        if degree > 1 and axis in task_spec.unsupported
    ]
    return found + (
        [Problem("adapt", task_spec.unsupported["adapt"], "remove adapt from the recipe")]
        if adapted and "adapt" in task_spec.unsupported
        else []
    )


def check_kinds(values: dict[str, Any]) -> list[Problem]:
    """Return problems for wrong types, infinite or NaN numbers, and unknown choices.

    `values` is vars(recipe).
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
    """Return the types that a recipe's field accepts. The flag's value is parsed as the first."""
    if isinstance(item.type, UnionType):
        return get_args(item.type)
    assert isinstance(item.type, type)
    return (item.type,)


def seconds_of(grace: str | float) -> float | None:
    """Return `--grace` in seconds, or None for auto.

    Raise `ValueError` for any other text, and for numbers that are not positive and finite.
    """
    if grace == "auto":
        return None
    if not 0 < float(grace) < math.inf:
        raise ValueError(grace)
    return float(grace)
