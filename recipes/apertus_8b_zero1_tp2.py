"""Apertus 8B on four GPUs as 2 tensor x 2 data parallel with ZeRO-1: its activation xIELU has
trained parameters.

    deepspeed --num_gpus 4 recipes/apertus_8b_zero1_tp2.py

Two neighbouring GPUs share each layer. The two parameters of a layer's activation are replicated,
and their gradients are summed over the tensor-parallel ranks.
Needs: 4 x 80 GB GPUs with NVLink (45.0 GiB of states each). Measured: not measured.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="swiss-ai/Apertus-8B-2509",
    dataset="HuggingFaceFW/fineweb-2",
    subset="deu_Latn",
    ds_config="zero1.json",
    activation_checkpointing=True,
    tp=2,
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
