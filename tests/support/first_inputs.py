"""Sixty inputs for a first run: valid inputs, and mistakes from newcomers' logs and from public
reports.
"""

import gzip
import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

NUMBERS = (
    "--seq_len 64 --global_batch 2 --micro_batch 1 --steps 1 --warmup_steps 0 --eval_every 0"
    " --no-wandb --no-export --save_every 0"
)
FOX = [f"the fox number {number} ran over a hill and did not come back" for number in range(40)]
TEXTS = [{"text": text} for text in FOX]
CHATS = [
    {"messages": [{"role": "user", "content": "where?"}, {"role": "assistant", "content": text}]}
    for text in FOX
]
ALPACA = [{"instruction": "where?", "input": "", "output": text} for text in FOX]
PAIRS = [{"prompt": "where?", "chosen": text, "rejected": text[::-1]} for text in FOX]


class Input(NamedTuple):
    """The words of a command, and the beginning of its error message ("" if the command trains).

    `make` writes files into the current folder.
    """

    words: str
    says: str = ""
    make: Callable[[], Any] = lambda: None


def lines(name: str, rows: list[Any]) -> Callable[[], Any]:
    return lambda: Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def content(name: str, of: bytes | str) -> Callable[[], Any]:
    return lambda: Path(name).write_bytes(of.encode() if isinstance(of, str) else of)


def model(change: Callable[[Path], Any] | None = None, **config: Any) -> Callable[[], Any]:
    """Return a function that copies the model to ./m, changes its config.json, and applies
    `change`.
    """

    def make() -> None:
        shutil.copytree("base", "m")
        path = Path("m/config.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        if change:
            change(Path("m"))

    return make


def rewritten(name: str, **values: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        (folder / name).write_text(
            json.dumps({key: value for key, value in (found | values).items() if value is not None})
        )

    return change


def halved(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def parquet() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": FOX}), "d.parquet")


def folder_of_texts() -> None:
    Path("d").mkdir()
    for number, text in enumerate(FOX[:3]):
        Path(f"d/{number}.txt").write_text(text * 20)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 10\n"
GOOD = {
    "rows of text": Input(""),
    "a book": Input(
        "--dataset book.txt --eval_every 1", "", content("book.txt", " ".join(FOX) * 20)
    ),
    "two files": Input("--dataset docs.jsonl,d.jsonl", "", lines("d.jsonl", TEXTS)),
    "a folder of texts": Input("--dataset d", "", folder_of_texts),
    "parquet": Input("--dataset d.parquet", "", parquet),
    "gzip": Input(
        "--dataset d.jsonl.gz",
        "",
        content(
            "d.jsonl.gz", gzip.compress("".join(f"{json.dumps(row)}\n" for row in TEXTS).encode())
        ),
    ),
    "a third of the rows null": Input(
        "--dataset d.jsonl",
        "",
        lines("d.jsonl", [{"text": None} if n % 3 == 0 else row for n, row in enumerate(TEXTS)]),
    ),
    "a broken row left out": Input(
        "--dataset d.jsonl --bad_rows skip", "", lines("d.jsonl", [*TEXTS, {"text": 3}])
    ),
    "another column": Input(
        "--dataset d.jsonl --text_field body",
        "",
        lines("d.jsonl", [{"body": text} for text in FOX]),
    ),
    "chats": Input("--task sft --dataset d.jsonl", "", lines("d.jsonl", CHATS)),
    "alpaca": Input("--task sft --dataset d.jsonl", "", lines("d.jsonl", ALPACA)),
    "pairs": Input("--task preference --dataset d.jsonl", "", lines("d.jsonl", PAIRS)),
    "bytes": Input("--tokenizer bytes --init random"),
    "a trial": Input("--tiny --dataset docs.jsonl --seq_len 64"),
    "ddp": Input("--engine ddp"),
    "another model type beside": Input(
        "--model ./m", "", model(lambda folder: (folder / "adapter_config.json").write_text("{}"))
    ),
}
MODELS = {
    "no such folder": Input("--model ./gone", "model = ./gone: is not a folder on this machine"),
    "a mistyped folder": Input(
        "--model models/llama",
        "model = models/llama: the folder does not exist, the model is not in the cache",
    ),
    "a mistyped name": Input(
        "--model llama-32-1b",
        "model = llama-32-1b: the folder does not exist, the model is not in the cache",
    ),
    "a file": Input("--model docs.jsonl", "model = docs.jsonl: is not a folder on this machine"),
    "no config.json": Input(
        "--model ./m",
        "model = ./m: the folder contains no config.json",
        model(lambda folder: (folder / "config.json").unlink()),
    ),
    "a cut config.json": Input(
        "--model ./m",
        "m/config.json: is not JSON",
        model(lambda folder: (folder / "config.json").write_text('{"model_type": ')),
    ),
    "an unknown type": Input(
        "--model ./m",
        f"model = ./m: transformers {version('transformers')} does not support a lama"
        " as a causal language model",
        model(model_type="lama"),
    ),
    "wider": Input(
        "--model ./m",
        "model = ./m: model.embed_tokens.weight is [1024, 32] in its files but [1024, 64] in its"
        " config.json",
        model(hidden_size=64),
    ),
    "more layers": Input(
        "--model ./m",
        "model = ./m: its files contain 2 layers in model.layers, but its config.json specifies 3",
        model(num_hidden_layers=3),
    ),
    "fewer layers": Input(
        "--model ./m",
        "model = ./m: its files contain 2 layers in model.layers, but its config.json specifies 1",
        model(num_hidden_layers=1),
    ),
    "no weights": Input(
        "--model ./m",
        "m: contains no .safetensors file",
        model(lambda folder: (folder / "model.safetensors").unlink()),
    ),
    "weights of torch": Input(
        "--model ./m",
        "m: contains pytorch_model.bin, which is not supported",
        model(lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin")),
    ),
    "cut weights": Input("--model ./m", "m/model.safetensors: has ", model(halved)),
    "a pointer": Input(
        "--model ./m",
        "m/model.safetensors: is a Git LFS pointer",
        model(lambda folder: (folder / "model.safetensors").write_text(POINTER)),
    ),
    "a cut tokenizer": Input(
        "--model ./m",
        "m/tokenizer.json: is not JSON",
        model(lambda folder: (folder / "tokenizer.json").write_text('{"model": {')),
    ),
    "an empty tokenizer": Input(
        "--model ./m",
        "m/tokenizer.json: is empty (0 bytes)",
        model(lambda folder: (folder / "tokenizer.json").write_text("")),
    ),
    "a tokenizer of another kind": Input(
        "--model ./m",
        "--model m: its tokenizer's files cannot be read",
        model(rewritten("tokenizer.json", model={"type": "None"})),
    ),
    "no tokenizer": Input(
        "--model ./m",
        "--model m: the folder contains no tokenizer",
        model(lambda folder: [path.unlink() for path in folder.glob("tokenizer*")]),
    ),
    "no end of text": Input(
        "--model ./m",
        "--tokenizer: has no end-of-text token",
        model(rewritten("tokenizer_config.json", eos_token=None)),
    ),
    "no chat template": Input(
        "--model ./m --task sft --dataset d.jsonl",
        "--tokenizer: has no chat template",
        lambda: (model(no_template)(), lines("d.jsonl", CHATS)()),
    ),
    "an empty generation config": Input(
        "--model ./m",
        "m/generation_config.json: is empty (0 bytes)",
        model(lambda folder: (folder / "generation_config.json").write_text("")),
    ),
}


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


DATA = {
    "no such file": Input("--dataset gone.jsonl", "--dataset gone.jsonl: the file does not exist"),
    "an empty text": Input("--dataset d.txt", "--dataset d.txt: ", content("d.txt", "")),
    "rows of no text": Input(
        "--dataset d.jsonl",
        "--dataset d.jsonl: contains no document",
        lines("d.jsonl", [{"text": ""}, {"text": None}]),
    ),
    "an empty file": Input("--dataset d.jsonl", "d.jsonl: is empty", content("d.jsonl", "")),
    "another column, not named": Input(
        "--dataset d.jsonl",
        "d.jsonl, row 1: has no column 'text'",
        lines("d.jsonl", [{"body": "a"}]),
    ),
    "a list": Input(
        "--dataset d.json",
        "d.json: must have one JSON object per line, but is a single JSON list",
        content("d.json", json.dumps(TEXTS)),
    ),
    "rows in a key": Input(
        "--dataset d.json",
        "d.json: must have one JSON object per line, but is a single object with its rows in"
        " 'data'",
        content("d.json", json.dumps({"data": TEXTS})),
    ),
    "latin 1": Input(
        "--dataset d.txt",
        "d.txt, row 1: is not UTF-8",
        content("d.txt", "über".encode("latin1") * 99),
    ),
    "gzip without the ending": Input(
        "--dataset d.jsonl", "", content("d.jsonl", gzip.compress(b'{"text": "a"}\n'))
    ),
    "text named .gz": Input("--dataset d.jsonl.gz", "", content("d.jsonl.gz", '{"text": "a"}\n')),
    "a number in row 30": Input(
        "--dataset d.jsonl",
        "d.jsonl, row 30: ",
        lines("d.jsonl", [*TEXTS[:29], {"text": 3}, *TEXTS]),
    ),
    "single quotes in row 30": Input(
        "--dataset d.jsonl",
        "d.jsonl, row 30: ",
        content(
            "d.jsonl",
            "".join(f"{json.dumps(row) if n != 29 else row}\n" for n, row in enumerate(TEXTS)),
        ),
    ),
    "chats for a task of texts": Input(
        "--dataset d.jsonl", "d.jsonl, row 1: ", lines("d.jsonl", CHATS)
    ),
    "texts for a task of chats": Input("--task sft", "docs.jsonl, row 1: "),
    "an unknown role": Input(
        "--task sft --dataset d.jsonl",
        "d.jsonl, row ",
        lines(
            "d.jsonl", [{"messages": [{"role": "user", "content": "a"}, {"rule": "assistant"}]}] * 9
        ),
    ),
    "one row to hold out": Input(
        "--dataset d.jsonl --eval_every 1",
        "--dataset, d.jsonl, row 1: is the only document",
        lines("d.jsonl", [{"text": "a fox"}]),
    ),
    "tokens of no embedding": Input(
        "--tokenizer ./base --model ./m --init random", "docs.jsonl, row ", model(vocab_size=100)
    ),
}
FLAGS = {
    "a row of one token": Input("--seq_len 1", "seq_len = 1: "),
    "a batch that does not divide": Input(
        "--global_batch 3 --micro_batch 2",
        "global_batch (train_batch_size) = 3: is not divisible by",
    ),
    "tp beside one rank": Input("--tp 3", "tp(3) = 3: does not divide the 1 rank"),
    "a seed too long": Input("--seed 99999999999999999999", "seed = 99999999999999999999: "),
    "the model's folder": Input("--out base", "out = base: is the folder of --model ./base"),
    "no disk": Input("--out /proc/run", "out = /proc/run: cannot be written"),
    "no run to resume": Input(
        "--resume gone", "resume = gone: must be a run folder or one of its step folders"
    ),
    "two precisions": Input(
        "--deepspeed_config d.json",
        "bf16.enabled = true: bf16 and fp16 cannot both be enabled",
        content(
            "d.json",
            json.dumps(
                {
                    "zero_optimization": {"stage": 1},
                    "bf16": {"enabled": True},
                    "fp16": {"enabled": True},
                }
            ),
        ),
    ),
    "a trailing comma": Input(
        "--deepspeed_config d.json",
        "d.json, line 1, column 35: is not strict JSON",
        content("d.json", '{"zero_optimization": {"stage": 2},}'),
    ),
}
INPUTS = GOOD | MODELS | DATA | FLAGS
