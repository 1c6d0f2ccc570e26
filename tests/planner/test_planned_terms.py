"""A rank's memory terms compared with recorded values.

The layouts have stages, tensor ranks and requests that no recipe has by default.
"""

import json
from dataclasses import replace

import pytest
from planned_terms import LAYOUTS, LOAD, RECORDED, blueprint, cases, config_of, written
from recipekit.parallel.blueprint import on_stage
from recipekit.planner.memory import rank_terms
from recipekit.spec.memory_terms import ACCELERATOR, fullest, total_bytes


def test_every_term_is_the_recorded_one() -> None:
    recorded, found = (
        json.loads(RECORDED.read_text()),
        {name: written(terms) for name, terms in cases().items()},
    )
    assert found.keys() == recorded.keys()
    wrong = {
        f"{name}: {what}": (found[name].get(what), recorded[name].get(what))
        for name in recorded
        for what in {**recorded[name], **found[name]}
        if found[name].get(what) != recorded[name].get(what)
    }
    assert not wrong, (
        f"{len(wrong)} terms differ (found, recorded): {dict(list(wrong.items())[:5])}"
    )


@pytest.mark.parametrize("name", ["pp3", "pp2 dp2", "dualpipev"])
def test_stages_hold_the_model_once(name: str) -> None:
    """The stages' parameters add up to the model's, and each stage has its own layers.

    Logits are on the stage that computes the last layer's output.
    """
    layout, made, config = (
        LAYOUTS[name],
        blueprint(),
        config_of("zero0.json") | {"bf16": {"enabled": False}},
    )
    stages = [rank_terms(made, layout, config, LOAD, rank) for rank in range(layout.mesh.pp)]
    sizes = [{term.what: term.size for term in terms} for terms in stages]
    [whole] = [
        term.size
        for term in rank_terms(made, LAYOUTS["dp1"], config, LOAD)
        if term.what.startswith("parameters")
    ]
    assert sum(size["parameters, fp32"] for size in sizes) == whole
    logits = [size.get("logits and their gradient", 0) for size in sizes]
    expected = 3 * 7 * 101 * 12
    assert logits == (
        [expected] * 2 if name == "dualpipev" else [0] * (layout.mesh.pp - 1) + [expected]
    )
    if name == "pp3":
        own = [
            4
            * sum(
                tensor.numel
                for tensor in made.tensors
                if not tensor.buffer and on_stage(tensor.place, stage, layout.bounds)
            )
            for stage in range(3)
        ]
        assert [size["parameters, fp32"] for size in sizes] == own and len(set(own)) == 3


def test_the_fullest_rank_may_be_on_any_stage() -> None:
    """Each stage in turn has a layer that is much larger than all other layers."""
    layout, config, base = LAYOUTS["pp3"], config_of("zero1.json"), blueprint()
    for stage, layer in enumerate((0, 3, 4)):
        large = [
            replace(tensor, shape=(500, 500))
            if tensor.name == f"model.layers.{layer}.q.weight"
            else tensor
            for tensor in base.tensors
        ]
        made = replace(base, tensors=tuple(large))
        stages = [rank_terms(made, layout, config, LOAD, rank) for rank in range(3)]
        totals = [total_bytes(terms, ACCELERATOR) for terms in stages]
        assert fullest(stages) is stages[stage] and totals.index(max(totals)) == stage
