"""Blocks of a DeepSpeed JSON whose package is not installed.

Lint and a start report the missing package in one line, before a model is built.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from recipekit.commands import lint
from recipekit.dslint import check, rules
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import FAILS, ConfigError
from recipekit.spec.recipe import Recipe

BATCH = {"train_micro_batch_size_per_gpu": 2}
BLOCKS = {  # path -> (the block, pip's name of the package, fix)
    "tensorboard.enabled": (
        {"enabled": True},
        "tensorboard",
        'set "tensorboard.enabled": false, or run pip install tensorboard',
    ),
    "comet.enabled": (
        {"enabled": True, "project": "p"},
        "comet_ml",
        'set "comet.enabled": false, or run pip install comet_ml',
    ),
    "expert_parallel.comm_backend": (
        {"enabled": True, "autoep_size": 1, "comm_backend": "deepep"},
        "deep_ep",
        'set it to "comm", or run pip install deep_ep',
    ),
    "tensor_parallel.vocab_parallel_ce_backend": (
        {"vocab_parallel_ce_backend": "liger"},
        "liger-kernel",
        'set it to "torch", or run pip install liger-kernel',
    ),
}


def file_of(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("path", BLOCKS)
def test_lint_names_the_package_and_both_ways_out(path: str, tmp_path: Path) -> None:
    block, package, fix = BLOCKS[path]
    file = file_of(tmp_path, {**BATCH, path.partition(".")[0]: block})
    for json_only in (True, False):
        problem = next(
            problem
            for problem in lint.lint(str(file), json_only=json_only)[0]
            if problem.where.startswith(f"{path} = ")
        )
        assert (problem.rule, problem.fix, problem.outcome) == (
            f"requires the package {package}, which is not installed",
            fix,
            FAILS,
        )


@pytest.mark.parametrize(
    "block", [{"enabled": "true"}, {"enabled": 1}, {"enabled": "on", "output_path": "logs"}]
)
def test_a_word_or_number_that_switches_a_block_on_counts(
    block: dict[str, Any], tmp_path: Path
) -> None:
    """DeepSpeed's blocks convert such values."""
    for name in ("tensorboard", "comet"):
        block = {
            key: value
            for key, value in block.items()
            if key != "output_path" or name == "tensorboard"
        }
        problems, _ = lint.lint(str(file_of(tmp_path, {**BATCH, name: block})), json_only=True)
        assert [problem.where.partition(" ")[0] for problem in problems] == [f"{name}.enabled"], (
            problems
        )


@pytest.mark.parametrize("block", [{"enabled": False}, {"enabled": False, "output_path": "logs"}])
def test_a_block_that_is_off_needs_nothing(block: dict[str, Any], tmp_path: Path) -> None:
    assert (
        lint.lint(str(file_of(tmp_path, {**BATCH, "tensorboard": block})), json_only=True)[0] == []
    )


def test_a_package_that_is_installed_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without __init__.py is not the package.

    For example, a folder of logs called tensorboard can be imported as a namespace package.
    """
    (tmp_path / "tensorboard").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    config = {"tensorboard": {"enabled": True}}
    assert not rules.is_package_importable("tensorboard") and check.lint_config(
        check.LintInput(config)
    )
    (tmp_path / "tensorboard" / "__init__.py").touch()
    assert (
        rules.is_package_importable("tensorboard")
        and check.lint_config(check.LintInput(config)) == []
    )


def test_a_start_refuses_it_before_a_model_is_built(tmp_path: Path) -> None:
    recipe = Recipe(model="org/model", ds_config={"tensorboard": {"enabled": True}})
    with pytest.raises(ConfigError) as refused:
        resolve_run(parse(recipe, tmp_path / "x.py", ["--tiny", "--dry_run"]))
    told = [str(problem) for problem in refused.value.problems if "tensorboard" in problem.where]
    assert len(told) == 1 and told[0].startswith(
        "tensorboard.enabled = true: requires the package tensorboard, which is not installed. Set "
    )
