"""The shipped JSONs, unchanged, with transformers' Trainer and with accelerate.

The JSONs follow the conventions of both libraries. Each test starts the `deepspeed` launcher once,
with this file as its script. The script trains two steps with each JSON, because a start takes
longer than the steps.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "ds_configs"
ZERO = ["zero0", "zero1", "zero1_sgd", "zero2", "zero3", "zero3_hosts"]
OFFLOAD = {"cpu": ["zero2_cpu", "zero3_cpu"], "nvme": ["zero3_nvme"]}
LR, WEIGHT_DECAY, ROWS, ACCUMULATION = 7e-4, 0.07, 2, 2


def launch(
    library: str, names: list[str], ranks: int, cwd: Path, limit: int
) -> dict[str, dict[str, Any]]:
    """Run all JSONs with `library`, wait until all processes have ended, and return rank 0's
    results.
    """
    from pool import environment, free_port

    command = [
        Path(sys.executable).parent / "deepspeed",
        "--num_gpus",
        ranks,
        "--no_local_rank",
        "--master_port",
        free_port(),
        __file__,
        library,
        *names,
    ]
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"not done in {limit} s:\n{output[-6000:]}") from None
    report = cwd / "report.json"
    assert process.returncode == 0 and report.exists(), output[-6000:]
    return json.loads(report.read_text())


def check(report: dict[str, dict[str, Any]], names: list[str], ranks: int) -> None:
    """Check that every JSON trained, and that its "auto" values equal the library's arguments."""
    assert list(report) == names
    for name, seen in report.items():
        assert seen["stage"] == int(name[4]), name
        assert seen["steps"] == 2 and all(0 < loss < 10 for loss in seen["losses"]), seen
        assert (seen["lr"], seen["weight_decay"], seen["dtype"]) == (
            LR,
            WEIGHT_DECAY,
            "torch.bfloat16",
        ), seen
        assert (seen["train_batch_size"], seen["micro_batch"], seen["accumulation"]) == (
            ROWS * ACCUMULATION * ranks,
            ROWS,
            ACCUMULATION,
        ), seen
        assert seen["gradient_clipping"] == 1.0 and seen["optimizer"] == (
            "SGD" if name == "zero1_sgd" else "AdamW" if name in ZERO else "DeepSpeedCPUAdam"
        ), seen
        assert '"auto"' not in seen["config"], seen["config"]


@pytest.mark.slow
def test_the_zero_files_work_under_trainer_on_two_ranks(tmp_path: Path) -> None:
    """Trainer's checkpoints convert to the same Hugging Face files that Trainer saves."""
    check(launch("trainer", ZERO, 2, tmp_path, 240), ZERO, 2)
    from recipekit.convert.hugging_face import to_hf
    from safetensors.torch import load_file

    for name in ZERO:
        saved = tmp_path / f"out_{name}" / "checkpoint-2"
        to_hf(saved, tmp_path / name, verify=True)
        got, wanted = (
            load_file(tmp_path / name / "model.safetensors"),
            load_file(saved / "model.safetensors"),
        )
        assert got.keys() == wanted.keys() and (tmp_path / name / "config.json").exists()
        for key, value in wanted.items():
            assert (got[key] == value.to(got[key].dtype)).all(), (name, key)


@pytest.mark.slow
def test_the_zero_files_work_under_accelerate_on_two_ranks(tmp_path: Path) -> None:
    check(launch("accelerate", ZERO, 2, tmp_path, 240), ZERO, 2)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["trainer", "accelerate"])
@pytest.mark.parametrize("device", OFFLOAD)
def test_the_offload_files_work_under_both(device: str, library: str, tmp_path: Path) -> None:
    check(launch(library, OFFLOAD[device], 2, tmp_path, 900), OFFLOAD[device], 2)


# Code of the launched processes


def tiny_llama() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    return AutoModelForCausalLM.from_config(config)


def rows() -> list[dict[str, list[int]]]:
    return [
        {
            "input_ids": [(7 * row + column) % 128 for column in range(16)],
            "labels": [(7 * row + column) % 128 for column in range(16)],
        }
        for row in range(32)
    ]


def seen_in(engine: Any, losses: list[float]) -> dict[str, Any]:
    group = engine.optimizer.param_groups[0]
    return {
        "stage": engine.zero_optimization_stage(),
        "steps": engine.global_steps,
        "losses": losses,
        "lr": engine.config["optimizer"]["params"]["lr"],
        "weight_decay": group["weight_decay"],
        "dtype": str(engine.get_data_types()[0]),
        "train_batch_size": engine.train_batch_size(),
        "micro_batch": engine.train_micro_batch_size_per_gpu(),
        "accumulation": engine.gradient_accumulation_steps(),
        "gradient_clipping": engine.gradient_clipping(),
        "optimizer": type(engine.basic_optimizer).__name__,
        "config": json.dumps(engine.config, default=str),
    }


def under_trainer(name: str) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments, default_data_collator

    arguments = TrainingArguments(
        output_dir=f"out_{name}",
        deepspeed=str(FOLDER / f"{name}.json"),
        use_cpu=True,
        bf16=True,
        max_steps=2,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=ACCUMULATION,
        learning_rate=LR,
        weight_decay=WEIGHT_DECAY,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=tiny_llama(),
        args=arguments,
        train_dataset=rows(),
        data_collator=default_data_collator,
    )  # type: ignore[arg-type]
    trainer.train()
    return seen_in(
        trainer.deepspeed, [line["loss"] for line in trainer.state.log_history if "loss" in line]
    )


def under_accelerate(name: str) -> dict[str, Any]:
    import torch
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DeepSpeedPlugin, DummyOptim
    from transformers import default_data_collator

    PartialState(backend="gloo")  # on a CPU, accelerate starts only one process without this flag
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=str(FOLDER / f"{name}.json")),
        gradient_accumulation_steps=ACCUMULATION,
        mixed_precision="bf16",
    )
    model = tiny_llama()
    loader = torch.utils.data.DataLoader(rows(), batch_size=ROWS, collate_fn=default_data_collator)  # type: ignore[arg-type]
    engine, _, loader = accelerator.prepare(
        model, DummyOptim(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY), loader
    )
    losses = []
    for _, batch in zip(range(2 * ACCUMULATION), loader, strict=False):
        with accelerator.accumulate(engine):
            loss = engine(**batch).loss
            accelerator.backward(loss)
            losses.append(loss.item())
    return seen_in(engine, losses)


def main() -> None:
    import deepspeed
    from accelerate.state import AcceleratorState
    from torch import distributed
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    deepspeed.init_distributed("gloo")
    library, *names = sys.argv[1:]
    report = {}
    for name in names:
        report[name] = {"trainer": under_trainer, "accelerate": under_accelerate}[library](name)
        unset_hf_deepspeed_config()
        AcceleratorState._reset_state(reset_partial_state=False)
    if distributed.get_rank() == 0:
        Path("report.json").write_text(json.dumps(report))
    distributed.barrier()
    distributed.destroy_process_group()
    sys.stdout.flush()
    # Threads left over by several engines sometimes abort the interpreter's normal exit.
    os._exit(0)


if __name__ == "__main__":
    main()
