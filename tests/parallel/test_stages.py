"""Stages of a pipeline, tested one after the other in one process.

The tests cover a stage's results, contents, inputs and counts.
"""

import copy
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recipekit.architectures.families import tiny_config
from recipekit.model.describe import draft_blueprint
from recipekit.model.empty import class_of, config_of
from recipekit.parallel import blueprint as blueprints
from recipekit.parallel import pipeline
from recipekit.parallel.plans import resolve_plans
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh
from recipekit.spec.task_specs import TASKS, Plans

# Five layers over three stages: 2, 2 and 1, or as their sizes require.
LAYERS, ROWS, LENGTH = 5, 2, 11
# The last two layers read keys and values of earlier layers. Every layer reads the embedding.
SHARING = {
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding") * 2][:LAYERS],
    "num_kv_shared_layers": 2,
    "intermediate_size": 64,
    "activation_sparsity_pattern": None,
}
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("pretrain", "llama", {"tie_word_embeddings": False}),
    ("pretrain", "llama", {"tie_word_embeddings": True}),
    ("reward", "llama", {"num_labels": 1, "pad_token_id": 0}),
    ("masked_lm", "bert", {}),
    ("image_classification", "vit", {"image_size": [16, 24], "patch_size": 8, "num_labels": 7}),
    ("pretrain", "gemma3n_text", SHARING),
]
IDS = [
    "untied",
    "tied",
    "reward",
    "bert, both ways",
    "pictures that are no square",
    "gemma3n, shared keys",
]


def model_of(task: str, kind: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = config_of(
        tiny_config(kind, 264, task)
        | {"num_hidden_layers": LAYERS, "layer_types": None}
        | changes
        | {"model_type": kind}
    )
    model = (
        class_of(config, TASKS[task].auto_class)
        ._from_config(config, attn_implementation="eager")
        .eval()
    )
    for parameter in model.parameters():  # make every weight matter
        parameter.data = parameter.data + 0.05 * torch.randn(parameter.shape)
    return model


def inputs_of(task: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if task == "image_classification":
        return {"pixel_values": torch.randn(ROWS, 3, 16, 24, generator=generator)}
    ids = torch.randint(3, 260, (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids, "position_ids": torch.arange(LENGTH).expand(ROWS, -1)}


@pytest.mark.parametrize(("task", "kind", "changes"), MODELS, ids=IDS)
@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_stages_one_after_the_other_are_the_model(
    task: str, kind: str, changes: dict[str, Any], num_stages: int
) -> None:
    facts, model = TASKS[task], model_of(task, kind, changes)
    plans = resolve_plans(model, Plans(), facts.plans)
    made = draft_blueprint(model, plans)
    split = pipeline.split_stages(model, made, num_stages, plans.pp)
    layout = blueprints.Layout(Mesh(pp=num_stages), 0, "torch", "float32", split.bounds)
    given = inputs_of(task)
    with torch.no_grad():
        expected = model(**given, **facts.constants).logits
        passed: Any = tuple(given[name] for name in facts.inputs)
        for stage in range(num_stages):
            own = copy.deepcopy(model)
            pipeline.make_stage(own, split, stage, torch.float32, facts)
            assert own.last_stage == (stage == num_stages - 1)
            names = [name for name, _ in own.named_parameters()]
            assert names == [
                tensor.name
                for tensor in blueprints.tensors_on_rank(made, layout, stage)
                if not tensor.buffer
            ]
            layers = {
                number
                for number, block in enumerate(split.blocks)
                if any(name.startswith(f"{block}.") for name in names)
            }
            assert layers == set(range(split.bounds[stage], split.bounds[stage + 1]))
            passed = own(passed)
    assert torch.allclose(passed, expected, rtol=1e-5, atol=1e-6)


def test_each_stage_is_handed_what_it_needs_of_every_micro_batch() -> None:
    """The last stage gets additional inputs, on every rank of that stage.

    The inputs are in the order of the micro-batches.
    """
    stages = [SimpleNamespace(last_stage=last, stage_kwargs=None) for last in (False, True)]
    net = SimpleNamespace(stages=stages, pending_kwargs=[deque(), deque()])
    asked: list[bool] = []

    def handed(last: bool) -> list[dict[str, torch.Tensor]]:
        asked.append(last)
        return [
            {"attention_mask": torch.tensor(number)}
            | ({"losses_of": torch.tensor(10 + number)} if last else {})
            for number in range(3)
        ]

    pipeline.set_stage_inputs(net, handed, torch.device("cpu"))
    assert asked == [False, True] and [stage.stage_kwargs for stage in stages] == [
        ("attention_mask",),
        ("attention_mask", "losses_of"),
    ]
    assert [
        [tuple(map(int, tensors)) for tensors in waiting] for waiting in net.pending_kwargs
    ] == [
        [(0,), (1,), (2,)],
        [(0, 10), (1, 11), (2, 12)],
    ]
    for phase, expected in ((1, (0, 10)), (0, (0,)), (1, (1, 11))):
        net.active_phase = phase
        [given] = pipeline._append_stage_kwargs(net, ((torch.tensor(7),),))
        assert tuple(map(int, given)) == (7, *expected)


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_a_group_that_any_stage_lacks_is_refused(lacking: int) -> None:
    from recipekit.parallel.param_groups import DEFAULT_GROUPS, ParamGroup

    tensors = tuple(
        blueprints.Tensor(f"layers.{layer}.{name}", (4, 4), group, None, str(layer))
        for layer in range(3)
        for name, group in (("a", 0), ("b", 2))
        if group == 0 or layer != lacking
    )
    made = blueprints.Blueprint(
        tensors, {}, 3, True, groups=(*DEFAULT_GROUPS, ParamGroup(lr_scale=0.5))
    )
    with pytest.raises(ConfigError, match=f"leaves stage {lacking} without the optimizer group"):
        pipeline.check_stages(made, (0, 1, 2, 3))
    pipeline.check_stages(
        blueprints.Blueprint(
            tensors, {}, 3, True, groups=(*DEFAULT_GROUPS, ParamGroup(lr_scale=0.5))
        ),
        (0, 3),
    )


def test_what_belongs_to_the_ends_is_on_them_alone() -> None:
    bounds = (0, 2, 4, 5)
    found = {
        place: [blueprints.on_stage(place, stage, bounds) for stage in range(3)]
        for place in ("first", "last", "ends", "every", "0", "1", "2", "3", "4")
    }
    yes, no = True, False
    assert found == {
        "first": [yes, no, no],
        "last": [no, no, yes],
        "ends": [yes, no, yes],
        "every": [yes, yes, yes],
        "0": [yes, no, no],
        "1": [yes, no, no],
        "2": [no, yes, no],
        "3": [no, yes, no],
        "4": [no, no, yes],
    }
    assert [blueprints.stages_of_rank(rank, 3, "1f1b") for rank in range(3)] == [[0], [1], [2]]
    assert [blueprints.stages_of_rank(rank, 3, "dualpipev") for rank in range(3)] == [
        [0, 5],
        [1, 4],
        [2, 3],
    ]
    assert blueprints.stages_of_rank(0, 1, "dualpipev") == [0]
