"""Llama 3.2 1B trained from scratch with Muon and ZeRO-2: full matrices are orthogonalised,
embeddings have another rate.

    deepspeed --num_gpus 8 recipes/llama3_2_1b_muon_zero2.py

Muon (recipekit/optim/muon.py) updates the two-dimensional weights of the layers. It orthogonalises
full matrices, though each rank holds only a part. AdamW updates the embedding (tied to the head)
and the norms at the same learning rate. `adjust_lr_fn` of zero2_muon.json makes one rate fit both
optimizers, and `lr_scale` halves the rate of the embedding. A matrix has one state instead of two.
4,800 steps are 20 B tokens.
Needs: 8 x 24 GB GPUs (4.2 GiB of states each; activations of one row add 3.4, predicted).
Gated model: see recipes/README.md. Measured: not measured, and the rates are guesses. More memory:
--micro_batch 4 on 80 GB. Other matrices: name them in `matrices` of the recipe.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="meta-llama/Llama-3.2-1B",
    init="random",
    dataset="HuggingFaceFW/fineweb-edu",
    subset="sample-100BT",
    ds_config="zero2_muon.json",
    lr_scale={"*.embed_tokens.weight": 0.5},
    seq_len=2048,
    global_batch=2048,
    lr=1e-3,
    min_lr=1e-4,
    warmup_steps=200,
    steps=4800,
    eval_every=250,
    save_every=500,
)

if __name__ == "__main__":
    run(RECIPE)
