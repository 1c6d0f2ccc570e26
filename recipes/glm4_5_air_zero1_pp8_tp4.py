"""GLM-4.5-Air, a mixture of 128 experts, as 8 pipeline stages x 4 tensor x 2 data parallel, with
ZeRO-1.

    deepspeed --hostfile hosts --num_nodes 8 --num_gpus 8 recipes/glm4_5_air_zero1_pp8_tp4.py

Four neighbouring GPUs share each expert and each attention layer. The 46 layers are split over the
stages by their size. The files also contain a layer that predicts a second token. transformers does
not load it. `hosts` is a DeepSpeed hostfile, one line `NAME slots=8` for each host.
Needs: 64 x 80 GB GPUs (39.3 GiB of states each). Measured: not measured. Fewer hosts: 4 with
141 GB GPUs (58.9 GiB).
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="zai-org/GLM-4.5-Air-Base",
    dataset="HuggingFaceTB/finemath",
    subset="finemath-4plus",
    ds_config="zero1.json",
    activation_checkpointing=True,
    tp=4,
    pp=8,
    seq_len=4096,
    global_batch=128,
    lr=1e-5,
    warmup_steps=100,
    steps=2000,
    eval_every=200,
    save_every=250,
)

if __name__ == "__main__":
    run(RECIPE)
