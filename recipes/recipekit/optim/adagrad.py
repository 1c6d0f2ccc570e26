"""Adagrad, element by element: torch's own step, in a class that DeepSpeed leaves alone."""

from typing import Any

import torch
from torch.optim.adagrad import adagrad

from .borders import local


class Adagrad(torch.optim.Optimizer):
    """Updates weights as torch.optim.Adagrad does (Duchi et al., JMLR 2011), whose options these
    are.

    DeepSpeed 0.19.8 makes torch's Adagrad anew under ZeRO, without its groups or their states
    (zero/stage_1_and_2.py:946, zero/stage3.py:1358). Torch's makes its states at once, this one at
    the first step.
    """

    def __init__(
        self,
        params: Any,
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
    def step(self, closure: Any = None) -> Any:
        """Takes a step with every parameter that has a gradient."""
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
                weights = [local(parameter) for parameter in trained]
                gradients = [
                    local(parameter.grad) for parameter in trained if parameter.grad is not None
                ]
                adagrad(
                    weights,
                    gradients,
                    [local(state["sum"]) for state in states],
                    [state["step"] for state in states],
                    **numbers,
                )
