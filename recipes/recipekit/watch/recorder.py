"""Collectives of this rank, from the flight recorder of torch.

torch 2.13 records the collectives of NCCL and gloo, but not send and receive of gloo. Its buffer
must have a size before the first process group is created (runtime/environment.py).
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NEWEST = 200  # entries in a file


@dataclass(frozen=True)
class Collective:
    """A collective on one rank. `number` counts the collectives of a group on this rank."""

    group: str  # torch's name of the group
    label: str  # the description of the group, or ""
    number: int
    name: str  # such as "all_reduce"
    sizes: str  # of the inputs
    open: bool  # begun, but not complete

    def __str__(self) -> str:
        return f"{self.name} {self.number} of {self.label or f'group {self.group}'}"


def read_recorder() -> list[dict[str, Any]]:
    """Return the latest entries of the recorder, the oldest first; [] if torch is not loaded."""
    bindings = sys.modules.get("torch._C._distributed_c10d")
    entries: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if dump := getattr(bindings, name, None):
            entries += json.loads(dump(True, False)).get("entries", [])
    return entries[-NEWEST:]


def collectives_of(entries: Sequence[Mapping[str, Any]]) -> list[Collective]:
    """Return the collectives among the entries of a recorder, in the same order."""
    return [
        Collective(
            group=str(entry["process_group"][0]),
            label=label_of(str(entry["process_group"][1])),
            number=entry["collective_seq_id"],
            name=str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
            sizes=json.dumps(entry.get("input_sizes")),
            open=not entry["retired"] and entry["state"] != "completed",
        )
        for entry in entries
        if not entry["is_p2p"]
    ]


def label_of(description: str) -> str:
    """Return the description of a group for a message, or "" for a group without one."""
    return {"undefined": "", "default_pg": "all ranks"}.get(description, description)


def group_members() -> dict[str, list[int]]:
    """Return the ranks of each process group of this rank, by torch's name of the group."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    if world is None:
        return {}
    return {
        str(name): sorted(world.pg_group_ranks.get(group, {}))
        for group, name in list(world.pg_names.items())
    }
