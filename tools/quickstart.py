"""Do the main job from end to end: train a small Llama with DeepSpeed, export it, and prove that
transformers agrees.

    make quickstart

The quickstart trains recipes/llama_nano_zero2.py with 2 processes on a CPU machine, one for each
GPU elsewhere, or `--ranks N`. It loads the exported Hugging Face files with plain transformers and
compares the loss on held-out text with the engine's loss. Then it prints a sample and draws
loss.png.
"""

import argparse
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

from recipekit.hosts.ports import launcher_port
from recipekit.spec.packages import require_packages
from recipekit.spec.paths import path_argument

RECIPE = ROOT / "recipes" / "llama_nano_zero2.py"
PROMPT, CONTINUATION = 60, 120  # tokens of a sample
# Relative tolerance. The engine and transformers use the same weights, but different batch shapes.
TOLERANCE = 2e-3


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--out",
        type=path_argument,
        default=Path("runs/quickstart"),
        metavar="FOLDER",
        help="Run folder. If it has a finished run, that run is used. (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=None,
        metavar="N",
        help="Number of optimizer steps. (default: the recipe's)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=None,
        metavar="N",
        help="Number of training processes. (default: one for each GPU, or 2 without GPUs)",
    )
    arguments = parser.parse_args()
    if arguments.ranks is not None and arguments.ranks < 1:
        parser.error(f"--ranks {arguments.ranks}: must be at least 1")
    return arguments


def main() -> int:
    arguments = read_arguments()
    began = time.perf_counter()
    require_packages()

    begun = phase(1, "train recipes/llama_nano_zero2.py with the deepspeed launcher")
    if not train(arguments):
        return 1
    ended(begun)

    begun = phase(
        2, "load the export with plain transformers and compare the loss on held-out text"
    )
    run = load_run(arguments.out)
    if not losses_agree(run):
        return 1
    ended(begun)

    begun = phase(3, "continue held-out text, as recipekit sample does")
    continue_excerpt(run.generator, run.rows)
    ended(begun)

    begun = phase(4, f"draw {arguments.out}/loss.png")
    draw(run.metrics, len(run.generator.tokenizer), arguments.out / "loss.png")
    ended(begun)

    print_result(run, arguments.out, time.perf_counter() - began)
    return 0


def train(arguments: argparse.Namespace) -> bool:
    """Train the recipe; if training failed, print a message on stderr and return False."""
    import torch

    deepspeed = shutil.which("deepspeed", path=str(Path(sys.executable).parent))
    if deepspeed is None:
        print(
            "the deepspeed command is not installed beside this Python. Run make setup",
            file=sys.stderr,
        )
        return False

    gpus = torch.cuda.device_count()
    port, note = launcher_port(os.environ)
    command = [
        deepspeed,
        "--master_port",
        str(port),
        *training(arguments.ranks or gpus or 2, arguments.out, arguments.steps),
    ]
    if not gpus and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        command += ["--deepspeed_config", str(strategy_in_fp32(arguments.out))]
        print(
            "  in fp32: this CPU has no instructions for bf16, which would take ten times as long",
            flush=True,
        )

    if note:
        print(f"  {note}")
    print("  " + " ".join(command), flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        print(f"training ended with exit code {code}. Its messages are above", file=sys.stderr)
    return code == 0


@dataclass(frozen=True)
class FinishedRun:
    """The contents of a finished run's folder."""

    metrics: list[dict[str, Any]]  # lines of metrics.jsonl
    generator: Any  # the exported model in plain transformers, with its tokenizer
    rows: list[Any]  # held-out batches


def load_run(out: Path) -> FinishedRun:
    """Load a run's metrics, its export, and its held-out rows."""
    from recipekit.architectures.export_folder import find_export
    from recipekit.commands.sample import load_generator
    from recipekit.data.batching import DataRank
    from recipekit.data.held_out import eval_rows
    from recipekit.data.request import request_from_recipe
    from recipekit.spec.recipe import Recipe
    from recipekit.spec.run_folder import RUN_JSON, read_metrics

    facts = json.loads((out / RUN_JSON).read_text())["recipe"]
    recipe = Recipe(
        **{name: value for name, value in facts.items() if name in Recipe.__dataclass_fields__}
    )
    metrics = read_metrics(out)
    generator = load_generator(find_export(out))
    rows = eval_rows(request_from_recipe(recipe), generator.tokenizer, rank=DataRank(1, 0))
    return FinishedRun(metrics, generator, rows)


def losses_agree(run: FinishedRun) -> bool:
    """Return True if plain transformers and the engine computed the same held-out loss."""
    engine_loss = run.metrics[-1]["eval_loss"]
    plain_loss = held_out_loss(run.generator.model, run.rows)
    print(f"  engine {engine_loss:.6f}, transformers {plain_loss:.6f}")
    if abs(plain_loss - engine_loss) > TOLERANCE * engine_loss:
        print(
            f"they differ by more than {TOLERANCE:g} relative: the export is not the model that was"
            " trained",
            file=sys.stderr,
        )
        return False
    return True


def print_result(run: FinishedRun, out: Path, seconds: float) -> None:
    """Print the decrease of the loss, and the files of the run."""
    from recipekit.spec.run_folder import CHECKPOINTS, EXPORT, METRICS, RUN_JSON, STRATEGY

    first, last = run.metrics[0]["loss"], run.metrics[-1]["loss"]
    uniform = math.log(len(run.generator.tokenizer))
    print(
        f"done in {seconds:.0f} s: loss {first:.3f} -> {last:.3f},"
        f" {last / uniform:.0%} of ln(vocabulary) = {uniform:.3f}"
    )

    names = (METRICS, RUN_JSON, STRATEGY, f"{CHECKPOINTS}/", f"{EXPORT}/", "loss.png")
    print("what the run left: " + ", ".join(str(out / name) for name in names))


def training(ranks: int, out: Path, steps: int | None) -> list[str]:
    """Return the words after `deepspeed` on the command line.

    If the ranks cannot share the global batch evenly, it is raised.
    """
    from recipekit.spec.command import recipe_of
    from recipekit.spec.mesh import fit_batch

    recipe = recipe_of(RECIPE)
    _, rows = fit_batch(ranks, recipe.micro_batch, recipe.global_batch, frozenset())
    batch = ["--global_batch", str(rows)] if rows != recipe.global_batch else []
    return [
        "--num_gpus",
        str(ranks),
        str(RECIPE),
        "--out",
        str(out),
        *batch,
        *(["--steps", str(steps)] if steps else []),
    ]


def strategy_in_fp32(out: Path) -> Path:
    """Write the recipe's DeepSpeed JSON without bf16 to the parent folder of `out`; return its
    path.
    """
    from recipekit.spec.command import recipe_of

    config = json.loads((ROOT / "ds_configs" / str(recipe_of(RECIPE).ds_config)).read_text())
    del config["data_types"]
    config["bf16"] = {"enabled": False}
    path = out.with_name(f"{out.name}_fp32.json").absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=2) + "\n")
    return path


def held_out_loss(model, rows) -> float:
    """Compute a plain transformers model's token-mean loss on a run's held-out rows."""
    import torch

    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch in rows:
            batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
            logits = model(
                input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
            ).logits.float()
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
            ).item()
            tokens += int((batch["labels"] != -100).sum())
    return total / tokens


def continue_excerpt(generator: Any, rows: list[Any]) -> None:
    """Print a prompt from held-out text, the model's continuation, and the original
    continuation.
    """
    import torch
    from recipekit.commands.sample import generate_sample, without_trailing_blanks

    torch.set_num_threads(1)  # one token at a time is too little work for several threads
    tokenizer = generator.tokenizer
    prompt, truth = excerpt(rows, tokenizer)
    sample = generate_sample(generator, prompt, len(truth))
    print(
        "  prompt, from held-out text:\n"
        + textwrap.indent(without_trailing_blanks(tokenizer.decode(prompt)), "    ")
        + "\n"
    )
    texts = (
        ("the model writes", sample.text),
        ("the text continues", without_trailing_blanks(tokenizer.decode(truth))),
    )
    print(textwrap.indent(side_by_side(*texts), "    ") + f"\n\n  {sample.stop_message}")


def excerpt(rows: list[Any], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return (prompt tokens, the tokens that follow the prompt) from one held-out document.

    The prompt starts at the beginning of a line if possible.
    """
    for batch in rows:
        for ids, positions in zip(
            batch["input_ids"].tolist(), batch["position_ids"].tolist(), strict=True
        ):
            bounds = [
                number for number, position in enumerate(positions) if number and position == 0
            ]
            for start, stop in itertools.pairwise([0, *bounds, len(ids)]):
                document = [
                    token for token in ids[start:stop] if token not in tokenizer.all_special_ids
                ]
                lines = (
                    number
                    for number, token in enumerate(document[:PROMPT], 1)
                    if "\n" in tokenizer.decode([token])
                )
                if len(document) >= 2 * PROMPT + CONTINUATION:
                    first = next(lines, 0)
                    middle = first + PROMPT
                    return document[first:middle], document[middle : middle + CONTINUATION]
    ids = rows[0]["input_ids"][0].tolist()
    return ids[: len(ids) // 2], ids[len(ids) // 2 :]


def side_by_side(left: tuple[str, str], right: tuple[str, str], width: int = 50) -> str:
    """Return two texts, each given as (title, text), in columns of `width` characters."""
    columns = [[title, "-" * len(title), *cut(text, width)] for title, text in (left, right)]
    rows = itertools.zip_longest(*columns, fillvalue="")
    return "\n".join(f"{one:<{width}} | {other}".rstrip() for one, other in rows)


def cut(text: str, width: int) -> list[str]:
    """Split a text into lines of at most `width` characters."""
    lines = text.expandtabs(4).split("\n")
    return [
        line[start : start + width]
        for line in lines
        for start in range(0, max(1, len(line)), width)
    ]


def draw(lines: list[dict], vocabulary: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot([line["step"] for line in lines], [line["loss"] for line in lines], label="training")
    evaluated = [line for line in lines if "eval_loss" in line]
    axes.plot(
        [line["step"] for line in evaluated],
        [line["eval_loss"] for line in evaluated],
        "o",
        label="held-out",
    )
    axes.axhline(math.log(vocabulary), color="grey", linestyle=":", label="ln(vocabulary)")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title="llama_nano_zero2")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def phase(number: int, what: str) -> float:
    print(f"[{number}/4] {what}", flush=True)
    return time.perf_counter()


def ended(begun: float) -> None:
    print(f"      took {time.perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
