"""Images stored as files, with one folder for each class."""

import contextlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from fashion import png
from recipekit.data import sources
from recipekit.data.batching import DataRank
from recipekit.data.content import is_held_out
from recipekit.data.files import folder_classes, local_files
from recipekit.data.folders import SETTLED_NS
from recipekit.data.images import open_image
from recipekit.data.mixture import Domain
from recipekit.data.remote import RetryPolicy
from recipekit.data.samples import open_samples
from recipekit.data.source import ColumnSelection
from recipekit.data.sources import open_source
from recipekit.data.stream_state import StreamMismatch, naming_changes
from recipekit.spec.errors import ConfigError
from sample_streams import (
    NAMES,
    PICTURES,
    equal,
    looked_at,
    request_for,
    take,
    unmirrored,
)


def test_a_folder_for_each_class(classes, pixels):
    wanted = [
        (image, int(label))
        for number, (image, label) in enumerate(zip(*pixels, strict=True))
        if not is_held_out({"image": classes / f"class_{label}/{number}.png"})
    ]
    assert 970 < len(wanted) < 1000
    reference, _ = take(request_for(classes), len(wanted) // 12)
    left = Counter(
        (min(image.tobytes(), image[:, ::-1].tobytes()), label) for image, label in wanted
    )
    assert (
        not unmirrored(reference) - left
        and (left - unmirrored(reference)).total() == len(wanted) % 12
    )
    # Parts contain images of all classes.
    assert all(len(batch["labels"].unique()) > 2 for batch in reference)
    assert equal(take(request_for(classes, micro_batch=4), 20, 3)[0], reference[:20])
    _, state = take(request_for(classes), 39)
    assert equal(take(request_for(classes, micro_batch=3), 30, 2, state)[0], reference[39:69])
    looked_at(classes)


def test_a_file_is_held_out_by_its_class_and_name_wherever_it_lies():
    chosen = [
        {
            number
            for number in range(1000)
            if is_held_out({"image": Path(root, "cat", f"{number}.png")})
        }
        for root in ("a", "/b/c")
    ]
    assert chosen[0] == chosen[1] and 2 <= len(chosen[0]) <= 25
    assert chosen[0] == {
        number
        for number in range(1000)
        if is_held_out({"image": {"bytes": None, "path": f"d/cat/{number}.png"}})
    }


def test_pictures_are_read_when_they_are_needed(classes, tmp_path):
    """The error for an unreadable image names its file."""
    for number in range(2):
        for file in sorted((classes / f"class_{number}").iterdir())[:30]:
            (tmp_path / "d" / file.parent.name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "d" / file.parent.name / file.name).write_bytes(file.read_bytes())
    with contextlib.closing(
        open_samples(request_for(tmp_path / "d", global_batch=2), 28, PICTURES, rank=DataRank(1, 0))
    ) as own:
        next(own)
        for file in (tmp_path / "d").rglob("*.png"):
            file.unlink()
        with pytest.raises(
            ConfigError,
            match=r"class_[01]/\d+.png: cannot be used: is not a readable image: .*No such file",
        ):
            for _ in range(10):
                next(own)


def test_a_changed_picture_is_another_data_set(classes, tmp_path):
    for number in range(3):
        for file in sorted((classes / f"class_{number}").iterdir())[:40]:
            (tmp_path / "d" / file.parent.name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "d" / file.parent.name / file.name).write_bytes(file.read_bytes())
    (tmp_path / "d").rename(tmp_path / "e")  # a moved folder is the same data set
    with contextlib.closing(
        open_samples(request_for(tmp_path / "e"), 28, PICTURES, rank=DataRank(1, 0))
    ) as own:
        _, state = next(own)
        before = own.files
    wanted = take(request_for(tmp_path / "e"), 30)[0]
    (tmp_path / "e").rename(tmp_path / "d")
    assert equal(take(request_for(tmp_path / "d"), 29, state=state)[0], wanted[1:])
    changed = sorted((tmp_path / "d" / "class_1").iterdir())[3]
    (tmp_path / "new").write_bytes(changed.read_bytes()[:-1] + b"x")
    (tmp_path / "new").replace(changed)
    with (
        pytest.raises(
            StreamMismatch, match=r"from those the saved run read: class_1 has changed\. Restore"
        ),
        naming_changes(before),
    ):
        take(request_for(tmp_path / "d"), 1, state=state)


def test_a_folder_that_stays_as_it_is_is_listed_and_hashed_once(tmp_path, monkeypatch):
    """A run opens its data several times before its first step, on every rank.

    An image folder can contain many files. Changes between the calls must still be detected.
    """
    folders, calls = [tmp_path, tmp_path / "cat", tmp_path / "dog"], Counter()
    for folder in folders[1:]:
        folder.mkdir()
        for number in range(50):
            (folder / f"{number}.png").write_bytes(png(np.full((2, 2), number, np.uint8)))

    for folder in folders:
        # Pretend that the folder was written some time ago.
        os.utime(folder, ns=(0, folder.stat().st_mtime_ns - 10 * SETTLED_NS))

    def opening() -> tuple[dict[str, str], list[Path] | None, Counter]:
        calls.clear()
        looked_at(tmp_path)
        source = open_source(
            request_for(tmp_path), Domain("", str(tmp_path)), RetryPolicy(5, print)
        )
        return source.files, local_files(str(tmp_path)), Counter(calls)

    def counted(real: Any, name: str, path: Any, *more: Any, **named: Any) -> Any:
        calls[name, Path(path).suffix == ".png"] += 1
        return real(path, *more, **named)

    for owner, name in ((os, "scandir"), (Path, "stat"), (Path, "open")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *more, real=real, name=name, **named: counted(real, name, *more, **named),
        )
    digests, files, first = opening()
    assert (
        first["scandir", False] == 3 and first["stat", True] >= 100 and first["open", True] == 102
    )  # two more reads: check whether the first image is a Git LFS pointer, and decode it
    same, same_files, second = opening()
    assert (
        (same, same_files) == (digests, files)
        and not second["scandir", False]
        and second["open", True] == 2
        and second["stat", True] < 5
    )
    (tmp_path / "new").write_bytes(png(np.full((2, 2), 99, np.uint8)))
    (tmp_path / "new").replace(tmp_path / "cat" / "7.png")
    other, same_files, _ = opening()
    assert same_files == files and other["dog"] == digests["dog"] and other["cat"] != digests["cat"]
    # Also within one tick of the clock.
    (tmp_path / "dog" / "3.png").rename(tmp_path / "dog" / "more.png")
    renamed, other_files, _ = opening()
    assert (
        other_files != files and renamed["dog"] != other["dog"] and renamed["cat"] == other["cat"]
    )


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ["a.png", "b.png"],
            (
                "contains images outside the class folders. Put the images into one folder per"
                " class (FOLDER/CLASS/IMAGE.png)"
            ),
        ),
        (["cat/a.png", "b.png"], "contains images outside the class folders"),
        (
            ["cat/a.png", "more/dog/b.png"],
            (
                "its class folders must be at the same depth, not cat and more/dog. Name the parent"
                " folder of the classes, for example"
            ),
        ),
        (["cat/a.png", "cat/b.png"], "must have at least two classes, not only cat"),
        (
            ["cat/a.png", "dog/b.png", "cow/notes.log"],
            "the folder of the class cow contains no images. Add images to it, or delete it",
        ),
        (["cat/notes.log"], "contains no supported files (.txt, .md, "),
        ([], "contains no supported files"),
    ],
)
def test_a_folder_without_classes_is_refused(tmp_path, names, says):
    for name in names:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(png(np.zeros((2, 2), np.uint8)))
    (tmp_path / "data").mkdir(exist_ok=True)
    for look in (
        looked_at,
        lambda path: open_source(request_for(path), Domain("", str(path)), RetryPolicy(5, print)),
    ):
        with pytest.raises(ConfigError) as refusal:
            look(tmp_path / "data")
        assert says in str(refusal.value), str(refusal.value)


def test_a_hidden_folder_is_no_class(tmp_path):
    """Other programs store previews in such folders. The dataset folder itself may be hidden.

    `_old` does not count as hidden, because `datasets` reads it.
    """
    for name in (
        "cat/a.png",
        "_old/b.png",
        ".thumbnails/a.png",
        "cat/.previews/a.png",
        "__MACOSX/c.png",
    ):
        (tmp_path / ".data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".data" / name).write_bytes(png(np.zeros((2, 2), np.uint8)))
    assert local_files(str(tmp_path / ".data"), images=True) == [
        tmp_path / ".data" / name for name in ("_old/b.png", "cat/a.png")
    ]
    assert folder_classes(str(tmp_path / ".data")) == ["_old", "cat"]
    looked_at(tmp_path / ".data")


def test_what_lies_beside_pictures_and_pictures_beside_text(tmp_path):
    """The task decides whether the images or the texts are the data. Both kinds of tasks read
    tables.
    """
    for name in (
        "cat/a.png",
        "dog/b.JPEG",
        "classes.txt",
        "README.md",
        "index.json",
        "cat/.hidden.png",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(png(np.zeros((2, 2), np.uint8)))
    assert local_files(str(tmp_path), images=True) == [
        tmp_path / "cat" / "a.png",
        tmp_path / "dog" / "b.JPEG",
    ]
    assert local_files(str(tmp_path / "*/*"), images=True) == [
        tmp_path / "cat" / "a.png",
        tmp_path / "dog" / "b.JPEG",
    ]
    assert local_files(str(tmp_path)) == [tmp_path / name for name in ("classes.txt", "index.json")]
    looked_at(tmp_path)
    with pytest.raises(
        ConfigError,
        match=(
            r"contains images, which task pretrain does not support\. Use --task"
            r" image_classification, or use other data"
        ),
    ):
        looked_at(tmp_path / "cat", task="pretrain")
    (tmp_path / "a.parquet").touch()
    assert local_files(str(tmp_path), images=True) == local_files(str(tmp_path))


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_pictures_of_the_hub(tmp_path, pixels, kind):
    """`datasets` writes the images with its image type and streams them from the hub."""
    own = datasets.Dataset.from_dict(
        {
            "image": [{"bytes": png(image), "path": None} for image in pixels[0][:60]],
            "label": pixels[1][:60],
        },
        features=datasets.Features(
            {
                "image": datasets.Image(),
                "label": datasets.ClassLabel(names=[f"class {n}" for n in range(10)]),
            }
        ),
    )
    (tmp_path / "data").mkdir()
    (
        own.to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
        if kind == "parquet"
        else own.save_to_disk(tmp_path / "data")
    )
    if kind == "parquet":
        source = sources._hub_source(
            Domain("", str(tmp_path / "data")),
            "train",
            "",
            ColumnSelection(NAMES, "image_classification", 7, NAMES),
            RetryPolicy(5, print),
        )
    else:
        source = open_source(
            request_for(str(tmp_path / "data" / "*.arrow")),
            Domain("", str(tmp_path / "data" / "*.arrow")),
            RetryPolicy(5, print),
        )
    rows = [
        source.documents(value, "")[0][0]
        for values in source.read(0, 0, 0)
        for value in values.to_pylist()
    ]
    assert len(rows) == 60 and all(set(row) == {*NAMES} for row in rows)
    assert [row["label"] for row in rows] == pixels[1][:60].tolist()
    assert all(
        (np.asarray(open_image(row["image"])) == image).all()
        for row, image in zip(rows, pixels[0], strict=False)
    )
