"""The plot of a pipeline's step: measured bubbles must equal the theory.

The stages are real processes that sleep.
"""

import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from recipekit.parallel.timeline import InstructionSpan, bubble_fraction, ideal_bubble_fraction


def sleeping_stages(pp: int, micro_batches: list[int], dualpipev: bool, out: str) -> list[float]:
    """Run on a rank; return its median bubble over five steps, for each number of micro-batches.

    Sleeping needs no core, so two cores suffice for four stages. However, a busy machine wakes a
    process late, by a different delay in each step.
    """
    import contextlib

    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
    from recipekit.parallel import timeline

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor, seconds: float) -> torch.Tensor:
            ctx.seconds = seconds
            time.sleep(seconds)
            return hidden.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            time.sleep(2 * ctx.seconds)
            return grads[0], None

    class Layer(torch.nn.Linear):
        seconds: float

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return Sleep.apply(super().forward(hidden), self.seconds)

    measured = []
    for number in micro_batches:
        # Seconds; smaller bubbles need longer sleeps.
        Layer.seconds = max(0.03, 0.005 * number / (pp - 1)) * (2 if dualpipev else 1)
        with contextlib.redirect_stdout(None):
            kind, layers = (DualPipeVModule, 2 * pp) if dualpipev else (PipelineModule, pp)
            net = kind(
                layers=[Layer(4, 4) for _ in range(layers)],
                num_stages=pp,
                loss_fn=torch.nn.functional.mse_loss,
                partition_method="uniform",
            )
        optimizer = {"type": "SGD", "params": {"lr": 0.01}}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": number,
            "train_batch_size": number,
            "optimizer": optimizer,
        }
        engine: Any = deepspeed.initialize(
            model=net,
            model_parameters=list(net.parameters()),
            config=config,
            dist_init_required=False,
        )[0]
        said: list[str] = []
        bubbles = []
        for step in range(1, 7):
            with timeline.record_schedule(engine, enabled=step > 1) as spans:
                engine.train_batch(iter([(torch.ones(1, 4), torch.zeros(1, 4))] * number))
            assert engine._INSTRUCTION_MAP is type(engine)._INSTRUCTION_MAP
            if step == 1:
                assert spans == []  # recording was off
                continue
            counted = [
                sum(span.kind == kind for span in spans) for kind in ("forward", "backward", "step")
            ]
            assert counted == [layers // pp * number, layers // pp * number, 1]
            bubbles.append(timeline.bubble_fraction(spans))
        timeline.report_bubble(engine, spans, "sleeping layers", 6, Path(out), said.append)
        assert len(said) == (1 if engine.global_rank == 0 else 0)
        measured.append(statistics.median(bubbles))
        engine.destroy()
    return measured


@pytest.mark.slow  # they time sleeping processes, which a busy machine wakes late
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, [2, 4, 8]), (4, [2, 4, 8])])
def test_measured_bubble_of_1f1b_is_the_theoretical_one(pools, tmp_path, pp, micro_batches):
    first_rank = pools.run(
        pp, sleeping_stages, pp=pp, micro_batches=micro_batches, dualpipev=False, out=str(tmp_path)
    )[0]
    print(
        f"pp {pp}: "
        + ", ".join(
            f"m {m} {got:.3f} for {(pp - 1) / (m + pp - 1):.3f}"
            for m, got in zip(micro_batches, first_rank, strict=True)
        )
    )
    assert first_rank == pytest.approx([(pp - 1) / (m + pp - 1) for m in micro_batches], rel=0.2)
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_measured_bubble_of_dualpipev_is_the_theoretical_one(pools, tmp_path):
    first_rank = pools.run(
        2, sleeping_stages, pp=2, micro_batches=[4], dualpipev=True, out=str(tmp_path)
    )[0]
    print("dualpipev: " + ", ".join(f"{got:.3f}" for got in first_rank))
    assert first_rank == pytest.approx([4 / 28], rel=0.2)


def events_of(commands: list[Any], rank: int) -> list[tuple[Any, ...]]:
    """Return a rank's events in order.

    They are ("forward" or "backward", phase, number), ("send" or "receive", message) and
    ("exchange",). 1F1B exchanges each message at once. DualPipeV exchanges all messages since the
    last CommitP2P.
    """
    collects = any(type(command).__name__ == "CommitP2P" for command in commands)
    seen: Counter[tuple[str, int]] = Counter()
    events: list[tuple[Any, ...]] = []
    for command in commands:
        name, phase = type(command).__name__, getattr(command, "phase", 0)
        number, kind = seen[name, phase], name[4:]
        seen[name, phase] += 1
        if name in ("ForwardPass", "BackwardPass"):
            events.append((name[:-4].lower(), phase, number))
        elif kind in ("Activation", "Grad"):
            onward = 1 if (kind == "Activation") == (phase == 0) else -1
            sender = rank if name.startswith("Send") else rank - onward
            events.append(
                (
                    "send" if sender == rank else "receive",
                    (sender, sender + onward, kind, phase, number),
                )
            )
            events += [] if collects else [("exchange",)]
        elif name == "CommitP2P":
            events.append(("exchange",))
    return events


def costs(schedule: Any, pp: int, micro_batches: int, forward: int, backward: int) -> float:
    """Return the first rank's bubble for DeepSpeed's instruction order; sends take no time."""
    orders = [
        events_of(
            [
                command
                for commands in schedule(micro_batches, pp, rank).steps()
                for command in commands
            ],
            rank,
        )
        for rank in range(pp)
    ]
    seconds = {"forward": forward, "backward": backward}
    clock, spans = [0] * pp, [[] for _ in range(pp)]
    # sent: message -> time.
    sending, receiving, sent = [[] for _ in range(pp)], [[] for _ in range(pp)], {}
    while any(orders):
        for rank, order in enumerate(orders):
            while order:
                kind, *what = order[0]
                if kind in seconds:
                    spans[rank].append(
                        InstructionSpan(kind, *what, clock[rank], clock[rank] + seconds[kind])
                    )
                    clock[rank] += seconds[kind]
                elif kind != "exchange":
                    (sending if kind == "send" else receiving)[rank] += what
                else:
                    sent |= dict.fromkeys(sending[rank], clock[rank])
                    sending[rank].clear()
                    if any(message not in sent for message in receiving[rank]):
                        break
                    clock[rank] = max([clock[rank], *map(sent.__getitem__, receiving[rank])])
                    receiving[rank].clear()
                order.pop(0)
    return bubble_fraction(spans[0])


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 16])
def test_theory_is_what_deepspeeds_schedules_come_to(pp, more):
    from deepspeed.runtime.pipe.schedule import DualPipeVSchedule, TrainSchedule

    number = 2 * pp + more
    assert costs(TrainSchedule, pp, number, 1, 2) == pytest.approx(
        ideal_bubble_fraction("1f1b", pp, number)
    )
    assert costs(TrainSchedule, pp, number, 1, 3) == pytest.approx(
        ideal_bubble_fraction("1f1b", pp, number)
    )
    assert costs(DualPipeVSchedule, pp, number, 1, 2) == pytest.approx(
        ideal_bubble_fraction("dualpipev", pp, number)
    )


def test_bubble_leaves_out_what_follows_the_last_backward():
    spans = [
        InstructionSpan("forward", 0, 0, 1.0, 2.0),
        InstructionSpan("backward", 0, 0, 4.0, 5.0),
        InstructionSpan("reduce", 0, 0, 5.0, 9.0),
        InstructionSpan("step", 0, 0, 9.0, 10.0),
    ]
    assert bubble_fraction(spans) == 0.5
