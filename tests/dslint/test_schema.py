"""schema.json compared with the installed DeepSpeed: its keys, and the effect of each key."""

import copy
import json
import subprocess
import sys
from enum import Enum
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool import ROOT
from recipekit.dslint import check, numbers, resolve
from recipekit.dslint.schema import schema, value_at
from recipekit.spec.errors import Problem
from recipekit.spec.mesh import Mesh
from shipped_jsons import FILES, LLAMA, RECIPE, put, shipped, without

OF_RECIPES = ("zero0_onebit", "zero1_lamb", "zero2_adafactor", "zero2_muon")


ODD = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    0.5,
    1.0,
    1e30,
    "",
    "auto",
    "1.0",
    "true",
    "cpu",
    [],
    [1],
    ["x"],
    {},
    {"enabled": True},
]
SCHEDULES = [
    {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 50, "warmup_num_steps": 5, "warmup_max_lr": 1e-3},
    },
    {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_num_steps": 5}},
    {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}},
]


def leaves(node: dict[str, Any], path: str = "") -> dict[str, dict[str, Any]]:
    """Return path -> node for all keys below a node, in a fixed order."""
    found: dict[str, dict[str, Any]] = {}
    for key, known in sorted(node["keys"].items()):
        found |= leaves(known, f"{path}{key}.") if "keys" in known else {path + key: known}
    return found


LEAVES = leaves(schema()["config"])
for _block, _names in (
    ("optimizer", schema()["optimizers"]["AdamW"]["torch"]),
    ("scheduler", schema()["schedulers"]["WarmupLR"]),
):
    LEAVES |= {f"{_block}.params.{key}": node for key, node in _names.items()}


def values(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for a key's values: mostly valid values, and some odd ones."""
    fitting: list[st.SearchStrategy[Any]] = []
    for name in node.get("type", []):
        if "enum" in node and name in ("string", "integer"):
            fitting.append(st.sampled_from(node["enum"]))
        elif name == "boolean":
            fitting.append(st.booleans())
        elif name == "integer":
            fitting.append(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 24, 1000, 500_000_000, 5e8]))
        elif name == "number":
            fitting.append(st.sampled_from([0, 0.25, 0.5, 1, 1e-8, 2.0, 1000]))
        elif name == "string":
            fitting.append(st.sampled_from(["x", "a/b", "fp32"]))
        elif name == "array":
            fitting.append(st.sampled_from([[], ["x"], [0.8, 0.9], ["z1"]]))
        elif name == "object":
            fitting.append(st.sampled_from([{}, {"a": 1}]))
    return st.one_of(*fitting * 8, st.sampled_from(ODD)) if fitting else st.sampled_from(ODD)


@st.composite
def mutants(draw: st.DrawFn) -> tuple[dict[str, Any], str | None, Any]:
    """Sample a shipped file with one key changed, added, misspelled or deleted.

    Also return the key and its value if the key was added or changed. The files of `OF_RECIPES` are
    excluded, because they are zero1.json and zero2.json with an optimizer that DeepSpeed does not
    read.
    """
    config = shipped(
        draw(st.sampled_from([file.stem for file in FILES if file.stem not in OF_RECIPES]))
    )
    if draw(st.integers(0, 4)) == 0:
        config["scheduler"] = copy.deepcopy(draw(st.sampled_from(SCHEDULES)))
    there = [path for path in LEAVES if value_at(config, path, ...) is not ...]
    # A key in an existing block is more interesting than a key in one of the many missing blocks.
    near = [
        path
        for path in LEAVES
        if path.rpartition(".")[0] == "" or value_at(config, path.rpartition(".")[0]) is not None
    ]
    path = draw(
        st.one_of(st.sampled_from(there), st.sampled_from(near), st.sampled_from(sorted(LEAVES)))
    )
    what = draw(st.sampled_from(["put"] * 8 + ["misspell", "delete"]))
    if what == "delete":
        return without(config, path) if path in there else config, None, None
    value = draw(values(LEAVES[path]))
    if what == "misspell":
        spot = draw(st.integers(path.rfind(".") + 1, len(path) - 1))
        return (
            put(config, path[:spot] + draw(st.sampled_from("xyz_")) + path[spot:], value),
            None,
            None,
        )
    block = path.rpartition(".")[0]
    config = put(config, path, value)
    if block and "enabled" in value_at(
        schema()["config"]["keys"], block.replace(".", ".keys."), {}
    ).get("keys", {}):
        value_at(config, block).setdefault("enabled", True)
    return config, path, value


def tree(thing: Any) -> Any:
    """Return a parsed configuration's contents, except its source JSON."""
    if isinstance(thing, Enum):
        return thing.value
    if isinstance(thing, dict):
        return {str(key): tree(value) for key, value in thing.items() if key != "_param_dict"}
    if isinstance(thing, (list, tuple, set)):
        return [tree(value) for value in thing]
    if hasattr(thing, "__dict__") and not isinstance(thing, type):
        return {"type": type(thing).__name__, **tree(vars(thing))}
    return thing if isinstance(thing, (str, int, float, bool, type(None))) else repr(thing)


def test_no_mutated_file_is_silently_misread() -> None:
    """None of the 600 mutants causes a traceback.

    DeepSpeed accepts every mutant that lint accepts, and each key of such a mutant has an effect.
    """
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.utils.logger.setLevel("ERROR")
    count = {"refused": 0, "accepted": 0, "compared": 0}

    def effect(config: dict[str, Any]) -> tuple[Any, Any, dict[str, int]]:
        resolved, _ = resolve.resolve_ds_config(config, RECIPE, Mesh(), LLAMA)
        return (
            resolved,
            tree(DeepSpeedConfig(copy.deepcopy(resolved))),
            numbers.read_degrees(config),
        )

    @settings(
        max_examples=600,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(mutants())
    def run(mutant: tuple[dict[str, Any], str | None, Any]) -> None:
        config, path, value = mutant
        problems = check.lint_config(
            check.LintInput(config, world=1, recipe=RECIPE, model_config=LLAMA)
        ) + check.check_device(config, "cpu")
        assert all(
            isinstance(problem, Problem) and problem.where and problem.rule and problem.fix
            for problem in problems
        )
        if problems:
            count["refused"] += 1
            return
        count["accepted"] += 1
        resolved, parsed, degrees = effect(config)
        assert '"auto"' not in json.dumps(
            {
                key: block
                for key, block in resolved.items()
                if key not in ("data_types", "zero_optimization")
            }
        )
        if path is None or is_default(LEAVES[path], value):
            return
        if path == "zero_optimization.overlap_comm" and value == (
            value_at(config, "zero_optimization.stage") == 3
        ):
            return  # the default depends on the stage
        less = without(config, path)
        if check.lint_config(check.LintInput(less, world=1, recipe=RECIPE, model_config=LLAMA)):
            return  # the key is required
        bare, parsed_bare, degrees_bare = effect(less)
        if value_at(bare, path) == value:
            return  # the value equals the resolved default
        count["compared"] += 1
        assert (parsed, degrees) != (
            parsed_bare,
            degrees_bare,
        ), f"{path} = {value!r} changes nothing"

    run()
    assert (
        count["refused"] + count["accepted"] >= 600
        and count["refused"] > 100
        and count["compared"] > 60
    ), count


def is_default(node: dict[str, Any], value: Any) -> bool:
    default = node.get("default")
    if node.get("any_case") and isinstance(value, str) and isinstance(default, str):
        return value.lower() == default.lower()
    return value in ("auto", {}) or value == default  # an empty block has no effect


def test_the_schema_is_what_the_installed_deepspeed_reads() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "make" / "make_ds_schema.py", "--check"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
