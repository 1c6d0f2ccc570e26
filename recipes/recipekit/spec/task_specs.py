"""Table of the tasks, without torch, for --help, the checks, the data and the model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

PACKED, SAMPLES = "packed", "samples"
# Name patterns that match parameters inside the layers of transformers models.
LAYER_PATTERNS = ("*.layers.*", "*.layer.*", "*.h.*", "*.block.*", "*.blocks.*", "*_layers.*")


@dataclass(frozen=True)
class Plans:
    """Plans for a model's modules: pipeline and tensor-parallel splits, and optimizer rules.

    Names are module names as in `named_modules`, or patterns in which `*` matches any characters. A
    recipe's plan takes priority over the model's published plan, which takes priority over the
    task's plan. Names in the task's plan that a model lacks are ignored.
    """

    # module -> "first", "split" (the module's children are the blocks of the chain) or "last". A
    # task may also use "stages" (the module lists in its children are split).
    pp: Mapping[str, str] = field(default_factory=dict)
    # module -> a tensor-parallel style of transformers
    tp: Mapping[str, str] = field(default_factory=dict)
    # class of a module -> its attributes that count sharded items and must be divided by tp
    tp_local: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    no_decay: tuple[str, ...] = ()  # parameters without weight decay, in addition to vectors
    # parameter -> learning-rate factor. The first match applies.
    lr_scale: Mapping[str, float] = field(default_factory=dict)
    # Further learning-rate factor, applied once for each later layer and once for the head.
    layer_decay: float = 1.0
    # Parameters that an optimizer with a separate rule for matrices may treat as matrices
    # (`hidden_matrices`).
    matrices: tuple[str, ...] = ()
    # model type -> axes on which the task's plan does not fit the model, although its names match
    unfit: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskSpec:
    """Properties of a task."""

    about: str  # for --help and the pages
    auto_class: str  # transformers class that creates the model from a config.json
    # Micro-batch tensors that are inputs of the model. A pipeline sends them from stage to stage.
    inputs: tuple[str, ...]
    columns: tuple[str, ...]  # `Recipe` fields that name the dataset columns
    example: str  # an example of a user's dataset, for --help
    # Inputs that are not integers. The pipeline sends them only to the first stage.
    float_inputs: tuple[str, ...] = ()
    # The first column, if a dataset may lack it. The column's field is then "".
    optional_column: str = ""
    # PACKED: documents are packed into rows of seq_len tokens. SAMPLES: each dataset row becomes
    # one row of a micro-batch.
    rows: str = PACKED
    # Each row's inputs have shape (2, ...), so the model receives 2 * B rows for a micro-batch of B
    # rows.
    pairs: bool = False
    # Number of outputs of the head, which overrides config.json. 0: the recipe or config.json
    # decides.
    labels: int = 0
    chats: bool = False  # the dataset contains chats, not texts
    masked: bool = False  # some tokens of each row are masked (data/masking.py)
    # Each token attends to the tokens before and after it, within its document.
    bidirectional: bool = False
    # A label belongs to the token at its own position, not to the next token.
    labels_in_place: bool = False
    # Additional arguments for every forward pass.
    constants: Mapping[str, Any] = field(default_factory=dict)
    # Additional `Recipe` fields that only some tasks read. Typing a field that the task does not
    # read is an error.
    reads: tuple[str, ...] = ()
    first_help_flags: tuple[str, ...] = ()  # fields of `reads` on the first page of --help
    # `Recipe` field -> its help text, if the text in `Recipe` does not fit this task.
    flag_help: Mapping[str, str] = field(default_factory=dict)
    # Axis (tp, pp, sp, ep), "adapt" or "mixture" -> why this task does not support it.
    unsupported: Mapping[str, str] = field(default_factory=dict)
    # config.json key -> its maximum under --tiny. For num_labels, the exact value.
    tiny: Mapping[str, int] = field(default_factory=dict)
    plans: Plans = field(default_factory=Plans)  # for models that publish no plans
    # Parameters that an optimizer with a separate rule for matrices may treat as matrices, unless a
    # recipe names others.
    matrices: tuple[str, ...] = LAYER_PATTERNS

    @property
    def reads_rows(self) -> bool:
        """Return True if a document is a dictionary of columns, not a single column's value."""
        return self.rows == SAMPLES or len(self.columns) > 1

    @property
    def has_classes(self) -> bool:
        """Return True if the head of the task's models has one output per class."""
        return bool(self.labels) or "num_labels" in self.reads

    @property
    def rows_per_sample(self) -> int:
        """Return the number of model rows per row of a micro-batch."""
        return 2 if self.pairs else 1

    @property
    def reads_tokens(self) -> bool:
        """Return True if the task's models read tokens."""
        return "input_ids" in self.inputs

    @property
    def unit(self) -> str:
        """Return the unit over which the loss is a mean, which is also a key of metrics.jsonl."""
        return "tokens" if self.rows == PACKED else "samples"

    @property
    def class_suffix(self) -> str:
        """Return the suffix of the classes that `auto_class` creates.

        config.json lists these classes under architectures.
        """
        return self.auto_class.removeprefix("AutoModel")


# Encoders of transformers, with whatever head
ENCODER_PLANS = Plans(
    pp={
        "*.embeddings": "first",
        "*.embeddings_project": "first",
        "*.encoder.layer": "split",
        "*.transformer.layer": "split",
        "*.layers": "split",
        "*.final_norm": "last",
    }
    | dict.fromkeys(
        (
            "cls",
            "lm_head",
            "head",
            "decoder",
            "predictions",
            "generator_predictions",
            "generator_lm_head",
        ),
        "last",
    )
    | dict.fromkeys(("vocab_transform", "vocab_layer_norm", "vocab_projector"), "last"),
    tp=dict.fromkeys(
        (
            "*.attention.self.query",
            "*.attention.self.key",
            "*.attention.self.value",
            "*.intermediate.dense",
        ),
        "colwise",
    )
    | dict.fromkeys(
        ("*.attention.output.dense", "*.layer.*.output.dense", "*.attn.Wo", "*.mlp.Wo"),
        "rowwise",
    )
    | {"*.attn.Wqkv": "packed_colwise_3", "*.mlp.Wi": "packed_colwise_2"}
    | dict.fromkeys(
        ("*.attention.q_lin", "*.attention.k_lin", "*.attention.v_lin", "*.ffn.lin1"),
        "colwise",
    )
    | dict.fromkeys(("*.attention.out_lin", "*.ffn.lin2"), "rowwise"),
    # These models count heads in the forward pass, or have tables, a projection or another
    # order between the ends and the layers.
    unfit={
        "megatron-bert": ("tp", "pp"),
        "rembert": ("tp", "pp"),
        "roformer": ("tp", "pp"),
        "tapas": ("tp",),
    }
    | {"squeezebert": ("pp",), "xmod": ("pp",)},
)


TASKS = {
    "pretrain": TaskSpec(
        about="loss on every token",
        auto_class="AutoModelForCausalLM",
        inputs=("input_ids", "position_ids"),
        columns=("text_field",),
        example="my_text.jsonl",
        constants={"use_cache": False},
        reads=("seq_len", "tokenizer", "token_cache", "loss"),
    ),
    "sft": TaskSpec(
        about="chats, with the loss on the assistant's answers only",
        auto_class="AutoModelForCausalLM",
        inputs=("input_ids", "position_ids"),
        columns=("messages_field",),
        example="chats.jsonl",
        chats=True,
        constants={"use_cache": False},
        reads=("seq_len", "tokenizer", "token_cache", "loss"),
    ),
    "preference": TaskSpec(
        about="pairs of answers, where DPO makes the chosen one more likely",
        auto_class="AutoModelForCausalLM",
        inputs=("input_ids", "position_ids"),
        columns=("prompt_field", "chosen_field", "rejected_field"),
        example="pairs.jsonl",
        optional_column="prompt_field",
        rows=SAMPLES,
        pairs=True,
        constants={"use_cache": False},
        reads=("seq_len", "tokenizer", "token_cache", "loss", "beta"),
        first_help_flags=("beta",),
        unsupported={
            "sp": (
                "the loss of a pair is a function of sums over its whole rows, of which a rank"
                " would hold a part"
            ),
            "ep": "it has not been compared with plain PyTorch in this layout",
        },
    ),
    "reward": TaskSpec(
        about=(
            "pairs of answers, where a reward model learns to score the chosen one higher"
            " (Bradley-Terry)"
        ),
        auto_class="AutoModelForSequenceClassification",
        inputs=("input_ids", "position_ids"),
        columns=("prompt_field", "chosen_field", "rejected_field"),
        example="pairs.jsonl",
        optional_column="prompt_field",
        rows=SAMPLES,
        pairs=True,
        labels=1,
        constants={"use_cache": False},
        reads=("seq_len", "tokenizer"),
        unsupported={
            "sp": "the number of an answer comes from its last token, which one rank would hold",
            "ep": "it has not been compared with plain PyTorch in this layout",
            "adapt": "an adapter of a classifier trains its head too, which is not exported yet",
        },
        plans=Plans(pp={"score": "last"}),
    ),
    "masked_lm": TaskSpec(
        about="loss on masked tokens, with bidirectional attention",
        auto_class="AutoModelForMaskedLM",
        inputs=("input_ids", "position_ids"),
        columns=("text_field",),
        example="my_text.jsonl",
        masked=True,
        bidirectional=True,
        labels_in_place=True,
        reads=("seq_len", "tokenizer", "token_cache", "loss", "mask_rate", "whole_words"),
        first_help_flags=("mask_rate",),
        unsupported={
            "sp": "attention both ways is not made for parts of rows",
            "ep": "none of the masked language models of transformers has experts",
            "adapt": "adapters are made for causal language models alone",
        },
        plans=ENCODER_PLANS,
    ),
    "image_classification": TaskSpec(
        about="images, with the loss on the class of each image",
        auto_class="AutoModelForImageClassification",
        inputs=("pixel_values",),
        float_inputs=("pixel_values",),
        columns=("image_field", "label_field"),
        example="pictures",
        rows=SAMPLES,
        reads=("num_labels", "augment", "threads"),
        first_help_flags=("num_labels", "augment", "threads"),
        unsupported={
            "sp": "a picture is one short row, which is not cut over ranks",
            "ep": "none of the image classifiers of transformers has experts",
            "adapt": "an adapter of a classifier trains its head too, which is not exported yet",
        },
        tiny={"image_size": 32, "patch_size": 8, "num_labels": 10},
        plans=Plans(
            pp={
                "*.embeddings": "first",
                "*.embedder": "first",
                "*.layers": "split",
                "*.encoder.layer": "split",
                "*.encoder.stages": "stages",
            }
            | {"*.layernorm": "last", "classifier": "last"},
            tp={
                "*.attention.q_proj": "colwise",
                "*.attention.k_proj": "colwise",
                "*.attention.v_proj": "colwise",
            }
            | {"*.attention.o_proj": "rowwise", "*.mlp.fc1": "colwise", "*.mlp.fc2": "rowwise"},
            no_decay=(
                "*.cls_token",
                "*.distillation_token",
                "*.mask_token",
                "*.position_embeddings",
            ),
        ),
    ),
    "token_classification": TaskSpec(
        about="words with a tag each, with the loss on the class of each word",
        auto_class="AutoModelForTokenClassification",
        inputs=("input_ids", "position_ids"),
        columns=("text_field", "label_field"),
        example="tagged.jsonl",
        bidirectional=True,
        labels_in_place=True,
        reads=("seq_len", "tokenizer", "token_cache", "num_labels"),
        first_help_flags=("num_labels",),
        flag_help={
            "text_field": (
                "Column that contains the words, as a list or as text that is split at blanks."
            ),
            "label_field": (
                "Column that contains a tag for each word: the number or the name of a class, or"
                " -100 for none."
            ),
        },
        unsupported={
            "sp": "attention both ways is not made for parts of rows",
            "ep": "it has not been compared with plain PyTorch in this layout",
            "adapt": "an adapter of a classifier trains its head too, which is not exported yet",
        },
        plans=replace(ENCODER_PLANS, pp={**ENCODER_PLANS.pp, "classifier": "last"}),
    ),
}


def task_fields() -> dict[str, tuple[str, ...]]:
    """Return the `Recipe` fields that only some tasks read: field -> the tasks that read it."""
    fields = dict.fromkeys(
        name for facts in TASKS.values() for name in (*facts.columns, *facts.reads)
    )
    return {
        name: tuple(task for task, facts in TASKS.items() if name in (*facts.columns, *facts.reads))
        for name in fields
    }


def task_of_architectures(architectures: Iterable[object] | None) -> str:
    """Return the first task whose models have one of these classes, as listed in config.json.

    Return "pretrain" if no class matches.
    """
    names = [name for name in architectures or () if isinstance(name, str)]
    return next(
        (
            task
            for task, facts in TASKS.items()
            if any(name.endswith(facts.class_suffix) for name in names)
        ),
        "pretrain",
    )
