"""Images as model inputs: crops, values and labels.

Other tests cover transformers with our preprocessor_config.json, and data whose classes differ from
the model's classes.
"""

import io
import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from built_models import build_model
from cases import rows
from PIL import Image, ImageOps
from recipekit.architectures.lookup import with_labels
from recipekit.data.files import folder_classes
from recipekit.data.request import Request
from recipekit.model.small import EXAMPLE_INPUTS
from recipekit.model.small_files import Origin, collect_small_files
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.task import IGNORE
from recipekit.tasks.image_classification import (
    SHAPES,
    TASK,
    ImagePreprocessor,
    _sample_crop_box,
    draw_shape_image,
    published_image_processor,
)
from transformers import AutoImageProcessor, ViTConfig, ViTForImageClassification

CONFIG: dict[str, Any] = {
    "model_type": "vit",
    "image_size": 32,
    "id2label": {str(number): f"class {number}" for number in range(10)},
}


def pictures(config: dict[str, Any] | None = None, **fields) -> ImagePreprocessor:
    return TASK.processor(
        Request(**({"task": "image_classification", "dataset": "nobody/nothing"} | fields)),
        CONFIG | (config or {}),
    )


def photo(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Return an image of smooth colours that differ everywhere."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **more) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **more)
    return stream.getvalue()


def collated(
    rows: list[dict[str, Any] | None], keys: list[int] | None = None, **fields
) -> dict[str, torch.Tensor]:
    assert TASK.samples is not None
    return TASK.samples.collate(pictures(**fields), rows, keys)


def bytes_of(values: torch.Tensor) -> np.ndarray:
    """Return (H, W, C) integers from 0 to 255 for values that were normalised with 0.5 and 0.5."""
    pixels = (values.double().numpy().transpose(1, 2, 0) * 0.5 + 0.5) * 255
    assert np.abs(pixels - pixels.round()).max() < 1e-3
    return pixels.round().astype(np.uint8)


# Evaluation
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(100, 75), (31, 90), (36, 36), (5, 4)])
def test_an_evaluated_picture_is_the_middle_of_its_short_side(width, height):
    image = photo(width, height)
    for form in (
        encoded(image),
        {"bytes": encoded(image), "path": None},
        np.asarray(image),
        np.asarray(image).tolist(),
    ):
        values = collated([{"image": form, "label": 3}])
        assert (
            values["pixel_values"].shape == (1, 3, 32, 32)
            and values["pixel_values"].dtype == torch.float32
        )
        assert values["labels"].tolist() == [3] and values["labels"].dtype == torch.int64
        short = min(width, height)
        scaled = image.resize(
            (int(36 * width / short), int(36 * height / short)), Image.Resampling.BILINEAR
        )
        left, top = (scaled.width - 32) // 2, (scaled.height - 32) // 2
        assert (
            bytes_of(values["pixel_values"][0])
            == np.asarray(scaled)[top : top + 32, left : left + 32]
        ).all()


def test_pictures_of_any_form_have_the_channels_of_the_model(tmp_path):
    image = photo(40, 40)
    grey = collated([{"image": encoded(image), "label": 0}], config={"num_channels": 1})[
        "pixel_values"
    ]
    assert grey.shape == (1, 1, 32, 32)
    assert (
        bytes_of(grey[0])[:, :, 0]
        == np.asarray(
            image.convert("L").resize((36, 36), Image.Resampling.BILINEAR).crop((2, 2, 34, 34))
        )
    ).all()
    (tmp_path / "a.png").write_bytes(encoded(image))
    turned = Image.Exif()
    turned[0x0112] = 6  # rotated by a quarter turn
    expected = {
        "file": (tmp_path / "a.png", image),
        "path": ({"bytes": None, "path": str(tmp_path / "a.png")}, image),
        "grey": (encoded(image.convert("L")), image.convert("L")),
        "transparent": (encoded(image.convert("RGBA")), image),
        "palette": (encoded(image.convert("P"), "GIF"), image.convert("P")),
        "turned": (encoded(image, exif=turned), image.rotate(-90)),
        "one channel": (np.asarray(image.convert("L"))[:, :, None], image.convert("L")),
    }
    for name, (form, wanted) in expected.items():
        found = bytes_of(collated([{"image": form, "label": 0}])["pixel_values"][0])
        wanted = np.asarray(
            wanted.convert("RGB").resize((36, 36), Image.Resampling.BILINEAR).crop((2, 2, 34, 34))
        )
        assert (found == wanted).all(), name


def test_rows_that_only_fill_up():
    batch = collated([None, {"image": np.full((4, 4), 255), "label": 9}, None], [0, 1, 2])
    assert batch["labels"].tolist() == [IGNORE, 9, IGNORE] and TASK.count(batch).tolist() == [
        0,
        1,
        0,
    ]
    assert not batch["pixel_values"][[0, 2]].any() and (batch["pixel_values"][1] == 1).all()
    assert collated([None, None])["pixel_values"].shape == (2, 3, 32, 32)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"image": b"GIF89a nothing", "label": 0},
            "is not a readable image: cannot identify image file",
        ),
        ({"image": encoded(photo(64, 64))[:2000], "label": 0}, "is not a readable image: "),
        (
            {"image": encoded(photo(64, 64), "JPEG")[:700], "label": 0},
            "is not a readable image: image file is truncated",
        ),
        (
            {"image": encoded(Image.fromarray(np.zeros((4, 4), np.uint16))), "label": 0},
            "more than 8 bits per channel",
        ),
        ({"image": None, "label": 0}, "is not a readable image: NoneType"),
        ({"image": [[300]], "label": 0}, "pixels must be whole numbers from 0 to 255"),
        ({"image": [[3]], "label": 10}, "class 10 is not one of the model's classes, 0 to 9"),
        ({"image": [[3]], "label": -1}, "class -1 is not one of the model's classes, 0 to 9"),
        ({"image": [[3]], "label": None}, "must be a class number, not NoneType 'None'"),
        ({"image": [[3]], "label": "cat"}, "must be a class number, not str 'cat'"),
    ],
)
def test_what_cannot_be_used(row, says):
    for keys in (None, [0, 1]):
        with pytest.raises((ValueError, TypeError)) as error:
            collated([{"image": [[1]], "label": 1}, row], keys)
        assert says in str(error.value)


@pytest.mark.filterwarnings("ignore")  # Pillow warns about odd metadata
def test_any_broken_file_is_a_value_error():
    """400 files have a few wrong bytes or are truncated.

    Pillow's decoders raise many different kinds of errors.
    """
    draw = np.random.default_rng(0)
    broken = 0
    for number in range(400):
        kind = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP")[number % 6]
        content = bytearray(encoded(photo(24, 18, number), kind))
        for place in draw.integers(0, len(content), 1 + number % 8):
            content[place] = draw.integers(256)
        try:
            collated([{"image": bytes(content[: len(content) - 40 * (number % 5)]), "label": 0}])
        except ValueError as error:
            broken += 1
            assert str(error).startswith("is not a readable image: ")
    assert broken > 100


# Training
# --------------------------------------------------------------------------------------------------


def test_a_crop_is_what_pillow_cuts_and_is_mirrored_every_second_time():
    image, mirrored, boxes = photo(100, 75), 0, set()
    keys = list(range(60))
    batch = collated([{"image": encoded(image), "label": 0}] * 60, keys)["pixel_values"]
    for key in keys:
        draw = np.random.default_rng(key)
        box = _sample_crop_box(100, 75, draw)
        flip = draw.random() < 0.5
        wanted = image.resize((32, 32), Image.Resampling.BILINEAR, box)
        assert (
            bytes_of(batch[key]) == np.asarray(ImageOps.mirror(wanted) if flip else wanted)
        ).all()
        mirrored += flip
        boxes.add(box)
    assert 20 <= mirrored <= 40 and len(boxes) == 60
    again = collated([{"image": encoded(image), "label": 0}], [7])["pixel_values"][0]
    assert torch.equal(again, batch[7])


def test_crops_have_any_size_shape_and_place_within_the_picture():
    """Areas are uniform from 8 to 100 %, and aspect ratios range from 3:4 to 4:3.

    A box that does not fit is sampled again.
    """
    boxes = np.array(
        [_sample_crop_box(400, 400, np.random.default_rng(key)) for key in range(3000)]
    )
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert (boxes >= 0).all() and (boxes <= 400).all()
    areas, ratios = width * height / 160_000, np.log(width / height)
    # Large crops fit less often.
    assert 0.078 < areas.min() < 0.085 and areas.max() > 0.95 and 0.5 < np.mean(areas < 0.54) < 0.6
    assert (
        -math.log(4 / 3) - 0.02 < ratios.min() < -0.25
        and 0.25 < ratios.max() < math.log(4 / 3) + 0.02
        and abs(ratios.mean()) < 0.02
    )
    for side in (
        boxes[:, 0] / np.maximum(1, 400 - width),
        boxes[:, 1] / np.maximum(1, 400 - height),
    ):
        assert abs(side[(width < 390) & (height < 390)].mean() - 0.5) < 0.03
    # If no box fits, the largest crop with an allowed shape is used.
    assert _sample_crop_box(1000, 2, np.random.default_rng(0)) == (498, 0, 501, 2)
    assert _sample_crop_box(2, 1000, np.random.default_rng(0)) == (
        0,
        498,
        2,
        501,
    ) and _sample_crop_box(1, 1, np.random.default_rng(0)) == (0, 0, 1, 1)


def test_without_augmentation_a_trained_picture_is_like_an_evaluated_one():
    row = {"image": encoded(photo(100, 75)), "label": 0}
    assert torch.equal(
        collated([row], [5], augment="none")["pixel_values"], collated([row])["pixel_values"]
    )
    assert not torch.equal(collated([row], [5])["pixel_values"], collated([row])["pixel_values"])


@pytest.mark.parametrize("threads", [2, 7])
def test_threads_change_no_bit(threads):
    rows: list[dict[str, Any] | None] = [
        {"image": encoded(photo(90 + number, 70, number), "JPEG"), "label": number % 10}
        for number in range(40)
    ]
    rows[7] = None
    one, more = (collated(rows, list(range(40)), threads=count) for count in (1, threads))
    assert torch.equal(one["pixel_values"], more["pixel_values"]) and torch.equal(
        one["labels"], more["labels"]
    )


def test_a_picture_for_a_model_that_takes_no_square():
    """Height and width must not be swapped in crops, the evaluation and saved files.

    Each channel has a separate mean and deviation.
    """
    made = pictures({"image_size": [24, 40]})
    image, mirrored = photo(100, 75), set()
    assert made.size == (24, 40) and TASK.samples is not None
    batch = TASK.samples.collate(made, [{"image": encoded(image), "label": 0}] * 8, list(range(8)))[
        "pixel_values"
    ]
    assert batch.shape == (8, 3, 24, 40)
    for key in range(8):
        draw = np.random.default_rng(key)
        wanted = image.resize((40, 24), Image.Resampling.BILINEAR, _sample_crop_box(100, 75, draw))
        mirrored.add(flip := draw.random() < 0.5)
        assert (
            bytes_of(batch[key]) == np.asarray(ImageOps.mirror(wanted) if flip else wanted)
        ).all()
    assert mirrored == {True, False}
    evaluated = TASK.samples.collate(made, [{"image": encoded(image), "label": 0}], None)[
        "pixel_values"
    ][0]
    assert (
        bytes_of(evaluated) == np.asarray(image.resize((40, 24), Image.Resampling.BILINEAR))
    ).all()
    own = replace(made, mean=(0.1, 0.2, 0.4), std=(0.5, 0.25, 2.0))
    values = TASK.samples.collate(
        own, [{"image": np.full((3, 5, 3), (51, 102, 204), np.uint8), "label": 0}], None
    )["pixel_values"][0]
    assert [float(channel.mean()) for channel in values] == pytest.approx(
        [(0.2 - 0.1) / 0.5, (0.4 - 0.2) / 0.25, (0.8 - 0.4) / 2.0], rel=1e-5
    )


def test_a_crop_is_wide_and_high_as_it_is_drawn():
    """The formula samples the area and the ratio first, then the left and the top position."""
    for key in range(20):
        draw, again = np.random.default_rng(key), np.random.default_rng(key)
        left, top, right, bottom = _sample_crop_box(120, 95, draw)
        while True:
            area = 120 * 95 * again.uniform(0.08, 1.0)
            ratio = math.exp(again.uniform(math.log(3 / 4), math.log(4 / 3)))
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if across <= 120 and down <= 95:
                break
        assert (right - left, bottom - top) == (across, down)
        assert (left, top) == (again.integers(120 - across + 1), again.integers(95 - down + 1))


@pytest.mark.parametrize(("size", "expected"), [([16, 24], (2, 3, 16, 24)), (20, (2, 3, 20, 20))])
def test_an_example_picture_has_the_form_of_the_models(size, expected):
    assert EXAMPLE_INPUTS["pixel_values"](SimpleNamespace(image_size=size)).shape == expected  # type: ignore[arg-type]
    assert EXAMPLE_INPUTS["pixel_values"](
        SimpleNamespace(image_size=size, num_channels=1)
    ).shape == (
        2,
        1,
        *expected[2:],
    )  # type: ignore[arg-type]


# Preprocessing for the model
# ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [{}, {"num_channels": 1}, {"image_size": [32, 48]}], ids=["square", "grey", "wide"]
)
def test_transformers_makes_the_same_of_what_is_exported(tmp_path, config):
    """transformers uses its Pillow backend, which does not need torchvision."""
    (tmp_path / "model").mkdir()
    own = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.23, 0.22, 0.25], "resample": 3}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(own))
    made = pictures(config, model=str(tmp_path / "model"))
    made.save_pretrained(tmp_path)
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert TASK.samples is not None
    for width, height in ((100, 75), (33, 80), (20, 20)):
        image = photo(width, height, mode="L" if config.get("num_channels") == 1 else "RGB")
        wanted = theirs(image, return_tensors="pt")["pixel_values"]
        found = TASK.samples.collate(made, [{"image": encoded(image), "label": 0}], None)[
            "pixel_values"
        ]
        assert found.shape == wanted.shape and (found - wanted).abs().max() < 1e-5
    again = pictures(config, model=str(tmp_path))
    assert (again.size, again.mean, again.std, again.resample) == (
        made.size,
        made.mean,
        made.std,
        made.resample,
    )


@pytest.mark.parametrize("nested", [False, True], ids=["own file", "in processor_config.json"])
def test_keys_of_the_models_processor_that_change_no_picture_are_exported(tmp_path, nested):
    own = {
        "image_mean": [0.1, 0.2, 0.3],
        "served_by": {"a": [1]},
        "crop_pct": 0.9,
        "do_pad": True,
        "pad_size": 64,
    }
    own |= {
        "image_processor_type": "ConvNextImageProcessor",
        "feature_extractor_type": "ConvNextFeatureExtractor",
    }
    file, content = (
        ("processor_config.json", {"image_processor": own})
        if nested
        else ("preprocessor_config.json", own)
    )
    (tmp_path / file).write_text(json.dumps(content))
    made = pictures(model=str(tmp_path))
    assert made.mean == (0.1, 0.2, 0.3)
    (tmp_path / "hf").mkdir()
    made.save_pretrained(tmp_path / "hf")
    found = json.loads((tmp_path / "hf" / "preprocessor_config.json").read_text())
    assert (
        found["served_by"] == {"a": [1]}
        and found["crop_pct"] == 0.9
        and found["image_processor_type"] == "ViTImageProcessor"
    )
    assert not {"do_pad", "pad_size", "feature_extractor_type"} & found.keys()
    config = CONFIG | {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = Recipe(model="none", init="random", task="image_classification", wandb=False)
    built = build_model(
        recipe, config, None, {"zero_optimization": {"stage": 0}}, torch.device("cpu")
    )
    exported = collect_small_files(
        built, config, made, torch.float32, Origin(tmp_path), ()
    ).contents
    assert json.loads(exported["preprocessor_config.json"]) == found
    if nested:
        assert json.loads(exported["processor_config.json"]) == {"image_processor": found}


@dataclass(frozen=True)
class PublishedSize:
    """A preprocessor_config.json, changes of config.json, and a crop's size and mean."""

    own: dict[str, Any] | None
    config: dict[str, Any]
    size: tuple[int, int]
    mean: Any


@pytest.mark.parametrize(
    ("own", "config", "size", "mean"),
    rows(
        PublishedSize(own=None, config={}, size=(32, 32), mean=0.5),
        PublishedSize(
            own={"size": 48, "image_mean": [0.4] * 3},
            config={"image_size": None},
            size=(48, 48),
            mean=0.4,
        ),
        PublishedSize(
            own={"size": {"height": 40, "width": 48}},
            config={"image_size": None},
            size=(40, 48),
            mean=0.5,
        ),
        PublishedSize(
            own={"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}},
            config={"image_size": None},
            size=(224, 224),
            mean=0.5,
        ),
        PublishedSize(
            own={"size": {"shortest_edge": 224}, "do_normalize": False},
            config={"image_size": None},
            size=(224, 224),
            mean=0.0,
        ),
        # shrunk by --tiny
        PublishedSize(
            own={"size": 224, "image_mean": [0.1, 0.2, 0.3]},
            config={},
            size=(32, 32),
            mean=[0.1, 0.2, 0.3],
        ),
        PublishedSize(
            own={"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}},
            config={},
            size=(32, 32),
            mean=0.5,
        ),
        PublishedSize(
            own={"image_mean": [0.1, 0.2, 0.3]},
            config={"num_channels": 1},
            size=(32, 32),
            mean=pytest.approx(0.2),
        ),
        PublishedSize(own={}, config={"image_size": None}, size=(224, 224), mean=0.5),
        PublishedSize(own=None, config={"image_size": [16, 24]}, size=(16, 24), mean=0.5),
    ),
)
def test_size_and_mean_are_those_that_the_model_publishes(tmp_path, own, config, size, mean):
    if own is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    made = pictures(config, model=str(tmp_path))
    assert made.size == size and list(made.mean) == (
        mean if isinstance(mean, list) else [mean] * made.channels
    )


def test_a_model_of_the_hub_is_looked_up_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--nobody--model" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("abc")
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.25] * 3}))
    assert pictures(model="nobody/model").mean == (0.25,) * 3
    (folder / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"preprocessor_config.json: cannot be read: "):
        pictures(model="nobody/model")


def test_the_files_of_main_are_taken_and_the_processors_own_first(tmp_path, monkeypatch):
    """With random weights, the cache is ignored, but a folder is still read."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folders = [tmp_path / "models--nobody--model" / "snapshots" / name for name in ("b", "c", "a")]
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True)
        (folder / "preprocessor_config.json").write_text(
            json.dumps({"image_mean": [number / 4] * 3})
        )
        os.utime(folder, (9 - number, 9 - number))
    refs = folders[0].parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("a")
    assert (
        published_image_processor("nobody/model", "pretrained") == {"image_mean": [0.5] * 3}
        and published_image_processor("nobody/model", "random") == {}
    )
    (folders[1] / "processor_config.json").write_text(
        json.dumps({"image_processor": {"image_mean": [0.125] * 3}})
    )
    assert published_image_processor("nobody/model", "pretrained") == {"image_mean": [0.5] * 3}
    (folders[2] / "processor_config.json").write_text(
        json.dumps({"image_processor": {"image_mean": [0.75] * 3}})
    )
    assert (
        published_image_processor("nobody/model", "pretrained")
        == published_image_processor(str(folders[2]), "random")
        == {"image_mean": [0.75] * 3}
    )
    (folders[2] / "processor_config.json").write_text('{"processor_class": "X"}')
    assert published_image_processor(str(folders[2]), "random") == {"image_mean": [0.5] * 3}


LEFT_OUT = (
    "do_pad",
    "pad_size",
    "default_to_square",
    "data_format",
    "input_data_format",
    "image_seq_length",
    "return_tensors",
    "device",
    "auto_map",
)


def test_only_keys_that_no_class_acts_on_are_carried(tmp_path):
    own = {
        **dict.fromkeys((*LEFT_OUT, "feature_extractor_type"), 3),
        "do_resize": False,
        "resample": 3,
        "x_pad_size": 5,
        "size": 9,
    }
    made = replace(pictures(), published=own)
    made.save_pretrained(tmp_path)
    found = json.loads((tmp_path / "preprocessor_config.json").read_text())
    replace(made, published={}).save_pretrained(tmp_path)
    assert found == json.loads((tmp_path / "preprocessor_config.json").read_text()) | {
        "x_pad_size": 5
    }


@pytest.mark.parametrize("own", ["[]", "3", '{"image_processor": []}', '{"image_processor": "x"}'])
def test_a_processor_config_of_another_form_is_refused(tmp_path, own):
    (tmp_path / "processor_config.json").write_text(own)
    with pytest.raises(ConfigError, match=r"processor_config\.json: .* not a JSON object"):
        pictures(model=str(tmp_path))


def test_an_image_processor_that_is_null_counts_as_missing(tmp_path):
    (tmp_path / "processor_config.json").write_text('{"image_processor": null}')
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.25] * 3}))
    assert pictures(model=str(tmp_path)).mean == (0.25,) * 3


def test_a_model_of_other_channels_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"requires images with 4 channels, but images are read as grey \(1\) or color \(3\)",
    ):
        pictures({"num_channels": 4})


# Classes
# --------------------------------------------------------------------------------------------------


def folder_of(folder: Path, classes: int) -> Path:
    for number in range(classes):
        (folder / f"class {number}").mkdir(parents=True)
        (folder / f"class {number}" / "a.png").write_bytes(encoded(photo(4, 4)))
    return folder


def test_classes_that_the_model_does_not_have_are_refused_before_it_is_built(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"--dataset builtin: has 10 classes, but a/b has 2 labels\. Use --num_labels 10",
    ):
        pictures({"id2label": None}, model="a/b", dataset="builtin")
    assert pictures({"id2label": None, "num_labels": 12}, dataset="builtin").num_labels == 12
    data = folder_of(tmp_path / "data", 3)
    with pytest.raises(
        ConfigError,
        match=r"data: has 3 folders of classes, but a/b has 10 labels\. Use --num_labels 3",
    ):
        pictures(model="a/b", dataset=str(data))
    assert (
        pictures(
            {"id2label": {"0": "a", "1": "b", "2": "c"}}, dataset=f"a={data}@1; b={data}/*/*.png@2"
        ).num_labels
        == 3
    )
    # The problem is reported when the data are opened, on all ranks.
    assert pictures(dataset=str(tmp_path / "none")).num_labels == 10
    other = folder_of(tmp_path / "other", 2)
    (other / "zebra").mkdir()
    (other / "zebra" / "a.png").write_bytes(encoded(photo(4, 4)))
    with pytest.raises(
        ConfigError,
        match=(
            r"other: has a class zebra, which another folder of the mixture does not have\. Give"
            r" all folders the same classes"
        ),
    ):
        pictures({"id2label": {"0": "a", "1": "b", "2": "c"}}, dataset=f"a={data}@1; b={other}@2")


def test_a_new_head_has_the_names_of_the_folders(tmp_path):
    config = {"num_labels": 10, "id2label": {"0": "old"}, "label2id": {"old": 0}, "hidden_size": 8}
    classes = folder_classes(str(folder_of(tmp_path / "data", 3)))
    named = with_labels(config, 3, classes)
    assert named == {
        "hidden_size": 8,
        "id2label": {"0": "class 0", "1": "class 1", "2": "class 2"},
        "label2id": {"class 0": 0, "class 1": 1, "class 2": 2},
    }
    assert (
        with_labels(config, 4, classes) == {"hidden_size": 8, "num_labels": 4}
        and with_labels(config, 0, classes) is config
    )
    assert (
        folder_classes("builtin")
        == folder_classes(str(tmp_path / "none"))
        == folder_classes("a/b")
        == []
    )


def test_classes_that_the_model_numbers_otherwise_are_refused(tmp_path):
    data = str(folder_of(tmp_path / "data", 3))
    assert (
        pictures(
            {"id2label": {"2": "class 2", "0": "class 0", "1": "class 1"}}, dataset=data
        ).num_labels
        == 3
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"numbers its folders by name, class 0 0, and in the config.json of a/b class 1 has"
            r" this number\. Rename the folders"
        ),
    ):
        pictures(
            {"id2label": {"0": "class 1", "1": "class 0", "2": "class 2"}},
            model="a/b",
            dataset=data,
        )


def test_labels_are_counted_as_transformers_does():
    for config in (
        {},
        {"num_labels": 7},
        {"id2label": {"0": "a", "1": "b", "2": "c"}},
        {"num_labels": 3, "id2label": {"0": "a", "1": "b", "2": "c"}},
    ):
        assert pictures({"id2label": None} | config).num_labels == ViTConfig(**config).num_labels


# The loss and the metrics of an evaluation
# ----------------------------------------------------------------------------


def test_accuracies_are_those_of_the_rows_with_a_class():
    logits = torch.tensor(
        [
            [9.0, 1, 2, 3, 4, 5, 6],
            [1, 2, 3, 4, 5, 6, 7],
            [0, 1, 2, 3, 4, 5, 9],
            [5, 4, 3, 2, 1, 0, 9],
        ]
    )
    assert TASK.measure(logits, {"labels": torch.tensor([0, 5, 0, IGNORE])}).tolist() == [1, 2]
    # The labels have ranks six, five and one among the logits.
    assert TASK.measure(logits[[1, 1, 1]], {"labels": torch.tensor([1, 2, 6])}).tolist() == [1, 2]
    assert TASK.measures == ("accuracy", "top5_accuracy")
    # Fewer than five classes.
    assert TASK.measure(logits[:, :2], {"labels": torch.tensor([0, 1, 0, IGNORE])}).tolist() == [
        2,
        3,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_any_dtype_takes_the_pictures(dtype):
    model = ViTForImageClassification(
        ViTConfig(
            image_size=32,
            patch_size=16,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            num_labels=10,
        )
    ).to(dtype)
    batch = collated([draw_shape_image(0), draw_shape_image(1), None], [0, 1, 2])
    logits = TASK.forward(model, batch)
    assert logits.shape == (3, 10) and logits.dtype == dtype
    rows = TASK.loss(logits, batch, True)
    assert (
        rows.dtype == torch.float32
        and rows[2] == 0
        and float(rows.detach().sum())
        == pytest.approx(float(TASK.loss(logits, batch, False).detach()))
    )


# The built-in images
# ------------------------------------------------------------------------------------------------


def test_builtin_pictures_are_drawn_from_their_number():
    rows = [draw_shape_image(number) for number in range(200)]
    assert [row["label"] for row in rows] == [number % 10 for number in range(200)]
    assert len({row["image"].tobytes() for row in rows}) == 200 and all(
        (draw_shape_image(n)["image"] == rows[n]["image"]).all() for n in (0, 77)
    )
    for row in rows:
        bright = (row["image"] >= 128).all(2)
        assert (
            row["image"].shape == (32, 32, 3)
            and row["image"].dtype == np.uint8
            and 25 < bright.sum() < 600
        )
    shapes = {
        label: np.mean(
            [(row["image"] >= 128).all(2).sum() for row in rows if row["label"] == label]
        )
        for label in range(10)
    }
    assert len(SHAPES) == 10 and shapes[0] > shapes[1] and shapes[2] > shapes[3]


def test_a_mirrored_shape_is_of_the_same_class():
    """A mirrored shape looks the same, although the first and last stripe may differ in width."""
    for number in (number for number in range(100) if SHAPES[number % 10] != "columns"):
        bright = (draw_shape_image(number)["image"] >= 128).all(2)
        across, down = np.flatnonzero(bright.any(0)), np.flatnonzero(bright.any(1))
        shape = bright[down[0] : down[-1] + 1, across[0] : across[-1] + 1]
        assert np.mean(shape != shape[:, ::-1]) < 0.2, SHAPES[number % 10]
