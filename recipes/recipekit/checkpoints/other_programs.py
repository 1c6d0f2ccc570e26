"""Reads the layout of checkpoints that other programs saved with DeepSpeed (HF Trainer, raw
scripts, AutoTP) from their files.

Pipelines are refused, because nothing in their layer files identifies the model. At ZeRO-0 the
optimizer's states are left out, because they are stored without names.
"""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..parallel.blueprint import Blueprint, Layout, Tensor, flat_groups, groups_of, held
from ..spec.mesh import Mesh
from ..spec.optimizer_specs import FACTS, by_matrix, facts_of, family_of, states_of
from ..spec.refusal import refuse
from ..storage.places import model_file, optimizer_file, shards
from ..storage.tensor_files import OpenedFile
from ..storage.torch_files import read
from .state import State


def tag_folder(path: Path) -> Path | None:
    """Return the folder with the files: `path`, or the folder that `latest` in it names or is a
    link to; None if there are no such files.
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
    """The optimizer of a checkpoint, in the terms of a layout.

    `facts` are the layout's algorithm, states and scalars. `groups`: the parameter group of each
    list of shapes in the model file.
    """

    zero_stage: int
    kind: str
    facts: dict[str, Any]
    groups: tuple[int, ...] = ()
    int_step: bool = False
    sub_group_size: int = 10**18


def describe(folder: Path) -> tuple[Blueprint, Layout, State]:
    """Return (blueprint, layout, state) of a tag folder.

    Raises `Refusal` where the files do not decide them.
    """
    _refuse_other_shards(folder)
    at_zero3 = any(folder.glob("zero_pp_rank_*_model_states.pt"))
    file = "zero_pp_rank_0_mp_rank_00_model_states.pt" if at_zero3 else "mp_rank_00_model_states.pt"
    model = read(folder / file)
    tp, dp, config = model["mp_world_size"], model["dp_world_size"], model["ds_config"]
    dtype = _dtype_of(folder, config)

    if any(folder.glob("*_optim_states.pt")) or at_zero3:
        optimizer = _saved_optimizer(folder, config, dtype, at_zero3)
    else:
        # The states have no names at ZeRO-0, so `reshape` refuses them.
        kind = "torch" if dtype == "float32" else "FP16_UnfusedOptimizer"
        optimizer = SavedOptimizer(0, kind, {"states": (), "scalars": ()})

    layout = Layout(
        Mesh(dp=dp, tp=tp),
        optimizer.zero_stage,
        optimizer.kind,
        dtype,
        sub_group_size=optimizer.sub_group_size,
        int_step=optimizer.int_step,
        **optimizer.facts,
    )
    blueprint = _blueprint(folder, model, layout, optimizer.groups)
    _check_sizes(folder, blueprint, layout)
    state: State = {"step": model["global_steps"], "tokens": 0, "data": None, "export_dtype": dtype}
    return blueprint, layout, state


def _refuse_other_shards(folder: Path) -> None:
    """Raise `Refusal` for a folder of a pipeline or of sharded experts."""
    if any(folder.glob("layer_*")):
        raise _undecided(
            folder,
            "is from a pipeline, and pipeline layer files do not name their model",
            "export it to Hugging Face files with the program that wrote it",
        )
    if any(folder.glob("*expp_rank_*")) or any(folder.glob("*_expert_*")):
        raise _undecided(
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
    """Read the optimizer of a ZeRO checkpoint from the file of the first rank.

    Raises `Refusal` for settings and states that a layout cannot describe.
    """
    prefix = "bf16_" if dtype == "bfloat16" else ""
    file = folder / f"{prefix}zero_pp_rank_0_mp_rank_00_optim_states.pt"
    saved = read(file)["optimizer_state_dict"]
    stage, kind = _stage_and_kind(saved, at_zero3)
    base = saved["optimizer_state_dict"] if stage == 3 else saved["base_optimizer_state"]
    if any(any(paddings) for paddings in saved.get("param_alignment_paddings", [])):
        raise _undecided(
            folder,
            "was saved with zero_optimization.parameter_alignment",
            "save it once more without that setting",
        )
    if isinstance(base, list):
        raise _undecided(
            folder,
            "was saved with zero_optimization.elastic_checkpoint",
            "save it once more without that setting",
        )

    # Some Adams count their steps in the group instead of the state.
    states = next(iter(base["state"].values()), {})
    counted = {"step"} if any("step" in group for group in base["param_groups"]) else set()
    facts = optimizer_of(config, counted | set(states), folder)
    int_step = isinstance(states.get("step", 0), int)

    numbered = list(enumerate(base["param_groups"]))
    if stage != 3:
        return SavedOptimizer(stage, kind, facts, tuple(number for number, _ in numbered), int_step)
    groups = tuple(number for number, group in numbered for _ in group["params"])
    sub_group_size = int(config["zero_optimization"].get("sub_group_size", 10**9))
    return SavedOptimizer(stage, kind, facts, groups, int_step, sub_group_size)


def _stage_and_kind(saved: dict[str, Any], at_zero3: bool) -> tuple[int, str]:
    """Return the ZeRO stage and DeepSpeed's optimizer class of a saved optimizer."""
    if "zero_stage" not in saved:
        return 1, "BF16_Optimizer"
    if at_zero3:
        return 3, "DeepSpeedZeroOptimizer_Stage3"
    return int(saved["zero_stage"].values[0]), "DeepSpeedZeroOptimizer"


def optimizer_of(config: dict[str, Any], states: set[str], folder: Path) -> dict[str, Any]:
    """Returns what a layout says of the optimizer: the one that the saved JSON names, or Adam, if a
    script made it.

    Raises `Refusal` if the files hold others.
    """
    kind = str((config.get("optimizer") or {}).get("type", "AdamW"))
    # DeepSpeed's Muon has other matrices than a recipe's
    known = any(name.lower() == kind.lower() for name in FACTS) and not by_matrix(config)
    named, scalars = (states_of(config), facts_of(config).scalars) if known else ((), ())
    if not known or {*named, *scalars} != states:
        rule = (
            f"has optimizer states {', '.join(sorted(states)) or 'none'}, not {kind}'s"
            f" {', '.join((*named, *scalars)) or '(unknown)'}"
        )
        raise _undecided(
            folder, rule, "export it to Hugging Face files with the program that wrote it"
        )
    return {"algorithm": family_of(config), "states": named, "scalars": scalars}


def _blueprint(
    folder: Path, model: dict[str, Any], layout: Layout, groups: tuple[int, ...]
) -> Blueprint:
    cuts = _autotp_cuts(folder, model, layout.mesh.tp)
    names = {name for name in model["module"] if name not in set(model["buffer_names"])}
    aliases = {alias: (name, "every") for alias, name in (model["shared_params"] or {}).items()}
    tensors = []

    def add(name: str, shape: Any, group: int | None) -> None:
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
            add(name, shape, None)  # at ZeRO-0 the states have no names, so only weights are read
    for name in model["buffer_names"]:
        if name in model["module"]:
            value = model["module"][name]
            tensors.append(Tensor(name, tuple(value.shape), None, buffer=value.dtype))
    return Blueprint(tuple(tensors), aliases, 0, False)


def _autotp_cuts(
    folder: Path, model: dict[str, Any], tp: int
) -> dict[str, tuple[tuple[int, ...], tuple[int, int] | None, Any]]:
    """Maps each parameter to its whole shape, the dimension that AutoTP cut, and each rank's
    indices in it (deepspeed/checkpoint/affine.py, version 1).
    """
    if tp == 1:
        return {}
    notes = model.get("universal_checkpoint_info") or {}
    affine = notes.get("affine_map") or {}
    if affine.get("version") != 1 or notes.get("autotp_unsupported_parameter_patterns"):
        raise _undecided(
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
    where: str, whole: tuple[int, ...], pieces: list[dict[str, Any]]
) -> tuple[int | None, tuple[tuple[int, int], ...]]:
    """Return (the dimension that AutoTP cut, the rank's ranges of indices in it) for a parameter.

    The dimension is None if each piece is the full parameter. Raises `Refusal` for other pieces.
    """
    strides = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
    ranges, cut = [], None
    for piece in sorted(pieces, key=lambda piece: piece["dest"][0]):
        differ = [dim for dim, size in enumerate(piece["shape"]) if size != whole[dim]]
        if len(differ) > 1 or list(piece["source"][1]) != strides or "scale" in piece:
            raise _undecided(
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
    """Raise `Refusal` unless every tensor is where the layout says, the flat tensors have the sizes
    that follow from the layout, and no rank's file is left over.
    """
    opened = _check_places(folder, blueprint, layout)
    if layout.zero_stage == 3:
        _check_flat_sizes(folder, blueprint, layout, opened)
    _check_no_more(folder, layout, set(opened))


def _check_places(folder: Path, blueprint: Blueprint, layout: Layout) -> dict[str, OpenedFile]:
    """Return the layout's files; raise `Refusal` if one is missing or a tensor is too small."""
    opened: dict[str, OpenedFile] = {}
    for own in shards(blueprint, layout).values():
        for piece in (piece for shard in own for piece in shard.pieces):
            if piece.file not in opened:
                if not (folder / piece.file).is_file():
                    raise refuse(str(folder / piece.file), "is missing", "copy the whole folder")
                opened[piece.file] = OpenedFile(folder / piece.file)
            tensor = opened[piece.file].tensors.get(piece.keys)
            if tensor is None or tensor.numel() < piece.offset + piece.stop - piece.start:
                raise _undecided(
                    f"{folder / piece.file}: {'/'.join(map(str, piece.keys))}",
                    "does not have the size that the layout states",
                    "use another copy",
                )
    return opened


def _check_flat_sizes(
    folder: Path, blueprint: Blueprint, layout: Layout, opened: dict[str, OpenedFile]
) -> None:
    """Raise `Refusal` if ZeRO-3 partitioned a group over other ranks than the layout's."""
    for tp_rank in range(layout.mesh.tp):
        flats = flat_groups(groups_of(held(blueprint, layout, 0), layout, tp_rank), layout)
        tensors = opened[optimizer_file(layout, 0, tp_rank, 0)].tensors if flats else {}
        for index, (_, size, _) in enumerate(flats):
            found = tensors["optimizer_state_dict", "fp32_flat_groups", index].numel()
            if found != size:
                raise _undecided(
                    f"{folder}",
                    f"divides a group into {found} elements a rank, not {size} (partitions over"
                    " another group of ranks)",
                    "save it at ZeRO-1 once",
                )


def _check_no_more(folder: Path, layout: Layout, known: set[str]) -> None:
    """Raise `Refusal` if the folder has a file of a rank that the layout does not have."""
    models = {model_file(layout, 0, tp_rank) for tp_rank in range(layout.mesh.tp)}
    extra = {path.name for path in folder.glob("*_states.pt")} - known - models
    if layout.zero_stage == 3:
        extra = {name for name in extra if not name.endswith("model_states.pt")}
    if extra:
        raise refuse(
            str(folder / min(extra)),
            "does not belong to this checkpoint: it was saved by a different number of ranks",
            "remove it, or give the correct folder",
        )


def _undecided(where: Any, rule: str, fix: str) -> Exception:
    return refuse(str(where), rule, fix)
