"""Heads that differ from the embedding although config.json ties the two.

They must stay separate, as in transformers.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from built_models import build_model
from published_models import FILE, HEADS, TIED, Tensors, config_json, folder_of, save_model
from recipekit.checkpoints.step_folder import LayoutChange, target_layout
from recipekit.convert.hugging_face import FolderChanges, from_hf, to_hf
from recipekit.model.describe import published_model
from recipekit.model.untied_head import config_of_files
from recipekit.parallel.blueprint import Layout, default_optimizer
from recipekit.plan import resolve_run
from recipekit.planner.dry_run import local_file_notes
from recipekit.planner.resolve import resolve_here
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh
from recipekit.spec.recipe import Recipe
from recipekit.spec.task_specs import TASKS
from safetensors.torch import load_file, save_file
from shipped_jsons import strategy
from tiny_models import ds_config

IDS = torch.arange(3, 35).view(2, 16)  # (B, T)


def logits_of(folder: str, auto_class: str = "AutoModelForCausalLM") -> torch.Tensor:
    """Return the logits that plain transformers computes from a folder's files, (B, T, V) fp32."""
    model = getattr(transformers, auto_class).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("llama", "pretrain"),
        ("gpt2", "pretrain"),
        ("bert", "masked_lm"),
        ("modernbert", "masked_lm"),
    ],
)
def test_a_head_of_its_own_is_read_as_transformers_reads_it(tmp_path, kind, task):
    """BERT's files contain the head's bias only under its second name."""
    auto_class = TASKS[task].auto_class
    folder = folder_of(tmp_path / "own", kind, task, **TIED)
    config, note = config_of_files(config_json(folder), folder, auto_class)
    head, embedding = HEADS[kind]
    assert (
        config["tie_word_embeddings"] is False
        and f"{head} differs from {embedding} in its files" in note
    )
    model = build_model(
        Recipe(model=folder, task=task), config, None, ds_config(0), torch.device("cpu")
    ).model.eval()
    with torch.no_grad():
        assert torch.allclose(
            model(input_ids=IDS).logits, logits_of(folder, auto_class), rtol=0, atol=1e-6
        )
    model.save_pretrained(tmp_path / "again")
    again = logits_of(str(tmp_path / "again"), auto_class)
    assert torch.allclose(again, logits_of(folder, auto_class), rtol=0, atol=1e-6)
    same = folder_of(tmp_path / "same", kind, task, own=False, **TIED)
    assert config_of_files(config_json(same), same, auto_class) == (config_json(same), "")
    tied = build_model(
        Recipe(model=same, task=task), config_json(same), None, ds_config(0), torch.device("cpu")
    ).model
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight


def test_one_value_in_the_last_part_is_enough(tmp_path, monkeypatch):
    from recipekit.model import weights

    monkeypatch.setattr(weights, "COMPARE_BLOCK_VALUES", 100)  # blocks of several rows
    folder = folder_of(tmp_path, **TIED)
    assert (
        config_of_files(config_json(folder), folder, "AutoModelForCausalLM")[0][
            "tie_word_embeddings"
        ]
        is False
    )


def test_files_that_change_are_read_again(tmp_path):
    for own in (False, True, False):
        folder = folder_of(tmp_path, own=own, **TIED)
        assert (
            config_of_files(config_json(folder), folder, "AutoModelForCausalLM")[0][
                "tie_word_embeddings"
            ]
            is not own
        )


def test_a_head_alone_is_the_embedding(tmp_path):
    """A tied model's files were saved with only the head's name."""
    save_model(
        tmp_path,
        "llama",
        tensors=lambda tensors: {
            key: value for key, value in tensors.items() if key != "model.embed_tokens.weight"
        },
        **TIED,
    )
    built = build_model(
        Recipe(model=str(tmp_path)),
        config_json(str(tmp_path)),
        None,
        ds_config(0),
        torch.device("cpu"),
    )
    with torch.no_grad():
        assert torch.allclose(
            built.model.eval()(input_ids=IDS).logits, logits_of(str(tmp_path)), rtol=0, atol=1e-6
        )


def test_a_head_of_another_shape_is_refused(tmp_path):
    save_model(
        tmp_path,
        "llama",
        tensors=lambda tensors: tensors | {"lm_head.weight": torch.ones(270, 32)},
        **TIED,
    )
    with pytest.raises(
        ConfigError, match=r"lm_head.weight is \[270, 32\] in its files but \[264, "
    ):
        build_model(
            Recipe(model=str(tmp_path)),
            config_json(str(tmp_path)),
            None,
            ds_config(0),
            torch.device("cpu"),
        )


def read_and_written(folder: str, out: str, stage: int, tp: int, pp: int) -> torch.Tensor | None:
    """Load a model in a layout, compute its logits, and export it.

    Return the logits, or None on a pipeline's first stage.
    """
    import deepspeed
    import torch.distributed as dist
    from recipekit.data.processors import byte_tokenizer
    from recipekit.model.export import WeightFormat, export
    from recipekit.model.small_files import Origin, collect_small_files
    from recipekit.optim.groups import parameter_groups
    from recipekit.parallel import pipeline
    from recipekit.parallel.groups import ProcessGroups
    from recipekit.spec.mesh import make_mesh

    world = dist.get_world_size()
    groups = ProcessGroups(make_mesh(world, tp=tp, pp=pp), "cpu")
    config, _ = config_of_files(config_json(folder), folder, "AutoModelForCausalLM")
    ds = ds_config(stage, world // pp, tp)
    built = build_model(Recipe(model=folder), config, groups, ds, torch.device("cpu"))
    model: Any = built.model.eval()
    inputs = IDS, torch.arange(IDS.shape[1]).expand_as(IDS)
    if pp > 1:
        assert built.model_plan.split is not None
        with torch.no_grad():
            sent = [list(model.forward(inputs)) if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(sent)
            logits = model.forward(tuple(sent[0])) if dist.get_rank() else None
        model = pipeline.build_pipeline_module(
            built.models,
            groups,
            lambda logits, labels: logits.sum(),
            "1f1b",
            built.model_plan.split.num_stages,
        )
        pipeline.tie_shared_params(model, groups)
    engine = deepspeed.initialize(
        model=model, model_parameters=parameter_groups(model), config=ds, mpu=groups.mpu
    )[0]
    if pp == 1:
        engine.eval()
        with torch.no_grad():
            logits = engine(
                input_ids=inputs[0], position_ids=inputs[1], use_cache=False
            ).logits.clone()
    small = collect_small_files(built, config, byte_tokenizer(), torch.float32, Origin(), ())
    export(engine, built, groups, small, Path(out), WeightFormat(torch.float32))
    engine.destroy()
    return logits


LAYOUTS = {"one rank": (0, 1, 1), "zero3": (3, 1, 1), "tp2": (0, 2, 1), "pp2": (0, 1, 2)}
FOLDERS = {"own head and extra keys": TIED, "untied": {"tie_word_embeddings": False}}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(
            layout, kind, marks=[pytest.mark.slow] * (kind == "untied" or layout == "one rank")
        )
        for kind in FOLDERS
        for layout in LAYOUTS
    ],
)
def test_logits_are_those_of_transformers_before_and_after(pools, tmp_path, layout, kind):
    folder = folder_of(tmp_path / "model", **FOLDERS[kind])
    extra = {
        "v_head.weight": torch.ones(4),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file(
        load_file(tmp_path / "model" / FILE) | extra,
        tmp_path / "model" / FILE,
        metadata={"format": "pt"},
    )
    stage, tp, pp = LAYOUTS[layout]
    expected = logits_of(folder)
    ranks = pools.run(
        1 if layout == "one rank" else 2,
        read_and_written,
        folder=folder,
        out=str(tmp_path / "hf"),
        stage=stage,
        tp=tp,
        pp=pp,
    )
    for logits in ranks[pp - 1 :]:
        assert torch.allclose(logits, expected, rtol=0, atol=1e-6), layout
    assert torch.allclose(logits_of(str(tmp_path / "hf")), expected, rtol=0, atol=1e-6)
    assert config_json(str(tmp_path / "hf"))["tie_word_embeddings"] is False


@pytest.mark.parametrize(("kind", "task"), [("llama", "pretrain"), ("bert", "masked_lm")])
def test_a_conversion_keeps_a_head_of_its_own(tmp_path, kind, task):
    """Files are converted to a step folder with a different layout and back.

    Plain transformers must then compute the same logits.
    """
    auto_class = TASKS[task].auto_class
    folder = Path(folder_of(tmp_path / "own", kind, task, **TIED))
    model = published_model(folder)
    (note,) = model.notes
    assert "differs from" in note
    start = Layout(Mesh(), 0, default_optimizer(0, "float32"), "float32")
    layout = target_layout(model.blueprint, start, LayoutChange(dp=2, zero=1), model.config)
    from_hf(
        folder,
        tmp_path / "step",
        model.blueprint,
        layout,
        changes=FolderChanges(model.config, model.copies),
    )
    to_hf(tmp_path / "step", tmp_path / "hf")
    assert config_json(str(tmp_path / "hf"))["tie_word_embeddings"] is False
    again, expected = (logits_of(str(path), auto_class) for path in (tmp_path / "hf", folder))
    assert torch.allclose(again, expected, rtol=0, atol=1e-6)


def test_a_dry_run_knows_the_head(tmp_path, monkeypatch):
    """The planned memory must include the head, and the notes must equal a start's notes."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    folder = folder_of(tmp_path, **TIED)
    save_file(
        load_file(tmp_path / FILE) | {"v_head.weight": torch.ones(4)},
        tmp_path / FILE,
        metadata={"format": "pt"},
    )
    recipe = Recipe(
        model=folder,
        tokenizer="bytes",
        ds_config=strategy("zero1"),
        out=str(tmp_path.with_name("run")),
        wandb=False,
    )
    plan = resolve_run(parse(recipe, Path("head.py"), []))
    model_plan, model = resolve_here(plan)
    blueprint = model_plan.blueprint
    assert (
        not blueprint.aliases
        and {"lm_head.weight", "model.embed_tokens.weight"} <= blueprint.trained.keys()
    )
    separate, unused = local_file_notes(plan, model)
    assert "lm_head.weight differs from model.embed_tokens.weight" in separate and unused.endswith(
        "is not used: v_head.weight"
    )


def run_main(recipe: Recipe, argv: list[str]) -> str:
    """Run on a rank of a pool; return the config error, or "" if the run completes."""
    from recipekit.train import main

    try:
        assert main(resolve_run(parse(recipe, Path("head.py"), argv))) == 0
    except ConfigError as error:
        return str(error)
    return ""


def recipe_of(folder: str, out: Path, **changes: Any) -> Recipe:
    small = {
        "seq_len": 32,
        "global_batch": 2,
        "micro_batch": 1,
        "steps": 2,
        "warmup_steps": 0,
        "lr": 1e-12,
        "save_every": 1,
        "wandb": False,
    }
    return Recipe(
        model=folder, dataset="builtin", tokenizer="bytes", out=str(out), **(small | changes)
    )


@pytest.mark.parametrize("layout", ["pp", pytest.param("tp", marks=pytest.mark.slow)])
def test_a_nan_that_one_rank_reads_ends_all(pools, tmp_path, layout):
    """The final norm is on the last stage. A matrix's last row is on the last tensor rank."""
    name = {"pp": "model.norm.weight", "tp": "model.layers.0.mlp.up_proj.weight"}[layout]

    def spoiled(tensors: Tensors) -> Tensors:
        tensors[name].view(-1)[-1] = float("nan")
        return tensors

    save_model(tmp_path / "model", "llama", tensors=spoiled)
    recipe = recipe_of(
        str(tmp_path / "model"), tmp_path / "run", ds_config=strategy("zero0"), **{layout: 2}
    )
    expected = (
        f"model = {tmp_path / 'model'}: {name} contains a NaN in its files. Use files that were"
        " saved before the run diverged or the values were cast"
    )
    assert pools.run(2, run_main, recipe=recipe, argv=[]) == [expected] * 2


RUNS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "zero1", {}),
    ("llama", "zero2", {}),
    ("llama", "", {"engine": "ddp", "precision": "fp32"}),
    ("llama", "", {"engine": "fsdp2", "precision": "fp32"}),
    ("mixtral", "zero2", {"ep": 2}),
    ("bert", "zero3", {"task": "masked_lm", "attention": "eager"}),
    ("bert", "", {"task": "masked_lm", "attention": "eager", "engine": "ddp", "precision": "fp32"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config", "changes"),
    RUNS,
    ids=["_".join(map(str, (kind, config, *more.values()))) for kind, config, more in RUNS],
)
def test_a_run_that_was_stopped_exports_a_head_of_its_own(pools, tmp_path, kind, config, changes):
    """The learning rate is too small to change weights, so the export has the same logits."""
    task = changes.get("task", "pretrain")
    auto_class = TASKS[task].auto_class
    folder = folder_of(tmp_path / "model", kind, task, **TIED)
    own = {"ds_config": strategy(config)} if config else {}
    recipe = recipe_of(folder, tmp_path / "run", **own, **changes)
    assert pools.run(2, run_main, recipe=recipe, argv=["--stop_at", "1"]) == ["", ""]
    assert pools.run(2, run_main, recipe=recipe, argv=[]) == ["", ""]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert torch.allclose(
        logits_of(str(tmp_path / "run" / "hf"), auto_class),
        logits_of(folder, auto_class),
        rtol=0,
        atol=1e-6,
    )
    assert config_json(str(tmp_path / "run" / "hf"))["tie_word_embeddings"] is False
