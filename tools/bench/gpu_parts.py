"""Time each part of a training step by itself, in the shapes of bench_gpu.py's rows.

    python tools/bench/gpu_parts.py           # on a GPU
    python tools/bench/gpu_parts.py --tiny    # tiny shapes, on any device

Each part answers one question about the speed of a step. The parts are products of matrices in bf16
and fp8, attention of packed documents by three kernels, and ways to add a gradient to fp32 sums.
Others are blocks of the chunked loss, AdamW, and a copy. Times are medians of ten runs, on a GPU by
CUDA events. A part that the installed torch or the device does not support is listed as not timed,
with the reason.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from statistics import median

import torch
from gpu_models import LONGEST, MEDIAN, SHORTEST, SPREAD, config_of
from harness import add_json, parser_of
from recipekit.kernels.cross_entropy import Head, token_losses
from recipekit.kernels.varlen import Scoring, varlen
from recipekit.spec.atomic_write import write_atomic

NOT_TIMED = "not timed"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Shape:
    """The sizes of a micro-batch of a row of bench_gpu.py."""

    row: str
    seq_len: int
    rows: int
    width: int
    inner: int  # of the MLP
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    parameters: int  # whose gradients are added, a multiple of 8

    @property
    def tokens(self) -> int:
        return self.seq_len * self.rows


@dataclass(frozen=True)
class Timed:
    """The time of one operation of a part. `ms` may be NOT_TIMED; `rate` is then the reason."""

    part: str
    what: str
    ms: str
    rate: str


def shape_of(row: str, model: str, seq_len: int, rows: int, tiny: bool) -> Shape:
    """Return a row's sizes; with `tiny`, sizes that a CPU computes in milliseconds."""
    if tiny:
        return Shape(row, 64, 2, 64, 160, 4, 2, 16, 512, 4096)
    config = config_of(model)
    heads = config["num_attention_heads"]
    return Shape(
        row,
        seq_len,
        rows,
        config["hidden_size"],
        config["intermediate_size"],
        heads,
        config["num_key_value_heads"],
        config["hidden_size"] // heads,
        config["vocab_size"],
        1_360_000_000,
    )


# The clock
# --------------------------------------------------------------------------------------------------


def milliseconds(run: Callable[[], object], times: int = 10) -> float:
    """Return the median milliseconds of a run, after three runs that do not count."""
    for _ in range(3):
        run()
    return median(_once(run) for _ in range(times))


def _once(run: Callable[[], object]) -> float:
    if DEVICE == "cpu":
        began = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - began)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def flop_rate(flops: float, ms: float) -> str:
    return f"{1e-9 * flops / ms:,.0f} TFLOP/s"


def byte_rate(moved: float, ms: float) -> str:
    return f"{1e-9 * moved / ms:,.2f} TB/s"


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


# The parts
# --------------------------------------------------------------------------------------------------


def products(shape: Shape) -> Iterator[tuple[str, float, str]]:
    """Time a layer's products: forward, and backward to the input and to the weight."""
    for inputs, outputs in ((shape.width, shape.inner), (shape.inner, shape.width)):
        x, weight = half(shape.tokens, inputs), half(outputs, inputs)
        grad = half(shape.tokens, outputs)
        flops = 2.0 * shape.tokens * inputs * outputs
        ways: dict[str, Callable[[], object]] = {
            "forward": partial(torch.mm, x, weight.t()),
            "to the input": partial(torch.mm, grad, weight),
            "to the weight": partial(torch.mm, grad.t(), x),
        }
        for name, way in ways.items():
            ms = milliseconds(way)
            yield f"{inputs} to {outputs}, {name}", ms, flop_rate(flops, ms)


def float8_product(shape: Shape) -> Iterator[tuple[str, float, str]]:
    """Time a product in fp8 with one scale for each tensor, and the conversion of its input."""
    x, weight = half(shape.tokens, shape.width), half(shape.inner, shape.width)
    one = torch.ones((), device=DEVICE)

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        scale = 448 / tensor.abs().amax().float()
        return (tensor * scale).to(torch.float8_e4m3fn)

    left, right = converted(x), converted(weight)
    ms = milliseconds(
        lambda: torch.ops.aten._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16)
    )
    flops = 2.0 * shape.tokens * shape.width * shape.inner
    yield f"{shape.width} to {shape.inner}", ms, flop_rate(flops, ms)
    ms = milliseconds(lambda: converted(x))
    yield "conversion of the input", ms, byte_rate(3 * x.nbytes, ms)


def document_bounds(shape: Shape) -> list[int]:
    """Return the bounds of packed documents, whose lengths are log-normal as in the bench's rows.

    A document ends at the end of its row.
    """
    generator = torch.Generator().manual_seed(0)
    bounds = [0]
    while bounds[-1] < shape.tokens:
        drawn = torch.exp(MEDIAN + SPREAD * torch.randn((), generator=generator))
        end = (bounds[-1] // shape.seq_len + 1) * shape.seq_len
        bounds.append(min(end, bounds[-1] + int(drawn.clamp(SHORTEST, LONGEST))))
    return bounds


def attention(shape: Shape, kernel: str) -> Iterator[tuple[str, float, str]]:
    """Time attention within documents, forward, and forward with backward."""
    bounds = document_bounds(shape)
    lengths = [stop - start for start, stop in pairwise(bounds)]
    documents = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    leaves = [half(shape.tokens, count, shape.head_dim).requires_grad_() for count in heads]
    call = KERNELS[kernel](leaves, documents, max(lengths), shape.head_dim**-0.5)
    grad = torch.randn_like(leaves[0])
    forward = milliseconds(call)
    both = milliseconds(lambda: torch.autograd.grad(call(), leaves, grad))
    flops = 2.0 * shape.heads * shape.head_dim * sum(length**2 for length in lengths)
    yield f"{len(lengths)} documents, forward", forward, flop_rate(flops, forward)
    yield "forward and backward", both, flop_rate(3.5 * flops, both)


Leaves = list[torch.Tensor]  # queries, keys and values: (tokens, heads, d)


def by_recipe(
    leaves: Leaves, documents: torch.Tensor, longest: int, scale: float
) -> Callable[[], torch.Tensor]:
    """Return attention as recipes compute it."""
    query, key, value = leaves
    return lambda: varlen(query, key, value, documents, longest, Scoring(scale))


def by_cudnn(
    leaves: Leaves, documents: torch.Tensor, longest: int, scale: float
) -> Callable[[], torch.Tensor]:
    """Return attention by cuDNN, forward and backward."""
    aten = torch.ops.aten
    several = (documents, documents, longest, longest)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            found = aten._cudnn_attention_forward(
                *tensors, None, *several, True, 0.0, True, False, scale=scale
            )
            ctx.save_for_backward(*tensors, found[0], found[1], found[6], found[7])
            return found[0]

        @staticmethod
        def backward(ctx, grad: torch.Tensor):  # type: ignore[override]
            return aten._cudnn_attention_backward(
                grad, *ctx.saved_tensors, None, *several, 0.0, True, scale=scale
            )

    return lambda: Attention.apply(*leaves)  # type: ignore[return-value]


def by_flash4(
    leaves: Leaves, documents: torch.Tensor, longest: int, scale: float
) -> Callable[[], torch.Tensor]:
    """Return attention by FlashAttention 4. Raise ImportError if it is not installed."""
    attend = import_module("flash_attn.cute").flash_attn_varlen_func  # no dependency of recipes
    bounds = {"cu_seqlens_q": documents, "cu_seqlens_k": documents}
    longests = {"max_seqlen_q": longest, "max_seqlen_k": longest}

    def call() -> torch.Tensor:
        found = attend(*leaves, **bounds, **longests, softmax_scale=scale, causal=True)
        return found[0] if isinstance(found, tuple) else found

    return call


KERNELS: dict[str, Callable[..., Callable[[], torch.Tensor]]] = {
    "recipe": by_recipe,
    "cuDNN": by_cudnn,
    "FlashAttention 4": by_flash4,
}


def gradient_sums(shape: Shape) -> Iterator[tuple[str, float, str]]:
    """Time the addition of a bf16 gradient to fp32 sums, with and without an fp32 copy."""
    count = shape.parameters
    sums, grad, bucket = torch.zeros(count, device=DEVICE), half(count), half(count)
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "through an fp32 copy": (18, lambda: sums.add_(grad.float())),
        "without a copy": (10, lambda: sums.add_(grad)),
        "ZeRO-2's copy into a bucket": (4, lambda: bucket.copy_(grad)),
        "ZeRO-2's division of a bucket": (4, lambda: bucket.div_(2.0)),
    }
    for name, (moved, way) in ways.items():
        ms = milliseconds(way)
        yield f"{name}, {moved} bytes a parameter", ms, byte_rate(float(moved) * count, ms)


def loss_blocks(shape: Shape) -> Iterator[tuple[str, float, str]]:
    """Time the chunked loss, forward and backward, with blocks of several sizes."""
    hidden = half(shape.tokens, shape.width).requires_grad_()
    weight = half(shape.vocabulary, shape.width).requires_grad_()
    labels = torch.randint(shape.vocabulary, (shape.tokens,), device=DEVICE)
    flops = 8.0 * shape.tokens * shape.width * shape.vocabulary  # the logits are computed twice

    def step(block: int) -> object:
        losses = token_losses(hidden, Head(weight, None), labels, block=block)
        return torch.autograd.grad(losses.sum(), (hidden, weight))

    # The largest size is one that a GPU of 80 GB holds beside the weights.
    for power in (24, 25, 26, 27):
        block = 1 << power if shape.tokens > 1000 else 1 << (power - 10)
        ms = milliseconds(partial(step, block), 5)
        yield f"blocks of 2^{power} logits", ms, flop_rate(flops, ms)


def adamw(shape: Shape) -> Iterator[tuple[str, float, str]]:
    """Time torch's fused AdamW on fp32 weights."""
    weights = [torch.nn.Parameter(torch.randn(shape.parameters // 8, device=DEVICE))]
    weights += [torch.nn.Parameter(torch.randn_like(weights[0])) for _ in range(7)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    ms = milliseconds(torch.optim.AdamW(weights, fused=True).step, 5)
    yield "fused, 28 bytes a parameter", ms, byte_rate(28.0 * shape.parameters, ms)


def copy(shape: Shape) -> Iterator[tuple[str, float, str]]:
    """Time a copy, which shows the device's bandwidth."""
    source = torch.zeros(shape.parameters // 4, device=DEVICE)
    target = torch.empty_like(source)
    ms = milliseconds(lambda: target.copy_(source))
    yield "fp32", ms, byte_rate(2.0 * source.nbytes, ms)


# The list
# --------------------------------------------------------------------------------------------------

Part = Callable[[], Iterator[tuple[str, float, str]]]


def parts(tiny: bool) -> Iterator[tuple[str, Part]]:
    """Yield each part's name, and the function that times it."""
    small = shape_of("1b", "1b", 2048, 8, tiny)
    large = shape_of("8b_lora", "8b", 4096, 2, tiny)
    yield "copy", partial(copy, small)
    for shape in (small, large):
        yield f"products of `{shape.row}`, bf16", partial(products, shape)
        yield f"products of `{shape.row}`, fp8", partial(float8_product, shape)
        for kernel in KERNELS:
            yield f"attention of `{shape.row}`, {kernel}", partial(attention, shape, kernel)
    yield "gradient sums of `1b`", partial(gradient_sums, small)
    yield "loss of `1b`", partial(loss_blocks, small)
    yield "AdamW of `1b`", partial(adamw, small)


def timed(name: str, part: Part) -> list[Timed]:
    """Time a part. If it fails, the last line of the list gives the reason."""
    found = []
    try:
        for what, ms, rate in part():
            found.append(Timed(name, what, f"{ms:,.3f}", rate))
    except Exception as error:  # kernels that are not supported raise errors of many kinds
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        found.append(Timed(name, "", NOT_TIMED, reason.replace("|", "/")[:120]))
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    return found


def main(argv: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tiny", action="store_true", help="Use tiny shapes, on any device.")
    add_json(parser)
    arguments = parser.parse_args(argv)
    if DEVICE == "cpu" and not arguments.tiny:
        parser.error("torch sees no GPU here. Use --tiny for a trial.")
    torch.manual_seed(0)
    found: list[Timed] = []
    for name, part in parts(arguments.tiny):
        found += timed(name, part)
        for each in found[-1:]:
            print(f"{each.part}: {each.what} {each.ms} ms, {each.rate}", flush=True)
    if arguments.json:
        write_atomic(arguments.json, json.dumps([vars(each) for each in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
