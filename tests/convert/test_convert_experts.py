"""Checkpoints with sharded experts convert to any layout, to Hugging Face files, and back.

The converted checkpoints must be equal bit for bit.
"""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from converted_steps import (
    SMALL,
    assert_same_files,
    begin,
    check_same_bits_in_another_layout,
    tensors_of,
)
from job import metrics, reproducible_values
from parity import family
from pool import environment
from recipekit.architectures import families
from recipekit.checkpoints.reshape import reshape
from recipekit.checkpoints.step_folder import LayoutChange, open_step, target_layout
from recipekit.checkpoints.verify import verify
from recipekit.convert.hugging_face import from_hf, to_hf
from recipekit.model.describe import published_blueprint
from recipekit.parallel.blueprint import Layout
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh
from recipekit.storage import manifest, tensor_files
from recipekit.storage.copying import Effort
from recipekit.storage.torch_files import FileTensor, read_torch_file
from shipped_jsons import strategy
from short_runs import BASE, train

slow = pytest.mark.slow
QWEN3, MIXTRAL = {"model": "Qwen/Qwen3-30B-A3B"}, {"model": "mistralai/Mixtral-8x7B-v0.1"}
EP2, EP4 = {"ep": 2}, {"ep": 4}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders that transformers wrote; each contains several files.

    Qwen3's files are bf16, with one key for each expert.
    """
    import torch
    from built_models import build_model
    from recipekit.spec.recipe import Recipe
    from tiny_models import ds_config

    folders = {}
    for number, (kind, dtype) in enumerate(
        (("qwen3_moe", "bfloat16"), ("mixtral", "float32"), ("deepseek_v3", "bfloat16"))
    ):
        model = build_model(
            Recipe(model="none", init="random", seed=number),
            families.tiny_config(kind, 264),
            None,
            ds_config(0),
            torch.device("cpu"),
        ).model
        folders[kind] = tmp_path_factory.mktemp("published")
        model.to(getattr(torch, dtype)).save_pretrained(folders[kind], max_shard_size="300KB")
    return folders


WAY = [
    {"zero": 1, "dp": 2, "ep": 2},
    {"zero": 3, "dp": 4, "ep": 4},
    {"zero": 0, "dp": 4, "ep": 2},
    {"zero": 2, "dp": 1, "ep": 1},
    {"zero": 2, "dp": 8, "ep": 4},
    {"zero": 1, "dp": 1, "tp": 2, "pp": 2, "ep": 1},
    {"zero": 3, "dp": 6, "tp": 1, "pp": 1, "ep": 2},
]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("qwen3_moe", "float32"),
        pytest.param("mixtral", "bfloat16", marks=slow),
        pytest.param("deepseek_v3", "bfloat16", marks=slow),
    ],
)
def test_a_way_through_layouts_keeps_every_bit(published, tmp_path, kind, dtype):
    begin(published[kind], tmp_path / "0", dtype, dp=1, zero=0)
    wanted = tensors_of(tmp_path / "0")
    assert any(".experts.gate_up_proj|exp_avg" in key for key in wanted)
    for number, degrees in enumerate(WAY, 1):
        step = open_step(tmp_path / f"{number - 1}")
        layout = target_layout(step.blueprint, step.layout, LayoutChange(**degrees))
        reshape(step.folder, tmp_path / f"{number}", layout, effort=SMALL)
        assert tensors_of(tmp_path / f"{number}") == wanted, degrees
        assert verify(tmp_path / f"{number}", SMALL) == []
        if number in (2, len(WAY)):
            to_hf(
                tmp_path / f"{number}",
                tmp_path / f"hf{number}",
                effort=SMALL,
                verify=True,
            )
            assert_same_files(tmp_path / f"hf{number}", published[kind])


# Loading with DeepSpeed
# -----------------------------------------------------------------------------------------

SHARED = {"model": "qwen2_moe"}  # has shared experts, which AutoEP renames
CASES = [  # the training run, its layout, and the resumes' layouts: (world, JSON, degrees)
    pytest.param(
        "bf16", QWEN3, (2, "zero1", EP2), [(1, "zero2", {})], id="qwen3 zero1 ep2, ep1", marks=slow
    ),
    pytest.param(
        "fp32",
        QWEN3,
        (2, "zero0", EP2),
        [(4, "zero1", EP4), (4, "zero0", EP2), (2, "zero3", EP2)],
        id="qwen3 fp32 zero0, the others",
        marks=slow,
    ),
    pytest.param(
        "bf16",
        QWEN3,
        (4, "zero2", EP2),
        [(4, "zero2", EP4), (2, "zero0", EP2), (4, "zero1", {"tp": 2, "pp": 2})],
        id="qwen3 zero2 dp4",
        marks=slow,
    ),
    pytest.param(
        "bf16",
        QWEN3,
        (4, "zero3", EP2),
        [(2, "zero1", EP2), (4, "zero3", EP4), (3, "zero3", {})],
        id="qwen3 zero3 dp4",
        marks=slow,
    ),
    pytest.param(
        "fp32",
        MIXTRAL,
        (2, "zero1", {}),
        [(2, "zero1", EP2), (4, "zero2", EP4), (4, "zero3", EP2)],
        id="mixtral ep1, ep2, ep4",
        marks=slow,
    ),
    pytest.param(
        "bf16",
        MIXTRAL,
        (2, "zero2_cpu", EP2),
        [(2, "zero3_cpu", EP2), (1, "zero1", {})],
        id="mixtral, CPU Adam",
        marks=slow,
    ),
    pytest.param(
        "fp32",
        SHARED,
        (2, "zero2", EP2),
        [(2, "zero2", {}), (4, "zero3", EP2), (2, "zero0", EP2)],
        id="qwen2 shared experts",
        marks=slow,
    ),
    pytest.param(
        "fp32",
        {"model": "deepseek_v3"},
        (2, "zero3", EP2),
        [(1, "zero0", {}), (4, "zero1", EP2)],
        id="deepseek_v3, a moved buffer",
        marks=slow,
    ),
]


@pytest.mark.parametrize(("kind", "changes", "source", "targets"), CASES)
def test_deepspeed_loads_the_same_bits_in_another_layout(
    pools, ops, tmp_path, kind, changes, source, targets
):
    """DeepSpeed itself cannot do this.

    A different ep raises a RuntimeError at ZeRO-3 ("only be loaded with the same parameter
    placement"). A different dp raises a ZeRORuntimeException.
    """
    changes = changes | {
        "model": changes["model"] if "/" in changes["model"] else family(changes["model"])
    }
    check_same_bits_in_another_layout(pools, ops, tmp_path, kind, changes, source, targets)


RECIPE = dataclasses.replace(
    BASE,
    **QWEN3,
    **EP2,
    ds_config=strategy("zero1"),
    eval_every=0,
    steps=4,
    save_every=2,
    export=True,
)


@pytest.fixture(scope="module")
def run(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of four steps with ep 2 of dp 2, fp32 and ZeRO-1, with its checkpoints and its
    export.

    The checkpoints are from steps 2 and 4. Copy the folder before changing it.
    """
    out = tmp_path_factory.mktemp("run") / "run"
    results = pools.run(2, train, recipe=RECIPE, argv=["--out", str(out)])
    assert [code for code, _ in results] == [0, 0], results
    return out


def test_to_hf_gives_what_the_run_exports(run: Path, tmp_path: Path) -> None:
    to_hf(run, tmp_path / "hf", verify=True)
    assert_same_files(tmp_path / "hf", run / "hf")
    assert verify(run / "checkpoints" / "step_00000004") == []


def test_the_digests_are_those_of_whole_experts(run: Path, tmp_path: Path) -> None:
    step = open_step(run)
    reshape(
        run,
        tmp_path / "whole",
        target_layout(step.blueprint, step.layout, LayoutChange(ep=1, zero=0)),
    )
    assert tensors_of(tmp_path / "whole") == step.tensors
    assert {key.split("|")[0] for key in step.tensors} == {
        tensor.name for tensor in step.blueprint.tensors
    }
    assert any(key.endswith("mlp.experts.gate_up_proj|exp_avg_sq") for key in step.tensors)


@pytest.mark.parametrize(("ep", "file", "exact"), [(2, "zero1", True), (1, "zero2", False)])
def test_a_stopped_run_goes_on(pools, run, tmp_path, ep, file, exact):
    """In the same layout the resume is the same bit for bit.

    With unsharded experts and a different ZeRO stage, the losses agree within the layout tolerance.
    """
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004")
    recipe = dataclasses.replace(RECIPE, ep=ep, ds_config=strategy(file), export=False)
    results = pools.run(2, train, recipe=recipe, argv=["--out", str(tmp_path / "run")])
    assert [code for code, _ in results] == [0, 0] and "resumed from" in results[0][1], results
    got, expected = (
        reproducible_values(metrics(tmp_path / "run")),
        reproducible_values(metrics(run)),
    )
    if exact:
        assert got == expected and open_step(tmp_path / "run").tensors == open_step(run).tensors
    assert [line["loss"] for line in got] == pytest.approx(
        [line["loss"] for line in expected], rel=1e-5
    )


@slow
@pytest.mark.parametrize(
    ("kind", "params"), [("NAdam", {}), ("SGD", {"momentum": 0.9}), ("SGD", {})]
)
def test_the_states_of_another_optimizer_go_along(pools, tmp_path, kind, params):
    """All kinds of states in spec/optimizer_specs.py convert from sharded to unsharded experts.

    The optimizers have tensor states, scalars, or no state.
    """
    chosen = {
        "optimizer": {"type": kind, "params": {"lr": "auto", "weight_decay": "auto"} | params}
    }
    divided = dataclasses.replace(RECIPE, ds_config=strategy("zero1") | chosen, export=False)
    for recipe, more in (
        (divided, []),
        (
            dataclasses.replace(divided, ep=1, ds_config=strategy("zero3") | chosen),
            ["--resume", ""],
        ),
    ):
        if more:
            shutil.copytree(tmp_path / "whole", tmp_path / "other")
            more[1] = str(tmp_path / "other" / "checkpoints" / "step_00000002")
        out = tmp_path / ("other" if more else "whole")
        results = pools.run(2, train, recipe=recipe, argv=["--out", str(out), *more])
        assert [code for code, _ in results] == [0, 0], results
    got, expected = (reproducible_values(metrics(tmp_path / name)) for name in ("other", "whole"))
    assert [line["loss"] for line in got] == pytest.approx(
        [line["loss"] for line in expected], rel=1e-5
    )
    assert (
        tensors_of(tmp_path / "other/checkpoints/step_00000004").keys()
        == tensors_of(tmp_path / "whole/checkpoints/step_00000004").keys()
    )


def shape(value: Any) -> Any:
    """Replace tensors in nested containers with their shapes and dtypes; keep numbers."""
    if isinstance(value, FileTensor):
        return value.shape, value.dtype, value.value
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return (
        [shape(item) for item in value]
        if isinstance(value, list | tuple)
        else vars(value)
        if hasattr(value, "place")
        else value
    )


def assert_written_alike(step: Path, out: Path) -> None:
    """Check that DeepSpeed and the converter write the same files, keys, shapes and numbers.

    Both step folders must have the same layout.
    """
    theirs, ours = ({path.name: path for path in folder.glob("*.pt")} for folder in (step, out))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        was, now = shape(read_torch_file(theirs[name])), shape(read_torch_file(ours[name]))
        assert now.keys() == was.keys(), name
        for key in was:
            assert now[key] == was[key], f"{name}: {key}"


def test_the_converter_writes_the_files_of_deepspeed(run: Path, tmp_path: Path) -> None:
    reshape(run, tmp_path / "again", open_step(run).layout)
    assert_written_alike(run / "checkpoints" / "step_00000004", tmp_path / "again")


@slow
@pytest.mark.parametrize("file", ["zero0", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_converter_writes_the_files_of_deepspeed_at_every_stage(pools, tmp_path, file, bf16):
    recipe = dataclasses.replace(
        RECIPE, ds_config=strategy(file, bf16), steps=3, save_every=0, export=True
    )
    results = pools.run(4, train, recipe=recipe, argv=["--out", str(tmp_path / "run")])
    assert [code for code, _ in results] == [0] * 4, results
    reshape(tmp_path / "run", tmp_path / "again", open_step(tmp_path / "run").layout)
    assert_written_alike(tmp_path / "run" / "checkpoints" / "step_00000003", tmp_path / "again")
    to_hf(tmp_path / "run", tmp_path / "hf")
    assert_same_files(tmp_path / "hf", tmp_path / "run" / "hf")


@pytest.mark.slow
def test_a_run_starts_from_converted_files_as_from_the_files_themselves(pools, tmp_path):
    from tiny_models import save_tiny

    save_tiny(tmp_path / "model", "qwen3_moe")
    recipe = dataclasses.replace(
        BASE,
        model=str(tmp_path / "model"),
        ds_config=strategy("zero1"),
        tokenizer="bytes",
        eval_every=0,
        **EP2,
    )
    blueprint = published_blueprint(tmp_path / "model")
    layout = target_layout(
        blueprint,
        Layout(Mesh(), 0, "torch", "float32"),
        LayoutChange(dp=2, ep=2, zero=1),
    )
    from_hf(tmp_path / "model", tmp_path / "start", blueprint, layout)
    argv = ["--init", "pretrained", "--tokenizer", "bytes", "--stop_at", "3"]
    for name, more in (("direct", []), ("converted", ["--resume", str(tmp_path / "start")])):
        results = pools.run(
            2, train, recipe=recipe, argv=["--out", str(tmp_path / name), *argv, *more]
        )
        assert [code for code, _ in results] == [0] * 2, results
    assert [line["loss"] for line in metrics(tmp_path / "converted")] == [
        line["loss"] for line in metrics(tmp_path / "direct")
    ]


# Bad input and faults
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "says"),
    [
        ({"ep": 3, "dp": 3}, "ep = 3: does not divide the model's 4 experts. Use --ep 1"),
        ({"ep": 4}, "ep = 4: does not divide the 2 data-parallel ranks. Use --dp 4, or --ep 1"),
        ({"dp": 3}, "ep = 2: does not divide the 3 data-parallel ranks. Use --dp 4, or --ep 1"),
        (
            {"tp": 2},
            (
                "ep = 2 with tp = 2: expert parallelism can be combined only with data parallelism"
                " and ZeRO. Use --ep 1, or --tp 1"
            ),
        ),
        ({"ep": 0}, "ep = 0: must be at least 1"),
    ],
)
def test_an_impossible_layout_is_refused(run: Path, degrees: dict[str, int], says: str) -> None:
    step = open_step(run)
    with pytest.raises(ConfigError) as refused:
        target_layout(step.blueprint, step.layout, LayoutChange(**degrees))
    assert [str(problem) for problem in refused.value.problems] == [says] or says in str(
        refused.value
    )


KILLED = """
import os, signal, sys
from pathlib import Path
from recipekit.checkpoints.reshape import reshape
from recipekit.checkpoints.step_folder import LayoutChange, open_step, target_layout
from recipekit.storage import copying, direct_files, tensor_files
from recipekit.storage.copying import Effort
direct_files.WRITE_BLOCK_BYTES, copying.BUFFERS = 4096, 12 * 4096  # what large files meet
step, count, write = open_step(Path(sys.argv[1])), 0, tensor_files.TensorFiles.write
def dying(*values):
    global count
    if count == 60:
        os.kill(os.getpid(), signal.SIGKILL)
    count += 1
    write(*values)
tensor_files.TensorFiles.write = dying
layout = target_layout(step.blueprint, step.layout, LayoutChange(dp=4, ep=4))
reshape(step.folder, Path(sys.argv[2]), layout, effort=Effort(workers=1))
"""


def test_a_killed_conversion_goes_on_where_it_was(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL arrives in the middle of the experts. Recorded tensors must not be written again."""
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(run), str(tmp_path / "out")],
        env=environment(),
        timeout=120,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    noted = [
        next(iter(json.loads(line)))
        for line in (tmp_path / ".out.part" / "journal.jsonl").read_text().splitlines()[1:]
    ]
    assert any(".experts." in key for key in noted)
    step, written = open_step(run), []
    layout, write = (
        target_layout(step.blueprint, step.layout, LayoutChange(ep=4, dp=4)),
        tensor_files.TensorFiles.write,
    )

    def listed(self: Any, tensor: Any, role: str, start: int, values: Any) -> None:
        written.append(f"{tensor.name}|{role}")
        write(self, tensor, role, start, values)

    monkeypatch.setattr(tensor_files.TensorFiles, "write", listed)
    reshape(run, tmp_path / "out", layout, effort=Effort(workers=1))
    assert written and not set(written) & set(noted)
    assert tensors_of(tmp_path / "out") == step.tensors and verify(tmp_path / "out") == []


def test_a_missing_file_of_an_expert_is_named(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints" / "step_00000004", tmp_path / "step_00000004")
    (tmp_path / "step_00000004" / "layer_1_expert_3_mp_rank_00_model_states.pt").unlink()
    assert verify(tmp_path / "step_00000004") == [
        "layer_1_expert_3_mp_rank_00_model_states.pt is missing"
    ]


def test_a_checkpoint_that_does_not_describe_its_experts_goes_on_in_its_own_layout(
    pools, run, tmp_path
):
    """Before conversion supported experts, checkpoints had no blueprint and no digests.

    The run's next save writes both.
    """
    shutil.copytree(run, tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "step_00000004"
    (step / manifest.BLUEPRINT_FILE).write_text("null")
    facts = manifest.read_manifest(step)["files"] | {
        manifest.BLUEPRINT_FILE: manifest.file_entry(step / manifest.BLUEPRINT_FILE)
    }
    manifest.write_manifest(step, 4, facts, {})
    assert verify(step) == []
    with pytest.raises(
        ConfigError, match=r"before checkpoints described them\. Resume in the same layout"
    ):
        to_hf(step, tmp_path / "hf")
    recipe = dataclasses.replace(RECIPE, steps=5, export=False)
    for changed, code in ((dataclasses.replace(recipe, ep=1), None), (recipe, 0)):
        results = pools.run(
            2, train, recipe=changed, argv=["--out", str(tmp_path / "run"), "--resume", str(step)]
        )
        assert all(
            (
                (result == code)
                if code is not None
                else "before checkpoints described them" in str(result)
            )
            for result, _ in results
        ), results
    assert open_step(tmp_path / "run").tensors
