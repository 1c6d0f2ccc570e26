"""A DeepSpeed JSON as a script reads it, and the blocks that most of them hold.

Batch sizes and buckets are small, so that two CPU cores can run them.
"""

import json
from dataclasses import dataclass
from typing import Any

import hjson


@dataclass(frozen=True)
class Case:
    """A JSON, or the text of a file, and the layout of the script that reads it.

    `after` says who posts such a file.
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
        """As DeepSpeed reads the file: of a key written twice the last value, {} if it holds no
        block.
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
    """The least that trains at a ZeRO stage."""
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
