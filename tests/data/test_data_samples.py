"""Pairs, images and tables: real samples, in an order and with an augmentation that do not depend on the ranks."""

import contextlib
import gzip
import hashlib
import io
import json
import subprocess
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from recipekit.data import chunks
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import Request, Sizes
from recipekit.data.samples import images, open_samples, pairs, shifted_and_mirrored, table
from recipekit.refusal import Refusal
from recipekit.task import IGNORE

FASHION = Path("/usr/share/datasets/fashion-mnist")
BYTES = byte_tokenizer()


def request_for(dataset: Path | str, **fields) -> Request:
    return Request(**({"dataset": str(dataset), "global_batch": 12, "micro_batch": 2, "sizes": Sizes(block_samples=100, chunk_rows=64)} | fields))


def fashion_file(name: str, header: int) -> np.ndarray:
    with gzip.open(FASHION / name) as stream:
        return np.frombuffer(stream.read(), np.uint8, offset=header)


def take(request: Request, columns: tuple[str, ...], collate, steps: int, dp: int = 1, state: dict | None = None) -> tuple[list[dict[str, torch.Tensor]], dict]:
    """The global batches of all ranks put together, and the state after them."""
    streams = [open_samples(request, columns, collate, dp=dp, dp_rank=rank, state=state) for rank in range(dp)]
    batches = []
    for _ in range(steps):
        parts = [batch for own in streams for batch in next(own)[0]]
        batches.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    after = json.loads(json.dumps(streams[0].state))
    assert all(json.loads(json.dumps(own.state)) == after for own in streams)
    for own in streams:
        own.close()
    return batches, after


def equal(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


@pytest.fixture(scope="module")
def fashion(tmp_path_factory) -> Path:
    """1,000 images of Fashion-MNIST: half as PNG, as `datasets` stores them, half as rows of pixels."""
    if not FASHION.exists():
        pytest.skip("needs Debian's dataset-fashion-mnist (tests/system_packages.sh)")
    folder = tmp_path_factory.mktemp("fashion")
    pixels = fashion_file("t10k-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)[:1000]
    labels = fashion_file("t10k-labels-idx1-ubyte.gz", 8)[:1000]

    def png(image: np.ndarray) -> dict:
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "PNG")
        return {"bytes": stream.getvalue(), "path": None}

    encoded = pa.table({"image": [png(image) for image in pixels], "label": labels})
    for number in range(2):
        pq.write_table(encoded.slice(500 * number, 500), folder / f"{number}.parquet", row_group_size=128)
    pq.write_table(pa.table({"image": pixels.tolist(), "label": labels}), folder.with_name("raw.parquet"))
    return folder


def test_images_are_augmented_alike_on_any_ranks_and_anew_each_epoch(fashion):
    collate = partial(images, "image", "label", shifted_and_mirrored)
    request = request_for(fashion)
    reference, _ = take(request, ("image", "label"), collate, 100)  # 1,200 samples: more than an epoch
    for dp, micro_batch in ((2, 3), (3, 4), (12, 1)):
        assert equal(take(request_for(fashion, micro_batch=micro_batch), ("image", "label"), collate, 30, dp)[0], reference[:30])
    _, state = take(request, ("image", "label"), collate, 41, 2)
    assert len(json.dumps(state)) < 1024
    assert equal(take(request, ("image", "label"), collate, 20, 3, state)[0], reference[41:61])

    plain, _ = take(request, ("image", "label"), partial(images, "image", "label", lambda image, draw: image), 84)
    hashes = [hashlib.sha256(image.numpy().tobytes()).hexdigest() for batch in plain for image in batch["pixel_values"]]
    pixels = fashion_file("t10k-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)[:1000]
    assert Counter(hashes[:1000]) == Counter(hashlib.sha256((image[None].astype(np.float32) / 255).tobytes()).hexdigest() for image in pixels)
    again = hashes.index(hashes[1000])  # the first sample of the second epoch
    first, second = (reference[at // 12]["pixel_values"][at % 12] for at in (again, 1000))
    assert not torch.equal(first, second)


def test_pixels_may_be_encoded_or_not(fashion):
    collate = partial(images, "image", "label", lambda image, draw: image)
    encoded, raw = ([batch for batch in take(request_for(path), ("image", "label"), collate, 80)[0]] for path in (fashion, fashion.with_name("raw.parquet")))
    one, other = (
        {image.numpy().tobytes(): int(label) for batch in batches for image, label in zip(*batch.values(), strict=True)} for batches in (encoded, raw)
    )
    shared = one.keys() & other.keys()
    assert len(shared) > 800 and all(one[image] == other[image] for image in shared)


def test_pairs_have_loss_on_the_answers_only(tmp_path):
    rows = [{"prompt": f"question {n}", "chosen": f"good {n}", "rejected": [{"role": "assistant", "content": f"bad {n}"}]} for n in range(50)]
    rows = [row | {"chosen": row["chosen"], "rejected": row["rejected"][0]["content"]} for row in rows]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    collate = partial(pairs, BYTES, 96)
    batches, _ = take(request_for(path), ("prompt", "chosen", "rejected"), collate, 10, 3)
    numbers = set()
    for first in range(0, 24, 4):  # micro-batches of two rows: two chosen, then two rejected
        part = {name: tensor[first : first + 4] for name, tensor in batches[0].items()}
        for chosen, rejected in ((0, 2), (1, 3)):
            said = [BYTES.decode(part["labels"][at][part["labels"][at] != IGNORE]).removesuffix("<|im_end|>") for at in (chosen, rejected)]
            good, number = said[0].split()
            assert good == "good" and said[1] == f"bad {number}"
            assert f"question {number}<" in BYTES.decode(part["input_ids"][chosen])
            numbers.add(number)
    assert len(numbers) == 12
    with pytest.raises(Refusal, match=r"pairs.jsonl, row \d+: cannot be used: its chosen answer does not begin within 8 tokens"):
        take(request_for(path), ("prompt", "chosen", "rejected"), partial(pairs, BYTES, 8), 1)


def test_rows_of_a_table(tmp_path):
    """Debian's own packages: sizes, sections and maintainers."""
    done = subprocess.run(["dpkg-query", "-W", "-f", "${Package}\t${Installed-Size}\t${Section}\t${Maintainer}\n"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("needs dpkg-query")
    found = [line.split("\t") for line in done.stdout.splitlines()]
    rows = [(name, int(size or 0), section or None, maintainer) for name, size, section, maintainer in found]
    names = ("package", "size", "section", "maintainer")
    pq.write_table(pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), tmp_path / "packages.parquet", row_group_size=50)
    collate = partial(table, ("size",), {"section": 32, "maintainer": 256}, "size")
    request = request_for(tmp_path / "packages.parquet")
    steps = len(rows) // 12
    reference, _ = take(request, ("size", "section", "maintainer"), collate, steps)
    assert equal(take(request, ("size", "section", "maintainer"), collate, steps, 6)[0], reference)
    sizes = Counter(int(size) for batch in reference for size in batch["numbers"][:, 0])
    assert not sizes - Counter(size for _, size, _, _ in rows) and sum(sizes.values()) == steps * 12
    categories = torch.cat([batch["categories"] for batch in reference])
    assert categories.min() >= 0 and (categories.max(0).values < torch.tensor([32, 256])).all() and len(categories[:, 1].unique()) > 10
    with pytest.raises(Refusal, match="has no column 'colour', only"):
        take(request, ("size", "colour"), collate, 1)


def test_only_the_first_broken_samples_are_told(tmp_path):
    (tmp_path / "a.jsonl").write_text("nonsense\n" * 20 + '{"x": 1}\n' * 30)
    said: list[str] = []
    request = request_for(tmp_path / "a.jsonl", bad_rows="skip")
    with contextlib.closing(open_samples(request, ("x",), lambda rows, keys: {}, dp=1, dp_rank=0, say=said.append)) as own:
        next(own)
    assert len(said) == chunks.TOLD and "a.jsonl, row 5: is not JSON" in said[-1] and "bad_rows counts on" in said[-1]


def test_text_is_no_table(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(Refusal, match="is text, and has no columns image, label"):
        take(request_for(tmp_path / "a.txt"), ("image", "label"), lambda rows, keys: {}, 1)


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def numbers_and_keys(rows: list[dict], keys: list[int]) -> dict[str, torch.Tensor]:
    return {"number": torch.tensor([row["n"] for row in rows]), "key": torch.tensor(keys)}


def test_every_sample_has_another_key_in_every_epoch(tmp_path):
    path = write_rows(tmp_path / "numbers.jsonl", [{"n": n} for n in range(60)])
    batches, _ = take(request_for(path), ("n",), numbers_and_keys, 10)  # two epochs
    numbers, keys = (torch.cat([batch[name] for batch in batches]).tolist() for name in ("number", "key"))
    assert sorted(numbers[:60]) == sorted(numbers[60:]) == list(range(60)) and len(set(keys)) == 120


def test_samples_may_be_a_mixture(tmp_path):
    """Each row is of the corpus that `domain` says, in the shares of the weights, on any ranks."""
    for name, first in (("a", 0), ("b", 1000)):
        write_rows(tmp_path / f"{name}.jsonl", [{"n": n} for n in range(first, first + 40)])
    for dp, micro_batch in ((1, 1), (3, 2)):
        request = request_for(f"a={tmp_path / 'a.jsonl'}@3; b={tmp_path / 'b.jsonl'}@1", micro_batch=micro_batch)
        for batch in take(request, ("n",), numbers_and_keys, 5, dp)[0]:
            assert torch.equal(batch["domain"], (batch["number"] >= 1000).long()) and batch["domain"].sum() == 3


def test_the_row_that_cannot_be_used_is_named(tmp_path):
    path = write_rows(tmp_path / "sizes.jsonl", [{"size": "many" if n == 30 else n} for n in range(60)])
    with pytest.raises(Refusal, match=r"sizes.jsonl, row 31: cannot be used: could not convert string to float: 'many'"):
        take(request_for(path, micro_batch=12), ("size",), partial(table, ("size",), {}, "size"), 5)


def test_padding_of_a_pair_is_a_document_of_its_own():
    batch = pairs(BYTES, 96, [{"prompt": "q", "chosen": "good", "rejected": "bad"}], [0])
    for ids, labels, positions in zip(*batch.values(), strict=True):
        size = int((ids != BYTES.pad_token_id).sum())
        assert positions.tolist() == [*range(size), *range(96 - size)] and (labels[size:] == IGNORE).all()


def test_colours_are_channels():
    pixels = np.arange(2 * 4 * 3).reshape(2, 4, 3)
    batch = images("image", "label", lambda image, draw: image, [{"image": pixels.tolist(), "label": 1}], [0])
    assert torch.equal(batch["pixel_values"], torch.tensor(pixels).permute(2, 0, 1)[None] / 255)


def test_augmentation_draws_every_shift_and_both_sides():
    image = torch.arange(1.0, 31).reshape(1, 5, 6)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(image[0].numpy(), 2), (5, 6)).reshape(-1, 5, 6)
    wanted = {window[:, ::side].tobytes() for window in windows for side in (1, -1)}
    assert len(wanted) == 50 and {shifted_and_mirrored(image, np.random.default_rng(key)).numpy().tobytes() for key in range(1000)} == wanted


def test_columns_of_a_table():
    """Columns keep their order, what is missing is 0, and a category's bucket is the same in every process."""
    rows = [{"a": n, "b": None, "c": f"kind {n}", "d": None, "y": n / 2} for n in range(30)]
    batch = table(("b", "a"), {"c": 4, "d": 4}, "y", rows, [0] * 30)
    assert batch["numbers"].tolist() == [[0, n] for n in range(30)] and batch["labels"].tolist() == [n / 2 for n in range(30)]
    assert set(batch["categories"][:, 0].tolist()) == {1, 2, 3} and not batch["categories"][:, 1].any()
    assert table((), {"c": 1000}, "y", rows[:3], [0] * 3)["categories"].tolist() == [[887], [526], [763]]
