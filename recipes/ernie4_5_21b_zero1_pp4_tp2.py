"""ERNIE 4.5 21B-A3B, a mixture of 64 experts, on one host as 4 pipeline stages x 2 tensor parallel,
with ZeRO-1.

    deepspeed --num_gpus 8 recipes/ernie4_5_21b_zero1_pp4_tp2.py

Each stage holds 7 of the 28 layers with all their experts. The model's own plan splits each
expert over two neighbouring GPUs. The first and the last stage both hold the tied embedding and sum
its gradient.
Needs: 8 x 80 GB GPUs (51.1 GiB of states each). Measured: not measured. Less memory: more hosts,
which shard the optimizer states.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="baidu/ERNIE-4.5-21B-A3B-PT",
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
