"""Words with tags: labels on first tokens, long rows, classes, and errors for rows and models."""

import contextlib
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from recipekit.architectures.families import default_config, tiny_config
from recipekit.architectures.lookup import with_labels
from recipekit.data.batching import DataRank
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import Request
from recipekit.data.stream import open_corpus, open_stream
from recipekit.data.stream_state import StreamMismatch
from recipekit.model.empty import config_of, construct
from recipekit.spec.errors import ConfigError
from recipekit.spec.task import IGNORE
from recipekit.tasks import token_classification
from recipekit.tasks.token_classification import (
    GIVEN_NAMES,
    PLACES,
    TASK,
    Classes,
    encode_words,
    generate_sentence,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CLASSES = Classes(3, {"O": 0, "B": 1, "I": 2})
CLS, SEP = 2, 3
MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def finished(backend: Tokenizer, classes: Classes = CLASSES) -> Any:
    """Return a tokenizer as the task makes it, with [CLS] and [SEP] around each text."""
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.tag_classes = classes
    return tokenizer


def wordpiece() -> Any:
    """Return a tokenizer like BERT's: lower-case letters, and `ing` as a piece."""
    words = [*MARKS, *LETTERS, *(f"##{letter}" for letter in LETTERS), "the", "##ing"]
    vocab = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return finished(backend)


def sentencepiece() -> Any:
    """Return a tokenizer like XLM-R's: ▁ begins a word, and is a token before unknown words."""
    pieces = [*((mark, -20.0) for mark in MARKS), ("▁", -3.0), ("▁the", -2.0), ("東京", -2.0)]
    pieces += [(letter, -4.0) for letter in LETTERS]
    backend = Tokenizer(models.Unigram(pieces, 1))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return finished(backend)


def bytes_of() -> Any:
    tokenizer: Any = byte_tokenizer()
    tokenizer.tag_classes = CLASSES
    return tokenizer


TOKENIZERS = {"wordpiece": wordpiece, "sentencepiece": sentencepiece, "bytes": bytes_of}


def encoded(
    tokenizer: Any, words: Any, tags: Any, seq_len: int = 64
) -> list[tuple[list[int], list[int]]]:
    documents = encode_words(tokenizer, [{"text": words, "label": tags}], ["row 1"], seq_len)
    return [(ids.tolist(), labels.tolist()) for ids, labels in documents]


def labelled(tokenizer: Any, words: Any, tags: Any) -> list[tuple[str, int]]:
    """Return (token as text, label) of each token with a label."""
    ((ids, labels),) = encoded(tokenizer, words, tags)
    return [
        (tokenizer.decode([token]).strip(" ▁"), label)
        for token, label in zip(ids, labels, strict=True)
        if label != IGNORE
    ]


# Labels
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_first_token_of_each_word_has_its_label(name: str) -> None:
    words, tags = ["tax", "the", "parsing", "a", "zoo"], [0, 1, 2, 0, 1]
    found = labelled(TOKENIZERS[name](), words, tags)
    assert [label for _, label in found] == tags
    starts = [token.removeprefix("##") for token, _ in found]
    assert all(word.startswith(start) and start for word, start in zip(words, starts, strict=True))


def test_labels_of_wordpiece_are_those_of_word_ids() -> None:
    """transformers' own examples place the labels by `word_ids`."""
    tokenizer = wordpiece()
    words = ["Parsing", "the", "U.S.", "x-ray", "New York", "a"]
    tags = [1, 0, 1, 2, 1, 0]
    ((ids, labels),) = encoded(tokenizer, words, tags)
    batch = tokenizer(words, is_split_into_words=True)
    of_words = batch.word_ids()
    expected = [
        IGNORE if word is None or word == before else tags[word]
        for before, word in pairwise([None, *of_words])
    ]
    assert ids == batch["input_ids"] and labels == expected


def test_a_blank_of_sentencepiece_never_has_the_label() -> None:
    found = labelled(sentencepiece(), ["東京", "the", "東京"], [1, 0, 2])
    assert found == [("東京", 1), ("the", 0), ("東京", 2)]


def test_words_without_a_class_or_a_token_have_no_label() -> None:
    assert labelled(wordpiece(), ["a", "b", "c"], [1, IGNORE, 2]) == [("a", 1), ("c", 2)]
    assert labelled(wordpiece(), ["a", "\u0000", "", "c"], [1, 0, 0, 2]) == [("a", 1), ("c", 2)]
    ((ids, labels),) = encoded(wordpiece(), ["a", "b"], [IGNORE, IGNORE])
    assert ids == labels == []


@pytest.mark.parametrize(
    ("words", "tags"),
    [
        (["the", "zoo"], ["B", "O"]),
        ("the  zoo\n", "B O"),
        ("the zoo", "1 0"),
        (["the", "zoo"], [np.int64(1), 0]),
        (["the", "zoo"], ["1", 0]),
    ],
)
def test_tags_are_numbers_or_names_and_both_columns_may_be_text(words: Any, tags: Any) -> None:
    assert labelled(wordpiece(), words, tags) == [("the", 1), ("z", 0)]


def test_a_row_longer_than_seq_len_is_cut_into_parts_with_edges() -> None:
    tokenizer, words = wordpiece(), ["the"] * 3 + ["parsing"] + ["a"]
    parts = encoded(tokenizer, words, [0, 1, 2, 1, 2], seq_len=5)
    whole = tokenizer(" ".join(words), add_special_tokens=False)["input_ids"]
    assert [ids for ids, _ in parts] == [
        [CLS, *whole[start : start + 3], SEP] for start in range(0, len(whole), 3)
    ]
    # p ##a ##r ##s ##ing a
    assert [labels[1:-1] for _, labels in parts] == [
        [0, 1, 2],
        [1, IGNORE, IGNORE],
        [IGNORE, IGNORE, 2],
    ]
    assert all(labels[0] == labels[-1] == IGNORE for _, labels in parts)
    without = encoded(tokenizer, ["the", "parsing"], [0, 1], seq_len=4)
    assert [len(ids) for ids, _ in without] == [4, 0, 0], "parts without a label are left out"


def test_builtin_sentences_tag_names_alone() -> None:
    rows = [generate_sentence(number) for number in range(200)]
    assert rows[7] == generate_sentence(7) and rows[7] != rows[8]
    names = {*GIVEN_NAMES, *token_classification.FAMILY_NAMES, *PLACES}
    for row in rows:
        assert row["label"] == [int(word in names) for word in row["text"]]


# Data
# --------------------------------------------------------------------------------------------------


def request_of(dataset: Path, **changes: Any) -> Request:
    numbers: dict[str, Any] = dict(
        seq_len=64, micro_batch=2, global_batch=2, eval_every=0, token_cache="off"
    )
    return Request(
        dataset=str(dataset),
        task="token_classification",
        tokenizer="bytes",
        documents=TASK.documents,
        **(numbers | changes),
    )


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def first_batch(request: Request, model_config: dict[str, Any]) -> dict[str, torch.Tensor]:
    tokenizer = TASK.processor(request, model_config)
    with contextlib.closing(open_stream(request, tokenizer, rank=DataRank(1, 0))) as stream:
        return next(stream)[0][0]


NAMED = {"id2label": {"0": "O", "1": "B", "2": "I"}}


def test_columns_have_other_names_in_parquet(tmp_path: Path) -> None:
    rows = {"tokens": [["the", f"zoo{row}"] for row in range(50)], "ner_tags": [[0, 2]] * 50}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    request = request_of(
        tmp_path / "rows.parquet", text_field="tokens", label_field="ner_tags", token_cache="off"
    )
    batch = first_batch(request, NAMED)
    labels = batch["labels"][batch["labels"] != IGNORE]
    assert len(labels) > 10 and labels.tolist() == [0, 2] * (len(labels) // 2)
    texts = bytes(batch["input_ids"][batch["labels"] == 2].unique().tolist())
    assert byte_tokenizer().decode(list(texts)) == "z"


def test_packed_documents_start_at_position_0(tmp_path: Path) -> None:
    rows = [{"text": f"a{row} b", "label": "B O"} for row in range(200)]
    batch = first_batch(request_of(write_rows(tmp_path / "rows.jsonl", rows)), NAMED)
    assert (batch["labels"][batch["position_ids"] == 0] == 1).sum() > 10
    assert torch.equal(batch["document_starts"], batch["position_ids"] == 0)


def test_bad_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    rows = [{"text": f"a{row} b", "label": "B" if row % 2 else "B O"} for row in range(100)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        ConfigError, match=r"row 2: its text has 2 words, but its label has 1 tag\."
    ):
        first_batch(request_of(file), NAMED)
    batch = first_batch(request_of(file, bad_rows="skip"), NAMED)
    seen = {
        byte_tokenizer().decode(ids[labels != IGNORE])
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    }
    assert all(set(text) <= {"a", "b"} for text in seen) and (batch["labels"] == 0).any()


def test_a_resume_compares_the_classes(tmp_path: Path) -> None:
    rows = [{"text": f"a{row} b", "label": [1, 0]} for row in range(200)]
    request = request_of(write_rows(tmp_path / "rows.jsonl", rows))
    stream = open_stream(request, TASK.processor(request, NAMED), rank=DataRank(1, 0))
    with contextlib.closing(stream):
        state = next(stream)[1]
    open_corpus(request, TASK.processor(request, NAMED)).check(state)
    for other in ({"id2label": {"0": "O", "1": "I", "2": "B"}}, {"num_labels": 4}):
        with pytest.raises(StreamMismatch, match="classes"):
            open_corpus(request, TASK.processor(request, other)).check(state)


# Config errors
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "tags", "message"),
    [
        (
            ["a", "b", "c"],
            [0, 1],
            r"row 1: its text has 3 words, but its label has 2 tags. Every word needs one tag."
            r" Correct the row \(the tag -100 stands for no class\), or leave it out",
        ),
        ("a b", [0, 1, 1], "its text has 2 words, but its label has 3 tags"),
        (
            ["a", "b"],
            [0, 3],
            "row 1, tag 2: class 3 is not one of the model's: the classes of the model are 0 to 2."
            " Use --num_labels with the number of classes in the data",
        ),
        (["a"], [-1], "tag 1: class -1 is not one of the model's"),
        (["a"], ["7"], "tag 1: class 7 is not one of the model's"),
        (
            ["a"],
            ["B-PER"],
            "tag 1: 'B-PER' is not the name of a class: the classes of the model are 0 to 2, their"
            " names O, B, I. Write the numbers",
        ),
        (["a"], [1.5], "tag 1: must be the number or the name of a class, not float '1.5'"),
        (["a"], [True], "tag 1: must be the number or the name of a class, not bool 'True'"),
        (["a"], [None], "tag 1: must be the number or the name of a class, not NoneType 'None'"),
        (["a"], [["B"]], "tag 1: must be the number or the name of a class, not list"),
        (
            ["a"],
            1,
            "row 1: its label must be a list of tags, or text with blanks, not int '1'. Name"
            " another column with --label_field, correct the row, or leave it out",
        ),
        (["a"], None, "its label must be a list of tags, or text with blanks, not NoneType"),
        ({"a": 1}, [1], "its text must be a list of words, or text with blanks, not dict"),
        (["a", 5], [1, 1], "row 1: word 2 of its text must be text, not int '5'. Name another"),
    ],
)
def test_a_bad_row_has_one_clear_error(words: Any, tags: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        encoded(wordpiece(), words, tags)
    assert len(error.value.problems) == 1


def test_names_are_unknown_if_config_json_has_none() -> None:
    tokenizer = wordpiece()
    tokenizer.tag_classes = Classes(2, {})
    with pytest.raises(ConfigError, match=r"0 to 1, their names none. Write the numbers of"):
        encoded(tokenizer, ["a"], ["B"])


def test_num_labels_keeps_the_names_of_as_many_classes() -> None:
    """A model without a head needs --num_labels, and its config.json may have the names."""
    config = NAMED | {"label2id": {"O": 0, "B": 1, "I": 2}, "hidden_size": 8}
    assert with_labels(config, 3) == config
    assert with_labels(config, 4) == {"num_labels": 4, "hidden_size": 8}
    assert with_labels({"hidden_size": 8}, 3) == {"num_labels": 3, "hidden_size": 8}


def test_what_a_tokenizer_and_a_model_must_have(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(task="token_classification", tokenizer="bytes", model="mine", seq_len=64)
    assert TASK.processor(request, {}).tag_classes == Classes(2, {})
    assert TASK.processor(request, NAMED).tag_classes == CLASSES
    with pytest.raises(ConfigError, match=r"model = mine: has 1 class, but .* Use --num_labels"):
        TASK.processor(request, {"num_labels": 1})
    tokenizer = wordpiece()
    monkeypatch.setattr(token_classification, "fitting_tokenizer", lambda *_: tokenizer)
    with pytest.raises(ConfigError, match=r"adds 2 special tokens .* Use --seq_len 3 or more"):
        TASK.processor(replace(request, seq_len=2), NAMED)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(ConfigError, match="must be a fast tokenizer"):
        TASK.processor(request, NAMED)


def test_a_model_that_looks_back_only_is_refused() -> None:
    assert TASK.check(tiny_config("bert", 264, "token_classification"), "auto", "mine") == ""
    llama = tiny_config("llama", 264, "token_classification")
    with pytest.raises(ConfigError, match="a llama tags each word without the words after it"):
        TASK.check(llama, "auto", "mine")


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta"])
def test_positions_from_0_are_those_that_the_model_itself_counts(kind: str) -> None:
    """RoBERTa's positions start after the padding index."""
    config = default_config(kind, "token_classification").to_dict()
    config |= {"num_hidden_layers": 1, "hidden_size": 24, "intermediate_size": 24}
    model = construct(config_of(config), "eager", "", TASK.spec.auto_class).eval()
    ids = torch.arange(5, 15).unsqueeze(0)
    with torch.no_grad():
        own = model(input_ids=ids).logits
        told = model(input_ids=ids, position_ids=torch.arange(10).unsqueeze(0)).logits
    assert own.shape == (1, 10, 2) and torch.equal(own, told)
