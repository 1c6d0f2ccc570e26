"""Model plans: sharding, weight decay, and gradients that must be summed although no plan names
them.
"""

import copy

import pytest
import torch
from built_models import build_model
from recipekit.architectures.families import tiny_config
from recipekit.architectures.lookup import model_types_of
from recipekit.model.describe import draft_blueprint
from recipekit.model.empty import empty_model, enable_recompute
from recipekit.model.probes import partial_gradient_names
from recipekit.optim.groups import parameter_groups
from recipekit.parallel import pipeline
from recipekit.parallel import tensor as tensor_parallel
from recipekit.parallel.partial import partial_gradients
from recipekit.parallel.plans import published_plans, resolve_plans
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.task_specs import TASKS, Plans
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

FACTS, PICTURES = TASKS["pretrain"], TASKS["image_classification"]
GPT2 = Plans(
    pp={
        "*.wte": "first",
        "*.wpe": "first",
        "*.h": "split",
        "*.h.*": "last",
        "*.ln_f": "last",
        "*.absent": "last",
    },
    tp={"*.h.*.attn.c_attn": "colwise", "*.absent": "rowwise"},
    no_decay=("*.wpe.*",),
)


def test_the_recipes_plan_beats_the_published_one_which_beats_the_tasks():
    llama, gpt2 = empty_model(tiny_config("llama", 264)), empty_model(tiny_config("gpt2", 264))
    task = Plans(pp={"*.layers": "split"}, tp={"*.o_proj": "rowwise"})
    own = Plans(pp={"model.norm": "split"}, tp={"model.layers.*.mlp.up_proj": "colwise"})
    assert (
        resolve_plans(llama, own, task).pp == {"model.norm": "split"}
        and resolve_plans(llama, own, task).tp == own.tp
    )
    published = resolve_plans(llama, Plans(), task)
    assert (
        published == published_plans(llama)
        and published.pp["model.layers"] == "split"
        and len(published.tp) > 5
    )
    assert (
        resolve_plans(gpt2, Plans(), Plans()).pp == {} == resolve_plans(gpt2, Plans(), Plans()).tp
    )


def test_a_tasks_patterns_name_what_the_model_has():
    """Modules inside a named module are omitted, and so are names that the model lacks.

    Layer numbers are replaced by `*`.
    """
    model = empty_model(tiny_config("gpt2", 264))
    plans = resolve_plans(model, Plans(), GPT2)
    assert plans.pp == {
        "transformer.wte": "first",
        "transformer.wpe": "first",
        "transformer.h": "split",
        "transformer.ln_f": "last",
    }
    assert plans.tp == {"transformer.h.*.attn.c_attn": "colwise"}
    assert pipeline.pipeline_blocks(model, plans.pp) == tuple(
        f"transformer.h.{number}" for number in range(4)
    )


def test_the_head_of_a_task_that_a_published_plan_does_not_name_is_on_the_last_stage():
    """A decoder with a different head publishes its base model's plan.

    Other tasks must not change the plan.
    """
    facts = TASKS["reward"]
    model = empty_model(
        tiny_config("llama", 264, "reward") | {"num_labels": 1}, auto_class=facts.auto_class
    )
    plans = resolve_plans(model, Plans(), facts.plans)
    assert (
        plans.pp == published_plans(model).pp | {"score": "last"}
        and plans.pp["model.layers"] == "split"
    )
    assert {tensor.name: tensor.place for tensor in draft_blueprint(model, plans).tensors}[
        "score.weight"
    ] == "last"
    assert resolve_plans(model, Plans(pp={"model.layers": "split"}), facts.plans).pp == {
        "model.layers": "split"
    }, "a recipe's own plan stays"
    llama = empty_model(tiny_config("llama", 264))
    assert all(
        resolve_plans(llama, Plans(), each.plans) == published_plans(llama)
        for task, each in TASKS.items()
        if task in ("pretrain", "sft", "preference")
    )


def test_a_name_of_the_recipe_that_the_model_does_not_have_is_refused():
    model = empty_model(tiny_config("llama", 264))
    with pytest.raises(ConfigError, match="must name modules of the model"):
        pipeline.pipeline_blocks(
            model, resolve_plans(model, Plans(pp={"*.layer": "split"}), Plans()).pp
        )
    with pytest.raises(ConfigError, match="is a Embedding, which has no blocks to split"):
        pipeline.pipeline_blocks(
            model, resolve_plans(model, Plans(pp={"model.embed_tokens": "split"}), Plans()).pp
        )
    with pytest.raises(ConfigError, match=r"no tensor-parallel style columns\. Use .*colwise"):
        tensor_parallel.check_tp_plan(model, {"model.layers.*.mlp.up_proj": "columns"})
    with pytest.raises(ConfigError, match="publishes no base_model_tp_plan"):
        tensor_parallel.check_tp_plan(empty_model(tiny_config("gpt2", 264)), {})


def test_counts_that_tp_does_not_divide_are_refused():
    model = nn.Sequential(nn.Linear(6, 4))
    tensor_parallel._divide_counts(model, {"Linear": ("in_features",)}, 3)
    assert model[0].in_features == 2
    with pytest.raises(
        ConfigError, match=r"Linear.out_features: is 4 in 0, which is not divisible by tp = 3"
    ):
        tensor_parallel._divide_counts(model, {"Linear": ("out_features",)}, 3)


def test_what_does_not_decay_is_the_same_to_the_optimizer_and_the_blueprint():
    model = empty_model(tiny_config("gpt2", 264))
    plans = resolve_plans(model, Plans(no_decay=("transformer.wte.weight",)), GPT2)
    decayed, others = parameter_groups(model, draft_blueprint(model, plans).trained)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {"transformer.wpe.weight", "transformer.wte.weight"} <= {
        names[id(parameter)] for parameter in others["params"]
    } and others["weight_decay"] == 0
    assert all(parameter.ndim >= 2 for parameter in decayed["params"])
    groups = {
        tensor.name: tensor.group
        for tensor in draft_blueprint(model, plans).tensors
        if not tensor.buffer
    }
    assert groups == {
        names[id(parameter)]: number
        for number, group in enumerate((decayed, others))
        for parameter in group["params"]
    }


class Nested(nn.Module):
    """A model with blocks in stages, as in ResNet, and with a second stack, as in T5."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleDict(
                {
                    "down": nn.Linear(2, 2),
                    "layers": nn.ModuleList([nn.Linear(2, 2) for _ in range(n)]),
                }
            )
            for n in (1, 2)
        )
        self.decoder = nn.Sequential(nn.Linear(2, 2))


def test_the_blocks_of_several_lists_make_one_chain():
    model = Nested()
    plan = {"stages.0.layers": "split", "stages.1.layers": "split", "decoder": "split"}
    assert pipeline.pipeline_blocks(model, plan) == (
        "stages.0.layers.0",
        "stages.1.layers.0",
        "stages.1.layers.1",
        "decoder.0",
    )


def of_pictures(kind: str) -> PreTrainedModel:
    return empty_model(
        tiny_config(kind, 0, "image_classification"), "eager", auto_class=PICTURES.auto_class
    )


def test_a_type_that_the_plan_of_a_task_does_not_fit_has_none():
    """RoFormer's layers have the same names as BERT's, but it computes its heads in the forward
    pass.

    A plan in the recipe is used. BERT has both plans.
    """
    masked = TASKS["masked_lm"]
    roformer, bert = (
        empty_model(tiny_config(kind, 264, "masked_lm"), "eager", auto_class=masked.auto_class)
        for kind in ("roformer", "bert")
    )
    own = Plans(pp={"roformer.encoder.layer": "split"}, tp={"*.intermediate.dense": "colwise"})
    assert (
        resolve_plans(roformer, Plans(), masked.plans).pp
        == {}
        == resolve_plans(roformer, Plans(), masked.plans).tp
    )
    assert (
        resolve_plans(roformer, own, masked.plans).pp == own.pp
        and resolve_plans(roformer, own, masked.plans).tp == own.tp
    )
    assert (
        resolve_plans(bert, Plans(), masked.plans).pp["bert.encoder.layer"] == "split"
        and len(resolve_plans(bert, Plans(), masked.plans).tp) == 6
    )
    assert set(masked.plans.unfit) <= set(model_types_of(masked.auto_class))


@pytest.mark.parametrize("kind", ["resnet", "regnet"])
def test_stages_that_are_nothing_but_lists_make_one_chain(kind):
    """The plan comes from the task, or a recipe names each list.

    If a recipe names the list of stages, only that list is split, and the stages stay whole.
    """
    model = of_pictures(kind)
    inside = [f"{kind}.encoder.stages.{stage}.layers" for stage in range(4)]
    expected = tuple(f"{name}.{block}" for name in inside for block in range(2))
    plan = resolve_plans(model, Plans(), PICTURES.plans).pp
    assert plan == {f"{kind}.embedder": "first", "classifier": "last"} | dict.fromkeys(
        inside, "split"
    )
    assert (
        pipeline.pipeline_blocks(model, plan)
        == expected
        == pipeline.pipeline_blocks(model, dict.fromkeys(inside, "split"))
    )
    assert pipeline.pipeline_blocks(model, {f"{kind}.encoder.stages": "split"}) == tuple(
        f"{kind}.encoder.stages.{stage}" for stage in range(4)
    )
    places = {
        tensor.name: tensor.place
        for tensor in draft_blueprint(model, resolve_plans(model, Plans(), PICTURES.plans)).tensors
    }
    assert {
        places[f"{kind}.encoder.stages.2.layers.1.layer.0.normalization.{name}"]
        for name in ("weight", "running_mean", "num_batches_tracked")
    } == {"5"}
    assert {place for name, place in places.items() if name.startswith(f"{kind}.embedder.")} == {
        "first"
    }


@pytest.mark.parametrize("kind", ["resnet", "regnet"])
def test_the_stages_of_a_chain_compute_what_the_whole_model_does(kind):
    """For a split before each block, logits and all gradients agree in fp64.

    In fp32 a ReLU with an input near zero could be rounded to either side.
    """
    config, facts = tiny_config(kind, 0, "image_classification"), PICTURES
    recipe = Recipe(model="none", init="random", task="image_classification")
    made = [build_model(recipe, config, None, {}, torch.device("cpu")) for _ in range(3)]
    plan, pictures = (
        resolve_plans(made[0].model, Plans(), facts.plans).pp,
        torch.randn(4, 3, 32, 32, dtype=torch.float64),
    )
    whole = made[0].model.double()
    expected = whole(pictures).logits
    expected.square().sum().backward()
    for border in range(1, 8):
        stages = [copy.deepcopy(one.model).double() for one in made[1:]]
        split = pipeline.StageSplit(
            pipeline.pipeline_blocks(whole, plan),
            tuple(name for name in plan if plan[name] == "first"),
            ("classifier",),
            (0, border, 8),
            False,
        )
        for stage, model in enumerate(stages):
            pipeline.make_stage(model, split, stage, torch.float64, facts)
        sent = stages[0]((pictures,))
        received = tuple(value.detach().requires_grad_() for value in sent)
        logits = stages[1](received)
        logits.square().sum().backward()
        torch.autograd.backward(sent, [value.grad for value in received])
        assert torch.allclose(logits, expected, rtol=1e-12)
        gradients = {
            name: value.grad
            for model in stages
            for name, value in model.named_parameters()
            if value.grad is not None
        }
        assert gradients.keys() == {name for name, _ in whole.named_parameters()}
        assert all(
            (value.grad - gradients[name]).norm() <= 1e-11 * value.grad.norm()
            for name, value in whole.named_parameters()
        )


@pytest.mark.parametrize("kind", ["convnext", "swin", "hgnet_v2", "segformer", "hiera"])
def test_stages_with_modules_between_their_blocks_make_no_chain(kind):
    assert resolve_plans(of_pictures(kind), Plans(), PICTURES.plans).pp == {}


def test_what_transformers_does_not_draw_is_drawn_as_torch_does_it():
    """In transformers 5.22, the biases of RegNet's convolutions have no initialiser.

    Without an initialiser the biases would contain uninitialised memory.
    """
    recipe = Recipe(model="none", init="random", task="image_classification")
    config = tiny_config("regnet", 0, "image_classification")
    one, other = (
        dict(build_model(recipe, config, None, {}, torch.device("cpu")).model.named_parameters())
        for _ in range(2)
    )
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    biases = [name for name in one if name.endswith((".attention.0.bias", ".attention.2.bias"))]
    bounds = [one[name.replace("bias", "weight")].shape[1] ** -0.5 for name in biases]
    assert len(biases) == 16 and all(
        0 < one[name].abs().max() <= bound for name, bound in zip(biases, bounds, strict=True)
    )


def kept_by(**how: int) -> tuple[int, list[torch.Tensor | None]]:
    """Return (bytes that ResNet's forward pass keeps for its backward pass, gradients).

    Both values come from plain PyTorch.
    """
    config = tiny_config("resnet", 0, "image_classification")
    recipe = Recipe(model="none", init="random", task="image_classification", **how)
    model = build_model(recipe, config, None, {}, torch.device("cpu")).model
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: sizes.append(tensor.nbytes) or tensor, lambda tensor: tensor
    ):
        loss = model(
            torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        ).logits.sum()
    loss.backward()
    return sum(sizes), [parameter.grad for parameter in model.parameters()]


def test_layers_are_recomputed_where_transformers_has_no_such_layers():
    """If every third block is recomputed, only the input of that block is kept.

    A model without a list of layers must be rejected.
    """
    (whole, expected), (less, gradients), (least, others) = (
        kept_by(),
        kept_by(recompute_every=3),
        kept_by(activation_checkpointing=True),
    )
    assert (
        0 < least < 0.8 * less < 0.8 * 0.8 * whole
        and all(map(torch.equal, gradients, expected))
        and all(map(torch.equal, others, expected))
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"recompute_every = 1: transformers recomputes no layers of a .*, and it has no list of"
            r" layers"
        ),
    ):
        enable_recompute(Small(twice=False), 1)


def test_a_hollow_module_has_no_parameters_and_no_saved_buffers():
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    pipeline.remove_parameters(module, torch.bfloat16, lambda x: x)
    assert not list(module.parameters()) and not module.state_dict() and module("in") == "in"
    assert module[0].weight.dtype == torch.bfloat16 and module[1].running_mean.shape == (3,)
    module.load_state_dict({})  # torch's BatchNorm adds a missing value


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", []),
        ("apertus", ["model.layers.*.mlp.act_fn.alpha_n", "model.layers.*.mlp.act_fn.alpha_p"]),
        ("qwen3", []),  # its plan names the norms inside its heads
        ("qwen2_moe", []),  # a shared expert behind a gate that is unsharded on every rank
        ("deepseek_v3", []),  # part of a projection bypasses the column-wise layer that follows
        ("gpt_oss", []),
        ("llama4_text", []),  # writes into the input of its router
        (
            "doge",
            ["model.layers.*.self_attn.k_norm.weight", "model.layers.*.self_attn.q_norm.weight"],
        ),
        ("gemma3n_text", []),  # its activation passes a shard of all columns on
        ("inkling_text", []),  # experts that share an input sum its gradient
    ],
)
def test_gradients_that_have_to_be_summed(family, expected):
    """The test analyses the graph of a small copy.

    tests/loop/test_parity.py runs Apertus on two ranks. recipes/SUPPORT.md lists every family.
    """
    model_config = tiny_config(family, 264)
    assert (
        sorted(
            partial_gradient_names(
                model_config, FACTS, published_plans(empty_model(model_config, "eager"))
            )
        )
        == expected
    )


def test_a_published_plan_is_corrected():
    """A fused gate and up projection has two blocks, and each of them is sharded."""
    model_config = tiny_config("inkling_text", 264)
    model = empty_model(model_config, "eager")
    plan = published_plans(model).tp
    assert plan["model.layers.*.mlp.experts.gate_up_proj"] == "packed_colwise"
    assert plan["model.layers.*.mlp.shared_experts"] == "shared_experts"
    rules = tensor_parallel.sharding_rules(model, plan)
    assert {rule for name, rule in rules.items() if name.endswith("experts.gate_up_proj")} == {
        (1, 2)
    }
    assert not any("embed_tokens" in name for name in rules), "a norm is inside the embedding"
    doge = published_plans(empty_model(tiny_config("doge", 264), "eager")).tp
    assert doge["model.layers.*.self_attn.A"] == "colwise"


class Small(PreTrainedModel):
    """Modules up (column-wise), `own` without a plan, and down (row-wise).

    With `twice` the model also uses `own` after the sum.
    """

    def __init__(self, twice: bool):
        super().__init__(PreTrainedConfig())
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.own, self.after, self.twice = (
            nn.Parameter(torch.ones(1)),
            nn.Parameter(torch.ones(1)),
            twice,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.up(x) * self.own) * self.after
        return y * self.own if self.twice else y


PLAN = {"up": "colwise", "down": "rowwise"}


def test_a_parameter_between_two_cut_layers_gets_a_part():
    assert partial_gradients(Small(twice=False), PLAN, lambda model: model(torch.ones(2, 4))) == {
        "own"
    }
    assert (
        partial_gradients(
            Small(twice=False),
            {"down": "rowwise_split_input"},
            lambda model: model(torch.ones(2, 4)),
        )
        == frozenset()
    )


def test_a_parameter_on_both_sides_of_a_sum_is_refused():
    with pytest.raises(ConfigError, match="uses own both before and behind a sum over the ranks"):
        partial_gradients(Small(twice=True), PLAN, lambda model: model(torch.ones(2, 4)))


def test_a_model_of_which_no_small_copy_runs_is_refused_under_tp():
    model_config = tiny_config("gemma4_unified_assistant", 264)
    with pytest.raises(
        ConfigError,
        match=r"no small copy of a .* runs, which shows what tensor parallelism has to sum",
    ):
        partial_gradient_names(
            model_config, FACTS, published_plans(empty_model(model_config)), "some/model"
        )
