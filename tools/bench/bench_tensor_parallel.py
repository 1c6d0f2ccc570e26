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
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from harness import (
    ENOUGH_PAIRS,
    add_blocks,
    alternate,
    block_seconds,
    build,
    engine_of,
    fold,
    heading,
    load_average,
    median_interval,
    model_and_batch,
    own_command,
    parser_of,
    ratios,
    report_of_ranks,
    run_rank,
    say,
    software_and_machine,
)
from recipekit import Recipe
from recipekit.plan import RunPlan, resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError, config_error, exit_with_error

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
WARM_UP = 4  # steps of each way before the first pair
PREPARED = 8  # global batches, which every way repeats in a cycle
# Functional collectives also end in these calls.
COLLECTIVES = frozenset({"c10d::allreduce_", "c10d::allgather_", "c10d::_allgather_base_"})
SAME_LOSS = 0.001  # relative, after the warm-up: sums in bf16, added in three different orders


def arguments_of(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the bench's own flags; return them and the remaining flags, which the recipe reads."""
    parser = parser_of(__doc__)
    add_blocks(parser, "way")
    return parser.parse_known_args(argv)


def planned(argv: list[str], world: int, out: Path) -> RunPlan:
    """Plan a layout in which all ranks form one tensor-parallel group."""
    command = parse(RECIPE, Path(__file__), argv)
    return resolve_run(
        replace(
            command,
            recipe=replace(command.recipe, tp=world, out=str(out), resume="never", export=False),
            world=world,
        )
    )


def ranks_of(devices: int, argv: list[str], out: Path) -> int:
    """Return the largest number of ranks over which the model can be split, at most one rank per
    device.

    Raise `ConfigError` if the model cannot be split over two ranks.
    """
    refused = config_error(
        f"{devices} device{'s' if devices != 1 else ''}",
        "a tensor group takes 2 ranks or more",
        "run it on a machine with more GPUs, or without any",
    )
    for ranks in range(devices, 1, -1):
        try:
            planned(argv, ranks, out)
        except ConfigError as error:
            refused = error if ranks == devices else refused
        else:
            return ranks
    raise refused


def main() -> int:
    arguments, recipe_argv = arguments_of(sys.argv[1:])
    if arguments.folder:
        report = arguments.folder / "report.json"
        run_rank(partial(measure, arguments, recipe_argv), report)
        return 0
    import torch

    devices = torch.cuda.device_count() or 2
    with tempfile.TemporaryDirectory(prefix="bench_tp_") as folder:
        try:
            ranks = ranks_of(devices, recipe_argv, Path(folder) / "run")
        except ConfigError as error:
            exit_with_error(error)
        if ranks < devices:
            say(f"{ranks} of the {devices} devices: over more the model cannot be cut evenly")
        load = load_average()
        cpu = {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}
        launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        command = [sys.executable, "-m", *launcher, __file__, "--folder", folder, *sys.argv[1:]]
        report = report_of_ranks(command, Path(folder) / "report.json", os.environ | cpu)
    if report is None:
        return 1
    print(page(report | {"load_before": load, "load_after": load_average()}), end="")
    return 0


def page(report: dict[str, Any]) -> str:
    """Write the result as Markdown."""
    rows = []
    for way, title in WAYS.items():
        milliseconds = 1000 * statistics.median(report["seconds"][way]) / report["steps_per_block"]
        pairs = ratios(report["seconds"]["ours"], report["seconds"][way])
        ratio = (
            "1" if way == "ours" else "{:.3f} ({:.3f} to {:.3f})".format(*median_interval(pairs))
        )
        rows.append(f"| {title} | {milliseconds:.1f} | {ratio} | {report['collectives'][way]} |")
    few = (
        ""
        if report["pairs"] >= ENOUGH_PAIRS
        else f" **Fewer than {ENOUGH_PAIRS} pairs: a trial, not a measurement.**"
    )
    return fold(f"""# How fast is tensor parallelism, compared with DeepSpeed and transformers?

{heading(report, report["command"])}.

Every implementation trains {report["model"]} with tp {report["ranks"]} and `{report["ds_config"]}`.
A step trains on {report["global_batch"]} rows (sequences) of {report["seq_len"]} tokens, in
    micro-batches of {report["micro_batch"]}.
Because the speed of the host varies, the implementations take turns. The bench ran
    {report["pairs"]} pairs.
In a pair, every implementation runs a block of steps, in random order. The number of steps in a
    block is {report["steps_per_block"]}.{few}

| way | ms per step | ours is faster by, median (95 % interval) |
    all-reduces and all-gathers a step |
|---|---|---|---|
{chr(10).join(rows)}

To check that all three train alike, the bench compared their losses after {WARM_UP} steps on the
    same rows:
{", ".join(f"{loss:.4f} ({way})" for way, loss in report["losses"].items())}.

The time of a step covers forward, backward, the optimizer and `.item()` of the loss, but neither
    the reading of data nor logging. All three implementations start from the same weights.

**Why ours is faster.** Several column-wise layers read the same activation: q, k and v, or gate and
    up. Our implementation sums the gradient of that activation once for all of these layers,
    whereas the other two sum it once for each layer. With transformers' styles, each operation of a
    linear layer also goes through a DTensor.
""")


# One rank
# --------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, recipe_argv: list[str]) -> dict[str, Any]:
    """Measure every value on the page; return the same result on every rank.

    This is a collective operation.
    """
    from recipekit.runtime.start import initialize_distributed

    world = int(os.environ["WORLD_SIZE"])
    plan = planned(recipe_argv, world, arguments.folder / "run")
    device = initialize_distributed(plan)

    trains = steps_of_ways(plan, device)
    losses = {way: [train() for _ in range(WARM_UP)][-1] for way, train in trains.items()}
    if max(losses.values()) > min(losses.values()) * (1 + SAME_LOSS):
        raise RuntimeError(f"the ways do not train alike: losses {losses} after {WARM_UP} steps")
    counted = {way: collectives_of(train) for way, train in trains.items()}

    def seconds_of(way: str) -> float:
        return block_seconds(partial(repeat, trains[way], arguments.steps_per_block), device)

    report = say if os.environ["RANK"] == "0" else lambda _: None
    seconds = alternate(list(WAYS), arguments, seconds_of, report)
    return (
        software_and_machine("torch", "deepspeed", "transformers")
        | model_and_batch(plan)
        | {
            "command": own_command("bench_tensor_parallel.py", "--folder"),
            "pairs": arguments.pairs,
            "steps_per_block": arguments.steps_per_block,
            "seconds": seconds,
            "collectives": counted,
            "losses": losses,
        }
    )


def steps_of_ways(plan: RunPlan, device: Any) -> dict[str, Callable[[], float]]:
    """Create an engine for each way, with the same batches; return the functions that take a step.

    This is a collective operation.
    """
    from recipekit.data.batching import DataRank
    from recipekit.data.processors import load_tokenizer
    from recipekit.data.request import request_from_recipe
    from recipekit.data.stream import open_stream
    from recipekit.parallel.groups import ProcessGroups
    from recipekit.spec.mesh import Mesh

    recipe = plan.recipe
    groups = ProcessGroups(plan.mesh, device.type)
    stream = open_stream(
        request_from_recipe(recipe),
        load_tokenizer(recipe.model, recipe.tokenizer),
        rank=DataRank(1, 0),
    )
    prepared = [
        [{name: tensor.to(device) for name, tensor in batch.items()} for batch in next(stream)[0]]
        for _ in range(PREPARED)
    ]
    stream.close()

    def engine(config: dict[str, Any] = plan.ds_config, of: ProcessGroups | None = groups) -> Any:
        laid_out = plan if of else replace(plan, mesh=Mesh())
        return engine_of(build(laid_out, device, of)[1].model, config, groups.mpu)

    engines = {"ours": engine()}
    with mock.patch("recipekit.parallel.tensor._use_local_shards"):
        engines["styles"] = engine()

    # AutoTP shards the unsharded model itself.
    autotp = {"tensor_parallel": {"autotp_size": plan.mesh.world}}
    engines["autotp"] = engine(plan.ds_config | autotp, None)
    return {way: step_of(engine, prepared) for way, engine in engines.items()}


def step_of(engine: Any, prepared: list[list[dict[str, Any]]]) -> Callable[[], float]:
    """Return a function that takes one optimizer step with the next global batch and returns the
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


def repeat(train: Callable[[], float], steps: int) -> None:
    for _ in range(steps):
        train()


def collectives_of(train: Callable[[], float]) -> int:
    """Return the numbers of all-reduces and all-gathers that this rank starts in one step.

    torch's profiler counts them.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        train()
    return sum(event.name in COLLECTIVES for event in seen.events() or [])


if __name__ == "__main__":
    sys.exit(main())
