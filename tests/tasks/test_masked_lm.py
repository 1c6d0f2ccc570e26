"""Masking: the share and the kinds of masked tokens, and whole words. Special tokens are never
masked.

A row has the same masks on any rank.
"""

import contextlib
import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from recipekit.architectures.families import default_config
from recipekit.architectures.lookup import model_config
from recipekit.data.batching import DataRank
from recipekit.data.blocks import StreamPosition
from recipekit.data.encode import encode_sequences
from recipekit.data.held_out import eval_rows
from recipekit.data.masking import (
    MASK_TOKEN_SHARE,
    RANDOM_TOKEN_SHARE,
    TokenMasker,
    make_token_masker,
    word_boundaries,
)
from recipekit.data.processors import byte_tokenizer, check_edges, check_tokenizer, edges
from recipekit.data.request import Request
from recipekit.data.stream import open_stream
from recipekit.data.stream_state import StreamMismatch
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import IDENTITY, run_identity
from recipekit.spec.task import IGNORE
from recipekit.tasks.masked_lm import TASK
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BYTES = byte_tokenizer(masked=True)
CLS, SEP, PAD, MASK = (
    BYTES.convert_tokens_to_ids(token)
    for token in ("<|begin|>", "<|endoftext|>", "<|pad|>", "<|reserved_0|>")
)


def request(**fields: Any) -> Request:
    return Request(
        **(
            {
                "task": "masked_lm",
                "tokenizer": "bytes",
                "seq_len": 64,
                "micro_batch": 2,
                "global_batch": 8,
            }
            | fields
        )
    )


def rows_of(
    steps: int,
    tokenizer: Any = BYTES,
    dp: int = 1,
    dp_rank: int = 0,
    state: Any = None,
    **fields: Any,
) -> tuple[dict[str, torch.Tensor], Any]:
    """Return one rank's rows for some steps, concatenated, and the state after these steps."""
    with contextlib.closing(
        open_stream(request(**fields), tokenizer, rank=DataRank(dp, dp_rank), state=state)
    ) as stream:
        batches = []
        for _ in range(steps):
            made, state = next(stream)
            batches += [{name: tensor.clone() for name, tensor in batch.items()} for batch in made]
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}, state


def masks(**fields: Any) -> TokenMasker:
    found = make_token_masker(request(**fields), BYTES)
    assert found is not None
    return found


def wordpiece() -> PreTrainedTokenizerFast:
    """Return a tokenizer that reads lower-case text as BERT's does.

    A few words are known. Other words are split into letters, with ## before all letters except the
    first.
    """
    letters = "abcdefghijklmnopqrstuvwxyz0123456789().,:=_"
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{letter}" for letter in letters),
        "the",
        "##ing",
        "return",
    ]
    backend = Tokenizer(
        models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


# Masked tokens
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_so_many_tokens_are_hidden_and_replaced_as_the_paper_says(rate):
    """On 500,000 tokens, the shares fit independent samples within five standard deviations."""
    ids = np.random.default_rng(0).integers(0, 256, 500_000).astype(np.int32)
    seen, labels = masks(mask_rate=rate)(ids, "key")
    hidden = labels != IGNORE
    count = int(hidden.sum())

    def share_is(found: int, of: int, share: float) -> None:
        assert abs(found - of * share) <= 5 * (of * share * (1 - share)) ** 0.5

    share_is(count, len(ids), rate)
    assert (labels[hidden] == ids[hidden]).all() and (seen[~hidden] == ids[~hidden]).all()
    share_is(int((seen[hidden] == MASK).sum()), count, MASK_TOKEN_SHARE)
    others = (seen != MASK) & hidden
    # One in 256 random tokens equals the original token.
    share_is(int((seen[others] != ids[others]).sum()), count, RANDOM_TOKEN_SHARE * 255 / 256)
    drawn = seen[others & (seen != ids)]
    assert drawn.max() <= 255 and len(np.unique(drawn)) == 256, "any token but a special one"
    apart = hidden[1:] & hidden[:-1]
    share_is(int(apart.sum()), len(ids) - 1, rate**2)  # neighbours are sampled independently


def test_what_is_drawn_depends_on_key_and_place_alone():
    ids = np.random.default_rng(0).integers(0, 256, 4000).astype(np.int32)
    hide = masks()
    (seen, labels), again, other = hide(ids, 0, 1), hide(ids.copy(), 0, 1), hide(ids, 0, 2)
    assert (seen == again[0]).all() and (labels == again[1]).all()
    assert (labels != other[1]).mean() > 0.2
    shorter = hide(ids[:1000], 0, 1)
    assert (seen[:1000] == shorter[0]).all() and (labels[:1000] == shorter[1]).all()


def test_special_tokens_are_never_hidden():
    ids = np.tile(np.array([CLS, 65, 66, SEP, PAD, MASK], np.int32), 2000)
    seen, labels = masks(mask_rate=0.9)(ids, "key")
    special = np.isin(ids, [CLS, SEP, PAD, MASK])
    assert (
        (labels[special] == IGNORE).all()
        and (seen[special] == ids[special]).all()
        and (labels[~special] != IGNORE).mean() > 0.85
    )


# Rows
# --------------------------------------------------------------------------------------------------


def test_a_row_is_the_same_on_any_rank_in_any_micro_batch_and_after_a_resume():
    whole, _ = rows_of(6)
    split = [rows_of(6, dp=2, dp_rank=rank, micro_batch=1)[0] for rank in (0, 1)]
    parts = [rows.unflatten(0, (6, 4)) for rows in (split[0]["labels"], split[1]["labels"])]
    assert torch.equal(whole["labels"], torch.cat(parts, 1).flatten(0, 1))
    for name in whole:
        parts = [rows[name].unflatten(0, (6, 4)) for rows in split]
        assert torch.equal(whole[name], torch.cat(parts, 1).flatten(0, 1)), name
    _, state = rows_of(2)
    rest, _ = rows_of(4, state=json.loads(json.dumps(state)))
    assert all(torch.equal(whole[name][16:], rest[name]) for name in whole)
    assert not torch.equal(whole["labels"], rows_of(6, seed=1)[0]["labels"])


def test_an_epoch_hides_other_tokens_than_the_one_before(tmp_path):
    """The test finds the same documents in two epochs by their labels and unmasked tokens."""
    # With 54 letters and two special tokens, a row of 64 tokens contains one document.
    texts = [f"{number:03d}" * 18 for number in range(200)]
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    rows, state = rows_of(50, dataset=str(tmp_path / "texts.jsonl"), token_cache="off")
    assert (
        state["domains"]["texts" if "texts" in state["domains"] else next(iter(state["domains"]))][
            "place"
        ].get("epoch", 0)
        >= 1
    )
    shown = torch.where(rows["labels"] != IGNORE, rows["labels"], rows["input_ids"])
    found: dict[str, list[tuple[int, ...]]] = {}
    for ids, labels in zip(shown, rows["labels"], strict=True):
        found.setdefault(BYTES.decode(ids[1:55]), []).append(
            tuple((labels != IGNORE).nonzero().flatten().tolist())
        )
    assert found.keys() <= set(texts), "labels and what is not hidden are the text"
    twice = [places for places in found.values() if len(places) > 1]
    assert len(twice) > 100 and sum(one == other for one, other, *_ in twice) < 3


def test_documents_have_edges_and_one_longer_than_a_row_is_cut_into_several_with_edges(tmp_path):
    assert edges(BYTES) == ([CLS], [SEP]) and edges(wordpiece()) == ([2], [3])
    (long, _), (rest, _), (short, _) = encode_sequences(BYTES, ["x" * 70, "", "yz"], 64)[
        :2
    ] + encode_sequences(BYTES, ["yz"], 64)
    assert (
        long.tolist() == [CLS, *[BYTES("x", add_special_tokens=False)["input_ids"][0]] * 62, SEP]
        and len(rest) == 10
    )
    assert short.tolist() == BYTES("yz")["input_ids"]
    assert [len(ids) for ids, _ in encode_sequences(BYTES, [""], 64)] == [0]
    rows, _ = rows_of(4)
    for ids, labels, positions, starts in zip(
        rows["input_ids"],
        rows["labels"],
        rows["position_ids"],
        rows["document_starts"],
        strict=True,
    ):
        bounds = [*(positions == 0).nonzero().flatten().tolist(), 64]
        assert starts.nonzero().flatten().tolist() == bounds[:-1]
        for start, stop in pairwise(bounds):
            padding = ids[start] == PAD
            assert padding or (ids[start] == CLS and ids[stop - 1] == SEP)
            assert (labels[[start, stop - 1]] == IGNORE).all() and (
                not padding or (ids[start:stop] == PAD).all()
            )
    hidden = (rows["labels"] != IGNORE).sum().item()
    assert hidden == TASK.count(rows).sum() and 0.1 < hidden / rows["labels"].numel() < 0.2


def test_evaluations_hide_the_same_tokens_whatever_the_seed_and_the_ranks():
    one = eval_rows(request(eval_rows=12), BYTES, rank=DataRank(1, 0))
    other = [
        batch
        for rank in (0, 1)
        for batch in eval_rows(request(eval_rows=12, seed=5), BYTES, rank=DataRank(2, rank))
    ]
    assert all(
        torch.equal(mine[name], theirs[name])
        for mine, theirs in zip(one, other, strict=True)
        for name in mine
    )
    assert sum((batch["labels"] != IGNORE).sum() for batch in one) > 50


# Whole words
# --------------------------------------------------------------------------------------------------


def words_by_hand(tokenizer: Any, text: str) -> list[int]:
    """Return each token's word number, from the tokenizer's offsets in the text."""
    spans = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    numbers, number = [], -1
    for token, (start, _) in enumerate(spans):
        before = text[start - 1] if start else " "
        joined = token > 0 and all(
            letter.isalnum() or letter == "_" for letter in (before, text[start])
        )
        number += not joined
        numbers.append(number)
    return numbers


def test_words_of_wordpiece_are_those_of_its_pre_tokenizer():
    tokenizer = wordpiece()
    special = np.zeros(len(tokenizer), bool)
    special[:5] = True
    begins, ends = word_boundaries(tokenizer, special)
    encoded = tokenizer("return the (reading) of x_1, 42:", add_special_tokens=False)
    ids = np.array(encoded["input_ids"])
    first = begins[ids] | np.concatenate([[True], ends[ids[:-1]]])
    words = encoded.word_ids()
    assert first.tolist() == [True] + [
        one != other for one, other in pairwise(words)
    ] and 5 < first.sum() < len(ids)


def test_words_of_bytes_are_runs_of_letters_with_the_space_before_them():
    special = make_token_masker(request(), BYTES).special  # type: ignore[union-attr]
    begins, ends = word_boundaries(BYTES, special)
    text = "def größe(x_1):\n\treturn  a + 42"
    ids = np.array(BYTES(text, add_special_tokens=False)["input_ids"])
    first = begins[ids] | np.concatenate([[True], ends[ids[:-1]]])
    spans = [*np.flatnonzero(first).tolist(), len(ids)]
    found = [BYTES.decode(ids[start:stop].tolist()) for start, stop in pairwise(spans)]
    assert found == [
        "def",
        " größe",
        "(",
        "x_1",
        ")",
        ":",
        "\n",
        "\t",
        "return",
        " ",
        " a",
        " ",
        "+",
        " 42",
    ]


@pytest.mark.parametrize("rate", [0.15, 0.5])
def test_words_are_hidden_as_a_whole_at_the_same_rate(rate):
    tokenizer = wordpiece()
    text = "return the reading of the parsing, " * 20_000
    ids = np.array([2, *tokenizer(text, add_special_tokens=False)["input_ids"], 3], np.int32)
    hide = make_token_masker(request(mask_rate=rate, whole_words=True), tokenizer)
    assert hide is not None
    seen, labels = hide(ids, "key")
    hidden = labels != IGNORE
    words = [None, *tokenizer(text, add_special_tokens=False).word_ids(), None]
    same = np.array([one is not None and one == other for one, other in pairwise(words)])
    assert same.sum() > 100_000 and (hidden[1:] == hidden[:-1])[same].all(), (
        "all tokens of a word, or none"
    )
    assert abs(hidden.mean() - rate) < 0.01
    assert abs((seen[hidden] == 4).mean() - MASK_TOKEN_SHARE) < 0.01
    ways = [
        (seen[place] == 4) for place in np.flatnonzero(hidden & np.concatenate([[False], same]))
    ]
    assert 0.7 < np.mean(ways) < 0.9, "how is drawn for each token"


# Config errors
# --------------------------------------------------------------------------------------------------


def test_what_a_tokenizer_must_have():
    with pytest.raises(ConfigError, match="has no mask token"):
        check_tokenizer(byte_tokenizer(), "masked_lm")
    with pytest.raises(
        ConfigError,
        match=(
            r"adds 2 special tokens to each text, which leaves no room for the text\. Use --seq_len"
            r" 3 or more"
        ),
    ):
        check_edges(edges(BYTES), 2)
    check_edges(edges(BYTES), 3)
    check_tokenizer(BYTES, "masked_lm")
    assert (
        BYTES("é")["input_ids"][1:-1] == byte_tokenizer()("é")["input_ids"]
        and BYTES.vocab_size == byte_tokenizer().vocab_size
    )
    assert all(
        BYTES.convert_tokens_to_ids(token) == byte_tokenizer().convert_tokens_to_ids(token)
        for token in BYTES.all_special_tokens
    )


@pytest.mark.parametrize(
    ("config", "task", "says"),
    [
        (
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            "masked_lm",
            (
                "transformers .* does not support a llama as a masked language model. Use --task"
                " pretrain"
            ),
        ),
        (
            {"model_type": "bert", "is_decoder": True},
            "masked_lm",
            'a bert whose config.json says "is_decoder": true is causal. Use --task pretrain',
        ),
        (
            {"model_type": "bart", "is_encoder_decoder": True},
            "masked_lm",
            "a bart is an encoder-decoder, but this task trains only encoders",
        ),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            "pretrain",
            "a bert reads the tokens that it should predict. Use --task masked_lm",
        ),
        (
            {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]},
            "sft",
            "reads the tokens that it should predict. Use --task masked_lm",
        ),
    ],
)
def test_models_of_the_other_kind_are_refused_with_the_reason(tmp_path, config, task, says):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=says):
        model_config(str(tmp_path), task)


def test_a_model_that_is_found_to_look_back_is_refused():
    """config.json does not matter, because the check runs a small copy, which is a decoder here."""
    assert TASK.check(default_config("bert", "masked_lm").to_dict(), "auto", "mine") == ""
    with pytest.raises(ConfigError, match="do not depend on the tokens behind them"):
        TASK.check(
            default_config("bert", "masked_lm").to_dict() | {"is_decoder": True}, "auto", "mine"
        )


def test_a_step_without_a_hidden_token_has_no_loss_and_is_a_number():
    labels = torch.full((2, 8), IGNORE)
    logits = torch.randn(2, 8, 11, requires_grad=True)
    loss = TASK.loss(logits, {"labels": labels}, False)
    loss.backward()
    assert loss == 0 and not logits.grad.any() and TASK.count({"labels": labels}).tolist() == [0, 0]  # type: ignore[union-attr]
    assert TASK.report({"loss": 0.0}) == {"perplexity": 1.0} and TASK.report({"loss": 1e4}) == {
        "perplexity": float("inf")
    }


def test_places_tell_epochs_apart():
    """A block's key begins with the block's position, and the position begins with the epoch."""
    assert next(iter(vars(StreamPosition()))) == "epoch"


def test_what_is_hidden_belongs_to_runs_that_hide_and_to_no_other():
    """The identity of other tasks' runs is unchanged, so older runs can be resumed."""
    assert run_identity(Recipe(model="a"), None).keys() == set(IDENTITY)
    mine = run_identity(Recipe(model="a", task="masked_lm", mask_rate=0.3), None)
    assert mine.keys() == {*IDENTITY, "mask_rate", "whole_words"} and mine["mask_rate"] == 0.3
    with contextlib.closing(
        open_stream(request(task="pretrain"), byte_tokenizer(), rank=DataRank(1, 0))
    ) as stream:
        assert stream.state["identity"].keys() == {
            "corpus",
            "task",
            "seed",
            "global_batch",
            "tokenizer",
            "seq_len",
            "blocks",
        }
    _, state = rows_of(1)
    with pytest.raises(StreamMismatch, match=r"mask_rate = 0.3: the saved data stream has 0.15"):
        open_stream(request(mask_rate=0.3), BYTES, rank=DataRank(1, 0), state=state)
