"""Resolution of the model at a start, by all ranks together, including the memory check."""

import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..hosts.checks import free_memory
from ..model.model_plan import ModelPlan, changed_choices
from ..plan import RunPlan
from ..planner.resolve import TargetDevice, resolve_model
from ..spec.devices import gib
from ..spec.errors import ConfigError, Say
from ..spec.memory_terms import ACCELERATOR, HOST, NVME, Term, memory_problems
from ..spec.run_folder import model_plan_of_run
from .rank_consistency import shared_problems
from .run_metadata import device_name


def resolve_together(
    plan: RunPlan, model_config: dict[str, Any], device: torch.device
) -> tuple[ModelPlan, PreTrainedModel]:
    """Resolve the model for this rank's device and check the memory (a collective).

    Return the result of `resolve_model`. Raises `ConfigError` on all ranks, with every rank's
    problems.
    """
    # A problem on one host must stop all ranks, because the other ranks would wait for that host.
    resolved, refusal = None, None
    try:
        resolved = resolve_model(plan, model_config, target_here(device))
        check_memory(plan, resolved[0].terms, device)
    except ConfigError as error:
        refusal = error
    problems = shared_problems(refusal)

    # Report each problem once, even if the ranks measured slightly different amounts of free
    # memory.
    if once := {(problem.where.partition(" = ")[0], problem.rule): problem for problem in problems}:
        raise ConfigError(list(once.values()))
    assert resolved is not None
    return resolved


def target_here(device: torch.device) -> TargetDevice:
    """Return this rank's device as an argument for `resolve_model`."""
    compiles = device.type == "cuda" and torch.version.hip is None
    return TargetDevice(device, device_name(), compiles)


def check_memory(
    plan: RunPlan, terms_of_stages: Sequence[Sequence[Term]], device: torch.device
) -> None:
    """Raise `ConfigError` if the states are certain to exceed the free memory.

    The check covers this rank's states and the states of all ranks on its host. Call it before
    anything large is allocated. `terms_of_stages` contains the memory terms of one rank for each
    pipeline stage.
    """
    stage, rank = plan.mesh.coords(plan.command.rank)["pp"], plan.command.rank
    terms, problems = terms_of_stages[stage], []
    first, ranks = rank - plan.command.local_rank, plan.command.local_ranks or 1
    alike = sum(
        plan.mesh.coords(other)["pp"] == stage
        for other in range(max(0, first), min(first + ranks, plan.mesh.world))
    )
    if device.type == "cuda":
        if plan.command.rank == 0 and (
            pinned := sum(term.pinned for term in terms if not term.bound)
        ):
            print(f"offload pins {gib(pinned)} of host memory on each rank, rounding included")
        problems += memory_problems(
            terms,
            ACCELERATOR,
            torch.cuda.mem_get_info(device)[0],
            on=f"{torch.cuda.get_device_name(device)} that is free",
        )
    else:
        # The kernel allocates only pages that are written, so a bucket may use less than its size.
        terms = [
            replace(term, place=HOST, pinned=0, bound=term.bound or "bucket" in term.what)
            for term in terms
            if term.place != NVME
        ]
    if (free := free_memory()) is not None:
        problems += memory_problems(
            terms, HOST, free, max(1, alike), on=f"{platform.node()} that is free"
        )
    if problems:
        raise ConfigError(problems)


def log_changes(model_plan: ModelPlan, resume_from: Path | None, say: Say) -> None:
    """Log the choices that differ from the choices of the run to resume.

    If the run is older than this record, nothing is compared.
    """
    for line in changed_choices(model_plan_of_run(resume_from), model_plan.as_json()):
        say(line)
