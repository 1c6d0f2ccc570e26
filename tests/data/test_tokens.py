"""Tokenizers, the labels of documents, and the positions of answers in chats."""

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import free_port
from recipekit.architectures.shrink import BYTE_VOCAB
from recipekit.data.chat_spans import ChatTemplate
from recipekit.data.encode import encode_chats, encode_texts
from recipekit.data.processors import byte_tokenizer, check_tokenizer, load_tokenizer
from recipekit.spec.errors import ConfigError
from recipekit.spec.task import IGNORE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

BYTES = byte_tokenizer()


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_bytes_are_lossless(text):
    ids = BYTES(text)["input_ids"]
    assert BYTES.decode(ids) == text
    assert len(ids) == len(text.encode()) or "<|" in text


def test_byte_vocabulary():
    assert len(BYTES) == BYTE_VOCAB
    every = BYTES(bytes(range(256)).decode("latin-1"))["input_ids"]
    assert (
        max(every) < 256 and len({BYTES.eos_token_id, BYTES.bos_token_id, BYTES.pad_token_id}) == 3
    )
    assert len(BYTES("<|im_start|>user<|im_end|>")["input_ids"]) == 6


def test_byte_tokenizer_is_saved_and_loaded(tmp_path):
    BYTES.save_pretrained(tmp_path)
    for again in (
        AutoTokenizer.from_pretrained(tmp_path),
        load_tokenizer(str(tmp_path)),
        load_tokenizer("x", str(tmp_path)),
    ):
        text = "naïve <|im_end|>\n  \t\0 日本 " + '" . , '
        assert (
            again(text)["input_ids"] == BYTES(text)["input_ids"]
            and again.decode(again(text)["input_ids"]) == text
        )
        assert (len(again), again.eos_token_id, again.chat_template) == (
            len(BYTES),
            BYTES.eos_token_id,
            BYTES.chat_template,
        )


def test_bytes_need_no_model():
    assert len(load_tokenizer("some/model", "bytes")) == BYTE_VOCAB


def test_tokenizer_inside_a_gguf_file(tmp_path):
    import gguf

    tokens = [
        *json.loads(BYTES.backend_tokenizer.to_str())["model"]["vocab"],
        "th",
        "<|endoftext|>",
    ]
    writer = gguf.GGUFWriter(str(tmp_path / "model.Q4_1.gguf"), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["t h"])
    writer.add_token_types([1] * 257 + [3])
    writer.add_eos_token_id(257)
    writer.add_bos_token_id(257)
    for add in (
        writer.add_block_count,
        writer.add_context_length,
        writer.add_embedding_length,
        writer.add_feed_forward_length,
        writer.add_head_count,
    ):
        add(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.convert_ids_to_tokens(
        tokenizer("this", add_special_tokens=False)["input_ids"]
    ) == ["th", "i", "s"]


@pytest.mark.parametrize(
    "model, tokenizer, says",
    [
        (
            "meta-llama/Llama-3.2-1B",
            "",
            [
                "--model meta-llama/Llama-3.2-1B",
                "https://huggingface.co/meta-llama/Llama-3.2-1B",
                "hf auth login",
            ],
        ),
        ("x", "/no/such/folder", ["--tokenizer /no/such/folder", "the folder does not exist"]),
        ("x", "./no_such", ["--tokenizer ./no_such", "the folder does not exist"]),
        ("{folder}/empty", "", ["--model", "contains no tokenizer"]),
        ("{folder}/broken", "", ["broken/tokenizer.json: is not JSON"]),
    ],
)
def test_missing_tokenizer_is_refused(tmp_path, model, tokenizer, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError) as refused:
        load_tokenizer(model.format(folder=tmp_path), tokenizer)
    assert len(refused.value.problems) == 1 and all(part in str(refused.value) for part in says), (
        str(refused.value)
    )


class _Hub(BaseHTTPRequestHandler):
    """A server that answers as the hub does for a gated repository and for an unknown one."""

    def do_GET(self):
        gated = "gated" in self.path
        self.send_response(401)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header(
            "X-Error-Message", "Access to model is restricted." if gated else "Repository not found"
        )
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def test_gated_and_unknown_repositories_are_refused():
    server = HTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    program = """
from recipekit.spec.errors import ConfigError
from recipekit.data.processors import load_tokenizer
from recipekit.data.request import Request
from recipekit.data.stream import open_corpus
from recipekit.data.processors import byte_tokenizer
for call in (lambda: load_tokenizer("org/gated"), lambda: load_tokenizer("org/unknown"),
             lambda: open_corpus(Request(dataset="org/gated"), byte_tokenizer()),
             lambda: open_corpus(Request(dataset="org/unknown"), byte_tokenizer())):
    try:
        call()
    except ConfigError as refusal:
        print(refusal)
"""
    more = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | more,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    server.shutdown()
    server.server_close()
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stdout + done.stderr
    for line, name in zip(
        lines,
        ("org/gated", "org/unknown", "datasets/org/gated", "datasets/org/unknown"),
        strict=True,
    ):
        assert f"https://huggingface.co/{name}" in line and "hf auth login" in line
        assert ("is gated" in line) == name.endswith("gated"), line


def test_a_hub_that_is_away_is_refused_soon_and_once():
    """The hub's client would retry five times for each file and report each retry.

    The cache must be used instead.
    """
    program = """
import time
from recipekit.spec.recipe import Recipe
from recipekit.spec.errors import ConfigError
from recipekit.data.processors import load_tokenizer
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import Request
from recipekit.data.stream import open_corpus
from recipekit.model.weights import weights_folder
for call in (lambda: load_tokenizer("org/name"), lambda: weights_folder("org/name"),
             lambda: open_corpus(Request(dataset="org/name"), byte_tokenizer())):
    begun = time.monotonic()
    try:
        call()
    except ConfigError as refusal:
        print(refusal)
    assert time.monotonic() - begun < 60
"""
    more = {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | more,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all(
        "org/name" in line and re.search("not in the (local )?cache", line) for line in lines
    ), done.stdout
    assert "Retrying" not in done.stderr, done.stderr


def test_retries_of_the_hubs_client_are_one_short_line_each():
    """If a server does not answer, the client retries once, a second later."""
    program = """
import logging
from huggingface_hub.utils import http_backoff
from recipekit.spec.hub import shorten_retries
shorten_retries()
try:
    http_backoff("GET", "http://127.0.0.1:1/api", max_retries=1)
except Exception:
    pass
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (line,) = done.stderr.splitlines()
    assert (
        "the hub does not answer ([Errno 111] Connection refused). huggingface_hub asks again in 1"
        " s, 1 of 1" in line
    )


# Documents
# --------------------------------------------------------------------------------------------------


def merging_tokenizer(special: list[str], eos: str, bos: str = "") -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with real merges.

    With `bos`, it prepends that token, as Llama's tokenizers do.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        [Path(json.__file__).read_text(), Path(os.__file__).read_text()], trainer
    )
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, **({"bos_token": bos} if bos else {})
    )


def test_text_becomes_tokens_and_an_end():
    ((ids, labels),) = encode_texts(BYTES, ["héy"])
    assert ids.tolist() == [*BYTES("héy")["input_ids"], BYTES.eos_token_id]
    assert labels.tolist() == [*ids[1:], IGNORE]


def test_begin_token_if_the_tokenizer_adds_one():
    tokenizer = merging_tokenizer(["<s>", "</s>"], "</s>", "<s>")
    ((ids, labels),) = encode_texts(tokenizer, ["for key in self:"])
    assert tokenizer.decode(ids) == "<s>for key in self:</s>" and len(ids) < 12
    assert labels.tolist() == [*ids[1:], IGNORE]


def test_document_without_target_is_empty():
    assert [len(ids) for ids, _ in encode_texts(BYTES, ["", "a"])] == [0, 2]


# Chats
# --------------------------------------------------------------------------------------------------

CHATML = BYTES.chat_template
LLAMA3 = """\
{{- bos_token }}{%- for message in messages %}\
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | \
trim + '<|eot_id|>' }}\
{%- endfor %}{%- if add_generation_prompt %}\
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
THINKING = """\
{%- set last = namespace(query=0) %}\
{%- for message in messages %}{%- if message.role == 'user' %}{%- set last.query = loop.index0 %}\
{%- endif %}{%- endfor %}\
{%- for message in messages %}\
{%- if message.role == 'assistant' %}\
{%- set thought = '' %}{%- set content = message.content %}\
{%- if '</think>' in content %}\
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}\
{%- endif %}\
{%- if loop.index0 > last.query %}\
{{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + \
content.lstrip('\\n') }}\
{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}{{- '<|im_end|>\\n' }}\
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\
{%- endif %}\
{%- endfor %}"""
INSTRUCT = """\
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] + '\\n\\n' %}\
{%- set rest = messages[1:] %}\
{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}{{- bos_token }}\
{%- for message in rest %}\
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{- raise_exception('roles must alternate') }}{%- endif %}\
{%- if message['role'] == 'user' %}\
{{- '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}\
{%- else %}{{- ' ' + message['content'].strip() + ' ' + eos_token }}{%- endif %}\
{%- endfor %}"""
PLAIN = (
    "{% for message in messages %}### {{ message['role'] }}:\n{{ message['content'] }}\n\n{%"
    " endfor %}"
)

SYSTEM, ASK = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}
CHAT = [
    SYSTEM,
    ASK,
    {"role": "assistant", "content": "  Because.\n"},
    ASK,
    {"role": "assistant", "content": "Why? Be brief.assistant"},
]
THOUGHTS = [
    ASK,
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSo."},
    ASK,
    {"role": "assistant", "content": "<think>\nAh.\n</think>\n\nYes."},
]
TOKENIZERS = {
    "bytes": BYTES,
    "chatml": merging_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "llama3": merging_tokenizer(
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|eot_id|>",
        "<|begin_of_text|>",
    ),
    "instruct": merging_tokenizer(["<s>", "</s>"], "</s>", "<s>"),
}


def targets(tokenizer, ids: np.ndarray, labels: np.ndarray) -> list[str]:
    """Return the text of each run of labelled tokens."""
    runs, run = [], []
    for label in [*labels, IGNORE]:
        if label != IGNORE:
            run.append(label)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    assert all(
        label in (IGNORE, following) for label, following in zip(labels, ids[1:], strict=False)
    )
    return runs


@pytest.mark.parametrize(
    "name, template, chat, expected",
    [
        (
            "bytes",
            CHATML,
            CHAT,
            ["  Because.\n<|im_end|>\n", "Why? Be brief.assistant<|im_end|>\n"],
        ),
        (
            "chatml",
            CHATML,
            CHAT,
            ["  Because.\n<|im_end|>\n", "Why? Be brief.assistant<|im_end|>\n"],
        ),
        ("llama3", LLAMA3, CHAT, ["Because.<|eot_id|>", "Why? Be brief.assistant<|eot_id|>"]),
        (
            "chatml",
            THINKING,
            CHAT,
            [
                "  Because.\n<|im_end|>\n",
                "<think>\n\n</think>\n\nWhy? Be brief.assistant<|im_end|>\n",
            ],
        ),
        (
            "chatml",
            THINKING,
            THOUGHTS,
            ["So.<|im_end|>\n", "<think>\nAh.\n</think>\n\nYes.<|im_end|>\n"],
        ),
        ("instruct", INSTRUCT, CHAT, [" Because. </s>", " Why? Be brief.assistant </s>"]),
        ("chatml", PLAIN, CHAT, ["  Because.\n\n\n", "Why? Be brief.assistant\n\n"]),
        ("chatml", CHATML, [ASK, {"role": "assistant", "content": ""}], ["<|im_end|>\n"]),
        ("chatml", CHATML, [{"role": "assistant", "content": "é日本"}, ASK], ["é日本<|im_end|>\n"]),
    ],
)
def test_loss_on_answers_only(name, template, chat, expected):
    tokenizer = TOKENIZERS[name]
    tokenizer.chat_template = template
    ((ids, labels),) = encode_chats(tokenizer, [chat], ["row 1"], seq_len=1000)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(chat, tokenize=False)
    found = targets(tokenizer, ids, labels)
    # The space before the answer is either a separate token or part of the answer's first token.
    if name == "instruct":
        found, expected = [text.strip() for text in found], [text.strip() for text in expected]
    assert found == expected


def test_batch_of_chats_equals_each_alone():
    BYTES.chat_template = CHATML
    together = encode_chats(BYTES, [CHAT, THOUGHTS], ["1", "2"], 1000)
    for (ids, labels), chat in zip(together, (CHAT, THOUGHTS), strict=True):
        ((alone, alone_labels),) = encode_chats(BYTES, [chat], ["1"], 1000)
        assert (ids == alone).all() and (labels == alone_labels).all()


def test_long_chat_is_cut_and_one_without_answer_is_empty():
    BYTES.chat_template = CHATML
    ((ids, labels),) = encode_chats(BYTES, [CHAT], ["1"], 60)
    assert len(ids) == 60 and targets(BYTES, ids, labels) == ["  Because.\n<|im_end|>\n"]
    assert [len(ids) for ids, _ in encode_chats(BYTES, [CHAT, [ASK]], ["1", "2"], 20)] == [0, 0]


@pytest.mark.parametrize(
    "template, chat, says",
    [
        (
            CHATML,
            [{"speaker": "human", "value": "hi"}],
            "a message requires the strings 'role' and 'content'",
        ),
        (
            CHATML,
            [{"role": "assistant", "content": [{"type": "text"}]}],
            "a message requires the strings",
        ),
        (
            CHATML,
            [{"role": "assistant", "content": [{"type": "image_url", "text": "x"}]}],
            "a message requires the strings",
        ),
        (CHATML, [ASK, {"role": "assistant", "content": None}], "a message requires the strings"),
        (
            CHATML,
            [ASK, {"role": "bot", "content": "x"}],
            "the role 'bot': these rows use the roles bot, user",
        ),
        (CHATML, [], "a chat must be a list"),
        (CHATML, "hello", "a chat must be a list"),
        (INSTRUCT, [ASK, ASK], "roles must alternate"),
        (
            "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
            CHAT,
            "message 3: the chat template changes this answer",
        ),
    ],
)
def test_unusable_chat_is_refused(template, chat, says):
    tokenizer = TOKENIZERS["instruct"]
    tokenizer.chat_template = template
    with pytest.raises(ConfigError) as refused:
        encode_chats(tokenizer, [chat], ["chats.jsonl, row 7"], 1000)
    assert "chats.jsonl, row 7" in str(refused.value) and says in str(refused.value)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("a b\n<|im_end|>é", max_size=6), min_size=1, max_size=4))
def test_rendered_answers_are_the_contents(answers):
    tokenizer = TOKENIZERS["chatml"]
    tokenizer.chat_template = CHATML
    chat = [
        message for answer in answers for message in (ASK, {"role": "assistant", "content": answer})
    ]
    text, spans = ChatTemplate(tokenizer).answers(chat, None, "row")
    assert [text[start:end] for _, (start, end) in spans] == [
        f"{answer}<|im_end|>\n" for answer in answers
    ]


def test_tokenizer_without_what_the_task_needs_is_refused():
    bare = merging_tokenizer(["</s>"], "</s>")
    check_tokenizer(bare, "pretrain")
    with pytest.raises(ConfigError, match="no chat template"):
        check_tokenizer(bare, "sft")
    bare.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-text token"):
        check_tokenizer(bare, "pretrain")
