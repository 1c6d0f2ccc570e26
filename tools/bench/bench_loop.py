"""Compare the speed of recipekit's training loop with a bare DeepSpeed loop, transformers' Trainer
and accelerate.

    # prints Markdown; progress goes to stderr
    python tools/bench/bench_loop.py > tools/bench/bench_loop.md
    python tools/bench/bench_loop.py --pairs 60 --json report.json --deepspeed_config zero3.json

All four train the same model on the same rows from the same JSON, in the same processes (2, or one
for each GPU). Blocks of steps alternate: a pair is one block of each loop, in random order. The
ratio is the median over the pairs. Its interval is a bootstrap over the pairs. Flags that are not
listed here go to the recipe.
"""

import argparse
import functools
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from harness import (
    ENOUGH_PAIRS,
    add_blocks,
    add_json,
    alternate,
    block_seconds,
    bootstrap_interval,
    build,
    deepspeed_command,
    engine_of,
    fold,
    heading,
    job_environment,
    load_average,
    model_and_batch,
    own_command,
    parser_of,
    ratios,
    report_of_ranks,
    run_rank,
    software_and_machine,
)
from recipekit import Recipe
from recipekit.dslint.json_file import load_ds_config as load_json
from recipekit.plan import RunPlan, resolve_run
from recipekit.spec.command import RunCommand, parse
from recipekit.spec.errors import ConfigError, Problem, config_error, exit_with_error
from recipekit.spec.mesh import fit_batch
from recipekit.spec.run_folder import read_metrics

MicroBatch = dict[str, Any]  # of tensors
Start = tuple[Callable[[], Any], Callable[[Callable[[], None]], Any]]
LOOPS = {
    "ours": "`recipekit.train.loop`",
    "bare": "bare DeepSpeed loop",
    "trainer": "`transformers.Trainer`",
    "accelerate": "`accelerate` loop",
}
RECIPE = Recipe(
    model="recipekit/llama-nano",
    init="random",
    tokenizer="bytes",
    dataset="builtin",
    ds_config="zero2.json",
    seq_len=256,
    micro_batch=4,
    global_batch=16,
    lr=5e-4,
    schedule="constant",  # as in the bare loop and the accelerate loop
    beta2=0.999,  # torch's default, which the other libraries keep
)
# Recipe fields that a user may change. The other fields would not reach the other three loops, so
# the bench sets them.
OPEN = frozenset(
    {
        "model",
        "init",
        "tokenizer",
        "dataset",
        "subset",
        "split",
        "text_field",
        "attention",
        "activation_checkpointing",
        "ds_config",
        "seq_len",
        "micro_batch",
        "global_batch",
        "lr",
        "weight_decay",
        "gradient_clipping",
        "seed",
        "wandb",
    }
)
# Steps of each loop before the first pair. After these steps the four models must have learned the
# same.
WARM_UP = 8
# Maximum relative difference between two losses. The loops round in bf16. One loop averages over
# the batch's tokens, while the others average the means of micro-batches.
SAME_LOSS = 0.01
PREPARED = 16  # global batches that the other three loops repeat in a cycle
TIMED_BLOCKS = 6  # blocks of each loop in the pass that times engine calls
QUIET = 0.002  # seconds in which no thread works, after which a block counts as finished
TARGET = 0.98  # of the bare loop's tokens/s


def arguments_of(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the bench's own flags; return them and the remaining flags, which the recipe reads."""
    parser = parser_of(__doc__)
    add_blocks(parser, "loop")
    others = [loop for loop in LOOPS if loop != "ours"]
    parser.add_argument(
        "--loops",
        nargs="+",
        choices=others,
        default=others,
        help="Training loops to compare with recipekit's. (default: all)",
    )
    add_json(parser)
    return parser.parse_known_args(argv)


def planned(
    arguments: argparse.Namespace, recipe_argv: list[str], world: int, out: Path
) -> RunPlan:
    """Create the plan for all four loops. Raise one `ConfigError` that lists every problem."""
    command: RunCommand = parse(RECIPE, Path(__file__), recipe_argv)
    problems: list[Problem] = []
    for name, value in (
        ("--pairs", arguments.pairs),
        ("--steps-per-block", arguments.steps_per_block),
    ):
        if value < 1:
            problems.append(
                Problem(f"{name} {value}", "must be at least 1", f"use {name} 1 or more")
            )
    if arguments.json and not arguments.json.resolve().parent.is_dir():
        problems.append(
            Problem(
                f"--json {arguments.json}",
                "its folder does not exist",
                "make the folder, or name another file",
            )
        )
    if command.dry_run:
        problems.append(Problem("--dry_run", "the bench has none", "leave it out"))
    for name in sorted(command.typed - OPEN):
        problems.append(
            Problem(
                f"--{name}",
                "is set by the bench",
                f"leave it out. Open are {', '.join(sorted(OPEN))}",
            )
        )
    if problems:
        raise ConfigError(problems)
    # The last step would save a checkpoint, so the run never reaches it.
    steps = 1 + WARM_UP + (arguments.pairs + TIMED_BLOCKS) * arguments.steps_per_block + 1
    micro_batch, global_batch = fit_batch(
        world, command.recipe.micro_batch, command.recipe.global_batch, command.typed
    )
    own: dict[str, Any] = {
        "steps": steps,
        "out": str(out),
        "resume": "never",
        "export": False,
        "micro_batch": micro_batch,
        "global_batch": global_batch,
    }
    plan = resolve_run(replace(command, recipe=replace(command.recipe, **own), world=world))
    if plan.mesh.dp != world or "scheduler" in plan.ds_config:
        raise config_error(
            str(plan.ds_path),
            "sets a layout or a schedule, which the four loops would not follow alike",
            "give a JSON without it",
        )
    return plan


# The command
# --------------------------------------------------------------------------------------------------


def main() -> int:
    arguments, recipe_argv = arguments_of(sys.argv[1:])
    if arguments.folder:
        run_rank(
            functools.partial(measure, arguments, recipe_argv), arguments.folder / "report.json"
        )
        sys.stdout.flush()
        sys.stderr.flush()
        # The threads of four engines and of the paused loops sometimes abort the interpreter's
        # normal exit.
        os._exit(0)
    import torch

    ranks = torch.cuda.device_count() or 2
    with tempfile.TemporaryDirectory(prefix="bench_loop_") as folder:
        try:
            planned(arguments, recipe_argv, ranks, Path(folder) / "run")
        except ConfigError as error:
            exit_with_error(error)
        load = load_average()
        command = deepspeed_command(ranks, __file__, "--folder", folder, *sys.argv[1:])
        environment = job_environment(WANDB_MODE="offline")
        report = report_of_ranks(command, Path(folder) / "report.json", environment)
    if report is None:
        return 1
    report |= {"load_before": load, "load_after": load_average()}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    print(page(report), end="")
    return 0


def interval_beside(report: dict[str, Any], other: str) -> tuple[float, float, float]:
    """Return (median, low, high) of our loop's tokens/s divided by a second loop's, by pair."""
    return bootstrap_interval(ratios(report["seconds"]["ours"], report["seconds"][other]))


def table_rows(report: dict[str, Any]) -> list[str]:
    """Write one row of the table for each loop."""
    import numpy as np

    steps, tokens = report["steps_per_block"], report["tokens_per_step"]
    rows = []
    for loop in report["seconds"]:
        seconds = float(np.median(report["seconds"][loop])) / steps
        ratio = "1"
        if loop != "ours":
            ratio = "{:.4f} ({:.4f} to {:.4f})".format(*interval_beside(report, loop))

        outside = 1000 * report["outside"][loop]["outside_s"]
        waited = 1000 * report["outside"][loop]["collectives_s"]
        rows.append(
            f"| {LOOPS[loop]} | {tokens / seconds:,.0f} | {1000 * seconds:.1f} | {ratio} |"
            f" {outside - waited:.2f} + {waited:.2f} |"
        )
    return rows


def verdicts(report: dict[str, Any]) -> list[str]:
    """Compare the intervals with the targets, for the chosen loops."""
    found = []
    if "bare" in report["seconds"]:
        _, low, high = interval_beside(report, "bare")
        found.append(
            f"the interval against the bare loop, {low:.4f} to {high:.4f},"
            f" {'reaches' if high >= TARGET else 'does NOT reach'} {TARGET}"
        )
    if "trainer" in report["seconds"]:
        _, low, _ = interval_beside(report, "trainer")
        found.append(
            f"the interval against `Trainer`, from {low:.4f} on, {'is' if low > 1 else 'is NOT'}"
            " above 1"
        )
    return found


def page(report: dict[str, Any]) -> str:
    """Write the result as Markdown."""
    steps = report["steps_per_block"]
    blocks = f"one block of {steps} optimizer step{'s' if steps != 1 else ''}"
    waited = f"{1000 * report['data_wait_s']:.2f} ms of a step for data"
    losses = ", ".join(f"{loss:.4f} ({loop})" for loop, loss in report["losses"].items())
    few = ""
    if report["pairs"] < ENOUGH_PAIRS:
        few = f" **Fewer than {ENOUGH_PAIRS} pairs: a trial, not a measurement.**"

    return fold(f"""# How fast is the training loop, compared with three others?

{heading(report, report["command"], chr(10))}; commit {report["commit"]}.

Every loop trains {report["model"]} on {report["ranks"]} ranks with `{report["ds_config"]}`.
A step trains on {report["global_batch"]} rows (sequences) of {report["seq_len"]} tokens, in
    micro-batches of {report["micro_batch"]}.
Because the speed of the host varies, the loops take turns. The bench ran {report["pairs"]} pairs.
In a pair, every loop runs {blocks}, in random order.{few}

| loop | tokens/s | ms per step | ours / this loop (95 % interval) |
    ms per step outside the engine |
|---|---|---|---|---|
{chr(10).join(table_rows(report))}

Target: {("; " + chr(10)).join(verdicts(report)) or "none for the loops that were chosen"}.

For each pair, the bench divides the tokens/s of our loop by the tokens/s of the other loop. The
    ratio in the table is the median over the pairs, so a ratio above 1 means that our loop is
    faster. The last column shows how much of a step is spent outside the engine's calls: first the
    loop's own work, then the collectives.

Our loop waited {waited}, {report["data_wait_s"] / report["step_s"]:.2%} of it.
To check that all loops train alike, the bench compared their losses after {WARM_UP + 1} steps on
    the same rows:
{losses}.

{what_counts(report["wandb"])}""")


def what_counts(wandb: str) -> str:
    """Explain which work a block's time includes; `wandb` is the W&B mode of our loop."""
    recorded = "without W&B, as in the other three"
    if wandb != "off":
        recorded = f"with W&B ({wandb}; its process runs during all four loops)"

    return f"""The time of a block includes:

- **ours:** `recipekit.train.loop` as a recipe runs it, {recorded}. Its time includes its own
  stream, with the thread that tokenises and packs ahead, and the copy to the device. It also
  includes the learning rate of the step, the two all-reduces of the loss and the token count, the
  gradient norm, `metrics.jsonl` and the progress line. A block ends when its threads have finished.
  Start-up, evaluation and checkpoints are excluded.
- **bare:** forward, backward and step of micro-batches that are already on the device. In each
  step, rank 0 also calls `.item()` on the loss. This loop neither reads data nor records anything.
- **`Trainer`:** its own `train()`. It keeps a log record of every step in memory, but does not
  print, save or report.
- **`accelerate`:** a loop with `accumulate`, `accelerator.backward`, `DummyOptim` and a prepared
  `DataLoader`. In each step, rank 0 calls `.item()` on the loss.

To make the comparison fair, all four loops start from the same weights and use the JSON's optimizer
    with a constant learning rate. Bare, `Trainer` and `accelerate` cycle through {PREPARED}
    prepared global batches. All four use the recipes' value for an `"auto"` bucket size. `Trainer`
    and `accelerate` would otherwise use hidden_size ** 2, and on a small model the bench would then
    compare bucket sizes instead of loops.

The time of a block is the time of the slowest rank. The last column comes from a separate pass
    ({TIMED_BLOCKS} blocks of each loop, rank 0), so that its timers do not affect the ratios. In
    that pass, the engine's calls are forward with the loss, backward and step. The time of
    collectives includes waiting for the other rank, because without these collectives the rank
    would wait inside the next engine call instead.
"""


# One rank
# --------------------------------------------------------------------------------------------------


class Paused:
    """A training loop in a thread. It pauses after an optimizer step until `run` continues it.

    `train(pause)` must call `pause()` after each optimizer step. The constructor returns after the
    first step.
    """

    def __init__(self, device: Any, train: Callable[[Callable[[], None]], Any]):
        self._left = 1
        self._go, self._pauses = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        threading.Thread(target=self._train, args=(device, train), daemon=True).start()
        self._wait()

    def run(self, steps: int) -> None:
        self._left = steps
        self._go.release()
        self._wait()

    def _train(self, device: Any, train: Callable[[Callable[[], None]], Any]) -> None:
        import torch

        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # each thread has its own current device
            self._error = RuntimeError(f"the loop ended by itself with {train(self._pause)}")
        except BaseException as error:  # `run` raises it in the calling thread
            self._error = error
        self._pauses.release()

    def _pause(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._pauses.release()
            self._go.acquire()

    def _wait(self) -> None:
        self._pauses.acquire()
        if self._error:
            raise self._error


def measure(arguments: argparse.Namespace, recipe_argv: list[str]) -> dict[str, Any]:
    """Measure every value on the page and in `--json`; return the same result on every rank.

    This is a collective operation.
    """
    plan = planned(arguments, recipe_argv, int(os.environ["WORLD_SIZE"]), arguments.folder / "run")
    loops = [loop for loop in LOOPS if loop in ("ours", *arguments.loops)]
    steps = arguments.steps_per_block

    setup = set_up(plan, loops)
    runs = start_loops(plan, setup)
    for run in runs.values():
        run.train.run(WARM_UP)
    losses = held_out_losses(plan, setup, runs)

    def seconds_of(loop: str) -> float:
        return seconds_of_block(runs[loop], steps, setup.device)

    seconds = alternate(loops, arguments, seconds_of, setup.tracker.say)
    rank0 = plan.command.rank == 0
    waits = recorded_waits(plan.out, 1 + WARM_UP, arguments.pairs * steps) if rank0 else {}

    setup.tracker.say("timing the engine calls")
    outside = time_outside(runs, steps, setup.device)
    setup.tracker.finish(0)
    setup.stream.close()

    recipe, parameters = plan.recipe, setup.models["ours"].parameters()
    size = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)
    return (
        waits
        | software_and_machine("torch", "deepspeed", "transformers", "accelerate")
        | model_and_batch(plan)
        | {
            "model": f"{recipe.model} ({size / 1e6:.1f} M parameters)",
            "wandb": os.environ["WANDB_MODE"] if recipe.wandb else "off",
            "tokens_per_step": recipe.global_batch * recipe.seq_len,
            # Output paths do not affect the measurement.
            "command": own_command("bench_loop.py", "--folder", "--json"),
            "pairs": arguments.pairs,
            "steps_per_block": steps,
            "seconds": seconds,
            "outside": outside,
            "losses": losses,
        }
    )


@dataclass(frozen=True)
class Setup:
    """The models and the data for all loops."""

    device: Any
    json_file: Path  # the DeepSpeed JSON of `trainer` and `accelerate`
    models: dict[str, Any]  # by loop
    task: Any  # of our loop
    tracker: Any
    prepared: list[list[MicroBatch]]  # global batches, each a list of micro-batches
    stream: Any  # this rank's rows of our loop


@dataclass(frozen=True)
class Run:
    """A loop that has taken its first step."""

    engine: Any
    train: "Paused"


def set_up(plan: RunPlan, loops: list[str]) -> Setup:
    """Start the process group; build one model for each loop, and the batches.

    This is a collective operation.
    """
    import torch.distributed as dist
    from recipekit.data.batching import DataRank
    from recipekit.data.processors import load_tokenizer
    from recipekit.data.request import request_from_recipe
    from recipekit.data.stream import open_stream
    from recipekit.parallel.groups import ProcessGroups
    from recipekit.runtime.start import initialize_distributed
    from recipekit.tasks.find import load_task
    from recipekit.track.tracking import WandbRun, open_tracker

    recipe, rank0 = plan.recipe, plan.command.rank == 0
    device = initialize_distributed(plan)
    json_file = plan.out / "with_buckets.json"
    if rank0:
        plan.out.mkdir(parents=True)
        json_file.write_text(json.dumps(with_buckets(plan)))
    dist.barrier()

    # The models are built before Trainer sets its globals.
    tokenizer = load_tokenizer(recipe.model, recipe.tokenizer)
    groups = ProcessGroups(plan.mesh, device.type)
    built = {loop: build(plan, device, groups) for loop in loops}
    task, model_plan = load_task(recipe.task), built["ours"][0]
    if model_plan.loss_path.chunked and task.with_chunked_loss:
        task = task.with_chunked_loss(task)

    tracker = open_tracker(
        run_dir=plan.out,
        is_main=rank0,
        start_step=0,
        last_step=plan.last_step,
        wandb=WandbRun("bench_loop", {}, recipe.project) if recipe.wandb else None,
    )

    stream = open_stream(request_from_recipe(recipe), tokenizer, rank=DataRank(1, 0))
    prepared = [[loss_of_shifted(batch) for batch in next(stream)[0]] for _ in range(PREPARED)]
    stream.close()
    tracker.say(f"starting {len(loops)} loops; each takes its first step")
    return Setup(
        device=device,
        json_file=json_file,
        models={loop: one.model for loop, (_, one) in built.items()},
        task=task,
        tracker=tracker,
        prepared=prepared,
        stream=open_stream(
            request_from_recipe(recipe), tokenizer, rank=DataRank(plan.mesh.dp, groups.coords["dp"])
        ),
    )


def start_loops(plan: RunPlan, setup: Setup) -> dict[str, Run]:
    """Run every loop's first step, one loop after the other.

    Raise `ConfigError` unless the loops' engines do the same work.
    """
    models, prepared, device = setup.models, setup.prepared, setup.device
    starts: dict[str, Callable[[], Start]] = {
        "ours": lambda: our_loop(plan, models["ours"], setup.task, setup.stream, setup.tracker),
        "bare": lambda: bare_loop(plan, models["bare"], prepared, device),
        "trainer": lambda: trainer_loop(plan, models["trainer"], prepared, setup.json_file, device),
        "accelerate": lambda: accelerate_loop(
            plan, models["accelerate"], prepared, setup.json_file
        ),
    }

    runs = {}
    for loop in models:
        engine_of, train = starts[loop]()
        paused = Paused(device, train)
        runs[loop] = Run(engine_of(), paused)

    check_engines({loop: run.engine for loop, run in runs.items()})
    return runs


def held_out_losses(plan: RunPlan, setup: Setup, runs: dict[str, Run]) -> dict[str, float]:
    """Compute each loop's loss on the same rows; raise `ConfigError` unless all loops have learned
    alike.
    """
    from recipekit.runtime.step_metrics import StepMetrics
    from recipekit.tasks.find import load_task
    from recipekit.train import evaluate

    task = load_task(plan.recipe.task)
    held_out = [
        {name: batch[name].to(setup.device) for name in ("input_ids", "labels", "position_ids")}
        for batch in setup.prepared[-1][:2]
    ]
    losses = {
        loop: evaluate(run.engine, task, held_out, plan.mesh, StepMetrics())["eval_loss"]
        for loop, run in runs.items()
    }

    if max(losses.values()) > min(losses.values()) * (1 + SAME_LOSS):
        raise config_error(
            "the loops", f"did not learn the same: {losses}", "compare them before their speed"
        )
    return losses


def time_outside(runs: dict[str, Run], steps: int, device: Any) -> dict[str, dict[str, float]]:
    """Measure the time that each loop spends outside its engine's calls, and in collectives there.

    Return the median seconds per step. This is a collective operation.
    """
    timed: dict[str, list[tuple[float, float]]] = {loop: [] for loop in runs}
    for _ in range(TIMED_BLOCKS):
        for loop, run in runs.items():
            with engine_timers(run.engine) as spent:
                seconds = seconds_of_block(run, steps, device)
            timed[loop].append((seconds - spent["engine"], spent["collectives"]))

    return {
        loop: dict(zip(("outside_s", "collectives_s"), medians(blocks, steps), strict=True))
        for loop, blocks in timed.items()
    }


def seconds_of_block(run: Run, steps: int, device: Any) -> float:
    """Time one block, including the work that the loop left to its threads.

    This is a collective operation.
    """
    return block_seconds(lambda: run.train.run(steps), device, wait_until_quiet)


def wait_until_quiet() -> float:
    """Wait until no thread of this process has worked for a moment; return that moment's seconds.

    Without the wait, our loop's thread would prepare data during the time of the next loop.
    """
    deadline = time.perf_counter() + 1
    while True:
        began, worked = time.perf_counter(), time.process_time()
        time.sleep(QUIET)
        seconds = time.perf_counter() - began
        if time.process_time() - worked < QUIET / 10 or began > deadline:
            return seconds


def medians(pairs: list[tuple[float, float]], steps: int) -> list[float]:
    import numpy as np

    return [float(value) / steps for value in np.median(pairs, axis=0)]


def recorded_waits(run: Path, first: int, count: int) -> dict[str, float]:
    """Return the medians of the step times that our loop recorded itself."""
    import numpy as np

    lines = read_metrics(run)[first : first + count]
    return {
        key: float(np.median([line[key] for line in lines])) for key in ("step_s", "data_wait_s")
    }


def with_buckets(plan: RunPlan) -> dict[str, Any]:
    """Return the JSON as in its file, but with our number for an "auto" bucket size.

    Trainer and accelerate fill in hidden_size ** 2. For a small model this causes many more
    collectives per step, so the bench would compare bucket sizes instead of loops.
    """
    config = load_json(plan.recipe.ds_config, plan.command.folder)[0]
    zero = config["zero_optimization"]
    return config | {
        "zero_optimization": {
            key: plan.ds_config["zero_optimization"][key] if value == "auto" else value
            for key, value in zero.items()
        }
    }


def check_engines(engines: dict[str, Any]) -> None:
    """Raise `ConfigError` unless all engines do the same work for the same JSON."""
    seen = {
        loop: {
            "train_batch_size": engine.train_batch_size(),
            "micro_batch": engine.train_micro_batch_size_per_gpu(),
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            "gradient_clipping": engine.gradient_clipping(),
            "zero stage": engine.zero_optimization_stage(),
            "data types": [str(kind) for kind in engine.get_data_types()],
            "reduce_bucket_size": engine.zero_reduce_bucket_size(),
            "optimizer": type(engine.basic_optimizer).__name__,
            # The number of groups is not compared, because Trainer creates only one group, which
            # decays the norms.
            **{
                name: max(group[name] for group in engine.optimizer.param_groups)
                for name in ("lr", "betas", "eps", "weight_decay")
            },
        }
        for loop, engine in engines.items()
    }
    problems = [
        Problem(
            f"{key} of {loop}'s engine",
            f"is {value}, ours {seen['ours'][key]}",
            "use a JSON that all four fill in alike",
        )
        for loop, facts in seen.items()
        for key, value in facts.items()
        if value != seen["ours"][key]
    ]
    if problems:
        raise ConfigError(problems)


@contextmanager
def engine_timers(engine: Any) -> Iterator[dict[str, float]]:
    """Count the seconds inside engine calls, and the seconds in collectives outside them.

    An engine call's time includes the device's work. The loss counts as part of the forward pass.
    """
    import torch
    import torch.distributed as dist

    spent, inside = {"engine": 0.0, "collectives": 0.0}, False

    def timed(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return call(*args, **kwargs)
            inside, began = True, time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                # Without this synchronisation, the device's work would count where the host waits
                # for the device: at .item(), outside the engine.
                if engine.device.type == "cuda":
                    torch.cuda.synchronize(engine.device)
                spent[kind] += time.perf_counter() - began
                inside = False

        return wrapper

    with ExitStack() as patches:
        for name in ("forward", "backward", "step"):
            patches.enter_context(
                mock.patch.object(engine, name, timed("engine", getattr(engine, name)))
            )
        patches.enter_context(
            mock.patch.object(
                torch.nn.functional,
                "cross_entropy",
                timed("engine", torch.nn.functional.cross_entropy),
            )
        )
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single"):
            if hasattr(dist, name):
                patches.enter_context(
                    mock.patch.object(dist, name, timed("collectives", getattr(dist, name)))
                )
        yield spent


# The four loops. Each returns a function that returns its engine once training has started, and
# `train(pause)`.
# --------------------------------------------------------------------------------------------------


def our_loop(plan: RunPlan, model: Any, task: Any, stream: Any, tracker: Any) -> Start:
    """Start the unchanged loop that every recipe uses; it pauses after it has recorded a step."""
    from recipekit.checkpoints.attempts import SaveAttempts
    from recipekit.checkpoints.state import TrainState
    from recipekit.engine.deepspeed_engine import apply_workarounds
    from recipekit.runtime.audit import Audit
    from recipekit.runtime.epochs import Epochs
    from recipekit.runtime.prepare import TrainingRun, open_watch
    from recipekit.runtime.rank_times import NoRankClock
    from recipekit.runtime.stopping import Grace, Stopper
    from recipekit.train import loop

    engine = apply_workarounds(engine_of(model, plan.ds_config))

    def train(pause: Callable[[], None]) -> object:
        def log(metrics: dict[str, Any]) -> None:
            tracker.log(metrics)
            pause()

        pausing: Any = SimpleNamespace(log=log, say=tracker.say)
        never_saves: Any = SimpleNamespace(broken=False, attempts=SaveAttempts())
        not_used: Any = None
        state: TrainState = {"step": 0, "tokens": 0, "data": None, "export_dtype": ""}
        return loop(
            TrainingRun(
                plan,
                task,
                engine,
                stream,
                [],
                state,
                never_saves,
                pausing,
                open_watch(plan, engine, state, tracker, lambda step: None),
                Audit(0, engine, not_used, False, tracker.say),
                NoRankClock(),
                Stopper(Grace()),
                Epochs(plan, {}),
            )
        )

    return lambda: engine, train


def bare_loop(plan: RunPlan, model: Any, prepared: list[list[MicroBatch]], device: Any) -> Start:
    """Start a handwritten loop: the engine's three calls, and `.item()` of the loss."""
    rank, world = plan.command.rank, plan.mesh.world
    mine = [
        [
            {name: tensor.to(device) for name, tensor in batch.items()}
            for batch in batches[rank::world]
        ]
        for batches in prepared
    ]
    engine = engine_of(model, plan.ds_config)

    def train(pause: Callable[[], None]) -> None:
        for batches in itertools.cycle(mine):
            losses = []
            for batch in batches:
                losses.append(engine(**batch).loss)
                engine.backward(losses[-1])
                engine.step()
            if rank == 0:
                losses[-1].item()
            pause()

    return lambda: engine, train


def trainer_loop(
    plan: RunPlan, model: Any, prepared: list[list[MicroBatch]], json_file: Path, device: Any
) -> Start:
    from recipekit.dslint.numbers import is_block_enabled
    from transformers import (
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        default_data_collator,
    )

    recipe = plan.recipe
    settings = TrainingArguments(
        output_dir=str(plan.out / "trainer"),
        deepspeed=str(json_file),
        use_cpu=device.type == "cpu",
        bf16=is_block_enabled(plan.ds_config, "bf16"),
        fp16=is_block_enabled(plan.ds_config, "fp16"),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.micro_batch,
        gradient_accumulation_steps=plan.accumulation,
        learning_rate=recipe.lr,
        lr_scheduler_type="constant",
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.gradient_clipping,
        adam_beta2=recipe.beta2,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        gradient_checkpointing=recipe.activation_checkpointing,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=recipe.seed,
    )

    def train(pause: Callable[[], None]) -> Any:
        class Pause(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                pause()

        trainer.add_callback(Pause())
        return trainer.train()

    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=rows_of(prepared, recipe),
        data_collator=default_data_collator,  # type: ignore[arg-type]
    )
    trainer.remove_callback(PrinterCallback)
    return lambda: trainer.deepspeed, train


def accelerate_loop(
    plan: RunPlan, model: Any, prepared: list[list[MicroBatch]], json_file: Path
) -> Start:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin, DummyOptim
    from recipekit.dslint.numbers import is_block_enabled
    from recipekit.optim.groups import parameter_groups
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    recipe = plan.recipe
    # A process has only one state, and the state that Trainer created is equal.
    AcceleratorState._reset_state(reset_partial_state=False)
    kind = next((kind for kind in ("bf16", "fp16") if is_block_enabled(plan.ds_config, kind)), "no")
    plugin = DeepSpeedPlugin(
        hf_ds_config=str(json_file), gradient_clipping=recipe.gradient_clipping
    )
    accelerator = Accelerator(
        deepspeed_plugin=plugin, gradient_accumulation_steps=plan.accumulation, mixed_precision=kind
    )
    decay: Any = recipe.weight_decay  # annotated as int
    dummy = DummyOptim(parameter_groups(model), lr=recipe.lr, weight_decay=decay)
    loader = DataLoader(
        rows_of(prepared, recipe),
        batch_size=recipe.micro_batch,
        collate_fn=default_data_collator,  # type: ignore[arg-type]
    )
    engine, optimizer, loader = accelerator.prepare(model, dummy, loader)

    def train(pause: Callable[[], None]) -> None:
        for batch in loader:
            with accelerator.accumulate(engine):
                loss = engine(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                if accelerator.is_main_process:
                    loss.item()
                pause()

    return lambda: engine, train


def loss_of_shifted(batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch for transformers' models, which must not shift the labels again."""
    return batch | {"shift_labels": batch["labels"]}


def rows_of(prepared: list[list[MicroBatch]], recipe: Recipe) -> Any:
    """Return a data set that repeats the prepared rows up to the last step."""
    rows = [
        {name: tensor[row] for name, tensor in batch.items()}
        for batches in prepared
        for batch in batches
        for row in range(recipe.micro_batch)
    ]
    from torch.utils.data import Dataset

    class Rows(Dataset):
        def __len__(self) -> int:
            return recipe.steps * recipe.global_batch

        def __getitem__(self, index: int) -> dict[str, Any]:
            return rows[index % len(rows)]

    return Rows()


if __name__ == "__main__":
    sys.exit(main())
