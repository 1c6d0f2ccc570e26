"""Masked language models train like plain PyTorch in every layout that their task supports.

Their resumes are the same bit for bit, and transformers can read their exports.
"""

import functools
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from built_models import build_model
from job import Job, deepspeed, metrics
from metrics_page import OF_MASKS, page
from parity import NUMBERS, STEPS, Case, compare, each
from pool import ROOT, environment
from recipekit.architectures.families import default_config
from recipekit.data.batching import DataRank
from recipekit.data.held_out import eval_rows
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import request_from_recipe
from recipekit.data.stream import open_stream
from recipekit.kernels.documents import with_document_starts, with_documents
from recipekit.model.empty import empty_model
from recipekit.model.initial_values import InitialValues, Target, fill_parameters
from recipekit.model.weights import open_weights
from recipekit.parallel import pipeline
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import reproducible_values
from recipekit.spec.task_specs import TASKS
from recipekit.tasks import masked_lm
from recipekit.train import to_device
from reference import Plain, Trained, num_right, train_plain
from safetensors.torch import load_file
from shipped_jsons import strategy

FLAGS = (
    "dataset",
    "micro_batch",
    "global_batch",
    "seq_len",
    "eval_rows",
    "warmup_steps",
    "tp",
    "pp",
    "sp",
    "ep",
)


@functools.cache
def family(model_type: str, dropout: float = 0.0) -> str:
    """Return a folder with a family's default config and this dropout."""
    config = default_config(model_type, "masked_lm").to_dict()
    config |= {key: dropout for key in config if key.endswith(("dropout_prob", "_dropout"))}
    folder = Path(tempfile.mkdtemp(prefix="masked_"))
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return str(folder)


@functools.cache
def short_documents() -> str:
    """Return a file of documents of 5 to 90 letters, so that rows contain several documents and
    padding.
    """
    folder = Path(tempfile.mkdtemp(prefix="masked_"))
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(5, 90, (3000,), generator=draw).tolist()
    letters = torch.randint(0, 9, (sum(lengths),), generator=draw).split(lengths)
    (folder / "short.jsonl").write_text(
        "".join(
            json.dumps({"text": "".join("abcdefgh "[letter] for letter in own)}) + "\n"
            for own in letters
        )
    )
    return str(folder / "short.jsonl")


def recipe_for(model: str, dropout: float = 0.0, **changes: Any) -> Recipe:
    numbers = NUMBERS | {"micro_batch": 2, "dataset": short_documents(), "mask_rate": 0.2} | changes
    return Recipe(task="masked_lm", model=family(model, dropout), ds_config={}, **numbers)


def plan_of(recipe: Recipe) -> Any:
    """Return a run's plan, with flags for the values that --tiny would otherwise change."""
    return resolve_run(
        parse(
            recipe,
            Path("masked.py"),
            [
                "--tiny",
                *(word for name in FLAGS for word in (f"--{name}", str(getattr(recipe, name)))),
            ],
        )
    )


def train_masked(recipe: Recipe, config: dict[str, Any], out: str) -> int:
    """Run the real loop on a rank of a pool, in the same way as `run` does."""
    from recipekit.train import main

    sys.argv = ["masked.py"]
    return main(plan_of(replace(recipe, ds_config=config, out=out)))


def documents(batch: dict[str, torch.Tensor]) -> Any:
    """Yield each document's (ids, labels), both (tokens,). A position of 0 starts a document."""
    for ids, labels, positions in zip(
        batch["input_ids"], batch["labels"], batch["position_ids"], strict=True
    ):
        edges = [place for place, position in enumerate(positions.tolist()) if position == 0] + [
            len(ids)
        ]
        for start, stop in pairwise(edges):
            yield ids[start:stop], labels[start:stop]


def logits_of(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    """Yield (logits, labels) for each document's masked tokens.

    The transformers model reads each document alone, without a mask and usually without positions.
    """
    for ids, labels in documents(batch):
        if (hidden := labels >= 0).any():
            told = {}
            # A tiny RoBERTa's padding token is a byte, and RoBERTa gives this token no position.
            if model.config.pad_token_id in ids.tolist():
                told = {"position_ids": torch.arange(len(ids)).unsqueeze(0)}
            yield (
                model(input_ids=ids.unsqueeze(0), **told).logits[0, hidden].float(),
                labels[hidden],
            )


def summed_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum(
        (
            -logits.log_softmax(-1).gather(1, labels.unsqueeze(1)).sum()
            for logits, labels in logits_of(model, batch)
        ),
        torch.zeros(()),
    )


def right(model: Any, batch: dict[str, torch.Tensor]) -> list[int]:
    return [sum(num_right(logits, labels) for logits, labels in logits_of(model, batch))]


MASKED = Plain(
    stream=lambda recipe, _: open_stream(
        request_from_recipe(recipe), byte_tokenizer(masked=True), rank=DataRank(1, 0)
    ),
    held_out=lambda recipe, _: eval_rows(
        request_from_recipe(recipe), byte_tokenizer(masked=True), rank=DataRank(1, 0)
    ),
    loss=summed_loss,
    right=right,
)


@functools.cache
def reference(model: str, bf16: bool = False, **changes: Any) -> Trained:
    os.environ.pop("WORLD_SIZE", None)
    plan = plan_of(
        replace(recipe_for(model, **changes), ds_config=strategy("zero0", bf16), out="/nonexistent")
    )
    return train_plain(plan.recipe, plan.model_config, STEPS, bf16, MASKED)


TP2, PP2 = {"tp": 2}, {"pp": 2}
CASES = [  # pairs of ZeRO stage, dp, split, tp, pp
    Case("bert zero1 pp2 tp2", 4, "zero1", PP2 | TP2, model="bert", slow=True),
    Case("bert zero1 pp2", 2, "zero1", PP2, model="bert", slow=True),
    Case(
        "modernbert zero3 dp2, checkpointing",
        2,
        "zero3",
        {"activation_checkpointing": True},
        model="modernbert",
        slow=True,
    ),
    Case(
        "bert zero2 dp4",
        4,
        "zero2",
        {"micro_batch": 1},
        {"whole_words": True},
        model="bert",
        slow=True,
    ),
    Case(
        "bert zero3 tp2, whole logits",
        2,
        "zero3",
        TP2 | {"micro_batch": 4, "loss": "whole"},
        model="bert",
        slow=True,
    ),
    Case("modernbert zero1 pp2 tp2", 4, "zero1", PP2 | TP2, model="modernbert", slow=True),
    Case(
        "modernbert zero0 pp2, dualpipev",
        2,
        "zero0",
        PP2 | {"pipeline_schedule": "dualpipev", "micro_batch": 1},
        model="modernbert",
        slow=True,
    ),
    Case("eurobert zero2 tp2", 2, "zero2", TP2 | {"micro_batch": 1}, model="eurobert", slow=True),
    Case("roberta zero0 pp2 dp2", 4, "zero0", PP2, model="roberta", slow=True),
]


@each(CASES)
def test_masked_language_models_train_like_plain_pytorch(pools, tmp_path, case):
    """Compare losses, norms, rates, all weights, and the accuracy on masked held-out tokens."""
    codes = pools.run(
        case.world,
        train_masked,
        recipe=recipe_for(case.model, **case.layout, **case.numbers),
        config=strategy(case.file),
        out=str(tmp_path / "run"),
    )
    assert codes == [0] * case.world
    expected = reference(case.model, **case.numbers)
    compare(tmp_path / "run", expected)
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [lines[-1]["eval_accuracy"]] == pytest.approx(expected.right)
    for line in lines:
        assert line["perplexity"] == pytest.approx(
            torch.tensor(line["loss"], dtype=torch.float64).exp().item()
        )
        assert 0 <= line["accuracy"] <= 1
    assert lines[-1].keys() <= page().keys() and lines[-1].keys() >= OF_MASKS, (
        "recipes/METRICS.md has a row for each key"
    )


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def test_a_resume_with_dropout_is_bit_for_bit(pools, tmp_path):
    """BERT's default dropout is 0.1, in embeddings, attention and layers.

    The run stops after step 4. Each row gets new masks in each epoch.
    """
    for out, stops in (("whole", (0,)), ("parts", (4, 0))):
        for stop_at in stops:
            recipe = recipe_for("bert", dropout=0.1, stop_at=stop_at, steps=6)
            assert pools.run(
                2, train_masked, recipe=recipe, config=strategy("zero1"), out=str(tmp_path / out)
            ) == [0, 0]
    lines = [
        [json.loads(line) for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]
        for out in ("whole", "parts")
    ]
    assert reproducible_values(lines[0]) == reproducible_values(lines[1]) and [
        line["accuracy"] for line in lines[0]
    ] == [line["accuracy"] for line in lines[1]]
    whole, parts = exported(tmp_path / "whole" / "hf"), exported(tmp_path / "parts" / "hf")
    assert whole.keys() == parts.keys() and all(
        torch.equal(whole[name], parts[name]) for name in whole
    )


def convert(*words: Any) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py"), *map(str, words)],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_goes_through_every_layout_and_its_files_are_the_same_bits(pools, tmp_path):
    """The chain is ZeRO-2 dp 2 -> ZeRO-3 dp 4 -> Hugging Face -> tp 2 x pp 2 -> Hugging Face.

    Then the run resumes in a different layout, and trains like plain PyTorch.
    """
    run = tmp_path / "run"
    assert pools.run(
        2,
        train_masked,
        recipe=recipe_for("bert", stop_at=5),
        config=strategy("zero2"),
        out=str(run),
    ) == [0, 0]
    convert("to-hf", run, tmp_path / "first", "--verify")
    convert("reshape", run, tmp_path / "four", "--tp", 1, "--pp", 1, "--dp", 4, "--zero", 3)
    convert("to-hf", tmp_path / "four", tmp_path / "second")
    convert(
        "from-hf",
        tmp_path / "second",
        tmp_path / "cut",
        "--zero",
        1,
        "--tp",
        2,
        "--pp",
        2,
        "--dp",
        1,
    )
    convert("to-hf", tmp_path / "cut", tmp_path / "third")
    first, second, third = (exported(tmp_path / name) for name in ("first", "second", "third"))
    assert first.keys() == second.keys() == third.keys()
    assert all(
        torch.equal(first[name], second[name]) and torch.equal(first[name], third[name])
        for name in first
    )
    assert (
        pools.run(
            4,
            train_masked,
            recipe=recipe_for("bert", pp=2, tp=2, micro_batch=1),
            config=strategy("zero1"),
            out=str(run),
        )
        == [0] * 4
    )
    compare(run, reference("bert"))


def test_what_is_exported_is_read_and_judged_by_plain_transformers(pools, tmp_path):
    """transformers computes the same loss and accuracy as the run reported.

    The exported tokenizer adds the same special tokens to a text, and has the mask token.
    """
    recipe = recipe_for("modernbert")
    pools.run(1, train_masked, recipe=recipe, config=strategy("zero0"), out=str(tmp_path / "run"))
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "hf").eval()
    assert model.decoder.weight is model.model.embeddings.tok_embeddings.weight
    plan = plan_of(replace(recipe, ds_config=strategy("zero0"), out="/nonexistent"))
    batches = MASKED.held_out(plan.recipe, plan.model_config)
    with torch.no_grad():
        judged = [pair for batch in batches for pair in logits_of(model, batch)]
    logits, labels = (torch.cat(tensors) for tensors in zip(*judged, strict=True))
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval_loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-6
    )
    assert last["eval_accuracy"] == pytest.approx(num_right(logits, labels) / len(labels))
    assert last["eval_perplexity"] == pytest.approx(
        torch.nn.functional.cross_entropy(logits, labels).exp().item(), rel=1e-5
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "hf")
    own = byte_tokenizer(masked=True)
    assert (
        tokenizer("some text")["input_ids"] == own("some text")["input_ids"]
        and tokenizer.mask_token_id == own.mask_token_id
    )


@pytest.mark.parametrize("model_type", ["bert", "modernbert"])
def test_a_head_that_is_the_embedding_is_drawn_once(tmp_path, model_type):
    """The head's block has a separate bias, but the shared weight keeps the embedding's values.

    This is the same on each stage and in the full model. Each stage finds its parameters in the
    full model's files.
    """
    plan = plan_of(replace(recipe_for(model_type), ds_config=strategy("zero0"), out="/nonexistent"))
    built = build_model(plan.recipe, plan.model_config, None, {}, torch.device("cpu"))
    whole, split = (
        dict(built.model.named_parameters()),
        pipeline.split_stages(built.model, built.blueprint, 2, built.model_plan.plans.pp),
    )
    assert split.tied
    built.model.save_pretrained(tmp_path)
    for stage in (0, 1):
        model, uncut = (
            empty_model(
                plan.model_config, built.model_plan.attention, "", 0, "AutoModelForMaskedLM"
            )
            for _ in range(2)
        )
        pipeline.make_stage(model, split, stage, torch.float32, TASKS["masked_lm"])
        assert (
            open_weights(str(tmp_path), model).stored.keys()
            >= dict(model.named_parameters()).keys()
        )
        fill_parameters(
            model,
            InitialValues(plan.recipe.seed, full_model=uncut),
            Target(torch.device("cpu"), torch.float32, None, {}),
            cuts={},
        )
        embeddings = [
            name
            for name, _ in model.named_parameters()
            if name.endswith(("word_embeddings.weight", "tok_embeddings.weight"))
        ]
        assert len(embeddings) == 1 and all(
            torch.equal(value, whole[name]) for name, value in model.named_parameters()
        )
        if stage == 1:
            head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
            assert (
                head.weight is embedding.weight
                and sum(value.numel() for value in model.get_submodule(split.first[0]).parameters())
                == head.weight.numel()
            )


def test_stages_that_would_name_one_weight_in_two_ways_are_refused():
    plan = plan_of(
        replace(recipe_for("camembert"), ds_config=strategy("zero0"), out="/nonexistent")
    )
    built = build_model(plan.recipe, plan.model_config, None, {}, torch.device("cpu"))
    with pytest.raises(
        ConfigError,
        match=(
            r"pp > 1 with CamembertForMaskedLM: its head is its embedding and stands before it"
            r" .lm_head.decoder.weight."
        ),
    ):
        pipeline.split_stages(built.model, built.blueprint, 2, built.model_plan.plans.pp)


@pytest.mark.parametrize("attention", ["varlen", "sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["bert", "modernbert", "eurobert", "roberta"])
def test_a_document_changes_no_logit_and_no_loss_of_another(model_type, attention):
    """Changing the second of three documents must not change any bit of the other documents.

    The second document's logits do change, even before the changed token.
    """
    plan = plan_of(
        replace(
            recipe_for(model_type, attention=attention),
            ds_config=strategy("zero0"),
            out="/nonexistent",
        )
    )
    model = build_model(plan.recipe, plan.model_config, None, {}, torch.device("cpu")).model
    positions = torch.cat([torch.arange(length) for length in (20, 30, 14)]).unsqueeze(0)
    ids = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(0))
    add = with_documents if attention == "varlen" else with_document_starts
    outputs = []
    for end in (5, 7):
        ids[0, 49] = end
        batch = to_device(
            add({"input_ids": ids.clone(), "position_ids": positions, "labels": ids.clone()}),
            torch.device("cpu"),
        )
        outputs.append(
            (
                masked_lm.TASK.forward(model, batch).detach(),
                masked_lm.with_chunked_masked_loss(masked_lm.TASK).forward(model, batch).detach(),
            )
        )
    for before, after in zip(*outputs, strict=True):
        moved = (before != after).any(-1)[0]
        assert moved[20:50].float().mean() > 0.5 and not moved[:20].any() and not moved[50:].any()


RECIPE = """
from recipekit import Recipe, run

RECIPE = Recipe(
    task="masked_lm", model={model!r}, init="random", tokenizer="bytes", dataset={dataset!r}, \
ds_config="zero1.json", seq_len=64, micro_batch=16,
    global_batch=32, steps=500, lr=4e-3, warmup_steps=50, weight_decay=0.01, beta2=0.98, \
eval_every=500, eval_rows=128, wandb=False,
)

if __name__ == "__main__":
    run(RECIPE)
"""


@pytest.mark.slow
@pytest.mark.parametrize("letters", ["true", "shuffled"])
def test_a_small_bert_learns_text(tmp_path, letters):
    """The accuracy is 10 points above the share of the most frequent byte.

    If the bytes of each document are shuffled, the accuracy stays lower, which shows that the
    answer does not leak into the input. One in ten masked tokens keeps its value. A model that
    copies its input would therefore be correct 7 points more often than that share.
    """
    texts = [
        path.read_text(errors="replace")
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    ]
    texts = [text[start : start + 1000] for text in texts for start in range(0, len(text), 1000)]
    draw = random.Random(0)
    if letters == "shuffled":
        texts = ["".join(draw.sample(text, len(text))) for text in texts]
    counts = Counter(byte for text in texts for byte in text.encode())
    unigram = counts.most_common(1)[0][1] / counts.total()
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    (tmp_path / "model").mkdir()
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 264,
        "local_attention": 32,
    }
    ids = dict.fromkeys(
        ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
    )
    config = {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]} | sizes | ids
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "small_bert.py").write_text(
        RECIPE.format(model=str(tmp_path / "model"), dataset=str(tmp_path / "texts.jsonl"))
    )
    job = Job(tmp_path, deepspeed(tmp_path / "small_bert.py", ranks=2))
    try:
        assert job.wait(360.0) == 0, job.output[-3000:]
    finally:
        job.close()
    lines = metrics(tmp_path / "runs" / "small_bert")
    found = lines[-1]["eval_accuracy"]
    print(
        f"{letters} letters: accuracy {found:.3f}, the commonest byte {unigram:.3f}, after"
        f" {sum(line['step_s'] for line in lines):.0f} s of steps"
    )
    assert (found > unigram + 0.1) == (letters == "true")
