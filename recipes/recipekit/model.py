"""From a model's config and weights to a model that DeepSpeed can train: built part by part, never whole on one rank."""

import ctypes
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers.initialization import guard_torch_init_functions, no_init_weights

from . import tensor_parallel
from .groups import Groups
from .recipe import Recipe
from .refusal import Problem, Refusal, refuse
from .tensor_parallel import Cut


@dataclass(frozen=True)
class Built:
    """A model ready for `deepspeed.initialize`; `cuts` says which parameters are tensor-parallel shards and how.

    `names` holds the Hugging Face name of each parameter by its id, since an adapter renames what it wraps.
    """

    model: Any
    cuts: dict[str, Cut]
    names: dict[int, str]
    read: Callable[[str], torch.Tensor] | None  # parameter name -> its whole value in the files; None after a random init


def build_model(recipe: Recipe, model_config: dict[str, Any], groups: Groups | None, ds_config: dict[str, Any], device: torch.device) -> Built:
    """The model of a recipe, its weights drawn or read, cut to this rank's tensor shard and, under ZeRO-3, partitioned.

    Without `groups` it is the whole model on one process.

    The weights are filled in one part (a layer, an embedding) after the other, so that under ZeRO-3 no rank ever holds
    more than one whole part. A collective under ZeRO-3. Raises `Refusal` when the files do not hold every parameter.
    """
    model = empty_model(recipe, model_config)
    dtype = torch.bfloat16 if enabled(ds_config, "bf16") else torch.float16 if enabled(ds_config, "fp16") else torch.float32
    read = None if recipe.init == "random" else open_weights(recipe, model)
    tp_mesh = groups.tp_mesh if groups else None
    cuts = tensor_parallel.apply(model, tp_mesh) if tp_mesh else {}
    names = {id(module): name for name, module in model.named_modules()}
    zero3 = groups is not None and ds_config["zero_optimization"]["stage"] == 3
    swapper = None
    _return_freed_blocks(True)
    for part, deep in parts(model):
        unfilled = [(name, parameter) for name, parameter in own_parameters(part, deep, names[id(part)]) if parameter.device.type == "meta"]
        if not unfilled:
            continue  # tied to a parameter that an earlier part filled
        values = draw(model, part, deep, names[id(part)], cuts, recipe.seed) if read is None else {}
        for name, parameter in unfilled:
            value = (values.pop(name) if read is None else read(name)).to(dtype)
            if tp_mesh and name in cuts:
                value = tensor_parallel.shard(value, cuts[name], tp_mesh)
            # a copy: safetensors' tensors are views of the mapped file, which training must not write to
            filled = nn.Parameter(value.to(device, copy=True), requires_grad=parameter.requires_grad)
            for mark, kept in vars(parameter).items():
                setattr(filled, mark, kept)
            replace_parameter(model, parameter, filled)
            del value, parameter
            if zero3:
                assert groups is not None
                swapper = partition(filled, ds_config, groups, swapper)
    _return_freed_blocks(False)
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        buffer.data = (read(name).to(buffer.dtype) if read and name in persistent else buffer.data).to(device)
    published = {id(parameter): name for name, parameter in model.named_parameters()}
    if recipe.adapt is not None:
        torch.manual_seed(recipe.seed)
        model = recipe.adapt(model)
        if tp_mesh and hasattr(model, "peft_config"):
            raise refuse("tp > 1", "peft's adapters do not know tensor-parallel shards", "use --tp 1; ZeRO-3 divides the frozen weights too")
    model.train()
    return Built(model, cuts, published, read)


def empty_model(recipe: Recipe, model_config: dict[str, Any]) -> Any:
    """The model of a config with its parameters on the meta device, its buffers real, its embeddings tied."""
    model_config = dict(model_config)
    config = transformers.AutoConfig.for_model(model_config.pop("model_type"), **model_config)
    config._attn_implementation = recipe.attention
    config._name_or_path = recipe.model  # what an exported adapter names as its base
    config.use_cache = False  # with a cache transformers ignores packed position_ids, and documents leak into each other
    with no_init_weights(), init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    if recipe.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def parts(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """The model cut into (module, deep): each element of an outermost ModuleList, and whatever holds no such list.

    `deep` False means the module's own parameters only. Every parameter is in one part; the order is the model's.
    """
    if not any(isinstance(module, nn.ModuleList) for module in model.modules()):
        yield model, True
        return
    yield model, False
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            for element in child:
                yield element, True
        else:
            yield from parts(child)


def own_parameters(part: nn.Module, deep: bool, prefix: str) -> list[tuple[str, nn.Parameter]]:
    """(full name, parameter) of one part."""
    return [(f"{prefix}.{name}" if prefix else name, parameter) for name, parameter in part.named_parameters(recurse=deep)]


def draw(model: Any, part: nn.Module, deep: bool, prefix: str, cuts: dict[str, Cut], seed: int) -> dict[str, torch.Tensor]:
    """The initial values of one part, whole, fp32, on the CPU, by the model's own initialiser.

    Each module draws from a generator seeded by (seed, name of its first parameter), so the values depend on nothing
    else: not on the layout, the order of modules, or what was drawn before.
    """
    modules = [(".".join(filter(None, (prefix, name))), module) for name, module in part.named_modules()] if deep else [(prefix, part)]
    meta = {}
    for name, module in modules:  # whole fp32 tensors take the place of the (maybe cut) meta parameters meanwhile
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                full = f"{name}.{key}" if name else key
                meta[module, key] = parameter
                module._parameters[key] = nn.Parameter(torch.empty(cuts[full].shape if full in cuts else parameter.shape))
    owner = {id(module): nearest for nearest, module in _init_owners(model)}
    with torch.random.fork_rng(devices=[]), torch.no_grad(), guard_torch_init_functions():
        for name, module in reversed(modules):  # children before parents: a parent may draw a child's weight again (GPT-2's c_proj)
            first = next((f"{name}.{key}" if name else key for key, _ in module.named_parameters()), None)
            if first is not None:
                torch.manual_seed(int.from_bytes(hashlib.blake2b(f"{seed}:{first}".encode(), digest_size=8).digest(), "little") >> 1)
                owner[id(module)]._init_weights(module)
    values = {}
    for name, module in modules:
        for key in [key for holder, key in meta if holder is module]:
            values[f"{name}.{key}" if name else key] = module._parameters[key].detach()  # type: ignore[union-attr]
            module._parameters[key] = meta[module, key]
    return values


def _init_owners(model: Any) -> Iterator[tuple[Any, nn.Module]]:
    """(the innermost PreTrainedModel around it, module) of every module: whose `_init_weights` is the right one."""

    def walk(module: nn.Module, owner: Any) -> Iterator[tuple[Any, nn.Module]]:
        owner = module if isinstance(module, transformers.PreTrainedModel) else owner
        yield owner, module
        for child in module.children():
            yield from walk(child, owner)

    return walk(model, model)


def replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Puts `new` wherever the model holds `old`, so that tied parameters stay one."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[key] = new


def partition(parameter: nn.Parameter, ds_config: dict[str, Any], groups: Groups, swapper: Any) -> Any:
    """Partitions one parameter over the data-parallel ranks as ZeRO-3 does (a collective).

    Returns the NVMe swapper to pass on to the next one (None without NVMe), since each new swapper pins buffers.
    """
    holder = nn.Module()
    holder.weight = parameter
    if groups.mpu:  # DeepSpeed's own linear does not know DTensors; autograd's is right and as small with checkpointing
        ds_config = ds_config | {"zero_optimization": ds_config["zero_optimization"] | {"memory_efficient_linear": False}}
    init = deepspeed.zero.Init(
        module=holder,
        config_dict_or_path=ds_config,
        mpu=groups.mpu,
        data_parallel_group=groups.dp_group if groups.mpu else None,
        param_swapper=swapper,
    )
    return init.param_swapper


def _return_freed_blocks(at_once: bool) -> None:
    """Tells glibc to give freed blocks of 1 MiB and more back to the system at once, or (False) to keep up to 32 MiB for reuse.

    By itself it starts with the one and drifts to the other, and then holes that whole parameters leave between their
    partitions cost half as much memory again (1.0 GB in ZeRO-3 on 2 ranks: 0.8 to 1.1 GB a rank instead of 0.65).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; man 3 mallopt
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, 2**20 if at_once else 2**25)
        mallopt(m_trim_threshold, 2**17 if at_once else 2**26)


def open_weights(recipe: Recipe, model: Any) -> Callable[[str], torch.Tensor]:
    """A reader of the model's safetensors files: parameter name -> whole tensor in the files' dtype, memory-mapped.

    Raises `Refusal` naming what the files lack: a parameter is never left at a random value.
    """
    folder = weights_folder(recipe)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise refuse(
            f"model = {recipe.model}", f"{folder} holds no .safetensors file", "save the model with save_pretrained, or train from scratch with --init random"
        )
    handles = [safe_open(file, framework="pt") for file in files]
    where = {key: handle for handle in handles for key in handle.keys()}  # noqa: SIM118 (a safetensors handle is no dict)
    prefix = model.base_model_prefix + "."
    source = {}
    for name in [*dict(model.named_parameters()), *(name for name, _ in model.named_buffers() if name in model.state_dict())]:
        # A checkpoint of the base model alone (GPT-2's) lacks the prefix.
        source[name] = name if name in where else name.removeprefix(prefix)
    missing = [name for name, key in source.items() if key not in where]
    if missing:
        raise Refusal(
            [
                Problem(
                    f"model = {recipe.model}",
                    f"its files lack {len(missing)} of {len(source)} parameters, first {missing[0]}",
                    "give the files that match this config.json and transformers version",
                )
            ]
        )
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    wrong = [(name, found) for name, key in source.items() if (found := where[key].get_slice(key).get_shape()) != shapes[name]]
    if wrong:
        name, found = wrong[0]
        raise refuse(f"model = {recipe.model}", f"{name} is {found} in its files and {shapes[name]} by its config.json", "give files and config of one model")
    return lambda name: where[source[name]].get_tensor(source[name])


def weights_folder(recipe: Recipe) -> Path:
    """The folder of the model's safetensors; downloads a hub model once per host. Raises `Refusal` if it cannot be had."""
    if Path(recipe.model).is_dir():
        return Path(recipe.model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    page = f"https://huggingface.co/{recipe.model}"
    try:
        return Path(snapshot_download(recipe.model, allow_patterns=["*.safetensors", "*.json"]))
    except GatedRepoError:
        raise refuse(f"model = {recipe.model}", f"is gated: its licence has to be accepted at {page}", "then log in with: hf auth login") from None
    except RepositoryNotFoundError:
        raise refuse(f"model = {recipe.model}", f"{page} does not exist or is private", "check the name, or log in with: hf auth login") from None
    except (LocalEntryNotFoundError, OSError) as error:
        raise refuse(
            f"model = {recipe.model}",
            f"cannot be downloaded ({type(error).__name__}) and is not in the local cache",
            f"download it where there is a network: hf download {recipe.model}",
        ) from None


def check_weights(engine: Any, built: Built, groups: Groups, samples: int = 8) -> int:
    """Compares sampled parameters in the engine with the files, bit for bit; returns how many. A collective.

    Raises `Refusal` naming the first that differs: training from random weights by accident is found here.
    """
    if built.read is None:
        return 0
    published = [parameter for parameter in built.model.parameters() if id(parameter) in built.names]
    chosen = published[:: max(1, len(published) // samples)]
    for parameter in chosen:
        name = built.names[id(parameter)]
        expected = built.read(name).to(parameter.dtype)
        if name in built.cuts:
            assert groups.tp_mesh is not None
            expected = tensor_parallel.shard(expected, built.cuts[name], groups.tp_mesh)
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            same = torch.equal(parameter.detach().cpu(), expected)
        if not same:
            raise refuse(name, "in the engine differs from the model's files", "this is a bug in loading; report it with the model and the versions")
    return len(chosen)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two optimizer groups: matrices decay, vectors (norms, biases) do not. Frozen parameters are in neither."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dims = {id(parameter): len(getattr(parameter, "ds_shape", parameter.shape)) for parameter in trained}
    matrices = [parameter for parameter in trained if dims[id(parameter)] >= 2]
    vectors = [parameter for parameter in trained if dims[id(parameter)] < 2]
    return [{"params": matrices}] + ([{"params": vectors, "weight_decay": 0.0}] if vectors else [])


def enabled(ds_config: dict[str, Any], block: str) -> bool:
    """True if a block such as bf16 is there and switched on."""
    return bool(ds_config.get(block, {}).get("enabled", False))


def fetch_config(recipe: Recipe) -> dict[str, Any]:
    """The config.json of a model that is neither shipped nor on this machine, as a dict. Raises `Refusal`."""
    folder = weights_folder(recipe)
    return json.loads((folder / "config.json").read_text())
