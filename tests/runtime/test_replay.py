"""A value that is not finite: named, or gone when the step is computed again."""

import dataclasses
import functools
import json
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from engine_states import digest_of
from recipekit.architectures.lookup import SHIPPED
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import read_metrics, reproducible_values
from shipped_jsons import strategy
from short_runs import BASE, train

FAULT = 3  # the step with the fault
STEPS = 5
RANK = 1  # which has the fault
MICRO_BATCH = 2  # of that rank

# name -> (strategy or engine, bf16, flags)
LAYOUTS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "zero0 fp32 dp2": ("zero0", False, {}),
    "zero0 bf16 dp2": ("zero0", True, {}),
    "zero0 fp32 pp2": ("zero0", False, {"pp": 2}),
    "zero1 fp32 dp2": ("zero1", False, {}),
    "zero1 bf16 dp2": ("zero1", True, {}),
    "zero1 bf16 pp2": ("zero1", True, {"pp": 2}),
    "zero1 fp32 tp2": ("zero1", False, {"tp": 2}),
    "zero2 fp32 dp2": ("zero2", False, {}),
    "zero2 bf16 dp2": ("zero2", True, {}),
    "zero2 bf16 tp2": ("zero2", True, {"tp": 2}),
    "zero3 fp32 dp2": ("zero3", False, {}),
    "zero3 bf16 dp2": ("zero3", True, {}),
    "ddp fp32 dp2": ("ddp", False, {}),
    "ddp bf16 dp2": ("ddp", True, {}),
    "fsdp2 fp32 dp2": ("fsdp2", False, {}),
    "fsdp2 bf16 dp2": ("fsdp2", True, {}),
}
slow = pytest.mark.slow


@dataclass(frozen=True)
class Fault:
    """A value that one rank multiplies by `factor` (NaN or infinity) in a step.

    `kind` is "output", "incoming gradient" or "weight gradient". Under FSDP2, the hook of a weight
    is not called, because autograd computes the gradient of another tensor.

    If `tries` is 1, only the first computation of the step has the fault. `until` is the last step
    with the fault.
    """

    kind: str
    factor: float = math.nan
    tries: int = 99
    until: int = FAULT
    rank: int = RANK

    @property
    def module(self) -> str:
        return "mlp.up_proj" if self.kind == "weight gradient" else "mlp.down_proj"


@functools.cache
def with_dropout() -> str:
    """Return a folder with the config of a Llama model with dropout."""
    config = json.loads((SHIPPED / "meta-llama--Llama-3.2-1B.json").read_text())
    folder = Path(tempfile.mkdtemp(prefix="dropout_"))
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    return str(folder)


def recipe_of(layout: str, out: Path, **changes: Any) -> Recipe:
    """Return a short run in a layout of LAYOUTS."""
    name, bf16, flags = LAYOUTS[layout]
    if name in ("ddp", "fsdp2"):
        flags = flags | {"ds_config": {}, "engine": name, "precision": "bf16" if bf16 else "fp32"}
    else:
        flags = flags | {"ds_config": strategy(name, bf16)}
    flags |= {"model": with_dropout(), "steps": STEPS, "eval_every": 0, "attention": "sdpa"}
    return replace(BASE, **(flags | changes), out=str(out))


def plant(engine: Any, fault: Fault, due: Any) -> None:
    """Plant a fault with a hook in the second layer that this rank has."""
    names = [name for name, _ in engine.module.named_modules() if name.endswith(fault.module)]
    module = dict(engine.module.named_modules())[names[-1]]
    seen: dict[str, Any] = {"step": None, "calls": 0}

    def factor() -> float:
        """Return the factor of this call. Each call belongs to a micro-batch of a step."""
        number, attempt = due()
        if seen["step"] != (number, attempt):
            seen.update(step=(number, attempt), calls=0)
        seen["calls"] += 1
        now = FAULT <= number <= fault.until and attempt <= fault.tries
        return fault.factor if now and seen["calls"] == MICRO_BATCH else 1.0

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        by = factor()
        if by == 1.0:
            return None
        if fault.kind == "output":
            return output * by
        output.register_hook(lambda gradient: gradient * by)
        return None

    if fault.kind == "weight gradient":
        module.weight.register_hook(
            lambda gradient: None if (by := factor()) == 1.0 else gradient * by
        )
    else:
        module.register_forward_hook(spoil)


@dataclass(frozen=True)
class Seen:
    """The observations of one rank: its exit code, its output, and the digest of all states.

    `unchanged` has each computation with a bad result: whether it has changed no state.
    """

    code: int | str
    printed: str
    digest: str
    unchanged: list[bool]


def train_with_fault(recipe: Recipe, fault: Fault | None, first: int = 1) -> Seen:
    """Train on a rank of a pool, with a fault. `first` is the first step of this start."""
    import recipekit.train as loop
    import torch.distributed as dist

    train_step, engines, unchanged = loop.train_step, [], []
    now = {"step": first, "attempt": 0}

    def watched(engine: Any, *rest: Any) -> Any:
        if not engines:
            engines.append(engine)
            if fault and dist.get_rank() == fault.rank:
                plant(engine, fault, lambda: (now["step"], now["attempt"]))
            engine.after_step(lambda applied: now.update(applied=applied))
        now["attempt"] += 1
        before = digest_of(engine)
        result = train_step(engine, *rest)
        if not (math.isfinite(result["loss"]) and math.isfinite(result["grad_norm"])):
            unchanged.append(digest_of(engine) == before)
        if now["applied"] or now["attempt"] == 2:
            now.update(step=now["step"] + 1, attempt=0)
        return result

    loop.train_step = watched
    try:
        code, printed = train(recipe, [])
    finally:
        loop.train_step = train_step
    return Seen(code, printed, digest_of(engines[0]) if engines else "", unchanged)


def alerts_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "alerts.jsonl").read_text().splitlines()]


def cases(*fast: tuple[str, Fault], every: Any) -> list[Any]:
    """Return (layout, fault): `fast` ones, and the others of `every` as slow tests."""
    return [
        pytest.param(
            layout,
            fault,
            id=f"{layout}, {fault.kind}, {fault.factor}, rank {fault.rank}",
            marks=() if (layout, fault) in fast else slow,
        )
        for layout, fault in [*fast, *(case for case in every if case not in fast)]
    ]


# Cases that take too long for every run of the tests.
NAMED = [
    ("zero0 bf16 dp2", Fault("weight gradient", math.inf)),
    ("zero1 bf16 pp2", Fault("incoming gradient", rank=0)),
    ("zero2 fp32 dp2", Fault("weight gradient")),
    ("zero2 bf16 tp2", Fault("weight gradient", math.inf)),
    ("zero3 fp32 dp2", Fault("output", math.inf)),
    ("ddp bf16 dp2", Fault("incoming gradient")),
    ("fsdp2 fp32 dp2", Fault("output")),
    ("fsdp2 bf16 dp2", Fault("incoming gradient", math.inf)),
]
ONCE = functools.partial(Fault, tries=1)


@pytest.mark.parametrize(
    ("layout", "fault"),
    cases(
        ("zero2 bf16 dp2", ONCE("output")),
        every=[(layout, ONCE("output")) for layout in LAYOUTS],
    ),
)
def test_a_fault_that_does_not_return_changes_nothing(
    pools: Any, tmp_path: Path, layout: str, fault: Fault
) -> None:
    broken, whole = (
        pools.run(2, train_with_fault, recipe=recipe_of(layout, tmp_path / name), fault=given)
        for name, given in (("broken", fault), ("whole", None))
    )
    assert [seen.code for seen in (*broken, *whole)] == [0] * 4, broken[0].printed
    assert [seen.unchanged for seen in broken] == [[True]] * 2
    assert [seen.unchanged for seen in whole] == [[]] * 2
    assert [seen.digest for seen in broken] == [seen.digest for seen in whole]
    lines, unbroken = read_metrics(tmp_path / "broken"), read_metrics(tmp_path / "whole")
    assert reproducible_values(lines) == reproducible_values(unbroken)
    assert [line["grad_norm"] for line in lines] == [line["grad_norm"] for line in unbroken]
    assert not any("skipped" in line for line in lines)

    (alert,) = alerts_of(tmp_path / "broken")
    assert (alert["kind"], alert["step"], alert["answer"]) == ("nonfinite", FAULT, "retry")
    assert alert["text"].startswith("transient: step 3 had loss ")
    assert not (tmp_path / "whole" / "alerts.jsonl").exists()
    # A rank is named if only its own loss is not finite. A pipeline has one loss. Under tensor
    # parallelism, no layer follows that would send the value to the other rank.
    named = fault.kind == "output" and "pp2" not in layout
    assert alert.get("rank") == (RANK if named else None)
    assert ("host" in alert, "device" in alert) == (named, named)


@pytest.mark.parametrize(
    ("layout", "fault"),
    cases(
        ("zero3 bf16 dp2", Fault("incoming gradient")),
        ("ddp fp32 dp2", Fault("weight gradient", math.inf)),
        ("zero1 fp32 tp2", Fault("output")),
        ("zero0 fp32 pp2", Fault("output", rank=0)),
        every=NAMED,
    ),
)
def test_a_fault_that_returns_is_named(
    pools: Any, tmp_path: Path, layout: str, fault: Fault
) -> None:
    recipe = recipe_of(layout, tmp_path / "run")
    ranks = pools.run(2, train_with_fault, recipe=recipe, fault=fault)
    assert [seen.code for seen in ranks] == [1, 1], ranks[0].printed
    assert [seen.unchanged for seen in ranks] == [[True, True]] * 2

    (alert,) = alerts_of(tmp_path / "run")
    assert (alert["kind"], alert["step"], alert["answer"]) == ("nonfinite", FAULT, "stop")
    assert alert["rank"] == fault.rank and fault.module in alert["module"], alert
    what = {
        "output": f"the output of {alert['module']} (micro-batch 2, forward pass)",
        "incoming gradient": (
            f"the gradient of the output of {alert['module']} (micro-batch 2, backward pass)"
        ),
        "weight gradient": f"the gradient of {alert['module']} (micro-batch 2, backward pass)",
    }[fault.kind]
    assert f"The first value that is not finite is {what} on rank {fault.rank} (" in alert["text"]
    assert alert["text"] in ranks[0].printed.replace("stopped: ", "")
    assert len(read_metrics(tmp_path / "run")) == FAULT - 1


def test_a_skipped_step_changes_nothing_and_a_resume_continues(pools: Any, tmp_path: Path) -> None:
    fault = Fault("weight gradient", until=FAULT + 1)
    skipping = recipe_of("zero2 bf16 dp2", tmp_path / "whole", on_nonfinite="skip", save_every=1)
    whole = pools.run(2, train_with_fault, recipe=skipping, fault=fault)
    assert [seen.code for seen in whole] == [0, 0], whole[0].printed
    assert [seen.unchanged for seen in whole] == [[True] * 4] * 2  # two steps, computed twice
    lines = read_metrics(tmp_path / "whole")
    assert [line.get("skipped") for line in lines] == [None, None, 1, 2, 2]
    assert [alert["answer"] for alert in alerts_of(tmp_path / "whole")] == ["skip", "skip"]

    # The run stops after the first of the two, and resumes with the second.
    parts = replace(skipping, out=str(tmp_path / "parts"))
    first = pools.run(2, train_with_fault, recipe=replace(parts, stop_at=FAULT), fault=fault)
    then = pools.run(2, train_with_fault, recipe=parts, fault=fault, first=FAULT + 1)
    assert [seen.code for seen in (*first, *then)] == [0] * 4, then[0].printed
    assert [seen.digest for seen in then] == [seen.digest for seen in whole]
    assert [line.get("skipped") for line in read_metrics(tmp_path / "parts")][-1] == 2


@slow
def test_a_run_that_stopped_itself_is_started_again_only_with_another_answer(
    pools: Any, tmp_path: Path
) -> None:
    fault = Fault("output")
    recipe = recipe_of("zero0 fp32 dp2", tmp_path / "run", save_every=1)
    (stopped, _) = pools.run(2, train_with_fault, recipe=recipe, fault=fault)
    assert "--on_nonfinite skip to pass over the step" in stopped.printed
    (again, _) = pools.run(2, train_with_fault, recipe=recipe, fault=fault, first=FAULT)
    assert "stopped itself at step 3" in str(again.code)
    assert "Use --on_nonfinite skip to pass over the step" in str(again.code)
    skipping = dataclasses.replace(recipe, on_nonfinite="skip")
    through = pools.run(2, train_with_fault, recipe=skipping, fault=fault, first=FAULT)
    assert [seen.code for seen in through] == [0, 0], through[0].printed
    assert read_metrics(tmp_path / "run")[-1]["step"] == STEPS


@slow
def test_without_the_watch_a_bad_step_ends_the_run_at_once(pools: Any, tmp_path: Path) -> None:
    recipe = recipe_of("ddp fp32 dp2", tmp_path / "run", watch=False)
    ranks = pools.run(2, train_with_fault, recipe=recipe, fault=Fault("output"))
    assert [seen.code for seen in ranks] == [1, 1]
    assert [seen.unchanged for seen in ranks] == [[True]] * 2
    assert not (tmp_path / "run" / "alerts.jsonl").exists()
