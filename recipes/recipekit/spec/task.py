"""The interface between the training loop and a task, and the micro-batch format of all tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from .engine import Engine
from .task_specs import TaskSpec

if TYPE_CHECKING:  # light: importing torch takes seconds
    import numpy as np
    import torch

# Dimension 0 of every tensor is the row, except in "documents" (kernels/documents.py), which
# describes all rows together.
MicroBatch: TypeAlias = "dict[str, torch.Tensor]"
DatasetRow = dict[str, Any]  # a dataset row: column -> value

IGNORE = -100  # label value that excludes a token from the loss


def no_measures(output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return the sums for a task without measures, shape (0,)."""
    return output.new_zeros(0)


def no_report(means: dict[str, float]) -> dict[str, float]:
    """Return {}, the report of a task that reports only its mean loss."""
    return {}


def no_stage_kwargs(batch: MicroBatch, last: bool) -> MicroBatch:
    """Return {}, for a task whose pipeline stages need only the inputs."""
    return {}


def keep_config(model_config: dict[str, Any], processor: object) -> dict[str, Any]:
    """Return config.json unchanged, for tasks whose models do not depend on the processor."""
    return model_config


def no_identity(processor: object, task: str) -> dict[str, Any]:
    """Return {}, for samples that do not depend on the processor."""
    return {}


def do_nothing(engine: Engine, *batches: object) -> None:
    """Do nothing before or after a step."""


@dataclass(frozen=True)
class Samples:
    """Functions that build micro-batches from dataset rows, for a task without packed rows.

    `collate(processor, rows, keys)` must seed all randomness of a row with the row's key. A key is
    a number below 2^63 that depends only on (seed, epoch, sample). If `keys` is None, the rows are
    for an evaluation and must not be randomised.

    A row contains the columns in `TaskSpec.columns`, whose names here lack the suffix _field. If a
    row is None, `collate` creates a padding row. It raises ValueError, TypeError, KeyError or
    OSError for an unusable row.

    `builtin_row(number)` returns a row of the dataset `builtin`. It is a pure function of the
    number.
    """

    collate: Callable[[Any, list[DatasetRow | None], list[int] | None], MicroBatch]
    builtin_row: Callable[[int], DatasetRow]
    num_builtin_rows: int  # number of rows in the dataset `builtin`
    # (processor, task) -> JSON values that determine a row's tensors. A resume compares these
    # values.
    identity: Callable[[Any, str], dict[str, Any]] = no_identity


@dataclass(frozen=True)
class Documents:
    """The encoding of labelled documents, for a task with packed rows.

    `encode(processor, contents, places, seq_len)` returns (ids, labels) for each document, both
    (n,) int64. A token without a loss has the label IGNORE. If a document has no labels, its ids
    are empty. A content is a dictionary of `TaskSpec.columns`, named without _field, or the value
    of the only column. `places` identify the contents in error messages. `encode` raises
    `ConfigError` for invalid content.

    `builtin_row(number)` creates one content of the dataset `builtin`, as a pure function of the
    number.
    """

    encode: Callable[[Any, list[Any], list[str], int], list[tuple[np.ndarray, np.ndarray]]]
    builtin_row: Callable[[int], Any]
    num_builtin_rows: int
    # (processor, task) -> JSON values that determine the labels. Cached tokens and a resume depend
    # on these values.
    identity: Callable[[Any, str], dict[str, Any]] = no_identity


@dataclass(frozen=True)
class Task:
    """The task functions that need torch. The rest of a task is in spec/task_specs.py.

    The loop computes all sums. A step's loss is the sum over the global batch divided by the count
    over the global batch. The loss therefore does not depend on how rows are divided into
    micro-batches and ranks.

    A model may carry state from step to step in addition to its parameters (statistics, a table).
    It must keep this state in buffers, because buffers are saved, converted and exported.
    """

    spec: TaskSpec
    targets: tuple[str, ...]  # micro-batch tensors that the loss reads
    # (data.request.Request, model_config) -> a tokenizer or similar object with save_pretrained.
    processor: Callable[[Any, dict[str, Any]], Any]
    forward: Callable[[Any, MicroBatch], torch.Tensor]  # (model, batch) -> output
    # (output, batch, by_row) -> fp32 sum, shape () or, by row, (B,)
    loss: Callable[[torch.Tensor, MicroBatch, bool], torch.Tensor]
    # (batch) -> (B,) int64: number of loss terms in each row, 0 for a padding row
    count: Callable[[MicroBatch], torch.Tensor]
    # (model_config, attention, name) -> "", or the reason why the model could not be checked.
    # Raises ConfigError.
    check: Callable[[dict[str, Any], str, str], str]
    # Returns the task for a model that returns losses instead of logits (model/chunked_loss.py).
    with_chunked_loss: Callable[[Task], Task] | None = None
    samples: Samples | None = None  # None: rows are packed tokens
    documents: Documents | None = None  # None: labels follow from the tokens of texts or chats
    # Names of the sums that `measure` returns. An evaluation reports each mean as eval_NAME.
    measures: tuple[str, ...] = ()
    # (output, batch) -> sums, shape (measures,), without gradients
    measure: Callable[[torch.Tensor, MicroBatch], torch.Tensor] = no_measures
    # (means of "loss" and the measures) -> values derived from these means
    report: Callable[[dict[str, float]], dict[str, float]] = no_report
    reports_each_step: bool = (
        False  # report the measures and derived values at every step, not only in evaluations
    )
    # (batch, whether it is for the last stage) -> further arguments for the model's forward. The
    # pipeline does not send these arguments from stage to stage.
    stage_kwargs: Callable[[MicroBatch, bool], MicroBatch] = no_stage_kwargs
    # (engine, this rank's micro-batches): called before the first forward pass of a step
    before_step: Callable[..., None] = do_nothing
    after_step: Callable[..., None] = do_nothing  # (engine): called after the optimizer step
    # (config.json, processor) -> the trained model's config.json, with values that depend on the
    # processor.
    fit_config: Callable[[dict[str, Any], Any], dict[str, Any]] = keep_config
    hyperparameters: tuple[str, ...] = ()  # `Recipe` fields that the loss uses
    with_hyperparameters: Callable[..., Task] | None = None  # (**values) -> Task that uses them
    row_logprobs: Callable[[torch.Tensor, MicroBatch], torch.Tensor] | None = (
        # (output, batch) -> (B, ...): each row's reference log-probabilities, computed before step
        # 1 (runtime/reference_logprobs.py)
        None
    )

    def inputs_of(self, batch: MicroBatch) -> MicroBatch:
        """Return the model's input tensors. Each pair contributes two rows."""
        return {
            name: batch[name].flatten(0, 1) if self.spec.pairs else batch[name]
            for name in self.spec.inputs
        }
