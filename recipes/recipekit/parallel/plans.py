"""Which plan a model is cut by: the recipe's, the one that the model publishes, or the task's."""

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import OutOfMemoryError, nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard

from ..spec.mesh import Mesh
from ..spec.refusal import Refusal, refuse
from ..spec.task_specs import Plans


def plans_of(
    model: PreTrainedModel, own: Plans, task: Plans, matrices: tuple[str, ...] = ()
) -> Plans:
    """Resolves the plans of a whole model: names for patterns; without a plan for an axis, that is
    empty.

    `own` is the recipe's: what it names is kept, though the model has no such module, to be refused
    where it is used. `matrices`: the task's, if its optimizer has a rule of its own for them; else
    there are none.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    kind: Any = model.config.model_type
    unfit = task.unfit.get(kind, ())
    pp = {
        name: place
        for pattern, place in own.pp.items()
        for name in _matches(pattern, modules) or [pattern]
    }
    styles = {} if "tp" in unfit else task.tp
    tp = (
        dict(own.tp)
        or _published_tp(model)
        or {
            _generic(name): style
            for pattern, style in styles.items()
            for name in _matches(pattern, modules)
        }
    )
    plans = Plans(
        pp=pp
        or _published_pp(model, modules)
        or _outermost({} if "pp" in unfit else task.pp, modules),
        tp=tp,
        tp_local=own.tp_local or task.tp_local,
        no_decay=(*own.no_decay, *task.no_decay),
        lr_scale=own.lr_scale,
        layer_decay=own.layer_decay,
        matrices=(own.matrices or matrices) if matrices else (),
    )
    return plans if pp else replace(plans, pp=_with_head(plans.pp, task.pp, modules))


def published_plans(model: PreTrainedModel) -> Plans:
    """Resolves the plans that a model publishes."""
    return plans_of(model, Plans(), Plans())


@contextlib.contextmanager
def fitting(model: str, mesh: Mesh, on: bool) -> Iterator[None]:
    """Turns what a model's own code raises while a plan cuts it into a `Refusal`, where it is on: a
    published plan may not fit the layers.
    """
    try:
        yield
    except Exception as error:
        cut = ", ".join(
            f"{axis} = {degree}"
            for axis, degree in (("tp", mesh.tp), ("pp", mesh.pp))
            if degree > 1
        )
        place = _raised_in(error)
        if not (on and cut and place) or isinstance(error, Refusal | OutOfMemoryError):
            raise
        said = traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
        rule = f"the code of {model} fails when it is cut so ({said}, in {place})"
        raise refuse(
            cut,
            rule,
            "set these degrees to 1. If the model then trains, its parallel plan does not fit its"
            " layers",
        ) from error


def _raised_in(error: BaseException) -> str:
    """Names the function of transformers' models that raised an error; "" where none did, or where
    another rank has failed.
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
    """Resolves the plans of a model that an adapter goes round, made of the one with `plans`."""
    own = {
        "no_decay": plans.no_decay,
        "lr_scale": plans.lr_scale,
        "layer_decay": plans.layer_decay,
        "matrices": plans.matrices,
    }
    return replace(plans_of(model, Plans(), Plans()), **own)


def hidden_matrices(model: nn.Module, patterns: tuple[str, ...]) -> set[str]:
    """Finds the parameters that an optimizer with a rule of its own for matrices takes: weights of
    two dimensions that the patterns name.

    Never a table of embeddings, a head or a convolution, nor what is tied to one, whatever names
    it.
    """
    ends = ends_of(model) if isinstance(model, PreTrainedModel) else ()
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
        and _is_weight(name, parameter)
        and any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _is_weight(name: str, parameter: nn.Parameter) -> bool:
    """Says whether a parameter is a matrix that a module multiplies with, and not a parameter of
    two dimensions with another meaning.
    """
    return (
        name.rpartition(".")[2] == "weight"
        and len(getattr(parameter, "ds_shape", parameter.shape)) == 2
    )


def ends_of(model: PreTrainedModel) -> tuple[nn.Module | None, nn.Module | None]:
    """Finds (embedding, head) of a model with tokens; None for what it has not."""
    embedding: Any = None
    # transformers 5.22.2 for models that read no tokens (ResNet)
    with contextlib.suppress(NotImplementedError):
        embedding = model.get_input_embeddings()
    return embedding, model.get_output_embeddings()


def tied(model: PreTrainedModel) -> bool:
    """Says whether the head of a model is its embedding."""
    embedding, head = ends_of(model)
    return (
        embedding is not None
        and head is not None
        and getattr(head, "weight", None) is getattr(embedding, "weight", 0)
    )


def _matches(pattern: str, names: Any) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def _generic(name: str) -> str:
    return replace_layer_number_by_wildcard(name)


def _published_pp(model: PreTrainedModel, modules: dict[str, nn.Module]) -> dict[str, str]:
    """Takes the published plan, which lists modules in the order of the forward pass; what comes
    before its module list is first.
    """
    plan: dict[str, str] = {}
    place, head = "first", model.get_output_embeddings()
    for name in [
        name for name in model.pp_plan or {} if name in modules and modules[name] is not head
    ]:
        is_list = isinstance(modules[name], nn.ModuleList)
        plan[name] = "split" if is_list else place
        place = "last" if is_list else place
    return plan | {name: "last" for name, module in modules.items() if plan and module is head}


def _with_head(
    plan: Mapping[str, str], given: Mapping[str, str], modules: dict[str, nn.Module]
) -> dict[str, str]:
    """Adds to a plan the task's head, where it does not name that: a model publishes the plan of
    its base.
    """
    return dict(plan) | {
        name: place
        for name, place in given.items()
        if plan and place == "last" and name in modules and name not in plan
    }


def _outermost(given: Any, modules: dict[str, nn.Module]) -> dict[str, str]:
    """Takes what a task's plan names in a model, but for modules inside others that it names.

    {} unless there is exactly one list to split, in no other list, and without one in its blocks;
    or one of "stages" that are nothing but a list each, which are split. Between the stages of Swin
    or ConvNeXt lie modules that change the form of pictures.
    """
    plan: dict[str, str] = {}
    lists = 0
    for pattern, place in given.items():
        for name in _matches(pattern, modules):
            found = (
                lists_of_stages(name, modules)
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


def lists_of_stages(name: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Names the lists that the elements of a list hold, if each of these holds an `nn.Sequential`
    and nothing else (the stages of ResNet); else [].

    What is in an `nn.Sequential` runs in order, each on what the one before it returns. A
    ModuleList is run as its holder likes: Hiera's stages hand their blocks two things.
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
    """Takes the published plan, module pattern -> style; a tied head stays whole, like its
    embedding.
    """
    plan = dict(getattr(model, "tp_plan", None) or {})
    if plan and tied(model):
        embedding, head = ends_of(model)
        names = {module: name for name, module in model.named_modules()}
        # One parameter cannot be cut in two ways; cutting the head alone would untie it.
        for module in (head, embedding):
            assert module is not None
            plan.pop(names[module], None)
        for pattern in [key for key in plan if key.rsplit(".", 1)[-1] == "embed_tokens"]:
            plan.pop(pattern)
    return plan
