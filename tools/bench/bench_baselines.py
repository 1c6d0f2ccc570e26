"""Measure the same run under torch's DDP, torch's FSDP2, and DeepSpeed's ZeRO-0, -2 and -3, side by
side.

    # prints Markdown; progress goes to stderr
    python tools/bench/bench_baselines.py > tools/bench/bench_baselines.md
    python tools/bench/bench_baselines.py --rounds 20 --steps 40 --seq_len 512

Each way is a command that a user would type: the nano recipe with another --engine or
--deepspeed_config. It runs on 2 ranks, or on one rank for each GPU. A round starts each way once,
in random order. Flags that are not listed here go to the recipe.
"""

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import (
    ROOT,
    deepspeed_command,
    exit_with_log,
    flags,
    fold,
    heading,
    job_environment,
    load_average,
    median_interval,
    own_command,
    parser_of,
    ratios,
    say,
    shuffled,
    software_and_machine,
)
from recipekit.spec.run_folder import read_metrics

RECIPE = ROOT / "recipes" / "llama_nano_zero2.py"
WAYS = {
    "ddp": ("torch's DDP", ["--engine", "ddp"]),
    "fsdp2": ("torch's FSDP2", ["--engine", "fsdp2"]),
    "zero0": ("DeepSpeed, ZeRO-0", ["--deepspeed_config", "zero0.json"]),
    "zero2": ("DeepSpeed, ZeRO-2", ["--deepspeed_config", "zero2.json"]),
    "zero3": ("DeepSpeed, ZeRO-3", ["--deepspeed_config", "zero3.json"]),
}
BESIDE = "zero2"  # the way that the ratios compare with
WARM_UP = 3  # steps of a job before the first measured step
ENOUGH_ROUNDS = 6  # with fewer, order statistics do not enclose a median with 95 % confidence
LIMIT = 300  # seconds of a job


def arguments_of(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the bench's own flags; return them and the remaining flags, which the recipe reads."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=8,
        metavar="N",
        help=(
            f"Number of starts of each way. A measurement needs at least {ENOUGH_ROUNDS}. (default:"
            " %(default)s)"
        ),
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=16,
        metavar="N",
        help=(
            f"Optimizer steps of each start, including {WARM_UP} warm-up steps. (default:"
            " %(default)s)"
        ),
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=list(WAYS),
        default=list(WAYS),
        help="Ways to measure. (default: all)",
    )
    arguments, rest = parser.parse_known_args(argv)
    if arguments.steps < WARM_UP + 2 or arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, and --steps at least {WARM_UP + 2}")
    return arguments, rest


def main() -> int:
    arguments, rest = arguments_of(sys.argv[1:])
    import torch

    load, gpus = load_average(), torch.cuda.device_count()
    ranks, rounds = gpus or 2, arguments.rounds
    own = flags({"steps": arguments.steps, "warmup_steps": 0, "eval_every": 0})
    found = {way: [] for way in arguments.ways}
    with tempfile.TemporaryDirectory(prefix="bench_baselines_") as folder:
        for number, order in enumerate(shuffled(arguments.ways, rounds), 1):
            for way in order:
                words = [*WAYS[way][1], *own, "--no-export", "--no-wandb", *rest]
                measured = job(Path(folder) / f"{way}_{number}", ranks, words)
                found[way].append(measured)
                say(
                    f"round {number} of {rounds}, {way}: {1000 * measured['step_s']:.0f} ms a step,"
                    f" start-up {measured['start_s']:.1f} s"
                )

    report = software_and_machine("torch", "deepspeed", "transformers") | {
        "command": own_command("bench_baselines.py"),
        "load_before": load,
        "load_after": load_average(),
        "ranks": ranks,
        "on_gpu": bool(gpus),
        "rounds": rounds,
        "steps": arguments.steps,
        "found": found,
    }
    print(page(report), end="")
    return 0


def job(out: Path, ranks: int, words: list[str]) -> dict[str, Any]:
    """Run the recipe with these flags to its end; return its times, memory and traffic.

    If the command fails, exit with its log.
    """
    command = deepspeed_command(ranks, str(RECIPE), "--out", str(out), *words)
    log = out.with_suffix(".log")
    environment = job_environment()
    with log.open("wb") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=out.parent, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        marks = watch(process, out, began)

    lines = read_metrics(out)
    if process.wait() or len(lines) <= WARM_UP:
        exit_with_log(command, process.returncode, log)

    measured_steps = len(lines) - WARM_UP
    first, last = (marks.get(step) for step in (WARM_UP, len(lines)))
    return {
        "start_s": min(at for steps, (at, _) in marks.items() if steps) - lines[0]["step_s"],
        "step_s": statistics.median(line["step_s"] for line in lines[WARM_UP:]),
        "tokens": (lines[-1]["tokens"] - lines[WARM_UP - 1]["tokens"]) / measured_steps,
        "peak": lines[-1]["peak_mem_bytes"],
        "sent": (last[1] - first[1]) / measured_steps if first and last else math.nan,
        "loss": lines[-1]["loss"],
    }


def watch(
    process: subprocess.Popen[bytes], out: Path, began: float
) -> dict[int, tuple[float, int]]:
    """Watch a run until it ends or `LIMIT` is reached.

    For each number of finished steps, return two values: the seconds since `began`, and the bytes
    that the host had received from itself. Both are read when the number first appears.
    """
    marks: dict[int, tuple[float, int]] = {}
    while process.poll() is None and time.perf_counter() - began < LIMIT:
        steps = len(read_metrics(out))
        marks.setdefault(steps, (time.perf_counter() - began, loopback()))
        time.sleep(0.005)
    if process.poll() is None:
        process.kill()
    return marks


def loopback() -> int:
    """Return the bytes that this host has received from itself, or 0 if the kernel does not report
    them.
    """
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return 0
    return next(
        (
            int(line.partition(":")[2].split()[0])
            for line in lines
            if line.strip().startswith("lo:")
        ),
        0,
    )


def table_row(way: str, found: dict[str, list[dict[str, Any]]], on_gpu: bool) -> str:
    """Write a way's medians over its starts."""
    starts = found[way]
    middle = {key: statistics.median(start[key] for start in starts) for key in starts[0]}
    beside = found.get(BESIDE, starts)
    faster = ratios(*([start["step_s"] for start in one] for one in (starts, beside)))
    cells = [
        f"{middle['loss']:.4f}",
        f"{middle['tokens'] / middle['step_s']:,.0f}",
        "1" if beside is starts else "{:.3f} ({:.3f} to {:.3f})".format(*median_interval(faster)),
        f"{middle['peak'] / 2**20:,.0f}",
        "not measured" if on_gpu else f"{middle['sent'] / 2**20:.1f}",
        f"{middle['start_s']:.1f}",
    ]
    return f"| {WAYS[way][0]} | {' | '.join(cells)} |"


def page(report: dict[str, Any]) -> str:
    """Write the result as Markdown."""
    rows = [table_row(way, report["found"], report["on_gpu"]) for way in report["found"]]
    few = (
        ""
        if report["rounds"] >= ENOUGH_ROUNDS
        else f"\n**Fewer than {ENOUGH_ROUNDS} rounds: a trial, not a measurement.**"
    )
    return fold(f"""# DDP, FSDP or ZeRO?

{heading(report, report["command"])}.

The table compares the five engines on the same run: the nano recipe in bf16 on {report["ranks"]}
    ranks. In each round, every engine starts once and trains for {report["steps"]} steps, in random
    order. The figures are medians of {report["rounds"]} rounds.{few}

| engine | last loss | tokens/s | x {BESIDE} (95 %) | peak MiB a rank | MiB sent a step |
    start-up s |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}

{WORDS}""")


WORDS = fold("""This was not measured on GPUs.

- **Loss:** every engine trains on the same rows. ZeRO and FSDP2 compute in bf16 from fp32 master
  weights. DDP runs under autocast, which keeps norms in fp32.
- **Tokens/s:** computed from the median step after the warm-up. The interval is computed from the
  ratios of the rounds.
- **Peak:** the resident size of the rank that uses the most memory. In every engine, imports
  account for about 500 MiB.
- **Sent:** the bytes that all ranks together sent over the loopback device, from the warm-up to the
  last step. Nothing else may use this device during the bench.
- **Start-up:** the time from the command to the beginning of the first step.

## Which do I take?

1. **The whole model fits on one GPU (16 to 18 bytes a parameter, and the activations):** use DDP,
   because there is nothing to tune.
2. **Only weights and activations fit:** use ZeRO-2, which sends no weights in the forward pass.
3. **The weights do not fit:** use FSDP2 or ZeRO-3, which shard the same tensors. FSDP2 needs only
   torch, and no JSON. Choose ZeRO-3 if you also want to offload states to the host or to NVMe, to
   train adapters, or to use tp or sp.
4. **A layer does not fit, rows are too long, or the network is too slow:** use tp, pp, sp or ep.
   Only DeepSpeed's engine supports them here
   ([recipes/PARALLELISM.md](../../recipes/PARALLELISM.md)).

You can change the engine of a run later, with `--engine` or `--deepspeed_config`, because each of
    the five resumes from the checkpoints of the others. Training continues as before, and the
    export is equal bit for bit (`tests/loop/test_engines.py`).

The table shows the bytes that one of N ranks holds for each parameter, without activations
    (`--dry_run` prints them):

| engine | weights | gradients | optimizer states | sent and received a step, in fp32 (4) or bf16
    (2) |
|---|---|---|---|---|
| DDP | 4, and 2 while it computes | 4 | 8 | gradients once: 2 x 4 |
| ZeRO-0 | 2, and 4 for master weights | 2 | 8 | gradients once: 2 x 2 |
| ZeRO-2 | 2, and 4/N for master weights | 4/N | 8/N | gradients each micro-batch, weights once |
| ZeRO-3 | 2/N, and 4/N for master weights | 4/N | 8/N | weights twice and gradients once, each
    micro-batch |
| FSDP2 | 4/N, and a layer | 4/N | 8/N | weights twice and gradients once, each micro-batch |
""")


if __name__ == "__main__":
    sys.exit(main())
