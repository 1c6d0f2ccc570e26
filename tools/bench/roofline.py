"""Predict the fastest possible training step on a device and its slowest operations, from a trace
of the recipe's code.

    # flags of the recipe may follow
    python tools/bench/roofline.py recipes/qwen3_0_6b_zero2.py --device H100-SXM
    # the three cases of bench_gpu.py
    python tools/bench/roofline.py > tools/bench/roofline.md

A micro-batch runs forward and backward through all layers of the recipe's model, on tensors without
memory. Every operation is recorded with its FLOPs and the bytes that it moves. The least time of an
operation is the longer of bytes / bandwidth and FLOPs / peak, from the device's data sheet.

Three ways are compared. "Before" is attention with a dense mask and a loss from full logits.
"After" is attention by documents and a chunked loss. "Compiled" is the same with element-wise
operations fused into one kernel (--compile). The tool needs no GPU.
"""

import contextlib
import json
import os
import runpy
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from textwrap import wrap
from typing import Any

from gpu_models import (
    LLAMA,
    LONGEST,
    LORA,
    LORA_FLAGS,
    MEDIAN,
    QWEN,
    SHORTEST,
    SPREAD,
    config_of,
)
from harness import COLUMNS, ROOT, flags, fold, parser_of, say, today
from recipekit import Recipe
from recipekit.plan import RunPlan, resolve_run
from recipekit.spec.command import parse
from recipekit.spec.devices import Device, find_device
from recipekit.spec.errors import ConfigError, config_error, exit_with_error
from recipekit.spec.task_specs import PACKED

LINEAR, ATTENTION, LOSS, LOOKED_UP = (
    "weights of the layers",
    "attention and its mask",
    "head and loss",
    "embedding",
)
ELEMENTS, UPDATE = "elementwise operations", "gradient sums and optimizer"
KINDS = (LINEAR, ATTENTION, LOSS, ELEMENTS, LOOKED_UP, UPDATE)
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


@dataclass(frozen=True)
class Way:
    """The choices of a run that a trace compares."""

    title: str
    attention: str
    loss: str
    fused: bool  # AdamW as one operation
    copies: bool  # gradients are copied to fp32 before they are added


WAYS = (Way("before", "sdpa", "whole", False, True), Way("after", "varlen", "chunked", True, False))


@dataclass(frozen=True)
class Traced:
    """The operations of a micro-batch, including its share of the optimizer."""

    operations: list[Any]  # op_costs.Operation
    kinds: list[str]  # of each
    tokens: int
    model_flops: float  # as for `mfu`

    def best(self, device: Device) -> float:
        """Return a micro-batch's minimum time in seconds."""
        return sum(seconds(operation, device) for operation in self.operations)


def seconds(operation: Any, device: Device) -> float:
    """Return an operation's minimum time in seconds.

    It is the longer of bytes / bandwidth and FLOPs / peak.
    """
    return max(operation.bytes / device.bandwidth, operation.flops / device.flops)


# The trace
# --------------------------------------------------------------------------------------------------


def trace(plan: RunPlan, way: Way) -> Traced:
    """Run one micro-batch of a plan's model forward and backward, and the optimizer's arithmetic.

    All tensors are without memory. Raise `ConfigError` if the model's FLOPs cannot be counted.
    """
    from op_costs import Costs
    from recipekit.model.flops import attended_keys, model_flops
    from torch._subclasses.fake_tensor import FakeTensorMode

    recipe = plan.recipe
    model = made(plan, way)
    flops = model_flops(model)
    if flops is None:
        raise config_error(
            f"model = {recipe.model}",
            "its FLOPs cannot be counted: a layer mixes tokens by something else than attention",
            "use another model",
        )

    batch = micro_batch(plan, way)
    pairs = dict(zip(flops.per_key, attended_keys([batch], flops.per_key), strict=True))
    fake, costs = FakeTensorMode(allow_non_fake_inputs=True), Costs(varlen_formulas(pairs))
    with fake:
        without_memory(model, fake, dtype_of(plan))
        tensors = {name: fake.from_tensor(tensor) for name, tensor in batch.items()}
        if way.loss == "chunked":
            losses_of_head(model, tensors["labels"])
        first = record(model, tensors, costs, plan, way)

    vocabulary = plan.model_config["vocab_size"] if plan.model_config else 0
    kinds = [
        UPDATE if number >= first else kind_of(operation, recipe.seq_len, vocabulary)
        for number, operation in enumerate(costs.found)
    ]
    tokens = recipe.micro_batch * recipe.seq_len
    return Traced(costs.found, kinds, tokens, flops.of_step(tokens, pairs.values()))


def dtype_of(plan: RunPlan) -> Any:
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[plan.precision]


def micro_batch(plan: RunPlan, way: Way) -> dict[str, Any]:
    """Create a micro-batch of packed documents, with the bounds that the attention reads."""
    import torch
    from recipekit.kernels.attention import VARLEN
    from recipekit.kernels.documents import as_attention_mask, cu_seqlens_of

    recipe = plan.recipe
    vocabulary = plan.model_config["vocab_size"] if plan.model_config else 2
    batch = documents(recipe.micro_batch, recipe.seq_len, vocabulary)
    if way.attention == VARLEN:
        batch["documents"] = as_attention_mask(
            cu_seqlens_of(batch["position_ids"]), torch.device("cpu")
        )
    return batch


def record(model: Any, tensors: dict[str, Any], costs: Any, plan: RunPlan, way: Way) -> int:
    """Record forward, backward and optimizer in `costs`; return the index of the optimizer's first
    operation.
    """
    from op_costs import BACKWARD, OPTIMIZER
    from recipekit.tasks.find import load_task

    task = load_task(plan.recipe.task)
    with costs:
        loss = task.loss(task.forward(model, tensors), tensors, False)
        costs.stage = BACKWARD
        loss.backward()

        costs.stage = OPTIMIZER
        first = len(costs.found)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        stage = plan.ds_config.get("zero_optimization", {}).get("stage", 0)
        add_gradients(trained, stage, way.copies)
        update(trained, way.fused, costs, plan.accumulation)
    return first


def made(plan: RunPlan, way: Way) -> Any:
    """Return a plan's model without weights, but with its adapter, attention and loss.

    Raise `ConfigError` for the chunked loss if the model changes its logits after the head.
    """
    from recipekit.model.empty import empty_model
    from recipekit.model.probes import operations_of

    recipe = plan.recipe
    assert plan.model_config is not None
    whole = empty_model(
        plan.model_config,
        way.attention,
        recipe.model,
        recipe.recompute,
        recipe.task_spec.auto_class,
    )
    if way.loss == "chunked" and (
        operations := operations_of(plan.model_config, recipe.task, recipe.model)
    ):
        raise config_error(
            f"model = {recipe.model}",
            f"does {operations[0]} to its logits, which is not traced",
            "use another model",
        )
    model = recipe.adapt(whole) if recipe.adapt else whole
    return model.train()


def losses_of_head(model: Any, labels: Any) -> None:
    """Let a model's head compute the losses of tokens, in place, as model/chunked_loss.py does.

    The function creates no tensor subclass, because FakeTensorMode (torch 2.13) cannot create one.
    """
    from recipekit.kernels.blocks import BLOCK_LOGITS
    from recipekit.kernels.cross_entropy import Head, token_losses

    head = model.get_output_embeddings()
    # The block size equals the size on an accelerator.
    head.forward = lambda hidden: token_losses(
        hidden, Head(head.weight, head.bias), labels, block=BLOCK_LOGITS
    )


def without_memory(model: Any, fake: Any, dtype: Any) -> None:
    """Replace a model's parameters by parameters of `dtype` without memory, in place.

    Tied parameters stay tied. Buffers keep their dtype, as in DeepSpeed's engine.
    """
    import torch

    new: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in new:
                    new[id(parameter)] = torch.nn.Parameter(
                        torch.empty(parameter.shape, dtype=dtype),
                        requires_grad=parameter.requires_grad,
                    )
                module._parameters[name] = new[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else fake.from_tensor(buffer)


def documents(rows: int, seq_len: int, vocabulary: int) -> dict[str, Any]:
    """Return a micro-batch of packed documents with random lengths, the same at every call.

    The micro-batch has three int64 tensors of shape (rows, seq_len).
    """
    import torch

    draw, places = torch.Generator().manual_seed(0), []
    for _ in range(rows):
        row: list[Any] = []
        while sum(map(len, row)) < seq_len:
            length = torch.exp(MEDIAN + SPREAD * torch.randn((), generator=draw))
            row.append(torch.arange(int(length.clamp(SHORTEST, LONGEST))))
        places.append(torch.cat(row)[:seq_len])
    ids = torch.randint(vocabulary, (rows, seq_len), generator=draw)
    return {"input_ids": ids, "position_ids": torch.stack(places), "labels": ids.roll(-1, 1)}


def varlen_formulas(pairs: dict[int, int]) -> dict[str, Callable[..., float]]:
    """Return the FLOPs of attention within documents.

    Each (token, key) pair that causality, windows and documents allow takes part in two products in
    the forward pass and five in the backward pass. `pairs` maps each window to the number of these
    pairs in a micro-batch. Heads that the kernel pads to a multiple of 8 count with their padding.
    """

    def products(number: int, query: Any, window: int) -> float:
        return 2.0 * number * query.shape[1] * query.shape[2] * pairs[window]  # (tokens, heads, d)

    def forward(args: Any, kwargs: Any, result: Any) -> float:
        return products(2, args[0], args[5])

    def backward(args: Any, kwargs: Any, result: Any) -> float:
        return products(5, args[1], args[8])

    return {
        "recipekit.attention_by_document": forward,
        "recipekit.attention_by_document_backward": backward,
    }


def add_gradients(trained: list[Any], stage: int, copies: bool) -> None:
    """Run the operations that add a micro-batch's gradients to their fp32 sums, for the trace.

    They are written down here as DeepSpeed 0.19.8 runs them on one rank. ZeRO-1 adds each gradient
    to its sum (bf16_optimizer.py). ZeRO-2 and -3 first copy it into a bucket, divide the bucket by
    the number of ranks, and flatten it; later they copy the result back (zero/stage_1_and_2.py).
    With `copies`, a gradient is converted to fp32 before it is added, as DeepSpeed does by itself.
    A bf16 gradient then moves 18 bytes a parameter under ZeRO-1 and 34 under ZeRO-2, and 8 less
    without the conversion.
    """
    import torch

    for parameter in trained:
        sums, grad = torch.empty(parameter.shape, dtype=torch.float32), parameter.grad
        if stage >= 2:
            bucket = torch.empty_like(grad)
            bucket.copy_(grad)
            bucket.div_(2.0)
            flat = torch.empty_like(grad)
            flat.copy_(bucket)
            bucket.copy_(flat)
        sums.add_(grad.to(torch.float32) if copies else grad)


def update(trained: list[Any], fused: bool, costs: Any, accumulation: int) -> None:
    """Run the optimizer's operations of one step, for the trace.

    Each `accumulation`-th micro-batch is followed by a step, so a micro-batch has this share of its
    costs. The operations are written down here, because DeepSpeed's engine is not traced. In
    DeepSpeed 0.19.8, ZeRO-1 and ZeRO-2 run them on one rank (stage_1_and_2.py): the norm, clipping,
    AdamW on fp32 copies, and the copy to the parameters.
    """
    import torch

    flat = [torch.empty(sum(parameter.numel() for parameter in trained), dtype=torch.float32)]
    sums, half = torch.empty_like(flat[0]), torch.empty_like(flat[0], dtype=trained[0].dtype)
    first = len(costs.found)
    torch.linalg.vector_norm(sums)
    sums.mul_(0.5)
    master = torch.nn.Parameter(flat[0])
    master.grad = sums
    optimizer = torch.optim.AdamW([master], foreach=not fused, fused=fused)
    with costs_off(costs):
        optimizer.state[master] = {
            "step": torch.tensor(1.0) if not fused else torch.ones(()),
            "exp_avg": torch.empty_like(master.data),
            "exp_avg_sq": torch.empty_like(master.data),
        }
    optimizer.step()
    half.copy_(master.data)
    sums.zero_()
    costs.found[first:] = [
        replace(
            operation,
            bytes=round(operation.bytes / accumulation),
            flops=operation.flops / accumulation,
        )
        for operation in costs.found[first:]
    ]


@contextlib.contextmanager
def costs_off(costs: Any) -> Iterator[None]:
    """Exclude the operations within the `with` block from the list."""
    known = len(costs.found)
    yield
    del costs.found[known:]


def kind_of(operation: Any, seq_len: int, vocabulary: int) -> str:
    """Return the part of the model that an operation belongs to.

    The operation's name, its tensor shapes and its callers decide.
    """
    name, where = operation.name.partition(".")[2], operation.where
    if "attention" in name or "attn" in name or {"masking_utils.py", "repeat_kv"} & where:
        return ATTENTION
    if any(
        len(shape) == 5 or (len(shape) == 4 and shape[-2:] == (seq_len, seq_len))
        for shape in operation.shapes
    ):
        return ATTENTION  # repeated key-value heads in the backward pass; masks and scores
    if name.startswith("embedding"):
        return LOOKED_UP
    if "cross_entropy.py" in where or any(vocabulary in shape for shape in operation.shapes):
        return LOSS
    return LINEAR if name in PRODUCTS else ELEMENTS


# The page
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A run whose roofline is computed."""

    title: str
    recipe: str
    model: str  # of MODELS; "": the recipe's model
    flags: tuple[str, ...]
    goal: str = ""  # on an H200, whose FLOPs are equal and whose memory is faster


def cases() -> list[Case]:
    """Return the runs of bench_gpu.py that have performance goals, with the flags of their rows."""

    def shape(seq_len: int, micro: int, rows: int) -> tuple[str, ...]:
        return tuple(flags({"seq_len": seq_len, "micro_batch": micro, "global_batch": rows}))

    return [
        Case("1.3B, all weights, rows of 2048", QWEN, "1b", shape(2048, 8, 64), "55 % MFU"),
        Case(
            "3B, all weights, rows of 4096, activation checkpointing",
            QWEN,
            "3b",
            (*shape(4096, 2, 16), "--recompute_every", "1"),
            "50 % MFU",
        ),
        Case(
            "Llama 3.1 8B, LoRA, rows of 4096",
            LORA,
            "8b",
            (*shape(4096, 2, 16), *LORA_FLAGS),
            "15,000 tokens/s",
        ),
    ]


def plan_of(case: Case, folder: Path) -> RunPlan:
    """Return a case's plan, as the case's command would compute it.

    Write the config.json of a bench_gpu.py model to `folder`. Raise `ConfigError` for an invalid
    plan.
    """
    path, words = ROOT / case.recipe, list(case.flags)
    if case.model:
        (folder / case.model).mkdir(exist_ok=True)
        (folder / case.model / "config.json").write_text(json.dumps(config_of(case.model)))
        words += ["--model", str(folder / case.model), "--tokenizer", LLAMA]
    if "--init" not in words:
        words += ["--init", "random"]  # reads no weights
    recipe = runpy.run_path(str(path), run_name="roofline").get("RECIPE")
    if not isinstance(recipe, Recipe):
        raise config_error(case.recipe, "has no RECIPE", "name a file of recipes/")
    plan = resolve_run(parse(recipe, path, words))
    degrees = {
        axis: getattr(plan.mesh, axis)
        for axis in ("tp", "pp", "sp", "ep")
        if getattr(plan.mesh, axis) > 1
    }
    if degrees or plan.recipe.task_spec.rows != PACKED:
        what = (
            " ".join(f"--{axis} {degree}" for axis, degree in degrees.items())
            or f"task = {plan.recipe.task}"
        )
        raise config_error(
            what,
            "is not traced: one rank that trains on packed tokens is",
            "use --tp 1 --pp 1 --sp 1 --ep 1, or another recipe",
        )
    if plan.model_config is None:
        raise config_error(
            f"model = {plan.recipe.model}",
            "is neither shipped nor on this machine",
            "give its folder with --model",
        )
    return plan


def summed(traced: Traced, device: Device) -> dict[str, tuple[float, float, float]]:
    """Return the sums for each kind: (bytes, FLOPs, minimum seconds)."""
    found: dict[str, tuple[float, float, float]] = {kind: (0.0, 0.0, 0.0) for kind in KINDS}
    for operation, kind in zip(traced.operations, traced.kinds, strict=True):
        moved, flops, least = found[kind]
        found[kind] = (
            moved + operation.bytes,
            flops + operation.flops,
            least + seconds(operation, device),
        )
    return found


def holding_back(traced: Traced, device: Device) -> list[tuple[str, float]]:
    """Return the operations that exceed their FLOP time at peak speed, with the excess seconds.

    The operation with the largest excess comes first.
    """
    lost: defaultdict[str, float] = defaultdict(float)
    for operation, kind in zip(traced.operations, traced.kinds, strict=True):
        lost[f"{operation.name} of {kind}"] += (
            seconds(operation, device) - operation.flops / device.flops
        )
    return sorted(lost.items(), key=lambda item: -item[1])


def worst_kind(traced: Traced, device: Device) -> tuple[str, float]:
    """Return the kind that most exceeds its FLOP time at peak speed, and its share of the minimum
    time.
    """
    lost = {
        kind: least - flops / device.flops
        for kind, (_, flops, least) in summed(traced, device).items()
    }
    kind = max(lost, key=lambda kind: lost[kind])
    return kind, summed(traced, device)[kind][2] / traced.best(device)


def table(traced: dict[str, Traced], device: Device) -> str:
    """Write the bytes, FLOPs, minimum times and bounds of a case's ways, by kind."""
    sums = {title: summed(one, device) for title, one in traced.items()}
    lines = [
        "| | " + " | ".join(f"{title}: GB | TFLOP | least ms" for title in traced) + " |",
        "|---|" + "---|" * 3 * len(traced),
    ]
    for kind in KINDS:
        lines.append(f"| {kind} | {' | '.join(cell(found[kind]) for found in sums.values())} |")

    whole = [
        [sum(values) for values in zip(*found.values(), strict=True)] for found in sums.values()
    ]
    lines.append(f"| **a micro-batch** | {' | '.join(cell(found) for found in whole)} |")

    bounds = []
    for title, one in traced.items():
        text = upper_bound(title, one, device)
        bounds += wrap(text, COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(["", *lines, "", *bounds])


def cell(found: Sequence[float]) -> str:
    """Write (bytes, FLOPs, minimum seconds) as three cells."""
    moved, flops, least = found
    return f"{moved / 1e9:.1f} | {flops / 1e12:.2f} | {1e3 * least:.1f}"


def upper_bound(title: str, traced: Traced, device: Device) -> str:
    """Write the maximum speed of a way, and what limits it."""
    best, worst = traced.best(device), worst_kind(traced, device)
    alone = sum(operation.flops for operation in traced.operations) / device.flops
    lost = [f"{name} {1e3 * took:.1f} ms" for name, took in holding_back(traced, device)[:4]]

    mfu = traced.model_flops / best / device.flops
    reached = f"at most {traced.tokens / best:,.0f} tokens/s, MFU {mfu:.1%}"
    text = (
        f"- **{title}: {reached}**. If bytes took no time:"
        f" {traced.model_flops / alone / device.flops:.1%}. Main limit: {worst[0]},"
        f" {worst[1]:.0%} of the time."
        f" Most time beyond FLOPs at the peak: {', '.join(lost[:2])}."
    )
    return text + (f" Next: {', '.join(lost[2:])}." if lost[2:] else "")


def traced_ways(plan: RunPlan) -> dict[str, Traced]:
    found = {way.title: trace(plan, way) for way in WAYS}
    return found | {"compiled": compiled(found[WAYS[-1].title])}


def compiled(traced: Traced) -> Traced:
    """Return the trace with consecutive element-wise operations fused into one kernel."""
    from op_costs import fused

    pairs = zip(traced.operations, traced.kinds, strict=True)
    runs = [
        (
            kind
            if kind in (ELEMENTS, LOSS) and operation.name.partition(".")[2] not in PRODUCTS
            else ""
        )
        for operation, kind in pairs
    ]
    found = fused(traced.operations, runs)
    return replace(
        traced,
        operations=[operation for _, operation in found],
        kinds=[traced.kinds[place] for place, _ in found],
    )


def main(argv: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument(
        "recipe",
        nargs="?",
        default="",
        metavar="RECIPE",
        help=(
            "Recipe file. Flags of the recipe may follow. (default: the cases of bench_gpu.py,"
            " printed as a page)"
        ),
    )
    parser.add_argument(
        "--device",
        default="H100-SXM",
        metavar="NAME",
        help="Device to predict for, as named in spec/devices.py. (default: %(default)s)",
    )
    arguments, rest = parser.parse_known_args(argv)
    if rest and not arguments.recipe:
        parser.error(f"{rest[0]}: flags follow a recipe")
    name, device = find_device(arguments.device)
    path = os.path.relpath(Path(arguments.recipe).resolve(), ROOT) if arguments.recipe else ""
    wanted = [Case(path, path, "", tuple(rest))] if path else cases()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for case in wanted:
            plan = plan_of(case, Path(folder))
            say(f"traces {case.title}")
            goal = f" The goal is {case.goal}." if case.goal else ""
            shape = (
                f"{plan.recipe.micro_batch} rows of {plan.recipe.seq_len} tokens, {plan.precision},"
                f" {plan.accumulation} micro-batches a step.{goal}"
            )
            found.append(f"## {case.title}\n\n{shape}\n{table(traced_ways(plan), device)}\n")
    print(page(name, device, found))
    return 0


def page(name: str, device: Device, found: list[str]) -> str:
    versions = ", ".join(
        f"{package} {version(package).partition('+')[0]}" for package in ("torch", "transformers")
    )
    return fold(f"""# How fast can a step be at most, and what limits it?

Computed by `python tools/bench/roofline.py` on {today()} ({versions}), not measured.
It is an upper bound for {name}, with {device.flops / 1e12:g} TFLOP/s of dense bf16 and
    {device.bandwidth / 1e12:g} TB/s on its data sheet.

{chr(10).join(found)}
{WORDS}""")


WORDS = fold("""## How it is computed

- **Trace:** to list the operations of a step, one micro-batch runs forward and backward through all
  layers of the recipe's own model, on tensors without memory. Layers are recomputed if the recipe
  says so. The tool then adds the operations of the gradient sums and the optimizer. They are
  listed in the tool as DeepSpeed's ZeRO-1 and -2 perform them on one rank. The optimizer's cost is
  divided by the micro-batches of a step.
- **Least time:** an operation takes at least the longer of two times: its bytes at the peak
  bandwidth, and its FLOPs at the peak speed. The bound assumes that operations do not overlap. Both
  peaks are from the data sheet, and no kernel reaches them: large matrix products reach 75 to 80 %
  of the peak.
- **Before** uses attention with a dense mask, which computes all pairs of tokens and repeats the
  key-value heads, and computes the loss from full logits.
- **After** uses attention by documents (random lengths, median 545), chunked loss, fused AdamW, and
  sums of gradients without an fp32 copy.
- **Gradient sums:** DeepSpeed moves 34 bytes for each parameter and micro-batch under ZeRO-2, and
  18 under ZeRO-1. The recipes leave out an fp32 copy of 8 bytes. The cases above use ZeRO-2.
- **Compiled** is like after, except that consecutive elementwise operations are fused into one
  kernel. This kernel reads its inputs once and writes only tensors that are read later. Tensors
  that only the backward pass reads are written or recomputed, whichever moves fewer bytes. In
  practice, torch.compile moves more bytes than this, because it stops at the border of a layer and
  reduces in separate kernels.
- **Bytes:** eager PyTorch fuses nothing, so before and after count everything that each operation
  reads and writes.
- **Left out:** the bound ignores kernel launches, communication and the CPU. It also ignores the
  caches of the device, although a tensor that fits into the L2 cache may be read faster.
- **Elementwise operations** are norms, activations, rotary positions, residual sums and their
  casts.
- **MFU** counts the model's FLOPs like `mfu` of `metrics.jsonl`.
""")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as refusal:
        exit_with_error(refusal)
