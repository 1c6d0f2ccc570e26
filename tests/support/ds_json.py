"""A DeepSpeed JSON as a script reads it, and the blocks that most of these JSONs contain.

Batch sizes and buckets are small enough for two CPU cores.
"""

import json
from dataclasses import dataclass
from typing import Any

import hjson


@dataclass(frozen=True)
class Case:
    """A JSON, or a file's text, and the layout of the script that reads it.

    `after` names the project that posts such files.
    """

    after: str
    config: dict[str, Any] | str
    world: int = 1
    pp: int = 1

    @property
    def text(self) -> str:
        return self.config if isinstance(self.config, str) else json.dumps(self.config, indent=1)

    @property
    def parsed(self) -> dict[str, Any]:
        """Return the file's contents as DeepSpeed reads them, or {} if the file contains no block.

        If a key occurs twice, its last value is used.
        """
        try:
            found = json.loads(json.dumps(hjson.loads(self.text)))
        except (ValueError, IndexError):
            return {}
        return found if isinstance(found, dict) else {}


ADAMW = {
    "type": "AdamW",
    "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01},
}
ADAM = {"type": "Adam", "params": {"lr": 1.5e-4}}
BF16 = {"enabled": True}
BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}


def plain(stage: int, **more: Any) -> dict[str, Any]:
    """Return the smallest JSON that can train at a ZeRO stage."""
    return zero(stage, {}, **more)


def zero(stage: int, more: dict[str, Any], **top: Any) -> dict[str, Any]:
    buckets = {"reduce_bucket_size": 1e6} if stage else {}  # the default allocates 2 GB
    return {
        **BATCH,
        "optimizer": ADAMW,
        "zero_optimization": {"stage": stage, **buckets, **more},
        **top,
    }


def adamw(**more: Any) -> dict[str, Any]:
    return {"type": "AdamW", "params": {**ADAMW["params"], **more}}


def schedule(name: str, **params: Any) -> dict[str, Any]:
    return plain(1, scheduler={"type": name, "params": params})
