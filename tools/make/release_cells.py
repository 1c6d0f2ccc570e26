"""Train tiny models in each kind of layout and compare them with plain PyTorch, to judge the
installed transformers and torch.

    python tools/make/release_cells.py                                # all cells: half a minute
    python tools/make/release_cells.py --cells "dense tp2" "tied pp2"

`python tools/releases.py` runs this program with other releases. Each cell is a run of the shared
loop on two ranks (gloo, fp32), and is compared with plain PyTorch of the same release. Losses and
gradient norms must agree within 1e-5 relative. The update of each tensor must agree within 1e-3 of
its largest update. Plain PyTorch must also agree with release_cells.json, which the pinned releases
wrote. The second comparison finds a changed default, which changes both runs in the same way.

The config.json of each model states only its shape, so that all other values are defaults of the
release. AdamW has a large epsilon, so that an update is proportional to its gradient. With a small
one, a wrong factor of a gradient would hardly change the update. The recomputed cells use dropout.
"""

import argparse
import contextlib
import ctypes
import importlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from recipekit.spec.recipe import Recipe

    Tensors = dict[str, torch.Tensor]

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))
EXPECTED = Path(__file__).with_suffix(".json")
WORLD = 2
STEPS = 3
LOSS = 1e-5  # largest relative deviation of a loss or a gradient norm
UPDATE = 1e-3  # largest deviation of a tensor, as a fraction of its largest update
LIMIT = 90.0  # seconds for a cell, or for a model in plain PyTorch
PACKAGES = ("transformers", "torch", "deepspeed", "peft")
PRELOADED = (
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.original_muon",  # the first step imports it
    "matplotlib.figure",
    "recipekit.parallel.pipeline",
    "recipekit.train",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "qwen3_moe")),
)
SHAPE = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
DENSE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SHAPE}
DROPOUT = "dense with dropout"
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    DROPOUT: DENSE | {"attention_dropout": 0.1},
    "tied": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        **SHAPE,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "experts": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **SHAPE,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
}


@dataclass(frozen=True)
class Cell:
    """A model in a layout. `stage` is None for FSDP2; `degrees` contains tp, pp, sp or ep."""

    name: str
    model: str
    stage: int | None
    degrees: dict[str, int] = field(default_factory=dict)
    recompute: bool = False


CELLS = (
    Cell("dense zero3", "dense", 3),
    Cell("dense tp2", "dense", 1, {"tp": 2}),
    Cell("dense pp2", "dense", 1, {"pp": 2}),
    Cell("dense sp2", "dense", 1, {"sp": 2}),
    Cell("dense zero3, recomputed", DROPOUT, 3, recompute=True),
    Cell("dense fsdp2, recomputed", DROPOUT, None, recompute=True),
    Cell("tied tp2", "tied", 1, {"tp": 2}),
    Cell("tied pp2", "tied", 1, {"pp": 2}),
    Cell("experts zero3", "experts", 3),
    Cell("experts tp2", "experts", 1, {"tp": 2}),
    Cell("experts pp2", "experts", 1, {"pp": 2}),
    Cell("experts ep2", "experts", 1, {"ep": 2}),
)


@dataclass
class Verdict:
    """The result of a cell. `message` is empty if the cell agrees."""

    deviation: float = 0.0  # largest relative deviation of a loss or a gradient norm
    message: str = ""
    step: int = 0  # first step that differs; 0 if the cell agrees or raised an error
    tensor: str = ""


def recipe_of(cell: Cell, model: Path, out: Path) -> "Recipe":
    """Return a cell's recipe, with two micro-batches for each pipeline stage in a step."""
    from recipekit.spec.recipe import Recipe

    shared = WORLD if cell.degrees.keys() & {"tp", "sp"} else 1  # ranks that share their rows
    settings: dict[str, Any] = dict(cell.degrees)
    if cell.stage is None:
        settings |= {"engine": "fsdp2", "precision": "fp32", "ds_config": {}}
    else:
        settings["ds_config"] = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": cell.stage},
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        }
    return Recipe(
        model=str(model),
        tokenizer="bytes",
        token_cache="off",
        seq_len=64,
        global_batch=8,
        micro_batch=2 * shared,
        steps=STEPS,
        schedule="constant",
        lr=0.1,
        eps=0.1,
        weight_decay=0.0,
        activation_checkpointing=cell.recompute,
        wandb=False,
        seed=3,
        out=str(out),
        **settings,
    )


# Plain PyTorch
# --------------------------------------------------------------------------------------------------


def read_tensors(folder: Path) -> "Tensors":
    """Return the tensors of a folder's safetensors files: name -> values."""
    from safetensors.torch import load_file

    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def save_start(config: dict[str, Any], folder: Path) -> None:
    """Save a model's random weights in `folder`, with the same values for every release.

    The names of the values are names in the file, because a release may rename parameters.
    """
    import numpy
    import torch
    import transformers
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder)
    )
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))  # without the release's defaults

    drawn: Tensors = {}
    for name, value in read_tensors(folder).items():
        random = numpy.random.RandomState(zlib.crc32(name.encode()))
        values = torch.from_numpy(random.standard_normal(tuple(value.shape))).float()
        drawn[name] = 1 + 0.1 * values if value.ndim == 1 else 0.05 * values
    save_file(drawn, folder / "model.safetensors", {"format": "pt"})


def train_plain(name: str, folder: Path) -> dict[str, Any]:
    """Train a model in one process without recipekit's model code; return losses, norms and sizes.

    `folder` then contains the weights before and after, under the names in the files (start, end)
    and under the names of the parameters, as in an export.
    """
    import torch
    import transformers

    torch.set_num_threads(1)
    start = folder / "start"
    save_start(MODELS[name], start)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        start, attn_implementation="sdpa", dtype=torch.float32
    ).train()
    save_parameters(model, folder / "before")

    recipe = recipe_of(Cell(name, name, 0), start, folder / "run")
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.lr,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
        weight_decay=recipe.weight_decay,
    )
    losses, norms = train_steps(model, optimizer, recipe)

    save_parameters(model, folder / "after")
    model.save_pretrained(folder / "end")
    before, after = read_tensors(start), read_tensors(folder / "end")
    updates = {name: (after[name] - before[name]).norm().item() for name in sorted(after)}
    return {"losses": losses, "norms": norms, "updates": updates}


def train_steps(
    model: Any, optimizer: "torch.optim.Optimizer", recipe: "Recipe"
) -> tuple[list[float], list[float]]:
    """Train STEPS steps, and return the loss and the gradient norm of each.

    Dropout uses the random numbers of two ranks, and each rank reads half of the rows.
    """
    import torch
    from recipekit.data.batching import DataRank
    from recipekit.data.processors import load_tokenizer
    from recipekit.data.request import request_from_recipe
    from recipekit.data.stream import open_stream

    tokenizer = load_tokenizer(recipe.model, recipe.tokenizer)
    torch.manual_seed(recipe.seed)
    generators = [torch.get_rng_state()] * WORLD
    losses, norms = [], []
    with contextlib.closing(
        open_stream(request_from_recipe(recipe), tokenizer, rank=DataRank(1, 0))
    ) as stream:
        for _ in range(STEPS):
            batches, _ = next(stream)
            labels = sum(int((batch["labels"] != -100).sum()) for batch in batches)
            optimizer.zero_grad()
            total = 0.0
            for number, batch in enumerate(batches):
                rank = number * WORLD // len(batches)
                torch.set_rng_state(generators[rank])
                loss = summed_cross_entropy(model, batch) / labels
                loss.backward()
                generators[rank] = torch.get_rng_state()
                total += loss.item()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_clipping)
            optimizer.step()
            losses.append(total)
            norms.append(norm.item())
    return losses, norms


def save_parameters(model: Any, folder: Path) -> None:
    """Save the parameters under their own names, as an export of a run does."""
    from safetensors.torch import save_file

    folder.mkdir()
    values = {name: value.detach().clone() for name, value in model.named_parameters()}
    save_file(values, folder / "model.safetensors")


def summed_cross_entropy(model: Any, batch: "Tensors") -> "torch.Tensor":
    """Return the sum of -log p(label) over the positions that have a label, in fp32."""
    logits = model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
    ).logits.float()  # (B, T, V)
    labels = batch["labels"]  # (B, T)
    chosen = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)  # (B, T)
    return (logits.logsumexp(-1) - chosen)[labels != -100].sum()


# Verdicts
# --------------------------------------------------------------------------------------------------


def first_difference(
    found: dict[str, list[float]], expected: dict[str, list[float]]
) -> tuple[float, int, str]:
    """Return the largest relative deviation, and the first step that differs with its message.

    Both arguments have a value for each step. Step 0 and "" mean that all steps agree.
    """
    worst, step, message = 0.0, 0, ""
    for number in range(STEPS):
        for key, values in expected.items():
            if number >= len(found[key]):
                return 1.0, step or number + 1, message or f"only {number} steps"
            deviation = abs(found[key][number] / values[number] - 1)
            worst = max(worst, deviation)
            if not deviation <= LOSS and not step:
                step = number + 1
                message = f"{key} {found[key][number]:.7g} instead of {values[number]:.7g}"
    return worst, step, message


def judge_cell(plain: dict[str, Any], folder: Path, out: Path) -> Verdict:
    """Compare a finished run in `out` with plain PyTorch, whose weights `folder` contains."""
    from recipekit.spec.run_folder import EXPORT, read_metrics

    lines = read_metrics(out)
    found = {key: [line[key] for line in lines] for key in ("loss", "grad_norm")}
    worst, step, message = first_difference(
        found, {"loss": plain["losses"], "grad_norm": plain["norms"]}
    )
    before, expected = read_tensors(folder / "before"), read_tensors(folder / "after")
    exported = read_tensors(out / EXPORT)
    if lost := sorted(expected.keys() ^ exported.keys()):
        return Verdict(worst, message or "exports other tensors", step, lost[0])

    ratios = {}
    for name, value in expected.items():
        largest = max((value - before[name]).abs().max().item(), 1e-6)
        ratios[name] = number_or_inf((exported[name] - value).abs().max().item() / largest)
    tensor = max(ratios, key=lambda name: ratios[name])
    if not step and ratios[tensor] <= UPDATE:
        return Verdict(worst)
    update = f"its update differs by {ratios[tensor]:.1e}"
    return Verdict(worst, "; ".join(filter(None, [message, update])), step or STEPS, tensor)


def number_or_inf(ratio: float) -> float:
    """Return a ratio, or infinity if it is not a number, because `max` may skip NaN."""
    return math.inf if math.isnan(ratio) else ratio


def judge_plain(plain: dict[str, Any], expected: dict[str, Any]) -> Verdict:
    """Compare plain PyTorch with the values that the pinned releases recorded."""
    keys = {"loss": "losses", "grad_norm": "norms"}
    worst, step, message = first_difference(
        {key: plain[values] for key, values in keys.items()},
        {key: expected[values] for key, values in keys.items()},
    )
    updates = expected["updates"]
    if lost := sorted(updates.keys() ^ plain["updates"].keys()):
        return Verdict(worst, message or "its files have other tensors", step, lost[0])
    ratios = {
        name: number_or_inf(abs(plain["updates"][name] / updates[name] - 1)) for name in updates
    }
    tensor = max(ratios, key=lambda name: ratios[name])
    if not step and ratios[tensor] <= UPDATE:
        return Verdict(worst)
    update = f"its update differs by {ratios[tensor]:.1e}"
    changed = f"a default has changed: {'; '.join(filter(None, [message, update]))}"
    return Verdict(worst, changed, step or STEPS, tensor)


# Processes
# --------------------------------------------------------------------------------------------------


def train_cell(cell: Cell, model: Path, out: Path) -> int:
    """Train a cell as one rank, in the same way as a recipe's start, and return the exit code."""
    from recipekit.plan import resolve_run
    from recipekit.spec.command import parse
    from recipekit.train import main as train

    sys.argv = ["release_cells.py"]
    return train(resolve_run(parse(recipe_of(cell, model, out), Path("release_cells.py"), [])))


def _serve(
    connection: Connection, variables: dict[str, str], log: Path, work: Callable[[], Any]
) -> None:
    """Run `work` in a forked process and send its result, or the error in one line."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
    os.environ.update(variables)
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        connection.send((True, work()))
    except BaseException as error:  # the verdict of a cell names any error
        traceback.print_exc()
        connection.send((False, reason_of(error)))


def reason_of(error: BaseException) -> str:
    """Return an error in one line, with the function that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {said} (in {Path(frame.filename).stem}.{frame.name})"


@contextlib.contextmanager
def forked(works: list[Callable[[], Any]], folder: Path) -> Iterator[list[Any]]:
    """Run each function as a rank in a separate process, and yield their results.

    A result is (True, value) or (False, message). All processes are killed at the end. If a rank
    fails, the others have 5 seconds left, because they may wait for it.
    """
    from recipekit.hosts.ports import free_port

    folder.mkdir(parents=True, exist_ok=True)
    forks = multiprocessing.get_context("fork")
    port = str(free_port())
    waiting: dict[Connection, int] = {}
    processes = []
    for rank, work in enumerate(works):
        receiver, sender = forks.Pipe(duplex=False)
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(works)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        log = folder / f"rank{rank}.log"
        processes.append(forks.Process(target=_serve, args=(sender, variables, log, work)))
        processes[-1].start()
        sender.close()
        waiting[receiver] = rank

    results: list[Any] = [(False, f"did not end within {LIMIT:.0f} s")] * len(works)
    deadline = time.monotonic() + LIMIT
    try:
        while waiting and (left := deadline - time.monotonic()) > 0:
            for each in multiprocessing.connection.wait(list(waiting), left):
                assert isinstance(each, Connection)
                rank = waiting.pop(each)
                try:
                    results[rank] = each.recv()
                except EOFError:
                    results[rank] = (False, "the process died")
                if not results[rank][0]:
                    deadline = min(deadline, time.monotonic() + 5)
        yield results
    finally:
        for process in processes:
            process.kill()
            process.join()


def first_message(results: list[tuple[bool, Any]]) -> str:
    """Return the message of the first rank that failed by itself; "" if all ranks succeeded."""
    messages = [value for ok, value in results if not ok]
    own = [message for message in messages if not message.startswith("did not end")]
    return (own or messages or [""])[0]


def run_plain(names: list[str], folder: Path) -> dict[str, Any]:
    """Train each model in plain PyTorch, two at a time.

    Return for each name (True, values) or (False, message).
    """
    results: dict[str, Any] = {}
    for first in range(0, len(names), WORLD):
        some = names[first : first + WORLD]
        works = [lambda name=name: train_plain(name, folder / name) for name in some]
        with forked(works, folder / f"plain{first}") as answers:
            results |= dict(zip(some, answers, strict=True))
    return results


def run_cell(cell: Cell, plain: dict[str, Any], folder: Path, out: Path) -> Verdict:
    """Train a cell on two ranks and compare it with plain PyTorch."""
    work = lambda: train_cell(cell, folder / "start", out)  # noqa: E731 (a process runs it)
    with forked([work] * WORLD, out.parent) as results:
        message = first_message(results)
    if message:
        return Verdict(1.0, message)
    if any(code for _, code in results):
        return Verdict(1.0, f"ended with exit code {results[0][1]}")
    return judge_cell(plain, folder, out)


def run_cells(cells: list[Cell], folder: Path, record: bool) -> dict[str, Verdict]:
    """Run the cells and print a line for each; with `record`, write release_cells.json."""
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() and not record else {}
    found: dict[str, Verdict] = {}
    plain = run_plain(list(dict.fromkeys(cell.model for cell in cells)), folder)
    for name, (ok, values) in plain.items():
        if not ok:
            found[f"plain {name}"] = Verdict(1.0, values)
        elif name in expected:
            found[f"plain {name}"] = judge_plain(values, expected[name])
    for cell in cells:
        ok, values = plain[cell.model]
        if ok:
            out = folder / cell.name.replace(" ", "_") / "run"
            begun = time.monotonic()
            found[cell.name] = run_cell(cell, values, folder / cell.model, out)
            say(cell.name, found[cell.name], time.monotonic() - begun)
    if record:
        # Other processors draw other random numbers for dropout.
        kept = {name: values for name, (ok, values) in plain.items() if ok and name != DROPOUT}
        EXPECTED.write_text(json.dumps(kept, indent=1) + "\n")
    for name in found:
        if name.startswith("plain"):
            say(name, found[name], 0.0)
    return found


def say(name: str, verdict: Verdict, seconds: float) -> None:
    where = f"step {verdict.step}, {verdict.tensor}: " if verdict.step else ""
    told = f"{where}{verdict.message}" if verdict.message else f"{verdict.deviation:.1e}"
    print(f"{name:24} {told} ({seconds:.1f} s)", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the cells, and return 1 if a cell does not agree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [cell.name for cell in CELLS]
    parser.add_argument("--cells", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--results", type=Path, help="JSON file for the verdicts (default: none)")
    parser.add_argument(
        "--record", action="store_true", help=f"write {EXPECTED.name} from the installed releases"
    )
    arguments = parser.parse_args(argv)
    os.environ.update(
        {
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "offline",
            "TOKENIZERS_PARALLELISM": "false",
        }
    )
    begun = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="release_cells_"))
    try:
        for name in PRELOADED:
            importlib.import_module(name)
        chosen = [cell for cell in CELLS if cell.name in arguments.cells]
        found = run_cells(chosen, folder, arguments.record)
    except ImportError as error:
        found = {"import": Verdict(1.0, reason_of(error))}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.results:
        written = {
            "versions": {name: version(name) for name in PACKAGES},
            "seconds": time.monotonic() - begun,
            "cells": {name: vars(verdict) for name, verdict in found.items()},
        }
        arguments.results.write_text(json.dumps(written, indent=1))
    return int(any(verdict.message for verdict in found.values()))


if __name__ == "__main__":
    sys.exit(main())
