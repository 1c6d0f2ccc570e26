"""The repositories of the hub that a recipe names: their revisions, and whether they are here if
there is no network.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from ..architectures.lookup import is_local, is_ours
from ..spec.hub import cache_folder, is_hub_id, is_offline, not_cached
from ..spec.recipe import OWN
from ..spec.refusal import Problem, Refusal
from .files import local_files
from .mixture import domains_of


def check_revisions(
    model: str, model_revision: str, dataset: str, dataset_revision: str, split: str, subset: str
) -> list[Problem]:
    """Refuse a revision of anything but a repository of the hub, and one revision for several data
    sets.
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
    except Refusal:  # it is reported with the data set
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
    """Return lines about values of the recipe's file that do not apply to the data set or model
    that was typed.
    """
    defaults = {"split": "split train", "subset": "no subset"} | dict.fromkeys(
        ("dataset_revision", "model_revision"), "branch main"
    )
    lines = []
    for field, names in OWN.items():
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
    """Refuse a model whose files are `needed`, if they are not here and the user forbids to
    download them.
    """
    # refused where its config.json is read, or its files
    no_name = not is_hub_id(model) or Path(model).exists() or is_ours(model)
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
