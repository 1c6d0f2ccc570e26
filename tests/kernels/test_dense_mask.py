"""Bytes of the dense mask for packed documents.

`dense_mask_bytes` must equal the memory that transformers and torch actually use.
"""

import gc
import json
import weakref
from typing import Any

import pytest
import torch
import transformers
from recipe_files import plan
from recipekit.architectures.lookup import SHIPPED
from recipekit.architectures.shrink import shrink
from recipekit.dslint.divisibility import MAX_MASK_BYTES
from recipekit.dslint.shapes import dense_mask_bytes
from recipekit.spec.errors import ConfigError
from torch.utils._python_dispatch import TorchDispatchMode

LENGTH = 192  # different from all other dimensions of the tiny model


class Squares(TorchDispatchMode):
    """A counter for the storages of live (rows, 1, LENGTH, LENGTH) tensors, and for their peak."""

    def __init__(self, rows: int):
        super().__init__()
        self.shapes = {(rows, 1, LENGTH, LENGTH), (1, 1, LENGTH, LENGTH)}
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) in self.shapes:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return made


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, torch.bfloat16), (2, torch.bfloat16), (2, torch.float32)]
)
def test_a_layer_holds_so_many_bytes_of_masks(attention, rows, dtype):
    config = shrink(json.loads((SHIPPED / "meta-llama--Llama-3.1-8B.json").read_text()), 264)
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    config._attn_implementation, config.use_cache = attention, False
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    documents = torch.cat([torch.arange(LENGTH // 3), torch.arange(LENGTH - LENGTH // 3)]).expand(
        rows, -1
    )
    gc.collect()
    with torch.no_grad(), Squares(rows) as seen:
        model(input_ids=torch.zeros(rows, LENGTH, dtype=torch.long), position_ids=documents)
    assert (
        seen.peak
        == dense_mask_bytes(attention, rows, LENGTH, dtype.itemsize)
        == rows * LENGTH**2 * (1 + dtype.itemsize)
    )


@pytest.mark.parametrize(
    ("argv", "gigabytes"),
    [
        (["--seq_len", "65536"], None),
        (["--attention", "flash_attention_2"], None),
        ([], None),
        (["--attention", "varlen"], None),
        (["--attention", "sdpa"], "51.5"),
        (["--attention", "sdpa", "--seq_len", "65536", "--micro_batch", "4"], "51.5"),
        (["--attention", "eager"], "51.5"),
    ],
)
def test_a_mask_that_leaves_no_room_is_refused(argv, gigabytes):
    argv = ["--world", "8", *argv]
    if gigabytes is None:
        assert plan("llama3_1_8b_zero3_sp8", *argv).mesh.sp == 8
        return
    with pytest.raises(
        ConfigError,
        match=(
            rf"takes {gigabytes} GB on every rank, but the limit is 40 GB\. Use --seq_len"
            r" (65536|32768), or --attention varlen"
        ),
    ):
        plan("llama3_1_8b_zero3_sp8", *argv)


def test_a_tiny_recipe_has_a_small_mask():
    assert plan("llama3_1_8b_zero3_sp8", "--tiny", "--world", "8").recipe.seq_len == 128
    assert (
        dense_mask_bytes("sdpa", 1, 115_000, 2)
        < MAX_MASK_BYTES
        < dense_mask_bytes("sdpa", 1, 116_000, 2)
    )
