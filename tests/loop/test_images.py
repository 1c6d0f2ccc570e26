"""Image classifiers train like plain PyTorch in every layout that their task supports.

Their resumes are the same bit for bit, and transformers can read their exports.
"""

import functools
import io
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from convert_command import convert
from image_runs import (
    NUMBERS,
    PICTURES,
    exported,
    plan_of,
    recipe_for,
    right,
    summed_loss,
    train_images,
)
from metrics_page import OF_PICTURES, page
from parity import STEPS, Case, compare, each
from PIL import Image
from pool import CaseFailed
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import reproducible_values
from recipekit.tasks import image_classification
from reference import Trained, num_labels, train_plain
from shipped_jsons import strategy


@functools.cache
def reference(model: str, bf16: bool = False, **changes: Any) -> Trained:
    os.environ.pop("WORLD_SIZE", None)
    plan = plan_of(
        replace(recipe_for(model, **changes), ds_config=strategy("zero0", bf16), out="/nonexistent")
    )
    return train_plain(plan.recipe, plan.model_config, STEPS, bf16, PICTURES)


TP2, PP2 = {"tp": 2}, {"pp": 2}
CASES = [
    Case("vit zero0 dp1", 1, "zero0", {"micro_batch": 4}, model="vit"),
    Case("vit zero1 dp4", 4, "zero1", {"micro_batch": 1}, model="vit", slow=True),
    Case(
        "vit zero2 dp2, checkpointing", 2, "zero2", {"activation_checkpointing": True}, model="vit"
    ),
    Case("vit zero3 dp2", 2, "zero3", model="vit", slow=True),
    Case("vit zero1 tp2", 2, "zero1", TP2, model="vit"),
    Case("vit zero1 pp3", 3, "zero1", {"pp": 3}, model="vit", slow=True),
    Case("vit zero1 pp2 tp2", 4, "zero1", PP2 | TP2, model="vit", slow=True),
    Case("deit zero3 tp2", 2, "zero3", TP2, model="deit", slow=True),
    Case(
        "deit zero0 pp2, dualpipev",
        2,
        "zero0",
        PP2 | {"pipeline_schedule": "dualpipev", "micro_batch": 1},
        model="deit",
        slow=True,
    ),
    Case(
        "vit zero0 pp2 dp2, checkpointing",
        4,
        "zero0",
        PP2 | {"activation_checkpointing": True},
        model="vit",
        slow=True,
    ),
    Case("dinov2 zero2 dp2", 2, "zero2", model="dinov2", slow=True),
    Case("clip zero1 tp2", 2, "zero1", TP2, model="clip", slow=True),
    Case("dinov2 zero1 pp2", 2, "zero1", PP2, model="dinov2", slow=True),
    Case("siglip zero1 pp2", 2, "zero1", PP2, model="siglip", slow=True),
    Case("swin zero1 dp2", 2, "zero1", model="swin", slow=True),
    Case(
        "convnext zero3 dp2",
        2,
        "zero3",
        numbers={"attention": "eager"},
        model="convnext",
        slow=True,
    ),
]


@each(CASES)
def test_image_classifiers_train_like_plain_pytorch(pools, tmp_path, case):
    """Compare losses, norms, learning rates, all weights, and the accuracy on held-out images."""
    codes = pools.run(
        case.world,
        train_images,
        recipe=recipe_for(case.model, **case.layout, **case.numbers),
        config=strategy(case.file),
        out=str(tmp_path / "run"),
    )
    assert codes == [0] * case.world
    expected = reference(case.model, **case.numbers)
    compare(tmp_path / "run", expected)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert [last["eval_accuracy"], last["eval_top5_accuracy"]] == pytest.approx(expected.right)
    assert last["samples"] == STEPS * NUMBERS["global_batch"] and not last.keys() & {
        "tokens",
        "tokens_per_s",
    }
    assert last.keys() <= page().keys() and last.keys() >= OF_PICTURES, (
        "recipes/METRICS.md has a row for each key"
    )


@pytest.mark.slow
def test_a_published_plan_that_does_not_fit_its_layers_is_refused(pools, tmp_path):
    """Swin's position bias has one column per head, but the published plan does not shard it."""
    with pytest.raises(
        CaseFailed,
        match=(
            r"tp = 2: the code of .* fails when it is cut so \(RuntimeError: .*, in"
            r" swin\.modeling_swin\.forward\)"
        ),
    ):
        pools.run(
            2,
            train_images,
            recipe=recipe_for("swin", tp=2),
            config=strategy("zero1"),
            out=str(tmp_path / "run"),
        )
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


@pytest.mark.slow
def test_image_classifiers_train_like_plain_pytorch_in_bf16(pools, tmp_path):
    """In two stages, every loss is within 3 x the noise of the reference.

    The noise is the largest difference between single-process runs that differ only in how they
    split the batch.
    """
    recipe = recipe_for("vit", **PP2)
    assert pools.run(
        2,
        train_images,
        recipe=recipe,
        config=strategy("zero1", bf16=True),
        out=str(tmp_path / "run"),
    ) == [0, 0]
    plain = [
        reference("vit", bf16=True, micro_batch=micro_batch).losses for micro_batch in (8, 4, 2, 1)
    ]
    noise = max(max(step) - min(step) for step in zip(*plain, strict=True))
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    middle = [sum(step) / len(step) for step in zip(*plain, strict=True)]
    worst = max(abs(mine - theirs) for mine, theirs in zip(losses, middle, strict=True))
    print(f"worst difference {worst:.1e}, noise of the reference {noise:.1e}")
    assert 0 < noise < 0.05 and worst <= 3 * noise


@pytest.mark.slow
def test_a_mixture_of_pictures_tells_the_loss_of_each(pools, tmp_path):
    """Two stages and two data-parallel ranks report the same loss for each data set.

    The weighted mean of these losses is the loss of the mixture.
    """
    file = damaged(tmp_path, broken=())
    lines = []
    for layout in ({}, PP2):
        recipe = recipe_for("vit", dataset=f"file={file}@1; drawn=builtin@3", **layout)
        out = tmp_path / f"run{len(lines)}"
        assert pools.run(
            2, train_images, recipe=recipe, config=strategy("zero1"), out=str(out)
        ) == [0, 0]
        lines.append(
            [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        )
    for one, other in zip(*lines, strict=True):
        assert [one["loss/file"], one["loss/drawn"]] == pytest.approx(
            [other["loss/file"], other["loss/drawn"]], rel=1e-4
        )
        assert (
            one["samples/file"] + one["samples/drawn"] == one["samples"]
            and "tokens/file" not in one
        )
        assert one["loss/file"] / 4 + one["loss/drawn"] * 3 / 4 == pytest.approx(
            one["loss"], rel=1e-5
        )


@pytest.fixture(scope="module")
def stopped(pools, tmp_path_factory) -> Path:
    """Return a ViT run with pp = 2 and tp = 2 that stopped after step 5."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    assert (
        pools.run(
            4,
            train_images,
            recipe=recipe_for("vit", pp=2, tp=2, stop_at=5),
            config=strategy("zero1"),
            out=str(out),
        )
        == [0] * 4
    )
    return out


@pytest.mark.slow
def test_a_stopped_run_goes_on_in_another_layout(pools, tmp_path, stopped):
    """A run with pp = 2 and tp = 2 under ZeRO-1 resumes on two ranks under ZeRO-3.

    The images, losses and weights must be the same.
    """
    shutil.copytree(stopped, tmp_path / "run")
    assert pools.run(
        2,
        train_images,
        recipe=recipe_for("vit", micro_batch=1),
        config=strategy("zero3"),
        out=str(tmp_path / "run"),
    ) == [0, 0]
    compare(tmp_path / "run", reference("vit"))


def make_old(out: Path) -> None:
    """Change a run folder to the format used before November 2026.

    Its lines also contain `tokens`, and its run.json contains `checkpoint_every`.
    """
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [
        line | {"tokens": line["samples"], "tokens_per_s": line["samples_per_s"]} for line in lines
    ]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = json.loads((out / "run.json").read_text())
    facts["recipe"]["checkpoint_every"] = facts["recipe"].pop("recompute_every") or 1
    (out / "run.json").write_text(json.dumps(facts))


@pytest.mark.slow
def test_a_resume_is_bit_for_bit(pools, tmp_path):
    """The run stops after steps 3 and 7. Each step uses new random crops."""
    for out, stops in (("whole", (0,)), ("parts", (3, 7, 0))):
        for stop_at in stops:
            recipe = recipe_for("vit", stop_at=stop_at, threads=1 + stop_at % 3)
            assert pools.run(
                2, train_images, recipe=recipe, config=strategy("zero2"), out=str(tmp_path / out)
            ) == [0, 0]
            if stop_at == 3:
                make_old(tmp_path / out)
    lines = [
        [json.loads(line) for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]
        for out in ("whole", "parts")
    ]
    assert reproducible_values(lines[0]) == reproducible_values(lines[1])
    assert ["tokens" in line for line in lines[1]] == [
        number < 3 for number in range(STEPS)
    ] and not any("tokens" in line for line in lines[0])
    assert (
        f"{STEPS * NUMBERS['global_batch']} samples"
        in (tmp_path / "parts" / "summary.md").read_text()
    )
    whole, parts = exported(tmp_path / "whole" / "hf"), exported(tmp_path / "parts" / "hf")
    assert whole.keys() == parts.keys() and all(
        torch.equal(whole[name], parts[name]) for name in whole
    )


@pytest.mark.slow
def test_checkpoints_are_converted_both_ways(tmp_path, stopped):
    """Checkpoints are converted to Hugging Face files and other degrees, and back.

    One of the layouts has pp = 2 and tp = 2. All tensors must stay the same, bit for bit.
    """
    convert("to-hf", stopped, tmp_path / "hf", "--verify")
    first = exported(tmp_path / "hf")
    assert {tuple(first[name].shape) for name in first if name.endswith("cls_token")} == {
        (1, 1, 64)
    }
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
    last = exported(tmp_path / "back")
    assert first.keys() == last.keys() and all(
        torch.equal(first[name], last[name]) for name in first
    )


def test_what_is_exported_is_read_and_judged_by_plain_transformers(pools, tmp_path):
    """transformers computes the same loss and accuracy as the run reported.

    The exported image processor resizes and crops as the evaluation does.
    """
    recipe = recipe_for("vit")
    pools.run(1, train_images, recipe=recipe, config=strategy("zero0"), out=str(tmp_path / "run"))
    model = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / "run" / "hf"
    ).eval()
    assert "use_cache" not in json.loads((tmp_path / "run" / "hf" / "config.json").read_text())
    plan = plan_of(replace(recipe, ds_config=strategy("zero0"), out="/nonexistent"))
    batches = PICTURES.held_out(plan.recipe, plan.model_config)
    with torch.no_grad():
        loss = sum(summed_loss(model, batch).item() for batch in batches) / num_labels(batches)
        shares = [
            sum(counts) / num_labels(batches)
            for counts in zip(*(right(model, batch) for batch in batches), strict=True)
        ]
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert [last["eval_accuracy"], last["eval_top5_accuracy"]] == pytest.approx(shares)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "run" / "hf")
    assert processor.size["shortest_edge"] >= 32 and processor.crop_size["height"] == 32


def damaged(folder: Path, broken: tuple[int, ...] = (7, 123)) -> Path:
    """Write a Parquet file of 300 generated PNG images, and truncate the `broken` images."""
    rows = [image_classification.draw_shape_image(number) for number in range(300)]
    encoded = []
    for row in rows:
        buffer = io.BytesIO()
        Image.fromarray(row["image"]).save(buffer, "PNG")
        encoded.append(buffer.getvalue())
    for number in broken:
        encoded[number] = encoded[number][:200]
    pq.write_table(
        pa.table({"image": encoded, "label": [row["label"] for row in rows]}),
        folder / "pictures.parquet",
    )
    return folder / "pictures.parquet"


@pytest.mark.slow
def test_a_damaged_picture_is_named_or_counted(pools, tmp_path):
    """The run either stops before the image, with a checkpoint, or skips and counts the image.

    The count is the same in every layout. tests/data/test_samples.py checks the error message.
    """
    file = damaged(tmp_path)
    recipe = recipe_for("vit", dataset=str(file), steps=50, global_batch=8, eval_every=0)
    assert pools.run(
        2, train_images, recipe=recipe, config=strategy("zero1"), out=str(tmp_path / "stops")
    ) == [1, 1]
    steps = len((tmp_path / "stops" / "metrics.jsonl").read_text().splitlines())
    assert (
        0 < steps < 50
        and (tmp_path / "stops" / "checkpoints" / f"step_{steps:08}" / "manifest.json").exists()
    )
    last = []
    for world, layout in ((1, {}), (2, {"micro_batch": 1}), (2, {"pp": 2})):
        out = tmp_path / f"run_{len(last)}"
        pools.run(
            world,
            train_images,
            recipe=replace(recipe, bad_rows="skip", **layout),
            config=strategy("zero1"),
            out=str(out),
        )
        last.append(json.loads((out / "metrics.jsonl").read_text().splitlines()[-1]))
    assert [line["bad_rows"] for line in last] == [last[0]["bad_rows"]] * 3 and last[0][
        "bad_rows"
    ] >= 2
    assert [line["samples"] for line in last] == [50 * 8 - last[0]["bad_rows"]] * 3
    assert [line["loss"] for line in last] == pytest.approx([last[0]["loss"]] * 3, rel=1e-3)


def test_a_model_gets_a_head_for_other_classes(pools, tmp_path):
    """With --num_labels, all weights of the body come from the files, and the new head is random.

    The flag also works for files without a head. Without the flag, both cases are config errors.
    """
    start = recipe_for("vit", lr=1e-12, steps=1, warmup_steps=0, eval_every=0, global_batch=4)
    pools.run(1, train_images, recipe=start, config=strategy("zero0"), out=str(tmp_path / "run"))
    published, bare = tmp_path / "run" / "hf", tmp_path / "bare"
    transformers.ViTModel.from_pretrained(published, add_pooling_layer=False).save_pretrained(bare)
    body = {name: value for name, value in exported(published).items() if name.startswith("vit.")}
    tuned = replace(start, init="pretrained", num_labels=12)
    for folder in (published, bare):
        out = tmp_path / f"tuned_{folder.name}"
        assert pools.run(
            2,
            tune,
            recipe=replace(tuned, model=str(folder)),
            config=strategy("zero1"),
            out=str(out),
            flags=("--tp", "2"),
        ) == [0, 0]
        made = exported(out / "hf")
        assert made["classifier.weight"].shape == (12, 64) and made["classifier.weight"].std() > 0
        assert (
            all(torch.allclose(made[name], value, atol=1e-9) for name, value in body.items())
            and len(made) == len(body) + 2
        )
        convert("to-hf", out, tmp_path / f"converted_{folder.name}")
        again = exported(tmp_path / f"converted_{folder.name}")
        assert made.keys() == again.keys() and all(
            torch.equal(made[name], again[name]) for name in made
        )
    with pytest.raises(
        CaseFailed,
        match=(
            r"its files lack 2 of \d+ parameters, first classifier.*--num_labels N randomly"
            r" initialises a new head"
        ),
    ):
        pools.run(
            1,
            tune,
            recipe=replace(tuned, num_labels=0, model=str(bare)),
            config=strategy("zero0"),
            out=str(tmp_path / "refused"),
            flags=(),
        )


def tune(recipe: Recipe, config: dict[str, Any], out: str, flags: tuple[str, ...]) -> int:
    """Run the real loop on a rank without --tiny, starting from published weights."""
    from recipekit.train import main

    sys.argv = ["images.py"]
    return main(
        resolve_run(
            parse(replace(recipe, ds_config=config, out=out), Path("images.py"), list(flags))
        )
    )
