"""From a model's config and weights to a model that DeepSpeed can train: built part by part, never whole on one rank."""

import contextlib
import ctypes
import dataclasses
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.utils import set_z3_leaf_module
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers.initialization import guard_torch_init_functions, no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from . import expert_parallel, pipeline, safetensors_files, sequence_parallel, tensor_parallel
from .architecture import OTHERS, read_config, tiny_copy
from .blueprint import Blueprint, Tensor, stages_of
from .groups import Groups
from .recipe import Recipe
from .refusal import Refusal, refuse
from .tensor_parallel import Cut
from .weights import Weights, open_weights

CAUSAL_VOCABULARY = 264  # of the tiny copy that shows whether a model reads ahead
READS_AHEAD_FROM = 1e-5  # a change of an earlier logit, as a share of the largest one


@dataclass(frozen=True)
class Built:
    """What `deepspeed.initialize` gets: the model, or this rank's pipeline stages of it.

    `names` holds the Hugging Face name of each parameter by its id, since an adapter renames what it wraps; `cuts` says
    which of them are tensor-parallel shards and how. `weights` are the files they were read from, None after a random init.
    """

    models: list[Any]
    cuts: dict[str, Cut]
    names: dict[int, str]
    weights: Weights | None
    split: pipeline.Split | None
    blueprint: Blueprint

    @property
    def model(self) -> Any:
        return self.models[0]


def build_model(recipe: Recipe, model_config: dict[str, Any], groups: Groups | None, ds_config: dict[str, Any], device: torch.device) -> Built:
    """The model of a recipe, its weights drawn or read, cut to this rank's stages and tensor shard and, under ZeRO-3, partitioned.

    Without `groups` it is the whole model on one process.

    The weights are filled in one part (a layer, an embedding) after the other, so that no rank ever holds more than one
    whole part besides what it keeps. A collective under ZeRO-3. Raises `Refusal` when the files do not hold every parameter.
    """
    dtype = torch.bfloat16 if enabled(ds_config, "bf16") else torch.float16 if enabled(ds_config, "fp16") else torch.float32
    whole = empty_model(recipe, model_config)
    if groups and groups.mesh.sp > 1:
        sequence_parallel.apply(whole, recipe, groups)
    if groups and groups.mesh.ep > 1:
        expert_parallel.check(whole, groups.mesh.ep)
    blueprint = draft(whole, recipe.pp_plan)
    tp_mesh = groups.tp_mesh if groups else None
    tp_plan = tensor_parallel.plan_of(whole) if tp_mesh else {}
    pp = groups.mesh.pp if groups else 1
    if pp == 1 or groups is None:
        split, models, absent = None, [whole], [[]]
    else:
        stages = stages_of(groups.coords["pp"], pp, recipe.pipeline_schedule)
        split = pipeline.split(whole, blueprint, pp * len(stages), recipe.pp_plan)
        models = [empty_model(recipe, model_config) for _ in stages]
        absent = [pipeline.cut(model, split, stage, dtype) for model, stage in zip(models, stages, strict=True)]
    cuts: dict[str, Cut] = {}
    filled: dict[str, nn.Parameter] = {}
    weights = None
    for model, names in zip(models, absent, strict=True):
        for name, parameter in model.named_parameters():
            if name in filled:  # on both stages of a rank
                replace_parameter(model, parameter, filled[name])
        weights = None if recipe.init == "random" else open_weights(recipe, model, weights)
        if tp_mesh:
            cuts |= tensor_parallel.apply(model, tp_mesh, {pattern: style for pattern, style in tp_plan.items() if pattern not in names})
        fill(model, recipe, groups, ds_config, device, dtype, cuts, weights)
        filled |= dict(model.named_parameters())
    by_id = {id(parameter): name for name, parameter in filled.items()}
    if recipe.adapt is not None:
        torch.manual_seed(recipe.seed)
        models = [recipe.adapt(whole)]
        if groups and groups.mesh.ep > 1 and hasattr(models[0], "peft_config"):
            raise refuse("ep > 1", "peft's adapters do not know experts that lie on other ranks", "use --ep 1; ZeRO-3 divides the frozen weights too")
        if tp_mesh and hasattr(models[0], "peft_config"):
            raise refuse("tp > 1", "peft's adapters do not know tensor-parallel shards", "use --tp 1; ZeRO-3 divides the frozen weights too")
    for model in models:
        model.train()
        for module in leaf_modules(model):
            set_z3_leaf_module(module, True)
    if recipe.adapt is not None:
        blueprint = draft(models[0])
    elif weights is not None:
        blueprint = with_files(blueprint, weights)
    return Built(models, cuts, by_id, weights, split, blueprint)


def leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules whose experts lie in a module of their own, or in a list of such: ZeRO-3 must gather such a block as one.

    Else a rank on which an expert gets no tokens gathers less than its peers, and all wait for ever; or, DBRX, the weights
    that every expert reads are gone after the first.
    """
    found = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts":
            own = [child for child in module.children() if any(True for _ in child.parameters())]
            if own and isinstance(module, nn.ModuleList):
                found.append(model.get_submodule(name.rpartition(".")[0]))
            elif len(own) == 1:
                found.append(module)
    return found


def draft(model: Any, own_plan: dict[str, str] | None = None) -> Blueprint:
    """What checkpoints have to know of a whole model (not yet cut, its parameters on the meta device or partitioned).

    Places and cuts are those of the plans it publishes, or of the recipe's own pipeline plan.
    """
    plan: dict[str, str] = {}
    with contextlib.suppress(Refusal):  # it has none
        plan = pipeline.plan_of(model, own_plan)
    rules: dict[str, tuple[int, int]] = {}
    can_tp = True
    try:
        rules = tensor_parallel.cut_rules(model, tensor_parallel.plan_of(model))
    except Refusal:
        can_tp = False
    embedding = model.get_input_embeddings()
    named = dict(model.named_parameters(remove_duplicate=False))
    first_names = {id(parameter): name for name, parameter in reversed(named.items())}
    tied = {name for name, parameter in named.items() if parameter is embedding.weight}
    layers = next((name for name, place in plan.items() if place == "split"), None)

    def place(name: str) -> str:
        if layers is not None and name.startswith(f"{layers}."):
            return name.removeprefix(f"{layers}.").split(".")[0]
        where = next((place for module, place in plan.items() if place != "split" and name.startswith(f"{module}.")), "every")
        return "ends" if len(tied) > 1 and where == "first" and name in tied else where

    tensors = []
    for name, parameter in model.named_parameters():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        tensors.append(Tensor(name, shape, (0 if len(shape) >= 2 else 1) if parameter.requires_grad else None, rules.get(name), place(name)))
    for name, value in model.state_dict().items():
        if name not in named:
            tensors.append(Tensor(name, tuple(value.shape), None, None, place(name), str(value.dtype).removeprefix("torch.")))
    aliases = {name: (first, place(name)) for name, parameter in named.items() if (first := first_names[id(parameter)]) != name}
    num_layers = len(model.get_submodule(layers)) if layers is not None else 0  # pyright: ignore[reportArgumentType]
    return Blueprint(tuple(tensors), aliases, num_layers, can_tp)


def published_blueprint(folder: Path) -> Blueprint:
    """The blueprint of a model from its files. Raises `Refusal` for a model that cannot be trained, or files that do not hold all of it."""
    recipe = Recipe(model=str(folder), attention="eager")  # the one that every model has; only `check_causal` computes with it
    config = read_config(folder / "config.json", str(folder))
    safetensors_files.open_folder(folder)
    model = empty_model(recipe, config)
    check_causal(recipe, config)
    return with_files(draft(model), open_weights(recipe, model))


def with_files(blueprint: Blueprint, weights: Weights) -> Blueprint:
    """The blueprint, with where the model's files hold its tensors."""
    published = {tensor.name: weights.stored[tensor.name] for tensor in blueprint.tensors if tensor.name in weights.stored}
    return dataclasses.replace(blueprint, published=published, files=weights.contents())


def fill(
    model: Any,
    recipe: Recipe,
    groups: Groups | None,
    ds_config: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    cuts: dict[str, Cut],
    weights: Weights | None,
) -> None:
    """Gives every parameter that is still on the meta device its value."""
    tp_mesh = groups.tp_mesh if groups else None
    names = {id(module): name for name, module in model.named_modules()}
    zero3 = groups is not None and ds_config["zero_optimization"]["stage"] == 3
    swapper = None
    _return_freed_blocks(True)
    for part, deep in parts(model):
        unfilled = [(name, parameter) for name, parameter in own_parameters(part, deep, names[id(part)]) if parameter.device.type == "meta"]
        if not unfilled:
            continue  # tied to a parameter that an earlier part filled
        values = draw(model, part, deep, names[id(part)], cuts, recipe.seed) if weights is None else {}
        for name, parameter in unfilled:
            if weights is not None:
                value = weights.part(name, cuts.get(name), tp_mesh)
            else:
                value = values.pop(name)
                if tp_mesh and name in cuts:
                    value = tensor_parallel.shard(value, cuts[name], tp_mesh)
            # a copy: safetensors' tensors are views of the mapped file, which training must not write to
            filled = nn.Parameter(value.to(device, dtype, copy=True), requires_grad=parameter.requires_grad)
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
        buffer.data = (weights.whole(name).to(buffer.dtype) if weights and name in persistent else buffer.data).to(device)


def empty_model(recipe: Recipe, model_config: dict[str, Any]) -> Any:
    """The model of a config with its parameters on the meta device, its buffers real, its embeddings tied.

    Its attribute `made` holds the values that the constructors gave to small parameters, by name: some of those no
    initialiser sets (Apertus' activation), and most are memory that was never written. Raises `Refusal` for an attention
    implementation that the model does not have.
    """
    with no_init_weights(), parameters_on_meta() as small:
        model = _construct(recipe, _config_of(recipe, model_config))
    model.made = {
        f"{name}.{key}" if name else key: small[id(module), key]
        for name, module in model.named_modules()
        for key in module._parameters
        if (id(module), key) in small
    }
    model.tie_weights()
    if recipe.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        checkpointed = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        for number, layer in enumerate(checkpointed):
            layer.gradient_checkpointing = number % recipe.checkpoint_every == 0
    return model


def _config_of(recipe: Recipe, model_config: dict[str, Any]) -> Any:
    """The config of transformers' own class. Raises `Refusal` for values that the class does not take."""
    model_config = dict(model_config)
    kind = model_config.pop("model_type")
    try:
        return transformers.AutoConfig.for_model(kind, **model_config)
    except (ValueError, TypeError, StrictDataclassError) as error:
        rule = f"transformers {transformers.__version__} does not take its config.json: {' '.join(str(error).split())}"
        raise refuse(f"model = {recipe.model}", rule, "mend the value") from None


def _construct(recipe: Recipe, config: Any) -> Any:
    """The model that transformers makes of a config, in fp32."""
    config._attn_implementation = recipe.attention
    config._name_or_path = recipe.model  # what an exported adapter names as its base
    config.use_cache = False  # with a cache transformers ignores packed position_ids, and documents leak into each other
    try:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, ImportError) as error:  # of an attention that the class, or this machine, does not have
        if "attention" not in str(error).lower():
            raise
        fix = "use --attention eager" if recipe.attention != "eager" else "use another model"
        raise refuse(f"attention = {recipe.attention}", f"a {config.model_type} cannot use it here: {str(error).split('.')[0]}", fix) from None


def check_causal(recipe: Recipe, model_config: dict[str, Any]) -> str:
    """Raises `Refusal` for a model whose logits depend on tokens that come later: it would learn to copy its labels.

    A tiny copy with random weights reads a row twice, the second time with another last token; before that token nothing may
    change. The same on every rank, and no collective. Returns "", or why this could not be looked at.
    """
    config = _config_of(recipe, model_config)
    unknown = f"not known whether a {config.model_type} looks back only"
    on_cpu = recipe.attention if recipe.attention in ("sdpa", "eager") else "eager"  # flash attention is for GPUs
    try:
        tiny = tiny_copy(config, CAUSAL_VOCABULARY)
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # a Refusal of `shrink` is a ValueError
        return f"{unknown}: {error.problems[0].rule if isinstance(error, Refusal) else f'it cannot be made small ({type(error).__name__}: {error})'}"
    try:
        logits, changed = _two_readings(dataclasses.replace(recipe, attention=on_cpu), tiny)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        if isinstance(error, Refusal):
            raise
        return f"{unknown}: no tiny copy of it runs ({type(error).__name__}: {str(error)[:200]})"
    before, last = (logits - changed).abs().split([len(logits) - 1, 1])
    if not logits.isfinite().all() or not last.any():
        return f"{unknown}: the logits of a tiny copy do not tell"
    if before.max() > READS_AHEAD_FROM * logits.abs().max():
        rule = f"a {config.model_type} reads the tokens that it should predict: with another token at the end the logits before it change"
        raise refuse(f"model = {recipe.model}", rule, f"{OTHERS}, and leave its attention causal")
    return ""


def _two_readings(recipe: Recipe, tiny: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits, (T, V) fp32, that a model with random weights gives for a row, and for the same row with another last token."""
    if tiny.get("initializer_range"):
        tiny = tiny | {"initializer_range": 0.1}  # what is read must be seen, however small the weights of its real width begin
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = _construct(recipe, _config_of(recipe, tiny)).eval()
        ids = torch.randint(3, CAUSAL_VOCABULARY - 1, (1, 32))  # (B, T)
        other = ids.clone()
        other[0, -1] += 1
        logits = []
        for row in (ids, other):
            torch.manual_seed(0)  # Reformer draws its hashes anew in every forward
            logits.append(model(input_ids=row, position_ids=torch.arange(32).unsqueeze(0), use_cache=False).logits[0].float())
    return logits[0], logits[1]


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[dict[tuple[int, str], torch.Tensor]]:
    """Puts every new parameter on the meta device; yields copies of the small ones, by (id of the module, key)."""
    small: dict[tuple[int, str], torch.Tensor] = {}
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            if parameter.numel() <= 4096:
                small[id(module), name] = parameter.detach().clone()
            module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield small
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


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
                module._parameters[key] = nn.Parameter(torch.full(cuts[full].shape if full in cuts else parameter.shape, math.nan))
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
            full = f"{name}.{key}" if name else key
            drawn = module._parameters[key].detach()  # type: ignore[union-attr]
            if drawn.isnan().any():  # no initialiser set it, so the constructor did
                if full not in model.made:
                    raise refuse("--init random", f"{type(model).__name__} has no initialiser for {full}", "give pretrained weights with --model")
                drawn = model.made[full].float()
            values[full] = drawn
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


def check_weights(engine: Any, built: Built, groups: Groups, samples: int = 8) -> int:
    """Compares sampled parameters in the engine with the files, bit for bit; returns how many. A collective.

    Raises `Refusal` naming the first that differs: training from random weights by accident is found here.
    """
    if built.weights is None:
        return 0
    published = [parameter for model in built.models for parameter in model.parameters() if id(parameter) in built.names]
    chosen = published[:: max(1, len(published) // samples)]
    for parameter in chosen:
        name = built.names[id(parameter)]
        expected = built.weights.whole(name).to(parameter.dtype)
        if name in built.cuts:
            assert groups.tp_mesh is not None
            expected = tensor_parallel.shard(expected, built.cuts[name], groups.tp_mesh).cpu()  # DTensor cuts on the device of its mesh
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
    # DeepSpeed splits experts off each group by its name (moe/utils.py)
    return [{"params": matrices, "name": "matrices"}] + ([{"params": vectors, "weight_decay": 0.0, "name": "vectors"}] if vectors else [])


def enabled(ds_config: dict[str, Any], block: str) -> bool:
    """True if a block such as bf16 is there and switched on."""
    return bool(ds_config.get(block, {}).get("enabled", False))
