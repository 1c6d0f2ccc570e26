"""Qwen3-0.6B fine-tuned on chats with ZeRO-2: loss on the assistant's answers only, several chats
packed in a row.

    deepspeed --num_gpus 2 recipes/qwen3_0_6b_sft_zero2.py

Every parameter is trained. For your own chats give --dataset chats.jsonl, with one chat on each
line: {"messages": [{"role": "user", "content": "..."}, ...]}.
Needs: 2 x 16 GB GPUs (5.6 GiB of states each; checkpointed activations of one row add 0.5,
predicted). Measured: not measured. Less memory: qwen3_0_6b_lora_zero3.py trains an adapter instead.
"""

from recipekit import Recipe, run

RECIPE = Recipe(
    model="Qwen/Qwen3-0.6B",
    task="sft",
    dataset="HuggingFaceH4/ultrachat_200k",
    split="train_sft",
    ds_config="zero2.json",
    activation_checkpointing=True,
    seq_len=4096,
    global_batch=64,
    lr=2e-5,
    warmup_steps=30,
    steps=900,
    weight_decay=0.0,
    eval_every=100,
    save_every=250,
)

if __name__ == "__main__":
    run(RECIPE)
