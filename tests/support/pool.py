"""Warm pools of real gloo workers. The workers are forked from one process that has already
imported torch, deepspeed and the training loop, so these slow imports happen only once per session.

A case is a module-level function `case(**arguments)`. Every rank of the pool runs the case, and
`Pool.run` returns the results of all ranks. If a case raises or exceeds its time limit, the pool
ends. The error then contains the stacks of all ranks, and the next case gets a new pool.
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
from recipekit.hosts.ports import free_port as free_port  # tests import it from here

ROOT = Path(__file__).resolve().parents[2]
# the folders in which tests import each other
FOLDERS = [
    ROOT / "tests" / "support",
    *sorted({test.parent for test in (ROOT / "tests").glob("*/test_*.py")}),
]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "dies_with_parent",  # without it, idle workers would outlive killed tests
        "recipekit.train",
        "recipekit.parallel.pipeline",
        "deepspeed.runtime.zero.stage3",
        # The first step imports this module together with torch's compiler, which takes two
        # seconds.
        "deepspeed.runtime.zero.muon.original_muon",
        "transformers.models.llama.modeling_llama",
        "matplotlib.figure",
    ]
)
LINEAR: Any = None  # in a worker: torch.nn.functional.linear before any change
# Maximum number of live workers. Each worker uses up to 0.9 GB. With real weights a rank needs 5
# GB, and the machine has 24 GB.
MOST_WORKERS = 10
# A pool ends after a case if one of its ranks uses more bytes than this. DeepSpeed 0.19.8 never
# frees the memory that it locks for swap files (4 GB per rank).
HEAVY = 2 << 30
# Cases per pool. Each case leaves process groups with threads and sockets behind, and DTensor's
# caches keep the groups' names.
MOST_CASES = 20


# Variables that `environment` sets. Tests on a GPU need their original values.
OF_A_GPU = ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES")
# This signal has no other meaning here, while SIGUSR1 and SIGUSR2 stop a run.
STACKS = signal.SIGRTMIN
# The variable that stores the original values as JSON, also for workers of pytest-xdist.
BEGAN_WITH = "TESTS_BEGAN_WITH"


def environment() -> dict[str, str]:
    """Return the environment of every process that the tests start.

    The process has one thread, only the CPU, no network, and the project's own op cache.
    """
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": os.environ.get("HF_DATASETS_CACHE", str(ROOT / ".cache" / "datasets")),
        "WANDB_MODE": "offline",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_EXTENSIONS_DIR": str(op_cache.find_op_folder()),
        "PYTHONPATH": import_path(ROOT / "recipes", *FOLDERS),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def import_path(*folders: Path | str) -> str:
    """Return a PYTHONPATH of `folders`, followed by the folders of the caller's PYTHONPATH.

    All tests can then run with another release of a package. This project's folders in the
    caller's PYTHONPATH are left out.
    """
    ours = {ROOT, ROOT / "recipes", ROOT / "tests", *FOLDERS}
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    packages = [folder for folder in given if folder and Path(folder).absolute() not in ours]
    return os.pathsep.join(dict.fromkeys([*map(str, folders), *packages]))


class CaseFailed(AssertionError):
    """Raised if a case raised or did not end in time."""


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
        """Run `case(**arguments)` on every rank, and return the ranks' results in order."""
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
                    # The peers of this rank hang in a collective, or fail soon as well.
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
        """Stop the workers until the next case.

        Otherwise the threads of a rank's groups wake up a thousand times a second, which uses a
        tenth of two cores.
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
        except psutil.Error:  # a process has just ended: the next case notices it
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
    """The pools of a test session; each pool is created when it is first used."""

    def __init__(self) -> None:
        self.pools: dict[int, Pool] = {}

    def run(
        self, world: int, case: Callable[..., Any], timeout: float = 120, **arguments: Any
    ) -> list[Any]:
        if world in self.pools and self.pools[world].num_cases == MOST_CASES:
            self.pools.pop(world).close()
        if world not in self.pools or not self.pools[world].alive:
            self.pools[world] = Pool(world)
        self.pools[world] = self.pools.pop(world)  # the most recently used pool is the last
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
    importlib.reload(importlib.import_module("dies_with_parent"))  # a fork loses it
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
    from recipekit.compat.deepspeed import skip_shm_op_build
    from recipekit.runtime import ending

    # Plotting takes half a second at the end of each run. tests/runtime/test_ending.py tests the
    # plots.
    ending.draw_loss_plot = lambda *_: None
    global LINEAR
    LINEAR = torch.nn.functional.linear
    torch.set_num_threads(1)
    skip_shm_op_build()
    deepspeed.init_distributed("gloo", verbose=False)
    gc.collect()
    gc.freeze()  # imported objects stay, so no collection needs to check them
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
        # Use plain pickle, because multiprocessing's pickle would share tensors by file descriptors
        # that are closed when the worker ends.
        connection.send_bytes(answer)
        _forget()
    torch.distributed.destroy_process_group()


def _forget() -> None:
    """Reset the state that DeepSpeed keeps in module globals, so that one case cannot affect the
    next.
    """
    import torch
    import torch.distributed as dist
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.utils import groups
    from torch.distributed.device_mesh import DeviceMesh

    groups._release_process_group_references()  # the groups and the mpu of the case
    gc.collect()
    dist.barrier()  # no rank may destroy a group while another rank uses it
    # Each gloo group has three threads, and one of them wakes up a hundred times a second (torch
    # 2.13). A few hundred groups use half of two cores. DTensor's caches identify a mesh by its
    # ranks, so they keep using the groups of the first mesh.
    meshes = [found for found in gc.get_objects() if isinstance(found, DeviceMesh)]
    kept = {
        dist.group.WORLD.group_name,
        *(name for mesh in meshes for name in getattr(mesh, "_dim_group_names", [])),
    }
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_name not in kept:
            dist.destroy_process_group(group)
    torch.nn.functional.linear = LINEAR  # zero.Init replaces it permanently (DeepSpeed 0.19.8)
    partition_parameters.Init.apply_param_persistence = False
    partition_parameters.Init.num_persisted_parameters = (
        partition_parameters.Init.num_persisted_elements
    ) = 0
    gc.collect()
