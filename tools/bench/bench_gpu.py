"""Measure the recipes on one GPU: losses compared with a CPU's, memory compared with the plan,
speed, checkpoints.

    # A checks that it is right; the other parts measure speed
    python tools/bench/bench_gpu.py --parts A --page bench_gpu.md
    # all six parts; continues an interrupted run
    python tools/bench/bench_gpu.py --page bench_gpu.md
    # the same rows in tiny shapes, also on a CPU
    python tools/bench/bench_gpu.py --tiny

Each row is a job with a time limit, and prints one line at its end. Its measurements are kept in
OUT/rows.jsonl. The same command continues with the rows that are missing or failed. Rows of another
device, code or version are kept apart. The bench needs no network and no data: weights are random,
rows are packed random tokens. Exit code: 0 if every row passes, else 1.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

from gpu_models import (
    DRAWN,
    LONGEST,
    LORA,
    LORA_FLAGS,
    MEDIAN,
    MODELS,
    QWEN,
    SHORTEST,
    SPREAD,
    config_of,
)
from harness import (
    COLUMNS,
    ROOT,
    commit,
    flags,
    fold,
    parser_of,
    ratios,
    shown_versions,
    today,
    versions_of,
)
from recipekit import Recipe
from recipekit.architectures.safetensors_files import read_header
from recipekit.hosts.ports import free_port
from recipekit.spec.errors import ConfigError, Problem, config_error, exit_with_error
from recipekit.spec.paths import path_argument
from recipekit.spec.run_folder import EXPORT, read_metrics

Line = dict[str, Any]  # of metrics.jsonl
PARTS = {
    "A": "Is it right?",
    "B": "1.3 billion parameters, bf16, packed documents of 2048 tokens a row",
    "C": "Larger models, rows of 4096 and 8192 tokens",
    "D": "Costs outside matmuls: checkpoints, the loop, the data",
    "E": "The fastest run of today, and without each optimization: 1.3 billion parameters as in B",
    "F": "Where the time of a step goes: kernels by kind, and each part of a step alone",
}


@dataclass(frozen=True)
class Measure:
    """An optimization of the fastest run, and how a run goes without it."""

    title: str  # of the run without it
    flags: dict[str, str] = field(default_factory=dict)  # instead of the fastest run's flags
    base: str = "zero1"  # of ds_configs/
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # block of the JSON -> keys
    wrapper: tuple[str, ...] = ()  # words of gpu_run.py


MEASURES = {
    "attention": Measure(
        "a dense mask (`--attention sdpa`) instead of attention by documents", {"attention": "sdpa"}
    ),
    "loss": Measure("full logits (`--loss whole`) instead of the chunked loss", {"loss": "whole"}),
    "blocks": Measure("the chunked loss in blocks of 2^24 logits", wrapper=("--without", "blocks")),
    "sum": Measure(
        "gradients that are copied to fp32 before the sum", wrapper=("--without", "sum")
    ),
    "timer": Measure(
        "DeepSpeed's throughput timer, which waits for the device",
        settings={"timers": {"throughput": {"enabled": True}}},
    ),
    "fused": Measure(
        "AdamW in many kernels instead of one",
        settings={"optimizer": {"params": {"fused": False}}},
    ),
    "compile": Measure("eager code (`--compile off`)", {"compile": "off"}),
    "zero1": Measure(
        "ZeRO-2 without overlap_comm instead of ZeRO-1",
        base="zero2",
        settings={"zero_optimization": {"overlap_comm": False}},
    ),
    "overlap": Measure(
        "ZeRO-2 with overlap_comm instead of ZeRO-1",
        base="zero2",
        settings={"zero_optimization": {"overlap_comm": True}},
    ),
}
FASTEST = {"attention": "varlen", "loss": "chunked", "compile": "on"}  # flags of the row best
BEST = "best"  # the row that part E's other rows are compared with
NCCL, GLOO = "NCCL", "gloo"
SAME_LOSS = 5e-3  # relative: bf16 on two devices
MFU = {"1b": 0.38, "3b": 0.40}
BEST_MFU = 0.55  # of the 1.3B model with every measure
LORA_TOKENS = 13_000  # per second; AutoModel reaches 12,473 on an H100 with these settings
NEAR_PLAN = 0.05  # relative
STALL = 1.0  # seconds that a background save may stall training
OUTSIDE = 0.005  # seconds of a step outside the engine
WAIT = 0.01  # fraction of a step that may be spent waiting for data
FIELDS = {item.name for item in dataclasses.fields(Recipe)}
# Only this flag makes a run deterministic. Recipes from before the flag are compared unchanged.
DETERMINISTIC = ["--deterministic"] if "deterministic" in FIELDS else []

HAS_BUDGET = "activation_budget" in FIELDS  # rows with an activation budget need the flag


class RowFailed(Exception):
    """The reason, in one line, why a row has no figures."""


@dataclass(frozen=True)
class Found:
    """The result of a row."""

    measured: str
    bars: list[tuple[str, bool | None]]  # (criterion, reached); None if it does not apply here
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    part: str
    name: str
    limit: int  # seconds, including a first compile of DeepSpeed's ops
    runs: str
    bar: str
    measure: Callable[["Bench", "Row"], Found]
    needs: tuple[str, ...] = ()  # rows that this row is compared with


# Running a row
# --------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """The bench's folder and the records so far."""

    out: Path
    tiny: bool
    key: dict[str, Any]  # the device, the code and the versions
    kept: dict[str, dict[str, Any]]  # the records by name of the row
    deadline: float = 0.0  # of the running row

    @property
    def inputs(self) -> Path:
        return self.out / ("inputs_tiny" if self.tiny else "inputs")

    def folder(self, name: str) -> Path:
        """Free the space for one run; return its folder, which does not exist yet."""
        folder = self.out / "runs" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        return folder

    def rows(self, full: tuple[int, int, int], tiny: tuple[int, int, int]) -> list[str]:
        """Return the flags for (seq_len, micro_batch, global_batch)."""
        names = ("seq_len", "micro_batch", "global_batch")
        return flags(dict(zip(names, tiny if self.tiny else full, strict=True)))

    def corpus(self) -> list[str]:
        return flags(
            {
                "tokenizer": self.inputs / "tokenizer",
                "dataset": self.inputs / "rows.parquet",
                "text_field": "input_ids",
            }
        )

    def data(self) -> list[str]:
        """Return the flags that every recipe in the bench receives."""
        return [
            *self.corpus(),
            *flags({"token_cache": "off", "warmup_steps": 0, "eval_every": 0, "save_every": 0}),
            "--no-wandb",
        ]

    def run(
        self,
        name: str,
        argv: list[str],
        ranks: int = 1,
        cpu: bool = False,
        until: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run a command, on several ranks of one device, to its end or until `until` is True.

        Raise `RowFailed` with the last line of the command's log.
        """
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        logs = [
            self.out / "logs" / f"{name}{f'.{rank}' if ranks > 1 else ''}.log"
            for rank in range(ranks)
        ]
        env = environment(ranks, cpu) | {"HF_DATASETS_CACHE": str(self.out / "datasets")}
        if self.tiny:
            # Compiled kernels run small tensors in threads, which wait for each other.
            env["OMP_NUM_THREADS"] = "1"
        started: list[subprocess.Popen[Any]] = []
        try:
            for rank, log in enumerate(logs):
                # All ranks have LOCAL_RANK 0, because they share one device.
                own = env | {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
                started.append(self._start(argv, log, own))
            self._wait(started, logs, until)
        finally:
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _start(self, argv: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[Any]:
        """Start one rank in a new process group."""
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, *argv],
                cwd=self.out,
                env=env,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _wait(
        self,
        started: list[subprocess.Popen[Any]],
        logs: list[Path],
        until: Callable[[], bool],
    ) -> None:
        """Wait until all ranks have ended, or until `until` is True. Raise `RowFailed`."""
        while not until():
            codes = [process.poll() for process in started]
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None:
                raise RowFailed(f"exit code {codes[failed]}: {last_line(logs[failed])}")
            if all(code == 0 for code in codes):
                return
            if time.monotonic() > self.deadline:
                raise RowFailed(
                    f"was not done in time. {logs[0].name} ends with: {last_line(logs[0])}"
                )
            time.sleep(0.05)

    def train(
        self,
        row: Row,
        recipe: str | tuple[str, ...],
        argv: list[str],
        ranks: int = 1,
        cpu: bool = False,
        enough: int = 0,
    ) -> list[Line]:
        """Run a recipe; return the lines of metrics.jsonl.

        `recipe` may begin with words of gpu_run.py. Several ranks use NCCL if it can share the GPU,
        and gloo otherwise. After `enough` steps the run is killed, so that it does not save a large
        checkpoint.
        """
        out = self.folder(row.name)
        *wrapper, file = (recipe,) if isinstance(recipe, str) else recipe
        if ranks > 1 and self.key.get("two_ranks") != NCCL:
            wrapper.append("--gloo")
        tool = [str(ROOT / file)]
        if wrapper:
            tool = [str(ROOT / "tools" / "bench" / "gpu_run.py"), *wrapper, *tool]
        whole = [*tool, *self.data(), *argv, "--out", str(out)]
        self.run(
            row.name,
            whole,
            ranks,
            cpu,
            until=lambda: bool(enough) and len(read_metrics(out)) >= enough,
        )
        return read_metrics(out)


def environment(ranks: int, cpu: bool) -> dict[str, str]:
    """Return a job's environment: one device, no network, and W&B offline.

    RANK and the other variables of a rank are removed.
    """
    cache = os.environ.get("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
    visible = "" if cpu else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    own = {
        "CUDA_VISIBLE_DEVICES": visible,
        "OMP_NUM_THREADS": str(max(1, min(4, (os.cpu_count() or 1) // ranks))),
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(ROOT / "recipes"), os.environ.get("PYTHONPATH", "")))
        ),
        "PYTHONUNBUFFERED": "1",
        "TORCH_EXTENSIONS_DIR": cache,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return os.environ | own | ({"DS_ACCELERATOR": "cpu"} if cpu else {})


def last_line(log: Path) -> str:
    """Return a log's last line, without the warnings that torch prints at exit."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line and not re.match(r"(\[rank\d+\]:)?\[[WI]\d", line)]
    return lines[-1][-300:] if lines else "(an empty log)"


# Part A: is it right?
# --------------------------------------------------------------------------------------------------


def small(bench: Bench, model: str = "small") -> list[str]:
    """Return part A's flags: a small model with its published weights."""
    steps = 8 if bench.tiny else 20
    chosen = {"model": bench.inputs / model, "init": "pretrained", "steps": steps, "lr": 3e-3}
    return [*flags(chosen), *bench.rows((512, 4, 16), (64, 2, 8)), "--no-export"]


def numbers(lines: list[Line]) -> list[list[float]]:
    """Return [step, loss, gradient norm] for each line."""
    return [[line["step"], line["loss"], line["grad_norm"]] for line in lines]


def furthest(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """Return the largest relative difference between two runs' losses.

    The result is infinity if the runs did not take the same steps.
    """
    if not ours or [line[0] for line in ours] != [line[0] for line in theirs]:
        return math.inf
    return max(abs(a[1] - b[1]) / abs(b[1]) for a, b in zip(ours, theirs, strict=True))


def other_bits(ours: list[list[float]], theirs: list[list[float]]) -> str:
    """Return where two runs' losses or gradient norms differ in a bit, or "" if they are equal."""
    if ours == theirs and ours:
        return ""
    step = next((b[0] for a, b in zip(ours, theirs, strict=False) if a != b), None)
    if step is None:
        return f"{len(ours)} steps, not {len(theirs)}"
    return f"other bits from step {step} on, losses within {furthest(ours, theirs):.1e}"


def on_the_cpu(bench: Bench, row: Row) -> Found:
    return falling(numbers(bench.train(row, QWEN, small(bench), cpu=True)))


def falling(lines: list[list[float]]) -> Found:
    falls = lines[-1][1] < lines[0][1]
    return Found(
        f"loss {lines[0][1]:.4f} to {lines[-1][1]:.4f} in {len(lines)} steps",
        [("the loss falls", falls)],
        {"lines": lines},
    )


def beside_the_cpu(bench: Bench, row: Row, more: Sequence[str] = (), ranks: int = 1) -> Found:
    return beside(bench, row, Layout("small", "cpu", tuple(more), ranks))


@dataclass(frozen=True)
class Layout:
    """A small run whose losses are compared with another row's."""

    model: str
    reference: str  # the row's name
    flags: tuple[str, ...] = ()
    ranks: int = 1
    faster: bool = False  # the step time is also compared
    sends: bool = False  # tensors of the GPU from rank to rank, which gloo does not support


def beside(bench: Bench, row: Row, layout: Layout) -> Found:
    """Compare a run's losses with its reference row's."""
    over = bench.key.get("two_ranks", GLOO)
    on_a_gpu = bench.key.get("cuda") and not bench.key["device"].startswith("no GPU")
    if layout.sends and over == GLOO and on_a_gpu:
        raise RowFailed("gloo cannot send tensors of a GPU: see NCCL in tools/bench/gpu_run.md")
    argv = [*small(bench, layout.model), *layout.flags]
    logged = bench.train(row, QWEN, argv, ranks=layout.ranks)
    figures: dict[str, Any] = {"lines": numbers(logged)}
    figures |= {"step_s": median(line["step_s"] for line in logged[2:])}

    reference = bench.kept[layout.reference]["figures"]
    away = furthest(figures["lines"], reference["lines"])
    whose = "the CPU's" if layout.reference == "cpu" else f"`{layout.reference}`"
    said = f"losses within {away:.1e} of {whose}"
    if layout.faster:
        ratio = figures["step_s"] / reference["step_s"]
        said += f", a step of {figures['step_s']:.3f} s takes {ratio:.2f} of its time"
    said += f", {layout.ranks} ranks over {over}" if layout.ranks > 1 else ""
    bars: list[tuple[str, bool | None]] = [(f"at most {SAME_LOSS:g}", away <= SAME_LOSS)]
    return Found(said, bars, figures | {"away": away})


def same_bits(bench: Bench, row: Row, more: Sequence[str] = (), stop: bool = False) -> Found:
    """Compare a run with the row zero2, bit for bit.

    The run is a repetition, a stopped and resumed run (`stop`), or a run with `more` flags.
    """
    argv = [*small(bench), *DETERMINISTIC, *more]
    if stop:
        half = bench.kept["zero2"]["figures"]["lines"][-1][0] // 2
        out = bench.folder(row.name)
        for name, flag in ((f"{row.name}_stopped", ["--stop_at", str(half)]), (row.name, [])):
            bench.run(name, [str(ROOT / QWEN), *bench.data(), *argv, "--out", str(out), *flag])
        lines = numbers(read_metrics(out))
    else:
        lines = numbers(bench.train(row, QWEN, argv))
    other = other_bits(lines, bench.kept["zero2"]["figures"]["lines"])
    return Found(
        other or f"the same bits in {len(lines)} steps",
        [("the same bits", not other)],
        {"lines": lines},
    )


def exported(bench: Bench, row: Row) -> Found:
    """Compare a run's export with the files that the converter writes from the run's checkpoint."""
    bench.train(row, QWEN, [*small(bench), "--steps", "4", "--export"])
    run, again = bench.out / "runs" / row.name, bench.folder(f"{row.name}_again")
    bench.run(
        f"{row.name}_again",
        [str(ROOT / "tools" / "convert_checkpoint.py"), "to-hf", str(run), str(again), "--verify"],
        cpu=True,
    )
    ours, theirs = tensors(run / EXPORT), tensors(again)
    same = bool(ours) and ours == theirs
    found = (
        f"{len(ours)} tensors verified"
        if same
        else f"{len(ours)} and {len(theirs)} tensors, which differ"
    )
    return Found(found, [("the same bytes", same)], {"tensors": len(ours)})


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Read a folder's safetensors files: name -> (dtype, shape, sha256 of the bytes)."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        content, header = path.read_bytes(), read_header(folder, path.name)
        starts = sorted(entry.offset for entry in header.values())
        ends = dict(zip(starts, [*starts[1:], len(content)], strict=True))
        for name, entry in header.items():
            digest = hashlib.sha256(content[entry.offset : ends[entry.offset]]).hexdigest()
            found[name] = (entry.dtype, entry.shape, digest)
    return found


# Parts B and C: memory and speed
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimedRun:
    """A run of a recipe that is killed after `steps` steps."""

    recipe: str | tuple[str, ...]  # may begin with words of gpu_run.py
    model: str  # of MODELS
    shape: tuple[int, int, int]  # (seq_len, micro_batch, global_batch)
    flags: Sequence[str] = ()
    steps: int = 6
    planned: bool = True  # the peak memory is compared with the plan


def speed(bench: Bench, row: Row, run: TimedRun) -> Found:
    """Time a recipe's steps after two warm-up steps, and compare its peak memory with --dry_run's
    prediction.
    """
    argv = argv_of(bench, run)
    plan = planned_memory(bench, row, run, argv) if run.planned else NO_PLAN
    lines = bench.train(row, run.recipe, argv, enough=4 if bench.tiny else run.steps)
    later = lines[2:]
    figures = {
        name: median(line[name] for line in later)
        for name in ("step_s", "tokens_per_s", "data_wait_s", "mfu")
        if name in later[0]
    }
    figures |= {"peak_bytes": max(line["peak_mem_bytes"] for line in lines), "planned": plan}

    words = f"{figures['tokens_per_s']:,.0f} tokens/s, {figures['step_s']:.3f} s a step"
    if "mfu" in figures:
        words += f", MFU {figures['mfu']:.1%}"
    memory, judged = beside_plan(plan, figures["peak_bytes"], applies=not bench.tiny)
    return Found(
        f"{words}. {memory[0].upper()}{memory[1:]}",
        [fast_enough(figures, run.model, bench.tiny), judged],
        figures,
    )


NO_PLAN = {"bytes": None, "activations": False}


def argv_of(bench: Bench, run: TimedRun) -> list[str]:
    """Return the recipe's flags for a timed run."""
    argv = flags({"model": bench.inputs / run.model, "init": "random", "steps": 1000, "lr": 1e-4})
    return [*argv, *bench.rows(run.shape, (64, 2, 4)), "--no-export", *run.flags]


def planned_memory(bench: Bench, row: Row, run: TimedRun, argv: list[str]) -> dict[str, Any]:
    """Return --dry_run's prediction, as `read_plan` does."""
    name = f"{row.name}_plan"
    out = bench.folder(name)
    file = run.recipe if isinstance(run.recipe, str) else run.recipe[-1]
    bench.run(name, [str(ROOT / file), *bench.data(), *argv, "--out", str(out), "--dry_run"])
    return read_plan((bench.out / "logs" / f"{name}.log").read_text())


def fast_enough(figures: dict[str, Any], model: str, tiny: bool) -> tuple[str, bool | None]:
    """Return the criterion for a model's speed and whether it is met.

    The criterion is tokens/s for the adapter on 8B, and MFU otherwise.
    """
    if model == "8b":
        bar, reached = f"more than {LORA_TOKENS:,} tokens/s", figures["tokens_per_s"] > LORA_TOKENS
    else:
        bar, reached = (
            f"MFU of {MFU[model]:.0%} or more",
            figures["mfu"] >= MFU[model] if "mfu" in figures else None,
        )
    return bar, None if tiny else reached


def without(bench: Bench, row: Row, measure: str = "") -> Found:
    """Time the 1.3B model with every measure, or with every measure except `measure`."""
    recipe = (*MEASURES[measure].wrapper, QWEN) if measure else QWEN
    chosen = best_flags(bench.out, measure)
    run = TimedRun(recipe, "1b", (2048, 8, 64), chosen, planned=not measure)
    found = speed(bench, row, run)
    if not measure:
        reached = found.figures["mfu"] >= BEST_MFU if "mfu" in found.figures else None
        bars = [(f"MFU of {BEST_MFU:.0%} or more", None if bench.tiny else reached), found.bars[1]]
        return Found(found.measured, bars, found.figures)
    ratio = found.figures["tokens_per_s"] / bench.kept[BEST]["figures"]["tokens_per_s"]
    return Found(
        f"{ratio:.3f} x the tokens/s of `{BEST}`; {found.measured}",
        [],
        found.figures | {"ratio": ratio},
    )


def best_flags(folder: Path, left_out: str = "") -> list[str]:
    """Return the flags of the fastest run, or of the same run without the measure `left_out`.

    Its JSON is written to `folder`. It is ds_configs/zero1.json, changed as the measure says.
    """
    measure = MEASURES[left_out] if left_out else Measure("")
    config = json.loads((ROOT / "ds_configs" / f"{measure.base}.json").read_text())
    for block, settings in measure.settings.items():
        for key, value in settings.items():
            old = config.setdefault(block, {}).get(key)
            config[block][key] = old | value if isinstance(old, dict) else value
    path = folder / f"best{f'_without_{left_out}' if left_out else ''}.json"
    path.write_text(json.dumps(config, indent=2))
    return flags(FASTEST | measure.flags | {"deepspeed_config": path})


def read_plan(printed: str) -> dict[str, Any]:
    """Read the output of `--dry_run`.

    Return {"bytes": the accelerator's largest prediction or None, "activations": True if
    activations are counted}.
    """
    counted = re.search(
        r"^memory +predicted activations of a micro-batch: [^\n]*", printed, re.MULTILINE
    )
    line = counted or re.search(r"^memory\b[^\n]*\baccelerator\b[^\n]*", printed, re.MULTILINE)
    sizes = (
        [
            float(size) / (1 if unit == "G" else 1024)
            for size, unit in re.findall(r"([\d.]+) ([GM])iB", line[0])
        ]
        if line
        else []
    )
    return {"bytes": max(sizes) * 2**30 if sizes else None, "activations": bool(counted)}


def beside_plan(
    plan: dict[str, Any], peak: float, applies: bool
) -> tuple[str, tuple[str, bool | None]]:
    """Compare the peak memory with the plan.

    Return the words for the page, and the criterion. The peak must be near a plan with activations,
    and must not be below a plan without them.
    """
    measured = f"peak {peak / 2**30:.2f} GiB"
    if plan["bytes"] is None:
        return f"{measured}, not planned", ("peak near the plan", None)
    planned = plan["bytes"]
    words = f"{measured}, planned {planned / 2**30:.2f}"
    if plan["activations"]:
        return words, (
            f"peak within {NEAR_PLAN:.0%} of the plan",
            abs(peak - planned) <= NEAR_PLAN * planned if applies else None,
        )
    return f"{words} without activations", (
        "peak not below the plan",
        peak >= (1 - NEAR_PLAN) * planned if applies else None,
    )


def beside_trainer(bench: Bench, row: Row) -> Found:
    """Time blocks of our loop and of Trainer in turn, in one process.

    Both use the same model, rows and JSON.
    """
    folder = bench.folder(row.name)
    folder.mkdir()
    argv = flags(
        {
            "folder": folder,
            "pairs": 2 if bench.tiny else 10,
            "steps-per-block": 1,
            "model": bench.inputs / "1b",
            "init": "random",
        }
    )
    argv += [
        *bench.corpus(),
        *bench.rows((2048, 8, 16), (64, 2, 4)),
        "--no-wandb",
        "--loops",
        "trainer",
    ]
    bench.run(row.name, [str(ROOT / "tools" / "bench" / "bench_loop.py"), *argv])
    report = json.loads((folder / "report.json").read_text())
    ours, theirs = (
        report["tokens_per_step"] * report["steps_per_block"] / median(report["seconds"][loop])
        for loop in ("ours", "trainer")
    )
    ratio = median(ratios(report["seconds"]["ours"], report["seconds"]["trainer"]))
    words = (
        f"{ours:,.0f} tokens/s beside {theirs:,.0f} of Trainer, ratio {ratio:.3f} in"
        f" {report['pairs']} pairs; the same losses to 1 %"
    )
    return Found(words, [], {"report": report, "ratio": ratio})


# Part D: costs outside matmuls
# --------------------------------------------------------------------------------------------------


def loop_costs(bench: Bench, row: Row) -> Found:
    folder = bench.folder(row.name)
    folder.mkdir()
    argv = flags(
        {
            "folder": folder,
            "pairs": 2 if bench.tiny else 20,
            "steps-per-block": 1 if bench.tiny else 2,
        }
    )
    argv += [*flags({"model": "HuggingFaceTB/SmolLM2-135M", "init": "random"}), *bench.corpus()]
    argv += [
        *bench.rows((2048, 8, 32), (64, 2, 4)),
        "--no-wandb",
        "--loops",
        "bare",
        *(["--tiny"] if bench.tiny else []),
    ]
    bench.run(row.name, [str(ROOT / "tools" / "bench" / "bench_loop.py"), *argv])
    report = json.loads((folder / "report.json").read_text())
    outside, wait = report["outside"]["ours"]["outside_s"], report["data_wait_s"] / report["step_s"]
    ratio = median(ratios(report["seconds"]["ours"], report["seconds"]["bare"]))
    words = (
        f"{1000 * outside:.2f} ms of a step of {1000 * report['step_s']:.1f} ms outside the engine,"
        f" {wait:.2%} of it waiting for data"
    )
    applies = lambda reached: None if bench.tiny else reached  # noqa: E731
    bars = [
        (f"at most {1000 * OUTSIDE:g} ms", applies(outside <= OUTSIDE)),
        (f"wait under {WAIT:.0%}", applies(wait < WAIT)),
    ]
    return Found(
        f"{words}. Speed: {ratio:.3f} of the bare loop's tokens/s", bars, {"report": report}
    )


def stall_of_a_save(bench: Bench, row: Row) -> Found:
    folder = bench.folder(row.name)
    folder.mkdir()
    argv = flags(
        {
            "report": folder / "report.json",
            "rounds": 1 if bench.tiny else 2,
            "steps-after": 1,
            "model": "Qwen/Qwen3-0.6B-Base",
            "init": "random",
        }
    )
    argv += [
        *flags({"tokenizer": bench.inputs / "tokenizer", "deepspeed_config": "zero2.json"}),
        *(["--tiny"] if bench.tiny else []),
    ]
    bench.run(row.name, [str(ROOT / "tools" / "bench" / "bench_checkpoint.py"), *argv])
    report = json.loads((folder / "report.json").read_text())
    shutil.rmtree(folder / "run", ignore_errors=True)  # gigabytes
    plain, at_once, background = (
        median(report["kinds"][kind]["stall"]) for kind in ("plain", "at_once", "background")
    )
    size = report["kinds"]["at_once"]["bytes"] / 2**30
    words = (
        f"{background:.2f} s in the background, {at_once:.2f} blocking, {plain:.2f} with"
        f" DeepSpeed's own call; {size:.2f} GiB"
    )
    return Found(
        words,
        [(f"under {STALL:g} s in the background", None if bench.tiny else background < STALL)],
        {"report": report},
    )


# Part F: where a step's time goes
# --------------------------------------------------------------------------------------------------


def profiled(bench: Bench, row: Row, run: TimedRun) -> Found:
    """Profile one step after the timed ones: the kernels' milliseconds by kind."""
    file = bench.out / f"{row.name}.json"
    file.unlink(missing_ok=True)
    at = 3 if bench.tiny else run.steps
    wrapped = ("--profile", str(file), "--at", str(at), str(run.recipe))
    bench.train(row, wrapped, argv_of(bench, run), enough=at + 1)
    found = json.loads(file.read_text())
    table = [["kind", "ms", "of the step", "longest kernel"]]
    for each in found["kinds"]:
        share = f"{each['ms'] / found['wall_ms']:.1%}"
        table.append([each["kind"], f"{each['ms']:,.1f}", share, f"`{each['longest']}`"])
    table.append(["idle", f"{found['idle_ms']:,.1f}", f"{found['idle_ms'] / found['wall_ms']:.1%}"])
    table[-1].append("no kernel runs")
    said = (
        f"a step of {found['wall_ms']:,.0f} ms, {found['idle_ms']:,.0f} ms of it without a kernel"
    )
    return Found(said, [], found | {"table": table})


def parts_alone(bench: Bench, row: Row) -> Found:
    """Time each part of a step of the 1.3B model and of the adapter on 8B by itself."""
    file = bench.out / f"{row.name}.json"
    tiny = ["--tiny"] if bench.tiny else []
    bench.run(
        row.name, [str(ROOT / "tools" / "bench" / "gpu_parts.py"), "--json", str(file), *tiny]
    )
    parts = json.loads(file.read_text())
    table = [["part", "what", "ms", "rate"]]
    table += [[each["part"], each["what"], each["ms"], each["rate"]] for each in parts]
    figures = {"parts": parts, "table": table}
    missing = sum(each["ms"] == "not timed" for each in parts)
    return Found(f"{len(parts) - missing} times, {missing} parts not timed", [], figures)


# The rows
# --------------------------------------------------------------------------------------------------

NEAR_CPU = f"losses within {SAME_LOSS:g} of the CPU's"
SAME = "the same bits"
FAST = "MFU of {:.0%}; peak beside the plan"


def one_device(name: str, runs: str, *more: str) -> Row:
    """Return a row of part A: a ZeRO stage, identified by the name of its JSON.

    A run whose JSON uses offload may first compile CPU Adam.
    """
    measure = partial(beside_the_cpu, more=["--deepspeed_config", f"{name}.json", *more])
    return Row("A", name, 200 if name.endswith("cpu") else 90, runs, NEAR_CPU, measure, ("cpu",))


def two_ranks(name: str, runs: str, *more: str, reference: str = "cpu", sends: bool = False) -> Row:
    """Return a row of two ranks, compared with the row `reference` of one rank."""
    model = "moe" if reference == "moe" else "small"
    measure = partial(beside, layout=Layout(model, reference, more, 2, sends=sends))
    bar = NEAR_CPU if reference == "cpu" else f"losses within {SAME_LOSS:g} of `{reference}`"
    return Row("A", name, 200, f"{runs}; two ranks", bar, measure, (reference,))


def full_layers(ranks: int) -> Row:
    """Return a row of ZeRO-3 that gathers and compiles full layers, compared with plain ZeRO-3."""
    reference = "zero3" if ranks == 1 else "two_zero3"
    words = ["--deepspeed_config", "zero3.json", "--compile", "on", "--activation_budget", "0"]
    layout = Layout("small", reference, tuple(words), ranks, faster=True)
    runs = f"ZeRO-3, compiled full layers, budget 0{'; two ranks' * (ranks - 1)}"
    bar = f"losses within {SAME_LOSS:g} of `{reference}`"
    act = partial(beside, layout=layout)
    return Row("A", f"{'two_' * (ranks - 1)}layers", 200, runs, bar, act, (reference,))


def zero1_3b(name: str, runs: str, *more: str) -> Row:
    """Return a row of 3B under ZeRO-1 that recomputes no complete layer."""
    words = ["--deepspeed_config", "zero1.json", *more]
    act = partial(speed, run=TimedRun(QWEN, "3b", (4096, 2, 16), words, steps=5))
    runs = f"all of 3B, rows of 4096, ZeRO-1, {runs}"
    return Row("C", name, 150, runs, FAST.format(MFU["3b"]), act)


def reference_row(name: str, runs: str, model: str, *more: str) -> Row:
    """Return a row of one rank that rows of two ranks are compared with."""
    measure = partial(alone, layout=Layout(model, "", more))
    return Row("A", name, 200, f"{runs}, a reference for two ranks", "the loss falls", measure)


def alone(bench: Bench, row: Row, layout: Layout) -> Found:
    return falling(numbers(bench.train(row, QWEN, [*small(bench, layout.model), *layout.flags])))


def beside_zero2(name: str, limit: int, runs: str, *more: str, stop: bool = False) -> Row:
    return Row("A", name, limit, runs, SAME, partial(same_bits, more=more, stop=stop), ("zero2",))


def whole_1b(name: str, runs: str, *more: str) -> Row:
    measure = partial(speed, run=TimedRun(QWEN, "1b", (2048, 8, 64), more, steps=7))
    return Row("B", name, 150, runs, FAST.format(MFU["1b"]), measure)


def whole_3b(name: str, seq_len: int, rows: int, every: int = 1) -> Row:
    more = ["--recompute_every", str(every)]
    measure = partial(speed, run=TimedRun(QWEN, "3b", (seq_len, 2, rows), more, steps=5))
    runs = f"all of 3B, rows of {seq_len}, {'all' if every == 1 else 'half the'} layers recomputed"
    return Row("C", name, 150, runs, FAST.format(MFU["3b"]), measure)


def budget_3b() -> Row:
    return zero1_3b("3b_budget", "activation budget 0.5", "--activation_budget", "0.5")


def without_row(measure: str) -> Row:
    act = partial(without, measure=measure)
    return Row("E", f"no_{measure}", 200, MEASURES[measure].title, "none", act, (BEST,))


LORA_8B = TimedRun(LORA, "8b", (4096, 2, 16), LORA_FLAGS, steps=5)
# Each rank compresses its own momentum, so ranks differ from one rank by more than rounding. The
# difference grows with the learning rate.
ONE_BIT = ["--deepspeed_config", "zero0_onebit.json", "--lr", "3e-4"]
FASTEST_1B = ["--deepspeed_config", "zero1.json", *flags(FASTEST)]
ROWS = [
    Row(
        "A",
        "cpu",
        180,
        "ZeRO-2 on the CPU, the reference of this part",
        "the loss falls",
        on_the_cpu,
    ),
    one_device("zero0", "ZeRO-0"),
    one_device("zero1", "ZeRO-1"),
    one_device("zero2", "ZeRO-2, with `--deterministic`", *DETERMINISTIC),
    one_device("zero3", "ZeRO-3"),
    one_device("zero2_cpu", "ZeRO-2, optimizer on the CPU"),
    one_device("zero3_cpu", "ZeRO-3, parameters and optimizer on the CPU"),
    beside_zero2("again", 90, "`zero2` once more"),
    beside_zero2("resume", 150, "`zero2`, stopped half-way and resumed", stop=True),
    beside_zero2(
        "background",
        90,
        "`zero2` with saves in the background",
        "--save_every",
        "3",
        "--save_in_background",
    ),
    Row(
        "A",
        "export",
        120,
        "a run's Hugging Face files, and `to-hf --verify` of its checkpoint",
        "the same bytes",
        exported,
    ),
    two_ranks(
        "two_tp2",
        "tensor parallel 2, published weights",
        "--deepspeed_config",
        "zero1.json",
        "--tp",
        "2",
    ),
    two_ranks("two_zero1", "ZeRO-1", "--deepspeed_config", "zero1.json"),
    two_ranks("two_zero2", "ZeRO-2"),
    two_ranks("two_zero3", "ZeRO-3", "--deepspeed_config", "zero3.json"),
    two_ranks("two_sp2", "sequence parallel 2", "--sp", "2"),
    two_ranks(
        "two_zero3_sp2",
        "ZeRO-3, sequence parallel 2",
        "--deepspeed_config",
        "zero3.json",
        "--sp",
        "2",
    ),
    two_ranks(
        "two_pp2",
        "a pipeline of two stages",
        "--deepspeed_config",
        "zero1.json",
        "--pp",
        "2",
        sends=True,
    ),
    two_ranks("two_ddp", "DDP", "--engine", "ddp"),
    two_ranks("two_fsdp2", "FSDP2", "--engine", "fsdp2"),
    reference_row("moe", "ZeRO-1, a mixture of experts", "moe", "--deepspeed_config", "zero1.json"),
    two_ranks(
        "two_ep2",
        "expert parallel 2",
        "--deepspeed_config",
        "zero1.json",
        "--ep",
        "2",
        reference="moe",
    ),
    reference_row("onebit", "1-bit Adam", "small", *ONE_BIT),
    two_ranks(
        "two_onebit",
        "1-bit Adam",
        *ONE_BIT,
        reference="onebit",
    ),
    *([full_layers(1), full_layers(2)] if HAS_BUDGET else []),
    whole_1b("1b", "ZeRO-2, the recipe's JSON as it is"),
    whole_1b("1b_zero1", "ZeRO-1", "--deepspeed_config", "zero1.json"),
    whole_1b("1b_zero3", "ZeRO-3", "--deepspeed_config", "zero3.json"),
    Row(
        "B",
        "1b_trainer",
        200,
        "our loop and `transformers.Trainer` alternate, 16 rows a step",
        "the same losses to 1 %",
        beside_trainer,
    ),
    Row(
        "C",
        "8b_lora",
        220,
        "8B, LoRA, rows of 4096",
        f"{LORA_TOKENS:,} tokens/s; peak beside the plan",
        partial(speed, run=LORA_8B),
    ),
    whole_3b("3b_4096", 4096, rows=16),
    whole_3b("3b_half", 4096, rows=16, every=2),
    whole_3b("3b_8192", 8192, rows=8),
    zero1_3b("3b_kept", "nothing recomputed", "--recompute_every", "0"),
    *([budget_3b()] if HAS_BUDGET else []),
    Row(
        "D",
        "loop",
        150,
        "our loop and a bare loop, SmolLM2-135M, rows of 2048",
        "5 ms outside the engine; wait under 1 %",
        loop_costs,
    ),
    Row(
        "D",
        "checkpoint",
        260,
        "a save of Qwen3-0.6B under ZeRO-2",
        "under 1 s in the background",
        stall_of_a_save,
    ),
    Row(
        "E",
        BEST,
        240,
        "every optimization",
        f"MFU of {BEST_MFU:.0%}; peak beside the plan",
        without,
    ),
    *(without_row(measure) for measure in MEASURES),
    Row(
        "F",
        "profile_1b",
        240,
        "one step of `best` in torch's profiler",
        "none",
        partial(profiled, run=TimedRun(QWEN, "1b", (2048, 8, 64), FASTEST_1B, steps=5)),
    ),
    Row(
        "F",
        "profile_8b",
        240,
        "one step of `8b_lora` in torch's profiler",
        "none",
        partial(profiled, run=LORA_8B),
    ),
    Row("F", "parts", 90, "each part of a step of `1b` and `8b_lora` alone", "none", parts_alone),
]
BY_NAME = {row.name: row for row in ROWS}


# The records
# --------------------------------------------------------------------------------------------------


def kept_rows(file: Path, key: dict[str, Any], any_code: bool = False) -> dict[str, dict[str, Any]]:
    """Return the newest record of each row with this key.

    With `any_code`, the key may belong to different code. Torn lines and lines with other keys are
    ignored.
    """
    found: dict[str, dict[str, Any]] = {}
    for record in records(file):
        if (record["key"] | {"code": key["code"]} if any_code else record["key"]) == key:
            found[record["row"]] = record
    return found


def records(file: Path) -> list[dict[str, Any]]:
    found = []
    for line in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def keep(file: Path, record: dict[str, Any]) -> None:
    """Add a line, even after a line that a kill has torn."""
    torn = file.exists() and not file.read_bytes().endswith(b"\n") and file.stat().st_size > 0
    with file.open("a") as stream:
        stream.write(("\n" if torn else "") + json.dumps(record) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def verdict(found: Found) -> tuple[str, str]:
    """Return "pass" or "fail", and the criteria that were missed or do not apply."""
    missed = [bar for bar, reached in found.bars if reached is False]
    open_bars = [bar for bar, reached in found.bars if reached is None]
    said = [f"missed: {bar}" for bar in missed] + [f"no bar here: {bar}" for bar in open_bars]
    return "fail" if missed else "pass", "; ".join(said)


def chosen(
    parts: Sequence[str], names: Sequence[str], kept: dict[str, dict[str, Any]]
) -> list[Row]:
    """Return the rows to run, in order.

    These are the chosen rows, and the rows that they are compared with and that have no figures
    yet.
    """
    wanted = {row.name for row in ROWS if (row.name in names if names else row.part in parts)}
    missing = {need for name in wanted for need in needed(name) if not done(kept.get(need))}
    return [row for row in ROWS if row.name in wanted | missing]


def needed(name: str) -> set[str]:
    return {above for need in BY_NAME[name].needs for above in {need, *needed(need)}}


def done(record: dict[str, Any] | None) -> bool:
    """Return True if a row has its figures, even if it missed its criterion; a broken row runs
    again.
    """
    return record is not None and record["status"] != "broke"


def code_digest() -> str:
    """Return a digest of the code that the rows run, including uncommitted code."""
    files = [
        *(ROOT / "recipes").rglob("*.py"),
        *(ROOT / "recipes").rglob("*.json"),
        *(ROOT / "ds_configs").glob("*.json"),
    ]
    files += [
        ROOT / "tools" / name
        for name in (
            "bench/bench_gpu.py",
            "bench/bench_loop.py",
            "bench/bench_checkpoint.py",
            "bench/gpu_models.py",
            "bench/gpu_parts.py",
            "bench/gpu_run.py",
            "bench/harness.py",
            "convert_checkpoint.py",
        )
    ]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


# The command
# --------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    arguments = arguments_of(argv)
    if arguments.prepare:
        return prepare(arguments.prepare, arguments.tiny)
    if arguments.list:
        print(
            "\n".join(
                f"{row.part} {row.name:14} at most {row.limit:3} s  {row.runs}: {row.bar}"
                for row in ROWS
            )
        )
        return 0
    problems = []
    if arguments.minutes <= 0:
        problems.append(
            Problem(
                f"--minutes {arguments.minutes:g}",
                "must be a positive number",
                "leave it out for 7",
            )
        )
    if arguments.page and not arguments.page.resolve().parent.is_dir():
        problems.append(
            Problem(
                f"--page {arguments.page}",
                "its folder does not exist",
                "make the folder, or name another file",
            )
        )
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problems.append(
            Problem(
                f"--out {arguments.out}",
                f"cannot be written: {error.strerror}",
                "choose a folder that you can write to",
            )
        )
    if problems:
        raise ConfigError(problems)
    file = arguments.out.resolve() / "rows.jsonl"
    if arguments.no_run:
        last = next(reversed(records(file)), None)
        kept, code = kept_rows(file, last["key"], any_code=True) if last else {}, 0
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exit ends the running row
        kept, code = measure(arguments, file)
    if arguments.page:
        arguments.page.write_text(page(kept))
    return code


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="A",
        help=(
            "Run only these parts. A: correctness. B, C: speed and memory. D: checkpoints, loop,"
            " data. E: the fastest run, and without each optimization. F: kernels by kind."
            " (default: all)"
        ),
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=BY_NAME,
        default=[],
        metavar="ROW",
        help="Run only these jobs, instead of complete parts. --list shows their names.",
    )
    parser.add_argument(
        "--out",
        type=path_argument,
        default=Path("runs/bench_gpu"),
        metavar="PATH",
        help="Folder for runs, logs and the results in rows.jsonl. (default: %(default)s)",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help=(
            "Use tiny shapes, for a trial on any machine. Limits for speed and memory are not"
            " checked."
        ),
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=7.0,
        metavar="N",
        help=(
            "Minutes for each part: after this time, the part starts no further job. (default:"
            " %(default)g)"
        ),
    )
    parser.add_argument(
        "--page",
        type=path_argument,
        metavar="FILE.md",
        help="Write the stored results as a page to this Markdown file. (default: no page)",
    )
    parser.add_argument(
        "--no-run",
        "--no_run",
        action="store_true",
        help=(
            "Run no jobs. --page then uses the newest results of this device, from any version of"
            " the code."
        ),
    )
    parser.add_argument(
        "--list", action="store_true", help="List the jobs of each part, then exit."
    )
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace, file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Measure the missing rows; return (the rows of this device, code and versions, exit code)."""
    bench = Bench(file.parent, arguments.tiny, {}, {}, time.monotonic() + 300)
    prepare_inputs(bench)
    bench.key = json.loads((bench.inputs / "machine.json").read_text()) | {
        "code": code_digest(),
        "tiny": bench.tiny,
    }
    bench.kept = kept_rows(file, bench.key)
    print(
        ", ".join(f"{name} {value}" for name, value in bench.key.items() if value is not None),
        flush=True,
    )

    rows = chosen(arguments.parts, arguments.rows, bench.kept)
    for part in PARTS:
        run_part(bench, [row for row in rows if row.part == part], 60 * arguments.minutes, file)

    passed = [row.name for row in rows if bench.kept.get(row.name, {}).get("status") == "pass"]
    others = [row.name for row in rows if row.name not in passed]
    print(
        f"{len(passed)} of {len(rows)} rows pass{'; not: ' + ', '.join(others) if others else ''}"
    )
    return bench.kept, 1 if others else 0


def prepare_inputs(bench: Bench) -> None:
    """Write the models and the data in a separate process; if that fails, exit with its log."""
    tiny = ["--tiny"] if bench.tiny else []
    try:
        bench.run("prepare", [__file__, "--prepare", str(bench.inputs), *tiny])
    except RowFailed:
        print((bench.out / "logs" / "prepare.log").read_text(), end="", file=sys.stderr)
        raise SystemExit(1) from None


def run_part(bench: Bench, rows: list[Row], seconds: float, file: Path) -> None:
    """Run a part's rows that have no figures yet, as long as time remains; store the records in
    `file`.
    """
    began = time.monotonic()
    for row in rows:
        if done(bench.kept.get(row.name)):
            show(bench.kept[row.name], kept=True)
            continue

        # A part's first row always runs.
        left = began + seconds - time.monotonic()
        if left < row.limit and time.monotonic() - began > 1:
            print(
                f"{row.part} {row.name:14} waits for the next start: it may take {row.limit} s,"
                f" and {left:.0f} of part {row.part} are left",
                flush=True,
            )
            continue
        record = run_row(bench, row)
        keep(file, record)
        bench.kept[row.name] = record
        show(record)


def run_row(bench: Bench, row: Row) -> dict[str, Any]:
    """Run one row; return its record. An error ends the row, but not the bench."""
    began = time.monotonic()
    bench.deadline = began + row.limit
    status, measured, bars, figures = "broke", "", "", {}
    try:
        for need in row.needs:
            if not done(bench.kept.get(need)):
                raise RowFailed(f"needs row {need}, which has no figures")
        found = row.measure(bench, row)
        measured, figures = found.measured, found.figures
        status, bars = verdict(found)
    except Exception as error:  # the other rows still run after an error of any kind
        measured = (
            str(error) if isinstance(error, RowFailed) else f"{type(error).__name__}: {error}"
        )
    seconds = round(time.monotonic() - began, 1)
    record = {
        "row": row.name,
        "part": row.part,
        "status": status,
        "seconds": seconds,
        "measured": measured,
        "bars": bars,
    }
    return record | {
        "date": today(),
        "commit": commit(),
        "key": bench.key,
        "figures": figures,
    }


def show(record: dict[str, Any], kept: bool = False) -> None:
    bars = f" ({record['bars']})" if record["bars"] else ""
    took = "kept" if kept else f"{record['seconds']:.0f} s"
    print(
        f"{record['part']} {record['row']:14} {record['status']:5} {took:>6} "
        f" {record['measured']}{bars}",
        flush=True,
    )


# The page
# --------------------------------------------------------------------------------------------------


def page(kept: dict[str, dict[str, Any]]) -> str:
    """Write the records as Markdown; a row without figures is shown as "not measured"."""
    measured = [record for record in kept.values() if done(record)]
    codes, tables = {record["key"]["code"] for record in kept.values()}, []
    for part, title in PARTS.items():
        lines, found = [], []
        for row in [row for row in ROWS if row.part == part]:
            record = kept.get(row.name)
            lines.append(
                f"| {row.name} | {row.runs} | {row.bar} |"
                f" {record['status'] if record else 'not measured'} |"
            )
            if record is not None:
                bars = f" ({record['bars']})" if record["bars"] else ""
                bars += f" [code {record['key']['code']}]" if len(codes) > 1 else ""
                found += wrap(
                    f"- {row.name}: {record['measured']}{bars}", COLUMNS, subsequent_indent="  "
                )
                found += table_of(record)
        head = "| row | what runs | bar | result |\n|---|---|---|---|"
        tables.append(
            "\n".join(
                [f"## {part}: {title}\n\n{head}", *lines, *(["", *found] if found else []), ""]
            )
        )
    return f"""# Are the recipes right and fast on one GPU?

{heading_of(kept, len(measured))}

{chr(10).join(tables)}
{WORDS}"""


def table_of(record: dict[str, Any]) -> list[str]:
    """Return the lines of a record's own table, with empty lines around it."""
    table = record["figures"].get("table")
    if not table:
        return []
    head, *cells = (f"| {' | '.join(line)} |" for line in table)
    return ["", head, "|---" * len(table[0]) + "|", *cells, ""]


WORDS = fold(f"""- **A** shows whether training on the device is right: it compares losses on the
  device with losses on the CPU, as relative differences. The model has two layers, published
  weights and bf16. "The same bits" means that every loss and gradient norm is equal bit for bit.
  The rows with two ranks run both ranks on one GPU, and their lines name the library between the
  ranks. NCCL before 2.30 refuses this, and NCCL 2.30 allows it with NCCL_MULTI_RANK_GPU_ENABLE=1.
  Otherwise the ranks use gloo with tensors on the device, and `two_pp2` cannot run.
  `layers` and `two_layers` also compare step times. On two CPU cores in tiny shapes, a step took
  0.43 of the time of `zero3`, and 0.45 of the time of `two_zero3` (2026-11-29, torch 2.13.0). On a
  GPU they are not measured.
- **B and C** measure speed and memory. They use the recipe's own loop and JSON, random weights, and
  packed documents of random tokens (median 545). Times are medians of the steps after the second.
  The peak is the largest `peak_mem_bytes`, and the plan is the figure of `--dry_run`. If a plan
  counts activations, the peak must be within {NEAR_PLAN:.0%} of it. Otherwise the peak must not be
  below the plan. Each run is killed after its last timed step, so it saves no checkpoint.
- **D** measures the time that training spends outside computation, by running
  [bench_loop.py](bench_loop.py) and [bench_checkpoint.py](bench_checkpoint.py) with larger models.
  On a GPU, the pass that times engine calls waits for the device after each call, so the
  milliseconds outside the engine are time that no computation hides.
- **E** shows the gain of each optimization today: it runs the model and rows of B with all of them,
  and then without each one. A ratio below 1 is the share of the speed that remains without
  the optimization. On one GPU nothing is summed over ranks, so overlap_comm can only cost time.
- **F** shows where the time of a step goes. In `profile_1b` and `profile_8b`, kernels that overlap
  count fully in their kinds, and "idle" is the time in which no kernel runs. In `parts`, each part
  of a step runs by itself on random tensors of the row's shapes, and times are medians of ten runs.
- [gpu_run.md](gpu_run.md) is the order of a run of 15 minutes on one GPU.
- [roofline.md](roofline.md) has the upper bounds of an H100 for the rows 1b, 3b_4096 and 8b_lora.
""")


def heading_of(kept: dict[str, dict[str, Any]], measured: int) -> str:
    if not kept:
        return (
            "Written by `python tools/bench/bench_gpu.py --no-run --page tools/bench/bench_gpu.md`"
            f" on {today()}:\nno GPU was available, nothing is measured yet."
        )
    key = next(iter(kept.values()))["key"]
    dates, commits = (
        sorted({record[name] for record in kept.values()}) for name in ("date", "commit")
    )
    packages = ("driver", "Python", "torch", "cuda", "nccl", "deepspeed", "transformers")
    versions = shown_versions({name: key[name] for name in packages if key.get(name)})
    passed = sum(record["status"] == "pass" for record in kept.values())
    tiny = (
        " **Tiny shapes: a trial that every row runs. Its figures say nothing about a GPU.**"
        if key["tiny"]
        else ""
    )
    when = " and ".join(dict.fromkeys((dates[0], dates[-1])))
    return fold(f"""Written by `python tools/bench/bench_gpu.py` on {when}: {key["device"]}.
Versions: {versions}.
Measured at commit {", ".join(commits)}. {measured} of {len(ROWS)} rows measured, {passed}
    pass.{tiny}
A row is one job of the bench, such as a short training run. The bar of a row is the target that it
    must reach to pass.""")


# Separate processes
# --------------------------------------------------------------------------------------------------


def prepare(folder: Path, tiny: bool) -> int:
    """Write a description of the machine, and create the models, the tokenizer and the packed
    random rows that the bench uses.
    """
    import torch
    from gpu_run import loaded_nccl, shares_gpu

    cuda = torch.cuda.is_available()
    if not cuda and not tiny:
        raise config_error(
            "the device",
            "torch sees no GPU here",
            "use --tiny for a trial, or see what tools/doctor.py says of the driver",
        )
    driver = ""
    if cuda and shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = (
            subprocess.run(asked, capture_output=True, text=True, check=False)
            .stdout.split("\n")[0]
            .strip()
        )
    nccl = loaded_nccl()
    machine = {
        "device": torch.cuda.get_device_name(0) if cuda else f"no GPU, {os.cpu_count()} CPU cores",
        "driver": driver or None,
        **versions_of("torch", "deepspeed", "transformers"),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "two_ranks": NCCL if shares_gpu(nccl) else GLOO,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "machine.json").write_text(json.dumps(machine))
    ready = folder / "ready"
    if ready.exists() and ready.read_text() == code_digest():
        return 0
    make_inputs(folder, tiny)
    ready.write_text(code_digest())
    return 0


def make_inputs(folder: Path, tiny: bool) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from recipekit.architectures.shrink import shrink
    from recipekit.data.processors import byte_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    for name in MODELS:
        config = config_of(name)
        # With --tiny, the large models are replaced by a tiny Llama.
        if tiny and name not in DRAWN:
            config = shrink(config, MODELS["small"]["vocab_size"])
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))

    for name in DRAWN:
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / name))
        model.to(torch.bfloat16).save_pretrained(folder / name)
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    random = np.random.default_rng(0)
    lengths = random.lognormal(MEDIAN, SPREAD, 500 if tiny else 5000).astype(int)
    lengths = np.clip(lengths, SHORTEST, LONGEST)
    ids = pa.array([random.integers(0, 250, length, dtype=np.int32) for length in lengths])
    pq.write_table(pa.table({"input_ids": ids}), folder / "rows.parquet", row_group_size=1000)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as refusal:
        exit_with_error(refusal)
