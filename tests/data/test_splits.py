"""Local folders are read in the same way as by `datasets.load_dataset(FOLDER)`.

A split and a subset must contain the same rows; otherwise the folder is rejected with a one-line
error.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import rows
from PIL import Image
from pool import ROOT
from recipekit.data.files import folder_classes, local_files
from recipekit.data.mixture import Domain, domains_of
from recipekit.data.request import Request
from recipekit.data.sources import open_source
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe

CLONE = (
    "data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet"
    " data/test-00000-of-00001.parquet"
)
TWO = (
    "- config_name: {}\n  data_files:\n  - split: train\n    path: {}\n  - split: test\n    path:"
    " {}\n"
)


def write(folder: Path, names: str, readme: str = "") -> None:
    """Write files of three rows, each with the file's name and a number as text, and a README.

    The README contains `configs`.
    """
    for name in names.split():
        path, rows = folder / name, [f"{name} {number}" for number in range(3)]
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.table({"text": rows}), path)
        elif name.endswith((".jsonl", ".json")):
            path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        else:
            path.write_text("\n".join(rows) + "\n")
    if readme:
        (folder / "README.md").write_text(f"---\nconfigs:\n{readme}---\n# A data set\n")


def rows_of(dataset: Path | str, split: str = "train", subset: str = "") -> list[Any]:
    """Return all texts that a run would read, in file order."""
    request = Request(dataset=str(dataset), split=split, subset=subset)
    source = open_source(request, Domain("", str(dataset), subset), patience=None)  # type: ignore[arg-type]
    found = []
    for part in range(len(source.parts)):
        for group in range(source.groups(part)):
            for values in source.read(part, group, 0):
                values = values.to_pylist() if isinstance(values, pa.Array) else values
                found += [
                    document for value in values for document, _ in source.documents(value, "")
                ]
    return found


def theirs(folder: Path, split: str = "train", subset: str = "") -> list[Any]:
    return [
        row["text"]
        for row in datasets.load_dataset(str(folder), subset or None, split=split, streaming=True)
    ]


def same_rows(folder: Path, split: str = "train", subset: str = "") -> None:
    """Check that the lines are equal. `datasets` reads a text file as many rows, and a run as one
    row.
    """
    ours, wanted = (
        sorted(line for row in rows for line in row.splitlines())
        for rows in (rows_of(folder, split, subset), theirs(folder, split, subset))
    )
    assert ours == wanted and ours


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (CLONE, "train test"),
        (
            (
                "data/train_sft-00000-of-00001.parquet data/test_sft-00000-of-00001.parquet"
                " data/other.parquet"
            ),
            "train_sft test_sft",
        ),
        ("train.jsonl test.jsonl validation.jsonl", "train test validation"),
        ("my_training_set.jsonl my-dev-set.jsonl", "train validation"),
        ("books.train.0.txt books.valid.0.txt books.eval.0.txt", "train validation test"),
        ("train/a.jsonl train/deep/b.jsonl dev/c.jsonl loose.jsonl", "train validation"),
        ("data/2024-train/a.jsonl data/val_2/b.jsonl", "train validation"),
        ("evaluation/a.parquet training/b.parquet", "train test"),
        ("train_test.jsonl", "train test"),
        ("a.jsonl b/c.jsonl b/d/e.jsonl", "train"),
        ("latest.jsonl trained.jsonl contest.jsonl", "train"),
        ("a.jsonl.x/b.jsonl dataset_info.json config.json", "train"),
        ("Train/a.jsonl TEST/b.jsonl", "train"),
        ("shard-00000-of-00002.jsonl shard-00001-of-00002.jsonl", "train"),
        ("data/a.jsonl .cache/b.jsonl __pycache__/c.jsonl _d/_e.jsonl __f.jsonl", "train"),
        ("en/train.jsonl de/train.jsonl de/test.jsonl", "train test"),
        ("a.txt b/c.txt notes.md README.md build.py LICENSE.txt", "train"),
        ("a.jsonl notes.md run.py README.md license.txt b.jsonl", "train"),
    ],
)
def test_names_give_the_splits(tmp_path: Path, names: str, splits: str) -> None:
    write(tmp_path / "folder", names)
    for split in splits.split():
        same_rows(tmp_path / "folder", split)
    with pytest.raises(ConfigError, match="does not have this split, only"):
        local_files(str(tmp_path / "folder"), split="nothing")


@pytest.mark.parametrize(
    ("names", "readme", "cases"),
    [
        (CLONE, TWO.format("default", "data/train-*", "data/test-*"), "train: test:"),
        (
            "a.jsonl b.jsonl c.jsonl",
            TWO.format("only", "a.jsonl", "[b.jsonl, c.jsonl]"),
            "train: test:only",
        ),
        (
            "en/a.jsonl de/b.jsonl de/c.jsonl",
            TWO.format("en", "en/*", "en/*")
            + TWO.format("de", "de/b*", "de/c*")
            + "  default: true\n",
            "train: train:en test:de",
        ),
        ("en/x/a.jsonl en/b.jsonl c.jsonl", "- config_name: en\n  data_files: en/**\n", "train:"),
        (
            "en/x/a.jsonl en/b.jsonl c.jsonl",
            "- config_name: en\n  data_files:\n  - '**/[a-b].jsonl'\n",
            "train:en",
        ),
        (
            "en/train.jsonl en/test.jsonl de/train.jsonl",
            "- config_name: en\n  data_dir: en\n- config_name: de\n  data_dir: de\n",
            "train:en test:en train:de",
        ),
        (
            "a.jsonl train.jsonl",
            "- config_name: default\n  data_files:\n  - split: held.out\n    path: a.json?\n",
            "held.out:",
        ),
    ],
)
def test_the_readme_gives_the_splits_and_subsets(
    tmp_path: Path, names: str, readme: str, cases: str
) -> None:
    write(tmp_path / "folder", names, readme)
    for case in cases.split():
        same_rows(tmp_path / "folder", *case.split(":"))


@dataclass(frozen=True)
class RefusedReadme:
    """A README.md's header, the flags of a run, and the error message."""

    readme: str
    split: str
    subset: str
    says: str


@pytest.mark.parametrize(
    ("readme", "split", "subset", "says"),
    rows(
        RefusedReadme(
            readme=TWO.format("en", "a*", "b*") + TWO.format("de", "a*", "b*"),
            split="train",
            subset="",
            says="several subsets and no default: en, de. Choose one with --subset",
        ),
        RefusedReadme(
            readme=TWO.format("en", "a*", "b*"),
            split="train",
            subset="fr",
            says="--subset fr: is not in .*which has the subsets en. Use --subset en",
        ),
        RefusedReadme(
            readme="",
            split="train",
            subset="fr",
            says=(
                "--subset fr: is not in .*which has no subsets: its README.md names no configs."
                " Omit --subset"
            ),
        ),
        RefusedReadme(
            readme=TWO.format("en", "a*", "b*"),
            split="validation",
            subset="",
            says=(
                "--split validation: .*does not have this split, only train, test. Use --split"
                " train"
            ),
        ),
        RefusedReadme(
            readme=TWO.format("en", "a*", "lost.jsonl"),
            split="train",
            subset="",
            says="names lost.jsonl for its split test, but that file does not exist",
        ),
        RefusedReadme(
            readme=TWO.format("en", "lost*", "gone*"),
            split="train",
            subset="",
            says="no file matches the data_files of README.md for its subset en",
        ),
        RefusedReadme(
            readme=TWO.format("en", "https://a.b/c.jsonl", "b*"),
            split="train",
            subset="",
            says="names https://a.b/c.jsonl, which is not in the folder",
        ),
        RefusedReadme(
            readme=TWO.format("en", "../a.jsonl", "b*"),
            split="train",
            subset="",
            says="which is not in the folder",
        ),
        RefusedReadme(
            readme="- config_name: en\n  data_files: a.jsonl\n  field: rows\n",
            split="train",
            subset="",
            says="sets field for its subset en, which is not supported",
        ),
        RefusedReadme(
            readme="- config_name: en\n  data_files:\n  - part: a.jsonl\n",
            split="train",
            subset="",
            says="has data_files that cannot be read",
        ),
        RefusedReadme(
            readme="- {config_name: [\n",
            split="train",
            subset="",
            says="the header of README.md cannot be read",
        ),
        RefusedReadme(
            readme="- 3\n", split="train", subset="", says="the header of README.md cannot be read"
        ),
    ),
)
def test_a_readme_that_cannot_be_followed_is_refused(
    tmp_path: Path, readme: str, split: str, subset: str, says: str
) -> None:
    write(tmp_path / "folder", "a.jsonl b.jsonl", readme)
    with pytest.raises(ConfigError, match=says) as refusal:
        local_files(str(tmp_path / "folder"), split=split, subset=subset)
    assert len(str(refusal.value).splitlines()) == 1


# Folders of save_to_disk
# ------------------------------------------------------------------------------------------


def saved(rows: int) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": [f"document {number}" for number in range(rows)]})


def test_a_saved_data_set_is_read_as_it_was_saved(tmp_path: Path) -> None:
    """The folder also contains a `datasets` cache file whose rows are not part of the data set."""
    saved(5).save_to_disk(tmp_path / "one", num_shards=2)
    shutil.copy(
        tmp_path / "one" / "data-00000-of-00002.arrow", tmp_path / "one" / "cache-0123.arrow"
    )
    assert rows_of(tmp_path / "one") == datasets.load_from_disk(str(tmp_path / "one"))["text"][:]
    (tmp_path / "one" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(
        ConfigError,
        match=(
            r"state\.json names data-00001-of-00002\.arrow, but that file does not exist\. Copy the"
            r" whole folder again"
        ),
    ):
        local_files(str(tmp_path / "one"))


def test_a_saved_dictionary_has_its_splits(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    datasets.DatasetDict({"train": saved(4), "extra_test": saved(3)}).save_to_disk(folder)
    for split in ("train", "extra_test"):
        assert rows_of(folder, split) == datasets.load_from_disk(str(folder))[split]["text"][:]
    with pytest.raises(
        ConfigError, match=r"--split test: .* only train, extra_test\. Use --split train"
    ):
        local_files(str(folder), split="test")
    shutil.rmtree(folder / "extra_test")
    with pytest.raises(
        ConfigError, match=r"dataset_dict\.json names the split extra_test, which does not exist"
    ):
        local_files(str(folder))


def test_a_part_of_a_split_that_was_saved_is_all_of_its_folder(tmp_path: Path) -> None:
    part = saved(6)
    part.info.description = ""
    datasets.Dataset(part.data, part.info, split=datasets.NamedSplit("test_sft")).save_to_disk(
        tmp_path / "part"
    )
    assert rows_of(tmp_path / "part") == rows_of(tmp_path / "part", "test_sft") == part["text"][:]


def test_other_files_named_state_are_data(tmp_path: Path) -> None:
    write(tmp_path / "folder", "state.json")
    assert [file.name for file in local_files(str(tmp_path / "folder")) or []] == ["state.json"]


# Links
# --------------------------------------------------------------------------------------------------


def test_links_are_followed_and_circles_end(tmp_path: Path) -> None:
    """`datasets` does not follow links to folders, so `datasets` reads a copy without links."""
    write(tmp_path / "disk", "a.jsonl train/b.jsonl train/c/d.jsonl")
    write(tmp_path / "folder", "test/e.jsonl train/f.jsonl")
    (tmp_path / "folder" / "train" / "g.jsonl").symlink_to(tmp_path / "disk" / "a.jsonl")
    (tmp_path / "folder" / "train" / "more").symlink_to(tmp_path / "disk" / "train")
    shutil.copytree(tmp_path / "folder", tmp_path / "copy")
    (tmp_path / "disk" / "train" / "up").symlink_to(tmp_path / "disk" / "train")
    (tmp_path / "folder" / "train" / "round").symlink_to("../../folder")
    (tmp_path / "folder" / "train" / "self").symlink_to("self")
    (tmp_path / "folder" / "train" / "lost.jsonl").symlink_to("nowhere")
    (tmp_path / "folder" / "ztwice").symlink_to(tmp_path / "disk" / "train" / "c")
    assert sorted(rows_of(tmp_path / "folder")) == sorted(theirs(tmp_path / "copy"))
    (line,) = [
        note
        for note in planned(tmp_path / "folder").notes
        if note.startswith(f"--dataset {tmp_path}")
    ]
    assert line.endswith(
        "reads 4 files of split train; leaves out 1 file of split test, 2 broken links, 2 circular"
        " links, by their endings 1 .jsonl"
    )


# Images and sound
# -----------------------------------------------------------------------------------------------


def pictures(folder: Path, names: str) -> None:
    for number, name in enumerate(names.split()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(folder / name)


def labelled(folder: Path, split: str) -> list[tuple[str, str]]:
    """Return the class and the color of each image that a run would read."""
    dataset = str(folder)
    request = Request(dataset=dataset, split=split, task="image_classification")
    source = open_source(request, Domain("", dataset), patience=None)  # type: ignore[arg-type]
    classes = folder_classes(dataset, split)
    rows = [
        document
        for values in source.read(0, 0, 0)
        for value in values
        for document, _ in source.documents(value, "")
    ]
    return sorted(
        (classes[row["label"]], Image.open(row["image"]).getpixel((0, 0))[0]) for row in rows
    )


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        ("cat/a.png dog/b.png dog/c.PNG", "train"),
        ("train/cat/a.png train/dog/b.png test/cat/c.png test/dog/d.png", "train test"),
        (
            "data/train/cat/a.png data/train/dog/b.png data/val/cat/c.png data/val/dog/d.png",
            "train validation",
        ),
        ("first/cat/a.png second/cat/b.png second/dog/c.png", "train"),
    ],
)
def test_pictures_have_the_splits_and_classes_of_datasets(
    tmp_path: Path, names: str, splits: str
) -> None:
    pictures(tmp_path / "real", names)
    (tmp_path / "folder").mkdir()
    # The folder contains only links, as in some subsets of ImageNet.
    for child in (tmp_path / "real").iterdir():
        (tmp_path / "folder" / child.name).symlink_to(child)
    for split in splits.split():
        theirs = datasets.load_dataset(str(tmp_path / "real"), split=split, streaming=True)
        wanted = [
            (theirs.features["label"].int2str(row["label"]), row["image"].getpixel((0, 0))[0])
            for row in theirs
        ]
        assert (
            labelled(tmp_path / "folder", split)
            == labelled(tmp_path / "real", split)
            == sorted(wanted)
        )


def test_a_class_may_have_the_name_of_a_split(tmp_path: Path) -> None:
    """`datasets` would read only the class bullet_train."""
    pictures(tmp_path, "bullet_train/a.png cat/b.png")
    assert folder_classes(str(tmp_path)) == ["bullet_train", "cat"]


@pytest.mark.parametrize(
    ("names", "task", "says"),
    [
        (
            "cat/a.png dog/b.png metadata.csv",
            "image_classification",
            "contains metadata.csv with columns for its images, which is not supported",
        ),
        (
            "train/a.png train/b.png train/metadata.jsonl",
            "image_classification",
            r"to_parquet\('pictures.parquet'\), and name that file",
        ),
        (
            "cat/a.png dog/b.png metadata.csv",
            "pretrain",
            (
                "contains images, which task pretrain does not support. Use --task"
                " image_classification"
            ),
        ),
        (
            "train/1.png train/2.png test/3.png",
            "image_classification",
            "must have at least two classes, not only train",
        ),
        (
            "a.wav b.wav metadata.csv",
            "pretrain",
            r"contains sound \(2 .wav\), which no task supports",
        ),
        (
            "train/a.mp3 train/b.flac train/metadata.jsonl",
            "pretrain",
            r"contains sound \(1 .mp3, 1 .flac\), which no task supports",
        ),
        ("a.wav notes.txt", "pretrain", "contains sound"),
        (
            "dog/a.mp4 cat/b.mp4",
            "image_classification",
            r"contains video \(2 .mp4\), which no task supports",
        ),
    ],
)
def test_folders_of_other_kinds_are_refused(
    tmp_path: Path, names: str, task: str, says: str
) -> None:
    pictures(tmp_path, " ".join(name for name in names.split() if name.endswith(".png")))
    write(tmp_path, " ".join(name for name in names.split() if not name.endswith(".png")))
    recipe = Recipe(
        model="recipekit/llama-nano",
        init="random",
        task=task,
        **({} if task == "image_classification" else {"tokenizer": "bytes"}),
    )
    with pytest.raises(ConfigError, match=says) as refusal:
        planned(tmp_path, recipe=recipe)
    assert says.partition(",")[0].replace("\\", "") in str(refusal.value)


# The plan: which split, and the line at the start
# -----------------------------------------------------------------

OWN = Recipe(
    model="recipekit/llama-nano",
    init="random",
    tokenizer="bytes",
    dataset="ORG/NAME",
    split="train_sft",
    subset="de",
)


def planned(dataset: Path | str, *flags: str, recipe: Recipe = OWN) -> Any:
    return resolve_run(
        parse(
            recipe,
            ROOT / "recipes" / "llama_nano_zero2.py",
            ["--dataset", str(dataset), *flags, "--dry_run"],
        )
    )


def test_split_and_subset_of_the_file_belong_to_its_own_data_set(tmp_path: Path) -> None:
    write(tmp_path / "folder", "train.jsonl test.jsonl", TWO.format("de", "train*", "test*"))
    own = (
        "--dataset: split train and no subset, since split train_sft and subset de of the recipe's"
        " file belong to its own data set"
    )
    plan = planned(tmp_path / "folder")
    assert (plan.recipe.split, plan.recipe.subset) == ("train", "") and own in plan.notes
    plan = planned(tmp_path / "folder", "--split", "test")
    assert (plan.recipe.split, plan.recipe.subset) == ("test", "")
    assert (
        "--dataset: no subset, since subset de of the recipe's file belongs to its own data set"
        in plan.notes
    )
    plan = planned(tmp_path / "folder", "--subset", "de", "--split", "test")
    assert (plan.recipe.split, plan.recipe.subset) == ("test", "de") and not any(
        "belong" in note for note in plan.notes
    )
    assert not any("belong" in note for note in planned("builtin").notes)
    plan = planned("ORG/NAME")  # the recipe's own data set, given on the command line
    assert (plan.recipe.split, plan.recipe.subset) == ("train_sft", "de")


@pytest.mark.parametrize(
    ("dataset", "flags", "says"),
    [
        (
            "{tmp}/folder",
            ("--split", "dev"),
            (
                "--split dev: .* does not have this split, only train, test. Use --split train, or"
                " name the files"
            ),
        ),
        (
            "{tmp}/folder/train.jsonl",
            ("--split", "test"),
            "--split test: .*train.jsonl is not a folder, so all its rows are in the split train",
        ),
        (
            "{tmp}/folder/*.jsonl",
            ("--split", "test"),
            (
                "--split test: .* is not a folder, so all its rows are in the split train. Use"
                " --split train"
            ),
        ),
        (
            "{tmp}/folder/train.jsonl",
            ("--subset", "de"),
            "--subset de: .*train.jsonl is not a folder, so it has no subsets. Omit --subset",
        ),
        (
            "https://example.org/a.jsonl?key=1",
            ("--split", "test"),
            "--split test: https://example.org/a.jsonl is not a folder",
        ),
        (
            "one={tmp}/folder@1; two={tmp}/folder/train.jsonl@1",
            ("--split", "test"),
            "--split test: .*train.jsonl is not a folder",
        ),
        (
            "{tmp}/only",
            (),
            (
                "--split train: .*only does not have this split, only test. Use --split test, or"
                " name the files"
            ),
        ),
    ],
)
def test_a_split_that_is_not_there_is_refused_with_those_that_are(
    tmp_path: Path, dataset: str, flags: tuple[str, ...], says: str
) -> None:
    write(tmp_path, "folder/train.jsonl folder/test.jsonl only/test/a.jsonl")
    with pytest.raises(ConfigError, match=says):
        planned(dataset.format(tmp=tmp_path), *flags)


def test_the_start_says_what_is_read_and_what_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "clone", CLONE + " data/notes.md LICENSE script.py data/old.xml")
    (tmp_path / "clone" / "README.md").write_text("# no header\n")
    lines = [
        (
            "clone",
            (),
            (
                "reads 2 files of split train (6 rows); leaves out 1 file of split test, by their"
                " endings 1 .md, 1 .xml, 1 .py"
            ),
        ),
        (
            "clone",
            ("--split", "test"),
            (
                "reads 1 file of split test (3 rows); leaves out 2 files of split train, by their"
                " endings 1 .md, 1 .xml, 1 .py"
            ),
        ),
        ("clone/data/*.parquet", (), "reads 3 files of split train (9 rows)"),
        ("clone/script.py", (), "reads 1 file of split train"),
    ]
    for name, flags, line in lines:
        assert f"--dataset {tmp_path}/{name}: {line}" in planned(tmp_path / name, *flags).notes
    notes = planned(f"a={tmp_path}/clone@1; b={tmp_path}/clone/script.py@2").notes
    assert [
        note.partition(": ")[2][:22] for note in notes if note.startswith(f"--dataset {tmp_path}")
    ] == ["reads 2 files of split", "reads 1 file of split "]


def test_each_folder_of_a_mixture_may_have_its_subset(tmp_path: Path) -> None:
    write(
        tmp_path / "clone",
        "en/a.jsonl de/b.jsonl",
        TWO.format("en", "en/*", "lost*") + TWO.format("de", "de/*", "lost*"),
    )
    write(tmp_path, "other:part/c.jsonl")
    mixture = f"one={tmp_path}/clone:de@1; two={tmp_path}/other:part@2; three=ORG/NAME:en@1"
    domains = domains_of(mixture)
    assert [(domain.dataset, domain.subset) for domain in domains] == [
        (f"{tmp_path}/clone", "de"),
        (f"{tmp_path}/other:part", ""),
        ("ORG/NAME", "en"),
    ]
    assert [file.name for file in local_files(domains[0].dataset, subset="de") or []] == ["b.jsonl"]


def test_relative_and_absolute_files_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is listed under two names is read once.

    If all paths are relative, or all absolute, the files keep the names that older versions
    recorded.
    """
    write(tmp_path, "here/a.jsonl there/b.jsonl")
    monkeypatch.chdir(tmp_path / "here")
    for named in (
        f"a.jsonl,{tmp_path}/there/b.jsonl",
        f"{tmp_path}/there/b.jsonl,a.jsonl,{tmp_path}/here/a.jsonl",
        f"../there/b.jsonl,{tmp_path}/here/a.jsonl",
    ):
        assert sorted(rows_of(named)) == sorted(
            f"{name} {number}" for name in ("here/a.jsonl", "there/b.jsonl") for number in range(3)
        )
        files = open_source(Request(dataset=named), Domain("", named), patience=None).files  # type: ignore[arg-type]
        assert sorted(files) == ["here/a.jsonl", "there/b.jsonl"]
    assert sorted(
        open_source(Request(dataset="a.jsonl"), Domain("", "a.jsonl"), patience=None).files
    ) == ["a.jsonl"]  # type: ignore[arg-type]


def test_a_run_of_an_older_version_goes_on(tmp_path: Path) -> None:
    """Older versions recorded the recipe's split and subset although local data ignored them."""
    write(tmp_path, "a.jsonl")
    out, identity = tmp_path / "run", planned(tmp_path / "a.jsonl").recipe
    from recipekit.spec.run_folder import run_identity as identity_of

    out.mkdir()
    before = identity_of(identity, None) | {"split": "train_sft", "subset": "de"}
    (out / "run.json").write_text(json.dumps({"identity": before, "recipe": {}}))
    assert planned(tmp_path / "a.jsonl", "--out", str(out)).resume_from == out
    (out / "run.json").write_text(
        json.dumps({"identity": before | {"split": "other"}, "recipe": {}})
    )
    with pytest.raises(ConfigError, match=r"split = train: the run in .* has other"):
        # Only a start rejects an older run; a dry run does not.
        flags = ["--dataset", str(tmp_path / "a.jsonl"), "--out", str(out)]
        resolve_run(parse(OWN, ROOT / "recipes" / "llama_nano_zero2.py", flags))


def test_an_unreadable_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run as root, which can read everything, so the error is simulated."""
    write(tmp_path / "folder", "a.jsonl closed/b.jsonl")
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert (
        f"--dataset {tmp_path}/folder: reads 1 file of split train; leaves out 1 unreadable folder"
        in planned(tmp_path / "folder").notes
    )
