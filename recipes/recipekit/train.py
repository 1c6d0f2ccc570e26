"""The training loop. It stands once, and every line that changes a weight is in `train_step`."""

import contextlib
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from . import checkpoint, pipeline, schedule
from .blueprint import describe
from .data import eval_rows, merge_states, roll
from .deterministic import check_in_force
from .devices import DEVICES
from .export import export, save_small_files
from .failure import Peers
from .flops import Flops, keys_seen
from .groups import Groups, set_time_limit, time_limit, waiting_group
from .mesh import Mesh
from .mixture import domains_of
from .model import build_model, check_causal, check_weights, enabled, parameter_groups
from .plan import Plan, way_on
from .recipe import Recipe
from .refusal import Refusal, refuse
from .sequence_parallel import MicroBatch, own_part
from .setup import (
    check_data,
    check_peers,
    check_same_data,
    export_dtype,
    find_checkpoint,
    keep_grad_norm,
    layout_of,
    open_data,
    peak_memory,
    put_aside,
    run_facts,
    shared_problems,
    start,
    step_flops,
    undo_hidden_step,
    write_facts,
)
from .stopping import REASONS, Stopper
from .tokens import load_tokenizer
from .tracking import open_tracker
from .weights import fetch_config, weights_folder

PEERS_EVERY = 10  # steps between two proofs that the peers of a data-parallel rank were given the same tokens


def train_step(
    engine: Any,
    batches: list[MicroBatch],
    lr: float | None,
    stop: str | None,
    mesh: Mesh,
    by_domain: torch.Tensor | None = None,
    more: Sequence[int] = (),
) -> dict[str, Any]:
    """One optimizer step. Returns {"loss", "grad_norm", "tokens", "stop", "more"}: over the global batch, the same on every rank.

    `loss` is the mean over the tokens of the global batch that have a label, so it does not depend on how the rows are
    split into micro-batches and ranks. `stop` is a reason (of stopping.REASONS) that any rank passed. lr None leaves it to the JSON's scheduler.
    `by_domain`, (2, domains) fp64 for a mixture, receives the loss sums and the tokens of each domain, up to one factor.
    `more` are further numbers to add up over all ranks, which the sum of the tokens takes along.
    """
    if by_domain is not None:
        by_domain.zero_()
    if lr is not None:
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
    labelled = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    totals = torch.tensor([labelled, *(reason == stop for reason in REASONS), *more], dtype=torch.int64, device=engine.device)
    counting: Any = dist.all_reduce(totals, async_op=True)  # during the first forward
    peers = mesh.tp * mesh.pp  # ranks that count the same tokens
    weight: torch.Tensor | None = None
    summing: Any = None
    if mesh.pp > 1:
        counting.wait()
        weight = len(batches) * mesh.dp / (totals[0] // peers)  # undoes DeepSpeed's mean over micro-batches and ranks
        mean_loss = engine.train_batch(iter(pipeline_batches(batches, weight)))  # forwards, backwards and the step, as the schedule orders them
    else:
        loss_sum = torch.zeros((), dtype=torch.float64, device=engine.device)
        for batch in batches:
            loss = token_loss(engine, to_device(batch, engine.device), by_domain)
            loss_sum += loss.detach()
            if weight is None:
                counting.wait()
                weight = len(batches) * mesh.dp * mesh.sp / (totals[0] // peers)
            if engine.is_gradient_accumulation_boundary():
                summing = dist.all_reduce(loss_sum, async_op=True)  # during the last backward
            engine.backward(loss * weight)
            engine.step()
        assert summing is not None, "an optimizer step has at least one micro-batch"
        summing.wait()
        mean_loss = loss_sum / totals[0]
    if by_domain is not None:
        dist.all_reduce(by_domain)
    labelled, *told = totals.tolist()
    reasons = [reason for reason, ranks in zip(REASONS, told, strict=False) if ranks]
    return {
        "loss": mean_loss.item(),
        "grad_norm": float(engine.get_global_grad_norm()),
        "tokens": labelled // peers,
        "stop": next(iter(reasons), None),
        "more": told[len(REASONS) :],
    }


def token_loss(model: Any, batch: MicroBatch, by_domain: torch.Tensor | None = None) -> torch.Tensor:
    """The summed cross-entropy of one micro-batch in fp32; labels of -100 do not count."""
    starts = batch.get("document_starts")  # of the whole rows, under sequence parallelism only
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=starts, use_cache=False).logits  # (B, T, V)
    return summed_loss(logits, batch["labels"], batch.get("domain"), by_domain)


def summed_loss(logits: torch.Tensor, labels: torch.Tensor, domain: torch.Tensor | None = None, by_domain: torch.Tensor | None = None) -> torch.Tensor:
    """Adds to `by_domain`, (2, domains), what each row of `domain`, (B,), has of loss and labels."""
    if domain is None or by_domain is None:
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    losses = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    of_rows = torch.stack([losses.detach().view_as(labels).sum(1), (labels != -100).sum(1)])  # (2, B)
    by_domain.index_add_(1, domain, of_rows.double())
    return losses.sum()


def pipeline_loss(by_domain: torch.Tensor | None, logits: torch.Tensor, target: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What the last stage computes; DeepSpeed takes the mean of it over micro-batches and data-parallel ranks."""
    labels, weight, *domain = target
    return summed_loss(logits, labels, domain[0] if domain else None, by_domain) * weight


def pipeline_batches(batches: list[MicroBatch], weight: torch.Tensor) -> list[Any]:
    """(what the first stage takes, what the loss takes) of each micro-batch."""
    batches = [{name: tensor.contiguous() for name, tensor in batch.items()} for batch in batches]
    domains = [(batch["domain"],) if "domain" in batch else () for batch in batches]
    return [((batch["input_ids"], batch["position_ids"]), (batch["labels"], weight, *domain)) for batch, domain in zip(batches, domains, strict=True)]


def lr_at(recipe: Recipe, step: int) -> float:
    """The learning rate of optimizer step `step` (1, 2, ...): linear warm-up, then cosine, linear or constant."""
    if step <= recipe.warmup_steps:
        return recipe.lr * step / recipe.warmup_steps
    if recipe.schedule == "constant":
        return recipe.lr
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    left = 1 - done if recipe.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * left


@torch.no_grad()
def evaluate(engine: Any, batches: list[MicroBatch], mesh: Mesh) -> float:
    """The token-mean loss of the held-out rows, the same on every rank and in every layout (a collective)."""
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    sums[1] = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    if mesh.pp > 1:
        dist.all_reduce(sums)
        weight = len(batches) * mesh.dp / (sums[1] / (mesh.tp * mesh.pp))
        # not eval_batch's own num_micro_batches: with it DeepSpeed 0.19.8 mixes up DualPipeV's buffers and hangs (dualpipev.py, _phase1_buffer)
        of_a_step, engine.micro_batches = engine.micro_batches, len(batches)
        loss = engine.eval_batch(iter(pipeline_batches(batches, weight)))
        engine.micro_batches = of_a_step
        return loss.item()
    engine.eval()
    for batch in batches:
        sums[0] += token_loss(engine, to_device(batch, engine.device))
    engine.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main(plan: Plan, peers: Peers | None = None) -> int:
    """Trains as planned; returns the exit code: 0 done, 1 the loss or a gradient was not finite, 143 or 130 stopped.

    With `peers`, the failure of one rank ends all from the moment when they have met.
    """
    recipe, mesh, limit = plan.recipe, plan.mesh, time_limit(plan.recipe.retry_s)
    rank0 = plan.command.rank == 0
    say = print if rank0 else lambda *_: None
    for note in plan.notes:
        say(note)
    rows = f"{recipe.global_batch} rows a step = {mesh.dp} data-parallel x {recipe.micro_batch} micro_batch x {plan.accumulation} accumulation"
    say(f"{plan.command.name} on {mesh.world} rank{'s' if mesh.world > 1 else ''} ({mesh}), {plan.ds_path or 'strategy of the recipe'}, {rows}")
    device = start(plan, peers)
    if recipe.deterministic:
        say(f"deterministic, on every rank: {', '.join(f'{name} {value}' for name, value in check_in_force().items())}")
    source = find_checkpoint(plan, say)
    if rank0 and source is None and recipe.resume == "never" and plan.out.exists():
        put_aside(plan.out)
    dist.barrier()

    begun = time.perf_counter()
    model_config = plan.model_config or fetch_config(recipe)
    if recipe.init == "pretrained":
        weights_folder(recipe)
    dist.barrier(waiting_group())  # a host may have to download them
    groups = Groups(mesh, device.type, limit)
    tokenizer = load_tokenizer(recipe)
    if len(tokenizer) > (vocabulary := model_config.get("vocab_size", len(tokenizer))):
        rule = f"has {len(tokenizer)} tokens, more than the {vocabulary} of {recipe.model}"
        raise refuse(f"tokenizer = {recipe.tokenizer or recipe.model}", rule, "leave --tokenizer out to take the model's own")
    if source is None:
        check_data(recipe, tokenizer, say)  # its thread is started later: under ZeRO-3 DeepSpeed replaces torch's constructors while a model is built
    if unknown := check_causal(recipe, model_config):
        say(unknown)
    built = build_model(recipe, model_config, groups, plan.ds_config, device)
    model = built.model
    domains = [domain.name for domain in domains_of(recipe)]
    by_domain = torch.zeros(2, len(domains), dtype=torch.float64, device=device) if len(domains) > 1 else None
    if mesh.pp > 1:
        assert built.split is not None
        say(f"pipeline, {recipe.pipeline_schedule}: {describe(built.blueprint, built.split.bounds)}")
        model = pipeline.assemble(built.models, groups, partial(pipeline_loss, by_domain), recipe.pipeline_schedule, built.split.num_stages)
        pipeline.share(model, groups)
    trained: Any = parameter_groups(model)  # a list of groups, which DeepSpeed takes but does not annotate
    engine: Any = deepspeed.initialize(model=model, model_parameters=trained, config=plan.ds_config, mpu=groups.mpu, dist_init_required=False)[0]
    set_time_limit(limit)
    undo_hidden_step(engine)
    keep_grad_norm(engine)
    compared = check_weights(engine, built, groups)
    size = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    checked = f", {compared} of them compared with the files" if compared else ""
    say(f"model {recipe.model}: {size / 1e6:.1f} M parameters on each rank's shard{checked}, built in {time.perf_counter() - begun:.1f} s")

    blueprint = built.blueprint if mesh.ep == 1 else None
    layout = layout_of(plan, engine, built)
    dtype = str(export_dtype(plan, model_config)).removeprefix("torch.")
    state: dict[str, Any] = {"step": 0, "tokens": 0, "data": None}
    if source is not None:
        state = checkpoint.load(engine, source, blueprint, layout, plan.out / "checkpoints" / ".converted", say)
        say(f"resumed from {source}")
    state |= {"export_dtype": dtype}
    last = recipe.stop_at or recipe.steps
    if state["step"] >= last:
        at = f", and --stop_at is {recipe.stop_at}" if recipe.stop_at else ""
        say(f"nothing to do: the run in {plan.out} has finished {state['step']} of {recipe.steps} steps{at}")
        if recipe.export and last == recipe.steps and not (plan.out / "hf").exists():  # it was ended before it could write them
            say(f"writing Hugging Face files to {plan.out}/hf")
            export(engine, built, groups, tokenizer, plan.out / "hf", export_dtype(plan, model_config), recipe.merge)
        return 0

    dp_rank = groups.coords["dp"]
    stream = open_data(plan, tokenizer, dp_rank, state["data"], say)
    check_same_data(stream)
    if problems := shared_problems(stream.error_ahead()):
        raise Refusal(problems)
    held_out = eval_rows(recipe, tokenizer, dp=mesh.dp, dp_rank=dp_rank, state=stream.state, say=say) if recipe.eval_every else []
    held_out = [own_part(batch, mesh.sp, groups.coords["sp"]) for batch in held_out]
    if recipe.pipeline_schedule == "dualpipev" and mesh.pp > 1 and held_out:  # its schedule needs two micro-batches a stage
        held_out += [held_out[-1] | {"labels": torch.full_like(held_out[-1]["labels"], -100)}] * max(0, 2 * mesh.pp - len(held_out))
    facts = run_facts(plan, model_config)
    write_hf_files = partial(save_small_files, built, tokenizer, export_dtype(plan, model_config))
    saver = checkpoint.Saver(engine, plan.out / "checkpoints", blueprint, layout, recipe.keep, recipe.save_in_background, write_hf_files)
    saver.check_room()
    if rank0:
        checkpoint.put_aside_later(plan.out / "checkpoints", state["step"], say)
        write_facts(plan, facts, stream.files)
    stopper = Stopper(recipe.grace)
    tracker = open_tracker(
        recipe=recipe,
        name=f"{plan.command.name}_{mesh}",
        run_dir=plan.out,
        config=facts,
        is_main=rank0,
        start_step=state["step"],
        stopping=lambda: stopper.requested is not None,
    )
    if peers:
        peers.way_on = partial(way_on, recipe, plan.out)
        peers.last_words = partial(tracker.finish, 1)
    peak = DEVICES[name].flops if (name := facts["host"]["device"]) in DEVICES else None
    if peak is None and device.type != "cpu":
        say(f"peak unknown: {name} is not in recipekit/devices.py, so metrics.jsonl has no mfu")
    flops = step_flops(recipe, model_config) if peak else None
    if peak and flops is None:
        say("mfu unknown: a layer of this model mixes tokens in a way that recipekit/flops.py does not count")
    # `peers` is the first to see an exception: closing the stream may wait for a server
    with stopper, contextlib.closing(stream), peers or contextlib.nullcontext():
        code = loop(plan, engine, stream, held_out, state, saver, tracker, stopper, by_domain, flops, peak)
        if code == 0 and last == recipe.steps and recipe.export:
            stopper.boundary(next_within=3600)
            tracker.say(f"writing Hugging Face files to {plan.out}/hf")
            export(engine, built, groups, tokenizer, plan.out / "hf", export_dtype(plan, model_config), recipe.merge)
        tracker.finish(code)
        engine.destroy()
    return code


def loop(
    plan: Plan,
    engine: Any,
    stream: Any,
    held_out: list[MicroBatch],
    state: dict[str, Any],
    saver: checkpoint.Saver,
    tracker: Any,
    stopper: Stopper,
    by_domain: torch.Tensor | None = None,
    flops: Flops | None = None,
    peak: float | None = None,
) -> int:
    """Steps from `state["step"]` to the last one, saving and evaluating on the way; returns the exit code.

    `flops` are the model's, `peak` those of a device in a second; without both there is no `mfu`.
    """
    recipe, mesh, saved, data_state = plan.recipe, plan.mesh, state["step"], state["data"]
    sp_rank = mesh.coords(plan.command.rank)["sp"]
    last = recipe.stop_at or recipe.steps
    own_schedule = "scheduler" not in plan.ds_config
    drawn = min(state["step"] + 3, last)  # the step of a pipeline that OUT/schedule.png shows: the first ones warm up
    seen = 0  # a hash of all tokens that this rank was given

    for step in range(state["step"] + 1, last + 1):
        begun = time.perf_counter()
        batches, data_state = next(stream)
        # found one step early, so that all ranks stop together; a rank that is told to stop waits for no more data, and saves after this step
        broken = stream.error_ahead(lambda: stopper.requested) if step < last else None
        data_wait = time.perf_counter() - begun
        seen = roll(seen, batches)
        batches = [own_part(batch, mesh.sp, sp_rank) for batch in batches]
        lr = lr_at(recipe, step) if own_schedule else None
        keys = keys_seen(batches, flops.per_key) if flops and peak else []
        peaks = [0] * mesh.world
        peaks[plan.command.rank] = peak_memory(engine.device)  # of the steps before: every rank's own place in the sum
        with schedule.record(engine, on=step == drawn) as spans:
            result = train_step(engine, batches, lr, "bad data" if broken else stopper.requested, mesh, by_domain, [*peaks, *keys])
        seconds = time.perf_counter() - begun

        # fp16 skips steps whose gradient overflows and lowers its loss scale, so only its loss has to be finite
        if not (math.isfinite(result["loss"]) and (math.isfinite(result["grad_norm"]) or enabled(plan.ds_config, "fp16"))):
            saver.wait()
            kept = f"the last good checkpoint is step {saved}" if saved else "no checkpoint was written before it"
            tracker.say(f"stopped: step {step} has loss {result['loss']} and grad_norm {result['grad_norm']}; nothing of it is saved, {kept}")
            return 1

        state["step"], state["tokens"] = step, state["tokens"] + result["tokens"]
        metrics = {
            "step": step,
            "loss": result["loss"],
            "grad_norm": result["grad_norm"],
            "lr": engine.optimizer.param_groups[0]["lr"],
            "tokens": state["tokens"],
            "step_s": seconds,
            "tokens_per_s": result["tokens"] / seconds,
            "data_wait_s": data_wait,
            "peak_mem_bytes": largest_peak(engine.device, result["more"][: mesh.world], exact=step == last or bool(result["stop"])),
        }
        if by_domain is not None:
            for domain, loss, tokens in zip(data_state["domains"], *by_domain.tolist(), strict=True):
                metrics |= {f"loss/{domain}": loss / tokens} if tokens else {}
                metrics[f"tokens/{domain}"] = data_state["domains"][domain]["tokens"]
        if recipe.bad_rows == "skip":
            metrics["bad_rows"] = sum(domain["bad"] for domain in data_state["domains"].values())
        if flops and peak:
            done = flops.of_step(recipe.global_batch * recipe.seq_len, [number // (mesh.tp * mesh.pp) for number in result["more"][mesh.world :]])
            metrics["mfu"] = done / (peak * mesh.world * seconds)
        if held_out and (step % recipe.eval_every == 0 or step == recipe.steps):
            stopper.boundary(next_within=3600)
            metrics["eval_loss"] = evaluate(engine, held_out, mesh)
        tracker.log(metrics)
        schedule.report(engine, spans, plan.command.name, step, plan.out, tracker.say)
        stopper.boundary()
        if step % PEERS_EVERY == 0 or step == last:
            check_peers(mesh, seen, step, engine.device)

        if result["stop"] or step == last or (recipe.save_every and step % recipe.save_every == 0):
            stopper.boundary(next_within=3600)  # writing a large model takes longer than a step
            everyone: list[Any] = [None] * mesh.world
            dist.all_gather_object(everyone, data_state)
            saver.save(state | {"data": merge_states(everyone)})
            if result["stop"] or step == last:
                saver.wait()
            saved = step
            stopper.boundary()
        if result["stop"] and step < last:  # at the last step nothing is left to stop but the export, which a kill leaves to the next start
            stopper.request(result["stop"])  # on the ranks that were not told themselves
            stopper.boundary(next_within=60)
            tracker.finish(REASONS[result["stop"]])  # what W&B has to say of its end stands above the last line
            goes_on = "" if result["stop"] == "bad data" else f"; {way_on(recipe, plan.out)}"
            tracker.say(f"stopped by {result['stop']} after step {step}; the checkpoint of it is complete{goes_on}")
            for problem in shared_problems(broken) if result["stop"] == "bad data" else []:  # not `requested`: a rank keeps its own first reason
                tracker.say(f"step {step + 1} cannot be made: {problem}")
            return REASONS[result["stop"]]
    return 0


def largest_peak(device: torch.device, told: list[int], exact: bool) -> int:
    """The most that any rank has taken of its device: of this rank until now, of the others until the step began (`told`).

    `exact`: until now for all (a collective), for the last line of a run.
    """
    own = peak_memory(device)
    if exact:
        everyone = torch.tensor(own, dtype=torch.int64, device=device)
        dist.all_reduce(everyone, op=dist.ReduceOp.MAX)
        return int(everyone)
    return max(own, *told)


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    return {name: tensor.to(device, non_blocking=True).contiguous() for name, tensor in batch.items()}
