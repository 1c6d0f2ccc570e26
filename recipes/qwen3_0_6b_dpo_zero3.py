"""Qwen3-0.6B trained on pairs of answers by DPO with ZeRO-3: no reward model, and no second model
in memory.

    deepspeed --num_gpus 2 recipes/qwen3_0_6b_dpo_zero3.py

A row is a pair: prompt, chosen and rejected answer. The reference log-probabilities of all pairs
are computed once, before step 1, on all GPUs. They are kept beside the cached tokens
(recipes/DATA.md). For your own pairs give --dataset pairs.jsonl.
Needs: 2 x 16 GB GPUs (5.0 GiB of states each; checkpointed activations of two pairs add 1.1,
predicted). Measured: not measured. Less memory: qwen3_0_6b_dpo_lora_zero2.py trains an adapter
instead.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="Qwen/Qwen3-0.6B",
    task="preference",
    dataset="HuggingFaceH4/ultrafeedback_binarized",
    split="train_prefs",
    bad_rows="skip",  # pairs longer than seq_len are left out, and counted
    ds_config="zero3.json",
    activation_checkpointing=True,
    seq_len=2048,
    micro_batch=2,
    global_batch=64,
    lr=5e-7,
    warmup_steps=90,
    steps=900,
    schedule="linear",
    weight_decay=0.0,
    eval_every=100,
    save_every=300,
)

if __name__ == "__main__":
    run(RECIPE)
