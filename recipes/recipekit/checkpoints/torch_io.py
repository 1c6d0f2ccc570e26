"""Saving and loading of states, as ZeRO-0 files, for a model trained by torch without DeepSpeed.

These files contain full tensors and the states of torch's optimizer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..parallel.adafactor_state_map import state_tensor
from ..parallel.blueprint import Blueprint, Layout
from ..storage import error_feedback
from ..storage.file_map import model_parallel_ranks
from ..storage.step_files import CommonState, create_step_files, read_common_state
from ..storage.tensor_files import UINT_BY_BYTES, TensorFiles, open_checkpoint


@dataclass
class TorchStates:
    """A torch engine's states, saved and loaded as `Engine` requires.

    `tensors` maps names to parameters and buffers. `counts` contains a DeepSpeed checkpoint's
    counts and the loss scale.
    """

    tensors: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer
    counts: dict[str, Any]

    def save(
        self, step: Path, blueprint: Blueprint, layout: Layout, background: bool
    ) -> list[tuple[Any, Path]]:
        """Gather one tensor after the other; the first rank writes each tensor.

        This is a collective operation. Return the contents that this rank must still write, and the
        files that it has written. Disk errors are raised only on the first rank, and only after the
        last tensor, because the other ranks wait in these collective operations.
        """
        assert not background, "what is saved in the background was refused"
        writes = torch.distributed.get_rank() == 0
        file, failure = next(model_parallel_ranks(blueprint, layout)).model_file(), None
        if skipped := not self.optimizer.state:  # overflows have skipped every step so far
            self._make_states(blueprint, layout, dict.fromkeys(layout.scalars, 0.0))
        opened: TensorFiles | None = None
        if writes:
            try:
                create_step_files(
                    step,
                    blueprint,
                    layout,
                    CommonState(
                        _group_hyperparameters(self.optimizer, blueprint),
                        _optimizer_scalars(self.optimizer, layout),
                        self.counts,
                    ),
                )
                opened = open_checkpoint(step, blueprint, layout, writable=True)
            except (OSError, RuntimeError) as error:
                failure = error
        for tensor, role, part in self._stored_tensors(blueprint, layout, states=True):
            whole = part.full_tensor() if isinstance(part, DTensor) else part
            if opened is not None and failure is None:
                try:
                    opened.write(tensor, role, 0, _as_unsigned(whole.detach()))
                except OSError as error:
                    failure = error
        if opened is not None:
            opened.close()
        if skipped:
            self.optimizer.state.clear()  # the optimizer's initial values may differ from zero
        if failure is not None:
            raise failure
        return ([(None, step / file)] if writes else []) + error_feedback.errors_to_save(
            self.optimizer, step, torch.distributed.get_rank()
        )

    def load(self, step: Path, blueprint: Blueprint, layout: Layout, has_stepped: bool) -> None:
        """Read this rank's part of each tensor, and all counts that are not in the JSON.

        If a step has been taken, also read this rank's part of the optimizer states.
        """
        carried = read_common_state(step, blueprint, layout)
        has_stepped = (
            has_stepped and carried.counts["skipped_steps"] < carried.counts["global_steps"]
        )
        if has_stepped:
            self._make_states(blueprint, layout, carried.scalars)
        opened = open_checkpoint(step, blueprint, layout)
        for tensor, role, part in self._stored_tensors(blueprint, layout, states=has_stepped):
            local, start = _local_slice(part)
            bits = opened.read(tensor, role, start, start + local.numel())
            local.copy_(torch.from_numpy(bits).view(local.dtype).view(local.shape))
        opened.close()
        self.counts |= carried.counts | {"ds_config": self.counts["ds_config"]}

    def _make_states(self, blueprint: Blueprint, layout: Layout, scalars: dict[str, float]) -> None:
        # for this project's optimizers, whose states may not have the weight's shape
        make = getattr(self.optimizer, "new_states", None)
        for tensor in (tensor for tensor in blueprint.tensors if tensor.group is not None):
            parameter, counted = (
                self.tensors[tensor.name],
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

    def _stored_tensors(self, blueprint: Blueprint, layout: Layout, states: bool) -> Any:
        """Yield (tensor, role, value) for all tensors in a step folder.

        The order is the same on every rank.
        """
        for tensor in blueprint.tensors:
            value = self.tensors[tensor.name]
            yield tensor, "weight" if tensor.group is None else "master", value
            if states and tensor.group is not None:
                for role in blueprint.states_of(tensor, layout):
                    yield state_tensor(tensor, role), role, self.optimizer.state[value][role]


def _local_slice(part: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return this rank's part of a tensor, and the index of its first element in the full tensor.

    FSDP2 splits rows in the same way as torch.chunk.
    """
    if not isinstance(part, DTensor):
        return part.detach(), 0
    local, ranks = part.to_local().detach(), part.device_mesh.size()
    rows = -(-part.shape[0] // ranks) * part.device_mesh.get_local_rank()
    return local, min(rows, part.shape[0]) * (part.numel() // max(1, part.shape[0]))


def _as_unsigned(value: torch.Tensor) -> Any:
    """Return a tensor's elements as unsigned integers in row-major order, on the CPU."""
    flat = value.cpu().contiguous().flatten()
    return (
        flat.view(
            {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
        )
        .numpy()
        .view(UINT_BY_BYTES[flat.element_size()])
    )


def _group_hyperparameters(
    optimizer: torch.optim.Optimizer, blueprint: Blueprint
) -> dict[int, dict[str, Any]]:
    """Return each optimizer group's hyperparameters by the group's number in the blueprint.

    Examples are the learning rate and betas.
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


def _optimizer_scalars(optimizer: torch.optim.Optimizer, layout: Layout) -> dict[str, float]:
    """Return the optimizer's scalars, such as its step count.

    They are the same for all parameters.
    """
    state = next(iter(optimizer.state.values()))
    return {name: float(state[name]) for name in layout.scalars}
