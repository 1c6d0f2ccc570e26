"""A reward model from Qwen3-0.6B with ZeRO-2: it scores the preferred one of two answers higher.

    deepspeed --num_gpus 2 recipes/qwen3_0_6b_reward_zero2.py

A row is a pair: prompt, chosen and rejected answer. The head gives one score at the last token of
an answer. It is new and randomly initialised from the seed. AutoModelForSequenceClassification of
transformers loads the export, and so do trainers of GRPO or PPO.
Needs: 2 x 16 GB GPUs (5.6 GiB of states each; checkpointed activations of two pairs add 1.1,
predicted). Measured: not measured. Your own pairs: --dataset pairs.jsonl, with columns prompt,
chosen and rejected (recipes/DATA.md).
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="Qwen/Qwen3-0.6B",
    task="reward",
    dataset="HuggingFaceH4/ultrafeedback_binarized",
    split="train_prefs",
    bad_rows="skip",  # pairs longer than seq_len are left out, and counted
    ds_config="zero2.json",
    activation_checkpointing=True,
    seq_len=2048,
    micro_batch=2,
    global_batch=64,
    lr=1e-5,
    warmup_steps=50,
    steps=900,
    weight_decay=0.0,
    eval_every=100,
    save_every=300,
)

if __name__ == "__main__":
    run(RECIPE)
