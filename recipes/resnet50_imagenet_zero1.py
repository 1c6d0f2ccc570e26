"""ResNet-50 trained from scratch on ImageNet-1k with ZeRO-1 and SGD: BatchNorm that is the same on
every rank.

    deepspeed --num_gpus 4 recipes/resnet50_imagenet_zero1.py

Each micro-batch is normalised by its own mean and variance. So `micro_batch` belongs to the run,
and a resume with another value is refused. The running statistics move once a step, by the mean
over all micro-batches and ranks. Evaluation, export and checkpoints therefore do not depend on the
number of ranks. SGD with Nesterov momentum, lr 0.1 x batch / 256 and five epochs of warm-up follow
Goyal et al. (2017). The cosine schedule and no decay of norms and biases follow He et al. (2019).
90 epochs.
Needs: 4 x 24 GB GPUs (0.2 GiB of states each; 128 images keep 5.2 GiB for their backward pass,
counted in bf16 on a CPU). Gated data: see recipes/README.md. Measured: not measured. More memory:
--micro_batch 256. Less memory: --activation_checkpointing lowers the 5.2 GiB to 2.0.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    task="image_classification",
    model="microsoft/resnet-50",
    init="random",
    dataset="ILSVRC/imagenet-1k",
    ds_config="zero1_sgd.json",
    micro_batch=128,
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
