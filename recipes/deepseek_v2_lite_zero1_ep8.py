"""DeepSeek-V2-Lite, a mixture of 64 experts with latent attention, as 8 expert-parallel ranks, with
ZeRO-1.

    deepspeed --num_gpus 8 recipes/deepseek_v2_lite_zero1_ep8.py

Each GPU holds 8 of the 64 experts of every layer except the first, which is dense (DeepSpeed's
AutoEP). Tokens travel to the GPU that holds their expert. Everything else is data parallel: the
attention, the first layer and the 2 shared experts. Keys and values come from 512 numbers for each
token (latent attention).
Needs: 8 x 80 GB GPUs (39.3 GiB of states each). Measured: not measured.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="deepseek-ai/DeepSeek-V2-Lite",
    dataset="HuggingFaceTB/finemath",
    subset="finemath-4plus",
    ds_config="zero1.json",
    ep=8,
    activation_checkpointing=True,
    seq_len=4096,
    global_batch=64,
    lr=2e-5,
    warmup_steps=100,
    steps=2000,
    eval_every=200,
    save_every=250,
)

if __name__ == "__main__":
    run(RECIPE)
