"""Mistakes in a recipe's file and folder: a one-line error, exit code 1, and no traceback."""

import copy
import dataclasses
import importlib.metadata
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pool import ROOT, environment, free_port, import_path
from recipekit.commands.lint import lint
from recipekit.plan import resolve_run
from recipekit.spec.command import one_recipe, parse, recipe_of
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.shadows import HIDEABLE, LIBRARIES, UNUSED, shadows

START = "from recipekit import Recipe, run\n"
END = '\nif __name__ == "__main__":\n    run(RECIPE)\n'
# Lines between the start and the end of a recipe's file -> error message.
WRONG = {
    "RECIPE = Recipe(learning_rate=1e-4)": (
        "mine.py, line 2: Recipe(learning_rate=0.0001): the field does not exist. Use lr"
    ),
    "RECIPE = Recipe(\n    model='x',\n    num_train_epochs=3)": (
        "mine.py, line 2: Recipe(num_train_epochs=3): the field does not exist. Use "
    ),
    "RECIPE = Recipe(lora_r=8)": (
        "mine.py, line 2: Recipe(lora_r=8): the field does not exist. Set it in LoraConfig in the"
        " recipe's file"
    ),
    "RECIPE = Recipe(warmup_stepz=8)": (
        "mine.py, line 2: Recipe(warmup_stepz=8): the field does not exist. Did you mean"
        " warmup_steps?"
    ),
    "RECIPE = Recipe(deepspeed_config='zero3.json')": (
        "mine.py, line 2: Recipe(deepspeed_config='zero3.json'): the field does not exist. Use"
        " ds_config"
    ),
    "RECIPE = Recipe(tiny=True)": (
        "mine.py, line 2: Recipe(tiny=True): the field does not exist. Omit it, and write --tiny on"
        " the command line"
    ),
    "RECIPE = Recipe(frobnicate=[0] * 99)": (
        "mine.py, line 2: Recipe(frobnicate=...): the field does not exist."
        " recipes/recipekit/spec/recipe.py lists the fields"
    ),
    "RECIPE = Recipe('Qwen/Qwen3-0.6B')": (
        "mine.py, line 2: Recipe('Qwen/Qwen3-0.6B'): every value requires the name of its field."
        " Write NAME=VALUE"
    ),
    "import dataclasses\nRECIPE = dataclasses.replace(Recipe(), epocs=2, report_to='none')": (
        "mine.py, line 3: Recipe(epocs=2): the field does not exist. "
    ),
    "RECIPE = Recipe(model='x'),": (
        "mine.py: RECIPE: must be a Recipe, not tuple. Remove the comma after Recipe(...)"
    ),
    "RECIPE = [Recipe(model='x'), Recipe(model='y')]": (
        "mine.py: RECIPE: must be a Recipe, not list. Keep one Recipe(...) in a file"
    ),
    "RECIPE = dict(model='x', lr=1e-4)": (
        "mine.py: RECIPE: must be a Recipe, not dict. Write RECIPE = Recipe(**RECIPE), or"
        " Recipe(NAME=VALUE, ...)"
    ),
    "RECIPE = Recipe": (
        "mine.py: RECIPE: must be a Recipe, not the class Recipe. Write RECIPE = Recipe(...), with"
        " the fields in parentheses"
    ),
    "RECIPE = Recipe(activation_checkpointing=True, checkpoint_every=2)": (
        "mine.py, line 2: Recipe(checkpoint_every=2): the field does not exist. "
        "To save checkpoints use save_every=N. To recompute every N-th layer use recompute_every=N"
    ),
    "RECIPE = None": "mine.py: RECIPE: must be a Recipe, not NoneType. Write RECIPE = Recipe(...)",
}


@pytest.mark.parametrize("lines", WRONG)
def test_a_mistake_in_the_file_is_one_line_where_a_tool_reads_it(
    lines: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(START + lines + END)
    with pytest.raises(ConfigError) as refusal:
        recipe_of(path)
    assert refusal.value.exit_code == 1
    assert str(refusal.value.problems[0]).startswith(WRONG[lines])
    assert len(refusal.value.problems) == 1 + lines.count("report_to")


@pytest.mark.parametrize("index", [0, 9])
def test_a_mistake_in_the_file_is_one_line_where_the_file_is_the_program(
    index: int, tmp_path: Path
) -> None:
    lines, told = list(WRONG.items())[index]
    done = run_file(tmp_path, START + lines + END)
    assert done.returncode == 1 and done.stdout == ""
    first, line = done.stderr.splitlines()
    assert first == "refused: 1 problem" and line.startswith(f"  1. {told}"), done.stderr


def run_file(
    folder: Path, text: str, *flags: str, name: str = "mine.py"
) -> subprocess.CompletedProcess[str]:
    (folder / name).write_text(text)
    env = environment() | {"PYTHONPATH": import_path()}
    return subprocess.run(
        [sys.executable, name, *flags],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("field", "rule"),
    [
        ("adapt='lora'", "must be a function from model to model, not str"),
        ("adapt=dict(r=8)", "must be a function from model to model, not dict"),
        ("adapt=Recipe", "must be a function from model to model, not type"),
        ("ds_config=None", "must be a file name or a dict, not NoneType"),
        ("lr_scale=[('*', 0.5)]", "must be a dict, not list"),
        ("tp_plan='colwise'", "must be a dict, not str"),
        ("no_decay='*.bias'", "must be a tuple, not str"),
        ("model=None", "must be of type str, not NoneType"),
    ],
)
def test_a_value_of_a_wrong_type_is_one_line_in_a_plan_and_in_lint(
    field: str, rule: str, tmp_path: Path
) -> None:
    """Values of a wrong type used to be found late or never.

    A string for `no_decay` was split into its letters. An adapter that is not a function failed
    only after the model was loaded.
    """
    path = tmp_path / "mine.py"
    path.write_text(
        f"{START}RECIPE = Recipe(**{{'model': 'Qwen/Qwen3-0.6B'}} | dict({field})){END}"
    )
    with pytest.raises(ConfigError) as refusal:
        resolve_run(parse(recipe_of(path), path, ["--dry_run", "--tiny"]))
    planned, (linted, lines) = refusal.value.problems, lint(None, path)
    assert planned == linted and lines == []
    (problem,) = planned
    assert problem.where.startswith(f"{field.partition('=')[0]} = ") and problem.rule == rule


def test_a_file_that_names_its_recipe_otherwise_is_refused_with_the_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(START + "CONFIG = Recipe(model='x')\n")
    with pytest.raises(
        ConfigError, match=r"sets no RECIPE = Recipe\(\.\.\.\)\. Rename CONFIG to RECIPE"
    ):
        recipe_of(path)


def test_a_recipe_stays_a_plain_dataclass() -> None:
    recipe = Recipe(model="x", lr=1e-4)
    assert (
        dataclasses.replace(recipe, steps=5).steps == 5 and dataclasses.replace(recipe).lr == 1e-4
    )
    for other in (
        copy.copy(recipe),
        copy.deepcopy(recipe),
        pickle.loads(pickle.dumps(recipe)),
        Recipe(**vars(recipe)),
    ):
        assert other == recipe and type(other) is Recipe
    assert one_recipe(recipe, Path("mine.py")) is recipe
    with pytest.raises(ConfigError):
        parse((recipe,), Path("mine.py"), [])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "torch.py",
        "datasets.py",
        "random.py",
        "json.py",
        "numpy/__init__.py",
        "yaml.pyc",
        "tqdm.cpython-311-x86_64-linux-gnu.so",
    ],
)
def test_a_file_that_hides_a_library_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    top = name.partition("/")[0]
    (problem,) = shadows(str(tmp_path))
    assert problem == (
        top,
        f"hides {top.partition('.')[0]}: Python searches this folder first",
        "rename it",
    )
    (tmp_path / "mine.py").write_text(START + "RECIPE = Recipe(model='x')" + END)
    with pytest.raises(ConfigError, match=f"{top}: hides "):
        recipe_of(tmp_path / "mine.py")


def test_files_with_names_of_their_own_hide_nothing(tmp_path: Path) -> None:
    for name in (
        "test.py",
        "utils.py",
        "train.py",
        "trace.py",
        "os.py",
        "sys.py",
        "torch.txt",
        "datasets.old.py",
        "wandb/run",
        "datasets/a.txt",
        "data.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert shadows(str(tmp_path)) == [] and shadows(str(tmp_path / "gone")) == []
    assert not UNUSED & LIBRARIES and {"random", "logging", "tokenizers"} <= HIDEABLE


def test_every_package_that_a_start_can_import_is_a_library() -> None:
    """The names come from requirements.txt and from all packages that those packages require."""
    canonical = lambda name: re.sub(r"[-_.]+", "-", name).lower()  # noqa: E731
    left, needed = (
        re.findall(r"^([\w.-]+)==", (ROOT / "requirements.txt").read_text(), re.MULTILINE),
        set[str](),
    )
    while left:
        name = canonical(left.pop())
        try:
            requires = importlib.metadata.requires(name) if name not in needed else []
        except importlib.metadata.PackageNotFoundError:
            continue  # a package for another platform
        needed.add(name)
        left += [
            match[0]
            for line in requires or []
            if "extra ==" not in line and (match := re.match(r"[\w.-]+", line))
        ]
    found = importlib.metadata.packages_distributions().items()
    names = {
        name
        for name, distributions in found
        if {canonical(each) for each in distributions} & needed
        if name.isidentifier() and name[0] != "_"
    }
    # Nobody imports these.
    assert len(names) > 60 and names - LIBRARIES <= {
        "coreweave_evaluations",
        "isympy",
        "pylab",
        "tzdata",
    }


@pytest.mark.parametrize(
    ("hidden", "program"),
    [("torch.py", "torch.py"), ("random.py", "mine.py"), ("dataclasses.py", "mine.py")],
)
def test_a_library_that_is_hidden_from_a_start_is_one_line(
    hidden: str, program: str, tmp_path: Path
) -> None:
    """The error is one line, even if recipekit's own messages need the hidden library."""
    (tmp_path / hidden).write_text("raise RuntimeError('the wrong module')\n")
    done = run_file(
        tmp_path, START + "RECIPE = Recipe(model='x')" + END, "--tiny", "--dry_run", name=program
    )
    told = f"  1. {hidden}: hides {hidden[:-3]}: Python searches this folder first. Rename it"
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (
        1,
        "",
        ["refused: 1 problem", told],
    )


STARTERS = {
    "deepspeed": "deepspeed --num_gpus 2 --master_port {port}",
    "torchrun": "torchrun --nproc_per_node 2 --master_port {port}",
    "launch": "{python} -m launch --gpus 2",
    "launch torchrun": "{python} -m launch --spawn torchrun --gpus 2",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("starter", "lines"),
    [
        ("deepspeed", "RECIPE = Recipe(learning_rate=1e-4)"),
        ("deepspeed", "hidden"),
        ("torchrun", "RECIPE = Recipe(model='x'),"),
        ("torchrun", "hidden"),
        ("launch", "hidden"),
        ("launch torchrun", "RECIPE = Recipe(learning_rate=1e-4)"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_under_each_starter(
    starter: str, lines: str, tmp_path: Path
) -> None:
    """The job starts in a different folder, because `deepspeed` imports from the current folder."""
    told = WRONG.get(
        lines, "mine/datasets.py: hides datasets: Python searches this folder first. Rename it"
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.py").write_text(
        START + (lines if lines in WRONG else "RECIPE = Recipe(model='x')") + END
    )
    if lines not in WRONG:
        (tmp_path / "mine" / "datasets.py").write_text("raise RuntimeError('the wrong module')\n")
    words = [
        *STARTERS[starter].format(port=free_port(), python=sys.executable).split(),
        "mine/mine.py",
        "--tiny",
    ]
    env = environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1 and f"  1. {told}\n" in done.stdout, done.stdout
    # torchrun prints its own traceback.
    assert 'mine.py", line' not in done.stdout and "recipekit/" not in done.stdout
    assert done.stdout.count("refused: 1 problem") == 1
