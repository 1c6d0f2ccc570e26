"""The first row of samples: invalid values are reported when a run is planned."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recipekit.spec.errors import ConfigError
from sample_streams import (
    looked_at,
    request_for,
    take,
)


@pytest.mark.parametrize(
    ("content", "fields", "says"),
    [
        (
            '{"picture": 1, "label": 1}',
            {},
            (
                "a.jsonl, row 1: has no column 'image', only 'picture', 'label'. Name the column"
                " with --image_field"
            ),
        ),
        (
            '\n{"image": [[1, 2]], "class": 1}',
            {},
            (
                "a.jsonl, row 2: has no column 'label', only 'image', 'class'. Name the column with"
                " --label_field"
            ),
        ),
        (
            '{"image": "cat.png", "label": 1}',
            {},
            (
                "row 1: its image is not a readable image: str 'cat.png' must be an encoded image"
                " file or rows of pixels. Name another"
            ),
        ),
        ('{"image": [[0, 1, 256]], "label": 1}', {}, "pixels must be whole numbers from 0 to 255"),
        ('{"image": [[0.5]], "label": 1}', {}, "pixels must be whole numbers from 0 to 255"),
        ('{"image": [[0, 1], [2]], "label": 1}', {}, "its image is not a readable image: "),
        ('{"image": [[[1, 2]]], "label": 1}', {}, "pixels must have the shape (H, W) or"),
        (
            '{"image": [[1]], "label": "cat"}',
            {},
            (
                "its label must be a class number, not str 'cat'. Name another column with"
                " --label_field"
            ),
        ),
        ('{"image": [[1]], "label": 1.0}', {}, "its label must be a class number, not float '1.0'"),
        (
            '{"image": true, "label": 1}',
            {},
            "its image is not a readable image: bool 'True' must be an encoded image file",
        ),
        (
            '{"image": {"bytes": null, "path": "zip://a.png::hf://b"}, "label": 1}',
            {},
            "the row contains no image bytes, only the path 'zip://a.png::hf://b'",
        ),
        (
            '{"image": [[1]], "label": 1}',
            {"task": "pretrain"},
            "a.jsonl, row 1: has no column 'text'",
        ),
    ],
)
def test_what_the_first_row_tells_is_refused(tmp_path, content, fields, says):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ConfigError) as refusal:
        looked_at(tmp_path / "a.jsonl", **fields)
    assert says in str(refusal.value) and len(str(refusal.value).splitlines()) == 1
    if "task" not in fields:
        looked_at(tmp_path / "a.jsonl", bad_rows="skip")


def test_first_rows_of_tables(tmp_path, fashion):
    looked_at(fashion)
    looked_at(fashion.with_name("raw.parquet"))
    with pytest.raises(
        ConfigError,
        match=(
            r"has no column 'picture', only 'image', 'label'\. Name the column with --image_field"
        ),
    ):
        looked_at(fashion, image_field="picture")
    whole = pq.read_table(fashion / "0.parquet")["image"][0].as_py()["bytes"]
    pq.write_table(pa.table({"image": [whole[:200]], "label": [1]}), tmp_path / "cut.parquet")
    with pytest.raises(
        ConfigError, match=r"cut.parquet, row 1: its image is not a readable image: "
    ):
        looked_at(tmp_path / "cut.parquet")
    pq.write_table(
        pa.table({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())}),
        tmp_path / "empty.parquet",
    )
    looked_at(tmp_path / "empty.parquet")


def test_text_has_no_samples(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    for look in (looked_at, lambda path: take(request_for(path), 1)):
        with pytest.raises(
            ConfigError,
            match=(
                r"a.txt: is text, but task image_classification requires rows with the columns"
                r" image, label\. Use Parquet, Arrow or JSON"
            ),
        ):
            look(tmp_path / "a.txt")
