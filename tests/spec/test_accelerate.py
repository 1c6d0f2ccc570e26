"""Flags and starts of `accelerate launch` that a recipe rejects."""

import subprocess
import sys
from pathlib import Path

import pytest
from pool import environment, free_port

pytestmark = pytest.mark.usefixtures("no_launcher")


ONE = ["--num_processes", "1", "--num_machines", "1", "--use_deepspeed"]
STAGE = (
    "accelerate launch --zero_stage 3: applies to scripts that use an Accelerator, but a recipe"
    " starts DeepSpeed itself. Leave it out. The JSON"
)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param(["--num_processes", "1"], [], marks=pytest.mark.slow),
        (
            [
                *ONE,
                "--mixed_precision",
                "bf16",
                "--gradient_accumulation_steps",
                "1",
                "--offload_param_device",
                "none",
                "--dynamo_backend",
                "no",
            ],
            [],
        ),
        (
            [*ONE, "--zero_stage", "3", "--gradient_accumulation_steps", "4"],
            ["--gradient_accumulation_steps 4: ", STAGE],
        ),
        pytest.param(
            ["--num_processes", "1", "--mixed_precision", "fp16", "--dynamo_backend", "inductor"],
            ["--mixed_precision fp16: ", "--dynamo_backend INDUCTOR: "],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--num_processes", "1", "--use_fsdp"],
            ["accelerate launch --use_fsdp: "],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value[-1] if value else "nothing",
)
def test_flags_of_accelerate_that_no_recipe_reads_are_refused(
    tmp_path: Path, flags: list[str], said: list[str]
) -> None:
    """accelerate only writes these flags to the environment, so they used to be ignored silently.

    An Accelerator would read the flags from the environment.
    """
    (tmp_path / "mine.py").write_text(
        "from recipekit.spec.accelerate import check_accelerate\nimport os\nfor problem in"
        " check_accelerate(os.environ):\n    print(problem)\n"
    )
    command = [
        str(Path(sys.executable).parent / "accelerate"),
        "launch",
        "--main_process_port",
        str(free_port()),
        *flags,
        "mine.py",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment() | {"HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = done.stdout.splitlines()
    assert (
        done.returncode == 0
        and len(told) == len(said)
        and all(part in line for part, line in zip(said, told, strict=True))
    ), (told, done.stderr[-3000:])


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        pytest.param(["--num_processes", "2"], 0, id="several"),
        pytest.param(
            ["--cpu", "--num_processes", "2"], 0, id="several on the CPU", marks=pytest.mark.slow
        ),
        pytest.param(["--num_processes", "1"], 1, id="one", marks=pytest.mark.slow),
        pytest.param(
            ["--multi_gpu", "--num_processes", "2"],
            2,
            id="as the refusal says",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_accelerate_starts_as_many_ranks_as_it_was_asked_for(
    tmp_path: Path, flags: list[str], ranks: int
) -> None:
    """Without several GPUs, accelerate used to start only one of several ranks silently."""
    (tmp_path / "mine.py").write_text(
        "from recipekit.spec.accelerate import check_launcher\nimport os, sys\nfor problem in"
        " check_launcher(os.environ):\n   "
        " sys.exit(str(problem))\nopen(f\"rank{os.environ.get('RANK', '0')}\", 'w').close()\n"
    )
    place = (
        environment()
        | {"HF_HOME": str(tmp_path)}
        | ({"MASTER_PORT": str(free_port())} if ranks == 1 else {})
    )
    command = [
        str(Path(sys.executable).parent / "accelerate"),
        "launch",
        "--main_process_port",
        str(free_port()),
        *flags,
        "mine.py",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=place, capture_output=True, text=True, timeout=300, check=False
    )
    assert len(list(tmp_path.glob("rank*"))) == ranks, done.stderr[-3000:]
    told = (
        "accelerate launch: has started 1 of several processes, as it does where it sees fewer than"
        " two GPUs. Write accelerate launch --multi_gpu"
    )
    assert (done.returncode == 0) == (ranks > 0) and (told in done.stderr) == (ranks == 0), (
        done.stderr[-3000:]
    )
