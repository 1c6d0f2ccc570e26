"""Texts of DeepSpeed files as scripts and editors write them: Hjson, templates, truncated and
merged files.
"""

from ds_json import Case

OPTIMIZER = '"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}'
TAIL = (
    f'"train_micro_batch_size_per_gpu": 2, {OPTIMIZER}, "zero_optimization": {{"stage": 1,'
    ' "reduce_bucket_size": 1000000}'
)

TEXTS = {
    "byte order mark": Case("Windows' editors", "\ufeff{" + TAIL + "}"),
    "Windows' lines": Case("Windows' editors", "{\r\n" + TAIL.replace(", ", ",\r\n") + "\r\n}\r\n"),
    "tabs and blank lines": Case(
        "editors", "\n\n{\t" + TAIL.replace(", ", ",\n\n\t") + "\n}\n\n\n"
    ),
    "block comment": Case("files with notes in them", "{ /* two rows\n a GPU */ " + TAIL + "}"),
    "comment after the end": Case(
        "files with notes in them", "{" + TAIL + "}\n// 2024-05-01: works\n"
    ),
    "comment with a bracket": Case("files with notes in them", "{\n# {old: 1}\n" + TAIL + "}"),
    "keys without quotes": Case(
        "Hjson",
        "{\n  train_micro_batch_size_per_gpu: 2\n  optimizer: {type: AdamW\n params: {lr: 0.001}}\n"
        "  zero_optimization: {stage: 1\n reduce_bucket_size: 1000000}\n}",
    ),
    "single quotes": Case("printed Python", "{" + TAIL.replace('"', "'") + "}"),
    "True of Python": Case("printed Python", "{" + TAIL + ',\n"bf16": {\n"enabled": True\n}}'),
    "False of Python": Case("printed Python", "{" + TAIL + ',\n"fp16": {\n"enabled": False\n}}'),
    "None of Python": Case("printed Python", "{" + TAIL + ',\n"communication_data_type": None\n}'),
    "None for a number": Case("printed Python", "{" + TAIL + ', "gradient_clipping": None}'),
    "no comma between lines": Case("translated docs", "{\n" + TAIL.replace(", ", "\n") + "\n}"),
    "no comma in one line": Case("translated docs", "{" + TAIL.replace(", ", " ", 1) + "}"),
    "comma of another alphabet": Case("translated docs", "{" + TAIL.replace(", ", "\u060c ") + "}"),
    "curly quotes": Case("word processors", "{" + TAIL.replace('"', "\u201d") + "}"),
    "two commas": Case("hand-written files", "{" + TAIL.replace(", ", ",, ", 1) + "}"),
    "never closed": Case("cut copies", "{" + TAIL),
    "a bracket too many": Case("merged copies", "{" + TAIL + "}}"),
    "two files in one": Case("merged copies", "{" + TAIL + "}\n{" + TAIL + "}"),
    "no brackets": Case("Hjson", TAIL.replace(", ", "\n")),
    "empty": Case("failed downloads", ""),
    "blanks": Case("failed downloads", "  \n\n"),
    "a list": Case("wrong files", '[{"stage": 2}]'),
    "a word": Case("wrong files", '"ds_config.json"'),
    "a number": Case("wrong files", "2"),
    "null": Case("wrong files", "null"),
    "a page": Case("failed downloads", "<!DOCTYPE html><html><body>404</body></html>"),
    "YAML": Case(
        "wrong files", "train_micro_batch_size_per_gpu: 2\nzero_optimization:\n  stage: 2\n"
    ),
    "a pointer to the file": Case(
        "clones without LFS",
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1024\n",
    ),
    "shell's variables": Case(
        "Megatron's scripts",
        '{"train_batch_size": $GLOBAL_BATCH, "train_micro_batch_size_per_gpu": $MICRO_BATCH,'
        ' "steps_per_print": 1}',
    ),
    "a template's words": Case(
        "Megatron's templates",
        '{\n "train_batch_size" : CONFIG_BATCH_SIZE,\n "train_micro_batch_size_per_gpu":'
        ' CONFIG_MBSIZE,\n "steps_per_print": LOG_INTERVAL\n}',
    ),
    "a template's switch": Case(
        "Megatron's templates", "{" + TAIL + ',\n "fp16": {\n "enabled": CONFIG_FP16_ENABLED\n }\n}'
    ),
    "shell's default": Case("shell scripts", "{" + TAIL + ', "bf16": {"enabled": ${BF16:-true}}}'),
    "Jinja": Case("generated files", '{"train_batch_size": {{ batch }}, ' + OPTIMIZER + "}"),
    "three dots": Case("posts", "{\n ...\n " + TAIL + "\n ...\n}"),
    "infinite prints": Case("transformers' logs", "{" + TAIL + ', "steps_per_print": Infinity}'),
    "inf prints": Case("transformers' logs", "{" + TAIL + ',\n "steps_per_print": inf\n}'),
    "NaN": Case("generated files", "{" + TAIL + ', "gradient_clipping": NaN}'),
    "5.000000e+08": Case("transformers' logs", "{" + TAIL.replace("1000000", "1.000000e+06") + "}"),
    "1_000_000": Case("printed Python", "{" + TAIL.replace("1000000", "1_000_000") + "}"),
    "a point and no digit": Case("printed Python", "{" + TAIL + ', "gradient_clipping": 1.}'),
    "no digit and a point": Case("hand-written files", "{" + TAIL.replace("0.001", ".001") + "}"),
    "a plus": Case("hand-written files", "{" + TAIL + ', "gradient_clipping": +1.0}'),
    "hexadecimal": Case("hand-written files", "{" + TAIL.replace("1000000", "0xF4240") + "}"),
    "a product": Case("hand-written files", "{" + TAIL.replace("1000000", "1000*1000\n") + "}"),
    "leading zero": Case("hand-written files", "{" + TAIL.replace('gpu": 2', 'gpu": 02') + "}"),
    "thousands": Case("spreadsheets", "{" + TAIL.replace("1000000", "1,000,000") + "}"),
    "optimizer twice": Case("merged files", "{" + TAIL + ", " + OPTIMIZER + "}"),
    "a key twice in a block": Case(
        "merged files", "{" + TAIL + ', "bf16": {"enabled": false, "enabled": true}}'
    ),
    "conflict of a merge": Case(
        "merged files", "{\n<<<<<<< HEAD\n" + TAIL + "\n=======\n>>>>>>> main\n}"
    ),
    "three quotes": Case("Hjson", "{" + TAIL + ", \"log_level\": '''error'''}"),
    "escapes": Case("generated files", "{" + TAIL.replace('"lr"', '"\\u006cr"') + "}"),
    "a key with an accent": Case("notes", "{" + TAIL + ', "r\u00e9glage": "essai"}'),
    "a zero byte": Case("broken disks", "{" + TAIL + "}\0"),
}
