"""ModernBERT-large continued on educational web text with ZeRO-2: a masked language model whose windows look both ways.

    deepspeed --num_gpus 2 recipes/modernbert_large_mlm_zero2.py

Two of three layers see 64 tokens to either side, the others the whole document; neither makes a mask, however many
documents a row holds (`varlen`). For your own text, to adapt the model to a field: --dataset my.jsonl. It hides 30 % of the
tokens, as its authors did (Warner et al., 2024).
Needs: 2 x 24 GB GPUs (3.7 GiB of states each; activations of 8 rows add 9). Measured: not measured.
Less memory: --micro_batch 2, or --activation_checkpointing.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    task="masked_lm",
    model="answerdotai/ModernBERT-large",
    dataset="HuggingFaceFW/fineweb-edu",
    subset="sample-10BT",
    ds_config="zero2.json",
    micro_batch=8,
    global_batch=512,
    mask_rate=0.3,
    lr=5e-5,
    warmup_steps=200,
    schedule="linear",
    steps=5000,
    weight_decay=1e-5,
    beta2=0.98,
    eps=1e-6,
    eval_every=500,
    eval_rows=512,
    save_every=500,
)

if __name__ == "__main__":
    run(RECIPE)
