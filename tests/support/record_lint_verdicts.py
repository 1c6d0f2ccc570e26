"""Program that runs stock DeepSpeed on every case of lint_cases.py, and records the results in
lint_verdicts.json.

It uses no lint rule from recipekit.

    # run all cases (an hour on 2 busy cores), then write the file
    python tests/support/record_lint_verdicts.py
    # run only these cases; the other cases keep their record
    python tests/support/record_lint_verdicts.py NAME ...

Real processes pass each JSON, as a file, to `deepspeed.initialize` with a small Hugging Face model
(or a PipelineModule of its layers). They train two optimizer steps and save a checkpoint. An
exception is recorded unchanged.

If there is no exception, every key of the JSON is removed and changed in turn. The program then
compares losses, weights, learning rates, files, printed lines, and the state of the engine, the
optimizer and the schedule. DeepSpeed ignores a key if the key has no effect. It replaces a value if
the value has the same effect as a different value.
"""

import contextlib
import copy
import io
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pool
from ds_json import Case, plain
from lint_cases import CASES, POSTED, is_seen
from pool import CaseFailed, Pools, environment


def leaves(config: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted path of a configuration with its value.

    An empty block and a list count as values. Disabled blocks are not entered.
    """
    for key, value in config.items():
        if config.get("enabled") is False and key != "enabled":
            continue
        here = f"{path}.{key}" if path else key
        if isinstance(value, dict) and value:
            yield from leaves(value, here)
        else:
            yield here, value


RECORDED = Path(__file__).parent / "lint_verdicts.json"
LIMIT_S = 90.0  # seconds for one observation: two optimizer steps and a save
DEEPEST = 4  # levels of objects that are read below the engine
# For any key whose value is a word, at least one of these words differs from the key's value.
WORDS = ("none", "cpu", "fp32", "linear", "sum", "AdamW", "WarmupLR", "other")
# The results of plain files for these keys also apply to posted files.
ORDINARY = {path: value for path, value in leaves(plain(1)) if not path.startswith("zero_")}
FALLBACK = {"nvme": "cpu"}  # replacements that DeepSpeed may make silently


# Functions that every rank runs


def look(text: str, pp: int, scratch: str) -> dict[str, Any]:
    """Return the observable effects of one JSON on this rank: {"error": ...}, or {path: value}."""
    import deepspeed
    import torch

    rank = int(os.environ["RANK"])
    folder = Path(scratch)
    (folder / "ds.json").write_text(text, newline="") if rank == 0 else None
    torch.distributed.barrier()
    before, printed = Path.cwd(), io.StringIO()
    handler = logging.StreamHandler(printed)
    handler.addFilter(
        lambda record: "config" not in record.module and "json = {" not in record.getMessage()
    )
    # The CPU supports fp16, but DeepSpeed checks whether the support is fast.
    type(deepspeed.accelerator.get_accelerator()).is_fp16_supported = lambda self: True
    logger = deepspeed.utils.logger
    level, previous = logger.level, logger.handlers[:]
    logger.handlers[:] = [handler]
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed):
            torch.manual_seed(0)
            seen = train(folder / "ds.json", pp)
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        (folder / f"error{rank}").write_text(said)  # the other ranks may wait for this rank forever
        return {"error": said}
    finally:
        os.chdir(before)
        logger.handlers[:] = previous
        logger.setLevel(level)
    for line in printed.getvalue().splitlines():
        if re.search(r"latency|\d m?s\b", line):
            continue  # measured times, and the order of these times, differ in each run
        text = f"printed {re.sub(r'[0-9.:e+-]+', '#', line.rpartition('] ')[2])[:200]}"
        seen[text] = seen.get(text, 0) + 1
    seen["files"] = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.name != "ds.json"
    )
    return seen


def train(path: Path, pp: int) -> dict[str, Any]:
    import deepspeed
    import torch

    model = pipeline(pp) if pp > 1 else tiny_llama()
    # The script must know whether the JSON sets an optimizer.
    said = Case("", path.read_text()).parsed
    client = None
    if not isinstance(said.get("optimizer"), dict) or "type" not in said["optimizer"]:
        client = own_optimizer(said, model)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), optimizer=client, config=str(path)
    )
    if isinstance(said.get("activation_checkpointing"), dict):
        # as Megatron's scripts do
        deepspeed.checkpointing.configure(None, deepspeed_config=str(path))
    alike = pp > 1 or engine.autotp_size() > 1  # ranks that must see the same rows
    rows, losses, norms, rates = engine.train_micro_batch_size_per_gpu(), [], [], []
    assert isinstance(rows, int), rows
    for step in range(2):
        for micro in range(1 if pp > 1 else engine.gradient_accumulation_steps()):
            batches = (
                [
                    batch(rows, step, micro + index, alike)
                    for index in range(engine.gradient_accumulation_steps())
                ]
                if pp > 1
                else []
            )
            if pp > 1:
                losses.append(
                    float(
                        engine.train_batch(
                            iter([(one["input_ids"], one["input_ids"]) for one in batches])
                        )
                    )
                )
            else:
                one = batch(rows, step, micro, alike)
                loss = engine(**one).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        norms.append(number(engine.get_global_grad_norm()))
        rates.append([group["lr"] for group in engine.optimizer.param_groups])
    if any(loss != loss for loss in losses):
        raise FloatingPointError(f"the losses are {losses}")
    engine.save_checkpoint("saved")
    if engine.zero_optimization_stage() == 3:
        engine.save_16bit_model("weights")
    state = {
        "losses": losses,
        "norms": norms,
        "rates": rates,
        "weights": tree(list(engine.module.parameters()), 2, set()),
    }
    state |= dict(flat(tree(engine, DEEPEST, set()), "engine"))
    state |= dict(
        flat(
            tree(getattr(next(engine.module.parameters()), "nvme_swapper", None), DEEPEST, set()),
            "swapper",
        )
    )
    checkpointing = vars(deepspeed.runtime.activation_checkpointing.checkpointing)
    state |= {
        name: value
        for name, value in checkpointing.items()
        if isinstance(value, (bool, int, str)) and not name.startswith("_")
    }
    state["linear"] = torch.nn.functional.linear.__module__  # zero.Init may replace it
    torch.distributed.barrier()
    engine.destroy()
    return state


def own_optimizer(said: dict[str, Any], model: Any) -> Any:
    """Return the optimizer that a script passes to DeepSpeed if its JSON has no optimizer.

    This is DeepSpeed's CPU Adam if the JSON uses offload, and PyTorch's AdamW otherwise.
    """
    import torch

    zero = said.get("zero_optimization")
    offload = zero.get("offload_optimizer") if isinstance(zero, dict) else None
    if (isinstance(offload, dict) and offload.get("device") in ("cpu", "nvme")) or (
        isinstance(zero, dict) and zero.get("cpu_offload") is True
    ):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(model.parameters(), lr=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def tiny_llama() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
    )
    return AutoModelForCausalLM.from_config(shape)


def pipeline(stages: int) -> Any:
    """Return the same model as a PipelineModule, split as in a script without recipekit."""
    import torch
    from deepspeed.pipe import PipelineModule

    llama = tiny_llama()
    rotary = llama.model.rotary_emb

    class Layer(torch.nn.Module):
        def __init__(self, layer: Any):
            super().__init__()
            self.layer = layer

        def forward(self, hidden: Any) -> Any:
            positions = torch.arange(hidden.shape[1]).unsqueeze(0)
            out = self.layer(
                hidden, position_embeddings=rotary(hidden, positions), position_ids=positions
            )
            return out[0] if isinstance(out, tuple) else out

    def loss(logits: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]).float(), labels[:, 1:].reshape(-1)
        )

    layers = [
        llama.model.embed_tokens,
        *(Layer(layer) for layer in llama.model.layers),
        llama.model.norm,
        llama.lm_head,
    ]
    return PipelineModule(
        layers=layers, num_stages=stages, loss_fn=loss, partition_method="uniform"
    )


def batch(rows: int, step: int, micro: int, alike: bool) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(
        (0 if alike else 1000 * int(os.environ["RANK"])) + 10 * step + micro
    )
    ids = torch.randint(0, 128, (rows, 8), generator=generator)
    return {"input_ids": ids, "labels": ids}


def number(value: Any) -> Any:
    return float(value) if value is not None else None


def tree(thing: Any, depth: int, above: set[int]) -> Any:
    """Return a live object's contents, without the configuration that created the object."""
    import torch
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import BaseModel

    if thing is None or isinstance(thing, bool):
        return thing
    if isinstance(thing, (torch.dtype, torch.device, Enum)):
        return str(thing)
    for kind in (str, int, float):
        if isinstance(thing, kind):
            # This is not a subclass, because unpickling could not find a subclass.
            return kind(thing)
    if isinstance(thing, torch.Tensor):
        held = thing.detach()
        return [
            str(held.dtype),
            list(held.shape),
            (
                float(held.double().nan_to_num().abs().sum())
                if 0 < held.numel() < 1e6 and not held.is_meta
                else 0.0
            ),
        ]
    if depth == 0 or id(thing) in above:
        return type(thing).__name__
    above = above | {id(thing)}
    if isinstance(thing, dict):
        return {
            str(key) if isinstance(key, str) else str(index): tree(value, depth - 1, above)
            for index, (key, value) in enumerate(thing.items())
            if key not in HIDDEN
        }
    if isinstance(thing, (list, tuple)):
        return [tree(value, depth - 1, above) for value in thing[:50]]
    if isinstance(thing, (DeepSpeedConfig, BaseModel, type)) or not type(
        thing
    ).__module__.startswith(("deepspeed.", "torch.optim.")):
        return type(thing).__name__
    held = vars(thing)
    if isinstance(thing, torch.optim.Optimizer):
        held = held | {
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in thing.param_groups
            ]
        }
    return {"is": type(thing).__name__} | {
        key: tree(value, depth - 1, above)
        for key, value in held.items()
        if key not in HIDDEN and "hook" not in key
    }


# Attributes that store the configuration itself, or that differ from one start to the next.
HIDDEN = {
    "_config",
    "config",
    "ds_config",
    "_param_dict",
    "param_dict",
    "_parameters",
    "_buffers",
    "_modules",
    "param_id",
    "grad_position",
}


def flat(thing: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, dict) and thing:
        for key, value in thing.items():
            yield from flat(value, f"{path}.{key}")
    elif isinstance(thing, list) and any(isinstance(value, (dict, list)) for value in thing):
        for index, value in enumerate(thing):
            yield from flat(value, f"{path}.{index}")
    else:
        yield path, thing


# Decisions


class Recorder:
    """An observer that compares variants of one case.

    Differences between two observations of the same JSON are noise.
    """

    def __init__(self, pools: Pools, case: Case, posted: bool = False):
        self.pools, self.case, self.posted, self.looks = pools, case, posted, 0
        self.noise: set[tuple[int, str]] = set()
        self.seen: dict[str, Any] = {}
        self.warm: pool.Pool | None = None

    def look(self, text: str, again: bool = False) -> Any:
        """Return the observations as a comparable value; {"error": ...} if DeepSpeed failed."""
        if text in self.seen and not again:
            return self.seen[text]
        if (
            self.warm is None
            or self.warm is not self.pools.pools.get(self.case.world)
            or not self.warm.alive
        ):
            # The first observation in a process includes effects that occur only once.
            self.run(self.case.text)
            self.warm = self.pools.pools.get(self.case.world)
        found = self.run(text)
        if not again:
            self.seen[text] = found
        return found

    def run(self, text: str) -> Any:
        self.looks += 1
        with tempfile.TemporaryDirectory(prefix="look_") as scratch:
            try:
                limit = LIMIT_S if self.case.world == 1 else LIMIT_S / 3
                ranks = self.pools.run(
                    self.case.world,
                    look,
                    timeout=limit,
                    text=text,
                    pp=self.case.pp,
                    scratch=scratch,
                )
            except CaseFailed as failed:
                if "did not end" not in str(failed):
                    raise
                said = [path.read_text() for path in sorted(Path(scratch).glob("error*"))]
                ranks = [{"error": said[0] if said else "hangs"}]
        errors = [rank["error"] for rank in ranks if "error" in rank]
        if errors:
            return {"error": errors[0].replace(scratch, "FOLDER")}
        return {
            (rank, path): value for rank, seen in enumerate(ranks) for path, value in seen.items()
        }

    def same(self, one: Any, other: Any) -> bool:
        if "error" in one or "error" in other:
            return one == other
        return all(
            one.get(path) == other.get(path) for path in (one.keys() | other.keys()) - self.noise
        )

    def verdict(self) -> dict[str, Any]:
        text = self.case.text
        base = self.look(text)
        if "error" in base:
            return {"verdict": "fails", "error": base["error"], "because_of": self.culprits(base)}
        once_more = self.look(text, again=True)
        self.noise |= {
            path for path in base.keys() | once_more.keys() if base.get(path) != once_more.get(path)
        }
        ignored, replaced, applied, unseen, unasked = [], {}, [], [], []
        for path, value in leaves(self.case.parsed):
            if self.posted and ORDINARY.get(path) == value:
                unasked.append(path)
            elif (what := self.effect(path, value, base)) is True:
                applied.append(path)
            elif what is False:
                (ignored if is_seen(path) else unseen).append(path)
            else:
                replaced[path] = what
        return {
            "verdict": "ignores" if ignored or replaced else "applies",
            "ignored": ignored,
            "replaced": replaced,
            "applied": applied,
            "unseen": unseen,
        } | ({"unasked": unasked} if unasked else {})

    def effect(self, path: str, value: Any, base: Any) -> Any:
        """Return True if the value has an effect, False if it has no effect, or the value that
        replaces it.
        """
        config = self.case.parsed
        removed = self.look(json.dumps(without(config, path)))
        gone = not self.same(base, removed)
        if value == "auto" and not gone:
            return "the default"
        if (
            isinstance(value, str)
            and (meant := meaning(value)) is not None
            and not isinstance(meant, str)
        ):
            as_meant = self.look(json.dumps(put(config, path, meant)))
            if not self.same(base, as_meant) and "error" not in as_meant:
                return "not " + json.dumps(meant)
        if (
            isinstance(value, str)
            and value in FALLBACK
            and self.same(base, self.look(json.dumps(put(config, path, FALLBACK[value]))))
        ):
            return FALLBACK[value]
        for other in [] if gone else others(value):
            changed = self.look(json.dumps(put(config, path, other)))
            # A value of a wrong type or range proves nothing.
            if "ValidationError" not in str(changed.get("error", "")) and not self.same(
                base, changed
            ):
                return True
        return gone

    def culprits(self, base: Any) -> list[str]:
        """Return the keys that cause the failure.

        If such a key is removed, the failure disappears or changes, or training works with a
        different value of the key.
        """
        found = []
        for path, value in leaves(self.case.parsed):
            if self.posted and ORDINARY.get(path) == value:
                continue
            removed = self.look(json.dumps(without(self.case.parsed, path)))
            # a block that needed the key
            new = (
                "ValidationError" in str(removed.get("error", ""))
                and "ValidationError" not in base["error"]
            )
            if removed != base and not new:
                found.append(path)
                continue
            changed = (
                [put(self.case.parsed, path, other) for other in others(value)[:2]]
                if not self.posted or not found
                else []
            )
            if any("error" not in self.look(json.dumps(variant)) for variant in changed):
                found.append(path)
        return found


def without(config: dict[str, Any], path: str) -> dict[str, Any]:
    config = copy.deepcopy(config)
    *blocks, key = path.split(".")
    block = config
    for name in blocks:
        block = block[name]
    del block[key]
    return config


def put(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    *blocks, key = path.split(".")
    block = config
    for name in blocks:
        block = block[name]
    block[key] = value
    return config


def meaning(text: str) -> Any:
    """Return the value that a string was probably meant to be; None if it is only a string."""
    with contextlib.suppress(ValueError):
        return json.loads(text.strip().lower())
    return None


def others(value: Any) -> list[Any]:
    """Return other values of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [other for other in (1, 2 * value, value + 1, 0) if other != value]
    if isinstance(value, float):
        return [2 * value, 0.5 * value]
    if isinstance(value, str):
        return [other for other in WORDS if other != value]
    if isinstance(value, list):
        return [[0.5 * item if isinstance(item, (int, float)) else item for item in value], []]
    return []


def record(
    names: list[str], say: Any = print, keep: Any = lambda name, verdict: None
) -> dict[str, dict[str, Any]]:
    """Return case -> verdict for the named cases."""
    import deepspeed

    found: dict[str, dict[str, Any]] = {}
    # An observation is short and leaves little state behind, and a new process costs more than ten
    # observations.
    most, pool.MOST_CASES = pool.MOST_CASES, 150
    pools = Pools()
    try:
        for count, name in enumerate(names, 1):
            began = time.perf_counter()
            recorder = Recorder(pools, CASES[name], name in POSTED)
            found[name] = {"deepspeed": deepspeed.__version__.split("+")[0]} | recorder.verdict()
            what = found[name].get("error") or ", ".join(
                [
                    *found[name]["ignored"],
                    *(f"{path} -> {value}" for path, value in found[name]["replaced"].items()),
                ]
            )
            keep(name, found[name])
            say(
                f"{count}/{len(names)} {name}: {found[name]['verdict']} ({recorder.looks} looks,"
                f" {time.perf_counter() - began:.0f} s) {what[:300]}",
                flush=True,
            )
    finally:
        pools.close()
        pool.MOST_CASES = most
    return found


def written(recorded: dict[str, Any]) -> str:
    """Return the text of the record, one line per case."""
    return (
        "{\n"
        + ",\n".join(
            f"{json.dumps(name)}: {json.dumps(verdict)}" for name, verdict in recorded.items()
        )
        + "\n}\n"
    )


def main() -> None:
    os.environ.update(environment())
    names = sys.argv[1:] or list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        raise SystemExit(f"no such case: {', '.join(unknown)}")
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}

    # Write after each case, so that an interrupted recording can resume.
    def keep(name: str, verdict: dict[str, Any]) -> None:
        recorded[name] = verdict
        RECORDED.write_text(written({case: recorded[case] for case in CASES if case in recorded}))

    record(names, keep=keep)


if __name__ == "__main__":
    # Import the module by its name, so that the workers find `look`.
    from record_lint_verdicts import main as recorded

    recorded()
