"""Reads the layout of checkpoints that other programs saved with DeepSpeed (HF Trainer, raw
scripts, AutoTP) from their files.

Pipelines are refused, because nothing in their layer files identifies the model. At ZeRO-0 the
optimizer's states are left out, because they are stored without names.
"""

import re
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


def describe(folder: Path) -> tuple[Blueprint, Layout, State]:
    """Returns (blueprint, layout, state) of a tag folder.

    Raises `Refusal` where the files do not decide them.
    """
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
    stage = (
        3
        if any(folder.glob("zero_pp_rank_*_model_states.pt"))
        else 2
        if any(folder.glob("*_optim_states.pt"))
        else 0
    )
    model = read(
        folder
        / (
            "zero_pp_rank_0_mp_rank_00_model_states.pt"
            if stage == 3
            else "mp_rank_00_model_states.pt"
        )
    )
    tp, dp, config = model["mp_world_size"], model["dp_world_size"], model["ds_config"]
    bf16 = any(folder.glob("bf16_zero_*")) or bool(config.get("bf16", {}).get("enabled"))
    dtype = (
        "bfloat16" if bf16 else "float16" if config.get("fp16", {}).get("enabled") else "float32"
    )
    kind, sub_group_size = "torch" if dtype == "float32" else "FP16_UnfusedOptimizer", 10**18
    groups: list[int] = []
    # those of ZeRO-0 have no names: `reshape` refuses them
    kept: dict[str, Any] = {"states": (), "scalars": ()}
    int_step = False
    if stage:
        saved = read(
            folder / f"{'bf16_' if bf16 else ''}zero_pp_rank_0_mp_rank_00_optim_states.pt"
        )["optimizer_state_dict"]
        kind = (
            "BF16_Optimizer"
            if "zero_stage" not in saved
            else "DeepSpeedZeroOptimizer_Stage3"
            if stage == 3
            else "DeepSpeedZeroOptimizer"
        )
        stage = (
            stage
            if "zero_stage" in saved and stage == 3
            else 1
            if "zero_stage" not in saved
            else int(saved["zero_stage"].values[0])
        )
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
        states = next(iter(base["state"].values()), {})
        # by Adams that count in a group
        counted = {"step"} if any("step" in group for group in base["param_groups"]) else set()
        kept, int_step = (
            optimizer_of(config, counted | set(states), folder),
            isinstance(states.get("step", 0), int),
        )
        groups = (
            [number for number, group in enumerate(base["param_groups"]) for _ in group["params"]]
            if stage == 3
            else list(range(len(base["param_groups"])))
        )
        if stage == 3:
            sub_group_size = int(config["zero_optimization"].get("sub_group_size", 10**9))
    layout = Layout(
        Mesh(dp=dp, tp=tp),
        stage,
        kind,
        dtype,
        sub_group_size=sub_group_size,
        int_step=int_step,
        **kept,
    )
    blueprint = _blueprint(folder, model, layout, groups)
    _check_sizes(folder, blueprint, layout)
    state: State = {"step": model["global_steps"], "tokens": 0, "data": None, "export_dtype": dtype}
    return blueprint, layout, state


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


def _blueprint(folder: Path, model: dict[str, Any], layout: Layout, groups: list[int]) -> Blueprint:
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
        name, whole = (
            re.sub(r"\\(.)", r"\1", pattern.removeprefix("^").removesuffix("$")),
            tuple(facts["logical_shape"]),
        )
        strides = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
        ranges, cut = [], None
        for rank in range(tp):
            own = []
            for piece in sorted(facts["ranks"][rank]["pieces"], key=lambda piece: piece["dest"][0]):
                differ = [dim for dim, size in enumerate(piece["shape"]) if size != whole[dim]]
                if len(differ) > 1 or list(piece["source"][1]) != strides or "scale" in piece:
                    raise _undecided(
                        f"{folder}: {name}",
                        "is split in a way that is not a range of one dimension",
                        "export it to Hugging Face files with the program that wrote it",
                    )
                dim = differ[0] if differ else 0
                start = piece["source"][0] // strides[dim]
                own.append((start, start + piece["shape"][dim]))
                cut = (dim, 1) if differ else cut
            ranges.append(tuple(own))
        cuts[name] = (whole, cut, tuple(ranges) if cut else ())
    return cuts


def _check_sizes(folder: Path, blueprint: Blueprint, layout: Layout) -> None:
    """Raises `Refusal` unless every tensor lies where the layout says, and the flat tensors have
    the sizes that follow from the layout.
    """
    opened: dict[str, OpenedFile] = {}
    for own in shards(blueprint, layout).values():
        for piece in (piece for shard in own for piece in shard.pieces):
            if piece.file not in opened:
                if not (folder / piece.file).is_file():
                    raise refuse(str(folder / piece.file), "is missing", "copy the whole folder")
                opened[piece.file] = OpenedFile(folder / piece.file)
            if (
                opened[piece.file].tensors.get(piece.keys) is None
                or opened[piece.file].tensors[piece.keys].numel()
                < piece.offset + piece.stop - piece.start
            ):
                raise _undecided(
                    f"{folder / piece.file}: {'/'.join(map(str, piece.keys))}",
                    "does not have the size that the layout states",
                    "use another copy",
                )
    for tp_rank in range(layout.mesh.tp if layout.zero_stage == 3 else 0):
        for index, (_, size, _) in enumerate(
            flat_groups(groups_of(held(blueprint, layout, 0), layout, tp_rank), layout)
        ):
            found = (
                opened[optimizer_file(layout, 0, tp_rank, 0)]
                .tensors["optimizer_state_dict", "fp32_flat_groups", index]
                .numel()
            )
            if found != size:
                raise _undecided(
                    f"{folder}",
                    f"divides a group into {found} elements a rank, not {size} (partitions over"
                    " another group of ranks)",
                    "save it at ZeRO-1 once",
                )
    extra = (
        {path.name for path in folder.glob("*_states.pt")}
        - set(opened)
        - {model_file(layout, 0, tp_rank) for tp_rank in range(layout.mesh.tp)}
    )
    if extra := sorted(
        name for name in extra if not (layout.zero_stage == 3 and name.endswith("model_states.pt"))
    ):
        raise refuse(
            str(folder / extra[0]),
            "does not belong to this checkpoint: it was saved by a different number of ranks",
            "remove it, or give the correct folder",
        )


def _undecided(where: Any, rule: str, fix: str) -> Exception:
    return refuse(str(where), rule, fix)
