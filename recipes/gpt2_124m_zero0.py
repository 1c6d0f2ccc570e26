"""GPT-2 124M trained from scratch with ZeRO-0: plain data parallelism, nothing is sharded.

    deepspeed --num_gpus 8 recipes/gpt2_124m_zero0.py

Size and learning rate follow GPT-3's smallest model (arXiv 2005.14165, table 2.1). The data are ten
billion tokens of educational web text, half a million tokens a step. GPT-2 publishes no
tensor-parallel plan, so tp stays 1.
Needs: 8 x 24 GB GPUs (1.9 GiB of states each; activations and logits of 8 rows add about 10).
Measured: not measured. Fewer GPUs: any number that divides 64 gives the same training, only slower.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="openai-community/gpt2",
    init="random",
    dataset="HuggingFaceFW/fineweb-edu",
    subset="sample-10BT",
    ds_config="zero0.json",
    micro_batch=8,
    global_batch=512,
    lr=6e-4,
    min_lr=6e-5,
    warmup_steps=700,
    steps=19000,
    eval_every=500,
    save_every=1000,
)

if __name__ == "__main__":
    run(RECIPE)
