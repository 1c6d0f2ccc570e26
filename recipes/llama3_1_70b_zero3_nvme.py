"""Full training of Llama 3.1 70B on one host of eight GPUs: ZeRO-3 with parameters and optimizer on
NVMe drives.

    deepspeed --num_gpus 8 recipes/llama3_1_70b_zero3_nvme.py --out /local_nvme/llama3_1_70b

The swap files are in OUT/nvme_swap, so put OUT on a fast local drive. To swap elsewhere, set
`nvme_path` in a copy of ds_configs/zero3_nvme.json. DeepSpeed compiles its asynchronous I/O, which
requires Debian's libaio-dev.
Needs: 8 x 40 GB GPUs, 512 GB of host memory, 4 TB NVMe (201.7 GiB of states for each GPU).
Gated model: see recipes/README.md. Measured: not measured. Of the states, 147.8 GiB are on NVMe and
53.7 page-locked on the host, 430 GiB for all eight GPUs. A checkpoint takes 1 TB, and two exist
while one is written. torch below 2.13 rounds page-locked memory up to powers of two and needs 700
GiB. Faster, with 32 GPUs of 80 GB: --deepspeed_config zero3.json.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="meta-llama/Llama-3.1-70B",
    dataset="HuggingFaceTB/finemath",
    subset="finemath-4plus",
    ds_config="zero3_nvme.json",
    activation_checkpointing=True,
    seq_len=4096,
    global_batch=64,
    lr=1e-5,
    warmup_steps=10,
    steps=200,
    eval_every=50,
    eval_rows=32,
    save_every=50,
    keep=1,
)

if __name__ == "__main__":
    run(RECIPE)
