"""Compare a step of this working tree with a step of an earlier commit: runs of one recipe that
take turns on the CPU.

    python tools/bench/bench_step.py COMMIT > tools/bench/bench_step.md
    # a trial of a minute
    python tools/bench/bench_step.py HEAD~3 --seq_len 256 --rounds 1 --turns 4

Both train the same tiny model on the same rows, packed from documents of 100 to 1,000 bytes. A
round starts one run of each. The runs take turns, and one is stopped while the other runs, so that
other load slows both. A round's ratio is the median over its turns. Flags that are not listed here
go to the recipe, and the earlier commit must know them as well.
"""

import argparse
import datetime
import io
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

from recipekit.hosts import op_cache
from recipekit.hosts.ports import free_port
from recipekit.spec.run_folder import read_metrics

RANKS, WARM_UP, MOST_DOCUMENTS = 2, 4, 4000
MOST_STEPS = 1_000_000  # more than a run ever does before it is ended
RECIPE = "smollm2_135m_zero1.py"


def arguments_of(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Reads the bench's own flags; returns them and the rest, which are the recipe's."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("commit", metavar="COMMIT", help="Earlier commit to compare with.")
    parser.add_argument(
        "--seq_len",
        "--seq-len",
        type=int,
        nargs="+",
        default=[256, 4096],
        metavar="N",
        help="Row lengths in tokens. (default: 256 4096)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=4,
        metavar="N",
        help="Number of runs of each version. (default: %(default)s)",
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=6,
        metavar="N",
        help="Turns of each version in a round. (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.5,
        metavar="N",
        help=(
            "Minimum seconds per turn. A turn has at least three steps, and the first is not timed."
            " (default: %(default)s)"
        ),
    )
    arguments, rest = parser.parse_known_args(argv)
    if arguments.rounds < 1 or arguments.turns < 1:
        parser.error(f"--rounds {arguments.rounds} --turns {arguments.turns}: at least one of each")
    return arguments, rest


def checked_out(commit: str, folder: Path) -> Path:
    """Writes the files of a commit into a folder and returns it."""
    packed = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def write_documents(file: Path) -> None:
    """Writes JSON lines of short documents, cut from the standard library's own sources: the same
    on every call.
    """
    drawn, texts = random.Random(0), sorted(Path(os.__file__).parent.glob("*.py"))
    with file.open("w") as lines:
        count = 0
        for text in texts:
            left = text.read_text(errors="replace")
            while left and count < MOST_DOCUMENTS:
                size = drawn.randint(100, 1000)
                lines.write(json.dumps({"text": left[:size]}) + "\n")
                left, count = left[size:], count + 1


@dataclass
class Job:
    """Names a run: its launcher, its output folder, and where it prints."""

    launcher: psutil.Popen
    out: Path
    log: Path

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the ranks, and to what they started."""
        for process in self.launcher.children(recursive=True):
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def steps(self, least: int) -> list[float]:
        """Waits until so many steps are done; returns the seconds of each so far.

        A run that has ended ends the bench.
        """
        while True:
            done = read_metrics(self.out)
            if len(done) >= least:
                return [line["step_s"] for line in done]
            if self.launcher.poll() is not None:
                sys.exit(
                    f"{' '.join(map(str, self.launcher.args))}\nended with exit code"
                    f" {self.launcher.returncode}:\n{self.log.read_text()[-5000:]}"
                )
            time.sleep(0.1)

    def turn(self, seconds: float) -> float:
        """Lets the run go on for a while; returns the median seconds of its steps but the first,
        which had begun before.
        """
        before = len(self.steps(0))
        self.send(signal.SIGCONT)
        time.sleep(seconds)
        found = self.steps(before + 3)[before + 1 :]
        self.send(signal.SIGSTOP)
        return statistics.median_low(found)

    def end(self) -> None:
        """Ends the run at once."""
        self.send(signal.SIGKILL)
        self.launcher.kill()
        self.launcher.wait()


def started(tree: Path, out: Path, seq_len: int, flags: list[str]) -> Job:
    """Starts the recipe of a tree, waits for its first steps and stops it there."""
    launcher = [
        str(Path(sys.executable).parent / "deepspeed"),
        "--num_gpus",
        str(RANKS),
        "--master_port",
        str(free_port()),
    ]
    numbers = {
        "seq_len": seq_len,
        "steps": MOST_STEPS,
        "micro_batch": 1,
        "global_batch": 4,
        "warmup_steps": 1,
        "save_every": 0,
        "eval_every": 0,
        "out": out,
    }
    command = [
        *launcher,
        str(tree / "recipes" / RECIPE),
        "--tiny",
        "--no-export",
        "--no-wandb",
        *flags,
    ]
    command += [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    own = {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(op_cache.folder()),
        "PYTHONPATH": "",
        "CUDA_VISIBLE_DEVICES": "",
    }
    log = out.with_suffix(".log")
    with log.open("w") as prints:
        job = Job(
            psutil.Popen(command, env=os.environ | own, stdout=prints, stderr=subprocess.STDOUT),
            out,
            log,
        )
    job.steps(WARM_UP)
    job.send(signal.SIGSTOP)
    return job


def round_of(
    trees: dict[str, Path], folder: Path, seq_len: int, turns: int, seconds: float, flags: list[str]
) -> list[dict[str, float]]:
    """Runs one job of each tree in turn; returns the seconds of a step in each turn, by the names
    of the trees.
    """
    jobs: dict[str, Job] = {}
    try:
        for name, tree in trees.items():
            jobs[name] = started(tree, folder / name, seq_len, flags)
        return [
            {
                name: jobs[name].turn(seconds)
                for name in (list(jobs) if turn % 2 else reversed(jobs))
            }
            for turn in range(turns)
        ]
    finally:
        for job in jobs.values():
            job.end()


def page(commit: str, rows: dict[int, list[list[dict[str, float]]]], words: list[str]) -> str:
    """Writes the result as Markdown: milliseconds of a step, and the ratio commit / this tree of
    each round.
    """
    lines = []
    for seq_len, rounds in rows.items():
        before, after = (
            1000 * statistics.median(turn[name] for turns in rounds for turn in turns)
            for name in ("before", "now")
        )
        ratios = sorted(ratio(turns) for turns in rounds)
        lines.append(
            f"| {seq_len:,} | {before:,.0f} | {after:,.0f} | {statistics.median(ratios):.3f} |"
            f" {ratios[0]:.3f} to {ratios[-1]:.3f} |"
        )
    rounds = next(iter(rows.values()))
    command = f"python tools/bench/bench_step.py {' '.join(words)}"
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers")
    )
    return f"""# How fast is a step, compared with an earlier commit?

Written by `{command}` on {datetime.date.today().isoformat()}:
{os.cpu_count()} CPU cores, no accelerator, Python {platform.python_version()}, {versions}.

The earlier commit and this working tree each train `{RECIPE} --tiny` on {RANKS} ranks.
They take turns on the CPU. The bench ran {len(rounds)} rounds. In each round, both trees had \
{len(rounds[0])} turns.
Each row of training data is packed from documents of 100 to 1,000 bytes, and each byte is a token.

| tokens of a row | {commit}: ms a step | this tree: ms a step | faster by, median | all rounds |
|---|---|---|---|---|
{chr(10).join(lines)}
"""


def ratio(turns: list[dict[str, float]]) -> float:
    """Finds how many times as long the commit's steps take as this tree's, by a round's turns."""
    return statistics.median(turn["before"] / turn["now"] for turn in turns)


def main() -> int:
    arguments, flags = arguments_of(sys.argv[1:])
    rows: dict[int, list[list[dict[str, float]]]] = {seq_len: [] for seq_len in arguments.seq_len}
    with tempfile.TemporaryDirectory(prefix="bench_step_") as temporary:
        folder = Path(temporary)
        trees = {"before": checked_out(arguments.commit, folder / "tree"), "now": ROOT}
        write_documents(folder / "documents.jsonl")
        data = ["--dataset", str(folder / "documents.jsonl"), *flags]
        for seq_len in arguments.seq_len:
            for number in range(arguments.rounds):
                own = folder / f"{seq_len}_{number}"
                own.mkdir()
                order = dict(sorted(trees.items(), reverse=number % 2 == 1))
                rows[seq_len].append(
                    round_of(order, own, seq_len, arguments.turns, arguments.seconds, data)
                )
                print(
                    f"{seq_len} tokens, round {number + 1} of {arguments.rounds}:"
                    f" {ratio(rows[seq_len][-1]):.3f}",
                    file=sys.stderr,
                    flush=True,
                )
    print(page(arguments.commit, rows, sys.argv[1:]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
