"""Corpora that several tests of data read."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fashion import png
from recipekit.data import chunks
from token_streams import BYTES, END, words


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, str]:
    """Write the test corpora and return their paths.

    The same 300 documents exist as JSONL in three files, as Parquet and Arrow in two files each, as
    text files, and as tokens. There are also 90 chats and a mixture.
    """
    folder = tmp_path_factory.mktemp("corpora")
    texts = words(300, 0)
    for kind in ("lines", "parquet", "arrow", "tokens", "text", "chats"):
        (folder / kind).mkdir()
    for number in range(3):
        rows = [
            json.dumps({"id": 1, "text": text}) for text in texts[100 * number : 100 * number + 100]
        ]
        (folder / "lines" / f"{number}.jsonl").write_text("\n".join(rows) + "\n")
    for number in range(2):
        own = texts[150 * number : 150 * number + 150]
        table = pa.table({"text": own, "n": range(150)})
        pq.write_table(table, folder / "parquet" / f"{number}.parquet", row_group_size=40)
        with (
            pa.OSFile(str(folder / "arrow" / f"{number}.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=40)
        tokens = pa.table(
            {
                "ids": pa.array(
                    [[*BYTES(text)["input_ids"], END] for text in own], pa.list_(pa.int32())
                )
            }
        )
        pq.write_table(tokens, folder / "tokens" / f"{number}.parquet", row_group_size=40)
    for number, text in enumerate(texts):
        (folder / "text" / f"{number:03}.txt").write_text(text)
    chats = [
        {
            "messages": [
                {"role": "user", "content": text[:5]},
                {"role": "assistant", "content": text},
            ]
        }
        for text in words(90, 1)
    ]
    (folder / "chats" / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (folder / "other.jsonl").write_text(
        "\n".join(json.dumps({"text": text.upper()}) for text in words(200, 7))
    )
    found = {path.name: str(path) for path in folder.iterdir()}
    return found | {
        "mixture": (
            f"small={folder / 'lines'}@50; large={folder / 'other.jsonl'}@30|20:10;"
            f" parquet={folder / 'parquet'}@20"
        )
    }


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """Isolate this module from the token caches of earlier runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks.datasets_config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module")
def classes(tmp_path_factory, pixels) -> Path:
    """Write the images as files, in one folder for each class."""
    folder = tmp_path_factory.mktemp("classes")
    for number, (image, label) in enumerate(zip(*pixels, strict=True)):
        (folder / f"class_{label}").mkdir(exist_ok=True)
        (folder / f"class_{label}" / f"{number}.png").write_bytes(png(image))
    return folder
