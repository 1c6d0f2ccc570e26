"""Llama 3.1 8B on one host of eight GPUs as 4 pipeline stages x 2 data parallel, with ZeRO-1.

    deepspeed --num_gpus 8 recipes/llama3_1_8b_zero1_pp4.py

Each GPU holds a quarter of the layers. Only hidden states travel between GPUs, so slow links are
enough (PCIe, or Ethernet between hosts). The cost is the bubble: with 32 micro-batches a pipeline
idles (4 - 1) / (32 + 4 - 1) = 9 % of a step.
Needs: 8 x 80 GB GPUs (22.9 GiB of states each). Gated model: see recipes/README.md. Measured: not
measured. A smaller bubble: a larger --global_batch, or --pipeline_schedule dualpipev. Less memory:
--activation_checkpointing.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="meta-llama/Llama-3.1-8B",
    dataset="HuggingFaceTB/finemath",
    subset="finemath-4plus",
    ds_config="zero1.json",
    pp=4,
    seq_len=4096,
    global_batch=64,
    lr=3e-5,
    warmup_steps=100,
    steps=2000,
    eval_every=200,
    save_every=250,
)

if __name__ == "__main__":
    run(RECIPE)
