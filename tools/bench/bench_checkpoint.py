"""Measure how long a checkpoint stalls training: our background save, our blocking save, and
DeepSpeed's plain save.

    # prints Markdown; progress goes to stderr
    python tools/bench/bench_checkpoint.py > tools/bench/bench_checkpoint.md
    python tools/bench/bench_checkpoint.py --rounds 9 --stages 3 --seq_len 512

For each ZeRO stage, 2 ranks (or one for each GPU) train a model of 106 M parameters (SmolLM2-135M
with a vocabulary of bytes). In every round each kind of save happens once, in random order. A few
timed steps follow each save. Flags that are not listed here go to the recipe.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from harness import (
    TRIAL,
    add_folder,
    add_json,
    build,
    deepspeed_command,
    engine_of,
    fold,
    folder_bytes,
    heading,
    job_environment,
    load_average,
    of_all_ranks,
    parser_of,
    report_of_ranks,
    run_rank,
    shuffled,
    software_and_machine,
)
from recipekit import Recipe
from recipekit.plan import RunPlan, resolve_run
from recipekit.spec.command import RunCommand, parse
from recipekit.spec.mesh import fit_batch
from recipekit.spec.run_folder import CHECKPOINTS
from recipekit.spec.step_names import step_name

TITLES = {
    "none": "no save",
    "plain": "`engine.save_checkpoint` (no fsync, no digest)",
    "at_once": "**ours**, blocking",
    "background": "**ours**, in the background",
}
RECIPE = Recipe(
    model="HuggingFaceTB/SmolLM2-135M",
    init="random",
    tokenizer="bytes",
    dataset="builtin",
    ds_config="zero2.json",
    seq_len=64,
    micro_batch=1,
    global_batch=2,
    lr=1e-4,
)
ENOUGH_ROUNDS = 5
SMALL = 0.2  # largest stall, relative to a blocking save's, that counts as a small fraction


def arguments_of(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the bench's own flags; return them and the remaining flags, which the recipe reads."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=ENOUGH_ROUNDS,
        metavar="N",
        help=(
            f"Number of saves of each kind. A measurement needs at least {ENOUGH_ROUNDS}. (default:"
            " %(default)s)"
        ),
    )
    parser.add_argument(
        "--steps-after",
        "--steps_after",
        type=int,
        default=3,
        metavar="N",
        help="Number of timed steps after each save. (default: %(default)s)",
    )
    parser.add_argument(
        "--stages",
        type=int,
        nargs="+",
        default=[2, 3],
        choices=(1, 2, 3),
        help="ZeRO stages to measure. (default: 2 3)",
    )
    add_folder(parser)
    add_json(parser)
    # Rank 0 writes its report to this file.
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser.parse_known_args(argv)


def main() -> int:
    arguments, recipe_argv = arguments_of(sys.argv[1:])
    if arguments.report:
        run_rank(partial(measure, arguments, recipe_argv), arguments.report)
        return 0
    if arguments.rounds < 1 or arguments.steps_after < 1:
        print("--rounds and --steps-after must be at least 1", file=sys.stderr)
        return 1
    import torch

    ranks = torch.cuda.device_count() or 2
    load = load_average()
    stages = {}
    for stage in arguments.stages:
        report = run_stage(stage, ranks, arguments.folder)
        if report is None:
            return 1
        stages[f"ZeRO-{stage}"] = report

    found = software_and_machine("torch", "deepspeed") | {
        "load_before": load,
        "load_after": load_average(),
        "ranks": ranks,
        "rounds": arguments.rounds,
        "steps_after": arguments.steps_after,
        "stages": stages,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    print(page(found), end="")
    return 0


def run_stage(stage: int, ranks: int, disk: Path) -> dict[str, Any] | None:
    """Run a stage's ranks, with checkpoints on `disk`, and return their report.

    If the ranks failed, print a message and return None.
    """
    with tempfile.TemporaryDirectory(prefix="bench_checkpoint_", dir=disk) as folder:
        report = Path(folder) / "report.json"
        words = ["--report", str(report), *sys.argv[1:], "--deepspeed_config", f"zero{stage}.json"]
        command = deepspeed_command(ranks, __file__, *words)
        return report_of_ranks(command, report, job_environment())


# The page
# --------------------------------------------------------------------------------------------------


def page(found: dict[str, Any]) -> str:
    """Write the result as Markdown."""
    tables = [
        stage_table(title, report, found["steps_after"])
        for title, report in found["stages"].items()
    ]
    few = "" if found["rounds"] >= ENOUGH_ROUNDS else TRIAL
    return fold(f"""# How long does a checkpoint stall training?

{heading(found, "tools/bench/bench_checkpoint.py")}; commit {found["commit"]}.

To compare the kinds of save, {found["ranks"]} ranks train in bf16 and save {found["rounds"]} times
    with each kind.
In each round, every kind saves once, in random order. The first save of a kind has its own column
    and is not counted in the others. All figures are medians, and the range of the stall is in
    parentheses.{few}

{chr(10).join(tables)}
- **Stall:** the time inside the call, on the slowest rank.
- **Steps after it:** the time of the next two steps, which share the cores and the disk with a
  background save. The slow-down is the difference from steps without a save.
- **Remaining wait:** how long the save still takes after these steps.
- **Bytes:** bytes on the disk for each parameter.

When you compare the figures, note that our save does more work than DeepSpeed's. Our save ends only
    when every byte is on the disk (fsync), and its manifest contains the sha256 of every file and a
    digest of every tensor. DeepSpeed's own save does none of this, so part of its output is still
    in memory when it returns. Before each save, the bench first writes all other pending data to
    the disk.
""")


def stage_table(title: str, report: dict[str, Any], steps_after: int) -> str:
    """Write the section of a ZeRO stage."""
    kinds = report["kinds"]
    lines, calm = [], median(kinds["none"]["steps"])
    for kind, own in kinds.items():
        stall, steps, left = (median(own[key]) for key in ("stall", "steps", "left"))
        cells = [
            f"{stall:.2f} ({min(own['stall']):.2f} to {max(own['stall']):.2f})",
            f"{own['first']:.2f}",
            f"{steps:.2f}",
            f"{steps - calm:+.2f}",
            f"{left:.2f}",
        ]
        bytes_each = own["bytes"] / report["parameters"]
        lines.append(f"| {TITLES[kind]} | {' | '.join(cells)} | {bytes_each:.2f} |")

    background, at_once, plain = (
        median(kinds[kind]["stall"]) for kind in ("background", "at_once", "plain")
    )
    small = f"**not** a small fraction (at most {SMALL:.0%})"
    if background <= SMALL * at_once:
        small = "a small fraction"
    return f"""## {title}: {report["model"]}, {report["parameters"] / 1e6:.1f} M parameters

| save | stall, s | first save, s | {steps_after} steps after it, s | slow-down, s |
    remaining wait, s | bytes |
|---|---|---|---|---|---|---|
{chr(10).join(lines)}

A background save stalls training for {background / at_once:.0%} as long as a blocking save,
    {small},
and for {background / plain:.0%} as long as DeepSpeed's plain save.
"""


# One rank
# --------------------------------------------------------------------------------------------------


def planned(command: RunCommand, out: Path) -> RunPlan:
    """Plan a stage, with a batch that the ranks share evenly. Raise `ConfigError` if there is a
    problem.
    """
    micro_batch, global_batch = fit_batch(
        command.world, command.recipe.micro_batch, command.recipe.global_batch, command.typed
    )
    own: dict[str, Any] = {
        "out": str(out),
        "resume": "never",
        "wandb": False,
        "micro_batch": micro_batch,
        "global_batch": global_batch,
    }
    return resolve_run(replace(command, recipe=replace(command.recipe, **own)))


def measure(arguments: argparse.Namespace, recipe_argv: list[str]) -> dict[str, Any]:
    """Measure one stage; return the same result on every rank. This is a collective operation."""
    import torch.distributed as dist

    plan = planned(parse(RECIPE, Path(__file__), recipe_argv), arguments.report.parent / "run")
    setup = set_up(plan)
    rank0 = plan.command.rank == 0
    kinds: dict[str, dict[str, Any]] = {
        kind: {"stall": [], "steps": [], "left": [], "bytes": 0} for kind in TITLES
    }
    train = partial(take_steps, plan, setup, arguments.steps_after)
    train()

    number = 0
    for turn, order in enumerate(shuffled(list(TITLES), arguments.rounds + 1)):
        for kind in order:
            if rank0:
                empty(setup.folder)
            number += 1
            seconds = {
                "stall": slowest(partial(save, setup, kind, number)),
                "steps": slowest(train),
                "left": slowest(setup.savers["background"].wait),
            }

            own = kinds[kind]
            own["bytes"] = folder_bytes(setup.folder)
            if turn == 0:
                own["first"] = seconds["stall"]
                continue
            for key, value in seconds.items():
                own[key].append(value)

        if rank0:
            print(
                f"ZeRO-{setup.zero_stage}, round {turn} of {arguments.rounds}: "
                + ", ".join(f"{k} {own['stall'][-1]:.2f} s" for k, own in kinds.items() if turn)
            )

    setup.stream.close()
    dist.barrier()
    return {"model": plan.recipe.model, "parameters": setup.parameters, "kinds": kinds}


@dataclass(frozen=True)
class Setup:
    """A stage's engine, its data, and the ways to save it."""

    engine: Any
    stream: Any
    folder: Path  # of the checkpoints
    plain: Any  # DeepSpeed's own checkpoint engine
    savers: dict[str, Any]  # ours, by kind
    zero_stage: int
    parameters: int


def set_up(plan: RunPlan) -> Setup:
    """Start the process group, and build the model, the engine and the savers.

    This is a collective operation.
    """
    from recipekit.checkpoints.retention import Retention
    from recipekit.checkpoints.save import Saver
    from recipekit.data.batching import DataRank
    from recipekit.data.processors import load_tokenizer
    from recipekit.data.request import request_from_recipe
    from recipekit.data.stream import open_stream
    from recipekit.engine.deepspeed_engine import apply_workarounds
    from recipekit.parallel.groups import ProcessGroups
    from recipekit.runtime.run_metadata import checkpoint_layout
    from recipekit.runtime.start import initialize_distributed

    recipe, device = plan.recipe, initialize_distributed(plan)
    groups = ProcessGroups(plan.mesh, device.type)
    _, built = build(plan, device, groups)
    engine = engine_of(built.model, plan.ds_config)
    apply_workarounds(engine)

    # A saver replaces the engine's checkpoint engine, so store DeepSpeed's checkpoint engine first.
    layout, folder, plain = (
        checkpoint_layout(plan, engine, built),
        plan.out / CHECKPOINTS,
        engine.checkpoint_engine,
    )
    made = partial(Saver, engine, folder, built.blueprint, layout, Retention(0))
    savers = {
        kind: made(kind == "background", lambda folder: None) for kind in ("at_once", "background")
    }

    stream = open_stream(
        request_from_recipe(recipe),
        load_tokenizer(recipe.model, recipe.tokenizer),
        rank=DataRank(plan.mesh.dp, groups.coords["dp"]),
    )
    size = sum(tensor.numel for tensor in built.blueprint.tensors if not tensor.buffer)
    return Setup(engine, stream, folder, plain, savers, layout.zero_stage, size)


def save(setup: Setup, kind: str, step: int) -> None:
    """Save a checkpoint in one of the ways in `TITLES`. This is a collective operation."""
    if kind == "plain":
        setup.engine.checkpoint_engine = setup.plain
        setup.engine.save_checkpoint(str(setup.folder), tag=step_name(step))
    elif kind != "none":
        setup.savers[kind].save(
            {"step": step, "tokens": 0, "data": None, "export_dtype": "bfloat16"}
        )


def empty(folder: Path) -> None:
    """Empty a folder, and write all pending data to the disk."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()


def take_steps(plan: RunPlan, setup: Setup, count: int) -> None:
    from recipekit.runtime.step_metrics import StepCounters
    from recipekit.tasks.find import load_task
    from recipekit.train import train_step

    recipe = plan.recipe
    for _ in range(count):
        batches = next(setup.stream)[0]
        counters = StepCounters(plan.mesh)
        train_step(setup.engine, load_task(recipe.task), batches, recipe.lr, counters)


def slowest(work: Callable[[], object]) -> float:
    """Return the seconds that the slowest rank needs for `work`. This is a collective operation."""
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    work()
    return max(of_all_ranks(time.perf_counter() - began))


if __name__ == "__main__":
    sys.exit(main())
