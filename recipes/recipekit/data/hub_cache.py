"""Data sets in the hub's cache, which are read from there if the hub cannot be reached."""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
from datasets import config as datasets_config
from datasets.packaged_modules.parquet.parquet import Parquet

from ..spec.hub import DATASETS, hub_is_away, not_cached, snapshot_of
from ..spec.refusal import Refusal, refuse
from .formats import parquet_source, streamed_source
from .mixture import Domain
from .remote import Patience
from .source import Source, Wanted

SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\..*)")  # how `datasets` names the files of a split


def cached_commit(dataset: str, revision: str) -> str:
    """Return the commit to read from the cache; "" if the hub can be reached or the cache has
    none.
    """
    if not (datasets_config.HF_HUB_OFFLINE or hub_is_away()):
        return ""
    snapshot = snapshot_of(dataset, revision, DATASETS)
    return snapshot.name if snapshot else ""


def cached_source(
    domain: Domain, commit: str, split: str, wanted: Wanted, mark: str, patience: Patience
) -> Source:
    """Open a split of a data set's cached files.

    `mark` is the fingerprint, the same as from the hub.

    Raises `Refusal` if this machine has not all files, or if `datasets` cannot read them.
    """
    where, snapshot = f"--dataset {domain.dataset}", snapshot_of(domain.dataset, commit, DATASETS)
    if snapshot is None:
        raise refuse(
            where,
            f"commit {commit} is not in the cache of this host",
            not_cached(domain.dataset, commit, DATASETS),
        )
    try:
        builder = datasets.load_dataset_builder(str(snapshot), domain.subset or None)
        files = [str(file) for file in (builder.config.data_files or {}).get(split, [])]
        check_shards(where, files, domain.dataset, commit)
        if isinstance(builder, Parquet) and files:
            names = tuple(str(Path(file).relative_to(snapshot)) for file in files)
            return parquet_source(names, files.__getitem__, wanted, mark, local=False)
        dataset: Any = builder.as_streaming_dataset(split=split)
    except (OSError, ValueError, RuntimeError) as error:
        # datasets 5.2 raises RuntimeError for a data set that has a script.
        if isinstance(error, Refusal):
            raise
        rule = (
            f"its cached commit {commit} cannot be read:"
            f" {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )
        fix = (
            "download all files on a machine with network access: hf download --repo-type dataset"
            f" {domain.dataset} --revision {commit}"
        )
        raise refuse(where, rule, fix) from error
    names = tuple(
        f"{domain.dataset}, shard {number} of {dataset.num_shards}"
        for number in range(dataset.num_shards)
    )
    return streamed_source(dataset, names, wanted, mark, patience)


def check_shards(where: str, files: Iterable[str], dataset: str, commit: str) -> None:
    """Raise `Refusal` if the names of a split's files show that the cache has only some of them."""
    found: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for file in files:
        if shard := SHARD.fullmatch(file):
            found[shard[1] + shard[4], shard[3]].add(int(shard[2]))
    for (name, count), numbers in found.items():
        if len(numbers) < int(count):
            rule = (
                f"the cache has {len(numbers)} of the {int(count)} files {Path(name).name} of"
                f" commit {commit}"
            )
            fix = (
                "download all files on a machine with network access: hf download --repo-type"
                f" dataset {dataset} --revision {commit}"
            )
            raise refuse(where, rule, fix)


def hub_commits(corpus: dict[str, str]) -> dict[str, str]:
    """Return the commit of each data set of the hub, by its name, from the fingerprints of a
    stream's corpora.
    """
    found = (
        re.match(r"(?P<name>[^@\s]+?)/[^/@]*/[^/@]*@(?P<commit>[0-9a-f]{40}) ", mark)
        for mark in corpus.values()
    )
    return {commit["name"]: commit["commit"] for commit in found if commit}
