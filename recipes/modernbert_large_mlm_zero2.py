"""ModernBERT-large continued on educational web text with ZeRO-2: a masked language model with
bidirectional windows.

    deepspeed --num_gpus 2 recipes/modernbert_large_mlm_zero2.py

Two of three layers see 64 tokens to either side, and the others see the whole document. Neither
needs a mask, however many documents a row holds (`varlen`). To adapt the model to your own field,
give --dataset my.jsonl. The task masks 30 % of the tokens, as the authors did (Warner et al.,
2024).
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
