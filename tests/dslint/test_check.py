"""Problems that lint reports in a DeepSpeed JSON, and the fixes that it suggests."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from broken_jsons import BROKEN, UNREADABLE
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import ROOT
from recipekit.dslint import check, divisibility, swap
from recipekit.dslint.schema import value_at
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh, make_mesh
from recipekit.spec.recipe import Recipe
from shipped_jsons import FILES, RECIPE, put, shipped, without


@pytest.mark.parametrize("case", BROKEN)
def test_broken_configuration_is_refused_with_its_path_and_a_fix(case: str) -> None:
    broken = BROKEN[case]
    config = shipped(broken.file)
    for path, value in broken.changes.items():
        config = put(config, path, value)
    problems = check.lint_config(check.LintInput(config, **broken.lint_input))
    hits = [problem for problem in problems if broken.where in problem.where]
    assert hits, f"no problem at {broken.where!r} among {[str(problem) for problem in problems]}"
    assert any(broken.fix in problem.fix for problem in hits), [str(problem) for problem in hits]
    # One mistake is not reported many times.
    assert len(problems) <= 3, [str(problem) for problem in problems]


def test_all_problems_are_told_at_once() -> None:
    config = put(
        put(put(shipped("zero2"), "gradient_cliping", 1), "bf16.enabled", 1),
        "zero_optimization.stage",
        7,
    )
    assert {
        problem.where.split(" ")[0]
        for problem in check.lint_config(check.LintInput(config, world=5, recipe=RECIPE))
    } == {
        "gradient_cliping",
        "bf16.enabled",
        "zero_optimization.stage",
        "global_batch",
    }


@pytest.mark.parametrize(
    ("file", "pivot"),
    [
        (file.stem, pivot)
        for file in FILES
        for pivot in check.DECIDING_KEYS
        if value_at(shipped(file.stem), pivot) is not None
    ],
)
def test_a_misspelt_key_that_others_hang_on_is_the_only_problem(file: str, pivot: str) -> None:
    config = shipped(file)
    block, _, key = pivot.rpartition(".")
    for typo in (key + key[-1], key[:1] + key[2:], key[:1] + key[2] + key[1] + key[3:]):
        (problem,) = check.lint_config(
            check.LintInput(
                put(without(config, pivot), f"{block}.{typo}", value_at(config, pivot)),
                world=2,
                recipe=RECIPE,
            )
        )
        assert problem.fix == f"did you mean {key}?"


def test_a_misspelt_block_that_others_hang_on_is_the_only_problem() -> None:
    (problem,) = check.lint_config(
        check.LintInput(
            put(
                without(shipped("zero1"), "zero_optimization"),
                "zero_optimisation",
                value_at(shipped("zero1"), "zero_optimization"),
            )
        )
    )
    assert problem.fix == "did you mean zero_optimization?"


def test_what_does_not_resemble_a_key_is_told_beside_what_lacks_it() -> None:
    config = put(
        put(without(shipped("zero3"), "zero_optimization.stage"), "zero_optimization.zzqq", 3),
        "flops_profiler",
        {"detailed": True},
    )
    told = [problem.where for problem in check.lint_config(check.LintInput(config))]
    assert {"zero_optimization.zzqq = 3", 'flops_profiler = {"detailed": true}'} < set(
        told
    ) and any("overlap_comm" in where for where in told)


@pytest.mark.parametrize(
    "case",
    [
        "typo at the top",
        "number for a block",
        "auto that nobody fills",
        "fp32 accumulation without ZeRO",
        "key twice",
        "missing",
    ],
)
def test_the_tool_exits_1_with_every_problem_and_no_traceback(case: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    if case in UNREADABLE:
        file.write_bytes(UNREADABLE[case][0])
    elif case in BROKEN:
        path, value = next(iter(BROKEN[case].changes.items()))
        file.write_text(json.dumps(put(shipped(BROKEN[case].file), path, value)))
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "lint.py", file],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr, (
        done.stdout + done.stderr
    )
    assert "1 problem in" in done.stdout and "  1. " in done.stdout


def test_checking_imports_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys; from recipekit.dslint import check; check.lint_config(check.LintInput({}));"
        " sys.exit(bool({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_hpz_fits_hosts_that_it_divides() -> None:
    for size, world, local in ((8, 16, 8), (8, 16, 0), (4, 16, 8), (2, 4, 2), (8, None, 0)):
        config = put(shipped("zero3_hosts"), "zero_optimization.zero_hpz_partition_size", size)
        assert check.lint_config(check.LintInput(config, world=world, local=local)) == []


def test_a_plan_knows_the_ranks_of_its_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torchrun, `python -m launch` and deepspeed set the ranks. A dry run is for other hosts."""
    monkeypatch.setattr("os.environ", {**os.environ, "WORLD_SIZE": "16", "LOCAL_SIZE": "4"})
    recipe = Recipe(
        model="meta-llama/Llama-3.2-1B", ds_config="zero3_hosts.json", out=str(tmp_path / "run")
    )
    with pytest.raises(ConfigError, match="must divide the number of ranks on this host"):
        resolve_run(parse(recipe, tmp_path / "x.py", ["--tiny"]))
    assert resolve_run(parse(recipe, tmp_path / "x.py", ["--tiny", "--dry_run"])).mesh.dp == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert resolve_run(parse(recipe, tmp_path / "x.py", ["--tiny"])).mesh.dp == 16


def test_a_json_of_another_script_may_use_what_recipes_do_not() -> None:
    config = put(shipped("zero2"), "wandb", {"enabled": True})
    assert (
        check.lint_config(check.LintInput(config))
        and check.lint_config(check.LintInput(config, script=check.OtherScript("trainer"))) == []
    )


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 12))
def test_the_batch_that_the_fix_names_divides(total: int, micro: int, dp: int) -> None:
    recipe = Recipe(model="org/model", global_batch=total, micro_batch=micro)
    problems = check.lint_config(check.LintInput({}, mesh=Mesh(dp=dp), recipe=recipe))
    assert bool(problems) == bool(total % (micro * dp))
    for problem in problems:
        words = problem.fix.replace(",", "").split()
        choices = [
            ("global_batch", int(word))
            for word in words[words.index("global_batch") + 1 :][:3:2]
            if word.isdigit()
        ]
        choices += (
            [("micro_batch", int(words[words.index("micro_batch") + 1]))]
            if "micro_batch" in words
            else []
        )
        for field, number in choices:
            better = Recipe(
                **{"model": "org/model", "global_batch": total, "micro_batch": micro, field: number}
            )
            assert check.lint_config(check.LintInput({}, mesh=Mesh(dp=dp), recipe=better)) == [], (
                problem
            )


def test_the_tensor_parallel_degree_of_the_fix_fits_ranks_and_model() -> None:
    """3 divides the 6 heads but not the 8 ranks, so 3 must not be suggested instead of 4."""
    model_config = {"num_attention_heads": 6, "intermediate_size": 48}
    told = [
        "tp = 4: does not divide the model's 6 attention heads, 6 key-value heads. Use --tp 1 or 2"
    ]
    for world, tp, pp in ((8, 4, 1), (16, 4, 2)):
        recipe = Recipe(
            model="org/model", ds_config="zero1.json", tp=tp, pp=pp, global_batch=64, micro_batch=1
        )
        given: Any = {"recipe": recipe, "model_config": model_config}
        assert [
            str(problem) for problem in check.lint_config(check.LintInput({}, world=world, **given))
        ] == told
        assert [
            str(problem)
            for problem in check.lint_config(
                check.LintInput({}, mesh=make_mesh(world, tp=tp, pp=pp), **given)
            )
        ] == told
    # With any number of ranks.
    assert [problem.fix for problem in divisibility.check_tp(4, model_config)] == [
        "use --tp 1 or 2 or 3"
    ]


def test_fp16_is_refused_on_a_cpu_only() -> None:
    config = put(put(shipped("zero2"), "bf16.enabled", False), "fp16", {"enabled": True})
    assert (
        check.lint_config(check.LintInput(config)) == []
        and check.check_device(config, "cuda") == []
    )
    assert [problem.where for problem in check.check_device(config, "cpu")] == [
        "fp16.enabled = true"
    ]
    # Some CPUs support fp16, and DeepSpeed checks this.
    assert check.check_device(config, "cpu", has_fp16=True) == []


def test_a_swap_folder_must_be_a_writable_drive(tmp_path: Path) -> None:
    def rules(folder: str) -> list[str]:
        config = put(shipped("zero3_nvme"), "zero_optimization.offload_optimizer.nvme_path", folder)
        return [
            problem.rule
            for problem in swap.check_swap(config, tmp_path)
            if "offload_optimizer" in problem.where
        ]

    assert rules("nvme_swap") == [] and rules(str(tmp_path)) == []
    assert "does not exist" in rules(str(tmp_path / "absent"))[0]
    assert "in memory" in rules("/dev/shm")[0]
