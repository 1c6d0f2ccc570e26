"""Keys of caches, identities and random numbers.

If any single part of a key changes, the key must change. Facts that are unrelated to the content
must not change the key.
"""

import contextlib
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import recipekit.data.samples as samples_module
import recipekit.data.stream as stream_module
from PIL import Image
from recipekit.data import chunks, digests, remote, tokenizer_identity
from recipekit.data.chunks import open_cache
from recipekit.data.masking import TokenMasker
from recipekit.data.packing import keyed_hashes, permutation
from recipekit.data.pairs import PairProcessor
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import Request, Sizes
from recipekit.hosts import op_cache
from recipekit.model.small import once_per_config
from recipekit.runtime import reference_logprobs
from recipekit.spec import run_folder
from recipekit.spec.recipe import Recipe
from recipekit.spec.schedules import leave_out_of, ramp_of
from recipekit.spec.task_specs import TASKS
from recipekit.tasks.find import load_task
from recipekit.tasks.image_classification import ImagePreprocessor

# Tokens
# --------------------------------------------------------------------------------------------------

SOURCE = {"ready": False, "local": True, "fingerprint": "a", "piece": 7, "times": 1, "size": 10}
ENCODER = {"identity": "b", "longest": 0, "vocabulary": 5, "date": "", "label_identity": {}}


def cache_of(
    folder: Path,
    source: dict[str, Any] | None = None,
    encoder: dict[str, Any] | None = None,
    sizes: Sizes | None = None,
) -> Path:
    own: Any = SimpleNamespace(**SOURCE | (source or {}))
    reads: Any = SimpleNamespace(**ENCODER | (encoder or {}))
    found = open_cache(own, reads, str(folder), sizes or Sizes())
    assert found is not None
    return found


def test_tokens_are_kept_by_all_that_they_follow_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cache_of(tmp_path)
    assert (
        cache_of(tmp_path)
        == first
        == cache_of(tmp_path, {"size": 11}, sizes=Sizes(read_rows=3, block_rows=7, long_text=9))
    )
    others = [
        cache_of(tmp_path, {name: value})
        for name, value in (("fingerprint", "c"), ("piece", 8), ("times", 2))
    ]
    others += [
        cache_of(tmp_path, encoder={name: value})
        for name, value in (
            ("identity", "c"),
            ("longest", 9),
            ("vocabulary", 6),
            ("date", "2026-01-01"),
            ("label_identity", {"classes": 2}),
        )
    ]
    others += [
        cache_of(tmp_path, sizes=Sizes(**{name: 99})) for name in ("chunk_rows", "chunk_characters")
    ]
    monkeypatch.setattr(chunks, "CHUNK_FORMAT", chunks.CHUNK_FORMAT + 1)
    others.append(cache_of(tmp_path))
    assert len({first, *others}) == 12
    assert all(path.parent == tmp_path for path in others)


def test_a_file_is_known_by_its_size_and_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte at both ends counts, even if the ends overlap. Bytes between them do not."""
    monkeypatch.setattr(digests, "HASHED_END_BYTES", 4)
    for size, counted in ((3, {0, 1, 2}), (6, set(range(6))), (11, {0, 1, 2, 3, 7, 8, 9, 10})):
        file = tmp_path / f"{size}.txt"
        content = bytes(range(65, 65 + size))
        file.write_bytes(content)
        before = digests.file_digests([file])
        seen = set()
        for place in range(size):
            file.write_bytes(content[:place] + b"!" + content[place + 1 :])
            if digests.file_digests([file]) != before:
                seen.add(place)
        assert seen == counted
        file.write_bytes(content[:1] + content)
        assert digests.file_digests([file]) != before and list(before) == [file.name]


def test_a_corpus_is_known_by_each_of_its_files_and_what_else_decides_it() -> None:
    first = digests.fingerprint({"a": "1", "b": "2"}, "x", "y")
    assert first == digests.fingerprint({"b": "2", "a": "1"}, "x", "y")
    others = [
        ({"a": "1"}, "x", "y"),
        ({"a": "1", "b": "3"}, "x", "y"),
        ({"a": "1", "c": "2"}, "x", "y"),
        ({"a": "2", "b": "1"}, "x", "y"),
    ]
    others += [
        ({"a": "1", "b": "2"}, "x"),
        ({"a": "1", "b": "2"}, "y", "x"),
        ({"a": "1", "b": "2"}, "x", "z"),
    ]
    assert len({first, *(digests.fingerprint(*other) for other in others)}) == 8


# References
# --------------------------------------------------------------------------------------------------

CONFIG = {"model_type": "llama", "hidden_size": 8}


def reference_file(
    folder: Path, adapter: dict[str, Any] | None = None, mark: str | None = "m", **changes: Any
) -> Path | None:
    recipe = {"adapt": None, "token_cache": str(folder), "seed": 1} | {
        name: value for name, value in changes.items() if name in ("adapt", "token_cache", "seed")
    }
    model = (
        SimpleNamespace()
        if adapter is None
        else SimpleNamespace(peft_config={"default": SimpleNamespace(to_dict=lambda: adapter)})
    )
    weights = None if mark is None else SimpleNamespace(fingerprint=lambda: mark)
    loaded: Any = SimpleNamespace(
        plan=SimpleNamespace(
            recipe=SimpleNamespace(**recipe), precision=changes.get("precision", "bf16")
        ),
        built=SimpleNamespace(model=model, weights=weights),
        model_config=changes.get("model_config", CONFIG),
    )
    return reference_logprobs.reference_file_of(loaded)


def test_reference_numbers_are_kept_by_all_that_they_follow_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def file(**changes: Any) -> Path:
        found = reference_file(tmp_path, **changes)
        assert found is not None
        return found

    lora = {"r": 4, "lora_alpha": 8, "target_modules": {"b", "a", "c"}}
    first = file()
    assert first == file(seed=2) == file(model_config=dict(reversed(CONFIG.items()))), (
        "published weights are drawn by no seed"
    )
    assert file(adapter=lora) == file(adapter=lora | {"target_modules": {"c", "a", "b"}})
    different = [
        first,
        file(precision="fp32"),
        file(model_config=CONFIG | {"hidden_size": 16}),
        file(mark="n"),
        file(adapter=lora),
    ]
    different += [
        file(adapter=lora | {"lora_alpha": 16}),
        file(adapter=lora, seed=2),
        file(mark=None),
        file(mark=None, seed=2),
    ]
    monkeypatch.setattr(
        reference_logprobs, "REFERENCE_FORMAT", reference_logprobs.REFERENCE_FORMAT + 1
    )
    different.append(file())
    assert len(set(different)) == 10 and all(
        path.parent == tmp_path / "references" for path in different
    )
    assert reference_file(tmp_path, token_cache="off") is None
    assert reference_file(tmp_path, adapt=lambda model: model) is None, (
        "what it has done to the weights is not known"
    )
    assert reference_file(tmp_path, adapt=lambda model: model, adapter=lora) == file(adapter=lora)


def covered(
    monkeypatch: pytest.MonkeyPatch, step: int = 0, steps: int = 10, **changes: Any
) -> tuple[str, int, int]:
    """Return (identity, first step, last step) that a start checks for stored references."""
    given = {
        "identity": {"seed": 1},
        "template": None,
        "encoder": "tokens",
        "ramp": "",
        "leave_out": "",
        "day": "2026-03-04",
    } | changes
    asked: list[tuple[str, int, int]] = []
    stream = SimpleNamespace(
        state={"identity": given["identity"], "step": step}, close=lambda: None
    )
    for name, value in {
        "reference_file_of": lambda loaded: None,
        "broadcast_references": lambda kept: None,
        "open_data": lambda *rest: stream,
        "check_same_data": lambda stream: None,
        "open_held_out": lambda *rest: [],
        "hash_tokenizer": lambda tokenizer, task: (
            given["encoder"] + tokenizer_identity.hash_tokenizer(tokenizer, task)
        ),
    }.items():
        monkeypatch.setattr(reference_logprobs, name, value)
    monkeypatch.setattr(
        reference_logprobs.ReferenceFile, "covers", lambda kept, *what: asked.append(what) or True
    )
    monkeypatch.setattr(
        reference_logprobs.ReferencePass, "share_logprobs", lambda reader, where: None
    )
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = given["template"]
    recipe = SimpleNamespace(
        steps=steps, task="preference", batch_ramp=given["ramp"], leave_out=given["leave_out"]
    )
    loaded: Any = SimpleNamespace(
        plan=SimpleNamespace(recipe=recipe, command=SimpleNamespace(rank=1), day=given["day"]),
        task=None,
        processor=SimpleNamespace(
            references=SimpleNamespace(complete=False), tokenizer=tokenizer, seq_len=64
        ),
        state={"step": step, "data": None},
        groups=SimpleNamespace(coords={"dp": 0}),
        opened=None,
    )
    reference_logprobs.run_reference_pass(loaded, None, lambda *rest: None, lambda said: None)
    assert loaded.processor.references.complete
    [found] = asked
    return found


def asked_in_steps(
    monkeypatch: pytest.MonkeyPatch, together: int, steps: int
) -> tuple[list[str], list[list[int]]]:
    """Return the actions of a start that must compute reference log-probabilities, step by step.

    Also return the ranges of steps that are recorded as computed.
    """
    done: list[str] = []
    monkeypatch.setattr(reference_logprobs, "SHARE_EVERY", together)
    batches = iter(range(100))

    class Source:
        def __init__(self) -> None:
            self.state = {"identity": {}, "step": 3}

        def __next__(self) -> Any:
            return f"batch {next(batches)}", None

        def error_ahead(self) -> None:
            return None

        def close(self) -> None:
            done.append("closed")

    for name, value in {
        "reference_file_of": lambda loaded: None,
        "broadcast_references": lambda kept: done.append("shared"),
        "open_data": lambda *rest: Source(),
        "check_same_data": lambda stream: None,
        "open_held_out": lambda *rest: ["held out"],
    }.items():
        monkeypatch.setattr(reference_logprobs, name, value)
    kept: list[Any] = []
    monkeypatch.setattr(
        reference_logprobs.ReferencePass,
        "process_step",
        lambda reader, batches, error=None: done.append(str(batches)),
    )
    monkeypatch.setattr(
        reference_logprobs.ReferencePass, "share_logprobs", lambda reader, where: done.append(where)
    )
    monkeypatch.setattr(
        reference_logprobs.ReferenceFile, "write", lambda own: kept.append([*own.covered.values()])
    )
    loaded: Any = SimpleNamespace(
        plan=SimpleNamespace(
            recipe=SimpleNamespace(steps=steps + 3, task="preference", batch_ramp="", leave_out=""),
            command=SimpleNamespace(rank=0),
            day="2026-03-04",
        ),
        task=None,
        processor=SimpleNamespace(
            references=SimpleNamespace(complete=False), tokenizer=byte_tokenizer(), seq_len=64
        ),
        state={"step": 3, "data": None},
        groups=SimpleNamespace(coords={"dp": 0}),
        opened=None,
    )
    reference_logprobs.run_reference_pass(loaded, None, lambda *rest: None, lambda said: None)
    [covers] = kept
    return done, covers


@pytest.mark.parametrize("together", [1, 2, 5, 32])
def test_every_step_is_asked_whatever_the_steps_between_two_exchanges(
    monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    done, covers = asked_in_steps(monkeypatch, together, 5)
    assert [what for what in done if what.startswith("batch")] == [
        f"batch {number}" for number in range(5)
    ]
    assert [what for what in done if " of 5 steps" in what] == [
        f"{step} of 5 steps" for step in range(1, 6) if step % together == 0
    ]
    assert (
        done[:2] == ["shared", "['held out']"]
        and done[-3:] == ["closed", "all rows", "shared"]
        and covers == [[3, 8]]
    )


def test_steps_count_as_asked_for_the_same_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps count as computed only for the same rows.

    The key contains the stream's identity, the tokenizer's output, its template, the ramp and the
    batches left out. The range begins at the step from which the stream continues.
    """
    first = covered(monkeypatch)
    assert first[1:] == (0, 10) and covered(monkeypatch) == first
    assert (
        covered(monkeypatch, step=4)[1:] == (4, 10) and covered(monkeypatch, step=4)[0] == first[0]
    )
    others = [
        {"identity": {"seed": 2}},
        {"template": "{{ messages }}"},
        {"encoder": "other tokens"},
        {"ramp": "11:16"},
        {"leave_out": "11:2"},
    ]
    assert len({first[0], *(covered(monkeypatch, **other)[0] for other in others)}) == 6


def test_references_of_another_day_count_only_if_the_template_writes_no_date(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    undated, dated = (
        [covered(monkeypatch, template=text, day=f"2026-03-0{day}") for day in (4, 5)]
        for text in ("{{ messages }}", "{{ strftime_now('%d') }}")
    )
    assert undated[0] == undated[1] and dated[0] != dated[1]


# Runs and streams
# -------------------------------------------------------------------------------------------------

OF_A_RUN = {  # field -> another value
    **dict.fromkeys(
        (
            "model",
            "dataset",
            "subset",
            "split",
            "text_field",
            "messages_field",
            "image_field",
            "label_field",
            "tokenizer",
        ),
        "other",
    ),
    "init": "random",
    "augment": "none",
    "num_labels": 7,
    "task": "sft",
    "seed": 8,
    "seq_len": 96,
    "global_batch": 48,
    "batch_ramp": "3:96",
    "leave_out": "3:5",
    "steps": 77,
    "lr": 0.5,
    "min_lr": 0.25,
    "lr_scale": {"*": 0.5},
    "layer_decay": 0.5,
    "warmup_steps": 3,
    "decay_steps": 5,
    "schedule": "linear",
    "weight_decay": 0.7,
    "beta1": 0.3,
    "beta2": 0.4,
    "eps": 0.1,
    "gradient_clipping": 9.0,
}


@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_run_is_another_one_by_each_field_that_changes_its_results(name: str) -> None:
    recipe = Recipe(model="a/b")
    assert getattr(recipe, name) != OF_A_RUN[name]
    assert run_folder.run_identity(recipe, {}) != run_folder.run_identity(
        dataclasses.replace(recipe, **{name: OF_A_RUN[name]}), {}
    )


def test_a_run_is_the_same_by_what_changes_no_result(tmp_path: Path) -> None:
    recipe = Recipe(model="a/b")
    for name, value in {
        "out": "x",
        "micro_batch": 3,
        "save_every": 9,
        "keep": 2,
        "eval_every": 4,
        "wandb": False,
        "token_cache": "off",
        "beta": 0.7,
    }.items():
        assert run_folder.run_identity(
            dataclasses.replace(recipe, **{name: value}), {}
        ) == run_folder.run_identity(recipe, {}), name
    for task, own in (
        ("preference", {"beta": 0.7}),
        ("masked_lm", {"mask_rate": 0.4}),
        ("masked_lm", {"whole_words": True}),
        ("reward", {"chosen_field": "x"}),
    ):
        of_task = dataclasses.replace(recipe, task=task)
        assert run_folder.run_identity(
            dataclasses.replace(of_task, **own), {}
        ) != run_folder.run_identity(of_task, {}), own
    with_norms = [
        run_folder.run_identity(dataclasses.replace(recipe, micro_batch=size), {}, True)
        for size in (2, 3)
    ]
    assert with_norms[0] != with_norms[1]
    folder = dataclasses.replace(recipe, model=str(tmp_path))
    assert (
        run_folder.run_identity(folder, {"a": 1, "b": 2})
        == run_folder.run_identity(folder, {"b": 2, "a": 1})
        != run_folder.run_identity(folder, {"a": 2, "b": 2})
    )


def identity_of(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> dict[str, Any]:
    """Return the identity of a request's stream without opening the corpus."""
    source = SimpleNamespace(fingerprint=fields.pop("fingerprint", "f"), files={}, local=False)
    monkeypatch.setattr(stream_module, "open_source", lambda *rest: source)
    processor = fields.pop("processor", None)
    request = Request(**{"dataset": "nobody/nothing", "task": "pretrain", "seq_len": 64} | fields)
    if samples := load_task(request.task).samples:
        corpus = samples_module.open_rows(request, samples, processor or PROCESSORS[request.task])
    else:
        tokenizer = byte_tokenizer()
        corpus = stream_module.open_corpus(request, tokenizer)
    return corpus.identity


def pictures(**changes: Any) -> ImagePreprocessor:
    own = {
        "size": (8, 8),
        "channels": 1,
        "mean": (0.5,),
        "std": (0.5,),
        "resample": Image.Resampling.BILINEAR,
    }
    return ImagePreprocessor(**own | {"num_labels": 2, "augment": True, "pool": None} | changes)  # type: ignore[arg-type]


def other_pairs() -> PairProcessor:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|note|>"])
    return PairProcessor(tokenizer, 64, False)


PAIRS = PairProcessor(byte_tokenizer(), 64, False)
PROCESSORS = {"image_classification": pictures(), "preference": PAIRS, "reward": PAIRS}
STREAMS = [
    (
        "pretrain",
        {
            "seq_len": 96,
            "seed": 8,
            "global_batch": 48,
            "fingerprint": "g",
            "dataset": "x=a@1; y=b@2",
        },
    ),
    ("sft", {"seq_len": 96}),
    ("masked_lm", {"mask_rate": 0.4, "whole_words": True}),
    (
        "image_classification",
        {"augment": "none", "seed": 8, "global_batch": 48, "fingerprint": "g"},
    ),
    *(
        ("image_classification", {"processor": pictures(**{name: value})})
        for name, value in (("size", (8, 9)), ("mean", (0.4,)), ("std", (0.4,)))
    ),
    *(
        ("image_classification", {"processor": pictures(**{name: value})})
        for name, value in (("channels", 3), ("resample", Image.Resampling.NEAREST))
    ),
    ("preference", {"seq_len": 96, "processor": other_pairs()}),
    ("reward", {"seq_len": 96, "processor": other_pairs()}),
]


@pytest.mark.parametrize(
    ("task", "changes"), STREAMS, ids=[f"{task}-{'-'.join(changes)}" for task, changes in STREAMS]
)
def test_a_stream_is_another_one_by_each_number_that_its_rows_depend_on(
    monkeypatch: pytest.MonkeyPatch, task: str, changes: dict[str, Any]
) -> None:
    if task == "masked_lm":
        monkeypatch.setattr(stream_module, "check_tokenizer", lambda *rest: None)
        monkeypatch.setattr(stream_module, "check_edges", lambda *rest: None)
        monkeypatch.setattr(stream_module, "edges", lambda *rest: ([1], [2]))
        monkeypatch.setattr(
            stream_module,
            "Encoder",
            lambda *rest: SimpleNamespace(identity="e", date="", vocabulary=9, label_identity={}),
        )
    first, sizes = identity_of(monkeypatch, task=task), Sizes()
    assert first == identity_of(monkeypatch, task=task) and first["task"] == task
    assert first == identity_of(
        monkeypatch,
        task=task,
        micro_batch=5,
        token_cache="off",
        bad_rows="skip",
        threads=3,
        retry_s=1.0,
    )
    for name, value in changes.items():
        assert identity_of(monkeypatch, task=task, **{name: value}) != first, name
    counted = (
        ("block_samples", "block_bytes", "chunk_rows")
        if TASKS[task].rows == "samples"
        else ("chunk_rows", "chunk_characters", "part_bytes")
    )
    for name in counted:
        assert (
            identity_of(
                monkeypatch,
                task=task,
                sizes=dataclasses.replace(sizes, **{name: 1 + getattr(sizes, name)}),
            )
            != first
        ), name
    assert json.loads(json.dumps(first)) == first


def test_ramps_and_batches_left_out_are_part_of_a_stream_from_their_step_on() -> None:
    from recipekit.data.stream_state import identity_at_step

    changes = ramp_of(8, "11:16,31:40"), leave_out_of("")
    assert [identity_at_step({"a": 1}, *changes, step) == {"a": 1} for step in (0, 10, 11)] == [
        True,
        True,
        False,
    ]
    assert identity_at_step({"a": 1}, *changes, 30) != identity_at_step({"a": 1}, *changes, 31)
    left_out = ramp_of(8, ""), leave_out_of("11:2, 31:4, 31:5")
    assert identity_at_step({"a": 1}, *left_out, 10) == {"a": 1}
    assert identity_at_step({"a": 1}, *left_out, 11) == {"a": 1, "leave_out": [[11, 2]]}
    assert identity_at_step({}, *left_out, 31) == {"leave_out": [[11, 2], [31, 4], [31, 5]]}


# Random numbers
# --------------------------------------------------------------------------------------------------


def test_an_order_depends_on_each_part_of_its_key() -> None:
    first = permutation(50, 3, 1, 7).tolist()
    assert sorted(first) == list(range(50)) == sorted(permutation(50, 3, 1, 8).tolist())
    keys = [
        (3, 1, 7),
        (4, 1, 7),
        (3, 2, 7),
        (3, 1, 8),
        (3, 1),
        (1, 3, 7),
        (3, 7, 1),
        ("rows", 3, 1, 7),
    ]
    assert len({tuple(permutation(50, *key).tolist()) for key in keys}) == len(keys)
    drawn = keyed_hashes(np.arange(5), "hidden", 3, 1)
    assert (drawn != keyed_hashes(np.arange(5), "how", 3, 1)).all() and (
        drawn != keyed_hashes(np.arange(1, 6), "hidden", 3, 1)
    ).all()


def test_what_is_hidden_depends_on_each_part_of_the_key() -> None:
    special = np.zeros(300, bool)
    special[:5] = True
    masks, ids = TokenMasker(0.5, 4, special, None), np.arange(10, 210, dtype=np.int32)
    keys = [(3, 0, 1), (4, 0, 1), (3, 1, 1), (3, 0, 2)]
    assert (
        len({masks(ids, *key)[1].tobytes() for key in keys})
        == len({masks(ids, *key)[0].tobytes() for key in keys})
        == 4
    )
    one, other = (replaced(masks, ids, key) for key in keys[:2])
    both = one.keys() & other.keys()
    assert any(one[place] != other[place] for place in both), (
        "what stands for a hidden token is drawn by the key, too"
    )


def replaced(masks: TokenMasker, ids: np.ndarray, key: tuple[int, ...]) -> dict[int, int]:
    seen, labels = masks(ids, *key)
    return {place: int(seen[place]) for place in np.flatnonzero(labels >= 0).tolist()}


def test_a_samples_key_depends_on_the_place_of_its_block() -> None:
    held = [(SimpleNamespace(samples=[(number, "") for number in range(9)]), 2, 8)]
    blocks = [
        samples_module._shuffle_samples(held, *key)
        for key in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1))
    ]
    assert all(
        sorted(number for number, _ in block.samples) == [2, 3, 4, 5, 6, 7] for block in blocks
    )
    keys = [
        dict(zip((number for number, _ in block.samples), block.keys, strict=True))
        for block in blocks
    ]
    assert len({key for own in keys for key in own.values()}) == 4 * 6
    assert all(own[number + 1] - own[number] == 1 for own in keys for number in range(2, 7)), (
        "whatever the order"
    )


# Compiled ops and directory listings
# --------------------------------------------------------------------------------------------------


def test_ops_are_kept_by_instructions_libc_python_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kind(flags: str) -> str:
        (tmp_path / "cpuinfo").write_text(f"model name: x\nflags\t\t: {flags}\n")
        return op_cache.host_kind.__wrapped__(tmp_path / "cpuinfo")

    first = kind("sse avx")
    assert first == kind("avx sse")
    others = [kind("sse avx avx512")]
    for name, value in (("machine", lambda: "other"),):
        with monkeypatch.context() as changed:
            changed.setattr(op_cache.platform, name, value)
            others.append(kind("sse avx"))
    for changes in ({"torch": "9"}, {"deepspeed": "9"}):
        with monkeypatch.context() as changed:
            changed.setattr(
                op_cache, "version", lambda package, changes=changes: changes.get(package, "1")
            )
            others.append(kind("sse avx"))
    with monkeypatch.context() as changed:
        changed.setattr(op_cache.os, "confstr", lambda name: "glibc 9.9")
        others.append(kind("sse avx"))
    with monkeypatch.context() as changed:
        changed.setattr(op_cache.sys, "version_info", SimpleNamespace(major=9, minor=9))
        others.append(kind("sse avx"))
    assert len({first, *others}) == 7


def test_a_look_is_kept_by_the_config_and_every_word() -> None:
    seen: list[Any] = []
    look = once_per_config(lambda config, *words: seen.append((config, words)) or len(seen))
    found = [
        look({"a": 1, "b": 2}, "x", "y"),
        look({"b": 2, "a": 1}, "x", "y"),
        look({"a": 2, "b": 2}, "x", "y"),
        look({"a": 1, "b": 2}, "x"),
    ]
    found += [
        look({"a": 1, "b": 2}, "x", "z"),
        look({"a": 1, "b": 2}, "y", "y"),
        look({"a": 1, "b": 2}, "x", "y"),
    ]
    assert found == [1, 1, 2, 3, 4, 5, 1]


def test_a_look_that_fails_is_not_kept() -> None:
    seen: list[int] = []

    @once_per_config
    def look(config: dict[str, Any]) -> int:
        seen.append(1)
        if len(seen) == 1:
            raise ValueError("the first time")
        return len(seen)

    with contextlib.suppress(ValueError):
        look({})
    assert look({}) == 2 == look({})


# Ranges of a remote file
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [1, 3, 7, 1 << 20])
def test_a_remote_file_is_the_same_in_any_pieces(
    monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """The file is read line by line, from the middle, from the end, and past the end."""
    content = b"first line\nsecond\n\nthe fourth, which is longer than others\nlast"
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(remote, "READ_AHEAD", ahead)
    monkeypatch.setattr(
        remote,
        "fetch_range",
        lambda file, start, stop: ranges.append((start, stop)) or content[start:stop],
    )
    patience: Any = lambda where, attempt: attempt()  # noqa: E731
    file = remote.RemoteFile("https://user:secret@host/folder/a.txt?token=x", len(content), "v")
    assert list(file.open(patience)) == content.splitlines(keepends=True)
    assert all(0 <= start < stop <= len(content) for start, stop in ranges)
    opened = file.open(patience)
    assert (
        opened.seek(20) == 20
        and opened.read(9) == content[20:29]
        and opened.seek(2, 1) == 31
        and opened.read(3) == content[31:34]
    )
    assert (
        opened.seek(-4, 2) == len(content) - 4
        and opened.read() == b"last"
        and opened.read(5) == b""
    )
    assert (file.name, str(file)) == ("a.txt", "https://host/folder/a.txt")
