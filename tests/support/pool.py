"""Warm pools of real gloo workers, forked from one process that has imported torch, deepspeed and
the loop: seconds, paid once per session.

A case is a module-level function `case(**arguments)`; every rank of the pool runs it, and
`Pool.run` returns what each returned. A case that raises or outlives its time limit ends the pool:
the stacks of all ranks are in the error, and the next case gets a new pool.
"""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import psutil
from recipekit.hosts import op_cache
from recipekit.hosts.ports import free_port as free_port  # tests take it from here

ROOT = Path(__file__).resolve().parents[2]
# where tests find each other
FOLDERS = [
    ROOT / "tests" / "support",
    *sorted({test.parent for test in (ROOT / "tests").glob("*/test_*.py")}),
]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "dies_with_parent",  # its workers at rest would outlive tests that are killed
        "recipekit.train",
        "recipekit.parallel.pipeline",
        "deepspeed.runtime.zero.stage3",
        # imported by the first step, and with it torch's compiler: two seconds
        "deepspeed.runtime.zero.muon.original_muon",
        "transformers.models.llama.modeling_llama",
        "matplotlib.figure",
    ]
)
LINEAR: Any = None  # torch.nn.functional.linear as it was, in a worker
# alive at a time: each holds up to 0.9 GB, and real weights need 5 GB a rank of the 24 GB
MOST_WORKERS = 10
# bytes of a rank at which a pool ends after its case: what DeepSpeed 0.19.8 locks for swap files (4
# GB a rank) it never gives back
HEAVY = 2 << 30
# of one pool: each case leaves process groups with threads and sockets, and DTensor's caches keep
# their names
MOST_CASES = 20


# what `environment` sets, and tests of a GPU need as it was
OF_A_GPU = ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES")
# no program here means anything else by it: a run stops at SIGUSR1 and SIGUSR2
STACKS = signal.SIGRTMIN
# the variable that holds those two as JSON, for workers of pytest-xdist, too
BEGAN_WITH = "TESTS_BEGAN_WITH"


def environment() -> dict[str, str]:
    """What every process of the tests runs with: one thread, the CPU, no network, the project's own
    op cache.
    """
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": os.environ.get("HF_DATASETS_CACHE", str(ROOT / ".cache" / "datasets")),
        "WANDB_MODE": "offline",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_EXTENSIONS_DIR": str(op_cache.folder()),
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT / "recipes", *FOLDERS])),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


class CaseFailed(AssertionError):
    """A case raised, or did not end in time."""


class Pool:
    def __init__(self, world: int):
        self.world, self.num_cases = world, 0
        self.folder = Path(tempfile.mkdtemp(prefix=f"pool{world}_"))
        address = str(self.folder / "socket")
        with Listener(address, "AF_UNIX", backlog=world) as listener:
            port = str(free_port())
            self.processes = []
            for rank in range(world):
                own = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
                files = [str(self.folder / name) for name in (f"rank{rank}.log", f"stacks{rank}")]
                self.processes.append(
                    FORKS.Process(
                        target=_worker, args=(address, environment() | own, *files), daemon=True
                    )
                )
                self.processes[-1].start()
            connections = [listener.accept() for _ in range(world)]
        self.connections: dict[int, Connection] = {
            connection.recv(): connection for connection in connections
        }

    def run(self, case: Callable[..., Any], timeout: float = 120, **arguments: Any) -> list[Any]:
        """Runs `case(**arguments)` on every rank; returns the ranks' results in order."""
        self.num_cases += 1
        self._signal(signal.SIGCONT)
        for connection in self.connections.values():
            connection.send_bytes(pickle.dumps((case.__module__, case.__name__, arguments)))
        results: list[Any] = [None] * self.world
        errors = []
        deadline = time.monotonic() + timeout
        waiting = set(range(self.world))
        while waiting:
            for rank in sorted(waiting):
                try:
                    if not self.connections[rank].poll(0.01):
                        continue
                    ok, value = pickle.loads(self.connections[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    ok, value = (
                        False,
                        (
                            "the process ended with"
                            f" {self.processes[rank].exitcode}\n{self._log(rank)}"
                        ),
                    )
                waiting.remove(rank)
                if ok:
                    results[rank] = value
                else:
                    errors.append(f"rank {rank}: {value}")
                    # its peers hang in a collective or fail soon too
                    deadline = min(deadline, time.monotonic() + 5)
            if waiting and time.monotonic() > deadline:
                errors.append(
                    f"ranks {sorted(waiting)} did not end within {timeout} s; their"
                    f" stacks:\n{self._stacks()}"
                )
                break
        if errors:
            self.close()
            raise CaseFailed("\n".join(errors))
        return results

    def rest(self) -> None:
        """Stops the workers until the next case: the threads of a rank's groups wake a thousand
        times a second, which takes a tenth of two cores.
        """
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    @property
    def heavy(self) -> bool:
        try:
            return any(
                psutil.Process(process.pid).memory_info().rss > HEAVY for process in self.processes
            )
        except psutil.Error:  # one has just ended: the next case sees it
            return False

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()
        for process in self.processes:
            process.kill()
            process.join()

    def _stacks(self) -> str:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, STACKS)
        time.sleep(0.5)
        return "\n".join(
            f"--- rank {rank}\n{(self.folder / f'stacks{rank}').read_text()}"
            for rank in range(self.world)
        )

    def _log(self, rank: int) -> str:
        return "\n".join((self.folder / f"rank{rank}.log").read_text().splitlines()[-30:])


class Pools:
    """The pools of a test session, made when first asked for."""

    def __init__(self) -> None:
        self.pools: dict[int, Pool] = {}

    def run(
        self, world: int, case: Callable[..., Any], timeout: float = 120, **arguments: Any
    ) -> list[Any]:
        if world in self.pools and self.pools[world].num_cases == MOST_CASES:
            self.pools.pop(world).close()
        if world not in self.pools or not self.pools[world].alive:
            self.pools[world] = Pool(world)
        self.pools[world] = self.pools.pop(world)  # the last one used is the last
        while sum(self.pools) > MOST_WORKERS and len(self.pools) > 1:
            self.pools.pop(next(iter(self.pools))).close()
        for other, pool in self.pools.items():
            if other != world:
                pool.rest()
        results = self.pools[world].run(case, timeout, **arguments)
        if self.pools[world].heavy:
            self.pools.pop(world).close()
        return results

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


def _worker(address: str, own: dict[str, str], log: str, stacks: str) -> None:
    importlib.reload(importlib.import_module("dies_with_parent"))  # a fork forgets it
    os.environ.clear()
    os.environ.update(own)
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(STACKS, open(stacks, "w"), all_threads=True)  # noqa: SIM115 (open for the process's life)
    connection = Client(address, "AF_UNIX")
    connection.send(int(os.environ["RANK"]))
    import deepspeed
    import torch
    from recipekit.runtime import ending
    from recipekit.runtime.start import do_without_shm_op

    # half a second at the end of each run; tests/runtime/test_ending.py draws
    ending.draw_picture = lambda *_: None
    global LINEAR
    LINEAR = torch.nn.functional.linear
    torch.set_num_threads(1)
    do_without_shm_op()
    deepspeed.init_distributed("gloo", verbose=False)
    gc.collect()
    gc.freeze()  # what is imported stays, and need not be looked at after every case
    while True:
        try:
            module, name, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        try:
            answer = pickle.dumps(
                (True, getattr(importlib.import_module(module), name)(**arguments))
            )
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        # plain pickle: multiprocessing's would share tensors by file descriptors that die with the
        # worker
        connection.send_bytes(answer)
        _forget()
    torch.distributed.destroy_process_group()


def _forget() -> None:
    """Puts back what DeepSpeed keeps in module globals, so that one case does not change the
    next.
    """
    import torch
    import torch.distributed as dist
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.utils import groups
    from torch.distributed.device_mesh import DeviceMesh

    groups._release_process_group_references()  # the groups and the mpu of the case
    gc.collect()
    dist.barrier()  # no rank is in a collective of a group that another one destroys
    # Each group of gloo has three threads, one of which wakes a hundred times a second (torch
    # 2.13): a few hundred groups take half of two cores. DTensor's caches know a mesh by its ranks,
    # and go on with the groups of the first one.
    meshes = [found for found in gc.get_objects() if isinstance(found, DeviceMesh)]
    kept = {
        dist.group.WORLD.group_name,
        *(name for mesh in meshes for name in getattr(mesh, "_dim_group_names", [])),
    }
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_name not in kept:
            dist.destroy_process_group(group)
    torch.nn.functional.linear = LINEAR  # zero.Init replaces it for good (DeepSpeed 0.19.8)
    partition_parameters.Init.apply_param_persistence = False
    partition_parameters.Init.num_persisted_parameters = (
        partition_parameters.Init.num_persisted_elements
    ) = 0
    gc.collect()
