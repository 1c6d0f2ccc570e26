"""Kill training jobs at random moments, again and again, and compare the results with uninterrupted
runs.

    python tools/drill/drill_checkpoint.py --kills 200 --chain 25 --layouts zero1 pp2_tp2 --seed 0

A chain is one job of recipes/llama_nano_zero2.py --tiny, or of another recipe (--recipe), that
saves at every step. The job is killed and started again with the same command, and each start makes
at least one step. SIGKILL hits a random rank, sometimes `launch.py` or `deepspeed`. Every second
kill comes while a checkpoint is written, and some starts save in the background.

After every kill no process may be left, and `latest` must name a checkpoint whose files and tensors
equal the saved ones. The last start runs to the end. Its losses, weights and optimizer states must
equal the uninterrupted run's bit for bit. tools/drill/drill_checkpoint.md has the measured runs.

Exit codes: 0 every comparison held; 1 one did not (the folder is kept, and its name printed); 2
wrong command line.
"""

import argparse
import contextlib
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from recipekit.checkpoints.verify import verify
from recipekit.hosts.ports import free_port
from recipekit.spec.paths import path_argument
from recipekit.spec.run_folder import (
    CHECKPOINTS,
    EXPORT,
    LATEST,
    METRICS,
    read_metrics,
    reproducible_values,
)
from recipekit.spec.step_names import step_folders, step_name, step_of
from recipekit.storage import manifest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "llama_nano_zero2.py"
LAYOUTS: dict[str, tuple[int, list[str]]] = {  # ranks, flags
    "own": (2, []),  # the recipe's own layout
    "zero1": (2, ["--deepspeed_config", "zero1.json"]),
    "zero2": (2, ["--deepspeed_config", "zero2.json"]),
    "zero3": (2, ["--deepspeed_config", "zero3.json"]),
    "pp2": (2, ["--deepspeed_config", "zero1.json", "--pp", "2", "--tp", "1"]),
    "pp2_tp2": (4, ["--deepspeed_config", "zero1.json", "--pp", "2", "--tp", "2"]),
}
MARK = "CHECKPOINT_DRILL"  # an environment variable that every process of a job inherits
STEPS_A_LIFE = 6  # schedule steps per kill; some starts of the job take more than one step
# Ranks whose launcher was killed notice the loss only after a few more steps. Without spare steps,
# a short chain would end before its last kill.
SPARE_STEPS = 20
START = 180.0  # seconds within which a start must make a step, even on a busy machine
GONE = 60.0  # seconds within which every process must have ended
TARGETS = ("rank", "rank", "rank", "rank", "launch.py", "deepspeed")


class Broken(Exception):
    """Raised if a promise was not kept."""


@dataclass
class Chain:
    """One job and its starts: the folder where it runs, and a record of its kills."""

    layout: str
    kills: int
    folder: Path
    random: random.Random
    recipe: Path = RECIPE
    tally: Counter[str] = field(default_factory=Counter)
    slowest_end: float = 0.0  # seconds from a kill until all processes had ended
    longest_save: float = 0.2  # seconds

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def steps(self) -> int:
        return STEPS_A_LIFE * self.kills + SPARE_STEPS

    def done(self) -> int:
        return len(read_metrics(self.run))

    def saving(self) -> bool:
        """Return True while a checkpoint is being written, which means that its staging folder
        exists.
        """
        try:
            return any(
                step_of(name) is not None
                for name in os.listdir(self.run / CHECKPOINTS / ".staging")
            )
        except FileNotFoundError:  # the folder exists only during a save
            return False


@dataclass
class Job:
    """A running `deepspeed` command."""

    process: subprocess.Popen[bytes]
    mark: str
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def pids(self) -> dict[int, dict[str, str]]:
        """Find the job's live processes, even after their parent died: pid -> environment."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and MARK.encode() in (
                    content := (entry / "environ").read_bytes()
                ):
                    variables = dict(
                        item.split("=", 1)
                        for item in content.decode(errors="replace").split("\0")
                        if "=" in item
                    )
                    if variables.get(MARK) == self.mark:
                        found[int(entry.name)] = variables
        return found

    def launcher(self) -> int:
        """Return the pid of `launch.py`; 0 if it has ended."""
        return next((pid for pid in self.pids() if parent(pid) == self.process.pid), 0)

    def ranks(self) -> list[int]:
        launcher = self.launcher()
        return sorted(
            pid
            for pid, variables in self.pids().items()
            if "LOCAL_RANK" in variables and parent(pid) == launcher
        )


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def start(chain: Chain, run: str, *flags: str) -> Job:
    ranks, own = LAYOUTS[chain.layout]
    deepspeed = Path(sys.executable).parent / "deepspeed"
    command = [
        str(deepspeed),
        "--num_gpus",
        str(ranks),
        "--master_port",
        str(free_port()),
        str(chain.recipe),
        "--tiny",
        *own,
    ]
    command += [
        "--steps",
        str(chain.steps),
        "--out",
        run,
        "--save_every",
        "1",
        "--eval_every",
        "0",
        "--keep",
        "3",
        "--no-wandb",
        *flags,
    ]
    mark = f"{chain.folder}:{time.monotonic_ns()}"
    log = chain.folder / f"{run}_{time.monotonic_ns()}.log"
    environment = os.environ | {
        MARK: mark,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{deepspeed.parent}{os.pathsep}{os.environ['PATH']}",
    }
    path = filter(None, [str(ROOT / "recipes"), os.environ.get("PYTHONPATH")])
    environment["PYTHONPATH"] = os.pathsep.join(path)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=chain.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Job(process, mark, log)


def wait_for(true: Callable[[], Any], seconds: float, pause: float = 0.02) -> bool:
    """Wait until `true()` is true; return False after a timeout."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def finish(job: Job, what: str) -> None:
    """Raise `Broken` unless the job ends by itself with exit code 0."""
    try:
        ended = wait_for(lambda: job.process.poll() is not None, 10 * START)
        if not ended or job.process.returncode:
            raise Broken(f"{what} ended with {job.process.returncode}: {job.output[-3000:]}")
        if not wait_for(lambda: not job.pids(), GONE, pause=0.1):
            raise Broken(f"{what} left the processes {sorted(job.pids())}")
    finally:
        end(job)


def end(job: Job) -> None:
    """End the remaining processes of a job."""
    for pid in job.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.process.wait(GONE)


def kill(chain: Chain, job: Job, inside: bool) -> bool:
    """Kill a random process at a random moment after a step in the current start.

    Return False if the job had already ended. With `inside`, kill the process while a checkpoint is
    being written. The folder is checked just before the signal, to see whether that succeeded.
    """
    running = lambda: job.process.poll() is None  # noqa: E731
    wait_for_step(chain, job)
    launcher, ranks = job.launcher(), job.ranks()
    if not ranks:
        return False
    target = chain.random.choice(TARGETS)
    rank = chain.random.choice(ranks)
    pid = {"rank": rank, "launch.py": launcher, "deepspeed": job.process.pid}[target]
    time.sleep(chain.random.uniform(0, 0.6))

    was_inside = inside and wait_for_save(chain, job)
    was_inside = was_inside or chain.saving()
    if not running():
        return False

    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    chain.tally.update(["kills", target, *(["inside a save"] if was_inside else [])])
    if not wait_for(lambda: job.process.poll() is not None and not job.pids(), GONE, pause=0.1):
        raise Broken(
            f"after the kill of {target} the processes {sorted(job.pids())} were left:"
            f" {job.output[-3000:]}"
        )
    chain.slowest_end = max(chain.slowest_end, time.monotonic() - killed)
    print(
        f"{chain.layout}: killed {target} {'inside a save ' if was_inside else ''}at step"
        f" {chain.done()}",
        flush=True,
    )
    return True


def wait_for_step(chain: Chain, job: Job) -> None:
    """Wait for a step of this start, or for the job's end; raise `Broken` if the job failed by
    itself.
    """
    began_with = chain.done()
    running = lambda: job.process.poll() is None  # noqa: E731
    if not wait_for(lambda: chain.done() > began_with or not running(), START):
        raise Broken(f"no step in {START:g} s: {job.output[-3000:]}")
    if not running() and chain.done() < chain.steps:
        raise Broken(f"it ended by itself with {job.process.returncode}: {job.output[-3000:]}")


def wait_for_save(chain: Chain, job: Job) -> bool:
    """Wait for a random moment within a save; return False if the job ended first."""
    was_inside = False
    running = lambda: job.process.poll() is None  # noqa: E731
    while running() and not was_inside:
        wait_for(lambda: chain.saving() or not running(), GONE, pause=0.001)
        begun = time.monotonic()
        wait_for(
            lambda: not chain.saving(), chain.random.uniform(0, chain.longest_save), pause=0.001
        )
        was_inside = chain.saving()
        if not was_inside:
            chain.longest_save = max(chain.longest_save, time.monotonic() - begun)
    return was_inside


def check_latest(chain: Chain) -> None:
    """Raise `Broken` unless `latest` names a checkpoint that equals the saved one.

    `latest` may be missing as long as no checkpoint is complete.
    """
    folder = chain.run / CHECKPOINTS
    if not (folder / LATEST).exists():
        if len(step_folders(folder)) > 1:
            raise Broken(f"{folder} has no latest")
        chain.tally["before the first checkpoint"] += 1
        return
    step = folder / (folder / LATEST).read_text()
    if faults := manifest.find_faults(step) or verify(step):
        raise Broken(f"latest names {step}: {faults}")
    chain.tally["verified"] += 1


def check_equal(chain: Chain) -> None:
    """Raise `Broken` unless the chain's end equals the end of the uninterrupted run."""
    whole = chain.folder / "unbroken"
    if reproducible_values(read_metrics(chain.run)) != reproducible_values(read_metrics(whole)):
        raise Broken(f"{chain.run / METRICS} differs from {whole / METRICS}")
    weights = [
        {path.name: path.read_bytes() for path in (run / EXPORT).glob("*.safetensors")}
        for run in (chain.run, whole)
    ]
    if weights[0] != weights[1] or not weights[0]:
        raise Broken(f"the weights in {chain.run / EXPORT} differ from those in {whole / EXPORT}")
    last = step_name(chain.steps)
    tensors = [
        manifest.read_manifest(run / CHECKPOINTS / last)["tensors"] for run in (chain.run, whole)
    ]
    if tensors[0] != tensors[1]:
        raise Broken(f"{last} of {chain.run} has other weights or optimizer states than {whole}")
    chain.tally["bit-equal"] += 1


def drill(chain: Chain) -> None:
    """Run a chain from its first start to its end; raise `Broken` if a comparison fails."""
    chain.folder.mkdir(parents=True)
    finish(start(chain, "unbroken"), "the unbroken run")
    for number in range(chain.kills):
        background = chain.random.random() < 0.4
        job = start(chain, "run", *(["--save_in_background"] if background else []))
        try:
            if not kill(chain, job, inside=number % 2 == 0 or chain.random.random() < 0.2):
                break
        finally:
            end(job)
        chain.tally["in the background"] += background
        check_latest(chain)
    finish(start(chain, "run"), "the last life")
    check_latest(chain)
    check_equal(chain)


def table(chains: list[Chain]) -> str:
    columns = (
        "kills",
        "inside a save",
        "in the background",
        "rank",
        "launch.py",
        "deepspeed",
        "before the first checkpoint",
        "verified",
        "bit-equal",
    )
    lines = [["layout", *columns, "slowest end (s)"]]
    lines += [
        [chain.layout, *(str(chain.tally[name]) for name in columns), f"{chain.slowest_end:.1f}"]
        for chain in chains
    ]
    total = [str(sum(chain.tally[name] for chain in chains)) for name in columns]
    lines.append(["all", *total, f"{max((chain.slowest_end for chain in chains), default=0):.1f}"])
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--kills",
        type=int,
        default=200,
        metavar="N",
        help="Total number of kills. Each takes 15 to 60 s on two cores. (default: %(default)s)",
    )
    parser.add_argument(
        "--chain",
        type=int,
        default=25,
        metavar="N",
        help="Maximum number of kills of one job. (default: %(default)s)",
    )
    parser.add_argument(
        "--recipe",
        type=Path,
        default=RECIPE,
        metavar="FILE",
        help="Recipe to run with --tiny. (default: recipes/llama_nano_zero2.py)",
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=LAYOUTS,
        default=[name for name in LAYOUTS if name != "own"],
        help="Layouts to use in turn. own is the recipe's own layout. (default: all except own)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="Random seed for the moments and targets of the kills. (default: %(default)s)",
    )
    parser.add_argument(
        "--folder",
        type=path_argument,
        metavar="PATH",
        help="Folder for the jobs. (default: a temporary folder, removed after success)",
    )
    arguments = parser.parse_args(argv)
    if arguments.kills < 1 or arguments.chain < 1:
        parser.error("--kills and --chain are at least 1")
    if not arguments.recipe.is_file():
        parser.error(f"--recipe {arguments.recipe} is no file: name one of recipes/")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = arguments_of(argv)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="drill_checkpoint_"))
    chains: list[Chain] = []
    broken = 0

    for number, first in enumerate(range(0, arguments.kills, arguments.chain)):
        layout = arguments.layouts[number % len(arguments.layouts)]
        kills = min(arguments.chain, arguments.kills - first)
        chains.append(
            Chain(
                layout,
                kills,
                folder / f"{number:03d}_{layout}",
                random.Random(f"{arguments.seed} {number}"),
                arguments.recipe.resolve(),
            )
        )
        try:
            drill(chains[-1])
        except Broken as error:
            broken += 1
            print(f"BROKEN, chain {number} in {chains[-1].folder}: {error}", file=sys.stderr)
        else:
            shutil.rmtree(chains[-1].folder)

    print(table(chains))
    print(
        f"{len(chains) - broken} of {len(chains)} chains equal the unbroken run bit for bit"
        + (f"; the others are kept in {folder}" if broken else "")
    )
    if not broken and not arguments.folder:
        folder.rmdir()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
