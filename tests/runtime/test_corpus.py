"""A start opens its data only once, and the streams read the opened corpus."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from recipekit.data import held_out
from recipekit.data.processors import byte_tokenizer
from recipekit.data.stream import Corpus, open_corpus
from recipekit.plan import RunPlan, resolve_run
from recipekit.runtime import corpus, epochs
from recipekit.runtime.corpus import DataSource, check_data, open_data
from recipekit.runtime.epochs import count_epochs
from recipekit.runtime.inputs import check_inputs
from recipekit.spec.command import parse
from recipekit.spec.recipe import Recipe
from recipekit.tasks.pretrain import TASK

RECIPE = Recipe(model="recipekit/llama-nano", init="random", tokenizer="bytes", wandb=False)
TOKENIZER = byte_tokenizer()


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    texts = [{"text": f"{number} {'word ' * (number % 40)}"} for number in range(300)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, texts)))
    flags = ["--dry_run", "--tiny", "--dataset", str(path), "--eval_every", "2"]
    return resolve_run(parse(RECIPE, Path("rows.py"), flags))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records each time a corpus is opened."""
    found: list[str] = []
    for module, who in ((corpus, "training"), (held_out, "evaluation")):

        def counted(*given: Any, who: str = who) -> Corpus:
            found.append(who)
            return open_corpus(*given)

        monkeypatch.setattr(module, "open_corpus", counted)
    monkeypatch.setattr(
        corpus, "shared_problems", lambda refusal: refusal.problems if refusal else []
    )
    return found


def steps(source: DataSource, state: Any = None) -> list[Any]:
    """Return the tokens in three steps and the state after these steps."""
    with contextlib.closing(open_data(source, 0, state, print)) as stream:
        found = [next(stream) for _ in range(3)]
    tokens = [[batch["input_ids"].tolist() for batch in batches] for batches, _ in found]
    return [tokens, found[-1][1]]


def test_streams_read_what_the_start_has_opened(plan: RunPlan, opened: list[str]) -> None:
    """Two streams use the corpus in turn, like the streams of a reference pass and of training."""
    found = check_data(plan, TASK, TOKENIZER, print)
    assert opened == ["training"]
    source = DataSource(plan, TASK, TOKENIZER, opened=found)
    first, second = steps(source), steps(source)
    assert opened == ["training"]
    assert first == second == steps(dataclasses.replace(source, opened=None))
    assert opened == ["training"] * 2


def test_other_data_and_a_resume_are_opened_again(plan: RunPlan, opened: list[str]) -> None:
    found = check_data(plan, TASK, TOKENIZER, print)
    other = dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, seed=7))
    tokens, state = steps(DataSource(other, TASK, TOKENIZER, opened=found))
    assert opened == ["training"] * 2 and state["identity"]["seed"] == 7
    assert tokens != steps(DataSource(plan, TASK, TOKENIZER, opened=found))[0]
    assert opened == ["training"] * 2
    steps(DataSource(other, TASK, TOKENIZER, opened=found), state)
    assert opened == ["training"] * 3


def test_the_data_are_counted_as_they_were_opened(
    plan: RunPlan, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.barrier", lambda group: None)
    monkeypatch.setattr("torch.distributed.broadcast_object_list", lambda found: None)
    for name, value in (("long_wait_group", lambda: None), ("shared_problems", lambda refusal: [])):
        monkeypatch.setattr(epochs, name, value)
    found = check_data(plan, TASK, TOKENIZER, print)
    lines: list[str] = []
    count_epochs(plan, TASK, TOKENIZER, None, found, lines.append)
    assert opened == ["training"] and lines[0].startswith("data: 29")


def test_a_dry_run_opens_its_training_data_once(plan: RunPlan, opened: list[str]) -> None:
    check_inputs(plan, print)
    assert opened == ["training", "evaluation"]
