"""Recipes on any number of ranks: a tiny recipe always fits.

A full recipe's error lists the numbers of ranks that fit. The tools choose a batch for any number
of ranks.
"""

import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pool import ROOT, environment
from recipe_files import FILES, load, plan
from recipekit.plan import resolve_run
from recipekit.planner.dry_run import print_dry_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError

sys.path.insert(0, str(ROOT / "tools" / "bench"))
sys.path.insert(0, str(ROOT / "tools"))

import bench_checkpoint
import bench_loop
import bench_tensor_parallel
import quickstart

WORLDS = range(1, 10)

# Layouts of all recipes with model parallelism on 1 to 9 ranks, and the tiny model's other limits.
TINY = {
    "deepseek_v2_lite_zero1_ep8": (
        "dp1 dp2_ep2 dp3 dp4_ep4 dp5 dp6_ep2 dp7 dp8_ep4 dp9",
        " and 4 experts",
    ),
    "glm4_5_air_zero1_pp8_tp4": (
        "dp1 dp1_tp2 dp1_pp3 dp1_tp4 dp5 dp1_tp2_pp3 dp7 dp1_tp4_pp2 dp3_pp3",
        " and 4 layers",
    ),
    "gpt2_xl_zero1_pp4": ("dp1 dp1_pp2 dp1_pp3 dp1_pp4 dp5 dp2_pp3 dp7 dp2_pp4 dp3_pp3", ""),
    "llama3_1_405b_zero1_pp16_tp8": (
        "dp1 dp1_tp2 dp1_pp3 dp1_tp4 dp5 dp1_tp2_pp3 dp7 dp1_tp4_pp2 dp3_pp3",
        ", 4 key-value heads and 4 layers",
    ),
    "llama3_1_70b_zero1_pp4_tp4": (
        "dp1 dp1_tp2 dp1_pp3 dp1_tp4 dp5 dp1_tp2_pp3 dp7 dp1_tp4_pp2 dp3_pp3",
        "",
    ),
    "llama3_1_8b_zero1_pp4": ("dp1 dp1_pp2 dp1_pp3 dp1_pp4 dp5 dp2_pp3 dp7 dp2_pp4 dp3_pp3", ""),
    "llama3_1_8b_zero1_tp4": ("dp1 dp1_tp2 dp3 dp1_tp4 dp5 dp3_tp2 dp7 dp2_tp4 dp9", ""),
    "llama3_1_8b_zero3_sp8": ("dp1 dp1_sp2 dp3 dp1_sp4 dp5 dp3_sp2 dp7 dp1_sp8 dp9", ""),
    "llama3_1_8b_zero3_tp2": ("dp1 dp1_tp2 dp3 dp2_tp2 dp5 dp3_tp2 dp7 dp4_tp2 dp9", ""),
    "mixtral_8x7b_zero1_pp4_tp2": (
        "dp1 dp1_tp2 dp1_pp3 dp1_tp2_pp2 dp5 dp1_tp2_pp3 dp7 dp1_tp2_pp4 dp3_pp3",
        "",
    ),
    "qwen3_30b_a3b_zero1_ep4": ("dp1 dp2_ep2 dp3 dp4_ep4 dp5 dp6_ep2 dp7 dp8_ep4 dp9", ""),
}
TINY["apertus_8b_zero1_tp2"] = TINY["llama3_1_8b_zero3_tp2"]
TINY["ernie4_5_21b_zero1_pp4_tp2"] = TINY["mixtral_8x7b_zero1_pp4_tp2"]
TINY["seed_oss_36b_zero1_pp4_tp2"] = TINY["mixtral_8x7b_zero1_pp4_tp2"]
TINY["vit_h14_imagenet_zero1_tp2"] = TINY["llama3_1_8b_zero3_tp2"]
TINY["resnet152_imagenet_zero1_pp4"] = TINY["llama3_1_8b_zero1_pp4"]
ONLY_DP = (" ".join(f"dp{world}" for world in WORLDS), "")


@pytest.mark.parametrize("name", FILES)
def test_a_tiny_recipe_fits_any_number_of_ranks(name, capsys):
    """The recipe is accepted unchanged, or is lowered with one line that states the changes."""
    recipe = load(name).RECIPE
    wanted = {axis: getattr(recipe, axis) for axis in ("tp", "pp", "sp", "ep")}
    meshes, limits = TINY.get(name, ONLY_DP)
    for world, layout in zip(WORLDS, meshes.split(), strict=True):
        planned = plan(name, "--tiny", "--world", str(world))
        print_dry_run(planned)
        said, _, shown = capsys.readouterr().out.partition("layout ")
        ranks = f"{world} rank{'s' if world > 1 else ''}"
        assert (
            shown.startswith(f"  {ranks}: {layout}\n")
            and "iB always" in shown
            and '"auto"' not in shown
        )
        found = {
            axis: int(degree[1]) if (degree := re.search(rf"{axis}(\d+)", layout)) else 1
            for axis in wanted
        }
        lowered = ", ".join(
            f"{axis} {wanted[axis]} -> {found[axis]}"
            for axis in wanted
            if found[axis] != wanted[axis]
        )
        said = [
            line
            for line in said.splitlines()
            if not line.startswith(("gradients: ZeRO-0 ", "attention sdpa with a mask"))
            and " that transformers keeps in fp32 are bf16 here, " not in line
        ]
        assert said == ([f"--tiny lowered {lowered} to fit {ranks}{limits}"] if lowered else [])
        assert (
            planned.recipe.micro_batch == 2
            and planned.recipe.global_batch == 4 * planned.mesh.dp * planned.mesh.pp
        )


@pytest.mark.parametrize(
    ("argv", "micro_batch", "global_batch"),
    [
        (["--world", "3", "--global_batch", "3"], 1, 3),  # two rows for each rank would be six rows
        (["--world", "2", "--global_batch", "6"], 1, 6),
        (["--world", "2", "--global_batch", "8"], 2, 8),
        (["--world", "2", "--micro_batch", "3"], 3, 12),
    ],
)
def test_a_typed_batch_stays_and_the_other_number_fits_it(argv, micro_batch, global_batch):
    planned = plan("llama_nano_zero2", "--tiny", *argv)
    assert (planned.recipe.micro_batch, planned.recipe.global_batch) == (micro_batch, global_batch)


@pytest.mark.parametrize(
    ("name", "argv", "text"),
    [
        (
            "llama_nano_zero2",
            # 3 does not divide the heads either, so no number of ranks would solve the problem.
            ["--tiny", "--world", "4", "--tp", "3"],
            (
                "tp(3) = 3: does not divide the 4 ranks. Choose degrees whose product is 1 or 2 or"
                " 4, or start a multiple of 3 ranks"
            ),
        ),
        (
            "llama_nano_zero2",
            ["--tiny", "--world", "3", "--tp", "2"],
            (
                "tp(2) = 2: does not divide the 3 ranks. Choose degrees whose product is 1 or 3, or"
                " start a multiple of 2 ranks. The recipe fits 2 or 4 ranks without changes"
            ),
        ),
        (
            "llama_nano_zero2",
            ["--tiny", "--world", "3", "--micro_batch", "2", "--global_batch", "4"],
            (
                "global_batch (train_batch_size) = 4: is not divisible by 3 data-parallel ranks *"
                " micro_batch 2 = 6. Use global_batch 6. The recipe fits 2 ranks without changes"
            ),
        ),
        (
            "llama3_1_405b_zero1_pp16_tp8",
            ["--world", "9"],
            (
                "pp(16) * tp(8) = 128: does not divide the 9 ranks. Choose degrees whose product is"
                " 1 or 3 or 9, or start a multiple of 128 ranks. The recipe fits 128 ranks without"
                " changes"
            ),
        ),
        (
            "qwen3_30b_a3b_zero1_ep4",
            ["--world", "6"],
            (
                "ep = 4: does not divide the 6 data-parallel ranks. Use --ep 1 or 2 or 3 or 6. The"
                " recipe fits 4 or 8 ranks without changes"
            ),
        ),
        (
            "llama3_1_70b_zero3_nvme",
            ["--world", "2"],
            (
                "zero_optimization.offload_param.buffer_size = 200000000: must be at least the"
                " 525336576 elements of the embedding that a rank holds. Set it to 525336576 or"
                " more. The recipe fits 8 ranks without changes"
            ),
        ),
        (
            "llama_nano_zero2",
            ["--world", "3", "--save_every", "-1"],  # no number of ranks solves the other problem
            (
                "save_every = -1: must not be negative. Use --save_every 0 or more\nglobal_batch"
                " (train_batch_size) = 16: is not divisible by 3 data-parallel ranks * micro_batch"
                " 4 = 12. Use global_batch 12 or 24. The recipe fits 2 or 4 ranks without changes"
            ),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused_names_the_nearest_ranks_that_fit(name, argv, text):
    with pytest.raises(ConfigError) as refused:
        plan(name, *argv)
    assert str(refused.value) == text


@pytest.mark.parametrize("name", FILES)
def test_the_ranks_that_a_refusal_names_are_the_nearest_that_are_accepted(name):
    def refusal(world: int) -> str:
        try:
            plan(name, "--world", str(world))
        except ConfigError as refused:
            return str(refused)
        return ""

    world = 7
    told = re.search(r"\. The recipe fits ([\d or]+) ranks without changes$", refusal(world))
    assert told
    nearest = [int(number) for number in told[1].split(" or ")]
    below, above = (
        [ranks for ranks in nearest if ranks < world],
        [ranks for ranks in nearest if ranks > world],
    )
    assert not any(map(refusal, nearest))
    assert all(map(refusal, range((below or [0])[0] + 1, world)))
    # Above 16, no recipe accepts a number in between.
    assert all(map(refusal, range(world + 1, min((above or [17])[0], 17))))


def accepted(recipe, file: Path, argv: list[str], world: int) -> int:
    """Return the rows per step on `world` ranks; raise `ConfigError` if the flags are rejected."""
    command = parse(recipe, file, argv)
    return resolve_run(replace(command, world=world)).recipe.global_batch


def test_the_quickstart_takes_a_batch_that_its_ranks_can_share(tmp_path):
    rows = []
    for ranks in range(1, 65):
        _, number, file, *argv = quickstart.training(ranks, tmp_path / "run", steps=2)
        assert (number, file) == (str(ranks), str(FILES["llama_nano_zero2"]))
        rows.append(accepted(load("llama_nano_zero2").RECIPE, Path(file), argv, ranks))
    assert rows[:9] == [16, 16, 24, 16, 20, 24, 28, 32, 36] and rows[63] == 256


def test_the_quickstart_in_fp32_differs_in_nothing_else(tmp_path):
    file, argv = FILES["llama_nano_zero2"], ["--out", str(tmp_path / "run")]
    plain, fp32 = (
        resolve_run(parse(load("llama_nano_zero2").RECIPE, file, [*argv, *more]))
        for more in (
            [],
            ["--deepspeed_config", str(quickstart.strategy_in_fp32(tmp_path / "new" / "run"))],
        )
    )
    assert (plain.precision, fp32.precision) == ("bf16", "fp32")
    differing = {
        name
        for name in {**plain.ds_config, **fp32.ds_config}
        if plain.ds_config.get(name) != fp32.ds_config.get(name)
    }
    assert differing == {"bf16", "data_types", "zero_optimization"}
    # On one rank, a shipped JSON overlaps nothing.
    assert plain.ds_config["zero_optimization"] == fp32.ds_config["zero_optimization"] | {
        "overlap_comm": False
    }


@pytest.mark.slow
@pytest.mark.parametrize("ranks", WORLDS)
def test_the_quickstart_runs_on(ranks, tmp_path, ops):
    command = [
        sys.executable,
        ROOT / "tools" / "quickstart.py",
        "--ranks",
        ranks,
        "--steps",
        "2",
        "--out",
        tmp_path / "run",
    ]
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        variables = environment() | {"MASTER_PORT": port}
        done = subprocess.run(
            list(map(str, command)),
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert f"because MASTER_PORT = {port} is in use" in done.stdout
    assert (
        f"llama_nano_zero2 on {ranks} rank{'s' if ranks > 1 else ''} (dp{ranks})" in done.stdout
        and "done in " in done.stdout
    )
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("world", WORLDS)
def test_the_benches_fit_any_number_of_ranks(world, tmp_path):
    arguments, _ = bench_loop.arguments_of([])
    assert (
        bench_loop.planned(arguments, [], world, tmp_path / "run").recipe.global_batch
        == [16, 16, 24, 16, 20, 24, 28, 32, 36][world - 1]
    )
    command = replace(parse(bench_checkpoint.RECIPE, Path("bench.py"), []), world=world)
    assert bench_checkpoint.planned(command, tmp_path / "run").recipe.global_batch == max(2, world)


def test_a_tensor_group_is_as_large_as_the_heads_allow(tmp_path):
    assert [
        bench_tensor_parallel.ranks_of(devices, [], tmp_path / "run") for devices in range(2, 10)
    ] == [2, 2, 4, 4, 4, 4, 4, 4]
    with pytest.raises(ConfigError, match="1 device: a tensor group takes 2 ranks or more"):
        bench_tensor_parallel.ranks_of(1, [], tmp_path / "run")
