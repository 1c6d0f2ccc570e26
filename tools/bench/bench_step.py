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
import io
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from harness import (
    ROOT,
    deepspeed_command,
    exit_with_log,
    flags,
    fold,
    job_environment,
    parser_of,
    say,
    shown_versions,
    today,
    versions_of,
)
from recipekit.spec.run_folder import read_metrics

RANKS, WARM_UP, MOST_DOCUMENTS = 2, 4, 4000
MOST_STEPS = 1_000_000  # a run is ended long before
RECIPE = "smollm2_135m_zero1.py"


def arguments_of(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the bench's own flags; return them and the remaining flags, which the recipe reads."""
    parser = parser_of(__doc__)
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
    """Write a commit's files into a folder, and return that folder."""
    packed = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def write_documents(file: Path) -> None:
    """Write short documents as JSON lines, the same at every call.

    The documents are excerpts from the standard library's sources.
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
    """A run that can be stopped and continued."""

    launcher: psutil.Popen
    out: Path  # the run folder
    log: Path

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the ranks and their child processes."""
        for process in self.launcher.children(recursive=True):
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def steps(self, least: int) -> list[float]:
        """Wait for at least `least` steps; return the seconds of each step so far.

        If the run has ended, exit with its log.
        """
        while True:
            done = read_metrics(self.out)
            if len(done) >= least:
                return [line["step_s"] for line in done]
            if self.launcher.poll() is not None:
                exit_with_log(list(self.launcher.args), self.launcher.returncode, self.log)
            time.sleep(0.1)

    def turn(self, seconds: float) -> float:
        """Continue the run for a while; return its median seconds per step.

        The first step is not counted, because it may have started earlier.
        """
        before = len(self.steps(0))
        self.send(signal.SIGCONT)
        time.sleep(seconds)
        found = self.steps(before + 3)[before + 1 :]
        self.send(signal.SIGSTOP)
        return statistics.median_low(found)

    def end(self) -> None:
        """Kill the run."""
        self.send(signal.SIGKILL)
        self.launcher.kill()
        self.launcher.wait()


def started(tree: Path, out: Path, seq_len: int, words: list[str]) -> Job:
    """Start a tree's recipe, wait for its first steps and pause it there."""
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
    recipe = [str(tree / "recipes" / RECIPE), "--tiny", "--no-export", "--no-wandb"]
    command = deepspeed_command(RANKS, *recipe, *words, *flags(numbers))
    environment = job_environment(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    log = out.with_suffix(".log")
    with log.open("w") as prints:
        launcher = psutil.Popen(command, env=environment, stdout=prints, stderr=subprocess.STDOUT)
    job = Job(launcher, out, log)
    job.steps(WARM_UP)
    job.send(signal.SIGSTOP)
    return job


def round_of(
    trees: dict[str, Path], folder: Path, seq_len: int, turns: int, seconds: float, words: list[str]
) -> list[dict[str, float]]:
    """Run one job of each tree in turn; return the seconds per step in each turn, by tree name."""
    jobs: dict[str, Job] = {}
    try:
        for name, tree in trees.items():
            jobs[name] = started(tree, folder / name, seq_len, words)
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
    """Write the result as Markdown: the milliseconds per step, and the commit's ratio to this tree
    in each round.
    """
    lines = []
    for seq_len, rounds in rows.items():
        before, after = (
            1000 * statistics.median(turn[name] for turns in rounds for turn in turns)
            for name in ("before", "now")
        )
        ratios = sorted(ratio_of_round(turns) for turns in rounds)
        lines.append(
            f"| {seq_len:,} | {before:,.0f} | {after:,.0f} | {statistics.median(ratios):.3f} |"
            f" {ratios[0]:.3f} to {ratios[-1]:.3f} |"
        )
    rounds = next(iter(rows.values()))
    command = f"python tools/bench/bench_step.py {' '.join(words)}"
    versions = shown_versions(versions_of("torch", "deepspeed", "transformers"))
    return fold(f"""# How fast is a step, compared with an earlier commit?

Written by `{command}` on {today()}:
{os.cpu_count()} CPU cores, no accelerator, {versions}.

The earlier commit and this working tree each train `{RECIPE} --tiny` on {RANKS} ranks.
They take turns on the CPU. The bench ran {len(rounds)} rounds. In each round, both trees had
    {len(rounds[0])} turns.
Each row of training data is packed from documents of 100 to 1,000 bytes, and each byte is a token.

| tokens of a row | {commit}: ms a step | this tree: ms a step | faster by, median | all rounds |
|---|---|---|---|---|
{chr(10).join(lines)}
""")


def ratio_of_round(turns: list[dict[str, float]]) -> float:
    """Return the commit's step time divided by this tree's, as the median over a round's turns."""
    return statistics.median(turn["before"] / turn["now"] for turn in turns)


def main() -> int:
    arguments, rest = arguments_of(sys.argv[1:])
    rows: dict[int, list[list[dict[str, float]]]] = {seq_len: [] for seq_len in arguments.seq_len}
    with tempfile.TemporaryDirectory(prefix="bench_step_") as temporary:
        folder = Path(temporary)
        trees = {"before": checked_out(arguments.commit, folder / "tree"), "now": ROOT}
        write_documents(folder / "documents.jsonl")
        data = [*flags({"dataset": folder / "documents.jsonl"}), *rest]
        for seq_len in arguments.seq_len:
            for number in range(arguments.rounds):
                own = folder / f"{seq_len}_{number}"
                own.mkdir()
                order = dict(sorted(trees.items(), reverse=number % 2 == 1))
                rows[seq_len].append(
                    round_of(order, own, seq_len, arguments.turns, arguments.seconds, data)
                )
                say(
                    f"{seq_len} tokens, round {number + 1} of {arguments.rounds}:"
                    f" {ratio_of_round(rows[seq_len][-1]):.3f}"
                )
    print(page(arguments.commit, rows, sys.argv[1:]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
