"""Measure the speed and memory of the checkpoint converter, compared with cp and DeepSpeed's own
two converters.

    # prints Markdown; progress goes to stderr
    python tools/bench/bench_convert.py > tools/bench/bench_convert.md
    # needs about 20 GB in the folder while it runs
    python tools/bench/bench_convert.py --rounds 9 --folder /scratch/bench

The bench writes a ZeRO-2 checkpoint of 8 ranks once (4.3 GB, random numbers). Then every round
starts each command once, in random order, as a user would. It times the full process. The ratio is
the median over the rounds.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

from harness import (
    COLUMNS,
    ROOT,
    TRIAL,
    add_folder,
    add_json,
    exit_with_log,
    fold,
    folder_bytes,
    heading,
    load_average,
    parser_of,
    ratios,
    say,
    shuffled,
    software_and_machine,
)
from recipekit.spec.run_folder import CHECKPOINTS, LATEST
from recipekit.spec.step_names import step_name

MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
TITLES = {
    "cp": "`cp` of the step folder, fsync",
    "reshape": "**ours:** `reshape --zero 1 --dp 4`",
    "reshape_3d": "**ours:** `reshape --zero 1 --dp 2 --tp 2 --pp 2`",
    "universal": "`ds_to_universal.py`",
    "cp_fp32": "`cp` of the fp32 safetensors, fsync",
    "to_hf": "**ours:** `to-hf --dtype fp32`",
    "zero_to_fp32": "`zero_to_fp32.py`",
    "zero_to_fp32_safe": "`zero_to_fp32.py --safe_serialization`",
    "start": "**ours:** start-up only (`reshape --dry-run`)",
}
CP = {
    "reshape": "cp",
    "reshape_3d": "cp",
    "universal": "cp",
    "to_hf": "cp_fp32",
    "zero_to_fp32": "cp_fp32",
    "zero_to_fp32_safe": "cp_fp32",
}
ENOUGH_ROUNDS, ENOUGH_BYTES = 5, 4e9
SAMPLE = 0.05  # seconds between two samples of the memory
PAGE = os.sysconf("SC_PAGE_SIZE")
TOOL = [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py")]


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=ENOUGH_ROUNDS,
        metavar="N",
        help=(
            f"Number of starts of every command. A measurement needs at least {ENOUGH_ROUNDS}."
            " (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=TITLES,
        default=list(TITLES),
        metavar="ROW",
        help=f"Rows to measure: {', '.join(TITLES)}. (default: all)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=16,
        metavar="N",
        help="Layers of the model. Each adds 0.21 GB to the checkpoint. (default: %(default)s)",
    )
    add_folder(parser)
    add_json(parser)
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="Use a model of 0.1 M parameters, to test the bench itself.",
    )
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> int:
    arguments = arguments_of(sys.argv[1:])
    if arguments.make:
        make(
            arguments.make,
            TINY if arguments.tiny else MODEL | {"num_hidden_layers": arguments.layers},
        )
        return 0
    if arguments.rounds < 1:
        print(f"--rounds {arguments.rounds}: must be at least 1", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="bench_convert_", dir=arguments.folder) as folder:
        report = measure(Path(folder), arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    print(page(report), end="")
    return 0


def make(folder: Path, shape: dict[str, Any]) -> None:
    """Create a run folder `run` with a ZeRO-2 checkpoint of 8 ranks.

    Every byte of the tensors is written, because copying a hole in a file would cost no time.
    """
    from recipekit.checkpoints import step_folder
    from recipekit.convert.hugging_face import from_hf
    from recipekit.model.describe import published_blueprint
    from recipekit.parallel.blueprint import Layout, default_optimizer
    from recipekit.spec.mesh import Mesh

    save_zeros(folder / "hf", shape)
    blueprint = published_blueprint(folder / "hf")
    plain = Layout(Mesh(), 0, default_optimizer(0, "bfloat16"), "bfloat16")
    layout = step_folder.target_layout(
        blueprint, plain, step_folder.LayoutChange(dp=8, tp=1, pp=1, zero=2)
    )
    step = folder / "run" / CHECKPOINTS / step_name(0)
    from_hf(folder / "hf", step, blueprint, layout)
    shutil.rmtree(folder / "hf")

    fill(step, blueprint, layout, plain.states)
    for path in (step.parent / LATEST, step.parent.parent / LATEST):
        path.write_text(step.name)


def save_zeros(folder: Path, shape: dict[str, Any]) -> None:
    """Save a Llama whose weights are zero as Hugging Face files."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    with torch.device("meta"):
        shapes = {
            name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()
        }
    config.save_pretrained(folder)
    save_file(
        {name: torch.zeros(own, dtype=torch.bfloat16) for name, own in shapes.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def fill(step: Path, blueprint: Any, layout: Any, states: Iterable[str]) -> None:
    """Write random numbers into every tensor of a checkpoint, and update its manifest."""
    import numpy as np
    from recipekit.storage import copying, manifest, tensor_files

    files = tensor_files.open_checkpoint(step, blueprint, layout, writable=True)
    draw = np.random.default_rng(0)
    for tensor in blueprint.tensors:
        for role in ("master", *states):
            values = np.float32(0.02) * draw.standard_normal(tensor.numel, dtype=np.float32)
            bits = values.view(np.uint32)
            # The second moment must not be negative, so clear its sign bit.
            written = bits & np.uint32(0x7FFFFFFF) if role == "exp_avg_sq" else bits
            files.write(tensor, role, 0, written)
            if role == "master":
                files.write(tensor, "weight", 0, copying.cast(bits, "float32", layout.dtype))

    digests, _ = copying.run_copies(
        copying.plan_copies(blueprint, files, None), files, copying.Effort()
    )
    files.close()
    names = [name for name in manifest.read_manifest(step)["files"]]
    manifest.write_manifest(
        step, 0, {name: manifest.file_entry(step / name) for name in names}, digests
    )


# The measurement
# --------------------------------------------------------------------------------------------------


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    load = load_average()
    say(f"making a checkpoint in {folder}")
    size = ["--layers", arguments.layers, *(["--tiny"] if arguments.tiny else [])]
    run([sys.executable, __file__, "--make", folder, *size], folder / "log")

    step, fp32, out = folder / "run" / CHECKPOINTS / step_name(0), folder / "fp32", folder / "out"
    commands = commands_of(step, fp32, out)
    run([*TOOL, "to-hf", step, fp32, "--dtype", "fp32"], folder / "log")

    rows: dict[str, dict[str, Any]] = {
        row: {"seconds": [], "cpu": [], "resident": 0, "anonymous": 0}
        for row in TITLES
        if row in arguments.only
    }
    for number, order in enumerate(shuffled(list(rows), arguments.rounds), 1):
        for row in order:
            settle([fp32] if row == "cp_fp32" else [step])
            run_into(rows[row], commands[row], folder / "log", out)
        say(
            f"round {number} of {arguments.rounds}: "
            + ", ".join(f"{row} {rows[row]['seconds'][-1]:.1f} s" for row in rows)
        )

    memory = os.sysconf("SC_PHYS_PAGES") * PAGE / 2**30
    return software_and_machine("torch", "deepspeed", hardware=f"{memory:.0f} GiB") | {
        "load_before": load,
        "load_after": load_average(),
        "rounds": arguments.rounds,
        "checkpoint_bytes": folder_bytes(step),
        "rows": rows,
    }


def run_into(row: dict[str, Any], command: list[Any], log: Path, out: Path) -> None:
    """Run a command, add the measurements to its row, and remove the output."""
    seconds, cpu, resident, anonymous = run(command, log)
    row["seconds"].append(seconds)
    row["cpu"].append(cpu)
    row["bytes"] = folder_bytes(out)
    row["resident"] = max(row["resident"], resident)
    row["anonymous"] = max(row["anonymous"], anonymous)
    shutil.rmtree(out, ignore_errors=True)


def commands_of(step: Path, fp32: Path, out: Path) -> dict[str, list[Any]]:
    """Return the command of each row.

    The commands read the checkpoint `step` and write `out`. The row cp_fp32 reads the checkpoint's
    export `fp32` instead.
    """
    copied = "cp -r --reflink=never $0 $1 && find $1 -exec sync {} +"
    universal = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    to_fp32 = ["-m", "deepspeed.utils.zero_to_fp32", step.parent, out, "--tag", step.name]
    return {
        "cp": ["sh", "-c", copied, step, out],
        "reshape": [*TOOL, "reshape", step, out, "--zero", 1, "--dp", 4],
        "reshape_3d": [*TOOL, "reshape", step, out, "--zero", 1, "--dp", 2, "--tp", 2, "--pp", 2],
        "universal": [
            sys.executable,
            *universal,
            "--input_folder",
            step,
            "--output_folder",
            out / f"{step.name}_universal",
        ],
        "cp_fp32": ["sh", "-c", copied, fp32, out],
        "to_hf": [*TOOL, "to-hf", step, out, "--dtype", "fp32"],
        "zero_to_fp32": [sys.executable, *to_fp32],
        "zero_to_fp32_safe": [sys.executable, *to_fp32, "--safe_serialization"],
        "start": [*TOOL, "reshape", step, out, "--zero", 1, "--dp", 4, "--dry-run"],
    }


def settle(folders: list[Path]) -> None:
    """Flush all pending writes to the disk, and read the files in `folders` into memory."""
    os.sync()
    for folder in folders:
        subprocess.run(f"cat {folder}/*.* > /dev/null", shell=True, check=True)


def run(command: list[Any], log: Path) -> tuple[float, float, int, int]:
    """Run a command; return its seconds, CPU seconds, peak resident bytes and peak anonymous bytes.

    The values are sums over the process and its children.
    """
    own = {
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(ROOT / "recipes"), os.environ.get("PYTHONPATH", "")))
        ),
        "TOKENIZERS_PARALLELISM": "false",
    }
    peaks, ended = [0, 0], threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE):
            resident, anonymous = memory_of(process.pid)
            peaks[:] = max(peaks[0], resident), max(peaks[1], anonymous)

    with log.open("w") as output:
        began, worked = time.perf_counter(), cpu_seconds()
        process = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=subprocess.STDOUT, env=os.environ | own
        )
        watcher = threading.Thread(target=watch)
        watcher.start()
        code = process.wait()
        seconds = time.perf_counter() - began
        ended.set()
        watcher.join()
    if code:
        exit_with_log(command, code, log)
    return seconds, cpu_seconds() - worked, peaks[0], peaks[1]


def cpu_seconds() -> float:
    """Return the CPU seconds of all ended child processes and their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory_of(pid: int) -> tuple[int, int]:
    """Return the resident bytes of a process and its children, and how many of them are anonymous.

    Memory that two processes map counts twice.
    """
    try:
        resident, shared = (
            PAGE * int(pages) for pages in Path(f"/proc/{pid}/statm").read_text().split()[1:3]
        )
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):  # the process ended in between
        return 0, 0
    everyone = [(resident, resident - shared), *map(memory_of, children)]
    return sum(own for own, _ in everyone), sum(own for _, own in everyone)


# The page
# --------------------------------------------------------------------------------------------------


def relative_speed(report: dict[str, Any], row: str, beside: str) -> float:
    """Return a row's write speed relative to the row `beside`, as the median over the rounds.

    The speed is measured in bytes per second.
    """
    own, other = report["rows"][row], report["rows"][beside]
    return own["bytes"] / other["bytes"] * median(ratios(own["seconds"], other["seconds"]))


def verdicts(report: dict[str, Any]) -> list[str]:
    """Write each target with the result."""
    rows, lines = report["rows"], []

    def target(reached: bool, text: str) -> None:
        lines.extend(
            wrap(
                f"- {'reached' if reached else '**missed**'}: {text}",
                COLUMNS,
                subsequent_indent="  ",
                break_on_hyphens=False,
            )
        )

    for row in ("reshape", "reshape_3d", "to_hf"):
        if row in rows and CP[row] in rows:
            ratio = relative_speed(report, row, CP[row])
            target(
                ratio >= 0.8,
                f"{TITLES[row]} has {ratio:.0%} of `cp`'s speed for equal bytes (target: at least"
                " 80%)",
            )
    for row in ("zero_to_fp32", "zero_to_fp32_safe"):
        if row in rows and "to_hf" in rows:
            ratio = median(ratios(rows["to_hf"]["seconds"], rows[row]["seconds"]))
            target(
                ratio >= 1,
                f"{TITLES['to_hf']} takes {1 / ratio:.2f} of the time of {TITLES[row]} (target:"
                " never slower)",
            )
    for row in ("reshape", "reshape_3d"):
        if row in rows and "universal" in rows:
            ratio = median(ratios(rows[row]["seconds"], rows["universal"]["seconds"]))
            target(
                ratio >= 5,
                f"{TITLES[row]} is {ratio:.1f} times as fast as `ds_to_universal.py` (target: 5)",
            )
    ours = {row: own["resident"] for row, own in rows.items() if "ours" in TITLES[row]}
    if ours:
        target(
            max(ours.values()) < 1e9,
            f"ours took at most {max(ours.values()) / 1e9:.2f} GB resident (target: under 1 GB)",
        )
    return lines


def page(report: dict[str, Any]) -> str:
    """Write the result as Markdown."""
    lines = []
    for row, own in report["rows"].items():
        seconds = own["seconds"]
        beside = (
            f"{relative_speed(report, row, CP[row]):.0%}" if CP.get(row) in report["rows"] else ""
        )
        lines.append(
            f"| {TITLES[row]} | {own['bytes'] / 1e9:.2f} | {median(seconds):.2f}"
            f" ({min(seconds):.2f} to {max(seconds):.2f}) | {median(own['cpu']):.1f} |"
            f" {own['bytes'] / median(seconds) / 1e6:,.0f} | {beside} | {own['resident'] / 1e9:.2f}"
            f" | {own['anonymous'] / 1e9:.2f} |"
        )
    enough = report["rounds"] >= ENOUGH_ROUNDS and report["checkpoint_bytes"] >= ENOUGH_BYTES
    few = "" if enough else TRIAL
    return fold(f"""# How fast is the converter, compared with cp and DeepSpeed's converters?

{heading(report, "tools/bench/bench_convert.py")}; commit {report["commit"]}.

All commands read the same source, a ZeRO-2 bf16 checkpoint of 8 ranks with
    {report["checkpoint_bytes"] / 1e9:.2f} GB, from the page cache.
In each of {report["rounds"]} rounds, every command runs once, in random order. The seconds in the
    table are medians, with the range in parentheses.{few}

| command | GB written | seconds | CPU seconds | MB/s | of `cp`'s speed | GB resident | anonymous |
|---|---|---|---|---|---|---|---|
{chr(10).join(lines)}

{chr(10).join(verdicts(report))}

- **Time** is the time of the whole process, including imports. To see the cost of our imports, look
  at the row start-up; DeepSpeed's two converters import torch. Before each command, the bench
  flushes all pending writes and reads the source once, so that every command starts alike.
- **Work:** our commands and `cp` end only after fsync of every file. Our commands also check the
  digest of every tensor that they read, and write the sha256 of every file (except safetensors) and
  a digest of every tensor.
- **DeepSpeed's converters:** `zero_to_fp32.py` and `ds_to_universal.py` do none of this, so part of
  their output is still in memory when they end. The comparison does not correct for this.
- **Page cache:** our commands bypass it, so their output must later be read from the disk. The
  output of the other commands may still be in memory.
- **CPU seconds** are the CPU time of the process and its children. They include the kernel's own
  writing to the disk only if fsync does it.
- **Memory:** resident pages (anonymous and mapped files), summed over the process and its children.
  The figure is the maximum of all rounds, sampled every {1000 * SAMPLE:.0f} ms.
""")


if __name__ == "__main__":
    sys.exit(main())
