"""The hub repositories of a recipe: their revisions, and the local copies that are used offline."""

import os
from collections.abc import Mapping
from pathlib import Path

from ..architectures.lookup import is_config_only, is_local
from ..spec.errors import ConfigError, Problem
from ..spec.hub import cache_folder, is_hub_id, is_offline, not_cached
from ..spec.recipe import REPOSITORY_FIELDS
from .files import local_files
from .mixture import domains_of


def check_revisions(
    model: str, model_revision: str, dataset: str, dataset_revision: str, split: str, subset: str
) -> list[Problem]:
    """Return problems for revisions that cannot be applied.

    A revision requires a hub repository, and a revision cannot apply to several data sets.
    """
    problems: list[Problem] = []
    if (revision := model_revision) and (Path(model).is_dir() or not is_hub_id(model)):
        rule = f"model = {model} is a folder, and a folder has no revisions"
        problems.append(
            Problem(f"--model_revision {revision}", rule, "omit it, or give a hub id (ORG/NAME)")
        )
    if not (revision := dataset_revision):
        return problems
    try:
        asked = {
            domain.dataset
            for domain in domains_of(dataset)
            if domain.dataset != "builtin" and "://" not in domain.dataset
        }
        names = sorted(
            name for name in asked if local_files(name, split=split, subset=subset) is None
        )
    except ConfigError:  # reported with the data set
        return problems
    if not names:
        rule = (
            f"--dataset {dataset} is not a data set of the hub, and only hub data sets have"
            " revisions"
        )
        problems.append(
            Problem(f"--dataset_revision {revision}", rule, "omit it, or give a hub id (ORG/NAME)")
        )
    if len(names) > 1:
        rule = (
            f"--dataset names {len(names)} data sets of the hub ({', '.join(names)}), but a"
            " revision applies to one"
        )
        problems.append(
            Problem(
                f"--dataset_revision {revision}",
                rule,
                "omit it, or download the others and give their folders",
            )
        )
    return problems


def say_unused(dataset: str, unused: Mapping[str, str]) -> list[str]:
    """Return lines about settings in the recipe's file that do not apply.

    These settings belong to a different data set or model than the one on the command line.
    """
    defaults = {"split": "split train", "subset": "no subset"} | dict.fromkeys(
        ("dataset_revision", "model_revision"), "branch main"
    )
    lines = []
    for field, names in REPOSITORY_FIELDS.items():
        left = {name: unused[name] for name in names if name in unused}
        if left and not (field == "dataset" and dataset == "builtin"):
            listed = " and ".join(f"{name} {value}" for name, value in left.items())
            taken = " and ".join(defaults[name] for name in left)
            own = {"dataset": "data set"}.get(field, field)
            lines.append(
                f"--{field}: {taken}, since {listed} of the recipe's file"
                f" belong{'s' * (len(left) == 1)} to its own {own}"
            )
    return lines


def check_offline(model: str, revision: str, needed: bool) -> list[Problem]:
    """Return a problem if `needed` model files are missing while downloads are forbidden."""
    # such a model is rejected by the code that reads its config.json or its files
    no_name = not is_hub_id(model) or Path(model).exists() or is_config_only(model)
    if (
        not is_offline(os.environ)
        or not needed
        or not model
        or no_name
        or is_local(model, revision)
    ):
        return []
    at = f" at {revision}" if revision else ""
    rule = (
        f"the folder does not exist, the model is not in the cache {cache_folder()}{at}, and"
        " HF_HUB_OFFLINE prevents a download"
    )
    return [Problem(f"model = {model}", rule, f"check the path, or {not_cached(model, revision)}")]
