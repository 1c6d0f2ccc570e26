"""`--deterministic`: every setting must be active on every rank and be reported.

Two runs and a resume must have the same bits.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from job import metrics, reproducible_values
from recipekit.kernels import deterministic
from recipekit.kernels.deterministic import DETERMINISM_VARIABLES, check_environment
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import IDENTITY
from safetensors.torch import load_file
from short_runs import BASE, train

# The required value of each setting, queried with torch's functions.
EXPECTED = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_NVLS_ENABLE": "0",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    "deterministic_algorithms": True,
    "fill_uninitialized_memory": False,
    "cudnn_deterministic": True,
    "cudnn_benchmark": False,
    "cudnn_attention": False,
}


@contextlib.contextmanager
def putting_back() -> Iterator[None]:
    """Restore the settings of this process afterwards."""
    before = {name: os.environ.get(name) for name in DETERMINISM_VARIABLES}
    fill, cudnn = (
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.deterministic,
    )  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # pyright: ignore[reportAttributeAccessIssue]
        torch.backends.cudnn.deterministic = cudnn
        torch.backends.cuda.enable_cudnn_sdp(True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def train_and_ask(recipe: Recipe, argv: list[str]) -> tuple[Any, str, dict[str, Any]]:
    """Train on a rank of a pool, and record the settings in the middle of the last step."""
    from recipekit import train as loop

    asked: dict[str, Any] = {}
    step = loop.train_step

    def asking(*arguments: Any, **more: Any) -> Any:
        asked.update({name: os.environ.get(name) for name in DETERMINISM_VARIABLES})
        asked["deterministic_algorithms"] = torch.are_deterministic_algorithms_enabled()
        asked["fill_uninitialized_memory"] = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
        asked["cudnn_deterministic"] = torch.backends.cudnn.deterministic
        asked["cudnn_benchmark"] = torch.backends.cudnn.benchmark
        asked["cudnn_attention"] = torch.backends.cuda.cudnn_sdp_enabled()
        return step(*arguments, **more)

    with putting_back(), mock.patch.object(loop, "train_step", asking):
        result, printed = train(recipe, argv)
    return result, printed, asked


def bits(run: Path) -> Any:
    """Return all unrounded training metrics, and the final weights."""
    weights = {
        name: value
        for file in sorted((run / "hf").glob("*.safetensors"))
        for name, value in load_file(file).items()
    }
    return reproducible_values(metrics(run)), weights


def test_settings_are_in_force_on_every_rank_and_runs_have_the_same_bits(
    pools: Any, tmp_path: Path
) -> None:
    # GPT-2 has dropout, so random numbers matter.
    recipe = replace(
        BASE, model="openai-community/gpt2", export=True, eval_every=0, warmup_steps=0, steps=3
    )
    argv = {"one": [], "two": [], "stopped": ["--stop_at", "1"]}
    for run, more in argv.items():
        told = pools.run(
            2,
            train_and_ask,
            recipe=recipe,
            argv=["--deterministic", "--out", str(tmp_path / run), *more],
        )
        assert [(result, asked) for result, _, asked in told] == [(0, EXPECTED)] * 2
        assert "deterministic, on every rank: CUBLAS_WORKSPACE_CONFIG :4096:8, " in told[0][1]
        assert json.loads((tmp_path / run / "run.json").read_text())["deterministic"] == EXPECTED
    told = pools.run(
        2,
        train_and_ask,
        recipe=recipe,
        argv=["--deterministic", "--out", str(tmp_path / "stopped")],
    )
    assert [result for result, _, _ in told] == [0, 0], told
    first, first_weights = bits(tmp_path / "one")
    assert len(first) == 3 and first_weights
    for run in ("two", "stopped"):
        again, weights = bits(tmp_path / run)
        assert again == first and weights.keys() == first_weights.keys()
        assert all(torch.equal(weights[name], value) for name, value in first_weights.items())


def test_a_setting_that_was_put_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with putting_back():
        deterministic.enable_determinism()
        assert deterministic.check_active_settings() == EXPECTED
        torch.use_deterministic_algorithms(True, warn_only=True)
        os.environ["NCCL_ALGO"] = "Tree"
        with pytest.raises(
            ConfigError,
            match=(
                "--deterministic on rank 3: the settings have changed since the start:"
                " NCCL_ALGO=Tree, deterministic_algorithms=False"
            ),
        ):
            deterministic.check_active_settings()


@pytest.mark.parametrize(
    ("name", "value"), [("NCCL_ALGO", "Tree"), ("CUBLAS_WORKSPACE_CONFIG", ":0:0")]
)
def test_a_variable_that_contradicts_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    argv = ["--tiny", "--deterministic"]
    with pytest.raises(
        ConfigError, match=rf"{name}={value}: contradicts --deterministic\. Unset it, or set it to "
    ):
        resolve_run(parse(BASE, Path("deterministic.py"), argv))
    assert (
        resolve_run(parse(BASE, Path("deterministic.py"), argv[:1])).recipe.deterministic is False
    )
    assert check_environment({"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Ring"}) == []
    # A resume may change the flag, because only the last bits of the results differ.
    assert "deterministic" not in IDENTITY


def test_cuda_that_was_used_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="CUDA was used before the run started"):
        deterministic.enable_determinism()
    assert not torch.are_deterministic_algorithms_enabled()
