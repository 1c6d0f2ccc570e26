"""Mixtral 8x7B, a mixture of experts, as 4 pipeline stages x 2 tensor x 4 data parallel, with
ZeRO-1.

    deepspeed --hostfile hosts --num_nodes 4 --num_gpus 8 recipes/mixtral_8x7b_zero1_pp4_tp2.py

Each stage holds eight layers with all their experts. The model's own plan splits each expert over
two neighbouring GPUs, so no token is sent to another GPU for its expert. `hosts` is a DeepSpeed
hostfile, one line `NAME slots=8` for each host.
Needs: 32 x 141 GB GPUs (49.2 GiB of states each). Measured: not measured. Less memory: more hosts,
which shard the optimizer states further.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="mistralai/Mixtral-8x7B-v0.1",
    dataset="HuggingFaceTB/finemath",
    subset="finemath-4plus",
    ds_config="zero1.json",
    activation_checkpointing=True,
    tp=2,
    pp=4,
    seq_len=4096,
    global_batch=128,
    lr=2e-5,
    warmup_steps=100,
    steps=2000,
    eval_every=200,
    save_every=250,
)

if __name__ == "__main__":
    run(RECIPE)
