"""What can be said of each task without torch: a row that --help, the checks, the data and the
model read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PACKED, SAMPLES = "packed", "samples"
# what lies in a layer of a model of transformers
LAYERS = ("*.layers.*", "*.layer.*", "*.h.*", "*.block.*", "*.blocks.*", "*_layers.*")


@dataclass(frozen=True)
class Plans:
    """Says of a model's modules where a pipeline is cut, how tensors are cut, and how an optimizer
    treats its parameters.

    Names are those of `named_modules`, or patterns in which `*` stands for any characters. A
    recipe's plan beats the one that the model publishes, which beats the task's; of the task's,
    names that a model does not have are left out.
    """

    # module -> "first", "split" (its children are the blocks of the chain) or "last"; of a task
    # also "stages" (their lists are split)
    pp: Mapping[str, str] = field(default_factory=dict)
    # module -> a tensor-parallel style of transformers
    tp: Mapping[str, str] = field(default_factory=dict)
    # class of a module -> its attributes that count what is cut: divided by tp
    tp_local: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    no_decay: tuple[str, ...] = ()  # parameters without weight decay, besides vectors
    # parameter -> factor of its learning rate; of several the first that fits
    lr_scale: Mapping[str, float] = field(default_factory=dict)
    # further factor of it for each layer behind the parameter's, and for the head
    layer_decay: float = 1.0
    # parameters among which an optimizer with a rule of its own for matrices finds them
    # (`hidden_matrices`)
    matrices: tuple[str, ...] = ()
    # type of a model -> axes for which a task's names are there but do not fit it
    unfit: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """Describes a task."""

    about: str  # for --help and the pages
    auto_class: str  # of transformers, which makes the model of a config.json
    # tensors of a micro-batch that the model takes, and that travel between the stages of a
    # pipeline
    inputs: tuple[str, ...]
    columns: tuple[str, ...]  # fields of `Recipe` that name the columns of the data set
    example: str  # a data set of a user, for --help
    # which of the inputs are no integers: these go to the first stage only
    floats: tuple[str, ...] = ()
    # the first of the columns, if the data set may lack it: its field is then ""
    optional: str = ""
    # documents packed into rows of seq_len tokens, or SAMPLES: a row of the data set is a row of a
    # micro-batch
    rows: str = PACKED
    # the inputs of a row are (2, ...): to the model a micro-batch of B rows is one of 2 * B
    pairs: bool = False
    # outputs that the head of its models has, whatever the config.json says; 0: as that, or the
    # recipe, says
    labels: int = 0
    chats: bool = False  # the data set holds chats, not texts
    # tokens of a row are hidden (data/masks.py), and the model sees both what is before and what is
    # behind them
    masked: bool = False
    # further arguments of every forward pass
    constants: Mapping[str, Any] = field(default_factory=dict)
    # further fields of `Recipe` that not every task reads; typing one that the task does not read
    # is refused
    reads: tuple[str, ...] = ()
    first: tuple[str, ...] = ()  # of `reads`: what the first page of --help shows
    # an axis (tp, pp, sp, ep), "adapt" or "mixture" -> why this task does not have it
    lacks: Mapping[str, str] = field(default_factory=dict)
    # keys of config.json -> the most that --tiny leaves; num_labels: exactly
    tiny: Mapping[str, int] = field(default_factory=dict)
    plans: Plans = field(default_factory=Plans)  # for models that publish none
    # parameters among which an optimizer with a rule of its own for matrices finds them, unless a
    # recipe names others
    matrices: tuple[str, ...] = LAYERS

    @property
    def rows_each(self) -> int:
        """Counts the rows of the model that a row of a micro-batch is."""
        return 2 if self.pairs else 1

    @property
    def of_tokens(self) -> bool:
        """Says whether its models read tokens."""
        return "input_ids" in self.inputs

    @property
    def unit(self) -> str:
        """Names what the loss is a mean over, a key of metrics.jsonl."""
        return "tokens" if self.rows == PACKED else "samples"

    @property
    def heads(self) -> str:
        """Names the end of the classes that `auto_class` makes, as config.json lists them under
        architectures.
        """
        return self.auto_class.removeprefix("AutoModel")


TASKS = {
    "pretrain": Facts(
        about="loss on every token",
        auto_class="AutoModelForCausalLM",
        inputs=("input_ids", "position_ids"),
        columns=("text_field",),
        example="my_text.jsonl",
        constants={"use_cache": False},
        reads=("seq_len", "tokenizer", "token_cache", "loss"),
    ),
    "sft": Facts(
        about="chats, with the loss on the assistant's answers only",
        auto_class="AutoModelForCausalLM",
        inputs=("input_ids", "position_ids"),
        columns=("messages_field",),
        example="chats.jsonl",
        chats=True,
        constants={"use_cache": False},
        reads=("seq_len", "tokenizer", "token_cache", "loss"),
    ),
    "preference": Facts(
        about="pairs of answers, where DPO makes the chosen one more likely",
        auto_class="AutoModelForCausalLM",
        inputs=("input_ids", "position_ids"),
        columns=("prompt_field", "chosen_field", "rejected_field"),
        example="pairs.jsonl",
        optional="prompt_field",
        rows=SAMPLES,
        pairs=True,
        constants={"use_cache": False},
        reads=("seq_len", "tokenizer", "token_cache", "loss", "beta"),
        first=("beta",),
        lacks={
            "sp": (
                "the loss of a pair is a function of sums over its whole rows, of which a rank"
                " would hold a part"
            ),
            "ep": "it has not been compared with plain PyTorch in this layout",
        },
    ),
    "reward": Facts(
        about=(
            "pairs of answers, where a reward model learns to score the chosen one higher"
            " (Bradley-Terry)"
        ),
        auto_class="AutoModelForSequenceClassification",
        inputs=("input_ids", "position_ids"),
        columns=("prompt_field", "chosen_field", "rejected_field"),
        example="pairs.jsonl",
        optional="prompt_field",
        rows=SAMPLES,
        pairs=True,
        labels=1,
        constants={"use_cache": False},
        reads=("seq_len", "tokenizer"),
        lacks={
            "sp": "the number of an answer comes from its last token, which one rank would hold",
            "ep": "it has not been compared with plain PyTorch in this layout",
            "adapt": "an adapter of a classifier trains its head too, which is not exported yet",
        },
        plans=Plans(pp={"score": "last"}),
    ),
    "masked_lm": Facts(
        about="loss on masked tokens, with bidirectional attention",
        auto_class="AutoModelForMaskedLM",
        inputs=("input_ids", "position_ids"),
        columns=("text_field",),
        example="my_text.jsonl",
        masked=True,
        reads=("seq_len", "tokenizer", "token_cache", "loss", "mask_rate", "whole_words"),
        first=("mask_rate",),
        lacks={
            "sp": "attention both ways is not made for parts of rows",
            "ep": "none of the masked language models of transformers has experts",
            "adapt": "adapters are made for causal language models alone",
        },
        plans=Plans(
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
            # Heads that are counted in the forward pass; tables, a projection or another order
            # between the ends and the layers.
            unfit={
                "megatron-bert": ("tp", "pp"),
                "rembert": ("tp", "pp"),
                "roformer": ("tp", "pp"),
                "tapas": ("tp",),
            }
            | {"squeezebert": ("pp",), "xmod": ("pp",)},
        ),
    ),
    "image_classification": Facts(
        about="images, with the loss on the class of each image",
        auto_class="AutoModelForImageClassification",
        inputs=("pixel_values",),
        floats=("pixel_values",),
        columns=("image_field", "label_field"),
        example="pictures",
        rows=SAMPLES,
        reads=("num_labels", "augment", "threads"),
        first=("num_labels", "augment", "threads"),
        lacks={
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
}


def own_fields() -> dict[str, tuple[str, ...]]:
    """Lists the fields of `Recipe` that not every task reads: field -> the tasks that do."""
    fields = dict.fromkeys(
        name for facts in TASKS.values() for name in (*facts.columns, *facts.reads)
    )
    return {
        name: tuple(task for task, facts in TASKS.items() if name in (*facts.columns, *facts.reads))
        for name in fields
    }


def task_of(architectures: Any) -> str:
    """Finds the first task whose models have one of these classes, as config.json lists them;
    "pretrain" if none says.
    """
    names = [name for name in architectures or () if isinstance(name, str)]
    return next(
        (
            task
            for task, facts in TASKS.items()
            if any(name.endswith(facts.heads) for name in names)
        ),
        "pretrain",
    )
