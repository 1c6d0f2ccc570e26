"""Llama 3.1 8B on rows of 131,072 tokens: every row is cut over eight GPUs (Ulysses), the weights by ZeRO-3.

    deepspeed --num_gpus 8 recipes/llama3_1_8b_zero3_sp8.py

Each GPU holds an eighth of the tokens; inside attention it holds all tokens of an eighth of the heads instead. Documents
packed in one row do not see each other.
Attention makes no mask (`varlen`); with `--attention sdpa` it would take 51.5 GB on every GPU, and is refused.
Needs: 8 x 80 GB GPUs with NVLink (16.9 GiB of states each; activations and logits of 16,384 tokens add about 40).
Gated model: see recipes/README.md. Measured: not measured.
Shorter rows fit on fewer GPUs: --sp 2 --seq_len 32768.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="meta-llama/Llama-3.1-8B",
    dataset="HuggingFaceTB/finemath",
    subset="finemath-4plus",
    ds_config="zero3.json",
    sp=8,
    activation_checkpointing=True,
    seq_len=131072,
    lr=1e-5,
    warmup_steps=20,
    steps=400,
    eval_every=50,
    eval_rows=8,
    save_every=50,
)

if __name__ == "__main__":
    run(RECIPE)
