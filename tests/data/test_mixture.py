"""Mixtures: each domain's share, each row's domain, and invalid mixtures."""

import contextlib
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from recipekit.data.batching import DataRank
from recipekit.data.mixture import Domain, domains_of, furthest_behind
from recipekit.data.stream import open_stream
from recipekit.plan import resolve_run
from recipekit.spec.command import RunCommand
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from token_streams import (
    BYTES,
    PAD,
    SEQ_LEN,
    request_for,
    take,
)

pytestmark = pytest.mark.usefixtures("own_cache")


def test_shares_of_a_mixture_after_every_batch(corpora):
    """Each domain is within one row of its share, counted from the last change of weights."""
    request = request_for(corpora["mixture"], global_batch=7)
    shares = {1: (0.5, 0.3, 0.2), 20: (50 / 80, 10 / 80, 20 / 80)}
    counted = np.zeros(3)
    with contextlib.closing(open_stream(request, BYTES, rank=DataRank(1, 0))) as own:
        for step in range(1, 60):
            batches, state = next(own)
            if step == 20:
                counted[:] = 0
            for batch in batches:
                counted[int(batch["domain"])] += int((batch["input_ids"] != PAD).sum())
            share = np.array(shares[20 if step >= 20 else 1])
            assert (np.abs(counted - share * counted.sum()) <= SEQ_LEN).all(), step
            assert [domain["tokens"] for domain in state["domains"].values()] == counted.tolist()


def test_domain_of_every_row(corpora):
    """`domain` is the corpus of each row, for any number of ranks and any micro-batch.

    One corpus contains only upper-case letters, and the other only lower-case letters.
    """
    cases = [torch.tensor(BYTES(letters)["input_ids"]) for letters in ("abc", "ABC")]
    for dp, micro_batch in ((1, 1), (2, 3), (3, 2)):
        request = request_for(
            f"lower={corpora['lines']}@1; upper={corpora['other.jsonl']}@1", micro_batch=micro_batch
        )
        for rank in range(dp):
            with contextlib.closing(open_stream(request, BYTES, rank=DataRank(dp, rank))) as own:
                batches = [batch for _ in range(5) for batch in next(own)[0]]
            for batch in batches:
                for domain, letters in enumerate(cases):
                    assert (
                        batch["domain"][torch.isin(batch["input_ids"], letters).any(1)] == domain
                    ).all()
            assert torch.cat([batch["domain"] for batch in batches]).unique().tolist() == [0, 1]


def test_parts_of_a_mixture():
    assert domains_of("a=org/name:sub@1; b=x.jsonl@2|5:0.5", "other") == [
        Domain("a", "org/name", "sub", ((1, 1.0),)),
        Domain("b", "x.jsonl", "other", ((1, 2.0), (5, 0.5))),
    ]


def test_next_row_is_of_the_first_domain_furthest_behind():
    assert [
        furthest_behind(tokens, [1, 1, 0], 16)
        for tokens in ([0, 0, 0], [16, 0, 0], [16, 15, 0], [16, 16, 0])
    ] == [0, 1, 1, 0]
    dealt = [0, 0]
    order = [furthest_behind(dealt, [1, 3], 16)]
    while len(order) < 8:  # the total includes the next row, so the larger share is first
        dealt[order[-1]] += 16
        order.append(furthest_behind(dealt, [1, 3], 16))
    assert order == [1, 0, 1, 1, 1, 0, 1, 1]


def test_shares_after_a_resume_with_other_weights(corpora):
    """The new shares apply from the resume on. Earlier tokens are not compensated for."""
    request = request_for(
        f"small={corpora['lines']}@50; large={corpora['other.jsonl']}@50", global_batch=8
    )
    _, state = take(request, 50)
    counted = np.zeros(2)
    changed = dataclasses.replace(
        request, dataset=request.dataset.replace("@50", "@70", 1).replace("@50", "@30")
    )
    with contextlib.closing(open_stream(changed, BYTES, rank=DataRank(1, 0), state=state)) as own:
        for step in range(51, 60):
            for batch in next(own)[0]:
                counted[int(batch["domain"])] += int((batch["input_ids"] != PAD).sum())
            assert (np.abs(counted - np.array([0.7, 0.3]) * counted.sum()) <= SEQ_LEN).all(), (
                step,
                counted,
            )


@pytest.mark.parametrize(
    "dataset, says",
    [
        ("a=x.jsonl@5; b=y.jsonl", ["'b=y.jsonl'", "is not a valid part of a mixture"]),
        ("a=x.jsonl@five", ["is not a valid part of a mixture", "@five"]),
        ("a=x.jsonl@5|3:1|2:4; b=y.jsonl@1", ["'a=x.jsonl@5|3:1|2:4'", "70|1000:50"]),
        ("a=x.jsonl@5|3:1|3:4; b=y.jsonl@1", ["'a=x.jsonl@5|3:1|3:4'"]),
        ("a=x.jsonl@5; a=y.jsonl@1", ["a", "is the name of two corpora"]),
        ("a=x.jsonl@0; b=y.jsonl@0", ["all weights of the mixture are 0"]),
        ("a=x.jsonl@1|9:0; b=y.jsonl@0", ["from step 9 on", "all weights of the mixture are 0"]),
    ],
)
def test_wrong_mixture_is_refused(dataset, says):
    with pytest.raises(ConfigError) as refused:
        domains_of(dataset)
    assert all(part in str(refused.value) for part in says), str(refused.value)
    # The plan reports these errors together with all others, before a run starts.
    with pytest.raises(ConfigError) as planned:
        resolve_run(
            RunCommand(
                Recipe(model="x", dataset=dataset, tokenizer="bytes"), "name", Path(), frozenset()
            )
        )
    assert set(refused.value.problems) <= set(planned.value.problems)
