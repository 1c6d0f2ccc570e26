"""DPO and reward models train like plain PyTorch in every layout of their rows of facts, resume bit
for bit, and are exported as transformers reads them.
"""

import contextlib
import functools
import json
import os
import platform
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from pool import CaseFailed
from recipekit.data.held_out import eval_samples
from recipekit.data.lanes import DataRank
from recipekit.data.pairs import NUM_DRAWN, drawn
from recipekit.data.request import request_of
from recipekit.data.samples import open_samples
from recipekit.model.empty import empty_model
from recipekit.model.flops import keys_seen, model_flops
from recipekit.plan import make_plan
from recipekit.spec.command import parse
from recipekit.spec.devices import DEVICES, Device
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import numbers
from recipekit.tasks.find import task_called
from reference import Plain, Trained, num_right, train_plain
from safetensors.torch import load_file
from test_export import add_lora
from test_images import convert
from test_metrics_page import OF_PAIRS, page
from test_parity import MODELS, STEPS, Case, compare, each, strategy, without_dropout

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
# of a margin: 0.1 x the difference of sums of 340, each 2e-5 off in fp32 (measured beside fp64; a
# loss may be 7e-6 off)
ROUNDING = 3e-6
MEASURES = {
    "preference": ("accuracy", "margin", "rewards/chosen", "rewards/rejected"),
    "reward": ("accuracy", "margin"),
}


@functools.cache
def pairs() -> str:
    """Pairs of every form whose answers have 1 to 60 letters, so that the micro-batches have other
    lengths.
    """
    draw = random.Random(0)

    def text(longest):
        return "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(1, longest)))

    rows = []
    for number in range(1200):
        question, chosen, rejected = text(30), text(60), f"{text(59)}."
        said = [[{"role": "assistant", "content": answer}] for answer in (chosen, rejected)]
        asked = [{"role": "user", "content": question[:20]}]
        forms = (
            (question, chosen, rejected),
            (asked, said[0][:1], said[1][:1]),
            (question[:20], asked + said[0], asked + said[1]),
        )
        rows.append(dict(zip(("prompt", "chosen", "rejected"), forms[number % 3], strict=True)))
    file = Path(tempfile.mkdtemp(prefix="pairs_")) / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


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
    """--tiny must not change the numbers of this test, so they are typed."""
    return make_plan(
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
    """Runs on every rank of a pool: the real loop, as `run` starts it, with the reference
    log-probabilities beside the run's folder.
    """
    from recipekit.train import main

    sys.argv = ["pairs.py"]
    recipe = replace(recipe, ds_config=config, out=out, adapt=add_lora if lora else None)
    if recipe.token_cache == "auto" and "token_cache" in recipe.facts.reads:
        recipe = replace(recipe, token_cache=str(Path(out).parent / "tokens"))
    return main(plan_of(recipe))


# Plain PyTorch
# --------------------------------------------------------------------------------------------------


def answer_log_probabilities(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Adds up log p(token) over the tokens of each answer, (B, 2)."""
    ids, labels = batch["input_ids"].flatten(0, 1), batch["labels"].flatten(0, 1)
    chances = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    chosen = chances.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(labels >= 0, chosen, 0.0).sum(1).view(-1, 2)


def preferred(rewards: torch.Tensor) -> float:
    """Counts the pairs (N, 2) whose first answer has the larger reward."""
    return float(num_right(rewards, torch.zeros(len(rewards), dtype=torch.int64)))


class Dpo:
    """The loss of DPO against the weights of the first call.

    For an adapter the reference is the model below it.
    """

    def __init__(self) -> None:
        self.start: dict[str, torch.Tensor] = {}

    @contextlib.contextmanager
    def begun(self, model: Any) -> Iterator[None]:
        """Gives the model the weights of the start for a while."""
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
    """Reads each answer alone, without padding, and takes what the head says at its last token, (B,
    2).
    """
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
    task = task_called(recipe.task)
    return opens(
        request_of(recipe),
        task.processor(request_of(recipe), model_config),
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
    of_task = task_called(task)
    model_config = of_task.configured(
        plan.model_config, of_task.processor(request_of(recipe), plan.model_config)
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
LORA = [  # an adapter goes round the whole model: no tp, no pp
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
    """The numbers of metrics.jsonl that training decides, those of the task among them."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    own = MEASURES["preference"]
    return [
        kept
        | {name: line[name] for name in (*own, *(f"eval_{name}" for name in own)) if name in line}
        for kept, line in zip(numbers(found), found, strict=True)
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
    # in the first step of DPO all rewards are 0
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
    """Losses, norms, learning rates, every weight, and accuracy, margin and rewards of held-out
    pairs.
    """
    check_case(pools, tmp_path, "preference", case)


@each(REWARD)
def test_reward_models_train_like_plain_pytorch(pools, tmp_path, case):
    check_case(pools, tmp_path, "reward", case)


@each(LORA)
def test_an_adapter_is_trained_against_the_model_below_it(pools, tmp_path, case):
    """DPO with LoRA is DPO of plain PyTorch, whose reference has the adapter switched off."""
    check_case(pools, tmp_path, "preference", case, lora=True)


# What is kept
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
    """Stopped after step 4.

    What the start said of the pairs is lost then: it is computed again from the start's weights,
    not from those of step 4.
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
    """From two ranks under ZeRO-3 to two stages under ZeRO-1: the file is read, not written, and
    the run is that of plain PyTorch.
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
    """ZeRO-2 dp 2 -> ZeRO-3 dp 4 -> Hugging Face -> tp 2 -> Hugging Face; then the run goes on on
    two tensor ranks, like plain PyTorch.
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
    """A pair of equal answers, which step 8 would meet; or it is left out and counted, the same in
    two stages.
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
    """Runs on every rank of a pool as if the peak of its device were known."""
    with mock.patch.dict(DEVICES, {platform.machine(): Device(1e12, 2**40, 1e12)}):
        return train_pairs(recipe, config, out)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, PP2], ids=str)
def test_mfu_counts_the_tokens_of_both_answers(pools, tmp_path, layout):
    """Padding included, which is computed: on two ranks that of the longest answer of a
    micro-batch, in two stages that up to seq_len.
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
            done = flops.of_step(tokens, keys_seen(batches, flops.per_key))
            assert line["mfu"] == pytest.approx(done / (2 * 1e12 * line["step_s"]), rel=1e-12)


# What is exported
# -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reward_model_is_read_and_judged_by_plain_transformers(pools, tmp_path):
    """Its numbers, at the last token that is no padding, are those of the run."""
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
    """Runs on every rank: the real loop without --tiny, from published weights."""
    from recipekit.train import main

    sys.argv = ["pairs.py"]
    return main(make_plan(parse(replace(recipe, ds_config=config, out=out), Path("pairs.py"), [])))


@pytest.mark.slow
def test_a_reward_model_begins_from_the_files_of_a_language_model(pools, tmp_path):
    """Every weight of its body is the files', and its head is drawn; from its own export it begins
    with the head, too.

    And so do checkpoints go both ways.
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
    """A small model, from drawn weights, on two ranks: over 90 % of held-out pairs; with answers
    that were exchanged at random it does not.
    """
    rows = [drawn(number) for number in range(NUM_DRAWN)]
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
