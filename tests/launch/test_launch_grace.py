"""A signal during a step of 40 s, sent by `launch`, a real Slurm and a pod.

The signal must lead to one checkpoint, no stack traces, and one further start that continues the
run.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import yaml
from job import NANO, Job, metrics, steps_done
from pool import ROOT, free_port, import_path
from slurm import Slurm, slurm_or_skip

# Eight micro-batches of 5 s each. Large models with offload or many micro-batches have such steps.
SLOW = """
import pathlib, time
from recipekit import Recipe, run

def adapt(model):
    def wait(*_):
        pathlib.Path("{name}.begun").touch()
        time.sleep(5)
    model.register_forward_pre_hook(wait)
    return model

RECIPE = Recipe(model="recipekit/llama-nano", init="random", tokenizer="bytes", dataset="builtin", \
ds_config="zero2.json",
                seq_len=128, micro_batch=1, global_batch=8, steps=10, save_every=5, eval_every=0, \
wandb=False, export=False,
                out="{folder}/{name}", adapt=adapt)
if __name__ == "__main__":
    run(RECIPE)
"""
PATHS = import_path(ROOT, ROOT / "recipes")
START, TWO_STEPS = 240, 300  # seconds, on a machine with other load


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_or_skip() as made:
        yield made


def slow_recipe(folder: Path, name: str) -> Path:
    recipe = folder / f"{name}.py"
    recipe.write_text(
        SLOW.replace("{folder}", str(folder))
        .replace("{name}", name)
        .replace('Path("', f'Path("{folder}/')
    )
    return recipe


def as_a_pod(folder: Path, recipe: Path) -> Job:
    """Run the manifest's command with its environment, as the kubelet does."""
    flags = [
        "--where",
        "k8s",
        "--nodes",
        "1",
        "--gpus",
        "1",
        "--image",
        "x",
        "--folder",
        str(ROOT),
        "--dry-run",
        str(NANO),
    ]
    manifest = subprocess.run(
        [sys.executable, "-m", "launch", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    _, job = yaml.safe_load_all(manifest.stdout)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    variables = {
        variable["name"]: variable["value"] for variable in container["env"] if "value" in variable
    }
    variables |= {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "JOB_COMPLETION_INDEX": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    variables |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": PATHS,
    }
    *command, _ = container["command"]  # no image contains the recipe of the test
    return Job(folder / "pod", [*command, str(recipe)], **variables)


def ended_well(run: Path, text: str) -> int:
    """Check that a run has only one checkpoint, and return the checkpoint's step."""
    assert "stuck" not in text and "Thread 0x" not in text, text
    (only,) = (run / "checkpoints").glob("step_*")
    assert (
        (run / "checkpoints" / "latest").read_text() == only.name == f"step_{steps_done(run):08d}"
    ), text
    return steps_done(run)


@pytest.mark.slow
def test_a_signal_in_a_step_of_40_s_leads_to_one_checkpoint_and_one_requeue(
    slurm: Slurm, ops: Callable[[str], None], tmp_path: Path
) -> None:
    """The three jobs run at the same time, because they mostly wait.

    The signal arrives in step 2 of the first two jobs, and in step 1 of the Slurm job.
    """
    with ExitStack() as closed:
        words = [sys.executable, "-m", "launch", "--gpus", "1", str(slow_recipe(tmp_path, "alone"))]
        alone = closed.enter_context(closing(Job(tmp_path, words, PYTHONPATH=PATHS)))
        pod = closed.enter_context(closing(as_a_pod(tmp_path, slow_recipe(tmp_path, "evicted"))))
        output = tmp_path / "job.log"
        batch = [
            "sbatch",
            "--parsable",
            "--nodes=1",
            f"--output={output}",
            "launch/slurm.sbatch",
            "--gpus",
            "1",
        ]
        number = slurm.run(*batch, str(slow_recipe(tmp_path, "queued")), folder=ROOT).strip()
        told = lambda: f"{slurm.job(number)}\n{output.read_text() if output.exists() else ''}"  # noqa: E731

        alone.wait_for((tmp_path / "queued.begun").exists, START)
        slurm.run("scancel", "--signal=TERM", number)
        for job, name in ((alone, "alone"), (pod, "evicted")):
            job.wait_for(lambda name=name: steps_done(tmp_path / name) == 1, START)
            job.process.terminate()

        assert alone.wait(TWO_STEPS) == 143 and pod.wait(TWO_STEPS) == 143, (
            alone.output + pod.output
        )
        assert ended_well(tmp_path / "alone", alone.output) in (2, 3) and ended_well(
            tmp_path / "evicted", pod.output
        ) in (2, 3)
        assert {
            line["step_s"] > 39
            for name in ("alone", "evicted")
            for line in metrics(tmp_path / name)
        } == {True}

        alone.wait_for(lambda: slurm.job(number).get("Restarts") == "1", TWO_STEPS)
        done = ended_well(tmp_path / "queued", told())
        assert done in (1, 2)
        alone.wait_for(
            lambda: (
                f"resumed from {tmp_path}/queued/checkpoints/step_{done:08d}" in output.read_text()
            ),
            START,
        )
        slurm.run("scancel", number)
        assert (
            slurm.job(number)["Restarts"] == "1"
            and output.read_text().count("is back in the queue") == 1
        ), told()
