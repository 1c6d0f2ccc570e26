"""The rows of recipes/METRICS.md."""

import re

from pool import ROOT

PAGE = ROOT / "recipes" / "METRICS.md"


# test_masked.py has a run that writes these keys.
OF_MASKS = {"accuracy", "perplexity", "eval_accuracy", "eval_perplexity"}
# test_images.py has a run that writes these keys.
OF_PICTURES = {"samples", "samples_per_s", "eval_accuracy", "eval_top5_accuracy"}

# test_fp16.py has a run that writes these keys.
OF_FP16 = {"skipped", "loss_scale"}

# test_preference.py has runs that write these keys.
OF_PAIRS = {
    f"{before}{name}"
    for before in ("", "eval_")
    for name in ("accuracy", "margin", "rewards/chosen", "rewards/rejected")
}


def page() -> dict[str, tuple[str, str]]:
    """Return each key's unit and meaning from the page's table."""
    rows = re.findall(r"^\| `([\w/]+)` \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(dict((key, unit) for key, unit, _ in rows)) == len(rows)
    return {key: (unit, meaning) for key, unit, meaning in rows}
