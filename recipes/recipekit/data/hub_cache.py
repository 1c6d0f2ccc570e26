"""Hub data sets that are read from the local cache if the hub is unreachable."""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
from datasets import config as datasets_config
from datasets.packaged_modules.parquet.parquet import Parquet

from ..spec.errors import ConfigError, config_error
from ..spec.hub import DATASETS, hub_is_unreachable, not_cached, snapshot_of
from .formats import parquet_source, streamed_source
from .mixture import Domain
from .remote import RetryPolicy
from .source import ColumnSelection, Source

SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\..*)")  # file name of a split, by `datasets`


def cached_commit(dataset: str, revision: str) -> str:
    """Return the commit to read from the cache.

    Return "" if the hub is reachable or if the cache has no commit.
    """
    if not (datasets_config.HF_HUB_OFFLINE or hub_is_unreachable()):
        return ""
    snapshot = snapshot_of(dataset, revision, DATASETS)
    return snapshot.name if snapshot else ""


def cached_source(
    domain: Domain,
    commit: str,
    split: str,
    wanted: ColumnSelection,
    mark: str,
    patience: RetryPolicy,
) -> Source:
    """Open a split from a data set's cached files.

    `mark` is the fingerprint, which is the same as for the files on the hub. Raise `ConfigError` if
    files are missing on this host, or if `datasets` cannot read them.
    """
    where, snapshot = f"--dataset {domain.dataset}", snapshot_of(domain.dataset, commit, DATASETS)
    if snapshot is None:
        raise config_error(
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
        if isinstance(error, ConfigError):
            raise
        rule = (
            f"its cached commit {commit} cannot be read:"
            f" {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )
        fix = (
            "download all files on a machine with network access: hf download --repo-type dataset"
            f" {domain.dataset} --revision {commit}"
        )
        raise config_error(where, rule, fix) from error
    names = tuple(
        f"{domain.dataset}, shard {number} of {dataset.num_shards}"
        for number in range(dataset.num_shards)
    )
    return streamed_source(dataset, names, wanted, mark, patience)


def check_shards(where: str, files: Iterable[str], dataset: str, commit: str) -> None:
    """Raise `ConfigError` if the names of a split's files show that some files are not cached."""
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
            raise config_error(where, rule, fix)


def hub_commits(corpus: dict[str, str]) -> dict[str, str]:
    """Return {name: commit} of the hub data sets.

    `corpus` contains the fingerprints of a stream's corpora.
    """
    found = (
        re.match(r"(?P<name>[^@\s]+?)/[^/@]*/[^/@]*@(?P<commit>[0-9a-f]{40}) ", mark)
        for mark in corpus.values()
    )
    return {commit["name"]: commit["commit"] for commit in found if commit}
