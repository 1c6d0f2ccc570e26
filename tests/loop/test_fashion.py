"""A small vision transformer and a small ResNet learn real images, but do not learn shuffled
labels.

The data are Fashion-MNIST, stored as PNGs in a Parquet file, on two ranks.
"""

import json

import fashion
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job import Job, deepspeed, metrics

LIMIT = 360.0  # seconds
RECIPE = """
from recipekit import Recipe, run

RECIPE = Recipe(
    task="image_classification", model={model!r}, init="random", dataset={dataset!r}, \
ds_config="zero1.json",
    micro_batch=64, global_batch=128, steps={steps}, lr={lr}, warmup_steps=50, eval_every={steps}, \
eval_rows=512, augment="none", wandb=False,
)

if __name__ == "__main__":
    run(RECIPE)
"""


VIT = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "image_size": 28,
    "patch_size": 7,
}
RESNET = {
    "model_type": "resnet",
    "architectures": ["ResNetForImageClassification"],
    "embedding_size": 32,
    "hidden_sizes": [32, 64],
    "depths": [2, 2],
    "layer_type": "basic",
}
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": 28, "width": 28},
    "image_mean": [0.5],
    "image_std": [0.5],
}


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["true", "shuffled"])
@pytest.mark.parametrize(
    ("sizes", "steps", "lr"),
    [pytest.param(VIT, 1200, 1e-3, id="vit"), pytest.param(RESNET, 300, 2e-3, id="resnet")],
)
def test_a_small_model_learns_fashion(tmp_path, sizes, steps, lr, labels):
    """More than 80 % of the held-out images are classified correctly.

    With shuffled labels the accuracy is about 10 %, which shows that the answer does not leak into
    the input. The evaluation of ResNet uses the BatchNorm statistics of both ranks.
    """
    pixels, classes = fashion.read(60_000, "train")
    if labels == "shuffled":
        classes = np.random.default_rng(0).permutation(classes)
    pq.write_table(
        pa.table(
            {"image": [fashion.png(image) for image in pixels], "label": classes.astype(np.int64)}
        ),
        tmp_path / "fashion.parquet",
        row_group_size=1000,
    )
    (tmp_path / "model").mkdir()
    names = {
        str(number): name
        for number, name in enumerate(
            [
                "top",
                "trouser",
                "pullover",
                "dress",
                "coat",
                "sandal",
                "shirt",
                "sneaker",
                "bag",
                "boot",
            ]
        )
    }
    config = {
        "num_channels": 1,
        "id2label": names,
        "label2id": {name: int(n) for n, name in names.items()},
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | sizes))
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    recipe = RECIPE.format(
        model=str(tmp_path / "model"), dataset=str(tmp_path / "fashion.parquet"), steps=steps, lr=lr
    )
    (tmp_path / "fashion.py").write_text(recipe)
    job = Job(tmp_path, deepspeed(tmp_path / "fashion.py", ranks=2))
    try:
        assert job.wait(LIMIT) == 0, job.output[-3000:]
    finally:
        job.close()
    lines = metrics(tmp_path / "runs" / "fashion")
    print(
        f"{labels} labels: accuracy {lines[-1]['eval_accuracy']:.3f} after"
        f" {sum(line['step_s'] for line in lines):.0f} s of steps"
    )
    assert (
        lines[-1]["eval_accuracy"] > 0.8
        if labels == "true"
        else abs(lines[-1]["eval_accuracy"] - 0.1) < 0.05
    )
