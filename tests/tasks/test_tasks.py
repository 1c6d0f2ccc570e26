"""Each task has a row of facts and a file, and its code agrees with the stream's micro-batches."""

import contextlib
from functools import partial
from pathlib import Path

import pytest
import torch
from recipekit.data.batching import DataRank
from recipekit.data.request import Request
from recipekit.data.samples import open_samples
from recipekit.data.stream import open_stream
from recipekit.spec.recipe import Recipe
from recipekit.spec.task import IGNORE, MicroBatch
from recipekit.spec.task_specs import TASKS
from recipekit.tasks import find
from recipekit.tasks.find import load_task

# Keys of config.json that a task reads.
MODELS = {
    "image_classification": {"image_size": 16, "id2label": dict.fromkeys(map(str, range(10)), "")},
    "token_classification": {"num_labels": 3},
}


def first_batch(name: str) -> MicroBatch:
    request, task = (
        Request(
            dataset="builtin",
            task=name,
            tokenizer="bytes",
            seq_len=64,
            micro_batch=2,
            global_batch=2,
            documents=load_task(name).documents,
        ),
        load_task(name),
    )
    opened = partial(open_samples, samples=task.samples) if task.samples else open_stream
    with contextlib.closing(
        opened(request, task.processor(request, MODELS.get(name, {})), rank=DataRank(1, 0))
    ) as stream:
        return next(stream)[0][0]


def test_a_task_is_a_row_and_a_file():
    files = {path.stem for path in Path(find.__file__).parent.glob("*.py")} - {"__init__", "find"}
    assert files == TASKS.keys()
    assert Recipe.__dataclass_fields__["task"].metadata["choices"] == tuple(TASKS)
    for name, row in TASKS.items():
        assert load_task(name).spec is row


@pytest.mark.parametrize("name", TASKS)
def test_a_micro_batch_holds_what_the_model_and_the_loss_take(name):
    task, batch = load_task(name), first_batch(name)
    told = {"document_starts"} if task.spec.bidirectional else set()  # for a mask
    assert {*task.spec.inputs, *task.targets, *told} == batch.keys()
    assert {tensor.shape[0] for tensor in batch.values()} == {2}


def output_of(name: str, batch: MicroBatch) -> torch.Tensor:
    """Return random outputs with the shape that the task's model returns."""
    labels, facts = batch["labels"], TASKS[name]
    places = (
        (len(labels) * 2,)
        if facts.labels
        else labels.flatten(0, 1).shape
        if facts.pairs
        else labels.shape
    )
    return torch.randn(*places, facts.labels or 264, generator=torch.Generator().manual_seed(0))


# test_preference.py covers the losses of the other tasks.
@pytest.mark.parametrize("name", [name for name in TASKS if not TASKS[name].pairs])
def test_the_loss_is_a_sum_over_what_is_counted(name):
    """The loss is a sum for each row and over all rows. A row without a label adds zero."""
    task, batch = load_task(name), first_batch(name)
    batch["labels"][1] = IGNORE
    logits = output_of(name, batch).bfloat16()
    counts, rows, whole = (
        task.count(batch),
        task.loss(logits, batch, True),
        task.loss(logits, batch, False),
    )
    assert counts.tolist() == [int((batch["labels"][0] != IGNORE).sum()), 0] and counts[0] > 0
    probabilities = logits[0].double().log_softmax(-1)
    places = probabilities.reshape(-1, 264)
    expected = -sum(
        places[place, label]
        for place, label in enumerate(batch["labels"][0].reshape(-1).tolist())
        if label != IGNORE
    )
    assert rows.dtype == whole.dtype == torch.float32 and rows.shape == (2,) and whole.shape == ()
    assert rows.tolist() == pytest.approx([float(expected), 0.0], rel=1e-6)
    assert float(whole) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("name", TASKS)
def test_measures_have_a_sum_each_and_a_row_without_label_adds_none(name):
    task, batch = load_task(name), first_batch(name)
    logits = output_of(name, batch)
    assert task.measure(logits, batch).shape == (len(task.measures),)
    batch |= {"labels": torch.full_like(batch["labels"], IGNORE)} | (
        {"reference": torch.zeros(2, 2)} if "reference" in batch else {}
    )
    assert (
        not task.measure(logits.requires_grad_(), batch).any()
        and not task.measure(logits, batch).requires_grad
    )
