"""ViT-L/16 fine-tuned on ImageNet-1k with ZeRO-2: an image classifier in the same training loop as
language models.

    deepspeed --num_gpus 2 recipes/vit_l16_imagenet_zero2.py

The task makes the difference: a row is an image, its loss is the loss of its class, and there are
no tokens. Each epoch samples a new random crop of each image, and the crop is the same on any
number of GPUs. Four epochs. To train on your own images, give --dataset a folder with a folder for
each class, or files (recipes/DATA.md).
Needs: 2 x 24 GB GPUs (2.8 GiB of states each; activations of 64 images add about 11). Gated data:
see recipes/README.md. Measured: not measured. More memory: --micro_batch 256 on 80 GB. Less memory:
--deepspeed_config zero3.json, or --activation_checkpointing.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    task="image_classification",
    model="google/vit-large-patch16-224",
    dataset="ILSVRC/imagenet-1k",
    ds_config="zero2.json",
    micro_batch=64,
    global_batch=512,
    lr=3e-5,
    warmup_steps=500,
    steps=10_000,
    weight_decay=0.05,
    beta2=0.999,
    eval_every=1000,
    eval_rows=512,
    save_every=1000,
)

if __name__ == "__main__":
    run(RECIPE)
