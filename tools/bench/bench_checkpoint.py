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
import datetime
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

from recipekit import Recipe
from recipekit.hosts import op_cache
from recipekit.hosts.ports import free_port
from recipekit.plan import Plan, make_plan
from recipekit.spec.command import Command, parse
from recipekit.spec.mesh import fit_batch
from recipekit.spec.paths import path_of
from recipekit.spec.refusal import Refusal, exit_refused
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
SMALL = 0.2  # part of the stall of a save at once that counts as a small fraction


def arguments_of(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Reads the bench's own flags; returns them and the rest, which are the recipe's."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
    parser.add_argument(
        "--folder",
        type=path_of,
        default=Path(tempfile.gettempdir()),
        metavar="PATH",
        help="Working folder, on the disk to measure. (default: %(default)s)",
    )
    parser.add_argument(
        "--json",
        type=path_of,
        metavar="OUT",
        help="JSON file to which all measurements are written as well. (default: none)",
    )
    # where the ranks leave their report
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser.parse_known_args(argv)


def main() -> int:
    arguments, recipe_argv = arguments_of(sys.argv[1:])
    if arguments.report:
        return rank_main(arguments, recipe_argv)
    if arguments.rounds < 1 or arguments.steps_after < 1:
        print("--rounds and --steps-after must be at least 1", file=sys.stderr)
        return 1
    import torch

    ranks = torch.cuda.device_count() or 2
    load = os.getloadavg()[0]
    stages = {}
    for stage in arguments.stages:
        report = run_stage(stage, ranks, arguments.folder)
        if report is None:
            return 1
        stages[f"ZeRO-{stage}"] = report

    found = software_and_machine(load) | {
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
    """Run the ranks of a stage, with checkpoints on `disk`; return their report, or None, with a
    message on stderr, if they failed.
    """
    with tempfile.TemporaryDirectory(prefix="bench_checkpoint_", dir=disk) as folder:
        report = Path(folder) / "report.json"
        command = [
            str(Path(sys.executable).with_name("deepspeed")),
            "--num_gpus",
            str(ranks),
            "--master_port",
            str(free_port()),
            __file__,
            "--report",
            str(report),
            *sys.argv[1:],
            "--deepspeed_config",
            f"zero{stage}.json",
        ]
        code = subprocess.run(command, env=environment(), stdout=sys.stderr, check=False).returncode
        if code or not report.exists():
            print(
                f"the ranks ended with exit code {code}. Their messages are above", file=sys.stderr
            )
            return None
        return json.loads(report.read_text())


def software_and_machine(load_before: float) -> dict[str, Any]:
    """Return the part of the report that names the date, the machine and the code."""
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "no accelerator"
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {accelerator}",
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "versions": {
            "Python": platform.python_version(),
            **{name: version(name) for name in ("torch", "deepspeed")},
        },
        "commit": commit or "unknown",
    }


def environment() -> dict[str, str]:
    """Returns the ranks' environment: one thread per rank, and the recipes' compiled ops."""
    import torch

    own = {
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(op_cache.folder()),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return os.environ | own | ({} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"})


# The page
# --------------------------------------------------------------------------------------------------


def page(found: dict[str, Any]) -> str:
    """Write the result as Markdown."""
    tables = [
        stage_table(title, report, found["steps_after"])
        for title, report in found["stages"].items()
    ]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    few = "" if found["rounds"] >= ENOUGH_ROUNDS else " **A trial, not a measurement.**"
    return f"""# How long does a checkpoint stall training?

Written by `python tools/bench/bench_checkpoint.py` on {found["date"]}: {found["machine"]}.
Load average before the start {found["load_before"]:.1f}, at the end {found["load_after"]:.1f}.
{versions}; commit {found["commit"]}.

To compare the kinds of save, {found["ranks"]} ranks train in bf16 and save {found["rounds"]} \
times with each kind.
In each round, every kind saves once, in random order. The first save of a kind has its own column \
and is not counted
in the others. All figures are medians, and the range of the stall is in parentheses.{few}

{chr(10).join(tables)}
- **Stall:** the time inside the call, on the slowest rank.
- **Steps after it:** the time of the next two steps, which share the cores and the disk with a \
background save. The
  slow-down is the difference from steps without a save.
- **Remaining wait:** how long the save still takes after these steps.
- **Bytes:** bytes on the disk for each parameter.

When you compare the figures, note that our save does more work than DeepSpeed's. Our save ends \
only when every byte is
on the disk (fsync), and its manifest contains the sha256 of every file and a digest of every \
tensor. DeepSpeed's own
save does none of this, so part of its output is still in memory when it returns. Before each \
save, the bench first
writes all other pending data to the disk.
"""


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

| save | stall, s | first save, s | {steps_after} steps after it, s | slow-down, s | remaining \
wait, s | bytes |
|---|---|---|---|---|---|---|
{chr(10).join(lines)}

A background save stalls training for {background / at_once:.0%} as long as a blocking save, \
{small},
and for {background / plain:.0%} as long as DeepSpeed's plain save.
"""


# One rank
# --------------------------------------------------------------------------------------------------


def rank_main(arguments: argparse.Namespace, recipe_argv: list[str]) -> int:
    from recipekit.runtime.stopping import start_launcher_watch

    start_launcher_watch()
    try:
        plan = planned(parse(RECIPE, Path(__file__), recipe_argv), arguments.report.parent / "run")
        found = measure(plan, arguments)
        if plan.command.rank == 0:
            arguments.report.write_text(json.dumps(found))
    except Refusal as refusal:
        exit_refused(refusal, 3.0)
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    return 0


def planned(command: Command, out: Path) -> Plan:
    """Plans a stage, with a batch that the ranks share evenly. Raises `Refusal`."""
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
    return make_plan(replace(command, recipe=replace(command.recipe, **own)))


def measure(plan: Plan, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one stage; return the same on every rank (a collective)."""
    import torch.distributed as dist

    setup = set_up(plan)
    rank0, folder = plan.command.rank == 0, setup.folder
    kinds: dict[str, dict[str, Any]] = {
        kind: {"stall": [], "steps": [], "left": [], "bytes": 0} for kind in TITLES
    }
    train = partial(take_steps, plan, setup, arguments.steps_after)
    train()

    order, shuffle, number = list(TITLES), random.Random(0), 0
    for turn in range(arguments.rounds + 1):
        for kind in order:
            if rank0:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                os.sync()
            number += 1
            seconds = {
                "stall": slowest(partial(save, setup, kind, number)),
                "steps": slowest(train),
                "left": slowest(setup.savers["background"].wait),
            }

            own = kinds[kind]
            own["bytes"] = size_of(folder)
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
        shuffle.shuffle(order)  # the same on every rank

    setup.stream.close()
    dist.barrier()
    return {"model": plan.recipe.model, "parameters": setup.parameters, "kinds": kinds}


@dataclass(frozen=True)
class Setup:
    """The engine of a stage, its data, and the ways to save it."""

    engine: Any
    stream: Any
    folder: Path  # of the checkpoints
    plain: Any  # DeepSpeed's own checkpoint engine
    savers: dict[str, Any]  # ours, by kind
    zero_stage: int
    parameters: int


def set_up(plan: Plan) -> Setup:
    """Start the process group and build the model, the engine and the savers (a collective)."""
    import deepspeed
    from recipekit.checkpoints.retention import Retention
    from recipekit.checkpoints.save import Saver
    from recipekit.data.lanes import DataRank
    from recipekit.data.processors import load_tokenizer
    from recipekit.data.request import request_of
    from recipekit.data.stream import open_stream
    from recipekit.engine.deepspeed_engine import repaired
    from recipekit.model.build import build_model
    from recipekit.model.weights import fetch_config
    from recipekit.optim.groups import parameter_groups
    from recipekit.parallel.groups import Groups
    from recipekit.runtime.facts import layout_of
    from recipekit.runtime.start import start

    recipe, device = plan.recipe, start(plan)
    groups = Groups(plan.mesh, device.type)
    model_config = plan.model_config or fetch_config(recipe.model)
    built = build_model(recipe, model_config, groups, plan.ds_config, device)
    trained: Any = parameter_groups(built.model)
    engine: Any = deepspeed.initialize(
        model=built.model, model_parameters=trained, config=plan.ds_config, dist_init_required=False
    )[0]
    repaired(engine)

    # A saver puts its own checkpoint engine into the engine: take DeepSpeed's before.
    layout, folder, plain = (
        layout_of(plan, engine, built),
        plan.out / CHECKPOINTS,
        engine.checkpoint_engine,
    )
    made = partial(Saver, engine, folder, built.blueprint, layout, Retention(0))
    savers = {
        kind: made(kind == "background", lambda folder: None) for kind in ("at_once", "background")
    }

    stream = open_stream(
        request_of(recipe),
        load_tokenizer(recipe.model, recipe.tokenizer),
        rank=DataRank(plan.mesh.dp, groups.coords["dp"]),
    )
    size = sum(tensor.numel for tensor in built.blueprint.tensors if not tensor.buffer)
    return Setup(engine, stream, folder, plain, savers, layout.zero_stage, size)


def save(setup: Setup, kind: str, step: int) -> None:
    """Save a checkpoint in one of the ways of `TITLES` (a collective)."""
    if kind == "plain":
        setup.engine.checkpoint_engine = setup.plain
        setup.engine.save_checkpoint(str(setup.folder), tag=step_name(step))
    elif kind != "none":
        setup.savers[kind].save(
            {"step": step, "tokens": 0, "data": None, "export_dtype": "bfloat16"}
        )


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def take_steps(plan: Plan, setup: Setup, count: int) -> None:
    from recipekit.runtime.sums import StepCounters
    from recipekit.tasks.find import task_called
    from recipekit.train import train_step

    recipe = plan.recipe
    for _ in range(count):
        batches = next(setup.stream)[0]
        counters = StepCounters(plan.mesh)
        train_step(setup.engine, task_called(recipe.task), batches, recipe.lr, counters)


def slowest(work: Any) -> float:
    """Returns the seconds of the slowest rank (a collective)."""
    import torch.distributed as dist

    dist.barrier()
    begun = time.perf_counter()
    work()
    seconds: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seconds, time.perf_counter() - begun)
    return max(seconds)


if __name__ == "__main__":
    sys.exit(main())
