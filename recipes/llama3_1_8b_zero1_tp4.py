"""Llama 3.1 8B on one host of eight GPUs as 4 tensor x 2 data parallel, with ZeRO-1.

    deepspeed --num_gpus 8 recipes/llama3_1_8b_zero1_tp4.py

Each layer is split over four neighbouring GPUs by the model's own plan, so weights are never
gathered. ZeRO-3 sends weights, tensor parallelism sends activations. Sending activations costs less
when rows are short and links are fast (NVLink).
Needs: 8 x 80 GB GPUs with NVLink (22.4 GiB of states each). Gated model: see recipes/README.md.
Measured: not measured. Less memory: --activation_checkpointing.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="meta-llama/Llama-3.1-8B",
    dataset="HuggingFaceTB/finemath",
    subset="finemath-4plus",
    ds_config="zero1.json",
    tp=4,
    seq_len=4096,
    global_batch=128,
    lr=3e-5,
    warmup_steps=100,
    steps=2000,
    eval_every=200,
    save_every=250,
)

if __name__ == "__main__":
    run(RECIPE)
