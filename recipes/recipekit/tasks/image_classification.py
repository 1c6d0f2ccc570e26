"""Image classification: predict an image's class from crops that are sampled in each epoch."""

import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.nn.functional import cross_entropy

from ..data.files import folder_classes
from ..data.images import class_number, open_image
from ..data.mixture import domains_of
from ..data.request import Request
from ..model.batch_norm import check_norms
from ..model.config_errors import CONSTRUCTOR_ERRORS
from ..model.empty import empty_model
from ..model.small import in_words, logits_of, small_copy
from ..spec.errors import ConfigError, config_error
from ..spec.hub import snapshot_of
from ..spec.task import IGNORE, DatasetRow, MicroBatch, Samples, Task
from ..spec.task_specs import TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Ranges of a crop's share of the image area and of its width / height (Szegedy et al., CVPR 2015,
# section 6).
CROP_AREA, CROP_ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)
MAX_CROP_TRIES = 10  # maximum number of crops sampled before the fallback is used
RESIZE_TO_CROP = (
    256,
    224,
)  # ratio of the resized image to its center crop in evaluation
PREPROCESSOR_CONFIG = "preprocessor_config.json"
# This file may contain an image processor under the key image_processor, which transformers then
# prefers.
PROCESSOR_CONFIG = "processor_config.json"
# Further keys that the exported processor's class uses (ViTImageProcessor, transformers 5.22.2).
PROCESSOR_KEYS = (
    "do_pad",
    "pad_size",
    "default_to_square",
    "data_format",
    "input_data_format",
    "image_seq_length",
    "return_tensors",
    "device",
)
PROCESSOR_CLASS_KEYS = (
    "feature_extractor_type",
    "auto_map",
)  # these keys select classes that preprocess images differently
NUM_SHAPE_IMAGES, SHAPE_IMAGE_SIZE = 8000, 32


@dataclass(frozen=True)
class ImagePreprocessor:
    """The conversion of images into a model's inputs.

    `save_pretrained` writes the evaluation conversion in transformers' format. Keys in the model's
    `published` file that do not affect the conversion are kept.
    """

    size: tuple[int, int]  # (H, W)
    channels: int  # 1 or 3
    mean: tuple[float, ...]  # for values from 0 to 1, per channel
    std: tuple[float, ...]
    resample: Image.Resampling
    num_labels: int
    augment: bool
    pool: ThreadPoolExecutor
    published: Mapping[str, Any] = field(default_factory=dict)

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
            key: value
            for key, value in self.published.items()
            if key not in (*PROCESSOR_KEYS, *PROCESSOR_CLASS_KEYS)
        }
        Path(folder, PREPROCESSOR_CONFIG).write_text(json.dumps(carried | config, indent=2) + "\n")


def image_preprocessor(request: Request, model_config: dict[str, Any]) -> ImagePreprocessor:
    """Return a model's image preprocessor.

    Mean and standard deviation come from the published image processor, or are 0.5 without such a
    processor. The size comes from config.json, which `--tiny` shrinks, or else from the published
    file.

    Raise `ConfigError` for a model whose images are neither grey nor RGB. Raise it also for data
    whose number of classes differs from the model's number of labels.
    """
    own, tower = (
        published_image_processor(request.model, request.init, request.model_revision),
        model_config.get("vision_config") or model_config,
    )
    channels = tower.get("num_channels", 3)
    if channels not in (1, 3):
        raise config_error(
            f"model = {request.model}",
            f"requires images with {channels} channels, but images are read as grey (1) or"
            " color (3)",
            "use another model",
        )
    normalised = own.get("do_normalize", True)
    mean, std = (
        _per_channel(own.get(name, 0.5) if normalised else plain, channels)
        for name, plain in (("image_mean", 0.0), ("image_std", 1.0))
    )
    return ImagePreprocessor(
        size=_parse_size(tower.get("image_size") or own.get("crop_size") or own.get("size") or 224),
        channels=channels,
        mean=mean,
        std=std,
        resample=Image.Resampling(own.get("resample", Image.Resampling.BILINEAR)),
        num_labels=check_classes(request, model_config),
        augment=request.augment != "none",
        pool=ThreadPoolExecutor(request.threads, "pictures"),
        published=own,
    )


def preprocessing_identity(preprocessor: ImagePreprocessor, task: str) -> dict[str, Any]:
    """Return the image preprocessing as part of a data stream's identity."""
    mean, std = map(list, (preprocessor.mean, preprocessor.std))
    return {
        "pictures": [
            *preprocessor.size,
            preprocessor.channels,
            int(preprocessor.resample),
            mean,
            std,
        ]
    }


def published_image_processor(model: str, init: str, revision: str = "") -> dict[str, Any]:
    """Return the published image processor from a folder or the local cache, or {}.

    If the weights are random, nothing is downloaded, and the cache is not read because its content
    may differ between hosts.
    """
    cached = snapshot_of(model, revision) if init == "pretrained" else None
    folder = Path(model) if Path(model).is_dir() else cached
    names = [folder / name for name in (PROCESSOR_CONFIG, PREPROCESSOR_CONFIG)] if folder else []
    file = None
    try:
        for file in filter(Path.exists, names):
            found = json.loads(file.read_bytes())
            own = (
                found.get("image_processor")
                if file.name == PROCESSOR_CONFIG and isinstance(found, dict)
                else found
            )
            if own is None and file.name == PROCESSOR_CONFIG:
                continue
            if not isinstance(own, dict):
                raise ValueError("it or its image_processor is not a JSON object")
            return own
        return {}
    except (OSError, ValueError) as error:
        raise config_error(
            str(file),
            f"cannot be read: {error}",
            "download the model again, or delete the file. Without it, 0.5 is subtracted",
        ) from error


def _per_channel(value: float | list[float], channels: int) -> tuple[float, ...]:
    return (
        tuple(map(float, value))
        if isinstance(value, list) and len(value) == channels
        else (float(np.mean(value)),) * channels
    )


def _parse_size(value: int | list[int] | dict[str, int]) -> tuple[int, int]:
    """Parse (H, W) from any format in which models and processors publish it."""
    if isinstance(value, dict):
        value = [value["height"], value["width"]] if "height" in value else value["shortest_edge"]
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def num_labels(model_config: dict[str, Any]) -> int:
    """Return the model's number of classes as transformers 5.22 computes it.

    See PreTrainedConfig.__post_init__.
    """
    return len(model_config.get("id2label") or {}) or model_config.get("num_labels") or 2


def check_classes(request: Request, model_config: dict[str, Any]) -> int:
    """Return the model's number of classes.

    Raise `ConfigError` if the data's classes are known without reading the rows and differ from the
    model's classes.
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
            raise config_error(
                where,
                f"has {len(SHAPES)} classes, but {request.model} has {labels} labels",
                f"use --num_labels {len(SHAPES)}",
            )
        if classes and len(classes) != labels:
            raise config_error(
                where,
                f"has {len(classes)} folders of classes, but {request.model} has {labels} labels",
                f"use --num_labels {len(classes)}",
            )
        if classes and classes != (first := first or classes):
            odd = next(name for name in classes if name not in first)
            raise config_error(
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
            raise config_error(where, rule, "rename the folders so that their order is the model's")
    return labels


# Micro-batches
# --------------------------------------------------------------------------------------------------


def collate(
    preprocessor: ImagePreprocessor, rows: list[DatasetRow | None], keys: list[int] | None
) -> MicroBatch:
    """Return {"pixel_values": (B, C, H, W) fp32, "labels": (B,) int64}.

    Raise ValueError or TypeError for a value that is neither an image nor one of the model's
    classes.
    """
    out = np.zeros((len(rows), preprocessor.channels, *preprocessor.size), dtype=np.float32)
    labels = [
        IGNORE if row is None else _label(row["label"], preprocessor.num_labels) for row in rows
    ]

    def fill(number: int) -> None:
        row = rows[number]
        if row is not None:
            draw = (
                np.random.default_rng(keys[number])
                if keys is not None and preprocessor.augment
                else None
            )
            image = open_image(row["image"]).convert("RGB" if preprocessor.channels == 3 else "L")
            image = (
                random_resized_crop(image, preprocessor, draw)
                if draw
                else center_crop(image, preprocessor)
            )
            normalise_image(image, preprocessor, out[number])

    # Iterating re-raises a thread's exception here. The first row's exception comes first.
    for _ in preprocessor.pool.map(fill, range(len(rows))):
        pass
    return {"pixel_values": torch.from_numpy(out), "labels": torch.tensor(labels)}


def _label(value: object, labels: int) -> int:
    number = class_number(value)
    if not 0 <= number < labels:
        raise ValueError(
            f"class {number} is not one of the model's classes, 0 to {labels - 1}. Set --num_labels"
            " to the number of classes in the data"
        )
    return number


def random_resized_crop(
    image: Image.Image, preprocessor: ImagePreprocessor, draw: np.random.Generator
) -> Image.Image:
    """Return a random crop of an image, resized to the model's size.

    The crop's position, area and aspect ratio are random. Half of the crops are mirrored.
    """
    height, width = preprocessor.size
    box = _sample_crop_box(image.width, image.height, draw)
    image = image.resize((width, height), preprocessor.resample, box)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw.random() < 0.5 else image


def _sample_crop_box(
    width: int, height: int, draw: np.random.Generator
) -> tuple[int, int, int, int]:
    """Sample the (left, top, right, bottom) box of a crop.

    If none of the first samples fits into the image, return the largest center crop's box.
    """
    for _ in range(MAX_CROP_TRIES):
        area = width * height * draw.uniform(*CROP_AREA)
        ratio = math.exp(draw.uniform(math.log(CROP_ASPECT[0]), math.log(CROP_ASPECT[1])))
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
    across, down = (
        min(width, round(height * CROP_ASPECT[1])),
        min(height, round(width / CROP_ASPECT[0])),
    )
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def center_crop(image: Image.Image, preprocessor: ImagePreprocessor) -> Image.Image:
    """Resize an image and return its center crop.

    The image is first resized to slightly more than the crop's size. If the model's size is not
    square, return the full image, resized.
    """
    height, width = preprocessor.size
    if height != width:
        return image.resize((width, height), preprocessor.resample)
    short = shortest_edge(height)
    scaled = [
        short if side == min(image.size) else int(short * side / min(image.size))
        for side in image.size
    ]
    image = image.resize((scaled[0], scaled[1]), preprocessor.resample)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def shortest_edge(size: int) -> int:
    return size * RESIZE_TO_CROP[0] // RESIZE_TO_CROP[1]


def normalise_image(image: Image.Image, preprocessor: ImagePreprocessor, out: np.ndarray) -> None:
    """Write an image's normalised values into `out`, (C, H, W) fp32."""
    values = np.asarray(image).reshape(*preprocessor.size, preprocessor.channels)
    for channel, (mean, std) in enumerate(zip(preprocessor.mean, preprocessor.std, strict=True)):
        np.multiply(
            values[:, :, channel], np.float32(1 / (255 * std)), out=out[channel], dtype=np.float32
        )
        out[channel] -= np.float32(mean / std)


# The built-in images
# --------------------------------------------------------------------------------------------

# The mirror image of a shape belongs to the same class as the shape.
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


def draw_shape_image(number: int) -> DatasetRow:
    """Return a row whose image, (32, 32, 3), shows one of ten bright shapes on dark noise.

    The shape's position, size and colour are random, seeded by `number`.
    """
    draw = np.random.default_rng(number)
    label = number % len(SHAPES)
    image = Image.fromarray(
        draw.integers(0, 96, (SHAPE_IMAGE_SIZE, SHAPE_IMAGE_SIZE, 3), dtype=np.uint8)
    )
    size = int(draw.integers(12, 25))
    left, top = draw.integers(1, SHAPE_IMAGE_SIZE - size, 2).tolist()
    _draw_shape(
        ImageDraw.Draw(image),
        SHAPES[label],
        left,
        top,
        size,
        tuple(draw.integers(128, 256, 3).tolist()),
    )
    return {"image": np.asarray(image), "label": label}


def _draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, left: int, top: int, size: int, colour: tuple[int, ...]
) -> None:
    right, bottom, middle = left + size - 1, top + size - 1, left + size // 2
    line, third = max(2, size // 6), size // 3  # widths of a line and of a bar in the plus
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
    """Yield the boxes of stripes in rows or columns. Gaps are as wide as the stripes."""
    left, top, right, bottom = box
    for start in range(0, right - left + 1, 2 * width):
        end = start + width - 1
        if across:
            yield left, top + start, right, min(bottom, top + end)
        else:
            yield left + start, top, min(right, left + end), bottom


# Model outputs, loss and metrics
# --------------------------------------------------------------------------------------------------


def forward(model: "PreTrainedModel", batch: MicroBatch) -> torch.Tensor:
    """Return the logits, (B, classes)."""
    return model(pixel_values=batch["pixel_values"].to(next(model.parameters()).dtype)).logits


def loss(logits: torch.Tensor, batch: MicroBatch, by_row: bool) -> torch.Tensor:
    """Return the cross-entropy, summed in fp32 over the rows with a class.

    The result is () for the micro-batch or, if `by_row` is True, (B,).
    """
    return cross_entropy(
        logits.float(), batch["labels"], ignore_index=IGNORE, reduction="none" if by_row else "sum"
    )


def count(batch: MicroBatch) -> torch.Tensor:
    """Return 1 for each row with a class and 0 for all other rows, (B,) int64."""
    return (batch["labels"] != IGNORE).long()


@torch.no_grad()
def measure(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return the number of correct top-1 and of correct top-5 predictions, (2,) fp32."""
    # (B, 5) bool; IGNORE never equals a class.
    best = logits.topk(min(5, logits.shape[1]), 1).indices == batch["labels"][:, None]
    return torch.stack([best[:, 0].sum(), best.sum()]).float()


def check_image_model(model_config: dict[str, Any], attention: str, name: str) -> str:
    """Raise `ConfigError` for a model that cannot be trained on images alone.

    The model may contain a BatchNorm that model/batch_norm.py does not support, or a small copy of
    it may not run on images alone. Return "", or the reason why the model could not be tested.
    """
    kind, facts = model_config["model_type"], TASKS["image_classification"]
    model = empty_model(model_config, "eager", name, auto_class=facts.auto_class)
    check_norms(model)
    # Unlike the copies in model/probes.py, this copy samples from torch's own generator. In a run
    # on a CPU, dropout continues from this generator state.
    try:
        logits_of(small_copy(model_config, facts, name), facts)
    except (*CONSTRUCTOR_ERRORS, ImportError) as error:
        if isinstance(error, ConfigError):
            return f"not known whether a {kind} takes pictures: {in_words(error)}"
        rule = f"no small copy of a {kind} runs on pictures alone ({in_words(error)})"
        raise config_error(
            f"model = {name}", rule, "use another image classifier of recipes/SUPPORT_IMAGES.md"
        ) from None
    return ""


TASK = Task(
    spec=TASKS["image_classification"],
    targets=("labels",),
    processor=image_preprocessor,
    forward=forward,
    loss=loss,
    count=count,
    check=check_image_model,
    samples=Samples(collate, draw_shape_image, NUM_SHAPE_IMAGES, preprocessing_identity),
    measures=("accuracy", "top5_accuracy"),
    measure=measure,
)
