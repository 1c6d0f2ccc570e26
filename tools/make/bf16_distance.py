"""Compare bf16 runs with the bf16 models of transformers, for types with parameters in fp32.

    # all types with such parameters: writes their table in recipes/SUPPORT.md (minutes on 2 cores)
    python tools/make/bf16_distance.py
    # only these: print their rows, write no page
    python tools/make/bf16_distance.py --types flint hy_v4

A tiny model of each type trains 3 steps in three ways:

- in plain PyTorch in fp32
- as transformers' own bf16 model, which keeps some parameters in fp32
- in a bf16 run with ZeRO-1 on two ranks

The distance of a bf16 model is the root mean square of its logits minus the logits of the fp32
model, on the same tokens. The table contains the distance of the run divided by the distance of
transformers' model, before the first step and after the last one.
"""

import argparse
import copy
import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import support_matrix
from support_matrix import BATCHES, BF16_SECTION, CONFIG, ROOT, STEPS, TEXT

WORLD = 2
LARGEST = 1.1  # of the two numbers of a row
PAGE = ROOT / "recipes" / "SUPPORT.md"
BF16_CONFIG = CONFIG | {
    "bf16": {"enabled": True, "immediate_grad_update": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
    "zero_optimization": {"stage": 1},
    "train_batch_size": BATCHES,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": BATCHES // WORLD,
}


def number_kept(model_type: str) -> int:
    """Count the parameters of a type's tiny model that transformers keeps in fp32."""
    from recipekit.model.empty import empty_model
    from recipekit.model.fp32_parameters import fp32_names

    try:
        config = support_matrix.tiny_model_config(TEXT, model_type)
        return len(fp32_names(empty_model(config, "eager", model_type)))
    # A type without a row in the large table has its reason there.
    except Exception:
        return 0


def logits_of(model: Any, batches: list[dict[str, Any]]) -> Any:
    """Return the logits of all micro-batches, (BATCHES, T, V) fp32."""
    import torch

    with torch.no_grad():
        found = [
            model(
                input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
            ).logits.float()
            for batch in batches
        ]
    return torch.cat(found)


def train_with_masters(model: Any, trained: Any, batches: list[dict[str, Any]]) -> None:
    """Train a plain model, with fp32 master weights and fp32 sums of the gradients."""
    import torch
    from recipekit.tasks.find import load_task

    task = load_task(TEXT)
    counted = sum(int(task.count(batch).sum()) for batch in batches)
    pairs = {
        name: (weight, torch.nn.Parameter(weight.detach().float().clone()))
        for name, weight in model.named_parameters()
        if name in trained
    }
    optimizer = adamw({name: master for name, (_, master) in pairs.items()}, trained)
    for _ in range(STEPS):
        for batch in batches:
            loss = task.loss(task.forward(model, batch), batch, False) / counted
            loss.backward()
            for weight, master in pairs.values():
                gradient = torch.zeros_like(master) if weight.grad is None else weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                weight.grad = None
        torch.nn.utils.clip_grad_norm_(
            [master for _, master in pairs.values()], CONFIG["gradient_clipping"]
        )
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in pairs.values():
                weight.copy_(master)


def adamw(masters: dict[str, Any], trained: Any) -> Any:
    """Create torch's AdamW for master weights, with the numbers in the cells' JSON."""
    import torch

    numbers = CONFIG["optimizer"]["params"]
    groups = [
        {
            "params": [value for name, value in masters.items() if trained[name].decays == decays],
            "weight_decay": numbers["weight_decay"] * decays,
        }
        for decays in (True, False)
    ]
    return torch.optim.AdamW(
        groups, lr=numbers["lr"], betas=tuple(numbers["betas"]), eps=numbers["eps"]
    )


def plain_logits(model_type: str, folder: Path, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Save a type's model in `folder`, and train it in fp32 and as transformers' bf16 model.

    Return the logits of both models, before and after the training.
    """
    import torch

    config = support_matrix.tiny_model_config(TEXT, model_type)
    recipe = support_matrix.plain_recipe(TEXT, model_type, config)
    built = support_matrix.built_of(recipe, config, None, {})
    support_matrix.spread(built.model)
    built.model.save_pretrained(folder, save_original_format=False)
    # Some configs cannot be read back. Both readers get the config from this tool.
    (folder / "config.json").unlink()

    found: dict[str, Any] = {"attention": recipe.attention}
    for name, dtype in (("fp32", torch.float32), ("plain", torch.bfloat16)):
        model = type(built.model).from_pretrained(
            folder,
            config=copy.deepcopy(built.model.config),
            dtype=dtype,
            attn_implementation=recipe.attention,
        )
        model.train()
        first = logits_of(model, batches)
        train_with_masters(model, built.blueprint.trained, batches)
        found[name] = (first, logits_of(model, batches))
    return found


def run_logits(
    model_type: str, folder: Path, attention: str, batches: list[dict[str, Any]]
) -> tuple[Any, Any]:
    """Train a type's bf16 run, and return its logits before and after (a collective)."""
    import torch.distributed as dist
    from recipekit import Recipe
    from recipekit.engine.deepspeed_engine import make_deepspeed_engine
    from recipekit.parallel.groups import ProcessGroups
    from recipekit.runtime.step_metrics import StepCounters
    from recipekit.spec.mesh import make_mesh
    from recipekit.tasks.find import load_task
    from recipekit.train import train_step

    recipe = Recipe(
        model=str(folder),
        init="pretrained",
        attention=attention,
        loss="whole",
        micro_batch=1,
        global_batch=BATCHES,
        seq_len=support_matrix.SEQ_LEN,
    )
    mesh = make_mesh(WORLD)
    groups = ProcessGroups(mesh, "cpu")
    config = support_matrix.tiny_model_config(TEXT, model_type)
    built = support_matrix.built_of(recipe, config, groups, BF16_CONFIG)
    assert built.model_plan.fp32.names, f"{model_type} keeps nothing"
    engine: Any = make_deepspeed_engine(built, groups, BF16_CONFIG, _no_loss, "1f1b", print)

    first = logits_of(engine.module, batches)
    rows = BATCHES // WORLD
    own = batches[rows * dist.get_rank() : rows * (dist.get_rank() + 1)]
    for _ in range(STEPS):
        train_step(engine, load_task(TEXT), own, None, StepCounters(mesh))
    last = logits_of(engine.module, batches)
    engine.destroy()
    return first, last


def _no_loss(*_: object) -> Any:
    raise AssertionError("only a pipeline computes its loss inside the engine")


def ratio(found: dict[str, Any], run: tuple[Any, Any], when: int) -> float:
    """Return the distance of the run over the distance of transformers' bf16 model."""
    truth = found["fp32"][when]
    distances = [
        (logits - truth).square().mean().sqrt() for logits in (run[when], found["plain"][when])
    ]
    return (distances[0] / distances[1]).item()


def measure_type(
    model_type: str, folder: Path, batches: list[dict[str, Any]]
) -> list[float] | None:
    """Return a type's two numbers on the first rank, and None on the others (a collective)."""
    import torch.distributed as dist

    found: dict[str, Any] = {}
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = plain_logits(model_type, folder, batches)
            told = [found["attention"]]
        finally:
            dist.broadcast_object_list(told)
    else:
        dist.broadcast_object_list(told)
        if told[0] is None:
            raise RuntimeError("transformers' own model does not train")
    run = run_logits(model_type, folder, told[0], batches)
    return [ratio(found, run, when) for when in (0, 1)] if found else None


def measure_on_rank(rank: int, types: list[str], folder: str, port: int) -> None:
    """Measure the types on one of the ranks; the first rank writes `rows.json`."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from recipekit.compat.deepspeed import skip_shm_op_build
    from recipekit.runtime.start import quiet_library_logs

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    quiet_library_logs()
    skip_shm_op_build()
    deepspeed.init_distributed("gloo", verbose=False)

    rows = {}
    for model_type in types:
        batches = support_matrix.batches_of(TEXT, {}, 1)
        try:
            numbers = measure_type(model_type, Path(folder) / model_type, batches)
        # Any error in a model family is printed, and its row is left out.
        except Exception as error:
            print(f"{model_type}: {support_matrix.reason_of(error)}", flush=True)
        else:
            if numbers is not None:
                rows[model_type] = numbers
                print(f"{model_type}: {numbers[0]:.3f}, {numbers[1]:.3f}", flush=True)
                (Path(folder) / "rows.json").write_text(json.dumps(rows))
        dist.barrier()


def measure(types: list[str]) -> dict[str, list[float]]:
    """Return type -> the two numbers of its row."""
    from recipekit.hosts.ports import free_port

    with tempfile.TemporaryDirectory() as folder:
        context, port = multiprocessing.get_context("spawn"), free_port()
        ranks = [
            context.Process(target=measure_on_rank, args=(rank, types, folder, port))
            for rank in range(WORLD)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(1)
        return json.loads((Path(folder) / "rows.json").read_text())


def section(rows: dict[str, list[float]]) -> str:
    """Return the section of recipes/SUPPORT.md, which `support_matrix.write_pages` keeps."""
    text = (
        "Written by `python tools/make/bf16_distance.py`. transformers keeps these parameters"
        " (routers, attention sinks, hyper-connections) in fp32 in a bf16 model. So do DDP, FSDP2"
        " and ZeRO-0, 1 and 2 here. ZeRO-1 and 2 round their gradients to bf16 where they sum them,"
        " unless the JSON has `communication_data_type` fp32, as zero1.json has. Elsewhere a start"
        " and a dry run count them in one line. A tiny"
        f" model trains {STEPS} steps in fp32, as transformers' bf16 model, and in bf16 with ZeRO-1"
        f" on {WORLD} ranks. The last two columns are the distance of the run's logits to the fp32"
        " logits, divided by the distance of transformers' bf16 model."
    )
    lines = [
        BF16_SECTION,
        "",
        *support_matrix.paragraph(text),
        "",
        support_matrix.versions(),
        "",
        f"| type | parameters in fp32 | before step 1 | after step {STEPS} |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {number_kept(name)} | {first:.2f} | {last:.2f} |"
        for name, (first, last) in sorted(rows.items())
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", help="Model types. (default: all; writes the page)")
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    types = arguments.types or [name for name in support_matrix.model_types() if number_kept(name)]
    rows = measure(types)
    if not arguments.types:
        page = PAGE.read_text().partition(BF16_SECTION)[0].rstrip("\n")
        PAGE.write_text(f"{page}\n\n{section(rows)}")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    if any(max(numbers) > LARGEST for numbers in rows.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
