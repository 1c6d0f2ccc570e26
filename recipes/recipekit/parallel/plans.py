"""Choice of a model's parallel plans, which come from the recipe, the model or the task."""

import contextlib
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import OutOfMemoryError, nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from ..compat.transformers import corrected_tp_plan, without_layer_numbers
from ..spec.errors import ConfigError, config_error
from ..spec.mesh import Mesh
from ..spec.task_specs import Plans


def resolve_plans(
    model: PreTrainedModel, recipe_plans: Plans, task_plans: Plans, matrices: tuple[str, ...] = ()
) -> Plans:
    """Resolve a full model's plans by expanding patterns to names. An axis without a plan is empty.

    `recipe_plans` comes from the recipe. If a name in it matches no module, the name is kept and is
    rejected where it is used. `matrices` contains the task's patterns if the optimizer treats
    matrices differently. Otherwise it is ().
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    kind = model.config.model_type
    unfit = task_plans.unfit.get(kind, ())
    pp = {
        name: place
        for pattern, place in recipe_plans.pp.items()
        for name in _matches(pattern, modules) or [pattern]
    }
    styles = {} if "tp" in unfit else task_plans.tp
    tp = (
        dict(recipe_plans.tp)
        or _published_tp(model)
        or {
            _layer_pattern(name): style
            for pattern, style in styles.items()
            for name in _matches(pattern, modules)
        }
    )
    plans = Plans(
        pp=pp
        or _published_pp(model, modules)
        or _task_pp_plan({} if "pp" in unfit else task_plans.pp, modules),
        tp=tp,
        tp_local=recipe_plans.tp_local or task_plans.tp_local,
        no_decay=(*recipe_plans.no_decay, *task_plans.no_decay),
        lr_scale=recipe_plans.lr_scale,
        layer_decay=recipe_plans.layer_decay,
        matrices=(recipe_plans.matrices or matrices) if matrices else (),
    )
    return plans if pp else replace(plans, pp=_add_head_to_plan(plans.pp, task_plans.pp, modules))


def published_plans(model: PreTrainedModel) -> Plans:
    """Resolve the plans that a model publishes."""
    return resolve_plans(model, Plans(), Plans())


@contextlib.contextmanager
def explain_plan_errors(model: str, mesh: Mesh, enabled: bool) -> Iterator[None]:
    """Convert an error in the model's own code to a `ConfigError`, if `enabled`.

    The error's cause is the model's plan, because a published plan may not fit the layers.
    """
    try:
        yield
    except Exception as error:
        cut = ", ".join(
            f"{axis} = {degree}"
            for axis, degree in (("tp", mesh.tp), ("pp", mesh.pp))
            if degree > 1
        )
        place = _failing_model_function(error)
        if not (enabled and cut and place) or isinstance(error, ConfigError | OutOfMemoryError):
            raise
        said = traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
        rule = f"the code of {model} fails when it is cut so ({said}, in {place})"
        raise config_error(
            cut,
            rule,
            "set these degrees to 1. If the model then trains, its parallel plan does not fit its"
            " layers",
        ) from error


def _failing_model_function(error: BaseException) -> str:
    """Return the function in transformers' models that raised an error, or "".

    The result is also "" if a different rank failed.
    """
    calls = [
        (str(frame.f_globals.get("__name__")), frame.f_code.co_name)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    watched = [
        call
        for call in calls
        if call[0].startswith(("transformers.models.", "torch.distributed.", "deepspeed.comm."))
    ]
    return (
        ".".join(watched[-1]).rpartition(".models.")[2]
        if watched and watched[-1][0].startswith("transformers.")
        else ""
    )


def adapted_plans(model: PreTrainedModel, plans: Plans) -> Plans:
    """Resolve the plans of a model wrapped in an adapter. `plans` are the base model's plans."""
    own = {
        "no_decay": plans.no_decay,
        "lr_scale": plans.lr_scale,
        "layer_decay": plans.layer_decay,
        "matrices": plans.matrices,
    }
    return replace(resolve_plans(model, Plans(), Plans()), **own)


def hidden_matrices(model: nn.Module, patterns: tuple[str, ...]) -> set[str]:
    """Return the names of the matrices that the patterns match.

    The result is meant for an optimizer that treats matrices differently. Matrices are
    two-dimensional weights. Embedding tables, heads and convolutions are never included, even if a
    pattern matches them. Weights tied to them are not included either.
    """
    ends = embedding_and_head(model) if isinstance(model, PreTrainedModel) else ()
    tables = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding | _ConvNd) or module in ends
    ]
    not_these = {
        id(parameter) for module in tables for parameter in module.parameters(recurse=False)
    }
    return {
        name
        for name, parameter in model.named_parameters()
        if id(parameter) not in not_these
        and _is_matmul_weight(name, parameter)
        and any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _is_matmul_weight(name: str, parameter: nn.Parameter) -> bool:
    """Return True if a parameter is a matrix that a module multiplies by.

    Other two-dimensional parameters have a different purpose.
    """
    return (
        name.rpartition(".")[2] == "weight"
        and len(getattr(parameter, "ds_shape", parameter.shape)) == 2
    )


def embedding_and_head(model: PreTrainedModel) -> tuple[nn.Module | None, nn.Module | None]:
    """Return (embedding, head) of a model that reads tokens. A missing module is None."""
    embedding: nn.Module | None = None
    # transformers 5.22.2 raises this for models that read no tokens (ResNet)
    with contextlib.suppress(NotImplementedError):
        embedding = model.get_input_embeddings()
    return embedding, model.get_output_embeddings()


def has_tied_head(model: PreTrainedModel) -> bool:
    """Return True if a model's head is tied to its embedding."""
    embedding, head = embedding_and_head(model)
    return (
        embedding is not None
        and head is not None
        and getattr(head, "weight", None) is getattr(embedding, "weight", 0)
    )


def _matches(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def _layer_pattern(name: str) -> str:
    return without_layer_numbers(name)


def _published_pp(model: PreTrainedModel, modules: dict[str, nn.Module]) -> dict[str, str]:
    """Return the pipeline plan that the model publishes.

    The plan lists modules in the order of the forward pass. Modules before the module list are
    "first". In Gemma 3n and some Gemma 4, every layer also reads an input that is computed from the
    embedded tokens. Every stage then keeps the embedding.
    """
    plan: dict[str, str] = {}
    place, head = "first", model.get_output_embeddings()
    own_inputs = getattr(model.config.get_text_config(), "hidden_size_per_layer_input", 0)
    others = (head, model.get_input_embeddings() if own_inputs else head)
    for name in [
        name for name in model.pp_plan or {} if name in modules and modules[name] not in others
    ]:
        is_list = isinstance(modules[name], nn.ModuleList)
        plan[name] = "split" if is_list else place
        place = "last" if is_list else place
    return plan | {name: "last" for name, module in modules.items() if plan and module is head}


def _add_head_to_plan(
    plan: Mapping[str, str], task_plan: Mapping[str, str], modules: dict[str, nn.Module]
) -> dict[str, str]:
    """Add the task's head to a plan that does not name the head.

    A model publishes only its base model's plan.
    """
    return dict(plan) | {
        name: place
        for name, place in task_plan.items()
        if plan and place == "last" and name in modules and name not in plan
    }


def _task_pp_plan(task_plan: Mapping[str, str], modules: dict[str, nn.Module]) -> dict[str, str]:
    """Return the modules that a task's plan names in a model, without modules nested in named ones.

    The result is {} unless exactly one list can be split. This list must not be inside a different
    list, and its blocks must not contain a list. Alternatively it is a list of "stages", where each
    stage contains only one list. In this case the inner lists are split. In Swin and ConvNeXt,
    modules between the stages change the image's shape.
    """
    plan: dict[str, str] = {}
    lists = 0
    for pattern, place in task_plan.items():
        for name in _matches(pattern, modules):
            found = (
                stage_block_lists(name, modules)
                if place == "stages"
                else [name]
                if place != "split" or _is_plain_list(name, modules)
                else []
            )
            if found and not any(name.startswith(f"{other}.") for other in plan):
                plan |= dict.fromkeys(found, "split" if place == "stages" else place)
                lists += place in ("split", "stages")
    inside = {name for name in plan if any(name.startswith(f"{other}.") for other in plan)}
    return {name: place for name, place in plan.items() if name not in inside} if lists == 1 else {}


def stage_block_lists(name: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the inner lists if each element of a list is only an `nn.Sequential`.

    ResNet's stages have this form. For other lists the result is []. The modules of an
    `nn.Sequential` run in order, each on the previous module's output. By contrast, the parent
    decides how a ModuleList runs: Hiera's stages pass two values to their blocks.
    """
    inner = []
    for child, element in modules[name].named_children():
        (first, listed), *others = [*element.named_children(), ("", None)]
        if (
            len(others) == 1
            and type(listed) is nn.Sequential
            and not any(True for _ in element.parameters(recurse=False))
        ):
            inner.append(f"{name}.{child}.{first}")
    return inner if len(inner) == len(list(modules[name].children())) else []


def _is_plain_list(name: str, modules: dict[str, nn.Module]) -> bool:
    lists = [other for other, module in modules.items() if isinstance(module, nn.ModuleList)]
    return name in lists and not any(
        name.startswith(f"{other}.") or other.startswith(f"{name}.") for other in lists
    )


def _published_tp(model: PreTrainedModel) -> dict[str, str]:
    """Return the tensor-parallel plan that the model publishes: module pattern -> style.

    A tied head stays unsharded, like its embedding.
    """
    plan = corrected_tp_plan(
        getattr(model, "tp_plan", None) or {}, model.config.get_text_config().model_type
    )
    if plan and has_tied_head(model):
        embedding, head = embedding_and_head(model)
        names = {module: name for name, module in model.named_modules()}
        # One parameter cannot be sharded in two ways, and sharding only the head would untie it.
        for module in (head, embedding):
            assert module is not None
            plan.pop(names[module], None)
        for pattern in [key for key in plan if key.rsplit(".", 1)[-1] == "embed_tokens"]:
            plan.pop(pattern)
    return plan
