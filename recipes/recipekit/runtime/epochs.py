"""Epochs of a run: local data are counted before step 1, and streams are measured during their
first pass.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..data.files import local_files
from ..data.kinds import kind_of
from ..data.mixture import Domain, domains_of
from ..data.passes import Epoch, Outline, epochs_of, epochs_of_mixture, outlines_of, steps_of
from ..data.processors import tokenizer_here
from ..data.request import Request
from ..data.sameness import OtherData, StreamState
from ..data.samples import open_rows
from ..data.stream import Corpus, open_corpus
from ..parallel.groups import waiting_group
from ..plan import Plan, make_plan
from ..spec.phases import Ramp
from ..spec.refusal import Problem, Refusal, Say
from ..spec.task import Task
from ..spec.task_specs import PACKED
from ..storage.manifest import STATE
from ..tasks.find import task_called
from .agree import shared_problems
from .corpus import request_of_plan

MOST_BYTES = 64 << 20  # of local data that are counted though nobody asked for epochs
FEW_STEPS = 10  # in an epoch
MOST_BYTES_DRY = 8 << 20  # in a dry run


@dataclass(frozen=True)
class Count:
    """What rank 0 has counted, for all ranks.

    `epochs` are those of the whole run: (number, exact or not) of each corpus.
    """

    of: dict[str, Epoch] = field(default_factory=dict)
    epochs: dict[str, tuple[float, bool]] = field(default_factory=dict)
    steps: int = 0  # of --epochs
    more: int = 0  # rows of the last step that are of the next epoch
    problems: list[Problem] = field(default_factory=list)  # why the data cannot be counted


class Epochs:
    """The epochs of a run's corpora, as far as they are known.

    `tokens`: corpus -> tokens (or samples) of an epoch.
    """

    def __init__(self, plan: Plan, tokens: Mapping[str, int]):
        self.plan, self.tokens, self.said = plan, tokens, set(tokens)

    def complete(self, state: StreamState) -> dict[str, float]:
        """Return the metrics of a step: the epochs that are complete after it; {} while they are
        not known.

        For a mixture `epoch` is the smallest number of its corpora.
        """
        found, unknown = dict[str, float](), False
        for name, domain in state["domains"].items():
            total = self.tokens.get(name, 0) or domain.get("epoch", {}).get("tokens", 0)
            given = domain["given"]["tokens"] if "given" in domain else domain["tokens"]
            value, begun = given / total if total else -1.0, domain["place"].get("epoch", 0)
            # not of a stream that was begun by a version without a count
            if begun <= value <= begun + 2:
                found[name] = value
            else:
                unknown |= domain["weight"] > 0
        lowest = {} if unknown or not found else {"epoch": min(found.values())}
        return lowest | (
            {f"epoch/{name}": value for name, value in found.items()}
            if len(state["domains"]) > 1
            else {}
        )

    def report(self, state: StreamState, say: Say) -> None:
        """Say what the first epoch of a stream had, once it is complete."""
        recipe = self.plan.recipe
        for name, domain in state["domains"].items():
            if name in self.said or "epoch" not in domain:
                continue
            self.said.add(name)
            given = domain["epoch"]
            epoch = Epoch(
                given["documents"],
                given["tokens"],
                given["rows"],
                given.get("empty", 0),
                given.get("bad", 0),
            )
            whole = (
                {}
                if len(state["domains"]) > 1
                else {name: (recipe.ramp.total(recipe.steps) / given["rows"], False)}
            )
            say(f"{line_of(self.plan, name, epoch, whole)}, counted in its first epoch")


def measured(
    plan: Plan, task: Task, processor: Any, source: Path | None, say: Say
) -> tuple[Plan, Epochs]:
    """Count the local data of a run, and turn epochs into steps (a collective).

    `source`: the step folder to resume from.

    Raises `Refusal`, on all ranks, if the recipe has epochs and the data cannot be counted, or its
    steps do not fit.
    """
    wanted = counted_names(plan, 0 if plan.recipe.epochs else MOST_BYTES)
    if not wanted:
        return plan, Epochs(plan, {})
    corpus, refusal = None, None
    try:
        corpus = open_again(
            request_of_plan(plan), task, processor, source, plan.recipe.resume == "auto", say
        )
    except Refusal as error:
        refusal = error
    if problems := shared_problems(refusal):
        raise Refusal(problems)
    found = [count(plan, corpus, wanted, say) if corpus and plan.command.rank == 0 else Count()]
    dist.barrier(waiting_group())  # a large corpus takes longer than a collective may
    dist.broadcast_object_list(found)
    plan = with_count(plan, found[0], say)
    for line in lines_of(plan, found[0]):
        say(line)
    return plan, Epochs(plan, {name: epoch.tokens for name, epoch in found[0].of.items()})


def counted(plan: Plan) -> Plan:
    """Return the plan of a dry run with lines about its local data, if these are few and their
    tokenizer is on this machine.

    Tokens are not kept: a dry run changes nothing. Raises `Refusal` as a start would.
    """
    recipe, lines = plan.recipe, list[str]()
    wanted = counted_names(plan, MOST_BYTES_DRY)
    if not wanted:
        return plan
    reads_text = "tokenizer" in recipe.facts.reads
    tokenizer = (
        tokenizer_here(recipe.model, recipe.tokenizer, recipe.model_revision)
        if reads_text
        else recipe.tokenizer
    )
    if plan.model_config is None or tokenizer is None:
        return replace(
            plan,
            notes=(
                *plan.notes,
                "data: not counted, because the model's tokenizer is not on this machine",
            ),
        )
    task, request = (
        task_called(recipe.task),
        replace(request_of_plan(plan), token_cache="off", tokenizer=tokenizer),
    )
    corpus = open_again(
        request, task, task.processor(request, plan.model_config), None, True, lines.append
    )
    found = count(plan, corpus, wanted, lines.append)
    plan = with_count(plan, found, lines.append)
    return replace(plan, notes=(*plan.notes, *lines, *lines_of(plan, found)))


def counted_names(plan: Plan, most_bytes: int) -> set[str]:
    """Return the names of the corpora to count: local ones of at most `most_bytes`; 0: of any size,
    and the built-in text.
    """
    recipe = plan.recipe
    found, pictures = set[str](), "image_field" in recipe.facts.columns
    for domain in domains_of(recipe.dataset, recipe.subset):
        if domain.dataset == "builtin":
            found |= set() if most_bytes else {domain.name}
        elif (
            files := local_files(domain.dataset, pictures, recipe.split, domain.subset)
        ) is not None:
            # of which only the names are read
            are_named = kind_of(files, domain.dataset) == "pictures"
            size = 0 if are_named else sum(file.stat().st_size for file in files)
            found |= {domain.name} if not most_bytes or size <= most_bytes else set()
    return found


def open_again(
    request: Request, task: Task, processor: Any, source: Path | None, same: bool, say: Say
) -> Corpus:
    """Open the corpora as the stream of the run does, with the state of a checkpoint if it is of
    these data.
    """
    state: StreamState | None = json.loads((source / STATE).read_text())["data"] if source else None

    def opened(state: StreamState | None) -> Corpus:
        if task.samples:
            return open_rows(request, task.samples, processor, say, state)
        return open_corpus(request, processor, say, state)

    corpus = opened(state)
    try:
        corpus.check(state)
    except OtherData:
        # `open_data` refuses it, or reads the data from the beginning
        return corpus if same else opened(None)
    return corpus


def count(plan: Plan, corpus: Corpus, wanted: set[str], say: Say) -> Count:
    """Count the corpora of these names, on one rank."""
    try:
        outlines = outlines_of(corpus, wanted, say)
    except Refusal as refusal:
        return Count(problems=refusal.problems)
    # without a row the stream refuses them
    outlines = {name: of for name, of in outlines.items() if of.counted.rows}
    recipe, ramp = plan.recipe, plan.recipe.ramp
    found = Count({name: of.counted for name, of in outlines.items()})
    if recipe.epochs and outlines:
        (of,) = outlines.values()
        steps, more = steps_of(of, recipe.epochs, ramp, say)
        return replace(found, steps=steps, more=more)
    return replace(found, epochs=epochs_of_run(corpus.domains, outlines, ramp, recipe.steps))


def epochs_of_run(
    domains: list[Domain], outlines: dict[str, Outline], ramp: Ramp, steps: int
) -> dict[str, tuple[float, bool]]:
    """Return the epochs of each corpus that `steps` complete, and True if that is exact; {} if a
    corpus of a mixture is not counted.
    """
    if len(domains) == 1:
        return {name: epochs_of(of, ramp.total(steps)) for name, of in outlines.items()}
    if len(outlines) < len(domains):
        return {}
    numbers, exact = epochs_of_mixture(
        domains, [outlines[domain.name] for domain in domains], ramp, steps
    )
    return {domain.name: (number, exact) for domain, number in zip(domains, numbers, strict=True)}


def with_count(plan: Plan, found: Count, say: Say) -> Plan:
    """Return the plan with the steps that its epochs take: warm-up, decay and ramp are fitted as if
    --steps were typed.
    """
    recipe = plan.recipe
    if not recipe.epochs:
        return plan
    if not found.steps:
        unknown = Problem(
            f"epochs = {recipe.epochs:g}",
            "the data contain no rows to train on",
            "set --dataset to other data",
        )
        raise Refusal(found.problems or [unknown])
    made = make_plan(dataclasses.replace(plan.command, counted=found.steps))
    for note in made.notes:
        if note not in plan.notes:
            say(note)
    return replace(plan, recipe=replace(made.recipe, wandb=recipe.wandb), ds_config=made.ds_config)


def lines_of(plan: Plan, found: Count) -> list[str]:
    """Return the lines of the start about the epochs of a run."""
    lines = [line_of(plan, name, epoch, found.epochs) for name, epoch in found.of.items()]
    if plan.recipe.epochs:
        filled = (
            f". The last step takes {found.more:,} of its rows from the next epoch"
            if found.more
            else ""
        )
        lines.append(f"epochs: {plan.recipe.epochs:g} = {found.steps:,} steps{filled}")
    lines += few_steps(plan, found.of)
    lines += [
        f"data: not counted, because the run will stop at this problem: {problem}"
        for problem in found.problems
    ]
    return lines


def few_steps(plan: Plan, of: Mapping[str, Epoch]) -> list[str]:
    """Return a line if a run on little data makes few optimizer steps in an epoch: a step averages
    most of the data, and the model hardly moves.
    """
    recipe, packed = plan.recipe, plan.recipe.facts.rows == PACKED
    rows, documents, tokens = (
        sum(getattr(epoch, name) for epoch in of.values())
        for name in ("rows", "documents", "tokens")
    )
    steps = math.ceil(rows / recipe.global_batch)
    if (
        plan.command.tiny
        or recipe.dataset == "builtin"
        or not of
        or steps >= FEW_STEPS
        or recipe.batch_ramp
    ):
        return []
    ways = [f"--global_batch (now {recipe.global_batch})"] if recipe.global_batch > 1 else []
    if packed and documents and tokens / documents < recipe.seq_len / 2:
        ways.append(
            f"--seq_len (now {recipe.seq_len:,}; a document has {tokens / documents:,.0f} tokens on"
            " average)"
        )
    if not ways:
        return []
    count = (
        f"an epoch is only {steps} optimizer step{'s' * (steps > 1)}, of {recipe.global_batch} rows"
        " each"
    )
    return [f"data: {count}. For more steps on the same data, lower {' or '.join(ways)}."]


def line_of(plan: Plan, name: str, epoch: Epoch, of_run: dict[str, tuple[float, bool]]) -> str:
    """Return the line about one corpus: what an epoch holds, and how many steps and epochs the run
    has.
    """
    recipe, facts = plan.recipe, plan.recipe.facts
    if facts.rows == PACKED:
        held = (
            f"{epoch.documents:,} document{'s' * (epoch.documents != 1)}, {epoch.tokens:,} tokens,"
            f" {epoch.rows:,} row{'s' * (epoch.rows != 1)} of {recipe.seq_len:,}"
        )
    else:
        held = f"{epoch.rows:,} {facts.unit}"
    reasons = {
        "empty": epoch.empty,
        "unreadable": epoch.bad,
        "without a token to learn": epoch.barren,
    }
    why = ", ".join(f"{number:,} {reason}" for reason, number in reasons.items() if number)
    text = (
        f"data{f' {name}' if name else ''}: {held}, {epoch.skipped:,} rows"
        f" skipped{f' ({why})' if why else ''}"
    )
    if recipe.batch_ramp or len(domains_of(recipe.dataset, recipe.subset)) > 1:
        steps = (
            f", the first in {recipe.ramp.step_of(epoch.rows):,} steps"
            if recipe.batch_ramp and not name
            else ""
        )
    else:
        steps = f"; one epoch is {rounded(epoch.rows / recipe.global_batch)} steps"
    number, exact = of_run.get(name, (0.0, True))
    whole = (
        f", this run is {'' if exact else 'about '}{rounded(number)} epochs"
        if name in of_run
        else ""
    )
    return f"{text}{steps}{whole}"


def rounded(number: float) -> str:
    """Write a number with one digit behind the point, or two if it is small."""
    return f"{number:,.{1 if number >= 1 else 2}f}".removesuffix(".0")
