"""Llama 3.1 8B on rows of 131,072 tokens: every row is split over eight GPUs (Ulysses), ZeRO-3
shards the weights.

    deepspeed --num_gpus 8 recipes/llama3_1_8b_zero3_sp8.py

Each GPU holds an eighth of the tokens. Inside attention, it holds all tokens of an eighth of the
heads instead. Documents packed in one row do not see each other, and this needs no mask
(--attention varlen). The logits are never all in memory at once (--loss chunked).
Needs: 8 x 80 GB GPUs with NVLink (17.2 GiB of states each). The predicted peak is 29 GiB, while
gradients arrive, with 16,384 tokens on a GPU; `--dry_run` prints the terms:
    17.2 GiB  states
     3.0      gathered weights and copies of a bucket, at most
     4.0      inputs of 32 recomputed layers: 32 x 16,384 x 4096 x 2 B
     0.5      the last norm and its result: 16,384 x 4096 x 8 B
     3.2      a recomputed layer, each token:
              norms 65,536 B, attention 28,800, MLP 4 x 14,336 x 2 = 114,688
     1.3      gradients within its MLP, at most: 3 x 16,384 x 14,336 x 2 B
So the MLP needs no tiles. In the loss: a block of logits (0.5), gradients of its input (0.3) and of
the head (1.0). Gated model: see recipes/README.md. Measured: not measured.
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
