"""Hosts that alerts have named are replaced by spare hosts of the hostfile."""

import sys
from dataclasses import replace
from typing import Any

import pytest
from pool import ROOT

sys.path.insert(0, str(ROOT))

from launch.hosts import Host
from launch.job import Job
from launch.spares import NamedHosts, host_of, with_spares

JOB = Job(
    hosts=(Host("a", 2), Host("b", 4)),
    spawn="torchrun",
    words=("recipe.py",),
    python="python",
    folder=".",
    environment={},
    where="hostfile",
    spares=(Host("small", 1), Host("c", 8)),
)


def alert(kind: str = "hang", **where: Any) -> dict[str, Any]:
    return {"kind": kind, "step": 3, **where}


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ({"host": "b"}, "b"),
        ({"host": "b", "rank": 0}, "b"),
        ({"host": "node-17.cluster", "rank": 1}, "a"),
        ({"rank": 2}, "b"),
        ({"rank": 5}, "b"),
        ({"rank": 6}, ""),
        ({"host": "elsewhere"}, ""),
        ({}, ""),
    ],
)
def test_an_alert_is_about_its_host_or_the_host_of_its_rank(
    where: dict[str, Any], name: str
) -> None:
    assert host_of(JOB, alert(**where)) == name


def after(job: Job, *alerts: dict[str, Any]) -> tuple[Job, list[str]]:
    """Return the job and the lines after a start in which these alerts were raised."""
    named, said = NamedHosts(), []
    named.count(job, alerts)
    return with_spares(job, named, said.append), said


def test_a_host_is_replaced_after_the_second_alert_about_it():
    once, said = after(JOB, alert(rank=0), alert(rank=2), alert("spike", rank=0))
    assert once == JOB and said == []
    twice, said = after(JOB, alert(rank=0), alert("corrupt", rank=1))
    assert twice.hosts == (Host("c", 2), Host("b", 4)) and twice.spares == (Host("small", 1),)
    assert said == ["2 alerts have named a: c replaces it"]


def test_alerts_are_counted_once_over_several_starts():
    named = NamedHosts()
    for alerts in ([alert(rank=0)], [alert(rank=0)], [alert(rank=0), alert(rank=3)]):
        named.count(JOB, alerts)
    assert named.times == {"a": 1, "b": 1} and named.to_leave_out(JOB) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"spares": ()}, "the hostfile has no spare host with 2 slots"),
        ({"spares": (Host("small", 1),)}, "the hostfile has no spare host with 2 slots"),
        ({"master_addr": "10.0.0.1"}, "--master_addr 10.0.0.1 is its address"),
    ],
)
def test_a_host_that_cannot_be_replaced_stays(change: dict[str, Any], why: str) -> None:
    job = replace(JOB, **change)
    same, said = after(job, alert(rank=0), alert(rank=0))
    assert same == job and said == [f"2 alerts have named a: it stays, because {why}"]
