"""Losses of tokens instead of logits: a model's head computes them inside its own forward, block by
block, so that the full logits never exist.

    without labels   hidden -> head -> logits -> operations -> logits
    with labels      hidden -> head -> losses -> operations, which leave them unchanged -> losses
                               for each block of columns: logits -> operations -> its share of the
                               losses

Inside the forward, the head's weights are available however they are gathered or sharded: by hooks
of ZeRO-3, by FSDP2, or by tensor parallelism. The operations are whatever the forward does to the
output of the head, such as a soft cap. Three steps make sure that they are the right ones:

1. Record: `recorded` runs a small copy of the model and lists its operations.
2. Verify: `operations_of` compares the copy's losses and gradients in blocks with its losses and
   gradients from full logits.
3. Replay: `give_losses` applies the operations to each block. In each forward it checks that the
   model does these operations in this order, and lets the losses pass them unchanged.
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

from ..kernels.cross_entropy import Head, Part, losses_and_tokens, token_losses
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
    """An operation of a model on its logits after the head: a function of torch, with HERE among
    its arguments.
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
        """Return True if it may act on each logit by itself, judged by its arguments, and does not
        work in place.
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
        name = getattr(self.function, "__name__", self.function)
        return f"{name}({', '.join(map(str, self.inputs))})"


Operations = tuple[Operation, ...]


def _operation(function: Any, inputs: Sequence[Any], named: dict[str, Any] | None) -> Operation:
    """Describe a call that has the logits, or a result of them, as an argument."""
    return Operation(
        function,
        tuple(HERE if torch.is_tensor(value) else value for value in inputs),
        tuple((named or {}).items()),
    )


def _followed(act: Callable[[Any, Sequence[Any], dict[str, Any]], Any]) -> type[torch.Tensor]:
    """Make a class of tensors whose operations `act` (function, inputs, named inputs) computes.
    Its results are tensors of the same class.
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
    """Return the head. Raises ValueError if it is no plain linear layer."""
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
    """Run a model; return its operations on the head's output, and the result of `run`.

    Raises ValueError if losses cannot take the place of the logits.
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


@dataclass(frozen=True)
class LossPath:
    """How the loss of a model is computed: in chunks by its head, or from full logits.

    `why_full` is the reason for full logits that the recipe did not ask for.
    """

    in_chunks: bool
    why_full: str = ""


IN_CHUNKS, FULL_LOGITS = LossPath(in_chunks=True), LossPath(in_chunks=False)


@dataclass(frozen=True)
class Kind:
    """A kind of model: its config, the task that it is trained for, and its name in messages."""

    config: dict[str, Any]
    task: str
    name: str


def give_losses_where_exact(
    loss: str,
    whole: PreTrainedModel,
    models: Sequence[PreTrainedModel],
    kind: Kind,
    tp: tuple[Mapping[str, str], Any],
) -> LossPath:
    """Let `models` give losses if `loss`, the recipe's field, allows it and they are exact; return
    how the loss is computed.

    `models` are parts of the model `whole`. `tp` is (tensor-parallel plan, mesh of its ranks or
    None). Raises `Refusal` if `loss` is "chunked" and the losses would not be exact.
    """
    facts = TASKS[kind.task]
    if loss == "whole" or "loss" not in facts.reads:
        return FULL_LOGITS
    try:
        head = head_of(whole)
        place = next(place for place, module in whole.named_modules() if module is head)
        cut = columns_of(place, head.out_features, *tp)
        operations = operations_of(kind.config, kind.task, kind.name)
    except ValueError as error:
        if loss == "chunked":
            raise refuse(
                "loss = chunked",
                f"is not exact for this {kind.config['model_type']}: {error}",
                "use --loss auto or --loss whole",
            ) from error
        return LossPath(in_chunks=False, why_full=str(error))
    for model in models:
        give_losses(model, operations, Part(*cut) if cut else None, likeliest=facts.masked)
    return IN_CHUNKS


def give_losses(
    model: PreTrainedModel,
    operations: Operations,
    part: Part | None = None,
    block: int | None = None,
    likeliest: bool = False,
) -> None:
    """Let the forward of `model` take labels as `losses_of`, (B, T) int64, and return the loss of
    each token, (B, T) fp32, in the place of its logits.

    With `likeliest` it returns (B, T, 2), the loss and the likeliest token, whose number fp32
    holds. Without labels the forward is unchanged. `operations` are what the model does after its
    head; `part` is the columns that this rank's head has; `block` is how many logits exist at a
    time. A forward raises `Refusal` if the model does something else to its logits.
    """
    linear, own = head_of(model), model.forward
    replay = _Replay(model, linear, operations)
    chain = replay.chain if operations else None

    @functools.wraps(own)
    def forward(*args: Any, losses_of: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if losses_of is None:
            return own(*args, **kwargs)
        tokens: list[torch.Tensor] = []  # the likeliest ones, (B, T)

        def losses(hidden: torch.Tensor) -> torch.Tensor:
            head = Head(linear.weight, linear.bias, chain, part)
            if likeliest:
                found, largest = losses_and_tokens(hidden, head, losses_of, block)
                tokens.append(largest)
            else:
                found = token_losses(hidden, head, losses_of, block)
            return replay.followed(found)

        replay.start()
        with _instead(linear, losses):
            output = own(*args, **kwargs)
        replay.check_complete()

        given = output.logits.as_subclass(torch.Tensor)
        # A copy, because torch 2.13's FSDP2 warns that its hooks may be lost on a view.
        output["logits"] = (
            torch.stack([given, tokens.pop().to(given.dtype)], -1) if tokens else given.clone()
        )
        return output

    model.forward = forward  # type: ignore[method-assign]


class _Replay:
    """The operations that a model must do to the output of its head, in their order.

    In a forward the output is losses, which the operations leave unchanged.
    """

    def __init__(self, model: PreTrainedModel, head: nn.Linear, operations: Operations):
        self.model, self.head, self.operations = model, head, operations
        self.ahead: list[Operation] = []  # the rest of the current forward
        self.kind = _followed(self.let_pass)

    def chain(self, logits: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda value, operation: operation(value), self.operations, logits)

    def followed(self, losses: torch.Tensor) -> torch.Tensor:
        """Return losses whose operations go through `let_pass`."""
        # A tensor that already has a class of its own (of a fake device, say) cannot take another
        # one, and without operations it has nothing to pass.
        if self.operations or type(losses) is torch.Tensor:
            return losses.as_subclass(self.kind)
        return losses

    def start(self) -> None:
        self.ahead[:] = self.operations

    def let_pass(self, function: Any, inputs: Sequence[Any], named: dict[str, Any]) -> Any:
        """Return the losses unchanged for the next recorded operation, and refuse another one."""
        operation = _operation(function, inputs, named)
        if self.ahead and operation == self.ahead[0]:
            self.ahead.pop(0)
            return next(value for value in inputs if torch.is_tensor(value))

        result = function(*inputs, **named)
        if function == torch.Tensor.shape.__get__:  # type: ignore[attr-defined]
            # A model may ask whether its logits are padded.
            return torch.Size((*result, self.head.out_features))
        if torch.is_tensor(result) and function not in SAME:
            raise self._other(f"does {operation} to its logits")
        return result

    def check_complete(self) -> None:
        """Raise `Refusal` if the forward has left out an operation."""
        if self.ahead:
            raise self._other(f"does not do {self.ahead[0]}")

    def _other(self, what: str) -> Refusal:
        kind = self.model.config.model_type
        rule = f"a {kind} {what} after its head, and its small copy does not"
        return refuse("loss in chunks", rule, "use --loss whole")


# hooks of ZeRO-3 (DeepSpeed 0.19.8, parameter_offload.py) hand on what this gives
SAME = (torch.Tensor.detach,)


@contextlib.contextmanager
def _instead(module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Give a module another forward for a while.

    Its hooks stay. The wrapper of tensor parallelism around its own forward is left out.
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
    """Find a model's operations after its head on a small copy, whose losses in blocks must equal
    its losses from full logits.

    Raises ValueError if they do not, or cannot be computed. The same on every rank, and no
    collective.
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
    """Record the operations of a small copy, and compare its losses and gradients both ways.

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
