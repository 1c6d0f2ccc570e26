"""OUT/loss.png: the losses, the learning rate and the gradient norm of a run over its steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..spec.whole_file import replacing

PICTURE = "loss.png"  # in a run folder
INCHES, DPI = (10.0, 7.5), 110
# fixed: a computed layout takes as long as the drawing
EDGES = {"left": 0.09, "right": 0.985, "bottom": 0.065, "top": 0.95, "hspace": 0.08}
COLUMNS = 1000  # pixel columns of a panel
# ratio of the largest to the smallest value from which on a panel has a logarithmic scale
STEEP = 50

Curve = tuple[np.ndarray, np.ndarray]  # steps, values


def curve_of(lines: Sequence[Mapping[str, Any]], key: str) -> Curve:
    """Return the steps and the finite values of a key of metrics.jsonl."""
    found = [(line["step"], float(line[key])) for line in lines if key in line]
    steps, values = np.array(found, dtype=np.float64).reshape(-1, 2).T
    finite = np.isfinite(values)
    return steps[finite], values[finite]


def envelope(steps: np.ndarray, values: np.ndarray, columns: int = COLUMNS) -> tuple[Curve, Curve]:
    """Return (a curve through the lowest and the highest value of each pixel column, the means of
    the columns).

    A curve with at most two points for each column comes back as it is. `steps` increase.
    """
    if len(steps) <= 2 * columns:
        return (steps, values), (steps, values)
    width = (steps[-1] - steps[0] + 1) / columns
    column = ((steps - steps[0]) / width).astype(np.int64)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    lowest, highest = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    means = np.add.reduceat(values, starts) / np.diff(starts, append=len(values))
    both = np.stack([lowest, highest], axis=1).ravel()
    return (np.repeat(steps[starts], 2), both), (steps[starts], means)


def draw_losses(lines: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw `path`, a PNG, from the lines of metrics.jsonl. Touches no global state of
    matplotlib.
    """
    # takes a second, at the end of a run only
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=INCHES, dpi=DPI)
    FigureCanvasAgg(figure)
    figure.subplots_adjust(**EDGES)
    panels = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 1])
    for axes, key, colour in zip(
        panels, ("loss", "lr", "grad_norm"), ("#4c78a8", "#54a24b", "#b279a2"), strict=True
    ):
        steps, values = curve_of(lines, key)
        drawn, means = envelope(steps, values)
        thinned = len(drawn[0]) < len(steps)
        axes.plot(*drawn, color=colour, linewidth=0.8, alpha=0.45 if thinned else 1.0, label=key)
        if thinned:
            axes.plot(*means, color=colour, linewidth=1.2)
        if len(values) and 0 < values.min() * STEEP < values.max() and key != "lr":
            axes.set_yscale("log")
        axes.set_ylabel(key)
        axes.grid(alpha=0.3)
    evaluated = envelope(*curve_of(lines, "eval_loss"))[0]
    if len(evaluated[0]):
        panels[0].plot(
            *evaluated, "o-", color="#f58518", markersize=3, linewidth=1, label="eval_loss"
        )
    panels[0].legend(frameon=False)
    panels[0].set_title(title, fontsize=11)
    panels[-1].set_xlabel("optimizer step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    with replacing(path) as made:
        figure.savefig(made, format="png", pil_kwargs={"compress_level": 3})
