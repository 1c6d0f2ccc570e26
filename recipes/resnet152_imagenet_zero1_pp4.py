"""ResNet-152 trained from scratch on ImageNet-1k as 4 pipeline stages with ZeRO-1 and SGD: its 50
blocks as one chain.

    deepspeed --num_gpus 4 recipes/resnet152_imagenet_zero1_pp4.py

The model holds its blocks in four lists, each with its own width and image size. The task's plan
makes one chain of them, which can be split at any block. Stages are balanced by parameters: 23, 15,
10 and 2 blocks. Blocks of all widths compute about as much, so the first stage is the slowest.
BatchNorm normalises each micro-batch of 32 images, and 32 micro-batches a step fill the pipeline.
The hyperparameters are the same as in resnet50_imagenet_zero1.
Needs: 4 x 24 GB GPUs (0.2 GiB of states each). Gated data: see recipes/README.md. Measured: not
measured. The four micro-batches in the first stage keep 7.0 GiB for their backward passes, counted
in bf16 on a CPU. More GPUs: 8 are two pipelines. Less memory: --activation_checkpointing lowers the
7.0 GiB to 2.5.
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
