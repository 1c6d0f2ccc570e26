"""OUT/loss.png: a plot of a run's losses, learning rate and gradient norm by step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..spec.atomic_write import atomic_path

LOSS_PLOT = "loss.png"  # in a run folder
INCHES, DPI = (10.0, 7.5), 110
# The margins are fixed, because computing a layout takes as long as drawing the plot.
SUBPLOT_MARGINS = {"left": 0.09, "right": 0.985, "bottom": 0.065, "top": 0.95, "hspace": 0.08}
PANEL_COLUMNS = 1000  # pixel columns of a panel
# If the ratio of the largest to the smallest value exceeds this, a panel gets a logarithmic scale.
LOG_SCALE_RATIO = 50

Curve = tuple[np.ndarray, np.ndarray]  # steps, values


def curve_of(lines: Sequence[Mapping[str, Any]], key: str) -> Curve:
    """Return the steps and the finite values of a key in metrics.jsonl."""
    found = [(line["step"], float(line[key])) for line in lines if key in line]
    steps, values = np.array(found, dtype=np.float64).reshape(-1, 2).T
    finite = np.isfinite(values)
    return steps[finite], values[finite]


def envelope(
    steps: np.ndarray, values: np.ndarray, columns: int = PANEL_COLUMNS
) -> tuple[Curve, Curve]:
    """Return two curves: the lowest and highest value of each pixel column, and the column means.

    If a curve has at most two points per column, both results are this curve, unchanged. `steps`
    must increase.
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


def plot_losses(lines: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw `path`, a PNG, from the lines of metrics.jsonl.

    The global state of matplotlib does not change.
    """
    # These imports take a second, so they are delayed until the end of a run.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=INCHES, dpi=DPI)
    FigureCanvasAgg(figure)
    figure.subplots_adjust(**SUBPLOT_MARGINS)
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
        if len(values) and 0 < values.min() * LOG_SCALE_RATIO < values.max() and key != "lr":
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
    with atomic_path(path) as made:
        figure.savefig(made, format="png", pil_kwargs={"compress_level": 3})
