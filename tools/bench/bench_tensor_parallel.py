"""Compare the speed of a step under our tensor parallelism, DeepSpeed's AutoTP and transformers'
own plan styles.

    # prints Markdown; progress goes to stderr
    python tools/bench/bench_tensor_parallel.py > tools/bench/bench_tensor_parallel.md
    python tools/bench/bench_tensor_parallel.py --pairs 60 --model Qwen/Qwen3-0.6B --seq_len 512

All ways use the same weights, rows and JSON on the same ranks: 2 without GPUs, else as many GPUs as
the model's heads can be split over. Blocks of steps alternate: a pair is one block of each way, in
random order. The ratio is the median over the pairs. The limits of its 95 % interval are two of the
pairs, by the binomial distribution. torch's profiler counts the collectives of one step. Flags that
are not listed here go to the recipe.
"""

import argparse
import datetime
import itertools
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

from recipekit import Recipe
from recipekit.plan import Plan, make_plan
from recipekit.spec.command import parse
from recipekit.spec.refusal import Refusal, exit_refused, refuse

ROOT = Path(__file__).resolve().parents[2]
WAYS = {
    "ours": "ours: split by the plan, plain shards in linear layers",
    "styles": "transformers' plan styles as they are (DTensors everywhere)",
    "autotp": "DeepSpeed's AutoTP",
}
RECIPE = Recipe(
    model="recipekit/llama-nano",
    init="random",
    tokenizer="bytes",
    dataset="builtin",
    ds_config="zero1.json",
    seq_len=256,
    micro_batch=4,
    global_batch=8,
    lr=5e-4,
    schedule="constant",
    wandb=False,
)
ENOUGH_PAIRS = 30
WARM_UP = 4  # steps of each way before the first pair
PREPARED = 8  # global batches, taken round and round
# functional collectives end in these too
COLLECTIVES = frozenset({"c10d::allreduce_", "c10d::allgather_", "c10d::_allgather_base_"})
SAME_LOSS = 0.001  # relative, after the warm-up: bf16, added in three ways


def arguments_of(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Reads the bench's own flags; returns them and the rest, which are the recipe's."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=40,
        metavar="N",
        help=(
            f"Number of blocks of each way. A measurement needs at least {ENOUGH_PAIRS}. (default:"
            " %(default)s)"
        ),
    )
    parser.add_argument(
        "--steps-per-block",
        "--steps_per_block",
        type=int,
        default=3,
        metavar="N",
        help="Optimizer steps per block. (default: %(default)s)",
    )
    # where the ranks leave their report
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_known_args(argv)


def planned(argv: list[str], world: int, out: Path) -> Plan:
    """Plans a layout with all ranks in one tensor group."""
    command = parse(RECIPE, Path(__file__), argv)
    return make_plan(
        replace(
            command,
            recipe=replace(command.recipe, tp=world, out=str(out), resume="never", export=False),
            world=world,
        )
    )


def ranks_of(devices: int, argv: list[str], out: Path) -> int:
    """Returns the most ranks, up to one per device, over which the model can be cut.

    Raises `Refusal` if there are none.
    """
    refused = refuse(
        f"{devices} device{'s' if devices != 1 else ''}",
        "a tensor group takes 2 ranks or more",
        "run it on a machine with more GPUs, or without any",
    )
    for ranks in range(devices, 1, -1):
        try:
            planned(argv, ranks, out)
        except Refusal as refusal:
            refused = refusal if ranks == devices else refused
        else:
            return ranks
    raise refused


def main() -> int:
    arguments, recipe_argv = arguments_of(sys.argv[1:])
    if arguments.folder:
        return rank_main(arguments, recipe_argv)
    import torch

    devices = torch.cuda.device_count() or 2
    with tempfile.TemporaryDirectory(prefix="bench_tp_") as folder:
        try:
            ranks = ranks_of(devices, recipe_argv, Path(folder) / "run")
        except Refusal as refusal:
            exit_refused(refusal)
        if ranks < devices:
            print(
                f"{ranks} of the {devices} devices: over more the model cannot be cut evenly",
                file=sys.stderr,
            )
        load = os.getloadavg()[0]
        if not torch.cuda.is_available():
            os.environ["DS_ACCELERATOR"] = "cpu"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(ranks),
            __file__,
            "--folder",
            folder,
            *sys.argv[1:],
        ]
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
        report_file = Path(folder) / "report.json"
        if code or not report_file.exists():
            print(f"the bench ended with exit code {code}. Its messages are above", file=sys.stderr)
            return 1
        print(
            page(
                json.loads(report_file.read_text())
                | {
                    "load_before": load,
                    "load_after": os.getloadavg()[0],
                }
            ),
            end="",
        )
    return 0


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Returns (median, low, high): low and high are the order statistics that hold the median with
    95 % (normal approximation of the binomial).
    """
    ordered, half = sorted(ratios), 0.98 * math.sqrt(len(ratios))
    low = max(0, math.floor(len(ratios) / 2 - half))
    return statistics.median(ordered), ordered[low], ordered[-1 - low]


def page(report: dict[str, Any]) -> str:
    """Writes the result as Markdown."""
    rows = []
    for way, title in WAYS.items():
        milliseconds = 1000 * statistics.median(report["seconds"][way]) / report["steps_per_block"]
        pairs = [
            theirs / ours
            for ours, theirs in zip(report["seconds"]["ours"], report["seconds"][way], strict=True)
        ]
        ratio = "1" if way == "ours" else "{:.3f} ({:.3f} to {:.3f})".format(*interval(pairs))
        rows.append(f"| {title} | {milliseconds:.1f} | {ratio} | {report['collectives'][way]} |")
    few = (
        ""
        if report["pairs"] >= ENOUGH_PAIRS
        else f" **Fewer than {ENOUGH_PAIRS} pairs: a trial, not a measurement.**"
    )
    return f"""# How fast is tensor parallelism, compared with DeepSpeed and transformers?

Written by `python {report["command"]}` on {report["date"]}: {report["machine"]}.
Load average before the start {report["load_before"]:.1f}, at the end {report["load_after"]:.1f}.
{", ".join(f"{name} {number}" for name, number in report["versions"].items())}.

Every implementation trains {report["model"]} with tp {report["ranks"]} and `{report["ds_config"]}`.
A step trains on {report["global_batch"]} rows (sequences) of {report["seq_len"]} tokens, in \
micro-batches of {report["micro_batch"]}.
Because the speed of the host varies, the implementations take turns. The bench ran \
{report["pairs"]} pairs.
In a pair, every implementation runs a block of steps, in random order. The number of steps in a \
block is {report["steps_per_block"]}.{few}

| way | ms per step | ours is faster by, median (95 % interval) | all-reduces and all-gathers a \
step |
|---|---|---|---|
{chr(10).join(rows)}

To check that all three train alike, the bench compared their losses after {WARM_UP} steps on the \
same rows:
{", ".join(f"{loss:.4f} ({way})" for way, loss in report["losses"].items())}.

The time of a step covers forward, backward, the optimizer and `.item()` of the loss, but neither \
the reading of data
nor logging. All three implementations start from the same weights.

**Why ours is faster.** Several column-wise layers read the same activation: q, k and v, or gate \
and up. Our
implementation sums the gradient of that activation once for all of these layers, whereas the \
other two sum it once for
each layer. With transformers' styles, each operation of a linear layer also goes through a DTensor.
"""


# One rank
# --------------------------------------------------------------------------------------------------


def rank_main(arguments: argparse.Namespace, recipe_argv: list[str]) -> int:
    from recipekit.runtime.stopping import start_launcher_watch

    start_launcher_watch()
    try:
        report = measure(arguments, recipe_argv)
        if os.environ["RANK"] == "0":
            (arguments.folder / "report.json").write_text(json.dumps(report))
    except Refusal as refusal:
        exit_refused(refusal, 3.0)
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    return 0


def measure(arguments: argparse.Namespace, recipe_argv: list[str]) -> dict[str, Any]:
    """Measure everything that the page holds; return the same on every rank (a collective)."""
    import torch.distributed as dist
    from recipekit.runtime.start import start

    world = int(os.environ["WORLD_SIZE"])
    plan = planned(recipe_argv, world, arguments.folder / "run")
    device = start(plan)

    trains = steps_of_ways(plan, device)
    losses = {way: [train() for _ in range(WARM_UP)][-1] for way, train in trains.items()}
    if max(losses.values()) > min(losses.values()) * (1 + SAME_LOSS):
        raise RuntimeError(f"the ways do not train alike: losses {losses} after {WARM_UP} steps")
    counted = {way: collectives_of(train) for way, train in trains.items()}

    blocks = alternate(trains, arguments, device)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, blocks)
    return (
        software_and_machine(device)
        | trained(plan)
        | {
            "pairs": arguments.pairs,
            "steps_per_block": arguments.steps_per_block,
            "seconds": {way: of_slowest_rank(everyone, way) for way in WAYS},
            "collectives": counted,
            "losses": losses,
        }
    )


def steps_of_ways(plan: Plan, device: Any) -> dict[str, Callable[[], float]]:
    """Make an engine for each way, on the same batches; return the functions that take a step (a
    collective).
    """
    import deepspeed
    from recipekit.data.lanes import DataRank
    from recipekit.data.processors import load_tokenizer
    from recipekit.data.request import request_of
    from recipekit.data.stream import open_stream
    from recipekit.model.build import build_model
    from recipekit.model.weights import fetch_config
    from recipekit.optim.groups import parameter_groups
    from recipekit.parallel.groups import Groups

    recipe = plan.recipe
    model_config = plan.model_config or fetch_config(recipe.model)
    groups = Groups(plan.mesh, device.type)
    stream = open_stream(
        request_of(recipe), load_tokenizer(recipe.model, recipe.tokenizer), rank=DataRank(1, 0)
    )
    prepared = [
        [{name: tensor.to(device) for name, tensor in batch.items()} for batch in next(stream)[0]]
        for _ in range(PREPARED)
    ]
    stream.close()

    def engine(config: dict[str, Any] = plan.ds_config, of: Groups | None = groups) -> Any:
        model = build_model(recipe, model_config, of, plan.ds_config, device).model
        trained: Any = parameter_groups(model)
        return deepspeed.initialize(
            model=model,
            model_parameters=trained,
            config=config,
            mpu=groups.mpu,
            dist_init_required=False,
        )[0]

    engines = {"ours": engine()}
    with mock.patch("recipekit.parallel.tensor._use_shards"):
        engines["styles"] = engine()

    # AutoTP shards the unsharded model itself.
    autotp = {"tensor_parallel": {"autotp_size": plan.mesh.world}}
    engines["autotp"] = engine(plan.ds_config | autotp, None)
    return {way: step_of(engine, prepared) for way, engine in engines.items()}


def alternate(
    trains: dict[str, Callable[[], float]], arguments: argparse.Namespace, device: Any
) -> list[dict[str, float]]:
    """Time the pairs: in each, one block of every way, in random order (a collective).

    Return the seconds of this rank by pair and way.
    """
    steps, rank0 = arguments.steps_per_block, os.environ["RANK"] == "0"
    blocks: list[dict[str, float]] = []
    order, shuffle, began = list(WAYS), random.Random(0), time.monotonic()  # the same on every rank

    for pair in range(1, arguments.pairs + 1):
        shuffle.shuffle(order)
        blocks.append({way: block_seconds(trains[way], steps, device) for way in order})

        if rank0 and (pair in (1, arguments.pairs) or pair % 5 == 0):
            left = (time.monotonic() - began) / pair * (arguments.pairs - pair)
            shown = ", ".join(f"{way} {1000 * blocks[-1][way] / steps:.0f}" for way in WAYS)
            print(
                f"pair {pair} of {arguments.pairs}: {shown} ms per step; {left:.0f} s left",
                file=sys.stderr,
            )
    return blocks


def of_slowest_rank(everyone: list[list[dict[str, float]]], way: str) -> list[float]:
    """Return the seconds of the slowest rank for each block of a way."""
    by_rank = [[pair[way] for pair in blocks] for blocks in everyone]
    return [max(ranks) for ranks in zip(*by_rank, strict=True)]


def software_and_machine(device: Any) -> dict[str, Any]:
    """Return the part of the report that names the date, the command and the machine."""
    import torch

    own = sys.argv[1:]
    del own[own.index("--folder") : own.index("--folder") + 2]
    accelerator = torch.cuda.get_device_name() if device.type == "cuda" else "no accelerator"
    packages = ("torch", "deepspeed", "transformers")
    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["tools/bench/bench_tensor_parallel.py", *own]),
        "machine": f"{os.cpu_count()} CPU cores, {accelerator}",
        "versions": {
            "Python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
    }


def trained(plan: Plan) -> dict[str, Any]:
    """Return the part of the report that names the model, the JSON and the batch."""
    recipe = plan.recipe
    return {
        "model": recipe.model,
        "ds_config": plan.ds_path.name if plan.ds_path else "the recipe's JSON",
        "ranks": plan.mesh.world,
        **{name: getattr(recipe, name) for name in ("seq_len", "micro_batch", "global_batch")},
    }


def step_of(engine: Any, prepared: list[list[dict[str, Any]]]) -> Callable[[], float]:
    """Returns a function that takes one optimizer step with the next global batch and returns its
    last loss.
    """
    batches = itertools.cycle(prepared)

    def train() -> float:
        loss = None
        for batch in next(batches):
            loss = engine(
                input_ids=batch["input_ids"],
                position_ids=batch["position_ids"],
                labels=batch["labels"],
                shift_labels=batch["labels"],
            ).loss
            engine.backward(loss)
            engine.step()
        assert loss is not None
        return loss.item()

    return train


def block_seconds(train: Callable[[], float], steps: int, device: Any) -> float:
    """Times one block (a collective)."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        train()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def collectives_of(train: Callable[[], float]) -> int:
    """Counts the all-reduces and all-gathers that this rank starts in one step, as torch's profiler
    sees them.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        train()
    return sum(event.name in COLLECTIVES for event in seen.events() or [])


if __name__ == "__main__":
    sys.exit(main())
