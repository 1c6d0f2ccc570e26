"""ViT-H/14 trained from scratch on ImageNet-1k as 2 tensor x 4 data parallel with ZeRO-1, split by
the plan of its task.

    deepspeed --num_gpus 8 recipes/vit_h14_imagenet_zero1_tp2.py

Vision transformers publish no plan, so the task has one. It says how tensors and pipelines are
split, and which parameters do not decay: position embeddings and the class token. `tp_plan`,
`pp_plan` and `no_decay` of a recipe override the task's plan. The published files hold no
classifier, so the weights are randomly initialised. The hyperparameters for training from scratch
are from the paper on masked autoencoders (He et al., 2022, table 11), with 200 epochs. The paper's
other augmentation, drop path and weight averaging are left out.
Needs: 8 x 24 GB GPUs (2.7 GiB of states each; activations of 32 images add about 8). Gated data:
see recipes/README.md. Measured: not measured. More memory: --micro_batch 128 on 80 GB. Less memory:
--activation_checkpointing.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    task="image_classification",
    model="google/vit-huge-patch14-224-in21k",
    init="random",
    num_labels=1000,
    dataset="ILSVRC/imagenet-1k",
    ds_config="zero1.json",
    tp=2,
    micro_batch=32,
    global_batch=4096,
    lr=1.6e-3,
    warmup_steps=6250,
    steps=62_500,
    weight_decay=0.3,
    eval_every=1000,
    eval_rows=512,
    save_every=1000,
)

if __name__ == "__main__":
    run(RECIPE)
