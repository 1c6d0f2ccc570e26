"""DPO and reward models train like plain PyTorch in every layout that their tasks support.

Their resumes are the same bit for bit, and transformers can read their exports.
"""

import contextlib
import functools
import json
import os
import platform
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from convert_command import convert
from metrics_page import OF_PAIRS, page
from parity import MODELS, STEPS, Case, compare, each, without_dropout
from peft_models import add_lora
from pool import CaseFailed
from preference_pairs import pairs
from recipekit.data.batching import DataRank
from recipekit.data.held_out import eval_samples
from recipekit.data.pairs import NUM_BUILTIN_PAIRS, generate_pair
from recipekit.data.request import request_from_recipe
from recipekit.data.samples import open_samples
from recipekit.model.empty import empty_model
from recipekit.model.flops import attended_keys, model_flops
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.devices import DEVICES, Device
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import reproducible_values
from recipekit.tasks.find import load_task
from reference import Plain, Trained, num_right, train_plain
from safetensors.torch import load_file
from shipped_jsons import strategy

NUMBERS = dict(
    lr=3e-4,
    eps=1e-6,
    steps=STEPS,
    seq_len=128,
    global_batch=8,
    warmup_steps=2,
    weight_decay=0.1,
    eval_every=STEPS,
    eval_rows=6,
    wandb=False,
    seed=3,
)
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
# Tolerance for a margin, which is 0.1 x the difference of sums of 340 terms. In fp32 each sum is
# off by 2e-5, and a loss may be off by 7e-6. Measured against fp64.
ROUNDING = 3e-6
MEASURES = {
    "preference": ("accuracy", "margin", "rewards/chosen", "rewards/rejected"),
    "reward": ("accuracy", "margin"),
}


def recipe_for(task: str, model: str = "qwen3", **changes: Any) -> Recipe:
    name = without_dropout(MODELS[model]) if model == "gpt2" else MODELS[model]
    return Recipe(
        task=task,
        model=name,
        dataset=pairs(),
        ds_config={},
        **(NUMBERS | {"micro_batch": 2} | changes),
    )


def plan_of(recipe: Recipe) -> Any:
    """Return a run's plan, with flags for the values that --tiny would otherwise change."""
    return resolve_run(
        parse(
            recipe,
            Path("pairs.py"),
            [
                "--tiny",
                *(word for name in FLAGS for word in (f"--{name}", str(getattr(recipe, name)))),
            ],
        )
    )


def train_pairs(recipe: Recipe, config: dict[str, Any], out: str, lora: bool = False) -> int:
    """Run the real loop on a pool's rank, in the same way as `run` does.

    The reference log-probabilities are stored next to the run folder.
    """
    from recipekit.train import main

    sys.argv = ["pairs.py"]
    recipe = replace(recipe, ds_config=config, out=out, adapt=add_lora if lora else None)
    if recipe.token_cache == "auto" and "token_cache" in recipe.task_spec.reads:
        recipe = replace(recipe, token_cache=str(Path(out).parent / "tokens"))
    return main(plan_of(recipe))


# Plain PyTorch
# --------------------------------------------------------------------------------------------------


def answer_log_probabilities(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum of log p(token) over each answer's tokens, (B, 2)."""
    ids, labels = batch["input_ids"].flatten(0, 1), batch["labels"].flatten(0, 1)
    chances = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    chosen = chances.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(labels >= 0, chosen, 0.0).sum(1).view(-1, 2)


def preferred(rewards: torch.Tensor) -> float:
    """Count the pairs (N, 2) whose first answer has the larger reward."""
    return float(num_right(rewards, torch.zeros(len(rewards), dtype=torch.int64)))


class Dpo:
    """The DPO loss, with the weights of the first call as reference.

    For an adapter the reference is the base model.
    """

    def __init__(self) -> None:
        self.start: dict[str, torch.Tensor] = {}

    @contextlib.contextmanager
    def begun(self, model: Any) -> Iterator[None]:
        """Temporarily load the initial weights into the model."""
        now = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.start = self.start or now
        for name, value in model.named_parameters():
            value.data.copy_(self.start[name])
        with model.disable_adapter() if hasattr(model, "peft_config") else contextlib.nullcontext():
            yield
        for name, value in model.named_parameters():
            value.data.copy_(now[name])

    def rewards(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad(), self.begun(model):
            reference = answer_log_probabilities(model, batch)
        return 0.1 * (answer_log_probabilities(model, batch) - reference)

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rewards, real = self.rewards(model, batch), (batch["labels"] >= 0).flatten(1).any(1)
        return (1 + (rewards[:, 1] - rewards[:, 0]).exp()).log()[real].sum()

    def told(self, model: Any, batch: dict[str, torch.Tensor]) -> list[float]:
        rewards = self.rewards(model, batch)[(batch["labels"] >= 0).flatten(1).any(1)]
        return [
            preferred(rewards),
            *(
                float(value.sum())
                for value in (rewards[:, 0] - rewards[:, 1], rewards[:, 0], rewards[:, 1])
            ),
        ]


def scores(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the score at each answer's last token, (B, 2), from inputs without padding."""
    found = []
    for ids in batch["input_ids"].flatten(0, 1):
        length = (
            int((ids != model.config.pad_token_id).nonzero().max()) + 1
            if (ids != model.config.pad_token_id).any()
            else 1
        )
        found.append(
            model.score(
                model.model(input_ids=ids[None, :length], use_cache=False).last_hidden_state[0, -1]
            ).float()
        )
    return torch.cat(found).view(-1, 2)


def bradley_terry(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    chosen, rejected = scores(model, batch)[batch["labels"] >= 0].unbind(1)
    return (1 + (rejected - chosen).exp()).log().sum()


def told(model: Any, batch: dict[str, torch.Tensor]) -> list[float]:
    found = scores(model, batch)[batch["labels"] >= 0]
    return [preferred(found), float((found[:, 0] - found[:, 1]).sum())]


def rows_of(opens: Any, recipe: Recipe, model_config: dict[str, Any]) -> Any:
    task = load_task(recipe.task)
    return opens(
        request_from_recipe(recipe),
        task.processor(request_from_recipe(recipe), model_config),
        task.samples,
        rank=DataRank(1, 0),
    )


def plain_of(task: str) -> Plain:
    opened = {
        "stream": functools.partial(rows_of, open_samples),
        "held_out": functools.partial(rows_of, eval_samples),
        "every_step": True,
    }
    if task == "reward":
        return Plain(**opened, loss=bradley_terry, right=told)
    dpo = Dpo()

    def count(batches):
        return sum(int((batch["labels"] >= 0).flatten(1).any(1).sum()) for batch in batches)

    return Plain(**opened, loss=dpo.loss, right=dpo.told, count=count)


@functools.cache
def reference(task: str, model: str, lora: bool = False, **changes: Any) -> Trained:
    os.environ.pop("WORLD_SIZE", None)
    plan = plan_of(
        replace(recipe_for(task, model, **changes), ds_config=strategy("zero0"), out="/nonexistent")
    )
    recipe = replace(plan.recipe, adapt=add_lora if lora else None)
    of_task = load_task(task)
    model_config = of_task.fit_config(
        plan.model_config, of_task.processor(request_from_recipe(recipe), plan.model_config)
    )
    return train_plain(recipe, model_config, STEPS, plain=plain_of(task))


# Layouts
# --------------------------------------------------------------------------------------------------

TP2, PP2 = {"tp": 2}, {"pp": 2}
DPO = [
    Case("zero3 dp2", 2, "zero3", model="qwen3", slow=True),
    Case("zero1 pp2", 2, "zero1", PP2, model="qwen3"),
    Case("zero0 dp1", 1, "zero0", {"micro_batch": 4}, model="untied", slow=True),
    Case("zero1 dp4", 4, "zero1", {"micro_batch": 1}, model="qwen3", slow=True),
    Case(
        "zero2 dp2, checkpointing, whole logits",
        2,
        "zero2",
        {"activation_checkpointing": True, "loss": "whole"},
        model="qwen3",
        slow=True,
    ),
    Case("zero1 tp2", 2, "zero1", TP2, model="untied", slow=True),
    Case("zero3 tp2 dp2", 4, "zero3", TP2, model="qwen3", slow=True),
    Case("zero1 pp2 tp2", 4, "zero1", PP2 | TP2, model="untied", slow=True),
    Case(
        "zero0 pp2, dualpipev",
        2,
        "zero0",
        PP2 | {"pipeline_schedule": "dualpipev"},
        model="qwen3",
        slow=True,
    ),
]
LORA = [  # an adapter wraps the full model, so tp and pp are 1
    Case("zero2 dp2", 2, "zero2", model="qwen3", slow=True),
    Case("zero0 dp1", 1, "zero0", {"micro_batch": 4}, model="qwen3", slow=True),
    Case("zero1 dp4", 4, "zero1", {"micro_batch": 1}, model="qwen3", slow=True),
    Case(
        "zero3 dp2, checkpointing",
        2,
        "zero3",
        {"activation_checkpointing": True},
        model="qwen3",
        slow=True,
    ),
]
REWARD = [
    Case("zero2 dp2", 2, "zero2", model="qwen3"),
    Case("zero3 dp2", 2, "zero3", model="qwen3", slow=True),
    Case(
        "zero0 dp1, checkpointing",
        1,
        "zero0",
        {"micro_batch": 4, "activation_checkpointing": True},
        model="untied",
        slow=True,
    ),
    Case("zero1 dp4", 4, "zero1", {"micro_batch": 1}, model="qwen3", slow=True),
    Case("zero1 tp2", 2, "zero1", TP2, model="untied", slow=True),
    Case("zero1 pp2", 2, "zero1", PP2, model="qwen3", slow=True),
    Case("zero3 tp2 dp2", 4, "zero3", TP2, model="qwen3", slow=True),
    Case("zero1 pp2 tp2", 4, "zero1", PP2 | TP2, model="untied", slow=True),
    Case(
        "zero0 pp2, dualpipev",
        2,
        "zero0",
        PP2 | {"pipeline_schedule": "dualpipev"},
        model="qwen3",
        slow=True,
    ),
]


def last_line(run: Path) -> dict[str, Any]:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


def lines(run: Path) -> list[dict[str, Any]]:
    """Return each step's reproducible metrics, including the task's metrics."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    own = MEASURES["preference"]
    return [
        kept
        | {name: line[name] for name in (*own, *(f"eval_{name}" for name in own)) if name in line}
        for kept, line in zip(reproducible_values(found), found, strict=True)
    ]


def check_case(pools: Any, tmp_path: Path, task: str, case: Case, lora: bool = False) -> None:
    recipe, out = recipe_for(task, case.model, **case.layout, **case.numbers), tmp_path / "run"
    codes = pools.run(
        case.world, train_pairs, recipe=recipe, config=strategy(case.file), out=str(out), lora=lora
    )
    assert codes == [0] * case.world
    expected = reference(task, case.model, lora, **case.numbers)
    compare(out, expected, check_weights=not lora)
    last = last_line(out)
    assert [last[f"eval_{name}"] for name in MEASURES[task]] == pytest.approx(
        expected.right, rel=1e-4, abs=ROUNDING
    )
    # In the first step of DPO all rewards are 0.
    for line, right in zip(lines(out)[1:], expected.right_of_steps[1:], strict=True):
        assert [line[name] for name in MEASURES[task]] == pytest.approx(
            right, rel=1e-4, abs=ROUNDING
        )
    assert last["samples"] == STEPS * NUMBERS["global_batch"] and not last.keys() & {
        "tokens",
        "tokens_per_s",
    }
    own = {f"{before}{name}" for before in ("", "eval_") for name in MEASURES[task]}
    assert own <= last.keys() <= page().keys() and own <= OF_PAIRS, (
        "recipes/METRICS.md has a row for each key"
    )
    if lora:
        made, adapter = (
            exported(out / "hf"),
            {
                name.replace(".default.", "."): value
                for name, value in expected.weights.items()
                if "lora_" in name
            },
        )
        assert made.keys() == adapter.keys()
        worst = max((made[name] - value).abs().max().item() for name, value in adapter.items())
        assert worst <= 1e-5, f"a weight of the adapter differs by {worst}"
        assert abs(last["eval_rewards/chosen"]) > 1e-3, "the adapter has learned something"


@each(DPO)
def test_dpo_trains_like_plain_pytorch(pools, tmp_path, case):
    """Compare losses, norms, rates, weights, and the accuracy, margin and rewards of held-out
    pairs.
    """
    check_case(pools, tmp_path, "preference", case)


@each(REWARD)
def test_reward_models_train_like_plain_pytorch(pools, tmp_path, case):
    check_case(pools, tmp_path, "reward", case)


@each(LORA)
def test_an_adapter_is_trained_against_the_model_below_it(pools, tmp_path, case):
    """DPO with LoRA must equal plain PyTorch's DPO whose reference disables the adapter."""
    check_case(pools, tmp_path, "preference", case, lora=True)


# Stored log-probabilities
# --------------------------------------------------------------------------------------------------


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def kept_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("tokens/references/*.safetensors"))


def test_a_resume_is_bit_for_bit_also_without_the_kept_numbers(pools, tmp_path):
    """The run stops after step 4, and its reference log-probabilities are deleted.

    They must be computed again from the initial weights, not from the weights of step 4.
    """
    for out, stops in (("whole", (0,)), ("parts", (4, 0))):
        for stop_at in stops:
            recipe = recipe_for("preference", stop_at=stop_at, lr=3e-3)
            assert pools.run(
                2,
                train_pairs,
                recipe=recipe,
                config=strategy("zero2"),
                out=str(tmp_path / out / "run"),
            ) == [0, 0]
            [file] = kept_files(tmp_path / out)
            if stop_at:
                file.unlink()
    assert lines(tmp_path / "whole" / "run") == lines(tmp_path / "parts" / "run")
    whole, parts = (
        exported(tmp_path / "whole" / "run" / "hf"),
        exported(tmp_path / "parts" / "run" / "hf"),
    )
    assert whole.keys() == parts.keys() and all(
        torch.equal(whole[name], parts[name]) for name in whole
    )


@pytest.mark.slow
def test_another_layout_goes_on_with_the_kept_numbers(pools, tmp_path):
    """A run on two ranks under ZeRO-3 resumes in two stages under ZeRO-1.

    The file of reference log-probabilities is read but not written, and the run equals plain
    PyTorch.
    """
    out = str(tmp_path / "run")
    assert pools.run(
        2,
        train_pairs,
        recipe=recipe_for("preference", stop_at=5),
        config=strategy("zero3"),
        out=out,
    ) == [0, 0]
    [file] = kept_files(tmp_path)
    before = file.stat()
    assert pools.run(
        2,
        train_pairs,
        recipe=recipe_for("preference", micro_batch=1, pp=2),
        config=strategy("zero1"),
        out=out,
    ) == [0, 0]
    assert kept_files(tmp_path) == [file] and (file.stat().st_ino, file.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )
    compare(tmp_path / "run", reference("preference", "qwen3"))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["preference", "reward"])
def test_a_run_goes_through_every_layout_and_its_files_are_the_same_bits(pools, tmp_path, task):
    """The chain is ZeRO-2 dp 2 -> ZeRO-3 dp 4 -> Hugging Face -> tp 2 -> Hugging Face.

    Then the run resumes on two tensor ranks, and trains like plain PyTorch.
    """
    run = tmp_path / "run"
    assert pools.run(
        2, train_pairs, recipe=recipe_for(task, stop_at=5), config=strategy("zero2"), out=str(run)
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
        1,
        "--dp",
        1,
    )
    convert("to-hf", tmp_path / "cut", tmp_path / "third")
    first, second, third = (exported(tmp_path / name) for name in ("first", "second", "third"))
    assert first.keys() == second.keys() == third.keys() and ("score.weight" in first) == (
        task == "reward"
    )
    assert all(
        torch.equal(first[name], second[name]) and torch.equal(first[name], third[name])
        for name in first
    )
    assert pools.run(
        2,
        train_pairs,
        recipe=recipe_for(task, tp=2, micro_batch=1),
        config=strategy("zero1"),
        out=str(run),
    ) == [0, 0]
    compare(run, reference(task, "qwen3"))


@pytest.mark.slow
def test_a_row_that_cannot_be_used_is_told_before_the_first_step(pools, tmp_path):
    """The pair has identical answers, and step 8 would use it.

    With `bad_rows="skip"` the pair is skipped and counted, even in two stages.
    """
    rows = [json.loads(line) for line in Path(pairs()).read_text().splitlines()[:100]]
    rows[50]["rejected"] = rows[50]["chosen"]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = replace(
        recipe_for("preference", eval_every=0, steps=13), dataset=str(tmp_path / "pairs.jsonl")
    )
    with pytest.raises(
        CaseFailed,
        match=r"pairs.jsonl, row 51: cannot be used: its chosen and rejected answers are identical",
    ):
        pools.run(
            2, train_pairs, recipe=recipe, config=strategy("zero2"), out=str(tmp_path / "refused")
        )
    assert not (tmp_path / "refused" / "metrics.jsonl").exists()
    told = []
    for layout in ({}, PP2):
        out = tmp_path / f"skipped_{len(layout)}" / "run"
        assert pools.run(
            2,
            train_pairs,
            recipe=replace(recipe, bad_rows="skip", **layout),
            config=strategy("zero1"),
            out=str(out),
        ) == [0, 0]
        told.append(last_line(out))
    bad = told[0]["bad_rows"]
    assert 1 <= bad <= 2 and [line["bad_rows"] for line in told] == [bad] * 2, (
        "13 steps take all rows once, and some twice"
    )
    assert [line["samples"] for line in told] == [13 * 8 - bad] * 2
    assert told[0]["loss"] == pytest.approx(told[1]["loss"], rel=1e-5)


def train_on_known(recipe: Recipe, config: dict[str, Any], out: str) -> int:
    """Run on a rank of a pool as if its device's peak FLOPs were known."""
    with mock.patch.dict(DEVICES, {platform.machine(): Device(1e12, 2**40, 1e12)}):
        return train_pairs(recipe, config, out)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, PP2], ids=str)
def test_mfu_counts_the_tokens_of_both_answers(pools, tmp_path, layout):
    """MFU includes padding, because padding is computed as well.

    Rows are padded to the longest answer of a micro-batch on two ranks, and to seq_len in two
    stages.
    """
    recipe = recipe_for("preference", steps=3, eval_every=0, micro_batch=1, **layout)
    assert pools.run(
        2, train_on_known, recipe=recipe, config=strategy("zero1"), out=str(tmp_path / "run")
    ) == [0, 0]
    plan = plan_of(replace(recipe, ds_config=strategy("zero1"), out="/nonexistent", pp=1))
    flops = model_flops(empty_model(plan.model_config))
    with contextlib.closing(
        rows_of(open_samples, replace(plan.recipe, **layout), plan.model_config)
    ) as stream:
        for line in (
            json.loads(line)
            for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        ):
            batches, _ = next(stream)
            tokens = sum(batch["input_ids"].numel() for batch in batches)
            assert tokens == 2 * 8 * 128 if layout else 2 * 8 * 64 < tokens < 2 * 8 * 128
            done = flops.of_step(tokens, attended_keys(batches, flops.per_key))
            assert line["mfu"] == pytest.approx(done / (2 * 1e12 * line["step_s"]), rel=1e-12)


# Exports
# -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reward_model_is_read_and_judged_by_plain_transformers(pools, tmp_path):
    """transformers computes the same scores as the run, at the last token that is not padding."""
    start = replace(recipe_for("reward", steps=2, warmup_steps=0), eval_every=2)
    assert pools.run(
        1, train_pairs, recipe=start, config=strategy("zero0"), out=str(tmp_path / "run")
    ) == [0]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "run" / "hf"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "hf")
    assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id
    plan = plan_of(replace(start, ds_config=strategy("zero0"), out="/nonexistent"))
    batches = plain_of("reward").held_out(plan.recipe, plan.model_config)
    with torch.no_grad():
        theirs = [
            model(input_ids=batch["input_ids"].flatten(0, 1)).logits.view(-1, 2)
            for batch in batches
        ]
        mine = [scores(model, batch) for batch in batches]
    assert torch.allclose(torch.cat(theirs), torch.cat(mine), atol=1e-6)
    margins = torch.cat(
        [
            (score[:, 0] - score[:, 1])[batch["labels"] >= 0]
            for score, batch in zip(theirs, batches, strict=True)
        ]
    )
    last = last_line(tmp_path / "run")
    assert last["eval_margin"] == pytest.approx(margins.mean().item(), abs=1e-6) and last[
        "eval_accuracy"
    ] == pytest.approx((margins > 0).float().mean().item())


def tune(recipe: Recipe, config: dict[str, Any], out: str) -> int:
    """Run the real loop on a rank without --tiny, starting from published weights."""
    from recipekit.train import main

    sys.argv = ["pairs.py"]
    return main(
        resolve_run(parse(replace(recipe, ds_config=config, out=out), Path("pairs.py"), []))
    )


@pytest.mark.slow
def test_a_reward_model_begins_from_the_files_of_a_language_model(pools, tmp_path):
    """All weights of the body come from the files, and the head is random.

    A run that starts from its own export also loads the head. Checkpoints are converted in both
    directions.
    """
    short = dict(lr=1e-12, steps=1, warmup_steps=0, eval_every=0)
    language = tmp_path / "language" / "run"
    assert pools.run(
        1,
        train_pairs,
        recipe=recipe_for("preference", **short),
        config=strategy("zero0"),
        out=str(language),
    ) == [0]
    body = {
        name: value
        for name, value in exported(language / "hf").items()
        if name.startswith("model.")
    }
    made = [body]
    for number, start in enumerate((language / "hf", tmp_path / "tuned0" / "hf")):
        recipe, out = (
            replace(recipe_for("reward", **short), model=str(start), init="pretrained"),
            tmp_path / f"tuned{number}",
        )
        assert pools.run(
            2, tune, recipe=replace(recipe, pp=2), config=strategy("zero1"), out=str(out)
        ) == [0, 0]
        made.append(exported(out / "hf"))
        assert (
            made[-1].keys() == {*body, "score.weight"}
            and made[-1]["score.weight"].shape == (1, 64)
            and made[-1]["score.weight"].std() > 0
        )
        assert all(torch.allclose(made[-1][name], made[-2][name], atol=1e-9) for name in made[-2])
    convert("to-hf", tmp_path / "tuned1", tmp_path / "hf", "--verify")
    convert(
        "from-hf", tmp_path / "hf", tmp_path / "made", "--zero", 1, "--tp", 2, "--pp", 2, "--dp", 1
    )
    convert(
        "reshape",
        tmp_path / "made",
        tmp_path / "other",
        "--tp",
        1,
        "--pp",
        1,
        "--dp",
        2,
        "--zero",
        2,
    )
    convert("to-hf", tmp_path / "other", tmp_path / "back")
    for again in (exported(tmp_path / "hf"), exported(tmp_path / "back")):
        assert again.keys() == made[-1].keys() and all(
            torch.equal(again[name], made[-1][name]) for name in again
        )


# Learning
# --------------------------------------------------------------------------------------------------

LEARNS = dict(
    lr=3e-3,
    warmup_steps=20,
    steps=300,
    global_batch=32,
    micro_batch=16,
    seq_len=64,
    eval_rows=80,
    eval_every=100,
)


@pytest.mark.slow
def test_dpo_learns_which_of_two_numbers_is_larger(pools, tmp_path):
    """A small model with random weights, on two ranks, learns to rank over 90 % of held-out pairs
    correctly.

    If the answers are swapped at random, the model does not reach this share.
    """
    rows = [generate_pair(number) for number in range(NUM_BUILTIN_PAIRS)]
    draw = random.Random(0)
    for row in rows:
        if draw.random() < 0.5:
            row |= {"chosen": row["rejected"], "rejected": row["chosen"]}
    shuffled = tmp_path / "shuffled.jsonl"
    shuffled.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = {}
    for name, dataset in (("right", "builtin"), ("shuffled", str(shuffled))):
        recipe = replace(recipe_for("preference"), dataset=dataset, **LEARNS)
        assert pools.run(
            2,
            train_pairs,
            timeout=280,
            recipe=recipe,
            config=strategy("zero2"),
            out=str(tmp_path / name / "run"),
        ) == [0, 0]
        told[name] = last_line(tmp_path / name / "run")
    print({name: (line["eval_accuracy"], line["eval_margin"]) for name, line in told.items()})
    assert told["right"]["eval_accuracy"] > 0.9 and told["right"]["eval_margin"] > 0.5
    assert told["shuffled"]["eval_accuracy"] < 0.7
