"""SmolLM2-135M continued on mathematical web pages with ZeRO-1: only the optimizer states are
sharded.

    deepspeed --num_gpus 4 recipes/smollm2_135m_zero1.py

The full model fits on every GPU, so only the optimizer states are worth sharding. The linear
schedule ends at 0, as in a last training phase on selected text. The run trains on a billion
tokens.
Needs: 4 x 16 GB GPUs (1.1 GiB of states each; activations of 4 rows add 5.7, predicted).
Measured: not measured. More memory: --micro_batch 8 on 40 GB.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="HuggingFaceTB/SmolLM2-135M",
    dataset="HuggingFaceTB/finemath",
    subset="finemath-4plus",
    ds_config="zero1.json",
    seq_len=2048,
    micro_batch=4,
    global_batch=256,
    lr=5e-4,
    warmup_steps=50,
    schedule="linear",
    steps=2000,
    eval_every=250,
    save_every=500,
)

if __name__ == "__main__":
    run(RECIPE)
