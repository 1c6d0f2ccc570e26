"""DPO compared with TRL's DPOTrainer over ten losses.

Both use the same pairs in the same order, the same beta, and AdamW.
"""

import functools
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from preference_pairs import pairs
from recipekit.architectures.lookup import SHIPPED
from recipekit.architectures.shrink import BYTE_VOCAB, shrink
from recipekit.data.batching import DataRank
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import request_from_recipe
from recipekit.data.samples import open_samples
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.recipe import Recipe
from recipekit.tasks.find import load_task
from shipped_jsons import strategy

STEPS, ROWS, BETA = 10, 8, 0.3


@functools.cache
def start() -> str:
    """Return a folder with a small, randomly initialised Qwen3 and the byte tokenizer."""
    torch.manual_seed(0)
    config = shrink(json.loads((SHIPPED / "Qwen--Qwen3-0.6B.json").read_text()), BYTE_VOCAB)
    folder = tempfile.mkdtemp(prefix="trl_")
    transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config)
    ).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


RECIPE = Recipe(
    task="preference",
    beta=BETA,
    **dict(
        lr=1e-3,
        eps=1e-6,
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.1,
        schedule="constant",
        gradient_clipping=1.0,
    ),
    **dict(
        steps=STEPS,
        seq_len=128,
        micro_batch=2,
        global_batch=ROWS,
        seed=3,
        wandb=False,
        export=False,
    ),
)


def train(recipe: Recipe, config: dict[str, Any], out: str) -> int:
    """Run the real loop on a rank of a pool, from the files in `start`."""
    from recipekit.train import main

    sys.argv = ["trl.py"]
    return main(
        resolve_run(
            parse(
                replace(recipe, ds_config=config, out=out, token_cache=f"{out}_tokens"),
                Path("trl.py"),
                [],
            )
        )
    )


def rows_in_order(recipe: Recipe) -> list[dict[str, Any]]:
    """Return the data set's rows in the order of the steps."""
    task, found = load_task("preference"), []
    assert task.samples is not None

    def record(processor: Any, rows: list[Any], keys: Any) -> dict[str, torch.Tensor]:
        found.extend(rows)
        return {}

    request = request_from_recipe(recipe)
    stream = open_samples(
        request,
        task.processor(request, {}),
        replace(task.samples, collate=record),
        rank=DataRank(1, 0),
    )
    for _ in range(STEPS):
        next(stream)
    stream.close()
    return found[: STEPS * ROWS]


def with_trl(
    rows: list[dict[str, Any]], folder: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[float], list[float]]:
    """Train with TRL's trainer in this process; return the losses and margins."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(
        output_dir=folder,
        beta=BETA,
        max_length=128,
        per_device_train_batch_size=ROWS,
        max_steps=STEPS,
        **dict(
            learning_rate=1e-3,
            adam_epsilon=1e-6,
            adam_beta1=0.9,
            adam_beta2=0.999,
            weight_decay=0.1,
            max_grad_norm=1.0,
            optim="adamw_torch",
        ),
        **dict(
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        **dict(train_sampling_strategy="sequential", dataloader_num_workers=0, disable_tqdm=True),
    )
    data = Dataset.from_list(
        [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in rows]
    )
    trainer = DPOTrainer(
        model=start(), args=config, train_dataset=data, processing_class=byte_tokenizer()
    )
    losses, compute = [], trainer.compute_loss

    def compute_loss(*given: Any, **named: Any) -> Any:
        result = compute(*given, **named)
        losses.append((result[0] if isinstance(result, tuple) else result).item())
        return result

    trainer.compute_loss = compute_loss
    trainer.train()
    return losses, [
        line["rewards/margins"] for line in trainer.state.log_history if "rewards/margins" in line
    ]


@pytest.mark.slow
@pytest.mark.parametrize("form", [0, 1], ids=["texts", "chats"])
def test_dpo_has_the_losses_of_trl(pools, tmp_path, monkeypatch, form):
    """The run uses ZeRO-2 on two ranks with two micro-batches each, for strings and messages."""
    rows = [json.loads(line) for line in Path(pairs()).read_text().splitlines()[form::3][:150]]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = replace(RECIPE, model=start(), dataset=str(file))
    assert pools.run(
        2, train, recipe=recipe, config=strategy("zero2"), out=str(tmp_path / "run")
    ) == [0, 0]
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses, margins = with_trl(rows_in_order(recipe), str(tmp_path / "trl"), monkeypatch)
    print(
        "largest difference of a loss:",
        max(abs(line["loss"] - loss) for line, loss in zip(lines, losses, strict=True)),
    )
    assert [line["loss"] for line in lines] == pytest.approx(losses, abs=1e-5)
    assert [line["margin"] for line in lines] == pytest.approx(margins, abs=1e-4)
    assert abs(losses[-1] - losses[0]) > 0.01, "something was learned"
