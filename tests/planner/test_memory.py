"""Predicted memory must equal the memory of real ranks.

The planner's terms are compared with all live storages, and the difference must be 0 bytes.
"""

import gc
import json
import sys
import traceback
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from recipekit.architectures.families import tiny_config
from recipekit.doctor.needs import count_required_bytes
from recipekit.plan import resolve_run
from recipekit.planner import memory
from recipekit.planner.memory import rank_terms
from recipekit.planner.pinned import pinned_bytes
from recipekit.planner.resolve import resolve_here
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.memory_terms import HOST, REDUCE, STEP, Term, total_bytes
from recipekit.spec.recipe import Recipe
from shipped_jsons import strategy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GIB = 2**30
# Attributes of DeepSpeed's optimizers.
MASTERS = (
    "fp32_partitioned_groups_flat",
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
    "fp32_groups",
)
COUNTS = (torch.int64, torch.int32)  # token ids, and the list of parameters that DDP marks as used
SPARE = {"ddp": 4}  # bytes in the bucket for a value that no code reads
SCALAR = {torch.bfloat16: 2}  # 8 bytes otherwise; norms, flags and step counters have no term


class Ledger(TorchDispatchMode):
    """A mode that records every storage from its creation until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Any] = {}  # address -> weak reference to the storage
        # Address of the storage's C++ object -> bytes, dtype, place of creation.
        self.live: dict[int, tuple[int, torch.dtype, str]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if torch.is_tensor(value) and value.device.type != "meta":
                self._see(value)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = local(tensor).untyped_storage()
        if (key := storage._cdata) in self.live or storage.nbytes() <= SCALAR.get(tensor.dtype, 8):
            return
        made = next(
            (
                f"{Path(at.filename).name}, {at.name}"
                for at in reversed(traceback.extract_stack(limit=12)[:-2])
                if "/torch/" not in at.filename
            ),
            "",
        )
        self.live[key], self.made[key] = (
            (storage.nbytes(), tensor.dtype, made),
            weakref.ref(storage),
        )
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.live.pop(key)[0]
        del self.made[key]

    def emptied(self, key: int) -> bool:
        """Return True if a storage has freed its memory, as FSDP2's gathered weights do."""
        storage = self.made[key]()
        return storage is not None and storage.nbytes() == 0


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storages(*values: Any) -> set[int]:
    """Return the storages of all tensors in nested containers."""
    return {
        local(value).untyped_storage()._cdata
        for value in tree_leaves(values)
        if torch.is_tensor(value)
    }


def measured(recipe: Recipe, argv: list[str]) -> dict[str, Any]:
    """Run the real loop on a rank of a pool; return the bytes in its second step, and its terms."""
    from recipekit import train

    sys.argv = ["memory.py", *argv]
    plan = resolve_run(parse(recipe, Path("memory.py"), argv))
    ledger, found, step = Ledger(), {}, train.train_step
    calls = 0

    tokens = plan.recipe.micro_batch * plan.recipe.seq_len
    assert plan.model_config is not None
    activations = (
        {2 * tokens * plan.model_config["hidden_size"], 4 * tokens} if plan.mesh.pp > 1 else set()
    )

    def kept(engine: Any) -> dict[int, tuple[int, torch.dtype, str]]:
        """Return the live storages that the terms cover.

        Tokens, a step's sums, the model's buffers and the copies in `empty_model` are excluded.
        A pipeline also keeps bf16 hidden states and fp32 token losses of its last micro-batch. The
        sizes of these tensors differ from all parameters.
        """
        models = [module for module in engine.module.modules() if hasattr(module, "made")]
        other = storages(list(engine.module.buffers()), [model.made for model in models])
        found = {
            key: value
            for key, value in ledger.live.items()
            if key not in other
            and value[1] not in COUNTS
            and value[0] not in activations
            and not value[2].endswith("start_step")
        }
        return {key: value for key, value in found.items() if not ledger.emptied(key)}

    def measure(engine: Any) -> None:
        optimizer = engine.optimizer
        inner = getattr(optimizer, "optimizer", optimizer)
        parameters = [
            getattr(parameter, "ds_tensor", None) if hasattr(parameter, "ds_tensor") else parameter
            for parameter in engine.module.parameters()
        ]
        masters = next((value for name in MASTERS if (value := getattr(optimizer, name, None))), [])
        parts = {
            "parameters": storages(parameters),
            "masters": storages(masters) - storages(parameters),
        }
        parts["states"] = storages(list(inner.state.values()))
        live = kept(engine)
        sizes = {
            name: sum(live[key][0] for key in keys if key in live) for name, keys in parts.items()
        }
        rest = {
            key: value for key, value in live.items() if key not in set().union(*parts.values())
        }
        found.update(
            sizes,
            rest=sum(size for size, _, _ in rest.values()),
            of_rest=sorted((size, made) for size, _, made in rest.values()),
        )

    def watched(engine: Any, *arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            optimizer, reduce = (
                getattr(engine.optimizer, "optimizer", engine.optimizer),
                getattr(engine, "buffered_allreduce_fallback", None),
            )
            entered = 0

            def summed(*values: Any, **names: Any) -> None:
                before, ledger.peak = ledger.now, ledger.now
                assert reduce is not None
                reduce(*values, **names)
                found["reduce"] = ledger.peak - before

            def before_step(*_: Any) -> None:
                nonlocal entered
                gc.collect()
                if "rest" not in found:  # ZeRO-3 steps once for each sub-group
                    measure(engine)
                entered = ledger.peak = ledger.now

            def after_step(*_: Any) -> None:
                found["step"] = max(found.get("step", 0), ledger.peak - entered)

            engine.buffered_allreduce_fallback = summed
            hooks = [
                optimizer.register_step_pre_hook(before_step),
                optimizer.register_step_post_hook(after_step),
            ]
            result = step(engine, *arguments, **more)
            for hook in hooks:
                hook.remove()
            return result
        return step(engine, *arguments, **more)

    with mock.patch.object(train, "train_step", watched), ledger:
        assert train.main(plan) == 0
    terms = resolve_here(plan)[0].terms[plan.mesh.coords(plan.command.rank)["pp"]]
    return {"found": found, "terms": terms}


def odd_model(folder: Path) -> str:
    """Write a Mistral whose shards and groups have odd sizes, so that all padding has an effect."""
    config = {
        "model_type": "mistral",
        "hidden_size": 9,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 2,
    }
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            config | {"intermediate_size": 14, "vocab_size": 264, "tie_word_embeddings": True}
        )
    )
    return str(folder)


def flint_model(folder: Path) -> str:
    """Write a tiny Flint, whose routers and sinks stay in fp32 in bf16."""
    folder.mkdir()
    # The ledger leaves out tensors of two fp32 numbers, such as half of a norm of four.
    config = tiny_config("flint", 264) | {"head_dim": 8}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    )


MOE = {"model": "Qwen/Qwen3-30B-A3B"}
CASES = [  # JSON, bf16, flags, fields
    *(
        (file, True, [], {})
        for file in ("zero0", "zero1", "zero2", "zero3", "zero2_cpu", "zero3_cpu")
    ),
    *((file, True, ["--tp", "2"], {}) for file in ("zero0", "zero1", "zero3")),
    ("zero1", True, ["--pp", "2"], {}),
    # One micro-batch.
    *(
        (file, True, ["--global_batch", "4"], {})
        for file in ("zero0", "zero1", "zero2", "zero3_cpu")
    ),
    *((file, False, [], {}) for file in ("zero0", "zero2", "zero3", "zero2_cpu", "zero3_cpu")),
    *((file, True, [], {"adapt": lora}) for file in ("zero1", "zero3")),
    ("zero1", True, ["--tiny", "--ep", "2"], MOE),
    *((engine, bf16, [], {}) for engine in ("ddp", "fsdp2") for bf16 in (True, False)),
    ("fsdp2", True, ["--global_batch", "4"], {}),
    ("ddp", True, [], {"adapt": lora}),
    *(("zero3_hosts", bf16, ["--global_batch", "16"], {}) for bf16 in (True, False)),
    ("zero3_hosts", True, ["--global_batch", "16"], {"adapt": lora}),
    ("zero2_muon", True, [], {}),
    # Defaults of torch's optimizers on a GPU.
    *((f"{file} foreach", True, [], {}) for file in ("zero0", "zero1", "zero3")),
]
FLINT = {"model": "flint", "attention": "eager"}
CASES += [
    *((file, True, [], FLINT) for file in ("zero0", "zero1", "zero2", "fsdp2")),
    ("zero1", True, ["--tp", "2"], FLINT),
]
QUICK = [("zero1", True, [], {}), ("fsdp2", True, [], {}), ("zero2_muon", True, [], {})]


def named(case: tuple[str, bool, list[str], dict[str, Any]]) -> str:
    return " ".join([case[0], "bf16" if case[1] else "fp32", *case[2], *case[3]])


@pytest.mark.parametrize(
    ("file", "bf16", "argv", "fields"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=named(case))
        for case in CASES
    ],
)
def test_terms_are_the_live_storages(
    pools: Any,
    ops: Callable[[str], None],
    tmp_path: Path,
    file: str,
    bf16: bool,
    argv: list[str],
    fields: dict[str, Any],
) -> None:
    of_torch, (file, _, foreach) = file in ("ddp", "fsdp2"), file.partition(" ")
    config = {} if of_torch else strategy(file, bf16)
    if of_torch:
        fields = fields | {"engine": file, "precision": "bf16" if bf16 else "fp32"}
    elif file.endswith("_cpu"):
        ops("cpu_adam")
    elif foreach:
        config["optimizer"]["params"] |= {"foreach": True, "fused": False}
    common: dict[str, Any] = dict(
        init="random",
        tokenizer="bytes",
        seq_len=16,
        micro_batch=2,
        global_batch=8,
        steps=2,
        wandb=False,
        export=False,
    )
    if fields.get("model") == "flint":
        fields = fields | {"model": flint_model(tmp_path / "model")}
    else:
        common["model"] = odd_model(tmp_path / "model")
    recipe = Recipe(**({"ds_config": config} | common | fields))
    ranks = pools.run(
        4 if file == "zero3_hosts" else 2,
        measured,
        recipe=recipe,
        argv=["--out", str(tmp_path / "run"), *argv],
    )
    # Each rank keeps the full gradients that overlap its partition. The terms are for the fullest
    # rank.
    uneven = file.startswith("zero2") and not bf16
    for rank, told in enumerate(ranks):
        found, terms = told["found"], told["terms"]
        explained = json.dumps([found, [vars(term) for term in terms]], indent=1)

        def of(name: str, moment: str = STEP, terms: list[Term] = terms) -> int:
            return sum(
                term.size
                for term in terms
                if term.what.startswith(name)
                and (not term.moments or moment in term.moments)
                and not term.bound
            )

        def there(moment: str, terms: list[Term] = terms) -> int:
            return sum(
                term.size for term in terms if not term.moments or moment in term.moments
            ) - sum(term.size for term in terms if term.bound and moment in term.moments)

        if file == "fsdp2" and rank:  # rows are distributed to the first ranks first
            assert found["states"] <= of("optimizer states"), f"rank {rank}: {explained}"
        else:
            assert found["states"] == of("optimizer states"), f"rank {rank}: {explained}"
        assert found["masters"] == of("master weights"), f"rank {rank}: {explained}"
        assert found["parameters"] == of("parameters, "), f"rank {rank}: {explained}"
        counted = (
            of("optimizer states") + of("master weights") + of("parameters, ") + of("temporaries")
        )
        rest = max(told["found"]["rest"] for told in ranks) if uneven else found["rest"]
        assert rest == there(STEP) - counted + SPARE.get(file, 0), f"rank {rank}: {explained}"
        if file in ("zero0", "zero1"):
            assert found["reduce"] == of("copy of the gradients", REDUCE), (
                f"rank {rank}: {explained}"
            )
        if file.endswith("_muon"):
            assert (
                0
                < found["step"]
                <= sum(term.size for term in terms if term.bound and STEP in term.moments)
            ), f"rank {rank}: {explained}"
        elif not file.endswith("_cpu") and not of_torch:  # torch's engines use no foreach on a CPU
            assert found["step"] == of("temporaries"), f"rank {rank}: {explained}"


def gradients_before_the_end(recipe: Recipe, argv: list[str]) -> tuple[int, int]:
    """Return the bytes of gradients outside DeepSpeed's buckets, and their planner term, on a rank.

    The bytes are measured when the last gradient arrives.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from recipekit import train

    plan, found = resolve_run(parse(recipe, Path("memory.py"), argv)), 0
    backward = DeepSpeedEngine.backward

    def watched(engine: Any, *arguments: Any, **more: Any) -> Any:
        end = engine.optimizer.independent_gradient_partition_epilogue

        def at_end() -> None:
            nonlocal found
            buckets = storages([bucket.buffer for bucket in engine.optimizer.ipg_buckets.values()])
            own = [
                parameter.grad
                for parameter in engine.module.parameters()
                if parameter.grad is not None and not storages(parameter.grad) <= buckets
            ]
            found = max(found, sum(gradient.nbytes for gradient in own))
            end()

        engine.optimizer.independent_gradient_partition_epilogue = at_end
        try:
            return backward(engine, *arguments, **more)
        finally:
            engine.optimizer.independent_gradient_partition_epilogue = end

    with mock.patch.object(DeepSpeedEngine, "backward", watched):
        assert train.main(plan) == 0
    return found, sum(
        term.size
        for term in resolve_here(plan)[0].terms[0]
        if term.what == "gradients that exceed a bucket"
    )


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_that_exceed_a_bucket_stay_until_the_end_of_backward(
    pools: Any, tmp_path: Path, world: int
) -> None:
    """For this reason, an "auto" bucket is large enough for each matrix of a layer."""
    config = strategy("zero2", bf16=True)
    config["zero_optimization"]["reduce_bucket_size"] = 100
    common: dict[str, Any] = dict(
        init="random",
        tokenizer="bytes",
        seq_len=16,
        micro_batch=2,
        global_batch=8,
        steps=1,
        wandb=False,
        export=False,
    )
    recipe = Recipe(model=odd_model(tmp_path / "model"), ds_config=config, **common)
    ranks = pools.run(
        world, gradients_before_the_end, recipe=recipe, argv=["--out", str(tmp_path / "run")]
    )
    assert max(found for found, _ in ranks) == max(told for _, told in ranks) > 0
    for file, size in (("zero2", 4096 * 14336), ("zero3", 200_000_000)):
        large = replace(recipe, model="meta-llama/Llama-3.1-8B", ds_config=f"{file}.json")
        auto = resolve_run(parse(large, Path("memory.py"), ["--out", str(tmp_path / "other")]))
        assert auto.ds_config["zero_optimization"]["reduce_bucket_size"] == size


def copies_of_a_bucket(recipe: Recipe, argv: list[str]) -> tuple[int, int]:
    """Return the bytes that a rank allocates while it sums a bucket, and their planner term."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from recipekit import train

    plan, found = resolve_run(parse(recipe, Path("memory.py"), argv)), 0
    average, ledger = DeepSpeedZeroOptimizer.average_tensor, Ledger()

    def watched(*arguments: Any, **more: Any) -> None:
        nonlocal found
        before = ledger.peak = ledger.now
        average(*arguments, **more)
        found = max(found, ledger.peak - before)

    with mock.patch.object(DeepSpeedZeroOptimizer, "average_tensor", watched), ledger:
        assert train.main(plan) == 0
    return found, sum(
        term.size
        for term in resolve_here(plan)[0].terms[0]
        if term.what == "copies while a bucket is summed"
    )


@pytest.mark.parametrize(("sent", "sp"), [(None, 1), ("fp32", 1), (None, 2)])
def test_a_bucket_is_copied_to_be_summed(pools: Any, tmp_path: Path, sent: Any, sp: int) -> None:
    """The bucket holds gradients of both ranks, so both copies contain all of it."""
    config = strategy("zero2", bf16=True)
    config["zero_optimization"]["reduce_bucket_size"] = 100_000
    recipe = Recipe(
        model=odd_model(tmp_path / "model"),
        ds_config=config | ({"communication_data_type": sent} if sent else {}),
        init="random",
        tokenizer="bytes",
        seq_len=16,
        micro_batch=1,
        global_batch=8,
        steps=1,
        sp=sp,
        wandb=False,
        export=False,
    )
    ranks = pools.run(2, copies_of_a_bucket, recipe=recipe, argv=["--out", str(tmp_path / "run")])
    for found, told in ranks:
        assert found == pytest.approx(told, rel=0.001)


def test_the_loss_takes_twelve_bytes_a_logit() -> None:
    """The figure is the memory at the beginning of the loss's backward pass.

    The bf16 logits are freed by then, because only their log-softmax is kept.
    """
    from recipekit.tasks import pretrain

    logits, labels = (
        torch.randn(2, 100, 5000, dtype=torch.bfloat16, requires_grad=True),
        torch.randint(5000, (2, 100)),
    )
    with Ledger() as ledger:
        pretrain.loss(logits, {"labels": labels}, by_row=False).backward()
    assert ledger.peak == pytest.approx(memory.LOGIT_BYTES * 2 * 100 * 5000, rel=0.001)


def test_in_chunks_the_loss_takes_eight_bytes_a_logit_of_a_block() -> None:
    """In fp32 the eight bytes are the logits and their exponentials.

    The input's gradient is fp32. The weight's gradient counts as a gradient.
    """
    from recipekit.kernels.cross_entropy import Head, token_losses

    tokens, width, vocabulary, block = 400, 8, 50_000, 400 * 5000
    for dtype in (torch.float32, torch.bfloat16):
        hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
        weight, labels = (
            torch.randn(vocabulary, width, dtype=dtype),
            torch.randint(vocabulary, (tokens,)),
        )
        with Ledger() as ledger:
            token_losses(hidden, Head(weight), labels, block=block).sum().backward()
        # The weight is recorded when a view of it is taken.
        assert ledger.peak - weight.nbytes == pytest.approx(
            memory.CHUNKED_LOGIT_BYTES * block, rel=0.01
        ), dtype


def dry_plan(name: str, *argv: str) -> Any:
    from recipe_files import FILES, load

    return resolve_run(parse(load(name).RECIPE, FILES[name], ["--dry_run", *argv]))


def test_pinned_memory_is_told_with_its_rounding() -> None:
    """CachingHostAllocator.h rounds up to the next power of two.

    Without rounding, blocks above 16 MiB are allocated with their exact size.
    """
    assert [pinned_bytes(size, False) for size in (0, 1, 2**20, 2**20 + 1, 33 * GIB)] == [
        0,
        1,
        2**20,
        2**21,
        64 * GIB,
    ]
    assert [
        pinned_bytes(size, True) for size in (2**20 + 1, 16 * 2**20, 16 * 2**20 + 1, 33 * GIB)
    ] == [2**21, 16 * 2**20, 16 * 2**20 + 1, 33 * GIB]
    plan = dry_plan("llama3_1_70b_zero3_nvme", "--world", "8")
    model_plan, _ = resolve_here(plan)
    blueprint, layout, load = model_plan.blueprint, model_plan.layout, model_plan.load
    exact, rounded = (
        total_bytes(
            rank_terms(blueprint, layout, plan.ds_config, replace(load, exact_pins=told)), HOST
        )
        for told in (True, False)
    )
    flat = -(-70_553_706_496 // 8) * 4  # fp32 sums of the gradients: one block
    assert (
        rounded - exact == pytest.approx(64 * GIB - flat, abs=GIB)
        and 8 * exact < 512e9 < 8 * rounded
    )


@pytest.mark.parametrize(
    ("device", "world", "verdict"),
    [
        (
            "H100-SXM",
            8,
            (
                "verdict  states fit, activations not counted: 20.94 GiB of the 80.00 GiB of NVIDIA"
                " H100 80GB HBM3"
            ),
        ),
        (
            "L4",
            4,
            (
                "verdict  does not fit: accelerator memory of NVIDIA L4 = 24.00 GiB: a rank needs"
                " at least 37.77 GiB of it, activations not counted (optimizer states"
            ),
        ),
    ],
)
def test_a_dry_run_tells_whether_a_device_suffices(
    device: str, world: int, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipekit.planner.dry_run import print_dry_run

    print_dry_run(dry_plan("llama3_1_8b_zero3", "--world", str(world), "--device", device))
    assert verdict in capsys.readouterr().out


def test_a_start_refuses_what_certainly_exceeds_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, the host's memory holds all data of all ranks on the host.

    The free memory is set once to a sufficient value and once to an insufficient value.
    """
    from recipekit.runtime import resolution

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    plan = dry_plan("qwen3_0_6b_zero2", "--world", "2")
    model_plan, _ = resolve_here(plan)
    terms = model_plan.fullest
    needed = total_bytes(
        [
            replace(term, place=HOST, pinned=0, bound=term.bound or "bucket" in term.what)
            for term in terms
        ],
        HOST,
    )
    monkeypatch.setattr(resolution, "free_memory", lambda: 2 * needed)
    resolution.check_memory(plan, model_plan.terms, torch.device("cpu"))
    monkeypatch.setattr(resolution, "free_memory", lambda: 2 * needed - 1)
    with pytest.raises(
        ConfigError,
        match=(
            r"host memory of .* that is free = .*: 2 ranks need at least .* activations not counted"
            r" \(optimizer states.*Use more ranks"
        ),
    ):
        resolution.check_memory(plan, model_plan.terms, torch.device("cpu"))


def test_a_dry_run_of_a_small_model_counts_in_mib(capsys: pytest.CaptureFixture[str]) -> None:
    from recipekit.planner.dry_run import print_dry_run

    print_dry_run(dry_plan("llama_nano_zero2", "--tiny"))
    said = capsys.readouterr().out
    memory, besides = [line for line in said.splitlines() if line.startswith("memory")]
    terms, activations = (
        part.splitlines()[1:] for part in said.partition(memory)[2].split(besides)
    )
    assert "GiB" not in besides + "".join(activations) and len(activations) == 3
    assert "GiB" not in memory + "".join(terms) and terms
    always = float(memory.partition("each rank: ")[2].partition(" MiB always")[0])
    kept = sum(float(term.split()[0]) for term in terms if "(" not in term)
    assert kept == pytest.approx(always, abs=0.05) and all(
        term.split()[1] == "MiB" for term in terms if not term.startswith("verdict")
    )


def test_what_a_dry_run_refuses_stands_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipekit.planner.dry_run import print_dry_run
    from transformers import BloomConfig

    BloomConfig(vocab_size=264, hidden_size=64, n_layer=2, n_head=4).save_pretrained(tmp_path)
    plan = dry_plan("llama_nano_zero2", "--model", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"a bloom cannot use it here: .*\. Use --attention eager"
    ):
        print_dry_run(plan)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("kind", "options", "states"),
    [("AdamW", {}, 2), ("SGD", {}, 0), ("RMSprop", {"momentum": 0.9, "centered": True}, 3)],
)
def test_room_on_the_disk_is_counted_by_the_states_of_the_optimizer(
    kind: str, options: dict[str, Any], states: int
) -> None:
    config = strategy("zero2", True) | {
        "optimizer": {"type": kind, "params": {"lr": "auto"} | options}
    }
    plan = resolve_run(
        parse(
            replace(Recipe(model="meta-llama/Llama-3.2-1B"), ds_config=config),
            Path("room.py"),
            ["--tiny"],
        )
    )
    needs = count_required_bytes(plan, on_gpu=False)
    # Weights are bf16, master weights and states are fp32, and the export is bf16.
    assert needs["checkpoint"] == needs["export"] * (2 + 4 + 4 * states) // 2


def test_room_on_the_disk_is_counted_by_the_states_of_each_weight() -> None:
    """Muon keeps one state for each matrix, and two states for every other weight."""
    plan = resolve_run(
        parse(
            Recipe(model="meta-llama/Llama-3.2-1B", ds_config="zero2_muon.json"),
            Path("room.py"),
            ["--tiny"],
        )
    )
    needs, groups = count_required_bytes(plan, on_gpu=False), resolve_here(plan)[0].blueprint
    matrices = sum(
        tensor.numel
        for tensor in groups.tensors
        if ".layers." in tensor.name and len(tensor.shape) == 2
    )
    assert needs["checkpoint"] == needs["export"] * (2 + 4 + 4 * 2) // 2 - 4 * matrices


def test_room_on_the_disk_has_adafactors_rows_and_columns_once_for_each_holder() -> None:
    """Under ZeRO-3 both ranks have a part of every weight, so both ranks store the states."""
    config = strategy("zero3", True) | {
        "optimizer": {"type": "Adafactor", "params": {"lr": "auto"}}
    }
    recipe = replace(Recipe(model="meta-llama/Llama-3.2-1B"), ds_config=config)
    plan = resolve_run(parse(recipe, Path("room.py"), ["--tiny", "--dry_run", "--world", "2"]))
    trained = [
        tensor for tensor in resolve_here(plan)[0].blueprint.tensors if tensor.group is not None
    ]
    lines = sum(sum(tensor.shape) for tensor in trained if len(tensor.shape) == 2)
    vectors = sum(tensor.numel for tensor in trained if len(tensor.shape) == 1)
    assert count_required_bytes(plan, on_gpu=False)["checkpoint"] == 4 * (
        sum(tensor.numel for tensor in trained) + 2 * lines + vectors
    )
    assert sum(
        term.size
        for term in resolve_here(plan)[0].fullest
        if term.what.startswith("optimizer states")
    ) == 4 * (lines + vectors // 2)
