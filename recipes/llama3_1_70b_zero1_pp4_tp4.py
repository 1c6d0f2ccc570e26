"""Llama 3.1 70B in three dimensions: 4 pipeline stages x 4 tensor x 4 data parallel, with ZeRO-1.

    deepspeed --hostfile hosts --num_nodes 8 --num_gpus 8 recipes/llama3_1_70b_zero1_pp4_tp4.py

Tensor peers are neighbours on one host, where links are fast. Pipeline stages are on different
hosts and send little. `hosts` is a DeepSpeed hostfile, one line `NAME slots=8` for each host.
Needs: 64 x 96 GB GPUs (37.7 GiB of states each). Gated model: see recipes/README.md. Measured: not
measured. Fewer hosts: any multiple of 16 GPUs. The optimizer states are sharded over the
data-parallel ranks that are left.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="meta-llama/Llama-3.1-70B",
    dataset="HuggingFaceTB/finemath",
    subset="finemath-4plus",
    activation_checkpointing=True,
    ds_config="zero1.json",
    tp=4,
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
