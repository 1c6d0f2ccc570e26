"""Seed-OSS 36B in three dimensions: 4 pipeline stages x 2 tensor x 2 data parallel, with ZeRO-1.

    deepspeed --hostfile hosts --num_nodes 2 --num_gpus 8 recipes/seed_oss_36b_zero1_pp4_tp2.py

Each stage holds 15 to 17 of the 64 layers. config.json sets a dropout of 0.1 for attention and
residuals, which training applies. `hosts` is a DeepSpeed hostfile, one line `NAME slots=8` for each
host.
Needs: 16 x 80 GB GPUs (51.3 GiB of states each). Measured: not measured. Less memory: more hosts,
which shard the optimizer states further.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="ByteDance-Seed/Seed-OSS-36B-Base",
    dataset="HuggingFaceTB/finemath",
    subset="finemath-4plus",
    ds_config="zero1.json",
    activation_checkpointing=True,
    tp=2,
    pp=4,
    seq_len=4096,
    global_batch=128,
    lr=1e-5,
    warmup_steps=100,
    steps=2000,
    eval_every=200,
    save_every=250,
)

if __name__ == "__main__":
    run(RECIPE)
