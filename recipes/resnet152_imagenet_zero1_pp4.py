"""ResNet-152 trained from scratch on ImageNet-1k as 4 pipeline stages with ZeRO-1 and SGD: one chain of its 50 blocks.

    deepspeed --num_gpus 4 recipes/resnet152_imagenet_zero1_pp4.py

The model holds its blocks in four lists, of other widths and picture sizes each; the plan of its task makes one chain of
them, cut anywhere by the parameters that each stage holds: 23, 15, 10 and 2 blocks. Blocks of all widths compute about
as much, so the first stage is the slowest. Micro-batches of 32 are what its BatchNorm normalises, and what fills the
pipeline: 32 of them a step. The numbers are those of resnet50_imagenet_zero1.
Needs: 4 x 24 GB GPUs (0.2 GiB of states each; the four micro-batches in the first stage keep 7.0 GiB for their backward
passes, counted in bf16 on a CPU). Gated data: see recipes/README.md. Measured: not measured.
More GPUs: 8 are two pipelines. Less memory: --activation_checkpointing, with which they keep 2.5 GiB.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    task="image_classification",
    model="microsoft/resnet-152",
    init="random",
    dataset="ILSVRC/imagenet-1k",
    ds_config="zero1_sgd.json",
    pp=4,
    micro_batch=32,
    global_batch=1024,
    lr=0.4,
    warmup_steps=6_255,
    steps=112_600,
    weight_decay=1e-4,
    gradient_clipping=0.0,
    eval_every=1000,
    eval_rows=512,
    save_every=1000,
)

if __name__ == "__main__":
    run(RECIPE)
