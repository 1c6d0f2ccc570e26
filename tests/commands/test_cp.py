"""recipekit/commands/cp.py: the copy equals the shipped file, and no file is overwritten."""

from pathlib import Path

import pytest
from pool import ROOT
from recipekit.__main__ import main
from recipekit.spec.command import recipe_of
from recipekit.spec.shipped import recipes, strategies


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "source", "target"),
    [
        ("llama_nano_zero2 mine.py", "recipes/llama_nano_zero2.py", "mine.py"),
        ("qwen3_0_6b_sft_zero2", "recipes/qwen3_0_6b_sft_zero2.py", "qwen3_0_6b_sft_zero2.py"),
        ("llama3_2_1b_ddp.py sub", "recipes/llama3_2_1b_ddp.py", "sub/llama3_2_1b_ddp.py"),
        ("zero2.json", "ds_configs/zero2.json", "zero2.json"),
        ("zero3_cpu sub/mine.json", "ds_configs/zero3_cpu.json", "sub/mine.json"),
    ],
)
def test_a_copy_has_the_bytes_of_the_shipped_file(
    words: str, source: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sub").mkdir()
    assert main(["cp", *words.split()]) == 0
    assert Path(target).read_bytes() == (ROOT / source).read_bytes()
    assert capsys.readouterr().out.startswith(
        f"wrote {target}. Try: recipekit {'run' if target.endswith('.py') else 'lint'} {target}"
    )
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / target]
    if target.endswith(".py"):
        assert recipe_of(Path(target)) == recipe_of(ROOT / source)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "llama_nano_zero mine.py",
            (
                "recipekit cp llama_nano_zero: no recipe or JSON has this name. Did you mean"
                " llama_nano_zero2?"
            ),
        ),
        (
            "zero2cpu.json",
            (
                "recipekit cp zero2cpu.json: no recipe or JSON has this name. Did you mean"
                " zero2_cpu.json or zero3_cpu.json?"
            ),
        ),
        (
            "recipes/llama3_1_8b_zero3.py",
            "no recipe or JSON has this name. Did you mean llama3_1_8b_zero3 or ",
        ),
        ("tulip", "recipekit cp tulip: no recipe or JSON has this name. A JSON is zero0.json, "),
        (
            "llama_nano_zero2 there.py",
            (
                "there.py exists, and a copy never overwrites a file. Give another name, or remove"
                " that file"
            ),
        ),
        (
            "llama_nano_zero2 dangling.py",
            (
                "dangling.py exists, and a copy never overwrites a file. Give another name, or"
                " remove that file"
            ),
        ),
        (
            "zero2.json folder",
            (
                "folder/zero2.json exists, and a copy never overwrites a file. Give another name,"
                " or remove that file"
            ),
        ),
        (
            "llama_nano_zero2 mine.json",
            "a copy of llama_nano_zero2.py must end in .py. Write mine.py",
        ),
        (
            "llama_nano_zero2 torch.py",
            "torch.py would hide the library torch from Python. Write my_torch.py",
        ),
        (
            "llama_nano_zero2 folder/datasets.py",
            "datasets.py would hide the library datasets from Python. Write my_datasets.py",
        ),
        (
            "smollm2_135m_zero1 random.py",
            "random.py would hide the library random from Python. Write my_random.py",
        ),
        (
            "smollm2_135m_zero1 recipekit.py",
            "recipekit.py would hide the library recipekit from Python. Write my_recipekit.py",
        ),
        ("zero2 mine", "a copy of zero2.json must end in .json. Write mine.json"),
        ("zero2 absent/mine.json", "the folder absent does not exist. Run: mkdir -p absent"),
        (
            "zero2 there.py/mine.json",
            "cannot be written: Not a directory. Choose a folder that you can write to",
        ),
    ],
)
def test_what_cannot_be_copied_is_refused_in_one_line(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("there.py").write_text("mine")
    Path("dangling.py").symlink_to("nowhere.py")
    Path("folder").mkdir()
    Path("folder/zero2.json").write_text("mine, too")
    before = sorted(Path().rglob("*"))
    assert main(["cp", *words.split()]) == 1
    out, (line,) = (captured := capsys.readouterr()).out, captured.err.splitlines()
    assert not out and told in line and line.startswith("recipekit cp ")
    assert (
        sorted(Path().rglob("*")) == before
        and Path("there.py").read_text() == "mine"
        and Path("folder/zero2.json").read_text() == "mine, too"
    )


def test_every_shipped_file_can_be_copied_by_its_name() -> None:
    for name in (*recipes(), *strategies()):
        assert main(["cp", name]) == 0
    assert len(list(Path().iterdir())) == len(list((ROOT / "recipes").glob("*.py"))) + len(
        list((ROOT / "ds_configs").glob("*.json"))
    )
