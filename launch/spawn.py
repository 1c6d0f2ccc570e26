"""The command line with which a launcher, torchrun or deepspeed, forks all ranks on one host."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path

RANK = Path(__file__).resolve().with_name("rank.py")


@dataclass(frozen=True)
class Meeting:
    """The rendezvous of the ranks.

    It contains this host's position among all hosts, and the address of the first host.
    """

    slots: tuple[int, ...]  # number of ranks on each host
    node: int  # index of this host in `slots`
    master_addr: str
    master_port: int

    @property
    def first_rank(self) -> int:
        return sum(self.slots[: self.node])


def command(
    spawn: str, python: str, meeting: Meeting, visible: list[str], words: list[str]
) -> list[str]:
    """Return the argv that starts the ranks of one host.

    Each rank receives `words` (script and arguments) unchanged. `visible` lists this host's
    devices, one for each rank.
    """
    # -P prevents a file named torch.py in the current folder from shadowing the library in the
    # program that forks the ranks.
    module = [python, "-u", "-P", "-m"]
    port = meeting.master_port or "A_FREE_PORT"
    if spawn == "once":
        return [python, "-u", str(RANK), *words]
    if spawn == "deepspeed":
        # This is the program that `deepspeed` itself starts on every host. It accepts devices by
        # name and needs no hostfile.
        world: dict[str, list[int | str]] = {
            f"node{node}": list(range(slots)) for node, slots in enumerate(meeting.slots)
        }
        world[f"node{meeting.node}"] = [int(name) if name.isdigit() else name for name in visible]
        info = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
        flags = [
            f"--world_info={info}",
            f"--node_rank={meeting.node}",
            f"--master_addr={meeting.master_addr}",
            f"--master_port={port}",
        ]
        return [*module, "deepspeed.launcher.launch", *flags, "--no_local_rank", str(RANK), *words]
    flags = [
        f"--nnodes={len(meeting.slots)}",
        f"--node-rank={meeting.node}",
        f"--nproc-per-node={meeting.slots[meeting.node]}",
    ]
    flags += [f"--master-addr={meeting.master_addr}", f"--master-port={port}", "--max-restarts=0"]
    return [*module, "torch.distributed.run", *flags, str(RANK), *map(for_torchrun, words)]


def for_torchrun(word: str) -> str:
    """Escape a word for torchrun (torch 2.13, elastic/utils/api.py).

    torchrun expands `$local_rank` in every argument and converts `$$` to `$`.
    """
    return word.replace("$", "$$")
