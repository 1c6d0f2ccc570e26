"""Files with Windows editors' byte order mark, which must not change a tokenizer."""

import codecs
from pathlib import Path

import pytest
from recipekit.architectures.small_files import without_bom
from recipekit.data.processors import byte_tokenizer, load_tokenizer
from recipekit.model.small_files import _add_files

MARKED = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]
CHAT = [{"role": "user", "content": "q"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
    )
    (folder / "generation_config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", MARKED)
def test_a_tokenizer_is_read_as_without_the_mark(name: str, model: Path, tmp_path: Path) -> None:
    plain = load_tokenizer(str(model))
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_bytes(codecs.BOM_UTF8 + (model / name).read_bytes())
    marked = load_tokenizer(str(tmp_path))
    assert marked.get_vocab() == plain.get_vocab() and marked.name_or_path == str(tmp_path)
    assert marked.apply_chat_template(CHAT, tokenize=False) == plain.apply_chat_template(
        CHAT, tokenize=False
    )


def test_exports_and_copies_have_no_mark(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(
        codecs.BOM_UTF8 + (model / "tokenizer_config.json").read_bytes()
    )
    contents: dict[str, bytes] = {}
    _add_files(tmp_path, lambda name: True, contents, [])
    assert contents == {"tokenizer_config.json": (model / "tokenizer_config.json").read_bytes()}


def test_a_folder_without_a_mark_is_not_copied(model: Path) -> None:
    with without_bom(model) as folder:
        assert folder is model
