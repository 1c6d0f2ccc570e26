"""A run's loss path: in chunks inside the model's head, or from full logits."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from ..kernels.cross_entropy import VocabShard
from ..parallel.tensor import check_head_cut, local_head_columns
from ..spec.errors import config_error
from ..spec.task_specs import TASKS
from .chunked_loss import Operations, enable_chunked_loss, head_of
from .probes import operations_of


@dataclass(frozen=True)
class LossPath:
    """The computation of a model's loss: in chunks inside its head, or from full logits.

    `fallback_reason` explains why full logits are used, unless the recipe requested them.
    `operations` are the model's operations after its head, if the loss is computed in chunks.
    """

    chunked: bool
    fallback_reason: str = ""
    operations: Operations = field(default=(), compare=False, repr=False)


CHUNKED_LOSS, FULL_LOGITS_LOSS = LossPath(chunked=True), LossPath(chunked=False)


@dataclass(frozen=True)
class ModelRef:
    """A kind of model: its config, its training task and its name in messages."""

    config: dict[str, Any]
    task: str
    name: str


def choose_loss_path(
    loss: str,
    full_model: PreTrainedModel,
    models: Sequence[PreTrainedModel],
    kind: ModelRef,
    tp: tuple[Mapping[str, str], Any],
) -> LossPath:
    """Choose the loss path, and make `models` return losses if the loss is computed in chunks.

    `loss` is the recipe's field. `models` are parts of `full_model`. `tp` is (tensor-parallel
    sharding plan, mesh of the ranks or None). Without tensor parallelism, the plan is empty.

    Raise `ConfigError` if `loss` is "chunked" but the losses would not be exact.
    """
    facts = TASKS[kind.task]
    if loss == "whole" or "loss" not in facts.reads:
        return FULL_LOGITS_LOSS
    try:
        check_head_cut(_place_of_head(full_model), tp[0])
        path = replace(CHUNKED_LOSS, operations=operations_of(kind.config, kind.task, kind.name))
    except ValueError as error:
        if loss == "chunked":
            raise config_error(
                "loss = chunked",
                f"is not exact for this {kind.config['model_type']}: {error}",
                "use --loss auto or --loss whole",
            ) from error
        return LossPath(chunked=False, fallback_reason=str(error))
    apply_loss_path(path, full_model, models, facts.masked, tp)
    return path


def apply_loss_path(
    path: LossPath,
    whole: PreTrainedModel,
    models: Sequence[PreTrainedModel],
    likeliest: bool,
    tp: tuple[Mapping[str, str], Any],
    fp32: Collection[str] = (),
) -> None:
    """Make `models`, which are parts of `whole`, return losses if `path` computes them in chunks.

    `likeliest` is passed to `enable_chunked_loss` as `return_argmax`. `tp` is described in
    `choose_loss_path`. `fp32` contains the names of the parameters that stay in fp32.
    """
    if not path.chunked or not models:
        return
    place = _place_of_head(whole)
    cut = local_head_columns(place, head_of(whole).out_features, *tp)
    for model in models:
        enable_chunked_loss(
            model,
            path.operations,
            VocabShard(*cut) if cut else None,
            return_argmax=likeliest,
            fp32=f"{place}.weight" in fp32,
        )


def _place_of_head(model: PreTrainedModel) -> str:
    """Return the name of the head. Raise the same ValueError as `head_of`."""
    head = head_of(model)
    return next(place for place, module in model.named_modules() if module is head)
