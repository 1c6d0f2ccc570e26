"""Llama 3.1 8B as 2 tensor x 4 data parallel with ZeRO-3: each gathered layer and its activations
are half as large.

    deepspeed --num_gpus 8 recipes/llama3_1_8b_zero3_tp2.py

ZeRO-3 shards the slices of tensor parallelism again. Half as many rows are in flight as with ZeRO-3
alone, so a smaller global batch keeps all GPUs busy. Activations are recomputed. Otherwise the
gathered weights of every layer would stay in memory until its backward pass.
Needs: 8 x 80 GB GPUs (17.0 GiB of states each; activations of one row add 3.3, predicted).
Gated model: see recipes/README.md. Measured: not measured. Less memory: --seq_len 4096.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="meta-llama/Llama-3.1-8B",
    dataset="HuggingFaceTB/finemath",
    subset="finemath-4plus",
    ds_config="zero3.json",
    tp=2,
    activation_checkpointing=True,
    seq_len=8192,
    global_batch=64,
    lr=2e-5,
    warmup_steps=100,
    steps=2000,
    eval_every=200,
    save_every=250,
)

if __name__ == "__main__":
    run(RECIPE)
