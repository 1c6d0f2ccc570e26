"""Checkpoints of plain DeepSpeed scripts and AutoTP.

They are read if their files define their contents, and rejected otherwise. Checkpoints of the HF
Trainer are tested in test_ds_configs.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from recipekit.checkpoints.deepspeed_io import read_pickle
from recipekit.checkpoints.reshape import reshape
from recipekit.checkpoints.step_folder import LayoutChange, open_step, target_layout
from recipekit.convert.hugging_face import to_hf
from recipekit.spec.errors import ConfigError
from safetensors.torch import load_file


def raw_script(
    out: str,
    zero: int,
    tp: int = 1,
    bf16: bool = True,
    frozen: bool = False,
    heads: int = 2,
    **more: Any,
) -> dict[str, torch.Tensor]:
    """Train like a typical script with DeepSpeed and transformers, and save a checkpoint.

    Return the full weights in the training dtype.
    """
    import deepspeed
    import torch.distributed as dist
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=heads,
        vocab_size=67,
    )
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and "layers.1." in name))
    decayed = [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.ndim > 1
    ]
    others = [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.ndim == 1
    ]
    groups: Any = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "bf16": {"enabled": bf16},
    }
    settings["optimizer"] = more.pop("optimizer", settings["optimizer"])
    own = (
        {"optimizer": torch.optim.SGD(groups, lr=1e-2, momentum=0.9)}
        if settings["optimizer"] is None
        else {"model_parameters": groups}
    )
    settings = {key: value for key, value in settings.items() if value is not None}
    settings["zero_optimization"] |= more
    if tp > 1:
        settings["tensor_parallel"] = {"autotp_size": tp}
    engine: Any = deepspeed.initialize(
        model=model, config=settings, dist_init_required=False, **own
    )[0]
    generator = torch.Generator().manual_seed(dist.get_rank() // tp)
    for _ in range(2):
        ids = torch.randint(0, 67, (1, 16), generator=generator)
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()
    engine.save_checkpoint(out)
    whole = {}
    for name, parameter in engine.module.named_parameters() if tp == 1 else ():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            whole[name] = parameter.detach().clone()
    return whole


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_raw_checkpoint_becomes_hugging_face_files(pools, tmp_path, zero, frozen):
    """zero_to_fp32 fails at ZeRO-0, and silently drops the frozen parameters at ZeRO-1."""
    whole = pools.run(2, raw_script, out=str(tmp_path / "raw"), zero=zero, frozen=frozen)[0]
    to_hf(tmp_path / "raw", tmp_path / "hf", verify=True)
    got = exported(tmp_path / "hf")
    assert got.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(got[name], value), name


def test_shuffled_groups_are_read_in_their_own_order(pools, tmp_path):
    """ds_to_universal silently writes wrong weights from such files.

    In the model of our study, 18 of 21 parameters were wrong.
    """
    whole = pools.run(2, raw_script, out=str(tmp_path / "raw"), zero=2, round_robin_gradients=True)[
        0
    ]
    to_hf(tmp_path / "raw", tmp_path / "hf", verify=True)
    assert all(torch.equal(value, whole[name]) for name, value in exported(tmp_path / "hf").items())
    master = open_step(tmp_path / "raw")
    assert [tensor.name for tensor in master.blueprint.tensors] != list(whole)


@pytest.mark.parametrize("zero", [0, 1])
def test_an_optimizer_without_adams_moments_is_converted(pools, tmp_path, zero):
    """ds_to_universal fails with a KeyError."""
    optimizer = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
    whole = pools.run(2, raw_script, out=str(tmp_path / "raw"), zero=zero, optimizer=optimizer)[0]
    source = tmp_path / "raw"
    if zero:
        step, source = open_step(source), tmp_path / "other"
        assert (step.layout.algorithm, step.layout.states, step.layout.scalars) == (
            "SGD",
            ("momentum_buffer",),
            (),
        )
        reshape(
            tmp_path / "raw",
            source,
            target_layout(step.blueprint, step.layout, LayoutChange(dp=3, zero=3)),
        )
    to_hf(source, tmp_path / "hf", verify=True)
    assert all(
        torch.equal(value.to(torch.bfloat16), whole[name])
        for name, value in exported(tmp_path / "hf").items()
    )


def test_states_that_the_json_does_not_name_are_refused(pools, tmp_path):
    """The script created the optimizer itself, so the files do not name it."""
    pools.run(1, raw_script, out=str(tmp_path / "raw"), zero=1, optimizer=None)
    with pytest.raises(
        ConfigError, match="has optimizer states momentum_buffer, not AdamW's exp_avg, exp_avg_sq"
    ):
        open_step(tmp_path / "raw")


def test_an_adam_that_counts_its_steps_in_the_group_is_read(pools, tmp_path):
    """DeepSpeed's FusedAdam wrote such files (fused_adam.py in 0.19.8 reads them).

    Here the step count in a file from torch's Adam is moved to the parameter group.
    """
    whole = pools.run(2, raw_script, out=str(tmp_path / "raw"), zero=2)[0]
    for file in (tmp_path / "raw/global_step2").glob("*optim_states.pt"):
        saved = torch.load(file, weights_only=False)
        base = saved["optimizer_state_dict"]["base_optimizer_state"]
        for group in base["param_groups"]:
            (flat,) = group["params"]
            group["step"] = int(base["state"][flat].pop("step"))
        torch.save(saved, file)
    step = open_step(tmp_path / "raw")
    layout = target_layout(step.blueprint, step.layout, LayoutChange(dp=1, zero=1))
    reshape(tmp_path / "raw", tmp_path / "other" / "global_step2", layout)
    weights, _, steps = pools.run(1, load_raw, folder=str(tmp_path / "other"), zero=1)[0]
    assert steps == 2 and all(torch.equal(weights[name], value) for name, value in whole.items())


@pytest.mark.parametrize(("source", "target"), [(1, 3), (3, 2), (2, 0)])
def test_a_raw_checkpoint_goes_on_in_another_layout(pools, tmp_path, source, target):
    """DeepSpeed's universal checkpoints reject the changes ZeRO-1 -> 3 and ZeRO-3 -> 2.

    They also give every ZeRO-3 group the first group's weight decay.
    """
    whole = pools.run(2, raw_script, out=str(tmp_path / "raw"), zero=source)[0]
    step = open_step(tmp_path / "raw")
    layout = target_layout(step.blueprint, step.layout, LayoutChange(dp=3, zero=target))
    reshape(tmp_path / "raw", tmp_path / "other" / "global_step2", layout)
    results = pools.run(3, load_raw, folder=str(tmp_path / "other"), zero=target)
    assert results[0][1] == [0.1, 0.0] and results[0][2] == 2
    for name, value in whole.items():
        assert torch.equal(results[0][0][name], value), name


def load_raw(folder: str, zero: int) -> tuple[dict[str, torch.Tensor], list[float], int]:
    import deepspeed
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=67,
    )
    model = transformers.LlamaForCausalLM(config)
    groups: Any = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.ndim == 1]},
    ]
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": zero},
        "bf16": {"enabled": True},
    }
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    engine: Any = deepspeed.initialize(
        model=model, model_parameters=groups, config=settings, dist_init_required=False
    )[0]
    path, _ = engine.load_checkpoint(folder, tag="global_step2")
    assert path is not None
    whole = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            whole[name] = parameter.detach().clone()
    return (
        whole,
        [group["weight_decay"] for group in engine.optimizer.param_groups],
        engine.global_steps,
    )


@pytest.mark.parametrize(("zero", "heads"), [(1, 2), (2, 1), (0, 4)])
def test_autotp_is_joined_by_its_own_notes(pools, tmp_path, zero, heads):
    """AutoTP's metadata defines how its shards are joined.

    save_16bit_model silently writes only rank 0's shards. ds_to_universal fails with a TypeError if
    the model has one key-value head.
    """
    pools.run(2, raw_script, out=str(tmp_path / "raw"), zero=zero, tp=2, heads=heads)
    to_hf(tmp_path / "raw", tmp_path / "hf", verify=True)
    got = exported(tmp_path / "hf")
    ranks = [
        read_pickle(tmp_path / "raw" / "global_step2" / f"mp_rank_{rank:02d}_model_states.pt")[
            "module"
        ]
        for rank in range(2)
    ]
    assert got["lm_head.weight"].shape == (67, 32) and got[
        "model.layers.0.self_attn.k_proj.weight"
    ].shape == (8 * heads, 32)
    for name, value in got.items():
        parts = [own[name] for own in ranks]
        dim = 1 if any(word in name for word in ("o_proj", "down_proj")) else 0
        joined = parts[0] if parts[0].shape == value.shape else torch.cat(parts, dim)
        assert torch.equal(joined, value), name


def test_what_the_files_do_not_decide_is_refused(pools, tmp_path):
    pools.run(2, raw_script, out=str(tmp_path / "raw"), zero=0)
    step = open_step(tmp_path / "raw")
    with pytest.raises(
        ConfigError, match=r"its optimizer states have no names\. Convert only its weights"
    ):
        reshape(
            tmp_path / "raw",
            tmp_path / "out",
            target_layout(step.blueprint, step.layout, LayoutChange(dp=2, zero=1)),
        )
    with pytest.raises(ConfigError, match="publishes no tensor-parallel plan"):
        target_layout(step.blueprint, step.layout, LayoutChange(tp=2))
    (tmp_path / "raw" / "global_step2" / "layer_00-model_states.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match="is from a pipeline"):
        open_step(tmp_path / "raw")


def test_files_of_another_number_of_ranks_are_named(pools, tmp_path):
    pools.run(2, raw_script, out=str(tmp_path / "raw"), zero=2)
    folder = tmp_path / "raw" / "global_step2"
    stale = folder / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    stale.write_bytes((folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").read_bytes())
    with pytest.raises(ConfigError, match=f"{stale.name}: does not belong to this checkpoint"):
        open_step(tmp_path / "raw")
    stale.unlink()
    (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ConfigError, match=r"pp_rank_1_mp_rank_00_optim_states.*is missing"):
        open_step(tmp_path / "raw")
