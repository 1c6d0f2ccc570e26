"""A DeepSpeed JSON: read strictly, every mistake found before anything starts, every "auto" turned into a number.

What DeepSpeed reads is in ds_schema.json (written by tools/make_ds_schema.py), what it cannot combine in ds_rules.py.
Neither torch nor deepspeed is imported, so a refusal takes about a second.
"""

import copy
import dataclasses
import difflib
import json
import math
import os
import re
from collections.abc import Callable
from json import decoder, scanner
from pathlib import Path
from typing import Any

from .architecture import LAYERS
from .ds_rules import RECIPE_HONOURS, RECIPE_RULES, RULES, STOCK_RULES, Facts
from .ds_schema import AUTO, FILLED_BY, at, meant_by_auto, optimizer_name, optimizer_params, resembled, shown, walk
from .mesh import Mesh, make_mesh, nearest_worlds
from .recipe import Recipe
from .refusal import APPLIES, FAILS, Problem, Refusal, refuse

SHIPPED = Path(__file__).resolve().parents[2] / "ds_configs"

# Numbers that both the recipe and the JSON may set: field of Recipe -> path in the JSON.
SHARED = {
    "global_batch": "train_batch_size",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "gradient_clipping": "gradient_clipping",
    "lr": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "beta1": "optimizer.params.betas.0",
    "beta2": "optimizer.params.betas.1",
    "eps": "optimizer.params.eps",
}
DEGREES = {
    "tp": "tensor_parallel.autotp_size",
    "pp": "pipeline.stages",
    "sp": "sequence_parallel_size",
    "ep": "expert_parallel.autoep_size",
}

# While one of these, or a block that it lies in, is at fault or misspelt, what it combines with cannot be told.
PIVOTS = (
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
    "bf16.enabled",
    "fp16.enabled",
    "optimizer.type",
    "optimizer.params.torch_adam",
)

MOST_MASK_BYTES = 40_000_000_000  # half of an 80 GB device; what else such a row needs is more than the other half


# Reading


def load(name: str | dict[str, Any], folder: Path) -> tuple[dict[str, Any], Path | None]:
    """The JSON called `name` and its path; a dict is returned as it is, with no path.

    A name is looked up as typed, then in `folder` (where the recipe lies), then in the repository's ds_configs/. Raises
    `Refusal` if it is not there or not strict JSON.
    """
    if isinstance(name, dict):
        return copy.deepcopy(name), None
    places = [Path(name).expanduser(), folder / name, SHIPPED / name]
    for path in places:
        if path.is_file():
            return _read(path), path
    known = sorted({path.name for place in (folder, SHIPPED) if place.is_dir() for path in place.glob("*.json")})
    near = difflib.get_close_matches(Path(name).name, known, 1)
    fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}" if known else "give the path of a DeepSpeed JSON"
    looked = ", ".join(str(path) for path in dict.fromkeys(places))
    raise refuse(f"deepspeed_config = {name}", f"no such file (looked for {looked})", fix)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(str(path), f"cannot be read: {error}", "give a readable JSON file in UTF-8") from None
    try:
        config = _StrictDecoder(text).decode(text)
    except json.JSONDecodeError as error:
        raise Refusal(_not_strict(path, text, error)) from None
    except RecursionError:
        raise refuse(str(path), "is nested too deeply to be a DeepSpeed configuration", "see ds_configs/README.md") from None
    except ValueError as error:  # an integer of thousands of digits
        raise refuse(str(path), f"is not usable JSON: {error}", "write smaller numbers") from None
    if not isinstance(config, dict):
        raise refuse(str(path), f"holds {shown(config)}, not an object", 'start from a file of ds_configs/: {"zero_optimization": {"stage": 2}, ...}')
    return config


def _not_strict(path: Path, text: str, error: json.JSONDecodeError) -> list[Problem]:
    """Every comment and spare comma, and what else is no JSON when these are out."""
    found: dict[int, tuple[str, str]] = {}  # where it begins -> what JSON has none of, the fix
    for pattern, what in ((r"(//[^\n]*|#[^\n]*|/\*.*?\*/)", "comments"), (r"(,)(?=\s*[}\]])", "comma before a closing bracket")):
        for match in list(re.finditer(r'"(?:\\.|[^"\\])*"|' + pattern, text, re.DOTALL)):
            if remark := match[1]:
                found[match.start()] = what, "delete all from /* to */" if "\n" in remark else f"delete {remark.rstrip()}"
                text = text[: match.start()] + re.sub(r"\S", " ", remark) + text[match.end() :]  # all else keeps its place

    def where(spot: int) -> str:
        return f"{path}, line {text.count(chr(10), 0, spot) + 1}, column {spot - text.rfind(chr(10), 0, spot)}"

    problems = [Problem(where(spot), f"is not strict JSON, which has no {what}", fix) for spot, (what, fix) in sorted(found.items())]
    try:
        _StrictDecoder(text).decode(text)
    except json.JSONDecodeError as other:
        error = other
    else:
        if problems:
            return problems
    fix = "JSON has no NaN and no single quotes, a comma between two keys, and no key twice"
    return [*problems, Problem(where(error.pos), f"is not strict JSON: {error.msg}", fix)]


class _StrictDecoder(json.JSONDecoder):
    """JSON that refuses a key written twice, NaN and Infinity, with the line and column.

    json's hooks are not told where they are, so this uses its Python scanner, whose parse functions are.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.parse_object = self._object
        self.parse_constant = self._constant
        self.scan_once = scanner.py_make_scanner(self)  # pyright: ignore[reportAttributeAccessIssue]

    def _constant(self, name: str) -> Any:
        strings_or_name = re.finditer(rf'"(?:\\.|[^"\\])*"|({re.escape(name)})', self.text)
        start = next(match.start() for match in strings_or_name if match.group(1))
        raise json.JSONDecodeError(f"{name} is no JSON number", self.text, start)

    def _object(self, s_and_end: tuple[str, int], strict: bool, scan_once: Any, _hook: Any, _pairs_hook: Any, memo: Any) -> Any:
        pairs: list[tuple[str, Any]] = []
        _, end = decoder.JSONObject(s_and_end, strict, scan_once, None, pairs.extend, memo)  # pyright: ignore
        names = [name for name, _ in pairs]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise json.JSONDecodeError(f'"{twice[0]}" is written twice in the block that starts here', self.text, s_and_end[1] - 1)
        return dict(pairs), end


# Checking


def check(
    config: dict[str, Any],
    *,
    world: int | None = None,
    mesh: Mesh | None = None,
    recipe: Recipe | None = None,
    model_config: dict[str, Any] | None = None,
    typed: frozenset[str] = frozenset(),
    json_only: bool = False,
    filled_by: str = "",
    layout: dict[str, int] | None = None,
) -> list[Problem]:
    """Every mistake that can be told without hardware; an empty list if there is none.

    What is not given is not checked. `typed` names the recipe's fields that came from the command line. `json_only` is
    for a JSON that another script hands to DeepSpeed: what has no effect in a recipe only is then let pass, and a problem
    whose outcome is APPLIES is but an advice. `filled_by` names who turns "auto" into numbers in such a script ("trainer",
    "accelerate", or nobody), `layout` the degrees of its mesh.
    """
    found, clean = walk(config, FILLED_BY[filled_by] if json_only else AUTO)
    if not json_only:
        for path, value in meant_by_auto(config).items():
            if at(config, path) == "auto":  # what is combined is judged as it will be
                clean.setdefault(path.partition(".")[0], {})["enabled"] = value
        found = _schedule(found, config, clean, recipe)
    degrees = {axis: getattr(recipe, axis, 1) for axis in DEGREES} | _degrees(clean)
    if json_only:
        degrees |= {"pp": 1} | (layout or {})  # of pipeline.stages DeepSpeed takes no notice
    if mesh is not None:
        degrees = {axis: getattr(mesh, axis) for axis in DEGREES}
    elif world is not None:
        try:
            mesh = make_mesh(world, **degrees)
        except Refusal as refusal:
            found += refusal.problems
    degrees = {axis: max(1, degree) for axis, degree in degrees.items()}  # a smaller one has been told
    facts = Facts(clean, optimizer_name(clean), degrees, mesh.world if mesh else world, stock=json_only)
    rules = () if any(_at_fault(pivot, config, clean) for pivot in PIVOTS) else RULES + (STOCK_RULES if json_only else RECIPE_RULES)
    for rule in rules:
        if (value := facts.get(rule.key)) is not None and rule.broken(facts):
            found.append(Problem(f"{rule.key} = {shown(value)}", rule.rule, rule.fix, rule.outcome))
    if json_only:
        found += _no_batch(config, filled_by)
    else:
        found += _half_honoured(clean)
    if recipe is not None:
        found += _contradictions(clean, recipe, typed)
    found += _batch(clean, recipe, mesh)
    found += _divisions(degrees, facts, recipe, model_config, mesh)
    found += _pipeline(degrees["pp"], clean, recipe, model_config, mesh)
    if recipe is not None and divisible(model_config, 0)["sp"]["attention heads"]:
        found += _dense_mask(recipe, _number(clean, recipe, "micro_batch") or 1, 4 if facts.dtype == "fp32" else 2)
    return list(dict.fromkeys(found))


def _at_fault(pivot: str, config: dict[str, Any], clean: dict[str, Any]) -> bool:
    """True if the walk took a key or a block of `pivot` out of `config`, under its own name or one that resembles it."""
    for key in pivot.split("."):
        if key not in clean and resembled(key, config.keys() - clean.keys()):
            return True
        config, clean = config.get(key) or {}, clean.get(key) or {}
    return False


def check_device(config: dict[str, Any], device_type: str) -> list[Problem]:
    """What the accelerator of this process cannot do; `device_type` is torch's name for it, such as cuda or cpu."""
    facts = Facts(walk(config)[1])
    found = []
    if device_type == "cpu" and facts.dtype == "fp16":
        found.append(Problem("fp16.enabled = true", "DeepSpeed does not train in fp16 on a CPU", 'set "fp16": {"enabled": false}, "bf16": {"enabled": true}'))
    if device_type == "cpu" and optimizer_name(facts.config) == "Lamb":
        found.append(Problem("optimizer.type = Lamb", "has no CPU implementation", "use AdamW"))
    if device_type != "cuda" and facts.get("aio.use_gds"):
        found.append(Problem("aio.use_gds = true", "GPU direct storage needs CUDA", "set it to false"))
    if device_type != "cuda" and facts.get("zero_optimization.offload_optimizer.super_offload"):
        found.append(Problem("zero_optimization.offload_optimizer.super_offload = true", "needs CUDA", "set it to false"))
    return found


def check_swap(config: dict[str, Any], out: Path) -> list[Problem]:
    """NVMe folders that cannot be used on this host; a relative `nvme_path` lies under `out`."""
    found = []
    for path in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        block = at(config, path)
        if not isinstance(block, dict) or block.get("device") != "nvme" or not isinstance(block.get("nvme_path"), str):
            continue
        where, folder = f"{path}.nvme_path = {block['nvme_path']}", Path(block["nvme_path"]).expanduser()
        relative = not folder.is_absolute()
        folder = out / folder if relative else folder
        there = folder
        while relative and not there.exists():  # under `out` it is made
            there = there.parent
        if not there.is_dir():
            found.append(Problem(where, f"no folder {folder} on this host", "write the folder of a local drive"))
        elif not os.access(there, os.W_OK):
            found.append(Problem(where, f"{there} is not writable", "write a folder this user may write to"))
        elif file_system(there) in ("tmpfs", "ramfs"):
            found.append(Problem(where, f"{there} is in memory ({file_system(there)}), so offloading there saves none", "write the folder of a local drive"))
    return found


def file_system(folder: Path) -> str:
    """The kind of file system that `folder` lies on, or "" where the system does not tell."""
    mounts = Path("/proc/self/mounts")
    best, kind = "", ""
    for line in mounts.read_text().splitlines() if mounts.exists() else []:
        _, point, name, *_ = line.split()
        point = point.replace("\\040", " ")
        if len(point) >= len(best) and folder.resolve().is_relative_to(point):
            best, kind = point, name
    return kind


# What the JSON says


def degrees(config: dict[str, Any]) -> dict[str, int]:
    """The parallel degrees that the JSON sets, of tp, pp, sp and ep."""
    return _degrees(walk(config)[1])


def literals(config: dict[str, Any]) -> dict[str, Any]:
    """Field of `Recipe` -> the number that the JSON sets for it. An "auto" is no number."""
    clean = walk(config)[1]
    found = {}
    for field, path in SHARED.items():
        block, _, last = path.rpartition(".")
        value = at(clean, block)[int(last)] if last.isdigit() and at(clean, block) else at(clean, path)
        if value is not None and value != "auto":
            found[field] = value
    return found


def _degrees(clean: dict[str, Any]) -> dict[str, int]:
    found = {axis: value for axis, path in DEGREES.items() if (value := at(clean, path))}
    if not at(clean, "expert_parallel.enabled"):
        found.pop("ep", None)
    return found


# Resolving


def resolve(config: dict[str, Any], recipe: Recipe, mesh: Mesh, model_config: dict[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """The JSON as DeepSpeed gets it, and one line for each recipe default that a literal of the JSON beats.

    Every "auto" is a number, and the numbers of the recipe that the JSON does not mention are there. Degrees are taken
    out, since the recipes lay out the ranks themselves; of sequence parallelism DeepSpeed has to know, because its batch
    arithmetic counts ranks, and expert parallelism is its own. `config` must have passed `check`.
    """
    found, resolved = walk(config)
    assert not found, found
    said = literals(resolved)
    beaten = said | _degrees(resolved)
    lines = [f"{field}: the JSON's {value} beats the recipe's {getattr(recipe, field)}" for field, value in beaten.items() if value != getattr(recipe, field)]

    global_batch, micro_batch = said.get("global_batch", recipe.global_batch), said.get("micro_batch", recipe.micro_batch)
    resolved["train_batch_size"] = global_batch
    resolved["train_micro_batch_size_per_gpu"] = micro_batch
    resolved["gradient_accumulation_steps"] = global_batch // (micro_batch * mesh.dp)
    resolved["gradient_clipping"] = said.get("gradient_clipping", recipe.gradient_clipping)

    steps, facts = resolved["gradient_accumulation_steps"], Facts(resolved)
    if steps > 1 and facts.stage == 0 and facts.dtype != "fp32":
        lines.append(f"gradients: ZeRO-0 sums the {steps} micro-batches of a step in {facts.dtype}; zero1.json sums them in fp32")
    if "optimizer" not in resolved:
        offloaded = Facts(resolved).offload != "none"
        resolved["optimizer"] = {"type": "AdamW", "params": {} if offloaded else {"torch_adam": True}}
        lines.append("optimizer: the JSON has none, so AdamW")
    params = resolved["optimizer"].setdefault("params", {})
    takes = optimizer_params(resolved)
    numbers = {"lr": recipe.lr, "weight_decay": recipe.weight_decay, "betas": [recipe.beta1, recipe.beta2], "eps": recipe.eps}
    for key, number in numbers.items():
        if key in takes and params.get(key, "auto") == "auto":
            params[key] = number

    hidden = _shape(model_config, "hidden_size", "n_embd", "d_model")
    bucket = max(hidden, 4096) ** 2  # elements; smaller ones waste the network on many short messages
    sizes = {
        "reduce_bucket_size": bucket,
        "stage3_prefetch_bucket_size": int(0.9 * bucket),
        "stage3_param_persistence_threshold": 10 * (hidden or 4096),
    }
    zero = resolved.setdefault("zero_optimization", {})
    zero.setdefault("stage", 0)
    zero |= {key: size for key, size in sizes.items() if zero.get(key) == "auto"}

    for block in ("tensor_parallel", "expert_parallel", "pipeline", "sequence_parallel_size"):
        resolved.pop(block, None)
    if mesh.pp > 1 and recipe.pipeline_schedule == "dualpipev":  # DeepSpeed divides what stages send by tp unless told, which DualPipeV refuses
        resolved["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    if mesh.sp > 1:
        resolved["sequence_parallel_size"] = mesh.sp
    if mesh.ep > 1:
        resolved["expert_parallel"] = {"enabled": True, "autoep_size": mesh.ep}
    return resolved, lines


# Several keys together

# What a recipe's own schedule is called that does the same.
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _schedule(found: list[Problem], config: dict[str, Any], clean: dict[str, Any], recipe: Recipe | None) -> list[Problem]:
    """`found`, with one problem in place of several for a scheduler that leaves numbers to Trainer; or with one for its length.

    The former is taken out of `clean`, as its fix is to delete it.
    """
    params, name, where = at(config, "scheduler.params"), at(config, "scheduler.type"), "scheduler.params."
    autos = [key for key, value in params.items() if value == "auto"] if isinstance(params, dict) and isinstance(name, str) and name in SCHEDULES else []
    if not autos:
        total, steps = at(clean, f"{where}total_num_steps"), recipe.steps if recipe is not None else None
        if steps is None or total in (None, steps):
            return found
        fix = f"write {steps}, or delete the scheduler block and use --schedule"
        return [*found, Problem(f"{where}total_num_steps = {total}", f"differs from the {steps} steps of the run", fix, APPLIES)]
    clean.pop("scheduler", None)
    numbers: dict[str, Any] = {"schedule": SCHEDULES[name]}
    if SCHEDULES[name] == "constant" and recipe is not None and recipe.min_lr:
        numbers["min_lr"] = "0"
    for field, key in (("warmup_steps", "warmup_num_steps"), ("lr", "warmup_max_lr")):
        if isinstance(value := params.get(key), (int, float)):
            numbers[field] = value
    rule = f'"auto" in {", ".join(autos)} is filled by nobody here: a recipe makes its own schedule'
    flags = " ".join(f"--{field} {value}" for field, value in numbers.items())
    others = [problem for problem in found if not problem.where.startswith(where)]
    return [*others, Problem(f"scheduler = {shown(config['scheduler'])}", rule, f"delete the block and use {flags}", FAILS)]


def _half_honoured(clean: dict[str, Any]) -> list[Problem]:
    """Keys of blocks of which a recipe reads only the degree."""
    return [
        Problem(f"{block}.{key} = {shown(value)}", f"a recipe reads only {' and '.join(sorted(honoured))} of this block", "delete it")
        for block, honoured in RECIPE_HONOURS.items()
        for key, value in clean.get(block, {}).items()
        if key not in honoured
    ]


def _contradictions(clean: dict[str, Any], recipe: Recipe, typed: frozenset[str]) -> list[Problem]:
    """Typed flags that a literal of the JSON contradicts, or that nothing would read."""
    found = []
    for field, value in (literals(clean) | _degrees(clean)).items():
        if field in typed and value != getattr(recipe, field):
            path = (SHARED | DEGREES)[field]
            fix = 'drop the flag, or write "auto" in the JSON' if path in AUTO else "drop the flag, or delete the key from the JSON"
            found.append(Problem(f"--{field} {getattr(recipe, field)}", f"contradicts {path.removesuffix('.0').removesuffix('.1')} = {value} in the JSON", fix))
    if "scheduler" in clean:
        fields = ("warmup_steps", "schedule", "min_lr") + (
            ("lr",) if {"warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr"} & set(clean["scheduler"].get("params", {})) else ()
        )
        found += [
            Problem(
                f"--{field} {getattr(recipe, field)}",
                "contradicts the scheduler block of the JSON, which sets the learning rate",
                "drop the flag, or delete the block",
            )
            for field in fields
            if field in typed
        ]
    name = optimizer_name(clean)
    if name:
        takes = optimizer_params(clean)
        for field, key in (("weight_decay", "weight_decay"), ("beta1", "betas"), ("beta2", "betas"), ("eps", "eps")):
            if field in typed and key not in takes:
                found.append(Problem(f"--{field} {getattr(recipe, field)}", f"{name} takes no {key}, so it would be ignored", "drop the flag, or use AdamW"))
    return found


def _batch(clean: dict[str, Any], recipe: Recipe | None, mesh: Mesh | None) -> list[Problem]:
    """rows of a step = data-parallel ranks * rows of a forward pass * accumulated micro-batches, all whole."""
    total, micro = (_number(clean, recipe, field) for field in ("global_batch", "micro_batch"))
    steps = clean.get("gradient_accumulation_steps", "auto")
    steps = None if steps == "auto" else steps
    if total is not None and mesh is None and recipe is None and micro and steps and total % (micro * steps):
        rule = f"no number of ranks makes micro_batch {micro} * {steps} micro-batches = {micro * steps} of it"
        return [Problem(f"train_batch_size = {total}", rule, f"write {_near(total, micro * steps)}, or leave one of the three keys out", FAILS)]
    if total is None or mesh is None or min(total, micro or 1) < 1:
        return []
    dp, literal = mesh.dp, {key for key, value in clean.items() if value != "auto"}
    all_rows, one = ("train_batch_size", "train_micro_batch_size_per_gpu") if recipe is None else ("global_batch", "micro_batch")
    where = f"{all_rows} = {total}" if recipe is None else f"{all_rows} (train_batch_size) = {total}"
    if micro is None:
        parts = dp * (steps or 1)
        if total % parts:
            return [Problem(f"train_batch_size = {total}", f"does not divide by {_product(dp, None, steps)} = {parts}", f"write {_near(total, parts)}", FAILS)]
        return []
    if total % (dp * micro):
        fits = [rows for rows in range(1, total // dp + 1) if total % (dp * rows) == 0]
        ways = [f"{all_rows} {_near(total, dp * micro)}"]
        ways += [f"{one} {max((rows for rows in fits if rows <= micro), default=fits[0])}"] if fits else []
        if "train_batch_size" in literal and "train_micro_batch_size_per_gpu" not in literal:
            ways.reverse()  # what the JSON says stays
        return [Problem(where, f"does not divide by {_product(dp, micro, None)} = {dp * micro}", f"use {', or '.join(ways)}", FAILS)]
    if steps is not None and total != dp * micro * steps:
        rule = f"{_product(dp, micro, steps)} = {dp * micro * steps}, not the {total} rows of a step"
        auto = f'write "auto" or {total // (dp * micro)}' if recipe is not None else f"write {total // (dp * micro)}"
        rows = f"use {all_rows} {dp * micro * steps}"
        ways = [rows, auto] if "train_micro_batch_size_per_gpu" in literal and "train_batch_size" not in literal else [auto, rows]  # what the JSON says stays
        fix = ", or ".join(ways) + (f", or {one} {total // (dp * steps)}" if total % (dp * steps) == 0 else "")
        return [Problem(f"gradient_accumulation_steps = {steps}", rule, fix, FAILS)]
    return []


def _no_batch(config: dict[str, Any], filled_by: str) -> list[Problem]:
    """DeepSpeed wants a batch size; a recipe and accelerate bring their own."""
    if filled_by == "accelerate" or {"train_batch_size", "train_micro_batch_size_per_gpu"} & config.keys():
        return []
    value = shown(config["gradient_accumulation_steps"]) if "gradient_accumulation_steps" in config else "(missing)"
    where = f"{'gradient_accumulation_steps' if 'gradient_accumulation_steps' in config else 'train_batch_size'} = {value}"
    rule = "DeepSpeed needs train_batch_size or train_micro_batch_size_per_gpu"
    return [Problem(where, rule, 'add "train_micro_batch_size_per_gpu": 1' if not filled_by else 'add "train_micro_batch_size_per_gpu": "auto"', FAILS)]


def _number(clean: dict[str, Any], recipe: Recipe | None, field: str) -> int | None:
    """The JSON's number of a field, else the recipe's; None if neither is known."""
    value = clean.get(SHARED[field], "auto")
    return value if value != "auto" else getattr(recipe, field, None)


def _product(dp: int, micro: int | None, steps: int | None) -> str:
    parts = [f"{dp} data-parallel rank{'s' if dp > 1 else ''}"]
    parts += [f"micro_batch {micro}"] if micro is not None else []
    parts += [f"{steps} micro-batches"] if steps is not None else []
    return " * ".join(parts)


def _near(number: int, divisor: int) -> str:
    """The multiples of `divisor` on both sides of `number`."""
    low = number // divisor * divisor
    return f"{low} or {low + divisor}" if low else str(divisor)


def _divisions(degrees: dict[str, int], facts: Facts, recipe: Recipe | None, model_config: dict[str, Any] | None, mesh: Mesh | None) -> list[Problem]:
    """Parallel degrees that do not divide the model, and parameters that do not fit their swap buffer."""
    found = []
    whole = divisible(model_config, recipe.seq_len if recipe is not None else 0)
    shape, experts = whole["tp"], whole["ep"]["experts"]
    tp, sp, ep = degrees["tp"], degrees["sp"], degrees["ep"]
    broken = [f"{number} {name}" for name, number in shape.items() if number % tp]
    if tp > 1 and broken:
        fits = [str(degree) for degree in _divisors(*shape.values()) if degree < tp]
        found.append(Problem(f"tp = {tp}", f"does not divide the model's {', '.join(broken)}", f"use --tp {' or '.join(fits)}"))
    for axis, kind, beside in (("sp", "sequence", ("tp", "pp")), ("ep", "expert", ("tp", "pp", "sp"))) if not facts.stock else ():
        others = {other: degrees[other] for other in beside if degrees[other] > 1}
        if degrees[axis] > 1 and others:
            rule = f"{kind} parallelism goes with data parallelism and ZeRO only"
            fix = f"use --{axis} 1, or {' '.join(f'--{other} 1' for other in others)}"
            found.append(Problem(f"{axis} = {degrees[axis]} with {' and '.join(f'{other} = {degree}' for other, degree in others.items())}", rule, fix))
    if ep > 1 and model_config is not None and not experts:
        found.append(Problem(f"ep = {ep}", "this model has no experts", "use --ep 1"))
    elif experts % ep:
        nearest = min(_divisors(experts, mesh.dp if mesh is not None else 0), key=lambda degree: abs(degree - ep))
        found.append(Problem(f"ep = {ep}", f"does not divide the model's {experts} experts", f"use --ep {nearest}"))
    broken = [f"the model's {number} {name}" if name != "seq_len" else f"seq_len = {number}" for name, number in whole["sp"].items() if number % sp]
    if broken:
        nearest = min(_divisors(*whole["sp"].values(), mesh.world if mesh is not None else 0), key=lambda degree: abs(degree - sp))
        found.append(Problem(f"sp = {sp}", f"does not divide {' and '.join(broken)}", f"use --sp {nearest}"))
    if facts.param_offload == "nvme" and mesh is not None:
        key = "zero_optimization.offload_param.buffer_size"
        largest = _shape(model_config, "vocab_size") * _shape(model_config, "hidden_size", "n_embd", "d_model")
        part = math.ceil(largest / mesh.dp / mesh.sp / mesh.tp)
        if part > (size := facts.get(key, 100_000_000)):
            found.append(Problem(f"{key} = {size}", f"is less than the {part} elements that a rank holds of the embedding", f"write {part} or more"))
    return found


def divisible(model_config: dict[str, Any] | None, seq_len: int) -> dict[str, dict[str, int]]:
    """What the degree of an axis has to divide: axis -> name -> number, 0 where it is not known."""
    heads = _shape(model_config, "num_attention_heads", "n_head")
    return {
        "tp": {
            "attention heads": heads,
            "key-value heads": _shape(model_config, "num_key_value_heads") or heads,
            "columns of the feed-forward layer": _shape(model_config, "intermediate_size", "n_inner"),
        },
        "sp": {"attention heads": heads, "seq_len": seq_len},
        "ep": {"experts": _shape(model_config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")},
    }


def name_worlds(found: list[Problem], world: int, step: int, check_on: Callable[[int | None], list[Problem]]) -> list[Problem]:
    """The same problems; the last that another number of ranks would mend names the nearest numbers that mend them all.

    `check_on` tells the problems on a number of ranks, and with None those that no number of ranks mends; `step` is the
    product of the degrees.
    """
    if not found:
        return []
    rules = lambda problems: {(problem.where, problem.rule) for problem in problems}  # noqa: E731
    anywhere = rules(found) & rules(check_on(None))
    mended = [problem for problem in found if (problem.where, problem.rule) not in anywhere]
    worlds = nearest_worlds(world, step, lambda ranks: rules(check_on(ranks)) <= anywhere) if mended else []
    if not worlds:
        return found
    ranks = f"{' or '.join(map(str, worlds))} rank{'s' if worlds != [1] else ''}"
    named = dataclasses.replace(mended[-1], fix=f"{mended[-1].fix}; the recipe fits {ranks} as it is")
    return [named if problem == mended[-1] else problem for problem in found]


def _divisors(*numbers: int) -> list[int]:
    """What divides all of them; 0, a number that is not known, divides by everything."""
    common = math.gcd(*numbers)
    return [degree for degree in range(1, common + 1) if common % degree == 0]


def _pipeline(pp: int, clean: dict[str, Any], recipe: Recipe | None, model_config: dict[str, Any] | None, mesh: Mesh | None) -> list[Problem]:
    """More stages than layers, and what the schedule of the micro-batches asks for."""
    found = []
    dualpipev = recipe is not None and recipe.pipeline_schedule == "dualpipev"
    each = 2 if dualpipev else 1  # stages on one rank
    if dualpipev and pp == 1:
        found.append(
            Problem("pipeline_schedule = dualpipev", "orders the micro-batches of a pipeline, and pp = 1 is none", "use --pp 2 or more, or leave it out")
        )
    layers = 0 if recipe is not None and recipe.pp_plan else count_layers(model_config)
    if pp > 1 and 0 < layers < each * pp:
        ranks = mesh.world // mesh.tp // mesh.sp if mesh is not None else 0
        fits = {each: max((degree for degree in range(1, layers // each + 1) if ranks % degree == 0), default=1) for each in (1, 2)}
        ways = [f"--pp {fits[2]}"] if dualpipev and fits[2] > 1 else []
        ways += [f"--pp {fits[1]} --pipeline_schedule 1f1b" if dualpipev else f"--pp {fits[1]}"]
        rule = f"makes {each * pp} stages{', two on each rank under dualpipev' if dualpipev else ''}, more than the model's {layers} layers"
        found.append(Problem(f"pp = {pp}", rule, f"use {' or '.join(ways)}"))
    total, micro = (_number(clean, recipe, field) for field in ("global_batch", "micro_batch"))
    if dualpipev and pp > 1 and mesh is not None and total and micro and total % (rows := mesh.dp * micro) == 0 and total // rows < 2 * pp:
        rule = f"{_product(mesh.dp, micro, None)} leaves {total // rows} micro-batches of a step, and dualpipev needs 2 * pp = {2 * pp}"
        fix = f"use global_batch {2 * pp * rows}"
        fix += f", or micro_batch {total // (2 * pp * mesh.dp)}" if total % (2 * pp * mesh.dp) == 0 else ""
        found.append(Problem(f"global_batch (train_batch_size) = {total}", rule, f"{fix}, or --pipeline_schedule 1f1b"))
    return found


def _dense_mask(recipe: Recipe, rows: int, width: int) -> list[Problem]:
    """A row so long that the mask of its packed documents leaves no room on a device."""
    size = mask_bytes(recipe.attention, rows, recipe.seq_len, width)
    if size <= MOST_MASK_BYTES:
        return []
    fits = max(
        (1 << power for power in range(recipe.seq_len.bit_length()) if mask_bytes(recipe.attention, rows, 1 << power, width) <= MOST_MASK_BYTES), default=1
    )
    most = f"more than {MOST_MASK_BYTES / 1e9:.0f} GB are refused"
    rule = f"the dense mask that keeps packed documents apart takes {size / 1e9:.1f} GB on every rank, and {most}"
    fix = f"use --seq_len {fits}, or --attention flash_attention_2, which makes no mask"
    where = f"seq_len = {recipe.seq_len} with micro_batch = {rows} and attention = {recipe.attention}"
    return [Problem(where, rule, fix)]


def mask_bytes(attention: str, rows: int, seq_len: int, width: int) -> int:
    """The bytes of the (rows, 1, seq_len, seq_len) masks that a rank holds while a layer attends.

    `width`: bytes of a number of the model. transformers 5.22.2 builds a mask of bools where documents are packed
    (masking_utils.sdpa_mask), whatever sp is. torch's sdpa and eager attention add numbers to the scores, so each layer
    has a bias in the model's dtype, too. FlashAttention needs neither.
    """
    return 0 if attention == "flash_attention_2" else rows * seq_len**2 * (1 + width)


def count_layers(model_config: dict[str, Any] | None) -> int:
    """The layers that a pipeline may divide; 0 if they are not known."""
    return _shape(model_config, *LAYERS)


def _shape(model_config: dict[str, Any] | None, *names: str) -> int:
    """A number of the model's config under one of several names; 0 if it is not known."""
    for config in (model_config or {}, (model_config or {}).get("text_config") or {}):
        for name in names:
            if isinstance(config.get(name), int):
                return config[name]
    return 0
