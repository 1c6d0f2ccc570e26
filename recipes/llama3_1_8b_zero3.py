"""Continued pre-training of Llama 3.1 8B on mathematical web pages with ZeRO-3, on one host of
eight GPUs.

    deepspeed --num_gpus 8 recipes/llama3_1_8b_zero3.py

Rows have 8,192 tokens, as in Llama 3's own training, and a step has a million tokens. Activations
are recomputed in the backward pass.
Needs: 8 x 80 GB GPUs (17.2 GiB of states each; activations of one row add 3.8, predicted).
Gated model: see recipes/README.md. Measured: not measured. Less memory: --seq_len 4096 halves the
activations; llama3_1_8b_zero3_cpu.py needs two small GPUs. On several hosts of 8 GPUs:
--deepspeed_config zero3_hosts.json.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="meta-llama/Llama-3.1-8B",
    dataset="HuggingFaceTB/finemath",
    subset="finemath-4plus",
    ds_config="zero3.json",
    activation_checkpointing=True,
    seq_len=8192,
    global_batch=128,
    lr=3e-5,
    warmup_steps=100,
    steps=2000,
    eval_every=200,
    save_every=250,
)

if __name__ == "__main__":
    run(RECIPE)
