"""Saves and loads a model that torch alone trains, in the files of ZeRO-0: whole tensors, and
torch's optimizer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..parallel.blueprint import Blueprint, Layout
from ..parallel.factors import state_of
from ..storage import errors
from ..storage.create import Carried, create, read_carried
from ..storage.places import holders
from ..storage.tensor_files import BITS, TensorFiles, open_checkpoint


@dataclass
class TorchStates:
    """Saves and loads the states of an engine of torch, as `Engine` asks.

    `kept`: name -> parameter or buffer; `counts`: what a checkpoint of DeepSpeed counts, and the
    loss scale.
    """

    kept: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer
    counts: dict[str, Any]

    def save(
        self, step: Path, blueprint: Blueprint, layout: Layout, background: bool
    ) -> list[tuple[Any, Path]]:
        """Gathers one tensor after the other, which the first rank writes; returns what this rank
        has to write, and the files that it wrote (a collective).

        Raises what the disk raises, on the first rank only, after the last tensor: the others wait
        there.
        """
        assert not background, "what is saved in the background was refused"
        writes = torch.distributed.get_rank() == 0
        file, failure = next(holders(blueprint, layout)).model_file(), None
        if skipped := not self.optimizer.state:  # an overflow has skipped every step so far
            self._make_states(blueprint, layout, dict.fromkeys(layout.scalars, 0.0))
        opened: TensorFiles | None = None
        if writes:
            try:
                create(
                    step,
                    blueprint,
                    layout,
                    Carried(
                        _numbers(self.optimizer, blueprint),
                        _scalars(self.optimizer, layout),
                        self.counts,
                    ),
                )
                opened = open_checkpoint(step, blueprint, layout, writable=True)
            except (OSError, RuntimeError) as error:
                failure = error
        for tensor, role, part in self._pieces(blueprint, layout, states=True):
            whole = part.full_tensor() if isinstance(part, DTensor) else part
            if opened is not None and failure is None:
                try:
                    opened.write(tensor, role, 0, _bits(whole.detach()))
                except OSError as error:
                    failure = error
        if opened is not None:
            opened.close()
        if skipped:
            self.optimizer.state.clear()  # the optimizer's own first values may differ from zero
        if failure is not None:
            raise failure
        return ([(None, step / file)] if writes else []) + errors.kept(
            self.optimizer, step, torch.distributed.get_rank()
        )

    def load(self, step: Path, blueprint: Blueprint, layout: Layout, begun: bool) -> None:
        """Reads what this rank holds of each tensor and, if a step has been taken, of the
        optimizer's states; and the counts, but for the JSON.
        """
        carried = read_carried(step, blueprint, layout)
        begun = begun and carried.counts["skipped_steps"] < carried.counts["global_steps"]
        if begun:
            self._make_states(blueprint, layout, carried.scalars)
        opened = open_checkpoint(step, blueprint, layout)
        for tensor, role, part in self._pieces(blueprint, layout, states=begun):
            local, start = _own(part)
            bits = opened.read(tensor, role, start, start + local.numel())
            local.copy_(torch.from_numpy(bits).view(local.dtype).view(local.shape))
        opened.close()
        self.counts |= carried.counts | {"ds_config": self.counts["ds_config"]}

    def _make_states(self, blueprint: Blueprint, layout: Layout, scalars: dict[str, float]) -> None:
        # of ours that keep others than tensors of the weight's shape
        make = getattr(self.optimizer, "new_states", None)
        for tensor in (tensor for tensor in blueprint.tensors if tensor.group is not None):
            parameter, counted = (
                self.kept[tensor.name],
                {name: torch.tensor(value) for name, value in scalars.items()},
            )
            states = (
                make(parameter)
                if make
                else {
                    role: torch.zeros_like(parameter)
                    for role in blueprint.states_of(tensor, layout)
                }
            )
            self.optimizer.state[parameter] = states | counted

    def _pieces(self, blueprint: Blueprint, layout: Layout, states: bool) -> Any:
        """Yields (tensor, role, what holds it) of all that a step folder has, in the same order on
        every rank.
        """
        for tensor in blueprint.tensors:
            value = self.kept[tensor.name]
            yield tensor, "weight" if tensor.group is None else "master", value
            if states and tensor.group is not None:
                for role in blueprint.states_of(tensor, layout):
                    yield state_of(tensor, role), role, self.optimizer.state[value][role]


def _own(part: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns this rank's memory of a tensor, and the element of the whole that it begins with.

    FSDP2 cuts rows as torch.chunk does.
    """
    if not isinstance(part, DTensor):
        return part.detach(), 0
    local, ranks = part.to_local().detach(), part.device_mesh.size()
    rows = -(-part.shape[0] // ranks) * part.device_mesh.get_local_rank()
    return local, min(rows, part.shape[0]) * (part.numel() // max(1, part.shape[0]))


def _bits(value: torch.Tensor) -> Any:
    """Returns the elements as unsigned integers in row-major order, on the CPU."""
    flat = value.cpu().contiguous().flatten()
    return (
        flat.view(
            {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
        )
        .numpy()
        .view(BITS[flat.element_size()])
    )


def _numbers(optimizer: torch.optim.Optimizer, blueprint: Blueprint) -> dict[int, dict[str, Any]]:
    """Returns the learning rate, betas and the like of each optimizer group, by its number in the
    blueprint.
    """
    groups = {
        group["name"]: {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    }
    return {
        number: groups[group.name]
        for number, group in enumerate(blueprint.groups)
        if group.name in groups
    }


def _scalars(optimizer: torch.optim.Optimizer, layout: Layout) -> dict[str, float]:
    """Returns what the optimizer counts; all its parameters have the same."""
    state = next(iter(optimizer.state.values()))
    return {name: float(state[name]) for name in layout.scalars}
