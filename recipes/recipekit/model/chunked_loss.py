"""Token losses computed in chunks of logits by the model's head, inside its own forward.

The full logits are never created.

    without labels   hidden -> head -> logits -> operations -> logits
    with labels      hidden -> head -> losses -> operations, which leave them unchanged -> losses
                               for each block of columns: logits -> operations -> its share of the
                               losses

Inside the forward, the head's weights are available regardless of how they are gathered or sharded:
by ZeRO-3's hooks, by FSDP2, or by tensor parallelism. The operations are the functions that the
forward applies to the head's output, such as a soft cap. Three steps ensure that the right
operations are used:

1. Record: `record_operations` runs a small copy of the model and lists its operations.
2. Verify: `exact_operations` compares the copy's block-wise losses and gradients with those from
   full logits.
3. Replay: `enable_chunked_loss` applies the operations to each block. In each forward it checks
   that the model applies these operations in this order, and passes the losses through unchanged.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from ..compat.torch import forward_replaced, set_forward
from ..kernels.cross_entropy import Head, VocabShard, token_losses, token_losses_and_argmax
from ..spec.errors import ConfigError, config_error
from ..spec.task import IGNORE

CHUNKED_TOLERANCE = 1e-5  # relative to the largest loss and the largest gradient
# Logits per block in a small copy. The value is small enough to split the vocabulary into several
# blocks.
PROBE_BLOCK_LOGITS = 64
LOGITS_ARG = "the logits"  # placeholder for the logits among an operation's arguments


@dataclass(frozen=True)
class Operation:
    """An operation that a model applies to its logits after the head.

    It is a torch function with LOGITS_ARG among its arguments.
    """

    function: Callable[..., torch.Tensor]
    inputs: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return self.function(
            *(logits if value is LOGITS_ARG else value for value in self.inputs), **dict(self.named)
        )

    @property
    def is_elementwise(self) -> bool:
        """Return True if, judging by its arguments, the operation may be element-wise.

        In-place operations do not count as element-wise.
        """
        values, name = (
            [*self.inputs, *(value for _, value in self.named)],
            getattr(self.function, "__name__", ""),
        )
        plain = all(
            value is LOGITS_ARG or value is None or isinstance(value, int | float | torch.dtype)
            for value in values
        )
        in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        return plain and values.count(LOGITS_ARG) == 1 and not in_place

    def __str__(self) -> str:
        name = getattr(self.function, "__name__", self.function)
        return f"{name}({', '.join(map(str, self.inputs))})"


Operations = tuple[Operation, ...]


def _operation(
    function: Callable[..., Any], inputs: Sequence[Any], named: dict[str, Any] | None
) -> Operation:
    """Describe a call that has the logits, or a result derived from them, as an argument."""
    return Operation(
        function,
        tuple(LOGITS_ARG if torch.is_tensor(value) else value for value in inputs),
        tuple((named or {}).items()),
    )


def _tracking_tensor_class(
    act: Callable[[Any, Sequence[Any], dict[str, Any]], Any],
) -> type[torch.Tensor]:
    """Return a tensor class whose operations `act` (function, inputs, named inputs) computes.

    The results of these operations are tensors of the same class.
    """

    class Followed(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: object, args: Any = (), kwargs: Any = None
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
    """Return the head. Raise ValueError if it is not a plain linear layer."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(
            "it has no head"
            if head is None
            else f"its head is a {type(head).__module__}.{type(head).__name__}"
        )
    return head


def record_operations(
    model: PreTrainedModel, run: Callable[[], torch.Tensor]
) -> tuple[Operations, torch.Tensor]:
    """Run a model. Return its operations on the head's output, and the result of `run`.

    Raise ValueError if losses cannot take the place of the logits.
    """
    found: list[Operation] = []
    made: list[torch.Tensor] = []

    def record(function: Callable[..., Any], inputs: Sequence[Any], named: dict[str, Any]) -> Any:
        result = function(*inputs, **named)
        if torch.is_tensor(result):
            found.append(_operation(function, inputs, named))
        return result

    kind = _tracking_tensor_class(record)
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
        if not operation.is_elementwise:
            raise ValueError(f"it does {operation} to its logits")
    return tuple(found), result.as_subclass(torch.Tensor)


def enable_chunked_loss(
    model: PreTrainedModel,
    operations: Operations,
    vocab_shard: VocabShard | None = None,
    block: int | None = None,
    return_argmax: bool = False,
    fp32: bool = False,
) -> None:
    """Make the forward of `model` accept labels as `losses_of` and return losses, not logits.

    The output's `logits` field then contains the losses. `losses_of` is (B, T) int64, and the token
    losses are (B, T) fp32. Without labels the forward is unchanged. With `return_argmax`, the
    result is (B, T, 2): the loss, and the most likely token as an fp32 number, which is exact.

    `operations` are the model's operations after its head. `vocab_shard` describes the columns of
    this rank's head. `block` is the number of logits that exist at a time. With `fp32`, the head is
    in fp32 under autocast. A forward raises `ConfigError` if the model applies other operations to
    its logits.
    """
    linear, own = head_of(model), model.forward
    replay = _Replay(model, linear, operations)
    chain = replay.chain if operations else None

    @functools.wraps(own)
    def forward(*args: object, losses_of: torch.Tensor | None = None, **kwargs: object) -> Any:
        if losses_of is None:
            return own(*args, **kwargs)
        tokens: list[torch.Tensor] = []  # the most likely tokens, (B, T)

        def losses(hidden: torch.Tensor) -> torch.Tensor:
            head = Head(linear.weight, linear.bias, chain, vocab_shard, fp32)
            if return_argmax:
                found, largest = token_losses_and_argmax(hidden, head, losses_of, block)
                tokens.append(largest)
            else:
                found = token_losses(hidden, head, losses_of, block)
            return replay.track(found)

        replay.start()
        with forward_replaced(linear, losses):
            output = own(*args, **kwargs)
        replay.check_complete()

        given = output.logits.as_subclass(torch.Tensor)
        # Make a copy, because torch 2.13's FSDP2 warns that its hooks may be lost on a view.
        output["logits"] = (
            torch.stack([given, tokens.pop().to(given.dtype)], -1) if tokens else given.clone()
        )
        return output

    set_forward(model, forward)


class _Replay:
    """The operations that a model must apply to its head's output, in order.

    In a forward with labels, the head's output consists of losses, which the operations leave
    unchanged.
    """

    def __init__(self, model: PreTrainedModel, head: nn.Linear, operations: Operations):
        self.model, self.head, self.operations = model, head, operations
        self.remaining: list[Operation] = []  # operations that the current forward must still apply
        self.kind = _tracking_tensor_class(self.pass_through)

    def chain(self, logits: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda value, operation: operation(value), self.operations, logits)

    def track(self, losses: torch.Tensor) -> torch.Tensor:
        """Return the losses as a tensor whose operations go through `pass_through`."""
        # A tensor that already has its own class (for example a fake tensor) cannot be given a
        # different one. If there are no operations, no other class is needed.
        if self.operations or type(losses) is torch.Tensor:
            return losses.as_subclass(self.kind)
        return losses

    def start(self) -> None:
        self.remaining[:] = self.operations

    def pass_through(
        self, function: Callable[..., Any], inputs: Sequence[Any], named: dict[str, Any]
    ) -> Any:
        """Return the losses unchanged for the next recorded operation, or raise an error."""
        operation = _operation(function, inputs, named)
        if self.remaining and operation == self.remaining[0]:
            self.remaining.pop(0)
            return next(value for value in inputs if torch.is_tensor(value))

        result = function(*inputs, **named)
        if function == torch.Tensor.shape.__get__:  # type: ignore[attr-defined]
            # A model may check whether its logits are padded.
            return torch.Size((*result, self.head.out_features))
        if torch.is_tensor(result) and function not in IDENTITY_FUNCTIONS:
            raise self._mismatch(f"does {operation} to its logits")
        return result

    def check_complete(self) -> None:
        """Raise `ConfigError` if the forward has skipped an operation."""
        if self.remaining:
            raise self._mismatch(f"does not do {self.remaining[0]}")

    def _mismatch(self, what: str) -> ConfigError:
        kind = self.model.config.model_type
        rule = f"a {kind} {what} after its head, and its small copy does not"
        return config_error("loss in chunks", rule, "use --loss whole")


# ZeRO-3's hooks (DeepSpeed 0.19.8, parameter_offload.py) pass on the results of these functions.
IDENTITY_FUNCTIONS = (torch.Tensor.detach,)


def exact_operations(model: PreTrainedModel, arguments: dict[str, Any]) -> Operations:
    """Return a small copy's operations on its head's output after verifying them.

    The operations are valid if the losses and gradients computed in blocks equal those from full
    logits. `arguments` are the inputs of the copy's forward. This function changes the copy's
    forward and its head's weights. Raise ValueError if the losses or gradients differ, or cannot be
    computed in blocks.
    """
    labels = arguments["input_ids"].roll(-1, 1)  # (B, T) int64
    labels[:, ::5] = IGNORE
    with torch.no_grad():
        head_of(model).weight.normal_()  # large enough for a soft cap to have an effect

    def output(**more: torch.Tensor) -> torch.Tensor:
        torch.default_generator.manual_seed(0)
        return model(**arguments, **more).logits

    found = []
    for training in (False, True):
        operations, logits = record_operations(model.train(training), output)
        found.append(operations)
    if found[0] != found[1]:
        raise ValueError("it does something else to its logits in training than in evaluation")
    expected = cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none"
    ).view_as(labels)
    gradients = _parameter_gradients(model, expected)

    enable_chunked_loss(model, found[0], block=PROBE_BLOCK_LOGITS * labels.numel())
    losses = output(losses_of=labels)
    for what, mine, theirs in (
        ("losses", [losses], [expected]),
        ("gradients", _parameter_gradients(model, losses), gradients),
    ):
        worst = max((one - other).abs().max() for one, other in zip(mine, theirs, strict=True))
        if not worst <= CHUNKED_TOLERANCE * max(other.abs().max() for other in theirs):
            raise ValueError(f"its {what} differ by {worst:.1e}")
    return found[0]


def _parameter_gradients(model: nn.Module, losses: torch.Tensor) -> list[torch.Tensor]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
    return [torch.zeros(1) if gradient is None else gradient for gradient in found]
