"""Parameters that transformers keeps in fp32 in bf16: kept in every engine that can keep them."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from built_models import plan_of
from job import metrics, reproducible_values
from recipekit.architectures import families
from recipekit.checkpoints.reshape import reshape
from recipekit.checkpoints.step_folder import LayoutChange, open_step, target_layout
from recipekit.engine.torch_engine import compute_in_fp32, fsdp2_sharder
from recipekit.model.describe import draft_blueprint
from recipekit.model.empty import empty_model
from recipekit.model.fp32_parameters import (
    Fp32Parameters,
    Fp32Request,
    choose_fp32_parameters,
    fp32_names,
)
from recipekit.parallel.blueprint import Blueprint, Layout, blueprint_in
from recipekit.parallel.groups import ProcessGroups
from recipekit.parallel.param_groups import ParamGroup, order_groups
from recipekit.plan import resolve_run
from recipekit.planner.dry_run import print_dry_run
from recipekit.planner.resolve import TargetDevice, resolve_model
from recipekit.runtime.engine import ModelInputs, build, make_engine, select_loss_path
from recipekit.runtime.epochs import Epochs
from recipekit.runtime.step_metrics import StepCounters, StepMetrics
from recipekit.spec.command import parse
from recipekit.spec.mesh import Mesh, make_mesh
from recipekit.spec.recipe import Recipe
from recipekit.storage import manifest
from recipekit.storage.file_map import expected_bytes
from recipekit.storage.step_files import CommonState
from recipekit.tasks import pretrain
from recipekit.tasks.find import load_task
from recipekit.train import pipeline_loss, train_step
from shipped_jsons import strategy
from short_runs import BASE, train
from tiny_models import build_model, ds_config
from torch.distributed.tensor import DTensor

slow = pytest.mark.slow
KINDS = ("bailing_hybrid", "beam", "deepseek_v4", "ernie4_5_moe", "flint", "hy_v4")
TORCH = ("ddp", "fsdp2")
SEQ_LEN = 32


@functools.cache
def config_of(kind: str) -> dict[str, Any]:
    return {**families.tiny_config(kind, 264)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that saves a type's tiny fp32 model, and returns its folder."""

    @functools.cache
    def save(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        recipe = Recipe(model="none", init="random", seed=5, attention="eager")
        cpu = torch.device("cpu")
        model = build_model(recipe, config_of(kind), None, ds_config(0), cpu).model
        model.save_pretrained(folder, save_original_format=False)
        return folder

    return save


@functools.cache
def kept_names(kind: str) -> frozenset[str]:
    return fp32_names(empty_model(config_of(kind), "eager", kind))


def load_in_bf16(folder: Path, attention: str = "eager") -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=attention
    )


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ("flint", "hy_v4") else slow) for kind in KINDS],
)
def test_the_names_are_what_transformers_keeps(folders, kind):
    plain = load_in_bf16(folders(kind))
    kept = {name for name, value in plain.named_parameters() if value.dtype == torch.float32}
    assert kept
    assert kept_names(kind) == kept


def batch_of(rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, 264, (1, SEQ_LEN), generator=generator)
    positions = torch.arange(SEQ_LEN).unsqueeze(0)
    return {"input_ids": ids, "labels": ids.roll(-1, 1), "position_ids": positions}


def json_of(stage: int, dp: int, offload: str = "none") -> dict[str, Any]:
    """Return the resolved JSON of a ZeRO stage in bf16."""
    zero: dict[str, Any] = {"stage": stage}
    if offload != "none":
        zero["offload_optimizer"] = {"device": offload}
    sums = {"data_types": {"grad_accum_dtype": "fp32"}} if stage else {}
    return (
        ds_config(stage)
        | sums
        | {
            "train_batch_size": 4,
            "gradient_accumulation_steps": 4 // dp,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "steps_per_print": None,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }
    )


def train_on_ranks(kind: str, folder: str, engine: str, degrees: dict[str, int]) -> dict[str, Any]:
    """Train two steps on each rank.

    `engine` is ddp, fsdp2 or zero0 to zero3. Return the losses, the dtype of each kept parameter in
    the forward pass, and the kept parameters with values that bf16 cannot represent.
    """
    torch.set_num_threads(1)
    recipe = Recipe(
        model=folder,
        init="pretrained",
        engine=engine if engine in TORCH else "deepspeed",
        precision="bf16",
        attention="eager",
        micro_batch=1,
        global_batch=4,
        seq_len=SEQ_LEN,
        **degrees,  # pyright: ignore[reportArgumentType]
    )
    mesh, cpu = make_mesh(2, **degrees), torch.device("cpu")
    config = json_of(0 if engine in TORCH else int(engine[4]), mesh.dp)
    plan = plan_of(recipe, config_of(kind), config, mesh)
    model_plan, whole = resolve_model(plan, config_of(kind), TargetDevice(cpu, "", False))
    groups, task = ProcessGroups(mesh, "cpu"), load_task("pretrain")
    inputs = ModelInputs(plan, model_plan, whole, None, Epochs(plan, {}), None)
    built = build(inputs, groups, cpu)
    task = select_loss_path(task, model_plan.loss_path, lambda line: None)
    loss = functools.partial(pipeline_loss, task, StepMetrics())
    made = make_engine(plan, built, groups, cpu, loss, lambda line: None)

    kept = kept_names(kind)
    seen, fine = dict[str, str](), list[str]()

    def look(name: str, module: Any, *given: Any) -> None:
        for key, value in module.named_parameters(recurse=False):
            if (whole_name := f"{name}.{key}") in kept:
                seen[whole_name] = str(value.dtype)

    for model in built.models:
        for name, module in model.named_modules():
            module.register_forward_hook(functools.partial(look, name))
    rows = 4 // mesh.dp
    batches = [batch_of(rows * groups.coords["dp"] + number) for number in range(rows)]
    losses = [train_step(made, task, batches, None, StepCounters(mesh))["loss"] for _ in range(2)]
    for model in built.models:
        for name, value in model.named_parameters():
            whole_value = value.full_tensor() if isinstance(value, DTensor) else value
            if name in kept and not torch.equal(
                whole_value, whole_value.bfloat16().to(whole_value.dtype)
            ):
                fine.append(name)
    made.destroy()
    return {"losses": losses, "seen": seen, "fine": fine, "note": model_plan.fp32.note}


def plain_loss(folder: Path) -> float:
    """Return the first loss of transformers' own bf16 model, which keeps the parameters in fp32."""
    model, total = load_in_bf16(folder), 0.0
    for number in range(4):
        batch = batch_of(number)
        labels = batch.pop("labels")
        logits = model(**batch, use_cache=False).logits.float()
        total += torch.nn.functional.cross_entropy(logits[0], labels[0]).item()
    return total / 4


CASES = [
    ("ernie4_5_moe", "zero2", {}),
    ("ernie4_5_moe", "zero1", {"tp": 2}),
    ("ernie4_5_moe", "zero1", {"pp": 2}),
    *(("flint", engine, {}) for engine in ("zero0", "zero1", "zero2", "ddp", "fsdp2")),
    ("ernie4_5_moe", "zero0", {}),
    ("ernie4_5_moe", "ddp", {}),
    ("ernie4_5_moe", "fsdp2", {}),
    ("hy_v4", "zero1", {}),
    ("hy_v4", "fsdp2", {}),
    ("deepseek_v4", "zero2", {}),
    ("deepseek_v4", "fsdp2", {}),
    ("bailing_hybrid", "zero1", {}),
    ("beam", "zero1", {"pp": 2}),
]


@pytest.mark.parametrize(
    ("kind", "engine", "degrees"),
    [
        pytest.param(
            *case,
            id=f"{case[0]} {case[1]} {'x'.join(case[2]) or 'dp'}2",
            marks=() if number < 3 else slow,
        )
        for number, case in enumerate(CASES)
    ],
)
def test_a_run_keeps_the_parameters_in_fp32(pools, folders, kind, engine, degrees):
    """They are fp32 in the forward pass, and steps change them by less than bf16 could store.

    Without tensor parallelism the first loss is the loss of transformers' bf16 model.
    """
    results = pools.run(
        2,
        train_on_ranks,
        kind=kind,
        folder=str(folders(kind)),
        engine=engine,
        degrees=degrees,
    )
    seen = {name: dtype for result in results for name, dtype in result["seen"].items()}
    assert set(seen) <= kept_names(kind) and set(seen.values()) == {"torch.float32"}
    assert {name for result in results for name in result["fine"]} >= moved(kind)
    assert not any(result["note"] for result in results)
    if engine != "ddp" and "tp" not in degrees:
        assert results[-1]["losses"][0] == pytest.approx(plain_loss(folders(kind)), rel=1e-5)


def moved(kind: str) -> set[str]:
    """Return the kept matrices that a step changes."""
    model = empty_model(config_of(kind), "eager", kind)
    return {
        name
        for name, value in model.named_parameters()
        if name in kept_names(kind) and value.requires_grad and name.endswith("gate.weight")
    }


class Routed(torch.nn.Module):
    """A router that stays in fp32 next to a layer in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.router(x), self.other(x)


def test_autocast_leaves_out_a_module_in_fp32():
    model = Routed()
    compute_in_fp32(model, list(model.router.parameters()), "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        routed, other = model(torch.ones(1, 4))
    assert (routed.dtype, other.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("loss", ["chunked", "whole"])
def test_the_loss_of_a_head_in_fp32_is_computed_in_fp32(loss):
    """Under DDP, autocast must not round the inputs and weights of hy_v4's head to bf16."""
    recipe = Recipe(
        model="none",
        init="random",
        seed=5,
        attention="eager",
        engine="ddp",
        precision="bf16",
        loss=loss,
    )
    cpu = torch.device("cpu")
    built = build_model(recipe, config_of("hy_v4"), None, ds_config(0), cpu)
    compute_in_fp32(built.model, built.fp32_parameters, "cpu")
    batch, inputs = batch_of(0), list[torch.Tensor]()
    head: Any = built.model.get_output_embeddings()
    head.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    compute = pretrain.with_chunked_causal_loss(pretrain.TASK).forward
    with torch.autocast("cpu", torch.bfloat16):
        output = (compute if loss == "chunked" else pretrain.forward)(built.model, batch)
        found = pretrain.loss(output, batch, by_row=False)

    logits = torch.nn.functional.linear(inputs[0].float(), head.weight)[0]
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"][0], reduction="sum")
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def shard_a_router() -> list[str]:
    """Return the dtypes of a sharded router's output and gradient, and of its neighbour's output.

    The router is a separate module, which owns no other parameters.
    """
    model = Routed()
    groups = ProcessGroups(make_mesh(2), "cpu")
    shard = fsdp2_sharder(groups, "bf16", "cpu", lambda: list(model.router.parameters()))
    for module in (model.router, model.other):
        shard(module)
    routed, other = model(torch.ones(1, 4))
    (routed.sum() + other.sum()).backward()
    gradient: Any = model.router.weight.grad
    return [str(value.dtype) for value in (routed, gradient, other)]


def test_fsdp2_shards_a_module_with_only_fp32_parameters(pools):
    assert pools.run(2, shard_a_router) == [["torch.float32"] * 2 + ["torch.bfloat16"]] * 2


ALL_IN_BF16 = Fp32Request("deepspeed", "bf16", 1, False, json_of(1, 1))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ds_config": json_of(3, 1)}, "bf16 here, because ZeRO-3 partitions"),
        ({"ds_config": json_of(2, 1, "cpu")}, "bf16 here, because an offloaded optimizer"),
        (
            {"ds_config": json_of(0, 1) | {"optimizer": {"type": "OneBitAdam", "params": {}}}},
            "bf16 here, because the optimizer sends signs",
        ),
        ({"precision": "fp16"}, "fp16 here, because only bf16 runs"),
        ({"ep": 2}, "bf16 here, because expert parallelism"),
        ({"adapted": True}, "bf16 here, because an adapter"),
        ({"engine": "fsdp2", "adapted": True}, "bf16 here, because an adapter"),
    ],
)
def test_a_line_counts_the_parameters_that_are_not_kept(changes, reason):
    model = empty_model(config_of("flint"), "eager", "flint")
    found = choose_fp32_parameters(model, replace(ALL_IN_BF16, **changes))
    assert not found.names
    number = len(kept_names("flint"))
    assert found.note.startswith(
        f"{number} parameters that transformers keeps in fp32 are {reason}"
    )


def test_nothing_is_kept_in_fp32_or_for_a_model_without_such_parameters():
    flint = empty_model(config_of("flint"), "eager", "flint")
    llama = empty_model(config_of("llama"), "eager", "llama")
    none = Fp32Parameters()
    assert choose_fp32_parameters(flint, replace(ALL_IN_BF16, precision="fp32")) == none
    zero3 = replace(ALL_IN_BF16, ds_config=json_of(3, 1))
    assert choose_fp32_parameters(llama, zero3) == none


@pytest.mark.parametrize("stage", [1, 3])
def test_a_dry_run_prints_the_line(tmp_path, capsys, stage):
    (tmp_path / "config.json").write_text(json.dumps(config_of("flint")))
    config = strategy(f"zero{stage}", bf16=True)
    recipe = Recipe(model=str(tmp_path), ds_config=config, attention="eager", init="random")
    command = parse(recipe, Path("fp32.py"), ["--dry_run", "--world", "2", "--tiny"])
    print_dry_run(resolve_run(command))
    lines = [line for line in capsys.readouterr().out.splitlines() if "keeps in fp32" in line]
    assert len(lines) == (stage == 3)


@pytest.mark.parametrize("pp", [1, 4])
def test_no_stage_of_a_pipeline_lacks_a_group_in_fp32(tmp_path, capsys, pp):
    """ERNIE's first layer has no router, so the first of four stages lacks these parameters."""
    (tmp_path / "config.json").write_text(json.dumps(config_of("ernie4_5_moe")))
    config = strategy("zero1", bf16=True)
    recipe = Recipe(model=str(tmp_path), ds_config=config, init="random", pp=pp)
    command = parse(recipe, Path("fp32.py"), ["--dry_run", "--world", "4", "--tiny"])
    print_dry_run(resolve_run(command))
    lines = [line for line in capsys.readouterr().out.splitlines() if "keeps in fp32" in line]
    assert len(lines) == (pp == 4)
    assert all("because pipeline stage 0 has no such parameter" in line for line in lines)


def test_groups_in_fp32_are_last():
    """DeepSpeed reads the training dtype from the first group."""
    early = ParamGroup(lr_scale=0.1, fp32=True)
    late = ParamGroup(lr_scale=0.2)
    assert order_groups([early, late])[2:] == (late, early)
    assert early.name == "matrices, fp32, lr x 0.1"


RUN = replace(BASE, steps=4, warmup_steps=1, lr=1e-3, eval_every=0, attention="eager")


@pytest.fixture(scope="module")
def flint(tmp_path_factory):
    """Return the folder of flint's config."""
    folder = tmp_path_factory.mktemp("flint_config")
    (folder / "config.json").write_text(json.dumps(config_of("flint")))
    return str(folder)


def run_two_ranks(pools: Any, flint: str, out: Path, engine: str, *resume: str) -> list[Any]:
    """Train four steps with a checkpoint after each second one; return the metrics."""
    of_torch = {"engine": engine, "precision": "bf16"} if engine in TORCH else {}
    config = {} if of_torch else strategy(engine, bf16=True)
    recipe = replace(RUN, model=flint, init="random", ds_config=config, **of_torch)
    argv = ["--out", str(out), "--save_every", "2", *resume]
    results = pools.run(2, train, recipe=recipe, argv=argv)
    assert [code for code, _ in results] == [0, 0], results
    return reproducible_values(metrics(out))


def step_of(run: Path, number: int = 2) -> Path:
    return run / "checkpoints" / f"step_{number:08d}"


def tensors_of(step: Path) -> dict[str, Any]:
    return manifest.read_manifest(step)["tensors"]


@slow
@pytest.mark.parametrize("engine", ["zero0", "zero1", "zero2", "zero3", "fsdp2"])
def test_a_run_resumes_bit_for_bit(pools, flint, tmp_path, engine):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    expected = run_two_ranks(pools, flint, whole, engine)
    shutil.copytree(whole, resumed)
    found = run_two_ranks(pools, flint, resumed, engine, "--resume", str(step_of(resumed)))
    assert found == expected
    assert tensors_of(step_of(resumed, 4)) == tensors_of(step_of(whole, 4))


@slow
def test_a_checkpoint_changes_to_layouts_that_keep_no_parameter_in_fp32(pools, flint, tmp_path):
    """ZeRO-2, ZeRO-3 and back: every bit of the masters and states stays, and a run resumes."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    expected = run_two_ranks(pools, flint, whole, "zero2")
    step, there, back = open_step(step_of(whole)), tmp_path / "there", tmp_path / "back"
    kept = {tensor.name for tensor in step.blueprint.tensors if tensor.dtype}
    assert kept == kept_names("flint") and any(group.fp32 for group in step.blueprint.groups)

    third = target_layout(step.blueprint, step.layout, LayoutChange(dp=4, zero=3))
    reshape(step.folder, there, third)
    assert not any(group.fp32 for group in open_step(there).blueprint.groups)
    second = target_layout(step.blueprint, step.layout, LayoutChange(dp=2, zero=2))
    reshape(there, back, second)
    assert tensors_of(step.folder) == tensors_of(there) == tensors_of(back)

    # The run converts what ZeRO-3 has merged, and continues with the same bits.
    shutil.copytree(whole, resumed)
    shutil.rmtree(step_of(resumed))
    shutil.copytree(back, step_of(resumed))
    found = run_two_ranks(pools, flint, resumed, "zero2", "--resume", str(step_of(resumed)))
    assert found == expected
    assert tensors_of(step_of(resumed, 4)) == tensors_of(step_of(whole, 4))


@slow
@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_a_run_resumes_from_another_engine(pools, flint, tmp_path, engine):
    whole, other = tmp_path / "whole", tmp_path / "other"
    run_two_ranks(pools, flint, other, engine)
    found = run_two_ranks(pools, flint, whole, "zero2", "--resume", str(step_of(other)))
    assert [line["step"] for line in found] == [3, 4]
    for key, value in tensors_of(step_of(whole, 4)).items():
        assert value[1] == "float32" or key.rpartition("|")[0] not in kept_names("flint")


def blueprint_of(kind: str, grouped: bool = True) -> Blueprint:
    model = empty_model(config_of(kind), "eager", kind)
    return draft_blueprint(model, fp32=Fp32Parameters(kept_names(kind), grouped))


BF16 = Layout(Mesh(), 2, "DeepSpeedZeroOptimizer", "bfloat16")


def test_a_blueprint_without_the_fields_is_read_as_before():
    saved = json.loads(json.dumps(blueprint_of("flint").to_json()))
    assert Blueprint.from_json(saved) == blueprint_of("flint")
    old = json.loads(
        json.dumps(blueprint_in(replace(BF16, zero_stage=3), blueprint_of("flint")).to_json())
    )
    for entry, field in ((old["tensors"], "dtype"), (old["groups"], "fp32")):
        for item in entry:
            del item[field]
    model = empty_model(config_of("flint"), "eager", "flint")
    assert Blueprint.from_json(old) == draft_blueprint(model)


@pytest.mark.parametrize(
    ("layout", "kept"),
    [
        (BF16, True),
        (replace(BF16, zero_stage=3), False),
        (replace(BF16, dtype="float16"), False),
        (replace(BF16, mesh=Mesh(dp=2, ep=2)), False),
    ],
)
def test_a_layout_keeps_the_parameters_or_merges_their_groups(layout, kept):
    before = blueprint_of("flint")
    found = blueprint_in(layout, before)
    assert (found == before) == kept
    model = empty_model(config_of("flint"), "eager", "flint")
    assert kept or found == draft_blueprint(model)


def test_a_checkpoint_counts_the_bytes_of_fp32_weights():
    plain = expected_bytes(blueprint_in(replace(BF16, zero_stage=3), blueprint_of("flint")), BF16)
    wide = sum(tensor.numel for tensor in blueprint_of("flint").tensors if tensor.dtype)
    assert expected_bytes(blueprint_of("flint", grouped=False), BF16) == plain + 2 * wide


def test_new_groups_in_fp32_take_the_values_of_their_rules():
    """An older checkpoint has the vectors in one group, with their own weight decay."""
    was = blueprint_in(replace(BF16, zero_stage=3), blueprint_of("flint"))
    now = blueprint_of("flint")
    numbers = {0: {"weight_decay": 0.1}, 1: {"weight_decay": 0.0}}
    found = CommonState(numbers, {}, {}).remap_groups(was, now).groups
    decays = {now.groups[number].name: own["weight_decay"] for number, own in found.items()}
    assert decays == {
        "matrices": 0.1,
        "vectors": 0.0,
        "matrices, fp32": 0.1,
        "vectors, fp32": 0.0,
    }
