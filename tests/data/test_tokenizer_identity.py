"""A tokenizer's hash, and tokenizers with unusual alphabets in every task."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alphabets import ALPHABETS
from pool import ROOT, import_path
from recipekit.data.batching import DataRank
from recipekit.data.processors import byte_tokenizer, edges, encode
from recipekit.data.request import Request, Sizes
from recipekit.data.samples import open_samples
from recipekit.data.stream import open_stream
from recipekit.data.stream_state import StreamMismatch
from recipekit.data.tokenizer_identity import hash_tokenizer, legacy_tokenizer_hash
from recipekit.spec.errors import ConfigError
from recipekit.spec.task import IGNORE
from recipekit.spec.task_specs import TASKS
from recipekit.tasks.find import load_task
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

SMALL = Sizes(block_rows=4, block_tokens=(64, 512))
OF_TEXT = ("pretrain", "sft", "masked_lm", "preference", "reward")


def write(file: Path, task: str, row: str, num_rows: int = 60) -> Path:
    answer = {"role": "assistant", "content": row}
    rows = {
        "sft": {"messages": [{"role": "user", "content": row}, answer]},
        "preference": {"prompt": row, "chosen": row, "rejected": row * 2},
    }
    rows["reward"] = rows["preference"]
    line = json.dumps(rows.get(task, {"text": row})) + "\n"
    file.write_text(line * num_rows)
    return file


def first_step(
    folder: Path,
    task: str,
    tokenizer: Any,
    file: Path,
    state: Any = None,
    embeddings: int = 0,
    **changes: Any,
) -> tuple[dict[str, Any], Any]:
    """Return the tensors of a run's first micro-batch, and its state after that step."""
    tokenizer.save_pretrained(folder / "tokenizer")
    request = Request(
        **{
            "task": task,
            "tokenizer": str(folder / "tokenizer"),
            "dataset": str(file),
            "seq_len": 40,
            "sizes": SMALL,
            "micro_batch": 2,
            "global_batch": 2,
            "token_cache": str(folder / "kept"),
            **changes,
        }
    )
    of_task = load_task(task)
    processor = of_task.processor(request, {"vocab_size": embeddings or len(tokenizer)})
    if of_task.samples:
        stream = open_samples(request, processor, of_task.samples, rank=DataRank(1, 0), state=state)
    else:
        stream = open_stream(request, processor, rank=DataRank(1, 0), state=state)
    with contextlib.closing(stream):
        (batch,), state = next(stream)
        return {name: tensor.clone() for name, tensor in batch.items()}, state


@pytest.mark.parametrize("task", OF_TEXT)
@pytest.mark.parametrize("name", ALPHABETS)
def test_an_alphabet_without_the_letter_a_trains(tmp_path: Path, name: str, task: str) -> None:
    alphabet = ALPHABETS[name]()
    batch, _ = first_step(
        tmp_path, task, alphabet.tokenizer, write(tmp_path / "rows.jsonl", task, alphabet.row)
    )
    ids = batch["input_ids"].flatten(0, -2)[0]
    labels = batch["labels"].flatten(0, -2)[0] if task != "reward" else ids
    own = alphabet.tokenizer.convert_tokens_to_ids(alphabet.tokens)
    begin, end = alphabet.tokenizer.bos_token_id, alphabet.tokenizer.eos_token_id
    if task == "pretrain":
        assert ids[: len(own) + 3].tolist() == [begin, *own, end, begin]
    elif task == "masked_lm":
        assert (
            (labels[: len(own) + 2] != IGNORE).sum() < len(own)
            and ids[0] == begin
            and ids[len(own) + 1] == end
        )
        assert set(labels[labels != IGNORE].tolist()) <= set(own)
    elif task == "sft":
        assert labels[labels != IGNORE][: len(own) + 1].tolist() == [*own, end]
    else:
        assert ids[: 2 * len(own) + 2].tolist() == [begin, *own, *own, end]


@pytest.mark.parametrize("name", ALPHABETS)
def test_edges_are_found_with_a_token_of_the_vocabulary(name: str) -> None:
    tokenizer = ALPHABETS[name]().tokenizer
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert edges(tokenizer) == ([begin], [end])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[BOS] [BOS] $A", special_tokens=[("[BOS]", begin)]
    )
    assert edges(tokenizer) == ([begin, begin], [])


def test_a_vocabulary_of_special_tokens_alone_has_no_edges_by_error() -> None:
    backend = Tokenizer(models.WordLevel({"[EOS]": 0}, unk_token="[UNK]"))
    assert edges(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[EOS]")) == ([], [])


@pytest.mark.parametrize("name", ["molecules", "music", "proteins"])
def test_a_text_without_a_token_is_refused_with_its_row(tmp_path: Path, name: str) -> None:
    """Such models have no token for unknown text, and the library raises a plain Exception."""
    alphabet = ALPHABETS[name]()
    assert "input_ids" in encode(alphabet.tokenizer, [alphabet.row])
    for task in OF_TEXT:
        file = write(tmp_path / f"{task}.jsonl", task, alphabet.row)
        lines = file.read_text().splitlines()
        lines[6] = lines[6].replace(json.dumps(alphabet.row)[1:-1], "xyz")
        file.write_text("\n".join(lines) + "\n")
        changes = {"global_batch": 60, "micro_batch": 60} if TASKS[task].pairs else {}
        with pytest.raises(
            ConfigError,
            match=(
                r"row 7.*the tokenizer cannot encode part of this text and has no token for unknown"
                r" text"
            ),
        ) as refused:
            first_step(tmp_path, task, alphabet.tokenizer, file, **changes)
        assert len(str(refused.value).splitlines()) == 1
        first_step(tmp_path, task, alphabet.tokenizer, file, bad_rows="skip", **changes)


# The hash
# --------------------------------------------------------------------------------------------------


def renamed_token(tokenizer: Any) -> None:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    next(token for token in content["added_tokens"] if token["content"] == "<|note|>")[
        "content"
    ] = "<|remark|>"
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))


def swapped_tokens(tokenizer: Any) -> None:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary["x"], vocabulary["y"] = vocabulary["y"], vocabulary["x"]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))


def another_backend(name: str, value: Any) -> Callable[[Any], None]:
    return lambda tokenizer: setattr(tokenizer.backend_tokenizer, name, value)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an added token is renamed": renamed_token,
    "a token is added": lambda tokenizer: tokenizer.add_tokens(["<|more|>"]),
    "an added token takes the spaces before it": lambda tokenizer: tokenizer.add_tokens(
        [AddedToken("<|note|>", lstrip=True)]
    ),
    "two tokens of the vocabulary are swapped": swapped_tokens,
    "text is normalised": another_backend("normalizer", normalizers.Lowercase()),
    "words are split": another_backend(
        "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    ),
    "another token is put around a text": another_backend(
        "post_processor",
        processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 257)]),
    ),
    "another end token": lambda tokenizer: setattr(tokenizer, "eos_token", "<|im_end|>"),
    "another begin token": lambda tokenizer: setattr(tokenizer, "bos_token", "<|im_start|>"),
    "another padding token": lambda tokenizer: setattr(tokenizer, "pad_token", "<|im_start|>"),
    "special tokens are split": lambda tokenizer: setattr(tokenizer, "split_special_tokens", True),
}


def plain_tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|note|>"])
    return tokenizer


@pytest.mark.parametrize("change", CHANGES)
def test_a_tokenizer_is_another_one_by_each_part(change: str) -> None:
    first, other = plain_tokenizer(), plain_tokenizer()
    CHANGES[change](other)
    for task in OF_TEXT:
        assert (
            hash_tokenizer(first, task)
            == hash_tokenizer(plain_tokenizer(), task)
            != hash_tokenizer(other, task)
        )


def test_parts_of_some_tasks_count_for_these() -> None:
    """Some parts of a tokenizer change the hash for only some tasks.

    - The chat template matters for tasks that render chats.
    - The mask token and the set of special tokens matter for masked_lm.
    """
    first, template, mask = plain_tokenizer(), plain_tokenizer(), plain_tokenizer()
    template.chat_template = (template.chat_template or "") + " "
    mask.mask_token = "<|reserved_0|>"
    differ = {
        task: [
            hash_tokenizer(first, task) != hash_tokenizer(other, task) for other in (template, mask)
        ]
        for task in OF_TEXT
    }
    assert differ == {
        "pretrain": [False, False],
        "sft": [True, True],
        "masked_lm": [False, True],
        "preference": [True, True],
        "reward": [True, True],
    }
    special = plain_tokenizer()
    special.add_special_tokens({"extra_special_tokens": ["<|note|>"]})
    assert hash_tokenizer(special, "masked_lm") != hash_tokenizer(first, "masked_lm")


def test_a_resume_of_masked_tokens_needs_as_many_embeddings(tmp_path: Path) -> None:
    """A masked token may be replaced by any token that has an embedding."""
    tokenizer, file = (
        tokenizers_of_one_size()[0],
        write(tmp_path / "rows.jsonl", "masked_lm", "x y"),
    )
    _, state = first_step(tmp_path, "masked_lm", tokenizer, file)
    with pytest.raises(StreamMismatch, match="vocabulary = 264: the saved data stream has 265"):
        first_step(tmp_path, "masked_lm", tokenizer, file, state, embeddings=264)


def test_what_changes_no_token_is_not_in_the_hash(tmp_path: Path) -> None:
    first = plain_tokenizer()
    expected = {task: hash_tokenizer(first, task) for task in OF_TEXT}
    first(["a", "longer"], padding=True, truncation=True, max_length=3)
    first.padding_side, first.model_max_length = "left", 17
    folders = tmp_path / "one", tmp_path / "elsewhere" / "ü"
    for folder in folders:
        first.save_pretrained(folder)
    for file in folders[1].glob("*.json"):  # keys in another order
        content = json.loads(file.read_text())
        if "model" in content:
            content["model"]["vocab"] = dict(reversed(content["model"]["vocab"].items()))
        file.write_text(json.dumps(dict(reversed(content.items())), indent=7))
    program = (
        "import sys; from recipekit.data.tokenizer_identity import hash_tokenizer; from"
        " transformers import AutoTokenizer\n"
    )
    program += (
        "print(*(hash_tokenizer(AutoTokenizer.from_pretrained(sys.argv[1]), task) for task in"
        f" {OF_TEXT}))"
    )
    there = subprocess.run(
        [sys.executable, "-c", program, folders[0]],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": import_path(ROOT / "recipes"), "PYTHONHASHSEED": "7"},
    )
    assert there.stdout.split() == list(expected.values())
    for tokenizer in (first, *map(AutoTokenizer.from_pretrained, folders)):
        assert {task: hash_tokenizer(tokenizer, task) for task in OF_TEXT} == expected


class Letters(PreTrainedTokenizer):
    """A tokenizer written in Python, with one token for each letter and one option."""

    vocab_files_names = {"vocab_file": "letters.txt"}  # noqa: RUF012

    def __init__(self, vocab_file: str, upper: bool = False, **more: Any) -> None:
        self.letters, self.upper = Path(vocab_file).read_text().split(), upper
        super().__init__(upper=upper, vocab_file=vocab_file, **more)

    @property
    def vocab_size(self) -> int:
        return len(self.letters)

    def get_vocab(self) -> dict[str, int]:
        return {
            letter: number for number, letter in enumerate(self.letters)
        } | self.added_tokens_encoder

    def _tokenize(self, text: str, **more: Any) -> list[str]:
        return list(text.upper() if self.upper else text)

    def _convert_token_to_id(self, token: str) -> int | None:
        return self.letters.index(token) if token in self.letters else None

    def _convert_id_to_token(self, number: int) -> str:
        return self.letters[number]

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str]:
        file = Path(save_directory, "letters.txt")
        file.write_text(" ".join(self.letters))
        return (str(file),)


def test_a_tokenizer_in_python_is_known_by_its_vocabulary_and_options(tmp_path: Path) -> None:
    def letters(folder: str, content: str, **more: Any) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "letters.txt").write_text(content)
        return hash_tokenizer(
            Letters(str(tmp_path / folder / "letters.txt"), eos_token="E", **more), "pretrain"
        )

    first = letters("one", "A C G T E")
    assert (
        letters("two", "A C G T E")
        == letters("one", "A C G T E", model_max_length=9, padding_side="left")
        == first
    )
    others = [
        letters("one", "C A G T E"),
        letters("one", "A C G T E", upper=True),
        letters("one", "A C G T N E"),
        letters("one", "A C G T E", bos_token="A"),
    ]
    assert len({first, *others}) == 5
    assert edges(Letters(str(tmp_path / "two" / "letters.txt"), eos_token="E")) == ([], [])


# Cached tokens and resumes
# ------------------------------------------------------------------------------------------


def tokenizers_of_one_size() -> list[Any]:
    """Return tokenizers with equal lengths and special ids and, for most texts, equal tokens."""
    first, second, third = plain_tokenizer(), plain_tokenizer(), plain_tokenizer()
    renamed_token(second)
    swapped_tokens(third)
    for tokenizer in (first, second, third):
        tokenizer.mask_token = "<|reserved_0|>"
    return [first, second, third]


@pytest.mark.parametrize("task", OF_TEXT)
def test_tokens_of_another_tokenizer_are_neither_read_nor_resumed(
    tmp_path: Path, task: str
) -> None:
    file = write(tmp_path / "rows.jsonl", task, "x <|note|> y <|remark|> z")
    seen, states = [], []
    for number, tokenizer in enumerate(tokenizers_of_one_size()):
        batch, state = first_step(
            tmp_path / str(number),
            task,
            tokenizer,
            file,
            seq_len=120,
            token_cache=str(tmp_path / "kept"),
        )
        alone, _ = first_step(
            tmp_path / str(number), task, tokenizer, file, seq_len=120, token_cache="off"
        )
        assert (batch["input_ids"] == alone["input_ids"]).all()
        seen.append(batch["input_ids"].tolist())
        states.append(state)
    assert seen[0] != seen[1] and seen[0] != seen[2] and seen[1] != seen[2]
    first, second, _ = tokenizers_of_one_size()
    with pytest.raises(
        StreamMismatch, match=r"^--tokenizer: must match the tokenizer of the saved run"
    ) as refused:
        first_step(tmp_path / "resumed", task, second, file, states[0], seq_len=120)
    assert len(refused.value.problems) == 1
    first_step(tmp_path / "resumed", task, first, file, states[0], seq_len=120)


@pytest.mark.parametrize("task", OF_TEXT)
def test_a_run_of_an_older_version_is_resumed_with_the_check_that_it_recorded(
    tmp_path: Path, task: str
) -> None:
    file, tokenizer = write(tmp_path / "rows.jsonl", task, "x y"), plain_tokenizer()
    if task == "masked_lm":
        tokenizer.mask_token = "<|reserved_0|>"
    changes: dict[str, Any] = {"seq_len": 96}
    _, state = first_step(tmp_path, task, tokenizer, file, **changes)
    recorded = (
        str(tmp_path / "tokenizer") if TASKS[task].pairs else legacy_tokenizer_hash(tokenizer, task)
    )
    older = state | {"identity": state["identity"] | {"tokenizer": recorded}}
    _, after = first_step(tmp_path, task, tokenizer, file, older, **changes)
    assert after["identity"]["tokenizer"] == hash_tokenizer(tokenizer, task)
    wrong = state | {"identity": state["identity"] | {"tokenizer": "0123456789abcdef"}}
    with pytest.raises(StreamMismatch, match="must match the tokenizer of the saved run"):
        first_step(tmp_path, task, tokenizer, file, wrong, **changes)


def test_a_recorded_sample_is_what_older_versions_hashed() -> None:
    """The values come from commit 2fdcf48."""
    assert [legacy_tokenizer_hash(byte_tokenizer(), task) for task in ("pretrain", "sft")] == [
        "8f3131955b8497d9",
        "fbde7f4789644ca5",
    ]
    assert legacy_tokenizer_hash(byte_tokenizer(True), "masked_lm") == "5486b70644199e3c"
