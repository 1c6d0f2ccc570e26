"""BERT-large trained from scratch over a slow network, with 1-bit Adam and ZeRO-0: ranks send signs
instead of gradients.

    deepspeed --hostfile hosts --num_nodes 4 --num_gpus 8 recipes/bert_large_mlm_onebit_zero0.py

The first `freeze_step` steps are AdamW steps ("auto" in the JSON: 15 % of the steps). Then the
second moment is frozen, and ranks exchange one bit of each momentum element, twice. That is 81 MB
for each step and rank, instead of 1.3 GB of bf16 gradients. From then on gradients are neither
summed nor clipped, and grad_norm is the norm of the momentum. The embedding of a token that no row
has contained yet changes only by weight decay. A resume needs the same number of ranks, because
each rank keeps its own compression error. Steps and rates are the same as in bert_large_mlm_zero1.
`hosts` is a DeepSpeed hostfile.
Needs: 32 x 24 GB GPUs (5.7 GiB of states each; activations of 64 rows add 12.5). Measured: not
measured. Fewer GPUs accumulate micro-batches in bf16. Less memory: --activation_checkpointing.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    task="masked_lm",
    model="google-bert/bert-large-uncased",
    init="random",
    dataset="wikimedia/wikipedia",
    subset="20231101.en",
    ds_config="zero0_onebit.json",
    seq_len=128,
    micro_batch=64,
    global_batch=2048,
    warmup_steps=1250,
    schedule="linear",
    steps=112_500,
    weight_decay=0.01,
    beta2=0.999,
    eps=1e-6,
    eval_every=1000,
    eval_rows=2048,
    save_every=1000,
)

if __name__ == "__main__":
    run(RECIPE)
