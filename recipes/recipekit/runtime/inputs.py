"""Input check of a dry run: the tokenizer and local data, opened by the functions of a start."""

from dataclasses import replace

from ..data.files import local_files
from ..data.mixture import domains_of
from ..data.processors import check_tokenizer, has_local_tokenizer
from ..data.request import Request, request_from_recipe
from ..hosts.accounts import check_wandb_disabled, check_wandb_installed
from ..plan import RunPlan
from ..spec.errors import ConfigError, Say
from ..spec.mesh import Mesh
from ..tasks.find import load_task, with_hyperparameters
from .corpus import (
    DataSource,
    check_tokens,
    corpus_opener,
    open_data,
    open_held_out,
    request_of_plan,
)

MAX_OPENED_BYTES = (
    2 << 20
)  # maximum bytes of local data for which a dry run reads the first step and the evaluation


def check_inputs(plan: RunPlan, say: Say) -> None:
    """Open the tokenizer and the local data of a plan in the same way as a start.

    If the data are small, the first step and the evaluation are also read. Raises `ConfigError`
    with the same messages as a start. Files on the hub are not opened, and no tokens are cached.
    """
    problems = check_wandb_disabled(plan.recipe.wandb, plan.command.typed)
    problems += check_wandb_installed(plan.recipe.wandb, plan.command.typed)
    if problems:
        raise ConfigError(problems)
    needs_tokenizer = "tokenizer" in plan.recipe.task_spec.reads
    if needs_tokenizer and not has_local_tokenizer(plan.recipe.model, plan.recipe.tokenizer):
        return

    # One rank reads the rows of all ranks. With `off`, a dry run caches no tokens.
    plan = replace(plan, mesh=Mesh(), recipe=replace(plan.recipe, token_cache="off"))
    request, task = (
        request_from_recipe(plan.recipe),
        with_hyperparameters(load_task(plan.recipe.task), plan.recipe),
    )
    assert plan.model_config is not None, (
        "the plan of a dry run refuses a model without config.json"
    )
    processor = task.processor(request, plan.model_config)
    if task.spec.reads_tokens:
        check_tokens(processor, say)
    if not task.samples:
        check_tokenizer(processor, request.task)  # for hub data, which a dry run does not open
    if (size := local_bytes(request)) is None:
        return
    corpus = corpus_opener(request_of_plan(plan), task, processor)(say)
    if size > MAX_OPENED_BYTES:
        return
    source = DataSource(plan, task, processor, opened=corpus)
    stream = open_data(source, 0, None, say)
    try:
        if error := stream.error_ahead():
            raise error
        open_held_out(source, {"dp": 0, "sp": 0}, stream.state, say)
    finally:
        stream.close()


def local_bytes(request: Request) -> int | None:
    """Return the size of the local data in bytes.

    The result is None if there are no local data, or if some of the data are not on this machine.
    """
    domains = [
        domain
        for domain in domains_of(request.dataset, request.subset)
        if domain.dataset != "builtin"
    ]
    size = 0
    for domain in domains:
        files = local_files(domain.dataset, "image" in request.names, request.split, domain.subset)
        if files is None:
            return None
        size += sum(file.stat().st_size for file in files)
    return size if domains else None
