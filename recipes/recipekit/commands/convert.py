"""Convert checkpoints between Hugging Face files and any layout, bit for bit, in bounded memory.

    recipekit convert to-hf RUN_OR_STEP_DIR OUT_DIR [--dtype bf16] [--verify | --merge]
    recipekit convert from-hf HF_DIR OUT_DIR --zero 1 --tp 2 --pp 2 --dp 1
    recipekit convert reshape STEP_DIR OUT_DIR --tp 1 --pp 4 --dp 2 [--ep 1] [--zero 1]
    recipekit convert verify STEP_DIR
    recipekit convert inspect STEP_DIR

The output appears complete or not at all. To continue a conversion that was killed, repeat its
command. `python tools/convert_checkpoint.py` is the same command.
"""

import argparse
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ..checkpoints.reshape import reshape
from ..checkpoints.step_folder import LayoutChange, StepFolder, open_step, target_layout
from ..checkpoints.verify import verify
from ..convert import published
from ..convert.hugging_face import FolderChanges, from_hf, to_hf
from ..hosts.transformers_release import print_release_notes
from ..model.card import card_of_run
from ..parallel.blueprint import Blueprint, Layout, blueprint_in, default_optimizer
from ..spec.cores import usable_cores
from ..spec.errors import ConfigError, config_error
from ..spec.help_page import CommandFormatter
from ..spec.mesh import Mesh
from ..spec.paths import path_argument
from ..spec.run_folder import CHECKPOINTS
from ..storage import journal, manifest
from ..storage.copying import Effort
from ..storage.file_map import expected_bytes

DTYPE_BY_FLAG = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"} | {
    name: name for name in ("bfloat16", "float16", "float32")
}
DEGREE_HELP = {
    "dp": "Data-parallel degree of the output.",
    "tp": "Tensor-parallel degree of the output.",
    "pp": "Pipeline-parallel degree of the output.",
    "ep": "Expert-parallel degree of the output. It must divide dp.",
    "zero": "ZeRO stage of the output, 0 to 3.",
}
SOURCE_HELP = {
    "to-hf": "Run folder (its newest checkpoint) or step folder.",
    "from-hf": "Folder of Hugging Face files.",
}
OUT_HELP = "Folder to write."
SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def main(argv: list[str] | None = None, prog: str = "recipekit convert") -> int:
    """Run a command and return the exit code.

    The code is 0 if the command is done, 1 for an error in the input, and 2 for a wrong command
    line.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    arguments = make_convert_parser(prog).parse_args(argv)
    try:
        return arguments.run(arguments)
    except ConfigError as refusal:
        print(refusal, file=sys.stderr)
        return refusal.exit_code
    except OSError as error:
        where = Path(error.filename or arguments.out or arguments.source)
        free = shutil.disk_usage(existing_parent(where)).free
        kept = arguments.out and journal.journal_file(arguments.out).exists()
        again = (
            "Run the same command again to continue. Finished work is kept"
            if kept
            else "Run the same command again"
        )
        print(f"{where}: {error.strerror}. {free:,} bytes are free. {again}", file=sys.stderr)
        return 1


def add_degree_flags(parser: argparse.ArgumentParser, default: int | None) -> None:
    """Add the flags for the output's degrees, and --dry-run."""
    for name, about in DEGREE_HELP.items():
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"{about} (default: {default or 'as in the checkpoint'})",
        )
    parser.add_argument(
        "--dry-run",
        "--dry_run",
        action="store_true",
        help="Print the layout and the size of the output, and write nothing.",
    )


def make_convert_parser(prog: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog, description=__doc__, formatter_class=CommandFormatter, allow_abbrev=False
    )
    commands = made.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], about: str, *places: str
    ) -> argparse.ArgumentParser:
        one = commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            formatter_class=CommandFormatter,
            allow_abbrev=False,
        )
        for place in places:
            one.add_argument(
                place,
                type=path_argument,
                metavar=f"{place}_dir".upper(),
                help=OUT_HELP if place == "out" else SOURCE_HELP.get(name, "Step folder."),
            )
        one.add_argument(
            "--workers",
            type=int,
            default=usable_cores(),
            metavar="N",
            help="Number of worker threads. (default: %(default)s, the usable cores)",
        )
        one.add_argument(
            "--mem-limit",
            "--mem_limit",
            type=parse_size,
            default=parse_size("512M"),
            metavar="BYTES",
            help="Memory limit for buffers, for example 2G. At least 16M. (default: 512M)",
        )
        one.set_defaults(run=run, out=None)
        return one

    one = command(
        "to-hf", to_hf_command, "write Hugging Face files from a checkpoint", "source", "out"
    )
    one.add_argument(
        "--dtype",
        choices=sorted(DTYPE_BY_FLAG),
        help="Dtype of the written weights. (default: the dtype of the model's own files)",
    )
    one.add_argument(
        "--verify",
        action="store_true",
        help="Read the output again and compare it with the checkpoint.",
    )
    one.add_argument(
        "--merge",
        action="store_true",
        help="For a LoRA run: write the full model with the adapter merged into its weights.",
    )
    one.add_argument(
        "--dry-run",
        "--dry_run",
        action="store_true",
        help="Print the layout and the size of the output, and write nothing.",
    )
    one = command(
        "from-hf",
        from_hf_command,
        "write a checkpoint of step 0 from Hugging Face files, which --resume can start from",
        "source",
        "out",
    )
    add_degree_flags(one, 1)
    one.add_argument(
        "--dtype",
        choices=sorted(DTYPE_BY_FLAG),
        default="bf16",
        help="Training dtype of the output. (default: bf16)",
    )
    one = command(
        "reshape",
        reshape_command,
        "write a checkpoint in another layout, optimizer states included",
        "source",
        "out",
    )
    add_degree_flags(one, None)
    command(
        "verify",
        verify_command,
        "compare every file and every tensor with the manifest that the save wrote",
        "source",
    )
    command(
        "inspect", inspect_command, "print the layout and the tensors of a checkpoint", "source"
    )
    return made


def parse_size(text: str) -> int:
    """Return the number of bytes in a string such as 2G, 512M or 1GiB."""
    number = text.upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:] in "KMG" else ""
    try:
        size = int(float(number.removesuffix(unit)) * SIZE_UNITS[unit])
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size. Write for example 512M or 2G"
        ) from None
    if size < 2**24:
        raise argparse.ArgumentTypeError(f"{text!r} is too small. Give at least 16M")
    return size


class ProgressBar:
    """A progress bar on stderr, or one line per tenth if stderr is not a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.live = console.is_terminal
        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        ]
        self.progress = Progress(*columns, console=console, transient=True, disable=not self.live)
        self.task = self.progress.add_task("copying", total=None)
        self.done, self.tenths, self.lock = 0, 0, threading.Lock()

    def __call__(self, done: int, total: int) -> None:
        with self.lock:
            self.done += done
            if self.live:
                self.progress.update(self.task, advance=done, total=total)
            elif total > 2**28 and self.done * 10 // total > self.tenths:
                self.tenths = self.done * 10 // total
                print(f"{self.tenths * 10} % of {total / 2**30:.1f} GiB", file=sys.stderr)


def effort(arguments: argparse.Namespace, bar: ProgressBar) -> Effort:
    if arguments.workers < 1:
        raise config_error(
            f"--workers {arguments.workers}", "must be at least 1", "use --workers 2"
        )
    return Effort(arguments.workers, arguments.mem_limit, bar)


def existing_parent(path: Path) -> Path:
    """Return the path, or its nearest parent folder that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def check_disk_space(out: Path, required: int) -> None:
    """Raise `ConfigError` if the disk has too little space for the output.

    Call this function before anything is written.
    """
    free = shutil.disk_usage(existing_parent(out)).free
    if required > free:
        raise config_error(
            str(out),
            f"requires {required:,} bytes, but only {free:,} are free",
            "free space, or choose another folder",
        )


def open_step_and_warn(path: Path) -> StepFolder:
    """Open a step folder and report files in it that are not part of the checkpoint."""
    step = open_step(path)
    for line in manifest.unlisted_notice(step.folder, step.unlisted_files):
        print(line, file=sys.stderr)
    return step


def to_hf_command(arguments: argparse.Namespace) -> int:
    step = open_step_and_warn(arguments.source)
    dtype = DTYPE_BY_FLAG[arguments.dtype] if arguments.dtype else None
    if arguments.merge:
        return merge_adapter_command(arguments, step, dtype or step.state["export_dtype"])
    blueprint, contents = published.plan_published_files(step, dtype)
    nbytes = published.published_bytes(blueprint, contents)
    print(f"{step.folder}: step {step.state['step']}, {step.layout}")
    print(
        f"{len(contents)} file{'s' if len(contents) > 1 else ''}, {nbytes / 2**30:.3f} GiB,"
        f" {', '.join(sorted({own for keys in contents.values() for own in keys.values()}))}"
    )
    if extra := published.unused_file_keys(step.blueprint):
        count = f"{len(extra)} tensor{'s' if len(extra) > 1 else ''}"
        print(
            f"not written: {count} of the model's files that the model does not have and no"
            f" checkpoint holds: {', '.join(extra)}"
        )
    if arguments.dry_run:
        return 0
    check_disk_space(arguments.out, nbytes)
    bar = ProgressBar()
    with bar.progress:
        to_hf(
            step.folder,
            arguments.out,
            dtype,
            effort(arguments, bar),
            arguments.verify,
            card_of_step(step, merged=False),
        )
    print(
        f"wrote {arguments.out}"
        + (", compared with the checkpoint: equal" if arguments.verify else "")
    )
    return 0


def merge_adapter_command(arguments: argparse.Namespace, step: StepFolder, dtype: str) -> int:
    """Write the merged model of a checkpoint that contains an adapter."""
    print_release_notes()
    from ..convert.merge import empty_adapted_model, to_merged  # imports transformers and peft

    if arguments.verify:
        raise config_error(
            "--verify with --merge",
            "cannot be combined: merged weights are computed, so they have no copy to compare with",
            "use only one of them. --merge verifies the files that it reads",
        )
    empty_adapted_model(step)
    frozen = sum(tensor.numel for tensor in step.blueprint.tensors if tensor.group is None)
    nbytes = frozen * (4 if dtype == "float32" else 2)
    print(f"{step.folder}: step {step.state['step']}, {step.layout}")
    print(f"the whole model, its adapter merged: about {nbytes / 2**30:.3f} GiB, {dtype}")
    if arguments.dry_run:
        return 0
    check_disk_space(arguments.out, nbytes)
    bar = ProgressBar()
    with bar.progress:
        to_merged(
            step, arguments.out, dtype, effort(arguments, bar), card_of_step(step, merged=True)
        )
    print(f"wrote {arguments.out}")
    return 0


def card_of_step(step: StepFolder, merged: bool) -> str:
    """Return the model card for a checkpoint in its run folder.

    The result is "" for a step folder elsewhere, because its run is unknown.
    """
    checkpoints = step.folder.resolve().parent
    return (
        card_of_run(checkpoints.parent, step.state["step"], merged)
        if checkpoints.name == CHECKPOINTS
        else ""
    )


def requested_layout_change(arguments: argparse.Namespace) -> LayoutChange:
    return LayoutChange(**{name: getattr(arguments, name) for name in DEGREE_HELP})


def from_hf_command(arguments: argparse.Namespace) -> int:
    print_release_notes()
    # This imports transformers, which only this command and --merge need.
    from ..model.describe import published_model

    dtype = DTYPE_BY_FLAG[arguments.dtype]
    model = published_model(arguments.source)
    blueprint = model.blueprint
    for note in model.notes:
        print(note)
    start = Layout(Mesh(), 0, default_optimizer(0, dtype), dtype)
    layout = target_layout(blueprint, start, requested_layout_change(arguments), model.config)

    changes = FolderChanges(model.config, model.copies)

    def convert_to(own: Effort) -> None:
        return from_hf(arguments.source, arguments.out, blueprint, layout, own, changes)

    return run_conversion(arguments, blueprint, layout, convert_to)


def reshape_command(arguments: argparse.Namespace) -> int:
    step = open_step_and_warn(arguments.source)
    layout = target_layout(
        step.blueprint, step.layout, requested_layout_change(arguments), step.model_config
    )
    print(f"{step.folder}: step {step.state['step']}, {step.layout}")
    return run_conversion(
        arguments,
        blueprint_in(layout, step.blueprint),
        layout,
        lambda own: reshape(step.folder, arguments.out, layout, effort=own),
    )


def run_conversion(
    arguments: argparse.Namespace,
    blueprint: Blueprint,
    layout: Layout,
    convert: Callable[[Effort], None],
) -> int:
    nbytes = expected_bytes(blueprint, layout)
    print(
        f"to {layout}: {layout.mesh.world} rank{'s' if layout.mesh.world > 1 else ''},"
        f" {nbytes / 2**30:.3f} GiB"
    )
    if arguments.dry_run:
        return 0
    check_disk_space(arguments.out, nbytes)
    bar = ProgressBar()
    with bar.progress:
        convert(effort(arguments, bar))
    print(f"wrote {arguments.out}. Start it with --resume {arguments.out}")
    return 0


def verify_command(arguments: argparse.Namespace) -> int:
    if not arguments.source.is_dir():
        raise config_error(
            str(arguments.source),
            "is not a folder",
            "name a step folder, such as runs/NAME/checkpoints/step_00000010",
        )
    bar = ProgressBar()
    with bar.progress:
        faults = verify(arguments.source, effort(arguments, bar))
    for fault in faults:
        print(f"{arguments.source}: {fault}", file=sys.stderr)
    if not faults:
        for line in manifest.unlisted_notice(
            arguments.source,
            manifest.unlisted_files(arguments.source, manifest.read_manifest(arguments.source)),
        ):
            print(line, file=sys.stderr)
        print(f"{arguments.source}: every file and every tensor matches the manifest of the save")
    return 1 if faults else 0


def inspect_command(arguments: argparse.Namespace) -> int:
    step = open_step_and_warn(arguments.source)
    # Tasks with samples count unusable rows.
    unit = "samples" if "unusable" in step.state else "tokens"
    print(f"step     {step.state['step']}, {step.state['tokens']:,} {unit}")
    print(f"layout   {step.layout}")
    groups = {None: "frozen or a buffer"} | {
        number: group.name for number, group in enumerate(step.blueprint.groups)
    }
    for tensor in step.blueprint.tensors:
        cut = (
            f"dimension {tensor.cut[0]} is cut"
            + (f" in each of {tensor.cut[1]} blocks" if tensor.cut[1] > 1 else "")
            if tensor.cut
            else "whole"
        )
        cut += ", experts divided" if tensor.expert and step.layout.mesh.ep > 1 else ""
        roles = [key.split("|")[1] for key in step.tensors if key.split("|")[0] == tensor.name]
        place = f"layer {tensor.place}" if tensor.place.isdecimal() else f"{tensor.place} stage"
        print(
            f"{tensor.name}  {list(tensor.shape)}  {groups[tensor.group]}  {place}  {cut} "
            f" {' '.join(roles)}"
        )
    for alias, (name, _) in step.blueprint.aliases.items():
        print(f"{alias}  is {name}")
    return 0
