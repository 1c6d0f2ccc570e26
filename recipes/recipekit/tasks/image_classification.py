"""An image classifier learns the class of each picture, from crops of it drawn anew each epoch."""

import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.nn.functional import cross_entropy

from ..data.files import folder_classes
from ..data.mixture import domains_of
from ..data.pictures import class_number, opened
from ..data.request import Request
from ..model.batch_norm import check_norms
from ..model.config_errors import WRONG_VALUE
from ..model.empty import empty_model
from ..model.small import logits_of, small_copy
from ..spec.hub import snapshot_of
from ..spec.refusal import Refusal, refuse
from ..spec.task import IGNORE, MicroBatch, Row, Samples, Task
from ..spec.task_specs import TASKS

# of a crop: its share of the picture, and width / height (Szegedy et al., CVPR 2015, section 6)
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
TRIES = 10  # crops drawn until one fits
MARGIN = 256, 224  # an evaluated picture is so much larger than what is cut out of its middle
PREPROCESSOR = "preprocessor_config.json"
# may hold the former as image_processor, which transformers then prefers
PROCESSOR = "processor_config.json"
# Further keys that the class of the exported processor acts on (ViTImageProcessor, transformers
# 5.22.2).
ACTED_ON = (
    "do_pad",
    "pad_size",
    "default_to_square",
    "data_format",
    "input_data_format",
    "image_seq_length",
    "return_tensors",
    "device",
)
OTHER_CLASS = ("feature_extractor_type", "auto_map")  # name classes that prepare pictures otherwise
NUM_DRAWN, DRAWN_SIZE = 8000, 32


@dataclass(frozen=True)
class Pictures:
    """The conversion of pictures into a model's inputs.

    `save_pretrained` writes the conversion of an evaluated picture in transformers' format, with
    the keys of the model's `own` file that do not change it.
    """

    size: tuple[int, int]  # (H, W)
    channels: int  # 1 or 3
    mean: tuple[float, ...]  # of values from 0 to 1, for each channel
    std: tuple[float, ...]
    resample: Image.Resampling
    num_labels: int
    augment: bool
    pool: ThreadPoolExecutor
    own: Mapping[str, Any] = field(default_factory=dict)

    def save_pretrained(self, folder: str | Path) -> None:
        height, width = self.size
        config: dict[str, Any] = {
            "image_processor_type": "ViTImageProcessor",
            "do_convert_rgb": self.channels == 3,
            "do_resize": True,
            "size": (
                {"shortest_edge": shortest_edge(height)}
                if height == width
                else {"height": height, "width": width}
            ),
            "resample": int(self.resample),
            "do_center_crop": height == width,
            "crop_size": {"height": height, "width": width},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }
        carried = {
            key: value for key, value in self.own.items() if key not in (*ACTED_ON, *OTHER_CLASS)
        }
        Path(folder, PREPROCESSOR).write_text(json.dumps(carried | config, indent=2) + "\n")


def processor(request: Request, model_config: dict[str, Any]) -> Pictures:
    """Makes the processor of a model: mean and deviation from its `preprocessor_config.json` where
    its folder has one, else 0.5.

    Its size is that of config.json, which `--tiny` shrinks, else of the former file. Raises
    `Refusal` for a model that takes other than grey or coloured pictures, and for data of more
    classes than it has labels.
    """
    own, tower = (
        published(request.model, request.init, request.model_revision),
        model_config.get("vision_config") or model_config,
    )
    channels = tower.get("num_channels", 3)
    if channels not in (1, 3):
        raise refuse(
            f"model = {request.model}",
            f"requires images with {channels} channels, but images are read as grey (1) or"
            " color (3)",
            "use another model",
        )
    normalised = own.get("do_normalize", True)
    mean, std = (
        _each(own.get(name, 0.5) if normalised else plain, channels)
        for name, plain in (("image_mean", 0.0), ("image_std", 1.0))
    )
    return Pictures(
        size=_size(tower.get("image_size") or own.get("crop_size") or own.get("size") or 224),
        channels=channels,
        mean=mean,
        std=std,
        resample=Image.Resampling(own.get("resample", Image.Resampling.BILINEAR)),
        num_labels=check_classes(request, model_config),
        augment=request.augment != "none",
        pool=ThreadPoolExecutor(request.threads, "pictures"),
        own=own,
    )


def identity(pictures: Pictures, task: str) -> dict[str, Any]:
    """Return the conversion of pictures as a part of a data stream's identity."""
    mean, std = map(list, (pictures.mean, pictures.std))
    return {"pictures": [*pictures.size, pictures.channels, int(pictures.resample), mean, std]}


def published(model: str, init: str, revision: str = "") -> dict[str, Any]:
    """Return the published image processor from a folder or the local cache, or {}.

    With random weights nothing is downloaded, and what the cache of one host may hold is not looked
    at.
    """
    cached = snapshot_of(model, revision) if init == "pretrained" else None
    folder = Path(model) if Path(model).is_dir() else cached
    names = [folder / name for name in (PROCESSOR, PREPROCESSOR)] if folder else []
    file = None
    try:
        for file in filter(Path.exists, names):
            found = json.loads(file.read_bytes())
            own = (
                found.get("image_processor")
                if file.name == PROCESSOR and isinstance(found, dict)
                else found
            )
            if own is None and file.name == PROCESSOR:
                continue
            if not isinstance(own, dict):
                raise ValueError("it or its image_processor is not a JSON object")
            return own
        return {}
    except (OSError, ValueError) as error:
        raise refuse(
            str(file),
            f"cannot be read: {error}",
            "download the model again, or delete the file. Without it, 0.5 is subtracted",
        ) from error


def _each(value: Any, channels: int) -> tuple[float, ...]:
    return (
        tuple(map(float, value))
        if isinstance(value, list) and len(value) == channels
        else (float(np.mean(value)),) * channels
    )


def _size(value: Any) -> tuple[int, int]:
    """Reads (H, W) in the forms in which models and processors publish it."""
    if isinstance(value, dict):
        value = [value["height"], value["width"]] if "height" in value else value["shortest_edge"]
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def num_labels(model_config: dict[str, Any]) -> int:
    """Counts the classes of a model as transformers 5.22 does (PreTrainedConfig.__post_init__)."""
    return len(model_config.get("id2label") or {}) or model_config.get("num_labels") or 2


def check_classes(request: Request, model_config: dict[str, Any]) -> int:
    """Counts the model's classes.

    Raises `Refusal` for data whose classes are known before they are read and are not the model's.
    """
    labels, named = (
        num_labels(model_config),
        {int(number): name for number, name in (model_config.get("id2label") or {}).items()},
    )
    first: list[str] = []
    for domain in domains_of(request.dataset, request.subset):
        dataset = domain.dataset
        where, classes = (
            f"--dataset {dataset}",
            folder_classes(dataset, request.split, domain.subset),
        )
        if dataset == "builtin" and labels < len(SHAPES):
            raise refuse(
                where,
                f"has {len(SHAPES)} classes, but {request.model} has {labels} labels",
                f"use --num_labels {len(SHAPES)}",
            )
        if classes and len(classes) != labels:
            raise refuse(
                where,
                f"has {len(classes)} folders of classes, but {request.model} has {labels} labels",
                f"use --num_labels {len(classes)}",
            )
        if classes and classes != (first := first or classes):
            odd = next(name for name in classes if name not in first)
            raise refuse(
                where,
                f"has a class {odd}, which another folder of the mixture does not have",
                "give all folders the same classes",
            )
        wrong = (
            [number for number, name in enumerate(classes) if named.get(number) != name]
            if {*named.values()} == {*classes}
            else []
        )
        if wrong:
            rule = (
                f"numbers its folders by name, {classes[wrong[0]]} {wrong[0]}, and in the"
                f" config.json of {request.model} {named.get(wrong[0])} has this number"
            )
            raise refuse(where, rule, "rename the folders so that their order is the model's")
    return labels


# Micro-batches
# --------------------------------------------------------------------------------------------------


def collate(pictures: Pictures, rows: list[Row | None], keys: list[int] | None) -> MicroBatch:
    """Makes {"pixel_values": (B, C, H, W) fp32, "labels": (B,) int64}. Raises ValueError or
    TypeError for what is no picture, or no class of the model.
    """
    out = np.zeros((len(rows), pictures.channels, *pictures.size), dtype=np.float32)
    labels = [IGNORE if row is None else _label(row["label"], pictures.num_labels) for row in rows]

    def fill(number: int) -> None:
        row = rows[number]
        if row is not None:
            draw = (
                np.random.default_rng(keys[number])
                if keys is not None and pictures.augment
                else None
            )
            image = opened(row["image"]).convert("RGB" if pictures.channels == 3 else "L")
            image = drawn_crop(image, pictures, draw) if draw else middle(image, pictures)
            normalise(image, pictures, out[number])

    # raises what a thread raised, the first row's first
    for _ in pictures.pool.map(fill, range(len(rows))):
        pass
    return {"pixel_values": torch.from_numpy(out), "labels": torch.tensor(labels)}


def _label(value: Any, labels: int) -> int:
    number = class_number(value)
    if not 0 <= number < labels:
        raise ValueError(
            f"class {number} is not one of the model's classes, 0 to {labels - 1}. Set --num_labels"
            " to the number of classes in the data"
        )
    return number


def drawn_crop(image: Image.Image, pictures: Pictures, draw: np.random.Generator) -> Image.Image:
    """Cuts out a part of random place, size and shape, scaled to the model's size, and mirrors it
    every second time.
    """
    height, width = pictures.size
    box = _box(image.width, image.height, draw)
    image = image.resize((width, height), pictures.resample, box)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw.random() < 0.5 else image


def _box(width: int, height: int, draw: np.random.Generator) -> tuple[int, int, int, int]:
    """Draws (left, top, right, bottom) of a crop; the largest one in the middle if none of the
    first ones fits into the picture.
    """
    for _ in range(TRIES):
        area = width * height * draw.uniform(*AREA)
        ratio = math.exp(draw.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        across, down = (
            max(1, round(math.sqrt(area * ratio))),
            max(1, round(math.sqrt(area / ratio))),
        )
        if across <= width and down <= height:
            left, top = (
                int(draw.integers(width - across + 1)),
                int(draw.integers(height - down + 1)),
            )
            return left, top, left + across, top + down
    across, down = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def middle(image: Image.Image, pictures: Pictures) -> Image.Image:
    """Scales a picture so that a little more than its middle remains, and cuts that out; scales it
    whole where the model's size is no square.
    """
    height, width = pictures.size
    if height != width:
        return image.resize((width, height), pictures.resample)
    short = shortest_edge(height)
    scaled = [
        short if side == min(image.size) else int(short * side / min(image.size))
        for side in image.size
    ]
    image = image.resize((scaled[0], scaled[1]), pictures.resample)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def shortest_edge(size: int) -> int:
    return size * MARGIN[0] // MARGIN[1]


def normalise(image: Image.Image, pictures: Pictures, out: np.ndarray) -> None:
    """Writes a picture's values, less the mean and by the deviation, into `out`, (C, H, W) fp32."""
    values = np.asarray(image).reshape(*pictures.size, pictures.channels)
    for channel, (mean, std) in enumerate(zip(pictures.mean, pictures.std, strict=True)):
        np.multiply(
            values[:, :, channel], np.float32(1 / (255 * std)), out=out[channel], dtype=np.float32
        )
        out[channel] -= np.float32(mean / std)


# The built-in pictures
# --------------------------------------------------------------------------------------------

# mirrored, each stays what it is
SHAPES = (
    "disc",
    "ring",
    "square",
    "frame",
    "triangle",
    "wedge",
    "plus",
    "cross",
    "rows",
    "columns",
)


def drawn(number: int) -> Row:
    """Draws a picture, (32, 32, 3): one of ten bright shapes of any place, size and colour on a
    dark noise.
    """
    draw = np.random.default_rng(number)
    label = number % len(SHAPES)
    image = Image.fromarray(draw.integers(0, 96, (DRAWN_SIZE, DRAWN_SIZE, 3), dtype=np.uint8))
    size = int(draw.integers(12, 25))
    left, top = draw.integers(1, DRAWN_SIZE - size, 2).tolist()
    _shape(
        ImageDraw.Draw(image),
        SHAPES[label],
        left,
        top,
        size,
        tuple(draw.integers(128, 256, 3).tolist()),
    )
    return {"image": np.asarray(image), "label": label}


def _shape(
    pen: ImageDraw.ImageDraw, shape: str, left: int, top: int, size: int, colour: tuple[int, ...]
) -> None:
    right, bottom, middle = left + size - 1, top + size - 1, left + size // 2
    line, third = max(2, size // 6), size // 3  # widths of a line and of a bar of the plus
    box = (left, top, right, bottom)
    if shape in ("disc", "ring"):
        pen.ellipse(box, fill=colour if shape == "disc" else None, outline=colour, width=line)
    elif shape in ("square", "frame"):
        pen.rectangle(box, fill=colour if shape == "square" else None, outline=colour, width=line)
    elif shape in ("triangle", "wedge"):
        base, tip = (bottom, top) if shape == "triangle" else (top, bottom)
        pen.polygon([(left, base), (right, base), (middle, tip)], fill=colour)
    elif shape == "plus":
        pen.rectangle((left + third, top, right - third, bottom), fill=colour)
        pen.rectangle((left, top + third, right, bottom - third), fill=colour)
    elif shape == "cross":
        pen.line((left, top, right, bottom), fill=colour, width=line)
        pen.line((left, bottom, right, top), fill=colour, width=line)
    else:
        for stripe in _stripes(box, line, across=shape == "rows"):
            pen.rectangle(stripe, fill=colour)


def _stripes(
    box: tuple[int, int, int, int], width: int, across: bool
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the boxes of stripes with gaps of the same width, in rows or in columns."""
    left, top, right, bottom = box
    for start in range(0, right - left + 1, 2 * width):
        end = start + width - 1
        if across:
            yield left, top + start, right, min(bottom, top + end)
        else:
            yield left + start, top, min(right, left + end), bottom


# What is learned
# --------------------------------------------------------------------------------------------------


def forward(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Computes the logits, (B, classes)."""
    return model(pixel_values=batch["pixel_values"].to(next(model.parameters()).dtype)).logits


def loss(logits: torch.Tensor, batch: MicroBatch, by_row: bool) -> torch.Tensor:
    """Sums the cross-entropy over the rows that have a class, in fp32: () of the micro-batch, or
    (B,).
    """
    return cross_entropy(
        logits.float(), batch["labels"], ignore_index=IGNORE, reduction="none" if by_row else "sum"
    )


def count(batch: MicroBatch) -> torch.Tensor:
    """Counts 1 for a row that has a class, (B,) int64."""
    return (batch["labels"] != IGNORE).long()


@torch.no_grad()
def measure(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Counts the rows whose class is the likeliest one, and those where it is among the first five,
    (2,) fp32.
    """
    # (B, 5) bool; IGNORE is no index
    best = logits.topk(min(5, logits.shape[1]), 1).indices == batch["labels"][:, None]
    return torch.stack([best[:, 0].sum(), best.sum()]).float()


def check(model_config: dict[str, Any], attention: str, name: str) -> str:
    """Raises `Refusal` for a model with a BatchNorm that model/batch_norm.py does not compute, and
    for one of which no small copy takes pictures alone.

    Returns "", or why this could not be looked at.
    """
    kind, facts = model_config["model_type"], TASKS["image_classification"]
    model = empty_model(model_config, "eager", name, auto_class=facts.auto_class)
    check_norms(model)
    try:
        logits_of(small_copy(model_config, facts, name), facts)
    except (*WRONG_VALUE, ImportError) as error:
        if isinstance(error, Refusal):
            return f"not known whether a {kind} takes pictures: {error.problems[0].rule}"
        rule = (
            f"no small copy of a {kind} runs on pictures alone ({type(error).__name__}:"
            f" {str(error)[:200]})"
        )
        raise refuse(
            f"model = {name}", rule, "use another image classifier of recipes/SUPPORT_IMAGES.md"
        ) from None
    return ""


TASK = Task(
    facts=TASKS["image_classification"],
    targets=("labels",),
    processor=processor,
    forward=forward,
    loss=loss,
    count=count,
    check=check,
    samples=Samples(collate, drawn, NUM_DRAWN, identity),
    measures=("accuracy", "top5_accuracy"),
    measure=measure,
)
