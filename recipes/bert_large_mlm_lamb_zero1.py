"""BERT-large trained from scratch in batches of 65,536 rows, with LAMB and ZeRO-1: 8,599 steps in
all.

    deepspeed --num_gpus 8 recipes/bert_large_mlm_lamb_zero1.py

This is the large-batch training of You et al. (arXiv 1904.00962), with the paper's numbers of
steps. Nine of ten epochs use rows of 128 tokens, here 7,038 steps; the rest use rows of 512.
Learning rates and warm-ups are from the reproduction in NVIDIA's DeepLearningExamples.
recipekit/optim/lamb.py computes the trust ratio over full tensors under every ZeRO stage.
DeepSpeed's LAMB would compute it over flat pieces.

The second phase starts from the export of the first. Run the same command with

    --model runs/bert_large_mlm_lamb_zero1/hf --init pretrained --seq_len 512 \\
    --micro_batch 16 --global_batch 32768 \\
    --lr 4e-3 --warmup_steps 200 --steps 1561 --out runs/bert_lamb_512

Needs: 8 x 24 GB GPUs (2.3 GiB of states each; activations of 64 rows add 12.5). Measured: not
measured. More GPUs: the batch stays the same, with fewer micro-batches to accumulate. Less memory:
--micro_batch 16.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    task="masked_lm",
    model="google-bert/bert-large-uncased",
    init="random",
    dataset="wikimedia/wikipedia",
    subset="20231101.en",
    ds_config="zero1_lamb.json",
    seq_len=128,
    micro_batch=64,
    global_batch=65_536,
    lr=6e-3,
    warmup_steps=2000,
    schedule="linear",
    steps=7038,
    weight_decay=0.01,
    beta2=0.999,
    eps=1e-6,
    eval_every=100,
    eval_rows=2048,
    save_every=100,
)

if __name__ == "__main__":
    run(RECIPE)
