"""A LoRA adapter for Qwen3-0.6B trained by DPO with ZeRO-2: the reference is the model without the
adapter.

    deepspeed --num_gpus 2 recipes/qwen3_0_6b_dpo_lora_zero2.py

Before step 1 the adapter adds nothing, so the reference log-probabilities computed then are the
base model's. The run exports the adapter in peft's format. With --merge it exports the full model,
with the adapter added to its weights.
Needs: 2 x 16 GB GPUs (1.2 GiB of states each; checkpointed activations of two pairs as in
qwen3_0_6b_dpo_zero3.py, and the adapter's). Measured: not measured. All weights:
qwen3_0_6b_dpo_zero3.py.
"""

from typing import Any

from recipekit import Recipe, run


def adapt(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    # The adapter stays in the model's dtype; the optimizer keeps its fp32 master weights.
    return get_peft_model(model, config, autocast_adapter_dtype=False)


RECIPE = Recipe(
    model="Qwen/Qwen3-0.6B",
    adapt=adapt,
    task="preference",
    dataset="HuggingFaceH4/ultrafeedback_binarized",
    split="train_prefs",
    bad_rows="skip",  # pairs longer than seq_len are left out, and counted
    ds_config="zero2.json",
    activation_checkpointing=True,
    seq_len=2048,
    micro_batch=2,
    global_batch=64,
    lr=5e-6,
    warmup_steps=90,
    steps=900,
    weight_decay=0.0,
    eval_every=100,
    save_every=300,
)

if __name__ == "__main__":
    run(RECIPE)
