"""A dry run and a start must agree on sixty inputs: the same result and the same message."""

import contextlib
import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from first_inputs import FOX, INPUTS, NUMBERS, TEXTS, lines
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe

RECIPE = Recipe(model="./base", dataset="docs.jsonl", ds_config="zero1.json")
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<e>{% endfor %}{% if"
    " add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with a small Llama and its tokenizer; return the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("first") / "base"
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    LlamaForCausalLM(
        LlamaConfig(vocab_size=1024, max_position_embeddings=512, eos_token_id=0, **sizes)
    ).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<e>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(FOX, trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>")
    whole.chat_template = CHAT_TEMPLATE
    whole.save_pretrained(folder)
    return folder


@pytest.fixture
def words(
    base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> list[str]:
    """Write an input's files to the current folder; return the words of its command line."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, "base")
    lines("docs.jsonl", TEXTS)()
    given = INPUTS[request.param]
    given.make()
    return [*NUMBERS.split(), *given.words.split()]


def asked(words: list[str]) -> str:
    """Return a dry run's config error, or ""."""
    from recipekit.planner.dry_run import print_dry_run
    from recipekit.runtime.inputs import check_inputs

    try:
        plan = resolve_run(parse(RECIPE, Path("mine.py"), ["--dry_run", *words]))
        with contextlib.redirect_stdout(io.StringIO()):
            check_inputs(plan, print)
            print_dry_run(plan)
    except ConfigError as error:
        return str(error)
    return ""


def started(folder: str, words: list[str], cache: str) -> str:
    """Return a start's config error in a pool's process, or "" after the last step."""
    from recipekit.run import _lock_run_folder
    from recipekit.train import main

    os.environ["HF_HUB_CACHE"] = cache
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            plan = resolve_run(parse(RECIPE, Path("mine.py"), words))
            with _lock_run_folder(plan.out):
                code = main(plan)
        except ConfigError as error:
            return str(error)
    return "" if code == 0 else f"exit code {code}"


def test_there_are_sixty_inputs() -> None:
    assert len(INPUTS) >= 60 and sum(not given.says for given in INPUTS.values()) >= 15


@pytest.mark.parametrize("words", INPUTS, indirect=True)
def test_a_dry_run_judges_first_inputs(
    words: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    says = INPUTS[request.node.callspec.id].says
    before = sorted(tmp_path.rglob("*"))
    found = asked(words)
    assert sorted(tmp_path.rglob("*")) == before, "a question writes nothing"
    assert found.startswith(says) and bool(found) == bool(says) and len(found.splitlines()) <= 1, (
        found
    )


@pytest.mark.slow
@pytest.mark.parametrize("words", INPUTS, indirect=True)
def test_a_start_judges_as_the_dry_run_does(words: list[str], tmp_path: Path, pools: Any) -> None:
    (found,) = pools.run(
        1, started, folder=str(tmp_path), words=words, cache=str(tmp_path / "cache")
    )
    assert found == asked([*words, "--out", "other"] if not found else words)
