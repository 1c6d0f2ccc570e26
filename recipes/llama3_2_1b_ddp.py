"""Llama 3.2 1B trained on more German with torch's DDP: every GPU holds all states, no DeepSpeed
engine.

    deepspeed --num_gpus 4 recipes/llama3_2_1b_ddp.py

Model, data and numbers are the same as in llama3_2_1b_zero3. tools/bench/bench_baselines.md helps
you choose between DDP, FSDP2 and ZeRO.
Needs: 4 x 40 GB GPUs (18.4 GiB of states each; activations and logits of one row add about 11).
Gated model: see recipes/README.md. Measured: not measured. Less memory: --engine fsdp2
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="meta-llama/Llama-3.2-1B",
    dataset="HuggingFaceFW/fineweb-2",
    subset="deu_Latn",
    engine="ddp",
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
