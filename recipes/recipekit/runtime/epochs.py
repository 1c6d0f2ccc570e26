"""Epochs of a run. Local data are counted before step 1, and streams during their first epoch."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from ..data.epoch_counts import (
    CorpusLengths,
    EpochCounts,
    epochs_after_rows,
    mixture_epochs,
    read_corpora_lengths,
    steps_for_epochs,
)
from ..data.files import local_files
from ..data.kinds import kind_of
from ..data.mixture import Domain, domains_of
from ..data.processors import tokenizer_here
from ..data.request import Request
from ..data.stream import Corpus
from ..data.stream_state import StreamMismatch, StreamState
from ..parallel.groups import long_wait_group
from ..plan import RunPlan, resolve_run
from ..spec.errors import ConfigError, Problem, Say
from ..spec.task import Task
from ..spec.task_specs import PACKED
from ..storage.manifest import STATE_FILE
from ..tasks.find import load_task
from .corpus import corpus_opener, request_of_plan
from .rank_consistency import shared_problems

MAX_COUNTED_BYTES = 64 << 20  # local data up to this size are counted even without --epochs
MIN_STEPS_PER_EPOCH = 10  # if an epoch has fewer steps, a warning is logged
MAX_COUNTED_BYTES_DRY = 8 << 20  # the same limit in a dry run


@dataclass(frozen=True)
class CorpusCounts:
    """Rank 0's counts, which are sent to all ranks.

    `epochs` covers the whole run and contains (number, True if exact) for each corpus.
    """

    by_corpus: dict[str, EpochCounts] = field(default_factory=dict)
    epochs: dict[str, tuple[float, bool]] = field(default_factory=dict)
    steps: int = 0  # number of steps for --epochs
    more: int = 0  # rows of the last step that belong to the next epoch
    problems: list[Problem] = field(default_factory=list)  # why the data cannot be counted


class Epochs:
    """The epochs of a run's corpora, as far as they are known.

    `tokens` maps each corpus to the number of tokens (or samples) in one epoch.
    """

    def __init__(self, plan: RunPlan, tokens: Mapping[str, int]):
        self.plan, self.tokens, self.reported = plan, tokens, set(tokens)

    def completed_epochs(self, state: StreamState) -> dict[str, float]:
        """Return a step's metrics about completed epochs, or {} while they are unknown.

        For a mixture, `epoch` is the smallest number among its corpora.
        """
        found, unknown = dict[str, float](), False
        for name, domain in state["domains"].items():
            total = self.tokens.get(name, 0) or domain.get("epoch", {}).get("tokens", 0)
            given = domain["given"]["tokens"] if "given" in domain else domain["tokens"]
            value, begun = given / total if total else -1.0, domain["place"].get("epoch", 0)
            # A stream that an older version started contains no count.
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
        """Log the counts of a stream's first epoch once that epoch is complete."""
        recipe = self.plan.recipe
        rows = recipe.left_out.dealt_rows(recipe.ramp, recipe.steps)
        for name, domain in state["domains"].items():
            if name in self.reported or "epoch" not in domain:
                continue
            self.reported.add(name)
            given = domain["epoch"]
            epoch = EpochCounts(
                given["documents"],
                given["tokens"],
                given["rows"],
                given.get("empty", 0),
                given.get("bad", 0),
            )
            whole = {} if len(state["domains"]) > 1 else {name: (rows / given["rows"], False)}
            say(f"{epoch_line(self.plan, name, epoch, whole)}, counted in its first epoch")


def count_epochs(
    plan: RunPlan,
    task: Task,
    processor: object,
    source: Path | None,
    opened: Corpus | None,
    say: Say,
) -> tuple[RunPlan, Epochs]:
    """Count a run's local data and convert epochs to steps (a collective).

    `source` is the step folder to resume from. `opened` contains the data if they are already open.

    Raises `ConfigError`, on all ranks, if the recipe sets epochs but the data cannot be counted, or
    if the number of steps does not fit.
    """
    wanted = corpora_to_count(plan, 0 if plan.recipe.epochs else MAX_COUNTED_BYTES)
    if not wanted:
        return plan, Epochs(plan, {})
    corpus, refusal = opened, None
    try:
        open_corpora = corpus_opener(request_of_plan(plan), task, processor)
        corpus = opened or reopen_corpora(open_corpora, source, plan.recipe.resume == "auto", say)
    except ConfigError as error:
        refusal = error
    if problems := shared_problems(refusal):
        raise ConfigError(problems)
    found = [
        count_corpora(plan, corpus, wanted, say)
        if corpus and plan.command.rank == 0
        else CorpusCounts()
    ]
    dist.barrier(long_wait_group())  # Counting a large corpus can exceed a collective's time limit.
    dist.broadcast_object_list(found)
    plan = plan_with_epoch_steps(plan, found[0], say)
    for line in epoch_lines(plan, found[0]):
        say(line)
    return plan, Epochs(plan, {name: epoch.tokens for name, epoch in found[0].by_corpus.items()})


def with_counted_data(plan: RunPlan) -> RunPlan:
    """Return a dry run's plan with added lines about its local data.

    The data are counted only if they are small and their tokenizer is on this machine. Tokens are
    not cached, because a dry run changes nothing. Raises `ConfigError` in the same cases as a
    start.
    """
    recipe, lines = plan.recipe, list[str]()
    wanted = corpora_to_count(plan, MAX_COUNTED_BYTES_DRY)
    if not wanted:
        return plan
    reads_text = "tokenizer" in recipe.task_spec.reads
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
        load_task(recipe.task),
        replace(request_of_plan(plan), token_cache="off", tokenizer=tokenizer),
    )
    open_corpora = corpus_opener(request, task, task.processor(request, plan.model_config))
    corpus = reopen_corpora(open_corpora, None, True, lines.append)
    found = count_corpora(plan, corpus, wanted, lines.append)
    plan = plan_with_epoch_steps(plan, found, lines.append)
    return replace(plan, notes=(*plan.notes, *lines, *epoch_lines(plan, found)))


def corpora_to_count(plan: RunPlan, most_bytes: int) -> set[str]:
    """Return the names of the corpora to count.

    These are local corpora of at most `most_bytes`. If `most_bytes` is 0, they are the built-in
    text and all local corpora, regardless of size.
    """
    recipe = plan.recipe
    found, pictures = set[str](), "image_field" in recipe.task_spec.columns
    for domain in domains_of(recipe.dataset, recipe.subset):
        if domain.dataset == "builtin":
            found |= set() if most_bytes else {domain.name}
        elif (
            files := local_files(domain.dataset, pictures, recipe.split, domain.subset)
        ) is not None:
            # only the names of these files are read
            are_named = kind_of(files, domain.dataset) == "pictures"
            size = 0 if are_named else sum(file.stat().st_size for file in files)
            found |= {domain.name} if not most_bytes or size <= most_bytes else set()
    return found


def reopen_corpora(
    open_corpora: Callable[..., Corpus], source: Path | None, must_match: bool, say: Say
) -> Corpus:
    """Open the corpora as the run's stream does, with the checkpoint's state if it fits.

    The state fits if it was recorded on the same data.
    """
    state: StreamState | None = (
        json.loads((source / STATE_FILE).read_text())["data"] if source else None
    )
    corpus = open_corpora(say, state)
    try:
        corpus.check(state)
    except StreamMismatch:
        # `open_data` rejects it, or reads the data from the beginning
        return corpus if must_match else open_corpora(say)
    return corpus


def count_corpora(plan: RunPlan, corpus: Corpus, names: set[str], say: Say) -> CorpusCounts:
    """Count the corpora with these names, on one rank."""
    try:
        outlines = read_corpora_lengths(corpus, names, say)
    except ConfigError as error:
        return CorpusCounts(problems=error.problems)
    # the stream rejects corpora without rows
    outlines = {name: of for name, of in outlines.items() if of.first_epoch.rows}
    recipe, request = plan.recipe, corpus.request
    found = CorpusCounts({name: of.first_epoch for name, of in outlines.items()})
    if recipe.epochs and outlines:
        (of,) = outlines.values()
        steps, more = steps_for_epochs(of, recipe.epochs, recipe.ramp, say)
        return replace(found, steps=steps, more=more)
    return replace(found, epochs=epochs_of_run(corpus.domains, outlines, request, recipe.steps))


def epochs_of_run(
    domains: list[Domain], outlines: dict[str, CorpusLengths], request: Request, steps: int
) -> dict[str, tuple[float, bool]]:
    """Return how many epochs of each corpus `steps` complete, with True if the number is exact.

    The result is {} if any corpus of a mixture is not counted.
    """
    if len(domains) == 1:
        rows = request.left_out.dealt_rows(request.ramp, steps)
        return {name: epochs_after_rows(of, rows) for name, of in outlines.items()}
    if len(outlines) < len(domains):
        return {}
    numbers, exact = mixture_epochs(
        domains, [outlines[domain.name] for domain in domains], request, steps
    )
    return {domain.name: (number, exact) for domain, number in zip(domains, numbers, strict=True)}


def plan_with_epoch_steps(plan: RunPlan, counts: CorpusCounts, say: Say) -> RunPlan:
    """Return the plan with the number of steps that its epochs require.

    Warm-up, decay and ramp are adjusted as if --steps had been given.
    """
    recipe = plan.recipe
    if not recipe.epochs:
        return plan
    if not counts.steps:
        unknown = Problem(
            f"epochs = {recipe.epochs:g}",
            "the data contain no rows to train on",
            "set --dataset to other data",
        )
        raise ConfigError(counts.problems or [unknown])
    made = resolve_run(dataclasses.replace(plan.command, counted=counts.steps))
    for note in made.notes:
        if note not in plan.notes:
            say(note)
    return replace(plan, recipe=replace(made.recipe, wandb=recipe.wandb), ds_config=made.ds_config)


def epoch_lines(plan: RunPlan, counts: CorpusCounts) -> list[str]:
    """Return the lines that a start logs about the run's epochs."""
    lines = [
        epoch_line(plan, name, epoch, counts.epochs) for name, epoch in counts.by_corpus.items()
    ]
    if plan.recipe.epochs:
        filled = (
            f". The last step takes {counts.more:,} of its rows from the next epoch"
            if counts.more
            else ""
        )
        lines.append(f"epochs: {plan.recipe.epochs:g} = {counts.steps:,} steps{filled}")
    lines += warn_few_steps(plan, counts.by_corpus)
    lines += [
        f"data: not counted, because the run will stop at this problem: {problem}"
        for problem in counts.problems
    ]
    return lines


def warn_few_steps(plan: RunPlan, epochs: Mapping[str, EpochCounts]) -> list[str]:
    """Return a warning if a run on little data takes few optimizer steps per epoch.

    In such a run each step averages most of the data, and the model hardly changes.
    """
    recipe, packed = plan.recipe, plan.recipe.task_spec.rows == PACKED
    rows, documents, tokens = (
        sum(getattr(epoch, name) for epoch in epochs.values())
        for name in ("rows", "documents", "tokens")
    )
    steps = math.ceil(rows / recipe.global_batch)
    if (
        plan.command.tiny
        or recipe.dataset == "builtin"
        or not epochs
        or steps >= MIN_STEPS_PER_EPOCH
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


def epoch_line(
    plan: RunPlan, name: str, epoch: EpochCounts, run_epochs: dict[str, tuple[float, bool]]
) -> str:
    """Return the log line about one corpus: its epoch size, and the run's steps and epochs."""
    recipe, facts = plan.recipe, plan.recipe.task_spec
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
        steps = f"; one epoch is {format_short(epoch.rows / recipe.global_batch)} steps"
    number, exact = run_epochs.get(name, (0.0, True))
    whole = (
        f", this run is {'' if exact else 'about '}{format_short(number)} epochs"
        if name in run_epochs
        else ""
    )
    return f"{text}{steps}{whole}"


def format_short(number: float) -> str:
    """Format a number with one digit after the decimal point, or two if the number is small."""
    return f"{number:,.{1 if number >= 1 else 2}f}".removesuffix(".0")
