"""Llama 3.2 1B trained on more German with ZeRO-3: parameters, gradients and optimizer states are
all sharded.

    deepspeed --num_gpus 4 recipes/llama3_2_1b_zero3.py

This is continued pre-training on one language of FineWeb-2. For another language, add a flag:
--subset fra_Latn.
Needs: 4 x 24 GB GPUs (5.3 GiB of states each; activations of one row add 3.4, predicted).
Gated model: see recipes/README.md. Measured: not measured. More memory: --micro_batch 4 on 80 GB.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="meta-llama/Llama-3.2-1B",
    dataset="HuggingFaceFW/fineweb-2",
    subset="deu_Latn",
    ds_config="zero3.json",
    seq_len=2048,
    global_batch=256,
    lr=5e-5,
    warmup_steps=100,
    steps=4000,
    eval_every=250,
    save_every=500,
)

if __name__ == "__main__":
    run(RECIPE)
