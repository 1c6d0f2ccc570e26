"""transformers: attributes of models, configs and plan styles that we replace, and differences
between its releases.
"""

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.modeling_layers import GradientCheckpointingLayer


def set_attention(config: "PreTrainedConfig", attention: str) -> None:
    """Set the attention implementation in a config.

    Why: A config has no public name for this setting, and a model's `set_attn_implementation` loads
        kernels.
    Version: transformers 5.22.2
    Test: tests/compat/test_transformers.py::test_a_config_names_its_attention
    Until: PreTrainedConfig documents how to set the attention of a config.
    """
    config._attn_implementation = attention


def change_attention(model: "PreTrainedModel", parts: list[Any], attention: str) -> None:
    """Change the attention of a built model. `parts` are its modules that have a config.

    Raises ValueError or ImportError if a part does not support the new attention.

    Why: For some models, set_attn_implementation reads the attention of the model's class only in
        the constructor. If it cannot switch the attention, it only logs a warning.
    Version: transformers 5.22.2
    Test: tests/compat/test_transformers.py::test_a_built_model_computes_with_another_attention
    Until: set_attn_implementation switches every attention or raises.
    """
    model.config._attn_implementation = attention
    for part in parts:
        known = part._check_and_adjust_attn_implementation(attention, is_init_check=True)
        part.config._attn_implementation_internal = known


def recompute_layers(model: "PreTrainedModel") -> None:
    """Enable recomputation for every layer of a model that can be recomputed, in place.

    Why: transformers 5.23 renamed the method and its argument, and warns about the old name.
    Version: transformers 5.22.2, 5.23.0
    Test: tests/compat/test_transformers.py::test_a_layer_with_another_forward_is_recomputed
    Until: 5.22 is no longer supported.
    """
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(options)


def set_recomputed(layer: "GradientCheckpointingLayer", on: bool) -> None:
    """Set whether a layer is recomputed in the backward pass.

    Why: `gradient_checkpointing_enable` always enables recomputation for all layers.
    Version: transformers 5.22.2
    Test: tests/model/test_starting_weights.py::test_every_nth_layer_is_recomputed
    Until: `gradient_checkpointing_enable` accepts a list of layers.
    """
    layer.gradient_checkpointing = on


def without_early_stop(layer: Any) -> None:
    """Make a recomputed layer run to its end.

    Why: To stop early, torch raises an error when the last tensor is saved. Here this error occurs
        inside compiled code and causes a SystemError in torch 2.11. Do not use this function if
        ZeRO-3 works inside the layer. After the early stop, ZeRO-3's hooks would release weights
        that the backward pass has gathered.
    Version: transformers 5.22.2, torch 2.11
    Test: tests/compat/test_transformers.py::test_a_recomputed_layer_runs_to_its_end
    Until: torch.compile compiles a region that ends with the error of an early stop.
    """
    layer._gradient_checkpointing_func = partial(
        layer._gradient_checkpointing_func, early_stop=False
    )


@contextlib.contextmanager
def attention_called(module: Any, inner: str, groups: int) -> Iterator[None]:
    """Make an attention module call its attention function `inner` within the `with` block.

    `groups` is the number of query heads for each key-value head.

    Why: FlashAttention loads its kernel by the name in the config, but this name is our own
        function's. Attention functions repeat keys by the number in the module, which sequence
        parallelism divides.
    Version: transformers 5.22.2
    Test: tests/compat/test_transformers.py::test_an_attention_is_called_by_another_name
    Until: Attention functions accept the name and the number as arguments.
    """
    implementation = module.config._attn_implementation
    shared = getattr(module, "num_key_value_groups", 1)
    module.config._attn_implementation_internal = inner
    module.num_key_value_groups = groups
    try:
        yield
    finally:
        module.config._attn_implementation_internal = implementation
        module.num_key_value_groups = shared


def set_count(module: "nn.Module", key: str, count: int) -> None:
    """Set a module's attribute that counts heads or columns.

    Why: Such a module creates tensors whose size is this count, although tensor parallelism has
        sharded its weights.
    Version: transformers 5.22.2
    Test: tests/compat/test_transformers.py::test_a_module_counts_its_own_part
    Until: A plan in transformers lists such attributes.
    """
    setattr(module, key, count)


@contextlib.contextmanager
def gradients_summed_by(install: Callable[..., Any]) -> Iterator[None]:
    """Make ReplicatedWithGradAllReduce install its forward by `install` in the `with` block.
    Why: After every backward pass, the style all-reduces the accumulated .grad. This counts earlier
        micro-batches again, and it runs after ZeRO's own hooks. The incoming gradient must be
        summed instead.
    Version: transformers 5.22.2
    Test: tests/compat/test_transformers.py::test_a_style_sums_the_incoming_gradient
    Until: The style sums the incoming gradient.
    """
    from transformers.distributed import tensor_parallel as styles

    kind = styles.ReplicatedWithGradAllReduce
    original = kind.install_forward
    kind.install_forward = install
    try:
        yield
    finally:
        kind.install_forward = original


@contextlib.contextmanager
def placements_noted() -> Iterator[list[Any]]:
    """Prevent plan styles from sharding in the `with` block, and yield the placements they request.

    Why: A style has no method that returns its placement. It only calls `distribute_tensor`, which
        needs ranks.
    Version: transformers 5.22.2
    Test: tests/compat/test_transformers.py::test_a_style_is_asked_for_its_placement
    Until: A style has a method that returns the placement of a parameter.
    """
    from transformers.distributed import tensor_parallel as styles

    known: Any = styles
    placed: list[Any] = []
    distribute, known.distribute_tensor = (
        known.distribute_tensor,
        lambda tensor, mesh, placements, **_: (placed.append(placements[0]), tensor)[1],
    )
    try:
        yield placed
    finally:
        known.distribute_tensor = distribute


@contextlib.contextmanager
def seen_on_meta() -> Iterator[None]:
    """Make `trunc_normal_` change a meta tensor's version within the `with` block.

    The changed version shows that the function was called.

    Why: transformers calls torch's own function, which returns early for a meta tensor.
    Version: torch 2.13, transformers 5.22.2
    Test: tests/compat/test_transformers.py::test_trunc_normal_is_seen_on_meta
    Until: torch's `trunc_normal_` increments the version of a meta tensor.
    """
    from transformers.initialization import TORCH_INIT_FUNCTIONS

    own = TORCH_INIT_FUNCTIONS["trunc_normal_"]
    TORCH_INIT_FUNCTIONS["trunc_normal_"] = lambda tensor, *_, **__: tensor.zero_()
    try:
        yield
    finally:
        TORCH_INIT_FUNCTIONS["trunc_normal_"] = own


def without_layer_numbers(name: str) -> str:
    """Return a dotted name with each layer number replaced by `*`, as in a plan's patterns.

    Why: transformers 5.23 moved its function to `parallel_utils`, and 5.22 has it in
        `tensor_parallel`.
    Version: transformers 5.22.2, 5.23.0
    Test: tests/compat/test_transformers.py::test_a_plan_is_asked_for_the_style_of_a_name
    Until: 5.22 is no longer supported.
    """
    return _plan_function("replace_layer_number_by_wildcard")(name)


def style_of(name: str, plan: Mapping[str, str], is_weight: bool = True) -> str | None:
    """Return a plan's style for a parameter, or for a module if `is_weight` is False.

    Why: transformers has no public function for this question, and 5.23 moved the private one.
    Version: transformers 5.22.2, 5.23.0
    Test: tests/compat/test_transformers.py::test_a_plan_is_asked_for_the_style_of_a_name
    Until: transformers publishes the function.
    """
    return _plan_function("_get_parameter_plan")(name, dict(plan), is_weight=is_weight)


def _plan_function(name: str) -> Callable[..., Any]:
    """Return a function of transformers by its name, from the module that defines it.

    Why: transformers 5.23 moved functions from `tensor_parallel` to `parallel_utils`.
    Version: transformers 5.22.2, 5.23.0
    Test: tests/compat/test_transformers.py::test_a_plan_is_asked_for_the_style_of_a_name
    Until: 5.22 is no longer supported.
    """
    module = importlib.import_module("transformers.distributed.parallel_utils")
    if not hasattr(module, name):
        module = importlib.import_module("transformers.distributed.tensor_parallel")
    return getattr(module, name)


# model type -> corrected styles of its published tensor-parallel plan, by the base model's names
TP_CORRECTIONS = {
    "doge": {
        "layers.*.self_attn.dt_proj": "rowwise_scatter_output",
        "layers.*.self_attn.A": "colwise",
    },
    "gemma3n_text": {
        "layers.*.mlp.gate_proj": "colwise_gather_output",
        "layers.*.mlp.act_fn": "split_output",
    },
    "inkling_text": {
        "embed_tokens": "replicate",
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.shared_experts": "shared_experts",
    },
    "inkling2_text": {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"},
    "inkling2_loop_text": {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"},
}


def corrected_tp_plan(plan: Mapping[str, str], model_type: str) -> dict[str, str]:
    """Return a published tensor-parallel plan without its known mistakes.

    Why: The plans of some types give a rank too little, and training goes wrong or stops. Inkling
        shards fused gate and up projections of experts as one block, does not sum the gradient of
        the input of its shared experts, and shards an embedding with a norm inside. Doge leaves
        numbers of single heads unsharded between sharded heads. Gemma 3n computes a mean and a
        deviation over a sharded gate. Our styles for them are in parallel/tensor.py.
    Version: transformers 5.22.2, 5.24.0
    Test: tests/parallel/test_plans.py::test_a_published_plan_is_corrected
    Until: The type's base_model_tp_plan trains on 2 ranks like plain PyTorch.
    """
    base = next((key.partition("layers.*.")[0] for key in plan if "layers.*." in key), "")
    corrections = TP_CORRECTIONS.get(model_type, {}) if plan else {}
    return dict(plan) | {f"{base}{key}": style for key, style in corrections.items()}


def shard_by_plan(model: "PreTrainedModel", mesh: "DeviceMesh", plan: Mapping[str, str]) -> None:
    """Shard a model in place by a plan of patterns, and install the forward of each style.

    Why: Since 5.23, transformers expects one entry for each module and parameter. 5.22 expects the
        patterns.
    Version: transformers 5.22.2, 5.23.0
    Test: tests/compat/test_transformers.py::test_a_plan_of_patterns_shards_every_layer
    Until: 5.22 is no longer supported and transformers publishes the expansion of a plan.
    """
    from transformers.distributed import tensor_parallel

    expand = getattr(model, "_expand_parallel_plan", dict)
    tensor_parallel.apply_tensor_parallelism(model, mesh, expand(dict(plan)))


def only_hands_out_shards(style: object) -> bool:
    """Return True if a style changes neither the inputs nor the output of its module.

    Why: 5.23 added the style `local_params`, which 5.22 does not have.
    Version: transformers 5.22.2, 5.23.0
    Test: tests/compat/test_transformers.py::test_the_style_that_hands_out_shards_is_known
    Until: 5.22 is no longer supported.
    """
    from transformers.distributed import tensor_parallel

    return isinstance(style, getattr(tensor_parallel, "LocalParamsParallel", ()))


def recomputes_in_forward() -> bool:
    """Return True if a layer's `forward` recomputes the layer, False if its `__call__` does.

    In `forward`, hooks of the layer lie outside the recomputed part. ZeRO-3 and FSDP2 use such
    hooks.

    Why: 5.23 moved the recomputation from `__call__` to `forward`.
    Version: transformers 5.22.2, 5.23.0
    Test: tests/compat/test_transformers.py::test_a_layer_with_another_forward_is_recomputed
    Until: 5.22 is no longer supported.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    return "__call__" not in vars(GradientCheckpointingLayer)


def forward_of_layer(module: "nn.Module") -> Callable[..., Any]:
    """Return the forward function of a module's class, without recomputation.

    Why: Since 5.23, the class of a recomputed layer holds a `forward` that recomputes.
    Version: transformers 5.22.2, 5.23.0
    Test: tests/compat/test_transformers.py::test_a_layer_with_another_forward_is_recomputed
    Until: transformers publishes the function without recomputation.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    forward = type(module).forward
    if recomputes_in_forward() and isinstance(module, GradientCheckpointingLayer):
        return forward.__wrapped__  # type: ignore[attr-defined]
    return forward


def set_layer_forward(layer: "GradientCheckpointingLayer", forward: Callable[..., Any]) -> None:
    """Replace the forward of a layer and keep its recomputation.

    Why: Since 5.23, the recomputation is part of the forward that is replaced.
    Version: transformers 5.22.2, 5.23.0
    Test: tests/compat/test_transformers.py::test_a_layer_with_another_forward_is_recomputed
    Until: 5.22 is no longer supported and transformers recomputes outside `forward` again.
    """
    import torch

    def recomputed(*args: object, **kwargs: object) -> object:
        if layer.gradient_checkpointing and layer.training and torch.is_grad_enabled():
            recompute = cast("Callable[..., object]", layer._gradient_checkpointing_func)
            return recompute(partial(forward, **kwargs), *args)
        return forward(*args, **kwargs)

    layer.forward = recomputed if recomputes_in_forward() else forward


def without_old_names(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside a wrapper that only accepts deprecated argument names.

    Why: Since 5.24, such a wrapper surrounds the forward of attentions, for `past_key_values`.
    Version: transformers 5.24.0
    Test: tests/compat/test_transformers.py::test_the_forward_inside_old_names_is_found
    Until: The version with which transformers drops these names (5.40).
    """
    from transformers.utils.deprecation import deprecate_kwarg

    wrapper = getattr(forward, "__code__", None)
    outer = deprecate_kwarg.__code__.co_filename
    if wrapper is not None and wrapper.co_filename == outer:
        return without_old_names(forward.__wrapped__)  # type: ignore[attr-defined]
    return forward


def fp32_name_pattern(model: "PreTrainedModel") -> "re.Pattern[str] | None":
    """Return the pattern of the names that a model keeps in fp32 in bf16, or None without any.

    A name is kept if the pattern is found anywhere in the name.

    Why: transformers keeps such parameters only while it loads files, and it publishes no list.
    Version: transformers 5.22.2, 5.24.0
    Test: tests/model/test_fp32_parameters.py::test_the_names_are_what_transformers_keeps
    Until: transformers publishes the names.
    """
    names = sorted(model._keep_in_fp32_modules_strict or ())
    if not names:
        return None
    return re.compile("|".join(name.replace("*", ".*") for name in names))
