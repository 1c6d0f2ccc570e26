"""The run's numbers that a JSON may also set."""

from typing import Any

from ..spec.recipe import Recipe
from .schema import check_keys, value_at

# numbers that both the recipe and the JSON may set: field of Recipe -> path in the JSON
SHARED_FIELD_PATHS = {
    "global_batch": "train_batch_size",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "gradient_clipping": "gradient_clipping",
    "lr": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "beta1": "optimizer.params.betas.0",
    "beta2": "optimizer.params.betas.1",
    "eps": "optimizer.params.eps",
}
DEGREE_PATHS = {
    "tp": "tensor_parallel.autotp_size",
    "pp": "pipeline.stages",
    "sp": "sequence_parallel_size",
    "ep": "expert_parallel.autoep_size",
}


def read_degrees(config: dict[str, Any]) -> dict[str, int]:
    """Return the parallel degrees that the JSON sets: tp, pp, sp, ep."""
    return valid_degrees(check_keys(config)[1])


def read_literals(config: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers that the JSON sets: field of `Recipe` -> number, without "auto"."""
    clean = check_keys(config)[1]
    found = {}
    for field, path in SHARED_FIELD_PATHS.items():
        block, _, last = path.rpartition(".")
        value = (
            value_at(clean, block)[int(last)]
            if last.isdigit() and value_at(clean, block)
            else value_at(clean, path)
        )
        # Adafactor's eps is a pair.
        if value is not None and value != "auto" and not isinstance(value, list):
            found[field] = value
    return found


def valid_degrees(clean: dict[str, Any]) -> dict[str, int]:
    found = {axis: value for axis, path in DEGREE_PATHS.items() if (value := value_at(clean, path))}
    if not value_at(clean, "expert_parallel.enabled"):
        found.pop("ep", None)
    return found


def json_or_recipe_number(clean: dict[str, Any], recipe: Recipe | None, field: str) -> int | None:
    """Return the JSON's number for a field, else the recipe's, or None if both are unknown."""
    value = clean.get(SHARED_FIELD_PATHS[field], "auto")
    return value if value != "auto" else getattr(recipe, field, None)


def is_block_enabled(ds_config: dict[str, Any], block: str) -> bool:
    """Return True if a block such as bf16 exists and is enabled."""
    return bool(ds_config.get(block, {}).get("enabled", False))
