"""Names and links in a data folder: listed files, skipped files, and the line that counts files."""

import json
from pathlib import Path

import datasets
import pytest
from pool import ROOT
from recipekit.data.files import local_files
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe


def write(folder: Path, names: str, readme: str = "", page: str = "README.md") -> Path:
    """Write files of one row with the file's name as text, and a page that contains `configs`."""
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"text": name}) + "\n")
    if readme:
        (folder / page).write_text(
            f"---\nconfigs:\n{readme}---\n" if page == "README.md" else f"configs:\n{readme}",
            "utf-8-sig",
        )
    return folder


def ours(folder: Path, split: str = "train", subset: str = "") -> list[str]:
    files = local_files(str(folder), split=split, subset=subset) or []
    return sorted(
        json.loads(line)["text"] for file in files for line in file.read_text().splitlines()
    )


def theirs(folder: Path, subset: str = "") -> list[str]:
    return sorted(
        row["text"]
        for row in datasets.load_dataset(str(folder), subset or None, split="train", streaming=True)
    )


def plan(folder: Path, *flags: str) -> list[str]:
    recipe = Recipe(model="recipekit/llama-nano", init="random", tokenizer="bytes")
    notes = resolve_run(
        parse(
            recipe,
            ROOT / "recipes" / "llama_nano_zero2.py",
            ["--dataset", str(folder), *flags, "--dry_run"],
        )
    ).notes
    return [note.partition(": ")[2] for note in notes if note.startswith(f"--dataset {folder}")]


def refusal(folder: Path, *flags: str) -> str:
    with pytest.raises(ConfigError) as refused:
        plan(folder, *flags)
    (problem,) = refused.value.problems
    return str(problem).replace(str(folder), "D")


@pytest.mark.parametrize(
    ("names", "leaves_out"),
    [
        ("a.jsonl _b.jsonl _c/d.jsonl __e.jsonl", ""),
        ("a.jsonl .b.jsonl .c/d.jsonl __e/f.jsonl", "; leaves out 1 hidden file, 2 hidden folders"),
        (
            "_a/_b/c.jsonl _a/__b/c.jsonl _a/.b/c.jsonl ___d/e.jsonl",
            "; leaves out 3 hidden folders",
        ),
        ("_train/a.jsonl train/__b.jsonl train/.c.jsonl", "; leaves out 1 hidden file"),
        (
            "__train.jsonl _test_a.jsonl ._b.jsonl",
            "; leaves out 1 file of split test, 1 hidden file",
        ),
    ],
)
def test_names_that_are_left_out_are_those_of_datasets(
    tmp_path: Path, names: str, leaves_out: str
) -> None:
    folder = write(tmp_path / "D", names)
    assert ours(folder) == theirs(folder)
    (line,) = plan(folder)
    assert line.partition(" of split train")[2] == leaves_out


@pytest.mark.parametrize(
    ("path", "leaves_out"),
    [
        ("_u.jsonl", "2 hidden files, 2 hidden folders"),
        (".h.jsonl", "1 hidden file, 2 hidden folders"),
        ("'.*.jsonl'", "2 hidden folders"),
        (".i/*", "2 hidden files, 1 hidden folder"),
        ("'**/__s/x.jsonl'", "2 hidden files, 1 hidden folder"),
        ("'*'", "2 hidden files, 2 hidden folders"),
    ],
)
@pytest.mark.parametrize("page", ["README.md", ".huggingface.yaml"])
def test_a_hidden_file_that_a_page_names_is_read(
    tmp_path: Path, path: str, leaves_out: str, page: str
) -> None:
    """Both pages have a byte order mark, which `datasets` ignores."""
    folder = write(
        tmp_path / "D",
        "a.jsonl _u.jsonl .h.jsonl .k.jsonl .i/j.jsonl .i/.l.jsonl __s/x.jsonl",
        f"- config_name: one\n  data_files: {path}\n",
        page,
    )
    assert ours(folder) == theirs(folder) != []
    (line,) = plan(folder)
    assert line.partition("; leaves out ")[2].partition(", by their endings")[0] == leaves_out


def test_configs_of_huggingface_yaml_come_before_those_of_the_readme(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "D", "a.jsonl b.jsonl c.jsonl", "- config_name: one\n  data_files: a.jsonl\n"
    )
    assert ours(folder) == theirs(folder) == ["a.jsonl"]
    (folder / ".huggingface.yaml").write_text("license: mit\n")
    assert ours(folder) == theirs(folder) == ["a.jsonl"]
    (folder / ".huggingface.yaml").write_text(
        "configs:\n- config_name: two\n  data_files: [b.jsonl, c.jsonl]\n"
    )
    assert ours(folder) == ours(folder, subset="two") == theirs(folder) == ["b.jsonl", "c.jsonl"]
    assert "--subset one: is not in D, which has the subsets two" in refusal(
        folder, "--subset", "one"
    )
    (folder / ".huggingface.yaml").write_text(
        "configs:\n- config_name: two\n  data_files: lost.jsonl\n"
    )
    assert (
        ".huggingface.yaml names lost.jsonl for its split train, but that file does not exist"
        in refusal(folder)
    )
    for content in ("configs: [", "- 3\nconfigs", "configs:\n- 3\n"):
        (folder / ".huggingface.yaml").write_text(content)
        assert "--dataset D: .huggingface.yaml cannot be read: " in refusal(folder)


@pytest.mark.parametrize("base", ["lost", "a.jsonl", ".lost", "in/lost"])
def test_a_missing_data_dir_is_named(tmp_path: Path, base: str) -> None:
    folder = write(
        tmp_path / "D", "a.jsonl in/b.jsonl", f"- config_name: one\n  data_dir: {base}\n"
    )
    assert (
        f"README.md has the data_dir {base} for its subset one, but that folder does not exist."
        " Download it" in refusal(folder)
    )


def test_a_hidden_data_dir_is_read(tmp_path: Path) -> None:
    for base in (".in", "__in", "a/.in"):
        folder = write(
            tmp_path / base.replace("/", "-"),
            f"a.jsonl {base}/b.jsonl {base}/.c.jsonl",
            f"- config_name: one\n  data_dir: {base}\n",
        )
        assert ours(folder) == theirs(folder) == [f"{base}/b.jsonl"]


# Links
# --------------------------------------------------------------------------------------------------


def test_a_folder_met_twice_is_read_twice_and_a_circle_once(tmp_path: Path) -> None:
    """A copy that contains folders instead of links would contain the rows twice.

    A file with two links to it is also read twice.
    """
    folder = write(tmp_path / "D", "real/a.jsonl")
    (folder / "one").symlink_to("real")
    (folder / "two").symlink_to(folder / "real")
    (folder / "real" / "self").symlink_to(".")
    (folder / "real" / "top").symlink_to("../..")
    assert ours(folder) == ["real/a.jsonl"] * 3
    (line,) = plan(folder)
    assert line == "reads 3 files of split train; leaves out 6 circular links"


@pytest.mark.parametrize(
    "linked",
    [
        {"train": "x"},
        {"test": "x"},
        {"train": "x", "test": "x"},
        {"train": "../disk/x", "test": "../disk/x"},
    ],
)
def test_splits_that_are_links_are_read(tmp_path: Path, linked: dict[str, str]) -> None:
    folder = write(tmp_path / "D", "train/a.jsonl test/a.jsonl")
    for split, target in linked.items():
        write(folder / target, "a.jsonl")
        for file in (folder / split).iterdir():
            file.unlink()
        (folder / split).rmdir()
        (folder / split).symlink_to(target)
    for split in ("train", "test"):
        assert len(ours(folder, split)) == 1


@pytest.mark.parametrize(
    "linked", [{"test": "train"}, {"train": "test"}, {"train": "../one", "test": "../one"}]
)
def test_saved_splits_may_be_links_to_one_folder(tmp_path: Path, linked: dict[str, str]) -> None:
    rows = datasets.Dataset.from_dict({"text": ["x", "y"]})
    rows.save_to_disk(tmp_path / "one")
    folder = tmp_path / "D"
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(folder)
    for split, target in linked.items():
        (folder / split).rename(tmp_path / f"old-{split}")
        (folder / split).symlink_to(target)
    loaded = datasets.load_from_disk(str(folder))
    assert isinstance(loaded, datasets.DatasetDict)
    for split, found in loaded.items():
        split = str(split)
        (file,) = local_files(str(folder), split=split) or []
        assert datasets.Dataset.from_file(str(file))["text"][:] == found["text"][:]
        assert file.parent.name == split


@pytest.mark.parametrize(
    "out", ["disk/in/run", "disk/in", "disk", "files", "files/a.jsonl/run", "second/run"]
)
def test_a_run_folder_among_linked_data_is_refused(tmp_path: Path, out: str) -> None:
    folder = write(tmp_path / "D", "x.jsonl in/y.jsonl")
    write(tmp_path / "disk" / "in", "a.jsonl")
    write(tmp_path / "files", "a.jsonl")
    write(tmp_path / "real", "a.jsonl")
    (tmp_path / "second").symlink_to("real")
    (folder / "in" / "more").symlink_to(tmp_path / "disk" / "in")
    (folder / "in" / "again").symlink_to("../../second")
    (folder / "z.jsonl").symlink_to("../files/a.jsonl")
    with pytest.raises(ConfigError, match=r"out = .*(link leads|Not a directory)"):
        plan(folder, "--out", str(tmp_path / out))
    for free in ("disk/run", "files/run", "run"):
        plan(folder, "--out", str(tmp_path / free))


# Saved data sets
# --------------------------------------------------------------------------------------------------


def test_a_saved_data_set_without_rows_is_named(tmp_path: Path) -> None:
    empty, rows = (
        datasets.Dataset.from_dict({"text": []}),
        datasets.Dataset.from_dict({"text": ["x"]}),
    )
    empty.save_to_disk(tmp_path / "one")
    assert (
        refusal(tmp_path / "one")
        == "--dataset D: its split train was saved without rows. Use other data"
    )
    datasets.DatasetDict({"train": empty, "test": rows, "more": rows}).save_to_disk(
        tmp_path / "two"
    )
    assert (
        refusal(tmp_path / "two")
        == "--dataset D: its split train was saved without rows. Use --split test or --split more,"
        " or use other data"
    )
    assert refusal(tmp_path / "two", "--split", "dev").endswith(
        "Use --split test, or name the files, for example --dataset 'D/**/*.arrow'"
    )
    datasets.DatasetDict({"train": empty, "test": empty}).save_to_disk(tmp_path / "three")
    assert (
        refusal(tmp_path / "three")
        == "--dataset D: its split train was saved without rows. Use other data"
    )


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"_data_files": [',
        "[]",
        "{}",
        '{"_data_files": [{"filename": null}]}',
        '{"_data_files": [{"filename": 3}]}',
    ],
)
def test_a_damaged_state_is_named(tmp_path: Path, content: str) -> None:
    rows = datasets.Dataset.from_dict({"text": ["x"]})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "D")
    for state in ("train/state.json", "test/state.json"):
        whole = (tmp_path / "D" / state).read_text()
        (tmp_path / "D" / state).write_text(content)
        (tmp_path / "D" / "notes.txt").write_text("a text")
        assert (
            f"--dataset D: D/{state} is damaged: it must name the Arrow files in its folder. Copy"
            " the whole folder again" == refusal(tmp_path / "D")
        )
        (tmp_path / "D" / state).write_text(whole)
    (tmp_path / "D" / "dataset_dict.json").write_text(content)
    assert (
        refusal(tmp_path / "D")
        == "--dataset D: dataset_dict.json is damaged: it must hold a list of splits. Copy the"
        " whole folder again"
    )


@pytest.mark.parametrize("split", ['["a"]', "3", '{"a": 1}', '""'])
def test_an_odd_split_of_a_state_is_none(tmp_path: Path, split: str) -> None:
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(tmp_path / "D")
    state = (tmp_path / "D" / "state.json").read_text()
    (tmp_path / "D" / "state.json").write_text(
        state.replace('"_split": null', f'"_split": {split}')
    )
    assert plan(tmp_path / "D") == ["reads 1 file of split train"]


# Addresses
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (
            "a.jsonl,https://h.org/b.jsonl",
            "--dataset a.jsonl: a path cannot be combined with addresses",
        ),
        (
            "https://h.org/b.jsonl,a.jsonl",
            "--dataset a.jsonl: a path cannot be combined with addresses",
        ),
        (
            "file:///tmp/a.jsonl",
            "only https:// and http:// addresses can be read. Give the path, /tmp/a.jsonl",
        ),
        (
            "s3://bucket/a.jsonl?key=1",
            (
                "s3://bucket/a.jsonl: only https:// and http:// addresses can be read. Mount it or"
                " copy it"
            ),
        ),
        (
            "https://h.org/a.jsonl,gs://bucket/a.jsonl",
            "--dataset gs://bucket/a.jsonl: only https:// and http:// addresses",
        ),
        (
            "hf://datasets/ORG/NAME/a.jsonl",
            "only https:// and http:// addresses can be read. Give the hub id, ORG/NAME",
        ),
    ],
)
def test_addresses_that_are_not_read_are_named(dataset: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        local_files(dataset)
    assert says in str(refused.value)
