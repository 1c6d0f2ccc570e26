"""Qwen3-0.6B-Base continued on educational web text with ZeRO-2. The smallest recipe for several
GPUs.

    deepspeed --num_gpus 2 recipes/qwen3_0_6b_zero2.py

ZeRO-2 shards optimizer states and gradients without more communication. To train on your own text,
give --dataset files (text, JSONL or Parquet).
Needs: 2 x 16 GB GPUs (5.6 GiB of states each; activations of one row add 3.9, predicted).
Measured: not measured. More memory: --micro_batch 4 on 80 GB. Less memory: --deepspeed_config
zero3.json, or --activation_checkpointing.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="Qwen/Qwen3-0.6B-Base",
    dataset="HuggingFaceFW/fineweb-edu",
    subset="sample-10BT",
    ds_config="zero2.json",
    seq_len=2048,
    global_batch=128,
    lr=5e-5,
    warmup_steps=50,
    steps=2000,
    eval_every=250,
    save_every=500,
)

if __name__ == "__main__":
    run(RECIPE)
