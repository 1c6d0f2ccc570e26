"""Published weights: the engine has the weights of the files, and the weights can be trained.

No rank loads the full model.
"""

import hashlib
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from built_models import build_model
from huggingface_hub.utils import filter_repo_objects
from recipekit.architectures.safetensors_files import INDEX_FILE
from recipekit.model.weights import weights_folder
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from reference import train_plain
from shipped_jsons import strategy
from tiny_models import ds_config, save_tiny, tiny_config

DOCUMENTATION = Path("/usr/share/doc/python3.11/html/_sources")


def test_a_download_has_the_weights_and_every_small_file(monkeypatch, tmp_path):
    """Exports include small files, such as the tokenizer's files, and read the license in
    README.md.

    Weights in other formats are not downloaded.
    """
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda name, **options: asked.append({"name": name} | options) or str(tmp_path),
    )
    assert weights_folder("someone/model") == tmp_path and asked[0]["name"] == "someone/model"
    files = [
        "config.json",
        "chat_template.jinja",
        "tokenizer.model",
        "merges.txt",
        "qwen.tiktoken",
        "source.spm",
        "bpe.codes",
        "model-00001-of-00002.safetensors",
        "README.md",
    ]
    others = ["pytorch_model.bin", "model.onnx", "model.gguf", "code.py"]
    assert (
        list(filter_repo_objects([*files, *others], allow_patterns=asked[0]["allow_patterns"]))
        == files
    )


def loaded(folder: str, stage: int, tp: int, pp: int) -> dict[str, torch.Tensor]:
    """Build the saved model in a layout, initialise the engine and check the weights.

    Return the full weights of this rank's stage.
    """
    import deepspeed
    import torch.distributed as dist
    from recipekit.model.build import check_weights
    from recipekit.model.export import full_parameters
    from recipekit.optim.groups import parameter_groups
    from recipekit.parallel import pipeline
    from recipekit.parallel.groups import ProcessGroups
    from recipekit.spec.mesh import make_mesh

    world = dist.get_world_size()
    groups = ProcessGroups(make_mesh(world, tp=tp, pp=pp), "cpu")
    config = json.loads((Path(folder) / "config.json").read_text())
    recipe = Recipe(model=folder)
    ds = ds_config(stage, world // pp, tp)
    built = build_model(recipe, config, groups, ds, torch.device("cpu"))
    model = built.model
    if pp > 1:
        assert built.model_plan.split is not None and built.weights is not None
        kept = sum(parameter.nbytes for parameter in model.parameters())
        assert built.weights.bytes_read == kept, (
            "a rank reads the bytes that it keeps, and no others"
        )
        model = pipeline.build_pipeline_module(
            built.models,
            groups,
            lambda logits, labels: logits.sum(),
            "1f1b",
            built.model_plan.split.num_stages,
        )
        pipeline.tie_shared_params(model, groups)
    engine = deepspeed.initialize(
        model=model, model_parameters=parameter_groups(model), config=ds, mpu=groups.mpu
    )[0]
    assert check_weights(engine, built, groups) >= 8
    weights = {
        name: value.clone() for name, value in full_parameters(model, built, groups, torch.float32)
    }
    first = next(built.model.parameters())
    with (
        deepspeed.zero.GatheredParameters([first], modifier_rank=0, enabled=stage == 3),
        torch.no_grad(),
    ):
        first.view(-1)[0] += 1
    with pytest.raises(ConfigError, match="differs from the model's files"):
        check_weights(engine, built, groups)
    engine.destroy()
    return weights


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "gpt2",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("qwen3_moe", "llama_tied", "mixtral")
        ),
    ],
)
def test_the_engine_holds_the_files(pools, tmp_path, kind):
    """transformers saves each expert separately, but the model stores all experts in one tensor."""
    expected = dict(save_tiny(tmp_path, kind).named_parameters())
    before = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in tmp_path.iterdir()
    }
    layouts = (
        [(1, 1, 1), (3, 1, 1)]
        if kind == "gpt2"
        else [(0, 1, 1), (3, 1, 1), (1, 2, 1), (3, 2, 1), (1, 1, 2), (1, 2, 2)]
    )
    for stage, tp, pp in layouts:
        ranks = pools.run(
            tp * pp if pp > 1 else 2, loaded, folder=str(tmp_path), stage=stage, tp=tp, pp=pp
        )
        if pp > 1:
            ranks = [
                {name: value for rank in ranks[tp_rank::tp] for name, value in rank.items()}
                for tp_rank in range(tp)
            ]
        for weights in ranks:
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[name], value) for name, value in expected.items()), (
                f"ZeRO-{stage}, tp {tp}, pp {pp}"
            )
    assert before == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in tmp_path.iterdir()
    }


def test_experts_are_stacked_by_number(tmp_path):
    """Twelve experts must be in numerical order; in alphabetical order, expert 10 would precede
    expert 2.
    """
    from recipekit.architectures import families

    config = families.tiny_config("qwen3_moe", 264) | {"num_local_experts": 12}
    saved = build_model(
        Recipe(model="none", init="random", seed=5), config, None, ds_config(0), torch.device("cpu")
    ).model
    saved.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    read = build_model(Recipe(model=str(tmp_path)), config, None, ds_config(0), torch.device("cpu"))
    assert read.weights is not None and any(
        len(stored.parts[0]) == 12 for stored in read.weights.stored.values()
    )
    for (name, value), (_, expected) in zip(
        read.model.named_parameters(), saved.named_parameters(), strict=True
    ):
        assert torch.equal(value, expected), name


def test_files_that_lack_a_parameter_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    save_tiny(tmp_path)
    victim = sorted(tmp_path.glob("*.safetensors"))[0]
    tensors = load_file(victim)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, victim)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(
        ConfigError, match=f"lacks 1 of the tensors that its index names, first {lost}"
    ):
        build_model(Recipe(model=str(tmp_path)), config, None, ds_config(0), torch.device("cpu"))
    (tmp_path / INDEX_FILE).unlink()
    with pytest.raises(ConfigError, match=f"its files lack 1 of .* parameters, first {lost}"):
        build_model(Recipe(model=str(tmp_path)), config, None, ds_config(0), torch.device("cpu"))


def test_files_of_another_shape_are_refused(tmp_path):
    save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 96}
    with pytest.raises(ConfigError, match=r"gate_proj.weight is \[.*\] in its files but \[96, "):
        build_model(Recipe(model=str(tmp_path)), config, None, ds_config(0), torch.device("cpu"))


def test_a_transposed_tensor_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    model = save_tiny(tmp_path)
    file, name = next(
        (file, name)
        for file in tmp_path.glob("*.safetensors")
        for name in load_file(file)
        if name.endswith("gate_proj.weight")
    )
    rows, columns = model.get_parameter(name).shape
    assert rows != columns
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].T.contiguous()}, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(
        ConfigError,
        match=rf"{name} is \[{columns}, {rows}\] in its files but \[{rows}, {columns}\]",
    ):
        build_model(Recipe(model=str(tmp_path)), config, None, ds_config(0), torch.device("cpu"))


class AnonymousMemory(threading.Thread):
    """A thread that samples this process's RssAnon every 5 ms.

    `growth` is the largest rise in bytes.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes, self.peak, self.stopped = self._now(), 0, threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.005):
            self.peak = max(self.peak, self._now())

    @property
    def growth(self) -> int:
        return self.peak - self.start_bytes

    @staticmethod
    def _now() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024


def load_growth(folder: str, tp: int, pp: int) -> tuple[int, int]:
    """Return (growth of RssAnon, bytes that this rank keeps) when a model is built in a layout.

    If a layout has only data parallelism, it uses ZeRO-3.
    """
    import ctypes
    import gc

    import torch.distributed as dist
    from recipekit.parallel.groups import ProcessGroups
    from recipekit.spec.mesh import make_mesh

    config = json.loads((Path(folder) / "config.json").read_text())
    groups = ProcessGroups(make_mesh(dist.get_world_size(), tp=tp, pp=pp), "cpu")
    gc.collect()
    # Otherwise memory that earlier cases freed would be reused without growth.
    ctypes.CDLL(None).malloc_trim(0)
    memory = AnonymousMemory()
    memory.start()
    stage = 3 if tp * pp == 1 else 1
    ds = ds_config(stage, groups.mesh.dp) | {"bf16": {"enabled": True}}
    built = build_model(Recipe(model=folder), config, groups, ds, torch.device("cpu"))
    memory.stopped.set()
    memory.join()
    return memory.growth, sum(
        getattr(parameter, "ds_tensor", parameter).nbytes for parameter in built.model.parameters()
    )


@pytest.fixture(scope="module")
def gigabyte(tmp_path_factory) -> str:
    """Return the folder of a Llama of 1 GB in bf16."""
    tmp_path = tmp_path_factory.mktemp("gigabyte")
    from safetensors.torch import save_file

    config = tiny_config("llama") | {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 9,
        "num_attention_heads": 16,
    }
    config |= {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 24576, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    from recipekit.model.empty import empty_model

    total = 0
    for number, (name, parameter) in enumerate(empty_model(config).named_parameters()):
        value = torch.full(parameter.shape, 0.01, dtype=torch.bfloat16)
        total += value.nbytes
        save_file(
            {name: value}, tmp_path / f"model-{number:05d}.safetensors", metadata={"format": "pt"}
        )
    assert 1.0e9 < total < 1.1e9
    return str(tmp_path)


@pytest.mark.slow
def test_zero3_never_holds_the_whole_model(pools, gigabyte):
    """1 GB is loaded on 2 ranks, and each rank's anonymous memory grows by less than 0.75 GB."""
    growth = [one for one, _ in pools.run(2, load_growth, timeout=180, folder=gigabyte, tp=1, pp=1)]
    print("1 GB; growth of RssAnon " + ", ".join(f"{one / 1e9:.2f} GB" for one in growth))
    assert all(0.4e9 < one < 0.75e9 for one in growth)


def test_a_stage_holds_little_more_than_it_keeps(pools, gigabyte):
    """A model of 1 GB is loaded at pp2 x tp2.

    Each rank's anonymous memory must grow by less than 1.3 times the bytes that the rank keeps.
    """
    ranks = pools.run(4, load_growth, timeout=180, folder=gigabyte, tp=2, pp=2)
    print(
        "1 GB at pp2 x tp2; growth of RssAnon / kept: "
        + ", ".join(f"{growth / 1e9:.3f} / {kept / 1e9:.3f} GB" for growth, kept in ranks)
    )
    assert all(0.9 * kept < growth < 1.3 * kept for growth, kept in ranks)


@pytest.fixture(scope="session")
def smollm2_folder(smollm2: Path) -> str:
    """Return SmolLM2-135M as transformers saves it: fp32 safetensors, config and tokenizer.

    The files are created once from the GGUF file.
    """
    import transformers

    folder = Path(__file__).resolve().parents[2] / ".cache" / "assets" / "smollm2"
    if not (folder / "tokenizer.json").exists():
        given = transformers.AutoModelForCausalLM.from_pretrained(
            smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
        )
        settings = given.config.to_dict()
        # A model loaded from GGUF cannot be saved with this key (transformers 5.22).
        settings.pop("quantization_config", None)
        plain = transformers.AutoModelForCausalLM.from_config(
            type(given.config).from_dict(settings), dtype=torch.float32
        )
        plain.load_state_dict(given.state_dict())
        plain.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(
            smollm2.parent, gguf_file=smollm2.name
        ).save_pretrained(folder)
    return str(folder)


def run_recipe(recipe: Recipe) -> int:
    """Run an unchanged recipe on a rank of a pool."""
    from recipekit.train import main

    return main(resolve_run(parse(recipe, Path("weights.py"), [])))


@pytest.mark.slow
def test_smollm2_with_its_real_weights_learns_real_text(
    pools, tmp_path, smollm2_folder, monkeypatch
):
    """ZeRO-3 on 2 ranks starts at the single-process loss on Python's documentation.

    The loss is about 2.7 and not 10.9, and five steps lower it.
    """
    if not DOCUMENTATION.is_dir():
        pytest.skip("needs Debian's python3.11-doc (tests/system_packages.sh)")
    recipe = Recipe(
        model=smollm2_folder,
        dataset=str(DOCUMENTATION / "library" / "*.txt"),
        ds_config=strategy("zero3"),
        seq_len=256,
        micro_batch=1,
        global_batch=2,
        steps=5,
        lr=2e-5,
        eval_every=1,
        eval_rows=2,
        wandb=False,
        export=False,
        out=str(tmp_path / "run"),
    )
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    plan = resolve_run(parse(recipe, Path("weights.py"), []))
    assert plan.model_config is not None
    import dataclasses

    first = train_plain(dataclasses.replace(recipe, eval_every=0), plan.model_config, steps=1)
    assert pools.run(2, run_recipe, timeout=400, recipe=recipe) == [0, 0]
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    print(
        f"step 1: {lines[0]['loss']:.6f}, plain PyTorch {first.losses[0]:.6f}; held out"
        f" {lines[0]['eval_loss']:.4f} -> {lines[-1]['eval_loss']:.4f}"
    )
    assert lines[0]["loss"] == pytest.approx(first.losses[0], abs=1e-4)
    assert 2.0 < lines[0]["loss"] < 3.5
    assert lines[-1]["eval_loss"] < lines[0]["eval_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (3, 3)])
def test_smollm2_in_stages_learns_as_in_one_process(
    pools, tmp_path, smollm2_folder, monkeypatch, pp, tp
):
    """Five steps on real text have the same losses as plain PyTorch, to 1e-4.

    Every rank reads only the weights that it keeps.
    """
    if not DOCUMENTATION.is_dir():
        pytest.skip("needs Debian's python3.11-doc (tests/system_packages.sh)")
    recipe = Recipe(
        model=smollm2_folder,
        dataset=str(DOCUMENTATION / "library" / "*.txt"),
        ds_config=strategy("zero1"),
        pp=pp,
        tp=tp,
        seq_len=128,
        global_batch=2 * pp,
        steps=5,
        lr=2e-5,
        wandb=False,
        export=False,
        keep=1,
        out=str(tmp_path / "run"),
    )
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    import dataclasses

    plan = resolve_run(
        parse(dataclasses.replace(recipe, pp=1, tp=1, out="/nonexistent"), Path("weights.py"), [])
    )
    assert plan.model_config is not None
    plain = train_plain(dataclasses.replace(recipe, pp=1, tp=1), plan.model_config, steps=5)
    world = pp * tp
    assert pools.run(world, run_recipe, timeout=600, recipe=recipe) == [0] * world
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    print(f"pp{pp} tp{tp}: losses {losses}, plain PyTorch {plain.losses}")
    assert losses == pytest.approx(plain.losses, abs=1e-4)
    assert 2.0 < losses[0] < 3.5
    shutil.rmtree(tmp_path / "run")
