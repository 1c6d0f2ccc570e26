"""Writes the command line with which a launcher, torchrun or deepspeed, forks all ranks of one
host.
"""

import base64
import json
from dataclasses import dataclass
from pathlib import Path

RANK = Path(__file__).resolve().with_name("rank.py")


@dataclass(frozen=True)
class Meeting:
    """Says where the ranks find each other: this host's place among all hosts, and the address of
    the first.
    """

    slots: tuple[int, ...]  # ranks of each host
    node: int  # this host is slots[node]
    master_addr: str
    master_port: int

    @property
    def first_rank(self) -> int:
        return sum(self.slots[: self.node])


def command(
    spawn: str, python: str, meeting: Meeting, visible: list[str], words: list[str]
) -> list[str]:
    """Returns the argv that starts the ranks of one host; each rank gets `words` (script and
    arguments) exactly as they are.

    `visible` are the devices of this host, one for each rank.
    """
    # -P: a file torch.py in the current folder must not hide the library from the program that
    # forks the ranks
    module = [python, "-u", "-P", "-m"]
    port = meeting.master_port or "A_FREE_PORT"
    if spawn == "once":
        return [python, "-u", str(RANK), *words]
    if spawn == "deepspeed":
        # the program that `deepspeed` itself starts on every host: it takes the devices by name,
        # and needs no hostfile
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
    """Escapes a word for torchrun, which expands `$local_rank` in every argument and turns `$$`
    into `$` (torch 2.13, elastic/utils/api.py).
    """
    return word.replace("$", "$$")
