"""All recipes in recipes/ are documented, are cheap to import, and train with one command."""

import ast
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from pool import ROOT, environment
from recipe_files import FILES, load, plan, tiny_command
from recipekit.architectures.lookup import SHIPPED, fitting_task
from recipekit.architectures.shrink import BYTE_VOCAB
from recipekit.model.empty import empty_model
from recipekit.plan import resolve_run
from recipekit.planner.dry_run import print_dry_run
from recipekit.planner.resolve import resolve_here
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.memory_terms import ACCELERATOR, HOST, total_bytes
from recipekit.spec.mesh import make_mesh
from recipekit.spec.shipped import last_check
from recipekit.spec.task_specs import TASKS

every_recipe = pytest.mark.parametrize("name", FILES)
# On two ranks, a tiny form of these recipes has the layout of another recipe, which `make test`
# trains.
SLOW_ON_TWO_RANKS = (
    "ernie4_5_21b_zero1_pp4_tp2",
    "gemma3_1b_zero1",
    "glm4_5_air_zero1_pp8_tp4",
    "olmo3_7b_zero3",
    "seed_oss_36b_zero1_pp4_tp2",
    "smollm3_3b_zero2",
)
on_two_ranks = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW_ON_TWO_RANKS else ())
        for name in FILES
    ],
)

# Parameters of the published weights. 106 billion is the figure of GLM-4.5-Air's card. The files of
# that model also contain a layer that transformers does not load. It predicts a further token.
PUBLISHED = {
    "smollm3_3b_zero2": 3_075_098_624,
    "gemma3_1b_zero1": 999_885_952,
    "olmo3_7b_zero3": 7_298_011_136,
    "apertus_8b_zero1_tp2": 8_053_338_176,
    "seed_oss_36b_zero1_pp4_tp2": 36_151_104_512,
    "deepseek_v2_lite_zero1_ep8": 15_706_484_224,
    "ernie4_5_21b_zero1_pp4_tp2": 21.8e9,
    "glm4_5_air_zero1_pp8_tp4": 106e9,
}


def docstring(name: str) -> str:
    found = ast.get_docstring(ast.parse(FILES[name].read_text()))
    assert found, f"{FILES[name]} has no docstring"
    return found


def num_gpus(name: str) -> int:
    """Return the number of ranks in the docstring's command."""
    found = re.search(
        r"\n\n    deepspeed (?:--hostfile hosts --num_nodes (\d+) )?--num_gpus (\d+)"
        rf" recipes/{name}\.py( .*)?\n\n",
        docstring(name),
    )
    assert found, (
        f"{FILES[name]}: the docstring holds no line `    deepspeed --num_gpus N recipes/{name}.py`"
    )
    return int(found[1] or 1) * int(found[2])


def needs(name: str) -> str:
    """Return the hardware in a docstring's line `Needs: HARDWARE (why). Measured: ...`."""
    found = re.search(
        r"^Needs: ([^(.]+?)(?: \(.*\))?\..* ?Measured: .*\.",
        docstring(name),
        re.DOTALL | re.MULTILINE,
    )
    assert found, (
        f"{FILES[name]}: the docstring holds no `Needs: HARDWARE. Measured: WHAT, or not measured.`"
    )
    return " ".join(found[1].split())


def full_size(name: str) -> list[str]:
    """Return the flags that run the recipe on the number of ranks in its command."""
    return ["--world", str(num_gpus(name))]


def catalogue_entry(name: str) -> str:
    """Generate a recipe's entry under "The recipes" in recipes/README.md from its file."""
    recipe = load(name).RECIPE
    dataset = " ".join(filter(None, (recipe.dataset, recipe.subset)))
    teaches = docstring(name).split("\n\n")[0]
    return " ".join(f"[{name}]({name}.py): {teaches} `{recipe.model}` on `{dataset}`".split())


def hardware_row(name: str) -> str:
    """Return the recipe's row in README.md's table."""
    recipe = load(name).RECIPE
    mesh = make_mesh(num_gpus(name), tp=recipe.tp, pp=recipe.pp, sp=recipe.sp, ep=recipe.ep)
    strategy = recipe.ds_config if recipe.engine == "deepspeed" else f"none: {recipe.engine}"
    return f"| `{name}` | {strategy} | {mesh} | {needs(name)} | {'; '.join(last_check(name))} |"


def section(title: str, page: str) -> str:
    return (ROOT / page).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_kind_of_strategy_has_a_recipe():
    recipes = [load(name).RECIPE for name in FILES]
    assert {recipe.ds_config for recipe in recipes} >= {
        "zero0.json",
        "zero1.json",
        "zero2.json",
        "zero3.json",
        "zero3_cpu.json",
        "zero3_nvme.json",
    }
    assert (
        any(recipe.tp > 1 for recipe in recipes)
        and any(recipe.adapt for recipe in recipes)
        and {recipe.task for recipe in recipes} <= TASKS.keys()
    )


@every_recipe
def test_recipe_is_one_flat_file(name):
    """A recipe contains a docstring, imports, RECIPE, and a call of `run(RECIPE)` when it is
    started.

    RECIPE contains only values that differ from a default.
    """
    tree = ast.parse(FILES[name].read_text())
    assert ast.unparse(tree.body[-1]) == "if __name__ == '__main__':\n    run(RECIPE)"
    assert not [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.If) and node is not tree.body[-1]
    ]
    (call,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RECIPE"
    ]
    assert isinstance(call, ast.Call)
    defaults = {
        field: item.default for field, item in load(name).RECIPE.__dataclass_fields__.items()
    }
    written = {
        word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)
    }
    needless = [
        field
        for field, value in written.items()
        if value == defaults[field] and field not in ("model", "dataset", "ds_config")
    ]
    assert not needless, f"{needless} repeat the default"


@every_recipe
def test_recipe_has_its_architecture(name):
    recipe = load(name).RECIPE
    file = SHIPPED / f"{recipe.model.replace('/', '--')}.json"
    assert file.exists(), f"--tiny needs {file}"
    config = json.loads(file.read_text())
    if "seq_len" in recipe.task_spec.reads:
        assert recipe.seq_len <= config.get("max_position_embeddings", config.get("n_positions"))
    assert fitting_task(config) == "pretrain" or fitting_task(config) == recipe.task


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_parameters_as_its_published_weights(name):
    file = SHIPPED / f"{load(name).RECIPE.model.replace('/', '--')}.json"
    model = empty_model(json.loads(file.read_text()))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(PUBLISHED[name], rel=0.01)


def test_no_architecture_is_left_over():
    used = {load(name).RECIPE.model.replace("/", "--") for name in FILES}
    assert {file.stem for file in SHIPPED.glob("*.json")} == used


def test_importing_a_recipe_starts_nothing(tmp_path):
    """An import must load no heavy module and create no thread, process, file or variable."""
    code = """
import importlib, os, sys, threading
before = dict(os.environ)
for name in sys.argv[1:]:
    importlib.import_module(name)
    heavy = {"torch", "transformers", "deepspeed", "datasets", "peft", "wandb", "numpy"} & \
set(sys.modules)
    assert not heavy, (name, heavy)
    assert threading.active_count() == 1 and dict(os.environ) == before, name
"""
    subprocess.run(
        [sys.executable, "-c", code, *FILES],
        cwd=tmp_path,
        env=environment(),
        check=True,
        timeout=60,
    )
    assert not list(tmp_path.iterdir())


def test_catalogue_lists_every_recipe_as_it_is():
    entries = [
        " ".join(entry.split())
        for entry in re.findall(
            r"^- (\[.+\n(?:  .+\n)*)", section("The recipes", "recipes/README.md"), re.MULTILINE
        )
    ]
    rows = re.findall(r"^\| `.+$", section("The recipes", "README.md"), re.MULTILINE)
    for found, made in ((entries, catalogue_entry), (rows, hardware_row)):
        belong = [made(name) for name in FILES]
        assert sorted(found) == sorted(belong), (
            "README.md and recipes/README.md; what belongs there:\n" + "\n".join(belong)
        )


@every_recipe
def test_docstring_tells_the_memory_of_the_states(name):
    """`N.N GiB of states` must equal --dry_run's permanent memory per rank for the docstring's
    command.

    The figure includes host memory and NVMe.
    """
    world = num_gpus(name)
    planned = plan(name, *full_size(name))
    assert planned.model_config is not None
    terms = resolve_here(planned)[0].fullest
    states = (
        sum(term.reserved_bytes for term in terms if not term.moments and not term.bound) / 2**30
    )
    claim = re.search(r"([\d.]+) GiB of states", docstring(name))
    assert claim or states < 0.1
    if claim:
        assert float(claim[1]) == pytest.approx(states, abs=0.05)
        hardware = re.match(r"(\d+) x (\d+) GB GPUs?(?:.* (\d+) GB of host memory)?", needs(name))
        assert hardware and int(hardware[1]) == world
        assert total_bytes(terms, ACCELERATOR) < 0.7 * int(hardware[2]) * 1e9, (
            "a third is left for activations, beside copies and logits"
        )
        assert world * total_bytes(terms, HOST) < 0.95 * int(
            hardware[3] or 0
        ) * 1e9 or not total_bytes(terms, HOST)
    if "meta-llama/" in planned.recipe.model:
        assert "Gated model" in docstring(name)


@every_recipe
def test_a_recipe_is_accepted_on_the_ranks_of_its_command(name):
    plan(name, *full_size(name))


@every_recipe
def test_dry_run(name, capsys):
    """The recipes have their full size here. test_worlds.py runs them with --tiny."""
    planned = plan(name, *full_size(name), "--show", "json")
    print_dry_run(planned)
    printed = capsys.readouterr().out
    ranks = "1 rank" if planned.mesh.world == 1 else "ranks"
    assert (
        f"{ranks}: {planned.mesh}" in printed and "iB always" in printed and '"auto"' not in printed
    )


@pytest.mark.parametrize("argv", [["--tp", "2"], ["--pp", "2", "--deepspeed_config", "zero1.json"]])
def test_a_dry_run_refuses_a_degree_without_a_plan(argv):
    with pytest.raises(ConfigError, match="with GPT2LMHeadModel: this model publishes no"):
        print_dry_run(plan("gpt2_124m_zero0", "--world", "4", *argv))


def test_dry_run_as_a_user_starts_it(tmp_path):
    argv = [
        sys.executable,
        ROOT / "recipes" / "llama3_1_8b_zero1_tp4.py",
        "--dry-run",
        "--world",
        "8",
    ]
    done = subprocess.run(
        argv, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert (
        "8 ranks: dp2_tp4" in done.stdout
        and "accelerator, each rank: 22.44 GiB always" in done.stdout
    )
    assert not list(tmp_path.iterdir())


def start(argv: list[str | Path], cwd: Path, timeout: float) -> tuple[int | None, str]:
    """Run a command; return (exit code, output).

    After `timeout` seconds, print the stacks, end the process tree, and return None as the code.
    """
    log = cwd / "output.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=environment() | {"PYTHONFAULTHANDLER": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
            tree = psutil.Process(process.pid).children(recursive=True)
            for child in tree:
                if "LOCAL_RANK" in child.environ():
                    child.send_signal(signal.SIGABRT)  # PYTHONFAULTHANDLER prints the stacks
            time.sleep(2)
            for child in tree:
                if child.is_running():
                    child.kill()
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, log.read_text(errors="replace")


def train_tiny(name: str, out: str) -> int:
    """Run a recipe's file on a rank of a pool, as if the file had been started."""
    from recipekit.train import main

    sys.argv = [
        str(FILES[name]),
        "--tiny",
        "--steps",
        "3",
        "--eval_every",
        "1",
        "--no-wandb",
        "--out",
        out,
    ]
    return main(resolve_run(parse(load(name).RECIPE, FILES[name], sys.argv[1:])))


def check_tiny(name: str, out: Path) -> None:
    facts = load(name).RECIPE.task_spec
    classes = 2 if facts.pairs else facts.tiny.get("num_labels", BYTE_VOCAB)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in lines)
    # With random weights the loss is about ln(number of tokens, labels or answers). A ResNet's head
    # is initialised like torch's linear layer, with values five times as wide as a transformer's.
    # BatchNorm scales the head's inputs to size 1. The tiny ResNet of transformers therefore starts
    # 2 to 16 % higher on random images.
    of_norms = load(name).RECIPE.model.startswith("microsoft/resnet")
    assert abs(lines[0]["loss"] / math.log(classes) - 1) < (0.3 if of_norms else 0.1)
    if classes == BYTE_VOCAB:
        # The losses are for the same rows, because batches differ by more than 3 steps can learn.
        assert lines[-1]["eval_loss"] < lines[0]["eval_loss"]
        # The rate suits SGD with 1,024 images per step, but these three steps have 8 images. The
        # weights change faster than the statistics.
    elif of_norms:
        assert math.isfinite(lines[-1]["eval_loss"])
        # Three steps on crops of 8 images are too few to teach a vision transformer.
        # tests/loop/test_fashion.py shows that it learns.
    else:
        assert abs(lines[-1]["eval_loss"] / math.log(classes) - 1) < 0.1
    assert list((out / "hf").glob("*.safetensors"))


def wait_for_ops(name: str, ops: Callable[[str], None]) -> None:
    zero = plan(name, "--tiny", "--world", "2").ds_config["zero_optimization"]
    offload = {
        zero.get(block, {}).get("device", "none")
        for block in ("offload_optimizer", "offload_param")
    }
    for op, needed in (("cpu_adam", offload != {"none"}), ("async_io", "nvme" in offload)):
        if needed:
            ops(op)


@on_two_ranks
def test_recipe_trains_tiny(name, tmp_path, pools, ops):
    wait_for_ops(name, ops)
    assert pools.run(2, train_tiny, name=name, out=str(tmp_path / "run")) == [0, 0]
    check_tiny(name, tmp_path / "run")


@pytest.mark.slow  # `make quickstart` and tests/launch start the smallest one
@every_recipe
def test_recipe_trains_tiny_by_its_command(name, tmp_path, ops):
    """The command is `deepspeed --num_gpus 2 recipes/NAME.py --tiny --steps 3`, without network."""
    wait_for_ops(name, ops)
    code, output = start(tiny_command(name, tmp_path / "run"), tmp_path, timeout=240)
    assert code == 0, f"ended with {code}:\n{output[-8000:]}"
    check_tiny(name, tmp_path / "run")


@pytest.mark.slow
def test_lora_starts_from_published_weights_and_exports_adapter_or_merged_model(tmp_path, ops):
    """The adapter, when merged by peft, must equal the full model that --merge writes."""
    import torch
    import transformers
    from peft import PeftModel
    from recipekit.architectures.shrink import shrink

    config = shrink(json.loads((SHIPPED / "Qwen--Qwen3-0.6B.json").read_text()), 264)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    )
    model.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    argv = [
        sys.executable,
        FILES["qwen3_0_6b_lora_zero3"],
        "--model",
        tmp_path / "base",
        "--tokenizer",
        "bytes",
        "--dataset",
        "builtin",
        "--subset",
        "",
    ]
    argv += [
        "--steps",
        "2",
        "--seq_len",
        "64",
        "--global_batch",
        "2",
        "--eval_every",
        "0",
        "--no-wandb",
        "--lr",
        "0.1",
    ]
    for extra in ([], ["--merge"]):
        code, output = start(
            [*argv, *extra, "--out", tmp_path / f"run{len(extra)}"], tmp_path, timeout=240
        )
        assert code == 0, f"ended with {code}:\n{output[-8000:]}"
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run1" / "hf").state_dict()
    theirs = (
        PeftModel.from_pretrained(base, tmp_path / "run0" / "hf").merge_and_unload().state_dict()
    )
    assert ours.keys() == theirs.keys() == before.keys()
    for name, value in ours.items():
        changed = not torch.equal(value, before[name])
        assert changed == name.endswith("_proj.weight"), name
        torch.testing.assert_close(value, theirs[name], rtol=0.01, atol=0.01)  # bf16
