"""The layout of checkpoints that other programs saved with DeepSpeed, derived from their files.

Such programs are HF Trainer, scripts that use DeepSpeed directly, and AutoTP. Pipeline checkpoints
are rejected, because nothing in their layer files identifies the model. At ZeRO-0, the optimizer
states are not converted, because they are stored without names.
"""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..parallel.blueprint import (
    Blueprint,
    Layout,
    Tensor,
    flat_groups,
    optimizer_groups,
    tensors_on_rank,
)
from ..spec.errors import config_error
from ..spec.mesh import Mesh
from ..spec.optimizer_specs import (
    OPTIMIZERS,
    has_matrix_rule,
    optimizer_family,
    optimizer_spec_of,
    optimizer_states,
)
from ..storage.file_map import map_shards, model_file, optimizer_file
from ..storage.tensor_files import TorchFileIndex
from ..storage.torch_files import read_torch_file
from .state import TrainState


def tag_folder(path: Path) -> Path | None:
    """Return the folder that contains the files, or None if there are no such files.

    The folder is `path` itself, or the folder that `path`'s file `latest` names or links to.
    """
    if any(path.glob("*_model_states.pt")):
        return path
    latest = path / "latest"
    if any(latest.glob("*_model_states.pt")):
        return latest.resolve()
    tag = latest.read_text().strip() if latest.is_file() else ""
    if tag and Path(tag).name == tag and any((path / tag).glob("*_model_states.pt")):
        return path / tag
    return None


@dataclass(frozen=True)
class SavedOptimizer:
    """The optimizer of a checkpoint, described with a layout's fields.

    `layout_fields` contains the layout's algorithm, states and scalars. `groups` is the parameter
    group of each list of shapes in the model file.
    """

    zero_stage: int
    kind: str
    layout_fields: dict[str, Any]
    groups: tuple[int, ...] = ()
    int_step: bool = False
    sub_group_size: int = 10**18


def describe_tag_folder(folder: Path) -> tuple[Blueprint, Layout, TrainState]:
    """Return a tag folder's (blueprint, layout, state).

    A tag folder is a checkpoint folder of DeepSpeed. Raise `ConfigError` if the files do not
    determine these values.
    """
    _refuse_other_shards(folder)
    at_zero3 = any(folder.glob("zero_pp_rank_*_model_states.pt"))
    file = "zero_pp_rank_0_mp_rank_00_model_states.pt" if at_zero3 else "mp_rank_00_model_states.pt"
    model = read_torch_file(folder / file)
    tp, dp, config = model["mp_world_size"], model["dp_world_size"], model["ds_config"]
    dtype = _dtype_of(folder, config)

    if any(folder.glob("*_optim_states.pt")) or at_zero3:
        optimizer = _saved_optimizer(folder, config, dtype, at_zero3)
    else:
        # At ZeRO-0, the states have no names, so `reshape` rejects them.
        kind = "torch" if dtype == "float32" else "FP16_UnfusedOptimizer"
        optimizer = SavedOptimizer(0, kind, {"states": (), "scalars": ()})

    layout = Layout(
        Mesh(dp=dp, tp=tp),
        optimizer.zero_stage,
        optimizer.kind,
        dtype,
        sub_group_size=optimizer.sub_group_size,
        int_step=optimizer.int_step,
        **optimizer.layout_fields,
    )
    blueprint = _blueprint(folder, model, layout, optimizer.groups)
    _check_sizes(folder, blueprint, layout)
    state: TrainState = {
        "step": model["global_steps"],
        "tokens": 0,
        "data": None,
        "export_dtype": dtype,
    }
    return blueprint, layout, state


def _refuse_other_shards(folder: Path) -> None:
    """Raise `ConfigError` for the folder of a pipeline or of sharded experts."""
    if any(folder.glob("layer_*")):
        raise _unsupported_error(
            folder,
            "is from a pipeline, and pipeline layer files do not name their model",
            "export it to Hugging Face files with the program that wrote it",
        )
    if any(folder.glob("*expp_rank_*")) or any(folder.glob("*_expert_*")):
        raise _unsupported_error(
            folder,
            "has experts that DeepSpeed sharded",
            "export it to Hugging Face files with the program that wrote it",
        )


def _dtype_of(folder: Path, config: dict[str, Any]) -> str:
    """Return the training dtype."""
    if any(folder.glob("bf16_zero_*")) or bool(config.get("bf16", {}).get("enabled")):
        return "bfloat16"
    return "float16" if config.get("fp16", {}).get("enabled") else "float32"


def _saved_optimizer(
    folder: Path, config: dict[str, Any], dtype: str, at_zero3: bool
) -> SavedOptimizer:
    """Read a ZeRO checkpoint's optimizer from the first rank's file.

    Raise `ConfigError` for settings and states that a layout cannot describe.
    """
    prefix = "bf16_" if dtype == "bfloat16" else ""
    file = folder / f"{prefix}zero_pp_rank_0_mp_rank_00_optim_states.pt"
    saved = read_torch_file(file)["optimizer_state_dict"]
    stage, kind = _stage_and_kind(saved, at_zero3)
    base = saved["optimizer_state_dict"] if stage == 3 else saved["base_optimizer_state"]
    if any(any(paddings) for paddings in saved.get("param_alignment_paddings", [])):
        raise _unsupported_error(
            folder,
            "was saved with zero_optimization.parameter_alignment",
            "save it once more without that setting",
        )
    if isinstance(base, list):
        raise _unsupported_error(
            folder,
            "was saved with zero_optimization.elastic_checkpoint",
            "save it once more without that setting",
        )

    # some Adam implementations count their steps in the group instead of the state
    states = next(iter(base["state"].values()), {})
    counted = {"step"} if any("step" in group for group in base["param_groups"]) else set()
    facts = layout_optimizer(config, counted | set(states), folder)
    int_step = isinstance(states.get("step", 0), int)

    numbered = list(enumerate(base["param_groups"]))
    if stage != 3:
        return SavedOptimizer(stage, kind, facts, tuple(number for number, _ in numbered), int_step)
    groups = tuple(number for number, group in numbered for _ in group["params"])
    sub_group_size = int(config["zero_optimization"].get("sub_group_size", 10**9))
    return SavedOptimizer(stage, kind, facts, groups, int_step, sub_group_size)


def _stage_and_kind(saved: dict[str, Any], at_zero3: bool) -> tuple[int, str]:
    """Return a saved optimizer's ZeRO stage and DeepSpeed optimizer class."""
    if "zero_stage" not in saved:
        return 1, "BF16_Optimizer"
    if at_zero3:
        return 3, "DeepSpeedZeroOptimizer_Stage3"
    return int(saved["zero_stage"].values[0]), "DeepSpeedZeroOptimizer"


def layout_optimizer(config: dict[str, Any], states: set[str], folder: Path) -> dict[str, Any]:
    """Return the layout fields for the optimizer that the saved JSON names.

    If the JSON names no optimizer, a script created the optimizer, and Adam is assumed. Raise
    `ConfigError` if the files contain different states.
    """
    kind = str((config.get("optimizer") or {}).get("type", "AdamW"))
    # DeepSpeed's Muon applies to different matrices than a recipe's Muon
    known = any(name.lower() == kind.lower() for name in OPTIMIZERS) and not has_matrix_rule(config)
    named, scalars = (
        (optimizer_states(config), optimizer_spec_of(config).scalars) if known else ((), ())
    )
    if not known or {*named, *scalars} != states:
        rule = (
            f"has optimizer states {', '.join(sorted(states)) or 'none'}, not {kind}'s"
            f" {', '.join((*named, *scalars)) or '(unknown)'}"
        )
        raise _unsupported_error(
            folder, rule, "export it to Hugging Face files with the program that wrote it"
        )
    return {"algorithm": optimizer_family(config), "states": named, "scalars": scalars}


def _blueprint(
    folder: Path, model: dict[str, Any], layout: Layout, groups: tuple[int, ...]
) -> Blueprint:
    cuts = _autotp_splits(folder, model, layout.mesh.tp)
    names = {name for name in model["module"] if name not in set(model["buffer_names"])}
    aliases = {alias: (name, "every") for alias, name in (model["shared_params"] or {}).items()}
    tensors = []

    def add(name: str, shape: tuple[int, ...], group: int | None) -> None:
        whole, cut, ranges = cuts.get(name, (tuple(shape), None, ()))
        tensors.append(Tensor(name, whole, group, cut, ranges=ranges))

    for number, shapes in enumerate(model["param_shapes"] or []):
        for name, shape in shapes.items():
            add(name, shape, groups[number])
    listed = {tensor.name for tensor in tensors} | set(aliases)
    frozen = dict(model["frozen_param_shapes"] or {}) | {
        name: model["module"][name].shape for name in names if layout.zero_stage < 3
    }
    for name, shape in frozen.items():
        if name not in listed:
            add(name, shape, None)  # at ZeRO-0, the states have no names, so only weights are read
    for name in model["buffer_names"]:
        if name in model["module"]:
            value = model["module"][name]
            tensors.append(Tensor(name, tuple(value.shape), None, buffer=value.dtype))
    return Blueprint(tuple(tensors), aliases, 0, False)


def _autotp_splits(
    folder: Path, model: dict[str, Any], tp: int
) -> dict[str, tuple[tuple[int, ...], tuple[int, int] | None, Any]]:
    """Return how AutoTP split each parameter.

    The values are (full shape, split dimension, index ranges for each rank). See
    deepspeed/checkpoint/affine.py, version 1.
    """
    if tp == 1:
        return {}
    notes = model.get("universal_checkpoint_info") or {}
    affine = notes.get("affine_map") or {}
    if affine.get("version") != 1 or notes.get("autotp_unsupported_parameter_patterns"):
        raise _unsupported_error(
            folder,
            f"is of {tp} tensor ranks but does not record how they split the parameters",
            "export it to Hugging Face files with the program that wrote it",
        )
    cuts = {}
    for pattern, facts in affine["params"].items():
        name = re.sub(r"\\(.)", r"\1", pattern.removeprefix("^").removesuffix("$"))
        whole = tuple(facts["logical_shape"])
        ranges, cut = [], None
        for rank in range(tp):
            dim, own = _ranges_of_rank(f"{folder}: {name}", whole, facts["ranks"][rank]["pieces"])
            cut = (dim, 1) if dim is not None else cut
            ranges.append(own)
        cuts[name] = (whole, cut, tuple(ranges) if cut else ())
    return cuts


def _ranges_of_rank(
    where: str, full_shape: tuple[int, ...], pieces: list[dict[str, Any]]
) -> tuple[int | None, tuple[tuple[int, int], ...]]:
    """Return (the dimension along which AutoTP split a parameter, the rank's index ranges in it).

    The dimension is None if each piece is the full parameter. Raise `ConfigError` for all other
    pieces.
    """
    strides = [prod(full_shape[dim + 1 :]) for dim in range(len(full_shape))]
    ranges, cut = [], None
    for piece in sorted(pieces, key=lambda piece: piece["dest"][0]):
        differ = [dim for dim, size in enumerate(piece["shape"]) if size != full_shape[dim]]
        if len(differ) > 1 or list(piece["source"][1]) != strides or "scale" in piece:
            raise _unsupported_error(
                where,
                "is split in a way that is not a range of one dimension",
                "export it to Hugging Face files with the program that wrote it",
            )
        dim = differ[0] if differ else 0
        start = piece["source"][0] // strides[dim]
        ranges.append((start, start + piece["shape"][dim]))
        cut = dim if differ else cut
    return cut, tuple(ranges)


def _check_sizes(folder: Path, blueprint: Blueprint, layout: Layout) -> None:
    """Raise `ConfigError` unless the files match the layout.

    Every tensor must be at its location, and the flat tensors must have the sizes that follow from
    the layout. No file may belong to a rank that the layout does not have.
    """
    opened = _check_segments(folder, blueprint, layout)
    if layout.zero_stage == 3:
        _check_flat_sizes(folder, blueprint, layout, opened)
    _check_extra_files(folder, layout, set(opened))


def _check_segments(
    folder: Path, blueprint: Blueprint, layout: Layout
) -> dict[str, TorchFileIndex]:
    """Return the layout's files; raise `ConfigError` for a missing file or a small tensor."""
    opened: dict[str, TorchFileIndex] = {}
    for own in map_shards(blueprint, layout).values():
        for piece in (piece for shard in own for piece in shard.segments):
            if piece.file not in opened:
                if not (folder / piece.file).is_file():
                    raise config_error(
                        str(folder / piece.file), "is missing", "copy the whole folder"
                    )
                opened[piece.file] = TorchFileIndex(folder / piece.file)
            tensor = opened[piece.file].tensors.get(piece.keys)
            if tensor is None or tensor.numel() < piece.offset + piece.stop - piece.start:
                raise _unsupported_error(
                    f"{folder / piece.file}: {'/'.join(map(str, piece.keys))}",
                    "does not have the size that the layout states",
                    "use another copy",
                )
    return opened


def _check_flat_sizes(
    folder: Path, blueprint: Blueprint, layout: Layout, opened: dict[str, TorchFileIndex]
) -> None:
    """Raise `ConfigError` if ZeRO-3 and the layout partition a group over different ranks."""
    for tp_rank in range(layout.mesh.tp):
        flats = flat_groups(
            optimizer_groups(tensors_on_rank(blueprint, layout, 0), layout, tp_rank), layout
        )
        tensors = opened[optimizer_file(layout, 0, tp_rank, 0)].tensors if flats else {}
        for index, (_, size, _) in enumerate(flats):
            found = tensors["optimizer_state_dict", "fp32_flat_groups", index].numel()
            if found != size:
                raise _unsupported_error(
                    f"{folder}",
                    f"divides a group into {found} elements a rank, not {size} (partitions over"
                    " another group of ranks)",
                    "save it at ZeRO-1 once",
                )


def _check_extra_files(folder: Path, layout: Layout, known: set[str]) -> None:
    """Raise `ConfigError` if the folder contains a file of a rank that the layout does not have."""
    models = {model_file(layout, 0, tp_rank) for tp_rank in range(layout.mesh.tp)}
    extra = {path.name for path in folder.glob("*_states.pt")} - known - models
    if layout.zero_stage == 3:
        extra = {name for name in extra if not name.endswith("model_states.pt")}
    if extra:
        raise config_error(
            str(folder / min(extra)),
            "does not belong to this checkpoint: it was saved by a different number of ranks",
            "remove it, or give the correct folder",
        )


def _unsupported_error(where: object, rule: str, fix: str) -> Exception:
    return config_error(str(where), rule, fix)
