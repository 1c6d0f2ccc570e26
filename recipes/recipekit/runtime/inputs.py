"""The inputs of a dry run: its tokenizer and local data, opened by the functions that a start
calls.
"""

from dataclasses import replace

from ..data.files import local_files
from ..data.mixture import domains_of
from ..data.processors import check_tokenizer, has_local_tokenizer
from ..data.request import Request, request_of
from ..hosts.accounts import check_wandb_disabled, check_wandb_installed
from ..plan import Plan
from ..spec.mesh import Mesh
from ..spec.refusal import Refusal, Say
from ..tasks.find import task_called, with_numbers
from .corpus import DataSource, check_tokens, open_data, open_held_out, opener

READ = 2 << 20  # bytes of local data up to which a dry run makes the first step and the evaluation


def check_inputs(plan: Plan, say: Say) -> None:
    """Open the tokenizer and the local data of a plan as its start does, and make the first step of
    small data.

    Raises `Refusal` with the words of the start. Files of the hub are not opened, and no tokens are
    kept.
    """
    problems = check_wandb_disabled(plan.recipe.wandb, plan.command.typed)
    problems += check_wandb_installed(plan.recipe.wandb, plan.command.typed)
    if problems:
        raise Refusal(problems)
    needs_tokenizer = "tokenizer" in plan.recipe.facts.reads
    if needs_tokenizer and not has_local_tokenizer(plan.recipe.model, plan.recipe.tokenizer):
        return

    # One rank reads the rows of all ranks. `off`: a question leaves no tokens behind.
    plan = replace(plan, mesh=Mesh(), recipe=replace(plan.recipe, token_cache="off"))
    request, task = (
        request_of(plan.recipe),
        with_numbers(task_called(plan.recipe.task), plan.recipe),
    )
    assert plan.model_config is not None, (
        "the plan of a dry run refuses a model without config.json"
    )
    processor = task.processor(request, plan.model_config)
    if task.facts.of_tokens:
        check_tokens(processor, say)
    if not task.samples:
        check_tokenizer(processor, request.task)  # data of the hub are not opened
    if (size := local_bytes(request)) is None:
        return
    opener(request, task, processor)(say)
    if size > READ:
        return
    source = DataSource(plan, task, processor)
    stream = open_data(source, 0, None, say)
    try:
        if error := stream.error_ahead():
            raise error
        open_held_out(source, {"dp": 0, "sp": 0}, stream.state, say)
    finally:
        stream.close()


def local_bytes(request: Request) -> int | None:
    """Count the bytes of local data; None if there are none, or if a part of the data is not on
    this machine.
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
