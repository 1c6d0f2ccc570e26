"""The planner's terms for a small model with odd sizes, for every shipped JSON. The layouts and
loads are ones that no JSON has by default.

    # write planned_terms.json, after a formula has changed and test_memory.py has compared it with
    # real ranks
    python tests/support/planned_terms.py

tests/planner/test_memory.py compares the terms with the live storages of real ranks. The numbers
here show at once which formula a change affects.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipekit.parallel.blueprint import Blueprint, Layout, Tensor
from recipekit.parallel.param_groups import DEFAULT_GROUPS, ParamGroup
from recipekit.planner.memory import rank_terms
from recipekit.spec.memory_terms import MemoryRequest, Term
from recipekit.spec.mesh import Mesh

RECORDED = Path(__file__).parent / "planned_terms.json"
JSONS = Path(__file__).resolve().parents[2] / "ds_configs"
WIDTH, WORDS, LAYERS = 12, 101, 5
LARGE = 3  # the layer that is larger than the others and not at the end of a stage
SMALL = {  # small enough that each limit takes effect
    "reduce_bucket_size": 700,
    "sub_group_size": 500,
    "stage3_max_live_parameters": 900,
    "stage3_param_persistence_threshold": 200,
}
LOAD = MemoryRequest(micro_batch=3, seq_len=7, accumulation=2, vocabulary=WORDS)


def tensors(matrices: bool) -> tuple[Tensor, ...]:
    """Return an embedding, several layers, a frozen weight, a buffer, a norm and a head.

    One of the layers is wider than the others.
    """
    group = 2 if matrices else 0
    found = [Tensor("model.embed.weight", (WORDS, WIDTH), 0, place="first")]
    for layer in range(LAYERS):
        inner, name = 34 if layer == LARGE else 26, f"model.layers.{layer}"
        found += [
            Tensor(f"{name}.q.weight", (18, WIDTH), group, (0, 1), str(layer)),
            Tensor(f"{name}.up.weight", (inner, WIDTH), group, (0, 2), str(layer)),
            Tensor(f"{name}.down.weight", (WIDTH, inner // 2), group, (1, 1), str(layer)),
            Tensor(f"{name}.old.weight", (5, WIDTH), None, None, str(layer)),
            Tensor(f"{name}.norm.weight", (WIDTH,), 1, None, str(layer)),
        ]
    found += [
        Tensor("model.norm.weight", (WIDTH,), 1, place="last"),
        Tensor("head.weight", (WORDS, WIDTH), 0, place="last"),
    ]
    return (*found, Tensor("model.turns", (9,), None, buffer="float32"))


def blueprint(matrices: bool = False) -> Blueprint:
    return Blueprint(
        tensors(matrices),
        {},
        LAYERS,
        True,
        groups=(*DEFAULT_GROUPS, ParamGroup(matrix=True)) if matrices else DEFAULT_GROUPS,
    )


def experts() -> Blueprint:
    more = [
        Tensor(
            f"model.layers.{layer}.mlp.experts.up", (4, WIDTH, 10), 0, None, str(layer), expert=True
        )
        for layer in range(LAYERS)
    ]
    return Blueprint((*tensors(False), *more), {}, LAYERS, True)


LAYOUTS = {
    "dp1": Layout(Mesh(), 0, "torch", "float32"),
    "dp3": Layout(Mesh(dp=3), 0, "torch", "float32"),
    "tp2 dp2": Layout(Mesh(dp=2, tp=2), 0, "torch", "float32"),
    "sp2 dp2": Layout(Mesh(dp=2, sp=2), 0, "torch", "float32"),
    "pp3": Layout(Mesh(pp=3), 0, "torch", "float32", (0, 2, 4, 5)),
    "pp2 dp2": Layout(Mesh(dp=2, pp=2), 0, "torch", "float32", (0, 3, 5)),
    "dualpipev": Layout(Mesh(pp=2), 0, "torch", "float32", (0, 1, 2, 4, 5), "dualpipev"),
    "ep2": Layout(Mesh(dp=4, ep=2), 0, "torch", "float32"),
}
LOADS = {
    "one micro-batch": replace(LOAD, accumulation=1),
    "chunked": replace(LOAD, chunked=True, vocabulary=150_000, micro_batch=200),
    "background": replace(LOAD, background=True),
    "adapter": replace(LOAD, adapted=True),
    "rounded pins": replace(LOAD, exact_pins=False),
    "no head": replace(LOAD, vocabulary=0),
}


def config_of(file: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((JSONS / file).read_text())
    zero = config.get("zero_optimization", {})
    return config | {
        "zero_optimization": (
            zero
            | {
                name: value
                for name, value in SMALL.items()
                if zero.get("stage", 0) > (2 if "stage3" in name else 0)
            }
        )
    }


def without_half(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in ("bf16", "data_types")}


def cases() -> dict[str, list[Term]]:
    """Return each case's terms by the case's name."""
    found: dict[str, list[Term]] = {}
    for file in sorted(path.name for path in JSONS.glob("*.json")):
        config = config_of(file)
        made = blueprint("muon" in file)
        stage = config["zero_optimization"].get("stage", 0)
        for name in ("dp1", "dp3", "tp2 dp2", "sp2 dp2"):
            found[f"{file}, {name}"] = rank_terms(made, LAYOUTS[name], config, LOAD)
        found[f"{file}, dp3, fp32"] = rank_terms(made, LAYOUTS["dp3"], without_half(config), LOAD)
        for name, load in LOADS.items():
            found[f"{file}, dp3, {name}"] = rank_terms(made, LAYOUTS["dp3"], config, load)
        for name in ("pp3", "pp2 dp2", "dualpipev") if stage < 2 else ():
            for pp_rank in range(LAYOUTS[name].mesh.pp):
                found[f"{file}, {name}, stage {pp_rank}"] = rank_terms(
                    made, LAYOUTS[name], config, LOAD, pp_rank
                )
    for name in ("dp1", "dp3"):
        found[f"zero3.json, {name}, full layers"] = rank_terms(
            blueprint(), LAYOUTS[name], config_of("zero3.json"), replace(LOAD, full_layers=True)
        )
    for file in ("zero1.json", "zero2.json", "zero3.json"):
        found[f"{file}, experts, ep2"] = rank_terms(
            experts(), LAYOUTS["ep2"], config_of(file), LOAD
        )
        for key, value in (("overlap_comm", True), ("contiguous_gradients", False)):
            config = config_of(file)
            config["zero_optimization"] = config["zero_optimization"] | {key: value}
            found[f"{file}, dp3, {key} {value}"] = rank_terms(
                blueprint(), LAYOUTS["dp3"], config, LOAD
            )
    for engine in ("ddp", "fsdp2"):
        for file in ("zero0.json", "zero2_adafactor.json", "zero2_muon.json"):
            for name, load in (
                ("", LOAD),
                (", half", replace(LOAD, half=True)),
                (", one micro-batch", LOADS["one micro-batch"]),
            ):
                config = without_half(config_of(file)) | {"zero_optimization": {"stage": 0}}
                found[f"{engine}, {file}, dp3{name}"] = rank_terms(
                    blueprint("muon" in file), LAYOUTS["dp3"], config, replace(load, engine=engine)
                )
    return found


def written(terms: list[Term]) -> dict[str, str]:
    """Return the terms by subject: place, bytes, moments, pinned bytes, and whether the size is a
    bound.
    """
    return {
        f"{term.what} [{number}]": (
            f"{term.place} {term.size} {'+'.join(term.moments) or 'always'} {term.pinned}"
            f" {'bound' if term.bound else 'exact'}"
        )
        for number, term in enumerate(terms)
    }


if __name__ == "__main__":
    RECORDED.write_text(
        json.dumps({name: written(terms) for name, terms in cases().items()}, indent=0) + "\n"
    )
