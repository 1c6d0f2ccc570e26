"""Llama 3.2 1B trained on more German with Adafactor and ZeRO-2: one state per row and column, not
two per weight.

    deepspeed --num_gpus 2 recipes/llama3_2_1b_adafactor_zero2.py

recipekit/optim/adafactor.py computes Adafactor (Shazeer and Stern, arXiv 1804.04235) with the
numbers of torch.optim.Adafactor. Its factors belong to full weights under every ZeRO stage. torch's
Adafactor would treat each flat piece as a vector and keep one number for each element. `lr` is the
most that a weight moves in a step, relative to the root mean square of its tensor. The data are one
language of FineWeb-2; for another, add a flag: --subset fra_Latn.
Needs: 2 x 16 GB GPUs (6.9 GiB of states each; activations of one row add 3.4, predicted).
Gated model: see recipes/README.md. Measured: not measured. One GPU of 24 GB: --num_gpus 1. More
memory: --micro_batch 4 on 80 GB.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="meta-llama/Llama-3.2-1B",
    dataset="HuggingFaceFW/fineweb-2",
    subset="deu_Latn",
    ds_config="zero2_adafactor.json",
    seq_len=2048,
    global_batch=256,
    lr=1e-3,
    warmup_steps=100,
    steps=4000,
    eval_every=250,
    save_every=500,
)

if __name__ == "__main__":
    run(RECIPE)
