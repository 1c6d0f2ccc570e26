"""Gemma 3 1B trained on more German on one GPU with ZeRO-1: five of six layers attend to a window
of 512 tokens.

    deepspeed --num_gpus 1 recipes/gemma3_1b_zero1.py

A third of the parameters are in the embedding, which is also the head (tied). The loss is computed
in chunks, so the 262,144 logits of each token never exist for a whole row.
Needs: 1 x 40 GB GPU (16.8 GiB of states). Gated model: see recipes/README.md. Measured: not
measured. More GPUs: ZeRO-1 shards the optimizer states.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="google/gemma-3-1b-pt",
    dataset="HuggingFaceFW/fineweb-2",
    subset="deu_Latn",
    ds_config="zero1.json",
    activation_checkpointing=True,
    seq_len=4096,
    global_batch=64,
    lr=5e-5,
    warmup_steps=100,
    steps=2000,
    eval_every=200,
    save_every=500,
)

if __name__ == "__main__":
    run(RECIPE)
