"""The merged model of a checkpoint with an adapter, made from the checkpoint's files without an
engine.
"""

import contextlib
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints.step_folder import Step
from ..model.adapter import AdapterRequest, adapted, merged
from ..model.empty import empty_model
from ..model.export import ADAPTER, CARD, name_as_merged, name_files, shards, write_file
from ..parallel.blueprint import Tensor
from ..spec.refusal import refuse
from ..spec.whole_file import fsync
from ..storage.copying import Effort, copies, run
from ..storage.journal import Journal
from ..storage.tensor_files import TensorFiles, open_checkpoint

# an adapter's name in its tensors
NAMES = re.compile(r"\.(?:lora_\w+|modules_to_save|trainable_tokens_\w+)\.(\w+)")


def to_merged(step: Step, out: Path, dtype: str, effort: Effort, card: str = "") -> None:
    """Write the Hugging Face files of a checkpoint's model with its adapter merged, complete or not
    at all.

    `card` is the text of the model card. peft merges one module at a time, in fp32. Raise `Refusal`
    for a checkpoint without an adapter or with damaged tensors.
    """
    model = adapted_model(step)
    journal = Journal(out, {"source": step.fingerprint, "merged": dtype})
    with contextlib.closing(open_checkpoint(step.folder, step.blueprint, step.layout)) as read:
        digests, _ = run(copies(step.blueprint, read, None), read, effort)
        digests.pop("", None)
        step.check(digests)
        give_buffers(model, step, read)
        files, total = [], 0
        for shard in shards(
            merged(model, gather_from(model, step, read), getattr(torch, dtype), writes=True)
        ):
            files.append((f"part-{len(files)}", list(shard)))
            write_file(shard, journal.folder / files[-1][0])
            total += sum(tensor.nbytes for tensor in shard.values())

    name_files(files, total, journal.folder)
    for name, path in step.small_files.items():
        (journal.folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, journal.folder / name)
    name_as_merged(model, journal.folder, dtype)
    if card:
        (journal.folder / CARD).write_text(card, encoding="utf-8")
    for path in journal.folder.rglob("*"):
        fsync(path)
    journal.finish()


def adapted_model(step: Step) -> Any:
    """Return the model of a checkpoint in peft's wrapper, with its parameters on the meta
    device.
    """
    from peft import PeftConfig, get_peft_model

    where, file, config = str(step.folder), step.small_files.get(ADAPTER), step.model_config
    if file is None or config is None:
        lacks = (
            f"no {ADAPTER}, so it is not a checkpoint of an adapter"
            if file is None
            else "no readable config.json"
        )
        raise refuse(where, f"contains {lacks}", "leave out --merge")
    lora: Any = PeftConfig.from_pretrained(str(file.parent))
    # the weights come from the checkpoint
    lora.inference_mode, lora.init_lora_weights = False, True
    name = next(
        (found[1] for tensor in step.blueprint.tensors if (found := NAMES.search(tensor.name))),
        "default",
    )
    request = AdapterRequest(lambda base: get_peft_model(base, lora, name), merge=True)
    with warnings.catch_warnings(action="ignore"):
        model = adapted(empty_model(config, "eager", where), request, {})

    wanted = {tensor.name for tensor in step.blueprint.tensors if not tensor.buffer}
    if others := sorted(wanted.symmetric_difference(name for name, _ in model.named_parameters())):
        rule = f"its {ADAPTER} and config.json describe another model, such as {others[0]}"
        raise refuse(where, rule, "merge with the recipe: the same command with --merge")
    return model


def gather_from(model: Any, step: Step, read: TensorFiles) -> Any:
    """Return the `Gather` that reads named parameters of the wrapped model from a checkpoint."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {tensor.name: tensor for tensor in step.blueprint.tensors}

    def gather(
        named: Iterable[tuple[str, nn.Parameter]], dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in named:
            yield name, whole(read, tensors[names[id(parameter)]]).to(dtype)

    return gather


def give_buffers(model: Any, step: Step, read: TensorFiles) -> None:
    """Give the model the buffers that the checkpoint holds.

    Of trained tokens peft keeps the original rows in a buffer that no checkpoint has, and that no
    merge reads.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    buffers = dict(model.named_buffers())
    for tensor in step.blueprint.tensors:
        if tensor.buffer and tensor.name in buffers:
            buffers[tensor.name].copy_(whole(read, tensor))


def whole(read: TensorFiles, tensor: Tensor) -> torch.Tensor:
    """Read a full tensor, the master weight if there is one."""
    role = "master" if "master" in read.roles(tensor) else "weight"
    bits = torch.from_numpy(read.read(tensor, role, 0, tensor.numel))
    return bits.view(getattr(torch, read.dtype_of(tensor, role))).reshape(tensor.shape)
