"""All decisions about a run's model, each made once and stored in one value.

`resolve_model` in planner/resolve.py creates the value before any large object exists. The memory
check, the builder, the compiler, the saver, run.json, a dry run and the doctor read it.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..parallel.blueprint import Blueprint, Layout
from ..parallel.pipeline import StageSplit
from ..spec.memory_terms import ACCELERATOR, STEP_MOMENTS, MemoryRequest, Term, fullest, total_bytes
from ..spec.task_specs import Plans
from .flops import Flops
from .fp32_parameters import NO_FP32_PARAMETERS, Fp32Parameters
from .loss_path import LossPath

LAYERS, PARTS, UNCOMPILED = "layers", "parts", "off"  # scopes of torch.compile


@dataclass(frozen=True)
class CompileChoice:
    """The parts of the model that torch.compile compiles, and the reason for the choice.

    `scope` is LAYERS (full layers), PARTS (norms, rotary embeddings) or UNCOMPILED. If the compiler
    fails on any rank, the run compiles nothing.
    """

    scope: str
    why: str


@dataclass(frozen=True)
class ModelPlan:
    """The decisions about a model.

    - `model_config`: the config.json from which the model is constructed.
    - `architecture`: the name of the model's class in transformers.
    - `attention_note`: the reason if the attention is not varlen, or its kernels.
    - `plans`: the plans for the model without its adapter.
    - `blueprint`: the model's tensors, including the adapter's.
    - `layout`: complete to the extent that counting requires.
    - `split`: None without a pipeline.
    - `summed`: parameters whose gradients the tensor-parallel ranks sum.
    - `has_batch_norm`: True if the model contains BatchNorm, which model/batch_norm.py computes.
    - `terms`: the memory terms for one rank of each pipeline stage.
    - `activations`: empty if no formula predicts them.
    - `flops`: None if the FLOPs cannot be counted or the device's peak is unknown.
    - `fp32`: the parameters that stay in fp32 in half precision.
    """

    model_config: dict[str, Any]
    architecture: str
    attention: str
    attention_note: str
    loss_path: LossPath
    compile: CompileChoice
    plans: Plans
    blueprint: Blueprint
    layout: Layout
    split: StageSplit | None
    summed: frozenset[str]
    has_batch_norm: bool
    load: MemoryRequest
    terms: tuple[tuple[Term, ...], ...]
    activations: tuple[Term, ...]
    flops: Flops | None
    fp32: Fp32Parameters = NO_FP32_PARAMETERS

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the lines for the user about these decisions."""
        return tuple(filter(None, (self.attention_note, self.fp32.note)))

    @property
    def fullest(self) -> Sequence[Term]:
        """Return the memory terms of the rank that uses the most memory."""
        return fullest(self.terms)

    def as_json(self) -> dict[str, Any]:
        """Return the decisions as run.json stores them.

        Tensors are replaced by counts and a digest, and memory terms by sums in bytes.
        """
        return {
            "architecture": self.architecture,
            "attention": self.attention,
            "attention_note": self.attention_note,
            "loss_path": {
                "in_chunks": self.loss_path.chunked,
                "why_full": self.loss_path.fallback_reason,
            },
            "compile": dataclasses.asdict(self.compile),
            "plans": {
                "pp": dict(self.plans.pp),
                "tp": dict(self.plans.tp),
                "no_decay": list(self.plans.no_decay),
                "matrices": list(self.plans.matrices),
            },
            "blueprint": _summary(self.blueprint),
            "layout": {"bounds": list(self.layout.bounds), "schedule": self.layout.schedule},
            "split": list(self.split.bounds) if self.split else None,
            "summed": sorted(self.summed),
            "has_batch_norm": self.has_batch_norm,
            "fp32_parameters": {"kept": len(self.fp32.names), "note": self.fp32.note},
            "load": dataclasses.asdict(self.load),
            "memory": [_bytes_of(terms) for terms in self.terms],
            "activations": _bytes_of(self.activations, bounds=True),
        }


def _summary(blueprint: Blueprint) -> dict[str, Any]:
    """Return the number of tensors and elements in a blueprint, and the blueprint's sha256."""
    parameters = [tensor for tensor in blueprint.tensors if not tensor.buffer]
    text = json.dumps(blueprint.to_json(), sort_keys=True)
    return {
        "parameters": len(parameters),
        "buffers": len(blueprint.tensors) - len(parameters),
        "elements": sum(tensor.numel for tensor in parameters),
        "trained": sum(tensor.numel for tensor in parameters if tensor.group is not None),
        "layers": blueprint.num_layers,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def _bytes_of(terms: Sequence[Term], bounds: bool = False) -> dict[str, dict[str, int]]:
    """Return place -> moment of a step -> bytes. If `bounds`, include upper bounds."""
    places = dict.fromkeys(term.place for term in terms)
    return {
        place: {moment: total_bytes(terms, place, moment, bounds) for moment in STEP_MOMENTS}
        for place in places
    }


def planned_memory(model_plan: ModelPlan) -> dict[str, int]:
    """Return the planned memory in bytes on the device of the rank that uses the most."""
    terms, activations = model_plan.fullest, model_plan.activations
    found = {"states": total_bytes(terms, ACCELERATOR)}
    if activations:
        both = total_bytes([*terms, *activations], ACCELERATOR, bounds=True)
        found["with_activations"] = both
    return found


def changed_choices(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each choice that differs between two `as_json()` results.

    The choices are attention, loss path and compile. A choice that the older run did not store is
    not compared.
    """
    old, new = _named_choices(before), _named_choices(now)
    return [
        f"resume: {name} was {old[name]} and is now {new[name]}"
        for name in old
        if name in new and old[name] != new[name]
    ]


def _named_choices(stored: Mapping[str, Any]) -> dict[str, str]:
    """Return the compared choices in an `as_json()` result in words, without missing choices."""
    found = {}
    match stored:
        case {"attention": str(attention)}:
            found["attention"] = attention
    match stored:
        case {"loss_path": {"in_chunks": bool(in_chunks)}}:
            found["the loss"] = "computed in chunks" if in_chunks else "computed from full logits"
    match stored:
        case {"compile": {"scope": str(scope)}}:
            found["compile"] = scope
    return found
