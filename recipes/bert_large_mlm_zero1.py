"""BERT-large trained from scratch on English Wikipedia with ZeRO-1: a masked language model, rows
of 128 tokens.

    deepspeed --num_gpus 8 recipes/bert_large_mlm_zero1.py

The task masks 15 % of the tokens, different ones in each epoch. Attention is bidirectional, and
documents in the same row do not see each other. To mask other tokens, use `--mask_rate` and
`--whole_words`. The batch is eight times the paper's (Devlin et al., 2019), so the learning rate is
raised from 1e-4 to 3e-4. As in the paper, nine of ten steps use short rows. The last steps use rows
of 512 tokens and start from this run's export. Run the same command with

    --model runs/bert_large_mlm_zero1/hf --init pretrained --seq_len 512 \\
    --micro_batch 16 --steps 12500 --out runs/bert_512

Needs: 8 x 24 GB GPUs (2.3 GiB of states each; activations of 64 rows add 12.5). Measured: not
measured. Less memory: --micro_batch 16, or --activation_checkpointing.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    task="masked_lm",
    model="google-bert/bert-large-uncased",
    init="random",
    dataset="wikimedia/wikipedia",
    subset="20231101.en",
    ds_config="zero1.json",
    seq_len=128,
    micro_batch=64,
    global_batch=2048,
    warmup_steps=1250,
    schedule="linear",
    steps=112_500,
    weight_decay=0.01,
    beta2=0.999,
    eps=1e-6,
    eval_every=1000,
    eval_rows=2048,
    save_every=1000,
)

if __name__ == "__main__":
    run(RECIPE)
