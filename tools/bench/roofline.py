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

import argparse
import datetime
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

from recipekit import Recipe
from recipekit.plan import Plan, make_plan
from recipekit.spec.command import parse
from recipekit.spec.devices import Device, device_called
from recipekit.spec.refusal import Refusal, exit_refused, refuse
from recipekit.spec.task_specs import PACKED

LINEAR, ATTENTION, LOSS, LOOKED_UP = (
    "weights of the layers",
    "attention and its mask",
    "head and loss",
    "embedding",
)
ELEMENTS, UPDATE = "elementwise operations", "gradient sums and optimizer"
KINDS = (LINEAR, ATTENTION, LOSS, ELEMENTS, LOOKED_UP, UPDATE)
LLAMA = "meta-llama/Llama-3.1-8B"
MODELS = {  # what differs from it, as in bench_gpu.py
    "1b": (
        {
            "vocab_size": 50368,
            "hidden_size": 2048,
            "intermediate_size": 5504,
            "num_hidden_layers": 24,
        }
        | {
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
        }
    ),
    "3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "tie_word_embeddings": True,
    },
    "8b": {},
}
QWEN, LORA = "recipes/qwen3_0_6b_zero2.py", "recipes/qwen3_0_6b_lora_zero3.py"
LORA_FLAGS = (
    "--task",
    "pretrain",
    "--deepspeed_config",
    "zero2.json",
    "--no-activation_checkpointing",
)
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
# of the lengths of documents: log-normal, as in bench_gpu.py
MEDIAN, SPREAD, LONGEST = 6.3, 1.0, 16_000


@dataclass(frozen=True)
class Way:
    """Names what is measured against what."""

    title: str
    attention: str
    loss: str
    fused: bool  # AdamW as one operation


WAYS = (Way("before", "sdpa", "whole", False), Way("after", "varlen", "chunked", True))


@dataclass(frozen=True)
class Traced:
    """Holds the operations of a micro-batch and of the optimizer's part in it, and what is counted
    of them.

    `model_flops` as for `mfu`.
    """

    operations: list[Any]  # op_costs.Operation
    kinds: list[str]  # of each
    tokens: int
    model_flops: float

    def best(self, device: Device) -> float:
        """Returns the least seconds of a micro-batch."""
        return sum(seconds(operation, device) for operation in self.operations)


def seconds(operation: Any, device: Device) -> float:
    """Returns the least time of an operation: its bytes at the bandwidth, or its FLOPs at the
    peak.
    """
    return max(operation.bytes / device.bandwidth, operation.flops / device.flops)


# The trace
# --------------------------------------------------------------------------------------------------


def trace(plan: Plan, way: Way) -> Traced:
    """Run a micro-batch of a plan's model forward and backward, and the optimizer's arithmetic, on
    tensors without memory.

    Raise `Refusal` if the FLOPs of the model cannot be counted.
    """
    from op_costs import Costs
    from recipekit.model.flops import keys_seen, model_flops
    from torch._subclasses.fake_tensor import FakeTensorMode

    recipe = plan.recipe
    model = made(plan, way)
    flops = model_flops(model)
    if flops is None:
        raise refuse(
            f"model = {recipe.model}",
            "its FLOPs cannot be counted: a layer mixes tokens by something else than attention",
            "use another model",
        )

    batch = micro_batch(plan, way)
    pairs = dict(zip(flops.per_key, keys_seen([batch], flops.per_key), strict=True))
    fake, costs = FakeTensorMode(allow_non_fake_inputs=True), Costs(varlen_formulas(pairs))
    with fake:
        without_memory(model, fake, dtype_of(plan))
        tensors = {name: fake.from_tensor(tensor) for name, tensor in batch.items()}
        if way.loss == "chunked":
            losses_of_head(model, tensors["labels"])
        begun = record(model, tensors, costs, plan, way.fused)

    vocabulary = plan.model_config["vocab_size"] if plan.model_config else 0
    kinds = [
        UPDATE if number >= begun else kind_of(operation, recipe.seq_len, vocabulary)
        for number, operation in enumerate(costs.found)
    ]
    tokens = recipe.micro_batch * recipe.seq_len
    return Traced(costs.found, kinds, tokens, flops.of_step(tokens, pairs.values()))


def dtype_of(plan: Plan) -> Any:
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[plan.precision]


def micro_batch(plan: Plan, way: Way) -> dict[str, Any]:
    """Make a micro-batch of packed documents, with the edges that the attention reads."""
    import torch
    from recipekit.kernels.attention import VARLEN
    from recipekit.kernels.documents import documents_of, for_layers

    recipe = plan.recipe
    vocabulary = plan.model_config["vocab_size"] if plan.model_config else 2
    batch = documents(recipe.micro_batch, recipe.seq_len, vocabulary)
    if way.attention == VARLEN:
        batch["documents"] = for_layers(documents_of(batch["position_ids"]), torch.device("cpu"))
    return batch


def record(model: Any, tensors: dict[str, Any], costs: Any, plan: Plan, fused: bool) -> int:
    """Record forward, backward and optimizer in `costs`; return the number of the optimizer's first
    operation.
    """
    from op_costs import BACKWARD, OPTIMIZER
    from recipekit.tasks.find import task_called

    task = task_called(plan.recipe.task)
    with costs:
        loss = task.loss(task.forward(model, tensors), tensors, False)
        costs.stage = BACKWARD
        loss.backward()

        costs.stage = OPTIMIZER
        begun = len(costs.found)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        update(trained, fused, costs, plan.accumulation)
    return begun


def made(plan: Plan, way: Way) -> Any:
    """Makes the model of a plan without weights, adapted, as a run with this attention and loss
    makes it.

    Raises `Refusal` for a model that does something to its logits after the head where they are
    made in chunks.
    """
    from recipekit.model.empty import empty_model
    from recipekit.model.head import operations_of

    recipe = plan.recipe
    assert plan.model_config is not None
    whole = empty_model(
        plan.model_config, way.attention, recipe.model, recipe.recompute, recipe.facts.auto_class
    )
    if way.loss == "chunked" and (
        operations := operations_of(plan.model_config, recipe.task, recipe.model)
    ):
        raise refuse(
            f"model = {recipe.model}",
            f"does {operations[0]} to its logits, which is not traced",
            "use another model",
        )
    model = recipe.adapt(whole) if recipe.adapt else whole
    return model.train()


def losses_of_head(model: Any, labels: Any) -> None:
    """Lets a model's head compute the losses of tokens, in place, as model/head.py does: without
    its tensors of a class of their own, which FakeTensorMode (torch 2.13) does not make.
    """
    from recipekit.kernels.blocks import BLOCK
    from recipekit.kernels.cross_entropy import Head, token_losses

    head = model.get_output_embeddings()
    # an accelerator's block
    head.forward = lambda hidden: token_losses(
        hidden, Head(head.weight, head.bias), labels, block=BLOCK
    )


def without_memory(model: Any, fake: Any, dtype: Any) -> None:
    """Gives a model parameters of `dtype` without memory, in place; what is tied stays so.

    Its buffers keep their dtype, as in DeepSpeed's engine.
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
    """Makes a micro-batch of packed documents of random lengths (median 545), the same each time:
    three tensors (rows, seq_len) int64.
    """
    import torch

    draw, places = torch.Generator().manual_seed(0), []
    for _ in range(rows):
        row: list[Any] = []
        while sum(map(len, row)) < seq_len:
            row.append(
                torch.arange(
                    int(
                        torch.exp(MEDIAN + SPREAD * torch.randn((), generator=draw)).clamp(
                            16, LONGEST
                        )
                    )
                )
            )
        places.append(torch.cat(row)[:seq_len])
    ids = torch.randint(vocabulary, (rows, seq_len), generator=draw)
    return {"input_ids": ids, "position_ids": torch.stack(places), "labels": ids.roll(-1, 1)}


def varlen_formulas(pairs: dict[int, int]) -> dict[str, Callable[..., float]]:
    """Makes the FLOPs of attention by documents: two products forward and five backward, for each
    (token, key) pair that causality, windows and documents allow.

    `pairs`: window -> how many of a micro-batch. Heads that the kernel fills up to a multiple of 8
    count whole.
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


def update(trained: list[Any], fused: bool, costs: Any, accumulation: int) -> None:
    """Runs what a micro-batch takes of the optimizer: its gradients are added to fp32 sums, and
    each `accumulation`-th time comes a step.

    These are the operations of DeepSpeed 0.19.8's ZeRO-1 and -2 on one rank (stage_1_and_2.py:
    norm, clipping, AdamW on fp32 copies, copy to the parameters), written down here, not a trace of
    its engine.
    """
    import torch

    flat = [torch.empty(sum(parameter.numel() for parameter in trained), dtype=torch.float32)]
    sums, half = torch.empty_like(flat[0]), torch.empty_like(flat[0], dtype=trained[0].dtype)
    for parameter in trained:
        torch.empty(parameter.shape, dtype=torch.float32).add_(parameter.grad)
    begun = len(costs.found)
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
    costs.found[begun:] = [
        replace(
            operation,
            bytes=round(operation.bytes / accumulation),
            flops=operation.flops / accumulation,
        )
        for operation in costs.found[begun:]
    ]


def costs_off(costs: Any) -> Any:
    """Keeps what is made within the `with` out of the list."""
    import contextlib

    @contextlib.contextmanager
    def off() -> Iterator[None]:
        known = len(costs.found)
        yield
        del costs.found[known:]

    return off()


def kind_of(operation: Any, seq_len: int, vocabulary: int) -> str:
    """Says what an operation of the model belongs to, by its name, the shapes of its tensors and
    who called it.
    """
    name, where = operation.name.partition(".")[2], operation.where
    if "attention" in name or "attn" in name or {"masking_utils.py", "repeat_kv"} & where:
        return ATTENTION
    if any(
        len(shape) == 5 or (len(shape) == 4 and shape[-2:] == (seq_len, seq_len))
        for shape in operation.shapes
    ):
        return ATTENTION  # repeated key-value heads in the backward; masks and scores
    if name.startswith("embedding"):
        return LOOKED_UP
    if "cross_entropy.py" in where or any(vocabulary in shape for shape in operation.shapes):
        return LOSS
    return LINEAR if name in PRODUCTS else ELEMENTS


# What is said of it
# -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Names a run whose roofline is drawn: a recipe, the flags that follow it, and what is hoped
    for on an H100.
    """

    title: str
    recipe: str
    model: str  # of MODELS; "": the recipe's own
    flags: tuple[str, ...]
    goal: str = ""


def cases() -> list[Case]:
    """Returns the runs of bench_gpu.py that have goals, with the flags of its rows."""

    def shape(seq_len: int, micro: int, rows: int) -> tuple[str, ...]:
        return (
            "--seq_len",
            str(seq_len),
            "--micro_batch",
            str(micro),
            "--global_batch",
            str(rows),
        )

    return [
        Case("1.3B, all weights, rows of 2048", QWEN, "1b", shape(2048, 8, 64), "50 % MFU"),
        Case(
            "3B, all weights, rows of 4096, activation checkpointing",
            QWEN,
            "3b",
            (*shape(4096, 2, 16), "--recompute_every", "1"),
            "45 % MFU",
        ),
        Case(
            "Llama 3.1 8B, LoRA, rows of 4096",
            LORA,
            "8b",
            (*shape(4096, 2, 16), *LORA_FLAGS),
            "13,000 tokens/s",
        ),
    ]


def plan_of(case: Case, folder: Path) -> Plan:
    """Resolves a case as its command would; `folder` gets the config.json of a model that is only
    described here.

    Raises `Refusal`.
    """
    from recipekit.architectures.lookup import model_config

    path, flags = ROOT / case.recipe, list(case.flags)
    if case.model:
        llama = model_config(LLAMA)
        assert llama is not None, "shipped"
        (folder / case.model).mkdir(exist_ok=True)
        (folder / case.model / "config.json").write_text(json.dumps(llama | MODELS[case.model]))
        flags += ["--model", str(folder / case.model), "--tokenizer", LLAMA]
    if "--init" not in flags:
        flags += ["--init", "random"]  # no weights are read
    recipe = runpy.run_path(str(path), run_name="roofline").get("RECIPE")
    if not isinstance(recipe, Recipe):
        raise refuse(case.recipe, "has no RECIPE", "name a file of recipes/")
    plan = make_plan(parse(recipe, path, flags))
    degrees = {
        axis: getattr(plan.mesh, axis)
        for axis in ("tp", "pp", "sp", "ep")
        if getattr(plan.mesh, axis) > 1
    }
    if degrees or plan.recipe.facts.rows != PACKED:
        what = (
            " ".join(f"--{axis} {degree}" for axis, degree in degrees.items())
            or f"task = {plan.recipe.task}"
        )
        raise refuse(
            what,
            "is not traced: one rank that trains on packed tokens is",
            "use --tp 1 --pp 1 --sp 1 --ep 1, or another recipe",
        )
    if plan.model_config is None:
        raise refuse(
            f"model = {plan.recipe.model}",
            "is neither shipped nor on this machine",
            "give its folder with --model",
        )
    return plan


def summed(traced: Traced, device: Device) -> dict[str, tuple[float, float, float]]:
    """Sums by kind: (bytes, FLOPs, least seconds)."""
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
    """Ranks operations by the seconds that they take beyond what their FLOPs take at the peak."""
    lost: defaultdict[str, float] = defaultdict(float)
    for operation, kind in zip(traced.operations, traced.kinds, strict=True):
        lost[f"{operation.name} of {kind}"] += (
            seconds(operation, device) - operation.flops / device.flops
        )
    return sorted(lost.items(), key=lambda item: -item[1])


def worst_kind(traced: Traced, device: Device) -> tuple[str, float]:
    """Returns the kind that takes most time beyond its FLOPs at the peak, and its share of the
    least time.
    """
    lost = {
        kind: least - flops / device.flops
        for kind, (_, flops, least) in summed(traced, device).items()
    }
    kind = max(lost, key=lambda kind: lost[kind])
    return kind, summed(traced, device)[kind][2] / traced.best(device)


def table(traced: dict[str, Traced], device: Device) -> str:
    """Write the bytes, the FLOPs and the least time of a case's ways by kind, and their bounds."""
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
        bounds += wrap(text, 120, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(["", *lines, "", *bounds])


def cell(found: Sequence[float]) -> str:
    """Write (bytes, FLOPs, least seconds) as three cells."""
    moved, flops, least = found
    return f"{moved / 1e9:.1f} | {flops / 1e12:.2f} | {1e3 * least:.1f}"


def upper_bound(title: str, traced: Traced, device: Device) -> str:
    """Write the speed that a way cannot exceed, and its limits."""
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


def traced_ways(plan: Plan) -> dict[str, Traced]:
    found = {way.title: trace(plan, way) for way in WAYS}
    return found | {"compiled": compiled(found[WAYS[-1].title])}


def compiled(traced: Traced) -> Traced:
    """Makes one kernel of what is computed element by element between two operations that are
    kernels of their own.
    """
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
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
    name, device = device_called(arguments.device)
    path = os.path.relpath(Path(arguments.recipe).resolve(), ROOT) if arguments.recipe else ""
    wanted = [Case(path, path, "", tuple(rest))] if path else cases()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for case in wanted:
            plan = plan_of(case, Path(folder))
            print(f"traces {case.title}", file=sys.stderr)
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
    today = datetime.date.today().isoformat()
    return f"""# How fast can a step be at most, and what limits it?

Computed by `python tools/bench/roofline.py` on {today} ({versions}), not measured.
It is an upper bound for {name}, with {device.flops / 1e12:g} TFLOP/s of dense bf16 and \
{device.bandwidth / 1e12:g} TB/s on its data sheet.

{chr(10).join(found)}
{WORDS}"""


WORDS = """## How it is computed

- **Trace:** to list the operations of a step, one micro-batch runs forward and backward through \
all layers of the
  recipe's own model, on tensors without memory. Layers are recomputed if the recipe says so. The \
tool then adds the
  operations of the optimizer, which are listed in the tool as DeepSpeed's ZeRO-1 and -2 perform \
them on one rank. Their
  cost is divided by the micro-batches of a step.
- **Least time:** an operation takes at least the longer of two times: its bytes at the peak \
bandwidth, and its FLOPs at
  the peak speed. The bound assumes that operations do not overlap. Both peaks are from the data \
sheet, and no kernel
  reaches them: large matrix products reach 75 to 80 % of the peak.
- **Before** uses attention with a dense mask, which computes all pairs of tokens and repeats the \
key-value heads, and
  computes the loss from full logits.
- **After** uses attention by documents (random lengths, median 545), chunked loss and fused AdamW.
- **Compiled** is like after, except that consecutive elementwise operations are fused into one \
kernel. This kernel
  reads its inputs once and writes only tensors that are read later. Tensors that only the \
backward pass reads are
  written or recomputed, whichever moves fewer bytes. In practice, torch.compile moves more bytes \
than this, because it
  stops at the border of a layer and reduces in separate kernels.
- **Bytes:** eager PyTorch fuses nothing, so before and after count everything that each operation \
reads and writes.
- **Left out:** the bound ignores kernel launches, communication and the CPU. It also ignores the \
caches of the device,
  although a tensor that fits into the L2 cache may be read faster.
- **Elementwise operations** are norms, activations, rotary positions, residual sums and their \
casts.
- **MFU** counts the model's FLOPs like `mfu` of `metrics.jsonl`.
"""


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refusal as refusal:
        exit_refused(refusal)
