"""Full training of Llama 3.1 8B on two small GPUs: ZeRO-3 with parameters and optimizer in host
memory.

    deepspeed --num_gpus 2 recipes/llama3_1_8b_zero3_cpu.py

The GPUs hold one layer at a time. The optimizer step runs on the CPU (DeepSpeed's CPU Adam,
compiled once at the first start). A large batch spreads the cost of this step over many forward
passes.
Needs: 2 x 24 GB GPUs and 192 GB of host memory (82.3 GiB of states for each GPU, all on the host).
Gated model: see recipes/README.md. Measured: not measured. Less GPU memory: --seq_len 2048. Faster,
with eight GPUs of 80 GB: llama3_1_8b_zero3.py.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="meta-llama/Llama-3.1-8B",
    dataset="HuggingFaceTB/finemath",
    subset="finemath-4plus",
    ds_config="zero3_cpu.json",
    activation_checkpointing=True,
    seq_len=4096,
    global_batch=64,
    lr=2e-5,
    warmup_steps=20,
    steps=500,
    eval_every=100,
    save_every=100,
)

if __name__ == "__main__":
    run(RECIPE)
