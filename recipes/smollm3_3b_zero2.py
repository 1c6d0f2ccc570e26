"""SmolLM3 3B continued on mathematical web pages with ZeRO-2 on two GPUs: every fourth layer has no
rotary positions.

    deepspeed --num_gpus 2 recipes/smollm3_3b_zero2.py

Each GPU holds all weights and half of the gradients and optimizer states. The embedding of 128,256
tokens is also the head (tied). Activations are recomputed in the backward pass.
Needs: 2 x 80 GB GPUs (28.6 GiB of states each). Measured: not measured. Less memory:
--deepspeed_config zero3.json.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="HuggingFaceTB/SmolLM3-3B-Base",
    dataset="HuggingFaceTB/finemath",
    subset="finemath-4plus",
    ds_config="zero2.json",
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
