"""Lets a model give the loss of each token instead of its logits: its head computes it, inside its
own forward, block by block.

There the head's weights are at hand, whatever gathers or divides them (hooks of ZeRO-3, FSDP2, the
cuts of tensor parallelism). What a model's own forward does to the logits afterwards, such as a
soft cap, is found on a small copy, applied to each block, and let pass the losses unchanged.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from ..kernels.cross_entropy import Part, losses_and_tokens, token_losses
from ..parallel.tensor import columns_of
from ..spec.refusal import Refusal, refuse
from ..spec.task import IGNORE
from ..spec.task_specs import TASKS, Facts
from .small import EXAMPLES, ROWS, TOKENS, once_a_config, small_copy

FITS_WITHIN = 1e-5  # of the largest loss, and of the largest gradient
# logits of a small copy at a time, so that its vocabulary takes several blocks
SMALL_BLOCK = 64 * ROWS * TOKENS
HERE = "the logits"  # stands for them in the arguments of an operation


@dataclass(frozen=True)
class Operation:
    """Describes what a model does to its logits after the head: a function of torch, with HERE
    among its arguments.
    """

    function: Callable[..., torch.Tensor]
    inputs: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return self.function(
            *(logits if value is HERE else value for value in self.inputs), **dict(self.named)
        )

    @property
    def by_itself(self) -> bool:
        """Says whether it can act on each logit by itself, as far as its arguments tell, and
        changes none in its place.
        """
        values, name = (
            [*self.inputs, *(value for _, value in self.named)],
            getattr(self.function, "__name__", ""),
        )
        plain = all(
            value is HERE or value is None or isinstance(value, int | float | torch.dtype)
            for value in values
        )
        in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        return plain and values.count(HERE) == 1 and not in_place

    def __str__(self) -> str:
        return f"{getattr(self.function, '__name__', self.function)}({', '.join(map(str, self.inputs))})"


Operations = tuple[Operation, ...]


def _operation(function: Any, inputs: Sequence[Any], named: dict[str, Any] | None) -> Operation:
    """Describes a call of which the logits, or what came of them, are an argument."""
    return Operation(
        function,
        tuple(HERE if torch.is_tensor(value) else value for value in inputs),
        tuple((named or {}).items()),
    )


def _followed(act: Callable[[Any, Sequence[Any], dict[str, Any]], Any]) -> type[torch.Tensor]:
    """Makes a class of tensors whose operations `act` (function, inputs, named inputs) does; what
    it returns is of the class, too.
    """

    class Followed(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                result = act(func, args, kwargs or {})
                return (
                    result.as_subclass(cls)
                    if torch.is_tensor(result) and not isinstance(result, cls)
                    else result
                )

    return Followed


def head_of(model: PreTrainedModel) -> nn.Linear:
    """Returns the head. Raises ValueError if it is no plain linear layer."""
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(
            "it has no head"
            if head is None
            else f"its head is a {type(head).__module__}.{type(head).__name__}"
        )
    return head


def recorded(
    model: PreTrainedModel, run: Callable[[], torch.Tensor]
) -> tuple[Operations, torch.Tensor]:
    """Returns what a model does to its head's output before `run` returns it, and that result.

    Raises ValueError where losses cannot stand for the logits.
    """
    found: list[Operation] = []
    made: list[torch.Tensor] = []

    def record(function: Any, inputs: Sequence[Any], named: dict[str, Any]) -> Any:
        result = function(*inputs, **named)
        if torch.is_tensor(result):
            found.append(_operation(function, inputs, named))
        return result

    kind = _followed(record)
    hook = head_of(model).register_forward_hook(
        lambda module, inputs, output: (made.append(output), output.as_subclass(kind))[1]
    )
    try:
        result = run()
    finally:
        hook.remove()
    if len(made) != 1:
        raise ValueError(f"its forward calls the head {len(made)} times")
    if not isinstance(result, kind) or result.shape != made[0].shape:
        raise ValueError("its logits are not the output of its head")
    for operation in found:
        if not operation.by_itself:
            raise ValueError(f"it does {operation} to its logits")
    return tuple(found), result.as_subclass(torch.Tensor)


def give_losses_where_exact(
    loss: str,
    whole: PreTrainedModel,
    models: Sequence[PreTrainedModel],
    model_config: dict[str, Any],
    task: str,
    name: str,
    tp: tuple[Mapping[str, str], Any],
) -> str | None:
    """Lets `models` give losses, as `--loss` says; returns None, or why they give logits: "" where
    that is asked for.

    `whole` is the model that they are parts of, `tp` (tensor-parallel plan, mesh of its ranks or
    None). Raises `Refusal` where `loss` is "chunked" and they cannot.
    """
    if loss == "whole" or "loss" not in TASKS[task].reads:
        return ""
    try:
        head = head_of(whole)
        cut = columns_of(
            next(place for place, module in whole.named_modules() if module is head),
            head.out_features,
            *tp,
        )
        operations = operations_of(model_config, task, name)
    except ValueError as error:
        if loss == "chunked":
            raise refuse(
                "loss = chunked",
                f"is not exact for this {model_config['model_type']}: {error}",
                "use --loss auto or --loss whole",
            ) from error
        return str(error)
    for model in models:
        give_losses(model, operations, Part(*cut) if cut else None, likeliest=TASKS[task].masked)
    return None


def give_losses(
    model: PreTrainedModel,
    operations: Operations,
    part: Part | None = None,
    block: int | None = None,
    likeliest: bool = False,
) -> None:
    """Lets the forward of `model` take labels as `losses_of`, (B, T) int64, and return the loss of
    each token, (B, T) fp32, where its logits were.

    With `likeliest` it returns (B, T, 2), the loss and the likeliest token, whose number fp32
    holds. Without labels it stays what it is. `operations` are what it does after its head; `part`:
    which columns this rank's head has. Each forward checks that they are: it raises `Refusal` if
    the model does something else to its logits.
    """
    head, whole = head_of(model), model.forward
    ahead: list[Operation] = []  # what the model has yet to do, in a forward
    chosen: list[torch.Tensor] = []  # the likeliest tokens of that forward

    def chain(logits: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda value, operation: operation(value), operations, logits)

    def other(what: str) -> Refusal:
        rule = f"a {model.config.model_type} {what} after its head, and its small copy does not"
        return refuse("loss in chunks", rule, "use --loss whole")

    def let_pass(function: Any, inputs: Sequence[Any], named: dict[str, Any]) -> Any:
        operation = _operation(function, inputs, named)
        if ahead and operation == ahead[0]:
            ahead.pop(0)
            return next(value for value in inputs if torch.is_tensor(value))
        result = function(*inputs, **named)
        if function == torch.Tensor.shape.__get__:  # type: ignore[attr-defined]
            # a model may ask whether its logits are padded
            return torch.Size((*result, head.out_features))
        if torch.is_tensor(result) and function not in SAME:
            raise other(f"does {operation} to its logits")
        return result

    kind = _followed(let_pass)

    @functools.wraps(whole)
    def forward(*args: Any, losses_of: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if losses_of is None:
            return whole(*args, **kwargs)

        def losses(hidden: torch.Tensor) -> torch.Tensor:
            given = (
                hidden,
                head.weight,
                head.bias,
                losses_of,
                chain if operations else None,
                part,
                block,
            )
            if likeliest:
                found, told = losses_and_tokens(*given)
                chosen.append(told)
            else:
                found = token_losses(*given)
            # a tensor that is of a class already (of a fake device, say) cannot be of another one,
            # and has nothing to let pass here
            return found.as_subclass(kind) if operations or type(found) is torch.Tensor else found

        ahead[:] = operations
        with _instead(head, losses):
            output = whole(*args, **kwargs)
        if ahead:
            raise other(f"does not do {ahead[0]}")
        given = output.logits.as_subclass(torch.Tensor)
        # no view: of one torch 2.13's FSDP2 warns that its hooks may be lost
        output["logits"] = (
            torch.stack([given, chosen.pop().to(given.dtype)], -1) if chosen else given.clone()
        )
        return output

    model.forward = forward  # type: ignore[method-assign]


# hooks of ZeRO-3 (DeepSpeed 0.19.8, parameter_offload.py) hand on what this gives
SAME = (torch.Tensor.detach,)


@contextlib.contextmanager
def _instead(module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Gives a module another forward for a while; its hooks stay, and what tensor parallelism has
    put around its own is left out.
    """
    own = module.__dict__.get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


@once_a_config
def operations_of(model_config: dict[str, Any], task: str, name: str = "") -> Operations:
    """Finds on a small copy what a model does to its logits after its head; the copy's losses in
    blocks must be those of whole logits.

    Raises ValueError where they are not, or cannot be. The same on every rank, and no collective.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        try:
            return _found_on(small_copy(model_config, TASKS[task], name), TASKS[task])
        except (
            ArithmeticError,
            RuntimeError,
            TypeError,
            LookupError,
            AttributeError,
            AssertionError,
            Refusal,
        ) as error:
            told = (
                error.problems[0].rule
                if isinstance(error, Refusal)
                else f"{type(error).__name__}: {str(error)[:200]}"
            )
            raise ValueError(f"no small copy of it runs, which would show it ({told})") from error


def _found_on(model: PreTrainedModel, facts: Facts) -> Operations:
    """Finds the operations of a small copy, and compares its losses and gradients both ways.

    Raises ValueError.
    """
    inputs = {name: EXAMPLES[name](model.config) for name in facts.inputs}
    labels = inputs["input_ids"].roll(-1, 1)  # (B, T) int64
    labels[:, ::5] = IGNORE
    with torch.no_grad():
        head_of(model).weight.normal_()  # logits large enough for a soft cap to be seen

    def output(**more: torch.Tensor) -> torch.Tensor:
        torch.default_generator.manual_seed(0)
        return model(**inputs, **facts.constants, **more).logits

    found = []
    for training in (False, True):
        operations, logits = recorded(model.train(training), output)
        found.append(operations)
    if found[0] != found[1]:
        raise ValueError("it does something else to its logits in training than in evaluation")
    expected = cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none"
    ).view_as(labels)
    gradients = _gradients(model, expected)
    give_losses(model, found[0], block=SMALL_BLOCK)
    losses = output(losses_of=labels)
    for what, mine, theirs in (
        ("losses", [losses], [expected]),
        ("gradients", _gradients(model, losses), gradients),
    ):
        worst = max((one - other).abs().max() for one, other in zip(mine, theirs, strict=True))
        if not worst <= FITS_WITHIN * max(other.abs().max() for other in theirs):
            raise ValueError(f"its {what} differ by {worst:.1e}")
    return found[0]


def _gradients(model: nn.Module, losses: torch.Tensor) -> list[torch.Tensor]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
    return [torch.zeros(1) if gradient is None else gradient for gradient in found]
