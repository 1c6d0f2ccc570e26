"""tools/lint.py: the exit code and the output.

Tests of the rules are in test_check.py.
"""

from pathlib import Path

from lint_command import lint

ROOT = Path(__file__).resolve().parents[2]


def test_a_clean_file_exits_0_and_shows_the_batch() -> None:
    code, text = lint(
        "ds_configs/zero3.json", "--recipe", "recipes/llama_nano_zero2.py", "--world", "2"
    )
    assert (
        code == 0
        and "zero3.json: clean" in text
        and "dp2: 16 rows of a step = 2 data-parallel * 4 micro_batch * 2 accumulation" in text
    )


def test_the_recipe_s_own_file_is_checked_when_none_is_named() -> None:
    code, text = lint("--recipe", "recipes/llama_nano_zero2.py", "--world", "3")
    assert (
        code == 1
        and "1 problem in recipes/llama_nano_zero2.py" in text
        and "Use global_batch 12 or 24" in text
    )
    assert ". The recipe fits 2 or 4 ranks without changes (DeepSpeed" in text
    code, text = lint("--recipe", "recipes/llama3_1_405b_zero1_pp16_tp8.py", "--world", "9")
    assert (
        code == 1
        and "or start a multiple of 128 ranks. The recipe fits 128 ranks without changes\n" in text
    )


def test_problems_of_the_json_and_the_recipe_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(
        'from recipekit import Recipe\nRECIPE = Recipe(model="org/model", steps=0)\n'
    )
    (tmp_path / "config.json").write_text('{"gradient_cliping": 1.0}')
    code, text = lint("config.json", "--recipe", "recipe.py", cwd=tmp_path)
    assert code == 1 and "2 problems" in text and "steps = 0" in text and "gradient_cliping" in text


def test_a_recipe_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("RECIPE = (")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "reads.py").write_text('open("prompts.txt")')
    (tmp_path / "looks.py").write_text('import os\nos.environ["NO_SUCH_NAME"]')
    for name, says in (
        ("absent.py", "the file does not exist on this host"),
        ("broken.py", "cannot be imported: SyntaxError"),
        ("empty.py", "sets no RECIPE"),
        (
            "reads.py",
            (
                "cannot be imported: FileNotFoundError: [Errno 2] No such file or directory:"
                " 'prompts.txt'"
            ),
        ),
        ("looks.py", "cannot be imported: KeyError: 'NO_SUCH_NAME'"),
    ):
        code, text = lint("--recipe", name, cwd=tmp_path)
        assert code == 1 and says in text


def test_a_mixture_that_is_written_wrong_is_a_problem(tmp_path: Path) -> None:
    """A start reports the same problem."""
    nano = (ROOT / "recipes" / "llama_nano_zero2.py").read_text()
    (tmp_path / "mixed.py").write_text(
        nano.replace('dataset="builtin"', 'dataset="a=builtin@x; b"')
    )
    code, text = lint("--recipe", "mixed.py", cwd=tmp_path)
    assert (
        code == 1
        and "2 problems" in text
        and "'a=builtin@x': is not a valid part of a mixture" in text
        and "'b': is not a valid part" in text
    ), text
    (tmp_path / "mixed.py").write_text(
        "from recipekit import Recipe\nRECIPE = Recipe(model='a/b', dataset=5)"
    )
    code, text = lint("--recipe", "mixed.py", cwd=tmp_path)
    assert code == 1 and "dataset = 5: must be of type str" in text, text


def test_a_json_of_anyone_is_told_what_deepspeed_would_do(tmp_path: Path) -> None:
    """The report contains one line with the outcome for each key, and the exit code is 1.

    If all settings work, the report contains only notes, and the exit code is 0.
    """
    file = tmp_path / "ds.json"
    file.write_text(
        '{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3,'
        ' "gradient_acumulation_steps": 2, "bf16": {"enabled": "auto"}}'
    )
    code, text = lint(str(file), "--json-only", "--world", "1")
    assert (
        code == 1
        and "3 problems" in text
        and "gradient_acumulation_steps = 2" in text
        and "(DeepSpeed 0.19.8 ignores it)" in text
    )
    assert (
        'bf16.enabled = "auto"' in text
        and "replaces it)" in text
        and "Use train_batch_size 9 or 12" in text
        and "fails on it)" in text
    )
    file.write_text(
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": true}, # of'
        " 2020\n}"
    )
    code, text = lint(str(file), "--json-only")
    assert code == 0 and "ds.json: clean" in text and text.count("note: ") == 3
    assert (
        'Write "zero_optimization.offload_optimizer": {"device": "cpu"} instead' in text
        and "Delete # of 2020" in text
    )
    code, text = lint(str(file))
    # All problems are reported together.
    assert (
        code == 1
        and text.count("is not strict JSON") == 2
        and 'Write "zero_optimization.offload_optimizer"' in text
    )


def test_of_a_stage_that_is_auto_only_the_stage_is_told(tmp_path: Path) -> None:
    """The other keys are valid for the stage that the author has in mind."""
    file = tmp_path / "ds.json"
    file.write_text(
        '{"zero_optimization": {"stage": "auto", "reduce_bucket_size": 500000000,'
        ' "allgather_bucket_size": 500000000, "overlap_comm": true}}'
    )
    code, text = lint(str(file))
    assert (
        code == 1
        and "1 problem " in text
        and 'zero_optimization.stage = "auto": "auto" is not supported, because nothing fills'
        " it in. Set it to 2"
        in text
    ), text


def test_the_layout_of_a_script_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    assert lint(str(file), "--json-only", "--world", "4")[0] == 0
    code, text = lint(str(file), "--world", "4", "--pp", "2")
    assert code == 1 and "ZeRO stages 2 and 3 cannot be combined with pipeline parallelism" in text


def test_the_shipped_files_are_clean_for_whoever_fills_them() -> None:
    """The files for recipe-only optimizers are exceptions.

    DeepSpeed has no 1-bit Adam. Under ZeRO its LAMB and Adafactor would be different algorithms,
    and its Muon lacks some of our options.
    """
    own = {"zero0_onebit": "has its own 1-bit Adam"} | {
        "zero1_lamb": "another algorithm",
        "zero2_adafactor": "another algorithm",
        "zero2_muon": "is an option of a recipe's Muon",
    }
    for file in sorted((ROOT / "ds_configs").glob("*.json")):
        for library in ("trainer", "accelerate"):
            code, text = lint(str(file), "--filled-by", library)
            assert bool(code) == (file.stem in own) and own.get(file.stem, "") in text, text
        code, text = lint(str(file), "--json-only")
        assert code == 1 and "--filled-by trainer" in text and "train_batch_size" in text


def test_a_ramp_is_shown_and_every_row_of_it_that_does_not_divide_is_named(tmp_path: Path) -> None:
    recipe = (
        "from recipekit import Recipe\nRECIPE = Recipe(model='x/y', global_batch=8, micro_batch=2,"
        " batch_ramp='11:16, 21:20, 31:36')\n"
    )
    (tmp_path / "recipe.py").write_text(recipe)
    code, text = lint("--recipe", "recipe.py", "--world", "2", cwd=tmp_path)
    assert (
        code == 0
        and "dp2: 8 rows of a step = 2 data-parallel * 2 micro_batch * 2 accumulation" in text
    ), text
    assert (
        "from step 31 on: 36 rows of a step = 2 data-parallel * 2 micro_batch * 9 accumulation"
        in text
    ), text
    code, text = lint("--recipe", "recipe.py", "--world", "4", cwd=tmp_path)
    assert (
        code == 1
        and "20 rows from step 21 on and 36 rows from step 31 on do not divide by 4"
        " data-parallel ranks * micro_batch 2 = 8"
        in text
    ), text


def test_a_wrong_command_line_exits_2() -> None:
    assert lint()[0] == 2 and lint("zero3.json", "--world", "0")[0] == 2
    assert (
        lint("zero3.json", "--pp", "0")[0] == 2 and lint("zero3.json", "--filled-by", "me")[0] == 2
    )
    assert lint("--recipe", "recipes/llama_nano_zero2.py", "--json-only")[0] == 2


def test_a_recipe_of_another_task_is_checked_by_the_facts_of_its_task(tmp_path: Path) -> None:
    """A degree that the task does not support is one problem, even if both recipe and JSON contain
    it.

    The error for a model that belongs to a different task suggests the correct task.
    """
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "config.json").write_text(
        '{"model_type": "vit", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}'
    )
    (tmp_path / "config.json").write_text(
        '{"zero_optimization": {"stage": 1}, "sequence_parallel_size": 2}'
    )
    recipe = (
        "from recipekit import Recipe\nRECIPE = Recipe(model='vit', task='image_classification',"
        " global_batch=8, seq_len=10**6{})\n"
    )
    (tmp_path / "recipe.py").write_text(recipe.format(""))
    code, text = lint("--recipe", "recipe.py", "--world", "2", cwd=tmp_path)
    assert code == 0 and "dp2: 8 rows of a step" in text, text
    (tmp_path / "recipe.py").write_text(recipe.format(", sp=2"))
    code, text = lint("config.json", "--recipe", "recipe.py", "--world", "2", cwd=tmp_path)
    assert (
        code == 1
        and "1 problem in" in text
        and "sp = 2: a picture is one short row, which is not cut over ranks. Use --sp 1" in text
    ), text
    (tmp_path / "recipe.py").write_text(recipe.format("").replace("image_classification", "sft"))
    code, text = lint("--recipe", "recipe.py", cwd=tmp_path)
    assert (
        code == 1
        and "does not support a vit as a causal language model" in text
        and "Use --task image_classification" in text
    ), text
