"""Faults at random steps of a run: full and read-only disks, damaged files, kills, and a user's
files beside checkpoints.

    python tests/support/disk_faults.py --faults 200 [--seed N]

After each fault the same command, or the command that the run prints, must continue from the newest
complete checkpoint. The end must equal the unbroken run bit for bit, and every file of the user
must still be there. The disk is a small tmpfs. Each start is a fork of a process that has imported
everything: a fault takes seconds.
"""

import argparse
import collections
import contextlib
import hashlib
import importlib
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    folder
    for folder in (str(ROOT / "recipes"), str(ROOT / "tests" / "support"))
    if folder not in sys.path
]

from disks import fill, read_only, small_disk  # noqa: E402
from pool import FORKS, environment, free_port  # noqa: E402
from recipekit.spec.recipe import Recipe  # noqa: E402
from recipekit.spec.run_folder import read_metrics, reproducible_values  # noqa: E402
from recipekit.storage import manifest  # noqa: E402

STEPS, EVERY, KEEP = 9, 2, 2
PACE = 0.1  # seconds by which each step is delayed, so that a fault can occur during the step
LIMIT = 120.0  # seconds for a start
# seconds after which a launcher ends a dead rank's peers, and again before it kills them
NOTICED = 20.0
MOST_STARTS = 5  # after a fault
AGAIN = {75, 143, 137}  # exit codes after which the same command is repeated
RECIPE = Recipe(
    model="recipekit/llama-nano",
    init="random",
    tokenizer="bytes",
    ds_config="zero1.json",
    seq_len=64,
    micro_batch=1,
    global_batch=2,
    steps=STEPS,
    warmup_steps=2,
    save_every=EVERY,
    keep=KEEP,
    eval_every=0,
    wandb=False,
)


def rank_of_job(rank: int, world: int, port: int, argv: list[str], log: str) -> None:
    """Become one rank, as a launcher starts it; exit with the rank's exit code."""
    importlib.reload(importlib.import_module("dies_with_parent"))  # a fork loses it
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment())
    if world > 1:
        own = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        os.environ.update({name: str(value) for name, value in own.items()})
    sys.argv = ["drill.py", "--tiny", *argv]
    from recipekit import run, train

    step = train.train_step

    def paced(*arguments: Any, **more: Any) -> Any:
        time.sleep(PACE)
        return step(*arguments, **more)

    train.train_step = paced
    run(RECIPE)


class Start:
    """One start of the job."""

    def __init__(self, world: int, argv: list[str], log: Path):
        self.log, port = log, free_port()
        self.ranks = [
            FORKS.Process(target=rank_of_job, args=(rank, world, port, argv, str(log)), daemon=True)
            for rank in range(world)
        ]
        for rank in self.ranks:
            rank.start()

    @property
    def alive(self) -> bool:
        return any(rank.is_alive() for rank in self.ranks)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def signal(self, number: int, only: int | None = None) -> None:
        for rank in self.ranks if only is None else [self.ranks[only]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid or 0, number)

    def wait(self) -> int:
        """Return the first exit code other than 0, or 0 if there is no other; a signal is 128 + its
        number.
        """
        deadline = time.monotonic() + LIMIT
        died = 0.0
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.02)
            if not died and any(rank.exitcode for rank in self.ranks):
                died = time.monotonic()
            # Ranks that have not joined yet cannot notice a missing rank. Every launcher ends the
            # other ranks when one rank has died.
            if (
                died
                and time.monotonic() > died + NOTICED
                and not re.search(r"^step \d", self.output, re.MULTILINE)
            ):
                self.signal(signal.SIGTERM)
                for rank in self.ranks:
                    rank.join(NOTICED)
                self.signal(signal.SIGKILL)
        if self.alive:
            self.signal(signal.SIGABRT)
            time.sleep(1)
            self.signal(signal.SIGKILL)
            raise AssertionError(f"a start did not end in {LIMIT:g} s")
        codes = [rank.exitcode or 0 for rank in self.ranks]
        return next((128 - code if code < 0 else code for code in codes if code), 0)


@dataclass
class Run:
    """A run with faults. `users` contains (name, digest) for the files that the user put there."""

    disk: Path
    logs: Path
    world: int
    chance: random.Random
    background: bool
    users: set[tuple[str, str]] = field(default_factory=set)
    metrics_cut: bool = False
    starts: int = 0

    @property
    def out(self) -> Path:
        return self.disk / "run"

    @property
    def argv(self) -> list[str]:
        return [
            "--dataset",
            str(self.logs.parent / "text.txt"),
            "--out",
            str(self.out),
            "--save_in_background" if self.background else "--no-save_in_background",
        ]

    def start(self, *more: str) -> Start:
        self.starts += 1
        return Start(self.world, [*self.argv, *more], self.logs / f"start_{self.starts}.log")

    def steps(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        found = [
            path
            for path in (self.out / "checkpoints").glob("step_*")
            if re.fullmatch(r"step_\d{8}", path.name)
        ]
        return [step for step in sorted(found) if not manifest.find_faults(step)]

    def put(self, path: Path, content: bytes) -> None:
        """Write a file of the user."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self.own(path)

    def own(self, path: Path) -> None:
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file():
                self.users.add((file.name, hashlib.sha256(file.read_bytes()).hexdigest()))

    def wait_for(self, start: Start, step: int) -> None:
        """Return in the middle of a step, or when the start has ended."""
        deadline = time.monotonic() + LIMIT
        while start.alive and len(read_metrics(self.out)) < step and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(self.chance.uniform(0, 2 * PACE))


# Faults: each hits a running start at a random step, and returns when that start has ended
# -------------------------


def full(run: Run, start: Start) -> int:
    ballast = fill(run.disk)
    code = start.wait()
    ballast.unlink()
    return code


def full_for_a_moment(run: Run, start: Start) -> int:
    ballast = fill(run.disk)
    time.sleep(run.chance.uniform(0, 4 * PACE))
    ballast.unlink()
    return start.wait()


def read_only_to_the_end(run: Run, start: Start) -> int:
    with (
        read_only(run.out / "checkpoints")
        if (run.out / "checkpoints").is_dir()
        else contextlib.nullcontext()
    ):
        return start.wait()


def read_only_for_a_moment(run: Run, start: Start) -> int:
    with (
        read_only(run.out / "checkpoints")
        if (run.out / "checkpoints").is_dir()
        else contextlib.nullcontext()
    ):
        time.sleep(run.chance.uniform(0, 4 * PACE))
    return start.wait()


def killed(run: Run, start: Start) -> int:
    start.signal(signal.SIGKILL, only=run.chance.choice([None, *range(run.world)]))
    return start.wait()


def stopped(run: Run, start: Start) -> int:
    start.signal(
        run.chance.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]),
        only=run.chance.choice([None, *range(run.world)]),
    )
    return start.wait()


def stray_file(run: Run, start: Start) -> int:
    if steps := run.steps():
        step, name = (
            run.chance.choice(steps),
            run.chance.choice(
                [
                    ".nfs00a1",
                    ".DS_Store",
                    ".state.json.AbCdEf",
                    "mp_rank_07_model_states.pt",
                    "notes/why.txt",
                ]
            ),
        )
        with contextlib.suppress(OSError):  # the run has removed the folder
            run.put(step / name, run.chance.randbytes(200))
    run.put(run.out / "checkpoints" / "README", run.chance.randbytes(90))
    return killed(run, start)


def link(run: Run, start: Start) -> int:
    code, checkpoints = killed(run, start), run.out / "checkpoints"
    if steps := run.steps():
        kind = run.chance.choice(["best", "latest", "archive"])
        if kind == "best":
            (checkpoints / "best").symlink_to(steps[-1].name)
        elif kind == "latest":
            (checkpoints / "latest").unlink(missing_ok=True)
            (checkpoints / "latest").symlink_to(steps[-1].name)
        else:  # the oldest checkpoint was moved to a slower disk
            archive = run.disk / "archive" / steps[0].name
            archive.parent.mkdir(exist_ok=True)
            shutil.move(steps[0], archive)
            steps[0].symlink_to(archive)
            run.own(archive)
    return code


def copied(run: Run, start: Start) -> int:
    if steps := run.steps():
        step = run.chance.choice(steps)
        name = run.chance.choice(
            [
                f"{step.name}_best",
                "step_before_change",
                f"copy of {step.name}",
                step.name.replace("step_000", "step_"),
            ]
        )
        with contextlib.suppress(OSError, shutil.Error):  # the run has removed the folder meanwhile
            shutil.copytree(step, step.with_name(name))
            run.own(step.with_name(name))
    return killed(run, start)


def files_cut(run: Run, start: Start) -> int:
    """Damage files as a power failure does: they are truncated, or end in NUL bytes."""
    code = killed(run, start)
    for name in run.chance.sample(
        ["run.json", "data_files.json", "ds_config.json", "metrics.jsonl", "checkpoints/latest"], 2
    ):
        if (run.out / name).is_file():
            cut(run.chance, run.out / name)
            run.metrics_cut |= name == "metrics.jsonl"
    return code


def checkpoint_cut(run: Run, start: Start) -> int:
    code = killed(run, start)
    if len(steps := run.steps()) > 1:
        cut(
            run.chance,
            run.chance.choice(
                [
                    path
                    for path in steps[-1].rglob("*")
                    if path.stat().st_size > 0 and path.is_file()
                ]
            ),
        )
    return code


def cut(chance: random.Random, file: Path) -> None:
    content = file.read_bytes()
    place = chance.choice([0, chance.randrange(max(1, len(content)))])
    file.write_bytes(content[:place] + chance.choice([b"", bytes(len(content) - place)]))


FAULTS: tuple[Callable[[Run, Start], int], ...] = (
    full,
    full_for_a_moment,
    read_only_to_the_end,
    read_only_for_a_moment,
    killed,
    stopped,
    stray_file,
    link,
    copied,
    files_cut,
    checkpoint_cut,
)


def continued(run: Run, code: int) -> None:
    """Repeat the same command, or run the printed command, until the run has ended.

    Raise AssertionError if the run does not continue.
    """
    more: list[str] = []
    for _ in range(MOST_STARTS):
        if code == 0 and (run.out / "hf" / "model.safetensors").exists():
            return
        steps = run.steps()
        start = run.start(*more)
        code, more = start.wait(), []
        if resumed := re.findall(r"resumed from \S*?(step_\d+)", start.output):
            assert steps and resumed == [steps[-1].name], (
                f"resumed from {resumed}, not from {[step.name for step in steps]}"
            )
        elif code == 1:
            command = re.findall(
                r"--resume (?!never)\S+", start.output.replace(",", " ").replace("'", " ")
            )
            assert command or not steps, "refused without a command that continues"
            more = command[-1].split() if command else ["--resume", "never"]
        else:
            assert not steps or "nothing to do" in start.output, (
                f"started from scratch beside {[step.name for step in steps]}"
            )
    raise AssertionError(
        f"not at the end after {MOST_STARTS} starts; the last one ended with {code}"
    )


def check(run: Run, unbroken: tuple[bytes, list[dict[str, Any]]]) -> None:
    weights, lines = unbroken
    assert (run.out / "hf" / "model.safetensors").read_bytes() == weights, (
        "other weights than the unbroken run's"
    )
    found = {line["step"]: line for line in reproducible_values(read_metrics(run.out))}
    expected = {line["step"]: line for line in lines}
    assert found == {
        step: line for step, line in expected.items() if step in found or not run.metrics_cut
    }, "other metrics than the unbroken run's"
    there = {
        (path.name, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in run.disk.rglob("*")
        if path.is_file() and (path.name in dict(run.users))
    }
    assert run.users <= there, f"lost of the user: {sorted(name for name, _ in run.users - there)}"


def clear(disk: Path) -> None:
    for path in disk.iterdir():
        path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)


def drill(faults: int, seed: int, disk: Path, logs: Path) -> list[str]:
    """Return a message for each fault that the run did not survive."""
    unbroken, failed, kinds = {}, list[str](), collections.Counter[str]()
    logs.mkdir()
    (logs / "text.txt").write_text(
        "\n\n".join(
            " ".join(f"word{(row * column) % 97}" for column in range(80)) for row in range(400)
        )
    )
    for world in (1, 2):
        run = Run(disk, logs / f"unbroken_{world}", world, random.Random(seed), False)
        run.logs.mkdir()
        assert run.start().wait() == 0, (run.logs / "start_1.log").read_text()
        unbroken[world] = (
            (run.out / "hf" / "model.safetensors").read_bytes(),
            reproducible_values(read_metrics(run.out)),
        )
        clear(disk)
    for number in range(1, faults + 1):
        chance, began = random.Random(f"{seed} {number}"), time.monotonic()
        fault, step = FAULTS[(number - 1) % len(FAULTS)], chance.randrange(STEPS)
        run = Run(disk, logs / str(number), chance.choice([1, 2]), chance, chance.random() < 0.5)
        run.logs.mkdir()
        what = (
            f"fault {number}: {fault.__name__} at step {step}, {run.world}"
            f" ranks{', saves in the background' if run.background else ''}"
        )
        try:
            start = run.start()
            run.wait_for(start, step)
            continued(run, fault(run, start))
            check(run, unbroken[run.world])
            kinds[fault.__name__] += 1
            print(
                f"{what}: continued in {run.starts - 1} starts, {time.monotonic() - began:.1f} s",
                flush=True,
            )
        except Exception as error:
            tails = [
                f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
                for path in sorted(run.logs.glob("*.log"))
            ]
            tree = "\n".join(
                sorted(str(path.relative_to(disk)) for path in disk.glob("*/*"))
                + sorted(path.name for path in disk.glob("run/checkpoints/*"))
            )
            reason = error if isinstance(error, AssertionError) else traceback.format_exc()
            failed.append(f"{what}: {reason}\n" + "\n".join(tails) + f"\n--- files\n{tree}")
            print(f"FAILED {failed[-1]}", flush=True)
        clear(disk)
    print(
        f"{faults - len(failed)} of {faults} faults passed (seed {seed}): {dict(kinds)}", flush=True
    )
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(1 << 30),
        help="printed; the same seed gives the same faults",
    )
    arguments = parser.parse_args()
    os.environ.update(environment())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the disk is unmounted
    print(f"seed {arguments.seed}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="disk_faults_") as folder,
        small_disk(Path(folder, "disk"), "100m") as disk,
    ):
        return 1 if drill(arguments.faults, arguments.seed, disk, Path(folder, "logs")) else 0


if __name__ == "__main__":
    sys.exit(main())
