"""ViT-H/14 trained from scratch on ImageNet-1k as 2 tensor x 4 data parallel with ZeRO-1, cut by the plan of its task.

    deepspeed --num_gpus 8 recipes/vit_h14_imagenet_zero1_tp2.py

Vision transformers publish no plan, so the task has one: how tensors are cut, where a pipeline is, and that position
embeddings and the class token do not decay; `tp_plan`, `pp_plan` and `no_decay` of a recipe beat it. The published
files hold no classifier, so the weights are drawn. The numbers are those of training from scratch in the paper on
masked autoencoders (He et al., 2022, table 11), 200 epochs, without its further augmentation, dropped paths and
averages.
Needs: 8 x 24 GB GPUs (2.7 GiB of states each; activations of 32 pictures add about 8). Gated data: see
recipes/README.md. Measured: not measured.
More memory: --micro_batch 128 on 80 GB. Less memory: --activation_checkpointing.
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
