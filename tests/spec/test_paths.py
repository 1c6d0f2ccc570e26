"""Paths that are written: they are expanded, or rejected if they are not paths on this machine.

Other tests cover the folders of jobs and trials.
"""

import os
import platform
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from job import NANO
from pool import ROOT
from recipekit.plan import RunPlan, resolve_run
from recipekit.runtime.rank_consistency import check_same_run_folder
from recipekit.spec.command import parse, recipe_of
from recipekit.spec.errors import ConfigError
from recipekit.spec.hub import check_variables
from recipekit.spec.paths import local_path, run_folder, write_with_umask
from recipekit.spec.recipe import Recipe
from safetensors.numpy import save_file

from launch.run_folder import out_of

JOBS = ("LAUNCH_JOB_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID")
IS_ADDRESS = "must be a path on this machine, not an address"
ADDRESSES = [
    "s3://bucket/run",
    "gs://b/r",
    "hdfs://nn:8020/r",
    "az://c/r",
    "abfss://c@a.dfs/r",
    "S3://b",
    "file:///r",
    "s3:/b/r",
]
ADDRESSES += ["worker-1:/data/r", "me@worker-1:r", "$BUCKET/r", "${BUCKET}", "./s3://b/r"]
REFUSED = {
    "$NOWHERE/r": "the variable NOWHERE is not set",
    "${NOWHERE}": "the variable NOWHERE is not set",
    "$EMPTY/r": "the variable EMPTY is empty",
    "${SCRATCH:-/tmp}/r": "${SCRATCH:-/tmp}/r is not a valid variable",
    "~nobody_here/r": "the user nobody_here does not exist",
    "r/~/x": "~ is expanded only at the start of a path",
    **dict.fromkeys(ADDRESSES, IS_ADDRESS),
}
READ = {
    "~/r": "/srv/me/r",
    "~": "/srv/me",
    "$SCRATCH/r": "/scratch/me/r",
    "${SCRATCH}_2/r": "/scratch/me_2/r",
    "$TILDE/r": "/srv/me/r",
    "runs/a b": "runs/a b",
    "runs/12:30": "runs/12:30",
    "runs/a~": "runs/a~",
    "/data/5$": "/data/5$",
    "../r": "../r",
}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOWHERE", "WANDB_SWEEP_ID", "WANDB_RUN_ID", *JOBS):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "HOME": "/srv/me",
        "SCRATCH": "/scratch/me",
        "BUCKET": "s3://b",
        "TILDE": "~",
        "EMPTY": "",
    }.items():
        monkeypatch.setenv(name, value)


def plan(*words: str) -> RunPlan:
    return resolve_run(parse(recipe_of(NANO), NANO, ["--tiny", *words]))


def refused(*words: str) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as refusal:
        plan(*words)
    return [(problem.where, problem.rule) for problem in refusal.value.problems]


@pytest.mark.parametrize("text", READ)
def test_home_and_variables_are_expanded(text: str) -> None:
    assert str(local_path("out", text)) == str(run_folder(text, "runs/x")) == READ[text]


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_path_of_this_machine_is_refused(text: str) -> None:
    assert refused("--out", text) == [(f"out = {text}", REFUSED[text])]


def test_every_path_that_a_run_writes_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paths are the token cache and DeepSpeed's outputs."""
    monkeypatch.chdir(tmp_path)
    assert refused("--token_cache", "s3://b/c") == [("--token_cache s3://b/c", IS_ADDRESS)]
    assert refused("--token_cache", "$NOWHERE") == [
        ("--token_cache $NOWHERE", "the variable NOWHERE is not set")
    ]
    text = (
        (ROOT / "ds_configs" / "zero3_nvme.json").read_text().replace('"nvme_swap"', '"gs://b/c"')
    )
    (tmp_path / "own.json").write_text(text)
    keys = [
        f"zero_optimization.offload_{what}.nvme_path = gs://b/c" for what in ("optimizer", "param")
    ]
    assert refused("--deepspeed_config", "own.json") == [(key, IS_ADDRESS) for key in keys]
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    (tmp_path / "own.json").write_text(text.replace("gs://b/c", "$SCRATCH"))
    offload = plan("--deepspeed_config", "own.json").ds_config["zero_optimization"]
    assert (
        offload["offload_param"]["nvme_path"]
        == offload["offload_optimizer"]["nvme_path"]
        == str(tmp_path)
    )
    for block, name in (("csv_monitor", "output_path"), ("flops_profiler", "output_file")):
        (tmp_path / "own.json").write_text(
            f'{{"zero_optimization": {{"stage": 0}}, "{block}": {{"enabled": true, "{name}":'
            ' "s3://b/c"}}'
        )
        assert (f"{block}.{name} = s3://b/c", IS_ADDRESS) in refused(
            "--deepspeed_config", "own.json"
        )
    assert {path.name for path in tmp_path.iterdir()} == {"own.json"}


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("HF_HOME", "s3://b/hub", IS_ADDRESS),
        ("HF_DATASETS_CACHE", "$NOWHERE/x", "the variable NOWHERE is not set"),
        ("TORCH_EXTENSIONS_DIR", "gs://b/ops", IS_ADDRESS),
        (
            "TORCH_EXTENSIONS_DIR",
            "~/ops",
            (
                "must be a path without ~ and $, because programs would create a folder with that"
                " literal name"
            ),
        ),
        (
            "WANDB_CACHE_DIR",
            "$SCRATCH/wandb",
            (
                "must be a path without ~ and $, because programs would create a folder with that"
                " literal name"
            ),
        ),
        ("HF_HOME", "~/hub", ""),  # huggingface_hub expands both
        ("HF_HUB_CACHE", "$SCRATCH/hub", ""),
        ("TORCH_EXTENSIONS_DIR", "/scratch/ops", ""),
    ],
)
def test_the_folders_of_caches_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, rule: str
) -> None:
    monkeypatch.setenv(name, value)
    assert [(problem.where, problem.rule) for problem in check_variables(os.environ)] == (
        [(f"{name} = {value}", rule)] if rule else []
    )


@pytest.mark.parametrize(
    ("dataset", "where", "rule"),
    [
        ("s3://b/x.jsonl", "s3://b/x.jsonl", "only https:// and http:// addresses can be read"),
        (
            "a=gs://b/x.parquet?key=1@1; b=builtin@1",
            "gs://b/x.parquet",
            "only https:// and http:// addresses can be read",
        ),
        (
            "https://h/x.jsonl, hf://datasets/a/b",
            "hf://datasets/a/b",
            "only https:// and http:// addresses can be read",
        ),
        ("https://h/x.jsonl, x.jsonl", "x.jsonl", "a path cannot be combined with addresses"),
    ],
)
def test_data_that_no_run_reads_is_refused_by_a_plan(dataset: str, where: str, rule: str) -> None:
    assert (f"--dataset {where}", rule) in refused("--dry_run", "--dataset", dataset)


@pytest.mark.parametrize(
    "words",
    [
        ("convert_checkpoint.py", "to-hf", "run"),
        ("convert_checkpoint.py", "reshape", "run"),
        ("convert_checkpoint.py", "from-hf", "run"),
        ("quickstart.py", "--out"),
        ("doctor.py", "--out"),
        *(
            (f"bench/{name}.py", "--json")
            for name in ("bench_checkpoint", "bench_convert", "bench_data", "bench_loop")
        ),
        ("bench/bench_loss.py", "--page"),
        ("bench/bench_gpu.py", "--out"),
        ("drill/drill_checkpoint.py", "--folder"),
    ],
)
@pytest.mark.slow
def test_tools_refuse_addresses(tmp_path: Path, words: tuple[str, ...]) -> None:
    tool = [sys.executable, str(ROOT / "tools" / words[0]), *words[1:]]
    for text in ("s3://b/r", "$NOWHERE/r"):
        done = subprocess.run(
            [*tool, text], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert (
            done.returncode == 2
            and done.stderr.splitlines()[-1].count(f": {text}: {REFUSED.get(text, IS_ADDRESS)}. ")
            == 1
        )
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("name", "value"),
    [("SLURM_JOB_ID", "417"), ("PBS_JOBID", "8[2].host"), ("LAUNCH_JOB_ID", "a-b")],
)
def test_a_job_has_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    assert refused("--out", "runs/{job_id}") == [
        ("out = runs/{job_id}", "{job_id} requires a job of a scheduler")
    ]
    assert str(plan("--out", "runs/{job_id}", "--dry_run").out) == "runs/{job_id}"
    monkeypatch.setenv(name, value)
    assert str(plan("--out", "runs/{job_id}/{JOB_ID}").out) == f"runs/{value}/{value}"
    monkeypatch.setenv(name, "../x")
    assert refused("--out", "{job_id}") == [("out = {job_id}", "'../x' is not a valid folder name")]


def test_each_trial_of_a_sweep_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        refused("--out", "{wandb_run_id}")[0][1]
        == "{wandb_run_id} requires WANDB_RUN_ID, as `wandb agent` sets it"
    )
    assert refused("--out", "{run}") == [("out = {run}", "{run} is not a known placeholder")]
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    assert refused()[0] == (
        "WANDB_SWEEP_ID = s1",
        "WANDB_RUN_ID is not set, so this trial has no separate folder",
    )
    monkeypatch.setenv("WANDB_RUN_ID", "r1")
    assert str(plan().out) == "runs/llama_nano_zero2_tiny_sweep_s1/r1"
    assert "out: mine/r1, the folder of this trial of W&B sweep s1" in plan("--out", "mine").notes
    assert str(plan("--out", "a/{WANDB_RUN_ID}/b").out) == "a/r1/b"
    monkeypatch.delenv("WANDB_SWEEP_ID")
    assert (
        str(plan().out) == "runs/llama_nano_zero2_tiny"
        and str(plan("--out", "a_{wandb_run_id}").out) == "a_r1"
    )


@pytest.mark.parametrize("is_trial", [False, True])
def test_the_launcher_reads_a_run_folder_as_the_recipe_does(
    monkeypatch: pytest.MonkeyPatch, is_trial: bool
) -> None:
    """The launcher's logs are next to the run.

    If the ranks reject a run folder, the launcher's logs are in the default folder.
    """
    monkeypatch.setenv("WANDB_RUN_ID", "r1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    if is_trial:
        monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    for text in ["", *READ, "runs/{job_id}", "a/{wandb_run_id}", "{WANDB_RUN_ID}/$SCRATCH"]:
        flags = ["--out", text] if text else []
        assert (
            out_of(("recipes/x.py", *flags)) == parse(Recipe(), Path("recipes/x.py"), flags).out
        ), text
    for text in (*REFUSED, "{unknown}"):
        assert out_of(("recipes/x.py", "--out", text)) == Path("runs/x"), text


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o027, 0o077])
def test_files_have_the_mode_of_the_umask(tmp_path: Path, umask: int) -> None:
    file, before = tmp_path / "file", os.umask(umask)
    try:
        write_with_umask(file, lambda path: save_file({}, path))
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask


def agree_on(outs: list[str]) -> list[str]:
    """Run on a rank of a pool; return the problems."""
    try:
        check_same_run_folder(Path(outs[dist.get_rank()]))
    except ConfigError as error:
        return [
            re.sub(" on [^:]+:", " on HOST:", str(problem)).replace(platform.node(), "HOST")
            for problem in error.problems
        ]
    return []


def test_ranks_with_other_run_folders_are_named(pools: Any) -> None:
    """A variable may differ between hosts. Every rank must report the problem, and no rank may
    wait.
    """
    assert pools.run(2, agree_on, outs=["runs/x", "runs/x"]) == [[], []]
    refused = (
        "out = /b/x on HOST: rank 0 on HOST has /a/x. Write a path without variables, or give all"
        " hosts the same values"
    )
    assert pools.run(2, agree_on, outs=["/a/x", "/b/x"]) == [[refused], [refused]]
