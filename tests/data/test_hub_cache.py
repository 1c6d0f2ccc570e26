"""The hub's cache: its location and the commit that is read.

Models, tokenizers, processors and data sets are found in the cache when the hub is offline.
"""

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_hub import Files, files_in, serve, write_cache
from pool import ROOT, import_path
from recipekit.architectures.lookup import folder_of, is_local, model_config
from recipekit.data import hub_cache
from recipekit.data.batching import DataRank
from recipekit.data.hub_cache import hub_commits
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import Request
from recipekit.data.revisions import check_revisions
from recipekit.data.stream import open_stream
from recipekit.plan import resolve_run
from recipekit.spec import hub
from recipekit.spec.command import RunCommand
from recipekit.spec.errors import ConfigError
from recipekit.spec.hub import cache_folder, commit_of, is_offline, not_cached, snapshot_of
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import RUN_JSON, find_resume, pinned_revisions
from recipekit.tasks.image_classification import published_image_processor

ONE, TWO, THREE = (number * 40 for number in "123")
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
# Environment variables that move the cache. "{}" is replaced with a folder of the test.
VARIABLES: list[dict[str, str]] = [
    {"HOME": "{}/home"},
    {"HOME": "{}/home", "XDG_CACHE_HOME": "{}/xdg"},
    {"HOME": "{}/home", "XDG_CACHE_HOME": "{}/xdg", "HF_HOME": "~/of_hf"},
    {"HOME": "{}/home", "HF_HOME": "{}/of_hf", "HUGGINGFACE_HUB_CACHE": "{}/older"},
    {
        "HOME": "{}/home",
        "HF_HOME": "{}/of_hf",
        "HUGGINGFACE_HUB_CACHE": "{}/older",
        "HF_HUB_CACHE": "$DISK/ü hub",
    },
    {"HOME": "{}/home", "XDG_CACHE_HOME": "$DISK/xdg", "HF_HUB_CACHE": "~/own/$USER_OF_TEST"},
]
MORE = [
    {"HOME": "{}/home", "HF_HOME": "$DISK/${USER_OF_TEST}"},
    {"HOME": "{}/home", "HF_HUB_CACHE": "$UNSET_OF_TEST/x"},
]
NAMES = ("HOME", "XDG_CACHE_HOME", "HF_HOME", "HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE")


def variables_of(case: dict[str, str], folder: Path) -> dict[str, str]:
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in (*NAMES, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_CACHE")
    }
    own = {name: value.replace("{}", str(folder)) for name, value in case.items()}
    # datasets 5.2 does not expand $VAR in XDG_CACHE_HOME.
    plain |= {"HF_DATASETS_CACHE": f"{folder}/datasets"}
    plain |= {"PYTHONPATH": import_path(ROOT / "recipes")}
    return plain | {"DISK": f"{folder}/disk", "USER_OF_TEST": "me"} | own


@pytest.mark.parametrize("case", [*VARIABLES, *MORE], ids=lambda case: "-".join(case))
def test_the_cache_is_where_huggingface_hub_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: dict[str, str]
) -> None:
    environment = variables_of(case, tmp_path)
    program = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache_folder()) == said


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HF_HUB_OFFLINE": "1"},
        {"HF_HUB_OFFLINE": "on"},
        {"HF_HUB_OFFLINE": "0"},
        {"TRANSFORMERS_OFFLINE": "yes"},
    ],
)
def test_offline_is_what_huggingface_hub_calls_offline(variables: dict[str, str]) -> None:
    program = "from huggingface_hub import constants; print(constants.HF_HUB_OFFLINE)"
    said = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert str(is_offline(variables)) == said


# Commits
# --------------------------------------------------------------------------------------------------


def config(**more: Any) -> Files:
    return {"config.json": json.dumps(CONFIG | more).encode()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub_cache, "hub_is_unreachable", lambda: True)
    return tmp_path / "hub"


def test_the_commit_of_main_is_read_and_not_the_newest(cache: Path) -> None:
    for number, (commit, revisions) in enumerate(
        ((ONE, ("v1",)), (TWO, ("main", "refs/pr/7")), (THREE, ()))
    ):
        snapshot = write_cache(cache, "models/org/tiny", config(number=number), commit, *revisions)
        os.utime(snapshot, (1000 - number, 1000 - number))
    os.utime(snapshot, (9e9, 9e9))
    expected = {"": 1, "main": 1, TWO: 1, "refs/pr/7": 1, "v1": 0, ONE: 0, THREE: 2}
    for revision, number in expected.items():
        found = model_config("org/tiny", revision=revision)
        assert found is not None and found["number"] == number
        assert commit_of("org/tiny", revision) == (ONE, TWO, THREE)[number] and is_local(
            "org/tiny", revision
        )
    for absent in ("v2", "2" * 39, "..", "../snapshots"):
        assert model_config("org/tiny", revision=absent) is None and not is_local(
            "org/tiny", absent
        )
    assert snapshot_of("org/tiny", kind=hub.DATASETS) is None and snapshot_of("./org") is None


def test_a_commit_without_main_is_named_in_the_way_out(cache: Path) -> None:
    write_cache(cache, "models/org/tiny", config(), ONE)
    assert not is_local("org/tiny") and is_local("org/tiny", ONE)
    assert (
        not_cached("org/tiny")
        == "download it on a machine with network access: hf download org/tiny, or use the cached"
        f" commit with --model_revision {ONE}"
    )
    assert (
        not_cached("org/data", "v1", hub.DATASETS)
        == "download it on a machine with network access: hf download --repo-type dataset org/data"
        " --revision v1"
    )


def test_files_of_other_commits_are_not_mixed_in(cache: Path) -> None:
    """A snapshot may contain only some of the files."""
    preprocessor = {"preprocessor_config.json": json.dumps({"image_mean": [0.1]}).encode()}
    write_cache(cache, "models/org/tiny", config() | preprocessor, ONE, "v1")
    write_cache(
        cache, "models/org/tiny", {"config.json": config(now=True)["config.json"]}, TWO, "main"
    )
    assert published_image_processor("org/tiny", "pretrained") == {} and published_image_processor(
        "org/tiny", "pretrained", "v1"
    ) == {"image_mean": [0.1]}
    assert folder_of("org/tiny", "preprocessor_config.json") is None
    assert folder_of("org/tiny", "preprocessor_config.json", "v1") == snapshot_of("org/tiny", "v1")


def test_a_shipped_config_is_none_of_a_stated_revision(cache: Path) -> None:
    assert (
        model_config("Qwen/Qwen3-0.6B") is not None
        and model_config("Qwen/Qwen3-0.6B", revision="v1") is None
    )


# Flags
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"model": "{}", "model_revision": "v1"}, ["--model_revision v1: model = {} is a folder"]),
        (
            {"model": "./org", "model_revision": "v1"},
            ["--model_revision v1: model = ./org is a folder"],
        ),
        (
            {"dataset": "builtin", "dataset_revision": "v1"},
            ["--dataset_revision v1: --dataset builtin is not a data set of the hub"],
        ),
        ({"dataset": "{}/rows.jsonl", "dataset_revision": "v1"}, ["is not a data set of the hub"]),
        (
            {"dataset": "https://host/rows.jsonl", "dataset_revision": "v1"},
            ["is not a data set of the hub"],
        ),
        (
            {"dataset": "a=org/one@1; b=org/two:de@2", "dataset_revision": "v1"},
            ["--dataset names 2 data sets of the hub (org/one, org/two)"],
        ),
        (
            {
                "dataset": "a=org/one:en@1; b=org/one:de@2; c={}/rows.jsonl@1",
                "dataset_revision": "v1",
            },
            [],
        ),
        (
            {
                "dataset": "org/one",
                "dataset_revision": "v1",
                "model": "org/m",
                "model_revision": "v2",
            },
            [],
        ),
    ],
)
def test_a_revision_belongs_to_one_repository_of_the_hub(
    tmp_path: Path, fields: dict[str, str], says: list[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    recipe = Recipe(
        **{"model": "org/m"}
        | {name: value.replace("{}", str(tmp_path)) for name, value in fields.items()}
    )  # type: ignore[arg-type]
    names = ("model", "model_revision", "dataset", "dataset_revision", "split", "subset")
    problems = [
        str(ConfigError([problem]))
        for problem in check_revisions(*(getattr(recipe, name) for name in names))
    ]
    assert len(problems) == len(says)
    assert all(
        text.replace("{}", str(tmp_path)) in problem
        for text, problem in zip(says, problems, strict=True)
    ), problems


def test_revisions_of_the_recipes_file_belong_to_its_own_repositories() -> None:
    file = Recipe(model="org/m", model_revision="v1", dataset="org/d", dataset_revision="v2")
    other = dataclasses.replace(file, model="org/other", dataset="org/else")
    changed, unused = other.for_other_data(file, frozenset({"model", "dataset"}))
    assert (changed.model_revision, changed.dataset_revision) == ("", "") and unused == {
        "dataset_revision": "v2",
        "model_revision": "v1",
    }
    assert other.for_other_data(file, frozenset({"model", "dataset", *unused}))[0] == other
    assert file.for_other_data(file, frozenset({"model", "dataset"})) == (file, {})


def run_in(out: Path, recipe: Recipe, **commits: Any) -> None:
    out.mkdir()
    identity = {
        name: getattr(recipe, name)
        for name in ("model", "model_revision", "dataset", "dataset_revision")
    }
    (out / RUN_JSON).write_text(json.dumps({"identity": identity, "commits": commits}))


def test_a_resume_reads_the_commits_that_the_run_began_with(tmp_path: Path) -> None:
    asked = {"model": "org/m", "model_revision": "", "dataset": "org/d", "dataset_revision": "v2"}
    run = tmp_path / "run"
    run_in(run, Recipe(**asked), model=ONE, datasets={"org/d": TWO})  # type: ignore[arg-type]
    at_start = {"model_revision": ONE, "dataset_revision": TWO}
    assert (
        pinned_revisions("auto", run, asked)
        == pinned_revisions(str(run), tmp_path / "new", asked)
        == at_start
    )
    assert (
        pinned_revisions(str(run / "checkpoints" / "step_00000001"), tmp_path / "new", asked)
        == at_start
    )
    for changes in ({"model": "org/other"}, {"model_revision": "v3"}):
        assert pinned_revisions("auto", run, asked | changes) == {"dataset_revision": TWO}
    assert pinned_revisions("auto", run, asked | {"dataset_revision": "v3"}) == {
        "model_revision": ONE
    }
    assert (
        pinned_revisions("never", run, asked)
        == pinned_revisions("auto", tmp_path / "nothing", asked)
        == {}
    )


@pytest.mark.parametrize("name", ["model_revision", "dataset_revision"])
def test_a_run_is_another_one_by_each_revision(tmp_path: Path, name: str) -> None:
    recipe = Recipe(model="org/m", dataset="org/d")
    out = tmp_path / "run"
    out.mkdir()
    # A run of an older version.
    (out / RUN_JSON).write_text(json.dumps({"identity": {"model": "org/m", "dataset": "org/d"}}))
    assert find_resume(recipe, out, None, False) == out
    with pytest.raises(ConfigError, match=f"{name} = v1: the run in .* has nothing"):
        find_resume(dataclasses.replace(recipe, **{name: "v1"}), out, None, False)


def test_a_plan_says_what_is_not_in_the_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_cache(cache, "models/org/tiny", config(vocab_size=300), ONE, "v1")
    recipe = Recipe(model="org/tiny", out=str(tmp_path / "run"))
    with pytest.raises(
        ConfigError,
        match=(
            f"model = org/tiny: the folder does not exist, the model is not in the cache {cache},"
            " and HF_HUB_OFFLINE prevents"
        ),
    ):
        resolve_run(RunCommand(recipe, "own", tmp_path, frozenset()))
    with pytest.raises(
        ConfigError,
        match=f"is not in the cache {cache} at v2, .*hf download org/tiny --revision v2",
    ):
        resolve_run(
            RunCommand(
                dataclasses.replace(recipe, model_revision="v2"), "own", tmp_path, frozenset()
            )
        )


# Data sets
# --------------------------------------------------------------------------------------------------


def parquet(rows: list[str], column: str = "text") -> bytes:
    content = io.BytesIO()
    pq.write_table(pa.table({column: rows}), content)
    return content.getvalue()


def rows_of(first: int, count: int) -> list[str]:
    return [f"a document, number {number}, of some words" for number in range(first, first + count)]


README = (
    b"---\nconfigs:\n- config_name: en\n  data_files: en/*.parquet\n- config_name: de\n "
    b" data_files: de/*.parquet\n---\n"
)
LAYOUTS: dict[str, tuple[Files, dict[str, str], list[str]]] = {
    "shards": (
        {
            f"data/{split}-0000{n}-of-00002.parquet": parquet(rows_of(at + 30 * n, 30))
            for split, at in (("train", 0), ("test", 500))
            for n in (0, 1)
        },
        {},
        rows_of(0, 60),
    ),
    "a split": (
        {
            "train.jsonl": b'{"text": "no"}\n',
            "test.jsonl": (
                "".join(json.dumps({"text": row}) + "\n" for row in rows_of(0, 60)).encode()
            ),
        },
        {"split": "test"},
        rows_of(0, 60),
    ),
    "a subset": (
        {
            "README.md": README,
            "en/a.parquet": parquet(rows_of(900, 60)),
            "de/a.parquet": parquet(rows_of(0, 60)),
        },
        {"subset": "de"},
        rows_of(0, 60),
    ),
    "csv": (
        {"data.csv": ("text\n" + "".join(f'"{row}"\n' for row in rows_of(0, 60))).encode()},
        {},
        rows_of(0, 60),
    ),
}


def documents(**fields: Any) -> tuple[set[str], dict[str, str]]:
    """Read more than one epoch; return the documents and the commits of the data sets."""
    tokenizer = byte_tokenizer()
    request = Request(
        **{
            "dataset": "org/tiny",
            "seq_len": 64,
            "micro_batch": 16,
            "global_batch": 16,
            "token_cache": "off",
        }
        | fields
    )
    found = set[str]()
    with contextlib.closing(open_stream(request, tokenizer, rank=DataRank(1, 0))) as stream:
        for _ in range(8):
            (batch,), state = next(stream)
            for row in batch["input_ids"]:
                found |= set(tokenizer.decode(row).replace("<|pad|>", "").split("<|endoftext|>"))
    return found - {""}, hub_commits(state["identity"]["corpus"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_cached_data_set_is_read_without_the_hub(cache: Path, name: str) -> None:
    files, fields, rows = LAYOUTS[name]
    write_cache(cache, "datasets/org/tiny", {"train.jsonl": b'{"text": "other"}\n'}, ONE, "main")
    write_cache(cache, "datasets/org/tiny", files, TWO, "v2")
    found, commits = documents(dataset_revision="v2", **fields)
    assert found <= set(rows) and len(found) > 50 and commits == {"org/tiny": TWO}


def test_a_mixture_takes_cached_data_sets(cache: Path, tmp_path: Path) -> None:
    write_cache(cache, "datasets/org/tiny", LAYOUTS["shards"][0], TWO, "main")
    (tmp_path / "own.jsonl").write_text(
        "".join(json.dumps({"text": row}) + "\n" for row in rows_of(700, 60))
    )
    found, commits = documents(dataset=f"a=org/tiny@1; b={tmp_path}/own.jsonl@1")
    assert (
        found & set(rows_of(0, 60))
        and found & set(rows_of(700, 60))
        and commits == {"org/tiny": TWO}
    )


@pytest.mark.parametrize(
    "files, says",
    [
        (
            {
                name: content
                for name, content in LAYOUTS["shards"][0].items()
                if "train-00001" not in name
            },
            r"the cache has 1 of the 2 files train\.parquet of commit 2{40}. Download all",
        ),
        (
            {"README.md": b"# words"},
            (
                r"its cached commit 2{40} cannot be read: .*. Download all files on a machine with"
                r" network access: hf download --repo-type dataset org/tiny"
            ),
        ),
        ({"test.jsonl": b'{"text": "a"}\n'}, r"its cached commit 2{40} cannot be read: "),
    ],
)
def test_an_incomplete_download_is_refused(cache: Path, files: Files, says: str) -> None:
    write_cache(cache, "datasets/org/tiny", files, TWO, "main")
    with pytest.raises(ConfigError, match=says) as refused:
        documents()
    assert len(str(refused.value).splitlines()) == 1


# With huggingface_hub itself
# --------------------------------------------------------------------------------------------

FILL = """
from huggingface_hub import snapshot_download
for revision in (None, "v1"):
    snapshot_download("org/tiny", revision=revision)
    snapshot_download("org/tiny", revision=revision, repo_type="dataset")
"""
FIND = """
import contextlib, json
from recipekit.architectures.lookup import model_config
from recipekit.data.hub_cache import hub_commits
from recipekit.data.batching import DataRank
from recipekit.data.processors import load_tokenizer
from recipekit.data.request import Request
from recipekit.data.stream import open_stream
from recipekit.spec.hub import commit_of
from recipekit.model.weights import weights_folder
from recipekit.tasks.image_classification import published_image_processor
found = {}
for revision in ("", "v1"):
    tokenizer = load_tokenizer("org/tiny", revision=revision)
    request = Request(dataset="org/tiny", dataset_revision=revision, seq_len=32, global_batch=1, \
 token_cache="off")
    with contextlib.closing(open_stream(request, tokenizer, rank=DataRank(1, 0))) as stream:
        (batch,), state = next(stream)
    found[revision] = {
        "model": [model_config("org/tiny", revision=revision)["number"], \
commit_of("org/tiny", revision), weights_folder("org/tiny", revision).name],
        "tokenizer": len(tokenizer),
        "preprocessor": published_image_processor("org/tiny", "pretrained", revision)["image_mean"],
        "data": [tokenizer.decode(batch["input_ids"][0]).split("<|endoftext|>")[1], \
*hub_commits(state["identity"]["corpus"]).items()],
    }
print("FOUND" + json.dumps(found))
"""


def version(folder: Path, number: int) -> tuple[Files, Files]:
    """Write (a model's files, a data set's files); the contents depend on `number`."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<|{token}|>" for token in range(number)])
    tokenizer.save_pretrained(folder / str(number))
    more = {
        "preprocessor_config.json": json.dumps({"image_mean": [number / 10]}).encode(),
        "model.safetensors": b"weights",
    }
    return files_in(folder / str(number)) | config(number=number) | more, {
        "data/train-00000-of-00001.parquet": parquet([f"word {number}"] * 50)
    }


@pytest.mark.parametrize(
    "case", [pytest.param(case, id="-".join(case), marks=pytest.mark.slow) for case in VARIABLES]
)
def test_a_cache_filled_by_huggingface_hub_is_found_offline(
    tmp_path: Path, case: dict[str, str]
) -> None:
    environment, commits = variables_of(case, tmp_path), {}
    with serve() as running:
        for number, revision in ((1, "v1"), (2, "main")):
            of_model, of_data = version(tmp_path, number)
            commits[number] = (
                running.commit("models/org/tiny", of_model, revision),
                running.commit("datasets/org/tiny", of_data, revision),
            )
        subprocess.run(
            [sys.executable, "-c", FILL],
            env=environment | {"HF_ENDPOINT": running.url},
            check=True,
            capture_output=True,
        )
    # The hub is offline because of a setting, or because it does not answer.
    for offline in (
        {"HF_HUB_OFFLINE": "1"},
        {"HF_ENDPOINT": running.url, "HF_HUB_DISABLE_TELEMETRY": "1"},
    ):
        done = subprocess.run(
            [sys.executable, "-c", FIND],
            env=environment | offline,
            capture_output=True,
            text=True,
            check=False,
        )
        found = json.loads(done.stdout.partition("FOUND")[2] or f'"{done.returncode}"')
        for revision, number in (("", 2), ("v1", 1)):
            of_model, of_data = commits[number]
            assert found[revision] == {
                "model": [number, of_model, of_model],
                "tokenizer": len(byte_tokenizer()) + number,
                "preprocessor": [number / 10],
                "data": [f"word {number}", ["org/tiny", of_data]],
            }, done.stderr[-2000:]
