"""BERT-large trained from scratch over a slow network, with 1-bit Adam and ZeRO-0: signs travel in place of gradients.

    deepspeed --hostfile hosts --num_nodes 4 --num_gpus 8 recipes/bert_large_mlm_onebit_zero0.py

The first steps are AdamW's. After freeze_step of them ("auto" in the JSON: 15 % of the steps) the second moment stays as
it is, and ranks send each other one bit of each momentum, twice: 81 MB a step and rank in place of 1.3 GB of bf16
gradients. These are neither summed nor clipped from there on, and grad_norm is that of the momentum. A token that no
row has held before stays as it is but for its decay. A run goes on with as many ranks as it has had, since each keeps
what it has still to send. Steps and rates are those of bert_large_mlm_zero1; `hosts` is a DeepSpeed hostfile.
Needs: 32 x 24 GB GPUs (5.7 GiB of states each; activations of 64 rows add 12.5). Measured: not measured.
On fewer GPUs micro-batches are added up in bf16. Less memory: --activation_checkpointing.
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
