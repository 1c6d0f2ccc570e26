"""The support matrix: cells run, and failures are reported without ending the run.

recipes/SUPPORT.md must agree with a rerun.
"""

import json
import re
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest
from pool import ROOT, environment
from recipekit.architectures.lookup import BIDIRECTIONAL_FAMILIES

sys.path.insert(0, str(ROOT / "tools" / "make"))
import support_matrix

SUPPORT = (ROOT / "recipes" / "SUPPORT.md").read_text().partition("\n## Image classifiers\n")[0]
# A mixture of experts with attention sinks that trains in every layout, and a model whose rounding
# differences exceed the tolerance under tp.
SAMPLE = ["gpt_oss", "gemma4_text"]


def written() -> dict[str, dict[str, str]]:
    """Return the marks in SUPPORT.md: type -> layout -> mark."""
    rows: dict[str, dict[str, str]] = {}
    for line in SUPPORT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(support_matrix.LAYOUTS) + 3 and cells[1][:1] in ("✓", "✗"):
            rows[cells[0]] = dict(
                zip(support_matrix.LAYOUTS, (cell[0] for cell in cells[1:]), strict=False)
            )
    return rows


MADE = support_matrix.Made("torch 2.1, deepspeed 0.1, transformers 5.1", "2026-01-02")
PAGES = {
    "pretrain": support_matrix.page,
    "masked_lm": support_matrix.masked_page,
    "image_classification": support_matrix.image_page,
}


def rows_of(
    task: str, done: dict[str, support_matrix.Row], made: support_matrix.Made = MADE
) -> dict[str, support_matrix.PageRow]:
    return support_matrix.page_rows(task, done, dict.fromkeys(done, made))


def good(deviation: float) -> dict[str, object]:
    return {"ok": True, "loss": deviation, "grad_norm": deviation, "weight": deviation}


@pytest.mark.slow
def test_a_sample_of_the_written_marks_is_what_a_rerun_gives(ops, tmp_path):
    """A failed cell ends its process group, but the following cells must still run."""
    done = support_matrix.run_matrix(
        SAMPLE, ["tp2", "pp2"], tmp_path / "results.jsonl", say=print, cell_seconds=400
    )
    marks = {
        name: {layout: "✓" if done[name][layout]["ok"] else "✗" for layout in ("tp2", "pp2")}
        for name in SAMPLE
    }
    assert marks == {
        name: {layout: written()[name][layout] for layout in ("tp2", "pp2")} for name in SAMPLE
    }
    assert marks == {"gpt_oss": {"tp2": "✓", "pp2": "✓"}, "gemma4_text": {"tp2": "✓", "pp2": "✓"}}
    rounded = done["gemma4_text"]["tp2"]
    assert "differs: loss" in rounded["fp32"] and "fp32" not in done["gpt_oss"]["tp2"]
    assert max(rounded["loss"], rounded["grad_norm"], rounded["weight"]) < support_matrix.ROUNDED
    again = support_matrix.run_matrix(
        SAMPLE, ["tp2", "pp2"], tmp_path / "results.jsonl", say=pytest.fail
    )
    assert again == done, "finished cells are not run again"


def test_every_type_has_a_row_and_enough_of_them_pass():
    rows = written()
    types = support_matrix.model_types()
    planned = [name for name in types if support_matrix.publishes_pipeline_plan(name)]
    assert len(planned) >= 88 and set(planned) <= rows.keys()
    without_model = set(re.findall(r"^- ([a-z0-9_-]+), reference: ", SUPPORT, re.MULTILINE))
    assert not rows.keys() & without_model
    known = rows.keys() | without_model
    page_of = re.search(r"transformers ([\d.]+),", SUPPORT)
    assert page_of is not None
    if version("transformers") == page_of[1]:
        assert known == set(types)
    assert known >= set(types), "an older release has fewer types"
    assert not rows.keys() & (BIDIRECTIONAL_FAMILIES.keys() - {"reformer"}), (
        "they read ahead; Reformer's default config here is that of a decoder"
    )
    assert sum(row["zero3"] == "✓" for row in rows.values()) >= 152
    assert {name for name, row in rows.items() if row["ep2"] == "✓"} >= {
        "mixtral",
        "qwen3_moe",
        "deepseek_v3",
    }
    for layout in ("tp2", "pp2", "pp2 x tp2"):
        passed = sum(rows[name][layout] == "✓" for name in planned)
        assert passed >= 0.97 * len(planned), (layout, passed, len(planned))


def test_the_counts_agree_with_the_tables():
    """A merge rewrites the counts above the tables. README.md repeats two of them."""
    counts = {}
    for task in PAGES:
        text = support_matrix.page_of(task).read_text()
        rows = support_matrix.read_page(text)
        ran = [name for name in rows if rows[name].cells]
        for place, layout in enumerate(support_matrix.layouts_of(task)):
            count = support_matrix.passed(rows, ran, place)
            line = rf"^- {layout}: .*\b{count} of all {len(rows)}$"
            assert re.search(line, text, re.MULTILINE), (task, layout, count)
            counts[task, layout] = count
        counts[task, "all"] = len(rows)
    sentence = "of {} causal-LM types, tp works for {} and pp for {}"
    numbers = [counts["pretrain", name] for name in ("all", "tp2", "pp2")]
    assert sentence.format(*numbers) in (ROOT / "README.md").read_text()


def test_every_failure_has_its_reason():
    reasons = re.findall(r"^- ([a-z0-9_-]+), ([a-z0-9 ]+): (.+)$", SUPPORT, re.MULTILINE)
    told = {(name, layout) for name, layout, _ in reasons}
    assert told >= {
        (name, layout)
        for name, marks in written().items()
        for layout, mark in marks.items()
        if mark == "✗"
    }


def test_an_unknown_type_is_refused():
    import subprocess

    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "make" / "support_matrix.py", "--types", "llamma"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "not known to transformers: llamma" in done.stderr


def test_the_batches_of_a_task_are_those_that_its_models_take():
    """Images have the model's size.

    There are enough images that a batch normalisation over one pixel is well conditioned.
    """
    import torch

    texts = support_matrix.batches_of(
        "pretrain", support_matrix.tiny_model_config("pretrain", "llama"), 1
    )
    assert len(texts) == support_matrix.BATCHES and {
        batch["input_ids"].shape for batch in texts
    } == {(1, support_matrix.SEQ_LEN)}
    for model_type, rows in (("vit", 2), ("clip", 2), ("resnet", 16)):
        config = support_matrix.tiny_model_config("image_classification", model_type)
        recipe = support_matrix.recipe_of("image_classification", model_type)
        assert (recipe.micro_batch, recipe.global_batch) == (rows, 4 * rows)
        batches = support_matrix.batches_of("image_classification", config, rows)
        again = support_matrix.batches_of("image_classification", config, rows)
        assert [{name: tensor.shape for name, tensor in batch.items()} for batch in batches] == [
            {"pixel_values": (rows, 3, 32, 32), "labels": (rows,)}
        ] * 4
        assert all(
            torch.equal(batch[name], other[name])
            for batch, other in zip(batches, again, strict=True)
            for name in batch
        )
        assert all(
            0 <= label < config["num_labels"] == 10
            for batch in batches
            for label in batch["labels"]
        )
    assert config.get("drop_path_rate", 0.0) == 0.0


def test_only_models_with_a_batch_normalisation_are_made_smooth():
    from torch import nn

    for normed in (True, False):
        model = nn.Sequential(
            nn.Linear(2, 2),
            nn.BatchNorm1d(2) if normed else nn.LayerNorm(2),
            nn.Sequential(nn.ReLU(), nn.GELU()),
        )
        support_matrix.smooth(model)
        assert [type(module) for module in model[2]] == [nn.SiLU if normed else nn.ReLU, nn.GELU]


def test_image_classifiers_have_a_page_of_their_own():
    passed = good(2e-7)
    text = {"llama": {"reference": {"ok": True, "leak": 0.0, "experts": False}, "zero3": passed}}
    broken = {"reference": {"ok": False, "reason": "refused: --tiny: cannot shrink a cvt"}}
    no_plan = {
        "ok": False,
        "reason": (
            "refused: tp > 1 with SwinForImageClassification: this model publishes no"
            " base_model_tp_plan"
        ),
    }
    images = {
        "vit": {
            "reference": {"ok": True},
            "zero3": passed,
            "pp2": {"ok": False, "reason": "differs: loss 1.0e-03"},
        },
        "cvt": broken,
    }
    images["swin"] = {"reference": {"ok": True}, "zero3": passed, "tp2": no_plan}
    assert support_matrix.layouts_of("image_classification") == [
        "zero3",
        "tp2",
        "pp2",
        "pp2 x tp2",
    ] and "ep2" in support_matrix.layouts_of("pretrain")
    first = support_matrix.page(rows_of("pretrain", text))
    second = support_matrix.image_page(rows_of("image_classification", images))
    assert "| llama | ✓ 2e-07 |" in first and "vit" not in first
    assert (
        "| type | zero3 | tp2 | pp2 | pp2 x tp2 |\n" in second and "- zero3: 2 of all 3\n" in second
    )
    assert (
        "| vit | ✓ 2e-07 | not run | ✗ | not run |\n" in second
        and "| swin | ✓ 2e-07 | no plan | not run | not run |\n" in second
    )
    assert re.findall(r"^- (\w+, \w+): (.+)$", second, re.MULTILINE) == [
        ("cvt, reference", "`refused: --tiny: cannot shrink a cvt`"),
        ("vit, pp2", "`differs: loss 1.0e-03`"),
    ]


def test_the_page_of_masked_language_models_says_what_was_run():
    """Masked positions are random and contain the mask token, and only these positions have labels.

    A cell's micro-batches contain the document boundaries.
    """
    batches = support_matrix.batches_of(
        "masked_lm", support_matrix.tiny_model_config("masked_lm", "bert"), 1
    )
    for batch in batches:
        hidden = batch["labels"] != -100
        assert (
            0.1 < hidden.float().mean() < 0.5
            and (batch["input_ids"][hidden] == 1).all()
            and (batch["labels"][hidden] > 2).all()
        )
    assert all(
        "document_starts" in batch
        for batch in support_matrix.told_of_documents(batches, "masked_lm", "both_ways_sdpa")
    )
    assert all(
        "documents" in batch
        for batch in support_matrix.told_of_documents(batches, "masked_lm", "both_ways_varlen")
    )
    done = {
        "bert": {
            "reference": {
                "ok": True,
                "experts": False,
                "varlen": "it has attention dropout of 0.1",
            },
            "zero3": good(3e-7),
            "tp2": good(3e-7),
        },
        "fnet": {
            "reference": {
                "ok": False,
                "reason": "refused: attention = auto: does not keep the documents of a row apart",
            }
        },
    }
    text = support_matrix.masked_page(rows_of("masked_lm", done))
    assert (
        "| bert | ✓ 3e-07 | ✓ 3e-07 | not run | not run | ✗ |" in text
        and "- bert: `it has attention dropout of 0.1`" in text
    )
    assert (
        "- fnet, reference: `refused: attention = auto" in text
        and "| fnet |" not in text
        and "- zero3: 1 of all 2" in text
    )


def test_a_bf16_run_is_as_close_to_fp32_as_the_model_of_transformers():
    """tools/make/bf16_distance.py measures every type with parameters in fp32."""
    rows = re.findall(
        r"^\| ([a-z0-9_]+) \| \d+ \| ([\d.]+) \| ([\d.]+) \|$",
        SUPPORT.partition(support_matrix.BF16_SECTION)[2],
        re.MULTILINE,
    )
    assert {name for name, *_ in rows} >= {
        "bailing_hybrid",
        "beam",
        "deepseek_v4",
        "ernie4_5_moe",
        "flint",
        "hy_v4",
    }
    assert all(max(float(first), float(last)) <= 1.1 for _, first, last in rows)


def test_the_page_keeps_the_section_of_another_tool(tmp_path):
    page = tmp_path / "SUPPORT.md"
    page.write_text(f"# Page\n\n{support_matrix.BF16_SECTION}\n\n| row |\n")
    kept = support_matrix.bf16_section(page)
    assert kept == f"\n{support_matrix.BF16_SECTION}\n\n| row |\n"
    page.write_text("# Page\n")
    assert support_matrix.bf16_section(page) == ""


def test_rounding_needs_agreement_in_fp64_and_small_differences_in_fp32():
    near = {"loss": 1e-7, "grad_norm": 6.7e-5, "weight": 4.6e-5}
    exact = {"loss": 1e-8, "grad_norm": 2e-7, "weight": 1e-9}
    assert support_matrix.is_rounding(near, exact)
    for name in near:
        assert not support_matrix.is_rounding(near, exact | {name: 1.1e-6}), name
        assert not support_matrix.is_rounding(near, exact | {name: float("inf")}), name
        assert not support_matrix.is_rounding(near | {name: 1.1e-3}, exact), name


def test_a_deviation_that_is_not_a_number_is_the_largest():
    import torch

    nan = float("nan")
    steps = [{"loss": 1.0}, {"loss": nan}, {"loss": 1.0}]
    assert support_matrix.largest_ratio(steps, "loss", [1.0, 1.0, 1.1]) == float("inf")
    weights = [("a", torch.tensor([1.0, nan])), ("b", torch.tensor([3.0]))]
    expected = {"a": torch.ones(2), "b": torch.ones(1)}
    assert support_matrix.largest_difference(weights, expected) == (float("inf"), "a")


def test_a_mistake_is_no_rounding(tmp_path):
    """A gradient without the sum over two shards differs in fp64, although by little in fp32."""
    import torch

    plain = support_matrix.train_plain("pretrain", "llama", tmp_path)
    assert torch.tensor(1.0).float().dtype == torch.float32
    with support_matrix.fp64_for_fp32():
        folder = tmp_path / support_matrix.FP64
        exact, again, wrong = (trained(folder, missing) for missing in (False, False, True))
    assert torch.tensor(1.0).float().dtype == torch.float32 == torch.get_default_dtype()
    assert exact["weights"]["lm_head.weight"].dtype == torch.float64

    in_fp32, in_fp64 = difference(plain, exact), difference(again, exact)
    assert 0 < in_fp32["grad_norm"] < 1e-5 and in_fp64 == dict.fromkeys(in_fp64, 0.0)
    assert support_matrix.is_rounding(in_fp32, in_fp64)
    mistake = difference(wrong, exact)
    assert support_matrix.near(mistake) and not support_matrix.is_rounding(mistake, mistake)


def trained(folder, missing: bool):
    """Train Llama from the weights in `folder`. If `missing`, half of the gradient of the first
    norm's first weight is lost, as if tensor-parallel ranks did not add it.
    """
    import torch

    config = support_matrix.tiny_model_config("pretrain", "llama")
    recipe = support_matrix.plain_recipe("pretrain", "llama", config)
    recipe = replace(recipe, model=str(folder), init="pretrained")
    built = support_matrix.built_of(recipe, config, None, {})
    if missing:
        weight = built.model.model.layers[0].input_layernorm.weight
        weight.register_hook(lambda grad: torch.cat([grad[:1] / 2, grad[1:]]))
    batches = support_matrix.plain_batches(recipe, config, built)
    return support_matrix.train_in_one_process(recipe, built, batches)


def difference(got, expected):
    """Return the deviations of a training from another, as a cell measures them."""
    steps = [
        {"loss": loss, "grad_norm": norm}
        for loss, norm in zip(got["losses"], got["norms"], strict=True)
    ]
    weight, _ = support_matrix.largest_difference(got["weights"].items(), expected["weights"])
    return {
        "loss": support_matrix.largest_ratio(steps, "loss", expected["losses"]),
        "grad_norm": support_matrix.largest_ratio(steps, "grad_norm", expected["norms"]),
        "weight": weight,
    }


def test_a_page_gives_the_releases_of_each_row_and_is_read_back():
    differs = "differs: loss 1.0e-07, grad_norm 6.7e-05, weight 4.6e-05 (model.norm.weight)"
    new = support_matrix.Made("torch 2.1, deepspeed 0.1, transformers 5.2", "2026-01-03")
    reference = {"ok": True, "leak": 0.0, "experts": False, "varlen": ""}
    old = rows_of(
        "pretrain",
        {
            "llama": {"reference": reference, "zero3": good(2e-7)},
            "gemma": {"reference": reference | {"varlen": "a mask: " + "very long " * 20 + "end"}},
            "bert": {"reference": {"ok": False, "reason": f"a bert {support_matrix.AHEAD}"}},
        },
    )
    more = rows_of(
        "pretrain",
        {
            "gemma4_text": {
                "reference": reference,
                "zero3": good(3e-6) | {"varlen": differs},
                "tp2": good(2e-7) | {"fp32": differs},
                "pp2": {"ok": False, "reason": differs},
            }
        },
        made=new,
    )
    rows = old | more
    text = support_matrix.page(rows)
    told = text.replace("\n  ", " ")
    assert "transformers 5.2, 2026-01-03, for these types: gemma4_text. torch 2.1" in told
    assert "transformers 5.1, 2026-01-02, for all others." in told.replace("\n", " ")
    assert "| gemma4_text | ✓ 3e-06, sdpa | ✓ fp64 2e-07 | ✗ |" in text
    assert f"- gemma4_text, tp2: equal in fp64; in fp32: `{differs}`" in told
    assert "- tp2: 1 of the 3 types that publish a pipeline plan, 1 of all 4\n" in text
    assert support_matrix.read_page(f"{text}\n{support_matrix.BF16_SECTION}\n") == rows


@pytest.mark.parametrize("task", PAGES)
def test_a_page_of_the_project_is_read_back(task):
    """Rows that were not run again stay as they are."""
    text = support_matrix.page_of(task).read_text().partition(support_matrix.BF16_SECTION)[0]
    rows = support_matrix.read_page(text)
    if not rows.keys() <= set(support_matrix.model_types(task)):
        pytest.skip("the installed transformers lacks types of the page")
    assert PAGES[task](rows).strip() == text.strip()


def test_only_full_rows_of_results_go_into_a_page(tmp_path, monkeypatch, capsys):
    """The last line of the last file counts, and cells of different releases are not mixed."""
    page = tmp_path / "SUPPORT_IMAGES.md"
    reference = {"ok": True, "leak": None, "experts": False}
    layouts = support_matrix.layouts_of("image_classification")
    full = {"reference": reference, **dict.fromkeys(layouts, good(1e-7))}
    rows = rows_of("image_classification", dict.fromkeys(("vit", "beit", "swin", "gone"), full))
    page.write_text(support_matrix.image_page(rows))
    monkeypatch.setattr(support_matrix, "page_of", lambda task: page)

    def line(name: str, layout: str, result: object, releases: str) -> str:
        cell = {"task": "image_classification", "type": name, "layout": layout, "result": result}
        return json.dumps(cell | {"releases": releases, "date": "2026-01-04"}) + "\n"

    new = MADE.releases.replace("5.1", "5.2")
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    vit = full | {"tp2": {"ok": False, "reason": "differs: loss 1.0e-03"}}
    first.write_text("".join(line("vit", layout, vit[layout], new) for layout in vit))
    second.write_text(
        line("vit", "tp2", good(3e-7), new)
        + "".join(line("beit", layout, full[layout], MADE.releases) for layout in layouts)
        + line("beit", "reference", reference, new)
        + line("beit", "zero3", good(9e-7), new)
    )
    support_matrix.merge("image_classification", [first, second])
    said = capsys.readouterr().out
    assert "beit: not merged: tp2, pp2, pp2 x tp2 have no results\n" in said and "vit" not in said
    text = page.read_text()
    assert "| vit | ✓ 1e-07 | ✓ 3e-07 | ✓ 1e-07 | ✓ 1e-07 |\n" in text
    assert "| beit | ✓ 1e-07 | ✓ 1e-07 | ✓ 1e-07 | ✓ 1e-07 |\n" in text
    assert "| gone |" not in text and "- zero3: 3 of all 3\n" in text
    assert "5.2, 2026-01-04, for these types: vit." in text
    cells = support_matrix.Cells("image_classification", [first, second], new)
    assert cells.missing("beit", layouts) == ["tp2", "pp2", "pp2 x tp2"]
    assert cells.missing("vit", layouts) == []
