"""Timeline of a pipeline in one optimizer step: each rank's busy and idle times, and a plot."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule as instructions
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine

from ..compat.deepspeed import PipelineEngine, instructions_replaced
from ..spec.engine import Engine
from ..spec.errors import Say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTRUCTION_KINDS = {
    instructions.ForwardPass: "forward",
    instructions.BackwardPass: "backward",
    instructions.ReduceTiedGrads: "reduce",
    instructions.ReduceGrads: "reduce",
    instructions.OptimizerStep: "step",
}


@dataclass(frozen=True)
class InstructionSpan:
    """One instruction on one rank.

    `phase` is 1 on the way back in DualPipeV, otherwise 0. Times are seconds since the step began.
    """

    kind: str  # one of KINDS
    phase: int
    micro_batch: int
    start: float
    end: float


@contextlib.contextmanager
def record_schedule(engine: Engine, enabled: bool) -> Iterator[list[InstructionSpan]]:
    """Record the times of a pipeline engine's computations in the `with` block (a collective).

    Without `enabled`, or without a pipeline, nothing is recorded. No span includes the time spent
    waiting for other ranks. During recording, the device is synchronized before and after each
    span, so a received tensor is complete before the span begins. As a result, sends do not overlap
    with computation.
    """
    spans: list[InstructionSpan] = []
    if not enabled or not hasattr(engine, "_INSTRUCTION_MAP"):
        yield spans
        return
    # The barrier is the only common point of the ranks' clocks. On one host, ranks leave the
    # barrier within a fraction of a millisecond of each other. On several hosts they leave it
    # within a network round trip. The rows of the plot may be shifted by this much.
    dist.barrier()
    device: Any = get_accelerator()
    zero = time.perf_counter()
    # Both schedules run the micro-batches in order and reuse buffer ids.
    done: Counter[tuple[str, int]] = Counter()

    def timed(kind: str, execute: Callable[..., None]) -> Callable[..., None]:
        def execute_and_time(engine: Engine, **arguments: Any) -> None:
            device.synchronize()
            start = time.perf_counter() - zero
            execute(engine, **arguments)
            device.synchronize()
            phase = arguments.get("phase", 0)
            spans.append(
                InstructionSpan(kind, phase, done[kind, phase], start, time.perf_counter() - zero)
            )
            done[kind, phase] += 1

        return execute_and_time

    pipeline = cast(PipelineEngine, engine)
    plain = pipeline._INSTRUCTION_MAP
    replaced = {
        instruction: timed(kind, plain[instruction])
        for instruction, kind in INSTRUCTION_KINDS.items()
    }
    with instructions_replaced(pipeline, replaced):
        yield spans


def bubble_fraction(spans: list[InstructionSpan]) -> float:
    """Return the idle fraction of the time between a rank's first forward and its last backward."""
    work = [span for span in spans if span.kind in ("forward", "backward")]
    whole = max(span.end for span in work) - min(span.start for span in work)
    return 1 - sum(span.end - span.start for span in work) / whole


def ideal_bubble_fraction(schedule: str, pp: int, micro_batches: int) -> float:
    """Return the first rank's theoretical `bubble_fraction`.

    The formulas assume that all stages take the same time, that a backward takes twice as long as a
    forward, and that sending takes no time.

    1F1B: (pp - 1) / (m + pp - 1), regardless of the duration of a backward.

    DualPipeV: DeepSpeed computes the gradients of weights and activations together. It sends a
    result only at the next CommitP2P, after the forward or backward that follows. The first rank's
    two stages are half-sized. The rank therefore idles for 5 pp - 6 forwards, compared with 6 m
    forwards of work.
    """
    idle = (5 * pp - 6) / 6 if schedule == "dualpipev" else pp - 1
    return idle / (micro_batches + idle)


def report_bubble(
    engine: Engine, spans: list[InstructionSpan], name: str, step: int, out: Path, say: Say
) -> None:
    """Report the size of the bubble and draw `out`/schedule.png (a collective in each pipeline).

    If `spans` is empty, nothing is reported.
    """
    if not spans:
        return
    pipeline = cast(PipelineEngine, engine)
    ranks: list[list[InstructionSpan]] = [[]] * pipeline.num_stages
    dist.all_gather_object(ranks, spans, group=pipeline.grid.get_pipe_parallel_group())
    if dist.get_rank() != 0:
        return
    schedule, pp, micro_batches = (
        "dualpipev" if isinstance(engine, DualPipeVEngine) else "1f1b",
        pipeline.num_stages,
        engine.micro_batches,
    )
    measured, ideal = bubble_fraction(ranks[0]), ideal_bubble_fraction(schedule, pp, micro_batches)
    formula = (
        "(5 pp - 6) / (6 m + 5 pp - 6)" if schedule == "dualpipev" else "(pp - 1) / (m + pp - 1)"
    )
    title = (
        f"{name}, {schedule}, pp = {pp}, m = {micro_batches}\nbubble of the first rank in step"
        f" {step}: measured {measured:.1%}, in theory {ideal:.1%}"
    )
    try:
        draw_schedule(ranks, title, out / "schedule.png")
        drawn = f"drawn in {out / 'schedule.png'}"
    except OSError as error:  # the run continues without the plot
        drawn = f"{out / 'schedule.png'} cannot be written: {error.strerror}"
    say(
        f"pipeline bubble in step {step}: the first stage's rank waits {measured:.1%} of the time"
        f" from its first forward to its last backward; {schedule} with pp = {pp} and m ="
        f" {micro_batches} allows {formula} = {ideal:.1%}; {drawn}"
    )


SPAN_STYLES = {  # (kind, phase) -> legend label, colour
    ("forward", 0): ("forward", "#4c78a8"),
    ("backward", 0): ("backward", "#f58518"),
    ("forward", 1): ("forward, way back", "#9ecae9"),
    ("backward", 1): ("backward, way back", "#ffbf79"),
    ("idle", 0): ("idle: the bubble", "#e4e4e4"),
    ("reduce", 0): ("sum of gradients", "#b279a2"),
    ("step", 0): ("optimizer step", "#54a24b"),
}


@dataclass(frozen=True)
class TimeAxis:
    """The horizontal axis of the plot: milliseconds since the step began, drawn on `inches`."""

    start: float
    end: float
    inches: float
    # kind -> seconds at which the last rank starts it; ranks that finish early wait there
    common_start: dict[str, float]
    step_ms: float  # length of the optimizer step, which may exceed the axis

    def points(self, width: float) -> float:
        """Return the points that `width` milliseconds occupy: 72 per inch, without the margins."""
        return width / (self.end - self.start) * self.inches * 65


def time_axis_of(ranks: list[list[InstructionSpan]]) -> TimeAxis:
    """Return an axis that fits the spans of all ranks, except for a long optimizer step."""
    begin, end = (
        choose(time for spans in ranks for span in spans for time in (span.start, span.end)) * 1000
        for choose in (min, max)
    )
    together = {
        kind: max(span.start for spans in ranks for span in spans if span.kind == kind)
        for kind in ("reduce", "step")
    }
    step_ms, work_ms = end - together["step"] * 1000, together["step"] * 1000 - begin
    # A long optimizer step must not squeeze the other spans, so the legend shows its duration
    # instead.
    end = min(end, begin + 1.15 * work_ms)
    inches = min(24.0, max(11.0, 0.3 * len(ranks[0])))
    return TimeAxis(begin, end, inches, together, step_ms)


def draw_schedule(ranks: list[list[InstructionSpan]], title: str, path: Path) -> None:
    """Draw one row per rank: its spans over milliseconds, with their micro-batch numbers."""
    from matplotlib.figure import Figure  # slow import (a second), needed only for a plot

    scale = time_axis_of(ranks)
    figure = Figure(figsize=(scale.inches, 1.9 + 0.55 * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    for row, spans in enumerate(ranks):
        draw_idle(axes, row, spans)
        for span in spans:
            draw_span(axes, scale, row, span)

    # The line marks the start of the optimizer step, because its bar may be too short to be
    # visible.
    start = scale.common_start["step"] * 1000
    axes.axvline(start, color=SPAN_STYLES["step", 0][1], linestyle="--", linewidth=1)
    axes.set_yticks(range(len(ranks)), [f"pipeline rank {row}" for row in range(len(ranks))])
    axes.set(
        xlabel="milliseconds since the step began",
        xlim=(min(0.0, scale.start), scale.end * 1.005),
        ylim=(len(ranks) - 0.5, -0.5),
    )
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)

    shown = {("idle", 0)} | {(span.kind, span.phase) for spans in ranks for span in spans}
    add_legend(figure, shown, scale.step_ms)
    figure.savefig(path, dpi=130)


def draw_idle(axes: "Axes", row: int, spans: list[InstructionSpan]) -> None:
    """Draw a row's background bar, which shows the bubble, from first forward to last backward."""
    work = [span for span in spans if span.kind in ("forward", "backward")]
    first, last = min(span.start for span in work) * 1000, max(span.end for span in work) * 1000
    axes.broken_barh([(first, last - first)], (row - 0.4, 0.8), color=SPAN_STYLES["idle", 0][1])


def draw_span(axes: "Axes", scale: TimeAxis, row: int, span: InstructionSpan) -> None:
    """Draw a span without its waiting time. Add its micro-batch number if there is room."""
    look = (span.kind, span.phase)
    start = max(span.start, scale.common_start.get(span.kind, 0.0)) * 1000
    width = max(0.0, span.end * 1000 - start)
    axes.broken_barh(
        [(start, width)],
        (row - 0.4, 0.8),
        facecolor=SPAN_STYLES[look][1],
        edgecolor="white",
        linewidth=0.5,
    )

    number = str(span.micro_batch)
    if span.kind in ("forward", "backward") and scale.points(width) > 4 + 4.5 * len(number):
        dark = look in (("forward", 0), ("backward", 0))
        axes.text(
            start + width / 2,
            row,
            number,
            ha="center",
            va="center",
            fontsize=8,
            color="white" if dark else "black",
        )


def add_legend(figure: "Figure", kinds: set[tuple[str, int]], step_ms: float) -> None:
    """Add a legend that explains the styles in use and shows the duration of the optimizer step."""
    from matplotlib.patches import Patch

    length = {("step", 0): f", {step_ms:.1f} ms"}
    patches = [
        Patch(facecolor=colour, label=label + length.get(look, ""))
        for look, (label, colour) in SPAN_STYLES.items()
        if look in kinds
    ]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9
    )
