"""The global stream: order, resume, packing, masks, held-out documents, bad input."""

import contextlib
import gc
import json
import random
import shutil
import sysconfig
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from recipekit import data
from recipekit.data import PIECE, eval_rows, fingerprint, is_held_out, merge_states, open_source, open_stream
from recipekit.recipe import Recipe
from recipekit.refusal import Refusal
from recipekit.tokens import IGNORE, byte_tokenizer, encode_chats
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

BYTES = byte_tokenizer()
END = BYTES.eos_token_id
SEQ_LEN = 16


def words(count: int, seed: int) -> list[str]:
    """Documents of 1 to 50 characters, all different."""
    draw = random.Random(seed)
    return [f"{number} " + "".join(draw.choices("abc \n", k=draw.randint(0, 45))) for number in range(count)]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, str]:
    """The same 300 documents as JSONL in three files, Parquet in two, and text files; and 90 chats."""
    folder = tmp_path_factory.mktemp("corpora")
    texts = words(300, 0)
    for kind in ("lines", "parquet", "text", "chats"):
        (folder / kind).mkdir()
    for number in range(3):
        rows = [json.dumps({"id": 1, "text": text}) for text in texts[100 * number : 100 * number + 100]]
        (folder / "lines" / f"{number}.jsonl").write_text("\n".join(rows) + "\n")
    for number in range(2):
        table = pa.table({"text": texts[150 * number : 150 * number + 150], "n": range(150)})
        pq.write_table(table, folder / "parquet" / f"{number}.parquet", row_group_size=40)
    for number, text in enumerate(texts):
        (folder / "text" / f"{number:03}.txt").write_text(text)
    chats = [{"messages": [{"role": "user", "content": text[:5]}, {"role": "assistant", "content": text}]} for text in words(90, 1)]
    (folder / "chats" / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return {path.name: str(path) for path in folder.iterdir()} | {"texts": str(folder / "text")}


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Blocks of 20 documents, so that a few hundred documents have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "BLOCK_DOCUMENTS", 20)
        patch.setattr(data, "READ_ROWS", 7)
        yield


def recipe_for(dataset: str, **fields) -> Recipe:
    defaults = {"model": "x", "dataset": dataset, "tokenizer": "bytes", "seq_len": SEQ_LEN, "global_batch": 8, "micro_batch": 1}
    return Recipe(**(defaults | fields))


def take(recipe: Recipe, steps: int, dp: int = 1, state: dict | None = None) -> tuple[np.ndarray, dict]:
    """(steps, 3, global_batch, seq_len): the ids, labels and positions of all ranks put together, and the merged state."""
    streams = [open_stream(recipe, BYTES, dp=dp, dp_rank=rank, state=state) for rank in range(dp)]
    batches = []
    for _ in range(steps):
        rows = []
        for stream in streams:
            micro_batches, state_after = next(stream)
            assert state_after is stream.state and len(micro_batches) == recipe.global_batch // dp // recipe.micro_batch
            for batch in micro_batches:
                assert all(batch[name].shape == (recipe.micro_batch, recipe.seq_len) and batch[name].dtype == torch.int64 for name in batch)
                rows.append(np.stack([batch[name].numpy() for name in ("input_ids", "labels", "position_ids")]))
        batches.append(np.concatenate(rows, axis=1))
    merged = merge_states([json.loads(json.dumps(stream.state)) for stream in streams])
    for stream in streams:
        stream.close()
    return np.stack(batches) if batches else np.empty((0, 3, recipe.global_batch, recipe.seq_len), dtype=np.int64), json.loads(json.dumps(merged))


@pytest.mark.parametrize("kind, task", [("lines", "pretrain"), ("parquet", "pretrain"), ("text", "pretrain"), ("chats", "sft"), ("builtin", "pretrain")])
def test_order_does_not_depend_on_the_ranks(corpora, kind, task):
    recipe = recipe_for(corpora.get(kind, kind), task=task, seq_len=64 if task == "sft" else SEQ_LEN)
    layouts = [(1, 1), (1, 8), (2, 2), (4, 2), (8, 1)] if kind != "builtin" else [(1, 2), (2, 1)]
    first, *others = (take(Recipe(**(vars(recipe) | {"micro_batch": micro_batch})), 12, dp)[0] for dp, micro_batch in layouts)
    assert all((other == first).all() for other in others)
    assert len(np.unique(first[:, 0].reshape(-1, recipe.seq_len), axis=0)) > 80  # the lanes differ


def test_order_depends_on_the_seed(corpora):
    one, two = (take(recipe_for(corpora["lines"], seed=seed), 5)[0] for seed in (0, 1))
    assert (one[0] != two[0]).any()


def documents_by_index(batches: np.ndarray) -> dict[int, str]:
    """The text of each document, by its place in the global order; documents not complete are left out."""
    found = {}
    for lane in range(batches.shape[2]):
        ids = batches[:, 0, lane].ravel()
        ends = np.flatnonzero(ids == END)
        for number, (start, end) in enumerate(zip([0, *(ends + 1)], ends, strict=False)):
            found[number * batches.shape[2] + lane] = BYTES.decode(ids[start:end])
    return found


@pytest.mark.parametrize("kind", ["lines", "parquet", "text"])
def test_every_document_once_per_epoch_and_every_token_a_target(corpora, kind):
    batches, _ = take(recipe_for(corpora[kind]), 150)
    expected = Counter(text for text in words(300, 0) if not is_held_out(text))
    size = sum(expected.values())
    assert 290 < size < 300
    documents = documents_by_index(batches)
    assert len(documents) > 2 * size
    epochs = [[documents[index] for index in range(number * size, (number + 1) * size)] for number in (0, 1)]
    assert Counter(epochs[0]) == Counter(epochs[1]) == expected
    assert epochs[0] != epochs[1] and epochs[0] != list(expected)
    assert kind != "text" or set(epochs[0][:20]) != set(epochs[1][:20])  # 256 parts: another order of them gives another first block
    for lane in range(8):
        ids, labels, positions = (batches[:, part, lane].ravel() for part in range(3))
        following = np.where(ids[:-1] == END, IGNORE, ids[1:])
        assert (labels[:-1] == following).all()
        starts = np.flatnonzero((np.arange(len(ids)) % SEQ_LEN == 0) | (np.roll(ids, 1) == END))
        assert (positions == np.arange(len(ids)) - starts[np.searchsorted(starts, np.arange(len(ids)), side="right") - 1]).all()


@pytest.fixture(scope="module")
def uninterrupted(corpora) -> dict[tuple[str, str], np.ndarray]:
    kinds = [("lines", "pretrain"), ("parquet", "pretrain"), ("text", "pretrain"), ("chats", "sft")]
    return {(kind, task): take(recipe_for(corpora[kind], task=task, seq_len=64 if task == "sft" else SEQ_LEN), 100)[0] for kind, task in kinds}


@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking takes minutes
@given(st.data())
def test_resume_is_exact_at_any_point_any_number_of_times(corpora, uninterrupted, draw):
    """Segments of random length, 0 included (saved right after a resume), on 1, 2 or 4 ranks, over two epochs."""
    kind, task = draw.draw(st.sampled_from(list(uninterrupted)))
    reference = uninterrupted[kind, task]
    segments = draw.draw(st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 7, 20, 40]), st.sampled_from([1, 2, 4])), min_size=2, max_size=4))
    state, done = None, 0
    for steps, dp in segments:
        steps = min(steps, len(reference) - done)
        recipe = recipe_for(corpora[kind], task=task, seq_len=64 if task == "sft" else SEQ_LEN)
        got, state = take(recipe, steps, dp, state)
        assert (got == reference[done : done + steps]).all()
        done += steps


def test_state_is_small_and_the_same_for_any_ranks(corpora):
    recipe = recipe_for(corpora["parquet"])
    states = [take(recipe, 30, dp)[1] for dp in (1, 2, 8)]
    assert states[0] == states[1] == states[2]
    assert len(json.dumps(states[0])) < 1024 + 64 * recipe.global_batch


def test_resume_reads_from_the_last_block_only(corpora):
    """Reading starts at the oldest block still in use, not at the start of the corpus."""
    _, state = take(recipe_for(corpora["lines"]), 100)
    assert state["reader"]["epoch"] == 1 and state["reader"]["block"] > 0 and state["reader"]["hf"]


def test_builtin_resumes_on_fewer_ranks():
    recipe = recipe_for("builtin", seq_len=256)
    reference, _ = take(recipe, 20)
    _, state = take(recipe, 9, dp=2)
    again, _ = take(recipe, 11, dp=1, state=state)
    assert (again == reference[9:]).all()


@pytest.mark.parametrize("change", [{"seed": 1}, {"global_batch": 16}, {"seq_len": 32}, {"dataset": "builtin"}, {"task": "sft"}])
def test_state_of_another_stream_is_refused(corpora, change):
    recipe = recipe_for(corpora["lines"])
    _, state = take(recipe, 1)
    with pytest.raises(Refusal) as refused:
        open_stream(Recipe(**(vars(recipe) | change)), BYTES, dp=1, dp_rank=0, state=state)
    name = {"dataset": "corpus"}.get(next(iter(change)), next(iter(change)))
    assert any(problem.where.startswith(name) for problem in refused.value.problems)


def test_states_of_peers_must_agree(corpora):
    streams = [open_stream(recipe_for(corpora["lines"]), BYTES, dp=2, dp_rank=rank) for rank in (0, 1, 1)]
    states = [next(stream)[1] for stream in streams]
    assert len(merge_states(states)["lanes"]) == 8
    states[2] = next(streams[2])[1]
    with pytest.raises(RuntimeError, match="peers disagree on lane 4"):
        merge_states(states)
    for stream in streams:
        stream.close()


def test_fewer_documents_than_lanes(tmp_path):
    (tmp_path / "few.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("ab", "cd", "ef")))
    batches, _ = take(recipe_for(str(tmp_path / "few.jsonl")), 4, dp=4)
    assert set(documents_by_index(batches).values()) == {"ab", "cd", "ef"}


def test_global_batch_must_divide(corpora):
    with pytest.raises(Refusal, match=r"global_batch = 8: is no multiple of dp\(3\) \* micro_batch\(1\); use --global_batch 6"):
        open_stream(recipe_for(corpora["lines"]), BYTES, dp=3, dp_rank=0)


# Chats ----------------------------------------------------------------------------------------------------------


def test_chats_are_whole_and_padded(corpora):
    batches, _ = take(recipe_for(corpora["chats"], task="sft", seq_len=64), 40)
    chats = [json.loads(line)["messages"] for line in Path(corpora["chats"], "chats.jsonl").read_text().splitlines()]
    rendered = {tuple(ids[:64]): labels for ids, labels in encode_chats(BYTES, chats, ["row"] * len(chats), 64)}
    seen = set()
    for row in batches.transpose(0, 2, 1, 3).reshape(-1, 3, 64):
        for part in np.split(row, np.flatnonzero(row[2] == 0)[1:], axis=1):
            if part[0, 0] == BYTES.pad_token_id:
                assert (part[0] == BYTES.pad_token_id).all() and (part[1] == IGNORE).all() and part.shape[1] < 64
            else:
                assert (part[1] == rendered[tuple(part[0])]).all() and (part[1] != IGNORE).any()
                seen.add(tuple(part[0]))
            assert (part[2] == np.arange(part.shape[1])).all()
    held_out = {ids for chat, ids in zip(chats, rendered, strict=True) if is_held_out(chat)}
    assert seen == set(rendered) - held_out


def test_builtin_chats_ask_for_the_docstring():
    batches, _ = take(recipe_for("builtin", task="sft", seq_len=256), 2)
    ids, labels = batches[0, 0, 0], batches[0, 1, 0]
    text = BYTES.decode(ids)
    assert text.startswith("<|im_start|>user\nWrite the docstring.\n")
    answer = text.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    assert BYTES.decode(labels[labels != IGNORE]).startswith(answer)


def test_chats_without_an_answer_within_the_row_are_refused(corpora, monkeypatch):
    monkeypatch.setattr(data, "BARREN_DOCUMENTS", 500)
    with pytest.raises(Refusal, match="hold no token to train on"):
        take(recipe_for(corpora["chats"], task="sft", seq_len=16), 1)


# Attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_document_sees_another(corpora, family, attention):
    """Changing one document of a packed row changes no logit of another, bit for bit."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(BYTES), "attn_implementation": attention}
    if family == "llama":
        config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **sizes)
        model = LlamaForCausalLM(config).eval()
    else:
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **sizes)).eval()
    with contextlib.closing(open_stream(recipe_for(corpora["lines"], seq_len=96, micro_batch=2), BYTES, dp=1, dp_rank=0)) as stream:
        batch = next(stream)[0][0]
    starts = [*torch.nonzero(batch["position_ids"][0] == 0).flatten().tolist(), 96]
    assert len(starts) >= 4
    changed = batch["input_ids"].clone()
    changed[0, starts[1] : starts[2]] = (changed[0, starts[1] : starts[2]] + 1) % 256
    with torch.no_grad():
        one, two = (model(input_ids=ids, position_ids=batch["position_ids"], use_cache=False).logits for ids in (batch["input_ids"], changed))
        leaky = model(input_ids=changed, position_ids=batch["position_ids"], use_cache=False, attention_mask=torch.ones_like(changed)).logits
    assert (one[0, starts[1] : starts[2]] != two[0, starts[1] : starts[2]]).any()
    same = torch.ones(96, dtype=torch.bool)
    same[starts[1] : starts[2]] = False
    assert torch.equal(one[0, same], two[0, same]) and torch.equal(one[1], two[1])
    assert not torch.equal(leaky[0, starts[2] :], two[0, starts[2] :])  # the test can see a leak


# Held-out documents -----------------------------------------------------------------------------------------------


def tokens_of(batches: list[dict[str, torch.Tensor]]) -> np.ndarray:
    """Ids of the rows that carry a label, in order."""
    ids, labels = (torch.cat([batch[name] for batch in batches]).numpy() for name in ("input_ids", "labels"))
    return ids[(labels != IGNORE).any(1)]


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[str, list[str]]:
    path = tmp_path_factory.mktemp("large") / "large.jsonl"
    texts = words(3000, 5)
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return str(path), texts


def test_evaluation_is_the_same_on_every_layout(large):
    path, _ = large
    recipe = recipe_for(path, eval_rows=7)
    reference = tokens_of(eval_rows(recipe, BYTES, dp=1, dp_rank=0))
    assert len(reference) == 7
    for dp, micro_batch in ((2, 1), (2, 4), (4, 2), (8, 1)):
        ranks = [eval_rows(Recipe(**(vars(recipe) | {"micro_batch": micro_batch})), BYTES, dp=dp, dp_rank=rank) for rank in range(dp)]
        assert len({len(batches) for batches in ranks}) == 1
        assert all(batch["input_ids"].shape == (micro_batch, SEQ_LEN) for batches in ranks for batch in batches)
        assert (tokens_of([batch for batches in ranks for batch in batches]) == reference).all()


def test_held_out_documents_are_evaluated_and_never_trained_on(large):
    path, texts = large
    held_out = [text for text in texts if is_held_out(text)]
    assert 10 < len(held_out) < 60
    said = []
    ids = tokens_of(eval_rows(recipe_for(path, eval_rows=100_000), BYTES, dp=1, dp_rank=0, say=said.append)).ravel()
    evaluated = BYTES.decode(ids).removesuffix(BYTES.pad_token * int((ids == BYTES.pad_token_id).sum())).split(BYTES.eos_token)[:-1]
    assert evaluated == held_out and "held-out 1 %" in said[0]
    trained = Counter(documents_by_index(take(recipe_for(path, seq_len=256), 60)[0]).values())
    assert set(trained) == set(texts) - set(held_out)


def test_no_held_out_document_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("a small file")
    assert not is_held_out("a small file")
    with pytest.raises(Refusal, match="held-out 1 % is empty"):
        eval_rows(recipe_for(str(tmp_path / "one.txt")), BYTES, dp=1, dp_rank=0)


def test_builtin_evaluation():
    batches = eval_rows(recipe_for("builtin", eval_rows=4), BYTES, dp=2, dp_rank=0)
    assert len(batches) == 2 and all((batch["labels"] != IGNORE).any() for batch in batches)


# Sources ----------------------------------------------------------------------------------------------------------


def texts_of(dataset: str, **fields) -> list[str]:
    source = open_source(recipe_for(dataset, **fields))
    return [text for part in range(source.parts) for documents, _, _ in data.read(source, part, None, 0) for text, _ in documents]


def test_builtin_is_the_standard_library():
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(stdlib.rglob("*.py")) if "site-packages" not in file.parts]
    content = "".join(texts_of("builtin"))
    assert content == "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


def test_ways_to_name_files(corpora, monkeypatch):
    lines = Path(corpora["lines"])
    monkeypatch.chdir(lines)
    everything = texts_of(str(lines))
    assert len(everything) == 300
    for name in (f"{lines}/*.jsonl", f"{lines}/0.jsonl,{lines}/[12].jsonl", "0.jsonl, 1.jsonl, 2.jsonl", "*.jsonl", str(lines / "**" / "*.jsonl")):
        assert texts_of(name) == everything, name


def test_odd_files_are_read(tmp_path):
    import gzip

    odd = tmp_path / "a [b], {c} é*"
    odd.mkdir()
    (odd / "bad.txt").write_bytes(b"caf\xe9 \xff")
    assert texts_of(str(odd / "bad.txt")) == ["caf� �"]
    long = "".join(f"line {number}\n" for number in range(10_000))
    (odd / "long.txt").write_text(long)
    pieces = texts_of(str(odd / "long.txt"))
    assert "".join(pieces) == long and all(len(piece) <= PIECE and piece.endswith("\n") for piece in pieces) and len(pieces) > 2
    (odd / "zip.jsonl.gz").write_bytes(gzip.compress(b'\n{"text": "a\\u2028b"}\n  \n{"text": null}\n{"text": "c\xe2\x80\xa8d"}'))
    assert texts_of(str(odd / "zip.jsonl.gz")) == ["a\u2028b", "c\u2028d"]
    (odd / "empty.txt").write_text("")
    (odd / "zip.jsonl.gz").unlink()
    (tmp_path / "half.jsonl").write_text(r'{"text": "a\ud83d b\uD83D\uDE00"}')
    assert texts_of(str(tmp_path / "half.jsonl")) == ["a? b\U0001f600"]
    assert len(texts_of(str(odd))) == len(pieces) + 1


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("a.jsonl", '{"text": "x"}\n[1, 2]\n', ["a.jsonl, row 2", "is not a JSON object but a list"]),
        ("a.jsonl", '{"text": "x"}\n{"text": "y"}\n{"text": \n', ["a.jsonl, row 3", "is not JSON"]),
        ("a.jsonl", '{"text": "x"}\n{"body": "x"}\n', ["a.jsonl, row 2", "has no column 'text', only 'body'", "--text_field"]),
        ("a.jsonl", '{"text": 5}\n', ["a.jsonl, row 1", "holds int '5' where text (--text_field) should be"]),
        ("a.parquet", "no parquet", ["a.parquet", "cannot be read"]),
        ("a.txt", " \n", ["holds no document to train on"]),
        ("a.jsonl", "", ["holds no document to train on"]),
    ],
)
def test_bad_rows_are_named(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(Refusal) as refused:
        stream = open_stream(recipe_for(str(tmp_path)), BYTES, dp=1, dp_rank=0)
        with contextlib.closing(stream):
            next(stream)
    assert all(part in str(refused.value) for part in says), str(refused.value)


def test_bad_columns_and_broken_files_are_named(tmp_path, corpora):
    with pytest.raises(Refusal, match=r"[01].parquet: has no column 'body', only 'text', 'n'"):
        take(recipe_for(corpora["parquet"], text_field="body"), 1)
    whole = Path(corpora["parquet"], "0.parquet").read_bytes()
    middle = len(whole) // 2
    (tmp_path / "broken.parquet").write_bytes(whole[: middle - 200] + b"\xff" * 400 + whole[middle + 200 :])
    with pytest.raises(Refusal, match=r"broken.parquet, after row .*cannot be read"):
        take(recipe_for(str(tmp_path / "broken.parquet")), 40)
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00garbage")
    with pytest.raises(Refusal, match=r"cut.jsonl.gz, after row 0: cannot be read"):
        take(recipe_for(str(tmp_path / "cut.jsonl.gz")), 1)


@pytest.mark.parametrize(
    "dataset, fields, says",
    [
        ("no/such/*.jsonl", {}, ["--dataset no/such/*.jsonl", "there is no such file"]),
        ("./gone.txt,./gone2.txt", {}, ["gone.txt", "gone2.txt"]),
        ("gone.jsonl", {}, ["there is no such file"]),
        ("{folder}", {}, ["several kinds: lines, text"]),
        ("{folder}/c.bin", {}, ["the ending does not say"]),
        ("{folder}/a.txt", {"task": "sft"}, ["task sft needs chats"]),
        ("org/name", {}, ["--dataset org/name", "hub cannot be reached", "https://huggingface.co/datasets/org/name"]),
    ],
)
def test_missing_corpus_is_refused_at_once(tmp_path, dataset, fields, says):
    for name in ("a.txt", "b.jsonl", "c.bin"):
        (tmp_path / name).write_text("x")
    with pytest.raises(Refusal) as refused:
        open_stream(recipe_for(dataset.format(folder=tmp_path), **fields), BYTES, dp=1, dp_rank=0)
    assert all(part in str(refused.value) for part in says), str(refused.value)


def test_fingerprint_follows_the_content(corpora, tmp_path):
    shutil.copytree(corpora["lines"], tmp_path / "copy")
    before = fingerprint(recipe_for(corpora["lines"]))
    assert fingerprint(recipe_for(str(tmp_path / "copy"))) == before == fingerprint(recipe_for(str(tmp_path / "copy"), seed=3, seq_len=99))
    assert fingerprint(recipe_for(corpora["lines"], text_field="id")) != before
    path = tmp_path / "copy" / "1.jsonl"
    content = path.read_text()
    path.write_text(content.replace("a", "b", 1))
    assert fingerprint(recipe_for(str(tmp_path / "copy"))) != before
    path.write_text(content)
    path.rename(path.with_name("4.jsonl"))
    assert fingerprint(recipe_for(str(tmp_path / "copy"))) != before


# The thread -------------------------------------------------------------------------------------------------------


def test_close_leaves_no_thread(corpora):
    before = set(threading.enumerate())
    stream = open_stream(recipe_for(corpora["parquet"]), BYTES, dp=1, dp_rank=0)
    next(stream)
    time.sleep(0.1)  # the queue is full, the thread waits
    begun = time.perf_counter()
    stream.close()
    assert time.perf_counter() - begun < 1 and set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)
    stream.close()


def test_error_comes_after_the_good_steps_and_stays(tmp_path):
    """The steps made before the bad row are handed out, then `next` raises, every time."""
    good = "\n".join(json.dumps({"text": text}) for text in words(39, 2))
    (tmp_path / "a.jsonl").write_text(good + "\nnonsense\n")
    before = set(threading.enumerate())
    stream = open_stream(recipe_for(str(tmp_path / "a.jsonl"), global_batch=1), BYTES, dp=1, dp_rank=0)
    steps = 0
    with pytest.raises(Refusal, match=r"a.jsonl, row 40: is not JSON"):
        while True:
            next(stream)
            steps += 1
    assert steps > 5
    with pytest.raises(Refusal, match="row 40"):
        next(stream)
    stream.close()
    assert set(threading.enumerate()) == before


# Hub data sets (a folder stands in for a repository: `datasets` opens both with the same call) ----------------------


def test_hub_data_set_is_streamed(corpora):
    source = data._hub_source(recipe_for(corpora["parquet"]), "text")
    texts = [text for part in range(source.parts) for documents, _, _ in data.read(source, part, None, 0) for text, _ in documents]
    assert texts == words(300, 0) and source.parts == 2 and "/train@" in source.fingerprint


@pytest.mark.parametrize("fields, says", [({"split": "tests"}, ["tests", "train"]), ({"subset": "no-such"}, ["no-such", "default"])])
def test_wrong_split_or_subset_is_refused(corpora, fields, says):
    with pytest.raises(Refusal) as refused:
        data._hub_source(recipe_for(corpora["parquet"], **fields), "text")
    assert all(part in str(refused.value) for part in says), str(refused.value)


def test_missing_subset_is_refused_with_the_choice(tmp_path, corpora):
    shutil.copytree(corpora["parquet"], tmp_path / "repository")
    card = "---\nconfigs:\n- config_name: first\n  data_files: 0.parquet\n- config_name: second\n  data_files: 1.parquet\n---\n"
    (tmp_path / "repository" / "README.md").write_text(card)
    with pytest.raises(Refusal, match=r"'first', 'second'"):
        data._hub_source(recipe_for(str(tmp_path / "repository")), "text")
    assert data._hub_source(recipe_for(str(tmp_path / "repository"), subset="second"), "text").parts == 1


def test_two_threads_may_parse_at_once() -> None:
    """The training stream and the evaluation read `builtin` at the same time; a garbage collection amid `ast.parse` changes threads."""
    from recipekit.data import _docstring_chats

    sources = [file.read_text() for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:6]]
    failed: list[BaseException] = []

    def parse() -> None:
        try:
            for source in sources:
                _docstring_chats(source, "here")
        except SystemError as error:
            failed.append(error)

    def change_threads(*_: object) -> None:
        time.sleep(0.0001)

    before = gc.get_threshold()
    gc.set_threshold(100)
    gc.callbacks.append(change_threads)
    threads = [threading.Thread(target=parse) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.callbacks.remove(change_threads)
        gc.set_threshold(*before)
    assert not failed
