"""Mixtures of several corpora with given shares of the tokens.

Each row is dealt from the corpus that is furthest below its share.
"""

import os
import re
from dataclasses import dataclass

from ..spec.errors import ConfigError, Problem
from ..spec.paths import path_exists

_DOMAIN = re.compile(r"\s*([A-Za-z][\w-]*)\s*=(.+)@([^@]+)", re.DOTALL)
_FORM = (
    'write "NAME=DATASET@WEIGHT; NAME=DATASET@WEIGHT", for example "code=src/*.py@70;'
    ' docs=docs@30". The weight 70|1000:50 is 70, and 50 from step 1000'
)


@dataclass(frozen=True)
class Domain:
    """One corpus of a mixture, or the only corpus (with the name "")."""

    name: str
    dataset: str
    subset: str = ""
    # (first step, weight), in ascending order of steps; the first step must be 1
    weights: tuple[tuple[int, float], ...] = ((1, 1.0),)

    def weight(self, step: int) -> float:
        return [weight for first, weight in self.weights if first <= step][-1]


def domains_of(dataset: str, subset: str = "") -> list[Domain]:
    """Return the corpora that the flag `--dataset` specifies.

    The entries of a mixture have the form NAME=DATASET@WEIGHT and are separated by `;`. In a
    mixture, a hub id or a folder may specify a subset: ORG/NAME:SUBSET. All other entries use
    `subset`. Raise `ConfigError` for a malformed mixture.
    """
    if ";" not in dataset and not _DOMAIN.fullmatch(dataset):
        if problem := _blank_entry(dataset):
            raise ConfigError([problem])
        return [Domain("", dataset, subset)]
    domains, problems = [], []
    for part in filter(str.strip, dataset.split(";")):
        found = _DOMAIN.fullmatch(part)
        weights = _parse_weights(found[3]) if found else None
        if found is None or weights is None:
            problems.append(
                Problem(f"--dataset: {part.strip()!r}", "is not a valid part of a mixture", _FORM)
            )
            continue
        corpus = found[2].strip()
        name, _, own = corpus.rpartition(":") if _has_subset(corpus) else (corpus, "", "")
        domains.append(Domain(found[1], name, own or subset, weights))
        problems += filter(None, [_blank_entry(name, found[1])])
    names = [domain.name for domain in domains]
    problems += [
        Problem(
            f"--dataset: {name}",
            "is the name of two corpora in the mixture",
            "give each corpus its own name",
        )
        for name in set(names)
        if names.count(name) > 1
    ]
    steps = {first for domain in domains for first, _ in domain.weights}
    for step in sorted(steps):
        if not problems and sum(domain.weight(step) for domain in domains) <= 0:
            problems.append(
                Problem(
                    f"--dataset, from step {step} on",
                    "all weights of the mixture are 0",
                    "give at least one corpus a positive weight",
                )
            )
    if problems:
        raise ConfigError(problems)
    return domains


def _blank_entry(dataset: str, domain: str = "") -> Problem | None:
    """Return a problem if a data set, or an entry in its list, is empty.

    An empty path would refer to the current folder.
    """
    entries = [dataset] if path_exists(dataset) else dataset.split(",")
    if all(map(str.strip, entries)):
        return None
    where = f"--dataset: {domain} = {dataset!r}" if domain else f"--dataset {dataset!r}"
    rule = (
        "must not be empty or blank"
        if len(entries) == 1
        else (
            f"entry {[bool(entry.strip()) for entry in entries].index(False) + 1} of the list is"
            " empty"
        )
    )
    return Problem(
        where, rule, "name a file, a folder or ORG/NAME. Check the variables of your shell"
    )


def _has_subset(corpus: str) -> bool:
    """Return True for a hub id or an existing folder that is followed by a colon and a subset."""
    folder = os.path.expanduser(corpus.rpartition(":")[0])
    is_folder = ":" in corpus[1:] and os.path.isdir(folder) and not path_exists(corpus)
    return is_folder or re.fullmatch(r"[\w.-]+/[\w.-]+:[\w.-]+", corpus) is not None


def _parse_weights(text: str) -> tuple[tuple[int, float], ...] | None:
    """Parse `70|1000:50` as ((1, 70.0), (1000, 50.0)); return None if it is malformed."""
    found = [(1, text.split("|")[0])]
    for change in text.split("|")[1:]:
        step, colon, weight = change.partition(":")
        if not colon or not step.strip().isdecimal() or int(step) <= found[-1][0]:
            return None
        found.append((int(step), weight))
    if not all(re.fullmatch(r"\s*\d+(\.\d*)?\s*", weight) for _, weight in found):
        return None
    return tuple((step, float(weight)) for step, weight in found)


def furthest_behind(tokens: list[int], weights: list[float], row: int) -> int:
    """Return the domain that is furthest below its share after a row of `row` tokens is dealt.

    In case of a tie, return the first domain. Megatron-LM's blended data sets use the same rule: a
    greedy choice of the largest error. With this rule, every domain stays within about one row of
    its share.
    """
    total, of_all = sum(tokens) + row, sum(weights)
    behind = [
        weight / of_all * total - have if weight else float("-inf")
        for have, weight in zip(tokens, weights, strict=True)
    ]
    return behind.index(max(behind))
