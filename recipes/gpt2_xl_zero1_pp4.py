"""GPT-2 XL on four small GPUs as a pipeline, with ZeRO-1: how to write a pipeline plan for a model
that publishes none.

    deepspeed --num_gpus 4 recipes/gpt2_xl_zero1_pp4.py

`pp_plan` names the module list to split, and the modules that only the first or the last stage
needs. Every other module is on every stage. The input embedding is also the head, so the first and
the last stage both hold it and sum its gradients.
Needs: 4 x 24 GB GPUs (7.0 GiB of states each). Measured: not measured.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="openai-community/gpt2-xl",
    dataset="HuggingFaceFW/fineweb-edu",
    subset="sample-10BT",
    ds_config="zero1.json",
    pp=4,
    pp_plan={
        "transformer.wte": "first",
        "transformer.wpe": "first",
        "transformer.h": "split",
        "transformer.ln_f": "last",
        "lm_head": "last",
    },
    micro_batch=2,
    global_batch=64,
    lr=3e-5,
    warmup_steps=100,
    steps=2000,
    eval_every=200,
    save_every=250,
)

if __name__ == "__main__":
    run(RECIPE)
