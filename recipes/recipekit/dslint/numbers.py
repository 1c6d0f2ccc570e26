"""Reads the numbers of a run that a JSON may state, too."""

from typing import Any

from ..spec.recipe import Recipe
from .schema import at, walk

# Numbers that both the recipe and the JSON may set: field of Recipe -> path in the JSON.
SHARED = {
    "global_batch": "train_batch_size",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "gradient_clipping": "gradient_clipping",
    "lr": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "beta1": "optimizer.params.betas.0",
    "beta2": "optimizer.params.betas.1",
    "eps": "optimizer.params.eps",
}
DEGREES = {
    "tp": "tensor_parallel.autotp_size",
    "pp": "pipeline.stages",
    "sp": "sequence_parallel_size",
    "ep": "expert_parallel.autoep_size",
}


def degrees(config: dict[str, Any]) -> dict[str, int]:
    """Reads the parallel degrees that the JSON sets: tp, pp, sp, ep."""
    return degrees_in(walk(config)[1])


def literals(config: dict[str, Any]) -> dict[str, Any]:
    """Reads the numbers that the JSON sets: field of `Recipe` -> number. An "auto" is no number."""
    clean = walk(config)[1]
    found = {}
    for field, path in SHARED.items():
        block, _, last = path.rpartition(".")
        value = (
            at(clean, block)[int(last)] if last.isdigit() and at(clean, block) else at(clean, path)
        )
        # Adafactor's eps is a pair
        if value is not None and value != "auto" and not isinstance(value, list):
            found[field] = value
    return found


def degrees_in(clean: dict[str, Any]) -> dict[str, int]:
    found = {axis: value for axis, path in DEGREES.items() if (value := at(clean, path))}
    if not at(clean, "expert_parallel.enabled"):
        found.pop("ep", None)
    return found


def number_of(clean: dict[str, Any], recipe: Recipe | None, field: str) -> int | None:
    """Returns the JSON's number of a field, else the recipe's; None if neither is known."""
    value = clean.get(SHARED[field], "auto")
    return value if value != "auto" else getattr(recipe, field, None)


def enabled(ds_config: dict[str, Any], block: str) -> bool:
    """Returns True if a block such as bf16 is there and switched on."""
    return bool(ds_config.get(block, {}).get("enabled", False))
