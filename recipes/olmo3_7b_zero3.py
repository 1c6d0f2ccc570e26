"""Olmo 3 7B continued on mathematical web pages with ZeRO-3: three of four layers have a window,
the fourth has YaRN.

    deepspeed --num_gpus 8 recipes/olmo3_7b_zero3.py

Rows have 8,192 tokens, as in Olmo 3's own pretraining. Layers with a window of 4,096 tokens keep
plain rotary positions. The others scale theirs by YaRN, which reaches 65,536 tokens.
Needs: 8 x 40 GB GPUs (15.3 GiB of states each). Measured: not measured.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="allenai/Olmo-3-1025-7B",
    dataset="HuggingFaceTB/finemath",
    subset="finemath-4plus",
    ds_config="zero3.json",
    activation_checkpointing=True,
    seq_len=8192,
    global_batch=128,
    lr=3e-5,
    warmup_steps=100,
    steps=2000,
    eval_every=200,
    save_every=250,
)

if __name__ == "__main__":
    run(RECIPE)
