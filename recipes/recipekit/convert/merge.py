"""The merged model of a checkpoint with an adapter, computed from the files without an engine."""

import contextlib
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..checkpoints.step_folder import StepFolder
from ..compat.torch import set_buffer
from ..model.adapter import AdapterRequest, apply_adapter, merged_weights
from ..model.empty import empty_model
from ..model.export import (
    ADAPTER_FILE,
    CARD_FILE,
    describe_as_merged,
    rename_shards,
    shards_by_size,
    write_safetensors,
)
from ..parallel.blueprint import Tensor
from ..spec.atomic_write import fsync
from ..spec.errors import config_error
from ..storage.copying import Effort, plan_copies, run_copies
from ..storage.journal import Journal
from ..storage.tensor_files import TensorFiles, open_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# the adapter's name in the names of its tensors
ADAPTER_NAME_PATTERN = re.compile(r"\.(?:lora_\w+|modules_to_save|trainable_tokens_\w+)\.(\w+)")


def to_merged(step: StepFolder, out: Path, dtype: str, effort: Effort, card: str = "") -> None:
    """Write the Hugging Face files of a checkpoint's model with the adapter merged into it.

    The folder is either complete or not created at all. `card` is the text of the model card. peft
    merges one module at a time, in fp32. Raise `ConfigError` for a checkpoint without an adapter or
    with damaged tensors.
    """
    model = empty_adapted_model(step)
    journal = Journal(out, {"source": step.fingerprint, "merged": dtype})
    with contextlib.closing(open_checkpoint(step.folder, step.blueprint, step.layout)) as read:
        digests, _ = run_copies(plan_copies(step.blueprint, read, None), read, effort)
        digests.pop("", None)
        step.check_digests(digests)
        load_buffers(model, step, read)
        files, total = [], 0
        for shard in shards_by_size(
            merged_weights(
                model, make_gather(model, step, read), getattr(torch, dtype), writes=True
            )
        ):
            files.append((f"part-{len(files)}", list(shard)))
            write_safetensors(shard, journal.folder / files[-1][0])
            total += sum(tensor.nbytes for tensor in shard.values())

    rename_shards(files, total, journal.folder)
    for name, path in step.small_files.items():
        (journal.folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, journal.folder / name)
    describe_as_merged(model, journal.folder, dtype)
    if card:
        (journal.folder / CARD_FILE).write_text(card, encoding="utf-8")
    for path in journal.folder.rglob("*"):
        fsync(path)
    journal.finish()


def empty_adapted_model(step: StepFolder) -> Any:
    """Return a checkpoint's model in peft's wrapper, with parameters on the meta device."""
    from peft import PeftConfig, get_peft_model

    where, file, config = str(step.folder), step.small_files.get(ADAPTER_FILE), step.model_config
    if file is None or config is None:
        lacks = (
            f"no {ADAPTER_FILE}, so it is not a checkpoint of an adapter"
            if file is None
            else "no readable config.json"
        )
        raise config_error(where, f"contains {lacks}", "leave out --merge")
    lora: Any = PeftConfig.from_pretrained(str(file.parent))
    # the weights come from the checkpoint
    lora.inference_mode, lora.init_lora_weights = False, True
    name = next(
        (
            found[1]
            for tensor in step.blueprint.tensors
            if (found := ADAPTER_NAME_PATTERN.search(tensor.name))
        ),
        "default",
    )
    request = AdapterRequest(lambda base: get_peft_model(base, lora, name), merge=True)
    with warnings.catch_warnings(action="ignore"):
        model = apply_adapter(empty_model(config, "eager", where), request, {})

    wanted = {tensor.name for tensor in step.blueprint.tensors if not tensor.buffer}
    if others := sorted(wanted.symmetric_difference(name for name, _ in model.named_parameters())):
        rule = f"its {ADAPTER_FILE} and config.json describe another model, such as {others[0]}"
        raise config_error(where, rule, "merge with the recipe: the same command with --merge")
    return model


def make_gather(model: "PreTrainedModel", step: StepFolder, reader: TensorFiles) -> Any:
    """Return a `Gather` that reads the wrapped model's named parameters from a checkpoint."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {tensor.name: tensor for tensor in step.blueprint.tensors}

    def gather(
        named: Iterable[tuple[str, nn.Parameter]], dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in named:
            yield name, read_full_tensor(reader, tensors[names[id(parameter)]]).to(dtype)

    return gather


def load_buffers(model: "PreTrainedModel", step: StepFolder, reader: TensorFiles) -> None:
    """Load the checkpoint's buffers into the model.

    For trained tokens, peft stores the original rows in a buffer. No checkpoint contains this
    buffer, and no merge reads it.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                set_buffer(module, name, torch.zeros_like(buffer, device="cpu"))
    buffers = dict(model.named_buffers())
    for tensor in step.blueprint.tensors:
        if tensor.buffer and tensor.name in buffers:
            buffers[tensor.name].copy_(read_full_tensor(reader, tensor))


def read_full_tensor(reader: TensorFiles, tensor: Tensor) -> torch.Tensor:
    """Read a full tensor, from the master weight if the checkpoint has one."""
    role = "master" if "master" in reader.roles(tensor) else "weight"
    bits = torch.from_numpy(reader.read(tensor, role, 0, tensor.numel))
    return bits.view(getattr(torch, reader.dtype_of(tensor, role))).reshape(tensor.shape)
