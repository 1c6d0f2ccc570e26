"""What the loop asks of a task, and what every task's micro-batches share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from .engine import Engine
from .task_specs import Facts

if TYPE_CHECKING:  # light: importing torch takes seconds
    import torch

# Dimension 0 of every tensor runs over the rows, but of "documents" (kernels/documents.py), which
# describe all rows together
MicroBatch: TypeAlias = "dict[str, torch.Tensor]"
Row = dict[str, Any]  # of a data set: column -> value

IGNORE = -100  # a label that carries no loss


def measure_nothing(output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Returns the sums of a task without measures, (0,)."""
    return output.new_zeros(0)


def report_nothing(means: dict[str, float]) -> dict[str, float]:
    """Returns what a task adds that tells nothing besides its means."""
    return {}


def hand_nothing(batch: MicroBatch, last: bool) -> MicroBatch:
    """Returns what a task hands over whose stages need nothing but the inputs."""
    return {}


def leave_config(model_config: dict[str, Any], processor: Any) -> dict[str, Any]:
    """Returns the config.json of a task whose models need not know of its processor."""
    return model_config


def nothing_more(processor: Any, task: str) -> dict[str, Any]:
    """Return the identity of samples that are the same with every processor."""
    return {}


def do_nothing(engine: Engine, *batches: Any) -> None:
    """Stands where a task does nothing before or after a step."""


@dataclass(frozen=True)
class Samples:
    """Says how a task whose rows are not packed makes micro-batches of rows of its data set.

    `collate(processor, rows, keys)`: what it draws for a row, it draws from the row's key, a number
    below 2^63 that depends on (seed, epoch, sample) alone; keys None: the rows are evaluated, and
    nothing is drawn. A row holds the columns that `Facts.columns` name, under these names without
    _field; for a row None it makes one that only fills up. It raises ValueError, TypeError,
    KeyError or OSError for a row that cannot be used. `drawn(number)` makes a row of the data set
    `builtin`, a pure function of its number.
    """

    collate: Callable[[Any, list[Row | None], list[int] | None], MicroBatch]
    drawn: Callable[[int], Row]
    num_drawn: int  # rows of that data set
    # (processor, task) -> values that decide the tensors of a row, as JSON: a resume compares them
    identity: Callable[[Any, str], dict[str, Any]] = nothing_more


@dataclass(frozen=True)
class Task:
    """What computes, of a task; spec/task_specs.py has what can be said without torch.

    The loop owns all sums: the loss of a step is the sum over the global batch divided by the count
    over the global batch, so that it does not depend on how rows are split into micro-batches and
    ranks. A model that keeps something from step to step beside its parameters (statistics, a
    table) keeps it in buffers: these are saved, converted and exported.
    """

    facts: Facts
    targets: tuple[str, ...]  # tensors of a micro-batch that the loss takes
    # (data.request.Request, model_config) -> a tokenizer or the like: has save_pretrained
    processor: Callable[[Any, dict[str, Any]], Any]
    forward: Callable[[Any, MicroBatch], torch.Tensor]  # (model, batch) -> its output
    # (output, batch, by row) -> fp32 sum, () or for each row (B,)
    loss: Callable[[torch.Tensor, MicroBatch, bool], torch.Tensor]
    # (B,) int64: what each row's loss is summed over; 0 for a row that only fills up
    count: Callable[[MicroBatch], torch.Tensor]
    # (model_config, attention, name) -> "", or why it could not be looked at; raises Refusal
    check: Callable[[dict[str, Any], str, str], str]
    # makes it the task of a model that gives losses in place of logits (model/head.py)
    of_losses: Callable[[Task], Task] | None = None
    samples: Samples | None = None  # None: rows are packed tokens
    # names of `measure`'s sums; an evaluation gives the mean of each as eval_NAME
    measures: tuple[str, ...] = ()
    # (output, batch) -> sums (measures,), without gradient
    measure: Callable[[torch.Tensor, MicroBatch], torch.Tensor] = measure_nothing
    # (means: "loss" and the measures) -> what follows from them
    report: Callable[[dict[str, float]], dict[str, float]] = report_nothing
    each_step: bool = False  # steps tell the measures and the report, too, not evaluations alone
    # (batch, whether it is for the last stage) -> further arguments of the model's forward, which a
    # pipeline does not send from stage to stage
    handed: Callable[[MicroBatch, bool], MicroBatch] = hand_nothing
    # (engine, micro-batches of this rank): before the first forward pass of a step
    before: Callable[..., None] = do_nothing
    after: Callable[..., None] = do_nothing  # (engine): after the optimizer's step
    # (config.json, processor) -> that of the model that is trained: with what of the processor the
    # model has to know
    configured: Callable[[dict[str, Any], Any], dict[str, Any]] = leave_config
    numbers: tuple[str, ...] = ()  # fields of `Recipe` that the loss takes
    tuned: Callable[..., Task] | None = None  # makes the task with these, by name
    score: Callable[[torch.Tensor, MicroBatch], torch.Tensor] | None = (
        None  # (output, batch) -> (B, ...): what the start says of each row (runtime/references.py)
    )

    def inputs_of(self, batch: MicroBatch) -> MicroBatch:
        """Takes the tensors that the model takes, in its rows: two for each pair."""
        return {
            name: batch[name].flatten(0, 1) if self.facts.pairs else batch[name]
            for name in self.facts.inputs
        }
