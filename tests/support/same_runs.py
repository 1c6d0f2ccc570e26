"""Proves that a change of the code changes no run: a tiny run of each kind of a commit and of the
working tree, compared bit for bit.

    python tests/support/same_runs.py COMMIT [--folder FOLDER] [--cases sft,muon] [--rtol 1e-6] \\
        [--now "--attention sdpa --loss whole"] [--packages_before DIR] [--packages_now DIR]

Each run has 6 steps, with an evaluation and a checkpoint every 3 steps. The numbers of every step
(loss, grad_norm, lr, tokens or samples, eval_loss) must be equal. So must the digests of every
tensor in both checkpoints. Then the working tree resumes from the commit's checkpoint of step 3, in
a copy of the commit's run folder, and must reach the same end.

`--folder` keeps the runs, and reuses the commit's runs the next time. `--rtol` allows a relative
difference of the numbers, and does not compare digests. `--now` passes flags to the runs of the
working tree only, for example to set a new flag to the commit's behavior. `--packages_before` and
`--packages_now` put a folder of packages before the installed ones, for the commit's runs or for
the working tree's. Compare HEAD with itself in this way to judge another release of a library.
"""

import argparse
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pool import ROOT, environment, free_port, import_path
from recipekit.spec.run_folder import CHECKPOINTS, EXPORT, LATEST, read_metrics, reproducible_values
from recipekit.spec.step_names import step_folders, step_name

STEPS, SAVE_EVERY = 6, 3
LIMIT = 1200.0  # seconds for a run, also on a busy machine
CASES: dict[str, tuple[int, list[str]]] = {  # name -> ranks, recipe and flags
    "zero2_dp2": (2, ["qwen3_0_6b_zero2.py"]),
    "zero1_tp2_pp2": (4, ["llama3_1_70b_zero1_pp4_tp4.py", "--tp", "2", "--pp", "2"]),
    "zero3_sp2": (2, ["llama3_1_8b_zero3_sp8.py", "--sp", "2"]),
    "sft": (2, ["qwen3_0_6b_sft_zero2.py"]),
    "dpo_lora": (2, ["qwen3_0_6b_dpo_lora_zero2.py"]),
    "bert_lamb": (2, ["bert_large_mlm_lamb_zero1.py"]),
    "vit_tp2": (2, ["vit_h14_imagenet_zero1_tp2.py"]),
    "resnet_pp2": (2, ["resnet152_imagenet_zero1_pp4.py", "--pp", "2"]),
    "muon": (2, ["llama3_2_1b_muon_zero2.py"]),
    "onebit": (2, ["bert_large_mlm_onebit_zero0.py"]),
    "adafactor": (2, ["llama3_2_1b_adafactor_zero2.py"]),
    "ep2": (2, ["qwen3_30b_a3b_zero1_ep4.py", "--ep", "2"]),
    "ddp": (2, ["llama3_2_1b_ddp.py"]),
    "fsdp2": (2, ["llama3_2_1b_fsdp2.py"]),
    "zero3_cpu": (2, ["llama3_1_8b_zero3_cpu.py"]),
}
NUMBERS = [
    "--tiny",
    "--steps",
    STEPS,
    "--warmup_steps",
    2,
    "--save_every",
    SAVE_EVERY,
    "--eval_every",
    SAVE_EVERY,
    "--keep",
    STEPS,
]


def checked_out(commit: str, folder: Path) -> Path:
    """Extract the files of a commit into a separate folder."""
    if not folder.exists():
        packed = subprocess.run(
            ["git", "archive", commit], cwd=ROOT, capture_output=True, check=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
    return folder


def train(
    tree: Path, case: str, out: Path, more: Sequence[str] = (), packages: Path | None = None
) -> None:
    """Run a case with the code in `tree` and the flags `more`; continue a run if `out` contains
    one. `packages` is a folder that Python searches before the installed packages.
    """
    ranks, (recipe, *flags) = CASES[case]
    flags += more
    launcher = [
        str(Path(sys.executable).parent / "deepspeed"),
        "--num_gpus",
        str(ranks),
        "--master_port",
        str(free_port()),
    ]
    command = [
        *launcher,
        str(tree / "recipes" / recipe),
        *map(str, [*flags, *NUMBERS, "--out", out]),
    ]
    done = subprocess.run(
        command,
        cwd=out.parent,
        env=environment()
        | {"PYTHONPATH": import_path(*([packages.absolute()] if packages else []))},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if done.returncode:
        sys.exit(
            f"{case} with {tree} ended with exit code"
            f" {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        )


def facts(run: Path) -> dict[str, Any]:
    """Return the values that must be equal: the lines of metrics.jsonl, and digests of each
    checkpoint's tensors.
    """
    manifests = {
        folder.name: json.loads((folder / "manifest.json").read_text())
        for folder in step_folders(run / CHECKPOINTS)
    }
    return {
        "lines": reproducible_values(read_metrics(run)),
        "digests": {name: manifest["tensors"] for name, manifest in manifests.items()},
    }


def differences(before: dict[str, Any], after: dict[str, Any], rtol: float) -> list[str]:
    """Return the differences, one line each."""
    found = []
    if len(before["lines"]) != len(after["lines"]):
        found.append(f"{len(before['lines'])} steps, now {len(after['lines'])}")
    for was, now in zip(before["lines"], after["lines"], strict=False):
        unlike = [
            key
            for key in was.keys() | now.keys()
            if key not in was or key not in now or abs(was[key] - now[key]) > rtol * abs(was[key])
        ]
        found += [
            f"step {was['step']}: {key} {was.get(key)}, now {now.get(key)}"
            for key in sorted(unlike)
        ]
    if not rtol:
        for step, tensors in before["digests"].items():
            others = after["digests"].get(step, {})
            unlike = [
                name
                for name in tensors.keys() | others.keys()
                if tensors.get(name) != others.get(name)
            ]
            found += (
                [
                    f"{step}: {len(unlike)} of {len(tensors)} tensors differ, {min(unlike)} among"
                    " them"
                ]
                if unlike
                else []
            )
        if before["digests"].keys() != after["digests"].keys():
            found.append(
                f"checkpoints {', '.join(before['digests'])}, now {', '.join(after['digests'])}"
            )
    return found


def without_the_end(run: Path, folder: Path) -> Path:
    """Copy a run folder in its state after step 3 was saved and the process was killed."""
    shutil.copytree(run, folder)
    checkpoints = folder / CHECKPOINTS
    shutil.rmtree(checkpoints / step_name(STEPS))
    (checkpoints / LATEST).write_text(step_name(SAVE_EVERY))
    shutil.rmtree(folder / EXPORT, ignore_errors=True)
    return folder


def main() -> int:
    """Compare the runs, and return the exit code: 0 if nothing differs, 1 otherwise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("commit", help="what the working tree is compared with, for example HEAD~3")
    parser.add_argument(
        "--folder", type=Path, help="keep the runs there (default: a temporary folder)"
    )
    parser.add_argument(
        "--cases",
        default=",".join(CASES),
        help="names of cases, separated by commas (default: all)",
    )
    parser.add_argument(
        "--rtol",
        type=float,
        default=0.0,
        help="relative difference of the numbers that is let pass (default: none)",
    )
    parser.add_argument(
        "--now", default="", help="flags of the working tree's runs alone, in one word"
    )
    for side in ("before", "now"):
        parser.add_argument(
            f"--packages_{side}", type=Path, help="a folder before the installed packages"
        )
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", arguments.commit],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        before, after = folder / commit, folder / "now"
        shutil.rmtree(after, ignore_errors=True)
        after.mkdir(parents=True)
        tree = checked_out(commit, before / "tree")
        for case in arguments.cases.split(","):
            old = before / case
            if not (old / "done").exists():
                shutil.rmtree(old, ignore_errors=True)
                train(tree, case, old, packages=arguments.packages_before)
                (old / "done").touch()
            now = arguments.now.split(), arguments.packages_now
            train(ROOT, case, after / case, *now)
            resumed = without_the_end(old, after / f"{case}_resumed")
            train(ROOT, case, resumed, *now)
            for what, run in (("trained", after / case), ("resumed", resumed)):
                unlike = differences(facts(old), facts(run), arguments.rtol)
                print(f"{case}, {what}: {'differs' if unlike else 'the same'}", flush=True)
                found += [f"{case}, {what}: {line}" for line in unlike]
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
