"""Element-wise Adagrad: torch's own step, in a class that DeepSpeed does not replace."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.adagrad import adagrad

from .param_spans import local_tensor

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


class Adagrad(torch.optim.Optimizer):
    """Adagrad as in torch.optim.Adagrad (Duchi et al., JMLR 2011), with the same options.

    Under ZeRO, DeepSpeed 0.19.8 creates torch's Adagrad a second time, without its groups or their
    states (zero/stage_1_and_2.py:946, zero/stage3.py:1358). torch's class creates its states
    immediately, while this class creates them at the first step.
    """

    def __init__(
        self,
        params: "ParamsT",
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ):
        numbers = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "eps": eps,
            "initial_accumulator_value": initial_accumulator_value,
        }
        super().__init__(
            params,
            numbers
            | {
                "foreach": foreach,
                "maximize": maximize,
                "differentiable": differentiable,
                "fused": fused,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step with every parameter that has a gradient."""
        assert closure is None, "no engine gives one"
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in trained:
                if not self.state[parameter]:
                    first = torch.full_like(parameter, group["initial_accumulator_value"])
                    self.state[parameter] |= {"step": torch.tensor(0.0), "sum": first}
            if trained:
                states = [self.state[parameter] for parameter in trained]
                numbers = {
                    name: group[name]
                    for name in (
                        "lr",
                        "lr_decay",
                        "weight_decay",
                        "eps",
                        "foreach",
                        "maximize",
                        "differentiable",
                        "fused",
                    )
                }
                weights = [local_tensor(parameter) for parameter in trained]
                gradients = [
                    local_tensor(parameter.grad)
                    for parameter in trained
                    if parameter.grad is not None
                ]
                adagrad(
                    weights,
                    gradients,
                    [local_tensor(state["sum"]) for state in states],
                    [state["step"] for state in states],
                    **numbers,
                )


OPTIMIZER = Adagrad
