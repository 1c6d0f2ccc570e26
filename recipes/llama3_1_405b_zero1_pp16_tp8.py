"""Llama 3.1 405B in three dimensions: 16 pipeline stages x 8 tensor x 2 data parallel, with ZeRO-1.

    deepspeed --hostfile hosts --num_nodes 32 --num_gpus 8 recipes/llama3_1_405b_zero1_pp16_tp8.py

A stage is one host: its eight GPUs are tensor peers, and inside a pipeline only hidden states cross
the network. Each rank reads only its own slices of the weights. `hosts` is a DeepSpeed hostfile,
one line `NAME slots=8` for each host.
Needs: 256 x 80 GB GPUs (35.6 GiB of states each). Gated model: see recipes/README.md. Measured: not
measured. With 128 micro-batches a pipeline idles (16 - 1) / (128 + 16 - 1) = 10 % of a step.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="meta-llama/Llama-3.1-405B",
    dataset="HuggingFaceTB/finemath",
    subset="finemath-4plus",
    activation_checkpointing=True,
    ds_config="zero1.json",
    tp=8,
    pp=16,
    seq_len=4096,
    global_batch=256,
    lr=8e-6,
    warmup_steps=100,
    steps=2000,
    eval_every=200,
    save_every=100,
)

if __name__ == "__main__":
    run(RECIPE)
