"""Pairs for DPO and reward models: published formats, losses, and unusable rows."""

import json
import math
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from chat_templates import TOOLS, published_tokenizer
from recipekit.architectures.families import default_config
from recipekit.data.batching import DataRank
from recipekit.data.content import is_held_out
from recipekit.data.held_out import eval_samples
from recipekit.data.pairs import PairProcessor, encode_pair, generate_pair, pair_keys
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import Request
from recipekit.data.samples import open_samples
from recipekit.model import probes
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.task import IGNORE
from recipekit.tasks import preference, reward
from recipekit.tasks.find import load_task, with_hyperparameters

TOKENIZER = byte_tokenizer()
END = "<|endoftext|>"
USER, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("user", "Hi?"), ("assistant", "Hello."), ("assistant", "Go away."))
)


def pairs(seq_len: int = 128, whole_rows: bool = False) -> PairProcessor:
    return PairProcessor(TOKENIZER, seq_len, whole_rows)


def read(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return (prompt, rest of the chosen answer, rest of the rejected answer) as text."""
    start, chosen, rejected = encode_pair(pairs(), row)
    assert chosen[:start] == rejected[:start]
    return (
        TOKENIZER.decode(chosen[:start]),
        TOKENIZER.decode(chosen[start:]),
        TOKENIZER.decode(rejected[start:]),
    )


# Formats
# --------------------------------------------------------------------------------------------------

CHAT = "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
AS_CHAT = (CHAT, "Hello.<|im_end|>\n", "Go away.<|im_end|>\n")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, ("2+2=", f"4{END}", f"5{END}")),
        ({"prompt": "2+2=", "chosen": f"4{END}", "rejected": ""}, ("2+2=", f"4{END}", END)),
        (
            {"chosen": "two and two is four", "rejected": "two and two is five"},
            ("two and two is f", f"our{END}", f"ive{END}"),
        ),
        (
            {"chosen": "it is four", "rejected": "it is nine"},
            ("it is", f" four{END}", f" nine{END}"),
        ),
        ({"chosen": "yes", "rejected": "yes, it is"}, ("yes", END, f", it is{END}")),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, AS_CHAT),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, AS_CHAT),
        ({"prompt": "Hi?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, AS_CHAT),
        ({"prompt": "Hi?", "chosen": [GOOD], "rejected": [BAD]}, AS_CHAT),
        # Values as in Parquet.
        (
            {
                "prompt": None,
                "chosen": [USER | {"name": None}, GOOD],
                "rejected": [USER, BAD | {"name": None}],
            },
            AS_CHAT,
        ),
    ],
    ids=[
        *(
            "text",
            "text with end tokens",
            "text without prompt",
            "a space belongs to the answer",
            "one begins the other",
            "chat",
        ),
        *(
            "chat without prompt",
            "chats that repeat the prompt",
            "answers as messages",
            "empty entries",
        ),
    ],
)
def test_the_prompt_and_both_answers_are_found(row, expected):
    assert read(row) == expected


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text"])
def test_the_template_gets_the_tools_of_a_row(tmp_path, kind):
    """Some rows have no tools.

    A table contains null entries for other rows' tools. `text` is JSON as a string.
    """
    tokenizer = published_tokenizer("Qwen2.5")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    tools = [TOOLS, [], [{"type": "function", "function": {"name": "g", "strict": True}}]]
    chats = [
        {"prompt": [USER | {"content": f"{number}?"}], "chosen": [GOOD], "rejected": [BAD]}
        for number in range(3)
    ]
    rows = [
        chat | {"tools": json.dumps(own) if kind == "text" else own}
        for chat, own in zip(chats, tools, strict=True)
    ]
    file = tmp_path / f"pairs.{'parquet' if kind == 'parquet' else 'jsonl'}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(without_empty_objects(rows)), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    batches = first_step(
        request_for(
            str(file),
            global_batch=3,
            micro_batch=3,
            seq_len=1024,
            tokenizer=str(tmp_path / "tokenizer"),
        )
    )
    found = sorted(
        tokenizer.decode(ids).rstrip(tokenizer.pad_token)
        for batch in batches
        for ids in batch["input_ids"][:, 0]
    )
    expected = [
        tokenizer.apply_chat_template(
            chat["prompt"] + [GOOD],
            tools=without_empty_objects(own) if kind == "parquet" else own or None,
            tokenize=False,
        )
        for chat, own in zip(chats, tools, strict=True)
    ]
    assert found == sorted(expected) and sum("Does f." in text for text in found) == 1


def without_empty_objects(value: Any) -> Any:
    """Remove objects without keys, because Parquet cannot store them."""
    if isinstance(value, dict):
        return {key: without_empty_objects(entry) for key, entry in value.items() if entry != {}}
    return [without_empty_objects(entry) for entry in value] if isinstance(value, list) else value


def test_the_date_of_a_template_is_the_date_of_the_first_start(tmp_path):
    tokenizer = published_tokenizer("Llama 3.2")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    file = tmp_path / "pairs.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": f"{number}?", "chosen": [GOOD], "rejected": [BAD]}) + "\n"
            for number in range(4)
        )
    )
    request = request_for(
        str(file), seq_len=512, tokenizer=str(tmp_path / "tokenizer"), day="2026-03-04"
    )
    assert all(
        "Today Date: 04 Mar 2026" in tokenizer.decode(ids)
        for batch in first_step(request)
        for ids in batch["input_ids"].flatten(0, 1)
    )


@pytest.mark.parametrize("name", ["chosen", "rejected"])
@pytest.mark.parametrize("more", [{"weight": 0}, {"train": False}, {"training": False}])
def test_an_answer_that_is_not_to_be_learned_is_refused(name, more):
    row = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    assert read(row | {"prompt": [USER | more]}) == AS_CHAT
    with pytest.raises(
        ValueError, match=f"its {name} answer has a message with weight 0 or train false"
    ):
        read(row | {name: [row[name][0] | more]})


def test_roles_that_the_template_knows_are_read():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'context' %}[{{ m.content }}]{% else %}{{ m.role"
        " }}:{{ m.content }};{% endif %}{% endfor %}"
    )
    row = {
        "prompt": [{"role": "context", "content": "C"}, USER],
        "chosen": [GOOD],
        "rejected": [BAD],
    }
    start, chosen, _ = encode_pair(PairProcessor(tokenizer, 64, False), row)
    assert tokenizer.decode(chosen) == "[C]user:Hi?;assistant:Hello.;" and start > 10
    with pytest.raises(ValueError, match="the role 'context'"):
        read(row)


@pytest.mark.parametrize("tools", ["[{", [3], "3"])
def test_tools_that_cannot_be_read_are_named(tools):
    with pytest.raises(ValueError, match="its tools "):
        encode_pair(
            pairs(), {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "tools": tools}
        )


def test_an_answer_begins_where_the_tokens_are_no_longer_those_of_the_prompt():
    """A tokenizer may merge the end of a prompt with the beginning of an answer.

    A merged token belongs to the answer, in both answers of a pair.
    """

    class Joining:
        eos_token_id, chat_template, num_embeddings = 0, None, 0x101

        def __len__(self) -> int:
            return self.num_embeddings

        def __call__(self, texts: list[str], **more: Any) -> dict[str, list[list[int]]]:
            assert more == {
                "verbose": False,
                "return_attention_mask": False,
                "add_special_tokens": True,
            }
            return {
                "input_ids": [
                    [ord(letter) for letter in text.replace("=4", "\u0100")] for text in texts
                ]
            }

    start, chosen, rejected = encode_pair(
        PairProcessor(Joining(), 9, False), {"prompt": "2=", "chosen": "4", "rejected": "5"}
    )
    assert (start, chosen, rejected) == (1, [ord("2"), 0x100, 0], [ord("2"), ord("="), ord("5"), 0])


GOOD_ROW = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
UNUSABLE = {
    "its chosen and rejected answers are identical": {"rejected": "4"},
    "its chosen must be text or a list of messages, not int '4'": {"chosen": 4},
    "its rejected must be text or a list of messages, not bool 'True'": {"rejected": True},
    "its two answers must both be text or both be lists of messages": {"chosen": [GOOD]},
    "its prompt is a list of messages, but its answers are text": {"prompt": [USER]},
    "its answers have no common prompt: their first messages already differ": {
        "prompt": None,
        "chosen": [GOOD],
        "rejected": [BAD],
    },
    "its answers have no common prompt: their first messages": {
        "prompt": [],
        "chosen": [GOOD],
        "rejected": [BAD],
    },
    **{
        f"a message of its {name} requires the strings 'role' and 'content', but this one"
        f" is {{'role': 'user'}}": (
            {
                "prompt": [USER],
                "chosen": [GOOD],
                "rejected": [BAD],
            }
            | {name: [USER, {"role": "user"}]}
        )
        for name in ("prompt", "rejected")
    },
    "a message of its chosen requires the strings 'role' and 'content', but this one is"
    " {'role': 'assistant'}": {
        "chosen": [{"role": "assistant"}],
        "rejected": [BAD],
    },
    "it has 130 tokens, more than seq_len = 128. Use --seq_len 130 or more": {
        "rejected": "5" * 125
    },
}


@pytest.mark.parametrize("told", UNUSABLE)
def test_a_row_that_cannot_be_used_is_named(tmp_path, told):
    """With `bad_rows="skip"`, the row is skipped, and the other rows are trained on."""
    rows = [GOOD_ROW | {"prompt": f"{number}+2="} for number in range(6)]
    rows[3] |= UNUSABLE[told]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = request_for(str(file), global_batch=6, micro_batch=2)
    with pytest.raises(ConfigError) as refused:
        first_step(request)
    assert f"{file}, row 4: cannot be used: {told}" in str(
        refused.value
    ) and "--bad_rows skip" in str(refused.value)
    batches = first_step(replace(request, bad_rows="skip"))
    assert sum(int(preference.count(batch).sum()) for batch in batches) == 5


def test_messages_without_a_chat_template_are_refused():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(
        ValueError, match="it contains messages, but the tokenizer has no chat template"
    ):
        encode_pair(
            PairProcessor(tokenizer, 128, False),
            {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        )


def request_for(dataset: str, task: str = "preference", **fields: Any) -> Request:
    return Request(
        **(
            {
                "dataset": dataset,
                "task": task,
                "tokenizer": "bytes",
                "seq_len": 128,
                "micro_batch": 2,
                "global_batch": 4,
            }
            | fields
        )
    )


def first_step(request: Request) -> list[dict[str, torch.Tensor]]:
    task = load_task(request.task)
    assert task.samples is not None
    stream = open_samples(request, task.processor(request, {}), task.samples, rank=DataRank(1, 0))
    try:
        return next(stream)[0]
    finally:
        stream.close()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_missing_column_is_named_with_the_flag_and_the_way_without_a_prompt(tmp_path, kind):
    rows, file = (
        [
            {
                "chosen": [USER | {"content": str(number)}, GOOD],
                "rejected": [USER | {"content": str(number)}, BAD],
            }
            for number in range(8)
        ],
        tmp_path / f"pairs.{kind}",
    )
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    with pytest.raises(
        ConfigError,
        match=(
            r"has no column 'prompt', only 'chosen', 'rejected'\. Name the column with"
            r" --prompt_field, or --prompt_field '' if"
        ),
    ):
        first_step(request_for(str(file)))
    with pytest.raises(
        ConfigError,
        match=r"has no column 'worse', only .*\. Name the column with --rejected_field\. If only",
    ):
        first_step(request_for(str(file), prompt_field="", rejected_field="worse"))
    batches = first_step(request_for(str(file), prompt_field=""))
    assert [int(preference.count(batch).sum()) for batch in batches] == [2, 2]


# Micro-batches
# --------------------------------------------------------------------------------------------------


def batch_of(rows: list[Any], whole_rows: bool = False) -> dict[str, torch.Tensor]:
    return preference.collate(pairs(whole_rows=whole_rows), rows, None)


def test_a_micro_batch_has_both_answers_of_a_pair():
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "five"}
    batch = batch_of([row, None])
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        **dict.fromkeys(("input_ids", "labels", "position_ids"), (2, 2, 64)),
        "reference": (2, 2),
    }
    for answer, text in enumerate(("4", "five")):
        ids, labels = batch["input_ids"][0, answer], batch["labels"][0, answer]
        tokens = TOKENIZER(f"2+2={text}{END}")["input_ids"]
        assert ids.tolist() == tokens + [TOKENIZER.pad_token_id] * (64 - len(tokens))
        assert labels.tolist() == [IGNORE] * 3 + tokens[4:] + [IGNORE] * (64 - len(tokens) + 1)
    assert (
        preference.count(batch).tolist() == [1, 0]
        and batch["reference"][1].tolist() == [0, 0]
        and batch["reference"][0].isnan().all()
    )
    assert batch_of([row], whole_rows=True)["input_ids"].shape == (
        1,
        2,
        128,
    ), "the stages of a pipeline want equal shapes"
    judged = reward.collate(pairs(), [row, None], None)
    assert judged.keys() == {"input_ids", "position_ids", "labels"}
    assert judged["labels"].tolist() == [0, IGNORE] and torch.equal(
        judged["input_ids"], batch["input_ids"]
    )


def test_the_key_of_a_pair_is_that_of_its_tokens_alone():
    """Padding and other rows do not matter. Different or swapped answers have a different key."""
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "five"}
    [key] = pair_keys(batch_of([row]))
    assert pair_keys(batch_of([row], whole_rows=True)).tolist() == [key]
    assert pair_keys(batch_of([None, row | {"chosen": "four" * 20}, row])).tolist()[::2] == [0, key]
    others = [
        row | {"chosen": "5"},
        row | {"rejected": "4", "chosen": "five"},
        row | {"prompt": "2+1="},
        {"prompt": "2+2", "chosen": "=4", "rejected": "=five"},
    ]
    assert len({key, *pair_keys(batch_of(others)).tolist()}) == 5


def test_what_the_start_said_comes_with_the_pair():
    row, own = {"prompt": "2+2=", "chosen": "4", "rejected": "five"}, pairs()
    keys = pair_keys(preference.collate(own, [row, GOOD_ROW], None))
    values = torch.tensor([[-1.5, -20.25], [-3.0, -4.0]]).numpy()
    own.references.add(keys, values)
    own.references.add(keys[:1], values[1:])  # existing values stay
    own.references.complete = True
    assert preference.collate(own, [GOOD_ROW, None, row], None)["reference"].tolist() == [
        [-3.0, -4.0],
        [0.0, 0.0],
        [-1.5, -20.25],
    ]
    with pytest.raises(RuntimeError, match="no reference log-probability for a training pair"):
        preference.collate(own, [GOOD_ROW | {"prompt": "3+1="}], None)


# Losses
# --------------------------------------------------------------------------------------------------


def test_the_loss_of_dpo_is_its_formula():
    batch = batch_of([GOOD_ROW, None, {"prompt": "2+2=", "chosen": "four", "rejected": "no"}])
    batch["reference"] = torch.tensor([[-12.0, -8.0], [0.0, 0.0], [-30.0, -11.0]])
    logits = torch.randn(
        6, 64, 264, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).float()
    chances, expected, said = logits.double().log_softmax(-1), [], []
    for pair in (0, 2):
        rewards = []
        for answer in (0, 1):
            labels = batch["labels"][pair, answer]
            own = sum(
                float(chances[2 * pair + answer, place, label])
                for place, label in enumerate(labels.tolist())
                if label != IGNORE
            )
            rewards.append(0.3 * (own - float(batch["reference"][pair, answer])))
        said.append(rewards)
        expected.append(math.log1p(math.exp(rewards[1] - rewards[0])))
    task = with_hyperparameters(preference.TASK, replace(Recipe(), beta=0.3))
    rows = task.loss(logits, batch, True)
    assert (
        rows.tolist() == pytest.approx([expected[0], 0.0, expected[1]], rel=1e-5)
        and rows.dtype == torch.float32
    )
    assert task.loss(logits, batch, False).item() == pytest.approx(sum(expected), rel=1e-5)
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE, reduction="none"
    ).view(6, 64)
    assert task.loss(losses, batch, True).tolist() == pytest.approx(rows.tolist(), rel=1e-6), (
        "of a head that computes the losses itself"
    )
    means = [
        sum(own[0] > own[1] for own in said),
        *(
            sum(each(own) for own in said)
            for each in (lambda own: own[0] - own[1], lambda own: own[0], lambda own: own[1])
        ),
    ]
    assert task.measure(logits, batch).tolist() == pytest.approx(means, rel=1e-5)
    assert (
        preference.TASK.loss(logits, batch, False).item() != task.loss(logits, batch, False).item()
    ), "without a number it is the recipe's default"


def test_a_filling_row_has_no_gradient():
    batch = batch_of([None, GOOD_ROW])
    batch["reference"] = torch.zeros(2, 2)
    logits = torch.randn(4, 64, 264, requires_grad=True)
    preference.TASK.loss(logits, batch, False).backward()
    assert logits.grad is not None and not logits.grad[:2].any() and logits.grad[2:].any()


def test_the_loss_of_a_reward_model_is_that_of_bradley_and_terry():
    batch = reward.collate(pairs(), [GOOD_ROW, None, GOOD_ROW], None)
    output = torch.tensor([[1.5], [0.25], [9.0], [-9.0], [-1.0], [2.0]], requires_grad=True)
    rows = reward.TASK.loss(output, batch, True)
    assert rows.tolist() == pytest.approx(
        [math.log1p(math.exp(-1.25)), 0.0, math.log1p(math.exp(3.0))], rel=1e-6
    )
    assert reward.TASK.loss(output, batch, False).item() == pytest.approx(sum(rows.tolist()))
    assert reward.TASK.measure(output, batch).tolist() == [1.0, 1.25 - 3.0] and reward.TASK.count(
        batch
    ).tolist() == [1, 0, 1]


# Models
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mistral"])
def test_a_decoder_ignores_the_padding_behind_an_answer(kind):
    assert (
        reward.check_reward_model(
            default_config(kind, "reward").to_dict() | {"model_type": kind}, "sdpa", "m"
        )
        == ""
    )


def test_a_model_that_reads_padding_is_refused(monkeypatch):
    """Bidirectional models are rejected by type. Here the check runs a small copy."""
    import transformers

    config = default_config("bert", "reward").to_dict() | {
        "model_type": "bert",
        "is_decoder": False,
    }
    monkeypatch.setattr(
        probes,
        "small_copy",
        lambda *given: transformers.BertForSequenceClassification(
            transformers.BertConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                vocab_size=264,
                num_labels=1,
            )
        ),
    )
    with pytest.raises(
        ConfigError, match="the score of a bert for an answer changes with the padding after it"
    ):
        reward.check_reward_model(config, "sdpa", "m")


def test_a_decoder_that_is_read_at_its_first_token_is_refused():
    """As a decoder, BERT pools the first position, which sees only itself.

    Every answer would therefore get the same score.
    """
    config = default_config("bert", "reward").to_dict() | {"model_type": "bert", "is_decoder": True}
    with pytest.raises(
        ConfigError, match="the score of a bert for an answer does not depend on its last token"
    ):
        reward.check_reward_model(config, "sdpa", "m")


def test_the_padding_is_named_in_the_config_also_in_that_of_the_language_model():
    assert reward.with_pad_token({"a": 1, "text_config": {"b": 2}}, pairs()) == {
        "a": 1,
        "pad_token_id": TOKENIZER.pad_token_id,
        "text_config": {"b": 2, "pad_token_id": TOKENIZER.pad_token_id},
    }


# The built-in pairs
# --------------------------------------------------------------------------------------------------


def test_drawn_pairs_are_right_and_wrong_answers():
    rows = [generate_pair(number) for number in range(500)]
    assert rows == [generate_pair(number) for number in range(500)]
    for row in rows:
        one, other = (int(word) for word in row["prompt"].removesuffix("? ").split(" > "))
        assert (row["chosen"], row["rejected"]) == (("yes", "no") if one > other else ("no", "yes"))
    assert (
        len({row["prompt"] for row in rows}) > 450
        and 0.4 < sum(row["chosen"] == "yes" for row in rows) / 500 < 0.6
    )


def test_no_prompt_is_both_trained_on_and_held_out():
    request = request_for("builtin", eval_rows=64)
    task = load_task("preference")
    batches = eval_samples(request, task.processor(request, {}), task.samples, rank=DataRank(1, 0))
    told = {
        TOKENIZER.decode(ids[: int((labels != IGNORE).nonzero()[0]) + 1])
        for batch in batches
        for ids, labels in zip(batch["input_ids"][:, 0], batch["labels"][:, 0], strict=True)
    }
    assert len(told) > 40 and all(is_held_out({"prompt": prompt}) for prompt in told)
