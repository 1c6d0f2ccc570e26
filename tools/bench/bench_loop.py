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
import datetime
import functools
import itertools
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

from recipekit import Recipe
from recipekit.dslint.json_file import load as load_json
from recipekit.hosts import op_cache
from recipekit.hosts.ports import free_port
from recipekit.plan import Plan, make_plan
from recipekit.spec.command import Command, parse
from recipekit.spec.mesh import fit_batch
from recipekit.spec.paths import path_of
from recipekit.spec.refusal import Problem, Refusal, exit_refused, refuse
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
    schedule="constant",  # as the bare and the accelerate loop run a JSON without a scheduler block
    beta2=0.999,  # torch's default, which the other libraries keep
)
# Fields of the recipe that a user may change. The bench sets the others, or they would not reach
# the other three loops.
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
# steps of each loop before the first pair; after them the four models must have learned the same
WARM_UP = 8
# relative: bf16 rounding, and a token mean over the batch beside a mean of micro-batch means
SAME_LOSS = 0.01
PREPARED = 16  # global batches made beforehand for the other three loops, taken round and round
TIMED_BLOCKS = 6  # blocks of each loop in the pass that times engine calls
QUIET = 0.002  # seconds without work of any thread after which a block counts as ended
RESAMPLES = 10_000
ENOUGH_PAIRS = 30
TARGET = 0.98  # of the bare loop's tokens/s


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
            f"Number of blocks of each loop. A measurement needs at least {ENOUGH_PAIRS}. (default:"
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
    others = [loop for loop in LOOPS if loop != "ours"]
    parser.add_argument(
        "--loops",
        nargs="+",
        choices=others,
        default=others,
        help="Training loops to compare with recipekit's. (default: all)",
    )
    parser.add_argument(
        "--json",
        type=path_of,
        metavar="OUT",
        help="JSON file to which all measurements are written as well. (default: none)",
    )
    # where the ranks leave their report
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_known_args(argv)


def planned(arguments: argparse.Namespace, recipe_argv: list[str], world: int, out: Path) -> Plan:
    """Makes the plan that all four loops follow. Raises one `Refusal` with every problem."""
    command: Command = parse(RECIPE, Path(__file__), recipe_argv)
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
        raise Refusal(problems)
    # the last step is never reached: it would save
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
    plan = make_plan(replace(command, recipe=replace(command.recipe, **own), world=world))
    if plan.mesh.dp != world or "scheduler" in plan.ds_config:
        raise refuse(
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
        return rank_main(arguments, recipe_argv)
    import torch

    ranks = torch.cuda.device_count() or 2
    with tempfile.TemporaryDirectory(prefix="bench_loop_") as folder:
        try:
            planned(arguments, recipe_argv, ranks, Path(folder) / "run")
        except Refusal as refusal:
            exit_refused(refusal)
        load = os.getloadavg()[0]
        deepspeed = shutil.which("deepspeed", path=str(Path(sys.executable).parent))
        if deepspeed is None:
            print(
                "the deepspeed command is not installed beside this Python. Run make setup",
                file=sys.stderr,
            )
            return 1
        command = [
            deepspeed,
            "--num_gpus",
            str(ranks),
            "--master_port",
            str(free_port()),
            __file__,
            "--folder",
            folder,
            *sys.argv[1:],
        ]
        code = subprocess.run(command, env=environment(), stdout=sys.stderr, check=False).returncode
        report_file = Path(folder) / "report.json"
        if code or not report_file.exists():
            print(f"the bench ended with exit code {code}. Its messages are above", file=sys.stderr)
            return 1
        report = json.loads(report_file.read_text()) | {
            "load_before": load,
            "load_after": os.getloadavg()[0],
        }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    print(page(report), end="")
    return 0


def environment() -> dict[str, str]:
    """Returns the ranks' environment: one thread per rank, the recipes' compiled ops, and W&B on
    this machine only.
    """
    import torch

    own = {
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(op_cache.folder()),
        "WANDB_MODE": "offline",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return os.environ | own | ({} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"})


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Returns (median, low, high): the 95 % interval of the median by bootstrap over the pairs, the
    same at every call.
    """
    import numpy as np

    values = np.asarray(ratios)
    picked = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[picked], axis=1), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def ratios(report: dict[str, Any], other: str) -> list[float]:
    """Returns the ratios of our loop's tokens/s to another's, pair by pair; both took the same
    tokens.
    """
    return [
        theirs / ours
        for ours, theirs in zip(report["seconds"]["ours"], report["seconds"][other], strict=True)
    ]


def table_rows(report: dict[str, Any]) -> list[str]:
    """Write one row of the table for each loop."""
    import numpy as np

    steps, tokens = report["steps_per_block"], report["tokens_per_step"]
    rows = []
    for loop in report["seconds"]:
        seconds = float(np.median(report["seconds"][loop])) / steps
        ratio = "1"
        if loop != "ours":
            ratio = "{:.4f} ({:.4f} to {:.4f})".format(*interval(ratios(report, loop)))

        outside = 1000 * report["outside"][loop]["outside_s"]
        waited = 1000 * report["outside"][loop]["collectives_s"]
        rows.append(
            f"| {LOOPS[loop]} | {tokens / seconds:,.0f} | {1000 * seconds:.1f} | {ratio} |"
            f" {outside - waited:.2f} + {waited:.2f} |"
        )
    return rows


def verdicts(report: dict[str, Any]) -> list[str]:
    """Compare the intervals with the targets, for the loops that were chosen."""
    found = []
    if "bare" in report["seconds"]:
        _, low, high = interval(ratios(report, "bare"))
        found.append(
            f"the interval against the bare loop, {low:.4f} to {high:.4f},"
            f" {'reaches' if high >= TARGET else 'does NOT reach'} {TARGET}"
        )
    if "trainer" in report["seconds"]:
        _, low, _ = interval(ratios(report, "trainer"))
        found.append(
            f"the interval against `Trainer`, from {low:.4f} on, {'is' if low > 1 else 'is NOT'}"
            " above 1"
        )
    return found


def page(report: dict[str, Any]) -> str:
    """Write the result as Markdown."""
    steps = report["steps_per_block"]
    blocks = f"one block of {steps} optimizer step{'s' if steps != 1 else ''}"
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    waited = f"{1000 * report['data_wait_s']:.2f} ms of a step for data"
    losses = ", ".join(f"{loss:.4f} ({loop})" for loop, loss in report["losses"].items())
    few = ""
    if report["pairs"] < ENOUGH_PAIRS:
        few = f" **Fewer than {ENOUGH_PAIRS} pairs: a trial, not a measurement.**"

    return f"""# How fast is the training loop, compared with three others?

Written by `python {report["command"]}`
on {report["date"]}: {report["machine"]}.
Load average before the start {report["load_before"]:.1f}, at the end {report["load_after"]:.1f}.
{versions}; commit {report["commit"]}.

Every loop trains {report["model"]} on {report["ranks"]} ranks with `{report["ds_config"]}`.
A step trains on {report["global_batch"]} rows (sequences) of {report["seq_len"]} tokens, in \
micro-batches of {report["micro_batch"]}.
Because the speed of the host varies, the loops take turns. The bench ran {report["pairs"]} pairs.
In a pair, every loop runs {blocks}, in random order.{few}

| loop | tokens/s | ms per step | ours / this loop (95 % interval) | ms per step outside the \
engine |
|---|---|---|---|---|
{chr(10).join(table_rows(report))}

Target: {("; " + chr(10)).join(verdicts(report)) or "none for the loops that were chosen"}.

For each pair, the bench divides the tokens/s of our loop by the tokens/s of the other loop. The \
ratio in the table is
the median over the pairs, so a ratio above 1 means that our loop is faster. The last column shows \
how much of a step is
spent outside the engine's calls: first the loop's own work, then the collectives.

Our loop waited {waited}, {report["data_wait_s"] / report["step_s"]:.2%} of it.
To check that all loops train alike, the bench compared their losses after {WARM_UP + 1} steps on \
the same rows:
{losses}.

{what_counts(report["wandb"])}"""


def what_counts(wandb: str) -> str:
    """Explain which work the time of a block includes; `wandb`: the mode of our loop."""
    recorded = "without W&B, as in the other three"
    if wandb != "off":
        recorded = f"with W&B ({wandb}; its process runs during all four loops)"

    return f"""The time of a block includes:

- **ours:** `recipekit.train.loop` as a recipe runs it, {recorded}.
  Its time includes its own stream, with the thread that tokenises and packs ahead, and the copy \
to the device. It also
  includes the learning rate of the step, the two all-reduces of the loss and the token count, the \
gradient norm,
  `metrics.jsonl` and the progress line. A block ends when its threads have finished. Start-up, \
evaluation and
  checkpoints are excluded.
- **bare:** forward, backward and step of micro-batches that are already on the device. In each \
step, rank 0 also calls
  `.item()` on the loss. This loop neither reads data nor records anything.
- **`Trainer`:** its own `train()`. It keeps a log record of every step in memory, but does not \
print, save or report.
- **`accelerate`:** a loop with `accumulate`, `accelerator.backward`, `DummyOptim` and a prepared \
`DataLoader`. In each
  step, rank 0 calls `.item()` on the loss.

To make the comparison fair, all four loops start from the same weights and use the JSON's \
optimizer with a constant
learning rate. Bare, `Trainer` and `accelerate` cycle through {PREPARED} prepared global batches. \
All four use the recipes'
value for an `"auto"` bucket size. `Trainer` and `accelerate` would otherwise use hidden_size ** \
2, and on a small model
the bench would then compare bucket sizes instead of loops.

The time of a block is the time of the slowest rank. The last column comes from a separate pass \
({TIMED_BLOCKS} blocks of each loop,
rank 0), so that its timers do not affect the ratios. In that pass, the engine's calls are forward \
with the loss,
backward and step. The time of collectives includes waiting for the other rank, because without \
these collectives the
rank would wait inside the next engine call instead.
"""


# One rank
# --------------------------------------------------------------------------------------------------


def rank_main(arguments: argparse.Namespace, recipe_argv: list[str]) -> int:
    from recipekit.runtime.stopping import start_launcher_watch

    start_launcher_watch()
    try:
        plan = planned(
            arguments, recipe_argv, int(os.environ["WORLD_SIZE"]), arguments.folder / "run"
        )
        report = measure(plan, arguments)
        if plan.command.rank == 0:
            (arguments.folder / "report.json").write_text(json.dumps(report))
    except Refusal as refusal:
        exit_refused(refusal, 3.0)
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # The threads of four engines and of the paused loops sometimes abort the interpreter's own
    # exit.
    os._exit(0)


class Paused:
    """Runs a training loop in a thread, which stands still after an optimizer step until `run` lets
    the loop take more.

    `train(pause)` has to call `pause()` after each optimizer step. The constructor returns after
    the first step.
    """

    def __init__(self, device: Any, train: Callable[[Callable[[], None]], Any]):
        self._left = 1
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
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
        except BaseException as error:  # every error belongs to the thread that calls run
            self._error = error
        self._stands.release()

    def _pause(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._stands.release()
            self._go.acquire()

    def _wait(self) -> None:
        self._stands.acquire()
        if self._error:
            raise self._error


def measure(plan: Plan, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that the page and `--json` hold; return the same on every rank (a
    collective).
    """
    import torch.distributed as dist

    loops = [loop for loop in LOOPS if loop in ("ours", *arguments.loops)]
    steps = arguments.steps_per_block

    setup = set_up(plan, loops)
    runs = start_loops(plan, setup)
    for run in runs.values():
        run.train.run(WARM_UP)
    losses = held_out_losses(plan, setup, runs)

    blocks = alternate(runs, arguments, setup)
    rank0 = plan.command.rank == 0
    waits = recorded_waits(plan.out, 1 + WARM_UP, arguments.pairs * steps) if rank0 else {}

    setup.tracker.say("timing the engine calls")
    outside = time_outside(runs, steps, setup.device)
    setup.tracker.finish(0)
    setup.stream.close()

    everyone: list[Any] = [None] * plan.mesh.world
    dist.all_gather_object(everyone, blocks)
    return (
        waits
        | software_and_machine(setup.device)
        | trained(plan, setup.models["ours"])
        | {
            "pairs": arguments.pairs,
            "steps_per_block": steps,
            "seconds": {loop: of_slowest_rank(everyone, loop) for loop in loops},
            "outside": outside,
            "losses": losses,
        }
    )


@dataclass(frozen=True)
class Setup:
    """The models and the data of all loops."""

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


def set_up(plan: Plan, loops: list[str]) -> Setup:
    """Start the process group, and build one model for each loop and the batches (a collective)."""
    import torch.distributed as dist
    from recipekit.data.lanes import DataRank
    from recipekit.data.processors import load_tokenizer
    from recipekit.data.request import request_of
    from recipekit.data.stream import open_stream
    from recipekit.model.build import build_model
    from recipekit.model.weights import fetch_config
    from recipekit.parallel.groups import Groups
    from recipekit.runtime.start import start
    from recipekit.tasks.find import task_called
    from recipekit.track.tracking import WandbRun, open_tracker

    recipe, rank0 = plan.recipe, plan.command.rank == 0
    device = start(plan)
    json_file = plan.out / "with_buckets.json"
    if rank0:
        plan.out.mkdir(parents=True)
        json_file.write_text(json.dumps(with_buckets(plan)))
    dist.barrier()

    # The models are built before Trainer sets its globals.
    tokenizer = load_tokenizer(recipe.model, recipe.tokenizer)
    model_config = plan.model_config or fetch_config(recipe.model)
    groups = Groups(plan.mesh, device.type)
    built = {
        loop: build_model(recipe, model_config, groups, plan.ds_config, device) for loop in loops
    }
    task = task_called(recipe.task)
    if built["ours"].loss_path.in_chunks and task.of_losses:
        task = task.of_losses(task)

    tracker = open_tracker(
        run_dir=plan.out,
        is_main=rank0,
        start_step=0,
        last_step=plan.last_step,
        wandb=WandbRun("bench_loop", {}, recipe.project) if recipe.wandb else None,
    )

    stream = open_stream(request_of(recipe), tokenizer, rank=DataRank(1, 0))
    prepared = [[loss_of_shifted(batch) for batch in next(stream)[0]] for _ in range(PREPARED)]
    stream.close()
    tracker.say(f"starting {len(loops)} loops; each takes its first step")
    return Setup(
        device=device,
        json_file=json_file,
        models={loop: made.model for loop, made in built.items()},
        task=task,
        tracker=tracker,
        prepared=prepared,
        stream=open_stream(
            request_of(recipe), tokenizer, rank=DataRank(plan.mesh.dp, groups.coords["dp"])
        ),
    )


def start_loops(plan: Plan, setup: Setup) -> dict[str, Run]:
    """Let every loop take its first step, one after the other.

    Raise `Refusal` unless their engines do the same work.
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


def held_out_losses(plan: Plan, setup: Setup, runs: dict[str, Run]) -> dict[str, float]:
    """Compute each loop's loss on the same rows; raise `Refusal` unless all have learned alike."""
    from recipekit.runtime.sums import Sums
    from recipekit.tasks.find import task_called
    from recipekit.train import evaluate

    task = task_called(plan.recipe.task)
    held_out = [
        {name: batch[name].to(setup.device) for name in ("input_ids", "labels", "position_ids")}
        for batch in setup.prepared[-1][:2]
    ]
    losses = {
        loop: evaluate(run.engine, task, held_out, plan.mesh, Sums())["eval_loss"]
        for loop, run in runs.items()
    }

    if max(losses.values()) > min(losses.values()) * (1 + SAME_LOSS):
        raise refuse(
            "the loops", f"did not learn the same: {losses}", "compare them before their speed"
        )
    return losses


def alternate(
    runs: dict[str, Run], arguments: argparse.Namespace, setup: Setup
) -> list[dict[str, float]]:
    """Time the pairs: in each, one block of every loop, in random order (a collective).

    Return the seconds of this rank by pair and loop.
    """
    steps = arguments.steps_per_block
    blocks: list[dict[str, float]] = []
    order, shuffle = list(runs), random.Random(0)  # the same on every rank

    began = time.monotonic()
    for pair in range(1, arguments.pairs + 1):
        shuffle.shuffle(order)
        blocks.append(
            {loop: block_seconds(runs[loop].train, steps, setup.device) for loop in order}
        )

        if pair in (1, arguments.pairs) or pair % 5 == 0:
            left = (time.monotonic() - began) / pair * (arguments.pairs - pair)
            shown = ", ".join(f"{loop} {1000 * blocks[-1][loop] / steps:.0f}" for loop in runs)
            setup.tracker.say(
                f"pair {pair} of {arguments.pairs}: {shown} ms per step; {left:.0f} s left"
            )
    return blocks


def time_outside(runs: dict[str, Run], steps: int, device: Any) -> dict[str, dict[str, float]]:
    """Measure the median seconds of a step that each loop spends outside its engine's calls, and in
    collectives there (a collective).
    """
    timed: dict[str, list[tuple[float, float]]] = {loop: [] for loop in runs}
    for _ in range(TIMED_BLOCKS):
        for loop, run in runs.items():
            with engine_timers(run.engine) as spent:
                seconds = block_seconds(run.train, steps, device)
            timed[loop].append((seconds - spent["engine"], spent["collectives"]))

    return {
        loop: dict(zip(("outside_s", "collectives_s"), medians(blocks, steps), strict=True))
        for loop, blocks in timed.items()
    }


def of_slowest_rank(everyone: list[list[dict[str, float]]], loop: str) -> list[float]:
    """Return the seconds of the slowest rank for each block of a loop."""
    by_rank = [[pair[loop] for pair in blocks] for blocks in everyone]
    return [max(ranks) for ranks in zip(*by_rank, strict=True)]


def software_and_machine(device: Any) -> dict[str, Any]:
    """Return the part of the report that names the date, the command, the machine and the code."""
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()

    # Paths of output are no part of what was measured.
    own = [flag for flag in sys.argv[1:] if not flag.startswith("--local_rank")]
    for flag in ("--folder", "--json"):
        if flag in own:
            del own[own.index(flag) : own.index(flag) + 2]

    accelerator = torch.cuda.get_device_name() if device.type == "cuda" else "no accelerator"
    packages = ("torch", "deepspeed", "transformers", "accelerate")
    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["tools/bench/bench_loop.py", *own]),
        "machine": f"{os.cpu_count()} CPU cores, {accelerator}",
        "versions": {
            "Python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
        "commit": commit or "unknown",
    }


def trained(plan: Plan, model: Any) -> dict[str, Any]:
    """Return the part of the report that names the model, the JSON and the batch."""
    recipe = plan.recipe
    size = sum(
        getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters()
    )
    return {
        "model": f"{recipe.model} ({size / 1e6:.1f} M parameters)",
        "ds_config": plan.ds_path.name if plan.ds_path else "the recipe's JSON",
        "ranks": plan.mesh.world,
        "wandb": f"{os.environ['WANDB_MODE']}" if recipe.wandb else "off",
        **{name: getattr(recipe, name) for name in ("seq_len", "micro_batch", "global_batch")},
        "tokens_per_step": recipe.global_batch * recipe.seq_len,
    }


def block_seconds(train: Paused, steps: int, device: Any) -> float:
    """Times one block, up to the end of the work that the loop left to its threads and to the
    device (a collective).
    """
    import torch
    import torch.distributed as dist

    dist.barrier()
    begun = time.perf_counter()
    train.run(steps)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    idle = wait_until_quiet()
    return time.perf_counter() - begun - idle


def wait_until_quiet() -> float:
    """Waits until no thread of this process has worked for a moment; returns the seconds of that
    moment.

    Otherwise our loop's thread would prepare data ahead during another loop's time.
    """
    deadline = time.perf_counter() + 1
    while True:
        begun, worked = time.perf_counter(), time.process_time()
        time.sleep(QUIET)
        seconds = time.perf_counter() - begun
        if time.process_time() - worked < QUIET / 10 or begun > deadline:
            return seconds


def medians(pairs: list[tuple[float, float]], steps: int) -> list[float]:
    import numpy as np

    return [float(value) / steps for value in np.median(pairs, axis=0)]


def recorded_waits(run: Path, first: int, count: int) -> dict[str, float]:
    """Returns medians of the seconds that our loop recorded for its own steps."""
    import numpy as np

    lines = read_metrics(run)[first : first + count]
    return {
        key: float(np.median([line[key] for line in lines])) for key in ("step_s", "data_wait_s")
    }


def with_buckets(plan: Plan) -> dict[str, Any]:
    """Returns the JSON as in its file, but with our number for an "auto" bucket size.

    Trainer and accelerate fill in hidden_size ** 2, which for a small model means many more
    collectives in a step: that would compare bucket sizes, not loops.
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
    """Raises `Refusal` unless all engines do the same work for the same JSON."""
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
            # Not compared: the number of groups. Trainer makes one, and so decays the norms too.
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
        raise Refusal(problems)


@contextmanager
def engine_timers(engine: Any) -> Iterator[dict[str, float]]:
    """Counts the seconds inside engine calls, the device's work included, and in collectives
    outside them.

    The loss counts as part of the forward.
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
            inside, begun = True, time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                # otherwise the device's work would count where the host waits for it: at .item(),
                # outside
                if engine.device.type == "cuda":
                    torch.cuda.synchronize(engine.device)
                spent[kind] += time.perf_counter() - begun
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


# The four loops: each returns a function that gives its engine once training has started, and
# `train(pause)`
# --------------------------------------------------------------------------------------------------


def our_loop(plan: Plan, model: Any, task: Any, stream: Any, tracker: Any) -> Start:
    """Runs the loop of every recipe, unchanged; it pauses after it has recorded a step."""
    from recipekit.checkpoints.attempts import Attempts
    from recipekit.engine.deepspeed_engine import repaired
    from recipekit.runtime.epochs import Epochs
    from recipekit.runtime.prepare import Ready
    from recipekit.runtime.stopping import Grace, Stopper
    from recipekit.train import loop

    engine = repaired(initialize(plan, model))

    def train(pause: Callable[[], None]) -> object:
        def log(metrics: dict[str, Any]) -> None:
            tracker.log(metrics)
            pause()

        pausing: Any = SimpleNamespace(log=log, say=tracker.say)
        never_saves: Any = SimpleNamespace(broken=False, attempts=Attempts())
        return loop(
            Ready(
                plan,
                task,
                engine,
                stream,
                [],
                {"step": 0, "tokens": 0, "data": None, "export_dtype": ""},
                never_saves,
                pausing,
                Stopper(Grace()),
                Epochs(plan, {}),
            )
        )

    return lambda: engine, train


def bare_loop(plan: Plan, model: Any, prepared: list[list[MicroBatch]], device: Any) -> Start:
    """Runs a loop as one writes it by hand: nothing but the engine's three calls, and a look at the
    loss.
    """
    rank, world = plan.command.rank, plan.mesh.world
    mine = [
        [
            {name: tensor.to(device) for name, tensor in batch.items()}
            for batch in batches[rank::world]
        ]
        for batches in prepared
    ]
    engine = initialize(plan, model)

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


def initialize(plan: Plan, model: Any) -> Any:
    import deepspeed
    from recipekit.optim.groups import parameter_groups

    trained: Any = parameter_groups(model)
    return deepspeed.initialize(
        model=model, model_parameters=trained, config=plan.ds_config, dist_init_required=False
    )[0]


def trainer_loop(
    plan: Plan, model: Any, prepared: list[list[MicroBatch]], json_file: Path, device: Any
) -> Start:
    from recipekit.dslint.numbers import enabled
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
        bf16=enabled(plan.ds_config, "bf16"),
        fp16=enabled(plan.ds_config, "fp16"),
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
    plan: Plan, model: Any, prepared: list[list[MicroBatch]], json_file: Path
) -> Start:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin, DummyOptim
    from recipekit.dslint.numbers import enabled
    from recipekit.optim.groups import parameter_groups
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    recipe = plan.recipe
    # the process has one state, and Trainer's is equal
    AcceleratorState._reset_state(reset_partial_state=False)
    kind = next((kind for kind in ("bf16", "fp16") if enabled(plan.ds_config, kind)), "no")
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
    """Makes a micro-batch for transformers' models, whose labels are already shifted."""
    return batch | {"shift_labels": batch["labels"]}


def rows_of(prepared: list[list[MicroBatch]], recipe: Recipe) -> Any:
    """Makes a data set of the prepared rows, one by one, again and again up to the last step."""
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
