"""Qwen3-30B-A3B, a mixture of 128 experts, as 4 expert-parallel ranks in each group of GPUs, with
ZeRO-1.

    deepspeed --hostfile hosts --num_nodes 4 --num_gpus 8 recipes/qwen3_30b_a3b_zero1_ep4.py

Each GPU holds a quarter of the experts of every layer (DeepSpeed's AutoEP). Tokens travel to the
GPU that holds their expert. Everything else is data parallel. `hosts` is a DeepSpeed hostfile, one
line `NAME slots=8` for each host.
Needs: 32 x 141 GB GPUs (59.8 GiB of states each). Measured: not measured. Less memory: --ep 8.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="Qwen/Qwen3-30B-A3B",
    dataset="HuggingFaceTB/finemath",
    subset="finemath-4plus",
    ds_config="zero1.json",
    ep=4,
    activation_checkpointing=True,
    seq_len=4096,
    global_batch=64,
    lr=2e-5,
    warmup_steps=100,
    steps=2000,
    eval_every=200,
    save_every=250,
)

if __name__ == "__main__":
    run(RECIPE)
