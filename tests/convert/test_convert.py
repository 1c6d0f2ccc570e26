"""Conversions between all layouts and Hugging Face files, bit for bit, with optimizer states.

The tests also note how the tools of DeepSpeed 0.19.8 handle the same checkpoints.
"""

import dataclasses
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from built_models import build_model
from converted_steps import (
    SMALL,
    assert_same_files,
    begin,
    check_same_bits_in_another_layout,
    tensors_of,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from job import metrics
from recipekit.architectures import families
from recipekit.checkpoints.reshape import reshape
from recipekit.checkpoints.step_folder import LayoutChange, open_step, target_layout
from recipekit.checkpoints.verify import verify
from recipekit.convert.hugging_face import from_hf, to_hf
from recipekit.model.describe import published_blueprint
from recipekit.parallel.blueprint import Layout
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh
from recipekit.spec.recipe import Recipe
from recipekit.storage import copying, direct_files, manifest, tensor_files
from recipekit.storage.copying import Effort
from recipekit.storage.tensor_files import open_checkpoint
from shipped_jsons import strategy
from short_runs import BASE, train
from tiny_models import ds_config

# The model type, the changes of its config, and the dtype of its files.
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama tied, odd vocabulary, bf16": (
        "llama",
        {"vocab_size": 67, "tie_word_embeddings": True},
        "bfloat16",
    ),
    "llama untied, odd vocabulary, one key-value head, fp32": (
        "llama",
        {"vocab_size": 67, "num_key_value_heads": 1},
        "float32",
    ),
    "phi3: fused projections": ("phi3", {"vocab_size": 67}, "bfloat16"),
    "qwen3_moe: experts fused in memory, apart in the files": ("qwen3_moe", {}, "bfloat16"),
    "gpt2: no plans": ("gpt2", {}, "float32"),
}


@pytest.fixture(scope="module", autouse=True)
def little_room() -> Iterator[None]:
    """Use few and small buffers, so that small files exercise the same code as large files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_files, "WRITE_BLOCK_BYTES", 4096)
        patch.setattr(copying, "BUFFERS", 12 * 4096)
        yield


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders that transformers wrote; each contains several files."""
    folders = {}
    for number, (kind, (model_type, changes, dtype)) in enumerate(KINDS.items()):
        config = families.tiny_config(model_type, 264) | changes
        model = build_model(
            Recipe(model="none", init="random", seed=number),
            config,
            None,
            ds_config(0),
            torch.device("cpu"),
        ).model
        folders[kind] = tmp_path_factory.mktemp("published")
        model.to(getattr(torch, dtype)).save_pretrained(folders[kind], max_shard_size="300KB")
        (folders[kind] / "tokenizer_config.json").write_text("{}")
    return folders


degree = st.fixed_dictionaries(
    {
        "zero": st.integers(0, 3),
        "dp": st.integers(1, 4),
        "tp": st.integers(1, 3),
        "pp": st.integers(1, 3),
    }
)


def check_chain(
    published: dict[str, Path], folder: Path, kind: str, dtype: str, chain: list[dict[str, int]]
) -> None:
    """Check conversions from Hugging Face files through random layouts and back.

    Weights and both moments must stay equal bit for bit. Names, dtypes and files must not change.

    DeepSpeed's tools behave as follows:

    - zero_to_fp32 fails at ZeRO-0 (TypeError), at BF16_Optimizer ("not a zero checkpoint"), at any
      tp > 1 ("Expected 1 ... found 2 files") and at tied weights with --safe_serialization.
    - ds_to_universal fails at ZeRO-0 and at kv heads < tp (TypeError).
    - Without AutoTP's metadata, ds_to_universal silently doubles unsharded tensors and joins row
      shards along the wrong dimension.
    """
    chain = [possible(degrees, kind) for degrees in chain]
    begin(published[kind], folder / "0", dtype, **chain[0])
    wanted = tensors_of(folder / "0")
    assert {key.split("|")[1] for key in wanted} >= {"master", "exp_avg", "exp_avg_sq"}
    for number, degrees in enumerate(chain[1:], 1):
        step = open_step(folder / f"{number - 1}")
        layout = target_layout(step.blueprint, step.layout, LayoutChange(**degrees))
        reshape(folder / f"{number - 1}", folder / f"{number}", layout, effort=SMALL)
        assert tensors_of(folder / f"{number}") == wanted
        assert verify(folder / f"{number}", SMALL) == []
    to_hf(folder / f"{len(chain) - 1}", folder / "hf", effort=SMALL, verify=True)
    assert_same_files(folder / "hf", published[kind])
    shutil.rmtree(folder)


CHAINS = {
    "kind": st.sampled_from(sorted(KINDS)),
    "dtype": st.sampled_from(["bfloat16", "float32"]),
    "chain": st.lists(degree, min_size=1, max_size=3),
}
# No shrink phase, which would take minutes.
PLAIN: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate),
}


@settings(max_examples=10, **PLAIN)
@given(**CHAINS)
def test_any_chain_of_layouts_keeps_every_bit(published, tmp_path_factory, kind, dtype, chain):
    check_chain(published, tmp_path_factory.mktemp("chain"), kind, dtype, chain)


@pytest.mark.slow
@settings(max_examples=200, **PLAIN)
@given(**CHAINS)
def test_many_chains_of_layouts_keep_every_bit(published, tmp_path_factory, kind, dtype, chain):
    check_chain(published, tmp_path_factory.mktemp("chain"), kind, dtype, chain)


def possible(degrees: dict[str, int], kind: str) -> dict[str, int]:
    """Return the degrees that are valid for the model and for at most eight ranks."""
    degrees = dict(degrees)
    if kind.startswith("gpt2"):
        degrees |= {"tp": 1, "pp": 1}
    if degrees["pp"] > 1:
        degrees["zero"] = min(degrees["zero"], 1)
    degrees["pp"] = min(degrees["pp"], 8 // degrees["tp"])
    degrees["dp"] = min(degrees["dp"], 8 // (degrees["tp"] * degrees["pp"]))
    return degrees


# Loading with DeepSpeed
# -----------------------------------------------------------------------------------------


MOE, UNTIED = {"model": "Qwen/Qwen3-30B-A3B"}, {"model": "meta-llama/Llama-3.1-8B"}
D3, PP2, DUALPIPEV = {"tp": 2, "pp": 2}, {"pp": 2}, {"pp": 2, "pipeline_schedule": "dualpipev"}
slow = pytest.mark.slow
CASES = [  # the training run, its layout, and the resumes' layouts: (world, JSON, degrees)
    pytest.param(
        "bf16",
        {},
        (2, "zero1", {}),
        [(4, "zero1", D3), (3, "zero3", {})],
        id="bf16 zero1, 3D, zero3",
        marks=slow,
    ),
    pytest.param(
        "bf16",
        {},
        (2, "zero2", {}),
        [(1, "zero0", {}), (3, "zero1", {}), (2, "zero1", {"tp": 2})],
        id="bf16 zero2, the others",
        marks=slow,
    ),
    pytest.param(
        "fp32", UNTIED, (4, "zero1", D3), [(2, "zero3", {})], id="fp32 3D, zero3", marks=slow
    ),
    pytest.param(
        "fp32",
        UNTIED,
        (2, "zero1", PP2),
        [(2, "zero0", {"tp": 2}), (2, "zero2", {}), (4, "zero3", {"tp": 2})],
        id="fp32 pp2, tp2",
        marks=slow,
    ),
    pytest.param(
        "bf16",
        MOE,
        (2, "zero3", {}),
        [(4, "zero1", D3), (1, "zero2", {})],
        id="experts",
        marks=slow,
    ),
    pytest.param(
        "fp32", {}, (2, "zero1", DUALPIPEV), [(1, "zero3", {})], id="dualpipev, zero3", marks=slow
    ),
    pytest.param(
        "bf16",
        {},
        (2, "zero0", {}),
        [(2, "zero2_cpu", {}), (2, "zero1", DUALPIPEV)],
        id="zero0, CPU Adam, dualpipev",
        marks=slow,
    ),
    pytest.param(
        "bf16",
        {},
        (2, "zero3_nvme", {}),
        [(1, "zero3_nvme", {}), (2, "zero1", {}), (3, "zero3_nvme", {})],
        id="swap files",
        marks=slow,
    ),
    pytest.param(
        "bf16",
        {},
        (2, "zero1", {"tp": 2}),
        [(2, "zero3_nvme", {})],
        id="into swap files",
        marks=slow,
    ),
    pytest.param(
        "fp32",
        UNTIED,
        (4, "zero3_hosts", {}),
        [(2, "zero1", {}), (2, "zero3", {}), (4, "zero3_hosts", {})],
        id="several hosts",
        marks=slow,
    ),
    pytest.param(
        "fp32",
        UNTIED,
        (2, "zero1", {}),
        [(4, "zero3_hosts", {})],
        id="onto several hosts",
        marks=slow,
    ),
    pytest.param(
        "lora",
        {},
        (2, "zero1", {}),
        [(3, "zero3", {}), (2, "zero0", {})],
        id="lora zero1, zero3, zero0",
        marks=slow,
    ),
    pytest.param(
        "lora",
        {},
        (2, "zero3", {}),
        [(1, "zero2", {}), (3, "zero1", {})],
        id="lora zero3, zero2, zero1",
        marks=slow,
    ),
]


@pytest.mark.parametrize(("kind", "changes", "source", "targets"), CASES)
def test_deepspeed_loads_the_same_bits_in_another_layout(
    pools, ops, tmp_path, kind, changes, source, targets
):
    """An engine with a different layout loads and saves the trained bits, and then has the same
    losses.

    DeepSpeed itself behaves as follows:

    - A different number of ranks raises a ZeRORuntimeException.
    - Its universal load rejects 1 -> 3 and 3 -> 2, and restores no frozen parameter and no buffer.
    - In ZeRO-3 its universal load gives every group the first group's weight decay.
    - zero_to_fp32 drops frozen parameters under ZeRO-1.
    - Tied weights under tensor parallelism become rank 0's shard.
    """
    check_same_bits_in_another_layout(pools, ops, tmp_path, kind, changes, source, targets)


def stock(folder: str, tag: str, hf: str, stage: int) -> float:
    """Load a step folder with plain DeepSpeed and Hugging Face code; return the loss.

    DeepSpeed uses `load_checkpoint`.
    """
    import deepspeed
    from recipekit.optim.groups import parameter_groups
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(hf), dtype=torch.float32)
    config = ds_config(stage, torch.distributed.get_world_size()) | {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    }
    engine = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model),
        config=config,
        dist_init_required=False,
    )[0]  # pyright: ignore
    path, _ = engine.load_checkpoint(folder, tag=tag)
    assert path is not None and engine.global_steps == 3
    ids = torch.arange(64)[None] % 200
    return engine(input_ids=ids, labels=ids).loss.item()


@pytest.mark.parametrize("stage", [pytest.param(0, marks=slow), 1, pytest.param(2, marks=slow), 3])
def test_stock_deepspeed_loads_a_converted_checkpoint(pools, tmp_path, stage):
    recipe = dataclasses.replace(
        BASE, ds_config=strategy("zero1"), eval_every=0, steps=3, export=True
    )
    pools.run(2, train, recipe=recipe, argv=["--out", str(tmp_path / "run")])
    step = open_step(tmp_path / "run")
    layout = target_layout(step.blueprint, step.layout, LayoutChange(dp=2, tp=1, pp=1, zero=stage))
    reshape(tmp_path / "run", tmp_path / "other" / "tag", layout, effort=SMALL)
    losses = pools.run(
        2,
        stock,
        folder=str(tmp_path / "other"),
        tag="tag",
        hf=str(tmp_path / "run/hf"),
        stage=stage,
    )
    from transformers import AutoModelForCausalLM

    ids = torch.arange(64)[None] % 200
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf")(
        input_ids=ids, labels=ids
    ).loss.item()
    assert losses == pytest.approx([expected] * 2, rel=1e-6)


@slow
def test_a_run_starts_from_converted_files_as_from_the_files_themselves(pools, published, tmp_path):
    """Published weights do not need from-hf and `--resume OUT_DIR`, because both ways train
    equally.
    """
    from tiny_models import save_tiny

    save_tiny(tmp_path / "model", "llama")
    recipe = dataclasses.replace(
        BASE,
        model=str(tmp_path / "model"),
        ds_config=strategy("zero1"),
        tokenizer="bytes",
        pp=2,
        tp=2,
        eval_every=0,
    )
    blueprint = published_blueprint(tmp_path / "model")
    layout = target_layout(
        blueprint, Layout(Mesh(), 0, "torch", "float32"), LayoutChange(dp=1, tp=2, pp=2, zero=1)
    )
    from_hf(tmp_path / "model", tmp_path / "start", blueprint, layout, SMALL)
    argv = ["--init", "pretrained", "--tokenizer", "bytes", "--stop_at", "3"]
    for name, more in (("direct", []), ("converted", ["--resume", str(tmp_path / "start")])):
        results = pools.run(
            4, train, recipe=recipe, argv=["--out", str(tmp_path / name), *argv, *more]
        )
        assert [code for code, _ in results] == [0] * 4, results
    assert [line["loss"] for line in metrics(tmp_path / "converted")] == [
        line["loss"] for line in metrics(tmp_path / "direct")
    ]


@slow
def test_smollm2_through_3d_and_zero3_and_back(smollm2, tmp_path):
    """Real weights do not change on the way: files -> pp2 x tp3 -> ZeRO-3 on 4 ranks -> files.

    transformers writes the first files in bf16, with 100 MB per file.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.bfloat16
    )
    config = model.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(tmp_path / "model", max_shard_size="100MB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    blueprint = published_blueprint(tmp_path / "model")
    layout = target_layout(
        blueprint, Layout(Mesh(), 0, "torch", "bfloat16"), LayoutChange(dp=1, tp=3, pp=2, zero=1)
    )
    from_hf(tmp_path / "model", tmp_path / "3d", blueprint, layout)
    reshape(
        tmp_path / "3d",
        tmp_path / "zero3",
        target_layout(blueprint, layout, LayoutChange(dp=4, tp=1, pp=1, zero=3)),
    )
    to_hf(tmp_path / "zero3", tmp_path / "back", verify=True)
    assert_same_files(tmp_path / "back", tmp_path / "model")


# Bad input and faults
# -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def step(published: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("steps") / "step"
    begin(published["llama tied, odd vocabulary, bf16"], out, "bfloat16", zero=2, dp=2)
    return out


@pytest.mark.parametrize(
    ("degrees", "says"),
    [
        ({"pp": 2, "zero": 2}, "Use --zero 1, or --pp 1"),
        ({"pp": 9, "zero": 1}, "the model has 4 layers"),
        ({"tp": 0}, "must be at least 1"),
        ({"zero": 4}, "must be a ZeRO stage from 0 to 3"),
    ],
)
def test_an_impossible_layout_is_refused(step: Path, degrees: dict[str, int], says: str) -> None:
    opened = open_step(step)
    with pytest.raises(ConfigError, match=says):
        target_layout(opened.blueprint, opened.layout, LayoutChange(**degrees))


def test_nothing_is_overwritten(step: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="already exists"):
        to_hf(step, tmp_path / "out")


def test_a_changed_tensor_is_named_and_nothing_comes_out(step: Path, tmp_path: Path) -> None:
    """One bit of a master weight is flipped, and its file's sha256 is updated.

    DeepSpeed itself silently loads such a file in 197 of 200 cases.
    """
    shutil.copytree(step, tmp_path / "step")
    opened = open_step(tmp_path / "step")
    tensor = opened.blueprint.tensors[3]
    files = open_checkpoint(tmp_path / "step", opened.blueprint, opened.layout, writable=True)
    value = files.read(tensor, "master", 5, 6)
    files.write(tensor, "master", 5, value ^ np.uint32(1 << 7))
    files.close()
    listed = manifest.read_manifest(tmp_path / "step")
    facts = {name: manifest.file_entry(tmp_path / "step" / name) for name in listed["files"]}
    manifest.write_manifest(tmp_path / "step", 0, facts, listed["tensors"])
    assert manifest.find_faults(tmp_path / "step") == []
    assert verify(tmp_path / "step") == [
        f"{tensor.name} (master) has a different digest than when it was saved"
    ]
    for work in (
        lambda: to_hf(tmp_path / "step", tmp_path / "out"),
        lambda: reshape(tmp_path / "step", tmp_path / "out", opened.layout),
    ):
        with pytest.raises(
            ConfigError, match=f"{tensor.name} \\(master\\): differs from what was saved"
        ):
            work()
        assert not (tmp_path / "out").exists()


def test_a_killed_conversion_goes_on_where_it_was(
    step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_step(step)
    layout = target_layout(opened.blueprint, opened.layout, LayoutChange(dp=1, tp=2, pp=2, zero=1))
    written: list[str] = []
    write = tensor_files.TensorFiles.write

    def dying(self: Any, tensor: Any, role: str, start: int, values: Any) -> None:
        if len(written) == 20 and "die" in written[0]:
            raise KeyboardInterrupt
        written.append(f"{tensor.name} {role} die")
        write(self, tensor, role, start, values)

    monkeypatch.setattr(tensor_files.TensorFiles, "write", dying)
    with pytest.raises(KeyboardInterrupt):
        reshape(step, tmp_path / "out", layout, effort=Effort(workers=1))
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.part").exists()
    first = list(written)
    written[:] = ["go on"]
    reshape(step, tmp_path / "out", layout, effort=Effort(workers=1))
    again = {text for text in written if text in first}
    assert len(again) <= 2, "at most the tensor it died in is written again"
    assert tensors_of(tmp_path / "out") == tensors_of(step) and verify(tmp_path / "out") == []
    assert not (tmp_path / ".out.part").exists()


def test_memory_is_bounded_by_the_limit(step: Path) -> None:
    assert Effort(workers=4, mem_limit=2**30).chunk * 16 * 4 <= 2**30
    numel, unit = 10_000_000, 70_000
    ranges = list(copying.chunk_ranges(numel, unit, 100_000))
    assert (
        max(stop - start for start, stop in ranges) <= 100_000
        and ranges[0][0] == 0
        and ranges[-1][1] == numel
    )
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
