"""A tokenizer with more tokens than the model has embeddings.

Such a tokenizer is accepted. Data are rejected only if they contain a token without an embedding.
"""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from recipekit.data.masking import make_token_masker
from recipekit.data.pairs import PairProcessor, encode_pair
from recipekit.data.processors import byte_tokenizer, check_tokenizer, fitting_tokenizer, pad_id
from recipekit.data.request import request_from_recipe
from recipekit.data.stream import open_corpus
from recipekit.runtime import corpus
from recipekit.spec.errors import ConfigError, config_error
from recipekit.spec.recipe import Recipe
from recipekit.spec.task_specs import TASKS

SAYS = (
    r"contains token 264 \('<image>'\): the tokenizer has 265 tokens, but the model has embeddings"
    r" for 0 to 263. Call resize_token_embeddings\(265\)"
)


def recipe_of(folder: Path, task: str = "pretrain", **changes) -> Recipe:
    tokenizer = byte_tokenizer(task == "masked_lm")
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.save_pretrained(folder / "tokenizer")
    base = Recipe(
        model="none",
        task=task,
        tokenizer=str(folder / "tokenizer"),
        dataset=str(folder / "rows.jsonl"),
        seq_len=64,
    )
    return dataclasses.replace(
        base, micro_batch=1, global_batch=1, token_cache=str(folder / "kept"), **changes
    )


def write(folder: Path, task: str, word: str) -> None:
    rows = []
    for number in range(200):
        text = f"row {number} {word if number == 150 else 'x'}"
        chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
        rows.append(json.dumps({"messages": chat} if task == "sft" else {"text": text}))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")


def read(recipe: Recipe, vocab_size: int = 264, **changes: Any) -> tuple[int, int]:
    """Read every chunk; return (number of tokens, number of skipped rows)."""
    request = dataclasses.replace(request_from_recipe(recipe), **changes)
    tokenizer = fitting_tokenizer(request, {"vocab_size": vocab_size})
    (reader,) = open_corpus(request, tokenizer).readers()
    chunks = list(reader.chunks(0, 0, 0))
    return sum(len(chunk.ids) for chunk in chunks), sum(chunk.bad for chunk in chunks)


@pytest.mark.parametrize("task", ["pretrain", "sft", "masked_lm"])
def test_only_data_with_such_a_token_are_refused(tmp_path: Path, task: str) -> None:
    recipe = recipe_of(tmp_path, task)
    write(tmp_path, task, "plain")
    assert read(recipe)[0] > 1000
    write(tmp_path, task, "<image>")
    with pytest.raises(ConfigError, match=SAYS):
        read(recipe)
    assert read(recipe, 265)[0] > 1000, "the tokens are kept now"
    with pytest.raises(ConfigError, match=SAYS):
        read(recipe)


@pytest.mark.parametrize("task", ["pretrain", "sft", "masked_lm"])
def test_a_row_with_such_a_token_is_named_and_can_be_left_out(tmp_path: Path, task: str) -> None:
    recipe = recipe_of(tmp_path, task)
    write(tmp_path, task, "<image>")
    with pytest.raises(ConfigError, match=r"rows\.jsonl.*151.*contains token 264"):
        read(recipe)
    without, bad = read(recipe, bad_rows="skip")
    whole, none = read(recipe, 265)  # tokens for a different model have a separate cache
    assert (bad, none) == (1, 0) and 0 < whole - without < whole // 50
    with pytest.raises(ConfigError, match="contains token 264"):
        read(recipe)


def test_tokens_of_the_task_itself_need_an_embedding(tmp_path: Path) -> None:
    """Padding needs no embedding, because the end token fills rows instead.

    Masked tokens are replaced only with tokens that have an embedding.
    """
    request = request_from_recipe(recipe_of(tmp_path, "masked_lm"))
    tokenizer = fitting_tokenizer(request, {"vocab_size": 264})
    masks = make_token_masker(request, tokenizer)
    assert masks is not None and masks.special[264] and not masks.special[100]
    seen, _ = masks(np.full(20000, 65, np.int32), "key")
    assert seen.max() < 264
    tokenizer.mask_token = tokenizer.pad_token = "<image>"
    assert pad_id(tokenizer) == tokenizer.eos_token_id
    with pytest.raises(ConfigError, match="mask_token of --tokenizer: contains token 264"):
        check_tokenizer(tokenizer, "masked_lm")


def test_a_pair_with_such_a_token_is_a_broken_row(tmp_path: Path) -> None:
    tokenizer = fitting_tokenizer(
        request_from_recipe(recipe_of(tmp_path, "preference")), {"text_config": {"vocab_size": 264}}
    )
    pairs = PairProcessor(tokenizer, 64, False)
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert encode_pair(pairs, row)[0] >= 1
    for name in row:
        with pytest.raises(
            ValueError, match="it contains token 264, but the model has embeddings for 0 to 263"
        ):
            encode_pair(pairs, row | {name: "b<image>"})
    tokenizer.num_embeddings = 265
    assert encode_pair(pairs, row | {"chosen": "b<image>"})[1][1:] == [
        ord("b") - 33,
        264,
        tokenizer.eos_token_id,
    ]


@pytest.mark.parametrize(
    "task, embeddings, notes",
    [("pretrain", 264, 1), ("pretrain", 265, 0), ("sft", 263, 1), ("image_classification", 264, 0)],
)
def test_a_longer_tokenizer_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, embeddings: int, notes: int
) -> None:
    """The message appears for tasks that read tokens, even if the tokenizer is part of a processor.

    A config error in the data is raised on all ranks.
    """
    tokenizer: Any = fitting_tokenizer(
        request_from_recipe(recipe_of(tmp_path)), {"vocab_size": embeddings}
    )
    monkeypatch.setattr(
        corpus, "shared_problems", lambda refusal: refusal.problems if refusal else []
    )
    for name in ("open_corpus", "open_rows"):
        monkeypatch.setattr(corpus, name, lambda *given: "opened")
    of_task = SimpleNamespace(
        spec=TASKS[task], samples=None if TASKS[task].reads_tokens else "samples"
    )
    line = (
        f"tokenizer: 265 tokens, but the model has embeddings for {embeddings}. Data with other"
        " tokens are refused"
    )
    recipe, command = recipe_of(tmp_path, task), SimpleNamespace(tiny=False)
    plan: Any = SimpleNamespace(recipe=recipe, command=command, day="")
    for processor in (tokenizer, SimpleNamespace(tokenizer=tokenizer)):
        said: list[str] = []
        opened: Any = corpus.check_data(plan, of_task, processor, said.append)  # type: ignore[arg-type]
        assert opened == "opened" and said == [line] * notes
    monkeypatch.setattr(corpus, "open_corpus" if of_task.samples is None else "open_rows", refused)
    with pytest.raises(ConfigError, match="no such data"):
        corpus.check_data(plan, of_task, tokenizer, said.append)  # type: ignore[arg-type]


def refused(*given: Any) -> None:
    raise config_error("--dataset", "no such data", "give some")
