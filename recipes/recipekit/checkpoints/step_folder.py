"""Step folders as described by their files, and the layouts to which they can be converted."""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..architectures.small_files import small_files
from ..dslint.divisibility import check_tp
from ..dslint.shapes import common_divisors
from ..parallel.blueprint import Blueprint, Layout, default_optimizer, stage_bounds
from ..spec.errors import ConfigError, Problem, config_error
from ..spec.mesh import Mesh
from ..spec.run_folder import CHECKPOINTS
from ..spec.step_names import step_folders
from ..storage import error_feedback, manifest
from . import external_checkpoints
from .state import TrainState

EXPERTS_NOT_DESCRIBED = "its sharded experts were saved before checkpoints described them"


@dataclass(frozen=True)
class StepFolder:
    """A complete step folder, described by the files in it."""

    folder: Path
    state: TrainState
    blueprint: Blueprint
    layout: Layout
    tensors: dict[str, Any]  # digests from its manifest
    unlisted_files: tuple[str, ...] = ()  # files that its manifest does not name

    @property
    def fingerprint(self) -> list[Any]:
        """A value that changes if the content changes; based on file names, sizes and times."""
        stats = [
            (path.name, path.stat().st_size, path.stat().st_mtime_ns)
            for path in sorted(self.folder.iterdir())
        ]
        return [str(self.folder.resolve()), stats]

    @property
    def small_files(self) -> dict[str, Path]:
        """File names in a model's folder -> config and tokenizer files.

        The files are copies in this step folder, or the files that HF Trainer stores next to its
        checkpoint.
        """
        own = self.folder / "hf_files"
        if own.is_dir():
            return {
                path.relative_to(own).as_posix(): path
                for path in manifest.listed_files(self.folder, "hf_files/**/*")
            }
        return {name: self.folder.parent / name for name in small_files(self.folder.parent)}

    @property
    def model_config(self) -> dict[str, Any] | None:
        """The model's config.json, or None if the checkpoint has no readable config.json."""
        with suppress(OSError, ValueError):
            return (
                json.loads(self.small_files["config.json"].read_bytes())
                if "config.json" in self.small_files
                else None
            )

    def check_digests(self, digests: dict[str, Any]) -> None:
        """Raise `ConfigError` if the tensors' `digests` differ from the saved digests."""
        for key, (_, _, read) in digests.items():
            if key in self.tensors and self.tensors[key][2] != read:
                name, role = key.split("|")
                raise config_error(
                    f"{self.folder}: {name} ({role})",
                    "differs from what was saved: its digest does not match",
                    "use another checkpoint. Nothing was written",
                )


def open_step(path: Path) -> StepFolder:
    """Open the step folder `path`, or a run's newest complete step folder.

    Raise `ConfigError` that reports the first fault. Contents are checked later, when they are
    read.
    """
    if not path.is_dir():
        raise config_error(
            str(path),
            "the folder does not exist",
            "name a run folder, such as runs/NAME, or a step folder inside one",
        )
    steps = step_folders(path / CHECKPOINTS)[::-1] or [path]
    found: list[str] = []
    if (
        not (steps[0] / manifest.MANIFEST).exists()
        and not (steps[0] / manifest.STATE_FILE).exists()
        and (folder := external_checkpoints.tag_folder(steps[0]))
    ):
        blueprint, layout, state = external_checkpoints.describe_tag_folder(folder)
        return StepFolder(folder, state, blueprint, layout, {})
    for step in steps:
        if faults := manifest.find_faults(step, ()):
            found.append(f"{step}: {faults[0]}")
            continue
        state = json.loads((step / manifest.STATE_FILE).read_text())
        saved = json.loads((step / manifest.BLUEPRINT_FILE).read_text())
        layout = Layout.from_json(state["layout"])
        if saved is None:
            raise config_error(
                str(step),
                EXPERTS_NOT_DESCRIBED,
                "resume in the same layout, then convert a checkpoint that the resumed run saves",
            )
        listed = manifest.read_manifest(step)
        return StepFolder(
            step,
            state,
            Blueprint.from_json(saved),
            layout,
            listed["tensors"],
            tuple(manifest.unlisted_files(step, listed)),
        )
    raise config_error(
        str(path),
        f"contains no complete checkpoint ({'; '.join(found)})",
        "name a run folder, or a step folder inside one",
    )


@dataclass(frozen=True)
class LayoutChange:
    """The parallel degrees and the ZeRO stage of a changed layout; None means unchanged."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    zero: int | None = None
    ep: int | None = None

    def degrees(self, before: Mesh) -> dict[str, int]:
        """Return axis -> degree."""
        asked = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "ep": self.ep}
        return {
            axis: degree if degree is not None else getattr(before, axis)
            for axis, degree in asked.items()
        }


def target_layout(
    blueprint: Blueprint,
    before: Layout,
    change: LayoutChange,
    model_config: dict[str, Any] | None = None,
) -> Layout:
    """Return the changed layout.

    Raise `ConfigError` for a layout that the model does not support. The model's number of heads is
    read from `model_config`.
    """
    degrees = change.degrees(before.mesh)
    zero = change.zero if change.zero is not None else before.zero_stage
    problems = _check_degrees(degrees, zero)
    problems += _check_plans(blueprint, degrees, check_tp(degrees["tp"], model_config))
    if before.dtype == "float16" and (zero, before.mesh.pp) != (before.zero_stage, degrees["pp"]):
        problems.append(
            Problem(
                "fp16",
                "its loss scaler cannot be converted to another ZeRO stage",
                "use the same --zero",
            )
        )
    problems += _check_ep(blueprint, degrees) if degrees["ep"] > 1 else []
    problems += error_feedback.check_degrees(before, degrees, zero)
    if problems:
        raise ConfigError(problems)

    return replace(
        before,
        mesh=Mesh(**degrees),
        zero_stage=zero,
        optimizer=before.optimizer
        if zero == before.zero_stage
        else default_optimizer(zero, before.dtype),
        bounds=stage_bounds(blueprint, degrees["pp"]) if degrees["pp"] > 1 else (),
        schedule="1f1b",
        # DeepSpeed 0.19.8 does not save sharded experts from swap files
        swapped=before.swapped and zero == 3 and degrees["ep"] == 1,
    )


def _check_degrees(degrees: dict[str, int], zero: int) -> list[Problem]:
    """Return problems for degrees and a ZeRO stage that no model supports."""
    problems = [
        Problem(f"{name} = {value}", "must be at least 1", f"use --{name} 1")
        for name, value in degrees.items()
        if value < 1
    ]
    if zero not in range(4):
        problems.append(
            Problem(f"zero = {zero}", "must be a ZeRO stage from 0 to 3", "use --zero 1")
        )
    pp = degrees["pp"]
    if pp > 1 and zero > 1:
        problems.append(
            Problem(
                f"pp = {pp} with zero = {zero}",
                "cannot be combined: a pipeline stage keeps its full gradients, and ZeRO-2 and"
                " ZeRO-3 shard them",
                "use --zero 1, or --pp 1",
            )
        )
    return problems


def _check_plans(
    blueprint: Blueprint, degrees: dict[str, int], sizes: list[Problem]
) -> list[Problem]:
    """Return problems for degrees that the tensor-parallel and pipeline plans do not support.

    `sizes` contains problems of the tensor-parallel degree with the model's sizes.
    """
    tp, pp, layers = degrees["tp"], degrees["pp"], blueprint.num_layers
    problems = []
    if tp > 1 and not blueprint.can_tp:
        problems.append(
            Problem(f"tp = {tp}", "this model publishes no tensor-parallel plan", "use --tp 1")
        )
    else:
        problems += sizes
    if pp > max(1, layers):
        rule = (
            f"the model has {layers} layers" if layers else "this model publishes no pipeline plan"
        )
        problems.append(Problem(f"pp = {pp}", rule, f"use --pp {max(1, layers)}"))
    return problems


def _check_ep(blueprint: Blueprint, degrees: dict[str, int]) -> list[Problem]:
    """Return problems for an expert-parallel degree.

    The degree must be compatible with the model's experts, the data-parallel ranks and the other
    degrees.
    """
    ep, dp, experts = degrees["ep"], degrees["dp"], blueprint.num_experts
    found = []
    if others := {name: degrees[name] for name in ("tp", "pp") if degrees[name] > 1}:
        where = (
            f"ep = {ep} with"
            f" {' and '.join(f'{name} = {degree}' for name, degree in others.items())}"
        )
        fix = f"use --ep 1, or {' '.join(f'--{name} 1' for name in others)}"
        found.append(
            Problem(
                where, "expert parallelism can be combined only with data parallelism and ZeRO", fix
            )
        )
    if not experts:
        found.append(
            Problem(
                f"ep = {ep}",
                "the checkpoint contains no experts that DeepSpeed's AutoEP shards",
                "use --ep 1",
            )
        )
    elif experts % ep:
        fits = " or ".join(str(degree) for degree in common_divisors(experts, dp) if degree < ep)
        found.append(
            Problem(
                f"ep = {ep}", f"does not divide the model's {experts} experts", f"use --ep {fits}"
            )
        )
    if dp > 0 and dp % ep:
        found.append(
            Problem(
                f"ep = {ep}",
                f"does not divide the {dp} data-parallel ranks",
                f"use --dp {-(-dp // ep) * ep}, or --ep 1",
            )
        )
    return found
