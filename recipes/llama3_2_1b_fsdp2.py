"""Llama 3.2 1B trained on more German with torch's FSDP2 (`fully_shard`): all states are sharded,
no DeepSpeed engine.

    deepspeed --num_gpus 4 recipes/llama3_2_1b_fsdp2.py

Model, data and numbers are the same as in llama3_2_1b_zero3. tools/bench/bench_baselines.md helps
you choose between DDP, FSDP2 and ZeRO.
Needs: 4 x 24 GB GPUs (4.6 GiB of states each; activations and logits of one row add about 11).
Gated model: see recipes/README.md. Measured: not measured. More memory: --micro_batch 4 on 80 GB.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="meta-llama/Llama-3.2-1B",
    dataset="HuggingFaceFW/fineweb-2",
    subset="deu_Latn",
    engine="fsdp2",
    seq_len=2048,
    global_batch=256,
    lr=5e-5,
    warmup_steps=100,
    steps=4000,
    eval_every=250,
    save_every=500,
)

if __name__ == "__main__":
    run(RECIPE)
