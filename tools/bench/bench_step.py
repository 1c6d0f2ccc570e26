"""Measures a step of this working tree beside a step of an earlier commit: whole runs of one recipe, in turn, on the CPU.

    python tools/bench/bench_step.py COMMIT > tools/bench/bench_step.md
    python tools/bench/bench_step.py HEAD~3 --seq_len 256 --rounds 2 --steps 8        # a trial, of two minutes

Both train the same tiny model on the same rows, packed of documents of 100 to 1,000 bytes each. A round is one run of each,
in alternating order; a run's time is the median of its steps but the first three. Flags that are not listed here are a recipe's,
and must be known to the commit too.
"""

import argparse
import datetime
import io
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

from recipekit.hosts import op_cache
from recipekit.hosts.ports import free_port
from recipekit.run_folder import read_metrics

RANKS, WARM_UP, MOST_DOCUMENTS = 2, 3, 4000
RECIPE = "smollm2_135m_zero1.py"


def arguments_of(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Reads the bench's own flags; returns them and the rest, which are the recipe's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("commit", help="what the working tree is measured beside")
    parser.add_argument("--seq_len", "--seq-len", type=int, nargs="+", default=[256, 4096], help="tokens of a row (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="runs of each (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=15, help=f"of a run, the first {WARM_UP} not timed (default: %(default)s)")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.rounds < 1 or arguments.steps <= WARM_UP:
        parser.error(f"--rounds {arguments.rounds} --steps {arguments.steps}: at least one round, and more than {WARM_UP} steps")
    return arguments, rest


def checked_out(commit: str, folder: Path) -> Path:
    """Writes the files of a commit into a folder and returns it."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def write_documents(file: Path) -> None:
    """Writes JSON lines of short documents, cut from the standard library's own sources: the same on every call."""
    drawn, texts = random.Random(0), sorted(Path(os.__file__).parent.glob("*.py"))
    with file.open("w") as lines:
        count = 0
        for text in texts:
            left = text.read_text(errors="replace")
            while left and count < MOST_DOCUMENTS:
                size = drawn.randint(100, 1000)
                lines.write(json.dumps({"text": left[:size]}) + "\n")
                left, count = left[size:], count + 1


def seconds_of(tree: Path, out: Path, seq_len: int, steps: int, flags: list[str]) -> float:
    """Runs the recipe of a tree and returns the median seconds of its timed steps."""
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", str(RANKS), "--master_port", str(free_port())]
    numbers = {"seq_len": seq_len, "steps": steps, "micro_batch": 1, "global_batch": 4, "warmup_steps": 1, "save_every": 0, "eval_every": 0, "out": out}
    command = [*launcher, str(tree / "recipes" / RECIPE), "--tiny", "--no-export", "--no-wandb", *flags]
    command += [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    own = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(op_cache.folder()), "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with exit code {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return statistics.median(line["step_s"] for line in read_metrics(out)[WARM_UP:])


def page(commit: str, rows: dict[int, list[tuple[float, float]]], steps: int, words: list[str]) -> str:
    """Writes the result as Markdown: milliseconds of a step, and the ratio commit / this tree over the rounds."""
    lines = []
    for seq_len, pairs in rows.items():
        before, after = (1000 * statistics.median(values) for values in zip(*pairs, strict=True))
        ratios = sorted(before / after for before, after in pairs)
        lines.append(f"| {seq_len:,} | {before:,.0f} | {after:,.0f} | {statistics.median(ratios):.3f} | {ratios[0]:.3f} to {ratios[-1]:.3f} |")
    number = len(next(iter(rows.values())))
    return f"""# A step beside an earlier commit

Written by `python tools/bench/bench_step.py {" ".join(words)}` on {datetime.date.today().isoformat()}:
{os.cpu_count()} CPU cores, no accelerator, Python {platform.python_version()}, torch {version("torch")}, deepspeed {version("deepspeed")}, transformers {version("transformers")}.

`{RECIPE} --tiny` on {RANKS} ranks, rows packed of documents of 100 to 1,000 bytes, a token each;
{number} rounds of {steps} steps.

| tokens of a row | {commit}: ms a step | this tree: ms a step | faster by, median | all rounds |
|---|---|---|---|---|
{chr(10).join(lines)}
"""


def main() -> int:
    arguments, flags = arguments_of(sys.argv[1:])
    rows: dict[int, list[tuple[float, float]]] = {seq_len: [] for seq_len in arguments.seq_len}
    with tempfile.TemporaryDirectory(prefix="bench_step_") as temporary:
        folder = Path(temporary)
        trees = {"before": checked_out(arguments.commit, folder / "tree"), "now": ROOT}
        write_documents(folder / "documents.jsonl")
        data = ["--dataset", str(folder / "documents.jsonl"), *flags]
        for seq_len in arguments.seq_len:
            for turn in range(arguments.rounds):
                order = sorted(trees, reverse=turn % 2 == 1)
                took = {name: seconds_of(trees[name], folder / f"{name}_{seq_len}_{turn}", seq_len, arguments.steps, data) for name in order}
                rows[seq_len].append((took["before"], took["now"]))
                print(f"{seq_len} tokens, round {turn + 1} of {arguments.rounds}: {took['before']:.3f} and {took['now']:.3f} s a step", file=sys.stderr)
    print(page(arguments.commit, rows, arguments.steps, sys.argv[1:]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
