"""Code that several benches share: flags, facts about the machine, processes, ranks, statistics and
pages.

Importing this module makes recipekit importable and imports no heavy package. Import it before
recipekit.
"""

import argparse
import datetime
import json
import math
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

from recipekit.hosts import op_cache
from recipekit.hosts.ports import free_port
from recipekit.plan import RunPlan
from recipekit.spec.errors import ConfigError, exit_with_error
from recipekit.spec.paths import path_argument

if TYPE_CHECKING:
    from recipekit.model.build import BuiltModel
    from recipekit.model.model_plan import ModelPlan
    from recipekit.parallel.groups import ProcessGroups

Name = TypeVar("Name")
COLUMNS = 120  # of a page
ENOUGH_PAIRS = 30  # number of pairs from which a comparison of blocks counts as a measurement
TRIAL = " **A trial, not a measurement.**"  # shown on the page of a bench with too few rounds
LOG_END = 5000  # number of characters of a failed command's log that are printed


# Flags
# --------------------------------------------------------------------------------------------------


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a bench's parser; its help is the docstring, and flags cannot be abbreviated."""
    return argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=path_argument,
        metavar="OUT",
        help="JSON file to which all measurements are written as well. (default: none)",
    )


def add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder",
        type=path_argument,
        default=Path(tempfile.gettempdir()),
        metavar="PATH",
        help="Working folder, on the disk to measure. (default: %(default)s)",
    )


def add_blocks(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the flags for a comparison in blocks of steps; `what` names what alternates, such as
    "loop".
    """
    parser.add_argument(
        "--pairs",
        type=int,
        default=40,
        metavar="N",
        help=(
            f"Number of blocks of each {what}. A measurement needs at least {ENOUGH_PAIRS}."
            " (default: %(default)s)"
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
    # The ranks write their report to this folder.
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)


def flags(values: dict[str, Any]) -> list[str]:
    """Return the words `--name value` of a command."""
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


# The machine and the code
# --------------------------------------------------------------------------------------------------


def today() -> str:
    return datetime.date.today().isoformat()


def load_average() -> float:
    """Return the load average of the last minute."""
    return os.getloadavg()[0]


def commit() -> str:
    """Return the checked-out commit's short name."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def versions_of(*packages: str) -> dict[str, str]:
    """Return the versions of Python and the given packages."""
    return {"Python": platform.python_version(), **{name: version(name) for name in packages}}


def accelerator() -> str:
    """Return the name of the first GPU, or "no accelerator"."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no accelerator"


def software_and_machine(*packages: str, hardware: str = "") -> dict[str, Any]:
    """Return the part of a report that names the date, the machine, the versions and the commit.

    The machine is described by its CPU cores and `hardware`, or else by the accelerator.
    """
    return {
        "date": today(),
        "machine": f"{os.cpu_count()} CPU cores, {hardware or accelerator()}",
        "versions": versions_of(*packages),
        "commit": commit(),
    }


def own_command(script: str, *dropped: str) -> str:
    """Return the command of this process for its page.

    The flags in `dropped`, their values and the flag that a launcher adds are left out.
    """
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    for flag in dropped:
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    return " ".join([f"tools/bench/{script}", *words])


# Processes
# --------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print a line of progress to stderr, because the page goes to stdout."""
    print(text, file=sys.stderr, flush=True)


def job_environment(**more: str) -> dict[str, str]:
    """Return a job's environment: one thread per rank, and the recipes' compiled ops."""
    import torch

    own = {
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(op_cache.find_op_folder()),
        "TOKENIZERS_PARALLELISM": "false",
    }
    cpu = {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}
    return os.environ | own | cpu | more


def deepspeed_command(ranks: int, *words: str) -> list[str]:
    """Return the command that starts `words`, a program with its flags, on several ranks.

    If the launcher is not installed, exit with a message.
    """
    launcher = shutil.which("deepspeed", path=str(Path(sys.executable).parent))
    if launcher is None:
        sys.exit("the deepspeed command is not installed beside this Python. Run make setup")
    start = [launcher, "--num_gpus", str(ranks), "--master_port", str(free_port())]
    return [*start, *words]


def exit_with_log(command: Sequence[Any], code: int | None, log: Path) -> NoReturn:
    """Exit with the end of a failed command's log."""
    words = " ".join(map(str, command))
    sys.exit(f"{words}\nended with exit code {code}:\n{log.read_text()[-LOG_END:]}")


def report_of_ranks(
    command: list[str], report: Path, environment: dict[str, str]
) -> dict[str, Any] | None:
    """Start a bench's ranks; return the report that rank 0 wrote.

    If the ranks failed, print a message and return None. The ranks print to stderr.
    """
    code = subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode
    if code or not report.exists():
        say(f"the ranks ended with exit code {code}. Their messages are above")
        return None
    return json.loads(report.read_text())


# One rank
# --------------------------------------------------------------------------------------------------


def run_rank(measure: Callable[[], dict[str, Any]], report: Path) -> None:
    """Run `measure` on this rank and close its process group.

    This is a collective operation. Rank 0 writes the result to `report`. The process exits if
    `measure` raises `ConfigError`.
    """
    from recipekit.runtime.stopping import start_launcher_watch

    start_launcher_watch()
    try:
        found = measure()
    except ConfigError as error:
        exit_with_error(error, 3.0)
    if os.environ["RANK"] == "0":
        report.write_text(json.dumps(found))
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def build(
    plan: RunPlan, device: Any, groups: "ProcessGroups | None"
) -> "tuple[ModelPlan, BuiltModel]":
    """Resolve and build a plan's model; return (the model plan, the built model).

    `groups` is None for a model that is neither split into stages nor sharded.
    """
    from recipekit.model.build import build_model, weights_target
    from recipekit.model.weights import fetch_config
    from recipekit.planner.resolve import resolve_model
    from recipekit.runtime.resolution import target_here

    model_config = plan.model_config or fetch_config(plan.recipe.model)
    model_plan, whole = resolve_model(plan, model_config, target_here(device))
    target = weights_target(plan.ds_config, groups, device)
    return model_plan, build_model(plan.recipe, model_plan, whole, target)


def engine_of(model: Any, config: dict[str, Any], mpu: Any = None) -> Any:
    """Return a model's DeepSpeed engine, with the recipes' parameter groups."""
    import deepspeed
    from recipekit.optim.groups import parameter_groups

    # DeepSpeed accepts a list of groups, but its annotation does not include lists.
    trained: Any = parameter_groups(model)
    return deepspeed.initialize(
        model=model, model_parameters=trained, config=config, mpu=mpu, dist_init_required=False
    )[0]


def of_all_ranks(own: Any) -> list[Any]:
    """Return the values that all ranks pass, by rank. This is a collective operation."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def block_seconds(
    work: Callable[[], object], device: Any, wait: Callable[[], float] = lambda: 0.0
) -> float:
    """Time a block of steps, including the work that the block queued on the device.

    This is a collective operation. `wait` waits for other work that belongs to the block. It
    returns the seconds that do not count.
    """
    import torch
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    idle = wait()
    return time.perf_counter() - began - idle


def alternate(
    names: Sequence[str],
    arguments: argparse.Namespace,
    seconds_of: Callable[[str], float],
    report: Callable[[str], None],
) -> dict[str, list[float]]:
    """Time pairs of blocks; each pair runs one block of every name, in random order.

    This is a collective operation. `arguments` has the flags of `add_blocks`, `seconds_of` runs a
    block, and `report` prints a line of progress. Return the slowest rank's seconds for each name
    and pair.
    """
    pairs, steps = arguments.pairs, arguments.steps_per_block
    blocks: list[dict[str, float]] = []

    began = time.monotonic()
    for pair, order in enumerate(shuffled(names, pairs), 1):
        blocks.append({name: seconds_of(name) for name in order})

        if pair in (1, pairs) or pair % 5 == 0:
            left = (time.monotonic() - began) / pair * (pairs - pair)
            shown = ", ".join(f"{name} {1000 * blocks[-1][name] / steps:.0f}" for name in names)
            report(f"pair {pair} of {pairs}: {shown} ms per step; {left:.0f} s left")

    ranks = of_all_ranks(blocks)
    return {
        name: [max(own[pair][name] for own in ranks) for pair in range(pairs)] for name in names
    }


def model_and_batch(plan: RunPlan) -> dict[str, Any]:
    """Return the part of a report that names the model, the JSON and the batch."""
    recipe = plan.recipe
    return {
        "model": recipe.model,
        "ds_config": plan.ds_path.name if plan.ds_path else "the recipe's JSON",
        "ranks": plan.mesh.world,
        **{name: getattr(recipe, name) for name in ("seq_len", "micro_batch", "global_batch")},
    }


# Order, statistics and memory
# --------------------------------------------------------------------------------------------------


def shuffled(names: Sequence[Name], rounds: int) -> Iterator[list[Name]]:
    """Yield a random order of the names for each round, the same in each call and on each rank."""
    shuffle = random.Random(0)
    for _ in range(rounds):
        yield shuffle.sample(list(names), len(names))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return theirs / ours for each pair. For seconds, the ratio is our speedup."""
    return [other / own for own, other in zip(ours, theirs, strict=True)]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (median, low, high): the two order statistics enclose the median with 95 % confidence.

    They follow from the normal approximation of the binomial distribution.
    """
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    low = max(0, math.floor(len(values) / 2 - half))
    return median(ordered), ordered[low], ordered[-1 - low]


def bootstrap_interval(
    values: Sequence[float], resamples: int = 10_000
) -> tuple[float, float, float]:
    """Return (median, low, high): the median's 95 % bootstrap interval, the same at every call."""
    import numpy as np

    sample = np.asarray(values)
    picked = np.random.default_rng(0).integers(0, len(sample), (resamples, len(sample)))
    low, high = np.quantile(np.median(sample[picked], axis=1), [0.025, 0.975])
    return float(np.median(sample)), float(low), float(high)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def own_memory(name: str) -> int:
    """Return bytes that the kernel counts for this process, such as VmRSS or VmHWM (Linux)."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def reset_peak() -> int:
    """Set VmHWM, this process's peak, to its resident size; return that size."""
    Path("/proc/self/clear_refs").write_text("5")
    return own_memory("VmRSS")


# The page
# --------------------------------------------------------------------------------------------------


def heading(report: dict[str, Any], command: str, stop: str = " ") -> str:
    """Return a page's first lines: the command, the machine, the load and the versions.

    `stop` is the space or line break that separates the command from the date.
    """
    return f"""Written by `python {command}`{stop}on {report["date"]}: {report["machine"]}.
Load average before the start {report["load_before"]:.1f}, at the end {report["load_after"]:.1f}.
{shown_versions(report["versions"])}"""


def shown_versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def fold(text: str) -> str:
    """Join each line of a page with the indented lines below it, and break the result again.

    The source of a page can therefore be narrower than the page. A line breaks at `COLUMNS` columns
    and continues under the text of its list item, but table rows do not break. A line without
    indented lines below it stays unchanged.
    """
    folded = []
    for block in re.split(r"\n(?=\S|\n|\Z)", text):
        first, *more = block.split("\n")
        if not "".join(more).strip():
            folded.append(block)
            continue
        line = " ".join([first, *map(str.strip, more)])
        item = re.match(r"(- |\d+\. )?", line)
        indent = " " * len(item[0]) if item else ""
        lines = wrap(line, COLUMNS, subsequent_indent=indent, break_on_hyphens=False)
        folded.append(line if line.startswith("|") else "\n".join(lines))
    return "\n".join(folded)
