"""Train a tiny Llama in thirteen layouts and with plain PyTorch, and draw the losses of all.

    python tests/support/layout_curves.py --record tests/support/layout_curves.json \\
        --picture recipes/layouts.png
    python tests/support/layout_curves.py --record tests/support/layout_curves.json \\
        --picture recipes/layouts.png --redraw

All runs start from the same weights and read the same rows, in fp32. The record has the losses of
each run, the date and the versions. With --redraw, nothing is trained.
"""

import argparse
import datetime
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pool import FOLDERS, Pools, environment

os.environ.update(environment())
sys.path[:0] = [str(folder) for folder in FOLDERS if str(folder) not in sys.path]

PLAIN = "plain PyTorch, one process"
STEPS = 20
NUMBERS = {"steps": STEPS, "lr": 1e-3, "warmup_steps": 4, "eval_every": 0}
TP2, PP2, TP2_PP2 = {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}
LAYOUTS: dict[str, tuple[int, str, dict[str, int]]] = {  # name -> ranks, JSON, degrees
    **{f"zero{stage} dp2": (2, f"zero{stage}", {}) for stage in range(4)},
    **{f"zero{stage} tp2": (2, f"zero{stage}", TP2) for stage in range(4)},
    **{f"zero{stage} dp2 tp2": (4, f"zero{stage}", TP2) for stage in (1, 3)},
    "zero1 pp2": (2, "zero1", PP2),
    "zero1 dp2 pp2": (4, "zero1", PP2),
    "zero1 tp2 pp2": (4, "zero1", TP2_PP2),
}


def train() -> dict[str, list[float]]:
    """Return each step's loss in plain PyTorch and in each layout."""
    import parity  # seconds of imports, which --help and --redraw do not need
    import shipped_jsons
    from recipekit.plan import resolve_run
    from recipekit.spec.command import parse
    from recipekit.spec.recipe import Recipe
    from reference import train_plain

    recipe = parity.recipe_for("untied", attention="sdpa", **NUMBERS)
    fields = vars(recipe) | {"ds_config": shipped_jsons.strategy("zero0"), "out": "/nonexistent"}
    plan = resolve_run(
        parse(Recipe(**fields), Path("parity.py"), ["--tiny", *parity.pinned(recipe)])
    )
    assert plan.model_config is not None
    losses = {PLAIN: train_plain(plan.recipe, plan.model_config, STEPS).losses}

    pools = Pools()
    for name, (world, file, degrees) in LAYOUTS.items():
        recipe = parity.recipe_for("untied", **NUMBERS, **parity.accumulating(world, **degrees))
        with tempfile.TemporaryDirectory(prefix="curves_") as out:
            codes = pools.run(
                world,
                parity.train_in_layout,
                recipe=recipe,
                config=shipped_jsons.strategy(file),
                out=out,
            )
            assert codes == [0] * world, name
            losses[name] = [
                json.loads(line)["loss"]
                for line in (Path(out) / "metrics.jsonl").read_text().splitlines()
            ]
        print(
            f"{name}: largest difference {max(differences(losses[PLAIN], losses[name])):.1e}",
            file=sys.stderr,
            flush=True,
        )
    pools.close()
    return losses


def differences(plain: list[float], other: list[float]) -> list[float]:
    """Return the relative difference of the loss at each step."""
    return [abs(theirs / ours - 1) for ours, theirs in zip(plain, other, strict=True)]


def draw(record: dict[str, Any], path: Path) -> None:
    """Plot the losses and, below them, their relative differences from plain PyTorch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    losses: dict[str, list[float]] = record["losses"]
    figure = Figure(figsize=(9, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps = range(1, len(losses[PLAIN]) + 1)
    above.plot(steps, losses[PLAIN], color="black", linewidth=5, alpha=0.25, label=PLAIN)
    below.axhline(
        1e-5, color="black", linestyle="--", linewidth=1, label="limit of the tests, 1e-5"
    )

    for number, (name, values) in enumerate(
        (name, values) for name, values in losses.items() if name != PLAIN
    ):
        style = {
            "color": f"C{number % 10}",
            "linestyle": "-" if number < 10 else ":",
            "linewidth": 1,
        }
        above.plot(steps, values, label=name, **style)
        below.semilogy(
            steps, [max(value, 1e-9) for value in differences(losses[PLAIN], values)], **style
        )

    above.set_title(f"A tiny Llama in {len(losses) - 1} layouts: one loss curve", loc="left")
    above.set_ylabel("loss")
    below.set(xlabel="step", ylabel="relative difference", ylim=(1e-9, 1e-4))
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.legend(loc="upper left", fontsize=8)
    figure.legend(*above.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--record", type=Path, required=True, help="the JSON file with the losses")
    parser.add_argument("--picture", type=Path, required=True, help="the PNG file")
    parser.add_argument(
        "--redraw", action="store_true", help="draw the losses of the record; train nothing"
    )
    arguments = parser.parse_args()
    if not arguments.redraw:
        versions = {name: version(name) for name in ("torch", "deepspeed", "transformers")}
        record = {
            "date": datetime.date.today().isoformat(),
            "versions": versions,
            "losses": train(),
        }
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")
    draw(json.loads(arguments.record.read_text()), arguments.picture)


if __name__ == "__main__":
    main()
