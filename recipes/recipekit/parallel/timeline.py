"""What a pipeline does in one optimizer step: when each rank computes, when it waits, and a picture
of it.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule as instructions
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine

from ..spec.engine import Engine
from ..spec.refusal import Say

KINDS = {
    instructions.ForwardPass: "forward",
    instructions.BackwardPass: "backward",
    instructions.ReduceTiedGrads: "reduce",
    instructions.ReduceGrads: "reduce",
    instructions.OptimizerStep: "step",
}


@dataclass(frozen=True)
class Span:
    """One instruction on one rank.

    `phase` is 1 on DualPipeV's way back, else 0; times are seconds since the step began.
    """

    kind: str  # of KINDS
    phase: int
    micro_batch: int
    start: float
    end: float


@contextlib.contextmanager
def record(engine: Engine, on: bool) -> Iterator[list[Span]]:
    """Times what a pipeline engine computes within the `with`; does nothing when not `on`, or
    without a pipeline (a collective).

    Waiting for another rank is in no span. While it records, the device is waited for before and
    after each span, so that a received tensor is there before the span begins; sends do not overlap
    with work then.
    """
    spans: list[Span] = []
    if not on or not hasattr(engine, "_INSTRUCTION_MAP"):
        yield spans
        return
    # The ranks' clocks have nothing in common but this moment: they leave a barrier within a
    # fraction of a millisecond of each other on one host, and within a network round trip on
    # several, which is how far their rows may be shifted.
    dist.barrier()
    device: Any = get_accelerator()
    zero = time.perf_counter()
    # both schedules take the micro-batches in order, and reuse buffer ids
    done: Counter[tuple[str, int]] = Counter()

    def timed(kind: str, execute: Callable[..., None]) -> Callable[..., None]:
        def execute_and_time(engine: Engine, **arguments: Any) -> None:
            device.synchronize()
            start = time.perf_counter() - zero
            execute(engine, **arguments)
            device.synchronize()
            phase = arguments.get("phase", 0)
            spans.append(Span(kind, phase, done[kind, phase], start, time.perf_counter() - zero))
            done[kind, phase] += 1

        return execute_and_time

    pipeline: Any = engine
    plain = pipeline._INSTRUCTION_MAP
    pipeline._INSTRUCTION_MAP = plain | {
        instruction: timed(kind, plain[instruction]) for instruction, kind in KINDS.items()
    }
    try:
        yield spans
    finally:
        del pipeline._INSTRUCTION_MAP  # the class's own shows again


def bubble(spans: list[Span]) -> float:
    """The part of the time from a rank's first forward to its last backward in which it computes
    nothing.
    """
    work = [span for span in spans if span.kind in ("forward", "backward")]
    whole = max(span.end for span in work) - min(span.start for span in work)
    return 1 - sum(span.end - span.start for span in work) / whole


def ideal_bubble(schedule: str, pp: int, micro_batches: int) -> float:
    """`bubble` of the first rank if all stages take the same time, a backward twice that of a
    forward, and sending none.

    1F1B: (pp - 1) / (m + pp - 1), whatever a backward takes. DeepSpeed's DualPipeV keeps the
    gradients of weights and of activations together and sends what a rank has computed at its next
    CommitP2P only, after the forward or backward that follows, so with its two half-sized stages
    the first rank idles for 5 pp - 6 forwards beside 6 m of work.
    """
    idle = (5 * pp - 6) / 6 if schedule == "dualpipev" else pp - 1
    return idle / (micro_batches + idle)


def report(engine: Engine, spans: list[Span], name: str, step: int, out: Path, say: Say) -> None:
    """Says how large the bubble was and draws `out`/schedule.png; nothing if `spans` is empty (a
    collective of each pipeline).
    """
    if not spans:
        return
    pipeline: Any = engine
    ranks: list[list[Span]] = [[]] * pipeline.num_stages
    dist.all_gather_object(ranks, spans, group=pipeline.grid.get_pipe_parallel_group())
    if dist.get_rank() != 0:
        return
    schedule, pp, micro_batches = (
        "dualpipev" if isinstance(engine, DualPipeVEngine) else "1f1b",
        pipeline.num_stages,
        engine.micro_batches,
    )
    measured, ideal = bubble(ranks[0]), ideal_bubble(schedule, pp, micro_batches)
    formula = (
        "(5 pp - 6) / (6 m + 5 pp - 6)" if schedule == "dualpipev" else "(pp - 1) / (m + pp - 1)"
    )
    title = (
        f"{name}, {schedule}, pp = {pp}, m = {micro_batches}\nbubble of the first rank in step"
        f" {step}: measured {measured:.1%}, in theory {ideal:.1%}"
    )
    try:
        draw(ranks, title, out / "schedule.png")
        drawn = f"drawn in {out / 'schedule.png'}"
    except OSError as error:  # the run continues without the picture
        drawn = f"{out / 'schedule.png'} cannot be written: {error.strerror}"
    say(
        f"pipeline bubble in step {step}: the first stage's rank waits {measured:.1%} of the time"
        f" from its first forward to its last backward; {schedule} with pp = {pp} and m ="
        f" {micro_batches} allows {formula} = {ideal:.1%}; {drawn}"
    )


LOOKS = {  # (kind, phase) -> what the legend says, colour
    ("forward", 0): ("forward", "#4c78a8"),
    ("backward", 0): ("backward", "#f58518"),
    ("forward", 1): ("forward, way back", "#9ecae9"),
    ("backward", 1): ("backward, way back", "#ffbf79"),
    ("idle", 0): ("idle: the bubble", "#e4e4e4"),
    ("reduce", 0): ("sum of gradients", "#b279a2"),
    ("step", 0): ("optimizer step", "#54a24b"),
}


@dataclass(frozen=True)
class Scale:
    """The horizontal axis of the picture: milliseconds since the step began, on `inches`."""

    begin: float
    end: float
    inches: float
    # kind -> seconds at which the last rank enters it: a rank that is done early enters and waits
    together: dict[str, float]
    step_ms: float  # length of the optimizer step, which may not fit

    def points(self, width: float) -> float:
        """Return the text points of a bar of `width` milliseconds: 72 an inch, less the margins."""
        return width / (self.end - self.begin) * self.inches * 65


def scale_of(ranks: list[list[Span]]) -> Scale:
    """Return the axis on which the spans of all ranks fit, except for a long optimizer step."""
    begin, end = (
        choose(time for spans in ranks for span in spans for time in (span.start, span.end)) * 1000
        for choose in (min, max)
    )
    together = {
        kind: max(span.start for spans in ranks for span in spans if span.kind == kind)
        for kind in ("reduce", "step")
    }
    step_ms, work_ms = end - together["step"] * 1000, together["step"] * 1000 - begin
    # A long optimizer step must not squeeze the rest; the legend has its length.
    end = min(end, begin + 1.15 * work_ms)
    inches = min(24.0, max(11.0, 0.3 * len(ranks[0])))
    return Scale(begin, end, inches, together, step_ms)


def draw(ranks: list[list[Span]], title: str, path: Path) -> None:
    """Draw one row a rank: its spans with the numbers of their micro-batches, over milliseconds."""
    from matplotlib.figure import Figure  # takes a second, which only a drawn step should

    scale = scale_of(ranks)
    figure = Figure(figsize=(scale.inches, 1.9 + 0.55 * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    for row, spans in enumerate(ranks):
        draw_idle(axes, row, spans)
        for span in spans:
            draw_span(axes, scale, row, span)

    # The line shows where the optimizer step begins, which may be too short to be seen.
    start = scale.together["step"] * 1000
    axes.axvline(start, color=LOOKS["step", 0][1], linestyle="--", linewidth=1)
    axes.set_yticks(range(len(ranks)), [f"pipeline rank {row}" for row in range(len(ranks))])
    axes.set(
        xlabel="milliseconds since the step began",
        xlim=(min(0.0, scale.begin), scale.end * 1.005),
        ylim=(len(ranks) - 0.5, -0.5),
    )
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)

    shown = {("idle", 0)} | {(span.kind, span.phase) for spans in ranks for span in spans}
    add_legend(figure, shown, scale.step_ms)
    figure.savefig(path, dpi=130)


def draw_idle(axes: Any, row: int, spans: list[Span]) -> None:
    """Draw the bar behind a row, from the first forward to the last backward: the bubble shows."""
    work = [span for span in spans if span.kind in ("forward", "backward")]
    first, last = min(span.start for span in work) * 1000, max(span.end for span in work) * 1000
    axes.broken_barh([(first, last - first)], (row - 0.4, 0.8), color=LOOKS["idle", 0][1])


def draw_span(axes: Any, scale: Scale, row: int, span: Span) -> None:
    """Draw a span without its waiting, with the number of its micro-batch if there is room."""
    look = (span.kind, span.phase)
    start = max(span.start, scale.together.get(span.kind, 0.0)) * 1000
    width = max(0.0, span.end * 1000 - start)
    axes.broken_barh(
        [(start, width)],
        (row - 0.4, 0.8),
        facecolor=LOOKS[look][1],
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


def add_legend(figure: Any, shown: set[tuple[str, int]], step_ms: float) -> None:
    """Add the legend of the looks that are shown, with the length of the optimizer step."""
    from matplotlib.patches import Patch

    length = {("step", 0): f", {step_ms:.1f} ms"}
    patches = [
        Patch(facecolor=colour, label=label + length.get(look, ""))
        for look, (label, colour) in LOOKS.items()
        if look in shown
    ]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9
    )
