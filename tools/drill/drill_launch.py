"""Kill a job of `python -m launch --max_restarts` at random moments, and compare its end with an
uninterrupted run.

    python tools/drill/drill_launch.py --kills 50 --seed 0

The job is recipes/llama_nano_zero2.py --tiny on two ranks. SIGKILL hits a rank, the launcher that
forked the ranks, or the host's agent (`launch.host`). Four of five kills come after a step of the
current start, the others during start-up. Only the job itself restarts the ranks. It must end by
itself with exit code 0, and its losses must equal the uninterrupted run's bit for bit.

Measured: 2026-11-21, 2 CPU cores under a load of 15: 10 kills (4 of a rank, 3 of a launcher, 3 of
the agent). Bit-equal, goodput 10.3 %, 9 minutes. Exit codes: 0 every comparison held; 1 one did not
(the folder is kept, and its name printed); 2 wrong command line.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipekit.spec.run_folder import read_metrics, reproducible_values

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "llama_nano_zero2.py"
STEPS_A_KILL = 6  # schedule steps per kill; some starts take more than one step
PATIENCE = 240.0  # seconds allowed for any wait, even on a busy machine
TARGETS = ("rank", "rank", "rank", "launcher", "agent")


def children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def command(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""


def family(coordinator: int) -> dict[str, list[int]]:
    """Return the running start's agent, launcher and ranks, without processes that have not started
    yet.
    """
    found: dict[str, list[int]] = {
        "agent": [pid for pid in children(coordinator) if "launch.host" in command(pid)],
        "launcher": [],
        "rank": [],
    }
    for agent in found["agent"]:
        found["launcher"] += [
            pid for pid in children(agent) if "deepspeed.launcher.launch" in command(pid)
        ]
    for launcher in found["launcher"]:
        found["rank"] += [pid for pid in children(launcher) if RECIPE.name in command(pid)]
    return found


def start(
    folder: Path, run: str, steps: int, *flags: str, resume: str = "auto"
) -> subprocess.Popen[bytes]:
    words = [
        sys.executable,
        "-m",
        "launch",
        "--gpus",
        "2",
        *flags,
        str(RECIPE),
        "--tiny",
        "--steps",
        str(steps),
        "--out",
        run,
    ]
    words += [
        "--save_every",
        "2",
        "--eval_every",
        "0",
        "--no-wandb",
        "--no-export",
        "--resume",
        resume,
    ]
    variables = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
    }
    path = filter(None, [str(ROOT), str(ROOT / "recipes"), os.environ.get("PYTHONPATH")])
    variables["PYTHONPATH"] = os.pathsep.join(path)
    with (folder / f"{run}.log").open("wb") as log:
        return subprocess.Popen(
            words,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_for(true: Callable[[], Any], seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def kill_one(
    job: subprocess.Popen[bytes],
    run: Path,
    chance: random.Random,
    early: bool,
    before: set[int],
    before_step: int,
) -> str:
    """Kill a process of the running start, and return its kind, or "" if the job had ended.

    `before` contains the ranks of earlier starts, and `before_step` is the furthest step that those
    starts reached.
    """
    running = lambda: job.poll() is None  # noqa: E731
    wait_for(lambda: not running() or set(family(job.pid)["rank"]) - before)
    # Wait until the job is past the step of every earlier kill, because three failures at the same
    # step correctly end the job.
    reached = lambda: len(read_metrics(run))  # noqa: E731
    if not early:
        wait_for(lambda: not running() or reached() > before_step)
    time.sleep(chance.uniform(0, 3.0 if early else 0.6))
    target = chance.choice(TARGETS)
    pids = family(job.pid)
    before |= set(pids["rank"])
    if not pids[target] or not running():
        return ""
    os.kill(chance.choice(pids[target]), signal.SIGKILL)
    wait_for(lambda: not running() or not set(pids["agent"]) & set(family(job.pid)["agent"]))
    return target


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--kills",
        type=int,
        default=50,
        metavar="N",
        help="Number of kills. Each takes 10 to 40 s on two cores. (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="Random seed for the moments and targets of the kills. (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=120,
        metavar="N",
        help="Minutes after which the drill stops killing. (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    if arguments.kills < 1:
        parser.error("--kills is at least 1")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = arguments_of(argv)
    folder = Path(tempfile.mkdtemp(prefix="drill_launch_"))
    steps = STEPS_A_KILL * arguments.kills + 2
    tally = Counter[str]()
    began = time.monotonic()

    problems = run_with_kills(arguments, folder, steps, tally)
    problems += compare_with_unbroken(folder, steps)

    log = (folder / "run.log").read_text(errors="replace")
    goodput = [line for line in log.splitlines() if "goodput" in line]
    print(goodput[-1] if goodput else "no goodput was printed")
    parts = ", ".join(
        f"{count} of a {target}" if target != "agent" else f"{count} of the agent"
        for target, count in sorted(tally.items())
    )
    print(f"{sum(tally.values())} kills ({parts}), {steps} steps, {time.monotonic() - began:.0f} s")

    if problems:
        print(f"BROKEN: {'; '.join(problems)}; kept in {folder}", file=sys.stderr)
        return 1
    print("it ended by itself, and every loss equals the uninterrupted run's bit for bit")
    shutil.rmtree(folder)
    return 0


def run_with_kills(
    arguments: argparse.Namespace, folder: Path, steps: int, tally: Counter[str]
) -> list[str]:
    """Start the job, kill its processes as often as requested, and wait until the job ends.

    Count the kills in `tally`, and return the problems.
    """
    run, chance = folder / "run", random.Random(arguments.seed)
    began = time.monotonic()
    # Only the first start uses --resume never.
    job = start(folder, "run", steps, "--max_restarts", str(arguments.kills + 10), resume="never")
    early, before, before_step = False, set[int](), 0
    problems = []
    try:
        while (
            sum(tally.values()) < arguments.kills
            and job.poll() is None
            and time.monotonic() - began < 60 * arguments.minutes
        ):
            early = not early and chance.random() < 0.25
            if target := kill_one(job, run, chance, early, before, before_step):
                before_step = max(before_step, len(read_metrics(run)))
                tally[target] += 1
                print(
                    f"kill {sum(tally.values())}: {target}{' while it begins' if early else ''}, at"
                    f" step {len(read_metrics(run))} of {steps}",
                    flush=True,
                )
        if not wait_for(lambda: job.poll() is not None, 10 * PATIENCE):
            problems.append("it did not end by itself")
    finally:
        if job.poll() is None:
            job.terminate()
        job.wait()

    if job.returncode:
        problems.append(f"it ended with {job.returncode}")
    folders = [path.name for path in folder.glob("run.*") if path.is_dir()]
    if aside := [name for name in folders if name != "run.logs"]:
        problems.append(f"a restart began anew ({', '.join(aside)})")
    return problems


def compare_with_unbroken(folder: Path, steps: int) -> list[str]:
    """Run the job without kills; return a problem if the two runs' losses differ."""
    print("the unbroken run", flush=True)
    code = start(folder, "unbroken", steps).wait()
    expected = reproducible_values(read_metrics(folder / "unbroken"))
    lines = reproducible_values(read_metrics(folder / "run"))
    if code or expected != lines or len(lines) != steps:
        return ["its losses differ from the uninterrupted run"]
    return []


if __name__ == "__main__":
    sys.exit(main())
