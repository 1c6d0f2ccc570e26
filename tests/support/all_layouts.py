"""Train each task in every layout of up to four ranks, compare with plain PyTorch, write a page.

The tests run pairs of these combinations.

    python tests/support/all_layouts.py --results layouts.jsonl --page recipes/LAYOUTS.md
    # only one
    python tests/support/all_layouts.py --results layouts.jsonl --models BERT --page /dev/null

Every layout runs for ten steps in fp32. The limits are the limits of the task's tests: losses,
gradient norms and learning rates of each step, all weights, and the metrics of held-out rows. Each
result becomes a line of the results file. Start the command again after an interruption: layouts
with a result are skipped. The page has the measured values. Exit code: 1 if a layout failed.
"""

import argparse
import datetime
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from pool import FOLDERS, Pools, environment

os.environ.update(environment())
sys.path[:0] = [str(folder) for folder in FOLDERS if str(folder) not in sys.path]


class Model(NamedTuple):
    """A model for a task, and the test that judges its layouts.

    `numbers` names the fields that affect the model's results, such as micro_batch. The reference
    run uses these fields as well.
    """

    task: str
    test: str  # FILE.FUNCTION
    of_case: str = ""  # its name in the test cases
    options: dict[str, Any] = {}  # noqa: RUF012 (of the test)
    tp: bool = True
    pp: bool = True
    numbers: tuple[str, ...] = ()
    splits: tuple[int, ...] = (1, 2)


MASKED, PAIRS = (
    "test_masked.test_masked_language_models_train_like_plain_pytorch",
    "test_preference.check_case",
)
MODELS = {
    "BERT": Model("masked_lm", MASKED, "bert"),
    "ModernBERT": Model("masked_lm", MASKED, "modernbert"),
    "Qwen3 with DPO": Model("preference", PAIRS, "qwen3", {"task": "preference"}),
    "Qwen3 with DPO and LoRA": Model(
        "preference", PAIRS, "qwen3", {"task": "preference", "lora": True}, tp=False, pp=False
    ),
    "Qwen3 as a reward model": Model("reward", PAIRS, "qwen3", {"task": "reward"}),
    "ViT": Model(
        "image_classification", "test_images.test_image_classifiers_train_like_plain_pytorch", "vit"
    ),
    "ResNet": Model(
        "image_classification",
        "test_batch_norm.test_resnet_trains_like_plain_pytorch",
        tp=False,
        numbers=("micro_batch",),
        splits=(2, 4),
    ),
}
# dp, tp, pp
DEGREES = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2))
STAGES = (0, 1, 2, 3)


def cases(model: Model) -> Iterator[Any]:
    from parity import Case

    for stage in STAGES:
        for micro_batch in model.splits:
            for dp, tp, pp in DEGREES:
                if (pp > 1 and (stage > 1 or not model.pp)) or (tp > 1 and not model.tp):
                    continue
                fields = {"micro_batch": micro_batch, "tp": tp, "pp": pp}
                numbers = {name: fields.pop(name) for name in model.numbers}
                yield Case(
                    f"zero{stage} micro_batch {micro_batch} {column(dp, tp, pp)}",
                    dp * tp * pp,
                    f"zero{stage}",
                    fields,
                    numbers,
                    model.of_case,
                )


def column(dp: int, tp: int, pp: int) -> str:
    return "_".join(
        f"{name}{degree}"
        for name, degree in (("dp", dp), ("tp", tp), ("pp", pp))
        if degree > 1 or name == "dp"
    )


def judged(model: Model, pools: Pools, case: Any) -> str:
    """Return "equal", or the last line of the error."""
    import pytest  # these imports take seconds, so they are skipped for --help

    file, _, function = model.test.partition(".")
    judge = getattr(importlib.import_module(file), function)
    with tempfile.TemporaryDirectory(prefix="layout_") as folder:
        try:
            judge(pools, Path(folder), case=case, **model.options)
        except (Exception, pytest.fail.Exception) as error:  # the latter is not an Exception
            message = str(error).strip()
            last_line = message.splitlines()[-1] if message else ""
            return f"{type(error).__name__}: {last_line}"[:300]
    return "equal"


def page(found: dict[str, dict[str, str]], dates: dict[str, str], words: list[str]) -> str:
    columns = [column(*degrees) for degrees in DEGREES]
    lines = []
    for name, cells in found.items():
        wrong = {case: cell for case, cell in cells.items() if cell != "equal"}
        lines += [
            (
                f"\n## {name} (`--task {MODELS[name].task}`): {len(cells) - len(wrong)} of"
                f" {len(cells)} equal\n"
            ),
            f"Its last cell ran on {dates[name]}.\n",
        ]
        lines += [
            "| ZeRO | micro_batch | " + " | ".join(columns) + " |",
            "|---" * (2 + len(columns)) + "|",
        ]
        for stage in STAGES:
            for micro_batch in MODELS[name].splits:
                row = [
                    cells.get(f"zero{stage} micro_batch {micro_batch} {of}", "") for of in columns
                ]
                lines.append(
                    f"| {stage} | {micro_batch} | "
                    + " | ".join(
                        "=" if cell == "equal" else "**no**" if cell else "" for cell in row
                    )
                    + " |"
                )
        lines += [f"- {case}: {cell}" for case, cell in wrong.items()]
    made = (
        f"{os.cpu_count()} CPU cores, torch {version('torch')}, deepspeed {version('deepspeed')},"
        f" transformers {version('transformers')}"
    )
    return f"""# Every layout compared with plain PyTorch

Written by `python tests/support/all_layouts.py {" ".join(words)}`
with {made}.

Each cell is a run of ten steps in fp32. The model is a tiny copy with the parts of the real \
model. `=` means that the
run agrees with plain PyTorch in one process:

- the losses and norms of each step are within 1e-5 (relative)
- all weights are within 1e-5 (for an adapter, all weights of the adapter)
- the metrics of held-out rows are the same

Empty cells cannot run. DeepSpeed has no pipeline under ZeRO-2 and -3. No plan shards the \
convolutions of a ResNet over
ranks. An adapter wraps the full model, so it has no pipeline and no tensor parallelism.
{chr(10).join(lines)}
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--results",
        type=Path,
        required=True,
        help="file of JSON lines; a later run continues with it",
    )
    parser.add_argument("--page", type=Path, required=True, help="the page to write")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)"
    )
    arguments = parser.parse_args()
    arguments.results.touch()
    found: dict[str, dict[str, str]] = {name: {} for name in arguments.models}
    dates = dict.fromkeys(arguments.models, "")
    for line in map(json.loads, arguments.results.read_text().splitlines()):
        if line["model"] in found:
            found[line["model"]][line["case"]], dates[line["model"]] = line["found"], line["date"]
    pools = Pools()
    for name in arguments.models:
        left = [case for case in cases(MODELS[name]) if case.name not in found[name]]
        for number, case in enumerate(left, 1):
            begun = time.monotonic()
            found[name][case.name], dates[name] = (
                judged(MODELS[name], pools, case),
                datetime.date.today().isoformat(),
            )
            with arguments.results.open("a") as results:
                results.write(
                    json.dumps(
                        {
                            "model": name,
                            "case": case.name,
                            "found": found[name][case.name],
                            "date": dates[name],
                        }
                    )
                    + "\n"
                )
            print(
                f"{name}, {number} of {len(left)}: {case.name}: {found[name][case.name]}"
                f" ({time.monotonic() - begun:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
    pools.close()
    words = [str(word) for word in sys.argv[1:]]
    arguments.page.write_text(page(found, dates, words))
    return int(any(cell != "equal" for cells in found.values() for cell in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
