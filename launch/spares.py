"""Hosts that alerts of a run have named, and the spare hosts that replace them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .job import Job

NAMED = 2  # alerts after which a host is left out
KINDS = ("corrupt", "device", "hang")  # kinds of alerts whose cause is a host


@dataclass
class NamedHosts:
    """Counts the alerts that have named each host of a job."""

    times: Counter[str] = field(default_factory=Counter)
    _counted: int = 0  # alerts

    def count(self, job: Job, alerts: Sequence[Mapping[str, Any]]) -> None:
        """Count the alerts that a start of `job` has added. `alerts` are all alerts of the job."""
        for alert in alerts[self._counted :]:
            if alert.get("kind") in KINDS and (name := host_of(job, alert)):
                self.times[name] += 1
        self._counted = len(alerts)

    def to_leave_out(self, job: Job) -> list[str]:
        """Return the names of the job's hosts that NAMED alerts or more have named."""
        return [host.name for host in job.hosts if self.times[host.name] >= NAMED]


def host_of(job: Job, alert: Mapping[str, Any]) -> str:
    """Return the name of the host that an alert is about, or "" if it is not known.

    A host may know itself by another name than the hostfile. The alert's rank decides then.
    """
    if any(alert.get("host") == host.name for host in job.hosts):
        return str(alert["host"])
    rank = alert.get("rank")
    if not isinstance(rank, int):
        return ""
    of_ranks = [host.name for host in job.hosts for _ in range(host.slots)]
    return of_ranks[rank] if rank < len(of_ranks) else ""


def with_spares(job: Job, named: NamedHosts, say: Callable[[str], None]) -> Job:
    """Replace each host that alerts have named by a spare host, and return the changed job.

    A host without a spare stays.
    """
    hosts, spares = list(job.hosts), list(job.spares)
    for name in named.to_leave_out(job):
        index = next(i for i, host in enumerate(hosts) if host.name == name)
        slots, why = hosts[index].slots, f"{named.times[name]} alerts have named {name}"
        spare = next((host for host in spares if host.slots >= slots), None)
        if job.where == "k8s":
            say(f"{why}: take its node out with kubectl cordon NODE")
        elif job.where == "slurm":
            say(f"{why}: this start still uses it, because it belongs to the allocation")
        elif index == 0 and job.master_addr:
            say(f"{why}: it stays, because --master_addr {job.master_addr} is its address")
        elif spare is None:
            say(f"{why}: it stays, because the hostfile has no spare host with {slots} slots")
        else:
            say(f"{why}: {spare.name} replaces it")
            spares.remove(spare)
            hosts[index] = replace(spare, slots=slots)
    return replace(job, hosts=tuple(hosts), spares=tuple(spares))
